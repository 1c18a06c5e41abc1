/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Translates packets of known flows as they arrive and as they leave.
 */
#pragma once

#include "types.h"
#include "lib/packet.h"
#include "tc/account_flows.h"
#include "tc/devices.h"
#include "tc/entries.h"
#include "tc/flow.h"
#include "tc/hop.h"
#include "tc/known.h"

/* What to do with a packet of a known flow at ingress. */
struct translation {
	struct tuple to_stack;  /* if it takes the stack */
	struct tuple to_device; /* if it is redirected to the next device */
	struct flow *flow;      /* the entry that matched */
	u64 now;
	u32 host_device;  /* not 0: for this node, as if it arrived on this device */
	u8 path;          /* enum flow_path */
	bool masqueraded; /* to be marked in the stack, even if nothing else changes */
	u8 restart;       /* enum restart, of INGRESS_OVER */
	bool reply;       /* sent by the backend */
	u32 port_of;      /* in: the bridge, if the packet is at a port of one; otherwise 0 */
	u32 pod_device;   /* in: the device, if it is that of a single pod; otherwise 0 */
	u32 arrival;      /* in: the device that the packet arrived on */
};

/* Translates a packet of the client. */
static __always_inline void translate_original(const struct flow *flow, struct translation *s)
{
	s->to_stack.to = flow->backend;
	s->to_stack.from.port = flow->client_port;
	s->to_device = s->to_stack;
	if (has_snat(flow)) {
		s->to_device.from.address = flow->snat;
		s->to_device.from.port = flow->snat_port;
	}
}

/* Translates a packet of the backend. False: it is for the client already, and changes at egress or
 * (begins_direct()) not at all, or it is for a client of conntrack, which has the port that the
 * node's socket has given up. */
static __always_inline bool translate_reply(const struct tuple *t, const struct flow *flow,
					    struct translation *s)
{
	if (has_snat(flow) && same_address(&t->to.address, &flow->snat) &&
	    t->to.port == flow->snat_port) {
		s->to_stack.to = flow->client;
		s->to_stack.to.port = flow->client_port;
	} else if ((flow->fins & FIN_DIRECT) ||
		   (flow->host_device ? has_snat(flow) : flow->path == PATH_STACK)) {
		return false;
	}
	s->to_device.from = flow->frontend;
	s->to_device.to = flow->client;
	if (flow->host_device)
		s->to_stack = s->to_device;
	s->host_device = flow->host_device;
	return true;
}

/* Whether a datagram, which is neither an original one nor a reply, is the first that a pod sends
 * to the backend's own address since its last one to the Service. Replies to both look alike, and
 * are taken for replies to the last datagram: the kernel may have given the port of a closed socket
 * to the next one (tc_recheck). Only on the pod's own device, which the reply entry holds (see
 * leaves_elsewhere()): others could forge it, and it is no translated datagram of the flow. Not
 * with SNAT, where such a datagram would need another entry than the flow's. */
static __always_inline bool begins_direct(const struct flow *flow, u32 flags,
					  const struct translation *s)
{
	return flow->direction == DIRECTION_REPLY && flow->client.protocol == IPPROTO_UDP &&
	       !has_snat(flow) && s->pod_device && flow->out.ifindex == s->pod_device &&
	       !(flow->fins & FIN_DIRECT) && !(flags & JUST_WRITTEN);
}

/* Whether packets of this flow that come in by this device leave it other than by the stack. */
static __always_inline bool is_redirected_from(const struct flow *flow, u32 ifindex)
{
	return flow->host_device ? flow->host_device != ifindex : flow->path != PATH_STACK;
}

enum ingress_result {
	INGRESS_UNCHANGED = 0, /* no flow of ours, or a packet that passes as it is */
	INGRESS_OVER = 1,      /* the flow has to be rechecked or begun again: s->restart */
	INGRESS_UNJUDGED = 2,  /* tc_judge has to see it first */
	INGRESS_BRIDGED = 3,   /* it will bypass the stack, so the bridge's program handles it: a
				  packet that is redirected at a port would bypass the rules of the
				  bridge, which does not learn its sender's MAC address then */
	INGRESS_TRANSLATED = 4,
};

