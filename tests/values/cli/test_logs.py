# SPDX-License-Identifier: Apache-2.0
"""The log formats: every record is one line, no matter what it contains."""

import json
import logging
import re
from pathlib import Path

import pytest

from kbpf.cli import app, run
from kbpf.cli.log_format import JsonFormatter, TextFormatter

Row = tuple[str, tuple[object, ...], str]


ROWS = [
    ("started node=%s", ("n1",), "started node=n1"),
    ("without arguments: 100%", (), "without arguments: 100%"),
    ('said "%s" of \\ and %s', ("ä", "\u2028"), 'said "ä" of \\ and \\u2028'),
    ("bytes %r", (b"\xff\n",), r"bytes b'\xff\n'"),
    ("half a pair %s", ("\ud800",), r"half a pair \ud800"),
    (
        "kind=%s",
        ("Foo\n2026-11-22T05:34:13Z ERROR kbpf.agent FORGED",),
        r'kind="Foo\n2026-11-22T05:34:13Z ERROR kbpf.agent FORGED"',
    ),
    ("kind=%s file=%s: %s", ("Foo file=x", 'a"b', "why not"), r'kind="Foo file=x" file="a\"b": why not'),
    ("100%% of %d s=%s in=%.1fs where=%s", (3, "a=b", 2.5, Path("/a b")), '100% of 3 s="a=b" in=2.5s where="/a b"'),
    ("a=%s b=%s c=%r", ("", "x,y/z:1", "it's"), 'a= b=x,y/z:1 c="it\'s"'),
    ("name=%s", ("\u202e a",), r'name="\u202e a"'),
    ("to a terminal %s", ("\x1b[2J\x9b1m\x7f\r",), r"to a terminal \x1b[2J\x9b1m\x7f\r"),
    ("from right to left %s", ("\u202eabc\u2066",), r"from right to left \u202eabc\u2066"),
]
"""A message, its arguments, and the expected text."""


def record(row: Row) -> logging.LogRecord:
    message, values, _ = row
    made = logging.LogRecord("kbpf.x", logging.INFO, "", 0, message, values, None)
    made.created = 1_795_325_653.9
    return made


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_record_is_one_line(row: Row):
    assert TextFormatter().format(record(row)) == f"2026-11-22T05:34:13Z INFO kbpf.x {row[2]}"
    line = JsonFormatter().format(record(row))
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2026-11-22T05:34:13Z",
        "level": "info",
        "logger": "kbpf.x",
        "message": row[2],
    }


def test_fatal_error_has_the_log_format(capsys):
    assert app.call(["run", "--source", "/nowhere/at/all", "--log-format", "json"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["level"] == "error"
    assert "/nowhere/at/all" in told["message"]
    assert app.call(["run", "--source", "/nowhere/at/all"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"\S+Z ERROR kbpf {re.escape(told['message'])}", line)


def test_fatal_internal_error_has_the_log_format(capsys, monkeypatch):
    def serve(*_: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(run, "_run_agent", serve)
    assert app.call(["run", "--log-format", "json"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["level"] == "error"
    assert told["fault"].splitlines()[-1] == "ValueError: on purpose"
    assert app.call(["run"]) == 1
    head, *below = capsys.readouterr().err.splitlines()
    assert " ERROR kbpf " in head
    assert below == told["fault"].splitlines()
