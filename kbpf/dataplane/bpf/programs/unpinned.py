# SPDX-License-Identifier: Apache-2.0
"""Finds programs of kbpf that are attached but not pinned in our pin folder.

If another file system is mounted over the bpffs, or the agent is given another --pin-dir, the pins
of the earlier agent are hidden, but its programs continue to run. With a second set of programs,
both would translate and count, and neither would know the connections of the other; so the agent
refuses to start. It cannot adopt the programs by id instead: the pins of their maps and tail calls
would stay in a folder where the agent can neither replace nor remove them.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.hooks import HOOKS, TAIL_CALL_MAP
from kbpf.dataplane.bpf.maps.layout import ALL_MAPS
from kbpf.dataplane.bpf.maps.pinning import NEW_LINK_PREFIX, Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects, tc
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Link
from kbpf.kernel.bpf.tc import ATTACH_TYPE
from kbpf.kernel.net.devices import list_devices

DETACH_WAIT_S: Final = 3.0
"""The kernel detaches a link at most this long after its last pin was removed."""

MAX_NAMED: Final = 4
"""An error message names at most this many hooks."""
MAX_NAME_LENGTH: Final = 15
"""The kernel truncates longer names of maps and programs (BPF_OBJ_NAME_LEN)."""

_MAP_NAMES: Final = frozenset(name[:MAX_NAME_LENGTH] for name in (*ALL_MAPS, TAIL_CALL_MAP))


def refuse_unpinned(pins: Pins, operator_path: Path, cgroup: Path) -> None:
    """Raises KernelError if programs of kbpf are still attached without a pin after DETACH_WAIT_S.
    `operator_path`: the pin folder as the operator named it.
    """
    deadline = time.monotonic() + DETACH_WAIT_S
    while places := tuple(_find_unpinned(pins, cgroup)):
        if time.monotonic() > deadline:
            suffix = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
            raise KernelError(
                "programs of kbpf are attached but not pinned in this folder",
                f"{operator_path}; {', '.join(places[:MAX_NAMED])}{suffix}",
                f"if a file system is mounted over the folder (findmnt -T {operator_path}), "
                "unmount it; if they belong to another --pin-dir, use that one, or run kbpf "
                "cleanup with it",
            )
        time.sleep(0.05)


def _find_unpinned(pins: Pins, cgroup: Path) -> Iterator[str]:
    pinned_ids = _pinned_program_ids(pins)
    try:
        descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # attaching will report the error
    try:
        for hook in HOOKS:
            ids = attached_program_ids(descriptor, hook.attach_type)
            if any(
                is_kbpf_program(program_id, hook.name)
                for program_id in ids
                if program_id not in pinned_ids
            ):
                yield f"{hook.name} of {cgroup}"
    finally:
        os.close(descriptor)
    if not tc.probe_tcx().works:
        return  # cls_bpf filters are recognized by priority, handle and name, and need no pins
    for device in list_devices():
        for direction in Direction:
            ids = attached_program_ids(device.ifindex, ATTACH_TYPE[direction])
            if any(
                is_kbpf_program(program_id, f"tc_{direction}")
                for program_id in ids
                if program_id not in pinned_ids
            ):
                yield f"{direction} of {device.name}"


def attached_program_ids(target: int, attach_type: int) -> tuple[int, ...]:
    """The ids of the programs attached to a cgroup (descriptor) or device (ifindex). Empty if the
    kernel cannot list them, or we lack the rights.
    """
    try:
        return objects.list_attached(target, attach_type)
    except KernelError:
        return ()


def _pinned_program_ids(pins: Pins) -> set[int]:
    """The ids of the programs whose attachments are pinned here."""
    pin_paths = [*pins.links.glob("*"), *(pins.root / "devices").glob("*")]
    # links of an agent that ended before it gave them their final name
    pin_paths += pins.root.glob(f"{NEW_LINK_PREFIX}*")
    ids = set()
    for pin in pin_paths:
        if not pin.is_dir():
            with Link.open(pin) as link:
                ids.add(link.read_info().program_id)
    return ids


def is_kbpf_program(program_id: int, name: str) -> bool:
    """Whether this is a program of kbpf of any version, judged by its name and the name of one of
    its maps. False if it cannot be opened (that needs CAP_SYS_ADMIN), or was just unloaded.
    """
    try:
        with objects.open_program_by_id(program_id) as program:
            info = program.read_info()
        if info.name != name[:MAX_NAME_LENGTH]:
            return False
        for map_id in info.map_ids:
            with objects.open_map_by_id(map_id) as map_:
                if map_.short_name in _MAP_NAMES:
                    return True
    except KernelError:
        pass
    return False
