/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The same for tracked flows. Each of their entries adds up the bytes of one way, which its packets
 * are at anyway, and says them to `counts` when they are many and when that side is done: FIN, RST.
 * Bytes are those of packets from the IP header on.
 */
#pragma once

#define FLUSH_BYTES (256 << 10) /* so many are said at once */
#define FLUSH_DATAGRAM_BYTES                                                                       \
	(4 << 10) /* the same for flows whose end nobody tells: the rest is lost */

static __always_inline void account_flow(const struct flow *flow)
{
	struct choice c = {.service = flow->service, .backend_id = flow->backend_id};

	account_begin(&c, TRANSLATE);
}

/* Adds what an entry has not said yet; `part` tells by which side's packets it is found. */
static __always_inline void flush_bytes(struct flow *entry, u32 bytes, bool reply)
{
	struct counts *totals = counts_of(entry->service, entry->backend_id);

	entry->out.uncounted = 0;
	if (totals)
		add(reply ? &totals->bytes_out : &totals->bytes_in, bytes);
}

/* A packet went its way. Two CPUs that have packets of one flow at the same time may lose some. */
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

/* The connection is over. */
static __always_inline void flush_rest(struct flow *entry)
{
	u32 rest = entry->out.uncounted;

	if (rest && is_accounting(CONFIG_COUNT_CONNECTION_ENDS))
		flush_bytes(entry, rest, entry->direction != DIRECTION_ORIGINAL);
}

/* The state of a TCP connection was `before`. */
static __always_inline void account_state(struct flow *flow, u8 before, bool in_order)
{
	struct counts *totals;

	if (flow->state != STATE_CLOSED || (flow->fins & FIN_COUNTED) ||
	    !is_accounting(CONFIG_COUNT_CONNECTION_ENDS))
		return;
	flow->fins |= FIN_COUNTED;
	totals = counts_of(flow->service, flow->backend_id);
	if (!totals)
		return;
	add(&totals->ended, 1);
	if (before == STATE_NEW)
		add(&totals->unanswered, 1);
	else if (!in_order)
		add(&totals->broken, 1);
}
