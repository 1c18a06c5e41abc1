# SPDX-License-Identifier: Apache-2.0
"""Fixtures of these tests."""

import pytest

from kbpf.agent import agent as module
from tests.values.agent.recording import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made
