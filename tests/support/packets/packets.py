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
from ipaddress import ip_address
from typing import Unpack

from tests.support.packets.datagrams import (  # noqa: F401  for importers of this module, too
    BROADCAST,
    DESTINATION,
    FRAGMENT,
    HOP_BY_HOP,
    ICMP,
    ICMP6,
    MAC_A,
    MAC_B,
    ROUTING,
    SCTP,
    TCP,
    UDP,
    Extension,
    Ip,
    Sum,
    address,
    crc32c,
    datagram,
    destination,
    fragments,
    frame,
    hop_by_hop,
    internet_checksum,
    mac,
    routing,
    split,
    stored,
    summed,
)

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
