# SPDX-License-Identifier: Apache-2.0
"""Fragments, ICMP errors, SCTP, and packets of no flow."""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest

from kbpf.dataplane.bpf.maps.layout import CACHED_DEVICE, CACHED_DEVICES, DEVICE, DeviceFlag, Reason, Role
from tests.programs.packets.path.single_packets import (
    ANSWERS,
    CLIENT,
    CLUSTER,
    ERRORS,
    LOCAL,
    NODE,
    POD,
    PORTS,
    ROUTER,
    SAME,
    SENT,
    Path_,
    _id,
    both_policies,
    client,
    end,
    ends_of,
    established,
    host_of,
    masked,
    mtu_of,
    parsed,
    pod,
    quoted,
    reply,
    snat_source,
    vip,
    wrong_sums,
)
from tests.support.lab.events import read_reasons_and_ends, watched
from tests.support.packets import packets
from tests.support.packets.packets import (
    MAC_A,
    address,
    arp,
    destination,
    echo,
    fragments,
    icmp,
    icmp_error,
    sctp,
    tcp,
    udp,
)
from tests.support.packets.parse import checksums
from tests.support.packets.test_run import TC_ACT_SHOT, TC_ACT_UNSPEC

# ---- fragments -----------------------------------------------------------------------------------


def test_fragments_are_translated(path: Path_, v: int):
    number, payload = next(PORTS), os.urandom(3001)
    expect_pieces(path, v, lambda *ends: fragments(udp(*ends, payload, **_id(v, number)), 1280, id=number))


def expect_pieces(path: Path_, v: int, build: Callable[[str, str], list[bytes]]) -> None:
    """Expects all fragments of a datagram to pass ingress and egress, masqueraded."""
    own, front, back = ends_of(v, CLUSTER)
    inside = [path.ingress(piece, complete=True) for piece in build(own, front)]
    assert inside == [(TC_ACT_UNSPEC, piece) for piece in build(own, back)]
    out = [path.egress(piece)[1] for _, piece in inside]
    source = snat_source(out[0], NODE[v])
    assert out == build(source, back)


def test_fragments_of_segments_are_translated(path: Path_, v: int):
    """Only the first one has the numbers that tell whether it belongs to the connection."""
    flow = established(path, v, LOCAL)
    for word, came in (("A+3000", (flow.own, flow.back)), ("<A+3000", (flow.front, flow.own))):
        number = next(PORTS)
        want = copy.deepcopy(flow.talk).segment(word, *came, **_id(v, number))
        pieces = fragments(flow.packet(word, **_id(v, number)), 1280, id=number)
        out = [path.through(piece) for piece in pieces]
        assert out == [(TC_ACT_UNSPEC, piece) for piece in fragments(want, 1280, id=number)]


def test_fragments_with_options_after_the_fragment_header(path: Path_):
    """The fragment header names the destination options; only the first fragment has the
    protocol.
    """
    number = next(PORTS)

    def build(own: str, to: str) -> list[bytes]:
        return fragments(udp(own, to, bytes(3001), extensions=(destination(),)), 1280, id=number)

    assert {piece[40] for piece in build(client(6), vip(6, CLUSTER))} == {60}
    expect_pieces(path, 6, build)


def test_later_fragment_without_the_first_passes_untouched(path: Path_, v: int):
    number = next(PORTS)
    whole = udp(client(v), vip(v, CLUSTER), bytes(3000), **_id(v, number))
    piece = fragments(whole, 1280, id=number)[1]
    path.expect_untouched(piece)


