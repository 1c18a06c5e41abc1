# SPDX-License-Identifier: Apache-2.0
"""Formats kbpf's own metrics, those of the agent and of its data plane; they complement
kube-proxy's.

Each metric is an entry of a table: its name, type, HELP, where its value comes from, and its
labels. The names begin with kbpf_; docs/observe.md lists them all and explains how to use them. A
Service has series only once it has had connections, and at most `max_series` Service ports have
them: a cluster has thousands of Services, and every node would export them all.
"""

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kbpf.model.config import Config
from kbpf.model.fairness import take_turns
from kbpf.model.metrics import LATENCY_BOUNDS, ConnectionStats, DataPlaneMetrics, TrafficStats
from kbpf.model.status import AgentStatus, SourceView
from kbpf.serve.exposition import Histogram, Metric, Reader, Series, Summary, Value, format_labels, format_metrics

T = TypeVar("T")


class AgentValues(NamedTuple):
    """What the metrics of the agent are read from."""

    status: AgentStatus
    config: Config


def gauge(name: str, text: str, read: Reader[T], *labels: str) -> Metric[T]:
    return Metric(f"kbpf_{name}", "gauge", text, read, labels)


def counter(name: str, text: str, read: Reader[T], *labels: str) -> Metric[T]:
    return Metric(f"kbpf_{name}_total", "counter", text, read, labels)


def _mode_info(values: AgentValues) -> list[Series]:
    status, config = values
    reason = status.choice.reason if status.choice else ""
    forwarding = (status.packets.forwarding if status.packets else "") or config.forwarding
    labels = (status.mode, config.mode, reason, forwarding, str(config.socket_lb), str(config.algorithm))
    return [(labels, 1)]


def _by_source(read: Callable[[SourceView], float]) -> Reader[AgentValues]:
    return lambda values: [((source.name,), read(source)) for source in values.status.sources]


def _last_event_times(values: AgentValues) -> list[Series]:
    """In seconds since the epoch; none for a source that has not received anything."""
    status = values.status
    written = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - status.heartbeat)
    return [
        ((source.name,), round(written - source.silent_seconds, 1))
        for source in status.sources
        if source.silent_seconds
    ]


def _packet_path_states(values: AgentValues) -> list[Series] | None:
    packets = values.status.packets
    if packets is None:
        return None
    state = "off" if not packets.enabled else "failed" if packets.problem else "on"
    return [((name,), name == state) for name in ("on", "off", "failed")]


