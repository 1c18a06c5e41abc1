# SPDX-License-Identifier: Apache-2.0
"""Compares the maps that the agent writes with a desired state, entry by entry.

Nothing that an agent remembers is used, and nothing of how it adopts maps: what counts is what the
programs would do with each entry. Ids are the kernel's own; a set is compared by the backends that
its ids lead to.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.ids import ID_LIMIT
from kbpf.dataplane.bpf.maps.layout import (
    KIND_FLAGS,
    META,
    U32,
    U32_PAIR,
    Meta,
    ServiceFlag,
    ServiceValue,
    unpack_ports,
    unpack_service_name,
    unpack_source_range,
)
from kbpf.dataplane.bpf.state.commit import pack_endpoint
from kbpf.dataplane.bpf.state.contents import (
    NODE_PORTS_ID,
    is_valid_entry,
    unpack_address,
    unpack_backend,
)
from kbpf.dataplane.bpf.state.plan import (
    fingerprint,
    needs_table,
    policy_flags,
    table_content,
)
from kbpf.dataplane.bpf.state.quotas import TableLimits
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr, format_addr
from kbpf.model.config import Config
from kbpf.model.desired import (
    Backend,
    BackendSet,
    DesiredState,
    Frontend,
    FrontendAddress,
    FrontendKind,
    ServicePortKey,
    ServiceState,
    Spread,
)
from kbpf.model.inspection import Difference, DifferenceKind, Finding
from kbpf.model.objects import Cidr, Protocol

MAPS_COMPARED: Final = (
    "services", "service_names", "backend_slots", "backends", "set_members", "source_ranges",
    "node_addresses", "cluster_ips", "frontend_ports", "meta",
)  # fmt: skip
"""In the order in which they are read: frontends before what they refer to (snapshot.py)."""

AGENT_REPAIRS: Final = "the agent repairs it with its next comparison (--config-sync-period)"
START_AGENT: Final = "start the agent, or restart it to repair this at once"
MAX_NAMED: Final = 3
"""How many addresses a text names; of the others it gives the number."""

MISSING, CHANGED, STALE, FOREIGN, DAMAGED = (
    DifferenceKind.MISSING, DifferenceKind.CHANGED, DifferenceKind.STALE, DifferenceKind.FOREIGN,
    DifferenceKind.DAMAGED,
)  # fmt: skip


class Contents(NamedTuple):
    """The entries of MAPS_COMPARED, read once. `damaged`: map and key of entries that no agent
    writes; they are in no other field.
    """

    services: Mapping[bytes, bytes]
    names: Mapping[int, ServicePortKey]
    slots: Mapping[int, Mapping[int, int]]
    backends: Mapping[int, Backend]
    members: frozenset[tuple[int, int]]
    ranges: frozenset[tuple[int, Cidr]]
    node_addresses: frozenset[Addr]
    cluster_ips: frozenset[Addr]
    ports: frozenset[int]
    next_ids: Meta
    damaged: tuple[tuple[str, bytes], ...]


def read_contents(maps: Mapping[str, Map]) -> Contents:
    """Reads all of MAPS_COMPARED."""
    raw = {name: dict(maps[name].items()) for name in MAPS_COMPARED if name != "backend_slots"}
    slots: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for keys, values in maps["backend_slots"].batches():
        pairs = array("I", keys)
        for set_id, index, value in zip(pairs[0::2], pairs[1::2], array("I", values), strict=True):
            slots[set_id][index] = value
    damaged = tuple(
        (name, key)
        for name in ("services", "service_names", "backends")
        for key, value in raw[name].items()
        if not is_valid_entry(name, key, value)
    )
    for name, key in damaged:
        del raw[name][key]
    return Contents(
        raw["services"],
        {U32.unpack(key)[0]: unpack_service_name(v) for key, v in raw["service_names"].items()},
        slots,
        {U32.unpack(key)[0]: unpack_backend(value) for key, value in raw["backends"].items()},
        frozenset(U32_PAIR.unpack(key) for key in raw["set_members"]),
        frozenset(unpack_source_range(key) for key in raw["source_ranges"]),
        frozenset(map(Addr, raw["node_addresses"])),
        frozenset(map(Addr, raw["cluster_ips"])),
        frozenset(unpack_ports(raw["frontend_ports"].items())),
        Meta(*META.unpack(raw["meta"].get(U32.pack(0)) or bytes(META.size))),
        damaged,
    )


def compare(contents: Contents, desired: DesiredState, config: Config) -> list[Finding]:
    """All differences, those of Service ports first."""
    return list(_Comparison(contents, desired, config).findings())


class _Set(NamedTuple):
    """A set that the kernel has. `problem`: why it cannot be used, and the map where that is;
    otherwise "". `table`: the fingerprint of its table, b"" without one.
    """

    backends: BackendSet
    table: bytes = b""
    where: str = ""
    problem: str = ""


class _Comparison:
    def __init__(self, contents: Contents, desired: DesiredState, config: Config) -> None:
        self._contents, self._desired = contents, desired
        self._limits = TableLimits()
        self._limits.update(desired.services, desired.services.keys())
        self._values: dict[bytes, ServiceValue] = {}  # without those with a wrong check word
        self._wrong_checks: set[bytes] = set()
        self._frontends: defaultdict[int, list[bytes]] = defaultdict(list)
        for key, raw in contents.services.items():
            value = ServiceValue.unpack(raw)
            if value.pack(key) == raw:
                self._values[key] = value
                self._frontends[value.id].append(key)
            else:
                self._wrong_checks.add(key)
        self._ids: defaultdict[ServicePortKey, list[int]] = defaultdict(list)
        for number, name in contents.names.items():
            self._ids[name].append(number)
        self._sets: dict[tuple[int, int, int], _Set] = {}
        self._examined: set[bytes] = set()  # frontends of `services` that were compared
        self._expected_ranges: set[tuple[int, Cidr]] = {
            (NODE_PORTS_ID, cidr) for cidr in config.node_port_source_ranges
        }
        self._members: set[tuple[int, int]] = set()  # that sets with affinity need

    def findings(self) -> Iterator[Finding]:
        for key, state in self._desired.services.items():
            programmable = self._limits.effective_state(state)
            for difference in self._compare_port(key, programmable):
                yield Finding(key, difference)
        yield from self._find_other_frontends()
        yield from self._find_leftovers()
        yield from (Finding(None, difference) for difference in self._compare_shared())

    # ---- Service ports ---------------------------------------------------------------------

    def _compare_port(self, key: ServicePortKey, state: ServiceState) -> Iterator[Difference]:
        ids = self._ids.get(key, [])
        if not ids and not (unnamed := self._find_unnamed(state)):
            text = _count(len(state.frontends), "frontend")
            yield Difference(MISSING, "services", str(key), text, "", AGENT_REPAIRS)
            self._examined.update(pack_endpoint(frontend.at) for frontend in state.frontends)
            return
        if not ids:
            text = f"a name for id {unnamed}"
            yield Difference(MISSING, "service_names", str(key), text, "", AGENT_REPAIRS)
            ids = [unnamed]
        seen: dict[tuple[int, ...], None] = {}
        for frontend in state.frontends:
            raw_key = pack_endpoint(frontend.at)
            self._examined.add(raw_key)
            yield from self._compare_frontend(key, state, frontend, raw_key, ids)
            if (value := self._values.get(raw_key)) is not None and value.id in ids:
                seen[value.cluster_set, value.cluster_size, value.cluster_table, 0] = None
                seen[value.local_set, value.local_size, value.local_table, 1] = None
        for *triple, is_local in seen:
            yield from self._compare_set(key, state, (triple[0], triple[1], triple[2]), is_local)
        used = [number for number in ids if number in self._frontends] or ids
        yield from self._compare_ranges(key, state, used[0])
        desired_keys = {pack_endpoint(frontend.at) for frontend in state.frontends}
        for number in ids:
            for raw_key in self._frontends.get(number, ()):
                if raw_key not in desired_keys and raw_key not in self._examined:
                    self._examined.add(raw_key)
                    yield Difference(
                        STALE, "services", str(key), "", str(unpack_address(raw_key)), AGENT_REPAIRS
                    )

    def _find_unnamed(self, state: ServiceState) -> int:
        """The id of the state's frontends if it has no name; 0 if there is none."""
        ids = {
            value.id
            for frontend in state.frontends
            if (value := self._values.get(pack_endpoint(frontend.at))) is not None
        }
        unnamed = ids - self._contents.names.keys()
        return unnamed.pop() if len(unnamed) == 1 else 0

    def _compare_frontend(
        self,
        key: ServicePortKey,
        state: ServiceState,
        frontend: Frontend,
        raw_key: bytes,
        ids: list[int],
    ) -> Iterator[Difference]:
        text = f"{frontend.kind} {frontend.at}"

        def differ(kind: DifferenceKind, desired: str, actual: str) -> Difference:
            return Difference(kind, "services", str(key), desired, actual, AGENT_REPAIRS)

        value = self._values.get(raw_key)
        if value is None:
            if raw_key in self._wrong_checks:
                actual = f"{frontend.at} with a wrong check word: programs ignore it"
                yield differ(DAMAGED, text, actual)
            else:
                yield differ(MISSING, text, "")
            return
        if value.id not in ids:
            owner = self._contents.names.get(value.id)
            yield differ(CHANGED, text, f"{frontend.at} leads to {owner or f'id {value.id}'}")
            return
        restricted = ServiceFlag.RESTRICTED if frontend.restricted else ServiceFlag(0)
        flags = policy_flags(state) | KIND_FLAGS[frontend.kind] | restricted
        if flags != value.flags:
            actual = f"{frontend.at} has {_format_flags(value.flags)}"
            yield differ(CHANGED, f"{text} with {_format_flags(flags)}", actual)
        if value.affinity_timeout != state.affinity_timeout:
            actual = f"{frontend.at} has {value.affinity_timeout} s"
            yield differ(CHANGED, f"affinity of {state.affinity_timeout} s", actual)

    def _compare_set(
        self, key: ServicePortKey, state: ServiceState, triple: tuple[int, int, int], is_local: int
    ) -> Iterator[Difference]:
        backends = state.local if is_local else state.cluster
        spread = state.local_spread if is_local else state.cluster_spread
        name = f"{'local' if is_local else 'cluster'} set"
        actual = self._resolve(triple)
        if actual.problem:
            yield Difference(
                DAMAGED, actual.where, str(key), f"{name}: {_name_backends(backends)}",
                f"set {triple[0]}: {actual.problem}", AGENT_REPAIRS,
            )  # fmt: skip
            return
        yield from self._compare_members(key, state, triple[0], name)
        missing = [backend for backend in backends if backend not in actual.backends]
        extra = [backend for backend in actual.backends if backend not in backends]
        if missing or extra:
            kind = CHANGED if missing and extra else MISSING if missing else STALE
            yield Difference(
                kind, "backend_slots", str(key), f"{name}: {_name_backends(missing)}"
                if missing else "", f"{name}: {_name_backends(extra)}" if extra else "",
                AGENT_REPAIRS,
            )  # fmt: skip
        elif actual.table != table_content(backends, spread):
            yield Difference(
                CHANGED, "backend_slots", str(key), f"{name}: {_format_spread(backends, spread)}",
                f"{name}: {triple[1]} slots of other shares", AGENT_REPAIRS,
            )  # fmt: skip

    def _compare_members(
        self, key: ServicePortKey, state: ServiceState, set_id: int, name: str
    ) -> Iterator[Difference]:
        if not state.affinity_timeout or not set_id:
            return
        ids = self._contents.slots.get(set_id, {}).values()
        self._members.update((set_id, number) for number in ids)
        missing = [n for n in ids if (set_id, n) not in self._contents.members]
        if missing:
            backends = _name_backends([self._contents.backends[number] for number in missing])
            text = f"{name}: {backends}"
            yield Difference(MISSING, "set_members", str(key), text, "", AGENT_REPAIRS)

    def _resolve(self, triple: tuple[int, int, int]) -> _Set:
        if triple not in self._sets:
            self._sets[triple] = self._read_set(*triple)
        return self._sets[triple]

    def _read_set(self, set_id: int, size: int, table: int) -> _Set:
        slots = self._contents.slots.get(set_id, {})
        if not set_id:
            return _Set((), where="services", problem="slots of no set" if size else "")
        count = size if not table else len(slots)
        if problem := _find_gap(slots, count):
            return _Set((), where="backend_slots", problem=problem)
        ids = [slots[index] for index in range(count)]
        if unknown := [number for number in ids if number not in self._contents.backends]:
            return _Set((), where="backends", problem=f"there is no backend {unknown[0]}")
        backends = tuple(self._contents.backends[number] for number in ids)
        return self._read_table(backends, table, size) if table else _Set(backends)

    def _read_table(self, backends: BackendSet, table: int, size: int) -> _Set:
        choices = self._contents.slots.get(table, {})
        problem = _find_gap(choices, size)
        indexes = [] if problem else [choices[index] for index in range(size)]
        if any(index >= len(backends) for index in indexes):
            problem = "it chooses slots that the set does not have"
        if problem:
            return _Set((), where="backend_slots", problem=f"table {table}: {problem}")
        return _Set(backends, fingerprint(indexes))

    def _compare_ranges(
        self, key: ServicePortKey, state: ServiceState, service_id: int
    ) -> Iterator[Difference]:
        expected = {(service_id, cidr) for cidr in state.source_ranges}
        self._expected_ranges |= expected
        if missing := sorted(expected - self._contents.ranges):
            text = _name_some(str(cidr) for _, cidr in missing)
            yield Difference(MISSING, "source_ranges", str(key), text, "", AGENT_REPAIRS)

    # ---- what no desired Service port needs ------------------------------------------------

    def _find_other_frontends(self) -> Iterator[Finding]:
        names = self._contents.names
        by_owner: defaultdict[int, list[FrontendAddress]] = defaultdict(list)
        for raw_key, value in self._values.items():
            if raw_key not in self._examined:
                by_owner[value.id].append(unpack_address(raw_key))
        for number, addresses in by_owner.items():
            owner, text = names.get(number), _name_some(map(str, sorted(addresses)))
            if owner is None:
                yield Finding(None, Difference(
                    FOREIGN, "services", f"id {number}, not named", "", text, AGENT_REPAIRS
                ))  # fmt: skip
            else:
                yield Finding(owner, Difference(
                    STALE, "services", str(owner), "", text, AGENT_REPAIRS
                ))  # fmt: skip
        for raw_key in self._wrong_checks - self._examined:
            text = f"{unpack_address(raw_key)} with a wrong check word: programs ignore it"
            yield Finding(None, Difference(DAMAGED, "services", "", "", text, AGENT_REPAIRS))
        for name, raw_key in self._contents.damaged:
            text = f"an entry that no agent writes: {raw_key.hex()}"
            yield Finding(None, Difference(DAMAGED, name, "", "", text, START_AGENT))

    def _find_leftovers(self) -> Iterator[Finding]:
        """Entries that no frontend leads to."""
        contents = self._contents
        sets = {
            number
            for value in self._values.values()
            for number in (
                value.cluster_set, value.local_set, value.cluster_table, value.local_table
            )
        }  # fmt: skip
        for set_id, size in self._read_used_sizes().items():
            if more := sorted(index for index in contents.slots.get(set_id, ()) if index >= size):
                text = f"slot {more[0]} of a set that has {size}"
                yield _left(FOREIGN, "backend_slots", f"set {set_id}", text)
        for set_id in sorted(contents.slots.keys() - sets):
            text = _count(len(contents.slots[set_id]), "slot")
            yield _left(STALE, "backend_slots", f"set {set_id}", text)
        for set_id, number in sorted(contents.members - self._members):
            yield _left(STALE, "set_members", f"set {set_id}", f"backend {number}")
        in_sets = {n for set_id in sets for n in contents.slots.get(set_id, {}).values()}
        serving = {backend for state in self._desired.services.values()
                   if state.key.protocol is Protocol.UDP for backend in state.serving}  # fmt: skip
        for number, backend in sorted(contents.backends.items()):
            if number not in in_sets and backend not in serving:
                yield _left(STALE, "backends", f"backend {number}", str(backend))
        used = {value.id for value in self._values.values()}
        for number, owner in sorted(contents.names.items()):
            is_desired = owner in self._desired.services
            if number not in used and (not is_desired or len(self._ids[owner]) > 1):
                yield _left(STALE, "service_names", f"id {number}", str(owner))
        for number, cidr in sorted(contents.ranges - self._expected_ranges):
            named = contents.names.get(number)
            subject = "NodePorts" if number == NODE_PORTS_ID else str(named or f"id {number}")
            difference = Difference(STALE, "source_ranges", subject, "", str(cidr), AGENT_REPAIRS)
            yield Finding(named, difference)

    def _read_used_sizes(self) -> dict[int, int]:
        """The number of slots of each set in use that has no table, and of each table."""
        sizes: defaultdict[int, int] = defaultdict(int)
        for value in self._values.values():
            for set_id, size, table in (
                (value.cluster_set, value.cluster_size, value.cluster_table),
                (value.local_set, value.local_size, value.local_table),
            ):
                sizes[table or set_id] = max(size, sizes[table or set_id])
        sizes.pop(0, None)
        return sizes

    # ---- values that Service ports share ---------------------------------------------------

    def _compare_shared(self) -> Iterator[Difference]:
        contents, states = self._contents, self._desired.services.values()
        frontends = [frontend for state in states for frontend in state.frontends]
        cluster_ips = {
            frontend.at.address
            for frontend in frontends
            if frontend.kind is FrontendKind.CLUSTER_IP and not frontend.on_device
        }
        ports = {frontend.at.port for frontend in frontends}
        for name, desired, actual in (
            ("node_addresses", set(self._desired.node_addresses), contents.node_addresses),
            ("cluster_ips", cluster_ips, contents.cluster_ips),
        ):
            for address in sorted(desired - actual):
                yield Difference(MISSING, name, "", format_addr(address), "", AGENT_REPAIRS)
            for address in sorted(actual - desired):
                yield Difference(STALE, name, "", "", format_addr(address), AGENT_REPAIRS)
        for port in sorted(ports - contents.ports):
            text = f"port {port}: without it no frontend of this port is served"
            yield Difference(MISSING, "frontend_ports", "", text, "", AGENT_REPAIRS)
        if more := sorted(contents.ports - ports):
            text = f"{_count(len(more), 'port')}: {_name_some(map(str, more))}"
            yield Difference(STALE, "frontend_ports", "", "", text, AGENT_REPAIRS)
        missing = {cidr for number, cidr in self._expected_ranges if number == NODE_PORTS_ID}
        missing -= {cidr for number, cidr in contents.ranges if number == NODE_PORTS_ID}
        for cidr in sorted(missing):
            text = str(cidr)
            yield Difference(MISSING, "source_ranges", "NodePorts", text, "", AGENT_REPAIRS)
        yield from self._compare_next_ids()

    def _compare_next_ids(self) -> Iterator[Difference]:
        contents = self._contents
        for name, following, used in (
            ("Service port", contents.next_ids.next_service, contents.names),
            ("backend", contents.next_ids.next_backend, contents.backends),
            ("set", contents.next_ids.next_set, contents.slots),
        ):
            highest = max((number for number in used if number < ID_LIMIT), default=0)
            text = f"the next id of a {name} is {following}"
            if following >= ID_LIMIT:
                yield Difference(DAMAGED, "meta", "", f"below {ID_LIMIT}", text, START_AGENT)
            elif following <= highest < ID_LIMIT // 2:  # above it, the ids may have wrapped
                yield Difference(
                    CHANGED, "meta", "", f"above {highest}, which is used", text, START_AGENT
                )


