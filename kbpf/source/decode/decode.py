# SPDX-License-Identifier: Apache-2.0
"""Decodes wire objects into model objects: the fields that kube-proxy reads, validated, with
defaults.

The rules are those of serviceport.go and endpointslicecache.go; where kube-proxy relies on the API
server's validation, the checks are made here.

- `None` means that kube-proxy skips the object: for kbpf it does not exist.
- A name that the API server would reject invalidates the whole object: names are stored in map
  fields of their maximum length, and printed.
- A malformed Service raises one ObjectError that names the field, and none of it is used: half of
  a Service (without a source range, or a port) could be worse than its previous state.
- In an EndpointSlice a malformed endpoint or port is left out, with a line in `skipped`; likewise
  in a Node, and an invalid annotation of a Service. A field of the wrong JSON type invalidates the
  whole object, as in an API server.
"""

import re
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import lru_cache
from sys import intern
from typing import Any, Final, NamedTuple

import msgspec

from kbpf.errors import ObjectError
from kbpf.model.address import V4_PREFIX, Addr, family_of, parse_addr
from kbpf.model.events import Kind, ObjectKey
from kbpf.model.objects import (
    Cidr,
    Endpoint,
    EndpointSlice,
    Node,
    Pod,
    Protocol,
    Service,
    ServicePort,
    SlicePort,
    pack_names,
)
from kbpf.source.decode import wire
from kbpf.source.decode.annotations import parse_algorithm, parse_weights
from kbpf.source.decode.fields import (
    LINK_LOCAL,
    check_label,
    check_one_of,
    check_port,
    check_subdomain,
    escape_name,
    format_decode_error,
    is_local_policy,
    label_problem,
    leading_zeros_problem,
    parse_address,
    parse_cidr,
    parse_or_skip,
    parse_specified_address,
    special_address_problem,
    with_path,
)

ModelObject = Service | EndpointSlice | Node | Pod

MAX_OBJECT_BYTES: Final = 6 << 20
"""Bytes of one object's JSON. etcd accepts 1.5 MiB of protobuf, which is three times as much
JSON."""
LARGE_OBJECT_BYTES: Final = 256 << 10
"""An object is large if its JSON has more bytes than this."""
_LARGE_OBJECT_LOCK: Final = threading.Lock()
"""Only one large object is decoded at a time: as structs it takes up to thirty times its size."""
MAX_ADDRESSES: Final = 1_024
"""At most this many ExternalIPs of a Service, and as many load balancer addresses; the rest is
left out. Each costs some microseconds per port, while the changes of other tenants wait."""
MAX_TEXT_LENGTH: Final = 253
"""Of an endpoint's zone, which the API server does not check: a longer one is no Node's label, and
would make each line of a table as long. No Pod has a longer name."""
MAX_SKIPPED_LINES: Final = 100
"""Lines about left-out endpoints of one slice."""
DEFAULT_AFFINITY_TIMEOUT: Final = 10800
TO_BE_DELETED_TAINT: Final = "ToBeDeletedByClusterAutoscaler"
_PROTOCOLS: Final = {"TCP": Protocol.TCP, "UDP": Protocol.UDP, "SCTP": Protocol.SCTP}
_UID_PATTERN: Final = re.compile(r"[0-9A-Za-z-]{1,64}")  # it becomes part of a cgroup path
_SERVICE_TYPES: Final = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")


class DecodedObject(NamedTuple):
    """A decoded object. `object` None without `error` means that kbpf does not select it.
    `trigger_time`: see Upsert. `uid` and `version` identify the object and its state, at one API
    server.
    """

    key: ObjectKey
    version: str
    object: ModelObject | None
    error: str = ""
    trigger_time: str = ""
    uid: str = ""


