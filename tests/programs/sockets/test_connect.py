# SPDX-License-Identifier: Apache-2.0
"""connect(): what a socket of the node or of a pod gets.

One node with pods, real connections. A row names the client, the destination, the server that must
answer and the reason that the program must count, so no row passes by accident of the network. The
test also checks the addresses that both sides see. No device has the frontends' addresses, except
those that a row expects to be left alone.
"""

import contextlib
import errno
import itertools
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import CONFIG, ConfigFlag, Reason
from kbpf.model.desired import DesiredState
from kbpf.model.objects import Protocol
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, Node, Place, ip, settled
from tests.support.plane import Site, desired, services, within
from tests.support.table import each_row, table

MPTCP = 262
UDP = Protocol.UDP
ALONE, ALONE6 = "198.51.100.1", "fd00:51::1"  # on a device of the node, with a server behind it


@dataclass
class Bench:
    """The node, its data plane and its clients."""

    node: Node
    site: Site
    places: dict[str, Place]

    def __getitem__(self, name: str) -> Place:
        return self.places[name]


@pytest.fixture(scope="module")
def bench(node: Node, shared_site: Site) -> Iterator[Bench]:
    pods = {name: node.pod(name) for name in ("pod", "one", "two")}
    ip(f"addr add {ALONE}/32 dev lo", f"addr add {ALONE6}/128 dev lo nodad", netns=node.netns)
    settled(node.netns, ALONE6)
    for name in ("one", "two"):
        pods[name].serve(8080, udp=(8080,))
    pods["pod"].serve(30080, udp=(30080,))  # on its own loopback too
    node.host.serve(7000, 30099)
    outsider = Place("outsider", pods["pod"].netns, None)  # the pod's network, not its cgroup
    shared_site.start(world(pods, node))
    yield Bench(node, shared_site, {**pods, "host": node.host, "outsider": outsider})
    outsider.close()


SERVICES = f"""
web       10.96.0.1:80 NodePort=0.0.0.0:30080 ExternalIP=192.0.2.1:80 -> one
dns:UDP   10.96.0.1:80 NodePort=0.0.0.0:30080 -> two
web6      [fd00:96::1]:80 NodePort=[::]:30080 -> one6
dns6:UDP  [fd00:96::1]:80 -> two6
empty     10.96.0.2:80 NodePort=0.0.0.0:30082 LoadBalancer=192.0.2.2:80
empty6    [fd00:96::2]:80
near      10.96.0.3:80 ExternalIP=192.0.2.3:80 -> one local=two internal=Local
elsewhere 10.96.0.4:80 ExternalIP=192.0.2.4:80 -> one internal=Local
nowhere   10.96.0.5:80 -> internal=Local
outer     10.96.0.6:80 NodePort=0.0.0.0:30086 LoadBalancer=192.0.2.6:80 ExternalIP=192.0.2.7:80 -> one external=Local
serving   10.96.0.7:80 -> internal=Local serving=one
guarded   10.96.0.8:80 LoadBalancer={ALONE}:7000 -> one ranges=203.0.113.0/24
empty-dns:UDP 10.96.0.9:53
empty-dns6:UDP [fd00:96::9]:53
elsewhere-dns:UDP 10.96.0.4:53 -> one internal=Local
taken     ExternalIP={ALONE}:7001 -> one
shadow    NodePort=0.0.0.0:30099 ExternalIP={ALONE}:80 -> one
"""


def world(pods: dict[str, Place], node: Node) -> DesiredState:
    names = {name: f"{pods[name].ip}:8080" for name in ("one", "two")}
    names |= {f"{name}6": f"[{pods[name].ip6}]:8080" for name in ("one", "two")}
    return desired(*services(SERVICES, names), nodes=f"{node.ip} {node.ip6}")


class Dial(NamedTuple):
    """One connection. `gets`: the server that answers, or the errno. `to` may hold {node}, {pod},
    ...
    """

    name: str
    client: str
    to: str
    gets: str
    why: Reason
    protocol: str = "tcp"


REFUSED = "ECONNREFUSED"
GOES, NONE = Reason.TRANSLATED, Reason.NOT_A_SERVICE

