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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple
from typing import Final

from kbpf.dataplane import firewalls, host
from kbpf.dataplane.base import PlaneStatus, Report, TickResult
from kbpf.dataplane.ipvs import cleanup
from kbpf.dataplane.ipvs.diff import Changes, DesiredElements
from kbpf.dataplane.ipvs.executor import KernelState
from kbpf.dataplane.ipvs.fwmarks import FwmarkAllocator
from kbpf.dataplane.ipvs.metrics import IpvsAccess
from kbpf.dataplane.ipvs.nodeport_conflicts import NodePortConflicts
from kbpf.dataplane.ipvs.plan import (
    EMPTY_PLAN,
    NODE_KEY,
    Element,
    NodeContext,
    RealServer,
    ServicePortPlan,
    SetName,
    VirtualService,
    fwmark_service,
    owned_service,
    plan_node,
    plan_service_port,
    without_service,
)
from kbpf.dataplane.ipvs.statefile import StateFile
from kbpf.errors import KernelError
from kbpf.kernel.net.ipvs import ConnectionTimeouts
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.system import sysctl
from kbpf.model.address import Addr, family_of
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import (
    DesiredState,
    Frontend,
    FrontendKind,
    ServicePortKey,
    ServiceState,
)
from kbpf.model.status import ModeChoice

log = logging.getLogger("kbpf.dataplane")

SYSCTLS: Final = {
    "net.ipv4.vs.conntrack": "1",  # IPVS masquerades only with it
    "net.ipv4.vs.expire_nodest_conn": "1",  # a connection ends when its real server is removed
    # session affinity ends when its real server is drained
    "net.ipv4.vs.expire_quiescent_template": "1",
}
STRICT_ARP_SYSCTLS: Final = {
    "net.ipv4.conf.all.arp_ignore": "1",
    "net.ipv4.conf.all.arp_announce": "2",
}
NO_IPV6_WARNING: Final = "IPv6 is disabled on this node: IPv6 Services are not served"
DRAIN_POLL_INTERVAL_S: Final = 2.0
"""Interval between two checks of drained real servers and of the table, in seconds."""


