# SPDX-License-Identifier: Apache-2.0
"""32-bit MurmurHash3, from its description: the hash that selects the Maglev slot of a packet.

Imports nothing of kbpf.
"""

import struct

MASK = 0xFFFF_FFFF


def murmur3(data: bytes, seed: int, size: int = 0) -> int:
    """The 32-bit hash of any bytes. `size`: of all bytes, if the hash of those before is the seed."""
    h = seed
    whole = len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        h ^= _scrambled(word)
        h = ((h << 13 | h >> 19) * 5 + 0xE6546B64) & MASK
    h ^= _scrambled(int.from_bytes(data[whole:], "little"))
    h ^= size or len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def _scrambled(word: int) -> int:
    word = word * 0xCC9E2D51 & MASK
    word = (word << 15 | word >> 17) & MASK
    return word * 0x1B873593 & MASK
