# SPDX-License-Identifier: Apache-2.0
"""Compares the maps that the agent writes with a desired state: a difference is what an agent that
starts now would write or delete.

So this adopts the contents of the maps and plans all Service ports as that agent does (adopt.py,
plan.py), and writes nothing. Each difference says what the programs do with the entry now. What
follows from it, such as a new set instead of a damaged one, is no difference of its own.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from kbpf.dataplane.bpf.maps.ids import ID_LIMIT
from kbpf.dataplane.bpf.maps.layout import U32_PAIR, ServiceFlag, ServiceValue, SetNumbers
from kbpf.dataplane.bpf.state.contents import NODE_PORTS_ID, Contents
from kbpf.dataplane.bpf.state.map_state import ProgrammedState
from kbpf.dataplane.bpf.state.plan import WritePlan, compute_change, table_content, table_size
from kbpf.dataplane.bpf.state.quotas import TableLimits
from kbpf.model.address import format_addr
from kbpf.model.config import Config
from kbpf.model.desired import (
    Backend,
    BackendSet,
    DesiredState,
    Frontend,
    FrontendAddress,
    ServicePortKey,
    ServiceState,
    Spread,
)
from kbpf.model.inspection import Difference, DifferenceKind, Finding

AGENT_REPAIRS: Final = "the agent repairs it with its next comparison (--config-sync-period)"
START_AGENT: Final = "start the agent, or restart it to repair this at once"
MAX_NAMED: Final = 3
"""How many addresses a text names; of the others it gives the number."""

MISSING, CHANGED, STALE, FOREIGN, DAMAGED = (
    DifferenceKind.MISSING,
    DifferenceKind.CHANGED,
    DifferenceKind.STALE,
    DifferenceKind.FOREIGN,
    DifferenceKind.DAMAGED,
)


def compare(contents: Contents, desired: DesiredState, config: Config) -> list[Finding]:
    """All differences, those of Service ports first."""
    return list(_DryRun(contents, desired, config).findings())


class _DryRun:
    def __init__(self, contents: Contents, desired: DesiredState, config: Config) -> None:
        self._contents, limits, agent = contents, TableLimits(), ProgrammedState(contents)
        limits.update(desired.services, desired.services.keys())
        self._states = {key: limits.effective_state(state) for key, state in desired.services.items()}
        self._values = {at: value for at, value in contents.frontends.items() if at not in contents.corrupt}
        self._adopted = agent.programmed.keys()
        plan = WritePlan(agent.ids, agent.unused_names)
        changes = {
            key: plan.add(compute_change(key, agent.programmed.get(key), self._states.get(key)))
            for key in {**self._states, **agent.programmed}
        }
        self._writes = plan.finish_writes()
        agent.claim(self._writes, config.node_port_source_ranges, authoritative=True)
        self._shared = agent.compute_shared(changes, {*desired.node_addresses}, authoritative=True)
        agent.retire_unclaimed(self._writes.retired)
        self._new_names = {key for _, key in self._writes.names}
        self._members: set[tuple[int, int]] = set()  # of sets that are written again

    def findings(self) -> Iterator[Finding]:
        for key, state in self._states.items():
            for difference in self._compare_port(key, state):
                yield Finding(key, difference)
        yield from self._find_other_frontends()
        yield from self._compare_ranges()
        differences = chain(self._find_leftovers(), self._compare_shared(), self._compare_ids())
        yield from (Finding(None, difference) for difference in differences)

    # ---- Service ports ---------------------------------------------------------------------

    def _compare_port(self, key: ServicePortKey, state: ServiceState) -> Iterator[Difference]:
        found: dict[Difference, None] = {}  # several frontends may have the same one
        sets: dict[tuple[SetNumbers, bool], None] = {}
        flips = {f: self._writes.flips[f.at] for f in state.frontends if f.at in self._writes.flips}
        flips = {f: new for f, new in flips.items() if new != self._values.get(f.at)}
        if missing := [f for f in flips if f.at not in self._contents.frontends]:
            text = _name_some(f"{frontend.kind} {frontend.at}" for frontend in missing)
            found[differ("services", key, text)] = None
        for frontend, new in flips.items():
            found |= dict.fromkeys(self._compare_frontend(key, frontend, new))
            old = self._values.get(frontend.at)
            if old is not None and (old.id == new.id or old.id not in self._contents.names):
                pairs = zip(old.sets, new.sets, (False, True), strict=True)
                sets |= {(one, is_local): None for one, other, is_local in pairs if one != other}
        for numbers, is_local in sets:
            found |= dict.fromkeys(self._compare_set(key, state, numbers, is_local))
        if not found and (flips or key in self._new_names):
            text = "as an agent writes it"
            found[differ("services", key, text, "other numbers of its sets")] = None
        yield from found

    def _compare_frontend(self, key: ServicePortKey, frontend: Frontend, new: ServiceValue) -> Iterator[Difference]:
        """Compares a frontend that exists, without its sets."""
        at, old, names = frontend.at, self._values.get(frontend.at), self._contents.names
        text = f"{frontend.kind} {at}"
        if at in self._contents.corrupt:
            actual = f"{at} with a wrong check word: programs ignore it"
            yield Difference(DAMAGED, "services", str(key), text, actual, AGENT_REPAIRS)
        if old is None:
            return
        if old.id != new.id and (key in self._adopted or old.id in names):
            actual = f"{at} leads to {names.get(old.id) or f'id {old.id}'}"
            yield differ("services", key, text, actual)
            return
        if old.id != new.id:
            yield differ("service_names", key, f"a name for id {old.id}")
        if old.flags != new.flags:
            actual = f"{at} has {_format_flags(old.flags)}"
            wanted = f"{text} with {_format_flags(new.flags)}"
            yield differ("services", key, wanted, actual)
        if old.affinity_timeout != new.affinity_timeout:
            wanted = f"affinity of {new.affinity_timeout} s"
            actual = f"{at} has {old.affinity_timeout} s"
            yield differ("services", key, wanted, actual)

    def _compare_set(
        self, key: ServicePortKey, state: ServiceState, numbers: SetNumbers, is_local: bool
    ) -> Iterator[Difference]:
        backends, spread = state.sets[is_local]
        name = f"{'local' if is_local else 'cluster'} set"
        actual = self._contents.read_set(*numbers)
        missing = sorted({*backends} - {*actual.backends})
        extra = sorted({*actual.backends} - {*backends})
        if (missing or extra) and (actual.backends or not actual.problem):
            yield differ(
                "backend_slots",
                key,
                f"{name}: {_name_backends(missing)}" if missing else "",
                f"{name}: {_name_backends(extra)}" if extra else "",
            )
        elif actual.problem:
            text = f"{name}: {_name_backends(backends)}"
            problem = f"set {numbers[0]}: {actual.problem}"
            yield Difference(DAMAGED, actual.where, str(key), text, problem, AGENT_REPAIRS)
        elif actual.table != table_content(backends, spread):
            yield differ(
                "backend_slots",
                key,
                f"{name}: {_format_spread(backends, spread)}",
                f"{name}: {numbers[1]} slots of other shares",
            )
        ids = {self._contents.ids[backend]: backend for backend in actual.backends}
        wanted = ids.keys() if state.affinity_timeout else set[int]()
        members = self._contents.members.get(numbers[0], set())
        self._members.update((numbers[0], number) for number in wanted | members)
        if lost := _name_some(str(ids[number]) for number in sorted(wanted - members)):
            yield differ("set_members", key, f"{name}: {lost}")
        if more := _name_some(f"backend {number}" for number in sorted(members - wanted)):
            yield differ("set_members", key, "", f"{name}: {more}")

    def _compare_ranges(self) -> Iterator[Finding]:
        names = self._contents.names
        new: defaultdict[int, list[str]] = defaultdict(list)
        for number, cidr in self._writes.new_ranges:
            if number == NODE_PORTS_ID or number in names:  # otherwise its Service port is missing
                new[number].append(str(cidr))
        differences = [(number, _name_some(cidrs), "") for number, cidrs in new.items()]
        differences += [(number, "", str(cidr)) for number, cidr in self._writes.old_ranges]
        for number, one, other in differences:
            owner = names.get(number)
            subject = "NodePorts" if number == NODE_PORTS_ID else owner or f"id {number}"
            yield Finding(owner, differ("source_ranges", subject, one, other))

    # ---- what no desired Service port needs ------------------------------------------------

    def _find_other_frontends(self) -> Iterator[Finding]:
        by_owner: defaultdict[int, list[FrontendAddress]] = defaultdict(list)
        for at in self._writes.removed - self._contents.corrupt:
            by_owner[self._values[at].id].append(at)
        for number, addresses in by_owner.items():
            owner = self._contents.names.get(number)
            kind, subject = (STALE, str(owner)) if owner else (FOREIGN, f"id {number}, not named")
            text = _name_some(map(str, sorted(addresses)))
            yield Finding(owner, Difference(kind, "services", subject, "", text, AGENT_REPAIRS))
        for at in self._writes.removed & self._contents.corrupt:
            text = f"{at} with a wrong check word: programs ignore it"
            yield Finding(None, Difference(DAMAGED, "services", "", "", text, AGENT_REPAIRS))
        for name, keys in self._contents.damaged.items():
            for raw_key in keys:
                text = f"an entry that no agent writes: {raw_key.hex()}"
                yield Finding(None, Difference(DAMAGED, name, "", "", text, START_AGENT))

    def _find_leftovers(self) -> Iterator[Difference]:
        """Entries to delete that no frontend leads to."""
        contents, retired = self._contents, self._writes.retired
        sets = {n for value in self._values.values() for id_, _, table in value.sets for n in (id_, table)}
        slots = Counter(set_id for raw in retired.slot_keys for set_id, _ in U32_PAIR.iter_unpack(raw))
        for set_id in sorted(slots.keys() - sets):
            yield differ("backend_slots", f"set {set_id}", "", _count(slots[set_id], "slot"), START_AGENT)
        for set_id, number in sorted({*map(U32_PAIR.unpack, retired.member_keys)} - self._members):
            yield differ("set_members", f"set {set_id}", "", f"backend {number}", START_AGENT)
        in_sets = {number for set_id in sets for number in contents.slots_of(set_id).values()}
        for number in sorted({*retired.backend_ids} & contents.backends.keys() - in_sets):
            yield differ("backends", f"backend {number}", "", str(contents.backends[number]), START_AGENT)
        used = {value.id for value in self._values.values()}
        for number in sorted({*retired.names} & contents.names.keys() - used):
            yield differ("service_names", f"id {number}", "", str(contents.names[number]), START_AGENT)

    # ---- values that Service ports share ---------------------------------------------------

    def _compare_shared(self) -> Iterator[Difference]:
        for name, (new, removed) in (("node_addresses", self._shared.nodes), ("cluster_ips", self._shared.cluster_ips)):
            for address in sorted(new):
                yield differ(name, "", format_addr(address))
            for address in sorted(removed):
                yield differ(name, "", "", format_addr(address))
        new_ports, removed_ports = self._shared.ports
        for port in sorted(new_ports):
            text = f"port {port}: without it no frontend of this port is served"
            yield differ("frontend_ports", "", text)
        if removed_ports:
            numbers = _name_some(map(str, sorted(removed_ports)))
            text = f"{_count(len(removed_ports), 'port')}: {numbers}"
            yield differ("frontend_ports", "", "", text)
        in_sets = {b for state in self._states.values() for b in (*state.cluster, *state.local)}
        for _, backend in self._writes.backends:
            if backend not in in_sets:  # one that only UDP flows may stay with
                yield differ("backends", "", str(backend))

    def _compare_ids(self) -> Iterator[Difference]:
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
                yield differ("meta", "", f"above {highest}, which is used", text, START_AGENT)


def differ(where: str, subject: object, desired: str, actual: str = "", advice: str = AGENT_REPAIRS) -> Difference:
    """A difference whose kind follows from its texts: "" if there is nothing."""
    kind = MISSING if not actual else CHANGED if desired else STALE
    return Difference(kind, where, str(subject), desired, actual, advice)


def _format_flags(flags: int) -> str:
    return ", ".join(flag.name.lower() for flag in ServiceFlag if flag & flags and flag.name)


def _format_spread(backends: BackendSet, spread: Spread) -> str:
    if not table_size(backends, spread):
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
