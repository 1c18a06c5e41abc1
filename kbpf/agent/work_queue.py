"""The Services that wait to be computed and programmed, and in which order.

Small Services and large ones wait apart, so that a small one never waits for the rest of a large
one. Of each kind the cluster's own come first. Others are due some time after they were touched,
and later the more there is to do.
"""

import heapq
from typing import Final

from kbpf.model.objects import ServiceName

SECONDS_PER_ENDPOINT: Final = 1e-4
"""How much later a Service is due for each of its ports' endpoints, and how long it rests after it
was computed: some ten times what that takes, so no Service has more than a tenth of the time."""

LARGE_SERVICE_ENDPOINTS: Final = 1_000
"""Ports' endpoints from which on a Service is large: it rests after it was computed."""

MAX_COOLDOWN_S: Final = 5.0
"""An endpoint that is gone must not be used for longer than that."""


class ServiceQueue:
    """Each Service waits once, whatever happens to it meanwhile. One thread only."""

    def __init__(self) -> None:
        self._small: list[tuple[bool, float, ServiceName]] = []
        self._large: list[tuple[bool, float, ServiceName]] = []
        self._cooling_down: list[tuple[float, bool, float, ServiceName]] = []
        self._queued_since: dict[ServiceName, float] = {}  # in the order of time
        self._cooldown_until: dict[
            ServiceName, float
        ] = {}  # large ones: when they may be computed again

    def __bool__(self) -> bool:
        return bool(self._queued_since)

    def add(self, name: ServiceName, size: int, system: bool, now: float) -> None:
        """It has been touched."""
        if name in self._queued_since:
            return
        self._queued_since[name] = now
        until = self._cooldown_until.pop(name, now)
        if until > now:
            heapq.heappush(
                self._cooling_down, (until, not system, now + size * SECONDS_PER_ENDPOINT, name)
            )
        else:
            heap = self._small if size < LARGE_SERVICE_ENDPOINTS else self._large
            heapq.heappush(heap, (not system, now + size * SECONDS_PER_ENDPOINT, name))

    def pop_small(self) -> ServiceName | None:
        """The small Service that is due next, which waits no longer."""
        return self._pop(self._small)

    def pop_large(self, now: float) -> ServiceName | None:
        """The large Service that is due next, which waits no longer."""
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
        """It is up to date. A large one is not computed again for a while."""
        for expired in [key for key, until in self._cooldown_until.items() if until <= now]:
            del self._cooldown_until[expired]
        if size >= LARGE_SERVICE_ENDPOINTS:
            self._cooldown_until[name] = now + min(size * SECONDS_PER_ENDPOINT, MAX_COOLDOWN_S)

    def next_due(self, now: float) -> float | None:
        """When there is something to compute (time.monotonic)."""
        if self._small or self._large:
            return now
        return self._cooling_down[0][0] if self._cooling_down else None

    @property
    def oldest_since(self) -> float | None:
        """Since when the one waits that waits longest."""
        return next(iter(self._queued_since.values()), None)
