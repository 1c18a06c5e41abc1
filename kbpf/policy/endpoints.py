"""Which endpoints serve a Service port on this node, and why.

Rules kept here (kube-proxy's endpointslicecache.go, and CategorizeEndpoints in topology.go):
- A Service's endpoints are the union of its slices of one family. Each slice says for itself
  which number stands behind a port's name.
- One backend per address and port. Of its copies the last one that does not terminate counts, else
  the first one. kube-proxy walks the slices in the order of a Go map, which is random; here they
  are in the order of their names, so that every node and every run decides alike.
- Only ready endpoints decide the topology mode, and one of them without a hint disables that
  level. An empty cluster list falls back to everything that serves while terminating, wherever;
  an empty local list to the same on this node only. The two fall back on their own.
- Weights come last: they take backends out of a set that is chosen, and never put one in.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.address import Addr
from kbpf.model.desired import Backend, BackendSet
from kbpf.model.objects import (
    Endpoint,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServicePort,
    SlicePort,
    Weights,
)
from kbpf.policy.frontends import externally_reachable
from kbpf.policy.weights import weigh, weigher

FEW_PORTS: Final = 8
"""So many ports of a slice are looked through one by one."""

MOST_INDEXES: Final = 64


class TopologyMode(StrEnum):
    """Which level of hints decided the cluster set; the names of trafficDistribution."""

    NONE = ""
    SAME_NODE = "PreferSameNode"
    SAME_ZONE = "PreferSameZone"


class Reason(StrEnum):
    """Why an endpoint gets new connections, or does not."""

    READY = "Ready"
    SAME_NODE = "HintedForNode"
    SAME_ZONE = "HintedForZone"
    LOCAL_ONLY = "LocalOnly"
    FALLBACK = "TerminatingFallback"
    HINTED_ELSEWHERE = "HintedElsewhere"
    NOT_LOCAL = "NotLocal"
    WEIGHT_ZERO = "WeightZero"
    DRAINING = "Draining"
    NOT_READY = "NotReady"
    DUPLICATE = "Duplicate"
    NO_PORT = "NoPort"


_BY_MODE = {
    TopologyMode.NONE: (Reason.READY, "ready"),
    TopologyMode.SAME_NODE: (Reason.SAME_NODE, "ready, and hinted for this node"),
    TopologyMode.SAME_ZONE: (Reason.SAME_ZONE, "ready, and hinted for this zone"),
}


class Explained(NamedTuple):
    """What became of one endpoint of one slice. `port` is 0 where the slice lacks the port.
    `cluster` and `local` say in which sets it is.
    """

    endpoint: Endpoint
    slice: str
    port: int
    cluster: bool
    local: bool
    reason: Reason
    text: str


class Chosen(msgspec.Struct, frozen=True):
    """The backends of a Service port, sorted and without duplicates; the sets may share objects.

    `serving`: all that serve or are ready, whatever policy and topology say. `any_endpoints`:
    something could take a connection somewhere, so an empty set means drop, not refuse.
    The weights are those of Spread; `weightless`: who is left out of a set since its weight is 0.
    """

    cluster: BackendSet
    local: BackendSet
    serving: BackendSet
    any_endpoints: bool
    mode: TopologyMode
    slices: Sequence[EndpointSlice]
    port: ServicePort
    node: Node
    family: int
    uses_cluster: bool = True
    cluster_weights: tuple[int, ...] = ()
    local_weights: tuple[int, ...] = ()
    weightless: frozenset[Backend] = frozenset()

    def reasons(self) -> tuple[Explained, ...]:
        """One line per endpoint of each slice of this family, by slice name, in slice order."""
        kept = dict(merged(self.slices, self.port, self.family))
        cluster, local = frozenset(self.cluster), frozenset(self.local)
        lines: list[Explained] = []
        pieces = [piece for piece in self.slices if piece.family == self.family]
        for piece in sorted(pieces, key=lambda piece: piece.name):
            for number in _numbers(piece, self.port, self.family) or (0,):
                for endpoint in piece.endpoints:
                    backend = Backend(endpoint.address, number, self.port.protocol)
                    ours = kept.get(backend) is endpoint
                    sets = (ours and backend in cluster, ours and backend in local)
                    why = self._explain(endpoint, *sets) if ours else self._left_out(number)
                    if ours and backend in self.weightless and not any(sets):
                        why = Reason.WEIGHT_ZERO, "its weight is 0: no new connections"
                    lines.append(Explained(endpoint, piece.name, number, *sets, *why))
        return tuple(lines)

    def _left_out(self, number: int) -> tuple[Reason, str]:
        if number:
            return Reason.DUPLICATE, "another copy of this address and port counts"
        name = f"{self.port.name!r} ({self.port.protocol.name})"
        return Reason.NO_PORT, f"its slice has no port named {name}"

    def _explain(self, end: Endpoint, cluster: bool, local: bool) -> tuple[Reason, str]:
        if not end.ready and not _is_draining(end):
            return Reason.NOT_READY, _conditions(end)
        if not self.uses_cluster and not _is_local(end, self.node.name):
            return Reason.NOT_LOCAL, f"on node {end.node or 'unknown'}; the policy is Local"
        return self._of_ready(cluster, local) if end.ready else _of_draining(cluster, local)

    def _of_ready(self, cluster: bool, local: bool) -> tuple[Reason, str]:
        if cluster:
            return _BY_MODE[self.mode]
        if local:
            return Reason.LOCAL_ONLY, "ready on this node: serves what the Local policy covers"
        return Reason.HINTED_ELSEWHERE, f"ready, but {self.mode} prefers others for this node"


def external_local(service: Service, port: ServicePort, family: int) -> bool:
    """Whether external policy Local counts for this port (serviceport.go)."""
    if not service.external_local:
        return False
    counts = service.type in ("LoadBalancer", "NodePort") or bool(service.external_ips)
    return counts and externally_reachable(service, port, family)


def choose(
    slices: Sequence[EndpointSlice], port: ServicePort, service: Service, node: Node, family: int
) -> Chosen:
    """The cluster, local and serving sets of one Service port in one family.

    `cluster` is empty when no traffic ever uses it: internal policy Local and not reachable from
    outside. `local` is empty unless a policy that counts is Local.
    """
    uses_local = service.internal_local or external_local(service, port, family)
    uses_cluster = not service.internal_local or externally_reachable(service, port, family)
    if not uses_local and service.weights is None:
        plain = _all_ready(slices, port, family)
        if plain is not None:
            none = TopologyMode.NONE
            return Chosen(plain, (), plain, bool(plain), none, slices, port, node, family)
    ends = merged(slices, port, family)
    serving = tuple(backend for backend, end in ends if end.serving or end.ready)
    mode = TopologyMode.NONE
    cluster: BackendSet = ()
    local: BackendSet = ()
    if uses_cluster:
        mode = _mode([end for _, end in ends if end.ready], node)
        cluster = _usable(ends, mode, node)
        cluster = serving if cluster == serving else cluster
    if uses_local:
        here = [(backend, end) for backend, end in ends if _is_local(end, node.name)]
        local = _usable(here, TopologyMode.NONE, node)
    any_endpoints = any(end.ready or _is_draining(end) for _, end in ends)
    chosen = Chosen(
        cluster, local, serving, any_endpoints, mode, slices, port, node, family, uses_cluster
    )
    return chosen if service.weights is None else _weighted(chosen, service.weights)


def on_node(slices: Iterable[EndpointSlice], node: Node, family: int) -> tuple[Addr, ...]:
    """The addresses of all endpoints of this node, sorted."""
    if not node.name:
        return ()
    pieces = [piece for piece in slices if piece.family == family]
    return tuple(
        sorted({end.address for p in pieces for end in p.endpoints if end.node == node.name})
    )


def _weighted(chosen: Chosen, weights: Weights) -> Chosen:
    """The same without those whose weight is 0, and with the weights of the others."""
    of = _weights(weights, chosen.slices, chosen.port, chosen.family)
    cluster, local = weigh(chosen.cluster, of), weigh(chosen.local, of)
    return msgspec.structs.replace(
        chosen,
        cluster=cluster.backends,
        local=local.backends,
        cluster_weights=cluster.weights,
        local_weights=local.weights,
        weightless=frozenset(chosen.cluster) - set(cluster.backends)
        | frozenset(chosen.local) - set(local.backends),
    )


def _weights(
    weights: Weights, slices: Sequence[EndpointSlice], port: ServicePort, family: int
) -> dict[Backend, int]:
    """The weight of each backend: that of the copy that counts."""
    weight, pods = weigher(weights), {piece.name: piece.pods for piece in slices}
    found = {}
    for at, (piece, i) in _copies(slices, port, family).items():
        end, pod = piece.endpoints[i], pods[piece.name][i]
        found[Backend(*at, port.protocol)] = weight(end.address, pod, end.node, end.zone)
    return found


def _all_ready(
    slices: Iterable[EndpointSlice], port: ServicePort, family: int
) -> BackendSet | None:
    """Every backend, if all are ready and none has hints: then there is nothing to decide."""
    found: set[tuple[Addr, int]] = set()
    for piece in slices:
        for number in _numbers(piece, port, family):
            for end in piece.endpoints:
                if not end.ready or end.zone_hints or end.node_hints:
                    return None
                found.add((end.address, number))
    return tuple([Backend(addr, number, port.protocol) for addr, number in sorted(found)])


def merged(
    slices: Iterable[EndpointSlice], port: ServicePort | SlicePort, family: int
) -> list[tuple[Backend, Endpoint]]:
    """One endpoint for each backend of this port's name and protocol, by address and port."""
    copies = sorted(_copies(slices, port, family).items())
    return [(Backend(*at, port.protocol), piece.endpoints[i]) for at, (piece, i) in copies]


