# SPDX-License-Identifier: Apache-2.0
"""Sockets in a network namespace, for servers and clients of the tests.

A socket stays in the namespace that it was created in, so only its creation has to happen there: in
a separate thread, because setns(2) moves the calling thread only, and nothing else must run in that
thread afterwards.
"""

import ctypes
import os
import socket
import threading

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def socket_in(netns: str | None, family: socket.AddressFamily) -> socket.socket:
    """Return a new TCP socket in the namespace /run/netns/NETNS, or in our own for None.

    Raises OSError: no such namespace, or no permission to enter it.
    """
    if netns is None:
        return socket.socket(family, socket.SOCK_STREAM)
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        try:
            _enter(f"/run/netns/{netns}")
            made.append(socket.socket(family, socket.SOCK_STREAM))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make, name=f"socket-in-{netns}")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def connect(netns: str | None, host: str, port: int, timeout: float | None) -> socket.socket:
    """Return a TCP connection from the namespace to a literal address (names: localhost only)."""
    host = "127.0.0.1" if host == "localhost" else host
    made = socket_in(netns, family_of(host))
    try:
        made.settimeout(timeout)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.connect((host, port))
    except BaseException:
        made.close()
        raise
    return made


def bound(netns: str | None, host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound but does not listen; port 0 picks a free port.

    While it is open, it reserves the port for our other sockets with SO_REUSEPORT; connections are
    refused until one of them listens. The wildcard `::` serves IPv4 too.
    """
    made = socket_in(netns, family_of(host))
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        made.bind((host, port))
    except BaseException:
        made.close()
        raise
    return made


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _enter(path: str) -> None:
    with open(path, "rb") as namespace:
        if _libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            errno = ctypes.get_errno()
            raise OSError(errno, os.strerror(errno), path)
