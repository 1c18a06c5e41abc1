# SPDX-License-Identifier: Apache-2.0
"""What a change of a Service does to new connections, established ones and datagrams."""

import itertools

import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube_objects import port, service, slice_port
from tests.support.lab.dial import CLOSED, REFUSED, UNSERVED, Dial, check
from tests.support.lab.lab import Place, until

OWN = "198.18.0.1"
ABORTED = "ECONNABORTED"


def expect(cluster: Cluster, to: str, outcome: str, client: str = "a3", how: str = "tcp") -> None:
    check(cluster, Dial("current state", client, to, outcome, how))


def load_is_running(place: Place, connections: int) -> None:
    """Returns once this many more connections have succeeded."""
    before = sum(place.ask("peek_load")["names"].values())
    until(
        "connections are made",
        lambda: sum(place.ask("peek_load")["names"].values()) >= before + connections,
    )


def test_connections_never_fail_while_endpoints_come_and_go(cluster: Cluster) -> None:
    """From a pod on one node and the host of the other. All backends accept connections
    throughout.
    """
    made = cluster.web(120, "a1 b1", dual=True)
    clients = (cluster["a3"], cluster["host-2"])
    with cluster.given(*made):
        clients[0].ask("start_load", host="10.96.0.120", port=80, threads=2)
        clients[1].ask("start_load", host="fd00:10:96::120", port=80, family="6", threads=2)
        sets = itertools.cycle(("a1", "a1 a2 b1 b2", "b1", "a2 b2", "a1 b1/draining", "b1 b2"))
        for who in itertools.islice(sets, 60):
            for piece, v6 in zip(made[1:], (False, True), strict=True):
                piece["endpoints"] = cluster.endpoints(who, v6)
                cluster.kube.replace(piece)
        cluster.settle()
        for client in clients:
            load_is_running(client, 20)
        results = [client.ask("stop_load") for client in clients]
    for result in results:
        assert result["errors"] == []
        assert {"a1", "a2", "b1", "b2"} >= set(result["names"])
        assert len(result["names"]) >= 2, "the load met several backends"


def test_a_removed_backend_gets_no_new_connections(cluster: Cluster) -> None:
    made = cluster.web(121, "a1 b1")
    with cluster.given(*made):
        expect(cluster, "10.96.0.121:80", "a1 b1")
        cluster.change(cluster.slice("web-121", "b1"))
        expect(cluster, "10.96.0.121:80", "b1")
        expect(cluster, "10.96.0.121:80", "b1", "b3")
        cluster.change(cluster.slice("web-121", ""))
        expect(cluster, "10.96.0.121:80", REFUSED)
        cluster.change(cluster.slice("web-121", "a2"))
        expect(cluster, "10.96.0.121:80", "a2", "host-2")


def test_established_connections_outlive_their_endpoint(cluster: Cluster) -> None:
    """As with kube-proxy, TCP connections are never cut, so that a terminating pod can
    finish them.
    """
    client = cluster["b3"]
    with cluster.given(*cluster.web(122, "a1")):
        assert client.tcp("10.96.0.122", 80, keep="old")["name"] == "a1"
        cluster.change(cluster.slice("web-122", "b1"))
        expect(cluster, "10.96.0.122:80", "b1")
        assert client.ask("talk", keep="old")["name"] == "a1"
        client.ask("drop", keep="old")


def test_established_connections_outlive_their_service(cluster: Cluster) -> None:
    made = cluster.web(149, "a1")
    client = cluster["b3"]
    with cluster.given(*made):
        assert client.tcp("10.96.0.149", 80, keep="old")["name"] == "a1"
        cluster.delete(*made)
        cluster.settle()
        assert client.ask("talk", keep="old")["name"] == "a1"
        client.ask("drop", keep="old")


def test_an_endpoint_moves_to_another_slice(cluster: Cluster) -> None:
    """First by adding it to the new slice, then by creating the old one again."""
    first, second = (cluster.slice("web-123", "a1", name=f"web-123-{n}") for n in "xy")
    with cluster.given(cluster.web(123, "")[0], first):
        cluster.create(second)
        cluster.delete(first)
        cluster.settle()
        expect(cluster, "10.96.0.123:80", "a1")
        cluster.delete(second)
        cluster.settle()
        expect(cluster, "10.96.0.123:80", REFUSED)
        cluster.create(first)
        cluster.settle()
        expect(cluster, "10.96.0.123:80", "a1")


