"""The overlay side-by-side: kbpf beside a real kube-proxy, on the nodes that are chosen. It finds
the API server by the kubernetes Service, which kube-proxy serves.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemonset import PodAgent, PodCluster, asked
from tests.support.dial import UNSERVED, Dial, check
from tests.support.kube_proxy import KubeProxy
from tests.support.kubectl import OVERLAYS
from tests.support.lab import inside, ip, run, until
from tests.support.load import under_load

HOST = "10.96.0.20"


class Trial(PodCluster):
    """Two nodes without kbpf; a third has not joined."""

    def bring_up(self) -> None:
        """The Nodes alone."""
        self.prepare()
        self.overlay = OVERLAYS / "side-by-side"


@pytest.fixture
def trial(programs: None, kubectl: Path, kube_proxy: Path) -> Iterator[Trial]:
    """With kube-proxy on the first node, and a Service that it serves there."""
    with Trial(kubectl, 3, "t") as made:
        home = made.lab.nodes[0]
        ip("route del unreachable 10.96.0.0/16", netns=home.netns)
        made.create(*made.web(20, "a1 b1"))
        with KubeProxy(home, "nftables", made.kubeconfig()) as beside:
            until("kube-proxy serves", lambda: "name" in made["host-1"].tcp(HOST, 80, timeout=1))
            yield made
            assert beside.is_running, beside.tail()


def said_starting(trial: Trial) -> list[str]:
    """What kbpf's Events of its start say; kube-proxy sends its own."""
    rows = trial.kube.list("Event")["items"]
    notes = [row.get("note", "") for row in rows if row["reason"] == "Starting"]
    return [note for note in notes if note.startswith("kbpf ")]


def refuses(agent: PodAgent, why: str) -> None:
    """To remove kube-proxy's rules, which it cannot see the process of."""
    done = agent.exec("kbpf", "cleanup", "--kube-proxy")
    assert done.returncode == 1, done.stdout
    assert why in done.stderr
    rules = inside(agent.node.netns, None, "nft", "list", "table", "ip", "kube-proxy")
    assert "service-endpoints" in run(*rules)


def test_a_trial_on_one_node(trial: Trial) -> None:
    agent = trial.pod_agents[0]

    def running() -> list[str]:
        trial.kubelets.sync()
        return [each.node.name for each in trial.pod_agents if each.is_running]

    check(trial, Dial("a pod has no route to it", "a2", f"{HOST}:80", UNSERVED))
    trial.kubectl("apply", "-k", str(trial.overlay))
    assert running() == [], "no node has the label"
    with under_load(trial, HOST, "host-1"):
        trial.kubectl("label", "node", "node-1", "kbpf.io/node=true")
        assert running() == ["node-1"]
        trial.settle(agent)
        check(trial, Dial("needs none by kbpf", "a2", f"{HOST}:80", "a1 b1"))
        refuses(agent, "kube-proxy runs here (it answers at ")
        until("the base's own rights are enough to say so", lambda: said_starting(trial))
        for port in (10256, 10356):  # kube-proxy's and ours
            until(f"{port} is well", lambda port=port: asked(agent, port, "/healthz") == 200)
        trial.kubectl("label", "node", "node-1", "kbpf.io/node-")
        assert running() == []
        trial.kubectl("delete", "-k", str(trial.overlay))
        agent.remove_pins()
    check(trial, Dial("as before", "a2", f"{HOST}:80", UNSERVED))
