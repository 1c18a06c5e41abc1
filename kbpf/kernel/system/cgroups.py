"""Folders of the cgroup v2 hierarchy: making one, entering it, ending what runs in it."""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError

REMOVE_TIMEOUT_S: Final = 30.0


def create(path: Path) -> Path:
    """A new cgroup. It must not be there yet."""
    try:
        path.mkdir()
    except OSError as error:
        raise KernelError(
            "cannot make a cgroup", str(path), "it needs root and a writable cgroup v2 mount",
            errno=error.errno or 0,
        ) from error  # fmt: skip
    return path


@contextlib.contextmanager
def temporary(parent: Path, name: str) -> Iterator[Path]:
    """A cgroup below `parent` for as long as the block lasts; then it and what runs in it end."""
    path = create(parent / name)
    try:
        yield path
    finally:
        remove(path)


def join(path: Path) -> None:
    """Moves this process there; what it starts from now on starts there."""
    try:
        (path / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise KernelError("cannot enter the cgroup", str(path), errno=error.errno or 0) from error


def kill(path: Path) -> None:
    """SIGKILL to every process in this cgroup and below."""
    with contextlib.suppress(OSError):  # Linux v5.14: all at once
        (path / "cgroup.kill").write_text("1")
        return
    for procs in [path / "cgroup.procs", *path.rglob("cgroup.procs")]:
        with contextlib.suppress(OSError):
            for pid in procs.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def remove(path: Path, timeout: float = REMOVE_TIMEOUT_S) -> bool:
    """Ends what runs there and removes the cgroup and those below it; whether it was there."""
    if not path.is_dir():
        return False
    kill(path)
    deadline = time.monotonic() + timeout
    folders = [Path(folder) for folder, _, _ in os.walk(path, topdown=False)]
    for folder in folders:
        while not _try_rmdir(folder):
            # A process that was killed leaves its cgroup when it has ended, a moment later.
            if time.monotonic() > deadline:
                raise KernelError(
                    "cannot remove the cgroup", str(folder), "something still runs in it",
                    errno=errno.EBUSY,
                )  # fmt: skip
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
        raise KernelError(
            "cannot remove the cgroup", str(folder), errno=error.errno or 0
        ) from error
    return True
