# SPDX-License-Identifier: Apache-2.0
"""The packet path: the programs of the unit `tc` on the devices of the node.

It is independent of the socket hooks: if the kernel refuses these programs, Services still work for
sockets of the node and its pods, and the reason is logged. The device thread attaches the programs
(device_thread.py).
"""

import errno
import itertools
import logging
import shutil
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.hooks import (
    ENTRY_READERS,
    TAIL_CALL_SLOTS,
    loaded_packet_programs,
)
from kbpf.dataplane.bpf.maps.layout import TAIL_CALL_MAP, U32, NodeFlag
from kbpf.dataplane.bpf.maps.pinning import (
    NEW_PREFIX,
    OLD_PREFIX,
    SERVICES_TARGETS,
    Pins,
    close_all,
    map_ids_read_by,
    packet_program_folders,
)
from kbpf.dataplane.bpf.packet_path.attach import DeviceAttachments, PickProgram
from kbpf.dataplane.bpf.packet_path.device_roles import (
    DeviceRole,
    RoleChoice,
    count_left_out,
    find_unmatched,
)
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconciler, DeviceReconcilerStatus
from kbpf.dataplane.bpf.packet_path.node_maps import (
    NO_COEXISTENCE,
    DeviceMap,
    NodeMap,
    write_refusal_limits,
)
from kbpf.dataplane.bpf.programs.artifact import Artifact, Bytecode
from kbpf.dataplane.bpf.programs.hook_probe import HookProber
from kbpf.dataplane.bpf.programs.loader import (
    LoadedPrograms,
    ProgramSet,
    missing_packet_helpers,
    relocate,
)
from kbpf.errors import KernelError
from kbpf.kernel.bpf import kfuncs, uapi
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.bpf.tc import Attachment
from kbpf.kernel.net.devices import Device
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState

log = logging.getLogger("kbpf.dataplane")

PASSIVE_PERIOD_S: Final = 4.0
"""If another data plane serves, our programs stay passive for this long after they are attached
everywhere. Attaching loses packets (with clsact the kernel drops egress packets meanwhile), so a
SYN may be retransmitted after one second and again after two more (RFC 6298). If the other data
plane saw the first SYN before our programs were attached, it has to get the retransmissions too.
"""
ACTIVATE_POLL_INTERVAL_S: Final = 0.5
"""Interval between two checks whether the programs are attached everywhere."""


@dataclass(frozen=True, slots=True)
class PacketGeneration:
    """Programs over one set of maps, as a ProgramGeneration of the device thread."""

    programs: Mapping[str, Program]
    private_maps: Mapping[str, Map]

    @property
    def pick(self) -> PickProgram:
        """Does not depend on the role: the programs read it from the map `devices`."""
        return self._pick

    def _pick(self, _: Device, __: DeviceRole, direction: Direction) -> Program | None:
        return self.programs["tc_ingress" if direction is Direction.INGRESS else "tc_egress"]

    def close(self) -> None:
        close_all((*self.programs.values(), *self.private_maps.values()))


