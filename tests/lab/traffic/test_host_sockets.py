"""Sockets of the node itself that the hooks leave alone: the packet path serves them as they leave.

With `--socket-lb off` that is all of them; with `on` those that dial a VIP with source ranges.
Every device has a strict reverse path filter. The node has its default route, by which packets for
a Service leave.
"""

from collections.abc import Iterator
from itertools import product

import pytest

from kbpf.dataplane.bpf.maps.layout import ConfigFlag, Reason
from tests.support.cluster.cluster import HOST_PORT, UNROUTED
from tests.support.cluster.kube_objects import slice_port
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import DROPPED, NODES4, NODES6, Field, at, both_families, check, split
from tests.support.lab.lab import Agent, inside, ip, until
from tests.support.lab.lab import run as command

OFF, ON = "off", "on"
STRICT = "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $f; done"
NOT_IN = ["198.51.100.0/24", "2001:db8:9::/64"]
NODE_1 = ["198.18.0.1/32", "fd00:198:18::1/128"]
POD_2 = ["10.244.1.3/32", "fd00:10:244:1::3/128"]


@pytest.fixture(scope="module", params=[OFF, ON])
def field(request: pytest.FixtureRequest) -> Iterator[Field]:
    """Local (11), remote (12), both (13), Local (14), none (16), in the node's network (17), and
    for whom the VIP is: nobody here (18), the node (19), the pod a2 (20). UDP + 20.
    """
    with Field("--socket-lb", request.param, name="hs", pods=(2, 1)) as made:
        for base, protocol in ((10, "TCP"), (30, "UDP")):
            for number, who in ((1, "a1"), (2, "b1"), (3, "a1 b1"), (6, "")):
                made.create(*made.all_ways(base + number, who, protocol))
            made.create(*made.all_ways(base + 4, "b1", protocol, external_policy="Local"))
            made.create(made.all_ways(base + 7, "", protocol)[0])
            port = slice_port(HOST_PORT, protocol=protocol)
            slices = (made.slice(f"web-{base + 7}", "a-net", port, v6=v6) for v6 in (False, True))
            made.create(*slices)
            for number, ranges in ((8, NOT_IN), (9, NODE_1), (10, POD_2)):
                made.create(*made.all_ways(base + number, "a1 b1", protocol, source_ranges=ranges))
        made.settle()
        for node in made.lab.nodes:
            ip(*(f"route del unreachable {net}" for net in UNROUTED), netns=node.netns)
            command(*inside(node.netns, None, "sh", "-c"), STRICT)
        yield made


def rows(v6: bool) -> Iterator[Dial]:
    """What a process of node-1 dials. It is seen as the node: that is its own address."""
    say, own = ("v6", NODES6[0]) if v6 else ("v4", NODES4[0])
    for protocol, base in (("tcp", 10), ("udp", 30)):

        def row(what: str, kind: str, number: int, outcome: str) -> Dial:
            to = at(kind, base + number, v6)  # noqa: B023
            return Dial(f"{say} {kind}: {what}", "host-1", to, outcome, protocol, own)  # noqa: B023

        for kind in ("ClusterIP", "ExternalIP", "VIP"):
            yield row("a pod of this node", kind, 1, "a1")
            yield row("one of another node", kind, 2, "b1")
            yield row("both", kind, 3, "a1 b1")
            yield row("no endpoints", kind, 6, REFUSED)
        yield row("Local, none here: the node is no stranger", "VIP", 4, "b1")
        unknown = at("ClusterIP", base + 1, v6).removesuffix(":80") + ":81"
        yield Dial(f"{say} unknown port", "host-1", unknown, REFUSED, protocol)
        yield row("not for all, the node is among them", "VIP", 9, "a1 b1")
        yield row("not for all, nor for the node", "VIP", 8, DROPPED)
        yield row("ranges are not for ClusterIPs", "ClusterIP", 8, "a1 b1")
        yield row("ranges are not for external IPs", "ExternalIP", 8, "a1 b1")


@both_families
@pytest.mark.parametrize("field", [OFF], indirect=True)
def test_a_process_of_the_node(field: Field, v6: bool) -> None:
    for row in rows(v6):
        check(field, row)


@both_families
@pytest.mark.parametrize("field", [OFF], indirect=True)
def test_a_node_port_of_another_node(field: Field, v6: bool) -> None:
    """Nobody translates here: that node sees who asks from outside."""
    own = NODES6[1] if v6 else NODES4[1]
    for protocol, base in (("tcp", 10), ("udp", 30)):
        to = at("NodePort", base + 1, v6, 2)
        check(field, Dial("the other node", "host-1", to, "a1", protocol, own))


@both_families
@pytest.mark.parametrize("field", [OFF], indirect=True)
def test_what_never_leaves_by_a_device_is_not_served(field: Field, v6: bool) -> None:
    """docs/limits.md has it: a NodePort of the node itself, a backend in the node's network."""
    for protocol, base in (("tcp", 10), ("udp", 30)):
        to = at("NodePort", base + 1, v6)
        check(field, Dial("an own NodePort", "host-1", to, REFUSED, protocol))
        for kind in ("ClusterIP", "VIP"):
            before = field.agent.reasons()[Reason.NO_ROUTE]
            to = at(kind, base + 7, v6)
            check(field, Dial("an own port", "host-1", to, DROPPED, protocol))
            assert field.agent.reasons()[Reason.NO_ROUTE] > before


@both_families
@pytest.mark.parametrize("field", [ON], indirect=True)
@pytest.mark.parametrize("who", ["host-1", "a2"])
def test_connect_of_udp_fails_for_no_port(field: Field, v6: bool, who: str) -> None:
    """So ping (1025) and getaddrinfo() (musl's: 65535) learn their own address. Who sends something
    there is refused by the packet path.
    """
    until("it is known to serve", lambda: ConfigFlag.PACKET_PATH in config_flags(field.agent))
    host, _ = split(at("ClusterIP", 11, v6))
    for port in (1025, 65535, 80):  # 80 is TCP's
        before = field.agent.reasons()[Reason.UNKNOWN_PORT]
        answer = field[who].udp(host, port, connected=True)
        assert answer == {"error": REFUSED, "at_once": False}, field.agent.tail(5)
        assert field.agent.reasons()[Reason.UNKNOWN_PORT] == before + 1


def config_flags(agent: Agent) -> ConfigFlag:
    (raw,) = agent.entries("config").values()
    return ConfigFlag(int.from_bytes(raw[8:12], "little"))


LETS_IN = {9: ("host-1",), 10: ("a2", "a2!")}


@both_families
@pytest.mark.parametrize("field", [ON, OFF], indirect=True)
def test_a_vip_with_ranges_is_served_by_packet(field: Field, v6: bool) -> None:
    """The hooks let it pass, since connect() knows no source yet: a hooked pod, one that is not and
    the node itself are judged by their packets. To a VIP all are seen as the node.
    """
    own = NODES6[0] if v6 else NODES4[0]
    rows = product(("host-1", "a2", "a2!"), LETS_IN, (("tcp", 10), ("udp", 30)))
    for who, number, (protocol, base) in rows:
        lets_in = who in LETS_IN[number]
        outcome = "a1 b1" if lets_in else DROPPED
        before = field.agent.reasons()
        check(field, Dial(f"{who}, {number}", who, at("VIP", base + number, v6), outcome, protocol,
                          own))  # fmt: skip
        news = field.agent.reasons() - before
        assert news[Reason.NEW_FLOW if lets_in else Reason.NOT_ALLOWED] > 0
