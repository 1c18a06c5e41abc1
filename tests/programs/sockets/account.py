# SPDX-License-Identifier: Apache-2.0
"""Servers and clients of the connections that are counted: what they send, how they end, and the failures kept."""

import contextlib
import errno
import selectors
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.model.config import Accounting
from kbpf.model.desired import DesiredState
from kbpf.views import failures
from tests.support.lab import prober
from tests.support.lab.lab import PATIENCE, Place, until
from tests.support.plane import Site, desired, services, within

FAIR, RUDE, FIRST, UDP_PORT, NOBODY, QUIT = 9000, 9001, 9002, 9003, 9009, 9010
REQUEST, REPLY = b"q" * 1_234, b"a" * 56_789
TCP_CLOSING = 11
FLOOD = 400


class Bench(NamedTuple):
    """The data plane, a client and two backends."""

    site: Site
    client: Place
    one: Place
    two: Place

    def fill(self, backend: str) -> str:
        """The backend with the address of `one` or `one6` before its port."""
        host, colon, number = backend.rpartition(":")
        own = {"one": self.one.ip, "one6": f"[{self.one.ip6}]"}
        return own.get(host, host) + colon + number

    def act(self, does: str, to: str) -> bool:
        """Whether the client has done what it should (see CLIENTS) at this frontend."""
        host, _, number = to.rpartition(":")
        return within(self.client, lambda: CLIENTS[does](host.strip("[]"), int(number))) is not False


def serve() -> None:
    """One server of each kind, until a client connects to QUIT."""
    listeners = {}
    for number in (FAIR, RUDE, FIRST, QUIT):
        listener = socket.socket(socket.AF_INET6)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("::", number))
        listener.listen(64)
        listeners[number] = listener
    datagrams = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    datagrams.bind(("::", UDP_PORT))
    ready = selectors.DefaultSelector()
    for number, sock in (*listeners.items(), (UDP_PORT, datagrams)):
        ready.register(sock, selectors.EVENT_READ, number)
    while True:
        for key, _ in ready.select():
            if key.data == UDP_PORT:
                data, client = datagrams.recvfrom(4096)
                datagrams.sendto(data, client)
                continue
            connection, _ = listeners[key.data].accept()
            if key.data == QUIT:
                return
            with connection, contextlib.suppress(OSError):
                talk(connection, key.data)


def talk(connection: socket.socket, number: int) -> None:
    """Behaves as the server of this port."""
    if number == FIRST:
        connection.sendall(REPLY)
        return
    heard = b""
    while len(heard) < len(REQUEST):
        heard += connection.recv(65536)
    if number == RUDE:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
        return
    connection.sendall(REPLY)
    while connection.recv(65536):
        pass


def quit_servers() -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", QUIT)) == 0


SERVICES = """
fair      10.96.0.1:80 -> one:9000
fair6     [fd00:96::1]:80 -> one6:9000
rude      10.96.0.2:80 -> one:9001
first     10.96.0.3:80 -> one:9002
dns:UDP   10.96.0.4:53 -> one:9003
refusing  10.96.0.5:80 -> one:9009
silent    10.96.0.6:80 -> 192.0.2.99:80
empty     10.96.0.7:80
elsewhere 10.96.0.8:80 -> one:9000 internal=Local
names     10.96.0.9:80 -> two:8080
shop/sticky 10.96.0.20:80 -> one:9000 affinity=600
"""


def world(bench: Bench) -> DesiredState:
    text = SERVICES.replace("one6", f"[{bench.one.ip6}]").replace("one", bench.one.ip).replace("two", bench.two.ip)
    return desired(*services(text, {}))


def start(bench: Bench, accounting: Accounting = Accounting.FULL, **more: object) -> BpfPlane:
    plane = bench.site.open(accounting=accounting, **more)
    plane.apply(world(bench), None)
    return plane


def recorded(bench: Bench) -> list[failures.FailureRow]:
    """The failures of the clients `client` and `two`."""
    rows = failures.build_rows(snapshot.read(bench.site.pins, failures.NEEDS))
    return [
        row
        for row in rows
        if str(bench.client.cgroup).endswith(row.client) or str(bench.two.cgroup).endswith(row.client)
    ]


