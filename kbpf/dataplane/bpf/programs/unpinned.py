# SPDX-License-Identifier: Apache-2.0
"""Finds programs of kbpf that are attached but not pinned in our pin folder.

They belong to another agent with another --pin-dir. Or another file system is mounted over the
bpffs, so that the pins of the earlier agent are hidden while its programs continue to run. With a
second set of programs, both would translate and count, and neither would know the connections of
the other; so the agent refuses to start. It cannot adopt the programs by id instead: the pins of
their maps and tail calls would stay in a folder where the agent can neither replace nor remove
them.

Links end with their pins; filters on a clsact qdisc do not. So filters without pins may also be
what is left of an agent whose pins were deleted, or whose bpffs was unmounted. The agent replaces
these. They are recognized by their tail call map: the kernel empties it once no process has it open
and no pin of it is left on any bpffs.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kbpf.dataplane.bpf.hooks import HOOKS, TAIL_CALL_SLOTS
from kbpf.dataplane.bpf.maps.layout import ALL_MAPS, TAIL_CALL_MAP, U32
from kbpf.dataplane.bpf.maps.pinning import NEW_LINK_PREFIX, Pins
from kbpf.errors import IgnoredErrnos, KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.clsact import DEFAULT_IDENTITY, Direction, FilterIdentity
from kbpf.kernel.bpf.objects import MAX_NAME_LENGTH, Link, Program
from kbpf.kernel.bpf.tc import AttachMethod, TcAttacher
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_PROG_ARRAY
from kbpf.kernel.net.devices import list_devices
from kbpf.kernel.system import mounts

T = TypeVar("T")

DETACH_WAIT_S: Final = 3.0
"""The kernel detaches a link at most this long after its last pin was removed."""

MAX_NAMED: Final = 4
"""An error message names at most this many hooks."""

MAX_FOLDERS: Final = 2000
"""Folders that are searched in each bpffs. A CNI may have thousands."""

CHARACTERISTIC_MAPS: Final = frozenset((TAIL_CALL_MAP, "sock_peers", "frontend_ports"))
"""The programs of kbpf that choose backends, of any version, have one of these and at least one
other of our maps. Other tools have programs of the same names (tc_ingress, connect4), and maps
called config or flows.
"""
_MAP_NAMES: Final = frozenset(name[:MAX_NAME_LENGTH] for name in (*ALL_MAPS, TAIL_CALL_MAP))


class UnpinnedProgram(NamedTuple):
    """A program of another agent, or of one whose pins are hidden. `place`: "ingress of eth0"."""

    program_id: int
    place: str


def refuse_unpinned(pins: Pins, operator_path: Path, cgroup: Path, packet_path: bool) -> None:
    """Raises KernelError if programs of kbpf are attached without a pin: to the cgroup or, with
    `packet_path`, to any device of this network namespace. If programs of ours are attached,
    refusing would only leave those without updates.

    `operator_path`: the pin folder as the operator named it.
    """
    if not serves_already(pins) and (programs := find_lasting(pins, cgroup, packet_path)):
        raise describe_unpinned(programs, operator_path)


def serves_already(pins: Pins) -> bool:
    """Whether programs of ours are attached already, by this agent or an earlier one."""
    return any(pins.links.glob("*")) or any(pins.root.glob("programs-*"))


def find_lasting(pins: Pins, cgroup: Path, packet_path: bool) -> Collection[UnpinnedProgram]:
    """What find_unpinned() still finds after DETACH_WAIT_S."""
    deadline = time.monotonic() + DETACH_WAIT_S
    while programs := find_unpinned(pins, cgroup, packet_path):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return programs


def describe_unpinned(programs: Collection[UnpinnedProgram], operator_path: Path) -> KernelError:
    """The error that names these programs, and their pin folder if it is found."""
    places = [f"{program.place} (id {program.program_id})" for program in programs]
    suffix = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    folder = find_pin_folder({program.program_id for program in programs})
    remedy = "stop it and run kbpf cleanup with its --pin-dir, or use that --pin-dir"
    hints = [f"they belong to --pin-dir {folder}: {remedy}"]
    if folder is None:
        first = next(iter(programs)).program_id
        hints = [
            f"if a file system is mounted over the folder (findmnt -T {operator_path}), unmount it",
            f"if they belong to another kbpf, {remedy}",
            f"`bpftool -f prog show id {first}` shows pins and processes",
        ]
    return KernelError(
        "programs of kbpf are attached but not pinned in this folder",
        f"{operator_path}; {', '.join(places[:MAX_NAMED])}{suffix}",
        "; ".join(hints),
    )


def find_pin_folder(program_ids: Collection[int]) -> Path | None:
    """The pin folder of these programs; None if it is in another mount namespace, or hidden."""
    return next((each for each in _list_pin_folders() if _pins_any(each, program_ids)), None)


def _list_pin_folders() -> Iterator[Path]:
    """The pin folders of kbpf in each bpffs that is mounted here."""
    for path in {mount.path for mount in mounts.list_mounts() if mount.fs_type == "bpf"}:
        for folder, subfolders, _ in islice(os.walk(path), MAX_FOLDERS):
            if any(name.startswith("programs-") for name in subfolders):
                subfolders.clear()
                yield Path(folder)


def _pins_any(folder: Path, program_ids: Collection[int]) -> bool:
    for pin in folder.glob("*programs-*/*"):
        if pin.name == TAIL_CALL_MAP:
            continue
        with contextlib.suppress(KernelError), Program.open(pin) as program:
            if program.read_info().id in program_ids:
                return True
    return False


def find_unpinned(pins: Pins, cgroup: Path, packet_path: bool = True) -> list[UnpinnedProgram]:
    """All programs of kbpf at the hooks of this cgroup, and with `packet_path` on the devices of
    this network namespace, that are not pinned here. Those of filters that no agent uses any more
    are left out.
    """
    programs = list(_find_at_cgroup(pins, cgroup))
    if packet_path:
        programs += _find_at_devices(pins)
    return programs


def _find_at_cgroup(pins: Pins, cgroup: Path) -> Iterator[UnpinnedProgram]:
    own = OwnPrograms(pins)
    for hook, program_id in list_at_cgroup(cgroup):
        if own.is_unpinned(program_id, hook):
            yield UnpinnedProgram(program_id, f"{hook} of {cgroup}")


def list_at_cgroup(cgroup: Path) -> Iterator[tuple[str, int]]:
    """The programs at the hooks of this cgroup, as hook and id. None if it cannot be opened: that
    is reported elsewhere.
    """
    try:
        descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for hook in HOOKS:
            if not hook.tracepoint:
                for program_id in attached_program_ids(descriptor, hook.attach_type):
                    yield hook.name, program_id
    finally:
        os.close(descriptor)


def _find_at_devices(pins: Pins) -> Iterator[UnpinnedProgram]:
    own = OwnPrograms(pins)
    with open_attacher(pins) as kernel:
        for device in list_devices():
            for direction in Direction:
                for runner in kernel.list_programs(device.ifindex, direction):
                    if not runner.is_ours and own.is_unpinned(runner.program_id, f"tc_{direction}"):
                        yield UnpinnedProgram(runner.program_id, f"{direction} of {device.name}")


def open_attacher(
    pins: Pins, method: AttachMethod | None = None, identity: FilterIdentity = DEFAULT_IDENTITY
) -> TcAttacher:
    """A TcAttacher that leaves the filters of other agents alone."""
    own = OwnPrograms(pins)
    return TcAttacher(pins.root / "devices", method, identity, own.is_of_other_agent)


def attached_program_ids(target: int, attach_type: int) -> tuple[int, ...]:
    """The ids of the programs attached to a cgroup (descriptor) or device (ifindex). Empty if the
    kernel cannot list them, or we lack the rights.
    """
    try:
        return objects.list_attached(target, attach_type)
    except KernelError:
        return ()


class OwnPrograms:
    """Tells our programs from those of other agents. Create a new one for each listing."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._ids: frozenset[int] = frozenset()
        self._others: set[int] = set()  # ids that are not pinned in our folder
        self._of_other_agent: dict[int, bool] = {}

    def contains(self, program_id: int) -> bool:
        """Whether it is pinned in our folder."""
        if program_id not in self._ids and program_id not in self._others:
            self._ids = frozenset(_read_pinned_ids(self._pins))
            if program_id not in self._ids:
                self._others.add(program_id)
        return program_id in self._ids

    def is_unpinned(self, program_id: int, name: str) -> bool:
        """Whether it is a program of kbpf that is not pinned in our folder."""
        if not program_id or program_id in self._ids:
            return False
        # reads all pins only for programs of kbpf: a device may have hundreds of other filters
        return is_kbpf_program(program_id, name) and not self.contains(program_id)

    def is_of_other_agent(self, program_id: int) -> bool:
        """Whether another agent uses this program on devices: its tail calls still exist."""
        if program_id not in self._of_other_agent:
            self._of_other_agent[program_id] = any(
                self.is_unpinned(program_id, f"tc_{direction}") for direction in Direction
            ) and has_tail_calls(program_id)
        return self._of_other_agent[program_id]


