"""Whether there is room in the maps for the changes of one apply()."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from kbpf.dataplane.bpf.changes.grace import Retiring
from kbpf.dataplane.bpf.changes.plan import Planner, Programmed, Retired, leaving, need
from kbpf.dataplane.bpf.changes.quotas import CONTESTED, Budgets
from kbpf.dataplane.bpf.maps.agent_maps import OVERLAP, Tables
from kbpf.dataplane.bpf.maps.ids import BackendTable, SharedTables
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.errors import CapacityError
from kbpf.model.desired import ServicePortKey, ServiceState

RETIRE_SECONDS: Final = 0.005
"""Old sets are deleted ahead of time for this long in one apply(), when room is short."""


class Room:
    """Adds up what one apply() takes. While no map is nearly full, that is all it does."""

    def __init__(
        self,
        tables: Tables,
        table: BackendTable,
        shared: SharedTables,
        budgets: Budgets,
        retiring: Retiring,
    ) -> None:
        self._tables, self._table, self._shared = tables, table, shared
        self._budgets, self._retiring = budgets, retiring
        self._taken: Counter[str] = Counter()
        self._leaving: Counter[str] | None = None  # counted once it matters
        self._seconds = RETIRE_SECONDS

    @property
    def taken(self) -> Mapping[str, int]:
        """New entries of all that was taken, by map."""
        return self._taken

    def take(
        self,
        key: ServicePortKey,
        old: Programmed | None,
        new: ServiceState | None,
        planner: Planner,
        system: bool,
        expired: float,
    ) -> None:
        """Takes the room for this change; CapacityError if there is not enough. `expired`: what was
        put out of use until then may be deleted at once.
        """
        wanted = need(old, new, self._table, self._shared)
        if self._is_contested(wanted):
            start = time.perf_counter()
            self._retiring.until(expired, self._seconds)
            self._seconds -= time.perf_counter() - start
            wanted = need(old, new, self._table, self._shared)  # ids may have been retired
            if self._leaving is None:
                waiting = [*self._retiring.waiting, planner.writes.retired]
                self._leaving = self._count_leaving(waiting)
            self._check(key, wanted, self._own(old, new), system)
        self._taken.update(wanted)
        if self._leaving is not None:
            self._leaving.update(self._own(old, new))

    def _is_contested(self, wanted: Mapping[str, int]) -> bool:
        fill, limit = self._tables.fill, self._tables.limit
        return any(
            count and fill[name] + self._taken[name] + count > CONTESTED * limit(name)
            for name, count in wanted.items()
        )

    def _count_leaving(self, waiting: Iterable[Retired]) -> Counter[str]:
        return Counter(leaving(waiting, None, None, self._table, self._shared))

    def _own(self, old: Programmed | None, new: ServiceState | None) -> Counter[str]:
        return Counter(leaving((), old, new, self._table, self._shared))

    def _check(
        self, key: ServicePortKey, wanted: Mapping[str, int], own: Counter[str], system: bool
    ) -> None:
        assert self._leaving is not None
        for name, count in wanted.items():
            limit, grows = self._tables.limit(name), count - own[name]
            most = limit
            if grows > 0 and not system:
                most = self._budgets.most(key.namespace, name, grows, limit)
            total = self._tables.fill[name] + self._taken[name] + count
            net = total - self._leaving[name] - own[name]
            if count and (net > most or total > OVERLAP * limit):
                raise CapacityError(self._why(key, name, total, most), "", _hint(name))

    def _why(self, key: ServicePortKey, name: str, total: int, most: int) -> str:
        limit = self._tables.limit(name)
        text = f"the map {name} would need {total} entries and has room for {limit}"
        if most == limit:
            return text
        used = self._budgets.used(key.namespace, name)
        return (
            f"{text}, of which {limit - most} are reserved for other namespaces; namespace "
            f"{key.namespace} uses {used}"
        )


def _hint(name: str) -> str:
    flag = MAPS[name].sized_by
    return f"raise --max-{flag}" if flag else ""
