# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for health checks and metrics: one thread, any number of ports.

Load balancers, kubelet and Prometheus send short requests, and so can anything else that reaches
the port. Therefore no client can harm any connection but its own (connections.py), and methods and
bodies are ignored: only the path matters, as in kube-proxy's handlers.

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
from kbpf.serve.connections import MAX_CONNECTIONS, Connection, Connections, FaultLog, Handler
from kbpf.serve.message import HttpResponse

log = logging.getLogger("kbpf.serve")

BACKLOG: Final = 4096
"""Length of the accept queue; the kernel caps it at net.core.somaxconn."""

MAX_ACCEPTS: Final = 32
"""At most this many connections are accepted at a time from one port, so that other ports get a
turn."""

SOCKET_BUFFER_BYTES: Final = 65_536
"""The kernel's buffers of a connection, in each direction; the kernel doubles the value."""

ACCEPT_PAUSE_S: Final = 1.0
"""Nothing is accepted for this long after the process has run out of file descriptors."""

ACCEPT_INTERVAL_S: Final = 0.002
"""While the thread is busy it still accepts new connections at this interval."""

MAX_SELECT_S: Final = 5.0
"""With nothing to do the thread still sends its heartbeat at this interval."""

STUCK_TIMEOUT_S: Final = 30.0
"""Without a heartbeat for this long the thread counts as stuck."""

LISTEN_RETRY_INTERVAL_S: Final = 5.0
"""For callers of listen(): when to retry an address that could not be bound, as in kube-proxy."""

RESOURCE_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
WILDCARDS: Final = ("0.0.0.0", "::")
NOT_FOUND: Final = HttpResponse(404, b"404 page not found\n")


class HttpListener:
    """A listening port."""

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        self.sock = sock
        self.handler = handler
        self.closed = False


class HttpServer:
    """An HTTP server; see the module. Call start() and stop() once each; the other methods are
    thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        # listening sockets, which take precedence over connections
        self._accept_selector = selectors.EpollSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._callbacks: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._listeners: dict[HttpListener, bool] = {}  # value: whether it is being polled
        self._stopping = False
        self._thread: threads.SupervisedThread | None = None
        self._accept_due = float("-inf")
        self.faults = FaultLog(clock)
        self._connections = Connections(self._selector, clock, self.call_soon, self.faults)

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
        self._connections.close_all()
        for listener in list(self._listeners):
            self._close_listener(listener)
        self._accept_selector.close()
        self._selector.close()

    def _run_once(self) -> None:
        for key, _ in self._selector.select(self._next_timeout()):
            match key.data:
                # An earlier event of this round may have closed it.
                case Connection() as connection if connection in self._connections:
                    self._connections.advance(connection)
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
        self._connections.close_expired(now)

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
        due_times += self._connections.deadlines()
        now = self._clock()
        return max(0.0, min([MAX_SELECT_S, *(due_time - now for due_time in due_times)]))

    def _run_callback(self, callback: Callable[[], None]) -> None:
        """Runs a callback that belongs to no connection. An exception ends only this callback."""
        try:
            callback()
        except Exception:
            self.faults.log("an HTTP server task failed")

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
            self._connections.add(sock, listener.handler)

    def _free_descriptors(self, listener: HttpListener) -> None:
        """Out of file descriptors: closes the least active connections and pauses this port for a
        while.
        """
        self._connections.close_least_active(MAX_CONNECTIONS // 4)
        self._accept_selector.unregister(listener.sock)
        self._listeners[listener] = False
        self._timers.append(
            (self._clock() + ACCEPT_PAUSE_S, lambda: self._resume_listening(listener))
        )

    def _resume_listening(self, listener: HttpListener) -> None:
        if self._listeners.get(listener) is False:
            self._open_listener(listener)


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
