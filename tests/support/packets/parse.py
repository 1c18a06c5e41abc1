# SPDX-License-Identifier: Apache-2.0
"""Parses a packet into a value, and finds errors in it.

    packet = parse(raw)                    # a frame; parse(raw, l2=False): it begins with IP
    packet.source, packet.flags            # "198.51.100.7:4000", "SA"
    packet.embedded                        # the packet that an ICMP error is about
    assert checksums(packet) == []         # else ["tcp", "icmp embedded ip", ...]

Shares no code with the builder, so that each can check the other.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address

PROTOCOLS = {1: "icmp", 2: "igmp", 6: "tcp", 17: "udp", 50: "esp", 58: "icmp6", 132: "sctp"}
_EXTENSIONS = {0: "hop by hop", 43: "routing", 44: "fragment", 51: "auth", 60: "destination"}
_ERRORS = {4: frozenset((3, 4, 5, 11, 12)), 6: frozenset((1, 2, 3, 4, 137))}
_FLAGS = "FSRPAUEC"


@dataclass(frozen=True, slots=True)
class Ethernet:
    destination: str
    source: str
    ethertype: int


@dataclass(frozen=True, slots=True)
class Ip:
    """The IP header of either family. A field that the family lacks is 0, empty or, for the
    checksum, None.

    `length` is the header's field: with the header in IPv4, without it in IPv6. Offsets are in
    bytes. `protocol` is the one after all extension headers.
    """

    version: int
    source: str
    destination: str
    protocol: int
    ttl: int
    tos: int
    length: int
    id: int
    df: bool
    more: bool
    offset: int
    checksum: int | None
    options: bytes
    flow: int
    extensions: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Tcp:
    """The TCP header. `options` are raw bytes; `reserved` are the four bits after the data
    offset.
    """

    source_port: int
    destination_port: int
    sequence: int
    acknowledgement: int
    flags: str
    window: int
    checksum: int
    urgent: int
    reserved: int
    options: bytes


@dataclass(frozen=True, slots=True)
class Udp:
    source_port: int
    destination_port: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Sctp:
    """The SCTP header and its chunks: (type, flags, body without padding)."""

    source_port: int
    destination_port: int
    tag: int
    checksum: int
    chunks: tuple[tuple[int, int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Icmp:
    """The ICMP header of either family. `rest` are the four bytes after the checksum."""

    type: int
    code: int
    checksum: int
    rest: bytes

    @property
    def number(self) -> int:
        """`rest` as a number: the MTU of "too big", or id and sequence of an echo."""
        return int.from_bytes(self.rest, "big")


@dataclass(frozen=True, slots=True)
class Cut:
    """A truncated header, as quoted by ICMP errors."""

    source_port: int
    destination_port: int
    rest: bytes


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet. `payload` are the bytes after all known headers, `trailer` the bytes after the
    packet in its frame, `missing` how many bytes shorter it is than its header says.
    """

    raw: bytes = field(repr=False, compare=False)
    ethernet: Ethernet | None = None
    ip: Ip | None = None
    transport: Tcp | Udp | Sctp | Icmp | Cut | None = None
    embedded: "Packet | None" = None
    payload: bytes = b""
    trailer: bytes = b""
    missing: int = 0
    packet: bytes = field(default=b"", repr=False, compare=False)
    """The IP packet without Ethernet header and trailer."""
    segment: bytes = field(default=b"", repr=False, compare=False)
    """The payload of IP."""
    gso: int = field(default=0, compare=False)
    """Bytes per segment of a GSO packet, 0 otherwise; only set by wire.py."""

    @property
    def protocol(self) -> str:
        """``tcp``, ``icmp6``, a protocol number, or ""."""
        if self.ip is None:
            return ""
        return PROTOCOLS.get(self.ip.protocol, str(self.ip.protocol))

    @property
    def flags(self) -> str:
        """The TCP flags as letters of FSRPAUEC in this order; "" for other protocols."""
        return self.transport.flags if isinstance(self.transport, Tcp) else ""

    @property
    def source(self) -> str:
        """``address:port``, ``[address]:port``, or the address only if there are no ports."""
        return self._end("source")

    @property
    def destination(self) -> str:
        return self._end("destination")

    def _end(self, which: str) -> str:
        host = getattr(self.ip, which, "")
        port = getattr(self.transport, f"{which}_port", None)
        if port is None:
            return str(host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __str__(self) -> str:
        words = [self.source, "→", self.destination, self.protocol]
        match self.transport:
            case Tcp() as tcp:
                words += [tcp.flags, f"seq {tcp.sequence} ack {tcp.acknowledgement}"]
            case Icmp() as icmp:
                words += [f"type {icmp.type} code {icmp.code}"]
        if self.ip and (self.ip.more or self.ip.offset):
            words.append(f"fragment at {self.ip.offset}")
        words.append(f"{len(self.payload)} bytes")
        return " ".join(words) + (f" about ({self.embedded})" if self.embedded else "")


# ---- parsing -----------------------------------------------------------------------------------


def parse(raw: bytes, l2: bool = True) -> Packet:
    """The parsed packet; ValueError if its first header is incomplete."""
    if not l2:
        return _ip(raw, raw, None, quoted=False)
    if len(raw) < 14:
        raise ValueError(f"{len(raw)} bytes are too short for an Ethernet frame")
    kind = int.from_bytes(raw[12:14], "big")
    ethernet = Ethernet(raw[:6].hex(":"), raw[6:12].hex(":"), kind)
    if kind in (0x0800, 0x86DD):
        return _ip(raw, raw[14:], ethernet, quoted=False)
    return Packet(raw, ethernet, payload=raw[14:])


def _text(packed: bytes) -> str:
    return str(ip_address(packed))


def _ip(raw: bytes, data: bytes, ethernet: Ethernet | None, quoted: bool) -> Packet:
    version = data[0] >> 4 if data else 0
    least = {4: 20, 6: 40}.get(version)
    if least is None or len(data) < least:
        raise ValueError(f"{len(data)} bytes are not an IP packet: {data[:20].hex()}")
    ip, start, whole = _ipv4(data) if version == 4 else _ipv6(data)
    if start > len(data) or whole < start:
        raise ValueError(f"the IP header ends at {start} of {len(data)} bytes")
    segment, missing = data[start:whole], max(0, whole - len(data))
    transport, payload, embedded = None, segment, None
    if ip.offset == 0:
        transport, payload = _transport(ip.protocol, segment)
    if isinstance(transport, Icmp) and transport.type in _ERRORS[version] and not quoted:
        try:
            embedded, payload = _ip(payload, payload, None, quoted=True), b""
        except ValueError:
            embedded = None  # not a packet: it stays in the payload
    return Packet(
        raw=raw,
        ethernet=ethernet,
        ip=ip,
        transport=transport,
        embedded=embedded,
        payload=payload,
        trailer=data[whole:],
        missing=missing,
        packet=data[:whole],
        segment=segment,
    )


def _ipv4(data: bytes) -> tuple[Ip, int, int]:
    """The header, its end, and the end of the packet by its length field."""
    first, tos, length, id_, word, ttl, protocol, checksum, source, to = struct.unpack_from("!BBHHHBBH4s4s", data)
    start = (first & 15) * 4
    ip = Ip(
        version=4,
        source=_text(source),
        destination=_text(to),
        protocol=protocol,
        ttl=ttl,
        tos=tos,
        length=length,
        id=id_,
        df=bool(word & 0x4000),
        more=bool(word & 0x2000),
        offset=(word & 0x1FFF) * 8,
        checksum=checksum,
        options=data[20:start],
        flow=0,
        extensions=(),
    )
    return ip, start, length


def _ipv6(data: bytes) -> tuple[Ip, int, int]:
    word, length, kind, ttl, source, to = struct.unpack_from("!IHBB16s16s", data)
    at, extensions, cut = 40, [], (0, False, 0)
    while kind in _EXTENSIONS and at + 8 <= len(data) and cut[0] == 0:
        size = {44: 8, 51: (data[at + 1] + 2) * 4}.get(kind, (data[at + 1] + 1) * 8)
        extensions.append((_EXTENSIONS[kind], data[at + 1 : at + size]))
        if kind == 44:
            number, id_ = struct.unpack_from("!HI", data, at + 2)
            cut = (number & 0xFFF8, bool(number & 1), id_)
        kind, at = data[at], at + size
    ip = Ip(
        version=6,
        source=_text(source),
        destination=_text(to),
        protocol=kind,
        ttl=ttl,
        tos=word >> 20 & 0xFF,
        length=length,
        id=cut[2],
        df=False,
        more=cut[1],
        offset=cut[0],
        checksum=None,
        options=b"",
        flow=word & 0xFFFFF,
        extensions=tuple(extensions),
    )
    return ip, at, 40 + length


def _transport(protocol: int, data: bytes) -> tuple[Tcp | Udp | Sctp | Icmp | Cut | None, bytes]:
    """The transport header, and the bytes after it."""
    match protocol:
        case 6 if len(data) >= 20 and 20 <= (data[12] >> 4) * 4 <= len(data):
            ports = struct.unpack_from("!HHII", data)
            word, window, checksum, urgent = struct.unpack_from("!HHHH", data, 12)
            end = (word >> 12) * 4
            flags = "".join(letter for i, letter in enumerate(_FLAGS) if word >> i & 1)
            tail = (flags, window, checksum, urgent, word >> 8 & 15, data[20:end])
            return Tcp(*ports, *tail), data[end:]
        case 17 if len(data) >= 8:
            return Udp(*struct.unpack_from("!HHHH", data)), data[8:]
        case 132 if len(data) >= 12:
            source, to, tag = struct.unpack_from("!HHI", data)
            chunks, rest = _chunks(data[12:])
            return Sctp(source, to, tag, int.from_bytes(data[8:12], "little"), chunks), rest
        case 1 | 58 if len(data) >= 8:
            return Icmp(*struct.unpack_from("!BBH4s", data)), data[8:]
        case 6 | 17 | 132 if len(data) >= 4:
            return Cut(*struct.unpack_from("!HH", data), data[4:]), b""
    return None, data


def _chunks(data: bytes) -> tuple[tuple[tuple[int, int, bytes], ...], bytes]:
    found, at = [], 0
    while at + 4 <= len(data):
        kind, flags, size = struct.unpack_from("!BBH", data, at)
        if size < 4 or at + size > len(data):
            break
        found.append((kind, flags, data[at + 4 : at + size]))
        at += (size + 3) // 4 * 4
    return tuple(found), data[at:]


# ---- errors --------------------------------------------------------------------------------------


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