def _left(kind: DifferenceKind, where: str, subject: str, actual: str) -> Finding:
    return Finding(None, Difference(kind, where, subject, "", actual, START_AGENT))


def _find_gap(slots: Mapping[int, int], size: int) -> str:
    missing = next((index for index in range(size) if index not in slots), None)
    if missing is not None:
        return f"slot {missing} of {size} is missing"
    return "" if slots else "it has no slots"


def _format_flags(flags: int) -> str:
    return ", ".join(flag.name.lower() for flag in ServiceFlag if flag & flags and flag.name)


def _format_spread(backends: BackendSet, spread: Spread) -> str:
    if not needs_table(backends, spread):
        return "equal shares"
    weights = f", weights {_name_some(map(str, spread.weights))}" if spread.weights else ""
    return f"{str(spread.algorithm).lower()}{weights}"


def _name_backends(backends: Iterable[Backend]) -> str:
    return _name_some(map(str, backends)) or "none"


def _name_some(texts: Iterable[str]) -> str:
    names = list(texts)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count_entries(contents: Contents) -> int:
    """How many entries were compared."""
    tables: tuple[Sized, ...] = (
        contents.services, contents.names, contents.backends, contents.members, contents.ranges,
        contents.node_addresses, contents.cluster_ips, *contents.slots.values(),
    )  # fmt: skip
    return sum(map(len, tables))
