# SPDX-License-Identifier: Apache-2.0
"""Waiting with more than 1,100 open descriptors: select(2) cannot handle one above 1023."""

import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from kbpf.kernel.net import dial, netlink
from kbpf.kernel.net.devices import DeviceMonitor
from kbpf.kernel.net.uapi import RTMGRP_LINK
from kbpf.kernel.system.polling import wait_readable
from kbpf.serve.http import HttpServer
from kbpf.serve.message import HttpResponse
from tests.support.lab.lab import PATIENCE

MANY = 1_150


@pytest.fixture
def many() -> Iterator[None]:
    """Opens descriptors until the lowest free one is above 1,100."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    taken = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(MANY)]
    yield
    for number in taken:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many")
def test_readable_sockets_are_returned():
    one, two = socket.socketpair()
    with one, two:
        assert min(one.fileno(), two.fileno()) > 1_100
        assert wait_readable([one.fileno(), two.fileno()], 0) == []
        two.send(b"x")
        assert wait_readable([one.fileno(), two.fileno()], PATIENCE) == [one.fileno()]


@pytest.mark.usefixtures("many")
def test_devices_are_watched():
    wake = os.eventfd(1)
    with DeviceMonitor() as watch:
        assert watch.socket.fileno() > 1_100
        watch.wait(PATIENCE, wake)  # whether or not devices of other tests change meanwhile
    os.close(wake)


@pytest.mark.usefixtures("many")
def test_addresses_are_watched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(netlink, "STOP_POLL_INTERVAL_S", 0.001)
    stop = threading.Event()
    turns = []

    def beat() -> None:
        turns.append(1)
        if len(turns) == 3:
            stop.set()

    monkeypatch.setattr(netlink.threads, "heartbeat", beat)
    netlink.watch(RTMGRP_LINK, lambda: None, stop)
    assert len(turns) == 3


def test_changes_that_follow_each_other_are_reported_together(
    monkeypatch: pytest.MonkeyPatch,
):
    """At once, and then not more often than CHANGE_INTERVAL_S; the last change is reported."""
    clock, seen, calls = [0], [0], []  # in ms; changes

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            clock[0] += round(timeout * 1000)
            return False

    class Flood:
        """A change each 10 ms, 100 of them."""

        def __init__(self, _: int) -> None:
            self.socket = self

        def fileno(self) -> int:
            return -1

        def __enter__(self) -> "Flood":
            return self

        def __exit__(self, *_: object) -> None: ...

        def receive_notifications(self) -> None:
            seen[0] = min(100, clock[0] // 10)

    def wait(_: object, timeout: float) -> list[int]:
        if seen[0] == 100:
            stop.set()
            return []
        clock[0] = max(clock[0], 10 * (seen[0] + 1))
        return [-1]

    stop = Stop()
    monkeypatch.setattr(netlink, "Rtnetlink", Flood)
    monkeypatch.setattr(netlink, "wait_readable", wait)
    netlink.watch(RTMGRP_LINK, lambda: calls.append((clock[0], seen[0])), stop)
    assert len(calls) <= 2 + 1.0 / netlink.CHANGE_INTERVAL_S
    assert calls[1][0] == 10
    assert calls[-1][1] == 100


@pytest.mark.usefixtures("many")
def test_udp_exchange_of_check_works():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    assert dial.exchange_udp(place, [place]) == (place, place)


@pytest.mark.usefixtures("many")
def test_the_http_server_answers():
    server = HttpServer()
    server.start()
    port = server.listen("127.0.0.1", 0, lambda _: HttpResponse(200, b"ok")).sock.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK")
    server.stop()


def test_nothing_uses_select():
    """In the agent it would fail only on large nodes."""
    from pathlib import Path

    import kbpf

    texts = {path: path.read_text() for path in Path(kbpf.__file__).parent.rglob("*.py")}
    assert not [path for path, text in texts.items() if "select.select(" in text]
