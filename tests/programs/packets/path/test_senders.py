# SPDX-License-Identifier: Apache-2.0
"""Packets with forged source addresses: what counts is the device that they arrive on."""

import itertools
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import CACHED_DEVICE, U32, DeviceFlag, Reason, Role, TcpState
from kbpf.model.address import parse_addr
from tests.programs.packets.path.single_packets import (
    ANSWERS,
    CLIENT,
    CLUSTER,
    FIRST,
    LOCAL,
    NEAR,
    NET,
    POD,
    PORTS,
    Flow,
    Path_,
    _id,
    ask,
    both_policies,
    end,
    parsed,
    pod,
    reply,
)
from tests.support.lab.lab import ip, until
from tests.support.lab.lab import run as command
from tests.support.packets.packets import fragments, tcp, udp
from tests.support.packets.test_run import TC_ACT_SHOT, TC_ACT_UNSPEC
from tests.support.table import each_cells

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

    def converse(self, v: int, which: int, script: str, *devices: str) -> Flow:
        """Sends these packets of a new client, by these devices in turn, and of its backend."""
        flow, ways = Flow(self.path, v, which), itertools.cycle(devices or (UPLINK,))
        for word in script.split():
            _, got = self.come(flow.packet(word), BACKEND if word.startswith("<") else next(ways))
            flow.source = flow.source or parsed(got).source
        return flow

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
    flow = node.converse(v, which, row.before)
    before = [raw[:8] for raw in flow.entries()], flow.states()
    verdict, _ = node.come(flow.packet(row.word), row.device)
    after = [raw[:8] for raw in flow.entries()], flow.states()
    assert (verdict == TC_ACT_SHOT) == (not row.counts)
    if row.counts:
        assert after[1] != before[1]
    else:
        assert after == before, "neither the state nor the time of the last packet"


@pytest.mark.parametrize("kind", ["udp", "sctp"])
@pytest.mark.parametrize("device", [BACKEND, OTHER, UPLINK])
def test_answer_counts_only_from_the_backends_device(node: Node, v: int, kind: str, device: str):
    flow = Flow(node.path, v)
    _, got = node.come(FIRST[kind](flow.own, flow.front), UPLINK)
    verdict, _ = node.come(ANSWERS[kind](flow.back, parsed(got).source), device)
    assert (verdict == TC_ACT_SHOT) == (device != BACKEND)
    assert flow.states() == {TcpState.ANSWERED if device == BACKEND else TcpState.NEW}


@pytest.mark.parametrize("kind", FIRST)
@each_cells(
    "source, device, begins",
    """
a client outside | outside | uplink | yes
a client outside, by another uplink | outside | uplink2 | yes
a client outside, forged by a pod | outside | other | no
a pod | pod | other | yes
a pod, forged by another one | pod | backend | no
a pod, forged outside | pod | uplink | no
""",
    begins=bool,
)
def test_who_begins_a_flow(node: Node, v: int, kind: str, source, device, begins):
    """Who has the source of a packet, a client outside or the pod at the device `other`; the device that it arrives on;
    and whether it begins a flow. What does not is left to the stack, untouched and uncounted: it drops it, or
    whoever it really belongs to gets the answer.
    """
    flow = Flow(node.path, v, own=end((CLIENT if source == "outside" else NEAR)[v], next(PORTS)))
    packet, before = FIRST[kind](flow.own, flow.front), node.path.site.reasons()
    verdict, got = node.come(packet, device)
    assert (node.path.site.reasons() - before)[Reason.NEW_FLOW] == begins
    assert (got == packet) == (not begins)
    assert bool(flow.entries()) == begins
    assert verdict != TC_ACT_SHOT


@pytest.mark.parametrize("route", ["default dev out", "unreachable default"])
@pytest.mark.parametrize(("name", "device", "begins"), [("pod9", OTHER, True), ("pod8", BACKEND, False)])
def test_a_table_for_packets_from_a_pod_does_not_lead_to_it(
    node: Node, v: int, name: str, device: str, begins: bool, route: str
):
    """`ip rule iif`, as of egress gateways: the packets of this device take another table."""
    flow = Flow(node.path, v, own=end(NEAR[v], next(PORTS)))
    words = ("ip", "-n", node.path.where, f"-{v}")
    command(*words, "rule", "add", "iif", name, "lookup", "77", "pref", "9")
    command(*words, "route", "add", *route.split(), "table", "77")
    try:
        node.come(flow.packet("?"), device)
    finally:
        command(*words, "route", "flush", "table", "77")
        command(*words, "rule", "del", "pref", "9")
    assert bool(flow.entries()) == begins


