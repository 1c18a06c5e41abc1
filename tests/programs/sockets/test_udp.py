# SPDX-License-Identifier: Apache-2.0
"""UDP: datagrams of unconnected and connected sockets, and the end of the state that they hold.

Real sockets of pods behind the hooks. Every backend replies with its name, so a test sees which
backend got a datagram and which sender the client was shown.
"""

import errno
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.changes import commit
from kbpf.dataplane.bpf.changes.grace import GraceQueue
from kbpf.dataplane.bpf.maps.layout import FLOWS_PER_SOCKET, UDP_FLOW, Reason, pack_target
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.errors import KernelError
from kbpf.model.address import V4_PREFIX, parse_addr
from kbpf.model.desired import DesiredState, ServiceState
from kbpf.model.objects import Protocol
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, Node, Place, until
from tests.support.plane import Site, desired, service, sites, within

SOCKET_MAPS = ("sock_peers", "udp_flows")
CUT = ("ECONNABORTED", "EDESTADDRREQ")  # errno of a destroyed socket, depending on the call
FLOW_IDLE_NS = 120 * 10**9
WEB, WEB6, DNS = "10.96.0.1:53", "[fd00:96::1]:53", "10.96.0.2:53"


@dataclass
class Bench:
    """A data plane with its pods: `pod` and `other` are clients; `one`, `two` and `three` serve."""

    node: Node
    site: Site
    plane: BpfPlane
    places: dict[str, Place]

    def __getitem__(self, name: str) -> Place:
        return self.places[name]

    def to(self, names: str, family: int = 4) -> str:
        """Endpoints of these pods."""
        places = [self.places[name] for name in names.split()]
        return " ".join(f"[{p.ip6}]:8080" if family == 6 else f"{p.ip}:8080" for p in places)

    def udp(self, frontends: str, to: str, **more: Any) -> ServiceState:
        """A UDP Service in front of these pods."""
        family = 6 if "[" in frontends else 4
        for part in ("local", "serving"):
            if part in more:
                more[part] = self.to(more[part], family)
        return service(f"s{frontends}", frontends, self.to(to, family), Protocol.UDP, **more)

    def serve(self, *services: ServiceState) -> None:
        """Programs exactly these; nothing is retired yet."""
        self.plane.apply(desired(*services, nodes=f"{self.node.ip} {self.node.ip6}"), None)
        until("the sockets of deleted backends are destroyed", self._is_done, state=self.held)

    def _is_done(self) -> bool:
        """Sockets are destroyed in slices, and a busy machine needs more than one."""
        now = time.monotonic()
        due = self.plane.tick(now)
        return due is None or due > now

    def held(self) -> dict[str, int]:
        """How many sockets have a peer, and how many flows all sockets have."""
        flows = sum(map(flows_in, self.site.entries("udp_flows").values()))
        found = {"sock_peers": len(self.site.entries("sock_peers")), "udp_flows": flows}
        return {name: count for name, count in found.items() if count}


def flows_in(raw: bytes) -> int:
    """How many entries of a struct udp_flows are used."""
    return sum(bool(frontend[18]) for _, _, _, frontend, *_ in UDP_FLOW.iter_unpack(raw[8:]))


@pytest.fixture(scope="module")
def whole(node: Node, artifact_cache: Path) -> Iterator[Bench]:
    pods = {name: node.pod(name) for name in ("pod", "other", "one", "two", "three")}
    for name in ("one", "two", "three"):
        pods[name].serve(8080, udp=(8080,))
    with sites(artifact_cache) as make:
        site = make(cgroup=node.cgroup, node=node.netns)
        yield Bench(node, site, site.open(), {**pods, "host": node.host})


@pytest.fixture
def bench(whole: Bench) -> Iterator[Bench]:
    """No Service at the start, and no entries of sockets at the end."""
    whole.serve()
    whole.plane.flush()
    assert whole.held() == {}
    yield whole
    until("all entries of sockets are deleted", lambda: whole.held() == {}, state=whole.held)


class Send(NamedTuple):
    """One datagram: its client, its destination, and the server that replies or the errno."""

    name: str
    client: str
    to: str
    gets: str = "one"


