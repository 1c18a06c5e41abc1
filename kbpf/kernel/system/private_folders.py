# SPDX-License-Identifier: Apache-2.0
"""Folders that no other user may change, and the lock that makes one agent their only writer.

A trusted user is root or the user that we run as. The lock is flock(2) on the folder itself, not
on a file in it: a bpffs has no regular files, and earlier versions lock the folder too, so old and
new agents exclude each other. Locking requires opening the folder, and with mode 0700 only a
trusted user can open it.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError, kernel_errors

LOCK_TIMEOUT_S: Final = 5.0
"""How long to wait for the lock of an agent that is shutting down."""
PRIVATE_MODE: Final = 0o700
NON_OWNER_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def distrust_reason(info: os.stat_result) -> str:
    """Why an untrusted user could change a file with this stat(2) result; "" if none could."""
    if info.st_uid not in {0, os.geteuid()}:
        return f"uid {info.st_uid} owns it"
    if not stat.S_ISLNK(info.st_mode) and info.st_mode & NON_OWNER_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(info.st_mode):04o})"
    return ""


def require_private(folder: Path) -> None:
    """Raises KernelError unless only trusted users can change the folder's contents or replace the
    folder, through an ancestor that they own or that is writable for all without the sticky bit.
    """
    hint = "remove it and start again, or choose another folder"
    for path in _path_components(folder):
        info = path.lstat()
        reason = distrust_reason(info)
        shared = path != folder and info.st_mode & stat.S_ISVTX and info.st_uid == 0
        if reason and not shared:
            raise KernelError(f"cannot trust the folder: {reason}", str(path), hint)


def _path_components(folder: Path) -> Iterator[Path]:
    """Yields the folder, its ancestors, and the ancestors of its target if it
    has symbolic links.
    """
    absolute = folder.absolute()
    yield from dict.fromkeys((*absolute.parents[::-1], absolute, *(absolute.resolve().parents), absolute.resolve()))


def lock_folder(folder: Path, timeout: float, hint: str) -> int:
    """Locks the folder and makes it private; returns the descriptor that holds the lock.

    This process is then the only agent that uses the folder, until the descriptor is closed or the
    process exits for any reason. Waits up to `timeout` seconds for another agent's lock; then
    raises KernelError (EAGAIN) with this hint.
    """
    require_private(folder)
    with kernel_errors("cannot open the folder", str(folder), "run as root"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _make_private(fd, folder)
        _lock(fd, folder, timeout, hint)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_private(fd: int, folder: Path) -> None:
    # Earlier versions made it readable for everyone.
    if os.fstat(fd).st_mode & 0o077:
        with kernel_errors("cannot make the folder private", str(folder), "run as root"):
            os.fchmod(fd, PRIVATE_MODE)


def _lock(fd: int, folder: Path, timeout: float, hint: str) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > deadline:
                holder = _untrusted_lock_holder(os.fstat(fd))
                what = f"{holder} holds the lock" if holder else "another agent is at work here"
                advice = "it is not an agent: stop this process" if holder else hint
                raise KernelError(what, str(folder), advice, error.errno or 0) from error
            time.sleep(0.05)
        else:
            return


def _untrusted_lock_holder(info: os.stat_result) -> str:
    """Describes a process of an untrusted user that holds the lock; it opened the folder before it
    became private. Returns "" if there is none.
    """
    # As in proc_locks(5): device in hexadecimal, inode in decimal.
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
