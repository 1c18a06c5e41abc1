# SPDX-License-Identifier: Apache-2.0
"""The filter in front of the map `flows`: marks of the ends that its entries have (bpf/tc/flow.h).

Whoever writes an entry marks its ends first, with the current generation. Nobody clears a mark,
since a program could be setting it at that moment; marks of a generation before `oldest` no longer
count instead. The agent moves on like this, while the programs continue to write entries:

    begin_generation()   from now on programs mark with the next generation
    a pause              longer than a program runs, so that none uses the generation before
    mark_ends()          of every entry, which gives its ends at least this generation's mark
    expire_marks()       older marks, which only ends without entries have, no longer count

An entry that is written meanwhile either exists when its part of the map is read, or was written
after the pause, and so with the new mark. An agent that ends in between leaves older marks valid.
"""

from collections.abc import Iterable, Mapping
from struct import Struct
from typing import Final

from kbpf.dataplane.bpf.maps.flow_entries import BACKEND, FRONTEND
from kbpf.dataplane.bpf.maps.layout import FLOW_GENERATIONS, FLOW_MARKS, U32, U64
from kbpf.kernel.bpf.objects import Map

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
