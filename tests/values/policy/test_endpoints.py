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
from tests.values.policy.services import CONDITIONS, HTTP, end, ends, numbers, piece, service

ME = Node("me", zone="a")

CLUSTER = service("web ClusterIP")
INTERNAL_LOCAL = service("web ClusterIP internal-local")
EXTERNAL_LOCAL = service("web NodePort node-port=30080 external-local")
(PORT,), (OPEN,) = CLUSTER.ports, EXTERNAL_LOCAL.ports


def ask(service: Service, endpoints: str | tuple[Endpoint, ...], node: Node = ME) -> EndpointSelection:
    return select_endpoints((piece(endpoints),), service.ports[0], service, node, 4)


class Row(NamedTuple):
    """Endpoints on node me in zone a, in the words of ends(), and the numbers of the cluster set."""

    name: str
    ends: str
    cluster: tuple[int, ...]
    mode: TopologyMode = TopologyMode.NONE
    some: bool = True


NODE, ZONE = TopologyMode.SAME_NODE, TopologyMode.SAME_ZONE

CLUSTER_ROWS = [
    Row("no endpoints: nothing, and refuse", "", (), some=False),
    Row("all are ready: all serve, in order of address", "2 1", (1, 2)),
    Row("an endpoint that is not ready is left out", "1 2/down", (1,)),
    Row("nothing is ready or serving: nothing, and refuse", "1/down", (), some=False),
    Row("serving but not ready nor terminating: never", "1/unready", (), some=False),
    Row("a draining endpoint gets nothing while another is ready", "1 2/draining", (1,)),
    Row("no endpoint is ready: the draining ones serve", "1/draining 2/draining", (1, 2)),
    Row("the fallback leaves out endpoints that do not serve", "1/draining 2/down", (1,)),
    Row("terminating and no longer serving: never", "1/dead", (), some=False),
    Row("ready while terminating (publishNotReadyAddresses) is ready", "1/leaving 2", (1, 2)),
    Row("ready counts even if serving is false", "1/not-serving", (1,)),
    Row("all hinted, one for this node: that one", "1>me 2>you", (1,), NODE),
    Row("a hint may name several nodes", "1>they,me 2>you", (1,), NODE),
    Row("one ready endpoint without node hint: all", "1>me 2", (1, 2)),
    Row("node hints for other nodes only: all", "1>you 2>you", (1, 2)),
    Row("all hinted, one for this zone: that one", "1>a 2>b", (1,), ZONE),
    Row("a hint may name several zones", "1>b,a 2>b", (1,), ZONE),
    Row("one ready endpoint without zone hint: all", "1>a 2", (1, 2)),
    Row("zone hints for other zones only: all", "1>b 2>b", (1, 2)),
    Row("an empty list of hints is no hint", "1>a 2>", (1, 2)),
    Row("node hints win over zone hints", "1>me,b 2>you,a", (1,), NODE),
    Row("no node hint for us: zone hints decide", "1>you,a 2>you,b", (1,), ZONE),
    Row("one node hint is missing: zone hints decide", "1>me,b 2>a", (2,), ZONE),
    Row("an endpoint's own node and zone do not matter, only its hints", "1@me,a>b 2@you,b>a", (2,), ZONE),
    Row("an endpoint that is not ready disables nothing", "1>a 2>b 3/down 4/draining", (1,), ZONE),
    Row("a hinted endpoint that is not ready enables nothing", "1/down>a 2/draining>a 3>b", (3,)),
    Row("the fallback ignores hints", "1/draining>a 2/draining>b", (1, 2)),
    Row("the fallback is for all nodes or none: hints never lead to it", "1/draining>me 2>you", (2,)),
]


@pytest.mark.parametrize("row", CLUSTER_ROWS, ids=lambda row: row.name)
def test_the_cluster_set(row: Row):
    chosen = ask(CLUSTER, row.ends)
    assert numbers(chosen.cluster) == row.cluster
    assert chosen.mode is row.mode
    assert chosen.any_endpoints is row.some
    assert chosen.local == ()


@pytest.mark.parametrize("hint", ["a", ""])
def test_on_a_node_without_a_zone_hints_for_zones_are_ignored(hint: str):
    """Even hints for a zone called ''."""
    chosen = ask(CLUSTER, (end(1, zone_hints=(hint,)), *ends("2>b")), Node("me"))
    assert (numbers(chosen.cluster), chosen.mode) == ((1, 2), "")


