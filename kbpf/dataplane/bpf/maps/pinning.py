# SPDX-License-Identifier: Apache-2.0
"""Creates, adopts, replaces and removes the pins of the BPF data plane and its maps.

    PIN/maps-SCHEMA/NAME       maps of one layout (layout.schema_hash)
    PIN/layout-SCHEMA/NAME-N   the version of each of these maps
    PIN/programs-KEY/NAME      programs of one artifact
    PIN/links/HOOK             links of the socket hooks
    PIN/devices/...            attachments to devices (packet_path/attach.py)
    PIN/host                   whether settings of the node were changed (host.py)

Maps, programs and links are built under a name that begins with `new-` and published by one rename.
So under the names above they are complete, unless an agent was killed while it removed a folder.
Programs that devices still run when newer ones take their name are kept in `old-programs-KEY-N`.
Programs are handled in programs/loader.py.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.maps.layout import ALL_MAPS, MAPS, OUTER_MAPS, TAIL_CALL_MAP, U32, MapSpec
from kbpf.dataplane.bpf.maps.migrate import ReplacedMap
from kbpf.errors import ConfigError, KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.system.private_folders import LOCK_TIMEOUT_S, lock_folder
from kbpf.model.config import MapSizes

log = logging.getLogger("kbpf.dataplane")

SERVICES_TARGETS: Final = frozenset(("backend_slots", "backends", "set_members"))
"""The maps that values of `services` point to: a value is valid for these maps only."""

HOST_FOLDER: Final = "host"
"""A subfolder that records that the node's settings may have been changed (host.py). It holds an
empty folder for each range of ports that we have reserved (``61000-65535``), since a bpffs holds no
files.
"""
SAME_PIN_DIR_HINT: Final = "give the folder that `kbpf run` was given with --pin-dir"
ZERO: Final = U32.pack(0)
NEW_PREFIX: Final = "new-"
OLD_PREFIX: Final = "old-"
NEW_MAP_PREFIX: Final = f"{NEW_PREFIX}map-"
INCOMPLETE_SUFFIX: Final = "-incomplete"
"""Of a folder of maps from which another program has removed pins."""
NEW_LINK_PREFIX: Final = f"{NEW_PREFIX}link-"

_PIN_NAMES: Final = re.compile(
    rf"links|devices|{HOST_FOLDER}|({NEW_PREFIX}|{OLD_PREFIX})?(maps|layout|programs)-.+|({NEW_MAP_PREFIX}|{NEW_LINK_PREFIX}).+"
)


def is_pin_name(name: str) -> bool:
    """Whether an agent uses this name in the pin folder."""
    return _PIN_NAMES.fullmatch(name) is not None


class Pins:
    """The pin folder of one agent."""

    def __init__(self, root: Path) -> None:
        self._operator_path = root
        self._set_root(root)

    def _set_root(self, root: Path) -> None:
        self.root = root
        self.maps = root / f"maps-{layout.schema_hash()}"
        self.links = root / "links"

    def use_descriptor(self, descriptor: int) -> None:
        """Accesses the folder through this descriptor from now on, so that a mount on top of its
        path does not hide it from us.
        """
        self._set_root(Path(f"/proc/self/fd/{descriptor}"))

    def use_path(self) -> None:
        """Accesses the folder by its path again."""
        self._set_root(self._operator_path)

    @contextlib.contextmanager
    def with_operator_path(self) -> Iterator[None]:
        """Makes errors name the folder by the operator's path."""
        try:
            yield
        except KernelError as error:
            error.where = error.where.replace(str(self.root), str(self._operator_path))
            raise

    def open_map(self, name: str) -> Map:
        """Opens one of ALL_MAPS; see open_map()."""
        return open_map(self.maps / name, ALL_MAPS[name])

    def programs(self, key: str) -> Path:
        """The folder with the programs of this artifact."""
        return self.root / f"programs-{key}"

    def layout(self, maps: Path) -> Path:
        """The folder that records the contents of a folder of maps, as empty folders named after
        each map and its version, since a bpffs holds no files.
        """
        return self.root / maps.name.replace("maps-", "layout-")

    def other_folders(self, kind: str, keep: Path) -> list[Path]:
        """Folders of this kind other than `keep`: of another version, unfinished, or kept for
        programs that still run.
        """
        if not self.root.exists():
            return []
        names = tuple(f"{prefix}{kind}-" for prefix in ("", NEW_PREFIX, OLD_PREFIX))
        folders = [folder for folder in self.root.iterdir() if folder.name.startswith(names)]
        return sorted(folder for folder in folders if folder != keep)