# ---- ICMP errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("error", ERRORS)
@both_policies
@pytest.mark.parametrize("about", ["request", "refused request", "reply"])
def test_icmp_error(path: Path_, v: int, kind: str, error: str, which: int, about: str):
    """About a request: from a router behind the node, or from the backend, whose error comes from
    the frontend. The client sees the packet that it sent. About a reply: from a router in front of
    the node, which the backend's network may not know: if the client is masqueraded, so is the
    router.
    """
    flow, build = established(path, v, which, kind), SENT[kind]
    own, source, front, back = flow.own, flow.source, flow.front, flow.back
    ends, inside_ends, out_ends = (source, back), (own, back), (own, front)
    if about == "reply":
        ends, inside_ends, out_ends = (front, own), (back, own), (back, source)
    sent = build(*ends)

    sender = seen = ROUTER[v]
    if about == "refused request":
        sender, seen = POD[v], host_of(front)
    elif about == "reply" and which == CLUSTER:
        seen = NODE[v]

    def told(by: str, ends: tuple[str, str]) -> bytes:
        return icmp_error(error, by, quoted(sent, build, *ends), mtu=mtu_of(error))

    inside = told(sender, inside_ends)
    if which == CLUSTER or about == "reply":
        path.go_in(icmp_error(error, sender, sent, mtu=mtu_of(error)), inside)
    path.go_out(inside, told(seen, out_ends))


@both_policies
def test_icmp_redirect_about_a_translated_packet_is_dropped(path: Path_, which: int):
    """As by nf_nat: its receiver would send everything for that address to the new gateway.
    ICMPv6's are not translated: they quote the packet only for information.
    """
    flow = established(path, 4, which)
    own, source = flow.own, flow.source

    def redirect(sent: bytes, to: str) -> bytes:
        return icmp(ROUTER[4], to.partition(":")[0], 5, 1, address(NODE[4]), sent)

    about = {
        "tc_egress": [redirect(tcp(own, pod(4), flags="A"), own)],
        "tc_ingress": [redirect(tcp(vip(4, which), own, flags="A"), vip(4, which))],
    }
    if which == CLUSTER:
        about["tc_ingress"].append(redirect(tcp(source, pod(4), flags="A"), source))
    for program, packets_ in about.items():
        for packet in packets_:
            assert path.run(program, packet)[0] == TC_ACT_SHOT


@pytest.mark.parametrize("options", [{}, {4: {"options": b"\x94\x04\0\0"}, 6: {"extensions": [destination()]}}])
def test_icmp_error_with_eight_quoted_bytes_is_translated(path: Path_, v: int, options: dict[int, Any]):
    flow = established(path, v)
    more = options.get(v, {})
    quote = len(tcp(flow.own, flow.back, **more)) - 20 + 8
    for name, ends in (("tc_ingress", (flow.source, flow.back)), ("tc_egress", (flow.own, flow.back))):
        error = icmp_error("too big", ROUTER[v], tcp(*ends, **more), mtu=1280, quote=quote)
        retval, got = path.run(name, error, complete=True)
        found = parsed(got)
        assert retval == TC_ACT_UNSPEC
        assert checksums(found) == []
        assert found.embedded.source == flow.own
        want = flow.back if name == "tc_ingress" else flow.front
        assert found.embedded.destination == want


# ---- SCTP ----------------------------------------------------------------------------------------


def test_sctp_with_equal_ports_keeps_its_checksum(path: Path_, v: int):
    own, front, back = client(v), vip(v, SAME), pod(v, 80)
    inside = path.go_in(sctp(own, front), sctp(own, back))
    path.go_out(inside, inside)
    answer = ANSWERS["sctp"]
    path.go_out(answer(back, own), answer(front, own))


@pytest.mark.parametrize("length", [4, 60, 1400, 3001])
def test_sctp_checksum_follows_changed_ports(path: Path_, v: int, length: int):
    """CRC32c covers the whole packet, of which the program reads the ports only."""
    chunks = b"\1" + os.urandom(length - 1)  # INIT
    tag = int.from_bytes(chunks[4:8], "big")  # which the backend repeats
    own, front, back = ends_of(v, CLUSTER)
    inside = path.go_in(sctp(own, front, chunks), sctp(own, back, chunks))
    source = masked(path, inside, lambda a, b: sctp(a, b, chunks), back, v)
    inside = path.go_in(sctp(back, source, chunks, tag=tag), sctp(back, own, chunks, tag=tag))
    path.go_out(inside, sctp(front, own, chunks, tag=tag))


