# SPDX-License-Identifier: Apache-2.0
"""The peer of a socket has the text form that addresses have everywhere else."""

import socket

import pytest

from kbpf.kernel.net import dial
from kbpf.kernel.system import sandbox
from kbpf.model.address import format_addr, parse_addr
from tests.support.lab.lab import ip


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7", "::203.0.113.5", "::5:6"])
def test_peer_is_written_as_any_address(address: str):
    """A tenant may have an endpoint at ::203.0.113.5, which Python writes in another way; the
    agent's self-check took it for a connection that leads elsewhere.
    """

    def connect() -> tuple[str, int]:
        ip("link set lo up", f"address add {address} dev lo nodad")
        (peer, port), _ = dial.connect_without_packets((address, 53), socket.SOCK_DGRAM)
        return peer, port

    assert tuple(sandbox.run(connect)) == (format_addr(parse_addr(address)), 53)
