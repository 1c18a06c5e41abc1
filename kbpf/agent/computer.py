# SPDX-License-Identifier: Apache-2.0
"""Computes the desired state of the Services that changed, a slice of time at a time, in the order of
ServiceQueue, and measures how long events take to be programmed.

Small and large Services wait in separate queues, so that a small one never waits for the rest of a
large one. In each queue the cluster's own Services come first. The others are ordered by the time
when they were touched plus a time that grows with their size.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Set
from typing import Final, NamedTuple

from kbpf.model.config import Config, is_system_service
from kbpf.model.desired import ServicePortKey
from kbpf.model.events import Delete, Event, Upsert
from kbpf.model.objects import ServiceName
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ChangeSet, ObjectStore

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


MAX_LATENCY_SAMPLES: Final = 4096
"""The latency from an event's arrival to the map is computed over this many events."""


class ServiceComputation(NamedTuple):
    """A Service that is being computed, and the arrival times of the events that led to it."""

    name: ServiceName
    steps: Generator[set[ServicePortKey]]
    arrival_times: list[float]


class ServiceComputer:
    """Used by the agent's thread only. `on_changed` gets the Service ports whose desired state has
    changed.
    """

    def __init__(self, config: Config, store: ObjectStore, on_changed: Callable[[set[ServicePortKey]], None]) -> None:
        self._config, self._store, self._on_changed = config, store, on_changed
        self.builder = DesiredStateBuilder()
        self._queue = ServiceQueue()
        self._large: ServiceComputation | None = None
        self._uncomputed_arrivals: dict[ServiceName, list[float]] = {}  # of events not computed yet
        # of events computed but not programmed yet
        self._unprogrammed_arrivals: dict[ServiceName, list[float]] = {}
        self._latencies: deque[float] = deque(maxlen=MAX_LATENCY_SAMPLES)

    def record_arrivals(self, events: Iterable[Event], touched: ChangeSet) -> None:
        """Records when the changes to be programmed arrived."""
        for event in events:
            if not isinstance(event, Upsert | Delete) or not event.received_at:
                continue
            name = self._store.service_of(event)
            if name in touched.services:
                self._uncomputed_arrivals.setdefault(name, []).append(event.received_at)

    def enqueue(self, names: Iterable[ServiceName], now: float) -> None:
        for name in names:
            system = is_system_service(name, self._config)
            self._queue.add(name, self._store.estimate_cost(name), system, now)

    @property
    def is_busy(self) -> bool:
        return bool(self._queue or self._large)

    @property
    def oldest_since(self) -> float | None:
        """Since when the longest-waiting Service has waited; None if none waits."""
        return self._queue.oldest_since

    def next_due(self, now: float) -> float | None:
        return now if self._large is not None else self._queue.next_due(now)

    def compute_small(self, seconds: float) -> bool:
        """Computes waiting small Services for at most `seconds`; returns whether there were any."""
        deadline, computed_any = time.monotonic() + seconds, False
        while (name := self._queue.pop_small()) is not None:
            if self._large is not None and self._large.name == name:
                # Otherwise the older computation would overwrite the result of the newer one.
                self._finish(self._large)
            self._finish(self._start(name))
            computed_any = True
            if time.monotonic() >= deadline:
                break
        return computed_any

    def advance_large(self, seconds: float, may_start: bool) -> None:
        """Computes a large Service for at most `seconds`; a new one only if it `may_start`."""
        deadline = time.monotonic() + seconds
        if self._large is None and may_start:
            name = self._queue.pop_large(time.monotonic())
            self._large = None if name is None else self._start(name)
        while self._large is not None:
            self._step(self._large)
            if time.monotonic() >= deadline:
                break

    def _start(self, name: ServiceName) -> ServiceComputation:
        steps = self.builder.update_service_in_steps(name, self._store, self._config)
        return ServiceComputation(name, steps, self._uncomputed_arrivals.pop(name, []))

    def _finish(self, computation: ServiceComputation) -> None:
        while self._step(computation):
            pass

    def _step(self, computation: ServiceComputation) -> bool:
        """Runs one step; returns False when the computation is complete."""
        changed_keys = next(computation.steps, None)
        if changed_keys is not None:
            self._on_changed(changed_keys)
            return True
        name = computation.name
        if self._large is computation:
            self._large = None
        self._unprogrammed_arrivals.setdefault(name, []).extend(computation.arrival_times)
        if not is_system_service(name, self._config):
            self._queue.mark_computed(name, self._store.estimate_cost(name), time.monotonic())
        return False

    def record_programmed(self, deferred: Set[ServiceName]) -> list[float]:
        """Records the latency of everything programmed, except Services that the data plane
        deferred. Returns the latencies of these events, in seconds.
        """
        now = time.monotonic()
        latencies = [
            now - arrival_time
            for name in self._unprogrammed_arrivals.keys() - deferred
            for arrival_time in self._unprogrammed_arrivals.pop(name)
        ]
        self._latencies.extend(latencies)
        return latencies

    def latencies(self, *quantiles: float) -> list[float]:
        """From an event's arrival until it is programmed, in milliseconds; 0.0 before the first
        event.
        """
        ordered = sorted(self._latencies) or [0.0]
        last = len(ordered) - 1
        return [round(ordered[min(last, int(len(ordered) * quantile))] * 1000, 3) for quantile in quantiles]
