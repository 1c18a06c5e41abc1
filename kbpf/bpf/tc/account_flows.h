/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Accounting of the flows that the packet path tracks. Each entry of a flow sums up the bytes of
 * the packets that it matches, and adds the sum to `counts` when it is large enough, and when that
 * side sends FIN or RST. Bytes are counted from the IP header on.
 */
#pragma once

#include "account.h"
#include "lib/packet.h"

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

/* Counts the end of a TCP connection, once. `before`: its state before this packet. */
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
