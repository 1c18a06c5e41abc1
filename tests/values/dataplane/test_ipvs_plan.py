# SPDX-License-Identifier: Apache-2.0
"""The IPVS and nftables state of a Service port, for each of kube-proxy's rules that IPVS can
express, and the differences made by a change.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kbpf.dataplane.ipvs import ruleset
from kbpf.dataplane.ipvs.diff import Changes, DesiredElements
from kbpf.dataplane.ipvs.ipvs_cleanup import ruleset_options
from kbpf.dataplane.ipvs.plan import (
    EMPTY_PLAN,
    NODE_KEY,
    Element,
    NodeContext,
    RealServer,
    ServerPool,
    ServicePortPlan,
    SetName,
    VirtualService,
    fwmark_service,
    needs_fwmark,
    owned_service,
    ownership_element,
    plan_node,
    plan_service_port,
    without_service,
)
from kbpf.dataplane.ipvs.port_planner import FwmarkAllocator, NodePortConflicts
from kbpf.model.address import ANY4, ANY6, Addr, format_addr, format_endpoint, parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, FrontendKind, ServicePortKey, ServiceState
from kbpf.model.objects import Algorithm, Cidr, Protocol
from kbpf.source.decode.fields import parse_cidr
from tests.support.plane import desired, service

UDP = Protocol.UDP
A, B = "10.0.0.1:8080", "10.0.0.2:8080"
BOTH = f"{A} {B}"
NODE_IP, NODE_IP6 = "198.18.0.1", "fd00::1"
CLUSTER, PORT, VIP, EXTERNAL = (
    "10.96.0.1:80",
    "NodePort=0.0.0.0:30080",
    "LoadBalancer=192.0.2.1:80",
    "ExternalIP=192.0.2.2:80",
)
ALL = f"{CLUSTER} {PORT} {VIP} {EXTERNAL}"
MARK = 0x6B620001


def ground(**more: Any) -> NodeContext:
    addresses = tuple(map(parse_addr, (NODE_IP, NODE_IP6)))
    return NodeContext(addresses, **{"own_addresses": frozenset(addresses), **more})


def shown(parts: tuple[Any, ...]) -> str:
    words = []
    for part in parts:
        if isinstance(part, Cidr):
            mapped = format_addr(part.address).count(".") == 3
            words.append(f"{format_addr(part.address)}/{part.bits - 96 * mapped}")
        elif isinstance(part, bytes):
            words.append(format_addr(part))
        else:
            words.append(part.name if isinstance(part, Protocol) else str(part))
    return " ".join(words)


def sets(programmed: ServicePortPlan, *names: SetName) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, parts in programmed.elements:
        if name in names:
            found.setdefault(str(name), set()).add(shown(parts))
    return found


def pools(programmed: ServicePortPlan) -> dict[str, str]:
    """Virtual service → its scheduler, persistence and servers, as text."""
    found = {}
    for virtual, pool in programmed.pools.items():
        at = format_endpoint(virtual.address, virtual.port)
        name = f"mark {virtual.fwmark:#x}" if virtual.fwmark else f"{at}/{virtual.protocol.name}"
        servers = [f"{format_endpoint(*end)}*{weight}" for end, weight in pool.servers]
        found[name] = " ".join([f"{pool.scheduler},{pool.persistence}", *servers])
    return found


# ---- the outcome of a new connection -----------------------------------------------------------


class Answer(NamedTuple):
    """A Service port, and the servers ("a b") that outside clients reach at its ClusterIP and at
    its external frontends, or "refused" or "dropped". `here`: the servers that the node and its
    pods reach at external frontends by a fwmark; "" if the same, and the fwmark's virtual service,
    if there is one, has no servers.
    """

    name: str
    state: dict[str, Any]
    cluster_ip: str
    external: str
    here: str = ""


AB, JUST_A = "10.0.0.1 10.0.0.2", "10.0.0.1"
ANSWERS = [
    Answer("endpoints", {"to": BOTH}, AB, AB),
    Answer("no endpoint anywhere", {}, "refused", "refused"),
    Answer("internal Local, a local endpoint", {"to": BOTH, "local": A, "internal_local": True}, JUST_A, AB),
    Answer("internal Local, remote endpoints only", {"to": BOTH, "internal_local": True}, "dropped", AB),
    Answer("internal Local, no endpoint", {"internal_local": True}, "refused", "refused"),
    Answer("external Local, a local endpoint", {"to": BOTH, "local": A, "external_local": True}, AB, JUST_A, AB),
    Answer("external Local, remote endpoints only", {"to": BOTH, "external_local": True}, AB, "dropped", AB),
    Answer("external Local, no endpoint", {"external_local": True}, "refused", "refused"),
    Answer(
        "both Local, a local endpoint",
        {"to": BOTH, "local": A, "external_local": True, "internal_local": True},
        JUST_A,
        JUST_A,
        AB,
    ),
    Answer(
        "both Local, remote endpoints only",
        {"to": BOTH, "external_local": True, "internal_local": True},
        "dropped",
        "dropped",
        AB,
    ),
]


def made(row: Answer, frontends: str = ALL) -> tuple[ServiceState, ServicePortPlan]:
    state = service("web", frontends, **row.state)
    return state, plan_service_port(state, ground(), MARK if needs_fwmark(state) else 0)


def answer(programmed: ServicePortPlan, at: str) -> str:
    """The servers that an outside client reaches, or "refused" or "dropped"."""
    found = sets(programmed, SetName.SERVED, SetName.REFUSED, SetName.DROPPED)
    (name,) = [name for name, ats in found.items() if at in ats]
    address, protocol, port = at.split()
    pool = programmed.pools[VirtualService(Protocol[protocol], parse_addr(address), int(port))]
    servers = " ".join(format_addr(end.address) for end, _ in pool.servers)
    assert bool(servers) == (name == "served")
    return servers or name


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row.name)
def test_the_outcome_of_a_new_connection(row: Answer):
    _, programmed = made(row)
    assert answer(programmed, "10.96.0.1 TCP 80") == row.cluster_ip
    externals = ("198.18.0.1 TCP 30080", "192.0.2.1 TCP 80", "192.0.2.2 TCP 80")
    assert [answer(programmed, at) for at in externals] == [row.external] * 3
    short = sets(programmed, SetName.SHORT_CIRCUITS).get("short_circuits", set())
    assert short == ({f"{at} {MARK}" for at in externals} if row.here else set())
    marked = {name: to for name, to in pools(programmed).items() if "mark" in name}
    wanted = "rr,0 10.0.0.1:8080*1 10.0.0.2:8080*1" if row.here else "rr,0"
    local = row.state.get("external_local", False)
    assert marked == ({f"mark {MARK:#x}": wanted} if local else {})
    noted = sets(programmed, SetName.FWMARKS).get("marks", set())
    ats = ("0.0.0.0 TCP 30080", *externals[1:])
    assert noted == ({f"{at} {MARK}" for at in ats} if local else set())


def test_a_cluster_ip_alone_has_no_short_circuit():
    state = service("web", CLUSTER, BOTH, external_local=True)
    assert not needs_fwmark(state)


def test_a_short_circuit_no_longer_needed_gets_no_new_connections():
    """It stays for its established connections, with the current endpoints."""
    before = plan_service_port(service("web", ALL, A, external_local=True), ground(), MARK)
    after = plan_service_port(service("web", ALL, BOTH), ground(), MARK)
    kinds = SetName.FWMARKS, SetName.OWN_FWMARKS
    assert sets(after, *kinds) == sets(before, *kinds) != {}
    assert sets(after, SetName.SHORT_CIRCUITS) == {}
    assert pools(after)[f"mark {MARK:#x}"] == f"rr,0 {A}*1 {B}*1"


def test_node_ports_use_addresses_of_their_family():
    v6 = service("web", "[fd00:96::1]:80 NodePort=[::]:30080", "[fd00::9]:80")
    assert set(pools(plan_service_port(v6, ground()))) == {"[fd00:96::1]:80/TCP", f"[{NODE_IP6}]:30080/TCP"}
    assert set(pools(plan_service_port(service("web", PORT, A), ground()))) == {f"{NODE_IP}:30080/TCP"}
    assert pools(plan_service_port(service("web", PORT, A), NodeContext())) == {}


def test_the_dummy_device_has_all_addresses_but_the_nodes():
    state = service("web", f"{ALL} ExternalIP={NODE_IP}:80", A)
    ips = sets(plan_service_port(state, ground()), SetName.VIRTUAL_IPS)["virtual_ips"]
    assert ips == {"10.96.0.1", "192.0.2.1", "192.0.2.2"}
    assert f"{NODE_IP}:80/TCP" in pools(plan_service_port(state, ground()))


# ---- source ranges -----------------------------------------------------------------------------


class Ranges(NamedTuple):
    name: str
    ranges: str
    let_in: set[str]


RANGES = [
    Ranges("one", "203.0.113.0/24", {"203.0.113.0/24"}),
    Ranges("one inside another", "10.0.0.0/8 10.1.0.0/16", {"10.0.0.0/8"}),
    Ranges("with the node's address: the VIP is admitted too", "198.18.0.0/24", {"198.18.0.0/24", "192.0.2.1/32"}),
    Ranges("all", "0.0.0.0/0", {"0.0.0.0/0"}),
]


@pytest.mark.parametrize("row", RANGES, ids=lambda row: row.name)
def test_source_ranges_restrict_load_balancer_addresses_only(row: Ranges):
    programmed = plan_service_port(service("web", ALL, A, ranges=row.ranges), ground())
    found = sets(programmed, SetName.RESTRICTED, SetName.SOURCES)
    assert found["restricted"] == {"192.0.2.1 TCP 80"}
    assert found["sources"] == {f"{one} 192.0.2.1 TCP 80" for one in row.let_in}


def test_node_ports_with_ranges_admit_these_and_the_node():
    state = service("web", ALL, A)
    guarded = replace(
        state,
        frontends=tuple(replace(each, restricted=each.kind is FrontendKind.NODE_PORT) for each in state.frontends),
        node_port_ranges=(parse_cidr("203.0.113.0/24", ""),),
    )
    found = sets(plan_service_port(guarded, ground()), SetName.RESTRICTED, SetName.SOURCES)
    (at,) = found["restricted"]
    address, protocol, port = at.split()
    assert (protocol, port) == ("TCP", "30080")
    let_in = {one.split(" ", 1)[0] for one in found["sources"]}
    assert {"203.0.113.0/24", f"{address}/32"} <= let_in
    assert "0.0.0.0/0" not in let_in


# ---- masquerading ------------------------------------------------------------------------------


class Masquerade(NamedTuple):
    """`always`: frontends that are masqueraded for all clients; `outside`: for clients that are not
    pods.
    """

    name: str
    state: dict[str, Any]
    ground: dict[str, Any]
    always: str = ""
    outside: str = ""


CLUSTER_IP = "10.96.0.1"
EXTERNALS = "192.0.2.1 192.0.2.2 198.18.0.1"
MASQUERADES = [
    Masquerade("pods are not recognised", {}, {}, EXTERNALS),
    Masquerade("pods of this node are known", {}, {"detects_local": True}, EXTERNALS, CLUSTER_IP),
    Masquerade("masqueradeAll", {}, {"masquerade_all": True}, f"{CLUSTER_IP} {EXTERNALS}"),
    Masquerade(
        "masqueradeAll, pods known", {}, {"masquerade_all": True, "detects_local": True}, f"{CLUSTER_IP} {EXTERNALS}"
    ),
    Masquerade("external Local", {"external_local": True, "local": A}, {}),
    Masquerade(
        "external Local, pods known", {"external_local": True, "local": A}, {"detects_local": True}, "", CLUSTER_IP
    ),
    Masquerade("internal Local", {"internal_local": True, "local": A}, {}, EXTERNALS),
]


@pytest.mark.parametrize("row", MASQUERADES, ids=lambda row: row.name)
def test_which_frontends_are_masqueraded(row: Masquerade):
    programmed = plan_service_port(service("web", ALL, BOTH, **row.state), ground(**row.ground))
    found = sets(programmed, SetName.MASQUERADED, SetName.MASQUERADED_OUTSIDE)
    names = {name: {at.split()[0] for at in ats} for name, ats in found.items()}
    assert names.get("masqueraded", set()) == set(row.always.split())
    assert names.get("masqueraded_outside", set()) == set(row.outside.split())


def test_hairpin_elements_exist_for_local_backends_only():
    """One element for each local address, whatever ports it serves: only local backends dial from
    this node.
    """
    state = service("web", ALL, BOTH, external_local=True, on_node=(parse_addr("10.0.0.2"),))
    found = sets(plan_service_port(state, ground(), MARK), SetName.HAIRPINS)["hairpin_ips"]
    assert found == {"10.0.0.2 10.0.0.2"}


def test_connections_from_a_cluster_ip_of_a_device_are_masqueraded():
    """The node dials the address of its DNS cache from that same address."""
    state = service("dns", f"{CLUSTER} {PORT}", BOTH, on_node=())
    node_port, cluster_ip = state.frontends
    state = replace(state, frontends=(node_port, replace(cluster_ip, on_device=True)))
    context = ground(own_addresses=frozenset((cluster_ip.at.address,)))
    found = sets(plan_service_port(state, context), SetName.HAIRPINS, SetName.VIRTUAL_IPS)
    assert found == {"hairpin_ips": {"10.96.0.1 10.0.0.1", "10.96.0.1 10.0.0.2"}}


# ---- schedulers --------------------------------------------------------------------------------


class Spread(NamedTuple):
    name: str
    state: dict[str, Any]
    scheduler: str
    pool: str
    marked: str


SPREADS = [
    Spread("plain", {}, "rr", "rr,0", "rr,0"),
    Spread("least connections", {}, "lc", "lc,0", "lc,0"),
    Spread("weights", {"cluster_weights": (3, 1)}, "rr", "wrr,0", "wrr,0"),
    Spread("weights and lc", {"cluster_weights": (3, 1)}, "lc", "wlc,0", "wlc,0"),
    Spread("weights and sh", {"cluster_weights": (3, 1)}, "sh", "sh,0", "sh,0"),
    Spread("Maglev", {"algorithm": Algorithm.MAGLEV}, "rr", "mh,0", "mh,0"),
    Spread("affinity", {"affinity_timeout": 10800}, "rr", "rr,10800", "sh,0"),
]


@pytest.mark.parametrize("row", SPREADS, ids=lambda row: row.name)
def test_scheduler_and_weights(row: Spread):
    state = service("web", f"{CLUSTER} {VIP}", BOTH, external_local=True, **row.state)
    found = pools(plan_service_port(state, ground(scheduler=row.scheduler), MARK))
    weights = row.state.get("cluster_weights", (1, 1))
    servers = " ".join(f"{at}*{w}" for at, w in zip(BOTH.split(), weights, strict=True))
    assert found["10.96.0.1:80/TCP"] == f"{row.pool} {servers}"
    assert found[f"mark {MARK:#x}"] == f"{row.marked} {servers}"


@pytest.mark.parametrize(("more", "by_port"), [({}, True), ({"affinity_timeout": 9}, False)])
def test_maglev_hashes_the_port_unless_there_is_affinity(more: dict[str, Any], by_port: bool):
    state = service("web", CLUSTER, BOTH, algorithm=Algorithm.MAGLEV, **more)
    (pool,) = plan_service_port(state, ground()).pools.values()
    assert pool.by_port == by_port


# ---- changes -----------------------------------------------------------------------------------


def plan(ledger: DesiredElements, *states: ServiceState, gone: tuple[ServicePortKey, ...] = ()) -> Changes:
    after = {s.key: plan_service_port(s, ground(), MARK if needs_fwmark(s) else 0) for s in states}
    return ledger.update({**after, **dict.fromkeys(gone, EMPTY_PLAN)})


class Planner:
    """Desired elements with NodePort conflicts resolved, as in the data plane."""

    def __init__(self) -> None:
        self.ledger, self.overlaps = DesiredElements(), NodePortConflicts()
        self.states: dict[ServicePortKey, ServiceState] = {}

    def change(self, states: Mapping[ServicePortKey, ServiceState | None]) -> Changes:
        """Changes Service ports to these states; None: deleted."""
        keys = set(states)
        for key, state in states.items():
            self.states.pop(key, None)
            if state is not None:
                self.states[key] = state
            keys |= self.overlaps.update(key, state)
        return self.ledger.update({key: self._program(self.states.get(key)) for key in keys})

    def _program(self, state: ServiceState | None) -> ServicePortPlan:
        if state is None:
            return EMPTY_PLAN
        mark = MARK + sum(state.key.name.encode()) if needs_fwmark(state) else 0
        return plan_service_port(state, ground(), mark, self.overlaps.exact)


def names(elements: set[Element]) -> set[str]:
    return {name for name, _ in elements}


def test_ownership_of_virtual_services_is_added_first_and_removed_last():
    ledger, state = DesiredElements(), service("web", ALL, BOTH, external_local=True)
    steps = plan(ledger, state).steps()
    assert {owned_service(e) for e in steps.added_first} - {None} == set(ledger.pools)
    assert names(steps.added_late) == {"served", "short_circuits"}
    assert not steps.removed_first | steps.removed_late | steps.removed_ownership
    steps = plan(ledger, gone=(state.key,)).steps()
    assert names(steps.removed_ownership) == {"own", "own_marks"}
    assert {"served", "short_circuits", "virtual_ips"} <= names(steps.removed_late)
    assert not steps.removed_first | steps.added_first | steps.added_late
    assert (dict(ledger.pools), ledger.elements, ledger.plans) == ({}, frozenset(), {})


def served(at: str) -> Element:
    host, _, port = at.rpartition(":")
    return SetName.SERVED, (parse_addr(host), Protocol.TCP, int(port))


def test_a_refused_virtual_service_is_not_served_and_tried_again():
    """A virtual service that the kernel refuses is not recorded, and no connection is admitted to
    it; it is tried again with the next change of its Service port.
    """
    ledger, state = DesiredElements(), service("web", ALL, BOTH, external_local=True, local=A)
    changes = plan(ledger, state)
    refused = VirtualService(Protocol.TCP, parse_addr("192.0.2.1"), 80)
    short = next(virtual for virtual in ledger.pools if virtual.fwmark)
    assert {served("192.0.2.1:80"), served("10.96.0.1:80")} <= changes.new_elements
    owners = ledger.record_refusals({refused: None, short: None}, changes)
    assert owners == {refused: state.key, short: state.key}
    assert {refused, short}.isdisjoint(ledger.pools)
    assert changes.old_elements == set(), "they were never programmed"
    assert served("192.0.2.1:80") not in changes.new_elements | ledger.elements
    assert served("10.96.0.1:80") in changes.new_elements & ledger.elements
    assert names(changes.steps().added_late) == {"served"}
    assert not {e for e in ledger.elements if e[0] is SetName.SHORT_CIRCUITS}
    again = plan(ledger, state)
    assert again.new_pools.keys() == {refused, short}
    assert names(again.new_elements) == {"served", "short_circuits"}
    assert not again.changed_pools


def test_a_lost_virtual_service_is_no_longer_served():
    """A virtual service that served before: its elements are removed with this change."""
    ledger = DesiredElements()
    plan(ledger, service("web", f"{CLUSTER} {VIP}", A))
    changes = plan(ledger, service("web", f"{CLUSTER} {VIP}", BOTH))
    lost = VirtualService(Protocol.TCP, parse_addr("10.96.0.1"), 80)
    ledger.record_refusals({lost: None}, changes)
    assert changes.old_elements == {served("10.96.0.1:80")}
    assert served("192.0.2.1:80") in ledger.elements
    assert ledger.pools.keys() == {VirtualService(Protocol.TCP, parse_addr("192.0.2.1"), 80)}


def test_the_state_held_by_the_kernel_after_a_refusal_is_recorded():
    ledger, wanted = DesiredElements(), service("web", CLUSTER, BOTH)
    plan(ledger, service("web", CLUSTER, A))
    ((virtual, old),) = ledger.pools.items()
    changes = plan(ledger, wanted)
    assert ledger.record_refusals({virtual: old}, changes) == {virtual: wanted.key}
    assert ledger.pools == {virtual: old}
    assert changes.old_elements == set()
    assert plan(ledger, wanted).changed_pools[virtual][0] == old


def test_elements_admitted_early_are_removed_if_the_service_is_refused():
    """As if the virtual service had been a kube-proxy's before."""
    ledger, state = DesiredElements(), service("web", CLUSTER, A)
    plan(ledger, state)
    (virtual,) = ledger.pools
    changes = ledger.diff(frozenset(), frozenset(), dict(ledger.pools), True)
    assert changes.immediate == {served("10.96.0.1:80")}
    ledger.record_refusals({virtual: None}, changes)
    assert changes.old_elements == {served("10.96.0.1:80")}
    assert served("10.96.0.1:80") not in changes.new_elements


