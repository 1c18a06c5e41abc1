# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for health checks and metrics: one thread with an event loop, any number of
ports.

Load balancers, kubelet and Prometheus send short requests, and so can anything else that reaches
the port. Therefore no client can harm any connection but its own (connections.py), and methods and
bodies are ignored: only the path matters, as in kube-proxy's handlers.

Ports can be opened and closed while the thread runs. The caller's thread binds, so that it gets
the error at once; everything else happens in the server's thread.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable
from typing import Final

from kbpf.kernel.system import threads
from kbpf.serve.connections import MAX_CONNECTIONS, Connections, FaultLog, Handler
from kbpf.serve.message import HttpResponse

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
