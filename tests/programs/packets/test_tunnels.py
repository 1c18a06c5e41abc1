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
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
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
from tests.support.lab.field import FORWARDINGS
from tests.support.lab.lab import PATIENCE, ip, let_forward, run, settled, until
from tests.support.plane import Site, desired, service, sites

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
    next6: str
    extra: str = ""


TUNNELS = (
    # Calico: the module's own device, and routes of BIRD "via NODE dev tunl0 onlink"
    # (confd/etc/calico/confd/templates/bird_ipam.cfg.template)
    Tunnel("tunl0", "", "via {net4_6}.{other} dev tunl0 onlink", ""),
    # kube-router: a tunnel for each node of another subnet (pkg/tunnels/linux_tunnels.go)
    Tunnel("tun-other", "type ipip local {net4_7}.{own} remote {net4_7}.{other}", "dev tun-other", ""),
    Tunnel(
        "gre-nbma",
        "type gre local {net4_6}.{own} ttl 64",
        "via {next} dev gre-nbma onlink",
        "",
        "neigh add {next} lladdr {net4_6}.{other} dev gre-nbma nud permanent",
    ),
    Tunnel(
        "gre-key",
        "type gre local {net4_7}.{own} remote {net4_7}.{other} ttl 64 key 7 csum",
        "dev gre-key",
        "dev gre-key",
    ),
    Tunnel("sit-nbma", "type sit local {net4_6}.{own} ttl 64", "", "via ::{net4_6}.{other} dev sit-nbma"),
    Tunnel("sit-other", "type sit local {net4_7}.{own} remote {net4_7}.{other} ttl 64", "", "dev sit-other"),
    Tunnel("ip6-nbma", "type ip6tnl local {net6_8}:{own} mode ip6ip6", "", "via {net6_8}:{other} dev ip6-nbma onlink"),
    Tunnel(
        "ip6-other",
        "type ip6tnl local {net6_7}:{own} remote {net6_7}:{other} mode any",
        "dev ip6-other",
        "dev ip6-other",
    ),
)
WAYS = [
    pytest.param(number, v6, id=f"{tunnel.name}-{'v6' if v6 else 'v4'}")
    for number, tunnel in enumerate(TUNNELS, 1)
    for v6 in (False, True)
    if (tunnel.next6 if v6 else tunnel.next4)
]
PROTOCOLS = pytest.mark.parametrize("protocol", list(Protocol)[:2], ids=lambda p: p.name.lower())


def pod_of(number: int, v6: bool) -> str:
    """The other node's pod behind this tunnel; 0: the pod of the node itself."""
    return f"fd00:10:244::{number + 1}" if v6 else f"10.244.0.{number + 1}"


def address_on(number: int, end: int, v6: bool) -> str:
    """The address of the node (1) or of the other node (2) on this tunnel's device."""
    return f"fd00:10:245:{number}::{end}" if v6 else f"10.245.{number}.{end}"


def endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class World:
    """The namespaces, with a server for each pod."""

    site: Site

    def __init__(self, own: ExitStack) -> None:
        self._own = own
        prefix = f"kbtn{os.getpid()}"
        self.client, self.node, self.other, self.pod = (f"{prefix}{letter}" for letter in ("c", "n", "o", "p"))
        for name in (self.client, self.node, self.other, self.pod):
            run("ip", "netns", "add", name)
            own.callback(run, "ip", "netns", "del", name)
            ip("link set lo up", netns=name)
        let_forward(self.node)
        self._veth("eth0", self.client, "24", "64", NODE, CLIENT)
        for net4, net6 in (("198.18.6", "fd00:198:6:"), ("198.18.7", "fd00:198:7:")):
            ends = [(f"{net4}.{end}", f"{net6}:{end}") for end in (1, 2)]
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
        for v6 in (False, True):
            self.serve(self.pod, pod_of(0, v6))
        for number, v6 in (way.values for way in WAYS):
            self.serve(self.other, pod_of(number, v6))

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
            own, values["next"] = (address_on(number, end, v6) for end in (this, that))
            flags = f"/128 dev {tunnel.name} nodad" if v6 else f"/32 dev {tunnel.name}"
            lines += [f"addr add {own}{flags}", *([tunnel.extra] if tunnel.extra else [])]
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

    def socket_in(self, where: str, v6: bool, protocol: Protocol) -> socket.socket:
        kind = socket.SOCK_STREAM if protocol is Protocol.TCP else socket.SOCK_DGRAM
        family = socket.AF_INET6 if v6 else socket.AF_INET
        made = self.inside(where, lambda: socket.socket(family, kind))
        made.settimeout(PATIENCE)
        return made

    def serve(self, where: str, host: str) -> None:
        """Servers on port 8080: of UDP the sender's address, of TCP also what the client sent."""
        for protocol in (Protocol.TCP, Protocol.UDP):
            server = self.socket_in(where, ":" in host, protocol)
            server.settimeout(None)
            until("the address is usable", lambda s=server: _bind(s, host))
            if protocol is Protocol.TCP:
                server.listen()
            target = _serve_udp if protocol is Protocol.UDP else _serve_tcp
            thread = threading.Thread(target=target, args=(server,), daemon=True)
            thread.start()
            self._own.callback(server.close)

    def dial(self, where: str, host: str, port: int, protocol: Protocol, size: int = 0) -> str:
        """The client's address as the server sees it; the client must see the address it dialled.
        With `size`, checks that as many bytes come back as were sent.
        """
        with self.socket_in(where, ":" in host, protocol) as client:
            client.connect((host, port))
            if protocol is Protocol.UDP:
                client.send(b"who?")
                return client.recv(100).decode()
            seen = client.recv(100).decode().rstrip("\n")
            sender = threading.Thread(target=lambda: _send(client, size))
            sender.start()
            received = 0
            while data := client.recv(1 << 16):
                received += len(data)
            sender.join()
            assert received == size
            return seen


