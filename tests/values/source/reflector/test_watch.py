# SPDX-License-Identifier: Apache-2.0
"""The end of a watch, refusals and outages."""

import json

import pytest

from kbpf.model.events import Kind, ObjectKey, Rejected
from tests.support.faults.scripted import Exchange, ScriptedServer, quiet
from tests.values.source.reflector.scripted import (
    LISTED_A,
    LOGIN,
    PAGES,
    added,
    bookmark,
    error,
    listed,
    listed_a,
    service,
    status,
    streamed,
)

# --- the watch ends ---


def test_410_in_the_watch_leads_to_a_new_list_at_once(start):
    run = start(listed_a(error(410)), streamed(bookmark(20, end=True)))
    run.until(lambda: run.said.count("synced") == 2)
    assert run.all_asked == ["stream", "stream"]
    assert run.said == ["+a", "synced", "-a", "synced"]
    assert run.waits == []


def test_410_twice_waits_before_the_third_list(start):
    run = start(listed_a(error(410)), listed_a(error(410)), LISTED_A)
    run.until(lambda: run.said.count("synced") == 3)
    assert run.all_asked == ["stream"] * 3
    assert run.waits == [0.4]
    assert run.said == ["+a", "synced", "synced", "synced"]


def test_410_as_the_response_to_a_watch_leads_to_a_new_list_and_is_no_failure(start, caplog):
    run = start(listed_a(), status(410, "too old"), LISTED_A)
    run.until_watching(3)
    assert run.all_asked == ["stream", "watch 10", "stream"]
    assert "watch failed" not in caplog.text


def test_410_between_pages_starts_the_list_over(start):
    run = start(PAGES, listed(service("a", 1), token="t"), status(410), listed(service("b", 2)))
    run.until_watching(5)
    assert run.all_asked == ["stream", "page", "page after t", "page", "watch 100"]
    assert run.said == ["+a", "+b", "-a", "synced"]


def test_watch_that_ended_cleanly_resumes_at_the_last_bookmark_at_once(start):
    run = start(listed_a(bookmark(33)), streamed(added("b", 40)))
    run.until(lambda: "+b" in run.said)
    assert run.all_asked == ["stream", "watch 33"]
    assert run.waits == []
    assert run.reflector.status().failures == 0


@pytest.mark.parametrize("then", [Exchange.end, Exchange.cut, Exchange.reset])
def test_watch_cut_inside_a_line_resumes_after_the_last_complete_one(start, then):
    cut = json.dumps(added("c", 12)).encode()[:40]
    run = start(listed_a(added("b", 11), cut, then=then), streamed(added("c", 12)))
    run.until(lambda: "+c" in run.said)
    assert run.all_asked == ["stream", "watch 11"]
    assert run.said == ["+a", "synced", "+b", "+c"]
    assert run.waits == [0.2]


@pytest.mark.parametrize("code", [500, 401, 429, 0])
def test_an_error_in_the_watch_leads_to_a_new_list(start, code):
    run = start(listed_a(error(code)), LISTED_A)
    run.until(lambda: run.said.count("synced") == 2)
    assert run.all_asked == ["stream", "stream"]
    assert run.waits == [0.2]


def test_malformed_line_in_a_watch_leads_to_a_new_list(start):
    run = start(listed_a(b"rubbish\n", added("b", 11)), streamed(added("a", 5), added("b", 11), bookmark(20, end=True)))
    run.until(lambda: "+b" in run.said)
    assert run.all_asked == ["stream", "stream"]
    assert run.said[:3] == ["+a", "synced", "+b"]


def test_malformed_object_is_rejected_and_the_watch_continues(start):
    poison = added("bad", 11, ports=[{"port": 70000}])
    run = start(listed_a(poison, added("b", 12)), streamed(added("c", 13)))
    run.until(lambda: "+c" in run.said)
    assert run.said == ["+a", "synced", "!bad", "+b", "+c"]
    assert run.asked(1) == "watch 12"
    assert run.events[2] == Rejected(ObjectKey(Kind.SERVICE, "ns", "bad"), "spec.ports[0].port: 70000 is not a port")


def test_service_that_becomes_headless_is_deleted(start):
    run = start(listed_a(added("a", 11, clusterIP="None"), added("b", 12, clusterIP="None")))
    run.until(lambda: "-a" in run.said)
    assert run.said == ["+a", "synced", "-a"]


