# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect connections`: connections that real packets began in the real programs; and
constants that Python repeats from the C code.
"""

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.map_metrics import MapCollector
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import FLOW, FLOW_KEY, MAPS, FlowDirection, TcpState, idle_timeout_s, pack_target
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.programs.artifact import SOURCES, flatten
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.objects import Protocol
from tests.programs.packets.path.single_packets import CLIENT, NODE, POD, end
from tests.programs.packets.views.wire import ALSO, HIGH, LOCAL, LOW, MASKED, VIP, Run, Wire, age, key_between, world
from tests.support.features import needs
from tests.support.packets.packets import tcp
from tests.support.plane import Site, sites
from tests.support.table import table

# ---- timeouts in the C code ----------------------------------------------------------------------

TRACK = """
#include "tc/flow.h"
int probe(struct __sk_buff *skb)
{
	struct flow flow = {.state = skb->mark & 0xff};

	flow.client.protocol = skb->mark >> 8;
	return timeout_of(&flow) / SECOND;
}
"""
ASK = """
import json, os, sys
os.environ["BCC_KERNEL_SOURCE"] = sys.argv[1]
from bcc import BPF
from kbpf.kernel.bpf.objects import Program
from tests.support.packets.test_run import SkbContext, run
function = BPF(text=sys.stdin.read(), cflags=["-Wno-everything"]).load_func("probe", BPF.SCHED_CLS)
program = Program(function.fd, "probe")
print(json.dumps([run(program, bytes(64), context=SkbContext(mark=int(m)).pack()).retval
                  for m in sys.argv[2].split(",")]))
"""


def test_idle_timeouts_match_the_programs(tmp_path: Path):
    """timeout_of() itself runs, for every protocol and state, and for states without a name."""
    shutil.copytree(SOURCES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "scratch.c").write_text(TRACK)
    cases = [(p, s) for p in Protocol for s in range(len(TcpState) + 2)]
    marks = ",".join(str(protocol << 8 | state) for protocol, state in cases)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(SOURCES), marks],
        input=flatten("scratch", tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    timeouts = dict(zip(cases, json.loads(done.stdout), strict=True))
    assert timeouts == {(p, s): idle_timeout_s(p, s) for p, s in cases}
    assert timeouts[Protocol.TCP, TcpState.ESTABLISHED] == 86_400
    assert timeouts[Protocol.UDP, TcpState.ESTABLISHED] == 120
    assert timeouts[Protocol.SCTP, TcpState.ESTABLISHED] == 210


# ---- connections ---------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """Packets of a connection through "masked" or "local"; the state shown, its idle timeout in seconds."""

    to: str
    script: str
    state: str
    timeout: int

    @property
    def which(self) -> int:
        return MASKED if self.to == "masked" else LOCAL

    def service(self, v: int) -> str:
        return f"default/{self.to}-{'udp' if '?' in self.script else 'tcp'}{v}"


EXCHANGES = table(
    Exchange,
    """