def list_pin_folder(pin_dir: Path) -> list[Path]:
    """The entries of the pin folder that the operator named, sorted. Raises FileNotFoundError if it
    does not exist, ConfigError if it is not a folder, and KernelError if it cannot be read.
    """
    try:
        return sorted(pin_dir.iterdir())
    except FileNotFoundError:
        raise
    except NotADirectoryError:
        raise ConfigError("not a folder", str(pin_dir), SAME_PIN_DIR_HINT) from None
    except OSError as error:
        raise KernelError("cannot read the pin folder", str(pin_dir), "run as root", error.errno or 0) from error


def lock_pins(pins: Pins, timeout_s: float = LOCK_TIMEOUT_S) -> int:
    """Returns a descriptor that makes this process the only writer below the pin folder."""
    hint = "stop it, or choose another folder with --pin-dir"
    return lock_folder(pins.root, timeout_s, hint)


@contextlib.contextmanager
def build_folder(final: Path) -> Iterator[Path]:
    """A temporary folder, which is renamed to `final`, or removed on failure."""
    temporary = final.parent / f"{NEW_PREFIX}{final.name}"
    # left by an agent that was killed
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@dataclass(frozen=True, slots=True)
class OpenedMaps:
    """All maps. `adopted`: whether an earlier agent of this layout made them. `new_maps`: names of
    the empty ones. `former_maps`: maps to copy from, i.e. those that another version laid out
    differently, and unpinned ones that programs still write.
    """

    maps: Mapping[str, Map]
    adopted: bool
    new_maps: frozenset[str]
    former_maps: tuple[ReplacedMap, ...]


def open_maps(pins: Pins, sizes: MapSizes, packet_path: bool = False) -> OpenedMaps:
    """Opens the pinned maps, and creates missing ones."""
    _set_incomplete_aside(pins)
    # Published by one rename, so it has all maps (for the exception, see the module).
    adopted = pins.maps.is_dir()
    new_maps = frozenset[str]() if adopted else _make_maps(pins, sizes, packet_path)
    maps = {name: pins.open_map(name) for name in ALL_MAPS}
    for name, spec in OUTER_MAPS.items():
        _set_inner(maps[name], maps[spec.inner])
    return OpenedMaps(maps, adopted, new_maps, (*_find_former_layouts(pins), *_find_unpinned_maps(pins, maps)))


def find_lost(pins: Pins) -> set[str]:
    """The names of the maps that are not pinned."""
    pinned = set(os.listdir(pins.maps)) if pins.maps.is_dir() else set[str]()
    return ALL_MAPS.keys() - pinned


def pin_lost(pins: Pins, maps: Mapping[str, Map]) -> list[str]:
    """Pins those of these maps again whose pins another program has removed; returns their names.
    Raises KernelError or OSError.
    """
    lost = sorted(find_lost(pins) & maps.keys())
    if lost:
        pins.maps.mkdir(mode=0o700, exist_ok=True)
        _record_layout(pins, pins.maps)
    for name in lost:
        maps[name].pin(pins.maps / name)
    return lost


def _set_incomplete_aside(pins: Pins) -> None:
    """If pins of maps were removed, the others become maps of another version: _make_maps() takes
    what is valid without the lost ones, and programs read the old maps until the new ones are
    filled.
    """
    lost = find_lost(pins)
    if not pins.maps.is_dir() or not lost:
        return
    log.warning("pins of maps were removed while no agent ran maps=%s", ",".join(sorted(lost)))
    aside = pins.root / f"{pins.maps.name}{INCOMPLETE_SUFFIX}"
    # From an agent that was killed here. What was valid is pinned in `pins.maps` as well.
    shutil.rmtree(aside, ignore_errors=True)
    _record_layout(pins, aside)
    pins.maps.rename(aside)


