# SPDX-License-Identifier: Apache-2.0
"""The IPVS data plane: adopts, plans, executes, drains.

All state is in the kernel: the sets OWN and OWN_FWMARKS of the nftables table name every virtual
service of ours, from before it is created until after it is deleted. So the next agent finds
everything, however this one ends, and never touches virtual services of other programs. The map
FWMARKS has the fwmark of each short circuit.
"""

import contextlib
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import Final

from kbpf.dataplane.base import PlaneStatus, Report, SharedAccess, TickResult
from kbpf.dataplane.ipvs import ipvs_cleanup as cleanup
from kbpf.dataplane.ipvs import ruleset
from kbpf.dataplane.ipvs.diff import Changes, DesiredElements
from kbpf.dataplane.ipvs.executor import KernelState
from kbpf.dataplane.ipvs.node_settings import NodeSettings
from kbpf.dataplane.ipvs.plan import (
    EMPTY_PLAN,
    NODE_KEY,
    Element,
    ServicePortPlan,
    fwmark_service,
    owned_services,
    without_service,
)
from kbpf.dataplane.ipvs.port_planner import NO_IPV6_WARNING, PortPlanner
from kbpf.dataplane.ipvs.statefile import StateFile
from kbpf.dataplane.node import KeepalivePoll, reconcile_forward_rules
from kbpf.errors import KernelError
from kbpf.kernel.net.ipvs import IpvsClient
from kbpf.kernel.netfilter import nft
from kbpf.model.config import IPVS_DEVICE, Config
from kbpf.model.desired import DesiredState, ServicePortKey, VirtualService
from kbpf.model.metrics import IPVS_COUNTERS, ConnectionStats, Pause, PortName, TrafficStats
from kbpf.model.status import ModeChoice

log = logging.getLogger("kbpf.dataplane")

DRAIN_POLL_INTERVAL_S: Final = 2.0
"""Interval between two checks of drained real servers and of the table, in seconds."""


class Sync(Enum):
    """Whether the kernel holds what DesiredElements says."""

    NEVER = auto()  # no apply() has succeeded
    UNKNOWN = auto()  # one has, but a later call failed, or another program made changes
    HELD = auto()


