# SPDX-License-Identifier: Apache-2.0
"""Fixtures of single packets: the programs, loaded once for all files of this folder."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.maps.layout import (
    NETWORK_KEY,
    U32,
    NodeFlag,
    Role,
)
from kbpf.model.address import parse_addr
from tests.programs.packets.path.single_packets import (
    GATE,
    HIGH,
    LOW,
    MTU,
    NEAR,
    NODE,
    Path_,
    all_services,
    masquerading,
    serving_node,
)
from tests.support.lab.lab import ip, until
from tests.support.plane import SIZES, desired


@pytest.fixture(params=[4, 6], ids=["v4", "v6"])
def v(request) -> int:
    """Tests that take it run with IPv4 and with IPv6."""
    return int(request.param)


@pytest.fixture(scope="session")
def path(artifact_cache: Path) -> Iterator[Path_]:
    state = masquerading(desired(*all_services()))
    sizes = replace(SIZES, connections=8192)
    with serving_node(artifact_cache, "k", state, sizes=sizes, masquerade_ports=(LOW, HIGH)) as made:
        with made.site.pinned("local_networks") as networks:
            networks.update(NETWORK_KEY.pack(96 + 16, parse_addr(NEAR[4])), U32.pack(1))
            networks.update(NETWORK_KEY.pack(64, parse_addr(NEAR[6])), U32.pack(1))
        yield made


@pytest.fixture(scope="module", autouse=True)
def _no_flows(path: Path_) -> None:
    """Flows of other files have no ports."""
    path.site.clear("flows")


@pytest.fixture(autouse=True)
def _outside(path: Path_) -> Iterator[None]:
    path.set_loopback_role(Role.HOST)
    path.node(NodeFlag(0))
    with path.site.telling():
        yield


def is_known(path: Path_, index: int) -> bool:
    """Whether the data plane's thread has seen the device with its last address. From then on it
    does not overwrite what a test writes.
    """
    raw = path.site.entries("devices").get(U32.pack(index), b"")
    return parse_addr(NODE[4]) in raw and parse_addr(NODE[6]) in raw


@pytest.fixture(scope="module")
def uplink(path: Path_) -> Iterator[Path_]:
    """Adds a device with addresses of the node and the default routes."""
    ip(
        "link add out address 02:00:00:00:00:01 type veth peer name gate",
        f"link set out mtu {MTU} up",
        "link set gate up",
        netns=path.where,
    )
    for v, bits in ((4, 24), (6, 64)):
        there = f"neigh add {GATE[v]} lladdr 02:00:00:00:00:02 dev out nud permanent"
        address = f"addr add {NODE[v]}/{bits} dev out" + (" nodad" if v == 6 else "")
        ip(address, there, f"route add default via {GATE[v]} dev out", netns=path.where)
    path.forward(True)
    index = path.inside(lambda: socket.if_nametoindex("out"))
    until("the device thread has written its own entry", lambda: is_known(path, index))
    path.set_device(index, Role.HOST)
    path.out, path.macs = index, path.macs | {index: "02:00:00:00:00:01"}
    yield path
    path.forward(False)
    path.delete_device("out", index)
