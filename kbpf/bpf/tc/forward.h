/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Sends translated packets on: up the stack, or past it to the next device.
 */
#pragma once

#include "types.h"
#include "lib/packet.h"
#include "lib/rewrite.h"
#include "tc/account_flows.h"
#include "tc/devices.h"
#include "tc/flow.h"
#include "tc/hop.h"
#include "tc/scratch.h"
#include "tc/sctp.h"
#include "tc/tails.h"
#include "tc/translate.h"

#define LEAST_MTU 1280 /* of every link with IPv6 */

/* Whether the sender, rather than this node, has to fragment this packet if it is too long. */
static __always_inline bool dont_fragment(struct __sk_buff *skb, const struct packet *p)
{
	__be16 fragment = 0;

	if (p->v6)
		return true;
	bpf_skb_load_bytes(skb, p->l3 + IP4_FRAGMENT, &fragment, sizeof(fragment));
	return fragment & __builtin_bswap16(IP_DF);
}

/* Tells the sender of a packet that is too long the path MTU. */
static __always_inline int send_path_mtu(struct __sk_buff *skb, struct scratch *s, u32 mtu)
{
	s->reason = TOO_LONG;
	s->mtu = mtu;
	return go(skb, TAIL_REFUSE);
}

/* Sends on what translate_in() has translated. If the flow bypasses the stack, the packet goes
 * to the next device with both addresses changed. If it is too long for that device, the stack
 * fragments it, or its sender gets an ICMP error with the MTU. All other packets go up the stack,
 * and their source changes when they leave it. Packets for the node's own sockets are delivered on
 * the device that the sockets send by. */
static __always_inline int forward_known(struct __sk_buff *skb, struct scratch *s,
					 const struct device *device, struct translation *t)
{
	struct tuple *new = &t->to_stack;
	struct packet *p = &s->packet;
	struct device *to = NULL;
	bool bypasses = t->path != PATH_STACK && !t->host_device && p->ttl > 1;
	int action = TC_ACT_UNSPEC;
	u32 mtu = 0, l3 = p->l3;

	if (bypasses)
		to = next_hop_of_flow(skb, p, &t->to_device, &t->flow->out, &s->hop, t->now);
	if (to && needs_stack(device, to)) /* the route has changed, or replies come another way */
		to = NULL;
	if (!to && bypasses)
		mtu = exceeded_mtu(&s->hop);
	/* The stack could tell the sender, but conntrack may call its error invalid. */
	if (mtu && p->fragment != LATER && mtu < wire_length(skb, p) && dont_fragment(skb, p))
		return send_path_mtu(skb, s, mtu);
	if (to)
		new = &t->to_device;
	account_bytes(t->flow, skb->len - p->l3, p->tcp_flags, t->reply);
	if (rewrite(skb, p, new, to ? p->ttl - 1 : p->ttl)) /* as a router does */
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	if (to)
		action = redirect_packet(skb, device, to, &s->hop);
	else if (t->host_device)
		action = deliver_to_host(skb, device, t->host_device, &l3);
	else if (t->masqueraded)
		mark_masqueraded(skb, true);
	return finish_rewrite(skb, s, new, action, to ? ETH_HLEN : l3);
}

/* A reply has left the stack by another device than its client's packets came in by (or an ICMP
 * error about one). The stack routes by the source address, which is the backend's until tc_egress
 * has written the frontend's. Where rules apply to the addresses of pods (AWS VPC CNI: `from POD
 * lookup N`), that is a device on which no router accepts the frontend's. So the FIB is asked again
 * with the addresses of the packet as it is now.
 *
 * It happens here because netfilter has seen the reply by now. Conntrack would call the client's
 * next packet INVALID if the reply bypassed the stack. */
int tc_reroute(struct __sk_buff *skb)
{
	struct device *device = device_at(skb->ifindex), *to;
	struct scratch *s = get_scratch();
	int action = TC_ACT_UNSPEC;
	struct tuple tuple, out;
	struct flow *flow;

	if (!s || !device)
		return TC_ACT_UNSPEC;
	tuple = s->packet.tuple;
	if (!tuple.from.protocol) /* an ICMP error */
		tuple = reversed(&s->inner.tuple);
	flow = flow_between(&tuple);
	if (!flow)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	out.from = flow->frontend;
	out.to = flow->client;
	to = next_hop_of_flow(skb, &s->packet, &out, &flow->out, &s->hop, now_ns());
	if (to && (s->hop.ifindex == skb->ifindex || (to->flags & DEVICE_NBMA)))
		to = NULL;
	s->hop.resolved = false; /* bpf_redirect_peer() works at ingress only */
	if (to)
		action = redirect_packet(skb, device, to, &s->hop);
	return finish_rewrite(skb, s, &out, action, to ? ETH_HLEN : s->packet.l3);
}
