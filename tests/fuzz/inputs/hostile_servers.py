# SPDX-License-Identifier: Apache-2.0
"""A table of API servers that misbehave in ways that no real one should.

Each serves four watches in a separate process (reflector_child.py). The memory of that process must
stay below MEMORY_MB. Within VISIBLE_SECONDS the status must report an error, unless the row says
that the watches recover by themselves. When the server becomes an ordinary one, the watches must
recover and know its objects. What a single response leads to is tested in tests/values/source.
"""

import contextlib
import gzip
import json
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.campaigns import deadline
from tests.support.faults.fault_wire import chunk
from tests.support.faults.scripted import Exchange, ScriptedServer, Step, quiet
from tests.support.lab.lab import PATIENCE
from tests.values.source.reflector.scripted import added, bookmark, lines, service, status

MEMORY_MB = 300.0
VISIBLE_SECONDS = PATIENCE
HEAL_SECONDS = PATIENCE
"""Enough for a back-off of 30 s and for a Retry-After of 90 s."""


# --- an ordinary server ---


def ordinary(exchange: Exchange) -> None:
    """Lists the object `good`, as a stream or a page, and then sends nothing."""
    query = exchange.request.query
    if "sendInitialEvents" in query:
        exchange.watch(added("good", 900), bookmark(1000, end=True))
        exchange.hang()
    elif "watch" in query:
        exchange.watch(bookmark(1000))
        exchange.hang()
    else:
        page = {"metadata": {"resourceVersion": "1000"}, "items": [service("good", 900)]}
        exchange.answer(200, page)


# --- servers that misbehave ---


def sends(*parts: bytes) -> Step:
    """Sends these bytes and disconnects, whatever the request is."""

    def step(exchange: Exchange) -> None:
        for part in parts:
            exchange.sock.sendall(part)
        exchange.cut()

    return step


def endless(head: bytes, piece: bytes, pause: float = 0.0) -> Step:
    """Sends the head, and then the piece without end."""

    def step(exchange: Exchange) -> None:
        exchange.sock.sendall(head)
        while not exchange.closing(pause):
            exchange.sock.sendall(piece)
        exchange.open = False

    return step


def page(body: bytes, **headers: str) -> Step:
    """A server without streamed lists that answers every list with this page."""
    return paged(lambda exchange: exchange.answer(200, body, **headers))


def paged(step: Step) -> Step:
    """A server without streamed lists that answers every list by this step."""

    def made(exchange: Exchange) -> None:
        if "sendInitialEvents" in exchange.request.query:
            exchange.answer(422, {"message": "sendInitialEvents: Forbidden"})
        elif "watch" in exchange.request.query:
            quiet(exchange)
        else:
            step(exchange)

    return made


def listed(*lines: Any) -> Step:
    """Sends an ordinary streamed list and then these lines, the same to each watch."""

    def step(exchange: Exchange) -> None:
        start = []
        if "sendInitialEvents" in exchange.request.query:
            start = [added("good", 900), bookmark(1000, end=True)]
        elif "watch" not in exchange.request.query:
            ordinary(exchange)
            return
        exchange.watch(*start, *lines)
        exchange.hang()

    return step


def next_page(exchange: Exchange) -> None:
    """Always sends an empty page with a continue token for another one."""
    token = str(random.random())
    exchange.answer(200, {"metadata": {"resourceVersion": "5", "continue": token}, "items": []})
    time.sleep(0.05)


def changing(exchange: Exchange) -> None:
    """Sends a list with other contents each time, under the same version, and then 410."""
    address = f"10.96.1.{random.randrange(1, 250)}"
    first = [added("good", 900, clusterIP=address), bookmark(1000, end=True)]
    if "sendInitialEvents" not in exchange.request.query:
        first = []
    exchange.watch(*first, *lines("error=410"))
    exchange.end()


def growing(exchange: Exchange) -> None:
    """Repeats the same objects in a list that does not end."""
    exchange.watch(added("good", 900))
    while not exchange.closing(0.0):
        exchange.sock.sendall(MANY_LINES)
    exchange.open = False


HEAD = b"HTTP/1.1 200 OK\r\n"
JSON = HEAD + b"Content-Type: application/json\r\n"
CHUNKED = JSON + b"Transfer-Encoding: chunked\r\n\r\n"
META = b'{"metadata":{"resourceVersion":"5"},"items":['


BOMB = gzip.compress(b" " * (64 << 20))


