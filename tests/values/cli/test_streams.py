# SPDX-License-Identifier: Apache-2.0
"""Standard streams of a command that are closed, full, or cannot encode the output."""

import pytest

from kbpf.cli import app
from tests.support.runtime.command import kbpf, pipe_without_reader, python

FULL = "kbpf: cannot write to the standard output: No space left on device\n"
CLOSED = "kbpf: cannot write to the standard output: Bad file descriptor\n"
GONE = ">&{gone}"
PIPE = 141
WRITTEN = "run --write-config-to /dev/stdout"
FULL_FILE = "kbpf: cannot write the configuration: No space left on device (/dev/stdout); name another file\n"


COMMANDS = ("--help", "run --help", "check -o json")
"""By typer, by argparse, and page by page."""
STREAMS = [
    *((words, ">/dev/full", 1, FULL) for words in COMMANDS),
    *((words, ">&-", 1, CLOSED) for words in COMMANDS),
    *((words, "<&- >&- 2>&-", 1, "") for words in COMMANDS),
    *((words, GONE, PIPE, "") for words in (*COMMANDS, WRITTEN)),
    ("nonsense", "2>&-", 2, ""),
    ("inspect status --pin-dir /nowhere", "2>&-", 1, ""),
    ("inspect status --pin-dir /nowhere", "2>/dev/full", 1, ""),
    ("run --source /nowhere", "2>/dev/full", 1, ""),
    (WRITTEN, ">/dev/full", 1, FULL_FILE),
]
"""A command, the shell's redirection, the exit code and the whole of stderr."""


@pytest.mark.parametrize("row", STREAMS, ids=lambda row: f"{row[0]} {row[1]}")
def test_redirected_stream(row: tuple):
    words, shell, code, err = row
    with pipe_without_reader() as gone:
        done = kbpf(*words.split(), shell=shell.format(gone=gone), pass_fds=(gone,))
    assert (done.code, done.err) == (code, err)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:strict", "utf-8:strict"])
def test_unencodable_characters_are_question_marks(encoding):
    script = "from kbpf.cli import streams; streams.set_up(); print('a → b', '\\udcff')"
    done = python("-c", script, environ={"PYTHONIOENCODING": encoding})
    arrow = "→" if encoding.startswith("utf") else "?"
    assert (done.code, done.out, done.err) == (0, f"a {arrow} b ?\n", "")


ASCII_COMMANDS = """\
--help
run --help
inspect connections -h
schema
check
check -o yaml
run --mode ä
inspect services -o ä
inspect service ä→ --pin-dir /nowhere/ä
config validate /nowhere/ä
trace ä ä
nonsense-ä
inspect services --pin-dir /nowhere/ä""".splitlines()


EACH = """
import sys
from kbpf.cli import app, streams
streams.set_up()
print(*[app.call(line.split()) for line in sys.argv[1:]])
"""


@pytest.mark.parametrize("environ", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}], ids=str)
def test_no_command_fails_on_an_ascii_terminal(environ: dict[str, str]):
    done = python("-c", EACH, *ASCII_COMMANDS, environ=environ)
    assert set(done.out.split("\n")[-2].split()) <= {"0", "1", "2"}
    # typer repeats what was typed as it was typed
    assert all(c.isascii() or c in "ä→" for c in done.out + done.err) or "LC_ALL" in environ


BARS = [("ascii", "###"), ("utf-8", "███")]


@pytest.mark.parametrize(("encoding", "bar"), BARS)
def test_bars_use_what_the_terminal_has(encoding, bar):
    script = "from kbpf.cli import streams, demo; streams.set_up(); print(demo.bar(0.1) + '|')"
    done = python("-c", script, environ={"PYTHONIOENCODING": encoding})
    assert done.out == f"{bar:30}|\n"


@pytest.mark.parametrize(
    "line", ["", "run", "check", "compile", "cleanup", "demo", "inspect", "inspect services", "inspect status"]
)
def test_help_has_a_short_name(line, capsys):
    short, long = ((app.call([*line.split(), flag]), *capsys.readouterr()) for flag in ("-h", "--help"))
    assert short == long
    assert short[0] == 0
    assert "-h, --help" in short[1]
