# SPDX-License-Identifier: Apache-2.0
"""The agent's HTTP endpoints: which ports are open, what answers on each, and what happens if an
address is in use.

The agent's thread and the watch threads report to AgentServer; the HTTP thread reads. Ports are
opened and closed in the HTTP thread only. An address that cannot be bound is reported once, as an
Event and in the log, and retried every 5 s, as in kube-proxy.

/statusz and /flagz are those of kube-proxy 1.37 (k8s.io/apiserver/pkg/server/statusz, flagz), but
always text: kube-proxy also has them as objects of the API group config.k8s.io.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from kbpf import __version__
from kbpf.errors import ConfigError, KbpfError, LastError, escape_unprintable
from kbpf.kernel.system import threads
from kbpf.model.address import Addr
from kbpf.model.config import Config
from kbpf.model.metrics import DataPlaneMetrics, Pause, TrafficStats
from kbpf.model.objects import ServiceName
from kbpf.model.status import AgentStatus, ModeChoice
from kbpf.policy.health_check import HealthCheck
from kbpf.serve import exposition, health, kbpf_metrics
from kbpf.serve.collector import BackgroundCollector
from kbpf.serve.events import EventObject, EventRecorder, Post
from kbpf.serve.exposition import Metric
from kbpf.serve.http import LISTEN_RETRY_INTERVAL_S, NOT_FOUND, Handler, HttpServer
from kbpf.serve.kbpf_metrics import counter, gauge
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from kbpf.serve.message import JSON, HttpRequest, HttpResponse

log = logging.getLogger("kbpf.serve")

METRICS_CACHE_S: Final = 1.0
"""/metrics is formatted at most once in this time; further scrapes get the same page."""

EVENT_FLUSH_TIMEOUT_S: Final = 3.0
EVENT_ACTION: Final = "StartKubeProxy"


class MetricsReader(Protocol):
    """The part of dataplane.base.SharedAccess that /metrics needs."""

    def read_metrics(self) -> DataPlaneMetrics:
        """Reads the metrics that need no walk over the connections."""

    def refresh_neighbours(self) -> None:
        """Looks for a kube-proxy, if that is due."""

    def count_traffic(self, pause: Pause) -> TrafficStats:
        """Walks the connections, which takes long. `pause` is called after each chunk of work."""


class AgentServer:
    """Serves health, metrics and Events; see the module. Call start() before anything else and
    stop() at the end. `warnings` are Events about the Node, {reason: note}, which are sent when
    the agent has started.
    """

    def __init__(
        self,
        config: Config,
        mode: str = "",
        find_reader: Callable[[], MetricsReader] | None = None,
        post_event: Post | None = None,
        configz: bytes = b"{}",
        proxy_metrics: KubeProxyMetrics | None = None,
        flags: Mapping[str, str] = MappingProxyType({}),
        warnings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._config, self._mode, self._configz = config, mode, configz
        self._find_reader = find_reader
        self._serving, self._flags, self._warnings = config.serving, flags, warnings
        self._collector = (
            BackgroundCollector(
                lambda pause: find_reader().count_traffic(pause),
                lambda traffic: list(kbpf_metrics.format_traffic(traffic, self._serving.service_series)),
                lambda: find_reader().refresh_neighbours(),
            )
            if find_reader is not None
            else None
        )
        self.proxy_metrics = proxy_metrics or KubeProxyMetrics()
        self.health = health.HealthTracker(config.serving.late_seconds)
        self.events = EventRecorder(post_event, config.node_name)
        self._node_reference = EventObject("Node", config.node_name)
        self._http = HttpServer()
        self._eligible, self._verification_failed = True, False
        self._status: AgentStatus | None = None
        self._choice: ModeChoice | None = None
        self._config_error = LastError()
        self._listen_errors: dict[str, str] = {}
        self._checks = health.ServiceCheckPorts(self._http, self.health, self.events, config.node_name)
        self._metrics_cache: tuple[float, HttpResponse] | None = None

    def start(self) -> None:
        """Starts answering. Raises ConfigError if an address is in use and
        --bind-address-hard-fail is set.
        """
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
        """Closes all ports and stops sending Events."""
        if self._collector is not None:
            self._collector.stop()
        self.events.stop()
        self._http.stop()

    # ---- reports of the agent --------------------------------------------------------------

    def report_started(self, version: str, choice: ModeChoice) -> None:
        """The agent has started: sends the warnings about the settings, then kube-proxy's Event
        `Starting` and the mode.
        """
        for reason, note in self._warnings.items():
            self.events.emit(self._node_reference, reason, EVENT_ACTION, note)
        self._set_choice(choice)
        note = f"kbpf {version} mode {self._mode}"
        self.events.emit(self._node_reference, "Starting", EVENT_ACTION, note, warning=False)

    def _set_choice(self, choice: ModeChoice) -> None:
        self._mode = choice.mode
        if choice.reason and choice != self._choice:
            note = f"mode {choice.mode}, BPF is unavailable: {choice.reason}: {choice.detail}"
            self.events.emit(self._node_reference, "BpfUnavailable", EVENT_ACTION, note)
        self._choice = choice

    def set_node_leaving(self, leaving: bool) -> None:
        """Sets whether load balancers should send no new connections to this node."""
        self._eligible = not leaving

    def set_verification_failed(self, failed: bool) -> None:
        """Sets whether /healthz fails because connections are not translated
        (--verify-readiness).
        """
        self._verification_failed = failed

    def set_status(self, status: AgentStatus) -> None:
        """Publishes the agent's status, for /metrics and /readyz."""
        self._status = status
        if status.choice is not None:
            self._set_choice(status.choice)
        if self._config_error.replace(status.config_error):
            note = f"the configuration file was rejected: {status.config_error}"
            self.events.emit(self._node_reference, "ConfigurationRefused", EVENT_ACTION, note)

    def problems(self) -> tuple[str, ...]:
        """The addresses that cannot be bound, a line each. Thread-safe."""
        return tuple(dict(self._listen_errors).values())

    def set_health_checks(self, checks: Mapping[ServiceName, HealthCheck], addresses: tuple[Addr, ...] | None) -> None:
        """Replaces all health checks. They answer on `addresses`; None: on all addresses of the
        node.
        """
        new_checks = dict(checks)
        self._http.call_soon(lambda: self._checks.sync(new_checks, addresses))

    # ---- ports -----------------------------------------------------------------------------

    def _listen(self, address: str, handler: Handler, reason: str, first_attempt: bool = False) -> None:
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
                    problem,
                    "--bind-address-hard-fail",
                    "stop the process that listens there, or choose another port",
                ) from error
            if first_attempt:
                log.error("%s; retrying every %d s", problem, LISTEN_RETRY_INTERVAL_S)
            self._listen_errors[address] = problem
            self._http.call_later(LISTEN_RETRY_INTERVAL_S, lambda: self._listen(address, handler, reason))
        else:
            self._listen_errors.pop(address, None)
            log.log(logging.DEBUG if first_attempt else logging.INFO, "listening address=%s", address)

    # ---- responses -------------------------------------------------------------------------

    def _handle_healthz(self, request: HttpRequest) -> HttpResponse:
        match request.path:
            case "/healthz":
                is_eligible = self._eligible and not self._verification_failed
                response = health.healthz(self.health.verdict(), is_eligible)
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
            "/metrics": self._metrics_page,
            "/metrics/slis": lambda: HttpResponse(200, SLIS_BODY, exposition.CONTENT_TYPE),
            "/healthz": lambda: HttpResponse(200, VERBOSE_HEALTHZ_BODY if "verbose" in request.query else b"ok"),
            "/readyz": lambda: health.readyz(self.health.verdict(), self._status),
            "/healthz/ping": lambda: HttpResponse(200, b"ok"),
            "/proxyMode": lambda: HttpResponse(200, self._mode.encode()),
            "/configz": lambda: HttpResponse(200, self._configz, JSON),
            "/statusz": lambda: statusz(__version__, kbpf_metrics.process_start_time()),
            "/flagz": lambda: flagz(self._flags),
        }
        return handlers.get(request.path, lambda: NOT_FOUND)()

    def _metrics_page(self) -> HttpResponse:
        now = time.monotonic()
        if self._metrics_cache is None or now - self._metrics_cache[0] >= METRICS_CACHE_S:
            body, tail = self._format_agent_metrics(), self._collected_lines()
            response = HttpResponse(200, body, exposition.CONTENT_TYPE, body_tail=tail)
            self._metrics_cache = (now, response)
        return self._metrics_cache[1]

    def _collected_lines(self) -> bytes:
        return self._collector.scrape() if self._collector is not None else b""

    def collect(self) -> None:
        """Collects now, in the calling thread, what is otherwise collected in the background."""
        if self._collector is not None:
            self._collector.collect()

    def format_metrics(self) -> bytes:
        """Formats the page of metrics, with the results of the last background collection."""
        return self._format_agent_metrics() + self._collected_lines()

    def _format_agent_metrics(self) -> bytes:
        """Formats all metrics except those that are collected in the background."""
        start = time.perf_counter()
        lines = self.proxy_metrics.format_lines()
        if self._status is not None:
            agent = kbpf_metrics.AgentValues(self._status, self._config)
            lines += exposition.format_metrics(kbpf_metrics.AGENT_METRICS, agent)
        lines += exposition.format_metrics(METRICS, self)
        if self._find_reader is not None:
            try:
                measures = self._find_reader().read_metrics()
                lines += exposition.format_metrics(kbpf_metrics.DATA_PLANE_METRICS, measures)
            except KbpfError as error:
                log.warning("cannot read the data plane's metrics; /metrics omits them: %s", error)
        lines += exposition.format_metrics(kbpf_metrics.PROCESS_METRICS, None)
        lines += exposition.format_metrics(kbpf_metrics.SCRAPE_METRICS, time.perf_counter() - start)
        return "\n".join(lines).encode() + b"\n"


