/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Redirects packets from ingress to the next device, past the stack.
 *
 * Packets for backends on other nodes carry this node's address as source. The stack would drop
 * them as martians, and a FORWARD policy would judge them. So they are routed here, with the
 * kernel's FIB, and handed to the next device with the neighbour's MAC address. Packets that cannot
 * be forwarded here (longer than the MTU, TTL expired, no route, a route that encapsulates) go up
 * the stack, which handles them or answers with the right ICMP error. But if a packet is too long
 * and may not be fragmented, tc_refuse answers (send_path_mtu()).
 *
 * The only other duty of forwarding is to decrement the TTL.
 */
#pragma once

#include "types.h"
#include "lib/check.h"
#include "lib/compat.h"
#include "lib/packet.h"
#include "tc/devices.h"
#include "tc/flow.h"
#include "tc/tails.h"

#define BPF_FIB_LKUP_RET_SUCCESS 0
#define BPF_FIB_LKUP_RET_FWD_DISABLED 5
#define BPF_FIB_LKUP_RET_UNSUPP_LWT 6
#define BPF_FIB_LOOKUP_OUTPUT 2 /* by this device only */
#define BPF_FIB_LKUP_RET_NO_NEIGH                                                                  \
	7 /* there is a route, but the MAC address is unknown: the kernel resolves it */
#define BPF_FIB_LKUP_RET_FRAG_NEEDED 8
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
static __always_inline long fib_lookup(void *ctx, struct fib_params *route, u32 flags)
{
	return ((long (*)(void *, void *, int, u32))69)(ctx, route, sizeof(*route), flags);
}

/* Linux v5.10: b4ab31414970, ba452c9e996d. */
static __always_inline long redirect_neigh(u32 ifindex, struct redir_neigh *neighbour)
{
	return ((long (*)(u32, void *, int, u64))152)(ifindex, neighbour, sizeof(*neighbour), 0);
}

/* The beginning of struct bpf_tunnel_key; the kernel accepts it alone. */
struct tunnel_key {
	u32 id;
	u32 remote; /* IPv4, host byte order */
};

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

/* The device that a packet has come in by; at egress of the node's own packets, that which they
 * leave by. */
static __always_inline u32 came_in_by(struct __sk_buff *skb)
{
	return skb->ingress_ifindex ? skb->ingress_ifindex : skb->ifindex;
}

/* Asks the FIB for the next hop of a packet of this length that has come in by this device. Returns
 * BPF_FIB_LKUP_RET_*. */
static __always_inline long query_fib(struct __sk_buff *skb, const struct packet *p,
				      const struct target *from, const struct target *to,
				      struct next_hop *hop, u16 length, u32 in, u32 flags)
{
	struct fib_params route = {
		.protocol = p->protocol,
		.source_port = from->port,
		.destination_port = to->port,
		.length = length,
		.ifindex = in,
	};
	long result;

	if (p->v6) {
		route.family = AF_INET6;
		route.source = from->address;
		route.destination = to->address;
	} else {
		route.family = AF_INET;
		route.tos = p->tos;
		route.source.word[0] = from->address.word[3];
		route.destination.word[0] = to->address.word[3];
	}
	result = fib_lookup(skb, &route, flags);
	hop->address = route.destination;
	hop->max_length = route.length;
	hop->ifindex = route.ifindex;
	__builtin_memcpy(hop->own_mac, route.own_mac, 6);
	__builtin_memcpy(hop->next_mac, route.next_mac, 6);
	hop->family = route.family;
	return result;
}

#define LOOPBACK_IFINDEX 1
/* The route encapsulates, and the kernel does not tell its device. */
#define UNKNOWN_IFINDEX (~0U)

/* Whether packets from behind this device may come by another one: not those of this node's pods.
 */
static __always_inline bool is_exchangeable(const struct device *device)
{
	return !device || device->role == ROLE_HOST || (device->flags & DEVICE_SPANS);
}

