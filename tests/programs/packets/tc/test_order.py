# SPDX-License-Identifier: Apache-2.0
"""The place of our programs among those of others, as the device thread keeps it."""

from collections.abc import Callable, Iterator

import pytest

from kbpf.dataplane.bpf.packet_path import attach
from kbpf.dataplane.bpf.packet_path.attach import MAX_MOVES, DeviceAttachments, DeviceReport
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Link, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE, AttachMethod
from kbpf.kernel.bpf.uapi import BPF_F_BEFORE
from kbpf.kernel.net.devices import list_devices
from tests.programs.packets.tc.net import Net, both_directions, both_ways, idle, program_id
from tests.programs.packets.tc.test_foreign_programs import add_foreign
from tests.support.features import needs


@pytest.fixture
def ours() -> Iterator[Program]:
    with idle("ours") as program:
        yield program


def sync(net: Net, devices: DeviceAttachments, program: Program) -> DeviceReport:
    return net.inside(lambda: devices.sync(list_devices(), lambda *_: program))


def attach_in_front(net: Net, how: AttachMethod, theirs: Program, direction: Direction) -> Callable[[], object]:
    """Attaches a program as another agent would that wants to be first; returns what removes it."""
    if how is AttachMethod.TCX:
        index = net.index("here")
        attach_type = ATTACH_TYPE[direction]
        return net.inside(lambda: Link.attach(theirs, index, attach_type, BPF_F_BEFORE)).close
    path = net.folder.parent / f"{net.name}-theirs"
    theirs.pin(path)
    add_foreign(net, path, direction, 1)
    path.unlink()
    return lambda: net.tc(f"filter del dev here {direction} prio 1 bpf")


def is_first(net: Net, how: AttachMethod, ours: Program, direction: Direction) -> bool:
    if how is AttachMethod.TCX:
        return net.tcx(direction)[0] == program_id(ours)
    first, *others = net.filters(direction)
    return first == "kbpf" and "kbpf" not in others


@both_ways
@both_directions
def test_a_program_in_front_is_passed_a_few_times_an_hour(
    net: Net,
    ours: Program,
    how: AttachMethod,
    direction: Direction,
    monkeypatch: pytest.MonkeyPatch,
):
    now = [0.0]
    monkeypatch.setattr(attach.time, "monotonic", lambda: now[0])
    devices = DeviceAttachments(net.folder, patterns=("here",), method=how)
    assert sync(net, devices, ours).moved == 0
    for round_ in range(MAX_MOVES + 2):
        now[0] += 60
        with idle("theirs") as theirs:
            remove = attach_in_front(net, how, theirs, direction)
            assert not is_first(net, how, ours, direction)
            report = sync(net, devices, ours)
            moved = round_ < MAX_MOVES
            assert (report.moved, is_first(net, how, ours, direction)) == (moved, moved)
            assert report.failed == {}
            assert sync(net, devices, ours).moved == 0, "once is enough"
            if round_ == MAX_MOVES + 1:
                now[0] += attach.MOVE_PERIOD_S
                assert sync(net, devices, ours).moved == 1, "the next hour has its own moves"
                assert is_first(net, how, ours, direction)
            if how is AttachMethod.TCX:
                remove()


@needs("tcx")
@both_directions
def test_an_upgrade_moves_the_link_of_an_earlier_version(net: Net, ours: Program, direction: Direction):
    """Earlier versions attached their links after the programs that were there."""
    devices = DeviceAttachments(net.folder, patterns=("here",))
    with idle("theirs") as theirs, idle("older") as older:
        sync(net, devices, older)
        remove = attach_in_front(net, AttachMethod.TCX, theirs, direction)
        assert not is_first(net, AttachMethod.TCX, older, direction)
        report = sync(net, DeviceAttachments(net.folder, patterns=("here",)), ours)
        assert (report.replaced, report.moved) == (2, 1)
        assert net.tcx(direction) == [program_id(ours), program_id(theirs)]
        remove()
