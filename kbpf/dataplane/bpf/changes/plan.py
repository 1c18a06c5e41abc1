# SPDX-License-Identifier: Apache-2.0
"""Plans the writes from the programmed to the desired state, in an order that is safe for readers.

The order, and why (BpfPlane._apply() and commit.py execute it):
 1. the packet path's maps of the node (Attachments.write_node());
 2. bits of new ports in `frontend_ports`: without its bit, no frontend of a port is found;
 3. `meta`, so that no id is allocated twice, whatever happens next;
 4. source ranges, names, backends, then slots and members of *new* sets: no program reads them yet.
    Large tables are written by earlier calls (large_tables.py), each after `meta`;
 5. new node addresses, then frontends: the flip. It replaces one value, so a reader sees the
    complete old or new set. New ClusterIPs follow, since they refuse all ports without a frontend;
 6. removed frontends, ClusterIPs, source ranges and node addresses, then bits of ports that no
    frontend has any more;
 7. `udp_cuts`, then the first pass over UDP sockets and flows (udp.py);
 8. after a grace period: old slots and members, then backends that neither a set nor a list of
    serving backends holds, then names and affinity; at last the second UDP pass.

A crash between any two steps leaves every frontend with a complete set, old or new.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import msgspec

from kbpf.dataplane.bpf.maps.ids import BackendTable, IdAllocator, SharedTables, TableKey
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
from kbpf.policy.slots import compute_slots, count_slots


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
            return self.in_set_members == in_set_members and self.content == _table_content(
                backends, spread
            )
        return self.in_set_members == in_set_members and self.spread == spread


EMPTY: Final = ProgrammedSet()


def fingerprint(table: Sequence[int]) -> bytes:
    """A hash of a table (indexes into the set's backends)."""
    return blake2b(array("I", table), digest_size=16).digest()


def needs_table(backends: BackendSet, spread: Spread) -> bool:
    """Whether these backends need a table, i.e. more than one equal slot for each."""
    return spread != EVEN_SPREAD and count_slots(len(backends), spread) > len(backends)


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


def _table_content(backends: BackendSet, spread: Spread) -> bytes:
    if not needs_table(backends, spread):
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
class Retired:
    """What is deleted after the grace period. Stale UDP flows are then cut a second time, for a
    connect() that was in flight during the first. `lost_backends`: backends that no longer serve a
    service id; `lost_frontends`: frontends that no longer belong to it.
    """

    sets: list[ProgrammedSet] = field(default_factory=list)
    released_backends: list[BackendSet] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    lost_backends: set[tuple[int, Backend]] = field(default_factory=set)
    lost_frontends: set[tuple[int, FrontendAddress]] = field(default_factory=set)
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


class Planner:
    """Collects the writes of one apply(), and changes no map. But it allocates ids, adds references
    to backends and tables, and removes used ids from `known_ids`; if apply() fails, all of these
    are read from the maps again.
    """

    def __init__(
        self,
        ids: IdAllocator,
        backend_table: BackendTable,
        known_ids: dict[ServicePortKey, int] | None = None,
        shared_tables: SharedTables | None = None,
    ) -> None:
        """`known_ids`: ids of Service ports that `service_names` already contains; used ones are
        removed from it. Sockets and affinity entries of an earlier agent still carry these ids.
        """
        self._ids = ids
        self._backend_table = backend_table
        self._shared_tables = SharedTables(ids) if shared_tables is None else shared_tables
        self._known_ids = {} if known_ids is None else known_ids
        self.writes = Writes()

    def plan_port(
        self, key: ServicePortKey, old: ProgrammedPort | None, new: ServiceState | None
    ) -> ProgrammedPort | None:
        """Plans one Service port from old to new. Returns what will be programmed."""
        if new is None:
            if old is not None:
                self._remove(old)
            return None
        programmed = self._build(key, old, new)
        # At first all old frontends. The loop takes out those that stay, and what remains is lost.
        remaining = {f.at: old.service_value(f) for f in old.frontends} if old else {}
        for frontend in programmed.frontends:
            value, current = programmed.service_value(frontend), remaining.pop(frontend.at, None)
            if current != value:
                self.writes.flips[frontend.at] = value
            if current is None:
                self.writes.new_frontends += 1
        if old is not None:
            self._remove_frontends(old, remaining)
        return programmed

    def remove_lost_frontends(
        self, old: ProgrammedPort, new: ServiceState | None
    ) -> ProgrammedPort:
        """Plans only the removal of frontends that are no longer desired."""
        addresses = {frontend.at for frontend in new.frontends} if new else set()
        kept_frontends = tuple(frontend for frontend in old.frontends if frontend.at in addresses)
        if len(kept_frontends) == len(old.frontends):
            return old
        self._remove_frontends(
            old, [frontend.at for frontend in old.frontends if frontend.at not in addresses]
        )
        return msgspec.structs.replace(old, frontends=kept_frontends)

    def finish_writes(self) -> Writes:
        """The writes. A frontend that moved to another Service is flipped, not removed."""
        moved_frontends = self.writes.removed & self.writes.flips.keys()
        self.writes.removed -= moved_frontends
        # Their entries exist, with the value of the other Service, and are overwritten.
        self.writes.new_frontends -= len(moved_frontends)
        return self.writes

    def _build(
        self, key: ServicePortKey, old: ProgrammedPort | None, new: ServiceState
    ) -> ProgrammedPort:
        service_id = old.id if old else self._known_ids.pop(key, 0)
        if not service_id:
            service_id = self._ids.allocate_service()
            self.writes.names.append((service_id, key))
        has_affinity = new.affinity_timeout > 0
        old_cluster, old_local = (old.cluster, old.local) if old else (EMPTY, EMPTY)
        cluster = self._plan_set(old_cluster, new.cluster, new.cluster_spread, has_affinity)
        local = self._plan_set(old_local, new.local, new.local_spread, has_affinity)
        serving = new.serving if key.protocol == Protocol.UDP else ()
        self._plan_serving(service_id, old.serving if old else (), serving)
        # Otherwise the entries would apply again if affinity is enabled before they expire.
        if old and old.affinity_timeout and not has_affinity:
            self.writes.retired.forget_affinity.add(service_id)
        self._plan_ranges(service_id, old.source_ranges if old else (), new.source_ranges)
        return ProgrammedPort(
            service_id, policy_flags(new), new.affinity_timeout, new.frontends, cluster, local,
            serving, new.source_ranges,
        )  # fmt: skip

    def _plan_set(
        self, old: ProgrammedSet, backends: BackendSet, spread: Spread, has_affinity: bool
    ) -> ProgrammedSet:
        if old.matches(backends, spread, has_affinity):
            if old.spread is not None:
                return old
            # Adopted, and its slots are equal: they were computed from this spread.
            if old.table:
                self._shared_tables.identify(old.table, table_key(backends, spread))
            return msgspec.structs.replace(old, spread=spread)
        new = EMPTY
        if backends:
            # The old set releases its references only after the grace period: a backend that is in
            # both sets keeps its id.
            self.writes.backends += self._backend_table.acquire(backends)
            ids = [self._backend_table.id_of(backend) for backend in backends]
            table, size = self._plan_table(backends, spread)
            # A new id, never new slots under the old one: a program must see one set or the other.
            new = ProgrammedSet(
                self._ids.allocate_set(),
                backends,
                has_affinity,
                size or len(ids),
                spread,
                table=table,
            )
            self.writes.slots.append((new.id, ids))
            if has_affinity:
                # only for affinity: whether the backend of last time is still in the set
                self.writes.members.append((new.id, ids))
        self._retire_set(old)
        return new

    def _plan_table(self, backends: BackendSet, spread: Spread) -> tuple[int, int]:
        """The id and size of the set's table; 0 and 0 if it needs none."""
        if not needs_table(backends, spread):
            return 0, 0
        table_id, is_new = self._shared_tables.acquire(table_key(backends, spread))
        if is_new:
            # Large tables are usually written by now (large_tables.py), but not when all Service
            # ports are compared in one call.
            table = array("I", compute_slots(backends, spread))
            remember_fingerprint(table_key(backends, spread), table)
            self.writes.slots.append((table_id, table))
        return table_id, count_slots(len(backends), spread)

    def _plan_serving(self, service_id: int, old: BackendSet, new: BackendSet) -> None:
        """UDP flows may stay with any serving backend, so its id must stay valid; flows to others
        are cut (kube-proxy's conntrack/cleanup.go).
        """
        if old == new:
            return
        self.writes.backends += self._backend_table.acquire(new)
        if old:
            self.writes.retired.released_backends.append(old)
            self.writes.retired.lost_backends.update(
                (service_id, backend) for backend in set(old) - set(new)
            )

    def _remove_frontends(self, old: ProgrammedPort, addresses: Iterable[FrontendAddress]) -> None:
        """Removes frontends. UDP flows through them must not stay with the backends of the old
        Service, whichever Service has the address now (kube-proxy deletes such flows too).
        """
        self.writes.removed.update(addresses)
        udp = {(old.id, address) for address in addresses if address.protocol == Protocol.UDP}
        self.writes.retired.lost_frontends |= udp

    def _plan_ranges(self, service_id: int, old: Iterable[Cidr], new: Iterable[Cidr]) -> None:
        """Ranges are added before the flip and removed after it, so allowed clients are never
        refused.
        """
        self.writes.new_ranges += [(service_id, cidr) for cidr in sorted(set(new) - set(old))]
        self.writes.old_ranges += [(service_id, cidr) for cidr in sorted(set(old) - set(new))]

    def _retire_set(self, old: ProgrammedSet) -> None:
        if old.id:
            self.writes.retired.sets.append(old)

    def _remove(self, old: ProgrammedPort) -> None:
        self._remove_frontends(old, [frontend.at for frontend in old.frontends])
        self._retire_set(old.cluster)
        self._retire_set(old.local)
        self._plan_serving(old.id, old.serving, ())
        self._plan_ranges(old.id, old.source_ranges, ())
        self.writes.retired.names.append(old.id)
        if old.affinity_timeout:
            self.writes.retired.forget_affinity.add(old.id)


_INTERNAL_LOCAL, _EXTERNAL_LOCAL, _ANY_ENDPOINTS, _MAGLEV = map(
    int,
    (
        ServiceFlag.INTERNAL_LOCAL,
        ServiceFlag.EXTERNAL_LOCAL,
        ServiceFlag.ANY_ENDPOINTS,
        ServiceFlag.MAGLEV,
    ),
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


def count_new_entries(
    old: ProgrammedPort | None,
    new: ServiceState | None,
    backend_table: BackendTable,
    shared_tables: SharedTables,
) -> dict[str, int]:
    """The maximum number of new entries of a change, by map, before anything is retired."""
    if new is None:
        return {}
    old_addresses = {frontend.at for frontend in old.frontends} if old else set()
    has_affinity = new.affinity_timeout > 0
    serving = new.serving if new.key.protocol == Protocol.UDP else ()
    new_slots, members = 0, 0
    needed_backends = set(serving if not old or old.serving != serving else ())
    for old_set, backends, spread in _pair_sets(old, new):
        if not old_set.matches(backends, spread, has_affinity):
            # A changed set is written in full: the old one stays for its grace period.
            new_slots += len(backends)
            if needs_table(backends, spread) and not shared_tables.find(
                table_key(backends, spread)
            ):
                new_slots += count_slots(len(backends), spread)
            members += len(backends)
            needed_backends.update(backends)
    return {
        "services": sum(frontend.at not in old_addresses for frontend in new.frontends),
        "service_names": 0 if old else 1,
        "source_ranges": len(set(new.source_ranges) - set(old.source_ranges if old else ())),
        "backend_slots": new_slots,
        "set_members": members if has_affinity else 0,
        "backends": backend_table.count_unknown(needed_backends),
    }


def _pair_sets(
    old: ProgrammedPort | None, new: ServiceState
) -> Iterable[tuple[ProgrammedSet, BackendSet, Spread]]:
    """Both sets: as programmed, and as desired."""
    old_cluster, old_local = (old.cluster, old.local) if old else (EMPTY, EMPTY)
    yield old_cluster, new.cluster, new.cluster_spread
    yield old_local, new.local, new.local_spread


def count_leaving_entries(
    pending: Iterable[Retired],
    old: ProgrammedPort | None,
    new: ServiceState | None,
    backend_table: BackendTable,
    shared_tables: SharedTables,
) -> dict[str, int]:
    """The number of entries that will be deleted, by map: those in their grace period, and those
    that this change retires. Backends and tables that it reuses are not counted.
    """
    leaving_slots = members = 0
    sets = []
    reused_backends: set[Backend] = set()
    reused_tables: set[int] = set()
    for retired in pending:
        leaving_slots += sum(map(len, retired.slot_keys)) // U32_PAIR.size
        members += len(retired.member_keys)
        sets += [*(set_ for set_ in retired.sets)]
        # id 0: these lists hold references to backends, but have no slots
        sets += [ProgrammedSet(0, backends) for backends in retired.released_backends]
    if old is not None and new is not None:
        for old_set, new_backends, spread in _pair_sets(old, new):
            if not old_set.matches(new_backends, spread, new.affinity_timeout > 0):
                sets.append(old_set)
                reused_backends.update(new_backends)
                if needs_table(new_backends, spread):
                    reused_tables.add(shared_tables.find(table_key(new_backends, spread)))
        serving = new.serving if new.key.protocol == Protocol.UDP else ()
        if old.serving != serving:
            sets.append(ProgrammedSet(0, old.serving))
            reused_backends.update(serving)
    elif old is not None:
        sets += [old.cluster, old.local, ProgrammedSet(0, old.serving)]
    # A shared table goes only if all sets that use it do, and no new set reuses it.
    leaving_tables = {set_.table: set_.size for set_ in sets if set_.table}
    unused_tables = (
        shared_tables.select_only_in(set_.table for set_ in sets if set_.table) - reused_tables
    )
    leaving_slots += sum(leaving_tables[table_id] for table_id in unused_tables)
    # Besides its table, if any, a set has one slot for each backend.
    leaving_slots += sum(len(set_.backends) for set_ in sets if set_.id)
    members += sum(len(set_.backends) for set_ in sets if set_.id and set_.in_set_members)
    return {
        "backend_slots": leaving_slots,
        "set_members": members,
        "backends": backend_table.count_only_in((set_.backends for set_ in sets), reused_backends),
    }