class Strays(NamedTuple):
    """An address of the dummy device, the elements that mention it, and whether it is removed as
    unclaimed.
    """

    name: str
    by: tuple[Element, ...]
    stray: bool


ADDRESS = parse_addr("10.96.0.9")
STRAYS = [
    Strays("no element mentions it", (), True),
    Strays("an old virtual address, removed with its element", ((SetName.VIRTUAL_IPS, (ADDRESS,)),), False),
    Strays("only an element of `served`", ((SetName.SERVED, (ADDRESS, Protocol.TCP, 80)),), True),
    Strays("only a hairpin element", ((SetName.HAIRPINS, (ADDRESS, ADDRESS)),), True),
]


@pytest.mark.parametrize("row", STRAYS, ids=lambda row: row.name)
@pytest.mark.parametrize("sound", [True, False])
def test_unclaimed_addresses_are_removed(row: Strays, sound: bool):
    ledger = DesiredElements()
    plan(ledger, service("web", CLUSTER, A))
    here = addresses(ledger) | {ADDRESS}
    changes = ledger.diff(ledger.elements | {*row.by}, here, dict(ledger.pools), sound)
    assert changes.unclaimed_addresses == ({ADDRESS} if row.stray and sound else set())
    assert changes.old_elements == ({*row.by} if sound else set())
    assert not changes.new_elements


