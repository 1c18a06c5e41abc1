# SPDX-License-Identifier: Apache-2.0
"""Large Service ports that wait until small ones are programmed."""

import heapq
from collections import Counter
from collections.abc import KeysView

from kbpf.dataplane.bpf.changes.quotas import Priority
from kbpf.model.desired import ServicePortKey
from kbpf.model.objects import ServiceName


class DeferredQueue:
    """A priority queue (quotas.priority_of()). Each Service port is in it at most once."""

    def __init__(self) -> None:
        self._priorities: dict[ServicePortKey, Priority] = {}
        self._heap: list[tuple[Priority, ServicePortKey]] = []  # may contain discarded keys
        self._services: Counter[ServiceName] = Counter()

    def __len__(self) -> int:
        return len(self._priorities)

    @property
    def services(self) -> KeysView[ServiceName]:
        """Live view of the Services that have deferred ports."""
        return self._services.keys()

    def add(self, key: ServicePortKey, priority: Priority) -> None:
        """Adds a Service port, or changes its priority."""
        old = self._priorities.get(key)
        if old == priority:
            return
        if old is None:
            self._services[key.service] += 1
        self._priorities[key] = priority
        heapq.heappush(self._heap, (priority, key))

    def discard(self, key: ServicePortKey) -> None:
        """Removes a Service port, if it is queued."""
        if self._priorities.pop(key, None) is None:
            return
        self._services[key.service] -= 1
        if not self._services[key.service]:
            del self._services[key.service]

    def peek(self) -> ServicePortKey | None:
        """The next Service port, without removing it."""
        while self._heap:
            priority, key = self._heap[0]
            if self._priorities.get(key) == priority:
                return key
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        self._priorities.clear()
        self._heap.clear()
        self._services.clear()
