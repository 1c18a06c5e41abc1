"""The packet path's map `flows`, as bytes: which entries a flow has (bpf/track.h).

Each entry has the whole of a struct nat. The client's own, client and frontend, is the one that the
queue `order` has, and without which the others are nothing.
"""

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, Protocol

from kbpf.dataplane.bpf.maps.layout import NAT, U64, FlowPart, TcpState, idle_seconds

CLIENT: Final = slice(8, 28)
PROTOCOL: Final = 26
FRONTEND: Final = slice(28, 48)
BACKEND: Final = slice(48, 68)
SNAT: Final = slice(68, 84)
SNAT_PORT: Final = slice(84, 86)
CLIENT_PORT: Final = slice(86, 88)
SERVICE: Final = slice(88, 92)
STATE: Final = 96
PART: Final = 99
BEGUN: Final = slice(104, 112)
"""Of a struct nat for UDP: when the flow began."""
CHOSEN: Final = slice(8, 96)
"""Of a struct nat: all that was decided when the flow began."""
IDENTITY: Final = slice(8, 88)
"""Of a struct nat: client, frontend, backend, the translated source and both their ports."""
BOTH_ENDS: Final = slice(8, 48)
"""Of a struct nat: client and frontend."""
_TIMES: Final = Struct("=Q18xB69xB")
"""Of a struct nat: last use, protocol, state."""

NANO: Final = 1_000_000_000

QUIET: Final = {TcpState.UNPROVEN: 5 * NANO, TcpState.CLOSING: 10 * NANO}
"""State → ns without a packet after which a flow makes room: is_disposable() in track.h."""

Pair = tuple[bytes, bytes]


class _Holds(dict[tuple[int, int], int]):
    def __missing__(self, key: tuple[int, int]) -> int:
        self[key] = idle_seconds(*key) * NANO
        return self[key]


HOLDS: Final = _Holds()
"""Protocol and state → ns that an entry holds without a packet."""


class Counter(Protocol):
    """The map `tracked`, as far as it is needed here."""

    def lookup(self, key: bytes) -> bytes | None:
        """What stands there."""

    def update(self, key: bytes, value: bytes) -> None:
        """Writes it."""


def look_for_flows(tracked: Counter) -> None:
    """There are some: programs that find `tracked` 0 look for none."""
    if tracked.lookup(bytes(4)) == bytes(8):
        tracked.update(bytes(4), U64.pack(1))


def ends(one: bytes, other: bytes) -> bytes:
    """The key of two ends, in the order of ends_of() in track.h: by address, the last word of it
    first, then by port; each as the machine reads the four or two bytes.
    """

    def place(target: bytes) -> tuple[int, ...]:
        words = [int.from_bytes(target[at : at + 4], "little") for at in (12, 8, 4, 0)]
        return words[0], int.from_bytes(target[16:18], "little"), *words[1:]

    first, second = sorted((one, other), key=place)
    return first + second


def is_question(raw: bytes) -> bool:
    """Whether this entry is the client's own."""
    return raw[PART] == FlowPart.QUESTION


def is_held(raw: bytes) -> bool:
    """Whether it stands for a port that conntrack has given away (beyond.py)."""
    return raw[FRONTEND] == raw[BACKEND] and not any(raw[SERVICE])


def last_used(raw: bytes) -> int:
    """ns, CLOCK_MONOTONIC: the first field of every value that has a time."""
    return int.from_bytes(raw[:8], "little")


def over(raw: bytes) -> int:
    """ns, CLOCK_MONOTONIC: when the time of this entry is over, if no packet comes."""
    last, protocol, state = _TIMES.unpack_from(raw)
    return int(last) + HOLDS[protocol, state]


def is_needed(state: int, last: int, now: int) -> bool:
    """Whether a flow, which is not over, does not make room by itself: is_needed() in tc.c. `last`
    is when its client has last sent; both in ns, CLOCK_MONOTONIC.
    """
    if state in QUIET:
        return now - last <= QUIET[TcpState(state)]
    return state == TcpState.ESTABLISHED


def is_open(state: int) -> bool:
    """Whether a connection in this state has not ended. One that has is remembered for a while, for
    segments that are still under way and so that its port is not used again at once.
    """
    return state != TcpState.CLOSED


def columns(values: bytes) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Of structs nat, back to back: ids of Service and backend, last use (ns), protocol, state,
    part.
    """
    size, words = NAT.size, memoryview(values).cast("I")
    return zip(
        words[SERVICE.start // 4 :: size // 4],
        words[SERVICE.stop // 4 :: size // 4],
        memoryview(values).cast("Q")[0 :: size // 8],
        values[PROTOCOL::size],
        values[STATE::size],
        values[PART::size],
        strict=True,
    )


def in_order(entries: Iterable[Pair]) -> list[bytes]:
    """The keys for the queue, that of the flow which was quiet longest first."""
    found = [(last_used(raw), key) for key, raw in entries if is_question(raw)]
    return [key for _, key in sorted(found)]


def newest(entries: Iterable[Pair], count: int) -> list[Pair]:
    """What belongs to so many flows, those that were used last."""
    held = list(entries)
    questions = sorted(
        ((last_used(raw), raw[BOTH_ENDS]) for key, raw in held if is_question(raw)),
        reverse=True,
    )
    kept = {both for _, both in questions[:count]}
    return [(key, raw) for key, raw in held if raw[BOTH_ENDS] in kept]
