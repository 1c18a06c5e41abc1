# SPDX-License-Identifier: Apache-2.0
"""The search for an SNAT port, and its reuse."""

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator

import pytest

from kbpf.dataplane.bpf.maps.flow_entries import DIRECTION, FINS, STATE, flow_key
from kbpf.dataplane.bpf.maps.layout import (
    DOUBTFUL_PORTS,
    FLOW,
    PORT_SLOT,
    FinFlag,
    FlowDirection,
    NodeFlag,
    Reason,
    TcpState,
    pack_target,
)
from kbpf.model.address import parse_addr
from tests.programs.packets.path.single_packets import (
    ALL_KINDS,
    CLIENT,
    CLUSTER,
    IP,
    LOCAL,
    MASKED,
    NODE,
    POD,
    PORTS,
    ROUTER,
    SPARE_PORTS,
    TAKEN_PORT,
    Flow,
    Path_,
    _id,
    ask,
    client,
    end,
    established,
    host_of,
    parsed,
    pod,
    port_of,
    set_only_port,
    vip,
)
from tests.support.packets.murmur import murmur3
from tests.support.packets.packets import Talk, fragments, tcp, udp
from tests.support.packets.shares import SEED, ports_of
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC

# ---- ports of the node ---------------------------------------------------------------------------


def fill_ports(path: Path_, v: int, ports: Iterable[int], **fields: object) -> None:
    """Adds established connections to the pod that hold these node ports."""
    now = time.monotonic_ns()
    backend, node = (pack_target(parse_addr(host), port, 6) for host, port in ((POD[v], 8080), (NODE[v], 0)))
    other = pack_target(parse_addr(ROUTER[v]), 9, 6)
    with path.site.pinned("flows") as flows:
        for port in ports:
            number = port.to_bytes(2, "big")
            value = FLOW.pack(
                fields.get("used", now),
                other,
                backend,
                backend,
                node[:16],
                number,
                number,
                0,
                0,
                fields.get("state", TcpState.ESTABLISHED),
                fields.get("fins", 0),
                0,
                2,
                0,
                bytes(32),
                0,
                0,
                bytes(48),
            )
            flows.update(flow_key(backend, node[:16] + number + node[18:]), value)


def new_flow_port(path: Path_, v: int, own: str = "") -> int:
    """The node port that a SYN of this client, or of a new one, gets; 0: none."""
    verdict, inside = path.ingress(Flow(path, v, own=own).packet("S"))
    if verdict == TC_ACT_SHOT:
        return 0
    return port_of(parsed(path.egress(inside)[1]).source)


def established_port(path: Path_, v: int, host: str) -> int:
    """The same for a connection that keeps its port."""
    if port := new_flow_port(path, v, end(host, next(PORTS))):
        fill_ports(path, v, [port])
    return port


@contextlib.contextmanager
def no_flows(path: Path_) -> Iterator[None]:
    """Deletes all flows before and after."""
    path.site.clear("flows")
    try:
        yield
    finally:
        path.site.clear("flows")
        with path.site.pinned("port_slots") as slots:
            for key, _ in list(slots.items()):
                slots.update(key, bytes(PORT_SLOT.size))


NEIGHBOURS = {4: [CLIENT[4]], 6: [f"2001:db8:9::{n:x}" for n in range(1, 100)]}
"""Clients that have one common share of the ports: IPv6 clients of one network."""


def test_client_is_limited_to_its_share_of_ports(path: Path_, v: int):
    """All addresses of an IPv6 network have one common share. Another client still gets most of
    its share.
    """
    low, high = 40_000, 41_023
    path.node(NodeFlag(0), low, high)
    mine = set(ports_of(CLIENT[v], low, high))
    assert len(mine) == 256
    with no_flows(path):
        hosts = itertools.cycle(NEIGHBOURS[v])
        given = {established_port(path, v, next(hosts)) for _ in range(200)}
        while given < mine:  # a search tries half of so few ports
            given |= {established_port(path, v, next(hosts))} - {0}
        assert given == mine, "the whole share"
        with path.counted(Reason.NO_SNAT_PORT, 9):
            assert {new_flow_port(path, v, end(next(hosts), next(PORTS))) for _ in range(9)} == {0}
        others = set(ports_of(ROUTER[v], low, high))
        assert 140 < len(others - mine) < 240, "about three quarters are no one else's"
        given = {established_port(path, v, ROUTER[v]) for _ in range(128)}
        assert len(given) == 128
        assert given <= others - mine


