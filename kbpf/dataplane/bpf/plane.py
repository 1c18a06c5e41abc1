# SPDX-License-Identifier: Apache-2.0
"""The BPF data plane: adopts the maps of an earlier agent, plans changes, writes and flips them,
and retires what no program reads any more. No call blocks on the grace period: tick() deletes what
was retired.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kbpf.dataplane.base import PlaneStatus, Report, SharedAccess, TickResult
from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.attachments import Attachments
from kbpf.dataplane.bpf.connection_probe import ConnectionProber
from kbpf.dataplane.bpf.exemptions import AgentSockets
from kbpf.dataplane.bpf.failing_backends import FailingBackends
from kbpf.dataplane.bpf.map_metrics import MapCollector
from kbpf.dataplane.bpf.maps import status_entries
from kbpf.dataplane.bpf.maps.affinity_shares import AffinityShares
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps, MapGrowth
from kbpf.dataplane.bpf.maps.pin_watch import PinWatch
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.programs import foreign, unpinned
from kbpf.dataplane.bpf.state import adopt, contents
from kbpf.dataplane.bpf.state.commit import GRACE_PERIOD_S
from kbpf.dataplane.bpf.state.endpoint_names import EndpointNames
from kbpf.dataplane.bpf.state.map_state import MapState
from kbpf.dataplane.bpf.state.plan import Retired
from kbpf.dataplane.bpf.state.planner import Planner
from kbpf.dataplane.bpf.udp_cutter import UdpCutter
from kbpf.kernel.system import mounts
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.metrics import ConnectionProbe, DataPlaneMetrics, FailingBackend, Pause, TrafficStats
from kbpf.model.status import ModeChoice
from kbpf.takeover.detect import KubeProxyWatch

log = logging.getLogger("kbpf.dataplane")

SLICE_BUDGET_S: Final = 0.0015
"""Length of one slice of deferred work, in seconds. In apply() that is building tables and
programming large Service ports, in tick() deleting old sets and UDP flows.
"""


class BpfPlane:
    """DataPlane on BPF socket hooks and TC programs. See base.DataPlane for the methods."""

    def __init__(
        self, config: Config, clock: Callable[[], float] = time.monotonic, sockets_first: bool = False
    ) -> None:
        """`sockets_first`: see Attachments. The caller then has to call tick()."""
        self._config = config
        self._clock = clock
        self._pins = Pins(config.pin_dir)
        self._agent_maps = AgentMaps(self._pins, config.sizes, config.packet_path)
        self._pin_watch = PinWatch(self._pins, config.pin_dir)
        self._attachments = Attachments(config, self._pins, self._agent_maps, sockets_first)
        self._growth = MapGrowth(self._agent_maps)
        self._names = EndpointNames(self._agent_maps, self._growth, clock)
        self._planner = Planner(config, self._agent_maps, self._growth, clock)
        self._invalidated = False  # whether the maps may differ from what is remembered here
        self._ticks = 0  # calls of tick()
        self._affinity_shares = AffinityShares(
            lambda: self._agent_maps.maps,
            lambda: {programmed.id: programmed.affinity_timeout for programmed in self._state.programmed.values()},
        )
        self.shared = BpfAccess(
            MapCollector(self._pins, config),
            self._agent_maps,
            self._attachments,
            AgentSockets(),
            FailingBackends(self._pins),
            ConnectionProber(self._pins, config),
        )

    # ---- opening ---------------------------------------------------------------------------

    def open(self, coexisting: bool = False) -> None:
        """Compiles or loads the artifact, opens or creates the maps, loads the programs, adopts.

        Raises CompileError or KernelError. In that case the programs of an earlier agent stay
        attached.
        """
        cgroup = self._config.cgroup or mounts.find_cgroup_root()
        mounts.ensure_bpffs(self._config.pin_dir)
        self._pin_watch.lock()
        with self._pins.with_operator_path():
            self._refuse_neighbours(cgroup)
            self._config = self._attachments.choose_forwarding()
            self._attachments.compile(cgroup)
            adopted = self._agent_maps.open()
            self.shared.sockets.open(self._agent_maps.maps["agent_sockets"])
            self._attachments.load(cgroup, coexisting)
            self._udp_passes = udp.UdpPasses(self._agent_maps.maps, self._config.uses_conntrack)
            self._udp_cutter = UdpCutter(self._agent_maps, self._udp_passes)
            self._adopt()
        log.info("data plane opened mode=bpf pin_dir=%s cgroup=%s adopted=%s", self._config.pin_dir, cgroup, adopted)

    def _refuse_neighbours(self, cgroup: Path) -> None:
        """Raises KernelError if another kbpf or another load balancer serves here."""
        config = self._config
        unpinned.refuse_unpinned(self._pins, config.pin_dir, cgroup, config.packet_path)
        foreign.refuse_balancers(self._pins, cgroup)

    def _adopt(self) -> None:
        found = contents.read(self._agent_maps.maps)
        adopt.log_corrupt(found)
        self._state = MapState(self._agent_maps, found, lambda retired: self._udp_cutter.cut(retired, SLICE_BUDGET_S))
        self._state.write_adopted_ports()
        self._udp_cutter.read_cuts()

    # ---- applying --------------------------------------------------------------------------

    def apply(
        self, desired: DesiredState, touched: Collection[ServicePortKey] | None, authoritative: bool = True
    ) -> Report:
        """`touched` must be None in the first call.

        After a KernelError the maps may hold a part of the change. Every frontend still has a
        complete set (see state/plan.py), and the next call first reads the maps again.
        """
        compare_all = touched is None or self._invalidated or (authoritative and self._state.unclaimed is not None)
        if self._invalidated:
            self._udp_cutter.remember(self._state.programmed.values(), self._state.grace_queue.uncut)
            self._adopt()
        self._invalidated = True  # stays set if _apply() raises
        with self._pins.with_operator_path():
            report = self._apply(desired, set(touched or ()), compare_all, authoritative)
        self._invalidated = False
        return report

    def invalidate(self) -> None:
        """Also tries again to load a packet path that could not be loaded."""
        self._attachments.packets.retry()
        self._invalidated = True
        self._agent_maps.take_counts()  # writes until now do not belong to the next report

    def _apply(
        self, desired: DesiredState, keys: set[ServicePortKey], compare_all: bool, authoritative: bool
    ) -> Report:
        """Plans, makes room, writes. `keys`: Service ports that are known to have changed or been
        removed. With `compare_all` all others are compared as well.
        """
        state, planner = self._state, self._planner
        if compare_all:
            keys |= desired.services.keys()
            # If the first apply() is not authoritative, adopted ports that are not desired stay.
            if authoritative or not state.is_first_apply:
                keys |= state.programmed.keys()
        changes, writes = planner.plan(state, desired, keys, not compare_all, SLICE_BUDGET_S)
        self._udp_cutter.plan_former_cuts(state.programmed, changes, planner.refused, writes.retired, authoritative)
        if state.is_first_apply:
            state.claim(writes, self._config.node_port_source_ranges, authoritative)
        shared = state.compute_shared(changes, set(desired.node_addresses), authoritative)
        self._attachments.packets.write_node(desired)
        self._growth.make_room({**writes.count_entries(), **shared.count_entries()}, compare_all)
        state.write(writes, shared)
        state.record(changes)
        # Before the cut, which continues pending passes: it may have new clients already.
        self._udp_cutter.spare_serving(changes.values(), state.grace_queue.uncut)
        self._udp_cutter.cut(writes.retired, SLICE_BUDGET_S, is_repeat=False)
        self._retire_unclaimed(writes.retired, authoritative)
        state.grace_queue.add(self._clock(), writes.retired)
        self._names.update(changes, desired, is_complete=state.unclaimed is None)
        self._udp_cutter.forget()
        self._attachments.exemptions.set_pods(desired.exempt_pods, desired.exempt_pods_known, self._clock())
        return Report(
            self._agent_maps.take_counts(),
            planner.refused,
            planner.evenly_spread,
            None if compare_all else frozenset(changes.keys() | keys),
            planner.deferred_queue.services,
            planner.deferred_due,
        )

    def _retire_unclaimed(self, retired: Retired, authoritative: bool) -> None:
        """Ends the first apply() by attaching the programs, and retires what was adopted but not
        claimed. Retiring has to wait while some objects could not be read, since they may claim it.
        """
        state = self._state
        is_first = state.is_first_apply
        if is_first:
            if not unpinned.serves_already(self._pins):  # one that started at the same moment
                self._refuse_neighbours(self._config.cgroup or mounts.find_cgroup_root())
            hooks_changed = self._attachments.publish()
            state.is_first_apply = False  # only now: after an error nothing may be attached
            self._attachments.remove_unused_packet_path()
            self._attachments.packets.catch_up()
            log.info("socket hooks attached changed=%d", hooks_changed)
        if authoritative and state.unclaimed is not None:
            state.delete_unclaimed(retired, delete_frontends=not is_first)
            self._udp_cutter.cut_unserved(state.programmed.values())
        elif is_first:
            log.warning(
                "entries of an earlier agent are kept: not all objects could be read; see the "
                "lines about objects above; the entries are removed once all can be read"
            )

    # ---- deferred work ---------------------------------------------------------------------

    def tick(self, now: float, coexisting: bool = False) -> TickResult:
        """Deletes old sets after their grace period, advances the growth of maps, and maintains the
        attachments.
        """
        if not coexisting:
            self._attachments.end_coexistence()
        tasks: deque[Callable[[float], None]] = deque(
            (
                lambda seconds: self._state.grace_queue.delete_until(now - GRACE_PERIOD_S, seconds),
                self._udp_passes.advance,
                self._continue_growth,
                lambda seconds: self._affinity_shares.advance(now, seconds),
                lambda seconds: self._names.advance(now, seconds),
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
            self._attachments.tick(now, not self._state.is_first_apply),
            self._state.grace_queue.due,
            now if any(task.is_busy for task in (self._udp_passes, self._affinity_shares, self._growth)) else None,
            self._names.due(),
        )
        udp_cuts, self._udp_passes.results = tuple(self._udp_passes.results), []
        return TickResult(min((due_time for due_time in due if due_time is not None), default=None), udp_cuts)

    def _continue_growth(self, seconds: float) -> None:
        """Copies entries into larger maps and switches to them as soon as they are complete. Also
        switches to a packet path that was loaded in the background.
        """
        with self._pins.with_operator_path():
            self._attachments.packets.use_loaded()
            self._growth.advance(seconds)
            if self._attachments.packets.publish_due and not self._state.is_first_apply:
                self._attachments.publish()

    # ---- the rest --------------------------------------------------------------------------

    def maintain_host(self, now: float) -> None:
        """Nothing of the node is changed before the programs are attached."""
        if not self._state.is_first_apply:
            self._attachments.maintain_host(now)

    def write_status(self, text: bytes) -> None:
        """Stores the agent's status in a map, for `kbpf inspect status`."""
        self._pin_watch.check(not self._state.is_first_apply, self._agent_maps.pinned)
        status_entries.write(self._agent_maps.maps["agent_status"], text)

    def status(self) -> PlaneStatus:
        attachments = self._attachments
        faults = (*self._pin_watch.faults, *attachments.hooks.faults())
        return PlaneStatus(
            ModeChoice("bpf", "bpf"),
            attachments.packets.ready(),
            (*faults, *attachments.problems(self._clock())),
            faults,
            attachments.packets.status(),
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
        self._pin_watch.close()


# ---- for other threads ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BpfAccess(SharedAccess):
    """What other threads use of the BPF data plane."""

    collector: MapCollector
    agent_maps: AgentMaps
    attachments: Attachments
    sockets: AgentSockets
    failing: FailingBackends
    prober: ConnectionProber
    kube_proxy: KubeProxyWatch = field(default_factory=KubeProxyWatch)

    def read_metrics(self) -> DataPlaneMetrics:
        return msgspec.structs.replace(
            self.collector.read(dict(self.agent_maps.fill)),
            hooks=tuple(self.attachments.hooks.states.items()),
            # filters of other kinds are no balancers
            foreign_programs=sum(bool(foreign.program) for foreign in self.attachments.foreign_programs()),
            bypassed_chains=self.attachments.bypassed_chains,
        )

    def refresh_neighbours(self) -> None:
        self.kube_proxy.refresh()

    def count_traffic(self, pause: Pause) -> TrafficStats:
        kube_proxy = self.kube_proxy.state
        return msgspec.structs.replace(
            self.collector.count(pause),
            kube_proxy_running=bool(kube_proxy.running),
            kube_proxy_rules=None if kube_proxy.unreadable else kube_proxy.has_rules,
        )

    def find_failing_backends(self) -> tuple[FailingBackend, ...] | None:
        return self.failing.find()

    def probe_connections(self) -> ConnectionProbe | None:
        return self.prober.probe()

    def claim_socket(self, cookie: int) -> None:
        self.sockets.claim(cookie)
