"""Pins of the BPF data plane, and its maps: made, adopted, replaced, removed.

    PIN/maps-SCHEMA/NAME       maps of one layout (layout.schema_hash)
    PIN/layout-SCHEMA/NAME-N   the version of each of these maps
    PIN/programs-KEY/HOOK      programs of one artifact
    PIN/links/HOOK             attachments

    PIN/devices/...            what is attached to devices by other means than links (attach.py)
    PIN/beside                 whether rules of the host belong to this agent (beside.py)

Everything is built in a folder whose name begins with `new-` and published by one rename, so what
stands under the names above is complete. Programs that devices still run when newer ones take their
name are kept in `old-programs-KEY-N`. programs.py has what the programs do there.
"""

import contextlib
import errno
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kbpf.dataplane.bpf.hooks import TAIL_CALL_MAP
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.maps.layout import MAPS, MapSpec
from kbpf.dataplane.bpf.maps.migrate import ReplacedMap
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.system.private_folders import LOCK_TIMEOUT_S, lock_folder
from kbpf.model.config import MapSizes

log = logging.getLogger("kbpf.dataplane")

SERVICES_TARGETS: Final = frozenset(("backend_slots", "backends", "set_members"))
"""Where a value of `services` leads to: what it says holds for these maps only."""
FLIPPED_MAPS: Final = SERVICES_TARGETS | {"services"}
"""What a program has to read to see what is flipped."""


NEW_PREFIX: Final = "new-"
OLD_PREFIX: Final = "old-"
NEW_MAP_PREFIX: Final = f"{NEW_PREFIX}map-"
NEW_LINK_PREFIX: Final = f"{NEW_PREFIX}link-"

_PIN_NAMES: Final = re.compile(
    rf"links|devices|beside|({NEW_PREFIX}|{OLD_PREFIX})?(maps|layout|programs)-.+|({NEW_MAP_PREFIX}|{NEW_LINK_PREFIX}).+"
)


def is_pin_name(name: str) -> bool:
    """Whether an agent gives this name to something in the folder of pins."""
    return _PIN_NAMES.fullmatch(name) is not None


class Pins:
    """The folder of pins of one agent."""

    def __init__(self, root: Path) -> None:
        self._operator_path = root
        self._set_root(root)

    def _set_root(self, root: Path) -> None:
        self.root = root
        self.maps = root / f"maps-{layout.schema_hash()}"
        self.links = root / "links"

    def use_descriptor(self, descriptor: int) -> None:
        """From now on the folder is the one behind this descriptor, whatever becomes of its name:
        what somebody mounts over it hides it from others and not from us.
        """
        self._set_root(Path(f"/proc/self/fd/{descriptor}"))

    def use_path(self) -> None:
        """It is what has its name, again."""
        self._set_root(self._operator_path)

    @contextlib.contextmanager
    def with_operator_path(self) -> Iterator[None]:
        """Errors inside name the folder as the operator knows it."""
        try:
            yield
        except KernelError as error:
            error.where = error.where.replace(str(self.root), str(self._operator_path))
            raise

    def programs(self, key: str) -> Path:
        """Where the programs of this artifact are."""
        return self.root / f"programs-{key}"

    def layout(self, maps: Path) -> Path:
        """What a folder of maps holds, told by empty folders named after each map and its
        version: a bpffs holds no files.
        """
        return self.root / maps.name.replace("maps-", "layout-")

    def other_folders(self, kind: str, keep: Path) -> list[Path]:
        """Folders of this kind that are not the current one: of another version, unfinished, or
        kept for what still runs.
        """
        if not self.root.exists():
            return []
        names = tuple(f"{prefix}{kind}-" for prefix in ("", NEW_PREFIX, OLD_PREFIX))
        folders = [folder for folder in self.root.iterdir() if folder.name.startswith(names)]
        return sorted(folder for folder in folders if folder != keep)


def lock_pins(pins: Pins, timeout_s: float = LOCK_TIMEOUT_S) -> int:
    """A descriptor that makes this process the only writer below the pin folder."""
    hint = "stop it, or give this one a folder of its own with --pin-dir"
    return lock_folder(pins.root, timeout_s, hint)


