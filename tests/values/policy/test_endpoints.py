# SPDX-License-Identifier: Apache-2.0
"""Which endpoints serve: one row per rule of kube-proxy (topology.go), and what is true for any."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.model.address import parse_addr
from kbpf.model.objects import Endpoint, EndpointSlice, Node, Protocol, Service, SlicePort
from kbpf.policy.endpoints import (
    EndpointReason,
    EndpointSelection,
    TopologyMode,
    is_external_local,
    local_endpoint_addresses,
    select_endpoints,
)
from tests.support.table import each_cells, each_line
from tests.values.policy.services import CONDITIONS, HTTP, ends, numbers, piece, service

ME = Node("me", zone="a")

CLUSTER = service("web ClusterIP")
INTERNAL_LOCAL = service("web ClusterIP internal-local")
EXTERNAL_LOCAL = service("web NodePort node-port=30080 external-local")
(PORT,), (OPEN,) = CLUSTER.ports, EXTERNAL_LOCAL.ports


def ask(service: Service, endpoints: str | tuple[Endpoint, ...], node: Node = ME) -> EndpointSelection:
    return select_endpoints((piece(endpoints),), service.ports[0], service, node, 4)


@each_cells(
    "ends, cluster, mode, some",
    """
no endpoints: nothing, and refuse                             |                           |     | NONE      | no
all are ready: all serve, in order of address                 | 2 1                       | 1 2
an endpoint that is not ready is left out                     | 1 2/down                  | 1
nothing is ready or serving: nothing, and refuse              | 1/down                    |     | NONE      | no
serving but not ready nor terminating: never                  | 1/unready                 |     | NONE      | no
a draining endpoint gets nothing while another is ready       | 1 2/draining              | 1
no endpoint is ready: the draining ones serve                 | 1/draining 2/draining     | 1 2
the fallback leaves out endpoints that do not serve           | 1/draining 2/down         | 1
terminating and no longer serving: never                      | 1/dead                    |     | NONE      | no
ready while terminating (publishNotReadyAddresses) is ready   | 1/leaving 2               | 1 2
ready counts even if serving is false                         | 1/not-serving             | 1
all hinted, one for this node: that one                       | 1>me 2>you                | 1   | SAME_NODE
a hint may name several nodes                                 | 1>they,me 2>you           | 1   | SAME_NODE
one ready endpoint without node hint: all                     | 1>me 2                    | 1 2
node hints for other nodes only: all                          | 1>you 2>you               | 1 2
all hinted, one for this zone: that one                       | 1>a 2>b                   | 1   | SAME_ZONE
a hint may name several zones                                 | 1>b,a 2>b                 | 1   | SAME_ZONE
one ready endpoint without zone hint: all                     | 1>a 2                     | 1 2
zone hints for other zones only: all                          | 1>b 2>b                   | 1 2
an empty list of hints is no hint                             | 1>a 2>                    | 1 2
node hints win over zone hints                                | 1>me,b 2>you,a            | 1   | SAME_NODE
no node hint for us: zone hints decide                        | 1>you,a 2>you,b           | 1   | SAME_ZONE
one node hint is missing: zone hints decide                   | 1>me,b 2>a                | 2   | SAME_ZONE
an endpoint's own node and zone do not matter, only its hints | 1@me,a>b 2@you,b>a        | 2   | SAME_ZONE
an endpoint that is not ready disables nothing                | 1>a 2>b 3/down 4/draining | 1   | SAME_ZONE
a hinted endpoint that is not ready enables nothing           | 1/down>a 2/draining>a 3>b | 3
the fallback ignores hints                                    | 1/draining>a 2/draining>b | 1 2
the fallback is for all nodes or none: hints never lead to it | 1/draining>me 2>you       | 2
""",
    mode=lambda cell: TopologyMode[cell or "NONE"],
    some=lambda cell: cell != "no",
)
def test_the_cluster_set(ends, cluster, mode, some):
    """Endpoints on node me in zone a, in the words of ends(), and the numbers of the cluster set."""
    chosen = ask(CLUSTER, ends)
    assert numbers(chosen.cluster) == cluster
    assert chosen.mode is mode
    assert chosen.any_endpoints is some
    assert chosen.local == ()


@each_cells(
    "ends, local, cluster_text, some",
    """
