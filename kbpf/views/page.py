# SPDX-License-Identifier: Apache-2.0
"""What a view shows: rows with columns, a text, or both. A view is a row type and its columns.
`cli/render.py` turns both into a table, JSON or YAML, so all formats show the same data.

Output is never coloured or truncated, so it can be piped. Unprintable characters are escaped,
because names and messages from objects must not be able to control the terminal.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, Final

import msgspec

from kbpf.errors import escape_unprintable

# ---- columns -------------------------------------------------------------------------------------


def format_value(value: Any) -> str:
    """``yes`` or ``no``; the items of a list; ``-`` if there are none, for None and for ""."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case tuple():
            return ", ".join(value) or "-"
    return str(value) or "-"


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `value`: a row's field, or ``field.field``, whose value `format` makes a text
    (``-`` for None); or a function that makes the text of a row. `wide`: shown with `-o wide` only.
    `right`: aligned to the right, for numbers. `by`: the field that orders rows, if `value` is none.
    """

    title: str
    value: str | Callable[[Any], str]
    format: Callable[[Any], str] = format_value
    wide: bool = False
    right: bool = False
    by: str = ""

    def text(self, row: Any) -> str:
        """The text of the cell."""
        if not isinstance(self.value, str):
            return self.value(row)
        value = _read_field(row, self.value)
        return "-" if value is None else self.format(value)

    def sort_key(self, row: Any) -> list[tuple[float, str]]:
        """Orders numbers by value, also ``9`` before ``10`` within a text."""
        path = self.by or self.value
        value = _read_field(row, path) if isinstance(path, str) else None
        if isinstance(value, int | float):
            return [(value, "")]
        parts = re.split(r"(\d+)", self.text(row))
        return [(int(part), "") if part.isdigit() else (-1, part) for part in parts if part]


def _read_field(row: Any, path: str) -> Any:
    for name in path.split("."):
        row = None if row is None else getattr(row, name)
    return row


def format_host_port(address: str, port: int) -> str:
    """``1.2.3.4:80`` or ``[fd00::1]:80``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def format_duration(seconds: float) -> str:
    """At most two units: ``3s``, ``4m05s``, ``2h03m``, ``5d01h``. Fractions are cut off."""
    total_seconds = int(seconds)
    if total_seconds < 60:
        return f"{total_seconds}s"
    if total_seconds < 3600:
        return f"{total_seconds // 60}m{total_seconds % 60:02}s"
    if total_seconds < 86_400:
        return f"{total_seconds // 3600}h{total_seconds % 3600 // 60:02}m"
    return f"{total_seconds // 86_400}d{total_seconds % 86_400 // 3600:02}h"


SIZE_UNITS: Final = ("B", "KiB", "MiB", "GiB")


def format_size(count: int | None) -> str:
    """``812B``, ``64KiB``, ``1.5MiB``; ``-`` for None."""
    if count is None:
        return "-"
    value = float(count)
    for unit in SIZE_UNITS[:-1]:
        if value < 1024:
            return f"{value:.0f}{unit}" if value >= 10 or unit == "B" else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}GiB"


def same_fields(row_type: type[msgspec.Struct], source: object) -> dict[str, Any]:
    """The fields of a row that `source` has under the same names."""
    return {name: getattr(source, name) for name in row_type.__struct_fields__ if hasattr(source, name)}


# ---- pages ---------------------------------------------------------------------------------------

