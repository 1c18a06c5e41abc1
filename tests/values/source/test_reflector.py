# SPDX-License-Identifier: Apache-2.0
"""LIST and WATCH against a scripted server: the reflector's events, requests and waits, mostly
after errors of the server.
"""

import contextlib
import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from kbpf.errors import SourceError
from kbpf.model.address import parse_addr
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import Service
from kbpf.source.api.backoff import MAX_REASONS, Backoff, OutageLog
from kbpf.source.api.credentials import Cluster, PageMemory
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import (
    PAGE_SIZE,
    SERVICES,
    SLICES,
    Resource,
    exempt_pod_resource,
    node_resource,
    own_node_resource,
)
from kbpf.source.api.versions import KnownVersions, is_rewind
from kbpf.source.base import SourceState
from kbpf.source.decode.decode import DecodedObject
from tests.support.faults.scripted import Exchange, ScriptedServer, Step, quiet
from tests.support.lab.lab import until

END = {"k8s.io/initial-events-end": "true"}
HEADLESS = "service.kubernetes.io/headless"


# --- responses of the server ---


def service(name: str, version: int, **spec: Any) -> dict[str, Any]:
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]} | spec
    return {
        "metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version)},
        "spec": spec,
    }


def added(name: str, version: int, **spec: Any) -> dict[str, Any]:
    return {"type": "ADDED", "object": service(name, version, **spec)}


def deleted(name: str, version: int) -> dict[str, Any]:
    return {"type": "DELETED", "object": service(name, version)}


def bookmark(version: int, end: bool = False) -> dict[str, Any]:
    meta = {"resourceVersion": str(version), "annotations": END if end else None}
    return {"type": "BOOKMARK", "object": {"kind": "Service", "metadata": meta}}


def error(code: int) -> dict[str, Any]:
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": f"is {code}"}}


def streamed(*lines: Any, then: Callable[[Exchange], None] = Exchange.hang) -> Step:
    """A watch that sends these lines and then ends, hangs or breaks."""

    def step(exchange: Exchange) -> None:
        exchange.watch(*lines)
        then(exchange)

    return step


def listed(*objects: dict[str, Any], version: int = 100, token: str = "") -> Step:
    meta = {"resourceVersion": str(version), "continue": token}
    return lambda exchange: exchange.answer(200, {"metadata": meta, "items": list(objects)})


def status(code: int, message: str = "", **headers: str) -> Step:
    body = {"kind": "Status", "message": message, "code": code}
    return lambda exchange: exchange.answer(code, body, **headers)


LISTED_A = streamed(added("a", 5), bookmark(10, end=True))
"""A streaming list of one Service, `a`, then silence."""


def listed_a(*lines: Any, then: Callable[[Exchange], None] = Exchange.end) -> Step:
    return streamed(added("a", 5), bookmark(10, end=True), *lines, then=then)


# --- the reflector under test ---


class Run:
    """A reflector in its thread, its events, and its waits (recorded, not waited)."""

    def __init__(self, server: ScriptedServer, resource: Resource = SERVICES, **options: Any):
        self.server = server
        self.events: list[Event] = []
        self.waits: list[float] = []
        self.now = 1000.0
        options = {"clock": lambda: self.now, "rng": lambda: 1.0, "wait": self._wait} | options
        cluster = Cluster(Access(server.url, "the test"))
        self.reflector = Reflector(cluster, resource, self.put, **options)

    def put(self, event: Event) -> None:
        self.events.append(event)

    def _wait(self, stop: threading.Event, seconds: float) -> None:
        self.waits.append(round(seconds, 3))
        stop.wait(0.001)

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s:\n{self}"
            time.sleep(0.002)

    def __str__(self) -> str:
        """Events, requests, waits and state, for the message of a failed test."""
        status = self.reflector.status()
        return "\n".join(
            (
                f"  events: {' '.join(self.said)}",
                f"  asked:  {', '.join(self.all_asked)}",
                f"  waits:  {self.waits}",
                f"  state:  {status.state}, version {status.resource_version!r}, {status.error!r}",
            )
        )

    def until_watching(self, requests: int) -> None:
        self.server.wait(requests)
        self.until(lambda: self.state is SourceState.WATCHING)

    @property
    def state(self) -> SourceState:
        return self.reflector.status().state

    @property
    def said(self) -> list[str]:
        """The events in short: +a, -a, !a (rejected), synced."""
        marks = {Upsert: "+", Delete: "-", Rejected: "!"}
        return [
            "synced" if isinstance(e, Synced) else marks[type(e)] + e.key.name for e in self.events
        ]

    def asked(self, n: int) -> str:
        """The n-th request in short: stream, page, page after TOKEN, watch VERSION."""
        query = self.server.requests[n].query
        if "sendInitialEvents" in query:
            return "stream"
        if "watch" in query:
            return f"watch {query['resourceVersion']}"
        return f"page after {query['continue']}" if "continue" in query else "page"

    @property
    def all_asked(self) -> list[str]:
        return [self.asked(n) for n in range(len(self.server.requests))]


WATCH_THREADS = {"services", "endpointslices", "nodes", "pods"}


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """start(step, ...) runs a reflector against that script and returns its Run.

    With `hold` the test itself starts the reflector, so that the steps can use the Run.
    """
    ends: list[Callable[[], None]] = []

    def begin(*script: Step, hold: bool = False, **options: Any) -> Run:
        server = ScriptedServer(*script)
        server.__enter__()
        run = Run(server, **options)
        ends.extend((server.__exit__, run.reflector.stop))
        if not hold:
            run.reflector.start()
        return run

    yield begin
    for end in reversed(ends):
        end()
    until(
        "no thread is left",
        lambda: not any(t.name in WATCH_THREADS for t in threading.enumerate()),
    )


def counted(more: int, version: int = 90) -> Step:
    """A first page whose `remainingItemCount` is `more`."""
    meta = {"resourceVersion": str(version), "continue": "x", "remainingItemCount": more}
    return lambda exchange: exchange.answer(200, {"metadata": meta, "items": []})