no endpoints: refuse                           |                          |   |     | no
local ones only                                | 1@me 2                   | 1 | 1 2
none here, some elsewhere: empty, and drop     | 1@you                    |   | 1
none here, one draining elsewhere: drop        | 1/draining               |   | 1
only unready ones elsewhere: refuse            | 1/down                   |   |     | no
local and not ready is left out                | 1@me 2/down@me           | 1 | 1
local and draining, another local is ready     | 1@me 2/draining@me       | 1 | 1
local falls back although the cluster does not | 1/draining@me 2          | 1 | 2
the cluster falls back together with local     | 1/draining@me 2/draining | 1 | 1 2
local never falls back to another node         | 1/down@me 2              |   | 2
local is independent of hints                  | 1@me>b 2>a               | 1 | 2
the same name in other letters is another node | 1@Me                     |   | 1
""",
    some=lambda cell: cell != "no",
)
def test_the_local_set(ends, local, cluster_text, some):
    """Endpoints, and the expected local set, cluster set of a NodePort, and `any_endpoints`."""
    for web, cluster in ((EXTERNAL_LOCAL, cluster_text), (INTERNAL_LOCAL, "")):
        chosen = ask(web, ends)
        assert (numbers(chosen.local), numbers(chosen.cluster)) == (local, cluster)
        assert chosen.any_endpoints is some


@each_line(
    "service_text, sets, counts",
    """
web ClusterIP                                              | cluster
web ClusterIP internal-local                               | local
web NodePort node-port=30000 internal-local                | cluster local
web ClusterIP external=1.1.1.1 internal-local              | cluster local
web LoadBalancer vip=1.1.1.1 internal-local                | cluster local
web ClusterIP external=fd00::1 internal-local              | local
web ClusterIP external=0.0.0.0 internal-local              | local
web NodePort node-port=30000 external-local                | cluster local | yes
web LoadBalancer vip=1.1.1.1 external-local                | cluster local | yes
web LoadBalancer external-local                            | cluster
web LoadBalancer vip=fd00::1 external-local                | cluster
web ClusterIP external-local                               | cluster
web ClusterIP external=1.1.1.1 external-local              | cluster local | yes
web ClusterIP vip=1.1.1.1 external-local                   | cluster
web NodePort node-port=30000 internal-local external-local | cluster local | yes
""",
    counts=lambda cell: cell == "yes",
)
def test_traffic_policies_decide_which_sets_exist(service_text, sets, counts):
    """A Service, its sets, and whether its external policy Local has an effect. With internal policy Local, what is
    reachable from outside still needs the cluster set: the short circuit.
    """
    web = service(service_text)
    chosen = ask(web, "1@me 2")
    assert numbers(chosen.cluster) == ("1 2" if "cluster" in sets else "")
    assert numbers(chosen.local) == ("1" if "local" in sets else "")
    assert numbers(chosen.serving) == "1 2"
    assert is_external_local(web, web.ports[0], 4) is counts


def test_slices_of_the_other_family_are_ignored():
    six = EndpointSlice("ns", "web-6", "web", 6, (Endpoint(parse_addr("fd00::9")),), HTTP)
    slices = (piece("2"), piece("1", name="web-2"), six)
    chosen = select_endpoints(slices, PORT, CLUSTER, ME, 4)
    assert numbers(chosen.cluster) == "1 2"
    assert [line.slice_name for line in chosen.explain()] == ["web-1", "web-2"]
    assert [str(b) for b in select_endpoints(slices, PORT, CLUSTER, ME, 6).cluster] == ["[fd00::9]:8080"]


@each_cells(
    "name, protocol, number",
    """\
other name | web | TCP | 8080
other protocol | http | UDP | 8080
no name |  | TCP | 8080
number 0 | http | TCP | 0
no ports
""",
    number=lambda cell: int(cell) if cell else None,
)
def test_a_slice_without_the_port_has_no_endpoints_for_it(name, protocol, number):
    ports = () if number is None else (SlicePort(name, Protocol[protocol], number),)
    chosen = select_endpoints((piece("1", ports=ports),), PORT, CLUSTER, ME, 4)
    assert (chosen.cluster, chosen.serving, chosen.any_endpoints) == ((), (), False)
    (line,) = chosen.explain()
    assert (line.reason, line.port, line.cluster) == (EndpointReason.NO_PORT, 0, False)
    assert "'http' (TCP)" in line.text


@each_cells(
    "first, second, wins",
    """
