# SPDX-License-Identifier: Apache-2.0
"""Backends and clients behind tunnels that encapsulate IP in IP, as CNIs set them up.

    client ── eth0 ─ node ─ und0 ── other node
                      └─ a tunnel to each of the other node's pods

The node masquerades to the address of the tunnel's device, and replies to it come back by the same
tunnel. Without a remote address ("nbma") a tunnel takes the remote from the route's next hop. One
namespace is the other node and all its pods.
"""

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from kbpf.kernel.bpf.tc import TcAttacher
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.desired import ServiceState
from kbpf.model.objects import Protocol
from tests.support.features import TUNNEL_MODULES, needs, tunnel_modules
from tests.support.lab.events import read, watched
from tests.support.lab.field import BULK, FORWARDINGS, transfer
from tests.support.lab.lab import Place, ip, let_forward, run, settled, until
from tests.support.packets.packets import end, udp
from tests.support.plane import Site, desired, service, sites
from tests.support.table import table

pytestmark = needs("tunnels")
T = TypeVar("T")
SIZE = 300_000
"""Bytes of a transfer, in each direction."""
GATE = ("169.254.1.1", "fd00:169::1")
"""The node's addresses on the device of its pod."""
NODE, CLIENT = ("198.18.5.1", "fd00:198:5::1"), ("198.18.5.9", "fd00:198:5::9")
VALUES = {
    **{f"net4_{number}": f"198.18.{number}" for number in (6, 7)},
    **{f"net6_{number}": f"fd00:198:{number}:" for number in (6, 7, 8)},
}
"""The underlay's networks, in which the node is .1 and the other node .2: 6 for tunnels without a
remote address, 7 for those to one, 8 for ip6tnl without one.
"""


class Tunnel(NamedTuple):
    """`link` creates the device `name`. `next4` and `next6` are the next hops of its routes, "" if
    the device does not carry that family. Placeholders: {own} and {other}, the ends' last digits,
    VALUES, and {next}, the other node's address on the device.
    """

    name: str
    link: str
    next4: str
    next6: str = ""


TUNNELS = table(
    Tunnel,
    """
tunl0 |  | via {net4_6}.{other} dev tunl0 onlink
tun-other | type ipip local {net4_7}.{own} remote {net4_7}.{other} | dev tun-other
gre-nbma | type gre local {net4_6}.{own} ttl 64 | via {next} dev gre-nbma onlink
gre-key | type gre local {net4_7}.{own} remote {net4_7}.{other} ttl 64 key 7 csum | dev gre-key | dev gre-key
sit-nbma | type sit local {net4_6}.{own} ttl 64 |  | via ::{net4_6}.{other} dev sit-nbma
sit-other | type sit local {net4_7}.{own} remote {net4_7}.{other} ttl 64 |  | dev sit-other
ip6-nbma | type ip6tnl local {net6_8}:{own} mode ip6ip6 |  | via {net6_8}:{other} dev ip6-nbma onlink
ip6-other | type ip6tnl local {net6_7}:{own} remote {net6_7}:{other} mode any | dev ip6-other | dev ip6-other
""",
)
"""tunl0: Calico, the module's own device, and routes of BIRD "via NODE dev tunl0 onlink"
(confd/etc/calico/confd/templates/bird_ipam.cfg.template). tun-other: kube-router, a tunnel for each node of another
subnet (pkg/tunnels/linux_tunnels.go).
"""
GRE_NEIGHBOUR = "neigh add {next} lladdr {net4_6}.{other} dev gre-nbma nud permanent"
WAYS = [
    pytest.param(number, v6, id=f"{tunnel.name}-{'v6' if v6 else 'v4'}")
    for number, tunnel in enumerate(TUNNELS, 1)
    for v6 in (False, True)
    if (tunnel.next6 if v6 else tunnel.next4)
]
every_way = pytest.mark.parametrize(("number", "v6"), WAYS)
PROTOCOLS = ("tcp", "udp")


def pod_of(number: int, v6: bool) -> str:
    """The other node's pod behind this tunnel; 0: the pod of the node itself."""
    return f"fd00:10:244::{number + 1}" if v6 else f"10.244.0.{number + 1}"


def address_on(number: int, last: int, v6: bool) -> str:
    """The address of the node (1) or of the other node (2) on this tunnel's device."""
    return f"fd00:10:245:{number}::{last}" if v6 else f"10.245.{number}.{last}"


