# SPDX-License-Identifier: Apache-2.0
"""Cilium as CNI without kube-proxy replacement, imitated: programs with the names, hooks, place and
result of cilium v1.20.2. bpf/bpf_host.c and bpf/bpf_lxc.c return TC_ACT_OK; to a pod there is a
program only with endpoint routes. pkg/datapath/loader/tcx.go attaches a link behind those that are
there, and a restarted agent updates it; tc.go replaces a filter of priority 1 with handle 1.
"""

import socket
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest

from kbpf.kernel.bpf.clsact import Direction, FilterIdentity
from kbpf.kernel.bpf.objects import Link, Map
from kbpf.kernel.bpf.tc import ATTACH_TYPE, AttachMethod, TcAttacher
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_HASH
from tests.lab.outside.test_programs_of_others import check_attached
from tests.programs.packets.tc.net import PAIR, recording
from tests.support.features import lacking
from tests.support.lab.dial import Dial
from tests.support.lab.field import NODES4, OUT4, WITH_CONNTRACK, Field, check, forward, there
from tests.support.lab.lab import Node, run, until
from tests.support.table import table

TC_ACT_OK = 0
NAMES = {
    ("eth0", Direction.INGRESS): "cil_from_netdev",
    ("eth0", Direction.EGRESS): "cil_to_netdev",
    ("pod", Direction.INGRESS): "cil_from_container",
    ("pod", Direction.EGRESS): "cil_to_container",
}
MOVED_WITHIN_S = 25
"""The kernel notifies of new filters; without that the agent would look every 30 s."""


class Case(NamedTuple):
    method: AttachMethod
    is_first: bool  # Cilium has attached its programs before kbpf
    forwarding: str


CASES = [
    Case(AttachMethod.TCX, True, "stack"),
    Case(AttachMethod.TCX, False, WITH_CONNTRACK[-1]),
    Case(AttachMethod.CLSACT, True, "direct"),
    Case(AttachMethod.CLSACT, False, "stack"),
]


class CiliumField(Field):
    def __init__(self, case: Case) -> None:
        modules = {AttachMethod.TCX: "kbpf", AttachMethod.CLSACT: CLSACT_AGENT}
        super().__init__(*forward(case.forwarding), name="ci", module=modules[case.method], agents=1)
        self.case = case
        self.links: dict[tuple[str, str, Direction], Link] = {}
        self.seen: dict[str, Map] = {}

    def bring_up(self) -> None:
        for name in NAMES.values():
            self.seen[name] = self.own.enter_context(Map.create(BPF_MAP_TYPE_HASH, "seen", PAIR.size, 4, 1024))
        if self.case.is_first:
            self.start_cilium()
        super().bring_up()
        if not self.case.is_first:
            self.start_cilium()

    def start_cilium(self) -> None:
        """As Cilium's agent does at each start: attaches or replaces its programs."""
        for node in self.lab.nodes:
            devices = ["eth0", *(f"p{index}" for index in range(1, len(node.pods) + 1))]
            for device in devices:
                for direction in Direction:
                    there(node.host, partial(self._attach, node, device, direction))

    def _attach(self, node: Node, device: str, direction: Direction) -> None:
        name = NAMES["eth0" if device == "eth0" else "pod", direction]
        number = socket.if_nametoindex(device)
        with recording(name, self.seen[name], TC_ACT_OK) as program:
            if self.case.method is AttachMethod.CLSACT:
                with self._filters(name) as filters:
                    filters.attach(number, direction, program)
            elif link := self.links.get((node.name, device, direction)):
                link.update(program)
            else:
                link = Link.attach(program, number, ATTACH_TYPE[direction])
                self.links[node.name, device, direction] = self.own.enter_context(link)

    def _filters(self, name: str) -> TcAttacher:
        identity = FilterIdentity(1, f"{name}-eth0")
        return TcAttacher(self.lab.folder / "cilium", AttachMethod.CLSACT, identity)

    def remove_cilium(self) -> None:
        for link in self.links.values():
            link.detach()
        if self.case.method is AttachMethod.CLSACT:
            for node in self.lab.nodes:
                there(node.host, self._remove_filters)

    def _remove_filters(self) -> None:
        for name in NAMES.values():
            with self._filters(name) as filters:
                for attachment in filters.list_all():
                    filters.detach(attachment)

    def read_seen(self, name: str) -> set[tuple[str, int, str]]:
        """Source, its port, and destination of the packets that the programs of this name have seen."""
        rows = (PAIR.unpack(key) for key, _ in self.seen[name].items())
        ends = ((socket.inet_ntoa(a), int.from_bytes(p, "big"), socket.inet_ntoa(b)) for a, b, p, _ in rows)
        return set(ends)


