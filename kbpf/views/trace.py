# SPDX-License-Identifier: Apache-2.0
"""What happens to a connection, step by step: which program sees it, which Service it belongs to,
which backends it may reach, and why. The steps are those of bpf/lookup.h, from the pinned maps.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.errors import NotFoundError
from kbpf.model.address import ANY4, ANY6, Addr, family_of, format_addr
from kbpf.model.config import SocketLb
from kbpf.model.desired import Backend, FrontendAddress, FrontendKind
from kbpf.model.inspection import (
    BackendSet,
    FrontendEntry,
    Inspection,
    Part,
    ServicePort,
)
from kbpf.model.objects import Cidr, Protocol
from kbpf.model.reasons import Reason, Verdict
from kbpf.views.columns import Column, format_duration
from kbpf.views.failures import FailureRow
from kbpf.views.failures import build_rows as failure_rows
from kbpf.views.page import Page
from kbpf.views.text import format_table, indent

NEEDS: Final = (
    Part.SERVICES | Part.HOOKS | Part.STATUS | Part.PACKETS | Part.RANGES
    | Part.AFFINITY | Part.FAILURES
)  # fmt: skip
LOOPBACK4: Final = Cidr(Addr(bytes(10) + b"\xff\xff\x7f\x00\x00\x00"), 104)
LOOPBACK6: Final = Addr(bytes(15) + b"\x01")
REFUSED, TIMED_OUT = "ECONNREFUSED", "ETIMEDOUT"


class Origin(StrEnum):
    """Where a connection begins."""

    HOST = "host"
    POD = "pod"
    OUTSIDE = "outside"


class Client(NamedTuple):
    """A client. `name`: ``namespace/name`` of a Pod, otherwise "". `cgroups`: the ids of its cgroup
    and of its ancestors; empty for a client outside. `address`: None if it is not known.
    """

    origin: Origin
    name: str = ""
    cgroups: frozenset[int] = frozenset()
    address: Addr | None = None

    def __str__(self) -> str:
        address = f" ({format_addr(self.address)})" if self.address and self.name else ""
        if self.name:
            return f"pod {self.name}{address}"
        return format_addr(self.address) if self.address else WORDS[self.origin]


WORDS: Final = {
    Origin.HOST: "this node",
    Origin.POD: "a pod of this node",
    Origin.OUTSIDE: "a client outside of this node",
}


PACKET_HOOKS: Final = {
    Origin.HOST: ("host", "tc_egress", "leaves"),
    Origin.POD: ("pod", "tc_ingress", "comes"),
    Origin.OUTSIDE: ("host", "tc_ingress", "comes"),
}
"""The role of the device, the program there, and how the client's packets pass it."""


class Step(msgspec.Struct, frozen=True):
    """One decision. `step`: its name, `result`: its outcome, `why`: the setting that decides it."""

    step: str
    result: str
    why: str = ""


class Candidate(msgspec.Struct, frozen=True):
    """A backend that may be chosen, and its share (0 to 1) of new connections."""

    backend: str
    share: float


class Trace(msgspec.Struct, frozen=True):
    """A connection. `seen_by`: ``socket`` (a hook), ``packet`` or ``nothing``. `verdict` and
    `reason` are those of the programs, `client_sees` the errno or "" for a connection. `failures`:
    what this client has met at this Service so far.
    """

    client: str
    to: str
    service: str
    seen_by: str
    verdict: str
    reason: str
    client_sees: str
    steps: tuple[Step, ...]
    candidates: tuple[Candidate, ...]
    failures: tuple[FailureRow, ...] = ()


class _Found(NamedTuple):
    port: ServicePort
    frontend: FrontendEntry


