# SPDX-License-Identifier: Apache-2.0
"""Packets that a driver hands up at once, as network cards do with NAPI and GRO: all of them pass the packet programs
before conntrack sees the first. A veth pair does so if its NAPI has a thread, which is kept waiting here.
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kbpf.kernel.system import netns
from tests.lab.outside.netfilter import objects
from tests.lab.outside.test_conntrack import exchange
from tests.support.features import needs
from tests.support.lab import sockets
from tests.support.lab.field import Field, at, split, there
from tests.support.lab.lab import PATIENCE, run

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
    """A thread of its own, which runs when nothing else does on its CPU, polls eth0 of node-1."""
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
