# SPDX-License-Identifier: Apache-2.0
"""Plans the writes from the programmed to the desired state, in an order that is safe for readers.
planner.py chooses the Service ports and checks their room; WritePlan collects their writes here.

The order, and why (BpfPlane._apply(), MapState.write() and commit.py execute it):
 1. the packet path's maps of the node (PacketPathLifecycle.write_node());
 2. bits of new ports in `frontend_ports`: without its bit, no frontend of a port is found;
 3. `meta`, so that no id is allocated twice, whatever happens next;
 4. source ranges, names, backends, then slots and members of *new* sets: no program reads them yet.
    Large tables are written by earlier calls (commit.TableBuilder), each after `meta`;
 5. new node addresses, then frontends: the flip. It replaces one value, so a reader sees the
    complete old or new set. New ClusterIPs follow, since they refuse all ports without a frontend;
 6. removed frontends, ClusterIPs, source ranges and node addresses, then bits of ports that no
    frontend has any more;
 7. `udp_cuts`, then the first pass over UDP sockets and flows (udp.py);
 8. after a grace period: old slots and members, then backends that neither a set nor a list of
    serving backends holds, then names and affinity; at last the second UDP pass;
 9. whenever nothing else waits: `endpoint_names`, which no program reads (endpoint_names.py).

A crash between any two steps leaves every frontend with a complete set, old or new.
"""

from array import array
from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from kbpf.dataplane.bpf.maps.ids import IdAllocator, TableKey
from kbpf.dataplane.bpf.maps.layout import KIND_FLAGS, U32_PAIR, ServiceFlag, ServiceValue
from kbpf.model.desired import (
    EVEN_SPREAD,
    Backend,
    BackendSet,
    Frontend,
    FrontendAddress,
    ServicePortKey,
    ServiceState,
    Spread,
)
from kbpf.model.objects import Algorithm, Cidr, Protocol
from kbpf.policy.spread import compute_slots, count_slots


class ProgrammedSet(msgspec.Struct, frozen=True):
    """A set in the kernel.

    `id`: 0 means empty, without slots. `backends`: sorted and unique. `in_set_members`: whether it
    is written to `set_members`. `size`: the number of slots to choose from. `table`: maps these
    slots to backends (0: one slot for each backend). `spread`: what the slots were computed from.
    None if they were adopted; then `content` is the fingerprint() of the table.
    """

    id: int = 0
    backends: BackendSet = ()
    in_set_members: bool = False
    size: int = 0
    spread: Spread | None = EVEN_SPREAD
    content: bytes = b""
    table: int = 0

    def matches(self, backends: BackendSet, spread: Spread, in_set_members: bool) -> bool:
        """Whether this set can stay as it is for these inputs."""
        if self.backends != backends:
            return False
        # EMPTY, which has no slots that the spread or affinity could change.
        if not backends:
            return True
        # Adopted: no map holds the spread, so what was computed from it is compared.
        if self.spread is None:
            return self.in_set_members == in_set_members and self.content == table_content(backends, spread)
        return self.in_set_members == in_set_members and self.spread == spread


EMPTY: Final = ProgrammedSet()
NO_SET: Final = ((), EVEN_SPREAD)


def fingerprint(table: Sequence[int]) -> bytes:
    """A hash of a table (indexes into the set's backends)."""
    return blake2b(array("I", table), digest_size=16).digest()


def table_size(backends: BackendSet, spread: Spread) -> int:
    """The slots of the table that these backends need; 0 if one equal slot for each is enough."""
    slots = len(backends) if spread == EVEN_SPREAD else count_slots(len(backends), spread)
    return slots if slots > len(backends) else 0


def table_key(backends: BackendSet, spread: Spread) -> TableKey:
    """The inputs that determine the table of this set."""
    return tuple(backend.address for backend in backends), spread


MAX_FINGERPRINTS: Final = 16_384
_fingerprints: dict[TableKey, bytes] = {}
"""Of computed tables, to compare with those in the maps."""


