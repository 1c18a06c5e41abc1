# SPDX-License-Identifier: Apache-2.0
"""The IPVS and nftables state of a Service port, for each of kube-proxy's rules that IPVS can
express, and the differences made by a change.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kbpf.dataplane.ipvs.diff import Changes, DesiredElements
from kbpf.dataplane.ipvs.plan import (
    EMPTY_PLAN,
    NODE_KEY,
    Element,
    NodeContext,
    ServerPool,
    ServicePortPlan,
    SetName,
    fwmark_service,
    needs_fwmark,
    owned_services,
    plan_node,
    plan_service_port,
    without_service,
)
from kbpf.dataplane.ipvs.port_planner import NodePortConflicts
from kbpf.model.address import Addr, format_addr, format_endpoint, parse_addr
from kbpf.model.desired import DesiredState, FrontendKind, ServicePortKey, ServiceState, VirtualService
from kbpf.model.objects import Cidr, Protocol
from kbpf.source.decode.fields import parse_cidr
from tests.support.plane import desired, service
from tests.support.table import each_cells, each_line, each_named_pair
from tests.values.dataplane.states import A, B, changed, state

BOTH = f"{A} {B}"
NODE_IP, NODE_IP6 = "198.18.0.1", "fd00::1"
ALL = "at=ClusterIP,NodePort,VIP,ExternalIP"
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
    """Virtual service → its scheduler, persistence, `port` if it hashes the client's, and servers, as text."""
    found = {}
    for virtual, pool in programmed.pools.items():
        at = format_endpoint(virtual.address, virtual.port)
        name = f"mark {virtual.fwmark:#x}" if virtual.fwmark else f"{at}/{virtual.protocol.name}"
        servers = [f"{format_endpoint(*end)}*{weight}" for end, weight in pool.servers]
        spread = f"{pool.scheduler},{pool.persistence}{',port' * pool.by_port}"
        found[name] = " ".join([spread, *servers])
    return found


# ---- the outcome of a new connection -----------------------------------------------------------


def made(text: str, **more: Any) -> ServicePortPlan:
    """The plan of a Service port on a node with these fields of ground()."""
    port = state(text)
    return plan_service_port(port, ground(**more), MARK if needs_fwmark(port) else 0)


def answer(programmed: ServicePortPlan, at: str) -> str:
    """The servers that an outside client reaches, or "refused" or "dropped"."""
    found = sets(programmed, SetName.SERVED, SetName.REFUSED, SetName.DROPPED)
    (name,) = [name for name, ats in found.items() if at in ats]
    address, protocol, port = at.split()
    pool = programmed.pools[VirtualService(Protocol[protocol], parse_addr(address), int(port))]
    servers = " ".join(format_addr(end.address) for end, _ in pool.servers)
    assert bool(servers) == (name == "served")
    return servers or name


@each_line(
    "text, cluster_ip, external, here",
    """\
A B | 10.0.0.1 10.0.0.2 | 10.0.0.1 10.0.0.2 |
 | refused | refused |
A B local=A internal-local | 10.0.0.1 | 10.0.0.1 10.0.0.2 |
A B internal-local | dropped | 10.0.0.1 10.0.0.2 |
internal-local | refused | refused |
A B local=A external-local | 10.0.0.1 10.0.0.2 | 10.0.0.1 | 10.0.0.1 10.0.0.2
A B external-local | 10.0.0.1 10.0.0.2 | dropped | 10.0.0.1 10.0.0.2
external-local | refused | refused |
A B local=A external-local internal-local | 10.0.0.1 | 10.0.0.1 | 10.0.0.1 10.0.0.2
A B external-local internal-local | dropped | dropped | 10.0.0.1 10.0.0.2
""",
)
def test_the_outcome_of_a_new_connection(text, cluster_ip, external, here):
    """A Service port, and the servers that outside clients reach at its ClusterIP and at its external frontends, or
    "refused" or "dropped"; then the servers that the node and its pods reach at external frontends by a fwmark: "" if
    the same, and the fwmark's virtual service, if there is one, has no servers.
    """
    programmed = made(f"{text} {ALL}")
    assert answer(programmed, "10.96.0.1 TCP 80") == cluster_ip
    externals = ("198.18.0.1 TCP 30080", "192.0.2.1 TCP 80", "192.0.2.2 TCP 80")
    assert [answer(programmed, at) for at in externals] == [external] * 3
    short = sets(programmed, SetName.SHORT_CIRCUITS).get("short_circuits", set())
    assert short == ({f"{at} {MARK}" for at in externals} if here else set())
    marked = {name: to for name, to in pools(programmed).items() if "mark" in name}
    wanted = "rr,0 10.0.0.1:8080*1 10.0.0.2:8080*1" if here else "rr,0"
    local = "external-local" in text
    assert marked == ({f"mark {MARK:#x}": wanted} if local else {})
    noted = sets(programmed, SetName.FWMARKS).get("marks", set())
    ats = ("0.0.0.0 TCP 30080", *externals[1:])
    assert noted == ({f"{at} {MARK}" for at in ats} if local else set())


