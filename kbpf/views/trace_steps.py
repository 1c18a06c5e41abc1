# SPDX-License-Identifier: Apache-2.0
"""The decisions about a connection: which program sees it, which Service it is for, and which backends
it may reach. In mode bpf (Tracer) they have the order of bpf/lookup.h. In mode ipvs (IpvsTracer)
packets decide (dataplane/ipvs/plan.py): sockets keep the address that they dial.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

from kbpf.model.address import ANY4, ANY6, Addr, family_of, is_loopback
from kbpf.model.config import SocketLb
from kbpf.model.desired import Backend, FrontendAddress, FrontendKind
from kbpf.model.inspection import EMPTY_SET, BackendSet, FrontendEntry, HookEntry, Inspection, ServicePort
from kbpf.model.objects import Algorithm, Protocol
from kbpf.model.reasons import Reason, Verdict
from kbpf.views.page import format_duration
from kbpf.views.trace_page import Candidate, Client, NodeFacts, Origin, Step
from kbpf.views.trace_way import Way

HOST_HOOK: Final = ("host", "tc_egress", "leaves")
PACKET_HOOKS: Final = {
    Origin.HOST: HOST_HOOK,
    Origin.POD: ("pod", "tc_ingress", "comes"),
    Origin.OUTSIDE: ("host", "tc_ingress", "comes"),
}
"""The role of the device, the program there, and how the client's packets pass it."""


class Target(NamedTuple):
    """The frontend that the connection is for, and its Service port."""

    port: ServicePort
    frontend: FrontendEntry