def open_map(path: Path, spec: MapSpec) -> Map:
    """Opens a pinned map and checks its shape: the kernel would write beyond a wrong buffer."""
    map_ = Map.open(path)
    shape = (map_.type, map_.key_size, map_.value_size)
    if shape != (spec.map_type, spec.key_size, spec.value_size):
        map_.close()
        raise KernelError(
            f"the pinned map has an incompatible layout: type {map_.type}, "
            f"key size {map_.key_size}, value size {map_.value_size}",
            str(path),
            "run kbpf cleanup",
        )
    return map_


def _make_maps(pins: Pins, sizes: MapSizes, packet_path: bool) -> frozenset[str]:
    """Creates new maps; returns their names. Maps of another version with the same layout are
    reused, so that an upgrade keeps affinity, peers and ids. Its programs keep reading them
    meanwhile.
    """
    old = pins.other_folders("maps", pins.maps)
    reused = {name: map_ for name, spec in ALL_MAPS.items() if (map_ := _find_reusable_map(pins, old, spec))}
    for name in _find_unusable(reused.keys()):
        reused.pop(name).close()
    with build_folder(pins.maps) as folder, contextlib.ExitStack() as stack:
        maps: dict[str, Map] = {}
        for name, spec in ALL_MAPS.items():
            maps[name] = stack.enter_context(
                reused.get(name) or make_map(spec, spec.initial_entries(sizes, packet_path), maps.get(spec.inner))
            )
            maps[name].pin(folder / name)
        # Before the rename that ends this block: published maps always have a complete layout.
        _record_layout(pins, pins.maps)
    return frozenset(MAPS.keys() - reused.keys())


def _record_layout(pins: Pins, maps: Path) -> None:
    pins.layout(maps).mkdir(exist_ok=True)
    for spec in ALL_MAPS.values():
        (pins.layout(maps) / f"{spec.name}-{spec.version}").mkdir(exist_ok=True)


def _find_unusable(found: Collection[str]) -> set[str]:
    """Those of these maps of another version that are useless without another map."""
    unusable = set()
    # Old programs find a map that grows only through the same array.
    pairs = {spec.inner: {spec.inner, name} for name, spec in OUTER_MAPS.items()}
    # The last two maps have the keys of `unconfirmed`, and their number.
    for group in (*pairs.values(), {"unconfirmed", "unconfirmed_queue", "port_slots"}):
        if not group <= set(found):
            unusable |= group & set(found)
    # `services` is only valid together with the maps that its values point to: old programs would
    # look up the slots of a flipped frontend in the old `backend_slots`, where they do not exist.
    if SERVICES_TARGETS - (set(found) - unusable):
        unusable |= pairs["services"] & set(found)
    if "flows" not in found:  # the queue holds its keys
        unusable |= {"flow_queue"} & set(found)
    return unusable


def _find_reusable_map(pins: Pins, folders: Iterable[Path], spec: MapSpec) -> Map | None:
    """The map with this name and layout in one of these folders."""
    candidates = (_open_version(pins, folder, spec, spec.version, spec.value_size) for folder in folders)
    return next((map_ for map_ in candidates if map_ is not None), None)


def _find_former_layouts(pins: Pins) -> Iterator[ReplacedMap]:
    """Maps of a former layout that this version can read."""
    for folder in pins.other_folders("maps", pins.maps):
        for spec in MAPS.values():
            for former_layout in spec.former_layouts:
                map_ = _open_version(pins, folder, spec, former_layout.version, former_layout.value_size)
                if map_ is not None:
                    yield ReplacedMap(spec.name, map_, former_layout.convert)


def _find_unpinned_maps(pins: Pins, maps: Mapping[str, Map]) -> Iterator[ReplacedMap]:
    """Unpinned maps that pinned programs write to: an agent resized the map and exited while the
    programs were switching, or the pin was removed.
    """
    folders = pins.other_folders("maps", pins.maps)
    if any(not folder.name.endswith(INCOMPLETE_SUFFIX) for folder in folders):
        return  # programs of another version: its maps are found by their folder
    for map_id in sorted(_map_ids_read_by_all(pins) - {map_.id for map_ in maps.values()}):
        try:
            unpinned = objects.open_map_by_id(map_id)
        except KernelError as error:
            if error.errno != errno.EPERM:
                raise
            log.warning(
                "cannot copy without CAP_SYS_ADMIN: entries that programs wrote to a map without a pin id=%d",
                map_id,
            )
            return
        shape = unpinned.type, unpinned.key_size, unpinned.value_size
        spec = MAPS.get(unpinned.short_name)
        if spec and spec.is_fixed_size and shape == (spec.map_type, spec.key_size, spec.value_size):
            yield ReplacedMap(spec.name, unpinned)
        else:
            unpinned.close()