class _Tracer:
    """Follows one connection, and adds each decision to `steps`."""

    def __init__(self, inspection: Inspection, client: Client, to: FrontendAddress) -> None:
        self._inspection, self._client, self._to = inspection, client, to
        self.steps: list[Step] = []
        self.seen_by, self.service = "nothing", ""
        self.candidates: tuple[Candidate, ...] = ()

    def run(self) -> Reason:
        """Returns why the programs decide as they do."""
        found = self._find_frontend()
        by_socket = self._is_seen_by_hook(found)
        if not by_socket and not self._is_seen_by_packets():
            return Reason.NOT_A_SERVICE
        self.seen_by = "socket" if by_socket else "packet"
        if found is None:
            return self._explain_no_frontend()
        self.service = found.port.text
        kind = found.frontend.kind.value if found.frontend.kind else "unknown"
        self._add("frontend", f"{kind} of Service {self.service}", str(found.frontend.at))
        if found.frontend.restricted and not by_socket and not self._is_allowed(found):
            return Reason.NOT_ALLOWED
        local = self._wants_local(found, by_socket)
        backends = found.frontend.local if local else found.frontend.cluster
        if not backends.size:
            elsewhere = local and found.port.any_endpoints
            self._add("backends", "none", "the Service has some on other nodes" if elsewhere
                      else "no endpoint is ready: check its selector and its Pods")  # fmt: skip
            return Reason.NO_LOCAL_ENDPOINTS if elsewhere else Reason.NO_ENDPOINTS
        by_affinity = self._choose(found, backends)
        self._explain_source(found, by_socket)
        if not by_socket:
            return Reason.NEW_FLOW
        return Reason.TRANSLATED_BY_AFFINITY if by_affinity else Reason.TRANSLATED

    def _add(self, step: str, result: str, why: str = "") -> None:
        self.steps.append(Step(step, result, why))

    # ---- which program ---------------------------------------------------------------------------

    def _is_seen_by_hook(self, found: _Found | None) -> bool:
        """Whether a socket hook decides. If not, says why."""
        inspection, client = self._inspection, self._client
        family = family_of(self._to.address)
        name = f"{'sendmsg' if self._to.protocol is Protocol.UDP else 'connect'}{family}"
        hook = next((hook for hook in inspection.hooks if hook.name == f"connect{family}"), None)
        if client.origin is Origin.OUTSIDE:
            return False
        if inspection.socket_lb is SocketLb.OFF:
            why = "--socket-lb off"
        elif inspection.socket_lb is SocketLb.HOST_NAMESPACE_ONLY and client.origin is Origin.POD:
            why = "--socket-lb hostNamespaceOnly, and the client is a pod"
        elif self._to.protocol is Protocol.SCTP:
            why = "no hook of the kernel sees SCTP sockets"
        elif hook is None or not hook.attached:
            why = f"the hook {hook.name if hook else name} is not attached"
        elif client.cgroups & inspection.exempt_ids:
            why = "its cgroup is exempt (--socket-lb-exempt, or a mesh's pod)"
        elif found is not None and found.frontend.restricted and not self._is_own_node_port(found):
            why = "source ranges apply, and a hook does not see the client's address"
        elif found is None and self._is_unknown_udp_port():
            why = "UDP to a port that no Service has"
        else:
            self._add("seen by", f"the socket hook {hook.name}",
                      "at connect(), before any packet" if name.startswith("connect")
                      else "at connect(), or at each sendto()")  # fmt: skip
            return True
        self._add("socket hooks", "leave it to the packet path", why)
        return False

    def _is_own_node_port(self, found: _Found) -> bool:
        is_node_port = found.frontend.kind is FrontendKind.NODE_PORT
        return is_node_port and self._client.origin is Origin.HOST

    def _is_unknown_udp_port(self) -> bool:
        is_udp, serves = self._to.protocol is Protocol.UDP, self._inspection.packet_programs
        return is_udp and serves and self._is_cluster_ip(self._to.address)

    def _is_seen_by_packets(self) -> bool:
        inspection = self._inspection
        if not inspection.packet_programs:
            status = inspection.packet_status
            why = (status and status.problem) or "--packet-path off"
            self._add("packet path", "is off: nothing of kbpf sees it", why)
            return False
        role, program, verb = PACKET_HOOKS[self._client.origin]
        self._add("seen by", f"the packet program {program}", f"at the {role} device it {verb} by")
        return True

    # ---- which Service ---------------------------------------------------------------------------

    def _find_frontend(self) -> _Found | None:
        """find_service() of lookup.h."""
        to = self._to
        exact = node_port = None
        for port in self._inspection.services:
            for frontend in port.frontends:
                at = frontend.at
                if (at.port, at.protocol) != (to.port, to.protocol):
                    continue
                if at == to and to.address not in (ANY4, ANY6):
                    exact = _Found(port, frontend)
                elif at.address == (ANY4 if family_of(to.address) == 4 else ANY6):
                    node_port = _Found(port, frontend)
        if exact is None and node_port is not None and self._serves_node_ports():
            return node_port
        return exact

    def _serves_node_ports(self) -> bool:
        address = self._to.address
        if is_loopback(address) or address in (ANY4, ANY6):
            return self._inspection.localhost_node_ports and self._client.origin is Origin.HOST
        return address in self._inspection.node_port_addresses

    def _is_cluster_ip(self, address: Addr) -> bool:
        return any(
            frontend.kind is FrontendKind.CLUSTER_IP and frontend.at.address == address
            for port in self._inspection.services
            for frontend in port.frontends
        )

    def _explain_no_frontend(self) -> Reason:
        to = self._to
        if self._is_cluster_ip(to.address):
            self._add("frontend", "none", f"a ClusterIP, but no Service has port {to.port}")
            return Reason.UNKNOWN_PORT
        number = f":{to.port}"
        status = self._inspection.status
        left = [line for line in (status.left_to_node if status else ()) if str(to) in line]
        if left:
            self._add("frontend", "left to the node", left[0])
        elif self._has_node_port():
            self._add("frontend", "none", f"{number} is a NodePort, but not at this address: "
                      "nodePortAddresses")  # fmt: skip
        else:
            self._add("frontend", "none", "no Service has this address and port")
        return Reason.NOT_A_SERVICE

    def _has_node_port(self) -> bool:
        return any(port.is_at(None, self._to.port) for port in self._inspection.services)

    # ---- which backends --------------------------------------------------------------------------

    def _is_allowed(self, found: _Found) -> bool:
        """source_allowed() of lookup.h, for packets. True if the client's address is not known."""
        ranges = found.port.source_ranges
        if found.frontend.kind is FrontendKind.NODE_PORT:
            ranges = self._inspection.node_port_ranges
        text = ", ".join(map(str, ranges)) or "none"
        address = self._client.address
        if address is None:
            self._add("source ranges", "depends on the client's address", text)
            return True
        allowed = any(contains(cidr, address) for cidr in ranges)
        self._add("source ranges", "admit it" if allowed else "do not admit it", text)
        return allowed

    def _wants_local(self, found: _Found, by_socket: bool) -> bool:
        port, why = found.port, ""
        if found.frontend.kind is FrontendKind.CLUSTER_IP:
            name, configured = "internalTrafficPolicy", port.internal_local
            local = configured
        else:
            name, configured = "externalTrafficPolicy", port.external_local
            local = configured and self._client.origin is Origin.OUTSIDE and not by_socket
        if configured and not local:
            why = "but this node and its pods reach the endpoints of all nodes"
        policy, used = ("Local" if configured else "Cluster"), ("local" if local else "cluster")
        self._add("policy", f"{name} {policy}: the {used} set", why)
        return local

    def _choose(self, found: _Found, backends: BackendSet) -> bool:
        """Lists the candidates. Returns whether session affinity decides."""
        slots = Counter(entry.backend for entry in backends.slots.values() if entry.backend)
        members = sorted(slots.items())
        self.candidates = tuple(
            Candidate(str(backend), round(count / backends.size, 4)) for backend, count in members
        )
        count = f"{len(members)} backends" if len(members) != 1 else "1 backend"
        self._add("backends", count, f"{found.port.algorithm} over {backends.size} slots")
        if not found.port.affinity_timeout:
            return False
        return self._apply_affinity(found.port, [backend for backend, _ in members])

    def _apply_affinity(self, port: ServicePort, members: Sequence[Backend]) -> bool:
        now, timeout = self._inspection.monotonic, port.affinity_timeout
        for entry in self._inspection.affinity:
            is_client = entry.client == self._client.address is not None or (
                entry.client is None
                and self._client.origin is Origin.HOST
                and entry.netns == self._inspection.host_netns
            )
            if entry.service.id != port.id or not is_client or now - entry.last_used > timeout:
                continue
            if entry.backend.backend in members:
                self.candidates = (Candidate(str(entry.backend.backend), 1.0),)
                left = format_duration(timeout - (now - entry.last_used))
                self._add("affinity", f"{entry.backend.backend} again", f"for {left} more")
                return True
        self._add("affinity", "none yet: any of them", f"then it is kept for {timeout} s")
        return False

    def _explain_source(self, found: _Found, by_socket: bool) -> None:
        if by_socket:
            self._add("source", "the client's own", "no packet is translated")
            return
        masqueraded, why = self._is_masqueraded(found)
        self._add("source", "an address of this node" if masqueraded else "the client's own", why)

    def _is_masqueraded(self, found: _Found) -> tuple[bool, str]:
        """masquerades() of tc/begin.h."""
        node = self._inspection.node
        if found.frontend.kind is not FrontendKind.CLUSTER_IP:
            if found.port.external_local:
                return False, "externalTrafficPolicy Local"
            return True, "so that replies come back to this node"
        if node.masquerades_all:
            return True, "--masquerade-all"
        if not node.pods:
            return False, "kbpf does not tell pods from other clients here"
        if node.pods == "networks":
            address = self._client.address
            is_pod = address is not None and any(
                contains(cidr, address) for cidr in self._inspection.local_networks
            )
        else:
            is_pod = self._client.origin is Origin.POD
        return not is_pod, "a pod of this node" if is_pod else "the client is no pod of this node"


