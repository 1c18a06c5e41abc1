# SPDX-License-Identifier: Apache-2.0
"""Exempts sockets from the hooks: finds the cgroups of exempt pods and patterns, and writes their
ids to the map `exempt_cgroups`. The agent's own connections to the API server are exempt by their
cookies, in the map `agent_sockets` (AgentSockets).

A pod is identified by its uid, a pattern by its text. The programs look up a cgroup's id, which is
the inode number of its folder (64 bits, never reused). kubelet creates the folder
(kernel/system/pods.py) at about the time when the API server reports the pod, so we poll until it
exists.

We poll instead of using inotify: a watch covers one folder, so each level would need a watch of its
own before the next level is created in it, and folders created in between would be missed. Polling
costs nothing if no socket is exempt, and little otherwise: folders without subfolders (by their
link count) and folders that no pattern can match are never opened.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.layout import AGENT_SOCKETS, U32, U64
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts, pods

log = logging.getLogger("kbpf.dataplane")

NEW_POD_POLL_INTERVAL_S: Final = 0.2
"""Interval between two searches for a new pod, in seconds."""
PATTERN_POLL_INTERVAL_S: Final = 1.0
"""The same for new cgroups that match a pattern."""
MISSING_POD_POLL_INTERVAL_S: Final = 2.0
"""The same for pods not found within NEW_POD_WINDOW_S: they have not started yet, or have ended."""
VERIFY_INTERVAL_S: Final = 10.0
"""Interval between two checks that the known folders are still the same."""
NEW_POD_WINDOW_S: Final = 60.0
MAX_DEPTH: Final = 8
"""Levels below the hooked cgroup at which kubelet's folders are looked for."""

MAP_NAME: Final = "exempt_cgroups"
ONE: Final = U32.pack(1)


class CgroupFolder(NamedTuple):
    """A cgroup: its path below the start of the walk, its id, and whether it has children."""

    path: str
    id: int
    is_parent: bool


def _list_children(root: Path, parent: str) -> Iterator[CgroupFolder]:
    """The direct children of this cgroup; none if it was deleted."""
    try:
        with os.scandir(root / parent) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # deleted since
                path = f"{parent}/{entry.name}" if parent else entry.name
                # a folder has two links (its name and "."), and one more (..) for each child
                yield CgroupFolder(path, status.st_ino, status.st_nlink > 2)
    except OSError:
        return


def walk(root: Path, should_enter: Callable[[str], bool]) -> Iterator[CgroupFolder]:
    """All cgroups below `root`, without the descendants of paths that `should_enter` refuses."""
    stack = [""]
    while stack:
        for folder in _list_children(root, stack.pop()):
            yield folder
            if folder.is_parent and should_enter(folder.path):
                stack.append(folder.path)


def find_pod_folders(root: Path, uids: Collection[str]) -> Iterator[tuple[str, CgroupFolder]]:
    """(uid, folder) of those pods whose folders exist."""

    def should_enter(path: str) -> bool:
        return path.count("/") + 1 < MAX_DEPTH and not pods.pod_uid_of_folder(path)

    for folder in walk(root, should_enter):
        if (uid := pods.pod_uid_of_folder(folder.path)) in uids:
            yield uid, folder


def find_matching(root: Path, patterns: Collection[str]) -> Iterator[CgroupFolder]:
    """Cgroups whose path below `root` matches one of the patterns."""
    prefixes = [_literal_prefix(pattern) for pattern in patterns]

    def should_enter(path: str) -> bool:
        folder_path = path + "/"
        return any(prefix.startswith(folder_path) or folder_path.startswith(prefix) for prefix in prefixes)

    for folder in walk(root, should_enter):
        if any(fnmatchcase(folder.path, pattern) for pattern in patterns):
            yield folder


def _literal_prefix(pattern: str) -> str:
    """The pattern up to its first wildcard."""
    return pattern[: next((i for i, c in enumerate(pattern) if c in "*?["), len(pattern))]


