# SPDX-License-Identifier: Apache-2.0
"""Tests of `make test-kernels`: a guest that hangs or dies never counts as passed."""

import itertools
import os
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kernels import __main__ as kernels
from tests.kernels import debian, machine, table
from tests.kernels.debian import Kernel
from tests.kernels.table import FAILS, LACKS, WORKS, Feature
from tests.support.build import go_build
from tests.support.features import BY_KERNEL, FEATURES
from tests.support.lab.lab import PATIENCE, until

ALIVE = "echo 'Linux version 5.10'"
EXIT = 'for word; do case $word in --rwdir=*) echo {code} > "${{word#*=}}/exit";; esac; done'


@pytest.mark.parametrize(
    ("script", "code", "why"),
    [
        (f"{ALIVE}; {EXIT.format(code=0)}", 0, ""),
        (f"{ALIVE}; {EXIT.format(code=1)}", 1, ""),
        (f"{ALIVE}; {EXIT.format(code='')}", None, "the guest ended early"),
        (f"{ALIVE}; exit 0", None, "the guest ended early"),
        (f"{ALIVE}; sleep 600", None, "the guest hung"),
        ("sleep 600", None, "the kernel said nothing"),
    ],
    ids=["passes", "fails", "cut short", "dies", "hangs", "silent"],
)
def test_the_outcome_of_a_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: int | None, why: str
) -> None:
    _stand_in(tmp_path, monkeypatch, script)
    log = tmp_path / "results" / "console.log"
    if why == "the guest hung":
        _all_time_passes_once(monkeypatch, lambda: log.exists() and machine.ALIVE in log.read_bytes())
    elif why == "the kernel said nothing":
        monkeypatch.setattr(machine, "SILENT_SECONDS", 0.2)
    kernel = Kernel("5.10", "5.10.0-1-amd64", Path("/nowhere/vmlinuz"))
    ending = machine.boot(kernel, ["true"], tmp_path / "results", PATIENCE, kvm=False)
    assert ending.code == code
    assert ending.why.startswith(why)
    assert ("Linux version" in ending.log.read_text()) is ("Linux" in script)


def test_a_guest_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    _stand_in(tmp_path, monkeypatch, f"{ALIVE}; sleep 600 & echo $! > {pid}; wait")
    _all_time_passes_once(monkeypatch, lambda: pid.exists() and pid.read_text().endswith("\n"))
    machine.boot(Kernel("x", "x", Path("/x")), ["true"], tmp_path / "results", PATIENCE, kvm=False)
    state = Path("/proc", pid.read_text().strip(), "stat")
    until("the guest has ended", lambda: not state.exists() or ") Z " in state.read_text())


@pytest.fixture
def no_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches no kernels and compiles nothing; pretends to have no KVM and two processors."""
    monkeypatch.setattr(kernels, "BUILD", tmp_path)
    monkeypatch.setattr(kernels, "prepare", lambda features: None)
    monkeypatch.setattr(debian, "fetch", lambda name, _: Kernel(name, f"{name}-1", tmp_path))
    monkeypatch.setattr(machine, "kvm_boots", lambda *_: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "_stopping", threading.Event())


def _all_time_passes_once(monkeypatch: pytest.MonkeyPatch, is_so: Callable[[], bool]) -> None:
    """Freezes the clock of time limits until `is_so`; then each reading is an hour later."""
    hours = itertools.count(step=3600)
    clock = SimpleNamespace(monotonic=lambda: next(hours) if is_so() else 0, sleep=time.sleep)
    monkeypatch.setattr(machine, "time", clock)


def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    vng = tmp_path / "vng"
    vng.write_text(f"#!/bin/sh\n{script}\n")
    vng.chmod(0o755)
    monkeypatch.setattr(machine, "VNG", str(vng))


@pytest.mark.usefixtures("no_fetch")
def test_emulated_guests_run_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = f"while [ $(ls {tmp_path}/met-* | wc -l) -lt 2 ]; do sleep 0.1; done"
    _stand_in(tmp_path, monkeypatch, f"{ALIVE}; touch {tmp_path}/met-$$; {both}; {EXIT.format(code=0)}")
    kernels.report(["5.10", "6.1"], [A], 10.0, False)
    said = capsys.readouterr()
    assert "hung" not in said.err
    assert said.out.splitlines()[0].split() == ["feature", "5.10", "(5.10-1)", "6.1", "(6.1-1)"]


@pytest.mark.usefixtures("no_fetch")
def test_no_guest_outlives_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(tmp_path, monkeypatch, f"{ALIVE}; touch {tmp_path}/pid-$$; exec sleep 600")

    def stop() -> None:
        until("two guests run", lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    old = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            kernels.report(["5.10", "6.1", "6.12"], [A], 10.0, False)
    finally:
        signal.signal(signal.SIGTERM, old)
    stopper.join()
    pids = [one.name.removeprefix("pid-") for one in tmp_path.glob("pid-*")]
    assert len(pids) == 2, "the third guest was never started"
    # The signal may come while the second guest's thread starts, which is not waited for then.
    until("the guests are gone", lambda: not [pid for pid in pids if Path("/proc", pid).exists()])


def test_a_guest_has_the_go_programs_of_its_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(name: str) -> Path:
        shutil.copy("/bin/true", tmp_path / name)
        return tmp_path / name

    monkeypatch.setattr(kernels, "BUILD", tmp_path)
    with monkeypatch.context() as patches:
        patches.setattr(go_build, "build", build)
        kernels.copy_programs([A, Feature("b", (), programs=("etcd", "coredns"))])
    for word in shlex.split(kernels.command([A])[-1]):
        if word.startswith(go_build.ASSETS):
            monkeypatch.setenv(*word.split("="))
    for name in ("etcd", "coredns"):
        assert go_build.build(name) == tmp_path / kernels.PROGRAMS / name


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.programs.test_a" name="one" time="1.5"/>
<testcase classname="tests.programs.test_a" name="two" time="1">
  <failure message="no">AssertionError: no</failure></testcase>
<testcase classname="tests.programs.test_b" name="three" time="1">
  <skipped message="TCX links: Linux 6.6 brought it"/></testcase>
<testcase classname="tests.programs.test_c" name="load[x]" time="1">
  <properties><property name="processed" value="314268"/></properties></testcase>
</testsuite></testsuites>"""
A, B, C, NONE = (Feature(name, (f"tests/programs/test_{name}.py",)) for name in ("a", "b", "c", "none"))
ONE, THREE = (
    Feature(name, tuple(f"tests/programs/test_a.py::{test}" for test in tests))
    for name, tests in (("one", ("one",)), ("three", ("one", "none")))
)
X, Y = (Feature(each, (f"tests/programs/test_c.py::load[{each}]",)) for each in ("x", "y"))


