# SPDX-License-Identifier: Apache-2.0
"""The queue through which all other threads pass events to the agent's thread.

It is a SimpleQueue because put() may be called from a signal handler. Items that have arrived are
read as one batch.
"""

import queue
from dataclasses import dataclass
from typing import Final

from kbpf.model.events import Event


@dataclass(frozen=True, slots=True)
class Wake:
    """Wakes the agent's thread without an event. `reason`: "addresses" (those of the node changed),
    "listeners" (processes of the node listen on other ports), "server" (a connection to another API
    server), "self-check" (its connections failed) or "stop".
    """

    reason: str = ""


Item = Event | Wake
MAX_ITEMS: Final = 20_000


class Inbox:
    """Many threads put; the agent's thread reads."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Adds an item; never blocks."""
        self._queue.put(item)

    def get_batch(self, timeout: float) -> list[Item]:
        """Waits up to `timeout` seconds for the first item and returns all that have arrived, at
        most MAX_ITEMS; [] if none came.
        """
        try:
            items = [self._queue.get(timeout=max(0.0, timeout))]
        except queue.Empty:
            return []
        while len(items) < MAX_ITEMS:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return items
