# SPDX-License-Identifier: Apache-2.0
"""Packets that a driver hands up at once, as network cards do with NAPI and GRO: all of them pass the packet programs
before conntrack sees the first. A veth pair with NAPI does so, too.
"""

import ctypes
import fcntl
import itertools
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kbpf.kernel.system import netns
from tests.lab.outside.netfilter import flush_conntrack, nft_table, objects
from tests.lab.outside.test_conntrack import (
    GUARD,
    Refused,
    counted,
    entries,
    exchange,
    mac_towards,
    send_frames,
    send_from_each_port,
)
from tests.support.features import needs
from tests.support.lab import sockets
from tests.support.lab.field import NODES4, NODES6, OUT4, OUT6, Field, at, both_families, split, there
from tests.support.lab.lab import PATIENCE, ip, on, run, until
from tests.support.packets import packets
from tests.support.packets.wire import Wire

pytestmark = needs("conntrack_nat")
SIOCETHTOOL = 0x8946
ETHTOOL_STSO, ETHTOOL_SGRO = 0x1F, 0x2C
_PORTS = itertools.count(52_000)
CLOSED = 9
POLL_NS = 50_000_000
UDP_REFUSED_AT_22 = "chain r { type filter hook prerouting priority raw; udp dport 30022 drop; }"


def set_feature(device: str, command: int, on: bool) -> None:
    value = ctypes.create_string_buffer(struct.pack("=II", command, on))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
        fcntl.ioctl(some, SIOCETHTOOL, struct.pack("=16sQ16x", device.encode(), ctypes.addressof(value)))


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    """eth0 of node-1 uses NAPI."""
    with Field("--forwarding", "netfilter", name="ba", agents=1) as made:
        there(made.lab.nodes[0], partial(set_feature, "eth0", ETHTOOL_SGRO, True))
        # a veth leaves packets that may become GSO ones to the sender's softirq
        peer = partial(set_feature, "n1", ETHTOOL_STSO, False)
        netns.run_in(Path("/run/netns") / made.lab.fabric, peer)
        made.create(*objects(made))
        made.settle()
        yield made


def new_ports() -> list[int]:
    """Of clients; a flow that is refused leaves keys behind."""
    return list(itertools.islice(_PORTS, 5))


@contextmanager
def batched(field: Field) -> Iterator[None]:
    """Once a packet has arrived, a timer alone polls the device."""
    _set_polling(field, 1 << 30, POLL_NS)
    try:
        expect_answer(field, NODES4[0])
        yield
    finally:
        _set_polling(field, 0, 0)


def _set_polling(field: Field, polls: int, timer: int) -> None:
    folder = "/sys/class/net/eth0"  # of the namespace
    write = f"echo {timer} > {folder}/gro_flush_timeout; echo {polls} > {folder}/napi_defer_hard_irqs"
    run("ip", "netns", "exec", field.lab.nodes[0].netns, "sh", "-c", write)


def expect_answer(field: Field, node: str) -> None:
    """Waits until the node has refused a connection: by then it has handled what came before."""
    with pytest.raises(ConnectionRefusedError):
        sockets.connect(field["outside"].netns, node, CLOSED, PATIENCE)


def test_a_port_is_used_again_just_behind_a_reset(field: Field):
    """The programs see the SYN before conntrack sees the RST. The client has to repeat it, but is not refused."""
    netns_, to = field["outside"].netns, split(at("NodePort", 11))
    with batched(field):
        for port in new_ports():
            first = sockets.connect(netns_, *to, PATIENCE, port)
            assert exchange(first) == "a1"
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with sockets.socket_in(netns_, socket.AF_INET) as second:
                second.settimeout(PATIENCE)
                first.close()
                second.bind(("", port))
                second.connect(to)
                assert exchange(second) == "a1"


