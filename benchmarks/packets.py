# SPDX-License-Identifier: Apache-2.0
"""The cost of a packet in the packet path's programs, in nanoseconds, by BPF_PROG_TEST_RUN.

A row is one path through the programs, including tail calls; a column is a protocol and family.
Only the programs are measured: no device, no network stack. Two tables:

  one by one     every run gets a fresh packet, so programs that modify it can be measured too.
                 Between runs other code uses the CPU caches, as on a node
  over and over  the same packet, everything cached; only for programs that do not modify it

Each row also checks the programs' verdict, and the number of new flows.
"""

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.tools.common import chosen, say
from kbpf.dataplane.bpf.maps.layout import REFUSAL_LIMIT, U32, Reason, RefusalLimit
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.config import MapSizes
from kbpf.model.objects import Protocol
from tests.support.lab.lab import ip, let_forward, until
from tests.support.lab.lab import run as command
from tests.support.packets.packets import (
    SCTP_BACK_TAG,
    SCTP_INIT_ACK,
    SCTP_TAG,
    arp,
    frame,
    icmp_error,
    sctp,
    tcp,
    udp,
)
from tests.support.packets.parse import parse
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_UNSPEC, SkbContext
from tests.support.packets.test_run import run as test_run
from tests.support.plane import Site, desired, service, sites

TIMES, REPEAT = 400, 100_000
SERVICES = 1000
CLIENT = {4: "198.51.100.7", 6: "2001:db8:9::7"}
NODE = {4: "198.18.0.1", 6: "fd00:198:18::1"}
GATE = {4: "198.18.0.2", 6: "fd00:198:18::2"}
VIPS = {4: "192.0.2.", 6: "2001:db8::"}
PODS = {4: "10.244.1.2", 6: "fd00:10:244:1::2"}
AWAY = {4: "10.244.2.2", 6: "fd00:10:244:2::2"}
KEPT, LOCAL, REMOTE, NONE = 1, 2, 3, 4
"""The last octet of a VIP. Its Service has a local pod with policy Local, a local pod with policy
Cluster, a pod on another node, or no endpoints."""
UPLINK, POD = "uplink", "pod1"
MACS = {UPLINK: "02:00:00:00:00:01", POD: "02:00:00:00:00:03"}
PROTOCOLS = {"tcp": Protocol.TCP, "udp": Protocol.UDP, "sctp": Protocol.SCTP}
PORTS = itertools.cycle(range(32_768, 61_000))


def end(host: str, port: int) -> str:
    """``10.0.0.1:80`` or ``[fd00::1]:80``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Column(NamedTuple):
    """A protocol and an address family (4 or 6); makes their packets."""

    protocol: str
    v: int

    def __str__(self) -> str:
        return f"{self.protocol}{self.v}"

    def first(self, source: str, to: str) -> bytes:
        """The first packet of a flow."""
        if self.protocol == "tcp":
            return tcp(source, to, flags="S", mss=1460)
        return udp(source, to, b"question") if self.protocol == "udp" else sctp(source, to)

    def answer(self, source: str, to: str) -> bytes:
        """The backend's answer to the first packet."""
        if self.protocol == "tcp":
            return tcp(source, to, flags="SA", ack=1001)
        if self.protocol == "udp":
            return self.later(source, to, back=True)
        return sctp(source, to, SCTP_INIT_ACK, tag=SCTP_TAG)

    def later(self, source: str, to: str, back: bool = False) -> bytes:
        """A later packet of a flow. `back`: the backend's."""
        data = bytes(64)
        if self.protocol == "tcp":
            return tcp(source, to, data, flags="A", seq=1001, ack=1065 if back else 1001)
        if self.protocol == "udp":
            return udp(source, to, data)
        return sctp(source, to, data, tag=SCTP_TAG if back else SCTP_BACK_TAG)

    def client(self) -> str:
        """The address and port of a client that has no flow yet."""
        return end(CLIENT[self.v], next(PORTS))

    def own(self) -> str:
        """The address and port of a socket of the node."""
        return end(NODE[self.v], next(PORTS))

    def vip(self, which: int) -> str:
        """The frontend of a Service: KEPT, LOCAL, REMOTE or NONE."""
        return end(f"{VIPS[self.v]}{which}", 80)

    def pod(self, which: int) -> str:
        """The backend of that Service."""
        return end((AWAY if which == REMOTE else PODS)[self.v], 8080)


COLUMNS = tuple(Column(protocol, v) for protocol in PROTOCOLS for v in (4, 6))


class Step(NamedTuple):
    """One packet through one program."""

    program: str
    device: str
    packet: bytes


