# SPDX-License-Identifier: Apache-2.0
"""Limits each namespace's share of the maps, and orders Service ports when room is short.

A tenant decides how many ports, endpoints and annotations its Services have, and every node pays
for them. Therefore:
- Tables of slots, which annotations request, are limited for each namespace (MAX_NAMESPACE_SLOTS).
  Beyond that limit a Service port is spread evenly at random, which needs no table.
- A namespace may use at most NAMESPACE_SHARE times the room that is left in a map. The fuller the
  map, the less one namespace may use; so there is always room for a namespace with few entries. The
  last part (SYSTEM_RESERVE) is for system namespaces.
- Changes that free room come first, then system namespaces, then small before large, then old
  before new, then in alphabetical order.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from kbpf.dataplane.bpf.maps.agent_maps import OVERLAP_FACTOR, AgentMaps
from kbpf.dataplane.bpf.maps.ids import IdAllocator, TableKey
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.bpf.state.commit import GraceQueue
from kbpf.dataplane.bpf.state.plan import (
    PortChange,
    ProgrammedPort,
    Retired,
    count_leaving_entries,
    table_key,
    table_size,
)
from kbpf.errors import CapacityError
from kbpf.model.desired import EVEN_SPREAD, ServicePortKey, ServiceState
from kbpf.model.objects import Algorithm
from kbpf.policy.spread import MAX_TABLE_SLOTS, MIN_SLOTS_PER_BACKEND, fits_table

MAX_NAMESPACE_SLOTS: Final = 524_288
"""The maximum number of slots in all tables of one namespace: eight tables of the largest size, 34
MB of kernel memory. A shared table counts once.
"""

NAMESPACE_SHARE: Final = 4
"""A namespace may use this many times the entries that are left for the others. One alone gets 76 %
of a map, each of two 42 %, each of four 22 %; n of them leave 95 % / (1 + 4 n). Switches share
buffers by this rule (Choudhury and Hahne, "Dynamic queue length thresholds", 1998).
"""

CONTESTED_FILL: Final = 0.75
"""Quotas are checked only above this fill level of a map; below it no namespace can exceed its
share.
"""

SYSTEM_RESERVE: Final = 0.05
"""The fraction of a map that is reserved for system namespaces."""

_CHARGED_MAPS: Final = ("services", "backend_slots", "backends", "set_members", "source_ranges")


Priority = tuple[bool, bool, int, bool, str, ServicePortKey]


def priority_of(key: ServicePortKey, new: ServiceState | None, system: bool) -> Priority:
    """The sort key of changes: the smallest one is programmed first."""
    if new is None:
        return False, not system, 0, False, "", key
    return True, not system, estimate_entries(new), not new.created, new.created, key


def estimate_entries(state: ServiceState) -> int:
    """The approximate number of entries of a Service port in the maps."""
    size = len(state.frontends) + len(state.source_ranges)
    for backends, spread in state.sets:
        size += len(backends) + table_size(backends, spread)
    return size


# ---- tables ----------------------------------------------------------------------------------


class _Request(NamedTuple):
    """A Service port, and the tables that it asks for, with their sizes."""

    state: ServiceState
    sizes: Mapping[TableKey, int]

    @property
    def priority(self) -> tuple[int, bool, str, ServicePortKey]:
        """The smallest one gets its tables first."""
        return sum(self.sizes.values()), not self.state.created, self.state.created, self.state.key


@dataclass(slots=True)
class _NamespaceTables:
    """The tables that the Service ports of one namespace ask for."""

    requests: dict[ServicePortKey, _Request] = field(default_factory=dict)
    users: Counter[TableKey] = field(default_factory=Counter)
    total: int = 0

    def put(self, state: ServiceState) -> None:
        self.remove(state.key)
        sizes = {
            table_key(backends, spread): size
            for backends, spread in state.sets
            if (size := table_size(backends, spread)) and fits_table(len(backends), spread)
        }
        if not sizes:
            return
        self.requests[state.key] = _Request(state, sizes)
        for table, size in sizes.items():
            self.total += 0 if self.users[table] else size
            self.users[table] += 1

    def remove(self, key: ServicePortKey) -> None:
        request = self.requests.pop(key, None)
        for table, size in request.sizes.items() if request else ():
            self.users[table] -= 1
            if not self.users[table]:
                del self.users[table]
                self.total -= size

    def select_over_limit(self, limit: int) -> set[ServicePortKey]:
        """The Service ports that get no table because others have priority."""
        if self.total <= limit:
            return set()
        granted: set[TableKey] = set()
        slots_used, refused = 0, set()
        for request in sorted(self.requests.values(), key=attrgetter("priority")):
            new = {table: size for table, size in request.sizes.items() if table not in granted}
            if slots_used + sum(new.values()) > limit:
                refused.add(request.state.key)
                continue
            granted |= new.keys()
            slots_used += sum(new.values())
        return refused


IGNORED_SPREAD: Final = "its algorithm and weights are ignored, and backends are chosen at random"


class TableLimits:
    """Decides which Service ports are spread as requested, and which evenly. Not thread-safe."""

    def __init__(self, namespace_slots: int = MAX_NAMESPACE_SLOTS) -> None:
        self._limit = namespace_slots
        self._namespaces: dict[str, _NamespaceTables] = {}
        self._too_large: set[ServicePortKey] = set()
        self._over_limit: dict[str, set[ServicePortKey]] = {}

    def reason_for_even_spread(self, key: ServicePortKey) -> str:
        """Why a Service port is spread evenly and not as requested; "" otherwise."""
        if key in self._too_large:
            max_backends = MAX_TABLE_SLOTS // MIN_SLOTS_PER_BACKEND
            return f"{IGNORED_SPREAD}: it has more than {max_backends} backends, the most that a table has room for"
        if key in self._over_limit.get(key.namespace, ()):
            return (
                f"{IGNORED_SPREAD}: those of namespace {key.namespace} need "
                f"{self._namespaces[key.namespace].total} slots, and it may have {self._limit}"
            )
        return ""

    def update(
        self, states: Mapping[ServicePortKey, ServiceState], keys: Iterable[ServicePortKey]
    ) -> set[ServicePortKey]:
        """Records these changes. Returns the *other* Service ports whose spread has changed by
        them.
        """
        keys, namespaces = set(keys), set()
        for key in keys:
            state, known_tables = states.get(key), self._namespaces.get(key.namespace)
            request = known_tables.requests.get(key) if known_tables else None
            if request is not None and request.state is state:
                continue  # unchanged: planned again, since its slice was not complete
            self._too_large.discard(key)
            is_plain = state is None or all(spread == EVEN_SPREAD for _, spread in state.sets)
            if is_plain and key.namespace not in self._namespaces:
                continue
            tables = self._namespaces.setdefault(key.namespace, _NamespaceTables())
            tables.remove(key)
            namespaces.add(key.namespace)
            if state is None:
                continue
            tables.put(state)
            if not all(fits_table(len(backends), spread) for backends, spread in state.sets):
                self._too_large.add(key)
        return {key for name in namespaces for key in self._resolve(name)} - keys

    def _resolve(self, namespace: str) -> set[ServicePortKey]:
        """The Service ports of a namespace that got or lost their tables."""
        tables = self._namespaces[namespace]
        over_limit, previous = (
            tables.select_over_limit(self._limit),
            self._over_limit.pop(namespace, set()),
        )
        if not tables.requests:
            del self._namespaces[namespace]
        if over_limit:
            self._over_limit[namespace] = over_limit
        return previous ^ over_limit

    def effective_state(self, state: ServiceState) -> ServiceState:
        """The state as it can be programmed."""
        if not self.reason_for_even_spread(state.key):
            return state
        return msgspec.structs.replace(state, algorithm=Algorithm.RANDOM, cluster_weights=(), local_weights=())


# ---- budgets ---------------------------------------------------------------------------------


class NamespaceBudgets:
    """How many entries of each map the Service ports of a namespace have."""

    def __init__(self) -> None:
        self._used: dict[str, list[int]] = {}

    def replace(self, namespace: str, old: ProgrammedPort | None, new: ProgrammedPort | None) -> None:
        """Records the change of one Service port."""
        used = self._used.setdefault(namespace, [0] * len(_CHARGED_MAPS))
        for sign, programmed in ((-1, old), (1, new)):
            if programmed is not None:
                for index, count in enumerate(_count_charges(programmed)):
                    used[index] += sign * count
        if not any(used):
            del self._used[namespace]

    def count_used(self, namespace: str, name: str) -> int:
        """The namespace's entries in the map `name`; 0 for maps without quota."""
        if name not in _CHARGED_MAPS or namespace not in self._used:
            return 0
        return self._used[namespace][_CHARGED_MAPS.index(name)]

    def max_fill(self, namespace: str, name: str, added: int, limit: int) -> int:
        """The fill level up to which this namespace may add `added` entries to the map `name`."""
        return fair_max_fill(self.count_used(namespace, name) + added, limit)


