# SPDX-License-Identifier: Apache-2.0
"""Many connections through NodePorts while backends come and go, and datagrams in fragments. What
happens when the ports for masqueraded connections or the flow maps are exhausted:
tests/programs/packets/path and tests/programs/maps/flows; many datagrams: tests/fuzz/floods.
"""

import socket
from collections.abc import Iterator

import pytest

from tests.support.lab.field import WITH_CONNTRACK, Field, at, forward, split, there
from tests.support.lab.lab import Agent, Place
from tests.support.lab.load import under_load

CONNECTIONS = 2_000
CLIENTS = ("outside", "out-2", "out-3")
PODS = "a1 a2 b1 b2"


def clients(field: Field) -> None:
    """More client processes on the outside machine."""
    for name in CLIENTS[1:]:
        here = field["outside"]
        field.unhook(name, here.netns, here.ip, here.ip6, field.lab.nodes[0])


@pytest.fixture(scope="module", params=WITH_CONNTRACK[::2])
def field(request) -> Iterator[Field]:
    """A backend that closes first keeps the client's port in TIME_WAIT for a minute. It may answer
    the next SYN from that port with an ACK of the old connection, which costs a second. A larger
    port range makes such reuse rare; conntrack takes the ports above it.
    """
    ports = () if request.param == "netfilter" else ("--masquerade-ports", "32768-65535")
    with Field(*forward(request.param), *ports, name="ch", pods=(2, 2)) as made:
        clients(made)
        yield made


# ---- connections ---------------------------------------------------------------------------------

TURNS: tuple[tuple[str, str], ...] = (
    ("a1 b1", ""),
    ("a1/draining b1 a2", "restart"),
    ("a2/draining b2/draining", "kill"),
    ("a1 b2/draining", "larger maps"),
    ("a1 a2 b1 b2", "kill"),
)
"""Which backends serve, and what is done to the agent. After a kill the maps are of default size.
"""


def restart(agent: Agent, how: str) -> None:
    if not how:
        return
    (agent.kill if how == "kill" else agent.stop)()
    agent.start(extra=("--max-connections", "200000") if how == "larger maps" else ())


def test_no_connection_fails_while_endpoints_and_agents_change(field: Field):
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


# ---- datagrams -----------------------------------------------------------------------------------


def bound(place: Place, v6: bool, port: int) -> socket.socket:
    """A UDP socket bound to this port in the place's network."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM)
        made.settimeout(30)
        made.bind(("::" if v6 else "0.0.0.0", port))
        return made

    return there(place, make)


FRAGMENTED = 7001


@pytest.mark.parametrize(("name", "v6"), [("a1", True), ("b1", False)])
def test_fragmented_datagrams_are_translated(field: Field, name: str, v6: bool):
    """8 kB each way, in six fragments, of which only the first has ports."""
    own = field.lab.nodes[0].ip6 if v6 else field.lab.nodes[0].ip
    with (
        field.given(*field.all_ways(77, name, "UDP", target=FRAGMENTED)),
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
