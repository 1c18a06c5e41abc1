# SPDX-License-Identifier: Apache-2.0
"""The rows of test_frontends.py."""

from typing import NamedTuple

from kbpf.model.desired import Frontend
from kbpf.model.objects import Protocol, Service, ServicePort
from tests.values.policy.services import NEW, OLD, addrs


def said(found: tuple[Frontend, ...]) -> list[str]:
    """Each frontend as text: kind, address, and `restricted` if it has source ranges."""
    return [f"{f.kind} {f.at}{' restricted' if f.restricted else ''}" for f in found]


class Row(NamedTuple):
    """A Service's addresses, and the expected frontends of its port 80/TCP in each family."""

    name: str
    v4: list[str]
    v6: list[str]
    cluster_ips: tuple[str, ...] = ("10.96.0.1",)
    node_port: int = 0
    external: tuple[str, ...] = ()
    vips: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()


OWN4, OWN6 = "ClusterIP 10.96.0.1:80/TCP", "ClusterIP [fd00::1]:80/TCP"
BOTH = ("10.96.0.1", "fd00::1")
VIP4, VIP6 = "LoadBalancer 9.9.9.9:80/TCP", "LoadBalancer [fd99::9]:80/TCP"
VIPS = ("9.9.9.9", "fd99::9")


ROWS = [
    Row("one cluster IP: one family", [OWN4], []),
    Row("IPv6 only", [], [OWN6], cluster_ips=("fd00::1",)),
    Row("dual stack", [OWN4], [OWN6], cluster_ips=BOTH),
    Row("dual stack, IPv6 first", [OWN4], [OWN6], cluster_ips=BOTH[::-1]),
    Row("a second cluster IP of one family is ignored, as in kube-proxy", [OWN4], [],
        cluster_ips=("10.96.0.1", "10.96.0.2")),
    Row("a NodePort is one frontend per family",
        [OWN4, "NodePort 0.0.0.0:30080/TCP"], [OWN6, "NodePort [::]:30080/TCP"],
        cluster_ips=BOTH, node_port=30080),
    Row("a NodePort in the families of the cluster IPs only",
        [OWN4, "NodePort 0.0.0.0:30080/TCP"], [], node_port=30080),
    Row("external IPs by family, sorted",
        [OWN4, "ExternalIP 1.1.1.1:80/TCP", "ExternalIP 2.2.2.2:80/TCP"],
        [OWN6, "ExternalIP [fd11::1]:80/TCP"],
        cluster_ips=BOTH, external=("2.2.2.2", "fd11::1", "1.1.1.1")),
    Row("an external IP of a family without cluster IP is ignored", [OWN4], [],
        external=("fd11::1",)),
    Row("LB VIPs by family", [OWN4, VIP4], [OWN6, VIP6], cluster_ips=BOTH, vips=VIPS),
    Row("an LB VIP of a family without cluster IP is ignored", [OWN4, VIP4], [], vips=VIPS),
    Row("the order: ClusterIP, NodePort, external IPs, LB VIPs",
        [OWN4, "NodePort 0.0.0.0:30080/TCP", "ExternalIP 1.1.1.1:80/TCP", VIP4], [],
        node_port=30080, external=("1.1.1.1",), vips=("9.9.9.9",)),
    Row("source ranges restrict LB VIPs and nothing else",
        [OWN4, "NodePort 0.0.0.0:30080/TCP", "ExternalIP 1.1.1.1:80/TCP", f"{VIP4} restricted"],
        [], node_port=30080, external=("1.1.1.1",), vips=VIPS, ranges=("192.0.2.0/24",)),
    Row("ranges of one family leave the other family open",
        [OWN4, f"{VIP4} restricted"], [OWN6, VIP6],
        cluster_ips=BOTH, vips=VIPS, ranges=("192.0.2.0/24",)),
    Row("a range that holds a whole family leaves it open",
        [OWN4, VIP4], [OWN6, f"{VIP6} restricted"],
        cluster_ips=BOTH, vips=VIPS, ranges=("192.0.2.0/24", "0.0.0.0/0", "fd00::/8")),
    Row("::/0 is all of IPv6 and nothing of IPv4",
        [OWN4, f"{VIP4} restricted"], [OWN6, VIP6],
        cluster_ips=BOTH, vips=VIPS, ranges=("192.0.2.0/24", "::/0")),
    Row("the unspecified address is not used as a cluster IP", [], [OWN6],
        cluster_ips=("0.0.0.0", "::", "fd00::1")),
    Row("an address listed twice is one frontend", [OWN4, "ExternalIP 1.1.1.1:80/TCP"], [],
        external=("1.1.1.1", "1.1.1.1")),
    Row("an LB VIP that is an external IP too stays restricted", [OWN4, f"{VIP4} restricted"], [],
        external=("9.9.9.9",), vips=("9.9.9.9",), ranges=("192.0.2.0/24",)),
    Row("the Service's own cluster IP listed again adds nothing", [OWN4], [],
        external=("10.96.0.1",), vips=("10.96.0.1",), ranges=("192.0.2.0/24",)),
    Row("the unspecified address would mean NodePort: not used if listed", [OWN4], [OWN6],
        cluster_ips=BOTH, external=("0.0.0.0", "::"), vips=("0.0.0.0", "::")),
]


