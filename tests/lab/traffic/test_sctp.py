# SPDX-License-Identifier: Apache-2.0
"""Real SCTP associations through the packet path: outside and from a pod, to local and remote pods.

Each socket is bound to one address. SCTP sends all addresses of a socket to its peer (multi-homing)
and no load balancer translates those, kube-proxy included.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.kernel.system import netns
from tests.support.features import IPPROTO_SCTP, needs
from tests.support.lab.field import NODES4, NODES6, Field, at, both_families, may_see, split
from tests.support.lab.lab import PATIENCE, Place
from tests.support.table import each_line

pytestmark = needs("sctp")

SERVICES = "71:SCTP -> a1\n72:SCTP -> b1\n73:SCTP -> a1 b1 external=Local"
SERVERS = ("a1", "b1")
PORT = 8080
MESSAGE = bytes(range(256)) * 20
"""Larger than one packet."""


def endpoint(place: Place, address: str, port: int = 0) -> socket.socket:
    """An SCTP socket in the place's network, bound to this address alone."""

    def make() -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM, IPPROTO_SCTP)
        made.settimeout(PATIENCE)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        return made

    return netns.run_in(Path("/run/netns") / place.netns, make)


def answer(listener: socket.socket, name: str) -> None:
    """Sends each client the server's name and the peer address it sees, then echoes."""
    with contextlib.suppress(OSError):
        while True:
            one, peer = listener.accept()
            with one, contextlib.suppress(OSError):
                one.settimeout(PATIENCE)
                one.sendall(f"{name} {peer[0]}\n".encode())
                while data := one.recv(65536):
                    one.sendall(data)


def hang_up(listener: socket.socket) -> None:
    """Wakes its accept(). Linux 5.10 cannot shut down an SCTP listener."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field(name="sc", pods=(2, 1), agents=1) as made, contextlib.ExitStack() as own:
        made.create(*made.all_of(SERVICES))
        made.settle()
        for name in SERVERS:
            for address in (made[name].ip, made[name].ip6):
                listener = own.enter_context(endpoint(made[name], address, PORT))
                listener.settimeout(None)
                listener.listen()
                own.callback(hang_up, listener)
                threading.Thread(target=answer, args=(listener, name), daemon=True).start()
        yield made


@both_families
@each_line(
    "who, kind, number, answers, is_masqueraded",
    """
outside | NodePort  | 71 | a1 | yes
outside | VIP       | 72 | b1 | yes
outside | NodePort  | 73 | a1 | no
a2!     | ClusterIP | 72 | b1 | no
""",
    number=int,
    is_masqueraded=bool,
)
def test_an_sctp_association_transfers_data(field: Field, who, kind, number, answers, is_masqueraded, v6: bool):
    """A client, the Service that it dials by this kind of address, the backend that answers, and whether that sees the
    node's address instead of the client's.
    """
    place, (host, port) = field[who], split(at(kind, number, v6))
    own = place.ip6 if v6 else place.ip
    with endpoint(place, own) as client:
        client.connect((host, port))
        backend, seen = client.recv(4096).decode().split()
        assert backend == answers
        assert seen in may_see(field, (NODES6 if v6 else NODES4)[0] if is_masqueraded else own)
        assert client.getpeername()[:2] == (host, port)
        client.sendall(MESSAGE)
        back = b""
        while len(back) < len(MESSAGE):
            more = client.recv(65536)
            assert more, f"{len(back)} of {len(MESSAGE)} bytes came back"
            back += more
    assert back == MESSAGE
