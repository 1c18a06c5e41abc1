# SPDX-License-Identifier: Apache-2.0
"""Which packets bypass the node's netfilter, for each `--forwarding`.

On node-1 every netfilter hook counts packets, a table in which the agent keeps no rule drops all
forwarded packets, and every device has a strict reverse path filter.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.inspect.connections import format_target
from kbpf.dataplane.bpf.maps.flow_entries import CLIENT, FRONTEND
from kbpf.dataplane.bpf.maps.layout import Reason
from tests.lab.outside.netfilter import flush_conntrack
from tests.support.lab.dial import Dial
from tests.support.lab.field import (
    DROPPED,
    NODES4,
    NODES6,
    OUT4,
    OUT6,
    WITH_CONNTRACK,
    Field,
    at,
    both_families,
    check,
    forward,
    split,
    there,
)
from tests.support.lab.lab import inside
from tests.support.lab.lab import run as command
from tests.support.packets.judge import checksums
from tests.support.packets.wire import Wire

DIRECT, NETFILTER = "direct", "netfilter"
LOW, HIGH = 61000, 61099
HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
STRICT = "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $f; done"
RULESET = "\n".join(
    (
        "table inet closed {",
        *(
            f"chain {hook} {{ type filter hook {hook} priority -300; meta l4proto {{ tcp, udp }} counter; }}"
            for hook in HOOKS
        ),
        "chain shut { type filter hook forward priority 0; policy drop; }",
        "}",
    )
)


class Way(NamedTuple):
    """A row, and the `--forwarding` settings with which it bypasses the stack. With the other
    settings netfilter drops it.
    """

    row: Dial
    past: frozenset[str]


class Forwarding(Field):
    """A field that knows its `--forwarding` setting."""

    def __init__(self, how: str) -> None:
        super().__init__(*forward(how), "--masquerade-ports", f"{LOW}-{HIGH}", name="fw", pods=(2, 1))
        self.how = how


@pytest.fixture(scope="module", params=WITH_CONNTRACK)
def field(request: pytest.FixtureRequest) -> Iterator[Forwarding]:
    """A local backend (11), remote (12), local with policy Local (13); UDP at number + 10."""
    with Forwarding(request.param) as made:
        for base, protocol in ((10, "TCP"), (20, "UDP")):
            made.create(*made.all_ways(base + 1, "a1", protocol))
            made.create(*made.all_ways(base + 2, "b1", protocol))
            made.create(*made.all_ways(base + 3, "a1", protocol, external_policy="Local"))
        made.settle()
        for node in made.lab.nodes:
            command(*inside(node.netns, None, "sh", "-c"), STRICT)
        yield made


@pytest.fixture
def shut(field: Forwarding) -> Iterator[None]:
    """netfilter on node-1 drops all forwarded packets."""
    node = field.lab.nodes[0].netns
    command(*inside(node, None, "nft", "-f", "-"), stdin=RULESET)
    yield
    command(*inside(node, None, "nft", "delete", "table", "inet", "closed"))


def met(field: Field) -> int:
    """How many packets node-1's netfilter hooks have counted."""
    node = field.lab.nodes[0].netns
    listed = command(*inside(node, None, "nft", "list", "table", "inet", "closed"))
    return sum(map(int, re.findall(r"counter packets (\d+)", listed)))


def ways(v6: bool) -> Iterator[Way]:
    """Masqueraded connections to other nodes bypass the stack, unless conntrack translates them."""
    own, client, say = (NODES6[0], OUT6, "v6") if v6 else (NODES4[0], OUT4, "v4")
    pod = "fd00:10:244:1::3" if v6 else "10.244.1.3"
    always, direct = frozenset(WITH_CONNTRACK) - {NETFILTER}, frozenset((DIRECT,))
    for protocol, base in (("tcp", 10), ("udp", 20)):

        def way(what: str, who: str, kind: str, number: int, outcome: str, sees: str, past: frozenset[str]) -> Way:
            to = at(kind, base + number, v6)  # noqa: B023
            return Way(Dial(f"{say} {what}", who, to, outcome, protocol, sees), past)  # noqa: B023

        for kind in ("NodePort", "ExternalIP", "VIP"):
            yield way(f"{kind}, another node", "outside", kind, 2, "b1", own, always)
        yield way("a pod of this node", "outside", "NodePort", 1, "a1", own, direct)
        yield way("policy Local", "outside", "VIP", 3, "a1", client, direct)
        yield way("a pod to itself", "a1!", "ClusterIP", 1, "a1", own, direct)
        yield way("a pod to its neighbour", "a2!", "ClusterIP", 1, "a1", pod, direct)
        yield way("a pod to another node's", "a2!", "ClusterIP", 2, "b1", pod, direct)
        yield way("a pod by a NodePort", "a2!", "NodePort", 2, "b1", own, direct)


