# SPDX-License-Identifier: Apache-2.0
"""Attaches programs to the ingress and egress of devices, together with programs of other tools.

There are two methods. A *TCX link* (Linux v6.6) is kept by a pin, runs after the programs that are
already attached, and disappears with its device. A cls_bpf *filter* on a clsact qdisc is
recognized as ours by its priority, handle and name. Both are replaced atomically: each packet runs
either the old or the new program. Creating or detaching a link waits for an RCU grace period (12
ms, measured on 6.18), during which the kernel changes no other device; replacing one, and all
filter operations, take a tenth of a millisecond.

Other tools' attachments are not touched. A filter is replaced or removed only if priority, handle
and name are ours. The qdisc is removed only if we created it (marked by a folder next to the pins)
and it is empty. The kernel has no atomic "remove if empty": a filter that another tool adds between
our check and the removal is lost.

A device may vanish at any moment; that is not an error. attach() then returns None and detach()
does nothing. A device that moves to another network namespace counts as vanished. A TCX link moves
with it, so sweep() detaches it.
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
from kbpf.kernel.bpf.uapi import (
    BPF_PROG_TYPE_SCHED_CLS,
    BPF_TCX_EGRESS,
    BPF_TCX_INGRESS,
    TCA_BPF_FD,
    TCA_BPF_FLAG_ACT_DIRECT,
    TCA_BPF_FLAGS,
    TCA_BPF_ID,
    TCA_BPF_NAME,
)
from kbpf.kernel.net.netlink import (
    Message,
    Rtnetlink,
    pack_attribute,
    parse_attributes,
    parse_string,
)
from kbpf.kernel.net.uapi import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    RTM_DELQDISC,
    RTM_DELTFILTER,
    RTM_GETQDISC,
    RTM_GETTFILTER,
    RTM_NEWQDISC,
    RTM_NEWTFILTER,
    TCA_CHAIN,
    TCA_KIND,
    TCA_OPTIONS,
)
from kbpf.kernel.probe_result import Probe

NONEXISTENT_IFINDEX: Final = 0x7FFFFFFF

CLSACT_HANDLE_PARENT: Final = (0xFFFF0000, 0xFFFFFFF1)
"""Handle and parent of a clsact qdisc (TC_H_CLSACT), and also of the older qdisc "ingress"."""

_TCMSG: Final = struct.Struct("=BxxxiIII")  # struct tcmsg: family, ifindex, handle, parent, info
_U32: Final = struct.Struct("=I")
_PAIR: Final = struct.Struct("=II")
# r0 = TC_ACT_UNSPEC; exit
_EXIT: Final = struct.pack("=BBhi", 0xB7, 0, 0, -1) + struct.pack("=BBhi", 0x95, 0, 0, 0)


class AttachMethod(StrEnum):
    """How a program is attached."""

    TCX = "tcx"
    CLSACT = "clsact"


class Direction(StrEnum):
    """Which packets: those that enter by the device, or those that leave by it."""

    INGRESS = "ingress"
    EGRESS = "egress"


ATTACH_TYPE: Final = {Direction.INGRESS: BPF_TCX_INGRESS, Direction.EGRESS: BPF_TCX_EGRESS}
FILTER_PARENT: Final = {Direction.INGRESS: 0xFFFFFFF2, Direction.EGRESS: 0xFFFFFFF3}
"""TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS or TC_H_MIN_EGRESS)."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """One of our programs on a device; `program_id` is its id."""

    ifindex: int
    direction: Direction
    method: AttachMethod
    program_id: int


@dataclass(frozen=True, slots=True)
class FilterIdentity:
    """What identifies our filters. Lower priorities run first."""

    priority: int = 2
    handle: int = 0x6B627066  # "kbpf"
    name: str = "kbpf"

    def pack_header(self, ifindex: int, direction: Direction) -> bytes:
        """The beginning of each message about our filter on this device."""
        # tcm_info: priority in host order above the EtherType in network order (ETH_P_ALL).
        info = self.priority << 16 | socket.htons(3)
        body = _TCMSG.pack(0, ifindex, self.handle, FILTER_PARENT[direction], info)
        return body + pack_attribute(TCA_KIND, b"bpf\0")

    def parse_program_id(self, message: Message) -> int:
        """Returns the program's id if this message describes one of our filters; else 0."""
        _, _, handle, _, info = _TCMSG.unpack_from(message.body)
        attrs = parse_attributes(message.body[_TCMSG.size :])
        options = parse_attributes(attrs.get(TCA_OPTIONS, b""))
        is_ours = (
            (handle, info) == (self.handle, self.priority << 16 | socket.htons(3))
            and parse_string(attrs.get(TCA_KIND, b"")) == "bpf"
            and not any(attrs.get(TCA_CHAIN, b""))
            and parse_string(options.get(TCA_BPF_NAME, b"")) == self.name
            and TCA_BPF_ID in options
        )
        return int(_U32.unpack(options[TCA_BPF_ID])[0]) if is_ours else 0