def test_a_refused_fwmark_removes_only_its_elements():
    state = service("web", ALL, BOTH, external_local=True, local=A)
    whole = plan_service_port(state, ground(), MARK)
    virtual = fwmark_service(4, MARK)
    less = without_service(whole, virtual)
    assert whole.pools.keys() - less.pools.keys() == {virtual}
    assert names(whole.elements - less.elements) == {"own_marks", "marks"}
    assert less.elements < whole.elements
    assert {e[0] for e in less.elements}.isdisjoint({SetName.FWMARKS, SetName.OWN_FWMARKS})
    assert without_service(less, virtual) == less


def test_ownership_elements_round_trip():
    for virtual in plan_service_port(service("web", ALL, BOTH, external_local=True), ground(), MARK).pools:
        assert owned_service(ownership_element(virtual)) == virtual


def test_losing_the_last_endpoint_refuses_before_it_stops_serving():
    ledger = DesiredElements()
    plan(ledger, service("web", CLUSTER, A))
    changes = plan(ledger, service("web", CLUSTER))
    steps = changes.steps()
    assert (names(steps.added_first), names(steps.removed_late)) == ({"refused"}, {"served", "hairpin_ips"})
    assert len(changes.changed_pools) == 1
    assert not changes.old_pools


def test_overlapping_ranges_are_replaced_in_one_step():
    ledger = DesiredElements()
    plan(ledger, service("web", VIP, A, ranges="10.0.0.0/8"))
    steps = plan(ledger, service("web", VIP, A, ranges="10.1.0.0/16")).steps()
    assert [names(step) for step in steps] == [{"sources"}, {"sources"}, set(), set(), set()]


