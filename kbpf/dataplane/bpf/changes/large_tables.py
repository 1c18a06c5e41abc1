"""Large tables are computed and written a piece at a time, before a Service port that asks for one
is flipped to it. Nothing reads them until then, and other Service ports are programmed meanwhile.
"""

from array import array
from collections.abc import Generator
from typing import Final

from kbpf.dataplane.bpf.changes.commit import save_ids
from kbpf.dataplane.bpf.changes.plan import needs_table, remember, table_key
from kbpf.dataplane.bpf.maps.agent_maps import Tables
from kbpf.dataplane.bpf.maps.ids import Ids, SharedTables, TableKey
from kbpf.dataplane.bpf.maps.layout import pack_slots
from kbpf.model.desired import BackendSet, ServiceState, Spread
from kbpf.model.objects import Algorithm
from kbpf.policy.slots import maglev_in_steps, slot_count, slots

AT_ONCE: Final = 1_024
"""Slots that are written at a time, about one millisecond; tables that have no more are made where
they are needed."""


class TableBuilder:
    """Builds one table after the other. What is built is held here until release()."""

    def __init__(self, tables: Tables, ids: Ids, shared: SharedTables) -> None:
        self._tables, self._ids, self._shared = tables, ids, shared
        self._steps: Generator[None] | None = None
        self._written: list[tuple[int, int]] = []  # tables, and how many slots they have so far
        self._built: list[int] = []

    def missing(self, state: ServiceState) -> tuple[BackendSet, Spread] | None:
        """A set of this Service port whose table is large and not there yet."""
        for backends, spread in (
            (state.cluster, state.cluster_spread),
            (state.local, state.local_spread),
        ):
            if (
                needs_table(backends, spread)
                and slot_count(len(backends), spread) > AT_ONCE
                and not self._shared.find(table_key(backends, spread))
            ):
                return backends, spread
        return None

    @property
    def is_busy(self) -> bool:
        """Whether a table is begun and not finished."""
        return self._steps is not None

    def begin(self, backends: BackendSet, spread: Spread) -> None:
        """Begins a table; the one before must be finished."""
        self._steps = self._build(table_key(backends, spread), backends, spread)

    def step(self) -> None:
        """Does one piece of what is begun."""
        assert self._steps is not None
        if next(self._steps, self) is self:
            self._steps = None

    def release(self) -> list[bytes]:
        """Gives up what is built or begun; the keys of slots that nobody uses now."""
        gone = [number for number in self._built if self._shared.release(number)]
        unfinished = {number for number, _ in self._written} - set(self._built)
        keys = [pack_slots(n, size) for n, size in self._written if n in unfinished or n in gone]
        self._steps, self._written, self._built = None, [], []
        return [key for key in keys if key]

    def _build(self, key: TableKey, backends: BackendSet, spread: Spread) -> Generator[None]:
        size = slot_count(len(backends), spread)
        if spread.algorithm is Algorithm.MAGLEV:
            table = array("I", (yield from maglev_in_steps(backends, spread.weights, size)))
        else:
            table = array("I", slots(backends, spread))
        number = self._ids.set()
        save_ids(self._tables, self._ids)
        for start in range(0, size, AT_ONCE):
            piece = table[start : start + AT_ONCE]
            keys = pack_slots(number, start + len(piece), start)
            self._tables.put("backend_slots", [(keys, piece.tobytes())])
            if start:
                self._written.pop()
            self._written.append((number, start + len(piece)))
            yield
        remember(key, table)
        self._shared.publish(number, key)
        self._built.append(number)
