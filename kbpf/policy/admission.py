# SPDX-License-Identifier: Apache-2.0
"""Addresses that a Service may not use as ExternalIP or LoadBalancer address (CVE-2020-8554), and
ClusterIPs that are left to this node.

A ClusterIP is allocated by the API server and is never refused. If a device of this node has it,
and a process of the node listens at the Service's port, such as a node-local DNS cache at the
ClusterIP of kube-dns, that process serves it: the port's traffic is not touched. The address alone
does not decide, because it outlives a cache that is killed, and exists before a cache that starts
can answer. LoadBalancer addresses are not left to the node, since kube-vip and MetalLB put them on
devices for the Service.

Every user with the right to create Services can set ExternalIPs; LoadBalancer addresses are in the
status, set only by controllers. So the rules for ExternalIPs are stricter. `--external-ips` with
networks lifts some of them (docs/operate.md, "Addresses that Services may take").
Traffic to a refused address is not touched; the rest of the Service is served.

Conflicts with another Service's NodePort are resolved by the claims in frontends.py, because they
depend on other Services.
"""

from collections.abc import Collection, Iterable, Set
from typing import Final, NamedTuple

import msgspec

from kbpf.model.address import ANY, V4_PREFIX, Addr, NodeAddresses, family_of, is_link_local6, parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import Frontend, FrontendAddress, FrontendKind
from kbpf.model.objects import (
    API_SERVER,
    Cidr,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServicePort,
)
from kbpf.policy.store import ObjectStore

RESERVED_NETWORKS: Final = tuple(map(Cidr.parse, ("0.0.0.0/8", "240.0.0.0/4", "::/96", "fec0::/10")))
"""No Service needs an ExternalIP in these: "this network" and reserved (RFC 1122, RFC 1112),
IPv4-compatible such as ::127.0.0.1 and site-local (RFC 4291).
"""

ApiServerAddress = tuple[Addr, int]
"""Address and port of an API server."""