@both_policies
@each_cells(
    "before, packets, end",
    """
a SYN by another pod | LIVE FA | other:S99 | alive
data by another pod | LIVE FA | other:A1000 | alive
a SYN by the backend | LIVE FA | backend:S99 | alive
data by the backend | LIVE FA | backend:A1000 | alive
a SYN from where the client is | LIVE FA | uplink:S99 | alive
answers to no SYN | LIVE FA | backend:<SA99^0! backend:<SA99^101! backend:<SA99^1001! | alive
answers to another SYN | LIVE FA | uplink:S99 backend:<SA99^0! backend:<SA99^101! backend:<SA99^1001! | alive
the answer to a forged SYN | LIVE FA | uplink:S99 backend:<SA99^100! | alive
a new connection | LIVE FA <FA A | other:<SA7^100! uplink:S99 backend:<SA7^100 uplink:A100^8 backend:<A8^100
a backend in TIME_WAIT, it accepts | LIVE <FA FA <A | uplink:S99 backend:<= uplink:R1 uplink:S99 backend:<SA7^100
a backend in TIME_WAIT, it refuses | LIVE <FA FA <A | uplink:S99 backend:<= uplink:R1 uplink:S99 backend:<RA7^100
""",
)
def test_packets_past_the_service_end_no_connection_through_it(node: Node, v: int, which: int, before, packets, end):
    """Packets between the client's port and the backend's own address, after a connection through the Service: device,
    flags, number and ^ACK; "=" is the last ACK of that connection, "!" behind a packet that is dropped. `end`: alive
    if that connection goes on afterwards. Whoever can send as the backend does not know the number of the client's
    SYN. Once the connection has ended, the client may connect to the backend itself, which may remember it: it
    answers the SYN with an ACK (RFC 9293, 3.10.7.4), until the client resets its new connection.
    """
    flow = node.converse(v, which, before.replace("LIVE", LIVE))
    late = flow.packet("<A+") if end else b""
    flow.source = flow.own
    remembered = flow.packet("<A")
    for step in packets.split():
        device, back, flags, seq, ack, dropped = re.fullmatch(r"(\w+):(<?)([A-Z]+|=)(\d*)\^?(\d*)(!?)", step).groups()
        ends = (flow.back, flow.own) if back else (flow.own, flow.back)
        packet = remembered if flags == "=" else tcp(*ends, flags=flags, seq=int(seq), ack=int(ack or 0))
        if dropped:
            assert node.come(packet, device)[0] == TC_ACT_SHOT, step
        else:
            node.expect_untouched(packet, device)
    if end:
        _, got = node.come(late, BACKEND)
        assert parsed(got).source == flow.front


@both_policies
@pytest.mark.parametrize("device", [OTHER, BACKEND])
def test_a_datagram_to_the_backend_itself_belongs_to_no_others_flow(node: Node, v: int, which: int, device: str):
    flow = node.converse(v, which, "?")
    node.expect_untouched(reply(flow.own, flow.back), device)


def test_backend_remembers_a_masqueraded_connection(node: Node, v: int):
    """The node itself connects to the backend, from the port that the connection had here."""
    flow = node.converse(v, CLUSTER, f"{LIVE} <FA FA <A")
    node.path.run("tc_egress", tcp(flow.source, pod(v), flags="S", seq=99))
    for packet in (flow.packet("<A"), tcp(pod(v), flow.source, flags="SA", seq=7, ack=100)):
        node.expect_untouched(packet, BACKEND)