SENDS = [
    Send("pod to ClusterIP", "pod", "10.96.0.1:53"),
    Send("host to ClusterIP", "host", "10.96.0.1:53"),
    Send("pod to IPv6 ClusterIP", "pod", "[fd00:96::1]:53", "two"),
    Send("v4-mapped on an IPv6 socket", "pod", "[::ffff:10.96.0.1]:53"),
    Send("pod to NodePort", "pod", "{node}:30053"),
    Send("host to NodePort on loopback", "host", "127.0.0.1:30053"),
    Send("no endpoints", "pod", "10.96.0.3:53", "ECONNREFUSED"),
    Send("no endpoints, v4-mapped", "pod", "[::ffff:10.96.0.3]:53", "ECONNREFUSED"),
    Send("no endpoints, IPv6", "pod", "[fd00:96::3]:53", "ECONNREFUSED"),
    Send("internal Local, only elsewhere", "pod", "10.96.0.4:53", "ETIMEDOUT"),
    Send("a plain address", "pod", "{three}:8080", "three"),
    Send("a plain v4-mapped address", "pod", "[::ffff:{three}]:8080", "three"),
]


def marks(row: Send) -> tuple[pytest.MarkDecorator, ...]:
    """Kernel features that a row needs: to set the errno in the hook, or to recognise the host."""
    return (
        *([needs("set_retval")] if row.gets in errno.errorcode.values() else []),
        *([needs("netns_cookie")] if row.to.startswith("127.") else []),
    )


@pytest.mark.parametrize("connected", [False, True], ids=["sendto", "connect"])
@pytest.mark.parametrize("row", [pytest.param(row, marks=marks(row), id=row.name) for row in SENDS])
def test_datagram_reaches_its_backend(bench: Bench, row: Send, connected: bool):
    """recvfrom() and getpeername() show the address that the client used; the backend sees the
    client.
    """
    bench.serve(
        bench.udp("10.96.0.1:53 NodePort=0.0.0.0:30053", "one"),
        bench.udp("[fd00:96::1]:53", "two"),
        bench.udp("10.96.0.3:53", ""),
        bench.udp("[fd00:96::3]:53", ""),
        bench.udp("10.96.0.4:53", "one", internal_local=True),
    )
    to = row.to.format(node=bench.node.ip, three=bench["three"].ip)
    host, _, port = to.rpartition(":")
    host = host.strip("[]")
    client = bench[row.client]
    answer = client.udp(host, int(port), connected=connected)
    if row.gets in errno.errorcode.values():
        assert answer == {"error": row.gets, "at_once": True}
        return
    assert answer.get("name") == row.gets, answer
    assert answer["peer"] == [host, int(port)], "recvfrom() shows the address that the client used"
    if connected:
        assert answer["getpeername"] == [host, int(port)]
    if row.client == "pod":
        assert answer["client"] in (client.ip, client.ip6), "the backend sees the client itself"


def test_one_socket_talks_to_several_services(bench: Bench):
    bench.serve(bench.udp(WEB, "one"), bench.udp(DNS, "two"))
    pod = bench["pod"]
    for host, name in 3 * (("10.96.0.1", "one"), ("10.96.0.2", "two"), (bench["three"].ip, "")):
        answer = pod.udp(host, 53 if name else 8080, keep="s")
        assert answer["name"] == (name or "three")
        assert answer["peer"][0] == host
    assert bench.held() == {"udp_flows": 2}
    pod.ask("drop", keep="s")


def test_replies_in_any_order_show_their_frontend(bench: Bench):
    """Each reply shows the frontend that its request went to, not the one used last."""
    bench.serve(bench.udp(WEB, "one"), bench.udp(DNS, "two"))

    def ask() -> dict[str, str]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(PATIENCE)
            for host in ("10.96.0.1", "10.96.0.2"):
                s.sendto(b"hello\n", (host, 53))
            answers = [s.recvfrom(4096) for _ in range(2)]
        return {sender[0]: data.decode().split('"')[3] for data, sender in answers}

    assert within(bench["pod"], ask) == {"10.96.0.1": "one", "10.96.0.2": "two"}


