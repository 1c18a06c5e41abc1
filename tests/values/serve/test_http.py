# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: its responses, and that misbehaving clients cannot block others.

The sockets are real, on loopback. Misbehaving clients stay connected while an honest one sends its
request.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest

from kbpf.serve import http
from kbpf.serve.http import HttpServer
from kbpf.serve.message import HttpRequest, HttpResponse
from tests.support.lab.lab import PATIENCE, until
from tests.support.table import pairs

PAGE = b"x" * 1_500_000
"""More than the kernel buffers for a client that does not read."""


def answer(request: HttpRequest) -> HttpResponse:
    match request.path:
        case "/page":
            return HttpResponse(200, PAGE)
        case "/fails":
            raise ValueError("on purpose")
        case "/ask":
            return HttpResponse(503, request.query.encode(), "a/b", (("X-One", "1"),))
    return HttpResponse(200, f"{request.method} {request.path}".encode())


class Site(NamedTuple):
    server: HttpServer
    port: int

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        made.settimeout(PATIENCE)
        return made

    def ask(self, text: bytes) -> bytes:
        """Sends `text` and returns everything until the server closes the connection."""
        with self.connect() as sock:
            sock.sendall(text)
            return everything(sock)

    def get(self, path: str = "/") -> bytes:
        return self.ask(sent(f"GET {path} END"))


def everything(sock: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 20):
            found += data
    return found


@pytest.fixture
def clock() -> list[float]:
    """One item: the time of the server's clock, which only the tests advance."""
    return [1000.0]


@pytest.fixture
def site(clock: list[float]) -> Iterator[Site]:
    server = HttpServer(lambda: clock[0])
    server.start()
    port = server.listen("127.0.0.1", 0, answer)
    yield Site(server, port.sock.getsockname()[1])
    server.stop()


END = r" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
ANSWERED = pairs(rf"""a path: GET /healthz END → 200 OK: GET /healthz
HTTP/1.0: GET / HTTP/1.0\r\n\r\n → 200 OK: GET /
another method: POST / END → 200 OK: POST /
HEAD has no body: HEAD / END → 200 OK:
a query: GET /ask?a=%20b END → 503 Service Unavailable: a=%20b
an encoded path: GET /a%20b END → 200 OK: GET /a b
a whole address: GET http://h/x END → 200 OK: GET /x
lines without CR, as printf and nc send them: GET /x HTTP/1.1\nHost: x\nConnection: close\n\n → 200 OK: GET /x
a second request after lines without CR: POST /1 HTTP/1.1\nContent-Length: 3\n\nabcGET /2 HTTP/1.0\n\n → 200 OK: GET /2
two slashes begin a path: GET //h/x END → 200 OK: GET //h/x
a fragment is part of the path, as in Go: GET /x#y END → 200 OK: GET /x#y
a body is skipped: POST /1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET /2 END → 200 OK: GET /2
two requests at once: GET /1 HTTP/1.1\r\n\r\nGET /2 END → 200 OK: GET /2
a chunked body closes the connection: POST /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n → 200 OK: POST /1
a long body closes the connection: POST /1 HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n → 200 OK: POST /1
a handler that fails: GET /fails END → 500 Internal Server Error: internal error\n
no Host: GET /x HTTP/1.1\r\nConnection: close\r\n\r\n → 200 OK: GET /x
HTTP/1.0 with keep-alive: GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n → 200 OK: GET /x
a head without an end: GET /{"x" * 8190} → 431 Request Header Fields Too Large: 431 Request Header Fields Too Large
no HTTP: SSH-2.0-x\r\n\r\n → BAD
TLS: \x16\x03\x01\x02\x00\x01\x00\r\n\r\n → BAD
HTTP/2: PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n → BAD
a header without a colon: GET / HTTP/1.1\r\nHost\r\n\r\n → BAD
a path without a slash: GET x HTTP/1.1\r\n\r\n → BAD
a broken address: GET http://[x/ HTTP/1.1\r\n\r\n → BAD
a negative length: GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n → BAD
a length of more digits than int() takes: GET /x HTTP/1.1\r\nContent-Length: {"9" * 5000}\r\n\r\n → BAD
two lengths: GET /x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n → BAD
a control character in the path: GET /\x1b[2J HTTP/1.1\r\n\r\n → BAD
a control character in a header: GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n → BAD
two Hosts: GET /x HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n → BAD
CONNECT: CONNECT /x END → BAD
a version that does not exist: GET / HTTP/1.2\r\nHost: x\r\nConnection: close\r\n\r\n → BAD
no method:  / HTTP/1.1\r\n\r\n → BAD
""")
"""What is sent (END: an ordinary head) → the status and body of the last response before the connection closes."""


def sent(text: str) -> bytes:
    return text.replace(" END", END).encode().decode("unicode_escape").encode("latin-1")