/* Whether the route to the sender of a packet leads to the device that it arrived on, as a strict
 * reverse path filter asks. A pod's device is not exchangeable: this is what tells a pod from
 * another, and from machines outside, whatever the source address says. Host devices are, since
 * routes to the network are often asymmetric, unless the kernel's own filter is strict. `hop` is
 * used for the lookup. */
static __always_inline bool arrives_by(struct __sk_buff *skb, const struct packet *p, u32 ifindex,
				       struct next_hop *hop)
{
	struct device *in = device_at(ifindex), *route = NULL;
	u32 here = routing_ifindex(in, ifindex);
	bool found;
	long result;

	if (ifindex <= LOOPBACK_IFINDEX) /* sent by this node */
		return true;
	result = query_fib(skb, p, &p->tuple.to, &p->tuple.from, hop, 1, here, 0);
	if (result == BPF_FIB_LKUP_RET_FWD_DISABLED) /* this node is no router */
		return true;
	if (result == BPF_FIB_LKUP_RET_UNSUPP_LWT) /* UNKNOWN_IFINDEX */
		return is_exchangeable(in);
	found = !result || result > BPF_FIB_LKUP_RET_FWD_DISABLED;
	if (found && hop->ifindex == here)
		return true;
	if (found)
		route = device_at(hop->ifindex);
	if (is_exchangeable(in)) {
		if (!found || !is_exchangeable(route))
			return false;
		if (!in || p->v6 || !(in->flags & DEVICE_STRICT))
			return true;
	} else if (route && (route->flags & DEVICE_PODS)) {
		return true;
	}
	/* There may be other routes to it, by this device: those of several links, a default, or
	 * one in another table than that of packets from this device (`ip rule iif`). */
	result = query_fib(skb, p, &p->tuple.to, &p->tuple.from, hop, 1, here,
			   BPF_FIB_LOOKUP_OUTPUT);
	return hop->ifindex == here && /* IPv6 finds others, too */
	       (result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_NO_NEIGH);
}

/* Looks up the next hop for a packet from `from` to `to`. Returns the egress device, or NULL: then
 * the packet has to take the stack; exceeded_mtu() tells whether it is too long. `any_packet`:
 * looks up the next hop of the whole flow, even if this packet is too long; `hop->max_length` is 0
 * then if it does not fit. Who forwards packets checks the TTL before. */
static __always_inline struct device *find_next_hop(struct __sk_buff *skb, const struct packet *p,
						    const struct target *from,
						    const struct target *to, struct next_hop *hop,
						    bool any_packet, u32 in)
{
	u16 length = wire_length(skb, p);
	long result;

	hop->ifindex = hop->max_length = 0;
	result = query_fib(skb, p, from, to, hop, length, in, 0);
	if (any_packet &&
	    result == BPF_FIB_LKUP_RET_FRAG_NEEDED) { /* the result does not contain the device */
		length = 0;
		result = query_fib(skb, p, from, to, hop, 1, in, 0);
		if (result ==
		    BPF_FIB_LKUP_RET_FRAG_NEEDED) /* before v5.12 the kernel checks the packet's own
						     length; there is a route */
			result = BPF_FIB_LKUP_RET_NO_NEIGH;
	}
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH) {
		hop->ifindex = result == BPF_FIB_LKUP_RET_UNSUPP_LWT ? UNKNOWN_IFINDEX : 0;
		if (result != BPF_FIB_LKUP_RET_FRAG_NEEDED)
			hop->max_length = 0;
		return NULL;
	}
	hop->resolved = result == BPF_FIB_LKUP_RET_SUCCESS;
	hop->max_length = length;
	return device_at(hop->ifindex);
}

/* Replaces the source of packets to a backend if the device has a better one for them than its
 * first address: of the next hop's subnet, for IPv6 by the destination (node_maps.py). */
