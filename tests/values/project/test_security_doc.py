# SPDX-License-Identifier: Apache-2.0
"""docs/security.md: each promise names a test, and each test that it names exists."""

import re

import pytest

from tests.support.runtime.docs import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
PROMISES = ("can and cannot do", "What each right is for", "What is not defended")


@pytest.mark.parametrize(("path", "name"), NAMED, ids=["::".join(row) for row in NAMED])
def test_a_named_test_exists(path: str, name: str):
    assert name.startswith("test_")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M)


def test_every_promise_names_a_test():
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    chosen = [text for text in sections if any(p in text.splitlines()[0] for p in PROMISES)]
    assert len(chosen) == 8
    for section in chosen:
        promises = re.split(r"^- ", section, flags=re.M)[1:]
        assert promises
        assert [each for each in promises if "`tests/" not in each] == []


def test_the_page_is_linked():
    assert "(../docs/security.md)" in (ROOT / ".github/SECURITY.md").read_text()
    assert len(NAMED) > 30
