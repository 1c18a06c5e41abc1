# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies of a real kube-router about Services' traffic: they judge what they judge beside
the real kube-proxy. The same rows are tried with both.

    a1, b1   admit the pod a2, and clients at the address of "outside"
    a3       may reach b2 only
    others   no policy

IPv4 only: kube-router 2.1.0 writes the names of its IPv6 sets wrongly, and ip6tables refuses them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.cni.cluster import CniCluster
from tests.support.cni.dials import WAIT, Row, check_policy
from tests.support.cni.networks import CNIS
from tests.support.lab.field import OUT4
from tests.support.lab.lab import until
from tests.support.table import table

SERVICES = """
11 21:UDP -> a1
12 22:UDP -> b1
13 23:UDP -> b2
14 24:UDP -> a2
15 25:UDP -> a1 b1 external=Local
"""


POD = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default, labels: {{app: {name}}}}}
spec: {{nodeName: {node}, automountServiceAccountToken: false, containers: [{{name: web, image: none}}]}}
"""
STATUS = """
status:
  phase: Running
  hostIP: {node.ip}
  hostIPs: [{{ip: {node.ip}}}, {{ip: "{node.ip6}"}}]
  podIP: {pod.ip}
  podIPs: [{{ip: {pod.ip}}}, {{ip: "{pod.ip6}"}}]
"""
POLICIES = f"""
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{name: backends, namespace: default}}
spec:
  podSelector: {{matchExpressions: [{{key: app, operator: In, values: [a1, b1]}}]}}
  policyTypes: [Ingress]
  ingress: [{{from: [{{podSelector: {{matchLabels: {{app: a2}}}}}}, {{ipBlock: {{cidr: {OUT4}/32}}}}]}}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{name: client, namespace: default}}
spec:
  podSelector: {{matchLabels: {{app: a3}}}}
  policyTypes: [Egress]
  egress: [{{to: [{{podSelector: {{matchLabels: {{app: b2}}}}}}]}}]
"""


@pytest.fixture(scope="module", params=["kbpf", "nftables"])
def cluster(request, cni_programs: None, kube_router: Path, kube_proxy: Path) -> Iterator[CniCluster]:
    with CniCluster(CNIS["kube-router"], proxy=request.param) as made:
        account = {"name": "default", "namespace": "default"}
        made.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        a3 = made["a3"]
        made.unhook("a3!", a3.netns, a3.ip, a3.ip6, made.home["a3"])
        for name in ("a1", "a2", "a3", "b1", "b2"):
            pod, home = made[name], made.home[name]
            made.create(yaml.safe_load(POD.format(name=name, node=home.name)))
            made.kube.patch("Pod", name, yaml.safe_load(STATUS.format(node=home, pod=pod)), "default", "status")
        made.create(*yaml.safe_load_all(POLICIES))
        made.create(*made.all_of(SERVICES))
        made.settle()
        for backend in ("a1", "b1"):
            for client, is_judged in (("b2", "error"), ("a2", "name")):
                until(
                    f"kube-router judges what {client} sends to {backend}",
                    lambda to=made[backend].ip, client=client, is_judged=is_judged: (
                        is_judged in made[client].tcp(to, 8080, timeout=WAIT)
                    ),
                    state=made.daemons[0].tail,
                )
        yield made


ROWS = table(
    Row,
    """
a2      | ClusterIP  | 1 | admitted
a2      | ClusterIP  | 2 | admitted
a2!     | ClusterIP  | 1 | admitted
a2!     | ClusterIP  | 2 | admitted
b2      | ClusterIP  | 1 | rejected
b2      | ClusterIP  | 2 | rejected
a3      | ClusterIP  | 1 | rejected
a3!     | ClusterIP  | 1 | rejected
a3!     | ClusterIP  | 2 | rejected
a3      | ClusterIP  | 3 | admitted
a3!     | ClusterIP  | 3 | admitted
a3      | ClusterIP  | 4 | rejected
a3!     | ClusterIP  | 4 | rejected
a3      | NodePort   | 3 | admitted
a3!     | NodePort   | 3 | admitted
a3      | NodePort   | 4 | rejected
a3!     | NodePort   | 4 | rejected
a2      | NodePort   | 1 | admitted
a2!     | NodePort   | 1 | admitted
a3      | NodePort   | 1 | rejected
host-1  | ClusterIP  | 1 | admitted
host-1  | ClusterIP  | 2 | rejected
outside | NodePort   | 1 | admitted
outside | NodePort   | 2 | admitted | client | 2
outside | NodePort   | 2 | rejected
outside | NodePort   | 3 | admitted
outside | NodePort   | 5 | admitted
outside | NodePort   | 5 | admitted | client | 2
outside | VIP        | 1 | admitted
outside | ExternalIP | 1 | admitted
""",
)
"""What node-1 masquerades comes from a remote node for b1."""


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.client} {r.kind} {r.number}")
def test_policies_judge_as_with_kube_proxy(cluster: CniCluster, row: Row, protocol: str):
    check_policy(cluster, row, protocol, v6=False)
