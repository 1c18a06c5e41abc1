# SPDX-License-Identifier: Apache-2.0
"""Random packets for the packet path's programs, including some that no stack would send.

`Packets` makes them from a seed. A packet that a program rewrote is given back to it (`learn`), so
that replies to translated clients, and packets on their way out, are among the following ones.
"""

import random
import struct
from collections import deque

from tests.fuzz.packets.node import BACK_PORT, BACKEND, FRONT_PORT, OWN, POD, REFUSING, ROUTED_BY, VIP, end
from tests.fuzz.packets.segments import CHUNKS
from tests.support.packets import packets
from tests.support.packets.packets import (
    ERRORS,
    address,
    destination,
    echo,
    fragments,
    hop_by_hop,
    icmp_error,
    routing,
    sctp,
    tcp,
    udp,
)
from tests.support.packets.parse import Packet, Sctp, Tcp, Udp, parse

CLIENTS = {
    4: ("198.51.100.7", "198.51.100.8", "203.0.113.200"),
    6: ("2001:db8:9::7", "2001:db8:9::8", "2001:db8:77::1"),
}
UNRELATED = {
    4: ("203.0.113.1", "203.0.113.2", "100.64.3.4"),
    6: ("2001:db8:f::1", "2001:db8:f::2", "fd12:3456::9"),
}
ROUTER = {4: "203.0.113.77", 6: "2001:db8:f::77"}
FLAGS = "S S S SA A PA FA R RA F SFRPAUEC "
REMEMBERED = 512
TOO_LONG = 1500
"""Bytes of data that no device of the node takes in one packet."""

OURS = tuple(
    address(text)
    for table in (*VIP.values(), REFUSING, *POD.values(), *OWN.values(), ROUTED_BY)
    for text in table.values()
)
"""Addresses of Services, of their backends and of the node. A packet without any of them belongs to
no Service.
"""


def is_a_services(packet: bytes) -> bool:
    """Whether it contains any of OURS, at whatever offset."""
    return any(each in packet for each in OURS)


