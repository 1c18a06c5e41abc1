# SPDX-License-Identifier: Apache-2.0
"""Many connections and datagrams through NodePorts while backends come and go; and what happens
when the ports for masqueraded connections, or the flow maps, are exhausted.
"""

import socket
from collections.abc import Iterator

import pytest

from kbpf.dataplane.bpf.maps.layout import MAPS, Reason
from tests.support.cluster.kube_objects import slice_port
from tests.support.lab.field import FORWARDINGS, Field, at, both_families, forward, split, there
from tests.support.lab.lab import Agent, Place, until
from tests.support.lab.load import under_load

CONNECTIONS = 20_000
CLIENTS = ("outside", "out-2", "out-3")
PODS = "a1 a2 b1 b2"
POD_UDP = slice_port(8080, protocol="UDP")


def clients(field: Field) -> None:
    """More client processes on the outside machine."""
    for name in CLIENTS[1:]:
        here = field["outside"]
        field.unhook(name, here.netns, here.ip, here.ip6, field.lab.nodes[0])


@pytest.fixture(scope="module", params=FORWARDINGS)
def field(request: pytest.FixtureRequest) -> Iterator[Field]:
    """A backend that closes first keeps the client's port in TIME_WAIT for a minute. It may answer
    the next SYN from that port with an ACK of the old connection, which costs a second. A larger
    port range makes such reuse rare.
    """
    ports = ("--masquerade-ports", "32768-65535")
    with Field(*forward(request.param), *ports, name="ch", pods=(2, 2)) as made:
        clients(made)
        yield made


# ---- connections ---------------------------------------------------------------------------------

TURNS: tuple[tuple[str, str], ...] = (
    ("a1 b1", ""),
    ("a1/draining b1 a2", ""),
    ("b1 a2", "restart"),
    ("b1/draining a2 b2", "kill"),
    ("a2 b2", "larger maps"),
    ("a2/draining b2/draining", ""),
    ("a1 b2/draining", "kill"),
    ("a1 a2 b1 b2", ""),
)
"""Which backends serve, and what is done to the agent. After a kill the maps are of default size.
"""


def restart(agent: Agent, how: str) -> None:
    if not how:
        return
    (agent.kill if how == "kill" else agent.stop)()
    agent.start(extra=("--max-connections", "200000") if how == "larger maps" else ())


def test_no_connection_fails_while_endpoints_and_agents_change(field: Field) -> None:
    """Short connections from several processes; none may fail, whichever backend answers."""
    others = [obj for number in range(100, 180) for obj in field.web(number, "a1", node_port=None)]
    each = CONNECTIONS // len(TURNS) // len(CLIENTS)
    with field.given(*field.all_ways(71, TURNS[0][0])):
        host, port = split(at("NodePort", 71))
        with under_load(field, host, *CLIENTS, port=port, answers=PODS, pause=0.0) as load:
            for number, (who, what) in enumerate(TURNS):
                field.create(*others[number * 20 : number * 20 + 20])
                field.change(field.slice("web-71", who))
                restart(field.agent, what)
                load.goes_on(each)
    field.delete(*others)


PORTS = 64


