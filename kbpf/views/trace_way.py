# SPDX-License-Identifier: Apache-2.0
"""What happens to the packets of a connection once its backend is chosen: which source they have,
how they leave this node, and how the replies come back (tc/begin.h, tc/hop.h).
"""

from collections.abc import Iterable, Mapping
from typing import Final

from kbpf.model.address import Addr, family_of, format_addr, parse_addr
from kbpf.model.desired import Backend, FrontendKind
from kbpf.model.inspection import DeviceEntry, FrontendEntry, Inspection, Route, ServicePort
from kbpf.views.trace_page import Candidate, Client, NodeFacts, Origin, Step

ANY_CLIENT: Final = {4: parse_addr("192.0.2.171"), 6: parse_addr("2001:db8::6b62:7066")}
"""Documentation addresses (RFC 5737, RFC 3849), for clients outside whose address is not given."""
MAX_ROUTES: Final = 64
"""More backends than these are not looked up one by one."""
NOT_LOOKED_AT: Final = Step(
    "not looked at", "NetworkPolicies and other rules of netfilter", "nor the network beyond this node, nor the backend"
)


class Way:
    """The packets of one connection. Collects the decisions in `steps`."""

    def __init__(
        self,
        inspection: Inspection,
        client: Client,
        facts: NodeFacts,
        frontend: FrontendEntry,
        port: ServicePort,
        by_socket: bool,
    ) -> None:
        self._inspection, self._client, self._facts = inspection, client, facts
        self._frontend, self._port, self._by_socket = frontend, port, by_socket
        self._family = port.key.family if port.key else family_of(frontend.at.address)
        self._address = client.address(self._family)
        self._is_on_host = client.is_on_host(inspection.host_netns)
        self._client_route = self._find_client_route()
        self.steps: list[Step] = []

    def build_candidates(self, shares: Mapping[Backend, float]) -> tuple[Candidate, ...]:
        """The candidates with their source and next hop; adds the steps that all have in common."""
        sources = {backend: self._source_of(backend) for backend in shares}
        self._explain_sources(sources)
        routes = self._find_routes(sources)
        if self._facts.find_route is not None:
            self._explain_way(sources, routes)
        nothing = Route()
        return tuple(
            Candidate(str(backend), round(share, 4), sources[backend][0], _format_hop(route), route.error)
            for backend, share in shares.items()
            for route in [routes.get(backend, nothing)]
        )

    # ---- the source ------------------------------------------------------------------------------

    def _source_of(self, backend: Backend) -> tuple[str, str]:
        """Which source the backend sees, and why: masquerades() of tc/begin.h, and tc_route."""
        address, inspection = self._address, self._inspection
        if self._by_socket:
            return "client", "no packet is translated"
        if self._is_on_host:
            return "client", "this node's own: that of the device towards the backend"
        if address is not None and address == backend.address:
            return "node", "it is its own backend, and would reply to itself"
        masqueraded, why = self._is_masqueraded()
        is_own = backend.address in inspection.node_port_addresses or backend.address in inspection.node.addresses
        if masqueraded and is_own:
            return "client", "the backend is in this node's own network"
        if not masqueraded and self._is_on_clients_bridge(backend):
            return "node", "client and backend are on one bridge, which would bypass this node"
        return ("node" if masqueraded else "client"), why

    def _is_masqueraded(self) -> tuple[bool, str]:
        """masquerades() of tc/begin.h, for a backend other than the client itself."""
        node = self._inspection.node
        if self._frontend.kind is not FrontendKind.CLUSTER_IP:
            if self._port.external_local:
                return False, "externalTrafficPolicy Local"
            return True, "so that replies come back to this node"
        if node.masquerades_all:
            return True, "--masquerade-all"
        if not node.pods:
            return False, "kbpf does not tell pods from other clients here"
        if node.pods == "networks":
            address = self._address
            is_pod = address is not None and any(
                network.contains(address) for network in self._inspection.local_networks
            )
        else:
            is_pod = self._client.origin is Origin.POD
        return not is_pod, "a pod of this node" if is_pod else "the client is no pod of this node"

    def _explain_sources(self, sources: Mapping[Backend, tuple[str, str]]) -> None:
        """A step for each of the sources that backends see."""
        for source, why in dict.fromkeys(sources.values()):
            result = "an address of this node" if source == "node" else "the client's own"
            same = [str(backend) for backend, other in sources.items() if other == (source, why)]
            if len(same) < len(sources):
                result += f" for {len(same)} of {len(sources)} backends"
                result += f", {same[0]}{', ...' if len(same) > 1 else ''}"
            self.steps.append(Step("source", result, why))

    # ---- the way ---------------------------------------------------------------------------------

    def _find_client_route(self) -> Route | None:
        """The route to the client: its packets arrive on that device. None if that is not known,
        and for this node itself.
        """
        address = self._sender
        if self._facts.find_route is None or address is None or self._is_on_host:
            return None
        route = self._facts.find_route(address, None, 0)
        return None if route.error or route.is_local else route

    @property
    def _sender(self) -> Addr | None:
        """The client's address, or that of any client outside."""
        if self._client.origin is Origin.OUTSIDE and self._address is None:
            return ANY_CLIENT[self._family]
        return self._address

    def _find_routes(self, backends: Iterable[Backend]) -> dict[Backend, Route]:
        """The route to each backend, from the device on which the client's packets arrive."""
        find, arrival = self._facts.find_route, self._client_route
        if find is None:
            return {}
        # The stack sees packets after DNAT and before SNAT.
        source, ifindex = (self._sender, arrival.ifindex) if arrival is not None else (None, 0)
        return {backend: find(backend.address, source, ifindex) for backend in list(backends)[:MAX_ROUTES]}

    def _device_of(self, route: Route | None) -> DeviceEntry | None:
        return self._inspection.devices.get(route.ifindex) if route is not None else None

    def _is_on_clients_bridge(self, backend: Backend) -> bool:
        if self._facts.find_route is None:
            return False
        client_route = self._client_route
        device = self._device_of(client_route)
        if client_route is None or device is None or device.role != "pod" or device.peer:
            return False
        return self._facts.find_route(backend.address, None, 0).ifindex == client_route.ifindex

    def _bypasses_stack(self, source: str, route: Route) -> bool:
        """bypasses_stack() of tc/begin.h."""
        node = self._inspection.node
        came_by, leaves_by = self._device_of(self._client_route), self._device_of(route)
        if self._by_socket or came_by is None or leaves_by is None:
            return False
        if came_by.tunnel or leaves_by.tunnel:
            return False
        is_through = came_by.role == leaves_by.role == "host"
        return node.forwarding == "direct" or (source == "node" and is_through)

    def _explain_way(self, sources: Mapping[Backend, tuple[str, str]], routes: Mapping[Backend, Route]) -> None:
        usable = {backend: route for backend, route in routes.items() if not route.error}
        if lost := len(routes) - len(usable):
            reason = next(route.error for route in routes.values() if route.error)
            self._add("route", f"none to {lost} of {len(routes)} backends", reason)
        direct = [b for b, route in usable.items() if self._bypasses_stack(sources[b][0], route)]
        uses_stack = len(direct) < len(usable)
        if direct:
            why = "past routing and netfilter"
            if uses_stack:
                why += f": to {len(direct)} of {len(usable)} backends"
            self._add("path", "from device to device", why)
        if uses_stack:
            self._add("path", *self._describe_stack())
        self._explain_reply(sources)
        forwarded = [backend for backend, route in usable.items() if not route.is_local]
        if uses_stack and forwarded and not self._is_on_host:
            is_masqueraded = all(sources[backend][0] == "node" for backend in forwarded)
            facts = self._facts
            self.steps += facts.masqueraded if is_masqueraded else facts.forwarded
        is_external = self._frontend.kind is not FrontendKind.CLUSTER_IP
        if not self._by_socket and is_external and self._client.origin is Origin.OUTSIDE:
            self.steps += self._facts.before_dnat
        self.steps.append(NOT_LOOKED_AT)

    def _describe_stack(self) -> tuple[str, str]:
        if self._is_on_host and self._by_socket:
            return "an ordinary connection of this node", "routing and OUTPUT see the backend"
        if self._is_on_host:
            return "from device to device", "tc_egress sends it by the device to the backend"
        if self._by_socket:
            return "an ordinary connection of the pod", "routing and FORWARD see the backend"
        if self._inspection.node.forwarding == "netfilter":
            return "this node's stack", "conntrack translates; routing and FORWARD see the backend"
        return "this node's stack", "after DNAT: routing and FORWARD see client and backend"

    def _explain_reply(self, sources: Mapping[Backend, tuple[str, str]]) -> None:
        if self._by_socket:
            self._add("reply", "straight to the client", "getpeername() shows the address that it dialled")
            return
        if any(source == "node" for source, _ in sources.values()):
            self._add(
                "reply", "to this node, which sends it on to the client", "with the address that the client dialled"
            )
        if all(source == "node" for source, _ in sources.values()):
            return
        if self._is_on_host or self._client.origin is Origin.POD:
            self._add("reply", "to the client, through this node", "where it gets the address that the client dialled")
            return
        self._add(
            "reply",
            "to the client's address",
            "it must pass this node, which gives it the address that the client dialled; "
            "a backend elsewhere may reply past it",
        )

    def _add(self, step: str, result: str, why: str = "") -> None:
        self.steps.append(Step(step, result, why))


def _format_hop(route: Route) -> str:
    if route.is_local:
        return "this node"
    return f"{route.device} via {format_addr(route.gateway)}" if route.gateway else route.device
