"""From Service ports to IPVS virtual services, and to what nftables has to know beside them.

IPVS knows one list of real servers per virtual service, whoever asks. All that depends on the
client, or is no connection to a backend, is nftables': refusing and dropping, source ranges,
masquerading, and the short circuit of external frontends with a Local policy: connections of this
node and its pods carry a mark, and a virtual service by that mark has the Cluster endpoints
(kube-proxy's iptables/proxier.go).

A frontend without backends has a virtual service without real servers, and so has a short circuit.
nftables lets nobody new get there, and connections that backends still have when they leave can be
drained. For the same reason a short circuit that is not wanted any more stays for a while.
"""

from collections.abc import Container, Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.address import ANY4, ANY6, Addr, family_of
from kbpf.model.desired import (
    BackendSet,
    DesiredState,
    Frontend,
    FrontendAddress,
    FrontendKind,
    ServicePortKey,
    ServiceState,
    Spread,
)
from kbpf.model.objects import Algorithm, Cidr, Protocol

HOST_PREFIX_LENGTH: Final = 128
"""The prefix length of one address."""


class VirtualService(NamedTuple):
    """A virtual service: an address and port, or (`mark` not 0) all packets with a mark; then the
    address only says the family, and the protocol is TCP, as the kernel has it.
    """

    protocol: Protocol
    address: Addr
    port: int
    fwmark: int = 0

    @property
    def family(self) -> int:
        """4 or 6."""
        return family_of(self.address)


class RealServer(NamedTuple):
    """A real server of a virtual service."""

    address: Addr
    port: int


class ServerPool(msgspec.Struct, frozen=True):
    """What stands behind a virtual service. `persistence` in seconds, 0 for none. `by_port`: a
    scheduler that hashes takes the client's port as well. A weight of 0: it is drained.
    """

    scheduler: str
    persistence: int = 0
    by_port: bool = False
    servers: tuple[tuple[RealServer, int], ...] = ()


class SetName(StrEnum):
    """The sets of our table; each is there twice, for IPv4 (`NAME4`) and IPv6 (`NAME6`).

    Elements are (address, protocol, port) but for: VIRTUAL_IPS: (address,); HAIRPINS:
    (address of an endpoint on this node, the same address); SOURCES: (network, address, protocol,
    port); SHORT_CIRCUITS and MARKS: maps, (address, protocol, port, mark); LOCAL_NETWORKS:
    (network,); NODE_IPS: (address,); OWN_MARKS: (the ANY address of the family, mark).
    """

    OWN = "own"  # is a virtual service of ours, or may be: others are not touched
    OWN_FWMARKS = "own_marks"
    VIRTUAL_IPS = "virtual_ips"  # they are on the dummy device
    SERVED = "served"  # has real servers
    REFUSED = "refused"  # no endpoints anywhere
    DROPPED = "dropped"  # a Local policy, and endpoints elsewhere only
    MASQUERADED = "masqueraded"  # whoever asks
    MASQUERADED_OUTSIDE = "masqueraded_outside"  # who is no pod of this node
    HAIRPINS = "hairpin_ips"  # who is on this node may be led to itself
    RESTRICTED = "restricted"  # source ranges apply
    SOURCES = "sources"
    SHORT_CIRCUITS = "short_circuits"
    FWMARKS = "marks"  # of frontends, a NodePort is one: no rule asks, the next agent does
    LOCAL_NETWORKS = "local_networks"  # of pods of this node
    NODE_IPS = "node_ips"  # all that the node has itself


MAP_SETS: Final = frozenset((SetName.SHORT_CIRCUITS, SetName.FWMARKS))
"""To one mark from each frontend."""
OWNERSHIP_SETS: Final = frozenset((SetName.OWN, SetName.OWN_FWMARKS))
LATE_SETS: Final = frozenset((SetName.SERVED, SetName.SHORT_CIRCUITS))
"""They lead to virtual services, which have to be there."""

ElementField = Addr | Cidr | Protocol | int
Element = tuple[SetName, tuple[ElementField, ...]]


class ServicePortPlan(msgspec.Struct, frozen=True):
    """What one Service port needs in the kernel. `serving`: of UDP, whose flows may go on."""

    pools: Mapping[VirtualService, ServerPool]
    elements: frozenset[Element]
    serving: frozenset[RealServer] | None = None


EMPTY_PLAN: Final = ServicePortPlan({}, frozenset())
NODE_KEY: Final = ServicePortKey("", "", "", Protocol.TCP, 0)
"""Stands for what the node itself needs."""


