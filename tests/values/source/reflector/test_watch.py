# SPDX-License-Identifier: Apache-2.0
"""The end of a watch, refusals and outages; test_histories.py has most responses."""

import pytest

from tests.support.faults.scripted import Exchange, ScriptedServer
from tests.support.table import each_line
from tests.values.source.reflector.scripted import LISTED_A, LOGIN, status

# --- the watch ends ---


def test_410_as_the_response_to_a_watch_leads_to_a_new_list_and_is_no_failure(start, caplog):
    run = start("watch +a@5 synced@10 end", "410 too old", LISTED_A)
    run.until_watching(3)
    assert run.all_asked == ["stream", "watch 10", "stream"]
    assert "watch failed" not in caplog.text


# --- refusals and outages ---


SAYS = {
    "302": lambda exchange: exchange.answer(302, b""),
    "502 HTML": lambda exchange: exchange.answer(502, b"<html>bad gateway"),
    "401 HTML": lambda exchange: exchange.answer(401, LOGIN),
    "closes": Exchange.cut,
    "resets": Exchange.reset,
    "no HTTP": lambda exchange: exchange.sock.sendall(b"SSH-2.0\r\n\r\n"),
}
"""Responses to a watch that step() has no words for."""


@each_line(
    "response, what, hint",
    """\
403 services is forbidden: User "kbpf" cannot list resource "services" | 403 No \
| grant list and watch on services to kbpf (ClusterRole system:node-proxier)
401 Unauthorized | 401 No | the credentials from the test are invalid
500 etcd is away | 500 No | etcd is away
503 | 503 No
429 too many requests | 429 No | too many requests
302 | 302 No
404 | 404 No | the server does not have /api/v1/services
502 HTML | 502 No, an HTML page | does a proxy or login page answer
401 HTML | 401 No, an HTML page | does a proxy or login page answer
closes | the server closed the connection
resets | connection reset by peer
no HTTP | not an HTTP response
""",
)
def test_a_failed_watch_keeps_the_objects_and_the_error_says_what_to_do(start, response, what, hint):
    """The response, and what the error says is the cause and the remedy."""
    # Four times, because the first may fail on a reused connection, which is retried at once.
    # After an outage the reflector checks with a list of one object what the server has lost.
    run = start("watch +a@5 synced@10 end", *[SAYS.get(response, response)] * 4, "list@10 a@5")
    run.until_watching(7)
    line = run.errors[6]
    assert line.startswith(f"cannot watch services: {what}")
    assert f"({run.server.url})" in line
    assert hint in line
    assert "\n" not in line
    assert run.said == ["+a", "synced"]
    status = run.status
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
    run = start(*["500"] * 11)
    run.until(lambda: len(run.waits) >= 10)
    assert run.waits[:10] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]


def test_refused_connection_is_an_error_and_no_event(start):
    run = start(LISTED_A)
    run.until_watching(1)
    run.server.__exit__()
    run.server.script = []
    run.server = ScriptedServer()  # on another port, so the old one refuses connections
    run.until(lambda: run.status.failures >= 2)
    assert "connection refused" in run.status.error
    assert run.said == ["+a", "synced"]
