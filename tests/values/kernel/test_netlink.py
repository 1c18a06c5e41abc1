# SPDX-License-Identifier: Apache-2.0
"""Every error of a netlink socket is a KernelError."""

import errno
import socket
import subprocess
from collections.abc import Callable

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.net import addresses, uapi
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
def test_an_error_of_the_socket_is_a_kernel_error(verb: str, at: str):
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


def test_a_dump_is_retried_only_once(monkeypatch: pytest.MonkeyPatch):
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


def test_a_modprobe_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def run(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("modprobe", 60)

    monkeypatch.setattr(modules, "find_modprobe", lambda: "/sbin/modprobe")
    monkeypatch.setattr(modules.subprocess, "run", run)
    with pytest.raises(KernelError, match="modprobe did not finish within"):
        modules.load(("ip_vs",))
    assert modules.probe_module("no_such_module").works is None
