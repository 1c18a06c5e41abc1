"""The packet path: the programs of the unit `tc`, on the devices that packets come in or go out by.

It is apart from the socket hooks: when a kernel refuses these programs, Services still work for
the sockets of the node and its pods, and the log says what is missing. The devices are kept by a
thread of their own (keeper.py).
"""

import errno
import itertools
import logging
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.hooks import PACKET_PROGRAMS, TAILS, TAILS_MAP
from kbpf.dataplane.bpf.maps.layout import U32, NodeFlag
from kbpf.dataplane.bpf.maps.pinning import FLIPPED, NEW, OLD, Pins, close_all, read_by
from kbpf.dataplane.bpf.packet_path.attach import Devices, Pick
from kbpf.dataplane.bpf.packet_path.device_roles import Choice, Role, unmatched
from kbpf.dataplane.bpf.packet_path.device_thread import Keeper, KeeperStatus
from kbpf.dataplane.bpf.packet_path.node_maps import NEUTRAL, DeviceFacts, NodeFacts, limit_refusals
from kbpf.dataplane.bpf.programs.artifact import Artifact
from kbpf.dataplane.bpf.programs.loader import Programs, Ready, missing_packet_helpers
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.bpf.tc import Attachment, Direction
from kbpf.kernel.net.devices import Device
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState

log = logging.getLogger("kbpf.dataplane")

YIELD_SECONDS: Final = 4.0
"""So long all programs are in place before they lead, where another data plane serves: to put one
on a device costs packets (clsact: the kernel drops what leaves meanwhile), and a SYN that was lost
comes again after one second, and after two more (RFC 6298)."""
ASK_SECONDS: Final = 0.5
"""So often the devices are asked about meanwhile."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Programs over one set of maps, as the keeper takes them."""

    programs: Mapping[str, Program]
    own: Mapping[str, Map]

    @property
    def pick(self) -> Pick:
        """The same for all roles: the programs ask the map `devices`."""
        return self._pick

    def _pick(self, _: Device, __: Role, direction: Direction) -> Program | None:
        return self.programs["tc_ingress" if direction is Direction.INGRESS else "tc_egress"]

    def close(self) -> None:
        """Closes the descriptors."""
        close_all((*self.programs.values(), *self.own.values()))


