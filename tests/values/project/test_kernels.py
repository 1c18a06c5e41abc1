# SPDX-License-Identifier: Apache-2.0
"""Tests of `make test-kernels`: a guest that hangs or dies never counts as passed."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kernels import __main__ as guests
from tests.kernels import machine
from tests.kernels import table as table_of
from tests.kernels.debian import Kernel
from tests.kernels.table import FAILS, LACKS, WORKS, Feature
from tests.support.lab.lab import PATIENCE
from tests.support.table import pairs

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
def test_the_outcome_of_a_boot(tmp_path, monkeypatch, script: str, code: int | None, why: str):
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


def _all_time_passes_once(monkeypatch, is_so: Callable[[], bool]) -> None:
    """Freezes the clock of time limits until `is_so`; then each reading is an hour later."""
    hours = itertools.count(step=3600)
    clock = SimpleNamespace(monotonic=lambda: next(hours) if is_so() else 0, sleep=time.sleep)
    monkeypatch.setattr(machine, "time", clock)


def _stand_in(tmp_path, monkeypatch, script: str) -> None:
    vng = tmp_path / "vng"
    vng.write_text(f"#!/bin/sh\n{script}\n")
    vng.chmod(0o755)
    monkeypatch.setattr(machine, "VNG", str(vng))


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.programs.test_a" name="one" time="1.5"/>
<testcase classname="tests.programs.test_a" name="two" time="1">
  <failure message="no">AssertionError: no</failure></testcase>
<testcase classname="tests.programs.test_b" name="three" time="1">
  <skipped message="TCX links: Linux 6.6 brought it"/></testcase>
<testcase classname="tests.programs.test_c" name="load[x]" time="1">
  <properties><property name="processed" value="314268"/></properties></testcase>
</testsuite></testsuites>"""
A, B = (Feature(name, (f"tests/programs/test_{name}.py",)) for name in "ab")
CELLS = pairs("""\
test_a.py → FAILS: FAILS (1 of 2)
test_b.py → lacks: lacks
test_c.py → works: 1 (at most 314,268 insns)
test_none.py → FAILS: FAILS (1 of 1)
test_a.py::one → works: 1
test_a.py::one test_a.py::none → FAILS: FAILS (1 of 2)
test_c.py::load[x] → works: 1 (at most 314,268 insns)
test_c.py::load[y] → FAILS: FAILS (1 of 1)
""")
RESULTS = {"FAILS": FAILS, "lacks": LACKS, "works": WORKS}


@pytest.mark.parametrize(("tests", "expected"), CELLS)
def test_the_cell_of_a_feature(tmp_path, tests: str, expected: str):
    (tmp_path / "junit.xml").write_text(JUNIT)
    feature = Feature("x", tuple(f"tests/programs/{test}" for test in tests.split()))
    (found,) = table_of.results("5.10", "5.10.0-1", [feature], table_of.read(tmp_path / "junit.xml"))
    result, _, cell = expected.partition(": ")
    assert (found.result, found.cell) == (RESULTS[result], cell)
    assert ("AssertionError" in table_of.failures([found])) is (tests == "test_a.py")


@pytest.mark.parametrize("text", [None, "", JUNIT[:-20]], ids=["no report", "empty report", "truncated report"])
def test_without_a_complete_report_every_feature_fails(tmp_path, text: str | None):
    if text is not None:
        (tmp_path / "junit.xml").write_text(text)
    found = table_of.results("5.10", "5.10.0-1", [A, B], table_of.read(tmp_path / "junit.xml"))
    assert [one.result for one in found] == [FAILS, FAILS]


def test_each_test_of_a_guest_exists():
    """A guest that collects nothing would fail minutes later."""
    for test in {test for feature in (*guests.FEATURES, *guests.QUICK) for test in feature.tests}:
        path, _, name = test.partition("::")
        assert Path(path).exists(), test
        assert not name or f"\ndef {name.partition('[')[0]}(" in Path(path).read_text(), test
