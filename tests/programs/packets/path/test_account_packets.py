# SPDX-License-Identifier: Apache-2.0
"""What is told of single packets: statistics of flows by Service and backend, to the byte; failures;
and events, as `kbpf monitor` shows them.

A row is the packets of a connection in order, each run through both programs as on its way. Bytes
are counted from the IP header on.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.map_metrics import NO_BACKEND
from kbpf.dataplane.bpf.maps.layout import (
    CONFIG,
    COUNTS,
    PACKET_FAILURES_PER_CLIENT,
    REFUSAL_LIMIT,
    U32,
    U32_PAIR,
    ConfigFlag,
    NodeFlag,
    RefusalLimit,
)
from kbpf.model.metrics import ConnectionStats
from kbpf.views import failures as failures_view
from tests.programs.packets.path.single_packets import (
    CLIENT,
    CLUSTER,
    IP,
    LOCAL,
    LOW,
    NET,
    NONE,
    REMOTE,
    Flow,
    Path_,
    Vip,
    ask,
    client,
    end,
    parsed,
    pod,
    vip,
)
from tests.support.lab.events import left_behind, read, watched
from tests.support.packets.packets import tcp, udp
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_UNSPEC
from tests.support.table import table


@pytest.fixture(autouse=True)
def full(path: Path_) -> Iterator[None]:
    set_flags(path, ConfigFlag.COUNT_CONNECTION_ENDS)
    yield
    set_flags(path, ConfigFlag(0))


def set_flags(path: Path_, flags: ConfigFlag) -> None:
    """Switches counting of connection ends: on with `--accounting full`, off with `connections`."""
    with path.site.pinned("config") as config:
        netns, have, share = CONFIG.unpack(config.lookup(U32.pack(0)))
        config.update(U32.pack(0), CONFIG.pack(netns, have & ~ConfigFlag.COUNT_CONNECTION_ENDS | flags, share))


def read_counts(path: Path_, v: int, which: int, protocol: str = "tcp") -> dict[bool, ConnectionStats]:
    """The counters of a Service port in one family, by whether the connection got a backend."""
    names = path.site.service_ports()
    found = {True: ConnectionStats(), False: ConnectionStats()}
    for key, raw in path.site.entries("counts").items():
        service, backend = U32_PAIR.unpack(key)
        if (names[service].name, names[service].family) == (f"s{which}-{protocol}", v):
            found[backend != NO_BACKEND] = ConnectionStats(*COUNTS.unpack(raw))
    return found


def minus(after: ConnectionStats, before: ConnectionStats) -> ConnectionStats:
    return ConnectionStats(*(a - b for a, b in zip(after, before, strict=True)))


class Story(NamedTuple):
    """Segments in the notation of packets.Talk; what they count once each, beside bytes; and the event
    that is seen and recorded, if they fail. How many of each side's last segments are not counted yet.
    """

    name: str
    which: Vip
    segments: str
    adds: str
    failure: str = ""
    uncounted: int = 0
    uncounted_back: int = 0


OPEN = "S <SA A "
NEW = "new new_flow"
STORIES = table(
    Story,
    """
