# SPDX-License-Identifier: Apache-2.0
"""Plans: what is written for a change, as values, without maps.

A model of the maps applies the writes in the order of plan.py, one by one; after each of them every
frontend must have a complete backend set, old or new.
"""

import errno
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kbpf.dataplane.bpf.maps.ids import IdAllocator, SharedTables
from kbpf.dataplane.bpf.maps.layout import AFFINITY_KEY, KIND_FLAGS, U32_PAIR, Meta, ServiceFlag, ServiceValue
from kbpf.dataplane.bpf.state import plan
from kbpf.dataplane.bpf.state.commit import GRACE_PERIOD_S, GraceQueue, write
from kbpf.dataplane.bpf.state.plan import (
    ProgrammedPort,
    ProgrammedSet,
    Retired,
    WritePlan,
    Writes,
    compute_change,
    count_leaving_entries,
    fingerprint,
    policy_flags,
    table_key,
)
from kbpf.errors import KernelError
from kbpf.model.address import format_addr
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey, ServiceState
from kbpf.model.objects import Algorithm, Cidr, Protocol
from kbpf.policy.spread import compute_slots
from tests.support.plane import at, service
from tests.support.table import each_row, pairs, table
from tests.values.dataplane.states import CLUSTER_IP, FRONTENDS, A, B, C, changed, state

UDP = Protocol.UDP


class Agent:
    """The state that a data plane keeps between two plans."""

    def __init__(self) -> None:
        self.ids = IdAllocator(Meta(1, 1, 1))
        self.programmed: dict[ServicePortKey, ProgrammedPort] = {}

    def plan(self, *states: ServiceState, gone: tuple[ServicePortKey, ...] = ()) -> Writes:
        planner = WritePlan(self.ids)
        changes: dict[ServicePortKey, ServiceState | None] = {s.key: s for s in states}
        changes |= dict.fromkeys(gone)
        for key, new in sorted(changes.items()):
            after = planner.add(compute_change(key, self.programmed.pop(key, None), new))
            if after is not None:
                self.programmed[key] = after
        return planner.finish_writes()


NAMES = {A: "A", B: "B", C: "C", "10.0.0.1:81": "A2", "10.0.0.2:81": "B2"}
NAMES |= {frontend.rpartition("=")[2]: kind for kind, frontend in FRONTENDS.items()}


def written(writes: Writes) -> str:
    """The writes as text: slots and members as lists of backend ids, backends and frontends by the names of NAMES."""

    def named(ends: Iterable[Any]) -> list[str]:
        return sorted(NAMES[str(end).partition("/")[0]] for end in ends)

    def addresses(ranges: list[tuple[int, Cidr]]) -> list[str]:
        return [format_addr(cidr.address) for _, cidr in ranges]

    found = {
        "name": [key.name for _, key in writes.names],
        "backends": named(one for _, one in writes.backends),
        "slots": [",".join(map(str, ids)) for _, ids in writes.slots],
        "members": [",".join(map(str, ids)) for _, ids in writes.members],
        "flip": named(writes.flips),
        "remove": named(writes.removed),
        "retire": [str(len(one.backends)) for one in writes.retired.sets],
        "let in": addresses(writes.new_ranges),
        "shut out": addresses(writes.old_ranges),
        "cut": named(one for _, one in writes.retired.lost.backends),
    }
    return "; ".join(" ".join([what, *words]) for what, words in found.items() if words)


class Row(NamedTuple):
    """A Service port before and after a change, "-" if there is none, and what the change writes or needs."""

    rule: str
    before: str
    after: str
    expected: str = ""


