"""Where the agent answers: its ports, what stands behind each, and what happens when one is taken.

The writer tells the desk what it did; watch threads tell it what came; the HTTP thread reads. All
that has to do with ports is done in the HTTP thread. An address that cannot be had is said once as
an Event and in the log, and tried again each 5 s, as kube-proxy does.
"""

import errno
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from kbpf import __version__
from kbpf.errors import ConfigError, KbpfError
from kbpf.kernel.system import threads
from kbpf.model.address import Addr, format_addr
from kbpf.model.config import Config
from kbpf.model.metrics import Measures, Pause, Traffic
from kbpf.model.objects import ServiceName
from kbpf.model.status import AgentStatus, ModeChoice
from kbpf.policy.health_check import HealthCheck
from kbpf.serve import exposition, health, kbpf_metrics, zpages
from kbpf.serve.collector import Counting
from kbpf.serve.events import About, Events, Post
from kbpf.serve.health import Health
from kbpf.serve.http import NOT_FOUND, WILDCARDS, Handler, Port, Server
from kbpf.serve.kubeproxy_metrics import Record
from kbpf.serve.message import JSON, Answer, Request

log = logging.getLogger("kbpf.serve")

AGAIN_SECONDS: Final = 5.0
FRESH_SECONDS: Final = 1.0
"""A page of metrics is made once in that time, however many ask."""

FLUSH_SECONDS: Final = 3.0
ACTION: Final = "StartKubeProxy"


class Plane(Protocol):
    """What the desk asks a data plane for: see dataplane.base."""

    def measure(self) -> Measures:
        """What is known at once."""

    def count(self, pause: Pause) -> Traffic:
        """What takes long."""


@dataclass(slots=True)
class _Check:
    """The health check of one Service: what it says, and the ports that are open for it."""

    says: HealthCheck
    at: tuple[Addr, ...] | None
    ports: list[Port] = field(default_factory=list)
    failed: str = ""


