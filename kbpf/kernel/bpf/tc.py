"""Programs on the ingress and egress of devices, beside whoever else is there.

Two ways, one answer. A *TCX link* (Linux v6.6): held by a pin, behind the programs that are there
already, and gone with its device. Or a *filter* of cls_bpf on a clsact qdisc, told from others'
by its priority, handle and name. Both are replaced in place: each packet meets the old program or
the new one. Making and ending a link costs an RCU grace period (12 ms, measured on 6.18), in which
the kernel changes no other device; replacing, and all about filters, a tenth of a millisecond.

Others are left alone. A filter is replaced or removed only if it is ours by all of its marks; the
qdisc is removed only if we made it (a folder beside the pins says so) and holds nothing else. The
kernel has no call for "remove if empty": a filter that somebody adds in the microseconds between
looking and removing is lost.

A device that vanishes at any moment is no error: attach() answers None, detach() has no more to
do. A device that moves to another network namespace is gone, too; a TCX link would go with it, so
sweep() ends it.
"""

import errno
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final, Self

from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Link, Program
from kbpf.kernel.net.netlink import Message, Rtnetlink, attribute, attributes, text
from kbpf.kernel.probe_result import Probe

PROG_SCHED_CLS: Final = 3
NO_DEVICE: Final = 0x7FFFFFFF

RTM_NEWQDISC, RTM_DELQDISC, RTM_GETQDISC = 36, 37, 38
RTM_NEWTFILTER, RTM_DELTFILTER, RTM_GETTFILTER = 44, 45, 46
REPLACE: Final = 0x400 | 0x100  # NLM_F_CREATE | NLM_F_REPLACE
CREATE: Final = 0x400 | 0x200  # NLM_F_CREATE | NLM_F_EXCL
CLSACT: Final = (0xFFFF0000, 0xFFFFFFF1)  # handle and parent, also of its elder, "ingress"
TCA_KIND, TCA_OPTIONS, TCA_CHAIN = 1, 2, 11
TCA_BPF_FD, TCA_BPF_NAME, TCA_BPF_FLAGS, TCA_BPF_ID = 6, 7, 8, 11
DIRECT_ACTION: Final = 1

_TCMSG: Final = struct.Struct("=BxxxiIII")
_U32: Final = struct.Struct("=I")
_PAIR: Final = struct.Struct("=II")
_EXIT: Final = struct.pack("=BBhi", 0xB7, 0, 0, -1) + struct.pack("=BBhi", 0x95, 0, 0, 0)


class How(StrEnum):
    """The way in which a program is attached."""

    TCX = "tcx"
    CLSACT = "clsact"


class Direction(StrEnum):
    """Which packets: those that come in by the device, or those that leave by it."""

    INGRESS = "ingress"
    EGRESS = "egress"


ATTACH_TYPE: Final = {Direction.INGRESS: 46, Direction.EGRESS: 47}  # BPF_TCX_INGRESS, _EGRESS
PARENT: Final = {Direction.INGRESS: 0xFFFFFFF2, Direction.EGRESS: 0xFFFFFFF3}


@dataclass(frozen=True, slots=True)
class Attachment:
    """A program of ours on a device; `program` is its id."""

    ifindex: int
    direction: Direction
    how: How
    program: int


@dataclass(frozen=True, slots=True)
class Mark:
    """By which our filters are known. Lower priorities run first."""

    priority: int = 2
    handle: int = 0x6B627066
    name: str = "kbpf"

    def filter(self, ifindex: int, direction: Direction) -> bytes:
        """The begin of every message about our filter there."""
        info = self.priority << 16 | socket.htons(3)  # ETH_P_ALL
        body = _TCMSG.pack(0, ifindex, self.handle, PARENT[direction], info)
        return body + attribute(TCA_KIND, b"bpf\0")

    def program(self, message: Message) -> int:
        """The id of the program, if this message tells of a filter of ours; else 0."""
        _, _, handle, _, info = _TCMSG.unpack_from(message.body)
        found = attributes(message.body[_TCMSG.size :])
        options = attributes(found.get(TCA_OPTIONS, b""))
        ours = (
            (handle, info) == (self.handle, self.priority << 16 | socket.htons(3))
            and text(found.get(TCA_KIND, b"")) == "bpf"
            and not any(found.get(TCA_CHAIN, b""))
            and text(options.get(TCA_BPF_NAME, b"")) == self.name
            and TCA_BPF_ID in options
        )
        return int(_U32.unpack(options[TCA_BPF_ID])[0]) if ours else 0


