"""UDP: datagrams of unconnected sockets, connected ones, and the end of what they hold.

Real sockets of pods behind the hooks. Every backend answers with its name, so a test sees who got
a datagram and what sender the client was shown.
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

from kbpf.dataplane.bpf.maps.layout import FLOWS_PER_SOCKET, UDP_FLOW, Reason, pack_target
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.model.address import V4_PREFIX, parse_addr
from kbpf.model.desired import DesiredState, ServiceState
from kbpf.model.objects import Protocol
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, Node, Place, until
from tests.support.plane import Site, desired, service, sites, within

SOCKET_MAPS = ("sock_peers", "udp_flows")
CUT = ("ECONNABORTED", "EDESTADDRREQ")  # what a destroyed socket's owner gets, by what it calls
FLOW_IDLE_NS = 120 * 10**9
WEB, WEB6, DNS = "10.96.0.1:53", "[fd00:96::1]:53", "10.96.0.2:53"


@dataclass
class Ground:
    """A data plane with its pods: `pod` and `other` dial, `one`, `two` and `three` serve."""

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
        """The plane makes exactly these true; nothing is retired yet."""
        self.plane.apply(desired(*services, nodes=f"{self.node.ip} {self.node.ip6}"), None)
        until("the sockets of what has left are ended", self._is_done, state=self.held)

    def _is_done(self) -> bool:
        """They are ended in slices, of which a busy machine needs more than one."""
        now = time.monotonic()
        due = self.plane.tick(now)
        return due is None or due > now

    def held(self) -> dict[str, int]:
        """How many sockets have a peer, and how many flows there are of all sockets."""
        flows = sum(map(flows_in, self.site.entries("udp_flows").values()))
        found = {"sock_peers": len(self.site.entries("sock_peers")), "udp_flows": flows}
        return {name: count for name, count in found.items() if count}


def flows_in(raw: bytes) -> int:
    """How many places of a struct udp_flows are taken."""
    return sum(bool(frontend[18]) for _, _, _, frontend, *_ in UDP_FLOW.iter_unpack(raw[8:]))


@pytest.fixture(scope="module")
def whole(node: Node, artifact_cache: Path) -> Iterator[Ground]:
    pods = {name: node.pod(name) for name in ("pod", "other", "one", "two", "three")}
    for name in ("one", "two", "three"):
        pods[name].serve(8080, udp=(8080,))
    with sites(artifact_cache) as make:
        site = make(cgroup=node.cgroup, node=node.netns)
        yield Ground(node, site, site.open(), {**pods, "host": node.host})


@pytest.fixture
def ground(whole: Ground) -> Iterator[Ground]:
    """Nothing is programmed, and afterwards no socket is remembered."""
    whole.serve()
    whole.plane.flush()
    assert whole.held() == {}
    yield whole
    until("all sockets are forgotten", lambda: whole.held() == {}, state=whole.held)


class Send(NamedTuple):
    """One datagram: from whom, to where; who answers."""

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
    """What a row needs of the kernel: to be answered by the hook itself, to know the host."""
    return (
        *([needs("set_retval")] if row.gets in errno.errorcode.values() else []),
        *([needs("netns_cookie")] if row.to.startswith("127.") else []),
    )


@pytest.mark.parametrize("connected", [False, True], ids=["sendto", "connect"])
@pytest.mark.parametrize("row", [pytest.param(row, marks=marks(row), id=row.name) for row in SENDS])
def test_datagram(ground: Ground, row: Send, connected: bool):
    """recvfrom() shows whom the client asked, getpeername() too; the backend sees the client."""
    ground.serve(
        ground.udp("10.96.0.1:53 NodePort=0.0.0.0:30053", "one"),
        ground.udp("[fd00:96::1]:53", "two"),
        ground.udp("10.96.0.3:53", ""),
        ground.udp("[fd00:96::3]:53", ""),
        ground.udp("10.96.0.4:53", "one", internal_local=True),
    )
    to = row.to.format(node=ground.node.ip, three=ground["three"].ip)
    host, _, port = to.rpartition(":")
    host = host.strip("[]")
    client = ground[row.client]
    answer = client.udp(host, int(port), connected=connected)
    if row.gets in errno.errorcode.values():
        assert answer == {"error": row.gets, "at_once": True}
        return
    assert answer.get("name") == row.gets, answer
    assert answer["peer"] == [host, int(port)], "recvfrom() shows whom it asked"
    if connected:
        assert answer["getpeername"] == [host, int(port)]
    if row.client == "pod":
        assert answer["client"] in (client.ip, client.ip6), "the backend sees the client itself"


def test_one_socket_talks_to_several_services(ground: Ground):
    ground.serve(ground.udp(WEB, "one"), ground.udp(DNS, "two"))
    pod = ground["pod"]
    for host, name in 3 * (("10.96.0.1", "one"), ("10.96.0.2", "two"), (ground["three"].ip, "")):
        answer = pod.udp(host, 53 if name else 8080, keep="s")
        assert answer["name"] == (name or "three")
        assert answer["peer"][0] == host
    assert ground.held() == {"udp_flows": 2}
    pod.ask("drop", keep="s")


def test_answers_may_come_in_any_order(ground: Ground):
    """Each shows the frontend that was asked, not the one asked last."""
    ground.serve(ground.udp(WEB, "one"), ground.udp(DNS, "two"))

    def ask() -> dict[str, str]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(PATIENCE)
            for host in ("10.96.0.1", "10.96.0.2"):
                s.sendto(b"hello\n", (host, 53))
            answers = [s.recvfrom(4096) for _ in range(2)]
        return {sender[0]: data.decode().split('"')[3] for data, sender in answers}

    assert within(ground["pod"], ask) == {"10.96.0.1": "one", "10.96.0.2": "two"}


def test_of_two_frontends_with_one_backend_the_newest_question_wins(ground: Ground):
    ground.serve(ground.udp(WEB, "one"), ground.udp(DNS, "one"))
    for host in ("10.96.0.1", "10.96.0.2", "10.96.0.1"):
        assert ground["pod"].udp(host, 53, keep="s")["peer"][0] == host
    ground["pod"].ask("drop", keep="s")


def test_a_flow_stays_with_its_backend_while_that_serves(ground: Ground):
    three = ground.udp(WEB, "one two three")
    ground.serve(three)
    pod = ground["pod"]
    before = ground.site.reasons()
    first = pod.udp("10.96.0.1", 53, keep="s")["name"]
    assert {pod.udp("10.96.0.1", 53, keep="s")["name"] for _ in range(30)} == {first}
    counted = ground.site.reasons() - before
    assert counted[Reason.TRANSLATED] == 1
    assert counted[Reason.TRANSLATED_BY_FLOW] == 30
    assert len(pod.many(60, "10.96.0.1", 53, protocol="udp")["names"]) == 3, "fresh ones spread"
    ground.serve(
        ground.udp(WEB, " ".join({"one", "two", "three"} - {first}), serving="one two three")
    )
    ground.plane.flush()
    assert pod.udp("10.96.0.1", 53, keep="s")["name"] == first, "it left the set and still serves"
    assert first not in pod.many(30, "10.96.0.1", 53, protocol="udp")["names"]
    pod.ask("drop", keep="s")


@pytest.mark.parametrize("answers", [False, True], ids=["question", "answer"])
def test_the_value_of_another_frontend_cuts_no_flow(ground: Ground, answers: bool):
    """The kernel may give the memory of an entry to another key while a program reads it."""
    ground.serve(ground.udp(WEB, "one"), ground.udp(DNS, "two"))
    web, dns = (pack_target(parse_addr(f"10.96.0.{i}"), 53, Protocol.UDP) for i in (1, 2))
    with socket_of(ground["pod"]) as s, ground.site.pinned("services") as services:
        assert answer(s)[0] == "one"
        kept, other = services.lookup(web), services.lookup(dns)
        assert kept is not None
        assert other is not None
        services.update(web, other)
        try:
            directly = [(ground["one"].ip, 8080)] if answers else []
            assert answer(s, *directly) == ("one", ("10.96.0.1", 53))
        finally:
            services.update(web, kept)


def test_a_flow_that_was_idle_too_long_chooses_anew(ground: Ground):
    ground.serve(ground.udp(WEB, "one", serving="one two"))
    pod = ground["pod"]
    for by, next_ in ((0, "one"), (FLOW_IDLE_NS, "two")):
        ground.serve(ground.udp(WEB, "one", serving="one two"))
        with socket_of(pod) as s:
            assert answer(s)[0] == "one"
            ground.serve(ground.udp(WEB, "two", serving="one two"))
            age(ground, s, by)
            assert answer(s)[0] == next_


def socket_of(place: Place, kind: int = socket.SOCK_DGRAM) -> socket.socket:
    """A socket as a process of that place has made it, for this one to use."""
    here, there = socket.socketpair()

    def make() -> None:
        with socket.socket(socket.AF_INET, kind) as made:
            socket.send_fds(there, [b"-"], [made.fileno()])

    with here, there:
        within(place, make)
        _, (received, *_), _, _ = socket.recv_fds(here, 1, 1)
    return socket.socket(fileno=received)


def age(ground: Ground, s: socket.socket, by: int) -> None:
    """Makes this socket's first flow older (ns)."""
    with ground.site.pinned("udp_flows") as flows:
        key = s.fileno().to_bytes(4, "little")
        value = flows.lookup(key)
        assert value is not None
        times = (max(0, used - by) for used in struct.unpack_from("=QQQ", value, 8))
        flows.update(key, value[:8] + struct.pack("=QQQ", *times) + value[32:])