def decode_object(kind: Kind, data: bytes | msgspec.Raw) -> DecodedObject:
    """Decodes JSON. A malformed object is returned with `error` set.

    Raises ObjectError if not even its name can be read, or if it is longer than MAX_OBJECT_BYTES.
    """
    size = len(memoryview(data))  # a msgspec.Raw has no len(); this does not copy it
    if size > MAX_OBJECT_BYTES:
        raise ObjectError(f"not a {kind}: larger than {MAX_OBJECT_BYTES >> 20} MiB")
    with _LARGE_OBJECT_LOCK if size > LARGE_OBJECT_BYTES else nullcontext():
        return _decode(kind, data, _DECODERS[kind].json_decoder.decode, _META_DECODER.decode)


def convert_object(kind: Kind, value: object) -> DecodedObject:
    """Decodes plain dicts and lists, such as a YAML document, as strictly as JSON: ``port: "80"``
    is an error here because it is one in an API server.
    """
    return _decode(
        kind,
        value,
        lambda raw: msgspec.convert(raw, _DECODERS[kind].wire_type),
        lambda raw: msgspec.convert(raw, wire.PartialObject),
    )


def decode_service(obj: wire.Service) -> Service | None:
    """Returns what kube-proxy uses of a Service; None if it skips it. Raises ObjectError."""
    spec, labels = obj.spec or wire.ServiceSpec(), obj.metadata.labels
    # kube-proxy's informers exclude these by a label selector (server.go).
    if labels and (labels.headless is not None or labels.proxy_name is not None):
        return None
    kind = check_one_of(spec.type or "ClusterIP", _SERVICE_TYPES, "spec.type")
    skipped: list[str] = []
    cluster_ips = _cluster_ips(spec, skipped)
    # ShouldSkipService() in kube-proxy.
    if kind == "ExternalName" or not cluster_ips:
        return None
    entries = [(f"spec.externalIPs[{i}]", ip) for i, ip in enumerate(spec.external_ips or ())]
    has_node_ports = kind in ("NodePort", "LoadBalancer")
    external_local = is_local_policy(spec.external_traffic_policy, "spec.externalTrafficPolicy")
    # As ExternallyAccessible() in Kubernetes: the policy of other Services has no meaning.
    external_local = external_local and (has_node_ports or bool(entries))
    # NeedsHealthCheck() in Kubernetes.
    has_health_check = kind == "LoadBalancer" and external_local
    annotations = obj.metadata.annotations or wire.Annotations()
    health_check_port = (spec.health_check_node_port or 0) if has_health_check else 0
    return Service(
        namespace=intern(obj.metadata.namespace or ""),
        name=obj.metadata.name,
        type=intern(kind),
        cluster_ips=cluster_ips,
        ports=_service_ports(spec.ports or (), has_node_ports),
        external_ips=_usable_addresses(entries, skipped),
        lb_vips=_lb_vips(obj.status, skipped),
        source_ranges=_source_ranges(spec),
        external_local=external_local,
        internal_local=is_local_policy(spec.internal_traffic_policy, "spec.internalTrafficPolicy"),
        affinity_timeout=_affinity_timeout(spec),
        health_check_node_port=health_check_port
        and check_port(health_check_port, "spec.healthCheckNodePort"),  # 0: none
        creation_timestamp=obj.metadata.creation_timestamp or "",
        algorithm=parse_algorithm(annotations.algorithm, skipped),
        weights=None if annotations.weights is None else parse_weights(annotations.weights, skipped),
        mesh=find_control_plane(labels),
        skipped=tuple(skipped),
    )


def find_control_plane(labels: wire.ServiceLabels | None) -> str:
    """The name of the mesh to whose control plane a Service with these labels belongs, "" if to
    none. Names, namespaces, revisions and Helm releases differ from cluster to cluster; the labels
    are those of the charts (istio/istio d7699b5c, istio-discovery/templates/service.yaml and
    remote-istiod-service.yaml; linkerd/linkerd2 01d1e464, linkerd-control-plane/templates/
    destination.yaml; hashicorp/consul-k8s a507b1d1, consul/templates/connect-inject-service.yaml,
    whose label `app` a value of the chart can change).
    """
    if labels is None:
        return ""
    if "istiod" in (labels.app, labels.app_name):
        return "Istio"
    if labels.linkerd_component == "destination":
        return "Linkerd"
    return "Consul" if labels.component == "connect-injector" else ""


