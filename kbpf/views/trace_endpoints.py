# SPDX-License-Identifier: Apache-2.0
"""The endpoints of a Service port as they are pinned, without the API server: which of them get
connections, and why not as far as their conditions say it.
"""

from collections.abc import Iterable
from typing import Final

from kbpf.model.address import format_addr
from kbpf.model.desired import Backend
from kbpf.model.inspection import BackendSet, EndpointEntry, ServicePort
from kbpf.views.endpoints import EndpointRow

UNKNOWN: Final = "ready, and not used: by a hint, policy Local or weight 0"
"""Which of these it is only the EndpointSlices say: `kbpf trace --kubeconfig`."""


def build_rows(port: ServicePort) -> tuple[EndpointRow, ...]:
    """A row for each endpoint that is known; `reason` is "", since the maps have none."""
    cluster = _members(frontend.cluster for frontend in port.frontends)
    local = _members(frontend.local for frontend in port.frontends)
    return tuple(
        EndpointRow(
            port.key.port if port.key else "",
            format_addr(backend.address),
            backend.port,
            entry.pod,
            entry.node,
            entry.zone,
            entry.state,
            backend in cluster,
            backend in local,
            "",
            _why(port, entry, backend in cluster, backend in local),
            "",
        )
        for backend, entry in sorted(port.endpoints.items())
    )


def _members(sets: Iterable[BackendSet]) -> frozenset[Backend]:
    slots = (entry.backend for set_ in sets for entry in set_.slots.values())
    return frozenset(backend for backend in slots if backend is not None)


def _why(port: ServicePort, entry: EndpointEntry, cluster: bool, local: bool) -> str:
    if cluster or local:
        by_one = cluster != local and (port.internal_local or port.external_local)
        policy = f" by policy {'Cluster' if cluster else 'Local'}" if by_one else ""
        return f"used{policy}: {entry.state}"
    return UNKNOWN if entry.ready else f"not used: {entry.state}"
