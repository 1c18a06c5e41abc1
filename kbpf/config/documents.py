# SPDX-License-Identifier: Apache-2.0
"""Splits a configuration file into its documents and decodes them into structs.

- Values are read as kube-proxy reads them (bounded_yaml.py): ``hostnameOverride: 7`` is an error,
  and ``2001:10:1:2:3:4:5:6`` is an address (in YAML 1.1 it is a base-60 number). null means unset.
- A whole number may be written ``1.048576e+06``, as Helm does with large ones.
- An unknown field in kube-proxy's document is a warning, as in kube-proxy, which decodes strictly
  first and then leniently; in kbpf's document it is an error. A duplicate field is a warning in
  both. Everything else is an error with its path. All errors are reported together.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeVar, get_args, get_origin

import msgspec

from kbpf.config.settings import REMOVED_SETTINGS, SETTINGS
from kbpf.config.values import ConfigValues, Diagnostic
from kbpf.errors import ConfigError, closest_name, describe_decode_error

T = TypeVar("T", bound=msgspec.Struct)

KUBE_PROXY: Final = "KubeProxyConfiguration"
KBPF: Final = "KbpfConfiguration"
TIME_SUFFIXES: Final = ("Period", "Timeout")
"""The suffixes of fields that hold a duration."""
API_VERSIONS: Final = {KUBE_PROXY: "kubeproxy.config.k8s.io/v1alpha1", KBPF: "kbpf.io/v1alpha1"}


@dataclass(frozen=True, slots=True)
class ConfigDocuments:
    """The documents of a file, without kind and apiVersion; None for a document that is missing."""

    kube_proxy: Mapping[str, Any] | None = None
    kbpf: Mapping[str, Any] | None = None
    notes: tuple[Diagnostic, ...] = ()


def parse(data: bytes, where: str, errors: list[ConfigError] | None = None) -> ConfigDocuments:
    """Returns the documents of a file. Raises ConfigError if the file is not YAML or contains
    another kind of document. If `errors` is given, the latter are appended there and skipped.
    """
    from kbpf import bounded_yaml  # only with --config: PyYAML takes 1.3 MB

    data = _json_without_tabs(data)

    notes: list[Diagnostic] = []

    def on_duplicate(field: str, line: int) -> None:
        text = f"line {line}: {field} occurs twice; the last one is used"
        notes.append(Diagnostic(text, is_warning=True))

    by_kind: dict[str, Mapping[str, Any]] = {}
    try:
        for document in bounded_yaml.load_all(data, bounded_yaml.CONFIGURATION, on_duplicate):
            if document is None:
                continue
            try:
                kind, values = _split_document(document, where)
                if kind == KBPF:
                    values = _without_removed(values, notes)
                if kind in by_kind:
                    raise ConfigError(f"{kind} occurs twice", where, "remove one of them")
                by_kind[kind] = values
            except ConfigError as error:
                if errors is None:
                    raise
                errors.append(error)
    except bounded_yaml.YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"not YAML: {problem}", f"{where}{line}") from error
    if not by_kind and not errors:
        raise ConfigError("the file is empty", where, f"write a document of kind {KUBE_PROXY} or {KBPF}")
    return ConfigDocuments(by_kind.get(KUBE_PROXY), by_kind.get(KBPF), tuple(notes))


def _json_without_tabs(data: bytes) -> bytes:
    """JSON is valid YAML except that it allows tabs between tokens. No token of valid JSON
    contains a tab.
    """
    if b"\t" not in data:
        return data
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return data
    return data.replace(b"\t", b" ")


def _split_document(document: object, where: str) -> tuple[str, Mapping[str, Any]]:
    """Returns the kind and the other fields."""
    if not isinstance(document, dict):
        raise ConfigError("a document is not an object", where, "begin it with apiVersion and kind")
    kind, version = document.get("kind"), document.get("apiVersion")
    if kind not in API_VERSIONS:
        kinds = " or ".join(API_VERSIONS)
        raise ConfigError(f"kind: {kind!r} is not supported", where, f"write {kinds}")
    if version != API_VERSIONS[kind]:
        raise ConfigError(f"{kind}.apiVersion: {version!r} is not supported", where, f"write {API_VERSIONS[kind]}")
    return kind, {k: v for k, v in document.items() if k not in ("kind", "apiVersion")}


def _without_removed(values: Mapping[str, Any], notes: list[Diagnostic]) -> Mapping[str, Any]:
    """The fields without those of removed settings, which become notes."""
    fields = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    for setting in REMOVED_SETTINGS:
        section, dot, name = setting.kbpf.rpartition(".")
        holder = fields.get(section) if dot else fields
        if isinstance(holder, dict) and holder.pop(name, None) is not None:
            text = f"{KBPF}.{setting.kbpf} has no effect: {setting.text}"
            notes.append(Diagnostic(text, is_warning=True))
    return fields


def decode(
    kind: type[T],
    values: Mapping[str, Any],
    path: str,
    found: ConfigValues,
    strict: bool = False,
) -> T:
    """Decodes `values` into a struct; fields that are missing or invalid get their default. Errors
    go to `found`, with paths below `path`. `strict`: unknown fields are errors, not
    warnings.
    """
    fields = {struct_field.encode_name: struct_field for struct_field in msgspec.structs.fields(kind)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{path}.{name}"
        if name not in fields:
            _report_unknown_field(where, name, fields, found, strict)
        elif value is not None:
            field_type = fields[name].type
            try:
                arguments[fields[name].name] = _decode_value(field_type, value, where, found, strict)
            except msgspec.ValidationError as error:
                hint = _time_hint(value) if name.endswith(TIME_SUFFIXES) else ""
                text, _, subpath = str(error).partition(" - at ")
                where += subpath.strip("`").removeprefix("$")
                found.errors.append(ConfigError(describe_decode_error(text), where, hint))
    return kind(**arguments)


def _decode_value(kind: Any, value: object, where: str, found: ConfigValues, strict: bool) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if not isinstance(value, dict):
            raise msgspec.ValidationError("Expected `object`")
        return decode(kind, value, where, found, strict)
    if get_origin(kind) is dict and isinstance(value, dict):
        return _decode_entries(get_args(kind)[1], value, where, found, strict)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return msgspec.convert(value, kind)


def _decode_entries(
    kind: Any, values: Mapping[object, object], path: str, found: ConfigValues, strict: bool
) -> dict[str, Any]:
    """Decodes a map with arbitrary keys one by one, since msgspec does not name the invalid
    entry.
    """
    entries = {}
    for name, value in values.items():
        try:
            entries[str(name)] = _decode_value(kind, value, f"{path}.{name}", found, strict)
        except msgspec.ValidationError as error:
            found.errors.append(ConfigError(describe_decode_error(str(error)), f"{path}.{name}"))
    return entries


def _time_hint(value: object) -> str:
    """The hint for a number where a duration is expected: it was probably meant in seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"write {value:g}s" if is_number else ""


