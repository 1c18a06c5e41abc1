# SPDX-License-Identifier: Apache-2.0
"""A node to test packet programs on: a network namespace with four devices, all veths whose other
ends are in a namespace that has no other use.

    c0  clients, 198.51.100.0/24 and 2001:db8:9::/64, behind a router
    b0  a pod of the node, 10.244.1.2
    o0  another pod of the node, 10.244.1.3, which forges packets
    r0  a pod of another node, 10.244.2.2

Three Services, each for TCP, UDP and SCTP of both families, differ in how their packets are
forwarded:

    kept    to b0, through the stack, with the client's address
    masked  to b0, through the stack, with the node's address
    past    to r0, with the node's address; kbpf redirects it past the stack

A fourth one has no endpoints: its packets are refused.
"""

import contextlib
import ctypes
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from kbpf.dataplane.bpf.maps.layout import U32, U64
from kbpf.kernel.bpf import syscalls
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.config import MapSizes
from kbpf.model.desired import DesiredState
from kbpf.model.objects import Protocol
from tests.support.lab.lab import inside, ip, run, until
from tests.support.plane import Site, desired, service, sites

VARIANTS = ("kept", "masked", "past")
PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132}
CLIENT = {4: "198.51.100.7", 6: "2001:db8:9::7"}
VIP = {variant: {4: f"192.0.2.{n}", 6: f"2001:db8:1::{n}"} for n, variant in enumerate(VARIANTS, 1)}
REFUSING = {4: "192.0.2.9", 6: "2001:db8:1::9"}
POD = {
    "b0": {4: "10.244.1.2", 6: "fd00:244:1::2"},
    "o0": {4: "10.244.1.3", 6: "fd00:244:1::3"},
    "r0": {4: "10.244.2.2", 6: "fd00:244:2::2"},
}
OWN = {"b0": {4: "10.244.1.1", 6: "fd00:244:1::1"}, "r0": {4: "10.244.2.1", 6: "fd00:244:2::1"}}
ROUTED_BY = {4: "198.18.1.1", 6: "fd00:18:1::1"}
"""The node's address that clients route through."""
BACKEND = {"kept": "b0", "masked": "b0", "past": "r0"}
FRONT_PORT, BACK_PORT = 80, 8080

NEIGHBOUR = "02:00:00:00:00:aa"
"""The MAC address of all neighbours, set statically."""
DEVICES = ("c0", "b0", "o0", "r0")
T = TypeVar("T")


def inside_of(name: str, action: Callable[[], T]) -> T:
    """Runs `action` in the network namespace of this name."""
    return netns.run_in(Path("/run/netns") / name, action)