class Rooms(NamedTuple):
    """A new element and an old one; whether the old one must be deleted first, because both have
    the same key or overlap.
    """

    name: str
    new: Element
    old: Element
    first: bool


TEN, ELEVEN = parse_addr("10.96.0.10"), parse_addr("10.96.0.11")
NETS = tuple(parse_cidr(text, "") for text in ("10.0.0.0/8", "10.1.0.0/16"))
ROOMS = [
    Rooms(
        "another mark of the same frontend",
        (SetName.SHORT_CIRCUITS, (TEN, Protocol.TCP, 80, 1)),
        (SetName.SHORT_CIRCUITS, (TEN, Protocol.TCP, 80, 2)),
        True,
    ),
    Rooms(
        "the mark of another port",
        (SetName.SHORT_CIRCUITS, (TEN, Protocol.TCP, 80, 1)),
        (SetName.SHORT_CIRCUITS, (TEN, Protocol.TCP, 81, 1)),
        False,
    ),
    Rooms(
        "another network of the same frontend",
        (SetName.SOURCES, (NETS[0], TEN, Protocol.TCP, 80)),
        (SetName.SOURCES, (NETS[1], TEN, Protocol.TCP, 80)),
        True,
    ),
    Rooms(
        "a network of another address",
        (SetName.SOURCES, (NETS[0], TEN, Protocol.TCP, 80)),
        (SetName.SOURCES, (NETS[1], ELEVEN, Protocol.TCP, 80)),
        False,
    ),
    Rooms("another network of pods", (SetName.LOCAL_NETWORKS, (NETS[0],)), (SetName.LOCAL_NETWORKS, (NETS[1],)), True),
    Rooms(
        "elements without a conflict",
        (SetName.REFUSED, (TEN, Protocol.TCP, 80)),
        (SetName.DROPPED, (TEN, Protocol.TCP, 80)),
        False,
    ),
]


