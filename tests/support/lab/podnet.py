# SPDX-License-Identifier: Apache-2.0
"""The lab's pod networks, in the shapes that CNIs use: commands for `ip` and `bridge`, which lab.py
runs, and the addresses that a node has towards pods.

    routed   as Calico without an overlay: a veth pair and a route for each pod, over the nodes' own
             network. The default
    vxlan    as flannel: a node's pods on a bridge, and a VXLAN device with static entries for each
             other node, to which the pod networks are routed
    bridged  as Weave: one Ethernet of all pods. VXLAN joins the nodes' bridges; ARP requests are
             flooded to all of them

In each of them a node's pods are in 10.244.n.0/24 and fd00:10:244:n::/64, where the node is n.1.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.lab.lab import Node

OVERLAY_MTU = 1450
_ANYBODY = "00:00:00:00:00:00"

Lines = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod's number on its node, its namespace and its addresses."""

    index: int
    netns: str
    v4: str
    v6: str


def gate(number: int, v6: bool) -> str:
    """The node's address in the network of its pods."""
    return f"fd00:10:244:{number}::1" if v6 else f"10.244.{number}.1"


class Routed:
    """Each pod has a veth pair and a route; the nodes' own network carries pod packets."""

    def node(self, number: int) -> Lines:
        """Commands for a node without pods."""
        return (
            f"addr add {gate(number, False)}/32 dev lo",
            f"addr add {gate(number, True)}/128 dev lo nodad",
        )

    def own6(self, number: int) -> Lines:
        """The IPv6 addresses that node() adds."""
        return (gate(number, True),)

    def cable(self, number: int, pod: Pod) -> Lines:
        """Commands on the node for a pod's veth pair."""
        return (
            f"link add p{pod.index} type veth peer name eth0 netns {pod.netns}",
            f"link set p{pod.index} up",
            f"route add {pod.v4}/32 dev p{pod.index} src {gate(number, False)}",
            f"route add {pod.v6}/128 dev p{pod.index}",
            f"addr add fe80::1/64 dev p{pod.index} nodad",
        )

    def inside(self, number: int, pod: Pod) -> Lines:
        """Commands in the pod."""
        return (
            "link set lo up",
            f"addr add {pod.v4}/32 dev eth0",
            f"addr add {pod.v6}/128 dev eth0 nodad",
            "link set eth0 up",
            f"route add {gate(number, False)} dev eth0",
            f"route add default via {gate(number, False)}",
            "route add default via fe80::1 dev eth0",
        )

    def join(self, node: "Node", others: "Sequence[Node]") -> tuple[Lines, Lines]:
        """Commands for `ip` and for `bridge` on a node: routes to the pods of the other nodes."""
        return (
            *(f"route add 10.244.{other.number}.0/24 via {other.ip}" for other in others),
            *(f"route add fd00:10:244:{other.number}::/64 via {other.ip6}" for other in others),
        ), ()

    def seen_elsewhere(self, node: "Node", v6: bool) -> str:
        """The source address of this node's own packets to pods of other nodes."""
        return node.ip6 if v6 else node.ip

    def masquerades_as(self, node: "Node", v6: bool) -> str:
        """The source address of packets that this node masquerades to its own pods: MASQUERADE uses
        an address of the device towards the pod, if it has one.
        """
        return node.ip6 if v6 else node.ip


class _OnBridge(Routed):
    """Base of the networks with a node's pods on a bridge."""

    bridge = ""
    lengths = (24, 64)
    """Prefix lengths of the network that is on-link for a pod."""

    def node(self, number: int) -> Lines:
        at = (gate(number, v6) for v6 in (False, True))
        # Without a set address, a bridge takes its lowest port's. The next pod would change it, and
        # the others' packets to their gateway would be lost until their neighbour entries expire.
        return (
            f"link add {self.bridge} address 02:00:00:00:43:{number:02x} mtu {OVERLAY_MTU} type bridge",
            *(
                f"addr add {each}/{length} dev {self.bridge} nodad"
                for each, length in zip(at, self.lengths, strict=True)
            ),
            f"link set {self.bridge} up",
        )

    def cable(self, number: int, pod: Pod) -> Lines:
        device = f"p{pod.index}"
        return (
            f"link add {device} mtu {OVERLAY_MTU} type veth peer name eth0 mtu {OVERLAY_MTU} netns {pod.netns}",
            f"link set {device} master {self.bridge} up",
        )

    def inside(self, number: int, pod: Pod) -> Lines:
        return (
            "link set lo up",
            f"addr add {pod.v4}/{self.lengths[0]} dev eth0",
            f"addr add {pod.v6}/{self.lengths[1]} dev eth0 nodad",
            "link set eth0 up",
            f"route add default via {gate(number, False)}",
            f"route add default via {gate(number, True)}",
        )

    def masquerades_as(self, node: "Node", v6: bool) -> str:
        return gate(node.number, v6)


class Vxlan(_OnBridge):
    """Pods on a bridge; pod networks of other nodes are routed to a VXLAN device."""

    bridge = "cni0"

    def join(self, node: "Node", others: "Sequence[Node]") -> tuple[Lines, Lines]:
        """Routes, neighbours and FDB entries are all static, so that nothing is flooded."""
        return (
            f"link add vx0 address {_mac(node)} mtu {OVERLAY_MTU} type vxlan id 42"
            f" dstport 4789 local {node.ip} dev eth0 nolearning",
            f"addr add {self.seen_elsewhere(node, False)}/32 dev vx0",
            f"addr add {self.seen_elsewhere(node, True)}/64 dev vx0 nodad",
            "link set vx0 up",
            *(line for other in others for line in self._to(other)),
        ), tuple(f"fdb append {_mac(other)} dev vx0 dst {other.ip}" for other in others)

    def _to(self, other: "Node") -> Lines:
        via4, via6 = (self.seen_elsewhere(other, v6) for v6 in (False, True))
        return (
            f"neigh add {via4} lladdr {_mac(other)} dev vx0 nud permanent",
            f"neigh add {via6} lladdr {_mac(other)} dev vx0 nud permanent",
            f"route add 10.244.{other.number}.0/24 via {via4} dev vx0 onlink",
            f"route add fd00:10:244:{other.number}::/64 via {via6} dev vx0 onlink",
        )

    def seen_elsewhere(self, node: "Node", v6: bool) -> str:
        return f"fd00:42::{node.number}" if v6 else f"10.244.{node.number}.0"


class Bridged(_OnBridge):
    """All pods on one Ethernet: VXLAN joins the nodes' bridges."""

    bridge = "weave"
    lengths = (16, 48)

    def join(self, node: "Node", others: "Sequence[Node]") -> tuple[Lines, Lines]:
        return (
            f"link add vx0 mtu {OVERLAY_MTU} type vxlan id 42 dstport 4789 local {node.ip} dev eth0",
            f"link set vx0 master {self.bridge} up",
        ), tuple(f"fdb append {_ANYBODY} dev vx0 dst {other.ip}" for other in others)

    def seen_elsewhere(self, node: "Node", v6: bool) -> str:
        return gate(node.number, v6)


def _mac(node: "Node") -> str:
    return f"02:00:00:00:42:0{node.number}"


SHAPES = {"routed": Routed(), "vxlan": Vxlan(), "bridged": Bridged()}
