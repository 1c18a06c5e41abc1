"""Old sets and what belongs to them: deleted when no reader can have them in hand any more."""

from collections import deque
from collections.abc import Callable
from typing import Final

from kbpf.dataplane.bpf import writing
from kbpf.dataplane.bpf.ids import BackendTable
from kbpf.dataplane.bpf.plan import Retired
from kbpf.dataplane.bpf.tables import Tables

GRACE_SECONDS: Final = 1.0
"""From the flip to deleting the old set. A reader needs microseconds; lookup.h tells what happens
to one that the machine held up for longer."""

SHORT_GRACE_SECONDS: Final = 0.1
"""When there is no room for new sets, old ones go after this already."""


class Retiring:
    """A queue of what is old, by the time of its flip (time.monotonic). `cut` ends UDP sockets."""

    def __init__(self, tables: Tables, table: BackendTable, cut: Callable[[Retired], None]) -> None:
        self._tables, self._table, self._cut = tables, table, cut
        self._queue: deque[tuple[float, Retired]] = deque()

    def add(self, flipped: float, retired: Retired) -> None:
        """Queues it, if it is anything."""
        if retired:
            self._queue.append((flipped, retired))

    @property
    def waiting(self) -> list[Retired]:
        """What is still there."""
        return [retired for _, retired in self._queue]

    @property
    def due(self) -> float | None:
        """When the next one goes; None: there is none."""
        return self._queue[0][0] + GRACE_SECONDS if self._queue else None

    def until(self, flipped: float) -> None:
        """Deletes what was flipped until then."""
        while self._queue and self._queue[0][0] <= flipped:
            self._retire(self._queue.popleft()[1])

    def _retire(self, retired: Retired) -> None:
        writing.retire(self._tables, self._table, retired)
        self._cut(retired)
        if retired.forget_affinity:
            writing.forget_affinity(self._tables, retired.forget_affinity)
