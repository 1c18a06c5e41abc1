/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Accounting of the flows that the packet path tracks. Each entry of a flow sums up the bytes of
 * the packets that it matches, and adds the sum to `counts` when it is large enough, and when that
 * side sends FIN or RST. Bytes are counted from the IP header on.
 */
#pragma once

#include "account.h"
#include "failures.h"
#include "lib/packet.h"
#include "tc/devices.h"
#include "tc/flow.h"
#include "tc/scratch.h"
#include "tc/tails.h"

#define FLUSH_BYTES (256 << 10) /* a sum of this size is added to `counts` */
#define FLUSH_DATAGRAM_BYTES                                                                       \
	(4 << 10) /* the same for UDP and SCTP: nothing signals their end, so the rest is lost */

static __always_inline void account_flow(const struct flow *flow)
{
	struct choice c = {.service = flow->service, .backend_id = flow->backend_id};

	account_begin(&c, TRANSLATE);
}

/* Adds the bytes that this entry has not reported yet to `counts`. `reply`: the bytes are the
 * backend's. */
static __always_inline void flush_bytes(struct flow *entry, u32 bytes, bool reply)
{
	struct counts *totals = counts_of(entry->service, entry->backend_id);

	entry->out.uncounted = 0;
	if (totals)
		add(reply ? &totals->bytes_out : &totals->bytes_in, bytes);
}

/* Counts a forwarded packet. Two CPUs that handle packets of one flow at the same time may lose
 * some bytes. */
static __always_inline void account_bytes(struct flow *entry, u32 bytes, u32 flags, bool reply)
{
	bool tcp = entry->client.protocol == IPPROTO_TCP;
	u32 sum;

	if (!is_accounting(CONFIG_COUNT_CONNECTION_ENDS))
		return;
	sum = entry->out.uncounted + bytes;
	if (sum < (tcp ? FLUSH_BYTES : FLUSH_DATAGRAM_BYTES) && !(flags & (TCP_FIN | TCP_RST)))
		entry->out.uncounted = sum;
	else
		flush_bytes(entry, sum, reply);
}

/* Called when the connection has ended: no later packet may come to report these bytes. */
static __always_inline void flush_rest(struct flow *entry)
{
	u32 rest = entry->out.uncounted;

	if (rest && is_accounting(CONFIG_COUNT_CONNECTION_ENDS))
		flush_bytes(entry, rest, entry->direction != DIRECTION_ORIGINAL);
}

/* Records that a packet got no backend. If it is dropped, that is reported here; tc_refuse reports
 * what becomes of one that is refused. */
static __always_inline void fail_packet(const struct tuple *t, const struct choice *c,
					enum verdict v, u32 owner)
{
	bool monitored = v == DROP && is_monitored();
	struct failure failure = {};

	failure.last.client = t->from;
	failure.last.frontend = t->to;
	failure.last.service = c->service;
	failure.last.reason = c->reason;
	if (is_accounting(CONFIG_ACCOUNTING))
		record_failure(&failure, owner);
	if (monitored)
		report(&failure.last);
}

static __always_inline void describe_event(struct event *event, const struct flow *flow,
					   enum reason reason)
{
	event->client = flow->client;
	event->frontend = flow->frontend;
	event->backend = flow->backend;
	event->service = flow->service;
	event->backend_id = flow->backend_id;
	event->reason = reason;
}

/* The owner of a flow. Its reply entry may name the client's device. */
static __always_inline u32 owner_of_flow(const struct flow *reply_entry)
{
	u32 ifindex = reply_entry->out.ifindex;

	if (reply_entry->host_device)
		return owner_of_packet(NULL, 0);
	return ifindex ? owner_of_packet(device_at(ifindex), ifindex) : OWNER_NETWORK;
}

/* Counts, records and reports that the backend of a flow has failed. */
static __always_inline void fail_flow(const struct flow *flow, struct counts *totals,
				      enum reason reason, u32 owner)
{
	struct failure failure = {};

	describe_event(&failure.last, flow, reason);
	count(reason);
	account_failure(totals, reason);
	record_failure(&failure, owner);
	if (is_monitored())
		report(&failure.last);
}

/* Reports what becomes of a flow: that it is new, evicted, or dropped. */
static __always_inline void report_flow(const struct flow *flow, enum reason reason)
{
	struct event event = {};

	if (!is_monitored())
		return;
	describe_event(&event, flow, reason);
	report(&event);
}

/* Drops a packet of a flow, or one that would begin it. */
static __always_inline int drop_flow(const struct flow *flow, enum reason reason)
{
	report_flow(flow, reason);
	return finish(TC_ACT_SHOT, reason);
}

/* A TCP connection ends with this packet: tc_end counts it, once the packet is rewritten. `before`:
 * its state before. `reply`: the packet is the backend's. */
static __always_inline void account_state(struct flow *flow, u8 before, bool reply, u32 flags)
{
	struct scratch *s = get_scratch();

	if (flow->state != STATE_CLOSED || (flow->fins & FIN_COUNTED))
		return;
	flow->fins |= FIN_COUNTED;
	if (!s || !is_accounting(CONFIG_ACCOUNTING))
		return;
	s->end = ENDED;
	if (reply && (flags & TCP_RST))
		s->end = before == STATE_NEW ? BACKEND_REFUSED : BACKEND_RESET;
}

/* Counts the end of a connection, and records it if the backend has failed. */
int tc_end(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();
	struct counts *totals;
	struct flow *flow;

	if (!s)
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	flow = flow_between(&s->packet.tuple); /* as it arrived */
	totals = flow ? counts_of(flow->service, flow->backend_id) : NULL;
	if (totals && s->end != ENDED)
		fail_flow(flow, totals, s->end, owner_of_flow(flow));
	if (totals && is_accounting(CONFIG_COUNT_CONNECTION_ENDS))
		add(&totals->ended, 1);
	return s->action;
}

/* A packet of this owner repeats what the backend has not answered. */
static __always_inline void account_repetition(struct flow *flow, u64 now, u32 owner)
{
	struct counts *totals;

	if (!is_accounting(CONFIG_ACCOUNTING) || flow->client.protocol != IPPROTO_TCP ||
	    flow->state != STATE_NEW || (flow->fins & FIN_UNANSWERED) ||
	    elapsed(flow->last_used, now) < SECOND / 2)
		return;
	flow->fins |= FIN_UNANSWERED;
	totals = counts_of(flow->service, flow->backend_id);
	if (totals)
		fail_flow(flow, totals, BACKEND_UNANSWERED, owner);
}