class Rig:
    """The programs of a node with an uplink, a pod's device and SERVICES other Services."""

    def __init__(self, site: Site, where: str, programs: Mapping[str, Program]) -> None:
        self.site, self.where, self._programs = site, where, programs
        rows = command("ip", "-n", where, "-o", "link").splitlines()
        self._index = {row.split()[1].split("@")[0]: int(row.split(":")[0]) for row in rows}
        with site.pinned("devices") as devices:
            until("the devices are known", lambda: len(list(devices.items())) == len(MACS))

    def run(self, step: Step, repeat: int = 1) -> tuple[int, bytes, int]:
        """Returns the verdict, the resulting packet without its Ethernet header, and the
        nanoseconds of one run.
        """
        context = SkbContext(ifindex=self._index[step.device]).pack()
        sent = frame(step.packet, to=MACS[step.device])
        done = test_run(self._programs[step.program], sent, repeat, context)
        return done.retval, done.packet_out[14:], done.nanoseconds

    def inside(self, action: Callable[[], Any]) -> Any:
        """Runs `action` in the node's network namespace."""
        return netns.run_in(Path("/run/netns") / self.where, action)

    def new_flows(self) -> int:
        """The number of new flows so far."""
        return self.site.reasons()[Reason.NEW_FLOW]

    def clock(self) -> float:
        """The nanoseconds that reading the clock adds to a single run."""
        packet = arp(1, MACS[POD], PODS[4], MACS[UPLINK], NODE[4])
        program = self._programs["tc_ingress"]
        alone = [test_run(program, frame(packet)).nanoseconds for _ in range(TIMES)]
        return statistics.median(alone) - test_run(program, frame(packet), REPEAT).nanoseconds

    # ---- flows -----------------------------------------------------------------------------

    def come(self, packet: bytes, device: str = UPLINK) -> bytes:
        """Runs tc_ingress on a device; returns the resulting packet."""
        return self.run(Step("tc_ingress", device, packet))[1]

    def leave(self, packet: bytes, device: str) -> bytes:
        """Runs tc_egress on a device; returns the resulting packet."""
        return self.run(Step("tc_egress", device, packet))[1]

    def flow(self, column: Column, which: int, direct: bool) -> tuple[str, str]:
        """Establishes a new flow, with data in both directions. Returns its client, and the source
        address that the backend sees.
        """
        own, vip, pod = column.client(), column.vip(which), column.pod(which)
        in_stack, seen = not (direct or which == REMOTE), ""
        for ask, answer in ((column.first, column.answer), (column.later, column.later)):
            came = self.come(ask(own, vip))
            if in_stack:
                came = self.leave(came, POD)
            seen = seen or str(parse(came, l2=False).source)
            more = {"back": True} if answer == column.later else {}
            back = self.come(answer(pod, seen, **more), UPLINK if which == REMOTE else POD)
            if in_stack:
                self.leave(back, UPLINK)
        return own, seen


Make = Callable[[Rig, Column, bool], Iterator[Step]]


@dataclass(frozen=True)
class Row:
    """One path through the programs.

    - `steps`: yields the packets to measure.
    - `verdicts`: with forwarding stack, and with forwarding direct.
    - `new`: whether each packet begins a new flow.
    - `same`: whether the programs leave the packet unmodified.
    - `without`: the protocol that the row does not exist for.
    """

    name: str
    steps: Make
    verdicts: tuple[int, int]
    new: bool = False
    same: bool = False
    without: str = ""


UP, OFF = TC_ACT_UNSPEC, TC_ACT_REDIRECT
ELSEWHERE = end("203.0.113.9", 22), end("2001:db8:8::9", 22)


def none_first(_: Rig, c: Column, __: bool) -> Iterator[Step]:
    while True:
        yield Step("tc_ingress", UPLINK, c.first(c.client(), ELSEWHERE[c.v == 6]))


def none_in(_: Rig, c: Column, __: bool) -> Iterator[Step]:
    step = Step("tc_ingress", UPLINK, c.later(c.client(), ELSEWHERE[c.v == 6]))
    return itertools.repeat(step)


def none_out(_: Rig, c: Column, __: bool) -> Iterator[Step]:
    step = Step("tc_egress", UPLINK, c.later(c.client(), ELSEWHERE[c.v == 6]))
    return itertools.repeat(step)


def new(which: int) -> Make:
    def steps(_: Rig, c: Column, __: bool) -> Iterator[Step]:
        while True:
            yield Step("tc_ingress", UPLINK, c.first(c.client(), c.vip(which)))

    return steps


def again(which: int) -> Make:
    def steps(rig: Rig, c: Column, direct: bool) -> Iterator[Step]:
        own, _ = rig.flow(c, which, direct)
        return itertools.repeat(Step("tc_ingress", UPLINK, c.later(own, c.vip(which))))

    return steps


