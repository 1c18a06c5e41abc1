# SPDX-License-Identifier: Apache-2.0
"""Fixtures of single packets: the programs, loaded once for all files of this folder."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kbpf.dataplane.bpf.maps.layout import (
    CACHED_DEVICE,
    NETWORK_KEY,
    U32,
    DeviceFlag,
    NodeFlag,
    Role,
)
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.system import netns, sysctl
from kbpf.model.address import parse_addr
from tests.programs.packets.path.single_packets import (
    GATE,
    HIGH,
    LOW,
    MTU,
    NEAR,
    NODE,
    Path_,
    services,
)
from tests.support.lab.lab import ip, until
from tests.support.lab.lab import run as command
from tests.support.plane import SIZES, desired, sites


@pytest.fixture(params=[4, 6], ids=["v4", "v6"])
def v(request: pytest.FixtureRequest) -> int:
    """Tests that take it run with IPv4 and with IPv6."""
    return int(request.param)


@pytest.fixture(scope="module")
def path(artifact_cache: Path) -> Iterator[Path_]:
    where = f"kbpk{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        ip("link set lo up", netns=where)
        for name in (
            "net.ipv4.icmp_ratelimit",
            "net.ipv6.icmp.ratelimit",
        ):  # all tests are one client
            netns.run_in(Path("/run/netns") / where, lambda: sysctl.write(name, "0"))  # noqa: B023
        with sites(artifact_cache) as make:
            site = make(node=where)
            sizes = replace(SIZES, connections=8192)
            plane = site.open(sizes, packet_path=True, masquerade_ports=(LOW, HIGH))
            addresses = tuple(parse_addr(NODE[v]) for v in (4, 6))
            state = msgspec.structs.replace(desired(*services()), masquerade_addresses=addresses)
            netns.run_in(Path("/run/netns") / where, lambda: plane.apply(state, None))
            folder = next(site.pins.glob("programs-tc-*"))
            names = ("tc_ingress", "tc_egress")
            made = Path_(site, {name: Program.open(folder / name) for name in names}, where)
            with site.pinned("local_networks") as networks:
                networks.update(NETWORK_KEY.pack(96 + 16, parse_addr(NEAR[4])), U32.pack(1))
                networks.update(NETWORK_KEY.pack(64, parse_addr(NEAR[6])), U32.pack(1))
            yield made
            for program in made.programs.values():
                program.close()
    finally:
        command("ip", "netns", "del", where)


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
    path.set_device(index, Role.HOST, DeviceFlag(0))
    path.out, path.macs = index, path.macs | {index: "02:00:00:00:00:01"}
    yield path
    path.forward(False)
    with path.site.pinned("devices") as devices:
        devices.delete(U32.pack(index))
    path.cache(index, bytes(CACHED_DEVICE.size))
    ip("link del out", netns=path.where)
