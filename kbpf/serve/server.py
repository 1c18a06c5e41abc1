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
from kbpf.model.metrics import DataPlaneMetrics, Pause, TrafficStats
from kbpf.model.objects import ServiceName
from kbpf.model.status import AgentStatus, ModeChoice
from kbpf.policy.health_check import HealthCheck
from kbpf.serve import exposition, health, kbpf_metrics, zpages
from kbpf.serve.collector import BackgroundCollector
from kbpf.serve.events import EventObject, EventRecorder, Post
from kbpf.serve.health import HealthTracker
from kbpf.serve.http import NOT_FOUND, WILDCARDS, Handler, HttpListener, HttpServer
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from kbpf.serve.message import JSON, HttpRequest, HttpResponse

log = logging.getLogger("kbpf.serve")

LISTEN_RETRY_INTERVAL_S: Final = 5.0
METRICS_CACHE_S: Final = 1.0
"""A page of metrics is made once in that time, however many ask."""

EVENT_FLUSH_TIMEOUT_S: Final = 3.0
EVENT_ACTION: Final = "StartKubeProxy"


class MetricsProvider(Protocol):
    """What the desk asks a data plane for: see dataplane.base."""

    def read_metrics(self) -> DataPlaneMetrics:
        """What is known at once."""

    def count_traffic(self, pause: Pause) -> TrafficStats:
        """What takes long."""


@dataclass(slots=True)
class _CheckListener:
    """The health check of one Service: what it says, and the ports that are open for it."""

    health_check: HealthCheck
    addresses: tuple[Addr, ...] | None
    ports: list[HttpListener] = field(default_factory=list)
    error: str = ""


