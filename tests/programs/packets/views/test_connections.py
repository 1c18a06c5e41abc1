# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect connections`: connections that real packets began in the real programs; and
constants that Python repeats from the C code.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kbpf.dataplane.bpf.map_metrics import MapCollector
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import FLOW, FLOW_KEY, MAPS, FlowDirection, TcpState, idle_timeout_s, pack_target
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.programs.flatten import SOURCES, flatten
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.objects import Protocol
from tests.programs.packets.views.wire import (
    ALSO,
    CLIENT,
    HIGH,
    LOCAL,
    LOW,
    MASKED,
    NODE,
    POD,
    SCTP,
    VIP,
    Run,
    Wire,
    age,
    end,
    key_between,
    world,
)
from tests.support.features import needs
from tests.support.packets.packets import sctp, tcp, udp
from tests.support.plane import Site, sites

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


def test_idle_timeouts_match_the_programs(tmp_path: Path) -> None:
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
    """Packets of a connection; the state shown, and its idle timeout in seconds."""

    name: str
    which: int
    script: str
    state: str
    timeout: int

    @property
    def protocol(self) -> str:
        return "UDP" if "?" in self.script else "TCP"


EXCHANGES = [
    Exchange("SYN", MASKED, "S", "new", 120),
    Exchange("SYN-ACK", MASKED, "S <SA", "answered", 60),
    Exchange("FIN of the client", MASKED, "S <SA A FA", "closing", 3600),
    Exchange("FIN of the backend", MASKED, "S <SA A <FA", "closing", 3600),
    Exchange("both FINs", MASKED, "S <SA A FA <FA", "closed", 120),
    Exchange("RST", MASKED, "S <RA", "closed", 120),
    Exchange("UDP request", MASKED, "?", "new", 30),
    Exchange("UDP reply", MASKED, "? <!", "answered", 30),
    Exchange("handshake", MASKED, "S <SA A", "unproven", 86_400),
    Exchange("acknowledged data", MASKED, "S <SA A+ <A", "established", 86_400),
    Exchange("Local: SYN", LOCAL, "S", "new", 120),
    Exchange("Local: acknowledged data", LOCAL, "S <SA A+ <A", "established", 86_400),
    Exchange("Local: UDP reply", LOCAL, "? <!", "answered", 30),
]


@pytest.mark.parametrize("v", [4, 6], ids=["v4", "v6"])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_connection_is_shown_as_one_row(wire: Wire, show, exchange: Exchange, v: int) -> None:
    wire.talk(v, exchange.which, 2000, exchange.script)
    (row,) = show("connections")
    names = {MASKED: "masked", LOCAL: "local"}
    assert row["service"] == f"default/{names[exchange.which]}-{exchange.protocol.lower()}{v}"
    assert row["protocol"] == exchange.protocol
    assert row["client"] == end(CLIENT[v], 2000)
    assert row["frontend"] == end(f"{VIP[v]}{exchange.which}", 80)
    assert row["backend"] == end(POD[v], 8080)
    assert row["masqueraded"] == (exchange.which == MASKED)
    host, _, port = row["seen_as"].rpartition(":")
    assert host.strip("[]") == (NODE[v] if exchange.which == MASKED else CLIENT[v])
    assert LOW <= int(port) <= HIGH if exchange.which == MASKED else port == "2000"
    assert row["state"] == exchange.state
    assert 0 <= row["idle_seconds"] <= exchange.timeout
    assert row["idle_seconds"] + row["expires_seconds"] == pytest.approx(exchange.timeout, abs=0.01)
    assert (row["expired"], row["lost"], row["replaced"], row["device"]) == (False, [], False, "")


@needs("socket_iterator")  # otherwise the number of open connections is unknown
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_closed_connection_is_not_counted_as_open(wire: Wire, call: Run, show, exchange: Exchange) -> None:
    """In no view and in no metric, although its entries still exist."""
    wire.talk(4, exchange.which, 2000, exchange.script)
    is_open = int(exchange.state != "closed")
    (row,) = show("connections")
    name = row["service"]
    (detail,) = show("service", name)
    assert [(t["backend"], t["open"]) for t in detail["traffic"]] == [(end(POD[4], 8080), is_open)]
    status = json.loads(call("status", "-o", "json")[1])
    assert (status["packets"]["connections"], status["packets"]["entries"]) == (is_open, 1)
    counted = MapCollector(Pins(wire.site.pins), Config()).count(lambda: None)
    open_now = {"/".join(port[:2]): count for port, count in counted.connections or ()}
    assert open_now == ({name: 1} if is_open else {})