DIALS = table(
    Dial,
    """
pod to ClusterIP                             | pod  | 10.96.0.1:80             | one          | TRANSLATED
pod to ClusterIP over UDP is another Service | pod  | 10.96.0.1:80             | two          | TRANSLATED    | udp
host to ClusterIP                            | host | 10.96.0.1:80             | one          | TRANSLATED
pod to IPv6 ClusterIP                        | pod  | [fd00:96::1]:80          | one          | TRANSLATED
pod to IPv6 ClusterIP over UDP               | pod  | [fd00:96::1]:80          | two          | TRANSLATED    | udp
host to IPv6 ClusterIP                       | host | [fd00:96::1]:80          | one          | TRANSLATED
v4-mapped on an IPv6 socket                  | pod  | [::ffff:10.96.0.1]:80    | one          | TRANSLATED
v4-mapped over UDP                           | pod  | [::ffff:10.96.0.1]:80    | two          | TRANSLATED    | udp
v4-mapped from the host                      | host | [::ffff:10.96.0.1]:80    | one          | TRANSLATED
a backend dials its own Service              | one  | 10.96.0.1:80             | one          | TRANSLATED
ExternalIP                                   | pod  | 192.0.2.1:80             | one          | TRANSLATED
another port of a ClusterIP                  | pod  | 10.96.0.1:81             | ECONNREFUSED | UNKNOWN_PORT
another port, IPv6                           | host | [fd00:96::1]:81          | ECONNREFUSED | UNKNOWN_PORT
another port, UDP                            | pod  | 10.96.0.3:80             | ECONNREFUSED | UNKNOWN_PORT  | udp
another port, v4-mapped                      | pod  | [::ffff:10.96.0.1]:81    | ECONNREFUSED | UNKNOWN_PORT
NodePort on a ClusterIP                      | pod  | 10.96.0.1:30080          | ECONNREFUSED | UNKNOWN_PORT
another port of an ExternalIP                | pod  | 198.51.100.1:7002        | ECONNREFUSED | NOT_A_SERVICE
a plain address                              | pod  | {two}:8080               | two          | NOT_A_SERVICE
a plain IPv6 address                         | pod  | [{two6}]:8080            | two          | NOT_A_SERVICE
a plain v4-mapped address                    | pod  | [::ffff:{two}]:8080      | two          | NOT_A_SERVICE
no endpoints: ClusterIP                      | pod  | 10.96.0.2:80             | ECONNREFUSED | NO_ENDPOINTS
no endpoints: v4-mapped                      | pod  | [::ffff:10.96.0.2]:80    | ECONNREFUSED | NO_ENDPOINTS
no endpoints: IPv6                           | host | [fd00:96::2]:80          | ECONNREFUSED | NO_ENDPOINTS
no endpoints: NodePort                       | host | {node}:30082             | ECONNREFUSED | NO_ENDPOINTS
no endpoints: LB VIP                         | pod  | 192.0.2.2:80             | ECONNREFUSED | NO_ENDPOINTS
internal Local, one here                     | pod  | 10.96.0.3:80             | two          | TRANSLATED
internal Local is not for ExternalIPs        | pod  | 192.0.2.3:80             | one          | TRANSLATED
internal Local, only elsewhere               | pod  | 10.96.0.4:80             | ETIMEDOUT    | NO_LOCAL_ENDPOINTS
internal Local, only elsewhere, ExternalIP   | pod  | 192.0.2.4:80             | one          | TRANSLATED
internal Local, none at all                  | pod  | 10.96.0.5:80             | ECONNREFUSED | NO_ENDPOINTS
internal Local, terminating elsewhere        | pod  | 10.96.0.7:80             | ETIMEDOUT    | NO_LOCAL_ENDPOINTS
external Local, pod to NodePort: cluster     | pod  | {node}:30086             | one          | TRANSLATED
external Local, host to NodePort: cluster    | host | {node}:30086             | one          | TRANSLATED
external Local, pod to LB VIP: cluster       | pod  | 192.0.2.6:80             | one          | TRANSLATED
external Local, host to LB VIP: cluster      | host | 192.0.2.6:80             | one          | TRANSLATED
external Local, ExternalIP: cluster          | pod  | 192.0.2.7:80             | one          | TRANSLATED
external Local is not for the ClusterIP      | pod  | 10.96.0.6:80             | one          | TRANSLATED
pod to NodePort                              | pod  | {node}:30080             | one          | TRANSLATED
pod to NodePort over UDP is another Service  | pod  | {node}:30080             | two          | TRANSLATED    | udp
pod to IPv6 NodePort                         | pod  | [{node6}]:30080          | one          | TRANSLATED
pod to v4-mapped NodePort                    | pod  | [::ffff:{node}]:30080    | one          | TRANSLATED
host to NodePort                             | host | {node}:30080             | one          | TRANSLATED
host to NodePort on loopback                 | host | 127.0.0.1:30080          | one          | TRANSLATED
host to NodePort on all of 127/8             | host | 127.99.0.1:30080         | one          | TRANSLATED
host to NodePort on ::1                      | host | [::1]:30080              | one          | TRANSLATED
host to NodePort on mapped loopback          | host | [::ffff:127.0.0.1]:30080 | one          | TRANSLATED
host to NodePort on 0.0.0.0, its loopback    | host | 0.0.0.0:30080            | one          | TRANSLATED
host to NodePort on ::, its loopback         | host | [::]:30080               | one          | TRANSLATED
pod to its own loopback                      | pod  | 127.0.0.1:30080          | pod          | NOT_A_SERVICE
pod to its own loopback over UDP             | pod  | 127.0.0.1:30080          | pod          | NOT_A_SERVICE | udp
pod to its own ::1                           | pod  | [::1]:30080              | pod          | NOT_A_SERVICE
pod to 0.0.0.0, its own loopback             | pod  | 0.0.0.0:30080            | pod          | NOT_A_SERVICE
pod to ::, its own loopback                  | pod  | [::]:30080               | pod          | NOT_A_SERVICE
pod to its own address at a node port        | pod  | {pod}:30080              | pod          | NOT_A_SERVICE
NodePort on a node address that has none     | pod  | 198.51.100.1:30099       | host-1       | NOT_A_SERVICE
NodePort on a foreign address                | host | {pod}:30080              | pod          | NOT_A_SERVICE
no IPv6 NodePort of an IPv4 Service          | host | [{node6}]:30099          | host-1       | NOT_A_SERVICE
restricted LB VIP is left to the packet path | pod  | 198.51.100.1:7000        | host-1       | NEEDS_SOURCE
restriction is not for the ClusterIP         | pod  | 10.96.0.8:80             | one          | TRANSLATED
sendto: ClusterIP                            | pod  | 10.96.0.1:80             | two          | TRANSLATED    | sendto
sendto: ClusterIP, host                      | host | 10.96.0.1:80             | two          | TRANSLATED    | sendto
sendto: ClusterIP, IPv6                      | pod  | [fd00:96::1]:80          | two          | TRANSLATED    | sendto
sendto: ClusterIP, v4-mapped                 | pod  | [::ffff:10.96.0.1]:80    | two          | TRANSLATED    | sendto
sendto: NodePort                             | pod  | {node}:30080             | two          | TRANSLATED    | sendto
sendto: NodePort on loopback                 | host | 127.0.0.1:30080          | two          | TRANSLATED    | sendto
sendto: no endpoints                         | pod  | 10.96.0.9:53             | ECONNREFUSED | NO_ENDPOINTS  | sendto
sendto: no endpoints, v4-mapped              | pod  | [::ffff:10.96.0.9]:53    | ECONNREFUSED | NO_ENDPOINTS  | sendto
sendto: no endpoints, IPv6                   | pod  | [fd00:96::9]:53          | ECONNREFUSED | NO_ENDPOINTS  | sendto
sendto: internal Local, elsewhere            | pod  | 10.96.0.4:53             | ETIMEDOUT | NO_LOCAL_ENDPOINTS | sendto
sendto: a plain address                      | pod  | {two}:8080               | two          | NOT_A_SERVICE | sendto
sendto: a plain v4-mapped address            | pod  | [::ffff:{two}]:8080      | two          | NOT_A_SERVICE | sendto
""",
)


