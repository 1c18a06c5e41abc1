# SPDX-License-Identifier: Apache-2.0
"""The lab's rows as single packets: the same objects, programmed on a real plane, and the first
packet of each connection, from a pod's device or from outside. And what `kbpf trace` says of each.

tests/values/policy/test_dials.py checks the rows against the desired state; the lab makes real
connections of them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import Role
from kbpf.model.address import format_addr, format_endpoint
from kbpf.model.config import SocketLb
from kbpf.model.desired import Backend
from kbpf.model.inspection import Inspection
from kbpf.views import trace
from kbpf.views.trace_page import Client, Origin, Trace
from tests.programs.packets.path.single_packets import Path_, host_of, parsed, serving_node, wrong_sums
from tests.support.lab.dial import Dial
from tests.support.lab.paper import (
    PAPER,
    TABLES,
    Hop,
    Table,
    Verdict,
    expected,
    explain,
    hops,
    named,
    programmed,
    target,
)
from tests.support.packets.packets import tcp, udp
from tests.support.packets.parse import Packet
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC
from tests.support.plane import SIZES, split

SIZE = replace(SIZES, connections=16_384)
"""Large enough for the flows of all rows together."""
PORTS = itertools.count(1024)
"""Each connection is a new flow."""


def is_of_the_node(row: Dial) -> bool:
    """Its packets come in by no device."""
    return PAPER.is_host(row.client.removesuffix("!"))


def is_loopback(row: Dial) -> bool:
    return ip_address(format_addr(target(row).address)).is_loopback


def is_left_alone(row: Dial) -> bool:
    """Packets show their source; tests/rows/outside.py has these cases."""
    return row.name.startswith("source ranges: left alone")


def needs_a_socket(row: Dial) -> bool:
    """Whether it cannot be packets here. The other two layers have it, and for this layer
    test_connect.py has rows of sockets.
    """
    return is_of_the_node(row) or is_loopback(row) or is_left_alone(row)


class Bench:
    """A plane without devices; loopback is described as the device that a packet arrives on."""

    def __init__(self, path: Path_) -> None:
        self.path = path
        self._served: tuple[Table, int] | None = None
        self._read: dict[tuple[Table, int], Inspection] = {}

    def serve(self, table: Table, number: int) -> None:
        """Programs what the node of this number serves with this table."""
        if self._served != (table, number):
            state = programmed(table, number).state
            self.path.inside(lambda: self.path.plane.apply(state, None))
            self._served = table, number

    def predict(self, row: Dial, hop: Hop) -> Trace:
        """What `kbpf trace` says of the packets of this hop. Pods have no socket hooks here."""
        if self._served not in self._read:
            inspection = snapshot.read(self.path.site.pins, trace.NEEDS)
            self._read[self._served] = replace(inspection, socket_lb=SocketLb.OFF)
        origin = Origin.OUTSIDE if hop.outside else Origin.POD
        client = Client(origin, addresses=(hop.source,))
        return trace.build_trace(self._read[self._served], client, target(row))


@pytest.fixture(scope="module")
def bench(artifact_cache: Path) -> Iterator[Bench]:
    with serving_node(artifact_cache, "dial", programmed(TABLES[0], 1).state, sizes=SIZE) as path:
        yield Bench(path)


class Outcome(NamedTuple):
    """The result for one packet: the verdict, the backend, and the source it leaves with."""

    verdict: Verdict
    to: str = ""
    seen_as: str = ""


def dial(bench: Bench, row: Dial, hop: Hop) -> Outcome:
    """Sends the first packet of a connection at this hop."""
    own = format_endpoint(hop.source, next(PORTS))
    front = format_endpoint(*target(row)[:2])
    sent = tcp(own, front, flags="S") if row.protocol == "tcp" else udp(own, front)
    retval, inside = bench.path.ingress(sent)
    got = parsed(inside)
    if retval == TC_ACT_SHOT:
        return Outcome(Verdict.DROP)
    assert wrong_sums(inside) == []
    if retval == TC_ACT_REDIRECT:
        check_refusal(got, own, front)
        return Outcome(Verdict.REFUSE)
    assert retval == TC_ACT_UNSPEC
    if inside == sent:
        return Outcome(Verdict.PASS)
    assert got.source == own
    _, out = bench.path.egress(inside)
    left = parsed(out)
    assert (left.destination, wrong_sums(out)) == (got.destination, [])
    return Outcome(Verdict.TRANSLATE, got.destination, host_of(left.source))


def check_refusal(found: Packet, own: str, front: str) -> None:
    """A RST from the frontend, or an ICMP error that quotes the datagram, back to its sender."""
    if found.flags:
        assert (found.source, found.destination, found.flags) == (front, own, "RA")
        return
    assert (found.embedded.source, found.embedded.destination) == (own, front)
    code = (found.transport.type, found.transport.code)
    assert code == ((1, 4) if own.startswith("[") else (3, 3))


@pytest.mark.parametrize(
    ("table", "row"),
    [
        pytest.param(table, row, id=f"{table.name}: {row.name}")
        for table in TABLES
        for row in table.rows
        if not needs_a_socket(row)
    ],
)
def test_first_packet_of_a_row(bench: Bench, table: Table, row: Dial):
    verdict, names = expected(row)
    *before, last = hops(row, sockets=False, packets=True)
    for hop in before:
        bench.serve(table, hop.number)
        bench.path.set_loopback_role(Role.HOST if hop.outside else Role.POD)
        assert bench.predict(row, hop).verdict == Verdict.PASS
        assert dial(bench, row, hop).verdict is Verdict.PASS, explain(table, row)
    bench.serve(table, last.number)
    bench.path.set_loopback_role(Role.HOST if last.outside else Role.POD)
    # With 25 tries a backend, the probability that one is never chosen is 1 in 10^11.
    before = bench.path.site.reasons()
    outcomes = {dial(bench, row, last) for _ in range(25 * len(names) if len(names) > 1 else 3)}
    counted = {reason.name.lower() for reason in bench.path.site.reasons() - before}
    predicted = bench.predict(row, last)
    why = f"{outcomes}\n{explain(table, row)}\n{predicted}"
    assert {one.verdict for one in outcomes} == {verdict}, why
    backends = {one: Backend(*split(one.to), target(row).protocol) for one in outcomes if one.to}
    assert {named(each, names) for each in backends.values()} == names, why
    sources = {candidate.backend: candidate.source for candidate in predicted.candidates}
    assert (predicted.seen_by, predicted.verdict, {predicted.reason}) == ("packet", verdict, counted), why
    assert set(sources) == {one.to for one in outcomes if one.to}, why
    assert all(abs(c.share - 1 / len(names)) < 0.001 for c in predicted.candidates), why
    for one, backend in backends.items():
        if leaves(backend, last):
            assert one.seen_as == row.backend_sees or not row.backend_sees, why
            own = format_addr(last.source) if last.source else ""
            assert sources[one.to] == ("client" if one.seen_as == own else "node"), why


def leaves(backend: Backend, hop: Hop) -> bool:
    """Whether a packet to this backend leaves the node by a device, and so passes tc_egress."""
    home = PAPER.homes[hop.number]
    return format_addr(backend.address) not in home.addresses
