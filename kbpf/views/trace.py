# SPDX-License-Identifier: Apache-2.0
"""What happens to a connection, step by step, and why: from what is programmed, in either mode."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from kbpf.errors import NotFoundError
from kbpf.model.address import ANY4, ANY6, family_of, format_addr
from kbpf.model.desired import Backend, FrontendAddress, FrontendKind
from kbpf.model.inspection import BackendSet, EndpointEntry, Inspection, Part, ServicePort, find_ports
from kbpf.model.reasons import Reason, Verdict
from kbpf.views import failures
from kbpf.views.endpoints import EndpointRow
from kbpf.views.failures import FailureRow
from kbpf.views.trace_page import Candidate, Client, NodeFacts, Origin, Trace
from kbpf.views.trace_steps import IpvsTracer, Tracer

NEEDS: Final = (
    Part.SERVICES
    | Part.HOOKS
    | Part.STATUS
    | Part.PACKETS
    | Part.RANGES
    | Part.AFFINITY
    | Part.FAILURES
    | Part.ENDPOINTS
)


def build_trace(inspection: Inspection, client: Client, to: FrontendAddress, facts: NodeFacts | None = None) -> Trace:
    kind = IpvsTracer if inspection.mode == "ipvs" else Tracer
    tracer = kind(inspection, client, to, facts or NodeFacts())
    reason = tracer.run()
    port = next((port for port in inspection.services if port.text == tracer.service), None)
    verdict = Verdict.TRANSLATE if reason is Reason.NEW_FLOW else reason.verdict
    return Trace(
        client=str(client),
        to=str(to),
        service=tracer.service,
        seen_by=tracer.seen_by,
        verdict=str(verdict),
        reason=reason.name.lower(),
        client_sees=reason.seen.client_saw,
        steps=tuple(tracer.steps),
        candidates=tuple(_name(tracer.candidates, port)),
        endpoints=build_endpoint_rows(port) if port is not None else (),
        failures=tuple(_failures(inspection, client, to)),
    )


def _name(candidates: Iterable[Candidate], port: ServicePort | None) -> Iterator[Candidate]:
    """Adds the Pod, node and zone of each, as far as they are known."""
    entries = {str(backend): entry for backend, entry in (port.endpoints if port else {}).items()}
    for candidate in candidates:
        if (entry := entries.get(candidate.backend)) is None:
            yield candidate
            continue
        yield replace(candidate, pod=entry.pod, node=entry.node, zone=entry.zone)


def _failures(inspection: Inspection, client: Client, to: FrontendAddress) -> Iterator[FailureRow]:
    for row in failures.build_rows(inspection):
        is_client = row.client == client.name if client.name else client.origin is Origin.OUTSIDE
        if row.frontend == str(to) and (is_client or client.origin is Origin.HOST):
            yield row


def find_targets(inspection: Inspection, query: str, origin: Origin) -> list[FrontendAddress]:
    """The addresses that a client of this origin dials for ``NAME[:PORT]`` or
    ``NAMESPACE/NAME[:PORT]``; PORT is a number or a name. Raises NotFoundError, which suggests
    similar names.
    """
    name, _, wanted = query.partition(":")
    ports = find_ports(inspection.services, name, inspection.location)
    kinds = (
        (FrontendKind.LOAD_BALANCER, FrontendKind.EXTERNAL_IP, FrontendKind.NODE_PORT)
        if origin is Origin.OUTSIDE
        else (FrontendKind.CLUSTER_IP, FrontendKind.LOAD_BALANCER, FrontendKind.NODE_PORT)
    )
    targets = []
    for port in ports:
        by_kind = {frontend.kind: frontend.at for frontend in reversed(port.frontends)}
        at = next((by_kind[kind] for kind in kinds if kind in by_kind), None)
        if at is not None and wanted in ("", str(at.port), port.key.port if port.key else ""):
            targets.append(_at_node(inspection, at))
    if not targets:
        raise NotFoundError(*_explain_no_target(inspection, ports, name, wanted, origin))
    return sorted(targets)


def _explain_no_target(
    inspection: Inspection, ports: Sequence[ServicePort], name: str, wanted: str, origin: Origin
) -> tuple[str, str, str]:
    names = sorted({port.key.port for port in ports if port.key and port.key.port})
    numbers = sorted({frontend.at.port for port in ports for frontend in port.frontends})
    hint = f"it has {', '.join([*map(str, numbers), *names])}"
    if wanted:
        return f"no port {wanted} of Service {name} is programmed", inspection.location, hint
    what = f"Service {name} has no address that a client outside can dial"
    if origin is not Origin.OUTSIDE:
        what = f"Service {name} has no address"
    return what, inspection.location, "name an address: `kbpf inspect service` lists them"


def _at_node(inspection: Inspection, at: FrontendAddress) -> FrontendAddress:
    """An address of this node that serves a NodePort, in place of the wildcard."""
    if at.address not in (ANY4, ANY6):
        return at
    family = family_of(at.address)
    addresses = sorted(a for a in inspection.node_port_addresses if family_of(a) == family)
    return at._replace(address=addresses[0]) if addresses else at


# ---- its endpoints, as they are pinned -----------------------------------------------------------

UNKNOWN: Final = "ready, and not used: by a hint, policy Local or weight 0"
"""Which of these it is only the EndpointSlices say: `kbpf trace --kubeconfig`."""


def build_endpoint_rows(port: ServicePort) -> tuple[EndpointRow, ...]:
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
