# SPDX-License-Identifier: Apache-2.0
"""Packets that are redirected past the stack, and ports of conntrack."""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.inspect import connections as tracked_connections
from kbpf.dataplane.bpf.maps.flow_entries import is_port_reservation
from kbpf.dataplane.bpf.maps.layout import NEXT_HOP, U32, DeviceFlag, NodeFlag, Reason, Role
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import snat_ports
from kbpf.kernel.netfilter import conntrack
from kbpf.kernel.netfilter.conntrack import ConntrackFlow
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.objects import Protocol
from tests.programs.packets.path.single_packets import (
    ALL_KINDS,
    ANSWERS,
    BACK,
    CLUSTER,
    IP,
    KINDS,
    LOCAL,
    MTU,
    NODE,
    POD,
    PORTS,
    SENT,
    SPARE_PORTS,
    Flow,
    Path_,
    Vip,
    ask,
    client,
    end,
    ends_of,
    established,
    expect_packet,
    expect_redirect,
    expect_snat_redirect,
    masked,
    owner,
    parsed,
    pod,
    port_of,
    raw_socket,
    reply,
    set_only_port,
    vip,
)
from tests.programs.packets.path.test_node_ports import fill_ports
from tests.support.lab.lab import ip
from tests.support.lab.lab import run as command
from tests.support.packets.packets import Talk, frame, tcp, udp
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC
from tests.support.table import each_cells

# ---- redirected past the stack -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_packet_to_another_node_is_redirected(uplink: Path_, v: int, kind: str):
    build = ALL_KINDS[kind]
    answer = ANSWERS[kind]
    own, front, back = ends_of(v, CLUSTER)
    source = expect_snat_redirect(uplink, build(own, front, ttl=9, tos=4), build, back, v, ttl=8, tos=4)
    expect_redirect(uplink, answer(back, source, ttl=9), answer(front, own, ttl=8))
    # What we redirected must not start a new flow when it leaves by the device.
    sent = build(source, back)
    uplink.expect_untouched(sent, "tc_egress")
    came = answer(front, own)
    uplink.expect_untouched(came, "tc_egress")


@pytest.mark.parametrize("flow", ["of the node", "in the stack", "direct"])
def test_pod_cannot_stop_answers_to_others(uplink: Path_, v: int, flow: str):
    """It forges a datagram from them to the backend's own address."""
    own = end(NODE[v], next(PORTS)) if flow == "of the node" else client(v)
    front, back, pods_own = vip(v, IP), pod(v), DeviceFlag.LOCAL | DeviceFlag.PEER
    question, asked = ask(own, front), ask(own, back)
    if flow == "of the node":
        expect_redirect(uplink, question, asked, "tc_egress")
    else:
        uplink.set_loopback_role(Role.POD, pods_own)
        uplink.node(NodeFlag.DIRECT if flow == "direct" else NodeFlag(0))
        _, got = uplink.ingress(question)
        assert parsed(got).destination == back
    uplink.set_device(uplink.out, Role.POD, pods_own)
    forged = uplink.ingress(asked, device=uplink.out)
    uplink.set_device(uplink.out, Role.HOST)
    assert forged == (TC_ACT_UNSPEC, asked)
    _, got = uplink.ingress(reply(back, own))
    if flow == "in the stack":
        _, got = uplink.egress(got)
    assert parsed(got).source == front


@pytest.mark.parametrize("flow", ["of the node", "masqueraded"])
def test_denied_answer_returns_as_a_reset(uplink: Path_, v: int, flow: str):
    """No packet of a flow past the stack passes conntrack here, but that of the backend's node."""
    own = end(NODE[v], next(PORTS)) if flow == "of the node" else client(v)
    way = "tc_egress" if flow == "of the node" else "tc_ingress"
    _, got = uplink.run(way, tcp(own, vip(v, CLUSTER), flags="S"))
    source = parsed(got).source
    assert source.startswith(end(NODE[v], 0)[:-1])
    verdict, got = uplink.ingress(tcp(pod(v), source, flags="A", ack=7))
    assert verdict == TC_ACT_REDIRECT
    expect_packet(got, tcp(source, pod(v), flags="R", seq=0))