class Tracer:
    """Follows one connection, and adds each decision to `steps`."""

    def __init__(self, inspection: Inspection, client: Client, to: FrontendAddress, facts: NodeFacts) -> None:
        self._inspection, self._client, self._to, self._facts = inspection, client, to, facts
        self._family = family_of(to.address)
        self._address = client.address(self._family)
        self._is_on_host = client.is_on_host(inspection.host_netns)
        self.steps: list[Step] = []
        self.seen_by, self.service = "nothing", ""
        self.candidates: tuple[Candidate, ...] = ()

    def run(self) -> Reason:
        """Returns why the programs decide as they do."""
        target = self._find_target(serves_loopback=self._is_on_host)
        if self._client.origin is not Origin.OUTSIDE and self._is_seen_by_hook(target):
            reason = self._decide(target, by_socket=True)
            if self._inspection.hooks_fail or not is_failure(reason):
                return reason
            self.steps.clear()
            self._add("socket hooks", "leave it to the packet path", "on this kernel they cannot make connect() fail")
        if not self._is_seen_by_packets(target):
            self.seen_by, self.service, self.candidates = "nothing", "", ()
            return Reason.NOT_A_SERVICE
        return self._decide(self._find_target(serves_loopback=False), by_socket=False)

    def _decide(self, target: Target | None, by_socket: bool) -> Reason:
        self.seen_by = "socket" if by_socket else "packet"
        if target is None:
            return self._explain_no_frontend()
        port, frontend = target
        self.service = port.text
        self._explain_frontend(target)
        if frontend.restricted and not by_socket and not self._is_allowed(target):
            return Reason.NOT_ALLOWED
        local = self._wants_local(target, by_socket)
        backends = frontend.local if local else frontend.cluster
        if not backends.size:
            return self._explain_no_backends(port, local)
        shares = self._list_shares(port, backends, by_socket)
        last = self._find_affinity(port, shares.keys(), by_socket)
        way = Way(self._inspection, self._client, self._facts, target.frontend, port, by_socket)
        self.candidates = way.build_candidates({last: 1.0} if last else shares)
        self.steps += way.steps
        if not by_socket:
            return Reason.NEW_FLOW
        return Reason.TRANSLATED_BY_AFFINITY if last else Reason.TRANSLATED

    def _add(self, step: str, result: str, why: str = "") -> None:
        self.steps.append(Step(step, result, why))

    # ---- which program ---------------------------------------------------------------------------

    def _is_seen_by_hook(self, target: Target | None) -> bool:
        """Whether a socket hook decides. Says why, or why not."""
        name = f"connect{self._family}"
        hook = next((hook for hook in self._inspection.hooks if hook.name == name), None)
        if why := self._why_not_hooked(hook, name) or self._why_left(target):
            self._add("socket hooks", "leave it to the packet path", why)
            return False
        is_udp = self._to.protocol is Protocol.UDP
        self._add(
            "seen by",
            f"the socket hook {name}",
            f"at connect(); without connect(), sendmsg{self._family} at each datagram"
            if is_udp
            else "at connect(), before any packet",
        )
        return True

    def _why_not_hooked(self, hook: HookEntry | None, name: str) -> str:
        """Why no hook runs for the client's sockets; "" if one does."""
        inspection, cgroups = self._inspection, self._client.cgroups
        if inspection.socket_lb is SocketLb.OFF:
            return "--socket-lb off"
        if inspection.socket_lb is SocketLb.HOST_NAMESPACE_ONLY and not self._is_on_host:
            return "--socket-lb hostNamespaceOnly, and the client is a pod"
        if self._to.protocol is Protocol.SCTP:
            return "no hook of the kernel sees SCTP sockets"
        if hook is None or not hook.attached:
            return f"the hook {name} is not attached"
        if not self._client.is_of_cluster:
            return "not a namespace of this cluster: no device of it leads to this node"
        is_below = not cgroups or not hook.cgroup_id or hook.cgroup_id in cgroups
        why = "" if is_below else f"its cgroup is not below {hook.cgroup or 'that of the hooks'}"
        is_exempt = cgroups & inspection.exempt_ids
        return "its cgroup is exempt (--socket-lb-exempt, or a mesh's pod)" if is_exempt else why

    def _why_left(self, target: Target | None) -> str:
        """Why the hook does not decide about this destination; "" if it does."""
        if target is not None:
            is_own_node_port = target.frontend.kind is FrontendKind.NODE_PORT and self._is_on_host
            if target.frontend.restricted and not is_own_node_port:
                return "source ranges apply, and a hook does not see the client's address"
        elif self._is_udp_probe(target):
            return "UDP to a port that no Service has: connect() succeeds, sendto() is refused"
        return ""

    def _is_udp_probe(self, target: Target | None) -> bool:
        """is_udp_probe() of sock.c."""
        return (
            target is None
            and self._to.protocol is Protocol.UDP
            and bool(self._inspection.packet_programs)
            and self._is_cluster_ip(self._to.address)
        )

    def _is_seen_by_packets(self, target: Target | None) -> bool:
        inspection, address = self._inspection, self._to.address
        if not inspection.packet_programs:
            status = inspection.packet_status
            why = (status and status.problem) or "--packet-path off"
            self._add("packet path", "is off: nothing of kbpf sees it", why)
            return False
        if is_loopback(address) or (self._is_on_host and self._is_own(address)):
            self._add("packet path", "does not see it", "no packet leaves by a device")
            return False
        if self._client.origin is Origin.OUTSIDE and self._address in inspection.node.addresses:
            self._add(
                "packet path", "leaves it to the node", "the client's address is this node's own: the stack drops it"
            )
            return False
        # A probe's sendto() is refused without a route, too.
        find = None if self._is_udp_probe(target) else self._facts.find_client_route
        if find is not None and (error := find(address, None, 0).error):
            self._add("packet path", "does not see it", f"the client sends no packet: {error}")
            return False
        hook = HOST_HOOK if self._is_on_host else PACKET_HOOKS[self._client.origin]
        role, program, verb = hook
        self._add("seen by", f"the packet program {program}", f"at the {role} device it {verb} by")
        return True

    # ---- which Service ---------------------------------------------------------------------------

    def _find_target(self, serves_loopback: bool) -> Target | None:
        """find_service() of lookup.h. `serves_loopback`: whether the client's loopback is this
        node's.
        """
        to = self._to
        wildcard = ANY4 if self._family == 4 else ANY6
        exact = node_port = None
        for port in self._inspection.services:
            for frontend in port.frontends:
                at = frontend.at
                if (at.port, at.protocol) != (to.port, to.protocol):
                    continue
                if at == to and to.address != wildcard:
                    exact = Target(port, frontend)
                elif at.address == wildcard:
                    node_port = Target(port, frontend)
        if exact is None and node_port is not None and self._serves_node_ports(serves_loopback):
            return node_port
        return exact

    def _serves_node_ports(self, serves_loopback: bool) -> bool:
        address = self._to.address
        if is_loopback(address) or address in (ANY4, ANY6):
            return self._inspection.localhost_node_ports and serves_loopback
        return address in self._inspection.node_port_addresses

    def _is_own(self, address: Addr) -> bool:
        """Whether it is an address of this node, as far as kbpf knows them."""
        inspection = self._inspection
        return address in inspection.node_port_addresses or address in inspection.node.addresses

    def _is_cluster_ip(self, address: Addr) -> bool:
        return any(
            frontend.kind is FrontendKind.CLUSTER_IP and frontend.at.address == address
            for port in self._inspection.services
            for frontend in port.frontends
        )

    def _explain_frontend(self, target: Target) -> None:
        kind = target.frontend.kind.value if target.frontend.kind else "unknown"
        self._add("frontend", f"{kind} of Service {target.port.text}", str(target.frontend))

    def _explain_no_backends(self, port: ServicePort, local: bool) -> Reason:
        elsewhere = local and port.any_endpoints
        why = "no endpoint is ready: check its selector and its Pods"
        self._add("backends", "none", "the Service has some on other nodes" if elsewhere else why)
        return Reason.NO_LOCAL_ENDPOINTS if elsewhere else Reason.NO_ENDPOINTS

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
            self._add("frontend", "none", f"{number} is a NodePort, but not at this address: nodePortAddresses")
        else:
            self._add("frontend", "none", "no Service has this address and port")
        return Reason.NOT_A_SERVICE

    def _has_node_port(self) -> bool:
        return any(port.is_at(None, self._to.port) for port in self._inspection.services)

    # ---- which backends --------------------------------------------------------------------------

    def _is_allowed(self, target: Target) -> bool:
        """source_allowed() of lookup.h, for packets. True if the client's address is not known."""
        ranges = target.port.source_ranges
        if target.frontend.kind is FrontendKind.NODE_PORT:
            ranges = self._inspection.node_port_ranges
        text = ", ".join(map(str, ranges)) or "none"
        address = self._address
        if address is None:
            self._add("source ranges", "depends on the client's address", text)
            return True
        allowed = any(cidr.contains(address) for cidr in ranges)
        self._add("source ranges", "admit it" if allowed else "do not admit it", text)
        return allowed

    def _wants_local(self, target: Target, by_socket: bool) -> bool:
        port, why = target.port, ""
        if target.frontend.kind is FrontendKind.CLUSTER_IP:
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

    def _list_shares(self, port: ServicePort, backends: BackendSet, by_socket: bool) -> dict[Backend, float]:
        """The backends of the set, and the share of each."""
        shares = backends.shares()
        count = f"{len(shares)} backends" if len(shares) != 1 else "1 backend"
        slot_count = f"{backends.size} slot{'' if backends.size == 1 else 's'}"
        why = f"{port.algorithm} over {slot_count}"
        if port.algorithm is Algorithm.MAGLEV:
            by = "address" if port.affinity_timeout else "address and port"
            why = (
                f"at random over {slot_count}: a socket has no port yet"
                if by_socket
                else f"{port.algorithm} over {slot_count}: by a hash of the client's {by}"
            )
        self._add("backends", count, why)
        return shares

    def _find_affinity(self, port: ServicePort, members: Collection[Backend], by_socket: bool) -> Backend | None:
        """The backend that this client used last, if it has to get that again."""
        timeout = port.affinity_timeout
        if not timeout:
            return None
        address, netns = (None, self._client.netns) if by_socket else (self._address, None)
        if by_socket and self._is_on_host:
            netns = self._inspection.host_netns
        if address is None and netns is None:
            self._add(
                "affinity",
                "depends on the client, which is not known exactly: any of them",
                "its network namespace could not be read"
                if by_socket
                else "name its address to see whether it has one",
            )
            return None
        for entry in self._inspection.affinity:
            is_client = (
                entry.client == address if address is not None else (entry.client is None and entry.netns == netns)
            )
            idle = self._inspection.monotonic - entry.last_used
            backend = entry.backend.backend
            if entry.service.id == port.id and is_client and idle <= timeout and backend in members:
                self._add("affinity", f"{backend} again", f"for {format_duration(timeout - idle)} more")
                return backend
        self._add("affinity", "none yet: any of them", f"then it is kept for {timeout} s")
        return None