@pytest.mark.parametrize(("given", "answer"), ANSWERED, ids=[given[:40] for given, _ in ANSWERED])
def test_response(site: Site, given, answer):
    status, _, expected_body = answer.replace("BAD", "400 Bad Request: 400 Bad Request").partition(": ")
    last = site.ask(sent(given.partition(": ")[2])).split(b"HTTP/1.1 ")[-1]
    head, _, body = last.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == sent(status.rstrip(":"))
    assert body == sent(expected_body)
    assert b"Connection: close" in head


def test_response_headers(site: Site):
    head = site.get("/ask?x").partition(b"\r\n\r\n")[0].decode().split("\r\n")
    names = dict(line.split(": ", 1) for line in head[1:])
    assert names.pop("Date").endswith(" GMT")
    assert names == {
        "Content-Type": "a/b",
        "X-Content-Type-Options": "nosniff",
        "X-One": "1",
        "Content-Length": "1",
        "Connection": "close",
    }


def test_connection_is_reused(site: Site):
    with site.connect() as sock:
        for path in (b"/1", b"/2"):
            sock.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            found = b""
            while not found.endswith(b"GET " + path):
                found += sock.recv(4096)
            assert b"Connection" not in found


def test_request_may_arrive_byte_by_byte(site: Site):
    with site.connect() as sock:
        for byte in b"GET /slow HTTP/1.0\r\n\r\n":
            sock.sendall(bytes([byte]))
        assert everything(sock).endswith(b"GET /slow")


# ---- misbehaving clients -----------------------------------------------------------------------


def sends_nothing(site: Site) -> socket.socket:
    return site.connect()


def sends_half(site: Site) -> socket.socket:
    sock = site.connect()
    sock.sendall(b"GET / HTTP/1.1\r\nHo")
    return sock


