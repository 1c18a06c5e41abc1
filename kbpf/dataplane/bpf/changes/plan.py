"""From what is programmed and what is desired to writes, in the order that keeps readers right.

The order, and why:
 1. `meta`, so that an id that was used is never given out again, whatever happens next;
 2. source ranges, names, backends, then slots and members of *new* sets: nobody reads them yet;
 3. frontends: the flip. One value each; a reader has the old set or the new one, whole. The bit of
    a port in `frontend_ports` is set before its first frontend, and cleared after its last one;
 4. frontends and source ranges that are gone;
 5. after a grace period: old slots and members, then backends that no set holds.
A crash between any two steps leaves every frontend with a complete set, old or new.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import msgspec

from kbpf.dataplane.bpf.maps.ids import BackendTable, Ids, SharedTables, TableKey
from kbpf.dataplane.bpf.maps.layout import KIND_FLAGS, ServiceFlag, ServiceValue
from kbpf.model.desired import (
    EVENLY,
    Backend,
    BackendSet,
    Frontend,
    FrontendAddress,
    ServicePortKey,
    ServiceState,
    Spread,
)
from kbpf.model.objects import Algorithm, Cidr, Protocol
from kbpf.policy.slots import slot_count, slots


class ProgrammedSet(msgspec.Struct, frozen=True):
    """A set in the kernel: its id (0: empty, no slots), its backends (sorted, each once), whether
    in set_members, how many slots a choice is made of, and the table that leads from these to the
    backends (0: there is one slot for each backend).

    `spread`: what the slots were made of. None when they were found in the maps; then `content` is
    the fingerprint() of the table.
    """

    id: int = 0
    backends: BackendSet = ()
    members: bool = False
    size: int = 0
    spread: Spread | None = EVENLY
    content: bytes = b""
    table: int = 0

    def stays(self, backends: BackendSet, spread: Spread, members: bool) -> bool:
        """Whether the set is just what is wanted."""
        if self.backends != backends:
            return False
        if not backends:
            return True
        if self.spread is None:
            return self.members == members and self.content == _content(backends, spread)
        return self.members == members and self.spread == spread


EMPTY: Final = ProgrammedSet()


def fingerprint(table: Sequence[int]) -> bytes:
    """Equal for equal tables (indexes into the set's backends)."""
    return blake2b(array("I", table), digest_size=16).digest()


def needs_table(backends: BackendSet, spread: Spread) -> bool:
    """Whether a choice among these is more than one of as many equal slots."""
    return spread != EVENLY and slot_count(len(backends), spread) > len(backends)


def table_key(backends: BackendSet, spread: Spread) -> TableKey:
    """What the table of this set depends on."""
    return tuple(backend.address for backend in backends), spread


MOST_REMEMBERED: Final = 16_384
_fingerprints: dict[TableKey, bytes] = {}
"""Of tables that were computed: those in the maps are compared with them now and then."""


def remember(key: TableKey, table: Sequence[int]) -> bytes:
    """Keeps the fingerprint of a table, and returns it."""
    while len(_fingerprints) >= MOST_REMEMBERED:
        del _fingerprints[next(iter(_fingerprints))]
    return _fingerprints.setdefault(key, fingerprint(table))


def _content(backends: BackendSet, spread: Spread) -> bytes:
    if not needs_table(backends, spread):
        return b""
    key = table_key(backends, spread)
    return _fingerprints.get(key) or remember(key, slots(backends, spread))


class Programmed(msgspec.Struct, frozen=True):
    """What the kernel holds for one Service port."""

    id: int
    flags: ServiceFlag
    affinity_timeout: int
    frontends: tuple[Frontend, ...]
    cluster: ProgrammedSet = EMPTY
    local: ProgrammedSet = EMPTY
    serving: BackendSet = ()
    source_ranges: tuple[Cidr, ...] = ()

    def value(self, frontend: Frontend) -> ServiceValue:
        """What stands behind this frontend."""
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
    """What is deleted after the grace period, and whose UDP is cut once more then: a connect()
    may have been on its way the first time. `cut`: backends that serve a service id no more;
    `left`: frontends that are not this service id's any more.
    """

    sets: list[ProgrammedSet] = field(default_factory=list)
    release: list[BackendSet] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    cut: set[tuple[int, Backend]] = field(default_factory=set)
    left: set[tuple[int, FrontendAddress]] = field(default_factory=set)
    forget_affinity: set[int] = field(default_factory=set)
    slot_keys: list[bytes] = field(default_factory=list)  # of sets that were found, not planned
    member_keys: list[bytes] = field(default_factory=list)
    backend_ids: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(slots=True)
class Writes:
    """Everything that one apply() writes, by step."""

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
    """Collects the writes of one apply(). Pure but for the ids that it gives out."""

    def __init__(
        self,
        ids: Ids,
        table: BackendTable,
        known: dict[ServicePortKey, int] | None = None,
        tables: SharedTables | None = None,
    ) -> None:
        """`known`: ids of Service ports that are named in the map already; used ones are taken
        out. Sockets and affinity entries of before still carry them.
        """
        self._ids = ids
        self._table = table
        self._tables = SharedTables(ids) if tables is None else tables
        self._known = {} if known is None else known
        self.writes = Writes()

    def change(
        self, key: ServicePortKey, old: Programmed | None, new: ServiceState | None
    ) -> Programmed | None:
        """Plans one Service port from old to new; what will be programmed."""
        if new is None:
            if old is not None:
                self._remove(old)
            return None
        after = self._build(key, old, new)
        before = {f.at: old.value(f) for f in old.frontends} if old else {}
        for frontend in after.frontends:
            value, had = after.value(frontend), before.pop(frontend.at, None)
            if had != value:
                self.writes.flips[frontend.at] = value
            if had is None:
                self.writes.new_frontends += 1
        if old is not None:
            self._leave(old, before)
        return after

    def take_off(self, old: Programmed, new: ServiceState | None) -> Programmed:
        """Plans only that frontends go which are not wanted any more."""
        wanted = {f.at for f in new.frontends} if new else set()
        kept = tuple(f for f in old.frontends if f.at in wanted)
        if len(kept) == len(old.frontends):
            return old
        self._leave(old, [f.at for f in old.frontends if f.at not in wanted])
        return msgspec.structs.replace(old, frontends=kept)

    def finish(self) -> Writes:
        """The writes. A frontend that moved to another Service is flipped, not removed."""
        moved = self.writes.removed & self.writes.flips.keys()
        self.writes.removed -= moved
        self.writes.new_frontends -= len(moved)
        return self.writes

    def _build(self, key: ServicePortKey, old: Programmed | None, new: ServiceState) -> Programmed:
        service_id = old.id if old else self._known.pop(key, 0)
        if not service_id:
            service_id = self._ids.service()
            self.writes.names.append((service_id, key))
        affine = new.affinity_timeout > 0
        had, had_local = (old.cluster, old.local) if old else (EMPTY, EMPTY)
        cluster = self._set(had, new.cluster, new.cluster_spread, affine)
        local = self._set(had_local, new.local, new.local_spread, affine)
        serving = new.serving if key.protocol == Protocol.UDP else ()
        self._serving(service_id, old.serving if old else (), serving)
        if old and old.affinity_timeout and not affine:
            self.writes.retired.forget_affinity.add(service_id)
        self._ranges(service_id, old.source_ranges if old else (), new.source_ranges)
        return Programmed(
            service_id, policy_flags(new), new.affinity_timeout, new.frontends, cluster, local,
            serving, new.source_ranges,
        )  # fmt: skip

    def _set(
        self, old: ProgrammedSet, backends: BackendSet, spread: Spread, affine: bool
    ) -> ProgrammedSet:
        if old.stays(backends, spread, affine):
            if old.spread is not None:
                return old
            if old.table:
                self._tables.identify(old.table, table_key(backends, spread))
            return msgspec.structs.replace(old, spread=spread)
        new = EMPTY
        if backends:
            self.writes.backends += self._table.hold(backends)
            ids = [self._table.id_of(b) for b in backends]
            table, size = self._shared(backends, spread)
            new = ProgrammedSet(
                self._ids.set(), backends, affine, size or len(ids), spread, table=table
            )
            self.writes.slots.append((new.id, ids))
            if affine:
                self.writes.members.append((new.id, ids))
        self._retire(old)
        return new

    def _shared(self, backends: BackendSet, spread: Spread) -> tuple[int, int]:
        """The id and the size of the set's table; 0 and 0 when it needs none."""
        if not needs_table(backends, spread):
            return 0, 0
        number, is_new = self._tables.hold(table_key(backends, spread))
        if is_new:
            table = array("I", slots(backends, spread))
            remember(table_key(backends, spread), table)
            self.writes.slots.append((number, table))
        return number, slot_count(len(backends), spread)

    def _serving(self, service_id: int, old: BackendSet, new: BackendSet) -> None:
        """UDP flows may stay with any backend that serves, so its id must live; the others' are
        cut (kube-proxy's conntrack/cleanup.go).
        """
        if old == new:
            return
        self.writes.backends += self._table.hold(new)
        if old:
            self.writes.retired.release.append(old)
            self.writes.retired.cut.update((service_id, b) for b in set(old) - set(new))

    def _leave(self, old: Programmed, gone: Iterable[FrontendAddress]) -> None:
        """UDP that was sent there must not go on with the backends of a Service that has left,
        whoever has the address now (kube-proxy forgets such flows).
        """
        self.writes.removed.update(gone)
        udp = {(old.id, at) for at in gone if at.protocol == Protocol.UDP}
        self.writes.retired.left |= udp

    def _ranges(self, service_id: int, old: Iterable[Cidr], new: Iterable[Cidr]) -> None:
        """Who is let in is let in before the flip, who is shut out is shut out after it."""
        self.writes.new_ranges += [(service_id, cidr) for cidr in sorted(set(new) - set(old))]
        self.writes.old_ranges += [(service_id, cidr) for cidr in sorted(set(old) - set(new))]

    def _retire(self, old: ProgrammedSet) -> None:
        if old.id:
            self.writes.retired.sets.append(old)

    def _remove(self, old: Programmed) -> None:
        self._leave(old, [f.at for f in old.frontends])
        self._retire(old.cluster)
        self._retire(old.local)
        self._serving(old.id, old.serving, ())
        self._ranges(old.id, old.source_ranges, ())
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
    flags = 0  # of a plain integer: joining members of an enum costs more than all else here
    if state.internal_local:
        flags |= _INTERNAL_LOCAL
    if state.external_local:
        flags |= _EXTERNAL_LOCAL
    if state.any_endpoints:
        flags |= _ANY_ENDPOINTS
    if state.algorithm is Algorithm.MAGLEV:
        flags |= _MAGLEV
    return ServiceFlag(flags)


def need(
    old: Programmed | None, new: ServiceState | None, table: BackendTable, tables: SharedTables
) -> dict[str, int]:
    """How many new entries a change takes at most, by map, before anything old is retired."""
    if new is None:
        return {}
    old_at = {f.at for f in old.frontends} if old else set()
    affine = new.affinity_timeout > 0
    serving = new.serving if new.key.protocol == Protocol.UDP else ()
    places, members = 0, 0
    held = set(serving if not old or old.serving != serving else ())
    for had, wanted, spread in _sets(old, new):
        if not had.stays(wanted, spread, affine):
            places += len(wanted)
            if needs_table(wanted, spread) and not tables.find(table_key(wanted, spread)):
                places += slot_count(len(wanted), spread)
            members += len(wanted)
            held.update(wanted)
    return {
        "services": sum(f.at not in old_at for f in new.frontends),
        "service_names": 0 if old else 1,
        "source_ranges": len(set(new.source_ranges) - set(old.source_ranges if old else ())),
        "backend_slots": places,
        "set_members": members if affine else 0,
        "backends": table.unknown(held),
    }


def _sets(
    old: Programmed | None, new: ServiceState
) -> Iterable[tuple[ProgrammedSet, BackendSet, Spread]]:
    """Both sets: what is programmed, and what is wanted."""
    had, had_local = (old.cluster, old.local) if old else (EMPTY, EMPTY)
    yield had, new.cluster, new.cluster_spread
    yield had_local, new.local, new.local_spread


def leaving(
    waiting: Iterable[Retired],
    old: Programmed | None,
    new: ServiceState | None,
    table: BackendTable,
    tables: SharedTables,
) -> dict[str, int]:
    """How many entries are on their way out, by map: what waits for its grace period, and what
    this change puts out of use. Backends and tables that it uses again stay.
    """
    places = members = 0
    sets = []
    used: set[Backend] = set()
    used_tables: set[int] = set()
    for retired in waiting:
        places += len(retired.slot_keys)
        members += len(retired.member_keys)
        sets += [*(s for s in retired.sets)]
        sets += [ProgrammedSet(0, backends) for backends in retired.release]
    if old is not None and new is not None:
        for had, to, spread in _sets(old, new):
            if not had.stays(to, spread, new.affinity_timeout > 0):
                sets.append(had)
                used.update(to)
                if needs_table(to, spread):
                    used_tables.add(tables.find(table_key(to, spread)))
        serving = new.serving if new.key.protocol == Protocol.UDP else ()
        if old.serving != serving:
            sets.append(ProgrammedSet(0, old.serving))
            used.update(serving)
    elif old is not None:
        sets += [old.cluster, old.local, ProgrammedSet(0, old.serving)]
    leaving_tables = {s.table: s.size for s in sets if s.table}
    gone = tables.only_in(s.table for s in sets if s.table) - used_tables
    places += sum(leaving_tables[number] for number in gone)
    places += sum(len(s.backends) for s in sets if s.id)
    members += sum(len(s.backends) for s in sets if s.id and s.members)
    return {
        "backend_slots": places,
        "set_members": members,
        "backends": table.only_in((s.backends for s in sets), used),
    }