# The private attributes are those of AgentServer, of which this table is a part.
METRICS: Final[Sequence[Metric[AgentServer]]] = (
    gauge("healthy", "1 unless a change has waited too long to be programmed", lambda s: s.health.verdict().healthy),
    gauge("node_eligible", "0 while the node is about to be removed", lambda s: s._eligible),
    counter(
        "events",
        "Kubernetes Events, sent or dropped",
        lambda s: [(("sent",), s.events.sent), (("dropped",), s.events.dropped)],
        "outcome",
    ),
    gauge("service_health_checks", "Services with a healthCheckNodePort", lambda s: s._checks.count),
    gauge(
        "service_health_checks_failed", "Health checks whose port could not be opened", lambda s: s._checks.failed_count
    ),
)

VERBOSE_HEALTHZ_BODY: Final = b"[+]ping ok\nhealthz check passed\n"
SLIS_BODY: Final = b"""\
# HELP kubernetes_healthcheck [STABLE] This metric records the result of a single healthcheck.
# TYPE kubernetes_healthcheck gauge
kubernetes_healthcheck{name="ping",type="healthz"} 1
"""


# ---- /statusz and /flagz -------------------------------------------------------------------------

EMULATION_VERSION: Final = "1.37"
"""The version of kube-proxy whose behaviour kbpf follows."""

