"""Waiting for descriptors by poll(2): select(2) takes none above 1023, and a node with some hundred
health checks has more open.
"""

import select
from collections.abc import Iterable


def wait_readable(fds: Iterable[int], timeout: float) -> list[int]:
    """Those of them that can be read, or have failed, after waiting at most so long."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, timeout) * 1000)]
