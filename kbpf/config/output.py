# SPDX-License-Identifier: Apache-2.0
"""Writes text to a path that the operator gave: a file, a symbolic link, a pipe, a terminal or a
device.

A regular file is replaced with a rename, so that a reader never sees half of it. Everything else
is written in place: a rename over /dev/stdout or a FIFO would remove it for all its users.
"""

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

NO_RENAME_ERRNOS: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV))
"""The folder cannot be changed or the file is a mount point; then the file is written in place."""


def write(path: Path, text: str) -> None:
    """Writes `text`. Raises OSError; a regular file then keeps its contents, unless it could only
    be written in place.
    """
    data = text.encode()
    old_stat = _stat_or_none(path)
    if old_stat is not None and (not stat.S_ISREG(old_stat.st_mode) or _is_descriptor(path)):
        _write_in_place(path, os.O_APPEND, data)
        return
    if old_stat is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    target = Path(os.path.realpath(path))
    try:
        _replace(target, old_stat, data)
    except OSError as error:
        if old_stat is None or error.errno not in NO_RENAME_ERRNOS:
            raise
        _write_in_place(target, os.O_TRUNC, data)


def _stat_or_none(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_descriptor(path: Path) -> bool:
    """Whether the path leads to a file descriptor through links, as /dev/stdout does. A shell's
    `>` has already opened that file, possibly for appending (`>>`).
    """
    for _ in range(40):  # MAXSYMLINKS of the kernel
        if path.absolute().parent.resolve().is_relative_to("/proc"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


def _write_in_place(path: Path, flag: int, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | flag), "wb") as file:
        file.write(data)


def _replace(target: Path, old_stat: os.stat_result | None, data: bytes) -> None:
    """Replaces the file, keeping its mode and owner."""
    fd, temporary_path = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(fd, "wb") as file:
            file.write(data)
            if old_stat is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(fd, old_stat.st_uid, old_stat.st_gid)
            os.fchmod(fd, _new_file_mode() if old_stat is None else stat.S_IMODE(old_stat.st_mode))
        os.rename(temporary_path, target)
    except BaseException:
        os.unlink(temporary_path)
        raise


def _new_file_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
