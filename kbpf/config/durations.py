# SPDX-License-Identifier: Apache-2.0
"""Durations in Go's notation: ``30s``, ``1h0m0s``, ``250ms``."""

import re
import reprlib
from typing import Final

from kbpf.errors import ConfigError

UNITS: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,  # U+00B5 MICRO SIGN
    "μs": 1e-6,  # U+03BC GREEK SMALL LETTER MU
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
MAX_SECONDS: Final = 2**63 / 1e9
"""A Go duration is an int64 of nanoseconds: 292 years."""
MAX_LENGTH: Final = 100
"""In characters. Go has no limit, but our regular expression takes quadratic time on digits."""
_PART: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")


def parse(text: str, where: str) -> float:
    """Returns seconds. Raises ConfigError where Go's time.ParseDuration fails, and for ""."""
    sign, unsigned = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    if unsigned == "0":
        return 0.0
    parts = _PART.findall(unsigned) if len(unsigned) <= MAX_LENGTH else []
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    matched = "".join(number + unit for number, unit in parts)
    if not parts or matched != unsigned or seconds >= MAX_SECONDS:
        raise ConfigError(f"not a time: {reprlib.repr(text)}", where, "write it as 30s, 5m or 1h30m")
    return sign * seconds


def format_duration(seconds: float) -> str:
    """Formats as Go does, to the millisecond: ``1h0m0s``, ``1m30s``, ``0s``, ``1.5s``."""
    total_seconds, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, seconds_part = divmod(total_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{seconds_part}.{thousandths:03}".rstrip("0") + "s" if thousandths else f"{seconds_part}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
