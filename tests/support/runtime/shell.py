# SPDX-License-Identifier: Apache-2.0
"""Runs commands of a document as an operator would: in a clone, with kubectl and kubeadm.

kubeadm runs on the first node, the control plane. There is no kubelet, so runc executes `kubectl
exec`, and after each command the fake kubelets are synced (Kubelets.sync).
"""

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.daemonset import PodCluster
from tests.support.cluster.kubectl import MANIFESTS
from tests.support.lab.lab import PATIENCE, inside


class Clone:
    """An operator's shell in a clone of the repository, with these programs in its PATH."""

    def __init__(self, folder: Path, server: ApiServer, *programs: Path) -> None:
        self._folder = folder
        shutil.copytree(MANIFESTS, folder / "manifests")
        (folder / "bin").mkdir()
        for program in programs:
            (folder / "bin" / program.name).symlink_to(program)
        self._config = server.kubeconfig(folder / "config", "admin")

    def __call__(self, command: str) -> str:
        """The output of a command line, which must succeed. As in an ordinary shell, it continues
        after a failed command, and the last status counts.
        """
        done = self.run(command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        path = f"{self._folder}/bin:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            text=True,
            env={"HOME": str(self._folder), "PATH": path, "KUBECONFIG": str(self._config)},
            capture_output=True,
            check=False,
            timeout=2 * PATIENCE,
        )


class Shell(Clone):
    """The same with `kubectl exec` and kubeadm. run() is for command lines that change nothing."""

    def __init__(self, cluster: PodCluster, folder: Path, kubectl: Path, kubeadm: Path | None = None) -> None:
        super().__init__(folder, cluster.api)
        self._cluster = cluster
        real = inside(cluster.api.netns, None, str(kubectl))
        if kubeadm is not None:
            command = inside(cluster.lab.nodes[0].netns, None, str(kubeadm))
            self._program("kubeadm", f'exec {" ".join(command)} "$@" --kubeconfig={self._config}\n')
        self._program(
            "kubectl",
            'if [[ " $* " = *" exec "* ]]; then\n'
            '\twhile [ "$1" != exec ]; do shift; done; pod=$2\n'
            '\twhile [ "$1" != -- ]; do shift; done; shift\n'
            f'\texec {folder}/bin/in-pod "$pod" "$@"\n'
            "fi\n"
            f'exec {" ".join(real)} "$@"\n',
        )

    def __call__(self, command: str) -> str:
        output = super().__call__(command)
        self._cluster.kubelets.sync()
        return output

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        self._pods()
        return super().run(command)

    def _pods(self) -> None:
        """Writes the program `in-pod POD COMMAND...`; ds/kube-proxy is the first pod."""
        rows = self._cluster.kubelets.runc()
        cases = "".join(f'pod/{pod}) exec {" ".join(words)} "$@" ;;\n' for pod, words in rows.items())
        first = next(iter(rows.values()), ("false",))
        self._program(
            "in-pod",
            "pod=$1; shift\ncase $pod in\n"
            f'{cases}ds/kube-proxy) exec {" ".join(first)} "$@" ;;\n'
            '*) echo "no such pod: $pod" >&2; exit 1 ;;\nesac\n',
        )

    def _program(self, name: str, text: str) -> None:
        path = self._folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
