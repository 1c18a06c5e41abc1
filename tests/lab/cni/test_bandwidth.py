# SPDX-License-Identifier: Apache-2.0
"""Limits of the CNI plugin bandwidth (kubernetes.io/ingress-bandwidth, egress-bandwidth), on pods
with a link of their own. What a pod receives is limited by a tbf qdisc at egress of its device;
what it sends by an "ingress" qdisc there, which redirects to an ifb device with a tbf.
"""

import json
import time
from collections.abc import Iterator, Mapping

import pytest

from kbpf.dataplane.bpf.packet_path.device_roles import GRACE_S
from tests.support.cni.cluster import CniCluster
from tests.support.cni.dials import Row, check
from tests.support.cni.networks import Ptp
from tests.support.cni.plugins import Conf, Sandbox
from tests.support.lab.field import at, both_families, split
from tests.support.lab.lab import Node, run, until
from tests.support.lab.podnet import Pod

RATE, BURST, SIZE = 3_000_000, 100_000, 1_000_000
"""Bytes a second, bytes at once, and bytes of a transfer, which takes a third of a second then."""
BULK = 7000
RECEIVES = {"ingressRate": 8 * RATE, "ingressBurst": 8 * BURST}
SENDS = {"egressRate": 8 * RATE, "egressBurst": 8 * BURST}
LIMITS: Mapping[str, Mapping[str, int]] = {"a1": RECEIVES | SENDS, "a2": RECEIVES, "a4": SENDS, "b3": SENDS}
"""The limited pods."""
CLSACT = "tests.support.runtime.clsact_agent"


class Limited(Ptp):
    """A pod that cannot be created is tried again, as kubelet does."""

    programs = (*Ptp.programs, "bandwidth")

    def __init__(self) -> None:
        self.refusals: list[tuple[float, str]] = []
        """Seconds since the plugins were called, and the error."""

    def conf(self, node: Node) -> Conf:
        conf = super().conf(node)
        bandwidth = {"type": "bandwidth", "capabilities": {"bandwidth": True}}
        return {**conf, "plugins": [*conf["plugins"], bandwidth]}

    def add(self, node: Node, pod: Pod, runtime: Mapping[str, object]) -> None:
        limits = LIMITS.get(f"{' ab'[node.number]}{pod.index}", {})
        runtime = {"bandwidth": limits} if limits else {}

        def is_added() -> bool:
            began = time.monotonic()
            try:
                super(Limited, self).add(node, pod, runtime)
            except RuntimeError as error:
                self.refusals.append((time.monotonic() - began, str(error)))
                conf = self.conf(node)
                Sandbox(node.netns, pod.netns, runtime).call("DEL", conf, self.programs)
                # host-local would continue with the next address
                for path in node.folder.glob(f"ipam-{node.name}/*/last_reserved_ip.*"):
                    path.unlink()
                return False
            return True

        until(f"{pod.netns} is added", is_added, state=lambda: self.refusals[-1])


def serve(cluster: CniCluster, number: int) -> None:
    name = f"a{number}"
    cluster[name].ask("serve_bulk", ports=[BULK])
    cluster.create(*cluster.all_ways(10 + number, name, target=BULK))


@pytest.fixture(scope="module", params=["tcx", "clsact", "clsact-stack"])
def cluster(request, cni_programs: None) -> Iterator[CniCluster]:
    method, _, forwarding = request.param.partition("-")
    made = CniCluster(Limited(), "--forwarding", forwarding or "auto")
    if method == "clsact":
        made.module = CLSACT
    with made:
        for number in (1, 2, 3):
            serve(made, number)
        made.create(*made.all_ways(16, "a1"), *made.all_ways(17, "a3"))
        made.settle()
        yield made


def limiters(cluster: CniCluster) -> dict[str, int]:
    """The bytes that each tbf of node-1 has passed, by device."""
    rows = json.loads(run("tc", "-n", cluster.lab.nodes[0].netns, "-s", "-j", "qdisc", "show"))
    return {row["dev"]: row["bytes"] for row in rows if row["kind"] == "tbf"}


def check_limits(cluster: CniCluster, number: int, client: str, v6: bool) -> None:
    """A transfer to a pod of node-1 and back takes as long as the pod's limits demand."""
    limits = LIMITS.get(f"a{number}", {})
    host, port = split(at("NodePort" if client == "outside" else "ClusterIP", 10 + number, v6))
    before = limiters(cluster)
    family = "6" if v6 else "4"
    result = cluster[client].ask("bulk", host=host, port=port, size=SIZE, family=family)
    assert (result.get("there"), result.get("back")) == (True, True), result
    passed = [count - before[device] for device, count in limiters(cluster).items()]
    assert sum(count > SIZE for count in passed) == len(limits) // 2, passed
    for seconds, limit in zip(result["seconds"], ("ingressRate", "egressRate"), strict=True):
        assert limit not in limits or seconds >= (SIZE - BURST) / RATE * 0.9, result


@pytest.mark.parametrize("cluster", ["tcx", "clsact"], indirect=True)
@pytest.mark.parametrize(("client", "v6"), [("outside", False), ("b1", True), ("host-1", False)])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_limit_holds(cluster: CniCluster, number: int, client: str, v6: bool):
    check_limits(cluster, number, client, v6)


@pytest.mark.parametrize("cluster", ["tcx", "clsact"], indirect=True)
def test_pods_that_are_created_beside_a_limited_one(cluster: CniCluster):
    """Without TCX the plugin needs the place of kbpf's qdisc, for a moment or for good."""
    node, cni = cluster.lab.nodes[0], cluster.cni
    assert isinstance(cni, Limited)
    for number in (4, 5):
        pod = node.pod(f"a{number}").serve(8080)
        cluster.places[pod.name], cluster.home[pod.name] = pod, node
        serve(cluster, number)
        cluster.settle()
        check_limits(cluster, number, "outside", False)
    # kbpf leaves a new device alone for a while, in which plugins normally end
    assert [refusal for refusal in cni.refusals if refusal[0] < GRACE_S] == []


@pytest.mark.parametrize("cluster", ["tcx", "clsact"], indirect=True)
def test_the_first_limited_pod_of_a_node(cluster: CniCluster):
    """kbpf learns of the limits by it: without TCX it may be refused, but not for ever."""
    node = cluster.lab.nodes[1]
    node.pod(f"b{len(node.pods) + 1}")
    assert len(node.pods) == 3


@both_families
def test_what_a_limited_pod_sees(cluster: CniCluster, v6: bool):
    """Without TCX kbpf's programs have no place on its device, and the agent says so. Conntrack
    translates all the same.
    """
    is_clsact = cluster.module == CLSACT
    for number, name in ((6, "a1"), (7, "a3")):
        sees = "client" if is_clsact and name == "a1" and "stack" in cluster.arguments else "node"
        check(cluster, Row("outside", "NodePort", number, name, sees), "tcp", v6)

    def said() -> tuple[list[str], int]:
        status = cluster.agent.own_status()
        assert status is not None
        limits = [line for line in status["problems"] if "the place of kbpf's programs" in line]
        return status["packets"]["failed"], len(limits)

    until("its status says so", lambda: said() == ([], is_clsact), state=said)
