# SPDX-License-Identifier: Apache-2.0
"""Packets with forged source addresses: what counts is the device that they arrive on."""

import itertools
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import CACHED_DEVICE, CACHED_DEVICES, U32, DeviceFlag, Reason, Role, TcpState
from kbpf.model.address import parse_addr
from tests.programs.packets.path.single_packets import (
    CLIENT,
    CLUSTER,
    LOCAL,
    NEAR,
    NET,
    POD,
    PORTS,
    SCTP_INIT_ACK,
    SCTP_TAG,
    Path_,
    _id,
    age,
    ask,
    both_policies,
    client,
    end,
    entries_of,
    parsed,
    pod,
    reply,
    states,
    vip,
)
from tests.support.lab.lab import ip, until
from tests.support.lab.lab import run as command
from tests.support.packets.packets import Talk, fragments, sctp, tcp, udp
from tests.support.packets.test_run import TC_ACT_SHOT, TC_ACT_UNSPEC

BACKEND, OTHER, UPLINK, UPLINK2 = "backend", "other", "uplink", "uplink2"
"""The backend's device, another pod's, the device of the default route, and one without a route."""


@dataclass
class Node:
    """The programs, and the devices by name."""

    path: Path_
    devices: dict[str, int]

    def come(self, packet: bytes, device: str) -> tuple[int, bytes]:
        """The packet arrives on this device and, if it goes up the stack, leaves it."""
        index = self.devices[device]
        verdict, got = self.path.ingress(packet, device=index)
        if verdict == TC_ACT_UNSPEC:
            verdict, got = self.path.egress(got, came_by=index)
        return verdict, got

    def expect_untouched(self, packet: bytes, device: str) -> None:
        """Expects the packet to pass both programs as it is."""
        assert self.come(packet, device) == (TC_ACT_UNSPEC, packet)

    def converse(self, script: str, talk: Talk, own: str, which: int, device: str = UPLINK) -> str:
        """Sends these segments of a client and its backend, each by its own device; returns the
        source that the backend sees.
        """
        v, source = 6 if own.startswith("[") else 4, ""
        for word in script.split():
            back = word.startswith("<")
            ends = (pod(v), source) if back else (own, vip(v, which))
            _, got = self.come(talk.segment(word, *ends), BACKEND if back else device)
            source = source or parsed(got).source
        return source

    def strict(self, device: str, on: bool) -> None:
        """Whether the kernel has a strict reverse path filter there."""
        flag = DeviceFlag.STRICT if on else DeviceFlag(0)
        self.path.set_device(self.devices[device], Role.HOST, flag)


@pytest.fixture(scope="module")
def node(uplink: Path_) -> Iterator[Node]:
    """The device thread of the fixture's data plane knows the devices."""
    names = {BACKEND: "pod8", OTHER: "pod9", UPLINK2: "out2"}
    mac, pods = "02:00:00:00:00:09", f"{uplink.where}p"
    command("ip", "netns", "add", pods)
    try:
        for name in names.values():
            peer = f"{name}p" if name == "out2" else f"{name}p netns {pods}"
            ip(f"link add {name} address {mac} type veth peer name {peer}", f"link set {name} up", netns=uplink.where)
            ip(f"link set {name}p up", netns=uplink.where if name == "out2" else pods)
        for v in (4, 6):
            ip(f"route add {POD[v]} dev pod8", f"route add {NEAR[v]} dev pod9", netns=uplink.where)
        devices = {
            key: uplink.inside(lambda: socket.if_nametoindex(name))  # noqa: B023
            for key, name in names.items()
        }
        for index in devices.values():
            uplink.macs[index] = mac
        roles = {U32.pack(devices[key]): Role.POD for key in (BACKEND, OTHER)}
        roles[U32.pack(devices[UPLINK2])] = Role.HOST
        made = Node(uplink, devices | {UPLINK: uplink.out})

        def known() -> bool:
            entries = uplink.site.entries("devices")
            return all(entries.get(key, b"")[:4] == U32.pack(role) for key, role in roles.items())

        until("the devices are known", known)
        yield made
    finally:
        ip(*(f"link del {name}" for name in names.values()), netns=uplink.where)
        command("ip", "netns", "del", pods)


class Row(NamedTuple):
    """What happens before; then the forged packet, the device, and whether it counts."""

    before: str
    word: str
    device: str
    counts: bool


LIVE = "S <SA A A+ <A"
ROWS = [
    Row(before, word, device, device == sender)
    for before, word, sender in (
        ("S", "<SA", BACKEND),
        ("S", "<RA", BACKEND),
        ("S <SA A A+", "<A", BACKEND),
        (LIVE, "<R", BACKEND),
        (LIVE, "<FA", BACKEND),
        (LIVE, "R", UPLINK),
        (LIVE, "FA", UPLINK),
    )
    for device in (BACKEND, OTHER, UPLINK)
]


