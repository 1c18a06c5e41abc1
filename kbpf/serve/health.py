"""Whether the agent keeps up, and whether the node should get traffic: /healthz, /livez and the
health checks of Services.

kube-proxy's rules and bodies (1.37, healthcheck/proxy_health.go, service_health.go):
- The agent is healthy unless a change has waited for `late` seconds to be programmed. Before the
  first complete pass it is healthy too.
- /livez says that, and whether a thread of the agent is down or stuck: such an agent is better
  started again. /healthz says that and whether the node is eligible: not being deleted, and not
  about to be by the cluster autoscaler.
- /readyz is ours, kube-proxy has none: whether the agent has programmed everything once, keeps up
  since, and has room for the Services of system namespaces. Its text begins with kbpf's name, by
  which we tell ourselves from a kube-proxy.
- A Service's health check says whether this node has ready endpoints of it, and the former.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kbpf.errors import escape_unprintable
from kbpf.model.objects import ServiceName
from kbpf.model.status import AgentStatus
from kbpf.serve.message import JSON, HttpResponse

FAMILIES: Final = ("IPv4", "IPv6")
OPTIONAL_SOURCE: Final = "pods"
"""The watch without which Services are served all the same."""
MAX_NAMED_SERVICES: Final = 3
"""Services that could not be programmed, in the answer of /readyz."""
GO_ZERO_TIME: Final = "0001-01-01T00:00:00Z"
"""Go's zero time."""


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """How the agent is doing. Times are ns since the epoch; `updated` is None before the first
    complete pass.
    """

    healthy: bool
    last_updated: int | None
    now: int


class HealthTracker:
    """What is waiting to be programmed, and since when. Any thread may call.

    A change is queued(), then taken() by the writer, and settled() when it is programmed or turned
    out to say nothing. What comes in between is counted from its own time.
    """

    def __init__(
        self,
        late_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self._late_after, self._clock, self._now = late_seconds, clock, now
        self._lock = threading.Lock()
        self._oldest_queued: float | None = None  # since when, what nobody has taken
        self._oldest_unsettled: float | None = None
        self._last_updated: int | None = None

    def record_queued(self) -> None:
        """Something came that may have to be programmed."""
        if self._oldest_queued is None:
            with self._lock:
                self._oldest_queued = (
                    self._clock() if self._oldest_queued is None else self._oldest_queued
                )

    def record_dequeued(self) -> None:
        """Everything that was queued is in the writer's hands. To be called before it is taken, so
        that nothing that comes meanwhile counts as done with it.
        """
        with self._lock:
            if self._oldest_unsettled is None:
                self._oldest_unsettled = self._oldest_queued
            self._oldest_queued = None

    def set_oldest(self, since: float) -> None:
        """Of all that was taken, what waits longest has waited since then (time.monotonic)."""
        with self._lock:
            self._oldest_unsettled = since

    def record_settled(self, programmed: bool) -> None:
        """All that was taken is done with; `programmed`: the data plane was written just now."""
        with self._lock:
            self._oldest_unsettled = None
            if programmed:
                self._last_updated = self._now()

    def verdict(self) -> HealthVerdict:
        """How it is now."""
        with self._lock:
            since = (
                self._oldest_queued if self._oldest_unsettled is None else self._oldest_unsettled
            )
            is_late = since is not None and self._clock() - since >= self._late_after
            return HealthVerdict(
                not is_late or self._last_updated is None, self._last_updated, self._now()
            )


def healthz(verdict: HealthVerdict, eligible: bool) -> HttpResponse:
    """The answer of /healthz."""
    return _respond(verdict, verdict.healthy and eligible, {"nodeEligible": eligible})


def livez(verdict: HealthVerdict, threads: Sequence[str] = ()) -> HttpResponse:
    """The answer of /livez. `threads`: those that are down or stuck, a line each."""
    extra = {"threads": list(threads)} if threads else {}
    return _respond(verdict, verdict.healthy and not threads, extra)


def readyz(verdict: HealthVerdict, status: AgentStatus | None) -> HttpResponse:
    """The answer of /readyz, one line. `status` None: nothing is known of the agent yet."""
    reason = _not_ready_reason(verdict, status)
    if reason:
        return HttpResponse(503, f"kbpf does not serve: {escape_unprintable(reason)}\n".encode())
    error = status.config_error if status is not None else ""
    config_note = (
        f", but its configuration file is refused: {escape_unprintable(error)}" if error else ""
    )
    return HttpResponse(200, f"kbpf serves{config_note}\n".encode())


def _not_ready_reason(verdict: HealthVerdict, status: AgentStatus | None) -> str:
    if status is None:
        return "the data plane is being opened"
    if not status.synced:
        unsynced = [
            source
            for source in status.sources
            if not source.synced and source.name != OPTIONAL_SOURCE
        ]
        if status.error:
            return f"not programmed: {status.error}"
        if unsynced:
            first = next((source for source in unsynced if source.error), unsynced[0])
            return f"no list of {first.name} yet" + (first.error and f": {first.error}")
        return "its first pass is not done"
    late_reason = "changes wait to be programmed" + (status.error and f": {status.error}")
    fault = next(iter(status.faults), "" if verdict.healthy else late_reason)
    return fault or _not_programmed(status.refused_system)


def _not_programmed(services: Sequence[str]) -> str:
    if not services:
        return ""
    more = (
        f" and {len(services) - MAX_NAMED_SERVICES} more"
        if len(services) > MAX_NAMED_SERVICES
        else ""
    )
    names = ", ".join(services[:MAX_NAMED_SERVICES]) + more
    return f"not programmed: {names}; `kbpf inspect status` says why"


def _respond(verdict: HealthVerdict, succeeded: bool, extra: Mapping[str, object]) -> HttpResponse:
    last_updated = format_go_time(verdict.last_updated)
    body: dict[str, object] = {
        # As old versions said it: recent, if all is well.
        "lastUpdated": format_go_time(verdict.now) if succeeded else last_updated,
        "currentTime": format_go_time(verdict.now),
        **extra,
        "healthy": verdict.healthy,
    }
    if verdict.last_updated is not None:
        family_status = {"lastUpdated": last_updated, "healthy": verdict.healthy}
        body["status"] = dict.fromkeys(FAMILIES, family_status)
    text = json.dumps(body, separators=(",", ":"))
    return HttpResponse(200 if succeeded else 503, text.encode(), JSON)


def format_go_time(time_ns: int | None) -> str:
    """ns since the epoch as Go writes a time in JSON: RFC 3339, no zeros at the end."""
    if time_ns is None:
        return GO_ZERO_TIME
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    fraction = f".{nanoseconds:09d}".rstrip("0") if nanoseconds else ""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + fraction + "Z"


def service_health_response(name: ServiceName, endpoints: int, healthy: bool) -> HttpResponse:
    """The answer of a Service's healthCheckNodePort. `endpoints`: those on this node."""
    body = (
        "{\n"
        '\t"service": {\n'
        f'\t\t"namespace": {json.dumps(name.namespace)},\n'
        f'\t\t"name": {json.dumps(name.name)}\n'
        "\t},\n"
        f'\t"localEndpoints": {endpoints},\n'
        f'\t"serviceProxyHealthy": {str(healthy).lower()}\n'
        "}"
    )
    weight = (("X-Load-Balancing-Endpoint-Weight", str(endpoints)),)
    return HttpResponse(200 if endpoints and healthy else 503, body.encode(), JSON, weight)