REUSABLE = {
    "free": None,
    "closed": {"state": TcpState.CLOSED, "fins": FinFlag.CLIENT | FinFlag.BACKEND},
    "a handshake of two seconds": {"state": TcpState.ANSWERED, "age": 2},
    "reset by the client": {"state": TcpState.CLOSED, "fins": FinFlag(0), "age": 11},
}


def test_port_in_time_wait_at_the_backend_is_not_the_first_choice(path: Path_, v: int):
    """The client's own port would be. Many clients may share one address of the node, each with
    its own timestamps.
    """
    low, high = 40_000, 41_023
    path.node(NodeFlag(0), low, high)
    port = ports_of(CLIENT[v], low, high)[7]
    both_sides = FinFlag.CLIENT | FinFlag.BACKEND
    for fins, is_first_choice in ((both_sides | FinFlag.BACKEND_FIRST, False), (both_sides, True)):
        with no_flows(path):
            fill_ports(path, v, [port], state=TcpState.CLOSED, fins=fins)
            given = new_flow_port(path, v, end(CLIENT[v], port))
            assert (given == port) == is_first_choice


def test_port_search_ends_in_the_largest_range(path: Path_, v: int):
    """The kernel ends a chain of tail calls at 33; the search must end before."""
    low, high = 1024, 65_535
    path.node(NodeFlag(0), low, high)
    with no_flows(path):
        fill_ports(
            path, v, ports_of(CLIENT[v], low, high), state=TcpState.ANSWERED, used=time.monotonic_ns() + 60 * 10**9
        )
        with path.counted(Reason.NO_SNAT_PORT, 0):
            assert new_flow_port(path, v) != 0


def test_last_free_or_reusable_port_is_found(path: Path_, v: int):
    """Any of 112 ports is found, and so are ports that connections give up."""
    low, high = 40_000, 40_111
    path.node(NodeFlag(0), low, high)
    mine = range(low, high + 1)
    with no_flows(path):
        fill_ports(path, v, mine)
        for number, (kind, fields) in enumerate(REUSABLE.items()):
            port = mine[number * 28]
            if fields is None:
                node = end(NODE[v], port)
                Flow(path, v, own=end(ROUTER[v], 9)).change(lambda _: b"", lambda both: node in both)  # noqa: B023
            else:
                used = time.monotonic_ns() - int(fields.get("age", 0)) * 10**9
                fill_ports(path, v, [port], **{"used": max(used, 0), **fields})
            assert new_flow_port(path, v) == port, kind
            fill_ports(path, v, [port])
        closed = {"state": TcpState.CLOSED}
        rows = ((60, {"state": TcpState.UNPROVEN}), (60, {"state": TcpState.CLOSING}), (-60, closed))
        for age_, fields in rows:
            used = time.monotonic_ns() - age_ * 10**9
            fill_ports(path, v, [mine[99]], used=used, **fields)
            assert new_flow_port(path, v) == 0, "the backend may have a connection"


@pytest.mark.parametrize(("age_", "given"), [(2, True), (-60, False)])
def test_ports_of_denied_handshakes_are_the_last_choice(path: Path_, v: int, age_: int, given: bool):
    """The backend seems to have older connections from all ports. Forged SYNs can make it look so:
    a SYN-ACK to one looks like that if another one came first.
    """
    low, high = 40_000, 40_111
    path.node(NodeFlag(0), low, high)
    with no_flows(path):
        fill_ports(
            path,
            v,
            range(low, high + 1),
            state=TcpState.NEW,
            fins=FinFlag.RESERVED,
            used=time.monotonic_ns() - age_ * 10**9,
        )
        assert (new_flow_port(path, v) != 0) == given