def test_a_service_recreated_at_another_address(cluster: Cluster) -> None:
    made, other = cluster.web(124, "a1"), cluster.web(125, "b1")
    other[0]["metadata"]["name"] = "web-124"
    with cluster.given(*made):
        expect(cluster, "10.96.0.124:80", "a1")
        cluster.delete(made[0])
        cluster.create(other[0])
        cluster.settle()
        expect(cluster, "10.96.0.124:80", UNSERVED)
        expect(cluster, "10.96.0.125:80", "a1")


def test_a_service_recreated_at_the_same_address(cluster: Cluster) -> None:
    made = cluster.web(126, "a1")
    with cluster.given(*made):
        for who in ("b1", "a1 a2", "b2"):
            cluster.delete(*made)
            cluster.settle()
            expect(cluster, "10.96.0.126:80", UNSERVED)
            made[1] = cluster.slice("web-126", who)
            cluster.create(*made)
            cluster.settle()
            expect(cluster, "10.96.0.126:80", who)


def test_an_address_moves_to_another_service(cluster: Cluster) -> None:
    one, two = cluster.web(127, "a1"), cluster.web(127, "b1")
    two[0]["metadata"]["name"] = "heir"
    two[1] = cluster.slice("heir", "b1")
    with cluster.given(*one):
        expect(cluster, "10.96.0.127:80", "a1")
        cluster.delete(one[0])
        with cluster.given(*two):
            expect(cluster, "10.96.0.127:80", "b1")


def test_all_port_fields_change_in_one_update(cluster: Cluster) -> None:
    """Number, protocol, name and target change; a port is removed, another added, one unchanged."""
    at = "10.96.0.128"
    before = (port(80, "web"), port(53, "dns"), port(9000, "old"), port(443, "same"))
    after = (port(81, "web"), port(53, "dns", "UDP"), port(9001, "new"), port(443, "same"))
    targets = {"web": 8080, "dns": 8080, "old": 8080, "same": 8080}
    now = {"web": 8081, "new": 8081, "same": 8080}
    rows = [slice_port(number, name) for name, number in targets.items()]
    moved = [slice_port(number, name) for name, number in now.items()]
    made = [service("ports-128", *before, cluster_ip=at), cluster.slice("ports-128", "a1", *rows)]
    with cluster.given(*made):
        for number in (80, 53, 9000, 443):
            expect(cluster, f"{at}:{number}", "a1:8080")
        cluster.change(
            service("ports-128", *after, cluster_ip=at),
            cluster.slice("ports-128", "b1", *moved, slice_port(8081, "dns", "UDP")),
        )
        for number in (80, 9000, 53):
            expect(cluster, f"{at}:{number}", REFUSED)
        expect(cluster, f"{at}:81", "b1:8081")
        expect(cluster, f"{at}:9001", "b1:8081")
        expect(cluster, f"{at}:443", "b1:8080")
        expect(cluster, f"{at}:53", "b1:8081", how="udp")


def test_a_node_port_changes(cluster: Cluster) -> None:
    made = cluster.web(129, "a1", type="NodePort", node_port=30029)
    with cluster.given(*made):
        expect(cluster, f"{OWN}:30029", "a1", "host-1")
        ports = [port(80, node_port=30030)]
        cluster.kube.patch("Service", "web-129", {"spec": {"ports": ports}})
        cluster.settle()
        expect(cluster, f"{OWN}:30029", CLOSED, "host-1")
        expect(cluster, f"{OWN}:30030", "a1", "host-1")


def test_the_service_type_changes(cluster: Cluster) -> None:
    """ClusterIP, NodePort, ClusterIP, ExternalName, headless, ExternalName, NodePort."""
    at = "10.96.0.130"
    clear = {"clusterIP": None, "clusterIPs": None}
    outer = {"type": "ExternalName", "externalName": "example.org", **clear}
    inner = {"type": "ClusterIP", "externalName": None}

    def become(**spec: object) -> None:
        cluster.kube.patch("Service", "web-130", {"spec": spec})
        cluster.settle()

    with cluster.given(*cluster.web(130, "a1")):
        expect(cluster, f"{at}:80", "a1")
        expect(cluster, f"{OWN}:30034", CLOSED, "host-1")
        become(type="NodePort", ports=[port(80, node_port=30034)])
        expect(cluster, f"{OWN}:30034", "a1", "host-1")
        expect(cluster, f"{at}:80", "a1")
        become(type="ClusterIP", ports=[port(80)])
        expect(cluster, f"{OWN}:30034", CLOSED, "host-1")
        expect(cluster, f"{at}:80", "a1")
        become(**outer)
        expect(cluster, f"{at}:80", UNSERVED)
        become(**inner, clusterIP=at, clusterIPs=[at])
        expect(cluster, f"{at}:80", "a1")
        become(**outer)
        become(**inner, clusterIP="None", clusterIPs=["None"])
        expect(cluster, f"{at}:80", UNSERVED)
        become(**outer)
        nodes = {"type": "NodePort", "ports": [port(80, node_port=30034)]}
        become(**inner | nodes, clusterIP=at, clusterIPs=[at])
        expect(cluster, f"{at}:80", "a1")
        expect(cluster, f"{OWN}:30034", "a1", "host-1")


