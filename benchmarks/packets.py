"""What a packet costs in the packet path's programs: nanoseconds, by BPF_PROG_TEST_RUN.

A row is a way through the programs, tail calls included, a column a protocol and family. The
programs' own cost only: no device, no stack. Two tables:

  one by one     each run gets a fresh packet, so that rows that change it can be measured; between
                 two runs other code goes over the caches, as on a node
  over and over  the same packet, all in the caches; only where programs leave it as it is

Each row checks what the programs decided, and that new flows were made where they should be.
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
from tests.support.packets.packets import arp, frame, icmp_error, sctp, tcp, udp
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
"""The last part of a VIP: a pod here and policy Local, a pod here, one elsewhere, no endpoints."""
UPLINK, POD = "uplink", "pod1"
MACS = {UPLINK: "02:00:00:00:00:01", POD: "02:00:00:00:00:03"}
PROTOCOLS = {"tcp": Protocol.TCP, "udp": Protocol.UDP, "sctp": Protocol.SCTP}
PORTS = itertools.cycle(range(32_768, 61_000))


def end(host: str, port: int) -> str:
    """``10.0.0.1:80`` or ``[fd00::1]:80``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Column(NamedTuple):
    """A protocol and a family, and their packets."""

    protocol: str
    v: int

    def __str__(self) -> str:
        return f"{self.protocol}{self.v}"

    def first(self, source: str, to: str) -> bytes:
        """What begins a flow."""
        if self.protocol == "tcp":
            return tcp(source, to, flags="S", mss=1460)
        return udp(source, to, b"question") if self.protocol == "udp" else sctp(source, to)

    def later(self, source: str, to: str) -> bytes:
        """What goes on with it, in either direction."""
        if self.protocol == "tcp":
            return tcp(source, to, bytes(64), flags="A")
        data = bytes(64)
        return udp(source, to, data) if self.protocol == "udp" else sctp(source, to, data)

    def client(self) -> str:
        """One that has not been there."""
        return end(CLIENT[self.v], next(PORTS))

    def own(self) -> str:
        """A socket of the node."""
        return end(NODE[self.v], next(PORTS))

    def vip(self, which: int) -> str:
        """A Service."""
        return end(f"{VIPS[self.v]}{which}", 80)

    def pod(self, which: int) -> str:
        """What stands behind it."""
        return end((AWAY if which == REMOTE else PODS)[self.v], 8080)


COLUMNS = tuple(Column(protocol, v) for protocol in PROTOCOLS for v in (4, 6))


class Step(NamedTuple):
    """One packet through one program."""

    program: str
    device: str
    packet: bytes


class Rig:
    """The programs of a node with an uplink and a pod's device, among many Services."""

    def __init__(self, site: Site, where: str, programs: Mapping[str, Program]) -> None:
        self.site, self.where, self._programs = site, where, programs
        rows = command("ip", "-n", where, "-o", "link").splitlines()
        self._index = {row.split()[1].split("@")[0]: int(row.split(":")[0]) for row in rows}
        with site.pinned("devices") as devices:
            until("the devices are known", lambda: len(list(devices.items())) == len(MACS))

    def run(self, step: Step, repeat: int = 1) -> tuple[int, bytes, int]:
        """The verdict, the packet that comes out, and the nanoseconds of one run."""
        context = SkbContext(ifindex=self._index[step.device]).pack()
        sent = frame(step.packet, to=MACS[step.device])
        done = test_run(self._programs[step.program], sent, repeat, context)
        return done.retval, done.packet_out[14:], done.nanoseconds

    def inside(self, action: Callable[[], Any]) -> Any:
        """In the node's network, where the devices are."""
        return netns.run_in(Path("/run/netns") / self.where, action)

    def new_flows(self) -> int:
        """How many there were."""
        return self.site.reasons()[Reason.NEW_FLOW]

    def clock(self) -> float:
        """What reading the clock adds to a run of its own, in nanoseconds."""
        packet = arp(1, MACS[POD], PODS[4], MACS[UPLINK], NODE[4])
        program = self._programs["tc_ingress"]
        alone = [test_run(program, frame(packet)).nanoseconds for _ in range(TIMES)]
        return statistics.median(alone) - test_run(program, frame(packet), REPEAT).nanoseconds

    # ---- flows -----------------------------------------------------------------------------

    def come(self, packet: bytes, device: str = UPLINK) -> bytes:
        """In by a device; the packet as it goes on."""
        return self.run(Step("tc_ingress", device, packet))[1]

    def leave(self, packet: bytes, device: str) -> bytes:
        """Out by a device."""
        return self.run(Step("tc_egress", device, packet))[1]

    def flow(self, column: Column, which: int, direct: bool) -> tuple[str, str]:
        """A new flow that was answered: its client, and as whom the backend sees it."""
        own = column.client()
        came = self.come(column.first(own, column.vip(which)))
        if not (direct or which == REMOTE):
            came = self.leave(came, POD)
        seen = parse(came, l2=False).source
        if column.protocol == "tcp":
            back = tcp(column.pod(which), seen, flags="SA")
        else:
            back = column.later(column.pod(which), seen)
        answer = self.come(back, UPLINK if which == REMOTE else POD)
        if not (direct or which == REMOTE):
            self.leave(answer, UPLINK)
        self.come(column.later(own, column.vip(which)))
        return own, seen


