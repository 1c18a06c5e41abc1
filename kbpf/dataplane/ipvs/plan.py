# SPDX-License-Identifier: Apache-2.0
"""Translates Service ports into IPVS virtual services and elements of nftables sets.

IPVS has one list of real servers per virtual service, for all clients. nftables does everything
that depends on the client or does not end at a backend: refusing and dropping, source ranges,
masquerading, and the short circuit of external frontends with policy Local. For the short circuit,
nftables sets a fwmark on connections from this node and its pods, and a virtual service for that
fwmark has the Cluster endpoints (the rule is that of kube-proxy's iptables/proxier.go).

A frontend without backends keeps a virtual service without real servers, and so does a short
circuit: nftables lets no new connection reach it, but the connections that removed backends still
have can be drained. For the same reason an unneeded short circuit is kept until it is idle.
"""

from collections.abc import Container, Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.address import ANY, Addr, family_of
from kbpf.model.desired import (
    BackendSet,
    DesiredState,
    Frontend,
    FrontendAddress,
    FrontendKind,
    RealServer,
    ServicePortKey,
    ServiceState,
    Spread,
    VirtualService,
)
from kbpf.model.objects import Algorithm, Cidr, Protocol

HOST_PREFIX_LENGTH: Final = 128
"""The prefix length of one address."""


class ServerPool(msgspec.Struct, frozen=True):
    """The real servers of a virtual service with their weights, and how they are chosen.

    - `persistence`: in seconds; 0 for none.
    - `by_port`: a hashing scheduler also hashes the client's port.
    - `servers`: a real server with weight 0 is being drained.
    """

    scheduler: str
    persistence: int = 0
    by_port: bool = False
    servers: tuple[tuple[RealServer, int], ...] = ()


class SetName(StrEnum):
    """The sets of our table. Each exists twice, for IPv4 (`NAME4`) and IPv6 (`NAME6`).

    An element is (address, protocol, port), except in:

    - VIRTUAL_IPS and NODE_IPS: (address,)
    - LOCAL_NETWORKS: (network,)
    - HAIRPINS: (source, address of an endpoint): an endpoint on this node and itself, or a
      ClusterIP that a device of the node has and each endpoint behind it
    - SOURCES: (network, address, protocol, port)
    - SHORT_CIRCUITS and FWMARKS, which are maps: (address, protocol, port, fwmark)
    - OWN_FWMARKS: (ANY address of the family, fwmark)
    """

    OWN = "own"  # may be a virtual service of ours; services not in it are never touched
    OWN_FWMARKS = "own_marks"
    VIRTUAL_IPS = "virtual_ips"  # the addresses on the dummy device
    SERVED = "served"  # has real servers
    REFUSED = "refused"  # no endpoints on any node
    DROPPED = "dropped"  # policy Local, and endpoints on other nodes only
    MASQUERADED = "masqueraded"  # for all clients
    MASQUERADED_OUTSIDE = "masqueraded_outside"  # for clients that are not pods of this node
    HAIRPINS = "hairpin_ips"  # connections whose replies would not pass IPVS
    RESTRICTED = "restricted"  # source ranges apply
    SOURCES = "sources"
    SHORT_CIRCUITS = "short_circuits"
    # By frontend; a NodePort is one element, with the ANY address. No rule uses it: the next agent
    # reads it to keep the fwmarks.
    FWMARKS = "marks"
    LOCAL_NETWORKS = "local_networks"  # of the pods of this node
    NODE_IPS = "node_ips"  # the node's own addresses


MAP_SETS: Final = frozenset((SetName.SHORT_CIRCUITS, SetName.FWMARKS))
"""Maps, from a frontend to one fwmark."""
OWNERSHIP_SETS: Final = frozenset((SetName.OWN, SetName.OWN_FWMARKS))
LATE_SETS: Final = frozenset((SetName.SERVED, SetName.SHORT_CIRCUITS))
"""Sets whose elements let connections reach a virtual service, which must exist by then."""

