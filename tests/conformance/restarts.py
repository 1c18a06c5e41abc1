# SPDX-License-Identifier: Apache-2.0
"""kbpf as a DaemonSet while parts of a node restart: kubelet, containerd, kbpf itself, the node.

`make conformance` runs it after Kubernetes' tests:  python -m pytest tests/conformance/restarts.py
"""

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance import report
from tests.conformance.cluster import kbpf, lifecycle, machines, nodes
from tests.conformance.cluster.layout import Cluster, Object, wait_for
from tests.conformance.versions import NEWEST
from tests.support.cluster.kube_objects import port, service

CLUSTER_IP, NODE_PORT = "10.96.77.7", 30077
ASK = 'curl -s -m 2 "http://$0/hostname" >/dev/null && echo ok || echo failed'
KEPT = r"""
exec 3<>"/dev/tcp/${0/:/\/}"
while printf 'GET /hostname HTTP/1.1\r\nHost: server\r\n\r\n' >&3; do
  length=0
  while IFS= read -r -t 5 line <&3 && [ "${line%$'\r'}" ]; do
    case ${line,,} in content-length:*) line=${line#*: }; length=${line%$'\r'} ;; esac
  done
  IFS= read -r -t 5 -N "$length" name <&3 && [ "$name" ] || break
  echo kept
  sleep 0.1
done
echo broken
"""
LOOPS = f"({KEPT}) & while :; do {ASK}; sleep 0.1; done"
"""A client of HOST:PORT: requests on one connection, and each on a new one."""


def pod(name: str, node: str, image: str, **container: object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name.partition("-")[0]}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": image, **container}],
        },
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with a server on each, and a client pod on the first."""
    logs = report.ROOT / "build" / "conformance" / "restarts"
    with lifecycle.cluster(NEWEST, 2, "kbpf", logs=logs) as created:
        image = f"registry.k8s.io/e2e-test-images/agnhost:{created.version.images['agnhost']}"
        created.apply(
            pod("server-1", "node1", image, args=["netexec", "--http-port=8080"]),
            pod("server-2", "node2", image, args=["netexec", "--http-port=8080"]),
            service(
                "server",
                port(80, target=8080, node_port=NODE_PORT),
                type="NodePort",
                cluster_ip=CLUSTER_IP,
                selector={"app": "server"},
            ),
        )
        are_ready(created)
        created.apply(pod("client", "node1", image, command=["bash", "-c", LOOPS, f"{CLUSTER_IP}:80"]))
        are_ready(created)
        yield created


def are_ready(cluster: Cluster) -> None:
    """Waits for all pods."""
    cluster.kubectl("wait", "--for=condition=Ready", "pod", "--all", "--timeout=180s")


class Load:
    """Requests one after the other, from outside and from a pod, on new connections and on one that
    is kept; its log has a line for each.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._log = cluster, folder / "outside"
        target = f"{cluster.nodes[1].addresses[0]}:{NODE_PORT}"
        self._outside = machines.spawn(cluster.on_client("bash", "-c", LOOPS, target), self._log)
        self._failures_before = self._count("failed", "broken")

    def _count(self, *words: str) -> dict[tuple[str, str], int]:
        """How often each client has printed each of these words."""
        (pod_log,) = self._cluster.files("node1", "log", "pods").glob("default_client_*/main/0.log")
        texts = {"pod": pod_log.read_text(), "outside": self._log.read_text()}
        return {(name, word): text.count(word) for name, text in texts.items() for word in words}

    def goes_on(self) -> None:
        """Each client gets ten more answers on new connections and on the kept one, and none has
        had a failure.
        """
        before = self._count("ok", "kept")
        wait_for(
            "both clients are answered",
            lambda: all(n >= before[key] + 10 for key, n in self._count("ok", "kept").items()),
        )
        assert self._count("failed", "broken") == self._failures_before

    def stop(self) -> None:
        machines.kill(machines.process(self._outside.pid), signal.SIGKILL)
        self._outside.wait()


@pytest.fixture
def load(cluster: Cluster, tmp_path: Path) -> Iterator[Load]:
    started = Load(cluster, tmp_path)
    try:
        started.goes_on()
        yield started
    finally:
        started.stop()


def restart_kubelet(cluster: Cluster) -> None:
    for node in cluster.nodes:
        machines.stop_service(cluster, node, "kubelet")
        nodes.start_kubelet(cluster, node)
    is_ready(cluster)


def restart_containerd(cluster: Cluster) -> None:
    """Containers continue without it; their shims do not end with it."""
    for node in cluster.nodes:
        machines.stop_service(cluster, node, "containerd")
        nodes.start_containerd(cluster, node)
    is_ready(cluster)


def delete_kbpf(cluster: Cluster) -> None:
    cluster.kubectl("-n=kube-system", "delete", "pod", "-l", "k8s-app=kube-proxy", "--wait=true")
    kbpf.wait(cluster)


def is_ready(cluster: Cluster) -> None:
    wait_for("all nodes are ready", lambda: nodes.ready_nodes(cluster) == len(cluster.nodes))
    kbpf.wait(cluster)


@pytest.mark.parametrize("restart", [restart_kubelet, restart_containerd, delete_kbpf])
def test_no_request_fails_when_a_part_of_the_node_restarts(
    cluster: Cluster, load: Load, restart: Callable[[Cluster], None]
):
    restart(cluster)
    load.goes_on()


def test_node_serves_again_after_a_reboot(cluster: Cluster):
    """Everything on it is killed, and with its mounts its pins go. Its disk stays."""
    node = cluster.nodes[1]
    assert node.init is not None
    machines.kill(node.init, signal.SIGKILL)
    assert machines.wait_until_gone([node.init], 30)
    url = f"http://{node.addresses[0]}:{NODE_PORT}/hostname"

    def answers() -> bool:
        command = cluster.on_client("curl", "-s", "-m", "2", url)
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    wait_for("its NodePort is not served", lambda: not answers())
    machines.start_machine(cluster, node)
    nodes.start_containerd(cluster, node)
    nodes.import_images(cluster, node, [])
    nodes.start_kubelet(cluster, node)
    is_ready(cluster)
    wait_for("its NodePort answers", answers)
    are_ready(cluster)