def _copies(
    slices: Iterable[EndpointSlice], port: ServicePort | SlicePort, family: int
) -> dict[tuple[Addr, int], tuple[EndpointSlice, int]]:
    """The copy of each endpoint that counts, by address and port: its slice and its place there."""
    kept: dict[tuple[Addr, int], tuple[EndpointSlice, int]] = {}
    for piece in sorted(slices, key=lambda piece: piece.name):
        for number in _numbers(piece, port, family):
            for i, end in enumerate(piece.endpoints):
                at = (end.address, number)
                if not end.terminating or at not in kept:
                    kept[at] = (piece, i)
    return kept


def _numbers(piece: EndpointSlice, port: ServicePort | SlicePort, family: int) -> list[int]:
    """What this slice puts behind the port's name and protocol: one number, in practice."""
    if piece.family != family:
        return []
    if len(piece.ports) > FEW_PORTS:
        return _numbers_by_name(piece).get((port.name, port.protocol), [])
    return [
        entry.port
        for entry in piece.ports
        if entry.name == port.name and entry.protocol == port.protocol and entry.port
    ]


_indexes: dict[int, tuple[EndpointSlice, dict[tuple[str, Protocol], list[int]]]] = {}


def _numbers_by_name(piece: EndpointSlice) -> dict[tuple[str, Protocol], list[int]]:
    """The ports of a slice that has many; kept for the slices that were asked for last, since
    every port of a Service asks for the same ones.
    """
    kept = _indexes.get(id(piece))
    if kept is not None and kept[0] is piece:
        return kept[1]
    index: dict[tuple[str, Protocol], list[int]] = {}
    for entry in piece.ports:
        if entry.port:
            index.setdefault((entry.name, entry.protocol), []).append(entry.port)
    while len(_indexes) >= MOST_INDEXES:
        del _indexes[next(iter(_indexes))]
    _indexes[id(piece)] = piece, index
    return index