URL_CREDENTIALS: Final = re.compile(r"//[^/]*@")
"""The user name and password in a URL."""

PATHS: Final = ("/configz", "/flagz", "/healthz", "/metrics", "/proxyMode", "/readyz")
TEXT_WARNING: Final = (
    "\nkbpf %s\nWarning: This endpoint is not meant to be machine parseable, has no formatting "
    "compatibility guarantees and is for debugging purposes only.\n"
)


def statusz(version: str, start_time: float) -> HttpResponse:
    """Returns the response to /statusz. `start_time`: of the process, in seconds since the
    epoch.
    """
    uptime = max(0, int(time.time() - start_time))
    start = time.gmtime(start_time)
    text = (
        f"\nStarted: {time.strftime('%a %b', start)} {start.tm_mday:2}"
        f" {time.strftime('%H:%M:%S UTC %Y', start)}\n"
        f"Up: {uptime // 3600} hr {uptime // 60 % 60:02} min {uptime % 60:02} sec\n"
        f"Binary version: {version}\n"
        f"Emulation version: {EMULATION_VERSION}\n"
        f"Paths: {' '.join(PATHS)}\n"
    )
    return HttpResponse(200, (TEXT_WARNING % "statusz" + text).encode())


def flagz(flags: Mapping[str, str]) -> HttpResponse:
    """Returns the response to /flagz. `flags`: the flags that were given, {name: text}."""
    text = "".join(f"{name.lstrip('-')}={_mask_credentials(value)}\n" for name, value in sorted(flags.items()))
    return HttpResponse(200, (TEXT_WARNING % "flagz" + text).encode())


def _mask_credentials(text: str) -> str:
    return "CLASSIFIED" if URL_CREDENTIALS.search(text) else escape_unprintable(text)
