# SPDX-License-Identifier: Apache-2.0
"""Which endpoints serve: one row per rule of kube-proxy (topology.go), then random input compared
with the naive model.
"""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.model.address import parse_addr
from kbpf.model.desired import Backend
from kbpf.model.objects import Endpoint, EndpointSlice, Node, Protocol, Service, ServicePort, SlicePort
from kbpf.policy.endpoints import (
    EndpointReason,
    EndpointSelection,
    TopologyMode,
    is_external_local,
    local_endpoint_addresses,
    select_endpoints,
)
from tests.support import oracle
from tests.values.policy.services import HTTP, end, numbers, piece

ME = Node("me", zone="a")
PORT = ServicePort("http", Protocol.TCP, 80)
OPEN = ServicePort("http", Protocol.TCP, 80, node_port=30080)

CLUSTER = Service("ns", "web", "ClusterIP", (parse_addr("10.96.0.1"),), (PORT,))
INTERNAL_LOCAL = Service("ns", "web", "ClusterIP", (parse_addr("10.96.0.1"),), (PORT,), internal_local=True)
EXTERNAL_LOCAL = Service("ns", "web", "NodePort", (parse_addr("10.96.0.1"),), (OPEN,), external_local=True)


def here(number: int, **said) -> Endpoint:
    return end(number, node="me", **said)


def draining(number: int, **said) -> Endpoint:
    return end(number, ready=False, serving=True, terminating=True, **said)


def down(number: int, **said) -> Endpoint:
    return end(number, ready=False, serving=False, **said)


def ask(service: Service, *ends: Endpoint, node: Node = ME) -> EndpointSelection:
    return select_endpoints((piece(*ends),), service.ports[0], service, node, 4)


class Row(NamedTuple):
    """Endpoints, and the expected cluster set as the last byte of each address."""

    name: str
    ends: tuple[Endpoint, ...]
    cluster: tuple[int, ...]
    mode: TopologyMode = TopologyMode.NONE
    node: Node = ME
    some: bool = True


NODE, ZONE = TopologyMode.SAME_NODE, TopologyMode.SAME_ZONE
MY_NODE, OTHER_NODE = {"node_hints": ("me",)}, {"node_hints": ("you",)}
MY_ZONE, OTHER_ZONE = {"zone_hints": ("a",)}, {"zone_hints": ("b",)}