@pytest.mark.parametrize(("segments", "late"), [("FA <FA", "<FA"), ("<FA FA", "<A")])
def test_backend_closes_after_a_forged_syn(node: Node, v: int, segments: str, late: str):
    """The connection has ended, but not all of it is acknowledged: what the backend repeats is for
    the client's connection through the Service.
    """
    flow = node.converse(v, LOCAL, f"{LIVE} {segments}")
    repeated = flow.packet(late)
    node.come(tcp(flow.own, flow.back, flags="S", seq=99), UPLINK)
    _, got = node.come(repeated, BACKEND)
    assert parsed(got).source == flow.front


@pytest.mark.parametrize("kind", ["tcp", "udp"])
@pytest.mark.parametrize("device", [BACKEND, OTHER, UPLINK])
def test_later_fragments_count_only_from_the_backends_device(node: Node, v: int, kind: str, device: str):
    """Whoever may send the first one has its ports remembered for its own later ones only."""
    flow = node.converse(v, CLUSTER, LIVE if kind == "tcp" else "?")
    if kind == "tcp":
        whole = flow.packet("<A+2000", **_id(v, 7))
    else:
        whole = udp(flow.back, flow.source, bytes(2000), **_id(v, 7))
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
    gone = node.devices[UPLINK2]
    own = node.converse(v, LOCAL, f"{LIVE} FA <FA A", UPLINK2).own
    with node.path.site.restored("devices", "device_cache"):
        with node.path.site.pinned("devices") as known:
            known.delete(U32.pack(gone))
        node.path.cache(gone, bytes(CACHED_DEVICE.size))
        node.expect_untouched(tcp(own, pod(v), flags="S", seq=99), OTHER)
        node.expect_untouched(tcp(pod(v), own, flags="SA", seq=7, ack=100), BACKEND)


def test_a_forged_repetition_is_no_failure_of_the_backend(node: Node, v: int):
    flow = Flow(node.path, v)
    syn = flow.packet("S")
    node.come(syn, UPLINK)
    flow.age(2)
    for device, counted in ((OTHER, 0), (UPLINK, 1)):
        before = node.path.site.reasons()
        node.come(syn, device)
        assert (node.path.site.reasons() - before)[Reason.BACKEND_UNANSWERED] == counted


def test_a_forged_datagram_does_not_end_a_pods_direct_exchange(node: Node, v: int):
    """A pod has asked the Service, and then the backend itself: answers pass unchanged."""
    flow = Flow(node.path, v, LOCAL, end(NEAR[v], next(PORTS)))
    question, answer = flow.packet("?"), flow.packet("<!")
    node.path.set_device(node.devices[OTHER], Role.POD, DeviceFlag.LOCAL | DeviceFlag.PEER)
    node.come(question, OTHER)
    node.come(ask(flow.own, flow.back), OTHER)
    node.come(question, BACKEND)  # forged by another pod
    assert node.come(answer, BACKEND)[1] == answer


def test_a_strict_reverse_path_filter_holds_for_redirected_packets_too(node: Node, v: int):
    """The kernel's own one does not see them. It has none for IPv6."""
    node.strict(UPLINK2, True)
    flow = node.converse(v, CLUSTER, "?", UPLINK2)
    assert bool(flow.entries()) == (v == 6)
    ip("route replace 198.51.100.0/24 metric 9 dev out2", netns=node.path.where)
    node.come(flow.packet("?"), UPLINK2)
    assert flow.entries(), "a route by this device is enough"
    ip("route del 198.51.100.0/24 metric 9 dev out2", netns=node.path.where)
    node.strict(UPLINK2, False)


def test_a_client_that_moves_to_another_device_keeps_its_connection(node: Node, v: int):
    """Host devices are exchangeable: with several uplinks each packet may come by any."""
    flow = node.converse(v, CLUSTER, "S <SA A A+ <A A+ <A+ FA <FA A", UPLINK, UPLINK2)
    assert flow.states() == {TcpState.CLOSED}


@both_policies
def test_fragments_of_an_older_connection_do_not_reach_a_new_client(node: Node, v: int, which: int):
    """The backend has a connection with the port that the new client has got, and repeats data of it."""
    flow = node.converse(v, which, "S")
    first, *later = fragments(flow.packet("<A+2000", **_id(v, 9)), 1280, id=9)
    _, got = node.come(first, BACKEND)
    assert b"x" * 100 not in got
    for part in later:
        assert node.come(part, BACKEND)[0] == TC_ACT_SHOT
