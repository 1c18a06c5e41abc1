# SPDX-License-Identifier: Apache-2.0
"""Decides whether the agent keeps up and whether the node should get traffic: /healthz, /livez,
/readyz and the health checks of Services.

The rules and bodies are kube-proxy's (1.37, healthcheck/proxy_health.go, service_health.go):

- The agent is healthy unless a change has waited for `late_seconds` to be programmed. Before the
  first complete pass it is healthy, too.
- /livez fails if the agent is not healthy or one of its threads is down or stuck: such an agent
  should be restarted. /healthz fails if the agent is not healthy or the node is not eligible:
  being deleted, or marked for deletion by the cluster autoscaler.
- /readyz exists only in kbpf. It succeeds once everything has been programmed, while the agent
  keeps up, the data plane reports no fault and every Service of the system namespaces is
  programmed. Its text begins with `kbpf`, by which kbpf distinguishes its agents from a kube-proxy.
- A Service's health check succeeds if this node has ready endpoints for it and the agent is
  healthy.
"""

import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kbpf.errors import escape_unprintable
from kbpf.model.address import Addr, format_addr
from kbpf.model.objects import ServiceName
from kbpf.model.status import AgentStatus
from kbpf.policy.health_check import HealthCheck
from kbpf.serve.events import EventObject, EventRecorder
from kbpf.serve.http import LISTEN_RETRY_INTERVAL_S, WILDCARDS, HttpListener, HttpServer
from kbpf.serve.message import JSON, HttpRequest, HttpResponse

log = logging.getLogger("kbpf.serve")

FAMILIES: Final = ("IPv4", "IPv6")
OPTIONAL_SOURCE: Final = "pods"
"""A source that may be missing: Services are served without it."""
MAX_NAMED_SERVICES: Final = 3
"""At most this many Services that could not be programmed are named by /readyz."""
GO_ZERO_TIME: Final = "0001-01-01T00:00:00Z"
"""The zero value of time.Time, as Go formats it."""


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """The health of the agent. Times are ns since the epoch; `last_updated` is None before the
    first complete pass.
    """

    healthy: bool
    last_updated: int | None
    now: int


