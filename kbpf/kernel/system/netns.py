# SPDX-License-Identifier: Apache-2.0
"""Network namespaces: listing them, and running code inside one.

setns(2) changes only the calling thread, and a thread that cannot return must not continue. So
run_in() uses a new thread that exits afterwards.
"""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from kbpf.errors import kernel_errors
from kbpf.kernel.system.process import call_libc

CLONE_NEWNET: Final = 0x40000000
SO_NETNS_COOKIE: Final = 71

T = TypeVar("T")


def read_cookie() -> int | None:
    """The cookie of this thread's network namespace, as BPF programs see it (Linux v5.14); None on
    older kernels.

    Raises KernelError if the kernel refuses for any reason other than an unknown option.
    """
    with (
        kernel_errors("cannot read the cookie of the network namespace", "SO_NETNS_COOKIE"),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        try:
            raw = probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
            return None
    return int.from_bytes(raw, "little")


def list_namespaces() -> Iterator[Path]:
    """Yields one path for each network namespace that a process or a name in /run/netns keeps
    alive.
    """
    inodes = set()
    netns_dir = Path("/run/netns")
    paths = [*(netns_dir.iterdir() if netns_dir.is_dir() else ())]
    paths += [Path("/proc") / pid / "ns/net" for pid in os.listdir("/proc") if pid.isdigit()]
    for path in paths:
        try:
            inode = path.stat().st_ino
        except OSError:
            continue  # the process has exited, or the name was removed
        if inode not in inodes:
            inodes.add(inode)
            yield path


def run_in(path: Path, action: Callable[[], T]) -> T:
    """Runs `action` in that network namespace, in a new thread; returns its result."""
    outcome: list[T | BaseException] = []

    def run_action() -> None:
        try:
            enter(path)
            outcome.append(action())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run_action, name=f"netns-{path.name}")
    thread.start()
    thread.join()
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result


def enter(path: Path) -> None:
    """Moves the calling thread, and the threads and processes that it starts later, into this
    network namespace.

    Does nothing if the thread is already there: setns(2) would require CAP_SYS_ADMIN even then.
    """
    with kernel_errors("cannot open the network namespace", str(path), ""):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not _is_own(fd):
            with kernel_errors("cannot enter the network namespace", str(path), "it needs CAP_SYS_ADMIN"):
                call_libc("setns", fd, CLONE_NEWNET)
    finally:
        os.close(fd)


def _is_own(fd: int) -> bool:
    """Whether the calling thread is in this network namespace."""
    try:
        own = os.stat("/proc/thread-self/ns/net")
    except OSError:
        return False
    return os.path.samestat(os.fstat(fd), own)


def unshare() -> None:
    """Moves the calling thread to a new, empty network namespace."""
    with kernel_errors("cannot create a network namespace", "", "it needs CAP_SYS_ADMIN"):
        call_libc("unshare", CLONE_NEWNET)
