# SPDX-License-Identifier: Apache-2.0
"""What a cluster would look like if a zone or node were gone, a node drained, or Services had other
weights or another traffic distribution: the objects that Kubernetes' controllers would write. Which
endpoints then serve is decided by policy, as always.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from kbpf.errors import NotFoundError, closest_name
from kbpf.model.address import Addr, format_addr
from kbpf.model.events import ObjectKey
from kbpf.model.objects import (
    Endpoint,
    EndpointSlice,
    Node,
    Service,
    ServiceName,
    Weights,
)
from kbpf.policy.worlds import ModelObject, World, list_nodes

T = TypeVar("T")
Rules = tuple[tuple[T, int], ...]


class Distribution(StrEnum):
    """spec.trafficDistribution; NONE: no hints. PreferClose is the older name of PreferSameZone."""

    NONE = "none"
    PREFER_CLOSE = "PreferClose"
    SAME_ZONE = "PreferSameZone"
    SAME_NODE = "PreferSameNode"


class Scenario(NamedTuple):
    """What to assume. Weights and the distribution apply to `service` only, if there is one.
    `default_weight`: of endpoints without a rule; None: as it is.
    """

    zones_down: tuple[str, ...] = ()
    nodes_down: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    weights: Weights | None = None
    default_weight: int | None = None
    distribution: Distribution | None = None
    service: ServiceName | None = None


class Outcome(NamedTuple):
    """The world in that case, and why endpoints with these addresses get no connections."""

    world: dict[ObjectKey, ModelObject]
    causes: dict[bytes, str]


def apply_scenario(world: World, scenario: Scenario) -> Outcome:
    """Raises NotFoundError if the scenario names something that the world does not have."""
    _check_names(world, scenario)
    nodes = list_nodes(world)
    zone_of_node = {name: node.zone for name, node in nodes.items()}
    changed = dict(world)
    causes: dict[bytes, str] = {}
    for key, obj in world.items():
        match obj:
            case EndpointSlice():
                changed[key] = _change_slice(obj, scenario, zone_of_node, causes)
            case Service() if scenario.weights or scenario.default_weight is not None:
                if scenario.service in (None, obj.key):
                    changed[key] = _change_weights(obj, scenario, world)
            case Node() if obj.zone in scenario.zones_down or obj.name in scenario.nodes_down:
                del changed[key]
            case _:
                pass
    return Outcome(changed, causes)


def _change_slice(
    slice_: EndpointSlice,
    scenario: Scenario,
    zone_of_node: Mapping[str, str],
    causes: dict[bytes, str],
) -> EndpointSlice:
    is_selected = scenario.service in (None, slice_.service_name)
    endpoints = []
    for old in slice_.endpoints:
        endpoint = old
        if is_selected and scenario.distribution is not None:
            endpoint = _with_hints(endpoint, scenario.distribution)
        zone = endpoint.zone or zone_of_node.get(endpoint.node, "")
        if zone in scenario.zones_down or endpoint.node in scenario.nodes_down:
            is_zone = zone in scenario.zones_down
            causes[endpoint.address] = (
                f"zone {zone} is down" if is_zone else f"node {endpoint.node} is down"
            )
            endpoint = replace(endpoint, ready=False, serving=False)
        elif endpoint.node in scenario.drained and endpoint.ready:
            causes[endpoint.address] = f"node {endpoint.node} is drained"
            endpoint = replace(endpoint, ready=False, terminating=True)
        endpoints.append(endpoint)
    if all(new is old for new, old in zip(endpoints, slice_.endpoints, strict=True)):
        return slice_
    return replace(slice_, endpoints=tuple(endpoints))


def _with_hints(endpoint: Endpoint, distribution: Distribution) -> Endpoint:
    """The hints that the EndpointSlice controller sets (k8s.io/endpointslice/trafficdist)."""
    zones = (endpoint.zone,) if endpoint.zone else None
    nodes = (endpoint.node,) if endpoint.node else None
    if distribution is Distribution.NONE:
        zones = nodes = None
    elif distribution is not Distribution.SAME_NODE:
        nodes = None
    return replace(endpoint, zone_hints=zones, node_hints=nodes)


# ---- weights -------------------------------------------------------------------------------------


def _change_weights(service: Service, scenario: Scenario, world: World) -> Service:
    rules = scenario.weights or Weights()
    slices = (s for s in _slices(world) if s.service_name == service.key)
    if scenario.default_weight is None and not any(
        _matches(rules, endpoint, pod) for endpoint, pod in _endpoints(slices)
    ):
        return service
    old = service.weights or Weights()
    default = old.default if scenario.default_weight is None else scenario.default_weight
    merged = Weights(
        _merge(old.addresses, rules.addresses),
        _merge(old.pods, rules.pods),
        _merge(old.nodes, rules.nodes),
        _merge(old.zones, rules.zones),
        default,
    )
    return replace(service, weights=merged)


def _merge(old: "Rules[T]", new: "Rules[T]") -> "Rules[T]":
    return tuple({**dict(old), **dict(new)}.items())


def _matches(rules: Weights, endpoint: Endpoint, pod: str) -> bool:
    return (
        endpoint.address in dict(rules.addresses)
        or pod in dict(rules.pods)
        or endpoint.node in dict(rules.nodes)
        or endpoint.zone in dict(rules.zones)
    )


def _slices(world: World) -> Iterator[EndpointSlice]:
    return (obj for obj in world.values() if isinstance(obj, EndpointSlice))


def _endpoints(slices: Iterable[EndpointSlice]) -> Iterator[tuple[Endpoint, str]]:
    for slice_ in slices:
        yield from zip(slice_.endpoints, slice_.pods, strict=True)


# ---- names ---------------------------------------------------------------------------------------


def _check_names(world: World, scenario: Scenario) -> None:
    nodes = list_nodes(world)
    services = {obj.key for obj in world.values() if isinstance(obj, Service)}
    if scenario.service is not None and scenario.service not in services:
        _fail("Service", str(scenario.service), map(str, services))
    selected = (s for s in _slices(world) if scenario.service in (None, s.service_name))
    ends = list(_endpoints(selected))
    node_names = {*nodes, *(endpoint.node for endpoint, _ in ends)} - {""}
    zones = {*(n.zone for n in nodes.values()), *(endpoint.zone for endpoint, _ in ends)} - {""}
    rules = scenario.weights or Weights()
    named_nodes = (*scenario.nodes_down, *scenario.drained, *(name for name, _ in rules.nodes))
    for kind, wanted, known in (
        ("node", named_nodes, node_names),
        ("zone", (*scenario.zones_down, *(name for name, _ in rules.zones)), zones),
        ("endpoint of a Pod", [name for name, _ in rules.pods], {pod for _, pod in ends} - {""}),
    ):
        for name in wanted:
            if name not in known:
                _fail(kind, name, known)
    addresses: set[Addr] = {endpoint.address for endpoint, _ in ends}
    for address, _ in rules.addresses:
        if address not in addresses:
            _fail("endpoint", format_addr(address), ())


def _fail(kind: str, name: str, known: Iterable[str]) -> None:
    names = sorted(known)
    nearest = closest_name(name, names)
    shown = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
    hint = f"is {nearest} meant?" if nearest else f"there are {shown}" if names else ""
    raise NotFoundError(f"no {kind} {name}", "", hint)