class IpvsPlane:
    """base.DataPlane on IPVS and nftables. Methods are described there; docstrings here say only
    what is particular to IPVS.
    """

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._options = cleanup.ruleset_options(config)
        self._state_dir = config.state_dir / config.ipvs_device
        self._lock = -1
        self._warnings: dict[str, None] = {}
        # A copy, since another thread counts than the one that calls apply().
        self.shared = IpvsAccess(lambda: dict(self._elements.plans))
        self._reset()

    def _reset(self) -> None:
        self._elements = DesiredElements()
        self._state_file = StateFile(self._state_dir)
        self._context: NodeContext | None = None
        self._fwmarks = FwmarkAllocator(reserved_bits=self._options.masquerade_mark)
        self._poll_due = 0.0
        self._keepalive = host.KeepalivePoll()
        # The generation of nf_tables, and the number of our transactions up to it.
        self._ruleset_version = (-1, 0)
        self._node_port_conflicts = NodePortConflicts()
        self._desired = DesiredState({})  # as passed to the last apply()
        self._refused: dict[ServicePortKey, str] = {}
        # Service ports of an apply() that failed: the next one programs them again.
        self._unfinished: set[ServicePortKey] = set()
        # Service ports of an address family that the node does not have.
        self._unsupported_family: set[ServicePortKey] = set()
        # Addresses that the kernel does not accept on the device, with its error.
        self._refused_addresses: dict[Addr, str] = {}
        self._firewall_warnings: tuple[str, ...] = ()
        self._in_sync = False  # whether the kernel holds what `_elements` says
        self._fully_synced = False  # whether all unclaimed state of an earlier agent is removed
        # Virtual services of an earlier agent that no Service port has claimed yet.
        self._unclaimed_services: frozenset[VirtualService] = frozenset()
        self._has_applied = False  # whether apply() has succeeded once

    # ---- opening ---------------------------------------------------------------------------

    def open(self, coexisting: bool = False) -> None:
        """Creates the table and the device, or adopts existing ones. Raises KernelError with what
        is missing. `coexisting` changes nothing: the BPF programs of the previous agent see packets
        first, and recognize their own connections.
        """
        is_new = not self._state_dir.exists()
        self._lock = cleanup.lock_state_folder(self._state_dir)
        try:
            cleanup.refuse_other_names(self._config)
            self._kernel = KernelState(self._config.ipvs_device, self._options, self._warn_once)
        except KernelError:
            if is_new:  # an empty folder would look like the state of an earlier agent
                shutil.rmtree(self._state_dir, ignore_errors=True)
            self._release()
            raise
        self._set_sysctls()
        self._set_timeouts()
        self._reset()
        log.info(
            "data plane opened mode=ipvs device=%s table=%s",
            self._config.ipvs_device,
            self._options.table,
        )
        if names := self._config.ignored_in_ipvs:
            log.info("settings without effect in mode ipvs: %s (docs/ipvs.md)", ", ".join(names))
        with contextlib.suppress(KernelError):  # the first tick() retries
            self._check_firewalls(forward_rules.list_chains())

    def _release(self) -> None:
        os.close(self._lock)
        self._lock = -1

    def _set_sysctls(self) -> None:
        settings = SYSCTLS | (STRICT_ARP_SYSCTLS if self._config.strict_arp else {})
        for name, value in settings.items():
            try:
                if sysctl.read(name) != value:
                    sysctl.write(name, value)
            except KernelError as error:
                self._warn_once(str(error))
        for line in host.forwarding_warnings():
            self._warn_once(line)

    def _set_timeouts(self) -> None:
        try:
            self._kernel.services.set_timeouts(
                ConnectionTimeouts(*astuple(self._config.ipvs_times))
            )
        except KernelError as error:
            self._warn_once(f"cannot set the IPVS timeouts: {error}")

    def _check_firewalls(self, listing: Collection[forward_rules.Json]) -> None:
        """Updates the warnings about firewall rules of other programs; new ones are logged."""
        options = self._options
        warnings = (
            *firewalls.forward_warnings(options.masquerade_mark, listing),
            *firewalls.input_warnings(options.table, listing),
        )
        for line in warnings:
            if line not in self._firewall_warnings:
                log.warning("%s", line)
        self._firewall_warnings = warnings

    def _warn_once(self, line: str) -> None:
        if line not in self._warnings:
            self._warnings[line] = None
            log.warning("%s", line)

    # ---- applying --------------------------------------------------------------------------

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        """After a KernelError, the next call reads the state of the kernel again and repairs it. It
        also programs the Service ports of the failed call again, and those that conflict with
        them.
        """
        # Set again at the end only: an exception below leaves the kernel in an unknown state.
        was_in_sync, self._in_sync = self._in_sync, False
        must_read = not was_in_sync or (authoritative and not self._fully_synced)
        keys = {
            *(desired.services if touched is None else touched),
            *self._refused,
            *self._unfinished,
        }
        if touched is None:
            keys |= self._elements.plans.keys() - {NODE_KEY}
        self._unfinished = keys
        elements = self._read_elements() if must_read else None
        for key in list(keys):
            keys |= self._node_port_conflicts.update(key, desired.services.get(key))
        context = self._read_context(desired, keys, must_read or touched is None)
        # Plans of all Service ports depend on the context. Refused addresses concern only the
        # Service ports in `_refused`, which are in `keys` already.
        if self._context is None or context != self._context._replace(
            refused_addresses=context.refused_addresses
        ):
            keys |= self._all_keys(desired)
        self._context, self._desired = context, desired
        after = self._plan(desired, keys, context)
        if elements is None and self._needs_unclaimed(after):
            elements = self._read_elements()
        changes = self._elements.update(after)
        self._fully_synced = self._fully_synced or authoritative
        if elements is not None:
            changes = self._diff(elements)
        changes.udp_cuts.update(self._find_drained_udp(after))
        writes = self._execute(changes)
        if self._refused_addresses.keys() - context.refused_addresses:
            writes += self._withdraw_refused_addresses()
        self._unfinished = set()
        self._in_sync = self._has_applied = True
        return Report(dict(writes), sum(writes.values()), dict(self._refused))

    def invalidate(self) -> None:
        self._in_sync = False

    def _all_keys(self, desired: DesiredState) -> set[ServicePortKey]:
        """All Service ports that are desired or programmed."""
        keys = set(desired.services) | (self._elements.plans.keys() - {NODE_KEY})
        for key in keys:
            self._node_port_conflicts.update(key, desired.services.get(key))
        return keys

    def _needs_unclaimed(self, after: Mapping[ServicePortKey, ServicePortPlan]) -> bool:
        """Whether an unclaimed virtual service of an earlier agent is desired now."""
        return bool(self._unclaimed_services) and any(
            not self._unclaimed_services.isdisjoint(plan.pools) for plan in after.values()
        )

    def _withdraw_refused_addresses(self) -> Counter[str]:
        """Removes what was programmed for addresses that the kernel does not accept."""
        assert self._context is not None
        self._context = self._context._replace(refused_addresses=frozenset(self._refused_addresses))
        refused = {(SetName.VIRTUAL_IPS, (address,)) for address in self._refused_addresses}
        keys = [
            key
            for key, plan in self._elements.plans.items()
            if not plan.elements.isdisjoint(refused)
        ]
        after = self._plan(self._desired, keys, self._context)
        return self._execute(self._elements.update(after))

    def _execute(self, changes: Changes) -> Counter[str]:
        """Executes the changes; returns the number of writes by kind. A refused change does not
        stop the others.
        """
        services = self._kernel.services
        before = services.change_count
        refusals = self._kernel.apply_additions(changes)
        self._refused_addresses |= refusals.addresses
        for virtual, key in self._elements.record_refusals(refusals.actual_pools, changes).items():
            self._refused[key] = refusals.virtuals[virtual]
        self._kernel.apply_removals(changes)
        counts = {
            "nft": sum(map(len, changes.steps())),
            "ipvs": self._kernel.services.change_count - before,
        }
        return Counter({name: n for name, n in counts.items() if n})

    def _read_context(
        self, desired: DesiredState, keys: Collection[ServicePortKey], must_read: bool
    ) -> NodeContext:
        """The node's part of a plan's input. The node's own addresses are read if `must_read` or if
        frontends have new addresses; addresses that the kernel refused are retried.
        """
        old_context = self._context
        if old_context is None or must_read or self._has_new_addresses(desired, keys, old_context):
            node_addresses = self._kernel.read_node_addresses()
            families = self._kernel.address_families()
        else:
            node_addresses, families = old_context.own_addresses, old_context.families
        if self._refused_addresses:
            frontend_addresses = {
                frontend.at.address for frontend in _frontends_of(desired, self._refused)
            } - node_addresses
            self._refused_addresses = self._kernel.add_addresses(
                self._refused_addresses.keys() & frontend_addresses
            )
        mode = self._config.detect_local_mode
        return NodeContext(
            desired.node_addresses,
            node_addresses,
            self._config.ipvs_scheduler,
            self._config.masquerade_all,
            bool(desired.local_networks)
            or mode in (LocalMode.BRIDGE_INTERFACE, LocalMode.INTERFACE_NAME_PREFIX),
            families,
            frozenset(self._refused_addresses),
        )

    def _has_new_addresses(
        self, desired: DesiredState, keys: Collection[ServicePortKey], context: NodeContext
    ) -> bool:
        """Whether these frontends have addresses that have not been compared with the node's
        own.
        """
        return any(
            frontend.kind is not FrontendKind.NODE_PORT
            and family_of(frontend.at.address) in context.families
            and frontend.at.address not in context.refused_addresses
            and frontend.at.address not in context.own_addresses
            and not self._elements.contains((SetName.VIRTUAL_IPS, (frontend.at.address,)))
            for frontend in _frontends_of(desired, keys)
        )

    def _plan(
        self, desired: DesiredState, keys: Iterable[ServicePortKey], context: NodeContext
    ) -> dict[ServicePortKey, ServicePortPlan]:
        after = {NODE_KEY: plan_node(desired, context)}
        for key in sorted(keys):
            state = desired.services.get(key)
            self._state_file.set_service(key, state)
            self._refused.pop(key, None)
            self._unsupported_family.discard(key)
            if state is None:
                self._fwmarks.release(key)
                after[key] = EMPTY_PLAN
            else:
                after[key] = plan_service_port(
                    state, context, self._fwmarks.allocate(state), self._node_port_conflicts.exact
                )
                self._record_unsupported(state, context)
        return after

    def _record_unsupported(self, state: ServiceState, context: NodeContext) -> None:
        """Records a Service port that the node or its kernel does not support."""
        if state.key.family not in context.families:
            if not self._unsupported_family:
                log.warning("%s", NO_IPV6_WARNING)
            self._unsupported_family.add(state.key)
        elif context.refused_addresses:
            for frontend in state.frontends:
                if frontend.at.address in context.refused_addresses:
                    self._refused[state.key] = self._refused_addresses[frontend.at.address]

    def _find_drained_udp(
        self, after: Mapping[ServicePortKey, ServicePortPlan]
    ) -> Iterator[tuple[VirtualService, RealServer]]:
        """Draining real servers of UDP services that have stopped serving."""
        for plan in after.values():
            for virtual in plan.pools if plan.serving is not None else ():
                for server in self._kernel.services.draining_servers(virtual) - (
                    plan.serving or set()
                ):
                    yield virtual, server

    def _read_elements(self) -> frozenset[Element]:
        """Reads the sets and adopts the fwmarks in them."""
        elements = self._kernel.read_elements()
        self._fwmarks.adopt(elements)
        return elements

    def _diff(self, elements: frozenset[Element]) -> Changes:
        """The difference between the kernel, whose sets hold these elements, and the desired
        state.
        """
        kernel, desired = self._kernel, self._elements
        pools = kernel.services.read_pools(elements, desired.pools)
        unclaimed = elements - desired.elements if not self._fully_synced else ()
        self._unclaimed_services = frozenset(
            virtual for element in unclaimed if (virtual := owned_service(element)) is not None
        )
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
                self._check_ruleset()
        self._keepalive.poll(now)
        return TickResult(self._poll_due, self._kernel.services.take_udp_cuts())

    def _check_ruleset(self) -> None:
        """Checks whether another program has flushed the ruleset or closed FORWARD. If nothing has
        changed this costs one netlink message: each of our own transactions raises the generation
        by one, so any further increase is another program's.
        """
        version = forward_rules.read_generation(), self._kernel.nft_transactions
        has_foreign_changes = (
            version[0] - self._ruleset_version[0] != version[1] - self._ruleset_version[1]
        )
        try:
            if has_foreign_changes:
                listing = forward_rules.list_chains()
                self._check_firewalls(listing)
                host.reconcile_forward_rules(self._options.masquerade_mark, listing)
        finally:
            if self._has_applied:
                self._repair(has_foreign_changes)
        self._ruleset_version = version

    def _repair(self, has_foreign_changes: bool) -> None:
        """Repairs what other programs have destroyed, and completes an earlier repair that failed.
        Of IPVS it reads one virtual service only, so that the check costs one message: it detects
        `ipvsadm -C` and a reloaded module, not the removal of single services.
        """
        is_table_intact = not has_foreign_changes or self._kernel.is_table_intact()
        has_device = self._kernel.has_device()
        has_services = self._kernel.services.check_service(next(iter(self._elements.pools), None))
        if not is_table_intact:
            log.warning("the nftables table was changed and is created again table=%s",
                        self._options.table)  # fmt: skip
        if not has_device:
            log.warning(
                "the device is gone and is created again device=%s", self._config.ipvs_device
            )
        if not has_services:
            log.warning("the virtual services are gone and are created again")
            self._set_sysctls()
            self._set_timeouts()
        if not (self._in_sync and is_table_intact and has_device and has_services):
            self._in_sync = False
            self.apply(self._desired, (), authoritative=False)
        else:
            self._remove_idle_short_circuits()

    def _remove_idle_short_circuits(self) -> None:
        """Removes unneeded short circuits that have no connections left."""
        after: dict[ServicePortKey, ServicePortPlan] = {}
        for key, fwmark in self._fwmarks.unneeded.items():
            virtual, plan = (
                fwmark_service(key.family, fwmark),
                self._elements.plans.get(key, EMPTY_PLAN),
            )
            if virtual in plan.pools and self._kernel.services.is_idle(virtual):
                after[key] = without_service(plan, virtual)
        if after:
            self._in_sync = False
            for key in after:
                self._fwmarks.release(key)
            self._execute(self._elements.update(after))
            self._in_sync = True

    def status(self) -> PlaneStatus:
        """Includes the warnings that are logged only once. Every fault is an error of apply(), and
        nothing continues in the background after it.
        """
        problems = [
            *self._warnings,
            *self._firewall_warnings,
            *(f"{key}: {reason}" for key, reason in self._refused.items()),
        ]
        if self._unsupported_family:
            problems.append(NO_IPV6_WARNING)
        return PlaneStatus(ModeChoice("ipvs", "ipvs"), problems=tuple(problems))

    def write_status(self, text: bytes) -> None:
        """Writes the status and the programmed Service ports to the state folder."""
        self._state_file.write(text)

    def close(self) -> None:
        if self._lock >= 0:
            self._kernel.close()
            self._release()


def _frontends_of(desired: DesiredState, keys: Iterable[ServicePortKey]) -> Iterator[Frontend]:
    """The frontends of these Service ports; those that are not desired are skipped."""
    for key in keys:
        state = desired.services.get(key)
        if state is not None:
            yield from state.frontends
