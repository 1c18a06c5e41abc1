# SPDX-License-Identifier: Apache-2.0
"""cls_bpf filters on the clsact qdiscs of devices, for kernels without TCX.

Filters run in the order of their priorities; of those with one priority the newest runs first. Ours
are recognized by handle and name. They run first (priority 1), or as close to that as other tools'
filters allow: all filters of one priority have the same kind and protocol. A filter cannot be
moved, so it is replaced by a new one with our other handle; a packet meets both for a moment,
rather than none.

Filters of others are never touched, including those of other agents: they have our handles and
name, so their programs tell. The qdisc is removed only if we created it (marked by a folder
next to the pins) and it is empty. The kernel has no atomic "remove if empty": a filter that another
tool adds between our check and the removal is lost.
"""

import errno
import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import IgnoredErrnos, KernelError
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.bpf.uapi import (
    TCA_BPF_FD,
    TCA_BPF_FLAG_ACT_DIRECT,
    TCA_BPF_FLAGS,
    TCA_BPF_ID,
    TCA_BPF_NAME,
)
from kbpf.kernel.net import uapi
from kbpf.kernel.net.netlink import (
    Message,
    Rtnetlink,
    pack_attribute,
    pack_string,
    parse_attributes,
    parse_string,
)

CLSACT_HANDLE_PARENT: Final = (0xFFFF0000, 0xFFFFFFF1)
"""Handle and parent of a clsact qdisc (TC_H_CLSACT), and also of the older qdisc "ingress"."""

INGRESS_QDISC_HINT: Final = "it has an 'ingress' qdisc; egress needs a clsact, or Linux 6.6: delete the qdisc"

_ETH_P_ALL: Final = socket.htons(3)
_TCMSG: Final = struct.Struct("=BxxxiIII")  # struct tcmsg: family, ifindex, handle, parent, info
_U32: Final = struct.Struct("=I")


class Direction(StrEnum):
    """Which packets: those that enter by the device, or those that leave by it."""

    INGRESS = "ingress"
    EGRESS = "egress"

    @property
    def opposite(self) -> "Direction":
        return Direction.EGRESS if self is Direction.INGRESS else Direction.INGRESS


FILTER_PARENT: Final = {Direction.INGRESS: 0xFFFFFFF2, Direction.EGRESS: 0xFFFFFFF3}
"""TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS or TC_H_MIN_EGRESS)."""


class Filter(NamedTuple):
    """A filter of any kind. `program_id`: 0 if the kind is not "bpf". `protocol`: in network byte
    order.
    """

    kind: str
    priority: int
    protocol: int
    handle: int
    name: str
    program_id: int

    @property
    def is_hash_table(self) -> bool:
        """The kind u32 also dumps its hash tables. Their handles have no number of a filter
        (TC_U32_NODE in linux/pkt_cls.h).
        """
        return self.kind == "u32" and not self.handle & 0xFFF


@dataclass(frozen=True, slots=True)
class FilterIdentity:
    """What identifies our filters, whatever their priority: the handle or the next number, and the
    name.
    """

    handle: int = 0x6B627066  # "kbpf"
    name: str = "kbpf"

    @property
    def handles(self) -> tuple[int, int]:
        return self.handle, self.handle + 1

    def matches(self, filter_: Filter) -> bool:
        return (
            filter_.handle in self.handles
            and filter_.name == self.name
            and filter_.protocol == _ETH_P_ALL
            and filter_.program_id != 0
        )


DEFAULT_IDENTITY: Final = FilterIdentity()


