# SPDX-License-Identifier: Apache-2.0
"""Computes what the kernel should do: a pure function of Services, slices, Node and config.

DesiredStateBuilder updates it for what changed; the result is the same for any order and batching of
events.
"""

from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Sequence, Set
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec.structs import replace

from kbpf.model.address import Addr, family_of
from kbpf.model.config import Config, MapSizes
from kbpf.model.desired import DesiredState, Frontend, FrontendAddress, FrontendKind, ServicePortKey, ServiceState
from kbpf.model.events import Kind
from kbpf.model.objects import API_SERVER, Cidr, EndpointSlice, Node, Service, ServiceName, ServicePort
from kbpf.policy.admission import (
    NOT_IN_USE,
    InUse,
    ReservedAddresses,
    compute_reserved,
    find_device_frontends,
    is_left_to_node,
    is_on_device,
    refusal_reason,
)
from kbpf.policy.endpoints import EndpointExplanation, is_external_local, local_endpoint_addresses, select_endpoints
from kbpf.policy.frontends import (
    Claims,
    compute_frontends,
    local_networks,
    masquerade_addresses,
    node_port_addresses,
    restricts_clients,
    service_families,
    source_ranges,
)
from kbpf.policy.store import ChangeSet, ObjectStore


class AdmissionContext(NamedTuple):
    """What decides which frontends a Service may have, see admission.py. `node_port_addresses`:
    addresses that serve NodePorts. `node_port_ranges`: clients that may connect to these.
    """

    reserved: ReservedAddresses = ReservedAddresses()
    store: ObjectStore = ObjectStore("")
    node_port_addresses: frozenset[Addr] = frozenset()
    node_port_ranges: tuple[Cidr, ...] = ()


DEFAULT_CONFIG: Final = Config()

STEP_BUDGET: Final = 512
"""Endpoints and addresses that are computed in one step: about one millisecond of work."""

PORT_COST: Final = 8
"""Fixed cost of a Service port, in the unit of STEP_BUDGET."""


def compute_service_states(
    service: Service,
    slices: Sequence[EndpointSlice],
    node: Node,
    config: Config = DEFAULT_CONFIG,
    context: AdmissionContext = AdmissionContext(),  # noqa: B008 - a constant
) -> Iterator[ServiceState]:
    """Yields a state for each port and each family with a cluster IP, with the frontends that it
    requests and may have.

    If several ports have the same name and protocol, the last one is used. Kubernetes limits
    neither ports times endpoints nor ports times addresses: once a Service exceeds the largest
    maps, its remaining ports get an empty state.
    """
    ports = {(port.name, port.protocol): port for port in service.ports}.values()
    limits, backend_count, frontend_count = _service_limits(config.sizes), 0, 0
    for family in service_families(service):
        local_endpoints = local_endpoint_addresses(slices, node, family)
        # One tuple for all ports.
        family_slices = tuple(sorted((s for s in slices if s.family == family), key=lambda slice_: slice_.name))
        endpoint_count = sum(len(slice_.endpoints) for slice_ in family_slices)
        ranges: tuple[Cidr, ...] | None = None  # computed once for all ports, and only if needed
        for port in ports:
            # Upper bounds, known before anything is computed: every endpoint, and ClusterIP,
            # NodePort and all external addresses.
            backend_count += endpoint_count
            frontend_count += 2 + len(service.external_ips) + len(service.lb_vips)
            if backend_count > limits.backends or frontend_count > limits.frontends:
                yield _over_limit_state(service, port, family)
                continue
            selection = select_endpoints(slices, port, service, node, family)
            admitted, refused, left_to_node = _admit(service, port, family, context)
            # Before _restrict_node_port(): NodePorts have the node's ranges, not the Service's.
            is_restricted = any(frontend.restricted for frontend in admitted)
            node_port_ranges = _node_port_ranges(context, port, family)
            if node_port_ranges:
                admitted = tuple(map(_restrict_node_port, admitted))
            if is_restricted and ranges is None:
                ranges = source_ranges(service, node, family)
            yield ServiceState(
                key=_port_key(service, port, family),
                frontends=admitted,
                cluster=selection.cluster,
                local=selection.local,
                serving=selection.serving,
                internal_local=service.internal_local,
                external_local=is_external_local(service, port, family),
                affinity_timeout=service.affinity_timeout,
                any_endpoints=selection.any_endpoints,
                source_ranges=(ranges or ()) if is_restricted else (),
                algorithm=service.algorithm or config.algorithm,
                cluster_weights=selection.cluster_weights,
                local_weights=selection.local_weights,
                on_node=local_endpoints,
                refused=refused,
                left_to_node=left_to_node,
                node_port_ranges=node_port_ranges,
                created=service.creation_timestamp,
                slices=family_slices,
            )