class NodeContext(NamedTuple):
    """What of a desired state and the settings no Service decides.

    `own_addresses`: all that the node has itself; they are never put on the dummy device.
    `detects_local`: pods of this node can be told from others. `families`: those of which the node
    takes addresses. `barred`: addresses that the kernel refuses.
    """

    node_addresses: tuple[Addr, ...] = ()
    own_addresses: frozenset[Addr] = frozenset()
    scheduler: str = "rr"
    masquerade_all: bool = False
    detects_local: bool = False
    families: frozenset[int] = frozenset((4, 6))
    refused_addresses: frozenset[Addr] = frozenset()


def plan_node(desired: DesiredState, context: NodeContext) -> ServicePortPlan:
    """The node's own elements."""
    elements: set[Element] = set()
    elements |= {
        (SetName.LOCAL_NETWORKS, (network,)) for network in _remove_nested(desired.local_networks)
    }
    addresses = {*context.node_addresses, *context.own_addresses}
    elements |= {(SetName.NODE_IPS, (address,)) for address in addresses}
    return ServicePortPlan({}, frozenset(elements))


def needs_fwmark(state: ServiceState) -> bool:
    """Whether who is on this node may get other endpoints than who is outside."""
    return state.external_local and bool(external_frontend_keys(state))


def external_frontend_keys(state: ServiceState) -> list[tuple[ElementField, ...]]:
    """What its external frontends stand on: (address, protocol, port)."""
    addresses = (
        frontend.at for frontend in state.frontends if frontend.kind is not FrontendKind.CLUSTER_IP
    )
    return [(address.address, address.protocol, address.port) for address in addresses]


def plan_service_port(
    state: ServiceState,
    context: NodeContext,
    fwmark: int = 0,
    exact_frontends: Container[FrontendAddress] = (),
) -> ServicePortPlan:
    """What this Service port needs. `mark`: of its short circuit, if it has one; where it wants
    none (any more) that leads nobody new. `exact`: what anybody's frontends other than NodePorts
    stand on.
    """
    if state.key.family not in context.families:
        return EMPTY_PLAN
    pools: dict[VirtualService, ServerPool] = {}
    elements: set[Element] = set()
    has_short_circuit = fwmark and needs_fwmark(state) and state.cluster
    for frontend in state.frontends:
        is_cluster_ip = frontend.kind is FrontendKind.CLUSTER_IP
        local = state.internal_local if is_cluster_ip else state.external_local
        pool = _server_pool(state, local, context.scheduler)
        for address in _frontend_addresses(frontend, state.key.family, context, exact_frontends):
            frontend_key = (address, frontend.at.protocol, frontend.at.port)
            if frontend.kind is not FrontendKind.NODE_PORT and address not in context.own_addresses:
                elements.add((SetName.VIRTUAL_IPS, (address,)))
            pools[VirtualService(frontend.at.protocol, address, frontend.at.port)] = pool
            elements.add((_verdict_set(state, local, pool), frontend_key))
            elements.update(_policy_elements(state, frontend, frontend_key, context))
            if has_short_circuit and not is_cluster_ip:
                elements.add((SetName.SHORT_CIRCUITS, (*frontend_key, fwmark)))
    if fwmark:
        pools[fwmark_service(state.key.family, fwmark)] = _short_circuit_pool(
            state, context.scheduler
        )
        elements |= {
            (SetName.FWMARKS, (*frontend_key, fwmark))
            for frontend_key in external_frontend_keys(state)
        }
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
    """A NodePort gives way to an exact frontend on one of the node's addresses, as with mode bpf
    and kube-proxy.
    """
    frontend_address = frontend.at
    if frontend.kind is not FrontendKind.NODE_PORT:
        return (
            ()
            if frontend_address.address in context.refused_addresses
            else (frontend_address.address,)
        )
    node_addresses = (address for address in context.node_addresses if family_of(address) == family)
    return (
        address
        for address in node_addresses
        if FrontendAddress(address, frontend_address.port, frontend_address.protocol)
        not in exact_frontends
    )


def _verdict_set(state: ServiceState, local: bool, pool: ServerPool) -> SetName:
    """What a new connection gets."""
    if pool.servers:
        return SetName.SERVED
    return SetName.DROPPED if local and state.any_endpoints else SetName.REFUSED


def _policy_elements(
    state: ServiceState,
    frontend: Frontend,
    frontend_key: tuple[ElementField, ...],
    context: NodeContext,
) -> Iterable[Element]:
    """Masquerading and source ranges."""
    if frontend.kind is FrontendKind.CLUSTER_IP:
        if context.masquerade_all:
            yield SetName.MASQUERADED, frontend_key
        elif context.detects_local:
            yield SetName.MASQUERADED_OUTSIDE, frontend_key
    elif not state.external_local:
        yield SetName.MASQUERADED, frontend_key
    if frontend.restricted:
        yield SetName.RESTRICTED, frontend_key
        for network in _remove_nested(_allowed_sources(state, frontend, context)):
            yield SetName.SOURCES, (network, *frontend_key)


