# SPDX-License-Identifier: Apache-2.0
"""The lab's cluster without an API server: objects are files that the agents watch.

For kernels under emulation, where an API server takes minutes. For a test that only writes objects
there is no difference.
"""

import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube import KubeError, Object
from tests.support.cluster.kube_objects import node
from tests.support.cluster.scenario import file_of, put
from tests.support.lab.lab import Lab
from tests.support.lab.modes import ARGUMENTS


class FolderKube:
    """The part of tests/support/cluster/kube.Kube that tests which write objects need."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects: dict[str, Object] = {}

    def create(self, obj: Object) -> Object:
        """Creates an object, with a creationTimestamp as the API server sets it."""
        made = copy.deepcopy(obj)
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        made["metadata"]["creationTimestamp"] = stamp
        return self._put(made)

    def replace(self, obj: Object) -> Object:
        """Replaces an object."""
        made = copy.deepcopy(obj)
        before = self._objects.get(file_of(obj), made)
        stamp = before["metadata"].get("creationTimestamp")
        made["metadata"].setdefault("creationTimestamp", stamp)
        return self._put(made)

    def patch(self, kind: str, name: str, change: Object, namespace: str = "default", _: str = "") -> Object:
        """Applies a JSON merge patch."""
        made = copy.deepcopy(self.get(kind, name, namespace))
        _merge(made, change)
        return self._put(made)

    def delete(self, kind: str, name: str, namespace: str = "default") -> None:
        """KubeError when there is none."""
        file = self._file(kind, name, namespace)
        del self._objects[file]
        (self._folder / file).unlink()

    def get(self, kind: str, name: str, namespace: str = "default") -> Object:
        """KubeError when there is none."""
        return self._objects[self._file(kind, name, namespace)]

    def _file(self, kind: str, name: str, namespace: str) -> str:
        meta = {"name": name, "namespace": namespace or "default"}
        file = file_of({"kind": kind, "metadata": meta})
        if file not in self._objects:
            raise KubeError(404, file, b"{}")
        return file

    def _put(self, obj: Object) -> Object:
        self._objects[file_of(obj)] = obj
        put(self._folder, file_of(obj), yaml.safe_dump(obj))
        return obj


def _merge(into: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


class FolderCluster(Cluster):
    def __enter__(self) -> Self:
        nodes, name, pods, *_ = self._shape
        with self._stack:
            self.lab = self._stack.enter_context(Lab(nodes, name, apart=True))
            folder = self.lab.folder / "objects"
            folder.mkdir()
            self.kube = FolderKube(folder)  # type: ignore[assignment]
            for letter, each in zip("abcdef", self.lab.nodes, strict=False):
                self.settle_in(letter, each, pods, "--source", str(folder), *ARGUMENTS)
            for number, each in enumerate(self.lab.nodes, 1):
                self.kube.create(node(each.name, each.ip, each.ip6, zone=f"zone-{number}"))
            for agent in self.agents:
                agent.start(wait=False)
            for agent in self.agents:
                agent.wait_synced()
            self._stack = self._stack.pop_all()
        return self
