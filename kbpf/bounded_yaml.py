# SPDX-License-Identifier: Apache-2.0
"""Parses YAML written by users: the dialect of Kubernetes, with limits checked before anything is
built.

Kubernetes tools convert YAML to JSON first (sigs.k8s.io/yaml, on go-yaml v2), and so does this
module: `yes` and `n` are booleans, `1e6` and `08` are numbers, `010` is eight, dates and base-60
numbers are text; keys are text; of fields with the same name, merged or not, the last one wins.
Unlike there, a tag has no effect but that a tagged scalar is text: nobody tags Kubernetes objects.

A few bytes of YAML can crash a parser: an alias that contains itself, aliases of aliases that
multiply (548 bytes make a billion nodes), and nesting, which overflows the C stack in libyaml's
composer (200 KB of "- - - -" end in SIGSEGV). Parser events have none of these problems, so values
are built from events, and their nodes counted. A few anchors and merge keys are common in manifests
and stay allowed: an alias counts as all the nodes that it stands for, each time that it is used.
"""

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

YAML_ERRORS: Final = (yaml.YAMLError, ValueError)
"""What a text can raise: PyYAML's errors, and those of its decoder and of int()."""

ObjectNode: Final = yaml.MappingNode
ListNode: Final = yaml.SequenceNode
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG: Final = "tag:yaml.org,2002:"

DuplicateKeyHandler = Callable[[str, int], None]
"""Called with the name of a duplicate field and its line."""


class LimitExceededError(yaml.MarkedYAMLError):
    """The text exceeds a limit; `problem` says which one."""


def load_all(data: bytes, limits: Limits, on_duplicate: DuplicateKeyHandler | None = None) -> Iterator[Any]:
    """Yields the documents of a text as plain values. Raises YAML_ERRORS, including
    LimitExceededError.
    """
    if len(data) > limits.size:
        raise LimitExceededError(problem=f"{len(data)} bytes; the limit is {limits.size}")
    builder = _Builder(limits, on_duplicate)
    for event in yaml.parse(data, _LOADER):
        if isinstance(event, yaml.DocumentStartEvent):
            builder = _Builder(limits, on_duplicate)
        elif isinstance(event, yaml.DocumentEndEvent):
            yield builder.value
        else:
            builder.add(event)


def compose_all(data: bytes, limits: Limits) -> list[Any]:
    """Returns the documents of a text as nodes, which have line numbers. Raises YAML_ERRORS."""
    for _ in load_all(data, limits):
        pass  # only for the limits
    return list(yaml.compose_all(data, _LOADER))


@dataclass(slots=True)
class _OpenCollection:
    """A list or mapping whose end has not come yet. `before`: the number of nodes before it."""

    target: Any
    anchor: str | None
    before: int
    key: str | None = None
    is_merge: bool = False  # the next value is merged into the mapping
    keys: set[str] = field(default_factory=set)


