/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Redirects packets from ingress to the next device, past the stack.
 *
 * Packets for backends on other nodes carry this node's address as source. The stack would drop
 * them as martians, and a FORWARD policy would judge them. So they are routed here, with the
 * kernel's FIB, and handed to the next device with the neighbour's MAC address. Packets that cannot
 * be forwarded here (longer than the MTU, TTL expired, no route, a route that encapsulates) go up
 * the stack, which handles them or answers with the right ICMP error.
 *
 * The only other duty of forwarding is to decrement the TTL.
 */
#pragma once

#include "lib/check.h"

#define BPF_FIB_LKUP_RET_SUCCESS 0
#define BPF_FIB_LKUP_RET_NO_NEIGH                                                                  \
	7 /* there is a route, but the MAC address is unknown: the kernel resolves it */
#define BPF_FIB_LKUP_RET_FRAG_NEEDED 8
#define TCP_WORDS 12      /* offset of the header's length, in words (upper 4 bits) */
#define FOUND_AT_SHIFT 20 /* unit of next_hop.found_at: about a millisecond */

/* struct bpf_fib_lookup of linux/bpf.h, 64 bytes; later kernels name more fields of its unions. */
struct fib_params {
	u8 family;
	u8 protocol;
	__be16 source_port;
	__be16 destination_port;
	u16 length;  /* in: of the largest packet, from the IP header on; out: the MTU */
	u32 ifindex; /* in: the ingress device; out: the egress device */
	u32 tos;     /* that of IPv4 in the first byte */
	struct address source;
	struct address destination; /* out: the next hop */
	u16 vlan[2];
	u8 own_mac[6];
	u8 next_mac[6];
};

/* struct bpf_redir_neigh. */
struct redir_neigh {
	u32 family;
	struct address address;
};

/* Linux v4.18: 87f5fc7e48dd. */
static __always_inline long fib_lookup(void *ctx, struct fib_params *route)
{
	return ((long (*)(void *, void *, int, u32))69)(ctx, route, sizeof(*route), 0);
}

/* Linux v5.10: b4ab31414970, ba452c9e996d. */
static __always_inline long redirect_neigh(u32 ifindex, struct redir_neigh *hop)
{
	return ((long (*)(u32, void *, int, u64))152)(ifindex, hop, sizeof(*hop), 0);
}

/* Linux v5.10: 9aa1206e8f48. */
static __always_inline long redirect_peer(u32 ifindex)
{
	return ((long (*)(u32, u64))155)(ifindex, 0);
}

/* The length of the longest packet that this one becomes on the wire, from the IP header on. */
static __always_inline u16 wire_length(struct __sk_buff *skb, const struct packet *p)
{
	u32 headers = p->l4 - p->l3;
	u8 words = 0;

	if (!skb->gso_size)
		return ip_length(skb, p);
	if (p->protocol != IPPROTO_TCP)
		return headers + 8 + skb->gso_size;
	if (bpf_skb_load_bytes(skb, p->l4 + TCP_WORDS, &words, 1))
		return 0xffff;
	return headers + (words >> 4) * 4 + skb->gso_size;
}

static __always_inline long query_fib(struct __sk_buff *skb, const struct packet *p,
				      const struct target *from, const struct target *to,
				      struct fib_params *route, u16 length)
{
	__builtin_memset(route, 0, sizeof(*route));
	route->protocol = p->protocol;
	route->source_port = from->port;
	route->destination_port = to->port;
	route->length = length;
	route->ifindex = skb->ifindex;
	if (p->v6) {
		route->family = AF_INET6;
		route->source = from->address;
		route->destination = to->address;
	} else {
		route->family = AF_INET;
		route->tos = p->tos;
		route->source.word[0] = from->address.word[3];
		route->destination.word[0] = to->address.word[3];
	}
	return fib_lookup(skb, route);
}

/* Looks up the next hop for a packet from `from` to `to`. Returns the egress device, or NULL: then
 * the packet has to take the stack. `route->vlan[0]` is 1 if the MAC addresses are known.
 * `any_packet`: looks up the route of the whole flow, even if this packet is too long or its TTL
 * has expired; `route->length` is 0 then if this packet does not fit. */
static __always_inline struct device *find_next_hop(struct __sk_buff *skb, const struct packet *p,
						    const struct target *from,
						    const struct target *to,
						    struct fib_params *route, bool any_packet)
{
	u16 length = wire_length(skb, p);
	long result;

	if (!any_packet && p->ttl <= 1)
		return NULL;
	result = query_fib(skb, p, from, to, route, length);
	if (any_packet &&
	    result == BPF_FIB_LKUP_RET_FRAG_NEEDED) { /* the result does not contain the device */
		length = 0;
		result = query_fib(skb, p, from, to, route, 1);
		if (result ==
		    BPF_FIB_LKUP_RET_FRAG_NEEDED) /* before v5.12 the kernel checks the packet's own
						     length; there is a route */
			result = BPF_FIB_LKUP_RET_NO_NEIGH;
	}
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return NULL;
	route->vlan[0] = result == BPF_FIB_LKUP_RET_SUCCESS;
	route->length = length; /* the kernel has overwritten it with the MTU */
	return device_at(route->ifindex);
}