static __always_inline void improve_source(const struct next_hop *hop,
					   const struct address *backend, struct address *source)
{
	struct device_network key = {.bits = 160, .ifindex = hop->ifindex, .address = *backend};
	struct address *better;

	if (hop->family == AF_INET)
		key.address.word[3] = hop->address.word[0];
	better = device_sources.lookup(&key);
	if (better && is_v4(better) == is_v4(backend)) /* ::/1 has all of IPv4, too */
		*source = *better;
}

/* The path MTU that a packet exceeds for which no next hop was found; 0: it is not too long. Before
 * v5.12 (e1850ea9bd9e) the kernel does not tell the MTU, and this is the packet's own length. */
static __always_inline u32 exceeded_mtu(const struct next_hop *hop)
{
	return hop->ifindex ? 0 : hop->max_length;
}

/* The check word of a cached next hop. */
static __always_inline u32 check_of_next_hop(const struct next_hop *hop)
{
	u32 macs[3], check = check_address(hop->found_at, &hop->address);

	__builtin_memcpy(macs, hop->own_mac, 6);
	__builtin_memcpy((u8 *)macs + 6, hop->next_mac, 6);
	check = check_add(check, hop->ifindex);
	check = check_add(check, macs[0]);
	check = check_add(check, macs[1]);
	check = check_add(check, macs[2]);
	return check_add(check, hop->max_length | hop->resolved << 16 | (u32)hop->family << 24);
}

/* Copies all fields except `uncounted`, which belongs to the entry. */
static __always_inline void copy_next_hop(struct next_hop *to, const struct next_hop *from)
{
	u32 uncounted = to->uncounted;

	*to = *from;
	to->uncounted = uncounted;
}

/* Whether this copy of a cached next hop can be used. False: there is none, another CPU was
 * replacing it, or it is older than a second. A changed route or a deleted pod is therefore noticed
 * within a second. */
static __always_inline bool is_current(const struct next_hop *hop, u64 now)
{
	u32 second = SECOND >> FOUND_AT_SHIFT, minute = 60 * second;
	u32 age = (u32)(now >> FOUND_AT_SHIFT) - hop->found_at;

	/* Another CPU may have stored it after `now`. */
	return hop->ifindex && check_of_next_hop(hop) == hop->check &&
	       age + minute < minute + second;
}

/* Completes a next hop that was just looked up, so that it can be cached. */
static __always_inline void stamp_next_hop(struct next_hop *hop, u64 now)
{
	hop->found_at = now >> FOUND_AT_SHIFT;
	hop->check = check_of_next_hop(hop);
}

/* The next hop of a packet of this flow, from the cache if possible; see find_next_hop(). */
static __always_inline struct device *
next_hop_of_flow(struct __sk_buff *skb, const struct packet *p, const struct tuple *t,
		 struct next_hop *cached, struct next_hop *hop, u64 now)
{
	struct device *to;

	*hop = *cached;
	if (is_current(hop, now) && wire_length(skb, p) <= hop->max_length)
		return device_at(hop->ifindex);
	to = find_next_hop(skb, p, &t->from, &t->to, hop, false, came_in_by(skb));
	if (!to)
		return NULL;
	stamp_next_hop(hop, now);
	copy_next_hop(cached, hop);
	return to;
}

/* Whether packets between these two devices have to take the stack. bpf_redirect_neigh() sets no
 * route on a packet, and a tunnel without a configured remote address (tunl0, flannel.ipip) sends
 * it to the next hop of its route, or drops it. And before v5.14 (7ad136fd288c and its neighbours)
 * a packet that leaves a tunnel still has its outer headers, which a redirect would send on. */
