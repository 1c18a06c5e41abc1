"""Where threads leave what the one writer has to know.

A SimpleQueue, because its put() may be called from a signal handler. What arrives together is
taken together.
"""

import queue
from dataclasses import dataclass

from kbpf.model.events import Event


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing but a reason to look up: an address changed, a status is due, the end is near."""

    reason: str = ""


Item = Event | Wake


class Inbox:
    """Many put, one takes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Leaves an item; never waits."""
        self._queue.put(item)

    def get_batch(self, timeout: float, max_items: int = 20_000) -> list[Item]:
        """Everything that is there, after waiting for the first at most so long; [] if none."""
        try:
            items = [self._queue.get(timeout=max(0.0, timeout))]
        except queue.Empty:
            return []
        while len(items) < max_items:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return items
