/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* From ingress to the next device, past the stack.
 *
 * Packets for backends on other nodes carry this node's address as source. The stack would drop
 * them as martians, and a FORWARD policy would judge them; so they are routed here, by the tables
 * of the kernel, and given to the next device with the neighbour's address that the kernel knows.
 * What cannot be routed here (too long for the way, TTL at its end, no route, a tunnel that a route
 * makes) goes up the stack, which knows what to answer.
 *
 * What is left of forwarding's duties: TTL goes down by one.
 */
#pragma once

#include "check.h"

#define FIB_SUCCESS 0
#define FIB_NO_NEIGHBOUR 7 /* found, but for the neighbour's address: the kernel asks for it */
#define FIB_TOO_LONG 8
#define TCP_WORDS 12
#define WAY_SHIFT 20 /* the unit of way_out.found: about a millisecond */

/* struct bpf_fib_lookup of linux/bpf.h, 64 bytes; later kernels give the unions more names. */
struct route {
	u8 family;
	u8 protocol;
	__be16 source_port;
	__be16 destination_port;
	u16 length;  /* of the largest packet from the IP header on */
	u32 ifindex; /* in: where it came in; out: where it goes */
	u32 tos;     /* IPv4's in the first byte */
	struct address source;
	struct address destination; /* out: of the next hop */
	u16 vlan[2];
	u8 own_mac[6];
	u8 next_mac[6];
};

/* struct bpf_redir_neigh. */
struct next_hop {
	u32 family;
	struct address address;
};

/* Linux v4.18: 87f5fc7e48dd. */
static __always_inline long fib_lookup(void *ctx, struct route *route)
{
	return ((long (*)(void *, void *, int, u32))69)(ctx, route, sizeof(*route), 0);
}

/* Linux v5.10: b4ab31414970, ba452c9e996d. */
static __always_inline long redirect_neigh(u32 ifindex, struct next_hop *hop)
{
	return ((long (*)(u32, void *, int, u64))152)(ifindex, hop, sizeof(*hop), 0);
}

/* Linux v5.10: 9aa1206e8f48. */
static __always_inline long redirect_peer(u32 ifindex)
{
	return ((long (*)(u32, u64))155)(ifindex, 0);
}

/* The longest packet that this one becomes on the wire, from the IP header on. */
static __always_inline u16 wire_length(struct __sk_buff *skb, const struct packet *p)
{
	u32 headers = p->l4 - p->l3;
	u8 words = 0;

	if (!skb->gso_size)
		return ip_length(skb, p);
	if (p->protocol != PROTO_TCP)
		return headers + 8 + skb->gso_size;
	if (bpf_skb_load_bytes(skb, p->l4 + TCP_WORDS, &words, 1))
		return 0xffff;
	return headers + (words >> 4) * 4 + skb->gso_size;
}

static __always_inline long ask_way(struct __sk_buff *skb, const struct packet *p,
				    const struct target *from, const struct target *to,
				    struct route *route, u16 length)
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

/* The way of a packet that will go from here to there. Gives the device that it leaves by, or NULL:
 * then the stack has to see to it. `route->vlan[0]` is 1 where the MAC addresses are known.
 * `any_packet`: the way of the whole flow, whether or not this packet can take it; `route->length`
 * is 0 then if it cannot. */
static __always_inline struct device *find_route(struct __sk_buff *skb, const struct packet *p,
						 const struct target *from, const struct target *to,
						 struct route *route, bool any_packet)
{
	u16 length = wire_length(skb, p);
	long result;

	if (!any_packet && p->ttl <= 1)
		return NULL;
	result = ask_way(skb, p, from, to, route, length);
	if (any_packet && result == FIB_TOO_LONG) { /* which does not say by which device */
		length = 0;
		result = ask_way(skb, p, from, to, route, 1);
		if (result == FIB_TOO_LONG) /* before v5.12, which asks the packet; it is found */
			result = FIB_NO_NEIGHBOUR;
	}
	if (result != FIB_SUCCESS && result != FIB_NO_NEIGHBOUR)
		return NULL;
	route->vlan[0] = result == FIB_SUCCESS;
	route->length = length; /* the kernel has written the MTU there */
	return device_at(route->ifindex);
}

