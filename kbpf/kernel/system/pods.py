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
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from kbpf.kernel.system import mounts

LOG_FOLDER: Final = Path("/var/log/pods")
_UID = re.compile(
    r"kubepods.*[/-]pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
    r"|[0-9a-f]{32})(?:\.slice)?(?:/|$)"
)


def find_cgroup_paths(ids: Iterable[int]) -> dict[int, str]:
    """Id of a cgroup v2 → its path below the hierarchy's root; without those that are gone or not
    visible here.
    """
    missing, paths = set(ids), dict[int, str]()
    for mount in mounts.list_mounts():
        if mount.fs_type != "cgroup2":
            continue
        for folder, _, _ in os.walk(mount.path):
            if not missing:
                return paths
            with contextlib.suppress(OSError):  # removed meanwhile
                if (number := os.stat(folder).st_ino) in missing:
                    paths[number] = f"/{os.path.relpath(folder, mount.path)}".removesuffix("/.")
                    missing.remove(number)
    return {number: path or "/" for number, path in paths.items()}


def pod_uid(cgroup_path: str) -> str:
    """The uid of the Pod of this cgroup; "" if it is not of a Pod."""
    match = _UID.search(cgroup_path)
    return match[1].replace("_", "-") if match else ""


def list_pod_names(folder: Path = LOG_FOLDER) -> Mapping[str, str]:
    """Uid → ``namespace/name`` of the Pods of this node; empty if the folder is not visible."""
    names = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            parts = name.split("_")  # no name of Kubernetes has an underscore
            if len(parts) == 3:
                namespace, pod, uid = parts
                names[uid] = f"{namespace}/{pod}"
    return names


def find_cgroup_ids(uid: str) -> frozenset[int]:
    """The ids of a Pod's cgroup v2, of those in it, and of those above it."""
    name = re.compile(rf"[/-]pod({uid}|{uid.replace('-', '_')}\.slice)$")
    ids: set[int] = set()
    for mount in mounts.list_mounts():
        if mount.fs_type != "cgroup2":
            continue
        for folder, _, _ in os.walk(mount.path):
            if name.search(folder):
                above = (p for p in Path(folder).parents if p.is_relative_to(mount.path))
                ids.update(_ids((*above, *(Path(path) for path, _, _ in os.walk(folder)))))
    return frozenset(ids)


def _ids(folders: Iterable[Path]) -> Iterator[int]:
    for folder in folders:
        with contextlib.suppress(OSError):  # removed meanwhile
            yield folder.stat().st_ino
