# SPDX-License-Identifier: Apache-2.0
"""The addresses that clients connect to: frontends of Services, NodePort addresses of this node,
and which Service port wins an address that several claim.

Rules:
- A Service without a cluster IP of a family has no frontends in that family.
- A NodePort is one frontend for each family, at ANY4 or ANY6; the node decides which addresses
  that means. So NodePorts conflict only with each other.
- An ExternalIP or LoadBalancer address that is also a NodePort address loses its port to the
  Service with that NodePort, unless it is the same Service.
- A cluster IP beats a load balancer VIP, which beats an ExternalIP: users who may create Services
  must not take over addresses of other Services (CVE-2020-8554). Then the older Service wins, then
  the smaller name. The order of events has no influence.
"""

from bisect import insort
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Final, NamedTuple

from msgspec.structs import replace

from kbpf.model.address import ANY, LOOPBACK6, V4_PREFIX, Addr, family_of, is_link_local6, is_loopback
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import Frontend, FrontendAddress, FrontendKind, ServicePortKey, ServiceState
from kbpf.model.objects import Cidr, Node, Service, ServicePort

_UNSPECIFIED: Final = frozenset(ANY.values())
"""As a frontend's address they mean "NodePort", so no Service may list them."""
_LOCALHOST4: Final = Addr(V4_PREFIX + bytes((127, 0, 0, 1)))

_RANK: Final = {
    FrontendKind.CLUSTER_IP: 0,
    FrontendKind.LOAD_BALANCER: 1,
    FrontendKind.EXTERNAL_IP: 2,
    FrontendKind.NODE_PORT: 3,
}
_RANK_BELOW_NODE_PORT: Final = 4
"""The rank of the claim that an `at_node` frontend has to the NodePort of its port. It never wins
against a NodePort; it exists so that both find each other.
"""


def service_families(service: Service) -> tuple[int, ...]:
    """The families in which the Service has a cluster IP, in the order of its cluster IPs."""
    found_families = [family_of(addr) for addr in service.cluster_ips if addr not in _UNSPECIFIED]
    return tuple(dict.fromkeys(found_families)) if len(found_families) > 1 else tuple(found_families)


def externally_reachable(service: Service, port: ServicePort, family: int) -> bool:
    """Whether the port is served at any address besides its cluster IP (serviceport.go)."""
    if port.node_port:
        return True
    if not service.external_ips and not service.lb_vips:
        return False
    return bool(_usable_addresses(service.external_ips, family) or _usable_addresses(service.lb_vips, family))


def compute_frontends(service: Service, port: ServicePort, family: int) -> tuple[Frontend, ...]:
    """The addresses of this port in this family: ClusterIP, NodePort, ExternalIPs, LB VIPs.

    Each address occurs once: if a Service lists it as two kinds, the stronger one applies, so that
    source ranges protect an LB VIP that is an ExternalIP too.
    """
    cluster_ip = next((addr for addr in service.cluster_ips if _is_usable(addr, family)), None)
    if cluster_ip is None:
        return ()
    result = [_make_frontend(cluster_ip, port, FrontendKind.CLUSTER_IP)]
    if port.node_port:
        address = FrontendAddress(ANY[family], port.node_port, port.protocol)
        result.append(Frontend(address, FrontendKind.NODE_PORT))
    if service.external_ips or service.lb_vips:
        vips = _usable_addresses(service.lb_vips, family) - {cluster_ip}
        external_ips = _usable_addresses(service.external_ips, family) - vips - {cluster_ip}
        is_restricted = bool(vips) and restricts_clients(service.source_ranges, family)
        result += [_make_frontend(addr, port, FrontendKind.EXTERNAL_IP) for addr in sorted(external_ips)]
        result += [_make_frontend(addr, port, FrontendKind.LOAD_BALANCER, is_restricted) for addr in sorted(vips)]
    return tuple(result)


def restricts_clients(ranges: Iterable[Cidr], family: int) -> bool:
    """Whether source ranges exclude any client of this family.

    Ranges are filtered by family first, and an empty list allows every client: ranges of the other
    family alone restrict nothing, as in kube-proxy.
    """
    family_ranges = [cidr for cidr in ranges if family_of(cidr.address) == family]
    whole_family_bits = 96 if family == 4 else 0  # 0.0.0.0/0 is ::ffff:0:0/96 here
    return bool(family_ranges) and all(cidr.bits > whole_family_bits for cidr in family_ranges)


