# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for health checks and metrics: one thread with an event loop, any number of
ports, and a task for each connection.

Load balancers, kubelet and Prometheus send short requests, and so can anything else that reaches
the port. Methods and bodies are ignored: only the path matters, as in kube-proxy's handlers. No
client can harm any connection but its own:

- No task waits for its client for long. The head of a request is limited to MAX_HEAD_BYTES and
  HEAD_TIMEOUT_S, sending a response to SEND_TIMEOUT_S, and an idle connection is closed after
  KEEPALIVE_TIMEOUT_S.
- At most MAX_CONNECTIONS are open. A new one replaces the one that has been inactive for the
  longest time. An honest client is answered within a millisecond, so it is never that one.
- At most MAX_LARGE_RESPONSES different large responses are kept in memory for slow readers, and
  besides the newest one at most MAX_OLDER_RESPONSE_BYTES; beyond that, readers of the oldest are
  disconnected. The kernel buffers SOCKET_BUFFER_BYTES in each direction of a connection. asyncio
  buffers nothing, because the tasks use sockets: its transports would read 256 KiB at a time.
- An exception closes only the connection that caused it. At most one is logged per second.
- A short body is skipped, a long one closes the connection.

Ports can be opened and closed while the thread runs. The caller's thread binds, so that it gets
the error at once; everything else happens in the server's thread.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

import h11

from kbpf.kernel.system import threads
from kbpf.serve.message import HEAD_END, HttpRequest, HttpResponse, encode_head, parse_head

log = logging.getLogger("kbpf.serve")

BACKLOG: Final = 4096
"""Length of the accept queue; the kernel caps it at net.core.somaxconn."""

MAX_ACCEPTS: Final = 32
"""At most this many connections are accepted in a round of the loop, or one from each port."""

SOCKET_BUFFER_BYTES: Final = 65_536
"""The kernel's buffers of a connection, in each direction; the kernel doubles the value."""

ACCEPT_PAUSE_S: Final = 1.0
"""Nothing is accepted for this long after the process has run out of file descriptors."""

HEARTBEAT_INTERVAL_S: Final = 5.0
STUCK_TIMEOUT_S: Final = 30.0
"""Without a heartbeat for this long the thread counts as stuck."""

LISTEN_RETRY_INTERVAL_S: Final = 5.0
"""For callers of listen(): when to retry an address that could not be bound, as in kube-proxy."""

RESOURCE_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
WILDCARDS: Final = ("0.0.0.0", "::")
NOT_FOUND: Final = HttpResponse(404, b"404 page not found\n")

MAX_HEAD_BYTES: Final = 8192
HEAD_TIMEOUT_S: Final = 5.0
SEND_TIMEOUT_S: Final = 30.0
KEEPALIVE_TIMEOUT_S: Final = 75.0
MAX_CONNECTIONS: Final = 256

LARGE_RESPONSE_BYTES: Final = 65_536
"""Responses of this size or more are limited (MAX_LARGE_RESPONSES, MAX_OLDER_RESPONSE_BYTES), and
sent in pieces of this size, between which other connections get a turn."""

MAX_LARGE_RESPONSES: Final = 3
MAX_OLDER_RESPONSE_BYTES: Final = 16 << 20
"""Bytes of all large responses except the newest."""

FAULT_LOG_INTERVAL_S: Final = 1.0
"""At most one exception is logged in this time; the others are counted."""

Handler = Callable[[HttpRequest], HttpResponse]
"""Called in the server's thread."""

BAD_REQUEST: Final = HttpResponse(400, b"400 Bad Request")
HEAD_TOO_LARGE: Final = HttpResponse(431, b"431 Request Header Fields Too Large")


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


class HttpListener:
    """A listening port."""

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        self.sock = sock
        self.handler = handler
        self.closed = False


class _EventLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return self._clock()


