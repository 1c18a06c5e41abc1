# SPDX-License-Identifier: Apache-2.0
"""Pod networks between two nodes: routed, VXLAN, devices without a link header; and their MTUs.

routed    the underlay's device carries the pods' packets, as in every other lab
answers   VXLAN in both directions: what pods send to nodes, replies included, uses it too
vxlan     VXLAN towards pods only: replies to a node arrive on the underlay
gpe       as `answers`, by VXLAN-GPE, whose device has no link header
tun       as `answers`, by a program that reads packets from a tun device
routers   two routers between the nodes, with a narrow link between them
"""

import contextlib
import re
import socket
from collections.abc import Iterator

from tests.support.lab.field import NODES4, OUT4, Field, split, there
from tests.support.lab.lab import PATIENCE, Node, Place, ip, let_forward, run
from tests.support.lab.tunnel import Tunnel
from tests.support.packets.parse import Icmp, Packet

OVERLAY_MTU, ROUTERS_MTU = 1450, 1400
WAYS = {"routed": "eth0", "answers": "vx0", "vxlan": "vx0", "gpe": "gpe0", "tun": "tun0", "routers": "r0"}
"""The device that leads to the other node's pods."""
CLIENT_BY = {"gpe": ("198.51.100.7", "fd00:198:51::7"), "tun": ("198.51.100.8", "fd00:198:51::8")}


FOUND = {"routed": 1500, "routers": ROUTERS_MTU}
"""The path MTU to the pods by kind of network; OVERLAY_MTU for the others."""


class PodNetwork(Field):
    """Two nodes with a pod network of this kind, one pod on each."""

    def __init__(self, kind: str, *arguments: str) -> None:
        super().__init__(*arguments, name="ov", pods=(1, 1), agents=1)
        self.kind = kind

    def prepare(self) -> None:
        first, second = self.lab.nodes
        match self.kind:
            case "answers" | "vxlan":
                for node, other in ((first, second), (second, first)):
                    self._vxlan(node, other)
            case "gpe":
                for node, other in ((first, second), (second, first)):
                    self._gpe(node, other)
            case "tun":
                self.own.enter_context(Tunnel("tun0", first.netns, second.netns))
                for node, other in ((first, second), (second, first)):
                    ip(f"link set tun0 up mtu {OVERLAY_MTU}", netns=node.netns)
                    self._route(node, other, "dev tun0", "dev tun0")
            case "routers":
                self._routers()
            case "routed":
                self._devices_to_client()

    def _route(self, node: Node, other: Node, way4: str, way6: str) -> None:
        """Routes to the other node's pods, and to the other node for replies of this node's
        pods.
        """
        n, m = node.number, other.number
        ip(f"route replace 10.244.{m}.0/24 {way4}", f"route replace fd00:10:244:{m}::/64 {way6}", netns=node.netns)
        if self.kind == "vxlan":
            return
        ip(
            f"""
            rule add from 10.244.{n}.0/24 to {other.ip} lookup 100
            route add {other.ip}/32 {way4} table 100
            route add {other.ip6}/128 {way6} table 100
            """,
            netns=node.netns,
        )
        rule = f"rule add from fd00:10:244:{n}::/64 to {other.ip6} lookup 100"
        run("ip", "-n", node.netns, "-6", *rule.split())

    def _vxlan(self, node: Node, other: Node) -> None:
        """As flannel does: a static FDB and neighbour entry for each other node, no learning."""
        n, m = node.number, other.number
        ip(
            f"link add vx0 address 02:00:00:00:42:0{n} mtu {OVERLAY_MTU} type vxlan id 42"
            f" dstport 4789 local {node.ip} dev eth0 nolearning",
            "link set vx0 up",
            f"neigh add 10.244.{m}.0 lladdr 02:00:00:00:42:0{m} dev vx0 nud permanent",
            f"neigh add fd00:42::{m} lladdr 02:00:00:00:42:0{m} dev vx0 nud permanent",
            netns=node.netns,
        )
        if self.kind == "answers":  # else sources are underlay addresses of the node
            overlay = (f"addr add 10.244.{n}.0/32 dev vx0", f"addr add fd00:42::{n}/64 dev vx0 nodad")
            ip(*overlay, netns=node.netns)
        run(*("bridge", "-n", node.netns, "fdb", "append", f"02:00:00:00:42:0{m}"), *("dev", "vx0", "dst", other.ip))
        self._route(node, other, f"via 10.244.{m}.0 dev vx0 onlink", f"via fd00:42::{m} dev vx0 onlink")

    def _gpe(self, node: Node, other: Node) -> None:
        ip(
            "link add gpe0 type vxlan dstport 4790 external gpe",
            f"link set gpe0 up mtu {OVERLAY_MTU}",
            netns=node.netns,
        )
        way = f"encap ip id 7 dst {other.ip} dev gpe0"
        self._route(node, other, way, way)

    def _routers(self) -> None:
        """node-n is 172.31.n.1, its router 172.31.n.254; 172.31.3.0/24 connects the routers."""
        routers = [f"{self.lab.prefix}r{node.number}" for node in self.lab.nodes]
        for name in routers:
            self.lab.add_netns(name)
            let_forward(name)
        ip(
            f"link add mid mtu {ROUTERS_MTU} type veth peer name mid mtu {ROUTERS_MTU} netns {routers[1]}",
            netns=routers[0],
        )
        for node, other, router in zip(self.lab.nodes, self.lab.nodes[::-1], routers, strict=True):
            n, m = node.number, other.number
            ip(
                f"""
                link add r0 type veth peer name e0 netns {router}
                addr add 172.31.{n}.1/24 dev r0
                addr add fd00:31:{n}::1/64 dev r0 nodad
                link set r0 up
                """,
                netns=node.netns,
            )
            ip(
                f"""
                addr add 172.31.{n}.254/24 dev e0
                addr add fd00:31:{n}::fe/64 dev e0 nodad
                addr add 172.31.3.{n}/24 dev mid
                addr add fd00:31:3::{n}/64 dev mid nodad
                link set lo up
                link set e0 up
                link set mid up
                route add 10.244.{n}.0/24 via 172.31.{n}.1
                route add fd00:10:244:{n}::/64 via fd00:31:{n}::1
                route add {node.ip} via 172.31.{n}.1
                route add {node.ip6} via fd00:31:{n}::1
                """,
                netns=router,
            )
            self._route(node, other, f"via 172.31.{n}.254", f"via fd00:31:{n}::fe")
            ip(
                f"route add 172.31.{m}.0/24 via 172.31.{n}.254",
                f"route add fd00:31:{m}::/64 via fd00:31:{n}::fe",
                netns=node.netns,
            )
        for node, router in zip(self.lab.nodes[::-1], routers, strict=True):
            m, n = node.number, 3 - node.number
            ip(
                f"""
                route add 172.31.{m}.0/24 via 172.31.3.{m}
                route add fd00:31:{m}::/64 via fd00:31:3::{m}
                route add 10.244.{m}.0/24 via 172.31.3.{m}
                route add fd00:10:244:{m}::/64 via fd00:31:3::{m}
                route add {node.ip} via 172.31.3.{m}
                route add {node.ip6} via fd00:31:3::{m}
                """,
                netns=router,
            )

    def _devices_to_client(self) -> None:
        outside, node = self.lab.outside, self.lab.nodes[0]
        self.own.enter_context(Tunnel("tun9", outside, node.netns))
        for where in (outside, node.netns):
            ip(
                "link add gpe0 type vxlan dstport 4790 external gpe",
                *(f"link set {device} up mtu {OVERLAY_MTU}" for device in ("gpe0", "tun9")),
                netns=where,
            )

    def client_by_devices_without_header(self) -> None:
        """External IPs are reached by VXLAN-GPE, VIPs by tun, from different client addresses."""
        outside, node = self.lab.outside, self.lab.nodes[0].netns
        ways = {
            "gpe": ("gpe0", "203.0.113.0/24", "2001:db8:1::/64", f"encap ip id 7 dst {NODES4[0]}"),
            "tun": ("tun9", "192.0.2.0/24", "2001:db8::/64", ""),
        }
        for kind, (device, net4, net6, encap) in ways.items():
            own4, own6 = CLIENT_BY[kind]
            ip(
                f"""
                addr add {own4}/32 dev {device}
                addr add {own6}/128 dev {device} nodad
                route replace {net4} {encap} dev {device} src {own4}
                route replace {net6} {encap} dev {device} src {own6}
                """,
                netns=outside,
            )
            back = encap.replace(NODES4[0], OUT4)
            ip(*(f"route add {own} {back} dev {device}" for own in (own4, own6)), netns=node)