def test_node_ports_use_addresses_of_their_family():
    v6 = service("web", "[fd00:96::1]:80 NodePort=[::]:30080", "[fd00::9]:80")
    assert set(pools(plan_service_port(v6, ground()))) == {"[fd00:96::1]:80/TCP", f"[{NODE_IP6}]:30080/TCP"}
    assert set(pools(made("A at=NodePort"))) == {f"{NODE_IP}:30080/TCP"}
    assert pools(plan_service_port(state("A at=NodePort"), NodeContext())) == {}


# ---- source ranges -----------------------------------------------------------------------------

RANGES = {
    # the ranges, and the networks that are admitted
    "203.0.113.0/24": {"203.0.113.0/24"},
    "10.0.0.0/8,10.1.0.0/16": {"10.0.0.0/8"},
    "198.18.0.0/24": {"198.18.0.0/24", "192.0.2.1/32"},  # with the node's address: the VIP, too
    "0.0.0.0/0": {"0.0.0.0/0"},
}


@pytest.mark.parametrize("ranges", RANGES)
def test_source_ranges_restrict_load_balancer_addresses_only(ranges):
    found = sets(made(f"A {ALL} ranges={ranges}"), SetName.RESTRICTED, SetName.SOURCES)
    assert found["restricted"] == {"192.0.2.1 TCP 80"}
    assert found["sources"] == {f"{one} 192.0.2.1 TCP 80" for one in RANGES[ranges]}


def test_node_ports_with_ranges_admit_these_and_the_node():
    port = state(f"A {ALL}")
    guarded = replace(
        port,
        frontends=tuple(replace(each, restricted=each.kind is FrontendKind.NODE_PORT) for each in port.frontends),
        node_port_ranges=(parse_cidr("203.0.113.0/24", ""),),
    )
    found = sets(plan_service_port(guarded, ground()), SetName.RESTRICTED, SetName.SOURCES)
    assert found["restricted"] == {f"{NODE_IP} TCP 30080"}
    let_in = {one.split(" ", 1)[0] for one in found["sources"]}
    assert {"203.0.113.0/24", f"{NODE_IP}/32"} <= let_in
    assert "0.0.0.0/0" not in let_in


# ---- masquerading ------------------------------------------------------------------------------