class NodeRow(NamedTuple):
    """The Node object's addresses, this machine's, the setting; and where NodePorts answer."""

    name: str
    expected: tuple[str, ...]
    node: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    everything: bool = False


LOCAL = ("127.0.0.1", "127.1.2.3", "::1", "10.0.0.5", "192.168.1.5", "fd00::5", "fe80::1")
NO_LOOPBACK = ("10.0.0.5", "192.168.1.5", "fd00::5", "fe80::1")


NODE_ROWS = [
    NodeRow("by default the Node's first address of each family",
        ("10.0.0.5", "fd00::5"), ("10.0.0.5", "192.168.1.5", "fd00::5", "fd00::6"), LOCAL),
    NodeRow("a Node with one family has NodePorts in that family",
        ("10.0.0.5",), ("10.0.0.5",), LOCAL),
    NodeRow("the first by the Node's order, not by number",
        ("192.168.1.5",), ("192.168.1.5", "10.0.0.5"), LOCAL),
    NodeRow("no Node object: all local addresses but loopback", NO_LOOPBACK, (), LOCAL),
    NodeRow("a Node object with loopback addresses", (), ("127.0.0.1", "::1"), LOCAL),
    NodeRow("all addresses but loopback", NO_LOOPBACK, ("10.0.0.5",), LOCAL, everything=True),
    NodeRow("all takes precedence over networks", NO_LOOPBACK, (), LOCAL, ("10.0.0.0/8",), True),
    NodeRow("local addresses in the networks; all addresses in a family without a network",
        ("192.168.1.5", "fd00::5", "fe80::1"), ("10.0.0.5",), LOCAL, ("192.168.0.0/16",)),
    NodeRow("networks of both families",
        ("10.0.0.5", "fd00::5"), (), LOCAL, ("10.0.0.0/8", "fd00::/64")),
    NodeRow("several networks", ("10.0.0.5", "192.168.1.5"), (), LOCAL,
        ("10.0.0.0/8", "192.168.1.5/32", "fdff::/16")),
    NodeRow("0.0.0.0/0 and ::/0 are everything", NO_LOOPBACK, (), LOCAL, ("0.0.0.0/0", "::/0")),
    NodeRow("::/0 does not apply to IPv4", ("10.0.0.5", "fd00::5", "fe80::1"), (), LOCAL,
        ("::/0", "10.0.0.0/8")),
    NodeRow("a network without a local address: no NodePorts in that family",
        ("fd00::5", "fe80::1"), (), LOCAL, ("172.16.0.0/12",)),
    NodeRow("loopback networks are left to the socket hooks",
        ("fd00::5", "fe80::1"), (), LOCAL, ("127.0.0.0/8",)),
    NodeRow("the primary addresses and a network: both apply, in both families",
        ("10.0.0.5", "192.168.1.5", "fd00::5"), ("10.0.0.5", "fd00::5", "fd00::6"), LOCAL,
        ("192.168.0.0/16", "primary")),
    NodeRow("the primary addresses and a network, of a Node with one family",
        ("10.0.0.5", "192.168.1.5"), ("10.0.0.5",), LOCAL, ("primary", "192.168.0.0/16")),
    NodeRow("the primary addresses and loopback", ("10.0.0.5", "fd00::5"), ("10.0.0.5", "fd00::5"),
        LOCAL, ("primary", "127.0.0.0/8", "::1/128")),
    NodeRow("loopback of both families alone", (), ("10.0.0.5",), LOCAL,
        ("127.0.0.0/8", "::1/128")),
    NodeRow("the primary addresses and a network, no Node object: the network",
        ("192.168.1.5",), (), LOCAL, ("primary", "192.168.0.0/16")),
    NodeRow("a primary address that is loopback", ("192.168.1.5",), ("127.0.0.1",), LOCAL,
        ("primary", "192.168.0.0/16")),
    NodeRow("nothing known, nothing served", ()),
    NodeRow("each address once", ("10.0.0.5",), (), ("10.0.0.5", "10.0.0.5", "0.0.0.0", "::")),
]