def _report_unknown_field(
    where: str, name: str, fields: Mapping[str, object], found: ConfigValues, strict: bool
) -> None:
    known_name = closest_name(name, fields)
    hint = f"is {known_name} meant?" if known_name else ""
    if strict:
        found.errors.append(ConfigError("unknown field", where, hint or "leave it out"))
        return
    text = f"{where} is an unknown field; {hint or 'it is ignored'}"
    found.notes.append(Diagnostic(text, is_warning=True))


def build_type(name: str, types: Mapping[str, Any]) -> type[msgspec.Struct]:
    """Builds the type of a document, without kind and apiVersion, and of its sections. `types`: by
    path. A field that is unset is None.
    """
    fields: dict[str, Any] = {}
    sections: dict[str, list[Any]] = {}
    for path, value_type in types.items():
        section, dot, member = path.rpartition(".")
        if dot:
            fields[section] = sections.setdefault(section, [])
            sections[section].append((member, value_type, None))
        else:
            fields[member] = (member, value_type, None)
    for section, members in sections.items():
        kind = msgspec.defstruct(section, members, frozen=True)
        fields[section] = (section, kind, kind())
    return msgspec.defstruct(name, fields.values(), frozen=True)


# ---- kbpf's own document -------------------------------------------------------------------------

KBPF_SETTINGS: Final = {setting.kbpf: setting for setting in SETTINGS if setting.kbpf}
"""Path in the document → setting."""


KbpfConfiguration: Final = build_type(KBPF, {path: setting.kind.json_type for path, setting in KBPF_SETTINGS.items()})


def read_kbpf(values: Mapping[str, Any]) -> ConfigValues:
    """Returns the fields of Config that the document sets. Empty values count as unset."""
    result = ConfigValues(f"{KBPF}.")
    document = decode(KbpfConfiguration, values, KBPF, result, strict=True)
    for path, setting in KBPF_SETTINGS.items():
        text = setting.kind.flag_text(attrgetter(path)(document))
        if text:
            result.parse(setting.field, path, text, setting.kind.parse)
    return result