def _map_ids_read_by_all(pins: Pins) -> set[int]:
    """The ids of the maps of all programs that may be attached.

    Programs of links are found by their pins, and by id only if there is no pin, since the kernel
    opens programs by id only with CAP_SYS_ADMIN.
    """
    map_ids_by_program = _map_ids_by_program(pins)
    reads: set[int] = set()
    for pin in sorted(pins.links.iterdir()) if pins.links.is_dir() else ():
        with Link.open(pin) as link:
            program_id = link.read_info().program_id
        if program_id not in map_ids_by_program:
            map_ids_by_program[program_id] = set(objects.read_program_info(program_id).map_ids)
        reads |= map_ids_by_program[program_id]
    for folder in packet_program_folders(pins):
        reads |= map_ids_read_by(folder)
    return reads


def packet_program_folders(pins: Pins) -> list[Path]:
    """The folders with complete packet programs of any version."""
    folders = pins.other_folders("programs-tc", Path())
    return [folder for folder in folders if not folder.name.startswith(NEW_PREFIX)]


def _map_ids_by_program(pins: Pins) -> dict[int, set[int]]:
    """Id of each pinned socket program → the ids of its maps."""
    map_ids = {}
    for folder in pins.other_folders("programs-sock", Path()):
        for pin in folder.iterdir():
            with Program.open(pin) as program:
                info = program.read_info()
                map_ids[info.id] = set(info.map_ids)
    return map_ids


def map_ids_read_by(folder: Path) -> set[int]:
    """The ids of the maps read by the programs pinned in this folder, except their tail call
    map.
    """
    map_ids: set[int] = set()
    for pin in folder.iterdir():
        if pin.name != TAIL_CALL_MAP:
            with Program.open(pin) as program:
                map_ids |= set(program.read_info().map_ids)
    if (folder / TAIL_CALL_MAP).exists():
        with Map.open(folder / TAIL_CALL_MAP) as tail_calls:
            # private to these programs, and replaced together with them
            map_ids.discard(tail_calls.id)
    return map_ids


def _open_version(pins: Pins, folder: Path, spec: MapSpec, version: int, value_size: int) -> Map | None:
    """The map of this name in that folder, if it has this layout. The folder may be incomplete, if
    an agent was killed while removing it.
    """
    pin = folder / spec.name
    if not ((pins.layout(folder) / f"{spec.name}-{version}").is_dir() and pin.exists()):
        return None
    map_ = Map.open(pin)
    if (map_.type, map_.key_size, map_.value_size) == (spec.map_type, spec.key_size, value_size):
        return map_
    map_.close()
    return None


def make_map(spec: MapSpec, entries: int, inner: Map | None = None) -> Map:
    map_type, flags = spec.map_type, spec.flags
    try:
        return Map.create(map_type, spec.name, spec.key_size, spec.value_size, entries, flags, inner)
    except KernelError as error:
        # Which of these it is depends on the type of the map and on the kernel.
        if spec.size_flag and error.errno in (errno.E2BIG, errno.EINVAL, errno.ENOMEM):
            error.hint = f"lower {spec.size_flag}"
        raise


class Closable(Protocol):
    def close(self) -> None:
        """Closes it."""


def close_all(closables: Iterable[Closable]) -> None:
    for closable in closables:
        closable.close()


def remove_old_maps(pins: Pins) -> None:
    """Removes maps and layouts of other versions, once no program reads them, and unfinished
    maps.
    """
    for pin in pins.root.glob(f"{NEW_MAP_PREFIX}*"):
        pin.unlink()
    for kind, keep in (("maps", pins.maps), ("layout", pins.layout(pins.maps))):
        for folder in pins.other_folders(kind, keep):
            shutil.rmtree(folder, ignore_errors=True)


