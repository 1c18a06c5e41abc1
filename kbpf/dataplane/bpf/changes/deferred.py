"""Large Service ports wait until small ones are programmed, and then have their turn in slices."""

import heapq
from collections import Counter
from collections.abc import KeysView
from typing import NamedTuple

from kbpf.dataplane.bpf.changes.capacity import Room
from kbpf.dataplane.bpf.changes.plan import Planner, Programmed
from kbpf.dataplane.bpf.changes.quotas import Order
from kbpf.model.desired import ServicePortKey
from kbpf.model.objects import ServiceName


class Turn(NamedTuple):
    """What one apply() plans, and the Service ports as they will be programmed."""

    planner: Planner
    room: Room
    after: dict[ServicePortKey, Programmed | None]


class Deferred:
    """A queue in the order of limits.order_of(); a Service port waits in it once."""

    def __init__(self) -> None:
        self._orders: dict[ServicePortKey, Order] = {}
        self._heap: list[tuple[Order, ServicePortKey]] = []  # also those that have left since
        self._services: Counter[ServiceName] = Counter()

    def __len__(self) -> int:
        return len(self._orders)

    @property
    def services(self) -> KeysView[ServiceName]:
        """The Services that have ports here: a live view."""
        return self._services.keys()

    def add(self, key: ServicePortKey, order: Order) -> None:
        """A Service port waits, from now on in this order."""
        before = self._orders.get(key)
        if before == order:
            return
        if before is None:
            self._services[key.service] += 1
        self._orders[key] = order
        heapq.heappush(self._heap, (order, key))

    def discard(self, key: ServicePortKey) -> None:
        """It waits no longer, if it did."""
        if self._orders.pop(key, None) is None:
            return
        self._services[key.service] -= 1
        if not self._services[key.service]:
            del self._services[key.service]

    def first(self) -> ServicePortKey | None:
        """The one whose turn is next. It stays."""
        while self._heap:
            order, key = self._heap[0]
            if self._orders.get(key) == order:
                return key
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        """All leave."""
        self._orders.clear()
        self._heap.clear()
        self._services.clear()
