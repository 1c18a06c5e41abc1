"""A real connection to an address that leads somewhere else, seen from both ends.

Meant for an empty network namespace (sandbox.py): every address that the connection may be led to
is given to loopback there and served by this same process, so nothing leaves the machine, and an
address that is not translated is not reached at all.
"""

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.system.polling import readable

TIMEOUT_SECONDS: Final = 3.0
TCP_REPAIR: Final = 19

Place = tuple[str, int]
"""An address and a port."""


def tcp(to: Place, served: Sequence[Place]) -> tuple[Place, Place]:
    """connect() to `to`; where it arrived, and what getpeername() says at the client."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(_serve(place, socket.SOCK_STREAM)) for place in served]
        client = stack.enter_context(_socket(to, socket.SOCK_STREAM))
        _try(lambda: client.connect(to), "connect", to)
        listener = _ready(listeners, to)
        with listener.accept()[0] as server:
            return _place(server.getsockname()), _place(client.getpeername())


def udp(to: Place, served: Sequence[Place]) -> tuple[Place, Place]:
    """sendto() to `to`; where the datagram arrived, and whom recvfrom() shows for the answer."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_serve(place, socket.SOCK_DGRAM)) for place in served]
        client = stack.enter_context(_socket(to, socket.SOCK_DGRAM))
        _try(lambda: client.sendto(b"?", to), "sendto", to)
        server = _ready(servers, to)
        _, asked_by = server.recvfrom(16)
        server.sendto(b"!", asked_by)
        _ready([client], to)
        _, answered_by = client.recvfrom(16)
        return _place(server.getsockname()), _place(answered_by)


def silently(to: Place, kind: int) -> tuple[Place, Place]:
    """connect() without a packet, from wherever we are: whom the socket talks to by the kernel's
    own word, and what getpeername() says. Needs a route there, and CAP_NET_ADMIN for TCP, whose
    repair mode takes a connection for made at once.
    """
    with _socket(to, kind) as client:
        if kind == socket.SOCK_STREAM:
            client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        _try(lambda: client.connect(to), "connect", to)
        name = f"{'tcp' if kind == socket.SOCK_STREAM else 'udp'}{'6' if ':' in to[0] else ''}"
        return _peer(name, os.fstat(client.fileno()).st_ino), _place(client.getpeername())


def _peer(table: str, inode: int) -> Place:
    """The remote address of the socket with this inode, out of /proc/self/net."""
    for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[9]) == inode:
            address, _, port = fields[2].partition(":")
            words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
            packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
            return str(ipaddress.ip_address(packed)), int(port, 16)
    raise KernelError("a socket of our own is not listed", f"/proc/self/net/{table}")


def _place(address: tuple[object, ...]) -> Place:
    return str(address[0]), int(str(address[1]))


def _socket(place: Place, kind: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, kind)
    made.settimeout(TIMEOUT_SECONDS)
    return made


def _serve(place: Place, kind: int) -> socket.socket:
    made = _socket(place, kind)
    try:
        made.bind(place)
        if kind == socket.SOCK_STREAM:
            made.listen()
    except OSError as error:
        made.close()
        raise KernelError(
            "cannot serve in the sandbox", str(place), errno=error.errno or 0
        ) from error
    return made


def _try(call: Callable[[], object], name: str, to: Place) -> None:
    try:
        call()
    except OSError as error:
        raise KernelError(
            f"{name}() failed", f"{to[0]} port {to[1]}", errno=error.errno or 0
        ) from error


def _ready(sockets: Sequence[socket.socket], to: Place) -> socket.socket:
    by_number = {one.fileno(): one for one in sockets}
    arrived = readable(by_number, TIMEOUT_SECONDS)
    if not arrived:
        raise KernelError("nothing arrived", f"{to[0]} port {to[1]}")
    return by_number[arrived[0]]
