# SPDX-License-Identifier: Apache-2.0
"""Programs of other load balancers at our hooks are reported while they are attached; ours never
are.

The foreign programs have two instructions each, and names that Cilium and Calico use; Kmesh's also directs sockets.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.checks import connect as attached_checks
from kbpf.checks import neighbours
from kbpf.dataplane.bpf import socket_hooks
from kbpf.dataplane.bpf.hooks import HOOKS as HOOK_TABLE
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path.attach import MAX_MOVES
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.programs import foreign, unpinned
from kbpf.errors import KernelError
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Link, Map, Program, list_attached
from kbpf.kernel.bpf.tc import ATTACH_TYPE
from kbpf.kernel.bpf.uapi import BPF_F_BEFORE, BPF_MAP_TYPE_ARRAY, BPF_PROG_TYPE_SCHED_CLS
from kbpf.model.reasons import Reason
from tests.programs.packets.tc.net import filter_of_others, idle, insn
from tests.support.alone import WEB, alone, make_uplink, serve
from tests.support.features import needs
from tests.support.lab.lab import Node, Place, cgroup2, run, until
from tests.support.plane import HOOKS, Site, desired, services
from tests.support.table import each_line, table

SOCK_ADDR = 18
PASS = insn(0xB7, imm=1) + insn(0x95)


ROWS = [
    ("connect4", "cil_sock4_connect", True),
    ("sendmsg6", "", True),
    ("getpeername4", "cil_sock4_getpeername", False),
]
"""A hook, the name of a foreign program attached there, and whether it is reported."""


@contextlib.contextmanager
def theirs(cgroup: Path, hook: str, name: str, insns: bytes = PASS) -> Iterator[int]:
    """Attaches a program as another load balancer would; yields its id."""
    kind = next(h.attach_type for h in HOOK_TABLE if h.name == hook)
    descriptor = os.open(cgroup, os.O_RDONLY)
    try:
        with (
            Program.load(name, SOCK_ADDR, kind, insns) as program,
            Link.attach(program, descriptor, kind),
        ):
            yield program.read_info().id
    finally:
        os.close(descriptor)


def serve_sockets(site: Site) -> BpfPlane:
    plane = site.start(WEB)
    plane.tick(0.0)
    return plane


def reported(plane: BpfPlane) -> list[str]:
    return [line for line in plane.status().problems if "another load balancer" in line]


@pytest.mark.parametrize(("hook", "name", "is_named"), ROWS)
def test_foreign_program_at_a_socket_hook_is_reported(site: Site, hook: str, name: str, is_named: bool, caplog):
    plane = serve_sockets(site)
    assert reported(plane) == [], "our own programs are not reported"
    assert plane.shared.read_metrics().foreign_programs == 0
    with theirs(site.cgroup, hook, name) as program:
        plane.tick(socket_hooks.HOOK_VERIFY_INTERVAL_S)
        lines = reported(plane)
        assert plane.shared.read_metrics().foreign_programs == len(lines) == is_named
        if is_named:
            assert f"{name[:15] or 'without a name'} (id {program}) at {hook}; " in lines[0]
        rows = list(neighbours.foreign_rows(snapshot.read(site.pins, attached_checks.NEEDS)))
        assert [one.detail for one in rows] == lines
        plane.tick(2 * socket_hooks.HOOK_VERIFY_INTERVAL_S)
        assert reported(plane) == lines
    plane.tick(3 * socket_hooks.HOOK_VERIFY_INTERVAL_S)
    assert reported(plane) == []
    assert caplog.text.count("another load balancer") == is_named, "it is logged once"


def older(site: Site) -> None:
    """An agent that has exited; its pinned programs stay attached."""
    plane = site.start(WEB)
    plane.close()


def interrupted(site: Site) -> None:
    """An agent that was killed after it pinned a link and before it gave the pin its final name."""
    older(site)
    (site.pins / "links/connect4").rename(site.pins / "new-link-connect4")


@pytest.mark.parametrize("story", [older, interrupted], ids=lambda story: story.__name__)
def test_own_programs_are_never_reported(site: Site, story: Callable[[Site], None]):
    story(site)
    assert foreign.find_at_sockets(Pins(site.pins), site.cgroup) == ()
    plane = site.open()
    assert foreign.find_at_sockets(Pins(site.pins), site.cgroup) == (), "while it takes over"
    plane.apply(WEB, None)
    plane.tick(0.0)
    assert reported(plane) == []
    assert set(dict(plane.shared.read_metrics().hooks)) == set(HOOKS)


REFUSED = [
    ("connect4", "cil_sock4_connect", "Cilium's socket load balancing"),
    ("connect6", "calico_connect_v46", "Calico's eBPF mode"),
    ("sendmsg4", "calico_sendmsg_v4", "Calico's eBPF mode"),
]


@pytest.mark.parametrize(("hook", "name", "owner"), REFUSED, ids=lambda value: str(value)[:20])
def test_first_start_beside_another_load_balancer_is_refused(site: Site, hook: str, name: str, owner: str):
    before = neighbours.balancer_row(site.pins, site.cgroup)
    assert (before.result, before.detail, before.advice) == ("yes", "none at kbpf's hooks", "")
    with theirs(site.cgroup, hook, name) as program:
        said = rf"another load balancer serves Services on this node \({owner}: program {name[:15]}"
        with pytest.raises(KernelError, match=said) as refused:
            site.open()
        where = f"(id {program}) at {hook} of {site.cgroup}"
        assert where in str(refused.value)
        assert "kubeProxyReplacement" in str(refused.value)
        assert not any(site.pins.glob("links/*")), "nothing was attached"
        row = neighbours.balancer_row(site.pins, site.cgroup)
        assert (row.name, row.result, row.needed) == ("no other load balancer", "no", True)
        assert where in row.detail
        assert "kubeProxyReplacement" in row.advice
    site.start(WEB)


def test_agent_that_serves_already_starts_beside_another_load_balancer(site: Site):
    """Refusing would leave its attached programs without updates."""
    older(site)
    with theirs(site.cgroup, "connect4", "cil_sock4_connect") as program:
        plane = serve_sockets(site)
        assert "cil_sock4_conne" in reported(plane)[0]
        row = neighbours.balancer_row(site.pins, site.cgroup)
        assert (row.result, row.needed) == ("no", False), "an agent may start"
        assert f"cil_sock4_conne (id {program}) at connect4 of {site.cgroup}" in row.detail
        assert "; this kbpf serves as well, so both decide about the same" in row.detail
    row = neighbours.balancer_row(site.pins, site.cgroup)
    assert (row.result, row.detail) == ("yes", "none at kbpf's hooks")


def test_start_beside_a_program_of_unknown_purpose_is_not_refused(site: Site):
    with theirs(site.cgroup, "connect4", "connect4"):
        plane = serve_sockets(site)
        assert len(reported(plane)) == 1


USER_IP4, USER_PORT, PROTOCOL = 4, 24, 36
"""Offsets in struct bpf_sock_addr."""


def sends(dialled: str, to: str) -> bytes:
    """Instructions that send TCP to `dialled` to another address, as Kmesh's cgroup_connect4_prog does (v1.2.0,
    bpf/kmesh/workload/cgroup_sock.c).
    """
    writes = b"".join(
        insn(0xB4, 2, 0, value) + insn(0x63, 0x21, offset)  # w2 = value; *(u32 *)(r1 + offset) = r2
        for offset, value in _sock_addr(to)
    )
    tests, left = b"", len(writes) // 8 + len(PASS) // 8
    for offset, value in reversed([*_sock_addr(dialled), (PROTOCOL, socket.IPPROTO_TCP)]):
        # r2 = *(u32 *)(r1 + offset); if w2 != value goto the next frontend
        tests = insn(0x61, 0x12, offset) + insn(0x56, 2, left, value) + tests
        left += 2
    return tests + writes + PASS


def _sock_addr(text: str) -> list[tuple[int, int]]:
    host, _, port = text.rpartition(":")
    (address,) = struct.unpack("=i", socket.inet_aton(host))
    return [(USER_IP4, address), (USER_PORT, socket.htons(int(port)))]


KMESH = """
10.96.0.1:80 | {two}:8080
10.96.0.2:80 | 10.96.0.3:15019
{left}:8080  | 10.96.0.3:15019
"""
"""Its frontends: a Service, whose backend it chooses; a Service and a pod with a waypoint, which is a Service."""


class Dial(NamedTuple):
    """`first`, `second`: the pod that answers if Kmesh's program runs before or after ours. `left`: the pod that
    answers in both orders if the packet path serves the client.
    """

    to: str
    first: str
    second: str
    left: str


DIALS = table(
    Dial,
    """
