# SPDX-License-Identifier: Apache-2.0
"""Runs every command of docs/install.md and docs/clusters.md verbatim against a real API server.

Without a kubelet, the result to check is the DaemonSet that each block leaves. tests/image builds
the image.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import node
from tests.support.cluster.kubeadm import Kubeadm
from tests.support.cluster.kubectl import MANIFESTS, OVERLAYS, Kubectl
from tests.support.runtime import docs
from tests.support.runtime.shell import Clone

BLOCKS = docs.blocks("docs/install.md")
ELSEWHERE = {
    "buildah build": "tests/image",
    "kubeadm upgrade": "tests/lab/cluster/test_kubeadm.py",
    "rollout status ds kube-proxy": "tests/lab/cluster/test_drop_in.py",
}
"""Text that identifies a block → the tests that run it."""
ENDS_IN = [
    # text that identifies a block, and the DaemonSet that exists afterwards
    ("newName", ""),
    ("kubectl apply -k manifests/overlays/kubeadm\n", "kube-proxy"),
    ("kubectl apply -k manifests/overlays/kubeadm-new", "kube-proxy"),
    ("--take-ownership", "kube-proxy"),
    ("values-kubeadm-new.yaml", "kube-proxy"),
    ("values-side-by-side.yaml", "kbpf"),
    ("kubectl apply -k manifests/cleanup", "kbpf-cleanup"),
    ("kubectl delete -k manifests/cleanup", ""),
]
OURS = [block for block in BLOCKS if not any(told in block for told in ELSEWHERE)]
IMAGE = "REGISTRY/kbpf:0.1.0"
REPLACES = ("kubectl apply -k manifests/overlays/kubeadm\n", "--take-ownership")
"""Blocks that need kubeadm's kube-proxy to be installed before."""


def test_every_block_has_a_row():
    rows = [row[0] for block in OURS for row in ENDS_IN if row[0] in block]
    assert sorted(rows) == sorted(row[0] for row in ENDS_IN)
    assert len(rows) == len(OURS)
    assert len(BLOCKS) - len(OURS) == len(ELSEWHERE)


@pytest.fixture
def before(kubeadm: Path, apiserver: ApiServer, tmp_path) -> Kubeadm:
    """kubeadm's kube-proxy, which some blocks replace."""
    return Kubeadm(kubeadm, apiserver, tmp_path)


@pytest.fixture
def admin(apiserver: ApiServer, kubectl: Path, before: Kubeadm, tmp_path) -> Iterator[Kubectl]:
    """kubectl as administrator; removes all of kbpf after the test."""
    made = Kubectl(kubectl, apiserver, tmp_path)
    yield made
    before.remove_kube_proxy(made)
    for overlay in sorted([*OVERLAYS.iterdir(), MANIFESTS / "cleanup"]):
        made("delete", "-k", str(overlay), "--ignore-not-found", "--wait=false")
    made("-n", "kube-system", "delete", "secret", "-l", "owner=helm", "--wait=false")
    made("delete", "node", "doc", "--ignore-not-found")


@pytest.fixture
def clone(apiserver: ApiServer, kubectl: Path, helm: Path, tmp_path) -> Clone:
    """A clone with kubectl and helm in its PATH."""
    return Clone(tmp_path, apiserver, kubectl, helm)


@pytest.mark.parametrize("row", ENDS_IN, ids=lambda row: row[0].strip())
def test_each_install_block_leaves_its_daemonset(
    admin: Kubectl, apiserver: ApiServer, clone: Clone, before: Kubeadm, row: tuple[str, str]
):
    """Each block is run after the block that sets the image's name."""
    told, name = row
    (where,) = [each for each in OURS if "newName" in each]
    (block,) = [each for each in OURS if told in each]
    if told in REPLACES:
        before.install_kube_proxy()
    if told == "kubectl apply -k manifests/cleanup":
        admin("apply", "-k", str(OVERLAYS / "side-by-side"))
    if told == "kubectl delete -k manifests/cleanup":
        admin("apply", "-k", str(OVERLAYS / "side-by-side"))
        admin("-n", "kube-system", "delete", "ds", "kbpf")
        admin("apply", "-k", str(MANIFESTS / "cleanup"))
    with apiserver.kube() as kube:
        kube.create(node("doc", "192.0.2.1"))
    clone(f"{where}\n{block}")
    found: list[Object] = admin.objects("-n", "kube-system", "get", "ds")
    assert [each["metadata"]["name"] for each in found] == ([name] if name else [])
    if not found:
        return
    (container,) = found[0]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == IMAGE
    assert "kbpf" in " ".join(container["command"])


DELETE, MOUNT = docs.blocks("docs/clusters.md")
TALOS = """
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy, tier: node}}
  template:
    metadata: {labels: {k8s-app: kube-proxy, tier: node}}
    spec: {containers: [{name: kube-proxy, image: none}]}
"""
"""The names and the selector of Talos' kube-proxy (siderolabs/talos ad882317, k8stemplates)."""


def test_kubeadm_new_follows_a_kube_proxy_that_is_not_kubeadms(admin: Kubectl, clone: Clone):
    """docs/clusters.md: its DaemonSet has to be deleted first."""
    (install,) = [block for block in OURS if "manifests/overlays/kubeadm-new\n" in block]
    admin("apply", "-f", "-", stdin=TALOS)
    with pytest.raises(AssertionError, match=r"spec\.selector.*field is immutable"):
        clone(install)
    clone(DELETE)
    clone(install)
    (daemonset,) = admin.objects("-n", "kube-system", "get", "ds")
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["kbpf", "run"]
    (config_map,) = admin.objects("-n", "kube-system", "get", "cm/kube-proxy")
    assert "https://192.0.2.10:6443" in config_map["data"]["kubeconfig.conf"]
    assert 'clusterCIDR: "10.244.0.0/16"' in config_map["data"]["config.conf"]


DOCKER = """\
#!/bin/sh
# A fake of `docker exec NODE COMMAND`: the node has its own mounts, and no bpffs.
shift 2
exec unshare --mount sh -c 'umount -l /sys/fs/bpf; "$@" && findmnt -no FSTYPE /sys/fs/bpf' sh "$@"
"""


def test_a_node_of_kind_gets_a_bpffs(clone: Clone, tmp_path):
    """docs/clusters.md"""
    docker = tmp_path / "bin" / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    assert clone(MOUNT) == "bpf\n"