def remember_fingerprint(key: TableKey, table: Sequence[int]) -> bytes:
    """Keeps the fingerprint of a table, and returns it."""
    while len(_fingerprints) >= MAX_FINGERPRINTS:
        # the oldest one; it is computed again if it is needed
        del _fingerprints[next(iter(_fingerprints))]
    return _fingerprints.setdefault(key, fingerprint(table))


def table_content(backends: BackendSet, spread: Spread) -> bytes:
    """The fingerprint() of the table that these backends have; b"" if they need none."""
    if not table_size(backends, spread):
        return b""
    key = table_key(backends, spread)
    # Expensive, but only adopted sets get here.
    return _fingerprints.get(key) or remember_fingerprint(key, compute_slots(backends, spread))


class ProgrammedPort(msgspec.Struct, frozen=True):
    """The kernel state of one Service port. `serving`: backends that UDP flows may stay with; ()
    for other protocols, and after adoption, since no map holds it.
    """

    id: int
    flags: ServiceFlag
    affinity_timeout: int
    frontends: tuple[Frontend, ...]
    cluster: ProgrammedSet = EMPTY
    local: ProgrammedSet = EMPTY
    serving: BackendSet = ()
    source_ranges: tuple[Cidr, ...] = ()

    @property
    def sets(self) -> tuple[ProgrammedSet, ProgrammedSet]:
        return self.cluster, self.local

    def service_value(self, frontend: Frontend) -> ServiceValue:
        """The value of this frontend in `services`."""
        restricted = ServiceFlag.RESTRICTED if frontend.restricted else 0
        return ServiceValue(
            self.id,
            int(self.flags | KIND_FLAGS[frontend.kind] | restricted),
            self.affinity_timeout,
            self.cluster.id,
            self.cluster.size,
            self.local.id,
            self.local.size,
            self.cluster.table,
            self.local.table,
        )


@dataclass(slots=True)
class UdpTargets:
    """What UDP flows use: backends and frontends, each with a service id."""

    backends: set[tuple[int, Backend]] = field(default_factory=set)
    frontends: set[tuple[int, FrontendAddress]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.backends or self.frontends)

    def add(self, other: "UdpTargets") -> None:
        self.backends |= other.backends
        self.frontends |= other.frontends

    def remove(self, other: "UdpTargets") -> None:
        self.backends -= other.backends
        self.frontends -= other.frontends


@dataclass(slots=True)
class Retired:
    """What is deleted after the grace period. Stale UDP flows are then cut a second time, for a
    connect() that was in flight during the first. `lost`: backends that no longer serve a service
    id, and frontends that no longer belong to it.
    """

    sets: list[ProgrammedSet] = field(default_factory=list)
    released_backends: list[BackendSet] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    lost: UdpTargets = field(default_factory=UdpTargets)
    forget_affinity: set[int] = field(default_factory=set)
    # keys of slots that belong to no programmed set, one or more back to back
    slot_keys: list[bytes] = field(default_factory=list)
    member_keys: list[bytes] = field(default_factory=list)
    backend_ids: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(slots=True)
class Writes:
    """All writes of one apply(), by step."""

    names: list[tuple[int, ServicePortKey]] = field(default_factory=list)
    backends: list[tuple[int, Backend]] = field(default_factory=list)
    slots: list[tuple[int, Sequence[int]]] = field(default_factory=list)
    members: list[tuple[int, list[int]]] = field(default_factory=list)
    flips: dict[FrontendAddress, ServiceValue] = field(default_factory=dict)
    removed: set[FrontendAddress] = field(default_factory=set)
    new_frontends: int = 0
    new_ranges: list[tuple[int, Cidr]] = field(default_factory=list)
    old_ranges: list[tuple[int, Cidr]] = field(default_factory=list)
    retired: Retired = field(default_factory=Retired)

    def count_entries(self) -> dict[str, int]:
        """The number of new entries in maps that grow."""
        return {
            "services": self.new_frontends,
            "service_names": len(self.names),
            "backend_slots": sum(len(ids) for _, ids in self.slots),
            "set_members": sum(len(ids) for _, ids in self.members),
            "backends": len(self.backends),
        }