class LocalRow(NamedTuple):
    """Endpoints, and the expected local set, cluster set of a NodePort, and `any_endpoints`."""

    name: str
    ends: str
    local: tuple[int, ...]
    cluster: tuple[int, ...]
    some: bool = True


LOCAL_ROWS = [
    LocalRow("no endpoints: refuse", "", (), (), some=False),
    LocalRow("local ones only", "1@me 2", (1,), (1, 2)),
    LocalRow("none here, some elsewhere: empty, and drop", "1@you", (), (1,)),
    LocalRow("none here, one draining elsewhere: drop", "1/draining", (), (1,)),
    LocalRow("only unready ones elsewhere: refuse", "1/down", (), (), some=False),
    LocalRow("local and not ready is left out", "1@me 2/down@me", (1,), (1,)),
    LocalRow("local and draining, another local is ready", "1@me 2/draining@me", (1,), (1,)),
    LocalRow("local falls back although the cluster does not", "1/draining@me 2", (1,), (2,)),
    LocalRow("the cluster falls back together with local", "1/draining@me 2/draining", (1,), (1, 2)),
    LocalRow("local never falls back to another node", "1/down@me 2", (), (2,)),
    LocalRow("local is independent of hints", "1@me>b 2>a", (1,), (2,)),
    LocalRow("the same name in other letters is another node", "1@Me", (), (1,)),
]


@pytest.mark.parametrize("row", LOCAL_ROWS, ids=lambda row: row.name)
def test_the_local_set(row: LocalRow):
    for web, cluster in ((EXTERNAL_LOCAL, row.cluster), (INTERNAL_LOCAL, ())):
        chosen = ask(web, row.ends)
        assert (numbers(chosen.local), numbers(chosen.cluster)) == (row.local, cluster)
        assert chosen.any_endpoints is row.some


def test_without_a_node_name_nothing_is_local_or_hinted_for_this_node():
    chosen = ask(EXTERNAL_LOCAL, (end(1, node="", node_hints=("",)),), Node(""))
    assert (chosen.local, chosen.mode, numbers(chosen.cluster)) == ((), "", (1,))


POLICY_ROWS = {
    # a Service, its sets, and whether its external policy Local has an effect
    "web ClusterIP": ("cluster", False),
    "web ClusterIP internal-local": ("local", False),
    "web NodePort node-port=30000 internal-local": ("cluster local", False),
    "web ClusterIP external=1.1.1.1 internal-local": ("cluster local", False),
    "web LoadBalancer vip=1.1.1.1 internal-local": ("cluster local", False),
    "web ClusterIP external=fd00::1 internal-local": ("local", False),
    "web ClusterIP external=0.0.0.0 internal-local": ("local", False),
    "web NodePort node-port=30000 external-local": ("cluster local", True),
    "web LoadBalancer vip=1.1.1.1 external-local": ("cluster local", True),
    "web LoadBalancer external-local": ("cluster", False),
    "web LoadBalancer vip=fd00::1 external-local": ("cluster", False),
    "web ClusterIP external-local": ("cluster", False),
    "web ClusterIP external=1.1.1.1 external-local": ("cluster local", True),
    "web ClusterIP vip=1.1.1.1 external-local": ("cluster", False),
    "web NodePort node-port=30000 internal-local external-local": ("cluster local", True),
}


@pytest.mark.parametrize("text", POLICY_ROWS)
def test_traffic_policies_decide_which_sets_exist(text: str):
    """With internal policy Local, what is reachable from outside still needs the cluster set: the short circuit."""
    needed, counts = POLICY_ROWS[text]
    web = service(text)
    chosen = ask(web, "1@me 2")
    assert numbers(chosen.cluster) == ((1, 2) if "cluster" in needed else ())
    assert numbers(chosen.local) == ((1,) if "local" in needed else ())
    assert numbers(chosen.serving) == (1, 2)
    assert is_external_local(web, web.ports[0], 4) is counts


