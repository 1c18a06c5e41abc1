"""Finding and destroying UDP sockets: netlink sock_diag, in this thread's network namespace.

pyroute2's face of it swallows the errors of SOCK_DESTROY, so this speaks netlink itself.
"""

import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kbpf.errors import KernelError, kernel_errors
from kbpf.model.address import V4_PREFIX, Addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
SOCK_DESTROY: Final = 21
NLM_F_REQUEST: Final = 1
NLM_F_ACK: Final = 4
NLM_F_DUMP: Final = 0x300
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
ESTABLISHED: Final = 1 << 1
UNCONNECTED: Final = 1 << 7
LISTEN: Final = 1 << 10

_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI")
_SOCKET_ID: Final = 48  # inet_diag_sockid: ports, addresses, device, cookie
_ID_AT: Final = _HEADER.size + 4


@dataclass(frozen=True, slots=True)
class DiagSocket:
    """A connected socket: its peer, its cookie, and the kernel's own name for it."""

    family: int
    address: Addr
    port: int
    cookie: int
    raw_id: bytes


def _talk(kind: int, flags: int, body: bytes, netlink: socket.socket) -> None:
    netlink.send(_HEADER.pack(_HEADER.size + len(body), kind, NLM_F_REQUEST | flags, 1, 0) + body)


def _parse(message: bytes) -> DiagSocket:
    family = message[_HEADER.size]
    raw = message[_ID_AT : _ID_AT + _SOCKET_ID]
    port = int.from_bytes(raw[2:4], "big")
    address = raw[20:36]
    if family == socket.AF_INET:
        address = V4_PREFIX + address[:4]
    return DiagSocket(family, Addr(address), port, int.from_bytes(raw[40:48], "little"), raw)


def connected_udp(netlink: socket.socket, family: int) -> list[DiagSocket]:
    """All connected UDP sockets of one family."""
    found = _dump(netlink, family, socket.IPPROTO_UDP, ESTABLISHED)
    return [_parse(message) for message in found]


def listening() -> frozenset[FrontendAddress]:
    """Where sockets of this network namespace listen: TCP, and UDP without a peer. A wildcard is
    ANY4 or ANY6; that of IPv6 may stand for IPv4, too. Nothing of a protocol without its module.
    """
    found = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        for protocol, state in ((Protocol.TCP, LISTEN), (Protocol.UDP, UNCONNECTED)):
            for family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(KernelError):
                    found |= {
                        _bound(message, protocol)
                        for message in _dump(netlink, family, protocol, state)
                    }
    return frozenset(found)


def _bound(message: bytes, protocol: Protocol) -> FrontendAddress:
    raw = message[_ID_AT : _ID_AT + _SOCKET_ID]
    own = raw[4:20]
    if message[_HEADER.size] == socket.AF_INET:
        own = V4_PREFIX + own[:4]
    return FrontendAddress(Addr(own), int.from_bytes(raw[:2], "big"), protocol)


def _dump(netlink: socket.socket, family: int, protocol: int, states: int) -> list[bytes]:
    """A message for each socket in one of these states."""
    body = _REQUEST.pack(family, protocol, 0, states) + bytes(_SOCKET_ID)
    _talk(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, body, netlink)
    found: list[bytes] = []
    while True:
        data = netlink.recv(1 << 16)
        while len(data) >= _HEADER.size:
            length, kind, *_ = _HEADER.unpack_from(data)
            if kind == NLMSG_DONE:
                return found
            if kind == NLMSG_ERROR:
                code = -struct.unpack_from("=i", data, _HEADER.size)[0]
                raise KernelError(
                    "cannot list sockets",
                    "sock_diag",
                    "the kernel needs tcp_diag and udp_diag",
                    errno=code,
                )
            found.append(data[:length])
            data = data[(length + 3) & ~3 :]


def destroy(netlink: socket.socket, target: DiagSocket) -> bool:
    """Ends the socket: its owner gets ECONNABORTED. Whether it was still there."""
    body = _REQUEST.pack(target.family, socket.IPPROTO_UDP, 0, 0xFFFFFFFF) + target.raw_id
    _talk(SOCK_DESTROY, NLM_F_ACK, body, netlink)
    code = -struct.unpack_from("=i", netlink.recv(4096), _HEADER.size)[0]
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


def destroy_connected_udp(doomed: Callable[[DiagSocket], bool]) -> list[DiagSocket]:
    """Destroys every connected UDP socket of this network namespace that is doomed; which."""
    ended: list[DiagSocket] = []
    with (
        kernel_errors("cannot list the UDP sockets", "sock_diag"),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink,
    ):
        for family in (socket.AF_INET, socket.AF_INET6):
            for found in connected_udp(netlink, family):
                if doomed(found) and destroy(netlink, found):
                    ended.append(found)
    return ended
