"""A small HTTP server for questions about health: one thread, any number of ports.

LoadBalancers, kubelet and Prometheus ask short questions, and whoever reaches the port may ask
too. So nothing that a client does or leaves undone costs more than its own connection:

- The thread never waits for a client. A request's head has HEAD_BYTES and HEAD_SECONDS; an answer
  has to be through within ANSWER_SECONDS; a connection without a request goes after IDLE_SECONDS.
- There are MOST_CONNECTIONS at most; the next one takes the place of who has done nothing for the
  longest. An honest client is answered within a millisecond, so it is never that one.
- At most MOST_PAGES different large answers are kept for who reads slowly, and HELD_BYTES of them:
  who holds the oldest is put out. The kernel buffers SOCKET_BYTES each way of a connection.
- A fault of ours ends the connection that met it, and no other; it is logged once a second at most.
- Methods and bodies mean nothing: what is asked for is the path, as in kube-proxy's handlers. A
  body is skipped, or ends the connection where it is long.

Ports come and go while the thread runs. Binding is done by who asks for it, so that it hears at
once what is wrong; everything else is the thread's.
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
"""Connections that the kernel keeps for us; it takes no more than net.core.somaxconn."""

MAX_ACCEPTS: Final = 32
"""Connections that are let in at a time by one port: others wait, too."""

SOCKET_BUFFER_BYTES: Final = 65_536
"""The kernel's buffers of a connection, each way; it doubles that."""

LARGE_RESPONSE_BYTES: Final = 65_536
"""An answer of this size and more may be held by slow readers (MOST_PAGES, HELD_BYTES)."""

MAX_LARGE_RESPONSES: Final = 3
MAX_OLDER_RESPONSE_BYTES: Final = 16 << 20
"""Bytes of large answers that are not the newest one."""

ACCEPT_PAUSE_S: Final = 1.0
"""So long nobody is let in when the process has no descriptors left."""

ACCEPT_INTERVAL_S: Final = 0.002
"""So often new connections are accepted while there is work for others."""

FAULT_LOG_INTERVAL_S: Final = 1.0
"""At most one fault is logged in this time; the others are counted."""

MAX_SELECT_S: Final = 5.0
"""So often the thread says that it makes progress, when there is nothing to do."""

STUCK_TIMEOUT_S: Final = 30.0
"""Without progress for this long the thread counts as stuck."""

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
    """A port that is listened on."""

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        self.sock = sock
        self.handler = handler
        self.closed = False


class _Connection:
    """A connection: what came and is not read yet, and what is still to be sent."""

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
        self.response: HttpResponse | None = None  # that is being sent, if it is a large one
        self.send_start = now  # it is
        self.body_remaining = 0  # bytes of a body that are still to be skipped
        self.close_after = False  # no request after this one
        self.deadline = now + HEAD_TIMEOUT_S