AGENT_METRICS: Final[Sequence[Metric[AgentValues]]] = (
    gauge("build_info", "The version, as a label", lambda a: [((a.status.version,), 1)], "version"),
    gauge(
        "mode_info",
        "The active data plane, the requested mode and the main settings",
        _mode_info,
        "mode",
        "requested",
        "reason",
        "forwarding",
        "socket_lb",
        "algorithm",
    ),
    gauge("synced", "1 after everything has been programmed once", lambda a: a.status.synced),
    gauge("services", "Services in the store", lambda a: a.status.services),
    gauge("service_ports", "Desired Service ports, counted per address family", lambda a: a.status.service_ports),
    gauge("service_ports_refused", "Service ports that could not be programmed", lambda a: a.status.refused),
    gauge(
        "service_ports_without_endpoints",
        "Service ports that refuse connections: no endpoints",
        lambda a: a.status.without_endpoints,
    ),
    gauge(
        "service_ports_with_refused_addresses",
        "Service ports of which an address is not served: taken, or not allowed",
        lambda a: a.status.address_refusals,
    ),
    gauge("problems", "Lines that `kbpf inspect status` lists as problems", lambda a: a.status.problem_count),
    gauge("sync_failing", "1 while writes to the data plane fail", lambda a: bool(a.status.error)),
    gauge("last_sync_duration_seconds", "Duration of the last pass", lambda a: a.status.last_apply_ms / 1000),
    gauge(
        "config_last_reload_successful",
        "0 while the agent runs with older settings because the --config file was rejected",
        lambda a: None if a.status.config_error is None else not a.status.config_error,
    ),
    gauge(
        "namespace_service_ports_refused",
        "Service ports that could not be programmed, for the namespaces with the most of them",
        lambda a: [((name,), n) for name, n in sorted(a.status.refused_namespaces.items())],
        "namespace",
    ),
    counter("syncs", "Passes written to the data plane", lambda a: a.status.applied),
    gauge("source_synced", "1 after the first complete list", _by_source(lambda source: source.synced), "source"),
    gauge(
        "source_watching",
        "1 while the watch is established",
        _by_source(lambda source: source.state == "watching"),
        "source",
    ),
    gauge("source_failures", "Consecutive failed attempts", _by_source(lambda source: source.failures), "source"),
    gauge("source_last_event_timestamp_seconds", "When the source last received data", _last_event_times, "source"),
    counter(
        "source_drift",
        "Objects found changed by a new list without an event for it",
        _by_source(lambda source: source.drift),
        "source",
    ),
    gauge(
        "thread_up",
        "0 while a thread of the agent is down, stuck, or fails repeatedly",
        lambda a: [((thread.name,), not thread.problem) for thread in a.status.threads],
        "thread",
    ),
    counter(
        "thread_restarts",
        "Times that a thread failed and was restarted",
        lambda a: [((thread.name,), thread.restarts) for thread in a.status.threads],
        "thread",
    ),
    gauge(
        "verify_differences",
        "Differences that the agent found when it last verified this part of what it serves",
        lambda a: [((part.name,), part.differences) for part in a.status.verified] or None,
        "part",
    ),
    gauge(
        "verify_last_timestamp_seconds",
        "When it did so, in seconds since the epoch",
        lambda a: [((part.name,), part.timestamp) for part in a.status.verified] or None,
        "part",
    ),
    gauge(
        "failing_backends",
        "Backends to which hardly a connection from this node succeeded in the last minute",
        lambda a: a.status.failing_backends,
    ),
    gauge("packet_path", "1 for the current state of the packet path", _packet_path_states, "state"),
    gauge(
        "packet_path_failed_devices",
        "Devices to which the packet path could not be attached",
        lambda a: a.status.packets.failed_count if a.status.packets is not None else None,
    ),
)
DATA_PLANE_METRICS: Final[Sequence[Metric[DataPlaneMetrics]]] = (
    gauge(
        "map_entries",
        "Entries in a map",
        lambda p: [((t.name,), t.entries) for t in p.tables if t.entries is not None],
        "map",
    ),
    gauge(
        "map_max_entries",
        "Current capacity of a map; maps written by the agent grow",
        lambda p: [((t.name,), t.capacity) for t in p.tables],
        "map",
    ),
    gauge(
        "map_limit_entries",
        "Maximum capacity of a map (--max-...); only of maps that do not evict entries",
        lambda p: [((t.name,), t.limit) for t in p.tables if t.limit is not None],
        "map",
    ),
    gauge(
        "map_bytes",
        "Kernel memory used by a map",
        lambda p: [((t.name,), t.bytes) for t in p.tables if t.bytes is not None],
        "map",
    ),
    gauge(
        "hooks_attached",
        "1 if the socket hook is attached; one series for each requested hook",
        lambda p: [((name,), attached) for name, attached in p.hooks],
        "hook",
    ),
    gauge(
        "foreign_programs",
        "Programs of other load balancers, or of another kbpf, on the same hooks and devices",
        lambda p: p.foreign_programs,
    ),
    gauge(
        "bypassed_firewall_chains",
        "Chains of the host that may refuse packets, but see those for NodePorts and VIPs only "
        "after kbpf has translated them",
        lambda p: p.bypassed_chains,
    ),
    counter(
        "decisions",
        "Decisions on connections, datagrams and packets, by verdict and reason",
        lambda p: [((d.reason, d.verdict), d.total) for d in p.reason_counts],
        "reason",
        "verdict",
    ),
)


class _Row(NamedTuple):
    """The labels of a series, without braces, its open connections and its counts. None: it has
    none.
    """

    labels: str
    protocol: str
    open: int | None
    stats: ConnectionStats | None