def test_client_that_gets_no_port_sends_from_no_port_of_others(uplink: Path_, v: int):
    """Its next SYN has released the port of its ended connection, and found no other one. The port
    gets another client.
    """
    only_port, other = next(SPARE_PORTS), next(SPARE_PORTS)
    uplink.node(NodeFlag(0), only_port, only_port)
    own, source, talk = client(v), "", Talk()
    for word in ("S", "<SA", "A+", "<A", "FA", "<FA", "A"):
        ends = (pod(v), source) if word[0] == "<" else (own, vip(v, CLUSTER))
        _, got = uplink.ingress(talk.segment(word, *ends))
        source = source or parsed(got).source
    assert source == end(NODE[v], only_port)
    uplink.node(NodeFlag(0), other, other)
    fill_ports(uplink, v, [other])
    with uplink.counted(Reason.NO_SNAT_PORT):
        assert uplink.ingress(tcp(own, vip(v, CLUSTER), flags="S"))[0] == TC_ACT_SHOT
    uplink.node(NodeFlag(0), only_port, only_port)
    _, got = uplink.ingress(tcp(client(v), vip(v, CLUSTER), flags="S"))
    assert parsed(got).source == source, "the released port"
    for word in ("A", "A+", "A+!", "R!", "FA"):
        _, got = uplink.ingress(talk.segment(word, own, vip(v, CLUSTER)))
        assert parsed(got).source != source, word


VLAN_VALID = 1 << 4
"""From struct tpacket_auxdata: the frame came with a VLAN tag, which the kernel removed."""


@pytest.fixture
def tagged(uplink: Path_) -> Iterator[Path_]:
    """Adds a device that receives tagged frames, with tc_ingress attached."""
    ip(
        "link add in address 02:00:00:00:00:05 type veth peer name switch",
        "link set in up",
        "link set switch up",
        netns=uplink.where,
    )
    index = uplink.inside(lambda: socket.if_nametoindex("in"))
    inside = ("nsenter", f"--net=/run/netns/{uplink.where}")  # `ip netns exec` hides the pins
    pin = str(uplink.folder / "tc_ingress")
    with contextlib.suppress(RuntimeError):  # without TCX the plane may have added it already
        command(*inside, "tc", "qdisc", "add", "dev", "in", "clsact")
    command(*inside, *["tc", "filter", "add", "dev", "in", "ingress", "bpf", "da", "pinned"], pin)
    uplink.set_device(index, Role.HOST)
    yield uplink
    uplink.delete_device("in", index)


def test_priority_tag_is_not_forwarded(tagged: Path_, v: int):
    """802.1Q with VLAN 0, as some switches and clouds send it."""
    own, back = client(v), pod(v)
    data = os.urandom(32)
    sent = frame(udp(own, vip(v, CLUSTER), data), to="02:00:00:00:00:05")
    sent = sent[:12] + struct.pack("!HH", 0x8100, 5 << 13) + sent[12:]
    switch, gate = (tagged.inside(lambda: raw_socket(name)) for name in ("switch", "gate"))  # noqa: B023
    with switch, gate:
        gate.setsockopt(263, 8, 1)  # SOL_PACKET, PACKET_AUXDATA
        switch.send(sent)
        while True:
            got, control, _, _ = gate.recvmsg(2048, 256)
            if data in got:
                break
    assert parsed(got[14:]).destination == back
    ((_, _, told),) = control
    assert not struct.unpack_from("=I", told)[0] & VLAN_VALID


TORN = {
    "another device": ("ifindex", 30_000),
    "another gateway": ("next", bytes(12) + b"\xcb\0\x71\x09"),
    "another MAC address": ("next_mac", b"\2\0\0\0\0\x77"),
    "a larger MTU": ("length", 9_000),
}
"""Fields of a next hop that a program may read half-written, while another CPU replaces it."""
HOP = ("found", "check", "next", "ifindex", "own_mac", "next_mac", "length", "resolved", "family", "unsaid")


@pytest.mark.parametrize(("name", "value"), TORN.values(), ids=TORN)
def test_torn_next_hop_is_not_used(uplink: Path_, v: int, name: str, value: object):
    """The program asks the kernel again and stores the answer."""
    own, front = client(v), vip(v, CLUSTER)
    uplink.ingress(udp(own, front))
    with uplink.site.pinned("flows") as flows:
        key, raw = next(
            (key, raw) for key, raw in flows.items() if owner(raw) == own and hop_of(raw)["ifindex"] == uplink.out
        )
        torn = {**hop_of(raw), name: value}
        flows.update(key, raw[: -NEXT_HOP.size] + NEXT_HOP.pack(*torn.values()))
    assert uplink.ingress(udp(own, front))[0] == TC_ACT_REDIRECT
    after = hop_of(uplink.site.entries("flows")[key])
    assert after[name] == hop_of(raw)[name] != value


