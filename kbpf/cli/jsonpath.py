# SPDX-License-Identifier: Apache-2.0
"""The JSONPath templates of kubectl (-o jsonpath, -o custom-columns, --field-selector).

The part that kubectl documents and people use: ``{.items[*].name}``, ``[0]``, ``[-1]``, ``[0:2]``,
``['name']``, ``.*``, ``..name``, ``[?(@.state=="closed")]``, ``{range PATH}...{end}`` and
``{"text\\n"}``. Anything else is an error. Libraries on PyPI have RFC 9535 instead, which has no
templates.
"""

import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kbpf.errors import escape_unprintable

Step = Callable[[Any], Iterator[Any]]
"""A step of a path: the values that it finds in a value."""
Path = tuple[Step, ...]

OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt,
    ">": operator.gt,
}  # fmt: skip

LISTS: Final = (list, tuple)
"""msgspec.to_builtins() leaves tuples as they are."""

FIELD: Final = re.compile(r"((?:[\w$/-]|\\.)+)")
QUOTED: Final = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""")
SLICE: Final = re.compile(r"(-?\d*):(-?\d*)(?::(\d+))?")
FILTER: Final = re.compile(r"\?\(\s*@(.*?)\s*(?:(==|!=|<=|>=|<|>)\s*(.+?)\s*)?\)")
ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}


class JsonPathError(ValueError):
    """A template that cannot be used; the text says why."""


# ---- paths ---------------------------------------------------------------------------------------


def parse_path(text: str) -> Path:
    """Parses ``.items[*].name``; the first dot, and ``$`` or ``@`` before it, may be missing."""
    rest = text.strip()
    if rest.startswith(("$", "@")):
        rest = rest[1:]
    elif rest and rest[0] not in ".[":
        rest = f".{rest}"
    steps: list[Step] = []
    while rest:
        if rest.startswith("["):
            inside, rest = _split_brackets(rest, text)
            steps.append(_parse_brackets(inside, text))
        elif rest == "." and not steps:
            rest = ""
        elif rest.startswith((".*", "..*")):
            steps += [_descend] if rest.startswith("..") else []
            steps.append(_children)
            rest = rest.lstrip(".").removeprefix("*")
        elif match := FIELD.match(rest.lstrip(".")):
            dots = len(rest) - len(rest.lstrip("."))
            if dots not in (1, 2):
                raise JsonPathError(f"{text} is not a path that kbpf understands")
            steps += [_descend] if dots == 2 else []
            steps.append(_field(re.sub(r"\\(.)", r"\1", match[1])))
            rest = rest[dots + match.end() :]
        else:
            raise JsonPathError(f"{text} is not a path that kbpf understands")
    return tuple(steps)


def first_field(text: str) -> str:
    """The name of the field with which a path begins; "" if it begins in another way."""
    match = FIELD.match(text.strip().lstrip("$@").removeprefix("."))
    return match[1] if match else ""


def evaluate(path: Sequence[Step], value: Any) -> list[Any]:
    """All values at this path. A missing field gives none, as with kubectl."""
    values = [value]
    for step in path:
        values = [result for each in values for result in step(each)]
    return values


def _split_brackets(rest: str, text: str) -> tuple[str, str]:
    """What is inside the brackets, and what follows them."""
    depth, position = 0, 0
    while position < len(rest):
        if match := QUOTED.match(rest, position):
            position = match.end()
            continue
        depth += {"[": 1, "]": -1}.get(rest[position], 0)
        position += 1
        if not depth:
            return rest[1 : position - 1].strip(), rest[position:]
    raise JsonPathError(f"{text} has a [ without ]")


def _parse_brackets(inside: str, text: str) -> Step:
    if inside == "*":
        return _children
    if match := FILTER.fullmatch(inside):
        return _filter(match[1], match[2], match[3], text)
    if match := SLICE.fullmatch(inside):
        start, stop, step = (int(part) if part else None for part in match.groups())
        if step == 0:
            raise JsonPathError(f"{text} has a slice with step 0")
        return lambda value: iter(_elements(value)[start:stop:step])
    steps = [_parse_index(part.strip(), text) for part in inside.split(",")]
    return lambda value: (result for step in steps for result in step(value))


def _parse_index(part: str, text: str) -> Step:
    if re.fullmatch(r"-?\d+", part):
        return _index(int(part), text)
    if match := QUOTED.fullmatch(part):
        return _field(unquote(match))
    raise JsonPathError(f"{text} has [{part}], which kbpf does not understand")


def unquote(match: re.Match[str]) -> str:
    """The text of a match of QUOTED."""
    body = match[1] if match[1] is not None else match[2]
    return re.sub(r"\\(.)", lambda escape: ESCAPES.get(escape[1], escape[1]), body)


def _field(name: str) -> Step:
    def step(value: Any) -> Iterator[Any]:
        if isinstance(value, dict) and name in value:
            yield value[name]

    return step


def _index(number: int, text: str) -> Step:
    def step(value: Any) -> Iterator[Any]:
        if isinstance(value, LISTS):
            if not -len(value) <= number < len(value):
                raise JsonPathError(f"{text}: there is no [{number}], the list has {len(value)}")
            yield value[number]

    return step


def _children(value: Any) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else _elements(value)


def _elements(value: Any) -> Sequence[Any]:
    return value if isinstance(value, LISTS) else ()


def _descend(value: Any) -> Iterator[Any]:
    yield value
    for child in _children(value):
        yield from _descend(child)


def _filter(path_text: str, sign: str | None, literal: str | None, text: str) -> Step:
    path = parse_path(path_text or ".")
    if sign is None or literal is None:
        return lambda value: (each for each in _elements(value) if evaluate(path, each))
    compare, wanted = OPERATORS[sign], _parse_literal(literal, text)

    def matches(element: Any) -> bool:
        try:
            return any(compare(each, wanted) for each in evaluate(path, element))
        except TypeError:  # a number and a string have no order
            return False

    return lambda value: filter(matches, _elements(value))


def _parse_literal(literal: str, text: str) -> Any:
    if match := QUOTED.fullmatch(literal):
        return unquote(match)
    try:
        return json.loads(literal)
    except ValueError:
        raise JsonPathError(f"{text} compares with {literal}, which needs quotes") from None


# ---- templates -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """``{range PATH}...{end}``: the body for each value."""

    path: Path
    body: list["Node"]


Node = str | Path | Range
"""Literal text, ``{PATH}``, or a range."""


def parse_template(text: str) -> list[Node]:
    """Parses a template. Without braces it is one path. Raises JsonPathError."""
    if "{" not in text:
        return [parse_path(text)]
    bodies: list[list[Node]] = [[]]
    for literal, code in _split_braces(text):
        if literal:
            bodies[-1].append(literal)
        if code is None:
            continue
        if code.startswith("range "):
            nested = Range(parse_path(code.removeprefix("range ")), [])
            bodies[-1].append(nested)
            bodies.append(nested.body)
        elif code == "end":
            if len(bodies) == 1:
                raise JsonPathError("{end} without {range}")
            bodies.pop()
        elif match := QUOTED.fullmatch(code):
            bodies[-1].append(unquote(match))
        else:
            bodies[-1].append(parse_path(code))
    if len(bodies) > 1:
        raise JsonPathError("{range} without {end}")
    return bodies[0]


def _split_braces(text: str) -> Iterator[tuple[str, str | None]]:
    """Yields each literal text with the code in the braces behind it; None at the end."""
    position = 0
    while (start := text.find("{", position)) >= 0:
        end = start + 1
        while end < len(text) and text[end] != "}":
            match = QUOTED.match(text, end)
            end = match.end() if match else end + 1
        if end >= len(text):
            raise JsonPathError("a { without }")
        code = text[start + 1 : end].strip()
        if not code:
            raise JsonPathError("{} is empty")
        yield text[position:start], code
        position = end + 1
    yield text[position:], None


def render(nodes: Sequence[Node], document: Any) -> Iterator[str]:
    """Yields the text of a template, with unprintable characters of the document escaped."""
    for node in nodes:
        if isinstance(node, str):
            yield node
        elif isinstance(node, Range):
            for value in evaluate(node.path, document):
                yield from render(node.body, value)
        else:
            yield " ".join(map(format_value, evaluate(node, document)))


def format_value(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape_unprintable(text)
