/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Addresses: IPv4 as v4-mapped IPv6, so that most code does not distinguish families.
 */
#pragma once

#include "types.h"

#define V4_MAPPED_WORD __builtin_bswap32(0x0000ffff) /* little endian; see below */

/* Big-endian BPF would need a different constant: refuse to compile. */
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kbpf builds for little-endian machines only"
#endif

static __always_inline struct address v4_mapped(__be32 v4)
{
	struct address a = {.word = {0, 0, V4_MAPPED_WORD, v4}};

	return a;
}

static __always_inline bool is_v4(const struct address *a)
{
	return !a->word[0] && !a->word[1] && a->word[2] == V4_MAPPED_WORD;
}

/* 0.0.0.0 or ::, which mean loopback when a client dials them. */
static __always_inline bool is_any(const struct address *a)
{
	return !a->word[3] && !a->word[0] && !a->word[1] &&
	       (!a->word[2] || a->word[2] == V4_MAPPED_WORD);
}

static __always_inline bool is_loopback(const struct address *a)
{
	if (is_v4(a))
		return (a->word[3] & 0xff) == 127; /* network byte order: the first byte */
	return !a->word[0] && !a->word[1] && !a->word[2] && a->word[3] == __builtin_bswap32(1);
}

/* IPv6 addresses that are valid on one link only. */
static __always_inline bool is_link_local(const struct address *a)
{
	return (a->word[0] & __builtin_bswap32(0xffc00000)) == __builtin_bswap32(0xfe800000);
}

/* Source addresses whose packets the stack drops, or does not forward (link-local ones). */
static __always_inline bool is_martian(const struct address *a)
{
	if (is_v4(a))
		return !a->word[3] || (a->word[3] & 0xff) == 127 || (a->word[3] & 0xf0) == 224 ||
		       a->word[3] == 0xffffffff;
	return is_any(a) || is_loopback(a) || is_link_local(a) || (a->word[0] & 0xff) == 0xff;
}

/* An IPv4 address, or the /64 network of an IPv6 address. */
static __always_inline struct address network_of(const struct address *a)
{
	u32 mask = is_v4(a) ? ~0U : 0;
	struct address network = {
		.word = {a->word[0], a->word[1], a->word[2] & mask, a->word[3] & mask}};

	return network;
}

static __always_inline bool is_device(u32 owner)
{
	return (owner & OWNER_DEVICE) && owner != OWNER_ADDRESS;
}

/* The key of an owner (types.h) in maps. That of a device or cgroup begins as multicast addresses
 * do, which no sender has. */
static __always_inline struct address key_of_owner(u32 owner, const struct address *sender)
{
	if (owner == OWNER_ADDRESS)
		return *sender;
	if (owner != OWNER_NETWORK)
		return (struct address){.word = {~0U, 0, 0, owner}};
	return network_of(sender);
}

/* 0 if they are equal. Without branches, because the verifier explores both sides of each. */
static __always_inline u32 address_difference(const struct address *a, const struct address *b)
{
	return (a->word[0] ^ b->word[0]) | (a->word[1] ^ b->word[1]) | (a->word[2] ^ b->word[2]) |
	       (a->word[3] ^ b->word[3]);
}

static __always_inline bool same_address(const struct address *a, const struct address *b)
{
	return !address_difference(a, b);
}

/* Nanoseconds from `then` to `now`. Another CPU may have written `then` after this one read
 * `now`. */
static __always_inline u64 elapsed(u64 then, u64 now)
{
	return now > then ? now - then : 0;
}

static __always_inline bool same_target(const struct target *a, const struct target *b)
{
	return !(address_difference(&a->address, &b->address) | (a->port ^ b->port) |
		 (a->protocol ^ b->protocol));
}
