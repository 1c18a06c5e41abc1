# SPDX-License-Identifier: Apache-2.0
"""Requests from a grammar that often breaks the rules, to the health and metrics server.

The server's event loop must never meet a fault, and honest probes must be answered. Every request
follows from the seed and its number. http_load.py measures time and memory.
"""

import contextlib
import math
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from kbpf.serve.http import HttpServer
from kbpf.serve.message import HttpRequest, HttpResponse
from tests.campaigns import deadline
from tests.support.lab.lab import PATIENCE

REQUESTS = 1_000_000
BATCH = 500
"""Requests sent between two honest probes."""

# Parts of requests: words that are valid or nearly so, and then what cannot be written as a word.
METHODS = (*b"GET HEAD POST OPTIONS get CONNECT PRI G-T G(T".split(), b"", b"G\x00T", b"M" * 300, b"\xff")
TARGETS = (
    *b"/ /healthz /metrics /livez?verbose=1 //x /% /%zz /%00 * x:443 //[x/".split(),
    *b"http://h/x?y http://[ http://[::1]:80/p http://h http://a:b:c/".split(),
    b"",
    b"/a b",
    b"/\x1b[2J",
    b"/\xc3\xa9",
    b"http://\xe2\x84\xa1/",
    b"/" + b"%41" * 500,
    b"/?" + b"a=&" * 400,
    b"/" + b"../" * 100,
)
VERSIONS = (
    *b"HTTP/1.1 HTTP/1.1 HTTP/1.0 HTTP/2.0 HTTP/1.2 http/1.1 HTTP/1 HTTP/11".split(),
    b"",
    b"HTTP/1.1 x",
    b"HTTP/1.\xb2",
)
KNOWN = b"Host Content-Length Transfer-Encoding Connection Expect".split()
NAMES = (*KNOWN, *b"Upgrade content-LENGTH X".split(), b"X" * 200, b"", b"X Y", b" X", b"X\t", b"X\x00", b"\xe9")
LENGTHS = (
    *b"0 3 -1 +3 0x3 3,4 65536 65537 1e3 000003 1_0".split(),
    b"3, 3",
    b"9" * 4299,
    b"9" * 4301,
    b"9" * 7000,
    b"\xb2",
    b"",
    b" 3 ",
)
VALUES = (
    *b"close keep-alive x chunked 100-continue h2c".split(),
    b"",
    b"a\x00b",
    b"\xff\xfe",
    b"\x1b]0;x\x07",
    b"a" * 3000,
    b"close, x",
    b"\tx\t",
    b"\r",
)
ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\n\r", b"\r\r\n")

USUAL = HttpResponse(200, b"ok\n")
PAGE = HttpResponse(200, b"# a page\n" * 20_000)


def pick(chance: random.Random, options: Sequence[bytes], first: float = 0.5) -> bytes:
    """One of the options, more often the first, so that most parts of some requests are valid."""
    return options[0] if chance.random() < first else chance.choice(options)


def field(chance: random.Random, end: bytes) -> bytes:
    name = chance.choice(KNOWN) if chance.random() < 0.8 else chance.choice(NAMES)
    value = chance.choice(LENGTHS if name.lower() == b"content-length" else VALUES)
    colon = b": " if chance.random() < 0.9 else chance.choice((b":", b" :", b"", b"::"))
    return name + colon + value + end


def request(seed: int, number: int) -> bytes:
    chance = random.Random(seed << 32 | number)
    if chance.random() < 0.02:
        return chance.randbytes(chance.randrange(1, 400))
    end = pick(chance, ENDS, 0.7)
    space = b" " if chance.random() < 0.97 else chance.choice((b"", b"  ", b"\t"))
    first = (pick(chance, METHODS), pick(chance, TARGETS), pick(chance, VERSIONS, 0.7))
    raw = space.join(first) + end
    if chance.random() < 0.7:
        raw += b"Host: x" + end
    raw += b"".join(field(chance, end) for _ in range(chance.choice((0, 0, 1, 1, 2, 3, 8))))
    if chance.random() < 0.05:
        raw += b" folded" + end
    raw += end + chance.choice((b"", b"", b"", b"abc", b"\r\n", b"x" * 70_000))
    if chance.random() < 0.15:  # mutated
        at, size = chance.randrange(len(raw)), chance.randrange(1, 4)
        raw = raw[:at] + chance.randbytes(size) + raw[at + chance.randrange(0, 4) :]
    if chance.random() < 0.05:  # cut
        raw = raw[: chance.randrange(1, len(raw) + 1)]
    return raw


# ---- the server --------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(handler: Callable[[HttpRequest], HttpResponse]) -> Iterator[tuple[HttpServer, int]]:
    server = HttpServer()
    server.start()
    try:
        yield server, server.listen("127.0.0.1", 0, handler).sock.getsockname()[1]
    finally:
        server.stop()


def handler(asked: HttpRequest) -> HttpResponse:
    """Short responses, and for /metrics one that does not fit into the kernel's buffers."""
    return PAGE if asked.path == "/metrics" else USUAL


def probe(port: int) -> float:
    """Seconds that an honest probe takes. Raises AssertionError if the response is not the usual
    one.
    """
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found = b""
        while data := sock.recv(4096):
            found += data
    assert found.startswith(b"HTTP/1.1 200 OK\r\n"), found
    assert found.endswith(b"\r\n\r\nok\n"), found
    return time.monotonic() - began


def send(port: int, raw: bytes) -> None:
    """Sends it, whether the server accepts it or not, and reads a little of the response."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.setblocking(False)
        sock.send(raw)
        sock.recv(4096)


def resident(process: int | str = "self") -> int:
    """Resident memory of a process in bytes."""
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def run(seed: int, count: int, until: float = math.inf) -> int:
    """Sends `count` requests, or fewer if `until` has come; returns how many. Raises AssertionError
    with the number of the request that found something.
    """
    sent = 0
    with serving(handler) as (server, port):
        while sent < count and time.monotonic() < until:
            for number in range(sent, sent + BATCH):
                send(port, request(seed, number))
            sent += BATCH
            probe(port)
            assert not server.faults.count, f"faults before request {sent} of seed {seed}"
    return sent


def requests(seed: int, minutes: float | None) -> None:
    print(f"{run(seed, REQUESTS, deadline(minutes))} requests", flush=True)
