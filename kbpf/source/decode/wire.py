# SPDX-License-Identifier: Apache-2.0
"""Services, EndpointSlices, Nodes and Pods as in JSON, with only the fields that kbpf uses.

Whatever may be null or missing is optional here and gets its default in decode.py. msgspec skips
fields that are not listed without building them. `gc=False`: objects that cannot form cycles need
not be tracked by the garbage collector. Only this module uses Kubernetes' spelling of names.
"""

import threading
from typing import Final

import msgspec

MAX_PAGE_ITEMS: Final = 200_000
"""In one page. kbpf requests 500, but a server may send everything."""

_ACRONYMS = {"ip": "IP", "ips": "IPs", "cidrs": "CIDRs", "cidr": "CIDR"}


def json_name(name: str) -> str:
    """Returns the name as Kubernetes spells it: ``cluster_ips`` → ``clusterIPs``."""
    first, *rest = name.split("_")
    return first + "".join(_ACRONYMS.get(part, part.capitalize()) for part in rest)


class WireStruct(msgspec.Struct, frozen=True, gc=False, rename=json_name):
    """The base of all; a subclass has to repeat `frozen`."""


_LABEL_NAMES: Final = {
    "service_name": "kubernetes.io/service-name",
    "headless": "service.kubernetes.io/headless",
    "proxy_name": "service.kubernetes.io/service-proxy-name",
    "zone": "topology.kubernetes.io/zone",
}


class Labels(WireStruct, frozen=True, rename=_LABEL_NAMES):
    """The four labels that kbpf reads. A label with an empty value is "", a missing one None."""

    service_name: str | None = None
    headless: str | None = None
    proxy_name: str | None = None
    zone: str | None = None


class ServiceLabels(
    Labels,
    frozen=True,
    rename=_LABEL_NAMES
    | {
        "app_name": "app.kubernetes.io/name",
        "linkerd_component": "linkerd.io/control-plane-component",
    },
):
    """Also the labels of the Services of meshes (`find_control_plane()` in decode.py)."""

    app: str | None = None
    app_name: str | None = None
    component: str | None = None
    linkerd_component: str | None = None


class PartialObjectMeta(WireStruct, frozen=True):
    """metadata: what identifies an object, of which nothing else may be decodable."""

    name: str = ""
    namespace: str | None = None
    resource_version: str | None = None


class ObjectMeta(PartialObjectMeta, frozen=True):
    """metadata."""

    uid: str | None = None
    creation_timestamp: str | None = None
    labels: Labels | None = None


class Annotations(
    WireStruct,
    frozen=True,
    rename={"algorithm": "kbpf.io/algorithm", "weights": "kbpf.io/weights"},
):
    """The annotations of a Service that kbpf reads."""

    algorithm: str | None = None
    weights: str | None = None


class ServiceMeta(ObjectMeta, frozen=True):
    """metadata of a Service."""

    labels: ServiceLabels | None = None
    annotations: Annotations | None = None


class SliceAnnotations(
    WireStruct,
    frozen=True,
    rename={"triggered": "endpoints.kubernetes.io/last-change-trigger-time"},
):
    """The annotation of an EndpointSlice that kbpf reads."""

    triggered: str | None = None


class SliceMeta(ObjectMeta, frozen=True):
    """metadata of an EndpointSlice."""

    annotations: SliceAnnotations | None = None


class PartialObject(WireStruct, frozen=True):
    """Any object: enough to identify it."""

    metadata: PartialObjectMeta


class ServicePort(WireStruct, frozen=True):
    """spec.ports[] of a Service."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None
    node_port: int | None = None


class ClientIPConfig(WireStruct, frozen=True):
    """spec.sessionAffinityConfig.clientIP."""

    timeout_seconds: int | None = None


class SessionAffinityConfig(WireStruct, frozen=True):
    """spec.sessionAffinityConfig."""

    client_ip: ClientIPConfig | None = None


class ServiceSpec(WireStruct, frozen=True):
    """spec of a Service."""

    type: str | None = None
    cluster_ip: str | None = None
    cluster_ips: tuple[str, ...] | None = None
    ports: tuple[ServicePort, ...] | None = None
    external_ips: tuple[str, ...] | None = None
    load_balancer_source_ranges: tuple[str, ...] | None = None
    external_traffic_policy: str | None = None
    internal_traffic_policy: str | None = None
    session_affinity: str | None = None
    session_affinity_config: SessionAffinityConfig | None = None
    health_check_node_port: int | None = None


class LoadBalancerIngress(WireStruct, frozen=True):
    """status.loadBalancer.ingress[]."""

    ip: str | None = None
    ip_mode: str | None = None


class LoadBalancerStatus(WireStruct, frozen=True):
    """status.loadBalancer."""

    ingress: tuple[LoadBalancerIngress, ...] | None = None


class ServiceStatus(WireStruct, frozen=True):
    """status of a Service."""

    load_balancer: LoadBalancerStatus | None = None


class Service(WireStruct, frozen=True):
    metadata: ServiceMeta
    spec: ServiceSpec | None = None
    status: ServiceStatus | None = None


class EndpointConditions(WireStruct, frozen=True):
    """endpoints[].conditions."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class EndpointHint(WireStruct, frozen=True):
    """endpoints[].hints.forZones[] and forNodes[]."""

    name: str