DEFAULT_IDENTITY: Final = FilterIdentity()


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
    we created.
    """

    def __init__(
        self,
        folder: Path,
        method: AttachMethod | None = None,
        identity: FilterIdentity = DEFAULT_IDENTITY,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self.method = method or (AttachMethod.TCX if probe_tcx().works else AttachMethod.CLSACT)

    def __enter__(self) -> Self:
        self._netlink = Rtnetlink()
        self._qdisc_kinds: dict[int, str] = {}  # from the last _read_qdiscs()
        return self

    def __exit__(self, *_: object) -> None:
        self._netlink.close()

    # ---- both methods -----------------------------------------------------------------------

    def list_attached(self, ifindex: int) -> tuple[Attachment, ...]:
        """Lists our attachments on this device; empty if it does not exist."""
        links = (_read_link(self._pin(ifindex, direction)) for direction in Direction)
        return (
            *filter(None, links),
            *self._list_filters(ifindex, self._read_qdiscs().get(ifindex)),
        )

    def list_all(self) -> tuple[Attachment, ...]:
        """Lists our attachments on all devices."""
        links = (_read_link(path) for path in self._list_entries())
        filters = (
            attachment
            for item in self._read_qdiscs().items()
            for attachment in self._list_filters(*item)
        )
        return (*filter(None, links), *filters)

    def attach(self, ifindex: int, direction: Direction, program: Program) -> Attachment | None:
        """Attaches a program, or replaces the one attached by the same method. Returns None if the
        device is gone.
        """
        attachment = Attachment(ifindex, direction, self.method, program.read_info().id)
        attach_program = (
            self._attach_link if self.method is AttachMethod.TCX else self._attach_filter
        )
        try:
            attach_program(attachment, program)
        except KernelError as error:
            self._qdisc_kinds.clear()
            # ENOLINK: our link exists, but its device was deleted.
            if error.errno in (errno.ENODEV, errno.ENOLINK):
                return None
            raise _attach_error("attach", attachment, error) from error
        return attachment

    def detach(self, attachment: Attachment) -> None:
        """Detaches a program; removes the clsact qdisc too if we created it and it is empty."""
        if attachment.method is AttachMethod.TCX:
            _detach_pinned_link(self._pin(attachment.ifindex, attachment.direction))
            return
        try:
            self._remove_filter(attachment)
        except KernelError as error:
            if error.errno != errno.ENODEV:
                raise _attach_error("detach", attachment, error) from error

    def sweep(self, ifindexes: Collection[int] | None = None) -> int:
        """Removes pins and marks of devices that are gone from this namespace; returns how many.
        `ifindexes`: check only these devices.
        """
        qdiscs, removed = self._read_qdiscs(), 0
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

    def _attach_link(self, attachment: Attachment, program: Program) -> None:
        pin = self._pin(attachment.ifindex, attachment.direction)
        if current := _read_link(pin):
            if current != attachment:
                with Link.open(pin) as link:
                    link.update(program)
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        new_pin = pin.with_name(f"new-{pin.name}")
        for stale in (pin, new_pin):
            _detach_pinned_link(stale)
        # If the agent is killed in between, the link ends with the process or is left at new_pin,
        # where the next call detaches it. A pin under its final name is always complete.
        with Link.attach(program, attachment.ifindex, ATTACH_TYPE[attachment.direction]) as link:
            link.pin(new_pin)
            new_pin.rename(pin)

    # ---- filters on clsact -----------------------------------------------------------------

    def _qdisc_mark(self, ifindex: int) -> Path:
        """The mark that exists while the clsact of that device is one that we created."""
        return self._folder / f"{ifindex}-clsact"

    def _read_qdiscs(self) -> dict[int, str]:
        """Maps the devices with a qdisc that can hold our filters to its kind:
        clsact or ingress.
        """
        self._qdisc_kinds = {}
        for message in self._netlink.dump(RTM_GETQDISC, _TCMSG.pack(0, 0, 0, 0, 0)):
            _, ifindex, handle, parent, _ = _TCMSG.unpack_from(message.body)
            if (handle, parent) == CLSACT_HANDLE_PARENT:
                attrs = parse_attributes(message.body[_TCMSG.size :])
                self._qdisc_kinds[ifindex] = parse_string(attrs[TCA_KIND])
        return self._qdisc_kinds

    def _dump(self, ifindex: int, direction: Direction) -> list[Message]:
        body = _TCMSG.pack(0, ifindex, 0, FILTER_PARENT[direction], 0)
        return self._netlink.dump(RTM_GETTFILTER, body)

    def _list_filters(self, ifindex: int, qdisc: str | None) -> Iterator[Attachment]:
        """Yields our filters. An "ingress" qdisc has only one side, but dumps it for both."""
        for direction in Direction:
            if qdisc == "clsact" or (qdisc == "ingress" and direction is Direction.INGRESS):
                for message in self._dump(ifindex, direction):
                    if program_id := self._identity.parse_program_id(message):
                        yield Attachment(ifindex, direction, AttachMethod.CLSACT, program_id)

    def list_foreign_filters(self, ifindex: int, direction: Direction) -> tuple[int, ...]:
        """The program ids of filters that are not ours."""
        if not self._qdisc_kinds:
            self._read_qdiscs()
        if self._qdisc_kinds.get(ifindex) is None:
            return ()
        if self._qdisc_kinds[ifindex] == "ingress" and direction is Direction.EGRESS:
            return ()
        foreign = (
            message
            for message in self._dump(ifindex, direction)
            if not self._identity.parse_program_id(message)
        )
        return tuple(filter(None, map(_parse_program_id, foreign)))

    def _attach_filter(self, attachment: Attachment, program: Program) -> None:
        ifindex, direction = attachment.ifindex, attachment.direction
        is_new_qdisc = self._create_qdisc(ifindex)
        qdisc = self._qdisc_kinds.get(ifindex, "clsact")
        if qdisc == "ingress" and direction is Direction.EGRESS:
            raise KernelError("", hint="it has an 'ingress' qdisc; egress needs a clsact")
        existing = {filter_.direction: filter_ for filter_ in self._list_filters(ifindex, qdisc)}
        if existing.get(direction) == attachment:
            return
        if not is_new_qdisc and not existing:
            self._remove_qdisc_mark(ifindex)
        options = (
            pack_attribute(TCA_BPF_FD, _U32.pack(program.fd))
            + pack_attribute(TCA_BPF_NAME, self._identity.name.encode() + b"\0")
            + pack_attribute(TCA_BPF_FLAGS, _U32.pack(TCA_BPF_FLAG_ACT_DIRECT))
        )
        body = self._identity.pack_header(ifindex, direction) + pack_attribute(TCA_OPTIONS, options)
        # REPLACE swaps the program atomically. EXCL fails if another tool's filter has our
        # priority and handle, rather than replacing it.
        try:
            self._netlink.request(
                RTM_NEWTFILTER,
                body,
                NLM_F_CREATE | (NLM_F_REPLACE if direction in existing else NLM_F_EXCL),
            )
        except KernelError:
            if is_new_qdisc:
                self._remove_empty_qdisc(ifindex)
            raise

    def _create_qdisc(self, ifindex: int) -> bool:
        """Creates a clsact; returns False if a qdisc already exists in its place."""
        if ifindex in self._qdisc_kinds:
            return False
        body = _TCMSG.pack(0, ifindex, *CLSACT_HANDLE_PARENT, 0) + pack_attribute(
            TCA_KIND, b"clsact\0"
        )
        try:
            self._netlink.request(RTM_NEWQDISC, body, NLM_F_CREATE | NLM_F_EXCL)
        except KernelError as error:
            if error.errno != errno.EEXIST:
                raise
            self._read_qdiscs()
            return False
        # Marked after it was created: if the agent is killed in between, an unmarked qdisc remains,
        # which is never removed. A mark first could make us remove another tool's qdisc.
        self._qdisc_mark(ifindex).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._qdisc_kinds[ifindex] = "clsact"
        return True

    def _remove_qdisc_mark(self, ifindex: int) -> None:
        # A qdisc that has no filter of ours belongs to another tool by now.
        if self._qdisc_mark(ifindex).is_dir():
            self._qdisc_mark(ifindex).rmdir()

    def _remove_filter(self, attachment: Attachment) -> None:
        filters = self._dump(attachment.ifindex, attachment.direction)
        if any(self._identity.parse_program_id(message) for message in filters):
            self._netlink.request(
                RTM_DELTFILTER, self._identity.pack_header(attachment.ifindex, attachment.direction)
            )
            self._remove_empty_qdisc(attachment.ifindex)

    def _remove_empty_qdisc(self, ifindex: int) -> None:
        """Removes the clsact qdisc if we created it and it is empty."""
        is_ours = self._qdisc_mark(ifindex).is_dir()
        if is_ours and not any(self._dump(ifindex, direction) for direction in Direction):
            self._netlink.request(RTM_DELQDISC, _TCMSG.pack(0, ifindex, *CLSACT_HANDLE_PARENT, 0))
            self._qdisc_kinds.pop(ifindex, None)
            self._remove_qdisc_mark(ifindex)


def _read_link(pin: Path) -> Attachment | None:
    """Returns the pinned link if it is attached where its file name says. The ifindex may
    belong to another device by now, or the device may have moved to another namespace with our
    link.
    """
    number, _, label = pin.name.partition("-")
    if label not in tuple(Direction) or not pin.exists():
        return None
    with Link.open(pin) as link:
        info = link.read_info()
    # In struct bpf_link_info the union begins with ifindex (0: the device is gone) and attach
    # type.
    target = _PAIR.unpack(info.cgroup_id.to_bytes(_PAIR.size, sys.byteorder))
    direction = Direction(label)
    if target != (int(number), ATTACH_TYPE[direction]) or not _is_running(info.program_id, *target):
        return None
    return Attachment(int(number), direction, AttachMethod.TCX, info.program_id)


def _parse_program_id(message: Message) -> int:
    """Returns the program's id if this message describes any BPF filter; else 0."""
    attrs = parse_attributes(message.body[_TCMSG.size :])
    options = parse_attributes(attrs.get(TCA_OPTIONS, b""))
    if parse_string(attrs.get(TCA_KIND, b"")) != "bpf" or TCA_BPF_ID not in options:
        return 0
    return int(_U32.unpack(options[TCA_BPF_ID])[0])


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


def _is_running(program_id: int, ifindex: int, attach_type: int) -> bool:
    """Whether that program runs at this TCX attach point of this device."""
    try:
        return program_id in objects.list_attached(ifindex, attach_type)
    except KernelError as error:
        if error.errno == errno.ENODEV:
            return False
        raise


def _attach_error(action: str, attachment: Attachment, error: KernelError) -> KernelError:
    try:
        name = socket.if_indextoname(attachment.ifindex)
    except OSError:
        name = str(attachment.ifindex)
    hints = {
        (AttachMethod.CLSACT, errno.ENOENT): "the kernel needs sch_ingress and cls_bpf",
        (AttachMethod.CLSACT, errno.EEXIST): "another filter has our priority and handle",
        (
            AttachMethod.TCX,
            errno.EEXIST,
        ): "this program is attached by a link that is not pinned here",
    }
    hint = "; ".join(filter(None, (error.hint, hints.get((attachment.method, error.errno)))))
    where = f"{attachment.direction} of {name}, {attachment.method}"
    return KernelError(f"cannot {action} the program", where, hint, errno=error.errno)