class _Traffic(NamedTuple):
    """What the metrics of traffic are read from: the rows with a series, and the counted fields."""

    stats: TrafficStats
    rows: Sequence[_Row]
    left_out: int = 0

    def open_connections(self) -> list[Series]:
        return [(f"{{{row.labels}}}", row.open) for row in self.rows if row.open is not None]

    def counts(
        self, field: str, read: Callable[[ConnectionStats], Value], only_tcp: bool = False
    ) -> list[Series] | None:
        """One series a row; None if `field` is not counted. How a connection ends is known only for
        TCP.
        """
        if field not in self.stats.counted_fields:
            return None
        return [
            (f"{{{row.labels}}}", read(row.stats))
            for row in self.rows
            if row.stats is not None and not (only_tcp and row.protocol != "TCP")
        ]

    def failures(self, prefix: str) -> list[Series] | None:
        reasons = [
            reason
            for reason, prefixes in FAILURES.items()
            if reason in self.stats.counted_fields and prefix in prefixes
        ]
        return (
            [
                (f'{{{row.labels},reason="{reason}"}}', getattr(row.stats, reason))
                for reason in reasons
                for row in self.rows
                if row.stats is not None and (reason not in TCP_FAILURES or row.protocol == "TCP")
            ]
            if reasons
            else None
        )

    def bytes(self) -> list[Series] | None:
        if "bytes_in" not in self.stats.counted_fields:
            return None
        return [
            (f'{{{row.labels},direction="{direction}"}}', count)
            for row in self.rows
            if row.stats is not None and row.stats.has_bytes(row.protocol)
            for direction, count in (("in", row.stats.bytes_in), ("out", row.stats.bytes_out))
        ]


FAILURES: Final = {
    "no_endpoint": ("service",),
    "not_allowed": ("service",),
    "refused": ("service", "backend"),
    "unanswered": ("service", "backend"),
    "reset": ("service", "backend"),
}
"""Fields of ConnectionStats that count failures, and the kinds of series that have them."""
TCP_FAILURES: Final = frozenset(("unanswered", "reset"))
"""Those that exist for TCP only."""


def _outcome_metrics(prefix: str, subject: str) -> tuple[Metric[_Traffic], ...]:
    """What connections came to."""
    return (
        counter(
            f"{prefix}_connections",
            f"Connections opened to {subject}",
            lambda t: t.counts("opened", lambda stats: stats.opened),
        ),
        counter(f"{prefix}_failures", f"Failed connections to {subject}, by reason", lambda t: t.failures(prefix)),
        counter(f"{prefix}_bytes", "Bytes from clients (in) and to them (out)", lambda t: t.bytes()),
        counter(
            f"{prefix}_retransmits",
            "TCP segments that clients on this node retransmitted",
            lambda t: t.counts("rtts", lambda stats: stats.retransmits, only_tcp=True),
        ),
        Metric(
            f"kbpf_{prefix}_round_trip_seconds",
            "summary",
            "Smoothed round-trip times to the backend when TCP connections ended",
            lambda t: t.counts("rtts", lambda stats: Summary(stats.rtt_us / 1e6, stats.rtts), only_tcp=True),
        ),
    )


def _if_counted(read: Reader[_Traffic]) -> Reader[_Traffic]:
    return lambda traffic: None if traffic.stats.connections is None else read(traffic)


def _histograms(field: str, stats: TrafficStats) -> list[Series]:
    series: list[Series] = []
    for name, latencies in stats.latencies:
        latency = getattr(latencies, field)
        histogram = Histogram(LATENCY_BOUNDS, latency.counts, latency.sum_seconds)
        series.append((f"{{{_port_labels(*name)}}}", histogram))
    return series


