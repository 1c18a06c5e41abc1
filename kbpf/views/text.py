# SPDX-License-Identifier: Apache-2.0
"""Tables and lines of text. Output is never coloured or truncated, so it can be piped.

Unprintable characters are escaped, because names and messages from objects must not be able to
control the terminal.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from kbpf.errors import escape_unprintable
from kbpf.views.columns import Column

GAP = "   "


def format_table(
    rows: Iterable[Any], columns: Sequence[Column], wide: bool = False, titles: bool = True
) -> str:
    """A line of `titles`, then one line per row. A column is as wide as its longest cell."""
    visible = [c for c in columns if wide or not c.wide]
    lines = [
        *([[c.title for c in visible]] if titles else []),
        *([escape_unprintable(c.text(row)) for c in visible] for row in rows),
    ]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        GAP.join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, visible, strict=True)
        ).rstrip()
        for line in lines
    )


def indent(text: str, prefix: str = "  ") -> str:
    """Prefixes every line, and escapes unprintable characters."""
    return "\n".join(prefix + escape_unprintable(line) for line in text.split("\n"))


def format_facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Lines of `name   value`, with the values aligned."""
    pair_list = list(pairs)
    width = max(len(name) for name, _ in pair_list)
    return "\n".join(
        f"{name.ljust(width)}{GAP}{escape_unprintable(value)}".rstrip() for name, value in pair_list
    )
