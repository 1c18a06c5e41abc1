# SPDX-License-Identifier: Apache-2.0
"""Calls CNI plugins as a container runtime does (libcni): one after the other, each with the result
of the one before, in the node's network namespace.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.build import go_build
from tests.support.lab.lab import inside

Conf = dict[str, Any]
"""A network configuration list (*.conflist)."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A pod's network namespace on a node, and what its Pod object asks of the plugins."""

    node: str  # the node's namespace, below /run/netns
    netns: str
    runtime: Mapping[str, object] = field(default_factory=dict)  # capability → its arguments

    def call(self, command: str, conf: Conf, programs: Sequence[str], result: Conf | None = None) -> Conf:
        """Runs ADD, or DEL in the opposite order; the result of the last plugin of ADD. `result`:
        that of a plugin before these.
        """
        result = result or {}
        for plugin in conf["plugins"][:: -1 if command == "DEL" else 1]:
            capabilities = plugin.get("capabilities", {})
            row = {"cniVersion": conf["cniVersion"], "name": conf["name"], **plugin}
            row.pop("capabilities", None)
            row["runtimeConfig"] = {k: v for k, v in self.runtime.items() if k in capabilities}
            if result:
                row["prevResult"] = result
            result = self._run(command, row, programs) or result
        return result

    def _run(self, command: str, row: Conf, programs: Sequence[str]) -> Conf:
        paths = [go_build.build(name) for name in programs]
        plugin = next(path for path in paths if path.name == row["type"])
        environment = os.environ | {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": self.netns,
            "CNI_NETNS": f"/run/netns/{self.netns}",
            "CNI_IFNAME": "eth0",
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={self.netns}",
            "CNI_PATH": ":".join(sorted({str(path.parent) for path in paths})),
        }
        done = subprocess.run(
            inside(self.node, None, str(plugin)),
            input=json.dumps(row),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{plugin.name} {command}: {done.stdout} {done.stderr}")
        return json.loads(done.stdout) if done.stdout.strip() else {}


def read(path: Path) -> Conf:
    return json.loads(path.read_text())
