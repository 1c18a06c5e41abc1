# SPDX-License-Identifier: Apache-2.0
"""The entries of the packet path's map `flows`, as bytes, and the filter in front of it
(bpf/tc/flow.h).

Each entry of a flow contains a complete struct flow. The original-direction entry (client and
frontend) is the one whose key is in the flow queue; without it the others are orphans.

The filter holds marks of the ends that the entries have. Whoever writes an entry marks its ends
first, with the current generation. Nobody clears a mark, since a program could be setting it at
that moment; marks of a generation before `oldest` no longer count instead. The agent moves on like
this, while the programs continue to write entries:

    begin_generation()   from now on programs mark with the next generation
    a pause              longer than a program runs, so that none uses the generation before
    mark_ends()          of every entry, which gives its ends at least this generation's mark
    expire_marks()       older marks, which only ends without entries have, no longer count

An entry that is written meanwhile either exists when its part of the map is read, or was written
after the pause, and so with the new mark. An agent that ends in between leaves older marks valid.
"""

from collections.abc import Iterable, Iterator, Mapping
from struct import Struct
from typing import Final

from kbpf.dataplane.bpf.maps.layout import (
    FLOW,
    FLOW_GENERATIONS,
    FLOW_MARKS,
    U32,
    U64,
    FlowDirection,
    TcpState,
    idle_timeout_s,
)
from kbpf.kernel.bpf.objects import Map

# Byte offsets in struct flow (bpf/types.h; Struct FLOW in layout.py).
CLIENT: Final = slice(8, 28)
CLIENT_ADDRESS: Final = slice(8, 24)
PROTOCOL: Final = 26
FRONTEND: Final = slice(28, 48)
BACKEND: Final = slice(48, 68)
SNAT: Final = slice(68, 84)
SNAT_PORT: Final = slice(84, 86)
CLIENT_PORT: Final = slice(86, 88)
SERVICE: Final = slice(88, 92)
STATE: Final = 96
FINS: Final = 97
"""The byte of enum fins."""
DIRECTION: Final = 99
BEGAN_AT: Final = slice(104, 112)
"""UDP only: when the flow began."""
DECISION: Final = slice(8, 96)
"""Everything that was decided when the flow began."""
IDENTITY: Final = slice(8, 88)
"""Client, frontend, backend, the SNAT address and both ports."""
ENDPOINTS: Final = slice(8, 48)
"""Client and frontend."""
_LAST_USED_PROTOCOL_STATE: Final = Struct("=Q18xB69xB")
"""Last use, protocol, state."""

NS_PER_SECOND: Final = 1_000_000_000

DISPOSABLE_AFTER_NS: Final = {
    TcpState.UNPROVEN: 5 * NS_PER_SECOND,
    TcpState.CLOSING: 10 * NS_PER_SECOND,
}
"""State → idle time in ns after which a flow may be evicted: is_disposable() in flow.h."""

FlowEntry = tuple[bytes, bytes]


class _IdleTimeouts(dict[tuple[int, int], int]):
    def __missing__(self, key: tuple[int, int]) -> int:
        self[key] = idle_timeout_s(*key) * NS_PER_SECOND
        return self[key]


IDLE_TIMEOUT_NS: Final = _IdleTimeouts()
"""(protocol, state) → idle timeout of an entry, in ns."""


def flow_key(source: bytes, destination: bytes) -> bytes:
    """The key of a flow, with its two ends in the order of flow_key_of() in flow.h: by the last
    word of the address, then the port, then the other words, each as a little-endian number.
    """

    def sort_key(target: bytes) -> tuple[int, ...]:
        address_words = [int.from_bytes(target[offset : offset + 4], "little") for offset in (12, 8, 4, 0)]
        return address_words[0], int.from_bytes(target[16:18], "little"), *address_words[1:]

    first, second = sorted((source, destination), key=sort_key)
    return first + second


def original_key(raw: bytes) -> bytes:
    """The key of the original-direction entry of this entry's flow: original_key() in flow.h."""
    return flow_key(raw[CLIENT], raw[FRONTEND])


def is_original(raw: bytes) -> bool:
    """Whether this is the original-direction entry."""
    return raw[DIRECTION] == FlowDirection.ORIGINAL


def is_port_reservation(raw: bytes) -> bool:
    """Whether this entry reserves a port that conntrack uses (snat_ports.py)."""
    return raw[FRONTEND] == raw[BACKEND] and not any(raw[SERVICE])


