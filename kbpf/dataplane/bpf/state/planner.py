# SPDX-License-Identifier: Apache-2.0
"""Plans each apply(): computes the change of each Service port, admits or refuses it, and adds its
writes to the plan. Small Service ports come first, large ones are deferred and planned in slices.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, KeysView, Mapping
from itertools import islice
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.agent_maps import GROWTH_POLL_INTERVAL_S, AgentMaps, MapGrowth
from kbpf.dataplane.bpf.state.commit import SHORT_GRACE_PERIOD_S
from kbpf.dataplane.bpf.state.map_state import MapState
from kbpf.dataplane.bpf.state.plan import ProgrammedPort, WritePlan, Writes, compute_change
from kbpf.dataplane.bpf.state.quotas import (
    CapacityAccount,
    Priority,
    TableLimits,
    estimate_entries,
    priority_of,
)
from kbpf.errors import CapacityError
from kbpf.model.config import Config, is_system_service
from kbpf.model.desired import DesiredState, ServicePortKey, ServiceState
from kbpf.model.objects import ServiceName

LARGE_ENTRIES: Final = 256
"""A Service port with at least this many map entries (quotas.estimate_entries()) is large, and may
be deferred. agent/computer.py, too, calls Services large, but counts endpoints.
"""

MAX_RETRIED: Final = 16
"""Refused Service ports that are retried in one call. Those that fail again move to the end."""


class ApplyPlan(NamedTuple):
    """The plan of one apply(). `programmed`: the Service ports as they will be programmed."""

    state: MapState
    desired: Mapping[ServicePortKey, ServiceState]
    write_plan: WritePlan
    capacity: CapacityAccount
    programmed: dict[ServicePortKey, ProgrammedPort | None]

    def current(self, key: ServicePortKey) -> ProgrammedPort | None:
        """The Service port after what is planned so far."""
        return self.programmed.get(key, self.state.programmed.get(key))

    def replace(self, key: ServicePortKey, port: ProgrammedPort | None) -> None:
        """Records how a Service port will be programmed."""
        self.state.budgets.replace(key.namespace, self.current(key), port)
        self.programmed[key] = port


class Planner:
    """Remembers which Service ports do not fit, are deferred, or are spread evenly."""

    def __init__(
        self,
        config: Config,
        agent_maps: AgentMaps,
        growth: MapGrowth,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._agent_maps, self._growth, self._clock = (
            config,
            agent_maps,
            growth,
            clock,
        )
        self.refused: dict[ServicePortKey, str] = {}
        # those of `refused` that belong to the cluster itself
        self._refused_system: dict[ServicePortKey, None] = {}
        self.evenly_spread: dict[ServicePortKey, str] = {}  # spread evenly instead of as annotated
        self._table_limits = TableLimits()
        # large Service ports that a later apply() programs (not what tick() calls deferred work)
        self.deferred_queue, self.deferred_due = DeferredQueue(), 0.0

    def plan(
        self,
        state: MapState,
        desired: DesiredState,
        keys: set[ServicePortKey],
        may_defer: bool,
        seconds: float,
    ) -> tuple[dict[ServicePortKey, ProgrammedPort | None], Writes]:
        """Plans the changes of these Service ports, and adds others that it examines to `keys`.
        With `may_defer`, large ones are deferred to the next apply() that has nothing else to do,
        which plans for this many seconds.
        """
        plan = ApplyPlan(
            state,
            desired.services,
            WritePlan(state.ids, state.unused_names),
            CapacityAccount(self._agent_maps, state.ids, state.budgets, state.grace_queue),
            {},
        )
        if not may_defer:
            self.deferred_queue.clear()
            self.deferred_due = 0.0
        keys |= self._table_limits.update(desired.services, keys)
        states = {key: self._effective_state(plan, key) for key in keys}
        priorities = {key: priority_of(key, states[key], self._is_system(key)) for key in keys}
        has_programmed = False
        for key in sorted(states, key=priorities.__getitem__):
            if may_defer and _is_large(states[key]):
                self.deferred_queue.add(key, priorities[key])
                _remove_lost_frontends(plan, key, states[key])
            else:
                self.deferred_queue.discard(key)
                self._plan_port(plan, key, states[key])
                has_programmed = True
        if may_defer and not has_programmed:
            keys |= self._plan_deferred(plan, seconds)
        if not self.deferred_queue:
            plan.write_plan.writes.retired.slot_keys += state.builder.release()
        return plan.programmed, plan.write_plan.finish_writes()

    def _plan_deferred(self, plan: ApplyPlan, seconds: float) -> set[ServicePortKey]:
        """Plans one slice of the deferred Service ports, in order. If there are none, retries
        refused ones. Returns the Service ports that were examined.
        """
        deadline, self.deferred_due = time.perf_counter() + seconds, 0.0
        examined = set() if self.deferred_queue else self._retry_refused(plan)
        while (key := self.deferred_queue.peek()) is not None:
            new = self._effective_state(plan, key)
            examined.add(key)
            if not self._plan_port(plan, key, new, deadline):
                break
            self.deferred_queue.discard(key)
            if time.perf_counter() >= deadline:
                break
        return examined

    def _retry_refused(self, plan: ApplyPlan) -> set[ServicePortKey]:
        """Retries some of the Service ports that did not fit, those of the cluster itself first."""
        retried_keys = dict.fromkeys(islice(self._refused_system, MAX_RETRIED))
        retried_keys |= dict.fromkeys(islice(self.refused, MAX_RETRIED - len(retried_keys)))
        for key in retried_keys:
            new = self._effective_state(plan, key)
            if _is_large(new):
                self.deferred_queue.add(key, priority_of(key, new, self._is_system(key)))
            else:
                self._plan_port(plan, key, new)
        return set(retried_keys)

    def _plan_port(
        self,
        plan: ApplyPlan,
        key: ServicePortKey,
        new: ServiceState | None,
        deadline: float | None = None,
    ) -> bool:
        """Plans one Service port if it fits. Returns False if it has to wait for maps to grow, or
        if its table is not complete at `deadline` (time.perf_counter).
        """
        self.refused.pop(key, None)
        self._refused_system.pop(key, None)
        change = compute_change(key, plan.current(key), new)
        try:
            deletable_before = self._clock() - SHORT_GRACE_PERIOD_S
            retired = plan.write_plan.writes.retired
            plan.capacity.reserve(change, retired, self._is_system(key), deletable_before)
            if deadline is not None and self._growth.must_wait(plan.capacity.reserved):
                self.deferred_due = time.monotonic() + GROWTH_POLL_INTERVAL_S
                return False
        except CapacityError as error:
            self.refused[key] = str(error)
            if self._is_system(key):
                self._refused_system[key] = None
            _remove_lost_frontends(plan, key, new)
            return True
        if deadline is not None and new is not None and plan.state.builder.is_incomplete(new, deadline):
            return False
        plan.replace(key, plan.write_plan.add(change))
        return True

    def _effective_state(self, plan: ApplyPlan, key: ServicePortKey) -> ServiceState | None:
        """The desired state of a Service port, within the limits of its namespace."""
        self.evenly_spread.pop(key, None)
        state = plan.desired.get(key)
        if state is not None and (reason := self._table_limits.reason_for_even_spread(key)):
            self.evenly_spread[key] = reason
            return self._table_limits.effective_state(state)
        return state

    def _is_system(self, key: ServicePortKey) -> bool:
        """Whether this Service port has priority over those of tenants."""
        return is_system_service(key.service, self._config)


def _is_large(state: ServiceState | None) -> bool:
    return state is not None and estimate_entries(state) >= LARGE_ENTRIES


def _remove_lost_frontends(plan: ApplyPlan, key: ServicePortKey, new: ServiceState | None) -> None:
    """Removes the frontends that a Service port has lost, even if the rest of its change is
    deferred. Another Service port may have them now, and the deferred change would take them away
    from it.
    """
    if (old := plan.current(key)) is not None:
        plan.replace(key, plan.write_plan.remove_lost_frontends(old, new))


class DeferredQueue:
    """Large Service ports that wait until small ones are programmed, by quotas.priority_of(). Each
    is in it at most once.
    """

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
