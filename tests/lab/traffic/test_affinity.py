# SPDX-License-Identifier: Apache-2.0
"""ClientIP affinity of socket clients: each pod is a client, the host with its host-network pods is
one.

To tell affinity from chance, a client is bound while the Service has one backend, and must keep it
when others are added. Without affinity, 20 connections in a row to one of two backends happen once
in a million.
"""

import struct
import time
from collections.abc import Iterator

import pytest

from kbpf.dataplane.bpf.maps.layout import schema_hash
from kbpf.kernel.bpf.objects import Map
from tests.support.cluster.cluster import Cluster, Object
from tests.support.cluster.kube_objects import port, service, slice_port

OWN = "198.18.0.1"
MINUTE, HOUR = 60, 3600
DIALS = 20
PORTS = port(80, "a"), port(81, "b")
TARGETS = slice_port(8080, "a"), slice_port(8081, "b")


def answers(cluster: Cluster, client: str, host: str, number: int = 80, **how: object) -> set[str]:
    """The names of the backends that answer DIALS connections in a row."""
    answer = cluster[client].many(DIALS, host, number, **how)
    assert not answer["errors"], answer
    return set(answer["names"])


class Sticky:
    """A Service with affinity, whose endpoints a test changes."""

    def __init__(self, cluster: Cluster, objects: list[Object]) -> None:
        self.cluster = cluster
        self.name = objects[0]["metadata"]["name"]
        self.host = objects[0]["spec"]["clusterIP"]
        self._slices = objects[1:]

    def backends(self, who: str) -> None:
        """Replaces the endpoints and waits until they are programmed."""
        for each in self._slices:
            each["endpoints"] = self.cluster.endpoints(who, each["addressType"] == "IPv6")
        self.cluster.change(*self._slices)


@pytest.fixture
def kept(cluster: Cluster) -> Iterator[None]:
    """Another Service with the same backends. A backend that no Service uses is deleted after a
    second (GRACE_SECONDS), together with the affinity of its clients. A test that removes one for a
    while would have to be faster than that.
    """
    made = [service("kept", *PORTS, cluster_ip="10.96.0.99"), cluster.slice("kept", "a1 a2 b1", *TARGETS)]
    with cluster.given(*made):
        yield


@pytest.fixture
def sticky(cluster: Cluster, kept: None) -> Iterator[Sticky]:
    made = cluster.web(100, "a1", dual=True, affinity_seconds=HOUR)
    with cluster.given(*made):
        yield Sticky(cluster, made)


def bind(sticky: Sticky, **clients: str) -> None:
    """Connects each client while its backend is the only one; then all backends serve."""
    for client, backend in clients.items():
        sticky.backends(backend)
        assert answers(sticky.cluster, client.replace("_", "-"), sticky.host) == {backend}
    sticky.backends("a1 a2 b1")


def test_each_pod_and_the_host_keep_separate_backends(cluster: Cluster, sticky: Sticky) -> None:
    bind(sticky, a2="b1", a3="a1", host_1="a2")
    assert answers(cluster, "a2", sticky.host) == {"b1"}
    assert answers(cluster, "a3", sticky.host) == {"a1"}
    assert answers(cluster, "host-1", sticky.host) == {"a2"}
    assert answers(cluster, "a-net", sticky.host) == {"a2"}, "a host-network pod is the same client as the host"


def test_affinity_is_kept_per_client_node(cluster: Cluster, sticky: Sticky) -> None:
    bind(sticky, b2="a1", host_2="b1")
    assert answers(cluster, "b2", sticky.host) == {"a1"}
    assert answers(cluster, "host-2", sticky.host) == {"b1"}


def test_a_new_client_does_not_change_the_affinity_of_another(cluster: Cluster, sticky: Sticky) -> None:
    sticky.backends("a1 a2 b1")
    first = answers(cluster, "a2", sticky.host)
    assert len(first) == 1
    assert len(answers(cluster, "a3", sticky.host)) == 1
    assert answers(cluster, "a2", sticky.host) == first


def test_clients_of_a_removed_backend_move_and_stay_moved(cluster: Cluster, sticky: Sticky) -> None:
    bind(sticky, a3="a1")
    sticky.backends("a2 b1")
    moved = answers(cluster, "a3", sticky.host)
    assert len(moved) == 1
    assert moved <= {"a2", "b1"}
    sticky.backends("a1 a2 b1")
    assert answers(cluster, "a3", sticky.host) == moved, "it keeps its new backend"


