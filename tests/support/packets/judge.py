# SPDX-License-Identifier: Apache-2.0
"""Finds errors in a packet, and reassembles fragments.

    assert checksums(packet) == []  # else ["tcp", "icmp embedded ip", ...]

Shares no code with the builder, so that each can check the other.
"""

import struct
from collections.abc import Iterator
from ipaddress import ip_address

from tests.support.packets.parse import Cut, Icmp, Ip, Packet, Sctp, Tcp, Udp, parse


def checksums(found: Packet | bytes, l2: bool = True) -> list[str]:
    """The headers with a wrong checksum, ``ip``, ``tcp``, ``icmp embedded ip``, or length, ``udp
    length``.

    What cannot be verified counts as correct: the transport checksum of a fragment, or of a packet
    that is quoted only in part.
    """
    packet = found if isinstance(found, Packet) else parse(found, l2)
    wrong = list(_wrong(packet))
    if packet.missing:
        wrong.append("ip length")
    if packet.embedded is not None:
        wrong += [f"{packet.protocol} embedded {what}" for what in _wrong(packet.embedded)]
    return wrong


def _wrong(packet: Packet) -> Iterator[str]:
    ip, transport, segment = packet.ip, packet.transport, packet.segment
    if ip is None:
        return
    if ip.version == 4 and not _adds_up(packet.packet[: 20 + len(ip.options)]):
        yield "ip"
    if packet.missing or ip.more or ip.offset:
        return
    numbers = struct.pack("!II", len(segment), ip.protocol)
    pseudo = ip_address(ip.source).packed + ip_address(_last_stop(ip)).packed + numbers
    match transport:
        case Tcp() if not _adds_up(pseudo + segment):
            yield "tcp"
        case Udp() if transport.length != len(segment):
            yield "udp length"
        case Udp(checksum=0):
            if ip.version == 6:
                yield "udp"
        case Udp() if not _adds_up(pseudo + segment):
            yield "udp"
        case Icmp() if not _adds_up(pseudo + segment if ip.protocol == 58 else segment):
            yield packet.protocol
        case Sctp() if transport.checksum != _crc32c(segment[:8] + bytes(4) + segment[12:]):
            yield "sctp"
        case Cut():
            yield f"{packet.protocol} header"


def _last_stop(ip: Ip) -> str:
    """The destination in the checksum's pseudo header: the last stop of a routing header."""
    for name, body in reversed(ip.extensions):
        if name == "routing" and body[1] in (0, 2) and body[2] > 0:
            return str(ip_address(body[-16:]))
    return ip.destination


def _adds_up(data: bytes) -> bool:
    """Whether the 16-bit words sum to 0 modulo 65535. 2^16 is 1 modulo 65535, so the sum of all
    words equals the whole number.
    """
    return int.from_bytes(data + bytes(len(data) % 2), "big") % 0xFFFF == 0


def _crc32c(data: bytes) -> int:
    """CRC32c bit by bit, lowest bit first."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def reassembled(*pieces: bytes) -> bytes:
    """The packet of which these are the fragments, in any order; ValueError if some are missing.
    Its header is the first fragment's, with the fragmentation fields cleared.
    """
    parts = sorted(map(_piece, pieces), key=lambda part: part[0])
    body = b""
    for offset, _, _, data in parts:
        if offset != len(body):
            raise ValueError(f"bytes {len(body)} to {offset} are missing")
        body += data
    if parts[-1][1]:
        raise ValueError(f"bytes from {len(body)} on are missing")
    head = parts[0][2]
    if head[0] >> 4 == 6:
        return head[:4] + struct.pack("!H", len(head) - 40 + len(body)) + head[6:] + body
    flags = bytes([head[6] & 0x40, 0])
    head = head[:2] + struct.pack("!H", len(head) + len(body)) + head[4:6] + flags + head[8:]
    blank = head[:10] + b"\0\0" + head[12:]
    checksum = 0xFFFF - int.from_bytes(blank, "big") % 0xFFFF
    return head[:10] + struct.pack("!H", checksum) + head[12:] + body


def _piece(raw: bytes) -> tuple[int, bool, bytes, bytes]:
    """A fragment's offset, whether more follow, its header without a fragment header, its data."""
    found = parse(raw, l2=False)
    assert found.ip is not None
    ip, packet = found.ip, found.packet
    if ip.version == 4:
        start = 20 + len(ip.options)
        return ip.offset, ip.more, packet[:start], packet[start:]
    named_at, at = 6, 40
    while packet[named_at] != 44:
        if packet[named_at] not in (0, 43, 60):
            raise ValueError("not a fragment")
        named_at, at = at, at + (packet[at + 1] + 1) * 8
    head = packet[:named_at] + packet[at : at + 1] + packet[named_at + 1 : at]
    return ip.offset, ip.more, head, packet[at + 8 :]