PAGES = status(422, "sendInitialEvents: Forbidden")
"""A server without streaming lists."""


# --- listing ---


def test_streaming_list_uses_the_selectors_of_kube_proxy(start):
    run = start(LISTED_A)
    run.until_watching(1)
    (request,) = run.server.requests
    assert request.path == "/api/v1/services"
    seconds = request.query.pop("timeoutSeconds")
    assert 300 <= int(seconds) <= 600
    assert request.query == {
        "watch": "1",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
        "labelSelector": f"!service.kubernetes.io/service-proxy-name,!{HEADLESS}",
        "fieldSelector": "spec.clusterIP!=None",
    }


@pytest.mark.parametrize(
    ("resource", "path", "selector"),
    [
        (SLICES, "/apis/discovery.k8s.io/v1/endpointslices", {"labelSelector": f"!{HEADLESS}"}),
        (own_node_resource("n1"), "/api/v1/nodes", {"fieldSelector": "metadata.name=n1"}),
        (
            exempt_pod_resource("n1"),
            "/api/v1/pods",
            {"labelSelector": "kbpf.io/socket-lb=off", "fieldSelector": "spec.nodeName=n1"},
        ),
    ],
    ids=("slices", "our node", "exempt pods of our node"),
)
def test_selectors_of_slices_our_node_and_exempt_pods(start, resource, path, selector):
    run = start(PAGES, listed(), resource=resource)
    run.server.wait(3)
    for request in run.server.requests:
        assert request.path == path
        chosen = {n: v for n, v in request.query.items() if n.endswith("Selector")}
        assert chosen == selector


def test_streaming_list_then_synced_then_watch(start):
    run = start(streamed(added("a", 5), bookmark(10, end=True), added("b", 11), deleted("a", 12)))
    run.until(lambda: len(run.events) == 4)
    assert run.said == ["+a", "synced", "+b", "-a"]
    first = run.events[0]
    assert isinstance(first, Upsert)
    assert isinstance(first.object, Service)
    assert first.received_at == 1000.0
    status = run.reflector.status()
    assert (status.kinds, status.synced, status.error) == ((Kind.SERVICE,), True, "")
    assert (status.state, status.failures) == (SourceState.WATCHING, 0)
    assert (status.resource_version, status.last_contact) == ("12", 1000.0)


@pytest.mark.parametrize("code", [400, 422])
def test_server_without_streaming_lists_is_listed_by_pages(start, code):
    run = start(
        status(code, "sendInitialEvents: Forbidden"),
        listed(service("a", 5), token="t1"),
        listed(service("b", 6), token="t2"),
        listed(service("c", 7), version=100),
    )
    run.until_watching(5)
    assert run.all_asked == ["stream", "page", "page after t1", "page after t2", "watch 100"]
    assert run.server.requests[1].query["limit"] == "500"
    assert run.said == ["+a", "+b", "+c", "synced"]
    assert run.waits == []


def test_refused_streaming_list_is_not_requested_again(start):
    run = start(PAGES, listed(), streamed(error(410), then=Exchange.end), listed())
    run.server.wait(5)
    assert run.all_asked == ["stream", "page", "watch 100", "page", "watch 100"]


def test_unsupported_field_selector_is_replaced_by_local_filtering(start):
    none = service("headless", 6, clusterIP="None")
    run = start(
        status(400, 'field selector "spec.clusterIP!=None": field label not supported: spec.c'),
        streamed(added("a", 5), {"type": "ADDED", "object": none}, bookmark(10, end=True)),
    )
    run.until(lambda: "synced" in run.said)
    assert run.said == ["+a", "synced"]
    assert "fieldSelector" not in run.server.requests[1].query
    assert run.all_asked == ["stream", "stream"]


@pytest.mark.parametrize("then", [Exchange.end, Exchange.cut, Exchange.reset])
def test_broken_streaming_list_is_not_synced_and_pages_follow(start, then):
    run = start(streamed(added("a", 5), added("b", 6), then=then), listed(service("a", 5)))
    run.until_watching(3)
    assert run.all_asked == ["stream", "page", "watch 100"]
    assert [mark for mark in run.said if mark == "synced"] == ["synced"]
    assert run.said[-2:] == ["-b", "synced"]
    assert run.waits == [0.2]


def test_streaming_list_without_end_bookmark_times_out(start):
    def step(exchange: Exchange) -> None:
        exchange.watch(added("a", 5))
        run.until(lambda: run.said == ["+a"])
        run.now += 121
        exchange.line(bookmark(7))
        exchange.hang()

    run = start(step, listed(service("a", 5)), hold=True)
    run.reflector.start()
    run.until_watching(3)
    assert run.all_asked == ["stream", "page", "watch 100"]


def test_new_list_makes_events_only_for_differences(start):
    run = start(
        streamed(added("a", 1), added("b", 2), added("c", 3), bookmark(9, end=True), error(410)),
        streamed(added("a", 1), added("c", 8), added("d", 9), bookmark(10, end=True)),
    )
    run.until(lambda: run.said.count("synced") == 2)
    assert run.said == ["+a", "+b", "+c", "synced", "+c", "+d", "-b", "synced"]


def test_object_deleted_during_a_streaming_list_stays_deleted(start):
    run = start(
        streamed(added("a", 1), added("b", 2), deleted("a", 3), bookmark(4, end=True), error(410)),
        streamed(added("b", 2), bookmark(10, end=True)),
    )
    run.until(lambda: run.said.count("synced") == 2)
    assert run.said == ["+a", "+b", "-a", "synced", "synced"]