def answer(s: socket.socket, to: tuple[str, int] = ("10.96.0.1", 53)) -> tuple[str, Any]:
    """Who answers a datagram to there, and as whom."""
    s.sendto(b"hello\n", to)
    return _receive(s)


def talk(s: socket.socket) -> tuple[str, Any]:
    """Who answers a connected socket, and as whom."""
    s.send(b"hello\n")
    return _receive(s)


def _receive(s: socket.socket) -> tuple[str, Any]:
    s.settimeout(PATIENCE)
    data, sender = s.recvfrom(4096)
    return data.decode().split('"')[3], sender


@pytest.mark.parametrize("asks", [True, False], ids=["that asks", "that only listens"])
def test_a_flow_is_used_by_questions_and_answers(ground: Ground, asks: bool):
    """As conntrack has it: what comes back keeps it alive as well."""
    one = (ground["one"].ip, 8080)
    ground.serve(ground.udp(WEB, "one", serving="one two"))
    with socket_of(ground["pod"]) as s:
        answer(s)
        age(ground, s, FLOW_IDLE_NS - 30 * 10**9)
        assert answer(s, *([] if asks else [one]))[1] == ("10.96.0.1", 53)
        age(ground, s, FLOW_IDLE_NS - 30 * 10**9)
        ground.serve(ground.udp(WEB, "two", serving="one two"))
        assert answer(s)[0] == "one"