def answered(which: int) -> Make:
    def steps(rig: Rig, c: Column, direct: bool) -> Iterator[Step]:
        _, seen = rig.flow(c, which, direct)
        device = UPLINK if which == REMOTE else POD
        return itertools.repeat(Step("tc_ingress", device, c.later(c.pod(which), seen, True)))

    return steps


def to_pod(which: int) -> Make:
    def steps(rig: Rig, c: Column, direct: bool) -> Iterator[Step]:
        own, _ = rig.flow(c, which, direct)
        return itertools.repeat(Step("tc_egress", POD, c.later(own, c.pod(which))))

    return steps


def to_client(which: int) -> Make:
    def steps(rig: Rig, c: Column, direct: bool) -> Iterator[Step]:
        own, _ = rig.flow(c, which, direct)
        return itertools.repeat(Step("tc_egress", UPLINK, c.later(c.pod(which), own, True)))

    return steps


def host_new(_: Rig, c: Column, __: bool) -> Iterator[Step]:
    while True:
        yield Step("tc_egress", UPLINK, c.first(c.own(), c.vip(REMOTE)))


def host_flow(rig: Rig, c: Column) -> str:
    """The socket of an established flow of the node."""
    own, vip, pod = c.own(), c.vip(REMOTE), c.pod(REMOTE)
    rig.leave(c.first(own, vip), UPLINK)
    rig.come(c.answer(pod, own))
    rig.leave(c.later(own, vip), UPLINK)
    rig.come(c.later(pod, own, True))
    return own


def host_again(rig: Rig, c: Column, _: bool) -> Iterator[Step]:
    own = host_flow(rig, c)
    return itertools.repeat(Step("tc_egress", UPLINK, c.later(own, c.vip(REMOTE))))


def host_answer(rig: Rig, c: Column, _: bool) -> Iterator[Step]:
    own = host_flow(rig, c)
    return itertools.repeat(Step("tc_ingress", UPLINK, c.later(c.pod(REMOTE), own, True)))


def error_in(rig: Rig, c: Column, direct: bool) -> Iterator[Step]:
    _, seen = rig.flow(c, REMOTE, direct)
    error = icmp_error("too big", GATE[c.v], c.later(seen, c.pod(REMOTE)), mtu=1400)
    return itertools.repeat(Step("tc_ingress", UPLINK, error))


def error_out(rig: Rig, c: Column, direct: bool) -> Iterator[Step]:
    own, _ = rig.flow(c, LOCAL, direct)
    error = icmp_error("too big", NODE[c.v], c.later(own, c.pod(LOCAL)), mtu=1400)
    return itertools.repeat(Step("tc_egress", UPLINK, error))


ROWS = (
    Row("no Service, in", none_in, (UP, UP), same=True),
    Row("no Service, in, possible new flow", none_first, (UP, UP), same=True),
    Row("no Service, out", none_out, (UP, UP), same=True),
    Row("new flow, local pod, policy Local", new(KEPT), (UP, OFF), new=True),
    Row("new flow, local pod", new(LOCAL), (UP, OFF), new=True),
    Row("new flow, remote pod", new(REMOTE), (OFF, OFF), new=True),
    Row("known flow, local pod, policy Local: in", again(KEPT), (UP, OFF)),
    Row("known flow, local pod: in", again(LOCAL), (UP, OFF)),
    Row("known flow, local pod: out to the pod", to_pod(LOCAL), (UP, UP)),
    Row("known flow, remote pod: in, redirected", again(REMOTE), (OFF, OFF)),
    Row("reply of a local pod: in", answered(LOCAL), (UP, OFF)),
    Row("reply of a local pod: out to the client", to_client(LOCAL), (UP, UP)),
    Row("reply of a remote pod: in, redirected", answered(REMOTE), (OFF, OFF)),
    Row("node's socket, new flow: out", host_new, (OFF, OFF), new=True),
    Row("node's socket, known flow: out", host_again, (OFF, OFF)),
    Row("node's socket, reply: in", host_answer, (UP, UP)),
    Row("no endpoints: refused", new(NONE), (OFF, OFF)),
    Row("ICMP error: in", error_in, (OFF, OFF), without="sctp"),
    Row("ICMP error: out", error_out, (UP, UP), without="sctp"),
    Row("no Service, in, flows tracked", none_in, (UP, UP), same=True),
    Row("no Service, in, possible new flow, flows tracked", none_first, (UP, UP), same=True),
    Row("no Service, out, flows tracked", none_out, (UP, UP), same=True),
)


def one_by_one(rig: Rig, row: Row, column: Column, direct: bool) -> float:
    """The median in nanoseconds, including the cost of the clock."""
    steps = row.steps(rig, column, direct)
    rig.run(next(steps))
    before, took = rig.new_flows(), []
    for step in itertools.islice(steps, TIMES):
        verdict, _, nanoseconds = rig.run(step)
        took.append(nanoseconds)
        if verdict != row.verdicts[direct]:
            raise SystemExit(f"{row.name}, {column}: verdict {verdict}, {parse(step.packet, l2=False)}")
    if rig.new_flows() - before != (TIMES if row.new else 0):
        raise SystemExit(f"{row.name}, {column}: {rig.new_flows() - before} new flows")
    return statistics.median(took)