def test_slices_of_the_other_family_are_ignored():
    six = EndpointSlice("ns", "web-6", "web", 6, (Endpoint(parse_addr("fd00::9")),), HTTP)
    slices = (piece("2"), piece("1", name="web-2"), six)
    chosen = select_endpoints(slices, PORT, CLUSTER, ME, 4)
    assert numbers(chosen.cluster) == (1, 2)
    assert [line.slice_name for line in chosen.explain()] == ["web-1", "web-2"]
    assert [str(b) for b in select_endpoints(slices, PORT, CLUSTER, ME, 6).cluster] == ["[fd00::9]:8080"]


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
    chosen = select_endpoints((piece("1", ports=ports),), PORT, CLUSTER, ME, 4)
    assert (chosen.cluster, chosen.serving, chosen.any_endpoints) == ((), (), False)
    (line,) = chosen.explain()
    assert (line.reason, line.port, line.cluster) == (EndpointReason.NO_PORT, 0, False)
    assert "'http' (TCP)" in line.text


def test_empty_port_names_match_each_other():
    port = ServicePort("", Protocol.TCP, 80)
    slices = (piece("1", ports=(SlicePort("", Protocol.TCP, 8080),)),)
    assert numbers(select_endpoints(slices, port, CLUSTER, ME, 4).cluster) == (1,)


def test_one_address_with_two_ports_is_two_backends():
    slices = (piece("1"), piece("1", ports=(SlicePort("http", Protocol.TCP, 80),), name="b"))
    assert [b.port for b in select_endpoints(slices, PORT, CLUSTER, ME, 4).cluster] == [80, 8080]


TWO_ENTRIES = {
    # two entries of one address in two slices: the entry that is used
    "none terminates: the last one": ("1@you", "1@me>me", "1@me>me"),
    "none terminates: the last one, without its hint": ("1@me>me", "1@you", "1@you"),
    "a Pod got the address of a terminating one (kubernetes #135593)": ("1@you", "1/draining@me", "1@you"),
    "the same in the other order": ("1/draining@me", "1@you", "1@you"),
    "the one that does not terminate, though down": ("1/down", "1/draining@me", "1/down"),
    "all terminate: the first one": ("1/draining@me", "1/dead", "1/draining@me"),
    "all terminate: the first one, though down": ("1/dead", "1/draining@me", "1/dead"),
}


@pytest.mark.parametrize("name", TWO_ENTRIES)
@pytest.mark.parametrize("service", [CLUSTER, EXTERNAL_LOCAL], ids=["Cluster", "Local"])
def test_one_of_two_entries_of_an_address_is_used(name: str, service: Service):
    first, second, wins = TWO_ENTRIES[name]
    one, two = piece(first, name="a"), piece(second, name="b")
    alone = sets(ask(service, wins))
    for slices in ((one, two), (two, one), (piece(f"{first} {second}"),)):
        assert sets(select_endpoints(slices, service.ports[0], service, ME, 4)) == alone


def sets(chosen: EndpointSelection) -> tuple[object, ...]:
    names = ("cluster", "local", "serving", "any_endpoints", "mode")
    return tuple(getattr(chosen, name) for name in names)


def test_local_endpoints_include_those_that_are_not_ready():
    six = EndpointSlice("ns", "web-6", "web", 6, ends("6@me"), HTTP)
    slices = (piece("1@me 2 3/down@me 4@other"), piece("1@me 5@me", name="web-2"), six)
    assert [a[-1] for a in local_endpoint_addresses(slices, ME, 4)] == [1, 3, 5]
    assert local_endpoint_addresses(slices, Node(""), 4) == ()


def test_serving_set_ignores_policies_and_hints():
    endpoints = "1>a 2>b 3/draining 4/down 5/unready"
    chosen = ask(CLUSTER, endpoints)
    assert numbers(chosen.cluster) == (1,)
    assert numbers(chosen.serving) == (1, 2, 3, 5)
    assert numbers(ask(INTERNAL_LOCAL, endpoints).serving) == (1, 2, 3, 5)


def test_equal_sets_share_one_tuple():
    assert (plain := ask(CLUSTER, "1 2")).serving is plain.cluster
    assert (local := ask(EXTERNAL_LOCAL, "1@me 2")).serving is local.cluster


