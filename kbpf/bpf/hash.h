/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The number by which packets choose a slot of a Maglev table: the same on every node, so that a
 * router may hand a flow's packets to any of them. MurmurHash3 (32 bits), a word at a time, over
 * bytes in network order; no secret is in it, or nodes would differ.
 */
#pragma once

#define HASH_SEED 0x6b627066

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

/* Fills in the hashes of who sends this. A loop, since the stack has no room for more. */
static __always_inline void set_hashes(struct asker *who, struct tuple *t)
{
	u32 *words = (u32 *)t, hash = HASH_SEED;

#pragma clang loop unroll(disable)
	for (int i = 0; i < sizeof(*t) / 4; i++) {
		hash = hash_word(hash, words[i]);
		if (i == 3)
			who->client_hash = hash_end(hash, 16);
	}
	who->flow_hash = hash_end(hash, sizeof(*t));
}