ROWS = table(
    Row,
    """\
new | - | A B | name web; backends A B; slots 1,2; flip ClusterIP
new without endpoints | - |  | name web; flip ClusterIP
new with affinity | - | A B affinity=9 | name web; backends A B; slots 1,2; members 1,2; flip ClusterIP
new with a local set | - | A B local=B internal-local | name web; backends A B; slots 1,2 2; flip ClusterIP
nothing changed | A B | A B |
one endpoint more | A B | A B C | backends C; slots 1,2,3; flip ClusterIP; retire 2
one endpoint less | A B | A | slots 1; flip ClusterIP; retire 2
no endpoints left | A B |  | flip ClusterIP; retire 2
the first endpoint |  | A | backends A; slots 1; flip ClusterIP
all frontends are flipped | A B at=ClusterIP,NodePort,VIP | A at=ClusterIP,NodePort,VIP \
| slots 1; flip ClusterIP NodePort VIP; retire 2
another frontend: the sets stay | A B | A B at=ClusterIP,VIP | flip VIP
a frontend less | A B at=ClusterIP,VIP | A B | remove VIP
only the policy changes | A B | A B external-local | flip ClusterIP
only the time-out changes | A B affinity=9 | A B affinity=8 | flip ClusterIP
affinity is switched on: a set with members | A B | A B affinity=9 | slots 1,2; members 1,2; flip ClusterIP; retire 2
affinity is switched off | A B affinity=9 | A B | slots 1,2; flip ClusterIP; retire 2
only the local set changes | A B local=A | A B local=B | slots 2; flip ClusterIP; retire 1
the local set is removed | A B local=A | A B | flip ClusterIP; retire 1
a restriction is a flip | A B at=VIP | A B at=VIP restricted | flip VIP
source ranges: added before the flip, removed after it | A B at=VIP ranges=10.1.0.0/16,10.2.0.0/16 \
| A B at=VIP ranges=10.2.0.0/16,10.3.0.0/16 | let in 10.3.0.0; shut out 10.1.0.0
the source ranges are removed | A B at=VIP ranges=10.1.0.0/16 | A B at=VIP | flip VIP; shut out 10.1.0.0
deleted with its ranges | A B at=VIP ranges=10.1.0.0/16 | - | remove VIP; retire 2; shut out 10.1.0.0
new with weights | - | A B weights=1,2 | name web; backends A B; slots 0,1,1 1,2; flip ClusterIP
the same weights | A B weights=1,2 | A B weights=1,2 |
other weights | A B weights=1,2 | A B weights=3,1 | slots 0,0,0,1 1,2; flip ClusterIP; retire 2
the weights are removed | A B weights=1,2 | A B | slots 1,2; flip ClusterIP; retire 2
each set has its own weights | A B local=A,B local-weights=2,1 | A B local=A,B local-weights=2,1 weights=1,3 \
| slots 0,1,1,1 1,2; flip ClusterIP; retire 2
each member is written once | - | A B weights=1,2 affinity=9 \
| name web; backends A B; slots 0,1,1 1,2; members 1,2; flip ClusterIP
both sets have the same table | - | A B local=A,B weights=1,2 local-weights=1,2 \
| name web; backends A B; slots 0,1,1 1,2 1,2; flip ClusterIP
the same addresses, other ports: the table stays | A B weights=1,2 | A2 B2 weights=1,2 \
| backends A2 B2; slots 3,4; flip ClusterIP; retire 2
Maglev with one backend | - | A maglev | name web; backends A; slots 1; flip ClusterIP
Maglev without endpoints | maglev | maglev |
from random to Maglev without endpoints: a flip |  | maglev | flip ClusterIP
affinity without endpoints: a flip |  | affinity=9 | flip ClusterIP
deleted | A B local=A | - | remove ClusterIP; retire 2 1
TCP clients are never cut | A B | A | slots 1; flip ClusterIP; retire 2
UDP clients of a removed backend are cut | A B UDP | A UDP | slots 1; flip ClusterIP; retire 2; cut B
UDP clients of a backend that still serves are not cut | A B UDP | A serving=A,B UDP \
| slots 1; flip ClusterIP; retire 2
UDP clients of a backend that stops serving are cut | A serving=A,B UDP | A UDP | cut B
a backend that serves but is in no set has an id | A UDP | A serving=A,C UDP | backends C
zero endpoints: all are cut | A B UDP | UDP | flip ClusterIP; retire 2; cut A B
deleted: all are cut | A B UDP | - | remove ClusterIP; retire 2; cut A B
""",
)


@each_row(ROWS)
def test_the_writes_of_a_change(row: Row):
    agent = Agent()
    old, new, key = changed(row.before, row.after)
    if old:
        agent.plan(old)
    found = agent.plan(new) if new else agent.plan(gone=(key,))
    assert written(found) == row.expected
    assert found.retired.forget_affinity == {
        1 for one in (old,) if one and one.affinity_timeout and not (new and new.affinity_timeout)
    }
    assert found.retired.names == ([] if new else [1])