CLUSTER_ROWS = [
    Row("no endpoints: nothing, and refuse", (), (), some=False),
    Row("all are ready: all serve, in order of address", (end(2), end(1)), (1, 2)),
    Row("an endpoint that is not ready is left out", (end(1), down(2)), (1,)),
    Row("nothing is ready or serving: nothing, and refuse", (down(1),), (), some=False),
    Row("serving but not ready nor terminating: never", (end(1, ready=False),), (), some=False),
    Row("a draining endpoint gets nothing while another is ready", (end(1), draining(2)), (1,)),
    Row("no endpoint is ready: the draining ones serve", (draining(1), draining(2)), (1, 2)),
    Row("the fallback leaves out endpoints that do not serve", (draining(1), down(2)), (1,)),
    Row("terminating and no longer serving: never", (down(1, terminating=True),), (), some=False),
    Row("ready while terminating (publishNotReadyAddresses) is ready", (end(1, terminating=True), end(2)), (1, 2)),
    Row("ready counts even if serving is false", (end(1, serving=False),), (1,)),
    Row("all hinted, one for this node: that one", (end(1, **MY_NODE), end(2, **OTHER_NODE)), (1,), NODE),
    Row("a hint may name several nodes", (end(1, node_hints=("x", "me")), end(2, **OTHER_NODE)), (1,), NODE),
    Row("one ready endpoint without node hint: all", (end(1, **MY_NODE), end(2)), (1, 2)),
    Row("node hints for other nodes only: all", (end(1, **OTHER_NODE), end(2, **OTHER_NODE)), (1, 2)),
    Row("all hinted, one for this zone: that one", (end(1, **MY_ZONE), end(2, **OTHER_ZONE)), (1,), ZONE),
    Row("a hint may name several zones", (end(1, zone_hints=("b", "a")), end(2, **OTHER_ZONE)), (1,), ZONE),
    Row("one ready endpoint without zone hint: all", (end(1, **MY_ZONE), end(2)), (1, 2)),
    Row("zone hints for other zones only: all", (end(1, **OTHER_ZONE), end(2, **OTHER_ZONE)), (1, 2)),
    Row("an empty list of hints is no hint", (end(1, **MY_ZONE), end(2, zone_hints=())), (1, 2)),
    Row(
        "node hints win over zone hints",
        (end(1, node_hints=("me",), zone_hints=("b",)), end(2, node_hints=("you",), zone_hints=("a",))),
        (1,),
        NODE,
    ),
    Row(
        "no node hint for us: zone hints decide",
        (end(1, node_hints=("you",), zone_hints=("a",)), end(2, node_hints=("you",), zone_hints=("b",))),
        (1,),
        ZONE,
    ),
    Row(
        "one node hint is missing: zone hints decide",
        (end(1, node_hints=("me",), zone_hints=("b",)), end(2, zone_hints=("a",))),
        (2,),
        ZONE,
    ),
    Row(
        "our Node has no zone: zone hints are ignored",
        (end(1, **MY_ZONE), end(2, **OTHER_ZONE)),
        (1, 2),
        node=Node("me"),
    ),
    Row(
        "our Node has no zone, not even one called ''",
        (end(1, zone_hints=("",)), end(2, **OTHER_ZONE)),
        (1, 2),
        node=Node("me"),
    ),
    Row(
        "an endpoint's own node and zone do not matter, only its hints",
        (here(1, zone="a", **OTHER_ZONE), end(2, zone="b", **MY_ZONE)),
        (2,),
        ZONE,
    ),
    Row(
        "an endpoint that is not ready disables nothing",
        (end(1, **MY_ZONE), end(2, **OTHER_ZONE), down(3), draining(4)),
        (1,),
        ZONE,
    ),
    Row(
        "a hinted endpoint that is not ready enables nothing",
        (down(1, **MY_ZONE), draining(2, **MY_ZONE), end(3, **OTHER_ZONE)),
        (3,),
    ),
    Row("the fallback ignores hints", (draining(1, **MY_ZONE), draining(2, **OTHER_ZONE)), (1, 2)),
    Row(
        "the fallback is for all nodes or none: hints never lead to it",
        (draining(1, **MY_NODE), end(2, **OTHER_NODE)),
        (2,),
    ),
]


@pytest.mark.parametrize("row", CLUSTER_ROWS, ids=lambda row: row.name)
def test_the_cluster_set(row: Row):
    chosen = ask(CLUSTER, *row.ends, node=row.node)
    assert numbers(chosen.cluster) == row.cluster
    assert chosen.mode is row.mode
    assert chosen.any_endpoints is row.some
    assert chosen.local == ()


class LocalRow(NamedTuple):
    """Endpoints, and the expected local set, cluster set of a NodePort, and `any_endpoints`."""

    name: str
    ends: tuple[Endpoint, ...]
    local: tuple[int, ...]
    cluster: tuple[int, ...]
    some: bool = True


LOCAL_ROWS = [
    LocalRow("no endpoints: refuse", (), (), (), some=False),
    LocalRow("local ones only", (here(1), end(2)), (1,), (1, 2)),
    LocalRow("none here, some elsewhere: empty, and drop", (end(1, node="you"),), (), (1,)),
    LocalRow("none here, one draining elsewhere: drop", (draining(1),), (), (1,)),
    LocalRow("only unready ones elsewhere: refuse", (down(1),), (), (), some=False),
    LocalRow("local and not ready is left out", (here(1), down(2, node="me")), (1,), (1,)),
    LocalRow("local and draining, another local is ready", (here(1), draining(2, node="me")), (1,), (1,)),
    LocalRow("local falls back although the cluster does not", (draining(1, node="me"), end(2)), (1,), (2,)),
    LocalRow("the cluster falls back together with local", (draining(1, node="me"), draining(2)), (1,), (1, 2)),
    LocalRow("local never falls back to another node", (down(1, node="me"), end(2)), (), (2,)),
    LocalRow("local is independent of hints", (here(1, **OTHER_ZONE), end(2, **MY_ZONE)), (1,), (2,)),
    LocalRow("the same name in other letters is another node", (end(1, node="Me"),), (), (1,)),
]