10.96.0.1:80 | two | one | two
10.96.0.2:80 | way | two | way
10.96.0.4:80 | two | two | two
{left}:8080  | way | way | way
""",
)


def is_left(site: Site, plane: BpfPlane, pod: Place) -> bool:
    """Whether the packet path serves this pod."""
    plane.tick(time.monotonic())
    before = site.reasons()[Reason.LEFT_TO_PACKETS]
    return "name" in pod.tcp("10.96.0.4", 80) and site.reasons()[Reason.LEFT_TO_PACKETS] > before


@pytest.mark.parametrize("order", ["first", "second"])
def test_kmesh_decides_if_its_program_is_first_or_ours_leaves_the_pod_alone(node: Node, node_site: Site, order: str):
    """At one cgroup the program that was attached first runs first. Behind ours, Kmesh sees backends instead of
    Services.
    """
    pods = {name: node.pod(f"{name}-{order}") for name in ("one", "two", "way", "pod", "left")}
    for name in ("one", "two", "way"):
        pods[name].serve(8080)
    addresses = {name: pod.ip for name, pod in pods.items()}
    text = """
        web     10.96.0.1:80    -> {one}:8080
        routed  10.96.0.2:80    -> {two}:8080
        way     10.96.0.3:15019 -> {way}:8080
        outside 10.96.0.4:80    -> {two}:8080
    """
    world = desired(*services(text.format(**addresses), {}), nodes=node.ip)
    lines = KMESH.format(**addresses).strip().splitlines()
    program = b"".join(sends(*map(str.strip, line.split("|"))) for line in lines) + PASS
    exempt = str(pods["left"].cgroup.relative_to(cgroup2()))

    def start() -> BpfPlane:
        plane = node_site.open(packet_path=True, socket_lb_exempt=(exempt,))
        node_site.do(lambda: plane.apply(world, None))
        return plane

    with contextlib.ExitStack() as stack:
        if order == "second":
            plane = start()
        stack.enter_context(theirs(node.cgroup, "connect4", "cgroup_connect4_prog", program))
        if order == "first":
            plane = start()
        until("the packet path serves", partial(is_left, node_site, plane, pods["left"]))
        for dial in DIALS:
            host, port = dial.to.format(**addresses).split(":")
            found = {name: pods[name].tcp(host, int(port)).get("name") for name in ("pod", "left")}
            assert found == {"pod": f"{getattr(dial, order)}-{order}", "left": f"{dial.left}-{order}"}, dial


@contextlib.contextmanager
def loaded(name: str, map_names: str = "") -> Iterator[int]:
    """Loads a program that uses arrays of these names; yields its id."""
    with contextlib.ExitStack() as stack:
        insns = b""
        for map_name in map_names.split():
            array = stack.enter_context(Map.create(BPF_MAP_TYPE_ARRAY, map_name, 4, 4, 1))
            insns += insn(0x18, 0x11, 0, array.fd) + insn(0)  # r1 = the map
        program = Program.load(name, BPF_PROG_TYPE_SCHED_CLS, 0, insns + PASS)
        yield stack.enter_context(program).read_info().id


@each_line(
    "name, maps, is_kbpf",
    """
