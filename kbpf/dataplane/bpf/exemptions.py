"""Whose sockets the hooks leave alone: pods and patterns → cgroup folders → the map exempt_cgroups.

A pod is known by its uid and a pattern by its words; the programs ask for the number of a cgroup,
which is the inode of its folder (64 bits, never used twice). kubelet makes the folder at about the
time at which we hear of the pod, so it is looked for until it is there:

    .../kubepods*/.../podUID                            (cgroupfs driver)
    .../kubepods-....slice/kubepods-...-podUID.slice    (systemd driver; UID with _ for -)

By looking, not by inotify: a watch sees one folder, so each level that may come would need its own,
set before the next level is made in it, and what came in between has to be looked for all the same.
It costs nothing where nobody is exempt, and little elsewhere: a folder without folders in it is
never opened (its link count tells), nor one that no pattern can match.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.agent_maps import Tables
from kbpf.dataplane.bpf.maps.layout import U32, U64
from kbpf.errors import KernelError

log = logging.getLogger("kbpf.dataplane")

EAGER_SECONDS: Final = 0.2
"""Between two looks for a pod that is new."""
PATTERN_SECONDS: Final = 1.0
"""For cgroups that may come and match a pattern."""
PATIENT_SECONDS: Final = 2.0
"""For pods that have not come by PATIENCE: they wait for an image, or have ended."""
STEADY_SECONDS: Final = 10.0
"""Between two looks whether the folders that were found are still the same."""
PATIENCE: Final = 60.0
DEEPEST: Final = 8
"""Levels below the hooked cgroup at which kubelet's folders are looked for."""

MAP: Final = "exempt_cgroups"
ONE: Final = U32.pack(1)


class Folder(NamedTuple):
    """A cgroup: its path below where the walk began, its number, whether others are in it."""

    path: str
    id: int
    is_parent: bool


def _inside(root: Path, below: str) -> Iterator[Folder]:
    """The cgroups right in this one; none when it is gone."""
    try:
        with os.scandir(root / below) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # gone since
                path = f"{below}/{entry.name}" if below else entry.name
                yield Folder(path, found.st_ino, found.st_nlink > 2)
    except OSError:
        return


def walk(root: Path, enter: Callable[[str], bool]) -> Iterator[Folder]:
    """Every cgroup below `root`, but for what is in those that `enter` (of the path) refuses."""
    waiting = [""]
    while waiting:
        for folder in _inside(root, waiting.pop()):
            yield folder
            if folder.is_parent and enter(folder.path):
                waiting.append(folder.path)


def pod_folders(root: Path, uids: Collection[str]) -> Iterator[tuple[str, Folder]]:
    """(uid, folder) of those pods whose folders are there."""
    names = {f"pod{uid}": uid for uid in uids}
    names |= {f"pod{uid.replace('-', '_')}.slice": uid for uid in uids}

    def enter(path: str) -> bool:
        return path.count("/") + 1 < DEEPEST and not _pod_part(path)

    for folder in walk(root, enter):
        uid = names.get(_pod_part(folder.path))
        if uid is not None:
            yield uid, folder


def _pod_part(path: str) -> str:
    """The end of the name that says which pod it is; "" for other folders than kubelet's."""
    above, _, name = path.rpartition("/")
    if name.startswith("pod") and any("kubepods" in part for part in above.split("/")):
        return name
    if "kubepods" in name and name.endswith(".slice"):
        head, dash, tail = name.rpartition("-pod")
        return "pod" + tail if head and dash else ""
    return ""


def matching(root: Path, patterns: Collection[str]) -> Iterator[Folder]:
    """Cgroups whose path below `root` matches one of the patterns."""
    plain = [_literal(pattern) for pattern in patterns]

    def enter(path: str) -> bool:
        here = path + "/"
        return any(start.startswith(here) or here.startswith(start) for start in plain)

    for folder in walk(root, enter):
        if any(fnmatchcase(folder.path, pattern) for pattern in patterns):
            yield folder


def _literal(pattern: str) -> str:
    """The pattern up to its first wildcard."""
    return pattern[: next((i for i, c in enumerate(pattern) if c in "*?["), len(pattern))]