# ---- how a client may behave: each runs in the client's namespace ------------------------------


def opened(host: str, number: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket that is connected to the frontend."""
    s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
    s.settimeout(PATIENCE)
    s.connect((host, number))
    return s


def fair(host: str, number: int = 80) -> None:
    """Sends a request, closes its direction first, and reads the reply to the end."""
    with opened(host, number) as s:
        s.sendall(REQUEST)
        s.shutdown(socket.SHUT_WR)
        while s.recv(65536):
            pass


def reset(host: str, number: int = 80) -> None:
    """Sends a request and is reset by the server."""
    with opened(host, number) as s:
        s.sendall(REQUEST)
        with contextlib.suppress(ConnectionResetError):
            assert not s.recv(1)


def listens(host: str, number: int = 80) -> None:
    """Sends nothing, reads to the end, and closes after the backend."""
    with opened(host, number) as s:
        while s.recv(65536):
            pass


LOSES_FINS = """
table inet fins {
    chain out { type filter hook output priority 0; tcp dport 9000-9010 tcp flags & fin != 0 drop; }
    chain in { type filter hook input priority 0; tcp sport 9000-9010 tcp flags & fin != 0 drop; }
}"""


def closes_at_once(host: str, number: int = 80) -> None:
    """Both sides close before either has seen the other's FIN: all FINs are dropped at first; then
    the backend's arrives (state CLOSING) and is acknowledged before the client's has arrived.
    """

    def nft(text: str) -> None:
        subprocess.run(("nft", "-f", "-"), input=text, text=True, check=True)

    nft(LOSES_FINS)
    try:
        with opened(host, number) as s:
            s.shutdown(socket.SHUT_WR)
            nft("delete chain inet fins in")
            while s.recv(65536):
                pass
            until("state CLOSING", lambda: state_of(s) == TCP_CLOSING)
    finally:
        nft("delete table inet fins")


def state_of(s: socket.socket) -> int:
    """The TCP state: the first byte of struct tcp_info."""
    return s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def refused(host: str, number: int = 80) -> None:
    """connect() fails, for whatever reason."""
    with socket.socket() as s:
        s.settimeout(PATIENCE)
        assert s.connect_ex((host, number))


def gives_up(host: str, number: int = 80) -> bool:
    """Closes without waiting for the handshake. Returns whether that was certainly before the
    kernel sent the SYN again, which it does after a second.
    """
    start = time.monotonic()
    with socket.socket() as s:
        s.setblocking(False)
        assert s.connect_ex((host, number))
    return time.monotonic() - start < 0.9


def waits(host: str, number: int = 80) -> None:
    """Waits for the handshake until the SYN has been sent again."""
    with socket.socket() as s:
        s.setblocking(False)
        assert s.connect_ex((host, number)) == errno.EINPROGRESS
        until("the SYN has been sent again", lambda: prober.retransmitted(s))


def datagrams(host: str, number: int) -> None:
    """Two datagrams of one flow."""
    with socket.socket(type=socket.SOCK_DGRAM) as s:
        s.settimeout(PATIENCE)
        for _ in range(2):
            s.sendto(b"?", (host, number))
            assert s.recv(4096) == b"?"


def connected_datagrams(host: str, number: int) -> None:
    """Two datagrams of a connected socket."""
    with opened(host, number, socket.SOCK_DGRAM) as s:
        for _ in range(2):
            s.send(b"?")
            assert s.recv(4096) == b"?"


def connects(host: str, number: int) -> None:
    """A connected UDP socket that sends nothing."""
    opened(host, number, socket.SOCK_DGRAM).close()


def flood(host: str, number: int) -> None:
    """FLOOD of these sockets."""
    for _ in range(FLOOD):
        connects(host, number)


def fair_twice(host: str, number: int) -> None:
    fair(host, number)
    fair(host, number)


_ALL = (fair, fair_twice, reset, listens, closes_at_once, refused, gives_up, waits)
_ALL_BY_UDP = (datagrams, connected_datagrams, connects, flood)
CLIENTS: dict[str, Callable[[str, int], bool | None]] = {each.__name__: each for each in (*_ALL, *_ALL_BY_UDP)}
"""If one returns False, the client was too slow, and the connection must be made again."""
