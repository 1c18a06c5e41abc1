# SPDX-License-Identifier: Apache-2.0
"""What a change of a Service in a real API server does to connections and sockets.

All kinds of changes: tests/values/policy/test_any_order.py and tests/programs/conformance.
"""

import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube_objects import port
from tests.support.features import needs
from tests.support.lab.dial import CLOSED, UNSERVED, Dial, check
from tests.support.lab.load import under_load


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


def test_the_service_type_changes(cluster: Cluster):
    """The ClusterIP and the NodePort answer a1, or they are not served."""
    nodes = {"type": "NodePort", "ports": [port(80, node_port=30034)]}
    outer = {"type": "ExternalName", "externalName": "example.org", "clusterIP": None, "clusterIPs": None}
    inner = {"type": "ClusterIP", "externalName": None}
    with cluster.given(*cluster.web(130, "a1")):
        for spec, cluster_ip, node_port in (
            ({}, "a1", CLOSED),
            (nodes, "a1", "a1"),
            ({"type": "ClusterIP", "ports": [port(80)]}, "a1", CLOSED),
            (outer, UNSERVED, CLOSED),
            (inner | {"clusterIP": "None", "clusterIPs": ["None"]}, UNSERVED, CLOSED),
            (outer, UNSERVED, CLOSED),
            (inner | nodes | {"clusterIP": "10.96.0.130", "clusterIPs": ["10.96.0.130"]}, "a1", "a1"),
        ):
            cluster.kube.patch("Service", "web-130", {"spec": spec})
            cluster.settle()
            check(cluster, Dial("the ClusterIP", "a3", "10.96.0.130:80", cluster_ip))
            check(cluster, Dial("the NodePort", "host-1", "198.18.0.1:30034", node_port))


@needs("socket_iterator")
@pytest.mark.parametrize("change", ["another endpoint", "no endpoint", "no port", "no Service"])
def test_udp_sockets_of_a_backend_that_stops_are_aborted(cluster: Cluster, change: str):
    """In the networks of pods and of the node. Which sockets: tests/programs/sockets/udp. In the last two cases the
    slice stays (kubernetes/kubernetes#141371).
    """
    clients = ("a3", "host-1")
    row, piece = cluster.web(150, "a1", "UDP")
    with cluster.given(row, piece):
        for client in clients:
            assert cluster[client].udp("10.96.0.150", 80, keep="one", connected=True)["name"] == "a1"
        if change.endswith("endpoint"):
            piece["endpoints"] = cluster.endpoints("b1" if change == "another endpoint" else "")
            cluster.change(piece)
        elif change == "no port":
            row["spec"]["ports"] = [port(81, protocol="UDP")]
            cluster.change(row)
        else:
            cluster.delete(row)
        for client in clients:
            assert cluster[client].ask("hear", keep="one") == {"error": "ECONNABORTED"}
            cluster[client].ask("drop", keep="one")