@pytest.mark.parametrize("row", ROOMS, ids=lambda row: row.name)
def test_conflicting_elements_are_deleted_first(row: Rooms):
    steps = Changes({row.new}, old_elements={row.old}, immediate={row.new}).steps()
    assert (steps.added_first, steps.added_late) == ({row.new}, set())
    assert (row.old in steps.removed_first, row.old in steps.removed_late) == (row.first, not row.first)


def test_a_fwmarks_virtual_service_has_its_familys_wildcard():
    assert fwmark_service(4, MARK) == VirtualService(Protocol.TCP, ANY4, 0, MARK)
    assert fwmark_service(6, MARK) == VirtualService(Protocol.TCP, ANY6, 0, MARK)


def test_shared_elements_stay_until_both_services_are_gone():
    ledger = DesiredElements()
    one = service("one", "10.96.0.1:80", A)
    two = service("two", "10.96.0.1:81", A)
    plan(ledger, one, two)
    first = plan(ledger, gone=(one.key,))
    assert not names(first.old_elements) & {"virtual_ips", "hairpin_ips"}
    second = plan(ledger, gone=(two.key,))
    assert names(second.old_elements) >= {"virtual_ips", "hairpin_ips"}


def test_a_frontend_that_moves_changes_its_virtual_service():
    ledger = DesiredElements()
    old, new = service("old", CLUSTER, A), service("new", CLUSTER, B)
    plan(ledger, old)
    changes = plan(ledger, new, gone=(old.key,))
    assert (len(changes.changed_pools), changes.new_pools, changes.old_pools) == (1, {}, {})
    assert (SetName.SERVED, (parse_addr("10.96.0.1"), Protocol.TCP, 80)) in ledger.elements


