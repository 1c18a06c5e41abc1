# SPDX-License-Identifier: Apache-2.0
"""Attaches programs to the ingress and egress of devices, together with programs of other tools.

There are two methods. A *TCX link* (Linux v6.6) is kept by a pin, and disappears with its device. A
cls_bpf *filter* on a clsact qdisc is described in clsact.py. Both are replaced atomically: each
packet runs either the old or the new program. Creating or detaching a link waits for an RCU grace
period (12 ms, measured on 6.18), during which the kernel changes no other device; replacing one,
and all filter operations, take a tenth of a millisecond.

Ours is the first program in both directions: one before it that returns TC_ACT_OK ends the list,
and packets would silently pass untranslated. A program that is attached later may be before ours;
move() is for that.

A device may vanish at any moment; that is not an error. attach() then returns None and detach()
does nothing. A device that moves to another network namespace counts as vanished. A TCX link moves
with it, so sweep() detaches it.
"""

import errno
import itertools
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, Self

from kbpf.errors import IgnoredErrnos, KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.clsact import (
    DEFAULT_IDENTITY,
    ClsactFilters,
    Direction,
    Filter,
    FilterIdentity,
)
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.bpf.syscalls import encode_insns
from kbpf.kernel.bpf.uapi import (
    BPF_F_BEFORE,
    BPF_MAP_TYPE_PROG_ARRAY,
    BPF_PROG_TYPE_SCHED_CLS,
    BPF_TCX_EGRESS,
    BPF_TCX_INGRESS,
    BPF_FUNC_tail_call,
)
from kbpf.kernel.net.netlink import Rtnetlink
from kbpf.kernel.probe_result import Probe

NONEXISTENT_IFINDEX: Final = 0x7FFFFFFF

_PAIR: Final = struct.Struct("=II")
_U32: Final = struct.Struct("=I")
_ZERO: Final = _U32.pack(0)
# r0 = TC_ACT_UNSPEC; exit
_EXIT: Final = encode_insns((0xB7, 0, 0, -1), (0x95, 0, 0, 0))


class AttachMethod(StrEnum):
    """How a program is attached."""

    TCX = "tcx"
    CLSACT = "clsact"


ATTACH_TYPE: Final = {Direction.INGRESS: BPF_TCX_INGRESS, Direction.EGRESS: BPF_TCX_EGRESS}


@dataclass(frozen=True, slots=True)
class Attachment:
    """One of our programs on a device; `program_id` is its id. `misplaced`: whether move() would
    make it run earlier.
    """

    ifindex: int
    direction: Direction
    method: AttachMethod
    program_id: int
    misplaced: bool = field(default=False, compare=False)


class Runner(NamedTuple):
    """A program at a hook, or a filter of another kind (`program_id` 0). `place`: "tcx", or the
    filter.
    """

    program_id: int
    place: str
    is_ours: bool


@cache
def probe_tcx() -> Probe:
    """Whether this kernel has TCX links. Tried with a device that does not exist: kernels with TCX
    return ENODEV, others EINVAL for the attach type.
    """
    try:
        with Program.load("kbpf_probe", BPF_PROG_TYPE_SCHED_CLS, 0, _EXIT) as program:
            Link.attach(program, NONEXISTENT_IFINDEX, ATTACH_TYPE[Direction.INGRESS]).close()
    except KernelError as error:
        name = errno.errorcode.get(error.errno, str(error.errno))
        if error.errno in (errno.EPERM, errno.EACCES):
            return Probe(None, f"{name}: not privileged enough to test it")
        works = error.errno == errno.ENODEV
        return Probe(works, "" if works else name)
    return Probe(None, "linked to a device that does not exist")


