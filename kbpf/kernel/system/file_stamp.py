# SPDX-License-Identifier: Apache-2.0
"""Polling files: a stamp that changes whenever the file does."""

import os
from pathlib import Path
from typing import Final, NamedTuple, Self


class FileStamp(NamedTuple):
    """Times in nanoseconds, size in bytes. A file that is replaced has another inode."""

    mtime_ns: int = 0
    ctime_ns: int = 0
    size: int = 0
    inode: int = 0
    device: int = 0

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls(status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)


UNREAD_STAMP: Final = FileStamp()
"""Differs from the stamp of every file, so that the file is read at the next poll."""


def read_stamp(path: str | Path) -> FileStamp | None:
    """Returns the stamp of a file; None if it is missing or cannot be reached."""
    try:
        return FileStamp.of(os.stat(path))
    except OSError:
        return None
