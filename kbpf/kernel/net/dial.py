# SPDX-License-Identifier: Apache-2.0
"""Real connections to an address that is translated, observed from both ends.

Meant for an empty network namespace (sandbox.py): each possible backend address is added to
loopback there and served by this same process. So nothing leaves the machine, and an address that
is not translated cannot be reached.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.net.addresses import parse_proc_address
from kbpf.kernel.system.polling import wait_readable
from kbpf.model.address import format_addr

TIMEOUT_S: Final = 3.0
TCP_REPAIR: Final = 19
REFUSALS: Final = frozenset((errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EPERM))
"""What connect() returns if a program refuses or drops the connection."""

SocketAddress = tuple[str, int]


def connect_tcp(
    destination: SocketAddress, server_addresses: Sequence[SocketAddress]
) -> tuple[SocketAddress, SocketAddress]:
    """Connects to `destination`; returns where the connection arrived and what the client's
    getpeername() returns.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(_open_server(address, socket.SOCK_STREAM)) for address in server_addresses]
        client = stack.enter_context(_open_socket(destination, socket.SOCK_STREAM))
        with kernel_errors("connect() failed", _describe(destination), ""):
            client.connect(destination)
        listener = _wait_readable(listeners, destination)
        with listener.accept()[0] as server:
            return _socket_address(server.getsockname()), _socket_address(client.getpeername())


def exchange_udp(
    destination: SocketAddress, server_addresses: Sequence[SocketAddress]
) -> tuple[SocketAddress, SocketAddress]:
    """Sends a datagram to `destination`; returns where it arrived and the source that recvfrom()
    shows for the reply.
    """
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_open_server(address, socket.SOCK_DGRAM)) for address in server_addresses]
        client = stack.enter_context(_open_socket(destination, socket.SOCK_DGRAM))
        with kernel_errors("sendto() failed", _describe(destination), ""):
            client.sendto(b"?", destination)
        server = _wait_readable(servers, destination)
        _, client_address = server.recvfrom(16)
        server.sendto(b"!", client_address)
        _wait_readable([client], destination)
        _, reply_source = client.recvfrom(16)
        return _socket_address(server.getsockname()), _socket_address(reply_source)


def connect_without_packets(destination: SocketAddress, sock_type: int) -> tuple[SocketAddress, SocketAddress]:
    """Calls connect() without sending a packet, in the current namespace; returns the peer
    according to the kernel's socket table and what getpeername() returns.

    Needs a route to the peer, and CAP_NET_ADMIN for TCP. Raises KernelError, with the errno of
    connect() if that failed.
    """
    with _open_socket(destination, sock_type) as client:
        if sock_type == socket.SOCK_STREAM:
            _enter_repair(client)
        with kernel_errors("connect() failed", _describe(destination), ""):
            client.connect(destination)
        return _find_peer(client, destination), _socket_address(client.getpeername())


def try_connect(destination: SocketAddress, sock_type: int, sends: bool) -> tuple[str, SocketAddress | None]:
    """Calls connect() once, in the current namespace; returns the name of its errno, or "", and the
    peer according to the kernel's socket table if it succeeded. `sends`: whether TCP really
    connects; otherwise, and for UDP, no packet is sent (see connect_without_packets()).
    """
    with _open_socket(destination, sock_type) as client:
        if sock_type == socket.SOCK_STREAM and not sends:
            _enter_repair(client)
        try:
            client.connect(destination)
        except TimeoutError:
            return "ETIMEDOUT", None
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error.errno)), None
        return "", _find_peer(client, destination)


def _enter_repair(client: socket.socket) -> None:
    """In repair mode connect() succeeds at once and sends nothing; the BPF hook runs as always."""
    try:
        client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except PermissionError as error:
        raise KernelError("cannot connect without packets", "TCP_REPAIR", "it needs CAP_NET_ADMIN") from error


def _find_peer(client: socket.socket, destination: SocketAddress) -> SocketAddress:
    protocol = "tcp" if client.type == socket.SOCK_STREAM else "udp"
    table = f"{protocol}{'6' if ':' in destination[0] else ''}"
    return _read_peer(table, os.fstat(client.fileno()).st_ino)


def _read_peer(table: str, inode: int) -> SocketAddress:
    """The remote address of the socket with this inode, from /proc/self/net."""
    for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[9]) == inode:
            address, _, port = fields[2].partition(":")
            return format_addr(parse_proc_address(address)), int(port, 16)
    raise KernelError("a socket of our own is not listed", f"/proc/self/net/{table}")


def _socket_address(address: tuple[object, ...]) -> SocketAddress:
    return str(address[0]), int(str(address[1]))


def _open_socket(address: SocketAddress, sock_type: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, sock_type)
    sock.settimeout(TIMEOUT_S)
    return sock


def _open_server(address: SocketAddress, sock_type: int) -> socket.socket:
    sock = _open_socket(address, sock_type)
    try:
        sock.bind(address)
        if sock_type == socket.SOCK_STREAM:
            sock.listen()
    except OSError as error:
        sock.close()
        raise KernelError("cannot serve in the sandbox", str(address), errno=error.errno or 0) from error
    return sock


def _describe(destination: SocketAddress) -> str:
    return f"{destination[0]} port {destination[1]}"


def _wait_readable(sockets: Sequence[socket.socket], destination: SocketAddress) -> socket.socket:
    by_fd = {sock.fileno(): sock for sock in sockets}
    ready_fds = wait_readable(by_fd, TIMEOUT_S)
    if not ready_fds:
        raise KernelError("nothing arrived", _describe(destination))
    return by_fd[ready_fds[0]]
