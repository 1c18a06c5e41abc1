"""What all Service ports together need, and what has to be done when that changes.

The order of the steps is decided here (Changes); the plane carries them out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kbpf.dataplane.ipvs.plan import (
    EMPTY_PLAN,
    LATE_SETS,
    MAP_SETS,
    OWNERSHIP_SETS,
    Element,
    ElementField,
    RealServer,
    ServerPool,
    ServicePortPlan,
    SetName,
    VirtualService,
    target_service,
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
    new_pools: dict[VirtualService, ServerPool] = field(default_factory=dict)
    changed_pools: dict[VirtualService, tuple[ServerPool, ServerPool]] = field(default_factory=dict)
    udp_cuts: set[tuple[VirtualService, RealServer]] = field(default_factory=set)
    old_elements: set[Element] = field(default_factory=set)
    old_pools: dict[VirtualService, ServerPool] = field(default_factory=dict)
    unclaimed_addresses: set[Addr] = field(default_factory=set)
    immediate: set[Element] = field(default_factory=set)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)

    def steps(self) -> "Steps":
        """The elements, by step."""
        ownership = {element for element in self.old_elements if element[0] in OWNERSHIP_SETS}
        added_late = {
            element for element in self.new_elements - self.immediate if element[0] in LATE_SETS
        }
        added_first = self.new_elements - added_late
        replaced_keys = {_exclusive_key(element) for element in added_first} - {None}
        removed_first = {
            element for element in self.old_elements if _exclusive_key(element) in replaced_keys
        }
        return Steps(
            removed_first,
            added_first,
            self.old_elements - removed_first - ownership,
            added_late,
            ownership,
        )


class Steps(NamedTuple):
    """Elements in the order in which they change: `early` go and `first` come in one transaction,
    so do `gone` and `late`; `notes` go at the end.
    """

    removed_first: set[Element]
    added_first: set[Element]
    removed_late: set[Element]
    added_late: set[Element]
    removed_ownership: set[Element]


def _exclusive_key(element: Element) -> tuple[SetName, tuple[ElementField, ...]] | None:
    """Where intervals must not overlap, or there is one place only: old ones there go before new
    ones can come.
    """
    name, parts = element
    if name in MAP_SETS:
        return name, parts[:-1]
    if name is SetName.SOURCES:
        return name, parts[1:]
    return (name, ()) if name is SetName.LOCAL_NETWORKS else None


class DesiredElements:
    """What all Service ports together need: the same element may be wanted by several."""

    def __init__(self) -> None:
        self._elements: Counter[Element] = Counter()
        self._pools: dict[VirtualService, ServerPool] = {}
        self._owners: dict[VirtualService, ServicePortKey] = {}
        self.plans: dict[ServicePortKey, ServicePortPlan] = {}

    @property
    def pools(self) -> Mapping[VirtualService, ServerPool]:
        """All virtual services."""
        return self._pools

    @property
    def elements(self) -> frozenset[Element]:
        """All elements of all sets."""
        return frozenset(self._elements)

    def contains(self, element: Element) -> bool:
        """Whether somebody wants it."""
        return element in self._elements

    def update(self, after: Mapping[ServicePortKey, ServicePortPlan]) -> Changes:
        """Takes these Service ports as they are to be (NOTHING: gone); what has to be done."""
        changes = Changes()
        before = {key: self.plans.get(key, EMPTY_PLAN) for key in after}
        old_pools: dict[VirtualService, ServerPool] = {}
        new_pools: dict[VirtualService, ServerPool] = {}
        for key, new in after.items():
            old_pools |= before[key].pools
            new_pools |= new.pools
            self._add_references(new.elements - before[key].elements, 1, changes)
        for key, new in after.items():
            self._add_references(before[key].elements - new.elements, -1, changes)
            if new is EMPTY_PLAN:
                self.plans.pop(key, None)
            else:
                self.plans[key] = new
        self._pools |= new_pools
        self._owners |= {virtual: key for key, new in after.items() for virtual in new.pools}
        for virtual in old_pools.keys() - new_pools.keys():
            del self._pools[virtual]
            del self._owners[virtual]
        serving = {v: after[k].serving for k in after for v in after[k].pools}
        _compare_pools(old_pools, new_pools, serving, changes)
        return changes

    def record_refusals(
        self, actual_pools: Mapping[VirtualService, ServerPool | None], changes: Changes
    ) -> Mapping[VirtualService, ServicePortKey]:
        """The kernel has refused a part of `changes`, and of these virtual services it holds that,
        or has none: from now on that is what is known. What would lead to one that is not there is
        left out of the changes. Whose they are.
        """
        owners = {virtual: self._owners[virtual] for virtual in actual_pools}
        for virtual, pool in actual_pools.items():
            key = owners[virtual]
            plan = self.plans[key]
            pools, dangling = dict(plan.pools), frozenset[Element]()
            if pool is None:
                dangling = frozenset(
                    element for element in plan.elements if target_service(element) == virtual
                )
                del pools[virtual], self._pools[virtual], self._owners[virtual]
            else:
                pools[virtual] = self._pools[virtual] = pool
            removals = Changes()
            self._add_references(dangling, -1, removals)
            changes.old_elements |= removals.old_elements - (
                changes.new_elements - changes.immediate
            )
            changes.new_elements -= removals.old_elements
            self.plans[key] = ServicePortPlan(pools, plan.elements - dangling, plan.serving)
        return owners

    def diff(
        self,
        elements: frozenset[Element],
        addresses: frozenset[Addr],
        pools: Mapping[VirtualService, ServerPool],
        authoritative: bool,
    ) -> Changes:
        """What has to be done where the kernel's sets hold these elements, the dummy device these
        addresses, and IPVS these virtual services. Not `sound`: nothing goes.
        """
        desired = self.elements
        present = {
            element
            for element in elements
            if element[0] is not SetName.VIRTUAL_IPS or element[1][0] in addresses
        }
        changes = Changes(new_elements=set(desired - present))
        changes.immediate = {
            element for element in changes.new_elements if target_service(element) in pools
        }
        serving = {virtual: plan.serving for plan in self.plans.values() for virtual in plan.pools}
        _compare_pools(pools, self._pools, serving, changes)
        if authoritative:
            changes.old_elements = set(elements - desired)
            known_addresses = {
                element[1][0] for element in elements | desired if element[0] is SetName.VIRTUAL_IPS
            }
            changes.unclaimed_addresses = {
                address for address in addresses if address not in known_addresses
            }
        else:
            changes.old_pools.clear()
            exclusive_keys = {_exclusive_key(element) for element in changes.new_elements} - {None}
            changes.old_elements = {
                element
                for element in elements - desired
                if self._contradicts(element) or _exclusive_key(element) in exclusive_keys
            }
        return changes

    def _contradicts(self, element: Element) -> bool:
        """Whether this says something else of a frontend that is known now."""
        name, parts = element
        if name in OWNERSHIP_SETS or name in (SetName.VIRTUAL_IPS, SetName.HAIRPINS):
            return False
        if name in (SetName.LOCAL_NETWORKS, SetName.NODE_IPS):
            return True
        frontend_key = parts[1:] if name is SetName.SOURCES else parts[:3]
        return (SetName.OWN, frontend_key) in self._elements

    def _add_references(self, elements: Iterable[Element], delta: int, changes: Changes) -> None:
        for element in elements:
            count = self._elements[element]
            self._elements[element] = count + delta
            if count == 0:
                changes.new_elements.add(element)
            elif count + delta == 0:
                del self._elements[element]
                changes.old_elements.add(element)


def _compare_pools(
    old: Mapping[VirtualService, ServerPool],
    new: Mapping[VirtualService, ServerPool],
    serving: Mapping[VirtualService, frozenset[RealServer] | None],
    changes: Changes,
) -> None:
    """Pools that come, change and go. UDP to what serves no more is cut."""
    for virtual, pool in new.items():
        old_pool = old.get(virtual)
        if old_pool is None:
            changes.new_pools[virtual] = pool
        elif old_pool != pool:
            changes.changed_pools[virtual] = (old_pool, pool)
            serving_servers = serving.get(virtual)
            if serving_servers is not None:
                removed_servers = {server for server, _ in old_pool.servers} - {
                    server for server, _ in pool.servers
                }
                changes.udp_cuts |= {
                    (virtual, server) for server in removed_servers - serving_servers
                }
    for virtual in old.keys() - new.keys():
        changes.old_pools[virtual] = old[virtual]
