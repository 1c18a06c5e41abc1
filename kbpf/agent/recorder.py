# SPDX-License-Identifier: Apache-2.0
"""Collects what metrics and health checks need. The cost depends only on what a change touches.

Nothing is published before it is programmed: a load balancer sends traffic as soon as a health
check succeeds.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Final

from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey, ServiceState
from kbpf.model.events import Delete, Event, Kind, Upsert
from kbpf.model.objects import EndpointSlice, ServiceName
from kbpf.policy.health_check import HealthCheck, compute_health_check
from kbpf.policy.store import ChangeSet, ObjectStore
from kbpf.serve.server import AgentServer

MAX_TRIGGERS: Final = 10_000
"""At most this many changes are timed while the kernel refuses writes."""

POLICIES: Final = ("internal", "external")


class Recorder:
    """Observes the way of each change through the agent: received, taken, computed, applied and
    settled. Used by the agent's thread only, except for received(). Each round of the agent calls
    taken() first and settled() last.
    """

    def __init__(self, config: Config, server: AgentServer) -> None:
        self._config, self._server = config, server
        self._start_time = time.time()
        self._triggers: list[tuple[int, float]] = []
        self._without_local: dict[str, set[ServicePortKey]] = {policy: set() for policy in POLICIES}
        self._empty_ports: set[ServicePortKey] = set()
        self._health_checks: dict[ServiceName, HealthCheck] = {}
        self._published_checks: tuple[object, ...] = ({}, None)
        self._touched = ChangeSet()
        self._applied_since_settled = False

    @property
    def without_endpoints(self) -> int:
        """Number of Service ports that refuse connections because they have no endpoints."""
        return len(self._empty_ports)

    def received(self, event: Event) -> None:
        """Records an event that a source puts into the inbox. Any thread may call."""
        if isinstance(event, Upsert | Delete):
            self._server.health.record_queued()
            if event.key.kind in (Kind.SERVICE, Kind.SLICE):
                self._server.proxy_metrics.record_queued()

    def taken(self, events: Iterable[Event], touched: ChangeSet) -> None:
        """Records the events that were read and the Services that they touched."""
        services = slices = 0
        for event in events:
            if not isinstance(event, Upsert | Delete):
                continue
            services += event.key.kind is Kind.SERVICE
            if event.key.kind is Kind.SLICE:
                slices += 1
                if isinstance(event, Upsert) and event.trigger_time:
                    self._record_trigger(event, touched)
        if services or slices:
            self._server.proxy_metrics.record_changes(services, slices)
        self._touched.services |= touched.services
        self._touched.all_services |= touched.all_services

    def _record_trigger(self, event: Upsert, touched: ChangeSet) -> None:
        assert isinstance(event.object, EndpointSlice)
        if event.object.service_name not in touched.services:
            return  # the event changed nothing
        try:
            trigger_time = datetime.fromisoformat(event.trigger_time).timestamp()
        except ValueError:
            return
        if trigger_time > self._start_time and len(self._triggers) < MAX_TRIGGERS:
            self._triggers.append((event.object.family, trigger_time))

    def computed(self, keys: Iterable[ServicePortKey], desired: DesiredState) -> None:
        """Records Service ports whose desired state has changed."""
        for key in keys:
            state = desired.services.get(key)
            _set_membership(self._empty_ports, key, state is not None and not state.any_endpoints)
            for policy, members in self._without_local.items():
                _set_membership(members, key, state is not None and _lacks_local(state, policy))

    def applied(
        self,
        keys: Collection[ServicePortKey] | None,
        seconds: float,
        written: int | None,
        is_resync: bool = False,
    ) -> None:
        """Records an apply() of these Service ports; `keys` None: everything was compared.
        `written`: number of entries; None: it failed. Without keys it was a sync only if it wrote
        something (deferred work, both families): a retry of refused Service ports, once a second,
        is none. With `is_resync` what was written repairs what another process had changed.
        """
        metrics = self._server.proxy_metrics
        if written is None:
            metrics.record_failure()
            return
        if is_resync:
            metrics.record_comparison(written)
        if keys is None or keys or written:
            families = {key.family for key in keys} if keys else {4, 6}
            metrics.record_sync(seconds, keys is None, families)
        for family, trigger_time in self._triggers:
            metrics.record_programming(family, trigger_time)
        self._triggers.clear()
        for policy, members in self._without_local.items():
            for family in (4, 6):
                count = sum(key.family == family for key in members)
                metrics.set_no_local_endpoints(policy, family, count)
        self._applied_since_settled = True

    def programmed(self, latencies: Sequence[float]) -> None:
        """Records the time from an event's arrival until it was in force, in seconds, of each
        event that now is.
        """
        if latencies:
            self._server.proxy_metrics.record_event_to_map(latencies)

    def settled(
        self,
        store: ObjectStore,
        desired: DesiredState,
        all_settled: bool = True,
        waiting_since: float | None = None,
    ) -> None:
        """Records whether all events that were taken are settled: programmed, or without effect.
        If not, `waiting_since` is since when the oldest change has waited (time.monotonic), if
        that is known.
        """
        health = self._server.health
        if all_settled:
            applied, self._applied_since_settled = self._applied_since_settled, False
            health.record_settled(applied)
            self._server.proxy_metrics.record_settled()
            self._server.set_node_leaving(store.node.being_deleted)
            self._update_health_checks(store, desired)
        elif waiting_since is not None:
            health.set_oldest(waiting_since)
        health.record_dequeued()  # the next round begins

    def _update_health_checks(self, store: ObjectStore, desired: DesiredState) -> None:
        touched, self._touched = self._touched, ChangeSet()
        names = touched.services
        if touched.all_services:
            names = {*store.service_names(), *self._health_checks}
        for name in names:
            check = compute_health_check(store.service(name), store.slices(name), store.node.name)
            if check is None:
                self._health_checks.pop(name, None)
            else:
                self._health_checks[name] = check
        on_all_addresses = self._config.all_node_port_addresses or not self._health_checks
        checks = (dict(self._health_checks), None if on_all_addresses else desired.node_addresses)
        if checks != self._published_checks:
            self._server.set_health_checks(*checks)
            self._published_checks = checks


def _set_membership(members: set[ServicePortKey], key: ServicePortKey, is_member: bool) -> None:
    if is_member:
        members.add(key)
    else:
        members.discard(key)


def _lacks_local(state: ServiceState, policy: str) -> bool:
    """Whether this policy is Local and all endpoints are on other nodes."""
    is_local = state.internal_local if policy == "internal" else state.external_local
    return is_local and state.any_endpoints and not state.local