class ClsactFilters:
    """The filters on the devices of this network namespace. `folder`: where the qdiscs that we
    created are marked. `is_of_other_agent`: see TcAttacher.
    """

    def __init__(
        self,
        netlink: Rtnetlink,
        folder: Path,
        identity: FilterIdentity,
        is_of_other_agent: Callable[[int], bool],
    ) -> None:
        self._netlink = netlink
        self._folder = folder
        self._identity = identity
        self._is_of_other_agent = is_of_other_agent
        self._qdisc_kinds: dict[int, str] | None = None  # from the last read_qdiscs()

    # ---- reading ---------------------------------------------------------------------------

    def read_qdiscs(self) -> dict[int, str]:
        """Maps the devices with a qdisc that can hold our filters to its kind:
        clsact or ingress.
        """
        kinds = {}
        for message in self._netlink.dump(uapi.RTM_GETQDISC, _TCMSG.pack(0, 0, 0, 0, 0)):
            _, ifindex, handle, parent, _ = _TCMSG.unpack_from(message.body)
            if (handle, parent) == CLSACT_HANDLE_PARENT:
                attrs = parse_attributes(message.body[_TCMSG.size :])
                kinds[ifindex] = parse_string(attrs[uapi.TCA_KIND])
        self._qdisc_kinds = kinds
        return kinds

    def forget_qdiscs(self) -> None:
        self._qdisc_kinds = None

    def _qdiscs(self) -> dict[int, str]:
        return self.read_qdiscs() if self._qdisc_kinds is None else self._qdisc_kinds

    def _dump(self, ifindex: int, direction: Direction) -> list[Message]:
        body = _TCMSG.pack(0, ifindex, 0, FILTER_PARENT[direction], 0)
        return self._netlink.dump(uapi.RTM_GETTFILTER, body)

    def list_filters(self, ifindex: int, direction: Direction) -> tuple[Filter, ...]:
        """All filters of this device, in the order in which they run."""
        # An "ingress" qdisc has only one side, but dumps it for both.
        if ifindex not in self._qdiscs() or not self.has_place(ifindex, direction):
            return ()
        return tuple(_parse_filters(self._dump(ifindex, direction)))

    def has_place(self, ifindex: int, direction: Direction) -> bool:
        """Whether the device's qdisc, if it has one, has this direction."""
        return direction is Direction.INGRESS or self._qdiscs().get(ifindex) != "ingress"

    def list_ours(self, ifindex: int, direction: Direction) -> tuple[Filter, ...]:
        """Our filters there: one, or two if an agent was killed while it moved one."""
        return tuple(filter(self.is_ours, self.list_filters(ifindex, direction)))

    def is_ours(self, filter_: Filter) -> bool:
        return self._identity.matches(filter_) and not self._is_of_other_agent(filter_.program_id)

    def is_misplaced(self, filters: tuple[Filter, ...]) -> bool:
        """Whether a new filter of ours would run earlier than the first one does. `filters`: all of
        this hook.
        """
        ours = next(filter(self.is_ours, filters), None)
        if ours is None:
            return False
        return ours.priority != _first_priority(filters) or any(
            other.priority == ours.priority and not self._identity.matches(other)
            for other in filters[: filters.index(ours)]
        )

    # ---- changing --------------------------------------------------------------------------

    def attach(self, ifindex: int, direction: Direction, program: Program) -> None:
        """Adds our filter, or replaces its program atomically."""
        is_new_qdisc = self._create_qdisc(ifindex)
        if not self.has_place(ifindex, direction):
            raise KernelError("", hint=INGRESS_QDISC_HINT)
        filters = self.list_filters(ifindex, direction)
        ours = list(filter(self.is_ours, filters))
        program_id = program.read_info().id
        if not is_new_qdisc and not ours and not self.list_ours(ifindex, direction.opposite):
            self._remove_qdisc_mark(ifindex)
        try:
            if ours:
                if ours[0].program_id != program_id:
                    self._write(ifindex, direction, program, ours[0], uapi.NLM_F_REPLACE)
            else:
                self._add(ifindex, direction, program, filters)
        except KernelError:
            if is_new_qdisc:
                self._remove_empty_qdisc(ifindex)
            raise
        for surplus in ours[1:]:
            self._delete(ifindex, direction, surplus)

    def move(self, ifindex: int, direction: Direction, program: Program) -> None:
        """Adds a filter in the first place, and then deletes those that were there before."""
        filters = self.list_filters(ifindex, direction)
        self._add(ifindex, direction, program, filters)
        for old in filter(self.is_ours, filters):
            self._delete(ifindex, direction, old)

    def detach(self, ifindex: int, direction: Direction) -> None:
        """Deletes our filters; removes the qdisc too if we created it and it is empty."""
        ours = self.list_ours(ifindex, direction)
        for filter_ in ours:
            self._delete(ifindex, direction, filter_)
        if ours:
            self._remove_empty_qdisc(ifindex)

    def _add(self, ifindex: int, direction: Direction, program: Program, filters: tuple[Filter, ...]) -> None:
        priority = _first_priority(filters)
        taken = {filter_.handle for filter_ in filters if filter_.priority == priority}
        # EXCL fails if other tools' filters have both of our handles, rather than replacing one.
        handle = next((h for h in self._identity.handles if h not in taken), self._identity.handle)
        place = Filter("bpf", priority, _ETH_P_ALL, handle, self._identity.name, 0)
        self._write(ifindex, direction, program, place, uapi.NLM_F_EXCL)

    def _write(self, ifindex: int, direction: Direction, program: Program, place: Filter, flags: int) -> None:
        options = (
            pack_attribute(TCA_BPF_FD, _U32.pack(program.fd))
            + pack_string(TCA_BPF_NAME, self._identity.name)
            + pack_attribute(TCA_BPF_FLAGS, _U32.pack(TCA_BPF_FLAG_ACT_DIRECT))
        )
        body = _pack_header(ifindex, direction, place) + pack_attribute(uapi.TCA_OPTIONS, options)
        self._netlink.request(uapi.RTM_NEWTFILTER, body, uapi.NLM_F_CREATE | flags)

    def _delete(self, ifindex: int, direction: Direction, filter_: Filter) -> None:
        with IgnoredErrnos(errno.ENOENT):
            self._netlink.request(uapi.RTM_DELTFILTER, _pack_header(ifindex, direction, filter_))

    # ---- qdiscs ----------------------------------------------------------------------------

    def qdisc_mark(self, ifindex: int) -> Path:
        """The mark that exists while the clsact of that device is one that we created."""
        return self._folder / f"{ifindex}-clsact"

    def _create_qdisc(self, ifindex: int) -> bool:
        """Creates a clsact; returns False if a qdisc already exists in its place."""
        if ifindex in self._qdiscs():
            return False
        body = _TCMSG.pack(0, ifindex, *CLSACT_HANDLE_PARENT, 0) + pack_attribute(uapi.TCA_KIND, b"clsact\0")
        try:
            self._netlink.request(uapi.RTM_NEWQDISC, body, uapi.NLM_F_CREATE | uapi.NLM_F_EXCL)
        except KernelError as error:
            if error.errno != errno.EEXIST:
                raise
            self.read_qdiscs()
            return False
        # Marked after it was created: if the agent is killed in between, an unmarked qdisc remains,
        # which is never removed. A mark first could make us remove another tool's qdisc.
        self.qdisc_mark(ifindex).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._qdiscs()[ifindex] = "clsact"
        return True

    def _remove_qdisc_mark(self, ifindex: int) -> None:
        # A qdisc that has no filter of ours belongs to another tool by now.
        if self.qdisc_mark(ifindex).is_dir():
            self.qdisc_mark(ifindex).rmdir()

    def _remove_empty_qdisc(self, ifindex: int) -> None:
        """Removes the clsact qdisc if we created it and it is empty."""
        is_ours = self.qdisc_mark(ifindex).is_dir()
        if is_ours and not any(self._dump(ifindex, each) for each in Direction):
            self._netlink.request(uapi.RTM_DELQDISC, _TCMSG.pack(0, ifindex, *CLSACT_HANDLE_PARENT, 0))
            self._qdiscs().pop(ifindex, None)
            self._remove_qdisc_mark(ifindex)


