"""A dummy device that holds addresses: what is sent to them is for this node, and goes nowhere.

They are no addresses of the node otherwise: IPv4 ones have the scope of the host and IPv6 ones are
deprecated, so that no connection to elsewhere is made from them.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Collection, Iterable
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.addresses import (
    IFA_ADDRESS,
    IFA_LOCAL,
    IFADDR,
    RTM_GETADDR,
    RTM_NEWADDR,
    SCOPE_HOST,
)
from kbpf.kernel.netlink import Request, Rtnetlink, attribute, attributes
from kbpf.model.address import V4_PREFIX, Addr, family_of, format_addr

RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_DELADDR: Final = 21
NLM_F_CREATE: Final = 0x400
NLM_F_EXCL: Final = 0x200
IFF_UP: Final = 0x1
FLAGS: Final = 0x02 | 0x80 | 0x200  # IFA_F_NODAD, IFA_F_PERMANENT, IFA_F_NOPREFIXROUTE
FOREVER: Final = 0xFFFFFFFF

_IFINFO: Final = struct.Struct("=BxHiII")
_CACHE: Final = struct.Struct("=IIII")
_LINK: Final = _IFINFO.pack(0, 0, 0, 0, 0)


def ensure(name: str) -> int:
    """Its ifindex, made and switched on if need be; KernelError when it is of another kind."""
    named = attribute(3, name.encode() + b"\0")
    linkinfo = attribute(18, attribute(1, b"dummy\0"))
    # No link-local address of its own: IFLA_AF_SPEC, AF_INET6, IFLA_INET6_ADDR_GEN_MODE none.
    no_link_local = attribute(26, attribute(socket.AF_INET6, attribute(8, b"\1")))
    with Rtnetlink() as netlink:
        try:
            netlink.ask(RTM_NEWLINK, _LINK + named + linkinfo, NLM_F_CREATE | NLM_F_EXCL)
        except KernelError as error:
            if error.errno != errno.EEXIST:
                raise KernelError(
                    "cannot make the dummy device", name,
                    "load the kernel module dummy (modprobe dummy)", error.errno,
                ) from error  # fmt: skip
        with contextlib.suppress(KernelError):  # a kernel without IPv6
            netlink.ask(RTM_NEWLINK, _LINK + named + no_link_local)
        netlink.ask(RTM_NEWLINK, _IFINFO.pack(0, 0, 0, IFF_UP, IFF_UP) + named)
    return index(name)


def index(name: str) -> int:
    """Its ifindex; OSError if it is not there."""
    return socket.if_nametoindex(name)


def remove(name: str) -> bool:
    """Whether it was there. Its addresses go with it."""
    body = _LINK + attribute(3, name.encode() + b"\0")
    with Rtnetlink() as netlink:
        try:
            netlink.ask(RTM_DELLINK, body)
        except KernelError as error:
            if error.errno != errno.ENODEV:
                raise
            return False
    return True


def addresses(index: int) -> tuple[frozenset[Addr], frozenset[Addr]]:
    """The addresses of this device, and those of all others; link-local ones count for neither."""
    with Rtnetlink() as netlink:
        told = netlink.dump(RTM_GETADDR, IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
    ours: set[Addr] = set()
    others: set[Addr] = set()
    for message in told:
        if message.kind == RTM_NEWADDR:
            found = attributes(message.body[IFADDR.size :])
            raw = found.get(IFA_LOCAL, found.get(IFA_ADDRESS, b""))
            address = Addr(V4_PREFIX + raw) if len(raw) == 4 else Addr(raw)
            at = IFADDR.unpack_from(message.body)[4]
            (ours if at == index else others).add(address)
    return frozenset(ours), frozenset(others)


def add(index: int, wanted: Iterable[Addr]) -> None:
    """Gives it these addresses; those that it has are fine."""
    _change(RTM_NEWADDR, index, list(wanted), NLM_F_CREATE | NLM_F_EXCL, (errno.EEXIST,))


def drop(index: int, gone: Iterable[Addr]) -> None:
    """Takes them away; those that it does not have are fine."""
    _change(RTM_DELADDR, index, list(gone), 0, (errno.EADDRNOTAVAIL,))


def _change(kind: int, index: int, which: list[Addr], flags: int, allowed: Collection[int]) -> None:
    if not which:
        return
    with Rtnetlink() as netlink:
        codes = netlink.many([Request(kind, _body(index, one), flags) for one in which])
    for address, code in zip(which, codes, strict=True):
        if code and code not in allowed:
            verb = "add" if kind == RTM_NEWADDR else "remove"
            where = f"{format_addr(address)} at device {index}"
            raise KernelError(f"cannot {verb} the address", where, os.strerror(code), code)


def _body(index: int, address: Addr) -> bytes:
    if family_of(address) == 4:
        raw = address[12:]
        head = IFADDR.pack(socket.AF_INET, 32, FLAGS & 0xFF, SCOPE_HOST, index)
        return head + attribute(IFA_LOCAL, raw) + attribute(IFA_ADDRESS, raw)
    head = IFADDR.pack(socket.AF_INET6, 128, FLAGS & 0xFF, 0, index)
    return (
        head
        + attribute(IFA_LOCAL, address)
        + attribute(IFA_ADDRESS, address)
        + attribute(6, _CACHE.pack(0, FOREVER, 0, 0))  # IFA_CACHEINFO: preferred for 0 s
        + attribute(8, struct.pack("=I", FLAGS))
    )
