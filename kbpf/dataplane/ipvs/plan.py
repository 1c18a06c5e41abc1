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

WHOLE: Final = 128
"""The prefix length of one address."""


class Virtual(NamedTuple):
    """A virtual service: an address and port, or (`mark` not 0) all packets with a mark; then the
    address only says the family, and the protocol is TCP, as the kernel has it.
    """

    protocol: Protocol
    address: Addr
    port: int
    mark: int = 0

    @property
    def family(self) -> int:
        """4 or 6."""
        return family_of(self.address)


class End(NamedTuple):
    """A real server of a virtual service."""

    address: Addr
    port: int


class Pool(msgspec.Struct, frozen=True):
    """What stands behind a virtual service. `persistence` in seconds, 0 for none. `by_port`: a
    scheduler that hashes takes the client's port as well. A weight of 0: it is drained.
    """

    scheduler: str
    persistence: int = 0
    by_port: bool = False
    servers: tuple[tuple[End, int], ...] = ()


class SetName(StrEnum):
    """The sets of our table; each is there twice, for IPv4 (`NAME4`) and IPv6 (`NAME6`).

    Elements are (address, protocol, port) but for: VIRTUAL_IPS: (address,); HAIRPINS:
    (address of an endpoint on this node, the same address); SOURCES: (network, address, protocol,
    port); SHORT_CIRCUITS and MARKS: maps, (address, protocol, port, mark); LOCAL_NETWORKS:
    (network,); NODE_IPS: (address,); OWN_MARKS: (the ANY address of the family, mark).
    """

    OWN = "own"  # is a virtual service of ours, or may be: others are not touched
    OWN_MARKS = "own_marks"
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
    MARKS = "marks"  # of frontends, a NodePort is one: no rule asks, the next agent does
    LOCAL_NETWORKS = "local_networks"  # of pods of this node
    NODE_IPS = "node_ips"  # all that the node has itself


MAPS: Final = frozenset((SetName.SHORT_CIRCUITS, SetName.MARKS))
"""To one mark from each frontend."""
NOTES: Final = frozenset((SetName.OWN, SetName.OWN_MARKS))
LATE: Final = frozenset((SetName.SERVED, SetName.SHORT_CIRCUITS))
"""They lead to virtual services, which have to be there."""

Part = Addr | Cidr | Protocol | int
Element = tuple[SetName, tuple[Part, ...]]


class Programmed(msgspec.Struct, frozen=True):
    """What one Service port needs in the kernel. `serving`: of UDP, whose flows may go on."""

    pools: Mapping[Virtual, Pool]
    elements: frozenset[Element]
    serving: frozenset[End] | None = None


NOTHING: Final = Programmed({}, frozenset())
NODE: Final = ServicePortKey("", "", "", Protocol.TCP, 0)
"""Stands for what the node itself needs."""


class Ground(NamedTuple):
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
    barred: frozenset[Addr] = frozenset()


def program_node(desired: DesiredState, ground: Ground) -> Programmed:
    """The node's own elements."""
    elements: set[Element] = set()
    elements |= {(SetName.LOCAL_NETWORKS, (n,)) for n in _outermost(desired.local_networks)}
    own = {*ground.node_addresses, *ground.own_addresses}
    elements |= {(SetName.NODE_IPS, (address,)) for address in own}
    return Programmed({}, frozenset(elements))


def wants_mark(state: ServiceState) -> bool:
    """Whether who is on this node may get other endpoints than who is outside."""
    return state.external_local and bool(externals(state))


def externals(state: ServiceState) -> list[tuple[Part, ...]]:
    """What its external frontends stand on: (address, protocol, port)."""
    ats = (f.at for f in state.frontends if f.kind is not FrontendKind.CLUSTER_IP)
    return [(at.address, at.protocol, at.port) for at in ats]


def program(
    state: ServiceState,
    ground: Ground,
    mark: int = 0,
    exact: Container[FrontendAddress] = (),
) -> Programmed:
    """What this Service port needs. `mark`: of its short circuit, if it has one; where it wants
    none (any more) that leads nobody new. `exact`: what anybody's frontends other than NodePorts
    stand on.
    """
    if state.key.family not in ground.families:
        return NOTHING
    pools: dict[Virtual, Pool] = {}
    elements: set[Element] = set()
    leads = mark and wants_mark(state) and state.cluster
    for frontend in state.frontends:
        is_cluster_ip = frontend.kind is FrontendKind.CLUSTER_IP
        local = state.internal_local if is_cluster_ip else state.external_local
        pool = _pool(state, local, ground.scheduler)
        for address in _addresses(frontend, state.key.family, ground, exact):
            at = (address, frontend.at.protocol, frontend.at.port)
            if frontend.kind is not FrontendKind.NODE_PORT and address not in ground.own_addresses:
                elements.add((SetName.VIRTUAL_IPS, (address,)))
            pools[Virtual(frontend.at.protocol, address, frontend.at.port)] = pool
            elements.add((_answer(state, local, pool), at))
            elements.update(_around(state, frontend, at, ground))
            if leads and not is_cluster_ip:
                elements.add((SetName.SHORT_CIRCUITS, (*at, mark)))
    if mark:
        pools[marked(state.key.family, mark)] = _short_circuit(state, ground.scheduler)
        elements |= {(SetName.MARKS, (*at, mark)) for at in externals(state)}
    for virtual in pools:
        elements.add(note(virtual))
    elements |= {(SetName.HAIRPINS, (address, address)) for address in state.on_node}
    serving = _ends(state.serving) if state.key.protocol is Protocol.UDP else None
    return Programmed(pools, frozenset(elements), serving)