@pytest.mark.parametrize("row", LOCAL_ROWS, ids=lambda row: row.name)
def test_the_local_set(row: LocalRow):
    for service, cluster in ((EXTERNAL_LOCAL, row.cluster), (INTERNAL_LOCAL, ())):
        chosen = ask(service, *row.ends)
        assert numbers(chosen.local) == row.local
        assert numbers(chosen.cluster) == cluster
        assert chosen.any_endpoints is row.some


def test_without_a_node_name_nothing_is_local_or_hinted_for_this_node():
    chosen = ask(EXTERNAL_LOCAL, end(1, node="", node_hints=("",)), node=Node(""))
    assert (chosen.local, chosen.mode, numbers(chosen.cluster)) == ((), "", (1,))


class PolicyRow(NamedTuple):
    """A Service's type, addresses and policies, and the sets it needs: "cluster local"."""

    name: str
    type: str
    sets: str
    node_port: int = 0
    external: tuple[str, ...] = ()
    vips: tuple[str, ...] = ()
    internal_local: bool = False
    external_local: bool = False
    counts: bool = False


POLICY_ROWS = [
    PolicyRow("plain", "ClusterIP", "cluster"),
    PolicyRow("internal Local, not reachable from outside: no cluster set", "ClusterIP", "local", internal_local=True),
    PolicyRow(
        "internal Local with a NodePort: the short circuit needs the cluster set",
        "NodePort",
        "cluster local",
        node_port=30000,
        internal_local=True,
    ),
    PolicyRow(
        "internal Local with an external IP", "ClusterIP", "cluster local", external=("1.1.1.1",), internal_local=True
    ),
    PolicyRow("internal Local with an LB VIP", "LoadBalancer", "cluster local", vips=("1.1.1.1",), internal_local=True),
    PolicyRow(
        "internal Local with an external IP of the other family only",
        "ClusterIP",
        "local",
        external=("fd00::1",),
        internal_local=True,
    ),
    PolicyRow(
        "internal Local with an unspecified external IP: that is not an address",
        "ClusterIP",
        "local",
        external=("0.0.0.0",),
        internal_local=True,
    ),
    PolicyRow(
        "external Local on a NodePort", "NodePort", "cluster local", node_port=30000, external_local=True, counts=True
    ),
    PolicyRow(
        "external Local on an LB VIP without node port",
        "LoadBalancer",
        "cluster local",
        vips=("1.1.1.1",),
        external_local=True,
        counts=True,
    ),
    PolicyRow(
        "external Local on a load balancer without an address yet", "LoadBalancer", "cluster", external_local=True
    ),
    PolicyRow(
        "external Local on a load balancer with a VIP of the other family",
        "LoadBalancer",
        "cluster",
        vips=("fd00::1",),
        external_local=True,
    ),
    PolicyRow("external Local on a ClusterIP has no effect", "ClusterIP", "cluster", external_local=True),
    PolicyRow(
        "external Local on a ClusterIP with external IPs has an effect",
        "ClusterIP",
        "cluster local",
        external=("1.1.1.1",),
        external_local=True,
        counts=True,
    ),
    PolicyRow(
        "external Local on a ClusterIP with a VIP in its status has no effect",
        "ClusterIP",
        "cluster",
        vips=("1.1.1.1",),
        external_local=True,
    ),
    PolicyRow(
        "both Local on a NodePort",
        "NodePort",
        "cluster local",
        node_port=30000,
        internal_local=True,
        external_local=True,
        counts=True,
    ),
]


@pytest.mark.parametrize("row", POLICY_ROWS, ids=lambda row: row.name)
def test_traffic_policies_decide_which_sets_exist(row: PolicyRow):
    port = ServicePort("http", Protocol.TCP, 80, row.node_port)
    service = Service(
        "ns",
        "web",
        row.type,
        (parse_addr("10.96.0.1"),),
        (port,),
        external_ips=tuple(map(parse_addr, row.external)),
        lb_vips=tuple(map(parse_addr, row.vips)),
        internal_local=row.internal_local,
        external_local=row.external_local,
    )
    chosen = ask(service, here(1), end(2))
    sets = {"cluster": (1, 2) if "cluster" in row.sets else ()}
    sets["local"] = (1,) if "local" in row.sets else ()
    assert {"cluster": numbers(chosen.cluster), "local": numbers(chosen.local)} == sets
    assert numbers(chosen.serving) == (1, 2)
    assert is_external_local(service, port, 4) is row.counts