class IpvsPlane:
    """base.DataPlane on IPVS and nftables. Methods are described there; docstrings here say only
    what is particular to IPVS.
    """

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._options = cleanup.ruleset_options(config)
        self._state_dir = config.ipvs_folder
        self._lock = -1
        self._settings = NodeSettings(config)
        # A copy, since another thread counts than the one that calls apply().
        self.shared = IpvsAccess(lambda: dict(self._elements.plans))
        self._reset()

    def _reset(self) -> None:
        self._elements = DesiredElements()
        self._state_file = StateFile(self._state_dir)
        self._planner = PortPlanner(self._config, self._elements, self._options.masquerade_mark)
        self._poll_due = 0.0
        # Generations of nf_tables without our own transactions: when this thread has checked the
        # table, and when maintain_host() has checked all other rules.
        self._table_generation = self._rules_generation = -1
        self._keepalive = KeepalivePoll()
        self._rules_due = 0.0
        self._desired = DesiredState({})  # as passed to the last apply()
        # Service ports of an apply() that failed: the next one programs them again.
        self._unfinished: set[ServicePortKey] = set()
        self._sync = Sync.NEVER
        self._fully_synced = False  # whether all unclaimed state of an earlier agent is removed
        # Virtual services of an earlier agent that no Service port has claimed yet.
        self._unclaimed_services: frozenset[VirtualService] = frozenset()

    # ---- opening ---------------------------------------------------------------------------

    def open(self, coexisting: bool = False) -> None:
        """Creates the table and the device, or adopts existing ones. Raises KernelError with what
        is missing. `coexisting` changes nothing: the BPF programs of the previous agent see packets
        first, and recognize their own connections.
        """
        is_new = not self._state_dir.exists()
        self._lock = cleanup.lock_state_folder(self._state_dir)
        try:
            self._kernel = KernelState(self._options, self._settings.warn_once)
        except KernelError:
            if is_new:  # an empty folder would look like the state of an earlier agent
                shutil.rmtree(self._state_dir, ignore_errors=True)
            self._release()
            raise
        self._settings.write(self._kernel.services)
        self._reset()
        log.info("data plane opened mode=ipvs device=%s table=%s", IPVS_DEVICE, ruleset.TABLE)
        if names := self._config.ignored_in_ipvs:
            log.info("settings without effect in mode ipvs: %s (docs/ipvs.md)", ", ".join(names))
        with contextlib.suppress(KernelError):  # maintain_host() retries
            self._settings.check_firewalls(nft.list_chains())

    def _release(self) -> None:
        os.close(self._lock)
        self._lock = -1

    # ---- applying --------------------------------------------------------------------------

    def apply(
        self, desired: DesiredState, touched: Collection[ServicePortKey] | None, authoritative: bool = True
    ) -> Report:
        """After a KernelError, the next call reads the state of the kernel again and repairs it. It
        also programs the Service ports of the failed call again, and those that conflict with
        them.
        """
        planner = self._planner
        must_read = self._sync is not Sync.HELD or (authoritative and not self._fully_synced)
        self.invalidate()  # an exception below leaves the kernel in an unknown state
        keys = {*(desired.services if touched is None else touched), *planner.refused, *self._unfinished}
        if touched is None:
            keys |= self._elements.plans.keys() - {NODE_KEY}
        self._unfinished = keys
        elements = self._read_elements() if must_read else None
        planner.read_context(self._kernel, desired, keys, must_read or touched is None)
        self._desired = desired
        after = planner.plan(desired, keys)
        for key in sorted(keys):
            self._state_file.set_service(
                key, desired.services.get(key), desired.other_node_addresses, planner.fwmarks.find(key)
            )
        if elements is None and self._needs_unclaimed(after):
            elements = self._read_elements()
        changes = self._elements.update(after)
        self._fully_synced = self._fully_synced or authoritative
        if elements is not None:
            changes = self._diff(elements)
        changes.udp_cuts.update(self._kernel.services.find_drained_udp(after.values()))
        writes = self._execute(changes)
        if refused_keys := planner.find_refused():
            writes += self._execute(self._elements.update(planner.plan(desired, refused_keys)))
        self._unfinished, self._sync = set(), Sync.HELD
        return Report(writes, dict(planner.refused))

    def invalidate(self) -> None:
        if self._sync is Sync.HELD:
            self._sync = Sync.UNKNOWN

    def _needs_unclaimed(self, after: Mapping[ServicePortKey, ServicePortPlan]) -> bool:
        """Whether an unclaimed virtual service of an earlier agent is desired now."""
        return bool(self._unclaimed_services) and any(
            not self._unclaimed_services.isdisjoint(plan.pools) for plan in after.values()
        )

    def _execute(self, changes: Changes) -> Counter[str]:
        """Executes the changes; returns the number of writes by kind. A refused change does not
        stop the others.
        """
        services = self._kernel.services
        before = services.change_count
        refusals = self._kernel.apply_additions(changes)
        self._planner.refused_addresses |= refusals.addresses
        for virtual, key in self._elements.record_refusals(refusals.actual_pools, changes).items():
            self._planner.refused[key] = refusals.virtuals[virtual]
        self._kernel.apply_removals(changes)
        counts = {"nft": sum(map(len, changes.steps())), "ipvs": self._kernel.services.change_count - before}
        return Counter({name: n for name, n in counts.items() if n})

    def _read_elements(self) -> frozenset[Element]:
        """Reads the sets and adopts the fwmarks in them."""
        elements = self._kernel.read_elements()
        self._planner.fwmarks.adopt(elements)
        return elements

    def _diff(self, elements: frozenset[Element]) -> Changes:
        """The difference between the kernel, whose sets hold these elements, and the desired
        state.
        """
        kernel, desired = self._kernel, self._elements
        pools = kernel.services.read_pools(elements, desired.pools)
        unclaimed = elements - desired.elements if not self._fully_synced else ()
        self._unclaimed_services = owned_services(unclaimed)
        return desired.diff(elements, kernel.read_addresses(), pools, self._fully_synced)

    # ---- deferred work ---------------------------------------------------------------------

    def tick(self, now: float, coexisting: bool = False) -> TickResult:
        """Removes drained real servers that have no connections left, and repairs what other
        programs have destroyed.
        """
        if now >= self._poll_due:
            self._poll_due = now + DRAIN_POLL_INTERVAL_S
            try:
                self._kernel.services.remove_drained()
            finally:
                self._check_table()
        return TickResult(self._poll_due, self._kernel.services.take_udp_cuts())

    def _check_table(self) -> None:
        """Checks whether another program has flushed the ruleset. If nothing has changed this costs
        one netlink message.
        """
        generation = self._kernel.read_foreign_generation()
        if self._sync is not Sync.NEVER:
            self._repair(generation != self._table_generation)
        self._table_generation = generation

    def maintain_host(self, now: float) -> None:
        """Checks whether another program has closed FORWARD or INPUT. If nothing has changed this
        costs one netlink message.
        """
        if now >= self._rules_due:
            self._rules_due = now + DRAIN_POLL_INTERVAL_S
            generation = self._kernel.read_foreign_generation()
            if generation != self._rules_generation:
                listing = nft.list_chains()
                self._settings.check_firewalls(listing)
                reconcile_forward_rules(self._options.masquerade_mark, listing)
                self._rules_generation = generation
        self._keepalive.poll(now)

    def _repair(self, has_foreign_changes: bool) -> None:
        """Repairs what other programs have destroyed, and completes an earlier repair that failed.
        Of IPVS it reads one virtual service only, so that the check costs one message: it detects
        `ipvsadm -C` and a reloaded module, not the removal of single services.
        """
        is_table_intact = not has_foreign_changes or self._kernel.is_table_intact()
        has_device = self._kernel.has_device()
        has_services = self._kernel.services.check_service(next(iter(self._elements.pools), None))
        if not is_table_intact:
            log.warning("the nftables table was changed and is created again table=%s", ruleset.TABLE)
        if not has_device:
            log.warning("the device is gone and is created again device=%s", IPVS_DEVICE)
        if not has_services:
            log.warning("the virtual services are gone and are created again")
            self._settings.write(self._kernel.services)
        if not (self._sync is Sync.HELD and is_table_intact and has_device and has_services):
            self.invalidate()
            self.apply(self._desired, (), authoritative=False)
        else:
            self._remove_idle_short_circuits()

    def _remove_idle_short_circuits(self) -> None:
        """Removes unneeded short circuits that have no connections left."""
        after: dict[ServicePortKey, ServicePortPlan] = {}
        for key, fwmark in self._planner.fwmarks.unneeded.items():
            virtual = fwmark_service(key.family, fwmark)
            plan = self._elements.plans.get(key, EMPTY_PLAN)
            if virtual in plan.pools and self._kernel.services.is_idle(virtual):
                after[key] = without_service(plan, virtual)
        if after:
            self.invalidate()
            for key in after:
                self._planner.fwmarks.release(key)
            self._execute(self._elements.update(after))
            self._sync = Sync.HELD

    def status(self) -> PlaneStatus:
        """Includes the warnings that are logged only once. Every fault is an error of apply(), and
        nothing continues in the background after it.
        """
        problems = [*self._settings.warnings, *(f"{key}: {reason}" for key, reason in self._planner.refused.items())]
        if self._planner.unsupported_family:
            problems.append(NO_IPV6_WARNING)
        return PlaneStatus(ModeChoice("ipvs", "ipvs"), problems=tuple(problems))

    def write_status(self, text: bytes) -> None:
        """Writes the status and the programmed Service ports to the state folder."""
        self._state_file.write(text)

    def close(self) -> None:
        if self._lock >= 0:
            self._kernel.close()
            self._release()


