# SPDX-License-Identifier: Apache-2.0
"""Pod networks between the nodes: routed, VXLAN, devices without a link header; and their MTUs.

Each test captures packets at the client, between the nodes, and at the backend. node-1 masquerades,
to its InternalIP.
"""

import json
import socket
from collections.abc import Iterator

import pytest

from tests.lab.outside.pod_network import (
    BULK,
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
from tests.support.cluster.kube_objects import slice_port
from tests.support.lab.dial import Dial
from tests.support.lab.field import (
    FORWARDINGS,
    at,
    both_families,
    check,
    forward,
    split,
)
from tests.support.lab.lab import until
from tests.support.packets.judge import checksums
from tests.support.packets.parse import Packet
from tests.support.packets.wire import Wire


@pytest.fixture(
    scope="module",
    params=[(how, kind) for how in FORWARDINGS for kind in WAYS],
    ids="-".join,
)
def net(request: pytest.FixtureRequest) -> Iterator[PodNetwork]:
    """Services 61 (TCP) and 62 (UDP) have the backend b1, 63 and 64 a1, 65 b1's bulk()."""
    how, kind = request.param
    with PodNetwork(kind, *forward(how)) as made:
        if kind == "routed":
            made.client_by_devices_without_header()
        for number, who in ((61, "b1"), (63, "a1")):
            made.create(*made.all_ways(number, who), *made.all_ways(number + 1, who, "UDP"))
            made[who].ask("serve_bulk", ports=[BULK])
        made.create(*made.all_ways(67, "a1 b1", external_policy="Local"))
        for number, who in ((65, "b1"), (66, "a1")):
            service, *_ = made.all_ways(number, "")
            slices = (made.slice(f"web-{number}", who, slice_port(BULK), v6=v6) for v6 in (0, 1))
            made.create(service, *slices)
        made.settle()
        yield made


# ---- addresses on the wire -----------------------------------------------------------------------


@both_families
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_addresses_on_the_wire_of_a_remote_backend(net: PodNetwork, protocol: str, v6: bool) -> None:
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


@both_families
@pytest.mark.parametrize(("number", "protocol"), [(63, "tcp"), (64, "udp")])
def test_a_local_backend_is_served_in_every_pod_network(net: PodNetwork, number: int, protocol: str, v6: bool) -> None:
    own = address(net.lab.nodes[0].host, v6)
    check(net, Dial("local backend", "outside", at("NodePort", number, v6), "a1", protocol, own))


@pytest.mark.parametrize("kind", ["ExternalIP", "VIP"])
@both_families
@pytest.mark.parametrize(
    ("number", "protocol", "who"),
    [(61, "tcp", "b1"), (62, "udp", "b1"), (63, "tcp", "a1"), (64, "udp", "a1"), (67, "tcp", "a1")],
)
@pytest.mark.parametrize("net", [(how, "routed") for how in FORWARDINGS], indirect=True, ids="-".join)
def test_a_client_behind_a_device_without_link_header_is_served(
    net: PodNetwork, number: int, protocol: str, who: str, kind: str, v6: bool
) -> None:
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
def test_a_transfer_finds_the_path_mtu_both_ways(net: PodNetwork, v6: bool) -> None:
    """Pods and clients start with an MTU of 1500. Each sender gets the ICMP error for its
    packets.
    """
    client, pod, own = net["outside"], net["b1"], source_of(net, v6)
    host, port = split(at("NodePort", 65, v6))
    mtu = FOUND.get(net.kind, OVERLAY_MTU)
    forget(client, pod)
    with (
        Wire(net.lab.outside, net.lab.prefix, tap=True) as here,
        Wire(pod.netns, "eth0", tap=True) as backend,
    ):
        got = client.ask("bulk", host=host, port=port, size=1 << 20, family="6" if v6 else "4")
        assert got.get("there") is True, got
        assert got.get("back") is True, got
        if mtu == 1500:
            assert not any(too_big(packet, mtu) for packet in (*here.heard, *backend.heard))
            return
        error = here.expect(lambda p: too_big(p, mtu))
        assert checksums(error) == []
        assert host_of(error.destination) == address(client, v6)
        assert host_of(error.embedded.source) == address(client, v6)
        assert error.embedded.destination == at("NodePort", 65, v6)
        assert learned(client, host) == mtu
        if net.kind == "vxlan":  # its replies use the underlay
            return
        error = backend.expect(lambda p: too_big(p, mtu))
        assert checksums(error) == []
        assert split(error.embedded.source) == (address(pod, v6), BULK)
        assert host_of(error.embedded.destination) == own
        assert learned(pod, own) == mtu
    forget(client, pod)


@both_families
@pytest.mark.parametrize("narrow", [0, 1280], ids=["pod MTU 1500", "pod MTU 1280"])
@pytest.mark.parametrize(("number", "name"), [(62, "b1"), (64, "a1")], ids=["remote", "local"])
def test_a_large_datagram_gets_an_icmp_error_with_the_path_mtu(
    net: PodNetwork, number: int, name: str, narrow: int, v6: bool
) -> None:
    """1500 bytes with "don't fragment": the ICMP error quotes the client's own packet, and a
    datagram of the MTU it names gets through.
    """
    client, pod, own = net["outside"], net[name], address(net.lab.nodes[0].host, v6)
    if name == "b1":
        own = source_of(net, v6)
    to = at("NodePort", number, v6)
    way = FOUND.get(net.kind, OVERLAY_MTU) if name == "b1" else 1500
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
