/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The state of known flows: what an ordinary packet updates, when a client's packet begins the flow
 * again, and how other programs return to tc_ingress, tc_egress and tc_host. judge.h decides about
 * packets that are not ordinary.
 */
#pragma once

#include "types.h"
#include "maps.h"
#include "lib/packet.h"
#include "tc/account_flows.h"
#include "tc/entries.h"
#include "tc/flow.h"
#include "tc/scratch.h"
#include "tc/tails.h"

#define JUST_WRITTEN 0x200 /* not a TCP flag: the flow was just written, rechecked or judged */

static __always_inline bool backend_exists(u32 id)
{
	return find_backend(&id) != NULL;
}

enum restart {
	RESTART_NO = 0,
	RESTART_CHECK = 1, /* tc_recheck decides */
	RESTART_YES = 2,
};

/* Whether a packet of a known flow has to choose a backend again: a SYN after both sides have
 * closed (tc_recheck), or UDP whose backend is gone. Any other SYN may be a retransmission (the
 * reply was lost) or forged. It goes to the backend of the connection, if there is one, and the
 * backend decides. A SYN of which the backend knows nothing, because it still has an older
 * connection from this port, begins with another port. A UDP flow is rechecked after a pause of a
 * second without a reply, and when its client has sent to the backend's own address meanwhile. */
static __always_inline enum restart check_restart(const struct flow *flow, u32 flags, u64 now)
{
	if (flags & (JUST_WRITTEN | FROM_ICMP_ERROR))
		return RESTART_NO;
	if (flow->client.protocol == IPPROTO_UDP) {
		if (!backend_exists(flow->backend_id))
			return RESTART_YES;
		/* true is RESTART_CHECK */
		return (flow->fins & FIN_DIRECT) ||
		       (flow->state == STATE_NEW && elapsed(flow->last_used, now) > SECOND);
	}
	if (!is_syn(flags))
		return RESTART_NO;
	/* If the backend has answered, the mark may be forged, but the client's ACK comes soon. */
	if ((flow->fins & FIN_RESERVED) &&
	    (flow->state == STATE_NEW ||
	     (flow->state == STATE_ANSWERED && elapsed(flow->last_used, now) > SECOND)))
		return RESTART_YES;
	return RESTART_CHECK;
}

/* The twin entry, which matches the other side's packets: for a packet of the backend the client's
 * own entry, for a packet of the client the one that matches replies. If the packets of a
 * masqueraded flow leave without SNAT, because another program lets them out, the backend replies
 * to client', and that entry is the twin. */
static __always_inline struct flow *twin_of(const struct flow *flow, bool reply)
{
	u32 direction = reply            ? DIRECTION_ORIGINAL
			: has_snat(flow) ? DIRECTION_SNAT_REPLY
					 : DIRECTION_REPLY;
	struct flow_key key = entry_key(flow, direction);
	struct flow *other = entry_of(flow, &key);

	/* seen.started are the same bytes as seen.tcp: 0 if this entry has matched no segment. */
	if (direction != DIRECTION_SNAT_REPLY || flow->state == STATE_NEW || !other ||
	    other->seen.started)
		return other;
	return entry_at(flow, DIRECTION_REPLY);
}

/* Updates the entry that matched a packet of a known flow, if it is an ordinary one. False:
 * tc_judge has to see the packet first. Each entry matches packets of one side only. The exception
 * is that of client' and backend: it also matches the client's packets when they leave the stack
 * (update_leaving()). `arrival`: see struct flow. */
static __always_inline bool update_flow(struct flow *flow, const struct packet *p, u32 flags,
					bool reply, u64 now, u32 arrival)
{
	if (flags & (FROM_ICMP_ERROR | JUDGED))
		return true;
	if (p->fragment == LATER) /* it has no numbers, and changes nothing */
		return arrival == flow->arrival && flow->state != STATE_NEW;
	if (!is_ordinary(flow, p, flags, reply, now, arrival))
		return false;
	flow->last_used = now;
	if (flow->client.protocol == IPPROTO_TCP)
		note_segment(&flow->seen.tcp, &p->tcp, flow->seen.tcp.scale);
	return true;
}

/* The client's side of a connection after its SYN, which has this window_scale(). */
static __always_inline void open_side(struct tcp_side *client, const struct packet *p, u8 scale)
{
	client->next = p->tcp.next;
	client->edge = p->tcp.sequence + 1;
	client->window = p->tcp.window | 1; /* 0 would mean that it has sent nothing */
	client->scale = client->syn_scale = scale;
	client->fin = 0;
}

/* Hands a packet of a known flow to tc_judge, which returns to `tail`. */
static __always_inline int ask_judge(struct __sk_buff *skb, struct scratch *s, u32 tail)
{
	s->resume_tail = tail;
	return go(skb, TAIL_JUDGE);
}

/* Updates the entry of client' and backend for a packet of the client that leaves the stack. The
 * state was updated when the packet arrived, but with SNAT this copy was not. Packets of TCP and
 * SCTP do not count here, since it is not known whether their numbers were right. */
static __always_inline void update_leaving(struct flow *flow, u32 flags, u64 now)
{
	bool tcp = flow->client.protocol == IPPROTO_TCP;
	struct flow *original;

	if (flags & FROM_ICMP_ERROR)
		return;
	if (flow->client.protocol == IPPROTO_UDP)
		flow->last_used = now;
	if (!has_snat(flow) ||
	    !(tcp ? may_change_tcp(flow, flags, false) : may_change_other(flow, flags, false, now)))
		return;
	original = entry_at(flow, DIRECTION_ORIGINAL);
	if (!original)
		return;
	flow->state = original->state;
	flow->fins = original->fins;
}

/* Returns to the program for known flows. `flags`: JUDGED if the packet has updated its flow
 * already. */
static __always_inline int resume(struct __sk_buff *skb, struct scratch *s, u32 tail, u32 flags)
{
	s->resumed = JUST_WRITTEN | flags;
	tails.call(skb, tail);
	s->resumed = 0;
	return finish(TC_ACT_SHOT, NOT_REWRITTEN);
}

/* The flags that resume() has set; 0 if the packet comes from a device. */
static __always_inline u32 take_resumed(struct scratch *s)
{
	u32 flags = s->resumed;

	s->resumed = 0;
	return flags;
}

/* The flow exists now: counts it, and returns to the program for known flows. */
static __always_inline int resume_new(struct __sk_buff *skb, struct scratch *s)
{
	count(NEW_FLOW);
	account_flow(&s->flow);
	return resume(skb, s, s->flow.host_device ? TAIL_HOST : TAIL_INGRESS, JUDGED);
}