class Exemptions:
    """Keeps the map in step. `root`: that patterns are below; `hooked`: that pods are looked for
    in. `changed` is called when somebody is exempt now and nobody was, or nobody is any more.

    What an earlier agent left stays until it is known which pods are exempt.
    """

    def __init__(
        self,
        root: Path,
        hooked: Path,
        patterns: Collection[str],
        tables: Tables,
        changed: Callable[[], None],
    ) -> None:
        self._root, self._hooked, self._patterns = root, hooked, tuple(patterns)
        self._tables, self._changed = tables, changed
        self._uids: frozenset[str] = frozenset()
        self._known = False
        self._pods: dict[str, dict[str, int]] = {}  # uid → path below `hooked` → id
        self._written: set[int] = set()
        self._adopted: set[int] = set()
        self._patience = 0.0  # until when a pod that is missing is looked for eagerly
        self._due: float | None = None
        self._problem = ""

    def adopt(self) -> None:
        """Takes over what the map holds, but for cgroups that are gone."""
        self._written = {int(U64.unpack(key)[0]) for key, _ in self._tables.maps[MAP].items()}
        self._adopted = set(self._written)
        if self._adopted:
            self._adopted &= {folder.id for folder in walk(self._root, lambda _: True)}

    def want(self, uids: Collection[str], known: bool, now: float) -> None:
        """From now on these pods; not `known`: and whoever was exempt before."""
        new = frozenset(uids)
        if new - self._uids:
            self._patience = now + PATIENCE
        first = self._due is None and (self._patterns or self._written)
        if new != self._uids or known != self._known or first:
            self._uids, self._known = new, known
            self.look(now)

    def tick(self, now: float) -> float | None:
        """Looks again when that is due; when the next time is, None: never."""
        if self._due is not None and now >= self._due:
            self.look(now)
        return self._due

    @property
    def missing(self) -> frozenset[str]:
        """Pods whose folders have not been found."""
        return self._uids - self._pods.keys()

    @property
    def is_empty(self) -> bool:
        """Whether nobody is exempt."""
        return not self._written

    def problems(self, now: float) -> tuple[str, ...]:
        """What keeps a pod from being exempt, a line each."""
        lines = [self._problem] if self._problem else []
        if self.missing and now > self._patience:
            names = ", ".join(sorted(self.missing)[:3])
            lines.append(
                f"{len(self.missing)} Pods with the label kbpf.io/socket-lb have no cgroup below "
                f"{self._hooked} (uid {names}): they have not begun, have ended, or are static Pods"
            )
        return tuple(lines)

    def look(self, now: float) -> None:
        """Finds the folders, and writes what differs."""
        self._pods = {
            uid: there
            for uid, folders in self._pods.items()
            if uid in self._uids and (there := self._still_there(folders))
        }
        if self.missing:
            for uid, folder in pod_folders(self._hooked, self.missing):
                self._pods.setdefault(uid, {})[folder.path] = folder.id
        wanted = {i for folders in self._pods.values() for i in folders.values()}
        if self._patterns:
            wanted |= {folder.id for folder in matching(self._root, self._patterns)}
        if not self._known:
            wanted |= self._adopted
        self._write(wanted)
        self._due = self._next(now)

    def _still_there(self, folders: dict[str, int]) -> dict[str, int]:
        found = {}
        for path, number in folders.items():
            try:
                if os.stat(self._hooked / path).st_ino == number:
                    found[path] = number
            except OSError:
                continue
        return found

    def _write(self, wanted: set[int]) -> None:
        """A cgroup that is not exempt any more goes after those that are by now."""
        was_empty = self.is_empty
        new, gone = wanted - self._written, self._written - wanted
        try:
            self._tables.put(MAP, ((U64.pack(i), ONE) for i in sorted(new)))
            self._written |= new
            self._tables.drop(MAP, map(U64.pack, sorted(gone)))
            self._written -= gone
            self._problem = ""
        except KernelError as error:
            self._written = {int(U64.unpack(k)[0]) for k, _ in self._tables.maps[MAP].items()}
            if not self._problem:
                log.error("not exempt, trying again: %s", error)
            self._problem = f"not all cgroups are exempt: {error}"
        if new or gone:
            log.info("exempt cgroups=%d new=%d gone=%d", len(self._written), len(new), len(gone))
        if self.is_empty != was_empty:
            self._changed()

    def _next(self, now: float) -> float | None:
        if self.missing and now < self._patience:
            return now + EAGER_SECONDS
        if self._patterns or self._problem:
            return now + PATTERN_SECONDS
        if self.missing:
            return now + PATIENT_SECONDS
        return now + STEADY_SECONDS if self._pods else None