class World:
    """The namespaces, with a server for each pod."""

    site: Site

    def __init__(self, own: ExitStack) -> None:
        prefix = f"kbtn{os.getpid()}"
        self.client, self.node, self.other, self.pod = (f"{prefix}{letter}" for letter in ("c", "n", "o", "p"))
        self.places: dict[str, Place] = {}
        for name in (self.client, self.node, self.other, self.pod):
            run("ip", "netns", "add", name)
            own.callback(run, "ip", "netns", "del", name)
            ip("link set lo up", netns=name)
            self.places[name] = Place(name, name, None)
            own.callback(self.places[name].close)
        let_forward(self.node)
        self._veth("eth0", self.client, "24", "64", NODE, CLIENT)
        for net4, net6 in (("198.18.6", "fd00:198:6:"), ("198.18.7", "fd00:198:7:")):
            ends = [(f"{net4}.{last}", f"{net6}:{last}") for last in (1, 2)]
            self._veth(f"und{net4[-1]}", self.other, "24", "64", *ends)
        own_pod = (pod_of(0, False), pod_of(0, True))
        self._veth("cali0", self.pod, "32", "128", GATE, own_pod)
        ip(*(f"route add {each} dev cali0" for each in GATE), netns=self.pod)
        ip(*(f"route add {each} dev cali0" for each in own_pod), netns=self.node)
        for where, via in (
            (self.pod, GATE),
            (self.client, NODE),
            (self.node, CLIENT),
            (self.other, ("198.18.6.1", "fd00:198:6::1")),
        ):
            ip(*(f"route add default via {each}" for each in via), netns=where)
        for where, this, that in ((self.node, 1, 2), (self.other, 2, 1)):
            self._underlay8(where, this, that)
            for number, tunnel in enumerate(TUNNELS, 1):
                self._tunnel(tunnel, number, where, this, that)
        pods = [(self.pod, host) for host in own_pod] + [(self.other, pod_of(*way.values)) for way in WAYS]
        for name, host in pods:
            self.places[name].serve(8080, udp=(8080,), address=host)
        for name in (self.pod, self.other):
            self.places[name].ask("serve_bulk", ports=[BULK])

    def _veth(self, name: str, peer: str, length4: str, length6: str, *ends: tuple[str, str]) -> None:
        ip(f"link add {name} type veth peer name {name} netns {peer}", netns=self.node)
        for where, (v4, v6) in zip((self.node, peer), ends, strict=True):
            ip(
                f"addr add {v4}/{length4} dev {name}",
                f"addr add {v6}/{length6} dev {name} nodad",
                f"link set {name} up",
                netns=where,
            )
            settled(where, v6)

    @staticmethod
    def _underlay8(where: str, this: int, that: int) -> None:
        """The kernel refuses a next hop "onlink" that the main table has on another device."""
        ip(
            f"addr add fd00:198:8::{this}/128 dev und6 nodad",
            f"route add fd00:198:8::{that} via fd00:198:6::{that} dev und6 table 9",
            netns=where,
        )
        run("ip", "-n", where, "-6", "rule", "add", "to", "fd00:198:8::/64", "table", "9")

    @staticmethod
    def _tunnel(tunnel: Tunnel, number: int, where: str, this: int, that: int) -> None:
        values = {**VALUES, "own": str(this), "other": str(that)}
        lines = [f"link add {tunnel.name} {tunnel.link}"] if tunnel.link else []
        lines.append(f"link set {tunnel.name} up")
        for next_hop, v6 in ((tunnel.next4, False), (tunnel.next6, True)):
            if not next_hop:
                continue
            own, values["next"] = (address_on(number, one, v6) for one in (this, that))
            flags = f"/128 dev {tunnel.name} nodad" if v6 else f"/32 dev {tunnel.name}"
            lines += [f"addr add {own}{flags}", *([GRE_NEIGHBOUR] if tunnel.name == "gre-nbma" else [])]
            to = (values["next"], pod_of(number, v6)) if this == 1 else (values["next"],)
            lines += [f"route add {each} {next_hop}" for each in to]
            if this == 2:
                length = 128 if v6 else 32
                lines.append(f"addr add {pod_of(number, v6)}/{length} dev lo")
        ip(*(line.format_map(values) for line in lines), netns=where)
        if tunnel.next6:
            settled(where, address_on(number, this, True))

    def inside(self, where: str, action: Callable[[], T]) -> T:
        return netns.run_in(Path("/run/netns") / where, action)

    def all_attached(self) -> bool:
        """Whether both programs are on each device that packets of these tests take."""

        def count() -> dict[str, int]:
            with TcAttacher(self.site.pins / "devices") as tc:
                names = [socket.if_indextoname(each.ifindex) for each in tc.list_all()]
            return Counter(names)

        counts = self.inside(self.node, count)
        names = ("eth0", "und6", "und7", "cali0", *(tunnel.name for tunnel in TUNNELS))
        return all(counts[name] == 2 for name in names)

    def dial(self, where: str, host: str, port: int, protocol: str) -> str:
        """The client's address as the server sees it; the client must see the address it dialled."""
        answer = getattr(self.places[where], protocol)(host, port)
        assert answer.get("peer") == [host, port], answer
        return str(answer["client"])


