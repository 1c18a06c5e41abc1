# SPDX-License-Identifier: Apache-2.0
"""Packets that a driver hands up at once, as network cards do with NAPI and GRO: all of them pass the packet programs
before conntrack sees the first. A veth pair does so if its NAPI has a thread, which is kept waiting here.
"""

import ctypes
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from kbpf.kernel.system import netns
from tests.lab.outside.netfilter import flush_conntrack, nft_table, objects
from tests.lab.outside.test_conntrack import GUARD, Refused, counted, entries, exchange, mac_towards, send_frames
from tests.support.features import needs
from tests.support.lab import sockets
from tests.support.lab.field import NODES4, NODES6, OUT4, OUT6, Field, at, both_families, split, there
from tests.support.lab.lab import PATIENCE, ip, on, run, until
from tests.support.packets import packets
from tests.support.packets.wire import Wire

pytestmark = needs("conntrack_nat")
SIOCETHTOOL = 0x8946
ETHTOOL_STSO, ETHTOOL_SGRO = 0x1F, 0x2C
PORTS = range(52_000, 52_005)


def set_feature(device: str, command: int, on: bool) -> None:
    value = ctypes.create_string_buffer(struct.pack("=II", command, on))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
        fcntl.ioctl(some, SIOCETHTOOL, struct.pack("=16sQ16x", device.encode(), ctypes.addressof(value)))


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    """A thread that runs only while its CPU is idle polls eth0 of node-1."""
    with Field("--forwarding", "netfilter", name="ba", agents=1) as made:
        node = made.lab.nodes[0]
        there(node, partial(set_feature, "eth0", ETHTOOL_SGRO, True))
        # a veth leaves packets that may become GSO ones to the sender's softirq
        peer = partial(set_feature, "n1", ETHTOOL_STSO, False)
        netns.run_in(Path("/run/netns") / made.lab.fabric, peer)
        before = _polling_threads()
        # with the sysfs of the namespace
        run("ip", "netns", "exec", node.netns, "sh", "-c", "echo 1 > /sys/class/net/eth0/threaded")
        for pid in _polling_threads() - before:
            os.sched_setaffinity(pid, {1})
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        made.create(*objects(made))
        made.settle()
        yield made


def _polling_threads() -> set[int]:
    listed = run("ps", "-eo", "pid,comm").splitlines()
    return {int(line.split()[0]) for line in listed if " napi/eth0" in line}


@contextmanager
def busy() -> Iterator[None]:
    """CPU 1 has no time for the thread, except now and then; this thread uses CPU 0."""
    child = os.fork()
    if not child:
        os.sched_setaffinity(0, {1})
        while True:
            pass
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_port_is_used_again_just_behind_a_reset(field: Field):
    """The programs see the SYN before conntrack sees the RST. The client has to repeat it, but is not refused."""
    netns_, to = field["outside"].netns, split(at("NodePort", 11))
    with busy():
        for port in PORTS:
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
    with nft_table(node, "inet guard", GUARD), busy(), Wire(pod.netns, "eth0", tap=True) as wire:
        for end in (packets.end(client, port) for port in PORTS):
            error = packets.icmp_error("too big", client, build(to, end), mtu=1280 if v6 else 600)
            there(field["outside"], partial(send_frames, [error, ask(end, to)], own, mac))
        until("all requests are refused", lambda: sum(counted(node, "drop")) >= len(PORTS))
        wire.none(0, lambda packet: packet.source == client)


def test_segments_of_a_refused_client_do_not_reach_the_pod(field: Field):
    """The client's ACK and a forged one of the pod, just ahead of the SYN, make its entry ESTABLISHED and answered."""
    refused, pod = Refused.of(field, 11, False), field["a1"]
    with nft_table(field.lab.nodes[0], "inet guard", GUARD), busy(), Wire(pod.netns, "eth0", tap=True) as wire:
        for end in PORTS:
            client, seen = packets.end(OUT4, end), packets.end(NODES4[0], end)
            refused.send(
                packets.tcp(client, refused.ends.frontend, seq=1001, ack=5001),
                packets.tcp(refused.ends.backend, seen, seq=5001, ack=1001),
                packets.tcp(client, refused.ends.frontend, flags="S", seq=1000),
            )
        before = field.agent.reasons()[Reason.INVALID]
        for end in PORTS:
            refused.send(packets.tcp(packets.end(OUT4, end), refused.ends.frontend, b"secret", seq=1001, ack=5001))
        until("they are dropped", lambda: field.agent.reasons()[Reason.INVALID] >= before + len(PORTS))
        wire.none(0, lambda packet: packet.source in (OUT4, NODES4[0]))


def test_a_packet_that_waits_for_a_mac_address_is_not_judged_by_a_later_entry(field: Field):
    """Meanwhile another packet of the client begins the flow again, with an entry without an answer."""
    node, pod, refused = field.lab.nodes[0], field["a1"], Refused.of(field, 21, False)
    device = json.loads(on(node, "ip", "-j", "route", "get", pod.ip))[0]["dev"]
    mac = json.loads(there(pod, partial(run, "ip", "-j", "link", "show", "eth0")))[0]["address"]
    there(node, flush_conntrack)
    with nft_table(node, "inet guard", GUARD), busy(), Wire(pod.netns, "eth0", tap=True) as wire:
        ip("link set eth0 arp off", netns=pod.netns)
        try:
            ip(f"neigh replace {pod.ip} dev {device} nud failed", netns=node.netns)
            for number, end in enumerate(PORTS, 1):
                seen = packets.end(NODES4[0], end)
                ask = packets.udp(packets.end(OUT4, end), refused.ends.frontend, b"x")
                refused.send(packets.udp(refused.ends.backend, seen, b"forged"), ask, ask)
                until("its entry is there", lambda number=number: len(entries(field, refused.ends.frontend)) >= number)
                refused.send(ask)
            ip(f"neigh replace {pod.ip} lladdr {mac} dev {device} nud permanent", netns=node.netns)
            wire.none(0.5, lambda packet: packet.protocol == "udp")
        finally:
            ip("link set eth0 arp on", netns=pod.netns)
            ip(f"neigh del {pod.ip} dev {device}", netns=node.netns)
