"""What should be true in the kernel: a pure function of Services, slices, Node and config.

`desired_state()` computes it from all objects at once. `Desired` keeps it up to date by what was
touched, and ends in the same value whatever the order and the batches of the events were.
"""

from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Sequence,
    Set,
)
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec.structs import replace

from kbpf.model.address import Addr, family_of
from kbpf.model.config import Config, MapSizes, ServiceAnnotations
from kbpf.model.desired import (
    DesiredState,
    Frontend,
    FrontendAddress,
    FrontendKind,
    ServicePortKey,
    ServiceState,
)
from kbpf.model.events import Kind
from kbpf.model.objects import (
    API_SERVER,
    Cidr,
    EndpointSlice,
    Node,
    Pod,
    Service,
    ServiceName,
    ServicePort,
)
from kbpf.policy.admission import Reserved, Server, refusal, reserved
from kbpf.policy.endpoints import choose, external_local, on_node
from kbpf.policy.frontends import (
    Claims,
    families,
    frontends,
    local_networks,
    masquerade_addresses,
    node_port_addresses,
    restricted,
    source_ranges,
)
from kbpf.policy.store import Touched, World, pod_addresses


class Surroundings(NamedTuple):
    """What decides which frontends a Service may have: see admission.py. `node_ports`: addresses
    that serve NodePorts. `node_port_ranges`: who may dial these.
    """

    kept: Reserved = Reserved()
    has_pod: Callable[[Addr], bool] = lambda _: False
    has_node: Callable[[Addr], bool] = lambda _: False
    node_ports: frozenset[Addr] = frozenset()
    node_port_ranges: tuple[Cidr, ...] = ()


DEFAULTS: Final = Config()
NOTHING: Final = (None, None)

STEP: Final = 512
"""Endpoints and addresses that are computed at a time: about one millisecond."""

STEP_COST: Final = 8
"""What a Service port costs beside its endpoints and addresses, in as many of these."""


def _as_allowed(service: Service, annotations: ServiceAnnotations) -> Service:
    """The Service without the annotations that the operator has switched off."""
    if annotations is ServiceAnnotations.ALL or (service.algorithm, service.weights) == NOTHING:
        return service
    algorithm = service.algorithm if annotations is ServiceAnnotations.ALGORITHM else None
    return replace(service, algorithm=algorithm, weights=None)


def desired_service(
    service: Service,
    slices: Sequence[EndpointSlice],
    node: Node,
    config: Config = DEFAULTS,
    here: Surroundings = Surroundings(),  # noqa: B008 - a constant
) -> Iterator[ServiceState]:
    """One state per port and family that has a cluster IP, with every frontend that it asks for and
    may have. Of ports with the same name and protocol the last one counts. Once the ports would
    fill the largest maps, as nothing limits their product with endpoints and addresses, the others
    get nothing.
    """
    service = _as_allowed(service, config.service_annotations)
    ports = {(port.name, port.protocol): port for port in service.ports}.values()
    most, backends, asked_for = _most(config.sizes), 0, 0
    for family in families(service):
        addresses = on_node(slices, node, family)
        endpoints = sum(len(piece.endpoints) for piece in slices if piece.family == family)
        ranges: tuple[Cidr, ...] | None = None
        for port in ports:
            backends += endpoints
            asked_for += 2 + len(service.external_ips) + len(service.lb_vips)
            if backends > most.backends or asked_for > most.frontends:
                yield _left_out(service, port, family)
                continue
            chosen = choose(slices, port, service, node, family)
            asked, refused = _admitted(service, port, family, here)
            limited = any(frontend.restricted for frontend in asked)
            at_node = _node_port_ranges(here.node_port_ranges, family) if port.node_port else ()
            if at_node:
                asked = tuple(map(_restricted_node_port, asked))
            if limited and ranges is None:
                ranges = source_ranges(service, node, family)
            yield ServiceState(
                key=ServicePortKey(
                    service.namespace, service.name, port.name, port.protocol, family
                ),
                frontends=asked,
                cluster=chosen.cluster,
                local=chosen.local,
                serving=chosen.serving,
                internal_local=service.internal_local,
                external_local=external_local(service, port, family),
                affinity_timeout=service.affinity_timeout,
                any_endpoints=chosen.any_endpoints,
                source_ranges=(ranges or ()) if limited else (),
                algorithm=service.algorithm or config.algorithm,
                cluster_weights=chosen.cluster_weights,
                local_weights=chosen.local_weights,
                on_node=addresses,
                refused=refused,
                node_port_ranges=at_node,
                created=service.created,
            )


