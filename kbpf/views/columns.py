# SPDX-License-Identifier: Apache-2.0
"""The columns of a table: title, cell text, and whether only `-o wide` shows it.

A view is a row type and its columns. `cli/render.py` turns both into a table, JSON or YAML, so all
formats show the same data.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


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
    `right`: aligned to the right, for numbers.
    """

    title: str
    value: str | Callable[[Any], str]
    format: Callable[[Any], str] = format_value
    wide: bool = False
    right: bool = False

    def text(self, row: Any) -> str:
        """The text of the cell."""
        if not isinstance(self.value, str):
            return self.value(row)
        value = row
        for name in self.value.split("."):
            value = None if value is None else getattr(value, name)
        return "-" if value is None else self.format(value)


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


DURATION: Final = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?: ago)?")
SIZE: Final = re.compile(r"([\d.]+)(B|KiB|MiB|GiB)")
SIZE_UNITS: Final = ("B", "KiB", "MiB", "GiB")


def parse_quantity(text: str) -> float | None:
    """The value of a text of format_duration() or format_size(); None for any other."""
    if match := DURATION.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if match := SIZE.fullmatch(text):
        return float(match[1]) * (1 << 10 * SIZE_UNITS.index(match[2]))
    return None


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