# ---- metrics, for other threads ------------------------------------------------------------------


class IpvsAccess(SharedAccess):
    """What other threads use of the IPVS data plane; `read_plans` may be called by any. There is
    nothing to do for the agent's sockets: IPVS cannot distinguish them (docs/limits.md).
    """

    def __init__(self, read_plans: Callable[[], Mapping[ServicePortKey, ServicePortPlan]]) -> None:
        self._read_plans = read_plans

    def count_traffic(self, pause: Pause) -> TrafficStats:
        return count_traffic(self._read_plans(), pause)


def count_traffic(plans: Mapping[ServicePortKey, ServicePortPlan], pause: Pause) -> TrafficStats:
    """Connections opened and bytes, by Service port: sums the counters of its virtual services. The
    kernel counts from the creation of a virtual service, so the counters survive a restart of the
    agent. Opens a netlink socket, in the network namespace of the thread. Raises KernelError if
    IPVS does not answer.
    """
    owners = {
        virtual: (key.namespace, key.name, key.port, key.protocol.name)
        for key, plan in plans.items()
        if key != NODE_KEY
        for virtual in plan.pools
    }
    pause()
    totals: dict[PortName, ConnectionStats] = {}
    with contextlib.closing(IpvsClient()) as client:
        service_stats = client.read_stats()
    pause()
    for service, stats in service_stats:
        name = owners.get(service)
        if name is not None and stats.opened:
            totals[name] = totals.get(name, ConnectionStats()).plus(stats)
    return TrafficStats(totals=tuple(totals.items()), counted_fields=IPVS_COUNTERS)
