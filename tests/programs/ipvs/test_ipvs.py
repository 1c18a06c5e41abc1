# SPDX-License-Identifier: Apache-2.0
"""The IPVS data plane on a kernel with IPVS: a node of the lab with the plane and two pods that
serve; connections come from the node, its pods and outside.
"""

import contextlib
import errno
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest

from kbpf.config.kinds import IPVS_SCHEDULERS
from kbpf.dataplane.base import Report
from kbpf.dataplane.ipvs import ipvs_cleanup as cleanup
from kbpf.dataplane.ipvs.plane import IpvsPlane
from kbpf.kernel.net.ipvs import IpvsClient, IpvsCommand, IpvsRequest, VirtualServiceSettings
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import RealServer, ServiceState, VirtualService
from kbpf.model.metrics import ConnectionStats
from kbpf.model.objects import Cidr, Protocol
from tests.support.features import needs
from tests.support.lab.lab import Lab, Place, ip, run, until
from tests.support.plane import desired, service, services
from tests.support.table import each_cells, table

T = TypeVar("T")
UDP = Protocol.UDP


pytestmark = needs("ipvs")

VIP4, VIP6, LB4, EXT4 = "10.96.0.1", "fd00:96::1", "192.0.2.1", "192.0.2.2"
PODS4, PODS6 = Cidr(parse_addr("10.244.1.0"), 120), Cidr(parse_addr("fd00:10:244:1::"), 64)


