# SPDX-License-Identifier: Apache-2.0
"""The open connections of the HTTP server. All of it runs in the server's thread.

- The thread never waits for a client. The head of a request is limited to MAX_HEAD_BYTES and
  HEAD_TIMEOUT_S, sending a response to SEND_TIMEOUT_S, and an idle connection is closed after
  KEEPALIVE_TIMEOUT_S.
- At most MAX_CONNECTIONS are open. A new one replaces the one that has been inactive for the
  longest time. An honest client is answered within a millisecond, so it is never that one.
- At most MAX_LARGE_RESPONSES different large responses are kept in memory for slow readers, and
  besides the newest one at most MAX_OLDER_RESPONSE_BYTES; beyond that, readers of the oldest are
  disconnected. The kernel buffers SOCKET_BUFFER_BYTES in each direction of a connection.
- An exception closes only the connection that caused it. At most one is logged per second.
- A short body is skipped, a long one closes the connection.
"""

import contextlib
import logging
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Final

from kbpf.serve.message import HEAD_END, HttpRequest, HttpResponse, encode_head, parse_head

log = logging.getLogger("kbpf.serve")

MAX_HEAD_BYTES: Final = 8192
HEAD_TIMEOUT_S: Final = 5.0
SEND_TIMEOUT_S: Final = 30.0
KEEPALIVE_TIMEOUT_S: Final = 75.0
MAX_CONNECTIONS: Final = 256

LARGE_RESPONSE_BYTES: Final = 65_536
"""Responses of this size or more are limited (MAX_LARGE_RESPONSES, MAX_OLDER_RESPONSE_BYTES)."""

MAX_LARGE_RESPONSES: Final = 3
MAX_OLDER_RESPONSE_BYTES: Final = 16 << 20
"""Bytes of all large responses except the newest."""

FAULT_LOG_INTERVAL_S: Final = 1.0
"""At most one exception is logged in this time; the others are counted."""

Handler = Callable[[HttpRequest], HttpResponse]
"""Called in the server's thread."""

ERROR_RESPONSES: Final = {
    400: HttpResponse(400, b"400 Bad Request"),
    431: HttpResponse(431, b"431 Request Header Fields Too Large"),
}


