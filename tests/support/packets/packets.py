# SPDX-License-Identifier: Apache-2.0
"""Builds packets byte by byte: those that a test sends, and those that it expects.

    tcp("198.51.100.7:4000", "192.0.2.1:80", flags="S", mss=1460)
    frame(udp("[2001:db8::7]:53", "[2001:db8::1]:53", b"?"), to="02:00:00:00:00:01")
    icmp_error("too big", "203.0.113.9", tcp(...), mtu=1400)

A packet is bytes that begin with the IP header; frame() adds an Ethernet header. The addresses
determine the family. Lengths and checksums are correct unless requested otherwise. Every builder
takes fields of the IP header by the names of `Ip`.

Imports nothing of kbpf and shares no code with parse.py, so that each can check the other.
"""

import struct
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Literal, NamedTuple, TypedDict, Unpack

ICMP, TCP, UDP, ICMP6, SCTP = 1, 6, 17, 58, 132
HOP_BY_HOP, ROUTING, FRAGMENT, DESTINATION = 0, 43, 44, 60

MAC_A, MAC_B = "02:00:00:00:00:0a", "00:00:00:00:00:00"
"""The default source and destination of a frame. B is loopback's MAC: test runs happen on loopback,
where a frame for another MAC would be PACKET_OTHERHOST.
"""
BROADCAST = "ff:ff:ff:ff:ff:ff"

Sum = Literal["right", "wrong", "zero"] | int
"""A checksum: correct, off by one bit, absent (allowed for UDP over IPv4), or exactly this
number.
"""


class Extension(NamedTuple):
    """An IPv6 extension header without its first byte, which the builder fills in."""

    kind: int
    body: bytes
    final: str = ""
    """The final destination of a routing header, which the checksum's pseudo header uses."""


class Ip(TypedDict, total=False):
    """Fields of the IP header. In IPv6 `ttl` is the hop limit and `tos` the traffic class."""

    ttl: int
    tos: int
    df: bool
    ip_id: int
    options: bytes
    """IPv4 options, which the builder pads to a multiple of four bytes."""
    ip_checksum: Sum
    flow: int
    extensions: Sequence[Extension]


# ---- addresses and checksums -------------------------------------------------------------------


def address(text: str) -> bytes:
    """The 4 or 16 bytes of an address."""
    return ip_address(text).packed


def mac(text: str) -> bytes:
    """The 6 bytes of a MAC address."""
    return bytes.fromhex(text.replace(":", ""))


def end(host: str, port: int) -> str:
    """``10.0.0.1:80`` or ``[fd00::1]:80``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(endpoint: str) -> tuple[str, int]:
    """Host and port of ``10.0.0.1:80`` or ``[fd00::1]:80``."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def internet_checksum(data: bytes) -> int:
    """RFC 1071: the complement of the ones' complement sum of 16-bit words."""
    padded = data + bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def _crc_row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = tuple(_crc_row(byte) for byte in range(256))