def test_reply_of_a_shared_backend_shows_the_last_used_frontend(bench: Bench):
    bench.serve(bench.udp(WEB, "one"), bench.udp(DNS, "one"))
    for host in ("10.96.0.1", "10.96.0.2", "10.96.0.1"):
        assert bench["pod"].udp(host, 53, keep="s")["peer"][0] == host
    bench["pod"].ask("drop", keep="s")


def test_flow_keeps_its_backend_while_it_serves(bench: Bench):
    three = bench.udp(WEB, "one two three")
    bench.serve(three)
    pod = bench["pod"]
    before = bench.site.reasons()
    first = pod.udp("10.96.0.1", 53, keep="s")["name"]
    assert {pod.udp("10.96.0.1", 53, keep="s")["name"] for _ in range(30)} == {first}
    counted = bench.site.reasons() - before
    assert counted[Reason.TRANSLATED] == 1
    assert counted[Reason.TRANSLATED_BY_FLOW] == 30
    assert len(pod.many(60, "10.96.0.1", 53, protocol="udp")["names"]) == 3, "new sockets spread"
    bench.serve(
        bench.udp(WEB, " ".join({"one", "two", "three"} - {first}), serving="one two three")
    )
    bench.plane.flush()
    assert pod.udp("10.96.0.1", 53, keep="s")["name"] == first, "it left the set and still serves"
    assert first not in pod.many(30, "10.96.0.1", 53, protocol="udp")["names"]
    pod.ask("drop", keep="s")


@pytest.mark.parametrize("answers", [False, True], ids=["request", "reply"])
def test_value_of_another_frontend_ends_no_flow(bench: Bench, answers: bool):
    """The kernel may give the memory of an entry to another key while a program reads it."""
    bench.serve(bench.udp(WEB, "one"), bench.udp(DNS, "two"))
    web, dns = (pack_target(parse_addr(f"10.96.0.{i}"), 53, Protocol.UDP) for i in (1, 2))
    with socket_of(bench["pod"]) as s, bench.site.pinned("services") as services:
        assert answer(s)[0] == "one"
        kept, other = services.lookup(web), services.lookup(dns)
        assert kept is not None
        assert other is not None
        services.update(web, other)
        try:
            directly = [(bench["one"].ip, 8080)] if answers else []
            assert answer(s, *directly) == ("one", ("10.96.0.1", 53))
        finally:
            services.update(web, kept)


def test_idle_flow_chooses_a_new_backend(bench: Bench):
    bench.serve(bench.udp(WEB, "one", serving="one two"))
    pod = bench["pod"]
    for by, next_ in ((0, "one"), (FLOW_IDLE_NS, "two")):
        bench.serve(bench.udp(WEB, "one", serving="one two"))
        with socket_of(pod) as s:
            assert answer(s)[0] == "one"
            bench.serve(bench.udp(WEB, "two", serving="one two"))
            age(bench, s, by)
            assert answer(s)[0] == next_


def socket_of(place: Place, kind: int = socket.SOCK_DGRAM) -> socket.socket:
    """A socket that a process of that place created, for this process to use."""
    here, there = socket.socketpair()

    def make() -> None:
        with socket.socket(socket.AF_INET, kind) as made:
            socket.send_fds(there, [b"-"], [made.fileno()])

    with here, there:
        within(place, make)
        _, (received, *_), _, _ = socket.recv_fds(here, 1, 1)
    return socket.socket(fileno=received)


def age(bench: Bench, s: socket.socket, by: int) -> None:
    """Makes this socket's first flow `by` nanoseconds older."""
    with bench.site.pinned("udp_flows") as flows:
        key = s.fileno().to_bytes(4, "little")
        value = flows.lookup(key)
        assert value is not None
        times = (max(0, used - by) for used in struct.unpack_from("=QQQ", value, 8))
        flows.update(key, value[:8] + struct.pack("=QQQ", *times) + value[32:])


def answer(s: socket.socket, to: tuple[str, int] = ("10.96.0.1", 53)) -> tuple[str, Any]:
    """Sends a datagram there from an unconnected socket; returns the replying server and its
    address.
    """
    s.sendto(b"hello\n", to)
    return _receive(s)


def talk(s: socket.socket) -> tuple[str, Any]:
    """Sends a datagram from a connected socket; returns the replying server and its address."""
    s.send(b"hello\n")
    return _receive(s)


