# SPDX-License-Identifier: Apache-2.0
"""What a view shows, before it has a format."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kbpf.views.columns import Column


@dataclass(frozen=True, slots=True)
class Page:
    """Rows with columns, a text, or both.

    - `text`: formats the text for `-o wide` (True) or `-o table`; it is above the rows.
    - `summary`: what JSON and YAML show instead of the text. With rows, these are its last field.
    - `notes`: lines for stderr, so that they do not get into a pipe; "" is none.
    - `empty`: the note if there is nothing to list; "" if there is.
    - `ok`: false if the command has to fail.
    """

    rows: Iterable[Any] = ()
    columns: Sequence[Column] = ()
    text: Callable[[bool], str] | None = None
    summary: Any = None
    notes: tuple[str, ...] = ()
    empty: str = ""
    ok: bool = True

    def sorted_by(self, title: str) -> "Page":
        """With the rows in the order of this column, numbers by value. Raises KeyError if no
        column has this title.
        """
        column = {column.title.lower(): column for column in self.columns}[title.lower()]
        return replace(self, rows=sorted(self.rows, key=lambda row: _sort_key(column.text(row))))

    def with_notes(self, notes: tuple[str, ...]) -> "Page":
        return replace(self, notes=notes)


def _sort_key(text: str) -> list[tuple[int, str]]:
    """Orders ``9`` before ``10``, also within a text."""
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def list_page(rows: Sequence[Any], columns: Sequence[Column], namespace: str = "") -> Page:
    """A list, with the note that kubectl prints if it is empty."""
    return Page(rows, columns, empty="" if rows else format_no_resources(namespace))


def format_no_resources(namespace: str = "") -> str:
    """What kubectl prints for an empty list."""
    return f"No resources found in {namespace} namespace." if namespace else "No resources found."


def format_more(count: int, limit: int, noun: str) -> str:
    """How many rows `--limit` has left out; "" if none."""
    return f"and {count - limit} more {noun}" if 0 < limit < count else ""