@contextlib.contextmanager
def build_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `final` by one rename, or vanishes when that fails."""
    temporary = final.parent / f"{NEW_PREFIX}{final.name}"
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
    """All maps; whether they were adopted from an earlier agent; the names of those that are new,
    and empty; what has to be copied from: what another version has laid out otherwise, and what
    programs write that is not pinned.
    """

    maps: Mapping[str, Map]
    adopted: bool
    new_maps: frozenset[str]
    former_maps: tuple[ReplacedMap, ...]


def open_maps(pins: Pins, sizes: MapSizes, packet_path: bool = False) -> OpenedMaps:
    """Opens what is pinned, and makes what is missing."""
    adopted = pins.maps.is_dir()
    new_maps = frozenset[str]() if adopted else _make_maps(pins, sizes, packet_path)
    maps = {name: open_map(pins.maps / name, spec) for name, spec in MAPS.items()}
    return OpenedMaps(
        maps, adopted, new_maps, (*_find_former_layouts(pins), *_find_unpinned_maps(pins, maps))
    )


def open_map(path: Path, spec: MapSpec) -> Map:
    """A pinned map, its shape checked: the kernel would write past a wrong one."""
    map_ = Map.open(path)
    shape = (map_.type, map_.key_size, map_.value_size)
    if shape != (spec.map_type, spec.key_size, spec.value_size):
        map_.close()
        raise KernelError(
            f"the pinned map has another layout ({shape})", str(path), "run kbpf cleanup"
        )
    return map_


def _make_maps(pins: Pins, sizes: MapSizes, packet_path: bool) -> frozenset[str]:
    """New maps; those that another version of kbpf left with the same layout are taken over, so
    that an upgrade keeps affinity, peers and ids. Its programs go on reading them meanwhile. The
    names of those that were not.
    """
    old = pins.other_folders("maps", pins.maps)
    reused = {
        name: map_ for name, spec in MAPS.items() if (map_ := _find_reusable_map(pins, old, spec))
    }
    # The flip would lead its programs, which still read the old slots, to new ones.
    if "services" in reused and not reused.keys() >= SERVICES_TARGETS:
        reused.pop("services").close()
    if "flows" not in reused and "flow_queue" in reused:  # it has the keys of those
        reused.pop("flow_queue").close()
    with build_folder(pins.maps) as folder:
        for name, spec in MAPS.items():
            with reused.get(name) or make_map(
                spec, spec.initial_entries(sizes, packet_path)
            ) as new_map:
                new_map.pin(folder / name)
        pins.layout(pins.maps).mkdir(exist_ok=True)
        for spec in MAPS.values():
            (pins.layout(pins.maps) / f"{spec.name}-{spec.version}").mkdir(exist_ok=True)
    return frozenset(MAPS.keys() - reused.keys())


def _find_reusable_map(pins: Pins, folders: Iterable[Path], spec: MapSpec) -> Map | None:
    """The map of this name and layout in one of these folders."""
    candidates = (
        _open_version(pins, folder, spec, spec.version, spec.value_size) for folder in folders
    )
    return next((map_ for map_ in candidates if map_ is not None), None)


def _find_former_layouts(pins: Pins) -> Iterator[ReplacedMap]:
    """What is left in a layout that this version can read."""
    for folder in pins.other_folders("maps", pins.maps):
        for spec in MAPS.values():
            for former_layout in spec.former_layouts:
                map_ = _open_version(
                    pins, folder, spec, former_layout.version, former_layout.value_size
                )
                if map_ is not None:
                    yield ReplacedMap(spec.name, map_, former_layout.convert)


def _find_unpinned_maps(pins: Pins, maps: Mapping[str, Map]) -> Iterator[ReplacedMap]:
    """What pinned programs write to and is not pinned itself: an agent gave it another size, and
    ended while they changed over.
    """
    if pins.other_folders("maps", pins.maps):
        return  # programs of another version: its maps are told by their folder
    for map_id in sorted(_map_ids_read_by_all(pins) - {map_.id for map_ in maps.values()}):
        try:
            unpinned = objects.open_map_by_id(map_id)
        except KernelError as error:
            if error.errno != errno.EPERM:
                raise
            log.warning(
                "not copied without CAP_SYS_ADMIN: what programs wrote to a map that an agent left "
                "unpinned as it grew id=%d",
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
    """The ids of the maps of all programs that may be attached."""
    reads = {map_id for ids in map_ids_read_by_attached(pins) for map_id in ids}
    for folder in pins.other_folders("programs-tc", Path()):
        if not folder.name.startswith(NEW_PREFIX):
            reads |= map_ids_read_by(folder)
    return reads


def map_ids_read_by_attached(pins: Pins) -> Iterator[set[int]]:
    """The ids of the maps that each program reads which a pinned link has attached.

    The programs are found by their pins: the kernel opens programs by id with CAP_SYS_ADMIN only,
    and what is attached is pinned before. By id is the way out for one that is not, all the same.
    """
    map_ids_by_program = _map_ids_by_program(pins)
    for pin in sorted(pins.links.iterdir()) if pins.links.is_dir() else ():
        with Link.open(pin) as link:
            program_id = link.read_info().program_id
        if program_id not in map_ids_by_program:
            with objects.open_program_by_id(program_id) as program:
                map_ids_by_program[program_id] = set(program.read_info().map_ids)
        yield map_ids_by_program[program_id]


def _map_ids_by_program(pins: Pins) -> dict[int, set[int]]:
    """By the id of each socket program that is pinned: the ids of its maps."""
    map_ids = {}
    for folder in pins.other_folders("programs-sock", Path()):
        for pin in folder.iterdir():
            with Program.open(pin) as program:
                info = program.read_info()
                map_ids[info.id] = set(info.map_ids)
    return map_ids


def map_ids_read_by(folder: Path) -> set[int]:
    """The ids of the maps that the programs pinned there read, but for their tail calls."""
    map_ids: set[int] = set()
    for pin in folder.iterdir():
        if pin.name != TAIL_CALL_MAP:
            with Program.open(pin) as program:
                map_ids |= set(program.read_info().map_ids)
    if (folder / TAIL_CALL_MAP).exists():
        with Map.open(folder / TAIL_CALL_MAP) as tail_calls:
            map_ids.discard(tail_calls.id)
    return map_ids


def _open_version(
    pins: Pins, folder: Path, spec: MapSpec, version: int, value_size: int
) -> Map | None:
    """The map of this name in that folder, if it has this layout. An agent that was killed while
    it removed the folder has left a part of it.
    """
    pin = folder / spec.name
    if not ((pins.layout(folder) / f"{spec.name}-{version}").is_dir() and pin.exists()):
        return None
    map_ = Map.open(pin)
    if (map_.type, map_.key_size, map_.value_size) == (spec.map_type, spec.key_size, value_size):
        return map_
    map_.close()
    return None


def make_map(spec: MapSpec, entries: int) -> Map:
    """A new map for this purpose."""
    map_type, flags = spec.map_type, spec.flags
    try:
        return Map.create(map_type, spec.name, spec.key_size, spec.value_size, entries, flags)
    except KernelError as error:
        if spec.sized_by and error.errno in (errno.E2BIG, errno.EINVAL, errno.ENOMEM):
            error.hint = f"lower --max-{spec.sized_by}"
        raise


class Closable(Protocol):
    """Something to close."""

    def close(self) -> None:
        """Ends it."""


def close_all(closables: Iterable[Closable]) -> None:
    """Closes them all."""
    for closable in closables:
        closable.close()


def remove_old_maps(pins: Pins) -> None:
    """Maps and layouts of other versions, once nobody reads them any more, and bigger maps that an
    agent left half done.
    """
    for pin in pins.root.glob(f"{NEW_MAP_PREFIX}*"):
        pin.unlink()
    for kind, keep in (("maps", pins.maps), ("layout", pins.layout(pins.maps))):
        for folder in pins.other_folders(kind, keep):
            shutil.rmtree(folder, ignore_errors=True)


def replace_pin(pins: Pins, map_: Map, name: str) -> None:
    """Puts a map in the place of the pinned one of that name."""
    temporary = pins.root / f"{NEW_MAP_PREFIX}{name}"
    temporary.unlink(missing_ok=True)
    map_.pin(temporary)
    temporary.rename(pins.maps / name)


def detach_link(pin: Path) -> None:
    """Ends a pinned attachment, now, and removes the pin."""
    with contextlib.suppress(KernelError), Link.open(pin) as link:
        link.detach()
    pin.unlink()


def detach_sockets(pins: Pins) -> int:
    """Ends what is attached to the socket hooks, and removes their programs; how many there were.
    Whoever is connected stays so. The folder of links stays, empty.
    """
    pins.links.mkdir(mode=0o700, exist_ok=True)
    links = sorted(pins.links.iterdir())
    for link in links:
        detach_link(link)
    for folder in pins.other_folders("programs-sock", Path()):
        shutil.rmtree(folder, ignore_errors=True)
    return len(links)


def remove(pins: Pins) -> int:
    """Detaches everything and removes all pins; how many links there were."""
    links = sorted(pins.links.iterdir()) if pins.links.is_dir() else []
    for link in links:
        detach_link(link)
    if pins.root.is_dir():
        shutil.rmtree(pins.root)
    return len(links)


def delete_frontends(pins: Pins) -> int:
    """Takes away what new connections are known by; how many frontends there were. What is
    translated already goes on. ClusterIPs go first: a port of theirs without a Service is refused.
    """
    counts = dict.fromkeys(("cluster_ips", "services"), 0)
    for folder in sorted(pins.root.glob("maps-*")):
        for name in counts:
            if (folder / name).exists():
                with Map.open(folder / name) as map_:
                    counts[name] += sum(map_.delete(key) for key, _ in list(map_.items()))
    return counts["services"]
