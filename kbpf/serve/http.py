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
from kbpf.serve.message import HEAD_END, Answer, Request, head_of, parse

log = logging.getLogger("kbpf.serve")

HEAD_BYTES: Final = 8192
HEAD_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 30.0
IDLE_SECONDS: Final = 75.0
MOST_CONNECTIONS: Final = 256
BACKLOG: Final = 4096
"""Connections that the kernel keeps for us; it takes no more than net.core.somaxconn."""

ACCEPTS: Final = 32
"""Connections that are let in at a time by one port: others wait, too."""

SOCKET_BYTES: Final = 65_536
"""The kernel's buffers of a connection, each way; it doubles that."""

LARGE_BYTES: Final = 65_536
"""An answer of this size and more may be held by slow readers (MOST_PAGES, HELD_BYTES)."""

MOST_PAGES: Final = 3
HELD_BYTES: Final = 16 << 20
"""Bytes of large answers that are not the newest one."""

NO_ROOM_SECONDS: Final = 1.0
"""So long nobody is let in when the process has no descriptors left."""

DOOR_SECONDS: Final = 0.002
"""So often new connections are accepted while there is work for others."""

QUIET_SECONDS: Final = 1.0
"""At most one fault is logged in this time; the others are counted."""

TURN_SECONDS: Final = 5.0
"""So often the thread says that it makes progress, when there is nothing to do."""

STUCK_SECONDS: Final = 30.0
"""Without progress for this long the thread counts as stuck."""

NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
WILDCARDS: Final = ("0.0.0.0", "::")
Handler = Callable[[Request], Answer]
"""Called in the server's thread."""

NOT_FOUND: Final = Answer(404, b"404 page not found\n")
REFUSED: Final = {
    400: Answer(400, b"400 Bad Request"),
    431: Answer(431, b"431 Request Header Fields Too Large"),
}


class Port:
    """A port that is listened on."""

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        self.sock = sock
        self.handler = handler
        self.closed = False


class _Client:
    """A connection: what came and is not read yet, and what is still to be sent."""

    __slots__ = ("answer", "body", "due", "got", "last", "pending", "port", "since", "sock")

    def __init__(self, sock: socket.socket, port: Port, now: float) -> None:
        self.sock = sock
        self.port = port
        self.got = bytearray()
        self.pending: list[memoryview] = []
        self.answer: Answer | None = None  # that is being sent, if it is a large one
        self.since = now  # it is
        self.body = 0  # bytes of a body that are still to be skipped
        self.last = False  # no request after this one
        self.due = now + HEAD_SECONDS


