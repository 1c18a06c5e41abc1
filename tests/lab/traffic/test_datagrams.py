# SPDX-License-Identifier: Apache-2.0
"""UDP sockets whose backend stops serving. UDP has no FIN: the agent has to abort the sockets."""

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.features import needs
from tests.support.lab.dial import REFUSED, UNSERVED
from tests.support.lab.lab import Place, until

ABORTED = "ECONNABORTED"
finds_sockets = needs("socket_iterator")
"""The agent finds the sockets of a backend with this iterator."""
HOST, HOST6, NAME = "10.96.0.150", "fd00:10:96::150", "web-150"


class Dns:
    """A UDP Service of both families, and sockets that clients keep open."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def backends(self, who: str) -> None:
        """Replaces the endpoints and waits until they are programmed."""
        slices = cluster_slices(self.cluster, who)
        self.cluster.change(*slices)

    def connect(self, client: str, host: str = HOST, port: int = 80) -> str:
        """The backend that answers a new connected socket, which stays open under the name
        `host`.
        """
        place = self.cluster[client]
        return str(place.udp(host, port, keep=host, connected=True)["name"])

    def cut(self, client: str, host: str = HOST) -> None:
        """Waits for that socket's ECONNABORTED: a blocked receiver wakes up, a sender's
        call fails.
        """
        place = self.cluster[client]
        assert place.ask("hear", keep=host) == {"error": ABORTED}
        assert "error" in place.ask("talk", keep=host)
        place.ask("drop", keep=host)

    def alive(self, client: str, backend: str, host: str = HOST) -> None:
        """The socket is still served by this backend."""
        answer = self.cluster[client].ask("talk", keep=host)
        assert answer.get("name") == backend, answer
        self.cluster[client].ask("drop", keep=host)


def cluster_slices(cluster: Cluster, who: str) -> list[dict[str, object]]:
    return cluster.web(150, who, "UDP", dual=True)[1:]


@pytest.fixture
def dns(cluster: Cluster) -> Iterator[Dns]:
    with cluster.given(*cluster.web(150, "a1", "UDP", dual=True)):
        yield Dns(cluster)


@finds_sockets
@pytest.mark.parametrize("host", [HOST, HOST6, f"::ffff:{HOST}"], ids=["IPv4", "IPv6", "mapped"])
@pytest.mark.parametrize("client", ["a3", "b2", "host-1", "a-net"])
@pytest.mark.parametrize("rest", ["b1", ""], ids=["another serves", "none is left"])
def test_connected_sockets_are_aborted_when_their_backend_stops(dns: Dns, client: str, host: str, rest: str) -> None:
    assert dns.connect(client, host) == "a1"
    dns.backends(rest)
    dns.cut(client, host)
    after = dns.cluster[client].udp(host, 80, connected=True)
    assert after.get("name", after.get("error")) == (rest or REFUSED)


@finds_sockets
def test_a_backend_connected_to_itself_is_aborted_too(dns: Dns) -> None:
    assert dns.connect("a1") == "a1"
    dns.backends("")
    dns.cut("a1")


@finds_sockets
def test_a_deleted_service_aborts_its_sockets(dns: Dns) -> None:
    assert dns.connect("a3") == "a1"
    dns.cluster.delete(*dns.cluster.web(150, "a1", "UDP", dual=True))
    dns.cluster.settle()
    dns.cut("a3")
    assert dns.cluster["a3"].udp(HOST, 80, connected=True)["error"] == UNSERVED


@finds_sockets
def test_sockets_of_other_backends_are_not_aborted(dns: Dns) -> None:
    """Sockets with a backend that still serves, with one that drains, and sockets connected to a
    removed backend's own address without a Service.
    """
    assert dns.connect("a2") == "a1"
    dns.backends("b1")
    dns.cut("a2")
    assert dns.connect("a3") == "b1"
    direct = dns.cluster["b1"].ip
    assert dns.connect("b2", direct, 8080) == "b1"
    dns.backends("b1/draining a1")
    dns.alive("a3", "b1")
    assert dns.connect("a3") == "a1"
    dns.backends("a1")
    dns.alive("a3", "a1")
    dns.alive("b2", "b1", direct)


@pytest.mark.parametrize("host", [HOST, HOST6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("client", ["a3", "host-1"])
def test_unconnected_sockets_change_to_a_serving_backend(dns: Dns, client: str, host: str) -> None:
    """The same socket throughout; replies come from the Service's address."""
    place = dns.cluster[client]
    for backend in ("a1", "b1", "a2"):
        dns.backends(backend)
        moved(place, host, backend)
    dns.backends("")
    until("datagrams are refused", lambda: ask(place, host).get("error") == REFUSED)
    dns.backends("b2")
    moved(place, host, "b2")
    place.ask("drop", keep="one")


def moved(place: Place, host: str, backend: str) -> None:
    until(f"{backend} answers", lambda: ask(place, host).get("name") == backend)
    assert ask(place, host)["peer"] == [host, 80]


def ask(place: Place, host: str) -> dict[str, object]:
    return place.udp(host, 80, keep="one")


def test_an_unconnected_socket_stays_while_its_backend_serves(dns: Dns) -> None:
    place = dns.cluster["a3"]
    assert ask(place, HOST)["name"] == "a1"
    dns.backends("a1 a2 b1 b2")
    assert {ask(place, HOST)["name"] for _ in range(30)} == {"a1"}
    place.ask("drop", keep="one")
