# SPDX-License-Identifier: Apache-2.0
"""/healthz, /livez and the health checks of Services, byte for byte as kube-proxy 1.37.1 answers.

tests/lab/agent/test_observe.py compares them with a real kube-proxy.

"""

import contextlib
import errno
import json
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kbpf.errors import ConfigError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, Serving
from kbpf.model.objects import Service, ServiceName
from kbpf.model.status import AgentStatus
from kbpf.policy.health_check import HealthCheck, compute_health_check
from kbpf.serve import server as desk_module
from kbpf.serve.health import (
    HealthTracker,
    HealthVerdict,
    format_go_time,
    healthz,
    livez,
    readyz,
    service_health_response,
)
from kbpf.serve.message import HttpRequest, HttpResponse
from kbpf.serve.server import AgentServer
from tests.support.faults.event_server import EventServer
from tests.support.lab.lab import until
from tests.support.lab.web import get
from tests.values.serve.rows_health import (
    ENDPOINT_COUNTS,
    HEALTH_ROWS,
    HISTORIES,
    LISTEN_ROWS,
    READY,
    WEB,
    WELL,
    EndpointCount,
    HealthRow,
    ListenRow,
    Step,
    end,
    piece,
)


@pytest.mark.parametrize("asked", HEALTH_ROWS, ids=lambda asked: asked.name)
def test_healthz_and_livez_responses(asked: HealthRow):
    whole = asked.path == "/healthz"
    answer = healthz(asked.verdict, asked.eligible) if whole else livez(asked.verdict)
    assert answer == HttpResponse(asked.status, asked.body.encode(), "application/json")


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (1_795_300_297_000_000_000, "2026-11-21T22:31:37Z"),
        (1_795_300_297_100_000_000, "2026-11-21T22:31:37.1Z"),
        (1_795_300_297_000_000_010, "2026-11-21T22:31:37.00000001Z"),
        (0, "1970-01-01T00:00:00Z"),
        (None, "0001-01-01T00:00:00Z"),
    ],
)
def test_go_time_format(moment: int | None, text: str):
    assert format_go_time(moment) == text


@pytest.mark.parametrize(("name", "verdict", "status", "text"), READY, ids=[r[0] for r in READY])
def test_readyz_responses(name: str, verdict: HealthVerdict, status: AgentStatus | None, text: str):
    answer = readyz(verdict, status)
    assert answer == HttpResponse(200 if text.startswith("kbpf serves") else 503, f"{text}\n".encode())


@pytest.mark.parametrize("steps", HISTORIES.values(), ids=HISTORIES.keys())
def test_health_over_time(steps: list[Step]):
    now = 0.0
    health = HealthTracker(60.0, lambda: now, lambda: round(now * 1e9))
    for step in steps:
        now = step.at
        match step.do:
            case "queued":
                health.record_queued()
            case "taken":
                health.record_dequeued()
            case "programmed" | "nothing new":
                health.record_settled(step.do == "programmed")
        assert health.verdict().healthy is step.healthy, step


def test_verdict_has_the_time_of_the_last_programmed_pass():
    now = 5.0
    health = HealthTracker(60.0, lambda: now, lambda: round(now * 1e9))
    assert health.verdict() == HealthVerdict(True, None, 5_000_000_000)
    health.record_settled(True)
    now = 7.0
    health.record_settled(False)
    assert health.verdict() == HealthVerdict(True, 5_000_000_000, 7_000_000_000)


# ---- health checks of Services -----------------------------------------------------------------

BODY = """{
\t"service": {
\t\t"namespace": "default",
\t\t"name": "web"
\t},
\t"localEndpoints": %d,
\t"serviceProxyHealthy": %s
}"""


@pytest.mark.parametrize(
    ("endpoints", "healthy", "status"),
    [(1, True, 200), (7, True, 200), (0, True, 503), (1, False, 503), (0, False, 503)],
)
def test_service_health_response(endpoints: int, healthy: bool, status: int):
    answer = service_health_response(ServiceName("default", "web"), endpoints, healthy)
    assert answer.body.decode() == BODY % (endpoints, str(healthy).lower())
    assert (answer.status, answer.content_type) == (status, "application/json")
    assert answer.headers == (("X-Load-Balancing-Endpoint-Weight", str(endpoints)),)
    assert json.loads(answer.body)["localEndpoints"] == endpoints


@pytest.mark.parametrize("row", ENDPOINT_COUNTS, ids=lambda row: row.name)
def test_local_endpoints_are_counted(row: EndpointCount):
    assert compute_health_check(WEB, row.slices, "n1") == HealthCheck(31_999, row.v4, row.v6)


def test_single_family_service_reports_its_count_in_both_families():
    single = Service(
        "default", "web", "LoadBalancer", WEB.cluster_ips[:1], (), external_local=True, health_check_node_port=31_999
    )
    assert compute_health_check(single, (piece(end("10.0.0.1")),), "n1") == HealthCheck(31_999, 1, 1)


def test_service_without_health_check_port_has_no_check():
    assert compute_health_check(None, (), "n1") is None
    plain = Service("default", "web", "LoadBalancer", WEB.cluster_ips, ())
    assert compute_health_check(plain, (), "n1") is None


