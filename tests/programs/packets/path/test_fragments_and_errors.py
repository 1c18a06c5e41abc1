# SPDX-License-Identifier: Apache-2.0
"""Fragments, ICMP errors, SCTP, and packets of no flow."""

import os

import pytest

from kbpf.dataplane.bpf.maps.layout import CACHED_DEVICE, CACHED_DEVICES, DEVICE, DeviceFlag, Reason, Role
from tests.programs.packets.path.single_packets import (
    ANSWERS,
    CLIENT,
    CLUSTER,
    LOCAL,
    NET,
    NODE,
    POD,
    PORTS,
    ROUTER,
    SAME,
    SENT,
    TALKS,
    Path_,
    _id,
    both,
    client,
    end,
    established,
    masked,
    pod,
    send_segments,
    vip,
)
from tests.support.packets import packets
from tests.support.packets.datagrams import MAC_A
from tests.support.packets.judge import checksums, difference, reassembled
from tests.support.packets.packets import address, arp, destination, echo, fragments, icmp, icmp_error, sctp, tcp, udp
from tests.support.packets.parse import parse
from tests.support.packets.test_run import TC_ACT_SHOT, TC_ACT_UNSPEC

# ---- fragments -----------------------------------------------------------------------------------


@both
def test_fragments_are_translated(path: Path_, v: int) -> None:
    payload = os.urandom(3001)
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    number = next(PORTS)
    pieces = fragments(udp(own, front, payload, **_id(v, number)), 1280, id=number)
    inside = [path.run("tc_ingress", piece, complete=True) for piece in pieces]
    assert {verdict for verdict, _ in inside} == {TC_ACT_UNSPEC}
    whole = reassembled(*(packet for _, packet in inside))
    assert difference(whole, udp(own, back, payload, **_id(v, number)), l2=False) == ""
    out = reassembled(*(path.run("tc_egress", packet)[1] for _, packet in inside))
    assert checksums(out, l2=False) == []
    found = parse(out, l2=False)
    assert (found.source.rpartition(":")[0].strip("[]"), found.destination) == (NODE[v], back)
    assert found.payload == payload


@both
def test_fragments_of_segments_are_translated(path: Path_, v: int) -> None:
    """Only the first one has the numbers that tell whether it belongs to the connection."""
    own, _ = send_segments(path, v, "S <SA A A+ <A", which=LOCAL)
    front, back = vip(v, LOCAL), pod(v)
    for word, ends, came in (("A+3000", (own, front), (own, back)), ("<A+3000", (back, own), (front, own))):
        number, out = next(PORTS), []
        sent = TALKS[own].segment(word, *ends, **_id(v, number))
        for piece in fragments(sent, 1280, id=number):
            for program in ("tc_ingress", "tc_egress"):
                verdict, piece = path.run(program, piece)  # noqa: PLW2901
                assert verdict == TC_ACT_UNSPEC
            out.append(piece)
        whole = parse(reassembled(*out), l2=False)
        assert (whole.source, whole.destination) == came


def test_fragments_with_options_after_the_fragment_header(path: Path_) -> None:
    """The fragment header names the destination options; only the first fragment has the
    protocol.
    """
    own, front = client(6), vip(6, CLUSTER)
    whole = udp(own, front, bytes(3001), extensions=(destination(),))
    pieces = fragments(whole, 1280, id=next(PORTS))
    assert {piece[40] for piece in pieces} == {60}
    inside = [path.run("tc_ingress", piece) for piece in pieces]
    assert {parse(packet, l2=False).ip.destination for _, packet in inside} == {POD[6]}
    out = [path.run("tc_egress", packet)[1] for _, packet in inside]
    assert {parse(packet, l2=False).ip.source for packet in out} == {NODE[6]}
    assert checksums(reassembled(*out), l2=False) == []


@both
def test_later_fragment_without_the_first_passes_untouched(path: Path_, v: int) -> None:
    number = next(PORTS)
    whole = udp(client(v), vip(v, CLUSTER), bytes(3000), **_id(v, number))
    piece = fragments(whole, 1280, id=number)[1]
    assert path.run("tc_ingress", piece) == (TC_ACT_UNSPEC, piece)


# ---- ICMP errors ---------------------------------------------------------------------------------


def quoted(sent: bytes, build: object, source: str, to: str) -> bytes:
    """The packet as quoted in an error: with other addresses and ports, and its original
    checksum.
    """
    had = parse(sent, l2=False).transport.checksum  # type: ignore[union-attr]
    return build(source, to, checksum=had)