def test_affinity_is_separate_per_address_family(cluster: Cluster, sticky: Sticky) -> None:
    bind(sticky, a3="b1")
    assert answers(cluster, "a3", f"::ffff:{sticky.host}") == {"b1"}, "an IPv6 socket dials IPv4"
    sticky.backends("a2")
    assert answers(cluster, "a3", "fd00:10:96::100") == {"a2"}
    sticky.backends("a1 a2 b1")
    assert answers(cluster, "a3", "fd00:10:96::100") == {"a2"}


def test_all_addresses_of_a_service_share_affinity(cluster: Cluster) -> None:
    made = cluster.web(101, "b1", affinity_seconds=HOUR, type="NodePort", node_port=30101, external_ips=["192.0.2.101"])
    with cluster.given(*made):
        one = Sticky(cluster, made)
        bind(one, a3="a2")
        assert answers(cluster, "a3", OWN, 30101) == {"a2"}
        assert answers(cluster, "a3", "192.0.2.101") == {"a2"}


def test_ports_have_separate_affinity(cluster: Cluster, kept: None) -> None:
    made = [
        service("sticky-ports", *PORTS, cluster_ip="10.96.0.102", affinity_seconds=HOUR),
        cluster.slice("sticky-ports", "a1", *TARGETS),
    ]
    with cluster.given(*made):
        one = Sticky(cluster, made)
        assert answers(cluster, "a3", one.host, 80) == {"a1"}
        one.backends("b1")
        assert answers(cluster, "a3", one.host, 81) == {"b1"}
        one.backends("a1 b1")
        assert answers(cluster, "a3", one.host, 80) == {"a1"}
        assert answers(cluster, "a3", one.host, 81) == {"b1"}


@pytest.mark.parametrize("connected", [False, True], ids=["sendto", "connect"])
def test_udp_sockets_have_affinity(cluster: Cluster, connected: bool) -> None:
    made = cluster.web(103, "a2", "UDP", affinity_seconds=HOUR)
    how = {"protocol": "udp", "connected": connected}
    with cluster.given(*made):
        one = Sticky(cluster, made)
        assert answers(cluster, "a3", one.host, **how) == {"a2"}
        one.backends("a1 a2 b1")
        assert answers(cluster, "a3", one.host, **how) == {"a2"}


def test_affinity_switched_off_spreads_and_on_again_binds(cluster: Cluster, sticky: Sticky) -> None:
    bind(sticky, a3="a1")
    change = {"spec": {"sessionAffinity": "None", "sessionAffinityConfig": None}}
    cluster.kube.patch("Service", sticky.name, change)
    cluster.settle()
    assert len(answers(cluster, "a3", sticky.host)) > 1
    config = {"clientIP": {"timeoutSeconds": HOUR}}
    change = {"spec": {"sessionAffinity": "ClientIP", "sessionAffinityConfig": config}}
    cluster.kube.patch("Service", sticky.name, change)
    cluster.settle()
    assert len(answers(cluster, "a3", sticky.host)) == 1


def test_after_the_timeout_a_client_may_change_backend(cluster: Cluster) -> None:
    """Each port has separate affinity, so 16 ports are 16 independent tries. That all choose the
    same backend again by chance happens once in 4 billion runs.
    """
    ports = range(16)
    # As long as can be, since it must not expire by itself: an entry cannot look older than the
    # machine.
    timeout = max(MINUTE, min(HOUR, int(time.monotonic()) // 2))
    made = [
        service("brief", *(port(80 + n, f"p{n}") for n in ports), cluster_ip="10.96.0.104", affinity_seconds=timeout),
        cluster.slice("brief", "a1", *(slice_port(8080, f"p{n}") for n in ports)),
    ]

    def dial() -> set[str]:
        return {cluster["a3"].tcp("10.96.0.104", 80 + n)["name"] for n in ports}

    with cluster.given(*made):
        one = Sticky(cluster, made)
        assert dial() == {"a1"}
        one.backends("a1 a2 b1 b2")
        assert dial() == {"a1"}, "affinity has not expired"
        age(one, timeout)
        assert len(dial()) > 1


def age(sticky: Sticky, seconds: int) -> None:
    """Makes the first node's affinity entries look this many seconds older."""
    agent = sticky.cluster.agent
    with Map.open(agent.pin_dir / f"maps-{schema_hash()}" / "affinity") as found:
        for key, value in list(found.items()):
            (used,) = struct.unpack_from("=Q", value)
            found.update(key, struct.pack("=Q", used - seconds * 10**9) + value[8:])
