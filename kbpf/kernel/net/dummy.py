# SPDX-License-Identifier: Apache-2.0
"""A dummy device that holds addresses: packets to them are delivered to this node.

The node does not use them for anything else: IPv4 addresses have scope host and IPv6 addresses are
deprecated, so they are not chosen as the source of connections to other machines.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from kbpf.errors import IgnoredErrnos, KernelError
from kbpf.kernel.net import uapi
from kbpf.kernel.net.addresses import IFADDRMSG, address_of
from kbpf.kernel.net.netlink import (
    NetlinkRequest,
    Rtnetlink,
    pack_attribute,
    pack_string,
    parse_attributes,
    parse_string,
)
from kbpf.model.address import Addr, family_of, format_addr, is_link_local6

# Without duplicate address detection, which would delay the use of an address by a second.
ADDRESS_FLAGS: Final = uapi.IFA_F_NODAD | uapi.IFA_F_PERMANENT | uapi.IFA_F_NOPREFIXROUTE
IPV6_SYSCTLS: Final = Path("/proc/sys/net/ipv6/conf")
FATAL_ERRNOS: Final = frozenset((errno.ENODEV, errno.EPERM))
"""Errors that apply to every address on the device."""
KIND: Final = "dummy"
ALIAS: Final = "kbpf"
"""Marks the device as ours."""

_IFINFOMSG: Final = struct.Struct("=BxHiII")
_CACHEINFO: Final = struct.Struct("=IIII")  # struct ifa_cacheinfo
_EMPTY_IFINFOMSG: Final = _IFINFOMSG.pack(0, 0, 0, 0, 0)


def is_ours(name: str) -> bool:
    """Whether this is a dummy device with our alias, or one without alias and addresses: kbpf may
    have been killed before it set the alias.
    """
    with Rtnetlink() as netlink:
        try:
            body = netlink.request(uapi.RTM_GETLINK, _EMPTY_IFINFOMSG + pack_string(uapi.IFLA_IFNAME, name))[0].body
        except KernelError as error:
            if error.errno != errno.ENODEV:
                raise
            return False
    attrs = parse_attributes(body[_IFINFOMSG.size :])
    info = parse_attributes(attrs.get(uapi.IFLA_LINKINFO, b""))
    if parse_string(info.get(uapi.IFLA_INFO_KIND, b"")) != KIND:
        return False
    alias = parse_string(attrs.get(uapi.IFLA_IFALIAS, b""))
    return alias == ALIAS or not (alias or addresses_of(name))


def ensure(name: str) -> int:
    """Creates the device if necessary, switches it on and returns its ifindex. Raises KernelError
    if a device of this name exists that is not ours.
    """
    if get_ifindex_or_zero(name) and not is_ours(name):
        raise KernelError("a device of this name exists that kbpf did not create", name, "remove it", errno.EEXIST)
    name_attr = pack_string(uapi.IFLA_IFNAME, name)
    linkinfo_attr = pack_attribute(uapi.IFLA_LINKINFO, pack_string(uapi.IFLA_INFO_KIND, KIND))
    gen_mode = pack_attribute(uapi.IFLA_INET6_ADDR_GEN_MODE, bytes((uapi.IN6_ADDR_GEN_MODE_NONE,)))
    no_link_local = pack_attribute(uapi.IFLA_AF_SPEC, pack_attribute(socket.AF_INET6, gen_mode))
    with Rtnetlink() as netlink:
        try:
            netlink.request(
                uapi.RTM_NEWLINK, _EMPTY_IFINFOMSG + name_attr + linkinfo_attr, uapi.NLM_F_CREATE | uapi.NLM_F_EXCL
            )
        except KernelError as error:
            if error.errno != errno.EEXIST:
                raise KernelError(
                    "cannot create the dummy device", name, "load the kernel module dummy (modprobe dummy)", error.errno
                ) from error
        with contextlib.suppress(KernelError):  # the kernel has no IPv6
            netlink.request(uapi.RTM_NEWLINK, _EMPTY_IFINFOMSG + name_attr + no_link_local)
        alias_attr = pack_attribute(uapi.IFLA_IFALIAS, ALIAS.encode())
        netlink.request(uapi.RTM_NEWLINK, _IFINFOMSG.pack(0, 0, 0, uapi.IFF_UP, uapi.IFF_UP) + name_attr + alias_attr)
    try:
        return socket.if_nametoindex(name)
    except OSError as error:
        raise KernelError("the device was removed by another program", name, errno=errno.ENODEV) from error


def accepts_ipv6(name: str) -> bool:
    """Whether IPv6 addresses can be added to this device."""
    try:
        return (IPV6_SYSCTLS / name / "disable_ipv6").read_text().strip() == "0"
    except OSError:
        return False  # the kernel has no IPv6


def remove(name: str) -> bool:
    """Removes the device with its addresses; returns whether it existed."""
    body = _EMPTY_IFINFOMSG + pack_string(uapi.IFLA_IFNAME, name)
    with IgnoredErrnos(errno.ENODEV), Rtnetlink() as netlink:
        netlink.request(uapi.RTM_DELLINK, body)
        return True
    return False


def list_addresses(ifindex: int, *excluded_devices: str) -> tuple[frozenset[Addr], frozenset[Addr]]:
    """Returns the addresses of this device, and those of all others except `excluded_devices`.
    Loopback addresses are included, link-local ones of IPv6 are not.
    """
    with Rtnetlink() as netlink:
        messages = netlink.dump(uapi.RTM_GETADDR, IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
    excluded_indexes = {get_ifindex_or_zero(name) for name in excluded_devices}
    own: set[Addr] = set()
    foreign: set[Addr] = set()
    for message in messages:
        message_ifindex = IFADDRMSG.unpack_from(message.body)[4]
        address = address_of(message.body) if message.msg_type == uapi.RTM_NEWADDR else None
        if address is None or is_link_local6(address) or message_ifindex in excluded_indexes:
            continue
        (own if message_ifindex == ifindex else foreign).add(address)
    return frozenset(own), frozenset(foreign)


def get_ifindex_or_zero(name: str) -> int:
    """Returns the ifindex, 0 if the device does not exist."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def addresses_of(name: str) -> frozenset[Addr]:
    """The addresses of a device; empty if it does not exist."""
    try:
        return list_addresses(socket.if_nametoindex(name))[0]
    except OSError:
        return frozenset()


