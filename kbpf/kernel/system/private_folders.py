"""Folders and files that no other user may change, and the lock that makes one agent their only
writer.

A trusted user is root or the one that we run as. The lock is flock(2) on the folder itself, and not
on a file inside: a bpffs holds no regular files, and agents of earlier versions lock the folder, so
that they and newer ones keep each other out. It needs to be opened for that, and a folder with mode
0700 can only be opened by a trusted user.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError

LOCK_TIMEOUT_S: Final = 5.0
"""How long to wait for an agent that is on its way out."""
PRIVATE_MODE: Final = 0o700
NON_OWNER_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def distrust_reason(info: os.stat_result) -> str:
    """Why what stat(2) says is not of a trusted user alone; empty if it is."""
    if info.st_uid not in {0, os.geteuid()}:
        return f"uid {info.st_uid} owns it"
    if not stat.S_ISLNK(info.st_mode) and info.st_mode & NON_OWNER_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(info.st_mode):04o})"
    return ""


def require_private(folder: Path) -> None:
    """KernelError unless trusted users alone can change what is in the folder, or put another one
    in its place: by an ancestor of theirs, or one that all may write to without the sticky bit.
    """
    hint = "remove it and start again, or choose another folder"
    for path in _path_components(folder):
        info = path.lstat()
        reason = distrust_reason(info)
        shared = path != folder and info.st_mode & stat.S_ISVTX and info.st_uid == 0
        if reason and not shared:
            raise KernelError(f"cannot trust the folder: {reason}", str(path), hint)


def _path_components(folder: Path) -> Iterator[Path]:
    """The folder, its ancestors, and those of what symbolic links on the way lead to."""
    absolute = folder.absolute()
    yield from dict.fromkeys(
        (*absolute.parents[::-1], absolute, *(absolute.resolve().parents), absolute.resolve())
    )


def lock_folder(folder: Path, timeout: float, hint: str) -> int:
    """A descriptor that makes this process the only agent at work in the folder, which becomes
    private. The lock ends when the descriptor is closed or the process ends, however it ends.
    Another's is waited for, so many seconds; then it is a KernelError with this hint (EAGAIN).
    """
    require_private(folder)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KernelError("cannot open the folder", str(folder), "run as root",
                          error.errno or 0) from error  # fmt: skip
    try:
        _make_private(fd, folder)
        _lock(fd, folder, timeout, hint)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_private(fd: int, folder: Path) -> None:
    """Earlier versions made it readable for everybody."""
    if not os.fstat(fd).st_mode & 0o077:
        return
    try:
        os.fchmod(fd, PRIVATE_MODE)
    except OSError as error:
        raise KernelError("cannot make the folder private", str(folder), "run as root",
                          error.errno or 0) from error  # fmt: skip


def _lock(fd: int, folder: Path, timeout: float, hint: str) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > deadline:
                holder = _untrusted_lock_holder(os.fstat(fd))
                what = f"{holder} holds the lock" if holder else "another agent is at work here"
                advice = "it is no agent: end this process" if holder else hint
                raise KernelError(what, str(folder), advice, error.errno or 0) from error
            time.sleep(0.05)
        else:
            return


def _untrusted_lock_holder(info: os.stat_result) -> str:
    """A process that holds a lock on this and is no agent, since a user runs it who is not trusted:
    it has opened the folder before it became private. Empty if none is seen.
    """
    lock_id = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == lock_id:
                process = Path("/proc") / fields[4]
                uid = process.stat().st_uid
                if uid not in {0, os.geteuid()}:
                    name = (process / "comm").read_text().strip()
                    return f"process {fields[4]} ({name}) of uid {uid}"
    return ""
