# SPDX-License-Identifier: Apache-2.0
"""Formats kbpf's own metrics, those of the agent and of its data plane; they complement
kube-proxy's.

Pure except for `format_process()`: values in, lines out. The names begin with kbpf_;
docs/observe.md lists them all and explains how to use them. A Service has series only while it has
connections, and at most `max_series` Service ports have them: a cluster has thousands of Services,
and every node would export them all.
"""

import os
import resource
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from heapq import nlargest
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.model.config import Config
from kbpf.model.metrics import BackendStats, ConnectionStats, DataPlaneMetrics, TrafficStats
from kbpf.model.status import AgentStatus, PacketStatus
from kbpf.serve.exposition import format_labels, format_metric


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """Counters of the HTTP server and the Event sender: Events sent and dropped, health check
    ports requested and failed.
    """

    events_sent: int = 0
    events_dropped: int = 0
    checks: int = 0
    checks_failed: int = 0


def format_agent(status: AgentStatus, config: Config) -> Iterator[str]:
    yield from _gauge("build_info", "The version, as a label", _info_sample(version=status.version))
    yield from _gauge(
        "mode_info", "The active data plane, the requested mode and the main settings",
        _info_sample(mode=status.mode, requested=config.mode,
             reason=status.choice.reason if status.choice else "", forwarding=config.forwarding,
             socket_lb=str(config.socket_lb), algorithm=str(config.algorithm)),
    )  # fmt: skip
    for name, text, value in (
        ("synced", "1 after everything has been programmed once", status.synced),
        ("services", "Services in the store", status.services),
        ("service_ports", "Desired Service ports, counted per address family",
         status.service_ports),
        ("service_ports_refused", "Service ports that could not be programmed", status.refused),
        ("service_ports_without_endpoints", "Service ports that refuse connections: no endpoints",
         status.without_endpoints),
        ("problems", "Lines that `kbpf inspect status` lists as problems", status.problem_count),
        ("sync_failing", "1 while writes to the data plane fail", bool(status.error)),
        ("last_sync_seconds", "Duration of the last pass", status.last_apply_ms / 1000),
    ):  # fmt: skip
        yield from _gauge(name, text, [("", value)])
    if status.config_error is not None:
        yield from _gauge(
            "config_last_reload_successful",
            "0 while the agent runs with older settings because the --config file was rejected",
            [("", not status.config_error)],
        )
    yield from _gauge(
        "namespace_service_ports_refused",
        "Service ports that could not be programmed, for the namespaces with the most of them",
        [
            (format_labels(namespace=name), n)
            for name, n in sorted(status.refused_namespaces.items())
        ],
    )
    yield from _counter("syncs_total", "Passes written to the data plane", [("", status.applied)])
    yield from _gauge(
        "event_to_map_seconds", "From an event's arrival until it is programmed, of the last 4096",
        [(format_labels(quantile="0.5"), status.event_to_map_p50_ms / 1000),
         (format_labels(quantile="0.99"), status.event_to_map_p99_ms / 1000)],
    )  # fmt: skip
    yield from _format_sources(status)
    yield from _format_threads(status)
    yield from _format_packet_path(status.packets)


def _format_sources(status: AgentStatus) -> Iterator[str]:
    labelled = [(format_labels(source=source.name), source) for source in status.sources]
    for name, text, values in (
        ("synced", "1 after the first complete list", [s.synced for _, s in labelled]),
        (
            "watching",
            "1 while the watch is established",
            [s.state == "watching" for _, s in labelled],
        ),
        ("failures", "Consecutive failed attempts", [s.failures for _, s in labelled]),
        (
            "silent_seconds",
            "Time since the source last received data",
            [s.silent_seconds for _, s in labelled],
        ),
    ):
        samples = zip((label_set for label_set, _ in labelled), map(float, values), strict=True)
        yield from _gauge(f"source_{name}", text, list(samples))
    yield from _counter(
        "source_drift_total", "Objects found changed by a new list without an event for it",
        [(label_set, source.drift) for label_set, source in labelled],
    )  # fmt: skip


def _format_threads(status: AgentStatus) -> Iterator[str]:
    yield from _gauge(
        "thread_up", "0 while a thread of the agent is down, stuck, or fails repeatedly",
        [(format_labels(thread=thread.name), not thread.problem) for thread in status.threads],
    )  # fmt: skip
    yield from _counter(
        "thread_restarts_total", "Times that a thread failed and was restarted",
        [(format_labels(thread=thread.name), thread.restarts) for thread in status.threads],
    )  # fmt: skip


