# SPDX-License-Identifier: Apache-2.0
"""Pod networks between the nodes: routed, VXLAN, devices without a link header; and their MTUs,
behind firewalld, too, and for the node's own sockets, which are left to the packet path
(`--socket-lb off`). node-1 masquerades, to its InternalIP.

firewalld.nft has firewalld's rules, of which one drops what conntrack calls invalid in FORWARD.
"""

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.fuzz.packets.node import mac_of
from tests.lab.outside.netfilter import nft
from tests.lab.outside.pod_network import (
    CLIENT_BY,
    FOUND,
    OVERLAY_MTU,
    WAYS,
    PodNetwork,
    address,
    careful,
    forget,
    host_of,
    learned,
    pod_mtu,
    source_of,
    too_big,
)
from tests.support import golden
from tests.support.cluster.cluster import UNROUTED
from tests.support.lab.dial import Dial
from tests.support.lab.field import (
    BULK,
    WITH_CONNTRACK,
    at,
    both_families,
    check,
    crossed,
    forward,
    split,
    there,
    transfer,
)
from tests.support.lab.lab import PATIENCE, Node, Place, ip, on, set_rp_filter, until
from tests.support.lab.podnet import gate
from tests.support.packets.packets import icmp_error, udp
from tests.support.packets.parse import Packet, checksums
from tests.support.packets.wire import Wire

FIREWALLD = (golden.FOLDER / "firewalls/firewalld-1.3.3-uplinks.nft").read_text()
IPV6_MTU = 24
WITH_NODE_SOCKETS = ("routers", "answers", "tun", "vxlan")
"""The networks in which sockets of the node are tried."""
SERVICES = f"""
61 62:UDP -> b1
63 64:UDP -> a1
65 -> b1 target={BULK}
66 -> a1 target={BULK}
67 -> a1 b1 external=Local
"""
NETS = [
    *((how, kind) for how in WITH_CONNTRACK if how != "direct" for kind in WAYS),
    *(("direct", kind) for kind in ("routed", "answers")),
]
"""With `direct`, packets of a local backend bypass the stack, too, whatever the pod network is."""


@pytest.fixture(
    scope="module",
    params=NETS,
    ids="-".join,
)
def net(request) -> Iterator[PodNetwork]:
    how, kind = request.param
    with PodNetwork(kind, "--socket-lb", "off", *forward(how)) as made:
        if kind == "routed":
            made.client_by_devices_without_header()
        for name in ("a1", "b1"):
            made[name].ask("serve_bulk", ports=[BULK])
        made.create(*made.all_of(SERVICES))
        made.settle()
        for node in made.lab.nodes:
            ip(*(f"route del unreachable {net}" for net in UNROUTED), netns=node.netns)
            if kind in WITH_NODE_SOCKETS and kind != "vxlan":  # there, replies take another way than requests
                set_rp_filter(node.netns, 1)
        yield made


# ---- addresses on the wire -----------------------------------------------------------------------


@crossed
def test_addresses_on_the_wire_of_a_remote_backend(net: PodNetwork, protocol: str, v6: bool):
    first, second = net.lab.nodes
    client, pod = address(net["outside"], v6), address(net["b1"], v6)
    own = source_of(net, v6)
    to = at("NodePort", 61 if protocol == "tcp" else 62, v6)
    device = WAYS[net.kind]
    back = "eth0" if net.kind == "vxlan" else device
    with (
        Wire(net.lab.outside, net.lab.prefix, tap=True) as outside,
        Wire(first.netns, device, tap=True) as going,
        Wire(first.netns, back, tap=True) as coming,
        Wire(net["b1"].netns, "eth0", tap=True) as backend,
        Wire(second.netns, "eth0", tap=True) as underlay,
    ):
        check(net, Dial("remote backend", "outside", to, "b1", protocol, own))

        def sees(tap: Wire, source: str, destination: str) -> Packet:
            found = tap.expect(
                lambda p: (
                    p.protocol == protocol and (host_of(p.source), host_of(p.destination)) == (source, destination)
                )
            )
            assert checksums(found, l2=found.ethernet is not None) == [], found
            return found

        asked = sees(outside, client, host_of(to))
        assert asked.destination == to
        assert sees(outside, host_of(to), client).source == to
        sent, answered = sees(going, own, pod), sees(coming, pod, own)
        assert split(sent.destination)[1] == split(answered.source)[1] == 8080
        assert sent.source == answered.destination, "replies come to the flow's node port"
        assert sees(backend, own, pod).source == sent.source
        assert sees(backend, pod, own).destination == sent.source
        if device != "eth0":
            underlay.none(0, lambda p: host_of(p.destination) == pod)


