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

NO_RENAME: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV))
"""The folder cannot be changed, or the file is a mount point: then the file itself is written."""


def write(path: Path, text: str) -> None:
    """OSError where that is not possible; a regular file then holds what it held before, unless it
    could only be written in place.
    """
    data = text.encode()
    found = _stat(path)
    if found is not None and (not stat.S_ISREG(found.st_mode) or _is_descriptor(path)):
        _write_to(path, os.O_APPEND, data)
        return
    if found is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    target = Path(os.path.realpath(path))
    try:
        _replace(target, found, data)
    except OSError as error:
        if found is None or error.errno not in NO_RENAME:
            raise
        _write_to(target, os.O_TRUNC, data)


def _stat(path: Path) -> os.stat_result | None:
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


def _write_to(path: Path, flag: int, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | flag), "wb") as out:
        out.write(data)


def _replace(target: Path, found: os.stat_result | None, data: bytes) -> None:
    """With the mode and the owner of the file that was there."""
    fd, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(fd, "wb") as out:
            out.write(data)
            if found is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(fd, found.st_uid, found.st_gid)
            os.fchmod(fd, _mode() if found is None else stat.S_IMODE(found.st_mode))
        os.rename(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def _mode() -> int:
    """Of a new file."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
