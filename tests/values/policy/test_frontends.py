# SPDX-License-Identifier: Apache-2.0
"""What clients dial: a Service's addresses, the node's NodePort addresses, and which of two
Services gets an address that both claim.
"""

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
    service_families,
)
from tests.support.table import each_cells, table
from tests.values.policy.services import addrs, cidrs, service

WORDS = {"dual": "ip=10.96.0.1,fd00::1", "vips": "vip=9.9.9.9,fd99::9", "range": "ranges=192.0.2.0/24"}
NAMES = {
    "ClusterIP=10.96.0.1:80": "own",
    "ClusterIP=[fd00::1]:80": "own",
    "NodePort=0.0.0.0:30080": "node-port",
    "NodePort=[::]:30080": "node-port",
    "LoadBalancer=9.9.9.9:80": "vip",
    "LoadBalancer=[fd99::9]:80": "vip",
}
"""Other frontends, all ExternalIPs, are their addresses."""


@each_cells(
    "service_text, v4, v6",
    """
one cluster IP: one family | web | own
IPv6 only | web ip=fd00::1 |  | own
dual stack | web dual | own | own
dual stack, IPv6 first | web ip=fd00::1,10.96.0.1 | own | own
a second cluster IP of one family is ignored, as in kube-proxy | web ip=10.96.0.1,10.96.0.2 | own
a NodePort is one frontend per family | web dual node-port=30080 | own node-port | own node-port
a NodePort in the families of the cluster IPs only | web node-port=30080 | own node-port
external IPs by family, sorted | web dual external=2.2.2.2,fd11::1,1.1.1.1 | own 1.1.1.1 2.2.2.2 | own [fd11::1]
an external IP of a family without cluster IP is ignored | web external=fd11::1 | own
LB VIPs by family | web dual vips | own vip | own vip
an LB VIP of a family without cluster IP is ignored | web vips | own vip
ClusterIP, NodePort, external IP, LB VIP | web vip=9.9.9.9 external=1.1.1.1 node-port=30080 | own node-port 1.1.1.1 vip
ranges restrict LB VIPs alone | web node-port=30080 external=1.1.1.1 vips range | own node-port 1.1.1.1 vip/restricted
ranges of one family leave the other family open | web dual vips range | own vip/restricted | own vip
a range that holds a family leaves it open | web dual vips range,0.0.0.0/0,fd00::/8 | own vip | own vip/restricted
::/0 is all of IPv6 and nothing of IPv4 | web dual vips range,::/0 | own vip/restricted | own vip
the unspecified address is not used as a cluster IP | web ip=0.0.0.0,::,fd00::1 |  | own
an address listed twice is one frontend | web external=1.1.1.1,1.1.1.1 | own 1.1.1.1
an LB VIP that is an external IP too stays restricted | web external=9.9.9.9 vip=9.9.9.9 range | own vip/restricted
the Service's own cluster IP listed again adds nothing | web external=10.96.0.1 vip=10.96.0.1 range | own
the unspecified address would mean NodePort: not used | web dual external=0.0.0.0,:: vip=0.0.0.0,:: | own | own
""",
)
def test_the_frontends_of_a_service(service_text, v4, v6):
    """A Service, and its expected frontends in each family, in the words of WORDS and NAMES."""
    text = service_text
    for word, meaning in WORDS.items():
        text = text.replace(f" {word}", f" {meaning}")
    web = service(text)
    for family, expected in ((4, v4), (6, v6)):
        found = compute_frontends(web, web.ports[0], family)
        shown = [f"{f.kind}={f.at}".removesuffix("/TCP") for f in found]
        names = [NAMES.get(one, one.removeprefix("ExternalIP=").removesuffix(":80")) for one in shown]
        marks = ["/restricted" if f.restricted else "" for f in found]
        assert " ".join(map("".join, zip(names, marks, strict=True))) == expected
        assert (family in service_families(web)) is bool(expected)
        assert externally_reachable(web, web.ports[0], family) or len(found) <= 1


# ---- addresses of the node ---------------------------------------------------------------------


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


