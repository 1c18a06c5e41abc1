# SPDX-License-Identifier: Apache-2.0
"""Waits for descriptors with poll(2). select(2) does not accept descriptors above 1023, and a node
with a few hundred health checks has more.
"""

import select
from collections.abc import Iterable


def wait_readable(fds: Iterable[int], timeout: float) -> list[int]:
    """Returns the descriptors that are readable or failed, after at most `timeout` seconds."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, timeout) * 1000)]