ERRORS = ("too big", "host unreachable", "time exceeded", "parameter problem")


@both
@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])
def test_icmp_error_about_a_packet_to_the_backend(path: Path_, v: int, kind: str, error: str, which: int) -> None:
    """From a router behind the node, or the pod's host. The client sees the packet that it sent."""
    own, source = established(path, v, kind, which)
    build = SENT[kind]
    sent = build(source, pod(v))

    def about(packet: bytes) -> bytes:
        return icmp_error(error, ROUTER[v], packet, mtu=1280 if error == "too big" else 0)

    inside = about(quoted(sent, build, own, pod(v)))
    if which == CLUSTER:
        path.go("tc_ingress", about(sent), inside)
    path.go("tc_egress", inside, about(quoted(sent, build, own, vip(v, which))))


@both
@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])
def test_icmp_error_about_a_packet_to_the_client(path: Path_, v: int, kind: str, error: str, which: int) -> None:
    """From a router in front of the node. The backend's network may not know that router: if the
    client is masqueraded, so is the router.
    """
    own, source = established(path, v, kind, which)
    build = SENT[kind]
    sent = build(vip(v, which), own)

    def about(packet: bytes, router: str = ROUTER[v]) -> bytes:
        return icmp_error(error, router, packet, mtu=1280 if error == "too big" else 0)

    inside = about(quoted(sent, build, pod(v), own))
    path.go("tc_ingress", about(sent), inside)
    router = NODE[v] if which == CLUSTER else ROUTER[v]
    path.go("tc_egress", inside, about(quoted(sent, build, pod(v), source), router))


@pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])
def test_icmp_redirect_about_a_translated_packet_is_dropped(path: Path_, which: int) -> None:
    """As by nf_nat: its receiver would send everything for that address to the new gateway.
    ICMPv6's are not translated: they quote the packet only for information.
    """
    own, source = established(path, 4, "tcp", which)

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


@both
def test_icmp_error_of_the_backend_comes_from_the_frontend(path: Path_, v: int) -> None:
    own, source = established(path, v, "udp")
    build = SENT["udp"]
    sent = build(source, pod(v))
    error = icmp_error("port unreachable", POD[v], sent)
    inside = icmp_error("port unreachable", POD[v], quoted(sent, build, own, pod(v)))
    path.go("tc_ingress", error, inside)
    front = vip(v, CLUSTER).rpartition(":")[0].strip("[]")
    want = icmp_error("port unreachable", front, quoted(sent, build, own, vip(v, CLUSTER)))
    path.go("tc_egress", inside, want)


@both
def test_icmp_error_with_eight_quoted_bytes_is_translated(path: Path_, v: int) -> None:
    own, source = established(path, v, "tcp")
    quote = (20 if v == 4 else 40) + 8
    for name, ends in (("tc_ingress", (source, pod(v))), ("tc_egress", (own, pod(v)))):
        error = icmp_error("too big", ROUTER[v], tcp(*ends), mtu=1280, quote=quote)
        retval, got = path.run(name, error, complete=True)
        found = parse(got, l2=False)
        assert retval == TC_ACT_UNSPEC
        assert checksums(found) == []
        assert found.embedded is not None
        assert found.embedded.source == own
        want = pod(v) if name == "tc_ingress" else vip(v, CLUSTER)
        assert found.embedded.destination == want


# ---- SCTP ----------------------------------------------------------------------------------------


@both
def test_sctp_with_equal_ports_keeps_its_checksum(path: Path_, v: int) -> None:
    own, front, back = client(v), vip(v, SAME), pod(v, 80)
    inside = path.go("tc_ingress", sctp(own, front), sctp(own, back))
    path.go("tc_egress", inside, inside)
    answer = ANSWERS["sctp"]
    path.go("tc_egress", answer(back, own), answer(front, own))


@both
@pytest.mark.parametrize("length", [4, 60, 1400, 3001])
def test_sctp_checksum_follows_changed_ports(path: Path_, v: int, length: int) -> None:
    """CRC32c covers the whole packet, of which the program reads the ports only."""
    chunks = b"\1" + os.urandom(length - 1)  # INIT
    tag = int.from_bytes(chunks[4:8], "big")  # which the backend repeats
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    inside = path.go("tc_ingress", sctp(own, front, chunks), sctp(own, back, chunks))
    source = masked(path, inside, lambda a, b: sctp(a, b, chunks), back, v)
    inside = path.go("tc_ingress", sctp(back, source, chunks, tag=tag), sctp(back, own, chunks, tag=tag))
    path.go("tc_egress", inside, sctp(front, own, chunks, tag=tag))