def test_the_flags_of_each_frontend():
    agent = Agent()
    port = state("A B at=ClusterIP,NodePort,VIP,ExternalIP restricted internal-local external-local")
    flips = agent.plan(port).flips
    shared = "INTERNAL_LOCAL|EXTERNAL_LOCAL|ANY_ENDPOINTS"
    assert {str(k): ServiceFlag(v.flags).name for k, v in flips.items()} == {
        "10.96.0.1:80/TCP": f"{shared}|CLUSTER_IP",
        "0.0.0.0:30080/TCP": f"{shared}|NODE_PORT",
        "192.0.2.1:80/TCP": f"{shared}|RESTRICTED|LOAD_BALANCER",
        "192.0.2.2:80/TCP": f"{shared}|EXTERNAL_IP",
    }
    assert len({v[0:1] + v[2:] for v in flips.values()}) == 1, "only the flags differ"
    assert policy_flags(state("")) == ServiceFlag(0)


def test_a_frontend_that_moves_is_flipped_and_never_removed():
    """In whichever order the two Services are planned."""
    for giver, taker in (("a", "b"), ("b", "a")):
        agent = Agent()
        agent.plan(state(f"name={giver} A at=ClusterIP,VIP"))
        moved = agent.plan(state(f"name={giver} A at=VIP"), state(f"name={taker} B"))
        assert written(moved) == f"name {taker}; backends B; slots 2; flip ClusterIP"
        assert moved.new_frontends == 0
        ended = agent.plan(state(f"name={taker} B"), gone=(state(f"name={giver}").key,))
        assert written(ended) == "remove VIP; retire 1"


def test_a_maglev_set_is_written_with_a_table():
    agent = Agent()
    port = state("A B C maglev affinity=5")
    writes = agent.plan(port)
    (table, indexes), (number, ids) = writes.slots
    assert list(indexes) == list(compute_slots(*port.sets[0]))
    assert (len(indexes), ids) == (251, [1, 2, 3])
    (value,) = writes.flips.values()
    assert (value.cluster_set, value.cluster_size, value.cluster_table) == (number, 251, table)
    assert ServiceFlag(value.flags) & ServiceFlag.MAGLEV
    assert writes.members == [(number, [1, 2, 3])]
    assert written(agent.plan(port)) == ""
    assert len(agent.plan(state("A B C affinity=5")).slots[0][1]) == 3


# A table that both sets of a new Service port share is counted for each.
CHANGES = [(row.before, row.after) for row in ROWS if row.rule != "both sets have the same table"] + pairs("""\
- → A B at=ClusterIP,VIP
A B → A B local=C
A B → A B weights=2,3
A B weights=2,3 → A B weights=2,3
A B → A B maglev affinity=9
- → A B local=A,C maglev
A B → A B affinity=1
A UDP → A serving=A,B,C UDP
A → A serving=A,B
A B at=VIP → A B at=VIP ranges=10.0.0.0/8,fd00::/8
A B at=VIP ranges=10.0.0.0/8 → A B at=VIP ranges=10.0.0.0/9
A B → C
A B → A C
A B affinity=1 → C affinity=1
A B local=A affinity=1 weights=2,3 → -
A B UDP → C UDP
A B UDP → A C UDP
A B UDP → C serving=A,C UDP
A serving=A,B UDP → A serving=A,C UDP
A serving=A,B UDP → -
A local=B → B local=B
A B weights=1,2 → A2 B2 weights=1,2
""")


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_the_entries_that_a_change_needs_and_frees_are_known_in_advance(before, after):
    """Those that are written, and those that are deleted in the end; entries in use again are not counted."""
    agent, maps = Agent(), Maps()
    old, new, key = changed(before, after)
    if old:
        list(maps.write(agent.plan(old)))
    change = compute_change(key, agent.programmed.get(key), new)
    needed = change.count_new_entries(agent.ids)
    counted = change.count_leaving_entries(agent.ids)
    writes = agent.plan(new) if new else agent.plan(gone=(key,))
    made = {
        "services": writes.new_frontends,
        "service_names": len(writes.names),
        "source_ranges": len(writes.new_ranges),
        "backend_slots": sum(len(ids) for _, ids in writes.slots),
        "set_members": sum(len(ids) for _, ids in writes.members),
        "backends": len(writes.backends),
    }
    assert +Counter(needed) == +Counter(made)
    list(maps.write(writes))
    waiting = count_leaving_entries([writes.retired], agent.ids)
    full = maps.sizes()
    list(maps.retire(agent, writes))
    gave = {name: size - maps.sizes()[name] for name, size in full.items()}
    assert counted == waiting == gave


