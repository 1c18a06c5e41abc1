# SPDX-License-Identifier: Apache-2.0
"""Creates, enters and removes cgroup v2 folders."""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError, kernel_errors

REMOVE_TIMEOUT_S: Final = 30.0


def create(path: Path) -> Path:
    """Creates a cgroup, which must not exist yet."""
    with kernel_errors("cannot create the cgroup", str(path), "it needs root and a writable cgroup v2 mount"):
        path.mkdir()
    return path


@contextlib.contextmanager
def temporary(parent: Path, name: str) -> Iterator[Path]:
    """A cgroup that exists during the block; then its processes are killed and it is removed."""
    path = create(parent / name)
    try:
        yield path
    finally:
        remove(path)


def join(path: Path) -> None:
    """Moves this process into the cgroup; its children start there."""
    with kernel_errors("cannot enter the cgroup", str(path), ""):
        (path / "cgroup.procs").write_text(str(os.getpid()))


def kill(path: Path) -> None:
    """Sends SIGKILL to every process in this cgroup and below."""
    with contextlib.suppress(OSError):  # since Linux v5.14
        (path / "cgroup.kill").write_text("1")
        return
    for procs in [path / "cgroup.procs", *path.rglob("cgroup.procs")]:
        with contextlib.suppress(OSError):
            for pid in procs.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def remove(path: Path, timeout: float = REMOVE_TIMEOUT_S) -> bool:
    """Kills all processes in the cgroup and below and removes it; returns whether it existed."""
    if not path.is_dir():
        return False
    kill(path)
    deadline = time.monotonic() + timeout
    folders = [Path(folder) for folder, _, _ in os.walk(path, topdown=False)]
    for folder in folders:
        while not _try_rmdir(folder):
            # A killed process leaves its cgroup only once it has exited.
            if time.monotonic() > deadline:
                raise KernelError(
                    "cannot remove the cgroup", str(folder), "a process still runs in it", errno=errno.EBUSY
                )
            time.sleep(0.01)
    return True


def _try_rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise KernelError("cannot remove the cgroup", str(folder), errno=error.errno or 0) from error
    return True
