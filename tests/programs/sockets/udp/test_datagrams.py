# SPDX-License-Identifier: Apache-2.0
"""Datagrams of unconnected and connected sockets, and which sender the client is shown. Rows of single ones:
test_connect.py.
"""

import socket
import struct

import pytest

from kbpf.dataplane.bpf.maps.layout import FLOWS_PER_SOCKET, Reason, pack_target
from kbpf.model.address import parse_addr
from kbpf.model.objects import Protocol
from tests.programs.sockets.udp.bench import (
    WEB,
    Bench,
    answer,
    edit,
    receive,
    socket_of,
    talk,
)
from tests.support.features import needs
from tests.support.lab.lab import until
from tests.support.plane import flush, service

FLOW_IDLE_NS = 120 * 10**9


def test_replies_in_any_order_show_their_frontend(bench: Bench):
    """Each reply shows the frontend that its request went to, not the one used last; a backend's own
    address is no frontend.
    """
    bench.web("one", dns="two")
    with socket_of(bench["pod"]) as s:
        ends = {"one": ("10.96.0.1", 53), "two": ("10.96.0.2", 53), "three": (bench["three"].ip, 8080)}
        for to in ends.values():
            s.sendto(b"hello\n", to)
        assert {receive(s) for _ in ends} == {*ends.items()}
        assert bench.held() == {"udp_flows": 2}


def test_reply_of_a_shared_backend_shows_the_last_used_frontend(bench: Bench):
    bench.web("one", dns="one")
    for host in ("10.96.0.1", "10.96.0.2", "10.96.0.1"):
        assert bench["pod"].udp(host, 53, keep="s")["peer"][0] == host
    bench["pod"].ask("drop", keep="s")


def test_connect_keeps_the_backend_of_earlier_datagrams(bench: Bench):
    bench.web("one two three")
    seen = set()
    for _ in range(30):
        with socket_of(bench["pod"]) as s:
            first = answer(s)
            s.connect(("10.96.0.1", 53))
            assert talk(s) == first
            seen.add(first[0])
    assert seen == {"one", "two", "three"}


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
    with socket_of(bench["pod"]) as s, bench.site.restored("services"):
        assert answer(s)[0] == "one"
        bench.site.put("services", web, bench.site.entries("services")[dns])
        directly = [(bench["one"].ip, 8080)] if answers else []
        assert answer(s, *directly) == ("one", ("10.96.0.1", 53))


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

    def older(raw: bytes) -> bytes:
        times = (max(0, used - by) for used in struct.unpack_from("=QQQ", raw, 8))
        return raw[:8] + struct.pack("=QQQ", *times) + raw[32:]

    edit(bench, "udp_flows", s, older)


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


@pytest.mark.parametrize("cut", [False, True], ids=["", "after one was cut"])
@pytest.mark.parametrize("count", [2, 31])
def test_closed_socket_frees_all_its_flows(bench: Bench, count: int, cut: bool):
    """Each Service has its own backend, so that each flow has its own way back."""
    to, used = bench["one"].ip, {"udp_flows": min(count, FLOWS_PER_SOCKET)}
    several = [service(f"x{i}", f"10.96.1.{i}:53", f"{to}:{9000 + i}", Protocol.UDP) for i in range(1, count + 1)]
    bench.serve(*several)
    with socket_of(bench["pod"]) as s:
        for i in range(1, count + 1):
            s.sendto(b"", (f"10.96.1.{i}", 53))
        assert bench.held() == used
        if cut:
            del several[count // 2]
            bench.serve(*several)
            assert bench.held() == used
    until("it is freed", lambda: bench.held() == {}, state=bench.held)