@both
def test_wrong_sctp_checksum_stays_wrong(path: Path_, v: int) -> None:
    """A packet that was damaged on its way must not become valid here."""
    own = client(v)
    _, got = path.run("tc_ingress", sctp(own, vip(v, CLUSTER), checksum="wrong"))
    assert checksums(got, l2=False) == ["sctp"]


@both
def test_sctp_checksum_left_to_the_device_stays_zero(path: Path_, v: int) -> None:
    """A pod's SCTP packet has no checksum yet (CHECKSUM_PARTIAL); a value there would be added."""
    _, got = path.run("tc_ingress", sctp(client(v), vip(v, CLUSTER), checksum="zero"))
    assert parse(got, l2=False).transport.checksum == 0  # type: ignore[union-attr]


@both
def test_sctp_fragments_with_a_changed_port_are_dropped(path: Path_, v: int) -> None:
    """The first fragment's checksum covers the others, whose length is not known yet."""
    number = next(PORTS)
    whole = sctp(client(v), vip(v, CLUSTER), b"\1" + os.urandom(1999), **_id(v, number))
    before = path.site.reasons()[Reason.NOT_REWRITTEN]
    first, *_ = fragments(whole, 1280, id=number)
    assert path.run("tc_ingress", first)[0] == TC_ACT_SHOT
    assert path.site.reasons()[Reason.NOT_REWRITTEN] == before + 1


# ---- packets of no flow --------------------------------------------------------------------------

UNRELATED = {
    "arp": lambda v: arp(1, MAC_A, "198.51.100.7", "00:00:00:00:00:00", "192.0.2.1"),
    "a ping to a VIP": lambda v: echo(CLIENT[v], f"{NET[v]}1"),
    "an unknown address": lambda v: tcp(client(v), end(ROUTER[v], 80), flags="S"),
    "an unknown port": lambda v: tcp(client(v), end(f"{NET[v]}1", 81), flags="S"),
    "a segment of no flow": lambda v: tcp(client(v), vip(v, CLUSTER), b"data", flags="PA"),
    "a SYN|ACK of no flow": lambda v: tcp(client(v), vip(v, CLUSTER), flags="SA"),
    "another protocol": lambda v: packets.datagram(CLIENT[v], f"{NET[v]}1", 47, bytes(40)),
    "an error of no flow": lambda v: icmp_error("too big", ROUTER[v], tcp(vip(v, CLUSTER), client(v)), mtu=1280),
    "an error about a ping": lambda v: icmp_error("host unreachable", ROUTER[v], echo(NODE[v], CLIENT[v])),
    "an error about next to nothing": lambda v: icmp_error(
        "host unreachable", ROUTER[v], udp(vip(v, CLUSTER), client(v)), quote=12
    ),
    "a header cut short": lambda v: packets.datagram(CLIENT[v], f"{NET[v]}1", 17, b"\1\2"),
    # A port outside of the range, because another test's flow may have any port of the range.
    "a reply of no flow": lambda v: udp(pod(v), end(NODE[v], 60_999), b"!"),
}


@both
@pytest.mark.parametrize("name", ["tc_ingress", "tc_egress"])
@pytest.mark.parametrize("unrelated", UNRELATED)
def test_unrelated_packets_pass_untouched(path: Path_, name: str, unrelated: str, v: int) -> None:
    packet = UNRELATED[unrelated](v)
    assert path.run(name, packet) == (TC_ACT_UNSPEC, packet)


@both
@pytest.mark.parametrize("whose", ["empty", "another device's"])
def test_device_missing_in_the_cache_is_found(path: Path_, v: int, whose: str) -> None:
    """Its entry is read from the map `devices`."""
    other = DEVICE.pack(Role.POD, 0, DeviceFlag.LOCAL, bytes(6), bytes(16), bytes(16), 0)
    number = 0 if whose == "empty" else 1 + CACHED_DEVICES
    path.cache(1, CACHED_DEVICE.pack(number, other))
    before = path.site.reasons()[Reason.NEW_FLOW]
    path.run("tc_ingress", tcp(client(v), vip(v, CLUSTER), flags="S"))
    path.set_loopback_role(Role.HOST)
    assert path.site.reasons()[Reason.NEW_FLOW] == before + 1
