# SPDX-License-Identifier: Apache-2.0
"""Typer completes commands, options and their values, as bash asks for them."""

from kbpf.cli import app
from tests.support.table import each_pair


@each_pair(
    "line, words",
    """\
kbpf sch → schema
kbpf inspect se → services service
kbpf inspect service --pin → --pin-dir
kbpf inspect services -o j → json
kbpf inspect connections --state c → closing closed
kbpf inspect services --config /nowhere --sort → --sort-by
""",
)
def test_completions(line, words, monkeypatch, capsys):
    monkeypatch.setenv("_KBPF_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    assert app.call([]) == 0
    out, err = capsys.readouterr()
    assert (out.split(), err) == (words.split(), "")
