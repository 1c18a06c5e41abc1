# SPDX-License-Identifier: Apache-2.0
"""Nodes with a CNI: its real daemon on each node with a real API server, its plugins called as the
kubelet's runtime calls them, and on each node kbpf, or the real kube-proxy to compare with.

Places and addresses are those of tests/support/lab/field.py.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any, Self

from tests.support.build import go_build
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.cluster import UNROUTED, Cluster, Object
from tests.support.cluster.kube_objects import node as node_object
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.cni.networks import Cni, pod_cidrs
from tests.support.features import tunnel_modules
from tests.support.lab.field import Field
from tests.support.lab.lab import DIE_WITH_US, PATIENCE, Agent, Lab, Node, inside, ip, run, until
from tests.support.lab.podnet import Pod

SYNC_SECONDS = 5 * PATIENCE
"""In an emulator the API server and the daemons leave the agents little of a processor."""
GRACE_SECONDS = 30
"""terminationGracePeriodSeconds of a pod that does not set it."""


class Daemon:
    """A CNI's daemon on one node."""

    def __init__(self, node: Node, cni: Cni, arguments: Sequence[str]) -> None:
        self.log = node.folder / f"{cni.daemon}-{node.name}.log"
        self._node = node
        self._command = (str(go_build.build(cni.daemon)), *arguments)
        self._environment = os.environ | cni.environment(node)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> Self:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*DIE_WITH_US, *inside(self._node.netns, None, *self._command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        return self

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL after GRACE_SECONDS, as the kubelet does."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


HOST_PORT = 7070
REQUESTS = {
    (1, 1): {
        "portMappings": [{"hostPort": HOST_PORT, "containerPort": 8080, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 80_000_000, "ingressBurst": 8_000_000},
    }
}
"""What pods ask of the plugins by capability: a1 has a port of its node, and a limited rate."""


class _Lab(Lab):
    """A lab whose pods are connected by plugins."""

    network: Cni

    def attach(self, node: Node, pod: Pod) -> None:
        self.network.add(node, pod, REQUESTS.get((node.number, pod.index), {}))


class CniCluster(Field):
    """The nodes of the module docstring. `proxy` is kbpf, or a mode of kube-proxy."""

    lab: _Lab

    def __init__(self, cni: Cni, *arguments: str, proxy: str = "kbpf") -> None:
        super().__init__(*arguments, name="cn", pods=(3, 2))
        self.cni, self.proxy_mode = cni, proxy
        self.daemons: list[Daemon] = []
        self._proxies: list[KubeProxy] = []

    def new_lab(self, nodes: int, name: str) -> Lab:
        return _Lab(nodes, name, apart=True, network=self.cni)

    def prepare(self) -> None:
        """Starts the API server and the CNI."""
        enter = self.own.enter_context
        if self.cni.modules:
            enter(tunnel_modules(*self.cni.modules))
        self.api = enter(ApiServer(address=self.lab.outside_ip, netns=self.lab.outside))
        self.kube = enter(self.api.kube())
        self.proxy = None
        kubeconfig = self.kubeconfig("admin")
        nodes = self.lab.nodes
        for each in nodes:
            self.kube.create(
                node_object(
                    each.name,
                    each.ip,
                    each.ip6,
                    pod_cidrs=pod_cidrs(each),
                    annotations={"node.alpha.kubernetes.io/ttl": "0"},  # flanneld needs some
                )
            )
            self.cni.prepare(each, [other for other in nodes if other is not each])
            if self.cni.daemon:
                arguments = self.cni.command(each, kubeconfig)
                self.daemons.append(enter(Daemon(each, self.cni, arguments)))
        for index, each in enumerate(nodes):
            until(
                f"{self.cni.name} is ready on {each.name}",
                lambda each=each: self.cni.is_ready(each, [n for n in nodes if n is not each]),
                state=lambda index=index: self.daemons[index].tail(),
            )

    def source(self) -> tuple[str, ...]:
        return ("--kubeconfig", str(self.kubeconfig()))

    def bring_up(self) -> None:
        if self.proxy_mode == "kbpf":
            for agent in self.agents:
                agent.start(wait=False)
            for agent in self.agents:
                agent.wait_synced(SYNC_SECONDS)
            return
        for each in self.lab.nodes:
            ip(*(f"route del unreachable {net}" for net in UNROUTED), netns=each.netns)
            made = KubeProxy(each, self.proxy_mode, self.kubeconfig())
            self._proxies.append(self.own.enter_context(made))

    def settle(self, *agents: Agent, seconds: float = PATIENCE) -> None:
        if self.proxy_mode == "kbpf":
            super().settle(*agents, seconds=seconds)
            return
        rows = self.kube.list("Service")["items"]
        ports = [
            p["nodePort"] for row in rows for p in row["spec"]["ports"] if p.get("nodePort") and p["protocol"] == "TCP"
        ]
        for each in self._proxies:
            for port in ports:
                until(f"kube-proxy serves {port}", lambda each=each, port=port: each.has_programmed(port))

    def start(self, agent: Agent, wait: bool = True, user: str = "") -> None:
        agent.start(wait)

    def create(self, *objects: Object) -> None:
        Cluster.create(self, *objects)

    def delete(self, *objects: Object) -> None:
        Cluster.delete(self, *objects)

    def change(self, *objects: Object) -> None:
        Cluster.change(self, *objects)

    def write_mark(self, *objects: Object) -> None:
        Cluster.write_mark(self, *objects)

    def addresses(self, home: Node) -> set[str]:
        """All addresses of a node, on all of its devices."""
        rows: list[dict[str, Any]] = json.loads(run("ip", "-n", home.netns, "-j", "addr"))
        return {info["local"] for row in rows for info in row["addr_info"]}