class Cut(NamedTuple):
    """Backends before and after a change, and those whose UDP flows are cut."""

    name: str
    protocol: Protocol
    before: str
    after: str
    serving: str
    cut: set[str]


CUTS = [
    Cut("UDP stops serving", UDP, BOTH, A, A, {"10.0.0.2"}),
    Cut("UDP leaves the set but still serves", UDP, BOTH, A, BOTH, set()),
    Cut("UDP, the last backend stops", UDP, A, "", "", {"10.0.0.1"}),
    Cut("TCP stops serving", Protocol.TCP, BOTH, A, A, set()),
    Cut("SCTP stops serving", Protocol.SCTP, BOTH, A, A, set()),
]


@pytest.mark.parametrize("row", CUTS, ids=lambda row: row.name)
def test_which_backends_udp_flows_are_cut(row: Cut):
    ledger = DesiredElements()
    plan(ledger, service("dns", CLUSTER, row.before, row.protocol))
    changes = plan(ledger, service("dns", CLUSTER, row.after, row.protocol, serving=row.serving))
    assert {format_addr(end.address) for _, end in changes.udp_cuts} == row.cut
    again = DesiredElements()  # after a restart, with the state read from the kernel
    old = {virtual: had for virtual, (had, _) in changes.changed_pools.items()}
    plan(again, service("dns", CLUSTER, row.after, row.protocol, serving=row.serving))
    assert again.diff(again.elements, addresses(again), old, True).udp_cuts == changes.udp_cuts


def addresses(ledger: DesiredElements) -> frozenset[Addr]:
    """The addresses that the dummy device should have."""
    return frozenset(parts[0] for name, parts in ledger.elements if name is SetName.VIRTUAL_IPS)