def marks(row: Dial) -> tuple[pytest.MarkDecorator, ...]:
    """Kernel features that a row needs: to set the errno in the hook, or to recognise the host."""
    host = row.to.rpartition(":")[0].strip("[]")
    at_home = is_loopback(host) or host in ("0.0.0.0", "::")
    return (
        *([needs("set_retval")] if row.gets in errno.errorcode.values() and row.why is not NONE else []),
        *([needs("netns_cookie")] if row.client == "host" and at_home else []),
    )


def is_loopback(host: str) -> bool:
    return host == "::1" or "127." in host


def destination(bench: Bench, row: Dial) -> tuple[str, int]:
    names = {name: place.ip for name, place in bench.places.items()}
    names |= {f"{name}6": place.ip6 for name, place in bench.places.items()}
    host, _, port = row.to.format(**names, node=bench.node.ip, node6=bench.node.ip6).rpartition(":")
    return host.strip("[]"), int(port)


@each_row(DIALS, marks)
def test_dial(bench: Bench, row: Dial):
    host, port = destination(bench, row)
    before = bench.site.reasons()
    client = bench[row.client]
    with bench.site.telling():
        if row.protocol == "tcp":
            answer = client.tcp(host, port)
        else:
            answer = client.udp(host, port, connected=row.protocol == "udp")
    counted = bench.site.reasons() - before
    del counted[Reason.REVERSED]  # getpeername() and recvfrom()
    if row.protocol != "tcp":  # replies and packets of v4-mapped sockets pass hooks, too
        assert counted.pop(NONE, 0) >= (row.why is NONE)
    if row.gets in errno.errorcode.values():
        assert answer.get("error") == row.gets, str(answer)
        assert answer["at_once"] == (row.why is not NONE), "the programs answer, not the network"
    else:
        assert answer.get("name") == row.gets, str(answer)
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host) if row.why is NONE else host
        assert answer["peer"] == [shown, port], "getpeername() shows what was dialled"
        assert answer.get("getpeername", answer["peer"]) == [shown, port]
        if row.client in ("pod", "one") and not is_loopback(shown):
            assert answer["client"] in (client.ip, client.ip6), "the backend sees the client itself"
    assert counted == ({row.why: 1} if row.protocol == "tcp" or row.why is not NONE else {})