ElementField = Addr | Cidr | Protocol | int
Element = tuple[SetName, tuple[ElementField, ...]]


class ServicePortPlan(msgspec.Struct, frozen=True):
    """What one Service port needs in the kernel. `serving`: for UDP, the real servers that still
    serve; flows to others are cut. None for other protocols.
    """

    pools: Mapping[VirtualService, ServerPool]
    elements: frozenset[Element]
    serving: frozenset[RealServer] | None = None


EMPTY_PLAN: Final = ServicePortPlan({}, frozenset())
NODE_KEY: Final = ServicePortKey("", "", "", Protocol.TCP, 0)
"""The key of the node's own elements, which belong to no Service port."""


class NodeContext(NamedTuple):
    """The node's part of the input of a plan.

    - `node_addresses`: the addresses that NodePorts are served on.
    - `own_addresses`: all addresses of the node; they are never added to the dummy device.
    - `scheduler`: the default IPVS scheduler.
    - `detects_local`: whether pods of this node can be distinguished from other clients.
    - `families`: the address families (4, 6) that the node accepts addresses of.
    - `refused_addresses`: addresses that the kernel does not accept on the dummy device.
    """

    node_addresses: tuple[Addr, ...] = ()
    own_addresses: frozenset[Addr] = frozenset()
    scheduler: str = "rr"
    masquerade_all: bool = False
    detects_local: bool = False
    families: frozenset[int] = frozenset((4, 6))
    refused_addresses: frozenset[Addr] = frozenset()


def plan_node(desired: DesiredState, context: NodeContext) -> ServicePortPlan:
    """The elements that belong to no Service port: the node's addresses and its pod networks."""
    elements: set[Element] = set()
    elements |= {(SetName.LOCAL_NETWORKS, (network,)) for network in _remove_nested(desired.local_networks)}
    addresses = {*context.node_addresses, *context.own_addresses}
    elements |= {(SetName.NODE_IPS, (address,)) for address in addresses}
    return ServicePortPlan({}, frozenset(elements))


def needs_fwmark(state: ServiceState) -> bool:
    """Whether clients on this node may get other endpoints than clients outside."""
    return state.external_local and bool(external_frontend_keys(state))


def external_frontend_keys(state: ServiceState) -> list[tuple[ElementField, ...]]:
    """The (address, protocol, port) of its external frontends."""
    addresses = (frontend.at for frontend in state.frontends if frontend.kind is not FrontendKind.CLUSTER_IP)
    return [(address.address, address.protocol, address.port) for address in addresses]


def plan_service_port(
    state: ServiceState,
    context: NodeContext,
    fwmark: int = 0,
    exact_frontends: Container[FrontendAddress] = (),
) -> ServicePortPlan:
    """Plans one Service port.

    - `fwmark`: that of its short circuit, 0 for none. If the Service port no longer needs the short
      circuit, the virtual service is kept, but no new connection gets the fwmark.
    - `exact_frontends`: the addresses of all frontends, of any Service, that are not NodePorts.
    """
    if state.key.family not in context.families:
        return EMPTY_PLAN
    pools: dict[VirtualService, ServerPool] = {}
    elements: set[Element] = set()
    # Without Cluster endpoints, these connections are treated like those from outside.
    has_short_circuit = fwmark and needs_fwmark(state) and state.cluster
    for frontend in state.frontends:
        is_cluster_ip = frontend.kind is FrontendKind.CLUSTER_IP
        local = state.internal_local if is_cluster_ip else state.external_local
        pool = _server_pool(state, local, context.scheduler)
        for address in _frontend_addresses(frontend, state.key.family, context, exact_frontends):
            frontend_key = (address, frontend.at.protocol, frontend.at.port)
            # IPVS sees only packets to addresses of this node, so the dummy device has this one.
            if frontend.kind is not FrontendKind.NODE_PORT and address not in context.own_addresses:
                elements.add((SetName.VIRTUAL_IPS, (address,)))
            pools[VirtualService(frontend.at.protocol, address, frontend.at.port)] = pool
            elements.add((_verdict_set(state, local, pool), frontend_key))
            elements.update(_policy_elements(state, frontend, frontend_key, context))
            if has_short_circuit and not is_cluster_ip:
                elements.add((SetName.SHORT_CIRCUITS, (*frontend_key, fwmark)))
            if frontend.on_device:
                # The node dials it from that same address, to which no other node can reply.
                elements |= {(SetName.HAIRPINS, (address, server.address)) for server, _ in pool.servers}
    if fwmark:
        pools[fwmark_service(state.key.family, fwmark)] = _short_circuit_pool(state, context.scheduler)
        elements |= {(SetName.FWMARKS, (*frontend_key, fwmark)) for frontend_key in external_frontend_keys(state)}
    for virtual in pools:
        elements.add(ownership_element(virtual))
    elements |= {(SetName.HAIRPINS, (address, address)) for address in state.on_node}
    serving = _real_servers(state.serving) if state.key.protocol is Protocol.UDP else None
    return ServicePortPlan(pools, frozenset(elements), serving)


