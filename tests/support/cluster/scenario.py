# SPDX-License-Identifier: Apache-2.0
"""Scenarios: folders of objects below tests/scenarios, and the state to be programmed for node-1.

    NAME/*.yaml      the objects, as `kbpf run --source` reads them
    NAME/expected    the resulting contents of the maps, one line per frontend, without ids

`FolderNode` is a node whose agent has a folder as its source.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support import plane
from tests.support.cluster import cluster
from tests.support.lab.lab import Agent, Lab, until

HERE = Path(__file__).parents[2] / "scenarios"
WRITTEN = ("services", "service_names", "backend_slots", "set_members", "backends")
"""The maps that are empty if there are no Services."""

Object = dict[str, Any]


def names() -> list[str]:
    """The names of all scenarios."""
    return sorted(path.name for path in HERE.iterdir() if path.is_dir())


def documents(*names: str) -> list[Object]:
    """The objects of these scenarios, with lists flattened; an object in several comes once."""
    found: dict[str, Object] = {}
    for path in [path for name in names for path in sorted((HERE / name).glob("*.yaml"))]:
        for obj in yaml.safe_load_all(path.read_text()):
            kind = obj["kind"].removesuffix("List")
            for item in obj["items"] if kind != obj["kind"] else [obj]:
                one = {"apiVersion": obj["apiVersion"], "kind": kind, **item}
                assert found.setdefault(file_of(one), one) == one, f"{path}: {file_of(one)} differs"
    return list(found.values())


def expected(*names: str) -> list[str]:
    lines = {line for name in names for line in (HERE / name / "expected").read_text().splitlines()}
    return sorted(lines)


def lines(agent: Agent) -> list[str]:
    """The programmed state in the format of the files `expected`."""
    dump = plane.dump(agent.entries)
    own = [ipaddress.IPv6Address(bytes.fromhex(each)) for each in dump["node_addresses"]]
    addresses = [str(each.ipv4_mapped or each) for each in own]
    return sorted(
        [f"NodePorts answer on {' '.join(addresses)}"]
        + [_line(at, behind) for at, behind in dump["frontends"].items() if behind["service"] != cluster.MARK]
    )


def _line(at: str, behind: dict[str, Any]) -> str:
    flags = behind["flags"].replace("|", " ")
    affinity = f" affinity={behind['timeout']}" if behind["timeout"] else ""
    words = [f"{at} {behind['service']} {flags}{affinity}"]
    words += [f"{which}: {' '.join(behind[which])}" for which in ("cluster", "local")]
    return "; ".join(word for word in words if not word.endswith(": "))


NONE = "none.yaml"
"""A file without objects: an empty folder keeps its objects for a minute."""


class FolderNode(cluster.Places):
    """The first node of a lab with its folder. A context manager; it does not start the agent."""

    def __init__(self, lab: Lab, folder: Path, pods: int = 0, *arguments: str) -> None:
        """`arguments`: more of the agent's."""
        super().__init__()
        self.folder = folder
        source = ("--source", str(folder), *arguments)
        if pods:
            self.settle_in("a", lab.nodes[0], pods, *source)
        else:
            self.agents.append(Agent(lab.nodes[0], *source))

    def __enter__(self) -> Self:
        self.folder.mkdir()
        (self.folder / NONE).touch()
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.close()

    def write(self, objects: Sequence[Object], name: str = "") -> None:
        """Writes each object to its own file, or all to the file of this name."""
        if name:
            put(self.folder, name, yaml.safe_dump_all(objects))
            return
        for obj in objects:
            put(self.folder, file_of(obj), yaml.safe_dump(obj))

    def remove(self, objects: Iterable[Object]) -> None:
        for obj in objects:
            (self.folder / file_of(obj)).unlink()

    def empty(self) -> None:
        """Deletes all objects and waits until the maps are empty: those of WRITTEN, and of all others
        what belonged to Services, which is deleted a moment later.
        """
        for path in self.folder.glob("*.yaml"):
            if path.name != NONE:
                path.unlink()
        until("the maps are empty", lambda: not any(map(self.agent.entries, WRITTEN)))

        def strays() -> object:
            return plane.dump(self.agent.entries)["strays"]

        until("nothing is left of Services", lambda: strays() == {}, state=strays)

    def write_mark(self, *objects: Object) -> None:
        self.write(objects, "~mark.yaml")


def put(folder: Path, name: str, text: str) -> None:
    """Writes a file atomically."""
    temporary = folder / f".{name}"
    temporary.write_text(text)
    temporary.rename(folder / name)


def file_of(obj: Object) -> str:
    """The file name that write() uses for an object."""
    meta = obj["metadata"]
    return f"{obj['kind']}-{meta.get('namespace', 'default')}-{meta['name']}.yaml".lower()