def test_connections_table_matches_json(wire: Wire, call: Run) -> None:
    wire.talk(4, MASKED, 2000, "S <SA A+ <A")
    wire.talk(6, LOCAL, 2001, "?")
    code, out, err = call("connections")
    assert (code, err) == (0, "")
    title, udp6, tcp4 = out.splitlines()
    assert title.split()[:7] == ["SERVICE", "PROTOCOL", "CLIENT", "FRONTEND", "BACKEND", "BACKEND-SEES", "STATE"]
    assert udp6.split()[:5] == [
        "default/local-udp6",
        "UDP",
        "[2001:db8:9::7]:2001",
        "[2001:db8::2]:80",
        "[fd00:10:244:1::2]:8080",
    ]
    assert "the client" in udp6
    assert tcp4.split()[2:5] == ["198.51.100.7:2000", "192.0.2.1:80", "10.244.1.2:8080"]
    assert f"{NODE[4]}:" in tcp4
    assert "(node)   established" in tcp4
    assert title.index("STATE") == tcp4.index("established") == udp6.index("new")
    assert "PATH" not in title
    assert "PATH" in call("connections", "-o", "wide")[1]


@pytest.mark.parametrize("view", ["connections", "nat", "sources", "devices", "status"])
def test_yaml_matches_json(wire: Wire, call: Run, view: str) -> None:
    wire.talk(4, MASKED, 2000, "S <SA A+ <A")
    wire.talk(4, MASKED, 2001, "S <SA A+ <A")

    def still(value: Any) -> Any:
        """Without values that the clock changes."""
        if isinstance(value, dict):
            return {k: still(v) for k, v in value.items() if not k.endswith("_seconds")}
        return [still(v) for v in value] if isinstance(value, list) else value

    _, as_yaml, _ = call(view, "-o", "yaml")
    _, as_json, _ = call(view, "-o", "json")
    assert still(yaml.safe_load(as_yaml)) == still(json.loads(as_json))


def test_changed_client_port_is_shown(wire: Wire, show) -> None:
    """Two frontends of one backend, used from one client port: the backend sees two ports."""
    wire.talk(4, LOCAL, 2000, "? <!")
    wire.talk(4, ALSO, 2000, "? <!")
    first, second = show("connections")  # also, local
    assert first["service"] == "default/also-udp4"
    assert first["seen_as"] != first["client"] == second["client"] == second["seen_as"]
    assert first["seen_as"].startswith(f"{CLIENT[4]}:")
    assert not first["masqueraded"]


@pytest.mark.parametrize("v", [4, 6], ids=["v4", "v6"])
def test_connection_of_the_node_shows_its_device(wire: Wire, show, call: Run, v: int) -> None:
    """The hooks left the socket alone; its SYN is seen at egress."""
    syn = tcp(end(NODE[v], 2000), end(f"{VIP[v]}{MASKED}", 80), flags="S")
    wire.verdict(syn, "tc_egress")
    (row,) = show("connections")
    assert (row["device"], row["path"], row["masqueraded"]) == ("lo", "direct", False)
    assert row["client"] == row["seen_as"] == end(NODE[v], 2000)
    assert (row["state"], row["lost"]) == ("new", [])
    assert "from this node, through lo" in call("connections")[1]


def test_sctp_association_is_shown(wire: Wire, show) -> None:
    wire.verdict(sctp(end(CLIENT[4], 2000), end(f"{VIP[4]}{SCTP}", 80)))
    (row,) = show("connections")
    assert (row["protocol"], row["service"]) == ("SCTP", "default/sctp")
    assert (row["state"], row["idle_seconds"] + row["expires_seconds"]) == ("new", pytest.approx(30, abs=0.01))


LOST = [(CLIENT[4], f"{VIP[4]}{MASKED}", ["flow"]), (CLIENT[4], POD[4], ["reply"]), (NODE[4], POD[4], ["source"])]


@pytest.mark.parametrize(("one", "other", "lost"), LOST, ids=str)
def test_evicted_entry_of_a_connection_is_named(
    wire: Wire, show, call: Run, one: str, other: str, lost: list[str]
) -> None:
    wire.talk(4, MASKED, 2000, "S <SA A+ <A")
    with wire.site.pinned("flows") as found:
        assert found.delete(key_between(found, one, other))
    (row,) = show("connections")
    assert (row["lost"], row["replaced"], row["state"]) == (lost, False, "established")
    assert f"missing entries: {lost[0]}" in call("connections")[1]


def test_reused_client_port_shows_the_new_connection_only(wire: Wire, show) -> None:
    """The client uses its port again, and the Service has another backend by then."""
    wire.talk(4, MASKED, 2000, "S <SA A FA <FA A")
    try:
        wire.plane.apply(world(backend=8081), None)
        wire.pass_(tcp(end(CLIENT[4], 2000), end(f"{VIP[4]}{MASKED}", 80), flags="S"))
    finally:
        wire.plane.apply(world(), None)
    (row,) = show("connections")
    assert (row["backend"], row["state"], row["lost"]) == (f"{POD[4]}:8081", "new", [])
    assert not row["replaced"]


