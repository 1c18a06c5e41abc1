# SPDX-License-Identifier: Apache-2.0
"""Decides which endpoints serve a Service port on this node, and explains why.

Rules (kube-proxy's endpointslicecache.go, and CategorizeEndpoints in topology.go):
- A Service's endpoints are the union of its slices of one family. Each slice has its own number
  for a port name.
- There is one backend for each address and port. Of several copies the last one that is not
  terminating is used, else the first one. kube-proxy visits slices in the random order of a Go
  map; here they are sorted by name, so that every node and every run decides the same.
- Only ready endpoints decide the topology mode, and one of them without a hint disables that
  level. An empty cluster list falls back to all endpoints that serve while terminating; an empty
  local list to those on this node. Each list falls back independently.
- Weights come last: they remove backends from a chosen set and never add one.
"""

from collections.abc import Container, Iterable, Sequence
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
from kbpf.policy.spread import apply_weights, make_weight_lookup

MAX_LINEAR_PORTS: Final = 8
"""Up to this many ports of a slice are searched linearly."""

MAX_PORT_INDEXES: Final = 64

EndpointCopies = dict[tuple[Addr, int], tuple[EndpointSlice, int]]
"""Address and port of an endpoint → the copy that is used: its slice, and its index there."""


class TopologyMode(StrEnum):
    """Which level of hints decided the cluster set; values as in trafficDistribution."""

    NONE = ""
    SAME_NODE = "PreferSameNode"
    SAME_ZONE = "PreferSameZone"


class EndpointReason(StrEnum):
    """Why an endpoint gets new connections, or why not."""

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


_READY_BY_MODE = {
    TopologyMode.NONE: (EndpointReason.READY, "ready"),
    TopologyMode.SAME_NODE: (EndpointReason.SAME_NODE, "ready, and hinted for this node"),
    TopologyMode.SAME_ZONE: (EndpointReason.SAME_ZONE, "ready, and hinted for this zone"),
}


class EndpointExplanation(NamedTuple):
    """The decision about one endpoint of one slice. `port` is 0 if the slice lacks the port;
    `cluster` and `local` are whether it is in these sets; `pod` is "" if it is none.
    """

    endpoint: Endpoint
    slice_name: str
    port: int
    cluster: bool
    local: bool
    reason: EndpointReason
    text: str
    pod: str = ""


