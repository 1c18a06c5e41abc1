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


def format_number(value: int | None) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else str(value)


def format_bool(value: bool) -> str:
    """``yes`` or ``no``."""
    return "yes" if value else "no"


def format_host_port(address: str, port: int) -> str:
    """``1.2.3.4:80`` or ``[fd00::1]:80``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def format_duration(seconds: float) -> str:
    """A time as people say it, two units at most: ``3s``, ``4m05s``, ``2h03m``, ``5d01h``."""
    total_seconds = int(seconds)
    if total_seconds < 60:
        return f"{total_seconds}s"
    if total_seconds < 3600:
        return f"{total_seconds // 60}m{total_seconds % 60:02}s"
    if total_seconds < 86_400:
        return f"{total_seconds // 3600}h{total_seconds % 3600 // 60:02}m"
    return f"{total_seconds // 86_400}d{total_seconds % 86_400 // 3600:02}h"


def format_size(count: int | None) -> str:
    """Bytes as people say them: ``812B``, ``64KiB``, ``1.5MiB``."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f}{unit}" if value >= 10 or unit == "B" else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}GiB"