def test_socket_outside_the_cgroup_is_not_translated(bench: Bench):
    """The same network and address: inside the cgroup it is a Service, outside it is the host."""
    before = bench.site.reasons()
    assert bench["outsider"].tcp(ALONE, 7001)["error"] == REFUSED
    assert bench["outsider"].tcp(ALONE, 7000)["name"] == "host-1"
    assert bench.site.reasons() == before
    assert bench["pod"].tcp(ALONE, 7001)["name"] == "one"


@needs("mptcp")
@pytest.mark.parametrize("host", ["10.96.0.1", "fd00:96::1", "::ffff:10.96.0.1"])
def test_mptcp_connects_as_tcp(bench: Bench, host: str):
    """getpeername() shows the backend: connect() is hooked at the subflow, a socket of the kernel
    with its own cookie, and nothing leads from one socket to the other.
    """

    def dial() -> tuple[bytes, str]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM, MPTCP) as s:
            s.settimeout(PATIENCE)
            s.connect((host, 80))
            s.sendall(b"bye\n")
            return s.recv(4096), s.getpeername()[0]

    answer, peer = within(bench["pod"], dial)
    assert b'"one"' in answer
    assert peer in (host, bench["one"].ip, bench["one"].ip6, f"::ffff:{bench['one'].ip}")


@needs("set_retval")
def test_nonblocking_socket_can_connect_after_a_refusal(bench: Bench):
    """It is refused at once, which leaves no state that hinders the next connect()."""

    def dial() -> tuple[int, int, str]:
        with socket.socket() as s:
            s.setblocking(False)
            codes = s.connect_ex(("10.96.0.2", 80)), s.connect_ex(("10.96.0.1", 80))
            select.select([], [s], [], PATIENCE)
            return *codes, s.getpeername()[0]

    assert within(bench["pod"], dial) == (errno.ECONNREFUSED, errno.EINPROGRESS, "10.96.0.1")


@contextlib.contextmanager
def config_flag(bench: Bench, flag: ConfigFlag) -> Iterator[None]:
    """Sets this flag in the hooks' configuration, too."""
    with bench.site.restored("config"):
        netns, flags, share = CONFIG.unpack(bench.site.entries("config")[bytes(4)])
        bench.site.put("config", bytes(4), CONFIG.pack(netns, flags | flag, share))
        yield