API_VERSION: Final = "kbpf.io/v1alpha1"
"""`apiVersion` of all documents that commands print as JSON or YAML."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a JSON or YAML document is; `kbpf schema` describes it from these types.

    - `name`: its field `kind`: ``Status``; of a list ``ServiceList``.
    - `item`: the struct of a row in `items`, its last field; None if it is no list.
    - `summary`: the struct of its other fields; None if there are none.
    - `item_name`: the name of an item, for `-o name`, or ""; None if items have none.
    - `namespaces`: those of the Services of an item, for `-n`; None if items are of no Service.
    """

    name: str
    item: type | None = None
    summary: type | None = None
    item_name: Callable[[Any], str] | None = None
    namespaces: Callable[[Any], Iterable[str]] | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Rows with columns, a text, or both.

    - `kind`: what the JSON or YAML document is.
    - `rows`: the items of a list. Without `columns` only the text shows them.
    - `text`: formats the text for `-o wide` (True) or `-o table`; it is above the rows.
    - `summary`: what JSON and YAML show instead of the text, above the items.
    - `total`: the number of rows, if they are no sequence.
    - `notes`: lines for stderr, so that they do not get into a pipe; "" is none.
    - `empty`: the note if there is nothing to list; "" if there is.
    - `ok`: false if the command has to fail.
    """

    kind: Kind
    rows: Iterable[Any] = ()
    columns: Sequence[Column] = ()
    text: Callable[[bool], str] | None = None
    summary: Any = None
    total: int = 0
    notes: tuple[str, ...] = ()
    empty: str = ""
    ok: bool = True


def list_page(kind: Kind, rows: Sequence[Any], columns: Sequence[Column], notes: Iterable[str] = ()) -> Page:
    """A list, with the note that kubectl prints if it is empty."""
    return Page(kind, rows, columns, notes=tuple(notes), empty="" if rows else NO_RESOURCES)


def namespace_of(service: str) -> tuple[str, ...]:
    """The namespace of ``namespace/name:port``; none of a Service without a name."""
    namespace, slash, _ = service.partition("/")
    return (namespace,) if slash else ()


NO_RESOURCES: Final = "No resources found."
"""What kubectl prints for an empty list."""


# ---- text ----------------------------------------------------------------------------------------

GAP = "   "
SEPARATOR = "\0"
"""Separates the packed cells of a row. escape_unprintable() removes it from texts."""
CHUNK_ROWS = 512
"""Number of rows that are formatted and measured at a time."""


def stream_table(
    values: Iterable[Any], columns: Sequence[Column], wide: bool, titles: bool = True, limit: int = 0
) -> Iterator[str]:
    """Yields a line of `titles`, then the lines of each row. A column is as wide as its longest cell,
    or narrower if that keeps to `limit`; 0: none.
    """
    visible = [c for c in columns if wide or not c.wide]
    widths = [len(c.title) for c in visible]
    texts = [c.text for c in visible]
    packed = [SEPARATOR.join(c.title for c in visible)]
    rows = iter(values)
    while chunk := [[escape_unprintable(text(row)) for text in texts] for row in islice(rows, CHUNK_ROWS)]:
        chunk_widths = [max(map(len, cells)) for cells in zip(*chunk, strict=True)]
        widths = list(map(max, widths, chunk_widths))
        packed.extend(map(SEPARATOR.join, chunk))
    if limit:
        widths = fit_widths(widths, _longest_words(packed, len(widths)), limit)
    line_format = GAP.join(f"{{:{'>' if c.right else '<'}{w}}}" for c, w in zip(visible, widths, strict=True))
    for line in packed[not titles :]:
        for parts in zip_longest(*map(wrap, line.split(SEPARATOR), widths), fillvalue=""):
            yield line_format.format(*parts).rstrip() + "\n"


def _longest_words(packed: Iterable[str], count: int) -> list[int]:
    """The length of the longest word of each of the `count` columns."""
    longest = [0] * count
    for line in packed:
        words = (max(map(len, cell.split()), default=0) for cell in line.split(SEPARATOR))
        longest = list(map(max, longest, words))
    return longest


def fit_widths(widths: Sequence[int], words: Sequence[int], limit: int) -> list[int]:
    """Narrows columns until a line has `limit` characters, those with most room first, but none
    below its longest word (`words`). If that is not enough, the terminal folds the line.
    """
    fitted = list(widths)
    excess = sum(fitted) + len(GAP) * (len(fitted) - 1) - limit
    while excess > 0:
        room, index = max((fitted[i] - words[i], i) for i in range(len(fitted)))
        if room <= 0:
            break
        step = min(excess, max(1, room // 2))
        fitted[index] -= step
        excess -= step
    return fitted


def wrap(cell: str, limit: int) -> list[str]:
    """The lines of a cell; words stay whole, so that they can be copied."""
    if len(cell) <= limit:
        return [cell]
    return textwrap.wrap(cell, limit, break_long_words=False, break_on_hyphens=False) or [""]


def format_table(rows: Iterable[Any], columns: Sequence[Column], wide: bool = False) -> str:
    """A table as text, without the last newline."""
    return "".join(stream_table(rows, columns, wide)).removesuffix("\n")


def indent(text: str, prefix: str = "  ") -> str:
    """Prefixes every line, and escapes unprintable characters."""
    return "\n".join(prefix + escape_unprintable(line) for line in text.split("\n"))


def format_facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Lines of `name   value`, with the values aligned."""
    pair_list = list(pairs)
    width = max(len(name) for name, _ in pair_list)
    return "\n".join(f"{name.ljust(width)}{GAP}{escape_unprintable(value)}".rstrip() for name, value in pair_list)