@pytest.mark.parametrize("kind", ["ExternalIP", "VIP"])
@both_families
@pytest.mark.parametrize(("number", "protocol", "who"), [(61, "tcp", "b1"), (64, "udp", "a1"), (67, "tcp", "a1")])
@pytest.mark.parametrize("net", [net for net in NETS if net[1] == "routed"], indirect=True, ids="-".join)
def test_a_client_behind_a_device_without_link_header_is_served(
    net: PodNetwork, number: int, protocol: str, who: str, kind: str, v6: bool
):
    """External IPs by VXLAN-GPE, VIPs by tun. Service 67 has policy Local."""
    way = "gpe" if kind == "ExternalIP" else "tun"
    client = CLIENT_BY[way][v6]
    device = {"gpe": "gpe0", "tun": "tun9"}[way]
    own = address(net.lab.nodes[0].host, v6)
    to = at(kind, number, v6)
    with Wire(net.lab.nodes[0].netns, device, tap=True) as tap:
        assert tap.mac == ""
        sees = client if number == 67 else own
        check(net, Dial("no link header", "outside", to, who, protocol, sees))
        for said in ("destination", "source"):
            found = tap.expect(lambda p, said=said: getattr(p, said) == to)
            assert checksums(found, l2=False) == []
        assert host_of(found.destination) == client


# ---- path MTU ------------------------------------------------------------------------------------


@both_families
def test_a_transfer_finds_the_path_mtu_both_ways(net: PodNetwork, v6: bool):
    """Pods and clients start with an MTU of 1500. Each sender gets the ICMP error for its
    packets.
    """
    client, pod, own = net["outside"], net["b1"], source_of(net, v6)
    to = at("NodePort", 65, v6)
    mtu = mtu_of(net)
    forget(client, pod)
    with (
        Wire(net.lab.outside, net.lab.prefix, tap=True) as here,
        Wire(pod.netns, "eth0", tap=True) as backend,
    ):
        transfer(client, to)
        if mtu == 1500:
            assert not any(too_big(packet, mtu) for packet in (*here.heard, *backend.heard))
            return
        error = here.expect(lambda p: too_big(p, mtu))
        assert checksums(error) == []
        assert host_of(error.destination) == address(client, v6)
        assert host_of(error.embedded.source) == address(client, v6)
        assert error.embedded.destination == to
        assert learned(client, split(to)[0]) == mtu
        if net.kind == "vxlan":  # its replies use the underlay
            return
        error = backend.expect(lambda p: too_big(p, mtu))
        assert checksums(error) == []
        assert split(error.embedded.source) == (address(pod, v6), BULK)
        assert host_of(error.embedded.destination) == own
        assert learned(pod, own) == mtu
    forget(client, pod)


@both_families
@pytest.mark.parametrize(("number", "name", "narrow"), [(62, "b1", 0), (62, "b1", 1280), (64, "a1", 1280)])
def test_a_large_datagram_gets_an_icmp_error_with_the_path_mtu(
    net: PodNetwork, number: int, name: str, narrow: int, v6: bool
):
    """1500 bytes with "don't fragment": the ICMP error quotes the client's own packet, and a
    datagram of the MTU it names gets through.
    """
    client, pod, own = net["outside"], net[name], address(net.lab.nodes[0].host, v6)
    if name == "b1":
        own = source_of(net, v6)
    to = at("NodePort", number, v6)
    way = mtu_of(net) if name == "b1" else 1500
    fitting = [mtu for mtu in (way, narrow) if 0 < mtu < 1500]
    headers = 48 if v6 else 28
    forget(client)
    with (
        pod_mtu(net, name, narrow or 1500),
        Wire(net.lab.outside, net.lab.prefix, tap=True) as here,
        Wire(pod.netns, "eth0", tap=True) as backend,
        careful(client, v6) as s,
    ):
        s.connect(split(to))
        port = s.getsockname()[1]
        ours = f"[{address(client, v6)}]:{port}" if v6 else f"{address(client, v6)}:{port}"
        size = 1500
        for fits in fitting:
            s.send(bytes(size - headers))
            error = here.expect(lambda p, fits=fits: too_big(p, fits))
            assert checksums(error) == []
            assert host_of(error.destination) == address(client, v6)
            assert (error.embedded.source, error.embedded.destination) == (ours, to)
            until("the client learns the MTU", lambda fits=fits: learned(client, split(to)[0]) == fits)
            s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            size = fits
        s.send(bytes(size - headers))
        assert json.loads(s.recv(2000))["name"] == name
        arrived = backend.expect(lambda p: len(p.payload) == size - headers)
        assert host_of(arrived.source) == own
        assert checksums(arrived) == []
    forget(client)


@both_families
@pytest.mark.parametrize(("number", "name"), [(62, "b1"), (64, "a1")])
def test_a_flow_may_begin_with_fragments(net: PodNetwork, number: int, name: str, v6: bool):
    """The kernel divides them again, into new buffers, if a tunnel's headers find no room in theirs."""
    with there(
        net["outside"], lambda: socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM)
    ) as s:
        s.settimeout(PATIENCE)
        if v6:
            s.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU, 1280)
        s.connect(split(at("NodePort", number, v6)))
        s.send(bytes(3000))
        assert json.loads(s.recv(4000))["name"] == name