def own_address(host: str, port: int, protocol: int = 0) -> str:
    """The source address of a socket connected to that host, or the errno. ping asks for it, and so
    does getaddrinfo() for each address that it found.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as s:
        if code := s.connect_ex((host, port)):
            return errno.errorcode[code]
        assert s.getpeername()[0] == host
        return s.getsockname()[0].removeprefix("::ffff:")


PORT_OF_PING, PORT_OF_MUSL = 1025, 65535


@needs("set_retval")
@pytest.mark.parametrize("host", ["10.96.0.1", "fd00:96::1", "::ffff:10.96.0.1"])
@pytest.mark.parametrize("port", [PORT_OF_PING, PORT_OF_MUSL])
def test_udp_connect_to_an_unknown_port_succeeds(bench: Bench, host: str, port: int):
    """connect() sends nothing. A datagram or a TCP SYN is refused: by the packet path, or at once. A client that names
    the port of a Service will send to it: without endpoints it learns at once.
    """
    pod, before = bench["pod"], bench.site.reasons()
    with config_flag(bench, ConfigFlag.PACKET_PATH):
        own = within(pod, lambda: own_address(host, port))
        assert own == (pod.ip6 if host.startswith("fd00") else pod.ip)
        assert bench.site.reasons() - before == {Reason.LEFT_TO_PACKETS: 1}
        assert pod.udp(host, port) == {"error": REFUSED, "at_once": True}
        assert pod.tcp(host, port)["at_once"] is True
        assert (bench.site.reasons() - before)[Reason.UNKNOWN_PORT] == 2
        assert within(pod, lambda: own_address("10.96.0.9", 53)) == REFUSED
        assert (bench.site.reasons() - before)[Reason.NO_ENDPOINTS] == 1


@pytest.mark.parametrize("host", ["10.96.0.1", "fd00:96::1"])
@pytest.mark.parametrize("packets", [False, True], ids=["no packet path", "packet path"])
def test_ping_socket_connects(bench: Bench, host: str, packets: bool):
    """Ping sockets have no port, and what they send belongs to no Service. (Since Linux 6.1 their
    connect() has a hook.)
    """
    pod, v6 = bench["pod"], ":" in host
    protocol = socket.IPPROTO_ICMPV6 if v6 else socket.IPPROTO_ICMP

    def ask() -> str:
        Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 0")
        return own_address(host, 1, protocol)

    with config_flag(bench, ConfigFlag.PACKET_PATH if packets else ConfigFlag(0)):
        assert within(pod, ask) == (pod.ip6 if v6 else pod.ip)


SPARE = range(61_000, 65_536)
OWN_PORTS = itertools.count(3333)
"""Ports to bind to. Each is used once, because a socket that closed first stays in TIME_WAIT."""


class Chosen(NamedTuple):
    """A connection, whether its socket gets a port of SPARE, and whether another data plane has connections."""

    client: str
    protocol: str
    host: str
    spare: bool
    coexisting: bool = True


PORTS = table(
    Chosen,
    """
