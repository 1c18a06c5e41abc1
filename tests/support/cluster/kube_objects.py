# SPDX-License-Identifier: Apache-2.0
"""Builders of Services, EndpointSlices and Nodes as plain dicts, the equivalent of YAML.

Only given fields are set, so that an object shows what its test is about; the server's defaults
fill the rest. A field without a parameter here is set on the returned dict.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Object = dict[str, Any]

ZONE = "topology.kubernetes.io/zone"


def port(
    number: int,
    name: str = "",
    protocol: str = "TCP",
    *,
    target: int | str | None = None,
    node_port: int | None = None,
) -> Object:
    """Return a port of a Service; `target` is a number, or the name of a container port."""
    row = {"port": number, "protocol": protocol, "targetPort": number if target is None else target}
    return row | _given(name=name or None, nodePort=node_port)


def service(
    name: str,
    *ports: Object,
    namespace: str = "default",
    type: str | None = None,
    cluster_ip: str | None = None,
    cluster_ips: Sequence[str] = (),
    families: Sequence[str] = (),
    external_ips: Sequence[str] = (),
    external_policy: str | None = None,
    internal_policy: str | None = None,
    affinity_seconds: int | None = None,
    source_ranges: Sequence[str] = (),
    health_check_node_port: int | None = None,
    external_name: str | None = None,
    selector: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """Return a Service; without ports it gets TCP 80.

    `families` of two, such as ("IPv4", "IPv6"), makes it dual stack. `cluster_ip` may be "None"
    (headless). `affinity_seconds` turns ClientIP affinity on.
    """
    ips = [cluster_ip] if cluster_ip and not cluster_ips else list(cluster_ips)
    config = {"clientIP": {"timeoutSeconds": affinity_seconds}}
    affine = affinity_seconds is not None
    spec = _given(
        ports=None if external_name else list(ports) or [port(80)],
        type=type,
        clusterIP=ips[0] if ips else None,
        clusterIPs=ips or None,
        ipFamilies=list(families) or None,
        ipFamilyPolicy="RequireDualStack" if len(families) == 2 else None,
        externalIPs=list(external_ips) or None,
        externalTrafficPolicy=external_policy,
        internalTrafficPolicy=internal_policy,
        sessionAffinity="ClientIP" if affine else None,
        sessionAffinityConfig=config if affine else None,
        loadBalancerSourceRanges=list(source_ranges) or None,
        healthCheckNodePort=health_check_node_port,
        externalName=external_name,
        selector=dict(selector) if selector else None,
    )
    meta = _given(labels=_copied(labels), annotations=_copied(annotations))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace} | meta,
        "spec": spec,
    }


def endpoint(
    *addresses: str,
    ready: bool | None = True,
    serving: bool | None = None,
    terminating: bool | None = None,
    node: str | None = None,
    zone: str | None = None,
    for_zones: Sequence[str] = (),
    for_nodes: Sequence[str] = (),
) -> Object:
    """Return an endpoint of a slice; a condition that is None is omitted, as by older
    controllers.
    """
    hints = _given(
        forZones=[{"name": name} for name in for_zones] or None,
        forNodes=[{"name": name} for name in for_nodes] or None,
    )
    conditions = _given(ready=ready, serving=serving, terminating=terminating)
    row = {"addresses": list(addresses), "conditions": conditions}
    return row | _given(nodeName=node, zone=zone, hints=hints or None)


def slice_port(number: int | None, name: str = "", protocol: str = "TCP") -> Object:
    """Return a port of a slice; its name is the Service port's, not the container port's."""
    return {"name": name, "protocol": protocol} | _given(port=number)


def endpoint_slice(
    service_name: str,
    *endpoints: Object,
    ports: Sequence[Object] | None = None,
    family: str = "IPv4",
    name: str | None = None,
    namespace: str = "default",
    labels: Mapping[str, str] | None = None,
) -> Object:
    """Return an EndpointSlice of a Service; `family` may be FQDN; the port is TCP 80 by default.

    The name defaults to SERVICE-ipv4 or SERVICE-ipv6, so a Service has one slice per family unless
    the test gives names.
    """
    own = {"kubernetes.io/service-name": service_name}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name or f"{service_name}-{family.lower()}",
            "namespace": namespace,
            "labels": own | dict(labels or {}),
        },
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [slice_port(80)] if ports is None else list(ports),
    }


def node(
    name: str,
    *addresses: str,
    zone: str | None = None,
    pod_cidrs: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """Return a Node with InternalIP addresses, its zone as the well-known label."""
    own = {"kubernetes.io/hostname": name} | ({ZONE: zone} if zone else {}) | dict(labels or {})
    status = {
        "addresses": [{"type": "InternalIP", "address": address} for address in addresses],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": own, "annotations": dict(annotations or {})},
        "spec": _given(podCIDR=pod_cidrs[0] if pod_cidrs else None, podCIDRs=list(pod_cidrs) or None),
        "status": status,
    }


def namespace(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _given(**fields: object) -> Object:
    return {name: value for name, value in fields.items() if value is not None}


def _copied(row: Mapping[str, str] | None) -> dict[str, str] | None:
    return dict(row) if row else None
