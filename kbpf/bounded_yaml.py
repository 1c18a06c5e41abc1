# SPDX-License-Identifier: Apache-2.0
"""Parses YAML written by users: the dialect of Kubernetes, with limits checked before anything is
built.

Kubernetes tools convert YAML to JSON first (sigs.k8s.io/yaml, on go-yaml v2), and so does this
module: `yes` and `n` are booleans, `1e6` and `08` are numbers, `010` is eight, dates and base-60
numbers are text; keys are text; of fields with the same name, merged or not, the last one wins;
unknown tags are ignored; values that JSON cannot represent are errors.

A few bytes of YAML can crash a parser: an alias that contains itself, aliases of aliases that
multiply (548 bytes make a billion nodes), and nesting, which overflows the C stack in libyaml's
composer (200 KB of "- - - -" end in SIGSEGV). Parser events have none of these problems, so nodes
are counted in events first. A few anchors and merge keys are common in manifests and stay allowed:
an alias counts as all the nodes that it stands for, each time that it is used.
"""

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import yaml


class Limits(NamedTuple):
    """The limits for one text. `size` is in bytes. `nodes` counts the scalars, lists and mappings
    of a document, with aliases expanded. `depth` is the nesting of lists and mappings.
    """

    size: int
    nodes: int
    depth: int = 64


MANIFESTS: Final = Limits(size=64 << 20, nodes=500_000)
"""A file of Kubernetes objects: about 8,000 Services in one document."""
CONFIGURATION: Final = Limits(size=1 << 20, nodes=20_000)
"""A configuration file."""
KUBECONFIG: Final = Limits(size=4 << 20, nodes=100_000)
"""A kubeconfig: thousands of contexts, each with its certificates."""

YAML_ERRORS: Final = (
    yaml.YAMLError,
    ValueError,
    RecursionError,
    AttributeError,
    LookupError,
    TypeError,
    ArithmeticError,
)
"""What PyYAML raises for a text: its own errors and whatever its constructors raise for ``!!int
''``, ``!!bool x`` or ``!!timestamp x``."""

_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ObjectNode: Final = yaml.MappingNode
ListNode: Final = yaml.SequenceNode
_TAG: Final = "tag:yaml.org,2002:"
_START_EVENTS: Final = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_END_EVENTS: Final = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


class LimitExceededError(yaml.MarkedYAMLError):
    """The text exceeds a limit; `problem` says which one."""


DuplicateKeyHandler = Callable[[str, int], None]
"""Called with the name of a duplicate field and its line."""


def load_all(
    data: bytes, limits: Limits, on_duplicate: DuplicateKeyHandler | None = None
) -> Iterator[Any]:
    """Yields the documents of a text as plain values. Raises YAML_ERRORS, including
    LimitExceededError.
    """
    _check_size(data, limits)
    counter, builder = _NodeCounter(limits), _ValueBuilder(on_duplicate)
    for event in _parse_events(data):
        if isinstance(event, yaml.DocumentStartEvent):
            counter, builder = _NodeCounter(limits), _ValueBuilder(on_duplicate)
        elif isinstance(event, yaml.DocumentEndEvent):
            yield builder.value
        else:
            counter.add(event)
            builder.add(event)


def compose_all(data: bytes, limits: Limits) -> list[Any]:
    """Returns the documents of a text as nodes, which have line numbers. Raises YAML_ERRORS."""
    _check_size(data, limits)
    counter = _NodeCounter(limits)
    for event in _parse_events(data):
        if isinstance(event, yaml.DocumentStartEvent):
            counter = _NodeCounter(limits)
        else:
            counter.add(event)
    return list(yaml.compose_all(data, _LOADER))


