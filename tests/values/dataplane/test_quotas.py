# SPDX-License-Identifier: Apache-2.0
"""Quotas of namespaces, and the order in which Services are programmed when room is short."""

import pytest

from kbpf.dataplane.bpf.state.plan import ProgrammedPort, ProgrammedSet, ServiceFlag
from kbpf.dataplane.bpf.state.quotas import (
    CONTESTED_FILL,
    MAX_NAMESPACE_SLOTS,
    NAMESPACE_SHARE,
    SYSTEM_RESERVE,
    NamespaceBudgets,
    TableLimits,
    priority_of,
)
from kbpf.model.config import Config, is_system_service
from kbpf.model.desired import ServicePortKey, ServiceState
from kbpf.model.fairness import take_turns
from kbpf.model.objects import Algorithm, Protocol, ServiceName
from tests.support.plane import backends, service
from tests.support.table import each_cells, each_pair

MAGLEV = Algorithm.MAGLEV
TABLE = 251


def tenant(namespace: str, name: str, first: int = 1, count: int = 2, **more) -> ServiceState:
    """A Service port with Maglev; `first` determines its endpoints' addresses."""
    to = " ".join(f"10.{first >> 8}.{first & 255}.{n}:80" for n in range(1, count + 1))
    made = service(name, "10.96.0.1:80", to, **{"algorithm": MAGLEV, **more})
    key = made.key._replace(namespace=namespace)
    return type(made)(**{f: getattr(made, f) for f in made.__struct_fields__} | {"key": key})


def tenants(text: str) -> dict[ServicePortKey, ServiceState]:
    """Service ports as NAMESPACE/NAME@ADDRESSES; ``:1``: created in January; ``*20``: with 20 endpoints."""
    made = {}
    for word in text.split():
        rest, _, count = word.partition("*")
        rest, _, month = rest.partition(":")
        name, _, first = rest.partition("@")
        created = {"created": f"2026-0{month}-01T00:00:00Z"} if month else {}
        state = tenant(*name.split("/"), int(first), int(count or 2), **created)
        made[state.key] = state
    return made


XYZ = "a/x@0 a/y@1 a/z@2"


@each_cells(
    "text, plain",
    f"""\
room for all | a/x@1 a/y@2
the last by name gets none | {XYZ} | z
the youngest gets none | a/x@1:3 a/y@2:2 a/z@3:1 | x
the largest gets none, though it is the oldest | a/x@1:1*20 a/y@2:2 a/z@3:3 | x
Service ports with the same addresses share a table | a/u@1 a/v@1 a/w@1 a/x@1 a/y@1 a/z@1
each namespace has its own quota | a/a1@1 a/a2@2 b/b1@1 b/b2@2
""",
)
def test_tables_of_a_namespace_are_limited(text, plain):
    """Service ports with a quota of two tables for a namespace, and the one that gets no table."""
    limits = TableLimits(2 * TABLE + 1)
    states = tenants(text)
    limits.update(states, states)
    assert {key.name for key in states if limits.reason_for_even_spread(key)} == {*plain.split()}
    for key, state in states.items():
        effective = limits.effective_state(state)
        assert effective.cluster == state.cluster, "it is served without a table"
        if key.name == plain:
            assert effective.algorithm is Algorithm.RANDOM
            assert "backends are chosen at random" in limits.reason_for_even_spread(key)
        else:
            assert effective is state


def test_a_waiting_service_port_gets_a_freed_table():
    limits = TableLimits(2 * TABLE)
    states = tenants(XYZ)
    limits.update(states, states)
    first, _, last = states
    gone = states.pop(first)
    assert limits.update(states, {first}) == {last}
    assert not limits.reason_for_even_spread(last)
    assert limits.update({**states, first: gone}, {first}) == {last}
    assert limits.reason_for_even_spread(last)


def test_too_many_backends_for_a_table_are_reported():
    limits = TableLimits()
    to = " ".join(f"10.0.{n >> 8}.{n & 255}:80" for n in range(2622))
    state = service("web", "10.96.0.1:80", to, algorithm=MAGLEV)
    limits.update({state.key: state}, {state.key})
    assert limits.reason_for_even_spread(state.key) == (
        "its algorithm and weights are ignored, and backends are chosen at random: "
        "it has more than 2621 backends, the most that a table has room for"
    )
    fewer = service("web", "10.96.0.1:80", "10.0.0.1:80 10.0.0.2:80", algorithm=MAGLEV)
    limits.update({fewer.key: fewer}, {fewer.key})
    assert not limits.reason_for_even_spread(state.key)


def test_deleted_service_ports_leave_no_state():
    limits = TableLimits(TABLE)
    states = tenants(XYZ)
    limits.update(states, states)
    limits.update({}, states)
    assert limits.__dict__ == TableLimits(TABLE).__dict__


# ---- the order -----------------------------------------------------------------------------------