def address(place: Place, v6: bool) -> str:
    return place.ip6 if v6 else place.ip


def host_of(end: str) -> str:
    """The host part of an address with or without a port."""
    return split(end)[0] if "]" in end or end.count(":") == 1 else end


SOURCES = {"answers": {False: "10.244.1.0", True: "fd00:42::1"}, "routers": {False: "172.31.1.1", True: "fd00:31:1::1"}}
"""If the device towards the other node has addresses, node-1 masquerades to these, like MASQUERADE;
otherwise to the Node's InternalIP.
"""


def source_of(net: PodNetwork, v6: bool) -> str:
    return SOURCES.get(net.kind, {}).get(v6) or address(net.lab.nodes[0].host, v6)


def forget(*places: Place) -> None:
    for place in places:
        for family in ("-4", "-6"):
            run("ip", "-n", str(place.netns), family, "route", "flush", "cache")


def learned(place: Place, to: str) -> int:
    """The path MTU that this place has cached; 0: none."""
    found = re.search(r"mtu (\d+)", run("ip", "-n", str(place.netns), "route", "get", to))
    return int(found[1]) if found else 0


def too_big(packet: Packet, mtu: int) -> bool:
    """Whether it is an ICMP "too big" error with this MTU."""
    if not isinstance(packet.transport, Icmp) or packet.embedded is None:
        return False
    kind = (packet.transport.type, packet.transport.code)
    if packet.protocol == "icmp6":
        return kind == (2, 0) and packet.transport.number == mtu
    return kind == (3, 4) and packet.transport.number & 0xFFFF == mtu


@contextlib.contextmanager
def pod_mtu(net: PodNetwork, name: str, mtu: int) -> Iterator[None]:
    """Sets the MTU at both ends of this pod's veth pair."""
    ends = ((net.home[name].netns, "p1"), (net[name].netns, "eth0"))
    for where, device in ends:
        ip(f"link set {device} mtu {mtu}", netns=where)
    try:
        yield
    finally:
        for where, device in ends:
            ip(f"link set {device} mtu 1500", netns=where)


IP_MTU_DISCOVER, IP_PMTUDISC_DO = 10, 2
IPV6_MTU_DISCOVER = 23


def careful(place: Place, v6: bool) -> socket.socket:
    """A UDP socket that sets "don't fragment"."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM)
        level = socket.IPPROTO_IPV6 if v6 else socket.IPPROTO_IP
        made.setsockopt(level, IPV6_MTU_DISCOVER if v6 else IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        made.settimeout(PATIENCE)
        return made

    return there(place, make)
