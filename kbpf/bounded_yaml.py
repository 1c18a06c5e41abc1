"""YAML that users write: one dialect, and limits that are checked before anything is built from it.

The dialect is that of Kubernetes, whose tools convert YAML to JSON first (sigs.k8s.io/yaml, which
reads by go-yaml v2): `yes` and `n` are booleans, `1e6` and `08` numbers, `010` is eight, dates and
numbers of base 60 are text; keys are text; a field, merged or not, that comes later replaces one of
that name; a tag that nobody knows is left out of account; what JSON cannot hold is an error.

A few bytes of YAML can cost a parser its process: a reference that contains itself, references to
references that multiply (548 bytes are a billion nodes), and nesting, at which libyaml's composer
overflows the C stack (200 KB of "- - - -" end the process with SIGSEGV). Parser events are free of
all three, so they are counted first. A few anchors and merge keys are everyday in manifests and
stay allowed: what a reference stands for is counted each time that it is used.
"""

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import yaml


class Limits(NamedTuple):
    """What one text may hold at most. `nodes`: scalars, lists and mappings of one document, with
    those that its references stand for. `depth`: lists and mappings inside of each other.
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
"""What PyYAML raises for a text: beside its own, whatever its constructors meet in ``!!int ''``,
``!!bool x`` or ``!!timestamp x``."""

_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ObjectNode: Final = yaml.MappingNode
ListNode: Final = yaml.SequenceNode
_TAG: Final = "tag:yaml.org,2002:"
_START_EVENTS: Final = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_END_EVENTS: Final = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


class LimitExceededError(yaml.MarkedYAMLError):
    """The text is beyond a limit; `problem` says which one."""


DuplicateKeyHandler = Callable[[str, int], None]
"""Called with a field that stands twice in an object, and with its line."""


def load_all(
    data: bytes, limits: Limits, on_duplicate: DuplicateKeyHandler | None = None
) -> Iterator[Any]:
    """The documents of a text as plain values. Raises NOT_YAML, of which TooLarge is one."""
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
    """The documents of a text as nodes, which know their lines. Raises NOT_YAML."""
    _check_size(data, limits)
    counter = _NodeCounter(limits)
    for event in _parse_events(data):
        if isinstance(event, yaml.DocumentStartEvent):
            counter = _NodeCounter(limits)
        else:
            counter.add(event)
    return list(yaml.compose_all(data, _LOADER))


def dump(value: Any, **style: Any) -> str:
    """Plain values as YAML that load_all() reads as the same values. `style`: as for yaml.dump."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style))


class _Dumper(yaml.SafeDumper):
    """Puts text into quotes that would be read as something else: PyYAML knows YAML 1.1."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        quotes = "'" if _needs_quotes(data) else None
        return self.represent_scalar(f"{_TAG}str", data, quotes)


_Dumper.add_representer(str, _Dumper.represent_str)


def _check_size(data: bytes, limits: Limits) -> None:
    if len(data) > limits.size:
        raise LimitExceededError(problem=f"{len(data)} bytes; the limit is {limits.size}")


def _parse_events(data: bytes) -> Iterator[Any]:
    return yaml.parse(data, _LOADER)


class _NodeCounter:
    """The nodes of one document so far, and how many each anchor stands for."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nodes = 0
        self._anchors: dict[str, int] = {}
        self._stack: list[tuple[str | None, int]] = []  # anchor, and the nodes before it

    def add(self, event: Any) -> None:
        """Count one event. Raises TooLarge."""
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
            what = (
                f"more than {self._limits.nodes} nodes, references counted as what they stand for"
            )
            raise _limit_error(what, event)

    def _add_alias(self, event: Any) -> None:
        if any(anchor == event.anchor for anchor, _ in self._stack):
            raise _limit_error(f"*{event.anchor} refers to something that contains it", event)
        # An anchor that does not exist is an error of the composer, with its line.
        self._nodes += self._anchors.get(event.anchor, 1)


def _limit_error(problem: str, event: Any) -> LimitExceededError:
    return LimitExceededError(problem=problem, problem_mark=event.start_mark)


@dataclass(slots=True)
class _OpenCollection:
    """A list or an object that is not complete yet."""

    target: Any
    anchor: str | None
    key: str | None = None
    is_merge: bool = False  # what comes next goes into the object itself
    keys: set[str] = field(default_factory=set)


class _ValueBuilder:
    """The value of one document."""

    def __init__(self, on_duplicate: DuplicateKeyHandler | None) -> None:
        self._on_duplicate = on_duplicate
        self._anchors: dict[str, Any] = {}
        self._stack: list[_OpenCollection] = []
        self.value: Any = None

    def add(self, event: Any) -> None:
        """Takes one event, which is within the limits."""
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
    for source in reversed(sources):  # the first one counts
        target.update(source)


def _format_key(value: Any, event: Any) -> str:
    """A key as Kubernetes' conversion to JSON writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:g}"
    what = "null" if value is None else "a list or an object"
    raise _yaml_error(f"{what} is no name of a field", event)


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
    """The value of a scalar by its tag, or as it looks where it has none and no quotes."""
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
            raise _yaml_error("!!binary holds no base64 of text", event) from error
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
        raise _yaml_error(f"{text[:40]!r} is no !!{kind}", event)
    return text if kind == "timestamp" else value


def _parse_plain(text: str, event: Any) -> Any:
    if text in _KEYWORDS:
        return _KEYWORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    if _NOT_FINITE.fullmatch(text):
        raise _yaml_error(f"{text} is no number that JSON can hold", event)
    if text[0] == ".":
        return _parse_float(text) if _FRACTION.fullmatch(text) else text
    if _is_int(text):
        return _parse_int(text)
    return _parse_float(text) if _FLOAT.fullmatch(text.replace("_", "")) else text


def _needs_quotes(text: str) -> bool:
    """Whether this text, without quotes, is no text."""
    try:
        return not isinstance(_parse_plain(text, None), str)
    except yaml.YAMLError:
        return True


def _is_int(text: str) -> bool:
    """Whether it is an integer of 64 bits. Other ones are floats, if they are decimal."""
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
    """As JSON has it: a float that is a whole number is written like one."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        return text
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_INT else value


def _yaml_error(problem: str, event: Any) -> yaml.MarkedYAMLError:
    mark = None if event is None else event.start_mark
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
