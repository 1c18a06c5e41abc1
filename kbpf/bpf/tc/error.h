/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* ICMP errors about translated packets: see lib/icmp.h. */
#pragma once

#include "lib/icmp.h"
#include "lib/rewrite.h"
#include "tc/conntrack.h"
#include "tc/devices.h"
#include "tc/hop.h"
#include "tc/receive.h"
#include "tc/scratch.h"
#include "tc/tails.h"
#include "tc/translate.h"

/* The outer addresses of an error. `before` and `after`: the packet that travels like the error,
 * as it arrived and as it continues. Addresses that are an end of the flow are translated, and a
 * router's own address stays. The exception is an error on its way to the backend of a masqueraded
 * flow (`hidden`): it has the node's address, as with nf_nat, since the backend's network may not
 * know that router, and an overlay would drop its packets. */
static __always_inline struct tuple outer_of(const struct packet *p, const struct tuple *before,
					     const struct tuple *after, bool hidden)
{
	struct tuple outer = p->tuple;

	if (hidden || same_address(&outer.from.address, &before->from.address))
		outer.from.address = after->from.address;
	if (same_address(&outer.to.address, &before->to.address))
		outer.to.address = after->to.address;
	return outer;
}

/* Writes a translated error, of which `after` is the packet that travels like it. Returns a value
 * other than 0 on failure. */
static __always_inline int rewrite_error(struct __sk_buff *skb, struct scratch *s,
					 const struct tuple *after, struct tuple *outer, u8 ttl)
{
	struct tuple quoted = reversed(after);

	return rewrite_inner(skb, &s->packet, &s->inner, &quoted) ||
	       rewrite(skb, &s->packet, outer, ttl);
}

/* The tuple of a packet that would travel like the error. False: the error passes. As in
 * nf_conntrack, an error must be addressed to the sender of the packet that it quotes. Otherwise a
 * client could send errors from this node's address to any host. */
static __always_inline bool parse_error(struct __sk_buff *skb, struct scratch *s, struct tuple *t)
{
	if (!is_icmp_error(&s->packet) || !parse_inner(skb, &s->packet, &s->inner) ||
	    !s->inner.tuple.to.protocol)
		return false;
	*t = reversed(&s->inner.tuple);
	return same_address(&t->to.address, &s->packet.tuple.to.address);
}

/* Whether conntrack, which reassembles fragments, would see an answer or error that the programs
 * cannot read. No node sends errors that long. */
static __always_inline bool is_hidden_answer(struct packet *p)
{
	return ((has_hidden_ports(p) || (is_icmp_error(p) && p->fragment == FIRST)) &&
		uses_conntrack()) ||
	       is_forged_fragment(p);
}

/* Whether an error tells its receiver to send everything for an address to another gateway: with
 * the frontend's address, that would be past this node. Dropped without being counted, as by
 * nf_nat: the receiver misses nothing. IPv6 has none: its redirects name the address themselves,
 * and are no errors. */
static __always_inline bool is_redirect(const struct packet *p)
{
	return p->icmp_type == ICMP_REDIRECT;
}

/* Translates an error that arrives. It travels like the packets of its flow: conntrack does not
 * know the flows that bypass the stack, so in the stack an error about one would be invalid. */