@pytest.mark.parametrize(
    ("feature", "result", "cell"),
    [
        (A, FAILS, "FAILS (1 of 2)"),
        (B, LACKS, "lacks"),
        (C, WORKS, "1 (at most 314,268 insns)"),
        (NONE, FAILS, "FAILS (1 of 1)"),
        (ONE, WORKS, "1"),
        (THREE, FAILS, "FAILS (1 of 2)"),
        (X, WORKS, "1 (at most 314,268 insns)"),
        (Y, FAILS, "FAILS (1 of 1)"),
    ],
    ids=lambda value: value.name if isinstance(value, Feature) else "",
)
def test_the_cell_of_a_feature(tmp_path: Path, feature: Feature, result: str, cell: str) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    cases = table.read(tmp_path / "junit.xml")
    (found,) = table.results("5.10", "5.10.0-1", [feature], cases)
    assert (found.result, found.cell) == (result, cell)
    assert ("AssertionError" in table.failures([found])) is (feature is A)


@pytest.mark.parametrize("text", [None, "", JUNIT[:-20]], ids=["no report", "empty report", "truncated report"])
def test_without_a_complete_report_every_feature_fails(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "junit.xml").write_text(text)
    found = table.results("5.10", "5.10.0-1", [A, B], table.read(tmp_path / "junit.xml"))
    assert [one.result for one in found] == [FAILS, FAILS]


def test_the_page_names_failures_and_missing_features(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    rows = table.results("5.10", "5.10.0-1", [A, B], table.read(tmp_path / "junit.xml"))
    assert table.page(rows, [A, B]).splitlines() == [
        "feature  5.10 (5.10.0-1)",
        "a        FAILS (1 of 2)",
        "b        lacks",
        "5.10 FAILS: a: two",
        "5.10 lacks: TCX links: Linux 6.6 brought it (b)",
    ]


@pytest.mark.parametrize(
    ("code", "why", "said"),
    [
        (None, "the guest hung", "5.10: the guest hung after 7 s"),
        (139, "", "5.10: its command ended with 139 after 7 s"),
    ],
    ids=["the guest", "pytest"],
)
@pytest.mark.usefixtures("no_fetch")
def test_a_guest_without_results_is_explained_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int | None,
    why: str,
    said: str,
) -> None:
    log = tmp_path / "console.log"
    log.write_text("Linux version 5.10\nKernel panic - not syncing\n")
    monkeypatch.setattr(machine, "boot", lambda *_: machine.Ending(code, why, 7.0, log))
    assert kernels.report(["5.10"], [A], 1.0, False) == 1
    assert capsys.readouterr().out.splitlines() == [
        "feature  5.10 (5.10-1)",
        "a        FAILS (1 of 1)",
        "5.10 FAILS: a: tests/programs/test_a.py: no result",
        f"{said}, see {log}; its console ends so:",
        "Linux version 5.10",
        "Kernel panic - not syncing",
    ]


def test_expected_check_rows_follow_from_the_feature_table() -> None:
    """tests/support/features.py has it twice: by feature, and by Debian's kernels."""
    assert BY_KERNEL.keys() == debian.SUITES.keys()
    for family, rows in BY_KERNEL.items():
        this = (99, 0) if family == "newest" else tuple(map(int, family.split(".")))
        lacks = {f.check for f in FEATURES.values() if f.since > this or this in f.unbuilt}
        assert rows == lacks - {""}, family
