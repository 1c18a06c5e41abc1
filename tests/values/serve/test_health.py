# SPDX-License-Identifier: Apache-2.0
"""/healthz, /livez and the health checks of Services, byte for byte as kube-proxy 1.37 answers.

tests/lab/agent/test_observe.py compares them with a real kube-proxy.

"""

import contextlib
import errno
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kbpf.errors import ConfigError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, Serving
from kbpf.model.objects import ServiceName
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
from tests.support.table import each_case, each_pair
from tests.values.serve.rows_health import (
    ENDPOINT_COUNTS,
    HEALTH_ROWS,
    HISTORIES,
    LISTEN_ROWS,
    READY,
    WEB,
    WELL,
    ready_case,
    slices,
)


@each_case("verdict, eligible, path, status, body", HEALTH_ROWS)
def test_healthz_and_livez_responses(verdict: HealthVerdict, eligible, path, status, body):
    answer = healthz(verdict, eligible) if path == "/healthz" else livez(verdict, ())
    assert answer == HttpResponse(status, body.encode(), "application/json")


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
def test_go_time_format(moment, text):
    assert format_go_time(moment) == text


@pytest.mark.parametrize(("case", "text"), READY)
def test_readyz_responses(case, text):
    answer = readyz(*ready_case(case))
    assert answer == HttpResponse(200 if text.startswith("kbpf serves") else 503, f"{text}\n".encode())


@each_case("steps", HISTORIES)
def test_health_over_time(steps):
    now = 0.0
    health = HealthTracker(60.0, lambda: now, lambda: round(now * 1e9))
    for step in steps.split(", "):
        at, _, do = step.partition(" ")
        now = float(at)
        match do.removesuffix("late").strip():
            case "queued":
                health.record_queued()
            case "taken":
                health.record_dequeued()
            case "programmed" | "nothing new" as settled:
                health.record_settled(settled == "programmed")
        assert health.verdict().healthy is not do.endswith("late"), step


def test_verdict_has_the_time_of_the_last_programmed_pass():
    now = 5.0
    health = HealthTracker(60.0, lambda: now, lambda: round(now * 1e9))
    assert health.verdict() == HealthVerdict(True, None, 5_000_000_000)
    health.record_settled(True)
    now = 7.0
    health.record_settled(False)
    assert health.verdict() == HealthVerdict(True, 5_000_000_000, 7_000_000_000)


# ---- health checks of Services -----------------------------------------------------------------


def test_a_late_agent_fails_the_health_checks_of_services():
    """tests/lab/agent/test_observe.py compares the other answers with a real kube-proxy's."""
    answer = service_health_response(ServiceName("default", "web"), 7, False)
    assert (answer.status, json.loads(answer.body)["serviceProxyHealthy"]) == (503, False)
    assert answer.headers == (("X-Load-Balancing-Endpoint-Weight", "7"),)


@pytest.mark.parametrize(("ends", "counts"), ENDPOINT_COUNTS)
def test_local_endpoints_are_counted(ends, counts):
    found = compute_health_check(WEB, slices(ends.partition(":")[2].strip()), "n1")
    assert found == HealthCheck(31_999, *map(int, counts.split()))


def test_single_family_service_reports_its_count_in_both_families():
    single = replace(WEB, cluster_ips=WEB.cluster_ips[:1])
    assert compute_health_check(single, slices("10.0.0.1"), "n1") == HealthCheck(31_999, 1, 1)


def test_service_without_health_check_port_has_no_check():
    assert compute_health_check(None, (), "n1") is None
    assert compute_health_check(replace(WEB, health_check_node_port=0), (), "n1") is None


@pytest.mark.parametrize(("addresses", "on"), LISTEN_ROWS)
def test_listen_addresses_of_a_health_check(addresses, on, monkeypatch):
    """As kube-proxy: a family without a usable address listens on the wildcard address."""
    at, own = (part.split() for part in addresses.split("|"))
    opened: list[str] = []
    desk = AgentServer(Config())

    def listen(host: str, port: int, *_: object, **__: object) -> object:
        if host not in (*own, "0.0.0.0", "::"):
            raise OSError(errno.EADDRNOTAVAIL, "not ours")
        opened.append(host)
        return object()

    monkeypatch.setattr(desk._http, "listen", listen)
    check = {ServiceName("a", "web"): HealthCheck(31_999, 1, 1)}
    desk._checks.sync(check, None if at == ["all"] else tuple(map(parse_addr, at)))
    assert opened == on.split()


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


@each_pair(
    "steps, outcome",
    """\
another number: a=1, a=2 → 2=a
the same again: a=1, a=1 → 1=a
deleted: a=1, → none
two with one port: a=1 b=1 → 1=a, 1 fails
the second gets it when the first is deleted: a=1 b=1, b=1 → 1=b
the second is deleted: a=1 b=1, a=1 → 1=a
both are deleted while one waits: a=1 b=1, → none
the second changes its port: a=1 b=1, a=1 b=2 → 1=a 2=b
two swap their ports: a=1 b=2, a=2 b=1 → 1=b 2=a
""",
)
def test_which_service_gets_a_health_check_port(steps, outcome, monkeypatch):
    """The health check port of each Service in every step → the Service of each port after the last step, and how many
    have no port. Retries run after each step.
    """
    desk, ports = AgentServer(Config()), Ports()
    monkeypatch.setattr(desk._checks, "_http", ports)
    for step in steps.partition(":")[2].split(","):
        wanted = dict(word.split("=") for word in step.split())
        desk._checks.sync({ServiceName("x", name): HealthCheck(int(port), 1, 1) for name, port in wanted.items()}, None)
        ports.wait()
    served = {
        f"{port}={json.loads(ask(handler).body)['service']['name']}"
        for (host, port), handler in ports.taken.items()
        if host == "::"
    }
    assert len(ports.taken) == 2 * len(served)
    assert (" ".join(sorted(served)) or "none") == outcome.partition(",")[0]
    page = desk.format_metrics().decode()
    assert f"\nkbpf_service_health_checks_failed {int('fails' in outcome)}\n" in page
    assert f"\nkbpf_service_health_checks {len(wanted)}\n" in page


def ask(handler: Any) -> HttpResponse:
    return handler(HttpRequest("GET", "/", ""))


# ---- listen addresses in use ---------------------------------------------------------------------

TAKEN = {"healthz": "FailedToStartProxierHealthcheck", "metrics": "FailedToStartMetricServer"}
"""The setting, and the reason of the Event if its address is in use."""


@pytest.mark.parametrize("hard", [False, True], ids=["tried again", "hard"])
@pytest.mark.parametrize("which", TAKEN)
def test_listen_address_in_use_is_an_event_and_a_problem(which, hard, monkeypatch):
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