def test_list_with_a_failed_page_deletes_nothing(start):
    run = start(
        PAGES,
        listed(service("a", 1), service("b", 2)),
        streamed(error(410), then=Exchange.end),
        listed(service("b", 2), token="t"),
        status(500),
        listed(service("b", 2), service("c", 3), token="t"),
        listed(version=200),
    )
    run.until_watching(8)
    assert run.said == ["+a", "+b", "synced", "+c", "-a", "synced"]
    assert run.all_asked[3:] == ["page", "page after t", "page", "page after t", "watch 200"]


def test_list_with_an_unreadable_object_deletes_nothing(start):
    nameless = {"metadata": {}, "spec": {}}
    run = start(
        PAGES,
        listed(service("a", 1)),
        streamed(error(410), then=Exchange.end),
        listed(service("b", 2), nameless),
    )
    run.until_watching(5)
    assert run.said == ["+a", "synced", "+b", "synced"]


def test_streaming_list_with_a_malformed_line_is_followed_by_pages(start):
    """Without the list by pages, objects deleted meanwhile would stay until the next relist."""
    run = start(
        listed_a(error(410)),
        streamed(b"rubbish\n", added("b", 6), bookmark(20, end=True)),
        listed(service("b", 6)),
    )
    run.until(lambda: run.said.count("synced") == 2)
    assert run.said == ["+a", "synced", "+b", "-a", "synced"]
    assert run.all_asked[:3] == ["stream", "stream", "page"]


class NotAList(NamedTuple):
    """The body of a 200 response that is not a list, and the words of the error in either mode."""

    name: str
    body: bytes
    pages: str
    stream: str


LOGIN = b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html>\n<title>Sign in</title>\n</html>\n"
HTML = "the response is an HTML page"
NOT_LISTS = [
    NotAList("HTML", b"<html>", HTML, HTML),
    NotAList("a login page", LOGIN, HTML, HTML),
    NotAList("null", b"null\n", "the response is not a list: expected an object",
             "a line is not an event: expected an object"),
    NotAList("a list", b"[]\n", "the response is not a list: expected an object",
             "a line is not an event: expected an object"),
    NotAList("empty", b"", "the response is not a list: invalid JSON: ", "the stream ended "
                                                                       "before the list did"),
    NotAList("broken", b'{"items": [}\n', "the response is not a list: invalid JSON: JSON is "
                                        "malformed",
           "a line is not an event: invalid JSON: JSON is malformed"),
    NotAList("truncated", b'{"items": ', "the response is not a list: invalid JSON: ",
             "invalid JSON: the stream ended inside a line"),
    NotAList("plain text", b"welcome\n", "the response is not a list: invalid JSON: ",
             "a line is not an event: invalid JSON: "),
]  # fmt: skip


@pytest.mark.parametrize("how", ["pages", "stream"])
@pytest.mark.parametrize("row", NOT_LISTS, ids=lambda row: row.name)
def test_response_that_is_not_a_list_is_an_error_that_describes_it(
    start, caplog, row: NotAList, how: str
):
    caplog.set_level(logging.WARNING, "kbpf.source")
    steps = (PAGES,) if how == "pages" else ()
    run = start(*steps, lambda exchange: exchange.answer(200, row.body), listed(service("a", 1)))
    run.until_watching(len(steps) + 3)
    assert run.said == ["+a", "synced"]
    (line,) = [r.getMessage() for r in caplog.records if "watch failed" in r.getMessage()]
    wanted = row.pages if how == "pages" else row.stream
    assert f"cannot list services: {wanted}" in line
    assert ("does a proxy or login page answer instead of it?" in line) == (wanted == HTML)


def test_items_null_is_an_empty_list(start):
    body = {"metadata": {"resourceVersion": "9"}, "items": None}
    run = start(PAGES, lambda exchange: exchange.answer(200, body))
    run.until_watching(3)
    assert run.said == ["synced"]
    assert run.asked(2) == "watch 9"


def test_page_that_continues_with_itself_is_an_error_with_backoff(start):
    run = start(PAGES, *[listed(service("a", 1), token="t")] * 8)
    run.until(lambda: len(run.waits) >= 3)
    assert "synced" not in run.said
    assert "same page" in run.reflector.status().error


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
    run = start(
        listed_a(b"rubbish\n", added("b", 11)),
        streamed(added("a", 5), added("b", 11), bookmark(20, end=True)),
    )
    run.until(lambda: "+b" in run.said)
    assert run.all_asked == ["stream", "stream"]
    assert run.said[:3] == ["+a", "synced", "+b"]


def test_malformed_object_is_rejected_and_the_watch_continues(start):
    poison = added("bad", 11, ports=[{"port": 70000}])
    run = start(listed_a(poison, added("b", 12)), streamed(added("c", 13)))
    run.until(lambda: "+c" in run.said)
    assert run.said == ["+a", "synced", "!bad", "+b", "+c"]
    assert run.asked(1) == "watch 12"
    assert run.events[2] == Rejected(
        ObjectKey(Kind.SERVICE, "ns", "bad"), "spec.ports[0].port: 70000 is not a port"
    )


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
    (lambda exchange: exchange.answer(502, b"<html>bad gateway"), "502 No, an HTML page",
     "does a proxy or login page answer"),
    (lambda exchange: exchange.answer(401, LOGIN), "401 No, an HTML page",
     "does a proxy or login page answer"),
    (Exchange.cut, "the server closed the connection", ""),
    (Exchange.reset, "connection reset by peer", ""),
    (lambda exchange: exchange.sock.sendall(b"SSH-2.0\r\n\r\n"), "not an HTTP response", ""),
]  # fmt: skip


REFUSAL_IDS = (
    "403", "401", "500", "503", "429", "302", "404", "502 with an HTML page",
    "401 with an HTML page", "connection closed", "connection reset", "not HTTP",
)  # fmt: skip


