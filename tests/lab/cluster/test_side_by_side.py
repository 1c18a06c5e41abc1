# SPDX-License-Identifier: Apache-2.0
"""The overlay side-by-side: kbpf next to a real kube-proxy on chosen nodes. It reaches the API
server by the Service `kubernetes`, which kube-proxy serves. Also docs/migration.md, "From the trial
to the drop-in".
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.lab.cluster.test_drop_in import NOT_OURS
from tests.support.cluster.daemonset import PodAgent, PodCluster, asked
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.cluster.kubeadm import Kubeadm
from tests.support.cluster.kubectl import OVERLAYS
from tests.support.lab.dial import UNSERVED, Dial, check
from tests.support.lab.kept import Kept
from tests.support.lab.lab import inside, ip, run, until
from tests.support.lab.load import under_load
from tests.support.runtime import docs
from tests.support.runtime.shell import Shell

HOST = "10.96.0.20"


class Trial(PodCluster):
    """Two nodes without kbpf; a third has not joined."""

    beside: KubeProxy

    def bring_up(self) -> None:
        """Creates the Nodes only."""
        self.prepare()
        self.overlay = OVERLAYS / "side-by-side"


@pytest.fixture(scope="module")
def trial(programs: None, kubectl: Path, kube_proxy: Path) -> Iterator[Trial]:
    """The trial's cluster, with kube-proxy and a Service that it serves on the first node."""
    with Trial(kubectl, 3, "t") as made:
        home = made.lab.nodes[0]
        ip("route del unreachable 10.96.0.0/16", netns=home.netns)
        made.create(*made.web(20, "a1 b1"))
        with KubeProxy(home, "nftables", made.kubeconfig()) as made.beside:
            until("kube-proxy serves", lambda: "name" in made["host-1"].tcp(HOST, 80, timeout=1))
            yield made


def refuses(agent: PodAgent, why: str) -> None:
    """Checks that the agent refuses to remove kube-proxy's rules. It asks kube-proxy, which has
    five seconds for an answer.
    """

    def refusal() -> str:
        done = agent.exec("kbpf", "cleanup", "--kube-proxy")
        assert done.returncode == 1, done.stdout
        return done.stderr

    until("it says why", lambda: why in refusal(), state=refusal)
    rules = inside(agent.node.netns, None, "nft", "list", "table", "ip", "kube-proxy")
    assert "service-endpoints" in run(*rules)


def test_a_trial_serves_on_the_labelled_node(trial: Trial):
    agent = trial.pod_agents[0]

    def running() -> list[str]:
        trial.kubelets.sync()
        return [each.node.name for each in trial.pod_agents if each.is_running]

    check(trial, Dial("a pod is not served yet", "a2", f"{HOST}:80", UNSERVED))
    trial.kubectl("apply", "-k", str(trial.overlay))
    assert running() == [], "no node has the label"
    with under_load(trial, HOST, "host-1"):
        trial.kubectl("label", "node", "node-1", "kbpf.io/node=true")
        assert running() == ["node-1"]
        trial.settle(agent)
        check(trial, Dial("a pod is served by kbpf", "a2", f"{HOST}:80", "a1 b1"))
        refuses(agent, "kube-proxy is running on this node (it answers on ")
        for port in (10256, 10356):  # kube-proxy's and ours
            until(f"{port} is healthy", lambda port=port: asked(agent, port, "/healthz") == 200)
        trial.kubectl("label", "node", "node-1", "kbpf.io/node-")
        assert running() == []
        trial.kubectl("delete", "-k", str(trial.overlay))
        agent.remove_pins()
    # the kernel detaches a program some time after its last pin was removed
    until("the hooks are detached", lambda: "error" in trial["a2"].tcp(HOST, 80))
    check(trial, Dial("a pod is not served any more", "a2", f"{HOST}:80", UNSERVED))
    assert trial.beside.is_running, trial.beside.tail()


SECOND = "kbpf run --hostname-override=node-1 --healthz-bind-address= --metrics-bind-address=; test $? = 1"


def test_the_documented_steps_from_trial_to_drop_in(trial: Trial, kubectl: Path, kubeadm: Path, tmp_path):
    """migration.md command by command, with two agents on a node in between: the drop-in adopts."""
    there, back = docs.section("docs/migration.md", "## From the trial to the drop-in")
    shell = Shell(trial, tmp_path, kubectl)
    type_in(shell, back.replace("--all", "node-1"))
    first, second = trial.pod_agents[:2]
    trial.settle(first)
    clients = ("host-1", "a2")
    kept = Kept(*((trial[name], (HOST, 80)) for name in clients))
    with under_load(trial, HOST, *clients) as load:
        kept.open()
        said = trial.kubelets.try_out(first, ["sh", "-c", SECOND], {})
        assert "another agent is at work here (/sys/fs/bpf/kbpf)" in said
        load.goes_on()
        program = Kubeadm(kubeadm, trial.api, tmp_path, proxy=NOT_OURS)
        objects = [each for each in program.kube_proxy() if each["kind"] != "DaemonSet"]
        trial.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
        maps = pinned(first)
        for command in docs.commands(there):
            if "apply" in command:
                assert not first.is_running
                trial.beside.stop()  # as kubelet does when the DaemonSet's template changes
            shell(command)
            load.goes_on()
        kept.all_talk()
        trial.settle(first, second)
        assert pinned(first) == maps
    assert [each["metadata"]["name"] for each in trial.kube.list("DaemonSet")["items"]] == ["kube-proxy"]
    labels = [each["metadata"]["labels"] for each in trial.kube.list("Node")["items"]]
    assert not any("kbpf.io/node" in each for each in labels)


def pinned(agent: PodAgent) -> dict[str, int]:
    """The inodes of the agent's pinned maps, by name; a recreated map has another inode."""
    return {path.name: path.stat().st_ino for path in agent.pin_dir.glob("maps-*/*")}


def type_in(shell: Shell, block: str) -> None:
    """Runs each command of a block."""
    for command in docs.commands(block):
        shell(command)
