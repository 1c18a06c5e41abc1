# SPDX-License-Identifier: Apache-2.0
"""How programs on devices share a hook with foreign programs, and the place among them that the device thread keeps."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.packet_path import attach
from kbpf.dataplane.bpf.packet_path.attach import MAX_MOVES, DeviceAttachments, DeviceReport
from kbpf.errors import KernelError
from kbpf.kernel.bpf.clsact import Direction, FilterIdentity
from kbpf.kernel.bpf.objects import Link, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE, AttachMethod, TcAttacher
from kbpf.kernel.bpf.uapi import BPF_F_BEFORE
from kbpf.kernel.net.devices import list_devices
from tests.programs.packets.tc.net import Net, both_directions, both_ways, idle, program_id
from tests.support.features import needs

# ---- foreign programs --------------------------------------------------------------------------


@both_directions
@needs("tcx")
def test_tcx_programs_are_first(net: Net, programs: list[Program], direction: Direction):
    index, kind = net.index("here"), ATTACH_TYPE[direction]
    one, other, ours, newer = programs
    first = net.do(lambda: Link.attach(one, index, kind))
    net.attach(AttachMethod.TCX, ours, direction)
    last = net.do(lambda: Link.attach(other, index, kind))
    with first, last:
        others = [program_id(one), program_id(other)]
        assert net.tcx(direction) == [program_id(ours), *others]
        assert not any(net.misplaced())
        net.attach(AttachMethod.TCX, newer, direction)
        assert net.tcx(direction) == [program_id(newer), *others]
        net.detach_all()
        assert net.tcx(direction) == others
        net.attach(AttachMethod.CLSACT, ours, direction)
        net.detach_all()
        assert net.tcx(direction) == others


@pytest.fixture
def foreign(net: Net) -> Iterator[Path]:
    """A pinned program of another agent."""
    path = net.folder.parent / f"{net.name}-foreign"
    with idle("foreign") as program:
        program.pin(path)
        yield path
    path.unlink()


def add_foreign(net: Net, program: Path, direction: Direction, priority: int) -> None:
    """Adds a filter as another agent does."""
    net.tc(f"filter add dev here {direction} prio {priority} bpf da object-pinned {program}")


@both_directions
def test_clsact_filters_are_first(net: Net, programs: list[Program], foreign: Path, direction: Direction):
    net.tc("qdisc add dev here clsact")
    for priority in (1, 7):
        add_foreign(net, foreign, direction, priority)
    others = net.filters(direction)
    assert len(others) == 2
    for program in programs[:2]:
        net.attach(AttachMethod.CLSACT, program, direction)
        assert net.filters(direction) == ["kbpf", *others]
        assert not any(net.misplaced())
    net.detach_all()
    assert net.filters(direction) == others
    assert net.qdiscs() == "clsact"


@both_directions
def test_clsact_filter_beside_a_priority_of_another_kind(net: Net, programs: list[Program], direction: Direction):
    """All filters of one priority have one kind, so ours takes the next priority."""
    net.tc("qdisc add dev here clsact")
    net.tc(f"filter add dev here {direction} prio 1 u32 match u32 0 0 classid 1:1")
    net.attach(AttachMethod.CLSACT, programs[0], direction)
    shown = net.tc(f"filter show dev here {direction}")
    assert "pref 2 bpf" in shown
    assert not any(net.misplaced())
    net.tc(f"filter del dev here {direction} prio 1")
    (attachment,) = net.attached()
    assert attachment.misplaced, "the better place is free now"
    index = net.index("here")
    net.ours(AttachMethod.CLSACT, lambda tc: tc.move(index, direction, programs[0]))
    shown = net.tc(f"filter show dev here {direction}")
    assert ("pref 1 bpf" in shown, "pref 2 " in shown) == (True, False)
    assert net.misplaced() == [False]


def test_clsact_recreated_by_others_stays(net: Net, programs: list[Program]):
    """Also when what was attached to the former one is detached."""
    index = net.index("here")
    stale = net.attach(AttachMethod.CLSACT, programs[0])
    net.tc("qdisc del dev here clsact")
    net.tc("qdisc add dev here clsact")

    def work(tc: TcAttacher) -> None:
        tc.detach(stale)
        assert net.qdiscs() == "clsact"
        assert tc.list_all() == ()
        made = tc.attach(index, Direction.INGRESS, programs[0])
        tc.detach(made)
        tc.detach(made)

    net.ours(AttachMethod.CLSACT, work)
    assert net.qdiscs() == "clsact"


def test_foreign_ingress_qdisc_accepts_ingress_only(net: Net, programs: list[Program]):
    net.tc("qdisc add dev here ingress")
    net.attach(AttachMethod.CLSACT, programs[0])
    with pytest.raises(KernelError, match=r"egress of here, clsact.*'ingress' qdisc"):
        net.attach(AttachMethod.CLSACT, programs[0], Direction.EGRESS)
    assert [one.direction for one in net.attached()] == [Direction.INGRESS]
    net.detach_all()
    assert net.attached() == ()
    assert net.qdiscs() == "ingress"


def test_foreign_filters_with_our_priority_and_handles_are_not_overwritten(net: Net, programs: list[Program]):
    index, ours = net.index("here"), FilterIdentity()
    for number, handle in enumerate(ours.handles):
        theirs = FilterIdentity(handle, "theirs")
        net.ours(
            AttachMethod.CLSACT,
            lambda tc, number=number: tc.attach(index, Direction.INGRESS, programs[number]),
            theirs,
        )
        if number == 0:
            net.attach(AttachMethod.CLSACT, programs[2])
            assert net.filters(Direction.INGRESS) == ["kbpf", "theirs"]
            net.detach_all()
    with pytest.raises(KernelError, match=r"EEXIST.*other filters have our priority and handles"):
        net.attach(AttachMethod.CLSACT, programs[1])
    net.detach_all()
    assert net.filters(Direction.INGRESS) == ["theirs", "theirs"]


def test_filter_with_our_name_and_another_handle_is_foreign(net: Net, programs: list[Program]):
    index, theirs = net.index("here"), FilterIdentity(handle=1)
    net.ours(AttachMethod.CLSACT, lambda tc: tc.attach(index, Direction.INGRESS, programs[0]), theirs)
    assert net.attached() == ()
    net.attach(AttachMethod.CLSACT, programs[1])
    assert sorted(net.filters(Direction.INGRESS)) == sorted(["kbpf", theirs.name])
    assert [one.program_id for one in net.attached()] == [program_id(programs[1])]
    net.detach_all()
    assert net.filters(Direction.INGRESS) == [theirs.name]


# ---- the place of our programs ---------------------------------------------------------------------


@pytest.fixture
def ours() -> Iterator[Program]:
    with idle("ours") as program:
        yield program


def sync(net: Net, devices: DeviceAttachments, program: Program) -> DeviceReport:
    return net.do(lambda: devices.sync(list_devices(), lambda *_: program))


def attach_in_front(net: Net, how: AttachMethod, theirs: Program, direction: Direction) -> Callable[[], object]:
    """Attaches a program as another agent would that wants to be first; returns what removes it."""
    if how is AttachMethod.TCX:
        index = net.index("here")
        attach_type = ATTACH_TYPE[direction]
        return net.do(lambda: Link.attach(theirs, index, attach_type, BPF_F_BEFORE)).close
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
    monkeypatch,
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