class Exemptions:
    """Keeps the map `exempt_cgroups` up to date.

    Patterns match below `root`; pods are searched below `hooked_cgroup`. `on_emptiness_change` is
    called when the first cgroup becomes exempt, and when the last one no longer is. Entries of an
    earlier agent are kept until the exempt pods are known.
    """

    def __init__(
        self,
        root: Path,
        hooked_cgroup: Path,
        patterns: Collection[str],
        agent_maps: AgentMaps,
        on_emptiness_change: Callable[[], None],
    ) -> None:
        self._root, self._hooked_cgroup, self._patterns = root, hooked_cgroup, tuple(patterns)
        self._agent_maps, self._on_emptiness_change = agent_maps, on_emptiness_change
        self._uids: frozenset[str] = frozenset()
        self._pods_known = False
        self._pods: dict[str, dict[str, int]] = {}  # uid → path below `hooked_cgroup` → id
        self._written: set[int] = set()
        self._adopted: set[int] = set()
        self._eager_until = 0.0  # missing pods are searched at short intervals until then
        self._due: float | None = None
        self._problem = ""

    def adopt(self) -> None:
        """Adopts the entries of the map, except those of deleted cgroups."""
        self._written = self._read_ids()
        self._adopted = set(self._written)
        if self._adopted:
            self._adopted &= {folder.id for folder in walk(self._root, lambda _: True)}

    def _read_ids(self) -> set[int]:
        return {int(U64.unpack(key)[0]) for key, _ in self._agent_maps.maps[MAP_NAME].items()}

    def set_pods(self, uids: Collection[str], pods_known: bool, now: float) -> None:
        """Sets the exempt pods. Unless `pods_known`, entries of an earlier agent stay exempt
        too.
        """
        new = frozenset(uids)
        if new - self._uids:
            self._eager_until = now + NEW_POD_WINDOW_S
        is_first_scan = self._due is None and (self._patterns or self._written)
        if new != self._uids or pods_known != self._pods_known or is_first_scan:
            self._uids, self._pods_known = new, pods_known
            self.scan(now)

    def tick(self, now: float) -> float | None:
        """Searches again if that is due. Returns when to call next (time.monotonic); None:
        never.
        """
        if self._due is not None and now >= self._due:
            self.scan(now)
        return self._due

    @property
    def missing(self) -> frozenset[str]:
        """Pods whose folders have not been found."""
        return self._uids - self._pods.keys()

    @property
    def is_empty(self) -> bool:
        """Whether no cgroup is exempt."""
        return not self._written

    def problems(self, now: float) -> tuple[str, ...]:
        """One line for each reason why a pod is not exempt."""
        lines = [self._problem] if self._problem else []
        if self.missing and now > self._eager_until:
            names = ", ".join(sorted(self.missing)[:3])
            lines.append(
                f"{len(self.missing)} Pods that should be exempt have no cgroup below "
                f"{self._hooked_cgroup} (uid {names}): they have not started, have ended, or are "
                "static Pods"
            )
        return tuple(lines)

    def scan(self, now: float) -> None:
        """Searches the folders and writes the difference."""
        self._pods = {
            uid: current
            for uid, folders in self._pods.items()
            if uid in self._uids and (current := self._verify_folders(folders))
        }
        if self.missing:
            for uid, folder in find_pod_folders(self._hooked_cgroup, self.missing):
                self._pods.setdefault(uid, {})[folder.path] = folder.id
        ids = {cgroup_id for folders in self._pods.values() for cgroup_id in folders.values()}
        if self._patterns:
            ids |= {folder.id for folder in find_matching(self._root, self._patterns)}
        if not self._pods_known:
            ids |= self._adopted
        self._write(ids)
        self._due = self._next_due(now)

    def _verify_folders(self, folders: dict[str, int]) -> dict[str, int]:
        """Those of a pod's folders (path → id) that still exist with the same id."""
        return {path: id_ for path, id_ in folders.items() if mounts.read_inode(self._hooked_cgroup / path) == id_}

    def _write(self, ids: set[int]) -> None:
        """Adds new cgroups before it deletes those that are no longer exempt."""
        was_empty = self.is_empty
        new, removed = ids - self._written, self._written - ids
        try:
            self._agent_maps.put(MAP_NAME, ((U64.pack(cgroup_id), ONE) for cgroup_id in sorted(new)))
            self._written |= new
            self._agent_maps.delete(MAP_NAME, map(U64.pack, sorted(removed)))
            self._written -= removed
            self._problem = ""
        except KernelError as error:
            # a batch may have been written in part
            self._written = self._read_ids()
            if not self._problem:
                log.error("cannot update the exempt cgroups, retrying: %s", error)
            self._problem = f"some cgroups are not exempt yet: {error}"
        if new or removed:
            log.info(
                "exempt cgroups updated total=%d added=%d removed=%d",
                len(self._written),
                len(new),
                len(removed),
            )
        if self.is_empty != was_empty:
            self._on_emptiness_change()

    def _next_due(self, now: float) -> float | None:
        if self.missing and now < self._eager_until:
            return now + NEW_POD_POLL_INTERVAL_S
        if self._patterns or self._problem:
            return now + PATTERN_POLL_INTERVAL_S
        if self.missing:
            return now + MISSING_POD_POLL_INTERVAL_S
        return now + VERIFY_INTERVAL_S if self._pods else None


# ---- the agent's own sockets ---------------------------------------------------------------------


class AgentSockets:
    """Registers the agent's sockets. Any thread may call. The programs read an entry only when the
    connection begins, so the newest AGENT_SOCKETS entries suffice, and a closed socket needs no
    deletion.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._map: Map | None = None
        self._cookies: deque[int] = deque()

    def open(self, map_: Map) -> None:
        """Uses this map, and deletes the entries of an earlier agent, whose sockets are closed."""
        with self._lock:
            self._map = map_
            self._cookies.clear()
            if stale_keys := b"".join(key for key, _ in map_.items()):
                map_.delete_batch(stale_keys)

    def claim(self, cookie: int) -> None:
        """Registers a socket (by its SO_COOKIE). Does nothing before open(): no program that would
        read the entry is loaded yet.
        """
        with self._lock:
            if self._map is None:
                return
            try:
                if len(self._cookies) == AGENT_SOCKETS:
                    self._map.delete(U64.pack(self._cookies.popleft()))
                self._map.update(U64.pack(cookie), ONE)
                self._cookies.append(cookie)
            except KernelError as error:
                log.warning("cannot exempt a connection to the API server from Services: %s", error)

    def close(self) -> None:
        with self._lock:
            self._map = None