class EndpointSelection(msgspec.Struct, frozen=True):
    """The backends of a Service port, sorted and without duplicates; the sets may share objects.

    `serving`: all that serve or are ready, regardless of policy and topology. `any_endpoints`:
    some endpoint somewhere could accept a connection, so an empty set means drop, not refuse. For
    the weights see Spread; `zero_weight`: backends that are in no set because their weight is 0.
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
    zero_weight: frozenset[Backend] = frozenset()

    def explain(self) -> tuple[EndpointExplanation, ...]:
        """Returns a line for each endpoint of each slice of this family, sorted by slice name."""
        effective = dict(merge_endpoints(self.slices, self.port, self.family))
        cluster, local = frozenset(self.cluster), frozenset(self.local)
        explanations: list[EndpointExplanation] = []
        family_slices = [slice_ for slice_ in self.slices if slice_.family == self.family]
        for slice_ in sorted(family_slices, key=lambda slice_: slice_.name):
            # 0: endpoints of a slice without this port get a line, too.
            for number in _port_numbers(slice_, self.port, self.family) or (0,):
                for endpoint, pod in zip(slice_.endpoints, slice_.pods, strict=True):
                    backend = Backend(endpoint.address, number, self.port.protocol)
                    # `is`: copies in other slices may be equal
                    is_effective = effective.get(backend) is endpoint
                    membership = (is_effective and backend in cluster, is_effective and backend in local)
                    if not is_effective:
                        explanation = self._explain_omitted(number)
                    elif backend in self.zero_weight and not any(membership):
                        explanation = EndpointReason.WEIGHT_ZERO, "its weight is 0: no new connections"
                    else:
                        explanation = self._explain_effective(endpoint, *membership)
                    explanations.append(
                        EndpointExplanation(endpoint, slice_.name, number, *membership, *explanation, pod)
                    )
        return tuple(explanations)

    def _explain_omitted(self, number: int) -> tuple[EndpointReason, str]:
        if number:
            return EndpointReason.DUPLICATE, "another copy of this address and port is used"
        name = f"{self.port.name!r} ({self.port.protocol.name})"
        return EndpointReason.NO_PORT, f"its slice has no port named {name}"

    def _explain_effective(self, endpoint: Endpoint, cluster: bool, local: bool) -> tuple[EndpointReason, str]:
        if not endpoint.ready and not _is_draining(endpoint):
            return EndpointReason.NOT_READY, _format_conditions(endpoint)
        if not self.uses_cluster and not _is_local(endpoint, self.node.name):
            return (
                EndpointReason.NOT_LOCAL,
                f"on node {endpoint.node or 'unknown'}; the policy is Local",
            )
        return self._explain_ready(cluster, local) if endpoint.ready else _explain_draining(cluster, local)

    def _explain_ready(self, cluster: bool, local: bool) -> tuple[EndpointReason, str]:
        if cluster:
            return _READY_BY_MODE[self.mode]
        if local:
            return (
                EndpointReason.LOCAL_ONLY,
                "ready on this node: used for traffic with policy Local",
            )
        return (
            EndpointReason.HINTED_ELSEWHERE,
            f"ready, but {self.mode} prefers other endpoints for this node",
        )


def is_external_local(service: Service, port: ServicePort, family: int) -> bool:
    """Whether external policy Local applies to this port (serviceport.go)."""
    if not service.external_local:
        return False
    can_be_external = service.type in ("LoadBalancer", "NodePort") or bool(service.external_ips)
    return can_be_external and externally_reachable(service, port, family)


def select_endpoints(
    slices: Sequence[EndpointSlice], port: ServicePort, service: Service, node: Node, family: int
) -> EndpointSelection:
    """Computes the cluster, local and serving sets of one Service port in one family.

    `cluster` is empty if no traffic can use it: internal policy Local and not reachable from
    outside. `local` is empty unless a policy that applies is Local.
    """
    # UsesLocalEndpoints() and UsesClusterEndpoints() in serviceport.go. Even if the external
    # policy is Local, clients on this node may use all endpoints (short circuit).
    uses_local = service.internal_local or is_external_local(service, port, family)
    uses_cluster = not service.internal_local or externally_reachable(service, port, family)
    # The common case, and fast: nothing has to be classified.
    if not uses_local and service.weights is None:
        backends = _backends_if_all_ready(slices, port, family)
        if backends is not None:
            no_topology = TopologyMode.NONE
            return EndpointSelection(backends, (), backends, bool(backends), no_topology, slices, port, node, family)
    endpoints = merge_endpoints(slices, port, family)
    serving = tuple(backend for backend, endpoint in endpoints if endpoint.serving or endpoint.ready)
    mode = TopologyMode.NONE
    cluster: BackendSet = ()
    local: BackendSet = ()
    if uses_cluster:
        mode = _topology_mode([endpoint for _, endpoint in endpoints if endpoint.ready], node)
        cluster = _usable_backends(endpoints, mode, node)
        cluster = serving if cluster == serving else cluster  # shares one tuple, to save memory
    if uses_local:
        local_endpoints = [(backend, endpoint) for backend, endpoint in endpoints if _is_local(endpoint, node.name)]
        # Hints do not narrow the local set (CategorizeEndpoints()).
        local = _usable_backends(local_endpoints, TopologyMode.NONE, node)
    # hasAnyEndpoints in CategorizeEndpoints()
    any_endpoints = any(endpoint.ready or _is_draining(endpoint) for _, endpoint in endpoints)
    selection = EndpointSelection(
        cluster, local, serving, any_endpoints, mode, slices, port, node, family, uses_cluster
    )
    return selection if service.weights is None else _apply_weights(selection, service.weights)


def local_endpoint_addresses(slices: Iterable[EndpointSlice], node: Node, family: int) -> tuple[Addr, ...]:
    """The addresses of all endpoints on this node, sorted."""
    if not node.name:
        return ()
    family_slices = [slice_ for slice_ in slices if slice_.family == family]
    return tuple(
        sorted(
            {
                endpoint.address
                for slice_ in family_slices
                for endpoint in slice_.endpoints
                if endpoint.node == node.name
            }
        )
    )


def _apply_weights(selection: EndpointSelection, weights: Weights) -> EndpointSelection:
    """Removes backends of weight 0 and sets the weights of the others."""
    weight_of = _backend_weights(weights, selection.slices, selection.port, selection.family)
    cluster, local = (
        apply_weights(selection.cluster, weight_of),
        apply_weights(selection.local, weight_of),
    )
    return msgspec.structs.replace(
        selection,
        cluster=cluster.backends,
        local=local.backends,
        cluster_weights=cluster.weights,
        local_weights=local.weights,
        zero_weight=frozenset(selection.cluster) - set(cluster.backends)
        | frozenset(selection.local) - set(local.backends),
    )


def _backend_weights(
    weights: Weights, slices: Sequence[EndpointSlice], port: ServicePort, family: int
) -> dict[Backend, int]:
    """Maps each backend to the weight of the endpoint copy that is used."""
    weight_of, pods = make_weight_lookup(weights), {slice_.name: slice_.pods for slice_ in slices}
    by_backend = {}
    for addr_port, (slice_, i) in _effective_copies(slices, port, family).items():
        endpoint, pod = slice_.endpoints[i], pods[slice_.name][i]
        by_backend[Backend(*addr_port, port.protocol)] = weight_of(endpoint.address, pod, endpoint.node, endpoint.zone)
    return by_backend


def _backends_if_all_ready(slices: Iterable[EndpointSlice], port: ServicePort, family: int) -> BackendSet | None:
    """Returns every backend if all are ready and none has hints, so that nothing has to be
    decided; else None.
    """
    addr_ports: set[tuple[Addr, int]] = set()
    for slice_ in slices:
        for number in _port_numbers(slice_, port, family):
            for endpoint in slice_.endpoints:
                if not endpoint.ready or endpoint.zone_hints or endpoint.node_hints:
                    return None
                addr_ports.add((endpoint.address, number))
    return tuple([Backend(addr, number, port.protocol) for addr, number in sorted(addr_ports)])


def merge_endpoints(
    slices: Iterable[EndpointSlice], port: ServicePort | SlicePort, family: int
) -> list[tuple[Backend, Endpoint]]:
    """Returns one endpoint for each backend of this port's name and protocol, sorted by address
    and port.
    """
    copies = sorted(_effective_copies(slices, port, family).items())
    return [(Backend(*addr_port, port.protocol), slice_.endpoints[i]) for addr_port, (slice_, i) in copies]


def _effective_copies(slices: Iterable[EndpointSlice], port: ServicePort | SlicePort, family: int) -> EndpointCopies:
    """Maps (address, port) to the endpoint copy that is used: its slice and its index there."""
    copies: EndpointCopies = {}
    for slice_ in sorted(slices, key=lambda slice_: slice_.name):
        add_copies(copies, slice_, port, family)
    return copies


def add_copies(
    copies: EndpointCopies,
    slice_: EndpointSlice,
    port: ServicePort | SlicePort,
    family: int,
    only: Container[Addr] | None = None,
) -> None:
    """Adds the endpoints of one slice; slices have to be added in the order of their names. `only`:
    leaves out all other addresses.
    """
    for number in _port_numbers(slice_, port, family):
        for i, endpoint in enumerate(slice_.endpoints):
            if only is not None and endpoint.address not in only:
                continue
            addr_port = (endpoint.address, number)
            # The last copy that is not terminating, else the first one.
            if not endpoint.terminating or addr_port not in copies:
                copies[addr_port] = (slice_, i)


def _port_numbers(slice_: EndpointSlice, port: ServicePort | SlicePort, family: int) -> list[int]:
    """The numbers of this port's name and protocol in the slice; one, in practice."""
    if slice_.family != family:
        return []
    if len(slice_.ports) > MAX_LINEAR_PORTS:
        return _index_port_numbers(slice_).get((port.name, port.protocol), [])
    return [
        entry.port
        for entry in slice_.ports
        if entry.name == port.name and entry.protocol == port.protocol and entry.port
    ]


