# SPDX-License-Identifier: Apache-2.0
"""A minimal TCP client over a Wire, without the kernel's stack."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.packets import packets
from tests.support.packets.judge import checksums
from tests.support.packets.parse import Packet, Tcp

if TYPE_CHECKING:
    from tests.support.packets.wire import Wire

_MASK = 0xFFFFFFFF


class Stream:
    """TCP as far as a lab needs it: no packet is lost there, so nothing but the SYN is repeated.
    Each received segment must have correct checksums.
    """

    MSS = 1400
    SYN_SECONDS = 5.0
    _FLIGHT = 32_000
    """The maximum of unacknowledged bytes, if the peer's window is large enough."""

    def __init__(self, wire: "Wire", source: str, to: str, seconds: float = 30.0) -> None:
        self.wire = wire
        self.source = source
        self.to = to
        self.seconds = seconds
        self.answered = b""
        """The bytes that have arrived but were not returned by receive() yet."""
        self.ended = False
        """Whether the peer has closed its side."""
        self._seq = time.monotonic_ns() >> 12 & _MASK
        self._acked = self._seq
        self._ack = 0
        self._window = 0
        self._later: dict[int, Packet] = {}
        self._open = False
        self._closed = False

    def open(self) -> None:
        """Makes the handshake. The first sequence number is taken from a clock, so that a port can
        be reused.
        """
        self.wire.forget(self._is_coming)
        self._seq = self._seq + 1 & _MASK  # a SYN counts as one byte
        first = self._handshake()
        assert isinstance(first.transport, Tcp)
        self._acked = self._seq
        self._window = first.transport.window
        self._ack = first.transport.sequence + 1 & _MASK
        self._open = True
        self._emit("A")

    def _handshake(self) -> Packet:
        """Sends a SYN and returns the SYN-ACK. The peer may still be in TIME-WAIT, or retransmit
        segments, of an earlier connection from the port that a load balancer has chosen. As RFC
        9293 (3.10.7.3) says, what does not acknowledge the SYN is answered by a RST, after which
        the SYN is sent again.
        """
        first = self._syn()
        while True:
            assert isinstance(first.transport, Tcp)
            if first.transport.acknowledgement == self._seq:
                assert first.flags == "SA", f"not a SYN-ACK: {first}"
                return first
            self._emit("R", seq=first.transport.acknowledgement)
            first = self._syn()

    def _syn(self) -> Packet:
        """Sends a SYN and returns what comes next. Repeats it, as every client does: a packet path
        may drop the SYN of a flow whose random port is taken.
        """
        deadline = time.monotonic() + self.seconds
        while True:
            self._emit("S", mss=self.MSS, seq=self._seq - 1 & _MASK)
            seconds = min(self.SYN_SECONDS, deadline - time.monotonic())
            try:
                return self._next(ConnectionRefusedError, seconds)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise

    def send(self, payload: bytes) -> None:
        """Sends the payload; returns when its last segment is sent."""
        for start in range(0, len(payload), self.MSS):
            piece = payload[start : start + self.MSS]
            while (self._seq + len(piece) - self._acked & _MASK) > min(self._FLIGHT, self._window):
                self._absorb(self._next())
            self._emit("PA", piece)
            self._seq = self._seq + len(piece) & _MASK

    def receive(self, until: Callable[[bytes], bool] = lambda data: b"\n" in data) -> bytes:
        """Waits until `until` accepts the received bytes or the peer has closed; returns them."""
        while not self.ended and not until(self.answered):
            self._absorb(self._next())
        found, self.answered = self.answered, b""
        return found

    def close(self) -> bytes:
        """Closes our side and waits for the peer's FIN; returns the bytes received meanwhile."""
        self._emit("FA")
        self._seq = self._seq + 1 & _MASK
        while not self.ended or self._acked != self._seq:
            self._absorb(self._next())
        self._closed = True
        found, self.answered = self.answered, b""
        return found

    def reset(self) -> None:
        """Sends a RST, unless the connection is closed."""
        if self._open and not self._closed:
            self._emit("RA")
        self._closed = True

    def _emit(self, flags: str, payload: bytes = b"", mss: int | None = None, seq: int | None = None) -> None:
        """Sends a segment; `seq`: its sequence number, if not the next one."""
        segment = packets.tcp(
            self.source,
            self.to,
            payload,
            flags=flags,
            seq=self._seq if seq is None else seq,
            ack=self._ack if "A" in flags else 0,
            mss=mss,
            df=True,
        )
        self.wire.send(segment)

    def _next(self, refused: type[OSError] = ConnectionResetError, seconds: float | None = None) -> Packet:
        found = self.wire.soon(self._is_ours, self.seconds if seconds is None else seconds)
        if found is None:
            raise TimeoutError(f"{self.to} is silent; {self.wire.told()}")
        wrong = checksums(found)
        assert not wrong, f"wrong checksums {wrong}: {found}"
        if found.embedded is not None:
            raise OSError(f"an ICMP error: {found}")
        if "R" in found.flags:
            self._closed = True
            raise refused(f"{found}")
        return found

    def _is_coming(self, packet: Packet) -> bool:
        ends = (packet.source, packet.destination, packet.protocol)
        return ends == (self.to, self.source, "tcp")

    def _is_ours(self, packet: Packet) -> bool:
        about = packet.embedded
        return self._is_coming(packet) or (about is not None and about.source == self.source)

    def _absorb(self, packet: Packet) -> None:
        """Consumes the next bytes, stores later segments, and acknowledges."""
        tcp = packet.transport
        assert isinstance(tcp, Tcp)
        if not _after(self._acked, tcp.acknowledgement):
            self._acked, self._window = tcp.acknowledgement, tcp.window
        if not packet.payload and "F" not in packet.flags:
            return
        self._later[tcp.sequence] = packet
        while packet := self._due():
            assert isinstance(packet.transport, Tcp)
            del self._later[packet.transport.sequence]
            known = self._ack - packet.transport.sequence & _MASK
            ended = "F" in packet.flags
            if known >= len(packet.payload) + ended:
                continue
            self.answered += packet.payload[known:]
            self.ended = ended
            self._ack = packet.transport.sequence + len(packet.payload) + ended & _MASK
        self._emit("A")

    def _due(self) -> Packet | None:
        """A stored segment that begins at or before the next expected byte; it may overlap."""
        return next((p for seq, p in self._later.items() if not _after(seq, self._ack)), None)


def _after(one: int, other: int) -> bool:
    return 0 < (one - other & _MASK) < 1 << 31
