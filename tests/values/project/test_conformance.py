# SPDX-License-Identifier: Apache-2.0
"""tests/conformance: its lists, how it reads a report, and the document made from its results."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conformance import __main__, report, suite
from tests.conformance.cluster import lifecycle
from tests.conformance.cluster.layout import Failed
from tests.conformance.report import FAIL, PASS, SKIP, Row, Run
from tests.conformance.versions import VERSIONS
from tests.support.build import go_build
from tests.support.build.go_build import BuildError
from tests.support.build.programs import PREVIOUS

RECORDED = report.recorded()
NAMES = sorted({row.name for run in RECORDED for row in run.rows})


def test_versions_are_those_of_the_modules():
    built = [go_build.kubernetes_version(), go_build.kubernetes_version(PREVIOUS)]
    assert [f"v{name}" for name in VERSIONS] == built


def test_both_lists_can_be_read():
    for path in (suite.ALL, suite.SHORT):
        assert suite.read_list(path).run


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("run a\nskip b\n", "no reason for: b"),
        ("run a\nskip b\nskip c\n    why\n", "no reason for: b"),
        ("    why\nrun a\n", ":1: not a run line"),
        ("run a\n    why\n", ":2: not a run line"),
        ("keep a\n", ":1: not a run line"),
    ],
)
def test_an_exclusion_needs_a_reason(text: str, error: str, tmp_path: Path):
    path = tmp_path / "list"
    path.write_text(text)
    with pytest.raises(Failed, match=error):
        suite.read_list(path)


def test_a_reason_may_have_several_lines(tmp_path: Path):
    path = tmp_path / "list"
    path.write_text("# comment\nrun a\nskip b\n    one,\n    two\n")
    assert suite.read_list(path).skip == {"b": "one, two"}


def test_each_line_of_the_short_list_selects_one_test_of_the_long_list():
    every, short = suite.read_list(suite.ALL), suite.read_list(suite.SHORT)
    for regex in short.run:
        selected = [name for name in NAMES if suite.Selection([regex]).includes(name)]
        assert len(selected) == 1, (regex, selected)
        assert every.includes(selected[0])


JUNIT = """<testsuites><testsuite>
<testcase name="[BeforeSuite]" status="passed" time="1"/>
<testcase name="[It] [sig-network] a [Slow] [sig-network, Slow]" status="passed" time="1.5"/>
<testcase name="[It] [sig-network] b [sig-network]" status="failed" time="2">
  <failure message="no&#10;answer" type="failed"/></testcase>
<testcase name="[It] [sig-network] c [sig-network]" status="skipped" time="0.1">
  <skipped message="skipped - needs six nodes"/></testcase>
<testcase name="[It] [sig-network] d [sig-network]" status="skipped" time="0">
  <skipped message="skipped"/></testcase>
<testcase name="[SynchronizedBeforeSuite]" status="panicked" time="3">
  <error message="no nodes"/></testcase>
</testsuite></testsuites>"""
ROWS = [
    Row(FAIL, "[SynchronizedBeforeSuite]", 3.0, "no nodes"),
    Row(PASS, "[sig-network] a [Slow]", 1.5),
    Row(FAIL, "[sig-network] b", 2.0, "no answer"),
    Row(SKIP, "[sig-network] c", 0.1, "needs six nodes"),
]


def test_the_report_of_ginkgo_is_read():
    """Tests that were not selected are left out; a failure of the suite itself is one."""
    assert suite.rows(JUNIT) == ROWS


def test_a_table_can_be_read_back():
    run = Run("1.37.1", "kbpf", "6", tuple(ROWS))
    assert Run.parse(run.table()) == run
    assert run.summary == "1 passed, 2 failed, 1 skipped themselves"


def test_a_run_of_one_test_leaves_the_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    again = Row(PASS, "[sig-network] b", 1.0)
    for nodes, rows in (("6", tuple(ROWS)), ("6", (again,)), ("2", (again,))):
        path = report.record(Run("1.37.1", "kbpf", nodes, rows))
        merged = Run.parse(path.read_text())
    assert merged.nodes == "2 and 6"
    assert merged.rows == (*ROWS[:2], again, ROWS[3])


def test_a_build_that_fails_is_reported_without_a_cluster_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(version: object, cni: object) -> None:
        raise BuildError("cannot build ginkgo", "go.mod", "look there")

    monkeypatch.setattr(lifecycle.versions, "programs", fail)
    monkeypatch.setattr(lifecycle, "CLUSTERS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["conformance"])
    assert __main__.main() == 2
    assert capsys.readouterr().err.startswith("conformance: cannot build ginkgo")


def test_runs_that_start_together_remove_an_abandoned_cluster_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    abandoned = tmp_path / "4194305"  # higher than any process id
    abandoned.mkdir()
    removed: list[str] = []

    def down(name: str, logs: Path) -> None:
        removed.append(name)
        time.sleep(0.3)
        abandoned.rmdir()

    monkeypatch.setattr(lifecycle, "CLUSTERS", tmp_path)
    monkeypatch.setattr(lifecycle, "down", down)
    with ThreadPoolExecutor() as pool:
        for removal in [pool.submit(lifecycle.remove_abandoned) for _ in range(2)]:
            removal.result()
    assert removed == [abandoned.name]


@pytest.mark.parametrize(("rows", "passes"), [(ROWS[1:2], True), (ROWS[1::2], True), (ROWS[3:], False), (ROWS, False)])
def test_a_run_passes_if_something_passed_and_nothing_failed(rows: list[Row], passes: bool):
    assert Run("1.37.1", "kbpf", "6", tuple(rows)).passes is passes


def test_the_document_has_the_recorded_results():
    text = report.DOCUMENT.read_text()
    assert report.page(text, RECORDED) == text, "run: python -m tests.conformance report"


def test_recorded_tests_are_in_the_list():
    every = suite.read_list(suite.ALL)
    assert [name for name in NAMES if not every.includes(name)] == []


def test_kbpf_fails_no_recorded_test():
    assert [run.version for run in RECORDED if run.proxy == "kbpf" and not run.passes] == []
