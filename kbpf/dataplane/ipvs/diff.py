# SPDX-License-Identifier: Apache-2.0
"""The desired state of all Service ports together, and its difference from the kernel's.

Changes defines the order of the steps; executor.py executes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kbpf.dataplane.ipvs.plan import (
    EMPTY_PLAN,
    LATE_SETS,
    MAP_SETS,
    OWNERSHIP_SETS,
    Element,
    ElementField,
    ServerPool,
    ServicePortPlan,
    SetName,
    find_service,
)
from kbpf.model.address import Addr
from kbpf.model.desired import RealServer, ServicePortKey, VirtualService
from kbpf.model.ref_counts import RefCounts


@dataclass(slots=True)
class Changes:
    """Everything that one apply() does, in this order:

    1. Add new elements, except those of LATE_SETS. So restrictions are in place before the first
       connection can be served, and ownership is recorded before the virtual service exists.
       Elements of LATE_SETS that are `immediate` are added here too. Their virtual service exists
       already (it is kube-proxy's, or ours after the table was flushed), and without them the new
       VIRTUAL_IPS element would make nftables refuse the connections that it serves.
    2. Create `new_pools` and update `changed_pools` (old, new). New real servers are added first.
       Removed ones are drained, or deleted at once if they are in `udp_cuts`.
    3. Add the elements of LATE_SETS: from here on nftables lets connections reach IPVS. The same
       transaction deletes `old_elements`, so a removed frontend is refused, never half served.
    4. Delete `old_pools`, and the addresses of the dummy device that are no longer used.
    5. Delete the ownership elements of deleted virtual services.

    `unclaimed_addresses`: addresses on the dummy device that no element mentions.
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
        """The elements to add and to delete, by step."""
        ownership = {element for element in self.old_elements if element[0] in OWNERSHIP_SETS}
        added_late = {element for element in self.new_elements - self.immediate if element[0] in LATE_SETS}
        added_first = self.new_elements - added_late
        # Old elements that conflict with new ones go in the same transaction, without a gap between
        # them. All others are deleted late.
        replaced_keys = {_exclusive_key(element) for element in added_first} - {None}
        removed_first = {element for element in self.old_elements if _exclusive_key(element) in replaced_keys}
        return Steps(
            removed_first,
            added_first,
            self.old_elements - removed_first - ownership,
            added_late,
            ownership,
        )


class Steps(NamedTuple):
    """Elements in the order in which they change. `removed_first` and `added_first` are one
    transaction, `removed_late` and `added_late` another one; `removed_ownership` comes last.
    """

    removed_first: set[Element]
    added_first: set[Element]
    removed_late: set[Element]
    added_late: set[Element]
    removed_ownership: set[Element]


def _exclusive_key(element: Element) -> tuple[SetName, tuple[ElementField, ...]] | None:
    """The key of a group in which old elements must be deleted before new ones can be added: maps
    have one value per key, and the intervals of a set must not overlap. None for other elements.
    """
    name, parts = element
    if name in MAP_SETS:
        # without the fwmark, which is the value
        return name, parts[:-1]
    if name is SetName.SOURCES:
        # without the network: all intervals of one frontend
        return name, parts[1:]
    return (name, ()) if name is SetName.LOCAL_NETWORKS else None


class DesiredElements:
    """The desired state of all Service ports together. Elements are counted, since several Service
    ports may need the same one.
    """

    def __init__(self) -> None:
        self._elements = RefCounts[Element]()
        self.pools: dict[VirtualService, ServerPool] = {}  # all, with their real servers
        self._owners: dict[VirtualService, ServicePortKey] = {}
        self.plans: dict[ServicePortKey, ServicePortPlan] = {}

    @property
    def elements(self) -> frozenset[Element]:
        """All elements of all sets."""
        return frozenset(self._elements)

    def contains(self, element: Element) -> bool:
        """Whether any Service port needs this element."""
        return element in self._elements

    def update(self, after: Mapping[ServicePortKey, ServicePortPlan]) -> Changes:
        """Replaces the plans of these Service ports (EMPTY_PLAN: removed). Returns the changes to
        make in the kernel.
        """
        changes = Changes()
        before = {key: self.plans.get(key, EMPTY_PLAN) for key in after}
        old_pools: dict[VirtualService, ServerPool] = {}
        new_pools: dict[VirtualService, ServerPool] = {}
        # All references are added before any is dropped, so an element that moves from one Service
        # port to another never reaches a count of 0.
        for key, new in after.items():
            old_pools |= before[key].pools
            new_pools |= new.pools
            changes.new_elements |= self._elements.add(new.elements - before[key].elements)
        for key, new in after.items():
            changes.old_elements |= self._elements.remove(before[key].elements - new.elements)
            if new is EMPTY_PLAN:
                self.plans.pop(key, None)
            else:
                self.plans[key] = new
        self.pools |= new_pools
        self._owners |= {virtual: key for key, new in after.items() for virtual in new.pools}
        # A virtual service that moved between these Service ports is in both.
        for virtual in old_pools.keys() - new_pools.keys():
            del self.pools[virtual]
            del self._owners[virtual]
        serving = {v: after[k].serving for k in after for v in after[k].pools}
        _compare_pools(old_pools, new_pools, serving, changes)
        return changes

    def record_refusals(
        self, actual_pools: Mapping[VirtualService, ServerPool | None], changes: Changes
    ) -> Mapping[VirtualService, ServicePortKey]:
        """Corrects the desired state after the kernel has refused a part of `changes`.

        `actual_pools`: what the kernel holds of the refused virtual services (None: nothing).
        Elements that would let connections reach a missing virtual service are removed from
        `changes`. Returns the Service port of each of these virtual services.
        """
        owners = {virtual: self._owners[virtual] for virtual in actual_pools}
        for virtual, pool in actual_pools.items():
            key = owners[virtual]
            plan = self.plans[key]
            pools, dangling = dict(plan.pools), frozenset[Element]()
            if pool is None:
                dangling = frozenset(
                    element for element in plan.elements if find_service(element, LATE_SETS) == virtual
                )
                del pools[virtual], self.pools[virtual], self._owners[virtual]
            else:
                pools[virtual] = self.pools[virtual] = pool
            removed = self._elements.remove(dangling)
            # Late elements that are only about to be added are just left out. Those that the kernel
            # has already, immediate ones among them, must be deleted.
            changes.old_elements |= removed - (changes.new_elements - changes.immediate)
            changes.new_elements -= removed
            self.plans[key] = ServicePortPlan(pools, plan.elements - dangling, plan.serving)
        return owners

    def diff(
        self,
        elements: frozenset[Element],
        addresses: frozenset[Addr],
        pools: Mapping[VirtualService, ServerPool],
        authoritative: bool,
    ) -> Changes:
        """The changes that make the desired state true if the kernel's sets hold `elements`, the
        dummy device `addresses` and IPVS `pools`. Unless `authoritative`, nothing is removed except
        elements that contradict the desired state.
        """
        desired = self.elements
        # An element whose address is missing on the device is added again, and the address with it.
        present = {
            element for element in elements if element[0] is not SetName.VIRTUAL_IPS or element[1][0] in addresses
        }
        changes = Changes(new_elements=set(desired - present))
        changes.immediate = {element for element in changes.new_elements if find_service(element, LATE_SETS) in pools}
        serving = {virtual: plan.serving for plan in self.plans.values() for virtual in plan.pools}
        _compare_pools(pools, self.pools, serving, changes)
        if authoritative:
            changes.old_elements = set(elements - desired)
            known_addresses = {element[1][0] for element in elements | desired if element[0] is SetName.VIRTUAL_IPS}
            changes.unclaimed_addresses = {address for address in addresses if address not in known_addresses}
        else:
            changes.old_pools.clear()
            # Elements that would make the addition of new ones fail are deleted nevertheless.
            exclusive_keys = {_exclusive_key(element) for element in changes.new_elements} - {None}
            changes.old_elements = {
                element
                for element in elements - desired
                if self._contradicts(element) or _exclusive_key(element) in exclusive_keys
            }
        return changes

    def _contradicts(self, element: Element) -> bool:
        """Whether an element that is not desired concerns a frontend that is, or the node itself,
        so that keeping it would be wrong.
        """
        name, parts = element
        if name in OWNERSHIP_SETS or name in (SetName.VIRTUAL_IPS, SetName.HAIRPINS):
            return False
        if name in (SetName.LOCAL_NETWORKS, SetName.NODE_IPS):
            return True
        frontend_key = parts[1:] if name is SetName.SOURCES else parts[:3]
        # For a desired frontend all elements are known. Another one may belong to an object that
        # could not be read.
        return (SetName.OWN, frontend_key) in self._elements


def _compare_pools(
    old: Mapping[VirtualService, ServerPool],
    new: Mapping[VirtualService, ServerPool],
    serving: Mapping[VirtualService, frozenset[RealServer] | None],
    changes: Changes,
) -> None:
    """Adds new, changed and removed pools to `changes`. UDP flows to removed real servers that no
    longer serve are cut; `serving` has None for virtual services whose flows are never cut.
    """
    for virtual, pool in new.items():
        old_pool = old.get(virtual)
        if old_pool is None:
            changes.new_pools[virtual] = pool
        elif old_pool != pool:
            changes.changed_pools[virtual] = (old_pool, pool)
            serving_servers = serving.get(virtual)
            if serving_servers is not None:
                removed_servers = {server for server, _ in old_pool.servers} - {server for server, _ in pool.servers}
                changes.udp_cuts |= {(virtual, server) for server in removed_servers - serving_servers}
    for virtual in old.keys() - new.keys():
        changes.old_pools[virtual] = old[virtual]