def check_of(hop: dict[str, Any]) -> int:
    """As check_of_next_hop() in hop.h computes it."""
    check = hop["found"]
    raw = hop["next"] + U32.pack(hop["ifindex"]) + hop["own_mac"] + hop["next_mac"]
    flags = hop["length"] | hop["resolved"] << 16 | hop["family"] << 24
    for word in (*struct.unpack("=8I", raw), flags):
        check = (check + word) * 0x9E3779B1 & 0xFFFFFFFF
    return check


def hop_of(raw: bytes) -> dict[str, Any]:
    return dict(zip(HOP, NEXT_HOP.unpack(raw[-NEXT_HOP.size :]), strict=True))


@each_cells(
    "which, role, forwards",
    """
Local policy | LOCAL
a ClusterIP that is not masqueraded | IP
from a pod | CLUSTER | POD
a node that does not forward | CLUSTER | HOST | no
""",
    which=lambda cell: Vip[cell or "CLUSTER"],
    role=lambda cell: Role[cell or "HOST"],
    forwards=lambda cell: cell != "no",
)
def test_packet_that_the_stack_must_see_is_not_redirected(uplink: Path_, v: int, which, role, forwards):
    """A packet that goes up the stack although others are redirected."""
    uplink.set_loopback_role(role)
    own, front, back = ends_of(v, which)
    with uplink.forwarding(forwards):
        uplink.go_in(ask(own, front), ask(own, back))


def test_packet_of_exactly_the_mtu_is_redirected(uplink: Path_, v: int):
    data = os.urandom(MTU - (28 if v == 4 else 48))
    expect_snat_redirect(uplink, udp(client(v), vip(v, CLUSTER), data), lambda a, b: udp(a, b, data, ttl=63), pod(v), v)


def test_packet_to_be_fragmented_goes_up_the_stack(uplink: Path_):
    """A packet longer than the MTU, without DF; others of its flow do not."""
    v = 4
    own, front, back = ends_of(v, CLUSTER)
    source = expect_snat_redirect(uplink, ask(own, front), ask, back, v, ttl=63)
    data = os.urandom(MTU)
    inside = uplink.go_in(udp(own, front, data), udp(own, back, data))
    uplink.go_out(inside, udp(source, back, data))
    inside = uplink.go_in(udp(back, source, data), udp(back, own, data))
    uplink.go_out(inside, udp(front, own, data))
    expect_redirect(uplink, ask(own, front), ask(source, back, ttl=63))


def age_next_hops(path: Path_, own: str, seconds: float) -> None:
    """Sets the age of the cached next hops of this client's flow."""
    found = ((time.monotonic_ns() - round(seconds * 10**9)) >> 20) % 2**32

    def older(raw: bytes) -> bytes:
        hop = {**hop_of(raw), "found": found}
        hop["check"] = check_of(hop)
        return raw[: -NEXT_HOP.size] + NEXT_HOP.pack(*hop.values())

    Flow(path, 4, own=own).change(older)


CLOCK_GRANULARITY_S = 0.011
"""The programs' clock is that of the last tick (10 ms at 100 Hz), in units of 2^20 ns."""
WRAPS_AFTER_S = 2**52 / 10**9
"""The 32 bits of that clock."""


@pytest.mark.parametrize(
    ("found", "still"),
    [(-30, True), (1 + CLOCK_GRANULARITY_S, False), (WRAPS_AFTER_S / 2 + 2, False), (WRAPS_AFTER_S - 64, False)],
    ids=["now", "a second ago", "26 days ago", "52 days ago"],
)
def test_next_hop_is_cached_for_a_second(uplink: Path_, v: int, found: float, still: bool):
    """Not every packet asks the kernel's tables; a change takes effect within a second."""
    own, front, back = ends_of(v, CLUSTER)
    source = expect_snat_redirect(uplink, ask(own, front), ask, back, v, ttl=63)
    age_next_hops(uplink, own, found)
    with uplink.forwarding(False):
        if still:
            expect_redirect(uplink, ask(own, front), ask(source, back, ttl=63))
        else:
            uplink.go_in(ask(own, front), ask(own, back))


FIRSTS = {"ttl, v4": (4, {"ttl": 1}), "ttl, v6": (6, {"ttl": 1}), "size": (4, {"size": MTU})}


@pytest.mark.parametrize(("v", "first"), FIRSTS.values(), ids=FIRSTS)
def test_later_packets_are_redirected_if_the_first_could_not_be(uplink: Path_, v: int, first: dict[str, int]):
    own, front, back = ends_of(v, CLUSTER)
    data, ttl = os.urandom(first.get("size", 1)), first.get("ttl", 64)
    inside = uplink.go_in(udp(own, front, data, ttl=ttl), udp(own, back, data, ttl=ttl))
    source = masked(uplink, inside, lambda a, b: udp(a, b, data, ttl=ttl), back, v)
    expect_redirect(uplink, ask(own, front), ask(source, back, ttl=63))