def _read_pinned_ids(pins: Pins) -> Iterator[int]:
    """The ids of the programs that are attached by pinned links, and of the pinned programs of the
    packet path.
    """
    link_pins = [*pins.links.glob("*"), *(pins.root / "devices").glob("*")]
    # links of an agent that ended before it gave them their final name
    link_pins += pins.root.glob(f"{NEW_LINK_PREFIX}*")
    for pin in link_pins:
        if not pin.is_dir() and (link := _open_unless_removed(Link.open, pin)):
            with link:
                yield link.read_info().program_id
    for direction in Direction:
        for pin in pins.root.glob(f"*programs-tc-*/tc_{direction}"):
            if program := _open_unless_removed(Program.open, pin):
                with program:
                    yield program.read_info().id


def _open_unless_removed(open_pin: Callable[[Path], T], pin: Path) -> T | None:
    """None if the agent has just removed or renamed the pin."""
    with IgnoredErrnos(errno.ENOENT):
        return open_pin(pin)
    return None


def is_kbpf_program(program_id: int, name: str) -> bool:
    """Whether this is a program of kbpf of any version, judged by its name and those of its maps.
    False if it cannot be opened (that needs CAP_SYS_ADMIN), or was just unloaded.
    """
    try:
        info = objects.read_program_info(program_id)
        map_names: set[str] = set()
        for map_id in info.map_ids if info.name == name[:MAX_NAME_LENGTH] else ():
            with objects.open_map_by_id(map_id) as map_:
                map_names.add(map_.short_name)
            if map_names & CHARACTERISTIC_MAPS and len(map_names & _MAP_NAMES) > 1:
                return True
    except KernelError:
        pass
    return False


def has_tail_calls(program_id: int) -> bool:
    """Whether this program has a tail call map that is not empty. False if it cannot be opened."""
    try:
        for map_id in objects.read_program_info(program_id).map_ids:
            with objects.open_map_by_id(map_id) as map_:
                if map_.type == BPF_MAP_TYPE_PROG_ARRAY and any(
                    map_.lookup(U32.pack(slot)) for slot in range(TAIL_CALL_SLOTS)
                ):
                    return True
    except KernelError:
        pass
    return False
