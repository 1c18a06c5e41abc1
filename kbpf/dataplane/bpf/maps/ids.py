"""Ids that are not given out twice, and the table of backends that hold them.

An id outlives its object in sockets, flows and affinity entries; used again soon, it would lead
them to a stranger. So ids count up, and the next ones are kept in the map `meta`, written before an
id is used. After two thousand million of them (250 days at 100 a second) they begin at 1 again, and
those that a map still holds are left out.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable

import msgspec

from kbpf.dataplane.bpf.maps.layout import Meta
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, BackendSet, Spread

ID_LIMIT = 1 << 31
"""Ids are lower. A higher one was not given out: its entry is damaged (adopt.py)."""

IsIdUsed = Callable[[int, int], bool]
"""Whether a map holds this id: of a Service port (0), a backend (1) or a set (2)."""


class IdAllocator:
    """The counters. 0 is no id. `taken` is asked once ids have begun again."""

    def __init__(self, meta: Meta, is_used: IsIdUsed = lambda _, __: False) -> None:
        self._next = [max(1, next_id) for next_id in meta]
        self._is_used = is_used
        self._wrapped = [False] * len(self._next)
        self._saved_meta = meta

    def allocate_service(self) -> int:
        """A new Service port id."""
        return self._allocate(0)

    def allocate_backend(self) -> int:
        """A new backend id."""
        return self._allocate(1)

    def allocate_set(self) -> int:
        """A new backend set id."""
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
        """Never gives out these or lower ones: what an adopted map holds."""
        for kind, id_ in enumerate((service, backend, set_id)):
            if id_ >= self._next[kind]:
                self._next[kind] = self._successor(kind, id_)

    def unsaved_meta(self) -> Meta | None:
        """What has to be written to `meta` before the new ids are used; None when nothing."""
        meta = Meta(*self._next)
        return None if meta == self._saved_meta else meta

    def mark_saved(self, meta: Meta) -> None:
        """It is in the map."""
        self._saved_meta = meta


class RefCount(msgspec.Struct, gc=False):
    """A backend's id and how many sets (or lists of serving backends) hold it."""

    id: int
    refs: int


class BackendTable:
    """Backends that have an id, and who holds them. Counts come from the desired state alone."""

    def __init__(self, ids: IdAllocator) -> None:
        self._ids = ids
        self._ref_counts: dict[Backend, RefCount] = {}

    def __len__(self) -> int:
        return len(self._ref_counts)

    def id_of(self, backend: Backend) -> int:
        """Its id; it must be held."""
        return self._ref_counts[backend].id

    def count_unknown(self, backends: Iterable[Backend]) -> int:
        """How many of them have no id yet."""
        return sum(backend not in self._ref_counts for backend in backends)

    def count_only_in(self, sets: Iterable[BackendSet], used_again: Container[Backend] = ()) -> int:
        """How many backends only these sets hold, and `used` has not."""
        references = Counter(backend for backends in sets for backend in backends)
        return sum(
            self._ref_counts[backend].refs == count and backend not in used_again
            for backend, count in references.items()
        )

    def adopt(self, backend: Backend, backend_id: int) -> None:
        """A backend found in the map; nobody holds it yet."""
        self._ref_counts[backend] = RefCount(backend_id, 0)

    def acquire(self, backends: BackendSet) -> list[tuple[int, Backend]]:
        """Counts one more holder of each; gives ids to new ones and returns those."""
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
        """Counts one holder less; the ids that nobody holds any more, which are forgotten."""
        released = []
        for backend in backends:
            entry = self._ref_counts[backend]
            entry.refs -= 1
            if entry.refs == 0:
                released.append(entry.id)
                del self._ref_counts[backend]
        return released

    def remove_unreferenced(self) -> list[int]:
        """Ids that were adopted and that nobody came to hold."""
        unreferenced = [backend for backend, entry in self._ref_counts.items() if entry.refs == 0]
        return [self._ref_counts.pop(backend).id for backend in unreferenced]


TableKey = tuple[tuple[Addr, ...], Spread]
"""All that a table depends on: the addresses of a set in its order, and how it is spread."""


class SharedTables:
    """Tables of slots by their content, and how many sets use each: sets with the same addresses,
    as those of the ports of one Service, share one.
    """

    def __init__(self, ids: IdAllocator) -> None:
        self._ids = ids
        self._ref_counts: dict[int, RefCount] = {}
        self._id_by_key: dict[TableKey, int] = {}
        self._key_by_id: dict[int, TableKey] = {}

    def find(self, key: TableKey) -> int:
        """The id of this table; 0 while there is none."""
        return self._id_by_key.get(key, 0)

    def acquire(self, key: TableKey) -> tuple[int, bool]:
        """Counts one more user; the table's id, and whether it is new, so has to be written."""
        table_id = self._id_by_key.get(key, 0)
        if table_id:
            self._ref_counts[table_id].refs += 1
            return table_id, False
        table_id = self._ids.allocate_set()
        self._ref_counts[table_id] = RefCount(table_id, 1)
        self._register(table_id, key)
        return table_id, True

    def add_built(self, table_id: int, key: TableKey) -> None:
        """A table that was written before it is used; it has one user, its builder."""
        self._ref_counts[table_id] = RefCount(table_id, 1)
        self._register(table_id, key)

    def adopt(self, table_id: int) -> None:
        """One more user of a table that was found in the map; its key is not known yet."""
        self._ref_counts.setdefault(table_id, RefCount(table_id, 0)).refs += 1

    def identify(self, table_id: int, key: TableKey) -> None:
        """An adopted table turned out to be this one."""
        if (
            table_id in self._ref_counts
            and table_id not in self._key_by_id
            and key not in self._id_by_key
        ):
            self._register(table_id, key)

    def select_only_in(self, tables: Iterable[int]) -> set[int]:
        """Which of these tables, each named once for each user that leaves, have no other user."""
        return {
            table_id
            for table_id, references in Counter(tables).items()
            if self._ref_counts[table_id].refs == references
        }

    def release(self, table_id: int) -> bool:
        """Counts one user less; whether it was the last one, and the table is forgotten."""
        entry = self._ref_counts[table_id]
        entry.refs -= 1
        if entry.refs:
            return False
        del self._ref_counts[table_id]
        key = self._key_by_id.pop(table_id, None)
        if key is not None:
            del self._id_by_key[key]
        return True

    def _register(self, table_id: int, key: TableKey) -> None:
        self._id_by_key[key], self._key_by_id[table_id] = table_id, key
