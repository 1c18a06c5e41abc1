# SPDX-License-Identifier: Apache-2.0
"""What TCX programs of other tools see of a connection from outside, behind kbpf's programs and
beside the real kube-proxy. Netfilter translates behind ingress and before egress, kbpf at both.
"""

import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_HASH
from tests.programs.packets.tc.net import NEXT, PAIR, recording
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.features import needs
from tests.support.lab.field import OUT4, there
from tests.support.lab.lab import Agent, Lab, Node, Place, until
from tests.support.lab.podnet import gate

pytestmark = [needs("tcx"), needs("conntrack_nat")]

PROXIES = ("kube-proxy", "stack", "netfilter")
"""Of node-1, node-2 and node-3: kube-proxy, and kbpf with this value of `--forwarding`."""
POLICIES = {"Cluster": 1, "Local": 2}
"""External traffic policy → the number of the pod on each node that such a Service has."""

UPLINK_IN, UPLINK_OUT, FROM_POD, TO_POD = (
    ("eth0", Direction.INGRESS),
    ("eth0", Direction.EGRESS),
    ("p", Direction.INGRESS),
    ("p", Direction.EGRESS),
)
KUBE_PROXY = {
    "Cluster": {
        UPLINK_IN: "client > node:NodePort",
        TO_POD: "node > pod:8080",
        FROM_POD: "pod:8080 > node",
        UPLINK_OUT: "node:NodePort > client",
    },
    "Local": {
        UPLINK_IN: "client > node:NodePort",
        TO_POD: "client > pod:8080",
        FROM_POD: "pod:8080 > client",
        UPLINK_OUT: "node:NodePort > client",
    },
}
STACK = {UPLINK_IN: "client > pod:8080", FROM_POD: "pod:8080 > client"}
"""Where kbpf differs with `--forwarding stack`."""


def node_port(policy: str, home: Node) -> int:
    return 30000 + 100 * POLICIES[policy] + home.number


class Recorder:
    """Programs at all hooks of a node, behind the others."""

    def __init__(self, home: Node, stack: contextlib.ExitStack) -> None:
        self.home = home
        self._seen: dict[tuple[str, Direction], Map] = {}
        for device, direction in product(("eth0", "p1", "p2"), Direction):
            seen = stack.enter_context(Map.create(BPF_MAP_TYPE_HASH, "seen", PAIR.size, 4, 1024))
            program = stack.enter_context(recording("recorder", seen, NEXT))
            attach = partial(self._attach, program, device, direction)
            stack.enter_context(there(home.host, attach))
            self._seen[device, direction] = seen

    @staticmethod
    def _attach(program: Program, device: str, direction: Direction) -> Link:
        return Link.attach(program, socket.if_nametoindex(device), ATTACH_TYPE[direction])

    def read(self, policy: str) -> dict[tuple[str, Direction], str]:
        """What the programs have seen of connections to the pod of this policy."""
        rows = {}
        for (device, direction), seen in self._seen.items():
            pairs = {self._describe(key, policy) for key, _ in seen.items()} - {""}
            if device in ("eth0", f"p{POLICIES[policy]}"):
                rows[device.rstrip("12"), direction] = ", ".join(sorted(pairs))
        return rows

    def _describe(self, key: bytes, policy: str) -> str:
        source, target, source_port, target_port = PAIR.unpack(key)
        names = {
            OUT4: "client",
            self.home.ip: "node",
            gate(self.home.number, False): "node",
            self.home.pods[POLICIES[policy] - 1].ip: "pod",
        }
        ports = {node_port(policy, self.home): ":NodePort", 8080: ":8080"}
        ends = [
            (names.get(socket.inet_ntoa(address), ""), ports.get(int.from_bytes(number, "big"), ""))
            for address, number in ((source, source_port), (target, target_port))
        ]
        if not all(name for name, _ in ends) or not any(suffix for _, suffix in ends):
            return ""
        return " > ".join(name + suffix for name, suffix in ends)


@pytest.fixture(scope="module")
def site(programs: None, kube_proxy: Path) -> Iterator[tuple[Place, list[Recorder]]]:
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(len(PROXIES), "oo", apart=True))
        api = stack.enter_context(ApiServer(address=lab.outside_ip, netns=lab.outside))
        kube = stack.enter_context(api.kube())
        config = api.kubeconfig(lab.folder / "kubeconfig", "kbpf")
        for each in lab.nodes:
            kube.create(node(each.name, each.ip, each.ip6))
            for policy in POLICIES:
                pod = each.pod(f"{policy.lower()}{each.number}").serve(8080)
                http = port(80, node_port=node_port(policy, each))
                kube.create(service(pod.name, http, type="NodePort", external_policy=policy))
                ready = endpoint(pod.ip, node=each.name)
                kube.create(endpoint_slice(pod.name, ready, ports=[slice_port(8080)]))
        for each, proxy in zip(lab.nodes, PROXIES, strict=True):
            if proxy == "kube-proxy":
                networks = ("--cluster-cidr", "10.244.0.0/16")
                stack.enter_context(KubeProxy(each, "nftables", config, *networks))
            else:
                arguments = ("--packet-path", "true", "--forwarding", proxy)
                Agent(each, "--kubeconfig", str(config), *arguments).start()
        client = Place("outside", lab.outside, None)
        stack.callback(client.close)
        for each, policy in product(lab.nodes, POLICIES):
            at = (each.ip, node_port(policy, each))
            until(f"{at} is served", lambda at=at: "name" in client.tcp(*at))
        yield client, [Recorder(each, stack) for each in lab.nodes]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("proxy", PROXIES)
def test_programs_of_others_see(site: tuple[Place, list[Recorder]], proxy: str, policy: str):
    client, recorders = site
    recorder = recorders[PROXIES.index(proxy)]
    assert "name" in client.tcp(recorder.home.ip, node_port(policy, recorder.home))
    expected = KUBE_PROXY[policy] | (STACK if proxy == "stack" else {})
    assert recorder.read(policy) == expected