in order | CLUSTER | S <SA A A+100 <A+1000 FA <FA A | opened ended |  | 1
in order, the backend first | LOCAL | S <SA A A+7 <FA+900 FA <A | opened ended |  | 0 | 1
refused by the backend | CLUSTER | S <RA | opened ended refused | failed backend_refused
reset by it | CLUSTER | S <SA A A+9 <A+50 <R | opened ended reset | failed backend_reset
reset by it, Local | LOCAL | S <SA A A+9 <A+5 <R | opened ended reset | failed backend_reset
reset by the client | CLUSTER | S <SA A A+100 <A+50 R | opened ended
still open | LOCAL | S <SA A A+100 <A+50 | opened |  | 3 | 2
repeated SYN | LOCAL | S S <SA A FA <FA A | opened ended |  | 1
no endpoints | NONE | S | no_endpoint | refused no_endpoints
not allowed | RESTRICTED | S | not_allowed | dropped not_allowed
""",
)


def play(path: Path_, v: int, which: int, story: str) -> tuple[list[int], list[int]]:
    """Lengths of the client's and of the backend's packets as they arrived."""
    flow = Flow(path, v, which)
    lengths: tuple[list[int], list[int]] = ([], [])
    before = ""
    for word in story.split():
        if word == before == "S":
            flow.age(-60)  # it is repeated at once, however long this takes
        before = word
        back = word.startswith("<")
        packet = flow.packet(word)
        lengths[back].append(len(packet))
        _, out = path.through(packet)
        if not back:
            flow.source = parsed(out).source
    return lengths


def recorded(path: Path_) -> list[tuple[str, str, str, int]]:
    """Service, reason, client and count of the failures that packets have caused."""
    rows = failures_view.build_rows(snapshot.read(path.site.pins, failures_view.NEEDS))
    return [(row.service, row.reason, row.client, row.count) for row in rows]


@contextmanager
def expect_events(path: Path_, v: int, which: int, events: str, backend: bool = True, service: bool = True):
    """Events that are seen of the packets in the block; whether each has a backend and a Service."""
    with watched(path.site) as monitor:
        yield
        found = read(monitor)
        assert monitor.left_out == 0
    assert ", ".join(f"{e.verdict} {e.reason}" for e in found) == events
    for event in found:
        assert (event.client_kind, event.seen_by) == ("address", "packet")
        assert event.client == event.address
        assert CLIENT[v] in event.client
        assert f"{NET[v]}{which}" in event.frontend
        assert event.backend == (pod(v) if backend else "")
        assert event.service.startswith(f"default/s{which}-" if service else "")
    assert left_behind(path.site) == []


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_segments_add_their_counts_and_are_seen(path: Path_, v: int, story: Story):
    path.site.clear("failures")
    before, begins = read_counts(path, v, story.which), "opened" in story.adds
    events = ", ".join(filter(None, (NEW * begins, story.failure)))
    with expect_events(path, v, story.which, events, backend=begins):
        sent = play(path, v, story.which, story.segments)
    after = read_counts(path, v, story.which)
    there, back = (sum(lengths[: len(lengths) - late]) * begins for lengths, late in zip(sent, story[-2:], strict=True))
    adds = dict.fromkeys(story.adds.split(), 1)
    assert minus(after[begins], before[begins]) == ConnectionStats(**adds, bytes_in=there, bytes_out=back)
    assert after[not begins] == before[not begins]
    (*reasons,) = story.failure.split()[1:]
    found = recorded(path)
    assert [row[:2] for row in found] == [(f"default/s{story.which}-tcp", reason) for reason in reasons]
    assert all(row[2:] == (CLIENT[v], 1) for row in found)


def test_bytes_of_an_open_connection_are_counted(path: Path_, v: int):
    before = read_counts(path, v, LOCAL)
    there, _ = play(path, v, LOCAL, OPEN + "A+1400 " * 200)
    added = minus(read_counts(path, v, LOCAL)[True], before[True])
    assert 0 <= sum(there) - added.bytes_in < 256 << 10
    assert added.bytes_in >= 256 << 10


def test_entry_of_a_packet_that_takes_the_stack_late_begins_with_no_bytes(uplink: Path_, v: int):
    """The flow bypasses the stack until a segment arrives whose TTL expires. The entry that is then
    added matches replies to the client's own address.
    """
    flow, before = Flow(uplink, v), read_counts(uplink, v, CLUSTER)
    for word, ttl in (*((word, 64) for word in (*OPEN.split(), "A+700")), ("A+7", 1)):
        retval, got = uplink.ingress(flow.packet(word, ttl=ttl))
        assert retval == (TC_ACT_UNSPEC if ttl == 1 else TC_ACT_REDIRECT)
        flow.source = flow.source or parsed(got).source
    flow.source = flow.own
    reply = flow.packet("<FA+10")
    uplink.ingress(reply)
    added = minus(read_counts(uplink, v, CLUSTER)[True], before[True])
    assert added.bytes_out == len(reply)


def test_bytes_of_datagrams_are_counted(path: Path_, v: int):
    own, size = client(v), 0
    before = read_counts(path, v, LOCAL, "udp")
    for _ in range(10):
        question = udp(own, vip(v, LOCAL), bytes(500))
        size += len(question)
        path.through(question)
    added = minus(read_counts(path, v, LOCAL, "udp")[True], before[True])
    assert added.opened == 1
    assert 4 << 10 <= added.bytes_in <= size


CLIENTS = {4: "198.51.100.{}", 6: "2001:db8:9:{}::1"}
"""IPv4 addresses, or addresses in IPv6 networks of 64 bits."""


def test_a_client_overwrites_only_its_share_of_the_failures_of_packets(path: Path_, v: int):
    """One that tries all ports hides those of a sixteenth of the others, here a few of 32."""
    path.site.clear("failures")
    others = {CLIENTS[v].format(number) for number in range(100, 132)}
    for other in others:
        path.ingress(tcp(end(other, 5), vip(v, NONE), flags="S"))
    scanner = CLIENTS[v].format(7)
    for port in range(1000, 3000):
        path.ingress(tcp(end(scanner, 5), end(f"{NET[v]}{IP}", port), flags="S"))
    found = recorded(path)
    own = [row for row in found if row[2] == scanner]
    assert {row[1] for row in own} == {"unknown_port"}
    assert PACKET_FAILURES_PER_CLIENT // 2 < len(own) <= PACKET_FAILURES_PER_CLIENT
    assert len(others & {row[2] for row in found}) >= len(others) * 3 // 4


def test_a_syn_that_is_not_answered_in_time_is_recorded_once(path: Path_, v: int):
    path.site.clear("failures")
    before, own = read_counts(path, v, CLUSTER), client(v)
    with expect_events(path, v, CLUSTER, f"{NEW}, failed backend_unanswered"):
        for pause in (0, 0.6, 0.6):
            time.sleep(pause)
            path.ingress(tcp(own, vip(v, CLUSTER), flags="S", seq=1))
    assert minus(read_counts(path, v, CLUSTER)[True], before[True]).unanswered == 1
    assert [row[1] for row in recorded(path)] == ["backend_unanswered"]


def test_default_accounting_counts_opened_connections(path: Path_, v: int):
    set_flags(path, ConfigFlag(0))
    before = read_counts(path, v, CLUSTER)
    play(path, v, CLUSTER, OPEN + "A+100 <A+1000 FA <FA A")
    assert minus(read_counts(path, v, CLUSTER)[True], before[True]) == ConnectionStats(opened=1)


# ---- events of other packets ---------------------------------------------------------------------


def syn(path: Path_, v: int, which: int, port: str = "80") -> None:
    path.ingress(tcp(client(v), vip(v, which)[:-2] + port, flags="S"))


def datagrams(path: Path_, v: int, which: int) -> None:
    own = client(v)
    for _ in range(3):
        path.ingress(ask(own, vip(v, which)))


def beyond_the_limit(path: Path_, v: int, which: int) -> None:
    """The second refusal is one too many."""
    with path.site.restored("refusal_limits"):
        path.site.put("refusal_limits", U32.pack(RefusalLimit.RESET), REFUSAL_LIMIT.pack(0, 3600 * 10**9, 1))
        syn(path, v, which)
        syn(path, v, which)


def without_ports(path: Path_, v: int, which: int) -> None:
    """An established connection has the only port of the node."""
    path.site.clear("flows")
    path.node(NodeFlag(0), LOW, LOW)
    play(path, v, which, OPEN + "A+100 <A+1000")
    syn(path, v, which)


Does = Callable[[Path_, int, int], None]
OTHERS: dict[str, tuple[Does, int, str, dict[str, bool]]] = {
    "datagrams": (datagrams, LOCAL, NEW, {}),
    "only elsewhere": (syn, REMOTE, "dropped no_local_endpoints", {"backend": False}),
    "no such port": (partial(syn, port="81"), IP, "refused unknown_port", {"backend": False, "service": False}),
    "too many refusals": (beyond_the_limit, NONE, "refused no_endpoints, dropped rate_limited", {"backend": False}),
    "no port of the node": (without_ports, CLUSTER, f"{NEW}, dropped no_snat_port", {}),
    "another port of a VIP": (partial(syn, port="81"), CLUSTER, "", {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_events_are_seen(path: Path_, v: int, name: str):
    does, which, events, has = OTHERS[name]
    with expect_events(path, v, which, events, **has):
        does(path, v, which)