def _format_packet_path(packets: PacketStatus | None) -> Iterator[str]:
    if packets is None:
        return
    state = "off" if not packets.enabled else "failed" if packets.problem else "on"
    yield from _gauge(
        "packet_path", "1 for the current state of the packet path",
        [(format_labels(state=name), name == state) for name in ("on", "off", "failed")],
    )  # fmt: skip
    yield from _gauge(
        "packet_path_failed_devices", "Devices to which the packet path could not be attached",
        [("", packets.failed_count)],
    )  # fmt: skip


def format_data_plane(measures: DataPlaneMetrics) -> Iterator[str]:
    """Yields the metrics that the data plane can read without walking its connections."""
    tables = [(format_labels(map=table.name), table) for table in measures.tables]
    yield from _gauge(
        "map_entries", "Entries in a map",
        [(label_set, table.entries) for label_set, table in tables if table.entries is not None],
    )  # fmt: skip
    yield from _gauge(
        "map_max_entries", "Current capacity of a map; maps written by the agent grow",
        [(label_set, table.capacity) for label_set, table in tables],
    )  # fmt: skip
    yield from _gauge(
        "map_limit_entries",
        "Maximum capacity of a map (--max-...); only of maps that do not evict entries",
        [(label_set, table.limit) for label_set, table in tables if table.limit is not None],
    )  # fmt: skip
    yield from _gauge(
        "map_bytes", "Kernel memory used by a map",
        [(label_set, table.bytes) for label_set, table in tables if table.bytes is not None],
    )  # fmt: skip
    yield from _gauge(
        "hooks_attached", "1 if the socket hook is attached; one series for each requested hook",
        [(format_labels(hook=name), attached) for name, attached in measures.hooks],
    )  # fmt: skip
    if measures.foreign_programs is not None:
        yield from _gauge(
            "foreign_programs", "Programs of other load balancers on the same hooks and devices",
            [("", measures.foreign_programs)],
        )  # fmt: skip
    yield from _counter(
        "decisions_total", "Decisions on connections, datagrams and packets, by verdict and reason",
        [(format_labels(reason=decision.reason, verdict=decision.verdict), decision.total)
         for decision in measures.reason_counts],
    )  # fmt: skip


def format_traffic(stats: TrafficStats, max_series: int) -> Iterator[str]:
    """Yields the connections and their outcomes for the `max_series` busiest Service ports."""
    open_counts, totals = dict(stats.connections or ()), dict(stats.totals)
    names = list({**open_counts, **totals})
    if len(names) > max_series:
        zero = ConnectionStats()
        names = nlargest(
            max_series,
            names,
            lambda key: (totals.get(key, zero).opened + open_counts.get(key, 0), key),
        )
    label_sets = {name: _port_labels(*name) for name in names}
    if stats.connections is not None:
        yield from _gauge(
            "service_connections",
            "Open connections of a Service port",
            [
                (f"{{{label_sets[name]}}}", open_counts[name])
                for name in names
                if name in open_counts
            ],
        )
        yield from _gauge(
            "connections", "Open connections of all Services", [("", sum(open_counts.values()))]
        )
    if stats.flow_count is not None:
        yield from _gauge(
            "tracked_connections",
            "Packet path connections that cannot be evicted",
            [("", stats.flow_count.live)],
        )
        yield from _gauge(
            "tracked_connections_limit", "Limit of tracked connections (--max-connections)",
            [("", stats.flow_count.capacity)],
        )  # fmt: skip
    yield from _gauge(
        "service_series_left_out", "Service ports with connections whose series are omitted",
        [("", len(open_counts.keys() | totals.keys()) - len(names))],
    )  # fmt: skip
    rows = [_Series(label_sets[name], name[3], totals[name]) for name in names if name in totals]
    yield from _format_outcomes("service", "a Service port", rows, stats.counted_fields)
    if stats.backends:
        yield from _format_backends(stats.backends, stats.counted_fields)


def _format_backends(
    pairs: tuple[BackendStats, ...], known_fields: Collection[str]
) -> Iterator[str]:
    rows = [
        _Series(
            f"{_port_labels(*pair.name)},{format_labels(backend=pair.backend)[1:-1]}",
            pair.name[3],
            pair.stats,
        )
        for pair in pairs
    ]
    yield from _gauge(
        "backend_connections",
        "Open connections of a backend",
        [
            (f"{{{row.labels}}}", pair.open_connections)
            for row, pair in zip(rows, pairs, strict=True)
        ],
    )
    yield from _format_outcomes("backend", "a backend", rows, known_fields)


class _Series(NamedTuple):
    """The labels of a series, without braces, and its counts."""

    labels: str
    protocol: str
    totals: ConnectionStats


FAILURES: Final = {
    "refused": ("service",), "unanswered": ("service", "backend"), "broken": ("service", "backend")
}  # fmt: skip
"""Fields of ConnectionStats that count failures, and the kinds of series that have them."""


