# SPDX-License-Identifier: Apache-2.0
"""Attaches the socket hooks and the packet path, and keeps them attached.

plane.py first fills the maps, then publish() makes all programs read them, then catch_up() releases
the maps that no program reads any more. At a first start the sockets do not wait for the packet
path (packet_path/background_load.py).
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.exemptions import Exemptions
from kbpf.dataplane.bpf.host import HostIntegration
from kbpf.dataplane.bpf.maps import migrate, pinning
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.layout import MAPS, ConfigFlag
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import packet_path
from kbpf.dataplane.bpf.packet_path.background_load import LOAD_POLL_INTERVAL_S, PacketPathLoader
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconcilerStatus
from kbpf.dataplane.bpf.packet_path.flow_gc import FlowGarbageCollector
from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.dataplane.bpf.programs import compile, foreign
from kbpf.dataplane.bpf.programs.foreign import ForeignProgram
from kbpf.dataplane.bpf.programs.hook_config import HookConfig
from kbpf.dataplane.bpf.programs.loader import (
    Programs,
    SocketPrograms,
    missing_helpers,
)
from kbpf.errors import KbpfError, KernelError, OutdatedDevicesError
from kbpf.kernel.bpf import probe
from kbpf.kernel.system import mounts, netns
from kbpf.model.config import Accounting, Config, SocketLb
from kbpf.model.desired import DesiredState
from kbpf.model.status import MAX_FAILED_DEVICES, DeviceFailure, PacketStatus

log = logging.getLogger("kbpf.dataplane")

HOOK_VERIFY_INTERVAL_S: Final = 30.0
"""Interval between two checks of the hooks, about three system calls each."""

HOOK_RETRY_INTERVAL_S: Final = 1.0
"""The same while a hook is missing."""

SWITCH_POLL_INTERVAL_S: Final = 1.0
"""Interval between two checks whether all devices run the new programs."""


class Attachments:
    """The socket programs and the packet path over one pin folder."""

    def __init__(
        self, config: Config, pins: Pins, agent_maps: AgentMaps, sockets_first: bool = False
    ) -> None:
        """`sockets_first`: attach the socket hooks before the packet path is loaded."""
        self._config, self._pins, self._agent_maps = config, pins, agent_maps
        self._sockets_first = sockets_first
        self._postponed = False  # whether the packet path is loaded later, in the background
        self._loader: PacketPathLoader | None = None
        self._last_desired: DesiredState | None = None  # for a packet path that is loaded later
        self.settings: HookConfig | None = None
        # The packet path has to serve exempt sockets before the hooks ignore them.
        self._exemptions_pending = False
        self._sockets: SocketPrograms | None = None
        self._packet_path: PacketPath | None = None
        self._problem = ""  # why the packet path is not loaded though it is enabled
        self._switching = False  # whether devices still read the maps of an earlier agent
        self._host = HostIntegration(pins, config)
        self._flow_gc = FlowGarbageCollector()
        self._coexisting = False  # with another data plane
        self._verify_due = 0.0
        self._hook_states: Mapping[str, bool] = {}
        self._hook_error = ""
        self._foreign_at_sockets: tuple[ForeignProgram, ...] = ()
        self._logged_foreign: tuple[str, ...] = ()
        self.compiled = False
        self.publish_due = False
        """Whether publish() has to be called: the packet path was loaded in the background."""

    def end_coexistence(self) -> None:
        """No connections of another data plane are left. Does nothing if there were none."""
        if not self._coexisting:
            return
        if self._packet_path is not None:
            self._packet_path.end_coexistence()
        if self.settings is not None:
            self.settings.end_coexistence()
        self._coexisting = False

    # ---- opening ---------------------------------------------------------------------------

    def compile(self, cgroup: Path) -> None:
        """Loads the artifact of the socket programs from the cache, or compiles it. Changes nothing
        in the kernel. Raises CompileError or KernelError.
        """
        mode = self._config.socket_lb
        self._sockets = None
        if mode is SocketLb.OFF:
            return
        if mode is SocketLb.HOST_NAMESPACE_ONLY and netns.read_cookie() is None:
            raise KernelError(
                "this kernel cannot distinguish the node's sockets from those of pods",
                f"--socket-lb {mode}",
                "SO_NETNS_COOKIE is missing (Linux 5.14): use --socket-lb on or off",
            )
        artifact, self.compiled = compile.find_or_compile("sock", self._config.cache_dir)
        missing = missing_helpers()
        count_connection_ends = self._config.accounting is Accounting.FULL
        self._sockets = SocketPrograms(self._pins, artifact, cgroup, missing, count_connection_ends)

    def load(self, cgroup: Path, coexisting: bool) -> None:
        """Loads all programs over the open maps, without attaching them. `coexisting`: see
        base.DataPlane.open(). Raises CompileError or KernelError.
        """
        self._coexisting = coexisting
        maps = self._agent_maps.maps
        self.settings = HookConfig(
            self._config, maps["config"], missing_helpers(), self._coexisting
        )
        if self._sockets is not None:
            self._sockets.load(maps)
        self._postponed = self._can_postpone_packet_path()
        if not self._postponed:
            self._packet_path = self._open_packet_path()
        self.exemptions = self._open_exemptions(cgroup)

    def _can_postpone_packet_path(self) -> bool:
        """Whether the packet path may be loaded later: no program of an earlier agent serves, and
        the hooks serve all sockets until then (exemptions wait for the packet path).
        """
        return (
            self._sockets_first
            and self._config.packet_path
            and self._config.socket_lb is SocketLb.ON
            and not self._coexisting
            and not self._pins.links.is_dir()
            and not packet_path.has_programs(self._pins)
        )

    def retry_packet_path(self) -> None:
        """Tries again to load a packet path that could not be loaded."""
        if self._packet_path is None and self._problem:
            self._packet_path = self._open_packet_path()

    def _open_exemptions(self, cgroup: Path) -> Exemptions:
        try:
            root = mounts.find_cgroup_root()
        except KernelError:  # only a part of the tree is visible
            root = cgroup
        patterns = self._config.socket_lb_exempt
        exemptions = Exemptions(root, cgroup, patterns, self._agent_maps, self._update_exemptions)
        exemptions.adopt()
        return exemptions

    def _open_packet_path(self) -> PacketPath | None:
        """The packet path, or None if it is disabled or cannot be loaded. A failure is fatal only
        if the socket hooks do not serve all sockets.
        """
        if not self._config.packet_path:
            return None
        try:
            packet_path = self._compile_packets()
            packet_path.load(self._agent_maps.maps)
        except KbpfError as error:
            if self._config.socket_lb is not SocketLb.ON:
                raise
            self._record_packet_failure(error)
            return None
        self._record_packet_success()
        return packet_path

    def _compile_packets(self) -> PacketPath:
        artifact, _ = compile.find_or_compile("tc", self._config.cache_dir)
        return PacketPath(self._pins, artifact, self._config, self._coexisting)

    def _record_packet_failure(self, error: KbpfError) -> None:
        log.error("the packet path is not loaded, only sockets of this node are served: %s", error)
        self._problem = str(error)

    def _record_packet_success(self) -> None:
        self._problem = ""
        if (probe_result := probe.probe_softirq_lock()).works is False:
            log.warning("%s: %s", probe_result.reason, probe.NO_SOFTIRQ_LOCK_HINT)

    def _start_loading(self) -> None:
        maps = self._agent_maps.maps

        # Runs in the loader thread, so it must not write to self or to the maps.
        def load_packet_path() -> PacketPath:
            packet_path = self._compile_packets()
            packet_path.use(packet_path.prepare(maps))
            return packet_path

        self._loader = PacketPathLoader(load_packet_path)

    def use_loaded_packet_path(self) -> None:
        """Switches to the packet path that was loaded in the background, once it is complete;
        publish() is due then. A failure is reported as a problem, as at any other start.
        """
        if self._loader is None or not self._loader.is_done:
            return
        loader, self._loader, self._postponed = self._loader, None, False
        try:
            packet_path = loader.result()
            packet_path.write_maps(self._agent_maps.maps)
            if self._last_desired is not None:
                packet_path.write_node(self._last_desired)
        except KbpfError as error:
            self._record_packet_failure(error)
            return
        self._packet_path, self.publish_due = packet_path, True
        self._record_packet_success()

    # ---- maps and programs -----------------------------------------------------------------

    def write_node(self, desired: DesiredState) -> None:
        """Writes the node's addresses and networks for the packet programs."""
        self._last_desired = desired
        if self._packet_path is not None:
            self._packet_path.write_node(desired)

    def publish(self) -> int:
        """Attaches all programs. Returns the number of hook attachments that changed. If a device
        refuses the new programs, it keeps its old ones with their maps, and the sockets are served
        all the same.
        """
        changed = 0
        if self._packet_path is not None:
            try:
                self._switch_packet_path(self._packet_path)
            except OutdatedDevicesError as error:
                log.error("some devices keep the old packet programs: %s", error)
        else:
            self._handle_missing_packet_path()
        self._agent_maps.pin(packet_path_only=False)
        if self._sockets is not None:
            changed += self._sockets.publish()
        else:  # PinWatch.check() treats a missing folder as removed pins
            self._pins.links.mkdir(mode=0o700, exist_ok=True)
        self._update_exemptions()
        if self._postponed and self._loader is None:
            self._start_loading()
        self.publish_due = False
        return changed

    def _handle_missing_packet_path(self) -> None:
        """Handles packet programs of an earlier agent if ours cannot be loaded. They keep serving
        if they read the current maps; otherwise they are detached.
        """
        if self._problem and packet_path.has_programs(self._pins):
            if packet_path.reads_current_maps(self._pins, self._agent_maps.maps):
                return
            try:
                detached = packet_path.remove_programs(self._pins)
            except KernelError as error:
                log.error(
                    "cannot detach the old packet programs, which see no changes of Services: %s",
                    error,
                )
                return
            log.warning("detached the old packet programs attachments=%d", len(detached))
        self._agent_maps.pin(packet_path_only=True)

    def _switch_packet_path(self, packet_path: PacketPath) -> None:
        """Attaches the loaded programs to all devices."""
        if not packet_path.uses_other_flows(self._agent_maps.maps["flows"]):
            self._agent_maps.pin(packet_path_only=True)
            packet_path.publish()
            return
        # The programs change device by device, and a flow is seen on two devices. So no flow may
        # begin meanwhile, and both `flows` maps have to hold all flows before the first device
        # changes. Copying most entries before the pause keeps the pause short.
        self._agent_maps.migration.copy_new_flows()
        with migrate.pause_new_flows(self._agent_maps.maps["new_flows_paused_until"]):
            self._agent_maps.migration.copy_new_flows()
            self._agent_maps.pin(packet_path_only=True)
            packet_path.publish()

    def remove_unused_packet_path(self) -> None:
        """Detaches the packet programs of an earlier agent, and removes its host integration, if
        the packet path is disabled.
        """
        if self._packet_path is not None or self._problem or self._postponed:
            return
        packet_path.remove_programs(self._pins)
        if host.may_need_cleanup(self._pins):
            host.remove(self._pins)

    def catch_up(self) -> None:
        """Copies late writes to the old maps and removes these maps. Maps that devices still read
        are kept until all devices have switched.
        """
        maps_still_read: Collection[str] = ()
        if self._packet_path is None:
            if self._problem and packet_path.has_programs(self._pins):
                maps_still_read = [name for name, spec in MAPS.items() if spec.packet_path_only]
        elif not self._packet_path.is_rolled_out:
            maps_still_read = self._packet_path.map_names
        self._agent_maps.migration.catch_up(maps_still_read)
        self._switching = bool(maps_still_read)
        if not self._switching:
            pinning.remove_old_maps(self._pins)

    # ---- while it runs ---------------------------------------------------------------------

    def tick(self, now: float, first_apply_done: bool) -> float | None:
        """Maintains the packet path, the host integration and the exemptions; returns when to call
        next. `first_apply_done`: whether the first apply() has ended.
        """
        due = [now + LOAD_POLL_INTERVAL_S if self._loader is not None else None]
        if self._packet_path is not None and first_apply_done:
            self._host.poll(now)
            self._flow_gc.collect(self._agent_maps.maps["flows"], now)
            due.append(self._packet_path.activate(now))
            if self._switching:
                due.append(self._finish_switch(self._packet_path, now))
        if self._exemptions_pending:
            self._update_exemptions()
        if first_apply_done and self._sockets is not None:
            # needs no due time: the agent's heartbeat calls tick() often enough
            self._verify_hooks(self._sockets, now)
        due.append(self.exemptions.tick(now) if first_apply_done else None)
        return min((due_time for due_time in due if due_time is not None), default=None)

    def _verify_hooks(self, sockets: SocketPrograms, now: float) -> None:
        """Attaches hooks again that another program has detached, if a check is due."""
        if now < self._verify_due:
            return
        missing: list[str] = []
        try:
            self._hook_states = sockets.hook_states()
            missing = [name for name, is_running in self._hook_states.items() if not is_running]
            if missing:
                sockets.reattach()
                self._hook_states = sockets.hook_states()
                log.warning("hooks were missing and are attached again hooks=%s", ",".join(missing))
            self._hook_error = ""
        except KernelError as error:
            if str(error) != self._hook_error:
                log.error("hooks are not attached, retrying hooks=%s: %s", ",".join(missing), error)
            self._hook_error = str(error)
        self._foreign_at_sockets = sockets.find_foreign()
        all_attached = all(self._hook_states.values()) and not self._hook_error
        self._verify_due = now + (HOOK_VERIFY_INTERVAL_S if all_attached else HOOK_RETRY_INTERVAL_S)

    def foreign_programs(self) -> tuple[ForeignProgram, ...]:
        """Programs of other load balancers at our hooks and devices, as of the last check."""
        on_devices = self._packet_path.status().foreign if self._packet_path is not None else ()
        return (*self._foreign_at_sockets, *on_devices)

    def _report_foreign(self) -> tuple[str, ...]:
        """One line for each foreign program; new ones are logged."""
        lines = tuple(foreign.format_lines(self.foreign_programs()))
        for line in lines:
            if line not in self._logged_foreign:
                log.warning("%s", line)
        self._logged_foreign = lines
        return lines

    def hook_states(self) -> Mapping[str, bool]:
        """The hooks that should be attached, and whether each was at the last check."""
        return self._hook_states

    def faults(self) -> tuple[str, ...]:
        missing = [name for name, is_running in self._hook_states.items() if not is_running]
        if not missing:
            return (self._hook_error,) if self._hook_error else ()
        reason = f": {self._hook_error}" if self._hook_error else ""
        return (f"hooks not attached: {', '.join(missing)}{reason}",)

    def _finish_switch(self, packet_path: PacketPath, now: float) -> float | None:
        """Ends the switch from the maps of an earlier agent; returns when to call next, if it is
        not complete.
        """
        if not packet_path.is_rolled_out:
            return now + SWITCH_POLL_INTERVAL_S
        self.catch_up()
        return None

    def _update_exemptions(self) -> None:
        """Updates the exemption flags, or detaches the hooks if they are off. Either takes effect
        only once the packet path serves, unless it is disabled.
        """
        assert self.settings is not None
        may_exempt = self._may_exempt()
        self._exemptions_pending = not may_exempt
        if may_exempt and self._sockets is None:
            pinning.detach_sockets(self._pins)
        self.settings.set_exemptions(not self.exemptions.is_empty, may_exempt)

    def _may_exempt(self) -> bool:
        """Whether the packet path serves on all devices that accept it, or is disabled."""
        if self._packet_path is None:
            return not self._config.packet_path
        status = self._packet_path.status()
        return status.ready and not status.problem and not self._packet_path.is_passive

    def _all_programs(self) -> tuple[Programs, ...]:
        return tuple(
            programs for programs in (self._sockets, self._packet_path) if programs is not None
        )

    # ---- status ---------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the packet path is complete and active: all devices were processed, or cannot be.
        A packet path that is off, or could not be loaded, is not waited for.
        """
        if self._packet_path is None:
            return not self._postponed
        status = self._packet_path.status()
        return (status.ready or bool(status.problem)) and not self._packet_path.is_passive

    def packet_status(self) -> PacketStatus:
        status = (
            self._packet_path.status()
            if self._packet_path is not None
            else DeviceReconcilerStatus()
        )
        failed = status.failed
        return PacketStatus(
            enabled=self._config.packet_path,
            problem=self._problem or status.problem,
            devices=self._config.devices,
            excluded=self._config.excluded_devices,
            failed=tuple(
                DeviceFailure(name, failed[name]) for name in sorted(failed)[:MAX_FAILED_DEVICES]
            ),
            failed_count=len(failed),
        )

    def problems(self, now: float) -> tuple[str, ...]:
        lines = self.exemptions.problems(now)
        if self._packet_path is None and not self._postponed and not self.exemptions.is_empty:
            lines = (*lines, self._describe_exemptions())
        unmatched = self._packet_path.unmatched if self._packet_path is not None else ()
        lines = (*lines, *self._report_foreign())
        return (*lines, *(f"--device {pattern} matches no device" for pattern in unmatched))

    def _describe_exemptions(self) -> str:
        """What exempt cgroups get without a packet path."""
        assert self.settings is not None
        if not self._problem:
            return "exempt cgroups are not served: the packet path is off"
        if ConfigFlag.EXEMPTIONS in self.settings.flags:  # kept from an earlier agent
            return (
                "exempt cgroups are served only by packet programs of an earlier agent, if any are "
                "attached: the packet path is not loaded"
            )
        return "cgroups are not exempt yet: the packet path, which would serve them, is not loaded"

    # ---- closing ---------------------------------------------------------------------------

    def close(self) -> None:
        """Closes all descriptors; attachments stay."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
        pinning.close_all(self._all_programs())
