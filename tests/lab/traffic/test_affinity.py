# SPDX-License-Identifier: Apache-2.0
"""ClientIP affinity of socket clients: each pod is a client, and each node with its host-network
pods is one. Timeouts, families, ports and datagrams: tests/programs/sockets/test_affinity.py.

To tell affinity from chance, a client is bound while the Service has one backend, and must keep it
when others are added. Without affinity, 20 connections in a row to one of two backends happen once
in a million.
"""

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster import Cluster

HOST = "10.96.0.100"
BOUND = {"a2": "b1", "a3": "a1", "host-1": "a2", "b2": "a1", "host-2": "b1"}
"""Client → the backend that it is bound to."""


def answers(cluster: Cluster, client: str) -> set[str]:
    """The names of the backends that answer 20 connections in a row."""
    answer = cluster[client].many(20, HOST, 80)
    assert not answer["errors"], answer
    return set(answer["names"])


@pytest.fixture
def bound(cluster: Cluster) -> Iterator[Cluster]:
    """Another Service keeps the backends: one that no Service uses is deleted after a second
    (GRACE_SECONDS), with the affinity of its clients.
    """
    with cluster.given(*cluster.web(99, "a1 a2 b1"), *cluster.web(100, "a1", affinity_seconds=3600)):
        for client, backend in BOUND.items():
            cluster.change(cluster.slice("web-100", backend))
            assert answers(cluster, client) == {backend}
        cluster.change(cluster.slice("web-100", "a1 a2 b1"))
        yield cluster


def test_each_pod_and_each_node_keeps_its_backend(bound: Cluster):
    assert {client: answers(bound, client) for client in BOUND} == {who: {name} for who, name in BOUND.items()}
    assert answers(bound, "a-net") == {BOUND["host-1"]}, "a host-network pod is the same client as the host"


def test_clients_of_a_removed_backend_move_and_stay_moved(bound: Cluster):
    bound.change(bound.slice("web-100", "a2 b1"))
    moved = answers(bound, "a3")
    assert len(moved) == 1
    assert moved <= {"a2", "b1"}
    bound.change(bound.slice("web-100", "a1 a2 b1"))
    assert answers(bound, "a3") == moved