def decode_endpoint_slice(obj: wire.EndpointSlice) -> EndpointSlice | None:
    """Returns what kube-proxy uses of an EndpointSlice; None if it skips it. Raises ObjectError."""
    labels = obj.metadata.labels
    if not labels or not labels.service_name or labels.headless is not None:
        return None
    if check_one_of(obj.address_type or "", ("IPv4", "IPv6", "FQDN"), "addressType") == "FQDN":
        return None
    check_label(labels.service_name, "metadata.labels[kubernetes.io/service-name]")
    family = 4 if obj.address_type == "IPv4" else 6
    skipped: list[str] = []
    pods: list[str] = []
    endpoints = _endpoints(obj.endpoints or (), family, skipped, pods)
    ports = _slice_ports(obj.ports or (), skipped)
    return EndpointSlice(
        namespace=intern(obj.metadata.namespace or ""),
        name=obj.metadata.name,
        service=intern(labels.service_name),
        family=family,
        endpoints=endpoints,
        ports=ports,
        skipped=tuple(skipped),
        packed_pods=pack_names(pods),
    )


def decode_node(obj: wire.Node) -> Node:
    """Returns what kube-proxy uses of a Node: addresses, zone, pod networks, and whether it is
    leaving.
    """
    skipped: list[str] = []
    entries = list(enumerate((obj.status and obj.status.addresses) or ()))
    addresses = [
        parse_or_skip(parse_addr, entry.address, f"status.addresses[{i}]", skipped)
        # InternalIPs first, as in GetNodeHostIPs() of Kubernetes
        for kind in ("InternalIP", "ExternalIP")
        for i, entry in entries
        if entry.type == kind
    ]
    spec = obj.spec or wire.NodeSpec()
    texts = spec.pod_cidrs or ((spec.pod_cidr,) if spec.pod_cidr else ())
    cidrs = [
        parse_or_skip(lambda text: parse_cidr(text, ""), text, f"spec.podCIDRs[{i}]", skipped)
        for i, text in enumerate(texts)
    ]
    labels = obj.metadata.labels
    return Node(
        name=intern(obj.metadata.name),
        addresses=tuple(address for address in addresses if address is not None),
        zone=intern((labels and labels.zone) or ""),
        pod_cidrs=tuple(cidr for cidr in cidrs if cidr is not None),
        skipped=tuple(skipped),
        # kube-proxy's health check fails on such a node (KEP-3836): load balancers drain it.
        being_deleted=bool(obj.metadata.deletion_timestamp)
        or any(taint.key == TO_BE_DELETED_TAINT for taint in spec.taints or ()),
    )


def find_mesh(annotations: wire.PodAnnotations | None) -> str:
    """The name of the mesh that redirects the traffic of a Pod with these annotations; "" if none
    does. Consul's status is missing in Pods whose proxy is not transparent. Istio announces a Pod
    that is being added to an ambient mesh as "pending".
    """
    if annotations is None:
        return ""
    if annotations.istio_sidecar:
        return "Istio"
    if annotations.istio_ambient in ("enabled", "pending"):
        return "Istio ambient"
    if annotations.linkerd:
        return "Linkerd"
    if annotations.kmesh == "enabled":
        return "Kmesh"
    return "Consul" if annotations.consul else ""


def decode_pod(obj: wire.Pod) -> Pod | None:
    """Returns the Pod if its label kbpf.io/socket-lb is "off", or if a mesh redirects its traffic;
    else None. Raises ObjectError.
    """
    meta = obj.metadata
    has_label = meta.labels is not None and meta.labels.socket_lb == "off"
    mesh = find_mesh(meta.annotations)
    if not has_label and not mesh:
        return None
    uid = meta.uid or ""
    if not _UID_PATTERN.fullmatch(uid):
        raise ObjectError(f"metadata.uid: {escape_name(uid)!r} is not a uid" if uid else "metadata.uid: missing")
    return Pod(
        namespace=intern(meta.namespace or ""),
        name=meta.name,
        uid=uid,
        # The API server is asked for metadata only, of the Pods of this node.
        node=intern((obj.spec and obj.spec.node_name) or ""),
        mesh="" if has_label else mesh,
    )