def add_addresses(ifindex: int, addresses: Iterable[Addr]) -> dict[Addr, KernelError]:
    """Adds these addresses; existing ones are kept. Returns the addresses that the kernel refused,
    with the error. Raises KernelError if it accepts none on this device.
    """
    flags = uapi.NLM_F_CREATE | uapi.NLM_F_EXCL
    errors = dict(_send_requests(uapi.RTM_NEWADDR, ifindex, list(addresses), flags, (errno.EEXIST,)))
    if fatal := next((e for e in errors.values() if e.errno in FATAL_ERRNOS), None):
        raise fatal
    return errors


def delete_addresses(ifindex: int, addresses: Iterable[Addr]) -> None:
    """Removes these addresses; missing ones are ignored."""
    for _, error in _send_requests(uapi.RTM_DELADDR, ifindex, list(addresses), 0, (errno.EADDRNOTAVAIL,)):
        raise error


def _send_requests(
    msg_type: int, ifindex: int, addresses: list[Addr], flags: int, ignored_errnos: Collection[int]
) -> Iterator[tuple[Addr, KernelError]]:
    """Sends all requests; yields those that failed."""
    if not addresses:
        return
    with Rtnetlink() as netlink:
        codes = netlink.request_many(
            [NetlinkRequest(msg_type, _encode_address(ifindex, addr), flags) for addr in addresses]
        )
    for address, code in zip(addresses, codes, strict=True):
        if code and code not in ignored_errnos:
            action = "add" if msg_type == uapi.RTM_NEWADDR else "remove"
            where = f"{format_addr(address)} at device {ifindex}"
            error = KernelError(f"cannot {action} the address", where, os.strerror(code), code)
            yield address, error


def _encode_address(ifindex: int, address: Addr) -> bytes:
    if family_of(address) == 4:
        raw = address[12:]
        # ifa_flags has 8 bits. IFA_F_NOPREFIXROUTE is a higher one, but a /32 has no prefix route.
        header = IFADDRMSG.pack(socket.AF_INET, 32, ADDRESS_FLAGS & 0xFF, uapi.RT_SCOPE_HOST, ifindex)
        return header + pack_attribute(uapi.IFA_LOCAL, raw) + pack_attribute(uapi.IFA_ADDRESS, raw)
    header = IFADDRMSG.pack(socket.AF_INET6, 128, ADDRESS_FLAGS & 0xFF, uapi.RT_SCOPE_UNIVERSE, ifindex)
    return (
        header
        + pack_attribute(uapi.IFA_LOCAL, address)
        + pack_attribute(uapi.IFA_ADDRESS, address)
        # A preferred lifetime of 0 s makes the address deprecated.
        + pack_attribute(uapi.IFA_CACHEINFO, _CACHEINFO.pack(0, uapi.INFINITY_LIFE_TIME, 0, 0))
        + pack_attribute(uapi.IFA_FLAGS, struct.pack("=I", ADDRESS_FLAGS))
    )
