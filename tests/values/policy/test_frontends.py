# SPDX-License-Identifier: Apache-2.0
"""What clients dial: a Service's addresses, the node's NodePort addresses, and which of two
Services gets an address that both claim.

"""

import ipaddress
import itertools
from typing import NamedTuple

import pytest

from kbpf.model.address import ANY4, ANY6, parse_addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import FrontendAddress, ServicePortKey, ServiceState
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
from tests.values.policy.rows_frontends import (
    BOTH,
    CONFLICTS,
    MASQUERADE_ROWS,
    NO_CONFLICTS,
    NODE_ROWS,
    ROWS,
    VIP,
    Conflict,
    MasqueradeRow,
    NoConflict,
    NodeRow,
    Row,
    said,
    service,
)
from tests.values.policy.services import NEW, OLD, addrs


def cidrs(*texts: str) -> tuple[Cidr, ...]:
    nets = [ipaddress.ip_network(text) for text in texts]
    return tuple(
        Cidr(parse_addr(str(net.network_address)), net.prefixlen + (96 if net.version == 4 else 0)) for net in nets
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_frontends_of_a_service(row: Row):
    port = ServicePort("http", Protocol.TCP, 80, row.node_port)
    service = Service(
        "ns",
        "web",
        "LoadBalancer",
        addrs(*row.cluster_ips),
        (port,),
        external_ips=addrs(*row.external),
        lb_vips=addrs(*row.vips),
        source_ranges=cidrs(*row.ranges),
    )
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
    LocalRow("the cluster's network", ("10.0.0.0/8",), LocalMode.CLUSTER_CIDR, ("10.0.0.0/8",), ("10.1.0.0/24",)),
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
    LocalRow("by the device's name", (), LocalMode.INTERFACE_NAME_PREFIX, ("10.0.0.0/8",), ("10.1.0.0/24",)),
]


@pytest.mark.parametrize("row", LOCAL_ROWS, ids=lambda row: row.name)
def test_the_networks_of_local_pods(row: LocalRow):
    config = Config(detect_local_mode=row.mode, cluster_cidrs=cidrs(*row.cluster))
    found = local_networks(Node("me", pod_cidrs=cidrs(*row.node)), config)
    assert found == tuple(sorted(cidrs(*row.expected)))


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


@pytest.mark.parametrize("row", NO_CONFLICTS, ids=lambda row: row.name)
def test_no_conflict(row: NoConflict):
    assert not any(state.lost for state in settled((row.one, row.two)).values())


def test_of_two_equal_ports_of_one_service_the_first_by_name_wins():
    ports = (ServicePort("b", Protocol.TCP, 80), ServicePort("a", Protocol.TCP, 80))
    one, two = settled((service("web", ports=ports),)).values()
    assert (len(one.frontends), len(two.frontends)) == (0, 1)
    assert [str(who) for _, who in one.lost] == ["ns/web"]


def test_a_withdrawn_claim_gives_the_address_to_the_next_in_every_order():
    rivals = [service(name, created, **VIP) for name, created in (("a", OLD), ("b", NEW), ("c", ""))]
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
    "row", UNSERVED_ROWS, ids=lambda row: ",".join((*row.networks, *row.more, f"{len(row.local)} local"))
)
def test_node_port_networks_without_a_local_address_are_reported(row: UnservedRow):
    config = Config(node_port_addresses=cidrs(*row.networks), **row.more)
    said = node_port_problem(addrs(*row.local), config)
    assert said.startswith(f"{row.told} NodePorts are not served: " if row.told else "")
    assert bool(said) == bool(row.told)