@pytest.mark.parametrize("how", FORWARDINGS)
def test_with_all_masquerade_ports_taken_new_connections_get_none(how: str) -> None:
    """The 65th connection gets no port and is counted, the others continue, and the port of a
    closed connection is reused.
    """
    ports = f"61000-{61000 + PORTS - 1}"
    with Field(*forward(how), "--masquerade-ports", ports, name="px", pods=(1, 1)) as field:
        field.create(*field.all_ways(72, "b1"))
        field.settle()
        client, to = field["outside"], split(at("NodePort", 72))
        names = []
        # Ports are tried at random: with few free ones a try may find none, which is counted.
        while len(names) < PORTS:
            name = f"c{len(names)}"
            if "name" in client.tcp(*to, keep=name, timeout=30.0):
                names.append(name)
        before = field.agent.reasons()[Reason.NO_SNAT_PORT]
        assert "error" in client.tcp(*to, timeout=0.5)
        assert field.agent.reasons()[Reason.NO_SNAT_PORT] > before
        for name in names:
            assert client.ask("talk", keep=name).get("name") == "b1"
        for name in names[: PORTS // 2]:
            client.ask("drop", keep=name)
        assert client.tcp(*to, timeout=30.0).get("name") == "b1"
        for name in names[PORTS // 2 :]:
            assert client.ask("talk", keep=name).get("name") == "b1"


FULL = 1000
"""The smallest --max-connections that the agent accepts."""


@pytest.mark.parametrize("how", FORWARDINGS)
def test_full_flow_maps_accept_new_connections_and_keep_used_ones(how: str) -> None:
    """New connections always work and connections in use stay, because closed ones are evicted."""
    with Field(*forward(how), "--max-connections", str(FULL), name="fm", pods=(1, 1)) as field:
        field.create(*field.all_ways(73, "a1"), *field.all_ways(74, "b1"))
        field.settle()
        client = field["outside"]
        ends = [split(at("NodePort", number)) for number in (73, 74)]
        used = {f"used-{number}": to for number, to in enumerate(ends * 4)}
        for name, to in used.items():
            assert "name" in client.tcp(*to, keep=name)
        for _ in range(2 * FULL // 100):
            for to in ends:
                got = client.many(50, *to)
                assert got["errors"] == {}, got
            for name in used:
                assert "name" in client.ask("talk", keep=name)
        room = FULL * MAPS["flows"].entries_per_object
        assert room >= len(field.agent.entries("flows")) > room // 2, "the map must be full, or nothing is tested"


# ---- datagrams -----------------------------------------------------------------------------------

DATAGRAMS, SOCKETS = 10_000, 500


@both_families
@pytest.mark.parametrize("name", ["a1", "b1"], ids=["local", "remote"])
def test_datagrams_from_many_ports_are_answered_at_their_sockets(field: Field, name: str, v6: bool) -> None:
    """Each is answered at the socket that sent it, and the backend gets as many as were sent."""
    backend = field[name]
    before = backend.ask("seen")["udp"].get("8080", 0)
    number = {"a1": 75, "b1": 79}[name]  # separate Services: no shared flows
    with field.given(*field.all_ways(number, name, "UDP")):
        host, port = split(at("NodePort", number, v6))
        got = field["outside"].ask(
            "datagrams", host=host, port=port, family="6" if v6 else "4", sockets=SOCKETS, each=DATAGRAMS // SOCKETS
        )
        assert got == {"names": {name: DATAGRAMS}, "errors": {}}
    assert backend.ask("seen")["udp"]["8080"] == before + DATAGRAMS


def test_new_flows_avoid_a_draining_backend(field: Field) -> None:
    client = field["outside"]
    with field.given(*field.all_ways(76, "b1", "UDP")):
        to = split(at("NodePort", 76))
        assert client.udp(*to, keep="old", connected=True).get("name") == "b1"
        field.change(field.slice("web-76", "b1/draining a1", POD_UDP))
        assert client.ask("talk", keep="old").get("name") == "b1", "a draining backend keeps its flows"
        assert client.many(20, *to, protocol="udp", connected=True)["names"] == {"a1": 20}
        field.change(field.slice("web-76", "a1", POD_UDP))
        until("the old flow changes backend", lambda: client.ask("talk", keep="old").get("name") == "a1")
        client.ask("drop", keep="old")


def bound(place: Place, v6: bool, port: int) -> socket.socket:
    """A UDP socket bound to this port in the place's network."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM)
        made.settimeout(30)
        made.bind(("::" if v6 else "0.0.0.0", port))
        return made

    return there(place, make)


FRAGMENTED = 7001


@both_families
@pytest.mark.parametrize("name", ["a1", "b1"], ids=["local", "remote"])
def test_fragmented_datagrams_are_translated(field: Field, name: str, v6: bool) -> None:
    """8 kB each way, in six fragments, of which only the first has ports."""
    service, *_ = field.all_ways(77, "", "UDP")
    port = slice_port(FRAGMENTED, protocol="UDP")
    ends = (field.slice("web-77", name, port, v6=six) for six in (False, True))
    own = field.lab.nodes[0].ip6 if v6 else field.lab.nodes[0].ip
    with (
        field.given(service, *ends),
        bound(field[name], v6, FRAGMENTED) as server,
        bound(field["outside"], v6, 0) as client,
    ):
        client.connect(split(at("NodePort", 77, v6)))
        for number in range(50):
            asked = bytes([number]) * 8192
            client.send(asked)
            heard, peer, *_ = server.recvfrom(10_000)
            assert heard == asked
            assert peer[0] == own
            server.sendto(asked[::-1] + b"!", peer)
            assert client.recv(10_000) == asked + b"!"
