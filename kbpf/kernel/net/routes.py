# SPDX-License-Identifier: Apache-2.0
"""Asks the kernel for the route of one packet, as `ip route get` does."""

import errno
import os
import socket
import struct
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.net import uapi
from kbpf.kernel.net.addresses import RTMSG
from kbpf.kernel.net.netlink import AF, Rtnetlink, pack_attribute, parse_attributes, parse_int32
from kbpf.model.address import Addr, family_of, from_wire, to_wire
from kbpf.model.inspection import Route

_U32: Final = struct.Struct("=I")
ERROR_WORDS: Final = {
    errno.EXDEV: "rp_filter drops it: the route to its source uses another device",
    errno.EHOSTUNREACH: "no route, or IP forwarding is off",
    errno.EINVAL: "the kernel drops it: its source address is invalid there",
}
"""What an error of RTM_GETROUTE says about such a packet; others have their usual words."""


def find_route(to: Addr, source: Addr | None = None, came_in_by: int = 0) -> Route:
    """The route of a packet to this address. `came_in_by`: the ifindex of the device on which the
    packet arrives; the kernel then also decides whether it accepts it there (rp_filter, IP
    forwarding). 0: this node sends it.
    """
    width = 32 if family_of(to) == 4 else 128
    source = source if source is not None and family_of(source) == family_of(to) else None
    body = RTMSG.pack(AF[family_of(to)], width, width if source else 0, 0, 0, 0, 0, 0, 0) + pack_attribute(
        uapi.RTA_DST, to_wire(to)
    )
    if source is not None:
        body += pack_attribute(uapi.RTA_SRC, to_wire(source))
    if came_in_by:
        body += pack_attribute(uapi.RTA_IIF, _U32.pack(came_in_by))
    try:
        with Rtnetlink() as netlink:
            messages = netlink.request(uapi.RTM_GETROUTE, body)
    except KernelError as error:
        return Route(error=ERROR_WORDS.get(error.errno, os.strerror(error.errno)))
    for message in messages:
        if message.msg_type == uapi.RTM_NEWROUTE:
            return _parse(message.body)
    return Route(error="the kernel sent no answer")


def _parse(body: bytes) -> Route:
    kind = RTMSG.unpack_from(body)[7]
    attributes = parse_attributes(body[RTMSG.size :])
    ifindex = parse_int32(attributes.get(uapi.RTA_OIF))
    if kind not in (uapi.RTN_UNICAST, uapi.RTN_LOCAL):
        return Route(error=f"its route is of type {kind}, which is no way to a host")
    return Route(
        ifindex=ifindex,
        device=_name_of(ifindex),
        gateway=from_wire(attributes.get(uapi.RTA_GATEWAY) or attributes.get(uapi.RTA_VIA, b"")[2:]),
        source=from_wire(attributes.get(uapi.RTA_PREFSRC, b"")),
        is_local=kind == uapi.RTN_LOCAL,
    )


def _name_of(ifindex: int) -> str:
    try:
        return socket.if_indextoname(ifindex)
    except OSError:  # removed meanwhile
        return str(ifindex)