def _allowed_sources(
    state: ServiceState, frontend: Frontend, context: NodeContext
) -> tuple[Cidr, ...]:
    """The node dials an address of its dummy device from that same address: who lets in the node
    lets in that.
    """
    node_addresses = (*context.node_addresses, *context.own_addresses)
    if frontend.kind is FrontendKind.NODE_PORT:
        family = state.key.family
        return (
            *state.node_port_ranges,
            *(
                Cidr(node_address, HOST_PREFIX_LENGTH)
                for node_address in node_addresses
                if family_of(node_address) == family
            ),
        )
    if any(
        source_range.contains(address)
        for source_range in state.source_ranges
        for address in node_addresses
    ):
        return (*state.source_ranges, Cidr(frontend.at.address, HOST_PREFIX_LENGTH))
    return state.source_ranges


def _remove_nested(networks: Iterable[Cidr]) -> list[Cidr]:
    """Without those that lie in another: a set of intervals refuses overlaps."""
    outermost: list[Cidr] = []
    for network in sorted(set(networks), key=lambda cidr: cidr.bits):
        if not any(outer.contains(network.address) for outer in outermost):
            outermost.append(network)
    return outermost


def fwmark_service(family: int, fwmark: int) -> VirtualService:
    """The virtual service of a mark."""
    return VirtualService(Protocol.TCP, ANY4 if family == 4 else ANY6, 0, fwmark)


def without_service(plan: ServicePortPlan, virtual: VirtualService) -> ServicePortPlan:
    """The same without this virtual service, whose mark leads nobody."""
    removed = {ownership_element(virtual)}
    removed |= {
        element
        for element in plan.elements
        if element[0] is SetName.FWMARKS and element[1][-1] == virtual.fwmark
    }
    pools = {service: pool for service, pool in plan.pools.items() if service != virtual}
    return ServicePortPlan(pools, plan.elements - removed, plan.serving)


def ownership_element(virtual: VirtualService) -> Element:
    """Says that this virtual service is ours."""
    if virtual.fwmark:
        return SetName.OWN_FWMARKS, (virtual.address, virtual.fwmark)
    return SetName.OWN, (virtual.address, virtual.protocol, virtual.port)


def owned_service(element: Element) -> VirtualService | None:
    """The virtual service that an element of OWN or OWN_MARKS names."""
    match element:
        case SetName.OWN, (bytes() as address, Protocol() as protocol, int() as port):
            return VirtualService(protocol, Addr(address), port)
        case SetName.OWN_FWMARKS, (bytes() as address, int() as fwmark):
            return fwmark_service(family_of(address), fwmark)
    return None


def target_service(element: Element) -> VirtualService | None:
    """The virtual service that new connections meet by this element of LATE."""
    match element:
        case SetName.SERVED, (bytes() as address, Protocol() as protocol, int() as port):
            return VirtualService(protocol, Addr(address), port)
        case SetName.SHORT_CIRCUITS, (bytes() as address, _, _, int() as fwmark):
            return fwmark_service(family_of(address), fwmark)
    return None


def _server_pool(state: ServiceState, local: bool, default_scheduler: str) -> ServerPool:
    backends = state.local if local else state.cluster
    spread = state.local_spread if local else state.cluster_spread
    weights = spread.weights or (1,) * len(backends)
    servers = tuple(
        (RealServer(backend.address, backend.port), weight)
        for backend, weight in zip(backends, weights, strict=True)
    )
    scheduler = _choose_scheduler(spread, default_scheduler)
    by_port = scheduler in ("mh", "sh") and not state.affinity_timeout
    return ServerPool(scheduler, state.affinity_timeout, by_port, servers)


def _choose_scheduler(spread: Spread, default_scheduler: str) -> str:
    """Maglev is `mh`. A plain round robin or a plain least-connection knows no weights."""
    if spread.algorithm is Algorithm.MAGLEV:
        return "mh"
    if spread.weights:
        return {"rr": "wrr", "lc": "wlc"}.get(default_scheduler, default_scheduler)
    return default_scheduler


def _short_circuit_pool(state: ServiceState, default_scheduler: str) -> ServerPool:
    """The Cluster endpoints. A persistent service by mark would not translate ports (Linux,
    ip_vs_sched_persist()): affinity is by a hash of the client's address instead.
    """
    pool = _server_pool(state, False, default_scheduler)
    if pool.persistence:
        return ServerPool("sh", 0, False, pool.servers)
    return pool


def _real_servers(backends: BackendSet) -> frozenset[RealServer]:
    return frozenset(RealServer(backend.address, backend.port) for backend in backends)