class MasqueradeRow(NamedTuple):
    """The Node's addresses, the local ones, and the masquerade address of each family."""

    name: str
    expected: tuple[str, ...]
    node: tuple[str, ...]
    local: tuple[str, ...] = ()


MASQUERADE_ROWS = [
    MasqueradeRow("the Node's first, though a later one is lower",
                  ("10.0.0.9",), ("10.0.0.9", "10.0.0.1")),
    MasqueradeRow("the first of each family", ("10.0.0.9", "fd00::9"),
                  ("fd00::9", "10.0.0.9", "fd00::1", "10.0.0.1")),
    MasqueradeRow("a local one only in a family that the Node lacks", ("10.0.0.9", "fd00::1"),
                  ("10.0.0.9",), ("10.0.0.1", "fd00::2", "fd00::1")),
    MasqueradeRow("the lowest local one without a Node object",
                  ("10.0.0.1",), (), ("10.0.0.2", "10.0.0.1")),
    MasqueradeRow("never loopback", ("10.0.0.2", "fd00::2"), ("127.0.0.1", "10.0.0.2"),
                  ("::1", "fd00::2", "127.0.0.2")),
    MasqueradeRow("none", (), ()),
]


class Conflict(NamedTuple):
    """Two Services that claim one address; the winner first."""

    name: str
    winner: Service
    loser: Service
    at: str


def service(name: str, created: str = "", namespace: str = "ns", **said) -> Service:
    own = said.pop("cluster_ips", addrs(f"10.96.0.{ord(name[0])}"))
    ports = said.pop("ports", (ServicePort("http", Protocol.TCP, 80),))
    return Service(namespace, name, "LoadBalancer", own, ports, creation_timestamp=created, **said)


IP = {"cluster_ips": addrs("9.9.9.9")}
VIP, EXTERNAL = {"lb_vips": addrs("9.9.9.9")}, {"external_ips": addrs("9.9.9.9")}
NODE_PORT = {"ports": (ServicePort("http", Protocol.TCP, 80, 30080),)}
OTHER_PORT = {"ports": (ServicePort("alt", Protocol.TCP, 81, 30080),)}


CONFLICTS = [
    Conflict("a newer cluster IP beats an older VIP",
        service("z", NEW, **IP), service("b", OLD, **VIP), "9.9.9.9:80/TCP"),
    Conflict("a newer cluster IP beats an older external IP",
        service("z", NEW, **IP), service("b", OLD, **EXTERNAL), "9.9.9.9:80/TCP"),
    Conflict("a newer VIP beats an older external IP",
        service("z", NEW, **VIP), service("b", OLD, **EXTERNAL), "9.9.9.9:80/TCP"),
    Conflict("two VIPs: the older Service",
        service("z", OLD, **VIP), service("b", NEW, **VIP), "9.9.9.9:80/TCP"),
    Conflict("two external IPs: the older Service",
        service("z", OLD, **EXTERNAL), service("b", NEW, **EXTERNAL), "9.9.9.9:80/TCP"),
    Conflict("two NodePorts: the older Service",
        service("z", OLD, **NODE_PORT), service("b", NEW, **NODE_PORT), "0.0.0.0:30080/TCP"),
    Conflict("two NodePorts of different ports",
        service("z", OLD, **NODE_PORT), service("b", NEW, **OTHER_PORT), "0.0.0.0:30080/TCP"),
    Conflict("a Service of unknown age is the newest",
        service("z", NEW, **VIP), service("b", "", **VIP), "9.9.9.9:80/TCP"),
    Conflict("equally old: by namespace",
        service("z", OLD, "a", **VIP), service("b", OLD, "b", **VIP), "9.9.9.9:80/TCP"),
    Conflict("equally old in one namespace: by name",
        service("a", OLD, **VIP), service("b", OLD, **VIP), "9.9.9.9:80/TCP"),
    Conflict("both of unknown age: by name",
        service("a", **VIP), service("b", **VIP), "9.9.9.9:80/TCP"),
]


class NoConflict(NamedTuple):
    """Two Services that share an address or a port and do not conflict."""

    name: str
    one: Service
    two: Service


UDP_PORT = {"ports": (ServicePort("http", Protocol.UDP, 80, 30080),)}
NO_CONFLICTS = [
    NoConflict("one address, other ports", service("a", **VIP), service("b", **VIP, **OTHER_PORT)),
    NoConflict("one address and port, other protocols",
        service("a", **VIP), service("b", **VIP, **UDP_PORT)),
    NoConflict("one NodePort, other protocols",
               service("a", **NODE_PORT), service("b", **UDP_PORT)),
    NoConflict("a NodePort and a VIP with the same number", service("a", **NODE_PORT),
        service("b", ports=(ServicePort("x", Protocol.TCP, 30080),), **VIP)),
]
