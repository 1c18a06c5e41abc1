# SPDX-License-Identifier: Apache-2.0
"""Listening sockets of this network namespace, read through sock_diag, and the addresses at which
they may serve a ClusterIP.
"""

import socket
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kbpf.dataplane.node import read_node_addresses
from kbpf.kernel.net import sock_diag
from kbpf.model.address import format_addr, parse_addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol
from tests.support.lab.namespace import Namespace


class Row(NamedTuple):
    """A socket bound to a free port, and the addresses that are listed."""

    what: str
    family: int
    kind: int
    bind: str
    told: str
    then: Callable[[socket.socket], object] = lambda _: None
    v6_only: bool = False


def listen(sock: socket.socket) -> None:
    sock.listen()


def connect(sock: socket.socket) -> None:
    sock.connect(("127.0.0.1", 9))


V4, V6, TCP, UDP = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
ROWS = [
    Row("TCP", V4, TCP, "127.0.0.1", "127.0.0.1", listen),
    Row("TCP everywhere", V4, TCP, "0.0.0.0", "0.0.0.0", listen),
    Row("TCP IPv6", V6, TCP, "::1", "::1", listen),
    Row("TCP of both families", V6, TCP, "::", ":: 0.0.0.0", listen),
    Row("TCP of IPv6 only", V6, TCP, "::", "::", listen, True),
    Row("UDP of both families", V6, UDP, "::", ":: 0.0.0.0"),
    Row("UDP of IPv6 only", V6, UDP, "::", "::", v6_only=True),
    Row("TCP, only bound", V4, TCP, "127.0.0.1", ""),
    Row("UDP", V4, UDP, "127.0.0.1", "127.0.0.1"),
    Row("UDP with a peer", V4, UDP, "127.0.0.1", "", connect),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_listening_socket_is_listed(namespace: Namespace, row: Row):
    namespace.ip("link set lo up")
    namespace.do(lambda: check_listing(row))


def check_listing(row: Row) -> None:
    with socket.socket(row.family, row.kind) as sock:
        if row.family == V6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, row.v6_only)
        sock.bind((row.bind, 0))
        row.then(sock)
        port = sock.getsockname()[1]
        protocol = Protocol.TCP if row.kind == TCP else Protocol.UDP
        found = {at for at in sock_diag.list_listeners() if (at.port, at.protocol) == (port, protocol)}
        at_port = sock_diag.list_listeners([(protocol, port), (Protocol.SCTP, port)])
        assert at_port == found, "if only this port is read"
        assert at_port.isdisjoint(sock_diag.list_listeners([(protocol, port ^ 1)]))
        assert found == {FrontendAddress(parse_addr(one), port, protocol) for one in row.told.split()}
    assert all((at.port, at.protocol) != (port, protocol) for at in sock_diag.list_listeners())


def test_addresses_on_devices_of_service_proxies_are_not_the_nodes(namespace: Namespace):
    """kube-proxy and kube-router put all ClusterIPs on a device, and leave it when they end: a
    ClusterIP there must not be left to a process that listens at its port on all addresses.
    """
    for number, device in enumerate(("kube-ipvs0", "kube-dummy-if", "nodelocaldns"), 1):
        namespace.ip(f"link add {device} type bridge", f"addr add 10.96.0.{number}/32 dev {device}")
    addresses = namespace.do(read_node_addresses)
    assert addresses == (parse_addr("10.96.0.3"),)
    assert not addresses.subnet_ends


def test_ends_of_the_nodes_subnets(namespace: Namespace):
    """Not of the smallest ones, and not an end that the node itself has."""
    subnets = "192.0.2.70/26 198.51.100.2/31 203.0.113.7/32 10.1.0.0/15 10.4.0.0/16 fd00:9::1/64"
    namespace.ip("link set lo up", "link add dev0 type bridge", "addr add 127.9.0.1/16 dev lo")
    namespace.ip(*(f"addr add {one} dev dev0" for one in subnets.split()))
    ends = namespace.do(read_node_addresses).subnet_ends
    wanted = "192.0.2.64 192.0.2.127 10.0.0.0 10.1.255.255 10.4.255.255"
    assert {format_addr(end) for end in ends} == set(wanted.split())
