# SPDX-License-Identifier: Apache-2.0
"""Checks whether the changes of one apply() fit into the maps."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

from kbpf.dataplane.bpf.changes.grace import GraceQueue
from kbpf.dataplane.bpf.changes.plan import (
    Planner,
    PortChange,
    count_leaving_entries,
)
from kbpf.dataplane.bpf.changes.quotas import CONTESTED_FILL, NamespaceBudgets
from kbpf.dataplane.bpf.maps.agent_maps import OVERLAP_FACTOR, AgentMaps
from kbpf.dataplane.bpf.maps.ids import BackendTable, SharedTables
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.errors import CapacityError
from kbpf.model.desired import ServicePortKey

EARLY_DELETE_BUDGET_S: Final = 0.005
"""How long one apply() may delete old sets ahead of time when room is short."""


class CapacityAccount:
    """Adds up the entries that one apply() needs. Checks quotas only if a map is nearly full."""

    def __init__(
        self,
        agent_maps: AgentMaps,
        backend_table: BackendTable,
        shared_tables: SharedTables,
        budgets: NamespaceBudgets,
        grace_queue: GraceQueue,
    ) -> None:
        self._agent_maps, self._backend_table, self._shared_tables = (
            agent_maps,
            backend_table,
            shared_tables,
        )
        self._budgets, self._grace_queue = budgets, grace_queue
        self._reserved: Counter[str] = Counter()
        self._leaving_entries: Counter[str] | None = None  # computed when first needed
        self._budget_s = EARLY_DELETE_BUDGET_S

    @property
    def reserved(self) -> Mapping[str, int]:
        """New entries reserved so far, by map."""
        return self._reserved

    def reserve(
        self,
        change: PortChange,
        planner: Planner,
        is_system: bool,
        deletable_before: float,
    ) -> None:
        """Reserves room for this change; raises CapacityError if there is not enough. What was
        retired before `deletable_before` may be deleted at once.
        """
        needed = change.count_new_entries(self._backend_table, self._shared_tables)
        if self._is_contested(needed):
            start = time.perf_counter()
            self._grace_queue.delete_until(deletable_before, self._budget_s)
            self._budget_s -= time.perf_counter() - start
            # Ids may have been retired.
            needed = change.count_new_entries(self._backend_table, self._shared_tables)
            if self._leaving_entries is None:
                pending = [*self._grace_queue.pending, planner.writes.retired]
                self._leaving_entries = Counter(
                    count_leaving_entries(pending, self._backend_table, self._shared_tables)
                )
            self._check(change.key, needed, self._count_leaving(change), is_system)
        self._reserved.update(needed)
        if self._leaving_entries is not None:
            self._leaving_entries.update(self._count_leaving(change))

    def _is_contested(self, needed: Mapping[str, int]) -> bool:
        fill, limit = self._agent_maps.fill, self._agent_maps.max_entries
        return any(
            count and fill[name] + self._reserved[name] + count > CONTESTED_FILL * limit(name)
            for name, count in needed.items()
        )

    def _count_leaving(self, change: PortChange) -> Counter[str]:
        return Counter(change.count_leaving_entries(self._backend_table, self._shared_tables))

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
            total = self._agent_maps.fill[name] + self._reserved[name] + count
            net = total - self._leaving_entries[name] - own_leaving[name]
            if count and (net > max_fill or total > OVERLAP_FACTOR * limit):
                raise CapacityError(self._format_error(key, name, total, max_fill), "", _hint(name))

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


def _hint(name: str) -> str:
    flag = MAPS[name].size_flag
    return f"raise {flag}" if flag else ""
