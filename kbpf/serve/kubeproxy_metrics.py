# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's metrics, with its names and buckets, so that existing dashboards keep working.

Only the metrics that do not depend on a proxy mode (kube-proxy 1.37, metrics/metrics.go) and those
of its conntrack reconciler are exported, not those of iptables or nftables. Also here: requests to
the API server, as client-go counts them. The agent's threads record and the HTTP thread reads, all
under one lock.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from kbpf.model.metrics import UdpCuts
from kbpf.serve.exposition import Histogram, Metric, format_metrics

FAMILIES: Final = {4: "IPv4", 6: "IPv6"}
BOTH_FAMILIES: Final = tuple(FAMILIES)
SYNC_BUCKETS: Final = tuple(0.001 * 2**n for n in range(15))
PROGRAMMING_BUCKETS: Final = (
    0.0,  # a mistake of kube-proxy, but dashboards rely on the bucket
    0.25,
    0.5,
    *range(1, 60),
    *range(60, 120, 5),
    *range(120, 301, 30),
)
EVENT_TO_MAP_BUCKETS: Final = tuple(0.0001 * 4**n for n in range(10))
REQUEST_BUCKETS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)


def _histograms_by_family() -> dict[int, Histogram]:
    return {ip_family: Histogram(SYNC_BUCKETS) for ip_family in FAMILIES}


class KubeProxyMetrics:
    """Counts since the agent started. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._sync, self._full, self._partial = (
            _histograms_by_family(),
            _histograms_by_family(),
            _histograms_by_family(),
        )
        self._programming = {ip_family: Histogram(PROGRAMMING_BUCKETS) for ip_family in FAMILIES}
        self._event_to_map = Histogram(EVENT_TO_MAP_BUCKETS)
        self._last_synced = dict.fromkeys(FAMILIES, 0.0)
        self._last_queued = dict.fromkeys(FAMILIES, 0.0)
        self._queued_events = 0
        self._changes = {"service": 0, "endpoint": 0}
        self._pending_changes = {"service": 0, "endpoint": 0}
        self._no_local = {(policy, ip_family): 0 for policy in ("external", "internal") for ip_family in BOTH_FAMILIES}
        self._probe_counts: dict[str, Counter[str]] = {"healthz": Counter(), "livez": Counter()}
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._request_latency: dict[tuple[str, str], Histogram] = {}
        self._conntrack_sync = _histograms_by_family()
        self._deleted_flows = dict.fromkeys(FAMILIES, 0)
        self._failures = 0
        self._comparisons = 0
        self._drift = 0

    # ---- recording -------------------------------------------------------------------------

    def record_queued(self) -> None:
        """An event of a Service or an EndpointSlice was queued."""
        with self._lock:
            self._last_queued = dict.fromkeys(FAMILIES, self._now())
            self._queued_events += 1

    def record_changes(self, services: int, endpoints: int) -> None:
        """The agent's thread dequeued this many events; they are pending until record_settled()."""
        with self._lock:
            self._queued_events = max(0, self._queued_events - services - endpoints)
            for kind, count in (("service", services), ("endpoint", endpoints)):
                self._changes[kind] += count
                self._pending_changes[kind] += count

    def record_settled(self) -> None:
        """All dequeued changes are settled: programmed, or without effect on a family. If no
        further event is queued, both families are up to date with the last queued change, as of
        now.
        """
        with self._lock:
            self._pending_changes = dict.fromkeys(self._pending_changes, 0)
            for ip_family, last_synced in self._last_synced.items():
                if not self._queued_events and 0.0 < last_synced < self._last_queued[ip_family]:
                    self._last_synced[ip_family] = self._now()

    def record_sync(self, seconds: float, full: bool, families: Collection[int] = BOTH_FAMILIES) -> None:
        """The data plane was written in `seconds`; `full`: all of it was compared."""
        with self._lock:
            for ip_family in families:
                self._sync[ip_family].observe(seconds)
                (self._full if full else self._partial)[ip_family].observe(seconds)
                self._last_synced[ip_family] = self._now()
            self._pending_changes = dict.fromkeys(self._pending_changes, 0)

    def record_udp_cut(self, cut: UdpCuts) -> None:
        """Flows of UDP backends that are no longer in use were searched for and deleted."""
        with self._lock:
            for ip_family, flows in cut.flows.items():
                self._conntrack_sync[ip_family].observe(cut.seconds)
                self._deleted_flows[ip_family] += flows

    def record_failure(self) -> None:
        """Writing the data plane failed."""
        with self._lock:
            self._failures += 1

    def record_comparison(self, repaired: int) -> None:
        """The programmed state was compared with the desired state, and `repaired` entries that
        another process had changed were restored.
        """
        with self._lock:
            self._comparisons += 1
            self._drift += repaired

    def record_programming(self, ip_family: int, trigger_time: float) -> None:
        """A change to an EndpointSlice, made at `trigger_time` (seconds since the epoch), is
        programmed.
        """
        with self._lock:
            self._programming[ip_family].observe(max(0.0, self._now() - trigger_time))

    def record_event_to_map(self, latencies: Sequence[float]) -> None:
        """Events are in force; `latencies` are the seconds since each of them arrived."""
        with self._lock:
            for seconds in latencies:
                self._event_to_map.observe(seconds)

    def set_no_local_endpoints(self, policy: str, ip_family: int, count: int) -> None:
        """Sets the number of Service ports with policy Local whose endpoints are all on other
        nodes.
        """
        with self._lock:
            self._no_local[policy, ip_family] = count

    def record_probe(self, path: str, status: int) -> None:
        """A request for /healthz or /livez was answered."""
        with self._lock:
            self._probe_counts[path][str(status)] += 1

    def record_api_request(self, host: str, method: str, code: str, seconds: float) -> None:
        """A request to the API server ended. `code` is the HTTP status, or "<error>" without a
        response.
        """
        with self._lock:
            self._requests[code, host, method] += 1
            if code != "<error>":
                key = (host, method)
                if key not in self._request_latency:
                    self._request_latency[key] = Histogram(REQUEST_BUCKETS)
                self._request_latency[key].observe(seconds)

    def format_lines(self) -> list[str]:
        """Formats all of it for /metrics."""
        with self._lock:
            return list(format_metrics(METRICS, self))


