"""Where maps count against RLIMIT_MEMLOCK (before Linux 5.11): what the DaemonSet grants is enough
for all of kbpf, and what happens with less.

The container is runc's, made of manifests/base (the chart's is the same: test_manifests.py), but
that its objects are files: an API server would take minutes under emulation.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import yaml

from tests.support.daemonset import ROOT, PodAgent
from tests.support.features import without
from tests.support.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.lab import Lab, Place
from tests.support.pods import capabilities_here
from tests.support.scenario import file_of, put

pytestmark = without("memory_by_cgroup")

KERNELS_OWN = 64 << 10
"""Bytes that these kernels let a process lock, where nobody says otherwise."""
ALL = "BPF NET_ADMIN PERFMON SYS_ADMIN SYS_RESOURCE"


class Row(NamedTuple):
    """What the container is granted, the limit that it is started with, and what its only error
    says, "" if it serves. `seccomp`: the default profile, which lets only SYS_ADMIN call bpf(2).
    """

    name: str
    granted: str
    limit: int
    seccomp: bool
    said: str


WANTED = "grant CAP_SYS_RESOURCE"
ROWS = [
    Row("as in manifests/", ALL, KERNELS_OWN, True, ""),
    Row("without SYS_ADMIN", ALL.replace(" SYS_ADMIN", ""), KERNELS_OWN, False, ""),
    Row("without SYS_RESOURCE", ALL.replace(" SYS_RESOURCE", ""), KERNELS_OWN, True, WANTED),
    Row("with neither", "BPF NET_ADMIN PERFMON", KERNELS_OWN, False, WANTED),
    Row("without SYS_RESOURCE, by a runtime that sets no limit", ALL.replace(" SYS_RESOURCE", ""),
        resource.RLIM_INFINITY, True, ""),
]  # fmt: skip


class House:
    """A node with two pods, a client outside, and a Service in a folder."""

    def __init__(self, lab: Lab) -> None:
        self.node = lab.nodes[0]
        self.agent = PodAgent(self.node)
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

    def launch(self, row: Row) -> None:
        """The DaemonSet's container, on a node that kbpf has never run on."""
        self.agent.remove_pins()
        made = yaml.safe_load((ROOT / "manifests/base/daemonset.yaml").read_text())
        template = made["spec"]["template"]
        (container,) = template["spec"]["containers"]
        rights = container["securityContext"]
        assert set(rights["capabilities"]["add"]) == set(ALL.split())
        rights["capabilities"]["add"] = row.granted.split()
        if not row.seccomp:
            rights["seccompProfile"] = {"type": "Unconfined"}
        given = ("--source=/var/lib/kube-proxy", "--mode=bpf")
        container["command"] = [word for word in container["command"] if "--config" not in word]
        container["command"] += given
        with locked(row.limit):
            self.agent.launch(template, {"config": self.objects}, None)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with Lab(1, "lm", apart=True) as lab:
        yield House(lab)


@contextmanager
def locked(limit: int) -> Iterator[None]:
    """What is started meanwhile may lock so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_it_needs(house: House, row: Row) -> None:
    agent, outside = house.agent, Place("outside", house.node.lab.outside, None)
    assert capabilities_here(row.granted.split()) == set(row.granted.split())
    house.launch(row)
    try:
        if row.said:
            assert agent.wait_ended() == 1
            (said,) = (line for line in agent.lines() if " INFO " not in line)
            assert "cannot create the map" in said
            assert row.said in said
            assert f"which is {row.limit} bytes" in said
            return
        agent.wait_synced()
        status = agent.status()
        assert status is not None
        assert (status["error"], status["packets"]["problem"]) == ("", ""), agent.tail()
        for place, to in ((outside, (house.node.ip, 30080)), (house.client, ("10.96.0.80", 80))):
            assert place.tcp(*to).get("name") == "a1", place.name
        assert agent.stop() == 0
    finally:
        agent.forget()
        outside.close()
