# SPDX-License-Identifier: Apache-2.0
"""The lab's rows as single packets: the same objects, programmed on a real plane, and the first
packet of each connection, from a pod's device or from outside. And what `kbpf trace` says of each.

tests/values/policy/test_dials.py checks the rows against the desired state; the lab makes real
connections of them.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import (
    CACHED_DEVICE,
    CACHED_DEVICES,
    DEVICE,
    U32,
    DeviceFlag,
    Role,
)
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.system import netns, sysctl
from kbpf.model.address import format_addr, format_endpoint
from kbpf.model.config import SocketLb
from kbpf.model.desired import Backend
from kbpf.model.inspection import Inspection
from kbpf.views import trace
from kbpf.views.trace_row import Client, Origin, Trace
from tests.support.lab.dial import Dial
from tests.support.lab.lab import ip
from tests.support.lab.lab import run as command
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
from tests.support.packets.judge import checksums
from tests.support.packets.packets import MAC_A, MAC_B, frame, tcp, udp
from tests.support.packets.parse import parse
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, run
from tests.support.plane import SIZES, Site, sites, split

SIZE = replace(SIZES, connections=16_384)
"""Large enough for the flows of all rows together."""
PORTS = itertools.count(1024)
"""Each connection is a new flow."""


def is_of_the_node(row: Dial) -> bool:
    return PAPER.is_host(row.client.removesuffix("!"))


def is_loopback(row: Dial) -> bool:
    return ip_address(format_addr(target(row).address)).is_loopback


def is_left_alone(row: Dial) -> bool:
    return row.name.startswith("source ranges: left alone")


SOCKETS_ONLY: tuple[tuple[str, Callable[[Dial], bool]], ...] = (
    ("the node's own packets come in by no device", is_of_the_node),
    ("loopback addresses are on no wire", is_loopback),
    ("packets show their source; rows_outside has these cases", is_left_alone),
)
"""Why some rows cannot be packets here. The other two layers have them, and for this layer
test_connect.py has rows of sockets."""


def rows(left_out: bool) -> list[tuple[Table, Dial]]:
    return [
        (table, row)
        for table in TABLES
        for row in table.rows
        if any(is_one(row) for _, is_one in SOCKETS_ONLY) is left_out
    ]


class Bench:
    """A plane without devices; loopback is described as the device that a packet arrives on."""

    def __init__(self, site: Site, plane: BpfPlane, where: str) -> None:
        self._site, self._plane, self._where = site, plane, where
        self._served: tuple[Table, int] | None = None
        self._read: dict[tuple[Table, int], Inspection] = {}
        self.serve(TABLES[0], 1)  # pins the programs
        folder = next(site.pins.glob("programs-tc-*"))
        self.programs = {n: Program.open(folder / n) for n in ("tc_ingress", "tc_egress")}

    def serve(self, table: Table, number: int) -> None:
        """Programs what the node of this number serves with this table."""
        if self._served != (table, number):
            state = programmed(table, number).state
            netns.run_in(Path("/run/netns") / self._where, lambda: self._plane.apply(state, None))
            self._served = table, number

    def predict(self, row: Dial, hop: Hop) -> Trace:
        """What `kbpf trace` says of the packets of this hop. Pods have no socket hooks here."""
        assert self._served is not None
        assert hop.source is not None
        if self._served not in self._read:
            inspection = snapshot.read(self._site.pins, trace.NEEDS)
            self._read[self._served] = replace(inspection, socket_lb=SocketLb.OFF)
        origin = Origin.OUTSIDE if hop.outside else Origin.POD
        client = Client(origin, addresses=(hop.source,))
        return trace.build_trace(self._read[self._served], client, target(row))

    def set_device_of(self, hop: Hop) -> None:
        """Describes loopback as the device of this hop's client."""
        role, flags = (Role.HOST, DeviceFlag(0)) if hop.outside else (Role.POD, DeviceFlag.LOCAL)
        value = DEVICE.pack(role, 14, flags, bytes(6), bytes(16), bytes(16), 0)
        with self._site.pinned("devices") as devices, self._site.pinned("device_cache") as cache:
            devices.update(U32.pack(1), value)
            cache.update(U32.pack(1 % CACHED_DEVICES), CACHED_DEVICE.pack(1, value))

    def run(self, name: str, packet: bytes) -> tuple[int, bytes]:
        """Runs a program; returns its verdict and the packet."""
        work = lambda: run(self.programs[name], frame(packet))  # noqa: E731
        done = netns.run_in(Path("/run/netns") / self._where, work)
        return done.retval, done.packet_out

    def close(self) -> None:
        for program in self.programs.values():
            program.close()


