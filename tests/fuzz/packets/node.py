# SPDX-License-Identifier: Apache-2.0
"""A node to test packet programs on: a network namespace with five devices, all veths whose other
ends are in a namespace that has no other use.

    c0  clients, 198.51.100.0/24 and 2001:db8:9::/64, behind a router
    b0  a pod of the node, 10.244.1.2
    o0  another pod of the node, 10.244.1.3, which forges packets
    p0  a pod of the node that is a client, 10.244.1.4
    r0  a pod of another node, 10.244.2.2

Three Services, each for TCP, UDP and SCTP of both families, differ in how their packets are
forwarded:

    kept    to b0, through the stack, with the client's address
    masked  to b0, through the stack, with the node's address
    past    to r0, with the node's address; kbpf redirects it past the stack

The pod b0 reaches itself by `masked`. A fourth Service has no endpoints: its packets are refused.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TypeVar

import msgspec

from kbpf.dataplane.bpf.maps.layout import U32, U64
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.config import MapSizes
from kbpf.model.desired import DesiredState, ServiceState
from tests.support.lab.lab import inside, ip, run, until
from tests.support.packets.packets import end
from tests.support.plane import Site, desired, services, sites

VARIANTS = ("kept", "masked", "past")
PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132}
CLIENT = {4: "198.51.100.7", 6: "2001:db8:9::7"}
VIP = {variant: {4: f"192.0.2.{n}", 6: f"2001:db8:1::{n}"} for n, variant in enumerate(VARIANTS, 1)}
REFUSING = {4: "192.0.2.9", 6: "2001:db8:1::9"}
POD = {
    "b0": {4: "10.244.1.2", 6: "fd00:244:1::2"},
    "o0": {4: "10.244.1.3", 6: "fd00:244:1::3"},
    "p0": {4: "10.244.1.4", 6: "fd00:244:1::4"},
    "r0": {4: "10.244.2.2", 6: "fd00:244:2::2"},
}
CLIENTS = {"c0": CLIENT, **POD}
"""By device."""
DIALS = {"kept": ("c0", "p0"), "masked": ("c0", "p0", "b0"), "past": ("c0", "p0")}
"""The clients of each Service."""
OWN = {"b0": {4: "10.244.1.1", 6: "fd00:244:1::1"}, "r0": {4: "10.244.2.1", 6: "fd00:244:2::1"}}
ROUTED_BY = {4: "198.18.1.1", 6: "fd00:18:1::1"}
"""The node's address that clients route through."""
BACKEND = {"kept": "b0", "masked": "b0", "past": "r0"}
FRONT_PORT, BACK_PORT = 80, 8080

NEIGHBOUR = "02:00:00:00:00:aa"
"""The MAC address of all neighbours, set statically."""
DEVICES = ("c0", "b0", "o0", "p0", "r0")
T = TypeVar("T")


def inside_of(name: str, action: Callable[[], T]) -> T:
    """Runs `action` in the network namespace of this name."""
    return netns.run_in(Path("/run/netns") / name, action)


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
    ip(ADDRESSES, netns=name)


ADDRESSES = f"""
addr add 198.18.1.1/24 dev c0
addr add fd00:18:1::1/64 dev c0 nodad
addr add 10.244.2.1/24 dev r0
addr add fd00:244:2::1/64 dev r0 nodad
addr add 10.244.1.1/32 dev b0
addr add fd00:244:1::1/128 dev b0 nodad
addr add 10.244.1.1/32 dev o0
addr add fd00:244:1::1/128 dev o0 nodad
addr add 10.244.1.1/32 dev p0
addr add fd00:244:1::1/128 dev p0 nodad
neigh replace 198.18.1.2 lladdr {NEIGHBOUR} dev c0 nud permanent
neigh replace fd00:18:1::2 lladdr {NEIGHBOUR} dev c0 nud permanent
neigh replace 10.244.1.2 lladdr {NEIGHBOUR} dev b0 nud permanent
neigh replace fd00:244:1::2 lladdr {NEIGHBOUR} dev b0 nud permanent
neigh replace 10.244.1.3 lladdr {NEIGHBOUR} dev o0 nud permanent
neigh replace fd00:244:1::3 lladdr {NEIGHBOUR} dev o0 nud permanent
neigh replace 10.244.1.4 lladdr {NEIGHBOUR} dev p0 nud permanent
neigh replace fd00:244:1::4 lladdr {NEIGHBOUR} dev p0 nud permanent
neigh replace 10.244.2.2 lladdr {NEIGHBOUR} dev r0 nud permanent
neigh replace fd00:244:2::2 lladdr {NEIGHBOUR} dev r0 nud permanent
route add 10.244.1.2 dev b0
route add fd00:244:1::2 dev b0
route add 10.244.1.3 dev o0
route add fd00:244:1::3 dev o0
route add 10.244.1.4 dev p0
route add fd00:244:1::4 dev p0
route add default via 198.18.1.2
route add default via fd00:18:1::2 dev c0
route add blackhole 192.0.2.0/24
route add blackhole 2001:db8:1::/64
"""


class KbpfNode:
    """kbpf's programs on the devices of a node made by build()."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def forget(self) -> None:
        """Deletes all tracked connections."""
        with self.site.pinned("flows") as entries:
            entries.delete_batch(b"".join(key for key, _ in entries.items()))
        self.site.drain_queue()
        with self.site.pinned("flow_count") as tracked:
            tracked.update(U32.pack(0), U64.pack(0))


SERVICES = """
kept: kept -> b0 local=b0 external=Local
masked: masked -> b0
past: past -> r0
refusing: refusing ->
"""


def four_services() -> DesiredState:
    """These Services, of each family and protocol."""
    made: list[ServiceState] = []
    for family, protocol in product((4, 6), PROTOCOLS):
        vips = {**VIP, "refusing": REFUSING}.items()
        names = {name: f"LoadBalancer={end(at[family], FRONT_PORT)}" for name, at in vips}
        names |= {device: end(at[family], BACK_PORT) for device, at in POD.items()}
        made += services(SERVICES.replace(":", f"-{protocol}:{protocol.upper()}"), names)
    return desired(*made)


@contextlib.contextmanager
def kbpf_node(cache: Path, name: str, state: DesiredState, sizes: MapSizes, **settings: object) -> Iterator[KbpfNode]:
    """kbpf's programs on the devices of a node made by build()."""
    with sites(cache) as make:
        site = make(node=name)
        plane = site.open(sizes, packet_path=True, **settings)
        state = msgspec.structs.replace(state, masquerade_addresses=tuple(map(parse_addr, ROUTED_BY.values())))
        inside_of(name, lambda: plane.apply(state, None))
        until("the programs are attached", lambda: plane.status().ready)
        yield KbpfNode(site)
