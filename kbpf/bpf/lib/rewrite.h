/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Writes new addresses and ports into a packet, and updates every checksum that covers them. */
#pragma once

#include "lib/addr.h"
#include "lib/packet.h"

#define IP4_FRAGMENT 6
#define IP4_TTL 8
#define IP4_CHECK 10
#define IP4_SOURCE 12
#define IP4_DESTINATION 16
#define IP6_HOPS 7
#define IP6_SOURCE 8
#define IP6_DESTINATION 24
#define TCP_CHECK 16
#define UDP_CHECK 6
#define ICMP6_CHECK 2

/* Offset of the checksum in the header of this protocol; 0: no checksum covers the addresses. That
 * of SCTP covers only the SCTP packet. */
static __always_inline u32 check_offset(u8 protocol)
{
	if (protocol == IPPROTO_TCP)
		return TCP_CHECK;
	if (protocol == IPPROTO_UDP)
		return UDP_CHECK;
	if (protocol == IPPROTO_ICMPV6)
		return ICMP6_CHECK;
	return 0;
}

/* Folds the carry of a ones' complement sum back into 32 bits (RFC 1624). */
static __always_inline __wsum wrap(u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

static __always_inline __sum16 fold(__wsum sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* Updates the L4 checksum when an address of the pseudo header changes.
 *
 * With CHECKSUM_COMPLETE, skb->csum is the sum of all bytes. In IPv4 the header checksum balances
 * the address, and the helper keeps skb->csum right. IPv6 has no header checksum: address and L4
 * checksum balance each other, but the helper subtracts the difference (Linux ead7f9b8de65); and if
 * there is no L4 checksum, nothing balances the address. */
static __always_inline int change_pseudo(struct __sk_buff *skb, const struct packet *p, __wsum diff)
{
	u32 check = check_offset(p->protocol);
	u64 flags = BPF_F_PSEUDO_HDR;

	if (p->protocol == IPPROTO_UDP)
		flags |= BPF_F_MARK_MANGLED_0; /* 0 means "no checksum", and has to stay 0 */
	if (check && p->fragment != LATER &&
	    bpf_l4_csum_replace(skb, p->l4 + check, 0, diff, flags))
		return -1;
	if (p->v6) /* folded: BCC declares 16 bits, and up to v6.12 bpf_csum_diff() returns 32 */
		bpf_csum_update(skb, (__sum16)~fold(diff));
	return 0;
}

/* Adjacent fields of the IPv4 header. */
struct ip4_middle {
	u8 ttl;
	u8 protocol;
	__sum16 check;
	__be32 source;
	__be32 destination;
};

/* One store instead of one helper call for each field: the header checksum is among them. Stores
 * both addresses at once, even if only one has changed: one store is cheaper than a branch and
 * two. */
static __always_inline int change_v4(struct __sk_buff *skb, const struct packet *p,
				     const struct tuple *new, u8 ttl)
{
	u32 source = p->tuple.from.address.word[3], destination = p->tuple.to.address.word[3];
	struct ip4_middle is = {
		.ttl = ttl,
		.protocol = p->protocol,
		.source = new->from.address.word[3],
		.destination = new->to.address.word[3],
	};
	u64 diff = (u64)(u32)~source + is.source + (u32)~destination + is.destination;

	is.check = fold(wrap(diff + (u16)~p->check + (u16)~p->ttl +
			     ttl)); /* the TTL is the low byte of its 16-bit word */
	if (bpf_skb_store_bytes(skb, p->l3 + IP4_TTL, &is, sizeof(is), 0))
		return -1;
	return change_pseudo(skb, p, wrap(diff));
}

static __always_inline int change_v6(struct __sk_buff *skb, const struct packet *p,
				     const struct tuple *new, u8 hops)
{
	struct address was[2] = {p->tuple.from.address, p->tuple.to.address};
	struct address is[2] = {new->from.address, new->to.address};
	__wsum diff = bpf_csum_diff((__be32 *)was, sizeof(was), (__be32 *)is, sizeof(is), 0);

	if (hops != p->ttl &&
	    bpf_skb_store_bytes(skb, p->l3 + IP6_HOPS, &hops, sizeof(hops), BPF_F_RECOMPUTE_CSUM))
		return -1;
	if (bpf_skb_store_bytes(skb, p->l3 + IP6_SOURCE, is, sizeof(is), 0))
		return -1;
	return change_pseudo(skb, p, diff);
}

static __always_inline int change_ports(struct __sk_buff *skb, const struct packet *p,
					const struct tuple *from, const struct tuple *to)
{
	struct ports old = {from->from.port, from->to.port}, new = {to->from.port, to->to.port};
	u64 flags = sizeof(old);
	__sum16 sum;

	if (*(u32 *)&old == *(u32 *)&new || p->fragment == LATER)
		return 0;
	if (p->protocol == IPPROTO_SCTP) /* finish_rewrite() updates its checksum */
		return bpf_skb_store_bytes(skb, p->l4, &new, sizeof(new), BPF_F_RECOMPUTE_CSUM);
	if (p->protocol == IPPROTO_UDP) {
		flags |= BPF_F_MARK_MANGLED_0;
		if (bpf_skb_load_bytes(skb, p->l4 + UDP_CHECK, &sum, sizeof(sum)))
			return -1;
		if (!sum) /* the helper would change neither it nor skb->csum */
			return bpf_skb_store_bytes(skb, p->l4, &new, sizeof(new),
						   BPF_F_RECOMPUTE_CSUM);
	}
	if (bpf_l4_csum_replace(skb, p->l4 + check_offset(p->protocol), *(u32 *)&old, *(u32 *)&new,
				flags))
		return -1;
	return bpf_skb_store_bytes(skb, p->l4, &new, sizeof(new), 0);
}

/* Gives the packet the addresses and ports of `new`, and this TTL or hop limit. If the result is
 * not 0, the packet may be half rewritten and has to be dropped. The SCTP checksum is not updated
 * here: see finish_rewrite(). */
static __always_inline int rewrite(struct __sk_buff *skb, struct packet *p, struct tuple *new,
				   u8 hops)
{
	struct tuple *old = &p->tuple;

	if ((address_difference(&old->from.address, &new->from.address) |
	     address_difference(&old->to.address, &new->to.address) | (p->ttl ^ hops)) &&
	    (p->v6 ? change_v6(skb, p, new, hops) : change_v4(skb, p, new, hops)))
		return -1;
	if (change_ports(skb, p, old, new))
		return -1;
	bpf_set_hash_invalid(skb);
	return 0;
}
