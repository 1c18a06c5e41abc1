# SPDX-License-Identifier: Apache-2.0
"""Packets that are refused or dropped, and the limits of refusals."""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from kbpf.dataplane.bpf.maps.layout import REFUSAL_LIMIT, U32, U64, Reason, RefusalLimit
from kbpf.dataplane.bpf.packet_path.node_maps import write_refusal_limits
from kbpf.kernel.system import sysctl
from kbpf.model.address import parse_addr
from tests.programs.packets.path.single_packets import (
    CLIENT,
    CLUSTER,
    DAMAGED,
    DAMAGED6,
    FIRST,
    IP,
    NET,
    NONE,
    POD,
    PORTS,
    RESTRICTED,
    Path_,
    _id,
    client,
    end,
    established,
    host_of,
    vip,
)
from tests.support.packets import packets
from tests.support.packets.packets import BROADCAST, MAC_A, MAC_B, fragments, frame, sctp, tcp, udp
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, run

# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"options": b"\x94\x04\0\0"}], ids=["", "options"])
@pytest.mark.parametrize("data", [b"", b"fast open"], ids=["", "data"])
def test_syn_is_refused_with_a_reset(path: Path_, v: int, more: dict[str, object], data: bytes):
    more = more if v == 4 else {}
    own, front = client(v), vip(v, NONE)
    syn = tcp(own, front, data, flags="S", seq=0xFFFFFFF0, mss=1460, ttl=2, **more)
    done = run(path.programs["tc_ingress"], frame(syn))
    assert done.retval == TC_ACT_REDIRECT
    want = tcp(front, own, data, flags="RA", seq=0, ack=(0xFFFFFFF1 + len(data)) & 0xFFFFFFFF, mss=1460, **more)
    assert done.packet_out == frame(want, to=MAC_A, source=MAC_B)


LONG = {
    "": {4: {}, 6: {}},
    "options": {4: {"options": b"\x94\x04\0\0"}, 6: {"extensions": [packets.hop_by_hop(), packets.destination()]}},
    "all options": {4: {"options": bytes([1]) * 40}, 6: {"extensions": [packets.destination()] * 4}},
}


@pytest.mark.parametrize("build", [udp, sctp])
@pytest.mark.parametrize("size", [0, 1, 1000])
@pytest.mark.parametrize("long", LONG)
def test_datagram_is_refused_with_an_icmp_error(path: Path_, v: int, build: object, size: int, long: str):
    own, front = client(v), vip(v, NONE)
    data = bytes(size) if build is udp else packets.SCTP_INIT + bytes(size)
    sent = build(own, front, data, **LONG[long][v])
    done = run(path.programs["tc_ingress"], frame(sent))
    assert done.retval == TC_ACT_REDIRECT
    headers = len(sent) - len(build(own, front, data)) + (20 if v == 4 else 40)
    carries = 8 if build is udp else 12 + 8  # up to an INIT's tag, without which Linux ignores
    quote = headers + carries  # an error about SCTP (RFC 9260, section 10)
    want = packets.icmp_error("port unreachable", host_of(front), sent, quote=quote, **_id(v, 0))
    assert done.packet_out == frame(want, to=MAC_A, source=MAC_B)


DAMAGES = [(4, damage, options) for damage in DAMAGED.values() for options in (b"", bytes([1]) * 40)]
DAMAGES += [(6, damage, b"") for damage in DAMAGED6.values()]


@pytest.mark.parametrize("kind", FIRST)
@pytest.mark.parametrize(("v", "damage", "options"), DAMAGES)
def test_damaged_header_is_left_to_the_stack(
    path: Path_, v: int, kind: str, damage: Callable[[bytes], bytes], options: bytes
):
    """It discards the packet. An answer would go to a source that may be wrong, and quote the
    damage.
    """
    path.expect_untouched(damage(FIRST[kind](client(v), vip(v, NONE), options=options)))


HOUR = 3600 * 10**9


def test_only_the_first_fragment_is_refused(path: Path_, v: int):
    """As a kernel does: later fragments lack the header that the client needs to match
    the error.
    """
    number = next(PORTS)
    front = end(f"{NET[v]}{IP}", 81)  # a port of no Service
    whole = udp(client(v), front, os.urandom(3000), **_id(v, number))
    first, *later = fragments(whole, 1280, id=number)
    assert path.ingress(first)[0] == TC_ACT_REDIRECT
    assert [path.ingress(one)[0] for one in later] == [TC_ACT_SHOT] * 2


