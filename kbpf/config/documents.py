"""The text of a configuration file → its documents, as plain values, and those as structs.

Rules:
- Values are taken as kube-proxy takes them (bounded_yaml.py): ``hostnameOverride: 7`` is an error,
  and ``2001:10:1:2:3:4:5:6`` is an address (YAML 1.1 would make it a number of base 60). null is
  as good as nothing.
- A whole number may stand as ``1.048576e+06``: so Helm writes large ones.
- In kube-proxy's document a field that nobody knows is told and does no harm, as with kube-proxy,
  which decodes strictly first and then leniently; in ours it is an error. A field that stands twice
  is told in both. All else is an error with its path, and all errors are told at once.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, TypeVar, get_args, get_origin

import msgspec

from kbpf.config.diagnostic import Note
from kbpf.errors import ConfigError, in_words

T = TypeVar("T", bound=msgspec.Struct)

KUBE_PROXY: Final = "KubeProxyConfiguration"
OWN: Final = "KbpfConfiguration"
TIMES: Final = ("Period", "Timeout")
"""How the names of fields end that hold a time."""
VERSIONS: Final = {KUBE_PROXY: "kubeproxy.config.k8s.io/v1alpha1", OWN: "kbpf.io/v1alpha1"}


@dataclass(frozen=True, slots=True)
class Documents:
    """What a file holds, without kind and apiVersion; None for a document that is not there."""

    kube_proxy: Mapping[str, Any] | None = None
    own: Mapping[str, Any] | None = None
    notes: tuple[Note, ...] = ()


@dataclass(slots=True)
class Findings:
    """What is found wrong, and what is only told, while documents are read."""

    errors: list[ConfigError] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def parse(data: bytes, where: str, wrong: list[ConfigError] | None = None) -> Documents:
    """The documents of a file. Raises ConfigError when it is no YAML, or holds something else; with
    `wrong` what it holds else is noted there, and left out.
    """
    from kbpf import bounded_yaml  # and yaml, only with --config: 1.3 MB

    data = _json_without_tabs(data)

    notes: list[Note] = []

    def twice(field: str, line: int) -> None:
        text = f"line {line}: {field} stands twice; the last one counts"
        notes.append(Note(text, is_warning=True))

    found: dict[str, Mapping[str, Any]] = {}
    try:
        for document in bounded_yaml.load_all(data, bounded_yaml.CONFIGURATION, twice):
            if document is None:
                continue
            try:
                kind, values = _document(document, where)
                if kind in found:
                    raise ConfigError(f"{kind} stands twice", where, "leave one of them out")
                found[kind] = values
            except ConfigError as error:
                if wrong is None:
                    raise
                wrong.append(error)
    except bounded_yaml.NOT_YAML as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"not YAML: {problem}", f"{where}{line}") from error
    if not found and not wrong:
        raise ConfigError("nothing in it", where, f"write a document of kind {KUBE_PROXY} or {OWN}")
    return Documents(found.get(KUBE_PROXY), found.get(OWN), tuple(notes))


def _json_without_tabs(data: bytes) -> bytes:
    """JSON is YAML but for this: its words may be set apart by tabs. No word of JSON has one."""
    if b"\t" not in data:
        return data
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return data
    return data.replace(b"\t", b" ")


def _document(document: object, where: str) -> tuple[str, Mapping[str, Any]]:
    """Its kind, and what else it says."""
    if not isinstance(document, dict):
        raise ConfigError("a document is no object", where, "begin it with apiVersion and kind")
    kind, version = document.get("kind"), document.get("apiVersion")
    if kind not in VERSIONS:
        known = " or ".join(VERSIONS)
        raise ConfigError(f"kind: {kind!r} is not read", where, f"write {known}")
    if version != VERSIONS[kind]:
        raise ConfigError(
            f"{kind}.apiVersion: {version!r} is not read", where, f"write {VERSIONS[kind]}"
        )
    return kind, {k: v for k, v in document.items() if k not in ("kind", "apiVersion")}


def decode(
    kind: type[T], values: Mapping[str, Any], path: str, found: Findings, strict: bool = False
) -> T:
    """The struct that these values say, with defaults for what is missing or wrong. `path` leads to
    it; what is wrong is added to `found`. `strict`: so is a field that nobody knows.
    """
    fields = {known.encode_name: known for known in msgspec.structs.fields(kind)}
    given: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{path}.{name}"
        if name not in fields:
            _unknown(where, name, fields, found, strict)
        elif value is not None:
            below = fields[name].type
            try:
                given[fields[name].name] = _value(below, value, where, found, strict)
            except msgspec.ValidationError as error:
                hint = _as_a_time(value) if name.endswith(TIMES) else ""
                text, _, place = str(error).partition(" - at ")
                where += place.strip("`").removeprefix("$")
                found.errors.append(ConfigError(in_words(text), where, hint))
    return kind(**given)


def _value(kind: Any, value: object, where: str, found: Findings, strict: bool) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if not isinstance(value, dict):
            raise msgspec.ValidationError("Expected `object`")
        return decode(kind, value, where, found, strict)
    if get_origin(kind) is dict and isinstance(value, dict):
        return _entries(get_args(kind)[1], value, where, found, strict)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return msgspec.convert(value, kind)


def _entries(
    kind: Any, values: Mapping[object, object], path: str, found: Findings, strict: bool
) -> dict[str, Any]:
    """Those of an object whose names are anybody's; msgspec would not name the one it means."""
    made = {}
    for name, value in values.items():
        try:
            made[str(name)] = _value(kind, value, f"{path}.{name}", found, strict)
        except msgspec.ValidationError as error:
            found.errors.append(ConfigError(in_words(str(error)), f"{path}.{name}"))
    return made


def _as_a_time(value: object) -> str:
    """What to write for a number, where a time is meant: who writes one means seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"write {value:g}s" if is_number else ""


def _unknown(
    where: str, name: str, fields: Mapping[str, object], found: Findings, strict: bool
) -> None:
    known = {field.lower(): field for field in fields}
    near = get_close_matches(name.lower(), known, 1, 0.75)
    meant = f"is {known[near[0]]} meant?" if near else ""
    if strict:
        found.errors.append(ConfigError("no field that is known", where, meant or "leave it out"))
        return
    text = f"{where} is no field that is known; {meant or 'it is not used'}"
    found.notes.append(Note(text, is_warning=True))


def leaves(kind: type[msgspec.Struct], path: str) -> Iterator[str]:
    """The paths of all fields that hold a value, in order."""
    for known in msgspec.structs.fields(kind):
        where = f"{path}.{known.encode_name}"
        if isinstance(known.type, type) and issubclass(known.type, msgspec.Struct):
            yield from leaves(known.type, where)
        else:
            yield where