def test_wrong_sctp_checksum_stays_wrong(path: Path_, v: int):
    """A packet that was damaged on its way must not become valid here."""
    own = client(v)
    _, got = path.ingress(sctp(own, vip(v, CLUSTER), checksum="wrong"))
    assert wrong_sums(got) == ["sctp"]


def test_sctp_checksum_left_to_the_device_stays_zero(path: Path_, v: int):
    """A pod's SCTP packet has no checksum yet (CHECKSUM_PARTIAL); a value there would be added."""
    _, got = path.ingress(sctp(client(v), vip(v, CLUSTER), checksum="zero"))
    assert parsed(got).transport.checksum == 0


def test_sctp_fragments_with_a_changed_port_are_dropped(path: Path_, v: int):
    """The first fragment's checksum covers the others, whose length is not known yet."""
    number = next(PORTS)
    whole = sctp(client(v), vip(v, CLUSTER), b"\1" + os.urandom(1999), **_id(v, number))
    with path.counted(Reason.NOT_REWRITTEN):
        first, *_ = fragments(whole, 1280, id=number)
        assert path.ingress(first)[0] == TC_ACT_SHOT


# ---- packets of no flow --------------------------------------------------------------------------


def unrelated(v: int) -> dict[str, bytes]:
    front, about = vip(v, CLUSTER), (vip(v, CLUSTER), client(v))
    return {
        "arp": arp(1, MAC_A, "198.51.100.7", "00:00:00:00:00:00", "192.0.2.1"),
        "a ping to a VIP": echo(CLIENT[v], host_of(front)),
        "an unknown address": tcp(client(v), end(ROUTER[v], 80), flags="S"),
        "an unknown port": tcp(client(v), end(host_of(front), 81), flags="S"),
        "a segment of no flow": tcp(client(v), front, b"data", flags="PA"),
        "a SYN|ACK of no flow": tcp(client(v), front, flags="SA"),
        "another protocol": packets.datagram(CLIENT[v], host_of(front), 47, bytes(40)),
        "an error of no flow": icmp_error("too big", ROUTER[v], tcp(*about), mtu=1280),
        "an error about a ping": icmp_error("host unreachable", ROUTER[v], echo(NODE[v], CLIENT[v])),
        "an error about next to nothing": icmp_error("host unreachable", ROUTER[v], udp(*about), quote=12),
        "a header cut short": packets.datagram(CLIENT[v], host_of(front), 17, b"\1\2"),
        # A port outside of the range, because another test's flow may have any port of the range.
        "a reply of no flow": reply(pod(v), end(NODE[v], 60_999)),
    }


@pytest.mark.parametrize("name", ["tc_ingress", "tc_egress"])
def test_unrelated_packets_pass_untouched(path: Path_, name: str, v: int):
    for what, packet in unrelated(v).items():
        assert path.run(name, packet) == (TC_ACT_UNSPEC, packet), what


@pytest.mark.parametrize("whose", ["empty", "another device's"])
def test_device_missing_in_the_cache_is_found(path: Path_, v: int, whose: str):
    """Its entry is read from the map `devices`."""
    other = DEVICE.pack(Role.POD, 0, DeviceFlag.LOCAL, bytes(6), bytes(16), bytes(16), 0)
    number = 0 if whose == "empty" else 1 + CACHED_DEVICES
    path.cache(1, CACHED_DEVICE.pack(number, other))
    with path.counted(Reason.NEW_FLOW):
        path.ingress(tcp(client(v), vip(v, CLUSTER), flags="S"))
        path.set_loopback_role(Role.HOST)


def test_socket_of_the_node_without_a_route_is_dropped(path: Path_, v: int):
    """There is no route to the backend's network, so the first packet is dropped."""
    own = end(NODE[v], next(PORTS))
    with watched(path.site) as monitor:
        path.egress(tcp(own, vip(v, CLUSTER), flags="S"))
        events = read_reasons_and_ends(monitor)
    assert events == [("new", "new_flow", own), ("dropped", "no_route", own)]
