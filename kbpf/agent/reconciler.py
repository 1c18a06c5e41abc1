# SPDX-License-Identifier: Apache-2.0
"""The rounds of the agent: events update the object store, the policy computes the desired state of
the Service ports that the events touched, and the data plane programs it.

Nothing is written before every source has synced, so that nothing is deleted merely because its
object has not been read yet.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kbpf.agent.applier import Applier, Outcome, State
from kbpf.agent.computer import ServiceComputer
from kbpf.agent.host_thread import Listeners
from kbpf.agent.problem_book import ProblemBook
from kbpf.agent.recorder import Recorder
from kbpf.dataplane.base import DataPlane
from kbpf.model.address import Addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import ServicePortKey
from kbpf.model.events import REQUIRED_KINDS, Event
from kbpf.policy.admission import NOT_IN_USE, ApiServerAddress, InUse
from kbpf.policy.store import ChangeSet, ObjectStore
from kbpf.source.base import Source

log = logging.getLogger("kbpf.agent")

COMPUTE_BUDGET_S: Final = 0.0015
"""Changes are computed for this long before they are programmed and the inbox is read again."""


@dataclass(slots=True)
class DirtyKeys:
    """Service ports whose desired state is not programmed yet. `all`: what all of them depend on
    has changed.
    """

    keys: set[ServicePortKey] = field(default_factory=set)
    all: bool = False

    def __bool__(self) -> bool:
        return self.all or bool(self.keys)


class Reconciler:
    """Used by the agent's thread only, except for `api_servers`, which any thread may replace."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        sources: Sequence[Source],
        recorder: Recorder,
        book: ProblemBook,
    ) -> None:
        self._config, self._plane, self._sources = config, plane, sources
        self._recorder, self.book = recorder, book
        self.store = ObjectStore(config.node_name, config.bind_address)
        self.computer = ServiceComputer(config, self.store, self._mark_changed)
        self.applier = Applier(config, plane, self._is_authoritative, recorder, book)
        self.listeners = Listeners()
        self.node_addresses: tuple[Addr, ...] = ()
        self.api_servers: tuple[ApiServerAddress, ...] = ()
        self._in_use = NOT_IN_USE  # as last computed with
        self._pending = ChangeSet()
        self._dirty = DirtyKeys()
        self._skipped_large = False  # whether the last round left large Services out
        self._missing_node_logged = False
        self._local_networks_missing = False

    @property
    def state(self) -> State:
        return self.applier.state

    def take(self, events: Sequence[Event]) -> None:
        """Takes these events into the store."""
        touched = self.store.apply(events)
        self._recorder.taken(events, touched)
        self._pending.update(touched)
        # What was listed at the start did not just change, and would distort the figures.
        if self.state.has_applied:
            self.computer.record_arrivals(events, touched)

    def set_node_addresses(self, addresses: tuple[Addr, ...]) -> None:
        old, self.node_addresses = self.node_addresses, addresses
        # Tuples compare without the attributes of NodeAddresses.
        if (addresses, getattr(addresses, "__dict__", {})) != (old, getattr(old, "__dict__", {})):
            self._pending.all_services = True
            self._dirty.all = True  # the data plane also compares what depends on addresses

    @property
    def is_busy(self) -> bool:
        """Whether anything is left to compute or to program."""
        return self.computer.is_busy or bool(self._dirty) or self.applier.is_deferred

    def reconcile(self) -> None:
        """Runs one round: queues touched Services, computes small ones, compares everything if that is due,
        programs the changes, and computes the next part of a large Service.
        """
        if self.state is State.WAITING:
            if not self.store.synced >= REQUIRED_KINDS:
                return
            self.applier.advance(Outcome.LISTED)
        self.listeners.read_first(time.monotonic())
        if not self.state.has_applied:
            self._apply_first()
            return
        self._refresh_device_ports()
        if (self._pending or self._in_use != self._read_in_use()) and self.applier.seconds_until_due() <= 0:
            self._begin_update()
        computed_small = self.computer.compute_small(COMPUTE_BUDGET_S)
        if (self._dirty.all or not self._dirty) and self.applier.resync_due:
            # Compares everything programmed with the desired state.
            self._plane.invalidate()
            self._apply(None, is_resync=True)
        newly_authoritative = not self.state.is_complete and self._is_authoritative()
        retry_due = self.applier.needs_retry and time.monotonic() >= self.applier.retry_due
        if self._dirty or retry_due or newly_authoritative:
            self._apply_dirty()
        # Large Services get every second round at least, however many small ones wait.
        self._skipped_large = computed_small and not self._skipped_large
        if not self._skipped_large and not self.state.is_retrying:
            self._advance_large()

    def _apply_first(self) -> None:
        """At once: the first apply removes what an earlier agent left, so it needs everything."""
        self._mark_changed(self._update_builder())
        self._refresh_device_ports()  # which are known only now
        if self._in_use != self._read_in_use():
            self._mark_changed(self._update_builder())
        self._warn_about_missing_data()
        self._apply(None)

    def _update_builder(self) -> set[ServicePortKey]:
        touched = self._take_pending()
        return self.computer.builder.update(self.store, touched, self.node_addresses, self._config, self._in_use)

    def _refresh_device_ports(self) -> None:
        device_frontends = self.computer.builder.device_frontends
        self.listeners.refresh_device_ports(time.monotonic(), device_frontends)

    def _read_in_use(self) -> InUse:
        return InUse(self.api_servers, self.listeners.ports, self.listeners.device_ports)

    def _begin_update(self) -> None:
        builder = self.computer.builder
        now, node = time.monotonic(), builder.node_state
        touched = self._take_pending()
        names = builder.begin_update(self.store, touched, self.node_addresses, self._config, self._in_use)
        self.computer.enqueue(names, now)
        self._warn_about_missing_data()
        # What belongs to the node does not wait for the Services in the queue.
        if builder.node_state != node and not self._dirty.all:
            self._apply_dirty()

    def _take_pending(self) -> ChangeSet:
        touched, self._pending = self._pending, ChangeSet()
        self._in_use = self._read_in_use()
        return touched

    def _advance_large(self) -> None:
        """Computes a large Service and programs the result. None is begun while the data plane
        still has another one to program.
        """
        applier = self.applier
        self.computer.advance_large(COMPUTE_BUDGET_S, may_start=not applier.is_deferred)
        if self._dirty or (applier.is_deferred and time.monotonic() >= applier.deferred_due):
            self._apply_dirty()

    def _mark_changed(self, keys: set[ServicePortKey]) -> None:
        """Marks Service ports whose desired state has changed."""
        builder = self.computer.builder
        self._dirty.keys |= keys
        self._recorder.computed(keys, builder.state)
        self.book.report_addresses(keys, builder.state.services, builder.reserved)

    def _apply_dirty(self) -> None:
        self._apply(None if self._dirty.all else self._dirty.keys)

    def _apply(self, keys: set[ServicePortKey] | None, is_resync: bool = False) -> None:
        report = self.applier.apply(self.computer.builder.state, keys, is_resync)
        if report is not None:
            self._dirty = DirtyKeys()
            self._recorder.programmed(self.computer.record_programmed(report.deferred))

    def _is_authoritative(self) -> bool:
        """Whether all objects could be read. Pods do not count: Services do not depend on them."""
        return self.store.all_usable and all(s.status().authoritative for s in self._sources)

    def report_settled(self) -> None:
        """Reports that everything is programmed, or how long the oldest change has waited."""
        computer, is_retrying = self.computer, self.state.is_retrying
        all_settled = not (is_retrying or self._pending or self.is_busy)
        waiting_since = None if is_retrying else computer.oldest_since
        self._recorder.settled(self.store, computer.builder.state, all_settled, waiting_since)

    def due_times(self, now: float) -> Iterator[float]:
        """When the next rounds are due (time.monotonic)."""
        applier = self.applier
        if self.state.has_applied and self._pending:
            yield now + max(0.0, applier.seconds_until_due())
        if self.state.last_apply_succeeded:
            if self._dirty:
                yield now
            if applier.is_deferred:
                yield applier.deferred_due
            if (computer_due := self.computer.next_due(now)) is not None:
                yield computer_due
        if applier.needs_retry:
            yield applier.retry_due
        if self.state.has_applied and self.computer.builder.device_frontends:
            yield self.listeners.device_due

    def _warn_about_missing_data(self) -> None:
        """Warns once about missing data on this node. kube-proxy, too, serves without it."""
        node_known = self.store.node_known or self._config.source is not None
        if not node_known and not self._missing_node_logged:
            self._missing_node_logged = True
            log.warning(
                "there is no Node %s yet (--hostname-override); until it exists, NodePorts answer "
                "on all addresses of this node, and it has no zone",
                self._config.node_name,
            )
        mode = self._config.detect_local_mode
        by_network = mode in (LocalMode.CLUSTER_CIDR, LocalMode.NODE_CIDR)
        networks_missing = by_network and not self.computer.builder.state.local_networks
        if networks_missing and not self._local_networks_missing:
            setting = "--cluster-cidr" if mode is LocalMode.CLUSTER_CIDR else "the Node's podCIDRs"
            log.warning(
                "detect-local-mode=%s has no network yet (%s): no ClusterIP is masqueraded, and "
                "clients count as local by their devices",
                mode,
                setting,
            )
        self._local_networks_missing = networks_missing
