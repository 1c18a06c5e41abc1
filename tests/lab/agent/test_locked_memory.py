# SPDX-License-Identifier: Apache-2.0
"""Kernels on which maps count against RLIMIT_MEMLOCK (before Linux 5.11): the DaemonSet grants
enough for all of kbpf, and the error says what to grant when there is less.

runc runs the container of manifests/base (the chart's is equal: test_manifests.py). Only its source
differs, a folder: an API server would take minutes under emulation.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from tests.support.features import without
from tests.support.lab.lab import Lab, Place
from tests.support.runtime.folder_pod import FolderPod
from tests.support.runtime.pods import capabilities_here
from tests.support.table import table

pytestmark = without("memory_by_cgroup")

ALL = "BPF NET_ADMIN PERFMON SYS_ADMIN SYS_RESOURCE"


class Row(NamedTuple):
    """The container's capabilities, its RLIMIT_MEMLOCK in bytes, and the text of its only error, ""
    if it serves. `seccomp`: with the default profile, which allows bpf(2) with SYS_ADMIN only.
    """

    name: str
    granted: str
    limit: int
    seccomp: bool
    said: str = ""


ROWS = table(
    Row,
    """
as in manifests/               | BPF NET_ADMIN PERFMON SYS_ADMIN SYS_RESOURCE | 65536 | yes
without SYS_ADMIN              | BPF NET_ADMIN PERFMON SYS_RESOURCE           | 65536 | no
without SYS_RESOURCE           | BPF NET_ADMIN PERFMON SYS_ADMIN              | 65536 | yes | grant CAP_SYS_RESOURCE
with neither                   | BPF NET_ADMIN PERFMON                        | 65536 | no  | grant CAP_SYS_RESOURCE
without SYS_RESOURCE, no limit     | BPF NET_ADMIN PERFMON SYS_ADMIN              | -1    | yes
""",
)
"""The default RLIMIT_MEMLOCK of these kernels, and a runtime that sets none (resource.RLIM_INFINITY)."""


def launch(house: FolderPod, row: Row) -> None:
    """Starts the DaemonSet's container, on a node without pins."""
    house.agent.remove_pins()
    template = house.template()
    (container,) = template["spec"]["containers"]
    rights = container["securityContext"]
    assert set(rights["capabilities"]["add"]) == set(ALL.split())
    rights["capabilities"]["add"] = row.granted.split()
    if not row.seccomp:
        rights["seccompProfile"] = {"type": "Unconfined"}
    with locked(row.limit):
        house.launch(template)


@pytest.fixture(scope="module")
def house() -> Iterator[FolderPod]:
    with Lab(1, "lm", apart=True) as lab:
        yield FolderPod(lab)


@contextmanager
def locked(limit: int) -> Iterator[None]:
    """Processes started in this block may lock this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_privileges_that_locked_memory_needs(house: FolderPod, row: Row):
    agent, outside = house.agent, Place("outside", house.node.lab.outside, None)
    assert capabilities_here(row.granted.split()) == set(row.granted.split())
    launch(house, row)
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