/* The check word of a cached next hop. `found_at`: when it was looked up, in units of
 * FOUND_AT_SHIFT. */
static __always_inline u32 next_hop_check(const struct fib_params *route, u32 found_at)
{
	u32 macs[3], check = check_address(found_at, &route->destination);

	__builtin_memcpy(macs, route->own_mac, 6);
	__builtin_memcpy((u8 *)macs + 6, route->next_mac, 6);
	check = check_add(check, route->ifindex);
	check = check_add(check, macs[0]);
	check = check_add(check, macs[1]);
	check = check_add(check, macs[2]);
	return check_add(check, route->length | route->vlan[0] << 16 | (u32)route->family << 24);
}

/* Copies all fields except `uncounted`, which belongs to the entry. */
static __always_inline void copy_next_hop(struct next_hop *out, const struct next_hop *from)
{
	u32 uncounted = out->uncounted;

	*out = *from;
	out->uncounted = uncounted;
}

static __always_inline void cache_next_hop(struct next_hop *out, const struct fib_params *route,
					   u64 now)
{
	out->found_at = now >> FOUND_AT_SHIFT;
	out->address = route->destination;
	out->ifindex = route->ifindex;
	__builtin_memcpy(out->own_mac, route->own_mac, 6);
	__builtin_memcpy(out->next_mac, route->next_mac, 6);
	out->max_length = route->length;
	out->resolved = route->vlan[0];
	out->family = route->family;
	out->check = next_hop_check(route, out->found_at);
}

/* Reads the cached next hop. False: there is none, another CPU is replacing it, or it is older than
 * a second. A changed route or a deleted pod is therefore noticed within a second. */
static __always_inline bool read_cached_next_hop(const struct next_hop *out,
						 struct fib_params *route, u64 now)
{
	u32 found_at = out->found_at, check = out->check;

	route->family = out->family;
	route->length = out->max_length;
	route->ifindex = out->ifindex;
	route->destination = out->address;
	route->vlan[0] = out->resolved;
	__builtin_memcpy(route->own_mac, out->own_mac, 6);
	__builtin_memcpy(route->next_mac, out->next_mac, 6);
	return route->ifindex && next_hop_check(route, found_at) == check &&
	       (s32)((u32)(now >> FOUND_AT_SHIFT) - found_at) < (s32)(SECOND >> FOUND_AT_SHIFT);
}

/* The next hop of a packet of this flow, from the cache if possible; see find_next_hop(). */
static __always_inline struct device *next_hop_of_flow(struct __sk_buff *skb,
						       const struct packet *p,
						       const struct tuple *t, struct next_hop *out,
						       struct fib_params *route, u64 now)
{
	struct device *to;

	if (read_cached_next_hop(out, route, now) && wire_length(skb, p) <= route->length)
		return p->ttl > 1 ? device_at(route->ifindex) : NULL;
	to = find_next_hop(skb, p, &t->from, &t->to, route, false);
	if (!to)
		return NULL;
	cache_next_hop(out, route, now);
	return to;
}

static __always_inline int finish(int action, enum reason reason); /* in tc.c */

/* Removes a priority tag (802.1Q with VLAN 0), which applies to this link only; bpf_redirect*()
 * would send it on through the next device. Returns a value other than 0 on failure. */
static __always_inline long drop_priority_tag(struct __sk_buff *skb)
{
	return skb->vlan_present ? bpf_skb_vlan_pop(skb) : 0;
}

/* Sends the packet to the next device. If the device is a pod's, it is handed to the pod directly,
 * if possible; otherwise the kernel resolves the neighbour and writes the link-layer header. A
 * packet that the kernel drops after this point counts as a transmit error of the device. */
static __always_inline int redirect_packet(struct __sk_buff *skb, const struct device *from,
					   const struct device *to, const struct fib_params *route)
{
	struct redir_neigh hop = {.family = route->family};

	if (drop_priority_tag(skb))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	/* bpf_redirect_peer() skips the qdisc and the neighbour code, so the MAC addresses have to
	 * be known, and it works at ingress only. */
	if ((to->flags & DEVICE_PEER) && to->role == ROLE_POD && route->vlan[0] &&
	    from->l2 == ETH_HLEN && to->l2 == ETH_HLEN && skb->ingress_ifindex) {
		u8 link[12];

		__builtin_memcpy(link, route->next_mac, 6);
		__builtin_memcpy(link + 6, route->own_mac, 6);
		if (bpf_skb_store_bytes(skb, 0, link, sizeof(link), 0))
			return finish(TC_ACT_SHOT, NOT_REWRITTEN);
		return finish(redirect_peer(route->ifindex), REDIRECTED);
	}
	/* The kernel drops packets without a link-layer header here (tun, WireGuard), so add room
	 * for one. */
	if (!from->l2 && bpf_skb_change_head(skb, ETH_HLEN, 0))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	hop.address = route->destination;
	return finish(redirect_neigh(route->ifindex, &hop), REDIRECTED);
}