def _receive(s: socket.socket) -> tuple[str, Any]:
    s.settimeout(PATIENCE)
    data, sender = s.recvfrom(4096)
    return data.decode().split('"')[3], sender


@pytest.mark.parametrize("asks", [True, False], ids=["requests", "replies"])
def test_requests_and_replies_keep_a_flow_alive(bench: Bench, asks: bool):
    """As with conntrack, replies keep the flow alive as well."""
    one = (bench["one"].ip, 8080)
    bench.serve(bench.udp(WEB, "one", serving="one two"))
    with socket_of(bench["pod"]) as s:
        answer(s)
        age(bench, s, FLOW_IDLE_NS - 30 * 10**9)
        assert answer(s, *([] if asks else [one]))[1] == ("10.96.0.1", 53)
        age(bench, s, FLOW_IDLE_NS - 30 * 10**9)
        bench.serve(bench.udp(WEB, "two", serving="one two"))
        assert answer(s)[0] == "one"


def test_socket_connected_elsewhere_leaves_the_service(bench: Bench):
    bench.serve(bench.udp(WEB, "one"))
    plain = (bench["two"].ip, 8080)

    def dial() -> list[Any]:
        seen = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(PATIENCE)
            for to in (("10.96.0.1", 53), plain, ("10.96.0.1", 53), (bench["one"].ip, 8080)):
                s.connect(to)
                s.send(b"hello\n")
                data, sender = s.recvfrom(4096)
                seen.append((data.decode().split('"')[3], s.getpeername(), sender))
        return seen

    service_seen, one = ("10.96.0.1", 53), (bench["one"].ip, 8080)
    assert within(bench["pod"], dial) == [
        ("one", service_seen, service_seen),
        ("two", plain, plain),
        ("one", service_seen, service_seen),
        ("one", one, one),
    ]


NOWHERE = "255.255.255.255"  # the kernel refuses connect() to it without SO_BROADCAST
FAILURES = {
    "a Service without endpoints": ("10.96.0.7",),
    "a backend without a route": ("10.96.0.8",),
    "an address without a route": (NOWHERE,),
    "one after the other": ("10.96.0.8", NOWHERE, "10.96.0.8", "10.96.0.7"),
}


@needs("set_retval")
@pytest.mark.parametrize("failures", FAILURES.values(), ids=FAILURES)
def test_failed_connect_keeps_the_peer(bench: Bench, failures: tuple[str, ...]):
    """The kernel keeps the association, so the socket still shows the Service and ends with its
    backend.
    """
    others = (
        service("empty", "10.96.0.7:53", "", Protocol.UDP),
        service("unreachable", "10.96.0.8:53", f"{NOWHERE}:53", Protocol.UDP),
    )
    bench.serve(bench.udp(WEB, "one"), *others)
    with socket_of(bench["pod"]) as s:
        s.connect(("10.96.0.1", 53))
        assert answer(s)[0] == "one"
        for address in failures:
            assert s.connect_ex((address, 53))
        assert s.getpeername() == ("10.96.0.1", 53)
        assert talk(s) == answer(s) == ("one", ("10.96.0.1", 53))
        bench.serve(bench.udp(WEB, "two"), *others)
        with pytest.raises(OSError, match="Destination address required"):
            s.send(b"hello\n")


@pytest.mark.parametrize("address", ["{one}", "10.96.0.2"], ids=["its backend", "another Service"])
def test_second_connect_shows_the_second_peer(bench: Bench, address: str):
    """Both destinations have the same backend."""
    bench.serve(bench.udp(WEB, "one"), bench.udp(DNS, "one"))
    to = (address.format(one=bench["one"].ip), 8080 if address == "{one}" else 53)
    with socket_of(bench["pod"]) as s:
        s.connect(("10.96.0.1", 53))
        s.connect(to)
        assert s.getpeername() == to
        bench.serve(bench.udp(WEB, "two"), bench.udp(DNS, "one"))
        assert talk(s) == ("one", to), (
            "it no longer belongs to the Service whose backend was deleted"
        )


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM], ids=["udp", "tcp"])
def test_closed_connected_socket_is_freed(bench: Bench, kind: int):
    protocol = Protocol.UDP if kind == socket.SOCK_DGRAM else Protocol.TCP
    bench.serve(service("s", WEB, bench.to("one"), protocol))

    def dial() -> dict[str, int]:
        with socket.socket(socket.AF_INET, kind) as s:
            s.connect(("10.96.0.1", 53))
            return bench.held()

    assert within(bench["pod"], dial) == {"sock_peers": 1}
    until("it is freed", lambda: bench.held() == {}, state=bench.held)


