"""Rows to text: aligned columns, JSON or YAML. The same rows in every format.

Nothing is coloured or cut, so what is shown can be piped. JSON and YAML go out as plain text: rich
would wrap it.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kbpf.cli.options import Output
from kbpf.views.columns import Column

GAP = "   "


def table(rows: Iterable[Any], columns: Sequence[Column], wide: bool = False) -> str:
    """A line of titles, then one line per row. A column ends where its longest cell does."""
    shown = [c for c in columns if wide or not c.wide]
    lines = [[c.title for c in shown], *([c.text(row) for c in shown] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        GAP.join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, shown, strict=True)
        ).rstrip()
        for line in lines
    )


def document(value: Any, output: Output) -> str:
    """JSON or YAML of rows, or of one thing. The order is that of the fields."""
    plain = msgspec.to_builtins(value)
    if output is Output.YAML:
        import yaml

        text = yaml.safe_dump(
            plain, default_flow_style=False, sort_keys=False, allow_unicode=True, width=1 << 20
        )
        return str(text).rstrip("\n")
    return json.dumps(plain, indent=2, ensure_ascii=False)


def rows(found: Sequence[Any], columns: Sequence[Column], output: Output) -> str:
    """A list, in any format."""
    if output in (Output.JSON, Output.YAML):
        return document(found, output)
    return table(found, columns, output is Output.WIDE)


def indent(text: str, by: str = "  ") -> str:
    """Every line moved to the right."""
    return "\n".join(by + line for line in text.splitlines())


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """`name  value` lines, the values aligned."""
    known = list(pairs)
    width = max(len(name) for name, _ in known)
    return "\n".join(f"{name.ljust(width)}{GAP}{value}".rstrip() for name, value in known)