def test_expired_connections_are_shown_with_expired(wire: Wire, call: Run) -> None:
    wire.talk(4, MASKED, 2000, "?")
    age(wire, 31)
    code, out, err = call("connections", "-o", "json")
    assert (code, json.loads(out)["items"]) == (0, [])
    assert err == "kbpf: and 1 expired connections: --expired shows them\n"
    code, out, err = call("connections", "-o", "json", "--expired")
    (row,) = json.loads(out)["items"]
    assert (row["expired"], row["state"], err) == (True, "new", "")
    assert row["expires_seconds"] < 0
    assert "expired" in call("connections", "--expired")[1]
    answer = udp(end(POD[4], 8080), row["seen_as"], b"!")
    assert wire.pass_(answer) == answer, "the programs agree"


@pytest.mark.parametrize(("one", "other"), [ends for *ends, _ in LOST[:2]], ids=str)
def test_connection_is_as_recent_as_its_newest_entry(wire: Wire, show, one: str, other: str) -> None:
    """Datagrams in one direction do not refresh the entry of the other direction."""
    wire.talk(4, MASKED, 2000, "? <!")
    age(wire, 20)
    wire.talk(4, MASKED, 2000, "?")
    with wire.site.pinned("flows") as found:
        lives = key_between(found, one, other)
        for key, raw in list(found.items()):
            if key != lives:
                found.update(key, bytes(8) + raw[8:])
    (row,) = show("connections")
    assert row["idle_seconds"] < 20
    assert row["expires_seconds"] > 10


class Query(NamedTuple):
    """Options, and the client ports of the connections that are shown."""

    options: tuple[str, ...]
    ports: set[int]


QUERIES = [
    Query((), {2000, 2001, 2002, 2003}),
    Query(("--service", "default/masked-tcp4"), {2000}),
    Query(("--service", "masked-udp4"), {2001}),
    Query(("--client", CLIENT[6]), {2002}),
    Query(("--client", "198.51.100.8"), set()),
    Query(("--backend", POD[4]), {2000, 2001, 2003}),
    Query(("--backend", "10.244.1.3"), set()),
    Query(("--state", "new"), {2001, 2003}),
    Query(("--state", "established"), {2000, 2002}),
    Query(("--state", "closed"), set()),
    Query(("--state", "new", "--service", "default/local-tcp4"), {2003}),
]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: " ".join(query.options))
def test_connections_are_filtered(wire: Wire, show, query: Query) -> None:
    wire.talk(4, MASKED, 2000, "S <SA A+ <A")
    wire.talk(4, MASKED, 2001, "?")
    wire.talk(6, LOCAL, 2002, "S <SA A+ <A")
    wire.talk(4, LOCAL, 2003, "S")
    rows = show("connections", *query.options)
    assert {int(row["client"].rpartition(":")[2]) for row in rows} == query.ports


def test_limit_shows_how_many_more_there_are(wire: Wire, call: Run) -> None:
    for port in range(2000, 2005):
        wire.talk(4, MASKED, port, "S")
    code, out, err = call("connections", "--limit", "2", "-o", "json")
    assert [row["client"] for row in json.loads(out)["items"]] == [end(CLIENT[4], p) for p in (2000, 2001)]
    assert (code, err) == (0, "kbpf: and 3 more rows\n")
    assert call("connections", "--limit", "5")[2] == ""
    code, out, err = call("nat", "--limit", "4", "-o", "json")
    assert (code, len(json.loads(out)["items"])) == (0, 4)
    assert err == "kbpf: and 1 more rows\n"


WRONG = [
    (("--client", "here"), 2, "--client"),
    (("--backend", "10.0.0"), 2, "--backend"),
    (("--state", "open"), 2, "--state"),
    (("--limit", "-1"), 2, "--limit"),
    (("--service", "default/no"), 1, "no Service default/no is programmed"),
]


@pytest.mark.parametrize(("options", "code", "says"), WRONG)
def test_invalid_filters_are_errors(call: Run, options: tuple[str, ...], code: int, says: str):
    ended, out, err = call("connections", *options)
    assert (ended, out) == (code, "")
    assert says in err


# ---- the default maximum -------------------------------------------------------------------------

MANY = 131_072
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
    """The default maximum of connections, all masqueraded, written as packets would."""
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
def test_connections_of_a_full_map_take_tens_of_megabytes(full_site: Site, site: Site, output: str) -> None:
    """More than without connections: Python and the libraries depend on the machine."""
    site.open().apply(world(), None)
    lines, megabytes = measure(full_site, output)
    assert lines == (MANY + 1 if output == "table" else MANY * 20 + 6)
    assert megabytes - measure(site, output)[1] < 100
