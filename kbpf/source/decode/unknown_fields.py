# SPDX-License-Identifier: Apache-2.0
"""Finds fields that Kubernetes does not know: typos in a folder's YAML, which would otherwise
silently become the default.

The lists are those of Kubernetes 1.37 (k8s.io/api core/v1 and discovery/v1), including fields that
kbpf does not read. metadata and status are not checked.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kbpf.errors import closest_name
from kbpf.model.events import Kind
from kbpf.source.decode.annotations import ALGORITHM_ANNOTATION, WEIGHTS_ANNOTATION

FieldShape = Mapping[str, Any]
"""Field → the shape of its value (for a list: of each item); None: not checked."""


def _shape(names: str, **nested: FieldShape) -> FieldShape:
    return MappingProxyType({**dict.fromkeys(names.split()), **nested})


ANNOTATION_PREFIX: Final = "kbpf.io/"
KNOWN_ANNOTATIONS: Final = (ALGORITHM_ANNOTATION, WEIGHTS_ANNOTATION)
_TOP_LEVEL_FIELDS: Final = "apiVersion kind metadata spec status data"
_NAME_SHAPE: Final = _shape("name")
SHAPE_BY_KIND: Final = {
    Kind.SERVICE: _shape(
        _TOP_LEVEL_FIELDS,
        spec=_shape(
            "selector clusterIP clusterIPs type externalIPs sessionAffinity loadBalancerIP "
            "loadBalancerSourceRanges externalName externalTrafficPolicy healthCheckNodePort "
            "publishNotReadyAddresses topologyKeys ipFamily ipFamilies ipFamilyPolicy "
            "allocateLoadBalancerNodePorts loadBalancerClass internalTrafficPolicy "
            "trafficDistribution",
            ports=_shape("name protocol appProtocol port targetPort nodePort"),
            sessionAffinityConfig=_shape("", clientIP=_shape("timeoutSeconds")),
        ),
    ),
    Kind.SLICE: _shape(
        f"{_TOP_LEVEL_FIELDS} addressType",
        endpoints=_shape(
            "addresses hostname targetRef deprecatedTopology nodeName zone",
            conditions=_shape("ready serving terminating"),
            hints=_shape("", forZones=_NAME_SHAPE, forNodes=_NAME_SHAPE),
        ),
        ports=_shape("name protocol port appProtocol"),
    ),
    Kind.NODE: _shape(
        _TOP_LEVEL_FIELDS,
        spec=_shape("podCIDR podCIDRs providerID unschedulable taints configSource externalID podPreemptionPolicy"),
    ),
    Kind.POD: _shape(_TOP_LEVEL_FIELDS),
}


class UnknownField(NamedTuple):
    """An unknown field: its path in the object, and the known name that it resembles, or ""."""

    path: str
    suggestion: str


def find_unknown_fields(kind: Kind, value: object) -> Iterator[UnknownField]:
    """Yields all unknown fields, in the order of the object."""
    return _find_unknown(value, SHAPE_BY_KIND[kind], "")


def find_unknown_annotations(value: object) -> Iterator[UnknownField]:
    """Yields annotations with the prefix kbpf.io/ that kbpf does not know."""
    meta = value.get("metadata") if isinstance(value, dict) else None
    annotations = meta.get("annotations") if isinstance(meta, dict) else None
    for name in annotations if isinstance(annotations, dict) else ():
        if str(name).startswith(ANNOTATION_PREFIX) and name not in KNOWN_ANNOTATIONS:
            known_name = closest_name(str(name), KNOWN_ANNOTATIONS, 0.85)
            yield UnknownField(f"metadata.annotations[{name}]", known_name)


def _find_unknown(value: object, shape: FieldShape, path: str) -> Iterator[UnknownField]:
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _find_unknown(item, shape, f"{path}[{i}]")
    elif isinstance(value, dict):
        for name, child in value.items():
            field_path = f"{path}.{name}" if path else str(name)
            if name not in shape:
                yield UnknownField(field_path, closest_name(str(name), shape))
            elif shape[name] is not None:
                yield from _find_unknown(child, shape[name], field_path)
