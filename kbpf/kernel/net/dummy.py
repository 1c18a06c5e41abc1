"""A dummy device that holds addresses: what is sent to them is for this node, and goes nowhere.

They are no addresses of the node otherwise: IPv4 ones have the scope of the host and IPv6 ones are
deprecated, so that no connection to elsewhere is made from them.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net.addresses import (
    IFA_ADDRESS,
    IFA_LOCAL,
    IFADDR,
    RTM_GETADDR,
    RTM_NEWADDR,
    SCOPE_HOST,
    SCOPE_LINK,
)
from kbpf.kernel.net.devices import IFF_UP, RTM_DELLINK, RTM_GETLINK, RTM_NEWLINK
from kbpf.kernel.net.netlink import Request, Rtnetlink, attribute, attributes, text
from kbpf.model.address import V4_PREFIX, Addr, family_of, format_addr

RTM_DELADDR: Final = 21
NLM_F_CREATE: Final = 0x400
NLM_F_EXCL: Final = 0x200
FLAGS: Final = 0x02 | 0x80 | 0x200  # IFA_F_NODAD, IFA_F_PERMANENT, IFA_F_NOPREFIXROUTE
FOREVER: Final = 0xFFFFFFFF
IPV6_SETTINGS: Final = Path("/proc/sys/net/ipv6/conf")
BROKEN: Final = frozenset((errno.ENODEV, errno.EPERM))
"""How the kernel refuses whatever address is asked for."""
KIND: Final = "dummy"
ALIAS: Final = "kbpf"
"""Says that the device is ours."""

_IFINFO: Final = struct.Struct("=BxHiII")
_CACHE: Final = struct.Struct("=IIII")
_LINK: Final = _IFINFO.pack(0, 0, 0, 0, 0)


class Device(NamedTuple):
    """What a device is (of a virtual one), and what somebody has written on it."""

    kind: str
    alias: str


def look(name: str) -> Device | None:
    """The device of this name, of whatever kind; None if there is none."""
    with Rtnetlink() as netlink:
        try:
            found = netlink.ask(RTM_GETLINK, _LINK + attribute(3, name.encode() + b"\0"))[0].body
        except KernelError as error:
            if error.errno != errno.ENODEV:
                raise
            return None
    return _read(attributes(found[_IFINFO.size :]))


def _read(said: Mapping[int, bytes]) -> Device:
    info = attributes(said.get(18, b""))
    return Device(text(info.get(1, b"")), text(said.get(20, b"")))


def ours() -> tuple[str, ...]:
    """The names of all dummy devices that bear our alias."""
    with Rtnetlink() as netlink:
        told = netlink.dump(RTM_GETLINK, _LINK)
    found = (attributes(message.body[_IFINFO.size :]) for message in told)
    return tuple(text(said[3]) for said in found if _read(said) == (KIND, ALIAS))


def is_ours(name: str) -> bool:
    """Whether this is a dummy device that bears our alias. One without alias and addresses is
    nobody's: we may have been killed before it had one.
    """
    found = look(name)
    if found is None or found.kind != KIND:
        return False
    return found.alias == ALIAS or not (found.alias or addresses_of(name))


def ensure(name: str) -> int:
    """Its ifindex, made and switched on if need be; KernelError when there is one of this name that
    is not ours.
    """
    if index_or_zero(name) and not is_ours(name):
        raise KernelError(
            "a device of this name is there, and kbpf has not made it", name,
            "remove it, or give kbpf another name with --ipvs-device", errno.EEXIST,
        )  # fmt: skip
    named = attribute(3, name.encode() + b"\0")
    linkinfo = attribute(18, attribute(1, KIND.encode() + b"\0"))
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
        alias = attribute(20, ALIAS.encode())
        netlink.ask(RTM_NEWLINK, _IFINFO.pack(0, 0, 0, IFF_UP, IFF_UP) + named + alias)
    try:
        return index(name)
    except OSError as error:
        raise KernelError("the device has gone again", name, errno=errno.ENODEV) from error


def index(name: str) -> int:
    """Its ifindex; OSError if it is not there."""
    return socket.if_nametoindex(name)


def takes_ipv6(name: str) -> bool:
    """Whether the kernel takes IPv6 addresses at this device."""
    try:
        return (IPV6_SETTINGS / name / "disable_ipv6").read_text().strip() == "0"
    except OSError:
        return False  # none in this kernel


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


def addresses(index: int, *apart: str) -> tuple[frozenset[Addr], frozenset[Addr]]:
    """The addresses of this device, and those of all others but the devices `apart`; loopback is
    among them, link-local IPv6 addresses count for neither.
    """
    with Rtnetlink() as netlink:
        told = netlink.dump(RTM_GETADDR, IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
    left_out = {index_or_zero(name) for name in apart}
    ours: set[Addr] = set()
    others: set[Addr] = set()
    for message in told:
        _, _, _, scope, at = IFADDR.unpack_from(message.body)
        if message.kind != RTM_NEWADDR or scope == SCOPE_LINK or at in left_out:
            continue
        found = attributes(message.body[IFADDR.size :])
        raw = found.get(IFA_LOCAL, found.get(IFA_ADDRESS, b""))
        address = Addr(V4_PREFIX + raw) if len(raw) == 4 else Addr(raw)
        (ours if at == index else others).add(address)
    return frozenset(ours), frozenset(others)


def index_or_zero(name: str) -> int:
    """Its ifindex, 0 if it is not there."""
    try:
        return index(name)
    except OSError:
        return 0


def addresses_of(name: str) -> frozenset[Addr]:
    """The addresses of a device, none if it is not there."""
    try:
        return addresses(index(name))[0]
    except OSError:
        return frozenset()


def add(index: int, wanted: Iterable[Addr]) -> dict[Addr, KernelError]:
    """Gives it these addresses; those that it has are fine. The ones that it cannot have, and why.
    KernelError when it can have none.
    """
    flags = NLM_F_CREATE | NLM_F_EXCL
    refused = dict(_change(RTM_NEWADDR, index, list(wanted), flags, (errno.EEXIST,)))
    if broken := next((e for e in refused.values() if e.errno in BROKEN), None):
        raise broken
    return refused


def drop(index: int, gone: Iterable[Addr]) -> None:
    """Takes them away; those that it does not have are fine."""
    for _, error in _change(RTM_DELADDR, index, list(gone), 0, (errno.EADDRNOTAVAIL,)):
        raise error


def _change(
    kind: int, index: int, which: list[Addr], flags: int, allowed: Collection[int]
) -> Iterator[tuple[Addr, KernelError]]:
    """All of them; those that are refused."""
    if not which:
        return
    with Rtnetlink() as netlink:
        codes = netlink.many([Request(kind, _body(index, one), flags) for one in which])
    for address, code in zip(which, codes, strict=True):
        if code and code not in allowed:
            verb = "add" if kind == RTM_NEWADDR else "remove"
            where = f"{format_addr(address)} at device {index}"
            error = KernelError(f"cannot {verb} the address", where, os.strerror(code), code)
            yield address, error


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
