# SPDX-License-Identifier: Apache-2.0
"""The health check ports of Services with `externalTrafficPolicy: Local`. Used by the HTTP thread
only.
"""

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from kbpf.model.address import Addr, format_addr
from kbpf.model.objects import ServiceName
from kbpf.policy.health_check import HealthCheck
from kbpf.serve import health
from kbpf.serve.events import EventObject, EventRecorder
from kbpf.serve.health import HealthTracker
from kbpf.serve.http import LISTEN_RETRY_INTERVAL_S, WILDCARDS, HttpListener, HttpServer
from kbpf.serve.message import HttpRequest, HttpResponse

log = logging.getLogger("kbpf.serve")


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
    """Opens, closes and answers the health check ports. A port that cannot be bound is reported as
    an Event of its Service and retried.
    """

    def __init__(
        self, http: HttpServer, tracker: HealthTracker, events: EventRecorder, node_name: str
    ) -> None:
        self._http, self._tracker, self._events = http, tracker, events
        self._node_name = node_name
        self._listeners: dict[ServiceName, _CheckListener] = {}

    @property
    def count(self) -> int:
        return len(self._listeners)

    @property
    def failed_count(self) -> int:
        return sum(bool(listener.error) for listener in self._listeners.values())

    def sync(
        self, checks: Mapping[ServiceName, HealthCheck], addresses: tuple[Addr, ...] | None
    ) -> None:
        """See AgentServer.set_health_checks()."""
        for name, listener in list(self._listeners.items()):
            new_check = checks.get(name)
            if (
                new_check is None
                or new_check.port != listener.health_check.port
                or listener.addresses != addresses
            ):
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


def _has_ipv6() -> bool:
    try:
        with open("/proc/net/if_inet6"):
            return True
    except OSError:
        return False