@pytest.mark.parametrize(("step", "what", "hint"), REFUSALS, ids=REFUSAL_IDS)
def test_a_failed_watch_keeps_the_objects_and_the_error_says_what_to_do(start, step, what, hint):
    seen: list[str] = []

    def healed(exchange: Exchange) -> None:
        seen.append(run.reflector.status().error)
        quiet(exchange)

    # Four times, because the first may fail on a reused connection, which is retried at once.
    # After an outage the reflector checks the server's version with a list of one object.
    run = start(listed_a(), *[step] * 4, listed(version=10), healed, hold=True)
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
    run = start(
        status(429, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"),
        status(429, Retry_After="9" * 5000),
        LISTED_A,
    )
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


# --- a server whose version goes back, e.g. after a restore of etcd ---


def as_of(name: str, version: int, uid: str, **spec: Any) -> dict[str, Any]:
    """A watch event with a Service that has a uid."""
    line = added(name, version, **spec)
    line["object"]["metadata"]["uid"] = uid
    return line


WENT_BACK = "the API server's version went back from"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("other content", as_of("a", 5, "u1"), as_of("a", 5, "u1", clusterIP="10.96.0.2")),
        ("another uid", as_of("a", 5, "u1"), as_of("a", 5, "u2")),
    ],
)
def test_equal_versions_with_different_content_or_uid_are_a_change(start, name, before, after):
    run = start(
        streamed(before, bookmark(10, end=True), error(410)),
        streamed(after, bookmark(11, end=True)),
    )
    run.until(lambda: run.said.count("synced") == 2)
    assert run.said == ["+a", "synced", "+a", "synced"], name


@pytest.mark.parametrize(
    ("name", "line"),
    [("a bookmark", bookmark(7)), ("an event", added("b", 7)), ("a deletion", deleted("a", 7))],
)
def test_version_that_goes_back_is_one_warning_and_a_new_list(start, caplog, name, line):
    run = start(
        listed_a(line, then=Exchange.hang),
        streamed(added("a", 3, clusterIP="10.96.0.2"), bookmark(8, end=True), bookmark(9)),
    )
    run.until(lambda: run.said.count("synced") == 2)
    run.until(lambda: run.reflector.status().resource_version == "9")
    assert run.all_asked == ["stream", "stream"], name
    assert [mark for mark in run.said[2:] if mark not in ("+b", "-b", "-a")] == ["+a", "synced"]
    assert caplog.text.count(WENT_BACK) == 1
    assert run.waits == []
    assert run.reflector.status().error == ""


def test_rewind_is_reported_from_the_last_received_version(start, caplog):
    """Even if both versions arrive in one chunk."""
    both = b"".join(json.dumps(bookmark(version)).encode() + b"\n" for version in (20, 7))
    run = start(listed_a(both, then=Exchange.hang), streamed(added("a", 5), bookmark(15, end=True)))
    run.until(lambda: run.said.count("synced") == 2)
    assert f"{WENT_BACK} '20' to '7'" in caplog.text


def test_objects_unknown_to_a_restored_server_are_deleted(start, caplog):
    run = start(
        listed_a(added("new", 12), error(410)),
        streamed(added("a", 5), bookmark(8, end=True)),
    )
    run.until(lambda: run.said.count("synced") == 2)
    assert run.said == ["+a", "synced", "+new", "-new", "synced"]
    assert caplog.text.count(WENT_BACK) == 1
    assert f"{WENT_BACK} '12' to '8' (first seen by watch services)" in caplog.text


def test_after_an_outage_a_rewind_is_detected_before_the_watch_resumes(start, caplog):
    """A restored server may stay silent on a watch from a version it has not reached yet."""
    run = start(
        listed_a(added("new", 12), then=Exchange.cut),
        *[status(503)] * 2,
        listed(version=11),
        streamed(added("a", 5), bookmark(11, end=True)),
    )
    run.until(lambda: run.said.count("synced") == 2)
    assert run.said == ["+a", "synced", "+new", "-new", "synced"]
    assert [run.server.requests[n].query.get("limit") for n in range(5)] == [
        None, None, "1", "1", None
    ]  # fmt: skip
    assert run.asked(4) == "stream"
    assert caplog.text.count(WENT_BACK) == 1


def test_after_an_outage_without_a_rewind_the_watch_resumes_without_a_list(start, caplog):
    run = start(
        listed_a(then=Exchange.cut), *[status(503)] * 2, listed(version=30), streamed(bookmark(31))
    )
    run.until(lambda: run.reflector.status().resource_version == "31")
    assert run.asked(4) == "watch 10"
    assert WENT_BACK not in caplog.text


def test_rewind_seen_by_four_watches_is_one_warning(caplog):
    cluster = Cluster(Access("http://x", "the test"))
    for name in ("services", "endpointslices", "nodes", "pods"):
        cluster.report_rewind(name, "100", "7")
    assert caplog.text.count(WENT_BACK) == 1


@pytest.mark.parametrize(
    ("before", "now", "back"),
    [("10", "9", True), ("10", "10", False), ("9", "10", False), ("", "5", False),
     ("10", "", False), ("10", "x", False), ("x", "1", False), ("9" * 30, "1", False)],
)  # fmt: skip
def test_versions_are_compared_as_numbers(before, now, back):
    assert is_rewind(before, now) == back


# --- the hourly relist ---


def relisted(start: Callable[..., Run], *lines: Any) -> Run:
    """A Run that lists `a` and `b` (versions 5 and 6, list version 10), then `lines` an hour later.

    A bookmark with version 20 comes before the second list.
    """

    def later(exchange: Exchange) -> None:
        exchange.watch(added("a", 5), added("b", 6), bookmark(10, end=True))
        run.until(lambda: "synced" in run.said)
        run.now += 4501.0
        exchange.line(bookmark(20))
        exchange.hang()

    run = start(later, streamed(*lines), hold=True)
    run.reflector.start()
    run.until(lambda: run.said.count("synced") == 2)
    assert run.all_asked == ["stream", "stream"]
    return run