class PacketPath(ProgramSet):
    """The packet programs, their tail call map, and the devices that they are attached to."""

    private_map_names = (TAIL_CALL_MAP,)

    def __init__(self, pins: Pins, artifact: Artifact, config: Config, coexisting: bool = False) -> None:
        """`coexisting`: whether another data plane has connections on this node. `fallback` (to be
        set): why the kernel refused the programs that `--forwarding auto` would choose.
        """
        super().__init__(pins, artifact, missing_packet_helpers())
        self.config, self.fallback = config, ""
        self._coexisting = coexisting
        # since when the programs are attached to all devices (time.monotonic)
        self._in_place_since: float | None = None
        self._attachments = DeviceAttachments(pins.root, config.devices, config.excluded_devices)
        self._reconciler = DeviceReconciler(self._attachments, self._write_devices, self._remove_old_programs)
        self._node_and_device_maps: tuple[NodeMap, DeviceMap] | None = None
        self.unmatched: tuple[str, ...] = ()
        self.left_out_count = 0
        """Patterns of --device that matched no device in the last listing."""

    def load(self, maps: Mapping[str, Map]) -> bool:
        self.write_maps(maps)
        return super().load(maps)

    def write_maps(self, maps: Mapping[str, Map]) -> None:
        """Uses these maps for the description of the node and its devices from now on, and writes
        the refusal limits. Only the first call has an effect, since none of these maps grows.
        """
        if self._node_and_device_maps is None:
            node_map = NodeMap(self.config, maps, self._coexisting)
            self._node_and_device_maps = node_map, DeviceMap(self.config, maps)
            write_refusal_limits(maps["refusal_limits"])
            self._attachments.prober = HookProber(maps["fragments"])

    def prepare(self, maps: Mapping[str, Map]) -> LoadedPrograms:
        """Also fills the tail call map with the descriptors of the loaded programs."""
        loaded = super().prepare(maps)
        for program in loaded_packet_programs(self.config.uses_conntrack):
            if program.tail >= 0:
                # a prog array is written with the descriptor of a program, and keeps the program
                descriptor = struct.pack("=I", loaded.programs[program.name].fd)
                loaded.private_maps[TAIL_CALL_MAP].update(U32.pack(program.tail), descriptor)
        return loaded

    @property
    def key(self) -> str:
        """Programs that do not hand new flows to conntrack are not adopted by an agent that has to,
        nor the other way round.
        """
        return f"{super().key}-conntrack" if self.config.uses_conntrack else super().key

    def _program_names(self) -> tuple[str, ...]:
        programs = loaded_packet_programs(self.config.uses_conntrack)
        return tuple(program.name for program in programs)

    def _load_code(self, code: Bytecode, maps: Mapping[str, Map], kind: int, attach_type: int) -> Program:
        if code.name not in ENTRY_READERS:
            return super()._load_code(code, maps, kind, attach_type)
        with kfuncs.open_conntrack() if self.config.uses_conntrack else nullcontext(kfuncs.NO_CONNTRACK) as calls:
            insns = relocate(code, maps, self._missing_helpers, calls.replacements)
            return Program.load(code.name, kind, attach_type, insns, calls.btf_fds)

    def _make_private_maps(self) -> dict[str, Map]:
        return {TAIL_CALL_MAP: Map.create(uapi.BPF_MAP_TYPE_PROG_ARRAY, TAIL_CALL_MAP, 4, 4, TAIL_CALL_SLOTS)}

    def write_node(self, desired: DesiredState) -> None:
        """Writes the parts of a desired state that belong to the node rather than to a Service."""
        assert self._node_and_device_maps is not None
        self._node_and_device_maps[0].write(desired)

    @property
    def is_passive(self) -> bool:
        """Whether our programs leave new connections to another data plane."""
        return self._node_and_device_maps is not None and NodeFlag.PASSIVE in self._node_and_device_maps[0].mode

    def activate(self, now: float) -> float | None:
        """Takes over new connections once all programs have been attached for PASSIVE_PERIOD_S.
        Returns when to call again (time.monotonic), None if the programs are active.
        """
        if not self.is_passive:
            return None
        assert self._node_and_device_maps is not None
        status = self.status()
        if not (status.ready or status.problem):
            self._in_place_since = None
            return now + ACTIVATE_POLL_INTERVAL_S
        if self._in_place_since is None:
            self._in_place_since = now
        if now < self._in_place_since + PASSIVE_PERIOD_S:
            return self._in_place_since + PASSIVE_PERIOD_S
        self._node_and_device_maps[0].set_mode(NodeFlag.COEXISTING)
        log.info("the packet path is active")
        return None

    def end_coexistence(self) -> None:
        """Clears the flag. To be called once the other data plane has no connections left."""
        if self._node_and_device_maps is not None:
            self._node_and_device_maps[0].set_mode(NO_COEXISTENCE)

    def _write_devices(
        self, devices: tuple[Device, ...], choices: Mapping[int, RoleChoice], no_egress: Collection[int]
    ) -> None:
        assert self._node_and_device_maps is not None
        previous, self.unmatched = self.unmatched, find_unmatched(devices, self.config.devices)
        for pattern in self.unmatched:
            if pattern not in previous:
                log.warning("--device %s matches no device; waiting for one", pattern)
        for pattern in previous:
            if pattern not in self.unmatched:
                log.info("--device %s matches a device now", pattern)
        self.left_out_count = count_left_out(choices)
        self._node_and_device_maps[1].write(devices, choices, no_egress)

    def uses_other_flows(self, flows: Map) -> bool:
        """Whether publish() would replace pinned programs that use another `flows` map."""
        if not self._loaded:
            return False
        return any(flows.id not in map_ids for map_ids in self._read_map_ids())

    def publish(self) -> None:
        """Pins the programs and hands them to the device thread. Returns once no device runs older
        programs any more. Devices without programs follow in the background. See device_thread.py
        for the order, and why.

        Raises OutdatedDevicesError if the programs were handed over, but a device still runs older
        ones. After any other error nothing has changed, and the next call tries again.
        """
        if not self._loaded:
            return  # already published
        new_folder = self._pin()
        generation = PacketGeneration(self._loaded, self._private_maps)
        self._reconciler.publish(generation, lambda: self._hand_over(new_folder))

    def _hand_over(self, new_folder: Path) -> None:
        """Gives the programs their final pins. From here on they belong to the device thread."""
        self._rename_into_place(new_folder)
        self._loaded, self._private_maps = {}, {}

    @property
    def is_rolled_out(self) -> bool:
        """Whether no device runs older programs than the current ones."""
        return not self._loaded and self._reconciler.is_rolled_out

    def _rename_into_place(self, new_folder: Path) -> None:
        """Pins the new programs under their final name. The old pins are renamed, not removed:
        programs that are still attached need their tail calls.
        """
        folder = self._pins.programs(self.key)
        if folder.is_dir():
            number = itertools.count()
            while (old := self._pins.root / f"{OLD_PREFIX}{folder.name}-{next(number)}").exists():
                pass
            folder.rename(old)
        new_folder.rename(folder)

    def _remove_old_programs(self) -> None:
        """Removes the pins of older programs, once all devices run the current ones. Called by the
        device thread.
        """
        folder = self._pins.programs(self.key)
        for old_folder in self._pins.other_folders(f"programs-{self._artifact.unit}", folder):
            if not old_folder.name.startswith(NEW_PREFIX):  # the main thread may be building it
                shutil.rmtree(old_folder, ignore_errors=True)

    def _read_map_ids(self) -> Iterator[set[int]]:
        """Reads the pins and not the attachments: the programs that read `services` are reached by
        tail calls, and are not attached themselves.
        """
        for folder in packet_program_folders(self._pins):
            if not (folder / TAIL_CALL_MAP).exists():
                continue
            try:
                map_ids = map_ids_read_by(folder)
            except (KernelError, FileNotFoundError) as error:
                if error.errno != errno.ENOENT:
                    raise
                continue  # the device thread has just removed it, so no device runs these any more
            yield map_ids

    def status(self) -> DeviceReconcilerStatus:
        return self._reconciler.status()

    def close(self) -> None:
        """Stops the device thread first, since it uses maps and programs."""
        self._reconciler.close()
        super().close()


def has_programs(pins: Pins) -> bool:
    """Whether an agent has left packet programs."""
    return bool(packet_program_folders(pins))


def reads_current_maps(pins: Pins, maps: Mapping[str, Map]) -> bool:
    """Whether the pinned packet programs of an earlier agent read all of the maps that a flip
    changes, and so see changes of Services.
    """
    needed = {maps[f"{name}_outer"].id for name in ("services", *SERVICES_TARGETS)}
    return all(needed <= map_ids_read_by(folder) for folder in packet_program_folders(pins))


def list_programs(pins: Pins) -> tuple[Attachment, ...]:
    """What remove_programs() would detach."""
    return DeviceAttachments(pins.root).list_all()


def remove_programs(pins: Pins) -> tuple[Attachment, ...]:
    """Detaches everything of ours from all devices of this network namespace, and removes the pins
    of the programs. Returns what was attached. Filters stay attached when pins are lost, and then
    lose their tail calls, so that they drop new connections; they are found without pins.
    """
    removed = DeviceAttachments(pins.root).remove()
    for folder in pins.other_folders("programs-tc", Path()):
        shutil.rmtree(folder, ignore_errors=True)
    return removed
