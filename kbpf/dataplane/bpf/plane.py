# SPDX-License-Identifier: Apache-2.0
"""The BPF data plane: adopts the maps of an earlier agent, plans changes, writes and flips them,
and retires what no program reads any more.

The plane remembers what it programmed, so that the cost of a change depends on the change and not
on the size of the cluster. Retired entries wait for the end of the grace period in a queue that
tick() empties; no call blocks on it.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Final, TypeVar

from kbpf.dataplane.base import PlaneStatus, Report, TickResult
from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.attachments import Attachments
from kbpf.dataplane.bpf.changes import adopt, commit
from kbpf.dataplane.bpf.changes.capacity import CapacityAccount
from kbpf.dataplane.bpf.changes.commit import ZERO, pack_endpoint
from kbpf.dataplane.bpf.changes.deferred import ApplyPlan, DeferredQueue
from kbpf.dataplane.bpf.changes.grace import GRACE_PERIOD_S, SHORT_GRACE_PERIOD_S, GraceQueue
from kbpf.dataplane.bpf.changes.large_tables import TableBuilder
from kbpf.dataplane.bpf.changes.plan import (
    Planner,
    ProgrammedPort,
    Retired,
    Writes,
    compute_change,
)
from kbpf.dataplane.bpf.changes.quotas import (
    NamespaceBudgets,
    TableLimits,
    estimate_entries,
    priority_of,
)
from kbpf.dataplane.bpf.changes.shared_values import (
    SharedValues,
    cluster_ips_of,
    pack_ports,
    ports_of,
    unpack_ports,
)
from kbpf.dataplane.bpf.growth import GROWTH_POLL_INTERVAL_S, MapGrowth
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.affinity_shares import AffinityShares
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.agent_sockets import AgentSockets
from kbpf.dataplane.bpf.maps.ids import BackendTable, IdAllocator, SharedTables
from kbpf.dataplane.bpf.maps.layout import MAPS, U32, U32_PAIR
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.metrics import MapCollector
from kbpf.dataplane.bpf.programs import unpinned
from kbpf.dataplane.bpf.shared import BpfAccess
from kbpf.errors import CapacityError, PinsRemovedError
from kbpf.kernel.system import mounts
from kbpf.model.address import Addr
from kbpf.model.config import Config, is_system_service
from kbpf.model.desired import (
    Backend,
    DesiredState,
    FrontendAddress,
    ServicePortKey,
    ServiceState,
)
from kbpf.model.metrics import UdpCuts
from kbpf.model.objects import Cidr, Protocol
from kbpf.model.status import ModeChoice

log = logging.getLogger("kbpf.dataplane")

T = TypeVar("T")

NODE_PORTS_ID: Final = 0
"""The id in `source_ranges` of the ranges that may connect to NodePorts. No Service has it."""

SLICE_BUDGET_S: Final = 0.0015
"""Length of one slice of deferred work, in seconds. In apply() that is building tables and
programming large Service ports, in tick() deleting old sets and UDP flows.
"""

LARGE_ENTRIES: Final = 256
"""A Service port with at least this many map entries (quotas.estimate_entries()) is large, and may
be deferred. agent/work_queue.py, too, calls Services large, but counts endpoints.
"""

MAX_RETRIED: Final = 16
"""Refused Service ports that are retried in one call. Those that fail again move to the end."""


class BpfPlane:
    """DataPlane on BPF socket hooks and TC programs. See base.DataPlane for the methods."""

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        sockets_first: bool = False,
    ) -> None:
        """`sockets_first`: see Attachments. The caller then has to call tick()."""
        self._config = config
        self._clock = clock
        self._pins = Pins(config.pin_dir)
        self._agent_maps = AgentMaps(self._pins, config.sizes, config.packet_path)
        self._programmed: dict[ServicePortKey, ProgrammedPort] = {}
        self._node_addresses: set[Addr] = set()
        self._cluster_ips = SharedValues(cluster_ips_of)
        self._frontend_ports = SharedValues(ports_of)
        self._refused: dict[ServicePortKey, str] = {}
        # those of `_refused` that belong to the cluster itself
        self._refused_system: dict[ServicePortKey, None] = {}
        self._evenly_spread: dict[ServicePortKey, str] = {}  # spread evenly instead of as annotated
        self._table_limits = TableLimits()
        self._adopted: adopt.Adopted | None = None  # until the first apply() has ended
        self._lock = -1
        self._attachments = Attachments(config, self._pins, self._agent_maps, sockets_first)
        self._growth = MapGrowth(self._agent_maps)
        # kept since the first apply() was not authoritative
        self._unclaimed: adopt.Adopted | None = None
        self._hidden_reason = ""  # why the pin folder's path does not lead to our pins
        self._invalidated = False  # whether the maps may differ from what is remembered here
        self._former_udp = Retired()  # see _remember_udp()
        self._affinity_shares = AffinityShares(
            lambda: self._agent_maps.maps,
            lambda: {
                programmed.id: programmed.affinity_timeout
                for programmed in self._programmed.values()
            },
        )
        self.shared = BpfAccess(
            MapCollector(self._pins, config), self._agent_maps, self._attachments, AgentSockets()
        )

    # ---- opening ---------------------------------------------------------------------------

    def open(self, coexisting: bool = False) -> None:
        """Compiles or loads the artifact, opens or creates the maps, loads the programs, adopts.

        Raises CompileError or KernelError. In that case the programs of an earlier agent stay
        attached.
        """
        cgroup = self._config.cgroup or mounts.find_cgroup_root()
        mounts.ensure_bpffs(self._config.pin_dir)
        self._lock = pinning.lock_pins(self._pins)
        self._pins.use_descriptor(self._lock)
        with self._pins.with_operator_path():
            unpinned.refuse_unpinned(self._pins, self._config.pin_dir, cgroup)
            self._attachments.compile(cgroup)
            adopted = self._agent_maps.open()
            self.shared.sockets.open(self._agent_maps.maps["agent_sockets"])
            self._attachments.load(cgroup, coexisting)
            self._udp_passes = udp.UdpPasses(self._agent_maps.maps)
            self._adopt()
        log.info(
            "data plane opened mode=bpf pin_dir=%s cgroup=%s adopted=%s",
            self._config.pin_dir,
            cgroup,
            adopted,
        )

    def _adopt(self) -> None:
        maps = self._agent_maps.maps
        self._ids = IdAllocator(adopt.read_next_ids(maps["meta"]), self._is_id_used)
        self._backend_table = BackendTable(self._ids)
        adopted = adopt.read_maps(maps)
        self._ids.skip_past(adopted.highest_service, adopted.highest_backend, adopted.highest_set)
        for backend, backend_id in adopted.backends.items():
            self._backend_table.adopt(backend, backend_id)
        self._shared_tables, self._budgets = SharedTables(self._ids), NamespaceBudgets()
        for key, programmed in adopted.programmed.items():
            for set_ in (programmed.cluster, programmed.local):
                self._backend_table.acquire(set_.backends)
                if set_.table:
                    self._shared_tables.adopt(set_.table)
            self._budgets.replace(key.namespace, None, programmed)
        self._programmed = adopted.programmed
        self._agent_maps.fill = Counter(adopted.fill)
        self._node_addresses = {Addr(key) for key, _ in maps["node_addresses"].items()}
        self._agent_maps.fill["node_addresses"] = len(self._node_addresses)
        adopted_cluster_ips = (Addr(key) for key, _ in maps["cluster_ips"].items())
        self._cluster_ips = SharedValues(
            cluster_ips_of, adopted.programmed.values(), adopted_cluster_ips
        )
        self._agent_maps.fill["cluster_ips"] = len(self._cluster_ips.written_values)
        self._adopt_ports(adopted)
        self._udp_cuts = udp.UdpCutMap(self._agent_maps)
        self._builder = TableBuilder(self._agent_maps, self._ids, self._shared_tables)
        # large Service ports that a later apply() programs (not what tick() calls deferred work)
        self._deferred_queue, self._deferred_due = DeferredQueue(), 0.0
        self._ticks = 0  # calls of tick()
        # What was about to be retired needs no queue: adopt.py finds it as unclaimed.
        self._grace_queue = GraceQueue(
            self._agent_maps, self._backend_table, self._shared_tables, self._cut_udp
        )
        self._adopted, self._unclaimed = adopted, None

    def _adopt_ports(self, adopted: adopt.Adopted) -> None:
        """Sets the bits of all ports found in `services`. An agent of an earlier version kept no
        such bits, and programs attached from now on find a frontend only if the bit of its port is
        set.
        """
        written = set(unpack_ports(self._agent_maps.maps["frontend_ports"].items()))
        used = {address.port for address in adopted.unclaimed_frontends}
        used |= {
            port for programmed in adopted.programmed.values() for port in ports_of(programmed)
        }
        self._frontend_ports = SharedValues(ports_of, adopted.programmed.values(), written)
        self._write_ports(new=used - written)

    def _is_id_used(self, kind: int, id_: int) -> bool:
        """Whether a map holds this id. Implements ids.IsIdUsed."""
        name = ("service_names", "backends", "backend_slots")[kind]
        key = U32_PAIR.pack(id_, 0) if name == "backend_slots" else U32.pack(id_)
        return self._agent_maps.maps[name].lookup(key) is not None

    # ---- applying --------------------------------------------------------------------------

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        """`touched` must be None in the first call.

        After a KernelError the maps may hold a part of the change. Every frontend still has a
        complete set (see changes/plan.py), and the next call first reads the maps again.
        """
        compare_all = (
            touched is None or self._invalidated or (authoritative and self._unclaimed is not None)
        )
        if self._invalidated:
            self._remember_udp()
            self._adopt()
        self._invalidated = True  # stays set if _apply() raises
        with self._pins.with_operator_path():
            report = self._apply(desired, set(touched or ()), compare_all, authoritative)
        self._invalidated = False
        return report

    def invalidate(self) -> None:
        """Also tries again to load a packet path that could not be loaded."""
        self._attachments.retry_packet_path()
        self._invalidated = True
        self._agent_maps.take_counts()  # writes until now do not belong to the next report

    def _apply(
        self,
        desired: DesiredState,
        keys: set[ServicePortKey],
        compare_all: bool,
        authoritative: bool,
    ) -> Report:
        """`keys`: Service ports that are known to have changed or been removed. With `compare_all`
        all others are compared as well.
        """
        if compare_all:
            keys |= desired.services.keys()
            # If the first apply() is not authoritative, adopted ports that are not desired stay.
            if authoritative or self._adopted is None:
                keys |= self._programmed.keys()
        changes, writes = self._plan(desired, keys, may_defer=not compare_all)
        self._plan_former_cuts(changes, writes.retired, authoritative)
        if self._adopted is not None:
            ranges = dict.fromkeys(self._config.node_port_source_ranges)
            writes.new_ranges += [(NODE_PORTS_ID, cidr) for cidr in ranges]
            _claim_ranges(writes, self._adopted.unclaimed_ranges)
            if authoritative:
                writes.removed |= self._adopted.unclaimed_frontends - writes.flips.keys()
            # these are overwritten, and `fill` counts them already
            writes.new_frontends -= len(self._adopted.unclaimed_frontends & writes.flips.keys())
        cluster_ips = self._compute_changed(self._cluster_ips, changes, authoritative)
        ports = self._compute_changed(self._frontend_ports, changes, authoritative)
        self._attachments.write_node(desired)
        new_addresses = len(set(desired.node_addresses) - self._node_addresses)
        self._grow_for(writes, new_addresses, len(cluster_ips[0]), at_once=compare_all)
        self._write(writes, set(desired.node_addresses), cluster_ips, ports)
        for key, programmed_port in changes.items():
            if programmed_port is None:
                self._programmed.pop(key, None)
            else:
                self._programmed[key] = programmed_port
        # Before the cut, which continues pending passes: it may have new clients already.
        self._spare_serving(changes.values())
        self._cut_udp(writes.retired, is_repeat=False)
        if self._adopted is not None:
            self._finish_first_apply(writes.retired, authoritative)
        elif self._unclaimed is not None and authoritative:
            unclaimed, self._unclaimed = self._unclaimed, None
            # the frontends may be ours by now
            our_addresses = {
                frontend.at
                for programmed in self._programmed.values()
                for frontend in programmed.frontends
            }
            self._agent_maps.delete(
                "services", map(pack_endpoint, unclaimed.unclaimed_frontends - our_addresses)
            )
            self._retire_unclaimed(unclaimed, writes.retired)
        self._grace_queue.add(self._clock(), writes.retired)
        self._former_udp = Retired()
        self._attachments.exemptions.set_pods(
            desired.exempt_pods, desired.exempt_pods_known, self._clock()
        )
        write_counts, calls = self._agent_maps.take_counts()
        examined = None if compare_all else frozenset(changes.keys() | keys)
        return Report(
            write_counts,
            calls,
            self._refused,
            self._evenly_spread,
            examined,
            self._deferred_queue.services,
            self._deferred_due,
        )

    def _plan(
        self, desired: DesiredState, keys: set[ServicePortKey], may_defer: bool
    ) -> tuple[dict[ServicePortKey, ProgrammedPort | None], Writes]:
        """Plans the changes of these Service ports. With `may_defer`, large ones are deferred to
        the next apply() that has nothing else to do.
        """
        unused_names = self._adopted.unused_names if self._adopted else None
        apply_plan = ApplyPlan(
            Planner(self._ids, self._backend_table, unused_names, self._shared_tables),
            CapacityAccount(
                self._agent_maps,
                self._backend_table,
                self._shared_tables,
                self._budgets,
                self._grace_queue,
            ),
            {},
        )
        if not may_defer:
            self._deferred_queue.clear()
        keys |= self._table_limits.update(desired.services, keys)
        states = {key: self._effective_state(desired, key) for key in keys}
        priorities = {key: priority_of(key, states[key], self._is_system(key)) for key in keys}
        has_programmed = False
        for key in sorted(states, key=priorities.__getitem__):
            if may_defer and _is_large(states[key]):
                self._deferred_queue.add(key, priorities[key])
                self._remove_lost_frontends(key, states[key], apply_plan)
            else:
                self._deferred_queue.discard(key)
                self._plan_port(key, states[key], apply_plan)
                has_programmed = True
        if may_defer and not has_programmed:
            keys |= self._plan_deferred(desired, apply_plan)
        if not self._deferred_queue:
            apply_plan.planner.writes.retired.slot_keys += self._builder.release()
        return apply_plan.programmed, apply_plan.planner.finish_writes()

    def _plan_deferred(self, desired: DesiredState, apply_plan: ApplyPlan) -> set[ServicePortKey]:
        """Plans one slice of the deferred Service ports, in order. If there are none, retries
        refused ones. Returns the Service ports that were examined.
        """
        deadline, self._deferred_due = time.perf_counter() + SLICE_BUDGET_S, 0.0
        examined = set() if self._deferred_queue else self._retry_refused(desired, apply_plan)
        while (key := self._deferred_queue.peek()) is not None:
            new = self._effective_state(desired, key)
            examined.add(key)
            if not self._plan_port(key, new, apply_plan, deadline):
                break
            self._deferred_queue.discard(key)
            if time.perf_counter() >= deadline:
                break
        return examined

    def _retry_refused(self, desired: DesiredState, apply_plan: ApplyPlan) -> set[ServicePortKey]:
        """Retries some of the Service ports that did not fit, those of the cluster itself first."""
        retried_keys = dict.fromkeys(islice(self._refused_system, MAX_RETRIED))
        retried_keys |= dict.fromkeys(islice(self._refused, MAX_RETRIED - len(retried_keys)))
        for key in retried_keys:
            new = self._effective_state(desired, key)
            if _is_large(new):
                self._deferred_queue.add(key, priority_of(key, new, self._is_system(key)))
            else:
                self._plan_port(key, new, apply_plan)
        return set(retried_keys)

    def _plan_port(
        self,
        key: ServicePortKey,
        new: ServiceState | None,
        apply_plan: ApplyPlan,
        deadline: float | None = None,
    ) -> bool:
        """Plans one Service port if it fits. Returns False if it has to wait for maps to grow, or
        if its table is not complete at `deadline` (time.perf_counter).
        """
        self._refused.pop(key, None)
        self._refused_system.pop(key, None)
        old = apply_plan.programmed.get(key, self._programmed.get(key))
        change = compute_change(key, old, new)
        try:
            deletable_before = self._clock() - SHORT_GRACE_PERIOD_S
            apply_plan.capacity.reserve(
                change, apply_plan.planner, self._is_system(key), deletable_before
            )
            if deadline is not None and self._waits_for_room(apply_plan):
                self._deferred_due = time.monotonic() + GROWTH_POLL_INTERVAL_S
                return False
        except CapacityError as error:
            self._refused[key] = str(error)
            if self._is_system(key):
                self._refused_system[key] = None
            self._remove_lost_frontends(key, new, apply_plan)
            return True
        if deadline is not None and new is not None and self._waits_for_table(new, deadline):
            return False
        apply_plan.programmed[key] = apply_plan.planner.add(change)
        self._budgets.replace(key.namespace, old, apply_plan.programmed[key])
        return True

    def _remove_lost_frontends(
        self, key: ServicePortKey, new: ServiceState | None, apply_plan: ApplyPlan
    ) -> None:
        """Removes the frontends that a Service port has lost, even if the rest of its change is
        deferred. Another Service port may have them now, and the deferred change would take them
        away from it.
        """
        old = apply_plan.programmed.get(key, self._programmed.get(key))
        if old is None:
            return
        apply_plan.programmed[key] = apply_plan.planner.remove_lost_frontends(old, new)
        self._budgets.replace(key.namespace, old, apply_plan.programmed[key])

    def _waits_for_table(self, new: ServiceState, deadline: float) -> bool:
        """Builds the tables that this Service port needs, at least one piece, until `deadline`
        (time.perf_counter). Returns whether a table is still incomplete.
        """
        while (missing_table := self._builder.find_missing(new)) is not None:
            if not self._builder.is_busy:
                self._builder.begin(*missing_table)
            self._builder.step()
            if time.perf_counter() >= deadline:
                return self._builder.find_missing(new) is not None
        return False

    def _effective_state(self, desired: DesiredState, key: ServicePortKey) -> ServiceState | None:
        """The desired state of a Service port, within the limits of its namespace."""
        self._evenly_spread.pop(key, None)
        state = desired.services.get(key)
        if state is not None and (reason := self._table_limits.reason_for_even_spread(key)):
            self._evenly_spread[key] = reason
            return self._table_limits.effective_state(state)
        return state

    def _is_system(self, key: ServicePortKey) -> bool:
        """Whether this Service port has priority over those of tenants."""
        return is_system_service(key.service, self._config)

    def _compute_changed(
        self,
        values: SharedValues[T],
        changes: Mapping[ServicePortKey, ProgrammedPort | None],
        authoritative: bool,
    ) -> tuple[set[T], set[T]]:
        """The values (ClusterIPs or ports) that this change adds, and those that it removes."""
        new, removed = values.update(
            (self._programmed[key] for key in changes if key in self._programmed),
            (programmed for programmed in changes.values() if programmed is not None),
            compare_all=self._adopted is not None or self._unclaimed is not None,
        )
        return new, removed if authoritative else set()

    def _grow_for(self, writes: Writes, addresses: int, cluster_ips: int, at_once: bool) -> None:
        self._make_room(
            {
                "services": writes.new_frontends,
                "service_names": len(writes.names),
                "backend_slots": sum(len(ids) for _, ids in writes.slots),
                "set_members": sum(len(ids) for _, ids in writes.members),
                "backends": len(writes.backends),
                "node_addresses": addresses,
                "cluster_ips": cluster_ips,
            },
            at_once,
        )

    def _make_room(self, added: Mapping[str, int], at_once: bool) -> None:
        """Grows the maps that `added` entries would overfill: in the background if the entries
        still fit and not `at_once`, otherwise before it returns.
        """
        if self._growth.is_busy and not self._agent_maps.fits(added):
            self._growth.finish()
        if new_sizes := self._agent_maps.compute_new_sizes(added):
            if at_once or not self._agent_maps.fits(added):
                self._growth.finish(new_sizes)
            else:
                self._growth.begin(new_sizes, time.monotonic())

    def _waits_for_room(self, apply_plan: ApplyPlan) -> bool:
        """Whether the planned change has to wait for maps to grow. CapacityError if they cannot
        grow.
        """
        added = {
            name: count for name, count in apply_plan.capacity.reserved.items() if MAPS[name].grows
        }
        if new_sizes := self._agent_maps.compute_new_sizes(added):
            self._growth.begin(new_sizes, time.monotonic())
        if self._agent_maps.fits(added):
            return False
        if self._growth.error:
            raise CapacityError(f"maps cannot grow, retrying: {self._growth.error}")
        return True

    def _write(
        self,
        writes: Writes,
        addresses: set[Addr],
        cluster_ips: tuple[set[Addr], set[Addr]],
        ports: tuple[set[int], set[int]],
    ) -> None:
        """Programs look up a frontend only if its port is in `frontend_ports`, so the ports in it
        must be a superset of those in `services` at any time.
        """
        nodes = addresses - self._node_addresses, self._node_addresses - addresses
        self._write_ports(new=ports[0])
        commit.write(self._agent_maps, self._ids, writes, nodes, cluster_ips)
        self._write_ports(removed=ports[1])
        self._cluster_ips.record_written(*cluster_ips)
        self._node_addresses = addresses

    def _spare_serving(self, ports: Iterable[ProgrammedPort | None]) -> None:
        """What serves again within the grace period is not cut a second time: by now it may have
        new clients.
        """
        uncut = self._grace_queue.uncut
        if not uncut and not self._udp_passes.is_busy:
            return
        backends, frontends = _udp_targets(port for port in ports if port is not None)
        for retired in uncut:
            retired.lost_backends -= backends
            retired.lost_frontends -= frontends
        self._udp_passes.spare(backends, frontends)

    def _write_ports(self, new: Collection[int] = (), removed: Collection[int] = ()) -> None:
        self._frontend_ports.record_written(set(new), set(removed))
        entries = pack_ports(self._frontend_ports.written_values, (*new, *removed))
        self._agent_maps.put("frontend_ports", entries, new=0)

    def _cut_udp(self, retired: Retired, is_repeat: bool = True) -> None:
        """Cuts UDP clients off lost backends and frontends: writes `udp_cuts`, deletes flows of the
        packet path and destroys connected sockets (udp.py). `is_repeat`: the second pass, after the
        grace period, for a connect() or packet that was in flight during the first. Flows of
        unconnected sockets need none: programs see that they are older than the entry of
        `udp_cuts`.
        """
        if not (retired.lost_backends or retired.lost_frontends):
            return
        if not is_repeat:
            self._udp_cuts.add(
                {
                    (service_id, pack_endpoint(backend))
                    for service_id, backend in retired.lost_backends
                },
                time.monotonic_ns(),
            )
        self._udp_passes.add(
            retired.lost_backends, retired.lost_frontends, count_flows=not is_repeat
        )
        self._udp_passes.advance(SLICE_BUDGET_S)

    def _remember_udp(self) -> None:
        """Remembers which UDP flows may exist, before the maps are read again. They do not contain
        `serving`, so the next plan would not find the backends that have stopped serving since the
        last successful apply(). Cuts that were not finished are remembered as well.
        """
        backends, frontends = _udp_targets(self._programmed.values())
        self._former_udp.lost_backends |= backends
        self._former_udp.lost_frontends |= frontends
        for retired in self._grace_queue.uncut:
            self._former_udp.lost_backends |= retired.lost_backends
            self._former_udp.lost_frontends |= retired.lost_frontends

    def _plan_former_cuts(
        self,
        changes: Mapping[ServicePortKey, ProgrammedPort | None],
        retired: Retired,
        authoritative: bool,
    ) -> None:
        """Adds to `retired` what was remembered and is not served any more. An authoritative call
        needs none of this, since it cuts whatever is not served (_retire_unclaimed()). The cuts of
        this call are remembered until it has succeeded.
        """
        former = self._former_udp
        if not authoritative and (former.lost_backends or former.lost_frontends):
            ports = {**self._programmed, **changes}
            backends, frontends = _udp_targets(port for port in ports.values() if port)
            # Of ports that stay as adopted it is not known which backends serve.
            unplanned_ids = {
                port.id
                for key, port in ports.items()
                if port and (key not in changes or key in self._refused)
            }
            retired.lost_backends |= {
                (service_id, backend)
                for service_id, backend in former.lost_backends - backends
                if service_id not in unplanned_ids
            }
            retired.lost_frontends |= {
                (service_id, frontend)
                for service_id, frontend in former.lost_frontends - frontends
                if service_id not in unplanned_ids
            }
        former.lost_backends |= retired.lost_backends
        former.lost_frontends |= retired.lost_frontends

    def _cut_udp_now(self, is_gone: udp.IsGone) -> None:
        start = time.perf_counter()
        cut_counts = udp.cut(self._agent_maps.maps, is_gone)
        seconds = time.perf_counter() - start
        self._udp_passes.results.append(
            UdpCuts(seconds, {family: cut_counts[family] for family in (4, 6)})
        )

    def _finish_first_apply(self, retired: Retired, authoritative: bool) -> None:
        """Ends the first apply(): attaches the programs and retires what was adopted but not
        claimed. Retiring has to wait while some objects could not be read, since they may claim it.
        """
        adopted, self._adopted = self._adopted, None
        assert adopted is not None
        hooks_changed = self._attachments.publish()
        self._attachments.remove_unused_packet_path()
        self._attachments.catch_up()
        log.info("socket hooks attached changed=%d", hooks_changed)
        if authoritative:
            self._retire_unclaimed(adopted, retired)
            return
        log.warning(
            "entries of an earlier agent are kept: not all objects could be read; see the lines "
            "about objects above; the entries are removed once all can be read"
        )
        self._unclaimed = adopted

    def _retire_unclaimed(self, unclaimed: adopt.Adopted, retired: Retired) -> None:
        retired.names += sorted({*unclaimed.unclaimed_names, *unclaimed.unused_names.values()})
        retired.slot_keys += unclaimed.unclaimed_slots
        retired.member_keys += unclaimed.unclaimed_members
        retired.backend_ids += (
            self._backend_table.remove_unreferenced() + unclaimed.unclaimed_backends
        )
        self._agent_maps.delete("services", unclaimed.corrupt_frontends)
        is_gone = udp.gone_unless_in(*_udp_targets(self._programmed.values()))
        self._udp_cuts.add(
            udp.find_stale_flows(self._agent_maps.maps, is_gone), time.monotonic_ns()
        )
        del self._agent_maps.writes["udp_cuts"]  # counted as UDP cuts, not as writes of a change
        self._cut_udp_now(is_gone)

    # ---- deferred work ---------------------------------------------------------------------

    def tick(self, now: float, coexisting: bool = False) -> TickResult:
        """Deletes old sets after their grace period, advances the growth of maps, and maintains the
        attachments.
        """
        if not coexisting:
            self._attachments.end_coexistence()
        tasks: deque[Callable[[float], None]] = deque(
            (
                lambda seconds: self._grace_queue.delete_until(now - GRACE_PERIOD_S, seconds),
                self._udp_passes.advance,
                self._continue_growth,
                lambda seconds: self._affinity_shares.advance(now, seconds),
            )
        )
        # Each call starts with another task, so that no task uses up the whole budget every time.
        self._ticks += 1
        tasks.rotate(self._ticks)
        remaining, deadline = SLICE_BUDGET_S, time.perf_counter() + SLICE_BUDGET_S
        for task in tasks:
            task(remaining)
            remaining = deadline - time.perf_counter()
        due = (
            self._attachments.tick(now, self._adopted is None),
            self._grace_queue.due,
            now if self._udp_passes.is_busy or self._affinity_shares.is_busy else None,
            self._growth.due(now),
        )
        udp_cuts, self._udp_passes.results = tuple(self._udp_passes.results), []
        return TickResult(
            min((due_time for due_time in due if due_time is not None), default=None), udp_cuts
        )

    def _continue_growth(self, seconds: float) -> None:
        """Copies entries into larger maps and switches to them as soon as they are complete. Also
        switches to a packet path that was loaded in the background.
        """
        with self._pins.with_operator_path():
            self._attachments.use_loaded_packet_path()
            self._growth.advance(seconds)
            if self._attachments.publish_due and self._adopted is None:
                self._attachments.publish()

    def flush(self) -> None:
        """Retires everything now, without a grace period. For tests."""
        self._grace_queue.delete_until(float("inf"))
        self._udp_passes.advance(float("inf"))

    # ---- the rest --------------------------------------------------------------------------

    def write_status(self, text: bytes) -> None:
        """Stores the agent's status in a map, for `kbpf inspect status`."""
        self._check_pins()
        status = self._agent_maps.maps["agent_status"]
        status.update(ZERO, text[: status.value_size].ljust(status.value_size, b"\0"))

    def status(self) -> PlaneStatus:
        attachments = self._attachments
        faults = (*filter(None, [self._hidden_reason]), *attachments.faults())
        return PlaneStatus(
            ModeChoice("bpf", "bpf"),
            attachments.ready(),
            (*faults, *attachments.problems(self._clock())),
            faults,
            attachments.packet_status(),
        )

    def _check_pins(self) -> None:
        """Checks that the pin folder is still ours. If another process removed the pins, our writes
        have no effect: PinsRemovedError. If something is mounted over the folder, the agent
        continues through its descriptor and logs an error.
        """
        links_removed = not self._pins.links.is_dir() and self._adopted is None
        if links_removed or mounts.is_removed(self._config.pin_dir, self._lock):
            raise PinsRemovedError(
                "the pins were removed while the agent ran",
                str(self._config.pin_dir),
                "the agent exits; restart it to serve Services again",
            )
        previous, self._hidden_reason = self._hidden_reason, self._find_hidden_reason()
        if self._hidden_reason and not previous:
            log.error("%s", self._hidden_reason)
        if previous and not self._hidden_reason:
            log.info("the pin folder is visible again pin_dir=%s", self._config.pin_dir)

    def _find_hidden_reason(self) -> str:
        folder = self._config.pin_dir
        if mounts.is_same(folder, self._lock):
            return ""
        return (
            f"the pin folder {folder} is hidden by a mount on top of it, so the next agent "
            f"will not find the programs and will refuse to start: unmount it (findmnt -T {folder})"
        )

    def fill(self) -> dict[str, tuple[int, int]]:
        """Entries and capacity of each map that the agent writes."""
        return {
            name: (self._agent_maps.fill[name], map_.max_entries)
            for name, map_ in self._agent_maps.maps.items()
            if name in self._agent_maps.fill
        }

    def close(self) -> None:
        """Closes all descriptors; pins and attachments stay. Programs are closed first, since one
        of their threads uses the maps.
        """
        self._growth.close()
        self._attachments.close()
        self.shared.sockets.close()
        self._agent_maps.close()
        if self._lock >= 0:
            self._pins.use_path()
            os.close(self._lock)
            self._lock = -1


def _udp_targets(
    ports: Iterable[ProgrammedPort],
) -> tuple[set[tuple[int, Backend]], set[tuple[int, FrontendAddress]]]:
    """The backends that serve UDP, and the UDP frontends, each with its service id."""
    backends: set[tuple[int, Backend]] = set()
    frontends: set[tuple[int, FrontendAddress]] = set()
    for port in ports:
        backends.update((port.id, backend) for backend in port.serving)
        frontends.update(
            (port.id, frontend.at)
            for frontend in port.frontends
            if frontend.at.protocol == Protocol.UDP
        )
    return backends, frontends


def _is_large(state: ServiceState | None) -> bool:
    return state is not None and estimate_entries(state) >= LARGE_ENTRIES


def _claim_ranges(writes: Writes, unclaimed_ranges: Iterable[tuple[int, Cidr]]) -> None:
    """Drops unclaimed ranges that are not desired, and does not write again those that are."""
    unclaimed, desired_ranges = set(unclaimed_ranges), set(writes.new_ranges)
    writes.new_ranges = [
        source_range for source_range in writes.new_ranges if source_range not in unclaimed
    ]
    writes.old_ranges += sorted(unclaimed - desired_ranges)