CLSACT_AGENT = "tests.support.runtime.clsact_agent"


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda case: f"{case.method} {'before' if case.is_first else 'behind'} kbpf, {case.forwarding}",
)
def field(request) -> Iterator[CiliumField]:
    case: Case = request.param
    if case.method is AttachMethod.TCX and lacking("tcx"):
        pytest.skip("this kernel has no TCX")
    with CiliumField(case) as made:
        made.create(*made.all_of("1 11:UDP -> a1\n2 -> b1\n4 -> a1 b1 external=Local"))
        made.settle()
        if case.method is AttachMethod.CLSACT and not case.is_first:
            # Of the filters of one priority the newest runs first, so ours have to be moved.
            for direction in Direction:
                until(
                    f"kbpf's filter is first at {direction}",
                    partial(is_first_filter, made.lab.nodes[0], direction),
                    MOVED_WITHIN_S,
                )
        yield made


def is_first_filter(node: Node, direction: Direction) -> bool:
    lines = run("tc", "-n", node.netns, "filter", "show", "dev", "eth0", direction).splitlines()
    return "kbpf" in next(line for line in lines if "direct-action" in line)


ROWS = table(
    Dial,
    """
a Service's pod here      | a2      | 10.96.0.1:80           | a1 | tcp | 10.244.1.3
a Service's pod elsewhere | a2      | 10.96.0.2:80           | b1 | tcp | 10.244.1.3
a pod here                | outside | 198.18.0.1:30001       | a1 | tcp | 198.18.0.1
a pod here, IPv6          | outside | [fd00:198:18::1]:30001 | a1 | tcp | fd00:198:18::1
a pod here, UDP           | outside | 198.18.0.1:30011       | a1 | udp | 198.18.0.1
a pod elsewhere           | outside | 198.18.0.1:30002       | b1 | tcp | 198.18.0.1
Local                     | outside | 198.18.0.1:30004       | a1 | tcp | 198.18.0.254
""",
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_dial(field: CiliumField, row: Dial):
    check(field, row)


def test_nothing_is_wrong(field: CiliumField, capsys):
    # A filter that had to be moved was a problem until then.
    until("Cilium's programs are no problem", lambda: "cil_" not in str((field.agent.status() or {})["problems"]))
    until(
        "kbpf's programs are first at all devices",
        lambda: check_attached(field, capsys) == (0, []),
        state=lambda: check_attached(field, capsys),
    )


def test_cilium_sees_replies_at_the_uplink_as_the_client_does(field: CiliumField):
    """As with kube-proxy, and also where replies are redirected past the stack."""
    field["outside"].many(5, NODES4[0], 30001, protocol="tcp")
    senders = {seen[:2] for seen in field.read_seen("cil_to_netdev") if seen[2] == OUT4}
    assert (NODES4[0], 30001) in senders
    assert not any(address.startswith("10.244.") for address, _ in senders)


def test_a_restart_of_cilium_disturbs_nothing(field: CiliumField, capsys):
    field.start_cilium()
    for row in ROWS:
        check(field, row)
    assert check_attached(field, capsys) == (0, [])


def test_without_cilium_everything_works(field: CiliumField, capsys):
    field.remove_cilium()
    for row in ROWS:
        check(field, row)
    assert check_attached(field, capsys) == (0, [])