def _decode(
    kind: Kind, data: Any, decode: Callable[[Any], Any], decode_meta: Callable[[Any], wire.PartialObject]
) -> DecodedObject:
    try:
        obj = decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # If its metadata can be read, the error belongs to this object, whose last valid version
        # stays in force; otherwise nothing is known about it.
        try:
            meta = decode_meta(data).metadata
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as meta_error:
            raise ObjectError(f"not a {kind}: {format_decode_error(meta_error)}") from error
        return DecodedObject(_object_key(kind, meta), meta.resource_version or "", None, format_decode_error(error))
    uid = obj.metadata.uid or ""
    key, version = _object_key(kind, obj.metadata), obj.metadata.resource_version or ""
    try:
        _check_names(kind, obj.metadata)
        result = _DECODERS[kind].to_model(obj)
    except ObjectError as error:
        return DecodedObject(key, version, None, str(error), uid=uid)
    annotations = obj.metadata.annotations if kind is Kind.SLICE else None
    return DecodedObject(key, version, result, "", (annotations and annotations.triggered) or "", uid)


def _object_key(kind: Kind, meta: wire.PartialObjectMeta) -> ObjectKey:
    if not meta.name:
        raise ObjectError(f"not a {kind}: metadata.name: missing")
    namespace = "" if kind is Kind.NODE else intern(escape_name(meta.namespace or ""))
    return ObjectKey(kind, namespace, escape_name(meta.name))


def _check_names(kind: Kind, meta: wire.PartialObjectMeta) -> None:
    """Raises ObjectError unless the API server would accept the name and namespace."""
    check_name = check_label if kind is Kind.SERVICE else check_subdomain
    check_name(meta.name, "metadata.name")
    if kind is not Kind.NODE and meta.namespace:
        check_label(meta.namespace, "metadata.namespace")


def _cluster_ips(spec: wire.ServiceSpec, skipped: list[str]) -> tuple[Addr, ...]:
    """Reads spec.clusterIPs, or clusterIP alone (objects from before 1.20); () means that
    kube-proxy skips the Service.
    """
    texts = spec.cluster_ips or ((spec.cluster_ip,) if spec.cluster_ip else ())
    # "None": headless; "": not allocated yet (IsServiceIPSet() in Kubernetes).
    if "None" in texts or spec.cluster_ip == "None" or texts == ("",):
        return ()
    path = "spec.clusterIPs[{}]" if spec.cluster_ips else "spec.clusterIP"
    addresses = tuple(parse_specified_address(text, path.format(i)) for i, text in enumerate(texts))
    for i, (text, address) in enumerate(zip(texts, addresses, strict=True)):
        _note_leading_zeros(text, address, path.format(i), skipped)
    if len({family_of(address) for address in addresses}) < len(addresses):
        raise ObjectError("spec.clusterIPs: more than one address of a family")
    return addresses


def _service_ports(ports: tuple[wire.ServicePort, ...], exposed: bool) -> tuple[ServicePort, ...]:
    result: list[ServicePort] = []
    names: set[str] = set()
    numbers: set[tuple[int, Protocol]] = set()
    for i, port in enumerate(ports):
        path = f"spec.ports[{i}]"
        protocol = check_one_of(port.protocol or "TCP", tuple(_PROTOCOLS), f"{path}.protocol")
        number = (port.node_port or 0) if exposed else 0
        service_port = ServicePort(
            name=intern(check_label(port.name, f"{path}.name") if port.name else ""),
            protocol=_PROTOCOLS[protocol],
            port=check_port(port.port, f"{path}.port"),
            node_port=number and check_port(number, f"{path}.nodePort"),
        )
        if service_port.name in names:
            raise ObjectError(f"{path}.name: {service_port.name!r} is used twice")
        if (service_port.port, service_port.protocol) in numbers:
            raise ObjectError(f"{path}.port: {service_port.port}/{protocol} is used twice")
        names.add(service_port.name)
        numbers.add((service_port.port, service_port.protocol))
        result.append(service_port)
    return tuple(result)


