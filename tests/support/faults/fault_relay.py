# SPDX-License-Identifier: Apache-2.0
"""One client's connection through the fault proxy, and the watches that run over it.

Each connection has a thread. It reads a request, asks the proxy for its faults, and forwards it
over a new connection to the real server. Rules:

- Two threads never use one TLS object at the same time (OpenSSL forbids it). While a watch runs,
  its thread reads from the real server only, all writes to the client take the stream's lock, and
  a client's hang-up is detected by epoll on the raw socket (HangUps).
- Other threads never close a socket. They set a flag (`cut`, `abort`) and shut down the direction
  that the thread sleeps on; the thread itself closes the socket, with a reset if the flag says so.
"""

import contextlib
import http.client
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tests.support.faults import fault_wire as wire
from tests.support.faults.fault_wire import Answer, Incoming

if TYPE_CHECKING:
    from tests.support.faults.faults import FaultProxy

LineHook = Callable[[bytes], bytes]


class Cut(Enum):
    """How a running watch ends."""

    END = "the body ends regularly and the connection stays, as at a watch's time-out"
    CLOSE = "the connection is closed without the body's end"
    RESET = "the connection is reset"
    MIDLINE = "half a line is sent, then the connection is closed"


class UpstreamBroke(Exception):
    """The real server can't be reached, or closed the connection early."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The faults of a request: what happens before it is forwarded, or instead."""

    delay: float = 0.0  # seconds
    answer: Answer | None = None


@dataclass(eq=False, slots=True)
class Stream:
    """A running watch: JSON lines sent to one client."""

    client: ssl.SSLSocket
    upstream: socket.socket
    flow: threading.Event = field(default_factory=threading.Event)  # cleared: frozen
    how: Cut | None = None
    last: bytes = b'{"type":"MODIFIED","object":{"kind":"none"}}\n'
    lock: threading.Lock = field(default_factory=threading.Lock)  # for writing to the client

    def send(self, data: bytes) -> None:
        """Send bytes as one chunk; b"" ends the body. Raises OSError if the client is gone."""
        with self.lock:
            self.client.sendall(wire.chunk(data))
            self.last = data or self.last

    def cut(self, how: Cut) -> None:
        """Make the stream's thread end it; only the first call counts."""
        self.how = self.how or how
        _shut(self.upstream, socket.SHUT_RDWR)

    def finish(self) -> bool:
        """End the stream as cut() asked, in its own thread; returns whether the connection
        stays.
        """
        match self.how:
            case Cut.END:
                self.send(b"")
                return True
            case Cut.MIDLINE:
                self.send(self.last[: len(self.last) // 2])
            case Cut.RESET:
                _reset_at_close(self.client)
            case _:
                pass
        return False


class HangUps:
    """Ends the streams whose clients have closed their side."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._streams: dict[int, Stream] = {}

    def add(self, stream: Stream) -> None:
        """Monitor a stream until `remove`."""
        self._streams[stream.client.fileno()] = stream
        self._epoll.register(stream.client.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)

    def remove(self, stream: Stream) -> None:
        """Stop monitoring a stream; must be called before its socket is closed."""
        del self._streams[stream.client.fileno()]
        self._epoll.unregister(stream.client.fileno())

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set: the body of a thread."""
        while not stop.is_set():
            for fd, _ in self._epoll.poll(0.05):
                # Another client may have got the number of this one's socket by now.
                if (stream := self._streams.get(fd)) is not None and _has_hung_up(fd):
                    stream.cut(Cut.CLOSE)
        self._epoll.close()


class Connection:
    """A client's connection; run() is the body of its thread."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, owner: "FaultProxy") -> None:
        # As Go's servers do. Without it, data that wait for an ACK would be lost by a reset.
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        self._owner = owner
        self._aborted = threading.Event()
        self._stream: Stream | None = None

    def run(self) -> None:
        """Serve requests until either side closes the connection or fails."""
        try:
            self._wait(self._owner.flow)
            self._socket.do_handshake()
            with self._socket.makefile("rb") as file:
                while (incoming := wire.read_request(file)) is not None:
                    if not self._serve(incoming):
                        break
        except UpstreamBroke:
            _reset_at_close(self._socket)
        except (OSError, ValueError, http.client.HTTPException):
            pass  # the client is gone, or does not speak HTTP/1.1
        finally:
            if self._aborted.is_set():
                _reset_at_close(self._socket)
            self._socket.close()
            self._owner.ended(self)

    def abort(self) -> None:
        """Make the connection's thread reset it; callable from any thread."""
        self._aborted.set()
        if (stream := self._stream) is not None:
            stream.cut(Cut.RESET)
        _shut(self._socket, socket.SHUT_RD)

    def _serve(self, incoming: Incoming) -> bool:
        decision = self._owner.decide(incoming)
        self._wait(self._owner.flow)
        self._aborted.wait(decision.delay)
        if decision.answer is not None:
            self._socket.sendall(decision.answer.response())
            return True
        with contextlib.closing(self._owner.dial()) as upstream:
            try:
                upstream.request(incoming.method, incoming.target, incoming.body, incoming.forwarded())
                bare = upstream.sock
                answer = upstream.getresponse()
                if incoming.query.get("watch") in {"1", "true"} and answer.status == 200:
                    return self._watch(Stream(self._socket, bare), answer)
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise UpstreamBroke(str(error)) from error
        self._wait(self._owner.flow)
        self._socket.sendall(wire.response(answer.status, wire.kept_headers(answer), body))
        return True

    def _watch(self, stream: Stream, answer: http.client.HTTPResponse) -> bool:
        """Relay a watch to its end; returns whether the connection can serve another request."""
        stream.flow.set()
        headers = wire.kept_headers(answer) | {"Transfer-Encoding": "chunked"}
        self._stream = stream
        try:
            with stream.lock:  # listed before the client gets the response's head
                self._owner.opened(stream)
                self._socket.sendall(wire.head(200, headers))
            self._relay(stream, answer)
        finally:
            self._owner.closed(stream)
            self._stream = None
        return stream.finish()

    def _relay(self, stream: Stream, answer: http.client.HTTPResponse) -> None:
        try:
            for line in wire.lines(wire.chunks(answer.fp)):
                self._wait(self._owner.flow, stream.flow, until=stream)
                if stream.how is not None:
                    return
                hook = self._owner.line_hook
                stream.send(line if hook is None else hook(line))
            broken = False
        except (OSError, ValueError):
            broken = True
        self._wait(self._owner.flow, stream.flow, until=stream)
        if broken and stream.how is None:
            raise UpstreamBroke("the watch ended early")
        stream.how = stream.how or Cut.END

    def _wait(self, *events: threading.Event, until: Stream | None = None) -> None:
        """Wait until all are set or the stream ends; raise if the connection is aborted."""
        for event in events:
            while not event.wait(0.02) and not (until is not None and until.how is not None):
                if self._aborted.is_set():
                    raise ConnectionAbortedError


def _has_hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))


def _shut(sock: socket.socket, how: int) -> None:
    """Shut the raw socket down: SSLSocket.shutdown would drop TLS while another thread reads."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, how)


def _reset_at_close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
