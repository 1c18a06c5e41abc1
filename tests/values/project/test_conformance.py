# SPDX-License-Identifier: Apache-2.0
"""tests/conformance: its lists, how it reads a report, and the document made from its results."""

from tests.conformance import report, suite
from tests.conformance.report import PASS
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


def test_the_document_has_the_recorded_results():
    text = report.DOCUMENT.read_text()
    assert report.page(text, RECORDED) == text, "run: python -m tests.conformance report"


def test_every_recorded_run_of_kbpf_passed_the_future_conformance_tests():
    for run in RECORDED:
        passed = {report.short_name(row.name) for row in run.rows if row.result == PASS}
        assert run.proxy != "kbpf" or passed >= report.FUTURE.keys()


def test_kbpf_fails_no_recorded_test():
    assert [run.version for run in RECORDED if run.proxy == "kbpf" and not run.passes] == []
