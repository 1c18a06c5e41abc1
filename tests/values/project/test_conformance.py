# SPDX-License-Identifier: Apache-2.0
"""tests/conformance: its lists, how it reads a report, and the document made from its results."""

import pytest

from tests.conformance import report, suite
from tests.conformance.report import FAIL, PASS, SKIP, Row, Run
from tests.conformance.versions import VERSIONS
from tests.support.build import go_build
from tests.support.build.programs import PREVIOUS

RECORDED = report.recorded()
NAMES = sorted({row.name for run in RECORDED for row in run.rows})


def test_versions_are_those_of_the_modules():
    built = [go_build.kubernetes_version(), go_build.kubernetes_version(PREVIOUS)]
    assert [f"v{name}" for name in VERSIONS] == built


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


@pytest.mark.parametrize(("rows", "passes"), [(ROWS[1:2], True), (ROWS[1::2], True), (ROWS[3:], False), (ROWS, False)])
def test_a_run_passes_if_something_passed_and_nothing_failed(rows: list[Row], passes: bool):
    assert Run("1.37.1", "kbpf", "6", tuple(rows)).passes is passes


def test_the_document_has_the_recorded_results():
    text = report.DOCUMENT.read_text()
    assert report.page(text, RECORDED) == text, "run: python -m tests.conformance report"


def test_every_recorded_run_of_kbpf_passed_the_future_conformance_tests():
    for run in RECORDED:
        passed = {report.short_name(row.name) for row in run.rows if row.result == PASS}
        assert run.proxy != "kbpf" or passed >= report.FUTURE.keys()


def test_recorded_tests_are_in_the_list():
    every = suite.read_list(suite.ALL)
    assert [name for name in NAMES if not every.includes(name)] == []


def test_kbpf_fails_no_recorded_test():
    assert [run.version for run in RECORDED if run.proxy == "kbpf" and not run.passes] == []