masked | S | new | 120
masked | S <SA | answered | 60
masked | S <SA A FA | closing | 3600
masked | S <RA | closed | 120
masked | S <SA A | unproven | 86400
masked | ? | new | 30
local | S <SA A+ <A | established | 86400
local | ? <! | answered | 30
""",
)


@pytest.mark.parametrize("v", [4, 6], ids=["v4", "v6"])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.script)
def test_connection_is_shown_as_one_row(wire: Wire, show, exchange: Exchange, v: int):
    wire.talk(v, exchange.which, 2000, exchange.script)
    (row,) = show("connections")
    assert row["service"] == exchange.service(v)
    assert row["protocol"] == ("UDP" if "?" in exchange.script else "TCP")
    assert (row["client"], row["backend"]) == (end(CLIENT[v], 2000), end(POD[v], 8080))
    assert row["frontend"] == end(f"{VIP[v]}{exchange.which}", 80)
    assert row["masqueraded"] == (exchange.which == MASKED)
    host, _, port = row["seen_as"].rpartition(":")
    assert host.strip("[]") == (NODE[v] if exchange.which == MASKED else CLIENT[v])
    assert LOW <= int(port) <= HIGH if exchange.which == MASKED else port == "2000"
    assert row["state"] == exchange.state
    assert 0 <= row["idle_seconds"] <= exchange.timeout
    assert row["idle_seconds"] + row["expires_seconds"] == pytest.approx(exchange.timeout, abs=0.01)
    assert (row["expired"], row["lost"], row["replaced"], row["device"]) == (False, [], False, "")


@needs("socket_iterator")  # otherwise the number of open connections is unknown
def test_closed_connections_are_not_counted_as_open(wire: Wire, call: Run, show):
    """In no view and in no metric, although their entries still exist."""
    for port, exchange in enumerate(EXCHANGES, 2000):
        wire.talk(4, exchange.which, port, exchange.script)
    is_open = Counter(exchange.service(4) for exchange in EXCHANGES if exchange.state != "closed")
    for name, count in is_open.items():
        (detail,) = show("service", name)
        assert [(t["backend"], t["open"]) for t in detail["traffic"]] == [(end(POD[4], 8080), count)]
    status = json.loads(call("status", "-o", "json")[1])
    assert (status["packets"]["connections"], status["packets"]["entries"]) == (7, 8)
    counted = MapCollector(Pins(wire.site.pins), Config()).count(lambda: None)
    assert {"/".join(port[:2]): count for port, count in counted.connections or ()} == is_open


def test_changed_client_port_is_shown(wire: Wire, show):
    """Two frontends of one backend, used from one client port: the backend sees two ports."""
    wire.talk(4, LOCAL, 2000, "? <!")
    wire.talk(4, ALSO, 2000, "? <!")
    first, second = show("connections")  # also, local
    assert first["service"] == "default/also-udp4"
    assert first["seen_as"] != first["client"] == second["client"] == second["seen_as"]
    assert first["seen_as"].startswith(f"{CLIENT[4]}:")
    assert not first["masqueraded"]


@pytest.mark.parametrize("v", [4, 6], ids=["v4", "v6"])
def test_connection_of_the_node_shows_its_device(wire: Wire, show, call: Run, v: int):
    """The hooks left the socket alone; its SYN is seen at egress."""
    syn = tcp(end(NODE[v], 2000), end(f"{VIP[v]}{MASKED}", 80), flags="S")
    wire.path.egress(syn)
    (row,) = show("connections")
    assert (row["device"], row["path"], row["masqueraded"]) == ("lo", "direct", False)
    assert row["client"] == row["seen_as"] == end(NODE[v], 2000)
    assert (row["state"], row["lost"]) == ("new", [])
    assert "from this node, through lo" in call("connections")[1]


@pytest.mark.parametrize("other", [f"{VIP[4]}{MASKED}", POD[4]], ids=["question", "answer"])
def test_connection_is_as_recent_as_its_newest_entry(wire: Wire, show, other: str):
    """Datagrams in one direction do not refresh the entry of the other direction."""
    wire.talk(4, MASKED, 2000, "? <!")
    age(wire, 20)
    wire.talk(4, MASKED, 2000, "?")
    with wire.site.pinned("flows") as found:
        lives = key_between(found, CLIENT[4], other)
        for key, raw in list(found.items()):
            if key != lives:
                found.update(key, bytes(8) + raw[8:])
    (row,) = show("connections")
    assert row["idle_seconds"] < 20
    assert row["expires_seconds"] > 10


# ---- many connections ----------------------------------------------------------------------------

MANY = 32_768
MEASURED = """
import contextlib, io, sys
from kbpf.cli import app
class Count(io.TextIOBase):
    lines = 0
    def write(self, text):
        self.lines += text.count("\\n")
        return len(text)
out = Count()
with contextlib.redirect_stdout(out):
    code = app.call(sys.argv[1:])
with open("/proc/self/status") as status:
    peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print(code, out.lines, int(peak) // 1024)
"""


@pytest.fixture(scope="module")
def full_site(artifact_cache: Path) -> Iterator[Site]:
    """A quarter of the default maximum of connections, all masqueraded, written as packets would."""
    with sites(artifact_cache) as make:
        site = make()
        site.open().apply(world(), None)
        now = time.monotonic_ns()
        keys, values = bytearray(), bytearray()
        frontend = pack_target(parse_addr("192.0.2.1"), 80, 6)
        for i in range(MANY):
            client = pack_target(parse_addr(f"198.18.{i >> 8 & 255}.{i & 255}"), 1024 + i // 4, 6)
            backend = pack_target(parse_addr(f"10.244.0.{i % 200}"), 8080, 6)
            for part in (FlowDirection.ORIGINAL, FlowDirection.REPLY):
                values += FLOW.pack(
                    now,
                    client,
                    frontend,
                    backend,
                    bytes(16),
                    bytes(2),
                    client[16:18],
                    i % 9,
                    1,
                    TcpState.ESTABLISHED,
                    0,
                    0,
                    part,
                    0,
                    bytes(32),
                    0,
                    0,
                    bytes(48),
                )
            keys += FLOW_KEY.pack(client, frontend) + FLOW_KEY.pack(backend, client)
        # An LRU map evicts some entries before it is full, so it is a quarter larger.
        with pinning.make_map(MAPS["flows"], 2 * MANY * 5 // 4) as made:
            pinning.replace_pin(Pins(site.pins), made, "flows")
            made.update_batch(bytes(keys), bytes(values))
        yield site


def measure(site: Site, output: str) -> tuple[int, int]:
    """How many lines the command prints, and its peak of memory in MiB."""
    line = ["inspect", "connections", "-o", output, "--pin-dir", str(site.pins)]
    done = subprocess.run([sys.executable, "-c", MEASURED, *line], capture_output=True, text=True, check=True)
    code, lines, megabytes = map(int, done.stdout.split())
    assert code == 0
    return lines, megabytes


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_page_of_many_connections_takes_tens_of_megabytes(full_site: Site, site: Site, output: str):
    """More than without connections: Python and the libraries depend on the machine."""
    site.open().apply(world(), None)
    lines, megabytes = measure(full_site, output)
    assert lines == (MANY + 1 if output == "table" else MANY * 20 + 6)
    assert megabytes - measure(site, output)[1] < 25
