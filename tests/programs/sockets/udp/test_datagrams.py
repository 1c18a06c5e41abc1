# SPDX-License-Identifier: Apache-2.0
"""Datagrams of unconnected and connected sockets, and which sender the client is shown."""

import errno
import socket
import struct
from typing import Any, NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import FLOWS_PER_SOCKET, Reason, pack_target
from kbpf.model.address import parse_addr
from kbpf.model.objects import Protocol
from tests.programs.sockets.udp.bench import (
    WEB,
    Bench,
    answer,
    socket_of,
    talk,
)
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, until
from tests.support.plane import flush, service, within
from tests.support.table import table

FLOW_IDLE_NS = 120 * 10**9


class Send(NamedTuple):
    """One datagram: its client, its destination, and the server that replies or the errno."""

    name: str
    client: str
    to: str
    gets: str = "one"


SENDS = table(
    Send,
    """
pod to ClusterIP               | pod  | 10.96.0.1:53
host to ClusterIP              | host | 10.96.0.1:53
pod to IPv6 ClusterIP          | pod  | [fd00:96::1]:53       | two
v4-mapped on an IPv6 socket    | pod  | [::ffff:10.96.0.1]:53
pod to NodePort                | pod  | {node}:30053
host to NodePort on loopback   | host | 127.0.0.1:30053
no endpoints                   | pod  | 10.96.0.3:53          | ECONNREFUSED
no endpoints, v4-mapped        | pod  | [::ffff:10.96.0.3]:53 | ECONNREFUSED
no endpoints, IPv6             | pod  | [fd00:96::3]:53       | ECONNREFUSED
internal Local, only elsewhere | pod  | 10.96.0.4:53          | ETIMEDOUT
a plain address                | pod  | {three}:8080          | three
a plain v4-mapped address      | pod  | [::ffff:{three}]:8080 | three
""",
)


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
    bench.web("one", dns="two")
    pod = bench["pod"]
    for host, name in 3 * (("10.96.0.1", "one"), ("10.96.0.2", "two"), (bench["three"].ip, "")):
        answer = pod.udp(host, 53 if name else 8080, keep="s")
        assert answer["name"] == (name or "three")
        assert answer["peer"][0] == host
    assert bench.held() == {"udp_flows": 2}
    pod.ask("drop", keep="s")


def test_replies_in_any_order_show_their_frontend(bench: Bench):
    """Each reply shows the frontend that its request went to, not the one used last."""
    bench.web("one", dns="two")

    def ask() -> dict[str, str]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(PATIENCE)
            for host in ("10.96.0.1", "10.96.0.2"):
                s.sendto(b"hello\n", (host, 53))
            answers = [s.recvfrom(4096) for _ in range(2)]
        return {sender[0]: data.decode().split('"')[3] for data, sender in answers}

    assert within(bench["pod"], ask) == {"10.96.0.1": "one", "10.96.0.2": "two"}


def test_reply_of_a_shared_backend_shows_the_last_used_frontend(bench: Bench):
    bench.web("one", dns="one")
    for host in ("10.96.0.1", "10.96.0.2", "10.96.0.1"):
        assert bench["pod"].udp(host, 53, keep="s")["peer"][0] == host
    bench["pod"].ask("drop", keep="s")


def test_connect_keeps_the_backend_of_earlier_datagrams(bench: Bench):
    bench.serve(bench.udp(WEB, "one two three"))

    def ask() -> tuple[str, ...]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(PATIENCE)
            s.sendto(b"hello\n", ("10.96.0.1", 53))
            first = s.recv(4096)
            s.connect(("10.96.0.1", 53))
            s.send(b"hello\n")
            return tuple(data.decode().split('"')[3] for data in (first, s.recv(4096)))

    pairs = {within(bench["pod"], ask) for _ in range(30)}
    assert pairs == {(name, name) for name in ("one", "two", "three")}


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
    bench.serve(bench.udp(WEB, " ".join({"one", "two", "three"} - {first}), serving="one two three"))
    flush(bench.plane)
    assert pod.udp("10.96.0.1", 53, keep="s")["name"] == first, "it left the set and still serves"
    assert first not in pod.many(30, "10.96.0.1", 53, protocol="udp")["names"]
    pod.ask("drop", keep="s")


@pytest.mark.parametrize("answers", [False, True], ids=["request", "reply"])
def test_value_of_another_frontend_ends_no_flow(bench: Bench, answers: bool):
    """The kernel may give the memory of an entry to another key while a program reads it."""
    bench.web("one", dns="two")
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
    bench.web("one", serving="one two")
    pod = bench["pod"]
    for by, next_ in ((0, "one"), (FLOW_IDLE_NS, "two")):
        bench.web("one", serving="one two")
        with socket_of(pod) as s:
            assert answer(s)[0] == "one"
            bench.web("two", serving="one two")
            age(bench, s, by)
            assert answer(s)[0] == next_


def age(bench: Bench, s: socket.socket, by: int) -> None:
    """Makes this socket's first flow `by` nanoseconds older."""
    with bench.site.pinned("udp_flows") as flows:
        key = s.fileno().to_bytes(4, "little")
        value = flows.lookup(key)
        assert value is not None
        times = (max(0, used - by) for used in struct.unpack_from("=QQQ", value, 8))
        flows.update(key, value[:8] + struct.pack("=QQQ", *times) + value[32:])


@pytest.mark.parametrize("asks", [True, False], ids=["requests", "replies"])
def test_requests_and_replies_keep_a_flow_alive(bench: Bench, asks: bool):
    """As with conntrack, replies keep the flow alive as well."""
    one = (bench["one"].ip, 8080)
    bench.web("one", serving="one two")
    with socket_of(bench["pod"]) as s:
        answer(s)
        age(bench, s, FLOW_IDLE_NS - 30 * 10**9)
        assert answer(s, *([] if asks else [one]))[1] == ("10.96.0.1", 53)
        age(bench, s, FLOW_IDLE_NS - 30 * 10**9)
        bench.web("two", serving="one two")
        assert answer(s)[0] == "one"


def test_socket_connected_elsewhere_leaves_the_service(bench: Bench):
    bench.web("one")
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
    bench.web("one", dns="one")
    to = (address.format(one=bench["one"].ip), 8080 if address == "{one}" else 53)
    with socket_of(bench["pod"]) as s:
        s.connect(("10.96.0.1", 53))
        s.connect(to)
        assert s.getpeername() == to
        bench.web("two", dns="one")
        assert talk(s) == ("one", to), "it no longer belongs to the Service whose backend was deleted"


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
        bench.udp(f"10.96.1.{i + 1}:53", names[i % 3])
        if i < 3
        else service(f"x{i}", f"10.96.1.{i + 1}:53", f"{bench['one'].ip}:{9000 + i}", Protocol.UDP)
        for i in range(count)
    ]
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