@lru_cache(maxsize=4)
def _most(own: MapSizes) -> MapSizes:
    """What one Service may ask for. An operator with smaller maps is told which of them is full."""
    usual = MapSizes()
    return MapSizes(
        frontends=max(usual.frontends, own.frontends), backends=max(usual.backends, own.backends)
    )


def _left_out(service: Service, port: ServicePort, family: int) -> ServiceState:
    """A port of a Service that asks for more than the maps may ever hold."""
    own = next(addr for addr in service.cluster_ips if family_of(addr) == family)
    what = "its Service has more ports, times endpoints or addresses, than the maps may hold"
    return ServiceState(
        ServicePortKey(service.namespace, service.name, port.name, port.protocol, family),
        frontends=(),
        cluster=(),
        refused=((FrontendAddress(own, port.port, port.protocol), what),),
        created=service.created,
    )


def _admitted(
    service: Service, port: ServicePort, family: int, here: Surroundings
) -> tuple[tuple[Frontend, ...], tuple[tuple[FrontendAddress, str], ...]]:
    """The frontends that the port may have, and those that it may not, with the reasons."""
    asked = frontends(service, port, family)
    if not service.external_ips and not service.lb_vips:
        return asked, ()
    reasons = [
        refusal(service, port, each, here.kept, here.has_pod, here.has_node)
        if each.kind in (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)
        else ""
        for each in asked
    ]
    pairs = list(zip(asked, reasons, strict=True))
    return (
        tuple(_placed(each, here.node_ports) for each, reason in pairs if not reason),
        tuple((each.at, reason) for each, reason in pairs if reason),
    )


def _node_port_ranges(ranges: Iterable[Cidr], family: int) -> tuple[Cidr, ...]:
    """Those of the family; none where they keep nobody away."""
    ours = tuple(cidr for cidr in ranges if family_of(cidr.address) == family)
    return ours if restricted(ours, family) else ()


def _restricted_node_port(frontend: Frontend) -> Frontend:
    is_node_port = frontend.kind is FrontendKind.NODE_PORT
    return replace(frontend, restricted=True) if is_node_port else frontend


def _placed(frontend: Frontend, node_ports: Collection[Addr]) -> Frontend:
    at_node = (
        frontend.kind in (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)
        and frontend.at.address in node_ports
    )
    return replace(frontend, at_node=True) if at_node else frontend


def desired_state(
    services: Iterable[Service],
    slices: Iterable[EndpointSlice],
    node: Node,
    local_addresses: Collection[Addr],
    config: Config,
    pods: Iterable[Pod] | None = (),
    servers: Iterable[Server] = (),
    listening: Collection[FrontendAddress] = (),
    other_nodes: Iterable[Node] = (),
) -> DesiredState:
    """Everything at once, conflicts resolved. `pods` are those that are exempt; None: not known.
    `servers` and `listening`: see admission.reserved().
    """
    by_service: defaultdict[ServiceName, list[EndpointSlice]] = defaultdict(list)
    with_pods: set[Addr] = set()
    for piece in slices:
        by_service[piece.service_name].append(piece)
        with_pods |= pod_addresses(piece)
    node_ports = node_port_addresses(node, local_addresses, config)
    own = by_service.get(API_SERVER, ())
    kept = reserved(node, local_addresses, servers, listening, own, config)
    ranges = config.node_port_source_ranges
    with_nodes = {address for other in other_nodes for address in other.addresses}
    here = Surroundings(
        kept, with_pods.__contains__, with_nodes.__contains__, frozenset(node_ports), ranges
    )
    claims = Claims()
    states: list[ServiceState] = []
    for service in services:
        pieces = by_service.get(service.key, ())
        for state in desired_service(service, pieces, node, config, here):
            claims.put(state.key, service.created, (), state.frontends)
            states.append(state)
    return DesiredState(
        services={state.key: claims.settle(state) for state in states},
        node_addresses=node_ports,
        masquerade_as=masquerade_addresses(node, local_addresses),
        local_networks=local_networks(node, config),
        exempt_pods=_uids(pods or ()),
        pods_known=pods is not None,
    )