def measure(rig: Rig, direct: bool) -> dict[str, Any]:
    """Measures both tables; returns nanoseconds by row and column."""
    clock = rig.clock()
    single: dict[str, dict[str, int]] = {}
    hot: dict[str, dict[str, int]] = {}
    rows = {row.name: row for row in ROWS}
    for name in chosen(rows):
        row = rows[name]
        for column in COLUMNS:
            if column.protocol == row.without:
                continue
            took = one_by_one(rig, row, column, direct) - clock
            single.setdefault(name, {})[str(column)] = round(took)
            if row.same:
                step = next(row.steps(rig, column, direct))
                hot.setdefault(name, {})[str(column)] = rig.run(step, REPEAT)[2]
    return {"clock": round(clock), "one by one": single, "over and over": hot}


def table(found: Mapping[str, Any]) -> str:
    """Formats the results as tables."""
    lines = []
    for how, each in found.items():
        for title in ("one by one", "over and over"):
            heads = "".join(f"{column!s:>7}" for column in COLUMNS)
            lines.append(f"\nforwarding {how}, ns, {title:15}{'':10}{heads}")
            for name, cells in each[title].items():
                values = "".join(f"{cells.get(str(column), '–'):>7}" for column in COLUMNS)
                lines.append(f"  {name:44}{values}")
    return "\n".join(lines)


def run() -> dict[str, Any]:
    """Returns the results by `--forwarding` mode."""
    found = {}
    for how in ("stack", "direct"):
        with rig(how) as made:
            found[how] = made.inside(lambda: measure(made, how == "direct"))  # noqa: B023
    say(table(found))
    return found


@contextmanager
def rig(how: str) -> Iterator[Rig]:
    """Sets up a node in a network namespace, with the peers of its devices in another one."""
    where, behind = f"kbpb{os.getpid()}", f"kbpx{os.getpid()}"
    with ExitStack() as stack:
        for name in (where, behind):
            command("ip", "netns", "add", name)
            stack.callback(command, "ip", "netns", "del", name)
        let_forward(where)
        ip("link set lo up", netns=where)
        for device, address in MACS.items():
            pair = f"type veth peer name {device} netns {behind}"
            ip(f"link add {device} address {address} {pair}", netns=where)
            ip(f"link set {device} up", netns=behind)
        for v, bits, whole in ((4, 24, 32), (6, 64, 128)):
            ip(
                f"addr add {NODE[v]}/{bits} dev {UPLINK}" + (" nodad" if v == 6 else ""),
                f"neigh add {GATE[v]} lladdr 02:00:00:00:00:02 dev {UPLINK} nud permanent",
                f"neigh add {PODS[v]} lladdr 02:00:00:00:00:04 dev {POD} nud permanent",
                f"link set {UPLINK} up",
                f"link set {POD} up",
                f"route add default via {GATE[v]} dev {UPLINK}",
                f"route add {PODS[v]}/{whole} dev {POD}",
                netns=where,
            )
        with tempfile.TemporaryDirectory() as cache, sites(Path(cache)) as make:
            site = make(node=where)
            plane = site.open(MapSizes(), packet_path=True, forwarding=how)
            own = tuple(parse_addr(NODE[v]) for v in (4, 6))
            state = msgspec.structs.replace(desired(*_services()), masquerade_addresses=own)
            netns.run_in(Path("/run/netns") / where, lambda: plane.apply(state, None))
            # No rate limit: the row of refusals measures packets that are answered.
            with site.pinned("refusal_limits") as limits:
                for which in RefusalLimit:
                    limits.update(U32.pack(which), REFUSAL_LIMIT.pack(0, 0, 0))
            folder = next(site.pins.glob("programs-tc-*"))
            programs = {n: Program.open(folder / n) for n in ("tc_ingress", "tc_egress")}
            for program in programs.values():
                stack.callback(program.close)
            yield Rig(site, where, programs)


def _services() -> Iterator[Any]:
    for i in range(SERVICES):
        yield service(f"s{i}", f"LoadBalancer=203.0.{i // 250}.{i % 250}:80", "10.9.0.1:80")
    for name, protocol in PROTOCOLS.items():
        for v in (4, 6):
            c = Column(name, v)
            for which in (KEPT, LOCAL, REMOTE, NONE):
                at, to = f"LoadBalancer={c.vip(which)}", c.pod(which) if which != NONE else ""
                kept = {"local": to, "external_local": True} if which == KEPT else {}
                yield service(f"{name}-{which}", at, to, protocol, **kept)
