# SPDX-License-Identifier: Apache-2.0
"""`python -m tests`, with commands in place of pytest and of the guests."""

import sys

import pytest

from tests import __main__ as run


def exits(code: int, *, prints: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({prints!r}); raise SystemExit({code})")


@pytest.mark.parametrize(
    ("pytest_code", "guests_code", "code"), [(0, 0, 0), (1, 0, 1), (5, 0, 1), (0, 1, 1), (1, 1, 1)]
)
def test_the_output_of_the_guests_is_last_and_either_failure_is_one(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    pytest_code: int,
    guests_code: int,
    code: int,
):
    monkeypatch.setattr(sys, "argv", ["tests"])
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "PYTEST", exits(pytest_code, prints="of pytest"))
    monkeypatch.setattr(run, "KERNELS", exits(guests_code, prints="of the guests"))
    assert run.main() == code
    lines = ["of pytest", "waiting for the other kernels", "of the guests"]
    if pytest_code:
        lines.append("pytest failed, see above")
    assert capfd.readouterr().out.splitlines() == lines


def test_with_arguments_pytest_runs_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["tests", "tests/values", "-k", "hints"])
    monkeypatch.setattr(run, "PYTEST", (sys.executable, "-c", "import sys; print(sys.argv[1:])"))
    monkeypatch.setattr(run, "KERNELS", ("/does/not/exist",))
    assert run.main() == 0
    assert capfd.readouterr().out == "['tests/values', '-k', 'hints']\n"
