# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for health checks and metrics: one thread, any number of ports.

Load balancers, kubelet and Prometheus send short requests, and so can anything else that reaches
the port. Therefore no client can harm any connection but its own:

- The thread never waits for a client. The head of a request is limited to MAX_HEAD_BYTES and
  HEAD_TIMEOUT_S, sending a response to SEND_TIMEOUT_S, and an idle connection is closed after
  KEEPALIVE_TIMEOUT_S.
- At most MAX_CONNECTIONS are open. A new one replaces the one that has been inactive for the
  longest time. An honest client is answered within a millisecond, so it is never that one.
- At most MAX_LARGE_RESPONSES different large responses are kept in memory for slow readers, and
  besides the newest one at most MAX_OLDER_RESPONSE_BYTES; beyond that, readers of the oldest are
  disconnected. The kernel buffers SOCKET_BUFFER_BYTES in each direction of a connection.
- An exception closes only the connection that caused it. At most one is logged per second.
- Methods and bodies are ignored; only the path matters, as in kube-proxy's handlers. A short body
  is skipped, a long one closes the connection.

Ports can be opened and closed while the thread runs. The caller's thread binds, so that it gets
the error at once; everything else happens in the server's thread.
"""

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from kbpf.kernel.system import threads
from kbpf.serve.message import HEAD_END, HttpRequest, HttpResponse, encode_head, parse_head

log = logging.getLogger("kbpf.serve")

MAX_HEAD_BYTES: Final = 8192
HEAD_TIMEOUT_S: Final = 5.0
SEND_TIMEOUT_S: Final = 30.0
KEEPALIVE_TIMEOUT_S: Final = 75.0
MAX_CONNECTIONS: Final = 256
BACKLOG: Final = 4096
"""Length of the accept queue; the kernel caps it at net.core.somaxconn."""

MAX_ACCEPTS: Final = 32
"""At most this many connections are accepted at a time from one port, so that other ports get a
turn."""

SOCKET_BUFFER_BYTES: Final = 65_536
"""The kernel's buffers of a connection, in each direction; the kernel doubles the value."""

LARGE_RESPONSE_BYTES: Final = 65_536
"""Responses of this size or more are limited (MAX_LARGE_RESPONSES, MAX_OLDER_RESPONSE_BYTES)."""

MAX_LARGE_RESPONSES: Final = 3
MAX_OLDER_RESPONSE_BYTES: Final = 16 << 20
"""Bytes of all large responses except the newest."""

ACCEPT_PAUSE_S: Final = 1.0
"""Nothing is accepted for this long after the process has run out of file descriptors."""

ACCEPT_INTERVAL_S: Final = 0.002
"""While the thread is busy it still accepts new connections at this interval."""

FAULT_LOG_INTERVAL_S: Final = 1.0
"""At most one exception is logged in this time; the others are counted."""

MAX_SELECT_S: Final = 5.0
"""With nothing to do the thread still sends its heartbeat at this interval."""

STUCK_TIMEOUT_S: Final = 30.0
"""Without a heartbeat for this long the thread counts as stuck."""

LISTEN_RETRY_INTERVAL_S: Final = 5.0
"""For callers of listen(): when to retry an address that could not be bound, as in kube-proxy."""

RESOURCE_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
WILDCARDS: Final = ("0.0.0.0", "::")
Handler = Callable[[HttpRequest], HttpResponse]
"""Called in the server's thread."""

NOT_FOUND: Final = HttpResponse(404, b"404 page not found\n")
ERROR_RESPONSES: Final = {
    400: HttpResponse(400, b"400 Bad Request"),
    431: HttpResponse(431, b"431 Request Header Fields Too Large"),
}


class HttpListener:
    """A listening port."""

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        self.sock = sock
        self.handler = handler
        self.closed = False


class _Connection:
    """A client connection: received bytes not parsed yet, and response bytes not sent yet."""

    __slots__ = (
        "body_remaining",
        "buffer",
        "close_after",
        "deadline",
        "listener",
        "pending",
        "response",
        "send_start",
        "sock",
    )

    def __init__(self, sock: socket.socket, listener: HttpListener, now: float) -> None:
        self.sock = sock
        self.listener = listener
        self.buffer = bytearray()
        self.pending: list[memoryview] = []
        self.response: HttpResponse | None = None  # the response being sent, if it is a large one
        self.send_start = now  # when sending `response` began
        self.body_remaining = 0  # bytes of a request body still to be skipped
        self.close_after = False  # close after the current response
        self.deadline = now + HEAD_TIMEOUT_S


