"""The Services that wait to be computed and programmed, and in which order.

Small Services and large ones wait apart, so that a small one never waits for the rest of a large
one. Of each kind the cluster's own come first. Others are due some time after they were touched,
and later the more there is to do.
"""

import heapq
from typing import Final

from kbpf.model.objects import ServiceName

SECONDS_EACH: Final = 1e-4
"""How much later a Service is due for each of its ports' endpoints, and how long it rests after it
was computed: some ten times what that takes, so no Service has more than a tenth of the time."""

LARGE: Final = 1_000
"""Ports' endpoints from which on a Service is large: it rests after it was computed."""

LONGEST_REST_SECONDS: Final = 5.0
"""An endpoint that is gone must not be used for longer than that."""


class Work:
    """Each Service waits once, whatever happens to it meanwhile. One thread only."""

    def __init__(self) -> None:
        self._small: list[tuple[bool, float, ServiceName]] = []
        self._large: list[tuple[bool, float, ServiceName]] = []
        self._resting: list[tuple[float, bool, float, ServiceName]] = []
        self._since: dict[ServiceName, float] = {}  # in the order of time
        self._rested: dict[ServiceName, float] = {}  # large ones: when they may be computed again

    def __bool__(self) -> bool:
        return bool(self._since)

    def add(self, name: ServiceName, size: int, system: bool, now: float) -> None:
        """It has been touched."""
        if name in self._since:
            return
        self._since[name] = now
        until = self._rested.pop(name, now)
        if until > now:
            heapq.heappush(self._resting, (until, not system, now + size * SECONDS_EACH, name))
        else:
            heap = self._small if size < LARGE else self._large
            heapq.heappush(heap, (not system, now + size * SECONDS_EACH, name))

    def pop_small(self) -> ServiceName | None:
        """The small Service that is due next, which waits no longer."""
        return self._pop(self._small)

    def pop_large(self, now: float) -> ServiceName | None:
        """The large Service that is due next, which waits no longer."""
        while self._resting and self._resting[0][0] <= now:
            heapq.heappush(self._large, heapq.heappop(self._resting)[1:])
        return self._pop(self._large)

    def _pop(self, heap: list[tuple[bool, float, ServiceName]]) -> ServiceName | None:
        if not heap:
            return None
        _, _, name = heapq.heappop(heap)
        del self._since[name]
        return name

    def computed(self, name: ServiceName, size: int, now: float) -> None:
        """It is up to date. A large one is not computed again for a while."""
        for other in [each for each, until in self._rested.items() if until <= now]:
            del self._rested[other]
        if size >= LARGE:
            self._rested[name] = now + min(size * SECONDS_EACH, LONGEST_REST_SECONDS)

    def due(self, now: float) -> float | None:
        """When there is something to compute (time.monotonic)."""
        if self._small or self._large:
            return now
        return self._resting[0][0] if self._resting else None

    @property
    def oldest(self) -> float | None:
        """Since when the one waits that waits longest."""
        return next(iter(self._since.values()), None)
