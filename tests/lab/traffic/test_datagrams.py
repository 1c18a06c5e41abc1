# SPDX-License-Identifier: Apache-2.0
"""UDP sockets whose backend stops serving. UDP has no FIN: the agent has to abort the sockets.
Which sockets these are: tests/programs/sockets/udp.
"""

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.features import needs
from tests.support.lab.dial import REFUSED, UNSERVED
from tests.support.lab.lab import until

HOST, HOST6, MAPPED = "10.96.0.150", "fd00:10:96::150", "::ffff:10.96.0.150"
finds_sockets = needs("socket_iterator")
"""The agent finds the sockets of a backend with this iterator."""


@pytest.fixture
def dns(cluster: Cluster) -> Iterator[Cluster]:
    """A UDP Service of both families, with the backend a1."""
    with cluster.given(*cluster.web(150, "a1", "UDP", dual=True)):
        yield cluster


def become(dns: Cluster, who: str) -> None:
    """Replaces the endpoints and waits until they are programmed."""
    dns.change(*dns.web(150, who, "UDP", dual=True)[1:])


def begin(dns: Cluster, client: str, host: str) -> None:
    """A connected socket with the backend a1, which stays open."""
    assert dns[client].udp(host, 80, keep="one", connected=True)["name"] == "a1"


def end(dns: Cluster, client: str, host: str) -> str:
    """The socket is aborted: a blocked receiver wakes up, a sender's call fails. Returns what a new
    socket gets.
    """
    place = dns[client]
    assert place.ask("hear", keep="one") == {"error": "ECONNABORTED"}
    assert "error" in place.ask("talk", keep="one")
    place.ask("drop", keep="one")
    after = place.udp(host, 80, connected=True)
    return after.get("name", after.get("error"))


CLIENTS = [("a3", HOST, "b1"), ("b2", HOST6, ""), ("host-1", MAPPED, "b1"), ("a-net", HOST6, "b1"), ("a1", HOST, "")]
"""Client, the address it dials, and who serves next; a1 is its own backend."""


@finds_sockets
@pytest.mark.parametrize(("client", "host", "rest"), CLIENTS)
def test_connected_sockets_are_aborted_when_their_backend_stops(dns: Cluster, client: str, host: str, rest: str):
    begin(dns, client, host)
    become(dns, rest)
    assert end(dns, client, host) == (rest or REFUSED)


@finds_sockets
def test_a_deleted_service_aborts_its_sockets(dns: Cluster):
    begin(dns, "a3", HOST)
    dns.delete(*dns.web(150, "a1", "UDP", dual=True))
    dns.settle()
    assert end(dns, "a3", HOST) == UNSERVED


@pytest.mark.parametrize(("client", "host"), [("a3", HOST), ("host-1", HOST6)])
def test_unconnected_sockets_change_to_a_serving_backend(dns: Cluster, client: str, host: str):
    """The same socket throughout; replies come from the Service's address."""

    def ask() -> dict[str, object]:
        return dns[client].udp(host, 80, keep="one")

    for backend in ("a1", "b1", "", "b2"):
        become(dns, backend)
        if backend:
            until(f"{backend} answers", lambda name=backend: ask().get("name") == name)
            assert ask()["peer"] == [host, 80]
        else:
            until("datagrams are refused", lambda: ask().get("error") == REFUSED)
    dns[client].ask("drop", keep="one")
