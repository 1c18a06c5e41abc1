# SPDX-License-Identifier: Apache-2.0
"""Events of packets, as they happen: `kbpf monitor`. A row is what packets do at a VIP, and the
events that must be seen of them.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import REFUSAL_LIMIT, U32, NodeFlag, RefusalLimit
from tests.programs.packets.path.single_packets import (
    CLIENT,
    CLUSTER,
    IP,
    LOCAL,
    LOW,
    NET,
    NODE,
    NONE,
    PORTS,
    REMOTE,
    RESTRICTED,
    Path_,
    ask,
    client,
    end,
    pod,
    vip,
)
from tests.programs.packets.path.test_account_packets import OPEN, play
from tests.support.lab.events import left_behind, read, watched
from tests.support.packets.packets import tcp, udp

HOUR = 3600 * 10**9


def syn(path: Path_, v: int, which: int) -> None:
    path.ingress(tcp(client(v), vip(v, which), flags="S"))


def story(segments: str) -> Callable[[Path_, int, int], None]:
    return lambda path, v, which: play(path, v, which, segments) and None


def datagrams(path: Path_, v: int, which: int) -> None:
    own = client(v)
    for _ in range(3):
        path.ingress(udp(own, vip(v, which), b"question"))


def unknown_port(path: Path_, v: int, which: int) -> None:
    path.ingress(tcp(client(v), vip(v, which)[:-2] + "81", flags="S"))


def repeated(path: Path_, v: int, which: int) -> None:
    own = client(v)
    for pause in (0, 0.6, 0.6):
        time.sleep(pause)
        path.ingress(tcp(own, vip(v, which), flags="S", seq=1))


def beyond_the_limit(path: Path_, v: int, which: int) -> None:
    """The second refusal is one too many."""
    with path.site.pinned("refusal_limits") as limits:
        key = U32.pack(RefusalLimit.RESET)
        before = limits.lookup(key) or b""
        limits.update(key, REFUSAL_LIMIT.pack(0, HOUR, 1))
        try:
            syn(path, v, which)
            syn(path, v, which)
        finally:
            limits.update(key, before)


def without_ports(path: Path_, v: int, which: int) -> None:
    """An established connection has the only port of the node."""
    path.delete_flows()
    path.node(NodeFlag(0), LOW, LOW)
    play(path, v, which, OPEN + "A+100 <A+1000")
    syn(path, v, which)


class Row(NamedTuple):
    """`has_backend`: whether the last event names the backend; `names`: or the Service."""

    name: str
    does: Callable[[Path_, int, int], None]
    which: int
    events: str
    has_backend: bool = True
    names: bool = True


NEW = "new new_flow"
ROWS = (
    Row("a connection", story(OPEN + "A+100 <A+1000 FA <FA A"), CLUSTER, NEW),
    Row("a connection that keeps its source", story(OPEN), LOCAL, NEW),
    Row("datagrams", datagrams, LOCAL, NEW),
    Row("no endpoints", syn, NONE, "refused no_endpoints", False),
    Row(
        "a datagram, no endpoints",
        lambda path, v, which: path.ingress(ask(client(v), vip(v, which))) and None,
        NONE,
        "refused no_endpoints",
        False,
    ),
    Row("only elsewhere", syn, REMOTE, "dropped no_local_endpoints", False),
    Row("not in the source ranges", syn, RESTRICTED, "dropped not_allowed", False),
    Row("no such port", unknown_port, IP, "refused unknown_port", False, False),
    Row("refused by the backend", story("S <RA"), CLUSTER, f"{NEW}, failed backend_refused"),
    Row("reset by the backend", story(OPEN + "A+100 <A+50 <R"), CLUSTER, f"{NEW}, failed backend_reset"),
    Row("not answered", repeated, CLUSTER, f"{NEW}, failed backend_unanswered"),
    Row("too many refusals", beyond_the_limit, NONE, "refused no_endpoints, dropped rate_limited", False),
    Row("no port of the node", without_ports, CLUSTER, f"{NEW}, dropped no_snat_port"),
    Row("another port of a VIP", unknown_port, CLUSTER, ""),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_events_are_seen(path: Path_, v: int, row: Row):
    with watched(path.site) as monitor:
        row.does(path, v, row.which)
        events = read(monitor)
        assert monitor.left_out == 0
    assert ", ".join(f"{e.verdict} {e.reason}" for e in events) == row.events
    for event in events:
        assert (event.client_kind, event.seen_by) == ("address", "packet")
        assert event.client == event.address
        assert CLIENT[v] in event.client
        assert f"{NET[v]}{row.which}" in event.frontend
        assert event.backend == (pod(v) if row.has_backend else "")
        assert event.service.startswith(f"default/s{row.which}-" if row.names else "")
    assert left_behind(path.site) == []


def test_packets_of_known_flows_are_no_events(path: Path_, v: int):
    play(path, v, LOCAL, OPEN)
    own = client(v)
    path.ingress(ask(own, vip(v, LOCAL)))
    with watched(path.site) as monitor:
        for _ in range(5):
            path.ingress(ask(own, vip(v, LOCAL)))
        assert read(monitor) == []


def test_socket_of_the_node_without_a_route_is_dropped(path: Path_, v: int):
    """There is no route to the backend's network, so the first packet is dropped."""
    own = end(NODE[v], next(PORTS))
    with watched(path.site) as monitor:
        path.egress(tcp(own, vip(v, CLUSTER), flags="S"))
        events = [(event.verdict, event.reason, event.address) for event in read(monitor)]
    assert events == [("new", "new_flow", own), ("dropped", "no_route", own)]
