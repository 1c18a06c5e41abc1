# SPDX-License-Identifier: Apache-2.0
"""What a view shows, before it has a format."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from kbpf.views.columns import Column, parse_quantity

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

    def sorted_by(self, title: str) -> "Page":
        """With the rows in the order of this column, numbers by value. Raises KeyError if no
        column has this title.
        """
        column = {column.title.lower(): column for column in self.columns}[title.lower()]
        return replace(self, rows=sorted(self.rows, key=lambda row: _sort_key(column.text(row))))

    def with_empty(self, empty: str) -> "Page":
        return replace(self, empty=empty)

    def with_notes(self, notes: tuple[str, ...]) -> "Page":
        return replace(self, notes=notes)

    def refined(
        self, keep: Callable[[Any], bool] | None = None, sort_by: str = "", limit: int = 0
    ) -> "Page":
        """With the rows that `keep` accepts, ordered by a column, and at most `limit` (0: all) of
        these. Raises KeyError if no column has the title `sort_by`.
        """
        page = self
        if keep is not None:
            page = replace(page, rows=list(filter(keep, page.rows)))
            if not page.rows and not page.empty:
                page = replace(page, empty=NO_RESOURCES)
        if sort_by:
            page = page.sorted_by(sort_by)
        if limit:
            total = len(page.rows) if isinstance(page.rows, Sequence) else page.total
            more = f"and {total - limit} more rows" if total > limit else ""
            page = replace(page, rows=islice(page.rows, limit), notes=(more, *page.notes))
        return page


def _sort_key(text: str) -> list[tuple[float, str]]:
    """Orders ``9`` before ``10``, also within a text, and durations and sizes by value."""
    if (value := parse_quantity(text)) is not None:
        return [(value, "")]
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts if part]


def list_page(kind: Kind, rows: Sequence[Any], columns: Sequence[Column]) -> Page:
    """A list, with the note that kubectl prints if it is empty."""
    return Page(kind, rows, columns, empty="" if rows else NO_RESOURCES)


def namespace_of(service: str) -> tuple[str, ...]:
    """The namespace of ``namespace/name:port``; none of a Service without a name."""
    namespace, slash, _ = service.partition("/")
    return (namespace,) if slash else ()


NO_RESOURCES: Final = "No resources found."
"""What kubectl prints for an empty list."""
