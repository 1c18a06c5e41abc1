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


def exits(code: int, *, prints: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({prints!r}); raise SystemExit({code})")


def writes(report: Path, code: int) -> tuple[str, ...]:
    """A pytest that writes this report."""
    program = (
        f"import pathlib; pathlib.Path({str(report)!r}).write_text({REPORT!r}); "
        f"print('of pytest'); raise SystemExit({code})"
    )
    return (sys.executable, "-c", program)


@pytest.mark.parametrize(
    ("pytest_code", "guests_code", "code"), [(0, 0, 0), (1, 0, 1), (5, 0, 1), (0, 1, 1), (1, 1, 1)]
)
def test_what_failed_is_last_and_either_failure_is_one(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    pytest_code: int,
    guests_code: int,
    code: int,
):
    monkeypatch.setattr(sys, "argv", ["tests"])
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "KERNELS", exits(guests_code, prints="of the guests"))
    monkeypatch.setattr(run, "REPORT", tmp_path / "tests.xml")
    monkeypatch.setattr(run, "PYTEST", writes(tmp_path / "tests.xml", pytest_code))
    assert run.main() == code
    lines = ["of pytest", "of the guests"]
    if pytest_code:
        lines += ["pytest failed:", "tests.b::test_wrong: assert 1 == 2"]
    assert capfd.readouterr().out.splitlines() == lines


def test_a_pytest_that_crashed_has_no_failures(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    """The report of the run before is not shown."""
    (tmp_path / "tests.xml").write_text(REPORT)
    monkeypatch.setattr(sys, "argv", ["tests"])
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "REPORT", tmp_path / "tests.xml")
    monkeypatch.setattr(run, "PYTEST", exits(139))
    monkeypatch.setattr(run, "KERNELS", exits(0))
    assert run.main() == 1
    assert capfd.readouterr().out.splitlines()[-1] == "pytest failed:"


def test_with_arguments_pytest_runs_alone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["tests", "tests/values", "-k", "hints"])
    monkeypatch.setattr(run, "PYTEST", (sys.executable, "-c", "import sys; print(sys.argv[1:])"))
    monkeypatch.setattr(run, "KERNELS", ("/does/not/exist",))
    assert run.main() == 0
    assert capfd.readouterr().out == "['tests/values', '-k', 'hints']\n"
