"""kube-proxy's own series, under its names and with its buckets, so that dashboards go on working.

Those are here that do not depend on a mode (kube-proxy 1.37, metrics/metrics.go), and those of its
conntrack reconciler, which every mode has; what belongs to iptables or nftables is not exported.
Beside them the requests to the API server, as
client-go counts them. The agent's threads record, the HTTP thread reads; one lock for all.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Final

from kbpf.model.metrics import Ended
from kbpf.serve.exposition import Histogram, family, histograms, labels

FAMILIES: Final = {4: "IPv4", 6: "IPv6"}
BOTH: Final = tuple(FAMILIES)
SYNC_BUCKETS: Final = tuple(0.001 * 2**n for n in range(15))
PROGRAMMING_BUCKETS: Final = (
    0.0,  # a slip of theirs, and so a bucket of every dashboard
    0.25,
    0.5,
    *range(1, 60),
    *range(60, 120, 5),
    *range(120, 301, 30),
)
REQUEST_BUCKETS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)


def _by_family() -> dict[int, Histogram]:
    return {each: Histogram(SYNC_BUCKETS) for each in FAMILIES}


class Record:
    """What has happened since the agent began."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._sync, self._full, self._partial = _by_family(), _by_family(), _by_family()
        self._programming = {each: Histogram(PROGRAMMING_BUCKETS) for each in FAMILIES}
        self._last = dict.fromkeys(FAMILIES, 0.0)
        self._queued = dict.fromkeys(FAMILIES, 0.0)
        self._coming = 0
        self._changes = {"service": 0, "endpoint": 0}
        self._waiting = {"service": 0, "endpoint": 0}
        self._no_local = {(policy, each): 0 for policy in ("external", "internal") for each in BOTH}
        self._asked: dict[str, Counter[str]] = {"healthz": Counter(), "livez": Counter()}
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._latency: dict[tuple[str, str], Histogram] = {}
        self._reconciled = _by_family()
        self._ended = dict.fromkeys(FAMILIES, 0)
        self._failures = 0
        self._comparisons = 0
        self._drift = 0

    # ---- what the agent says ---------------------------------------------------------------

    def queued(self) -> None:
        """An event of a Service or an EndpointSlice came, for the writer to take: any thread."""
        with self._lock:
            self._queued = dict.fromkeys(FAMILIES, self._now())
            self._coming += 1

    def changes(self, services: int, endpoints: int) -> None:
        """The writer took so many events; they wait until synced()."""
        with self._lock:
            self._coming = max(0, self._coming - services - endpoints)
            for kind, count in (("service", services), ("endpoint", endpoints)):
                self._changes[kind] += count
                self._waiting[kind] += count

    def settled(self) -> None:
        """All that the writer took is done with: programmed, or it said nothing new to a family.
        Unless more has come meanwhile, both families are as was asked for last, as of now.
        """
        with self._lock:
            self._waiting = dict.fromkeys(self._waiting, 0)
            for each, last in self._last.items():
                if not self._coming and 0.0 < last < self._queued[each]:
                    self._last[each] = self._now()

    def synced(self, seconds: float, full: bool, families: Collection[int] = BOTH) -> None:
        """The data plane was written, in so many seconds; `full`: all of it was looked at."""
        with self._lock:
            for each in families:
                self._sync[each].observe(seconds)
                (self._full if full else self._partial)[each].observe(seconds)
                self._last[each] = self._now()
            self._waiting = dict.fromkeys(self._waiting, 0)

    def ended(self, look: Ended) -> None:
        """UDP of backends that serve no more was looked for."""
        with self._lock:
            for each, flows in look.flows.items():
                self._reconciled[each].observe(look.seconds)
                self._ended[each] += flows

    def failed(self) -> None:
        """The data plane could not be written."""
        with self._lock:
            self._failures += 1

    def compared(self, repaired: int) -> None:
        """All that is programmed was compared with what it should be, and so many entries that
        others had changed were put right.
        """
        with self._lock:
            self._comparisons += 1
            self._drift += repaired

    def programmed(self, family: int, triggered: float) -> None:
        """An EndpointSlice's change of that time (seconds since the epoch) is in force now."""
        with self._lock:
            self._programming[family].observe(max(0.0, self._now() - triggered))

    def no_local_endpoints(self, policy: str, family: int, count: int) -> None:
        """So many Service ports have policy Local, and endpoints only elsewhere."""
        with self._lock:
            self._no_local[policy, family] = count

    def answered(self, path: str, status: int) -> None:
        """/healthz or /livez was asked for."""
        with self._lock:
            self._asked[path][str(status)] += 1

    def requested(self, host: str, method: str, code: str, seconds: float) -> None:
        """The API server was asked something. `code`: the status, or <error> when none came."""
        with self._lock:
            self._requests[code, host, method] += 1
            if code != "<error>":
                key = (host, method)
                if key not in self._latency:
                    self._latency[key] = Histogram(REQUEST_BUCKETS)
                self._latency[key].observe(seconds)

    # ---- what is read ----------------------------------------------------------------------

    def lines(self) -> list[str]:
        """All of it, as exposition."""
        with self._lock:
            return [*self._rules(), *self._conntrack(), *self._health(), *self._api(), *self._own()]

    def _rules(self) -> Iterator[str]:
        prefix = "kubeproxy_sync_proxy_rules"
        for name, text, found in (
            ("kubeproxy_sync_proxy_rules", "SyncProxyRules latency in seconds", self._sync),
            ("kubeproxy_sync_full_proxy_rules",
             "SyncProxyRules latency in seconds for full resyncs", self._full),
            ("kubeproxy_sync_partial_proxy_rules",
             "SyncProxyRules latency in seconds for partial resyncs", self._partial),
        ):  # fmt: skip
            yield from histograms(
                f"{name}_duration_seconds", f"[ALPHA] {text}",
                ((labels(ip_family=FAMILIES[f]), h) for f, h in found.items()),
            )  # fmt: skip
        yield from histograms(
            "kubeproxy_network_programming_duration_seconds",
            "[ALPHA] In Cluster Network Programming Latency in seconds",
            ((labels(ip_family=FAMILIES[f]), h) for f, h in self._programming.items()),
        )
        for name, text, times in (
            ("last_timestamp", "The last time proxy rules were successfully synced", self._last),
            ("last_queued_timestamp", "The last time a sync of proxy rules was queued",
             self._queued),
        ):  # fmt: skip
            yield from family(
                f"{prefix}_{name}_seconds", "gauge", f"[ALPHA] {text}",
                ((labels(ip_family=FAMILIES[f]), at) for f, at in times.items() if at),
            )  # fmt: skip
        for kind in ("endpoint", "service"):
            word = kind.capitalize()
            yield from family(
                f"{prefix}_{kind}_changes_pending", "gauge",
                f"[ALPHA] Pending proxy rules {word} changes", [("", self._waiting[kind])],
            )  # fmt: skip
            yield from family(
                f"{prefix}_{kind}_changes_total", "counter",
                f"[ALPHA] Cumulative proxy rules {word} changes", [("", self._changes[kind])],
            )  # fmt: skip
        yield from family(
            f"{prefix}_no_local_endpoints_total", "gauge",
            "[ALPHA] Number of services with a Local traffic policy and no endpoints",
            ((labels(ip_family=FAMILIES[f], traffic_policy=policy), count)
             for (policy, f), count in self._no_local.items()),
        )  # fmt: skip

    def _conntrack(self) -> Iterator[str]:
        prefix = "kubeproxy_conntrack_reconciler"
        yield from histograms(
            f"{prefix}_sync_duration_seconds",
            "[ALPHA] ReconcileConntrackFlowsLatency latency in seconds",
            ((labels(ip_family=FAMILIES[f]), h) for f, h in self._reconciled.items()),
        )
        yield from family(
            f"{prefix}_deleted_entries_total", "counter",
            "[ALPHA] Cumulative conntrack flows deleted by conntrack reconciler",
            ((labels(ip_family=FAMILIES[f]), count) for f, count in self._ended.items()),
        )  # fmt: skip

    def _health(self) -> Iterator[str]:
        for path, codes in self._asked.items():
            yield from family(
                f"kubeproxy_proxy_{path}_total", "counter",
                f"[ALPHA] Cumulative proxy {path} HTTP status",
                ((labels(code=code), count) for code, count in sorted(codes.items())),
            )  # fmt: skip

    def _api(self) -> Iterator[str]:
        yield from family(
            "rest_client_requests_total", "counter",
            "[ALPHA] Number of HTTP requests, partitioned by status code, method, and host.",
            ((labels(code=code, host=host, method=method), count)
             for (code, host, method), count in sorted(self._requests.items())),
        )  # fmt: skip
        yield from histograms(
            "rest_client_request_duration_seconds",
            "[ALPHA] Request latency in seconds. Broken down by verb, and host.",
            (
                (labels(host=host, verb=verb), h)
                for (host, verb), h in sorted(self._latency.items())
            ),
        )

    def _own(self) -> Iterator[str]:
        yield from family(
            "kbpf_sync_failures_total", "counter",
            "Passes that the kernel refused; what was serving goes on serving",
            [("", self._failures)],
        )  # fmt: skip
        yield from family(
            "kbpf_comparisons_total", "counter",
            "How often all that is programmed was compared with what it should be",
            [("", self._comparisons)],
        )  # fmt: skip
        yield from family(
            "kbpf_drift_entries_total", "counter",
            "Entries that others had changed, found by that and put right",
            [("", self._drift)],
        )  # fmt: skip