def dump(value: Any, **style: Any) -> str:
    """Formats plain values as YAML that load_all() reads back. `style`: keyword arguments of
    yaml.dump.
    """
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style))


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes text that would otherwise be read as another type: PyYAML itself follows YAML 1.1."""

    def represent_str(self, data: str) -> Any:
        quotes = "'" if _needs_quotes(data) else None
        return self.represent_scalar(f"{_TAG}str", data, quotes)


_Dumper.add_representer(str, _Dumper.represent_str)


def _check_size(data: bytes, limits: Limits) -> None:
    if len(data) > limits.size:
        raise LimitExceededError(problem=f"{len(data)} bytes; the limit is {limits.size}")


def _parse_events(data: bytes) -> Iterator[Any]:
    return yaml.parse(data, _LOADER)


class _NodeCounter:
    """Counts the nodes of one document, and the nodes below each anchor."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nodes = 0
        self._anchors: dict[str, int] = {}
        self._stack: list[tuple[str | None, int]] = []  # (anchor, number of nodes before it)

    def add(self, event: Any) -> None:
        """Counts one event. Raises LimitExceededError."""
        if isinstance(event, yaml.ScalarEvent):
            self._nodes += 1
            if event.anchor:
                self._anchors[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            self._add_alias(event)
        elif isinstance(event, _START_EVENTS):
            self._stack.append((event.anchor, self._nodes))
            self._nodes += 1
            self._anchors.pop(event.anchor or "", None)
            if len(self._stack) > self._limits.depth:
                raise _limit_error(f"more than {self._limits.depth} levels deep", event)
        elif isinstance(event, _END_EVENTS):
            anchor, before = self._stack.pop()
            if anchor:
                self._anchors[anchor] = self._nodes - before
        if self._nodes > self._limits.nodes:
            what = f"more than {self._limits.nodes} nodes, with aliases expanded"
            raise _limit_error(what, event)

    def _add_alias(self, event: Any) -> None:
        if any(anchor == event.anchor for anchor, _ in self._stack):
            raise _limit_error(f"*{event.anchor} refers to a node that contains it", event)
        # An undefined anchor is reported by the composer, with its line.
        self._nodes += self._anchors.get(event.anchor, 1)


def _limit_error(problem: str, event: Any) -> LimitExceededError:
    return LimitExceededError(problem=problem, problem_mark=event.start_mark)


@dataclass(slots=True)
class _OpenCollection:
    """A list or mapping whose end has not come yet."""

    target: Any
    anchor: str | None
    key: str | None = None
    is_merge: bool = False  # the next value is merged into the mapping
    keys: set[str] = field(default_factory=set)


class _ValueBuilder:
    """Builds the value of one document from events."""

    def __init__(self, on_duplicate: DuplicateKeyHandler | None) -> None:
        self._on_duplicate = on_duplicate
        self._anchors: dict[str, Any] = {}
        self._stack: list[_OpenCollection] = []
        self.value: Any = None

    def add(self, event: Any) -> None:
        """Adds one event; the limits have been checked."""
        if isinstance(event, yaml.ScalarEvent):
            value = _parse_scalar(event)
            self._set_anchor(event.anchor, value)
            self._add_value(value, event)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise _yaml_error(f"found undefined alias {event.anchor!r}", event)
            self._add_value(self._anchors[event.anchor], event)
        elif isinstance(event, _START_EVENTS):
            target: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
            self._stack.append(_OpenCollection(target, event.anchor))
        elif isinstance(event, _END_EVENTS):
            collection = self._stack.pop()
            self._set_anchor(collection.anchor, collection.target)
            self._add_value(collection.target, event)

    def _set_anchor(self, anchor: str | None, value: Any) -> None:
        if anchor is not None:
            self._anchors[anchor] = value

    def _add_value(self, value: Any, event: Any) -> None:
        if not self._stack:
            self.value = value
            return
        top = self._stack[-1]
        if isinstance(top.target, list):
            top.target.append(value)
        elif top.is_merge:
            top.is_merge = False
            _merge(top.target, value, event)
        elif top.key is None:
            top.is_merge = _is_merge(event)
            if not top.is_merge:
                top.key = self._check_key(value, event, top.keys)
        else:
            top.target[top.key] = value
            top.key = None

    def _check_key(self, value: Any, event: Any, keys: set[str]) -> str:
        key = _format_key(value, event)
        if key in keys and self._on_duplicate is not None:
            self._on_duplicate(key, event.start_mark.line + 1)
        keys.add(key)
        return key


def _is_merge(event: Any) -> bool:
    if not isinstance(event, yaml.ScalarEvent) or event.value != "<<":
        return False
    return bool(event.implicit[0]) or event.tag == f"{_TAG}merge"


def _merge(target: dict[str, Any], value: Any, event: Any) -> None:
    sources = value if isinstance(value, list) else [value]
    if not all(isinstance(source, dict) for source in sources):
        raise _yaml_error("<< needs an object, or a list of objects", event)
    for source in reversed(sources):  # the first source wins
        target.update(source)


def _format_key(value: Any, event: Any) -> str:
    """Formats a key as Kubernetes' conversion to JSON does."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:g}"
    what = "null" if value is None else "a list or an object"
    raise _yaml_error(f"{what} cannot be a field name", event)


_KEYWORDS: Final[dict[str, Any]] = {
    form: value
    for spellings, value in (
        ("y yes true on", True),
        ("n no false off", False),
        ("null", None),
    )
    for spelling in spellings.split()
    for form in (spelling, spelling.capitalize(), spelling.upper())
} | {"": None, "~": None}
_NOT_FINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INT: Final = re.compile(r"[-+]?(?:0[bB][01]+|0[oO]?[0-7]+|0[xX][0-9a-fA-F]+|0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_FRACTION: Final = re.compile(r"\.[0-9](?:_?[0-9])*(?:[eE][-+]?[0-9](?:_?[0-9])*)?")
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt ][0-9].*)?")
_MAX_EXACT_INT: Final = 2**53
_BASES: Final = {"b": 2, "o": 8, "x": 16}


def _parse_scalar(event: Any) -> Any:
    """Returns the value of a scalar by its tag; an untagged plain scalar is resolved by its
    form.
    """
    tag, text = event.tag, event.value
    if tag is None and event.implicit[0]:
        return _parse_plain(text, event)
    if tag is None or tag == "!":
        return text
    kind = tag.removeprefix(_TAG)
    if kind == "binary":
        try:
            return base64.b64decode(text, validate=True).decode()
        except ValueError as error:
            raise _yaml_error("!!binary is not base64 of text", event) from error
    if kind not in ("bool", "int", "float", "null", "timestamp"):
        return text
    value = None if kind == "timestamp" else _parse_plain(text, event)
    is_kind = {
        "bool": isinstance(value, bool),
        "int": _is_int(text) and not isinstance(value, str),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "null": value is None,
        "timestamp": _DATE.fullmatch(text) is not None,
    }
    if not is_kind[kind]:
        raise _yaml_error(f"{text[:40]!r} is not a valid !!{kind}", event)
    return text if kind == "timestamp" else value


def _parse_plain(text: str, event: Any) -> Any:
    if text in _KEYWORDS:
        return _KEYWORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    if _NOT_FINITE.fullmatch(text):
        raise _yaml_error(f"{text} is a number that JSON cannot represent", event)
    if text[0] == ".":
        return _parse_float(text) if _FRACTION.fullmatch(text) else text
    if _is_int(text):
        return _parse_int(text)
    return _parse_float(text) if _FLOAT.fullmatch(text.replace("_", "")) else text


def _needs_quotes(text: str) -> bool:
    """Whether this text, unquoted, would be read as another type."""
    try:
        return not isinstance(_parse_plain(text, None), str)
    except yaml.YAMLError:
        return True


def _is_int(text: str) -> bool:
    """Whether it is a 64-bit integer. Larger decimal numbers are floats."""
    digits = text.replace("_", "")
    if not _INT.fullmatch(digits) or len(digits) > 70:
        return False
    return -(1 << 63) <= _parse_int(text) < (1 << 64)


def _parse_int(text: str) -> int:
    digits = text.replace("_", "")
    sign = -1 if digits[0] == "-" else 1
    digits = digits.lstrip("+-").lower()
    if digits[0] != "0" or len(digits) == 1:
        return sign * int(digits)
    base = _BASES.get(digits[1])
    return sign * (int(digits[2:], base) if base else int(digits, 8))


def _parse_float(text: str) -> int | float | str:
    """As in JSON: a float with an integral value is written as an integer."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        return text
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_INT else value


def _yaml_error(problem: str, event: Any) -> yaml.MarkedYAMLError:
    mark = None if event is None else event.start_mark
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