def test_first_fragments_hold_their_port_like_a_datagram(path: Path_, v: int):
    """The kernel would wait for the other fragments before it stored anything. Here they hold their
    port as any unanswered datagram does: for 30 s, in which it may still be answered.
    """
    set_only_port(path)
    flow = Flow(path, v)
    for _ in range(3):
        number = next(PORTS)
        whole = udp(flow.own, flow.front, os.urandom(2000), **_id(v, number))
        path.through(fragments(whole, 1280, id=number)[0])
        flow.age(3)
    assert flow.states() == {TcpState.NEW}
    for seconds, given in ((20, False), (10, True)):  # after the 3 s before
        flow.age(seconds)
        other = Flow(path, v)
        path.ingress(other.packet("?"))
        assert (flow.entries() == []) == given
        assert len(other.entries()) == 3 * given


def test_port_slot_held_by_another_cpu_is_left_alone(path: Path_, v: int):
    only_port = set_only_port(path)
    established(path, v).send("FA <FA A")
    with path.site.pinned("port_slots") as slots:
        for holders, given in ((1, 0), (0, only_port)):
            for key, _ in list(slots.items()):
                slots.update(key, PORT_SLOT.pack(holders, 0))
            assert new_flow_port(path, v) == given
        assert {PORT_SLOT.unpack(raw)[0] for _, raw in slots.items()} == {0}, "no CPU holds one"


@pytest.mark.parametrize(
    ("script", "age_", "given"),
    [("S", 30, True), ("S <SA", 30, True), ("S <SA R", 30, True), ("S <SA R", -60, False), ("S <SA A", 30, False)],
)
def test_handshake_at_another_frontend_locks_no_client_out(path: Path_, v: int, script: str, age_: int, given: bool):
    """The same backend sees the client's own port of both. There is one other port, where another
    such flow is. Whoever forges SYNs of the client can make both.
    """
    only_port, own = set_only_port(path), client(v)
    for source in (own, client(v, only_port)):
        Flow(path, v, IP, source).send(script).age(age_)
    verdict, _ = path.ingress(tcp(own, vip(v, LOCAL), flags="S", seq=5))
    assert (verdict == TC_ACT_UNSPEC) == given
    path.site.clear("flows")


SOCKETS = [
    "tcp: a server",
    "tcp: a server on all addresses",
    "tcp: a connection",
    "udp: a server",
    "udp: a server on all addresses",
    "udp: a connected socket",
]


@pytest.mark.parametrize("row", SOCKETS)
def test_port_of_a_socket_of_the_node_is_left_alone(uplink: Path_, v: int, row: str):
    """A backend may be a machine, and its port the one from which it talks to a server of the node.
    The server would lose what it is sent to a client with its port.
    """
    protocol, is_any, connects = row[:3], "all addresses" in row, "connect" in row
    number = next(SPARE_PORTS), next(SPARE_PORTS)

    def taken() -> socket.socket:
        made = socket.socket(
            socket.AF_INET if v == 4 and not is_any else socket.AF_INET6,
            socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM,
        )
        made.setblocking(False)
        made.bind(("::" if is_any else NODE[v], number[0]))
        if connects:
            made.connect_ex((POD[v], 8080))
        elif protocol == "tcp":
            made.listen()
        return made

    own, to_server = client(v, number[0]), (pod(v), end(NODE[v], number[0]))
    begins, sent = {
        "tcp": (tcp(own, vip(v, CLUSTER), flags="S"), tcp(*to_server, b"secret", flags="PA", seq=7000, ack=9000)),
        "udp": (ask(own, vip(v, CLUSTER)), udp(*to_server, b"secret")),
    }[protocol]
    uplink.node(NodeFlag(0), *number)
    with uplink.inside(taken):
        verdict, got = uplink.ingress(begins)
        uplink.expect_untouched(sent)
    assert (verdict, parsed(got).source) == (TC_ACT_REDIRECT, end(NODE[v], number[1]))
    uplink.site.clear("flows")


