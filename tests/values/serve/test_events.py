# SPDX-License-Identifier: Apache-2.0
"""Kubernetes Events: what is sent, when it is retried, and that emit() never blocks."""

import json
import threading
from typing import NamedTuple

import pytest

from kbpf.serve import events
from kbpf.serve.events import EventObject, EventRecorder, KubeEvent, encode
from tests.support.faults.event_server import EventServer
from tests.support.lab.lab import PATIENCE, until

NODE, WEB = EventObject("Node", "n1"), EventObject("Service", "web", "shop")
AT = 1_795_300_297_135_646_117


def test_an_event_of_the_node_as_kube_proxy_sends_it():
    path, body = encode(KubeEvent(NODE, False, "Starting", "StartKubeProxy", "", AT), "n1")
    assert path == "/apis/events.k8s.io/v1/namespaces/default/events"
    assert json.loads(body) == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"n1.{AT:x}", "namespace": "default"},
        "eventTime": "2026-11-21T22:31:37.135646Z",
        "reportingController": "kube-proxy",
        "reportingInstance": "kube-proxy-n1",
        "action": "StartKubeProxy",
        "reason": "Starting",
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": "n1"},
        "note": "",
        "type": "Normal",
    }


def test_event_of_a_service_is_in_its_namespace_within_the_api_limits():
    path, body = encode(KubeEvent(WEB, True, "R", "A", "x" * 2000, AT), "n" * 200)
    said = json.loads(body)
    assert path == "/apis/events.k8s.io/v1/namespaces/shop/events"
    assert said["metadata"]["namespace"] == said["regarding"]["namespace"] == "shop"
    assert said["type"] == "Warning"
    # The limits of the API server.
    assert len(said["note"]) == 1024
    assert len(said["reportingInstance"]) == 128


def test_note_is_limited_in_bytes():
    _, body = encode(KubeEvent(WEB, True, "R", "A", "x" + "é" * 2000, AT), "n1")
    assert json.loads(body)["note"] == "x" + "é" * 511


def test_long_name_is_truncated():
    _, body = encode(KubeEvent(EventObject("Node", "n" * 253), True, "R", "A", "", AT), "n")
    assert len(json.loads(body)["metadata"]["name"]) == 253


ROWS = {
    "accepted": ((201,), 1, 1, 0),
    "unreachable at first": ((None, None, 201), 3, 1, 0),
    "overloaded at first": ((429, 503, 201), 3, 1, 0),
    "500 is retried, 499 is not": ((500, 499), 2, 0, 1),
    "an earlier attempt had arrived": ((None, 409), 2, 1, 0),
    "forbidden": ((403,), 1, 0, 1),
    "the namespace is being deleted": ((404,), 1, 0, 1),
    "never reachable": ((None,), events.MAX_ATTEMPTS, 0, 1),
}
"""The server's status codes, the number of requests, and the recorder's counters."""


@pytest.mark.parametrize("name", ROWS)
def test_retries_and_outcome(name: str):
    answers, asked, sent, dropped = ROWS[name]
    server = EventServer(*answers)
    recorder = EventRecorder(server, "n1", retry_interval=0.0)
    recorder.emit(NODE, "Starting", "StartKubeProxy")
    until("the Event is sent or dropped", lambda: recorder.sent + recorder.dropped)
    assert (recorder.sent, recorder.dropped) == (sent, dropped)
    assert len(server.events) == asked
    recorder.stop()


class LockCheckingRecorder(EventRecorder):
    """Asserts that `dropped`, which two threads write, is written under the lock."""

    _dropped = 0

    @property
    def dropped(self) -> int:
        return self._dropped

    @dropped.setter
    def dropped(self, count: int) -> None:
        assert not count or self._lock.locked()
        self._dropped = count


def test_dropped_is_counted_under_the_lock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "MAX_QUEUED", 1)
    release = threading.Event()

    def post(path: str, body: bytes) -> int:
        release.wait(PATIENCE)
        if b"Crash" in body:
            raise ValueError("on purpose")
        return 403

    recorder = LockCheckingRecorder(post, "n1")
    recorder.emit(NODE, "Refused", "A")
    until("the first Event is being sent", recorder._queue.empty)
    recorder.emit(NODE, "Crash", "A")
    recorder.emit(NODE, "QueueFull", "A")
    assert recorder.dropped == 1
    release.set()
    until("the other two are dropped", lambda: recorder.dropped == 3)
    recorder.stop()


def test_internal_error_does_not_end_the_thread():
    calls = []

    def post(path: str, body: bytes) -> int:
        calls.append(path)
        if len(calls) == 1:
            raise ValueError("on purpose")
        return 201

    recorder = EventRecorder(post, "n1")
    recorder.emit(NODE, "One", "A")
    recorder.emit(NODE, "Two", "A")
    until("the second Event is sent", lambda: recorder.sent)
    recorder.stop()