def test_unclaimed_entries_count_as_leaving():
    agent = Agent()
    one_key, three_keys = bytes(U32_PAIR.size), bytes(3 * U32_PAIR.size)
    found = Retired(slot_keys=[one_key, three_keys], member_keys=[one_key])
    assert count_leaving_entries([found], agent.ids) == {
        "backend_slots": 4,
        "set_members": 1,
        "backends": 0,
    }


def test_removed_frontends_cut_their_udp_clients():
    vip, cluster_ip = (FRONTENDS[kind].rpartition("=")[2] for kind in ("VIP", "ClusterIP"))
    for protocol, cut in ((Protocol.TCP, []), (UDP, [vip])):
        agent, word = Agent(), "UDP" if protocol is UDP else ""
        port = state(f"A at=ClusterIP,VIP {word}")
        agent.plan(port)
        planner = WritePlan(agent.ids)
        old = agent.programmed[port.key]
        assert planner.remove_lost_frontends(old, port) is old
        left = planner.remove_lost_frontends(old, state(f"B {word}"))
        assert [f.at for f in left.frontends] == [at(cluster_ip, protocol)]
        writes = planner.finish_writes()
        assert writes.removed == {at(vip, protocol)}
        assert writes.retired.lost.frontends == {(old.id, at(one, protocol)) for one in cut}
        assert (writes.flips, writes.slots) == ({}, [])
        assert planner.remove_lost_frontends(old, None).frontends == ()


@pytest.mark.parametrize("remembered", [True, False])
def test_an_adopted_set_with_the_wanted_contents_is_kept(monkeypatch, remembered):
    """Its Maglev or weights table is recognised by its fingerprint, and shared from then on."""
    agent = Agent()
    port = state("A B weights=1,2")
    agent.plan(port)
    old = agent.programmed[port.key]
    found = ProgrammedSet(
        old.cluster.id,
        old.cluster.backends,
        False,
        old.cluster.size,
        None,
        fingerprint(compute_slots(*port.sets[0])),
        old.cluster.table,
    )
    agent.ids.tables = SharedTables(agent.ids)
    agent.ids.tables.adopt(found.table)
    agent.programmed[port.key] = replace(old, cluster=found)
    if not remembered:
        monkeypatch.setattr(plan, "_fingerprints", {})
    assert written(agent.plan(port)) == ""
    assert agent.programmed[port.key].cluster.spread == port.sets[0][1]
    assert agent.ids.tables.find(table_key(*port.sets[0])) == found.table
    assert written(agent.plan(port)) == ""
    other = replace(found, content=fingerprint([0, 1]))
    agent.programmed[port.key] = replace(old, cluster=other)
    assert written(agent.plan(port)) == "slots 1,2; flip ClusterIP; retire 2", "the adopted table differs"


