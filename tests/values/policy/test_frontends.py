# SPDX-License-Identifier: Apache-2.0
"""What clients dial: a Service's addresses, the node's NodePort addresses, and which of two
Services gets an address that both claim.
"""

import itertools
from typing import NamedTuple

import pytest

from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import ServicePortKey, ServiceState
from kbpf.model.objects import Node, Protocol, Service, ServicePort
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
from tests.values.policy.services import addrs, cidrs, service


class Row(NamedTuple):
    """A Service, and its expected frontends in each family, as KIND=ADDRESS:PORT."""

    name: str
    service: str
    v4: str = ""
    v6: str = ""


OWN4, OWN6 = "ClusterIP=10.96.0.1:80", "ClusterIP=[fd00::1]:80"
PORT4, EXTERNAL4 = "NodePort=0.0.0.0:30080", "ExternalIP=1.1.1.1:80"
VIP4, VIP6 = "LoadBalancer=9.9.9.9:80", "LoadBalancer=[fd99::9]:80"
DUAL, VIPS = "web ip=10.96.0.1,fd00::1", "vip=9.9.9.9,fd99::9"

ROWS = [
    Row("one cluster IP: one family", "web", OWN4),
    Row("IPv6 only", "web ip=fd00::1", "", OWN6),
    Row("dual stack", DUAL, OWN4, OWN6),
    Row("dual stack, IPv6 first", "web ip=fd00::1,10.96.0.1", OWN4, OWN6),
    Row("a second cluster IP of one family is ignored, as in kube-proxy", "web ip=10.96.0.1,10.96.0.2", OWN4),
    Row(
        "a NodePort is one frontend per family",
        f"{DUAL} node-port=30080",
        f"{OWN4} {PORT4}",
        f"{OWN6} NodePort=[::]:30080",
    ),
    Row("a NodePort in the families of the cluster IPs only", "web node-port=30080", f"{OWN4} {PORT4}"),
    Row(
        "external IPs by family, sorted",
        f"{DUAL} external=2.2.2.2,fd11::1,1.1.1.1",
        f"{OWN4} {EXTERNAL4} ExternalIP=2.2.2.2:80",
        f"{OWN6} ExternalIP=[fd11::1]:80",
    ),
    Row("an external IP of a family without cluster IP is ignored", "web external=fd11::1", OWN4),
    Row("LB VIPs by family", f"{DUAL} {VIPS}", f"{OWN4} {VIP4}", f"{OWN6} {VIP6}"),
    Row("an LB VIP of a family without cluster IP is ignored", f"web {VIPS}", f"{OWN4} {VIP4}"),
    Row(
        "the order: ClusterIP, NodePort, external IPs, LB VIPs",
        "web node-port=30080 external=1.1.1.1 vip=9.9.9.9",
        f"{OWN4} {PORT4} {EXTERNAL4} {VIP4}",
    ),
    Row(
        "source ranges restrict LB VIPs and nothing else",
        f"web node-port=30080 external=1.1.1.1 {VIPS} ranges=192.0.2.0/24",
        f"{OWN4} {PORT4} {EXTERNAL4} {VIP4}/restricted",
    ),
    Row(
        "ranges of one family leave the other family open",
        f"{DUAL} {VIPS} ranges=192.0.2.0/24",
        f"{OWN4} {VIP4}/restricted",
        f"{OWN6} {VIP6}",
    ),
    Row(
        "a range that holds a whole family leaves it open",
        f"{DUAL} {VIPS} ranges=192.0.2.0/24,0.0.0.0/0,fd00::/8",
        f"{OWN4} {VIP4}",
        f"{OWN6} {VIP6}/restricted",
    ),
    Row(
        "::/0 is all of IPv6 and nothing of IPv4",
        f"{DUAL} {VIPS} ranges=192.0.2.0/24,::/0",
        f"{OWN4} {VIP4}/restricted",
        f"{OWN6} {VIP6}",
    ),
    Row("the unspecified address is not used as a cluster IP", "web ip=0.0.0.0,::,fd00::1", "", OWN6),
    Row("an address listed twice is one frontend", "web external=1.1.1.1,1.1.1.1", f"{OWN4} {EXTERNAL4}"),
    Row(
        "an LB VIP that is an external IP too stays restricted",
        "web external=9.9.9.9 vip=9.9.9.9 ranges=192.0.2.0/24",
        f"{OWN4} {VIP4}/restricted",
    ),
    Row(
        "the Service's own cluster IP listed again adds nothing",
        "web external=10.96.0.1 vip=10.96.0.1 ranges=192.0.2.0/24",
        OWN4,
    ),
    Row(
        "the unspecified address would mean NodePort: not used if listed",
        f"{DUAL} external=0.0.0.0,:: vip=0.0.0.0,::",
        OWN4,
        OWN6,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_frontends_of_a_service(row: Row):
    web = service(row.service)
    for family, expected in ((4, row.v4), (6, row.v6)):
        found = compute_frontends(web, web.ports[0], family)
        texts = [f"{f.kind}={f.at}".replace("/TCP", "/restricted" if f.restricted else "") for f in found]
        assert " ".join(texts) == expected
        assert (family in service_families(web)) is bool(expected)
        assert externally_reachable(web, web.ports[0], family) or len(found) <= 1


def test_a_frontend_has_the_protocol_of_its_port():
    dns = service("dns protocol=UDP port=53 node-port=30053")
    found = compute_frontends(dns, dns.ports[0], 4)
    assert [str(f.at) for f in found] == ["10.96.0.1:53/UDP", "0.0.0.0:30053/UDP"]


def test_without_ranges_nothing_is_restricted():
    assert not restricts_clients((), 4)
    assert not restricts_clients(cidrs("fd00::/8"), 4)
    assert restricts_clients(cidrs("0.0.0.0/1"), 4)


# ---- addresses of the node ---------------------------------------------------------------------


class NodeRow(NamedTuple):
    """The Node object's addresses, this machine's, the setting; and where NodePorts answer."""

    name: str
    expected: str
    node: str
    local: str
    setting: str = ""


LOCAL = "127.0.0.1 127.1.2.3 ::1 10.0.0.5 192.168.1.5 fd00::5 fe80::1"
NO_LOOPBACK = "10.0.0.5 192.168.1.5 fd00::5 fe80::1"

NODE_ROWS = [
    NodeRow(
        "by default the Node's first address of each family",
        "10.0.0.5 fd00::5",
        "10.0.0.5 192.168.1.5 fd00::5 fd00::6",
        LOCAL,
    ),
    NodeRow("a Node with one family has NodePorts in that family", "10.0.0.5", "10.0.0.5", LOCAL),
    NodeRow("the first by the Node's order, not by number", "192.168.1.5", "192.168.1.5 10.0.0.5", LOCAL),
    NodeRow("no Node object: all local addresses but loopback", NO_LOOPBACK, "", LOCAL),
    NodeRow("a Node object with loopback addresses", "", "127.0.0.1 ::1", LOCAL),
    NodeRow("all addresses but loopback", NO_LOOPBACK, "10.0.0.5", LOCAL, "all"),
    NodeRow("all takes precedence over networks", NO_LOOPBACK, "", LOCAL, "all 10.0.0.0/8"),
    NodeRow(
        "local addresses in the networks; all addresses in a family without a network",
        "192.168.1.5 fd00::5 fe80::1",
        "10.0.0.5",
        LOCAL,
        "192.168.0.0/16",
    ),
    NodeRow("networks of both families", "10.0.0.5 fd00::5", "", LOCAL, "10.0.0.0/8 fd00::/64"),
    NodeRow("several networks", "10.0.0.5 192.168.1.5", "", LOCAL, "10.0.0.0/8 192.168.1.5/32 fdff::/16"),
    NodeRow("0.0.0.0/0 and ::/0 are everything", NO_LOOPBACK, "", LOCAL, "0.0.0.0/0 ::/0"),
    NodeRow("::/0 does not apply to IPv4", "10.0.0.5 fd00::5 fe80::1", "", LOCAL, "::/0 10.0.0.0/8"),
    NodeRow(
        "a network without a local address: no NodePorts in that family", "fd00::5 fe80::1", "", LOCAL, "172.16.0.0/12"
    ),
    NodeRow("loopback networks are left to the socket hooks", "fd00::5 fe80::1", "", LOCAL, "127.0.0.0/8"),
    NodeRow(
        "the primary addresses and a network: both apply, in both families",
        "10.0.0.5 192.168.1.5 fd00::5",
        "10.0.0.5 fd00::5 fd00::6",
        LOCAL,
        "192.168.0.0/16 primary",
    ),
    NodeRow(
        "the primary addresses and a network, of a Node with one family",
        "10.0.0.5 192.168.1.5",
        "10.0.0.5",
        LOCAL,
        "primary 192.168.0.0/16",
    ),
    NodeRow(
        "the primary addresses and loopback",
        "10.0.0.5 fd00::5",
        "10.0.0.5 fd00::5",
        LOCAL,
        "primary 127.0.0.0/8 ::1/128",
    ),
    NodeRow("loopback of both families alone", "", "10.0.0.5", LOCAL, "127.0.0.0/8 ::1/128"),
    NodeRow(
        "the primary addresses and a network, no Node object: the network",
        "192.168.1.5",
        "",
        LOCAL,
        "primary 192.168.0.0/16",
    ),
    NodeRow("a primary address that is loopback", "192.168.1.5", "127.0.0.1", LOCAL, "primary 192.168.0.0/16"),
    NodeRow("nothing known, nothing served", "", "", ""),
    NodeRow("each address once", "10.0.0.5", "", "10.0.0.5 10.0.0.5 0.0.0.0 ::"),
]


def node_port_config(setting: str) -> Config:
    """The setting of NodePort addresses: networks, ``all`` and ``primary``."""
    words = setting.split()
    return Config(
        node_port_addresses=cidrs(" ".join(word for word in words if "/" in word)),
        all_node_port_addresses="all" in words,
        primary_node_ports="primary" in words,
    )


def in_order(text: str) -> tuple:
    return tuple(sorted(addrs(*text.split())))


@pytest.mark.parametrize("row", NODE_ROWS, ids=lambda row: row.name)
def test_the_addresses_of_node_ports(row: NodeRow):
    node, local = addrs(*row.node.split()), addrs(*row.local.split())
    found = node_port_addresses(Node("me", node), local, node_port_config(row.setting))
    assert found == in_order(row.expected)


MASQUERADES = {
    # the Node's addresses, the local ones, and the masquerade address of each family
    "the Node's first, though a later one is lower": ("10.0.0.9 10.0.0.1", "", "10.0.0.9"),
    "the first of each family": ("fd00::9 10.0.0.9 fd00::1 10.0.0.1", "", "10.0.0.9 fd00::9"),
    "a local one only in a family that the Node lacks": ("10.0.0.9", "10.0.0.1 fd00::2 fd00::1", "10.0.0.9 fd00::1"),
    "the lowest local one without a Node object": ("", "10.0.0.2 10.0.0.1", "10.0.0.1"),
    "never loopback": ("127.0.0.1 10.0.0.2", "::1 fd00::2 127.0.0.2", "10.0.0.2 fd00::2"),
    "none": ("", "", ""),
}


@pytest.mark.parametrize("name", MASQUERADES)
def test_the_masquerade_addresses(name: str):
    node, local, expected = MASQUERADES[name]
    found = masquerade_addresses(Node("me", addrs(*node.split())), addrs(*local.split()))
    assert found == in_order(expected)


class LocalRow(NamedTuple):
    """The detect-local mode, --cluster-cidr, the Node's podCIDRs; the networks of local pods."""

    name: str
    expected: str
    mode: LocalMode
    cluster: str = ""
    node: str = ""


LOCAL_ROWS = [
    LocalRow("no mode", "", LocalMode.NONE, "", "10.1.0.0/24"),
    LocalRow("the cluster's network", "10.0.0.0/8", LocalMode.CLUSTER_CIDR, "10.0.0.0/8", "10.1.0.0/24"),
    LocalRow(
        "the first of each family counts",
        "10.0.0.0/8 fd00::/48",
        LocalMode.CLUSTER_CIDR,
        "10.0.0.0/8 172.16.0.0/12 fd00::/48 fd01::/48",
    ),
    LocalRow("no network of the cluster", "", LocalMode.CLUSTER_CIDR, "", "10.1.0.0/24"),
    LocalRow(
        "the Node's networks",
        "10.1.0.0/24 fd00:1::/64",
        LocalMode.NODE_CIDR,
        "10.0.0.0/8",
        "fd00:1::/64 10.1.0.0/24 10.2.0.0/24",
    ),
    LocalRow("the Node has none yet", "", LocalMode.NODE_CIDR, "10.0.0.0/8"),
    LocalRow("by the bridge", "", LocalMode.BRIDGE_INTERFACE, "10.0.0.0/8", "10.1.0.0/24"),
    LocalRow("by the device's name", "", LocalMode.INTERFACE_NAME_PREFIX, "10.0.0.0/8", "10.1.0.0/24"),
]


@pytest.mark.parametrize("row", LOCAL_ROWS, ids=lambda row: row.name)
def test_the_networks_of_local_pods(row: LocalRow):
    config = Config(detect_local_mode=row.mode, cluster_cidrs=cidrs(row.cluster))
    found = local_networks(Node("me", pod_cidrs=cidrs(row.node)), config)
    assert found == tuple(sorted(cidrs(row.expected)))


NODE = "127.0.0.1 ::1 192.0.2.5 2001:db8::5 fe80::1"
UNSERVED = [
    # the configured networks, this machine's addresses, and the families reported as not served
    ("", NODE, ""),
    ("192.0.2.0/24 2001:db8::/32", NODE, ""),
    ("10.0.0.0/8 fd00::/8", NODE, "IPv4 and IPv6"),
    ("10.0.0.0/8", NODE, "IPv4"),
    ("192.0.2.0/24 fd00::/8", NODE, "IPv6"),
    ("10.0.0.0/8 192.0.2.0/24", NODE, ""),
    ("192.0.2.0/24 fd00::/8", "127.0.0.1 ::1 192.0.2.5 fe80::1", ""),
    ("fd00::/8", "2001:db8::5 fe80::1", "IPv6"),
    ("fd00::/8", "febf:ffff::1", ""),
    ("fd00::/8", "fec0::1", "IPv6"),
    ("fd00::/8", "fe40::1", "IPv6"),
    ("127.0.0.0/8 ::1/128", NODE, ""),
    ("10.0.0.0/8", "", ""),
    ("10.0.0.0/8 primary", NODE, ""),
    ("10.0.0.0/8 all", NODE, ""),
]


@pytest.mark.parametrize(("setting", "local", "families"), UNSERVED)
def test_node_port_networks_without_a_local_address_are_reported(setting: str, local: str, families: str):
    said = node_port_problem(addrs(*local.split()), node_port_config(setting))
    assert said.startswith(f"{families} NodePorts are not served: " if families else "")
    assert bool(said) == bool(families)


# ---- Services that claim one address -----------------------------------------------------------


class Conflict(NamedTuple):
    """Two Services that claim one address; the winner first."""

    name: str
    winner: str
    loser: str
    at: str = "9.9.9.9:80/TCP"


CONFLICTS = [
    Conflict(
        "a newer cluster IP beats an older VIP", "z ip=9.9.9.9 created=new", "b ip=2.2.2.2 vip=9.9.9.9 created=old"
    ),
    Conflict(
        "a newer cluster IP beats an older external IP",
        "z ip=9.9.9.9 created=new",
        "b ip=2.2.2.2 external=9.9.9.9 created=old",
    ),
    Conflict(
        "a newer VIP beats an older external IP",
        "z vip=9.9.9.9 created=new",
        "b ip=2.2.2.2 external=9.9.9.9 created=old",
    ),
    Conflict("two VIPs: the older Service", "z vip=9.9.9.9 created=old", "b ip=2.2.2.2 vip=9.9.9.9 created=new"),
    Conflict(
        "two external IPs: the older Service",
        "z external=9.9.9.9 created=old",
        "b ip=2.2.2.2 external=9.9.9.9 created=new",
    ),
    Conflict(
        "two NodePorts: the older Service",
        "z node-port=30080 created=old",
        "b ip=2.2.2.2 node-port=30080 created=new",
        "0.0.0.0:30080/TCP",
    ),
    Conflict(
        "two NodePorts of different ports",
        "z node-port=30080 created=old",
        "b ip=2.2.2.2 port=81 node-port=30080 created=new",
        "0.0.0.0:30080/TCP",
    ),
    Conflict("a Service of unknown age is the newest", "z vip=9.9.9.9 created=new", "b ip=2.2.2.2 vip=9.9.9.9"),
    Conflict("equally old: by namespace", "a/z vip=9.9.9.9 created=old", "b/b ip=2.2.2.2 vip=9.9.9.9 created=old"),
    Conflict(
        "equally old in one namespace: by name", "a vip=9.9.9.9 created=old", "b ip=2.2.2.2 vip=9.9.9.9 created=old"
    ),
    Conflict("both of unknown age: by name", "a vip=9.9.9.9", "b ip=2.2.2.2 vip=9.9.9.9"),
]


def states(service: Service) -> list[ServiceState]:
    return [
        ServiceState(
            ServicePortKey(service.namespace, service.name, port.name, port.protocol, 4),
            compute_frontends(service, port, 4),
            (),
        )
        for port in service.ports
    ]


def settled(*services: Service) -> dict[ServicePortKey, ServiceState]:
    claims, everything = Claims(), []
    for one in services:
        for state in states(one):
            claims.update(state.key, one.creation_timestamp, (), state.frontends)
            everything.append(state)
    return {state.key: claims.resolve(state) for state in everything}


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: row.name)
def test_which_service_wins_an_address(row: Conflict):
    winner, loser = service(row.winner), service(row.loser)
    for order in ((winner, loser), (loser, winner)):
        found = settled(*order)
        (won,) = states(winner)
        (asked,) = states(loser)
        lost = found[asked.key]
        assert found[won.key] == won, "the winner has all that it asked for"
        assert [(str(at), str(who)) for at, who in lost.lost] == [(row.at, str(winner.key))]
        assert lost.frontends == tuple(f for f in asked.frontends if str(f.at) != row.at)


NO_CONFLICTS = {
    "one address, other ports": ("a vip=9.9.9.9", "b ip=2.2.2.2 vip=9.9.9.9 port=81"),
    "one address and port, other protocols": ("a vip=9.9.9.9", "b ip=2.2.2.2 vip=9.9.9.9 protocol=UDP"),
    "one NodePort, other protocols": ("a node-port=30080", "b ip=2.2.2.2 node-port=30080 protocol=UDP"),
    "a NodePort and a VIP with the same number": ("a node-port=30080", "b ip=2.2.2.2 port=30080 vip=9.9.9.9"),
}


@pytest.mark.parametrize("name", NO_CONFLICTS)
def test_no_conflict(name: str):
    assert not any(state.lost for state in settled(*map(service, NO_CONFLICTS[name])).values())


def test_of_two_equal_ports_of_one_service_the_first_by_name_wins():
    ports = (ServicePort("b", Protocol.TCP, 80), ServicePort("a", Protocol.TCP, 80))
    one, two = settled(Service("ns", "web", "ClusterIP", addrs("10.96.0.1"), ports)).values()
    assert (len(one.frontends), len(two.frontends)) == (0, 1)
    assert [str(who) for _, who in one.lost] == ["ns/web"]


def test_a_withdrawn_claim_gives_the_address_to_the_next_in_every_order():
    rivals = [
        service("a vip=9.9.9.9 created=old"),
        service("b ip=2.2.2.2 vip=9.9.9.9 created=new"),
        service("c ip=3.3.3.3 vip=9.9.9.9"),
    ]
    for order in itertools.permutations(rivals):
        claims = Claims()
        for one in order:
            claims.update(states(one)[0].key, one.creation_timestamp, (), states(one)[0].frontends)
        for index, one in enumerate(rivals):
            left = [claims.resolve(states(rival)[0]) for rival in rivals[index:]]
            assert [len(state.lost) for state in left] == [0, *[1] * (len(left) - 1)]
            (state,) = states(one)
            others = claims.update(state.key, "", state.frontends, ())
            assert {key.name for key in others} == {r.name for r in rivals[index + 1 :]}
