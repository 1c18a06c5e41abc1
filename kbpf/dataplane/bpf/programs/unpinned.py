"""Programs of kbpf that are attached and that the folder of pins does not hold.

When another file system is mounted over the bpffs, or the agent is given another --pin-dir, the
pins of the earlier agent are out of sight, and its programs continue to run. A second set beside
them would translate and count twice, and neither would know the other's connections; so the agent
refuses to start. Adopting them by id is no way out: the pins of their maps and tail calls would
stay where nobody can replace or remove them.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.hooks import HOOKS, TAILS_MAP
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.bpf.maps.pinning import NEW_LINK, Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects, tc
from kbpf.kernel.bpf.objects import Link
from kbpf.kernel.bpf.tc import ATTACH_TYPE, Direction
from kbpf.kernel.net.devices import list_devices

ENDING_SECONDS: Final = 3.0
"""What has lost its pins a moment ago is detached by the kernel within this time."""

MOST_NAMED: Final = 4
NAME_LENGTH: Final = 15
"""The kernel cuts the names of maps and programs."""

_MAP_NAMES: Final = frozenset(name[:NAME_LENGTH] for name in (*MAPS, TAILS_MAP))


def refuse(pins: Pins, shown: Path, cgroup: Path) -> None:
    """KernelError if there are any. `shown`: the folder as the operator knows it."""
    deadline = time.monotonic() + ENDING_SECONDS
    while places := tuple(_places(pins, cgroup)):
        if time.monotonic() > deadline:
            more = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
            raise KernelError(
                "programs of kbpf are attached that this folder of pins does not hold",
                f"{shown}; {', '.join(places[:MOST_NAMED])}{more}",
                f"if something is mounted over the folder (findmnt -T {shown}), unmount it; if "
                "they are of another --pin-dir, use that one, or run kbpf cleanup with it",
            )
        time.sleep(0.05)


def _places(pins: Pins, cgroup: Path) -> Iterator[str]:
    held = _held(pins)
    try:
        descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # attaching will say what is wrong with it
    try:
        for hook in HOOKS:
            ids = attached(descriptor, hook.attach_type)
            if any(is_ours(one, hook.name) for one in ids if one not in held):
                yield f"{hook.name} of {cgroup}"
    finally:
        os.close(descriptor)
    if not tc.tcx().works:
        return  # filters are known by their marks, and need no pins
    for device in list_devices():
        for direction in Direction:
            ids = attached(device.ifindex, ATTACH_TYPE[direction])
            if any(is_ours(one, f"tc_{direction}") for one in ids if one not in held):
                yield f"{direction} of {device.name}"


def attached(place: int, attach_type: int) -> tuple[int, ...]:
    """() where this kernel, or our rights, give no answer."""
    try:
        return objects.attached(place, attach_type)
    except KernelError:
        return ()


def _held(pins: Pins) -> set[int]:
    """The ids of the programs whose attachments are pinned here."""
    found = [*pins.links.glob("*"), *(pins.root / "devices").glob("*")]
    found += pins.root.glob(f"{NEW_LINK}*")  # an agent ended before it gave them their name
    ids = set()
    for pin in found:
        if not pin.is_dir():
            with Link.open(pin) as link:
                ids.add(link.info().program)
    return ids


def is_ours(program_id: int, name: str) -> bool:
    """Whether it is a program of kbpf, of whatever version: by its name, and that of a map. False
    where it cannot be asked (CAP_SYS_ADMIN), or has just ended.
    """
    try:
        with objects.program_by_id(program_id) as program:
            info = program.info()
        if info.name != name[:NAME_LENGTH]:
            return False
        for map_id in info.map_ids:
            with objects.map_by_id(map_id) as held:
                if held.short_name in _MAP_NAMES:
                    return True
    except KernelError:
        pass
    return False
