# SPDX-License-Identifier: Apache-2.0
"""How the demo evaluates what its clients sent, and the objects of its folder."""

import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from kbpf.cli import origin
from kbpf.demo import client, manifests
from kbpf.demo.client import Request
from kbpf.demo.phases import PHASES, PODS, PhaseRequests, evaluate
from kbpf.model.config import Config
from kbpf.model.events import Upsert

ALL = {"backend-1": 100, "backend-2": 90, "backend-3": 110}
SOME = {"backend-1": 70, "backend-2": 70, "backend-3": 70}
TIMES_US = [90] * 200 + [250] * 97 + [4000] * 3
START = 1000.0


def sent(answers: Mapping[str, int], failures: Mapping[str, int] = {}, is_udp: bool = False) -> list[Request]:
    """Requests within half a second."""
    backends = [name for name, count in answers.items() for _ in range(count)]
    requests = [
        Request(START, START + 0.5, is_udp, name, connected=0 if is_udp else START + us / 1e6)
        for name, us in zip(backends, TIMES_US, strict=False)
    ]
    errors = [name for name, count in failures.items() for _ in range(count)]
    return requests + [Request(START, START + 0.5, is_udp, error=name) for name in errors]


def good() -> list[PhaseRequests]:
    """What both clients sent if all is as expected, with 300 requests a phase."""
    phases = [PhaseRequests(phase) for phase in PHASES]
    for made in phases:
        tcp = sent(SOME, {"ECONNREFUSED": 90}) if made.phase.refuses else sent(ALL)
        made.sent = {"client": tcp + sent({"backend-1": 30}, is_udp=True), "outside": list(tcp)}
        if made.phase.restarts_agent:
            made.killed, made.started = START, START + 1.0
    return phases


SERVES, RESTART, REFUSES = range(3)
PROBLEMS = {
    "one refused that should not be": (
        SERVES,
        {**ALL, "backend-1": 99},
        {"ECONNREFUSED": 1},
        "three backends serve, outside: 1 of 300 connections failed: 1 x ECONNREFUSED",
        1,
    ),
    "nothing works": (SERVES, {}, {"ENETUNREACH": 300}, "300 of 300", 300),
    "one fails while the agent restarts": (RESTART, ALL, {"timeout": 1}, "1 of 301", 1),
    "another error than a refusal": (
        REFUSES,
        SOME,
        {"ECONNREFUSED": 88, "timeout": 2},
        "2 of 300 connections failed: 2 x timeout",
        2,
    ),
    "the broken backend refuses nothing": (REFUSES, ALL, {}, "no connection was refused", 0),
    "the broken backend answers": (REFUSES, {**SOME, "backend-4": 1}, {"ECONNREFUSED": 89}, "backend-4 answered", 0),
    "a backend is left out": (SERVES, {"backend-1": 200, "backend-2": 100}, {}, "backend-3 was not reached", 0),
    "an unknown backend answers": (SERVES, {**ALL, "backend-1": 99, "backend-9": 1}, {}, "backend-9 answered", 0),
    "requests are missing": (SERVES, {**ALL, "backend-1": 1}, {}, "201 of 300", 0),
    "too few while the agent restarts": (RESTART, {**ALL, "backend-1": 1}, {}, "201 of 300", 0),
    "nothing was sent": (SERVES, {}, {}, "0 of 300", 0),
}
"""Phase, what the client outside saw in it, words of the expected problem, unexpected failures."""


@pytest.mark.parametrize("name", PROBLEMS)
def test_wrong_result_is_a_failure_with_a_problem(name: str):
    phase, answered, failed, problem, failures = PROBLEMS[name]
    phases = good()
    phases[phase].sent["outside"] = sent(answered, failed)
    outcome = evaluate(phases, 300)
    assert not outcome.succeeded
    assert problem in " ".join(outcome.problems)
    assert outcome.failed == failures


def test_expected_result_counts_every_connection_and_has_no_problems():
    outcome = evaluate(good(), 300)
    assert outcome.problems == ()
    assert (outcome.requests, outcome.failed, outcome.expected) == (1800, 0, 180)
    assert [load.failed for load in outcome.loads] == [0, 0, 0, 0, 90, 90]
    assert [load.without_agent for load in outcome.loads] == [0, 0, 300, 300, 0, 0]
    assert {(load.connect_p50, load.connect_p99) for load in outcome.loads} == {(90e-6, 250e-6)}
    assert (outcome.udp.requests, outcome.udp.failed) == (90, 0)
    assert outcome.seconds == 1.5


def test_restart_without_a_connection_in_between_proves_nothing():
    phases = good()
    phases[RESTART].sent["client"] = [
        Request(request.start - 1, request.end - 1, request.is_udp, request.backend)
        for request in phases[RESTART].sent["client"]
    ]
    (problem,) = evaluate(phases, 300).problems
    assert "no connection was made while no agent ran" in problem


def test_lost_datagram_is_a_problem():
    phases = good()
    udp = sent({"backend-1": 29}, {"timeout": 1}, is_udp=True)
    phases[SERVES].sent["client"] = sent(ALL) + udp
    assert evaluate(phases, 300).problems == ("1 of 90 datagrams failed: 1 x timeout",)


def serve_once(answer: bytes) -> tuple[str, int]:
    """A server for one connection that answers like this."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(answer)

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()


def test_a_request_has_its_answer_or_the_name_of_its_error():
    answered = client.request(serve_once(b"HTTP/1.0 200 OK\r\n\r\nbackend-1\n"), False)
    assert (answered.backend, answered.error) == ("backend-1", "")
    assert answered.start < answered.connected < answered.end
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    refused = client.request(address, False)
    assert (refused.backend, refused.error, refused.connected) == ("", "ECONNREFUSED", 0.0)
    assert client.request(serve_once(b"what?"), False).error == "EPROTO"


def test_objects_are_accepted_by_the_agent(tmp_path: Path):
    broken = manifests.BackendPod(4, refuses=True)
    (tmp_path / "service.yaml").write_text(manifests.SERVICE)
    (tmp_path / "endpoints.yaml").write_text(manifests.endpoint_slices([*PODS, broken]))
    problems: list[str] = []
    events = origin.read_world(str(tmp_path), Config(node_name=manifests.NODE), problems)
    assert problems == []
    made = {str(e.key): e.object for e in events if isinstance(e, Upsert)}
    slices = [made[f"EndpointSlice default/demo-{i}"] for i in (1, 2)]
    assert [len(each.endpoints) for each in slices] == [3, 1]
    assert [len(each.ports) for each in slices] == [2, 1]