def last_used(raw: bytes) -> int:
    """Last use in ns (CLOCK_MONOTONIC): the first field of every value with a timestamp."""
    return int.from_bytes(raw[:8], "little")


def expires_at(raw: bytes) -> int:
    """When this entry expires without further packets, in ns (CLOCK_MONOTONIC)."""
    last_use, protocol, state = _LAST_USED_PROTOCOL_STATE.unpack_from(raw)
    return int(last_use) + IDLE_TIMEOUT_NS[protocol, state]


def is_needed(state: int, last_sent: int, now: int) -> bool:
    """Whether an unexpired flow must not be evicted: is_needed() in evict.h. `last_sent`: the
    client's last packet; both times in ns (CLOCK_MONOTONIC).
    """
    if state in DISPOSABLE_AFTER_NS:
        return now - last_sent <= DISPOSABLE_AFTER_NS[TcpState(state)]
    return state == TcpState.ESTABLISHED


def is_open(state: int) -> bool:
    """Whether a connection in this state has not ended. Ended ones are kept for a while, for
    segments in flight and so that their port is not reused at once.
    """
    return state != TcpState.CLOSED


def unpack_columns(values: bytes) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Columns of struct flow values (back to back): ids of Service and backend, last use (ns),
    protocol, state, direction. Slicing whole columns is several times as fast as unpacking each
    value.
    """
    # All fields are aligned to their size, and so is FLOW.size, which the casts require.
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
    """The keys for the flow queue, least recently used first."""
    originals = [(last_used(raw), key) for key, raw in entries if is_original(raw)]
    return [key for _, key in sorted(originals)]


def most_recent(entries: Iterable[FlowEntry], count: int) -> list[FlowEntry]:
    """The entries of the `count` most recently used flows."""
    all_entries = list(entries)
    originals = sorted(
        ((last_used(raw), raw[ENDPOINTS]) for key, raw in all_entries if is_original(raw)),
        reverse=True,
    )
    kept_endpoints = {endpoints for _, endpoints in originals[:count]}
    return [(key, raw) for key, raw in all_entries if raw[ENDPOINTS] in kept_endpoints]


# ---- the filter ----------------------------------------------------------------------------------

Maps = Mapping[str, Map]

_KEY: Final = U32.pack(0)
_WORDS_AND_PORT: Final = Struct("<4IH2x")


def mark_index(target: bytes) -> int:
    """The index of an end in `flow_marks`: mark_of() in flow.h."""
    word0, word1, word2, word3, port = _WORDS_AND_PORT.unpack(target)
    mixed = (word0 ^ word1 ^ word2 ^ word3 ^ port) * 0x9E3779B1 & 0xFFFFFFFF
    return int(mixed * FLOW_MARKS >> 32)


def read_generations(maps: Maps) -> tuple[int, int]:
    """The generation of new marks, and the oldest one whose marks count."""
    raw = maps["flow_generations"].lookup(_KEY)
    assert raw is not None  # an element of an array
    current, oldest = FLOW_GENERATIONS.unpack(raw)
    return current, oldest


def _write_generations(maps: Maps, current: int, oldest: int) -> None:
    maps["flow_generations"].update(_KEY, FLOW_GENERATIONS.pack(current, oldest))


def enable(maps: Maps) -> None:
    """Makes only marked ends count, if no generation exists. To be called only if `flows` is new:
    until then every end counts as marked.
    """
    if read_generations(maps) == (0, 0):
        _write_generations(maps, 1, 1)


def mark_ends(maps: Maps, values: Iterable[bytes]) -> None:
    """Marks the ends of these entries (struct flow)."""
    current, _ = read_generations(maps)
    indexes = {
        mark_index(end)
        for ends in {raw[FRONTEND.start : BACKEND.stop] for raw in values}
        for end in (ends[:20], ends[20:])
    }
    marks = maps["flow_marks"]
    for key in map(U32.pack, indexes):
        mark = marks.lookup(key)
        if mark is not None and U64.unpack(mark)[0] < current:
            marks.update(key, U64.pack(current))


def begin_generation(maps: Maps) -> None:
    current, oldest = read_generations(maps)
    _write_generations(maps, current + 1, oldest)


def expire_marks(maps: Maps) -> None:
    """Ends the generations before the current one. All entries have its marks."""
    current, _ = read_generations(maps)
    _write_generations(maps, current, current)
