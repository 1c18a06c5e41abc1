"""What every test may ask for."""

import logging
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = [
    "tests.support.features",
    "tests.support.lab.modes",
    "tests.support.cluster.fixtures_apiserver",
]

# The same commit gets the same verdict: the examples follow from the test's text. Who looks for new
# ones says HYPOTHESIS_PROFILE=search. No clock decides: the machine may be busy.
_NO_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _NO_CLOCK, derandomize=True)
settings.register_profile("search", _NO_CLOCK, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """What `kbpf run` in this process does to the log is undone: others listen there."""
    log = logging.getLogger("kbpf")
    before = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.level, log.propagate = before


LOG_LINES = 20
"""Of each captured text of a failed test: the last ones tell, and a report of CI has few lines."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shortens what a failed test has printed and logged."""
    report = yield
    report.sections = [(name, shortened(text)) for name, text in report.sections]
    return report


def shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= LOG_LINES:
        return text
    return "\n".join([f"({len(lines) - LOG_LINES} lines before)", *lines[-LOG_LINES:]])