def test_slices_of_the_other_family_are_ignored():
    six = EndpointSlice("ns", "web-6", "web", 6, (Endpoint(parse_addr("fd00::9")),), HTTP)
    slices = (piece(end(2)), piece(end(1), name="web-2"), six)
    assert numbers(select_endpoints(slices, PORT, CLUSTER, ME, 4).cluster) == (1, 2)
    assert [str(b) for b in select_endpoints(slices, PORT, CLUSTER, ME, 6).cluster] == ["[fd00::9]:8080"]


def test_each_slice_maps_a_port_name_to_its_own_number():
    slices = (piece(end(1)), piece(end(2), ports=(SlicePort("http", Protocol.TCP, 9090),), name="b"))
    chosen = select_endpoints(slices, PORT, CLUSTER, ME, 4)
    assert [str(b) for b in chosen.cluster] == ["10.1.0.1:8080", "10.1.0.2:9090"]


@pytest.mark.parametrize(
    "ports",
    [
        (),
        (SlicePort("web", Protocol.TCP, 8080),),
        (SlicePort("http", Protocol.UDP, 8080),),
        (SlicePort("", Protocol.TCP, 8080),),
        (SlicePort("http", Protocol.TCP, 0),),
    ],
    ids=["no ports", "other name", "other protocol", "no name", "number 0"],
)
def test_a_slice_without_the_port_has_no_endpoints_for_it(ports):
    chosen = select_endpoints((piece(end(1), ports=ports),), PORT, CLUSTER, ME, 4)
    assert (chosen.cluster, chosen.serving, chosen.any_endpoints) == ((), (), False)


def test_empty_port_names_match_each_other():
    port = ServicePort("", Protocol.TCP, 80)
    ports = (SlicePort("", Protocol.TCP, 8080),)
    assert numbers(select_endpoints((piece(end(1), ports=ports),), port, CLUSTER, ME, 4).cluster) == (1,)


def test_one_address_with_two_ports_is_two_backends():
    slices = (piece(end(1)), piece(end(1), ports=(SlicePort("http", Protocol.TCP, 80),), name="b"))
    assert [b.port for b in select_endpoints(slices, PORT, CLUSTER, ME, 4).cluster] == [80, 8080]


RUNS, RUNS_TOO = end(1, node="you"), here(1, **MY_NODE)
ENDS, ENDS_TOO = draining(1, node="me"), down(1, terminating=True)


@pytest.mark.parametrize(
    ("first", "second", "wins"),
    [
        pytest.param(RUNS, RUNS_TOO, RUNS_TOO, id="none terminates: the last one"),
        pytest.param(RUNS_TOO, RUNS, RUNS, id="none terminates: the last one, without its hint"),
        pytest.param(RUNS, ENDS, RUNS, id="a Pod got the address of a terminating one (kubernetes #135593)"),
        pytest.param(ENDS, RUNS, RUNS, id="the same in the other order"),
        pytest.param(down(1), ENDS, down(1), id="the one that does not terminate, though down"),
        pytest.param(ENDS, ENDS_TOO, ENDS, id="all terminate: the first one"),
        pytest.param(ENDS_TOO, ENDS, ENDS_TOO, id="all terminate: the first one, though down"),
    ],
)
@pytest.mark.parametrize("service", [CLUSTER, EXTERNAL_LOCAL], ids=["Cluster", "Local"])
def test_one_of_two_entries_of_an_address_is_used(first: Endpoint, second: Endpoint, wins: Endpoint, service: Service):
    port = service.ports[0]
    one, two = piece(first, name="a"), piece(second, name="b")
    alone = sets(select_endpoints((piece(wins),), port, service, ME, 4))
    for slices in ((one, two), (two, one), (piece(first, second),)):
        assert sets(select_endpoints(slices, port, service, ME, 4)) == alone


def sets(chosen: EndpointSelection) -> tuple[object, ...]:
    names = ("cluster", "local", "serving", "any_endpoints", "mode")
    return tuple(getattr(chosen, name) for name in names)