@pytest.mark.parametrize("row", LISTEN_ROWS, ids=lambda row: row.name)
def test_listen_addresses_of_a_health_check(row: ListenRow, monkeypatch: pytest.MonkeyPatch):
    """As kube-proxy: a family without a usable address listens on the wildcard address."""
    opened: list[str] = []
    desk = AgentServer(Config())

    def listen(host: str, port: int, *_: object, **__: object) -> object:
        if host not in (*row.own, "0.0.0.0", "::"):
            raise OSError(errno.EADDRNOTAVAIL, "not ours")
        opened.append(host)
        return object()

    monkeypatch.setattr(desk._http, "listen", listen)
    at = None if row.at is None else tuple(map(parse_addr, row.at))
    desk._checks.sync({ServiceName("a", "web"): HealthCheck(31_999, 1, 1)}, at)
    assert tuple(opened) == row.on


# ---- Services with the same health check port ---------------------------------------------------


class Ports:
    """A fake HTTP server: a port has one handler, and delayed work runs when wait() is called."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, int], object] = {}
        self.waiting: list[Callable[[], None]] = []

    def listen(self, host: str, port: int, handler: object, **_: object) -> tuple[str, int]:
        if (host, port) in self.taken:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self.taken[host, port] = handler
        return host, port

    def close(self, port: tuple[str, int]) -> None:
        del self.taken[port]

    def call_later(self, _: float, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def wait(self) -> None:
        """Runs all delayed work: the retries of ports that were taken."""
        works, self.waiting = self.waiting, []
        for work in works:
            work()


class PortRow(NamedTuple):
    """The health check port of each Service in every step, and the result after the last step.

    Retries run after each step. `served` maps a port to its Service; `failed` is the number of
    Services without their port.
    """

    name: str
    steps: tuple[dict[str, int], ...]
    served: dict[int, str]
    failed: int = 0


PORT_ROWS = [
    PortRow("another number", ({"a": 1}, {"a": 2}), {2: "a"}),
    PortRow("the same again", ({"a": 1}, {"a": 1}), {1: "a"}),
    PortRow("deleted", ({"a": 1}, {}), {}),
    PortRow("two with one port", ({"a": 1, "b": 1},), {1: "a"}, 1),
    PortRow("the second gets it when the first is deleted", ({"a": 1, "b": 1}, {"b": 1}), {1: "b"}),
    PortRow("the second is deleted", ({"a": 1, "b": 1}, {"a": 1}), {1: "a"}),
    PortRow("both are deleted while one waits", ({"a": 1, "b": 1}, {}), {}),
    PortRow("the second changes its port", ({"a": 1, "b": 1}, {"a": 1, "b": 2}), {1: "a", 2: "b"}),
    PortRow("two swap their ports", ({"a": 1, "b": 2}, {"a": 2, "b": 1}), {1: "b", 2: "a"}),
]


@pytest.mark.parametrize("row", PORT_ROWS, ids=lambda row: row.name)
def test_which_service_gets_a_health_check_port(row: PortRow, monkeypatch: pytest.MonkeyPatch):
    desk, ports = AgentServer(Config()), Ports()
    monkeypatch.setattr(desk._checks, "_http", ports)
    for wanted in row.steps:
        told = {ServiceName("x", name): HealthCheck(port, 1, 1) for name, port in wanted.items()}
        desk._checks.sync(told, None)
        ports.wait()
    served = {
        port: json.loads(ask(handler).body)["service"]["name"]
        for (host, port), handler in ports.taken.items()
        if host == "::"
    }
    assert served == row.served
    assert len(ports.taken) == 2 * len(served)
    page = desk.format_metrics().decode()
    assert f"\nkbpf_service_health_checks_failed {row.failed}\n" in page
    assert f"\nkbpf_service_health_checks {len(row.steps[-1])}\n" in page


def ask(handler: Any) -> HttpResponse:
    return handler(HttpRequest("GET", "/", ""))


# ---- listen addresses in use ---------------------------------------------------------------------

TAKEN = {"healthz": "FailedToStartProxierHealthcheck", "metrics": "FailedToStartMetricServer"}
"""The setting, and the reason of the Event if its address is in use."""


@pytest.mark.parametrize("hard", [False, True], ids=["tried again", "hard"])
@pytest.mark.parametrize("which", TAKEN)
def test_listen_address_in_use_is_an_event_and_a_problem(which: str, hard: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk_module, "LISTEN_RETRY_INTERVAL_S", 0.01)
    server = EventServer()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serving = Serving(**{"healthz": "", "metrics": "", which: f"127.0.0.1:{port}"}, hard_fail=hard)
        desk = AgentServer(Config(serving=serving, node_name="n1"), post_event=server)
        try:
            if hard:
                with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                    desk.start()
            else:
                desk.start()
            until("the Event is sent", lambda: server.events)
            if not hard:
                assert desk.problems() == (server.events[0]["note"],)
                taken.close()
                until("the server listens", lambda: answers(port))
                assert desk.problems() == ()
        finally:
            desk.stop()
    (event,) = server.events
    assert (event["reason"], event["type"]) == (TAKEN[which], "Warning")
    assert event["regarding"]["name"] == "n1"
    assert event["note"] == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return get(None, "127.0.0.1", port, "/healthz").status == 200
    return False


def test_livez_names_a_stalled_thread():
    answer = livez(WELL, ("thread devices: no progress for 130 s",))
    assert answer.status == 503
    assert json.loads(answer.body)["threads"] == ["thread devices: no progress for 130 s"]
    assert livez(WELL, ()).status == 200