DRIFT = [
    ("no change", [added("a", 5), added("b", 6)], [], 0),
    ("a change after the watch's version", [added("a", 5), added("b", 25)], ["+b"], 0),
    ("a new object after it", [added("a", 5), added("b", 6), added("c", 25)], ["+c"], 0),
    ("a missed change", [added("a", 5), added("b", 15)], ["+b"], 1),
    ("a missed new object", [added("a", 5), added("b", 6), added("c", 15)], ["+c"], 1),
    ("a missed deletion", [added("a", 5)], ["-b"], 1),
    ("other content", [added("a", 5), added("b", 6, clusterIP="10.9.9.9")], ["+b"], 1),
]


@pytest.mark.parametrize(("name", "lines", "said", "drift"), DRIFT, ids=[row[0] for row in DRIFT])
def test_relist_finds_and_counts_missed_changes(start, caplog, name, lines, said, drift):
    run = relisted(start, *lines, bookmark(30, end=True))
    assert run.said[3:-1] == said
    assert run.reflector.status().drift == drift
    assert ("objects changed without an event" in caplog.text) == bool(drift)
    assert run.waits == []


@pytest.mark.parametrize(("random", "due"), [(0.0, 2_700.0), (0.5, 3_600.0), (1.0, 4_500.0)])
def test_relists_are_spread_over_45_to_75_minutes(start, random, due):
    """Nodes that started together would otherwise list together."""

    def soon_due(exchange: Exchange) -> None:
        exchange.watch(added("a", 5), bookmark(10, end=True))
        run.until(lambda: "synced" in run.said)
        run.now += due - 1
        exchange.line(bookmark(20))
        exchange.hang()

    def due_now(exchange: Exchange) -> None:
        run.now += 1
        exchange.watch(bookmark(21))
        exchange.hang()

    run = start(soon_due, due_now, LISTED_A, hold=True, rng=lambda: random)
    run.reflector.start()
    run.until(lambda: run.said.count("synced") == 2)
    assert run.all_asked == ["stream", "watch 20", "stream"]


# --- responses without an end ---


def test_response_header_sent_slowly_times_out(start, monkeypatch):
    monkeypatch.setattr("kbpf.source.api.transport.HEADERS_TIMEOUT", 0.3)

    def dribble(exchange: Exchange) -> None:
        with contextlib.suppress(OSError):
            for byte in b"HTTP/1.1 200 OK\r\nX-Filler: " + b"x" * 10_000:
                exchange.sock.sendall(bytes([byte]))
                time.sleep(0.05)
        exchange.open = False

    run = start(dribble, hold=True)
    run.reflector.start()
    run.until(lambda: run.reflector.status().failures)
    assert "the response header took too long" in run.reflector.status().error


def test_page_sent_slowly_times_out(start, monkeypatch):
    monkeypatch.setattr("kbpf.source.api.reflector.PAGE_TIMEOUT", 0.3)

    def dribble(exchange: Exchange) -> None:
        exchange.head(200, Content_Length="100000")
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                exchange.sock.sendall(b" ")
                time.sleep(0.05)
        exchange.open = False

    run = start(PAGES, dribble)
    run.until(lambda: run.reflector.status().failures)
    assert "a page of services took too long" in run.reflector.status().error


def test_page_over_the_size_limit_is_an_error(start, monkeypatch):
    monkeypatch.setattr("kbpf.source.api.reflector.MAX_PAGES_BYTES", 200_000)

    def endless(exchange: Exchange) -> None:
        exchange.head(200)
        with contextlib.suppress(OSError):
            while True:
                exchange.sock.sendall(b" " * 4096)
        exchange.open = False

    run = start(PAGES, endless)
    run.until(lambda: run.reflector.status().failures)
    assert "a page of services has more than 195 KiB" in run.reflector.status().error


@pytest.mark.parametrize(
    ("each", "error"), [(300, ""), (301, "the list is not complete after 600 s")]
)
def test_list_by_pages_times_out_after_600_seconds(start, each: int, error: str):
    seen: list[str] = []

    def page(token: str) -> Step:
        def step(exchange: Exchange) -> None:
            run.now += each
            listed(service("a", 1), token=token)(exchange)

        return step

    def last(exchange: Exchange) -> None:
        seen.append(run.reflector.status().error)
        listed(service("a", 1))(exchange)

    run = start(PAGES, page("1"), page("2"), last, hold=True)
    run.reflector.start()
    run.until(lambda: "synced" in run.said)
    assert error in seen[0]
    assert bool(error) == bool(seen[0])
    assert run.asked(3) == ("page" if error else "page after 2")


def test_error_response_counts_as_contact(start):
    def refuse(exchange: Exchange) -> None:
        run.now += 5
        status(500)(exchange)

    run = start(refuse, hold=True)
    run.reflector.start()
    run.until(lambda: run.waits)
    assert run.reflector.status().last_contact == 1005.0


def test_pages_of_all_watches_share_a_memory_limit():
    room = PageMemory(100)
    with room.lease() as one, room.lease() as two:
        one(60)
        with pytest.raises(SourceError, match="together"):
            two(41)
        two(40)
    with room.lease() as again:
        again(100)


def test_page_with_too_many_items_is_an_error(start, monkeypatch):
    monkeypatch.setattr("kbpf.source.api.reflector.COUNT_ITEMS_FROM_BYTES", 10)
    monkeypatch.setattr("kbpf.source.decode.wire.MAX_PAGE_ITEMS", 100)
    many = {"metadata": {"resourceVersion": "5"}, "items": [{}] * 101}
    run = start(PAGES, lambda e: e.answer(200, many), listed(*[service("a", 1)] * 100))
    run.until(lambda: "synced" in run.said)
    assert run.waits == [0.4]


def test_list_is_a_problem_after_30_seconds(start):
    def step(exchange: Exchange) -> None:
        exchange.watch(added("a", 5))
        run.until(lambda: run.said == ["+a"])
        assert run.state is SourceState.LISTING
        assert run.reflector.status().problems == ()
        run.now += 30
        assert run.reflector.status().problems == ()
        run.now += 1
        (line,) = run.reflector.status().problems
        assert "listing services has taken more than 30 s" in line
        exchange.line(bookmark(7, end=True))
        exchange.hang()

    run = start(step, hold=True)
    run.reflector.start()
    run.until(lambda: "synced" in run.said)
    assert run.reflector.status().problems == ()


