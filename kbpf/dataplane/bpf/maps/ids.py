# SPDX-License-Identifier: Apache-2.0
"""Allocates ids that are not reused soon, and counts the users of backends and tables.

An id outlives its object in sockets, flows and affinity entries; if it were reused, these
would refer to another object. So ids count up, and the next ones are saved in the map `meta` before
an id is used. After 2^31 ids (250 days at 100 per second) they start at 1 again, skipping those
that a map still holds.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable

import msgspec

from kbpf.dataplane.bpf.maps.layout import Meta
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, BackendSet, Spread

ID_LIMIT = 1 << 31
"""Ids are below this limit. An entry with a higher id is corrupt (state/adopt.py)."""

IsIdUsed = Callable[[int, int], bool]
"""Whether a map holds this id of a Service port (0), a backend (1) or a set (2)."""


class IdAllocator:
    """The counters, and which `backends` and `tables` have an id. 0 is not an id. `is_used` is
    called only after the ids have wrapped.
    """

    def __init__(self, meta: Meta, is_used: IsIdUsed = lambda _, __: False) -> None:
        self._next = [max(1, next_id) for next_id in meta]
        self._is_used = is_used
        self._wrapped = [False] * len(self._next)
        self._saved_meta = meta
        self.backends, self.tables = BackendTable(self), SharedTables(self)

    def allocate_service(self) -> int:
        """A new id for a Service port of one family."""
        return self._allocate(0)

    def allocate_backend(self) -> int:
        return self._allocate(1)

    def allocate_set(self) -> int:
        """A new id for a backend set or a table; both are in `backend_slots`."""
        return self._allocate(2)

    def _allocate(self, kind: int) -> int:
        id_ = self._next[kind]
        while self._wrapped[kind] and self._is_used(kind, id_):
            id_ = self._successor(kind, id_)
        self._next[kind] = self._successor(kind, id_)
        return id_

    def _successor(self, kind: int, id_: int) -> int:
        if id_ + 1 < ID_LIMIT:
            return id_ + 1
        self._wrapped[kind] = True
        return 1

    def skip_past(self, service: int, backend: int, set_id: int) -> None:
        """Continues above these ids, since adopted maps hold them or lower ones."""
        for kind, id_ in enumerate((service, backend, set_id)):
            if id_ >= self._next[kind]:
                self._next[kind] = self._successor(kind, id_)

    def unsaved_meta(self) -> Meta | None:
        """What has to be written to `meta` before new ids are used; None if nothing."""
        meta = Meta(*self._next)
        return None if meta == self._saved_meta else meta

    def mark_saved(self, meta: Meta) -> None:
        """Records that `meta` was written."""
        self._saved_meta = meta


class RefCount(msgspec.Struct, gc=False):
    """The id of a backend, and how many sets or lists of serving backends refer to it."""

    id: int
    refs: int


class BackendTable:
    """The backends that have an id, with reference counts."""

    def __init__(self, ids: IdAllocator) -> None:
        self._ids = ids
        self._ref_counts: dict[Backend, RefCount] = {}

    def __len__(self) -> int:
        return len(self._ref_counts)

    def id_of(self, backend: Backend) -> int:
        """The backend's id; it must have a reference."""
        return self._ref_counts[backend].id

    def count_unknown(self, backends: Iterable[Backend]) -> int:
        """The number of these backends that have no id yet."""
        return sum(backend not in self._ref_counts for backend in backends)

    def count_only_in(self, sets: Iterable[BackendSet], used_again: Container[Backend]) -> int:
        """The number of backends that only these sets reference, not counting those in
        `used_again`.
        """
        references = Counter(backend for backends in sets for backend in backends)
        return sum(
            self._ref_counts[backend].refs == count and backend not in used_again
            for backend, count in references.items()
        )

    def adopt(self, backend: Backend, backend_id: int) -> None:
        """Records a backend found in the map, without references so far."""
        self._ref_counts[backend] = RefCount(backend_id, 0)

    def acquire(self, backends: BackendSet) -> list[tuple[int, Backend]]:
        """Adds a reference to each backend. Returns the new ones, with newly allocated ids."""
        new = []
        ref_counts = self._ref_counts
        for backend in backends:
            entry = ref_counts.get(backend)
            if entry is None:
                entry = ref_counts[backend] = RefCount(self._ids.allocate_backend(), 0)
                new.append((entry.id, backend))
            entry.refs += 1
        return new

    def release(self, backends: BackendSet) -> list[int]:
        """Removes a reference from each backend. Returns the ids that have no references left."""
        released = []
        for backend in backends:
            entry = self._ref_counts[backend]
            entry.refs -= 1
            if entry.refs == 0:
                released.append(entry.id)
                del self._ref_counts[backend]
        return released

    def remove_unreferenced(self) -> list[int]:
        """Removes adopted backends that were never referenced; returns their ids."""
        unreferenced = [backend for backend, entry in self._ref_counts.items() if entry.refs == 0]
        return [self._ref_counts.pop(backend).id for backend in unreferenced]


TableKey = tuple[tuple[Addr, ...], Spread]
"""Everything that determines a table: the ordered addresses of the set, and its spread."""


class SharedTables:
    """Tables of slots by their content, with reference counts. Sets with the same addresses, such
    as those of the ports of one Service, share a table.
    """

    def __init__(self, ids: IdAllocator) -> None:
        self._ids = ids
        self._refs: Counter[int] = Counter()
        self._id_by_key: dict[TableKey, int] = {}
        self._key_by_id: dict[int, TableKey] = {}

    def find(self, key: TableKey) -> int:
        """The id of this table; 0 if it does not exist."""
        return self._id_by_key.get(key, 0)

    def acquire(self, key: TableKey) -> tuple[int, bool]:
        """Adds a reference. Returns the table's id, and whether it is new and has to be written."""
        if table_id := self.find(key):
            self._refs[table_id] += 1
            return table_id, False
        table_id = self._ids.allocate_set()
        self.add_built(table_id, key)
        return table_id, True

    def add_built(self, table_id: int, key: TableKey) -> None:
        """Adds a table that was written before its first use; its builder holds one reference."""
        self._refs[table_id] = 1
        self._register(table_id, key)

    def adopt(self, table_id: int) -> None:
        """Adds a reference to a table found in the map, whose key is not known yet."""
        self._refs[table_id] += 1

    def identify(self, table_id: int, key: TableKey) -> None:
        """Sets the key of an adopted table."""
        if table_id in self._refs and table_id not in self._key_by_id and key not in self._id_by_key:
            self._register(table_id, key)

    def select_only_in(self, tables: Iterable[int]) -> set[int]:
        """The tables without other references. Each table is listed once for each reference to
        remove.
        """
        return {table_id for table_id, refs in Counter(tables).items() if self._refs[table_id] == refs}

    def release(self, table_id: int) -> bool:
        """Removes a reference. Returns whether it was the last one; the table is then forgotten."""
        self._refs[table_id] -= 1
        if self._refs[table_id]:
            return False
        del self._refs[table_id]
        key = self._key_by_id.pop(table_id, None)
        if key is not None:
            del self._id_by_key[key]
        return True

    def _register(self, table_id: int, key: TableKey) -> None:
        self._id_by_key[key], self._key_by_id[table_id] = table_id, key