@pytest.mark.parametrize("role", Role)
def test_mode_direct_redirects_packets_of_all_clients(uplink: Path_, v: int, role: Role):
    uplink.node(NodeFlag.DIRECT)
    uplink.set_loopback_role(role)
    own, front, back = ends_of(v, LOCAL)
    expect_redirect(uplink, ask(own, front), ask(own, back, ttl=63))
    expect_redirect(uplink, reply(back, own), reply(front, own, ttl=63))
    expect_redirect(uplink, udp(own, front, b"??"), udp(own, back, b"??", ttl=63))


# ---- SNAT ports of conntrack ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", BACK)
def test_port_used_by_conntrack_is_not_given(path: Path_, v: int, kind: str, monkeypatch):
    """A connection that a kube-proxy masquerades: we translate nothing of it, and its port is
    taken.
    """
    only_port = set_only_port(path)
    node, back = end(NODE[v], only_port), pod(v)
    protocol = {"tcp": Protocol.TCP, "udp": Protocol.UDP}[kind]
    theirs = ConntrackFlow(protocol, parse_addr(NODE[v]), only_port, parse_addr(POD[v]), 8080)
    other = theirs._replace(source_port=only_port + 1)
    monkeypatch.setattr(conntrack, "list_masqueraded", lambda: [theirs, other])
    with ExitStack() as stack:
        maps = {name: stack.enter_context(path.site.pinned(name)) for name in snat_ports.RESERVATION_MAPS}
        assert snat_ports.reserve_conntrack_ports(maps, (only_port, only_port)) == 1
        assert snat_ports.reserve_conntrack_ports(maps, (only_port, only_port)) == 0
    with path.counted(Reason.NO_SNAT_PORT):
        assert path.ingress(KINDS[kind](client(v), vip(v, CLUSTER)))[0] == TC_ACT_SHOT
    for packet in (SENT[kind](node, back), BACK[kind](back, node), SENT[kind](back, node)):
        name = "tc_egress" if parsed(packet).source == node else "tc_ingress"
        path.expect_untouched(packet, name)
    kept = [raw for raw in path.site.entries("flows").values() if is_port_reservation(raw)]
    assert [owner(raw) for raw in kept if owner(raw) == node] == [node]
    with path.site.pinned("flows") as flows:
        shown = tracked_connections.read(flows).values()
    assert node not in {owner(one.raw) for one in shown}


def test_starting_agent_reserves_conntracks_ports(path: Path_, monkeypatch):
    """Also ports that were given while its programs were being attached; later ones are
    not read.
    """
    ports = [next(SPARE_PORTS) for _ in range(host.PORT_RESERVATION_POLLS + 1)]
    backend = parse_addr(POD[4])
    given = [ConntrackFlow(Protocol.TCP, parse_addr(NODE[4]), one, backend, 8080) for one in ports]
    agent = host.HostIntegration(Pins(path.site.pins), Config(masquerade_ports=(50_000, 60_000)))
    for number in range(len(given)):
        told = given[: number + 1]
        monkeypatch.setattr(conntrack, "list_masqueraded", lambda told=told: told)
        path.inside(lambda: agent.poll(number * host.HOST_POLL_INTERVAL_S))  # noqa: B023
    held = {owner(raw) for raw in path.site.entries("flows").values() if is_port_reservation(raw)}
    assert [end(NODE[4], one) in held for one in ports] == [True] * host.PORT_RESERVATION_POLLS + [False]


def test_masqueraded_flows_are_published_to_conntrack(path: Path_, v: int):
    """Each masqueraded flow once, with the source the backend sees; no ended and no local flows."""
    path.site.clear("flows")
    flow = established(path, v)
    ended = established(path, v).send("FA <FA")
    established(path, v, LOCAL, "udp")
    with path.site.pinned("flows") as flows:
        path.inside(lambda: snat_ports.publish_our_ports(flows))
        told = list(snat_ports.masqueraded_connections(raw for _, raw in flows.items()))
        ours = ConntrackFlow(6, parse_addr(NODE[v]), port_of(flow.source), parse_addr(POD[v]), 8080)
        assert told.count(ours) == 1
        assert path.inside(lambda: conntrack.reserve([ours], 60)) == 0, "it exists already"
        over = ours._replace(source_port=port_of(ended.source))
        assert path.inside(lambda: conntrack.release([over])) == 0, "it never existed"
        assert path.inside(lambda: conntrack.release([ours])) == 1
        snat_ports.delete_ended(flows)
    assert ended.entries() == []
    assert len(flow.entries()) == 3
