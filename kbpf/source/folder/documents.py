"""The text of one YAML or JSON file → the objects in it, each with its place.

Rules:
- Values are taken as an API server takes them (bounded_yaml.py): ``port: "80"`` is an error, a
  date stays text, and ``2001:10:1:2:3:4:5:6`` is an address (no number of base 60, as in YAML 1.1).
- What an API server would fill in is filled in: namespace `default`, port name "".
- A field that Kubernetes does not know is a line of complaint; its object is served without it.
- A text that cannot be parsed, or is beyond MANIFESTS (bounded_yaml.py), is one ObjectError; a bad
  object in a good text spoils only itself.
- After MOST_PROBLEMS lines of complaint no more are looked for: each costs a search for its place
  and for the name that was meant.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import msgspec

from kbpf import bounded_yaml
from kbpf.bounded_yaml import MANIFESTS
from kbpf.errors import ObjectError
from kbpf.model.events import Kind
from kbpf.source.decode import decode
from kbpf.source.decode.fields import field_error, shown
from kbpf.source.decode.unknown_fields import unknown_annotations, unknown_fields

API_VERSIONS: Final = {
    "Service": "v1",
    "EndpointSlice": "discovery.k8s.io/v1",
    "Node": "v1",
    "Pod": "v1",
}
NEAR: Final = 0.8
"""How much a kind resembles one that is read, to be taken for it: ServiceCIDR does by 0.78."""
MOST_PROBLEMS: Final = 100
"""Lines of complaint about one file."""
_A: Final = {
    "Service": "a Service",
    "EndpointSlice": "an EndpointSlice",
    "Node": "a Node",
    "Pod": "a Pod",
}


class Found(NamedTuple):
    """An object; its error, if any, ends with its place. `where` is FILE:LINE, or FILE for JSON
    and whenever nothing is wrong with it.
    """

    item: decode.Item
    where: str


class Contents(NamedTuple):
    """What a file holds: objects in order, kinds that we do not read, and lines of complaint."""

    found: tuple[Found, ...] = ()
    ignored: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


Placed = tuple[int, str, str, Any]
"""Number of the document, path of the object in it, its kind, the object as plain values."""


def parse(name: str, data: bytes) -> Contents:
    """The objects of a file. Raises ObjectError when it is neither YAML nor JSON (by its name)."""
    if len(data) > MANIFESTS.size:
        raise ObjectError(f"larger than {MANIFESTS.size >> 20} MiB", name, "split it")
    found: list[Found] = []
    ignored: dict[str, None] = {}
    problems: list[str] = []
    lines = _Lines(data)
    is_json = name.endswith(".json")
    documents = _load_json(name, data) if is_json else _load_yaml(name, data, problems)
    for document, path, kind, value in documents:
        try:
            if not kind:
                raise ObjectError(f"{path}kind: missing")
            if kind not in API_VERSIONS:
                if meant := _meant(kind, value):
                    raise ObjectError(f"{path}kind: {shown(kind)} is not read; {meant}")
                ignored[kind] = None
                continue
            item, where = _item(kind, value, path), name
            if item.error:
                where = f"{name}:{lines.of(document, item.error)}"
                item = item._replace(error=str(ObjectError(item.error, where)))
            found.append(Found(item, where))
            unknown = chain(unknown_fields(Kind(kind), value), unknown_annotations(value))
            for field in islice(unknown, MOST_PROBLEMS - len(problems)):
                at = f"{name}:{lines.of(document, f'{path}{field.path}:')}"
                whose = (
                    "annotation of kbpf" if "annotations[" in field.path else f"field of {_A[kind]}"
                )
                what = f"{item.key}: {shown(path + field.path)} is no {whose}"
                hint = f"is {field.meant} meant?" if field.meant else "it is not used"
                problems.append(str(ObjectError(what, at, hint)))
        except ObjectError as error:
            if len(problems) < MOST_PROBLEMS:
                where = f"{name}:{lines.of(document, error.what)}"
                problems.append(str(ObjectError(error.what, where)))
    if len(problems) == MOST_PROBLEMS:
        problems.append(
            f"{name}: and maybe more: only {MOST_PROBLEMS} problems of a file are listed"
        )
    return Contents(tuple(found), tuple(ignored), tuple(problems))


def _meant(kind: str, value: object) -> str:
    """What to write instead of this kind, if it is near to one that is read; else ""."""
    version = value.get("apiVersion") if isinstance(value, dict) else None
    if kind == "Endpoints" and version in (None, "v1"):
        return "write an EndpointSlice (discovery.k8s.io/v1)"
    known = {each.lower(): each for each in API_VERSIONS}
    near = get_close_matches(kind.lower(), known, 1, NEAR)
    return f"is {known[near[0]]} meant?" if near else ""


def _item(kind: str, value: dict[str, Any], path: str) -> decode.Item:
    """One object, with what an API server fills in. `path` leads to it in its document."""
    version, wanted = value.get("apiVersion"), API_VERSIONS[kind]
    if version not in (None, wanted):
        raise ObjectError(f"{path}apiVersion: {version!r} is not read; write {wanted}")
    meta, ports = value.get("metadata"), value.get("ports")
    if isinstance(meta, dict) and kind != Kind.NODE and not meta.get("namespace"):
        value["metadata"] = {**meta, "namespace": "default"}
    if kind == Kind.SLICE and isinstance(ports, list):
        value["ports"] = [{"name": "", **p} if isinstance(p, dict) else p for p in ports]
    item = decode.read_value(Kind(kind), value)
    return item._replace(error=path + item.error) if item.error else item


def _load_json(name: str, data: bytes) -> Iterator[Placed]:
    """One at a time: as plain dicts a large list takes five times the memory of its text."""
    try:
        top = msgspec.json.decode(data, type=dict[str, msgspec.Raw]) if data.strip() else {}
        kind = _kind(msgspec.json.decode(top["kind"])) if "kind" in top else ""
        if kind.endswith("List"):
            items = msgspec.json.decode(top.get("items", b"[]"), type=list[msgspec.Raw] | None)
            for i, raw in enumerate(items or ()):
                yield _placed(0, f"items[{i}].", kind, msgspec.json.decode(raw))
        elif top:
            yield 0, "", kind, msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        line = data[: int(at[1])].count(b"\n") + 1 if at else 1
        raise ObjectError(f"not JSON: {field_error(error)}", f"{name}:{line}") from error


def _load_yaml(name: str, data: bytes, problems: list[str]) -> Iterator[Placed]:
    def twice(key: str, line: int) -> None:
        if len(problems) < MOST_PROBLEMS:
            what = f"{shown(key)} is written twice; the last one counts"
            problems.append(str(ObjectError(what, f"{name}:{line}")))

    try:
        for number, document in enumerate(bounded_yaml.load_all(data, MANIFESTS, twice)):
            kind = _kind(document.get("kind")) if isinstance(document, dict) else ""
            if kind.endswith("List"):
                items = document.get("items")
                for i, value in enumerate(items if isinstance(items, list) else ()):
                    yield _placed(number, f"items[{i}].", kind, value)
            elif document is not None:
                yield number, "", kind, document
    except bounded_yaml.NOT_YAML as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        problem = getattr(error, "problem", None) or str(error)
        raise ObjectError(f"not YAML: {problem}", f"{name}:{line}") from error


def _placed(document: int, path: str, list_kind: str, value: object) -> Placed:
    """An item of a list; in a ServiceList, as an API server gives it, it says no kind."""
    own = value.get("kind", list_kind.removesuffix("List")) if isinstance(value, dict) else ""
    return document, path, _kind(own), value


def _kind(said: object) -> str:
    return said if isinstance(said, str) else ""


class _Lines:
    """Where fields stand. Only for complaints: the text is parsed again, once, when the first
    comes (JSON too: YAML can read it).
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._documents: list[Any] | None = None

    def of(self, number: int, error: str) -> int:
        """The line of the field that `error` begins with, or of the nearest thing around it."""
        if self._documents is None:
            try:
                self._documents = bounded_yaml.nodes_of(self._data, MANIFESTS)
            except bounded_yaml.NOT_YAML:
                self._documents = []
        if number >= len(self._documents):
            return 1
        node = self._documents[number]
        line = node.start_mark.line
        found = re.match(r"[\w./\[\]-]+(?=:)", error)
        for step in re.findall(r"[\w-]+", found[0] if found else ""):
            below = _below(node, step)
            if below is None:
                break
            line, node = below
        return int(line) + 1


def _is_place(step: str, node: Any) -> bool:
    return step.isdecimal() and len(step) < 10 and int(step) < len(node.value)


def _below(node: Any, step: str) -> tuple[int, Any] | None:
    if isinstance(node, bounded_yaml.ObjectNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark.line, value
    elif isinstance(node, bounded_yaml.ListNode) and _is_place(step, node):
        below = node.value[int(step)]
        return below.start_mark.line, below
    return None
