# SPDX-License-Identifier: Apache-2.0
"""Connections while a Service in a real API server changes.

All kinds of changes: tests/values/policy/test_any_order.py and tests/programs/conformance; what becomes of UDP
sockets: tests/programs/sockets/udp/test_deleted_backend.py.
"""

from tests.support.cluster.cluster import Cluster
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