class _Builder:
    """Builds the value of one document from events, and counts its nodes."""

    def __init__(self, limits: Limits, on_duplicate: DuplicateKeyHandler | None) -> None:
        self._limits, self._on_duplicate = limits, on_duplicate
        self._nodes = 0
        self._anchors: dict[str, tuple[Any, int]] = {}  # value and number of nodes
        self._stack: list[_OpenCollection] = []
        self.value: Any = None

    def add(self, event: Any) -> None:
        """Adds one event. Raises YAML_ERRORS."""
        before = self._nodes
        if isinstance(event, yaml.ScalarEvent):
            self._nodes += 1
            value: Any = _parse_scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            value = self._follow_alias(event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._nodes += 1
            target: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
            self._stack.append(_OpenCollection(target, event.anchor, before))
            if len(self._stack) > self._limits.depth:
                raise _limit_error(f"more than {self._limits.depth} levels deep", event)
            return
        elif isinstance(event, yaml.CollectionEndEvent):
            collection = self._stack.pop()
            value, before = collection.target, collection.before
            if collection.anchor:
                self._anchors[collection.anchor] = value, self._nodes - before
        else:
            return
        if self._nodes > self._limits.nodes:
            what = f"more than {self._limits.nodes} nodes, with aliases expanded"
            raise _limit_error(what, event)
        if isinstance(event, yaml.ScalarEvent) and event.anchor:
            self._anchors[event.anchor] = value, 1
        self._add_value(value, event)

    def _follow_alias(self, event: Any) -> Any:
        if any(collection.anchor == event.anchor for collection in self._stack):
            raise _limit_error(f"*{event.anchor} refers to a node that contains it", event)
        if event.anchor not in self._anchors:
            raise _yaml_error(f"found undefined alias {event.anchor!r}", event)
        value, nodes = self._anchors[event.anchor]
        self._nodes += nodes
        return value

    def _add_value(self, value: Any, event: Any) -> None:
        if not self._stack:
            self.value = value
            return
        top = self._stack[-1]
        if isinstance(top.target, list):
            top.target.append(value)
        elif top.is_merge:
            top.is_merge = False
            sources = value if isinstance(value, list) else [value]
            if not all(isinstance(source, dict) for source in sources):
                raise _yaml_error("<< needs an object, or a list of objects", event)
            for source in reversed(sources):  # the first source wins
                top.target.update(source)
        elif top.key is not None:
            top.target[top.key] = value
            top.key = None
        elif value == "<<" and event.implicit[0]:
            top.is_merge = True
        else:
            top.key = key = _format_key(value, event)
            if key in top.keys and self._on_duplicate is not None:
                self._on_duplicate(key, event.start_mark.line + 1)
            top.keys.add(key)


def _limit_error(problem: str, event: Any) -> LimitExceededError:
    return LimitExceededError(problem=problem, problem_mark=event.start_mark)


def _yaml_error(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _format_key(value: Any, event: Any) -> str:
    """Formats a key as Kubernetes' conversion to JSON does."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | int):
        return str(value)
    what = "null" if value is None else "a list or an object"
    raise _yaml_error(f"{what} cannot be a field name", event)


# ---- scalars -------------------------------------------------------------------------------------

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
_INT: Final = re.compile(r"[-+]?(?:0[bB][01]+|0[oO]?[0-7]+|0[xX][0-9a-fA-F]+|0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_OCTAL_PREFIX: Final = re.compile(r"^([-+]?)0[oO]?(?=[0-7])")
_MAX_DIGITS: Final = 70  # of a 64-bit integer, in binary with sign and prefix
_MAX_EXACT_INT: Final = 2**53


def _parse_scalar(event: Any) -> Any:
    """The value of a scalar. Quoted and tagged ones are text."""
    is_plain = event.tag is None and event.implicit[0]
    return _parse_plain(event.value) if is_plain else event.value


def _parse_plain(text: str) -> Any:
    if text in _KEYWORDS:
        return _KEYWORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    digits = text.replace("_", "")
    if _INT.fullmatch(digits) and len(digits) <= _MAX_DIGITS:
        number = int(_OCTAL_PREFIX.sub(r"\g<1>0o", digits), 0)
        if -(1 << 63) <= number < (1 << 64):
            return number
    return _parse_float(text) if _FLOAT.fullmatch(digits) else text


def _parse_float(text: str) -> int | float | str:
    """As in JSON: a float with an integral value is written as an integer."""
    value = float(text.replace("_", ""))
    if value in (float("inf"), float("-inf")):
        return text
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_INT else value


# ---- writing -------------------------------------------------------------------------------------


def dump(value: Any, **style: Any) -> str:
    """Formats plain values as YAML that load_all() reads back. `style`: keyword arguments of
    yaml.dump.
    """
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style))


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes text that would otherwise be read as another type: PyYAML itself follows YAML 1.1."""

    def represent_str(self, data: str) -> Any:
        quotes = None if isinstance(_parse_plain(data), str) else "'"
        return self.represent_scalar(f"{_TAG}str", data, quotes)


_Dumper.add_representer(str, _Dumper.represent_str)