@both_policies
@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(map(str, row)))
def test_segment_counts_only_where_the_route_to_its_sender_leads(node: Node, v: int, which: int, row: Row):
    """All its numbers are right: the attacker has seen them, or guessed well."""
    own, talk = client(v), Talk()
    source = node.converse(row.before, talk, own, which)
    ends = (pod(v), source) if row.word.startswith("<") else (own, vip(v, which))
    before = [raw[:8] for raw in entries_of(node.path, own)], states(node.path, own)
    verdict, _ = node.come(talk.segment(row.word, *ends), row.device)
    after = [raw[:8] for raw in entries_of(node.path, own)], states(node.path, own)
    assert (verdict == TC_ACT_SHOT) == (not row.counts)
    if row.counts:
        assert after[1] != before[1]
    else:
        assert after == before, "neither the state nor the time of the last packet"


@pytest.mark.parametrize("kind", ["udp", "sctp"])
@pytest.mark.parametrize("device", [BACKEND, OTHER, UPLINK])
def test_answer_counts_only_from_the_backends_device(node: Node, v: int, kind: str, device: str):
    own = client(v)
    question, answer = {
        "udp": (ask, reply),
        "sctp": (sctp, lambda a, b: sctp(a, b, SCTP_INIT_ACK, tag=SCTP_TAG)),
    }[kind]
    _, got = node.come(question(own, vip(v, CLUSTER)), UPLINK)
    verdict, _ = node.come(answer(pod(v), parsed(got).source), device)
    assert (verdict == TC_ACT_SHOT) == (device != BACKEND)
    answered = device == BACKEND
    assert states(node.path, own) == {TcpState.ANSWERED if answered else TcpState.NEW}


BEGINS = {
    "a client outside": (CLIENT, UPLINK, True),
    "a client outside, by another uplink": (CLIENT, UPLINK2, True),
    "a client outside, forged by a pod": (CLIENT, OTHER, False),
    "a pod": (NEAR, OTHER, True),
    "a pod, forged by another one": (NEAR, BACKEND, False),
    "a pod, forged outside": (NEAR, UPLINK, False),
}


@pytest.mark.parametrize("kind", ["tcp", "udp", "sctp"])
@pytest.mark.parametrize("sender", BEGINS)
def test_who_begins_a_flow(node: Node, v: int, kind: str, sender: str):
    """What does not is left to the stack, untouched and uncounted: it drops it, or whoever it
    really belongs to gets the answer.
    """
    hosts, device, begins = BEGINS[sender]
    own = end(hosts[v], next(PORTS))
    build = {"tcp": lambda a, b: Talk().segment("S", a, b), "udp": udp, "sctp": sctp}[kind]
    packet, before = build(own, vip(v, CLUSTER)), node.path.site.reasons()
    verdict, got = node.come(packet, device)
    assert (node.path.site.reasons() - before)[Reason.NEW_FLOW] == begins
    assert (got == packet) == (not begins)
    assert bool(entries_of(node.path, own)) == begins
    assert verdict != TC_ACT_SHOT


@pytest.mark.parametrize("route", ["default dev out", "unreachable default"])
@pytest.mark.parametrize("sender", ["a pod", "a pod, forged by another one"])
def test_a_table_for_packets_from_a_pod_does_not_lead_to_it(node: Node, v: int, sender: str, route: str):
    """`ip rule iif`, as of egress gateways: the packets of this device take another table."""
    _, device, begins = BEGINS[sender]
    name = {OTHER: "pod9", BACKEND: "pod8"}[device]
    own = end(NEAR[v], next(PORTS))
    words = ("ip", "-n", node.path.where, f"-{v}")
    command(*words, "rule", "add", "iif", name, "lookup", "77", "pref", "9")
    command(*words, "route", "add", *route.split(), "table", "77")
    try:
        node.come(udp(own, vip(v, CLUSTER)), device)
    finally:
        command(*words, "route", "flush", "table", "77")
        command(*words, "rule", "del", "pref", "9")
    assert bool(entries_of(node.path, own)) == begins


FORGED = {
    "a SYN by another pod": [(OTHER, "S", 0)],
    "data by another pod": [(OTHER, "A", 0)],
    "a SYN by the backend": [(BACKEND, "S", 0)],
    "data by the backend": [(BACKEND, "A", 0)],
    "a SYN from where the client is": [(UPLINK, "S", 0)],
    **{f"an answer to no SYN, {ack}": [(BACKEND, "SA", ack)] for ack in (0, 101, 1001)},
    **{f"an answer to another SYN, {ack}": [(UPLINK, "S", 0), (BACKEND, "SA", ack)] for ack in (0, 100, 101, 1001)},
}
"""Device, flags and ACK of packets between the client and the backend's own address."""