Make = Callable[[Rig, Column, bool], Iterator[Step]]


@dataclass(frozen=True)
class Row:
    """`steps` yields the packets to measure; `verdicts`: with stack, with direct; `new`: whether
    each is a new flow; `same`: the programs leave the packet as it is; `without`: these protocols.
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
        return itertools.repeat(Step("tc_ingress", device, c.later(c.pod(which), seen)))

    return steps


def to_pod(which: int) -> Make:
    def steps(rig: Rig, c: Column, direct: bool) -> Iterator[Step]:
        own, _ = rig.flow(c, which, direct)
        return itertools.repeat(Step("tc_egress", POD, c.later(own, c.pod(which))))

    return steps


def to_client(which: int) -> Make:
    def steps(rig: Rig, c: Column, direct: bool) -> Iterator[Step]:
        own, _ = rig.flow(c, which, direct)
        return itertools.repeat(Step("tc_egress", UPLINK, c.later(c.pod(which), own)))

    return steps


def host_new(_: Rig, c: Column, __: bool) -> Iterator[Step]:
    while True:
        yield Step("tc_egress", UPLINK, c.first(c.own(), c.vip(REMOTE)))


def host_again(rig: Rig, c: Column, _: bool) -> Iterator[Step]:
    own = c.own()
    rig.leave(c.first(own, c.vip(REMOTE)), UPLINK)
    return itertools.repeat(Step("tc_egress", UPLINK, c.later(own, c.vip(REMOTE))))


def host_answer(rig: Rig, c: Column, _: bool) -> Iterator[Step]:
    own = c.own()
    rig.leave(c.first(own, c.vip(REMOTE)), UPLINK)
    return itertools.repeat(Step("tc_ingress", UPLINK, c.later(c.pod(REMOTE), own)))


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
    Row("no Service, in, what could begin a flow", none_first, (UP, UP), same=True),
    Row("no Service, out", none_out, (UP, UP), same=True),
    Row("new flow, pod here, policy Local", new(KEPT), (UP, OFF), new=True),
    Row("new flow, pod here", new(LOCAL), (UP, OFF), new=True),
    Row("new flow, pod elsewhere", new(REMOTE), (OFF, OFF), new=True),
    Row("known flow, pod here, policy Local: in", again(KEPT), (UP, OFF)),
    Row("known flow, pod here: in", again(LOCAL), (UP, OFF)),
    Row("known flow, pod here: out to the pod", to_pod(LOCAL), (UP, UP)),
    Row("known flow, pod elsewhere: in and off", again(REMOTE), (OFF, OFF)),
    Row("answer of a pod here: in", answered(LOCAL), (UP, OFF)),
    Row("answer of a pod here: out to the client", to_client(LOCAL), (UP, UP)),
    Row("answer of a pod elsewhere: in and off", answered(REMOTE), (OFF, OFF)),
    Row("the node's own, new flow: out", host_new, (OFF, OFF), new=True),
    Row("the node's own, known flow: out", host_again, (OFF, OFF)),
    Row("the node's own, answer: in", host_answer, (UP, UP)),
    Row("no endpoints: refused", new(NONE), (OFF, OFF)),
    Row("ICMP error: in", error_in, (UP, UP), without="sctp"),
    Row("ICMP error: out", error_out, (UP, UP), without="sctp"),
)


def one_by_one(rig: Rig, row: Row, column: Column, direct: bool) -> float:
    """The median, in nanoseconds, the clock's included."""
    steps = row.steps(rig, column, direct)
    rig.run(next(steps))
    before, took = rig.new_flows(), []
    for step in itertools.islice(steps, TIMES):
        verdict, _, nanoseconds = rig.run(step)
        took.append(nanoseconds)
        if verdict != row.verdicts[direct]:
            raise SystemExit(
                f"{row.name}, {column}: verdict {verdict}, {parse(step.packet, l2=False)}"
            )
    if rig.new_flows() - before != (TIMES if row.new else 0):
        raise SystemExit(f"{row.name}, {column}: {rig.new_flows() - before} new flows")
    return statistics.median(took)


def measure(rig: Rig, direct: bool) -> dict[str, Any]:
    """Both tables, by row and column."""
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
    """For people."""
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
    """By way of forwarding."""
    found = {}
    for how in ("stack", "direct"):
        with rig(how) as made:
            found[how] = made.inside(lambda: measure(made, how == "direct"))  # noqa: B023
    say(table(found))
    return found


@contextmanager
def rig(how: str) -> Iterator[Rig]:
    """A node of its own, and what is behind its devices."""
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
            with site.pinned(
                "refusal_limits"
            ) as limits:  # what a refusal costs, not how many are sent
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
