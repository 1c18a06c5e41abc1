# SPDX-License-Identifier: Apache-2.0
"""The node of the campaigns: an agent that reads a folder, and Services whose state is known.

`stays` is a Service that never changes: connections to it must always succeed, whatever happens to
the agent. The Services of a `Churn` change all the time; the maps must hold `Churn.expected()` once
the agent has read the last file.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Self

from tests.support import plane
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.cluster.scenario import FolderNode, put
from tests.support.lab.lab import Lab, until

STAYS = "10.96.0.20"
BATCH = 150
"""Services in each file of a churn: the agent reads such a file well within a poll of the
folder.
"""


class World(FolderNode):
    """A node in its own lab, as a context manager. The agent serves `stays` when the context
    begins.

    Its maps start small, so that those of a churn make them grow.
    """

    def __init__(self, name: str) -> None:
        self._stack = contextlib.ExitStack()
        self.lab = self._stack.enter_context(Lab(1, f"x{name}", apart=True))
        super().__init__(self.lab, self.lab.folder / "objects", pods=2)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.write([node("node-1", self.lab.nodes[0].ip), *self.web(20, "a1")])
            self.agent.module = "tests.support.runtime.small_maps_agent"
            self.agent.start()
            until("the Service is served", self.stays_served)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._stack.close()

    def stays_served(self) -> bool:
        """Whether a pod connects to `stays` and gets a reply from its backend."""
        return self["a2"].tcp(STAYS, 80).get("name") == "a1"

    def backends_of(self, *numbers: int) -> dict[str, list[str]]:
        """Frontend → backends of these Services of churns, read from the pinned maps."""
        wanted = {frontend(number) for number in numbers}
        found = plane.dump(self.agent.entries)["frontends"]
        return {at: behind["cluster"] for at, behind in found.items() if at in wanted}

    def programmed(self) -> set[str]:
        """The frontends of churns in the pinned maps."""
        found = plane.dump(self.agent.entries)["frontends"]
        return {at for at in found if at.startswith("10.96.4")}

    def strays(self) -> dict[str, Any]:
        """Map entries that no frontend leads to, by map."""
        return dict(plane.dump(self.agent.entries)["strays"])


def address(number: int) -> str:
    """The ClusterIP of Service `number` of a churn."""
    return f"10.96.{40 + number // 250}.{1 + number % 250}"


def protocol(number: int) -> str:
    """Every third Service is for UDP, so that `udp_cuts` is used."""
    return "UDP" if number % 3 == 1 else "TCP"


def frontend(number: int) -> str:
    """The frontend of Service `number` of a churn."""
    return f"{address(number)}:80/{protocol(number)}"


class Churn:
    """`files` files of BATCH Services each; `step()` gives every Service of one file another
    backend. To be used from one thread.
    """

    def __init__(self, world: World, files: int = 4) -> None:
        self._world = world
        self._rounds = [0] * files

    def __len__(self) -> int:
        return BATCH * len(self._rounds)

    def write_all(self) -> None:
        """Writes every file in its current state."""
        for number in range(len(self._rounds)):
            self._write(number)

    def step(self) -> int:
        """Changes the file that has waited longest; returns how many objects changed."""
        number = self._rounds.index(min(self._rounds))
        self._rounds[number] += 1
        self._write(number)
        return BATCH

    def expected(self) -> dict[str, list[str]]:
        """Frontend → its one backend, once everything has been read."""
        return {frontend(number): [f"{self._backend(number)}:8080/{protocol(number)}"] for number in range(len(self))}

    def is_programmed(self) -> bool:
        """Whether the maps hold the expected frontends and backends."""
        return self._world.backends_of(*range(len(self))) == self.expected()

    @contextlib.contextmanager
    def present(self) -> Iterator["Churn"]:
        """The Services exist within the context."""
        self.write_all()
        until("the Services of the churn are programmed", self.is_programmed)
        try:
            yield self
        finally:
            for path in self._world.folder.glob("churn-*.json"):
                path.unlink()

    def _backend(self, number: int) -> str:
        file, index = divmod(number, BATCH)
        return f"10.{200 + file}.{self._rounds[file] % 250}.{1 + index}"  # of this Service only

    def _range(self, number: int) -> str:
        return f"172.16.{self._rounds[number // BATCH] % 250}.0/24"

    def _write(self, file: int) -> None:
        items: list[dict[str, Any]] = []
        for number in range(file * BATCH, (file + 1) * BATCH):
            name = f"churn-{number}"
            row = service(
                name,
                port(80, protocol=protocol(number), target=8080),
                cluster_ip=address(number),
                affinity_seconds=60 if number % 2 else None,
            )
            if number % 10 == 0:
                row["spec"] |= {
                    "type": "LoadBalancer",
                    "loadBalancerSourceRanges": [self._range(number)],
                }
                row["status"] = {"loadBalancer": {"ingress": [{"ip": f"192.0.2.{number // 10}"}]}}
            items.append(row)
            end = endpoint(self._backend(number))
            ports = [slice_port(8080, protocol=protocol(number))]
            items.append(endpoint_slice(name, end, ports=ports))
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        put(self._world.folder, f"churn-{file}.json", text)
