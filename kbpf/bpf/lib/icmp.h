/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* ICMP errors about translated packets: the quote has to show each side the packet that it sent
 * itself.
 *
 * An error travels in the opposite direction of the packet that it quotes (the inner packet). So
 * the inner tuple, reversed, is a packet that travels like the error, and is translated here like
 * any other packet of the flow. The result, reversed again, is what the error has to quote from
 * here on.
 *
 * Without this, path MTU discovery through a Service would fail.
 */
#pragma once

#include "lib/packet.h"
#include "lib/rewrite.h"

#define ICMP_DEST_UNREACH 3
#define ICMP_PORT_UNREACH 3 /* codes of ICMP_DEST_UNREACH */
#define ICMP_FRAG_NEEDED 4
#define ICMP_SOURCE_QUENCH 4
#define ICMP_REDIRECT 5
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMPV6_DEST_UNREACH 1
#define ICMPV6_PORT_UNREACH 4 /* code of ICMPV6_DEST_UNREACH */
#define ICMPV6_PKT_TOOBIG 2
#define ICMPV6_TIME_EXCEED 3
#define ICMPV6_NO_ERROR 128 /* and higher types */
#define ICMP_HEADER_LENGTH 8
#define ICMP_CHECK 2

/* What conntrack takes for an error, and calls related to the flow of the packet that it quotes. */
static __always_inline bool is_icmp_error(const struct packet *p)
{
	if (p->fragment == LATER)
		return false;
	if (p->protocol == IPPROTO_ICMP && !p->v6)
		return p->icmp_type == ICMP_DEST_UNREACH || p->icmp_type == ICMP_SOURCE_QUENCH ||
		       p->icmp_type == ICMP_REDIRECT || p->icmp_type == ICMP_TIME_EXCEEDED ||
		       p->icmp_type == ICMP_PARAMETERPROB;
	return p->protocol == IPPROTO_ICMPV6 && p->v6 && p->icmp_type < ICMPV6_NO_ERROR;
}

/* Parses the inner packet that the error quotes. */
static __always_inline bool parse_inner(struct __sk_buff *skb, const struct packet *p,
					struct packet *inner)
{
	__builtin_memset(inner, 0, sizeof(*inner));
	inner->l3 = p->l4 + ICMP_HEADER_LENGTH;
	if (p->v6)
		return parse_v6(skb, inner);
	return parse_v4(skb, inner);
}

/* Rewrites an address of the inner packet, and adds the difference to `sum`, for the ICMP
 * checksum. */
static __always_inline int rewrite_inner_address(struct __sk_buff *skb, const struct packet *c,
						 u32 at4, u32 at6, struct address *old,
						 struct address *new, __wsum *sum)
{
	__wsum diff;

	if (same_address(old, new))
		return 0;
	if (c->v6) {
		*sum = bpf_csum_diff((__be32 *)old, sizeof(*old), (__be32 *)new, sizeof(*new),
				     *sum);
		return bpf_skb_store_bytes(skb, c->l3 + at6, new, sizeof(*new), 0);
	}
	/* The inner header's checksum balances the address: the ICMP checksum does not change. */
	diff = bpf_csum_diff(&old->word[3], 4, &new->word[3], 4, 0);
	if (bpf_l3_csum_replace(skb, c->l3 + IP4_CHECK, 0, diff, 0))
		return -1;
	return bpf_skb_store_bytes(skb, c->l3 + at4, &new->word[3], 4, 0);
}

static __always_inline int rewrite_inner_port(struct __sk_buff *skb, const struct packet *c,
					      u32 offset, __be16 old, __be16 new, __wsum *sum)
{
	__be32 before = old, after = new;

	if (old == new)
		return 0;
	*sum = bpf_csum_diff(&before, sizeof(before), &after, sizeof(after), *sum);
	return bpf_skb_store_bytes(skb, c->l4 + offset, &new, sizeof(new), 0);
}

/* Gives the inner packet the addresses and ports of `new`. Its own L4 checksum stays as it is: most
 * of the data that it covers is not quoted, so no receiver can verify it. */
static __always_inline int rewrite_inner(struct __sk_buff *skb, const struct packet *p,
					 struct packet *c, struct tuple *new)
{
	struct tuple *old = &c->tuple;
	__wsum sum = 0;

	if (rewrite_inner_address(skb, c, IP4_SOURCE, IP6_SOURCE, &old->from.address,
				  &new->from.address, &sum) ||
	    rewrite_inner_address(skb, c, IP4_DESTINATION, IP6_DESTINATION, &old->to.address,
				  &new->to.address, &sum) ||
	    rewrite_inner_port(skb, c, 0, old->from.port, new->from.port, &sum) ||
	    rewrite_inner_port(skb, c, 2, old->to.port, new->to.port, &sum))
		return -1;
	return bpf_l4_csum_replace(skb, p->l4 + ICMP_CHECK, 0, sum, 0);
}