def _addresses(
    frontend: Frontend, family: int, ground: Ground, exact: Container[FrontendAddress]
) -> Iterable[Addr]:
    """A NodePort gives way to an exact frontend on one of the node's addresses, as with mode bpf
    and kube-proxy.
    """
    at = frontend.at
    if frontend.kind is not FrontendKind.NODE_PORT:
        return () if at.address in ground.barred else (at.address,)
    own = (a for a in ground.node_addresses if family_of(a) == family)
    return (a for a in own if FrontendAddress(a, at.port, at.protocol) not in exact)


def _answer(state: ServiceState, local: bool, pool: Pool) -> SetName:
    """What a new connection gets."""
    if pool.servers:
        return SetName.SERVED
    return SetName.DROPPED if local and state.any_endpoints else SetName.REFUSED


def _around(
    state: ServiceState, frontend: Frontend, at: tuple[Part, ...], ground: Ground
) -> Iterable[Element]:
    """Masquerading and source ranges."""
    if frontend.kind is FrontendKind.CLUSTER_IP:
        if ground.masquerade_all:
            yield SetName.MASQUERADED, at
        elif ground.detects_local:
            yield SetName.MASQUERADED_OUTSIDE, at
    elif not state.external_local:
        yield SetName.MASQUERADED, at
    if frontend.restricted:
        yield SetName.RESTRICTED, at
        for network in _outermost(_allowed(state, frontend, ground)):
            yield SetName.SOURCES, (network, *at)


def _allowed(state: ServiceState, frontend: Frontend, ground: Ground) -> tuple[Cidr, ...]:
    """The node dials an address of its dummy device from that same address: who lets in the node
    lets in that.
    """
    own = (*ground.node_addresses, *ground.own_addresses)
    if frontend.kind is FrontendKind.NODE_PORT:
        family = state.key.family
        return (*state.node_port_ranges, *(Cidr(a, WHOLE) for a in own if family_of(a) == family))
    if any(one.contains(address) for one in state.source_ranges for address in own):
        return (*state.source_ranges, Cidr(frontend.at.address, WHOLE))
    return state.source_ranges


def _outermost(networks: Iterable[Cidr]) -> list[Cidr]:
    """Without those that lie in another: a set of intervals refuses overlaps."""
    kept: list[Cidr] = []
    for network in sorted(set(networks), key=lambda one: one.bits):
        if not any(other.contains(network.address) for other in kept):
            kept.append(network)
    return kept


def marked(family: int, mark: int) -> Virtual:
    """The virtual service of a mark."""
    return Virtual(Protocol.TCP, ANY4 if family == 4 else ANY6, 0, mark)


def unmarked(programmed: Programmed, virtual: Virtual) -> Programmed:
    """The same without this virtual service, whose mark leads nobody."""
    gone = {note(virtual)}
    gone |= {e for e in programmed.elements if e[0] is SetName.MARKS and e[1][-1] == virtual.mark}
    pools = {one: pool for one, pool in programmed.pools.items() if one != virtual}
    return Programmed(pools, programmed.elements - gone, programmed.serving)


def note(virtual: Virtual) -> Element:
    """Says that this virtual service is ours."""
    if virtual.mark:
        return SetName.OWN_MARKS, (virtual.address, virtual.mark)
    return SetName.OWN, (virtual.address, virtual.protocol, virtual.port)


def noted(element: Element) -> Virtual | None:
    """The virtual service that an element of OWN or OWN_MARKS names."""
    match element:
        case SetName.OWN, (bytes() as address, Protocol() as protocol, int() as port):
            return Virtual(protocol, Addr(address), port)
        case SetName.OWN_MARKS, (bytes() as address, int() as mark):
            return marked(family_of(address), mark)
    return None


def leads_to(element: Element) -> Virtual | None:
    """The virtual service that new connections meet by this element of LATE."""
    match element:
        case SetName.SERVED, (bytes() as address, Protocol() as protocol, int() as port):
            return Virtual(protocol, Addr(address), port)
        case SetName.SHORT_CIRCUITS, (bytes() as address, _, _, int() as mark):
            return marked(family_of(address), mark)
    return None


def _pool(state: ServiceState, local: bool, usual: str) -> Pool:
    backends = state.local if local else state.cluster
    spread = state.local_spread if local else state.cluster_spread
    weights = spread.weights or (1,) * len(backends)
    servers = tuple((End(b.address, b.port), w) for b, w in zip(backends, weights, strict=True))
    scheduler = _scheduler(spread, usual)
    by_port = scheduler in ("mh", "sh") and not state.affinity_timeout
    return Pool(scheduler, state.affinity_timeout, by_port, servers)


def _scheduler(spread: Spread, usual: str) -> str:
    """Maglev is `mh`. A plain round robin or a plain least-connection knows no weights."""
    if spread.algorithm is Algorithm.MAGLEV:
        return "mh"
    if spread.weights:
        return {"rr": "wrr", "lc": "wlc"}.get(usual, usual)
    return usual


def _short_circuit(state: ServiceState, usual: str) -> Pool:
    """The Cluster endpoints. A persistent service by mark would not translate ports (Linux,
    ip_vs_sched_persist()): affinity is by a hash of the client's address instead.
    """
    pool = _pool(state, False, usual)
    if pool.persistence:
        return Pool("sh", 0, False, pool.servers)
    return pool


def _ends(backends: BackendSet) -> frozenset[End]:
    return frozenset(End(one.address, one.port) for one in backends)
