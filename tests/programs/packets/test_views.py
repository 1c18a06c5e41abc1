# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` of the packet path, shown by the command line in this process: connections that real packets began in
the real programs, translated sources, affinity and status; and constants that Python repeats from the C code.

tests/values/cli/test_inspect.py compares the whole output, on fakes of the maps.
"""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kbpf.cli import app
from kbpf.dataplane.bpf.map_metrics import MapCollector
from kbpf.dataplane.bpf.maps.layout import (
    Role,
    TcpState,
    idle_timeout_s,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconciler, DeviceReconcilerStatus
from kbpf.dataplane.bpf.programs.artifact import SOURCES, flatten
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServiceState
from kbpf.model.objects import Protocol
from kbpf.model.status import MAX_FAILED_DEVICES, DeviceFailure, encode
from tests.programs.node.commands.world import agent_status
from tests.programs.packets.path.single_packets import (
    CLIENT,
    NET,
    NODE,
    POD,
    ROUTER,
    Flow,
    Path_,
    end,
    host_of,
    masquerading,
    serving_node,
)
from tests.support.features import needs
from tests.support.lab.lab import until
from tests.support.packets.packets import destination, hop_by_hop, udp
from tests.support.plane import Site, desired, services
from tests.support.table import table

MASKED, LOCAL, ALSO, KEPT = 1, 2, 3, 4
LOW, HIGH = 61_000, 61_999


SERVICES = """
masked: vip1 -> pod
local: vip2 -> pod local=pod external=Local
also: vip3 -> pod local=pod external=Local
kept: vip4 -> pod affinity=600
"""


def world() -> DesiredState:
    """One Service of each relevant kind, in both families, TCP and UDP."""
    made: list[ServiceState] = []
    for v, protocol in product((4, 6), ("TCP", "UDP")):
        names = {f"vip{which}": f"LoadBalancer={end(f'{NET[v]}{which}', 80)}" for which in (MASKED, LOCAL, ALSO, KEPT)}
        text = SERVICES.replace(":", f"-{protocol.lower()}{v}:{protocol}")
        made += services(text, names | {"pod": end(POD[v], 8080)})
    return masquerading(desired(*made))


def talk(path: Path_, v: int, which: int, port: int, script: str) -> Flow:
    """Sends these packets of a client with this port through a VIP."""
    return Flow(path, v, which, end(CLIENT[v], port)).send(script)


@pytest.fixture(scope="module")
def served(artifact_cache: Path) -> Iterator[Path_]:
    with serving_node(artifact_cache, "v", world(), masquerade_ports=(LOW, HIGH)) as path:
        until("all devices have their programs", lambda: path.plane.status().ready)
        yield path


@pytest.fixture
def path(served: Path_) -> Iterator[Path_]:
    """No flows, and loopback is an uplink."""
    served.site.clear("flows", "affinity")
    served.set_loopback_role(Role.HOST)
    said = agent_status(packets=served.plane.status().packets)
    served.plane.write_status(encode(said))
    with served.site.telling():
        yield served


@pytest.fixture
def call(path: Path_, capsys) -> Callable[..., Any]:
    """Runs `kbpf inspect ...` in the node's namespace; returns exit code, stdout and stderr."""

    def inspect(*arguments: str) -> tuple[int, str, str]:
        line = ["inspect", *arguments, "--pin-dir", str(path.site.pins)]
        code = path.inside(lambda: app.call(line))
        return code, *capsys.readouterr()

    return inspect


@pytest.fixture
def show(call) -> Callable[..., Any]:
    """The same with JSON, parsed; no message on stderr may limit it. Of a list without other fields
    only the items.
    """

    def inspect(*arguments: str) -> Any:
        code, out, err = call(*arguments, "-o", "json")
        assert (code, err) == (0, "")
        document = json.loads(out)
        only_items = document.keys() == {"apiVersion", "kind", "items"}
        return document["items"] if only_items else document

    return inspect


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


def test_idle_timeouts_match_the_programs(tmp_path):
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
    """Packets of a connection through "masked" or "local", and its state then."""

    to: str
    script: str
    state: str

    @property
    def which(self) -> int:
        return MASKED if self.to == "masked" else LOCAL

    def service(self, v: int) -> str:
        return f"default/{self.to}-{'udp' if '?' in self.script else 'tcp'}{v}"


EXCHANGES = table(
    Exchange,
    """
masked | S | new
masked | S <SA | answered
masked | S <SA A FA | closing
masked | S <RA | closed
masked | S <SA A | unproven
masked | ? | new
local | S <SA A+ <A | established
local | ? <! | answered
""",
)