int tc_icmp_in(struct __sk_buff *skb)
{
	struct device *device = device_at(skb->ifindex), *to = NULL;
	struct tuple tuple, outer, *after;
	struct translation translation = {};
	struct scratch *s = get_scratch();
	enum ingress_result result;
	struct packet *p;
	bool hidden;

	if (!s || !device)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	if (is_hidden_answer(p))
		return finish(TC_ACT_SHOT, INVALID);
	if (!parse_error(skb, s, &tuple))
		return is_icmp_error(p) && has_hidden_ports(&s->inner) && uses_conntrack()
			       ? finish(TC_ACT_SHOT, INVALID)
			       : TC_ACT_UNSPEC;
	if (answers_refused(&tuple) || (uses_conntrack() && !flow_between(&tuple)))
		return judge_answer_to_refused(skb, s);
	if (skb->pkt_type != PACKET_HOST)
		return TC_ACT_UNSPEC;
	translation.port_of = bridge_of_port(device, skb->ifindex);
	result = translate_in(&tuple, &s->inner, FROM_ICMP_ERROR, &translation);
	if (result == INGRESS_BRIDGED)
		return leave_to_bridge(skb);
	if (result != INGRESS_TRANSLATED) {
		if (translation.masqueraded)
			mark_masqueraded(skb, true);
		return TC_ACT_UNSPEC;
	}
	/* In the name of an end of the flow, or past the kernel's own checks. A router may have an
	 * address to which this node has no route. */
	if (is_impossible_source(&p->tuple.from.address) || has_source_route(skb, p))
		return TC_ACT_UNSPEC;
	if ((!is_exchangeable(device) || (device->flags & DEVICE_STRICT) ||
	     same_address(&p->tuple.from.address, &tuple.from.address)) &&
	    !arrives_by(skb, p, skb->ifindex, &s->hop))
		return TC_ACT_UNSPEC;
	if (is_redirect(p))
		return TC_ACT_SHOT;
	if (translation.path != PATH_STACK && !translation.host_device && p->ttl > 1) {
		hidden = translation.masqueraded && !translation.reply;
		outer = outer_of(p, &tuple, &translation.to_device, hidden);
		to = find_next_hop(skb, p, &outer.from, &outer.to, &s->hop, false, came_in_by(skb));
		if (to && needs_stack(device, to))
			to = NULL;
	}
	after = to ? &translation.to_device : &translation.to_stack;
	if (!to)
		outer = outer_of(p, &tuple, after, false);
	if (rewrite_error(skb, s, after, &outer, to ? p->ttl - 1 : p->ttl))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	if (to)
		return redirect_packet(skb, device, to, &s->hop);
	/* From the frontend: a reverse path filter expects it where the request left. */
	if (translation.host_device && !same_address(&outer.from.address, &p->tuple.from.address))
		return deliver_to_host(skb, device, translation.host_device, &p->l3);
	if (translation.masqueraded)
		mark_masqueraded(skb, true);
	return TC_ACT_UNSPEC;
}

/* Translates an error that leaves the stack. As in tc_icmp_in, it may be a packet that hides its
 * ports. */
int tc_icmp_out(struct __sk_buff *skb)
{
	struct tuple tuple, after, outer;
	struct scratch *s = get_scratch();
	enum egress_result result;
	bool masqueraded = false;

	if (!s)
		return TC_ACT_UNSPEC;
	/* A CNI has masqueraded it, and may have kept the port of a client: EGRESS_DENIED. */
	if (has_hidden_ports(&s->packet) && skb->ingress_ifindex &&
	    is_nodes_own(&s->packet.tuple.from.address))
		return finish(TC_ACT_SHOT, INVALID);
	if (!parse_error(skb, s, &tuple))
		return TC_ACT_UNSPEC;
	if (answers_refused(&s->inner.tuple)) /* it may have been just ahead of the key */
		return finish(TC_ACT_SHOT, INVALID);
	result = translate_out(&tuple, &s->inner, FROM_ICMP_ERROR, 0, skb->ifindex, 0, &after,
			       &masqueraded);
	if (masqueraded)
		mark_masqueraded(skb, false);
	if (!is_rewrite(result))
		return TC_ACT_UNSPEC;
	if (is_redirect(&s->packet))
		return TC_ACT_SHOT;
	outer = outer_of(&s->packet, &tuple, &after, result == EGRESS_MASQUERADE);
	if (rewrite_error(skb, s, &after, &outer, s->packet.ttl))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	return result == EGRESS_REROUTE ? go(skb, TAIL_REROUTE) : TC_ACT_UNSPEC;
}