static __always_inline bool needs_stack(const struct device *from, const struct device *to)
{
	return (from->flags | to->flags) & DEVICE_TUNNEL;
}

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
					   const struct device *to, const struct next_hop *hop)
{
	struct redir_neigh neighbour = {.family = hop->family, .address = hop->address};
	bool to_peer = (to->flags & DEVICE_PEER) && to->role == ROLE_POD && hop->resolved &&
		       from->l2 == ETH_HLEN && to->l2 == ETH_HLEN && skb->ingress_ifindex;
	long failed = drop_priority_tag(skb);
	u8 link[12];

	/* bpf_redirect_peer() skips the qdisc and the neighbour code, so the MAC addresses have to
	 * be known, and it works at ingress only. */
	if (to_peer) {
		__builtin_memcpy(link, hop->next_mac, 6);
		__builtin_memcpy(link + 6, hop->own_mac, 6);
		failed |= bpf_skb_store_bytes(skb, 0, link, sizeof(link), 0);
	} else if (!from->l2) {
		/* The kernel drops packets without a link-layer header here (tun, WireGuard), so
		 * add room for one. */
		failed |= bpf_skb_change_head(skb, ETH_HLEN, 0);
	}
	if (failed)
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	return finish(to_peer ? redirect_peer(hop->ifindex)
			      : redirect_neigh(hop->ifindex, &neighbour),
		      REDIRECTED);
}

/* Sends a packet of this node's own socket to the next hop behind a tunnel that takes its remote
 * address from the route. The packet has the route to the Service. For ipip the remote address
 * replaces it: ip_tunnel_xmit() prefers that (Linux v5.1, d71b57532d70). The other kinds look for a
 * neighbour of the route, which this one has not: NULL before v5.12. bpf_redirect_neigh() could
 * look up another route, but would leak the packet's own. */
static __always_inline int redirect_to_remote(struct __sk_buff *skb, const struct device *to,
					      const struct next_hop *hop)
{
	struct tunnel_key key = {.remote = __builtin_bswap32(hop->address.word[0])};

	if (!(to->flags & DEVICE_IPIP) || hop->family != AF_INET ||
	    bpf_skb_set_tunnel_key(skb, &key, sizeof(key), 0))
		return finish(TC_ACT_SHOT, NO_ROUTE);
	return finish(bpf_redirect(hop->ifindex, 0), REDIRECTED);
}

struct eth_header {
	u8 to[6];
	u8 from[6];
	__be16 protocol;
};

/* Gives a packet the link-layer header of the device that it is delivered on. The kernel removes
 * the header of a packet for a device without one. */
static __always_inline int change_link(struct __sk_buff *skb, const struct device *from,
				       const struct device *to)
{
	struct eth_header header = {.protocol = skb->protocol};

	if (!to->l2)
		return 0;
	if (from->l2)
		return bpf_skb_store_bytes(skb, 0, to->mac, sizeof(to->mac), 0);
	__builtin_memcpy(header.to, to->mac, sizeof(header.to));
	__builtin_memcpy(header.from, to->mac, sizeof(header.from));
	return bpf_skb_change_head(skb, sizeof(header), 0) ||
	       bpf_skb_store_bytes(skb, 0, &header, sizeof(header), 0);
}

/* A packet for this node's own socket: delivers it on the device that the socket sends by, where a
 * reverse path filter expects it. `l3`: the offset of its IP header, which may change. A packet
 * that still has the outer headers of a tunnel (offset_in_tunnel()) stays on the tunnel's device:
 * on any other one these would be its headers. */
static __always_inline int deliver_to_host(struct __sk_buff *skb, const struct device *from,
					   u32 ifindex, u32 *l3)
{
	struct device *to = device_at(ifindex);

	/* It is on that device already, or on a port of it. */
	if (ifindex == skb->ifindex || ifindex == from->bridge || !to || *l3 != from->l2)
		return TC_ACT_UNSPEC;
	if (drop_priority_tag(skb) || change_link(skb, from, to))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	if (to->l2)
		*l3 = to->l2;
	return finish(bpf_redirect(ifindex, BPF_F_INGRESS), REDIRECTED);
}