class FaultLog:
    """Logs exceptions that only a defect can cause. `count`: all of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due = float("-inf")
        self._unlogged = 0
        self.count = 0

    def log(self, message: str) -> None:
        """Logs the current exception, unless one was logged within FAULT_LOG_INTERVAL_S."""
        self.count += 1
        now = self._clock()
        if now < self._due:
            self._unlogged += 1
            return
        log.exception("%s; failures not logged since the last one: %d", message, self._unlogged)
        self._due, self._unlogged = now + FAULT_LOG_INTERVAL_S, 0


class Connection:
    """A client connection: received bytes not parsed yet, and response bytes not sent yet."""

    __slots__ = (
        "body_remaining",
        "buffer",
        "close_after",
        "deadline",
        "handler",
        "pending",
        "response",
        "send_start",
        "sock",
    )

    def __init__(self, sock: socket.socket, handler: Handler, now: float) -> None:
        self.sock = sock
        self.handler = handler
        self.buffer = bytearray()
        self.pending: list[memoryview] = []
        self.response: HttpResponse | None = None  # the response being sent, if it is a large one
        self.send_start = now  # when sending `response` began
        self.body_remaining = 0  # bytes of a request body still to be skipped
        self.close_after = False  # close after the current response
        self.deadline = now + HEAD_TIMEOUT_S


class Connections:
    """All open connections, which `selector` watches."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
        call_soon: Callable[[Callable[[], None]], None],
        faults: FaultLog,
    ) -> None:
        self._selector, self._clock, self._faults = selector, clock, faults
        self._call_soon = call_soon
        self._open: dict[Connection, None] = {}  # least recently active first

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._open

    def deadlines(self) -> Iterator[float]:
        return (connection.deadline for connection in self._open)

    def add(self, sock: socket.socket, handler: Handler) -> None:
        """Takes over an accepted socket."""
        if len(self._open) >= MAX_CONNECTIONS:
            self._close(next(iter(self._open)))
        sock.setblocking(False)
        connection = Connection(sock, handler, self._clock())
        self._open[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        # Most requests have arrived by now. Answered at once, a client cannot lose its
        # connection to a newer one while it waits.
        self._run_step(connection, self._receive)

    def advance(self, connection: Connection) -> None:
        """Its socket is ready."""
        self._run_step(connection, self._send if connection.pending else self._receive)

    def close_expired(self, now: float) -> None:
        for connection in [each for each in self._open if each.deadline <= now]:
            self._close(connection)

    def close_least_active(self, count: int) -> None:
        for connection in list(self._open)[:count]:
            self._close(connection)

    def close_all(self) -> None:
        self.close_least_active(len(self._open))

    def _run_step(self, connection: Connection, step: Callable[[Connection], None]) -> None:
        """Runs a step for a connection. An exception closes that connection."""
        try:
            step(connection)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._close(connection)
        except Exception:
            self._faults.log("an HTTP connection failed and was closed")
            self._close(connection)

    def _receive(self, connection: Connection) -> None:
        data = connection.sock.recv(MAX_HEAD_BYTES)
        if not data:
            self._close(connection)
            return
        if not connection.buffer and not connection.body_remaining:
            # Set by the first byte of a request only: later bytes must not prolong it.
            connection.deadline = self._clock() + HEAD_TIMEOUT_S
        self._mark_recent(connection)
        connection.buffer += data
        self._process_buffer(connection)

    def _process_buffer(self, connection: Connection) -> None:
        """Answers the next request if its head is complete."""
        skipped = min(connection.body_remaining, len(connection.buffer))
        del connection.buffer[:skipped]
        connection.body_remaining -= skipped
        if connection.body_remaining or not connection.buffer:
            return
        end = HEAD_END.search(connection.buffer)
        if end is None:
            if len(connection.buffer) >= MAX_HEAD_BYTES:
                self._respond_error(connection, 431)
            return
        head = parse_head(bytes(connection.buffer[: end.start()]))
        del connection.buffer[: end.end()]
        if head is None:
            self._respond_error(connection, 400)
            return
        connection.body_remaining, connection.close_after = head.body_length, head.close_after
        try:
            response = connection.handler(head.request)
        except Exception:
            self._faults.log(f"request failed path={head.request.path!r}")
            response = HttpResponse(500, b"internal error\n")
        self._respond(connection, response, head.request.method)

    def _respond_error(self, connection: Connection, status: int) -> None:
        connection.close_after = True
        self._respond(connection, ERROR_RESPONSES[status])

    def _respond(self, connection: Connection, response: HttpResponse, method: str = "GET") -> None:
        # The body is not copied: many clients may be sent the same page.
        connection.pending = [memoryview(encode_head(response, connection.close_after))]
        if method != "HEAD":
            connection.pending += [
                memoryview(part) for part in (response.body, response.body_tail) if part
            ]
        connection.send_start = self._clock()
        connection.deadline = connection.send_start + SEND_TIMEOUT_S
        # Most responses fit into the socket's buffer. What does not is sent when it is writable.
        self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
        if response.length >= LARGE_RESPONSE_BYTES:
            connection.response = response
            self._limit_large_responses()
        self._send(connection)

    def _limit_large_responses(self) -> None:
        """Disconnects the readers of the oldest large responses until the limits hold."""
        readers = [connection for connection in self._open if connection.response is not None]
        readers_by_response: dict[int, list[Connection]] = {}
        for connection in sorted(readers, key=lambda connection: connection.send_start):
            response_id = id(connection.response)
            readers_by_response[response_id] = [
                *readers_by_response.pop(response_id, ()),
                connection,
            ]  # ordered by the latest request for each response
        while len(readers_by_response) > 1:
            # The newest response is kept, however large. Parts of it that older ones share are not
            # counted.
            *older, newest = [
                connections[0].response for connections in readers_by_response.values()
            ]
            newest_parts = {id(part) for part in _parts(newest)}
            older_parts = {id(part): len(part) for response in older for part in _parts(response)}
            size = sum(length for part, length in older_parts.items() if part not in newest_parts)
            if len(readers_by_response) <= MAX_LARGE_RESPONSES and size <= MAX_OLDER_RESPONSE_BYTES:
                return
            for connection in readers_by_response.pop(next(iter(readers_by_response))):
                self._close(connection)

    def _send(self, connection: Connection) -> None:
        sent = connection.sock.sendmsg(connection.pending)
        while connection.pending and sent >= len(connection.pending[0]):
            sent -= len(connection.pending.pop(0))
        self._mark_recent(connection)
        if connection.pending:
            connection.pending[0] = connection.pending[0][sent:]
            return
        connection.response = None
        if connection.close_after:
            self._close(connection)
            return
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
        connection.deadline = self._clock() + (
            HEAD_TIMEOUT_S if connection.buffer else KEEPALIVE_TIMEOUT_S
        )
        if connection.buffer:
            # A pipelined request waits for the next round, so that other connections get a turn.
            self._call_soon(lambda: self._process_pipelined(connection))

    def _process_pipelined(self, connection: Connection) -> None:
        if connection in self._open and not connection.pending:
            self._run_step(connection, self._process_buffer)

    def _mark_recent(self, connection: Connection) -> None:
        del self._open[connection]
        self._open[connection] = None

    def _close(self, connection: Connection) -> None:
        if self._open.pop(connection, 0) is None:  # the values are None; 0: already closed
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.sock)
            connection.sock.close()


def _parts(response: HttpResponse | None) -> tuple[bytes, ...]:
    return () if response is None else (response.body, response.body_tail)
