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

from kbpf.dataplane.bpf.hooks import TAILS_MAP
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.maps.layout import MAPS, MapSpec
from kbpf.dataplane.bpf.maps.migrate import Left
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.system.private_folders import LOCK_SECONDS, lock_folder
from kbpf.model.config import MapSizes

log = logging.getLogger("kbpf.dataplane")

BEHIND_SERVICES: Final = frozenset(("backend_slots", "backends", "set_members"))
"""Where a value of `services` leads to: what it says holds for these maps only."""
FLIPPED: Final = BEHIND_SERVICES | {"services"}
"""What a program has to read to see what is flipped."""


NEW: Final = "new-"
OLD: Final = "old-"
NEW_MAP: Final = f"{NEW}map-"
NEW_LINK: Final = f"{NEW}link-"

_OURS: Final = re.compile(
    rf"links|devices|beside|({NEW}|{OLD})?(maps|layout|programs)-.+|({NEW_MAP}|{NEW_LINK}).+"
)


def is_ours(name: str) -> bool:
    """Whether an agent gives this name to something in the folder of pins."""
    return _OURS.fullmatch(name) is not None


class Pins:
    """The folder of pins of one agent."""

    def __init__(self, root: Path) -> None:
        self._name = root
        self._use(root)

    def _use(self, root: Path) -> None:
        self.root = root
        self.maps = root / f"maps-{layout.schema_hash()}"
        self.links = root / "links"

    def hold(self, descriptor: int) -> None:
        """From now on the folder is the one behind this descriptor, whatever becomes of its name:
        what somebody mounts over it hides it from others and not from us.
        """
        self._use(Path(f"/proc/self/fd/{descriptor}"))

    def let_go(self) -> None:
        """It is what has its name, again."""
        self._use(self._name)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors inside name the folder as the operator knows it."""
        try:
            yield
        except KernelError as error:
            error.where = error.where.replace(str(self.root), str(self._name))
            raise

    def programs(self, key: str) -> Path:
        """Where the programs of this artifact are."""
        return self.root / f"programs-{key}"

    def layout(self, maps: Path) -> Path:
        """What a folder of maps holds, told by empty folders named after each map and its
        version: a bpffs holds no files.
        """
        return self.root / maps.name.replace("maps-", "layout-")

    def others(self, kind: str, keep: Path) -> list[Path]:
        """Folders of this kind that are not the current one: of another version, unfinished, or
        kept for what still runs.
        """
        if not self.root.exists():
            return []
        names = tuple(f"{prefix}{kind}-" for prefix in ("", NEW, OLD))
        found = [p for p in self.root.iterdir() if p.name.startswith(names)]
        return sorted(p for p in found if p != keep)


def lock(pins: Pins, patience: float = LOCK_SECONDS) -> int:
    """A descriptor that makes this process the only writer below the pin folder."""
    hint = "stop it, or give this one a folder of its own with --pin-dir"
    return lock_folder(pins.root, patience, hint)


@contextlib.contextmanager
def building(final: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `final` by one rename, or vanishes when that fails."""
    temporary = final.parent / f"{NEW}{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@dataclass(frozen=True, slots=True)
class Opened:
    """All maps; whether they were adopted from an earlier agent; the names of those that are new,
    and empty; what has to be copied from: what another version has laid out otherwise, and what
    programs write that is not pinned.
    """

    maps: Mapping[str, Map]
    adopted: bool
    fresh: frozenset[str]
    former: tuple[Left, ...]


def open_maps(pins: Pins, sizes: MapSizes, packet_path: bool = False) -> Opened:
    """Opens what is pinned, and makes what is missing."""
    adopted = pins.maps.is_dir()
    fresh = frozenset[str]() if adopted else _make_maps(pins, sizes, packet_path)
    maps = {name: open_map(pins.maps / name, spec) for name, spec in MAPS.items()}
    return Opened(maps, adopted, fresh, (*_former(pins), *_orphaned(pins, maps)))