def test_closed_idle_connection_is_reopened_without_a_failure(start):
    def step(exchange: Exchange) -> None:
        listed_a()(exchange)
        exchange.cut()

    run = start(step, streamed(added("b", 11)))
    run.until(lambda: "+b" in run.said)
    assert run.waits == []
    assert run.reflector.status().failures == 0


# --- refusals and outages ---


REFUSALS = [
    (
        status(403, 'services is forbidden: User "kbpf" cannot list resource "services"'),
        "403 No",
        "grant list and watch on services to kbpf (ClusterRole system:node-proxier)",
    ),
    (status(401, "Unauthorized"), "401 No", "the credentials from the test are invalid"),
    (status(500, "etcd is away"), "500 No", "etcd is away"),
    (status(503), "503 No", ""),
    (status(429, "too many requests"), "429 No", "too many requests"),
    (lambda exchange: exchange.answer(302, b""), "302 No", ""),
    (status(404), "404 No", "the server does not have /api/v1/services"),
    (
        lambda exchange: exchange.answer(502, b"<html>bad gateway"),
        "502 No, an HTML page",
        "does a proxy or login page answer",
    ),
    (lambda exchange: exchange.answer(401, LOGIN), "401 No, an HTML page", "does a proxy or login page answer"),
    (Exchange.cut, "the server closed the connection", ""),
    (Exchange.reset, "connection reset by peer", ""),
    (lambda exchange: exchange.sock.sendall(b"SSH-2.0\r\n\r\n"), "not an HTTP response", ""),
]


REFUSAL_IDS = (
    "403",
    "401",
    "500",
    "503",
    "429",
    "302",
    "404",
    "502 with an HTML page",
    "401 with an HTML page",
    "connection closed",
    "connection reset",
    "not HTTP",
)


@pytest.mark.parametrize(("step", "what", "hint"), REFUSALS, ids=REFUSAL_IDS)
def test_a_failed_watch_keeps_the_objects_and_the_error_says_what_to_do(start, step, what, hint):
    seen: list[str] = []

    def healed(exchange: Exchange) -> None:
        seen.append(run.reflector.status().error)
        quiet(exchange)

    # Four times, because the first may fail on a reused connection, which is retried at once.
    # After an outage the reflector checks with a list of one object what the server has lost.
    run = start(listed_a(), *[step] * 4, listed(service("a", 5), version=10), healed, hold=True)
    run.reflector.start()
    run.until_watching(7)
    (line,) = seen
    assert line.startswith(f"cannot watch services: {what}")
    assert f"({run.server.url})" in line
    assert hint in line
    assert "\n" not in line
    assert run.said == ["+a", "synced"]
    status = run.reflector.status()
    assert (status.failures, status.error, status.synced) == (0, "", True)


@pytest.mark.parametrize("code", [429, 503, 500])
def test_retry_after_is_honoured(start, code):
    run = start(status(code, Retry_After="7"), LISTED_A)
    run.until_watching(2)
    (waited,) = run.waits
    assert 7 <= waited <= 14


def test_retry_after_as_a_date_is_ignored_and_a_large_one_capped(start):
    run = start(status(429, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"), status(429, Retry_After="9" * 5000), LISTED_A)
    run.until_watching(3)
    assert run.waits[0] == 0.2
    assert 60 <= run.waits[1] <= 90


def test_waits_double_up_to_30_seconds(start):
    run = start(*[status(500)] * 11)
    run.until(lambda: len(run.waits) >= 10)
    assert run.waits[:10] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]


def test_refused_connection_is_an_error_and_no_event(start):
    run = start(LISTED_A)
    run.until_watching(1)
    run.server.__exit__()
    run.server.script = []
    run.server = ScriptedServer()  # on another port, so the old one refuses connections
    run.until(lambda: run.reflector.status().failures >= 2)
    assert "connection refused" in run.reflector.status().error
    assert run.said == ["+a", "synced"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (400, "invalid resource version"),
        (422, "resourceVersion: Invalid value"),
        (504, "Too large resource version: 10, current: 4"),  # etcd was restored from a backup
    ],
)
def test_watch_refused_for_its_version_leads_to_a_new_list(start, code: int, message: str):
    run = start(listed_a(), status(code, message), LISTED_A)
    run.until(lambda: run.said.count("synced") == 2)
    assert run.all_asked == ["stream", "watch 10", "stream"]
