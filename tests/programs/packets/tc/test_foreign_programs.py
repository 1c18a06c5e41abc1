# SPDX-License-Identifier: Apache-2.0
"""How programs on devices share a hook with foreign programs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Link, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE, AttachMethod, Direction, FilterIdentity, TcAttacher
from tests.programs.packets.tc.net import Net, both_directions, idle, program_id
from tests.support.features import needs

# ---- foreign programs --------------------------------------------------------------------------


@both_directions
@needs("tcx")
def test_foreign_tcx_programs_keep_their_order(
    net: Net, programs: list[Program], direction: Direction
):
    index, kind = net.index("here"), ATTACH_TYPE[direction]
    one, other, ours, newer = programs
    first = net.inside(lambda: Link.attach(one, index, kind))
    net.attach(AttachMethod.TCX, ours, direction)
    last = net.inside(lambda: Link.attach(other, index, kind))
    with first, last:
        around = [program_id(one), program_id(other)]
        assert net.tcx(direction) == [around[0], program_id(ours), around[1]]
        net.attach(AttachMethod.TCX, newer, direction)
        assert net.tcx(direction) == [around[0], program_id(newer), around[1]]
        net.detach_all()
        assert net.tcx(direction) == around
        net.attach(AttachMethod.CLSACT, ours, direction)
        net.detach_all()
        assert net.tcx(direction) == around


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
    words = f"filter add dev here {direction} prio {priority} bpf da object-pinned {program}"
    net.tc(*words.split())


@both_directions
def test_foreign_clsact_filters_keep_their_order(
    net: Net, programs: list[Program], foreign: Path, direction: Direction
):
    net.tc("qdisc", "add", "dev", "here", "clsact")
    for priority in (1, FilterIdentity().priority, 7):
        add_foreign(net, foreign, direction, priority)
    others = net.filters(direction)
    assert len(others) == 3
    for program in programs[:2]:
        net.attach(AttachMethod.CLSACT, program, direction)
        names = net.filters(direction)
        assert [name for name in names if name != "kbpf"] == others
        assert names.count("kbpf") == 1
        assert names[0] != "kbpf"
        assert names[-1] != "kbpf"
    net.detach_all()
    assert net.filters(direction) == others
    assert net.qdiscs() == "clsact"


def test_own_clsact_stays_while_others_use_it(net: Net, programs: list[Program], foreign: Path):
    net.attach(AttachMethod.CLSACT, programs[0])
    add_foreign(net, foreign, Direction.EGRESS, 7)
    net.detach_all()
    assert len(net.filters(Direction.EGRESS)) == 1
    assert net.qdiscs() == "clsact"


def test_foreign_empty_clsact_stays(net: Net, programs: list[Program]):
    net.tc("qdisc", "add", "dev", "here", "clsact")
    net.attach(AttachMethod.CLSACT, programs[0])
    net.detach_all()
    assert net.qdiscs() == "clsact"


def test_clsact_recreated_by_others_stays(net: Net, programs: list[Program]):
    net.attach(AttachMethod.CLSACT, programs[0])
    net.tc("qdisc", "del", "dev", "here", "clsact")
    net.tc("qdisc", "add", "dev", "here", "clsact")
    assert net.attached() == ()
    net.attach(AttachMethod.CLSACT, programs[0])
    assert len(net.attached()) == 1
    net.detach_all()
    assert net.qdiscs() == "clsact"


def test_clsact_recreated_by_others_stays_after_listing(net: Net, programs: list[Program]):
    index = net.index("here")
    net.attach(AttachMethod.CLSACT, programs[0])
    net.tc("qdisc", "del", "dev", "here", "clsact")
    net.tc("qdisc", "add", "dev", "here", "clsact")

    def work(tc: TcAttacher) -> None:
        assert tc.list_all() == ()
        made = tc.attach(index, Direction.INGRESS, programs[0])
        assert made is not None
        tc.detach(made)
        tc.detach(made)

    net.ours(AttachMethod.CLSACT, work)
    assert net.qdiscs() == "clsact"


def test_detach_of_a_stale_attachment_leaves_a_foreign_clsact(net: Net, programs: list[Program]):
    made = net.attach(AttachMethod.CLSACT, programs[0])
    assert made is not None
    net.tc("qdisc", "del", "dev", "here", "clsact")
    net.tc("qdisc", "add", "dev", "here", "clsact")
    net.ours(AttachMethod.CLSACT, lambda tc: tc.detach(made))
    assert net.qdiscs() == "clsact"


def test_foreign_ingress_qdisc_accepts_ingress_only(net: Net, programs: list[Program]):
    net.tc("qdisc", "add", "dev", "here", "ingress")
    net.attach(AttachMethod.CLSACT, programs[0])
    with pytest.raises(KernelError, match=r"egress of here, clsact.*'ingress' qdisc"):
        net.attach(AttachMethod.CLSACT, programs[0], Direction.EGRESS)
    assert [one.direction for one in net.attached()] == [Direction.INGRESS]
    net.detach_all()
    assert net.attached() == ()
    assert net.qdiscs() == "ingress"


def test_foreign_filter_with_our_priority_is_not_overwritten(net: Net, programs: list[Program]):
    theirs = FilterIdentity(name="theirs")
    index = net.index("here")
    net.ours(
        AttachMethod.CLSACT, lambda tc: tc.attach(index, Direction.INGRESS, programs[0]), theirs
    )
    with pytest.raises(KernelError, match=r"EEXIST.*another filter has our priority and handle"):
        net.attach(AttachMethod.CLSACT, programs[1])
    net.detach_all()
    assert net.filters(Direction.INGRESS) == ["theirs"]


@pytest.mark.parametrize(
    "theirs",
    [
        FilterIdentity(priority=3),
        FilterIdentity(handle=1),
        FilterIdentity(priority=3, handle=1, name="theirs"),
    ],
)
def test_filter_with_one_different_field_is_foreign(
    net: Net, programs: list[Program], theirs: FilterIdentity
):
    index = net.index("here")
    net.ours(
        AttachMethod.CLSACT, lambda tc: tc.attach(index, Direction.INGRESS, programs[0]), theirs
    )
    assert net.attached() == ()
    net.attach(AttachMethod.CLSACT, programs[1])
    assert sorted(net.filters(Direction.INGRESS)) == sorted(["kbpf", theirs.name])
    assert [one.program_id for one in net.attached()] == [program_id(programs[1])]
    net.detach_all()
    assert net.filters(Direction.INGRESS) == [theirs.name]