class Bench:
    """The lab, the clients in it, and a plane on node 1."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.node = lab.nodes[0]
        self.a, self.b = self.node.pod("a"), self.node.pod("b")
        for pod in (self.a, self.b):
            pod.serve(8080, 8081, udp=(5353,))
        self.outside = Place("outside", lab.outside, None)
        ip(
            *(f"route add {net} via {self.node.ip}" for net in ("10.96.0.0/16", "192.0.2.0/24")),
            f"route add fd00:96::/64 via {self.node.ip6}",
            netns=lab.outside,
        )
        self.places = {"a": self.a, "b": self.b, "host": self.node.host, "outside": self.outside}
        self.config = Config(state_dir=folder)
        self.plane = IpvsPlane(self.config)
        self.start()

    def start(self, **changed: Any) -> IpvsPlane:
        """Starts a new agent's plane after closing the last one."""
        self.plane.close()
        self.plane = IpvsPlane(replace(self.config, **changed))
        self.do(self.plane.open)
        return self.plane

    def remove(self) -> None:
        """Ends the plane, and removes what it left, as `kbpf cleanup` does."""
        self.plane.close()
        self.do(lambda: cleanup.remove(self.config))

    def do(self, action: Callable[[], T]) -> T:
        return netns.run_in(Path("/run/netns") / self.node.netns, action)

    def nft(self, *words: str, stdin: str | None = None) -> str:
        return self.do(lambda: run("nft", *words, stdin=stdin))

    def ipvs(self, action: Callable[[IpvsClient], T]) -> T:
        """The result of `action`, which is given the node's IPVS."""

        def act() -> T:
            with contextlib.closing(IpvsClient()) as face:
                return action(face)

        return self.do(act)

    def add_virtual_service(self, virtual: VirtualService, server: RealServer) -> None:
        """Adds a virtual service of somebody else."""
        requests = [
            IpvsRequest(IpvsCommand.IPVS_CMD_NEW_SERVICE, virtual, settings=VirtualServiceSettings("rr")),
            IpvsRequest(IpvsCommand.IPVS_CMD_NEW_DEST, virtual, server, 1),
        ]
        self.ipvs(lambda face: face.apply(requests))

    def delete_virtual_services(self, *virtual: VirtualService) -> None:
        requests = [IpvsRequest(IpvsCommand.IPVS_CMD_DEL_SERVICE, one) for one in virtual]
        self.ipvs(lambda face: face.apply(requests, (errno.ESRCH,)))

    def apply(self, *services: ServiceState, **more: Any) -> Report:
        """Programs exactly these Services."""
        wanted = msgspec.structs.replace(desired(*services, nodes=f"{self.node.ip} {self.node.ip6}"), **more)
        return self.do(lambda: self.plane.apply(wanted, None))

    def kernel(self) -> dict[str, dict[str, int]]:
        """Virtual services, and the weights of their real servers."""
        return self.ipvs(
            lambda face: {
                str(s): {str(load.server): load.weight for load in face.list_servers(s)}
                for s, _ in face.list_services()
            }
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    with Lab(nodes=1, name="iv", apart=True) as lab:
        made = Bench(lab, tmp_path_factory.mktemp("state"))
        try:
            yield made
        finally:
            made.remove()
            made.outside.close()


def a_and_b(bench: Bench, port: int, v6: bool = False) -> str:
    return " ".join(f"[{p.ip6}]:{port}" if v6 else f"{p.ip}:{port}" for p in (bench.a, bench.b))


class Row(NamedTuple):
    """A client, its destination, the pods that answer (or the error), and the source that
    they see.
    """

    name: str
    client: str
    to: str
    outcome: str
    sees: str = ""
    protocol: str = "tcp"


REFUSED, DROPPED = "ECONNREFUSED", "timeout"


SERVICES = """
web     10.96.0.1:80 NodePort=0.0.0.0:30080 LoadBalancer=192.0.2.1:80 -> A B
web6    [fd00:96::1]:80 NodePort=[::]:30080 -> A6 B6
dns:UDP 10.96.0.1:53 NodePort=0.0.0.0:30053 -> DNS-A DNS-B
dns6:UDP [fd00:96::1]:53 -> DNS-A6 DNS-B6
empty   10.96.0.1:81 NodePort=0.0.0.0:30081 LoadBalancer=192.0.2.1:81
empty6  [fd00:96::1]:81
emptyu:UDP 10.96.0.1:82
inner   10.96.0.1:83 -> A B internal=Local
outer   10.96.0.1:84 NodePort=0.0.0.0:30084 LoadBalancer=192.0.2.1:84 -> A B local=A external=Local
none    10.96.0.1:85 NodePort=0.0.0.0:30085 LoadBalancer=192.0.2.1:85 -> A B external=Local
ranges  10.96.0.1:86 LoadBalancer=192.0.2.1:86 ExternalIP=192.0.2.2:86 -> A B ranges=198.18.0.1/32,10.244.1.2/32
self    10.96.0.1:87 LoadBalancer=192.0.2.1:87 -> A
sticky  10.96.0.1:88 LoadBalancer=192.0.2.1:88 -> A B affinity=100
stuck   10.96.0.1:89 LoadBalancer=192.0.2.1:89 -> A B affinity=100 external=Local
maglev  10.96.0.1:90 -> A B algorithm=MAGLEV
weighty 10.96.0.1:91 -> A B cluster_weights=3,1
ports   10.96.0.1:92 NodePort=0.0.0.0:30092 -> A B local=A external=Local
ports6  [fd00:96::1]:92 NodePort=[::]:30092 -> A6 B6 external=Local
"""


def all_services(bench: Bench) -> list[ServiceState]:
    names = {}
    for name, pod in (("A", bench.a), ("B", bench.b)):
        names |= {name: f"{pod.ip}:8080", f"{name}6": f"[{pod.ip6}]:8080"}
        names |= {f"DNS-{name}": f"{pod.ip}:5353", f"DNS-{name}6": f"[{pod.ip6}]:5353"}
    return services(SERVICES, names)


NODE, NODE6 = "198.18.0.1", "fd00:198:18::1"
NODES = "the node"
OWN = {"198.18.0.1", "10.244.1.1", "fd00:198:18::1", "fd00:10:244:1::1"}
OUT = "198.18.0.254"
ROWS = table(
    Row,
    """
ClusterIP, pod                           | b       | 10.96.0.1:80         | a!           | 10.244.1.3
ClusterIP, host                          | host    | 10.96.0.1:80         | a b          | the node
ClusterIP, outside                       | outside | 10.96.0.1:80         | a b          | the node
ClusterIP, v6, outside                   | outside | fd00:96::1:80        | a b          | the node
ClusterIP, v6, host                      | host    | fd00:96::1:80        | a b          | the node
ClusterIP, v6, pod                       | b       | fd00:96::1:80        | a!           | fd00:10:244:1::3
ClusterIP, UDP, outside                  | outside | 10.96.0.1:53         | a b          | the node | udp
ClusterIP, UDP, host                     | host    | 10.96.0.1:53         | a b          | the node | udp
ClusterIP, UDP, v6                       | outside | fd00:96::1:53        | a b          | the node | udp
NodePort, outside                        | outside | 198.18.0.1:30080     | a b          | the node
NodePort, host                           | host    | 198.18.0.1:30080     | a b          | the node
NodePort, v6                             | outside | fd00:198:18::1:30080 | a b          | the node
NodePort, UDP                            | outside | 198.18.0.1:30053     | a b          | the node | udp
LoadBalancer                             | outside | 192.0.2.1:80         | a b          | the node
no endpoints, host                       | host    | 10.96.0.1:81         | ECONNREFUSED
no endpoints, pod                        | a       | 10.96.0.1:81         | ECONNREFUSED
no endpoints, outside                    | outside | 192.0.2.1:81         | ECONNREFUSED
no endpoints, NodePort                   | outside | 198.18.0.1:30081     | ECONNREFUSED
no endpoints, NodePort, host             | host    | 198.18.0.1:30081     | ECONNREFUSED
no endpoints, v6                         | outside | fd00:96::1:81        | ECONNREFUSED
no endpoints, v6, host                   | host    | fd00:96::1:81        | ECONNREFUSED
no endpoints, UDP                        | outside | 10.96.0.1:82         | ECONNREFUSED |          | udp
unknown port                             | outside | 10.96.0.1:9999       | ECONNREFUSED
unknown port, v6                         | a       | fd00:96::1:9999      | ECONNREFUSED
internal Local, none here                | a       | 10.96.0.1:83         | timeout
internal Local, none here, host          | host    | 10.96.0.1:83         | timeout
external Local, outside                  | outside | 192.0.2.1:84         | a            | 198.18.0.254
external Local, outside, NodePort        | outside | 198.18.0.1:30084     | a            | 198.18.0.254
external Local, pod of this node         | b       | 192.0.2.1:84         | a b
external Local, host                     | host    | 192.0.2.1:84         | a b          | the node
external Local, host, NodePort           | host    | 198.18.0.1:30084     | a b
external Local, ClusterIP                | outside | 10.96.0.1:84         | a b          | the node
external Local, none here, outside       | outside | 192.0.2.1:85         | timeout
external Local, none here, NodePort      | outside | 198.18.0.1:30085     | timeout
external Local, none here, pod           | b       | 192.0.2.1:85         | a b
external Local, none here, host          | host    | 192.0.2.1:85         | a b          | the node
external Local, NodePort alone, outside  | outside | 198.18.0.1:30092     | a            | 198.18.0.254
external Local, NodePort alone, pod      | b       | 198.18.0.1:30092     | a b
external Local, NodePort alone, host     | host    | 198.18.0.1:30092     | a b
external Local, NodePort alone, v6, host | host    | fd00:198:18::1:30092 | a b
ranges, outside                          | outside | 192.0.2.1:86         | timeout
ranges, ClusterIP                        | outside | 10.96.0.1:86         | a b          | the node
ranges, ExternalIP                       | outside | 192.0.2.2:86         | a b          | the node
ranges, allowed pod                      | a       | 192.0.2.1:86         | a b          | the node
ranges, other pod                        | b       | 192.0.2.1:86         | timeout
ranges, node                             | host    | 192.0.2.1:86         | a b          | the node
hairpin                                  | a       | 10.96.0.1:87         | a            | the node
Maglev                                   | outside | 10.96.0.1:90         | a b          | the node
weights                                  | outside | 10.96.0.1:91         | a b          | the node
""",
)


@pytest.fixture(scope="module")
def applied(bench: Bench) -> Bench:
    bench.start(detect_local_mode=LocalMode.CLUSTER_CIDR)
    bench.apply(*all_services(bench), local_networks=(PODS4, PODS6))
    return bench


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_connection_reaches_its_backends(applied: Bench, row: Row):
    host, _, port = row.to.rpartition(":")
    fails = row.outcome in (REFUSED, DROPPED)
    place = applied.places[row.client]
    timeout = 2.0 if row.outcome == DROPPED else 30.0

    def dial() -> dict[str, Any]:
        if row.protocol == "udp":
            return place.udp(host, int(port), timeout=timeout, connected=True)
        return place.tcp(host, int(port), timeout=timeout)

    # By Maglev the port decides: the chance to miss one of two backends is 1 in 10^9.
    answers = [dial() for _ in range(1 if fails else 31 if row.name == "Maglev" else 12)]
    if fails:
        assert {answer.get("error") for answer in answers} == {row.outcome}, answers
        return
    assert not [a for a in answers if "error" in a], answers
    # A pod that reaches itself is seen as the node.
    if row.outcome.endswith("!"):
        answers = [a for a in answers if a["name"] != row.client]
    assert {a["name"] for a in answers} == set(row.outcome.rstrip("!").split()), answers
    if row.sees:
        seen = {a["client"] for a in answers}
        assert seen <= (OWN if row.sees == NODES else {row.sees}), answers


def test_connections_and_bytes_are_counted_by_service(applied: Bench):
    """By Service port, whichever frontend was used, for metrics."""

    def had() -> ConnectionStats:
        found = applied.do(lambda: applied.plane.shared.count_traffic(lambda: None))
        assert found.connections is None
        return dict(found.totals).get(("default", "web", "", "TCP"), ConnectionStats())

    before = had()
    for address in (f"{VIP4}:80", f"{LB4}:80", f"{NODE}:30080"):
        host, _, port = address.rpartition(":")
        assert "error" not in applied.outside.tcp(host, int(port))

    def is_counted() -> bool:  # the kernel sums up its per-CPU counters every 2 s
        after = had()
        return (
            after.opened >= before.opened + 3
            and after.bytes_in > before.bytes_in
            and after.bytes_out > before.bytes_out
        )

    until("connections and bytes are counted", is_counted)


def test_connections_follow_weights(applied: Bench):
    """With weights 3 and 1 the first backend gets three of every four connections."""
    for _ in range(3):
        names = [applied.outside.tcp(VIP4, 91)["name"] for _ in range(4)]
        assert sorted(names) == ["a", "a", "a", "b"]


def test_every_scheduler_works(applied: Bench):
    bench = applied
    for name in IPVS_SCHEDULERS:
        bench.start(ipvs_scheduler=name)
        bench.apply(service("one", f"{VIP4}:72", a_and_b(bench, 8080)))
        assert bench.ipvs(lambda face: {one.scheduler for _, one in face.list_services()}) == {name}
        assert bench.outside.tcp(VIP4, 72).get("name") in ("a", "b"), name
        assert bench.plane.status().problems == ()
    bench.start()


@each_cells(
    "client, host, port, local",
    """
ClusterIP, outside                | outside | 10.96.0.1      | 70 | no
short circuit, NodePort, host     | host    | 198.18.0.1     | 30070
short circuit, NodePort, v6, host | host    | fd00:198:18::1 | 30070
short circuit, LoadBalancer, pod  | b       | 192.0.2.1      | 70
""",
    port=int,
    local=lambda cell: cell != "no",
)
def test_connection_outlives_its_drained_backend(applied: Bench, client, host, port, local):
    """A client and a frontend; with external policy Local (`local`) it is a short circuit. A connection outlives its
    backend's removal from the set; new ones go elsewhere.
    """
    bench, place, v6 = applied, applied.places[client], ":" in host
    frontends = f"[{VIP6}]:70 NodePort=[::]:30070" if v6 else f"{VIP4}:70 NodePort=0.0.0.0:30070 LoadBalancer={LB4}:70"
    both = a_and_b(bench, 8080, v6)
    a, b = both.split()

    def start() -> None:
        bench.start(detect_local_mode=LocalMode.CLUSTER_CIDR)

    def apply(to: str) -> None:
        state = service("drain", frontends, to, external_local=local)
        bench.apply(state, local_networks=(PODS4, PODS6))

    def weights() -> dict[str, int]:
        found = bench.kernel()
        (at,) = (at for at in found if (at.startswith("mark") if local else at == f"{VIP4}:70/6"))
        return found[at]

    def dial(**more: Any) -> dict[str, Any]:
        return place.tcp(host, port, **more)

    def all_talk() -> None:
        said = [place.ask("talk", keep=f"k{i}").get("name") for i in range(4)]
        assert said == kept

    start()
    apply(both)
    kept = [dial(keep=f"k{i}").get("name") for i in range(4)]
    assert set(kept) == {"a", "b"}
    apply(a)
    assert weights() == {a: 1, b: 0}
    all_talk()
    assert {dial().get("name") for _ in range(4)} == {"a"}
    start()  # a restart continues the drain
    apply(a)
    assert weights() == {a: 1, b: 0}
    apply("")
    assert dial().get("error") == REFUSED
    all_talk()
    start()
    apply("")
    assert weights() == {a: 0, b: 0}
    assert dial().get("error") == REFUSED
    all_talk()
    apply(both)
    assert weights() == {a: 1, b: 1}
    all_talk()
    for i in range(4):
        place.ask("drop", keep=f"k{i}")


def test_udp_client_moves_at_once(applied: Bench):
    """A client's socket moves when its backend stops serving, and is refused without any
    backend.
    """
    bench, at = applied, f"{VIP4}:72"
    bench.start()
    b_only, a_only = f"{bench.b.ip}:5353", f"{bench.a.ip}:5353"
    bench.apply(service("moves", at, b_only, protocol=UDP))
    assert bench.outside.udp(VIP4, 72, keep="u", connected=True)["name"] == "b"
    bench.apply(service("moves", at, a_only, protocol=UDP))

    def again() -> str:
        got = bench.outside.udp(VIP4, 72, keep="u", connected=True, timeout=1.0)
        return str(got.get("name", got.get("error")))

    until("a answers", lambda: again() == "a")
    bench.apply(service("moves", at, "", protocol=UDP))
    until("it is refused", lambda: again() == REFUSED)


RETRANSMITTED = 100
"""Offset of tcpi_total_retrans in struct tcp_info (linux/tcp.h)."""
TCP_STATE, TCP_CLOSE = (socket.IPPROTO_TCP, socket.TCP_INFO), 7
"""The state is its first byte."""


def closes_first(listener: socket.socket, name: str) -> None:
    """A server that sends its name to each client and closes first."""
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as s:
                s.recv(100)
                s.sendall(name.encode())
                s.shutdown(socket.SHUT_WR)
                s.recv(1)


def test_client_port_in_time_wait_reaches_the_current_backend(applied: Bench):
    """IPVS keeps the connection in TIME_WAIT (net.ipv4.vs.conn_reuse_mode). The next one from this
    port must reach the current backend with its first SYN (kubernetes/kubernetes#81775).
    """
    bench, at = applied, f"{VIP4}:73"
    outside = Path("/run/netns") / str(bench.lab.outside)

    def dial() -> tuple[str, int]:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.settimeout(30)
            s.bind((OUT, 20001))
            s.connect((VIP4, 73))
            s.sendall(b"hello\n")
            name = s.recv(4096).decode()
            assert s.recv(1) == b""
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            s.shutdown(socket.SHUT_WR)
            # until its FIN is acknowledged, the next socket cannot use the port
            until("the connection is closed", lambda: s.getsockopt(*TCP_STATE, 1)[0] == TCP_CLOSE)
            return name, int.from_bytes(info[RETRANSMITTED:][:4], sys.byteorder)

    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            where = Path("/run/netns") / getattr(bench, name).netns
            listener = netns.run_in(where, lambda: socket.create_server(("", 8099)))
            thread = threading.Thread(target=closes_first, args=(listener, name), daemon=True)
            thread.start()
            stack.enter_context(listener)
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
        for name in ("a", "b") * 3:
            bench.apply(service("port", at, f"{getattr(bench, name).ip}:8099"))
            assert [netns.run_in(outside, dial) for _ in range(3)] == [(name, 0)] * 3


THEIRS = """
table inet theirs {
    set kbpf { type ipv4_addr
        elements = { 10.96.0.1 }
    }
    chain output {
        type filter hook output priority -120; policy accept
        ip daddr @kbpf counter
    }
}
table ip filter {
    chain FORWARD {
        type filter hook forward priority 0; policy accept
    }
}
"""


def test_foreign_virtual_services_and_tables_stay(applied: Bench):
    bench = applied
    theirs = VirtualService(6, parse_addr("203.0.113.1"), 80)

    def tables() -> list[str]:
        return [bench.nft("--stateless", "list", "table", *name) for name in (("inet", "theirs"), ("ip", "filter"))]

    web = service("web", f"{VIP4}:80", a_and_b(bench, 8080))
    try:
        bench.add_virtual_service(theirs, RealServer(parse_addr("10.0.0.1"), 80))
        bench.nft("-f", "-", stdin=THEIRS)
        before = tables()
        bench.apply(web)
        bench.do(lambda: bench.plane.tick(1e9))
        bench.start()
        bench.apply(web)
        assert set(bench.kernel()) == {f"{VIP4}:80/6", "203.0.113.1:80/6"}
        assert tables() == before
        bench.do(lambda: cleanup.remove(bench.plane._config))
        assert set(bench.kernel()) == {"203.0.113.1:80/6"}
        assert tables() == before
    finally:
        bench.delete_virtual_services(theirs)
        bench.nft("flush", "ruleset")
        bench.start()


def test_replies_pass_a_closed_forward_chain(applied: Bench):
    """Packets to backends are accepted by mark; replies need the rule in FORWARD."""
    bench = applied
    bench.apply(*all_services(bench))
    base = "type filter hook forward priority 0; policy drop;"
    closed = f"table ip filter {{ chain FORWARD {{ {base}\n}}\n}}\n"
    bench.nft("-f", "-", stdin=closed)
    try:
        assert bench.outside.tcp(VIP4, 80, timeout=1.0)["error"] == DROPPED
        bench.do(lambda: bench.plane.maintain_host(1e9))
        for host, port in ((VIP4, 80), (NODE, 30080), (LB4, 84)):
            assert bench.outside.tcp(host, port)["name"] in ("a", "b")
        assert bench.a.tcp(bench.b.ip, 8080, timeout=1.0)["error"] == DROPPED
        bench.remove()
        assert "kbpf" not in bench.nft("list", "ruleset")
    finally:
        bench.nft("delete", "table", "ip", "filter")
    bench.start()
