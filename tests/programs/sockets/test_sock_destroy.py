# SPDX-License-Identifier: Apache-2.0
"""Why destroying UDP sockets of pods takes CAP_SYS_ADMIN, for setns(2): the alternative of Linux
6.5 and later does not reach them.

Only iterator programs may call the kfunc bpf_sock_destroy(). The iterator of UDP sockets shows
those of one network namespace, that of the process which creates it. Iterators that show sockets of
all namespaces pass pointers that the verifier does not accept for the kfunc. On a kernel that
accepts them a test here fails; there the agent can do without the capability.
"""

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kbpf.kernel.bpf import syscalls
from kbpf.kernel.bpf.btf import BTF_KIND_FUNC, Btf
from tests.programs.packets.tc.net import insn
from tests.support.features import needs
from tests.support.lab.namespace import Namespace, made

TRACING, TRACE_ITER = 26, 28


def function_id(name: str) -> int:
    """The BTF id of this function of the kernel."""
    with Btf.load() as kernel:
        return kernel.find(name, BTF_KIND_FUNC)


class Target(NamedTuple):
    """An iterator; the offset in its context of the socket; which sockets it shows; the verifier's
    error for passing the socket to the kfunc, "" if it accepts.
    """

    name: str
    offset: int
    shows: str
    refused: str = ""


TARGETS = [
    Target("udp", 8, "one network namespace"),
    Target("bpf_sk_storage_map", 16, "all with storage in one map", "must be referenced or trusted"),
    Target("sockmap", 24, "all in one map", "must be referenced or trusted"),
]


def program(target: Target) -> bytes:
    """A program that destroys the socket, if there is one."""
    destroy = function_id("bpf_sock_destroy")
    code = insn(0x79, 0x11, target.offset)  # r1 = ctx->sk
    code += insn(0x55, 1, 2) + insn(0xB7) + insn(0x95)  # if it is null, return 0
    return code + insn(0x85, 0x20, 0, destroy) + insn(0xB7) + insn(0x95)


def load(target: Target) -> tuple[int, str]:
    """A descriptor and "", or -1 and the verifier's log."""
    log = ctypes.create_string_buffer(1 << 16)
    options = syscalls.ProgLoadOpts(
        expected_attach_type=TRACE_ITER,
        attach_btf_id=function_id(f"bpf_iter_{target.name}"),
        log_level=1,
        log_size=len(log),
        log_buf=ctypes.addressof(log),
    )
    code = program(target)
    fd = syscalls.lib().bpf_prog_load(TRACING, b"kbpf_test", b"GPL", code, len(code) // 8, ctypes.byref(options))
    return (fd, "") if fd >= 0 else (-1, log.value.decode())


@contextlib.contextmanager
def iterator(program_fd: int) -> Iterator[int]:
    """A descriptor of the iterator; reading it runs the program for each socket."""
    lib = syscalls.lib()
    link = lib.bpf_link_create(program_fd, 0, TRACE_ITER, None)
    assert link >= 0, os.strerror(ctypes.get_errno())
    fd = lib.bpf_iter_create(link)
    assert fd >= 0
    try:
        yield fd
    finally:
        os.close(fd)
        os.close(link)


def connected(where: Namespace) -> socket.socket:
    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.connect(("127.0.0.1", 9))
        return made

    where.ip("link set lo up")
    return where.do(make)


def is_destroyed(one: socket.socket) -> bool:
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNABORTED


@needs("sock_destroy")
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(
            target,
            # a kernel that refuses one of them refuses both
            marks=needs("socket_iterator") if "map" in target.name else (),
            id=target.name,
        )
        for target in TARGETS
    ],
)
def test_verifier_accepts_bpf_sock_destroy_by_iterator(target: Target):
    fd, said = load(target)
    if fd >= 0:
        os.close(fd)
    assert bool(said) is bool(target.refused), said
    assert target.refused in said


@needs("sock_destroy")
def test_udp_iterator_shows_only_its_creators_namespace():
    fd, said = load(TARGETS[0])
    assert fd >= 0, said

    def run() -> None:
        with iterator(fd) as reading:
            while os.read(reading, 4096):
                pass

    with made() as here, made() as there, connected(here) as first, connected(there) as second:
        here.do(run)
        assert (is_destroyed(first), is_destroyed(second)) == (True, False)
        there.do(run)
        assert is_destroyed(second)
    os.close(fd)