REASONS = {
    # a Service, endpoints, and the reason that `kbpf inspect` shows for the first
    "ready": (CLUSTER, "1", EndpointReason.READY),
    "hinted for this node": (CLUSTER, "1>me", EndpointReason.SAME_NODE),
    "hinted for this zone": (CLUSTER, "1>a", EndpointReason.SAME_ZONE),
    "hinted for others": (CLUSTER, "1>b 2>a", EndpointReason.HINTED_ELSEWHERE),
    "not ready": (CLUSTER, "1/down 2", EndpointReason.NOT_READY),
    "serving is not enough": (CLUSTER, "1/unready", EndpointReason.NOT_READY),
    "draining, others are ready": (CLUSTER, "1/draining 2", EndpointReason.DRAINING),
    "draining, none is ready": (CLUSTER, "1/draining", EndpointReason.FALLBACK),
    "draining here, none here is ready": (EXTERNAL_LOCAL, "1/draining@me 2", EndpointReason.FALLBACK),
    "on another node, internal policy Local": (INTERNAL_LOCAL, "1@you", EndpointReason.NOT_LOCAL),
    "draining on another node, internal policy Local": (INTERNAL_LOCAL, "1/draining", EndpointReason.NOT_LOCAL),
    "ready here, internal policy Local": (INTERNAL_LOCAL, "1@me", EndpointReason.LOCAL_ONLY),
    "ready here, hints lead elsewhere, external Local": (EXTERNAL_LOCAL, "1@me>b 2>a", EndpointReason.LOCAL_ONLY),
    "another copy counts": (EXTERNAL_LOCAL, "1 1@me", EndpointReason.DUPLICATE),
}


@pytest.mark.parametrize("name", REASONS)
def test_every_endpoint_has_a_reason(name: str):
    service, text, reason = REASONS[name]
    lines = ask(service, text).explain()
    assert tuple(line.endpoint for line in lines) == ends(text)
    assert lines[0].reason is reason
    assert lines[0].text
    assert (lines[0].slice_name, lines[0].port) == ("web-1", 8080)


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ("down", "not ready, not serving"),
        ("unready", "not ready, serving"),
        ("dead", "not ready, not serving, terminating"),
    ],
)
def test_the_reason_of_an_endpoint_that_is_not_ready_has_its_conditions(condition: str, text: str):
    line, _ = ask(CLUSTER, f"1/{condition} 2").explain()
    assert line.text == text


HINTS = ["", "", ">me", ">you", ">me,you", ">a", ">b", ">a,b", ">me,a", ">you,a", ">me,b"]
WORDS = st.builds(
    "{}{}{}{}".format,
    st.integers(1, 4),
    st.sampled_from(["", "", "", *(f"/{condition}" for condition in CONDITIONS if condition)]),
    st.sampled_from(["", "@me", "@you"]),
    st.sampled_from(HINTS),
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
        st.lists(WORDS, max_size=5).map(" ".join).map(ends),
        PORTS.map(tuple),
    ),
    max_size=3,
    unique_by=lambda piece: piece.name,
)
SERVICES = st.builds(
    "web {} {} {} {} {} {}".format,
    st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]),
    st.sampled_from(["", "node-port=30080"]),
    st.sampled_from(["", "external=1.1.1.1", "external=fd00::1"]),
    st.sampled_from(["", "vip=1.1.1.1"]),
    st.sampled_from(["", "internal-local"]),
    st.sampled_from(["", "external-local"]),
).map(service)
NODES = st.builds(Node, st.sampled_from(["me", "me", ""]), zone=st.sampled_from(["a", "b", ""]))


@settings(max_examples=400)
@given(SLICES, SERVICES, NODES)
def test_random_endpoints_are_selected_as_in_the_naive_model(slices, web, node):
    port = web.ports[0]
    expected = oracle.choice(slices, port, web, node, 4)
    for order in itertools.permutations(slices):
        chosen = select_endpoints(order, port, web, node, 4)
        for name in ("cluster", "local", "serving"):
            backends = getattr(chosen, name)
            assert list(backends) == sorted(set(backends))
            assert {(oracle.text(b.address), b.port) for b in backends} == getattr(expected, name)
        assert (chosen.any_endpoints, chosen.mode) == (expected.any_endpoints, expected.mode)


@settings(max_examples=150)
@given(SLICES, SERVICES, NODES)
def test_the_reasons_agree_with_the_sets(slices, web, node):
    chosen = select_endpoints(slices, web.ports[0], web, node, 4)
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