def test_endpoint_in_two_slices_is_one_backend():
    slices = (piece(end(1), end(2)), piece(end(2), end(3), name="web-2"))
    assert numbers(select_endpoints(slices, PORT, CLUSTER, ME, 4).cluster) == (1, 2, 3)


def test_local_endpoints_include_those_that_are_not_ready():
    slices = (
        piece(here(1), end(2), down(3, node="me"), end(4, node="other")),
        piece(here(1), here(5), name="web-2"),
        piece(here(6), name="web-6", family=6),
    )
    assert [a[-1] for a in local_endpoint_addresses(slices, ME, 4)] == [1, 3, 5]
    assert local_endpoint_addresses(slices, Node(""), 4) == ()


def test_serving_set_ignores_policies_and_hints():
    ends = (end(1, **MY_ZONE), end(2, **OTHER_ZONE), draining(3), down(4), end(5, ready=False))
    chosen = ask(CLUSTER, *ends)
    assert numbers(chosen.cluster) == (1,)
    assert numbers(chosen.serving) == (1, 2, 3, 5)
    assert numbers(ask(INTERNAL_LOCAL, *ends).serving) == (1, 2, 3, 5)


def test_equal_sets_share_one_tuple():
    assert (plain := ask(CLUSTER, end(1), end(2))).serving is plain.cluster
    assert (local := ask(EXTERNAL_LOCAL, here(1), end(2))).serving is local.cluster


class ReasonRow(NamedTuple):
    """An endpoint among others, and the reason that `kbpf inspect` shows for it."""

    name: str
    service: Service
    end: Endpoint
    reason: EndpointReason
    others: tuple[Endpoint, ...] = ()


REASON_ROWS = [
    ReasonRow("ready", CLUSTER, end(1), EndpointReason.READY),
    ReasonRow("hinted for this node", CLUSTER, end(1, **MY_NODE), EndpointReason.SAME_NODE),
    ReasonRow("hinted for this zone", CLUSTER, end(1, **MY_ZONE), EndpointReason.SAME_ZONE),
    ReasonRow(
        "hinted for others", CLUSTER, end(1, **OTHER_ZONE), EndpointReason.HINTED_ELSEWHERE, (end(2, **MY_ZONE),)
    ),
    ReasonRow("not ready", CLUSTER, down(1), EndpointReason.NOT_READY, (end(2),)),
    ReasonRow("serving is not enough", CLUSTER, end(1, ready=False), EndpointReason.NOT_READY),
    ReasonRow("draining, others are ready", CLUSTER, draining(1), EndpointReason.DRAINING, (end(2),)),
    ReasonRow("draining, none is ready", CLUSTER, draining(1), EndpointReason.FALLBACK),
    ReasonRow(
        "draining here, none here is ready", EXTERNAL_LOCAL, draining(1, node="me"), EndpointReason.FALLBACK, (end(2),)
    ),
    ReasonRow("on another node, internal policy Local", INTERNAL_LOCAL, end(1, node="you"), EndpointReason.NOT_LOCAL),
    ReasonRow("draining on another node, internal policy Local", INTERNAL_LOCAL, draining(1), EndpointReason.NOT_LOCAL),
    ReasonRow("ready here, internal policy Local", INTERNAL_LOCAL, here(1), EndpointReason.LOCAL_ONLY),
    ReasonRow(
        "ready here, hints lead elsewhere, external policy Local",
        EXTERNAL_LOCAL,
        here(1, **OTHER_ZONE),
        EndpointReason.LOCAL_ONLY,
        (end(2, **MY_ZONE),),
    ),
    ReasonRow("another copy counts", EXTERNAL_LOCAL, end(1), EndpointReason.DUPLICATE, (here(1),)),
]


@pytest.mark.parametrize("row", REASON_ROWS, ids=lambda row: row.name)
def test_every_endpoint_has_a_reason(row: ReasonRow):
    lines = ask(row.service, row.end, *row.others).explain()
    assert [line.endpoint for line in lines] == [row.end, *row.others]
    assert lines[0].reason is row.reason
    assert lines[0].text
    assert (lines[0].slice_name, lines[0].port) == ("web-1", 8080)


