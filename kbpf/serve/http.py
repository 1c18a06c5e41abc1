"""A small HTTP server for questions about health: one thread, any number of ports.

LoadBalancers, kubelet and Prometheus ask short questions, and whoever reaches the port may ask
too. So nothing that a client does or leaves undone costs more than its own connection:

- The thread never waits for a client. A request's head has HEAD_BYTES and HEAD_SECONDS; an answer
  has to be through within ANSWER_SECONDS; a connection without a request goes after IDLE_SECONDS.
- There are MOST_CONNECTIONS at most; the next one takes the place of who has done nothing for the
  longest. An honest client is answered within a millisecond, so it is never that one.
- Methods and bodies mean nothing: what is asked for is the path, as in kube-proxy's handlers. A
  body is skipped, or ends the connection where it is long.

Ports come and go while the thread runs. Binding is done by who asks for it, so that it hears at
once what is wrong; everything else is the thread's.
"""

import contextlib
import errno
import logging
import os
import re
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

log = logging.getLogger("kbpf.serve")

HEAD_BYTES: Final = 8192
BODY_BYTES: Final = 65_536
HEAD_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 30.0
IDLE_SECONDS: Final = 75.0
MOST_CONNECTIONS: Final = 256
BACKLOG: Final = 128
NO_ROOM_SECONDS: Final = 1.0
"""So long nobody is let in when the process has no descriptors left."""

FAULT_SECONDS: Final = 0.1
"""After a fault of our own: one that stays must not take a processor."""

NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
"""Checks of load balancers are often typed by hand, their lines without CR; Go lets them."""

WILDCARDS: Final = ("0.0.0.0", "::")
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"


class Request(NamedTuple):
    """What was asked for. `query` is what stands behind the question mark, undecoded."""

    method: str
    path: str
    query: str


class Answer(NamedTuple):
    """What goes back. `headers` are those beside the usual ones."""

    status: int
    body: bytes
    kind: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()


Handler = Callable[[Request], Answer]
"""Called in the server's thread."""

NOT_FOUND: Final = Answer(404, b"404 page not found\n")


class Port:
    """A port that is listened on."""

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        self.sock = sock
        self.handler = handler
        self.closed = False


class _Client:
    """A connection: what came and is not read yet, and what is still to be sent."""

    __slots__ = ("body", "due", "got", "last", "pending", "port", "sock")

    def __init__(self, sock: socket.socket, port: Port, now: float) -> None:
        self.sock = sock
        self.port = port
        self.got = bytearray()
        self.pending: list[memoryview] = []
        self.body = 0  # bytes of a body that are still to be skipped
        self.last = False  # no request after this one
        self.due = now + HEAD_SECONDS