@pytest.mark.parametrize("kind", ["tcp", "udp", "sctp"])
def test_port_of_a_frontend_is_left_alone(uplink: Path_, v: int, kind: str):
    """For the same reason: the backend may be a client of that frontend."""
    uplink.node(NodeFlag(0), TAKEN_PORT, TAKEN_PORT + 9)
    _, got = uplink.ingress(ALL_KINDS[kind](client(v, TAKEN_PORT), vip(v, CLUSTER)))
    assert host_of(parsed(got).source) == NODE[v]
    assert TAKEN_PORT < port_of(parsed(got).source) <= TAKEN_PORT + 9
    uplink.site.clear("flows")


def test_recently_active_client_keeps_its_port(path: Path_, v: int):
    """The entry for its replies may show an older time."""
    set_only_port(path)
    flow = Flow(path, v).send("S <SA A")
    flow.age(-60)

    def older(raw: bytes) -> bytes:
        old = struct.pack("=Q", time.monotonic_ns() - 3 * 10**9)
        changed = old + raw[8:STATE] + bytes([TcpState.NEW]) + raw[STATE + 1 :]
        return changed if raw[DIRECTION] == FlowDirection.SNAT_REPLY else raw

    flow.change(older)
    assert new_flow_port(path, v) == 0
    assert len(flow.entries()) == 3


@pytest.mark.parametrize(("script", "gives"), [("S", True), ("S <SA", True), ("S <SA A", False), ("S <SA A <A", False)])
def test_handshake_gives_up_its_port_when_none_is_free(path: Path_, v: int, script: str, gives: bool):
    """The range has one port, as if a flood had taken all others. A handshake gives its port to a
    new client; one that has acknowledged the backend's number keeps it until it expires.
    """
    only_port = set_only_port(path)
    flow = Flow(path, v).send(script)
    flow.age(-60)  # so that it stays young, however long this test takes
    assert new_flow_port(path, v) == only_port * gives
    assert (flow.entries() == []) == gives


LIVES = {"nothing": "A", "one side closes": "A FA"}
WAYS = LIVES | {
    "both close, the client first": "FA <FA A",
    "both close, the backend first": "<FA FA <A",
    "the client resets": "R",
    "the backend resets": "<RA",
}


@pytest.mark.parametrize("way", WAYS)
def test_port_of_an_ended_connection_is_reused(path: Path_, v: int, way: str):
    """The range has one port. That of an ended connection is reused, and before other ports are
    tried unless the backend closed first: then it still has the port in TIME_WAIT. A client's reset
    may have been lost on its way to the backend: then the port is reserved for 10 s.
    """
    only_port = set_only_port(path)
    flow = established(path, v)
    assert flow.source == end(NODE[v], only_port)
    flow.send(WAYS[way])
    flow.age(-60)  # so that it stays young, however long this takes
    first = {FinFlag(FLOW.unpack(raw)[10]) & FinFlag.BACKEND_FIRST for raw in flow.entries()}
    reserved = way in LIVES or way == "the client resets"
    with path.counted(Reason.NO_SNAT_PORT, reserved):
        assert new_flow_port(path, v) == (0 if reserved else only_port)
    if way == "the client resets":
        flow.age(71)
        assert new_flow_port(path, v) == only_port
    assert first == {FinFlag.BACKEND_FIRST if "backend first" in way else FinFlag(0)}
    assert (flow.entries() == []) == (way not in LIVES), "all old entries are deleted"


def test_port_outside_a_changed_range_is_not_reused(path: Path_, v: int):
    """After a change of the range, sockets of the node may use ports of the old one."""
    only_port, other = next(SPARE_PORTS), next(SPARE_PORTS)
    path.node(NodeFlag(0), only_port, only_port)
    flow = established(path, v).send("FA <FA A")
    path.node(NodeFlag(0), other, other)
    assert flow.send("S").source == end(NODE[v], other)
    assert len(flow.entries()) == 3, "all old entries are deleted"


