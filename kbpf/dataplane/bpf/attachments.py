# SPDX-License-Identifier: Apache-2.0
"""Attaches the socket hooks and the packet path, and keeps them attached.

plane.py first fills the maps, then publish() makes all programs read them, then catch_up() of the
packet path releases the maps that no program reads any more. At a first start the sockets do not
wait for the packet path (packet_path/lifecycle.py).
"""

import logging
from pathlib import Path

from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.exemptions import Exemptions
from kbpf.dataplane.bpf.host import HostIntegration
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.layout import ConfigFlag
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import packet_path
from kbpf.dataplane.bpf.packet_path.device_roles import describe_left_out, describe_limited
from kbpf.dataplane.bpf.packet_path.flow_gc import FlowGarbageCollector
from kbpf.dataplane.bpf.packet_path.lifecycle import PacketPathLifecycle
from kbpf.dataplane.bpf.programs import foreign
from kbpf.dataplane.bpf.programs.foreign import ForeignProgram
from kbpf.dataplane.bpf.programs.hook_config import HookConfig
from kbpf.dataplane.bpf.programs.loader import missing_helpers
from kbpf.dataplane.bpf.socket_hooks import SocketHooks
from kbpf.errors import KernelError
from kbpf.kernel.system import mounts
from kbpf.model.config import Config

log = logging.getLogger("kbpf.dataplane")


