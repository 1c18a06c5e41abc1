# SPDX-License-Identifier: Apache-2.0
"""docs/install.md, "The image", and docs/migration.md, verbatim and in both directions, on a
cluster in use: kubeadm's own objects and a real kube-proxy on each node are replaced by kbpf, and
kbpf by kubeadm's again.

Pods, nodes and an outside client connect throughout, and no connection may fail; established ones
continue. test_takeover.py does the same without Kubernetes objects, in other modes of kube-proxy.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from tests.support.cluster.daemonset import PodCluster
from tests.support.cluster.kube_proxy import has_programmed
from tests.support.cluster.kubeadm import Kubeadm
from tests.support.lab.kept import Kept
from tests.support.lab.lab import PATIENCE, Node, Place, ip, on, until
from tests.support.lab.load import Load, under_load
from tests.support.runtime import docs
from tests.support.runtime.shell import Shell

MODE = "nftables"
"""Of kube-proxy."""
HOST, NODE_PORT = "10.96.0.20", 30020
NOT_OURS = {"conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"}}
"""kube-proxy must not set these: they are sysctls of the whole machine."""
BITS = {"iptables": {"masqueradeBit": 16}, "nftables": {"masqueradeBit": 17}}
"""Values of the operator, which have to be restored when kube-proxy returns."""


class KubeadmCluster(PodCluster):
    """Two nodes of a cluster made by kubeadm, with its kube-proxy; a third node has not joined."""

    def __init__(self, kubectl: Path, kubeadm: Path) -> None:
        super().__init__(kubectl, 3, "k")
        self._program = kubeadm

    def bring_up(self) -> None:
        self.prepare()
        for home in self.lab.nodes:
            for each in (home.netns, *(pod.netns for pod in home.pods)):
                ip("route del unreachable 10.96.0.0/16", netns=each)
        proxy = {"mode": MODE, **NOT_OURS, **BITS}
        self.kubeadm = Kubeadm(self._program, self.api, self.lab.folder, proxy=proxy)
        self.kubeadm.upload_config()
        self.kubeadm.install_kube_proxy()
        self.kubelets.sync()

    def rules(self) -> str:
        return "".join(on(node, "nft", "list", "ruleset") for node in self.lab.nodes[:2])


@pytest.fixture(scope="module")
def cluster(programs: None, kubectl: Path, kubeadm: Path, kube_proxy: Path) -> Iterator[KubeadmCluster]:
    """A cluster in which kube-proxy serves a Service with a backend on each node."""
    with KubeadmCluster(kubectl, kubeadm) as made:
        outside = Place("outside", made.lab.outside, None)
        made.places["outside"], made.home["outside"] = outside, made.lab.nodes[0]
        try:
            made.create(*made.web(20, "a1 b1", type="NodePort", node_port=NODE_PORT))
            kube_proxy_serves(made)
            yield made
        finally:
            outside.close()


def kube_proxy_serves(cluster: KubeadmCluster) -> None:
    """Waits until kube-proxy's rules are on each node."""
    for node in cluster.lab.nodes[:2]:
        until(f"kube-proxy's rules on {node.name}", lambda home=node: has_programmed(home, MODE, NODE_PORT))


class InUse(NamedTuple):
    """The load of new connections, and those that each client keeps open."""

    load: Load
    kept: Kept

    def goes_on(self) -> None:
        """Checks that new connections succeed and all kept ones still work."""
        self.load.goes_on()
        self.kept.all_talk()


@contextmanager
def in_use(cluster: KubeadmCluster, dialled: Node) -> Iterator[InUse]:
    """Clients connect during the block, those outside to this node. No connection may fail."""
    with (
        under_load(cluster, HOST, "a2", "host-2", answers="a1 b1") as sockets,
        under_load(cluster, dialled.ip, "outside", port=NODE_PORT, answers="a1 b1") as packets,
    ):
        ways = ((cluster[name], (HOST, 80)) for name in ("a3", "host-1"))
        outside = cluster["outside"], (cluster.lab.nodes[0].ip, NODE_PORT)
        use = InUse(Load((*sockets.places, *packets.places)), Kept(*ways, outside))
        use.kept.open()
        yield use


