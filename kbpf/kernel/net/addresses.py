# SPDX-License-Identifier: Apache-2.0
"""Addresses in this network namespace: listing them, and following their changes."""

import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Final, TypeGuard

from kbpf.kernel.net import netlink, uapi
from kbpf.kernel.net.netlink import Message, Notifications, Rtnetlink, parse_attributes, parse_int32
from kbpf.model.address import V4_PREFIX, Addr, NodeAddresses, family_of, from_wire, is_link_local6, is_loopback
from kbpf.model.objects import Cidr

IFADDRMSG: Final = struct.Struct("=BBBBI")
"""struct ifaddrmsg: family, prefix length, flags, scope, ifindex."""
RTMSG: Final = struct.Struct("=BBBBBBBBI")
"""struct rtmsg: family, lengths of destination and source, tos, table, protocol, scope, type,
flags.
"""
POINT_TO_POINT_BITS: Final = 31
"""Subnets of IPv4 that are this small have no network and broadcast address (RFC 3021)."""


def local_addresses(*excluded_devices: str) -> NodeAddresses:
    """Lists the addresses at which the kernel accepts packets in this namespace, sorted: those in
    its table `local`, whatever their scope, with or without a device that has them (AnyIP). No
    loopback addresses, no link-local ones of IPv6, and none of `excluded_devices`.
    """
    request = RTMSG.pack(socket.AF_UNSPEC, 0, 0, 0, uapi.RT_TABLE_LOCAL, 0, 0, uapi.RTN_LOCAL, 0)
    with Rtnetlink() as netlink:
        # Otherwise the kernel sends the routes of all tables.
        netlink.socket.setsockopt(uapi.SOL_NETLINK, uapi.NETLINK_GET_STRICT_CHK, 1)
        routes = netlink.dump(uapi.RTM_GETROUTE, request)
        messages = netlink.dump(uapi.RTM_GETADDR, IFADDRMSG.pack(socket.AF_INET, 0, 0, 0, 0))
    excluded_indexes = {_ifindex_or_zero(name) for name in excluded_devices}
    local, subnet_ends = set[Cidr](), set[Addr]()
    for route in filter(_is_local_route, routes):
        attrs = parse_attributes(route.body[RTMSG.size :])
        address = from_wire(attrs.get(uapi.RTA_DST, b""))
        if _is_counted(address) and parse_int32(attrs.get(uapi.RTA_OIF)) not in excluded_indexes:
            local.add(Cidr(address, route.body[1] + (96 if family_of(address) == 4 else 0)))
    for message in messages:
        _, bits, _, _, ifindex = IFADDRMSG.unpack_from(message.body)
        if bits >= POINT_TO_POINT_BITS or ifindex in excluded_indexes:
            continue
        if _is_counted(address := address_of(message.body)):
            number, host = int.from_bytes(address), (1 << 32 - bits) - 1
            subnet_ends |= {Addr(end.to_bytes(16)) for end in (number & ~host, number | host)}
    found = NodeAddresses(sorted(address for address, bits in local if bits == 128))
    found.networks = tuple(sorted(network for network in local if network.bits < 128))
    found.subnet_ends = frozenset(subnet_ends.difference(found))
    return found


def _is_local_route(message: Message) -> bool:
    is_route = message.msg_type in (uapi.RTM_NEWROUTE, uapi.RTM_DELROUTE)
    return is_route and (message.body[4], message.body[7]) == (uapi.RT_TABLE_LOCAL, uapi.RTN_LOCAL)


def _is_counted(address: Addr | None) -> TypeGuard[Addr]:
    return not (address is None or is_loopback(address) or is_link_local6(address))


def _ifindex_or_zero(name: str) -> int:
    try:
        return socket.if_nametoindex(name) if name else 0
    except OSError:
        return 0


def source_address_of(body: bytes) -> Addr | None:
    """The address in an RTM_NEWADDR message if the kernel would use it as a source; None if it is
    secondary, temporary, deprecated or tentative, or its scope is link or host.
    """
    _, _, flags, scope, _ = IFADDRMSG.unpack_from(body)
    unfit = flags & (uapi.IFA_F_SECONDARY | uapi.IFA_F_DEPRECATED | uapi.IFA_F_TENTATIVE)
    return None if unfit or scope in (uapi.RT_SCOPE_HOST, uapi.RT_SCOPE_LINK) else address_of(body)


def subnet_of(body: bytes) -> Cidr:
    """The network of the address in an RTM_NEWADDR message; with IPv4 the peer's, if it has one. The
    kernel chooses the source of a packet by it.
    """
    family, bits, *_ = IFADDRMSG.unpack_from(body)
    peer = parse_attributes(body[IFADDRMSG.size :]).get(uapi.IFA_ADDRESS, b"")
    address = from_wire(peer) if family == socket.AF_INET else address_of(body)
    shift = (32 if family == socket.AF_INET else 128) - bits
    number = int.from_bytes(address or b"") >> shift << shift
    return Cidr(Addr(number.to_bytes(16)), 128 - shift)


def address_of(body: bytes) -> Addr | None:
    """The address in an RTM_NEWADDR message."""
    attrs = parse_attributes(body[IFADDRMSG.size :])
    # On a point-to-point device IFA_ADDRESS is the peer's. IPv6 has IFA_LOCAL only there.
    return from_wire(attrs.get(uapi.IFA_LOCAL, attrs.get(uapi.IFA_ADDRESS, b"")))


def parse_proc_address(text: str) -> Addr:
    """An address in a table of /proc/net, such as tcp6."""
    # Each group of eight digits is a 32-bit word in host byte order.
    words = (int(text[offset : offset + 8], 16) for offset in range(0, len(text), 8))
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return Addr(V4_PREFIX + raw if len(raw) == 4 else raw)


def watch_addresses(on_change: Callable[[], None], stop: threading.Event) -> None:
    """Calls `on_change` at once and after each change of local_addresses(), until `stop` is set.
    Run it in a separate thread.
    """
    # Not notifications of addresses: the kernel sends them before it adds the route.
    netlink.watch(uapi.RTMGRP_IPV4_ROUTE | uapi.RTMGRP_IPV6_ROUTE, on_change, stop, _has_local_route)


def _has_local_route(found: Notifications) -> bool:
    return found.lost or any(map(_is_local_route, found.messages))
