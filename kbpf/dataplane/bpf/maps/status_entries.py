# SPDX-License-Identifier: Apache-2.0
"""The map `agent_status`: the text of the agent's status, in two entries.

The kernel overwrites an array's value in place, so a reader may see the first half of one text and
the second half of another. The agent therefore writes its two entries in turn, and each has a
checksum: while one is being written, the other is complete.

An entry is a header (u32 CRC-32 of what follows, u32 length of the text, u64 number of the write;
in host byte order) and the text, padded with zeros.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Final
from zlib import crc32

from kbpf.dataplane.bpf.maps.layout import STATUS_ENTRIES, U32
from kbpf.kernel.bpf.objects import Map

CHECKSUM: Final = U32
FIELDS: Final = Struct("=IQ")
HEADER_SIZE: Final = CHECKSUM.size + FIELDS.size


def write(map_: Map, text: bytes) -> None:
    """Writes over the older entry. A text that is too long is cut off."""
    numbers = [number for number, _ in _read_entries(map_)]
    text = text[: map_.value_size - HEADER_SIZE]
    value = pack_entry(max(numbers) + 1, text).ljust(map_.value_size, b"\0")
    map_.update(U32.pack(numbers.index(min(numbers))), value)


def read(map_: Map) -> bytes:
    """The text written last, or the one before while that is being written. Empty if there is
    none.
    """
    _, text = max(_read_entries(map_))
    return text


def pack_entry(number: int, text: bytes) -> bytes:
    """The text of write `number`, not padded."""
    checked = FIELDS.pack(len(text), number) + text
    return CHECKSUM.pack(crc32(checked)) + checked


def _read_entries(map_: Map) -> Iterator[tuple[int, bytes]]:
    """The number and text of each entry; 0 and no text if it is not complete."""
    for index in range(STATUS_ENTRIES):
        raw = map_.lookup(U32.pack(index)) or bytes(HEADER_SIZE)
        length, number = FIELDS.unpack_from(raw, CHECKSUM.size)
        text = raw[HEADER_SIZE : HEADER_SIZE + length]
        yield (number, text) if raw.startswith(pack_entry(number, text)) else (0, b"")
