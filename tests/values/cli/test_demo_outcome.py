# SPDX-License-Identifier: Apache-2.0
"""How the demo evaluates the results of its client."""

import msgspec
import pytest

from kbpf.demo.client import Answer, RequestCounter
from kbpf.demo.live import STEPS, DemoProgress, DemoStep
from kbpf.demo.once import CLIENTS, PHASES, PhaseReports, evaluate
from kbpf.demo.report import ClientReport, RequestCounts, decode, encode

ALL = {"backend-1": 100, "backend-2": 90, "backend-3": 110}
SOME = {"backend-1": 70, "backend-2": 70, "backend-3": 70}
TIMES = {90: 200, 250: 97, 4000: 3}


def good() -> list[PhaseReports]:
    """What both clients report if all is as expected, with 300 requests a phase."""
    phases = [PhaseReports(phase) for phase in PHASES]
    for reports in phases:
        refused = {"ECONNREFUSED": 90} if reports.phase.refuses else {}
        tcp = RequestCounts(SOME if refused else ALL, refused, TIMES)
        for client in CLIENTS:
            udp = RequestCounts({"backend-1": 30}) if client == "client" else RequestCounts()
            reports.totals[client] = ClientReport(tcp, udp, 0.5, True)
            reports.without_agent[client] = 100 * reports.phase.restarts_agent
    return phases


SERVES, RESTART, REFUSES = range(3)
PROBLEMS = {
    "one refused that should not be": (SERVES, {**ALL, "backend-1": 99}, {"ECONNREFUSED": 1},
        "three backends serve, outside: 1 of 300 connections failed: 1 x ECONNREFUSED", 1),
    "nothing works": (SERVES, {}, {"ENETUNREACH": 300}, "300 of 300", 300),
    "one fails while the agent restarts": (RESTART, ALL, {"timeout": 1}, "1 of 301", 1),
    "another error than a refusal": (REFUSES, SOME, {"ECONNREFUSED": 88, "timeout": 2},
        "2 of 300 connections failed: 2 x timeout", 2),
    "the broken backend refuses nothing": (REFUSES, ALL, {}, "no connection was refused", 0),
    "the broken backend answers": (REFUSES, {**SOME, "backend-4": 1}, {"ECONNREFUSED": 89},
        "backend-4 answered", 0),
    "a backend is left out": (SERVES, {"backend-1": 200, "backend-2": 100}, {},
        "backend-3 was not reached", 0),
    "an unknown backend answers": (SERVES, {**ALL, "backend-1": 99, "backend-9": 1}, {},
        "backend-9 answered", 0),
    "requests are missing": (SERVES, {**ALL, "backend-1": 1}, {}, "201 of 300", 0),
    "too few while the agent restarts": (RESTART, {**ALL, "backend-1": 1}, {}, "201 of 300", 0),
    "nothing was sent": (SERVES, {}, {}, "0 of 300", 0),
}  # fmt: skip
"""Phase, what the client outside saw in it, words of the expected problem, unexpected failures."""


@pytest.mark.parametrize("name", PROBLEMS)
def test_wrong_result_is_a_failure_with_a_problem(name: str):
    phase, answered, failed, problem, failures = PROBLEMS[name]
    phases = good()
    phases[phase].totals["outside"] = ClientReport(RequestCounts(answered, failed), is_last=True)
    outcome = evaluate(phases, 300)
    assert not outcome.succeeded
    assert problem in " ".join(outcome.problems)
    assert outcome.failed == failures


def test_expected_result_counts_every_connection_and_has_no_problems():
    outcome = evaluate(good(), 300, 1.5)
    assert outcome.problems == ()
    assert (outcome.requests, outcome.failed, outcome.expected) == (1800, 0, 180)
    assert [load.failed for load in outcome.loads] == [0, 0, 0, 0, 90, 90]
    assert {(load.connect_p50, load.connect_p99) for load in outcome.loads} == {(90e-6, 250e-6)}
    assert (outcome.udp.requests, outcome.udp.failed) == (90, 0)


def test_restart_without_a_connection_in_between_proves_nothing():
    phases = good()
    phases[RESTART].without_agent["client"] = 0
    (problem,) = evaluate(phases, 300).problems
    assert "no connection was made while no agent ran" in problem