def _mode(ready: Sequence[Endpoint], node: Node) -> TopologyMode:
    """The topology mode that the hints of the ready endpoints allow (topology.go)."""
    if not ready:
        return TopologyMode.NONE
    nodes = [end.node_hints or () for end in ready]
    if node.name and all(nodes) and any(node.name in hints for hints in nodes):
        return TopologyMode.SAME_NODE
    zones = [end.zone_hints or () for end in ready]
    if node.zone and all(zones) and any(node.zone in hints for hints in zones):
        return TopologyMode.SAME_ZONE
    return TopologyMode.NONE


def _usable(ends: Sequence[tuple[Backend, Endpoint]], mode: TopologyMode, node: Node) -> BackendSet:
    """What is ready and allowed; failing that, all that serves while it terminates."""
    found = [backend for backend, end in ends if end.ready and _is_allowed(end, mode, node)]
    return tuple(found or [backend for backend, end in ends if _is_draining(end)])


def _is_allowed(end: Endpoint, mode: TopologyMode, node: Node) -> bool:
    if mode is TopologyMode.NONE:
        return True
    if mode is TopologyMode.SAME_NODE:
        return node.name in (end.node_hints or ())
    return node.zone in (end.zone_hints or ())


def _is_local(end: Endpoint, node_name: str) -> bool:
    return bool(node_name) and end.node == node_name


def _is_draining(end: Endpoint) -> bool:
    return end.serving and end.terminating


def _of_draining(cluster: bool, local: bool) -> tuple[Reason, str]:
    if cluster or local:
        place = "" if cluster else " on this node"
        return Reason.FALLBACK, f"serves while it terminates: none{place} is ready"
    return Reason.DRAINING, "terminating: others are ready for new connections"


def _conditions(end: Endpoint) -> str:
    words = ["not ready", "serving" if end.serving else "not serving"]
    return ", ".join([*words, "terminating"] if end.terminating else words)
