# SPDX-License-Identifier: Apache-2.0
"""Loads the packet path, at once or in the background, and switches devices from the programs and
maps of an earlier agent to it.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from kbpf.dataplane.bpf.maps import migrate, pinning
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import packet_path
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconcilerStatus
from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.dataplane.bpf.programs import compile
from kbpf.errors import KbpfError, KernelError, OutdatedDevicesError
from kbpf.kernel.bpf import probe
from kbpf.kernel.system import threads
from kbpf.model.config import Config, SocketLb
from kbpf.model.desired import DesiredState
from kbpf.model.status import MAX_FAILED_DEVICES, DeviceFailure, PacketStatus

log = logging.getLogger("kbpf.dataplane")

SWITCH_POLL_INTERVAL_S: Final = 1.0
"""Interval between two checks whether all devices run the new programs."""


class PacketPathLifecycle:
    """The packet path of one agent.

    - `current`: None if it is off, not loaded yet, or cannot be loaded; `problem` is then why.
    - `coexisting`: whether connections of another data plane still exist on this node.
    - `publish_due`: it was loaded in the background, so the programs have to be published again.
    - `config`: the settings, with the value of --forwarding that is in force.
    """

    def __init__(self, config: Config, pins: Pins, agent_maps: AgentMaps, sockets_first: bool) -> None:
        self.config, self._pins, self._agent_maps = config, pins, agent_maps
        self._may_fall_back = config.forwarding == "auto"
        self._fallback = ""  # why --forwarding auto is not netfilter
        self._sockets_first = sockets_first
        self.coexisting = False
        self.postponed = False  # whether it is loaded later, in the background
        self._loader: PacketPathLoader | None = None
        self._last_desired: DesiredState | None = None  # for a packet path that is loaded later
        self.current: PacketPath | None = None
        self.problem = ""
        self._switching = False  # whether devices still read the maps of an earlier agent
        self.publish_due = False

    def use_forwarding(self, config: Config, fallback: str) -> None:
        """`config` has the value of --forwarding that is in force; `fallback`: see PacketStatus."""
        self.config, self._fallback = config, fallback
        if fallback:
            log.warning(
                "forwarding=stack: rules before DNAT do not guard NodePorts, since conntrack "
                "cannot translate on this node: %s",
                fallback,
            )

    def load(self) -> None:
        """Loads the programs over the open maps, without attaching them, or postpones that. Raises
        CompileError or KernelError.
        """
        self.postponed = self._can_postpone()
        if not self.postponed:
            self.current = self._open()

    def _can_postpone(self) -> bool:
        """Whether the packet path may be loaded later: no program of an earlier agent serves, and
        the hooks serve all sockets until then (exemptions wait for the packet path).
        """
        return (
            self._sockets_first
            and self.config.packet_path
            and self.config.socket_lb is SocketLb.ON
            and not self.coexisting
            and not self._pins.links.is_dir()
            and not packet_path.has_programs(self._pins)
        )

    def retry(self) -> None:
        """Tries again to load a packet path that could not be loaded."""
        if self.current is None and self.problem:
            self.current = self._open()

    def _open(self) -> PacketPath | None:
        """The packet path, or None if it is disabled or cannot be loaded. A failure is fatal only
        if the socket hooks do not serve all sockets.
        """
        if not self.config.packet_path:
            return None
        try:
            packet_path = self._load_packets(lambda path: path.load(self._agent_maps.maps))
        except KbpfError as error:
            if self.config.socket_lb is not SocketLb.ON:
                raise
            self._record_packet_failure(error)
            return None
        self._record_packet_success(packet_path)
        return packet_path

    def _load_packets(self, load: Callable[[PacketPath], object]) -> PacketPath:
        """Compiles the programs, and calls `load` with them. With --forwarding auto, a kernel that
        refuses them gets those without conntrack.
        """
        artifact, _ = compile.find_or_compile("tc", self.config.cache_dir)
        packet_path = PacketPath(self._pins, artifact, self.config, self.coexisting)
        try:
            load(packet_path)
        except KernelError as error:
            if not self._may_fall_back or not self.config.uses_conntrack:
                raise
            config = replace(self.config, forwarding="stack")
            packet_path = PacketPath(self._pins, artifact, config, self.coexisting)
            packet_path.fallback = str(error)
            load(packet_path)
        return packet_path

    def _record_packet_failure(self, error: KbpfError) -> None:
        log.error("the packet path is not loaded, only sockets of this node are served: %s", error)
        self.problem = str(error)

    def _record_packet_success(self, packet_path: PacketPath) -> None:
        self.problem = ""
        if packet_path.fallback:
            self.use_forwarding(packet_path.config, packet_path.fallback)
        if (probe_result := probe.probe_softirq_lock()).works is False:
            log.warning("%s: %s", probe_result.reason, probe.NO_SOFTIRQ_LOCK_HINT)

    def start_loading(self) -> None:
        """Starts to load it in the background, if that was postponed."""
        if not self.postponed or self._loader is not None:
            return
        maps = self._agent_maps.maps

        # Runs in the loader thread, so it must not write to self or to the maps.
        def load_packet_path() -> PacketPath:
            return self._load_packets(lambda path: path.use(path.prepare(maps)))

        self._loader = PacketPathLoader(load_packet_path)

    def use_loaded(self) -> None:
        """Switches to the packet path that was loaded in the background, once it is complete;
        publishing is due then. A failure is reported as a problem, as at any other start.
        """
        if self._loader is None or not self._loader.is_done:
            return
        loader, self._loader, self.postponed = self._loader, None, False
        try:
            packet_path = loader.result()
            packet_path.write_maps(self._agent_maps.maps)
            if self._last_desired is not None:
                packet_path.write_node(self._last_desired)
        except KbpfError as error:
            self._record_packet_failure(error)
            return
        self.current, self.publish_due = packet_path, True
        self._record_packet_success(packet_path)

    def write_node(self, desired: DesiredState) -> None:
        """Writes the node's addresses and networks for the packet programs."""
        self._last_desired = desired
        if self.current is not None:
            self.current.write_node(desired)

    def publish(self) -> None:
        """Attaches the programs. If a device refuses the new programs, it keeps its old ones with
        their maps, and the sockets are served all the same.
        """
        if self.current is None:
            self._handle_missing()
            return
        try:
            self._switch(self.current)
        except OutdatedDevicesError as error:
            log.error("some devices keep the old packet programs: %s", error)

    def _handle_missing(self) -> None:
        """Handles packet programs of an earlier agent if ours cannot be loaded. They keep serving
        if they read the current maps; otherwise they are detached.
        """
        if self.problem and packet_path.has_programs(self._pins):
            if packet_path.reads_current_maps(self._pins, self._agent_maps.maps):
                return
            try:
                detached = packet_path.remove_programs(self._pins)
            except KernelError as error:
                log.error("cannot detach the old packet programs, which see no changes of Services: %s", error)
                return
            log.warning("detached the old packet programs attachments=%d", len(detached))
        self._agent_maps.pin(packet_path_only=True)

    def _switch(self, packet_path: PacketPath) -> None:
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

    def catch_up(self) -> None:
        """Copies late writes to the old maps and removes these maps. Maps that devices still read
        are kept until all devices have switched.
        """
        maps_still_read: Collection[str] = ()
        if self.current is None:
            if self.problem and packet_path.has_programs(self._pins):
                maps_still_read = [name for name, spec in MAPS.items() if spec.packet_path_only]
        elif not self.current.is_rolled_out:
            maps_still_read = self.current.map_names
        self._agent_maps.migration.catch_up(maps_still_read)
        self._switching = bool(maps_still_read)
        if not self._switching:
            pinning.remove_old_maps(self._pins)

    @property
    def is_switched(self) -> bool:
        """Whether all devices run the current programs, which use the current maps."""
        return self.current is not None and self.current.is_rolled_out and not self._switching

    def loader_due(self, now: float) -> float | None:
        """When to call use_loaded(); None if nothing is being loaded."""
        return now + LOAD_POLL_INTERVAL_S if self._loader is not None else None

    def finish_switch(self, now: float) -> float | None:
        """Ends the switch from the maps of an earlier agent; returns when to call next, if it is
        not complete.
        """
        if not self._switching or self.current is None:
            return None
        if not self.current.is_rolled_out:
            return now + SWITCH_POLL_INTERVAL_S
        self.catch_up()
        return None

    def serves_all(self) -> bool:
        """Whether the packet path serves on all devices that accept it, or is disabled."""
        if self.current is None:
            return not self.config.packet_path
        status = self.current.status()
        return status.ready and not status.problem and not self.current.is_passive

    def ready(self) -> bool:
        """Whether the packet path is complete and active: all devices were processed, or cannot be.
        A packet path that is off, or could not be loaded, is not waited for.
        """
        if self.current is None:
            return not self.postponed
        status = self.current.status()
        return (status.ready or bool(status.problem)) and not self.current.is_passive

    def status(self) -> PacketStatus:
        status = self.current.status() if self.current is not None else DeviceReconcilerStatus()
        failed = status.failed
        return PacketStatus(
            enabled=self.config.packet_path,
            problem=self.problem or status.problem,
            devices=self.config.devices,
            excluded=self.config.excluded_devices,
            failed=tuple(DeviceFailure(name, failed[name]) for name in sorted(failed)[:MAX_FAILED_DEVICES]),
            failed_count=len(failed),
            forwarding=self.config.forwarding,
            fallback=self._fallback,
        )

    def close_loader(self) -> None:
        """Waits until no thread uses the maps."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None


# ---- loading in the background -------------------------------------------------------------------


LOAD_TIMEOUT_S: Final = 360.0
"""If compiling and loading take longer than this, the thread counts as stuck."""

LOAD_POLL_INTERVAL_S: Final = 0.02
"""Interval between two checks whether the thread is done."""


class PacketPathLoader:
    """Loads the packet programs in a thread, while the socket hooks already serve. The caller has
    to end it with result() or close().

    Verifying them takes most of a second, and compiling them takes several. At a first start there
    are no packet programs of an earlier agent to replace, so the main thread attaches the socket
    hooks first. The thread uses the maps' descriptors only to load programs: it writes to none of
    these maps, and attaches nothing. The main thread takes its result and publishes it.
    """

    def __init__(self, load: Callable[[], PacketPath]) -> None:
        """Starts a thread that calls `load`. Raises KernelError if no thread can be started."""
        self._load = load
        self._outcome: PacketPath | KbpfError | None = None
        self._thread = threads.start("packet-programs", self._run, LOAD_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._outcome = self._load()
        except KbpfError as error:
            self._outcome = error

    @property
    def is_done(self) -> bool:
        """Whether result() would return at once."""
        return self._outcome is not None

    def result(self) -> PacketPath:
        """Waits for the packet path, and returns it. Raises the KbpfError that `load` raised."""
        self._thread.stop(LOAD_TIMEOUT_S)
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, KbpfError):
            raise outcome
        assert outcome is not None
        return outcome

    def close(self) -> None:
        """Waits until the thread no longer uses the maps, and closes what it has loaded."""
        self._thread.stop(LOAD_TIMEOUT_S)
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, PacketPath):
            outcome.close()
