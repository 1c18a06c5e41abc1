# SPDX-License-Identifier: Apache-2.0
"""Computes and writes large tables one piece at a time, before a Service port is flipped to them.
No program reads them until then, and other Service ports are programmed meanwhile.
"""

import time
from array import array
from collections.abc import Generator
from typing import Final

from kbpf.dataplane.bpf.changes.commit import save_ids
from kbpf.dataplane.bpf.changes.plan import needs_table, remember_fingerprint, table_key
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.ids import IdAllocator, SharedTables, TableKey
from kbpf.dataplane.bpf.maps.layout import pack_slots
from kbpf.model.desired import BackendSet, ServiceState, Spread
from kbpf.model.objects import Algorithm
from kbpf.policy.slots import compute_maglev_table_in_steps, compute_slots, count_slots

BATCH_SLOTS: Final = 1_024
"""Slots written in one piece: about one millisecond. The planner builds smaller tables itself."""


class TableBuilder:
    """Builds one table after the other, and holds a reference to each until release()."""

    def __init__(
        self, agent_maps: AgentMaps, ids: IdAllocator, shared_tables: SharedTables
    ) -> None:
        self._agent_maps, self._ids, self._shared_tables = agent_maps, ids, shared_tables
        self._steps: Generator[None] | None = None
        # Table ids, and how many slots of each are written.
        self._written_slots: list[tuple[int, int]] = []
        self._built: list[int] = []

    def _find_missing(self, state: ServiceState) -> tuple[BackendSet, Spread] | None:
        """A set of this Service port that needs a large table which is not built yet."""
        for backends, spread in (
            (state.cluster, state.cluster_spread),
            (state.local, state.local_spread),
        ):
            if (
                needs_table(backends, spread)
                and count_slots(len(backends), spread) > BATCH_SLOTS
                and not self._shared_tables.find(table_key(backends, spread))
            ):
                return backends, spread
        return None

    def is_incomplete(self, state: ServiceState, deadline: float) -> bool:
        """Builds the tables that this Service port needs, at least one piece, until `deadline`
        (time.perf_counter). Returns whether a table is still incomplete.
        """
        while (missing_table := self._find_missing(state)) is not None:
            self._step(*missing_table)
            if time.perf_counter() >= deadline:
                return self._find_missing(state) is not None
        return False

    def _step(self, backends: BackendSet, spread: Spread) -> None:
        """Builds one piece of the current table, or begins this one: computes a part of it, or
        writes BATCH_SLOTS slots.
        """
        if self._steps is None:
            self._steps = self._build(table_key(backends, spread), backends, spread)
        if next(self._steps, self) is self:
            self._steps = None

    def release(self) -> list[bytes]:
        """Drops all references, and abandons an unfinished table. Returns the keys of slots that no
        set uses.
        """
        released = [table_id for table_id in self._built if self._shared_tables.release(table_id)]
        unfinished = {table_id for table_id, _ in self._written_slots} - set(self._built)
        keys = [
            pack_slots(table_id, size)
            for table_id, size in self._written_slots
            if table_id in unfinished or table_id in released
        ]
        self._steps, self._written_slots, self._built = None, [], []
        return [key for key in keys if key]

    def _build(self, key: TableKey, backends: BackendSet, spread: Spread) -> Generator[None]:
        size = count_slots(len(backends), spread)
        if spread.algorithm is Algorithm.MAGLEV:
            table = array(
                "I", (yield from compute_maglev_table_in_steps(backends, spread.weights, size))
            )
        else:
            table = array("I", compute_slots(backends, spread))
        table_id = self._ids.allocate_set()
        save_ids(self._agent_maps, self._ids)  # before a slot with this id is written
        for start in range(0, size, BATCH_SLOTS):
            batch = table[start : start + BATCH_SLOTS]
            keys = pack_slots(table_id, start + len(batch), start)
            self._agent_maps.put("backend_slots", [(keys, batch.tobytes())])
            if start:
                self._written_slots.pop()
            self._written_slots.append((table_id, start + len(batch)))
            yield
        remember_fingerprint(key, table)
        self._shared_tables.add_built(table_id, key)
        self._built.append(table_id)
