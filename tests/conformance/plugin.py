# SPDX-License-Identifier: Apache-2.0
"""`kubectl kbpf` on a cluster with real kubelets, where kbpf is a DaemonSet.

`make conformance` runs it after Kubernetes' tests:  python -m pytest tests/conformance/plugin.py
"""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance import report
from tests.conformance.cluster import lifecycle
from tests.conformance.cluster.layout import Cluster, wait_for
from tests.conformance.restarts import are_ready, pod
from tests.conformance.versions import NEWEST
from tests.support.cluster.kube_objects import port, service

PLUGIN = report.ROOT / "kubectl" / "kubectl-kbpf"
CLUSTER_IP, EMPTY_IP = "10.96.77.8", "10.96.77.9"
FAIL = "while :; do curl -s -m 2 http://$0 >/dev/null; sleep 1; done"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes. A pod on the second one is a client of a Service without endpoints."""
    logs = report.ROOT / "build" / "conformance" / "plugin"
    with lifecycle.cluster(NEWEST, 2, "kbpf", logs=logs) as created:
        image = f"registry.k8s.io/e2e-test-images/agnhost:{created.version.images['agnhost']}"
        created.apply(
            pod("server-1", "node1", image, args=["netexec", "--http-port=8080"]),
            pod("client", "node2", image, command=["bash", "-c", FAIL, f"{EMPTY_IP}:80"]),
            *(
                service(name, port(80, target=8080), cluster_ip=address, selector={"app": name})
                for name, address in (("server", CLUSTER_IP), ("empty", EMPTY_IP))
            ),
        )
        created.kubectl("create", "clusterrolebinding", "viewer", "--clusterrole=view", "--user=viewer")
        are_ready(created)
        yield created


def run(cluster: Cluster, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs the plugin on the client machine, by kubectl, which finds it in PATH."""
    path = f"{cluster.programs}:{PLUGIN.parent}:{os.environ['PATH']}"
    config = f"--kubeconfig={cluster.kubeconfig('admin')}"
    command = cluster.on_client("env", f"PATH={path}", "kubectl", "kbpf", config, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


def items(cluster: Cluster, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    return list(json.loads(run(cluster, *arguments, "-o", "json", code=code).stdout)["items"])


@pytest.mark.parametrize(("client", "node"), [("default/server-1", "node1"), ("default/client", "node2")])
def test_trace_runs_on_the_node_of_the_pod(cluster: Cluster, client: str, node: str):
    """kbpf refuses a Pod of another node."""
    assert CLUSTER_IP in run(cluster, "trace", client, "default/server").stdout
    (other,) = {"node1", "node2"} - {node}
    done = run(cluster, "exec", other, "--", "trace", client, "default/server", code=1)
    assert "is on this node" in done.stderr
    done = run(cluster, "trace", "--node", other, client, "default/server", code=1)
    assert done.stderr == f"kubectl kbpf: {client} is on node {node}, not on {other}\n"


def test_failures_name_the_pod_and_its_node(cluster: Cluster):
    def rows() -> set[tuple[str, str, str]]:
        found = items(cluster, "failures", "--service", "default/empty")
        return {(row["node"], row["client"], row["reason"]) for row in found}

    wait_for("the client has failed", lambda: bool(rows()))
    assert rows() == {("node2", "default/client", "no_endpoints")}


def test_a_user_without_the_right_gets_one_line(cluster: Cluster):
    reason = "user viewer may not create pods/exec in kube-system: ask an administrator of the cluster for this right"
    done = run(cluster, "failures", "--as", "viewer", code=1)
    assert f"kubectl kbpf: node1, node2: {reason}\n" in done.stderr
    rows = items(cluster, "status", "--as", "viewer", code=1)
    assert [(row["agent"], row["why"]) for row in rows] == [("unreachable", reason)] * 2
