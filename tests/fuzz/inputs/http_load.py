# SPDX-License-Identifier: Apache-2.0
"""10,000 connections that misbehave, against the server in a separate process. An honest probe must
wait for less than 50 ms of the server's work for others, and the server's memory may grow by 20 MB
at most.
"""

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kbpf.serve.http import HttpServer
from tests.fuzz.inputs.http_requests import handler, probe, request, resident
from tests.support.lab.lab import PATIENCE

CONNECTIONS = 10_000
MOST_PROBE_SECONDS = 0.05
"""Of the server's processor time, so that the load of this machine does not matter."""

MOST_IDLE_SECONDS = 3.0
"""While neither the server nor the probe waits for a processor: a server that waits for one of its
clients uses no processor time, but waits for longer than this, since its own time limits are 5 s
and more.
"""

MOST_MEMORY = 20 << 20


class Remote(NamedTuple):
    """A server in a separate process."""

    pid: int
    port: int


@contextlib.contextmanager
def remote() -> Iterator[Remote]:
    """Forks a server; kills it at the end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        server = HttpServer()
        server.start()
        port = server.listen("127.0.0.1", 0, handler).sock.getsockname()[1]
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
    """Raises the limit of open files to the hard limit; RuntimeError if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < descriptors:
        raise RuntimeError(f"this needs {descriptors} open files, the hard limit is {hard}")


NUISANCES = {
    "mute": b"",
    "slow": b"GET / HTTP/1.1\r\nHo",
    "requests the page repeatedly and reads nothing": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    "as many requests as fit into the buffer": b"GET / HTTP/1.1\n\n" * 1000,
    "bytes from the grammar of http_requests.py": None,
}
"""What a connection sends."""


def open_one(at: Remote, number: int, seed: int) -> socket.socket:
    """Opens a connection that misbehaves in the way of this number, from one of several
    addresses.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    sock.settimeout(10)
    sock.bind((f"127.0.{1 + number % 8}.1", 0))
    with contextlib.suppress(OSError):  # the server may refuse or end it at once
        sock.connect(("127.0.0.1", at.port))
        sock.setblocking(False)
        sent = list(NUISANCES.values())[number % len(NUISANCES)]
        sock.send(request(seed, number) if sent is None else sent)
    return sock


INTERRUPTED = 2
"""Probes whose time does not count: interrupts, such as those of packets for other tests, run on
account of the server. A server that delays its clients does so more often.
"""


class Result(NamedTuple):
    """The results of honest probes, and the largest growth of the server's memory. `worst`: of all
    but the INTERRUPTED longest ones.
    """

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
        """Raises AssertionError if a bound does not hold."""
        assert self.worst < MOST_PROBE_SECONDS, self
        assert self.memory <= MOST_MEMORY, self


def processor_seconds(pid: int) -> tuple[float, float]:
    """What the threads of a process have used of processors, and have waited for them."""
    rows = [(thread / "schedstat").read_text().split() for thread in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(row[0]) for row in rows) / 1e9, sum(int(row[1]) for row in rows) / 1e9


class LoadMeter:
    """Probes one server and measures its memory."""

    def __init__(self, at: Remote) -> None:
        self._at, self._took = at, list[float]()
        self._before, self._most = 0, 0
        self._warm()

    def _warm(self) -> None:
        with socket.create_connection(("127.0.0.1", self._at.port), PATIENCE) as sock:
            sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            while sock.recv(1 << 20):
                pass
        self._before = resident(self._at.pid)

    def measure(self) -> None:
        """Probes once."""
        (work, delay), (_, own) = processor_seconds(self._at.pid), processor_seconds(os.getpid())
        took = probe(self._at.port)
        (worked, delayed), (_, own_delayed) = processor_seconds(self._at.pid), processor_seconds(os.getpid())
        worked, own_delay = worked - work, own_delayed - own
        assert took - (delayed - delay) - own_delay < MOST_IDLE_SECONDS
        # what the server does while the probe waits for a processor delays no probe
        self._took.append(min(worked, max(0.0, took - own_delay)))
        self._most = max(self._most, resident(self._at.pid) - self._before)

    def result(self) -> Result:
        """The result of all probes."""
        took = sorted(self._took)
        return Result(len(took), took[len(took) // 2], took[-1 - INTERRUPTED], self._most)


def connections(seed: int, count: int = CONNECTIONS) -> Result:
    """Opens all connections and keeps them; probes meanwhile and afterwards."""
    allow(count + 200)
    with remote() as at, contextlib.ExitStack() as stack:
        meter = LoadMeter(at)
        for number in range(count):
            stack.enter_context(open_one(at, number, seed))
            if number % 20 == 0:
                meter.measure()
        for _ in range(100):
            meter.measure()
        return meter.result()


def campaign(seed: int, minutes: float | None) -> None:
    found = connections(seed)
    print(found, flush=True)
    found.judge()
