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

LIMIT = 1 << 31
"""Ids are lower. A higher one was not given out: its entry is damaged (adopt.py)."""

Taken = Callable[[int, int], bool]
"""Whether a map holds this id: of a Service port (0), a backend (1) or a set (2)."""


class Ids:
    """The counters. 0 is no id. `taken` is asked once ids have begun again."""

    def __init__(self, meta: Meta, taken: Taken = lambda _, __: False) -> None:
        self._next = [max(1, n) for n in meta]
        self._taken = taken
        self._again = [False] * len(self._next)
        self._written = meta

    def service(self) -> int:
        """A new Service port id."""
        return self._take(0)

    def backend(self) -> int:
        """A new backend id."""
        return self._take(1)

    def set(self) -> int:
        """A new backend set id."""
        return self._take(2)

    def _take(self, which: int) -> int:
        number = self._next[which]
        while self._again[which] and self._taken(which, number):
            number = self._after(which, number)
        self._next[which] = self._after(which, number)
        return number

    def _after(self, which: int, number: int) -> int:
        if number + 1 < LIMIT:
            return number + 1
        self._again[which] = True
        return 1

    def at_least(self, service: int, backend: int, set_id: int) -> None:
        """Never gives out these or lower ones: what an adopted map holds."""
        for which, number in enumerate((service, backend, set_id)):
            if number >= self._next[which]:
                self._next[which] = self._after(which, number)

    def unsaved(self) -> Meta | None:
        """What has to be written to `meta` before the new ids are used; None when nothing."""
        meta = Meta(*self._next)
        return None if meta == self._written else meta

    def saved(self, meta: Meta) -> None:
        """It is in the map."""
        self._written = meta


class Held(msgspec.Struct, gc=False):
    """A backend's id and how many sets (or lists of serving backends) hold it."""

    id: int
    refs: int


class BackendTable:
    """Backends that have an id, and who holds them. Counts come from the desired state alone."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._held: dict[Backend, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def id_of(self, backend: Backend) -> int:
        """Its id; it must be held."""
        return self._held[backend].id

    def unknown(self, backends: Iterable[Backend]) -> int:
        """How many of them have no id yet."""
        return sum(backend not in self._held for backend in backends)

    def only_in(self, sets: Iterable[BackendSet], used: Container[Backend] = ()) -> int:
        """How many backends only these sets hold, and `used` has not."""
        times = Counter(backend for backends in sets for backend in backends)
        return sum(self._held[b].refs == n and b not in used for b, n in times.items())

    def adopt(self, backend: Backend, backend_id: int) -> None:
        """A backend found in the map; nobody holds it yet."""
        self._held[backend] = Held(backend_id, 0)

    def hold(self, backends: BackendSet) -> list[tuple[int, Backend]]:
        """Counts one more holder of each; gives ids to new ones and returns those."""
        new = []
        held = self._held
        for backend in backends:
            entry = held.get(backend)
            if entry is None:
                entry = held[backend] = Held(self._ids.backend(), 0)
                new.append((entry.id, backend))
            entry.refs += 1
        return new

    def release(self, backends: BackendSet) -> list[int]:
        """Counts one holder less; the ids that nobody holds any more, which are forgotten."""
        gone = []
        for backend in backends:
            entry = self._held[backend]
            entry.refs -= 1
            if entry.refs == 0:
                gone.append(entry.id)
                del self._held[backend]
        return gone

    def sweep(self) -> list[int]:
        """Ids that were adopted and that nobody came to hold."""
        gone = [b for b, entry in self._held.items() if entry.refs == 0]
        return [self._held.pop(b).id for b in gone]


TableKey = tuple[tuple[Addr, ...], Spread]
"""All that a table depends on: the addresses of a set in its order, and how it is spread."""


class SharedTables:
    """Tables of slots by their content, and how many sets use each: sets with the same addresses,
    as those of the ports of one Service, share one.
    """

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._held: dict[int, Held] = {}
        self._by_key: dict[TableKey, int] = {}
        self._keys: dict[int, TableKey] = {}

    def find(self, key: TableKey) -> int:
        """The id of this table; 0 while there is none."""
        return self._by_key.get(key, 0)

    def hold(self, key: TableKey) -> tuple[int, bool]:
        """Counts one more user; the table's id, and whether it is new, so has to be written."""
        number = self._by_key.get(key, 0)
        if number:
            self._held[number].refs += 1
            return number, False
        number = self._ids.set()
        self._held[number] = Held(number, 1)
        self._name(number, key)
        return number, True

    def publish(self, number: int, key: TableKey) -> None:
        """A table that was written before it is used; it has one user, its builder."""
        self._held[number] = Held(number, 1)
        self._name(number, key)

    def adopt(self, number: int) -> None:
        """One more user of a table that was found in the map; its key is not known yet."""
        self._held.setdefault(number, Held(number, 0)).refs += 1

    def identify(self, number: int, key: TableKey) -> None:
        """An adopted table turned out to be this one."""
        if number in self._held and number not in self._keys and key not in self._by_key:
            self._name(number, key)

    def only_in(self, tables: Iterable[int]) -> set[int]:
        """Which of these tables, each named once for each user that leaves, have no other user."""
        return {n for n, times in Counter(tables).items() if self._held[n].refs == times}

    def release(self, number: int) -> bool:
        """Counts one user less; whether it was the last one, and the table is forgotten."""
        held = self._held[number]
        held.refs -= 1
        if held.refs:
            return False
        del self._held[number]
        key = self._keys.pop(number, None)
        if key is not None:
            del self._by_key[key]
        return True

    def _name(self, number: int, key: TableKey) -> None:
        self._by_key[key], self._keys[number] = number, key