def contains(cidr: Cidr, address: Addr) -> bool:
    """Whether the network has this address."""
    shift = 128 - cidr.bits
    network, number = (int.from_bytes(raw, "big") >> shift for raw in (cidr.address, address))
    return network == number


def is_loopback(address: Addr) -> bool:
    return contains(LOOPBACK4, address) or address == LOOPBACK6


def build_trace(inspection: Inspection, client: Client, to: FrontendAddress) -> Trace:
    tracer = _Tracer(inspection, client, to)
    reason = tracer.run()
    return Trace(
        client=str(client),
        to=str(to),
        service=tracer.service,
        seen_by=tracer.seen_by,
        verdict=_verdict(reason),
        reason=reason.name.lower(),
        client_sees={Verdict.REFUSE: REFUSED, Verdict.DROP: TIMED_OUT}.get(reason.verdict, ""),
        steps=tuple(tracer.steps),
        candidates=tracer.candidates,
        failures=tuple(_failures(inspection, client, to)),
    )


def _verdict(reason: Reason) -> str:
    return str(Verdict.TRANSLATE if reason is Reason.NEW_FLOW else reason.verdict)


def _failures(inspection: Inspection, client: Client, to: FrontendAddress) -> Iterator[FailureRow]:
    for row in failure_rows(inspection):
        is_client = row.client == client.name if client.name else client.origin is Origin.OUTSIDE
        if row.frontend == str(to) and (is_client or client.origin is Origin.HOST):
            yield row


