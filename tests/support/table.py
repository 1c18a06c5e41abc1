# SPDX-License-Identifier: Apache-2.0
"""Tables of tests as text: a line is a row."""

from collections.abc import Callable, Iterable, Mapping
from enum import EnumMeta
from itertools import zip_longest
from typing import Any, TypeVar, get_type_hints

import pytest

T = TypeVar("T")


def pairs(text: str) -> list[tuple[str, str]]:
    """Rows of two texts: `what goes in → what comes out`."""
    rows = [line.partition(" →") for line in text.splitlines()]
    return [(before, after.removeprefix(" ")) for before, _, after in rows]


def table(row: type[T], text: str) -> list[T]:
    """A `row` (a NamedTuple) for each line, whose cells are separated by ``|``. A cell is read as its field's type
    says: a number, yes or no, the name of an enum's member, or text. Cells may be left out at the end of a line if the
    fields have defaults.
    """
    readers = [_reader(kind) for kind in get_type_hints(row).values()]
    lines = (f"{line} ".split(" | ") for line in text.splitlines() if line.strip())
    return [row(*(read(cell.strip()) for read, cell in zip(readers, cells, strict=False))) for cells in lines]


def each_row(rows: Iterable[Any], marks: Callable[[Any], Any] = lambda _: ()) -> pytest.MarkDecorator:
    """A test's mark: it runs once for each `row`, which it gets as its argument, with the row's first cell as id and
    with these marks.
    """
    return pytest.mark.parametrize("row", [pytest.param(row, marks=marks(row), id=row[0]) for row in rows])


def each_cells(names: str, text: str, **kinds: Any) -> pytest.MarkDecorator:
    """A test's mark: it runs once for each line ``id | cell | cell``, whose cells it gets as arguments with these
    names. A cell is text, which may be left out at the end of a line, or read as its kind says: as by table(), or by
    a function.
    """
    rows = (f"{line} ".split(" | ", 1) for line in text.splitlines() if line.strip())
    return pytest.mark.parametrize(
        names, [pytest.param(*_read_cells(names, *cells, **kinds), id=name.strip()) for name, *cells in rows]
    )


def each_line(names: str, text: str, **kinds: Any) -> pytest.MarkDecorator:
    """The same for lines whose first cell is an argument, too."""
    return pytest.mark.parametrize(
        names, [_read_cells(names, line, **kinds) for line in text.splitlines() if line.strip()]
    )


def _read_cells(names: str, line: str = "", **kinds: Any) -> list[Any]:
    cells = zip_longest(names.split(", "), f"{line} ".split(" | "), fillvalue="")
    return [_reader(kinds.get(name, str))(cell.strip()) for name, cell in cells]


def each_pair(names: str, text: str) -> pytest.MarkDecorator:
    """A test's mark: it runs once for each of the pairs(), which it gets as arguments with these two names."""
    return pytest.mark.parametrize(names, pairs(text))


def each_named_pair(names: str, text: str) -> pytest.MarkDecorator:
    """The same for rows ``name: what goes in → what comes out``; the name is the id."""
    rows = [(given.partition(": "), out) for given, out in pairs(text)]
    return pytest.mark.parametrize(
        names, [pytest.param(given, out, id=name.rstrip(":")) for (name, _, given), out in rows]
    )


def each_case(names: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """A test's mark: it runs once for each of the cases, whose keys are the ids, and gets its value or values as
    arguments with these names.
    """
    return pytest.mark.parametrize(names, list(cases.values()), ids=list(cases))


def _reader(kind: Any) -> Callable[[str], Any]:
    if kind is bool:
        return {"yes": True, "no": False}.__getitem__
    return kind.__members__.__getitem__ if isinstance(kind, EnumMeta) else kind if callable(kind) else str
