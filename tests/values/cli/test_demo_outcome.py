# SPDX-License-Identifier: Apache-2.0
"""How the demo evaluates the results of its client."""

import pytest

from kbpf.demo.client import RequestCounter
from kbpf.demo.live import STEPS, DemoProgress
from kbpf.demo.manifests import BackendPod
from kbpf.demo.once import evaluate
from kbpf.demo.report import ClientReport, RequestCounts, decode, encode

PODS = [BackendPod(1), BackendPod(2), BackendPod(3)]
ALL = {"backend-1": 100, "backend-2": 90, "backend-3": 110}


RESULTS = {
    "all answered": (RequestCounts(ALL), RequestCounts({"backend-1": 30}), ""),
    "one refused": (RequestCounts({**ALL, "backend-1": 99}, {"ECONNREFUSED": 1}), RequestCounts(),
        "1 of 300 requests by TCP failed: 1 x ECONNREFUSED"),
    "nothing works": (RequestCounts({}, {"ENETUNREACH": 300}), RequestCounts(), "300 of 300"),
    "a datagram is lost": (RequestCounts(ALL), RequestCounts({}, {"timeout": 1}),
        "by UDP failed: 1 x timeout"),
    "a backend is left out": (RequestCounts({"backend-1": 200, "backend-2": 100}), RequestCounts(),
        "backend-3 was not reached"),
    "an unknown backend answers": (RequestCounts({**ALL, "backend-1": 99, "backend-9": 1}),
        RequestCounts(), "backend-9 answered"),
    "requests are missing": (RequestCounts({**ALL, "backend-1": 1}), RequestCounts(), "201 of 300"),
    "nothing was sent": (RequestCounts(), RequestCounts(), "0 of 300"),
}  # fmt: skip
"""The client's results for 300 requests, and words of the expected problem ("": none)."""


@pytest.mark.parametrize("name", RESULTS)
def test_wrong_result_is_a_failure_with_a_problem(name: str):
    tcp, udp, problem = RESULTS[name]
    outcome = evaluate(ClientReport(tcp, udp, 0.5, True), 300, PODS)
    assert outcome.succeeded == (not problem)
    assert problem in " ".join(outcome.problems)
    assert outcome.requests == tcp.requests
    assert outcome.failed == tcp.failures
    assert {"backend-1", "backend-2", "backend-3"} <= outcome.backends.keys()


def test_report_survives_encode_and_decode():
    report = ClientReport(RequestCounts(ALL, {"timeout": 1}), RequestCounts(), 0.25, True)
    assert decode(encode(report)) == report


def test_client_counts_errors_by_name():
    def fails(error: Exception):
        def ask(_: object) -> str:
            raise error

        return ask

    count = RequestCounter()
    count.request(lambda _: "backend-1", ("", 0))
    count.request(fails(ConnectionRefusedError(111, "refused")), ("", 0))
    count.request(fails(TimeoutError()), ("", 0))
    assert count.pop() == RequestCounts({"backend-1": 1}, {"ECONNREFUSED": 1, "timeout": 1})
    assert count.pop() == RequestCounts()


def test_picture_has_shares_of_the_last_seconds_and_totals_of_all():
    gallery = DemoProgress()
    gallery.start_step(STEPS[0])
    gallery.add_report(ClientReport(RequestCounts({"backend-1": 100}), seconds=5.0))
    gallery.add_report(ClientReport(RequestCounts({"backend-2": 30, "backend-3": 10}), seconds=2.0))
    gallery.add_report(
        ClientReport(RequestCounts({}, {"ECONNREFUSED": 3, "timeout": 1}), seconds=0.5)
    )
    now = gallery.build_picture()
    assert [round(one.share, 2) for one in now.shares] == [0.0, 0.75, 0.25, 0.0]
    assert [one.total for one in now.shares] == [100, 30, 10, 0]
    assert (now.answered, now.refused, now.failed) == (140, 3, 1)
    assert now.shares[3].state == "not in the Service"
    assert now.events == ((0.0, STEPS[0].event),)


def test_steps_include_all_backends_none_and_a_terminating_one():
    served = {pod.number for step in STEPS for pod in step.pods}
    assert served == {1, 2, 3, 4}
    assert any(not step.pods for step in STEPS)
    assert any(pod.terminating for step in STEPS for pod in step.pods)