def test_a_socket_that_connects_elsewhere_forgets_the_service(ground: Ground):
    ground.serve(ground.udp(WEB, "one"))
    plain = (ground["two"].ip, 8080)

    def dial() -> list[Any]:
        seen = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(PATIENCE)
            for to in (("10.96.0.1", 53), plain, ("10.96.0.1", 53), (ground["one"].ip, 8080)):
                s.connect(to)
                s.send(b"hello\n")
                data, sender = s.recvfrom(4096)
                seen.append((data.decode().split('"')[3], s.getpeername(), sender))
        return seen

    service_seen, one = ("10.96.0.1", 53), (ground["one"].ip, 8080)
    assert within(ground["pod"], dial) == [
        ("one", service_seen, service_seen),
        ("two", plain, plain),
        ("one", service_seen, service_seen),
        ("one", one, one),
    ]


NOWHERE = "255.255.255.255"  # the kernel refuses connect() to it without SO_BROADCAST
FAILURES = {
    "a Service without endpoints": ("10.96.0.7",),
    "a backend without a way there": ("10.96.0.8",),
    "an address without a way there": (NOWHERE,),
    "one after the other": ("10.96.0.8", NOWHERE, "10.96.0.8", "10.96.0.7"),
}


@needs("set_retval")
@pytest.mark.parametrize("failures", FAILURES.values(), ids=FAILURES)
def test_a_connect_that_fails_leaves_the_peer_as_it_was(ground: Ground, failures: tuple[str, ...]):
    """The kernel keeps the association: so it shows the Service, and ends with its backend."""
    others = (
        service("empty", "10.96.0.7:53", "", Protocol.UDP),
        service("unreachable", "10.96.0.8:53", f"{NOWHERE}:53", Protocol.UDP),
    )
    ground.serve(ground.udp(WEB, "one"), *others)
    with socket_of(ground["pod"]) as s:
        s.connect(("10.96.0.1", 53))
        assert answer(s)[0] == "one"
        for address in failures:
            assert s.connect_ex((address, 53))
        assert s.getpeername() == ("10.96.0.1", 53)
        assert talk(s) == answer(s) == ("one", ("10.96.0.1", 53))
        ground.serve(ground.udp(WEB, "two"), *others)
        with pytest.raises(OSError, match="Destination address required"):
            s.send(b"hello\n")


