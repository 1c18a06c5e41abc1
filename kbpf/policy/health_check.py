# SPDX-License-Identifier: Apache-2.0
"""Computes the health check of a Service: how many endpoints it has on this node.

kube-proxy's rules (service_health.go, and LocalReadyEndpoints in endpointschangetracker.go): only
a LoadBalancer Service with external policy Local has a healthCheckNodePort. Ready endpoints on
this node count, by address: two ports of one Pod count once, and terminating endpoints do not
count even if they still serve. Of several copies of an endpoint one counts, see endpoints.py.
kube-proxy has a server for each family; if the Service has only one family, both families report
the same count here.
"""

from collections.abc import Iterable, Sequence

import msgspec

from kbpf.model.objects import EndpointSlice, Protocol, Service, SlicePort
from kbpf.policy.endpoints import merge_endpoints
from kbpf.policy.frontends import service_families


class HealthCheck(msgspec.Struct, frozen=True):
    """The port, and the endpoint counts that it reports to clients over IPv4 and IPv6."""

    port: int
    v4: int
    v6: int


def compute_health_check(service: Service | None, slices: Sequence[EndpointSlice], node: str) -> HealthCheck | None:
    """Returns the health check of a Service, or None if it has none."""
    if service is None or not service.health_check_node_port:
        return None
    counts = {family: count_ready_local_endpoints(slices, family, node) for family in service_families(service)}
    if not counts:
        return None
    default_count = next(iter(counts.values()))
    return HealthCheck(service.health_check_node_port, counts.get(4, default_count), counts.get(6, default_count))


def count_ready_local_endpoints(slices: Sequence[EndpointSlice], family: int, node: str) -> int:
    """Counts the ready addresses of this family on this node, behind any port of the slices."""
    if not node:
        return 0
    return len(
        {
            backend.address
            for port in _distinct_ports(slices)
            for backend, endpoint in merge_endpoints(slices, port, family)
            if endpoint.ready and endpoint.node == node
        }
    )


def _distinct_ports(slices: Sequence[EndpointSlice]) -> Iterable[SlicePort]:
    """One port for each distinct shape: ports whose numbers are equal in the same slices have the
    same endpoints, so one of them is enough.
    """
    positions: dict[tuple[str, Protocol], list[tuple[int, int]]] = {}
    for i, slice_ in enumerate(slices):
        for port in slice_.ports:
            if port.port:
                positions.setdefault((port.name, port.protocol), []).append((i, port.port))
    ports_by_shape: dict[tuple[tuple[int, int], ...], SlicePort] = {}
    for (name, protocol), slice_numbers in positions.items():
        ordinals: dict[int, int] = {}  # port number → order of first use; only equality matters
        shape = tuple((i, ordinals.setdefault(number, len(ordinals))) for i, number in slice_numbers)
        ports_by_shape[shape] = SlicePort(name, protocol, slice_numbers[0][1])
    return ports_by_shape.values()
