# SPDX-License-Identifier: Apache-2.0
"""A packet that is sent through the hooks of a device shows whether our programs see it, and if
not, which program keeps it from them.

The programs of others have two instructions each: their result is all that matters.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.checks import connect as attached_checks
from kbpf.checks import neighbours
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.bpf.packet_path import device_thread
from kbpf.dataplane.bpf.programs import hook_probe
from kbpf.dataplane.bpf.programs.hook_probe import ProbeOutcome
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Link, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE, AttachMethod, TcAttacher
from kbpf.kernel.bpf.uapi import BPF_F_BEFORE
from kbpf.kernel.net.devices import list_devices
from kbpf.model.address import parse_addr
from tests.programs.packets.tc.net import filter_of_others
from tests.programs.packets.tc.net import idle as returning
from tests.support.alone import alone, make_uplink, serve
from tests.support.features import lacking, needs
from tests.support.lab.lab import ip, until
from tests.support.plane import Site
from tests.support.table import table

FRONTENDS = (parse_addr("192.0.2.1"), parse_addr("2001:db8:1::1"))
OK = 0


class Row(NamedTuple):
    """A program of another tool: its name, its result, and where it is attached; whether it then
    keeps packets from ours, in TCX and as a filter.
    """

    name: str
    result: int
    in_front: bool
    direction: Direction
    taken: bool
    filter_takes: bool


ROWS = table(
    Row,
    """
ok_in_front | 0 | yes | INGRESS | yes | yes
shot_in_front | 2 | yes | INGRESS | yes | yes
next_in_front | -1 | yes | INGRESS | no | no
pipe_in_front | 3 | yes | INGRESS | yes | no
ok_behind | 0 | no | INGRESS | no | no
ok_in_front | 0 | yes | EGRESS | yes | yes
next_in_front | -1 | yes | EGRESS | no | no
ok_behind | 0 | no | EGRESS | no | no
""",
)


@contextlib.contextmanager
def tcx(ifindex: int, row: Row, program: Program) -> Iterator[None]:
    flags = BPF_F_BEFORE if row.in_front else 0
    with Link.attach(program, ifindex, ATTACH_TYPE[row.direction], flags):
        yield


def clsact(ifindex: int, row: Row, program: Program) -> contextlib.AbstractContextManager[None]:
    # priority 1: the newest of this priority runs first
    return filter_of_others(ifindex, row.direction, program, 1 if row.in_front else 9)


def probe_all(site: Site) -> dict[tuple[Direction, int], ProbeOutcome]:
    """Probes both hooks of up0 with both families."""
    pins = pinning.Pins(site.pins)
    with (
        TcAttacher(pins.root / "devices") as kernel,
        pinning.open_map(pins.maps / "fragments", MAPS["fragments"]) as fragments,
    ):
        points = hook_probe.list_points(kernel, list_devices())
        return {
            (point.direction, family): hook_probe.probe(fragments, point, frontend, 30080)
            for point in points
            for family, frontend in zip((4, 6), FRONTENDS, strict=True)
        }


def started(site: Site, method: AttachMethod) -> None:
    """Starts an agent that does not move its programs before others: the probes would miss them."""
    make_uplink(method)
    device_thread.RESYNC_INTERVAL_S = device_thread.FILTER_DELAY_S = 600.0
    serve(site)


METHODS = [
    pytest.param(AttachMethod.TCX, tcx, marks=needs("tcx"), id="tcx"),
    pytest.param(AttachMethod.CLSACT, clsact, id="clsact"),
]


@pytest.mark.parametrize(("method", "attach"), METHODS)
@alone
def test_probe_names_the_program_that_keeps_packets_from_ours(
    site: Site, method: AttachMethod, attach: Callable[..., contextlib.AbstractContextManager[None]]
):
    started(site, method)
    index = socket.if_nametoindex("up0")
    assert len(probe_all(site)) == 4
    for row in ROWS:
        assert all(outcome.reached for outcome in probe_all(site).values()), row
        with returning(row.name, row.result) as program, attach(index, row, program):
            for (direction, family), outcome in probe_all(site).items():
                takes = row.taken if method is AttachMethod.TCX else row.filter_takes
                taken = takes and direction is row.direction
                assert outcome.reached is not taken, (row, direction, family)
                if taken:
                    assert outcome.taker.program_id == program.read_info().id
                    assert outcome.result == row.result
                else:
                    assert outcome.taker is None


@alone
def test_probe_disturbs_nobody(site: Site):
    """No packet gets past the IP stack of this node or of its neighbour."""

    def counters() -> dict[str, int]:
        lines = Path("/proc/net/snmp").read_text().splitlines()
        names, values = (line.split()[1:] for line in lines if line.startswith("Ip:"))
        return dict(zip(names, map(int, values), strict=True))

    started(site, AttachMethod.CLSACT if lacking("tcx") else AttachMethod.TCX)
    ip("addr add 192.0.2.1/24 dev up0")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003)) as wire:
        wire.bind(("up1", 0x0003))
        before = counters()
        assert all(outcome.reached for outcome in probe_all(site).values())
        after = counters()
        frames: list[bytes] = []

        def is_through() -> bool:
            frames.extend(each for each in iter_frames(wire) if each[12:14] == b"\x08\x00")
            return bool(frames)

        until("it has reached the neighbour", is_through)
    assert after["InDelivers"] == before["InDelivers"]
    assert after["ForwDatagrams"] == before["ForwDatagrams"]
    assert after["ReasmReqds"] == before["ReasmReqds"]
    assert after["OutRequests"] == before["OutRequests"], "nothing is answered"
    (frame,) = frames
    assert frame[:6] == frame[6:12], "to the device itself, so that no switch forwards it"


def iter_frames(wire: socket.socket) -> Iterator[bytes]:
    wire.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            yield wire.recv(2048)


@needs("tcx")
@alone
def test_check_says_which_hooks_are_not_reached(site: Site):
    started(site, AttachMethod.TCX)
    index = socket.if_nametoindex("up0")

    def rows() -> list[tuple[str, str, str]]:
        inspection = snapshot.read(site.pins, attached_checks.NEEDS)
        return [(r.name, r.result, r.detail) for r in neighbours.packet_rows(inspection)]

    working = "kbpf's programs see them at ingress and egress; tried on 1 devices"
    assert rows() == [("packets", "yes", working)]
    for direction in Direction:
        row = Row("theirs", OK, True, direction, True, True)
        with returning("theirs", OK) as program, tcx(index, row, program):
            number = program.read_info().id
            assert rows() == [
                (
                    f"packets at {direction} of up0",
                    "no",
                    f"theirs (id {number}, tcx) runs before kbpf's program and returned 0 "
                    "(TC_ACT_OK), so kbpf's program did not see the packet",
                )
            ]
    assert rows() == [("packets", "yes", working)]