@pytest.mark.parametrize(
    ("name", "piece", "steps", "error"),
    [
        ("a line without an end", b"x", 3, "a line is not complete after 30 s"),
        ("empty lines alone", b"\n", 5, ""),
    ],
)
def test_watch_with_an_unfinished_line_fails_and_one_with_empty_lines_ends(
    start, name, piece, steps, error
):
    seen: list[str] = []

    def step(exchange: Exchange) -> None:
        listed_a(then=lambda e: None)(exchange)
        run.until(lambda: "synced" in run.said)
        with contextlib.suppress(OSError):
            for _ in range(steps):
                run.now += 25
                exchange.line(piece)
                run.until(
                    lambda: (
                        run.reflector.status().last_contact == run.now
                        or len(run.server.requests) > 1
                    )
                )
        exchange.hang()

    def again(exchange: Exchange) -> None:
        seen.append(run.reflector.status().error)
        quiet(exchange)

    run = start(step, again, hold=True)
    run.reflector.start()
    run.server.wait(2)
    run.until(lambda: seen)
    assert error in seen[0]
    assert bool(error) == bool(seen[0])
    assert run.asked(1) == "watch 10"


def test_line_after_a_silent_minute_has_its_full_time(start):
    """Bookmarks come once a minute, and a large object comes in several chunks."""
    line = json.dumps(added("b", 11)).encode() + b"\n"

    def step(exchange: Exchange) -> None:
        listed_a(then=lambda e: None)(exchange)
        run.until(lambda: "synced" in run.said)
        run.now += 60
        for piece in (line[:40], line[40:80], line[80:]):
            exchange.line(piece)
            run.until(lambda: run.reflector.status().last_contact == run.now)
            run.now += 14
        exchange.hang()

    run = start(step, quiet, hold=True)
    run.reflector.start()
    run.until(lambda: "+b" in run.said or run.waits)
    assert run.said == ["+a", "synced", "+b"]
    assert run.reflector.status().error == ""
    assert len(run.server.requests) == 1


def test_run_in_the_callers_thread_ends_with_stop(start):
    run, stop = start(LISTED_A, hold=True), threading.Event()
    thread = threading.Thread(target=run.reflector.run, args=(stop,))
    thread.start()
    run.until_watching(1)
    run.reflector.stop()
    assert stop.is_set()
    thread.join(60.0)
    assert not thread.is_alive()


# --- silence ---


def test_silent_server_is_an_error(start):
    # Several responses may miss the very short timeout on a busy machine.
    run = start(Exchange.hang, *[LISTED_A] * 100, response_timeout=0.1)
    run.until(lambda: "synced" in run.said)
    assert run.waits[0] == 0.2
    assert run.all_asked[:2] == ["stream", "stream"]


def test_silent_watch_is_resumed_without_a_failure(start, caplog):
    run = start(LISTED_A, streamed(added("b", 11)), silence_timeout=0.1, response_timeout=5)
    run.until(lambda: "+b" in run.said)
    assert run.asked(1) == "watch 10"
    assert "watch failed" not in caplog.text
    assert run.said[:3] == ["+a", "synced", "+b"]


def test_silent_streaming_list_is_an_error(start):
    run = start(streamed(added("a", 5)), listed(service("a", 5)), silence_timeout=0.1)
    run.until(lambda: "synced" in run.said)
    assert run.all_asked[:2] == ["stream", "page"]
    assert run.waits == [0.2]


def test_page_may_take_longer_than_the_silence_timeout(start):
    """The server is silent while it reads the page from etcd."""

    def slow(exchange: Exchange) -> None:
        body = json.dumps({"metadata": {"resourceVersion": "100"}, "items": []}).encode()
        exchange.head(200, Content_Length=str(len(body)))
        exchange.closing(1.2)
        exchange.sock.sendall(body)

    run = start(PAGES, slow, silence_timeout=0.1)
    run.until(lambda: "synced" in run.said)
    assert run.all_asked[:2] == ["stream", "page"]
    assert run.waits == []


# --- no tight loop ---


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("watches that end at once", [streamed(then=Exchange.end)]),
        ("watches that end after an event", [streamed(added("b", 11), then=Exchange.end)]),
        ("watches that break", [streamed(bookmark(11), then=Exchange.reset)]),
        ("410 in every watch", [streamed(error(410), then=Exchange.end), listed_a()]),
        ("410 as every response", [status(410), listed_a()]),
        ("500 as every response", [status(500)]),
        ("closed before the headers", [Exchange.cut]),
        ("malformed lines", [streamed(b"rubbish\n", then=Exchange.end), listed_a()]),
        ("lists, but refused watches", [status(400), listed_a()]),
    ],
)
def test_no_tight_loop(start, name, script):
    run = start(listed_a(), *(script * 20))
    run.server.wait(10)
    run.until(lambda: len(run.waits) >= 8)
    assert sum(run.waits[:8]) > 20, name
    assert max(run.waits) >= 12


def test_watches_that_keep_ending_at_once_are_reported(start):
    seen: list[str] = []

    def fine(exchange: Exchange) -> None:
        seen.append(run.reflector.status().error)
        quiet(exchange)

    run = start(listed_a(), *[streamed(then=Exchange.end)] * 8, fine, hold=True)
    run.reflector.start()
    run.until(lambda: seen)
    assert "each watch ends within 5 s" in seen[0]