@pytest.mark.parametrize("address", ["{one}", "10.96.0.2"], ids=["its backend", "another Service"])
def test_a_socket_that_connects_twice_shows_the_second_peer(ground: Ground, address: str):
    """Both have the same backend."""
    ground.serve(ground.udp(WEB, "one"), ground.udp(DNS, "one"))
    to = (address.format(one=ground["one"].ip), 8080 if address == "{one}" else 53)
    with socket_of(ground["pod"]) as s:
        s.connect(("10.96.0.1", 53))
        s.connect(to)
        assert s.getpeername() == to
        ground.serve(ground.udp(WEB, "two"), ground.udp(DNS, "one"))
        assert talk(s) == ("one", to), "it has left the Service whose backend has gone"


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM], ids=["udp", "tcp"])
def test_closing_a_connected_socket_frees_it(ground: Ground, kind: int):
    protocol = Protocol.UDP if kind == socket.SOCK_DGRAM else Protocol.TCP
    ground.serve(service("s", WEB, ground.to("one"), protocol))

    def dial() -> dict[str, int]:
        with socket.socket(socket.AF_INET, kind) as s:
            s.connect(("10.96.0.1", 53))
            return ground.held()

    assert within(ground["pod"], dial) == {"sock_peers": 1}
    until("it is freed", lambda: ground.held() == {}, state=ground.held)


@pytest.mark.parametrize("cut", [False, True], ids=["", "after one of them was cut"])
@pytest.mark.parametrize("count", [1, 2, 5, 31])
def test_closing_frees_all_flows(ground: Ground, count: int, cut: bool):
    """Each Service has a backend of its own, so that each flow has a way back of its own."""
    pod, names = ground["pod"], ("one", "two", "three")
    several = [
        ground.udp(f"10.96.1.{i + 1}:53", names[i % 3]) if i < 3
        else service(f"x{i}", f"10.96.1.{i + 1}:53", f"{ground['one'].ip}:{9000 + i}", Protocol.UDP)
        for i in range(count)
    ]  # fmt: skip
    ground.serve(*several)

    def send() -> tuple[dict[str, int], dict[str, int]]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for i in range(count):
                s.sendto(b"", (f"10.96.1.{i + 1}", 53))
            before = ground.held()
            if cut:
                middle = count // 2
                ground.serve(*several[:middle], *several[middle + 1 :])
            return before, ground.held()

    before, after = within(pod, send)
    assert before == after == {"udp_flows": min(count, FLOWS_PER_SOCKET)}
    until("it is freed", lambda: ground.held() == {}, state=ground.held)