@pytest.mark.parametrize("number", [11, 21])
@both_families
def test_a_refused_clients_error_does_not_reach_the_pod(field: Field, number: int, v6: bool):
    """About an answer that it never got, just ahead of its request: for conntrack it belongs to the request."""
    node, pod, to = field.lab.nodes[0], field["a1"], at("NodePort", number, v6)
    own, client = (NODES6[0], OUT6) if v6 else (NODES4[0], OUT4)
    mac = there(node, partial(mac_towards, client))
    build, ask = partial(packets.tcp, flags="A"), partial(packets.tcp, flags="S")
    if number > 20:
        build = ask = partial(packets.udp, payload=bytes(99))
    ports = new_ports()
    with nft_table(node, "inet guard", GUARD), batched(field), Wire(pod.netns, "eth0", tap=True) as wire:
        for end in (packets.end(client, port) for port in ports):
            error = packets.icmp_error("too big", client, build(to, end), mtu=1280 if v6 else 600)
            there(field["outside"], partial(send_frames, [error, ask(end, to)], own, mac))
        until("all requests are refused", lambda: sum(counted(node, "drop")) >= len(ports))
        wire.none(0, lambda packet: packet.source == client)


@pytest.mark.parametrize("data", ["ahead of the SYN", "later"])
@both_families
def test_segments_of_a_refused_client_do_not_reach_the_pod(field: Field, data: str, v6: bool):
    """The client's ACK and a forged one of the pod, just ahead of the SYN, make its entry ESTABLISHED and answered."""
    refused, pod = Refused.of(field, 11, v6), field["a1"]
    own, client = (NODES6[0], OUT6) if v6 else (NODES4[0], OUT4)
    with nft_table(field.lab.nodes[0], "inet guard", GUARD), batched(field), Wire(pod.netns, "eth0", tap=True) as wire:
        for port in new_ports():
            ends = packets.end(client, port), refused.ends.frontend
            ack = packets.tcp(*ends, seq=1001, ack=5001)
            forged = packets.tcp(refused.ends.backend, packets.end(own, port), seq=5001, ack=1001)
            secret = packets.tcp(*ends, b"secret", seq=1001, ack=5001)
            syn = packets.tcp(*ends, flags="S", seq=1000)
            refused.send(ack, forged, *([secret, syn] if data != "later" else [syn, secret]))
            refused.send(secret)
        expect_answer(field, own)
        # the node itself refuses the forged segment by an RST
        wire.none(0, lambda packet: packet.protocol == "tcp" and packet.flags != "R")


@pytest.mark.parametrize("others", [False, True], ids=["at once", "its flow is settled"])
@pytest.mark.parametrize("again", [False, True], ids=["", "it begins again"])
def test_a_packet_that_waits_for_a_mac_address_is_judged_by_its_own_entry(field: Field, again: bool, others: bool):
    """It is one of an established connection for the rules. That entry goes meanwhile, and another one is written."""
    node, outside, pod, refused = field.lab.nodes[0], field["outside"], field["a1"], Refused.of(field, 21, False)
    device = json.loads(on(node, "ip", "-j", "route", "get", pod.ip))[0]["dev"]
    mac = json.loads(there(pod, partial(run, "ip", "-j", "link", "show", "eth0")))[0]["address"]
    ports, to = new_ports(), refused.ends.frontend
    asks = [packets.udp(packets.end(OUT4, port), to, b"x") for port in ports]
    there(node, flush_conntrack)
    on(node, "sysctl", "-qw", f"net.ipv4.neigh.{device}.mcast_solicit=240")  # requests, one a second
    on(node, "sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout_stream=3600")
    with nft_table(node, "inet guard", GUARD + UDP_REFUSED_AT_22), Wire(pod.netns, "eth0", tap=True) as wire:
        ip("link set eth0 arp off", netns=pod.netns)
        try:
            ip(f"neigh replace {pod.ip} dev {device} nud failed", netns=node.netns)
            with batched(field):
                for number, (port, ask) in enumerate(zip(ports, asks, strict=True), 1):
                    forged = packets.udp(refused.ends.backend, packets.end(NODES4[0], port), b"forged")
                    refused.send(forged, ask)
                    until("its entry is there", lambda n=number: len(entries(field, to)) >= n)
            if others:
                flood = partial(send_from_each_port, 20_000, split(at("NodePort", 22)))
                until("their entries are gone", lambda: there(outside, flood) or not entries(field, to))
            if again:
                refused.send(*asks)
            expect_answer(field, NODES4[0])
            ip(f"neigh replace {pod.ip} lladdr {mac} dev {device} nud permanent", netns=node.netns)
            wire.none(0.5, lambda packet: packet.protocol == "udp")
        finally:
            ip("link set eth0 arp on", netns=pod.netns)
            ip(f"neigh del {pod.ip} dev {device}", netns=node.netns)