def source_ranges(service: Service, node: Node, family: int) -> tuple[Cidr, ...]:
    """The clients that may connect to the restricted VIPs of this family: the Service's ranges. If
    one of these contains an address of the node, the VIPs are added, because a packet from the
    node to a VIP may have the VIP as its source (iptables/proxier.go).
    """
    family_ranges = tuple(cidr for cidr in service.source_ranges if family_of(cidr.address) == family)
    node_addresses = (addr for addr in node.addresses if family_of(addr) == family)
    if any(cidr.contains(addr) for addr in node_addresses for cidr in family_ranges):
        family_ranges += tuple(Cidr(addr, 128) for addr in sorted(_usable_addresses(service.lb_vips, family)))
    return tuple(dict.fromkeys(sorted(family_ranges)))


def masquerade_addresses(node: Node, local_addresses: Collection[Addr]) -> tuple[Addr, ...]:
    """The node's addresses for SNAT, one of each family: the first in the Node object, else the
    first local one.
    """
    candidates = (*node.addresses, *sorted(local_addresses))
    # Reversed, since a dict keeps the last value of each key: here the first of each family.
    first = {family_of(a): a for a in reversed(candidates) if not (is_loopback(a) or is_link_local6(a))}
    return tuple(sorted(first.values()))


def local_networks(node: Node, config: Config) -> tuple[Cidr, ...]:
    """The networks of this node's pods in the configured detectLocalMode: the first network of
    each family. Empty if that mode uses devices, and until the Node has pod networks.
    """
    match config.detect_local_mode:
        case LocalMode.CLUSTER_CIDR:
            networks = config.cluster_cidrs
        case LocalMode.NODE_CIDR:
            networks = node.pod_cidrs
        case _:
            return ()
    first = {family_of(cidr.address): cidr for cidr in reversed(networks)}
    return tuple(sorted(first.values()))


def node_port_addresses(node: Node, local_addresses: Collection[Addr], config: Config) -> tuple[Addr, ...]:
    """The addresses that serve NodePorts, sorted; never loopback (nodeport_addresses.go).

    By default the Node's first address of each family; all local ones while no address of the Node
    is known. With networks configured, the local addresses in them; a family without networks uses
    all of its local addresses. With networks and `primary`, the Node's first address of each
    family, and the local addresses in the networks; a family without networks uses only the former.
    """
    first = {family_of(addr): addr for addr in reversed(node.addresses)}
    primary = {addr for addr in first.values() if not is_loopback(addr)}
    local = {addr for addr in local_addresses if not is_loopback(addr)}
    if config.all_node_port_addresses:
        addresses = local
    elif config.node_port_addresses:
        networks = config.node_port_addresses
        if config.primary_node_ports:
            addresses = primary | {a for a in local if any(cidr.contains(a) for cidr in networks)}
        else:
            addresses = {addr for addr in local if _is_listed(addr, networks)}
    elif node.addresses:
        addresses = primary
    else:
        addresses = local
    return tuple(sorted(addresses - _UNSPECIFIED))


def node_port_problem(local_addresses: Collection[Addr], config: Config) -> str:
    """Returns a problem line if no configured network contains an address of this node, with the
    families affected; else "". Families that the node does not have, and loopback networks, are
    not a problem.
    """
    if config.all_node_port_addresses or config.primary_node_ports:
        return ""
    families = []
    for family, loopback in ((4, _LOCALHOST4), (6, LOOPBACK6)):
        networks = [n for n in config.node_port_addresses if family_of(n.address) == family]
        reachable = [
            addr
            for addr in local_addresses
            if family_of(addr) == family and not is_loopback(addr) and not is_link_local6(addr)
        ]
        if not networks or not reachable or any(n.contains(loopback) for n in networks):
            continue
        if not any(_is_listed(addr, networks) for addr in reachable):
            families.append(f"IPv{family}")
    if not families:
        return ""
    return (
        f"{' and '.join(families)} NodePorts are not served: this node has no address in the "
        "networks of nodePortAddresses (--nodeport-addresses)"
    )


