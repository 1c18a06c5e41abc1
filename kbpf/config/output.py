"""Writing a text to where an operator points: a file, a link to one, a pipe, a terminal, a device.

A regular file is replaced by one rename, so that a reader never sees half of it. Everything else is
written to, and stays what it is: a rename over /dev/stdout or a FIFO would take it away from
everybody.
"""

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

NO_RENAME_ERRNOS: Final = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
)
"""The folder cannot be changed, or the file is a mount point: then the file itself is written."""


def write(path: Path, text: str) -> None:
    """OSError where that is not possible; a regular file then holds what it held before, unless it
    could only be written in place.
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
    """Whether links lead to a descriptor of a process, as /dev/stdout does: a shell's `>` has
    opened the file already, and `>>` for appending.
    """
    for _ in range(40):  # the kernel follows no more
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
    """With the mode and the owner of the file that was there."""
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
    """Of a new file."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