D = TypeVar("D", float, Histogram)


def _by_family(values: Mapping[int, D]) -> Iterator[tuple[tuple[str], D]]:
    return (((FAMILIES[ip_family],), value) for ip_family, value in values.items())


def _known(times: Mapping[int, float]) -> Iterator[tuple[tuple[str], float]]:
    return _by_family({ip_family: timestamp for ip_family, timestamp in times.items() if timestamp})


def _by_code(counts: Mapping[str, int]) -> Iterator[tuple[tuple[str], int]]:
    return (((code,), count) for code, count in sorted(counts.items()))


SYNC: Final = "kubeproxy_sync_proxy_rules"
FAMILY: Final = ("ip_family",)

# The private attributes are those of KubeProxyMetrics, of which this table is a part.
METRICS: Final[Sequence[Metric[KubeProxyMetrics]]] = (
    Metric(
        f"{SYNC}_duration_seconds",
        "histogram",
        "[ALPHA] SyncProxyRules latency in seconds",
        lambda m: _by_family(m._sync),
        FAMILY,
    ),
    Metric(
        "kubeproxy_sync_full_proxy_rules_duration_seconds",
        "histogram",
        "[ALPHA] SyncProxyRules latency in seconds for full resyncs",
        lambda m: _by_family(m._full),
        FAMILY,
    ),
    Metric(
        "kubeproxy_sync_partial_proxy_rules_duration_seconds",
        "histogram",
        "[ALPHA] SyncProxyRules latency in seconds for partial resyncs",
        lambda m: _by_family(m._partial),
        FAMILY,
    ),
    Metric(
        "kubeproxy_network_programming_duration_seconds",
        "histogram",
        "[ALPHA] In Cluster Network Programming Latency in seconds",
        lambda m: _by_family(m._programming),
        FAMILY,
    ),
    Metric(
        f"{SYNC}_last_timestamp_seconds",
        "gauge",
        "[ALPHA] The last time proxy rules were successfully synced",
        lambda m: _known(m._last_synced),
        FAMILY,
    ),
    Metric(
        f"{SYNC}_last_queued_timestamp_seconds",
        "gauge",
        "[ALPHA] The last time a sync of proxy rules was queued",
        lambda m: _known(m._last_queued),
        FAMILY,
    ),
    Metric(
        f"{SYNC}_endpoint_changes_pending",
        "gauge",
        "[ALPHA] Pending proxy rules Endpoint changes",
        lambda m: m._pending_changes["endpoint"],
    ),
    Metric(
        f"{SYNC}_endpoint_changes_total",
        "counter",
        "[ALPHA] Cumulative proxy rules Endpoint changes",
        lambda m: m._changes["endpoint"],
    ),
    Metric(
        f"{SYNC}_service_changes_pending",
        "gauge",
        "[ALPHA] Pending proxy rules Service changes",
        lambda m: m._pending_changes["service"],
    ),
    Metric(
        f"{SYNC}_service_changes_total",
        "counter",
        "[ALPHA] Cumulative proxy rules Service changes",
        lambda m: m._changes["service"],
    ),
    Metric(
        f"{SYNC}_no_local_endpoints_total",
        "gauge",
        "[ALPHA] Number of services with a Local traffic policy and no endpoints",
        lambda m: (((FAMILIES[f], policy), n) for (policy, f), n in m._no_local.items()),
        ("ip_family", "traffic_policy"),
    ),
    Metric(
        "kubeproxy_conntrack_reconciler_sync_duration_seconds",
        "histogram",
        "[ALPHA] ReconcileConntrackFlowsLatency latency in seconds",
        lambda m: _by_family(m._conntrack_sync),
        FAMILY,
    ),
    Metric(
        "kubeproxy_conntrack_reconciler_deleted_entries_total",
        "counter",
        "[ALPHA] Cumulative conntrack flows deleted by conntrack reconciler",
        lambda m: _by_family(m._deleted_flows),
        FAMILY,
    ),
    Metric(
        "kubeproxy_proxy_healthz_total",
        "counter",
        "[ALPHA] Cumulative proxy healthz HTTP status",
        lambda m: _by_code(m._probe_counts["healthz"]),
        ("code",),
    ),
    Metric(
        "kubeproxy_proxy_livez_total",
        "counter",
        "[ALPHA] Cumulative proxy livez HTTP status",
        lambda m: _by_code(m._probe_counts["livez"]),
        ("code",),
    ),
    Metric(
        "rest_client_requests_total",
        "counter",
        "[ALPHA] Number of HTTP requests, partitioned by status code, method, and host.",
        lambda m: sorted(m._requests.items()),
        ("code", "host", "method"),
    ),
    Metric(
        "rest_client_request_duration_seconds",
        "histogram",
        "[ALPHA] Request latency in seconds. Broken down by verb, and host.",
        lambda m: ((key, m._request_latency[key]) for key in sorted(m._request_latency)),
        ("host", "verb"),
    ),
    Metric(
        "kbpf_event_to_map_duration_seconds",
        "histogram",
        "From an event's arrival until it is programmed",
        lambda m: m._event_to_map,
    ),
    Metric(
        "kbpf_sync_failures_total",
        "counter",
        "Passes that failed; the state programmed before stays in use",
        lambda m: m._failures,
    ),
    Metric(
        "kbpf_comparisons_total",
        "counter",
        "Comparisons of the programmed with the desired state",
        lambda m: m._comparisons,
    ),
    Metric(
        "kbpf_drift_entries_total",
        "counter",
        "Entries changed by other processes that a comparison found and repaired",
        lambda m: m._drift,
    ),
)