@each_cells(
    "text, node, always, outside",
    """\
pods are not recognised | A B |  | 192.0.2.1 192.0.2.2 198.18.0.1 |
pods of this node are known | A B | detects_local | 192.0.2.1 192.0.2.2 198.18.0.1 | 10.96.0.1
masqueradeAll | A B | masquerade_all | 10.96.0.1 192.0.2.1 192.0.2.2 198.18.0.1 |
masqueradeAll, pods known | A B | detects_local masquerade_all | 10.96.0.1 192.0.2.1 192.0.2.2 198.18.0.1 |
external Local | A B local=A external-local |  |  |
external Local, pods known | A B local=A external-local | detects_local |  | 10.96.0.1
internal Local | A B local=A internal-local |  | 192.0.2.1 192.0.2.2 198.18.0.1 |
""",
)
def test_which_frontends_are_masqueraded(text, node, always, outside):
    """A Service port, settings of the node, and the frontends masqueraded for all clients and for those that are not
    pods.
    """
    found = sets(
        made(f"{text} {ALL}", **dict.fromkeys(node.split(), True)),
        SetName.MASQUERADED,
        SetName.MASQUERADED_OUTSIDE,
    )
    names = {name: {at.split()[0] for at in ats} for name, ats in found.items()}
    assert names.get("masqueraded", set()) == set(always.split())
    assert names.get("masqueraded_outside", set()) == set(outside.split())


def test_hairpin_elements_exist_for_local_backends_only():
    """One element for each local address, whatever ports it serves: only local backends dial from
    this node.
    """
    port = state(f"A B {ALL} external-local", on_node=(parse_addr("10.0.0.2"),))
    found = sets(plan_service_port(port, ground(), MARK), SetName.HAIRPINS)["hairpin_ips"]
    assert found == {"10.0.0.2 10.0.0.2"}


def test_connections_from_a_cluster_ip_of_a_device_are_masqueraded():
    """The node dials the address of its DNS cache from that same address."""
    port = state("A B at=ClusterIP,NodePort", on_node=())
    node_port, cluster_ip = port.frontends
    port = replace(port, frontends=(node_port, replace(cluster_ip, on_device=True)))
    context = ground(own_addresses=frozenset((cluster_ip.at.address,)))
    found = sets(plan_service_port(port, context), SetName.HAIRPINS, SetName.VIRTUAL_IPS)
    assert found == {"hairpin_ips": {"10.96.0.1 10.0.0.1", "10.96.0.1 10.0.0.2"}}


# ---- schedulers --------------------------------------------------------------------------------


@each_cells(
    "text, scheduler, pool, marked",
    """\
plain |  | rr | rr,0 | rr,0
least connections |  | lc | lc,0 | lc,0
weights | weights=3,1 | rr | wrr,0 | wrr,0
weights and lc | weights=3,1 | lc | wlc,0 | wlc,0
weights and sh | weights=3,1 | sh | sh,0,port | sh,0,port
Maglev hashes the port | maglev | rr | mh,0,port | mh,0,port
Maglev with affinity does not | maglev affinity=9 | rr | mh,9 | sh,0
affinity | affinity=10800 | rr | rr,10800 | sh,0
""",
)
def test_scheduler_and_weights(text, scheduler, pool, marked):
    """The Service port, the node's scheduler, and those of a frontend's virtual service and the fwmark's."""
    found = pools(made(f"A B at=ClusterIP,VIP external-local {text}", scheduler=scheduler))
    servers = f"{A}*3 {B}*1" if "weights" in text else f"{A}*1 {B}*1"
    assert found["10.96.0.1:80/TCP"] == f"{pool} {servers}"
    assert found[f"mark {MARK:#x}"] == f"{marked} {servers}"


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
        for key, port in states.items():
            self.states.pop(key, None)
            if port is not None:
                self.states[key] = port
            keys |= self.overlaps.update(key, port)
        return self.ledger.update({key: self._program(self.states.get(key)) for key in keys})

    def _program(self, port: ServiceState | None) -> ServicePortPlan:
        if port is None:
            return EMPTY_PLAN
        mark = MARK + sum(port.key.name.encode()) if needs_fwmark(port) else 0
        return plan_service_port(port, ground(), mark, self.overlaps.exact)


def names(elements: set[Element]) -> set[str]:
    return {name for name, _ in elements}