@pytest.mark.parametrize("label", ["service-proxy-name", "headless"])
def test_a_label_stops_serving_and_its_removal_resumes(cluster: Cluster, label: str) -> None:
    def put(value: str | None) -> None:
        labels = {f"service.kubernetes.io/{label}": value}
        cluster.kube.patch("Service", "web-131", {"metadata": {"labels": labels}})
        cluster.settle()

    with cluster.given(*cluster.web(131, "a1")):
        expect(cluster, "10.96.0.131:80", "a1")
        put("other")
        expect(cluster, "10.96.0.131:80", UNSERVED)
        put(None)
        expect(cluster, "10.96.0.131:80", "a1")


def test_the_second_family_is_added_and_removed(cluster: Cluster) -> None:
    one = cluster.web(132, "a1")
    both = cluster.web(132, "a1", dual=True)
    with cluster.given(*one):
        expect(cluster, "[fd00:10:96::132]:80", UNSERVED)
        cluster.create(both[2])
        cluster.change(both[0])
        expect(cluster, "[fd00:10:96::132]:80", "a1")
        cluster.delete(both[2])
        cluster.settle()
        expect(cluster, "[fd00:10:96::132]:80", REFUSED)
        expect(cluster, "10.96.0.132:80", "a1")


def test_the_policy_changes(cluster: Cluster) -> None:
    with cluster.given(*cluster.web(133, "a1 b1")):
        expect(cluster, "10.96.0.133:80", "a1 b1")
        change = {"spec": {"internalTrafficPolicy": "Local"}}
        cluster.kube.patch("Service", "web-133", change)
        cluster.settle()
        expect(cluster, "10.96.0.133:80", "a1")
        expect(cluster, "10.96.0.133:80", "b1", "b3")


def test_the_zone_of_the_node_changes(cluster: Cluster) -> None:
    label = "topology.kubernetes.io/zone"

    def move(zone: str, backend: str) -> None:
        cluster.kube.patch("Node", "node-1", {"metadata": {"labels": {label: zone}}}, "")
        wanted = [f"{cluster[backend].ip}:8080/TCP"]
        until(
            f"node-1 is in {zone}",
            lambda: cluster.served()["10.96.0.134:80/TCP"]["cluster"] == wanted,
        )

    with cluster.given(*cluster.web(134, "a1@zone-1 b1@zone-2")):
        expect(cluster, "10.96.0.134:80", "a1")
        move("zone-2", "b1")
        expect(cluster, "10.96.0.134:80", "b1")
        move("zone-1", "a1")
        expect(cluster, "10.96.0.134:80", "a1")


def test_two_services_claim_one_external_ip(cluster: Cluster) -> None:
    """The older Service has it; the other gets it when the older one is deleted."""
    one = cluster.web(135, "a1", external_ips=["192.0.2.135"])
    two = cluster.web(136, "b1", external_ips=["192.0.2.135"])
    with cluster.given(*one):
        older = cluster.kube.get("Service", "web-135")["metadata"]["creationTimestamp"]
        two[0]["metadata"]["name"] = "a-web"  # it would win if names decided instead of age
        two[1] = cluster.slice("a-web", "b1")
        until("the clock shows another second", lambda: later(cluster, older))
        with cluster.given(*two):
            expect(cluster, "192.0.2.135:80", "a1")
            expect(cluster, "10.96.0.136:80", "b1")
            line = "192.0.2.135:80/TCP is not served: it is taken by Service default/web-135"
            for agent in cluster.agents:
                until(
                    "the conflict is reported",
                    lambda agent=agent: any(line in each for each in agent.status()["problems"]),
                )
            cluster.delete(one[0])
            cluster.settle()
            expect(cluster, "192.0.2.135:80", "b1")
            until("no problem is reported", lambda: not cluster.agent.status()["problems"])


def later(cluster: Cluster, stamp: str) -> bool:
    """Whether an object created now is younger. creationTimestamp has a resolution of a second."""
    probe = service("probe")
    made = cluster.kube.create(probe)["metadata"]["creationTimestamp"]
    cluster.delete(probe)
    return bool(made > stamp)