# ---- the end of a backend ----------------------------------------------------------------------


class End(NamedTuple):
    """What comes after a Service was served by `one`."""

    name: str
    then: Callable[[Ground], tuple[ServiceState, ...]]
    next: str  # who answers the next datagram of an unconnected socket


ENDS = [
    End("another backend", lambda g: (g.udp(WEB, "two"),), "two"),
    End("zero endpoints", lambda g: (g.udp(WEB, ""),), "ECONNREFUSED"),
    End("only an unready endpoint", lambda g: (g.udp(WEB, "", serving=""),), "ECONNREFUSED"),
    End("the Service is deleted", lambda _: (), ""),
]


@pytest.mark.parametrize("client", ["pod", "host"])
@pytest.mark.parametrize("row", ENDS, ids=lambda row: row.name)
def test_connected_sockets_are_destroyed(ground: Ground, row: End, client: str):
    """In every network namespace; also those that were idle. And only those of this Service."""
    ground.serve(ground.udp(WEB, "one"), ground.udp(DNS, "one"))
    place = ground[client]
    assert place.udp("10.96.0.1", 53, keep="via", connected=True)["name"] == "one"
    assert place.udp("10.96.0.2", 53, keep="other", connected=True)["name"] == "one"
    assert place.udp(ground["one"].ip, 8080, keep="plain", connected=True)["name"] == "one"
    ground.plane.take_udp_cuts()
    ground.serve(*row.then(ground), ground.udp(DNS, "one"))
    assert [look.flows for look in ground.plane.take_udp_cuts()] == [{4: 1}]
    assert place.ask("talk", keep="via").get("error") in CUT
    assert place.ask("talk", keep="other").get("name") == "one", "another Service's socket lives"
    assert place.ask("talk", keep="plain").get("name") == "one", "it never asked a Service"
    for keep in ("via", "other", "plain"):
        place.ask("drop", keep=keep)


@pytest.mark.parametrize("how", ["destroyed", "dissolved"])
def test_a_socket_that_was_connected_asks_the_service_anew(ground: Ground, how: str):
    """Its backend left, and serves another Service still. (An IPv6 socket hears nobody but its old
    peer then: the kernel forgets that address for sending only.)
    """
    ground.serve(ground.udp(WEB, "one"), ground.udp(DNS, "one"))
    pod = ground["pod"]
    assert pod.udp("10.96.0.1", 53, keep="s", connected=True)["name"] == "one"
    if how == "dissolved":
        pod.ask("dissolve", keep="s")
        assert pod.udp("10.96.0.1", 53, keep="s")["name"] == "one", "as long as it serves"
    ground.serve(ground.udp(WEB, "two"), ground.udp(DNS, "one"))
    if how == "destroyed":
        assert pod.ask("hear", keep="s")["error"] in CUT
    answer = pod.udp("10.96.0.1", 53, keep="s")
    assert (answer.get("name"), answer.get("peer")) == ("two", ["10.96.0.1", 53])
    pod.ask("drop", keep="s")


def test_ipv6_and_mapped_connected_sockets_are_destroyed(ground: Ground):
    ground.serve(ground.udp(WEB, "one"), ground.udp(WEB6, "one"))
    pod = ground["pod"]
    assert pod.udp("fd00:96::1", 53, keep="v6", connected=True)["name"] == "one"
    assert pod.udp("::ffff:10.96.0.1", 53, keep="mapped", connected=True)["name"] == "one"
    ground.plane.take_udp_cuts()
    ground.serve(ground.udp(WEB, "two"), ground.udp(WEB6, "two"))
    assert [look.flows for look in ground.plane.take_udp_cuts()] == [{4: 1, 6: 1}]
    for keep in ("v6", "mapped"):
        assert pod.ask("talk", keep=keep).get("error") in CUT, keep
        pod.ask("drop", keep=keep)


