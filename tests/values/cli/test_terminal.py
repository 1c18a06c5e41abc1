# SPDX-License-Identifier: Apache-2.0
"""What a terminal adds to the output: colour and folded tables. The terminal is a real
pseudo-terminal.
"""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping

import pytest

from kbpf.cli import terminal
from kbpf.views.page import fit_widths
from tests.support.table import each_pair

SCRIPT = """
from kbpf.cli import render, streams
from kbpf.cli.options import Output
from kbpf.views.page import Column
from kbpf.views.page import Kind, Page

class Row:
    def __init__(self, *cells):
        self.name, self.state, self.texts = cells

COLUMNS = (
    Column("NAME", lambda row: row.name), Column("TEXTS", lambda row: ", ".join(row.texts)),
    Column("STATE", lambda row: row.state), Column("FILL", lambda row: "90.0% !", right=True),
)
ROWS = [Row("a", "missing", ["10.96.0.1:80"] * 8), Row("missing-b", "attached", ["x"])]
streams.set_up()
render.show(Page(Kind("RowList", Row), ROWS, COLUMNS, notes=("a note",)), Output.TABLE)
"""
TEXTS = ", ".join(["10.96.0.1:80"] * 8)
PLAIN = (
    f"NAME        {'TEXTS':110}   STATE         FILL\n"
    f"a           {TEXTS}   missing    90.0% !\n"
    f"missing-b   {'x':110}   attached   90.0% !\n"
)
RED, YELLOW, RESET = terminal.RED, terminal.YELLOW, terminal.RESET


def on_terminal(environ: Mapping[str, str], columns: int = 200, script: str = SCRIPT) -> tuple[str, str]:
    """What a script prints on a terminal of this width, and to stderr, which is a pipe."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    inherited = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "HOME")}
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**inherited, "TERM": "xterm", **environ},
    )
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 1 << 16):
            text += part
    except OSError:  # the last process has closed the terminal
        pass
    os.close(ours)
    _, err = child.communicate(timeout=60)
    return text.decode().replace("\r\n", "\n"), err.decode()


TEXTS_OF = {
    "alarmed": PLAIN.replace("   missing ", f"   {RED}missing{RESET} ").replace("90.0% !", f"90.0%{RED} !{RESET}"),
    "plain": PLAIN,
}


@each_pair(
    "environ, text",
    """\
 → alarmed
NO_COLOR=1 → plain
NO_COLOR= → alarmed
TERM=dumb → plain
""",
)
def test_environment_decides(environ, text):
    variables = dict(word.split("=", 1) for word in environ.split())
    assert on_terminal(variables) == (TEXTS_OF[text], "kbpf: a note\n")


def test_a_pipe_gets_no_colour():
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "20"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout == PLAIN


def test_table_is_folded_at_blanks_to_the_width_of_the_terminal():
    text, _ = on_terminal({"NO_COLOR": "1"}, columns=70)
    pair = "10.96.0.1:80, 10.96.0.1:80"
    assert text == (
        f"NAME        {'TEXTS':37}   STATE         FILL\n"
        f"a           {pair + ',':37}   missing    90.0% !\n"
        f"            {pair},\n"
        f"            {pair},\n"
        f"            {pair}\n"
        f"missing-b   {'x':37}   attached   90.0% !\n"
    )
    assert max(map(len, text.split("\n"))) == 70


LIVE = """
import sys
from kbpf.cli import render, streams, terminal

def page():
    sees = terminal.width(), terminal.uses_colour(), terminal.can_print("█")
    if sees in shown:
        raise KeyboardInterrupt
    shown.append(sees)
    return f"{sees}"

shown = []
streams.set_up()
try:
    render.watch(page, 0.0)
except KeyboardInterrupt:
    pass
print(shown)
"""


def test_a_page_that_is_drawn_again_and_again_knows_the_terminal():
    """rich's stand-in for stdout says that it has no encoding."""
    text, err = on_terminal({}, columns=70, script=LIVE)
    assert text.endswith("[(70, True, True)]\n")
    assert err == ""


@each_pair(
    "given, fitted",
    """\
23 of 10 10, words 1 1 → 10 10
23 of 10 20, words 1 1 → 10 10
33 of 20 20, words 20 5 → 20 10
10 of 20 20, words 20 20 → 20 20
10 of 5 100 5, words 5 12 5 → 5 12 5
""",
)
def test_widest_columns_are_narrowed_first(given, fitted):
    """The limit of widths, and the longest words → the widths that fit."""
    limit, widths, words = (list(map(int, part.split())) for part in re.split(" of |, words ", given))
    assert fit_widths(widths, words, *limit) == list(map(int, fitted.split()))


COLOURS = [
    ("connect4   detached   5", f"connect4   {RED}detached{RESET}   5"),
    ("web   expired", f"web   {YELLOW}expired{RESET}"),
    ("web   terminating, serving   yes", f"web   {YELLOW}terminating, serving{RESET}   yes"),
    ("failed-web   attached", "failed-web   attached"),
    ("map is missing entries", "map is missing entries"),
    ("mode bpf cannot be used: cgroup v2", f"mode bpf {RED}cannot be used: cgroup v2{RESET}"),
    (
        "services   2 (3 Service ports; 1 of them NOT PROGRAMMED)",
        f"services   2 (3 Service ports; 1 of them {RED}NOT PROGRAMMED{RESET})",
    ),
]


@pytest.mark.parametrize(("text", "coloured"), COLOURS)
def test_only_what_needs_attention_is_coloured(text, coloured):
    assert terminal.colour(text) == coloured
