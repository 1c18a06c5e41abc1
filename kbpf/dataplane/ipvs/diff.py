"""What all Service ports together need, and what has to be done when that changes.

The order of the steps is decided here (Changes); the plane carries them out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kbpf.dataplane.ipvs.plan import (
    LATE,
    MAPS,
    NOTES,
    NOTHING,
    Element,
    End,
    Part,
    Pool,
    Programmed,
    SetName,
    Virtual,
    leads_to,
)
from kbpf.model.address import Addr
from kbpf.model.desired import ServicePortKey


@dataclass(slots=True)
class Changes:
    """Everything that one apply() does, by step.

    1. New elements, but for LATE: who is not let in is known before anybody could be let in, and
       what is ours is noted before it is there. LATE ones that are `met`, whose virtual service is
       there already (a kube-proxy's, or ours after the table was flushed), come now: that its
       address is virtual must not be known without them, or what it serves would be refused;
    2. `new_pools` and `changed_pools` (old, new). Of a changed pool new real servers come first;
       those that leave are drained, or, where they are in `cut`, removed at once;
    3. LATE elements: from here on nftables lets connections pass to IPVS. With the same step old
       ones go: what has left is refused, not half served;
    4. `old_pools`;
    5. the notes of what was ours.

    `strays`: addresses of the dummy device that nothing speaks of; they go with `old_elements`.
    """

    new_elements: set[Element] = field(default_factory=set)
    new_pools: dict[Virtual, Pool] = field(default_factory=dict)
    changed_pools: dict[Virtual, tuple[Pool, Pool]] = field(default_factory=dict)
    cut: set[tuple[Virtual, End]] = field(default_factory=set)
    old_elements: set[Element] = field(default_factory=set)
    old_pools: dict[Virtual, Pool] = field(default_factory=dict)
    strays: set[Addr] = field(default_factory=set)
    met: set[Element] = field(default_factory=set)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)

    def steps(self) -> "Steps":
        """The elements, by step."""
        notes = {e for e in self.old_elements if e[0] in NOTES}
        late = {e for e in self.new_elements - self.met if e[0] in LATE}
        first = self.new_elements - late
        replaced = {_room(e) for e in first} - {None}
        early = {e for e in self.old_elements if _room(e) in replaced}
        return Steps(early, first, self.old_elements - early - notes, late, notes)


class Steps(NamedTuple):
    """Elements in the order in which they change: `early` go and `first` come in one transaction,
    so do `gone` and `late`; `notes` go at the end.
    """

    early: set[Element]
    first: set[Element]
    gone: set[Element]
    late: set[Element]
    notes: set[Element]


def _room(element: Element) -> tuple[SetName, tuple[Part, ...]] | None:
    """Where intervals must not overlap, or there is one place only: old ones there go before new
    ones can come.
    """
    name, parts = element
    if name in MAPS:
        return name, parts[:-1]
    if name is SetName.SOURCES:
        return name, parts[1:]
    return (name, ()) if name is SetName.LOCAL_NETWORKS else None


class Ledger:
    """What all Service ports together need: the same element may be wanted by several."""

    def __init__(self) -> None:
        self._elements: Counter[Element] = Counter()
        self._pools: dict[Virtual, Pool] = {}
        self._owners: dict[Virtual, ServicePortKey] = {}
        self.by_key: dict[ServicePortKey, Programmed] = {}

    @property
    def pools(self) -> Mapping[Virtual, Pool]:
        """All virtual services."""
        return self._pools

    @property
    def elements(self) -> frozenset[Element]:
        """All elements of all sets."""
        return frozenset(self._elements)

    def holds(self, element: Element) -> bool:
        """Whether somebody wants it."""
        return element in self._elements

    def change(self, after: Mapping[ServicePortKey, Programmed]) -> Changes:
        """Takes these Service ports as they are to be (NOTHING: gone); what has to be done."""
        changes = Changes()
        before = {key: self.by_key.get(key, NOTHING) for key in after}
        old_pools: dict[Virtual, Pool] = {}
        new_pools: dict[Virtual, Pool] = {}
        for key, new in after.items():
            old_pools |= before[key].pools
            new_pools |= new.pools
            self._count(new.elements - before[key].elements, 1, changes)
        for key, new in after.items():
            self._count(before[key].elements - new.elements, -1, changes)
            if new is NOTHING:
                self.by_key.pop(key, None)
            else:
                self.by_key[key] = new
        self._pools |= new_pools
        self._owners |= {virtual: key for key, new in after.items() for virtual in new.pools}
        for virtual in old_pools.keys() - new_pools.keys():
            del self._pools[virtual]
            del self._owners[virtual]
        serving = {v: after[k].serving for k in after for v in after[k].pools}
        _compare(old_pools, new_pools, serving, changes)
        return changes

    def correct(
        self, held: Mapping[Virtual, Pool | None], changes: Changes
    ) -> Mapping[Virtual, ServicePortKey]:
        """The kernel has refused a part of `changes`, and of these virtual services it holds that,
        or has none: from now on that is what is known. What would lead to one that is not there is
        left out of the changes. Whose they are.
        """
        owners = {virtual: self._owners[virtual] for virtual in held}
        for virtual, pool in held.items():
            key = owners[virtual]
            had = self.by_key[key]
            pools, leading = dict(had.pools), frozenset[Element]()
            if pool is None:
                leading = frozenset(e for e in had.elements if leads_to(e) == virtual)
                del pools[virtual], self._pools[virtual], self._owners[virtual]
            else:
                pools[virtual] = self._pools[virtual] = pool
            gone = Changes()
            self._count(leading, -1, gone)
            changes.old_elements |= gone.old_elements - (changes.new_elements - changes.met)
            changes.new_elements -= gone.old_elements
            self.by_key[key] = Programmed(pools, had.elements - leading, had.serving)
        return owners

    def difference(
        self,
        elements: frozenset[Element],
        addresses: frozenset[Addr],
        pools: Mapping[Virtual, Pool],
        sound: bool,
    ) -> Changes:
        """What has to be done where the kernel's sets hold these elements, the dummy device these
        addresses, and IPVS these virtual services. Not `sound`: nothing goes.
        """
        wanted = self.elements
        there = {e for e in elements if e[0] is not SetName.VIRTUAL_IPS or e[1][0] in addresses}
        changes = Changes(new_elements=set(wanted - there))
        changes.met = {e for e in changes.new_elements if leads_to(e) in pools}
        serving = {v: p.serving for p in self.by_key.values() for v in p.pools}
        _compare(pools, self._pools, serving, changes)
        if sound:
            changes.old_elements = set(elements - wanted)
            spoken_of = {e[1][0] for e in elements | wanted if e[0] is SetName.VIRTUAL_IPS}
            changes.strays = {address for address in addresses if address not in spoken_of}
        else:
            changes.old_pools.clear()
            rooms = {_room(e) for e in changes.new_elements} - {None}
            changes.old_elements = {
                e for e in elements - wanted if self._contradicts(e) or _room(e) in rooms
            }
        return changes

    def _contradicts(self, element: Element) -> bool:
        """Whether this says something else of a frontend that is known now."""
        name, parts = element
        if name in NOTES or name in (SetName.VIRTUAL_IPS, SetName.HAIRPINS):
            return False
        if name in (SetName.LOCAL_NETWORKS, SetName.NODE_IPS):
            return True
        at = parts[1:] if name is SetName.SOURCES else parts[:3]
        return (SetName.OWN, at) in self._elements

    def _count(self, elements: Iterable[Element], by: int, changes: Changes) -> None:
        for element in elements:
            had = self._elements[element]
            self._elements[element] = had + by
            if had == 0:
                changes.new_elements.add(element)
            elif had + by == 0:
                del self._elements[element]
                changes.old_elements.add(element)


def _compare(
    old: Mapping[Virtual, Pool],
    new: Mapping[Virtual, Pool],
    serving: Mapping[Virtual, frozenset[End] | None],
    changes: Changes,
) -> None:
    """Pools that come, change and go. UDP to what serves no more is cut."""
    for virtual, pool in new.items():
        had = old.get(virtual)
        if had is None:
            changes.new_pools[virtual] = pool
        elif had != pool:
            changes.changed_pools[virtual] = (had, pool)
            still = serving.get(virtual)
            if still is not None:
                left = {end for end, _ in had.servers} - {end for end, _ in pool.servers}
                changes.cut |= {(virtual, end) for end in left - still}
    for virtual in old.keys() - new.keys():
        changes.old_pools[virtual] = old[virtual]
