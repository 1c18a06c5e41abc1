# SPDX-License-Identifier: Apache-2.0
"""The help of commands, as files of tests/golden/help."""

import pytest

from kbpf.cli import app
from tests.support.golden import Golden

COMMANDS = ["", "run", "cleanup", "inspect", "inspect services", "inspect connections"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(
    command,
    golden: Golden,
    monkeypatch,
    capsys,
):
    monkeypatch.setenv("COLUMNS", "100")
    assert app.call([*command.split(), "--help"]) == 0
    golden(f"help/{command.replace(' ', '-') or 'kbpf'}.txt", capsys.readouterr().out)
