# SPDX-License-Identifier: Apache-2.0
"""Packets that enter a bridge are translated at its port, before br_netfilter sees them, and not
again at the bridge.
"""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.inspect import attached
from kbpf.dataplane.bpf.maps.layout import NodeFlag, Reason
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.kernel.system import netns
from tests.programs.packets.path.single_packets import (
    CHAINED,
    CLIENT,
    CLUSTER,
    LOCAL,
    Path_,
    client,
    end,
    host_of,
    parsed,
    pod,
    raw_socket,
    vip,
)
from tests.support.features import needs
from tests.support.lab.lab import ip, until
from tests.support.lab.lab import run as command
from tests.support.packets.packets import frame, tcp, udp

pytestmark = needs("br_netfilter")
BRIDGE_MAC, OTHER_MAC = "02:00:00:00:00:09", "02:00:00:00:00:0a"


@dataclass
class Wire:
    """`sender`: behind a port of the bridge `br9`. `bridge`: sees what reaches the bridge, before
    its program does.
    """

    path: Path_
    sender: socket.socket
    bridge: socket.socket

    def send(self, packet: bytes, to: str = BRIDGE_MAC) -> None:
        self.sender.send(frame(packet, to=to))


def receive(at: socket.socket, data: bytes) -> bytes:
    """The packet that contains the data."""
    while data not in (got := at.recv(2048)):
        pass
    return got[14:]


@pytest.fixture
def wire(uplink: Path_, br_netfilter: None) -> Iterator[Wire]:
    """The device thread of the fixture's data plane attaches the programs."""
    pods = f"{uplink.where}p"
    command("ip", "netns", "add", pods)
    ip(
        f"link add br9 address {BRIDGE_MAC} type bridge",
        f"link add port9 type veth peer name far9 netns {pods}",
        f"link add port8 type veth peer name far8 netns {pods}",
        *(f"link set {name} master br9 up" for name in ("port9", "port8")),
        "link set br9 up",
        netns=uplink.where,
    )
    ip("link set far9 up", "link set far8 up", netns=pods)
    for host in CLIENT.values():
        ip(f"route add {host} dev br9", netns=uplink.where)
    sockets = [
        netns.run_in(Path("/run/netns") / pods, lambda: raw_socket("far9")),
        uplink.inside(lambda: raw_socket("br9")),
    ]
    try:
        until("the bridge and its ports have programs", lambda: has_programs(uplink))
        yield Wire(uplink, *sockets)
    finally:
        for opened in sockets:
            opened.close()
        ip(*(f"link del {name}" for name in ("br9", "port9", "port8")), netns=uplink.where)
        command("ip", "netns", "del", pods)


def has_programs(path: Path_) -> bool:
    listing = path.inside(lambda: attached.read_devices(Pins(path.site.pins), 0, None))
    found = {device.name: (bool(device.ingress), bool(device.egress)) for device in listing}
    return [found[name] for name in ("br9", "port9", "port8")] == [(True, True)] + [(True, False)] * 2


def test_packet_of_a_flow_that_bypasses_the_stack_is_left_to_the_bridge(wire: Wire, v: int):
    """So that the rules of the bridge see it, and the bridge learns its sender's MAC address."""
    wire.path.node(NodeFlag.DIRECT)
    own = client(v)
    for _ in range(2):  # of a new flow, and of a known one
        data = os.urandom(32)
        with wire.path.inside(lambda: raw_socket("gate")) as gate:
            wire.send(udp(own, vip(v, CLUSTER), data))
            got = parsed(receive(wire.bridge, data))
            assert (got.source, got.destination) == (own, vip(v, CLUSTER))
            assert parsed(receive(gate, data)).destination == pod(v)


def test_frame_to_another_machine_is_left_alone(wire: Wire, v: int):
    before, data = wire.path.site.reasons(), os.urandom(32)
    wire.send(udp(client(v), vip(v, LOCAL)), to=OTHER_MAC)
    wire.send(tcp(client(v), pod(v), data, flags="S"))  # follows the first one
    receive(wire.bridge, data)
    assert wire.path.site.reasons() - before == {Reason.NOT_A_SERVICE: 1}


def test_packet_is_translated_at_the_port_and_counted_once(wire: Wire, v: int):
    before, data, own = wire.path.site.reasons(), os.urandom(32), client(v)
    wire.send(tcp(client(v), end(host_of(pod(v)), 9), data, flags="S"))
    receive(wire.bridge, data)
    wire.send(udp(own, vip(v, LOCAL), data := os.urandom(32)))  # follows the first one
    got = parsed(receive(wire.bridge, data))
    assert (got.source, got.destination) == (own, pod(v))
    counted = wire.path.site.reasons() - before
    assert counted == {Reason.NOT_A_SERVICE: 1, Reason.NEW_FLOW: 1}


def test_backend_that_is_a_frontend_is_not_translated_at_the_bridge(wire: Wire, v: int):
    before, own = wire.path.site.reasons(), client(v)
    for _ in range(2):
        data = os.urandom(32)
        wire.send(udp(own, vip(v, CHAINED), data))
        got = parsed(receive(wire.bridge, data))
        assert (got.source, got.destination) == (own, vip(v, LOCAL))
    assert wire.path.site.reasons() - before == {Reason.NEW_FLOW: 1}