class Emission(NamedTuple):
    """An Event that is emitted at `at` seconds, and whether it is sent, or dropped and counted."""

    at: float
    about: EventObject
    reason: str
    sent: bool
    dropped: bool = False


EMISSIONS = {
    "the same after five minutes": [
        Emission(0, WEB, "R", True),
        Emission(299, WEB, "R", False),
        Emission(300, WEB, "R", True),
    ],
    "another object or reason is no repetition": [
        Emission(0, WEB, "R", True),
        Emission(0, NODE, "R", True),
        Emission(0, WEB, "S", True),
    ],
    "a suppressed repetition does not extend the interval": [
        Emission(0, WEB, "R", True),
        Emission(200, WEB, "R", False),
        Emission(301, WEB, "R", True),
    ],
    "the burst is limited and refills": [
        *(Emission(0, NODE, f"R{i}", True) for i in range(events.BURST)),
        Emission(0, NODE, "R", False, True),
        Emission(9, NODE, "R", False, True),
        Emission(10, NODE, "R", True),
        Emission(10, NODE, "S", False, True),
    ],
    "a namespace has a share": [
        *(Emission(0, EventObject("Service", f"s{i}", "x"), "R", True) for i in range(events.NAMESPACE_BURST)),
        Emission(0, EventObject("Service", "more", "x"), "R", False, True),
        Emission(0, WEB, "R", True),
        Emission(299, EventObject("Service", "more", "x"), "R", False, True),
        Emission(300, EventObject("Service", "more", "x"), "R", True),
        Emission(300, EventObject("Service", "yet-more", "x"), "R", False, True),
    ],
    "namespaces that send many leave some to others": [
        *(
            Emission(0, EventObject("Service", f"s{i}", namespace), "R", i < count, i >= count)
            for namespace, count in (("x", 10), ("y", 5), ("z", 3), ("v", 1))
            for i in range(11)
        ),
        Emission(0, WEB, "R", True),
    ],
    "all namespaces together leave some to the node": [
        *(
            Emission(0, EventObject("Service", "s", f"n{i}"), "R", True)
            for i in range(events.BURST - events.NODE_EVENTS)
        ),
        Emission(0, WEB, "R", False, True),
        *(Emission(0, NODE, f"R{i}", True) for i in range(events.NODE_EVENTS)),
        Emission(0, NODE, "R", False, True),
        Emission(10, WEB, "R", False, True),
        Emission(10, NODE, "R", True),
    ],
}


@pytest.mark.parametrize("rows", EMISSIONS.values(), ids=EMISSIONS.keys())
def test_repetitions_and_rate_limit(rows: list[Emission]):
    now = 0.0
    server = EventServer(201)
    recorder = EventRecorder(server, "n1", lambda: now)
    for row in rows:
        now = row.at
        recorder.emit(row.about, row.reason, "A", f"{row.at}")
    wanted = [(row.about.name, row.reason, f"{row.at}") for row in rows if row.sent]
    until("all Events are sent", lambda: recorder.sent == len(wanted))
    got = [(one["regarding"]["name"], one["reason"], one["note"]) for one in server.events]
    assert got == wanted
    assert recorder.dropped == sum(row.dropped for row in rows)
    recorder.stop()


def test_emit_does_not_block_while_the_server_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "BURST", 1000)
    hangs, asked = threading.Event(), threading.Event()

    def post(path: str, body: bytes) -> int:
        asked.set()
        hangs.wait()
        return 201

    recorder = EventRecorder(post, "n1", lambda: 0.0)
    recorder.emit(NODE, "First", "A")
    assert asked.wait(PATIENCE)
    for i in range(2 * events.MAX_QUEUED):
        recorder.emit(NODE, f"R{i}", "A")  # does not block although the server does not respond
    assert recorder.dropped == events.MAX_QUEUED
    hangs.set()
    until("the queued Events are sent", lambda: recorder.sent == 1 + events.MAX_QUEUED)
    recorder.stop()


def test_stop_does_not_wait_for_an_unreachable_server():
    others = set(threading.enumerate())
    recorder = EventRecorder(EventServer(None), "n1", retry_interval=3600.0)
    recorder.emit(NODE, "Starting", "A")
    recorder.stop()
    until("the thread has ended", lambda: set(threading.enumerate()) <= others)


def test_without_an_api_server_nothing_is_sent():
    recorder = EventRecorder(None, "n1")
    recorder.emit(NODE, "Starting", "A")
    assert (recorder.sent, recorder.dropped) == (0, 0)