class HttpServer:
    """See the module. start() and stop() once each; the rest from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._accept_selector = (
            selectors.EpollSelector()
        )  # listening sockets, which go before all others
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._callbacks: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._listeners: dict[HttpListener, bool] = {}  # whether it is watched
        self._connections: dict[_Connection, None] = {}  # who did something last stands last
        self._stopping = False
        self._thread: threads.SupervisedThread | None = None
        self._fault_log_due = self._accept_due = float("-inf")
        self._unlogged_faults = 0
        self.faults = 0

    def start(self) -> None:
        """Begins to answer."""
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._selector.register(self._accept_selector, selectors.EVENT_READ, self._accept_selector)
        self._thread = threads.start("http", self._run, STUCK_TIMEOUT_S)

    def stop(self) -> None:
        """Closes everything; back when the thread has ended, or after a second."""
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
        """A port on this address (see bind()), which answers from now on."""
        listener = HttpListener(bind(host, port, one_family), handler)
        self.call_soon(lambda: self._open_listener(listener))
        return listener

    def close(self, listener: HttpListener) -> None:
        """Ends a port: nobody new is let in, and it is free for others at once."""
        listener.closed = True
        # What was accepted is still answered; what waits in the backlog is refused.
        with contextlib.suppress(OSError):
            listener.sock.shutdown(socket.SHUT_RDWR)
        self.call_soon(lambda: self._close_listener(listener))

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Calls `work` in the server's thread, soon."""
        self._callbacks.append(callback)
        self._wake_up()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls `work` in the server's thread, after so many seconds."""
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
                case _Connection() as connection if connection in self._connections:
                    self._run_step(connection, self._advance)
                case selectors.EpollSelector():
                    self._accept_due = float("-inf")
                case None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
            self._accept_waiting()
        for _ in range(len(self._callbacks)):  # what these leave to be done is for the next round
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
        """Accepts, however much there is to do for those who are here: the next one may be a probe,
        which is answered at once.
        """
        now = self._clock()
        if now < self._accept_due:
            return
        for key, _ in self._accept_selector.select(0):
            self._run_callback(partial(self._accept, key.data))
        self._accept_due = self._clock() + ACCEPT_INTERVAL_S

    def _next_timeout(self) -> float:
        """Seconds until something is due."""
        due_times = [timer[0] for timer in self._timers]
        due_times += [connection.deadline for connection in self._connections]
        now = self._clock()
        return max(0.0, min([MAX_SELECT_S, *(due_time - now for due_time in due_times)]))

    def _run_callback(self, callback: Callable[[], None]) -> None:
        """Work for no client. A fault ends this piece of it."""
        try:
            callback()
        except Exception:
            self._log_fault("a part of the HTTP server failed")

    def _run_step(self, connection: _Connection, step: Callable[[_Connection], None]) -> None:
        """A step for this client. A fault ends its connection."""
        try:
            step(connection)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._disconnect(connection)
        except Exception:
            self._log_fault("a connection met a fault and is ended")
            self._disconnect(connection)

    def _log_fault(self, message: str) -> None:
        """Logs the exception in hand, unless one was logged just now."""
        self.faults += 1
        now = self._clock()
        if now < self._fault_log_due:
            self._unlogged_faults += 1
            return
        log.exception(
            "%s; faults not logged since the last one: %d", message, self._unlogged_faults
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
        """Lets in who waits, not too many at a time: other ports may have somebody, too."""
        for _ in range(MAX_ACCEPTS):
            if listener.closed:
                return
            try:
                sock, _ = listener.sock.accept()
            except OSError as error:  # gone again, mostly
                if error.errno in RESOURCE_ERRNOS:
                    self._free_descriptors(listener)
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                self._disconnect(next(iter(self._connections)))
            sock.setblocking(False)
            connection = _Connection(sock, listener, self._clock())
            self._connections[connection] = None
            self._selector.register(sock, selectors.EVENT_READ, connection)
            # Most requests are here already; who is answered now cannot be crowded out.
            self._run_step(connection, self._receive)

    def _free_descriptors(self, listener: HttpListener) -> None:
        """No descriptors: some are given back, and the port is not looked at for a while."""
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
            connection.deadline = self._clock() + HEAD_TIMEOUT_S  # of the first byte, not of each
        self._mark_recent(connection)
        connection.buffer += data
        self._process_buffer(connection)

    def _process_buffer(self, connection: _Connection) -> None:
        """Answers the next request, if all of its head is there."""
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
            self._log_fault(f"no answer to {head.request.path!r}")
            response = HttpResponse(500, b"internal error\n")
        self._respond(connection, response, head.request.method)

    def _respond_error(self, connection: _Connection, status: int) -> None:
        connection.close_after = True
        self._respond(connection, ERROR_RESPONSES[status])

    def _respond(
        self, connection: _Connection, response: HttpResponse, method: str = "GET"
    ) -> None:
        # Many may be sent the same page: it is not copied for each.
        connection.pending = [memoryview(encode_head(response, connection.close_after))]
        if method != "HEAD":
            connection.pending += [
                memoryview(part) for part in (response.body, response.body_tail) if part
            ]
        connection.send_start = self._clock()
        connection.deadline = connection.send_start + SEND_TIMEOUT_S
        self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
        if response.length >= LARGE_RESPONSE_BYTES:
            connection.response = response
            self._limit_large_responses()
        self._send(connection)

    def _limit_large_responses(self) -> None:
        """Puts out who reads the oldest large answers, until there are few enough of them."""
        readers = [
            connection for connection in self._connections if connection.response is not None
        ]
        readers_by_response: dict[int, list[_Connection]] = {}
        for connection in sorted(readers, key=lambda connection: connection.send_start):
            response_id = id(connection.response)
            readers_by_response[response_id] = [
                *readers_by_response.pop(response_id, ()),
                connection,
            ]  # the one that was asked for last is last
        while len(readers_by_response) > 1:
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
        if (
            connection.buffer
        ):  # the next request came with the last one; another round, others wait too
            self.call_soon(lambda: self._process_pipelined(connection))

    def _process_pipelined(self, connection: _Connection) -> None:
        if connection in self._connections and not connection.pending:
            self._run_step(connection, self._process_buffer)

    def _mark_recent(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._connections[connection] = None

    def _disconnect(self, connection: _Connection) -> None:
        if self._connections.pop(connection, 0) is None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.sock)
            connection.sock.close()


def _parts(response: HttpResponse | None) -> tuple[bytes, ...]:
    return () if response is None else (response.body, response.body_tail)


def bind(host: str, port: int, one_family: bool = False) -> socket.socket:
    """A socket that listens there. A wildcard is that of both families, unless `one_family`.
    OSError when the address cannot be had.
    """
    dual_stack = not one_family and host in ("", *WILDCARDS) and socket.has_dualstack_ipv6()
    v6 = dual_stack or ":" in host
    sock = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # what is accepted has the same
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
