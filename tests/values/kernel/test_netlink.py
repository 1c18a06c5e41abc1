# SPDX-License-Identifier: Apache-2.0
"""Every error of a netlink socket is a KernelError, and changes of the network come together."""

import errno
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kbpf
from kbpf.errors import KernelError
from kbpf.kernel.net import addresses, netlink, uapi
from kbpf.kernel.net.netlink import NetlinkRequest, Rtnetlink
from kbpf.kernel.system import modules

WHAT = uapi.RTM_GETADDR, addresses.IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)


class Broken:
    """A socket that fails to send or to receive."""

    def __init__(self, *, send: int = 0, receive: int = 0) -> None:
        self._send, self._receive = send, receive

    def send(self, _: bytes) -> int:
        return self._fail(self._send)

    def recv(self, *_: int) -> bytes:
        return bytes(self._fail(self._receive))

    def close(self) -> None:
        pass

    def _fail(self, code: int) -> int:
        if code:
            raise OSError(code, "broken")
        return 0


VERBS: dict[str, Callable[[Rtnetlink], object]] = {
    "ask": lambda netlink: netlink.request(*WHAT),
    "dump": lambda netlink: netlink.dump(*WHAT),
    "many": lambda netlink: netlink.request_many([NetlinkRequest(*WHAT)]),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("at", ["send", "receive"])
def test_an_error_of_the_socket_is_a_kernel_error(verb, at):
    netlink = Rtnetlink()
    netlink.close()
    netlink.socket = Broken(**{at: errno.EIO})
    with pytest.raises(KernelError) as raised:
        VERBS[verb](netlink)
    assert raised.value.errno == errno.EIO
    assert "rtnetlink" in str(raised.value)


def test_a_dump_that_does_not_fit_is_retried_with_a_larger_buffer():
    with Rtnetlink() as netlink:
        usual = netlink.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        known = netlink.dump(*WHAT)
        netlink.close()
        netlink.socket = Broken(receive=errno.ENOBUFS)
        assert {m.body for m in netlink.dump(*WHAT)} >= {m.body for m in known[:1]}
        assert netlink.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= usual


def test_a_dump_is_retried_only_once(monkeypatch):
    netlink = Rtnetlink()
    netlink.close()
    opened: list[Broken] = []

    class Deaf(Broken):
        def setsockopt(self, *_: object) -> None:
            pass

    def open_() -> Broken:
        opened.append(Deaf(receive=errno.ENOBUFS))
        return opened[-1]

    netlink.socket = Broken(receive=errno.ENOBUFS)
    monkeypatch.setattr(netlink, "_open", open_)
    with pytest.raises(KernelError) as raised:
        netlink.dump(*WHAT)
    assert (raised.value.errno, len(opened)) == (errno.ENOBUFS, 1)


def test_lost_notifications_are_an_error():
    netlink = Rtnetlink(groups=1)
    netlink.close()
    netlink.socket = Broken(receive=errno.ENOBUFS)
    with pytest.raises(KernelError):
        netlink.dump(*WHAT)


def test_a_modprobe_that_hangs_is_an_error(monkeypatch):
    def run(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("modprobe", 60)

    monkeypatch.setattr(modules, "find_modprobe", lambda: "/sbin/modprobe")
    monkeypatch.setattr(modules.subprocess, "run", run)
    with pytest.raises(KernelError, match="modprobe did not finish within"):
        modules.load(("ip_vs",))
    assert modules.probe_module("no_such_module").works is None


def test_changes_that_follow_each_other_are_reported_together(
    monkeypatch,
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
    netlink.watch(uapi.RTMGRP_LINK, lambda: calls.append((clock[0], seen[0])), stop)
    assert len(calls) <= 2 + 1.0 / netlink.CHANGE_INTERVAL_S
    assert calls[1][0] == 10
    assert calls[-1][1] == 100


def test_nothing_uses_select():
    """In the agent it would fail only on large nodes."""
    texts = {path: path.read_text() for path in Path(kbpf.__file__).parent.rglob("*.py")}
    assert not [path for path, text in texts.items() if "select.select(" in text]
