# SPDX-License-Identifier: Apache-2.0
"""A device with addresses of several subnets: each backend sees the address that a MASQUERADE rule would choose for it.

node-2 and node-3 know one subnet of node-1 each. IPv4: their next hops are in different subnets. IPv6: their pods'
addresses have more bits in common with different addresses of node-1 (RFC 6724, 5).
"""

from collections.abc import Iterator

import pytest

from tests.lab.outside.netfilter import nft_table
from tests.support.lab.dial import Dial
from tests.support.lab.field import NODES4, NODES6, OUT4, WITH_CONNTRACK, Field, at, check, crossed, forward
from tests.support.lab.lab import ip, set_rp_filter, settled, until

SECOND4 = "172.30.5.1"
SEES = {"b1": ("198.18.0.1", "fd00:10:244:2:8000::1"), "c1": (SECOND4, "fd00:10:244:3:8000::1")}
NUMBERS = {"b1": 11, "c1": 12}
JUDGED = 31_990


class SeveralSubnets(Field):
    def prepare(self) -> None:
        first, second, third = (node.netns for node in self.lab.nodes)
        ip(
            "addr del 198.18.0.1/24 dev eth0",
            f"addr add {SECOND4}/24 dev eth0",
            "addr add 198.18.0.1/24 dev eth0",
            "addr add fd00:10:244:2:8000::1/80 dev eth0 nodad",
            "addr add fd00:10:244:3:8000::1/80 dev eth0 nodad",
            "route replace default via 198.18.0.254",
            "route add 10.244.2.0/24 via 198.18.0.2",
            "route add 10.244.3.0/24 via 172.30.5.3 onlink dev eth0",
            netns=first,
        )
        ip(
            "addr add fd00:10:244:2:8000::2/80 dev eth0 nodad",
            "route add unreachable 172.30.5.0/24",
            "route add unreachable fd00:10:244:3:8000::/80",
            netns=second,
        )
        ip(
            "addr add 172.30.5.3/24 dev eth0",
            "addr add fd00:10:244:3:8000::3/80 dev eth0 nodad",
            "route add unreachable 198.18.0.1/32",
            "route add unreachable fd00:10:244:2:8000::/80",
            netns=third,
        )
        for where, address in ((second, "2::2"), (third, "3::3"), (first, "2::1"), (first, "3::1")):
            settled(where, f"fd00:10:244:{address.replace('::', ':8000::')}")
        for where in (first, second, third):
            set_rp_filter(where, 1)


@pytest.fixture(scope="module", params=WITH_CONNTRACK)
def field(request: pytest.FixtureRequest) -> Iterator[SeveralSubnets]:
    with SeveralSubnets(*forward(request.param), name="sn", pods=(1, 1, 1), agents=1) as made:
        ip("route replace 10.96.0.0/16 via 198.18.0.254", netns=made.lab.nodes[0].netns)
        made.unhook("host!", made.lab.nodes[0].netns, NODES4[0], NODES6[0], made.lab.nodes[0])
        made.create(*made.all_of("\n".join(f"{n} {n + 10}:UDP -> {who}" for who, n in NUMBERS.items())))
        made.settle()
        yield made


def judged(field: Field, who: str, v6: bool) -> str:
    """The client that the pod sees behind a MASQUERADE rule."""
    pod = field[who]
    family, to, node = ("ip6", f"[{pod.ip6}]", NODES6[0]) if v6 else ("ip", pod.ip, NODES4[0])
    rule = f"tcp dport {JUDGED} ct mark set 7 dnat {family} to {to}:8080"
    rules = f"""
        chain pre {{ type nat hook prerouting priority dstnat; {rule}; }}
        chain post {{ type nat hook postrouting priority srcnat; ct mark 7 masquerade; }}"""
    with nft_table(field.lab.nodes[0], "inet judge", rules):
        return field["outside"].tcp(node, JUDGED)["client"]


@crossed
@pytest.mark.parametrize("who", NUMBERS)
def test_the_backend_sees_what_masquerade_would_choose(field: SeveralSubnets, who: str, protocol: str, v6: bool):
    number, own = NUMBERS[who] + (10 if protocol == "udp" else 0), SEES[who][v6]
    assert judged(field, who, v6) == own
    check(field, Dial("a client outside", "outside", at("NodePort", number, v6), who, protocol, own))
    if not v6:
        check(field, Dial("the node", "host!", at("ClusterIP", number), who, protocol, own))


def test_an_address_that_is_added_later_serves_new_connections(field: SeveralSubnets):
    """The kernel now lists it after the Node's."""
    node, (host, number) = field.lab.nodes[0], (NODES4[0], 30_000 + NUMBERS["c1"])
    where = {"netns": node.netns}
    ip(f"addr del {SECOND4}/24 dev eth0", "addr add 172.30.6.1/24 dev eth0", **where)
    ip("route replace 10.244.3.0/24 via 172.30.5.3 onlink dev eth0", **where)
    try:
        until("c1 sees no address of its subnet", lambda: "name" not in field["outside"].tcp(host, number, timeout=0.2))
        ip(f"addr add {SECOND4}/24 dev eth0", **where)
        until("c1 sees it", lambda: field["outside"].tcp(host, number, timeout=0.2).get("client") == SECOND4)
        assert judged(field, "c1", False) == SECOND4
    finally:
        ip("addr del 172.30.6.1/24 dev eth0", f"addr replace {SECOND4}/24 dev eth0", **where)


def test_a_rule_about_the_client_chooses_the_route(field: SeveralSubnets):
    """The kernel routes packets before it translates their source. Our own table redirects what the node sends."""
    node, other = (field.lab.nodes[number].netns for number in (0, 2))
    ip("route del unreachable 198.18.0.1/32", netns=other)
    ip("route add 10.244.3.0/24 via 198.18.0.3 dev eth0 table 77", f"rule add from {OUT4} lookup 77", netns=node)
    try:
        assert judged(field, "c1", False) == NODES4[0]
        own = NODES4[0] if "netfilter" in field.arguments else SECOND4
        check(field, Dial("a client outside", "outside", at("NodePort", NUMBERS["c1"]), "c1", "tcp", own))
    finally:
        ip(f"rule del from {OUT4}", "route flush table 77", netns=node)
        ip("route add unreachable 198.18.0.1/32", netns=other)