@pytest.mark.parametrize("cut", [False, True], ids=["", "after one was cut"])
@pytest.mark.parametrize("count", [1, 2, 5, 31])
def test_closed_socket_frees_all_its_flows(bench: Bench, count: int, cut: bool):
    """Each Service has its own backend, so that each flow has its own way back."""
    pod, names = bench["pod"], ("one", "two", "three")
    several = [
        bench.udp(f"10.96.1.{i + 1}:53", names[i % 3]) if i < 3
        else service(f"x{i}", f"10.96.1.{i + 1}:53", f"{bench['one'].ip}:{9000 + i}", Protocol.UDP)
        for i in range(count)
    ]  # fmt: skip
    bench.serve(*several)

    def send() -> tuple[dict[str, int], dict[str, int]]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for i in range(count):
                s.sendto(b"", (f"10.96.1.{i + 1}", 53))
            before = bench.held()
            if cut:
                middle = count // 2
                bench.serve(*several[:middle], *several[middle + 1 :])
            return before, bench.held()

    before, after = within(pod, send)
    assert before == after == {"udp_flows": min(count, FLOWS_PER_SOCKET)}
    until("it is freed", lambda: bench.held() == {}, state=bench.held)


# ---- the end of a backend ----------------------------------------------------------------------


class End(NamedTuple):
    """What happens after `one` served a Service."""

    name: str
    then: Callable[[Bench], tuple[ServiceState, ...]]
    next: str  # the server that gets the next datagram of an unconnected socket


ENDS = [
    End("another backend", lambda g: (g.udp(WEB, "two"),), "two"),
    End("zero endpoints", lambda g: (g.udp(WEB, ""),), "ECONNREFUSED"),
    End("only an unready endpoint", lambda g: (g.udp(WEB, "", serving=""),), "ECONNREFUSED"),
    End("the Service is deleted", lambda _: (), ""),
]


@pytest.mark.parametrize("client", ["pod", "host"])
@pytest.mark.parametrize("row", ENDS, ids=lambda row: row.name)
def test_connected_sockets_of_a_deleted_backend_are_destroyed(bench: Bench, row: End, client: str):
    """In every network namespace, idle ones included, but only those connected to this Service."""
    bench.serve(bench.udp(WEB, "one"), bench.udp(DNS, "one"))
    place = bench[client]
    assert place.udp("10.96.0.1", 53, keep="via", connected=True)["name"] == "one"
    assert place.udp("10.96.0.2", 53, keep="other", connected=True)["name"] == "one"
    assert place.udp(bench["one"].ip, 8080, keep="plain", connected=True)["name"] == "one"
    bench.plane.take_udp_cuts()
    bench.serve(*row.then(bench), bench.udp(DNS, "one"))
    assert [look.flows for look in bench.plane.take_udp_cuts()] == [{4: 1}]
    assert place.ask("talk", keep="via").get("error") in CUT
    assert place.ask("talk", keep="other").get("name") == "one", "another Service's socket lives"
    assert place.ask("talk", keep="plain").get("name") == "one", "it never used a Service"
    for keep in ("via", "other", "plain"):
        place.ask("drop", keep=keep)