def test_a_socket_is_only_destroyed_when_its_peer_is_the_one_that_left(ground: Ground):
    """Cookies of old kernels are the same in several network namespaces: then a socket that is
    nobody's business has the number of one that is.
    """
    ground.serve(ground.udp(WEB, "one two"))
    with socket_of(ground["pod"]) as s:
        s.connect(("10.96.0.1", 53))
        name, _ = answer(s)
        (other,) = {"one", "two"} - {name}
        with ground.site.pinned("sock_peers") as peers:
            key = s.fileno().to_bytes(4, "little")
            value = peers.lookup(key)
            assert value is not None
            address = V4_PREFIX + socket.inet_aton(ground[other].ip)
            peers.update(key, value[:28] + address + value[44:])
        ground.serve(ground.udp(WEB, name))
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
def test_flows_of_unconnected_sockets_choose_anew(ground: Ground, row: End):
    ground.serve(ground.udp(WEB, "one"))
    pod = ground["pod"]
    assert pod.udp("10.96.0.1", 53, keep="s")["name"] == "one"
    ground.plane.take_udp_cuts()
    ground.serve(*row.then(ground))
    (look,) = ground.plane.take_udp_cuts()
    assert look.flows == {4: 1}
    assert 0 < look.seconds < PATIENCE
    assert ground.plane.take_udp_cuts() == (), "told once"
    ground.plane.flush()
    assert [look.flows for look in ground.plane.take_udp_cuts()] == [{4: 0}], (
        "the second look finds none"
    )
    if row.next:
        answer = pod.udp("10.96.0.1", 53, keep="s")
        assert (answer.get("name") or answer.get("error")) == row.next
    ground.serve(ground.udp(WEB, "three"))
    answer = pod.udp("10.96.0.1", 53, keep="s")
    assert (answer.get("name"), answer.get("peer")) == ("three", ["10.96.0.1", 53])
    pod.ask("drop", keep="s")


def test_a_late_answer_of_a_backend_that_left_is_not_dressed_up(ground: Ground):
    """Nothing says any more that it speaks for the Service."""
    one = (ground["one"].ip, 8080)
    ground.serve(ground.udp(WEB, "one"), ground.udp(DNS, "one"))
    with socket_of(ground["pod"]) as s:
        service_seen = ("one", ("10.96.0.1", 53))
        assert [answer(s), answer(s, one)] == [service_seen, service_seen]
        ground.serve(ground.udp(WEB, "two"), ground.udp(DNS, "one"))
        assert answer(s, one) == ("one", one)


def test_a_backend_that_is_only_terminating_keeps_its_clients(ground: Ground):
    """It left the sets and still serves: kube-proxy leaves its flows alone."""
    ground.serve(ground.udp(WEB, "one"))
    pod = ground["pod"]
    pod.udp("10.96.0.1", 53, keep="connected", connected=True)
    pod.udp("10.96.0.1", 53, keep="loose")
    ground.serve(ground.udp(WEB, "two", serving="one two"))
    ground.plane.flush()
    assert pod.ask("talk", keep="connected")["name"] == "one"
    assert pod.udp("10.96.0.1", 53, keep="loose")["name"] == "one"
    assert pod.udp("10.96.0.1", 53)["name"] == "two"
    ground.serve(ground.udp(WEB, "two"))
    assert pod.ask("talk", keep="connected").get("error") in CUT
    assert pod.udp("10.96.0.1", 53, keep="loose")["name"] == "two"
    for keep in ("connected", "loose"):
        pod.ask("drop", keep=keep)


def test_tcp_connections_live_on(ground: Ground):
    ground.serve(service("web", "10.96.0.1:80", ground.to("one")))
    ground["pod"].tcp("10.96.0.1", 80, keep="t")
    ground.serve()
    ground.plane.flush()
    assert ground["pod"].ask("talk", keep="t")["name"] == "one"
    ground["pod"].ask("drop", keep="t")