def explain_port(
    service: Service, slices: Sequence[EndpointSlice], node: Node, config: Config, key: ServicePortKey
) -> tuple[EndpointExplanation, ...]:
    """Why each endpoint is in the sets of this port's state or not; () if it has no such port."""
    ports = {_port_key(service, port, key.family): port for port in service.ports}
    if key not in ports:
        return ()
    return select_endpoints(slices, ports[key], service, node, key.family).explain()


@lru_cache(maxsize=4)
def _service_limits(configured: MapSizes) -> MapSizes:
    # Never below the default sizes: with smaller maps the operator should see which map is full.
    defaults = MapSizes()
    return MapSizes(
        frontends=max(defaults.frontends, configured.frontends), backends=max(defaults.backends, configured.backends)
    )


def _port_key(service: Service, port: ServicePort, family: int) -> ServicePortKey:
    return ServicePortKey(service.namespace, service.name, port.name, port.protocol, family)


def _over_limit_state(service: Service, port: ServicePort, family: int) -> ServiceState:
    """The state of a port whose Service exceeds the limits of the maps."""
    cluster_ip = next(addr for addr in service.cluster_ips if family_of(addr) == family)
    what = "its Service's ports times endpoints or addresses exceed the limits of the maps"
    return ServiceState(
        _port_key(service, port, family),
        frontends=(),
        cluster=(),
        refused=((FrontendAddress(cluster_ip, port.port, port.protocol), what),),
        created=service.creation_timestamp,
    )


def _admit(
    service: Service, port: ServicePort, family: int, context: AdmissionContext
) -> tuple[tuple[Frontend, ...], tuple[tuple[FrontendAddress, str], ...], tuple[FrontendAddress, ...]]:
    """Splits the requested frontends into those that the port may have, those that it may not have,
    with the reason, and those that are left to the node.
    """
    requested = compute_frontends(service, port, family)
    left_to_node: tuple[FrontendAddress, ...] = ()
    if not context.reserved.local_addresses.isdisjoint(service.cluster_ips):
        left_to_node = tuple(f.at for f in requested if is_left_to_node(f, context.reserved))
        requested = tuple(
            replace(frontend, on_device=is_on_device(frontend, context.reserved))
            for frontend in requested
            if not is_left_to_node(frontend, context.reserved)
        )
    # The API server allocates ClusterIPs and NodePorts; only other addresses can be refused.
    if not service.external_ips and not service.lb_vips:
        return requested, (), left_to_node
    reasons = [
        refusal_reason(service, port, frontend, context.reserved, context.store)
        if frontend.kind in (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)
        else ""
        for frontend in requested
    ]
    pairs = list(zip(requested, reasons, strict=True))
    return (
        tuple(_mark_node_address(frontend, context.node_port_addresses) for frontend, reason in pairs if not reason),
        tuple((frontend.at, reason) for frontend, reason in pairs if reason),
        left_to_node,
    )


def _node_port_ranges(context: AdmissionContext, port: ServicePort, family: int) -> tuple[Cidr, ...]:
    """The clients of this family that may use the NodePort; none if every client may."""
    if not port.node_port:
        return ()
    ranges = tuple(r for r in context.node_port_ranges if family_of(r.address) == family)
    return ranges if restricts_clients(ranges, family) else ()


def _restrict_node_port(frontend: Frontend) -> Frontend:
    is_node_port = frontend.kind is FrontendKind.NODE_PORT
    return replace(frontend, restricted=True) if is_node_port else frontend


