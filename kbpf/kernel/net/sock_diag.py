# SPDX-License-Identifier: Apache-2.0
"""Finds and destroys UDP sockets through sock_diag, in the calling thread's network namespace.

pyroute2 ignores the errors of SOCK_DESTROY.
"""

import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Netlink
from kbpf.kernel.net.uapi import (
    NETLINK_SOCK_DIAG,
    SOCK_DESTROY,
    SOCK_DIAG_BY_FAMILY,
    TCPF_CLOSE,
    TCPF_ESTABLISHED,
    TCPF_LISTEN,
)
from kbpf.model.address import V4_PREFIX, Addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol

_INET_DIAG_REQ_V2: Final = struct.Struct("=BBBxI")
_INET_DIAG_SOCKID_SIZE: Final = 48  # inet_diag_sockid: ports, addresses, device, cookie
_SOCKID_OFFSET: Final = 4  # after family, state, timer and retransmissions


@dataclass(frozen=True, slots=True)
class DiagSocket:
    """A connected socket: its peer, its cookie and its struct inet_diag_sockid."""

    family: int
    address: Addr
    port: int
    cookie: int
    raw_id: bytes


def _parse(message: bytes) -> DiagSocket:
    family = message[0]
    # struct inet_diag_sockid: source port, destination port (network order), source, destination
    # (16 bytes each; IPv4 uses the first 4), device, cookie (two words, the low one first).
    raw = message[_SOCKID_OFFSET : _SOCKID_OFFSET + _INET_DIAG_SOCKID_SIZE]
    port = int.from_bytes(raw[2:4], "big")
    address = raw[20:36]
    if family == socket.AF_INET:
        address = V4_PREFIX + address[:4]
    return DiagSocket(family, Addr(address), port, int.from_bytes(raw[40:48], "little"), raw)


def list_connected_udp(netlink: Netlink, family: int) -> list[DiagSocket]:
    """Lists all connected UDP sockets of one family."""
    messages = _dump(netlink, family, socket.IPPROTO_UDP, TCPF_ESTABLISHED)
    return [_parse(message) for message in messages]


def list_listeners() -> frozenset[FrontendAddress]:
    """Lists where sockets of this network namespace listen: TCP, and UDP without a peer. A
    wildcard is ANY4 or ANY6; ANY6 may accept IPv4 too. Protocols whose diag module is missing are
    skipped.
    """
    addresses = set()
    with _open() as netlink:
        # The kernel keeps a UDP socket in TCP_CLOSE until it is connected.
        for protocol, state in ((Protocol.TCP, TCPF_LISTEN), (Protocol.UDP, TCPF_CLOSE)):
            for family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(KernelError):
                    addresses |= {
                        _parse_local_address(message, protocol)
                        for message in _dump(netlink, family, protocol, state)
                    }
    return frozenset(addresses)


def _parse_local_address(message: bytes, protocol: Protocol) -> FrontendAddress:
    raw = message[_SOCKID_OFFSET : _SOCKID_OFFSET + _INET_DIAG_SOCKID_SIZE]
    address = raw[4:20]
    if message[0] == socket.AF_INET:
        address = V4_PREFIX + address[:4]
    return FrontendAddress(Addr(address), int.from_bytes(raw[:2], "big"), protocol)


def _open() -> Netlink:
    return Netlink(NETLINK_SOCK_DIAG, "sock_diag")


def _dump(netlink: Netlink, family: int, protocol: int, states: int) -> list[bytes]:
    """Returns a message for each socket in one of these states."""
    body = _INET_DIAG_REQ_V2.pack(family, protocol, 0, states) + bytes(_INET_DIAG_SOCKID_SIZE)
    try:
        return [message.body for message in netlink.dump(SOCK_DIAG_BY_FAMILY, body)]
    except KernelError as error:
        hint = "the kernel needs tcp_diag and udp_diag"
        raise KernelError("cannot list sockets", "sock_diag", hint, error.errno) from error


def destroy(netlink: Netlink, target: DiagSocket) -> bool:
    """Destroys the socket: its owner gets ECONNABORTED. Returns whether it still existed."""
    # The kernel compares the cookie in raw_id: a new socket with the same addresses is not
    # destroyed.
    body = _INET_DIAG_REQ_V2.pack(target.family, socket.IPPROTO_UDP, 0, 0xFFFFFFFF) + target.raw_id
    try:
        netlink.request(SOCK_DESTROY, body)
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return False
        hint = "the kernel needs CONFIG_INET_DIAG_DESTROY"
        raise KernelError("cannot destroy a UDP socket", "sock_diag", hint, error.errno) from error
    return True


def destroy_connected_udp(should_destroy: Callable[[DiagSocket], bool]) -> list[DiagSocket]:
    """Destroys the connected UDP sockets of this network namespace for which `should_destroy` is
    true; returns them.
    """
    destroyed: list[DiagSocket] = []
    with _open() as netlink:
        for family in (socket.AF_INET, socket.AF_INET6):
            for sock in list_connected_udp(netlink, family):
                if should_destroy(sock) and destroy(netlink, sock):
                    destroyed.append(sock)
    return destroyed