def fair_max_fill(used: int, limit: int) -> int:
    """The fill level up to which a namespace may use this many entries of a map."""
    # used <= NAMESPACE_SHARE * (limit * (1 - SYSTEM_RESERVE) - fill), solved for fill
    available = limit * (1 - SYSTEM_RESERVE) - used / NAMESPACE_SHARE
    # Rounded up: a very small map has no room to reserve.
    return max(0, math.ceil(available))


def _count_charges(programmed: ProgrammedPort) -> tuple[int, ...]:
    sets = programmed.sets
    slots = sum(len(set_.backends) + (set_.size if set_.table else 0) for set_ in sets)
    members = sum(len(set_.backends) for set_ in sets if set_.in_set_members)
    backends = sum(len(set_.backends) for set_ in sets)
    return len(programmed.frontends), slots, backends, members, len(programmed.source_ranges)


# ---- capacity ------------------------------------------------------------------------------------


EARLY_DELETE_BUDGET_S: Final = 0.005
"""How long one apply() may delete old sets ahead of time when room is short."""


class CapacityAccount:
    """Checks whether the changes of one apply() fit into the maps: adds up the entries that they
    need. Checks quotas only if a map is nearly full.
    """

    def __init__(
        self,
        agent_maps: AgentMaps,
        ids: IdAllocator,
        budgets: NamespaceBudgets,
        grace_queue: GraceQueue,
    ) -> None:
        self._agent_maps, self._ids, self._budgets, self._grace_queue = agent_maps, ids, budgets, grace_queue
        self.reserved: Counter[str] = Counter()  # new entries so far, by map
        self._leaving_entries: Counter[str] | None = None  # computed when first needed
        self._budget_s = EARLY_DELETE_BUDGET_S

    def reserve(
        self,
        change: PortChange,
        retired: Retired,
        is_system: bool,
        deletable_before: float,
    ) -> None:
        """Reserves room for this change; raises CapacityError if there is not enough. `retired`: by
        this apply(). What was retired before `deletable_before` may be deleted at once.
        """
        needed = change.count_new_entries(self._ids)
        if self._is_contested(needed):
            start = time.perf_counter()
            self._grace_queue.delete_until(deletable_before, self._budget_s)
            self._budget_s -= time.perf_counter() - start
            # Ids may have been retired.
            needed = change.count_new_entries(self._ids)
            if self._leaving_entries is None:
                pending = [*self._grace_queue.pending, retired]
                self._leaving_entries = Counter(count_leaving_entries(pending, self._ids))
            self._check(change.key, needed, self._count_leaving(change), is_system)
        self.reserved.update(needed)
        if self._leaving_entries is not None:
            self._leaving_entries.update(self._count_leaving(change))

    def _is_contested(self, needed: Mapping[str, int]) -> bool:
        fill, limit = self._agent_maps.fill, self._agent_maps.max_entries
        return any(
            count and fill[name] + self.reserved[name] + count > CONTESTED_FILL * limit(name)
            for name, count in needed.items()
        )

    def _count_leaving(self, change: PortChange) -> Counter[str]:
        return Counter(change.count_leaving_entries(self._ids))

    def _check(
        self,
        key: ServicePortKey,
        needed: Mapping[str, int],
        own_leaving: Counter[str],
        is_system: bool,
    ) -> None:
        assert self._leaving_entries is not None
        for name, count in needed.items():
            limit, net_added = self._agent_maps.max_entries(name), count - own_leaving[name]
            max_fill = limit
            if net_added > 0 and not is_system:
                max_fill = self._budgets.max_fill(key.namespace, name, net_added, limit)
            # `total`: while old and new entries coexist. `net`: after the grace period.
            total = self._agent_maps.fill[name] + self.reserved[name] + count
            net = total - self._leaving_entries[name] - own_leaving[name]
            if count and (net > max_fill or total > OVERLAP_FACTOR * limit):
                flag = MAPS[name].size_flag
                text = self._format_error(key, name, total, max_fill)
                raise CapacityError(text, "", f"raise {flag}" if flag else "")

    def _format_error(self, key: ServicePortKey, name: str, total: int, max_fill: int) -> str:
        limit = self._agent_maps.max_entries(name)
        text = f"the map {name} would need {total} entries and has room for {limit}"
        if max_fill == limit:
            return text
        used = self._budgets.count_used(key.namespace, name)
        return (
            f"{text}, of which {limit - max_fill} are reserved for other namespaces; namespace "
            f"{key.namespace} uses {used}"
        )