@pytest.mark.parametrize(
    ("conditions", "text"),
    [
        ({"serving": False}, "not ready, not serving"),
        ({"serving": True}, "not ready, serving"),
        ({"serving": False, "terminating": True}, "not ready, not serving, terminating"),
    ],
)
def test_the_reason_of_an_endpoint_that_is_not_ready_has_its_conditions(conditions: dict[str, bool], text: str):
    line, _ = ask(CLUSTER, end(1, ready=False, **conditions), end(2)).explain()
    assert line.text == text


def test_an_endpoint_in_a_slice_without_the_port_has_a_reason():
    (line,) = select_endpoints((piece(end(1), ports=()),), PORT, CLUSTER, ME, 4).explain()
    assert (line.reason, line.port, line.cluster) == (EndpointReason.NO_PORT, 0, False)
    assert "'http' (TCP)" in line.text


def test_an_endpoint_of_the_other_family_has_no_line():
    slices = (piece(end(1)), piece(Endpoint(parse_addr("fd00::1")), name="web-6", family=6))
    (line,) = select_endpoints(slices, PORT, CLUSTER, ME, 4).explain()
    assert line.slice_name == "web-1"


FLAG = st.booleans()
HINTS = st.sampled_from([None, None, ("me",), ("you",), ("me", "you")])
ZONES = st.sampled_from([None, None, ("a",), ("b",), ("a", "b")])
ENDS = st.builds(
    Endpoint,
    address=st.sampled_from([end(n).address for n in (1, 2, 3, 4)]),
    ready=FLAG,
    serving=FLAG,
    terminating=FLAG,
    node=st.sampled_from(["me", "you", ""]),
    zone_hints=ZONES,
    node_hints=HINTS,
)
PORTS = st.lists(
    st.sampled_from([*HTTP, SlicePort("http", Protocol.TCP, 9090), SlicePort("x", Protocol.TCP, 1)]), max_size=2
)
SLICES = st.lists(
    st.builds(
        EndpointSlice,
        st.just("ns"),
        st.sampled_from(["s1", "s2", "s3"]),
        st.just("web"),
        st.sampled_from([4, 4, 4, 6]),
        st.lists(ENDS, max_size=5).map(tuple),
        PORTS.map(tuple),
    ),
    max_size=3,
    unique_by=lambda piece: piece.name,
)
SERVICES = st.builds(
    Service,
    st.just("ns"),
    st.just("web"),
    st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]),
    st.just((parse_addr("10.96.0.1"),)),
    st.sampled_from([(PORT,), (OPEN,)]),
    external_ips=st.sampled_from([(), (parse_addr("1.1.1.1"),), (parse_addr("fd00::1"),)]),
    lb_vips=st.sampled_from([(), (parse_addr("1.1.1.1"),)]),
    external_local=FLAG,
    internal_local=FLAG,
)
NODES = st.builds(Node, st.sampled_from(["me", "me", ""]), zone=st.sampled_from(["a", "b", ""]))


@settings(max_examples=400)
@given(SLICES, SERVICES, NODES)
def test_random_endpoints_are_selected_as_in_the_naive_model(slices, service, node):
    port = service.ports[0]
    expected = oracle.choice(slices, port, service, node, 4)
    for order in itertools.permutations(slices):
        chosen = select_endpoints(order, port, service, node, 4)
        for name in ("cluster", "local", "serving"):
            backends = getattr(chosen, name)
            assert list(backends) == sorted(set(backends))
            assert {(oracle.text(b.address), b.port) for b in backends} == getattr(expected, name)
        assert (chosen.any_endpoints, chosen.mode) == (expected.any_endpoints, expected.mode)


@settings(max_examples=150)
@given(SLICES, SERVICES, NODES)
def test_the_reasons_agree_with_the_sets(slices, service, node):
    chosen = select_endpoints(slices, service.ports[0], service, node, 4)
    lines = chosen.explain()
    serves = {
        EndpointReason.READY,
        EndpointReason.SAME_NODE,
        EndpointReason.SAME_ZONE,
        EndpointReason.LOCAL_ONLY,
        EndpointReason.FALLBACK,
    }
    for line in lines:
        assert (line.reason in serves) is (line.cluster or line.local)
    for name in ("cluster", "local"):
        said = {Backend(x.endpoint.address, x.port, Protocol.TCP) for x in lines if getattr(x, name)}
        assert said == set(getattr(chosen, name))
