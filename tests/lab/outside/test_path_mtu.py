# SPDX-License-Identifier: Apache-2.0
"""The path MTU through a Service: behind firewalld, and for the node's own sockets by packet.

firewalld.nft has firewalld's rules, of which one drops what conntrack calls invalid in FORWARD. All
sockets of the nodes are left to the packet path (`--socket-lb off`).
"""

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.lab.outside.netfilter import on
from tests.lab.outside.pod_network import (
    BULK,
    FOUND,
    OVERLAY_MTU,
    PodNetwork,
    careful,
    forget,
    learned,
    source_of,
)
from tests.support import golden
from tests.support.cluster.cluster import UNROUTED
from tests.support.cluster.kube_objects import slice_port
from tests.support.lab.dial import Dial
from tests.support.lab.field import FORWARDINGS, at, both_families, check, forward, split, there
from tests.support.lab.lab import PATIENCE, Node, ip, until
from tests.support.lab.podnet import gate
from tests.support.packets.packets import icmp_error, udp
from tests.support.packets.wire import Wire

FIREWALLD = (golden.FOLDER / "firewalls/firewalld-1.3.3-uplinks.nft").read_text()
STRICT = "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $f; done"


@pytest.fixture(
    scope="module",
    params=[(how, kind) for how in FORWARDINGS for kind in ("routers", "answers", "vxlan", "tun")],
    ids="-".join,
)
def net(request: pytest.FixtureRequest) -> Iterator[PodNetwork]:
    """Services 61 (TCP) and 62 (UDP) have the backend b1, 65 b1's bulk(), 66 a1's."""
    how, kind = request.param
    with PodNetwork(kind, "--socket-lb", "off", *forward(how)) as made:
        made.create(*made.all_ways(61, "b1"), *made.all_ways(62, "b1", "UDP"))
        for number, who in ((65, "b1"), (66, "a1")):
            made[who].ask("serve_bulk", ports=[BULK])
            service, *_ = made.all_ways(number, "")
            slices = (made.slice(f"web-{number}", who, slice_port(BULK), v6=v6) for v6 in (0, 1))
            made.create(service, *slices)
        made.settle()
        for node in made.lab.nodes:
            ip(*(f"route del unreachable {net}" for net in UNROUTED), netns=node.netns)
            if kind != "vxlan":  # there, replies take another way than requests
                on(node, "sh", "-c", STRICT)
        yield made


def behind_firewalld(test: Callable[..., None]) -> Callable[..., None]:
    """In the networks whose reverse path is symmetric: firewalld's filter of IPv6 is strict."""
    nets = [(how, kind) for how in FORWARDINGS for kind in ("routers", "answers")]
    return pytest.mark.usefixtures("firewalld")(pytest.mark.parametrize("net", nets, indirect=True, ids="-".join)(test))


@pytest.fixture
def firewalld(net: PodNetwork) -> Iterator[None]:
    for node in net.lab.nodes:
        on(node, "nft", "-f", "-", stdin=counting_invalid(FIREWALLD))
    yield
    counts = [dropped(node) for node in net.lab.nodes]
    for node in net.lab.nodes:
        on(node, "nft", "delete", "table", "inet", "firewalld")
    assert counts == [0, 0]


def counting_invalid(rules: str) -> str:
    """The rules with a counter in front of each drop of invalid packets."""
    counted = rules.replace("ct state invalid drop", "ct state invalid counter drop")
    assert counted.count("invalid counter drop") == 2
    return counted


def dropped(node: Node) -> int:
    """How many packets firewalld has dropped as invalid."""
    rules = on(node, "nft", "list", "table", "inet", "firewalld")
    return sum(map(int, re.findall(r"invalid counter packets (\d+)", rules)))


def mtu_of(net: PodNetwork) -> int:
    """The path MTU between the pods of both nodes."""
    return FOUND.get(net.kind, OVERLAY_MTU)


@contextlib.contextmanager
def narrow_route(net: PodNetwork, name: str, mtu: int) -> Iterator[None]:
    """Gives the node's routes to this pod an MTU; bpf_fib_lookup() ignores one without `lock`."""
    pod, node = net[name], net.home[name]
    routes = (
        f"{pod.ip}/32 dev p1 src {gate(node.number, False)}",
        f"{pod.ip6}/128 dev p1",
    )
    ip(*(f"route replace {route} mtu lock {mtu}" for route in routes), netns=node.netns)
    try:
        yield
    finally:
        ip(*(f"route replace {route}" for route in routes), netns=node.netns)


# ---- through a NodePort, behind firewalld --------------------------------------------------------


@both_families
@behind_firewalld
def test_a_transfer_finds_the_path_mtu_behind_firewalld(net: PodNetwork, v6: bool) -> None:
    client, host = net["outside"], split(at("NodePort", 65, v6))[0]
    forget(client, net["b1"])
    got = client.ask("bulk", host=host, port=30065, size=1 << 20, family="6" if v6 else "4")
    assert got.get("there") is True, got
    assert got.get("back") is True, got
    assert learned(client, host) == mtu_of(net)
    forget(client, net["b1"])