/* `found` is when, as struct way_out has it. */
static __always_inline u32 check_of_way(const struct route *route, u32 found)
{
	u32 macs[3], check = check_address(found, &route->destination);

	__builtin_memcpy(macs, route->own_mac, 6);
	__builtin_memcpy((u8 *)macs + 6, route->next_mac, 6);
	check = check_add(check, route->ifindex);
	check = check_add(check, macs[0]);
	check = check_add(check, macs[1]);
	check = check_add(check, macs[2]);
	return check_add(check, route->length | route->vlan[0] << 16 | (u32)route->family << 24);
}

static __always_inline void hand_on_way(struct way_out *out, const struct way_out *from)
{
	u32 unsaid = out->unsaid;

	*out = *from;
	out->unsaid = unsaid;
}

static __always_inline void remember_way(struct way_out *out, const struct route *route, u64 now)
{
	out->found = now >> WAY_SHIFT;
	out->next = route->destination;
	out->ifindex = route->ifindex;
	__builtin_memcpy(out->own_mac, route->own_mac, 6);
	__builtin_memcpy(out->next_mac, route->next_mac, 6);
	out->length = route->length;
	out->resolved = route->vlan[0];
	out->family = route->family;
	out->check = check_of_way(route, out->found);
}

/* What was remembered. False: nothing, or another CPU has replaced it meanwhile, or it is older
 * than a second: a router that changes, or a pod that goes, is noticed by then at the latest. */
static __always_inline bool recall_way(const struct way_out *out, struct route *route, u64 now)
{
	u32 found = out->found, check = out->check;

	route->family = out->family;
	route->length = out->length;
	route->ifindex = out->ifindex;
	route->destination = out->next;
	route->vlan[0] = out->resolved;
	__builtin_memcpy(route->own_mac, out->own_mac, 6);
	__builtin_memcpy(route->next_mac, out->next_mac, 6);
	return route->ifindex && check_of_way(route, found) == check &&
	       (s32)((u32)(now >> WAY_SHIFT) - found) < (s32)(SECOND >> WAY_SHIFT);
}

/* The way of a packet of a flow, see find_route(). */
static __always_inline struct device *flow_route(struct __sk_buff *skb, const struct packet *p,
						 const struct tuple *t, struct way_out *out,
						 struct route *route, u64 now)
{
	struct device *to;

	if (recall_way(out, route, now) && wire_length(skb, p) <= route->length)
		return p->ttl > 1 ? device_at(route->ifindex) : NULL;
	to = find_route(skb, p, &t->from, &t->to, route, false);
	if (!to)
		return NULL;
	remember_way(out, route, now);
	return to;
}

static __always_inline int finish(int action, enum reason reason); /* see tc.c */

/* Takes off a priority tag (802.1Q with VLAN 0), which says something about this link only:
 * bpf_redirect*() would have it sent on by the next device. Not 0: it could not. */
static __always_inline long drop_priority_tag(struct __sk_buff *skb)
{
	return skb->vlan_present ? bpf_skb_vlan_pop(skb) : 0;
}

/* Sends it off. Into a pod it goes without a queue where that can be; else the kernel writes the
 * link header. What the kernel drops behind this counts as a transmit error of the device. */
static __always_inline int send_off(struct __sk_buff *skb, const struct device *from,
				    const struct device *to, const struct route *route)
{
	struct next_hop hop = {.family = route->family};

	if (drop_priority_tag(skb))
		return finish(TC_SHOT, NOT_REWRITTEN);
	if ((to->flags & DEVICE_PEER) && to->role == ROLE_POD && route->vlan[0] &&
	    from->l2 == ETH_HEADER && to->l2 == ETH_HEADER && skb->ingress_ifindex) {
		u8 link[12];

		__builtin_memcpy(link, route->next_mac, 6);
		__builtin_memcpy(link + 6, route->own_mac, 6);
		if (bpf_skb_store_bytes(skb, 0, link, sizeof(link), 0))
			return finish(TC_SHOT, NOT_REWRITTEN);
		return finish(redirect_peer(route->ifindex), REDIRECTED);
	}
	/* The kernel drops what has no link header to take off, as packets of tun or WireGuard. */
	if (!from->l2 && bpf_skb_change_head(skb, ETH_HEADER, 0))
		return finish(TC_SHOT, NOT_REWRITTEN);
	hop.address = route->destination;
	return finish(redirect_neigh(route->ifindex, &hop), REDIRECTED);
}
