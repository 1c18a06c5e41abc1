# SPDX-License-Identifier: Apache-2.0
"""Bridges with br_netfilter in force (kubeadm requires it), and a firewall that drops what
conntrack calls invalid: a packet is translated at the port where it enters the bridge, before
conntrack sees it.
"""

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from kbpf.dataplane.bpf.inspect import attached
from kbpf.dataplane.bpf.maps.layout import Reason
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.kernel.netfilter.conntrack import ConntrackStatus
from tests.lab.outside.netfilter import flush_conntrack, invalid, masqueraded, nft_table, objects, plain
from tests.lab.outside.test_conntrack import GUARD, entries, mac_towards, send_frames
from tests.support.cluster.cluster import UNROUTED
from tests.support.features import needs
from tests.support.lab.dial import Dial
from tests.support.lab.field import NODES4, NODES6, OUT4, OUT6, Field, at, both_families, check, crossed, split, there
from tests.support.lab.lab import Agent, Lab, Node, ip, on, settled, until
from tests.support.packets.packets import BROADCAST, end, tcp, udp
from tests.support.packets.wire import Wire

pytestmark = needs("br_netfilter")


class BridgeField(Field):
    """`network`: of the pods (tests/support/lab/podnet.py). `uplink`: the nodes' own addresses are
    on a bridge too, as on a host of virtual machines.
    """

    def __init__(self, network: str, uplink: bool, *arguments: str) -> None:
        super().__init__(*arguments, name="bn")
        self.network, self.uplink = network, uplink

    def new_lab(self, nodes: int, name: str) -> Lab:
        return Lab(nodes, name, apart=True, network=self.network)

    def prepare(self) -> None:
        if self.uplink:
            for each in self.lab.nodes:
                self._put_uplink_on_bridge(each)

    def _put_uplink_on_bridge(self, node: Node) -> None:
        others = [other for other in self.lab.nodes if other is not node]
        lines, _ = self.lab.network.join(node, others)
        ip(
            "addr flush dev eth0",
            "link add br0 type bridge",
            "link set eth0 master br0",
            "link set br0 up",
            f"addr add {node.ip}/24 dev br0",
            f"addr add {node.ip6}/64 dev br0 nodad",
            f"route add default via {self.lab.outside_ip}",
            "route replace default via fd00:198:18::fe",  # flushing has left routes of IPv6
            *(line.replace("route add", "route replace") for line in lines),
            netns=node.netns,
        )
        settled(node.netns, node.ip6)

    def rows(self, protocol: str, v6: bool) -> Iterator[Dial]:
        """Every path through the packet path, and which client address the backend sees."""
        net, node = self.lab.network, self.lab.nodes[0]
        here, elsewhere = net.masquerades_as(node, v6), net.seen_elsewhere(node, v6)
        for row in masqueraded(protocol, v6):
            yield replace(row, backend_sees=here if row.outcome == "a1" else elsewhere)
        for row in plain(protocol, v6):
            on_one_bridge = self.network == "bridged" or (self.network == "vxlan" and row.outcome == "a1")
            by_node = here if row.outcome == "a1" else elsewhere
            yield replace(row, backend_sees=by_node if row.client == "a2!" and on_one_bridge else row.backend_sees)
        yield Dial("the node", "host-1", at("ClusterIP", 12, v6), "b1", backend_sees=elsewhere)


KINDS = {
    "a bridge of pods": ("vxlan", False),
    "a bridge of pods that an overlay joins": ("bridged", False),
    "a bridge with the uplink, no hooks": ("routed", True, "--device", "br0", "--socket-lb", "off"),
}


@pytest.fixture(scope="module", params=KINDS)
def field(request, br_netfilter: None) -> Iterator[BridgeField]:
    with BridgeField(*KINDS[request.param]) as made:
        made.create(*objects(made))
        made.settle()
        for node, agent in zip(made.lab.nodes, made.agents, strict=True):
            until("the ports have programs", lambda node=node, agent=agent: has_programs(node, agent))
            invalid(made, node)
            ip(*(f"route del unreachable {net}" for net in UNROUTED), netns=node.netns)
        yield made


