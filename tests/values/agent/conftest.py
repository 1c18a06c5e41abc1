# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the agent."""

import pytest

from kbpf.agent import agent, applier, computer, reconciler, reporter
from tests.values.agent.recording import Clock


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    for module in (agent, applier, computer, reconciler, reporter):
        monkeypatch.setattr(module, "time", made)
    return made