class EndpointHints(WireStruct, frozen=True):
    """endpoints[].hints."""

    for_zones: tuple[EndpointHint, ...] | None = None
    for_nodes: tuple[EndpointHint, ...] | None = None


class TargetRef(WireStruct, frozen=True):
    """endpoints[].targetRef."""

    kind: str | None = None
    name: str | None = None


class Endpoint(WireStruct, frozen=True):
    """endpoints[] of an EndpointSlice."""

    addresses: tuple[str, ...] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    zone: str | None = None
    hints: EndpointHints | None = None
    target_ref: TargetRef | None = None


class SlicePort(WireStruct, frozen=True):
    """ports[] of an EndpointSlice."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class EndpointSlice(WireStruct, frozen=True):
    """An EndpointSlice, discovery.k8s.io/v1."""

    metadata: SliceMeta
    address_type: str | None = None
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


class NodeAddress(WireStruct, frozen=True):
    """status.addresses[]."""

    type: str = ""
    address: str = ""


class Taint(WireStruct, frozen=True):
    """spec.taints[] of a Node."""

    key: str | None = None


class NodeSpec(WireStruct, frozen=True):
    """spec of a Node: its pod networks and taints."""

    pod_cidr: str | None = None
    pod_cidrs: tuple[str, ...] | None = None
    taints: tuple[Taint, ...] | None = None


class NodeMeta(ObjectMeta, frozen=True):
    """metadata of a Node."""

    deletion_timestamp: str | None = None


class NodeStatus(WireStruct, frozen=True):
    """status of a Node."""

    addresses: tuple[NodeAddress, ...] | None = None


class Node(WireStruct, frozen=True):
    metadata: NodeMeta
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class PodLabels(WireStruct, frozen=True, rename={"socket_lb": "kbpf.io/socket-lb"}):
    """The label of a Pod that kbpf reads."""

    socket_lb: str | None = None


class PodAnnotations(
    WireStruct,
    frozen=True,
    rename={
        "istio_sidecar": "sidecar.istio.io/status",
        "istio_ambient": "ambient.istio.io/redirection",
        "linkerd": "linkerd.io/proxy-version",
        "consul": "consul.hashicorp.com/transparent-proxy-status",
        "kmesh": "kmesh.net/redirection",
    },
):
    """The annotations of service meshes that redirect a Pod's traffic."""

    istio_sidecar: str | None = None
    istio_ambient: str | None = None
    linkerd: str | None = None
    consul: str | None = None
    kmesh: str | None = None


class PodMeta(PartialObjectMeta, frozen=True):
    """metadata of a Pod."""

    uid: str | None = None
    labels: PodLabels | None = None
    annotations: PodAnnotations | None = None


class PodSpec(WireStruct, frozen=True):
    """spec of a Pod: its node."""

    node_name: str | None = None


class Pod(WireStruct, frozen=True):
    metadata: PodMeta
    spec: PodSpec | None = None


class ListMeta(
    msgspec.Struct,
    frozen=True,
    rename={
        "continue_": "continue",
        "resource_version": "resourceVersion",
        "remaining": "remainingItemCount",
    },
):
    """metadata of a list: its resourceVersion, the token of the next page, and the number of
    objects after this page.
    """

    resource_version: str | None = None
    continue_: str | None = None
    remaining: int | None = None


class ListPage(WireStruct, frozen=True):
    """A page of a LIST. Items stay undecoded, so that one malformed object harms only itself."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


# How many items the page may still have; by thread, since several watches list at the same time.
_item_budget = threading.local()


class CountedItem(WireStruct, frozen=True):
    """An item of a list, counted and discarded. Raises ValueError if a page has too many, which
    msgspec reports as ValidationError.
    """

    def __post_init__(self) -> None:
        _item_budget.remaining -= 1
        if _item_budget.remaining < 0:
            raise ValueError(f"more than {MAX_PAGE_ITEMS} items in a page")


class CountedPage(WireStruct, frozen=True):
    """A page of a LIST, decoded only to count its items."""

    items: list[CountedItem] | None = None


def check_items(body: bytes | bytearray) -> None:
    """Raises ValidationError if the page has too many items, or one that is not an object. Items
    are counted before they are decoded: the smallest one, `{}` and a comma, is three bytes, and its
    Raw takes forty times as much memory.
    """
    _item_budget.remaining = MAX_PAGE_ITEMS
    _COUNTING_DECODER.decode(body)


_COUNTING_DECODER: Final = msgspec.json.Decoder(CountedPage)


class WatchEvent(WireStruct, frozen=True):
    """One line of a WATCH. `type` decides what `object` is."""

    type: str
    object: msgspec.Raw


class BookmarkAnnotations(WireStruct, frozen=True, rename={"end": "k8s.io/initial-events-end"}):
    """annotations of a BOOKMARK."""

    end: str | None = None


class BookmarkMeta(WireStruct, frozen=True):
    """metadata of a BOOKMARK's object."""

    resource_version: str
    annotations: BookmarkAnnotations | None = None


class Bookmark(WireStruct, frozen=True):
    """The object of a BOOKMARK line."""

    metadata: BookmarkMeta


class ApiStatus(WireStruct, frozen=True):
    """The Status of an error: the object of an ERROR line, or the body of a response."""

    code: int | None = None
    message: str | None = None
    reason: str | None = None
