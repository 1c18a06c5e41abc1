"""What the health check of a Service says: whether this node has endpoints of it.

kube-proxy's rules (service_health.go, and LocalReadyEndpoints in endpointschangetracker.go): only a
LoadBalancer Service with external policy Local has a healthCheckNodePort. Ready endpoints on this
node count, by address: two ports of one Pod are one, and those that terminate are none though they
may still serve. Of several copies of an endpoint one counts, see endpoints.py. kube-proxy has a
server for each family; where the Service has only one, the other family's answers the same here.
"""

from collections.abc import Sequence

import msgspec

from kbpf.model.objects import EndpointSlice, Service, SlicePort
from kbpf.policy.endpoints import merged
from kbpf.policy.frontends import families


class HealthCheck(msgspec.Struct, frozen=True):
    """A port, and how many endpoints it reports to who asks by IPv4 and by IPv6."""

    port: int
    v4: int
    v6: int


def health_check(
    service: Service | None, slices: Sequence[EndpointSlice], node: str
) -> HealthCheck | None:
    """The health check of a Service, if it has one."""
    if service is None or not service.health_check_node_port:
        return None
    counts = {family: ready_here(slices, family, node) for family in families(service)}
    if not counts:
        return None
    either = next(iter(counts.values()))
    return HealthCheck(service.health_check_node_port, counts.get(4, either), counts.get(6, either))


def ready_here(slices: Sequence[EndpointSlice], family: int, node: str) -> int:
    """How many addresses of this family are ready on this node, behind any port of the slices."""
    alike: dict[tuple[SlicePort, ...], list[EndpointSlice]] = {}
    for piece in slices:
        if piece.ports:
            alike.setdefault(piece.ports, []).append(piece)
    return len(
        {
            backend.address
            for ports, pieces in alike.items()  # what holds for one port holds for all of them
            for backend, end in merged(pieces, ports[0], family)
            if end.ready and node and end.node == node
        }
    )