OURS: Final = Mark()


@cache
def tcx() -> Probe:
    """Whether this kernel has TCX links: asked about a device that does not exist. A kernel that
    knows them misses the device (ENODEV), any other one the attach type (EINVAL).
    """
    try:
        with Program.load("kbpf_probe", PROG_SCHED_CLS, 0, _EXIT) as program:
            Link.attach(program, NO_DEVICE, ATTACH_TYPE[Direction.INGRESS]).close()
    except KernelError as error:
        name = errno.errorcode.get(error.errno, str(error.errno))
        if error.errno in (errno.EPERM, errno.EACCES):
            return Probe(None, f"{name}: not enough privileges to find out")
        works = error.errno == errno.ENODEV
        return Probe(works, "" if works else name)
    return Probe(None, "a link to no device was made")


class Tc:
    """What one agent has on the devices of this network namespace. Use it in a `with` block, in
    one thread.

    `folder`: in a bpffs, of this agent alone; pins of links, and marks of qdiscs that we made.
    """

    def __init__(self, folder: Path, how: How | None = None, mark: Mark = OURS) -> None:
        self._folder = folder
        self._mark = mark
        self.how = how or (How.TCX if tcx().works else How.CLSACT)

    def __enter__(self) -> Self:
        self._netlink = Rtnetlink()
        self._seen: dict[int, str] = {}  # what _qdiscs() told last
        return self

    def __exit__(self, *_: object) -> None:
        self._netlink.close()

    # ---- for both ways ---------------------------------------------------------------------

    def attached(self, ifindex: int) -> tuple[Attachment, ...]:
        """Everything of ours on this device; nothing if there is no such device."""
        links = (self._link(self._pin(ifindex, direction)) for direction in Direction)
        return (*filter(None, links), *self._filters(ifindex, self._qdiscs().get(ifindex)))

    def everything(self) -> tuple[Attachment, ...]:
        """Everything of ours on all devices."""
        links = (self._link(path) for path in self._kept())
        filters = (one for has in self._qdiscs().items() for one in self._filters(*has))
        return (*filter(None, links), *filters)

    def attach(self, ifindex: int, direction: Direction, program: Program) -> Attachment | None:
        """Attaches, or replaces what we have there in the same way; None: the device is gone."""
        wanted = Attachment(ifindex, direction, self.how, program.info().id)
        act = self._attach_link if self.how is How.TCX else self._attach_filter
        try:
            act(wanted, program)
        except KernelError as error:
            self._seen.clear()
            if error.errno in (errno.ENODEV, errno.ENOLINK):
                return None
            raise _failed("attach", wanted, error) from error
        return wanted

    def detach(self, found: Attachment) -> None:
        """Removes one of ours; and clsact, if we made it and this was all that it held."""
        if found.how is How.TCX:
            _end(self._pin(found.ifindex, found.direction))
            return
        try:
            self._remove_filter(found)
        except KernelError as error:
            if error.errno != errno.ENODEV:
                raise _failed("detach", found, error) from error

    def sweep(self, only: Collection[int] | None = None) -> int:
        """Removes pins and marks of devices that are gone from here; how many. `only`: of these,
        by ifindex.
        """
        qdiscs, swept = self._qdiscs(), 0
        for path in self._kept():
            if only is not None and _ifindex(path) not in only:
                continue
            if path.is_dir() and _ifindex(path) not in qdiscs:
                path.rmdir()
            elif not path.is_dir() and self._link(path) is None:
                _end(path)
            else:
                continue
            swept += 1
        return swept

    def _kept(self) -> list[Path]:
        return sorted(self._folder.iterdir()) if self._folder.is_dir() else []

    # ---- TCX links -------------------------------------------------------------------------

    def _pin(self, ifindex: int, direction: Direction) -> Path:
        return self._folder / f"{ifindex}-{direction}"

    def _link(self, pin: Path) -> Attachment | None:
        """What is pinned there, if it is a link that is in force where its name says. The device
        of that number may be another one by now, or have gone elsewhere with our link.
        """
        number, _, label = pin.name.partition("-")
        if label not in tuple(Direction) or not pin.exists():
            return None
        with Link.open(pin) as link:
            info = link.info()
        # The union of bpf_link_info begins with ifindex and attach type; ifindex 0: no device.
        where = _PAIR.unpack(info.cgroup.to_bytes(_PAIR.size, sys.byteorder))
        direction = Direction(label)
        if where != (int(number), ATTACH_TYPE[direction]) or not _runs(info.program, *where):
            return None
        return Attachment(int(number), direction, How.TCX, info.program)

    def _attach_link(self, wanted: Attachment, program: Program) -> None:
        pin = self._pin(wanted.ifindex, wanted.direction)
        if found := self._link(pin):
            if found != wanted:
                with Link.open(pin) as link:
                    link.update(program)
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        fresh = pin.with_name(f"new-{pin.name}")
        for stale in (pin, fresh):
            _end(stale)
        with Link.attach(program, wanted.ifindex, ATTACH_TYPE[wanted.direction]) as link:
            link.pin(fresh)
            fresh.rename(pin)

    # ---- filters on clsact -----------------------------------------------------------------

    def _made(self, ifindex: int) -> Path:
        """There while the clsact of that device is of our making."""
        return self._folder / f"{ifindex}-clsact"

    def _qdiscs(self) -> dict[int, str]:
        """The devices with a qdisc that can hold our filters, and its kind: clsact or ingress."""
        self._seen = {}
        for message in self._netlink.dump(RTM_GETQDISC, _TCMSG.pack(0, 0, 0, 0, 0)):
            _, ifindex, handle, parent, _ = _TCMSG.unpack_from(message.body)
            if (handle, parent) == CLSACT:
                found = attributes(message.body[_TCMSG.size :])
                self._seen[ifindex] = text(found[TCA_KIND])
        return self._seen

    def _dump(self, ifindex: int, direction: Direction) -> list[Message]:
        body = _TCMSG.pack(0, ifindex, 0, PARENT[direction], 0)
        return self._netlink.dump(RTM_GETTFILTER, body)

    def _filters(self, ifindex: int, qdisc: str | None) -> Iterator[Attachment]:
        """Ours. The elder qdisc has one side only, and shows it whatever side one asks for."""
        for direction in Direction:
            if qdisc == "clsact" or (qdisc == "ingress" and direction is Direction.INGRESS):
                for message in self._dump(ifindex, direction):
                    if program := self._mark.program(message):
                        yield Attachment(ifindex, direction, How.CLSACT, program)

    def filters_of_others(self, ifindex: int, direction: Direction) -> tuple[int, ...]:
        """The ids of the programs of filters there that are not ours."""
        if not self._seen:
            self._qdiscs()
        if self._seen.get(ifindex) is None:
            return ()
        if self._seen[ifindex] == "ingress" and direction is Direction.EGRESS:
            return ()
        found = (m for m in self._dump(ifindex, direction) if not self._mark.program(m))
        return tuple(filter(None, map(_program_of, found)))

    def _attach_filter(self, wanted: Attachment, program: Program) -> None:
        ifindex, direction = wanted.ifindex, wanted.direction
        fresh = self._make_qdisc(ifindex)
        qdisc = self._seen.get(ifindex, "clsact")
        if qdisc == "ingress" and direction is Direction.EGRESS:
            raise KernelError("", hint="it has an 'ingress' qdisc; egress needs a clsact")
        found = {one.direction: one for one in self._filters(ifindex, qdisc)}
        if found.get(direction) == wanted:
            return
        if not fresh and not found:
            self._disown(ifindex)
        options = (
            attribute(TCA_BPF_FD, _U32.pack(program.fd))
            + attribute(TCA_BPF_NAME, self._mark.name.encode() + b"\0")
            + attribute(TCA_BPF_FLAGS, _U32.pack(DIRECT_ACTION))
        )
        body = self._mark.filter(ifindex, direction) + attribute(TCA_OPTIONS, options)
        try:
            self._netlink.ask(RTM_NEWTFILTER, body, REPLACE if direction in found else CREATE)
        except KernelError:
            if fresh:
                self._tidy(ifindex)
            raise

    def _make_qdisc(self, ifindex: int) -> bool:
        """Makes a clsact; False if something is in its place."""
        if ifindex in self._seen:
            return False
        body = _TCMSG.pack(0, ifindex, *CLSACT, 0) + attribute(TCA_KIND, b"clsact\0")
        try:
            self._netlink.ask(RTM_NEWQDISC, body, CREATE)
        except KernelError as error:
            if error.errno != errno.EEXIST:
                raise
            self._qdiscs()
            return False
        self._made(ifindex).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._seen[ifindex] = "clsact"
        return True

    def _disown(self, ifindex: int) -> None:
        """We leave no qdisc without filters: one that has none is another's."""
        if self._made(ifindex).is_dir():
            self._made(ifindex).rmdir()

    def _remove_filter(self, found: Attachment) -> None:
        there = self._dump(found.ifindex, found.direction)
        if any(self._mark.program(message) for message in there):
            self._netlink.ask(RTM_DELTFILTER, self._mark.filter(found.ifindex, found.direction))
            self._tidy(found.ifindex)

    def _tidy(self, ifindex: int) -> None:
        """Removes clsact, if we made it and it is empty."""
        ours = self._made(ifindex).is_dir()
        if ours and not any(self._dump(ifindex, direction) for direction in Direction):
            self._netlink.ask(RTM_DELQDISC, _TCMSG.pack(0, ifindex, *CLSACT, 0))
            self._seen.pop(ifindex, None)
            self._disown(ifindex)