@needs("socket_iterator")  # otherwise the number of open connections is unknown
def test_closed_connections_are_not_counted_as_open(path: Path_, call, show):
    """In no view and in no metric, although their entries still exist."""
    for port, exchange in enumerate(EXCHANGES, 2000):
        talk(path, 4, exchange.which, port, exchange.script)
    assert {int(row["client"].rpartition(":")[2]): row["state"] for row in show("connections")} == {
        port: exchange.state for port, exchange in enumerate(EXCHANGES, 2000)
    }
    is_open = Counter(exchange.service(4) for exchange in EXCHANGES if exchange.state != "closed")
    for name, count in is_open.items():
        (detail,) = show("service", name)
        assert [(t["backend"], t["open"]) for t in detail["traffic"]] == [(end(POD[4], 8080), count)]
    status = json.loads(call("status", "-o", "json")[1])
    assert (status["packets"]["connections"], status["packets"]["entries"]) == (7, 8)
    counted = MapCollector(Pins(path.site.pins), Config()).count(lambda: None)
    assert {"/".join(port[:2]): count for port, count in counted.connections or ()} == is_open


@pytest.mark.parametrize("other", [f"{NET[4]}{MASKED}", POD[4]], ids=["question", "answer"])
def test_connection_is_as_recent_as_its_newest_entry(path: Path_, show, other: str):
    """Datagrams in one direction do not refresh the entry of the other direction."""
    flow = talk(path, 4, MASKED, 2000, "? <!")
    flow.age(20)
    flow.send("?").expire(lambda both: {*map(host_of, both)} != {CLIENT[4], other})
    (row,) = show("connections")
    assert row["idle_seconds"] < 20
    assert row["expires_seconds"] > 10


# ---- other views ---------------------------------------------------------------------------------


def test_nat_and_affinity_show_what_packets_have_written(path: Path_, show):
    for port in (61_100, 61_101):
        talk(path, 4, MASKED, port, "S <SA A")
    talk(path, 4, MASKED, 61_102, "S <RA")
    talk(path, 6, KEPT, 61_100, "?")
    path.ingress(udp(end(ROUTER[6], 61_100), end(f"{NET[6]}{KEPT}", 80), extensions=[hop_by_hop(), destination()]))
    seen = show("nat")
    assert (seen["first_port"], seen["last_port"], seen["ports"]) == (LOW, HIGH, HIGH - LOW + 1)
    assert seen["addresses"] == [NODE[4], NODE[6]]
    assert [(u["backend"], u["node_address"], u["used"], u["closed"]) for u in seen["usage"]] == [
        (f"{POD[4]}:8080", NODE[4], 3, 1),
        (f"[{POD[6]}]:8080", NODE[6], 2, 0),
    ]
    rows = {(r["source"], r["client"], r["service"]) for r in seen["items"] if r["protocol"] == "TCP"}
    service = "default/masked-tcp4"
    assert rows == {(f"{NODE[4]}:{port}", f"{CLIENT[4]}:{port}", service) for port in (61_100, 61_101, 61_102)}
    kept = {(row["client"], row["kind"], row["service"]) for row in show("affinity")}
    assert kept == {(host, "address", "default/kept-udp6") for host in (CLIENT[6], ROUTER[6])}


def test_devices_in_another_network_namespace_is_an_error(path: Path_, capsys):
    assert app.call(["inspect", "devices", "--pin-dir", str(path.site.pins)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "another network namespace" in err
    assert "nsenter" in err


def test_problems_of_the_device_thread_are_in_the_status(path: Path_, monkeypatch):
    failed = {f"d{i:02}": f"why {i}" for i in range(MAX_FAILED_DEVICES + 5)}
    thread = DeviceReconcilerStatus(failed=failed, problem="no answer")
    monkeypatch.setattr(DeviceReconciler, "status", lambda _: thread)
    said = path.plane.status().packets
    assert (said.enabled, said.problem, said.failed_count) == (True, "no answer", MAX_FAILED_DEVICES + 5)
    assert said.failed[0] == DeviceFailure("d00", "why 0")
    assert len(said.failed) == MAX_FAILED_DEVICES


@pytest.mark.parametrize("has_status", [True, False], ids=["agent's status", "no status"])
def test_views_report_that_the_packet_path_is_off(site: Site, capsys, has_status: bool):
    plane = site.open()
    plane.apply(world(), None)
    if has_status:
        plane.write_status(encode(agent_status(packets=plane.status().packets)))
    for view in ("connections", "nat", "sources"):
        assert app.call(["inspect", view, "--pin-dir", str(site.pins)]) == 0
        out, err = capsys.readouterr()
        assert out
        assert err.startswith("kbpf: the packet path is off: ")
        assert ("--packet-path false" in err) == has_status
