# SPDX-License-Identifier: Apache-2.0
"""The DaemonSet's container on a node whose source is a folder: an API server would take minutes in
an emulated guest.
"""

import yaml

from tests.support.cluster.daemonset import ROOT, PodAgent
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import (
    endpoint,
    endpoint_slice,
    node,
    port,
    service,
    slice_port,
)
from tests.support.cluster.scenario import file_of, put
from tests.support.lab.lab import Lab, Node


class FolderPod:
    """A node with two pods, an outside client, and a Service in a folder. `agent`: the class that
    runs the container.
    """

    def __init__(self, lab: Lab, agent: type[PodAgent] = PodAgent) -> None:
        self.node: Node = lab.nodes[0]
        self.agent = agent(self.node)
        self.server, self.client = self.node.pod("a1").serve(8080), self.node.pod("a2")
        self.objects = lab.folder / "objects"
        self.objects.mkdir()
        row = port(80, node_port=30080)
        for obj in (
            node(self.node.name, self.node.ip, self.node.ip6),
            service("web", row, type="NodePort", cluster_ip="10.96.0.80"),
            endpoint_slice("web", endpoint(self.server.ip), ports=[slice_port(8080)]),
        ):
            put(self.objects, file_of(obj), yaml.safe_dump(obj))

    def template(self) -> Object:
        """The pod template of manifests/base, with the folder as the agent's source."""
        made = yaml.safe_load((ROOT / "manifests/base/daemonset.yaml").read_text())
        template: Object = made["spec"]["template"]
        (container,) = template["spec"]["containers"]
        container["command"] = [word for word in container["command"] if "--config" not in word]
        container["env"] = [row for row in container["env"] if row["name"] != "KBPF_CONFIG"]
        container["command"] += ("--source=/var/lib/kube-proxy", "--mode=bpf")
        return template

    def launch(self, template: Object) -> None:
        """Runs the container of a template."""
        self.agent.launch(template, {"config": self.objects}, None)