def crc32c(data: bytes) -> int:
    """The CRC32c of RFC 9260 appendix A, as a number; in a packet it is little endian."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def stored(right: int, wanted: Sum) -> int:
    match wanted:
        case "right":
            return right
        case "wrong":
            return right ^ 0x0100
        case "zero":
            return 0
    return wanted


def summed(protocol: int, source: str, to: str, segment: bytes, at: int, checksum: Sum, ip: Ip) -> bytes:
    """The segment with its checksum, which covers the pseudo header, at this offset."""
    final = [e.final for e in ip.get("extensions", ()) if e.final]
    form = "!II" if ":" in source else "!xBH"
    numbers = (len(segment), protocol) if ":" in source else (protocol, len(segment))
    pseudo = address(source) + address(final[-1] if final else to) + struct.pack(form, *numbers)
    right = internet_checksum(pseudo + segment)
    if protocol == UDP:
        right = right or 0xFFFF  # in UDP zero means no checksum
    return segment[:at] + struct.pack("!H", stored(right, checksum)) + segment[at + 2 :]


# ---- IP and Ethernet ---------------------------------------------------------------------------


def frame(packet: bytes, to: str = MAC_B, source: str = MAC_A) -> bytes:
    """The packet with an Ethernet header; its EtherType (IP or ARP) follows from the first byte."""
    kind = {4: 0x0800, 6: 0x86DD, 0: 0x0806}[packet[0] >> 4]
    return mac(to) + mac(source) + struct.pack("!H", kind) + packet


def datagram(source: str, to: str, protocol: int, body: bytes, **ip: Unpack[Ip]) -> bytes:
    if ":" in source:
        return _ipv6(source, to, protocol, body, ip)
    options = ip.get("options", b"")
    options += bytes(-len(options) % 4)
    header = struct.pack(
        "!BBHHHBBH4s4s",
        0x45 + len(options) // 4,
        ip.get("tos", 0),
        20 + len(options) + len(body),
        ip.get("ip_id", 1),
        0x4000 if ip.get("df") else 0,
        ip.get("ttl", 64),
        protocol,
        0,
        address(source),
        address(to),
    )
    return _with_header_sum(header + options, ip.get("ip_checksum", "right")) + body


def _with_header_sum(header: bytes, wanted: Sum = "right") -> bytes:
    blank = header[:10] + b"\0\0" + header[12:]
    return header[:10] + struct.pack("!H", stored(internet_checksum(blank), wanted)) + header[12:]


def _ipv6(source: str, to: str, protocol: int, body: bytes, ip: Ip) -> bytes:
    for extension in reversed(ip.get("extensions", ())):
        body = bytes([protocol]) + extension.body + body
        protocol = extension.kind
    word = 6 << 28 | ip.get("tos", 0) << 20 | ip.get("flow", 0)
    fixed = struct.pack("!IHBB", word, len(body), protocol, ip.get("ttl", 64))
    return fixed + address(source) + address(to) + body


def _padded(kind: int, data: bytes) -> Extension:
    """An options header. Its length field counts units of eight bytes after the first eight."""
    room = -(2 + len(data)) % 8
    padding = b"" if room == 0 else b"\0" if room == 1 else bytes([1, room - 2]) + bytes(room - 2)
    return Extension(kind, bytes([(2 + len(data) + room) // 8 - 1]) + data + padding)


def hop_by_hop(options: bytes = b"\x05\x02\0\0") -> Extension:
    """A hop-by-hop options header; by default a router alert."""
    return _padded(HOP_BY_HOP, options)


def destination(options: bytes = b"") -> Extension:
    """A destination options header; by default only padding."""
    return _padded(DESTINATION, options)


def routing(*stops: str, left: int | None = None) -> Extension:
    """A routing header of type 2 with further stops in the order of visit (RFC 6275)."""
    left = len(stops) if left is None else left
    body = bytes(4) + b"".join(map(address, stops))
    return Extension(ROUTING, bytes([2 * len(stops), 2, left]) + body, stops[-1] if left else "")


def fragments(packet: bytes, mtu: int, id: int = 1) -> list[bytes]:
    """The packet's fragments for this MTU, as a router or, for IPv6, the sender makes them; but IPv4
    options are in the first one only.
    """
    if packet[0] >> 4 == 6:
        return _fragments6(packet, mtu, id)
    size = (packet[0] & 0x0F) * 4
    header, body = packet[:size], packet[size:]
    flags = int.from_bytes(header[6:8], "big")
    if len(packet) <= mtu:
        return [packet]
    assert not flags & 0x4000, "the packet has DF set"
    base, last = (flags & 0x1FFF) * 8, flags & 0x2000
    later = b"\x45" + header[1:20]
    made, at = [], 0
    while at < len(body):
        own = later if at else header
        step = len(body) - at if len(own) + len(body) - at <= mtu else (mtu - len(own)) // 8 * 8
        assert step > 0, f"nothing fits into {mtu} bytes"
        word = (base + at) // 8 | (last if at + step == len(body) else 0x2000)
        sized = own[:2] + struct.pack("!HHH", len(own) + step, int.from_bytes(own[4:6]), word)
        made.append(_with_header_sum(sized + own[8:]) + body[at : at + step])
        at += step
    return made


def _fragments6(packet: bytes, mtu: int, id: int) -> list[bytes]:
    if len(packet) <= mtu:
        return [packet]
    named_at, at = 6, 40  # offsets of the next-header field, and of that header
    last_kept = (6, 40)
    while packet[named_at] in (HOP_BY_HOP, ROUTING, DESTINATION):
        kind, named_at, at = packet[named_at], at, at + (packet[at + 1] + 1) * 8
        if kind != DESTINATION:
            last_kept = (named_at, at)
    named_at, at = last_kept
    head, body = packet[:at], packet[at:]
    first = packet[named_at]
    head = head[:named_at] + bytes([FRAGMENT]) + head[named_at + 1 :]
    step = (mtu - at - 8) // 8 * 8
    assert step > 0, f"nothing fits into {mtu} bytes"
    made = []
    for start in range(0, len(body), step):
        piece = body[start : start + step]
        word = start | (start + step < len(body))
        length = struct.pack("!H", at - 40 + 8 + len(piece))
        made.append(head[:4] + length + head[6:] + struct.pack("!BBHI", first, 0, word, id) + piece)
    return made


# ---- transports --------------------------------------------------------------------------------

_FLAGS = "FSRPAUEC"


def tcp(
    source: str,
    to: str,
    payload: bytes = b"",
    *,
    flags: str = "A",
    seq: int = 1000,
    ack: int = 0,
    mss: int | None = None,
    tcp_options: bytes = b"",
    urgent: int = 0,
    checksum: Sum = "right",
    **ip: Unpack[Ip],
) -> bytes:
    """A TCP segment; flags are letters of FSRPAUEC (E and C are ECE and CWR)."""
    (host, port), (to_host, to_port) = split(source), split(to)
    options = (b"" if mss is None else struct.pack("!BBH", 2, 4, mss)) + tcp_options
    options += bytes(-len(options) % 4)
    bits = sum(1 << _FLAGS.index(letter) for letter in flags)
    word = (20 + len(options)) // 4 << 12 | bits
    header = struct.pack("!HHIIHHHH", port, to_port, seq, ack, word, 64240, 0, urgent)
    body = summed(TCP, host, to_host, header + options + payload, 16, checksum, ip)
    return datagram(host, to_host, TCP, body, **ip)


class Talk:
    """A TCP connection's segments with correct sequence numbers in both directions.

    A word describes a segment: its flags, preceded by "<" if the server sends it, and followed by
    "+" or "+100" for ten or 100 bytes of data, "!" for a segment forged without knowing the
    sequence numbers, "~" for a wrong checksum. The latter two do not advance the sequence numbers.
    """

    def __init__(self, client: int = 1000, server: int = 70_000) -> None:
        self._first = {False: client, True: server}
        self._next = dict(self._first)

    def segment(self, word: str, source: str, to: str, **ip: Unpack[Ip]) -> bytes:
        """The segment that the word describes, between these endpoints."""
        back, flags = word.startswith("<"), "".join(filter(str.isalpha, word))
        seq = self._first[back] if "S" in flags else self._next[back]
        ack = self._next[not back] if "A" in flags else 0
        _, plus, size = word.rstrip("!~|").partition("+")
        data = bytes(int(size or 10)) if plus else b""
        if "!" in word:
            off = 1 << (29 if back else 30)
            seq, ack = (number + off & 0xFFFFFFFF for number in (seq, ack))
        elif "~" not in word and "R" not in flags:
            self._next[back] = seq + len(data) + ("S" in flags) + ("F" in flags)
        checksum: Sum = "wrong" if "~" in word else "right"
        return tcp(source, to, data, flags=flags, seq=seq, ack=ack, checksum=checksum, **ip)


def udp(source: str, to: str, payload: bytes = b"", *, checksum: Sum = "right", **ip: Unpack[Ip]) -> bytes:
    (host, port), (to_host, to_port) = split(source), split(to)
    header = struct.pack("!HHHH", port, to_port, 8 + len(payload), 0)
    body = summed(UDP, host, to_host, header + payload, 6, checksum, ip)
    return datagram(host, to_host, UDP, body, **ip)


def chunk(kind: int, body: bytes = b"", flags: int = 0) -> bytes:
    """One chunk of an SCTP packet, padded."""
    return struct.pack("!BBH", kind, flags, 4 + len(body)) + body + bytes(-len(body) % 4)


def sctp_init(tag: int, kind: int = 1) -> bytes:
    """The first chunk of an association, whose packet has the tag 0; or, as kind 2, the answer. `tag`: of the packets
    to its sender.
    """
    return chunk(kind, struct.pack("!IIHHI", tag, 65536, 10, 10, 1))


SCTP_TAG, SCTP_BACK_TAG = 0x11223344, 0x55667788
"""The tags of packets to the client and to the server."""
SCTP_INIT, SCTP_INIT_ACK = sctp_init(SCTP_TAG), sctp_init(SCTP_BACK_TAG, 2)


def sctp(
    source: str,
    to: str,
    chunks: bytes = SCTP_INIT,
    *,
    tag: int = 0,
    checksum: Sum = "right",
    **ip: Unpack[Ip],
) -> bytes:
    """An SCTP packet of chunks. Its checksum does not cover the addresses."""
    (host, port), (to_host, to_port) = split(source), split(to)
    head = struct.pack("!HHI", port, to_port, tag)
    crc = stored(crc32c(head + bytes(4) + chunks), checksum)
    return datagram(host, to_host, SCTP, head + struct.pack("<I", crc) + chunks, **ip)


def icmp(
    source: str,
    to: str,
    type: int,
    code: int = 0,
    rest: int | bytes = 0,
    embedded: bytes = b"",
    *,
    checksum: Sum = "right",
    **ip: Unpack[Ip],
) -> bytes:
    """An ICMP message of the addresses' family. `rest`: the four bytes after the checksum.
    `embedded`: the bytes that follow. Only ICMPv6 has a pseudo header in its checksum.
    """
    last = rest if isinstance(rest, bytes) else struct.pack("!I", rest)
    message = struct.pack("!BBH", type, code, 0) + last + embedded
    if ":" in source:
        body = summed(ICMP6, source, to, message, 2, checksum, ip)
        return datagram(source, to, ICMP6, body, **ip)
    right = stored(internet_checksum(message), checksum)
    return datagram(source, to, ICMP, message[:2] + struct.pack("!H", right) + message[4:], **ip)


def echo(source: str, to: str, payload: bytes = b"", *, id: int = 1, seq: int = 1, **ip: Unpack[Ip]) -> bytes:
    """A ping."""
    return icmp(source, to, 128 if ":" in source else 8, 0, id << 16 | seq, payload, **ip)


ROWS = """
net unreachable 3 0 1 0
host unreachable 3 1 1 3
port unreachable 3 3 1 4
prohibited 3 13 1 1
too big 3 4 2 0
time exceeded 11 0 3 0
reassembly timed out 11 1 3 1
parameter problem 12 0 4 0
"""
"""Name, and type and code in IPv4 and in IPv6."""
SPLIT = [row.rsplit(maxsplit=4) for row in ROWS.strip().splitlines()]
ERRORS = {name: tuple(map(int, numbers)) for name, *numbers in SPLIT}


def icmp_error(
    kind: str,
    by: str,
    packet: bytes,
    *,
    mtu: int = 0,
    quote: int | None = None,
    **ip: Unpack[Ip],
) -> bytes:
    """The ICMP error that `by` sends to the sender of this packet. `quote`: how many bytes of the
    packet it quotes; by default as many as Linux does, so that the error has at most 576 bytes (RFC
    1812), or 1280 in IPv6 (RFC 4443).
    """
    v6 = packet[0] >> 4 == 6
    to = str(ip_address(packet[8:24] if v6 else packet[12:16]))
    kinds = ERRORS[kind][2:] if v6 else ERRORS[kind][:2]
    most = (1280 - 48 if v6 else 576 - 28) if quote is None else quote
    return icmp(by, to, *kinds, mtu, packet[:most], **ip)


# ---- neighbours --------------------------------------------------------------------------------


def arp(operation: int, source_mac: str, source: str, to_mac: str, to: str) -> bytes:
    """An ARP packet (operation 1: who has `to`; 2: the reply) without its Ethernet header."""
    head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation)
    return head + mac(source_mac) + address(source) + mac(to_mac) + address(to)