class Server:
    """See the module. start() and stop() once each; the rest from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._todo: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._ports: dict[Port, bool] = {}  # whether it is watched
        self._clients: dict[_Client, None] = {}  # who did something last stands last
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to answer."""
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes everything; back when the thread has ended, or after a second."""
        self._stopping = True
        self._nudge()
        if self._thread is None:
            self._selector.close()
        else:
            self._thread.join(1.0)

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
            try:
                self._round()
            except Exception:  # the thread's one: no client and no handler may end it
                log.exception("a round of the HTTP server failed")
                time.sleep(FAULT_SECONDS)
        for client in list(self._clients):
            self._drop(client)
        for port in list(self._ports):
            self._shut(port)
        self._selector.close()

    def _round(self) -> None:
        for key, _ in self._selector.select(self._wait()):
            match key.data:
                case Port() as port:
                    self._accept(port)
                case _Client() as client if client in self._clients:
                    self._serve(client)
                case _:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
        while self._todo:
            self._todo.popleft()()
        now = self._clock()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()
        for client in [client for client in self._clients if client.due <= now]:
            self._drop(client)

    def _wait(self) -> float | None:
        """Seconds until something is due; None: nothing is."""
        due = [entry[0] for entry in self._later]
        due += [client.due for client in self._clients]
        return max(0.0, min(due) - self._clock()) if due else None

    def _open(self, port: Port) -> None:
        if not port.closed:
            self._ports[port] = True
            self._selector.register(port.sock, selectors.EVENT_READ, port)

    def _shut(self, port: Port) -> None:
        if self._ports.pop(port, False):
            self._selector.unregister(port.sock)
        port.sock.close()

    def _accept(self, port: Port) -> None:
        """Lets in who waits, one at a time: many ports may have somebody."""
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

    def _make_room(self, port: Port) -> None:
        """No descriptors: some are given back, and the port is not looked at for a while."""
        for client in list(self._clients)[: MOST_CONNECTIONS // 4]:
            self._drop(client)
        self._selector.unregister(port.sock)
        self._ports[port] = False
        self._later.append((self._clock() + NO_ROOM_SECONDS, lambda: self._look_again(port)))

    def _look_again(self, port: Port) -> None:
        if self._ports.get(port) is False:
            self._open(port)

    def _serve(self, client: _Client) -> None:
        try:
            if client.pending:
                self._send(client)
            else:
                self._read(client)
        except OSError as error:
            if not isinstance(error, BlockingIOError | InterruptedError):
                self._drop(client)

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
                self._answer(client, Answer(431, b"431 Request Header Fields Too Large"), "GET")
            return
        head = bytes(client.got[: end.start()])
        del client.got[: end.end()]
        request = _parse(head, client)
        if request is None:
            client.last = True
            self._answer(client, Answer(400, b"400 Bad Request"), "GET")
            return
        try:
            answer = client.port.handler(request)
        except Exception:
            log.exception("no answer path=%s", request.path)
            answer = Answer(500, b"internal error\n")
        self._answer(client, answer, request.method)

    def _answer(self, client: _Client, answer: Answer, method: str) -> None:
        if answer.status in (400, 431):
            client.last = True
        # Many may be sent the same page: it is not copied for each.
        client.pending = [memoryview(_head(answer, client.last))]
        if answer.body and method != "HEAD":
            client.pending.append(memoryview(answer.body))
        client.due = self._clock() + ANSWER_SECONDS
        self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        self._send(client)

    def _send(self, client: _Client) -> None:
        sent = client.sock.sendmsg(client.pending)
        while client.pending and sent >= len(client.pending[0]):
            sent -= len(client.pending.pop(0))
        self._move_up(client)
        if client.pending:
            client.pending[0] = client.pending[0][sent:]
            return
        if client.last:
            self._drop(client)
            return
        self._selector.modify(client.sock, selectors.EVENT_READ, client)
        client.due = self._clock() + (HEAD_SECONDS if client.got else IDLE_SECONDS)
        if client.got:  # the next request came with the last one; another round, others wait too
            self.do(lambda: self._resume(client))

    def _resume(self, client: _Client) -> None:
        if client in self._clients and not client.pending:
            try:
                self._go_on(client)
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    self._drop(client)

    def _move_up(self, client: _Client) -> None:
        del self._clients[client]
        self._clients[client] = None

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client, 0) is None:
            self._selector.unregister(client.sock)
            client.sock.close()


def bind(host: str, port: int, one_family: bool = False) -> socket.socket:
    """A socket that listens there. A wildcard is that of both families, unless `one_family`.
    OSError when the address cannot be had.
    """
    both = not one_family and host in ("", *WILDCARDS) and socket.has_dualstack_ipv6()
    v6 = both or ":" in host
    sock = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if v6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        sock.setblocking(False)
        sock.bind(("::" if both else host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _parse(head: bytes, client: _Client) -> Request | None:
    """The request, or None where it is none. Says in `client` what follows it."""
    lines = head.decode("latin-1").replace("\r\n", "\n").split("\n")
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1") or not words[0].isascii():
        return None
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            return None
        headers[name.lower()] = value.strip()
    target = _target(words[1])
    if target is None:
        return None
    length = headers.get("content-length", "0")
    said = headers.get("connection", "").lower()
    client.last = "close" in said or (words[2] == "HTTP/1.0" and "keep-alive" not in said)
    if "transfer-encoding" in headers or not length.isdecimal() or int(length) > BODY_BYTES:
        client.last = True
    else:
        client.body = int(length)
    return Request(words[0], *target)


def _target(text: str) -> tuple[str, str] | None:
    """Path and query of what is asked for: a path, or a whole address as proxies are asked."""
    if text.startswith("/"):
        path, _, query = text.partition("?")
        return unquote(path), query
    try:
        url = urlsplit(text)
    except ValueError:
        return None
    return (unquote(url.path), url.query) if url.path.startswith("/") else None


def _head(answer: Answer, last: bool) -> bytes:
    try:
        phrase = HTTPStatus(answer.status).phrase
    except ValueError:
        phrase = ""
    lines = [
        f"HTTP/1.1 {answer.status} {phrase}",
        f"Content-Type: {answer.kind}",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in answer.headers),
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Length: {len(answer.body)}",
        *(("Connection: close",) if last else ()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