@both_families
@behind_firewalld
def test_a_transfer_to_a_pod_of_the_node_finds_its_mtu_behind_firewalld(net: PodNetwork, v6: bool) -> None:
    """The node's route to the pod has the MTU; the pod's device has 1500."""
    client, host = net["outside"], split(at("NodePort", 66, v6))[0]
    forget(client)
    with narrow_route(net, "a1", 1280):
        got = client.ask("bulk", host=host, port=30066, size=1 << 20, family="6" if v6 else "4")
        assert got.get("there") is True, got
        assert got.get("back") is True, got
        assert learned(client, host) == 1280
    forget(client)


@both_families
@behind_firewalld
def test_a_pod_learns_of_a_narrow_link_in_front_of_the_node(net: PodNetwork, v6: bool) -> None:
    """A router in front of node-1 says that a reply was too long. node-2 does not know that router,
    and has a strict reverse path filter.
    """
    pod, own, mtu = net["b1"], source_of(net, v6), 1290
    client = "[fd00:198:18::c8]:4700" if v6 else "198.18.0.200:4700"
    router = "fd00:198:19::c9" if v6 else "203.0.113.201"
    to = at("NodePort", 62, v6)
    forget(pod)
    with Wire(net.lab.outside, net.lab.prefix, "198.18.0.200/24", "fd00:198:18::c8/64") as wire:
        wire.send(udp(client, to, b"hello\n"))
        wire.expect(lambda p: p.source == to)
        wire.send(icmp_error("too big", router, udp(to, client, bytes(1400)), mtu=mtu))
        until("the pod learns the MTU", lambda: learned(pod, own) == mtu)
    forget(pod)


# ---- sockets of the node -------------------------------------------------------------------------


@both_families
@pytest.mark.parametrize("kind", ["ClusterIP", "VIP"])
def test_a_socket_of_the_node_has_the_address_of_the_device_to_the_backend(
    net: PodNetwork, kind: str, v6: bool
) -> None:
    """As with MASQUERADE. Both nodes have a strict reverse path filter."""
    own = source_of(net, v6)
    for number, protocol in ((61, "tcp"), (62, "udp")):
        check(net, Dial("remote", "host-1", at(kind, number, v6), "b1", protocol, own))


@both_families
def test_a_transfer_of_the_node_finds_the_path_mtu(net: PodNetwork, v6: bool) -> None:
    """The node's route to the Service has the MTU 1500, and so has the pod's device."""
    host, (vip, port) = net["host-1"], split(at("ClusterIP", 65, v6))
    forget(host, net["b1"])
    got = host.ask("bulk", host=vip, port=port, size=1 << 20, family="6" if v6 else "4")
    assert got.get("there") is True, got
    assert got.get("back") is True, got
    assert learned(host, vip) == mtu_of(net)
    forget(host, net["b1"])


@both_families
@pytest.mark.parametrize("over", [1, 22, 50])
def test_a_socket_of_the_node_gets_emsgsize(net: PodNetwork, over: int, v6: bool) -> None:
    """A datagram that is longer than the device to the backend, but not than that to the Service.
    `over`: by how many bytes. The next one, of the MTU, arrives.
    """
    host, to, mtu = net["host-1"], at("ClusterIP", 62, v6), mtu_of(net)
    headers = 48 if v6 else 28
    forget(host)
    with careful(host, v6) as s:
        s.connect(split(to))
        s.send(bytes(mtu + over - headers))
        with pytest.raises(OSError, match="Message too long"):
            s.recv(2000)
        assert learned(host, split(to)[0]) == mtu
        s.send(bytes(mtu - headers))
        assert json.loads(s.recv(2000))["name"] == "b1"
    forget(host)


@both_families
def test_a_socket_of_the_node_that_may_fragment_does_so(net: PodNetwork, v6: bool) -> None:
    """Linux's default: once the path MTU is known, the kernel sends fragments of that size."""
    host, to = net["host-1"], at("ClusterIP", 62, v6)
    family = socket.AF_INET6 if v6 else socket.AF_INET
    forget(host)
    with there(host, lambda: socket.socket(family, socket.SOCK_DGRAM)) as s:
        s.settimeout(PATIENCE)
        s.sendto(bytes(1500 - (48 if v6 else 28)), split(to))
        until("the MTU is known", lambda: learned(host, split(to)[0]) == mtu_of(net))
        s.sendto(bytes(1500 - (48 if v6 else 28)), split(to))
        data, sender = s.recvfrom(2000)
    assert json.loads(data)["name"] == "b1"
    assert sender[:2] == split(to)
    forget(host)