/* Translates a packet at ingress, into `s`. `flags`: its TCP flags, with JUST_WRITTEN, JUDGED or
 * FROM_ICMP_ERROR. Decides which side has sent it and whether the flow begins again, then
 * translates the packet and updates the state. */
static __always_inline enum ingress_result translate_in(struct tuple *t, const struct packet *p,
							u32 flags, struct translation *s)
{
	struct flow *flow = flow_between(t);
	u64 now = now_ns();
	bool reply, idle;

	if (!flow)
		return INGRESS_UNCHANGED;
	reply = !is_original(t, flow);
	idle = expired(flow, now);
	if (reply && !is_reply(t, flow)) {
		if (idle || !begins_direct(flow, flags, s))
			return INGRESS_UNCHANGED;
		s->restart = RESTART_CHECK;
		return INGRESS_OVER;
	}
	if (idle && !(flags & JUST_WRITTEN)) {
		if (!(flags & FROM_ICMP_ERROR)) {
			s->restart = RESTART_CHECK;
			return INGRESS_OVER;
		}
		if (is_over(flow, now))
			return INGRESS_UNCHANGED;
	}
	/* The entry may still be expired here, if another one of the flow is not: for an ICMP
	 * error, or a packet whose flow tc_recheck has found to be live. */
	s->to_stack = *t;
	if (!reply) {
		s->restart = check_restart(flow, flags, now);
		if (s->restart)
			return INGRESS_OVER;
	}
	s->masqueraded = has_snat(flow) && !(reply && idle);
	if (s->port_of && is_redirected_from(flow, s->port_of))
		return INGRESS_BRIDGED;
	if (!reply)
		translate_original(flow, s);
	else if (!translate_reply(t, flow, s))
		return INGRESS_UNCHANGED;
	s->path = flow->path;
	s->flow = flow;
	s->now = now;
	s->reply = reply;
	return update_flow(flow, p, flags, reply, now, s->arrival) ? INGRESS_TRANSLATED
								   : INGRESS_UNJUDGED;
}

/* Whether a packet came in by another device than earlier ones. That may be gone by now: a pod's,
 * or a port of a bridge that needs no program any more. */
static __always_inline bool is_elsewhere(u32 arrival, u32 earlier)
{
	struct device *before = device_at(earlier);

	return before &&
	       routing_ifindex(device_at(arrival), arrival) != routing_ifindex(before, earlier);
}

/* Whether a packet to the backend that leaves the stack came in where the client's packets may.
 * Others may forge its address. */
static __always_inline bool is_from_client(const struct flow *reply_entry, u32 arrival)
{
	struct device *in = device_at(arrival);
	struct flow *original;

	/* Sent by this node, or (most packets) by the device that leaves_elsewhere() compares. */
	if (!arrival || routing_ifindex(in, arrival) == reply_entry->out.ifindex)
		return true;
	original = entry_at(reply_entry, DIRECTION_ORIGINAL);
	if (!original)
		return true;
	if (!original->arrival) /* the client is this node */
		return false;
	return !is_elsewhere(arrival, original->arrival) ||
	       (is_exchangeable(in) && is_exchangeable(device_at(original->arrival)));
}

/* Whether this SYN begins a connection that is not part of the flow: the client connects to the
 * backend directly, from a port that it used through a Service before. A SYN to the Service goes to
 * the connection's backend (check_restart()), and the client's own entry remembers its number. The
 * SYN may be forged: only the backend's answer ends the flow (answers_direct()). */