class TcAttacher:
    """The programs of one agent on the devices of this network namespace. Use it in a `with` block
    and from one thread.

    `folder`: a folder on a bpffs for this agent only, with pins of links and marks of qdiscs that
    we created. `is_of_other_agent`: whether the program with this id belongs to another agent.
    """

    def __init__(
        self,
        folder: Path,
        method: AttachMethod | None = None,
        identity: FilterIdentity = DEFAULT_IDENTITY,
        is_of_other_agent: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._is_of_other_agent = is_of_other_agent
        self.method = method or (AttachMethod.TCX if probe_tcx().works else AttachMethod.CLSACT)

    def __enter__(self) -> Self:
        self._netlink = Rtnetlink()
        self._filters = ClsactFilters(self._netlink, self._folder, self._identity, self._is_of_other_agent)
        return self

    def __exit__(self, *_: object) -> None:
        self._netlink.close()

    # ---- both methods -----------------------------------------------------------------------

    def list_attached(self, ifindex: int) -> tuple[Attachment, ...]:
        """Lists our attachments on this device; empty if it does not exist."""
        links = (self._read_placed_link(self._pin(ifindex, each)) for each in Direction)
        self._filters.read_qdiscs()
        return (*filter(None, links), *self._read_filters(ifindex))

    def list_all(self) -> tuple[Attachment, ...]:
        """Lists our attachments on all devices."""
        links = (self._read_placed_link(path) for path in self._list_entries())
        qdiscs = self._filters.read_qdiscs()
        filters = (each for ifindex in sorted(qdiscs) for each in self._read_filters(ifindex))
        return (*filter(None, links), *filters)

    def _read_filters(self, ifindex: int) -> Iterator[Attachment]:
        for direction in Direction:
            filters = self._filters.list_filters(ifindex, direction)
            misplaced = self._filters.is_misplaced(filters)
            for ours in filter(self._filters.is_ours, filters):
                yield Attachment(ifindex, direction, AttachMethod.CLSACT, ours.program_id, misplaced)

    def list_programs(self, ifindex: int, direction: Direction) -> tuple[Runner, ...]:
        """What runs there, ours and others, in that order: TCX programs, then filters."""
        link_ids: tuple[int, ...] = ()
        if probe_tcx().works:
            link_ids = _attached_ids(ifindex, ATTACH_TYPE[direction])
        ours = _read_link(self._pin(ifindex, direction))
        return (
            *(Runner(program_id, "tcx", ours is not None and program_id == ours.program_id) for program_id in link_ids),
            *(
                Runner(filter_.program_id, describe_filter(filter_), self._filters.is_ours(filter_))
                for filter_ in self._filters.list_filters(ifindex, direction)
                if not filter_.is_hash_table
            ),
        )

    def has_place(self, ifindex: int, direction: Direction) -> bool:
        """False where another tool's "ingress" qdisc keeps our filters from egress."""
        return self.method is AttachMethod.TCX or self._filters.has_place(ifindex, direction)

    def attach(self, ifindex: int, direction: Direction, program: Program) -> Attachment | None:
        """Attaches a program, or replaces the one attached by the same method. Returns None if the
        device is gone.
        """
        return self._change("attach", ifindex, direction, program)

    def move(self, ifindex: int, direction: Direction, program: Program) -> Attachment | None:
        """Attaches a program that is attached already again, in the first place, and then detaches
        it from the old one. Meanwhile a packet may run it twice; the second run finds nothing to
        translate. Returns None if the device is gone.
        """
        return self._change("move", ifindex, direction, program)

    def _change(self, action: str, ifindex: int, direction: Direction, program: Program) -> Attachment | None:
        attachment = Attachment(ifindex, direction, self.method, program.read_info().id)
        try:
            if self.method is AttachMethod.TCX:
                change_link = self._move_link if action == "move" else self._attach_link
                change_link(attachment, program)
            elif action == "move":
                self._filters.move(ifindex, direction, program)
            else:
                self._filters.attach(ifindex, direction, program)
        except KernelError as error:
            self._filters.forget_qdiscs()
            # ENOLINK: our link exists, but its device was deleted.
            if error.errno in (errno.ENODEV, errno.ENOLINK):
                return None
            raise _attach_error(action, attachment, error) from error
        return attachment

    def detach(self, attachment: Attachment) -> None:
        """Detaches a program; removes the clsact qdisc too if we created it and it is empty."""
        if attachment.method is AttachMethod.TCX:
            _detach_pinned_link(self._pin(attachment.ifindex, attachment.direction))
            return
        try:
            self._filters.detach(attachment.ifindex, attachment.direction)
        except KernelError as error:
            if error.errno != errno.ENODEV:
                raise _attach_error("detach", attachment, error) from error

    def sweep(self, ifindexes: Collection[int] | None = None) -> int:
        """Removes pins and marks of devices that are gone from this namespace; returns how many.
        `ifindexes`: check only these devices.
        """
        qdiscs, removed = self._filters.read_qdiscs(), 0
        for path in self._list_entries():
            if ifindexes is not None and _parse_ifindex(path) not in ifindexes:
                continue
            if path.is_dir() and _parse_ifindex(path) not in qdiscs:
                path.rmdir()
            elif not path.is_dir() and _read_link(path) is None:
                _detach_pinned_link(path)
            else:
                continue
            removed += 1
        return removed

    def _list_entries(self) -> list[Path]:
        return sorted(self._folder.iterdir()) if self._folder.is_dir() else []

    # ---- TCX links -------------------------------------------------------------------------

    def _pin(self, ifindex: int, direction: Direction) -> Path:
        return self._folder / f"{ifindex}-{direction}"

    def _read_placed_link(self, pin: Path) -> Attachment | None:
        """As _read_link(), with `misplaced`: other programs run before ours. Those of another agent
        do not count, since each would move before the other.
        """
        attachment = _read_link(pin)
        if attachment is None:
            return None
        program_id = attachment.program_id
        running = _attached_ids(attachment.ifindex, ATTACH_TYPE[attachment.direction])
        before = itertools.takewhile(lambda other: other != program_id, running)
        misplaced = program_id in running and not all(map(self._is_of_other_agent, before))
        return replace(attachment, misplaced=misplaced)

    def _attach_link(self, attachment: Attachment, program: Program) -> None:
        pin = self._pin(attachment.ifindex, attachment.direction)
        if current := _read_link(pin):
            if current != attachment:
                with Link.open(pin) as link:
                    link.update(program)
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        new_pin = _new_pin(pin)
        for stale in (pin, new_pin):
            _detach_pinned_link(stale)
        # If the agent is killed in between, the link ends with the process or is left at new_pin,
        # where the next call detaches it. A pin under its final name is always complete.
        with self._create_link(attachment, program) as link:
            link.pin(new_pin)
            new_pin.rename(pin)

    def _create_link(self, attachment: Attachment, program: Program) -> Link:
        attach_type = ATTACH_TYPE[attachment.direction]
        return Link.attach(program, attachment.ifindex, attach_type, BPF_F_BEFORE)

    def _move_link(self, attachment: Attachment, program: Program) -> None:
        """The kernel refuses a second link with the same program. So the new link first has another
        program, which only calls ours. If the agent is killed after the detaching, the device has
        no program until the next start.
        """
        pin = self._pin(attachment.ifindex, attachment.direction)
        new_pin = _new_pin(pin)
        _detach_pinned_link(new_pin)
        with (
            Map.create(BPF_MAP_TYPE_PROG_ARRAY, "kbpf_move", 4, 4, 1) as target,
            Program.load("kbpf_move", BPF_PROG_TYPE_SCHED_CLS, 0, _encode_call(target)) as caller,
        ):
            target.update(_ZERO, _U32.pack(program.fd))
            with self._create_link(attachment, caller) as link:
                link.pin(new_pin)
                with Link.open(pin) as old:
                    old.detach()
                link.update(program)
                new_pin.rename(pin)


def describe_filter(filter_: Filter) -> str:
    """A filter in the words of tc(8)."""
    return f"{filter_.kind} filter, pref {filter_.priority}"


def _encode_call(target: Map) -> bytes:
    """A program that continues with program 0 of this prog array."""
    call = encode_insns(
        (0x18, 0x12, 0, target.fd),  # r2 = the map (BPF_PSEUDO_MAP_FD)
        (0, 0, 0, 0),
        (0xB7, 3, 0, 0),  # r3 = 0
        (0x85, 0, 0, BPF_FUNC_tail_call),
    )
    return call + _EXIT


def _new_pin(pin: Path) -> Path:
    """Where a link is pinned until it is complete."""
    return pin.with_name(f"new-{pin.name}")


def _read_link(pin: Path) -> Attachment | None:
    """Returns the pinned link if it is attached where its file name says. The ifindex may
    belong to another device by now, or the device may have moved to another namespace with our
    link.
    """
    number, _, label = pin.name.partition("-")
    if label not in tuple(Direction):
        return None
    try:
        with Link.open(pin) as link:
            info = link.read_info()
    except KernelError as error:
        if error.errno == errno.ENOENT:  # maybe since it was listed: the agent may detach it
            return None
        raise
    # In struct bpf_link_info the union begins with ifindex (0: the device is gone) and attach
    # type.
    target = _PAIR.unpack((info.cgroup_id or 0).to_bytes(_PAIR.size, sys.byteorder))
    direction = Direction(label)
    if target != (int(number), ATTACH_TYPE[direction]):
        return None
    if info.program_id not in _attached_ids(*target):
        return None
    return Attachment(int(number), direction, AttachMethod.TCX, info.program_id)


def _parse_ifindex(path: Path) -> int:
    """The ifindex in the name of a pin or mark; 0 if the name has none."""
    number, _, _ = path.name.partition("-")
    return int(number) if number.isdigit() else 0


def _detach_pinned_link(pin: Path) -> None:
    """Detaches a pinned link and removes the pin. Removing the pin alone would detach it a few
    milliseconds later (RCU); until then the same program cannot be attached again.
    """
    if pin.exists():
        with Link.open(pin) as link:
            link.detach()
        pin.unlink(missing_ok=True)


def _attached_ids(ifindex: int, attach_type: int) -> tuple[int, ...]:
    """The ids of the TCX programs there, in the order in which they run."""
    with IgnoredErrnos(errno.ENODEV):
        return objects.list_attached(ifindex, attach_type)
    return ()


def _attach_error(action: str, attachment: Attachment, error: KernelError) -> KernelError:
    try:
        name = socket.if_indextoname(attachment.ifindex)
    except OSError:
        name = str(attachment.ifindex)
    hints = {
        (AttachMethod.CLSACT, errno.ENOENT): "the kernel needs sch_ingress and cls_bpf",
        (AttachMethod.CLSACT, errno.EEXIST): "other filters have our priority and handles",
        (
            AttachMethod.TCX,
            errno.EEXIST,
        ): "this program is attached by a link that is not pinned here",
    }
    hint = "; ".join(filter(None, (error.hint, hints.get((attachment.method, error.errno)))))
    where = f"{attachment.direction} of {name}, {attachment.method}"
    return KernelError(f"cannot {action} the program", where, hint, errno=error.errno)
