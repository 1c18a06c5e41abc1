"""Every command of docs/migration.md, as it stands there, one after the other, at a real API
server.

There is no kubelet, so what is looked at is the DaemonSet that each ends in. What the commands do
on a node is tried by test_takeover.py.
"""

import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.test_manifests import KUBEADM
from tests.support.apiserver import ApiServer
from tests.support.kubectl import MANIFESTS, OVERLAYS, Kubectl
from tests.support.lab import PATIENCE

DOC = MANIFESTS.parent / "docs" / "migration.md"
BLOCKS = [
    textwrap.dedent(block)
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", DOC.read_text(), re.M | re.S)
]
ENDS_IN = [
    # the DaemonSet after this block, and what its container is told, in part
    ("kube-proxy", "kbpf run"),
    ("kube-proxy", "kbpf run"),
    ("", ""),
    ("kbpf-cleanup", "kbpf cleanup --keep-connections &&"),
    ("kbpf-cleanup", "kbpf cleanup &&"),
    ("", ""),
]


@pytest.fixture
def admin(apiserver: ApiServer, kubectl: Path, tmp_path: Path) -> Iterator[Kubectl]:
    """With kubeadm's kube-proxy; afterwards nothing is there."""
    made = Kubectl(kubectl, apiserver, tmp_path)
    made("create", "-f", "-", stdin=KUBEADM)
    yield made
    made("delete", "-f", "-", "--ignore-not-found", "--wait=false", stdin=KUBEADM)
    for folder in (OVERLAYS / "kubeadm", MANIFESTS / "cleanup"):
        made("delete", "-k", str(folder), "--ignore-not-found", "--wait=false")


def test_the_commands_from_kube_proxy_and_back(
    admin: Kubectl, apiserver: ApiServer, kubectl: Path, tmp_path: Path
) -> None:
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").symlink_to(kubectl)
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "KUBECONFIG": str(apiserver.kubeconfig(tmp_path / "config", "admin")),
    }
    for block, (name, told) in zip(BLOCKS, ENDS_IN, strict=True):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env=environment, text=True,
            capture_output=True, check=False, timeout=2 * PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, (block, done.stderr)
        found = admin.objects("-n", "kube-system", "get", "ds")
        assert [each["metadata"]["name"] for each in found] == ([name] if name else []), block
        if found:
            (container,) = found[0]["spec"]["template"]["spec"]["containers"]
            assert told in " ".join(container["command"]), block