def has_programs(node: Node, agent: Agent) -> bool:
    """Whether each port of a bridge has the program for ingress, and no other."""
    listing = there(node.host, lambda: attached.read_devices(Pins(agent.pin_dir), 0, None))
    ports = [(bool(device.ingress), bool(device.egress)) for device in listing if device.role == "port"]
    return bool(ports) and set(ports) == {(True, False)}


@crossed
def test_no_packet_is_invalid(field: BridgeField, protocol: str, v6: bool):
    for row in field.rows(protocol, v6):
        check(field, row)


def learned(node: Node) -> dict[str, str]:
    """MAC address → the port of a bridge behind which the node has seen it."""
    told = json.loads(on(node, "bridge", "-j", "fdb", "show"))
    return {each["mac"]: each["ifname"] for each in told if "permanent" not in each["state"]}


@both_families
def test_a_denied_answer_returns_to_its_backend_only(field: BridgeField, v6: bool):
    """a1 answers a2's SYN for an older connection, and hears a2's reset. No bridge takes the one
    pod for the other.
    """
    node, (pod, client) = field.lab.nodes[0], (field["a1"], field["a2!"])
    quiet = "chain input { type filter hook input priority 0; tcp dport 8080 tcp flags & (syn|ack) == syn drop; }"
    family = socket.AF_INET6 if v6 else socket.AF_INET
    with (
        nft_table(pod, "inet quiet", quiet),
        Wire(pod.netns, "eth0", tap=True) as wire,
        there(client, lambda: socket.socket(family, socket.SOCK_STREAM)) as one,
    ):
        one.setblocking(False)
        one.connect_ex(split(at("ClusterIP", 11, v6)))
        syn = wire.expect(lambda p: p.flags == "S")
        before = learned(node)
        answer = tcp(syn.destination, syn.source, flags="A", seq=7, ack=8)
        wire.send(answer, to=syn.raw[6:12].hex(":"))
        reset = wire.expect(lambda p: p.flags == "R")
        assert (reset.source, reset.destination) == (syn.source, syn.destination)
        assert learned(node) == before


@needs("conntrack_nat")
@both_families
@pytest.mark.parametrize("to_mac", ["02:de:ad:be:ef:01", BROADCAST])
@pytest.mark.parametrize("field", ["a bridge of pods"], indirect=True)
def test_a_pod_forges_no_answer_to_a_refused_client(field: BridgeField, v6: bool, to_mac: str):
    """At a port, conntrack sees frames to any MAC address."""
    node, to = field.lab.nodes[0], at("NodePort", 21, v6)
    out, own, pod = (OUT6, NODES6[0], field["a1"].ip6) if v6 else (OUT4, NODES4[0], field["a1"].ip)
    gate = field.lab.network.masquerades_as(node, v6)
    client, masqueraded, backend = end(out, 43_200), end(gate, 43_200), end(pod, 8080)
    with nft_table(node, "inet guard", GUARD):
        mac = there(node, partial(mac_towards, out))
        there(field["outside"], partial(send_frames, [udp(client, to, b"hello\n")], own, mac))
        until("the entry is written", lambda: len(entries(field, to)) == 1)
        before = field.agent.reasons()[Reason.INVALID]
        there(field["a3"], partial(send_frames, [udp(backend, masqueraded, b"x")], gate, to_mac))
        until("it is dropped", lambda: field.agent.reasons()[Reason.INVALID] > before)
        (entry,) = entries(field, to)
        assert not entry.status & ConntrackStatus.IPS_SEEN_REPLY
    there(node, flush_conntrack)


@both_families
def test_a_client_goes_on_to_send_to_its_gateway(field: BridgeField, v6: bool):
    """The node returns packets to the bridge that they came from, so it tells the client of a
    shorter way (an ICMP redirect). For the Service there is none.
    """
    client, backend = field["a2!"], field["a1"]
    to = split(at("ClusterIP", 11, v6))
    # The client takes a redirect only if it knows the MAC address of the new gateway.
    assert "name" in client.tcp(backend.ip6 if v6 else backend.ip, 8080)
    assert "name" in client.tcp(*to, keep="kept")
    for _ in range(12):
        assert "name" in client.ask("talk", keep="kept")
        time.sleep(0.05)  # the node sends the next one only after a pause
    assert "name" in client.tcp(*to)
    client.ask("drop", keep="kept")