@each_cells(
    "before, after, expected",
    """\
a new Service port: what owns its virtual services is added first | - \
| A B at=ClusterIP,NodePort,VIP,ExternalIP external-local \
| added first: dropped hairpin_ips marks own own_marks virtual_ips; added late: served short_circuits
deleted: what owns them is removed last | A B at=ClusterIP,NodePort,VIP,ExternalIP external-local | - \
| removed late: dropped hairpin_ips marks served short_circuits virtual_ips; removed ownership: own own_marks
without endpoints it refuses before it stops serving | A |  | added first: refused; removed late: hairpin_ips served
overlapping ranges are replaced in one step | A at=VIP ranges=10.0.0.0/8 | A at=VIP ranges=10.1.0.0/16 \
| removed first: sources; added first: sources
""",
)
def test_the_order_of_the_steps(before, after, expected):
    """A Service port before and after a change ("-": none), and the sets of each step that gain or lose elements."""
    ledger, (old, new, key) = DesiredElements(), changed(before, after)
    if old:
        plan(ledger, old)
    steps = (plan(ledger, new) if new else plan(ledger, gone=(key,))).steps()
    found = [f"{step.replace('_', ' ')}: {' '.join(sorted(names(of)))}" for step, of in steps._asdict().items() if of]
    assert "; ".join(found) == expected
    assert owned_services(ledger.elements) == set(ledger.pools)
    assert bool(ledger.plans) == bool(ledger.elements) == bool(new)


def element(text: str) -> Element:
    """An element as shown(), after the name of its set."""
    name, *words = text.split()
    parts = []
    for word in words:
        known = Protocol[word] if word in Protocol.__members__ else int(word) if word.isdigit() else None
        parts.append(known if known is not None else parse_cidr(word, "") if "/" in word else parse_addr(word))
    return SetName(name), tuple(parts)


WEB, VIP = element("served 10.96.0.1 TCP 80"), element("served 192.0.2.1 TCP 80")


def test_a_refused_virtual_service_is_not_served_and_tried_again():
    """A virtual service that the kernel refuses is not recorded, and no connection is admitted to
    it; it is tried again with the next change of its Service port.
    """
    ledger, port = DesiredElements(), state(f"A B {ALL} local=A external-local")
    changes = plan(ledger, port)
    refused = VirtualService(Protocol.TCP, parse_addr("192.0.2.1"), 80)
    short = next(virtual for virtual in ledger.pools if virtual.fwmark)
    assert {VIP, WEB} <= changes.new_elements
    owners = ledger.record_refusals({refused: None, short: None}, changes)
    assert owners == {refused: port.key, short: port.key}
    assert {refused, short}.isdisjoint(ledger.pools)
    assert changes.old_elements == set(), "they were never programmed"
    assert VIP not in changes.new_elements | ledger.elements
    assert WEB in changes.new_elements & ledger.elements
    assert names(changes.steps().added_late) == {"served"}
    assert not {e for e in ledger.elements if e[0] is SetName.SHORT_CIRCUITS}
    again = plan(ledger, port)
    assert again.new_pools.keys() == {refused, short}
    assert names(again.new_elements) == {"served", "short_circuits"}
    assert not again.changed_pools


def test_elements_admitted_early_are_removed_if_the_service_is_refused():
    """As if the virtual service had been a kube-proxy's before."""
    ledger, port = DesiredElements(), state("A")
    plan(ledger, port)
    (virtual,) = ledger.pools
    changes = ledger.diff(frozenset(), frozenset(), dict(ledger.pools), True)
    assert changes.immediate == {WEB}
    ledger.record_refusals({virtual: None}, changes)
    assert changes.old_elements == {WEB}
    assert WEB not in changes.new_elements


ADDRESS = parse_addr("10.96.0.9")


@each_named_pair(
    "mention, stray",
    """\
no element mentions it: → yes
an old virtual address, removed with its element: virtual_ips 10.96.0.9 → no
only an element of `served`: served 10.96.0.9 TCP 80 → yes
only a hairpin element: hairpin_ips 10.96.0.9 10.96.0.9 → yes
""",
)
@pytest.mark.parametrize("sound", [True, False])
def test_unclaimed_addresses_are_removed(mention, stray, sound):
    """The element that mentions an address of the dummy device → whether it is removed as unclaimed."""
    mentions = {element(text) for text in filter(None, [mention])}
    ledger = DesiredElements()
    plan(ledger, state("A"))
    here = addresses(ledger) | {ADDRESS}
    changes = ledger.diff(ledger.elements | mentions, here, dict(ledger.pools), sound)
    assert changes.unclaimed_addresses == ({ADDRESS} if stray == "yes" and sound else set())
    assert changes.old_elements == (mentions if sound else set())
    assert not changes.new_elements


