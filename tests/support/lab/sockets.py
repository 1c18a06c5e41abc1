# SPDX-License-Identifier: Apache-2.0
"""Sockets in a network namespace, for servers and clients of the tests. A socket stays in the
namespace that it was created in, so only its creation has to happen there.
"""

import socket
from functools import partial
from pathlib import Path

from kbpf.kernel.system.netns import run_in


def socket_in(netns: str | None, family: socket.AddressFamily, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Return a new socket in the namespace /run/netns/NETNS, or in our own for None."""
    make = partial(socket.socket, family, kind)
    return make() if netns is None else run_in(Path("/run/netns") / netns, make)


def connect(
    netns: str | None,
    host: str,
    port: int,
    timeout: float | None,
    own_port: int = 0,
    kind: int = socket.SOCK_STREAM,
) -> socket.socket:
    """Return a socket that is connected from the namespace, and maybe from this port, to a literal address (names:
    localhost only).
    """
    host = "127.0.0.1" if host == "localhost" else host
    made = socket_in(netns, family_of(host), kind)
    try:
        made.settimeout(timeout)
        if kind == socket.SOCK_STREAM:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if own_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("", own_port))
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