def open_map(path: Path, spec: MapSpec) -> Map:
    """A pinned map, its shape checked: the kernel would write past a wrong one."""
    found = Map.open(path)
    shape = (found.type, found.key_size, found.value_size)
    if shape != (spec.kind, spec.key_size, spec.value_size):
        found.close()
        raise KernelError(
            f"the pinned map has another layout ({shape})", str(path), "run kbpf cleanup"
        )
    return found


def _make_maps(pins: Pins, sizes: MapSizes, packet_path: bool) -> frozenset[str]:
    """New maps; those that another version of kbpf left with the same layout are taken over, so
    that an upgrade keeps affinity, peers and ids. Its programs go on reading them meanwhile. The
    names of those that were not.
    """
    old = pins.others("maps", pins.maps)
    taken = {name: found for name, spec in MAPS.items() if (found := _carried(pins, old, spec))}
    # The flip would lead its programs, which still read the old slots, to new ones.
    if "services" in taken and not taken.keys() >= BEHIND_SERVICES:
        taken.pop("services").close()
    if "flows" not in taken and "order" in taken:  # it has the keys of those
        taken.pop("order").close()
    with building(pins.maps) as folder:
        for name, spec in MAPS.items():
            with taken.get(name) or make_map(spec, spec.start(sizes, packet_path)) as made:
                made.pin(folder / name)
        pins.layout(pins.maps).mkdir(exist_ok=True)
        for spec in MAPS.values():
            (pins.layout(pins.maps) / f"{spec.name}-{spec.version}").mkdir(exist_ok=True)
    return frozenset(MAPS.keys() - taken.keys())


def _carried(pins: Pins, folders: Iterable[Path], spec: MapSpec) -> Map | None:
    """The map of this name and layout in one of these folders."""
    found = (_of_version(pins, f, spec, spec.version, spec.value_size) for f in folders)
    return next((one for one in found if one is not None), None)


def _former(pins: Pins) -> Iterator[Left]:
    """What is left in a layout that this version can read."""
    for folder in pins.others("maps", pins.maps):
        for spec in MAPS.values():
            for one in spec.former:
                found = _of_version(pins, folder, spec, one.version, one.value_size)
                if found is not None:
                    yield Left(spec.name, found, one.convert)


def _orphaned(pins: Pins, maps: Mapping[str, Map]) -> Iterator[Left]:
    """What pinned programs write to and is not pinned itself: an agent gave it another size, and
    ended while they changed over.
    """
    if pins.others("maps", pins.maps):
        return  # programs of another version: its maps are told by their folder
    for number in sorted(_read_by_pinned(pins) - {held.id for held in maps.values()}):
        try:
            found = objects.map_by_id(number)
        except KernelError as error:
            if error.errno != errno.EPERM:
                raise
            log.warning(
                "not copied without CAP_SYS_ADMIN: what programs wrote to a map that an agent left "
                "unpinned as it grew id=%d",
                number,
            )
            return
        shape = found.type, found.key_size, found.value_size
        spec = MAPS.get(found.short_name)
        if spec and spec.fixed and shape == (spec.kind, spec.key_size, spec.value_size):
            yield Left(spec.name, found)
        else:
            found.close()


def _read_by_pinned(pins: Pins) -> set[int]:
    """The ids of the maps of all programs that may be attached."""
    reads = {number for one in read_by_attached(pins) for number in one}
    for folder in pins.others("programs-tc", Path()):
        if not folder.name.startswith(NEW):
            reads |= read_by(folder)
    return reads


def read_by_attached(pins: Pins) -> Iterator[set[int]]:
    """The ids of the maps that each program reads which a pinned link has attached.

    The programs are found by their pins: the kernel opens programs by id with CAP_SYS_ADMIN only,
    and what is attached is pinned before. By id is the way out for one that is not, all the same.
    """
    pinned = _maps_by_program(pins)
    for pin in sorted(pins.links.iterdir()) if pins.links.is_dir() else ():
        with Link.open(pin) as link:
            number = link.info().program
        if number not in pinned:
            with objects.program_by_id(number) as program:
                pinned[number] = set(program.info().map_ids)
        yield pinned[number]