class Desk:
    """See the module. start() before anything else, stop() at the end. `warnings`: Events about the
    Node, {reason: note}, that are sent when the agent serves.
    """

    def __init__(
        self,
        config: Config,
        mode: str = "",
        plane: Plane | None = None,
        post: Post | None = None,
        configz: bytes = b"{}",
        record: Record | None = None,
        flags: Mapping[str, str] = MappingProxyType({}),
        warnings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._config, self._mode, self._plane, self._configz = config, mode, plane, configz
        self._serving, self._flags, self._warnings = config.serving, flags, warnings
        self._counting = Counting(plane.count, self._traffic) if plane is not None else None
        self.record = record or Record()
        self.health = Health(config.serving.late_seconds)
        self.events = Events(post, config.node_name)
        self._node = About("Node", config.node_name)
        self._server = Server()
        self._eligible = True
        self._status: AgentStatus | None = None
        self._choice: ModeChoice | None = None
        self._config_error = ""
        self._unheard: dict[str, str] = {}
        self._checks: dict[ServiceName, _Check] = {}
        self._page: tuple[float, Answer | None] = (0.0, None)

    def start(self) -> None:
        """Answers from now on. ConfigError when an address is taken and that is not to be."""
        self._server.start()
        if self._counting is not None:
            self._counting.start()
        for text, handler, reason in (
            (self._serving.healthz, self._healthz, "FailedToStartProxierHealthcheck"),
            (self._serving.metrics, self._metrics, "FailedToStartMetricServer"),
        ):
            for address in filter(None, text.split(",")):
                self._open(address, handler, reason, first=True)

    def stop(self) -> None:
        """Answers nobody any more."""
        if self._counting is not None:
            self._counting.stop()
        self.events.stop()
        self._server.stop()

    # ---- what the agent says ---------------------------------------------------------------

    def begun(self, version: str, choice: ModeChoice) -> None:
        """The agent serves: kube-proxy's first word, and which mode it is in. Before that, the
        warnings about the settings.
        """
        for reason, note in self._warnings.items():
            self.events.say(self._node, reason, ACTION, note)
        self._chosen(choice)
        note = f"kbpf {version} mode {self._mode}"
        self.events.say(self._node, "Starting", ACTION, note, warning=False)

    def _chosen(self, choice: ModeChoice) -> None:
        self._mode = choice.mode
        if choice.reason and choice != self._choice:
            note = f"mode {choice.mode}, since BPF is not to be had: {choice.reason}: {choice.why}"
            self.events.say(self._node, "BpfUnavailable", ACTION, note)
        self._choice = choice

    def node_is_leaving(self, leaving: bool) -> None:
        """Whether LoadBalancers should send this node nothing new."""
        self._eligible = not leaving

    def show(self, status: AgentStatus) -> None:
        """How the agent is doing, for /metrics."""
        self._status = status
        if status.choice is not None:
            self._chosen(status.choice)
        if status.config_error and status.config_error != self._config_error:
            note = f"the configuration file is refused: {status.config_error}"
            self.events.say(self._node, "ConfigurationRefused", ACTION, note)
        self._config_error = status.config_error or ""

    def problems(self) -> tuple[str, ...]:
        """The addresses that cannot be had, a line each, for any thread."""
        return tuple(dict(self._unheard).values())

    def check(self, wanted: Mapping[ServiceName, HealthCheck], at: tuple[Addr, ...] | None) -> None:
        """These health checks, and no others, answer on these addresses; None: on all."""
        told = dict(wanted)
        self._server.do(lambda: self._sync_checks(told, at))

    # ---- ports -----------------------------------------------------------------------------

    def _open(self, address: str, handler: Handler, reason: str, first: bool = False) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._server.listen(host.strip("[]"), int(port), handler)
        except OSError as error:
            problem = f"cannot listen on {address}: {error.strerror}"
            if first:
                self.events.say(self._node, reason, ACTION, problem)
            if first and self._serving.hard_fail:
                self.events.flush(FLUSH_SECONDS)
                raise ConfigError(
                    problem, "--bind-address-hard-fail", "end who listens there, or choose another"
                ) from error
            if first:
                log.error("%s; trying again each %d s", problem, AGAIN_SECONDS)
            self._unheard[address] = problem
            self._server.later(AGAIN_SECONDS, lambda: self._open(address, handler, reason))
        else:
            self._unheard.pop(address, None)
            log.log(logging.DEBUG if first else logging.INFO, "listening address=%s", address)

    # ---- health checks of Services, in the HTTP thread -------------------------------------

    def _sync_checks(
        self, wanted: Mapping[ServiceName, HealthCheck], at: tuple[Addr, ...] | None
    ) -> None:
        for name, check in list(self._checks.items()):
            kept = wanted.get(name)
            if kept is None or kept.port != check.says.port or check.at != at:
                self._close_check(self._checks.pop(name))
        for name, says in wanted.items():
            if name in self._checks:
                self._checks[name].says = says
            else:
                self._checks[name] = _Check(says, at)
                self._open_check(name, self._checks[name])

    def _close_check(self, check: _Check) -> None:
        for port in check.ports:
            self._server.close(port)
        check.ports = []

    def _open_check(self, name: ServiceName, check: _Check) -> None:
        if self._checks.get(name) is not check:
            return  # it went, or changed its port, while it waited
        try:
            self._open_on_addresses(name, check)
        except OSError as error:
            self._close_check(check)
            problem = (
                f"node {self._config.node_name} failed to start healthcheck "
                f'"{name}" on port {check.says.port}: {error.strerror}'
            )
            if not check.failed:
                log.error("%s; trying again each %d s", problem, AGAIN_SECONDS)
            check.failed = problem
            about = About("Service", name.name, name.namespace)
            self.events.say(about, "FailedToStartServiceHealthcheck", "Listen", problem)
            self._server.later(AGAIN_SECONDS, lambda: self._open_check(name, check))
        else:
            check.failed = ""

    def _open_on_addresses(self, name: ServiceName, check: _Check) -> None:
        """On those that NodePorts have; a family of which the node has none of them, on all."""
        own = [format_addr(address) for address in check.at or ()]
        for wildcard in WILDCARDS:
            hosts = [host for host in own if (":" in host) is (":" in wildcard)]
            opened = [self._open_one(name, check, host) for host in hosts]
            if not any(opened):
                self._open_one(name, check, wildcard)

    def _open_one(self, name: ServiceName, check: _Check, host: str) -> bool:
        """Whether it is an address of this node."""
        v6 = ":" in host

        def answer(_: Request) -> Answer:
            says = check.says
            healthy = self.health.verdict().healthy
            return health.service_check(name, says.v6 if v6 else says.v4, healthy)

        try:
            port = self._server.listen(host, check.says.port, answer, one_family=True)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or (host == "::" and not _has_ipv6()):
                return False
            raise
        check.ports.append(port)
        return True

    # ---- answers ---------------------------------------------------------------------------

    def _healthz(self, request: Request) -> Answer:
        match request.path:
            case "/healthz":
                answer = health.healthz(self.health.verdict(), self._eligible)
            case "/livez":
                answer = health.livez(self.health.verdict(), threads.problems())
            case "/readyz":
                return health.readyz(self.health.verdict(), self._status)
            case _:
                return NOT_FOUND
        self.record.answered(request.path[1:], answer.status)
        return answer

    def _metrics(self, request: Request) -> Answer:
        answers: dict[str, Callable[[], Answer]] = {
            "/metrics": self._fresh_page,
            "/metrics/slis": lambda: Answer(200, SLIS, exposition.CONTENT_TYPE),
            "/healthz": lambda: Answer(200, VERBOSE if "verbose" in request.query else b"ok"),
            "/readyz": lambda: health.readyz(self.health.verdict(), self._status),
            "/healthz/ping": lambda: Answer(200, b"ok"),
            "/proxyMode": lambda: Answer(200, self._mode.encode()),
            "/configz": lambda: Answer(200, self._configz, JSON),
            "/statusz": lambda: zpages.statusz(request, __version__, kbpf_metrics.started()),
            "/flagz": lambda: zpages.flagz(request, self._flags),
        }
        return answers.get(request.path, lambda: NOT_FOUND)()

    def _fresh_page(self) -> Answer:
        made, page = self._page
        if page is None or time.monotonic() - made >= FRESH_SECONDS:
            page = Answer(200, self._own_metrics(), exposition.CONTENT_TYPE, rest=self._counted())
            self._page = (time.monotonic(), page)
        return page

    def _counted(self) -> bytes:
        return self._counting.lines() if self._counting is not None else b""

    def count(self) -> None:
        """Counts now what is otherwise counted behind the page."""
        if self._counting is not None:
            self._counting.count()

    def _traffic(self, found: Traffic) -> list[str]:
        return list(kbpf_metrics.traffic(found, self._serving.service_series))

    def metrics(self) -> bytes:
        """The page of metrics, with what was counted last."""
        return self._own_metrics() + self._counted()

    def _own_metrics(self) -> bytes:
        """All but what is counted in the background."""
        start = time.perf_counter()
        lines = self.record.lines()
        if self._status is not None:
            lines += kbpf_metrics.agent(self._status, self._config)
        failed = sum(bool(check.failed) for check in self._checks.values())
        counts = kbpf_metrics.Served(
            self.events.sent, self.events.dropped, len(self._checks), failed
        )
        lines += kbpf_metrics.served(counts, self.health.verdict().healthy, self._eligible)
        if self._plane is not None:
            try:
                lines += kbpf_metrics.kernel(self._plane.measure())
            except KbpfError as error:
                log.warning("the data plane's counts are left out of /metrics: %s", error)
        lines += kbpf_metrics.process()
        lines += exposition.family(
            "kbpf_scrape_seconds", "gauge", "How long it took to make this page",
            [("", time.perf_counter() - start)],
        )  # fmt: skip
        return "\n".join(lines).encode() + b"\n"


def _has_ipv6() -> bool:
    try:
        with open("/proc/net/if_inet6"):
            return True
    except OSError:
        return False


VERBOSE: Final = b"[+]ping ok\nhealthz check passed\n"
SLIS: Final = b"""\
# HELP kubernetes_healthcheck [STABLE] This metric records the result of a single healthcheck.
# TYPE kubernetes_healthcheck gauge
kubernetes_healthcheck{name="ping",type="healthz"} 1
"""
