# SPDX-License-Identifier: Apache-2.0
"""What differs on a terminal: colour, and the width of tables. Into a pipe or a file goes the same
text without them.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Final

from kbpf.views.page import GAP

RED, YELLOW, RESET = "\x1b[31m", "\x1b[33m", "\x1b[0m"
CELL: Final = rf"(?:(?<={GAP})|^)(?:{{}})(?= *$|{GAP})"
ALARMS: Final = re.compile(
    CELL.format("missing|detached|failed|stuck|not ready|MISSING")
    + r"|(?<=%) !| ! .*$|NOT PROGRAMMED|cannot be used.*$|are not proven to work"
    + r"|(?<=agent   )   *down: .*$",
    re.MULTILINE,
)
WARNINGS: Final = re.compile(CELL.format("expired|unknown|terminating|serving, terminating"), re.MULTILINE)
"""States and marks of kbpf's own, as whole cells of a table or at the end of a line."""


def width() -> int:
    """The number of columns of the terminal; 0 if the output is for none, and has no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def can_print(text: str) -> bool:
    """Whether the encoding of the standard output has these characters; others become `?`."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


# ---- colour --------------------------------------------------------------------------------------


def uses_colour() -> bool:
    """On a terminal that can do more than print; see https://no-color.org."""
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    return sys.stdout.isatty() and not is_dumb and not os.environ.get("NO_COLOR")


def colour(text: str) -> str:
    """Colours what needs attention, and nothing else."""
    text = ALARMS.sub(rf"{RED}\g<0>{RESET}", text)
    return WARNINGS.sub(rf"{YELLOW}\g<0>{RESET}", text)


# ---- width ---------------------------------------------------------------------------------------


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
