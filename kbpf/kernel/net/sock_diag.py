# SPDX-License-Identifier: Apache-2.0
"""Finds and destroys UDP sockets through sock_diag, in the calling thread's network namespace.

pyroute2 ignores the errors of SOCK_DESTROY, so the messages are encoded here.
"""

import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.net.uapi import (
    NETLINK_SOCK_DIAG,
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    SOCK_DESTROY,
    SOCK_DIAG_BY_FAMILY,
    TCPF_CLOSE,
    TCPF_ESTABLISHED,
    TCPF_LISTEN,
)
from kbpf.model.address import V4_PREFIX, Addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol

_NLMSGHDR: Final = struct.Struct("=IHHII")
_INET_DIAG_REQ_V2: Final = struct.Struct("=BBBxI")
_INET_DIAG_SOCKID_SIZE: Final = 48  # inet_diag_sockid: ports, addresses, device, cookie
_SOCKID_OFFSET: Final = _NLMSGHDR.size + 4  # after family, state, timer and retransmissions


@dataclass(frozen=True, slots=True)
class DiagSocket:
    """A connected socket: its peer, its cookie and its struct inet_diag_sockid."""

    family: int
    address: Addr
    port: int
    cookie: int
    raw_id: bytes


def _send(msg_type: int, flags: int, body: bytes, netlink: socket.socket) -> None:
    netlink.send(
        _NLMSGHDR.pack(_NLMSGHDR.size + len(body), msg_type, NLM_F_REQUEST | flags, 1, 0) + body
    )


def _parse(message: bytes) -> DiagSocket:
    family = message[_NLMSGHDR.size]
    # struct inet_diag_sockid: source port, destination port (network order), source, destination
    # (16 bytes each; IPv4 uses the first 4), device, cookie (two words, the low one first).
    raw = message[_SOCKID_OFFSET : _SOCKID_OFFSET + _INET_DIAG_SOCKID_SIZE]
    port = int.from_bytes(raw[2:4], "big")
    address = raw[20:36]
    if family == socket.AF_INET:
        address = V4_PREFIX + address[:4]
    return DiagSocket(family, Addr(address), port, int.from_bytes(raw[40:48], "little"), raw)


def list_connected_udp(netlink: socket.socket, family: int) -> list[DiagSocket]:
    """Lists all connected UDP sockets of one family."""
    messages = _dump(netlink, family, socket.IPPROTO_UDP, TCPF_ESTABLISHED)
    return [_parse(message) for message in messages]


def list_listeners() -> frozenset[FrontendAddress]:
    """Lists where sockets of this network namespace listen: TCP, and UDP without a peer. A
    wildcard is ANY4 or ANY6; ANY6 may accept IPv4 too. Protocols whose diag module is missing are
    skipped.
    """
    addresses = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
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
    if message[_NLMSGHDR.size] == socket.AF_INET:
        address = V4_PREFIX + address[:4]
    return FrontendAddress(Addr(address), int.from_bytes(raw[:2], "big"), protocol)


def _dump(netlink: socket.socket, family: int, protocol: int, states: int) -> list[bytes]:
    """Returns a message for each socket in one of these states."""
    body = _INET_DIAG_REQ_V2.pack(family, protocol, 0, states) + bytes(_INET_DIAG_SOCKID_SIZE)
    _send(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, body, netlink)
    messages: list[bytes] = []
    while True:
        data = netlink.recv(1 << 16)
        while len(data) >= _NLMSGHDR.size:
            length, msg_type, *_ = _NLMSGHDR.unpack_from(data)
            if msg_type == NLMSG_DONE:
                return messages
            if msg_type == NLMSG_ERROR:
                code = -struct.unpack_from("=i", data, _NLMSGHDR.size)[0]
                raise KernelError(
                    "cannot list sockets",
                    "sock_diag",
                    "the kernel needs tcp_diag and udp_diag",
                    errno=code,
                )
            messages.append(data[:length])
            data = data[(length + 3) & ~3 :]


def destroy(netlink: socket.socket, target: DiagSocket) -> bool:
    """Destroys the socket: its owner gets ECONNABORTED. Returns whether it still existed."""
    # The kernel compares the cookie in raw_id: a new socket with the same addresses is not
    # destroyed.
    body = _INET_DIAG_REQ_V2.pack(target.family, socket.IPPROTO_UDP, 0, 0xFFFFFFFF) + target.raw_id
    _send(SOCK_DESTROY, NLM_F_ACK, body, netlink)
    code = -struct.unpack_from("=i", netlink.recv(4096), _NLMSGHDR.size)[0]
    if code == errno.ENOENT:
        return False
    if code:
        raise KernelError(
            "cannot destroy a UDP socket",
            "sock_diag",
            "the kernel needs CONFIG_INET_DIAG_DESTROY",
            errno=code,
        )
    return True


def destroy_connected_udp(should_destroy: Callable[[DiagSocket], bool]) -> list[DiagSocket]:
    """Destroys the connected UDP sockets of this network namespace for which `should_destroy` is
    true; returns them.
    """
    destroyed: list[DiagSocket] = []
    with (
        kernel_errors("cannot list the UDP sockets", "sock_diag"),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink,
    ):
        for family in (socket.AF_INET, socket.AF_INET6):
            for sock in list_connected_udp(netlink, family):
                if should_destroy(sock) and destroy(netlink, sock):
                    destroyed.append(sock)
    return destroyed