def _bind(server: socket.socket, host: str) -> bool:
    with suppress(OSError):
        server.bind((host, 8080))
        return True
    return False


def _send(client: socket.socket, size: int) -> None:
    client.sendall(bytes(size))
    client.shutdown(socket.SHUT_WR)


def _serve_udp(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            _, sender = server.recvfrom(100)
            server.sendto(sender[0].encode(), sender)


def _serve_tcp(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            threading.Thread(target=_echo, args=server.accept(), daemon=True).start()


def _echo(connection: socket.socket, peer: tuple[str, int]) -> None:
    with suppress(OSError), connection:
        connection.sendall(f"{peer[0]}\n".encode())
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def services() -> Iterator[ServiceState]:
    """NodePort 30000 + number, for the pod behind the tunnel of that number; VIP 192.0.2.number."""
    for number in range(len(TUNNELS) + 1):
        for v6 in (False, True):
            for protocol in (Protocol.TCP, Protocol.UDP):
                vip = f"2001:db8::{number + 1}" if v6 else f"192.0.2.{number + 1}"
                frontends = (
                    f"NodePort={endpoint('::' if v6 else '0.0.0.0', 30000 + number)} LoadBalancer={endpoint(vip, 80)}"
                )
                to = endpoint(pod_of(number, v6), 8080)
                yield service(f"s{number}-{v6:d}", frontends, to, protocol)


@pytest.fixture(scope="module")
def all_tunnel_modules() -> Iterator[None]:
    with tunnel_modules(*TUNNEL_MODULES):
        yield


@pytest.fixture(scope="module", params=FORWARDINGS)
def world(request: pytest.FixtureRequest, artifact_cache: Path, all_tunnel_modules: None) -> Iterator[World]:
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


@PROTOCOLS
@pytest.mark.parametrize(("number", "v6"), WAYS)
def test_a_backend_behind_a_tunnel_is_served(world: World, number: int, v6: bool, protocol: Protocol):
    seen = world.dial(world.client, NODE[v6], 30000 + number, protocol)
    assert seen == address_on(number, 1, v6), "masqueraded to the address of the device"


@pytest.mark.parametrize(("number", "v6"), WAYS)
def test_a_transfer_through_a_tunnel_is_whole(world: World, number: int, v6: bool):
    """Large segments both ways, which devices merge and split."""
    world.dial(world.client, NODE[v6], 30000 + number, Protocol.TCP, SIZE)


@PROTOCOLS
@pytest.mark.parametrize(("number", "v6"), WAYS)
def test_a_client_behind_a_tunnel_is_served(world: World, number: int, v6: bool, protocol: Protocol):
    """It dials the address of the tunnel's device, and the backend is a pod of the node."""
    seen = world.dial(world.other, address_on(number, 1, v6), 30000, protocol)
    assert seen == GATE[v6]


@PROTOCOLS
@pytest.mark.parametrize(("number", "v6"), WAYS)
def test_a_socket_of_the_node_reaches_a_backend_behind_a_tunnel(
    world: World, number: int, v6: bool, protocol: Protocol
):
    """No hook serves the socket, so its packets are translated at egress. They cannot take the
    stack again: those for a tunnel that needs a route, and is not ipip, are dropped, and counted.
    """
    vip = f"2001:db8::{number + 1}" if v6 else f"192.0.2.{number + 1}"
    if "nbma" not in TUNNELS[number - 1].name:
        size = SIZE if protocol is Protocol.TCP else 0
        assert world.dial(world.node, vip, 80, protocol, size) == address_on(number, 1, v6)
        return
    before = world.site.reasons()[Reason.NO_ROUTE]
    with watched(world.site) as monitor, world.socket_in(world.node, v6, protocol) as client:
        client.settimeout(0.5)
        with suppress(TimeoutError):
            client.connect((vip, 80))
            client.send(b"who?")
        reasons = [event.reason for event in read(monitor)]
    assert reasons[0] == "new_flow"
    assert {*reasons[1:]} == {"no_route"}
    assert world.site.reasons()[Reason.NO_ROUTE] > before