def _uids(pods: Iterable[Pod]) -> tuple[str, ...]:
    return tuple(sorted(pod.uid for pod in pods))


class Desired:
    """The desired state, kept by what was touched. One thread only."""

    def __init__(self) -> None:
        self._services: dict[ServicePortKey, ServiceState] = {}
        self._contested: dict[ServicePortKey, ServiceState] = {}
        """What a state was before it lost a frontend; nothing for those that lost none."""
        self._keys: dict[ServiceName, tuple[ServicePortKey, ...]] = {}
        self._claims = Claims()
        self._node_addresses: tuple[Addr, ...] = ()
        self._masquerade_as: tuple[Addr, ...] = ()
        self._local_networks: tuple[Cidr, ...] = ()
        self._exempt_pods: tuple[str, ...] = ()
        self._pods_known = False
        self._here = Surroundings()
        self._asking: dict[ServiceName, tuple[Addr, ...]] = {}
        """Services with ExternalIPs or LoadBalancer addresses, and the former."""
        self._asked: defaultdict[Addr, set[ServiceName]] = defaultdict(set)
        """ExternalIPs, and the Services that list them."""

    @property
    def state(self) -> DesiredState:
        """The whole, sharing the live dict: the next update() changes it."""
        return DesiredState(self._services, *self.node)

    @property
    def reserved(self) -> Reserved:
        """What is not for Services, as of the last update()."""
        return self._here.kept

    def state_of(self, key: ServicePortKey) -> ServiceState | None:
        """The state of one Service port."""
        return self._services.get(key)

    @property
    def node(
        self,
    ) -> tuple[tuple[Addr, ...], tuple[Addr, ...], tuple[Cidr, ...], tuple[str, ...], bool]:
        """What of it no Service decides: all but its first field, in their order."""
        return (
            self._node_addresses,
            self._masquerade_as,
            self._local_networks,
            self._exempt_pods,
            self._pods_known,
        )

    def update(
        self,
        world: World,
        touched: Touched,
        local_addresses: Collection[Addr],
        config: Config,
        servers: Iterable[Server] = (),
        listening: Collection[FrontendAddress] = (),
    ) -> set[ServicePortKey]:
        """Bring the state up to date; returns the keys whose state changed, came or went.
        `servers` and `listening`: see admission.reserved().

        Costs what was touched, and no more than all Services when our Node changed.
        """
        names = self.touch(world, touched, local_addresses, config, servers, listening)
        changed: set[ServicePortKey] = set()
        for name in names:
            for keys in self.steps(name, world, config):
                changed |= keys
        return changed

    def touch(
        self,
        world: World,
        touched: Touched,
        local_addresses: Collection[Addr],
        config: Config,
        servers: Iterable[Server] = (),
        listening: Collection[FrontendAddress] = (),
    ) -> Set[ServiceName]:
        """Brings up to date what no Service decides; which Services have to be computed again."""
        self._node_addresses = node_port_addresses(world.node, local_addresses, config)
        self._masquerade_as = masquerade_addresses(world.node, local_addresses)
        self._local_networks = local_networks(world.node, config)
        self._exempt_pods = _uids(world.pods)
        self._pods_known = Kind.POD in world.synced
        api_slices = world.slices(API_SERVER)
        kept = reserved(world.node, local_addresses, servers, listening, api_slices, config)
        names: Set[ServiceName] = touched.services
        if touched.everything:
            names = {*world.names(), *self._keys}
        elif kept != self._here.kept:
            names = names | self._asking.keys()
        for address in touched.addresses & self._asked.keys():
            names = {*names, *self._asked[address]}
        ranges = config.node_port_source_ranges
        self._here = Surroundings(
            kept, world.has_pod, world.has_node, frozenset(self._node_addresses), ranges
        )
        return names

    def steps(
        self, name: ServiceName, world: World, config: Config
    ) -> Generator[set[ServicePortKey], None, None]:
        """Brings one Service up to date, some ports at a time: yields the keys whose state changed
        since it was resumed. Other Services may be brought up to date meanwhile, not this one. A
        port that is gone goes last, since another one may take its addresses.
        """
        service, slices, node = world.service(name), world.slices(name), world.node
        self._note_addresses(name, service)
        before, now = self._keys.get(name, ()), dict[ServicePortKey, None]()
        pending: dict[ServicePortKey, ServiceState] = {}
        cost, endpoints = 0, sum(len(piece.endpoints) for piece in slices)
        if service is not None:
            for state in desired_service(service, slices, node, config, self._here):
                now[state.key] = None
                pending[state.key] = state
                cost += endpoints + len(state.frontends) + len(state.refused) + STEP_COST
                if cost > STEP:
                    yield self._commit(pending, service.created)
                    pending, cost = {}, 0
            yield self._commit(pending, service.created)
        if now:
            self._keys[name] = tuple(now)
        else:
            self._keys.pop(name, None)
        gone = [key for key in before if key not in now]
        for start in range(0, len(gone), STEP // STEP_COST):
            yield self._drop(gone[start : start + STEP // STEP_COST])

    def _commit(
        self, fresh: dict[ServicePortKey, ServiceState], created: str
    ) -> set[ServicePortKey]:
        """These states before conflicts; their claims are renewed."""
        others: set[ServicePortKey] = set()
        for key, state in fresh.items():
            old = self._before(key).frontends if key in self._services else ()
            others |= self._claims.put(key, created, old, state.frontends)
        changed = {key for key, state in fresh.items() if self._settle(key, state)}
        return changed | self._resettle(others - fresh.keys())

    def _drop(self, gone: Collection[ServicePortKey]) -> set[ServicePortKey]:
        others: set[ServicePortKey] = set()
        for key in gone:
            others |= self._claims.put(key, "", self._before(key).frontends, ())
        for key in gone:
            del self._services[key]
            self._contested.pop(key, None)
        return {*gone, *self._resettle(others - set(gone))}

    def _resettle(self, keys: Collection[ServicePortKey]) -> set[ServicePortKey]:
        """Service ports that may have won or lost an address; one that is not computed yet has
        claims already.
        """
        known = (key for key in keys if key in self._services)
        return {key for key in known if self._settle(key, self._before(key))}

    def _note_addresses(self, name: ServiceName, service: Service | None) -> None:
        for address in self._asking.pop(name, ()):
            self._asked[address].discard(name)
            if not self._asked[address]:
                del self._asked[address]
        if service is not None and (service.external_ips or service.lb_vips):
            self._asking[name] = tuple(dict.fromkeys(service.external_ips))
            for address in self._asking[name]:
                self._asked[address].add(name)

    def _before(self, key: ServicePortKey) -> ServiceState:
        return self._contested.get(key) or self._services[key]

    def _settle(self, key: ServicePortKey, state: ServiceState) -> bool:
        settled = self._claims.settle(state)
        if settled is state:
            self._contested.pop(key, None)
        else:
            self._contested[key] = state
        if settled == self._services.get(key):
            return False
        self._services[key] = settled
        return True
