# SPDX-License-Identifier: Apache-2.0
"""What a change of a Service does to new connections, established ones and datagrams."""

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube_objects import port, service, slice_port
from tests.support.lab.dial import CLOSED, REFUSED, UNSERVED, Dial, check
from tests.support.lab.lab import until
from tests.support.lab.load import under_load

OWN = "198.18.0.1"


def expect(cluster: Cluster, to: str, outcome: str, client: str = "a3", how: str = "tcp") -> None:
    check(cluster, Dial("current state", client, to, outcome, how))


def test_connections_never_fail_while_endpoints_come_and_go(cluster: Cluster):
    """From a pod on one node and the host of the other. All backends accept connections
    throughout.
    """
    made = cluster.web(120, "a1 b1", dual=True)
    with (
        cluster.given(*made),
        under_load(cluster, "10.96.0.120", "a3", answers="a1 a2 b1 b2") as load,
        under_load(cluster, "fd00:10:96::120", "host-2", answers="a1 a2 b1 b2") as other,
    ):
        for who in ("a1", "a1 a2 b1 b2", "b1", "a2 b2", "a1 b1/draining", "b1 b2") * 10:
            for piece, v6 in zip(made[1:], (False, True), strict=True):
                piece["endpoints"] = cluster.endpoints(who, v6)
                cluster.kube.replace(piece)
        cluster.settle()
        for each in (load, other):
            each.goes_on()


def test_a_removed_backend_gets_no_new_connections(cluster: Cluster):
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


def test_established_connections_outlive_their_endpoint_and_their_service(cluster: Cluster):
    """As with kube-proxy, TCP connections are never cut, so that a terminating pod can
    finish them.
    """
    client, made = cluster["b3"], cluster.web(122, "a1")
    with cluster.given(*made):
        assert client.tcp("10.96.0.122", 80, keep="old")["name"] == "a1"
        cluster.change(cluster.slice("web-122", "b1"))
        expect(cluster, "10.96.0.122:80", "b1")
        assert client.ask("talk", keep="old")["name"] == "a1"
        cluster.delete(*made)
        cluster.settle()
        assert client.ask("talk", keep="old")["name"] == "a1"
        client.ask("drop", keep="old")


def test_an_address_moves_to_another_service(cluster: Cluster):
    one, two = cluster.web(127, "a1"), cluster.web(127, "b1")
    two[0]["metadata"]["name"] = "heir"
    two[1] = cluster.slice("heir", "b1")
    with cluster.given(*one):
        expect(cluster, "10.96.0.127:80", "a1")
        cluster.delete(one[0])
        with cluster.given(*two):
            expect(cluster, "10.96.0.127:80", "b1")


def test_all_port_fields_change_in_one_update(cluster: Cluster):
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


def test_the_service_type_changes(cluster: Cluster):
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


def test_a_label_stops_serving_and_its_removal_resumes(cluster: Cluster):
    def put(value: str | None) -> None:
        labels = {"service.kubernetes.io/service-proxy-name": value}
        cluster.kube.patch("Service", "web-131", {"metadata": {"labels": labels}})
        cluster.settle()

    with cluster.given(*cluster.web(131, "a1")):
        expect(cluster, "10.96.0.131:80", "a1")
        put("other")
        expect(cluster, "10.96.0.131:80", UNSERVED)
        put(None)
        expect(cluster, "10.96.0.131:80", "a1")


def test_two_services_claim_one_external_ip(cluster: Cluster):
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
