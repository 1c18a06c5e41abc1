"""What the writer counts as it goes, at the cost of the change: for metrics and health checks.

Nothing is told before it is programmed: a LoadBalancer that hears of an endpoint sends traffic.
"""

import time
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final

from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey, ServiceState
from kbpf.model.events import Delete, Event, Kind, Upsert
from kbpf.model.objects import EndpointSlice, ServiceName
from kbpf.policy.health_check import HealthCheck, health_check
from kbpf.policy.store import Touched, World
from kbpf.serve.server import Desk

MOST_TRIGGERS: Final = 10_000
"""So many changes at most wait to be timed, while the kernel refuses."""

POLICIES: Final = ("internal", "external")


class Tally:
    """One thread only: the writer's."""

    def __init__(self, config: Config, desk: Desk) -> None:
        self._config, self._desk = config, desk
        self._began = time.time()
        self._triggers: list[tuple[int, float]] = []
        self._no_local: dict[str, set[ServicePortKey]] = {policy: set() for policy in POLICIES}
        self._empty: set[ServicePortKey] = set()
        self._checks: dict[ServiceName, HealthCheck] = {}
        self._told: tuple[object, ...] = ({}, None)
        self._touched = Touched()
        self._programmed = False

    @property
    def without_endpoints(self) -> int:
        """How many Service ports refuse every connection."""
        return len(self._empty)

    def heard(self, events: Iterable[Event], touched: Touched) -> None:
        """These came, and touched that."""
        services = slices = 0
        for event in events:
            if not isinstance(event, Upsert | Delete):
                continue
            services += event.key.kind is Kind.SERVICE
            if event.key.kind is Kind.SLICE:
                slices += 1
                if isinstance(event, Upsert) and event.triggered:
                    self._time(event, touched)
        if services or slices:
            self._desk.record.changes(services, slices)
        self._touched.services |= touched.services
        self._touched.everything |= touched.everything

    def _time(self, event: Upsert, touched: Touched) -> None:
        assert isinstance(event.object, EndpointSlice)
        if event.object.service_name not in touched.services:
            return  # it said nothing new
        try:
            at = datetime.fromisoformat(event.triggered).timestamp()
        except ValueError:
            return
        if at > self._began and len(self._triggers) < MOST_TRIGGERS:
            self._triggers.append((event.object.family, at))

    def changed(self, keys: Iterable[ServicePortKey], desired: DesiredState) -> None:
        """The states of these Service ports are others now."""
        for key in keys:
            state = desired.services.get(key)
            _put(self._empty, key, state is not None and not state.any_endpoints)
            for policy, members in self._no_local.items():
                _put(members, key, state is not None and _lacks_local(state, policy))

    def applied(self, keys: Collection[ServicePortKey] | None, seconds: float) -> None:
        """The data plane was written; `keys` None: all was looked at."""
        record = self._desk.record
        families = {key.family for key in keys} if keys else {4, 6}
        record.synced(seconds, keys is None, families)
        for family, at in self._triggers:
            record.programmed(family, at)
        self._triggers.clear()
        for policy, members in self._no_local.items():
            for family in (4, 6):
                count = sum(key.family == family for key in members)
                record.no_local_endpoints(policy, family, count)
        self._programmed = True

    def settled(self, world: World, desired: DesiredState) -> None:
        """All that came is done with: programmed, or it said nothing new."""
        programmed, self._programmed = self._programmed, False
        self._desk.health.settled(programmed)
        self._desk.record.settled()
        self._desk.node_is_leaving(world.node.leaving)
        self._look_at_checks(world, desired)

    def _look_at_checks(self, world: World, desired: DesiredState) -> None:
        touched, self._touched = self._touched, Touched()
        names = touched.services
        if touched.everything:
            names = {*world.names(), *self._checks}
        for name in names:
            check = health_check(world.service(name), world.slices(name), world.node.name)
            if check is None:
                self._checks.pop(name, None)
            else:
                self._checks[name] = check
        everywhere = self._config.all_node_port_addresses or not self._checks
        told = (dict(self._checks), None if everywhere else desired.node_addresses)
        if told != self._told:
            self._desk.check(*told)
            self._told = told


def _put(members: set[ServicePortKey], key: ServicePortKey, belongs: bool) -> None:
    if belongs:
        members.add(key)
    else:
        members.discard(key)


def _lacks_local(state: ServiceState, policy: str) -> bool:
    """Whether this policy is Local, and endpoints are only elsewhere."""
    is_local = state.internal_local if policy == "internal" else state.external_local
    return is_local and state.any_endpoints and not state.local