class Server:
    """See the module. start() and stop() once each; the rest from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._doors = selectors.EpollSelector()  # listening sockets, which go before all others
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._todo: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._ports: dict[Port, bool] = {}  # whether it is watched
        self._clients: dict[_Client, None] = {}  # who did something last stands last
        self._stopping = False
        self._thread: threads.Supervised | None = None
        self._quiet_until = self._door_due = float("-inf")
        self._unlogged = 0
        self.faults = 0

    def start(self) -> None:
        """Begins to answer."""
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._doors, selectors.EVENT_READ, self._doors)
        self._thread = threads.start("http", self._run, STUCK_SECONDS)

    def stop(self) -> None:
        """Closes everything; back when the thread has ended, or after a second."""
        self._stopping = True
        self._nudge()
        if self._thread is None:
            self._doors.close()
            self._selector.close()
        else:
            self._thread.stop()

    def listen(self, host: str, port: int, handler: Handler, one_family: bool = False) -> Port:
        """A port on this address (see bind()), which answers from now on."""
        made = Port(bind(host, port, one_family), handler)
        self.do(lambda: self._open(made))
        return made

    def close(self, port: Port) -> None:
        """Ends a port: nobody new is let in, and it is free for others at once."""
        port.closed = True
        # What was accepted is still answered; what waits in the backlog is refused.
        with contextlib.suppress(OSError):
            port.sock.shutdown(socket.SHUT_RDWR)
        self.do(lambda: self._shut(port))

    def do(self, work: Callable[[], None]) -> None:
        """Calls `work` in the server's thread, soon."""
        self._todo.append(work)
        self._nudge()

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Calls `work` in the server's thread, after so many seconds."""
        due = self._clock() + seconds
        self.do(lambda: self._later.append((due, work)))

    def _nudge(self) -> None:
        os.eventfd_write(self._wake, 1)

    # ---- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            threads.beat()
            self._round()
        for client in list(self._clients):
            self._drop(client)
        for port in list(self._ports):
            self._shut(port)
        self._doors.close()
        self._selector.close()

    def _round(self) -> None:
        for key, _ in self._selector.select(self._wait()):
            match key.data:
                case _Client() as client if client in self._clients:
                    self._attend(client, self._serve)
                case selectors.EpollSelector():
                    self._door_due = float("-inf")
                case None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
            self._let_in()
        for _ in range(len(self._todo)):  # what these leave to be done is for the next round
            self._do(self._todo.popleft())
            self._let_in()
        now = self._clock()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            self._do(entry[1])
        for client in [client for client in self._clients if client.due <= now]:
            self._drop(client)

    def _let_in(self) -> None:
        """Accepts, however much there is to do for those who are here: the next one may be a probe,
        which is answered at once.
        """
        now = self._clock()
        if now < self._door_due:
            return
        for key, _ in self._doors.select(0):
            self._do(partial(self._accept, key.data))
        self._door_due = self._clock() + DOOR_SECONDS

    def _wait(self) -> float:
        """Seconds until something is due."""
        due = [entry[0] for entry in self._later]
        due += [client.due for client in self._clients]
        now = self._clock()
        return max(0.0, min([TURN_SECONDS, *(at - now for at in due)]))

    def _do(self, work: Callable[[], None]) -> None:
        """Work for no client. A fault ends this piece of it."""
        try:
            work()
        except Exception:
            self._fault("a part of the HTTP server failed")

    def _attend(self, client: _Client, step: Callable[[_Client], None]) -> None:
        """A step for this client. A fault ends its connection."""
        try:
            step(client)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(client)
        except Exception:
            self._fault("a connection met a fault and is ended")
            self._drop(client)

    def _fault(self, what: str) -> None:
        """Logs the exception in hand, unless one was logged just now."""
        self.faults += 1
        now = self._clock()
        if now < self._quiet_until:
            self._unlogged += 1
            return
        log.exception("%s; faults not logged since the last one: %d", what, self._unlogged)
        self._quiet_until, self._unlogged = now + QUIET_SECONDS, 0

    def _open(self, port: Port) -> None:
        if not port.closed:
            self._ports[port] = True
            self._doors.register(port.sock, selectors.EVENT_READ, port)

    def _shut(self, port: Port) -> None:
        if self._ports.pop(port, False):
            self._doors.unregister(port.sock)
        port.sock.close()

    def _accept(self, port: Port) -> None:
        """Lets in who waits, not too many at a time: other ports may have somebody, too."""
        for _ in range(ACCEPTS):
            if port.closed:
                return
            try:
                sock, _ = port.sock.accept()
            except OSError as error:  # gone again, mostly
                if error.errno in NO_ROOM:
                    self._make_room(port)
                return
            if len(self._clients) >= MOST_CONNECTIONS:
                self._drop(next(iter(self._clients)))
            sock.setblocking(False)
            client = _Client(sock, port, self._clock())
            self._clients[client] = None
            self._selector.register(sock, selectors.EVENT_READ, client)
            # Most requests are here already; who is answered now cannot be crowded out.
            self._attend(client, self._read)

    def _make_room(self, port: Port) -> None:
        """No descriptors: some are given back, and the port is not looked at for a while."""
        for client in list(self._clients)[: MOST_CONNECTIONS // 4]:
            self._drop(client)
        self._doors.unregister(port.sock)
        self._ports[port] = False
        self._later.append((self._clock() + NO_ROOM_SECONDS, lambda: self._look_again(port)))

    def _look_again(self, port: Port) -> None:
        if self._ports.get(port) is False:
            self._open(port)

    def _serve(self, client: _Client) -> None:
        if client.pending:
            self._send(client)
        else:
            self._read(client)

    def _read(self, client: _Client) -> None:
        data = client.sock.recv(HEAD_BYTES)
        if not data:
            self._drop(client)
            return
        if not client.got and not client.body:
            client.due = self._clock() + HEAD_SECONDS  # of the first byte, not of each
        self._move_up(client)
        client.got += data
        self._go_on(client)

    def _go_on(self, client: _Client) -> None:
        """Answers the next request, if all of its head is there."""
        skipped = min(client.body, len(client.got))
        del client.got[:skipped]
        client.body -= skipped
        if client.body or not client.got:
            return
        end = HEAD_END.search(client.got)
        if end is None:
            if len(client.got) >= HEAD_BYTES:
                self._refuse(client, 431)
            return
        head = parse(bytes(client.got[: end.start()]))
        del client.got[: end.end()]
        if head is None:
            self._refuse(client, 400)
            return
        client.body, client.last = head.body, head.last
        try:
            answer = client.port.handler(head.request)
        except Exception:
            self._fault(f"no answer to {head.request.path!r}")
            answer = Answer(500, b"internal error\n")
        self._answer(client, answer, head.request.method)

    def _refuse(self, client: _Client, status: int) -> None:
        client.last = True
        self._answer(client, REFUSED[status])

    def _answer(self, client: _Client, answer: Answer, method: str = "GET") -> None:
        # Many may be sent the same page: it is not copied for each.
        client.pending = [memoryview(head_of(answer, client.last))]
        if method != "HEAD":
            client.pending += [memoryview(part) for part in (answer.body, answer.rest) if part]
        client.since = self._clock()
        client.due = client.since + ANSWER_SECONDS
        self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        if answer.length >= LARGE_BYTES:
            client.answer = answer
            self._bound_pages()
        self._send(client)

    def _bound_pages(self) -> None:
        """Puts out who reads the oldest large answers, until there are few enough of them."""
        holders = [client for client in self._clients if client.answer is not None]
        pages: dict[int, list[_Client]] = {}
        for client in sorted(holders, key=lambda client: client.since):
            page = id(client.answer)
            pages[page] = [*pages.pop(page, ()), client]  # the one that was asked for last is last
        while len(pages) > 1:
            *older, newest = [clients[0].answer for clients in pages.values()]
            fresh = {id(part) for part in _parts(newest)}
            held = {id(part): len(part) for answer in older for part in _parts(answer)}
            size = sum(length for part, length in held.items() if part not in fresh)
            if len(pages) <= MOST_PAGES and size <= HELD_BYTES:
                return
            for client in pages.pop(next(iter(pages))):
                self._drop(client)

    def _send(self, client: _Client) -> None:
        sent = client.sock.sendmsg(client.pending)
        while client.pending and sent >= len(client.pending[0]):
            sent -= len(client.pending.pop(0))
        self._move_up(client)
        if client.pending:
            client.pending[0] = client.pending[0][sent:]
            return
        client.answer = None
        if client.last:
            self._drop(client)
            return
        self._selector.modify(client.sock, selectors.EVENT_READ, client)
        client.due = self._clock() + (HEAD_SECONDS if client.got else IDLE_SECONDS)
        if client.got:  # the next request came with the last one; another round, others wait too
            self.do(lambda: self._resume(client))

    def _resume(self, client: _Client) -> None:
        if client in self._clients and not client.pending:
            self._attend(client, self._go_on)

    def _move_up(self, client: _Client) -> None:
        del self._clients[client]
        self._clients[client] = None

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client, 0) is None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(client.sock)
            client.sock.close()


def _parts(answer: Answer | None) -> tuple[bytes, ...]:
    return () if answer is None else (answer.body, answer.rest)


def bind(host: str, port: int, one_family: bool = False) -> socket.socket:
    """A socket that listens there. A wildcard is that of both families, unless `one_family`.
    OSError when the address cannot be had.
    """
    both = not one_family and host in ("", *WILDCARDS) and socket.has_dualstack_ipv6()
    v6 = both or ":" in host
    sock = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # what is accepted has the same
            sock.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BYTES)
        if v6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        sock.setblocking(False)
        sock.bind(("::" if both else host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
