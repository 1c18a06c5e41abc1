# SPDX-License-Identifier: Apache-2.0
"""Plans: what is written for a change, as values, without maps.

A model of the maps applies the writes in the order of plan.py, one by one; after each of them every
frontend must have a complete backend set, old or new.
"""

import errno
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kbpf.dataplane.bpf.maps.ids import BackendTable, IdAllocator, SharedTables
from kbpf.dataplane.bpf.maps.layout import AFFINITY_KEY, KIND_FLAGS, U32_PAIR, Meta, ServiceFlag, ServiceValue
from kbpf.dataplane.bpf.state import plan
from kbpf.dataplane.bpf.state.commit import write
from kbpf.dataplane.bpf.state.grace import GRACE_PERIOD_S, GraceQueue
from kbpf.dataplane.bpf.state.plan import (
    EMPTY,
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
from kbpf.model.desired import EVEN_SPREAD, Backend, FrontendAddress, ServicePortKey, ServiceState
from kbpf.model.objects import Algorithm, Protocol
from kbpf.policy.slots import compute_slots
from tests.support.plane import at, backends, service

UDP = Protocol.UDP
MAGLEV = Algorithm.MAGLEV
WEB, NODE_PORT, VIP = "10.96.0.1:80", "NodePort=0.0.0.0:30080", "LoadBalancer=192.0.2.1:80"
A, B, C = "10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"


class Agent:
    """The state that a data plane keeps between two plans."""

    def __init__(self) -> None:
        self.ids = IdAllocator(Meta(1, 1, 1))
        self.table = BackendTable(self.ids)
        self.tables = SharedTables(self.ids)
        self.programmed: dict[ServicePortKey, ProgrammedPort] = {}

    def plan(self, *states: ServiceState, gone: tuple[ServicePortKey, ...] = ()) -> Writes:
        planner = WritePlan(self.ids, self.table, shared_tables=self.tables)
        changes: dict[ServicePortKey, ServiceState | None] = {s.key: s for s in states}
        changes |= dict.fromkeys(gone)
        for key, state in sorted(changes.items()):
            after = planner.add(compute_change(key, self.programmed.pop(key, None), state))
            if after is not None:
                self.programmed[key] = after
        return planner.finish_writes()


def written(writes: Writes) -> dict[str, Any]:
    """The non-empty parts of the writes in a readable form."""
    found = {
        "names": [key.name for _, key in writes.names],
        "backends": [str(one) for _, one in writes.backends],
        "slots": [list(ids) for _, ids in writes.slots],
        "members": [ids for _, ids in writes.members],
        "flips": sorted(str(one) for one in writes.flips),
        "removed": sorted(str(one) for one in writes.removed),
        "retired": [len(one.backends) for one in writes.retired.sets],
        "let in": [format_addr(cidr.address) for _, cidr in writes.new_ranges],
        "shut out": [format_addr(cidr.address) for _, cidr in writes.old_ranges],
        "cut": sorted(str(one) for _, one in writes.retired.lost_backends),
    }
    return {name: what for name, what in found.items() if what}


class Row(NamedTuple):
    """A change of one Service port, and its writes."""

    name: str
    old: ServiceState | None
    new: ServiceState | None
    writes: dict[str, Any]


def web(to: str = f"{A} {B}", frontends: str = WEB, **more: Any) -> ServiceState:
    return service("web", frontends, to, **more)


def dns(to: str = f"{A} {B}", **more: Any) -> ServiceState:
    return service("web", WEB, to, UDP, **more)


AT, AT_NODE_PORT, AT_VIP = "10.96.0.1:80/TCP", "0.0.0.0:30080/TCP", "192.0.2.1:80/TCP"

ROWS = [
    Row("new", None, web(), {"names": ["web"], "backends": [A, B], "slots": [[1, 2]], "flips": [AT]}),
    Row("new without endpoints", None, web(""), {"names": ["web"], "flips": [AT]}),
    Row(
        "new with affinity",
        None,
        web(affinity_timeout=9),
        {"names": ["web"], "backends": [A, B], "slots": [[1, 2]], "members": [[1, 2]], "flips": [AT]},
    ),
    Row(
        "new with a local set",
        None,
        web(local=B, internal_local=True),
        {"names": ["web"], "backends": [A, B], "slots": [[1, 2], [2]], "flips": [AT]},
    ),
    Row("nothing changed", web(), web(), {}),
    Row(
        "one endpoint more",
        web(),
        web(f"{A} {B} {C}"),
        {"backends": [C], "slots": [[1, 2, 3]], "flips": [AT], "retired": [2]},
    ),
    Row("one endpoint less", web(), web(A), {"slots": [[1]], "flips": [AT], "retired": [2]}),
    Row("no endpoints left", web(), web(""), {"flips": [AT], "retired": [2]}),
    Row("the first endpoint", web(""), web(A), {"backends": [A], "slots": [[1]], "flips": [AT]}),
    Row(
        "all frontends are flipped",
        web(frontends=f"{WEB} {NODE_PORT} {VIP}"),
        web(A, f"{WEB} {NODE_PORT} {VIP}"),
        {"slots": [[1]], "flips": [AT_NODE_PORT, AT, AT_VIP], "retired": [2]},
    ),
    Row("another frontend: the sets stay", web(), web(frontends=f"{WEB} {VIP}"), {"flips": [AT_VIP]}),
    Row("a frontend less", web(frontends=f"{WEB} {VIP}"), web(), {"removed": [AT_VIP]}),
    Row("only the policy changes", web(), web(external_local=True), {"flips": [AT]}),
    Row("only the time-out changes", web(affinity_timeout=9), web(affinity_timeout=8), {"flips": [AT]}),
    Row(
        "affinity is switched on: a set with members",
        web(),
        web(affinity_timeout=9),
        {"slots": [[1, 2]], "members": [[1, 2]], "flips": [AT], "retired": [2]},
    ),
    Row("affinity is switched off", web(affinity_timeout=9), web(), {"slots": [[1, 2]], "flips": [AT], "retired": [2]}),
    Row("only the local set changes", web(local=A), web(local=B), {"slots": [[2]], "flips": [AT], "retired": [1]}),
    Row("the local set is removed", web(local=A), web(), {"flips": [AT], "retired": [1]}),
    Row("a restriction is a flip", web(frontends=VIP), web(frontends=VIP, restricted=True), {"flips": [AT_VIP]}),
    Row(
        "source ranges: added before the flip, removed after it",
        web(frontends=VIP, ranges="10.1.0.0/16 10.2.0.0/16"),
        web(frontends=VIP, ranges="10.2.0.0/16 10.3.0.0/16"),
        {"let in": ["10.3.0.0"], "shut out": ["10.1.0.0"]},
    ),
    Row(
        "the source ranges are removed",
        web(frontends=VIP, ranges="10.1.0.0/16"),
        web(frontends=VIP),
        {"flips": [AT_VIP], "shut out": ["10.1.0.0"]},
    ),
    Row(
        "deleted with its ranges",
        web(frontends=VIP, ranges="10.1.0.0/16"),
        None,
        {"removed": [AT_VIP], "retired": [2], "shut out": ["10.1.0.0"]},
    ),
    Row(
        "new with weights",
        None,
        web(cluster_weights=(1, 2)),
        {"names": ["web"], "backends": [A, B], "slots": [[0, 1, 1], [1, 2]], "flips": [AT]},
    ),
    Row("the same weights", web(cluster_weights=(1, 2)), web(cluster_weights=(1, 2)), {}),
    Row(
        "other weights",
        web(cluster_weights=(1, 2)),
        web(cluster_weights=(3, 1)),
        {"slots": [[0, 0, 0, 1], [1, 2]], "flips": [AT], "retired": [2]},
    ),
    Row(
        "the weights are removed",
        web(cluster_weights=(1, 2)),
        web(),
        {"slots": [[1, 2]], "flips": [AT], "retired": [2]},
    ),
    Row(
        "each set has its own weights",
        web(local=f"{A} {B}", local_weights=(2, 1)),
        web(local=f"{A} {B}", local_weights=(2, 1), cluster_weights=(1, 3)),
        {"slots": [[0, 1, 1, 1], [1, 2]], "flips": [AT], "retired": [2]},
    ),
    Row(
        "each member is written once",
        None,
        web(cluster_weights=(1, 2), affinity_timeout=9),
        {"names": ["web"], "backends": [A, B], "slots": [[0, 1, 1], [1, 2]], "members": [[1, 2]], "flips": [AT]},
    ),
    Row(
        "both sets have the same table",
        None,
        web(local=f"{A} {B}", cluster_weights=(1, 2), local_weights=(1, 2)),
        {"names": ["web"], "backends": [A, B], "slots": [[0, 1, 1], [1, 2], [1, 2]], "flips": [AT]},
    ),
    Row(
        "the same addresses, other ports: the table stays",
        web(cluster_weights=(1, 2)),
        web("10.0.0.1:81 10.0.0.2:81", cluster_weights=(1, 2)),
        {"backends": ["10.0.0.1:81", "10.0.0.2:81"], "slots": [[3, 4]], "flips": [AT], "retired": [2]},
    ),
    Row(
        "Maglev with one backend",
        None,
        web(A, algorithm=MAGLEV),
        {"names": ["web"], "backends": [A], "slots": [[1]], "flips": [AT]},
    ),
    Row("Maglev without endpoints", web("", algorithm=MAGLEV), web("", algorithm=MAGLEV), {}),
    Row("from random to Maglev without endpoints: a flip", web(""), web("", algorithm=MAGLEV), {"flips": [AT]}),
    Row("deleted", web(local=A), None, {"removed": [AT], "retired": [2, 1]}),
    Row("TCP clients are never cut", web(), web(A), {"slots": [[1]], "flips": [AT], "retired": [2]}),
    Row(
        "UDP clients of a removed backend are cut",
        dns(),
        dns(A),
        {"slots": [[1]], "flips": ["10.96.0.1:80/UDP"], "retired": [2], "cut": [B]},
    ),
    Row(
        "UDP clients of a backend that still serves are not cut",
        dns(),
        dns(A, serving=f"{A} {B}"),
        {"slots": [[1]], "flips": ["10.96.0.1:80/UDP"], "retired": [2]},
    ),
    Row("UDP clients of a backend that stops serving are cut", dns(A, serving=f"{A} {B}"), dns(A), {"cut": [B]}),
    Row("a backend that serves but is in no set has an id", dns(A), dns(A, serving=f"{A} {C}"), {"backends": [C]}),
    Row("zero endpoints: all are cut", dns(), dns(""), {"flips": ["10.96.0.1:80/UDP"], "retired": [2], "cut": [A, B]}),
    Row("deleted: all are cut", dns(), None, {"removed": ["10.96.0.1:80/UDP"], "retired": [2], "cut": [A, B]}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_writes_of_a_change(row: Row):
    agent = Agent()
    if row.old is not None:
        agent.plan(row.old)
    key = (row.old or row.new).key
    found = agent.plan(row.new) if row.new else agent.plan(gone=(key,))
    assert written(found) == row.writes
    assert found.retired.forget_affinity == {
        1 for one in (row.old,) if one and one.affinity_timeout and not (row.new and row.new.affinity_timeout)
    }
    assert found.retired.names == ([] if row.new else [1])


@pytest.mark.parametrize("has_affinity", [False, True])
@pytest.mark.parametrize("weights", [(), (1, 2)], ids=["even", "weighted"])
def test_a_set_without_backends_matches_any_spread_and_affinity(weights: tuple[int, ...], has_affinity: bool):
    """It has neither slots nor members that these could change."""
    _, spread = web(cluster_weights=weights).sets[0]
    assert EMPTY.matches((), spread, has_affinity)
    assert not EMPTY.matches(backends(A), spread, has_affinity)


def test_a_new_set_has_a_new_id():
    """A new set has a new id, also when the same endpoints come back."""
    agent, seen = Agent(), set()
    for to in (A, B, A, B, "", A):
        for number, _ in agent.plan(web(to)).slots:
            assert number not in seen
            seen.add(number)
    assert len(seen) == 5


def test_sets_with_and_without_members_are_separate():
    agent = Agent()
    (plain,) = agent.plan(web(affinity_timeout=0)).slots
    ((affine, members),) = agent.plan(web(affinity_timeout=5)).members
    assert affine != plain[0]
    assert sorted(members) == sorted(plain[1])


def test_the_flags_of_each_frontend():
    agent = Agent()
    state = web(
        frontends=f"{WEB} {NODE_PORT} {VIP} ExternalIP=192.0.2.2:80",
        restricted=True,
        internal_local=True,
        external_local=True,
    )
    flips = agent.plan(state).flips
    shared = "INTERNAL_LOCAL|EXTERNAL_LOCAL|ANY_ENDPOINTS"
    assert {str(k): ServiceFlag(v.flags).name for k, v in flips.items()} == {
        AT: f"{shared}|CLUSTER_IP",
        AT_NODE_PORT: f"{shared}|NODE_PORT",
        AT_VIP: f"{shared}|RESTRICTED|LOAD_BALANCER",
        "192.0.2.2:80/TCP": f"{shared}|EXTERNAL_IP",
    }
    assert len({v[0:1] + v[2:] for v in flips.values()}) == 1, "only the flags differ"
    assert policy_flags(web("")) == ServiceFlag(0)


def test_a_frontend_that_moves_is_flipped_and_never_removed():
    """In whichever order the two Services are planned."""
    for giver, taker in (("a", "b"), ("b", "a")):
        agent = Agent()
        agent.plan(service(giver, f"{WEB} {VIP}", A))
        moved = agent.plan(service(giver, VIP, A), service(taker, WEB, B))
        assert moved.removed == set()
        assert [str(one) for one in moved.flips] == [AT]
        assert moved.new_frontends == 0
        ended = agent.plan(service(taker, WEB, B), gone=(service(giver, VIP).key,))
        assert {str(one) for one in ended.removed} == {AT_VIP}


def test_a_maglev_set_is_written_with_a_table():
    agent = Agent()
    state = web(f"{A} {B} {C}", algorithm=MAGLEV, affinity_timeout=5)
    writes = agent.plan(state)
    (table, indexes), (number, ids) = writes.slots
    assert list(indexes) == list(compute_slots(*state.sets[0]))
    assert (len(indexes), ids) == (251, [1, 2, 3])
    (value,) = writes.flips.values()
    assert (value.cluster_set, value.cluster_size, value.cluster_table) == (number, 251, table)
    assert ServiceFlag(value.flags) & ServiceFlag.MAGLEV
    assert writes.members == [(number, [1, 2, 3])]
    assert written(agent.plan(state)) == {}
    assert len(agent.plan(web(f"{A} {B} {C}", affinity_timeout=5)).slots[0][1]) == 3


def test_ports_with_the_same_addresses_share_a_table():
    agent = Agent()
    ports = [
        service(name, f"10.96.0.1:{port}", f"10.0.0.1:{port} 10.0.0.2:{port}", algorithm=MAGLEV)
        for name, port in (("a", 80), ("b", 81), ("c", 82))
    ]
    writes = agent.plan(*ports)
    assert sorted(len(ids) for _, ids in writes.slots) == [2, 2, 2, 251]
    assert len({value.cluster_table for value in writes.flips.values()}) == 1
    maps = Maps()
    list(maps.write(writes))
    for number, one in enumerate(ports):
        writes = agent.plan(gone=(one.key,))
        list(maps.write(writes))
        list(maps.retire(agent, writes))
        left = 2 - number
        assert len(maps.slots) == (251 + 2 * left if left else 0)


class Need(NamedTuple):
    """The maximum number of entries that a change needs."""

    name: str
    old: ServiceState | None
    new: ServiceState | None
    takes: tuple[int, int, int, int, int, int]  # see `names` below


NEEDS = [
    Need("new", None, web(frontends=f"{WEB} {VIP}"), (2, 1, 0, 2, 0, 2)),
    Need("nothing changed", web(), web(), (0, 0, 0, 0, 0, 0)),
    Need("deleted", web(), None, (0, 0, 0, 0, 0, 0)),
    Need("a third endpoint", web(), web(f"{A} {B} {C}"), (0, 0, 0, 3, 0, 1)),
    Need("one endpoint less", web(), web(A), (0, 0, 0, 1, 0, 0)),
    Need("a separate local set", web(), web(local=C), (0, 0, 0, 1, 0, 1)),
    Need("weights", web(), web(cluster_weights=(2, 3)), (0, 0, 0, 7, 0, 0)),
    Need("the same weights", web(cluster_weights=(2, 3)), web(cluster_weights=(2, 3)), (0, 0, 0, 0, 0, 0)),
    Need("Maglev", web(), web(algorithm=MAGLEV, affinity_timeout=9), (0, 0, 0, 253, 2, 0)),
    Need("Maglev for both sets", None, web(local=f"{A} {C}", algorithm=MAGLEV), (1, 1, 0, 506, 0, 3)),
    Need("affinity", web(), web(affinity_timeout=9), (0, 0, 0, 2, 2, 0)),
    Need("affinity of a second", web(), web(affinity_timeout=1), (0, 0, 0, 2, 2, 0)),
    Need("UDP: backends that serve but are in no set", dns(A), dns(A, serving=f"{A} {B} {C}"), (0, 0, 0, 0, 0, 2)),
    Need("TCP: backends that are in no set are not kept", web(A), web(A, serving=f"{A} {B}"), (0, 0, 0, 0, 0, 0)),
    Need("another frontend", web(), web(frontends=VIP), (1, 0, 0, 0, 0, 0)),
    Need("ranges", web(frontends=VIP), web(frontends=VIP, ranges="10.0.0.0/8 fd00::/8"), (0, 0, 2, 0, 0, 0)),
    Need(
        "a range is replaced",
        web(frontends=VIP, ranges="10.0.0.0/8"),
        web(frontends=VIP, ranges="10.0.0.0/9"),
        (0, 0, 1, 0, 0, 0),
    ),
]


@pytest.mark.parametrize("row", NEEDS, ids=lambda row: row.name)
def test_the_entries_that_a_change_needs(row: Need):
    agent = Agent()
    if row.old:
        agent.plan(row.old)
    old = agent.programmed.get((row.old or row.new).key)
    change = compute_change((row.old or row.new).key, old, row.new)
    takes = change.count_new_entries(agent.table, agent.tables)
    names = ("services", "service_names", "source_ranges", "backend_slots", "set_members", "backends")
    assert takes == (dict(zip(names, row.takes, strict=True)) if row.new else {})
    writes = agent.plan(row.new) if row.new else agent.plan(gone=(row.old.key,))
    assert (
        writes.new_frontends,
        len(writes.names),
        len(writes.new_ranges),
        sum(len(ids) for _, ids in writes.slots),
        sum(len(ids) for _, ids in writes.members),
        len(writes.backends),
    ) == row.takes


LEAVING = [
    *((row.name, row.old, row.new) for row in NEEDS if row.old is not None),
    ("all endpoints are replaced", web(), web(C)),
    ("one of two endpoints is replaced", web(), web(f"{A} {C}")),
    ("affinity is switched off", web(affinity_timeout=9), web()),
    ("all endpoints are replaced, with affinity", web(affinity_timeout=1), web(C, affinity_timeout=1)),
    ("deleted, with affinity, weights and a local set", web(local=A, affinity_timeout=1, cluster_weights=(2, 3)), None),
    ("UDP: all endpoints are replaced", dns(), dns(C)),
    ("UDP: one of two endpoints is replaced", dns(), dns(f"{A} {C}")),
    ("UDP: the old endpoint still serves", dns(), dns(C, serving=f"{A} {C}")),
    ("UDP: only the serving endpoints change", dns(A, serving=f"{A} {B}"), dns(A, serving=f"{A} {C}")),
    ("UDP: deleted", dns(A, serving=f"{A} {B}"), None),
    ("the cluster set becomes equal to the local set", web(A, local=B), web(B, local=B)),
    (
        "the same addresses, other ports: the table stays",
        web(cluster_weights=(1, 2)),
        web("10.0.0.1:81 10.0.0.2:81", cluster_weights=(1, 2)),
    ),
    ("other weights", web(cluster_weights=(1, 2)), web(cluster_weights=(3, 1))),
]


@pytest.mark.parametrize(("name", "old", "new"), LEAVING, ids=[row[0] for row in LEAVING])
def test_the_entries_that_a_change_frees_are_known_in_advance(name: str, old: ServiceState, new: ServiceState | None):
    """The number of entries that are deleted in the end; entries in use again are not counted."""
    agent, maps = Agent(), Maps()
    list(maps.write(agent.plan(old)))
    change = compute_change(old.key, agent.programmed[old.key], new)
    before = change.count_leaving_entries(agent.table, agent.tables)
    writes = agent.plan(new) if new else agent.plan(gone=(old.key,))
    list(maps.write(writes))
    waiting = count_leaving_entries([writes.retired], agent.table, agent.tables)
    full = maps.sizes()
    list(maps.retire(agent, writes))
    gave = {name: size - maps.sizes()[name] for name, size in full.items()}
    assert before == waiting == gave


def test_unclaimed_entries_count_as_leaving():
    agent = Agent()
    one_key, three_keys = bytes(U32_PAIR.size), bytes(3 * U32_PAIR.size)
    found = Retired(slot_keys=[one_key, three_keys], member_keys=[one_key])
    assert count_leaving_entries([found], agent.table, agent.tables) == {
        "backend_slots": 4,
        "set_members": 1,
        "backends": 0,
    }


def test_removed_frontends_cut_their_udp_clients():
    for protocol, cut in ((Protocol.TCP, []), (UDP, [VIP.partition("=")[2]])):
        agent = Agent()
        state = service("web", f"{WEB} {VIP}", A, protocol)
        agent.plan(state)
        planner = WritePlan(agent.ids, agent.table, shared_tables=agent.tables)
        old = agent.programmed[state.key]
        assert planner.remove_lost_frontends(old, state) is old
        left = planner.remove_lost_frontends(old, service("web", WEB, B, protocol))
        assert [f.at for f in left.frontends] == [at(WEB, protocol)]
        writes = planner.finish_writes()
        assert writes.removed == {at(VIP.partition("=")[2], protocol)}
        assert writes.retired.lost_frontends == {(old.id, at(one, protocol)) for one in cut}
        assert (writes.flips, writes.slots) == ({}, [])
        assert planner.remove_lost_frontends(old, None).frontends == ()


@pytest.mark.parametrize("remembered", [True, False])
def test_an_adopted_set_with_the_wanted_contents_is_kept(monkeypatch: pytest.MonkeyPatch, remembered: bool):
    """Its Maglev or weights table is recognised by its fingerprint, and shared from then on."""
    agent = Agent()
    state = web(cluster_weights=(1, 2))
    agent.plan(state)
    old = agent.programmed[state.key]
    found = ProgrammedSet(
        old.cluster.id,
        old.cluster.backends,
        False,
        old.cluster.size,
        None,
        fingerprint(compute_slots(*state.sets[0])),
        old.cluster.table,
    )
    tables = SharedTables(agent.ids)
    tables.adopt(found.table)
    agent.tables, agent.programmed[state.key] = tables, replace(old, cluster=found)
    if not remembered:
        monkeypatch.setattr(plan, "_fingerprints", {})
    assert written(agent.plan(state)) == {}
    assert agent.programmed[state.key].cluster.spread == state.sets[0][1]
    assert tables.find(table_key(*state.sets[0])) == found.table
    assert written(agent.plan(state)) == {}
    other = replace(found, content=fingerprint([0, 1]))
    agent.programmed[state.key] = replace(old, cluster=other)
    assert written(agent.plan(state))["slots"] == [[1, 2]], "the adopted table has other contents"


def test_the_number_of_fingerprints_is_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "MAX_FINGERPRINTS", 2)
    monkeypatch.setattr(plan, "_fingerprints", {})
    keys = [table_key(backends(one), EVEN_SPREAD) for one in (A, B, C)]
    for key, table in zip(keys, ([0], [1], [2]), strict=True):
        assert plan.remember_fingerprint(key, table) == fingerprint(table)
    assert list(plan._fingerprints) == keys[1:], "the oldest is dropped"


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
    old = web(frontends=f"{WEB} {VIP}", ranges="10.1.0.0/16")
    agent.plan(old)
    agent.ids.mark_saved(agent.ids.unsaved_meta())
    other = service("other", "10.96.0.2:80", C, affinity_timeout=9)
    new = web(A, f"{WEB} ExternalIP=192.0.2.2:80", ranges="10.2.0.0/16")
    addresses = (at("10.96.0.2:80").address,), (at(WEB).address,)
    write(calls, agent.ids, agent.plan(new, other), addresses, addresses)
    assert calls.made == [
        "+meta",
        "+source_ranges",
        "+service_names",
        "+backends",
        "+backend_slots",
        "+set_members",
        "+node_addresses",
        "+services",
        "+cluster_ips",
        "-services",
        "-cluster_ips",
        "-source_ranges",
        "-node_addresses",
    ]


def test_retired_sets_are_deleted_in_order_after_the_grace_period():
    agent, calls, cut = Agent(), Calls(), []
    queue = GraceQueue(calls, agent.table, agent.tables, cut.append)
    agent.plan(web(affinity_timeout=9))
    first, second = (agent.plan(web(to)).retired for to in (A, B))
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
        queue = GraceQueue(maps, agent.table, agent.tables, cut.append)
        agent.plan(web(affinity_timeout=9))
        retired = agent.plan(web(C)).retired
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
                self.members.discard((old.id, agent.table.id_of(one)))
                yield
            for index in range(len(old.backends)):
                del self.slots[old.id, index]
                yield
            if old.table and agent.tables.release(old.table):
                for index in range(old.size):
                    del self.slots[old.table, index]
                    yield
        gone = [
            number
            for held in (*(s.backends for s in writes.retired.sets), *writes.retired.released_backends)
            for number in agent.table.release(held)
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


endpoints = st.lists(st.sampled_from([A, B, C]), unique=True).map(" ".join)
states = st.builds(
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
    endpoints,
    endpoints,
    endpoints,
    st.sampled_from([0, 0, 7]),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([Algorithm.RANDOM, Algorithm.RANDOM, MAGLEV]),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(states, max_size=3), st.booleans()), max_size=6))
def test_after_every_write_every_frontend_has_a_complete_set(batches):
    """The old set or the new one, nothing in between; retiring at once or late ends in equal
    maps.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kbpf.policy.slots.MAGLEV_TABLE_SIZES", (7, 11))
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
    assert (maps.slots, maps.members, maps.backends, len(agent.table)) == ({}, set(), {}, 0)


def test_the_notation_of_service():
    """The notation of service() is read as intended."""
    one = service("web", f"{WEB} {NODE_PORT}", f"{B} {A}", local=A)
    assert [str(f.at) for f in one.frontends] == [AT_NODE_PORT, AT]
    assert one.cluster == backends(f"{A} {B}")
    assert one.serving == one.cluster
    assert at(WEB) in {f.at for f in one.frontends}
