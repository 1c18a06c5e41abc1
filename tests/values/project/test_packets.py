# SPDX-License-Identifier: Apache-2.0
"""The builder and the parser of packets, compared with each other and with values from the RFCs.
tests/lab/outside/test_wire.py compares them with the kernel.
"""

import ast
import random
import struct
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.packets import packets
from tests.support.packets.judge import checksums, difference, reassembled
from tests.support.packets.packets import (
    ERRORS,
    Extension,
    chunk,
    crc32c,
    datagram,
    destination,
    echo,
    fragment_header,
    fragments,
    frame,
    hop_by_hop,
    icmp,
    icmp_error,
    internet_checksum,
    routing,
    sctp,
    tcp,
    udp,
)
from tests.support.packets.parse import Cut, Icmp, Sctp, Tcp, Udp, parse

SUPPORT = Path(packets.__file__).parent
A, B, A6, B6 = "198.51.100.7", "192.0.2.1", "2001:db8::7", "2001:db8:1::1"
FROM, TO, FROM6, TO6 = f"{A}:4000", f"{B}:80", f"[{A6}]:4000", f"[{B6}]:80"
SYN, SYN6 = tcp(FROM, TO, flags="S", mss=1460), tcp(FROM6, TO6, flags="S", mss=1440)


# ---- published values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720 appendix B.4, as the next three
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
    ids=["check value", "zeros", "ones", "rising", "falling"],
)
def test_crc32c_is_as_published(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def test_the_internet_checksum_is_as_published() -> None:
    """RFC 1071 section 3."""
    assert internet_checksum(bytes.fromhex("0001f203f4f5f6f7")) == 0xDDF2 ^ 0xFFFF


def test_a_textbook_packet_is_built_identically() -> None:
    """A well-known textbook example, a DNS reply's header, without a UDP checksum."""
    raw = udp("192.168.0.1:53", "192.168.0.199:4000", bytes(87), checksum="zero", df=True, ip_id=0)
    assert raw[:28].hex(" ", 2) == ("4500 0073 0000 4000 4011 b861 c0a8 0001 c0a8 00c7 0035 0fa0 005f 0000")


def test_the_sctp_crc_is_stored_little_endian() -> None:
    raw = sctp(FROM, TO)
    crc = crc32c(raw[20:28] + bytes(4) + raw[32:])
    assert raw[28:32] == crc.to_bytes(4, "little")


# ---- rows: built packets and their parsed fields -----------------------------------------------

ROWS: list[tuple[str, bytes, dict[str, Any]]] = [
    ("a SYN", SYN, {"source": FROM, "destination": TO, "flags": "S", "transport.mss": 1460, "payload": b""}),
    (
        "every flag and number of TCP",
        tcp(FROM6, TO6, b"x", flags="CEUAPRSF", seq=2**32 - 1, ack=7, window=9, urgent=11),
        {
            "flags": "FSRPAUEC",
            "transport.sequence": 2**32 - 1,
            "transport.acknowledgement": 7,
            "transport.window": 9,
            "transport.urgent": 11,
            "payload": b"x",
        },
    ),
    (
        "an MSS behind other options",
        tcp(FROM, TO, tcp_options=bytes.fromhex("01 01 080a 0000000100000002 0204 05b4")),
        {"transport.mss": 1460},
    ),
    ("no MSS", tcp(FROM, TO, tcp_options=b"\x01\x03\x03\x07"), {"transport.mss": None}),
    (
        "the header of IPv4",
        udp(FROM, TO, b"abc", ttl=3, tos=0x2E << 2, df=True, ip_id=77),
        {
            "protocol": "udp",
            "ip.version": 4,
            "ip.ttl": 3,
            "ip.tos": 0xB8,
            "ip.df": True,
            "ip.id": 77,
            "ip.length": 31,
            "ip.more": False,
            "transport.length": 11,
            "payload": b"abc",
        },
    ),
    (
        "the header of IPv6",
        udp(FROM6, TO6, b"abc", ttl=3, tos=0xB8, flow=0xABCDE),
        {"ip.version": 6, "ip.ttl": 3, "ip.tos": 0xB8, "ip.flow": 0xABCDE, "ip.length": 11},
    ),
    (
        "IPv4 options are padded",
        udp(FROM, TO, b"abc", options=b"\x94\x04\0\0\x01"),
        {"ip.options": b"\x94\x04\0\0\x01\0\0\0", "source": FROM, "payload": b"abc"},
    ),
    (
        "all kinds of IPv6 extension headers",
        tcp(FROM6, TO6, b"abc", extensions=[hop_by_hop(), destination(), routing(A6, left=0), fragment_header(id=5)]),
        {
            "protocol": "tcp",
            "source": FROM6,
            "payload": b"abc",
            "ip.id": 5,
            "ip.extensions": (
                ("hop by hop", bytes.fromhex("00 05020000 0100")),
                ("destination", bytes.fromhex("00 010400000000")),
                ("routing", bytes.fromhex("02 02 00 00000000") + IPv6Address(A6).packed),
                ("fragment", bytes.fromhex("00 0000 00000005")),
            ),
        },
    ),
    (
        "chunks of SCTP",
        sctp(FROM, TO, chunk(1, b"12345", flags=3) + chunk(14), tag=99),
        {"protocol": "sctp", "source": FROM, "transport.tag": 99, "transport.chunks": ((1, 3, b"12345"), (14, 0, b""))},
    ),
    (
        "an echo",
        echo(A, B, b"abc", id=3, seq=4),
        {"source": A, "destination": B, "transport.type": 8, "transport.number": 0x30004},
    ),
    (
        "an echo's answer",
        echo(A6, B6, b"abc", id=3, seq=4, reply=True),
        {"protocol": "icmp6", "transport.type": 129, "payload": b"abc", "embedded": None},
    ),
    (
        "fragmentation needed",
        icmp_error("too big", "203.0.113.9", SYN, mtu=1400),
        {
            "source": "203.0.113.9",
            "destination": A,
            "transport.number": 1400,
            "embedded.source": FROM,
            "embedded.flags": "S",
            "payload": b"",
        },
    ),
    (
        "an error with as little as RFC 792 asks for",
        icmp_error("port unreachable", B, tcp(FROM, TO, b"abc"), quote=28),
        {"embedded.source": FROM, "embedded.transport.rest": bytes.fromhex("000003e8")} | {"embedded.missing": 15},
    ),
    (
        "packet too big",
        icmp_error("too big", B6, udp(FROM6, TO6, bytes(1400)), mtu=1280),
        {"ip.length": 1240, "transport.number": 1280, "embedded.source": FROM6} | {"embedded.missing": 216},
    ),
    (
        "a parameter problem points",
        icmp_error("parameter problem", B, SYN, pointer=20),
        {"transport.rest": b"\x14\0\0\0"},
    ),
    (
        "an unknown protocol",
        datagram(A, B, 47, b"abc"),
        {"protocol": "47", "source": A, "transport": None, "payload": b"abc"},
    ),
]


@pytest.mark.parametrize(("raw", "want"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_built_packets_are_parsed(raw: bytes, want: dict[str, Any]) -> None:
    found = parse(frame(raw))
    got = {}
    for path in want:
        value: Any = found
        for part in path.split("."):
            value = getattr(value, part)
        got[path] = value
    assert got == want
    assert checksums(found) == []
    assert (found.packet, found.missing, found.trailer) == (raw, 0, b"")
    assert difference(found, parse(raw, l2=False)).startswith("ethernet destination: ")


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(("by", "packet"), [(B, SYN), (B6, SYN6)], ids=["IPv4", "IPv6"])
def test_every_error_quotes_the_packet(kind: str, by: str, packet: bytes) -> None:
    found = parse(icmp_error(kind, by, packet), l2=False)
    assert found.embedded is not None
    assert found.embedded.packet == packet
    assert checksums(found) == []


def test_frame_padding_is_the_trailer() -> None:
    found = parse(frame(SYN) + bytes(2))
    assert found.trailer == bytes(2)
    assert checksums(found) == []


def test_an_arp_request_is_parsed() -> None:
    mac = "02:00:00:00:00:01"
    found = parse(frame(packets.arp(1, mac, A, "00:00:00:00:00:00", B), packets.BROADCAST, mac))
    assert (found.protocol, found.source, found.destination) == ("arp", A, B)
    assert found.arp is not None
    assert (found.arp.operation, found.arp.source_mac) == (1, mac)


def test_a_solicitation_goes_to_the_multicast_address() -> None:
    assert packets.solicited("2001:db8::12:3456") == ("ff02::1:ff12:3456", "33:33:ff:12:34:56")
    found = parse(packets.neighbour_solicitation("02:00:00:00:00:01", A6, B6), l2=False)
    assert (found.destination, checksums(found)) == ("ff02::1:ff00:1", [])
    assert found.ip is not None
    assert found.ip.ttl == 255


def test_a_checksum_uses_the_routing_headers_last_stop() -> None:
    """RFC 8200 section 8.1: the checksum uses the final destination, not the next stop."""
    for kind in (0, 2, 4):
        raw = udp(FROM6, TO6, b"abc", extensions=[routing("2001:db8::8", "2001:db8::9", kind=kind)])
        last = udp(FROM6, "[2001:db8::9]:80", b"abc")
        assert raw[-11:] == last[-11:]
        assert checksums(raw, l2=False) == []


@pytest.mark.parametrize("junk", [b"", b"\x45", SYN[:19], b"\x45" + bytes(19), SYN6[:39], b"\x75" + bytes(60)])
def test_bytes_that_are_not_a_packet_are_an_error(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r"are not an IP packet|the IP header ends"):
        parse(junk, l2=False)


# ---- rows: errors ------------------------------------------------------------------------------

INNER = udp(FROM, TO, b"abc", checksum="wrong", ip_checksum="wrong")
INNER6 = tcp(FROM6, TO6, b"abc", checksum="wrong")

WRONG: list[tuple[bytes, list[str]]] = [
    (tcp(FROM, TO, b"abc", checksum="wrong"), ["tcp"]),
    (tcp(FROM6, TO6, b"abc", checksum="wrong"), ["tcp"]),
    (tcp(FROM, TO, ip_checksum="wrong"), ["ip"]),
    (tcp(FROM, TO, ip_checksum=0x1234, checksum=0x1234), ["ip", "tcp"]),
    (udp(FROM, TO, b"abc", checksum="wrong"), ["udp"]),
    (udp(FROM, TO, b"abc", checksum="zero"), []),
    (udp(FROM6, TO6, b"abc", checksum="zero"), ["udp"]),
    (sctp(FROM, TO, checksum="wrong"), ["sctp"]),
    (sctp(FROM6, TO6, checksum="zero"), ["sctp"]),
    (icmp(A, B, 8, checksum="wrong"), ["icmp"]),
    (icmp(A6, B6, 128, checksum="wrong"), ["icmp6"]),
    (icmp_error("port unreachable", B, INNER), ["icmp embedded ip", "icmp embedded udp"]),
    (icmp_error("port unreachable", B, INNER, quote=28), ["icmp embedded ip"]),
    (icmp_error("port unreachable", B6, INNER6), ["icmp6 embedded tcp"]),
    (icmp_error("port unreachable", B6, INNER6, quote=60), []),
    (datagram(A, B, 17, struct.pack("!HHHH", 1, 2, 30, 0)), ["udp length"]),
    (datagram(A, B, 6, bytes(12)), ["tcp header"]),
    (SYN[:-4], ["ip length"]),
    (fragments(udp(FROM, TO, bytes(100), checksum="wrong"), 60)[0], []),
]


@pytest.mark.parametrize(("raw", "wrong"), WRONG)
def test_wrong_headers_are_named(raw: bytes, wrong: list[str]) -> None:
    assert checksums(frame(raw)) == wrong


DIFFERENCES: list[tuple[bytes, bytes, str]] = [
    (SYN, SYN, ""),
    (
        tcp(FROM, TO, flags="SA", checksum=1),
        tcp(FROM, f"{B}:81", flags="S", checksum=2),
        "tcp destination port: 80, want 81; tcp flags: SA, want S; tcp checksum: 0x0001, want 0x0002",
    ),
    (
        udp(FROM, TO, checksum=0, ip_checksum=0, ttl=63),
        udp(FROM, f"{A}:80", checksum=0, ip_checksum=0),
        f"ip destination: {B}, want {A}; ip ttl: 63, want 64",
    ),
    (
        udp(FROM, TO, b"abcde", checksum=0),
        udp(FROM, TO, b"abCdE", checksum=0),
        "payload: 5 bytes from byte 2 636465, want 5 bytes from byte 2 436445",
    ),
    (
        icmp_error("port unreachable", B, udp(FROM, TO, checksum=0), checksum=0),
        icmp_error("port unreachable", B, udp(FROM, f"{B}:9", checksum=0), checksum=0),
        "embedded udp destination port: 80, want 9",
    ),
    (
        sctp(FROM, TO, chunk(1, b"1"), checksum=0),
        sctp(FROM, TO, b"\x01\0\0\x05" + b"1xx\0", checksum=0),
        "some bytes: 40 bytes from byte 37 000000, want 40 bytes from byte 37 787800",
    ),
]


@pytest.mark.parametrize(("got", "want", "words"), DIFFERENCES)
def test_differences_are_described(got: bytes, want: bytes, words: str) -> None:
    assert difference(got, want, l2=False) == words


def test_a_packet_prints_as_text() -> None:
    error = icmp_error("time exceeded", "203.0.113.9", tcp(FROM, TO, b"abc", flags="PA"))
    assert str(parse(error, l2=False)) == (
        "203.0.113.9 → 198.51.100.7 icmp type 11 code 0 0 bytes about "
        "(198.51.100.7:4000 → 192.0.2.1:80 tcp PA seq 1000 ack 0 3 bytes)"
    )


@pytest.mark.parametrize("name", ["packets", "datagrams", "parse", "judge"])
def test_builder_and_parser_import_nothing_of_kbpf_or_of_each_other(name: str) -> None:
    tree = ast.parse((SUPPORT / f"{name}.py").read_text())
    named = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    mine = {"packets", "datagrams"} if name in ("packets", "datagrams") else {"parse", "judge"}
    ours = {module for module in named if module.startswith(("kbpf", "tests"))}
    assert ours <= {f"tests.support.packets.{one}" for one in mine}


# ---- properties of all built packets -----------------------------------------------------------

ports = st.integers(0, 65535)
bodies = st.binary(max_size=200)
ends4 = st.tuples(st.ip_addresses(v=4), st.ip_addresses(v=4), ports, ports)
ends6 = st.tuples(st.ip_addresses(v=6), st.ip_addresses(v=6), ports, ports)
headers4 = st.fixed_dictionaries(
    {
        "ttl": st.integers(0, 255),
        "tos": st.integers(0, 255),
        "ip_id": ports,
        "options": st.binary(max_size=10).map(lambda data: b"\x94" + bytes([len(data) + 2]) + data) | st.just(b""),
    }
)
extensions = st.lists(
    st.binary(max_size=5).map(lambda data: destination(bytes([30, len(data)]) + data))
    | st.just(hop_by_hop())
    | st.ip_addresses(v=6).map(lambda stop: routing(str(stop)))
    | st.just(routing(A6, left=0)),
    max_size=3,
)
headers6 = st.fixed_dictionaries(
    {"ttl": st.integers(0, 255), "tos": st.integers(0, 255), "flow": st.integers(0, 0xFFFFF), "extensions": extensions}
)


def _end(address: IPv4Address | IPv6Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _build(kind: str, ends: tuple[Any, Any, int, int], body: bytes, ip: dict[str, Any]) -> bytes:
    source, to = _end(ends[0], ends[2]), _end(ends[1], ends[3])
    match kind:
        case "tcp":
            return tcp(source, to, body, seq=len(body) << 20, **ip)
        case "udp":
            return udp(source, to, body, **ip)
        case "sctp":
            return sctp(source, to, chunk(0, body), tag=ends[2] << 8, **ip)
    return echo(str(ends[0]), str(ends[1]), body, id=ends[2], seq=ends[3], **ip)


built = st.one_of(
    *(
        st.builds(_build, st.sampled_from(["tcp", "udp", "sctp", "echo"]), ends, bodies, headers)
        for ends, headers in ((ends4, headers4), (ends6, headers6))
    )
)


@given(st.sampled_from([(ends4, headers4), (ends6, headers6)]), bodies, st.data())
def test_all_built_fields_are_parsed(families: Any, body: bytes, data: st.DataObject) -> None:
    ends, ip = data.draw(families[0]), data.draw(families[1])
    for kind in ("tcp", "udp", "sctp"):
        found = parse(frame(_build(kind, ends, body, ip)))
        assert found.ip is not None
        assert found.protocol == kind
        assert (found.source, found.destination) == (_end(ends[0], ends[2]), _end(ends[1], ends[3]))
        assert (found.ip.ttl, found.ip.tos) == (ip["ttl"], ip["tos"])
        assert found.ip.id == ip.get("ip_id", 0)
        assert found.ip.flow == ip.get("flow", 0)
        assert len(found.ip.extensions) == len(ip.get("extensions", ()))
        match found.transport:
            case Sctp(chunks=((_, _, inside),)):
                assert inside == body
            case _:
                assert found.payload == body


@given(built)
def test_built_packets_have_correct_checksums(raw: bytes) -> None:
    assert checksums(raw, l2=False) == []
    assert difference(raw, bytes(raw), l2=False) == ""


@given(built, st.data())
def test_a_flipped_bit_in_a_segment_is_detected(raw: bytes, data: st.DataObject) -> None:
    segment = parse(raw, l2=False).segment
    at = data.draw(st.integers((len(raw) - len(segment)) * 8, len(raw) * 8 - 1))
    bad = bytearray(raw)
    bad[at // 8] ^= 0x80 >> at % 8
    found = parse(bytes(bad), l2=False)
    assume(not (isinstance(found.transport, Udp) and found.transport.checksum == 0))
    assert checksums(found) != []
    assert difference(found, raw, l2=False) != ""


@given(built, st.data())
def test_a_flipped_bit_anywhere_is_a_difference(raw: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    bad = bytearray(raw)
    bad[at // 8] ^= 0x80 >> at % 8
    try:
        found = parse(bytes(bad), l2=False)
    except ValueError:
        return
    assert difference(found, raw, l2=False) != ""


@given(built, st.integers(160, 400), st.randoms(use_true_random=False))
def test_fragments_fit_and_reassemble(raw: bytes, mtu: int, order: random.Random) -> None:
    pieces = fragments(raw, mtu)
    assert [len(piece) for piece in pieces if len(piece) > mtu] == []
    assert [wrong for piece in pieces for wrong in checksums(piece, l2=False)] == []
    if len(raw) <= mtu:
        assert pieces == [raw]
        return
    order.shuffle(pieces)
    assert reassembled(*pieces) == raw
    if len(pieces) > 1:
        with pytest.raises(ValueError, match="not there"):
            reassembled(*pieces[1:])


@given(st.binary(max_size=120))
def test_junk_is_parsed_or_refused(junk: bytes) -> None:
    for first in (b"", b"\x45", b"\x60", b"\x60\0\0\0\0\x40\0\x40"):
        try:
            found = parse(first + junk, l2=False)
        except ValueError:
            continue
        checksums(found)
        str(found)


def test_only_copied_options_are_in_every_fragment() -> None:
    """The high bit of an option's type decides: a router alert is copied, a timestamp is not."""
    raw = udp(FROM, TO, bytes(200), options=b"\x94\x04\0\0" + b"\x44\x08\x05\0\0\0\0\0")
    first, *others = (parse(piece, l2=False).ip for piece in fragments(raw, 100))
    assert first is not None
    assert len(first.options) == 12
    assert {one.options for one in others if one} == {b"\x94\x04\0\0"}


def test_a_packet_with_df_is_not_fragmented() -> None:
    with pytest.raises(AssertionError, match="DF"):
        fragments(udp(FROM, TO, bytes(200), df=True), 100)


def test_fragments_of_fragments_reassemble() -> None:
    raw = udp(FROM, TO, bytes(range(200)))
    pieces = [small for big in fragments(raw, 120) for small in fragments(big, 60)]
    assert reassembled(*pieces) == raw


def test_a_truncated_header_has_its_ports() -> None:
    found = parse(icmp_error("port unreachable", B, SYN, quote=24), l2=False)
    assert found.embedded is not None
    assert found.embedded.transport == Cut(4000, 80, b"")


def test_only_icmp_errors_embed_a_packet() -> None:
    found = parse(icmp(A, B, 8, embedded=SYN), l2=False)
    assert isinstance(found.transport, Icmp)
    assert (found.embedded, found.payload) == (None, SYN)


def test_any_ipv6_extension_header_can_be_built() -> None:
    raw = tcp(FROM6, TO6, extensions=[Extension(60, b"\0\x01\x04\0\0\0\0")])
    assert isinstance(parse(raw, l2=False).transport, Tcp)
