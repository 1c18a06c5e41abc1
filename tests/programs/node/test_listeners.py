# SPDX-License-Identifier: Apache-2.0
"""Listening sockets of this network namespace, read through sock_diag, and the addresses at which
they may serve a ClusterIP.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kbpf.dataplane.node import read_node_addresses
from kbpf.kernel.net import sock_diag
from kbpf.kernel.net.addresses import watch_addresses
from kbpf.model.address import format_addr, parse_addr
from kbpf.model.config import IPVS_DEVICE
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol
from tests.support.lab.lab import settled, until
from tests.support.lab.namespace import Namespace
from tests.support.table import each_cells, table


class Row(NamedTuple):
    """A socket bound to a free port, and the addresses that are listed."""

    what: str
    protocol: Protocol
    bind: str
    told: str
    then: str = ""
    v6_only: bool = False


ROWS = table(
    Row,
    """
TCP                  | TCP | 127.0.0.1 | 127.0.0.1  | listen
TCP everywhere       | TCP | 0.0.0.0   | 0.0.0.0    | listen
TCP IPv6             | TCP | ::1       | ::1        | listen
TCP of both families | TCP | ::        | :: 0.0.0.0 | listen
TCP of IPv6 only     | TCP | ::        | ::         | listen | yes
UDP of both families | UDP | ::        | :: 0.0.0.0
UDP of IPv6 only     | UDP | ::        | ::         |        | yes
TCP, only bound      | TCP | 127.0.0.1 |
UDP                  | UDP | 127.0.0.1 | 127.0.0.1
UDP with a peer      | UDP | 127.0.0.1 |            | connect
""",
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_listening_socket_is_listed(namespace: Namespace, row: Row):
    namespace.ip("link set lo up")
    namespace.do(lambda: check_listing(row))


def check_listing(row: Row) -> None:
    family = socket.AF_INET6 if ":" in row.bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if row.protocol is Protocol.TCP else socket.SOCK_DGRAM) as sock:
        if ":" in row.bind:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, row.v6_only)
        sock.bind((row.bind, 0))
        if row.then == "listen":
            sock.listen()
        elif row.then == "connect":
            sock.connect(("127.0.0.1", 9))
        port, protocol = sock.getsockname()[1], row.protocol
        found = {at for at in sock_diag.list_listeners() if (at.port, at.protocol) == (port, protocol)}
        at_port = sock_diag.list_listeners([(protocol, port), (Protocol.SCTP, port)])
        assert at_port == found, "if only this port is read"
        assert at_port.isdisjoint(sock_diag.list_listeners([(protocol, port ^ 1)]))
        assert found == {FrontendAddress(parse_addr(one), port, protocol) for one in row.told.split()}
    assert all((at.port, at.protocol) != (port, protocol) for at in sock_diag.list_listeners())


def test_addresses_on_devices_of_service_proxies_are_not_the_nodes(namespace: Namespace):
    """kube-proxy, kube-router and our mode ipvs put all ClusterIPs on a device, and leave it when they end: a
    ClusterIP there must not be left to a process that listens at its port on all addresses.
    """
    for number, device in enumerate(("kube-ipvs0", "kube-dummy-if", IPVS_DEVICE, "nodelocaldns"), 1):
        namespace.ip(f"link add {device} type bridge", f"addr add 10.96.0.{number}/32 dev {device}")
    addresses = namespace.do(read_node_addresses)
    assert addresses == (parse_addr("10.96.0.4"),)
    assert not addresses.subnet_ends


def test_ends_of_the_nodes_subnets(namespace: Namespace):
    """Not of the smallest ones, and not an end that the node itself has."""
    subnets = "192.0.2.70/26 198.51.100.2/31 203.0.113.7/32 10.1.0.0/15 10.4.0.0/16 fd00:9::1/64"
    namespace.ip("link set lo up", "link add dev0 type bridge", "addr add 127.9.0.1/16 dev lo")
    namespace.ip(*(f"addr add {one} dev dev0" for one in subnets.split()))
    ends = namespace.do(read_node_addresses).subnet_ends
    wanted = "192.0.2.64 192.0.2.127 10.0.0.0 10.1.255.255 10.4.255.255"
    assert {format_addr(end) for end in ends} == set(wanted.split())


@each_cells(
    "commands, networks",
    """
