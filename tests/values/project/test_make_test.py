# SPDX-License-Identifier: Apache-2.0
"""`python -m tests`, with commands in place of pytest and of the guests."""

import sys
from pathlib import Path

import pytest

from tests import __main__ as run

REPORT = """\
<testsuites><testsuite><testcase classname="tests.a" name="test_fine" />
<testcase classname="tests.b" name="test_wrong"><failure message="assert 1 == 2">more</failure>
</testcase></testsuite></testsuites>
"""


def exits(code: int, write: str = "") -> tuple[str, ...]:
    """A command that puts REPORT into this file, if it has one, and exits with this code."""
    report = f"import pathlib; pathlib.Path({write!r}).write_text({REPORT!r})" if write else ""
    return (sys.executable, "-c", f"{report}\nraise SystemExit({code})")


@pytest.mark.parametrize(("pytest_code", "guests_code", "code"), [(0, 0, 0), (1, 0, 1), (139, 0, 1), (0, 1, 1)])
def test_either_failure_is_one_and_what_failed_is_last(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    pytest_code: int,
    guests_code: int,
    code: int,
):
    """139: pytest crashed without a report; the one of the run before is not shown."""
    report = tmp_path / "tests.xml"
    report.write_text(REPORT)
    monkeypatch.setattr(sys, "argv", ["tests"])
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "REPORT", report)
    monkeypatch.setattr(run, "PYTEST", exits(pytest_code, "" if pytest_code == 139 else str(report)))
    monkeypatch.setattr(run, "KERNELS", exits(guests_code))
    assert run.main() == code
    failures = {0: [], 1: ["pytest failed:", "tests.b::test_wrong: assert 1 == 2"], 139: ["pytest failed:"]}
    assert capfd.readouterr().out.splitlines() == failures[pytest_code]