SERVICE_METRICS: Final[Sequence[Metric[_Traffic]]] = (
    gauge("service_connections", "Open connections of a Service port", _if_counted(lambda t: t.open_connections())),
    gauge(
        "connections",
        "Open connections of all Services",
        _if_counted(lambda t: sum(count for _, count in t.stats.connections or ())),
    ),
    gauge(
        "tracked_connections",
        "Packet path connections that cannot be evicted",
        lambda t: None if t.stats.flow_count is None else t.stats.flow_count.live,
    ),
    gauge(
        "tracked_connections_limit",
        "Limit of tracked connections (--max-connections)",
        lambda t: None if t.stats.flow_count is None else t.stats.flow_count.capacity,
    ),
    gauge("kube_proxy_running", "1 if a kube-proxy runs on this node", lambda t: t.stats.kube_proxy_running),
    gauge("kube_proxy_rules", "1 if rules of a kube-proxy are on this node", lambda t: t.stats.kube_proxy_rules),
    gauge("service_series_left_out", "Service ports with connections whose series are omitted", lambda t: t.left_out),
    *_outcome_metrics("service", "a Service port"),
)
BACKEND_METRICS: Final[Sequence[Metric[_Traffic]]] = (
    gauge("backend_connections", "Open connections of a backend", lambda t: t.open_connections() or None),
    *_outcome_metrics("backend", "a backend"),
)


LATENCY_METRICS: Final[Sequence[Metric[TrafficStats]]] = tuple(
    Metric(f"kbpf_service_{name}_duration_seconds", "histogram", text, partial(_histograms, field))
    for name, field, text in (
        ("connect", "connect", "From the first SYN of a socket until the handshake ended"),
        ("round_trip", "round_trip", "Smoothed round-trip time when a connection ended"),
    )
)


def format_traffic(stats: TrafficStats, max_series: int) -> Iterator[str]:
    """Yields the connections and their outcomes for `max_series` Service ports: of each namespace
    those with failures, then the busiest.
    """
    open_counts, totals = dict(stats.connections or ()), dict(stats.totals)
    all_names = list({**open_counts, **totals})
    names = all_names
    if len(names) > max_series:
        zero = ConnectionStats()
        names.sort(key=lambda key: (totals.get(key, zero).rank(open_counts.get(key, 0)), key))
        names = take_turns(names, itemgetter(0))[:max_series]
    rows = [_Row(_port_labels(*name), name[3], open_counts.get(name, 0), totals.get(name)) for name in names]
    yield from format_metrics(SERVICE_METRICS, _Traffic(stats, rows, len(all_names) - len(names)))
    if stats.latencies:
        yield from format_metrics(LATENCY_METRICS, stats)
    if stats.backends:
        rows = [
            _Row(
                f"{_port_labels(*backend.name)},{format_labels(backend=backend.backend)[1:-1]}",
                backend.name[3],
                backend.open_connections,
                backend.stats,
            )
            for backend in stats.backends
        ]
        yield from format_metrics(BACKEND_METRICS, _Traffic(stats, rows))


def _port_labels(namespace: str, service: str, port: str, protocol: str) -> str:
    """Formats the labels without braces."""
    return format_labels(namespace=namespace, service=service, port=port, protocol=protocol)[1:-1]


def _read_cpu_seconds(_: None) -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _read_bytes(field: int) -> Reader[None]:
    """A field of /proc/self/statm, which counts pages."""
    return lambda _: int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


@cache
def process_start_time() -> float:
    """Returns the start time of the process, in seconds since the epoch."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + start_after_boot, 2)


PROCESS_METRICS: Final[Sequence[Metric[None]]] = (
    Metric(
        "process_cpu_seconds_total",
        "counter",
        "Total user and system CPU time spent in seconds.",
        _read_cpu_seconds,
    ),
    Metric(
        "process_max_fds",
        "gauge",
        "Maximum number of open file descriptors.",
        lambda _: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    ),
    Metric("process_open_fds", "gauge", "Number of open file descriptors.", lambda _: len(os.listdir("/proc/self/fd"))),
    Metric("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", _read_bytes(1)),
    Metric(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
        lambda _: process_start_time(),
    ),
    Metric("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", _read_bytes(0)),
)
"""Under the names that Prometheus client libraries use."""
SCRAPE_METRICS: Final[Sequence[Metric[float]]] = (
    gauge("scrape_duration_seconds", "Time that it took to format this page", lambda seconds: seconds),
)
