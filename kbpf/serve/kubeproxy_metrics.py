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
from collections.abc import Callable, Collection, Iterator
from typing import Final

from kbpf.model.metrics import UdpCuts
from kbpf.serve.exposition import Histogram, format_histograms, format_labels, format_metric

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
        self._last_synced = dict.fromkeys(FAMILIES, 0.0)
        self._last_queued = dict.fromkeys(FAMILIES, 0.0)
        self._queued_events = 0
        self._changes = {"service": 0, "endpoint": 0}
        self._pending_changes = {"service": 0, "endpoint": 0}
        self._no_local = {
            (policy, ip_family): 0
            for policy in ("external", "internal")
            for ip_family in BOTH_FAMILIES
        }
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

    def record_sync(
        self, seconds: float, full: bool, families: Collection[int] = BOTH_FAMILIES
    ) -> None:
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

    # ---- reading ---------------------------------------------------------------------------

    def format_lines(self) -> list[str]:
        """Formats all of it for /metrics."""
        with self._lock:
            return [
                *self._format_sync(),
                *self._format_conntrack(),
                *self._format_probes(),
                *self._format_api_requests(),
                *self._format_kbpf(),
            ]

    def _format_sync(self) -> Iterator[str]:
        prefix = "kubeproxy_sync_proxy_rules"
        for name, text, histograms_by_family in (
            ("kubeproxy_sync_proxy_rules", "SyncProxyRules latency in seconds", self._sync),
            ("kubeproxy_sync_full_proxy_rules",
             "SyncProxyRules latency in seconds for full resyncs", self._full),
            ("kubeproxy_sync_partial_proxy_rules",
             "SyncProxyRules latency in seconds for partial resyncs", self._partial),
        ):  # fmt: skip
            yield from format_histograms(
                f"{name}_duration_seconds",
                f"[ALPHA] {text}",
                (
                    (format_labels(ip_family=FAMILIES[f]), h)
                    for f, h in histograms_by_family.items()
                ),
            )
        yield from format_histograms(
            "kubeproxy_network_programming_duration_seconds",
            "[ALPHA] In Cluster Network Programming Latency in seconds",
            ((format_labels(ip_family=FAMILIES[f]), h) for f, h in self._programming.items()),
        )
        for name, text, times in (
            (
                "last_timestamp",
                "The last time proxy rules were successfully synced",
                self._last_synced,
            ),
            ("last_queued_timestamp", "The last time a sync of proxy rules was queued",
             self._last_queued),
        ):  # fmt: skip
            yield from format_metric(
                f"{prefix}_{name}_seconds",
                "gauge",
                f"[ALPHA] {text}",
                (
                    (format_labels(ip_family=FAMILIES[f]), timestamp)
                    for f, timestamp in times.items()
                    if timestamp
                ),
            )
        for kind in ("endpoint", "service"):
            kind_title = kind.capitalize()
            yield from format_metric(
                f"{prefix}_{kind}_changes_pending",
                "gauge",
                f"[ALPHA] Pending proxy rules {kind_title} changes",
                [("", self._pending_changes[kind])],
            )
            yield from format_metric(
                f"{prefix}_{kind}_changes_total", "counter",
                f"[ALPHA] Cumulative proxy rules {kind_title} changes", [("", self._changes[kind])],
            )  # fmt: skip
        yield from format_metric(
            f"{prefix}_no_local_endpoints_total", "gauge",
            "[ALPHA] Number of services with a Local traffic policy and no endpoints",
            ((format_labels(ip_family=FAMILIES[f], traffic_policy=policy), count)
             for (policy, f), count in self._no_local.items()),
        )  # fmt: skip

    def _format_conntrack(self) -> Iterator[str]:
        prefix = "kubeproxy_conntrack_reconciler"
        yield from format_histograms(
            f"{prefix}_sync_duration_seconds",
            "[ALPHA] ReconcileConntrackFlowsLatency latency in seconds",
            ((format_labels(ip_family=FAMILIES[f]), h) for f, h in self._conntrack_sync.items()),
        )
        yield from format_metric(
            f"{prefix}_deleted_entries_total",
            "counter",
            "[ALPHA] Cumulative conntrack flows deleted by conntrack reconciler",
            (
                (format_labels(ip_family=FAMILIES[f]), count)
                for f, count in self._deleted_flows.items()
            ),
        )

    def _format_probes(self) -> Iterator[str]:
        for path, codes in self._probe_counts.items():
            yield from format_metric(
                f"kubeproxy_proxy_{path}_total", "counter",
                f"[ALPHA] Cumulative proxy {path} HTTP status",
                ((format_labels(code=code), count) for code, count in sorted(codes.items())),
            )  # fmt: skip

    def _format_api_requests(self) -> Iterator[str]:
        yield from format_metric(
            "rest_client_requests_total", "counter",
            "[ALPHA] Number of HTTP requests, partitioned by status code, method, and host.",
            ((format_labels(code=code, host=host, method=method), count)
             for (code, host, method), count in sorted(self._requests.items())),
        )  # fmt: skip
        yield from format_histograms(
            "rest_client_request_duration_seconds",
            "[ALPHA] Request latency in seconds. Broken down by verb, and host.",
            (
                (format_labels(host=host, verb=verb), h)
                for (host, verb), h in sorted(self._request_latency.items())
            ),
        )

    def _format_kbpf(self) -> Iterator[str]:
        yield from format_metric(
            "kbpf_sync_failures_total", "counter",
            "Passes that failed; the state programmed before stays in use",
            [("", self._failures)],
        )  # fmt: skip
        yield from format_metric(
            "kbpf_comparisons_total", "counter",
            "Comparisons of the programmed with the desired state",
            [("", self._comparisons)],
        )  # fmt: skip
        yield from format_metric(
            "kbpf_drift_entries_total", "counter",
            "Entries changed by other processes that a comparison found and repaired",
            [("", self._drift)],
        )  # fmt: skip
