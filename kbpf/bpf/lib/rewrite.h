/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Writes a changed tuple into a packet, with every checksum that covers it. */
#pragma once

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

/* Where the checksum of this protocol is, from the start of its header; 0: none that covers the
 * addresses. SCTP's covers its own packet only. */
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

/* The L4 checksum goes along when an address of the pseudo header changes.
 *
 * skb->csum of a packet with CHECKSUM_COMPLETE is the sum of all bytes. In IPv4 the header's own
 * checksum balances the address, and the helper keeps it right. IPv6 has none: address and L4
 * checksum balance each other, but the helper takes the difference out (Linux ead7f9b8de65); and
 * where there is no L4 checksum to change, nothing balances the address. */
static __always_inline int change_pseudo(struct __sk_buff *skb, const struct packet *p, __wsum diff)
{
	u32 check = check_offset(p->protocol);
	u64 flags = BPF_F_PSEUDO_HDR;

	if (p->protocol == IPPROTO_UDP)
		flags |= BPF_F_MARK_MANGLED_0; /* 0 means "no checksum", and stays that */
	if (check && p->fragment != LATER &&
	    bpf_l4_csum_replace(skb, p->l4 + check, 0, diff, flags))
		return -1;
	if (p->v6)
		bpf_csum_update(skb, diff);
	return 0;
}

/* What lies side by side in the header of IPv4. */
struct ip4_middle {
	u8 ttl;
	u8 protocol;
	__sum16 check;
	__be32 source;
	__be32 destination;
};

/* Sums in ones' complement: what is carried out at the top comes in again below (RFC 1624). */
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

/* One store instead of a helper for each part: the header's own checksum is among them. Both
 * addresses at once, though most often only one is another. */
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

	is.check = fold(
		wrap(diff + (u16)~p->check + (u16)~p->ttl + ttl)); /* TTL: its word's low byte */
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
	if (p->protocol == IPPROTO_SCTP) /* complete() sees to the checksum */
		return bpf_skb_store_bytes(skb, p->l4, &new, sizeof(new), BPF_F_RECOMPUTE_CSUM);
	if (p->protocol == IPPROTO_UDP) {
		flags |= BPF_F_MARK_MANGLED_0;
		if (bpf_skb_load_bytes(skb, p->l4 + UDP_CHECK, &sum, sizeof(sum)))
			return -1;
		if (!sum) /* the helper leaves it alone, and with it skb->csum */
			return bpf_skb_store_bytes(skb, p->l4, &new, sizeof(new),
						   BPF_F_RECOMPUTE_CSUM);
	}
	if (bpf_l4_csum_replace(skb, p->l4 + check_offset(p->protocol), *(u32 *)&old, *(u32 *)&new,
				flags))
		return -1;
	return bpf_skb_store_bytes(skb, p->l4, &new, sizeof(new), 0);
}

/* Makes the packet say `new`, with so many hops to go. Not 0: the packet may be half written and
 * has to be dropped. SCTP's checksum is not right yet: complete() goes on with it. */
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
