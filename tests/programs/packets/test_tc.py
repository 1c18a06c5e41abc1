# SPDX-License-Identifier: Apache-2.0
"""Programs on devices by both methods, TCX and clsact: which packets they see, how they share a
hook with foreign programs, and what remains when they are detached.

Hand-assembled programs count frames of an unused EtherType, each in its own element of a map, so a
frame that no program saw is missing from the sum.
"""

import itertools
import os
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import (
    Link,
    Map,
    Program,
)
from kbpf.kernel.bpf.tc import (
    ATTACH_TYPE,
    Attachment,
    AttachMethod,
    Direction,
    FilterIdentity,
    TcAttacher,
    probe_tcx,
)
from kbpf.kernel.bpf.uapi import (
    BPF_MAP_TYPE_ARRAY,
    BPF_PROG_TYPE_SCHED_CLS,
)
from kbpf.kernel.system import netns
from tests.support.features import lacking, needs
from tests.support.lab.lab import ip, run, until

T = TypeVar("T")

ETHERTYPE = 0x88B5  # for local experiments: no other frame on the veth pair has it
FRAME = bytes(6) + bytes(6) + ETHERTYPE.to_bytes(2, "big") + bytes(50)
NEXT = -1  # TC_ACT_UNSPEC and TCX_NEXT: continue with the next program
_numbers = itertools.count(1)

both_ways = pytest.mark.parametrize(
    "how", [pytest.param(AttachMethod.TCX, marks=needs("tcx")), AttachMethod.CLSACT]
)
both_directions = pytest.mark.parametrize("direction", list(Direction))


def insn(code: int, regs: int = 0, off: int = 0, imm: int = 0) -> bytes:
    """One instruction; `regs`: source in the high half, destination in the low one."""
    return struct.pack("=BBhi", code, regs, off, imm)


LEAVE = insn(0xB7, 0, 0, NEXT) + insn(0x95)


def idle(name: str = "idle") -> Program:
    """A program that lets everything pass."""
    return Program.load(name, BPF_PROG_TYPE_SCHED_CLS, 0, LEAVE)


