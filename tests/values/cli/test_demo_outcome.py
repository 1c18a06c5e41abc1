"""What the demo makes of what its client saw."""

from typing import NamedTuple

import pytest

from kbpf.demo.client import Count
from kbpf.demo.live import STEPS, Gallery
from kbpf.demo.manifests import Pod
from kbpf.demo.once import evaluate
from kbpf.demo.report import Report, Tally, decode, encode

PODS = [Pod(1), Pod(2), Pod(3)]
ALL = {"backend-1": 100, "backend-2": 90, "backend-3": 110}


class Seen(NamedTuple):
    """What the client saw of 300 requests, and words of what is wrong with it ("" nothing)."""

    name: str
    tcp: Tally
    udp: Tally
    problem: str


SEEN = [
    Seen("all answered", Tally(ALL), Tally({"backend-1": 30}), ""),
    Seen("one refused", Tally({**ALL, "backend-1": 99}, {"ECONNREFUSED": 1}), Tally(),
         "1 of 300 requests by TCP failed: 1 x ECONNREFUSED"),
    Seen("nothing works", Tally({}, {"ENETUNREACH": 300}), Tally(), "300 of 300"),
    Seen("a datagram is lost", Tally(ALL), Tally({}, {"timeout": 1}), "by UDP failed: 1 x timeout"),
    Seen("a backend is left out", Tally({"backend-1": 200, "backend-2": 100}), Tally(),
         "backend-3 was not reached"),
    Seen("a stranger answers", Tally({**ALL, "backend-1": 99, "backend-9": 1}), Tally(),
         "backend-9 answered"),
    Seen("requests are missing", Tally({**ALL, "backend-1": 1}), Tally(), "201 of 300"),
    Seen("nothing was sent", Tally(), Tally(), "0 of 300"),
]  # fmt: skip


@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: seen.name)
def test_what_is_wrong_is_said_and_fails(seen: Seen):
    outcome = evaluate(Report(seen.tcp, seen.udp, 0.5, True), 300, PODS)
    assert outcome.succeeded == (not seen.problem)
    assert seen.problem in " ".join(outcome.problems)
    assert outcome.requests == seen.tcp.requests
    assert outcome.failed == seen.tcp.failures
    assert {"backend-1", "backend-2", "backend-3"} <= outcome.backends.keys()


def test_lines_come_back_as_they_went():
    report = Report(Tally(ALL, {"timeout": 1}), Tally(), 0.25, True)
    assert decode(encode(report)) == report


def test_the_client_counts_errors_by_name():
    def fails(error: Exception):
        def ask(_: object) -> str:
            raise error

        return ask

    count = Count()
    count.ask(lambda _: "backend-1", ("", 0))
    count.ask(fails(ConnectionRefusedError(111, "refused")), ("", 0))
    count.ask(fails(TimeoutError()), ("", 0))
    assert count.take() == Tally({"backend-1": 1}, {"ECONNREFUSED": 1, "timeout": 1})
    assert count.take() == Tally()


def test_a_picture_shows_shares_of_the_last_seconds_and_totals_of_all():
    gallery = Gallery()
    gallery.begin(STEPS[0])
    gallery.add(Report(Tally({"backend-1": 100}), seconds=5.0))
    gallery.add(Report(Tally({"backend-2": 30, "backend-3": 10}), seconds=2.0))
    gallery.add(Report(Tally({}, {"ECONNREFUSED": 3, "timeout": 1}), seconds=0.5))
    now = gallery.picture()
    assert [round(one.share, 2) for one in now.shares] == [0.0, 0.75, 0.25, 0.0]
    assert [one.total for one in now.shares] == [100, 30, 10, 0]
    assert (now.answered, now.refused, now.failed) == (140, 3, 1)
    assert now.shares[3].state == "not in the Service"
    assert now.events == ((0.0, STEPS[0].event),)


def test_the_steps_lead_through_everything():
    served = {pod.number for step in STEPS for pod in step.pods}
    assert served == {1, 2, 3, 4}
    assert any(not step.pods for step in STEPS)
    assert any(pod.terminating for step in STEPS for pod in step.pods)