def key(namespace: str, name: str) -> ServicePortKey:
    return ServicePortKey(namespace, name, "", Protocol.TCP, 4)


def test_the_order_in_which_service_ports_are_programmed():
    """Deletions first, then system namespaces, then small before large, old before new, by name."""
    one, two = "10.0.0.1:80", "10.0.0.1:80 10.0.0.2:80"
    wanted = [
        (key(*name.split("/")), state)
        for name, state in {
            "zz/gone": None,
            "default/kubernetes": tenant("default", "kubernetes", 1, 3),
            "kube-system/kube-dns": tenant("kube-system", "kube-dns", 1, 30),
            "b/small": service("small", "10.96.0.1:80", one, created="2"),
            "a/small": service("small", "10.96.0.1:80", one, created="3"),
            "a/undated": service("undated", "10.96.0.1:80", one),
            "b/undated": service("undated", "10.96.0.1:80", one),
            "a/large": service("large", "10.96.0.1:80", two),
            "a/maglev": tenant("a", "maglev", 1, 2),
        }.items()
    ]
    config = Config()
    mixed = [*wanted[1::2], *wanted[0::2]]
    order = sorted(mixed, key=lambda one: priority_of(*one, is_system_service(one[0].service, config)))
    assert [str(each) for each, _ in order] == [str(each) for each, _ in wanted]


@each_pair(
    "given, system",
    """\
default/kubernetes → yes
default/web kube-system → no
kube-system/x kube-system → yes
kube-system/x dns → no
dns/x kube-system dns → yes
""",
)
def test_which_services_are_system_services(given, system):
    """A Service and the system namespaces → whether it is a system Service."""
    name, *namespaces = given.split()
    found = is_system_service(ServiceName(*name.split("/")), Config(system_namespaces=tuple(namespaces)))
    assert found == (system == "yes")


# ---- budgets -------------------------------------------------------------------------------------


def programmed(count: int) -> ProgrammedPort:
    ends = backends(" ".join(f"10.0.0.{n}:80" for n in range(1, count + 1)))
    return ProgrammedPort(1, ServiceFlag(0), 0, (), ProgrammedSet(1, ends, False, count))


def test_a_namespace_leaves_room_in_proportion_to_what_it_has():
    budgets, limit = NamespaceBudgets(), 100
    assert budgets.max_fill("a", "backend_slots", 40, limit) == 85
    budgets.replace("a", None, programmed(20))
    assert budgets.count_used("a", "backend_slots") == 20
    assert budgets.max_fill("a", "backend_slots", 20, limit) == 85
    assert budgets.max_fill("b", "backend_slots", 4, limit) == 94
    budgets.replace("a", programmed(20), programmed(3))
    assert budgets.count_used("a", "backend_slots") == 3
    budgets.replace("a", programmed(3), None)
    assert budgets.__dict__ == NamespaceBudgets().__dict__
    assert MAX_NAMESPACE_SLOTS < CONTESTED_FILL * 4_194_304, "tables of one namespace do not fill a map"


@pytest.mark.parametrize(("greedy", "each"), [(1, 76), (2, 42), (4, 22), (20, 5)])
def test_greedy_namespaces_leave_room_for_others(greedy, each):
    """Below the fill from which quotas apply, no namespace is refused."""
    budgets, limit = NamespaceBudgets(), 10_000
    names, used = [f"g{number}" for number in range(greedy)], 0
    held = dict.fromkeys(names, 0)
    for _ in range(limit):
        for name in names:
            if used + 1 <= budgets.max_fill(name, "backend_slots", 1, limit):
                held[name] += 1
                budgets._used.setdefault(name, [0] * 5)[1] += 1
                used += 1
            else:
                assert used >= CONTESTED_FILL * limit
    assert {round(100 * count / limit) for count in held.values()} == {each}
    left = limit * (1 - SYSTEM_RESERVE) - used
    assert left >= limit * (1 - SYSTEM_RESERVE) / (1 + NAMESPACE_SHARE * greedy) - greedy
    assert used + 30 <= budgets.max_fill("modest", "backend_slots", 30, limit)


@each_pair(
    "given, shown",
    """\
2 of a/1 a/2 a/3 b/1 → a/1 b/1
4 of a/1 a/2 a/3 a/4 b/1 c/1 → a/1 b/1 c/1 a/2
4 of a/1 a/2 b/1 b/2 c/1 → a/1 b/1 c/1 a/2
2 of b/1 c/1 a/1 a/2 → b/1 c/1
4 of a/1 b/1 → a/1 b/1
4 of →
""",
)
def test_namespaces_take_turns(given, shown):
    """Each has its share of a short list, and what it does not need goes to others."""
    limit, _, *rows = given.split()
    assert list(take_turns(rows, lambda row: row.partition("/")[0]))[: int(limit)] == shown.split()
