"""Fields that Kubernetes does not know: a slip of the pen in a folder's YAML, which would become
the default without a word.

The lists are those of Kubernetes 1.37 (k8s.io/api core/v1 and discovery/v1), with all that we do
not read. metadata and status are not checked.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kbpf.model.events import Kind
from kbpf.source.decode.annotations import ALGORITHM, WEIGHTS

Shape = Mapping[str, Any]
"""Field → the shape of what is below it (of each item, if it is a list); None: anything goes."""


def _shape(words: str, **below: Shape) -> Shape:
    return MappingProxyType({**dict.fromkeys(words.split()), **below})


PREFIX: Final = "kbpf.io/"
ANNOTATIONS: Final = (ALGORITHM, WEIGHTS)
_TOP: Final = "apiVersion kind metadata spec status data"
_NAME: Final = _shape("name")
SHAPES: Final = {
    Kind.SERVICE: _shape(
        _TOP,
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
        f"{_TOP} addressType",
        endpoints=_shape(
            "addresses hostname targetRef deprecatedTopology nodeName zone",
            conditions=_shape("ready serving terminating"),
            hints=_shape("", forZones=_NAME, forNodes=_NAME),
        ),
        ports=_shape("name protocol port appProtocol"),
    ),
    Kind.NODE: _shape(
        _TOP,
        spec=_shape(
            "podCIDR podCIDRs providerID unschedulable taints configSource externalID "
            "podPreemptionPolicy"
        ),
    ),
    Kind.POD: _shape(_TOP),
}


class Unknown(NamedTuple):
    """A field that is none: its path in the object, and the known name that it resembles, or ""."""

    path: str
    meant: str


def unknown_fields(kind: Kind, value: object) -> Iterator[Unknown]:
    """All of them, in the order in which they stand."""
    return _unknown(value, SHAPES[kind], "")


def unknown_annotations(value: object) -> Iterator[Unknown]:
    """Annotations with our prefix that kbpf does not know."""
    meta = value.get("metadata") if isinstance(value, dict) else None
    written = meta.get("annotations") if isinstance(meta, dict) else None
    for name in written if isinstance(written, dict) else ():
        if str(name).startswith(PREFIX) and name not in ANNOTATIONS:
            near = get_close_matches(str(name).lower(), ANNOTATIONS, 1, 0.85)
            yield Unknown(f"metadata.annotations[{name}]", next(iter(near), ""))


def _unknown(value: object, shape: Shape, path: str) -> Iterator[Unknown]:
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _unknown(item, shape, f"{path}[{i}]")
    elif isinstance(value, dict):
        for name, below in value.items():
            where = f"{path}.{name}" if path else str(name)
            if name not in shape:
                yield Unknown(where, _near(str(name), shape))
            elif shape[name] is not None:
                yield from _unknown(below, shape[name], where)


def _near(name: str, shape: Shape) -> str:
    """The known name that was meant, whatever its capitals: ``clusterIp`` is ``clusterIP``."""
    known = {word.lower(): word for word in shape}
    return next((known[word] for word in get_close_matches(name.lower(), known, 1, 0.75)), "")
