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

from tests.support.cluster.kube_objects import Object
from tests.support.cni.cluster import CniCluster
from tests.support.cni.dials import ADMITTED, REJECTED, WAIT, Row, check_policy
from tests.support.cni.networks import CNIS
from tests.support.lab.field import OUT4
from tests.support.lab.lab import until

BACKENDS = {1: "a1", 2: "b1", 3: "b2", 4: "a2"}
"""TCP Services 11 to 14, UDP 21 to 24; 15 and 25 have a1 and b1, with the policy Local."""


def pod(name: str, cluster: CniCluster) -> Object:
    """A Pod without its status."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {
            "nodeName": cluster.home[name].name,
            "automountServiceAccountToken": False,
            "containers": [{"name": "web", "image": "none"}],
        },
    }


def network_policy(name: str, pods: list[str], **spec: object) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": pods}]},
            **spec,
        },
    }


def app(name: str) -> Object:
    return {"podSelector": {"matchLabels": {"app": name}}}


POLICIES = (
    network_policy(
        "backends",
        ["a1", "b1"],
        policyTypes=["Ingress"],
        ingress=[{"from": [app("a2"), {"ipBlock": {"cidr": f"{OUT4}/32"}}]}],
    ),
    network_policy("client", ["a3"], policyTypes=["Egress"], egress=[{"to": [app("b2")]}]),
)


@pytest.fixture(scope="module", params=["kbpf", "nftables"])
def cluster(
    request: pytest.FixtureRequest, cni_programs: None, kube_router: Path, kube_proxy: Path
) -> Iterator[CniCluster]:
    with CniCluster(CNIS["kube-router"], proxy=request.param) as made:
        account = {"name": "default", "namespace": "default"}
        made.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        a3 = made["a3"]
        made.unhook("a3!", a3.netns, a3.ip, a3.ip6, made.home["a3"])
        for name in ("a1", "a2", "a3", "b1", "b2"):
            made.create(pod(name, made))
            place, home = made[name], made.home[name]
            status = {
                "phase": "Running",
                "hostIP": home.ip,
                "hostIPs": [{"ip": home.ip}, {"ip": home.ip6}],
                "podIP": place.ip,
                "podIPs": [{"ip": place.ip}, {"ip": place.ip6}],
            }
            made.kube.patch("Pod", name, {"status": status}, "default", "status")
        made.create(*POLICIES)
        for base, protocol in ((10, "TCP"), (20, "UDP")):
            for number, who in BACKENDS.items():
                made.create(*made.all_ways(base + number, who, protocol))
            made.create(*made.all_ways(base + 5, "a1 b1", protocol, external_policy="Local"))
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


ROWS = (
    Row("a2", "ClusterIP", 1, ADMITTED),
    Row("a2", "ClusterIP", 2, ADMITTED),
    Row("a2!", "ClusterIP", 1, ADMITTED),
    Row("a2!", "ClusterIP", 2, ADMITTED),
    Row("b2", "ClusterIP", 1, REJECTED),
    Row("b2", "ClusterIP", 2, REJECTED),
    Row("a3", "ClusterIP", 1, REJECTED),
    Row("a3!", "ClusterIP", 1, REJECTED),
    Row("a3!", "ClusterIP", 2, REJECTED),
    Row("a3", "ClusterIP", 3, ADMITTED),
    Row("a3!", "ClusterIP", 3, ADMITTED),
    Row("a3", "ClusterIP", 4, REJECTED),
    Row("a3!", "ClusterIP", 4, REJECTED),
    Row("a3", "NodePort", 3, ADMITTED),
    Row("a3!", "NodePort", 3, ADMITTED),
    Row("a3", "NodePort", 4, REJECTED),
    Row("a3!", "NodePort", 4, REJECTED),
    Row("a2", "NodePort", 1, ADMITTED),
    Row("a2!", "NodePort", 1, ADMITTED),
    Row("a3", "NodePort", 1, REJECTED),
    Row("host-1", "ClusterIP", 1, ADMITTED),
    Row("host-1", "ClusterIP", 2, REJECTED),
    Row("outside", "NodePort", 1, ADMITTED),
    Row("outside", "NodePort", 2, ADMITTED, node_number=2),
    Row("outside", "NodePort", 2, REJECTED),  # it comes from node-1, a remote node
    Row("outside", "NodePort", 3, ADMITTED),
    Row("outside", "NodePort", 5, ADMITTED),
    Row("outside", "NodePort", 5, ADMITTED, node_number=2),
    Row("outside", "VIP", 1, ADMITTED),
    Row("outside", "ExternalIP", 1, ADMITTED),
)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.client} {r.kind} {r.number}")
def test_policies_judge_as_with_kube_proxy(cluster: CniCluster, row: Row, protocol: str):
    check_policy(cluster, row, protocol, v6=False)
