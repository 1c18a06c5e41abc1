# SPDX-License-Identifier: Apache-2.0
"""Deletes old sets and their entries after a grace period, much longer than a reader needs."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.ids import BackendTable, SharedTables
from kbpf.dataplane.bpf.state import commit
from kbpf.dataplane.bpf.state.plan import Retired
from kbpf.errors import KernelError

GRACE_PERIOD_S: Final = 1.0
"""Time between the flip and the deletion of the old set, in seconds. A reader needs microseconds;
lookup.h says what happens to one that was delayed for longer.
"""

SHORT_GRACE_PERIOD_S: Final = 0.1
"""The same when a map is three quarters full: apply() then deletes sets itself (quotas.py)."""


class GraceQueue:
    """A queue of retired entries in the order of their flips (time.monotonic). `cut_udp` is called
    when all entries of a flip are deleted.
    """

    def __init__(
        self,
        agent_maps: AgentMaps,
        backend_table: BackendTable,
        shared_tables: SharedTables,
        cut_udp: Callable[[Retired], None],
    ) -> None:
        self._agent_maps, self._backend_table, self._shared_tables, self._cut_udp = (
            agent_maps,
            backend_table,
            shared_tables,
            cut_udp,
        )
        self._queue: deque[tuple[float, Retired]] = deque()
        self._steps: commit.DeletionSteps | None = None  # of the deletion in progress
        self._deleting: Retired | None = None  # what these steps delete

    def add(self, flipped: float, retired: Retired) -> None:
        """Queues retired entries, if any."""
        if retired:
            self._queue.append((flipped, retired))

    @property
    def pending(self) -> list[Retired]:
        """Retired entries that have not been deleted."""
        return [retired for _, retired in self._queue]

    @property
    def uncut(self) -> list[Retired]:
        """Retired entries for which `cut_udp` has not been called."""
        return self.pending if self._deleting is None else [self._deleting, *self.pending]

    @property
    def due(self) -> float | None:
        """When the next deletion is due; None if the queue is empty."""
        if self._steps is not None:
            return float("-inf")
        return self._queue[0][0] + GRACE_PERIOD_S if self._queue else None

    def delete_until(self, flipped: float, seconds: float = float("inf")) -> None:
        """Deletes what was retired by flips up to `flipped`, for this many seconds, but at least
        one piece. Does nothing if `seconds` is 0 or less. After a KernelError the next call
        continues with the piece that failed.
        """
        deadline = time.perf_counter() + seconds
        while seconds > 0 and (self._steps is not None or (self._queue and self._queue[0][0] <= flipped)):
            if self._steps is None:
                _, self._deleting = self._queue.popleft()
                self._steps = self._retire(self._deleting)
            result = next(self._steps, self)
            if result is self:
                self._steps = self._deleting = None
            elif isinstance(result, KernelError):
                raise result
            if time.perf_counter() >= deadline:
                return

    def _retire(self, retired: Retired) -> commit.DeletionSteps:
        yield from commit.delete_retired(self._agent_maps, self._backend_table, self._shared_tables, retired)
        self._cut_udp(retired)
