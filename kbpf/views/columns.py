"""How rows are shown in columns: what stands above, what stands in each cell, and who asks for it.

A view is a row type and its columns; `cli/render.py` turns the two into text, JSON or YAML, so
all formats say the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `text` gives a row's cell. `wide`: only with `-o wide`. `right`: numbers."""

    title: str
    text: Callable[[Any], str]
    wide: bool = False
    right: bool = False


def number(value: int | None) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else str(value)


def yes(value: bool) -> str:
    """``yes`` or ``no``."""
    return "yes" if value else "no"


def endpoint(address: str, port: int) -> str:
    """``1.2.3.4:80`` or ``[fd00::1]:80``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def span(seconds: float) -> str:
    """A time as people say it, two units at most: ``3s``, ``4m05s``, ``2h03m``, ``5d01h``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"


def size(count: int | None) -> str:
    """Bytes as people say them: ``812B``, ``64KiB``, ``1.5MiB``."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f}{unit}" if value >= 10 or unit == "B" else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}GiB"
