# SPDX-License-Identifier: Apache-2.0
"""Addresses in this network namespace: listing them, and following their changes."""

import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from kbpf.kernel.net import netlink, uapi
from kbpf.kernel.net.netlink import Rtnetlink, parse_attributes
from kbpf.model.address import V4_PREFIX, Addr, NodeAddresses

IFADDRMSG: Final = struct.Struct("=BBBBI")
"""struct ifaddrmsg: family, prefix length, flags, scope, ifindex."""
POINT_TO_POINT_BITS: Final = 31
"""Subnets of IPv4 that are this small have no network and broadcast address (RFC 3021)."""


def local_addresses(*excluded_devices: str) -> NodeAddresses:
    """Lists all addresses at which other machines can reach this namespace, sorted: no loopback,
    no link-local ones, and none of `excluded_devices`.
    """
    with Rtnetlink() as netlink:
        messages = netlink.dump(uapi.RTM_GETADDR, IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
    excluded_indexes = {_ifindex_or_zero(name) for name in excluded_devices}
    addresses, subnet_ends = set[Addr](), set[Addr]()
    for message in messages:
        if message.msg_type != uapi.RTM_NEWADDR:
            continue
        family, bits, _, _, ifindex = IFADDRMSG.unpack_from(message.body)
        address = address_of(message.body)
        if ifindex in excluded_indexes or address is None:
            continue
        addresses.add(address)
        if family == socket.AF_INET and bits < POINT_TO_POINT_BITS:
            number, host = int.from_bytes(address), (1 << 32 - bits) - 1
            subnet_ends |= {Addr(end.to_bytes(16)) for end in (number & ~host, number | host)}
    found = NodeAddresses(sorted(addresses))
    found.subnet_ends = frozenset(subnet_ends - addresses)
    return found


def _ifindex_or_zero(name: str) -> int:
    try:
        return socket.if_nametoindex(name) if name else 0
    except OSError:
        return 0


def source_address_of(body: bytes) -> Addr | None:
    """The address in an RTM_NEWADDR message if the kernel would use it as a source; None if it is
    secondary, temporary, deprecated or tentative.
    """
    flags = IFADDRMSG.unpack_from(body)[2]
    unfit = flags & (uapi.IFA_F_SECONDARY | uapi.IFA_F_DEPRECATED | uapi.IFA_F_TENTATIVE)
    return None if unfit else address_of(body)


def address_of(body: bytes) -> Addr | None:
    """The address in an RTM_NEWADDR message; None for loopback and link-local ones."""
    _, _, _, scope, _ = IFADDRMSG.unpack_from(body)
    if scope in (uapi.RT_SCOPE_HOST, uapi.RT_SCOPE_LINK):
        return None
    attrs = parse_attributes(body[IFADDRMSG.size :])
    # On a point-to-point device IFA_ADDRESS is the peer's. IPv6 has IFA_LOCAL only there.
    raw = attrs.get(uapi.IFA_LOCAL, attrs.get(uapi.IFA_ADDRESS, b""))
    if len(raw) == 4:
        return Addr(V4_PREFIX + raw)
    return Addr(raw) if len(raw) == 16 else None


def watch_addresses(on_change: Callable[[], None], stop: threading.Event) -> None:
    """Calls `on_change` at once and after each change of an address, until `stop` is set. Run it
    in a separate thread.
    """
    netlink.watch(uapi.RTMGRP_IPV4_IFADDR | uapi.RTMGRP_IPV6_IFADDR, on_change, stop)
