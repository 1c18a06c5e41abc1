# SPDX-License-Identifier: Apache-2.0
"""Finds and destroys UDP sockets through sock_diag, in the calling thread's network namespace.

pyroute2 ignores the errors of SOCK_DESTROY.
"""

import contextlib
import errno
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.net import uapi
from kbpf.kernel.net.netlink import Netlink, parse_attributes
from kbpf.model.address import ANY4, ANY6, V4_PREFIX, Addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol

_INET_DIAG_REQ_V2: Final = struct.Struct("=BBBxI")
_INET_DIAG_SOCKID_SIZE: Final = 48  # inet_diag_sockid: ports, addresses, device, cookie
_SOCKID_OFFSET: Final = 4  # after family, state, timer and retransmissions
_ATTRIBUTES_OFFSET: Final = 72  # after struct inet_diag_msg


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
    messages = _dump(netlink, family, socket.IPPROTO_UDP, uapi.TCPF_ESTABLISHED)
    return [_parse(message) for message in messages]


_LISTENING_STATES: Final = {Protocol.TCP: uapi.TCPF_LISTEN, Protocol.UDP: uapi.TCPF_CLOSE}
"""The kernel keeps a UDP socket in TCP_CLOSE until it is connected."""
ALL_PORTS: Final = tuple((protocol, 0) for protocol in _LISTENING_STATES)


def list_listeners(
    ports: Collection[tuple[Protocol, int]] = ALL_PORTS,
) -> frozenset[FrontendAddress]:
    """Lists where sockets of this network namespace listen: TCP, and UDP without a peer. A
    wildcard is ANY4 or ANY6; an IPv6 socket that accepts IPv4, too, is both. Protocols whose diag
    module is missing are skipped. `ports`: only at these, of which the kernel selects the sockets;
    0: at all.
    """
    addresses: set[FrontendAddress] = set()
    with Netlink(uapi.NETLINK_SOCK_DIAG, "sock_diag") as netlink:
        for protocol, port in ports:
            if protocol not in _LISTENING_STATES:
                continue
            for family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(KernelError):
                    states = _LISTENING_STATES[protocol]
                    for message in _dump(netlink, family, protocol, states, port):
                        addresses.update(_parse_listener(message, protocol))
    return frozenset(addresses)


def _parse_listener(message: bytes, protocol: Protocol) -> Iterator[FrontendAddress]:
    raw = message[_SOCKID_OFFSET : _SOCKID_OFFSET + _INET_DIAG_SOCKID_SIZE]
    number, address = int.from_bytes(raw[:2], "big"), raw[4:20]
    if message[0] == socket.AF_INET:
        address = V4_PREFIX + address[:4]
    yield FrontendAddress(Addr(address), number, protocol)
    if address == ANY6:
        only_v6 = parse_attributes(message[_ATTRIBUTES_OFFSET:]).get(uapi.INET_DIAG_SKV6ONLY)
        if only_v6 != b"\1":
            yield FrontendAddress(ANY4, number, protocol)


def _dump(netlink: Netlink, family: int, protocol: int, states: int, port: int = 0) -> list[bytes]:
    """Returns a message for each socket in one of these states, at this port unless it is 0."""
    socket_id = port.to_bytes(2, "big").ljust(_INET_DIAG_SOCKID_SIZE, b"\0")
    body = _INET_DIAG_REQ_V2.pack(family, protocol, 0, states) + socket_id
    try:
        return [message.body for message in netlink.dump(uapi.SOCK_DIAG_BY_FAMILY, body)]
    except KernelError as error:
        hint = "the kernel needs tcp_diag and udp_diag"
        raise KernelError("cannot list sockets", "sock_diag", hint, error.errno) from error


def destroy(netlink: Netlink, target: DiagSocket) -> bool:
    """Destroys the socket: its owner gets ECONNABORTED. Returns whether it still existed."""
    # The kernel compares the cookie in raw_id: a new socket with the same addresses is not
    # destroyed.
    body = _INET_DIAG_REQ_V2.pack(target.family, socket.IPPROTO_UDP, 0, 0xFFFFFFFF) + target.raw_id
    try:
        netlink.request(uapi.SOCK_DESTROY, body)
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
    with Netlink(uapi.NETLINK_SOCK_DIAG, "sock_diag") as netlink:
        for family in (socket.AF_INET, socket.AF_INET6):
            for sock in list_connected_udp(netlink, family):
                if should_destroy(sock) and destroy(netlink, sock):
                    destroyed.append(sock)
    return destroyed