def test_a_refused_fwmark_removes_only_its_elements():
    port = state(f"A B {ALL} local=A external-local")
    whole = plan_service_port(port, ground(), MARK)
    virtual = fwmark_service(4, MARK)
    less = without_service(whole, virtual)
    assert whole.pools.keys() - less.pools.keys() == {virtual}
    assert names(whole.elements - less.elements) == {"own_marks", "marks"}
    assert less.elements < whole.elements
    assert {e[0] for e in less.elements}.isdisjoint({SetName.FWMARKS, SetName.OWN_FWMARKS})
    assert without_service(less, virtual) == less


@each_cells(
    "new_text, old_text, first",
    """\
another mark of the same frontend | short_circuits 10.96.0.10 TCP 80 1 | short_circuits 10.96.0.10 TCP 80 2 | yes
the mark of another port | short_circuits 10.96.0.10 TCP 80 1 | short_circuits 10.96.0.10 TCP 81 1 | no
another network of the same frontend | sources 10.0.0.0/8 10.96.0.10 TCP 80 \
| sources 10.1.0.0/16 10.96.0.10 TCP 80 | yes
a network of another address | sources 10.0.0.0/8 10.96.0.10 TCP 80 | sources 10.1.0.0/16 10.96.0.11 TCP 80 | no
another network of pods | local_networks 10.0.0.0/8 | local_networks 10.1.0.0/16 | yes
elements without a conflict | refused 10.96.0.10 TCP 80 | dropped 10.96.0.10 TCP 80 | no
""",
    first=bool,
)
def test_conflicting_elements_are_deleted_first(new_text, old_text, first):
    """A new element and an old one; whether the old one must be deleted first: it has the same key, or overlaps."""
    new, old = element(new_text), element(old_text)
    steps = Changes({new}, old_elements={old}, immediate={new}).steps()
    assert (steps.added_first, steps.added_late) == ({new}, set())
    assert (old in steps.removed_first, old in steps.removed_late) == (first, not first)


def test_a_frontend_that_moves_changes_its_virtual_service():
    ledger = DesiredElements()
    old, new = state("name=old A"), state("name=new B")
    plan(ledger, old)
    changes = plan(ledger, new, gone=(old.key,))
    assert (len(changes.changed_pools), changes.new_pools, changes.old_pools) == (1, {}, {})
    assert WEB in ledger.elements


@each_cells(
    "before, after, cut",
    """\
UDP stops serving | A B UDP | A UDP | 10.0.0.2
UDP leaves the set but still serves | A B UDP | A serving=A,B UDP |
UDP, the last backend stops | A UDP | UDP | 10.0.0.1
TCP stops serving | A B | A |
SCTP stops serving | A B SCTP | A SCTP |
""",
)
def test_which_backends_udp_flows_are_cut(before, after, cut):
    """A Service port before and after a change, and the backends whose UDP flows are cut."""
    ledger = DesiredElements()
    plan(ledger, state(before))
    changes = plan(ledger, state(after))
    assert {format_addr(end.address) for _, end in changes.udp_cuts} == set(cut.split())
    again = DesiredElements()  # after a restart, with the state read from the kernel
    old = {virtual: had for virtual, (had, _) in changes.changed_pools.items()}
    plan(again, state(after))
    assert again.diff(again.elements, addresses(again), old, True).udp_cuts == changes.udp_cuts


def addresses(ledger: DesiredElements) -> frozenset[Addr]:
    """The addresses that the dummy device should have."""
    return frozenset(parts[0] for name, parts in ledger.elements if name is SetName.VIRTUAL_IPS)