_port_indexes: dict[int, tuple[EndpointSlice, dict[tuple[str, Protocol], list[int]]]] = {}


def _index_port_numbers(slice_: EndpointSlice) -> dict[tuple[str, Protocol], list[int]]:
    """Indexes the ports of a slice that has many. The latest indexes are cached, because every
    port of a Service looks up the same slices.
    """
    cached = _port_indexes.get(id(slice_))
    if cached is not None and cached[0] is slice_:  # keeps the slice, so its id is not reused
        return cached[1]
    index: dict[tuple[str, Protocol], list[int]] = {}
    for entry in slice_.ports:
        if entry.port:
            index.setdefault((entry.name, entry.protocol), []).append(entry.port)
    while len(_port_indexes) >= MAX_PORT_INDEXES:
        del _port_indexes[next(iter(_port_indexes))]
    _port_indexes[id(slice_)] = slice_, index
    return index


def _topology_mode(ready: Sequence[Endpoint], node: Node) -> TopologyMode:
    """The topology mode that the hints of the ready endpoints allow (topology.go)."""
    if not ready:
        return TopologyMode.NONE
    # topologyModeFromHints() in topology.go. any(): a level with no endpoint for this node would
    # leave the cluster set empty.
    # all(): one endpoint without a hint disables the level.
    nodes = [endpoint.node_hints or () for endpoint in ready]
    if node.name and all(nodes) and any(node.name in hints for hints in nodes):
        return TopologyMode.SAME_NODE
    zones = [endpoint.zone_hints or () for endpoint in ready]
    if node.zone and all(zones) and any(node.zone in hints for hints in zones):
        return TopologyMode.SAME_ZONE
    return TopologyMode.NONE