def test_the_documented_steps_there_and_back_fail_no_connection(
    cluster: KubeadmCluster, kubectl: Path, kubeadm: Path, tmp_path
):
    shell = Shell(cluster, tmp_path, kubectl, kubeadm)
    with in_use(cluster, cluster.lab.nodes[1]) as use:
        to_kbpf(cluster, shell, use)
        use.kept.open()
        use.goes_on()
        upgraded(cluster, shell, use)
        back(cluster, shell, use)


def type_in(shell: Shell, use: InUse, block: str) -> str:
    """Runs each command of a block, checking traffic after each; returns their output."""
    said = ""
    for command in docs.commands(block):
        said += shell(command)
        use.goes_on()
    return said


def all_well(cluster: KubeadmCluster) -> None:
    """Waits until both agents report health, as the page says to do before removing the rules."""
    status = ("kbpf", "inspect", "status")
    for agent in cluster.pod_agents[:2]:
        until("the agent is healthy", lambda one=agent: one.exec(*status).returncode == 0)


def to_kbpf(cluster: KubeadmCluster, shell: Shell, use: InUse) -> None:
    """install.md: set the name of the image. migration.md: pull it, apply, clean up afterwards."""
    image, where = docs.section("docs/install.md", "## The image")
    pull, apply, take_over = docs.section("docs/migration.md", "## To kbpf")
    assert all(line.startswith("buildah ") for line in docs.commands(image)), "by tests/image"
    cluster.kubelets.images.remove("kbpf:0.1.0")
    cluster.kubelets.images.add("REGISTRY/kbpf:0.1.0")
    type_in(shell, use, where)
    assert "successfully rolled out" in type_in(shell, use, pull)
    pulled = [cluster.kubelets.pulled[node.name] for node in cluster.lab.nodes[:2]]
    assert all("REGISTRY/kbpf:0.1.0" in images for images in pulled), "before kube-proxy ends"
    (container,) = container_of(cluster)
    assert container["command"][0] == "/usr/local/bin/kube-proxy"
    assert "successfully rolled out" in type_in(shell, use, apply)
    (container,) = container_of(cluster)
    assert (container["image"], container["command"][0]) == ("REGISTRY/kbpf:0.1.0", "kbpf")
    all_well(cluster)
    said = type_in(shell, use, take_over)
    assert len(re.findall(r"^kube-proxy ", said, re.MULTILINE)) >= 2, said
    assert "kube-proxy" not in (rules := cluster.rules())
    assert set(re.findall(r"KUBE-[A-Z-]+", rules)) <= {"KUBE-FIREWALL"}
    type_in(shell, use, take_over)  # again, as after a node was not healthy


def upgraded(cluster: KubeadmCluster, shell: Shell, use: InUse) -> None:
    """install.md: a `kubeadm upgrade` has replaced kbpf by kube-proxy."""
    cluster.kubeadm.install_kube_proxy()
    cluster.kubelets.sync()
    (container,) = container_of(cluster)
    assert container["command"][0] == "/usr/local/bin/kube-proxy"
    kube_proxy_serves(cluster)
    use.goes_on()
    *_, apply = docs.section("docs/install.md", "### In the place of kubeadm's kube-proxy")
    assert "successfully rolled out" in type_in(shell, use, apply)
    all_well(cluster)
    type_in(shell, use, docs.section("docs/migration.md", "## To kbpf")[-1])
    assert "KUBE-SERVICES" not in cluster.rules()


def back(cluster: KubeadmCluster, shell: Shell, use: InUse) -> None:
    """Follows the page. Connections of the packet path end with the last step."""
    bit, all_have_it, delete, kubeadm, keep, clean, gone = docs.section("docs/migration.md", "## Back to kube-proxy")
    type_in(shell, use, bit)
    type_in(shell, use, all_have_it)
    assert re.findall(r"masqueradeBit: (\S+)", config_of(cluster)) == ["13", "13"]
    type_in(shell, use, delete)
    type_in(shell, use, kubeadm)
    (container,) = container_of(cluster)
    assert container["command"][0] == "/usr/local/bin/kube-proxy"
    assert re.findall(r"masqueradeBit: (\S+)", config_of(cluster)) == ["16", "17"]
    kube_proxy_serves(cluster)
    type_in(shell, use, keep)
    ready = ("rollout", "status", "ds", "kbpf-cleanup", f"--timeout={PATIENCE:.0f}s")
    assert "successfully rolled out" in cluster.kubectl("-n", "kube-system", *ready)
    before = [agent.reasons()[Reason.NEW_FLOW] for agent in cluster.pod_agents[:2]]
    use.goes_on()
    assert [agent.reasons()[Reason.NEW_FLOW] for agent in cluster.pod_agents[:2]] == before
    use.kept.close()
    use.kept.open()
    type_in(shell, use, clean)
    shell(f"kubectl -n kube-system rollout status ds kbpf-cleanup --timeout={PATIENCE:.0f}s")
    assert not any(list(agent.bpffs.iterdir()) for agent in cluster.pod_agents[:2])
    type_in(shell, use, gone)