class SetChange(NamedTuple):
    """A set as programmed, and what is desired. `stays`: whether the programmed set can stay."""

    old: ProgrammedSet
    backends: BackendSet
    spread: Spread
    in_set_members: bool
    stays: bool


@dataclass(frozen=True, slots=True)
class PortChange:
    """The change of one Service port. `sets`: cluster and local. `serving`: see ProgrammedPort. It
    stays valid while other changes are written, but its cost does not: it depends on the backends
    and tables that exist.
    """

    key: ServicePortKey
    old: ProgrammedPort | None
    new: ServiceState | None
    sets: tuple[SetChange, ...]
    serving: BackendSet

    def count_new_entries(self, ids: IdAllocator) -> dict[str, int]:
        """The maximum number of new entries, by map, before anything is retired."""
        old, new = self.old, self.new
        if new is None:
            return {}
        old_addresses = {frontend.at for frontend in old.frontends} if old else set()
        new_slots, members = 0, 0
        needed_backends = set(self.serving if not old or old.serving != self.serving else ())
        for _, backends, spread, in_set_members, stays in self.sets:
            if not stays:
                # A changed set is written in full: the old one stays for its grace period.
                new_slots += len(backends)
                size = table_size(backends, spread)
                if size and not ids.tables.find(table_key(backends, spread)):
                    new_slots += size
                members += len(backends) if in_set_members else 0
                needed_backends.update(backends)
        return {
            "services": sum(frontend.at not in old_addresses for frontend in new.frontends),
            "service_names": 0 if old else 1,
            "source_ranges": len(set(new.source_ranges) - set(old.source_ranges if old else ())),
            "backend_slots": new_slots,
            "set_members": members,
            "backends": ids.backends.count_unknown(needed_backends),
        }

    def count_leaving_entries(self, ids: IdAllocator) -> dict[str, int]:
        """The number of entries that this change retires, by map. Backends and tables that it
        reuses are not counted.
        """
        retired = Retired()
        reused_backends: set[Backend] = set()
        reused_tables: set[int] = set()
        for old_set, backends, spread, _, stays in self.sets:
            if not stays:
                retired.sets.append(old_set)
                reused_backends.update(backends)
                if table_size(backends, spread):
                    reused_tables.add(ids.tables.find(table_key(backends, spread)))
        if self.old and self.old.serving != self.serving:
            retired.released_backends.append(self.old.serving)
            reused_backends.update(self.serving)
        return count_leaving_entries([retired], ids, reused_backends, reused_tables)


def compute_change(key: ServicePortKey, old: ProgrammedPort | None, new: ServiceState | None) -> PortChange:
    """The change of a Service port from old to new; None if it is not programmed or not desired."""
    has_affinity = new is not None and new.affinity_timeout > 0

    sets = tuple(
        SetChange(old_set, backends, spread, has_affinity, old_set.matches(backends, spread, has_affinity))
        for old_set, (backends, spread) in zip(
            old.sets if old else (EMPTY, EMPTY), new.sets if new else (NO_SET, NO_SET), strict=True
        )
    )
    serving = new.serving if new is not None and key.protocol == Protocol.UDP else ()
    return PortChange(key, old, new, sets, serving)


