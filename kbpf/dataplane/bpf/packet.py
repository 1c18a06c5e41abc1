"""The packet path: the programs of the unit `tc`, on the devices that packets come in or go out by.

It is apart from the socket hooks: when a kernel refuses these programs, Services still work for
the sockets of the node and its pods, and the log says what is missing.
"""

import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf import layout
from kbpf.dataplane.bpf.artifact import Artifact
from kbpf.dataplane.bpf.devices import DeviceReport, Devices, Role, decide
from kbpf.dataplane.bpf.hooks import PACKET_PROGRAMS, TAILS, TAILS_MAP
from kbpf.dataplane.bpf.layout import DEVICE, NODE, U32, DeviceFlag, NodeFlag
from kbpf.dataplane.bpf.load import Pins, Programs
from kbpf.kernel import libbpf
from kbpf.kernel.devices import Device, list_devices
from kbpf.kernel.libbpf import Map, Program
from kbpf.kernel.tc import Direction
from kbpf.model.address import Addr, family_of
from kbpf.model.config import Config

ETH_HEADER: Final = 14
NOWHERE: Final = bytes(16)
ROLES: Final = {Role.HOST: layout.Role.HOST, Role.POD: layout.Role.POD}


class PacketPath(Programs):
    """Programs, their tail calls, and the devices that they are on."""

    own = (TAILS_MAP,)

    def __init__(self, pins: Pins, artifact: Artifact, config: Config) -> None:
        super().__init__(pins, artifact, retval=True)
        self._config = config
        self._devices = Devices(pins.root, config.devices, config.excluded_devices)
        self._maps: Mapping[str, Map] = {}
        self._told: dict[int, bytes] = {}
        self._node = b""

    def load(self, maps: Mapping[str, Map]) -> bool:
        """See Programs.load(). What the programs know of devices is read back."""
        self._maps = maps
        self._told = {int.from_bytes(k, "little"): v for k, v in maps["devices"].items()}
        loaded = super().load(maps)
        for program in PACKET_PROGRAMS:
            if loaded and program.tail >= 0:
                number = struct.pack("=I", self._loaded[program.name].fd)
                self._own[TAILS_MAP].update(U32.pack(program.tail), number)
        return loaded

    def _make_own(self) -> None:
        self._own[TAILS_MAP] = Map.create(libbpf.MAP_PROG_ARRAY, TAILS_MAP, 4, 4, TAILS)

    def describe_node(self, addresses: Iterable[Addr]) -> None:
        """Tells the programs the node's own addresses, at most one of each family."""
        by_family = {family_of(a): bytes(a) for a in addresses}
        flags = NodeFlag.MASQUERADE_ALL if self._config.masquerade_all else NodeFlag(0)
        low, high = self._config.masquerade_ports
        own4, own6 = by_family.get(4, NOWHERE), by_family.get(6, NOWHERE)
        mark = 1 << self._config.masquerade_bit
        value = NODE.pack(own4, own6, flags, low, high, mark)
        if value != self._node:
            self._maps["node"].update(U32.pack(0), value)
            self._node = value

    def _attach_all(self) -> int:
        report = self.look()
        return report.added + report.replaced + report.removed

    def look(self) -> DeviceReport:
        """Brings the attachments in step with the devices that there are now."""
        there = list_devices()
        self._tell(there)
        return self._devices.sync(there, self._pick)

    def _pick(self, _: Device, __: Role, direction: Direction) -> Program | None:
        return self._loaded["tc_ingress" if direction is Direction.INGRESS else "tc_egress"]

    def _tell(self, there: Iterable[Device]) -> None:
        """What the programs must know of a device before they run on it."""
        choices = decide(tuple(there), self._config.devices, self._config.excluded_devices)
        wanted = {
            device.ifindex: _describe(device, ROLES[choices[device.ifindex].role])
            for device in there
            if choices[device.ifindex].role in ROLES
        }
        for index, value in wanted.items():
            if self._told.get(index) != value:
                self._maps["devices"].update(U32.pack(index), value)
        for index in self._told.keys() - wanted.keys():
            self._maps["devices"].delete(U32.pack(index))
        self._told = wanted


def _describe(device: Device, role: layout.Role) -> bytes:
    """struct device."""
    flags = DeviceFlag.LOCAL if role is layout.Role.POD else DeviceFlag(0)
    return DEVICE.pack(role, ETH_HEADER if device.has_header else 0, flags, bytes(6))


def remove(pins: Pins) -> int:
    """Takes everything of ours off all devices of this network namespace, and the programs' pins
    away; how many attachments there were.
    """
    there = (pins.root / "devices").is_dir() or pins.others("programs-tc", Path())
    attached = Devices(pins.root).remove() if there else 0
    for folder in pins.others("programs-tc", Path()):
        shutil.rmtree(folder, ignore_errors=True)
    return attached