static __always_inline bool is_direct_connection(const struct flow *flow, const struct packet *p,
						 u32 flags)
{
	struct flow *original;

	if (flow->client.protocol != IPPROTO_TCP || (flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	original = entry_at(flow, DIRECTION_ORIGINAL);
	return !original || (is_ending(original) && original->syn != p->tcp.next);
}

/* Whether a reply is leaving by another device than the client's packets came in by. The reply
 * entry of a flow in the stack holds that device, and the next hop of its replies once tc_reroute
 * has looked it up. */
static __always_inline bool leaves_elsewhere(const struct flow *reply_entry, u32 ifindex)
{
	return reply_entry->out.ifindex && reply_entry->out.ifindex != ifindex;
}

/* Whether a packet to the backend has the port of the node from which this flow's packets leave. */
static __always_inline bool has_port_of_node(const struct tuple *t, const struct flow *flow)
{
	if (!has_snat(flow))
		return flow->host_device;
	return same_address(&t->from.address, &flow->snat) && t->from.port == flow->snat_port;
}

enum egress_result {
	EGRESS_UNKNOWN = 0,    /* no flow of ours */
	EGRESS_UNCHANGED = 1,  /* of a flow of ours, but already correct */
	EGRESS_HOST_FLOW = 2,  /* sent by this node, and it has a flow */
	EGRESS_UNJUDGED = 3,   /* tc_judge has to see it first */
	EGRESS_DENIED = 4,     /* others use a port of the node that this flow has */
	EGRESS_REPLY = 5,      /* gets the frontend's address */
	EGRESS_MASQUERADE = 6, /* gets the node's address */
	EGRESS_REROUTE = 7,    /* EGRESS_REPLY, but it may have to leave by another device */
};

static __always_inline bool is_rewrite(enum egress_result result)
{
	return result >= EGRESS_REPLY;
}

/* Translates a packet at egress of this device, into `new`. `arrival`: the device that it arrived
 * on. */
static __always_inline enum egress_result translate_out(struct tuple *t, const struct packet *p,
							u32 flags, u32 bytes, u32 ifindex,
							u32 arrival, struct tuple *new,
							bool *masqueraded)
{
	struct flow *flow = flow_between(t);
	u64 now = now_ns();
	bool reply;

	*new = *t;
	if (!flow)
		return EGRESS_UNKNOWN;
	reply = is_reply(t, flow) && same_address(&t->to.address, &flow->client.address);
	if (!reply && !is_translated_original(t, flow))
		return flow->host_device && is_original(t, flow) ? EGRESS_HOST_FLOW
								 : EGRESS_UNKNOWN;
	if (is_over(flow, now) || (flow->fins & FIN_DIRECT)) /* begins_direct() */
		return EGRESS_UNKNOWN;
	/* A CNI masquerades pods, and may keep a port that one has chosen: conntrack does not know
	 * our flows. The backend's answer would go to the client or the node's socket that has it.
	 */
	if (!reply && !is_from_client(flow, arrival))
		return has_port_of_node(t, flow) ? EGRESS_DENIED : EGRESS_UNKNOWN;
	if (!reply && is_direct_connection(flow, p, flags)) {
		flow->syn = p->tcp.next;
		return EGRESS_UNKNOWN;
	}
	if (reply) {
		*masqueraded = has_snat(flow);
		if (!update_flow(flow, p, flags, true, now, arrival))
			return EGRESS_UNJUDGED;
		if (bytes && !has_snat(flow) &&
		    flow->path == PATH_STACK) /* not counted at ingress */
			account_bytes(flow, bytes, flags, true);
		new->from = flow->frontend;
		new->to.port = flow->client.port;
		return leaves_elsewhere(flow, ifindex) ? EGRESS_REROUTE : EGRESS_REPLY;
	}
	if (!same_address(&t->from.address, &flow->client.address))
		return EGRESS_UNCHANGED; /* redirected: it has the node's address */
	update_leaving(flow, flags, now);
	if (!has_snat(flow))
		return EGRESS_UNCHANGED;
	*masqueraded = true;
	new->from.address = flow->snat;
	new->from.port = flow->snat_port;
	return EGRESS_MASQUERADE;
}