STATES = [
    state(f"A B {ALL}"),
    state("A"),
    state(f"{ALL} ranges=10.0.0.0/8"),
    state(f"A B {ALL} external-local ranges=10.1.0.0/16"),
    service("dns", "10.96.0.1:53", A, Protocol.UDP),
    service("dns", "10.96.0.1:53", BOTH, Protocol.UDP, affinity_timeout=5),
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
        batch = {port.key: (port, there) for port, there in one}
        for key, (port, there) in batch.items():
            last[key] = port
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
def test_existing_virtual_services_are_admitted_with_their_address(there):
    """For a kube-proxy's virtual services, or ours after the table was flushed: as soon as an
    address is in `virtual_ips`, connections that are not in `served` are refused.
    """
    ledger = DesiredElements()
    plan(ledger, state("A B"))
    pools = dict(ledger.pools) if there else {}
    steps = ledger.diff(frozenset(), frozenset(), pools, authoritative=True).steps()
    assert "virtual_ips" in names(steps.added_first)
    assert ("served" in names(steps.added_first), "served" in names(steps.added_late)) == (there, not there)


def test_a_non_authoritative_state_removes_no_services():
    ledger, known = DesiredElements(), DesiredElements()
    plan(known, state("A"), service("lost", "10.96.0.9:80", A))
    plan(ledger, state(""))
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


STEPS = {
    "port": PORT_A,
    "exact": service("b", EXACT, B),
    "empty": service("b", EXACT),
    "elsewhere": service("b", "10.96.0.2:30080 ExternalIP=192.0.2.2:30080", B),
    "udp": service("b", EXACT, B, Protocol.UDP),
    "both": service("a", f"10.96.0.1:80 NodePort=0.0.0.0:30080 LoadBalancer={NODE_IP}:30080", A, ranges="10.0.0.0/8"),
}


@each_cells(
    "steps, servers, outcome",
    """\
only a NodePort | port | 10.0.0.1 | served
the exact frontend wins | port exact | 10.0.0.2 | served
the exact frontend wins, created first | exact port | 10.0.0.2 | served
it wins without endpoints, as in mode bpf | port empty |  | refused
it gets endpoints later | port empty exact | 10.0.0.2 | served
deleted: the NodePort serves again | port exact -b | 10.0.0.1 | served
the NodePort is deleted | port exact -a | 10.0.0.2 | served
both are deleted | port exact -a -b |  |
both are deleted, the exact one first | port exact -b -a |  |
another address does not conflict | port elsewhere | 10.0.0.1 | served
another protocol does not conflict | port udp | 10.0.0.1 | served
one Service with both | both | 10.0.0.1 | served
""",
)
def test_a_node_port_gives_way_to_an_exact_frontend(steps, servers, outcome):
    """Changes in order ("-a": deleted), and the servers at the node's address and port in the end, and the outcome."""
    planner = Planner()
    for step in steps.split():
        if step.startswith("-"):
            planner.change({state(f"name={step[1:]}").key: None})
        else:
            planner.change({STEPS[step].key: STEPS[step]})
    at = VirtualService(Protocol.TCP, parse_addr(NODE_IP), 30080)
    pool = planner.ledger.pools.get(at, ServerPool(""))
    assert " ".join(format_addr(end.address) for end, _ in pool.servers) == servers
    outcomes = {SetName.SERVED, SetName.REFUSED, SetName.DROPPED}
    answers = {str(name) for name, parts in planner.ledger.elements if name in outcomes and shown(parts) == AT_NODE}
    assert answers == ({outcome} if outcome else set())


def test_node_elements_are_networks_and_addresses():
    networks = (Cidr(parse_addr("10.1.0.0"), 112), Cidr(parse_addr("fd00::"), 64))
    programmed = plan_node(DesiredState({}, (), (), networks), ground())
    assert sets(programmed, *SetName) == {
        "local_networks": {"10.1.0.0/16", "fd00::/64"},
        "node_ips": {NODE_IP, NODE_IP6},
    }
    assert NODE_KEY not in desired(*STATES).services
