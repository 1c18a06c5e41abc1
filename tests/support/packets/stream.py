"""TCP by hand, over a wire: a client with a stack of its own."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.packets import packets
from tests.support.packets.judge import checksums
from tests.support.packets.parse import Packet, Tcp

if TYPE_CHECKING:
    from tests.support.packets.wire import Wire

_MASK = 0xFFFFFFFF


class HostError(OSError):
    """An ICMP error about a packet of ours."""

    def __init__(self, packet: Packet) -> None:
        super().__init__(str(packet))
        self.packet = packet


class Stream:
    """TCP as far as a lab needs it: nothing gets lost there, so nothing is sent twice. Each segment
    that arrives must have right checksums.
    """

    MSS = 1400
    _FLIGHT = 32_000
    """Bytes on their way at once, if the other side's window has room for them."""

    def __init__(self, wire: "Wire", source: str, to: str, seconds: float = 30.0) -> None:
        self.wire = wire
        self.source = source
        self.to = to
        self.seconds = seconds
        self.answered = b""
        """All that has come and was not received yet."""
        self.ended = False
        """Whether the other side has closed."""
        self._seq = time.monotonic_ns() >> 12 & _MASK
        self._acked = self._seq
        self._ack = 0
        self._window = 0
        self._later: dict[int, Packet] = {}
        self._open = False
        self._closed = False

    def open(self) -> None:
        """The handshake. Numbers begin where a clock stands, so ports may be used again."""
        self.wire.forget(self._is_coming)
        self._emit("S", mss=self.MSS)
        self._seq = self._seq + 1 & _MASK
        first = self._handshake()
        assert isinstance(first.transport, Tcp)
        self._acked = self._seq
        self._window = first.transport.window
        self._ack = first.transport.sequence + 1 & _MASK
        self._open = True
        self._emit("A")

    def _handshake(self) -> Packet:
        """The answer to our SYN. What an earlier connection of the same ends says once more, when
        our answer came late, does not acknowledge it.
        """
        while True:
            first = self._next(refused=ConnectionRefusedError)
            assert isinstance(first.transport, Tcp)
            if first.transport.acknowledgement == self._seq:
                assert first.flags == "SA", f"no handshake: {first}"
                return first

    def send(self, payload: bytes) -> None:
        """Sends it all; returns when the last of it is on its way."""
        for start in range(0, len(payload), self.MSS):
            piece = payload[start : start + self.MSS]
            while (self._seq + len(piece) - self._acked & _MASK) > min(self._FLIGHT, self._window):
                self._absorb(self._next())
            self._emit("PA", piece)
            self._seq = self._seq + len(piece) & _MASK

    def receive(self, until: Callable[[bytes], bool] = lambda data: b"\n" in data) -> bytes:
        """What has come, as soon as that is enough, or the other side has closed."""
        while not self.ended and not until(self.answered):
            self._absorb(self._next())
        found, self.answered = self.answered, b""
        return found

    def close(self) -> bytes:
        """Closes our side, waits for the other; what came meanwhile."""
        self._emit("FA")
        self._seq = self._seq + 1 & _MASK
        while not self.ended or self._acked != self._seq:
            self._absorb(self._next())
        self._closed = True
        found, self.answered = self.answered, b""
        return found

    def reset(self) -> None:
        """Ends it at once; nothing happens to one that is closed."""
        if self._open and not self._closed:
            self._emit("RA")
        self._closed = True

    def _emit(self, flags: str, payload: bytes = b"", mss: int | None = None) -> None:
        segment = packets.tcp(
            self.source,
            self.to,
            payload,
            flags=flags,
            seq=self._seq,
            ack=self._ack if "A" in flags else 0,
            mss=mss,
            df=True,
        )
        self.wire.send(segment)

    def _next(self, refused: type[OSError] = ConnectionResetError) -> Packet:
        """The next segment of this connection."""
        found = self.wire.soon(self._is_ours, self.seconds)
        if found is None:
            raise TimeoutError(f"{self.to} is silent; {self.wire.told()}")
        wrong = checksums(found)
        assert not wrong, f"wrong checksums {wrong}: {found}"
        if found.embedded is not None:
            raise HostError(found)
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
        """Takes what is next, keeps what is later, and tells the other side."""
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
        """A segment that begins at what is next, or before: some of it may be known."""
        return next((p for seq, p in self._later.items() if not _after(seq, self._ack)), None)


def _after(one: int, other: int) -> bool:
    return 0 < (one - other & _MASK) < 1 << 31