def is_failure(reason: Reason) -> bool:
    """Whether the client gets an error for it."""
    return reason.verdict in (Verdict.REFUSE, Verdict.DROP)


# ---- mode ipvs -----------------------------------------------------------------------------------

NOT_LOOKED_AT: Final = Step(
    "not looked at",
    "routing, netfilter and masquerading",
    "`nft list table inet kbpf` has the rules, `ipvsadm -L -n` the virtual services",
)


class IpvsTracer(Tracer):
    """Follows one connection through IPVS and the nftables table."""

    def run(self) -> Reason:
        if is_loopback(self._to.address):
            self._add("IPVS", "does not serve it", "the kernel drops packets of loopback that IPVS has translated")
            return Reason.NOT_A_SERVICE
        self.seen_by = "ipvs"
        where = "OUTPUT" if self._is_on_host else "INPUT"
        self._add("seen by", "IPVS", f"in {where}, since this node has the Service's address")
        target = self._find_target(serves_loopback=False)
        if target is None:
            return self._explain_refused_port() if self._is_virtual() else self._explain_no_frontend()
        port, frontend = target
        self.service = port.text
        self._explain_frontend(target)
        if frontend.restricted:
            self._add(
                "source ranges",
                "dropped unless they admit the client",
                "the sets `sources4` and `sources6` of the table have them",
            )
        local = self._wants_local(target, by_socket=False)
        backends = frontend.local if local else self._cluster_set(target)
        if not backends.size:
            return self._explain_no_backends(port, local)
        shares = self._list_shares(port, backends, by_socket=False)
        if port.affinity_timeout:
            self._add(
                "affinity",
                "the client's last backend again, if it has one",
                f"persistent for {port.affinity_timeout} s, by address",
            )
        self.candidates = tuple(Candidate(str(backend), round(share, 4), "") for backend, share in shares.items())
        self.steps.append(NOT_LOOKED_AT)
        return Reason.NEW_FLOW

    def _is_virtual(self) -> bool:
        """Whether the address is on the dummy device, where all other ports are refused."""
        return any(
            frontend.kind is not FrontendKind.NODE_PORT and frontend.at.address == self._to.address
            for port in self._inspection.services
            for frontend in port.frontends
        )

    def _explain_refused_port(self) -> Reason:
        self._add("frontend", "none", f"a Service's address, but none has port {self._to.port}")
        return Reason.UNKNOWN_PORT

    def _cluster_set(self, target: Target) -> BackendSet:
        """The set for clients that reach the endpoints of all nodes. With external policy Local the
        frontend's own virtual service has only local ones; the short circuit has those of the
        ClusterIP.
        """
        if target.frontend.cluster.size or not target.port.external_local:
            return target.frontend.cluster
        self._add("short circuit", "by a packet mark", "to a virtual service of its own")
        if self._client.origin is Origin.POD:
            self._add("pods", "depends on --detect-local-mode", "a pod that is not recognised gets the local set")
        sets = (frontend.cluster for frontend in target.port.frontends if frontend.cluster.size)
        return next(sets, EMPTY_SET)