def replace_pin(pins: Pins, map_: Map, name: str) -> None:
    """Replaces the pin of this name by a map; at any time there is one."""
    _pin_temporarily(pins, map_, name).rename(pins.maps / name)


def _pin_temporarily(pins: Pins, map_: Map, name: str) -> Path:
    temporary = pins.root / f"{NEW_MAP_PREFIX}{name}"
    # left by an agent that was killed
    temporary.unlink(missing_ok=True)
    map_.pin(temporary)
    return temporary


def replace_inner(pins: Pins, name: str, old: Map, new: Map, outer: Map | None) -> None:
    """Replaces a map by one with the same contents, for programs and in all folders that pin it.
    An error leaves the old one in use. `outer`: None if no program reads the map.
    """
    pins_of_old = [pins.maps / name]
    for folder in pins.other_folders("maps", pins.maps):  # another version may share it
        if not folder.name.startswith(NEW_PREFIX) and (folder / name).exists():
            with Map.open(folder / name) as pinned:
                if pinned.id == old.id:
                    pins_of_old.append(folder / name)
    temporary_pins: list[Path] = []
    try:
        for number in range(len(pins_of_old)):
            temporary_pins.append(_pin_temporarily(pins, new, f"{name}-{number}"))
        if outer is not None:
            _set_inner(outer, new)
    except KernelError:
        for temporary in temporary_pins:
            temporary.unlink()
        raise
    # If the agent is killed here, the next one puts the map that it finds pinned into the array:
    # nothing has been written to either since, so programs see no difference.
    for temporary, pin in zip(temporary_pins, pins_of_old, strict=True):
        temporary.rename(pin)


def _set_inner(outer: Map, inner: Map) -> None:
    """Makes programs read this inner map. The call returns when no program reads the previous one
    any more (the kernel waits for a grace period of RCU), so that one may be closed. Before Linux
    v6.8 (876673364161) it would otherwise be freed under its readers.
    """
    if outer.lookup(ZERO) != U32.pack(inner.id):
        outer.update(ZERO, U32.pack(inner.fd))


def detach_link(pin: Path) -> None:
    """Detaches a pinned link at once, and removes the pin. Removing the pin alone would detach it a
    few milliseconds later.
    """
    # After an error the link is detached a little later, by the removal of its pin.
    with contextlib.suppress(KernelError), Link.open(pin) as link:
        link.detach()
    pin.unlink()


def detach_sockets(pins: Pins) -> int:
    """Detaches the socket hooks and removes their programs; returns the number of links. Sockets
    stay connected. The folder of links stays, empty.
    """
    pins.links.mkdir(mode=0o700, exist_ok=True)
    links = sorted(pins.links.iterdir())
    for link in links:
        detach_link(link)
    for folder in pins.other_folders("programs-sock", Path()):
        shutil.rmtree(folder, ignore_errors=True)
    return len(links)


def remove(pins: Pins) -> int:
    """Detaches all links and removes all pins; returns the number of links."""
    links = sorted(pins.links.iterdir()) if pins.links.is_dir() else []
    for link in links:
        detach_link(link)
    if pins.root.is_dir():
        shutil.rmtree(pins.root)
    return len(links)


def count_frontends(pins: Pins) -> int:
    """The number of frontends that delete_frontends() would delete."""
    count = 0
    for path in pins.root.glob("maps-*/services"):
        with Map.open(path) as map_:
            count += sum(1 for _ in map_.items())
    return count


def delete_frontends(pins: Pins) -> int:
    """Deletes all frontends, so that no new connection is translated; returns their number.
    Established connections continue. `cluster_ips` is emptied first, since ports without a frontend
    are refused on the addresses in it.
    """
    counts = dict.fromkeys(("cluster_ips", "services"), 0)
    # Those of other versions as well: their programs may still be attached.
    for folder in sorted(pins.root.glob("maps-*")):
        for name in counts:
            if (folder / name).exists():
                with Map.open(folder / name) as map_:
                    if (outer := folder / f"{name}_outer").exists():
                        # they differ if the agent was killed while the map grew
                        with Map.open(outer) as outer_map:
                            _set_inner(outer_map, map_)
                    counts[name] += sum(map_.delete(key) for key, _ in list(map_.items()))
    return counts["services"]