def reads_nothing(site: Site) -> socket.socket:
    """Requests large pages and reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
    sock.settimeout(PATIENCE)
    sock.connect(("127.0.0.1", site.port))
    sock.sendall(b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n" * 6)
    return sock


MISBEHAVING = [sends_nothing, sends_half, reads_nothing]


@pytest.mark.parametrize("nuisance", MISBEHAVING, ids=lambda nuisance: nuisance.__name__)
def test_misbehaving_connections_over_the_limit_do_not_block_others(
    site: Site, nuisance: Callable[[Site], socket.socket], monkeypatch
):
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 8)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(nuisance(site)) for _ in range(20)]
        for _ in range(3):
            assert site.get("/me").endswith(b"GET /me")
        # Not necessarily the first ones: a connection whose kernel takes more data is active.
        until("those over the limit are closed", lambda: sum(map(is_closed, many)) >= 12)


def catch_up(site: Site) -> None:
    """Waits until the server has read what has arrived so far. Its callbacks run at the end of a
    round; the round that has begun may not have seen everything, the next one has.
    """
    for _ in range(4):
        done = threading.Event()
        site.server.call_soon(done.set)
        assert done.wait(PATIENCE)


def more(sock: socket.socket) -> bool:
    """Reads from the socket; False at the end of the stream or after a reset."""
    with contextlib.suppress(ConnectionResetError):
        return bool(sock.recv(1 << 20))
    return False


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed it. Reads what has arrived."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while more(sock):
            pass
        return True
    return False


def ended(sock: socket.socket) -> bool:
    return not more(sock)


@pytest.mark.parametrize(
    ("nuisance", "seconds"),
    [(sends_nothing, http.HEAD_TIMEOUT_S), (sends_half, http.HEAD_TIMEOUT_S), (reads_nothing, http.SEND_TIMEOUT_S)],
)
def test_misbehaving_connections_time_out(
    site: Site, clock: list[float], nuisance: Callable[[Site], socket.socket], seconds
):
    with nuisance(site) as sock:
        catch_up(site)
        clock[0] += seconds
        site.server.call_soon(lambda: None)
        until("its connection is ended", lambda: not more(sock))


def test_slow_second_request_on_a_connection_times_out(site: Site, clock: list[float]):
    with site.connect() as sock:
        sock.sendall(b"GET /1 HTTP/1.1\r\n\r\n")
        found = b""
        while not found.endswith(b"GET /1"):
            found += sock.recv(4096)
        for byte in b"GE":  # the second byte does not extend the timeout
            sock.sendall(bytes([byte]))
            catch_up(site)
            clock[0] += http.HEAD_TIMEOUT_S / 2
        site.server.call_soon(lambda: None)
        until("its connection is ended", lambda: not more(sock))


def test_slow_reader_gets_all_pages(site: Site):
    with reads_nothing(site) as sock:
        until("the response begins", lambda: sock.recv(1, socket.MSG_PEEK))
        parts, seen = list[bytes](), 0
        while seen < 6 * len(PAGE) and (data := sock.recv(1 << 20)):
            parts.append(data)
            seen += data.count(b"x")
    assert b"".join(parts).count(b"HTTP/1.1 200 OK") == 6


def test_accept_is_retried_after_running_out_of_descriptors(site: Site, clock: list[float], monkeypatch):
    refused = threading.Event()

    class ExhaustedListener(socket.socket):
        """A listening socket whose first accept() fails with EMFILE."""

        def accept(self) -> tuple[socket.socket, object]:
            if refused.is_set():
                return super().accept()
            refused.set()
            raise OSError(24, "Too many open files")

    listener = ExhaustedListener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    monkeypatch.setattr(http, "bind", lambda *_: listener)
    site.server.listen("127.0.0.1", 0, answer)
    other = Site(site.server, listener.getsockname()[1])
    with other.connect() as sock:
        sock.sendall(b"GET /late HTTP/1.0\r\n\r\n")
        assert refused.wait(PATIENCE)
        # In the server's thread, which has begun the pause by then.
        site.server.call_soon(lambda: clock.append(clock.pop() + http.ACCEPT_PAUSE_S))
        assert everything(sock).endswith(b"GET /late")


# ---- internal errors ---------------------------------------------------------------------------


def test_internal_error_closes_one_connection_and_is_logged_once_a_second(
    site: Site, clock: list[float], monkeypatch, caplog
):
    def fails(_: object, raw: bytes) -> None:
        raise ZeroDivisionError(raw)

    with site.connect() as other:
        other.sendall(b"GET /kept HTTP/1.1\r\n")
        assert site.get("/me").endswith(b"GET /me"), "the other one was let in before"
        with monkeypatch.context() as broken:
            broken.setattr(http, "parse_head", fails)
            assert [site.get() for _ in range(20)] == [b""] * 20
            assert site.server.faults.count == 20
            assert len(caplog.records) == 1, "the others are counted"
            clock[0] += http.FAULT_LOG_INTERVAL_S
            assert site.get() == b""
        assert "since the last one: 19" in caplog.records[1].message
        other.sendall(b"Connection: close\r\n\r\n")
        assert everything(other).endswith(b"GET /kept"), "and this one never noticed"


def test_scheduled_work_may_fail(site: Site, caplog):
    site.server.call_soon(lambda: 1 / 0)
    site.server.call_later(0, lambda: 1 / 0)
    until("both have failed", lambda: site.server.faults.count == 2)
    assert site.get("/x").endswith(b"GET /x")
    assert len(caplog.records) == 1


def test_slow_readers_hold_a_limited_number_of_large_pages(site: Site, clock: list[float]):
    """Each client requests a different large page and does not read it: the connections with the
    oldest pages are closed.
    """
    numbers = iter(range(100))
    pages = site.server.listen("127.0.0.1", 0, lambda _: HttpResponse(200, PAGE + str(next(numbers)).encode()))
    other = Site(site.server, pages.sock.getsockname()[1])
    with contextlib.ExitStack() as stack:
        readers = []
        for _ in range(http.MAX_LARGE_RESPONSES + 2):
            readers.append(stack.enter_context(reads_nothing(other)))
            until("the response begins", lambda: readers[-1].recv(1, socket.MSG_PEEK))
            clock[0] += 0.001
        for reader in readers[:2]:
            until("the reader of the oldest page is disconnected", partial(ended, reader))
        kept = readers[2:]
        assert len(kept) == http.MAX_LARGE_RESPONSES
        for reader in kept:
            assert more(reader)


def test_many_readers_may_share_one_page(site: Site):
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(reads_nothing(site)) for _ in range(3 * http.MAX_LARGE_RESPONSES)]
        for reader in readers:
            until("the response begins", partial(reader.recv, 1, socket.MSG_PEEK))
        assert all(more(reader) for reader in readers)


# ---- ports -------------------------------------------------------------------------------------


def test_closed_port_can_be_reused_at_once(site: Site):
    port = site.server.listen("127.0.0.1", 0, answer)
    number = port.sock.getsockname()[1]
    for _ in range(3):
        site.server.close(port)
        port = site.server.listen("127.0.0.1", number, answer)
    assert Site(site.server, number).get("/again").endswith(b"GET /again")
    site.server.close(port)

    def is_refused() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            Site(site.server, number).connect().close()
            return False
        return True

    until("the port is closed", is_refused)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_wildcard_address_listens_in_both_families(site: Site, wildcard):
    port = site.server.listen(wildcard, 0, answer).sock.getsockname()[1]
    for host in ("127.0.0.1", "::1"):
        with socket.create_connection((host, port), PATIENCE) as sock:
            sock.sendall(b"GET /x HTTP/1.0\r\n\r\n")
            assert everything(sock).endswith(b"GET /x")


def test_wildcards_of_one_family_can_share_a_port(site: Site):
    first = site.server.listen("0.0.0.0", 0, lambda _: HttpResponse(200, b"four"), one_family=True)
    port = first.sock.getsockname()[1]
    site.server.listen("::", port, lambda _: HttpResponse(200, b"six"), one_family=True)
    for host, word in (("127.0.0.1", b"four"), ("::1", b"six")):
        with socket.create_connection((host, port), PATIENCE) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert everything(sock).endswith(word)