def test_port_of_a_replaced_connection_is_reserved(path: Path_, v: int):
    """A SYN, its answer and a reset, all forged: the backend may still have the connection."""
    only_port = set_only_port(path)
    flow = established(path, v)
    flow.talk = Talk(1 << 30, 3 << 30)
    assert flow.send("S <SA A <RA").states() == {TcpState.CLOSED}
    assert new_flow_port(path, v) == 0
    flow.age(121)
    assert new_flow_port(path, v) == only_port


def test_a_reservation_ends_though_the_backend_sends(path: Path_, v: int):
    """Otherwise a backend could hold ports for ever: no other entry of the flow is left."""
    flow = Flow(path, v).send("?")

    def reservation(raw: bytes) -> bytes:
        fins = bytes([raw[FINS] | FinFlag.RESERVED])
        return raw[:FINS] + fins + raw[FINS + 1 :] if raw[DIRECTION] == FlowDirection.SNAT_REPLY else b""

    flow.change(reservation)
    answer = flow.packet("<!")
    for _ in range(2):
        flow.age(14)
        assert parsed(path.ingress(answer)[1]).destination == flow.own
    flow.age(14)
    assert path.ingress(answer)[1] == answer


@pytest.mark.parametrize("before", ["S <A|", "S <SA <A!|"], ids=["its ACK is the answer", "after a forged answer"])
def test_client_gets_another_port_than_the_backend_has(path: Path_, v: int, before: str):
    """The backend has an old connection from the first one, and says so by its ACK."""
    flow = Flow(path, v).send(before)
    flow.age(2)
    flow.talk = Talk()
    flow.send("S <SA A A+ <A")
    assert len(flow.sources) == 2
    ports = {port_of(flow.source): TcpState.ESTABLISHED}
    held = {FLOW.unpack(raw)[5]: raw[STATE] for raw in flow.entries() if raw[DIRECTION] == FlowDirection.SNAT_REPLY}
    assert {int.from_bytes(port, "big"): state for port, state in held.items()} == ports


def place_of(v: int, backend_port: int, port: int) -> tuple[int, int]:
    """Where the doubt about this port of the node is kept if the secret is 0: doubt_of()."""
    backend = murmur3(pack_target(parse_addr(POD[v]), backend_port, socket.IPPROTO_TCP), SEED)
    value = murmur3(struct.pack("!H2x", port), backend, 24)
    return 1 + value // 16 % (DOUBTFUL_PORTS - 1), value % 16


@pytest.mark.parametrize("is_secret", [True, False])
def test_a_tenant_puts_no_port_of_anothers_backend_in_doubt(path: Path_, v: int, is_secret: bool):
    """The tenant's own backend has ports whose doubts would be kept at the same places without a secret."""
    mine = {place_of(v, 80, port): port for port in range(1024, 65536)}
    theirs = {place_of(v, 8080, port): port for port in range(20_000, 50_000)}
    place = min(mine.keys() & theirs.keys())
    path.node(NodeFlag(0), mine[place], mine[place])
    flow = Flow(path, v, MASKED)
    flow.back = pod(v, 80)
    with path.site.pinned("doubtful_ports") as doubts, contextlib.ExitStack() as stack:
        secret = doubts.lookup(bytes(4)) or b""
        assert len(set(secret)) > 16, "random bytes"
        stack.callback(doubts.update, bytes(4), secret)
        if not is_secret:
            doubts.update(bytes(4), bytes(len(secret)))
        flow.send("S <SA A A+ <A")
        flow.talk = Talk(1 << 30, 3 << 30)
        flow.send("S <SA A A+ <A FA <FA A")
        path.through(Talk(5, 6).segment("S", flow.own, flow.front))
        path.site.clear("flows")
        path.node(NodeFlag(0), theirs[place], theirs[place])
        verdict, _ = path.ingress(tcp(client(v), vip(v, CLUSTER), flags="S"))
    assert (verdict == TC_ACT_SHOT) != is_secret