def _program_of(message: Message) -> int:
    """The id of the program, if this message tells of a filter of BPF; else 0."""
    found = attributes(message.body[_TCMSG.size :])
    options = attributes(found.get(TCA_OPTIONS, b""))
    if text(found.get(TCA_KIND, b"")) != "bpf" or TCA_BPF_ID not in options:
        return 0
    return int(_U32.unpack(options[TCA_BPF_ID])[0])


def _ifindex(path: Path) -> int:
    """Of the device that a pin or a mark is about; 0 for what is no such thing."""
    number, _, _ = path.name.partition("-")
    return int(number) if number.isdigit() else 0


def _end(pin: Path) -> None:
    """Detaches a pinned link and removes the pin. Removing alone detaches, too, but a few
    milliseconds later (RCU), in which the same program cannot be attached again.
    """
    if pin.exists():
        with Link.open(pin) as link:
            link.detach()
        pin.unlink(missing_ok=True)


def _runs(program: int, ifindex: int, attach_type: int) -> bool:
    """Whether the device of this number, in this namespace, runs that program there by TCX."""
    try:
        return program in objects.attached(ifindex, attach_type)
    except KernelError as error:
        if error.errno == errno.ENODEV:
            return False
        raise


def _failed(verb: str, what: Attachment, error: KernelError) -> KernelError:
    try:
        name = socket.if_indextoname(what.ifindex)
    except OSError:
        name = str(what.ifindex)
    hints = {
        (How.CLSACT, errno.ENOENT): "the kernel needs sch_ingress and cls_bpf",
        (How.CLSACT, errno.EEXIST): "another filter has our priority and handle",
        (How.TCX, errno.EEXIST): "this program is there by a link that is not pinned here",
    }
    hint = "; ".join(filter(None, (error.hint, hints.get((what.how, error.errno)))))
    where = f"{what.direction} of {name}, {what.how}"
    return KernelError(f"cannot {verb} the program", where, hint, errno=error.errno)