def vip_of(number: int, v6: bool) -> str:
    return f"2001:db8::{number + 1}" if v6 else f"192.0.2.{number + 1}"


def services() -> Iterator[ServiceState]:
    """For the pod behind the tunnel of each number: NodePorts 30000 and 31000 + number, and ports 80
    and 81 of a VIP; the latter are for transfers.
    """
    ports = ((Protocol.TCP, 0, 8080), (Protocol.UDP, 0, 8080), (Protocol.TCP, 1, BULK))
    for number, v6, (protocol, which, target) in product(range(len(TUNNELS) + 1), (False, True), ports):
        node_port = end("::" if v6 else "0.0.0.0", 30000 + 1000 * which + number)
        frontends = f"NodePort={node_port} LoadBalancer={end(vip_of(number, v6), 80 + which)}"
        yield service(f"s{number}-{v6:d}-{which}", frontends, end(pod_of(number, v6), target), protocol)


@pytest.fixture(scope="module")
def all_tunnel_modules() -> Iterator[None]:
    with tunnel_modules(*TUNNEL_MODULES):
        yield


@pytest.fixture(scope="module", params=FORWARDINGS)
def world(request, artifact_cache: Path, all_tunnel_modules: None) -> Iterator[World]:
    with ExitStack() as own:
        made = World(own)
        made.site = own.enter_context(sites(artifact_cache))(node=made.node)
        plane = made.site.open(packet_path=True, forwarding=request.param)
        addresses = [*NODE, *(address_on(number, 1, v6) for number, v6 in (way.values for way in WAYS))]
        state = msgspec.structs.replace(
            desired(*services(), nodes=" ".join(addresses)),
            masquerade_addresses=tuple(parse_addr(each) for each in NODE),
        )
        made.inside(made.node, lambda: plane.apply(state, None))
        until("the programs are attached", made.all_attached)
        yield made


@every_way
def test_a_backend_behind_a_tunnel_is_served(world: World, number: int, v6: bool):
    """Also with large segments both ways, which devices merge and split."""
    for protocol in PROTOCOLS:
        seen = world.dial(world.client, NODE[v6], 30000 + number, protocol)
        assert seen == address_on(number, 1, v6), "masqueraded to the address of the device"
    transfer(world.places[world.client], end(NODE[v6], 31000 + number), SIZE)


@every_way
def test_a_client_behind_a_tunnel_is_served(world: World, number: int, v6: bool):
    """It dials the address of the tunnel's device, and the backend is a pod of the node."""
    for protocol in PROTOCOLS:
        assert world.dial(world.other, address_on(number, 1, v6), 30000, protocol) == GATE[v6]


@every_way
def test_bytes_behind_a_packet_do_not_hide_it(world: World, number: int, v6: bool):
    """They are not taken for outer headers. The kernel cuts them off after the program has run."""
    name = TUNNELS[number - 1].name
    if "nbma" in name:  # nothing can be sent past the routes
        return
    front = end(address_on(number, 1, v6), 30000)
    datagram = udp(end(address_on(number, 2, v6), 41_000), front, b"hello")
    before = world.site.reasons()[Reason.NEW_FLOW]

    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as device:
            device.sendto(datagram + bytes(64), (name, 0x86DD if v6 else 0x0800))

    world.inside(world.other, send)
    until("it begins a flow", lambda: world.site.reasons()[Reason.NEW_FLOW] > before)


@every_way
def test_a_socket_of_the_node_reaches_a_backend_behind_a_tunnel(world: World, number: int, v6: bool):
    """No hook serves the socket, so its packets are translated at egress. They cannot take the
    stack again: those for a tunnel that needs a route, and is not ipip, are dropped, and counted.
    """
    vip = vip_of(number, v6)
    if "nbma" not in TUNNELS[number - 1].name:
        for protocol in PROTOCOLS:
            assert world.dial(world.node, vip, 80, protocol) == address_on(number, 1, v6)
        transfer(world.places[world.node], end(vip, 81), SIZE)
        return
    for protocol in PROTOCOLS:
        before = world.site.reasons()[Reason.NO_ROUTE]
        with watched(world.site) as monitor:
            answer = getattr(world.places[world.node], protocol)(vip, 80, timeout=0.5)
            reasons = [event.reason for event in read(monitor)]
        assert (answer["error"], reasons[0], {*reasons[1:]}) == ("timeout", "new_flow", {"no_route"})
        assert world.site.reasons()[Reason.NO_ROUTE] > before
