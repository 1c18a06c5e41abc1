# SPDX-License-Identifier: Apache-2.0
"""What clients dial: a Service's addresses, the node's NodePort addresses, and which of two
Services gets an address that both claim.
"""

import ipaddress
import itertools
from typing import NamedTuple

import pytest

from kbpf.model.address import ANY4, ANY6, Addr, parse_addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import Frontend, FrontendAddress, ServicePortKey, ServiceState
from kbpf.model.objects import Cidr, Node, Protocol, Service, ServicePort
from kbpf.policy.frontends import (
    Claims,
    compute_frontends,
    externally_reachable,
    local_networks,
    masquerade_addresses,
    node_port_addresses,
    node_port_problem,
    restricts_clients,
    service_families,
)


def addrs(*texts: str) -> tuple[Addr, ...]:
    return tuple(map(parse_addr, texts))


def cidrs(*texts: str) -> tuple[Cidr, ...]:
    nets = [ipaddress.ip_network(text) for text in texts]
    return tuple(
        Cidr(parse_addr(str(net.network_address)), net.prefixlen + (96 if net.version == 4 else 0))
        for net in nets
    )


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
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_frontends_of_a_service(row: Row):
    port = ServicePort("http", Protocol.TCP, 80, row.node_port)
    service = Service(
        "ns", "web", "LoadBalancer", addrs(*row.cluster_ips), (port,),
        external_ips=addrs(*row.external), lb_vips=addrs(*row.vips),
        source_ranges=cidrs(*row.ranges),
    )  # fmt: skip
    for family, expected in ((4, row.v4), (6, row.v6)):
        found = compute_frontends(service, port, family)
        assert said(found) == expected
        assert (family in service_families(service)) is bool(expected)
        assert externally_reachable(service, port, family) or len(found) <= 1


def test_a_frontend_has_the_protocol_of_its_port():
    port = ServicePort("dns", Protocol.UDP, 53, 30053)
    service = Service("ns", "dns", "NodePort", addrs("10.96.0.1"), (port,))
    found = compute_frontends(service, port, 4)
    assert {f.at.protocol for f in found} == {Protocol.UDP}
    assert [f.at.address for f in found] == [parse_addr("10.96.0.1"), ANY4]


def test_without_ranges_nothing_is_restricted():
    assert not restricts_clients((), 4)
    assert not restricts_clients(cidrs("fd00::/8"), 4)
    assert restricts_clients(cidrs("0.0.0.0/1"), 4)


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
]  # fmt: skip


@pytest.mark.parametrize("row", NODE_ROWS, ids=lambda row: row.name)
def test_the_addresses_of_node_ports(row: NodeRow):
    networks = [text for text in row.networks if text != "primary"]
    config = Config(
        node_port_addresses=cidrs(*networks),
        all_node_port_addresses=row.everything,
        primary_node_ports="primary" in row.networks,
    )
    found = node_port_addresses(Node("me", addrs(*row.node)), addrs(*row.local), config)
    assert found == tuple(sorted(addrs(*row.expected)))


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
]  # fmt: skip


@pytest.mark.parametrize("row", MASQUERADE_ROWS, ids=lambda row: row.name)
def test_the_masquerade_addresses(row: MasqueradeRow):
    found = masquerade_addresses(Node("me", addrs(*row.node)), addrs(*row.local))
    assert found == tuple(sorted(addrs(*row.expected)))


class LocalRow(NamedTuple):
    """The detect-local mode, --cluster-cidr, the Node's podCIDRs; the networks of local pods."""

    name: str
    expected: tuple[str, ...]
    mode: LocalMode
    cluster: tuple[str, ...] = ()
    node: tuple[str, ...] = ()


LOCAL_ROWS = [
    LocalRow("no mode", (), LocalMode.NONE, (), ("10.1.0.0/24",)),
    LocalRow(
        "the cluster's network",
        ("10.0.0.0/8",),
        LocalMode.CLUSTER_CIDR,
        ("10.0.0.0/8",),
        ("10.1.0.0/24",),
    ),
    LocalRow(
        "the first of each family counts",
        ("10.0.0.0/8", "fd00::/48"),
        LocalMode.CLUSTER_CIDR,
        ("10.0.0.0/8", "172.16.0.0/12", "fd00::/48", "fd01::/48"),
    ),
    LocalRow("no network of the cluster", (), LocalMode.CLUSTER_CIDR, (), ("10.1.0.0/24",)),
    LocalRow(
        "the Node's networks",
        ("10.1.0.0/24", "fd00:1::/64"),
        LocalMode.NODE_CIDR,
        ("10.0.0.0/8",),
        ("fd00:1::/64", "10.1.0.0/24", "10.2.0.0/24"),
    ),
    LocalRow("the Node has none yet", (), LocalMode.NODE_CIDR, ("10.0.0.0/8",)),
    LocalRow("by the bridge", (), LocalMode.BRIDGE_INTERFACE, ("10.0.0.0/8",), ("10.1.0.0/24",)),
    LocalRow(
        "by the device's name",
        (),
        LocalMode.INTERFACE_NAME_PREFIX,
        ("10.0.0.0/8",),
        ("10.1.0.0/24",),
    ),
]


@pytest.mark.parametrize("row", LOCAL_ROWS, ids=lambda row: row.name)
def test_the_networks_of_local_pods(row: LocalRow):
    config = Config(detect_local_mode=row.mode, cluster_cidrs=cidrs(*row.cluster))
    found = local_networks(Node("me", pod_cidrs=cidrs(*row.node)), config)
    assert found == tuple(sorted(cidrs(*row.expected)))


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


OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"
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
]  # fmt: skip


def states(service: Service) -> list[ServiceState]:
    return [
        ServiceState(
            ServicePortKey(service.namespace, service.name, port.name, port.protocol, 4),
            compute_frontends(service, port, 4),
            (),
        )
        for port in service.ports
    ]


def settled(services: tuple[Service, ...]) -> dict[ServicePortKey, ServiceState]:
    claims, everything = Claims(), []
    for one in services:
        for state in states(one):
            claims.update(state.key, one.creation_timestamp, (), state.frontends)
            everything.append(state)
    return {state.key: claims.resolve(state) for state in everything}


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: row.name)
def test_which_service_wins_an_address(row: Conflict):
    for order in ((row.winner, row.loser), (row.loser, row.winner)):
        found = settled(order)
        (won,) = states(row.winner)
        (asked,) = states(row.loser)
        lost = found[asked.key]
        assert found[won.key] is not lost
        assert found[won.key] == won, "the winner has all that it asked for"
        assert [(str(at), str(who)) for at, who in lost.lost] == [(row.at, str(row.winner.key))]
        assert lost.frontends == tuple(f for f in asked.frontends if str(f.at) != row.at)


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
]  # fmt: skip


@pytest.mark.parametrize("row", NO_CONFLICTS, ids=lambda row: row.name)
def test_no_conflict(row: NoConflict):
    assert not any(state.lost for state in settled((row.one, row.two)).values())


def test_of_two_equal_ports_of_one_service_the_first_by_name_wins():
    ports = (ServicePort("b", Protocol.TCP, 80), ServicePort("a", Protocol.TCP, 80))
    one, two = settled((service("web", ports=ports),)).values()
    assert (len(one.frontends), len(two.frontends)) == (0, 1)
    assert [str(who) for _, who in one.lost] == ["ns/web"]


def test_a_withdrawn_claim_gives_the_address_to_the_next_in_every_order():
    rivals = [
        service(name, created, **VIP) for name, created in (("a", OLD), ("b", NEW), ("c", ""))
    ]
    at = FrontendAddress(*addrs("9.9.9.9"), 80, Protocol.TCP)
    for order in itertools.permutations(rivals):
        claims = Claims()
        for one in order:
            claims.update(states(one)[0].key, one.creation_timestamp, (), states(one)[0].frontends)
        for index, one in enumerate(rivals):
            winners = [r.name for r in rivals[index:] if _holds(claims, r, at)]
            assert winners == [one.name]
            (state,) = states(one)
            others = claims.update(state.key, "", state.frontends, ())
            assert {key.name for key in others} == {r.name for r in rivals[index + 1 :]}


def _holds(claims: Claims, service: Service, at: FrontendAddress) -> bool:
    return at in {f.at for f in claims.resolve(states(service)[0]).frontends}


def test_ipv6_node_ports_are_at_the_unspecified_address():
    port = ServicePort("http", Protocol.TCP, 80, 30080)
    dual = Service("ns", "web", "NodePort", addrs(*BOTH), (port,))
    assert compute_frontends(dual, port, 6)[1].at.address == ANY6


class UnservedRow(NamedTuple):
    """The configured networks, this machine's addresses, and the families reported as not served.

    `more` are further fields of the configuration.
    """

    networks: tuple[str, ...]
    local: tuple[str, ...]
    told: str
    more: dict[str, bool] = {}  # noqa: RUF012 - it is not changed


NODE = ("127.0.0.1", "::1", "192.0.2.5", "2001:db8::5", "fe80::1")
UNSERVED_ROWS = [
    UnservedRow((), NODE, ""),
    UnservedRow(("192.0.2.0/24", "2001:db8::/32"), NODE, ""),
    UnservedRow(("10.0.0.0/8", "fd00::/8"), NODE, "IPv4 and IPv6"),
    UnservedRow(("10.0.0.0/8",), NODE, "IPv4"),
    UnservedRow(("192.0.2.0/24", "fd00::/8"), NODE, "IPv6"),
    UnservedRow(("10.0.0.0/8", "192.0.2.0/24"), NODE, ""),
    UnservedRow(("192.0.2.0/24", "fd00::/8"), ("127.0.0.1", "::1", "192.0.2.5", "fe80::1"), ""),
    UnservedRow(("fd00::/8",), ("2001:db8::5", "fe80::1"), "IPv6"),
    UnservedRow(("fd00::/8",), ("febf:ffff::1",), ""),
    UnservedRow(("fd00::/8",), ("fec0::1",), "IPv6"),
    UnservedRow(("fd00::/8",), ("fe40::1",), "IPv6"),
    UnservedRow(("127.0.0.0/8", "::1/128"), NODE, ""),
    UnservedRow(("10.0.0.0/8",), (), ""),
    UnservedRow(("10.0.0.0/8",), NODE, "", {"primary_node_ports": True}),
    UnservedRow(("10.0.0.0/8",), NODE, "", {"all_node_port_addresses": True}),
]


@pytest.mark.parametrize(
    "row",
    UNSERVED_ROWS,
    ids=lambda row: ",".join((*row.networks, *row.more, f"{len(row.local)} local")),
)
def test_node_port_networks_without_a_local_address_are_reported(row: UnservedRow):
    config = Config(node_port_addresses=cidrs(*row.networks), **row.more)
    said = node_port_problem(addrs(*row.local), config)
    assert said.startswith(f"{row.told} NodePorts are not served: " if row.told else "")
    assert bool(said) == bool(row.told)
