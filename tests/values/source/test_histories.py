"""The bounded part of the campaign `histories`; its rules are in tests/fuzz/inputs/histories.py."""

import logging

import pytest

from tests.fuzz.inputs.histories import history


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of faults are thousands of lines."""
    caplog.set_level(logging.CRITICAL, "kbpf.source")


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_what_is_known_at_the_end_is_what_the_server_has(first: int) -> None:
    assert sum(history(seed) for seed in range(first, first + 20)) > 500
