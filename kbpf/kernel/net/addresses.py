# SPDX-License-Identifier: Apache-2.0
"""Addresses in this network namespace: listing them, and following their changes."""

import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from kbpf.kernel.net import netlink
from kbpf.kernel.net.netlink import Rtnetlink, parse_attributes
from kbpf.kernel.net.uapi import (
    IFA_ADDRESS,
    IFA_F_DEPRECATED,
    IFA_F_SECONDARY,
    IFA_F_TENTATIVE,
    IFA_LOCAL,
    RT_SCOPE_HOST,
    RT_SCOPE_LINK,
    RTM_GETADDR,
    RTM_NEWADDR,
    RTMGRP_IPV4_IFADDR,
    RTMGRP_IPV6_IFADDR,
)
from kbpf.model.address import V4_PREFIX, Addr

IFADDRMSG: Final = struct.Struct("=BBBBI")
"""struct ifaddrmsg: family, prefix length, flags, scope, ifindex."""


def local_addresses(*excluded_devices: str) -> tuple[Addr, ...]:
    """Lists all addresses at which other machines can reach this namespace, sorted: no loopback,
    no link-local ones, and none of `excluded_devices`.
    """
    with Rtnetlink() as netlink:
        messages = netlink.dump(RTM_GETADDR, IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
    excluded_indexes = {_ifindex_or_zero(name) for name in excluded_devices}
    addresses = {
        address_of(message.body)
        for message in messages
        if message.msg_type == RTM_NEWADDR
        and IFADDRMSG.unpack_from(message.body)[4] not in excluded_indexes
    }
    return tuple(sorted(address for address in addresses if address is not None))


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
    unfit = flags & (IFA_F_SECONDARY | IFA_F_DEPRECATED | IFA_F_TENTATIVE)
    return None if unfit else address_of(body)


def address_of(body: bytes) -> Addr | None:
    """The address in an RTM_NEWADDR message; None for loopback and link-local ones."""
    _, _, _, scope, _ = IFADDRMSG.unpack_from(body)
    if scope in (RT_SCOPE_HOST, RT_SCOPE_LINK):
        return None
    attrs = parse_attributes(body[IFADDRMSG.size :])
    # On a point-to-point device IFA_ADDRESS is the peer's. IPv6 has IFA_LOCAL only there.
    raw = attrs.get(IFA_LOCAL, attrs.get(IFA_ADDRESS, b""))
    if len(raw) == 4:
        return Addr(V4_PREFIX + raw)
    return Addr(raw) if len(raw) == 16 else None


def watch_addresses(on_change: Callable[[], None], stop: threading.Event) -> None:
    """Calls `on_change` at once and after each change of an address, until `stop` is set. Run it
    in a separate thread.
    """
    netlink.watch(RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR, on_change, stop)
