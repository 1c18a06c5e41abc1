# SPDX-License-Identifier: Apache-2.0
"""A short, fixed run of the campaign `histories`; its rules are in
tests/fuzz/inputs/histories.py.
"""

import logging

import pytest

from tests.fuzz.inputs.histories import history


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The injected faults would log thousands of lines."""
    caplog.set_level(logging.CRITICAL, "kbpf.source")


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_reflector_ends_with_the_objects_of_the_server(first: int):
    assert sum(history(seed) for seed in range(first, first + 20)) > 500