class Packets:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._made: deque[bytes] = deque(maxlen=REMEMBERED)
        self._kinds = {
            self._to_service: 0.40,
            self._after_another: 0.25,
            self._from_backend: 0.08,
            self._unrelated: 0.10,
            self._error: 0.12,
            self._anything: 0.05,
        }

    def learn(self, packet: bytes) -> None:
        """Remembers a packet that a program has rewritten."""
        self._made.append(packet)

    def next(self) -> bytes:
        """The next packet, from its IP header on."""
        rng, family = self._rng, self._rng.choice((4, 4, 6))
        (kind,) = rng.choices(list(self._kinds), list(self._kinds.values()))
        packet = kind(family)
        luck = rng.random()
        if luck < 0.08:
            packet = self._fragment(packet)
        elif luck < 0.25:
            packet = self._damaged(packet)
        return packet

    # ---- kinds ---------------------------------------------------------------------------------

    def _to_service(self, family: int) -> bytes:
        rng = self._rng
        refused = rng.random() < 0.05
        vip = (REFUSING if refused else rng.choice(list(VIP.values())))[family]
        port = FRONT_PORT if rng.random() < 0.95 else rng.randrange(65536)
        client = end(rng.choice(CLIENTS[family]), rng.randrange(2000, 3000))
        return self._segment(client, end(vip, port))

    def _from_backend(self, family: int) -> bytes:
        rng = self._rng
        backend = POD[rng.choice(list(BACKEND.values()))][family]
        to = rng.choice((*CLIENTS[family], *(own[family] for own in OWN.values())))
        return self._segment(end(backend, BACK_PORT), end(to, rng.randrange(2000, 3000)))

    def _unrelated(self, family: int) -> bytes:
        rng = self._rng
        one, other = rng.sample(UNRELATED[family], 2)
        if rng.random() < 0.2:
            return echo(one, other, b"ping")
        return self._segment(end(one, rng.randrange(65536)), end(other, rng.randrange(65536)))

    def _after_another(self, family: int) -> bytes:
        """A packet that a program rewrote before, unchanged, or a reply to it."""
        rng = self._rng
        if not self._made:
            return self._to_service(family)
        made = rng.choice(self._made)
        if rng.random() < 0.3:
            return made
        told = _parsed(made)
        if told is None or not told.source or told.ip is None:
            return made
        if rng.random() < 0.15:
            return icmp_error(rng.choice(list(ERRORS)), ROUTER[told.ip.version], made, mtu=1280)
        if not isinstance(told.transport, Tcp | Udp | Sctp):
            return made
        return self._segment(told.destination, told.source, told.protocol)

    def _error(self, family: int) -> bytes:
        rng = self._rng
        about = rng.choice((self._to_service, self._from_backend, self._unrelated))(family)
        quote = rng.choice((None, None, 28 if family == 4 else 48, rng.randrange(60)))
        by = rng.choice((ROUTER[family], *UNRELATED[family]))
        return icmp_error(rng.choice(list(ERRORS)), by, about, mtu=1280, quote=quote)

    def _anything(self, family: int) -> bytes:
        rng = self._rng
        hosts = [
            *CLIENTS[family],
            *UNRELATED[family],
            *(each[family] for each in VIP.values()),
            *(each[family] for each in POD.values()),
            ROUTED_BY[family],
        ]
        one, other = rng.choice(hosts), rng.choice(hosts)
        protocol = rng.choice((0, 1, 4, 6, 17, 41, 47, 50, 51, 58, 132, 255))
        body = rng.randbytes(rng.randrange(80))
        return packets.datagram(one, other, protocol, body, ttl=rng.choice((0, 1, 64, 255)))

    # ---- their parts ---------------------------------------------------------------------------

    def _segment(self, source: str, to: str, protocol: str = "") -> bytes:
        rng = self._rng
        more = self._header(":" in source.rpartition(":")[0])
        payload = rng.randbytes(rng.choice((0, 0, 1, 7, 100, 700, TOO_LONG)))
        checksum = rng.choice(("right",) * 8 + ("wrong", "zero"))
        match protocol or rng.choice(("tcp", "tcp", "udp", "sctp")):
            case "tcp":
                flags, mss = rng.choice(FLAGS.split(" ")), rng.choice((None, 1460))
                return tcp(
                    source,
                    to,
                    payload,
                    flags=flags,
                    mss=mss,
                    seq=rng.getrandbits(32),
                    ack=rng.getrandbits(32),
                    checksum=checksum,
                    **more,
                )
            case "udp":
                return udp(source, to, payload, checksum=checksum, **more)
        chunks = rng.choice(list(CHUNKS.values()))(rng.getrandbits(32))
        return sctp(source, to, chunks, tag=rng.getrandbits(32), checksum=checksum, **more)

    def _header(self, v6: bool) -> dict[str, object]:
        rng = self._rng
        more: dict[str, object] = {
            "ttl": rng.choice((64, 64, 64, 63, 255, 2, 1, 0)),
            "tos": rng.choice((0, 0, 0x10, 3)),
        }
        if rng.random() < 0.1:
            if v6:
                made = (hop_by_hop(), destination(), routing("2001:db8::5", left=0))
                more["extensions"] = tuple(rng.choices(made, k=rng.randrange(1, 4)))
            else:
                more["options"] = rng.choice((b"\x94\x04\0\0", b"\x01" * 8, b"\x83\x07\x04\xc6\x33\x64\x09"))
        if not v6:
            more["df"] = rng.random() < 0.5
        return more

    def _fragment(self, packet: bytes) -> bytes:
        rng = self._rng
        if packet[0] >> 4 == 4 and (len(packet) < 60 or packet[6] & 0x7F or packet[7]):
            return packet
        if packet[0] >> 4 not in (4, 6):
            return packet
        try:
            return rng.choice(fragments(packet, rng.choice((100, 300)), rng.randrange(4)))
        except (AssertionError, IndexError, struct.error):
            return packet  # options or extension headers that leave no room

    def _damaged(self, packet: bytes) -> bytes:
        rng, raw = self._rng, bytearray(packet)
        for _ in range(rng.choice((1, 1, 2, 5))):
            match rng.randrange(4):
                case 0 if len(raw) > 24:
                    del raw[rng.randrange(20, len(raw)) :]
                case 1:
                    raw += rng.randbytes(rng.randrange(1, 40))
                case _:
                    at = rng.randrange(min(len(raw), 60))
                    raw[at] = rng.choice((0, 0xFF, raw[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
        return bytes(raw)


def _parsed(packet: bytes) -> Packet | None:
    try:
        return parse(packet, l2=False)
    except (ValueError, IndexError, struct.error):
        return None