NOT_PUSHED, NOT_READY = "kbpf:not-pushed", "kbpf:not-ready"


@pytest.fixture
def not_ready(tmp_path_factory) -> Path:
    """A copy of kbpf that serves but reports that it is not ready."""
    other = tmp_path_factory.mktemp("not-ready") / "kbpf"
    shutil.copytree(docs.ROOT / "kbpf", other, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "serve" / "health.py").open("a") as file:
        file.write("\n\ndef readyz(*_: object) -> HttpResponse:\n    return HttpResponse(503, b'')\n")
    return other


def test_a_failed_rollout_is_reverted_by_the_documented_steps(
    cluster: KubeadmCluster, kubectl: Path, kubeadm: Path, tmp_path, not_ready: Path
):
    """migration.md: the rollout stops at the first node, and kube-proxy is restored there.

    First with an image that does not exist in the registry; then with one that does not become
    ready, after it has attached its programs.
    """
    shell = Shell(cluster, tmp_path, kubectl, kubeadm)
    kustomization = tmp_path / "manifests" / "base" / "kustomization.yaml"
    told = kustomization.read_text()
    first, second = cluster.pod_agents[:2]
    first.versions = {NOT_READY: not_ready}
    cluster.kubelets.images.add(NOT_READY)
    cluster.kubelets.never_ready = {NOT_PUSHED, NOT_READY}
    before, other = container_of(cluster), second.runs
    *_, keep, clean, gone = docs.section("docs/migration.md", "## Back to kube-proxy")
    with in_use(cluster, cluster.lab.nodes[0]) as use:
        for image in (NOT_PUSHED, NOT_READY):
            tag = image.partition(":")[2]
            kustomization.write_text(told.replace("newTag: 0.1.0", f"newTag: {tag}"))
            does_not_roll_out(shell, use)
            assert (first.is_running, second.runs) == (image == NOT_READY, other)
            if first.is_running:
                until("the agent is synced", lambda: (first.status() or {}).get("synced"))
                use.kept.open()
            (undo,) = docs.section("docs/migration.md", "## If it does not serve")
            assert "registry.k8s.io/kube-proxy" in type_in(shell, use, undo)
            assert container_of(cluster) == before
            assert second.runs == other, "the second node's kube-proxy was not restarted"
            assert list(first.bpffs.iterdir()) == ([first.pin_dir] if image == NOT_READY else [])
        kube_proxy_serves(cluster)
        type_in(shell, use, keep)
        use.kept.close()
        use.kept.open()
        type_in(shell, use, clean)
        assert list(first.bpffs.iterdir()) == []
        type_in(shell, use, gone)


def does_not_roll_out(shell: Shell, use: InUse) -> None:
    """Step 2, with a time-out of a second instead of ten minutes."""
    _, block, _ = docs.section("docs/migration.md", "## To kbpf")
    apply, status, _ = docs.commands(block)
    shell(apply)
    use.goes_on()
    shell("! " + status.replace("--timeout=10m", "--timeout=1s"))


def container_of(cluster: KubeadmCluster) -> list[dict]:
    """The containers of the DaemonSet kube-proxy."""
    (found,) = cluster.kubectl.objects("-n", "kube-system", "get", "ds/kube-proxy")
    return found["spec"]["template"]["spec"]["containers"]


def config_of(cluster: KubeadmCluster) -> str:
    """The configuration file in the ConfigMap kube-proxy."""
    (found,) = cluster.kubectl.objects("-n", "kube-system", "get", "cm/kube-proxy")
    text: str = found["data"]["config.conf"]
    return text