tc_ingress | tails reasons                  | yes
tc_egress  | services_outer tails           | yes
connect4   | config sock_peers              | yes
sendmsg4   | affinity frontend_ports        | yes
connect4   | backend_slots_outer sock_peers | yes
tc_ingress | config flows devices node      | no
tc_egress  | counts                         | no
connect4   | services counts meta config    | no
tc_ingress | tails                          | no
connect4   | sock_peers theirs              | no
tc_ingress |                                | no
""",
    is_kbpf=bool,
)
def test_program_of_kbpf_is_recognized_by_several_names(name, maps, is_kbpf):
    """The name of a program, its maps, and whether it is taken for one of kbpf."""
    with loaded(name, maps) as program:
        assert unpinned.is_kbpf_program(program, name) is is_kbpf


@needs("tcx")
@alone
def test_first_start_beside_calico_on_a_device_is_refused(site: Site):
    make_uplink()
    number = socket.if_nametoindex("up0")
    with (
        idle("cali_tc_preamble") as program,
        tcx(number, program),
        pytest.raises(KernelError, match=r"Calico's eBPF mode: .* at ingress of up0"),
    ):
        site.open()
    site.open()


def tcx(ifindex: int, program: Program) -> contextlib.AbstractContextManager[object]:
    return Link.attach(program, ifindex, ATTACH_TYPE[Direction.INGRESS])


def clsact(ifindex: int, program: Program) -> contextlib.AbstractContextManager[object]:
    run("tc", "qdisc", "add", "dev", "up0", "clsact")
    return filter_of_others(ifindex, Direction.INGRESS, program)


@needs("tcx")
@pytest.mark.parametrize("how", [tcx, clsact], ids=lambda how: how.__name__)
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("cali_tc_preamble", True),
        ("policy", False),
        # Cilium has it also if it does not replace kube-proxy (v1.20.2, bpf/bpf_host.c)
        ("cil_from_netdev", False),
    ],
)
@alone
def test_foreign_load_balancer_on_our_device_is_reported(site: Site, name: str, named: bool, how: object):
    make_uplink()
    plane = serve(site)
    assert reported(plane) == []
    number = socket.if_nametoindex("up0")
    with (
        idle(name) as program,
        how(number, program),
    ):
        held = snapshot.read(site.pins, attached_checks.NEEDS)
        shown = [one.detail for one in neighbours.foreign_rows(held)]
        if named:
            until("it is reported", lambda: reported(plane))
            words = f"{name[:15]} (id {program.read_info().id}) at ingress of up0"
            assert words in reported(plane)[0]
            assert plane.shared.read_metrics().foreign_programs == 1
            assert shown == reported(plane)
        else:
            assert shown == reported(plane) == []
    plane.close()


TAKES = (
    "theirs (id {}) runs before kbpf's program at ingress of up0 and returned 0 (TC_ACT_OK) for a test "
    "packet, so kbpf's program did not see it; let that program return TC_ACT_UNSPEC"
)


@needs("tcx")
@alone
def test_agent_reports_a_program_that_insists_on_the_first_place(site: Site):
    """A program that was there first is no problem: ours is attached before it. One that returns to
    the first place whenever ours is moved there is reported if it keeps packets from ours (which do:
    packets/test_hook_probe.py).
    """
    make_uplink()
    number, kind = socket.if_nametoindex("up0"), ATTACH_TYPE[Direction.INGRESS]
    with idle("theirs", 0) as program:
        theirs = program.read_info().id
        link = Link.attach(program, number, kind)
        plane = serve(site)
        for _ in range(MAX_MOVES + 1):
            until("ours is first", lambda: list_attached(number, kind)[1:] == (theirs,))
            until("it is no problem", lambda: "theirs" not in str(plane.status().problems))
            link.detach()
            link = Link.attach(program, number, kind, BPF_F_BEFORE)
        until("it is reported", lambda: TAKES.format(theirs) in str(plane.status().problems))
        assert plane.shared.read_metrics().foreign_programs == 1
        link.detach()
        until("it is no problem any more", lambda: "theirs" not in str(plane.status()))
    plane.close()