class Refusals:
    """Token buckets that do not refill during a test, unless the test says so."""

    def __init__(self, path: Path_) -> None:
        self.path = path

    def set(self, which: RefusalLimit, burst: int, interval: int = HOUR, spent: int = 0) -> None:
        """`spent`: in how many nanoseconds the bucket is full; if negative, since when it
        is full.
        """
        then = max(0, time.monotonic_ns() + spent) if spent else 0
        self.path.site.put("refusal_limits", U32.pack(which), REFUSAL_LIMIT.pack(then, interval, burst))

    def answers(self, v: int, kind: str, hosts: Iterable[str]) -> int:
        """How many of these clients' packets are answered; the others must be counted as
        dropped.
        """
        packets = [FIRST[kind](end(host, next(PORTS)), vip(v, NONE)) for host in hosts]
        before = self.path.site.reasons()
        verdicts = [self.path.ingress(packet)[0] for packet in packets]
        counted = self.path.site.reasons() - before
        answered = verdicts.count(TC_ACT_REDIRECT)
        assert verdicts.count(TC_ACT_SHOT) == len(packets) - answered
        assert counted[Reason.RATE_LIMITED] == len(packets) - answered
        assert counted[Reason.NO_ENDPOINTS] == answered
        return answered


OTHERS = {4: "198.51.100.{}", 6: "2001:db8:7:{}::"}
"""Clients. An IPv6 network is one client; its key in `refused_peers` is its first address."""
EACH = {4: RefusalLimit.PEER4, 6: RefusalLimit.PEER6}


def peer_key(host: str, limit: RefusalLimit) -> bytes:
    """The key in `refused_peers`."""
    key = bytearray(parse_addr(host))
    key[0] ^= limit << 4
    return bytes(key)


BUCKET = {"udp": RefusalLimit.ICMP, "sctp": RefusalLimit.ICMP, "tcp": RefusalLimit.RESET}


@pytest.fixture
def refusals(path: Path_) -> Iterator[Refusals]:
    with path.site.restored("refusal_limits"):
        path.site.put("refusal_limits", U32.pack(RefusalLimit.PEER_RESET), bytes(REFUSAL_LIMIT.size))  # no limit
        yield Refusals(path)