def _first_priority(filters: tuple[Filter, ...]) -> int:
    """The first priority that no filter of another kind occupies."""
    occupied = {filter_.priority for filter_ in filters if (filter_.kind, filter_.protocol) != ("bpf", _ETH_P_ALL)}
    return next(priority for priority in itertools.count(1) if priority not in occupied)


def _pack_header(ifindex: int, direction: Direction, filter_: Filter) -> bytes:
    """The beginning of each message about this filter."""
    # tcm_info: priority in host order above the EtherType in network order
    info = filter_.priority << 16 | filter_.protocol
    body = _TCMSG.pack(0, ifindex, filter_.handle, FILTER_PARENT[direction], info)
    return body + pack_string(uapi.TCA_KIND, filter_.kind)


def _parse_filters(messages: list[Message]) -> Iterator[Filter]:
    """The filters of chain 0, in which every packet begins. The kernel also dumps a message without
    a handle for each priority, except for kinds that have only one filter.
    """
    for message in messages:
        _, _, handle, _, info = _TCMSG.unpack_from(message.body)
        attrs = parse_attributes(message.body[_TCMSG.size :])
        kind = parse_string(attrs.get(uapi.TCA_KIND, b""))
        if any(attrs.get(uapi.TCA_CHAIN, b"")) or (not handle and uapi.TCA_OPTIONS not in attrs):
            continue
        options = parse_attributes(attrs.get(uapi.TCA_OPTIONS, b"")) if kind == "bpf" else {}
        yield Filter(
            kind,
            info >> 16,
            info & 0xFFFF,
            handle,
            parse_string(options.get(TCA_BPF_NAME, b"")),
            int(_U32.unpack(options[TCA_BPF_ID])[0]) if TCA_BPF_ID in options else 0,
        )