_LINK_LOCAL4: Final = V4_PREFIX + bytes((169, 254))
METADATA_SERVICES: Final = frozenset(
    map(parse_addr, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16"))
)
"""Cloud metadata services that are not at a link-local address: Amazon's and Google's over IPv6,
Alibaba's, and Azure's WireServer. 169.254.169.254 is link-local.
"""


class InUse(NamedTuple):
    """What is in use besides Services. `api_servers`: those that the agent connected to. For the
    listeners see ReservedAddresses.
    """

    api_servers: Collection[ApiServerAddress] = ()
    listeners: Collection[FrontendAddress] = frozenset()
    device_listeners: Collection[FrontendAddress] = frozenset()


NOT_IN_USE: Final = InUse()


class ReservedAddresses(msgspec.Struct, frozen=True):
    """The addresses that are not available to Services.

    `api_servers`: endpoints of default/kubernetes, and servers that the agent connected to.
    `node_addresses`: those of our Node object. `local_addresses`: those and all others of this
    machine. `subnet_ends` and `local_networks`: see NodeAddresses.
    `listeners`: where processes of this node listen; a wildcard is ANY4 or ANY6.
    `device_listeners`: those of find_device_frontends() at which a process listens now.
    `pod_networks`: networks of this node's pods. `external_ips`: the setting.
    """

    api_servers: frozenset[ApiServerAddress] = frozenset()
    node_addresses: frozenset[Addr] = frozenset()
    local_addresses: frozenset[Addr] = frozenset()
    subnet_ends: frozenset[Addr] = frozenset()
    local_networks: tuple[Cidr, ...] = ()
    listeners: frozenset[FrontendAddress] = frozenset()
    device_listeners: frozenset[FrontendAddress] = frozenset()
    pod_networks: tuple[Cidr, ...] = ()
    external_ips: str | tuple[Cidr, ...] = "all"


def compute_reserved(
    node: Node,
    local_addresses: Collection[Addr],
    in_use: InUse,
    api_slices: Iterable[EndpointSlice],
    config: Config,
) -> ReservedAddresses:
    """Computes the reserved addresses. `api_slices`: those of default/kubernetes."""
    endpoints = {
        (endpoint.address, port.port)
        for slice_ in api_slices
        for endpoint in slice_.endpoints
        for port in slice_.ports
        if port.protocol is Protocol.TCP
    }
    local = local_addresses if isinstance(local_addresses, NodeAddresses) else NodeAddresses(local_addresses)
    return ReservedAddresses(
        frozenset(endpoints.union(in_use.api_servers)),
        frozenset(node.addresses),
        frozenset(node.addresses) | frozenset(local),
        local.subnet_ends,
        local.networks,
        frozenset(in_use.listeners),
        frozenset(in_use.device_listeners),
        node.pod_cidrs,
        config.external_ips,
    )


def refusal_reason(
    service: Service,
    port: ServicePort,
    frontend: Frontend,
    reserved: ReservedAddresses,
    store: ObjectStore,
) -> str:
    """Returns why the Service may not have this ExternalIP or LoadBalancer address; "" if it may.
    The Service's own ClusterIPs are no ExternalIPs.
    """
    address = frontend.at.address
    is_external = frontend.kind is FrontendKind.EXTERNAL_IP
    is_listed = is_external and _is_listed(address, reserved)
    reason = _setting_refusal(reserved) if is_external and not is_listed else ""
    if not reason and service.key != API_SERVER:
        reason = _unconditional_refusal(frontend, reserved)
    if not reason and is_external:
        reason = _external_ip_refusal(address, reserved, is_listed, store)
    if reason:
        return reason
    is_local = address in reserved.local_addresses
    if is_local or any(cidr.contains(address) for cidr in reserved.local_networks):
        reason = _node_address_refusal(port, frontend, reserved, is_external and not is_listed)
        if is_local or reason:
            return reason
    is_own_node_port = port.node_port == frontend.at.port
    if is_external and not is_listed and store.has_node(address) and not is_own_node_port:
        return "it is an address of another node, which --external-ips does not list"
    in_pod_network = any(cidr.contains(address) for cidr in reserved.pod_networks)
    if not is_listed and (in_pod_network or (is_external and store.has_pod(address))):
        return "it is an address of a Pod, or in the network of this node's Pods"
    return ""


def is_left_to_node(frontend: Frontend, reserved: ReservedAddresses) -> bool:
    """Whether a process of this node serves the ClusterIP, which a device of the node has."""
    return is_on_device(frontend, reserved) and frontend.at in reserved.device_listeners


def is_on_device(frontend: Frontend, reserved: ReservedAddresses) -> bool:
    """Whether the frontend is at a ClusterIP that a device of this node has."""
    return frontend.kind is FrontendKind.CLUSTER_IP and frontend.at.address in reserved.local_addresses


def find_device_frontends(service: Service, local_addresses: Set[Addr]) -> frozenset[FrontendAddress]:
    """The ClusterIPs that devices of this node have, with each port of the Service."""
    return frozenset(
        FrontendAddress(address, port.port, port.protocol)
        for address in service.cluster_ips
        if address in local_addresses
        for port in service.ports
    )


def is_listening(at: FrontendAddress, listeners: Set[FrontendAddress]) -> bool:
    """Whether one of the `listeners`, wildcards included, accepts what arrives at this address. One
    that accepts both families is listed as both.
    """
    candidates = (at.address, ANY[family_of(at.address)])
    return any(at._replace(address=candidate) in listeners for candidate in candidates)


def _setting_refusal(reserved: ReservedAddresses) -> str:
    """The reason for an ExternalIP that is in none of the configured networks."""
    if reserved.external_ips == "all":
        return ""
    reason = "it is not in a network of --external-ips"
    return reason if reserved.external_ips else "--external-ips is off"


def _unconditional_refusal(frontend: Frontend, reserved: ReservedAddresses) -> str:
    """The reason for an address that no setting allows."""
    address, port, protocol = frontend.at
    if protocol is Protocol.TCP and (address, port) in reserved.api_servers:
        return "it is an address of the API server"
    if address in METADATA_SERVICES or address.startswith(_LINK_LOCAL4) or is_link_local6(address):
        return "it is a link-local address or that of a cloud metadata service"
    return ""


def _external_ip_refusal(address: Addr, reserved: ReservedAddresses, is_listed: bool, store: ObjectStore) -> str:
    if store.has_cluster_ip(address):
        return "it is the ClusterIP of another Service"
    if address in reserved.subnet_ends:
        return "it is the network or broadcast address of a subnet of this node"
    if not is_listed and any(network.contains(address) for network in RESERVED_NETWORKS):
        return "it is in a reserved network, which --external-ips does not list"
    return ""


def _node_address_refusal(port: ServicePort, frontend: Frontend, reserved: ReservedAddresses, is_unlisted: bool) -> str:
    """The reason for an address of this machine.

    An address that only a device has may be the Service's own VIP, put there by kube-vip, MetalLB
    or keepalived. `is_unlisted`: an ExternalIP in none of the configured networks.
    """
    address = frontend.at.address
    if port.node_port == frontend.at.port:
        return ""
    if is_unlisted and address in reserved.node_addresses:
        return "it is an address of this node, which --external-ips does not list"
    is_taken = is_listening(frontend.at, reserved.listeners)
    if is_taken and (is_unlisted or address in reserved.node_addresses):
        return "a process on this node listens on it"
    return ""


def _is_listed(address: Addr, reserved: ReservedAddresses) -> bool:
    networks = reserved.external_ips
    return isinstance(networks, tuple) and any(cidr.contains(address) for cidr in networks)
