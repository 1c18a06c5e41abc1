# SPDX-License-Identifier: Apache-2.0
"""Statistics of tracked flows by Service and backend, from single packets, to the byte.

A row is the packets of a connection in order, each run through both programs as on its way, and
what they must add to the counters. Bytes are counted from the IP header on.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.map_metrics import NO_BACKEND
from kbpf.dataplane.bpf.maps.layout import (
    CONFIG,
    COUNTS,
    PACKET_FAILURES_PER_CLIENT,
    U32,
    U32_PAIR,
    ConfigFlag,
    unpack_service_name,
)
from kbpf.model.metrics import ConnectionStats
from kbpf.views import failures as failures_view
from tests.programs.packets.path.single_packets import (
    CLUSTER,
    IP,
    LOCAL,
    NET,
    NONE,
    RESTRICTED,
    Path_,
    age,
    both_policies,
    client,
    end,
    parsed,
    pod,
    vip,
)
from tests.support.packets.packets import Talk, tcp, udp
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_UNSPEC


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
    names = {U32.unpack(k)[0]: unpack_service_name(raw) for k, raw in path.site.entries("service_names").items()}
    found = {True: ConnectionStats(), False: ConnectionStats()}
    for key, raw in path.site.entries("counts").items():
        service, backend = U32_PAIR.unpack(key)
        if (names[service].name, names[service].family) == (f"s{which}-{protocol}", v):
            found[backend != NO_BACKEND] = ConnectionStats(*COUNTS.unpack(raw))
    return found


def minus(after: ConnectionStats, before: ConnectionStats) -> ConnectionStats:
    return ConnectionStats(*(a - b for a, b in zip(after, before, strict=True)))


class Story(NamedTuple):
    """Segments in the notation of packets.Talk, and what they add, except for bytes. `uncounted`:
    how many of each side's last segments are not counted yet.
    """

    name: str
    segments: str
    adds: ConnectionStats
    uncounted: tuple[int, int] = (0, 0)


OPEN = "S <SA A "
STORIES = [
    Story("in order", OPEN + "A+100 <A+1000 FA <FA A", ConnectionStats(opened=1, ended=1), (1, 0)),
    Story("in order, the backend closes first", OPEN + "A+7 <FA+900 FA <A", ConnectionStats(opened=1, ended=1), (0, 1)),
    Story("refused by the backend", "S <RA", ConnectionStats(opened=1, ended=1, refused=1)),
    Story("reset by the backend", OPEN + "A+100 <A+50 <R", ConnectionStats(opened=1, ended=1, reset=1)),
    Story("reset by the client", OPEN + "A+100 <A+50 R", ConnectionStats(opened=1, ended=1)),
    Story("still open", OPEN + "A+100 <A+50", ConnectionStats(opened=1), (3, 2)),
    Story("repeated SYN", "S S <SA A FA <FA A", ConnectionStats(opened=1, ended=1), (1, 0)),
]


def play(path: Path_, v: int, which: int, story: str) -> tuple[list[int], list[int]]:
    """Lengths of the client's and of the backend's packets as they arrived."""
    own, source, talk = client(v), "", Talk()
    lengths: tuple[list[int], list[int]] = ([], [])
    before = ""
    for word in story.split():
        if word == before == "S":
            age(path, own, -60)  # it is repeated at once, however long this takes
        before = word
        back = word.startswith("<")
        ends = (pod(v), source) if back else (own, vip(v, which))
        packet = talk.segment(word, *ends)
        lengths[back].append(len(packet))
        _, out = path.through(packet)
        if not back:
            source = parsed(out).source
    return lengths


@both_policies
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_segments_add_their_counts(path: Path_, v: int, which: int, story: Story):
    before = read_counts(path, v, which)
    there, back = play(path, v, which, story.segments)
    after = read_counts(path, v, which)
    counted_in, counted_out = (
        sum(lengths[: len(lengths) - uncounted])
        for lengths, uncounted in zip((there, back), story.uncounted, strict=True)
    )
    wanted = story.adds._replace(bytes_in=counted_in, bytes_out=counted_out)
    assert minus(after[True], before[True]) == wanted
    assert after[False] == before[False]


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
    own, talk = client(v), Talk()
    before, source = read_counts(uplink, v, CLUSTER), ""
    for word, ttl in (*((word, 64) for word in (*OPEN.split(), "A+700")), ("A+7", 1)):
        ends = (pod(v), source) if "<" in word else (own, vip(v, CLUSTER))
        retval, got = uplink.ingress(talk.segment(word, *ends, ttl=ttl))
        assert retval == (TC_ACT_UNSPEC if ttl == 1 else TC_ACT_REDIRECT)
        source = source or parsed(got).source
    reply = talk.segment("<FA+10", pod(v), own)
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


@pytest.mark.parametrize(
    ("which", "adds"),
    [(NONE, ConnectionStats(no_endpoint=1)), (RESTRICTED, ConnectionStats(not_allowed=1))],
    ids=["no endpoints", "not allowed"],
)
def test_connection_without_backend_is_counted(path: Path_, v: int, which: int, adds: ConnectionStats):
    before = read_counts(path, v, which)
    path.ingress(tcp(client(v), vip(v, which), flags="S"))
    after = read_counts(path, v, which)
    assert minus(after[False], before[False]) == adds
    assert after[True] == before[True]


def recorded(path: Path_) -> list[tuple[str, str, str, int]]:
    """Service, reason, client and count of the failures that packets have caused."""
    rows = failures_view.build_rows(snapshot.read(path.site.pins, failures_view.NEEDS))
    return [(row.service, row.reason, row.client, row.count) for row in rows]


def forget(path: Path_) -> None:
    with path.site.pinned("failures") as failures:
        for key, _ in list(failures.items()):
            failures.delete(key)


FAILURES = {
    "no endpoints": (NONE, "S", "no_endpoints"),
    "not allowed": (RESTRICTED, "S", "not_allowed"),
    "refused": (CLUSTER, "S <RA", "backend_refused"),
    "reset by the backend": (CLUSTER, OPEN + "A+100 <A+50 <R", "backend_reset"),
    "repeated at once": (CLUSTER, "S S", ""),
    "reset by the client": (CLUSTER, OPEN + "A+100 <A+50 R", ""),
    "succeeds": (CLUSTER, OPEN + "A+100 <A+1000 FA <FA A", ""),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_of_packets_are_recorded(path: Path_, v: int, name: str):
    which, segments, reason = FAILURES[name]
    forget(path)
    if which == CLUSTER:
        play(path, v, which, segments)
    else:
        path.ingress(tcp(client(v), vip(v, which), flags=segments))
    found = recorded(path)
    assert [row[1] for row in found] == ([reason] if reason else [])
    for service, _, seen, count in found:
        assert service == f"default/s{which}-tcp"
        assert (f"{seen}" in client(v), count) == (True, 1)


CLIENTS = {4: "198.51.100.{}", 6: "2001:db8:9:{}::1"}
"""IPv4 addresses, or addresses in IPv6 networks of 64 bits."""


def test_a_client_overwrites_only_its_share_of_the_failures_of_packets(path: Path_, v: int):
    """One that tries all ports hides those of a sixteenth of the others, here a few of 32."""
    forget(path)
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
    forget(path)
    before, own = read_counts(path, v, CLUSTER), client(v)
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