@pytest.mark.parametrize("how", ["destroyed", "dissolved"])
def test_formerly_connected_socket_chooses_a_new_backend(bench: Bench, how: str):
    """The backend left and still serves another Service. (An IPv6 socket then receives only from
    its old peer: the kernel forgets that address for sending only.)
    """
    bench.serve(bench.udp(WEB, "one"), bench.udp(DNS, "one"))
    pod = bench["pod"]
    assert pod.udp("10.96.0.1", 53, keep="s", connected=True)["name"] == "one"
    if how == "dissolved":
        pod.ask("dissolve", keep="s")
        assert pod.udp("10.96.0.1", 53, keep="s")["name"] == "one", "as long as it serves"
    bench.serve(bench.udp(WEB, "two"), bench.udp(DNS, "one"))
    if how == "destroyed":
        assert pod.ask("hear", keep="s")["error"] in CUT
    answer = pod.udp("10.96.0.1", 53, keep="s")
    assert (answer.get("name"), answer.get("peer")) == ("two", ["10.96.0.1", 53])
    pod.ask("drop", keep="s")


def test_ipv6_and_mapped_connected_sockets_are_destroyed(bench: Bench):
    bench.serve(bench.udp(WEB, "one"), bench.udp(WEB6, "one"))
    pod = bench["pod"]
    assert pod.udp("fd00:96::1", 53, keep="v6", connected=True)["name"] == "one"
    assert pod.udp("::ffff:10.96.0.1", 53, keep="mapped", connected=True)["name"] == "one"
    bench.plane.take_udp_cuts()
    bench.serve(bench.udp(WEB, "two"), bench.udp(WEB6, "two"))
    assert [look.flows for look in bench.plane.take_udp_cuts()] == [{4: 1, 6: 1}]
    for keep in ("v6", "mapped"):
        assert pod.ask("talk", keep=keep).get("error") in CUT, keep
        pod.ask("drop", keep=keep)


def test_backend_that_serves_again_within_the_grace_period_keeps_its_new_sockets(bench: Bench):
    bench.serve(bench.udp(WEB, "one"))
    bench.serve(bench.udp(WEB, "two"))
    bench.serve(bench.udp(WEB, "one"))
    pod = bench["pod"]
    assert pod.udp("10.96.0.1", 53, keep="s", connected=True)["name"] == "one"
    bench.plane.flush()
    assert pod.ask("talk", keep="s").get("name") == "one"
    pod.ask("drop", keep="s")


def test_only_sockets_connected_to_the_deleted_backend_are_destroyed(bench: Bench):
    """Old kernels give the same cookie to sockets of several network namespaces. Then an unrelated
    socket may have the cookie of one that is to be destroyed.
    """
    bench.serve(bench.udp(WEB, "one two"))
    with socket_of(bench["pod"]) as s:
        s.connect(("10.96.0.1", 53))
        name, _ = answer(s)
        (other,) = {"one", "two"} - {name}
        with bench.site.pinned("sock_peers") as peers:
            key = s.fileno().to_bytes(4, "little")
            value = peers.lookup(key)
            assert value is not None
            address = V4_PREFIX + socket.inet_aton(bench[other].ip)
            peers.update(key, value[:28] + address + value[44:])
        bench.serve(bench.udp(WEB, name))
        s.send(b"hello\n")
        assert s.recv(4096).decode().split('"')[3] == name


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, marks=needs("set_retval") if row.next == "ECONNREFUSED" else (), id=row.name
        )
        for row in ENDS
    ],
)
def test_unconnected_sockets_of_a_deleted_backend_choose_again(bench: Bench, row: End):
    bench.serve(bench.udp(WEB, "one"))
    pod = bench["pod"]
    assert pod.udp("10.96.0.1", 53, keep="s")["name"] == "one"
    bench.plane.take_udp_cuts()
    bench.serve(*row.then(bench))
    (look,) = bench.plane.take_udp_cuts()
    assert look.flows == {4: 1}
    assert 0 < look.seconds < PATIENCE
    assert bench.plane.take_udp_cuts() == (), "each is returned once"
    bench.plane.flush()
    assert [look.flows for look in bench.plane.take_udp_cuts()] == [{4: 0}], (
        "the second pass finds none"
    )
    if row.next:
        answer = pod.udp("10.96.0.1", 53, keep="s")
        assert (answer.get("name") or answer.get("error")) == row.next
    bench.serve(bench.udp(WEB, "three"))
    answer = pod.udp("10.96.0.1", 53, keep="s")
    assert (answer.get("name"), answer.get("peer")) == ("three", ["10.96.0.1", 53])
    pod.ask("drop", keep="s")


