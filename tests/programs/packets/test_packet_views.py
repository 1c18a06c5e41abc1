# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` of the packet path: connections that real packets began in the real programs,
shown by the command line in this process; and constants that Python repeats from the C code.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from kbpf.agent.agent import Agent
from kbpf.checks import packet_path
from kbpf.checks.row import CheckRow
from kbpf.cli import app
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import (
    DEVICE,
    FLOW,
    FLOW_KEY,
    MAPS,
    U32,
    FlowDirection,
    Role,
    TcpState,
    idle_timeout_s,
    pack_target,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.metrics import MapCollector
from kbpf.dataplane.bpf.packet_path.attach import DeviceAttachments
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconciler, DeviceReconcilerStatus
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.programs import compile
from kbpf.dataplane.bpf.programs.flatten import SOURCES, flatten
from kbpf.errors import CompileError, KernelError
from kbpf.kernel.bpf import tc
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState
from kbpf.model.objects import Protocol
from kbpf.model.status import MAX_FAILED_DEVICES, DeviceFailure, encode
from kbpf.views.packet_path import devices
from tests.programs.node.test_views import agent_status
from tests.support.lab.lab import ip, until
from tests.support.lab.lab import run as command
from tests.support.packets.packets import Talk, frame, sctp, tcp, udp
from tests.support.packets.parse import parse
from tests.support.packets.test_run import TC_ACT_SHOT, run
from tests.support.plane import Site, desired, service, sites

UDP = Protocol.UDP
NODE = {4: "198.18.0.1", 6: "fd00:198:18::1"}
CLIENT = {4: "198.51.100.7", 6: "2001:db8:9::7"}
POD = {4: "10.244.1.2", 6: "fd00:10:244:1::2"}
VIP = {4: "192.0.2.", 6: "2001:db8::"}
MASKED, LOCAL, ALSO, GUARDED, NONE_ALLOWED, KEPT, SCTP = 1, 2, 3, 4, 5, 6, 7
LOW, HIGH = 61_000, 61_999


def end(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def world(backend: int = 8080) -> DesiredState:
    """One Service of each relevant kind, in both families, TCP and UDP."""
    made = []
    for v in (4, 6):
        for protocol in (Protocol.TCP, Protocol.UDP):
            pod, suffix = end(POD[v], backend), protocol.name.lower() + str(v)

            def one(which: int, name: str, to: str = pod, **more: Any) -> Any:
                vip = f"LoadBalancer={end(f'{VIP[v]}{which}', 80)}"  # noqa: B023
                return service(f"{name}-{suffix}", vip, to, protocol, **more)  # noqa: B023

            made += [
                one(MASKED, "masked"),
                one(LOCAL, "local", local=pod, external_local=True),
                one(ALSO, "also", local=pod, external_local=True),
                one(GUARDED, "guarded", ranges="198.51.100.0/24" if v == 4 else "2001:db8:9::/48"),
                one(NONE_ALLOWED, "nobody", restricted=True),
                one(KEPT, "kept", affinity_timeout=600),
            ]
    vip, pod = f"LoadBalancer={end(f'{VIP[4]}{SCTP}', 80)}", end(POD[4], 80)
    made.append(service("sctp", vip, pod, Protocol.SCTP))
    state = desired(*made)
    addresses = tuple(parse_addr(NODE[v]) for v in (4, 6))
    return msgspec.structs.replace(state, masquerade_addresses=addresses)


class Wire:
    """The programs of one node, whose loopback is described as an uplink, and packets
    through them.
    """

    def __init__(self, site: Site, plane: BpfPlane, programs: dict[str, Program]) -> None:
        self.site = site
        self.plane = plane
        self._programs = programs

    def pass_(self, packet: bytes) -> bytes:
        """Runs ingress and egress; returns the packet as it leaves."""
        for name in ("tc_ingress", "tc_egress"):
            packet = run(self._programs[name], frame(packet)).packet_out[14:]
        return packet

    def verdict(self, packet: bytes, program: str = "tc_ingress") -> int:
        """The verdict of one program."""
        return run(self._programs[program], frame(packet)).retval

    def talk(self, v: int, which: int, port: int, script: str) -> None:
        """Sends the packets of a connection to a VIP. `script`: segments in the notation of
        packets.Talk, separated by blanks, or ``?`` and ``!`` for datagrams; ``<`` marks those of
        the backend.
        """
        client, vip, pod = end(CLIENT[v], port), end(f"{VIP[v]}{which}", 80), end(POD[v], 8080)
        seen, talk = client, Talk()
        for word in script.split():
            datagram = word.strip("<") in "?!"
            ends = (pod, seen) if "<" in word else (client, vip)
            packet = udp(*ends, b"x") if datagram else talk.segment(word, *ends)
            out = parse(self.pass_(packet), l2=False)
            if "<" in word:
                assert (out.source, out.destination) == (vip, client)
            else:
                assert out.destination == pod
                seen = out.source


@pytest.fixture(scope="module")
def node(artifact_cache: Path) -> Iterator[Wire]:
    where = f"kbpv{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        ip(
            "link set lo up",
            "link add cni0 type bridge",
            "link add out0 type veth peer name port0",
            "link set port0 master cni0",
            netns=where,
        )
        with sites(artifact_cache) as make:
            site = make(node=where)
            plane = site.open(packet_path=True, masquerade_ports=(LOW, HIGH))
            netns.run_in(Path("/run/netns") / where, lambda: plane.apply(world(), None))
            until("all devices have their programs", plane.is_ready)
            folder = next(site.pins.glob("programs-tc-*"))
            programs = {n: Program.open(folder / n) for n in ("tc_ingress", "tc_egress")}
            yield Wire(site, plane, programs)
            for program in programs.values():
                program.close()
    finally:
        command("ip", "netns", "del", where)


@pytest.fixture
def wire(node: Wire) -> Iterator[Wire]:
    """No flows, and loopback is an uplink."""
    for name in ("flows", "affinity"):
        with node.site.pinned(name) as found:
            found.delete_batch(b"".join(key for key, _ in found.items()))
    with node.site.pinned("devices") as devices:
        devices.update(U32.pack(1), DEVICE.pack(Role.HOST, 14, 0, bytes(6), bytes(16), bytes(16)))
    said = agent_status(packets=node.plane.packet_status())
    node.plane.write_status(encode(said))
    with node.site.telling():
        yield node


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(wire: Wire, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `kbpf inspect ...` in the node's namespace; returns exit code, stdout and stderr."""

    def inspect(*arguments: str) -> tuple[int, str, str]:
        line = ["inspect", *arguments, "--pin-dir", str(wire.site.pins)]
        code = netns.run_in(Path("/run/netns") / str(wire.site.node), lambda: app.call(line))
        return code, *capsys.readouterr()

    return inspect


@pytest.fixture
def show(call: Run) -> Callable[..., Any]:
    """The same with JSON, parsed; no message on stderr may limit it."""

    def inspect(*arguments: str) -> Any:
        code, out, err = call(*arguments, "-o", "json")
        assert (code, err) == (0, "")
        return json.loads(out)

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


def test_idle_timeouts_match_the_programs(tmp_path: Path) -> None:
    """timeout_of() itself runs, for every protocol and state, and for states without a name."""
    shutil.copytree(SOURCES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "scratch.c").write_text(TRACK)
    cases = [(p, s) for p in Protocol for s in range(len(TcpState) + 2)]
    marks = ",".join(str(protocol << 8 | state) for protocol, state in cases)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(SOURCES), marks],
        input=flatten("scratch", tmp_path), capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
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


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_closed_connection_is_not_counted_as_open(
    wire: Wire, call: Run, show, exchange: Exchange
) -> None:
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
    assert title.split()[:7] == [
        "SERVICE", "PROTOCOL", "CLIENT", "FRONTEND", "BACKEND", "BACKEND-SEES", "STATE",
    ]  # fmt: skip
    assert udp6.split()[:5] == [
        "default/local-udp6", "UDP", "[2001:db8:9::7]:2001", "[2001:db8::2]:80",
        "[fd00:10:244:1::2]:8080",
    ]  # fmt: skip
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
    assert (row["state"], row["idle_seconds"] + row["expires_seconds"]) == (
        "new", pytest.approx(30, abs=0.01),
    )  # fmt: skip


LOST = [
    (CLIENT[4], f"{VIP[4]}{MASKED}", ["flow"]),
    (CLIENT[4], POD[4], ["reply"]),
    (NODE[4], POD[4], ["source"]),
]


def key_between(found: Map, one: str, other: str, port: int = 0) -> bytes:
    """The key of the only entry with these two addresses and, if given, this port."""
    both = {bytes(parse_addr(one)), bytes(parse_addr(other))}
    keys = [key for key, _ in found.items() if {key[:16], key[20:36]} == both]
    ports = port.to_bytes(2, "big")
    (key,) = [key for key in keys if not port or ports in (key[16:18], key[36:38])]
    return key


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
    wire.talk(4, MASKED, 2000, "S <SA A FA <FA")
    try:
        wire.plane.apply(world(backend=8081), None)
        wire.pass_(tcp(end(CLIENT[4], 2000), end(f"{VIP[4]}{MASKED}", 80), flags="S"))
    finally:
        wire.plane.apply(world(), None)
    (row,) = show("connections")
    assert (row["backend"], row["state"], row["lost"]) == (f"{POD[4]}:8081", "new", [])
    assert not row["replaced"]


def age(wire: Wire, seconds: float) -> None:
    """Makes all flows idle for `seconds`, at most since the clock began."""
    with wire.site.pinned("flows") as found:
        for key, raw in list(found.items()):
            last = max(0, int.from_bytes(raw[:8], "little") - int(seconds * 1e9))
            found.update(key, last.to_bytes(8, "little") + raw[8:])


def test_expired_connections_are_shown_with_expired(wire: Wire, call: Run) -> None:
    wire.talk(4, MASKED, 2000, "?")
    age(wire, 31)
    code, out, err = call("connections", "-o", "json")
    assert (code, json.loads(out)) == (0, [])
    assert err == "kbpf: and 1 expired connections: --expired shows them\n"
    code, out, err = call("connections", "-o", "json", "--expired")
    (row,) = json.loads(out)
    assert (row["expired"], row["state"], err) == (True, "new", "")
    assert row["expires_seconds"] < 0
    assert "expired" in call("connections", "--expired")[1]
    answer = udp(end(POD[4], 8080), row["seen_as"], b"!")
    assert wire.pass_(answer) == answer, "the programs agree"


@pytest.mark.parametrize(("one", "other"), [ends for *ends, _ in LOST[:2]], ids=str)
def test_connection_is_as_recent_as_its_newest_entry(
    wire: Wire, show, one: str, other: str
) -> None:
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
    assert row["idle_seconds"] < 20 < row["expires_seconds"]


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
    assert [row["client"] for row in json.loads(out)] == [end(CLIENT[4], p) for p in (2000, 2001)]
    assert (code, err) == (0, "kbpf: and 3 more connections\n")
    assert call("connections", "--limit", "5")[2] == ""
    code, out, err = call("nat", "--limit", "4", "-o", "json")
    assert (code, len(json.loads(out)["rows"])) == (0, 4)
    assert err == "kbpf: and 1 more sources\n"


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


# ---- translated sources --------------------------------------------------------------------------


def test_nat_shows_sources_and_port_usage(wire: Wire, show, call: Run) -> None:
    for port in (61_100, 61_101, 61_102):
        wire.talk(4, MASKED, port, "S <SA A")
    wire.talk(4, MASKED, 61_103, "S <RA")
    wire.talk(4, MASKED, 61_100, "?")
    wire.talk(6, MASKED, 61_100, "?")
    wire.talk(4, LOCAL, 61_104, "S")
    seen = show("nat")
    assert (seen["first_port"], seen["last_port"], seen["ports"]) == (LOW, HIGH, HIGH - LOW + 1)
    assert seen["addresses"] == [NODE[4], NODE[6]]
    used = [
        (u["backend"], u["protocol"], u["node_address"], u["used"], u["closed"])
        for u in seen["usage"]
    ]
    assert used == [
        (f"{POD[4]}:8080", "TCP", NODE[4], 4, 1),
        (f"{POD[4]}:8080", "UDP", NODE[4], 1, 0),
        (f"[{POD[6]}]:8080", "UDP", NODE[6], 1, 0),
    ]
    assert not any(u["alarm"] for u in seen["usage"])
    rows = [r for r in seen["rows"] if r["protocol"] == "TCP"]
    assert [(r["source"], r["client"]) for r in rows] == [
        (f"{NODE[4]}:{port}", f"{CLIENT[4]}:{port}") for port in (61_100, 61_101, 61_102, 61_103)
    ]
    assert {r["service"] for r in rows} == {"default/masked-tcp4"}
    assert {r["backend"] for r in rows} == {f"{POD[4]}:8080"}
    code, out, err = call("nat")
    assert (code, err) == (0, "")
    assert f"{LOW} to {HIGH} (1000)" in out
    assert f"{NODE[4]}:61103" in out
    age(wire, 200)
    assert [u["used"] for u in show("nat")["usage"]] == [3], "expired flows hold no port"


def test_nat_counts_failures_to_find_a_port(wire: Wire, show, call: Run) -> None:
    """All ports of the range are taken by established connections to this backend."""
    wire.talk(4, MASKED, 61_000, "? <!")
    with wire.site.pinned("flows") as found:
        key = key_between(found, NODE[4], POD[4])
        raw = found.lookup(key)
        assert raw is not None
        for port in range(LOW, HIGH + 1):
            at = port.to_bytes(2, "big")
            changed = raw[:84] + at + at + raw[88:96] + bytes([TcpState.ESTABLISHED]) + raw[97:]
            place = 16 if key[:16] == bytes(parse_addr(NODE[4])) else 36
            found.update(key[:place] + at + key[place + 2 :], changed[:24] + at + changed[26:])
        full = show("nat")
        before = full["failures"]
        (usage,) = full["usage"]
        assert (usage["used"], usage["percent"], usage["alarm"]) == (1000, 100.0, True)
        assert "100.0% !" in call("nat")[1]
        sent = udp(end("198.51.100.99", 5), end(f"{VIP[4]}{MASKED}", 80), b"?")
        assert wire.verdict(sent) == TC_ACT_SHOT
    assert show("nat")["failures"] == before + 1


# ---- source ranges -------------------------------------------------------------------------------


def test_sources_shows_ranges_vips_and_dropped_packets(wire: Wire, show, call: Run) -> None:
    before = show("sources")["not_allowed"]
    guarded = end(f"{VIP[4]}{GUARDED}", 80)
    assert wire.verdict(tcp("198.51.101.1:5", guarded, flags="S")) == TC_ACT_SHOT
    assert wire.verdict(tcp(end(CLIENT[4], 5), guarded, flags="S")) != TC_ACT_SHOT
    seen = show("sources")
    assert seen["not_allowed"] == before + 1
    assert [(s["service"], s["ranges"], s["addresses"]) for s in seen["services"]] == [
        ("default/guarded-tcp4", ["198.51.100.0/24"], ["192.0.2.4:80/TCP"]),
        ("default/guarded-tcp6", ["2001:db8:9::/48"], ["[2001:db8::4]:80/TCP"]),
        ("default/guarded-udp4", ["198.51.100.0/24"], ["192.0.2.4:80/UDP"]),
        ("default/guarded-udp6", ["2001:db8:9::/48"], ["[2001:db8::4]:80/UDP"]),
        ("default/nobody-tcp4", [], ["192.0.2.5:80/TCP"]),
        ("default/nobody-tcp6", [], ["[2001:db8::5]:80/TCP"]),
        ("default/nobody-udp4", [], ["192.0.2.5:80/UDP"]),
        ("default/nobody-udp6", [], ["[2001:db8::5]:80/UDP"]),
    ]
    code, out, _ = call("sources")
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert code == 0
    assert lines["default/nobody-tcp4"].split()[1:] == ["192.0.2.5:80/TCP", "none"]
    assert f"{before + 1} packets" in lines["dropped"]


def test_affinity_shows_client_addresses(wire: Wire, show, call: Run) -> None:
    for v in (4, 6):
        wire.talk(v, KEPT, 2000, "S <SA A+ <A")
    found = [(r["client"], r["kind"], r["service"], r["backend"]) for r in show("affinity")]
    assert found == [
        (CLIENT[4], "address", "default/kept-tcp4", f"{POD[4]}:8080"),
        (CLIENT[6], "address", "default/kept-tcp6", f"[{POD[6]}]:8080"),
    ]
    lines = call("affinity")[1].splitlines()
    assert [line.split()[0] for line in lines] == ["CLIENT", CLIENT[4], CLIENT[6]]


# ---- devices, status -----------------------------------------------------------------------------


def test_devices_show_role_and_programs(wire: Wire, show, call: Run) -> None:
    rows = {row["device"]: row for row in show("devices")}
    parts = {name: (row["role"], row["reason"]) for name, row in rows.items()}
    assert parts["lo"] == ("skipped", "loopback")
    assert parts["port0"] == ("skipped", "port of cni0")
    assert parts["cni0"] == ("pod", "bridge of pods, ports: 1")
    assert parts["out0"] == ("host", "veth")
    for name in ("cni0", "out0"):
        assert rows[name]["ingress"].startswith("tc_ingress (")
        assert rows[name]["egress"].startswith("tc_egress (")
        assert rows[name]["l2_header"] == 14
        assert rows[name]["problem"] == ""
    assert rows["cni0"]["flags"] == ["pods"]
    assert rows["out0"]["flags"] == []
    assert (rows["port0"]["ingress"], rows["port0"]["l2_header"]) == ("", None)
    assert "bridge of pods" in call("devices")[1]


def test_devices_show_clsact_without_tcx(
    wire: Wire, artifact_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TCX the programs are attached to clsact qdiscs."""
    monkeypatch.setattr(tc, "probe_tcx", lambda: Probe(False, "EINVAL"))
    where = Path("/run/netns") / str(wire.site.node)
    with sites(artifact_cache) as make:
        site = make(node=wire.site.node)
        plane = site.open(packet_path=True, devices=("out0",), excluded_devices=("cni0",))
        netns.run_in(where, lambda: plane.apply(world(), None))
        until("all devices have their programs", plane.is_ready)

        def rows() -> dict[str, Any]:
            held = snapshot.read(site.pins, devices.NEEDS)
            return {row.device: row for row in devices.build_rows(held)}

        out0 = netns.run_in(where, rows)["out0"]
        assert (out0.ingress, out0.egress) == ("tc_ingress (clsact)", "tc_egress (clsact)")
        (row,) = [r for r in packet_path.check_packet_path(site.pins) if r.name == "TCX"]
        assert row.result == "no"
        assert "clsact qdiscs are used instead" in row.detail
        assert "CONFIG_NET_CLS_BPF" in row.advice
        netns.run_in(where, plane.remove)


def test_devices_in_another_network_namespace_is_an_error(
    wire: Wire, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.call(["inspect", "devices", "--pin-dir", str(wire.site.pins)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "another network namespace" in err
    assert "nsenter" in err


def test_status_shows_the_packet_path(wire: Wire, call: Run) -> None:
    wire.talk(4, MASKED, 2000, "S <SA A+ <A")
    wire.talk(4, MASKED, 2001, "?")
    code, out, _ = call("status", "-o", "json")
    seen = json.loads(out)["packets"]
    assert code == 0
    assert (seen["state"], seen["reason"], seen["failed"]) == ("on", "", [])
    assert (seen["connections"], seen["entries"], seen["max_connections"]) == (2, 2, 4096)
    assert (seen["host_devices"], seen["pod_devices"], seen["alarm"]) == (2, 1, False)
    code, out, _ = call("status")
    assert code == 0
    assert "2 of at most 4096" in out
    age(wire, 31)
    _, out, _ = call("status", "-o", "json")
    assert [json.loads(out)["packets"][k] for k in ("connections", "entries")] == [1, 2]


BAD = {
    "a problem": {"problem": "the kernel refuses the program"},
    "a device": {"failed": [{"device": "up0", "detail": "no clsact"}], "failed_count": 3},
}


@pytest.mark.parametrize("bad", BAD)
def test_failed_packet_path_exits_with_1_and_the_reason(wire: Wire, call: Run, bad: str):
    healthy = msgspec.to_builtins(wire.plane.packet_status())
    said = msgspec.convert({**healthy, **BAD[bad]}, type(wire.plane.packet_status()))
    wire.plane.write_status(encode(agent_status(packets=said)))
    code, out, _ = call("status")
    assert code == 1
    if bad == "a problem":
        assert "failed: the kernel refuses the program" in out
        assert "the packet path is failed: the kernel refuses" in call("connections")[2]
    else:
        assert "NOT on 3" in out
        assert "no clsact" in out
        assert "and 2 more devices" in out


@pytest.fixture
def plane_without_programs(site: Site, monkeypatch: pytest.MonkeyPatch) -> BpfPlane:
    """A plane whose packet programs cannot be compiled."""
    obtain = compile.find_or_compile

    def refuse(unit: str, cache: Path) -> Any:
        if unit == "tc":
            raise CompileError("no such header", "tc.c", "install it")
        return obtain(unit, cache)

    monkeypatch.setattr(compile, "find_or_compile", refuse)
    return site.open(packet_path=True, devices=("up*",), excluded_devices=("wg0",))


def test_compile_error_is_shown_in_the_status(
    site: Site, plane_without_programs: BpfPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the failure to the agent's status, and from there to the view."""
    plane_without_programs.apply(world(), None)
    agent = Agent(Config(pin_dir=site.pins, packet_path=True), plane_without_programs, lambda _: ())
    said = agent.status().packets
    assert said is not None
    assert (said.enabled, said.devices, said.excluded) == (True, ("up*",), ("wg0",))
    assert "no such header (tc.c); install it" in said.problem
    plane_without_programs.write_status(encode(agent_status(packets=said)))
    assert app.call(["inspect", "status", "--pin-dir", str(site.pins)]) == 1
    assert "failed: no such header (tc.c); install it" in capsys.readouterr().out


def test_failed_devices_are_in_the_status(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {f"d{i:02}": f"why {i}" for i in range(MAX_FAILED_DEVICES + 5)}
    monkeypatch.setattr(DeviceReconciler, "status", lambda _: DeviceReconcilerStatus(failed=failed))
    said = wire.plane.packet_status()
    assert (said.enabled, said.problem, said.failed_count) == (True, "", MAX_FAILED_DEVICES + 5)
    assert said.failed[0] == DeviceFailure("d00", "why 0")
    assert len(said.failed) == MAX_FAILED_DEVICES


def test_device_problem_is_cleared_after_the_next_sync(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise KernelError("the kernel refused the rtnetlink request", "up0")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceAttachments, "sync", refuse)
        plane = site.open(packet_path=True, devices=("nothing",), excluded_devices=("*",))
        plane.apply(world(), None)
        assert plane.packet_status().problem == "the kernel refused the rtnetlink request (up0)"
    until("devices are synced again", lambda: plane.packet_status().problem == "")


def test_status_counts_created_connections_and_lost_entries(wire: Wire, show, call: Run) -> None:
    before = json.loads(call("status", "-o", "json")[1])["packets"]
    wire.talk(4, MASKED, 2000, "S <SA A+ <A")
    wire.talk(4, MASKED, 2001, "?")
    with wire.site.pinned("flows") as flows:
        assert flows.delete(key_between(flows, CLIENT[4], f"{VIP[4]}{MASKED}", 2000))
    (row,) = [r for r in show("connections") if r["protocol"] == "TCP"]
    assert row["lost"] == ["flow"]
    answer = tcp(end(POD[4], 8080), row["seen_as"], flags="A")
    assert parse(wire.pass_(answer), l2=False).destination == end(CLIENT[4], 2000)
    after = json.loads(call("status", "-o", "json")[1])["packets"]
    assert after["created"] - before["created"] == 2
    assert after["evicted"] == before["evicted"]
    assert after["entries_lost"] == after["created"] - 1
    out = call("status")[1]
    assert f"{after['created']} since the counters started" in out
    assert "connections that a packet started" in out


def test_check_reports_a_dropping_forward_chain_of_another_table(wire: Wire) -> None:
    """It is in a table that iptables and CNIs do not use, so kbpf does not change it."""

    def row() -> CheckRow:
        where = Path("/run/netns") / str(wire.site.node)
        found = netns.run_in(where, lambda: list(packet_path.check_packet_path(wire.site.pins)))
        (one,) = [row for row in found if row.name == "FORWARD"]
        return one

    def nft(text: str) -> None:
        command("ip", "netns", "exec", str(wire.site.node), "nft", text)

    hook = "type filter hook forward priority 0"
    assert row().result == "yes"
    nft(f"table inet fw {{ chain in {{ {hook}; policy accept; }}; }}")
    try:
        assert row().result == "yes"
        nft(f"table inet fw {{ chain shut {{ {hook}; policy drop; }}; }}")
        assert row().result == "no"
        assert "inet fw shut" in row().detail
    finally:
        nft("delete table inet fw")


# ---- packet path off, or maps missing ------------------------------------------------------------


@pytest.mark.parametrize("view", ["connections", "nat", "sources"])
@pytest.mark.parametrize("has_status", [True, False], ids=["agent's status", "no status"])
def test_views_report_that_the_packet_path_is_off(
    site: Site, capsys: pytest.CaptureFixture[str], view: str, has_status: bool
) -> None:
    plane = site.open()
    plane.apply(world(), None)
    if has_status:
        plane.write_status(encode(agent_status(packets=plane.packet_status())))
    code = app.call(["inspect", view, "--pin-dir", str(site.pins)])
    out, err = capsys.readouterr()
    assert code == 0
    assert out
    assert err.startswith("kbpf: the packet path is off: ")
    assert ("--packet-path false" in err) == has_status


def test_status_is_ok_with_the_packet_path_switched_off(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    plane = site.open()
    plane.apply(world(), None)
    plane.write_status(encode(agent_status(packets=plane.packet_status())))
    assert app.call(["inspect", "status", "--pin-dir", str(site.pins)]) == 0
    assert "state   off: switched off" in capsys.readouterr().out


@pytest.mark.parametrize("view", ["connections", "nat", "maps", "status"])
def test_missing_map_is_named(site: Site, capsys: pytest.CaptureFixture[str], view: str) -> None:
    site.open().apply(world(), None)
    (site.maps / "flows").unlink()
    assert app.call(["inspect", view, "--pin-dir", str(site.pins)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the map flows is missing" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("view", ["services", "backends", "affinity", "sources", "devices"])
def test_missing_map_that_is_not_shown_is_no_error(site: Site, view: str) -> None:
    site.open().apply(world(), None)
    (site.maps / "flows").unlink()
    assert app.call(["inspect", view, "--pin-dir", str(site.pins)]) == 0


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
                    now, client, frontend, backend, bytes(16), bytes(2), client[16:18], i % 9, 1,
                    TcpState.ESTABLISHED, 0, 0, part, 0, 0, bytes(48),
                )  # fmt: skip
            keys += FLOW_KEY.pack(client, frontend) + FLOW_KEY.pack(backend, client)
        # An LRU map evicts some entries before it is full, so it is a quarter larger.
        with pinning.make_map(MAPS["flows"], 2 * MANY * 5 // 4) as made:
            pinning.replace_pin(Pins(site.pins), made, "flows")
            made.update_batch(bytes(keys), bytes(values))
        yield site


@pytest.mark.parametrize("output", ["table", "json"])
def test_connections_of_a_full_map_take_tens_of_megabytes(full_site: Site, output: str) -> None:
    line = ["inspect", "connections", "-o", output, "--pin-dir", str(full_site.pins)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *line], capture_output=True, text=True, check=True
    )
    code, lines, megabytes = map(int, done.stdout.split())
    assert code == 0
    assert lines == (MANY + 1 if output == "table" else MANY * 17 + 2)
    assert megabytes < 140
