# SPDX-License-Identifier: Apache-2.0
"""How the demo evaluates what its clients sent, and the objects of its folder."""

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from kbpf.demo import client
from kbpf.demo.client import Request
from kbpf.demo.phases import PHASES, PhaseRequests, evaluate
from tests.support.table import each_named_pair

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


SERVES, RESTARTS = 0, 1


@each_named_pair(
    "seen, expected",
    """\
one refused that should not be: serves 1=99 2=90 3=110 ECONNREFUSED=1 → \
1: three backends serve, outside: 1 of 300 connections failed: 1 x ECONNREFUSED
nothing works: serves ENETUNREACH=300 → 300: 300 of 300
one fails while the agent restarts: restarts 1=100 2=90 3=110 timeout=1 → 1: 1 of 301
another error than a refusal: refuses 1=70 2=70 3=70 ECONNREFUSED=88 timeout=2 → \
2: 2 of 300 connections failed: 2 x timeout
the broken backend refuses nothing: refuses 1=100 2=90 3=110 → 0: no connection was refused
the broken backend answers: refuses 1=70 2=70 3=70 4=1 ECONNREFUSED=89 → 0: backend-4 answered
a backend is left out: serves 1=200 2=100 → 0: backend-3 was not reached
an unknown backend answers: serves 1=99 2=90 3=110 9=1 → 0: backend-9 answered
requests are missing: serves 1=1 2=90 3=110 → 0: 201 of 300
too few while the agent restarts: restarts 1=1 2=90 3=110 → 0: 201 of 300
nothing was sent: serves → 0: 0 of 300
""",
)
def test_wrong_result_is_a_failure_with_a_problem(seen, expected):
    """The phase, how often the client outside saw each backend or error in it → unexpected failures, and words of the
    problem.
    """
    phase, *words = seen.split()
    counts = {name: int(count) for name, count in (word.split("=") for word in words)}
    answered = {f"backend-{name}": count for name, count in counts.items() if name.isdigit()}
    failed = {name: count for name, count in counts.items() if not name.isdigit()}
    phases = good()
    phases[["serves", "restarts", "refuses"].index(phase)].sent["outside"] = sent(answered, failed)
    outcome = evaluate(phases, 300)
    failures, _, problem = expected.partition(": ")
    assert not outcome.succeeded
    assert problem in " ".join(outcome.problems)
    assert outcome.failed == int(failures)


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
    phases[RESTARTS].sent["client"] = [
        Request(request.start - 1, request.end - 1, request.is_udp, request.backend)
        for request in phases[RESTARTS].sent["client"]
    ]
    (problem,) = evaluate(phases, 300).problems
    assert "no connection was made while no agent ran" in problem


def test_lost_datagram_is_a_problem():
    phases = good()
    udp = sent({"backend-1": 29}, {"timeout": 1}, is_udp=True)
    phases[SERVES].sent["client"] = sent(ALL) + udp
    assert evaluate(phases, 300).problems == ("1 of 90 datagrams failed: 1 x timeout",)


def test_an_answer_that_is_no_http_is_an_error():
    """tests/lab/cluster/test_demo.py has answers and refusals."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        asked = pool.submit(client.request, listener.getsockname(), False)
        with listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(b"what?")
        assert asked.result().error == "EPROTO"