def test_late_reply_of_a_deleted_backend_is_not_translated(bench: Bench):
    """The backend no longer speaks for the Service."""
    one = (bench["one"].ip, 8080)
    bench.serve(bench.udp(WEB, "one"), bench.udp(DNS, "one"))
    with socket_of(bench["pod"]) as s:
        service_seen = ("one", ("10.96.0.1", 53))
        assert [answer(s), answer(s, one)] == [service_seen, service_seen]
        bench.serve(bench.udp(WEB, "two"), bench.udp(DNS, "one"))
        assert answer(s, one) == ("one", one)


def test_terminating_backend_keeps_its_clients(bench: Bench):
    """It left the sets and still serves; kube-proxy leaves such flows alone."""
    bench.serve(bench.udp(WEB, "one"))
    pod = bench["pod"]
    pod.udp("10.96.0.1", 53, keep="connected", connected=True)
    pod.udp("10.96.0.1", 53, keep="loose")
    bench.serve(bench.udp(WEB, "two", serving="one two"))
    bench.plane.flush()
    assert pod.ask("talk", keep="connected")["name"] == "one"
    assert pod.udp("10.96.0.1", 53, keep="loose")["name"] == "one"
    assert pod.udp("10.96.0.1", 53)["name"] == "two"
    bench.serve(bench.udp(WEB, "two"))
    assert pod.ask("talk", keep="connected").get("error") in CUT
    assert pod.udp("10.96.0.1", 53, keep="loose")["name"] == "two"
    for keep in ("connected", "loose"):
        pod.ask("drop", keep=keep)


def test_tcp_connection_outlives_its_service(bench: Bench):
    bench.serve(service("web", "10.96.0.1:80", bench.to("one")))
    bench["pod"].tcp("10.96.0.1", 80, keep="t")
    bench.serve()
    bench.plane.flush()
    assert bench["pod"].ask("talk", keep="t")["name"] == "one"
    bench["pod"].ask("drop", keep="t")


def raise_error(*_: Any) -> None:
    raise KernelError("cannot write", "map", errno=errno.ENOMEM)