class WritePlan:
    """Collects the writes of one apply(), and changes no map. But it allocates ids, adds references
    to backends and tables, and removes used ids from `known_ids`; if apply() fails, all of these
    are read from the maps again.
    """

    def __init__(self, ids: IdAllocator, known_ids: dict[ServicePortKey, int] | None = None) -> None:
        """`known_ids`: ids of Service ports that `service_names` already contains; used ones are
        removed from it. Sockets and affinity entries of an earlier agent still carry these ids.
        """
        self._ids = ids
        self._known_ids = {} if known_ids is None else known_ids
        self.writes = Writes()

    def add(self, change: PortChange) -> ProgrammedPort | None:
        """Adds the writes of this change. Returns what will be programmed."""
        old, new = change.old, change.new
        if old is None and new is None:
            return None
        service_id = old.id if old else self._known_ids.pop(change.key, 0)
        if not service_id:
            service_id = self._ids.allocate_service()
            self.writes.names.append((service_id, change.key))
        cluster, local = map(self._plan_set, change.sets)
        self._plan_serving(service_id, old.serving if old else (), change.serving)
        # Otherwise the entries would apply again if affinity is enabled before they expire.
        if old and old.affinity_timeout and not (new and new.affinity_timeout):
            self.writes.retired.forget_affinity.add(service_id)
        self._plan_ranges(service_id, old.source_ranges if old else (), new.source_ranges if new else ())
        if new is None:
            self._plan_frontends(old, None)
            self.writes.retired.names.append(service_id)
            return None
        programmed = ProgrammedPort(
            service_id,
            policy_flags(new),
            new.affinity_timeout,
            new.frontends,
            cluster,
            local,
            change.serving,
            new.source_ranges,
        )
        self._plan_frontends(old, programmed)
        return programmed

    def _plan_frontends(self, old: ProgrammedPort | None, new: ProgrammedPort | None) -> None:
        # At first all old frontends. The loop takes out those that stay, and what remains is lost.
        remaining = {f.at: old.service_value(f) for f in old.frontends} if old else {}
        for frontend in new.frontends if new else ():
            assert new is not None
            value, current = new.service_value(frontend), remaining.pop(frontend.at, None)
            if current != value:
                self.writes.flips[frontend.at] = value
            if current is None:
                self.writes.new_frontends += 1
        if old is not None:
            self._remove_frontends(old, remaining)

    def remove_lost_frontends(self, old: ProgrammedPort, new: ServiceState | None) -> ProgrammedPort:
        """Plans only the removal of frontends that are no longer desired."""
        addresses = {frontend.at for frontend in new.frontends} if new else set()
        kept_frontends = tuple(frontend for frontend in old.frontends if frontend.at in addresses)
        if len(kept_frontends) == len(old.frontends):
            return old
        self._remove_frontends(old, [frontend.at for frontend in old.frontends if frontend.at not in addresses])
        return msgspec.structs.replace(old, frontends=kept_frontends)

    def finish_writes(self) -> Writes:
        """The writes. A frontend that moved to another Service is flipped, not removed."""
        moved_frontends = self.writes.removed & self.writes.flips.keys()
        self.writes.removed -= moved_frontends
        # Their entries exist, with the value of the other Service, and are overwritten.
        self.writes.new_frontends -= len(moved_frontends)
        return self.writes

    def _plan_set(self, change: SetChange) -> ProgrammedSet:
        old, backends, spread, in_set_members, stays = change
        if stays:
            if old.spread is not None:
                return old
            # Adopted, and its slots are equal: they were computed from this spread.
            if old.table:
                self._ids.tables.identify(old.table, table_key(backends, spread))
            return msgspec.structs.replace(old, spread=spread)
        new = EMPTY
        if backends:
            # The old set releases its references only after the grace period: a backend that is in
            # both sets keeps its id.
            self.writes.backends += self._ids.backends.acquire(backends)
            ids = [self._ids.backends.id_of(backend) for backend in backends]
            size = table_size(backends, spread)
            table = self._plan_table(backends, spread) if size else 0
            # A new id, never new slots under the old one: a program must see one set or the other.
            new = ProgrammedSet(
                self._ids.allocate_set(), backends, in_set_members, size or len(ids), spread, table=table
            )
            self.writes.slots.append((new.id, ids))
            if in_set_members:
                # only for affinity: whether the backend of last time is still in the set
                self.writes.members.append((new.id, ids))
        if old.id:
            self.writes.retired.sets.append(old)
        return new

    def _plan_table(self, backends: BackendSet, spread: Spread) -> int:
        """The id of the set's table."""
        table_id, is_new = self._ids.tables.acquire(table_key(backends, spread))
        if is_new:
            # A large table is usually written by now (commit.TableBuilder), but not when all
            # Service ports are compared in one call.
            table = array("I", compute_slots(backends, spread))
            remember_fingerprint(table_key(backends, spread), table)
            self.writes.slots.append((table_id, table))
        return table_id

    def _plan_serving(self, service_id: int, old: BackendSet, new: BackendSet) -> None:
        """UDP flows may stay with any serving backend, so its id must stay valid; flows to others
        are cut (kube-proxy's conntrack/cleanup.go).
        """
        if old == new:
            return
        self.writes.backends += self._ids.backends.acquire(new)
        if old:
            self.writes.retired.released_backends.append(old)
            self.writes.retired.lost.backends.update((service_id, backend) for backend in set(old) - set(new))

    def _remove_frontends(self, old: ProgrammedPort, addresses: Iterable[FrontendAddress]) -> None:
        """Removes frontends. UDP flows through them must not stay with the backends of the old
        Service, whichever Service has the address now (kube-proxy deletes such flows too).
        """
        self.writes.removed.update(addresses)
        udp = {(old.id, address) for address in addresses if address.protocol == Protocol.UDP}
        self.writes.retired.lost.frontends |= udp

    def _plan_ranges(self, service_id: int, old: Iterable[Cidr], new: Iterable[Cidr]) -> None:
        """Ranges are added before the flip and removed after it, so allowed clients are never
        refused.
        """
        self.writes.new_ranges += [(service_id, cidr) for cidr in sorted(set(new) - set(old))]
        self.writes.old_ranges += [(service_id, cidr) for cidr in sorted(set(old) - set(new))]


