"""One client's connection through the fault proxy, and the watches that run over it.

A thread per connection: it reads a request, asks the owner what is to happen to it, and forwards it
over a new connection to the real server. Rules:

- Two threads never use one TLS object at the same time (OpenSSL forbids it): while a watch runs,
  its thread reads from the real server only, all writes to the client take the stream's lock, and
  that the client has gone is seen by epoll on the bare socket (HangUps).
- Other threads never close a socket. They leave a note (`cut`, `abort`) and shut down the direction
  that the thread sleeps on; the thread itself closes, with a reset if the note says so.
"""

import contextlib
import http.client
import json
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tests.support.faults import fault_wire as wire
from tests.support.faults.fault_wire import Answer, Incoming, Object, Request

ObjectHook = Callable[[Request, Object], Object | None]
LineHook = Callable[[Request, bytes], bytes | None]

_TYPES = {"ADDED", "MODIFIED", "DELETED"}


class Cut(Enum):
    """How a running watch ends."""

    END = "the body ends in good order and the connection stays, as at a watch's time-out"
    CLOSE = "the connection is closed without the body's end"
    RESET = "the connection is reset"
    MIDLINE = "half a line is sent, then the connection is closed"


class UpstreamBroke(Exception):
    """The real server can't be reached, or broke off."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to happen to a request before, or instead of, forwarding it."""

    delay: float = 0.0  # seconds
    hold: tuple[threading.Event, ...] = ()  # wait for all of them
    answer: Answer | None = None


class Owner(Protocol):
    """What a connection needs of the proxy; called from the connections' threads."""

    flow: threading.Event  # cleared: nothing moves
    object_hook: ObjectHook | None
    line_hook: LineHook | None

    def decide(self, request: Request) -> Decision: ...
    def dial(self) -> http.client.HTTPSConnection: ...
    def opened(self, stream: "Stream") -> None: ...
    def closed(self, stream: "Stream") -> None: ...
    def ended(self, connection: "Connection") -> None: ...


