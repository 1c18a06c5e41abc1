# SPDX-License-Identifier: Apache-2.0
"""Parses a YAML or JSON file into the objects in it, each with its place.

- Values are read as an API server reads them (bounded_yaml.py): ``port: "80"`` is an error, a date
  stays text, and ``2001:10:1:2:3:4:5:6`` is an address (in YAML 1.1 it is a base-60 number).
- Defaults of an API server are filled in: namespace `default`, port name "".
- A field that Kubernetes does not know is a problem line; its object is served without it. It may be
  a typo, which would otherwise silently become the default. The lists are those of Kubernetes 1.37
  (k8s.io/api core/v1 and discovery/v1), including fields that kbpf does not read. metadata and
  status are not checked.
- A text that cannot be parsed, or that exceeds MANIFESTS (bounded_yaml.py), is one ObjectError; a
  malformed object in a valid text harms only itself.
- The search for problems ends after MAX_PROBLEMS_PER_FILE lines: each needs a search for its line
  and for the name that was meant.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from kbpf import bounded_yaml
from kbpf.bounded_yaml import MANIFESTS
from kbpf.errors import ObjectError, closest_name
from kbpf.model.events import Kind
from kbpf.source.decode import decode
from kbpf.source.decode.annotations import ALGORITHM_ANNOTATION, WEIGHTS_ANNOTATION
from kbpf.source.decode.fields import escape_name, format_decode_error

API_VERSIONS: Final = {
    "Service": "v1",
    "EndpointSlice": "discovery.k8s.io/v1",
    "Node": "v1",
    "Pod": "v1",
}
MIN_SIMILARITY: Final = 0.8
"""How similar an unknown kind must be to a supported one to be a typo of it: ServiceCIDR is
0.78."""
MAX_PROBLEMS_PER_FILE: Final = 100
_WITH_ARTICLE: Final = {
    "Service": "a Service",
    "EndpointSlice": "an EndpointSlice",
    "Node": "a Node",
    "Pod": "a Pod",
}


class LocatedObject(NamedTuple):
    """An object; its error, if any, ends with its place. `where` is FILE:LINE if there is an
    error, else FILE.
    """

    item: decode.DecodedObject
    where: str


class FileContents(NamedTuple):
    """The contents of a file: objects in order, kinds that kbpf does not read, and problem
    lines.
    """

    objects: tuple[LocatedObject, ...] = ()
    ignored_kinds: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


LocatedValue = tuple[int, str, str, Any]
"""The number of the document, the path of the object in it, its kind, and the object as plain
values."""


def parse_documents(name: str, data: bytes) -> FileContents:
    """Parses the objects of a file. Raises ObjectError if it is not YAML (or JSON, by its name)."""
    if len(data) > MANIFESTS.size:
        raise ObjectError(f"larger than {MANIFESTS.size >> 20} MiB", name, "split it")
    objects: list[LocatedObject] = []
    ignored_kinds: dict[str, None] = {}
    problems: list[str] = []
    lines = _LineIndex(data)
    for document, path, kind, value in load_objects(name, data, problems):
        try:
            if not kind:
                raise ObjectError(f"{path}kind: missing")
            if kind not in API_VERSIONS:
                if suggestion := _suggest_kind(kind, value):
                    raise ObjectError(f"{path}kind: {escape_name(kind)} is not supported; {suggestion}")
                ignored_kinds[kind] = None
                continue
            item, where = _decode_item(kind, value, path), name
            if item.error:
                where = f"{name}:{lines.find_line(document, item.error)}"
                item = item._replace(error=str(ObjectError(item.error, where)))
            objects.append(LocatedObject(item, where))
            # Lazily: islice() below ends the search, which is slow, at the limit.
            unknown = chain(find_unknown_fields(Kind(kind), value), find_unknown_annotations(value))
            for field in islice(unknown, MAX_PROBLEMS_PER_FILE - len(problems)):
                location = f"{name}:{lines.find_line(document, f'{path}{field.path}:')}"
                owner = "an annotation of kbpf" if "annotations[" in field.path else f"a field of {_WITH_ARTICLE[kind]}"
                what = f"{item.key}: {escape_name(path + field.path)} is not {owner}"
                hint = f"is {field.suggestion} meant?" if field.suggestion else "it is ignored"
                problems.append(str(ObjectError(what, location, hint)))
        except ObjectError as error:
            if len(problems) < MAX_PROBLEMS_PER_FILE:
                where = f"{name}:{lines.find_line(document, error.what)}"
                problems.append(str(ObjectError(error.what, where)))
    if len(problems) == MAX_PROBLEMS_PER_FILE:
        problems.append(f"{name}: only the first {MAX_PROBLEMS_PER_FILE} problems of a file are listed")
    return FileContents(tuple(objects), tuple(ignored_kinds), tuple(problems))


def _suggest_kind(kind: str, value: object) -> str:
    """Returns what to write instead of this kind, if it resembles a supported one; else ""."""
    version = value.get("apiVersion") if isinstance(value, dict) else None
    if kind == "Endpoints" and version in (None, "v1"):
        return "write an EndpointSlice (discovery.k8s.io/v1)"
    known_kind = closest_name(kind, API_VERSIONS, MIN_SIMILARITY)
    return f"is {known_kind} meant?" if known_kind else ""


def _decode_item(kind: str, value: dict[str, Any], path: str) -> decode.DecodedObject:
    """Decodes one object after filling in an API server's defaults. `path` is its path in the
    document.
    """
    version, expected = value.get("apiVersion"), API_VERSIONS[kind]
    if version not in (None, expected):
        raise ObjectError(f"{path}apiVersion: {version!r} is not supported; write {expected}")
    meta, ports = value.get("metadata"), value.get("ports")
    if isinstance(meta, dict) and kind != Kind.NODE and not meta.get("namespace"):
        value["metadata"] = {**meta, "namespace": "default"}
    if kind == Kind.SLICE and isinstance(ports, list):
        value["ports"] = [{"name": "", **port} if isinstance(port, dict) else port for port in ports]
    item = decode.convert_object(Kind(kind), value)
    if kind == Kind.SERVICE and item.object is None and not item.error and _lacks_address(value):
        item = item._replace(error="spec.clusterIP: missing; write an address, since no API server assigns one")
    return item._replace(error=path + item.error) if item.error else item


def _lacks_address(value: dict[str, Any]) -> bool:
    """Whether this Service has no address, and would be used if an API server had assigned one."""
    spec = value.get("spec") or {}
    if spec.get("clusterIP") or any(spec.get("clusterIPs") or ()):
        return False
    spec = {**spec, "clusterIP": "192.0.2.1", "clusterIPs": None}
    item = decode.convert_object(Kind.SERVICE, {**value, "spec": spec})
    return item.object is not None or bool(item.error)


def load_objects(name: str, data: bytes, problems: list[str]) -> Iterator[LocatedValue]:
    """Yields the objects of a file as they are written. Raises ObjectError."""
    is_json = name.endswith(".json")
    return _load_json(name, data) if is_json else _load_yaml(name, data, problems)


def _load_json(name: str, data: bytes) -> Iterator[LocatedValue]:
    """Yields one object at a time: as plain dicts a large list takes five times the size of its
    text.
    """
    try:
        top = msgspec.json.decode(data, type=dict[str, msgspec.Raw]) if data.strip() else {}
        kind = _kind_or_empty(msgspec.json.decode(top["kind"])) if "kind" in top else ""
        if kind.endswith("List"):
            items = msgspec.json.decode(top.get("items", b"[]"), type=list[msgspec.Raw] | None)
            for i, raw in enumerate(items or ()):
                yield _locate_item(0, f"items[{i}].", kind, msgspec.json.decode(raw))
        elif top:
            yield 0, "", kind, msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        match = re.search(r"\(byte (\d+)\)", str(error))
        line = data[: int(match[1])].count(b"\n") + 1 if match else 1
        raise ObjectError(f"not JSON: {format_decode_error(error)}", f"{name}:{line}") from error


def _load_yaml(name: str, data: bytes, problems: list[str]) -> Iterator[LocatedValue]:
    def on_duplicate(key: str, line: int) -> None:
        if len(problems) < MAX_PROBLEMS_PER_FILE:
            what = f"{escape_name(key)} occurs twice; the last one is used"
            problems.append(str(ObjectError(what, f"{name}:{line}")))

    try:
        for number, document in enumerate(bounded_yaml.load_all(data, MANIFESTS, on_duplicate)):
            kind = _kind_or_empty(document.get("kind")) if isinstance(document, dict) else ""
            if kind.endswith("List"):
                items = document.get("items")
                for i, value in enumerate(items if isinstance(items, list) else ()):
                    yield _locate_item(number, f"items[{i}].", kind, value)
            elif document is not None:
                yield number, "", kind, document
    except bounded_yaml.YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        problem = getattr(error, "problem", None) or str(error)
        raise ObjectError(f"not YAML: {problem}", f"{name}:{line}") from error


def _locate_item(document: int, path: str, list_kind: str, value: object) -> LocatedValue:
    """An item of a list. Items of a typed list, such as a ServiceList of an API server, have no
    kind.
    """
    kind = value.get("kind", list_kind.removesuffix("List")) if isinstance(value, dict) else ""
    return document, path, _kind_or_empty(kind), value


def _kind_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""


class _LineIndex:
    """Finds the lines of fields, only for error messages: the text is composed when the first line
    is needed (JSON, too: it is valid YAML).
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._documents: list[Any] | None = None

    def find_line(self, number: int, error: str) -> int:
        """Returns the line of the field with which `error` begins, or of its nearest parent."""
        if self._documents is None:
            try:
                self._documents = bounded_yaml.compose_all(self._data, MANIFESTS)
            except bounded_yaml.YAML_ERRORS:
                self._documents = []
        if number >= len(self._documents):
            return 1
        node = self._documents[number]
        line = node.start_mark.line
        match = re.match(r"[\w./\[\]-]+(?=:)", error)
        for step in re.findall(r"[\w-]+", match[0] if match else ""):
            child = _find_child(node, step)
            if child is None:
                break
            line, node = child
        return int(line) + 1


def _is_index(step: str, node: Any) -> bool:
    return step.isdecimal() and len(step) < 10 and int(step) < len(node.value)


def _find_child(node: Any, step: str) -> tuple[int, Any] | None:
    if isinstance(node, bounded_yaml.ObjectNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark.line, value
    elif isinstance(node, bounded_yaml.ListNode) and _is_index(step, node):
        child = node.value[int(step)]
        return child.start_mark.line, child
    return None


# ---- fields that Kubernetes does not know --------------------------------------------------------

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
