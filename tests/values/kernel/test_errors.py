# SPDX-License-Identifier: Apache-2.0
"""An error of the kernel becomes one line that says what, where and why."""

import errno
import socket

import pytest

from kbpf.cli import app
from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.bpf import probe
from kbpf.kernel.system import netns


def refuse(code: int) -> None:
    raise OSError(code, "in the kernel's words")


def test_an_os_error_becomes_a_kernel_error():
    with pytest.raises(KernelError) as caught, kernel_errors("cannot do it", "there"):
        refuse(errno.ENOBUFS)
    assert str(caught.value) == "cannot do it (there): ENOBUFS; in the kernel's words"


@pytest.mark.parametrize("question", [probe.probe_netns_cookie, probe.probe_sock_destroy])
def test_a_probe_without_a_socket_says_why(question: object, monkeypatch):
    monkeypatch.setattr(socket, "socket", lambda *_: refuse(errno.ENOBUFS))
    assert question() == probe.Probe(False, "ENOBUFS")  # type: ignore[operator]


def test_the_netns_cookie_is_unknown_only_without_kernel_support(
    monkeypatch,
):
    for code, outcome in ((errno.ENOPROTOOPT, None), (errno.EAGAIN, KernelError)):
        monkeypatch.setattr(socket.socket, "getsockopt", lambda *_, code=code: refuse(code))
        if outcome is None:
            assert netns.read_cookie() is None
        else:
            with pytest.raises(outcome, match="EAGAIN"):
                netns.read_cookie()


def test_an_unexpected_os_error_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(app, "_dispatch", lambda _: netns.list_namespaces() and refuse(28))
    assert app.call(["run"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("kbpf: unexpected error: in the kernel's words: ENOSPC (kbpf/cli/app.py:")