class HttpServer:
    """An HTTP server; see the module. Call start() and stop() once each; the other methods are
    thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._accept_selector = (
            selectors.EpollSelector()
        )  # listening sockets, which take precedence over connections
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._callbacks: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._listeners: dict[HttpListener, bool] = {}  # value: whether it is being polled
        self._connections: dict[_Connection, None] = {}  # least recently active first
        self._stopping = False
        self._thread: threads.SupervisedThread | None = None
        self._fault_log_due = self._accept_due = float("-inf")
        self._unlogged_faults = 0
        self.faults = 0

    def start(self) -> None:
        """Starts the server's thread."""
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._selector.register(self._accept_selector, selectors.EVENT_READ, self._accept_selector)
        self._thread = threads.start("http", self._run, STUCK_TIMEOUT_S)

    def stop(self) -> None:
        """Closes all ports and connections. Returns when the thread has ended, or after one
        second.
        """
        self._stopping = True
        self._wake_up()
        if self._thread is None:
            self._accept_selector.close()
            self._selector.close()
        else:
            self._thread.stop()

    def listen(
        self, host: str, port: int, handler: Handler, one_family: bool = False
    ) -> HttpListener:
        """Opens a port on this address (see bind()). Raises OSError."""
        listener = HttpListener(bind(host, port, one_family), handler)
        self.call_soon(lambda: self._open_listener(listener))
        return listener

    def close(self, listener: HttpListener) -> None:
        """Closes a port. It accepts no new connections, and others can bind it at once."""
        listener.closed = True
        # connections already accepted are still answered; the backlog is refused
        with contextlib.suppress(OSError):
            listener.sock.shutdown(socket.SHUT_RDWR)
        self.call_soon(lambda: self._close_listener(listener))

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Calls `callback` in the server's thread, soon."""
        self._callbacks.append(callback)
        self._wake_up()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls `callback` in the server's thread after `seconds`."""
        due = self._clock() + seconds
        self.call_soon(lambda: self._timers.append((due, callback)))

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # ---- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            threads.heartbeat()
            self._run_once()
        for connection in list(self._connections):
            self._disconnect(connection)
        for listener in list(self._listeners):
            self._close_listener(listener)
        self._accept_selector.close()
        self._selector.close()

    def _run_once(self) -> None:
        for key, _ in self._selector.select(self._next_timeout()):
            match key.data:
                # An earlier event of this round may have closed it.
                case _Connection() as connection if connection in self._connections:
                    self._run_step(connection, self._advance)
                # Readable while one of its listening sockets is: accept without waiting.
                case selectors.EpollSelector():
                    self._accept_due = float("-inf")
                case None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
            self._accept_waiting()
        for _ in range(len(self._callbacks)):  # callbacks added by these run in the next round
            self._run_callback(self._callbacks.popleft())
            self._accept_waiting()
        now = self._clock()
        for timer in [timer for timer in self._timers if timer[0] <= now]:
            self._timers.remove(timer)
            self._run_callback(timer[1])
        for connection in [
            connection for connection in self._connections if connection.deadline <= now
        ]:
            self._disconnect(connection)

    def _accept_waiting(self) -> None:
        """Accepts new connections even if there is much to do for existing ones: a new one may be
        a probe, which has to be answered at once.
        """
        now = self._clock()
        if now < self._accept_due:
            return
        for key, _ in self._accept_selector.select(0):
            self._run_callback(partial(self._accept, key.data))
        self._accept_due = self._clock() + ACCEPT_INTERVAL_S

    def _next_timeout(self) -> float:
        """Returns the seconds until the next timer or deadline."""
        due_times = [timer[0] for timer in self._timers]
        due_times += [connection.deadline for connection in self._connections]
        now = self._clock()
        return max(0.0, min([MAX_SELECT_S, *(due_time - now for due_time in due_times)]))

    def _run_callback(self, callback: Callable[[], None]) -> None:
        """Runs a callback that belongs to no connection. An exception ends only this callback."""
        try:
            callback()
        except Exception:
            self._log_fault("an HTTP server task failed")

    def _run_step(self, connection: _Connection, step: Callable[[_Connection], None]) -> None:
        """Runs a step for a connection. An exception closes that connection."""
        try:
            step(connection)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._disconnect(connection)
        except Exception:
            self._log_fault("an HTTP connection failed and was closed")
            self._disconnect(connection)

    def _log_fault(self, message: str) -> None:
        """Logs the current exception, unless one was logged within FAULT_LOG_INTERVAL_S."""
        self.faults += 1
        now = self._clock()
        if now < self._fault_log_due:
            self._unlogged_faults += 1
            return
        log.exception(
            "%s; failures not logged since the last one: %d", message, self._unlogged_faults
        )
        self._fault_log_due, self._unlogged_faults = now + FAULT_LOG_INTERVAL_S, 0

    def _open_listener(self, listener: HttpListener) -> None:
        if not listener.closed:
            self._listeners[listener] = True
            self._accept_selector.register(listener.sock, selectors.EVENT_READ, listener)

    def _close_listener(self, listener: HttpListener) -> None:
        if self._listeners.pop(listener, False):
            self._accept_selector.unregister(listener.sock)
        listener.sock.close()

    def _accept(self, listener: HttpListener) -> None:
        """Accepts waiting connections, but only MAX_ACCEPTS at a time: other ports may have some,
        too.
        """
        for _ in range(MAX_ACCEPTS):
            if listener.closed:
                return
            try:
                sock, _ = listener.sock.accept()
            except OSError as error:  # usually the client has already gone
                if error.errno in RESOURCE_ERRNOS:
                    self._free_descriptors(listener)
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                self._disconnect(next(iter(self._connections)))
            sock.setblocking(False)
            connection = _Connection(sock, listener, self._clock())
            self._connections[connection] = None
            self._selector.register(sock, selectors.EVENT_READ, connection)
            # Most requests have arrived by now. Answered at once, a client cannot lose its
            # connection to a newer one while it waits.
            self._run_step(connection, self._receive)

    def _free_descriptors(self, listener: HttpListener) -> None:
        """Out of file descriptors: closes the least active connections and pauses this port for a
        while.
        """
        for connection in list(self._connections)[: MAX_CONNECTIONS // 4]:
            self._disconnect(connection)
        self._accept_selector.unregister(listener.sock)
        self._listeners[listener] = False
        self._timers.append(
            (self._clock() + ACCEPT_PAUSE_S, lambda: self._resume_listening(listener))
        )

    def _resume_listening(self, listener: HttpListener) -> None:
        if self._listeners.get(listener) is False:
            self._open_listener(listener)

    def _advance(self, connection: _Connection) -> None:
        if connection.pending:
            self._send(connection)
        else:
            self._receive(connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.sock.recv(MAX_HEAD_BYTES)
        if not data:
            self._disconnect(connection)
            return
        if not connection.buffer and not connection.body_remaining:
            # Set by the first byte of a request only: later bytes must not prolong it.
            connection.deadline = self._clock() + HEAD_TIMEOUT_S
        self._mark_recent(connection)
        connection.buffer += data
        self._process_buffer(connection)

    def _process_buffer(self, connection: _Connection) -> None:
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
            response = connection.listener.handler(head.request)
        except Exception:
            self._log_fault(f"request failed path={head.request.path!r}")
            response = HttpResponse(500, b"internal error\n")
        self._respond(connection, response, head.request.method)

    def _respond_error(self, connection: _Connection, status: int) -> None:
        connection.close_after = True
        self._respond(connection, ERROR_RESPONSES[status])

    def _respond(
        self, connection: _Connection, response: HttpResponse, method: str = "GET"
    ) -> None:
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
        readers = [
            connection for connection in self._connections if connection.response is not None
        ]
        readers_by_response: dict[int, list[_Connection]] = {}
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
                self._disconnect(connection)

    def _send(self, connection: _Connection) -> None:
        sent = connection.sock.sendmsg(connection.pending)
        while connection.pending and sent >= len(connection.pending[0]):
            sent -= len(connection.pending.pop(0))
        self._mark_recent(connection)
        if connection.pending:
            connection.pending[0] = connection.pending[0][sent:]
            return
        connection.response = None
        if connection.close_after:
            self._disconnect(connection)
            return
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
        connection.deadline = self._clock() + (
            HEAD_TIMEOUT_S if connection.buffer else KEEPALIVE_TIMEOUT_S
        )
        if connection.buffer:
            # A pipelined request waits for the next round, so that other connections get a turn.
            self.call_soon(lambda: self._process_pipelined(connection))

    def _process_pipelined(self, connection: _Connection) -> None:
        if connection in self._connections and not connection.pending:
            self._run_step(connection, self._process_buffer)

    def _mark_recent(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._connections[connection] = None

    def _disconnect(self, connection: _Connection) -> None:
        if self._connections.pop(connection, 0) is None:  # the values are None; 0: already closed
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.sock)
            connection.sock.close()


def _parts(response: HttpResponse | None) -> tuple[bytes, ...]:
    return () if response is None else (response.body, response.body_tail)


def bind(host: str, port: int, one_family: bool = False) -> socket.socket:
    """Returns a listening socket. A wildcard address listens on both families unless `one_family`.
    Raises OSError if the address cannot be bound.
    """
    dual_stack = not one_family and host in ("", *WILDCARDS) and socket.has_dualstack_ipv6()
    v6 = dual_stack or ":" in host
    sock = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A new agent can bind while connections of the previous one are in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # accepted sockets inherit them
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        if v6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual_stack)
        sock.setblocking(False)
        sock.bind(("::" if dual_stack else host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