def end(host: str, port: int) -> str:
    """``host:port``, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def mac_of(where: str, device: str) -> str:
    def read() -> str:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as probe:
            probe.bind((device, 0))
            return str(probe.getsockname()[4].hex(":"))

    return inside_of(where, read)


@contextlib.contextmanager
def namespaces(*names: str) -> Iterator[None]:
    """Network namespaces that are deleted afterwards."""
    with contextlib.ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        yield


def build(name: str, wire: str, letter: str) -> None:
    """Creates devices, addresses and routes of the node `name`. The devices' other ends are in
    `wire`, with `letter` before their names.
    """
    settings = (
        "for f in /proc/sys/net/ipv6/conf/*/accept_dad; do echo 0 > $f; done;"
        "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done;"
        "echo 1 > /proc/sys/net/ipv4/ip_forward;"
        "echo 1 > /proc/sys/net/ipv6/conf/all/forwarding"
    )
    silent = "for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > $f; done"
    run(*inside(wire, None, "sh", "-c", silent))
    for device in DEVICES:
        ip(
            f"link add {letter}{device} type veth peer name {device} netns {name}",
            f"link set {letter}{device} up",
            netns=wire,
        )
    ip("link set lo up", *(f"link set {device} up" for device in DEVICES), netns=name)
    run(*inside(name, None, "sh", "-c", settings))
    ip(*_addresses(), netns=name)


def _addresses() -> Iterator[str]:
    """Addresses, neighbours and routes of a node."""
    for device, v4, v6 in (
        ("c0", "198.18.1.1/24", "fd00:18:1::1/64"),
        ("r0", "10.244.2.1/24", "fd00:244:2::1/64"),
        ("b0", "10.244.1.1/32", "fd00:244:1::1/128"),
        ("o0", "10.244.1.1/32", "fd00:244:1::1/128"),
    ):
        yield f"addr add {v4} dev {device}"
        yield f"addr add {v6} dev {device} nodad"
    for device, via in (("c0", ("198.18.1.2", "fd00:18:1::2")), *((d, POD[d].values()) for d in POD)):
        for host in via:
            yield f"neigh replace {host} lladdr {NEIGHBOUR} dev {device} nud permanent"
            if device in ("b0", "o0"):
                yield f"route add {host} dev {device}"
    yield f"neigh replace {POD['b0'][4]} lladdr {NEIGHBOUR} dev b0 nud permanent"
    yield "route add default via 198.18.1.2"
    yield "route add default via fd00:18:1::2 dev c0"
    yield "route add blackhole 192.0.2.0/24"
    yield "route add blackhole 2001:db8:1::/64"


class KbpfNode:
    """kbpf's programs on the devices of a node made by build()."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def start(self, state: DesiredState, sizes: MapSizes, **settings: object) -> None:
        """Attaches the programs and applies this state."""
        plane = self.site.open(sizes, packet_path=True, **settings)
        state = msgspec.structs.replace(
            state, masquerade_addresses=tuple(parse_addr(text) for text in ROUTED_BY.values())
        )
        inside_of(str(self.site.node), lambda: plane.apply(state, None))
        until("the programs are attached", lambda: plane.status().ready)

    def drain(self) -> list[bytes]:
        """Empties the queue; returns its keys, oldest first."""
        found = []
        with self.site.pinned("flow_queue") as order:
            taken = ctypes.create_string_buffer(order.value_size)
            while syscalls.lib().bpf_map_lookup_and_delete_elem(order.fd, None, taken) == 0:
                found.append(taken.raw)
        return found

    def forget(self) -> None:
        """Deletes all tracked connections."""
        with self.site.pinned("flows") as entries:
            entries.delete_batch(b"".join(key for key, _ in entries.items()))
        self.drain()
        with self.site.pinned("flow_count") as tracked:
            tracked.update(U32.pack(0), U64.pack(0))


def three_services() -> DesiredState:
    """A Service for each variant, family and protocol."""
    made = []
    for variant in VARIANTS:
        for family in (4, 6):
            at = end(POD[BACKEND[variant]][family], BACK_PORT)
            vip = f"LoadBalancer={end(VIP[variant][family], FRONT_PORT)}"
            kept = {"local": at, "external_local": True} if variant == "kept" else {}
            made += [
                service(f"{variant}-{name}", vip, at, Protocol(number), **kept) for name, number in PROTOCOLS.items()
            ]
    return desired(*made)


def with_refusals() -> DesiredState:
    """three_services(), and the one without endpoints."""
    refusing = [
        service(f"refusing-{name}", f"LoadBalancer={end(REFUSING[family], FRONT_PORT)}", "", Protocol(number))
        for family in (4, 6)
        for name, number in PROTOCOLS.items()
    ]
    return desired(*three_services().services.values(), *refusing)


@contextlib.contextmanager
def kbpf_node(cache: Path, name: str, state: DesiredState, sizes: MapSizes, **settings: object) -> Iterator[KbpfNode]:
    """kbpf's programs on the devices of a node made by build()."""
    with sites(cache) as make:
        node = KbpfNode(make(node=name))
        node.start(state, sizes, **settings)
        yield node