_INTERNAL_LOCAL, _EXTERNAL_LOCAL, _ANY_ENDPOINTS, _MAGLEV = map(
    int, (ServiceFlag.INTERNAL_LOCAL, ServiceFlag.EXTERNAL_LOCAL, ServiceFlag.ANY_ENDPOINTS, ServiceFlag.MAGLEV)
)


def policy_flags(state: ServiceState) -> ServiceFlag:
    """The flags that all frontends of a Service port share."""
    flags = 0  # a plain int: combining enum members would cost more than everything else here
    if state.internal_local:
        flags |= _INTERNAL_LOCAL
    if state.external_local:
        flags |= _EXTERNAL_LOCAL
    if state.any_endpoints:
        flags |= _ANY_ENDPOINTS
    if state.algorithm is Algorithm.MAGLEV:
        flags |= _MAGLEV
    return ServiceFlag(flags)


def count_leaving_entries(
    pending: Iterable[Retired],
    ids: IdAllocator,
    reused_backends: Container[Backend] = (),
    reused_tables: Set[int] = frozenset(),
) -> dict[str, int]:
    """The number of entries that will be deleted with `pending`, by map. Backends and tables that a
    change reuses are not counted.
    """
    leaving_slots = members = 0
    sets: list[ProgrammedSet] = []
    for retired in pending:
        leaving_slots += sum(map(len, retired.slot_keys)) // U32_PAIR.size
        members += len(retired.member_keys)
        sets += retired.sets
        # id 0: these lists hold references to backends, but have no slots
        sets += [ProgrammedSet(0, backends) for backends in retired.released_backends]
    # A shared table goes only if all sets that use it do, and no new set reuses it.
    leaving_tables = {set_.table: set_.size for set_ in sets if set_.table}
    unused_tables = ids.tables.select_only_in(set_.table for set_ in sets if set_.table) - reused_tables
    leaving_slots += sum(leaving_tables[table_id] for table_id in unused_tables)
    # Besides its table, if any, a set has one slot for each backend.
    leaving_slots += sum(len(set_.backends) for set_ in sets if set_.id)
    members += sum(len(set_.backends) for set_ in sets if set_.id and set_.in_set_members)
    return {
        "backend_slots": leaving_slots,
        "set_members": members,
        "backends": ids.backends.count_only_in((set_.backends for set_ in sets), reused_backends),
    }