def _frontend_addresses(
    frontend: Frontend,
    family: int,
    context: NodeContext,
    exact_frontends: Container[FrontendAddress],
) -> Iterable[Addr]:
    """The addresses to serve a frontend on. A NodePort is not served on a node address that is an
    exact frontend with the same port, as in mode bpf and kube-proxy.
    """
    at = frontend.at
    if frontend.kind is not FrontendKind.NODE_PORT:
        return () if at.address in context.refused_addresses else (at.address,)
    return (
        address
        for address in context.node_addresses
        if family_of(address) == family and at._replace(address=address) not in exact_frontends
    )


def _verdict_set(state: ServiceState, local: bool, pool: ServerPool) -> SetName:
    """The set that decides what happens to a new connection."""
    if pool.servers:
        return SetName.SERVED
    return SetName.DROPPED if local and state.any_endpoints else SetName.REFUSED


def _policy_elements(
    state: ServiceState,
    frontend: Frontend,
    frontend_key: tuple[ElementField, ...],
    context: NodeContext,
) -> Iterable[Element]:
    """The elements for masquerading and source ranges."""
    if frontend.kind is FrontendKind.CLUSTER_IP:
        # As in kube-proxy's iptables/proxier.go: if neither applies, no ClusterIP is masqueraded.
        if context.masquerade_all:
            yield SetName.MASQUERADED, frontend_key
        elif context.detects_local:
            yield SetName.MASQUERADED_OUTSIDE, frontend_key
    # Policy Local preserves the client's address.
    elif not state.external_local:
        yield SetName.MASQUERADED, frontend_key
    if frontend.restricted:
        yield SetName.RESTRICTED, frontend_key
        for network in _remove_nested(_allowed_sources(state, frontend, context)):
            yield SetName.SOURCES, (network, *frontend_key)


def _allowed_sources(state: ServiceState, frontend: Frontend, context: NodeContext) -> tuple[Cidr, ...]:
    """The networks that may reach a frontend with source ranges. The node connects to an address
    of its dummy device from that same address, so a range that allows the node allows it too.
    """
    node_addresses = (*context.node_addresses, *context.own_addresses)
    if frontend.kind is FrontendKind.NODE_PORT:
        own = (address for address in node_addresses if family_of(address) == state.key.family)
        return (*state.node_port_ranges, *(Cidr(address, HOST_PREFIX_LENGTH) for address in own))
    if any(source_range.contains(address) for source_range in state.source_ranges for address in node_addresses):
        return (*state.source_ranges, Cidr(frontend.at.address, HOST_PREFIX_LENGTH))
    return state.source_ranges


