# SPDX-License-Identifier: Apache-2.0
"""Computes the desired state of the Services that changed, a slice of time at a time, and measures
how long events take to be programmed.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Set
from typing import Final, NamedTuple

from kbpf.agent.work_queue import ServiceQueue
from kbpf.model.config import Config, is_system_service
from kbpf.model.desired import ServicePortKey
from kbpf.model.events import Delete, Event, Upsert
from kbpf.model.objects import ServiceName
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ChangeSet, ObjectStore

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