global | addr add 198.18.1.1/32 dev lo | 198.18.1.1
of scope host | addr add 198.18.1.2/32 dev lo scope host | 198.18.1.2
of scope link | addr add 198.18.1.3/32 dev dev0 scope link | 198.18.1.3
loopback of scope global | addr add 127.5.0.1/32 dev lo scope global |
link-local, IPv4 | addr add 169.254.20.10/32 dev dev0 scope link | 169.254.20.10
link-local, IPv6 | addr add fe80::7/128 dev lo scope global |
secondary | addr add 192.0.2.1/24 dev dev0; addr add 192.0.2.2/24 dev dev0 | 192.0.2.1 192.0.2.2
with a peer | addr add 10.7.0.1 peer 10.7.0.2/32 dev dev0 | 10.7.0.1
IPv6 | addr add fd00:5::1/64 dev lo | fd00:5::1
deprecated | addr add fd00:5::1/64 dev lo preferred_lft 0 | fd00:5::1
tentative | addr add fd00:5::1/64 dev dev0 |
AnyIP | route add local 198.18.1.5/32 dev lo | 198.18.1.5
AnyIP, IPv6 | route add local fd00:5::5/128 dev lo table local | fd00:5::5
AnyIP of a network | route add local 10.9.0.0/24 dev lo | 10.9.0.0/24
AnyIP of a network, IPv6 | route add local fd00:9::/64 dev lo table local | fd00:9::/64
an address twice | addr add 198.18.1.1/32 dev lo; addr add 198.18.1.1/32 dev dev0 | 198.18.1.1
also an address of a Service | link add kube-ipvs0 type bridge; addr add 198.18.1.1/32 dev kube-ipvs0; \
addr add 198.18.1.1/32 dev lo | 198.18.1.1
a local route of another table | route add local 198.18.1.5/32 dev lo table 100 |
a route | route add 198.18.1.5/32 dev lo |
""",
)
def test_the_nodes_addresses_are_those_that_the_kernel_accepts(namespace: Namespace, commands, networks):
    """Commands of `ip`, and the networks of which the node has all addresses."""
    namespace.ip("link set lo up", "link add dev0 type bridge", "link set dev0 up", *commands.split("; "))
    settled(namespace.name, *(network for network in networks.split() if ":" in network and "/" not in network))
    found = namespace.do(read_node_addresses)
    assert [*map(format_addr, found), *map(str, found.networks)] == networks.split()


@contextlib.contextmanager
def watched(namespace: Namespace) -> Iterator[list[tuple[str, ...]]]:
    """The node's addresses at each notification of a change, from now on."""
    stop, seen = threading.Event(), list[tuple[str, ...]]()

    def read() -> None:
        seen.append(tuple(map(format_addr, read_node_addresses())))

    thread = threading.Thread(target=lambda: namespace.do(lambda: watch_addresses(read, stop)))
    thread.start()
    try:
        until("the watch has begun", lambda: seen)
        seen.clear()
        yield seen
    finally:
        stop.set()
        thread.join()


def test_changes_of_the_nodes_addresses_are_seen(namespace: Namespace):
    """The kernel reports an address before it has the local route. Routes to other machines are
    no such change.
    """
    namespace.ip("link set lo up", "link add dev0 type bridge", "link set dev0 up")
    with watched(namespace) as seen:
        namespace.ip("route add 198.51.100.0/24 dev dev0", "route del 198.51.100.0/24 dev dev0")
        for do, wanted in (("add", ("198.18.1.2",)), ("del", ())):
            namespace.ip(f"addr {do} 198.18.1.2/32 dev lo scope host")
            until("the address is seen", lambda wanted=wanted: seen[-1:] == [wanted])
        assert len(seen) == 2, "at once, and nothing else"
        namespace.ip("route add local 198.18.1.5/32 dev lo")
        until("a local route is seen", lambda: seen[-1:] == [("198.18.1.5",)])
        namespace.ip("addr add fd00:5::1/64 dev lo")
        until("IPv6 is seen", lambda: seen[-1:] == [("198.18.1.5", "fd00:5::1")])