class Calls:
    """Fake tables that record calls in order and store nothing."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.maps: dict[str, dict[bytes, bytes]] = {"affinity": {}}

    def put(self, name: str, entries: Iterable[tuple[bytes, bytes]], new: int | None = None) -> None:
        if list(entries):
            self.made.append(f"+{name}")

    def delete(self, name: str, keys: Iterable[bytes]) -> None:
        if list(keys):
            self.made.append(f"-{name}")


def test_the_order_of_the_writes_of_a_plan():
    """The order of plan.py and commit.py. A ClusterIP starts to refuse unknown ports after its own
    ports are served, and stops before they are removed.
    """
    agent, calls = Agent(), Calls()
    agent.plan(state("A B at=ClusterIP,VIP ranges=10.1.0.0/16"))
    agent.ids.mark_saved(agent.ids.unsaved_meta())
    other = service("other", "10.96.0.2:80", C, affinity_timeout=9)
    new = state("A at=ClusterIP,ExternalIP ranges=10.2.0.0/16")
    addresses = (at("10.96.0.2:80").address,), (at(CLUSTER_IP).address,)
    write(calls, agent.ids, agent.plan(new, other), addresses, addresses)
    assert " ".join(calls.made) == (
        "+meta +source_ranges +service_names +backends +backend_slots +set_members +node_addresses +services "
        "+cluster_ips -services -cluster_ips -source_ranges -node_addresses"
    )


def test_retired_sets_are_deleted_in_order_after_the_grace_period():
    agent, calls, cut = Agent(), Calls(), []
    queue = GraceQueue(calls, agent.ids, cut.append)
    agent.plan(state("A B affinity=9"))
    first, second = (agent.plan(state(to)).retired for to in "AB")
    assert (queue.due, queue.pending) == (None, [])
    queue.add(4.0, Retired())
    assert queue.due is None, "nothing to delete"
    queue.add(5.0, first)
    queue.add(7.0, second)
    assert (queue.due, queue.pending) == (5.0 + GRACE_PERIOD_S, [first, second])
    queue.delete_until(4.9)
    assert cut == []
    queue.delete_until(5.0)
    assert (cut, queue.due) == ([first], 7.0 + GRACE_PERIOD_S)
    queue.delete_until(7.0, 0.0)
    assert cut == [first], "the time budget is 0"
    queue.delete_until(7.0)
    assert (cut, queue.due) == ([first, second], None)


class FailingMaps(Calls):
    """Fake tables. If `failing`, each deletion and each walk over `affinity` fails the first time.
    `deleted`: the names and keys of deletions that did not fail.
    """

    def __init__(self, failing: bool) -> None:
        super().__init__()
        self.failing = failing
        self.deleted: list[tuple[str, bytes]] = []
        self.failed: set[tuple[str, bytes]] = set()
        self.maps["affinity"] = cast("Any", self)

    def delete(self, name: str, keys: Iterable[bytes]) -> None:
        if joined := b"".join(keys):
            self.fail_once(name, joined)
            self.deleted.append((name, joined))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        self.fail_once("walk", b"")
        yield AFFINITY_KEY.pack(bytes(16), 1, 0), b""

    def fail_once(self, *what: Any) -> None:
        if self.failing and what not in self.failed:
            self.failed.add(what)
            raise KernelError("cannot delete", what[0], errno=errno.ENOMEM)


def test_a_deletion_that_failed_is_repeated_and_the_rest_follows():
    """Nothing is left out, nothing is released twice, and stale UDP is cut at the end."""
    results = []
    for failing in (False, True):
        agent, maps, cut = Agent(), FailingMaps(failing), list[Retired]()
        queue = GraceQueue(maps, agent.ids, cut.append)
        agent.plan(state("A B affinity=9"))
        retired = agent.plan(state("C")).retired
        queue.add(5.0, retired)
        failures = 0
        while queue.due is not None:
            assert failures < 10
            try:
                queue.delete_until(5.0)
            except KernelError:
                failures += 1
                assert cut == []
        assert cut == [retired]
        results.append((maps.deleted, failures))
    (expected, none), (deleted, failures) = results
    assert deleted == expected
    assert {name for name, _ in deleted} == {"backend_slots", "set_members", "backends", "affinity"}
    assert (none, failures) == (0, 5), "one for each map, and one for the walk"


# ---- the order ---------------------------------------------------------------------------------


class Maps:
    """A model of the maps as dicts, written one entry at a time."""

    def __init__(self) -> None:
        self.backends: dict[int, Backend] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.members: set[tuple[int, int]] = set()
        self.services: dict[FrontendAddress, ServiceValue] = {}

    def write(self, writes: Writes) -> Iterator[None]:
        """Applies steps 2 to 4 of plan.py; yields after each entry."""
        for number, one in writes.backends:
            self.backends[number] = one
            yield
        for number, ids in writes.slots:
            for index, backend in enumerate(ids):
                assert (number, index) not in self.slots, "a set is never changed in place"
                self.slots[number, index] = backend
                yield
        for number, ids in writes.members:
            self.members |= {(number, backend) for backend in ids}
            yield
        for frontend, value in writes.flips.items():
            self.services[frontend] = value
            yield
        for frontend in writes.removed:
            del self.services[frontend]
            yield

    def retire(self, agent: Agent, writes: Writes) -> Iterator[None]:
        """Applies step 5 of plan.py."""
        for old in writes.retired.sets:
            for one in old.backends:
                self.members.discard((old.id, agent.ids.backends.id_of(one)))
                yield
            for index in range(len(old.backends)):
                del self.slots[old.id, index]
                yield
            if old.table and agent.ids.tables.release(old.table):
                for index in range(old.size):
                    del self.slots[old.table, index]
                    yield
        gone = [
            number
            for held in (*(s.backends for s in writes.retired.sets), *writes.retired.released_backends)
            for number in agent.ids.backends.release(held)
        ]
        for number in gone:
            del self.backends[number]
            yield

    def sizes(self) -> dict[str, int]:
        """The number of entries of the maps that sets consist of."""
        held = {"backend_slots": self.slots, "set_members": self.members}
        return {name: len(one) for name, one in {**held, "backends": self.backends}.items()}

    def seen(self) -> Mapping[FrontendAddress, Any]:
        """What a reader finds for each frontend. KeyError if its set is incomplete."""
        return {
            frontend: (
                value.flags,
                value.affinity_timeout,
                self._set(value.cluster_set, value.cluster_size, value.cluster_table, value.affinity_timeout),
                self._set(value.local_set, value.local_size, value.local_table, value.affinity_timeout),
            )
            for frontend, value in self.services.items()
        }

    def _set(self, number: int, size: int, table: int, affine: int) -> tuple[Backend, ...]:
        places = [self.slots[table, index] if table else index for index in range(size)]
        ids = [self.slots[number, place] for place in places]
        assert not affine or all((number, one) in self.members for one in ids)
        return tuple(self.backends[one] for one in ids)


def wanted(states: Mapping[str, ServiceState]) -> dict[FrontendAddress, Any]:
    return {
        f.at: (
            policy_flags(s) | KIND_FLAGS[f.kind],
            s.affinity_timeout,
            tuple(s.cluster[i] for i in compute_slots(*s.sets[0])),
            tuple(s.local[i] for i in compute_slots(*s.sets[1])),
        )
        for s in states.values()
        for f in s.frontends
    }


def weights(to: str, heavy: int) -> tuple[int, ...]:
    """Weights: `heavy` for the first backend, 1 for the others."""
    count = len(to.split())
    return (heavy, *(1,) * (count - 1)) if count > 1 and heavy > 1 else ()


ENDPOINTS = st.lists(st.sampled_from([A, B, C]), unique=True).map(" ".join)
STATES = st.builds(
    lambda name, protocol, n, to, local, extra, affinity, heavy, algorithm: service(
        name,
        " ".join(f"10.96.{ord(name)}.{i}:80" for i in range(1, n + 1)),
        to,
        protocol,
        local=local,
        serving=" ".join({*to.split(), *extra.split()}),
        affinity_timeout=affinity,
        cluster_weights=weights(to, heavy),
        local_weights=weights(local, heavy),
        algorithm=algorithm,
    ),
    st.sampled_from("abc"),
    st.sampled_from([Protocol.TCP, UDP]),
    st.integers(0, 3),
    ENDPOINTS,
    ENDPOINTS,
    ENDPOINTS,
    st.sampled_from([0, 0, 7]),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([Algorithm.RANDOM, Algorithm.RANDOM, Algorithm.MAGLEV]),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(STATES, max_size=3), st.booleans()), max_size=6))
def test_after_every_write_every_frontend_has_a_complete_set(batches):
    """The old set or the new one, nothing in between; retiring at once or late ends in equal
    maps.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kbpf.policy.spread.MAGLEV_TABLE_SIZES", (7, 11))
        follow(batches)


def follow(batches: list[tuple[list[ServiceState], bool]]) -> None:
    agent, maps, now = Agent(), Maps(), {}
    waiting: list[Writes] = []
    for batch, retire in batches:
        after = {f"{s.key.name}{s.key.protocol}": s for s in batch}
        before_seen, after_seen = wanted(now), wanted(after)
        gone = tuple(now[name].key for name in now.keys() - after.keys())
        writes = agent.plan(*after.values(), gone=gone)
        for _ in itertools.chain([None], maps.write(writes)):
            for frontend, seen in maps.seen().items():
                assert seen in (before_seen.get(frontend), after_seen.get(frontend))
        waiting.append(writes)
        if retire:
            for old in waiting:
                for _ in maps.retire(agent, old):
                    assert maps.seen() == after_seen
            waiting.clear()
        assert maps.seen() == after_seen
        now = after
    waiting.append(agent.plan(gone=tuple(s.key for s in now.values())))
    for writes in waiting:
        list(maps.retire(agent, writes))
    assert (maps.slots, maps.members, maps.backends, len(agent.ids.backends)) == ({}, set(), {}, 0)