@pytest.fixture(scope="module")
def bench(artifact_cache: Path) -> Iterator[Bench]:
    where = f"kbpdial{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        ip("link set lo up", netns=where)
        for name in (
            "net.ipv4.icmp_ratelimit",
            "net.ipv6.icmp.ratelimit",
        ):  # few clients, many rows
            netns.run_in(Path("/run/netns") / where, lambda: sysctl.write(name, "0"))  # noqa: B023
        with sites(artifact_cache) as make:
            site = make(node=where)
            made = Bench(site, site.open(SIZE, packet_path=True), where)
            yield made
            made.close()
    finally:
        command("ip", "netns", "del", where)


class Outcome(NamedTuple):
    """The result for one packet: the verdict, the backend, and the source it leaves with."""

    verdict: Verdict
    to: str = ""
    seen_as: str = ""


def dial(bench: Bench, row: Dial, hop: Hop) -> Outcome:
    """Sends the first packet of a connection at this hop."""
    assert hop.source is not None
    own = format_endpoint(hop.source, next(PORTS))
    front = format_endpoint(*target(row)[:2])
    build = (lambda a, b: tcp(a, b, flags="S")) if row.protocol == "tcp" else udp
    sent = build(own, front)
    retval, raw = bench.run("tc_ingress", sent)
    if retval == TC_ACT_SHOT:
        return Outcome(Verdict.DROP)
    if retval == TC_ACT_REDIRECT:
        check_refusal(raw, own, front, row.protocol)
        return Outcome(Verdict.REFUSE)
    assert retval == TC_ACT_UNSPEC
    got = parse(raw)
    if raw[14:] == sent:
        return Outcome(Verdict.PASS)
    assert got.source == own
    assert checksums(got) == []
    _, raw = bench.run("tc_egress", raw[14:])
    left = parse(raw)
    assert (left.destination, checksums(left)) == (got.destination, [])
    return Outcome(Verdict.TRANSLATE, got.destination, left.source.rpartition(":")[0].strip("[]"))


def check_refusal(raw: bytes, own: str, front: str, protocol: str) -> None:
    """A RST from the frontend, or an ICMP error that quotes the datagram, back to its sender."""
    found = parse(raw)
    assert found.ethernet is not None
    assert (found.ethernet.destination, found.ethernet.source) == (MAC_A, MAC_B)
    assert checksums(found) == []
    if protocol == "tcp":
        assert (found.source, found.destination, found.flags) == (front, own, "RA")
        return
    assert found.embedded is not None
    assert (found.embedded.source, found.embedded.destination) == (own, front)
    code = (found.transport.type, found.transport.code)  # type: ignore[union-attr]
    assert code == ((1, 4) if own.startswith("[") else (3, 3))


@pytest.mark.parametrize(
    ("table", "row"),
    [pytest.param(*each, id=f"{each[0].name}: {each[1].name}") for each in rows(left_out=False)],
)
def test_first_packet_of_a_row(bench: Bench, table: Table, row: Dial) -> None:
    verdict, names = expected(row)
    *before, last = hops(row, sockets=False, packets=True)
    for hop in before:
        bench.serve(table, hop.number)
        bench.set_device_of(hop)
        assert bench.predict(row, hop).verdict == Verdict.PASS
        assert dial(bench, row, hop).verdict is Verdict.PASS, explain(table, row)
    bench.serve(table, last.number)
    bench.set_device_of(last)
    # With 25 tries a backend, the probability that one is never chosen is 1 in 10^11.
    outcomes = {dial(bench, row, last) for _ in range(25 * len(names) if len(names) > 1 else 3)}
    predicted = bench.predict(row, last)
    why = f"{outcomes}\n{explain(table, row)}\n{predicted}"
    assert {one.verdict for one in outcomes} == {verdict}, why
    backends = {one: Backend(*split(one.to), target(row).protocol) for one in outcomes if one.to}
    assert {named(each, names) for each in backends.values()} == names, why
    sources = {candidate.backend: candidate.source for candidate in predicted.candidates}
    assert (predicted.seen_by, predicted.verdict) == ("packet", verdict), why
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


def test_each_reason_excludes_rows() -> None:
    out = [row for _, row in rows(left_out=True)]
    assert all(any(is_one(row) for row in out) for _, is_one in SOCKETS_ONLY)
    assert len(out) < len(rows(left_out=False)) / 4