class HealthTracker:
    """Tracks how long changes have been waiting to be programmed. Thread-safe.

    A change is recorded as queued, then as dequeued by the agent's thread, then as settled when it
    has been programmed or turned out to need no programming. A change that is queued in between
    keeps its own time.
    """

    def __init__(
        self,
        late_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self._late_after, self._clock, self._now = late_seconds, clock, now
        self._lock = threading.Lock()
        self._oldest_queued: float | None = None  # arrival of the oldest change not yet dequeued
        self._oldest_unsettled: float | None = None
        self._last_updated: int | None = None

    def record_queued(self) -> None:
        """Records that an event arrived which may need programming."""
        if self._oldest_queued is None:
            with self._lock:
                self._oldest_queued = self._clock() if self._oldest_queued is None else self._oldest_queued

    def record_dequeued(self) -> None:
        """Records that the queue will be emptied. Call it before reading the queue, so that an
        event that arrives in between is not settled with the earlier ones.
        """
        with self._lock:
            if self._oldest_unsettled is None:
                self._oldest_unsettled = self._oldest_queued
            self._oldest_queued = None

    def set_oldest(self, since: float) -> None:
        """Sets the time (time.monotonic) since which the oldest dequeued change has waited."""
        with self._lock:
            self._oldest_unsettled = since

    def record_settled(self, programmed: bool) -> None:
        """Records that all dequeued changes are settled; `programmed`: the data plane was just
        written.
        """
        with self._lock:
            self._oldest_unsettled = None
            if programmed:
                self._last_updated = self._now()

    def verdict(self) -> HealthVerdict:
        with self._lock:
            since = self._oldest_queued if self._oldest_unsettled is None else self._oldest_unsettled
            is_late = since is not None and self._clock() - since >= self._late_after
            return HealthVerdict(not is_late or self._last_updated is None, self._last_updated, self._now())


def healthz(verdict: HealthVerdict, eligible: bool) -> HttpResponse:
    """Returns the response to /healthz."""
    return _respond(verdict, verdict.healthy and eligible, {"nodeEligible": eligible})


def livez(verdict: HealthVerdict, threads: Sequence[str]) -> HttpResponse:
    """Returns the response to /livez. `threads` has a line for each one that is down or stuck."""
    extra = {"threads": list(threads)} if threads else {}
    return _respond(verdict, verdict.healthy and not threads, extra)


def readyz(verdict: HealthVerdict, status: AgentStatus | None) -> HttpResponse:
    """Returns the response to /readyz, one line. `status` is None until the agent reports one."""
    reason = _not_ready_reason(verdict, status)
    if reason:
        return HttpResponse(503, f"kbpf is not ready: {escape_unprintable(reason)}\n".encode())
    error = status.config_error if status is not None else ""
    config_note = f", but its configuration file was rejected: {escape_unprintable(error)}" if error else ""
    return HttpResponse(200, f"kbpf serves{config_note}\n".encode())


def _not_ready_reason(verdict: HealthVerdict, status: AgentStatus | None) -> str:
    if status is None:
        return "the data plane is being opened"
    if not status.synced:
        unsynced = [source for source in status.sources if not source.synced and source.name != OPTIONAL_SOURCE]
        if status.error:
            return f"not programmed: {status.error}"
        if unsynced:
            first = next((source for source in unsynced if source.error), unsynced[0])
            return f"{first.name} not listed yet" + (first.error and f": {first.error}")
        return "the first pass is not complete"
    late_reason = "changes are waiting to be programmed" + (status.error and f": {status.error}")
    fault = next(iter(status.faults), "" if verdict.healthy else late_reason)
    return fault or _not_programmed(status.refused_system)


def _not_programmed(services: Sequence[str]) -> str:
    if not services:
        return ""
    more = f" and {len(services) - MAX_NAMED_SERVICES} more" if len(services) > MAX_NAMED_SERVICES else ""
    names = ", ".join(services[:MAX_NAMED_SERVICES]) + more
    return f"not programmed: {names}; see `kbpf inspect status`"


def _respond(verdict: HealthVerdict, succeeded: bool, extra: Mapping[str, object]) -> HttpResponse:
    last_updated = format_go_time(verdict.last_updated)
    body: dict[str, object] = {
        # kube-proxy's older releases reported the current time here if all was well
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
    """Formats ns since the epoch as Go does in JSON: RFC 3339 without trailing zeros."""
    if time_ns is None:
        return GO_ZERO_TIME
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    fraction = f".{nanoseconds:09d}".rstrip("0") if nanoseconds else ""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + fraction + "Z"


def service_health_response(name: ServiceName, endpoints: int, healthy: bool) -> HttpResponse:
    """Returns the response of a Service's healthCheckNodePort. `endpoints`: ready ones on this
    node.
    """
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


@dataclass(slots=True)
class _CheckListener:
    """The health check of one Service, and the ports that are open for it. `addresses`: see
    AgentServer.set_health_checks(). `error`: why its port could not be opened, or "".
    """

    health_check: HealthCheck
    addresses: tuple[Addr, ...] | None
    ports: list[HttpListener] = field(default_factory=list)
    error: str = ""


class ServiceCheckPorts:
    """Opens, closes and answers the health check ports of Services with `externalTrafficPolicy:
    Local`. A port that cannot be bound is reported as an Event of its Service and retried. Used by
    the HTTP thread only.
    """

    def __init__(self, http: HttpServer, tracker: HealthTracker, events: EventRecorder, node_name: str) -> None:
        self._http, self._tracker, self._events = http, tracker, events
        self._node_name = node_name
        self._listeners: dict[ServiceName, _CheckListener] = {}

    @property
    def count(self) -> int:
        return len(self._listeners)

    @property
    def failed_count(self) -> int:
        return sum(bool(listener.error) for listener in self._listeners.values())

    def sync(self, checks: Mapping[ServiceName, HealthCheck], addresses: tuple[Addr, ...] | None) -> None:
        """See AgentServer.set_health_checks()."""
        for name, listener in list(self._listeners.items()):
            new_check = checks.get(name)
            if new_check is None or new_check.port != listener.health_check.port or listener.addresses != addresses:
                self._close(self._listeners.pop(name))
        for name, health_check in checks.items():
            if name in self._listeners:
                self._listeners[name].health_check = health_check
            else:
                self._listeners[name] = _CheckListener(health_check, addresses)
                self._open(name, self._listeners[name])

    def _close(self, listener: _CheckListener) -> None:
        for port in listener.ports:
            self._http.close(port)
        listener.ports = []

    def _open(self, name: ServiceName, listener: _CheckListener) -> None:
        if self._listeners.get(name) is not listener:
            return  # the check was removed or changed its port in the meantime
        try:
            self._open_on_addresses(name, listener)
        except OSError as error:
            self._close(listener)
            problem = (
                f"node {self._node_name} failed to start healthcheck "
                f'"{name}" on port {listener.health_check.port}: {error.strerror}'
            )
            if not listener.error:
                log.error("%s; retrying every %d s", problem, LISTEN_RETRY_INTERVAL_S)
            listener.error = problem
            regarding = EventObject("Service", name.name, name.namespace)
            self._events.emit(regarding, "FailedToStartServiceHealthcheck", "Listen", problem)
            self._http.call_later(LISTEN_RETRY_INTERVAL_S, lambda: self._open(name, listener))
        else:
            listener.error = ""

    def _open_on_addresses(self, name: ServiceName, listener: _CheckListener) -> None:
        """Listens on the NodePort addresses. If the node has none of one family, listens on all
        addresses of that family.
        """
        node_hosts = [format_addr(address) for address in listener.addresses or ()]
        for wildcard in WILDCARDS:
            hosts = [host for host in node_hosts if (":" in host) is (":" in wildcard)]
            results = [self._open_on_host(name, listener, host) for host in hosts]
            if not any(results):
                self._open_on_host(name, listener, wildcard)

    def _open_on_host(self, name: ServiceName, listener: _CheckListener, host: str) -> bool:
        """Returns whether the address belongs to this node."""
        v6 = ":" in host

        def respond(_: HttpRequest) -> HttpResponse:
            health_check = listener.health_check
            healthy = self._tracker.verdict().healthy
            return service_health_response(name, health_check.v6 if v6 else health_check.v4, healthy)

        try:
            port = self._http.listen(host, listener.health_check.port, respond, one_family=True)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or (host == "::" and not _has_ipv6()):
                return False
            raise
        listener.ports.append(port)
        return True


def _has_ipv6() -> bool:
    try:
        with open("/proc/net/if_inet6"):
            return True
    except OSError:
        return False