def _source_ranges(spec: wire.ServiceSpec) -> tuple[Cidr, ...]:
    """Sorted and without duplicates, which keeps the policy fast for long lists."""
    entries = enumerate(spec.load_balancer_source_ranges or ())
    return tuple(sorted({parse_cidr(text.strip(), f"spec.loadBalancerSourceRanges[{i}]") for i, text in entries}))


def _lb_vips(status: wire.ServiceStatus | None, skipped: list[str]) -> tuple[Addr, ...]:
    ingress = (status and status.load_balancer and status.load_balancer.ingress) or ()
    entries = (
        (f"status.loadBalancer.ingress[{i}].ip", entry.ip)
        for i, entry in enumerate(ingress)
        # With ipMode Proxy, connections have to go through the load balancer itself (KEP-1860).
        if entry.ip and entry.ip_mode in (None, "VIP")
    )
    return _usable_addresses(entries, skipped)


def _usable_addresses(entries: Iterable[tuple[str, str]], skipped: list[str]) -> tuple[Addr, ...]:
    """Parses the addresses at these paths, without those that cannot be parsed, to which no
    connection is possible or which belong to every node: these are left out, and the Service is
    served at the others.
    Link-local addresses are refused by policy (policy/admission.py).
    """
    addresses: list[Addr] = []
    for path, text in entries:
        if len(addresses) == MAX_ADDRESSES:
            skipped.append(
                with_path(path, f"this and all further addresses are left out: the limit is {MAX_ADDRESSES}")
            )
            break
        try:
            address = parse_address(text, path)
        except ObjectError as error:
            skipped.append(str(error))
            continue
        reason = special_address_problem(address)
        if reason not in ("", LINK_LOCAL):
            skipped.append(with_path(path, f"{text} is {reason}"))
        else:
            _note_leading_zeros(text, address, path, skipped)
            addresses.append(address)
    return tuple(addresses)


def _note_leading_zeros(text: str, address: Addr, path: str, skipped: list[str]) -> None:
    if problem := leading_zeros_problem(text, address):
        skipped.append(with_path(path, problem))


def _affinity_timeout(spec: wire.ServiceSpec) -> int:
    kind = check_one_of(spec.session_affinity or "None", ("None", "ClientIP"), "spec.sessionAffinity")
    if kind == "None":
        return 0
    config = spec.session_affinity_config
    seconds = config.client_ip.timeout_seconds if config and config.client_ip else None
    if seconds is None:
        return DEFAULT_AFFINITY_TIMEOUT
    if not 1 <= seconds <= 86400:
        path = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
        raise ObjectError(f"{path}: {seconds} is not between 1 and 86400")
    return seconds


def _endpoints(
    endpoints: tuple[wire.Endpoint, ...], family: int, skipped: list[str], pods: list[str]
) -> tuple[Endpoint, ...]:
    """Returns the endpoints that can serve, and appends the name of each one's Pod to `pods`. Only
    addresses[0] is used.
    """
    result: list[Endpoint] = []
    # the hot loop of decoding: no helper calls for the common case
    for i, endpoint in enumerate(endpoints):
        text = endpoint.addresses[0] if endpoint.addresses else ""
        try:
            address = parse_addr(text)
        except (ObjectError, ValueError):
            problem = f"{text[:64]!r} is not an IP address" if endpoint.addresses else "no address"
            _add_skipped(skipped, f"endpoints[{i}].addresses: {problem}")
            continue
        problem = special_address_problem(address)
        if problem or (4 if address[:12] == V4_PREFIX else 6) != family:
            reason = problem or f"not IPv{family}"
            _add_skipped(skipped, f"endpoints[{i}].addresses: {text} is {reason}")
            continue
        if ".0" in text or text[0] == "0":  # a cheap test first, see above
            problem = leading_zeros_problem(text, address)
            if problem:
                _add_skipped(skipped, f"endpoints[{i}].addresses: {problem}")
        if endpoint.addresses and len(endpoint.addresses) > 1:
            _note_malformed_extras(endpoint.addresses, f"endpoints[{i}].addresses", skipped)
        # As in endpointslicecache.go: a missing condition counts as true, `terminating` as false.
        is_ready = serving = True
        terminating = False
        if (conditions := endpoint.conditions) is not None:
            is_ready = conditions.ready is not False
            serving = conditions.serving is not False
            terminating = conditions.terminating is True
        zones = nodes = None
        if (hints := endpoint.hints) is not None:
            zones, nodes = _hint_names(hints.for_zones), _hint_names(hints.for_nodes)
        # One string for all endpoints on a node or in a zone.
        node_name, zone = intern(endpoint.node_name or ""), endpoint.zone or ""
        zone = intern(zone if len(zone) <= MAX_TEXT_LENGTH else f"{zone[:MAX_TEXT_LENGTH]}...")
        result.append(Endpoint(address, is_ready, serving, terminating, node_name, zone, zones, nodes))
        pods.append(_pod_name(endpoint.target_ref) if endpoint.target_ref is not None else "")
    return tuple(result)