pod  | tcp | 10.96.0.1        | yes
pod  | tcp | fd00:96::1       | yes
pod  | tcp | ::ffff:10.96.0.1 | yes
pod  | udp | 10.96.0.1        | yes
pod  | tcp | a backend        | no
host | tcp | 10.96.0.1        | no
pod  | tcp | 10.96.0.1        | no | no
""",
)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=needs("netns_cookie") if row.client == "host" else ()) for row in PORTS],
    ids=lambda row: f"{row.client} {row.protocol} {row.host}{'' if row.coexisting else ', alone'}",
)
def test_pod_gets_a_spare_port_while_another_data_plane_coexists(bench: Bench, row: Chosen):
    """IPVS would take the replies for those of a connection that the pod made through IPVS."""
    to = (bench["one"].ip, 8080) if row.host == "a backend" else (row.host, 80)
    family = socket.AF_INET6 if ":" in row.host else socket.AF_INET
    kind = socket.SOCK_DGRAM if row.protocol == "udp" else socket.SOCK_STREAM

    def dial(port: int = 0) -> tuple[bytes, int]:
        with socket.socket(family, kind) as s:
            s.settimeout(PATIENCE)
            if port:
                s.bind(("", port))
            s.connect(to)
            s.sendall(b"bye\n")
            return s.recv(4096), s.getsockname()[1]

    with config_flag(bench, ConfigFlag.COEXISTING if row.coexisting else ConfigFlag(0)):
        ports = [within(bench[row.client], dial)[1] for _ in range(3)]
        assert [port in SPARE for port in ports] == [row.spare] * 3
        assert len(set(ports)) > 1
        own = next(OWN_PORTS)
        answer, port = within(bench[row.client], lambda: dial(own))
        assert (b'"name"' in answer, port) == (True, own)


@needs("netns_cookie")
def test_localhost_node_ports_can_be_switched_off(bench: Bench):
    assert bench["host"].tcp("127.0.0.1", 30080)["name"] == "one"
    bench.site.open(localhost_node_ports=False)
    try:
        assert bench["host"].tcp("127.0.0.1", 30080)["error"] == REFUSED
        assert bench["host"].tcp("::1", 30080)["error"] == REFUSED
        assert bench["host"].tcp(bench.node.ip, 30080)["name"] == "one"
    finally:
        bench.site.open()
    assert bench["host"].tcp("127.0.0.1", 30080)["name"] == "one"


@needs("netns_cookie")
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
@pytest.mark.parametrize("own", ["127.0.0.1", "127.0.0.2", "::1"])
def test_socket_bound_to_loopback_is_refused_at_a_node_port(bench: Bench, own: str, kind: int):
    """From that address it reaches no backend, and no process of the node listens on the port."""

    def dial() -> int:
        with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET, kind) as s:
            s.settimeout(PATIENCE)
            s.bind((own, 0))
            try:
                s.connect(("::1" if ":" in own else "127.0.0.1", 30080))
                s.sendall(b"bye\n")
                s.recv(4096)
            except OSError as error:
                return error.errno
            return 0

    assert within(bench["host"], dial) == errno.ECONNREFUSED


SO_BINDTOIFINDEX, IP_UNICAST_IF, IPV6_UNICAST_IF = (1, 62), (socket.IPPROTO_IP, 50), (socket.IPPROTO_IPV6, 76)
DEVICE_OPTIONS = (
    ("10.96.0.1", SO_BINDTOIFINDEX),
    ("10.96.0.1", IP_UNICAST_IF),
    ("::ffff:10.96.0.1", IP_UNICAST_IF),
    ("fd00:96::1", IPV6_UNICAST_IF),
)


@needs("networks")
@pytest.mark.parametrize(("host", "option"), DEVICE_OPTIONS)
@pytest.mark.parametrize(("client", "reason"), [("host", Reason.LEFT_TO_PACKETS), ("pod", Reason.TRANSLATED)])
def test_socket_of_the_node_that_is_bound_to_a_device_is_left_to_packets(
    bench: Bench, host: str, option: tuple[int, int], client: str, reason: Reason
):
    """Whom it reaches: tests/lab/traffic/test_socket_options.py."""

    def dial() -> None:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as s:
            index = socket.if_nametoindex("lo")
            s.setsockopt(*option, index if option == SO_BINDTOIFINDEX else socket.htonl(index))
            s.connect_ex((host, 80))

    before = bench.site.reasons()
    with config_flag(bench, ConfigFlag.PACKET_PATH):
        within(bench[client], dial)
    assert bench.site.reasons() - before == {reason: 1}


OWN_PORT = 20_678
"""Outside of the range from which the kernel takes the ports of other sockets."""


def test_second_connection_to_a_backend_from_one_port_fails(bench: Bench):
    """A limit listed in docs/limits.md: both sockets would have the same connection to
    the backend.
    """

    def dial() -> list[str]:
        codes = []
        with socket.socket() as first, socket.socket() as second:
            for sock, host in ((first, "10.96.0.1"), (second, "192.0.2.1")):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                sock.bind(("0.0.0.0", OWN_PORT))
                code = sock.connect_ex((host, 80))
                codes.append(errno.errorcode[code] if code else "connected")
        return codes

    assert within(bench["pod"], dial) == ["connected", "EADDRNOTAVAIL"]