class HttpServer:
    """An HTTP server; see the module. Call start() and stop() once each; the other methods are
    thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.faults = FaultLog(clock)
        self._listeners: set[HttpListener] = set()
        self._loop: _EventLoop  # from start() on, as the others
        self._connections: Connections
        self._thread: threads.SupervisedThread | None = None

    def start(self) -> None:
        """Starts the server's thread."""
        self._loop = _EventLoop(self._clock)
        # of callbacks that belong to no connection
        self._loop.set_exception_handler(lambda *_: self.faults.log("an HTTP server task failed"))
        self._connections = Connections(self._loop, self.faults)
        self._thread = threads.start("http", self._run, STUCK_TIMEOUT_S)

    def stop(self) -> None:
        """Closes all ports and connections. Returns when the thread has ended, or after one
        second.
        """
        if self._thread is not None:
            self.call_soon(self._loop.stop)
            self._thread.stop()

    def listen(self, host: str, port: int, handler: Handler, one_family: bool = False) -> HttpListener:
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

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Calls `callback` in the server's thread, soon. Does nothing before start() and after
        stop().
        """
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(callback)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls `callback` in the server's thread after `seconds`."""
        due = self._clock() + seconds
        self.call_soon(lambda: self._loop.call_at(due, callback))

    # ---- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        self._beat()
        self._loop.run_forever()
        for listener in list(self._listeners):
            self._close_listener(listener)
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

    def _beat(self) -> None:
        threads.heartbeat()
        self._loop.call_later(HEARTBEAT_INTERVAL_S, self._beat)

    def _open_listener(self, listener: HttpListener) -> None:
        if not listener.closed:
            self._listeners.add(listener)
            self._loop.add_reader(listener.sock, self._accept, listener)

    def _close_listener(self, listener: HttpListener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._loop.remove_reader(listener.sock)
        listener.sock.close()

    def _accept(self, listener: HttpListener) -> None:
        while not listener.closed:
            try:
                sock, _ = listener.sock.accept()
            except OSError as error:  # usually the client has already gone
                if error.errno in RESOURCE_ERRNOS:
                    # out of file descriptors
                    self._connections.close_least_active(MAX_CONNECTIONS // 4)
                    self._loop.remove_reader(listener.sock)
                    self._loop.call_later(ACCEPT_PAUSE_S, self._open_listener, listener)
                return
            self._connections.add(sock, listener.handler)
            if self._connections.waiting >= MAX_ACCEPTS:
                return


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
    """A client connection."""

    __slots__ = ("body_remaining", "handler", "received", "response", "send_start", "sock", "task")

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        self.sock, self.handler = sock, handler
        self.received = bytearray()  # and not parsed yet
        self.body_remaining = 0  # bytes of a request body still to be skipped
        self.response: HttpResponse | None = None  # the response being sent, if it is a large one
        self.send_start = 0.0  # when sending `response` began
        self.task: asyncio.Task[object] | None = None


class Connections:
    """All open connections. Used in the server's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, faults: FaultLog) -> None:
        self._loop, self._faults = loop, faults
        self._open: dict[Connection, None] = {}  # least recently active first
        self._pipelining = asyncio.Lock()
        self.waiting = 0  # connections whose task has not begun

    def add(self, sock: socket.socket, handler: Handler) -> None:
        """Takes over an accepted socket."""
        sock.setblocking(False)
        self.waiting += 1
        self._loop.create_task(self._serve(Connection(sock, handler)))

    def close_least_active(self, count: int) -> None:
        for connection in list(self._open)[:count]:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        del self._open[connection]
        assert connection.task is not None
        connection.task.cancel()

    # ---- in the task of a connection -------------------------------------------------------

    async def _serve(self, connection: Connection) -> None:
        # Only now is it one of those that newer ones may replace. Most requests have arrived, and
        # are answered before this task waits for anything.
        self.waiting -= 1
        if len(self._open) >= MAX_CONNECTIONS:
            self.close_least_active(1)
        self._open[connection], connection.task = None, asyncio.current_task()
        try:
            await self._answer_requests(connection)
        except OSError:  # including TimeoutError
            pass
        except Exception:
            self._faults.log("an HTTP connection failed and was closed")
        finally:
            self._open.pop(connection, None)
            connection.sock.close()
            # A cancelled task keeps the variables of its functions, among them large responses.
            connection.task = None

    async def _answer_requests(self, connection: Connection) -> None:
        wait, is_last = HEAD_TIMEOUT_S, False
        while not is_last:
            raw = await self._receive_head(connection, wait)
            parser = h11.Connection(h11.SERVER)
            head = parse_head(parser, raw) if raw is not None else None
            if head is None:
                response = BAD_REQUEST if raw is not None else HEAD_TOO_LARGE
            else:
                connection.body_remaining = head.body_length
                response = self._handle(connection.handler, head.request)
            first = encode_head(parser, response, close_after=head is None or head.close_after)
            # h11 closes also for the client's sake: `Connection: close`, HTTP/1.0.
            is_last = first.endswith(b"\r\nConnection: close\r\n\r\n")
            body = response.parts if head is None or head.request.method != "HEAD" else ()
            await self._send(connection, response, (first, *body))
            wait = HEAD_TIMEOUT_S if connection.received else KEEPALIVE_TIMEOUT_S
            if connection.received:
                # Of all pipelined requests only one is answered in each round of the event loop,
                # so that other connections get a turn.
                async with self._pipelining:
                    await asyncio.sleep(0)

    def _handle(self, handler: Handler, request: HttpRequest) -> HttpResponse:
        try:
            return handler(request)
        except Exception:
            self._faults.log(f"request failed path={request.path!r}")
            return HttpResponse(500, b"internal error\n")

    async def _receive_head(self, connection: Connection, wait: float) -> bytes | None:
        """Skips the body of the last request. Returns the head of the next one, without the empty
        line at its end; None if it is too long.
        """
        received = connection.received
        async with asyncio.timeout(wait) as timeout:
            while True:
                skipped = min(connection.body_remaining, len(received))
                del received[:skipped]
                connection.body_remaining -= skipped
                if end := HEAD_END.search(received):
                    head = bytes(received[: end.start()])
                    del received[: end.end()]
                    return head
                if len(received) >= MAX_HEAD_BYTES:
                    return None
                is_first = not received and not connection.body_remaining
                data = await self._loop.sock_recv(connection.sock, MAX_HEAD_BYTES)
                if not data:
                    raise ConnectionResetError
                if is_first:  # later bytes must not prolong it
                    timeout.reschedule(self._loop.time() + HEAD_TIMEOUT_S)
                self._mark_recent(connection)
                received += data

    async def _send(self, connection: Connection, response: HttpResponse, parts: Sequence[bytes]) -> None:
        if response.length < LARGE_RESPONSE_BYTES:
            parts = [b"".join(parts)]
        else:  # which is not copied: many clients may be sent the same page
            connection.response, connection.send_start = response, self._loop.time()
            self._mark_recent(connection)
            self._limit_large_responses()
        async with asyncio.timeout(SEND_TIMEOUT_S):
            for part in parts:
                for start in range(0, len(part), LARGE_RESPONSE_BYTES):
                    if start:
                        await asyncio.sleep(0)
                    piece = memoryview(part)[start : start + LARGE_RESPONSE_BYTES]
                    await self._loop.sock_sendall(connection.sock, piece)
                    self._mark_recent(connection)
        connection.response = None

    def _limit_large_responses(self) -> None:
        """Disconnects the readers of the oldest large responses until the limits hold."""
        groups: dict[int, tuple[HttpResponse, list[Connection]]] = {}
        for connection in sorted(self._open, key=lambda connection: connection.send_start):
            if (response := connection.response) is not None:
                _, readers = groups.pop(id(response), (response, []))
                groups[id(response)] = (response, [*readers, connection])
        while len(groups) > 1:  # ordered by the latest request for each response
            # The newest response is kept, however large. Parts of it that older ones share are not
            # counted.
            *older, newest = [response for response, _ in groups.values()]
            newest_parts = {id(part) for part in newest.parts}
            older_parts = {id(part): len(part) for response in older for part in response.parts}
            size = sum(length for part, length in older_parts.items() if part not in newest_parts)
            if len(groups) <= MAX_LARGE_RESPONSES and size <= MAX_OLDER_RESPONSE_BYTES:
                return
            _, readers = groups.pop(next(iter(groups)))
            for connection in readers:
                self._close(connection)

    def _mark_recent(self, connection: Connection) -> None:
        del self._open[connection]
        self._open[connection] = None