@pytest.mark.parametrize("fails", [False, True], ids=["", "an apply fails meanwhile"])
def test_connect_during_a_flip_is_cut_with_the_old_set(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """connect() read the frontend before the flip and finished after the first pass."""
    bench.serve(bench.udp(WEB, "one"))
    with bench.site.pinned("services") as services:
        ((key, old),) = services.items()
        bench.serve(bench.udp(WEB, "two"))
        new = services.lookup(key)
        assert new not in (None, old)
        services.update(key, old)
        assert bench["pod"].udp("10.96.0.1", 53, keep="s", connected=True)["name"] == "one"
        services.update(key, new or b"")
    if fails:
        state = desired(bench.udp(WEB, "two"), bench.udp(DNS, "one"))
        with monkeypatch.context() as patch:
            patch.setattr(commit, "write", raise_error)
            with pytest.raises(KernelError):
                bench.plane.apply(state, state.services.keys())
        bench.plane.apply(state, state.services.keys(), authoritative=False)
    bench.plane.flush()
    reply = bench["pod"].ask("talk", keep="s")
    bench["pod"].ask("drop", keep="s")
    assert reply.get("error") in CUT


def test_next_agent_cuts_sockets_of_backends_deleted_meanwhile(bench: Bench):
    """A backend was deleted while no agent ran."""
    bench.serve(bench.udp(WEB, "one"), bench.udp(DNS, "one"))
    pod = bench["pod"]
    pod.udp("10.96.0.1", 53, keep="gone", connected=True)
    pod.udp("10.96.0.2", 53, keep="stays", connected=True)
    pod.udp("10.96.0.1", 53, keep="loose")
    again = bench.site.open()
    assert pod.ask("talk", keep="gone")["name"] == "one", "not synced yet, so nothing is destroyed"
    state: DesiredState = desired(bench.udp(WEB, "two"), bench.udp(DNS, "one"))
    again.apply(state, None)
    assert pod.ask("talk", keep="gone").get("error") in CUT
    assert pod.ask("talk", keep="stays")["name"] == "one"
    assert pod.udp("10.96.0.1", 53, keep="loose")["name"] == "two"
    for keep in ("gone", "stays", "loose"):
        pod.ask("drop", keep=keep)
    again.apply(desired(), None)
    again.flush()
    bench.plane.close()
    bench.plane = bench.site.open()


FAILURES = [
    (BpfPlane, "_grow_for"),  # before the flip
    (commit, "write"),  # after it
    (BpfPlane, "_cut_udp"),
    (udp.UdpPasses, "advance"),
    (GraceQueue, "add"),  # after the first cut
]


@pytest.mark.parametrize("removed", [False, True], ids=["backend", "Service"])
@pytest.mark.parametrize(("where", "name"), FAILURES, ids=[name for _, name in FAILURES])
def test_sockets_are_cut_after_a_failed_apply(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, removed: bool
):
    """The next apply() cuts them, even if some object cannot be read."""
    dns, web = bench.udp(DNS, "one"), bench.udp(WEB, "two")
    bench.serve(bench.udp(WEB, "one"), dns)
    pod = bench["pod"]
    pod.udp("10.96.0.1", 53, keep="gone", connected=True)
    pod.udp("10.96.0.2", 53, keep="stays", connected=True)
    state = desired(dns) if removed else desired(web, dns)
    real = getattr(where, name)

    def fail(*arguments: Any, **more: Any) -> None:
        if name in ("write", "_grow_for"):
            real(*arguments, **more)
        raise_error()

    with monkeypatch.context() as patch:
        patch.setattr(where, name, fail)
        with pytest.raises(KernelError):
            bench.plane.apply(state, {web.key})
    bench.plane.apply(state, {web.key}, authoritative=False)
    bench.plane.flush()
    replies = [pod.ask("talk", keep=keep) for keep in ("gone", "stays")]
    for keep in ("gone", "stays"):
        pod.ask("drop", keep=keep)
    assert replies[0].get("error") in CUT
    assert replies[1]["name"] == "one"


def test_sendto_on_a_connected_socket_keeps_its_backend(bench: Bench):
    """The kernel drops replies from every address but the backend that connect() chose."""
    bench.serve(bench.udp(WEB, "one two three"))

    def dial() -> int:
        answered = 0
        for _ in range(40):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                s.settimeout(PATIENCE)
                s.connect(("10.96.0.1", 53))
                s.sendto(b"hello\n", ("10.96.0.1", 53))
                answered += bool(s.recv(4096))
        return answered

    assert within(bench["pod"], dial) == 40


MOVES = [
    ("the address goes to another Service", "192.0.2.9:53", "192.0.2.9:53"),
    ("the port changes", "192.0.2.9:53", "192.0.2.9:54"),
    ("the NodePort goes to another Service", "NodePort=0.0.0.0:30053", "NodePort=0.0.0.0:30053"),
]


@pytest.mark.parametrize("connected", [False, True], ids=["sendto", "connect"])
@pytest.mark.parametrize(("name", "old", "new"), MOVES, ids=[m[0] for m in MOVES])
def test_sockets_leave_a_frontend_that_moved(
    bench: Bench, name: str, old: str, new: str, connected: bool
):
    """Both Services and their backends stay; only the address has moved."""
    pod = bench["pod"]
    host = bench.node.ip if "NodePort" in old else "192.0.2.9"
    port = 30053 if "NodePort" in old else 53
    kind = "" if "NodePort" in old else "ExternalIP="

    def state(number: int, also: str) -> ServiceState:
        words = f"10.96.0.{number}:53 {kind}{also}" if also else f"10.96.0.{number}:53"
        where = bench.to("one" if number == 1 else "two")
        return service(f"moves{number}", words, where, Protocol.UDP)

    bench.serve(state(1, old), state(2, ""))
    assert pod.udp(host, port, keep="old", connected=connected)["name"] == "one"
    bench.serve(state(1, "" if old == new else new), state(2, new if old == new else ""))
    silent = {"timeout": 0.5} if old != new else {}
    again = pod.ask("talk", keep="old") if connected else pod.udp(host, port, keep="old", **silent)
    pod.ask("drop", keep="old")
    if connected:
        assert again["error"] in CUT
    elif old == new:
        assert again["name"] == "two"
    else:
        assert again.get("name") is None, "no Service has this frontend any more"
