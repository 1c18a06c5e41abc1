"""Waiting for descriptors by poll(2): select(2) takes none above 1023, and a node with some hundred
health checks has more open.
"""

import select
from collections.abc import Iterable


def readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Those of them that can be read, or have failed, after waiting at most so long."""
    poll = select.poll()
    for number in descriptors:
        poll.register(number, select.POLLIN)
    return [number for number, _ in poll.poll(max(0.0, seconds) * 1000)]
