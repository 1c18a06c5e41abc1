# SPDX-License-Identifier: Apache-2.0
"""Listening sockets of this network namespace, read through sock_diag."""

import socket
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kbpf.kernel.net import sock_diag
from kbpf.model.address import parse_addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol


class Row(NamedTuple):
    """A socket bound to a free port, and the address that is listed; "": none."""

    what: str
    family: int
    kind: int
    bind: str
    told: str
    then: Callable[[socket.socket], object] = lambda _: None


def listen(sock: socket.socket) -> None:
    sock.listen()


def connect(sock: socket.socket) -> None:
    sock.connect(("127.0.0.1", 9))


ROWS = [
    Row("TCP", socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1", "127.0.0.1", listen),
    Row("TCP everywhere", socket.AF_INET, socket.SOCK_STREAM, "0.0.0.0", "0.0.0.0", listen),
    Row("TCP IPv6", socket.AF_INET6, socket.SOCK_STREAM, "::1", "::1", listen),
    Row("TCP of both families", socket.AF_INET6, socket.SOCK_STREAM, "::", "::", listen),
    Row("TCP, only bound", socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1", ""),
    Row("UDP", socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1", "127.0.0.1"),
    Row("UDP with a peer", socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1", "", connect),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_listening_socket_is_listed(row: Row) -> None:
    with socket.socket(row.family, row.kind) as sock:
        sock.bind((row.bind, 0))
        row.then(sock)
        port = sock.getsockname()[1]
        protocol = Protocol.TCP if row.kind == socket.SOCK_STREAM else Protocol.UDP
        found = {
            at for at in sock_diag.list_listeners() if (at.port, at.protocol) == (port, protocol)
        }
        wanted = {FrontendAddress(parse_addr(row.told), port, protocol)} if row.told else set()
        assert found == wanted
    assert all((at.port, at.protocol) != (port, protocol) for at in sock_diag.list_listeners())