none terminates: the last one                                   | 1@you         | 1@me>me       | 1@me>me
none terminates: the last one, without its hint                 | 1@me>me       | 1@you         | 1@you
a Pod got the address of a terminating one (kubernetes #135593) | 1@you         | 1/draining@me | 1@you
the same in the other order                                     | 1/draining@me | 1@you         | 1@you
the one that does not terminate, though down                    | 1/down        | 1/draining@me | 1/down
all terminate: the first one                                    | 1/draining@me | 1/dead        | 1/draining@me
all terminate: the first one, though down                       | 1/dead        | 1/draining@me | 1/dead
""",
)
@pytest.mark.parametrize("service", [CLUSTER, EXTERNAL_LOCAL], ids=["Cluster", "Local"])
def test_one_of_two_entries_of_an_address_is_used(first, second, wins, service: Service):
    """Two entries of one address in two slices, and the entry that is used."""
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
    assert numbers(chosen.cluster) == "1"
    assert numbers(chosen.serving) == "1 2 3 5"
    assert numbers(ask(INTERNAL_LOCAL, endpoints).serving) == "1 2 3 5"


@each_cells(
    "policy, ends_text, reason",
    """
ready                                            | cluster        | 1               | READY
hinted for this node                             | cluster        | 1>me            | SAME_NODE
hinted for this zone                             | cluster        | 1>a             | SAME_ZONE
hinted for others                                | cluster        | 1>b 2>a         | HINTED_ELSEWHERE
not ready                                        | cluster        | 1/down 2        | NOT_READY
serving is not enough                            | cluster        | 1/unready       | NOT_READY
draining, others are ready                       | cluster        | 1/draining 2    | DRAINING
draining, none is ready                          | cluster        | 1/draining      | FALLBACK
draining here, none here is ready                | external-local | 1/draining@me 2 | FALLBACK
on another node, internal policy Local           | internal-local | 1@you           | NOT_LOCAL
draining on another node, internal policy Local  | internal-local | 1/draining      | NOT_LOCAL
ready here, internal policy Local                | internal-local | 1@me            | LOCAL_ONLY
ready here, hints lead elsewhere, external Local | external-local | 1@me>b 2>a      | LOCAL_ONLY
another copy counts                              | external-local | 1 1@me          | DUPLICATE
""",
    reason=EndpointReason,
)
def test_every_endpoint_has_a_reason(policy, ends_text, reason):
    """The traffic policy of a Service, endpoints, and the reason that `kbpf inspect` shows for the first."""
    asked = {"cluster": CLUSTER, "internal-local": INTERNAL_LOCAL, "external-local": EXTERNAL_LOCAL}[policy]
    lines = ask(asked, ends_text).explain()
    assert tuple(line.endpoint for line in lines) == ends(ends_text)
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
def test_the_reason_of_an_endpoint_that_is_not_ready_has_its_conditions(condition, text):
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


SERVE = {
    EndpointReason.READY,
    EndpointReason.SAME_NODE,
    EndpointReason.SAME_ZONE,
    EndpointReason.LOCAL_ONLY,
    EndpointReason.FALLBACK,
}


@settings(max_examples=400)
@given(SLICES, SERVICES, NODES)
def test_any_order_of_slices_has_the_same_sets_and_reasons_agree_with_them(slices, web, node):
    """tests/fuzz/test_judge.py compares the sets with kube-proxy's own functions."""
    found = [select_endpoints(order, web.ports[0], web, node, 4) for order in itertools.permutations(slices)]
    assert len(set(map(sets, found))) == 1
    for chosen in found:
        lines = chosen.explain()
        assert [line.reason in SERVE for line in lines] == [line.cluster or line.local for line in lines]
        for name in ("cluster", "local"):
            said = {(line.endpoint.address, line.port) for line in lines if getattr(line, name)}
            assert sorted(said) == [(b.address, b.port) for b in getattr(chosen, name)]
