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
        self.cluster, self.folder = cluster, folder
        self._shell = Shell(cluster, folder, kubectl)
        (folder / "bin" / "kubectl-kbpf").symlink_to(PLUGIN)

    def __call__(self, command: str, code: int = 0) -> str:
        """Its output, and after that its errors."""
        return self._shell(f"kubectl-kbpf {command} 2>&1; [ $? = {code} ]")

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        return self._shell.run(f"kubectl-kbpf {command}")

    def items(self, command: str, code: int = 0) -> list[dict[str, Any]]:
        text = self._shell(f"kubectl-kbpf {command} -o json; [ $? = {code} ]")
        return list(json.loads(text)["items"])


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


def nodes(operator: Operator) -> list[str]:
    return [node.name for node in operator.cluster.lab.nodes[:2]]


def test_status_has_a_row_for_each_node(operator: Operator):
    def succeeds() -> str:
        done = operator.run("status -o json")
        return done.stdout if done.returncode == 0 else ""

    # An agent that was stopped for ten seconds is not ok for a moment.
    rows = json.loads(until("both agents are ok", succeeds))["items"]
    assert [(row["node"], row["agent"], row["mode"], row["failures"]) for row in rows] == [
        (nodes(operator)[0], "ok", "bpf", 1),
        (nodes(operator)[1], "ok", "bpf", 0),
    ]
    assert all(row["services"] >= 2 and row["version"] and row["pod"] for row in rows)


def test_failures_name_the_node(operator: Operator):
    (row,) = operator.items("failures --since 1h")
    assert (row["node"], row["service"], row["reason"]) == (nodes(operator)[0], "default/web-21", "no_endpoints")


@pytest.mark.parametrize("index", [0, 1])
def test_trace_runs_on_the_node_of_the_client(operator: Operator, index: int):
    node = nodes(operator)[index]
    output = operator(f"trace host:{node} {SERVICE}")
    assert HOST in output
    output = operator(f"exec {node} -- inspect status")
    assert node in output


def test_a_node_without_an_agent_is_a_row(operator: Operator):
    cluster = operator.cluster
    last = cluster.lab.nodes[-1]
    cluster.register(last)
    row = operator.items("status", 1)[-1]
    assert (row["node"], row["agent"]) == (last.name, "none")