def _mark_node_address(frontend: Frontend, node_port_addresses: Collection[Addr]) -> Frontend:
    is_node_address = (
        frontend.kind in (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)
        and frontend.at.address in node_port_addresses
    )
    return replace(frontend, at_node=True) if is_node_address else frontend


class DesiredStateBuilder:
    """The desired state, updated incrementally. Use it from one thread only."""

    def __init__(self) -> None:
        self._services: dict[ServicePortKey, ServiceState] = {}
        self._unresolved: dict[ServicePortKey, ServiceState] = {}
        """States before they lost a frontend to another Service; only for those that did."""
        self._keys: dict[ServiceName, tuple[ServicePortKey, ...]] = {}
        self._claims = Claims()
        self.node_state = DesiredState({}, exempt_pods_known=False)
        """What does not depend on Services, without any."""
        self._context = AdmissionContext()
        self._external_ips: dict[ServiceName, tuple[Addr, ...]] = {}
        """Service with ExternalIPs or LoadBalancer addresses → its ExternalIPs."""
        self._services_by_external_ip: defaultdict[Addr, set[ServiceName]] = defaultdict(set)
        """ExternalIP → the Services that list it."""
        self._device_frontends: dict[ServiceName, frozenset[FrontendAddress]] = {}
        """See admission.find_device_frontends(); only Services that have any."""

    @property
    def state(self) -> DesiredState:
        """The complete state. It shares the live dict, which the next update() changes."""
        return replace(self.node_state, services=self._services)

    @property
    def reserved(self) -> ReservedAddresses:
        """The addresses reserved at the last update()."""
        return self._context.reserved

    @property
    def device_frontends(self) -> Collection[frozenset[FrontendAddress]]:
        """See admission.find_device_frontends(): a set for each Service."""
        return self._device_frontends.values()

    def update(
        self,
        store: ObjectStore,
        touched: ChangeSet,
        local_addresses: Collection[Addr],
        config: Config,
        in_use: InUse = NOT_IN_USE,
    ) -> set[ServicePortKey]:
        """Updates the state; returns the keys that were added, changed or removed.
        The cost is proportional to what changed, and to all Services if our Node changed.
        """
        names = self.begin_update(store, touched, local_addresses, config, in_use)
        changed: set[ServicePortKey] = set()
        for name in names:
            for keys in self.update_service_in_steps(name, store, config):
                changed |= keys
        return changed

    def begin_update(
        self,
        store: ObjectStore,
        touched: ChangeSet,
        local_addresses: Collection[Addr],
        config: Config,
        in_use: InUse = NOT_IN_USE,
    ) -> Set[ServiceName]:
        """Updates what does not depend on Services; returns the Services that must be computed
        again.
        """
        self.node_state = DesiredState(
            {},
            node_port_addresses(store.node, local_addresses, config),
            masquerade_addresses(store.node, local_addresses),
            local_networks(store.node, config),
            tuple(sorted(pod.uid for pod in store.pods if config.mesh_pods or not pod.mesh)),
            Kind.POD in store.synced,
            store.other_node_addresses,
        )
        reserved_addresses = compute_reserved(store.node, local_addresses, in_use, store.slices(API_SERVER), config)
        names: Set[ServiceName] = touched.services
        if touched.all_services:
            # `_keys` has those that were removed from the store.
            names = {*store.service_names(), *self._keys}
        elif reserved_addresses != self._context.reserved:
            # no other Services depend on them
            names = names | self._external_ips.keys() | self._device_frontends.keys()
        # ExternalIPs that became or ceased to be addresses of Pods, other Nodes or Services.
        for address in touched.addresses & self._services_by_external_ip.keys():
            names = {*names, *self._services_by_external_ip[address]}
        self._context = AdmissionContext(
            reserved_addresses, store, frozenset(self.node_state.node_addresses), config.node_port_source_ranges
        )
        return names

    def update_service_in_steps(
        self, name: ServiceName, store: ObjectStore, config: Config
    ) -> Generator[set[ServicePortKey], None, None]:
        """Updates one Service, some ports at a time; yields the keys that changed in each step.

        Between steps other Services may be updated, but not this one. Removed ports come last,
        because another port may claim their addresses.
        """
        service, slices, node = store.service(name), store.slices(name), store.node
        self._index_external_ips(name, service)
        self._index_device_frontends(name, service)
        # A dict as an ordered set: the keys are stored in the order of the ports.
        old_keys, new_keys = self._keys.get(name, ()), dict[ServicePortKey, None]()
        pending: dict[ServicePortKey, ServiceState] = {}
        cost, endpoints = 0, sum(len(slice_.endpoints) for slice_ in slices)
        if service is not None:
            for state in compute_service_states(service, slices, node, config, self._context):
                new_keys[state.key] = None
                pending[state.key] = state
                cost += endpoints + len(state.frontends) + len(state.refused) + PORT_COST
                if cost > STEP_BUDGET:
                    yield self._commit_states(pending, service.creation_timestamp)
                    pending, cost = {}, 0
            yield self._commit_states(pending, service.creation_timestamp)
        if new_keys:
            self._keys[name] = tuple(new_keys)
        else:
            self._keys.pop(name, None)
        removed_keys = [key for key in old_keys if key not in new_keys]
        for start in range(0, len(removed_keys), STEP_BUDGET // PORT_COST):
            yield self._remove_ports(removed_keys[start : start + STEP_BUDGET // PORT_COST])

    def _commit_states(self, states: dict[ServicePortKey, ServiceState], created: str) -> set[ServicePortKey]:
        """Stores these states (conflicts not yet resolved) and updates their claims."""
        affected: set[ServicePortKey] = set()
        # All claims are updated before any is resolved: a port may take an address over from
        # another one of the same step. `old` is unresolved: claims are made for what is requested.
        for key, state in states.items():
            old = self._unresolved_state(key).frontends if key in self._services else ()
            affected |= self._claims.update(key, created, old, state.frontends)
        changed = {key for key, state in states.items() if self._resolve(key, state)}
        return changed | self._resolve_again(affected - states.keys())

    def _remove_ports(self, keys: Collection[ServicePortKey]) -> set[ServicePortKey]:
        affected: set[ServicePortKey] = set()
        for key in keys:
            affected |= self._claims.update(key, "", self._unresolved_state(key).frontends, ())
        # Second, since other removed ports may be among `affected` until all claims are gone.
        for key in keys:
            del self._services[key]
            self._unresolved.pop(key, None)
        return {*keys, *self._resolve_again(affected - set(keys))}

    def _resolve_again(self, keys: Collection[ServicePortKey]) -> set[ServicePortKey]:
        """Resolves ports that may have won or lost an address. Ports that have claims but are not
        stored yet are skipped: _commit_states() resolves them itself.
        """
        computed = (key for key in keys if key in self._services)
        return {key for key in computed if self._resolve(key, self._unresolved_state(key))}

    def _index_external_ips(self, name: ServiceName, service: Service | None) -> None:
        for address in self._external_ips.pop(name, ()):
            self._services_by_external_ip[address].discard(name)
            if not self._services_by_external_ip[address]:
                del self._services_by_external_ip[address]
        if service is not None and (service.external_ips or service.lb_vips):
            # Stored even if it is empty: begin_update() needs the name.
            self._external_ips[name] = tuple(dict.fromkeys(service.external_ips))
            for address in self._external_ips[name]:
                self._services_by_external_ip[address].add(name)

    def _index_device_frontends(self, name: ServiceName, service: Service | None) -> None:
        local_addresses = self._context.reserved.local_addresses
        on_device = find_device_frontends(service, local_addresses) if service else frozenset()
        if on_device:
            self._device_frontends[name] = on_device
        else:
            self._device_frontends.pop(name, None)

    def _unresolved_state(self, key: ServicePortKey) -> ServiceState:
        return self._unresolved.get(key) or self._services[key]

    def _resolve(self, key: ServicePortKey, state: ServiceState) -> bool:
        """Stores the state without the frontends that it lost; returns whether that is a change.
        If it lost any, the unresolved state is kept too: it may win them later.
        """
        resolved = self._claims.resolve(state)
        # The same object, so nothing was lost.
        if resolved is state:
            self._unresolved.pop(key, None)
        else:
            self._unresolved[key] = state
        if resolved == self._services.get(key):
            return False
        self._services[key] = resolved
        return True
