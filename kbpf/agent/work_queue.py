# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting Services are computed and programmed.

Small and large Services wait in separate queues, so that a small one never waits for the rest of a
large one. In each queue the cluster's own Services come first. The others are ordered by the time
when they were touched plus a time that grows with their size.
"""

import heapq
from typing import Final

from kbpf.model.objects import ServiceName

SECONDS_PER_ENDPOINT: Final = 1e-4
"""Per endpoint of each port: added to the time when a Service was touched, which only orders the
queue (no small Service waits for that time to come); and the length of a large one's cooldown after
it was computed. It is about ten times the cost of computing one, so no Service uses more than a
tenth of the time."""

LARGE_SERVICE_ENDPOINTS: Final = 1_000
"""From this many endpoints (summed over its ports) on, a Service is large: it has a cooldown."""

MAX_COOLDOWN_S: Final = 5.0
"""Limit for the cooldown, and so for how long a large Service may keep a removed endpoint."""


class ServiceQueue:
    """Holds each Service at most once, however often it changes. Not thread-safe."""

    def __init__(self) -> None:
        self._small: list[tuple[bool, float, ServiceName]] = []
        self._large: list[tuple[bool, float, ServiceName]] = []
        self._cooling_down: list[tuple[float, bool, float, ServiceName]] = []
        self._queued_since: dict[ServiceName, float] = {}  # oldest first
        self._cooldown_until: dict[ServiceName, float] = {}  # large Services only

    def __bool__(self) -> bool:
        return bool(self._queued_since)

    def add(self, name: ServiceName, size: int, system: bool, now: float) -> None:
        """Adds a Service that was touched."""
        if name in self._queued_since:
            return
        self._queued_since[name] = now
        until = self._cooldown_until.pop(name, now)
        if until > now:
            heapq.heappush(self._cooling_down, (until, not system, now + size * SECONDS_PER_ENDPOINT, name))
        else:
            heap = self._small if size < LARGE_SERVICE_ENDPOINTS else self._large
            heapq.heappush(heap, (not system, now + size * SECONDS_PER_ENDPOINT, name))

    def pop_small(self) -> ServiceName | None:
        """Removes and returns the small Service that comes first."""
        return self._pop(self._small)

    def pop_large(self, now: float) -> ServiceName | None:
        """Removes and returns the large Service that comes first, without those that cool down."""
        while self._cooling_down and self._cooling_down[0][0] <= now:
            heapq.heappush(self._large, heapq.heappop(self._cooling_down)[1:])
        return self._pop(self._large)

    def _pop(self, heap: list[tuple[bool, float, ServiceName]]) -> ServiceName | None:
        if not heap:
            return None
        _, _, name = heapq.heappop(heap)
        del self._queued_since[name]
        return name

    def mark_computed(self, name: ServiceName, size: int, now: float) -> None:
        """Records that the Service is up to date. A large one now has to cool down. Not called for
        the cluster's own Services.
        """
        for expired in [key for key, until in self._cooldown_until.items() if until <= now]:
            del self._cooldown_until[expired]
        if size >= LARGE_SERVICE_ENDPOINTS:
            self._cooldown_until[name] = now + min(size * SECONDS_PER_ENDPOINT, MAX_COOLDOWN_S)

    def next_due(self, now: float) -> float | None:
        """Returns when the next Service can be computed (time.monotonic); None if none waits."""
        if self._small or self._large:
            return now
        return self._cooling_down[0][0] if self._cooling_down else None

    @property
    def oldest_since(self) -> float | None:
        """Since when the longest-waiting Service has waited; None if none waits."""
        return next(iter(self._queued_since.values()), None)