def _remove_nested(networks: Iterable[Cidr]) -> list[Cidr]:
    """Removes networks that lie in another one: an interval set refuses overlaps."""
    outermost: list[Cidr] = []
    # Shorter prefixes first: only these can contain others.
    for network in sorted(set(networks), key=lambda cidr: cidr.bits):
        if not any(outer.contains(network.address) for outer in outermost):
            outermost.append(network)
    return outermost


def fwmark_service(family: int, fwmark: int) -> VirtualService:
    """The virtual service of a fwmark."""
    return VirtualService(Protocol.TCP, ANY[family], 0, fwmark)


def without_service(plan: ServicePortPlan, virtual: VirtualService) -> ServicePortPlan:
    """Returns the plan without this short circuit, whose fwmark no new connection gets any more."""
    removed = {ownership_element(virtual)}
    removed |= {
        element for element in plan.elements if element[0] is SetName.FWMARKS and element[1][-1] == virtual.fwmark
    }
    pools = {service: pool for service, pool in plan.pools.items() if service != virtual}
    return ServicePortPlan(pools, plan.elements - removed, plan.serving)


def ownership_element(virtual: VirtualService) -> Element:
    """The element that records this virtual service as ours."""
    if virtual.fwmark:
        return SetName.OWN_FWMARKS, (virtual.address, virtual.fwmark)
    return SetName.OWN, (virtual.address, virtual.protocol, virtual.port)


def find_service(element: Element, sets: Container[SetName]) -> VirtualService | None:
    """The virtual service that an element of these sets names: of OWNERSHIP_SETS, one of ours; of
    LATE_SETS, one that it lets new connections reach. None for other elements.
    """
    match element if element[0] in sets else None:
        case SetName.OWN | SetName.SERVED, (bytes() as address, Protocol() as protocol, int() as port):
            return VirtualService(protocol, Addr(address), port)
        case SetName.OWN_FWMARKS | SetName.SHORT_CIRCUITS, (bytes() as address, *_, int() as fwmark):
            return fwmark_service(family_of(address), fwmark)
    return None


def owned_services(elements: Iterable[Element]) -> frozenset[VirtualService]:
    """The virtual services that these elements record as ours."""
    return frozenset(virtual for e in elements if (virtual := find_service(e, OWNERSHIP_SETS)) is not None)


def _server_pool(state: ServiceState, local: bool, default_scheduler: str) -> ServerPool:
    backends, spread = state.sets[local]
    weights = spread.weights or (1,) * len(backends)
    servers = tuple(
        (RealServer(backend.address, backend.port), weight) for backend, weight in zip(backends, weights, strict=True)
    )
    scheduler = _choose_scheduler(spread, default_scheduler)
    # With affinity, all connections of a client have to get the same server.
    by_port = scheduler in ("mh", "sh") and not state.affinity_timeout
    return ServerPool(scheduler, state.affinity_timeout, by_port, servers)


def _choose_scheduler(spread: Spread, default_scheduler: str) -> str:
    """The IPVS scheduler: `mh` for Maglev. `rr` and `lc` ignore weights, so weighted Service ports
    get `wrr` and `wlc`.
    """
    if spread.algorithm is Algorithm.MAGLEV:
        return "mh"
    if spread.weights:
        return {"rr": "wrr", "lc": "wlc"}.get(default_scheduler, default_scheduler)
    return default_scheduler


def _short_circuit_pool(state: ServiceState, default_scheduler: str) -> ServerPool:
    """The Cluster endpoints. With affinity the scheduler is `sh`, a hash of the client's address:
    a persistent fwmark service would not translate ports (Linux, ip_vs_sched_persist()).
    """
    pool = _server_pool(state, False, default_scheduler)
    if pool.persistence:
        return ServerPool("sh", 0, False, pool.servers)
    return pool


def _real_servers(backends: BackendSet) -> frozenset[RealServer]:
    return frozenset(RealServer(backend.address, backend.port) for backend in backends)
