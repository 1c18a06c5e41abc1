"""The packet path: the programs of the unit `tc`, on the devices that packets come in or go out by.

It is apart from the socket hooks: when a kernel refuses these programs, Services still work for
the sockets of the node and its pods, and the log says what is missing.
"""

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from kbpf.dataplane.bpf.artifact import Artifact
from kbpf.dataplane.bpf.devices import DeviceReport, Devices, Role
from kbpf.dataplane.bpf.facts import DeviceFacts, NodeFacts
from kbpf.dataplane.bpf.hooks import PACKET_PROGRAMS, TAILS, TAILS_MAP
from kbpf.dataplane.bpf.layout import U32
from kbpf.dataplane.bpf.load import Pins, Programs
from kbpf.kernel import libbpf
from kbpf.kernel.devices import Device, list_devices
from kbpf.kernel.libbpf import Map, Program
from kbpf.kernel.tc import Direction
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState


class PacketPath(Programs):
    """Programs, their tail calls, and the devices that they are on."""

    own = (TAILS_MAP,)

    def __init__(self, pins: Pins, artifact: Artifact, config: Config) -> None:
        super().__init__(pins, artifact, retval=True)
        self._config = config
        self._devices = Devices(pins.root, config.devices, config.excluded_devices)
        self._facts: tuple[NodeFacts, DeviceFacts] | None = None

    def load(self, maps: Mapping[str, Map]) -> bool:
        """See Programs.load(). What the programs know of devices is read back."""
        self._facts = NodeFacts(self._config, maps), DeviceFacts(self._config, maps)
        loaded = super().load(maps)
        for program in PACKET_PROGRAMS:
            if loaded and program.tail >= 0:
                number = struct.pack("=I", self._loaded[program.name].fd)
                self._own[TAILS_MAP].update(U32.pack(program.tail), number)
        return loaded

    def _make_own(self) -> None:
        self._own[TAILS_MAP] = Map.create(libbpf.MAP_PROG_ARRAY, TAILS_MAP, 4, 4, TAILS)

    def describe_node(self, desired: DesiredState) -> None:
        """Tells the programs what of a desired state no Service decides."""
        assert self._facts is not None
        self._facts[0].tell(desired)

    def _attach_all(self) -> int:
        report = self.look()
        return report.added + report.replaced + report.removed

    def status(self) -> DeviceReport:
        """What the last look() said."""
        return self._devices.status()

    def look(self) -> DeviceReport:
        """Brings the attachments in step with the devices that there are now."""
        assert self._facts is not None
        there = list_devices()
        # Before they run on it, the programs must know a device.
        self._facts[1].tell(there, self._devices.decide(there))
        return self._devices.sync(there, self._pick)

    def _pick(self, _: Device, __: Role, direction: Direction) -> Program | None:
        return self._loaded["tc_ingress" if direction is Direction.INGRESS else "tc_egress"]


def remove(pins: Pins) -> int:
    """Takes everything of ours off all devices of this network namespace, and the programs' pins
    away; how many attachments there were.
    """
    there = (pins.root / "devices").is_dir() or pins.others("programs-tc", Path())
    attached = Devices(pins.root).remove() if there else 0
    for folder in pins.others("programs-tc", Path()):
        shutil.rmtree(folder, ignore_errors=True)
    return attached
