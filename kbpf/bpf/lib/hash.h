/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The hash of a packet that selects its slot in a Maglev table. All nodes compute the same hash, so
 * a router may send the packets of a flow to any of them. MurmurHash3 (32 bits), one word at a
 * time, over bytes in network byte order. It has no secret seed, or nodes would differ.
 */
#pragma once

#define HASH_SEED 0x6b627066
#define CLIENT_WORDS 4
#define TUPLE_WORDS 10

static __always_inline u32 hash_word(u32 hash, u32 word)
{
	word *= 0xcc9e2d51;
	word = word << 15 | word >> 17;
	hash ^= word * 0x1b873593;
	hash = hash << 13 | hash >> 19;
	return hash * 5 + 0xe6546b64;
}

static __always_inline u32 hash_end(u32 hash, u32 bytes)
{
	hash ^= bytes;
	hash = (hash ^ hash >> 16) * 0x85ebca6b;
	hash = (hash ^ hash >> 13) * 0xc2b2ae35;
	return hash ^ hash >> 16;
}

/* The hash of the first words of a packet's struct tuple: CLIENT_WORDS or TUPLE_WORDS.
 *
 * A loop, because unrolled code would need too much stack. It contains nothing else: otherwise the
 * compiler may let the body fall through to the loop's head, which Linux 5.10 and 6.1 reject (a
 * "back-edge" that is not a jump). */
static __always_inline u32 hash_words(const u32 *words, int count)
{
	u32 hash = HASH_SEED;

#pragma clang loop unroll(disable)
	for (int i = 0; i < count; i++)
		hash = hash_word(hash, words[i]);
	return hash_end(hash, count * 4);
}