def counting(seen: Map, place: int) -> Program:
    """A program that counts our frames in this element of an array."""
    count = (
        insn(0x62, 0x0A, -4, place)  # *(u32 *)(r10 - 4) = place
        + insn(0xBF, 0xA2)  # r2 = r10
        + insn(0x07, 0x02, 0, -4)  # r2 -= 4
        + insn(0x18, 0x11, 0, seen.fd)  # r1 = map
        + insn(0)
        + insn(0x85, 0, 0, 1)  # r0 = lookup
        + insn(0x15, 0x00, 2, 0)  # if r0 == 0 leave
        + insn(0xB7, 0x01, 0, 1)  # r1 = 1
        + insn(0xDB, 0x10)  # lock *(u64 *)r0 += r1
    )
    wanted = socket.htons(ETHERTYPE)
    check = insn(0x61, 0x12, 16) + insn(0x55, 0x02, len(count) // 8, wanted)  # skb->protocol
    return Program.load(f"count{place}", BPF_PROG_TYPE_SCHED_CLS, 0, check + count + LEAVE)


@dataclass
class Net:
    """A network namespace with a veth pair, `here` and `far`, and a folder for pins."""

    name: str
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = Path("/sys/fs/bpf") / self.name
        self.folder.mkdir()
        ip(f"netns add {self.name}")
        self.ip("link add here type veth peer name far", "link set here up", "link set far up")

    def ip(self, *lines: str) -> None:
        """Runs iproute2 commands in the namespace."""
        ip(*lines, netns=self.name)

    def tc(self, *words: str) -> str:
        """Runs one tc command in the namespace, as another agent would."""
        return run("nsenter", f"--net=/run/netns/{self.name}", "tc", *words)  # -n hides the pins

    def inside(self, action: Callable[[], T]) -> T:
        """Runs `action` in the namespace."""
        return netns.run_in(Path("/run/netns") / self.name, action)

    def index(self, device: str) -> int:
        """The index of a device."""
        return self.inside(lambda: socket.if_nametoindex(device))

    def ours(
        self,
        how: AttachMethod | None,
        action: Callable[[TcAttacher], T],
        mark: FilterIdentity | None = None,
    ) -> T:
        """Runs `action` with a new TcAttacher in the namespace, as a start of the agent does."""

        def work() -> T:
            with TcAttacher(self.folder, how, mark or FilterIdentity()) as tc:
                return action(tc)

        return self.inside(work)

    def attach(
        self,
        how: AttachMethod,
        program: Program,
        to: Direction = Direction.INGRESS,
        device: str = "here",
    ) -> Attachment | None:
        """Attaches with a new TcAttacher."""
        return self.ours(how, lambda tc: tc.attach(self.index(device), to, program))

    def attached(self, device: str = "here") -> tuple[Attachment, ...]:
        """What a new TcAttacher reads back."""
        return self.ours(None, lambda tc: tc.list_attached(self.index(device)))

    def detach_all(self) -> None:
        """Detaches all of our programs."""
        self.ours(None, lambda tc: [tc.detach(one) for one in tc.list_all()])

    def qdiscs(self, device: str = "here") -> str:
        """The qdisc in clsact's place, as tc shows it."""
        return " ".join(
            line.split()[1]
            for line in self.tc("qdisc", "show", "dev", device).splitlines()
            if "ffff:fff1" in line
        )

    def filters(self, direction: Direction, device: str = "here") -> list[str]:
        """Names of the clsact filters in the order in which they run, as tc shows them."""
        lines = self.tc("filter", "show", "dev", device, direction).splitlines()
        return [line.split(" handle ")[1].split()[1] for line in lines if "direct-action" in line]

    def tcx(self, direction: Direction, device: str = "here") -> list[int]:
        """Ids of the TCX programs in the order in which they run; empty if the kernel has
        no TCX.
        """
        if lacking("tcx"):
            return []
        index = self.index(device)
        return list(self.inside(lambda: objects.list_attached(index, ATTACH_TYPE[direction])))

    def wire(self, direction: Direction) -> socket.socket:
        """A packet socket on the device from which frames pass `here` in this direction."""
        device = "far" if direction is Direction.INGRESS else "here"

        def work() -> socket.socket:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            made.bind((device, ETHERTYPE))
            return made

        return self.inside(work)

    def close(self) -> None:
        """Deletes the pins and the namespace."""
        shutil.rmtree(self.folder, ignore_errors=True)
        ip(f"netns del {self.name}")


@pytest.fixture
def net() -> Iterator[Net]:
    """A new namespace with a veth pair."""
    made = Net(f"kbtc{os.getpid()}-{next(_numbers)}")
    yield made
    made.close()


@pytest.fixture
def seen() -> Iterator[Map]:
    """The map that the counting programs write."""
    with Map.create(BPF_MAP_TYPE_ARRAY, "seen", 4, 8, 4) as made:
        yield made


@pytest.fixture
def programs(seen: Map) -> Iterator[list[Program]]:
    """Four counting programs."""
    made = [counting(seen, place) for place in range(4)]
    yield made
    for one in made:
        one.close()


def counts(seen: Map) -> list[int]:
    """The count of each program."""
    return [int.from_bytes(seen.lookup(struct.pack("=I", i)) or b"", "little") for i in range(4)]


def program_id(program: Program) -> int:
    return program.read_info().id


# ---- seeing packets ----------------------------------------------------------------------------


@both_ways
@both_directions
def test_program_sees_each_packet_of_its_direction_once(
    net: Net, seen: Map, programs: list[Program], how: AttachMethod, direction: Direction
):
    made = net.attach(how, programs[0], direction)
    assert made == Attachment(net.index("here"), direction, how, program_id(programs[0]))
    for way in Direction:
        with net.wire(way) as wire:
            for _ in range(100 if way is direction else 7):
                wire.send(FRAME)
    until("100 frames are counted", lambda: counts(seen) == [100, 0, 0, 0])


@both_ways
@both_directions
def test_no_packet_is_lost_while_programs_are_swapped(
    net: Net, seen: Map, programs: list[Program], how: AttachMethod, direction: Direction
):
    net.attach(how, programs[0], direction)
    index, done, sent = net.index("here"), threading.Event(), [0]
    failures: list[str] = []

    def send() -> None:
        with net.wire(direction) as wire:
            while not done.is_set():
                for _ in range(50):  # far less than a CPU's backlog holds
                    wire.send(FRAME)
                sent[0] += 50
                try:
                    until("they are counted", lambda: sum(counts(seen)) >= sent[0])
                except AssertionError as error:
                    failures.append(str(error))
                    return

    def swap(tc: TcAttacher) -> int:
        swaps = 0
        while swaps < 2_000 or sent[0] < 50_000:
            swaps += 1
            tc.attach(index, direction, programs[swaps % 2])
            if failures:
                break
        return swaps

    sender = threading.Thread(target=send)
    sender.start()
    try:
        swaps = net.ours(how, swap)
    finally:
        done.set()
        sender.join()
    assert not failures, f"{counts(seen)} of {sent[0]} frames"
    assert swaps >= 2_000
    assert sum(counts(seen)) == sent[0]
    assert min(counts(seen)[:2]) > 0


# ---- reading back ------------------------------------------------------------------------------


@both_ways
def test_attachments_of_an_earlier_agent_are_read_and_replaced(
    net: Net, programs: list[Program], how: AttachMethod
):
    for direction in Direction:
        net.attach(how, programs[0], direction)
    index, old, new = net.index("here"), program_id(programs[0]), program_id(programs[1])
    assert net.attached() == tuple(Attachment(index, d, how, old) for d in Direction)
    assert net.attached("far") == ()
    net.attach(how, programs[1], Direction.EGRESS)
    assert {one.direction: one.program_id for one in net.attached()} == {
        Direction.INGRESS: old,
        Direction.EGRESS: new,
    }
    everything = net.ours(None, TcAttacher.list_all)
    assert sorted(everything, key=str) == sorted(net.attached(), key=str)


@both_ways
def test_programs_outlive_the_process_that_attached_them(net: Net, seen: Map, how: AttachMethod):
    with counting(seen, 0) as program:
        net.attach(how, program)
    with net.wire(Direction.INGRESS) as wire:
        wire.send(FRAME)
    until("the frame is counted", lambda: counts(seen)[0] == 1)


@needs("tcx")
def test_pin_under_another_devices_name_is_ignored(net: Net, programs: list[Program]):
    here, far = net.index("here"), net.index("far")
    net.attach(AttachMethod.TCX, programs[0])
    (net.folder / f"{here}-ingress").rename(net.folder / f"{far}-ingress")
    assert net.attached("far") == net.attached("here") == ()


@needs("tcx")
def test_attaching_again_keeps_the_link(net: Net, programs: list[Program]):
    def links() -> list[int]:
        with Link.open(net.folder / f"{net.index('here')}-ingress") as link:
            return [link.read_info().id]

    net.attach(AttachMethod.TCX, programs[0])
    before = links()
    net.attach(AttachMethod.TCX, programs[0])
    net.attach(AttachMethod.TCX, programs[1])
    assert links() == before
    assert net.tcx(Direction.INGRESS) == [program_id(programs[1])]


@both_ways
def test_detach_leaves_nothing(net: Net, seen: Map, programs: list[Program], how: AttachMethod):
    for direction in Direction:
        net.attach(how, programs[0], direction)
    net.detach_all()
    net.detach_all()
    assert net.attached() == ()
    assert net.qdiscs() == ""
    assert list(net.folder.iterdir()) == []
    with net.wire(Direction.INGRESS) as wire:
        wire.send(FRAME)
    net.attach(how, programs[1])
    with net.wire(Direction.INGRESS) as wire:
        wire.send(FRAME)
    until("the frame is counted", lambda: counts(seen) == [0, 1, 0, 0])


@needs("tcx")
def test_unfinished_attachment_is_repeated(net: Net, programs: list[Program]):
    index = net.index("here")
    with net.inside(lambda: Link.attach(programs[0], index, 46)) as link:
        link.pin(net.folder / f"new-{index}-ingress")
    net.attach(AttachMethod.TCX, programs[0])
    assert [path.name for path in net.folder.iterdir()] == [f"{index}-ingress"]
    assert net.tcx(Direction.INGRESS) == [program_id(programs[0])]


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


# ---- devices that are deleted ------------------------------------------------------------------


@both_ways
def test_missing_device_is_no_error(net: Net, programs: list[Program], how: AttachMethod):
    gone = 4711
    assert net.ours(how, lambda tc: tc.attach(gone, Direction.INGRESS, programs[0])) is None
    assert net.ours(how, lambda tc: tc.list_attached(gone)) == ()
    net.ours(how, lambda tc: tc.detach(Attachment(gone, Direction.INGRESS, how, 1)))


@both_ways
def test_deleted_device_leaves_no_pins(net: Net, programs: list[Program], how: AttachMethod):
    for direction in Direction:
        net.attach(how, programs[0], direction)
    kept = len(list(net.folder.iterdir()))
    index = net.index("here")
    net.ip("link del here")
    assert net.ours(None, TcAttacher.list_all) == ()
    assert net.ours(None, lambda tc: tc.list_attached(index)) == ()
    assert net.ours(None, TcAttacher.sweep) == kept > 0
    assert list(net.folder.iterdir()) == []


@both_ways
def test_device_deleted_between_two_attaches_is_no_error(
    net: Net, programs: list[Program], how: AttachMethod
):
    index = net.index("here")

    def work(tc: TcAttacher) -> Attachment | None:
        tc.attach(index, Direction.INGRESS, programs[0])
        net.ip("link del here")
        return tc.attach(index, Direction.INGRESS, programs[1])

    assert net.ours(how, work) is None


@needs("tcx")
def test_device_deleted_before_the_replacement_is_no_error(
    net: Net, programs: list[Program], monkeypatch: pytest.MonkeyPatch
):
    def goes(*_: object) -> bool:
        net.ip("link del here")
        return True

    index = net.index("here")
    net.attach(AttachMethod.TCX, programs[0])
    monkeypatch.setattr("kbpf.kernel.bpf.tc._is_running", goes)
    assert (
        net.ours(AttachMethod.TCX, lambda tc: tc.attach(index, Direction.INGRESS, programs[1]))
        is None
    )


@both_ways
def test_new_device_with_the_same_index_has_no_attachments(
    net: Net, programs: list[Program], how: AttachMethod
):
    net.ip("link add again index 77 type veth peer name other")
    net.attach(how, programs[0], device="again")
    net.ip("link del again", "link add again index 77 type veth peer name other")
    assert net.attached("again") == ()
    net.attach(how, programs[1], device="again")
    assert [one.program_id for one in net.attached("again")] == [program_id(programs[1])]


@needs("tcx")
def test_device_moved_to_another_namespace_is_detached(net: Net, programs: list[Program]):
    net.attach(AttachMethod.TCX, programs[0])
    index, elsewhere = net.index("here"), f"{net.name}b"
    ip(f"netns add {elsewhere}")
    try:
        net.ip(f"link set here netns {elsewhere}")

        def there() -> tuple[int, ...]:
            return netns.run_in(
                Path("/run/netns") / elsewhere, lambda: objects.list_attached(index, 46)
            )

        assert there() == (program_id(programs[0]),)
        assert net.ours(None, TcAttacher.list_all) == ()
        assert net.ours(None, TcAttacher.sweep) == 1
        assert there() == ()
    finally:
        ip(f"netns del {elsewhere}")


# ---- results of the kernel ---------------------------------------------------------------------


def test_probe_agrees_with_a_real_link(net: Net, programs: list[Program]):
    index = net.index("here")
    try:
        net.inside(lambda: Link.attach(programs[0], index, 46)).close()
        works = True
    except KernelError:
        works = False
    assert probe_tcx().works is works
    assert net.ours(None, lambda tc: tc.method) is (
        AttachMethod.TCX if works else AttachMethod.CLSACT
    )


def test_probe_without_privileges_is_unknown():
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        probe_tcx.cache_clear()
        os._exit(0 if probe_tcx().works is None else 1)
    assert os.waitpid(child, 0)[1] == 0


@needs("tcx")
def test_program_already_attached_by_another_link_is_an_error(net: Net, programs: list[Program]):
    index = net.index("here")
    with (
        net.inside(lambda: Link.attach(programs[0], index, 46)),
        pytest.raises(KernelError, match=r"EEXIST; this program is attached by a link"),
    ):
        net.attach(AttachMethod.TCX, programs[0])
    assert list(net.folder.iterdir()) == []


@both_ways
def test_refused_program_error_names_the_device(net: Net, how: AttachMethod):
    with (
        Program.load("wrong", 8, 0, insn(0xB7, 0, 0, 1) + insn(0x95)) as wrong,  # CGROUP_SKB
        pytest.raises(KernelError, match=rf"cannot attach the program \(ingress of here, {how}\)"),
    ):
        net.attach(how, wrong)
    assert net.qdiscs() == ""
    assert list(net.folder.iterdir()) == []


def test_shared_block_error_has_the_kernels_message(net: Net, programs: list[Program]):
    net.tc("qdisc", "add", "dev", "here", "ingress_block", "7", "clsact")
    with pytest.raises(KernelError, match="block is shared"):
        net.attach(AttachMethod.CLSACT, programs[0])
    assert net.qdiscs() == "clsact"
