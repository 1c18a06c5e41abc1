"""What the data plane attaches: the socket hooks and the packet path, whom they leave alone, and
how both come over from what an earlier agent has left.

Maps come first: plane.py fills them, then publish() has all programs read them, then catch_up()
lets go of those that nobody reads any more. At a first start sockets do not wait for the packet
path (loading.py).
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.exemptions import Exemptions
from kbpf.dataplane.bpf.host import Beside
from kbpf.dataplane.bpf.maps import migrate, pinning
from kbpf.dataplane.bpf.maps.agent_maps import Tables
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import packet_path
from kbpf.dataplane.bpf.packet_path.background_load import POLL_SECONDS, Loading
from kbpf.dataplane.bpf.packet_path.device_thread import KeeperStatus
from kbpf.dataplane.bpf.packet_path.flow_gc import Orphans
from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.dataplane.bpf.programs import compile, foreign
from kbpf.dataplane.bpf.programs.foreign import Foreign
from kbpf.dataplane.bpf.programs.hook_config import HookSettings
from kbpf.dataplane.bpf.programs.loader import Programs, Ready, SocketPrograms, missing_helpers
from kbpf.errors import DevicesBehind, KbpfError, KernelError
from kbpf.kernel.bpf import probe
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts, netns
from kbpf.model.config import Accounting, Config, SocketLb
from kbpf.model.desired import DesiredState
from kbpf.model.status import MOST_FAILURES, DeviceFailure, PacketStatus

log = logging.getLogger("kbpf.dataplane")

VERIFY_SECONDS: Final = 30.0
"""So often the hooks are looked at: some three system calls for each."""

VERIFY_AGAIN_SECONDS: Final = 1.0
"""So often while one is missing."""

CHANGE_SECONDS: Final = 1.0
"""So often the devices are asked whether all have changed over."""


class Attached:
    """The programs of both kinds, over one folder of pins."""

    def __init__(
        self, config: Config, pins: Pins, tables: Tables, sockets_first: bool = False
    ) -> None:
        """`sockets_first`: they may be served before the packet path is loaded."""
        self._config, self._pins, self._tables = config, pins, tables
        self._sockets_first = sockets_first
        self._postponed = False  # whether the packet path is still to be loaded
        self._loading: Loading | None = None
        self._desired: DesiredState | None = None  # what a packet path that comes is told
        self.settings: HookSettings | None = None
        self._waits = False  # the packet path has to serve before the hooks leave somebody alone
        self._sockets: SocketPrograms | None = None
        self._packets: PacketPath | None = None
        self._problem = ""  # why there is no packet path though it is wanted
        self._changing = False  # over from maps that an earlier agent has left
        self._beside = Beside(pins, config)
        self._orphans = Orphans()
        self._follows = False  # another data plane
        self._verify_due = 0.0
        self._hooks: Mapping[str, bool] = {}
        self._hook_error = ""
        self._at_sockets: tuple[Foreign, ...] = ()
        self._foreign_lines: tuple[str, ...] = ()  # that have been logged
        self.compiled = False
        self._unloaded = False  # whether publish() has to load the programs first
        self.unpublished = False
        """Whether publish() is due since maps have been replaced."""

    def follow(self, other: bool) -> None:
        """Whether another data plane has connections here. See base.DataPlane."""
        self._follows = other
        if other:
            return
        if self._packets is not None:
            self._packets.alone()
        if self.settings is not None:
            self.settings.alone()

    # ---- opening ---------------------------------------------------------------------------

    def compile(self, cgroup: Path) -> None:
        """Takes the artifact of the socket programs, or makes it; nothing is in the kernel yet.
        Raises CompileError or KernelError.
        """
        mode = self._config.socket_lb
        self._sockets = None
        if mode is SocketLb.OFF:
            return
        if mode is SocketLb.HOST_ONLY and netns.cookie() is None:
            raise KernelError(
                "this kernel does not tell the node's sockets from those of pods",
                f"--socket-lb {mode}",
                "SO_NETNS_COOKIE is missing (Linux 5.14): use --socket-lb on or off",
            )
        artifact, self.compiled = compile.obtain("sock", self._config.cache_dir)
        lacks = missing_helpers()
        ends = self._config.accounting is Accounting.FULL
        self._sockets = SocketPrograms(self._pins, artifact, cgroup, lacks, ends)

    def load(self, cgroup: Path) -> None:
        """Loads all programs over the maps, which are open; nothing is attached yet. Raises
        CompileError or KernelError.
        """
        maps = self._tables.maps
        self.settings = HookSettings(self._config, maps["config"], missing_helpers(), self._follows)
        if self._sockets is not None:
            self._sockets.load(maps)
        self._postponed = self._can_wait()
        if not self._postponed:
            self._packets = self._open_packet_path()
        self.exemptions = self._open_exemptions(cgroup)

    def _can_wait(self) -> bool:
        """Whether nothing that is served now, and nobody whom hooks leave to the packet path, would
        miss it for a moment.
        """
        return (
            self._sockets_first
            and self._config.packet_path
            and self._config.socket_lb is SocketLb.ON
            and not self._follows
            and not self._pins.links.is_dir()
            and not packet_path.is_there(self._pins)
        )

    def try_again(self) -> None:
        """Whether a packet path that could not be had can be had now."""
        if self._packets is None and self._problem:
            self._packets = self._open_packet_path()

    def _open_exemptions(self, cgroup: Path) -> Exemptions:
        try:
            root = mounts.cgroup_root()
        except KernelError:  # only a part of it is visible
            root = cgroup
        patterns = self._config.socket_lb_exempt
        made = Exemptions(root, cgroup, patterns, self._tables, self._leave_alone)
        made.adopt()
        return made

    def _open_packet_path(self) -> PacketPath | None:
        """The packet path, or None where it is switched off or cannot be had: the socket hooks
        do without it, if they serve everybody.
        """
        if not self._config.packet_path:
            return None
        try:
            packets = self._compile_packets()
            packets.load(self._tables.maps)
        except KbpfError as error:
            if self._config.socket_lb is not SocketLb.ON:
                raise
            self._refused(error)
            return None
        self._accepted()
        return packets

    def _compile_packets(self) -> PacketPath:
        artifact, _ = compile.obtain("tc", self._config.cache_dir)
        return PacketPath(self._pins, artifact, self._config, self._follows)

    def _refused(self, error: KbpfError) -> None:
        log.error("no packet path: only sockets of this node are served: %s", error)
        self._problem = str(error)

    def _accepted(self) -> None:
        self._problem = ""
        if (lock := probe.softirq_lock()).works is False:
            log.warning("%s: %s", lock.reason, probe.NO_SOFTIRQ_LOCK)

    def _begin_loading(self) -> None:
        maps = self._tables.maps

        def make() -> PacketPath:
            packets = self._compile_packets()
            packets.take(packets.prepare(maps))
            return packets

        self._loading = Loading(make)

    def take_packets(self) -> None:
        """Has the packet path that was postponed, as soon as it is loaded; publish() is due then.
        One that cannot be had is a problem, as at any other start.
        """
        if self._loading is None or not self._loading.is_done:
            return
        loading, self._loading, self._postponed = self._loading, None, False
        try:
            packets = loading.take()
            packets.describe_maps(self._tables.maps)
            if self._desired is not None:
                packets.describe_node(self._desired)
        except KbpfError as error:
            self._refused(error)
            return
        self._packets, self.unpublished = packets, True
        self._accepted()

    # ---- the maps that they read -----------------------------------------------------------

    def describe_node(self, desired: DesiredState) -> None:
        """What the packet programs are told of the node."""
        self._desired = desired
        if self._packets is not None:
            self._packets.describe_node(desired)

    def prepare(self, maps: Mapping[str, Map]) -> Mapping[Programs, Ready]:
        """Loads all programs over these maps, for switch(). Any thread."""
        made: dict[Programs, Ready] = {}
        try:
            for programs in self._all_programs():
                made[programs] = programs.prepare(maps)
        except BaseException:
            pinning.close_all(made.values())
            raise
        return made

    def fall_behind(self) -> None:
        """Maps are about to be replaced: publish() is due, and loads the programs unless switch()
        has brought them. Those that are being loaded are begun again over the new maps.
        """
        if self._loading is not None:
            self._loading.close()
            self._loading = None
        self._unloaded = self.unpublished = True

    def switch(self, made: Mapping[Programs, Ready]) -> None:
        """Has these programs from now on; publish() attaches them."""
        wanted = self._all_programs()
        for programs, ready in made.items():
            if programs in wanted:
                programs.take(ready)
            else:
                ready.close()
        self._unloaded = not made.keys() >= set(wanted)

    def out_of_step(self, services: int) -> bool:
        """Whether attached programs read the `services` of this id and not the rest of the maps.
        See Programs.out_of_step().
        """
        return any(p.out_of_step(services, self._tables.maps) for p in self._all_programs())

    def publish(self) -> int:
        """Attaches everything; how many attachments of hooks changed. A device that refuses must
        not keep the sockets from being served: it goes on with what it has, whole.
        """
        changed = 0
        if self._unloaded:
            for programs in self._all_programs():
                programs.load(self._tables.maps)
            self._unloaded = False
        if self._packets is not None:
            try:
                self._change_over(self._packets)
            except DevicesBehind as error:
                log.error("the packet path is not whole: %s", error)
        else:
            self._without_packets()
        self._tables.pin(packet=False)
        if self._sockets is not None:
            changed += self._sockets.publish()
        else:  # by this folder the plane knows that nobody has removed the pins
            self._pins.links.mkdir(mode=0o700, exist_ok=True)
        self._leave_alone()
        if self._postponed and self._loading is None:
            self._begin_loading()
        self.unpublished = False
        return changed

    def _without_packets(self) -> None:
        """What another agent has left on devices, though we cannot have it now, goes on as long as
        it sees what is flipped: then it serves as before. Else it is taken off.
        """
        if self._problem and packet_path.is_there(self._pins):
            if packet_path.follows(self._pins, self._tables.maps):
                return
            try:
                gone = packet_path.remove(self._pins)
            except KernelError as error:
                log.error("older packet programs stay, and know no changes: %s", error)
                return
            log.warning("older packet programs are taken off attachments=%d", len(gone))
        self._tables.pin(packet=True)

    def _change_over(self, packets: PacketPath) -> None:
        """All devices get the programs that are loaded."""
        if not packets.tracks_elsewhere(self._tables.maps["flows"]):
            self._tables.pin(packet=True)
            packets.publish()
            return
        self._tables.moves.bring_flows()  # most of them, before anybody has to wait
        with migrate.pause(self._tables.maps["paused"]):
            self._tables.moves.bring_flows()
            self._tables.pin(packet=True)
            packets.publish()

    def remove_unwanted(self) -> None:
        """Takes off what an earlier agent had for a packet path, where none is wanted."""
        if self._packets is None and not self._problem and not self._postponed:
            self.remove_packet_path()

    def remove_packet_path(self) -> None:
        """Takes its programs off the devices, and what it has beside them. The hooks go with their
        pins.
        """
        packet_path.remove(self._pins)
        if host.may_hold(self._pins):
            host.remove(self._pins)

    def catch_up(self) -> None:
        """What was written to the maps of before comes after, and they go: those that devices read
        only when all of these have changed over.
        """
        still_read: Collection[str] = ()
        if self._packets is None:
            if self._problem and packet_path.is_there(self._pins):
                still_read = [name for name, spec in MAPS.items() if spec.packet]
        elif not self._packets.everywhere:
            still_read = self._packets.reads
        self._tables.moves.catch_up(still_read)
        self._changing = bool(still_read)
        if not self._changing:
            pinning.remove_old_maps(self._pins)

    # ---- while it runs ---------------------------------------------------------------------

    def tick(self, now: float, complete: bool) -> float | None:
        """Looks after what the packet path needs beside itself, and after exempt cgroups; when to
        come next. `complete`: whether the first apply has ended.
        """
        due = [now + POLL_SECONDS if self._loading is not None else None]
        if self._packets is not None and complete:
            self._beside.look(now)
            self._orphans.look(self._tables.maps["flows"], now)
            due.append(self._packets.lead(now))
            if self._changing:
                due.append(self._end_change(self._packets, now))
        if self._waits:
            self._leave_alone()
        if complete and self._sockets is not None:
            self._verify(self._sockets, now)  # the agent's heartbeat comes often enough
        due.append(self.exemptions.tick(now) if complete else None)
        return min((one for one in due if one is not None), default=None)

    def _verify(self, sockets: SocketPrograms, now: float) -> None:
        """Puts back hooks that others have taken away, if it is time to look."""
        if now < self._verify_due:
            return
        gone: list[str] = []
        try:
            self._hooks = sockets.state()
            gone = [name for name, runs in self._hooks.items() if not runs]
            if gone:
                sockets.attach_again()
                self._hooks = sockets.state()
                log.warning("hooks were missing and are attached again hooks=%s", ",".join(gone))
            self._hook_error = ""
        except KernelError as error:
            if str(error) != self._hook_error:
                log.error(
                    "hooks are not attached, trying again hooks=%s: %s", ",".join(gone), error
                )
            self._hook_error = str(error)
        self._at_sockets = sockets.foreign()
        ok = all(self._hooks.values()) and not self._hook_error
        self._verify_due = now + (VERIFY_SECONDS if ok else VERIFY_AGAIN_SECONDS)

    def foreign(self) -> tuple[Foreign, ...]:
        """Programs of other balancers at our hooks and on our devices, when it was looked last."""
        packets = self._packets.status().foreign if self._packets is not None else ()
        return (*self._at_sockets, *packets)

    def _tell_of_foreign(self) -> tuple[str, ...]:
        """A line for each; those that are new are logged."""
        found = tuple(foreign.lines(self.foreign()))
        for line in found:
            if line not in self._foreign_lines:
                log.warning("%s", line)
        self._foreign_lines = found
        return found

    def hooks(self) -> Mapping[str, bool]:
        """The hooks that are wanted, and whether each was attached when it was looked at last."""
        return self._hooks

    def faults(self) -> tuple[str, ...]:
        """See base.DataPlane."""
        missing = [name for name, runs in self._hooks.items() if not runs]
        if not missing:
            return (self._hook_error,) if self._hook_error else ()
        why = f": {self._hook_error}" if self._hook_error else ""
        return (f"hooks that are not attached: {', '.join(missing)}{why}",)

    def _end_change(self, packets: PacketPath, now: float) -> float | None:
        """Ends what the first apply had to put off; when to come next."""
        if not packets.everywhere:
            return now + CHANGE_SECONDS
        self.catch_up()
        return None

    def _leave_alone(self) -> None:
        """Tells the hooks whom to leave alone, or takes them away, once the packet path serves."""
        assert self.settings is not None
        served = self._serves_packets()
        self._waits = not served
        if served and self._sockets is None:
            pinning.detach_sockets(self._pins)
        self.settings.leave_alone(not self.exemptions.is_empty, served)

    def _serves_packets(self) -> bool:
        """Whether the packet path is on all devices that it can be on, or not wanted at all."""
        if self._packets is None:
            return not self._config.packet_path
        status = self._packets.status()
        return status.ready and not status.problem and not self._packets.yields

    def _all_programs(self) -> tuple[Programs, ...]:
        return tuple(p for p in (self._sockets, self._packets) if p is not None)

    # ---- what is told ----------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether all devices had their turn, and their programs lead. See base.DataPlane."""
        if self._packets is None:
            return not self._postponed
        status = self._packets.status()
        return (status.ready or bool(status.problem)) and not self._packets.yields

    def packet_status(self) -> PacketStatus:
        """See base.DataPlane."""
        status = self._packets.status() if self._packets is not None else KeeperStatus()
        failed = status.failed
        return PacketStatus(
            wanted=self._config.packet_path,
            problem=self._problem or status.problem,
            devices=self._config.devices,
            excluded=self._config.excluded_devices,
            failed=tuple(
                DeviceFailure(name, failed[name]) for name in sorted(failed)[:MOST_FAILURES]
            ),
            failed_count=len(failed),
        )

    def problems(self, now: float) -> tuple[str, ...]:
        """See base.DataPlane."""
        lines = self.exemptions.problems(now)
        if self._packets is None and not self._postponed and not self.exemptions.is_empty:
            lines = (*lines, "exempt cgroups are served by nobody: the packet path is off")
        unmatched = self._packets.unmatched if self._packets is not None else ()
        lines = (*lines, *self._tell_of_foreign())
        return (*lines, *(f"--device {pattern} names no device" for pattern in unmatched))

    # ---- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Lets go of all descriptors; attachments stay."""
        if self._loading is not None:
            self._loading.close()
            self._loading = None
        pinning.close_all(self._all_programs())