class AgentServer:
    """See the module. start() before anything else, stop() at the end. `warnings`: Events about the
    Node, {reason: note}, that are sent when the agent serves.
    """

    def __init__(
        self,
        config: Config,
        mode: str = "",
        plane: MetricsProvider | None = None,
        post_event: Post | None = None,
        configz: bytes = b"{}",
        proxy_metrics: KubeProxyMetrics | None = None,
        flags: Mapping[str, str] = MappingProxyType({}),
        warnings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._config, self._mode, self._plane, self._configz = config, mode, plane, configz
        self._serving, self._flags, self._warnings = config.serving, flags, warnings
        self._collector = (
            BackgroundCollector(plane.count_traffic, self._format_traffic)
            if plane is not None
            else None
        )
        self.proxy_metrics = proxy_metrics or KubeProxyMetrics()
        self.health = HealthTracker(config.serving.late_seconds)
        self.events = EventRecorder(post_event, config.node_name)
        self._node_reference = EventObject("Node", config.node_name)
        self._http = HttpServer()
        self._eligible = True
        self._status: AgentStatus | None = None
        self._choice: ModeChoice | None = None
        self._config_error = ""
        self._listen_errors: dict[str, str] = {}
        self._check_listeners: dict[ServiceName, _CheckListener] = {}
        self._metrics_cache: tuple[float, HttpResponse | None] = (0.0, None)

    def start(self) -> None:
        """Answers from now on. ConfigError when an address is taken and that is not to be."""
        self._http.start()
        if self._collector is not None:
            self._collector.start()
        for text, handler, reason in (
            (self._serving.healthz, self._handle_healthz, "FailedToStartProxierHealthcheck"),
            (self._serving.metrics, self._handle_metrics, "FailedToStartMetricServer"),
        ):
            for address in filter(None, text.split(",")):
                self._listen(address, handler, reason, first_attempt=True)

    def stop(self) -> None:
        """Answers nobody any more."""
        if self._collector is not None:
            self._collector.stop()
        self.events.stop()
        self._http.stop()

    # ---- what the agent says ---------------------------------------------------------------

    def report_started(self, version: str, choice: ModeChoice) -> None:
        """The agent serves: kube-proxy's first word, and which mode it is in. Before that, the
        warnings about the settings.
        """
        for reason, note in self._warnings.items():
            self.events.emit(self._node_reference, reason, EVENT_ACTION, note)
        self._set_choice(choice)
        note = f"kbpf {version} mode {self._mode}"
        self.events.emit(self._node_reference, "Starting", EVENT_ACTION, note, warning=False)

    def _set_choice(self, choice: ModeChoice) -> None:
        self._mode = choice.mode
        if choice.reason and choice != self._choice:
            note = f"mode {choice.mode}, since BPF is not to be had: {choice.reason}: {choice.why}"
            self.events.emit(self._node_reference, "BpfUnavailable", EVENT_ACTION, note)
        self._choice = choice

    def set_node_leaving(self, leaving: bool) -> None:
        """Whether LoadBalancers should send this node nothing new."""
        self._eligible = not leaving

    def set_status(self, status: AgentStatus) -> None:
        """How the agent is doing, for /metrics."""
        self._status = status
        if status.choice is not None:
            self._set_choice(status.choice)
        if status.config_error and status.config_error != self._config_error:
            note = f"the configuration file is refused: {status.config_error}"
            self.events.emit(self._node_reference, "ConfigurationRefused", EVENT_ACTION, note)
        self._config_error = status.config_error or ""

    def problems(self) -> tuple[str, ...]:
        """The addresses that cannot be had, a line each, for any thread."""
        return tuple(dict(self._listen_errors).values())

    def set_health_checks(
        self, checks: Mapping[ServiceName, HealthCheck], addresses: tuple[Addr, ...] | None
    ) -> None:
        """These health checks, and no others, answer on these addresses; None: on all."""
        new_checks = dict(checks)
        self._http.call_soon(lambda: self._sync_checks(new_checks, addresses))

    # ---- ports -----------------------------------------------------------------------------

    def _listen(
        self, address: str, handler: Handler, reason: str, first_attempt: bool = False
    ) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._http.listen(host.strip("[]"), int(port), handler)
        except OSError as error:
            problem = f"cannot listen on {address}: {error.strerror}"
            if first_attempt:
                self.events.emit(self._node_reference, reason, EVENT_ACTION, problem)
            if first_attempt and self._serving.hard_fail:
                self.events.flush(EVENT_FLUSH_TIMEOUT_S)
                raise ConfigError(
                    problem, "--bind-address-hard-fail", "end who listens there, or choose another"
                ) from error
            if first_attempt:
                log.error("%s; trying again each %d s", problem, LISTEN_RETRY_INTERVAL_S)
            self._listen_errors[address] = problem
            self._http.call_later(
                LISTEN_RETRY_INTERVAL_S, lambda: self._listen(address, handler, reason)
            )
        else:
            self._listen_errors.pop(address, None)
            log.log(
                logging.DEBUG if first_attempt else logging.INFO, "listening address=%s", address
            )

    # ---- health checks of Services, in the HTTP thread -------------------------------------

    def _sync_checks(
        self, checks: Mapping[ServiceName, HealthCheck], addresses: tuple[Addr, ...] | None
    ) -> None:
        for name, listener in list(self._check_listeners.items()):
            new_check = checks.get(name)
            if (
                new_check is None
                or new_check.port != listener.health_check.port
                or listener.addresses != addresses
            ):
                self._close_check(self._check_listeners.pop(name))
        for name, health_check in checks.items():
            if name in self._check_listeners:
                self._check_listeners[name].health_check = health_check
            else:
                self._check_listeners[name] = _CheckListener(health_check, addresses)
                self._open_check(name, self._check_listeners[name])

    def _close_check(self, listener: _CheckListener) -> None:
        for port in listener.ports:
            self._http.close(port)
        listener.ports = []

    def _open_check(self, name: ServiceName, listener: _CheckListener) -> None:
        if self._check_listeners.get(name) is not listener:
            return  # it went, or changed its port, while it waited
        try:
            self._open_on_addresses(name, listener)
        except OSError as error:
            self._close_check(listener)
            problem = (
                f"node {self._config.node_name} failed to start healthcheck "
                f'"{name}" on port {listener.health_check.port}: {error.strerror}'
            )
            if not listener.error:
                log.error("%s; trying again each %d s", problem, LISTEN_RETRY_INTERVAL_S)
            listener.error = problem
            regarding = EventObject("Service", name.name, name.namespace)
            self.events.emit(regarding, "FailedToStartServiceHealthcheck", "Listen", problem)
            self._http.call_later(LISTEN_RETRY_INTERVAL_S, lambda: self._open_check(name, listener))
        else:
            listener.error = ""

    def _open_on_addresses(self, name: ServiceName, listener: _CheckListener) -> None:
        """On those that NodePorts have; a family of which the node has none of them, on all."""
        node_hosts = [format_addr(address) for address in listener.addresses or ()]
        for wildcard in WILDCARDS:
            hosts = [host for host in node_hosts if (":" in host) is (":" in wildcard)]
            results = [self._open_on_host(name, listener, host) for host in hosts]
            if not any(results):
                self._open_on_host(name, listener, wildcard)

    def _open_on_host(self, name: ServiceName, listener: _CheckListener, host: str) -> bool:
        """Whether it is an address of this node."""
        v6 = ":" in host

        def respond(_: HttpRequest) -> HttpResponse:
            health_check = listener.health_check
            healthy = self.health.verdict().healthy
            return health.service_health_response(
                name, health_check.v6 if v6 else health_check.v4, healthy
            )

        try:
            port = self._http.listen(host, listener.health_check.port, respond, one_family=True)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or (host == "::" and not _has_ipv6()):
                return False
            raise
        listener.ports.append(port)
        return True

    # ---- answers ---------------------------------------------------------------------------

    def _handle_healthz(self, request: HttpRequest) -> HttpResponse:
        match request.path:
            case "/healthz":
                response = health.healthz(self.health.verdict(), self._eligible)
            case "/livez":
                response = health.livez(self.health.verdict(), threads.list_problems())
            case "/readyz":
                return health.readyz(self.health.verdict(), self._status)
            case _:
                return NOT_FOUND
        self.proxy_metrics.record_probe(request.path[1:], response.status)
        return response

    def _handle_metrics(self, request: HttpRequest) -> HttpResponse:
        handlers: dict[str, Callable[[], HttpResponse]] = {
            "/metrics": self._cached_metrics,
            "/metrics/slis": lambda: HttpResponse(200, SLIS_BODY, exposition.CONTENT_TYPE),
            "/healthz": lambda: HttpResponse(
                200, VERBOSE_HEALTHZ_BODY if "verbose" in request.query else b"ok"
            ),
            "/readyz": lambda: health.readyz(self.health.verdict(), self._status),
            "/healthz/ping": lambda: HttpResponse(200, b"ok"),
            "/proxyMode": lambda: HttpResponse(200, self._mode.encode()),
            "/configz": lambda: HttpResponse(200, self._configz, JSON),
            "/statusz": lambda: zpages.statusz(
                request, __version__, kbpf_metrics.process_start_time()
            ),
            "/flagz": lambda: zpages.flagz(request, self._flags),
        }
        return handlers.get(request.path, lambda: NOT_FOUND)()

    def _cached_metrics(self) -> HttpResponse:
        created, response = self._metrics_cache
        if response is None or time.monotonic() - created >= METRICS_CACHE_S:
            response = HttpResponse(
                200,
                self._format_agent_metrics(),
                exposition.CONTENT_TYPE,
                body_tail=self._collected_lines(),
            )
            self._metrics_cache = (time.monotonic(), response)
        return response

    def _collected_lines(self) -> bytes:
        return self._collector.scrape() if self._collector is not None else b""

    def collect(self) -> None:
        """Counts now what is otherwise counted behind the page."""
        if self._collector is not None:
            self._collector.collect()

    def _format_traffic(self, traffic: TrafficStats) -> list[str]:
        return list(kbpf_metrics.format_traffic(traffic, self._serving.service_series))

    def format_metrics(self) -> bytes:
        """The page of metrics, with what was counted last."""
        return self._format_agent_metrics() + self._collected_lines()

    def _format_agent_metrics(self) -> bytes:
        """All but what is counted in the background."""
        start = time.perf_counter()
        lines = self.proxy_metrics.format_lines()
        if self._status is not None:
            lines += kbpf_metrics.format_agent(self._status, self._config)
        failed_count = sum(bool(listener.error) for listener in self._check_listeners.values())
        server_counts = kbpf_metrics.ServerCounts(
            self.events.sent, self.events.dropped, len(self._check_listeners), failed_count
        )
        lines += kbpf_metrics.format_server(
            server_counts, self.health.verdict().healthy, self._eligible
        )
        if self._plane is not None:
            try:
                lines += kbpf_metrics.format_data_plane(self._plane.read_metrics())
            except KbpfError as error:
                log.warning("the data plane's counts are left out of /metrics: %s", error)
        lines += kbpf_metrics.format_process()
        lines += exposition.format_metric(
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


VERBOSE_HEALTHZ_BODY: Final = b"[+]ping ok\nhealthz check passed\n"
SLIS_BODY: Final = b"""\
# HELP kubernetes_healthcheck [STABLE] This metric records the result of a single healthcheck.
# TYPE kubernetes_healthcheck gauge
kubernetes_healthcheck{name="ping",type="healthz"} 1
"""
