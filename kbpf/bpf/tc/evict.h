/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The queue of flows: gives each new flow a place, and evicts the oldest ones for it. */
#pragma once

#include "types.h"
#include "tc/entries.h"
#include "tc/flow.h"
#include "tc/scratch.h"
#include "tc/tails.h"

#define EVICT_CANDIDATES 16 /* oldest flows that one run of tc_evict checks */
#define EVICTION_TRIES 8    /* flows that are checked when the queue is full */

/* Whether this flow may still be in use, although it is among the oldest: it is established, or was
 * closing or unproven a few seconds ago. */
static __always_inline bool is_needed(const struct flow *flow, u64 now)
{
	return !is_half_open(flow) && flow->state != STATE_CLOSED && !is_disposable(flow, now) &&
	       !is_over(flow, now);
}

/* Counts and reports the eviction of a flow in use. */
static __always_inline void count_eviction(const struct flow *flow)
{
	count(EVICTED);
	if (flow)
		report_flow(flow, EVICTED);
}

/* Checks the oldest flows until one is not needed, evicts that one, and puts the others at the end
 * of the queue. A reused entry keeps its old place in the queue, so a handshake (`young`) may be
 * among the oldest: evict it only if nothing else can go. Its key is at the end of the queue by
 * then, and so stays counted until it is popped again, without a flow. */
static __always_inline void evict_over_limit(u64 *total, u64 now)
{
	struct flow *flow = NULL, *young = NULL;
	bool in_use = false;

	for (int i = 0; i < EVICT_CANDIDATES; i++) {
		struct flow_key oldest;

		if (flow_queue.pop(&oldest)) /* the queue is empty */
			return;
		flow = flows.lookup(&oldest);
		if (!flow || flow->direction != DIRECTION_ORIGINAL) {
			__sync_fetch_and_add(total, -1);
			return; /* it is gone already */
		}
		if (is_half_open(flow) && elapsed(flow->last_used, now) < SECOND)
			young = flow;
		else if (!is_needed(flow, now))
			break;
		if (flow_queue.push(&oldest, 0)) { /* another CPU has filled the queue */
			in_use = true;
			break;
		}
		flow = NULL;
	}
	if (flow)
		__sync_fetch_and_add(total, -1);
	else
		flow = young;
	if (in_use)
		count_eviction(flow);
	if (flow)
		delete_flow(flow, now);
}

/* Evicts one of the oldest flows. Flows that are needed move to the end of the queue, except UDP
 * streams, which are evicted for other protocols. False: none of those checked can go. */
static __always_inline bool evict_one(bool for_udp, u64 now)
{
	for (int i = 0; i < EVICTION_TRIES; i++) {
		struct flow_key oldest;
		struct flow *flow;

		if (flow_queue.pop(&oldest))
			return false;
		flow = flows.lookup(&oldest);
		if (!flow || flow->direction != DIRECTION_ORIGINAL)
			return true;
		if (!is_needed(flow, now)) {
			delete_flow(flow, now);
			return true;
		}
		/* push() fails if another CPU has filled the queue. Without its key this flow
		 * would stay in the map for ever. */
		if ((!for_udp && flow->client.protocol == IPPROTO_UDP) ||
		    flow_queue.push(&oldest, 0)) {
			count_eviction(flow);
			delete_flow(flow, now);
			return true;
		}
	}
	return false;
}

/* Adds a new flow to the queue. The queue has an eighth more room than the operator's limit, so
 * that tc_evict passes a long run of needed flows before new flows fail. */
static __always_inline bool enqueue(struct flow_key *key, const struct node *n, u64 now)
{
	u32 zero = 0;
	u64 *total = flow_count.lookup(&zero);

	if (!total)
		return false;
	if (!flow_queue.push(key, 0)) {
		__sync_fetch_and_add(total, 1);
		return true;
	}
	*total = n->connections + n->connections / 8; /* corrects the count */
	return evict_one(key->first.protocol == IPPROTO_UDP, now) && !flow_queue.push(key, 0);
}

/* Makes room for the original entry at `key`: takes the place in the queue of an older flow of the
 * same client and frontend, whose reply entries it releases, or finds a new place. Any result other
 * than NEW_FLOW: the new flow cannot begin. NOT_TRACKED: a live flow has this key for its
 * replies. */
static __always_inline enum reason claim_original(struct flow_key *key, const struct flow *old,
						  const struct flow *flow, const struct node *n)
{
	if (old && old->direction == DIRECTION_ORIGINAL) {
		leave_in_doubt(old, flow->last_used);
		release_replies(old);
		return NEW_FLOW;
	}
	if (old) {
		if (!is_over(old, flow->last_used) && !both_closed(old))
			return NOT_TRACKED;
		flows.delete(key);
	}
	return enqueue(key, n, flow->last_used) ? NEW_FLOW : TABLE_FULL;
}

/* Whether more flows are queued than the operator's limit. Programs of an earlier agent may pop
 * keys from another queue after the agent has counted this one, so the count may be negative. */
static __always_inline bool is_over_limit(const u64 *total, const struct node *n)
{
	return (s64)*total > (s64)n->connections;
}

/* Adds a new flow to the queue. */
int tc_enqueue(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct scratch *s = get_scratch();
	struct node *n = node.lookup(&zero);
	u64 *total = flow_count.lookup(&zero);
	enum reason reason;
	struct flow_key key;
	struct flow *old;

	if (!s || !n || !total)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	key = original_key(&s->flow);
	old = flows.lookup(&key);
	if (old && (old->fins & FIN_RESERVED))
		s->begin |= BEGIN_OTHER_PORT;
	reason = claim_original(&key, old, &s->flow, n);
	if (reason != NEW_FLOW)
		return drop_flow(&s->flow, reason);
	s->search = SEARCH_NONE;
	s->runs = 2; /* tc_evict may run this many times */
	return is_over_limit(total, n) ? go(skb, TAIL_EVICT) : go(skb, TAIL_CLAIM);
}

/* Makes room: evicts up to two flows for each new one above the operator's limit. */
int tc_evict(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct scratch *s = get_scratch();
	struct node *n = node.lookup(&zero);
	u64 *total = flow_count.lookup(&zero);

	if (!s || !n || !total)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	evict_over_limit(total, s->flow.last_used);
	return --s->runs && is_over_limit(total, n) ? go(skb, TAIL_EVICT) : go(skb, TAIL_CLAIM);
}