def test_a_connect_that_was_on_its_way_is_cut_with_the_old_set(ground: Ground):
    """It read the frontend before the flip and connected after the first cut."""
    ground.serve(ground.udp(WEB, "one"))
    with ground.site.pinned("services") as services:
        ((key, old),) = services.items()
        ground.serve(ground.udp(WEB, "two"))
        new = services.lookup(key)
        assert new not in (None, old)
        services.update(key, old)
        assert ground["pod"].udp("10.96.0.1", 53, keep="s", connected=True)["name"] == "one"
        services.update(key, new or b"")
    ground.plane.flush()
    assert ground["pod"].ask("talk", keep="s").get("error") in CUT
    ground["pod"].ask("drop", keep="s")


def test_what_a_dead_agent_could_not_cut_the_next_one_cuts(ground: Ground):
    """A backend left while no agent ran."""
    ground.serve(ground.udp(WEB, "one"), ground.udp(DNS, "one"))
    pod = ground["pod"]
    pod.udp("10.96.0.1", 53, keep="gone", connected=True)
    pod.udp("10.96.0.2", 53, keep="stays", connected=True)
    pod.udp("10.96.0.1", 53, keep="loose")
    again = ground.site.open()
    assert pod.ask("talk", keep="gone")["name"] == "one", "before it knows, it ends nothing"
    state: DesiredState = desired(ground.udp(WEB, "two"), ground.udp(DNS, "one"))
    again.apply(state, None)
    assert pod.ask("talk", keep="gone").get("error") in CUT
    assert pod.ask("talk", keep="stays")["name"] == "one"
    assert pod.udp("10.96.0.1", 53, keep="loose")["name"] == "two"
    for keep in ("gone", "stays", "loose"):
        pod.ask("drop", keep=keep)
    again.apply(desired(), None)
    again.flush()
    ground.plane.close()
    ground.plane = ground.site.open()


def test_a_connected_socket_that_names_the_service_again_stays_with_its_backend(ground: Ground):
    """The kernel drops answers of anybody but the backend that connect() chose."""
    ground.serve(ground.udp(WEB, "one two three"))

    def dial() -> int:
        answered = 0
        for _ in range(40):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                s.settimeout(PATIENCE)
                s.connect(("10.96.0.1", 53))
                s.sendto(b"hello\n", ("10.96.0.1", 53))
                answered += bool(s.recv(4096))
        return answered

    assert within(ground["pod"], dial) == 40


MOVES = [
    ("the address goes to another Service", "192.0.2.9:53", "192.0.2.9:53"),
    ("the port changes", "192.0.2.9:53", "192.0.2.9:54"),
    ("the NodePort goes to another Service", "NodePort=0.0.0.0:30053", "NodePort=0.0.0.0:30053"),
]


@pytest.mark.parametrize("connected", [False, True], ids=["sendto", "connect"])
@pytest.mark.parametrize(("name", "old", "new"), MOVES, ids=[m[0] for m in MOVES])
def test_sockets_do_not_follow_an_address_that_left(
    ground: Ground, name: str, old: str, new: str, connected: bool
):
    """Both Services and their backends live on; only the address has moved."""
    pod = ground["pod"]
    host = ground.node.ip if "NodePort" in old else "192.0.2.9"
    port = 30053 if "NodePort" in old else 53
    kind = "" if "NodePort" in old else "ExternalIP="

    def state(number: int, also: str) -> ServiceState:
        words = f"10.96.0.{number}:53 {kind}{also}" if also else f"10.96.0.{number}:53"
        where = ground.to("one" if number == 1 else "two")
        return service(f"moves{number}", words, where, Protocol.UDP)

    ground.serve(state(1, old), state(2, ""))
    assert pod.udp(host, port, keep="old", connected=connected)["name"] == "one"
    ground.serve(state(1, "" if old == new else new), state(2, new if old == new else ""))
    silent = {"timeout": 0.5} if old != new else {}
    again = pod.ask("talk", keep="old") if connected else pod.udp(host, port, keep="old", **silent)
    pod.ask("drop", keep="old")
    if connected:
        assert again["error"] in CUT
    elif old == new:
        assert again["name"] == "two"
    else:
        assert again.get("name") is None, "nobody serves there any more"