def _maps_by_program(pins: Pins) -> dict[int, set[int]]:
    """By the id of each socket program that is pinned: the ids of its maps."""
    found = {}
    for folder in pins.others("programs-sock", Path()):
        for pin in folder.iterdir():
            with Program.open(pin) as program:
                info = program.info()
                found[info.id] = set(info.map_ids)
    return found


def read_by(folder: Path) -> set[int]:
    """The ids of the maps that the programs pinned there read, but for their tail calls."""
    reads: set[int] = set()
    for pin in folder.iterdir():
        if pin.name != TAILS_MAP:
            with Program.open(pin) as program:
                reads |= set(program.info().map_ids)
    if (folder / TAILS_MAP).exists():
        with Map.open(folder / TAILS_MAP) as tails:
            reads.discard(tails.id)
    return reads


def _of_version(
    pins: Pins, folder: Path, spec: MapSpec, version: int, value_size: int
) -> Map | None:
    """The map of this name in that folder, if it has this layout. An agent that was killed while
    it removed the folder has left a part of it.
    """
    pin = folder / spec.name
    if not ((pins.layout(folder) / f"{spec.name}-{version}").is_dir() and pin.exists()):
        return None
    found = Map.open(pin)
    if (found.type, found.key_size, found.value_size) == (spec.kind, spec.key_size, value_size):
        return found
    found.close()
    return None


def make_map(spec: MapSpec, entries: int) -> Map:
    """A new map for this purpose."""
    kind, flags = spec.kind, spec.flags
    try:
        return Map.create(kind, spec.name, spec.key_size, spec.value_size, entries, flags)
    except KernelError as error:
        if spec.sized_by and error.errno in (errno.E2BIG, errno.EINVAL, errno.ENOMEM):
            error.hint = f"lower --max-{spec.sized_by}"
        raise


class Closable(Protocol):
    """Something to close."""

    def close(self) -> None:
        """Ends it."""


def close_all(things: Iterable[Closable]) -> None:
    """Closes them all."""
    for thing in things:
        thing.close()


def remove_old_maps(pins: Pins) -> None:
    """Maps and layouts of other versions, once nobody reads them any more, and bigger maps that an
    agent left half done.
    """
    for fresh in pins.root.glob(f"{NEW_MAP}*"):
        fresh.unlink()
    for kind, keep in (("maps", pins.maps), ("layout", pins.layout(pins.maps))):
        for other in pins.others(kind, keep):
            shutil.rmtree(other, ignore_errors=True)


def replace_pin(pins: Pins, made: Map, name: str) -> None:
    """Puts a map in the place of the pinned one of that name."""
    fresh = pins.root / f"{NEW_MAP}{name}"
    fresh.unlink(missing_ok=True)
    made.pin(fresh)
    fresh.rename(pins.maps / name)


def detach(pin: Path) -> None:
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
        detach(link)
    for folder in pins.others("programs-sock", Path()):
        shutil.rmtree(folder, ignore_errors=True)
    return len(links)


def remove(pins: Pins) -> int:
    """Detaches everything and removes all pins; how many links there were."""
    links = sorted(pins.links.iterdir()) if pins.links.is_dir() else []
    for link in links:
        detach(link)
    if pins.root.is_dir():
        shutil.rmtree(pins.root)
    return len(links)


def forget_frontends(pins: Pins) -> int:
    """Takes away what new connections are known by; how many frontends there were. What is
    translated already goes on. ClusterIPs go first: a port of theirs without a Service is refused.
    """
    counts = dict.fromkeys(("cluster_ips", "services"), 0)
    for folder in sorted(pins.root.glob("maps-*")):
        for name in counts:
            if (folder / name).exists():
                with Map.open(folder / name) as found:
                    counts[name] += sum(found.delete(key) for key, _ in list(found.items()))
    return counts["services"]