class Attachments:
    """The socket programs and the packet path over one pin folder."""

    def __init__(self, config: Config, pins: Pins, agent_maps: AgentMaps, sockets_first: bool = False) -> None:
        """`sockets_first`: attach the socket hooks before the packet path is loaded."""
        self._config, self._pins, self._agent_maps = config, pins, agent_maps
        self.settings: HookConfig | None = None
        # The packet path has to serve exempt sockets before the hooks ignore them.
        self._exemptions_pending = False
        self.hooks = SocketHooks(config, pins)
        self.packets = PacketPathLifecycle(config, pins, agent_maps, sockets_first)
        self._host = HostIntegration(pins, config)
        self._flow_gc = FlowGarbageCollector()
        self._logged_foreign: tuple[str, ...] = ()

    def end_coexistence(self) -> None:
        """No connections of another data plane are left. Does nothing if there were none. If a
        write fails, the next call repeats it.
        """
        if not self.packets.coexisting:
            return
        if self.packets.current is not None:
            self.packets.current.end_coexistence()
        if self.settings is not None:
            self.settings.end_coexistence()
        self.packets.coexisting = False

    # ---- opening ---------------------------------------------------------------------------

    def choose_forwarding(self) -> Config:
        """See HostIntegration.choose_forwarding(); returns the settings."""
        self._config, reason = self._host.choose_forwarding(self._config)
        self.packets.use_forwarding(self._config, reason)
        return self._config

    def compile(self, cgroup: Path) -> None:
        """Prepares the socket programs. Changes nothing in the kernel. Raises CompileError or
        KernelError.
        """
        self.hooks.compile(cgroup, missing_helpers())

    def load(self, cgroup: Path, coexisting: bool) -> None:
        """Loads all programs over the open maps, without attaching them. `coexisting`: see
        base.DataPlane.open(). Raises CompileError or KernelError.
        """
        self.packets.coexisting = coexisting
        maps = self._agent_maps.maps
        self.settings = HookConfig(self._config, maps["config"], missing_helpers(), self.packets.coexisting)
        self.hooks.load(maps)
        self.packets.load()
        self.exemptions = self._open_exemptions(cgroup)

    def _open_exemptions(self, cgroup: Path) -> Exemptions:
        try:
            root = mounts.find_cgroup_root()
        except KernelError:  # only a part of the tree is visible
            root = cgroup
        patterns = self._config.socket_lb_exempt
        exemptions = Exemptions(root, cgroup, patterns, self._agent_maps, self._update_exemptions)
        exemptions.adopt()
        return exemptions

    # ---- maps and programs -----------------------------------------------------------------

    def publish(self) -> int:
        """Attaches all programs. Returns the number of hook attachments that changed. If a device
        refuses the new programs, it keeps its old ones with their maps, and the sockets are served
        all the same.
        """
        self.packets.publish()
        self._agent_maps.pin(packet_path_only=False)
        changed = self.hooks.publish()
        if self.settings is not None:
            self.settings.set_tracing(self.hooks.notice_failures)
        self._update_exemptions()
        self.packets.start_loading()
        self.packets.publish_due = False
        return changed

    def remove_unused_packet_path(self) -> None:
        """Detaches the packet programs of an earlier agent, and removes its host integration, if
        the packet path is disabled.
        """
        packets = self.packets
        if packets.current is not None or packets.problem or packets.postponed:
            return
        packet_path.remove_programs(self._pins)
        if host.may_need_cleanup(self._pins):
            host.remove(self._pins)

    # ---- while it runs ---------------------------------------------------------------------

    def tick(self, now: float, first_apply_done: bool) -> float | None:
        """Maintains the packet path and the exemptions; returns when to call next.
        `first_apply_done`: whether the first apply() has ended.
        """
        due = [self.packets.loader_due(now)]
        if self.packets.current is not None and first_apply_done:
            self._flow_gc.collect(self._agent_maps.maps, now, self.packets.is_switched)
            due.append(self.packets.current.activate(now))
            due.append(self.packets.finish_switch(now))
        if self._exemptions_pending:
            self._update_exemptions()
        if first_apply_done:
            # needs no due time: the agent's heartbeat calls tick() often enough
            self.hooks.verify(now)
            due.append(self.exemptions.tick(now))
        return min((due_time for due_time in due if due_time is not None), default=None)

    def maintain_host(self, now: float) -> None:
        """Maintains the host integration. Called by another thread than the rest, after the first
        apply().
        """
        if self.packets.current is None:
            return
        if not self.packets.config.uses_conntrack:
            self._host.leave_conntrack()
        self._host.poll(now)

    def foreign_programs(self) -> tuple[ForeignProgram, ...]:
        """Programs of other load balancers at our hooks and devices, as of the last check."""
        packet_path = self.packets.current
        on_devices = packet_path.status().foreign if packet_path is not None else ()
        return (*self.hooks.foreign, *on_devices)

    @property
    def bypassed_chains(self) -> int | None:
        """How many chains of the host may refuse packets but do not guard NodePorts; None without a
        packet path.
        """
        bypassed = self._host.bypassed
        return len(bypassed.chains) + len(bypassed.unreadable) if self.packets.current else None

    def _report_foreign(self) -> tuple[str, ...]:
        """One line for each foreign program; new ones are logged."""
        lines = tuple(foreign.format_lines(self.foreign_programs()))
        for line in lines:
            if line not in self._logged_foreign:
                log.warning("%s", line)
        self._logged_foreign = lines
        return lines

    def _update_exemptions(self) -> None:
        """Updates the exemption flags, or detaches the hooks if they are off. Either takes effect
        only once the packet path serves, unless it is disabled.
        """
        assert self.settings is not None
        may_exempt = self.packets.serves_all()
        self._exemptions_pending = not may_exempt
        if may_exempt and self.hooks.programs is None:
            pinning.detach_sockets(self._pins)
        self.settings.set_exemptions(not self.exemptions.is_empty, may_exempt)

    # ---- status ---------------------------------------------------------------------------

    def problems(self, now: float) -> tuple[str, ...]:
        lines = self.exemptions.problems(now)
        packets = self.packets
        if packets.current is None and not packets.postponed and not self.exemptions.is_empty:
            lines = (*lines, self._describe_exemptions())
        unmatched = packets.current.unmatched if packets.current is not None else ()
        lines = (*lines, *self._report_foreign(), *self._host.problems())
        if packets.current is not None and (limited := packets.current.status().limited):
            lines = (*lines, describe_limited(limited))
        if packets.current is not None and (count := packets.current.left_out_count):
            lines = (*lines, describe_left_out(count))
        return (*lines, *(f"--device {pattern} matches no device" for pattern in unmatched))

    def _describe_exemptions(self) -> str:
        """What exempt cgroups get without a packet path."""
        assert self.settings is not None
        if not self.packets.problem:
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
        self.packets.close_loader()
        pinning.close_all(programs for programs in (self.hooks.programs, self.packets.current) if programs is not None)