MANY_LINES = b"".join(chunk(json.dumps(added(f"n{n}", n)).encode() + b"\n") for n in range(50))
BOUNDED: dict[str, Step] = {
    "an endless error": endless(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65536),
    "an endless page of objects": paged(endless(JSON + b"\r\n" + META, b"{}," * 20_000)),
    "a line of 64 MiB": sends(CHUNKED, *[chunk(b"x" * (1 << 20))] * 64),
    "10^5 nested arrays, an item": page(META + b"[" * 100_000 + b"]" * 100_000 + b"]}"),
    "a Service with 1,500,000 ports": page(
        META + b'{"metadata":{"name":"a"},"spec":{"clusterIP":"10.0.0.1","ports":[' + b"{}," * 1_500_000 + b"{}]}}]}"
    ),
    "HTTP/2 preface": sends(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + b"\x00\x03" * 9),
    "redirects": status(302, Location="/elsewhere"),
    "a page of 64 MiB in gzip, without an end": endless(HEAD + b"Content-Encoding: gzip\r\n\r\n", BOMB),
    "other content each time, and 410": changing,
}
"""Rows that take a few seconds, one of each kind."""
ROWS = BOUNDED | {
    "an endless head": endless(HEAD, b"X-Filler: " + b"x" * 1000 + b"\r\n"),
    "a slow error, byte by byte": endless(b"HTTP/1.1 500 No\r\n\r\n", b"x", 1.0),
    "2,000,000 items": page(META + b"{}," * 2_000_000 + b"{}]}"),
    "a length that is too long, and the end": sends(JSON + b"Content-Length: 99\r\n\r\n{}"),
    "1xx without an end": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "a gzip bomb": page(BOMB, Content_Encoding="gzip"),
    "410 always": status(410),
    "an endless line in the head": endless(HEAD + b"X: ", b"x" * 65536),
    "an endless page": paged(endless(JSON + b"\r\n", b" " * 65536)),
    "a list without an end": growing,
    "lines of 64 MiB in a watch": listed(*[b"x" * (1 << 20)] * 64),
    "10^5 nested arrays, a page": page(b"[" * 100_000),
    "10^5 nested arrays, an event": listed(b'{"type":"ADDED","object":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    "a slice with 1,500,000 endpoints": page(
        META + b'{"metadata":{"name":"a","labels":{"kubernetes.io/service-name":"a"}},'
        b'"addressType":"IPv4","endpoints":[' + b"{}," * 1_500_000 + b"{}]}]}"
    ),
    "an object of 7 MiB": page(META + b'{"metadata":{"name":"a","x":"' + b"x" * (7 << 20) + b'"}}]}'),
    "a length that is too short": sends(JSON + b"Content-Length: 2\r\n\r\n{}{}{}{}"),
    "a length of 5,000 digits": sends(JSON + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}"),
    "a negative length": sends(JSON + b"Content-Length: -5\r\n\r\n{}"),
    "a chunk of 2^64 bytes": sends(CHUNKED + b"ffffffffffffffff\r\n{}"),
    "a chunk's length without an end": endless(CHUNKED, b"f" * 65536),
    "switching protocols": sends(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n"),
    "rubbish": sends(random.Random(1).randbytes(100_000)),
    "invalid UTF-8": page(META + b'{"metadata":{"name":"\xff\xfe"}}]}'),
    "1,000 headers": sends(HEAD + b"A: b\r\n" * 1000 + b"\r\n{}"),
    "a reset after the head": lambda e: (e.head(200), e.reset()),
    "a reset in the list": lambda e: (e.watch(added("a", 5)), e.reset()),
    "endless pages": paged(next_page),
}


HEALS = {
    "a Service with 1,500,000 ports",
    "a slice with 1,500,000 endpoints",
    "an object of 7 MiB",
    "invalid UTF-8",
}
"""Nothing has to be reported, because the watches recover by themselves."""


class _Always:
    """A script that repeats one step for ever."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def pop(self, _: int) -> Step:
        return self.step


class Child:
    """The process with the four watches, and its last report."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "tests.fuzz.inputs.reflector_child", url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.report: dict[str, Any] = {}
        self.peak = 0.0

    def watch(self, seconds: float, until: Callable[[dict[str, Any]], bool]) -> float:
        """Seconds until a report fulfils this. Raises AssertionError, also for too much memory."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            if not select.select([self._process.stdout], [], [], 1.0)[0]:
                continue
            text = self._process.stdout.readline()
            assert text, f"the process ended: {self._process.wait()}"
            self.report = json.loads(text)
            self.peak = self.report["peak_mb"]
            assert self.peak < MEMORY_MB, f"{self.peak:.0f} MB"
            if until(self.report):
                return time.monotonic() - begun
        raise AssertionError(f"not within {seconds:.0f} s: {self.report}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def is_error_reported(report: dict[str, Any]) -> bool:
    return any(source["error"] or source["problems"] for source in report["sources"])


def is_healthy(report: dict[str, Any]) -> bool:
    return all(
        source["synced"] and source["state"] == "watching" and not source["error"] for source in report["sources"]
    )


def survive(name: str) -> str:
    """Runs one row; returns how it went. Raises AssertionError."""
    heals = name in HEALS
    with ScriptedServer() as server:
        script = _Always(ROWS[name])
        server.script = script  # type: ignore[assignment]
        with contextlib.closing(Child(server.url)) as child:
            told = child.watch(VISIBLE_SECONDS, is_healthy if heals else is_error_reported)
            hold = time.monotonic() + 1.0
            child.watch(VISIBLE_SECONDS, lambda _: time.monotonic() > hold)
            script.step = ordinary
            healed = child.watch(HEAL_SECONDS, lambda r: is_healthy(r) and (heals or r["known"] >= 1))
            return f"visible {told:.1f} s, well {healed:.1f} s, {child.peak:.0f} MB"


def campaign(seed: int, minutes: float | None) -> None:
    """Runs all rows in an order that the seed decides; `minutes` ends it early."""
    until = deadline(minutes)
    names = list(ROWS)
    random.Random(seed).shuffle(names)
    wrong = []
    for name in names:
        if time.monotonic() > until:
            break
        try:
            print(f"{name}: {survive(name)}", flush=True)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
            print(f"WRONG: {wrong[-1]}", flush=True)
    assert not wrong, wrong
