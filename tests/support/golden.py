# SPDX-License-Identifier: Apache-2.0
"""Golden transcripts: the text that a test expects is a file in tests/golden.

`pytest --update-golden` writes the files instead of comparing them. Read the diff before committing
it: it is the change that users will see.
"""

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "golden"

Golden = Callable[[str, str], None]
"""Compares a text with the file of this name in tests/golden."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden instead of comparing it")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    def compare(name: str, text: str) -> None:
        path = FOLDER / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"{path} does not exist: pytest --update-golden writes it"
        diff = difflib.unified_diff(
            path.read_text().splitlines(keepends=True),
            text.splitlines(keepends=True),
            f"tests/golden/{name}",
            "this test",
        )
        assert path.read_text() == text, "".join(diff)

    return compare