class Claim(NamedTuple):
    """A Service port's claim to an address. The smallest claim wins."""

    rank: int
    is_undated: bool
    creation_timestamp: str
    key: ServicePortKey


class Claims:
    """All claims by address. The cost of an update is proportional to the change."""

    def __init__(self) -> None:
        self._claims: dict[FrontendAddress, tuple[Claim, ...]] = {}

    def update(
        self, key: ServicePortKey, creation_timestamp: str, old: Iterable[Frontend], new: Iterable[Frontend]
    ) -> set[ServicePortKey]:
        """Replaces the claims to `old` by claims to `new`; returns the *other* keys that may win
        or lose an address by it.
        """
        affected: set[ServicePortKey] = set()
        old, new = tuple(old), tuple(new)
        node_port_claim = Claim(_RANK_BELOW_NODE_PORT, not creation_timestamp, creation_timestamp, key)
        new_claims = {_node_port_address(f.at): node_port_claim for f in new if f.at_node}
        # Second, so that a NodePort of the same number replaces this Service's weaker claim to it.
        new_claims |= {f.at: Claim(_RANK[f.kind], not creation_timestamp, creation_timestamp, key) for f in new}
        old_addresses = {f.at for f in old} | {_node_port_address(f.at) for f in old if f.at_node}
        for address in old_addresses - new_claims.keys():
            affected.update(self._set_claim(address, key, None))
        for address, claim in new_claims.items():
            affected.update(self._set_claim(address, key, claim))
        return affected

    def resolve(self, state: ServiceState) -> ServiceState:
        """Returns the state with only the frontends that it won; the same object if it won all."""
        winners = [self._find_winner(frontend, state.key) for frontend in state.frontends]
        if all(winner == state.key for winner in winners):
            return state
        pairs = list(zip(state.frontends, winners, strict=True))
        return replace(
            state,
            frontends=tuple(frontend for frontend, winner in pairs if winner == state.key),
            lost=tuple((frontend.at, winner.service) for frontend, winner in pairs if winner != state.key),
        )

    def _find_winner(self, frontend: Frontend, key: ServicePortKey) -> ServicePortKey:
        if frontend.at_node:
            # The strongest claim to the NodePort. One of the same Service is not a conflict.
            first = self._claims[_node_port_address(frontend.at)][0]
            if first.rank != _RANK_BELOW_NODE_PORT and first.key.service != key.service:
                return first.key
        return self._claims[frontend.at][0].key

    def _set_claim(
        self, address: FrontendAddress, key: ServicePortKey, claim: Claim | None
    ) -> Iterable[ServicePortKey]:
        before = self._claims.get(address, ())
        if not before and claim:
            self._claims[address] = (claim,)
            return ()
        keys, after = tuple(map(attrgetter("key"), before)), list(before)
        if key in keys:
            del after[keys.index(key)]
        if claim:
            insort(after, claim)
        if after:
            self._claims[address] = tuple(after)
        else:
            self._claims.pop(address, None)
        if before and after[:1] == [before[0]]:
            return ()  # the winner is unchanged, and others depend only on the winner
        return set(keys) - {key}


def _node_port_address(address: FrontendAddress) -> FrontendAddress:
    return address._replace(address=ANY[family_of(address.address)])


def _make_frontend(addr: Addr, port: ServicePort, kind: FrontendKind, is_restricted: bool = False) -> Frontend:
    return Frontend(FrontendAddress(addr, port.port, port.protocol), kind, is_restricted)


def _usable_addresses(addresses: Iterable[Addr], family: int) -> set[Addr]:
    return {addr for addr in addresses if _is_usable(addr, family)}


def _is_usable(addr: Addr, family: int) -> bool:
    return family_of(addr) == family and addr not in _UNSPECIFIED


def _is_listed(addr: Addr, networks: Iterable[Cidr]) -> bool:
    family = family_of(addr)
    family_networks = [cidr for cidr in networks if family_of(cidr.address) == family]
    return not family_networks or any(cidr.contains(addr) for cidr in family_networks)