@each_cells(
    "expected, node, setting, local_text",
    """
by default the Node's first address of each family | 10.0.0.5 fd00::5 | 10.0.0.5 192.168.1.5 fd00::5 fd00::6
a Node with one family has NodePorts in that family | 10.0.0.5 | 10.0.0.5
the first by the Node's order, not by number | 192.168.1.5 | 192.168.1.5 10.0.0.5
no Node object: all local addresses but loopback | 10.0.0.5 192.168.1.5 fd00::5 fe80::1
a Node object with loopback addresses |  | 127.0.0.1 ::1
all addresses but loopback | 10.0.0.5 192.168.1.5 fd00::5 fe80::1 | 10.0.0.5 | all
all takes precedence over networks | 10.0.0.5 192.168.1.5 fd00::5 fe80::1 |  | all 10.0.0.0/8
local addresses in the networks; all in a family without one | 192.168.1.5 fd00::5 fe80::1 | 10.0.0.5 | 192.168.0.0/16
networks of both families | 10.0.0.5 fd00::5 |  | 10.0.0.0/8 fd00::/64
several networks | 10.0.0.5 192.168.1.5 |  | 10.0.0.0/8 192.168.1.5/32 fdff::/16
0.0.0.0/0 and ::/0 are everything | 10.0.0.5 192.168.1.5 fd00::5 fe80::1 |  | 0.0.0.0/0 ::/0
::/0 does not apply to IPv4 | 10.0.0.5 fd00::5 fe80::1 |  | ::/0 10.0.0.0/8
a network without a local address: no NodePorts in that family | fd00::5 fe80::1 |  | 172.16.0.0/12
loopback networks are left to the socket hooks | fd00::5 fe80::1 |  | 127.0.0.0/8
the primary addresses and a network | 10.0.0.5 192.168.1.5 fd00::5 | 10.0.0.5 fd00::5 fd00::6 | 192.168.0.0/16 primary
the same for a Node with one family | 10.0.0.5 192.168.1.5 | 10.0.0.5 | primary 192.168.0.0/16
the primary addresses and loopback | 10.0.0.5 fd00::5 | 10.0.0.5 fd00::5 | primary 127.0.0.0/8 ::1/128
loopback of both families alone |  | 10.0.0.5 | 127.0.0.0/8 ::1/128
the primary addresses and a network, no Node object | 192.168.1.5 |  | primary 192.168.0.0/16
a primary address that is loopback | 192.168.1.5 | 127.0.0.1 | primary 192.168.0.0/16
nothing known, nothing served |  |  |  | none
each address once | 10.0.0.5 |  |  | 10.0.0.5 10.0.0.5 0.0.0.0 ::
""",
    local_text=lambda cell: cell or "127.0.0.1 127.1.2.3 ::1 10.0.0.5 192.168.1.5 fd00::5 fe80::1",
)
def test_the_addresses_of_node_ports(expected, node, setting, local_text):
    """Where NodePorts answer; the Node object's addresses, the setting, and this machine's addresses."""
    local = addrs(*local_text.removeprefix("none").split())
    found = node_port_addresses(Node("me", addrs(*node.split())), local, node_port_config(setting))
    assert found == in_order(expected)


@each_cells(
    "node, local, expected",
    """
the Node's first, though a later one is lower | 10.0.0.9 10.0.0.1 |  | 10.0.0.9
the first of each family | fd00::9 10.0.0.9 fd00::1 10.0.0.1 |  | 10.0.0.9 fd00::9
a local one only in a family that the Node lacks | 10.0.0.9 | 10.0.0.1 fd00::2 fd00::1 | 10.0.0.9 fd00::1
the lowest local one without a Node object |  | 10.0.0.2 10.0.0.1 | 10.0.0.1
never loopback | 127.0.0.1 10.0.0.2 | ::1 fd00::2 127.0.0.2 | 10.0.0.2 fd00::2
never link-local IPv6, to which backends have no route | fe80::1 10.0.0.2 | fd00::2 | 10.0.0.2 fd00::2
none
""",
)
def test_the_masquerade_addresses(node, local, expected):
    """The Node's addresses, the local ones, and the masquerade address of each family."""
    found = masquerade_addresses(Node("me", addrs(*node.split())), addrs(*local.split()))
    assert found == in_order(expected)


@each_cells(
    "expected, mode, cluster, node",
    """
no mode |  | NONE |  | 10.1.0.0/24
the cluster's network | 10.0.0.0/8 | CLUSTER_CIDR | 10.0.0.0/8 | 10.1.0.0/24
the first of each family counts | 10.0.0.0/8 fd00::/48 | CLUSTER_CIDR | 10.0.0.0/8 172.16.0.0/12 fd00::/48 fd01::/48
no network of the cluster |  | CLUSTER_CIDR |  | 10.1.0.0/24
the Node's networks | 10.1.0.0/24 fd00:1::/64 | NODE_CIDR | 10.0.0.0/8 | fd00:1::/64 10.1.0.0/24 10.2.0.0/24
the Node has none yet |  | NODE_CIDR | 10.0.0.0/8
by the bridge |  | BRIDGE_INTERFACE | 10.0.0.0/8 | 10.1.0.0/24
by the device's name |  | INTERFACE_NAME_PREFIX | 10.0.0.0/8 | 10.1.0.0/24
""",
    mode=LocalMode,
)
def test_the_networks_of_local_pods(expected, mode, cluster, node):
    """The detect-local mode, --cluster-cidr, the Node's podCIDRs; the networks of local pods."""
    config = Config(detect_local_mode=mode, cluster_cidrs=cidrs(cluster))
    found = local_networks(Node("me", pod_cidrs=cidrs(node)), config)
    assert found == tuple(sorted(cidrs(expected)))