# ---- behind firewalld ----------------------------------------------------------------------------


node_sockets = pytest.mark.parametrize(
    "net", [net for net in NETS if net[1] in WITH_NODE_SOCKETS], indirect=True, ids="-".join
)


def behind_firewalld(test: Callable[..., None]) -> Callable[..., None]:
    """In two networks whose reverse path is symmetric: firewalld's filter of IPv6 is strict."""
    nets = [net for net in NETS if net[1] in ("routers", "answers")]
    return pytest.mark.usefixtures("firewalld")(pytest.mark.parametrize("net", nets, indirect=True, ids="-".join)(test))


@pytest.fixture
def firewalld(net: PodNetwork) -> Iterator[None]:
    for node in net.lab.nodes:
        nft(node, counting_invalid(FIREWALLD))
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
def test_a_transfer_finds_the_path_mtu_behind_firewalld(net: PodNetwork, v6: bool):
    expect_path_mtu(net, net["outside"], at("NodePort", 65, v6))


def expect_path_mtu(net: PodNetwork, client: Place, to: str) -> None:
    """A transfer to a Service with the backend b1 finds it."""
    forget(client, net["b1"])
    transfer(client, to)
    assert learned(client, split(to)[0]) == mtu_of(net)
    forget(client, net["b1"])


@both_families
@behind_firewalld
def test_a_transfer_to_a_pod_of_the_node_finds_its_mtu_behind_firewalld(net: PodNetwork, v6: bool):
    """The node's route to the pod has the MTU; the pod's device has 1500."""
    client, to = net["outside"], at("NodePort", 66, v6)
    forget(client)
    with narrow_route(net, "a1", 1280):
        transfer(client, to)
        assert learned(client, split(to)[0]) == 1280
    forget(client)


@both_families
@behind_firewalld
def test_a_pod_learns_of_a_narrow_link_in_front_of_the_node(net: PodNetwork, v6: bool):
    """A router in front of node-1 says that a reply was too long. node-2 does not know that router,
    and has a strict reverse path filter.
    """
    pod, own, mtu = net["b1"], source_of(net, v6), 1290
    outside = net["outside"].ip6 if v6 else net["outside"].ip
    router = "fd00:198:19::c9" if v6 else "203.0.113.201"
    to = at("NodePort", 62, v6)
    forget(pod)
    family = socket.AF_INET6 if v6 else socket.AF_INET
    with (
        there(net["outside"], lambda: socket.socket(family, socket.SOCK_DGRAM)) as client,
        Wire(net.lab.outside, net.lab.prefix) as wire,
    ):
        client.settimeout(PATIENCE)
        client.bind((outside, 4700))
        client.sendto(b"hello\n", split(to))
        client.recv(100)
        reply = udp(to, f"[{outside}]:4700" if v6 else f"{outside}:4700", bytes(1400))
        wire.send(icmp_error("too big", router, reply, mtu=mtu), to=mac_of(net.lab.nodes[0].netns, "eth0"))
        until("the pod learns the MTU", lambda: learned(pod, own) == mtu)
    forget(pod)


# ---- sockets of the node -------------------------------------------------------------------------


@crossed
@node_sockets
def test_a_socket_of_the_node_has_the_address_of_the_device_to_the_backend(net: PodNetwork, protocol: str, v6: bool):
    """As with MASQUERADE. Both nodes have a strict reverse path filter."""
    for kind in ("ClusterIP", "VIP"):
        to = at(kind, 61 if protocol == "tcp" else 62, v6)
        check(net, Dial("remote", "host-1", to, "b1", protocol, source_of(net, v6)))


@both_families
@node_sockets
def test_a_transfer_of_the_node_finds_the_path_mtu(net: PodNetwork, v6: bool):
    """The node's route to the Service has the MTU 1500, and so has the pod's device."""
    expect_path_mtu(net, net["host-1"], at("ClusterIP", 65, v6))


@both_families
@node_sockets
def test_a_socket_of_the_node_gets_emsgsize(net: PodNetwork, v6: bool):
    """A datagram that is longer by a byte than the device to the backend, but not than that to the
    Service. The next one, of the MTU, arrives.
    """
    host, to, mtu = net["host-1"], at("ClusterIP", 62, v6), mtu_of(net)
    headers = 48 if v6 else 28
    forget(host)
    with careful(host, v6) as s:
        s.connect(split(to))
        s.send(bytes(mtu + 1 - headers))
        with pytest.raises(OSError, match="Message too long"):
            s.recv(2000)
        assert learned(host, split(to)[0]) == mtu
        s.send(bytes(mtu - headers))
        assert json.loads(s.recv(2000))["name"] == "b1"
    forget(host)


@both_families
@node_sockets
def test_a_socket_of_the_node_that_may_fragment_does_so(net: PodNetwork, v6: bool):
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