def test_watch_that_lived_resets_the_backoff(start):
    def lives(exchange: Exchange) -> None:
        exchange.watch(bookmark(20))
        run.until(lambda: run.reflector.status().resource_version == "20")
        run.now += 6
        exchange.end()

    ends = streamed(then=Exchange.end)
    run = start(*[status(500)] * 3, listed_a(), lives, ends, hold=True)
    run.reflector.start()
    run.server.wait(7)
    # Three failures and a watch that ended at once; no wait after the watch that lived; then a wait
    # after the next watch that ended at once.
    assert run.waits[:4] == [0.2, 0.4, 0.8, 1.6]
    run.until(lambda: len(run.waits) == 5)
    assert run.waits[4] == 0.4


# --- stopping ---

SOON = 8.0
"""Seconds: more than a busy machine needs, less than any timeout of the reflector."""


def stops(reflector: Reflector) -> None:
    """Calls stop() and checks that the thread ends soon."""
    reflector.stop()
    until(
        "the reflector has stopped", lambda: reflector.status().state is SourceState.STOPPED, SOON
    )


def full_listener() -> Iterator[str]:
    """A port at which connect() blocks, because the accept queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("while it waits for headers", [Exchange.hang]),
        ("while it waits for the list", [streamed(added("a", 5))]),
        ("while it waits for data", [LISTED_A]),
        (
            "while it waits for a page",
            [PAGES, lambda e: (e.head(200, Content_Length="9"), e.hang())],
        ),
    ],
)
def test_stop_during_a_request(start, name, script):
    run = start(*script)
    run.server.wait(len(script))
    time.sleep(0.05)
    stops(run.reflector)
    assert run.reflector.status().error == ""


def test_stop_during_backoff(start):
    run = start(status(500, Retry_After="60"), wait=lambda stop, seconds: stop.wait(seconds))
    run.until(lambda: run.state is SourceState.RETRYING)
    stops(run.reflector)


def test_stop_during_connect():
    for url in full_listener():
        reflector = Reflector(Cluster(Access(url, "the test")), SERVICES, lambda event: None)
        reflector.start()
        time.sleep(0.1)
        assert reflector.status().last_contact == 0.0
        stops(reflector)


def test_stop_during_the_tls_handshake():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        cluster = Cluster(Access(url, "the test", insecure=True))
        reflector = Reflector(cluster, SERVICES, lambda event: None)
        reflector.start()
        accepted, _ = listener.accept()
        assert accepted.recv(1)
        stops(reflector)
        accepted.close()


def test_state_is_retrying_between_watches(start):
    run = start(listed_a(), streamed(then=Exchange.end), wait=lambda stop, s: stop.wait(s))
    run.until(lambda: run.state is SourceState.RETRYING)
    assert run.reflector.status().error == ""


def test_stop_before_start_is_no_error():
    reflector = Reflector(Cluster(Access("http://x", "the test")), SERVICES, lambda event: None)
    reflector.stop()
    reflector.start()
    reflector.stop()
    assert reflector.status().state is SourceState.STOPPED


# --- logging ---


def test_failure_and_recovery_are_logged_once(start, caplog):
    caplog.set_level(logging.INFO, "kbpf.source")
    run = start(*[status(503, "not yet")] * 6, LISTED_A)
    run.until_watching(7)
    run.until(lambda: "synced" in run.said)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["WARNING", "INFO", "INFO"]
    assert lines[0][1].startswith("watch failed name=services for=0s error=")
    assert "503" in lines[0][1]
    assert lines[0][1].endswith("; what is programmed stays in force")
    assert lines[1][1] == "source synced name=services objects=1"
    assert lines[2][1] == "watch recovered name=services after=0s"


def test_internal_error_does_not_end_the_thread(start, caplog):
    class Faulty(Run):
        def put(self, event: Event) -> None:
            if not self.waits:
                raise RuntimeError("no room")
            super().put(event)

    with ScriptedServer(LISTED_A, listed(service("a", 5))) as server:
        run = Faulty(server)
        run.reflector.start()
        try:
            run.until(lambda: run.said == ["+a", "synced"])
        finally:
            run.reflector.stop()
    assert "no room" in caplog.text
    assert run.waits[0] == 0.2


# --- OutageLog, Backoff and KnownVersions ---


MINUTE = 60.0
FOUR = ("endpointslices", "nodes", "pods", "services")


def told(outages: OutageLog, name: str, reason: str, minutes: float) -> tuple[str, float] | None:
    """Records a failure; returns the (watches, minutes) that are logged for it, or None."""
    outage = outages.record_failure(name, reason, minutes * MINUTE)
    return outage and (",".join(outage.names), outage.seconds / MINUTE)


def test_failure_of_four_watches_is_one_line_repeated_with_growing_intervals():
    outages, lines = OutageLog(), []
    for tick in range(0, 40 * 2 + 1):  # each watch fails twice a minute
        minutes = tick / 2
        lines += [line for name in FOUR if (line := told(outages, name, "refused", minutes))]
    first, *repeated = lines
    assert first == ("endpointslices", 0)
    assert repeated == [(",".join(FOUR), minutes) for minutes in (1, 5, 10, 20, 30, 40)]
    ends = [outages.record_recovery(name, 41 * MINUTE) for name in FOUR]
    assert ends == [None, None, None, (FOUR, 41 * MINUTE)], "its end is one line"
    assert [outages.record_recovery(name, 42 * MINUTE) for name in FOUR] == [None] * 4
    assert told(outages, "nodes", "refused", 50) == ("nodes", 0), "and the next is another one"


def test_alternating_reasons_are_one_line_each():
    outages = OutageLog()
    lines = [told(outages, "pods", reason, at / 60) for at in range(59) for reason in "ab"]
    assert list(filter(None, lines)) == [("pods", 0), ("pods", 0)]
    assert outages.record_recovery("pods", 59.0) == (("pods",), 59.0)


def test_forbidden_watch_does_not_hide_the_recovery_of_the_others():
    outages = OutageLog()
    told(outages, "nodes", "403", 0)
    for name in FOUR:
        told(outages, name, "refused", 10)
    assert told(outages, "nodes", "403", 12) == ("nodes", 12)
    ends = [outages.record_recovery(name, 13 * MINUTE) for name in FOUR if name != "nodes"]
    assert ends == [None, None, (("endpointslices", "pods", "services"), 13 * MINUTE - 600)]


def test_number_of_remembered_reasons_is_limited():
    outages = OutageLog()
    for number in range(1000):
        assert told(outages, "pods", f"error {number}", 0)
    assert len(outages._reasons) <= MAX_REASONS


def test_the_same_failure_of_two_watches_is_one_line(caplog):
    caplog.set_level(logging.INFO, "kbpf.source")
    with ScriptedServer() as server:
        server.script = [status(503, "not yet")] * 8
        cluster = Cluster(Access(server.url, "the test"))
        soon = {"wait": lambda stop, seconds: stop.wait(0.05)}
        runs = [Reflector(cluster, each, lambda _: None, **soon) for each in (SERVICES, SLICES)]
        for run in runs:
            run.start()
        server.wait(8)
        server.script = []
        for run in runs:
            run.stop()
    lines = [r.getMessage() for r in caplog.records if "watch failed" in r.getMessage()]
    assert len(lines) == 1


def test_backoff_has_jitter():
    chances = itertools.cycle([0.0, 0.5, 1.0])
    pace = Backoff(lambda: next(chances))
    waits = [pace.next_delay(failed=True, healthy_for=0) for _ in range(3)]
    assert waits == [pytest.approx(it) for it in (0.1, 0.3, 0.8)]


def test_backoff_is_zero_only_after_the_first_clean_end():
    pace = Backoff(lambda: 1.0)
    assert [pace.next_delay(failed=False, healthy_for=1) for _ in range(4)] == [0, 0.4, 0.8, 1.6]


def test_backoff_waits_at_a_clean_end_after_a_failure():
    pace = Backoff(lambda: 1.0)
    assert pace.next_delay(failed=True, healthy_for=0) == 0.2
    assert pace.next_delay(failed=False, healthy_for=1) == 0.4


def test_backoff_is_capped_after_many_tries():
    pace = Backoff(lambda: 1.0, tries=100_000)
    assert pace.next_delay(failed=True, healthy_for=0) == 30


KEY = ObjectKey(Kind.SERVICE, "ns", "a")
OBJECT = Service("ns", "a", "ClusterIP", (parse_addr("10.96.0.1"),), ())


def item(version: str, good: bool = True, error: str = "") -> DecodedObject:
    return DecodedObject(KEY, version, OBJECT if good and not error else None, error)


def test_unknown_object_is_not_deleted():
    known = KnownVersions()
    assert known.update(item("1"), True, 0) is None
    assert known.update(item("1", good=False), False, 0) is None


def test_rejected_object_can_be_deleted():
    known = KnownVersions()
    assert known.update(item("1", error="bad"), False, 0) == Rejected(KEY, "bad")
    assert known.update(item("2"), True, 5) == Delete(KEY, 5)
    assert len(known) == 0


def test_object_without_a_version_is_always_a_change():
    known = KnownVersions()
    assert (
        known.update(item(""), False, 0) == known.update(item(""), False, 0) == Upsert(KEY, OBJECT)
    )


def test_list_after_an_unreadable_one_deletes_again():
    known = KnownVersions()
    known.update(item("1"), False, 0)
    known.begin_list()
    known.mark_unreadable()
    assert known.end_list(1) == []
    known.begin_list()
    assert known.end_list(2) == [Delete(KEY, 2)]


def test_errors_are_one_line():
    assert "\n" not in str(SourceError("a\nb"))


# --- watching all Nodes or only our own ---


class NodeCount(NamedTuple):
    """The response to the count of Nodes, and the field selector of the watch that follows."""

    what: str
    first: Step
    selector: str


OWN = "metadata.name=n1"
NODES = [
    NodeCount("one Node", counted(0), ""),
    NodeCount("a full page", counted(PAGE_SIZE - 1), ""),
    NodeCount("more than a page", counted(PAGE_SIZE), OWN),
    NodeCount("a server without remainingItemCount", listed(version=90), ""),
    NodeCount("listing is forbidden", status(403, "nodes is forbidden"), OWN),
]


@pytest.mark.parametrize("row", NODES, ids=lambda row: row.what)
def test_all_nodes_are_watched_up_to_one_page(start, row: NodeCount):
    run = start(row.first, streamed(bookmark(100, end=True)), resource=node_resource("n1", "auto"))
    run.until_watching(2)
    first, stream = run.server.requests
    assert first.query == {"limit": "1"}
    assert "sendInitialEvents" in stream.query
    assert stream.query.get("fieldSelector", "") == row.selector
    assert run.said == ["synced"]


@pytest.mark.parametrize(("setting", "selector"), [("all", ""), ("own", OWN)])
def test_explicit_watch_nodes_setting_needs_no_count(start, setting: str, selector: str):
    run = start(streamed(bookmark(100, end=True)), resource=node_resource("n1", setting))
    run.until_watching(1)
    (stream,) = run.server.requests
    assert stream.query.get("fieldSelector", "") == selector


def test_cluster_that_outgrows_a_page_is_watched_by_own_node_only(start):
    """Nodes are counted before each list. Those no longer watched are deleted, which does not count
    as drift.
    """

    def node(name: str) -> dict[str, Any]:
        meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": "5"}
        return {"kind": "Node", "apiVersion": "v1", "metadata": meta}

    event = {"type": "ADDED", "object": node("n1")}
    run = start(
        counted(1),
        streamed(event, {"type": "ADDED", "object": node("n2")}, bookmark(10, end=True),
                 then=lambda exchange: exchange.end()),
        status(410),
        counted(PAGE_SIZE),
        streamed(event, bookmark(20, end=True)),
        resource=node_resource("n1", "auto"),
    )  # fmt: skip
    run.until_watching(5)
    assert run.said == ["+n1", "+n2", "synced", "-n2", "synced"]
    assert run.reflector.status().drift == 0