@both_policies
@pytest.mark.parametrize("forged", FORGED)
def test_a_packet_past_the_service_ends_no_connection(node: Node, v: int, which: int, forged: str):
    """The client has closed its side and waits for the answer."""
    own, talk = client(v), Talk()
    source = node.converse(f"{LIVE} FA", talk, own, which)
    for device, flags, ack in FORGED[forged]:
        ends = (pod(v), own) if flags == "SA" else (own, pod(v))
        packet = tcp(*ends, flags=flags, seq=1000 if flags == "A" else 99, ack=ack)
        verdict, got = node.come(packet, device)
        if flags == "SA":
            assert verdict == TC_ACT_SHOT
        else:
            assert (verdict, got) == (TC_ACT_UNSPEC, packet)
    _, got = node.come(talk.segment("<A+", pod(v), source), BACKEND)
    assert parsed(got).source == vip(v, which)


@both_policies
@pytest.mark.parametrize("device", [OTHER, BACKEND])
def test_a_datagram_to_the_backend_itself_belongs_to_no_others_flow(node: Node, v: int, which: int, device: str):
    own = client(v)
    node.come(ask(own, vip(v, which)), UPLINK)
    forged = reply(own, pod(v))
    node.expect_untouched(forged, device)


@both_policies
def test_client_connects_to_the_backend_itself(node: Node, v: int, which: int):
    """From the port of an earlier connection through the Service."""
    own, talk = client(v), Talk()
    node.converse(f"{LIVE} FA <FA A", talk, own, which)
    answer = tcp(pod(v), own, flags="SA", seq=7, ack=100)
    assert node.come(answer, OTHER)[0] == TC_ACT_SHOT, "forged by another pod"
    for packet, device in (
        (tcp(own, pod(v), flags="S", seq=99), UPLINK),
        (answer, BACKEND),
        (tcp(own, pod(v), b"?", flags="A", seq=100, ack=8), UPLINK),
        (tcp(pod(v), own, b"!", flags="A", seq=8, ack=101), BACKEND),
    ):
        node.expect_untouched(packet, device)


@both_policies
@pytest.mark.parametrize("answer", ["SA", "RA"], ids=["accepts", "refuses"])
def test_backend_remembers_the_earlier_connection(node: Node, v: int, answer: str, which: int):
    """It is in TIME_WAIT, and answers the SYN with an ACK (RFC 9293, 3.10.7.4). Only the client's
    reset of its new connection ends that.
    """
    own, talk = client(v), Talk()
    node.converse(f"{LIVE} <FA FA <A", talk, own, which)
    remembered = talk.segment("<A", pod(v), own)
    syn = tcp(own, pod(v), flags="S", seq=99)
    for packet, device in (
        (syn, UPLINK),
        (remembered, BACKEND),
        (tcp(own, pod(v), flags="R", seq=1), UPLINK),
        (syn, UPLINK),
        (tcp(pod(v), own, flags=answer, seq=7, ack=100), BACKEND),
    ):
        node.expect_untouched(packet, device)


def test_backend_remembers_a_masqueraded_connection(node: Node, v: int):
    """The node itself connects to the backend, from the port that the connection had here."""
    own, talk = client(v), Talk()
    source = node.converse(f"{LIVE} <FA FA <A", talk, own, CLUSTER)
    node.path.run("tc_egress", tcp(source, pod(v), flags="S", seq=99))
    for packet in (talk.segment("<A", pod(v), source), tcp(pod(v), source, flags="SA", seq=7, ack=100)):
        node.expect_untouched(packet, BACKEND)


@pytest.mark.parametrize(("segments", "late"), [("FA <FA", "<FA"), ("<FA FA", "<A")])
def test_backend_closes_after_a_forged_syn(node: Node, v: int, segments: str, late: str):
    """The connection has ended, but not all of it is acknowledged: what the backend repeats is for
    the client's connection through the Service.
    """
    own, talk = client(v), Talk()
    source = node.converse(f"{LIVE} {segments}", talk, own, LOCAL)
    repeated = talk.segment(late, pod(v), source)
    node.come(tcp(own, pod(v), flags="S", seq=99), UPLINK)
    _, got = node.come(repeated, BACKEND)
    assert parsed(got).source == vip(v, LOCAL)