def _usable_backends(endpoints: Sequence[tuple[Backend, Endpoint]], mode: TopologyMode, node: Node) -> BackendSet:
    """The ready endpoints that the mode allows; if there are none, all that serve while
    terminating.
    """
    ready = [backend for backend, endpoint in endpoints if endpoint.ready and _is_hinted(endpoint, mode, node)]
    # The fallback ignores hints, as in CategorizeEndpoints().
    return tuple(ready or [backend for backend, endpoint in endpoints if _is_draining(endpoint)])


def _is_hinted(endpoint: Endpoint, mode: TopologyMode, node: Node) -> bool:
    if mode is TopologyMode.NONE:
        return True
    if mode is TopologyMode.SAME_NODE:
        return node.name in (endpoint.node_hints or ())
    return node.zone in (endpoint.zone_hints or ())


def _is_local(endpoint: Endpoint, node_name: str) -> bool:
    return bool(node_name) and endpoint.node == node_name


def _is_draining(endpoint: Endpoint) -> bool:
    return endpoint.serving and endpoint.terminating


def _explain_draining(cluster: bool, local: bool) -> tuple[EndpointReason, str]:
    if cluster or local:
        place = "" if cluster else " on this node"
        return EndpointReason.FALLBACK, f"serving while terminating: no endpoint{place} is ready"
    return EndpointReason.DRAINING, "terminating: other endpoints get new connections"


def _format_conditions(endpoint: Endpoint) -> str:
    conditions = ["not ready", "serving" if endpoint.serving else "not serving"]
    return ", ".join([*conditions, "terminating"] if endpoint.terminating else conditions)
