# SPDX-License-Identifier: Apache-2.0
"""Standard streams of a command that are closed, full, or cannot encode the output."""

import pytest

from tests.support.runtime.command import kbpf, python

FULL = "kbpf: cannot write to the standard output: No space left on device\n"
CLOSED = "kbpf: cannot write to the standard output: Bad file descriptor\n"
GONE = "| true"
PIPE = 141
WRITTEN = ("run", "--write-config-to", "/dev/stdout")


COMMANDS = [
    ("--help",), ("--version",), ("run", "--help"), ("run", "--version"), ("inspect", "-h"),
    ("check", "-o", "json"), ("cleanup", "-h"),
]  # fmt: skip
STREAMS = [
    *((words, ">/dev/full", 1, FULL) for words in COMMANDS),
    *((words, ">&-", 1, CLOSED) for words in COMMANDS),
    *((words, "<&- >&- 2>&-", 1, "") for words in COMMANDS),
    *((words, GONE, PIPE, "") for words in (*COMMANDS, WRITTEN)),
    (("nonsense",), "2>&-", 2, ""),
    (("inspect", "status", "--pin-dir", "/nowhere"), "2>&-", 1, ""),
    (("inspect", "status", "--pin-dir", "/nowhere"), "2>/dev/full", 1, ""),
    (("run", "--source", "/nowhere"), "2>/dev/full", 1, ""),
    (WRITTEN, ">/dev/full", 1, "kbpf: cannot write the configuration: No space left on "
           "device (/dev/stdout); name another file\n"),
]  # fmt: skip
"""A command, the shell's redirection, the exit code and the whole of stderr."""


@pytest.mark.parametrize("row", STREAMS, ids=lambda row: f"{' '.join(row[0])} {row[1]}")
def test_redirected_stream(row: tuple) -> None:
    words, shell, code, err = row
    done = kbpf(*words, shell=shell)
    assert (done.code, done.err) == (code, err)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:strict", "utf-8:strict"])
def test_unencodable_characters_are_question_marks(encoding: str) -> None:
    script = "from kbpf.cli import streams; streams.set_up(); print('a → b', '\\udcff')"
    done = python("-c", script, environ={"PYTHONIOENCODING": encoding})
    arrow = "→" if encoding.startswith("utf") else "?"
    assert (done.code, done.out, done.err) == (0, f"a {arrow} b ?\n", "")


@pytest.mark.parametrize("words", [(), ("run",), ("check",), ("compile",), ("cleanup",), ("demo",),
                                   ("inspect",), ("inspect", "services"), ("inspect", "status")],
                         ids=" ".join)  # fmt: skip
def test_help_has_a_short_name(words: tuple[str, ...]) -> None:
    short, long = (kbpf(*words, flag) for flag in ("-h", "--help"))
    assert short == long
    assert short.code == 0
    assert "-h, --help" in short.out