@pytest.mark.parametrize("kind", ["tcp", "udp"])
@pytest.mark.parametrize("device", [BACKEND, OTHER, UPLINK])
def test_later_fragments_count_only_from_the_backends_device(node: Node, v: int, kind: str, device: str):
    """Whoever may send the first one has its ports remembered for its own later ones only."""
    own, talk = client(v), Talk()
    if kind == "tcp":
        source = node.converse(LIVE, talk, own, CLUSTER)
        whole = talk.segment("<A+2000", pod(v), source, **_id(v, 7))
    else:
        _, got = node.come(ask(own, vip(v, CLUSTER)), UPLINK)
        source = parsed(got).source
        whole = udp(pod(v), source, bytes(2000), **_id(v, 7))
    for part in fragments(whole, 1280, id=7):
        verdict, got = node.come(part, device)
        assert (verdict == TC_ACT_SHOT) == (device != BACKEND)
        if device == BACKEND:
            front = parse_addr(f"{NET[v]}{CLUSTER}")
            assert got[8:24] == front if v == 6 else got[12:16] == front[12:]


def test_client_connects_to_the_backend_itself_by_a_new_device(node: Node, v: int):
    """Its port was used through a Service before, when its packets came by a device that is gone:
    another pod had its address, or a bridge's ports had programs.
    """
    own, talk = client(v), Talk()
    gone = node.devices[UPLINK2]
    node.converse(f"{LIVE} FA <FA A", talk, own, LOCAL, UPLINK2)
    with node.path.site.pinned("devices") as known, node.path.site.pinned("device_cache") as cache:
        before = known.lookup(U32.pack(gone))
        slot = U32.pack(gone % CACHED_DEVICES)
        cached = cache.lookup(slot)
        known.delete(U32.pack(gone))
        cache.update(slot, bytes(CACHED_DEVICE.size))
        syn = tcp(own, pod(v), flags="S", seq=99)
        answer = tcp(pod(v), own, flags="SA", seq=7, ack=100)
        try:
            node.expect_untouched(syn, OTHER)
            node.expect_untouched(answer, BACKEND)
        finally:
            known.update(U32.pack(gone), before)
            cache.update(slot, cached)


def test_a_forged_repetition_is_no_failure_of_the_backend(node: Node, v: int):
    own = client(v)
    syn = Talk().segment("S", own, vip(v, CLUSTER))
    node.come(syn, UPLINK)
    age(node.path, own, 2)
    for device, counted in ((OTHER, 0), (UPLINK, 1)):
        before = node.path.site.reasons()
        node.come(syn, device)
        assert (node.path.site.reasons() - before)[Reason.BACKEND_UNANSWERED] == counted


def test_a_forged_datagram_does_not_end_a_pods_direct_exchange(node: Node, v: int):
    """A pod has asked the Service, and then the backend itself: answers pass unchanged."""
    own = end(NEAR[v], next(PORTS))
    question, answer = ask(own, vip(v, LOCAL)), reply(pod(v), own)
    node.path.set_device(node.devices[OTHER], Role.POD, DeviceFlag.LOCAL | DeviceFlag.PEER)
    node.come(question, OTHER)
    node.come(ask(own, pod(v)), OTHER)
    node.come(question, BACKEND)  # forged by another pod
    assert node.come(answer, BACKEND)[1] == answer


def test_a_strict_reverse_path_filter_holds_for_redirected_packets_too(node: Node, v: int):
    """The kernel's own one does not see them. It has none for IPv6."""
    node.strict(UPLINK2, True)
    own = client(v)
    node.come(udp(own, vip(v, CLUSTER)), UPLINK2)
    assert bool(entries_of(node.path, own)) == (v == 6)
    ip("route replace 198.51.100.0/24 metric 9 dev out2", netns=node.path.where)
    node.come(udp(own, vip(v, CLUSTER)), UPLINK2)
    assert entries_of(node.path, own), "a route by this device is enough"
    ip("route del 198.51.100.0/24 metric 9 dev out2", netns=node.path.where)
    node.strict(UPLINK2, False)


def test_a_client_that_moves_to_another_device_keeps_its_connection(node: Node, v: int):
    """Host devices are exchangeable: with several uplinks each packet may come by any."""
    own, talk, source, uplinks = client(v), Talk(), "", itertools.cycle((UPLINK, UPLINK2))
    for word in ("S", "<SA", "A", "A+", "<A", "A+", "<A+", "FA", "<FA", "A"):
        back = word.startswith("<")
        ends = (pod(v), source) if back else (own, vip(v, CLUSTER))
        packet = talk.segment(word, *ends)
        verdict, got = node.come(packet, BACKEND if back else next(uplinks))
        assert verdict != TC_ACT_SHOT, word
        source = source or parsed(got).source
    assert states(node.path, own) == {TcpState.CLOSED}
