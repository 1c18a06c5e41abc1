# SPDX-License-Identifier: Apache-2.0
"""`kubectl kbpf` on a cluster of two nodes whose agents are the pods of a DaemonSet. The API server
and kubectl are real; runc executes `kubectl exec` (tests/support/runtime/shell.py), which
tests/conformance/plugin.py does with real kubelets.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.daemonset import PodCluster
from tests.support.lab.lab import until
from tests.support.runtime import docs
from tests.support.runtime.shell import Shell

PLUGIN = docs.ROOT / "kubectl" / "kubectl-kbpf"
SERVICE, HOST = "default/web-20", "10.96.0.20"


class Operator:
    """Runs the plugin in an operator's shell."""

    def __init__(self, cluster: PodCluster, folder: Path, kubectl: Path) -> None:
        self.nodes = [node.name for node in cluster.lab.nodes[:2]]
        self._shell = Shell(cluster, folder, kubectl)
        (folder / "bin" / "kubectl-kbpf").symlink_to(PLUGIN)

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        return self._shell.run(f"kubectl-kbpf {command}")

    def items(self, command: str) -> list[dict[str, Any]]:
        """The rows of its JSON; [] while it fails."""
        done = self.run(f"{command} -o json")
        return list(json.loads(done.stdout)["items"]) if done.returncode == 0 else []


@pytest.fixture(scope="module")
def operator(programs: None, kubectl: Path, tmp_path_factory) -> Iterator[Operator]:
    """A Service with a backend on the second node, and one without endpoints, at which a process
    of the first node has failed.
    """
    with PodCluster(kubectl, 3, "kp") as cluster:
        cluster.create(*cluster.web(20, "b1"), *cluster.web(21, ""))
        agents = [agent for agent in cluster.pod_agents if agent.is_running]
        cluster.settle(*agents)
        for agent in agents:
            until(
                f"the agent of {agent.node.name} is healthy",
                lambda agent=agent: agent.exec("kbpf", "inspect", "status").returncode == 0,
            )
        cluster["host-1"].many(1, "10.96.0.21", 80)
        yield Operator(cluster, tmp_path_factory.mktemp("operator"), kubectl)


def test_status_has_a_row_for_each_node(operator: Operator):
    # An agent that was stopped for ten seconds is not ok for a moment.
    rows = until("both agents are ok", lambda: operator.items("status"))
    assert [(row["node"], row["agent"], row["mode"], row["failures"]) for row in rows] == [
        (operator.nodes[0], "ok", "bpf", 1),
        (operator.nodes[1], "ok", "bpf", 0),
    ]
    assert all(row["services"] >= 2 and row["version"] and row["pod"] for row in rows)


def test_failures_name_the_node(operator: Operator):
    (row,) = operator.items("failures --since 1h")
    assert (row["node"], row["service"], row["reason"]) == (operator.nodes[0], "default/web-21", "no_endpoints")


def test_trace_and_exec_run_on_a_node(operator: Operator):
    for node in operator.nodes:
        for command, says in ((f"trace host:{node} {SERVICE}", HOST), (f"exec {node} -- inspect status", node)):
            done = operator.run(command)
            assert done.returncode == 0
            assert says in done.stdout, done