class Unserved(NamedTuple):
    """The configured networks, the families reported as not served, and this machine's addresses."""

    setting: str
    families: str = ""
    local: str = "127.0.0.1 ::1 192.0.2.5 2001:db8::5 fe80::1"


UNSERVED = table(
    Unserved,
    """
192.0.2.0/24 2001:db8::/32
10.0.0.0/8 fd00::/8        | IPv4 and IPv6
10.0.0.0/8                 | IPv4
192.0.2.0/24 fd00::/8      | IPv6
10.0.0.0/8 192.0.2.0/24
192.0.2.0/24 fd00::/8      |               | 127.0.0.1 ::1 192.0.2.5 fe80::1
fd00::/8                   | IPv6          | 2001:db8::5 fe80::1
fd00::/8                   |               | febf:ffff::1
fd00::/8                   | IPv6          | fec0::1
fd00::/8                   | IPv6          | fe40::1
127.0.0.0/8 ::1/128
10.0.0.0/8                 |               | none
10.0.0.0/8 primary
10.0.0.0/8 all
""",
)


@pytest.mark.parametrize("row", [Unserved(""), *UNSERVED], ids=lambda row: f"{row.setting}, {row.local}")
def test_node_port_networks_without_a_local_address_are_reported(row: Unserved):
    local = addrs(*row.local.removeprefix("none").split())
    said = node_port_problem(local, node_port_config(row.setting))
    assert said.startswith(f"{row.families} NodePorts are not served: " if row.families else "")
    assert bool(said) == bool(row.families)


# ---- Services that claim one address -----------------------------------------------------------


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


@each_cells(
    "won_by, lost_by, at",
    """
a newer cluster IP beats an older VIP | z ip=9.9.9.9 created=new | b ip=2.2.2.2 vip=9.9.9.9 created=old
a newer cluster IP beats an older external IP | z ip=9.9.9.9 created=new | b ip=2.2.2.2 external=9.9.9.9 created=old
a newer VIP beats an older external IP | z vip=9.9.9.9 created=new | b ip=2.2.2.2 external=9.9.9.9 created=old
two VIPs: the older Service | z vip=9.9.9.9 created=old | b ip=2.2.2.2 vip=9.9.9.9 created=new
two external IPs: the older Service | z external=9.9.9.9 created=old | b ip=2.2.2.2 external=9.9.9.9 created=new
two NodePorts: the older | z node-port=30080 created=old | b ip=2.2.2.2 node-port=30080 created=new | 0.0.0.0:30080
NodePorts, two ports | z node-port=30080 created=old | b ip=2.2.2.2 port=81 node-port=30080 created=new | 0.0.0.0:30080
a Service of unknown age is the newest | z vip=9.9.9.9 created=new | b ip=2.2.2.2 vip=9.9.9.9
equally old: by namespace | a/z vip=9.9.9.9 created=old | b/b ip=2.2.2.2 vip=9.9.9.9 created=old
equally old in one namespace: by name | a vip=9.9.9.9 created=old | b ip=2.2.2.2 vip=9.9.9.9 created=old
both of unknown age: by name | a vip=9.9.9.9 | b ip=2.2.2.2 vip=9.9.9.9
""",
    at=lambda cell: cell or "9.9.9.9:80",
)
def test_which_service_wins_an_address(won_by, lost_by, at):
    """Two Services that claim one address; the winner first."""
    winner, loser = service(won_by), service(lost_by)
    for order in ((winner, loser), (loser, winner)):
        found = settled(*order)
        (won,) = states(winner)
        (asked,) = states(loser)
        lost = found[asked.key]
        assert found[won.key] == won, "the winner has all that it asked for"
        assert [(str(front), str(who)) for front, who in lost.lost] == [(f"{at}/TCP", str(winner.key))]
        assert lost.frontends == tuple(f for f in asked.frontends if str(f.at) != f"{at}/TCP")


@each_cells(
    "one, other",
    """
one address, other ports                  | a vip=9.9.9.9     | b ip=2.2.2.2 vip=9.9.9.9 port=81
one address and port, other protocols     | a vip=9.9.9.9     | b ip=2.2.2.2 vip=9.9.9.9 protocol=UDP
one NodePort, other protocols             | a node-port=30080 | b ip=2.2.2.2 node-port=30080 protocol=UDP
a NodePort and a VIP with the same number | a node-port=30080 | b ip=2.2.2.2 port=30080 vip=9.9.9.9
""",
)
def test_no_conflict(one, other):
    """Two Services that claim different addresses."""
    assert not any(state.lost for state in settled(service(one), service(other)).values())


def test_of_two_equal_ports_of_one_service_the_first_by_name_wins():
    ports = (ServicePort("b", Protocol.TCP, 80), ServicePort("a", Protocol.TCP, 80))
    one, two = settled(Service("ns", "web", "ClusterIP", addrs("10.96.0.1"), ports)).values()
    assert (len(one.frontends), len(two.frontends)) == (0, 1)
    assert [str(who) for _, who in one.lost] == ["ns/web"]