STATES = [
    service("web", ALL, BOTH),
    service("web", CLUSTER, A),
    service("web", ALL, "", ranges="10.0.0.0/8"),
    service("web", ALL, BOTH, external_local=True, ranges="10.1.0.0/16"),
    service("dns", "10.96.0.1:53", A, UDP),
    service("dns", "10.96.0.1:53", BOTH, UDP, affinity_timeout=5),
    service("other", "10.96.0.2:80 NodePort=0.0.0.0:30099", BOTH, internal_local=True),
    service("thief", f"10.96.0.3:30080 ExternalIP={NODE_IP}:30080", A, external_local=True),
    service("thief", f"10.96.0.3:30099 LoadBalancer={NODE_IP}:30099", ranges="10.0.0.0/8"),
    service("both", f"10.96.0.4:30001 NodePort=0.0.0.0:30001 ExternalIP={NODE_IP}:30001", B),
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from(STATES), st.booleans()), max_size=3)))
def test_the_final_state_does_not_depend_on_the_changes(rounds: list[list[tuple[ServiceState, bool]]]):
    """A model of the kernel that applies the steps ends with the state of the last change. Nothing
    is removed that does not exist, and nothing is added twice that must not be.
    """
    planner, elements, held = Planner(), set[Element](), dict[VirtualService, Any]()
    ledger = planner.ledger
    last: dict[ServicePortKey, ServiceState] = {}
    for one in rounds:
        batch = {state.key: (state, there) for state, there in one}
        for key, (state, there) in batch.items():
            last[key] = state
            if not there:
                del last[key]
        changes = planner.change({key: s if there else None for key, (s, there) in batch.items()})
        steps = changes.steps()
        for removed, added in (
            (steps.removed_first, steps.added_first),
            (steps.removed_late, steps.added_late),
            (steps.removed_ownership, set()),
        ):
            assert removed <= elements
            assert not added & elements
            elements = elements - removed | added
        for virtual in changes.old_pools:
            del held[virtual]
        assert not held.keys() & changes.new_pools.keys()
        held |= changes.new_pools
        held |= {v: new for v, (_, new) in changes.changed_pools.items()}
    again = Planner()
    again.change(last)
    whole = again.ledger
    assert elements == whole.elements == ledger.elements
    assert held == whole.pools == ledger.pools
    assert not ledger.diff(frozenset(elements), addresses(whole), held, True)


@pytest.mark.parametrize("there", [True, False], ids=["exists", "missing"])
def test_existing_virtual_services_are_admitted_with_their_address(there: bool):
    """For a kube-proxy's virtual services, or ours after the table was flushed: as soon as an
    address is in `virtual_ips`, connections that are not in `served` are refused.
    """
    ledger = DesiredElements()
    plan(ledger, service("web", CLUSTER, BOTH))
    pools = dict(ledger.pools) if there else {}
    steps = ledger.diff(frozenset(), frozenset(), pools, authoritative=True).steps()
    assert "virtual_ips" in names(steps.added_first)
    assert ("served" in names(steps.added_first), "served" in names(steps.added_late)) == (there, not there)


def test_a_non_authoritative_state_removes_no_services():
    ledger, known = DesiredElements(), DesiredElements()
    plan(known, service("web", CLUSTER, A), service("lost", "10.96.0.9:80", A))
    plan(ledger, service("web", CLUSTER, ""))
    held = known.elements, addresses(known), known.pools
    changes = ledger.diff(*held, authoritative=False)
    assert {shown(parts) for _, parts in changes.old_elements} == {"10.96.0.1 TCP 80"}
    assert names(changes.old_elements) == {"served"}
    assert not changes.old_pools
    assert len(ledger.diff(*held, authoritative=True).old_pools) == 1


# ---- NodePorts in conflict with exact frontends ------------------------------------------------

PORT_A = service("a", "10.96.0.1:80 NodePort=0.0.0.0:30080", A)
EXACT = f"10.96.0.2:30080 ExternalIP={NODE_IP}:30080"
AT_NODE = f"{NODE_IP} TCP 30080"


class Overlap(NamedTuple):
    """Changes in order ("-name": deleted); the servers at the node's address and port in the end,
    and the outcome of a new connection there.
    """

    name: str
    steps: tuple[ServiceState | str, ...]
    servers: str
    answer: str