def _note_malformed_extras(addresses: tuple[str, ...], path: str, skipped: list[str]) -> None:
    """Adds a line for each invalid address, although addresses after the first are not used."""
    for i, text in enumerate(addresses[1:], 1):
        try:
            parse_addr(text)
        except (ObjectError, ValueError):
            _add_skipped(skipped, f"{path}[{i}]: {text[:64]!r} is not an IP address")


def _add_skipped(skipped: list[str], line: str) -> None:
    if len(skipped) < MAX_SKIPPED_LINES:
        skipped.append(line)
    elif len(skipped) == MAX_SKIPPED_LINES:
        skipped.append("endpoints: further ones are left out, too")


def _pod_name(ref: wire.TargetRef) -> str:
    """Returns the name of a Pod; "" for another kind, or a name that no Pod can have."""
    name = ref.name if ref.kind == "Pod" else None
    # pack_names() separates them by line breaks.
    return name if name and "\n" not in name and len(name) <= MAX_TEXT_LENGTH else ""


def _hint_names(hints: tuple[wire.EndpointHint, ...] | None) -> tuple[str, ...] | None:
    return _intern_names(tuple([hint.name for hint in hints])) if hints else None


@lru_cache(maxsize=4096)
def _intern_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Shares one tuple among all endpoints with these hints: there are few zones and many
    endpoints.
    """
    return tuple(map(intern, names))


def _slice_ports(ports: tuple[wire.SlicePort, ...], skipped: list[str]) -> tuple[SlicePort, ...]:
    """Returns the ports that can serve. Ports without a name field or number are not for service
    proxies.
    """
    result = []
    for i, port in enumerate(ports):
        if port.name is None or not port.port:
            continue
        protocol = _PROTOCOLS.get(port.protocol or "TCP")
        if protocol is None:
            skipped.append(f"ports[{i}].protocol: {port.protocol!r} is not TCP, UDP or SCTP")
        elif not 1 <= port.port <= 65535:
            skipped.append(f"ports[{i}].port: {port.port} is not a port")
        elif port.name and (problem := label_problem(port.name)):
            skipped.append(f"ports[{i}].name: {problem}")
        else:
            result.append(SlicePort(intern(port.name), protocol, port.port))
    return tuple(result)


class _Decoder(NamedTuple):
    wire_type: Any
    json_decoder: msgspec.json.Decoder[Any]
    to_model: Callable[[Any], ModelObject | None]


_META_DECODER: Final = msgspec.json.Decoder(wire.PartialObject)
_DECODERS: Final = {
    kind: _Decoder(wire_type, msgspec.json.Decoder(wire_type), to_model)
    for kind, wire_type, to_model in (
        (Kind.SERVICE, wire.Service, decode_service),
        (Kind.SLICE, wire.EndpointSlice, decode_endpoint_slice),
        (Kind.NODE, wire.Node, decode_node),
        (Kind.POD, wire.Pod, decode_pod),
    )
}
