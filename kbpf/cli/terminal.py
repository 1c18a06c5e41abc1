# SPDX-License-Identifier: Apache-2.0
"""What differs on a terminal: colour, and a width. Into a pipe or a file goes the same text without
them.
"""

import os
import re
import shutil
import sys
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
WARNINGS: Final = re.compile(CELL.format("expired|unknown|(?:ready, )?terminating(?:, serving)?"), re.MULTILINE)
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


def uses_colour() -> bool:
    """On a terminal that can do more than print; see https://no-color.org."""
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    return sys.stdout.isatty() and not is_dumb and not os.environ.get("NO_COLOR")


def colour(text: str) -> str:
    """Colours what needs attention, and nothing else."""
    text = ALARMS.sub(rf"{RED}\g<0>{RESET}", text)
    return WARNINGS.sub(rf"{YELLOW}\g<0>{RESET}", text)