B_SERVES, B_EMPTY = service("b", EXACT, B), service("b", EXACT)
OVERLAPS = [
    Overlap("only a NodePort", (PORT_A,), "10.0.0.1", "served"),
    Overlap("the exact frontend wins", (PORT_A, B_SERVES), "10.0.0.2", "served"),
    Overlap("the exact frontend wins, created first", (B_SERVES, PORT_A), "10.0.0.2", "served"),
    Overlap("it wins without endpoints, as in mode bpf", (PORT_A, B_EMPTY), "", "refused"),
    Overlap("it gets endpoints later", (PORT_A, B_EMPTY, B_SERVES), "10.0.0.2", "served"),
    Overlap("deleted: the NodePort serves again", (PORT_A, B_SERVES, "-b"), "10.0.0.1", "served"),
    Overlap("the NodePort is deleted", (PORT_A, B_SERVES, "-a"), "10.0.0.2", "served"),
    Overlap("both are deleted", (PORT_A, B_SERVES, "-a", "-b"), "", ""),
    Overlap("both are deleted, the exact one first", (PORT_A, B_SERVES, "-b", "-a"), "", ""),
    Overlap(
        "another address does not conflict",
        (PORT_A, service("b", "10.96.0.2:30080 ExternalIP=192.0.2.2:30080", B)),
        "10.0.0.1",
        "served",
    ),
    Overlap("another protocol does not conflict", (PORT_A, service("b", EXACT, B, UDP)), "10.0.0.1", "served"),
    Overlap(
        "one Service with both",
        (service("a", f"10.96.0.1:80 NodePort=0.0.0.0:30080 LoadBalancer={NODE_IP}:30080", A, ranges="10.0.0.0/8"),),
        "10.0.0.1",
        "served",
    ),
]


@pytest.mark.parametrize("row", OVERLAPS, ids=lambda row: row.name)
def test_a_node_port_gives_way_to_an_exact_frontend(row: Overlap):
    planner = Planner()
    for step in row.steps:
        if isinstance(step, str):
            planner.change({service(step[1:], CLUSTER).key: None})
        else:
            planner.change({step.key: step})
    at = VirtualService(Protocol.TCP, parse_addr(NODE_IP), 30080)
    pool = planner.ledger.pools.get(at, ServerPool(""))
    assert " ".join(format_addr(end.address) for end, _ in pool.servers) == row.servers
    answers = {
        str(name)
        for name, parts in planner.ledger.elements
        if name in (SetName.SERVED, SetName.REFUSED, SetName.DROPPED) and shown(parts) == AT_NODE
    }
    assert answers == ({row.answer} if row.answer else set())


def test_node_elements_are_networks_and_addresses():
    networks = (Cidr(parse_addr("10.1.0.0"), 112), Cidr(parse_addr("fd00::"), 64))
    programmed = plan_node(DesiredState({}, (), (), networks), ground())
    assert sets(programmed, *SetName) == {
        "local_networks": {"10.1.0.0/16", "fd00::/64"},
        "node_ips": {NODE_IP, NODE_IP6},
    }
    assert NODE_KEY not in desired(*STATES).services


def test_real_servers_sort_like_backends():
    """Real servers read from the kernel compare equal with planned ones."""
    (pool, *_) = plan_service_port(
        service("web", CLUSTER, "10.0.0.2:9 10.0.0.2:8 10.0.0.1:80"), ground()
    ).pools.values()
    assert list(pool.servers) == sorted(pool.servers)
    assert isinstance(pool.servers[0][0], RealServer)


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ((1024, 29999), (30000, 65535)),
        ((61000, 65535), (1024, 60999)),
        ((20000, 30000), (30001, 65535)),
        ((40000, 50000), (1024, 39999)),
    ],
)
def test_masqueraded_ports_differ_from_those_of_mode_bpf(taken: tuple[int, int], left: tuple[int, int]):
    assert ruleset_options(Config(masquerade_ports=taken)).masquerade_ports == left


def test_rules_match_before_they_change_a_packet():
    """nftables evaluates a rule in order: a mark set before a failing match stays set."""
    made = [
        one["add"]["rule"]["expr"]
        for one in ruleset.create_table(ruleset.RulesetOptions())
        if "rule" in one.get("add", {})
    ]
    assert len(made) > 50
    for words in made:
        is_match = ["match" in word for word in words]
        assert is_match == sorted(is_match, reverse=True), words


def test_a_fwmark_with_the_masquerade_bit_is_not_adopted():
    """--masquerade-bit was changed since."""
    state = service("web", PORT, BOTH, external_local=True)
    noted = [(SetName.FWMARKS, (ANY4, Protocol.TCP, 30080, MARK))]
    same, other = FwmarkAllocator(reserved_bits=1 << 1), FwmarkAllocator(reserved_bits=1 << 0)
    same.adopt(noted)
    other.adopt(noted)
    assert same.allocate(state) == MARK
    assert other.allocate(state) > MARK


@pytest.mark.parametrize("bit", range(32))
def test_fwmarks_never_contain_the_masquerade_bit(bit: int):
    """For every bit, and without iterating over excluded marks; each mark is used once."""
    marks = FwmarkAllocator(reserved_bits=1 << bit)
    states = [service(f"s{i}", ALL, BOTH, external_local=True) for i in range(5)]
    found = [marks.allocate(state) for state in states[:2]]
    if bit < 16:  # the next one would have it
        marks.adopt([(SetName.OWN_FWMARKS, (ANY4, 0x6B620000 + (1 << bit) - 1))])
    found += [marks.allocate(state) for state in states[2:]]
    assert len(set(found)) == 5
    assert all(0 < mark < 1 << 32 and not mark & 1 << bit for mark in found)
