"""Large Service ports wait until small ones are programmed, and then have their turn in slices."""

import heapq
from collections import Counter
from collections.abc import KeysView
from typing import NamedTuple

from kbpf.dataplane.bpf.changes.capacity import CapacityAccount
from kbpf.dataplane.bpf.changes.plan import Planner, ProgrammedPort
from kbpf.dataplane.bpf.changes.quotas import Priority
from kbpf.model.desired import ServicePortKey
from kbpf.model.objects import ServiceName


class ApplyPlan(NamedTuple):
    """What one apply() plans, and the Service ports as they will be programmed."""

    planner: Planner
    capacity: CapacityAccount
    programmed: dict[ServicePortKey, ProgrammedPort | None]


class DeferredQueue:
    """A queue in the order of limits.order_of(); a Service port waits in it once."""

    def __init__(self) -> None:
        self._priorities: dict[ServicePortKey, Priority] = {}
        self._heap: list[tuple[Priority, ServicePortKey]] = []  # also those that have left since
        self._services: Counter[ServiceName] = Counter()

    def __len__(self) -> int:
        return len(self._priorities)

    @property
    def services(self) -> KeysView[ServiceName]:
        """The Services that have ports here: a live view."""
        return self._services.keys()

    def add(self, key: ServicePortKey, priority: Priority) -> None:
        """A Service port waits, from now on in this order."""
        old = self._priorities.get(key)
        if old == priority:
            return
        if old is None:
            self._services[key.service] += 1
        self._priorities[key] = priority
        heapq.heappush(self._heap, (priority, key))

    def discard(self, key: ServicePortKey) -> None:
        """It waits no longer, if it did."""
        if self._priorities.pop(key, None) is None:
            return
        self._services[key.service] -= 1
        if not self._services[key.service]:
            del self._services[key.service]

    def peek(self) -> ServicePortKey | None:
        """The one whose turn is next. It stays."""
        while self._heap:
            priority, key = self._heap[0]
            if self._priorities.get(key) == priority:
                return key
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        """All leave."""
        self._priorities.clear()
        self._heap.clear()
        self._services.clear()
