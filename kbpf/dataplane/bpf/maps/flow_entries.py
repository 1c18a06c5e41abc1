"""The packet path's map `flows`, as bytes: which entries a flow has (bpf/track.h).

Each entry has the whole struct flow. The client's own, client and frontend, is the one that the
queue `flow_queue` has, and without which the others are nothing.
"""

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, Protocol

from kbpf.dataplane.bpf.maps.layout import FLOW, U64, FlowDirection, TcpState, idle_timeout_s

CLIENT: Final = slice(8, 28)
PROTOCOL: Final = 26
FRONTEND: Final = slice(28, 48)
BACKEND: Final = slice(48, 68)
SNAT: Final = slice(68, 84)
SNAT_PORT: Final = slice(84, 86)
CLIENT_PORT: Final = slice(86, 88)
SERVICE: Final = slice(88, 92)
STATE: Final = 96
DIRECTION: Final = 99
BEGAN_AT: Final = slice(104, 112)
"""Of a struct flow for UDP: when the flow began."""
DECISION: Final = slice(8, 96)
"""Of a struct flow: all that was decided when the flow began."""
IDENTITY: Final = slice(8, 88)
"""Of a struct flow: client, frontend, backend, the translated source and both their ports."""
ENDPOINTS: Final = slice(8, 48)
"""Of a struct flow: client and frontend."""
_LAST_USED_PROTOCOL_STATE: Final = Struct("=Q18xB69xB")
"""Of a struct flow: last use, protocol, state."""

NS_PER_SECOND: Final = 1_000_000_000

DISPOSABLE_AFTER_NS: Final = {
    TcpState.UNPROVEN: 5 * NS_PER_SECOND,
    TcpState.CLOSING: 10 * NS_PER_SECOND,
}
"""State → ns without a packet after which a flow makes room: is_disposable() in track.h."""

FlowEntry = tuple[bytes, bytes]


class _IdleTimeouts(dict[tuple[int, int], int]):
    def __missing__(self, key: tuple[int, int]) -> int:
        self[key] = idle_timeout_s(*key) * NS_PER_SECOND
        return self[key]


IDLE_TIMEOUT_NS: Final = _IdleTimeouts()
"""Protocol and state → ns that an entry holds without a packet."""


class CounterMap(Protocol):
    """The map `flow_count`, as far as it is needed here."""

    def lookup(self, key: bytes) -> bytes | None:
        """What stands there."""

    def update(self, key: bytes, value: bytes) -> None:
        """Writes it."""


def enable_flow_lookup(flow_count: CounterMap) -> None:
    """There are some: programs that find `flow_count` 0 look for none."""
    if flow_count.lookup(bytes(4)) == bytes(8):
        flow_count.update(bytes(4), U64.pack(1))


def flow_key(source: bytes, destination: bytes) -> bytes:
    """The key of two ends, ordered as by flow_key_of() in track.h: by address, the last word of it
    first, then by port; each as the machine reads the four or two bytes.
    """

    def sort_key(target: bytes) -> tuple[int, ...]:
        address_words = [
            int.from_bytes(target[offset : offset + 4], "little") for offset in (12, 8, 4, 0)
        ]
        return address_words[0], int.from_bytes(target[16:18], "little"), *address_words[1:]

    first, second = sorted((source, destination), key=sort_key)
    return first + second


def is_original(raw: bytes) -> bool:
    """Whether this entry is the client's own."""
    return raw[DIRECTION] == FlowDirection.ORIGINAL


def is_port_reservation(raw: bytes) -> bool:
    """Whether it stands for a port that conntrack has given away (beyond.py)."""
    return raw[FRONTEND] == raw[BACKEND] and not any(raw[SERVICE])


def last_used(raw: bytes) -> int:
    """ns, CLOCK_MONOTONIC: the first field of every value that has a time."""
    return int.from_bytes(raw[:8], "little")


def expires_at(raw: bytes) -> int:
    """ns, CLOCK_MONOTONIC: when the time of this entry is over, if no packet comes."""
    last_use, protocol, state = _LAST_USED_PROTOCOL_STATE.unpack_from(raw)
    return int(last_use) + IDLE_TIMEOUT_NS[protocol, state]


def is_needed(state: int, last_sent: int, now: int) -> bool:
    """Whether a flow, which is not over, does not make room by itself: is_needed() in tc.c. `last`
    is when its client has last sent; both in ns, CLOCK_MONOTONIC.
    """
    if state in DISPOSABLE_AFTER_NS:
        return now - last_sent <= DISPOSABLE_AFTER_NS[TcpState(state)]
    return state == TcpState.ESTABLISHED


def is_open(state: int) -> bool:
    """Whether a connection in this state has not ended. One that has is remembered for a while, for
    segments that are still under way and so that its port is not used again at once.
    """
    return state != TcpState.CLOSED


def unpack_columns(values: bytes) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Of structs nat, back to back: ids of Service and backend, last use (ns), protocol, state,
    part.
    """
    stride, u32_view = FLOW.size, memoryview(values).cast("I")
    return zip(
        u32_view[SERVICE.start // 4 :: stride // 4],
        u32_view[SERVICE.stop // 4 :: stride // 4],
        memoryview(values).cast("Q")[0 :: stride // 8],
        values[PROTOCOL::stride],
        values[STATE::stride],
        values[DIRECTION::stride],
        strict=True,
    )


def queue_order(entries: Iterable[FlowEntry]) -> list[bytes]:
    """The keys for the queue, that of the flow which was quiet longest first."""
    originals = [(last_used(raw), key) for key, raw in entries if is_original(raw)]
    return [key for _, key in sorted(originals)]


def most_recent(entries: Iterable[FlowEntry], count: int) -> list[FlowEntry]:
    """What belongs to so many flows, those that were used last."""
    all_entries = list(entries)
    originals = sorted(
        ((last_used(raw), raw[ENDPOINTS]) for key, raw in all_entries if is_original(raw)),
        reverse=True,
    )
    kept_endpoints = {endpoints for _, endpoints in originals[:count]}
    return [(key, raw) for key, raw in all_entries if raw[ENDPOINTS] in kept_endpoints]
