# SPDX-License-Identifier: Apache-2.0
"""kubectl with a test's API server, as an operator runs it, and this project's manifests."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Object
from tests.support.lab.lab import DIE_WITH_US, inside

MANIFESTS = Path(__file__).parents[3] / "manifests"
OVERLAYS = MANIFESTS / "overlays"
SECONDS = 600


class CommandFailed(Exception):
    """A command failed; the message has its output."""


class Kubectl:
    """The admin's kubectl for one API server, with a separate home folder without user settings."""

    def __init__(self, program: Path, server: ApiServer, folder: Path) -> None:
        self._program = program
        self._netns = server.netns
        self._home = folder
        self._config = server.kubeconfig(folder / "kubeconfig-kubectl", "admin")

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        """Runs kubectl; its output, or CommandFailed with its errors."""
        command = [str(self._program), f"--kubeconfig={self._config}", *arguments]
        return call([*inside(self._netns, None, *command)], self._home, stdin)

    def may(self, verb: str, resource: str, user: str) -> bool:
        """Whether this user has the right in all namespaces. The API server's authorizer learns of
        a new binding a moment after it was created.
        """
        try:
            self("auth", "can-i", verb, resource, "-A", f"--as={user}")
        except CommandFailed:
            return False
        return True

    def objects(self, *arguments: str) -> list[Object]:
        """The objects that it prints with `-o json`, as a list."""
        found = json.loads(self(*arguments, "-o", "json"))
        return list(found["items"]) if found["kind"] == "List" else [found]


def kustomize(program: Path, folder: Path) -> list[Object]:
    """The objects of a kustomization."""
    return documents(call([str(program), "kustomize", str(folder)], Path(tempfile.gettempdir())))


def documents(text: str) -> list[Object]:
    """The objects of a YAML stream."""
    return [document for document in yaml.safe_load_all(text) if document]


def call(command: Sequence[str], home: Path, stdin: str | None = None) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(
        [*DIE_WITH_US, *command],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={"HOME": str(home), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def copy_of_manifests(folder: Path, server: str, pods: str = "") -> Path:
    """A copy of manifests/ in which the operator has set the API server's address and the pod
    network in the overlay kubeadm-new.
    """
    made = folder / "manifests"
    shutil.copytree(MANIFESTS, made)
    for name, before, after in (
        ("kubeconfig.conf", "https://CONTROL-PLANE-ENDPOINT:6443", server),
        ("config.conf", 'clusterCIDR: ""', f'clusterCIDR: "{pods}"'),
    ):
        path = made / "overlays" / "kubeadm-new" / name
        text = path.read_text()
        assert text.count(before) == 1, (path, before)
        path.write_text(text.replace(before, after))
    return made