@pytest.mark.parametrize("kind", FIRST)
def test_refusals_stop_when_the_bucket_is_empty(refusals: Refusals, v: int, kind: str):
    """They resume as the bucket refills, up to its burst. The other bucket is independent."""
    other = {"tcp": "udp"}.get(kind, "tcp")
    refusals.set(BUCKET[kind], 50)
    refusals.set(BUCKET[other], 50)
    assert refusals.answers(v, kind, [CLIENT[v]] * 200) == 50
    assert refusals.answers(v, other, [CLIENT[v]] * 10) == 10
    refusals.set(BUCKET[kind], 50, spent=47 * HOUR - HOUR // 2)
    assert refusals.answers(v, kind, [CLIENT[v]] * 10) == 3, "three tokens have come back"
    refusals.set(BUCKET[kind], 50, spent=-(10**9))
    assert refusals.answers(v, kind, [CLIENT[v]] * 60) == 50, "never more than the burst"


@pytest.mark.parametrize("kind", ["udp", "sctp"])
def test_each_client_has_its_own_limit_of_icmp_errors(refusals: Refusals, v: int, kind: str):
    refusals.set(EACH[v], 6)
    refusals.set(RefusalLimit.ICMP, 50)
    hosts = [OTHERS[v].format(100 + n + (50 if kind == "udp" else 0)) for n in range(2)]
    assert refusals.answers(v, kind, [hosts[0]] * 200) == 6
    assert refusals.answers(v, kind, [hosts[1]] * 20) == 6
    spent = U64.pack(time.monotonic_ns() + 4 * HOUR - HOUR // 2)
    with refusals.path.site.pinned("refused_peers") as peers:
        peers.update(peer_key(hosts[0], EACH[v]), spent)
    assert refusals.answers(v, kind, [hosts[0]] * 20) == 2
    assert refusals.answers(v, "tcp", [hosts[1]] * 20) == 20, "resets have their own"


def test_one_client_takes_half_of_the_resets(refusals: Refusals, v: int):
    """A container that dials a refused port all the time leaves the other half to others."""
    refusals.set(RefusalLimit.RESET, 50)
    refusals.set(RefusalLimit.PEER_RESET, 25)
    hosts = [OTHERS[v].format(200 + n) for n in range(3)]
    assert [refusals.answers(v, "tcp", [host] * 40) for host in hosts] == [25, 25, 0]
    with refusals.path.site.pinned("refused_peers") as peers:
        assert all(peers.delete(peer_key(host, RefusalLimit.PEER_RESET)) for host in hosts)


def test_clients_share_the_nodes_limit_of_icmp_errors(refusals: Refusals, v: int):
    """So does a client whose entry was evicted, which counts as a new one."""
    refusals.set(EACH[v], 6)
    refusals.set(RefusalLimit.ICMP, 8)
    assert [refusals.answers(v, "udp", [OTHERS[v].format(host)] * 20) for host in (190, 191)] == [6, 2]


SETTINGS = {
    "the kernel's defaults": ("1000", "100", 10**9, 10**8),
    "other limits": ("500", "40", 500 * 10**6, 40 * 10**6),
    "no limits": ("0", "0", 0, 0),
}
"""The kernel's settings for IPv4 and IPv6, and the nanoseconds between two ICMP errors to a peer."""


@pytest.mark.parametrize("name", SETTINGS)
def test_refusal_limits_are_the_kernels_settings(path: Path_, name: str):
    rate, rate6, interval, interval6 = SETTINGS[name]
    settings = {
        "net.ipv4.icmp_msgs_per_sec": "1000",
        "net.ipv4.icmp_msgs_burst": "50",
        "net.ipv4.icmp_ratelimit": rate,
        "net.ipv6.icmp.ratelimit": rate6,
    }
    with path.site.restored("refusal_limits"), path.site.pinned("refusal_limits") as limits:
        kept = path.inside(lambda: {key: sysctl.read(key) for key in settings})
        try:
            path.inside(lambda: [sysctl.write(*one) for one in settings.items()])
            path.inside(lambda: write_refusal_limits(limits))
            found = {which: REFUSAL_LIMIT.unpack(limits.lookup(U32.pack(which)) or b"")[1:] for which in RefusalLimit}
        finally:
            path.inside(lambda: [sysctl.write(*one) for one in kept.items()])
    assert found == {
        RefusalLimit.ICMP: (10**6, 50),
        RefusalLimit.RESET: (10**6, 50),
        RefusalLimit.PEER4: (interval, 6),
        RefusalLimit.PEER6: (interval6, 6),
        RefusalLimit.PEER_RESET: (2 * 10**6, 25),
    }


@pytest.mark.parametrize("why", [Reason.NO_ENDPOINTS, Reason.UNKNOWN_PORT], ids=lambda r: r.name)
def test_sctp_without_checksum_is_dropped_not_refused(path: Path_, v: int, why: Reason):
    """The device would fill in a CRC in the quoted packet, too, and break the error's own
    checksum.
    """
    before = path.site.reasons()
    front = vip(v, NONE) if why is Reason.NO_ENDPOINTS else end(f"{NET[v]}{IP}", 81)
    assert path.ingress(sctp(client(v), front, checksum="zero"))[0] == TC_ACT_SHOT
    assert path.site.reasons() - before == {why: 1}


# ---- frames to a group of machines ---------------------------------------------------------------

GROUPS = {
    "broadcast": BROADCAST,
    "IPv4 multicast": "01:00:5e:00:00:01",
    "IPv6 multicast": "33:33:00:00:00:01",
    "another machine": "02:00:00:00:00:77",
}


def known_flow(path: Path_, v: int) -> list[bytes]:
    """Segments that would change the state of a flow, and an ICMP error about its packets."""
    flow = established(path, v)
    error = packets.icmp_error("port unreachable", POD[v], tcp(flow.source, flow.back, flags="A"))
    return [flow.packet(word) for word in ("A+", "R", "FA")] + [error]


ASKED = {
    "no endpoints": lambda path, v: [build(client(v), vip(v, NONE)) for build in FIRST.values()],
    "an unknown port of a ClusterIP": lambda path, v: [FIRST["tcp"](client(v), end(f"{NET[v]}{IP}", 81))],
    "not allowed": lambda path, v: [FIRST["udp"](client(v), vip(v, RESTRICTED))],
    "a new flow": lambda path, v: [build(client(v), vip(v, CLUSTER)) for build in FIRST.values()],
    "fragments": lambda path, v: fragments(
        udp(client(v), vip(v, CLUSTER), bytes(3000), **_id(v, number := next(PORTS))), 1280, id=number
    ),
    "a known flow and its ICMP error": known_flow,
}


@pytest.mark.parametrize("asked", ASKED)
def test_frame_that_is_not_to_this_machine_passes_untouched(path: Path_, v: int, asked: str):
    """Each machine of the segment would answer it (RFC 1122, 3.2.2), and the stack drops it."""
    maps = ("flows", "fragments", "failures", "counts")
    sent = ASKED[asked](path, v)
    before = path.site.reasons(), [path.site.entries(name) for name in maps]
    for to, packet in itertools.product(GROUPS, sent):
        done = run(path.programs["tc_ingress"], frame(packet, to=GROUPS[to]))
        assert (done.retval, done.packet_out[14:]) == (TC_ACT_UNSPEC, packet), to
    assert (path.site.reasons(), [path.site.entries(name) for name in maps]) == before
