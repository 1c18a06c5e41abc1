# SPDX-License-Identifier: Apache-2.0
"""What is tried or looked at again: how long to wait before the next attempt (Backoff; nothing can
become a tight loop), for a descriptor, and whether a file has changed (FileStamp).
"""

import os
import select
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

MAX_EXPONENT: Final = 20


@dataclass(slots=True)
class Backoff:
    """The delays of one thing that is tried again: `initial` seconds, doubled each time up to
    `maximum`.

    - With `rng`, which returns 0 to 1, times a random factor between 1/2 and 1, so that the nodes
      of a cluster do not return in step.
    - After a clean end: at once, but a second one without a steady time in between counts as a
      failure.
    - Only what was healthy for `steady_after` seconds resets it. The first signs of success do not:
      a server may send headers, a list or a few events and still fail each time.
    """

    initial: float
    maximum: float
    rng: Callable[[], float] = lambda: 1.0
    steady_after: float = float("inf")
    tries: int = 0

    def next_delay(self, *, failed: bool = True, healthy_for: float = 0.0, retry_after: float = 0.0) -> float:
        """Returns the seconds to wait now. `healthy_for`: how many seconds it worked, 0 if never.
        `retry_after`: the minimum that the other side has asked for.
        """
        if healthy_for >= self.steady_after:
            self.tries = 0
        is_immediate = not failed and self.tries == 0
        jitter = 0.5 + self.rng() / 2
        delay = min(self.maximum, self.initial * 2.0 ** min(self.tries, MAX_EXPONENT)) * jitter
        self.tries += 1
        # A minimum: we wait 1 to 1.5 times as long, so that clients do not return together.
        return max(0.0 if is_immediate else delay, retry_after * (0.5 + jitter))


def wait_readable(fds: Iterable[int], timeout: float) -> list[int]:
    """Returns the descriptors that are readable or failed, after at most `timeout` seconds. By
    poll(2): select(2) does not accept descriptors above 1023, and a node with a few hundred health
    checks has more.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, timeout) * 1000)]


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
