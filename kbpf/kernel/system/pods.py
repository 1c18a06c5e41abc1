# SPDX-License-Identifier: Apache-2.0
"""Which Pod a cgroup belongs to, as kubelet's folders on this node say it. Nobody is asked, so this
works while the API server and the agent are down.

    .../kubepods*/.../podUID/...                              (cgroupfs driver)
    .../kubepods-....slice/kubepods-...-podUID.slice/...      (systemd driver; UID with _ for -)
    /var/log/pods/NAMESPACE_NAME_UID/                         (logs of the containers)

A static Pod's uid is a hash of its manifest, without dashes.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import NotFoundError
from kbpf.kernel.system import mounts

LOG_FOLDER: Final = Path("/var/log/pods")
MAX_KNOWN_CGROUPS: Final = 10_000
"""From this number on, ClientNames forgets all."""


def pod_uid_of_folder(path: str) -> str:
    """The uid of the Pod whose own cgroup has this path; "" for all others, also those in it."""
    parent, _, name = path.rpartition("/")
    if name.startswith("pod") and any("kubepods" in segment for segment in parent.split("/")):
        return name.removeprefix("pod")
    if "kubepods" in name and name.endswith(".slice"):
        head, dash, tail = name.removesuffix(".slice").rpartition("-pod")
        # systemd reads - in the name of a slice as the separator of its parents
        return tail.replace("_", "-") if head and dash and "-" not in tail else ""
    return ""


def pod_uid(cgroup_path: str) -> str:
    """The uid of the Pod that this cgroup belongs to; "" if it belongs to none."""
    ends = (i for i, letter in enumerate(f"{cgroup_path}/") if letter == "/")
    return next(filter(None, (pod_uid_of_folder(cgroup_path[:end]) for end in ends)), "")


def name_pods(cgroups: Mapping[int, mounts.Cgroup]) -> dict[int, str]:
    """``namespace/name``, or ``uid UID``, of the Pod of each of these cgroups; without those that
    belong to no Pod.
    """
    names = list_pod_names()
    uids = {number: pod_uid(cgroup.path) for number, cgroup in cgroups.items()}
    return {number: names.get(uid, f"uid {uid}") for number, uid in uids.items() if uid}


def find_parent_of_pods(root: Path) -> Path | None:
    """A cgroup below `root` in which kubelet creates those of Pods; None if there is no Pod."""
    for folder, names, _ in os.walk(root):
        for name in sorted(names):
            if pod_uid(f"{folder}/{name}"):
                return Path(folder)
    return None


def list_pod_names() -> Mapping[str, str]:
    """Uid → ``namespace/name`` of the Pods of this node; empty if the folder is not visible."""
    names = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(LOG_FOLDER):
            parts = name.split("_")  # no name of Kubernetes has an underscore
            if len(parts) == 3:
                namespace, pod, uid = parts
                names[uid] = f"{namespace}/{pod}"
    return names


class ClientNames:
    """The cgroups and Pods of clients, as they appear. A search walks all cgroups, so searches take
    at most a tenth of the time: the next one waits.
    """

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._next_search = 0.0

    def learn(self, ids: Iterable[int]) -> None:
        """Finds those that are not known yet. A cgroup that is gone by then stays unknown."""
        unknown = {number for number in ids if number and number not in self._paths}
        if not unknown:
            return
        if len(self._paths) > MAX_KNOWN_CGROUPS:
            self._paths.clear()
            self._names.clear()
        time.sleep(max(0.0, min(1.0, self._next_search - time.monotonic())))
        began = time.monotonic()
        cgroups = mounts.find_cgroups(unknown)
        self._paths.update(dict.fromkeys(unknown, ""))
        self._paths.update((number, cgroup.path) for number, cgroup in cgroups.items())
        self._names.update(name_pods(cgroups))
        now = time.monotonic()
        self._next_search = now + 9 * (now - began)

    def describe(self, number: int) -> tuple[str, str]:
        """Path of the cgroup and ``namespace/name``, or ``uid UID``, of its Pod; each may be ""."""
        return self._paths.get(number, ""), self._names.get(number, "")


def find_uids(pod: str, find_node: Callable[[], str] = lambda: "") -> Mapping[str, str]:
    """Uid → ``namespace/name`` of this node's Pods with this NAME or NAMESPACE/NAME. A Pod that
    was replaced by one of the same name is listed as long as it has logs. Raises NotFoundError if
    there is none. `find_node`: the node that has it, "" if that is not known.
    """
    names = list_pod_names().items()
    uids = {uid: name for uid, name in names if pod in (name, name.partition("/")[2])}
    if not uids:
        node = find_node()
        hint = f"it is on node {node}" if node else ("`kubectl get pods -A -o wide` shows the node of each Pod")
        raise NotFoundError(f"no Pod {pod} is on this node", str(LOG_FOLDER), f"{hint}: run this there")
    return uids


class PodProcess(NamedTuple):
    """A process of a Pod, and the folder of its cgroup v2."""

    pid: int
    cgroup: Path

    @property
    def netns(self) -> Path:
        """The Pod's network namespace."""
        return Path(f"/proc/{self.pid}/ns/net")


def find_process(uid: str) -> PodProcess | None:
    """A process of this Pod; None if none is visible from here, as from another PID namespace."""
    for _, top in _find_folders(uid):
        for folder, _, _ in os.walk(top):
            with contextlib.suppress(OSError):  # removed meanwhile
                pids = map(int, Path(folder, "cgroup.procs").read_text().split())
                if (pid := next(filter(None, pids), 0)) and Path(f"/proc/{pid}/ns/net").exists():
                    return PodProcess(pid, Path(folder))
    return None


def find_cgroup_ids(uid: str, above: bool = True) -> frozenset[int]:
    """The ids of a Pod's cgroup v2, of those in it, and with `above` of those above it."""
    return frozenset(
        number
        for root, folder in _find_folders(uid)
        for number in (
            *(list_cgroup_ids(folder, root) if above else ()),
            *_ids(Path(below) for below, _, _ in os.walk(folder)),
        )
    )


def list_cgroup_ids(folder: Path, root: Path) -> frozenset[int]:
    """The ids of a cgroup v2 and of those above it. `root`: where the hierarchy is mounted."""
    above = (path for path in folder.parents if path.is_relative_to(root))
    return frozenset(_ids((folder, *above)))


def _find_folders(uid: str) -> Iterator[tuple[Path, Path]]:
    """The folders of a Pod's cgroup, each with the root of its hierarchy."""
    for mount in mounts.list_mounts():
        if mount.fs_type == "cgroup2":
            for folder, _, _ in os.walk(mount.path):
                if pod_uid_of_folder(folder) == uid:
                    yield Path(mount.path), Path(folder)


def _ids(folders: Iterable[Path]) -> Iterator[int]:
    for folder in folders:
        with contextlib.suppress(OSError):  # removed meanwhile
            yield folder.stat().st_ino
