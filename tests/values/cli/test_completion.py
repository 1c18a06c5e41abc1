# SPDX-License-Identifier: Apache-2.0
"""What a shell completes, as bash asks for it; test_inspect.py has the names from a node."""

import argparse

import pytest

from kbpf.cli import app, completion
from kbpf.cli.arguments import build_parser

Capture = pytest.CaptureFixture[str]


def complete(line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> list[str]:
    """The completions of the last word of this command line."""
    monkeypatch.setenv(completion.VARIABLE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    assert app.call([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.split()


LINES = [
    ("kbpf sch", ["schema"]),
    ("kbpf inspect se", ["services", "service"]),
    ("kbpf run --pin", ["--pin-dir"]),
    ("kbpf run --proxy-m", ["--proxy-mode"]),
    ("kbpf run --mode ", ["auto", "bpf", "ipvs"]),
    ("kbpf run --mode=i", ["ipvs"]),
    ("kbpf run --pin-dir /x --acc", ["--accounting"]),
    ("kbpf run --masquerade-all --log-fo", ["--log-format"]),
    ("kbpf run --log-format j", ["json"]),
    ("kbpf inspect services -o j", ["json", "jsonpath="]),
    ("kbpf inspect connections --state c", ["closing", "closed"]),
    ("kbpf trace h", ["host"]),
    ("kbpf schema ServiceD", ["ServiceDetailList"]),
]


@pytest.mark.parametrize(("line", "words"), LINES, ids=[row[0] for row in LINES])
def test_completions(line: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    assert complete(line, monkeypatch, capsys) == words


def test_all_flags_of_run_are_completed(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    parser = build_parser()
    flags = {
        name
        for action in parser._actions
        for name in action.option_strings
        if action.help != argparse.SUPPRESS
    }
    long_flags = {name for name in flags if name.startswith("--")}
    completed = set(complete("kbpf run --", monkeypatch, capsys))
    assert completed == long_flags - {"--cleanup", "--help"}


NOWHERE = [
    "kbpf inspect service --pin-dir /nowhere ", "kbpf inspect failures --service ",
    "kbpf inspect services -n ", "kbpf trace host ",
    "kbpf inspect endpoints --pin-dir /etc/hostname ",
    "kbpf inspect service --config /nowhere/at/all ",
]  # fmt: skip


@pytest.mark.parametrize("line", NOWHERE)
def test_without_an_agent_no_name_is_completed(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.setenv("KBPF_PIN_DIR", "/proc/nowhere")
    assert complete(line, monkeypatch, capsys) == []