def test_lost_datagram_is_a_problem():
    phases = good()
    udp = RequestCounts({"backend-1": 29}, {"timeout": 1})
    report = phases[SERVES].totals["client"]
    phases[SERVES].totals["client"] = msgspec.structs.replace(report, udp=udp)
    assert evaluate(phases, 300).problems == ("1 of 90 datagrams failed: 1 x timeout",)


def test_times_of_connect_are_those_of_a_share_of_the_calls():
    counts = RequestCounts(connect_us={100: 98}) + RequestCounts(connect_us={100: 1, 2000: 1})
    assert [counts.connect_seconds(s) for s in (0.5, 0.99, 1.0)] == [100e-6, 100e-6, 2000e-6]
    assert RequestCounts({"backend-1": 1}).connect_seconds(0.5) is None


def test_report_survives_encode_and_decode():
    report = ClientReport(
        RequestCounts(ALL, {"timeout": 1}, TIMES), RequestCounts(), 0.25, True, 9.5
    )
    assert decode(encode(report)) == report


def test_client_counts_errors_by_name():
    def fails(error: Exception):
        def ask(_: object) -> Answer:
            raise error

        return ask

    count = RequestCounter()
    count.request(lambda _: Answer("backend-1", 120), ("", 0))
    count.request(fails(ConnectionRefusedError(111, "refused")), ("", 0))
    count.request(fails(TimeoutError()), ("", 0))
    assert count.pop() == RequestCounts(
        {"backend-1": 1}, {"ECONNREFUSED": 1, "timeout": 1}, {120: 1}
    )
    assert count.pop() == RequestCounts()


def test_picture_has_shares_and_times_of_the_last_seconds_and_totals_of_all():
    progress = DemoProgress()
    progress.start_step(STEPS[0])
    progress.add_report(ClientReport(RequestCounts({"backend-1": 100}, {}, {50: 100}), seconds=5.0))
    answers = RequestCounts({"backend-2": 30, "backend-3": 10}, {}, {100: 39, 900: 1})
    progress.add_report(ClientReport(answers, seconds=2.0))
    progress.add_report(ClientReport(RequestCounts({}, {"timeout": 1}), seconds=0.5))
    now = progress.build_picture()
    assert [round(one.share, 2) for one in now.shares] == [0.0, 0.75, 0.25, 0.0, 0.0]
    assert [one.total for one in now.shares] == [100, 30, 10, 0, 0]
    assert (now.answered, now.refused, now.failed) == (140, 0, 1)
    assert (now.connect_p50, now.connect_p99) == (100e-6, 900e-6)
    assert now.shares[3].state == "not in the Service"
    assert now.events == ((0.0, STEPS[0].event),)


REFUSAL = ClientReport(RequestCounts({}, {"ECONNREFUSED": 1}), seconds=1.5)
BROKEN = next(step for step in STEPS if step.pods and step.refuses)
EMPTY = next(step for step in STEPS if not step.pods)


@pytest.mark.parametrize(
    ("steps", "refused", "failed"),
    [
        ([STEPS[0]], 0, 1),
        ([BROKEN], 1, 0),
        ([EMPTY], 1, 0),
        ([BROKEN, STEPS[0]], 2, 0),  # so soon after it, the report may be of both
        ([BROKEN, STEPS[0], STEPS[1]], 3, 0),
        ([BROKEN, STEPS[0], STEPS[1], STEPS[2]], 3, 1),
    ],
)
def test_refusals_are_expected_only_where_connections_should_be_refused(
    steps: list[DemoStep], refused: int, failed: int
):
    progress = DemoProgress()
    for step in steps:
        progress.start_step(step)
        progress.add_report(REFUSAL)
    picture = progress.build_picture()
    assert (picture.refused, picture.failed) == (refused, failed)


def test_steps_include_every_kind_of_change():
    served = {pod.number for step in STEPS for pod in step.pods if not pod.refuses}
    assert served == {1, 2, 3, 4}
    assert any(not step.pods for step in STEPS)
    assert any(pod.terminating for step in STEPS for pod in step.pods)
    assert any(pod.refuses for step in STEPS for pod in step.pods)
    stopped = [step.agent_runs for step in STEPS].index(False)
    assert STEPS[stopped + 1].agent_runs