def find_targets(inspection: Inspection, query: str, origin: Origin) -> list[FrontendAddress]:
    """The addresses that a client of this origin dials for ``NAME[:PORT]`` or
    ``NAMESPACE/NAME[:PORT]``; PORT is a number or a name. Raises NotFoundError.
    """
    name, _, wanted = query.partition(":")
    namespace, _, bare = name.rpartition("/")
    ports = [port for port in inspection.services if port.belongs_to(bare, namespace)]
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
        what = f"no port {wanted} of Service {name}" if ports and wanted else f"no Service {name}"
        raise NotFoundError(
            f"{what} is programmed", inspection.location, "`kbpf inspect services` lists all"
        )
    return sorted(targets)


def _at_node(inspection: Inspection, at: FrontendAddress) -> FrontendAddress:
    """An address of this node that serves a NodePort, in place of the wildcard."""
    if at.address not in (ANY4, ANY6):
        return at
    family = family_of(at.address)
    addresses = sorted(a for a in inspection.node_port_addresses if family_of(a) == family)
    return at._replace(address=addresses[0]) if addresses else at


# ---- the page --------------------------------------------------------------------------------

STEP_COLUMNS: Final = (
    Column("STEP", lambda s: s.step),
    Column("RESULT", lambda s: s.result),
    Column("WHY", lambda s: s.why or "-"),
)
CANDIDATE_COLUMNS: Final = (
    Column("BACKEND", lambda c: c.backend),
    Column("SHARE", lambda c: f"{c.share:.1%}", right=True),
)
FAILURE_COLUMNS: Final = (
    Column("LAST", lambda r: f"{format_duration(r.last_seconds)} ago", right=True),
    Column("COUNT", lambda r: str(r.count), right=True),
    Column("CLIENT", lambda r: r.client),
    Column("BACKEND", lambda r: r.backend or "-"),
    Column("REASON", lambda r: r.reason.replace("_", " ")),
)


def build_page(traces: Sequence[Trace], note: str = "") -> Page:
    text = "\n\n".join(map(format_trace, traces))
    return Page(text=lambda _: text, summary=traces, notes=(note,))


def format_trace(trace: Trace) -> str:
    lines = [f"{trace.client} to {trace.to}", indent(format_table(trace.steps, STEP_COLUMNS))]
    lines.append(f"  => {_conclusion(trace)}")
    if trace.candidates:
        lines.append(indent(format_table(trace.candidates, CANDIDATE_COLUMNS), "     "))
    if trace.failures:
        lines.append("  failed before:")
        lines.append(indent(format_table(trace.failures, FAILURE_COLUMNS), "     "))
    return "\n".join(lines)


def _conclusion(trace: Trace) -> str:
    reason = Reason[trace.reason.upper()]
    if trace.verdict == Verdict.TRANSLATE:
        return "a connection to one of these backends:" if len(trace.candidates) > 1 else \
            "a connection to this backend:"  # fmt: skip
    if trace.verdict == Verdict.PASS:
        return "kbpf leaves it alone: the node routes it as it is"
    return f"{reason.words} (the client sees {trace.client_sees})"