class PacketPath(Programs):
    """Programs, their tail calls, and the devices that they are on."""

    own = (TAILS_MAP,)

    def __init__(
        self, pins: Pins, artifact: Artifact, config: Config, followed: bool = False
    ) -> None:
        """`followed`: another data plane has connections on this node."""
        super().__init__(pins, artifact, missing_packet_helpers())
        self._config = config
        self._followed = followed
        self._in_place: float | None = None  # since when
        devices = Devices(pins.root, config.devices, config.excluded_devices)
        self._keeper = Keeper(devices, self._tell, self._settle)
        self._facts: tuple[NodeFacts, DeviceFacts] | None = None
        self.unmatched: tuple[str, ...] = ()
        """What of --device names nothing, at the last look."""

    def load(self, maps: Mapping[str, Map]) -> bool:
        """See Programs.load(). What is attached goes on with the programs that it has."""
        self.describe_maps(maps)
        return super().load(maps)

    def describe_maps(self, maps: Mapping[str, Map]) -> None:
        """Writes what the programs are told of this node and its devices to these maps from now
        on.
        """
        if self._facts is None:  # these do not grow
            node = NodeFacts(self._config, maps, self._followed)
            self._facts = node, DeviceFacts(self._config, maps)
            limit_refusals(maps["refusal_limits"])

    def prepare(self, maps: Mapping[str, Map]) -> Ready:
        """See Programs.prepare()."""
        ready = super().prepare(maps)
        for program in PACKET_PROGRAMS:
            if program.tail >= 0:
                number = struct.pack("=I", ready.programs[program.name].fd)
                ready.own[TAILS_MAP].update(U32.pack(program.tail), number)
        return ready

    def _make_own(self) -> dict[str, Map]:
        return {TAILS_MAP: Map.create(objects.MAP_PROG_ARRAY, TAILS_MAP, 4, 4, TAILS)}

    def describe_node(self, desired: DesiredState) -> None:
        """Tells the programs what of a desired state no Service decides."""
        assert self._facts is not None
        self._facts[1].preferred = desired.masquerade_as
        self._facts[0].tell(desired)

    @property
    def yields(self) -> bool:
        """Whether what begins is another data plane's."""
        return self._facts is not None and NodeFlag.YIELDS in self._facts[0].stance

    def lead(self, now: float) -> float | None:
        """Leads what begins from here on, once all has been in place for YIELD_SECONDS; when to ask
        again (time.monotonic), None if it leads.
        """
        if not self.yields:
            return None
        assert self._facts is not None
        status = self.status()
        if not (status.ready or status.problem):
            self._in_place = None
            return now + ASK_SECONDS
        if self._in_place is None:
            self._in_place = now
        if now < self._in_place + YIELD_SECONDS:
            return self._in_place + YIELD_SECONDS
        self._facts[0].stand(NodeFlag.FOLLOWS)
        log.info("the packet path leads")
        return None

    def alone(self) -> None:
        """Nothing is left of the other data plane."""
        if self._facts is not None:
            self._facts[0].stand(NEUTRAL)

    def _tell(self, there: tuple[Device, ...], choices: Mapping[int, Choice]) -> None:
        assert self._facts is not None
        before, self.unmatched = self.unmatched, unmatched(there, self._config.devices)
        for pattern in self.unmatched:
            if pattern not in before:
                log.warning("--device %s names no device; waiting for one", pattern)
        for pattern in before:
            if pattern not in self.unmatched:
                log.info("--device %s names a device now", pattern)
        self._facts[1].tell(there, choices)

    def tracks_elsewhere(self, flows: Map) -> bool:
        """Whether there is something to publish, in the place of programs with another `flows`."""
        if not self._loaded:
            return False
        return any(flows.id not in reads for reads in self._read_now())

    def publish(self) -> int:
        """Pins the programs and hands them to the keeper; 0. Returns when nothing that was
        attached runs older ones any more; devices that have none yet follow. keeper.py has the
        order, and why.

        DevicesBehind: they were handed over, but something still runs older ones. Any other error:
        nothing has changed, and the next call tries again.
        """
        if not self._loaded:
            return 0  # they are published
        fresh = self._pin()
        made = Loaded(self._loaded, self._own)
        self._keeper.publish(made, lambda: self._hand_over(fresh))
        return 0

    def _hand_over(self, fresh: Path) -> None:
        """From here on the programs are the keeper's."""
        self._put_in_place(fresh)
        self._loaded, self._own = {}, {}

    @property
    def everywhere(self) -> bool:
        """Whether nothing that was attached runs older programs than those of now."""
        return not self._loaded and self._keeper.everywhere

    def _put_in_place(self, fresh: Path) -> None:
        """The older ones are kept beside: what still runs needs their tail calls."""
        folder = self._pins.programs(self.key)
        if folder.is_dir():
            number = itertools.count()
            while (old := self._pins.root / f"{OLD}{folder.name}-{next(number)}").exists():
                pass
            folder.rename(old)
        fresh.rename(folder)

    def _settle(self) -> None:
        """All devices run the programs that are pinned now."""
        folder = self._pins.programs(self.key)
        for other in self._pins.others(f"programs-{self._artifact.unit}", folder):
            if not other.name.startswith(NEW):  # the writer is at work there
                shutil.rmtree(other, ignore_errors=True)

    def _read_now(self) -> Iterator[set[int]]:
        """By the pins: the programs that look into `services` are reached by tail calls."""
        for folder in self._pins.others(f"programs-{self._artifact.unit}", Path()):
            if folder.name.startswith(NEW) or not (folder / TAILS_MAP).exists():
                continue
            try:
                reads = read_by(folder)
            except (KernelError, FileNotFoundError) as error:
                if error.errno != errno.ENOENT:
                    raise
                continue  # the keeper has just removed it: nobody runs these any more
            yield reads

    def status(self) -> KeeperStatus:
        """How the devices are doing."""
        return self._keeper.status()

    def close(self) -> None:
        """Ends the keeper first: it uses maps and programs."""
        self._keeper.close()
        super().close()


def is_there(pins: Pins) -> bool:
    """Whether an agent has left packet programs."""
    return bool(_left(pins))


def follows(pins: Pins, maps: Mapping[str, Map]) -> bool:
    """Whether the packet programs that an agent has left see all that is flipped in these maps."""
    needed = {maps[name].id for name in FLIPPED}
    return all(needed <= read_by(folder) for folder in _left(pins))


def _left(pins: Pins) -> list[Path]:
    return [p for p in pins.others("programs-tc", Path()) if not p.name.startswith(NEW)]


def remove(pins: Pins) -> tuple[Attachment, ...]:
    """Takes everything of ours off all devices of this network namespace, and the programs' pins
    away; what there was.
    """
    there = (pins.root / "devices").is_dir() or pins.others("programs-tc", Path())
    attached = Devices(pins.root).remove() if there else ()
    for folder in pins.others("programs-tc", Path()):
        shutil.rmtree(folder, ignore_errors=True)
    return attached