@both_families
@pytest.mark.usefixtures("shut")
def test_which_packets_bypass_a_closed_forward_chain(field: Forwarding, v6: bool):
    for row, past in ways(v6):
        before = met(field)
        if field.how in past:
            check(field, row)
            assert met(field) == before, f"{row.name}: netfilter must not see it"
        else:
            check(field, Dial(row.name, row.client, row.to, DROPPED, row.protocol))
            assert met(field) > before, f"{row.name}: netfilter must drop it"


def clients_of(field: Field, to: str) -> set[str]:
    """The clients of the tracked connections to this frontend."""
    flows = field.agent.entries("flows").values()
    return {format_target(raw[CLIENT]) for raw in flows if format_target(raw[FRONTEND]) == to}


HOPS = {"a1": 1, "b1": 2}
"""How many nodes are on the path to each pod."""


@both_families
@pytest.mark.parametrize(("base", "protocol"), [(10, "tcp"), (20, "udp")])
@pytest.mark.parametrize(("number", "who"), [(1, "a1"), (2, "b1"), (3, "a1")])
def test_each_node_lowers_the_ttl_once(field: Forwarding, number: int, who: str, base: int, protocol: str, v6: bool):
    """On every path the TTL falls by one per node, checksums are right, masqueraded packets have a
    port of the node, and each connection has one flow. Successive connections may get the same node
    port, or a client port that was used before.
    """
    own, client = (NODES6[0], OUT6) if v6 else (NODES4[0], OUT4)
    sees = client if number == 3 else own
    to = at("NodePort", base + number, v6)
    there(field.lab.nodes[0], flush_conntrack)
    before, known = field.agent.reasons()[Reason.NEW_FLOW], clients_of(field, to)
    with (
        Wire(field.lab.outside, field.lab.prefix, tap=True) as here,
        Wire(field[who].netns, "eth0", tap=True) as behind,
    ):
        check(field, Dial("each hop", "outside", to, who, protocol, sees))
        pod = field[who].ip6 if v6 else field[who].ip
        clients = {p.source for p in here.heard if p.protocol == protocol and p.destination == to}
        asked = here.expect(lambda p: p.protocol == protocol and p.destination == to)
        answered = here.expect(lambda p: p.protocol == protocol and p.source == to)
        sources = {split(p.source) for p in behind.heard if p.protocol == protocol and split(p.destination)[0] == pod}
        arrived = behind.expect(lambda p: p.protocol == protocol and split(p.destination)[0] == pod)
        left = behind.expect(lambda p: p.protocol == protocol and split(p.source)[0] == pod)
        assert [checksums(p) for p in (asked, arrived, left, answered)] == [[], [], [], []]
        assert asked.ip.ttl - arrived.ip.ttl == HOPS[who]
        assert left.ip.ttl - answered.ip.ttl == HOPS[who]
        assert field.agent.reasons()[Reason.NEW_FLOW] - before == len(clients - known)
        assert {address for address, _ in sources} == {sees}
        ports = {split(client)[1] for client in clients}
        if number == 3:
            assert sources == set(map(split, clients)), "without masquerading the client's port is kept"
        elif field.how == NETFILTER:
            assert {port for _, port in sources} == ports, "conntrack keeps a port that is free"
        else:
            assert all(LOW <= port <= HIGH for _, port in sources), sources


@pytest.mark.usefixtures("shut")
def test_direct_connections_are_counted_by_netfilter(field: Forwarding):
    """Direct connections are counted and dropped, so a count of 0 elsewhere means something."""
    for protocol in ("tcp", "udp"):
        before = met(field)
        field["a2!"].many(1, field["b1"].ip, 8080, protocol=protocol, timeout=0.2)
        assert met(field) > before