def _format_outcomes(
    prefix: str, subject: str, rows: list[_Series], known_fields: Collection[str]
) -> Iterator[str]:
    """Yields what connections came to, for the fields that are counted. How a connection ends is
    known only for TCP.
    """
    tcp = [row for row in rows if row.protocol == "TCP"]
    if "opened" in known_fields:
        yield from _counter(
            f"{prefix}_connections_total", f"Connections opened to {subject}",
            [(f"{{{row.labels}}}", row.totals.opened) for row in rows],
        )  # fmt: skip
    reasons = [
        failure
        for failure, prefixes in FAILURES.items()
        if failure in known_fields and prefix in prefixes
    ]
    if reasons:
        yield from _counter(
            f"{prefix}_failures_total", f"Failed connections to {subject}, by reason",
            [
                (f'{{{row.labels},reason="{reason}"}}', getattr(row.totals, reason))
                for reason in reasons
                for row in (rows if reason == "refused" else tcp)
            ],
        )  # fmt: skip
    if "bytes_in" in known_fields:
        yield from _counter(
            f"{prefix}_bytes_total", "Bytes from clients (in) and to them (out)",
            [
                (f'{{{row.labels},direction="{direction}"}}', count)
                for row in rows
                for direction, count in (("in", row.totals.bytes_in), ("out", row.totals.bytes_out))
            ],
        )  # fmt: skip
    if "rtts" in known_fields:
        for name, text, values in (
            ("retransmits", "TCP segments that clients on this node retransmitted",
             [row.totals.retransmits for row in tcp]),
            ("round_trip_seconds", "Sum of round-trip times to the backend, one per connection",
             [row.totals.rtt_us / 1e6 for row in tcp]),
            ("round_trips", "Ended TCP connections whose round-trip time was measured",
             [row.totals.rtts for row in tcp]),
        ):  # fmt: skip
            samples = zip((f"{{{row.labels}}}" for row in tcp), values, strict=True)
            yield from _counter(f"{prefix}_{name}_total", text, list(samples))


def _port_labels(namespace: str, service: str, port: str, protocol: str) -> str:
    """Formats the labels without braces."""
    return format_labels(namespace=namespace, service=service, port=port, protocol=protocol)[1:-1]


def format_server(counts: ServerCounts, healthy: bool, eligible: bool) -> Iterator[str]:
    yield from _gauge(
        "healthy", "1 unless a change has waited too long to be programmed", [("", healthy)]
    )
    yield from _gauge("node_eligible", "0 while the node is about to be removed", [("", eligible)])
    yield from _counter(
        "events_total", "Kubernetes Events, sent or dropped",
        [(format_labels(outcome="sent"), counts.events_sent),
         (format_labels(outcome="dropped"), counts.events_dropped)],
    )  # fmt: skip
    yield from _gauge(
        "service_health_checks", "Services with a healthCheckNodePort", [("", counts.checks)]
    )
    yield from _gauge(
        "service_health_checks_failed", "Health checks whose port could not be opened",
        [("", counts.checks_failed)],
    )  # fmt: skip


def format_process() -> Iterator[str]:
    """Yields the metrics of the process, under the names that Prometheus client libraries use."""
    pages = [int(field) for field in Path("/proc/self/statm").read_text().split()[:2]]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for name, kind, text, value in (
        ("cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.",
         usage.ru_utime + usage.ru_stime),
        ("max_fds", "gauge", "Maximum number of open file descriptors.", soft),
        ("open_fds", "gauge", "Number of open file descriptors.",
         len(os.listdir("/proc/self/fd"))),
        ("resident_memory_bytes", "gauge", "Resident memory size in bytes.",
         pages[1] * resource.getpagesize()),
        ("start_time_seconds", "gauge",
         "Start time of the process since unix epoch in seconds.", process_start_time()),
        ("virtual_memory_bytes", "gauge", "Virtual memory size in bytes.",
         pages[0] * resource.getpagesize()),
    ):  # fmt: skip
        yield from format_metric(f"process_{name}", kind, text, [("", value)])


@cache
def process_start_time() -> float:
    """Returns the start time of the process, in seconds since the epoch."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + start_after_boot, 2)


def _info_sample(**values: str) -> list[tuple[str, float]]:
    return [(format_labels(**values), 1)]


def _gauge(name: str, text: str, samples: list[tuple[str, float]]) -> Iterator[str]:
    return format_metric(f"kbpf_{name}", "gauge", text, samples)


def _counter(name: str, text: str, samples: list[tuple[str, float]]) -> Iterator[str]:
    return format_metric(f"kbpf_{name}", "counter", text, samples)
