# SPDX-License-Identifier: Apache-2.0
"""Plugins and settings of all tests."""

import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = [
    "tests.support.features",
    "tests.support.golden",
    "tests.support.lab.modes",
    "tests.support.cluster.fixtures_apiserver",
]

# The same commit gives the same result: examples are derived from the test's code.
# HYPOTHESIS_PROFILE=search looks for new ones. No deadlines, as the machine may be busy.
_NO_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _NO_CLOCK, derandomize=True)
settings.register_profile("search", _NO_CLOCK, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """Restores the logger that `kbpf run` in this process configures; pytest's handlers use it
    too.
    """
    log = logging.getLogger("kbpf")
    before = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.level, log.propagate = before


LONGEST_FIRST = ("conformance", "lab", "image", "chaos", "fuzz", "programs", "host", "values")
"""The folders' order if several processes share the files: the shortest files are last."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files for pytest-xdist."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = len(Path(__file__).parent.parts)
        items.sort(key=lambda item: LONGEST_FIRST.index(item.path.parts[folder]))


LOG_LINES = 20
"""How many lines of each captured output of a failed test are reported: the last ones matter, and
CI reports are short.
"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shortens the captured output and log of a test."""
    report = yield
    report.sections = [(name, shortened(text)) for name, text in report.sections]
    return report


def shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= LOG_LINES:
        return text
    return "\n".join([f"({len(lines) - LOG_LINES} lines before)", *lines[-LOG_LINES:]])
