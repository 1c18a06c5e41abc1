# SPDX-License-Identifier: Apache-2.0
"""Kubernetes Events: what is sent, when it is retried, and that emit() never blocks. tests/lab/agent/test_observe.py
compares the Event at a start with a real kube-proxy's.
"""

import json
import threading

from kbpf.serve import events
from kbpf.serve.events import EventObject, EventRecorder, KubeEvent, encode
from tests.support.faults.event_server import EventServer
from tests.support.lab.lab import PATIENCE, until
from tests.support.table import each_case, each_named_pair

NODE, WEB = EventObject("Node", "n1"), EventObject("Service", "web", "shop")
AT = 1_795_300_297_135_646_117


def test_event_of_a_service_is_in_its_namespace_within_the_api_limits():
    path, body = encode(KubeEvent(WEB, True, "R", "A", "x" * 2000, AT), "n" * 200)
    said = json.loads(body)
    assert path == "/apis/events.k8s.io/v1/namespaces/shop/events"
    assert said["metadata"]["namespace"] == said["regarding"]["namespace"] == "shop"
    assert said["type"] == "Warning"
    # The limits of the API server.
    assert len(said["note"]) == 1024
    assert len(said["reportingInstance"]) == 128


def test_note_is_limited_in_bytes_and_a_long_name_is_truncated():
    _, body = encode(KubeEvent(EventObject("Node", "n" * 253), True, "R", "A", "x" + "é" * 2000, AT), "n1")
    said = json.loads(body)
    assert said["note"] == "x" + "é" * 511
    assert len(said["metadata"]["name"]) == 253


@each_named_pair(
    "answers, outcome",
    f"""\
accepted: 201 → 1 asked, 1 sent, 0 dropped
unreachable at first: None None 201 → 3 asked, 1 sent, 0 dropped
overloaded at first: 429 503 201 → 3 asked, 1 sent, 0 dropped
500 is retried, 499 is not: 500 499 → 2 asked, 0 sent, 1 dropped
an earlier attempt had arrived: None 409 → 2 asked, 1 sent, 0 dropped
forbidden: 403 → 1 asked, 0 sent, 1 dropped
the namespace is being deleted: 404 → 1 asked, 0 sent, 1 dropped
never reachable: None → {events.MAX_ATTEMPTS} asked, 0 sent, 1 dropped
""",
)
def test_retries_and_outcome(answers, outcome):
    """The server's status codes → the number of requests, and the recorder's counters."""
    codes = [int(word) if word != "None" else None for word in answers.split()]
    server = EventServer(*codes)
    recorder = EventRecorder(server, "n1", retry_interval=0.0)
    recorder.emit(NODE, "Starting", "StartKubeProxy")
    until("the Event is sent or dropped", lambda: recorder.sent + recorder.dropped)
    assert f"{len(server.events)} asked, {recorder.sent} sent, {recorder.dropped} dropped" == outcome
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
    assert recorder.dropped == 1
    recorder.stop()


BURST, NODE_EVENTS = events.BURST, events.NODE_EVENTS
EMISSIONS = {
    "the same after five minutes": ["0 shop/web R", "299 shop/web R again", "300 shop/web R"],
    "another object or reason is no repetition": ["0 shop/web R", "0 node R", "0 shop/web S"],
    "a suppressed repetition does not extend the interval": [
        "0 shop/web R",
        "200 shop/web R again",
        "301 shop/web R",
    ],
    "the burst is limited and refills": [
        *(f"0 node R{i}" for i in range(BURST)),
        "0 node R dropped",
        "9 node R dropped",
        "10 node R",
        "10 node S dropped",
    ],
    "a namespace has a share": [
        *(f"0 x/s{i} R" for i in range(events.NAMESPACE_BURST)),
        "0 x/more R dropped",
        "0 shop/web R",
        "299 x/more R dropped",
        "300 x/more R",
        "300 x/yet-more R dropped",
    ],
    "namespaces that send many leave some to others": [
        *(
            f"0 {namespace}/s{i} R {'' if i < count else 'dropped'}"
            for namespace, count in (("x", 10), ("y", 5), ("z", 3), ("v", 1))
            for i in range(11)
        ),
        "0 shop/web R",
    ],
    "all namespaces together leave some to the node": [
        *(f"0 n{i}/s R" for i in range(BURST - NODE_EVENTS)),
        "0 shop/web R dropped",
        *(f"0 node R{i}" for i in range(NODE_EVENTS)),
        "0 node R dropped",
        "10 shop/web R dropped",
        "10 node R",
    ],
}
"""The second, object and reason of an Event that is emitted; it is sent, but not `again`, or `dropped`."""


@each_case("rows", EMISSIONS)
def test_repetitions_and_rate_limit(rows: list[str]):
    now, wanted, dropped = 0.0, [], 0
    server = EventServer(201)
    recorder = EventRecorder(server, "n1", lambda: now)
    for row in rows:
        at, name, reason, *outcome = row.split()
        now = float(at)
        about = NODE if name == "node" else EventObject("Service", *reversed(name.split("/")))
        recorder.emit(about, reason, "A", at)
        dropped += "dropped" in outcome
        wanted += [] if outcome else [(about.name, reason, at)]
    until("all Events are sent", lambda: recorder.sent == len(wanted))
    got = [(one["regarding"]["name"], one["reason"], one["note"]) for one in server.events]
    assert got == wanted
    assert recorder.dropped == dropped
    recorder.stop()


def test_emit_does_not_block_while_the_server_hangs(monkeypatch):
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
