"""10,000 connections that misbehave, and slow readers of a page of 12 MB, against the server in a
process of its own: honest probes take less than 50 ms, and its memory grows by 20 MB at most. The
time in which the probe or the server waited for a processor is not counted.
"""

import contextlib
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.serve import http
from kbpf.serve.http import HttpServer
from kbpf.serve.message import HttpRequest, HttpResponse
from tests.fuzz.inputs.http_requests import probe, request

CONNECTIONS: Final = 10_000
MOST_PROBE_SECONDS: Final = 0.05
MOST_MEMORY: Final = 20 << 20
PAGE_BYTES: Final = 12 << 20
COUNT_SECONDS: Final = 5.0
"""So often the large part of the page is a new one, as with serve/collector.py."""

FRESH_SECONDS: Final = 1.0
"""And so often the small one, as in serve/server.py."""

READ_SECONDS: Final = 40.0
"""Slow readers are at work for longer than an answer may take."""


class Page:
    """/metrics as the agent makes it: a small part of its own, and a large one shared by pages."""

    def __init__(self) -> None:
        self._counted, self._count_due = b"", 0.0
        self._answer, self._due = HttpResponse(200, b""), 0.0

    def answer(self, asked: HttpRequest) -> HttpResponse:
        """The page, or a short word."""
        if asked.path != "/metrics":
            return HttpResponse(200, b"ok\n")
        now = time.monotonic()
        if now >= self._count_due:
            self._counted, self._count_due = os.urandom(1) * PAGE_BYTES, now + COUNT_SECONDS
        if now >= self._due:
            own = b"# made\n" * 1000
            self._answer, self._due = (
                HttpResponse(200, own, body_tail=self._counted),
                now + FRESH_SECONDS,
            )
        return self._answer


class Remote(NamedTuple):
    """A server in a process of its own."""

    pid: int
    port: int

    def memory(self) -> int:
        """Its resident bytes."""
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def remote() -> Iterator[Remote]:
    """The server; killed at the end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        server = HttpServer()
        server.start()
        port = server.listen("127.0.0.1", 0, Page().answer).sock.getsockname()[1]
        os.write(writer, str(port).encode())
        signal.pause()
        os._exit(0)
    try:
        yield Remote(pid, int(os.read(reader, 16)))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def allow(descriptors: int) -> None:
    """Raises the limit of open files to the hard one; RuntimeError if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < descriptors:
        raise RuntimeError(f"this needs {descriptors} open files, the hard limit is {hard}")


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """This process, and those that it starts, go before others of this machine, if it may say so:
    what is measured is the server and not what runs beside it.
    """
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameter)


def mute(sock: socket.socket, _: bytes) -> None:
    """Says nothing."""


def slow(sock: socket.socket, _: bytes) -> None:
    """Begins a request."""
    sock.send(b"GET / HTTP/1.1\r\nHo")


def deaf(sock: socket.socket, _: bytes) -> None:
    """Asks for the page again and again and reads nothing."""
    sock.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20)


def pipeline(sock: socket.socket, _: bytes) -> None:
    """As many requests as there is room for."""
    sock.send(b"GET / HTTP/1.1\n\n" * 1000)


def broken(sock: socket.socket, raw: bytes) -> None:
    """What the grammar makes."""
    sock.send(raw)


NUISANCES: Final[tuple[Callable[[socket.socket, bytes], None], ...]] = (
    mute, slow, deaf, pipeline, broken,
)  # fmt: skip


def open_one(at: Remote, number: int, seed: int) -> socket.socket:
    """A connection that misbehaves in the way of this number, from one of many addresses."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    sock.settimeout(10)
    sock.bind((f"127.0.{1 + number % 8}.1", 0))
    with contextlib.suppress(OSError):  # refused, or ended at once: the server's good right
        sock.connect(("127.0.0.1", at.port))
        sock.setblocking(False)
        NUISANCES[number % len(NUISANCES)](sock, request(seed, number))
    return sock


class Result(NamedTuple):
    """What was measured: honest probes, and how much the server's memory grew at most."""

    probes: int
    median: float
    worst: float
    memory: int

    def __str__(self) -> str:
        return (
            f"probes={self.probes} median_ms={self.median * 1000:.2f} "
            f"worst_ms={self.worst * 1000:.2f} memory_mb={self.memory / 1e6:.1f}"
        )

    def judge(self) -> None:
        """AssertionError if a bound does not hold."""
        assert self.worst < MOST_PROBE_SECONDS, self
        assert self.memory <= MOST_MEMORY, self


class Meter:
    """Probes one server."""

    def __init__(self, at: Remote) -> None:
        self._at, self._took = at, list[float]()
        self._before, self._most = 0, 0
        self._warm()

    def _warm(self) -> None:
        with socket.create_connection(("127.0.0.1", self._at.port), 10) as sock:
            sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            while sock.recv(1 << 20):
                pass
        self._before = self._at.memory()

    def look(self) -> None:
        """Asks once."""
        before = self._waited()
        took = probe(self._at.port)
        self._took.append(max(0.0, took - (self._waited() - before)))
        self._most = max(self._most, self._at.memory() - self._before)

    def _waited(self) -> float:
        """Seconds that this thread and those of the server could run and had no processor: other
        work of the machine took it, or the kernel's limit for processes with real-time priority.
        """
        folders = [*Path(f"/proc/{self._at.pid}/task").iterdir(), Path("/proc/thread-self")]
        return sum(int((one / "schedstat").read_text().split()[1]) for one in folders) / 1e9

    def result(self) -> Result:
        """All of them."""
        took = sorted(self._took)
        return Result(len(took), took[len(took) // 2], took[-1], self._most)


def connections(seed: int, count: int = CONNECTIONS) -> Result:
    """Opens them all, keeps them, and probes meanwhile and afterwards."""
    allow(count + 200)
    with unhurried(), remote() as at, contextlib.ExitStack() as stack:
        meter = Meter(at)
        for number in range(count):
            stack.enter_context(open_one(at, number, seed))
            if number % 20 == 0:
                meter.look()
        for _ in range(100):
            meter.look()
        return meter.result()


def slow_readers(seed: int, seconds: float = READ_SECONDS) -> Result:
    """As many as there may be ask for the page at random times and read a little of it; who is put
    out comes again.
    """
    chance = random.Random(seed)
    with unhurried(), remote() as at, contextlib.ExitStack() as stack:
        meter = Meter(at)
        readers: list[socket.socket] = []
        end = time.monotonic() + seconds
        number = 2  # deaf(), as in open_one()
        while time.monotonic() < end:
            if len(readers) < http.MAX_CONNECTIONS - 8:
                readers.append(stack.enter_context(open_one(at, number, seed)))
            reader = chance.choice(readers)
            try:
                if not reader.recv(chance.randrange(1, 4096)):
                    raise ConnectionError
            except BlockingIOError:
                pass
            except OSError:
                reader.close()
                readers.remove(reader)
            meter.look()
        return meter.result()


def campaign(seed: int, minutes: float | None) -> None:
    """Both, once."""
    for name, found in (("connections", connections(seed)), ("slow readers", slow_readers(seed))):
        print(f"{name}: {found}", flush=True)
        found.judge()
