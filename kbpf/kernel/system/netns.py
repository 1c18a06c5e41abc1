"""Network namespaces: which there are, and doing something inside one.

Entering is done by a thread of its own: setns(2) changes the calling thread only, and a thread
that could not come back must not go on.
"""

import ctypes
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from kbpf.errors import KernelError, kernel_errors

CLONE_NEWNET: Final = 0x40000000
SO_NETNS_COOKIE: Final = 71

T = TypeVar("T")


def read_cookie() -> int | None:
    """The number that BPF knows this thread's network namespace by (Linux v5.14); None before.

    KernelError if the kernel refuses for another reason than that it has no such option.
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
    """One path for each network namespace that a process or a name in /run/netns keeps alive."""
    inodes = set()
    netns_dir = Path("/run/netns")
    paths = [*(netns_dir.iterdir() if netns_dir.is_dir() else ())]
    paths += [Path("/proc") / pid / "ns/net" for pid in os.listdir("/proc") if pid.isdigit()]
    for path in paths:
        try:
            inode = path.stat().st_ino
        except OSError:
            continue  # the process has ended meanwhile, or the name is gone
        if inode not in inodes:
            inodes.add(inode)
            yield path


def run_in(path: Path, action: Callable[[], T]) -> T:
    """The result of `action`, run in that network namespace by a thread that then ends."""
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
    """Puts the calling thread into this network namespace, and what it starts from now on.

    Into its own one is nothing to do: setns(2) would ask for CAP_SYS_ADMIN there, too.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise KernelError(
            "cannot open the network namespace", str(path), errno=error.errno or 0
        ) from error
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if _is_own(fd):
            return
        if libc.setns(fd, CLONE_NEWNET):
            raise KernelError(
                "cannot enter the network namespace",
                str(path),
                "it needs CAP_SYS_ADMIN",
                errno=ctypes.get_errno(),
            )
    finally:
        os.close(fd)


def _is_own(fd: int) -> bool:
    """Whether this is the network namespace that the calling thread is in."""
    try:
        own = os.stat("/proc/thread-self/ns/net")
    except OSError:
        return False
    return os.path.samestat(os.fstat(fd), own)


def unshare() -> None:
    """Puts the calling thread into a new network namespace, empty, that ends with its last user."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise KernelError(
            "cannot make a network namespace", "", "it needs CAP_SYS_ADMIN", ctypes.get_errno()
        )
