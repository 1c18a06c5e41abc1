# SPDX-License-Identifier: Apache-2.0
"""What differs on a terminal: colour, the width of tables, and a pager. Into a pipe or a file goes
the same text without any of them.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import IO, Final

from kbpf.kernel.system import children
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


def is_terminal() -> bool:
    """Whether people read the standard output, on a terminal that can do more than print."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


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
    """See https://no-color.org."""
    return is_terminal() and not os.environ.get("NO_COLOR")


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


# ---- the pager -----------------------------------------------------------------------------------


def pager_command() -> str:
    """The pager of $KBPF_PAGER or $PAGER, or less; "" for none, or if it is not installed."""
    command = next((os.environ[name] for name in ("KBPF_PAGER", "PAGER") if name in os.environ), "less")
    try:
        program = shlex.split(command)[:1]
    except ValueError:
        return ""
    return command if program not in ([], ["cat"]) and shutil.which(program[0]) else ""


@contextlib.contextmanager
def paged(wanted: bool = True) -> Iterator[IO[str]]:
    """The stream to write to: that of a pager on a terminal, otherwise the standard output. As with
    git, less ends at once if all of it fits on the screen (LESS=FRX).
    """
    command = pager_command() if wanted and is_terminal() else ""
    if not command:
        yield sys.stdout
        return
    environment = {"LESS": "FRX", **children.child_environment()}
    pager = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.PIPE,
        cwd=children.WORKING_DIRECTORY,
        env=environment,
        encoding=sys.stdout.encoding,
        errors="replace",
    )
    assert pager.stdin is not None
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
    try:
        with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
            yield pager.stdin
    finally:
        with contextlib.suppress(BrokenPipeError):
            pager.stdin.close()
        pager.wait()
        signal.signal(signal.SIGINT, handler)
