# SPDX-License-Identifier: Apache-2.0
"""The lower layers of packets.py: addresses, checksums, IP with its options and extension headers,
fragments, Ethernet.
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