@dataclass(eq=False, slots=True)
class Stream:
    """A watch that runs: JSON lines on their way to one client."""

    request: Request
    client: ssl.SSLSocket
    upstream: socket.socket
    flow: threading.Event = field(default_factory=threading.Event)  # cleared: frozen
    how: Cut | None = None
    last: bytes = b'{"type":"MODIFIED","object":{"kind":"none"}}\n'
    lock: threading.Lock = field(default_factory=threading.Lock)  # for writing to the client

    def send(self, data: bytes) -> None:
        """Send bytes as one chunk; b"" ends the body. OSError: the client has gone."""
        with self.lock:
            self.client.sendall(wire.chunk(data))
            self.last = data or self.last

    def cut(self, how: Cut) -> None:
        """Have the stream's thread end it; the first note counts."""
        self.how = self.how or how
        _shut(self.upstream, socket.SHUT_RDWR)

    def finish(self) -> bool:
        """Do what the note says, from the stream's own thread; True: the connection goes on."""
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
        """Watch over it until `remove`."""
        self._streams[stream.client.fileno()] = stream
        self._epoll.register(stream.client.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)

    def remove(self, stream: Stream) -> None:
        """Forget it; to be called before its socket is closed."""
        del self._streams[stream.client.fileno()]
        self._epoll.unregister(stream.client.fileno())

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set: the body of a thread."""
        while not stop.is_set():
            for fd, _ in self._epoll.poll(0.05):
                if (stream := self._streams.get(fd)) is not None:
                    stream.cut(Cut.CLOSE)
        self._epoll.close()


class Connection:
    """A client's connection: the body of a thread is run()."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, owner: Owner) -> None:
        # As Go's servers do; and what waits for an acknowledgement would be lost by a reset.
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        self._owner = owner
        self._aborted = threading.Event()
        self._stream: Stream | None = None

    def run(self) -> None:
        """Serve requests until one side ends it; errors of either side end it too."""
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
            pass  # the client has gone, or speaks what we don't
        finally:
            if self._aborted.is_set():
                _reset_at_close(self._socket)
            self._socket.close()
            self._owner.ended(self)

    def abort(self) -> None:
        """Have the connection reset, from any thread."""
        self._aborted.set()
        if (stream := self._stream) is not None:
            stream.cut(Cut.RESET)
        _shut(self._socket, socket.SHUT_RD)

    def _serve(self, incoming: Incoming) -> bool:
        request = wire.named(incoming)
        decision = self._owner.decide(request)
        self._wait(self._owner.flow, *decision.hold)
        self._aborted.wait(decision.delay)
        if decision.answer is not None:
            self._socket.sendall(decision.answer.response())
            return True
        with contextlib.closing(self._owner.dial()) as upstream:
            try:
                upstream.request(
                    incoming.method, incoming.target, incoming.body, incoming.forwarded()
                )
                bare = upstream.sock
                answer = upstream.getresponse()
                if request.verb == "watch" and answer.status == 200:
                    return self._watch(Stream(request, self._socket, bare), answer)
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise UpstreamBroke(str(error)) from error
        self._wait(self._owner.flow)
        self._socket.sendall(
            wire.response(answer.status, wire.kept_headers(answer), self._body(request, body))
        )
        return True

    def _body(self, request: Request, body: bytes) -> bytes:
        """Return the body of a list with its objects rewritten, any other as it is."""
        hook = self._owner.object_hook
        if hook is None or request.verb != "list" or not body.startswith(b"{"):
            return body
        whole = json.loads(body)
        rows = [hook(request, obj) for obj in whole.get("items", ())]
        return json.dumps(whole | {"items": [row for row in rows if row is not None]}).encode()

    def _watch(self, stream: Stream, answer: http.client.HTTPResponse) -> bool:
        """Relay a watch to its end; True: the connection can serve another request."""
        stream.flow.set()
        headers = wire.kept_headers(answer) | {"Transfer-Encoding": "chunked"}
        self._stream = stream
        try:
            with stream.lock:  # a client that has the head finds its watch in the owner's list
                self._owner.opened(stream)
                self._socket.sendall(wire.head(200, headers))
            self._relay(stream, answer)
        finally:
            self._owner.closed(stream)
            self._stream = None
        return stream.finish()

    def _relay(self, stream: Stream, answer: http.client.HTTPResponse) -> None:
        is_json = answer.getheader("Content-Type", "").startswith("application/json")
        parts = wire.chunks(answer.fp)
        rows: Iterator[bytes | None] = parts
        if is_json:
            rows = (self._line(stream.request, line) for line in wire.lines(parts))
        try:
            for row in rows:
                self._wait(self._owner.flow, stream.flow, until=stream)
                if stream.how is not None:
                    return
                if row is not None:
                    stream.send(row)
            broken = False
        except (OSError, ValueError):
            broken = True
        self._wait(self._owner.flow, stream.flow, until=stream)
        if broken and stream.how is None:
            raise UpstreamBroke("the watch broke off")
        stream.how = stream.how or Cut.END

    def _line(self, request: Request, line: bytes) -> bytes | None:
        """Return a line as the test's hooks want it, None for nothing."""
        object_hook, line_hook = self._owner.object_hook, self._owner.line_hook
        if object_hook is not None and (event := json.loads(line))["type"] in _TYPES:
            if (obj := object_hook(request, event["object"])) is None:
                return None
            line = json.dumps(event | {"object": obj}).encode() + b"\n"
        return line if line_hook is None else line_hook(request, line)

    def _wait(self, *events: threading.Event, until: Stream | None = None) -> None:
        """Return when all are set or the stream is to end; raise when we are to end."""
        for event in events:
            while not event.wait(0.02) and not (until is not None and until.how is not None):
                if self._aborted.is_set():
                    raise ConnectionAbortedError


def _shut(sock: socket.socket, how: int) -> None:
    """Shut the bare socket down: SSLSocket.shutdown would take TLS away under a reader's feet."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, how)


def _reset_at_close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
