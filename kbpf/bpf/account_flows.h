/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The same for tracked flows. Each of their entries adds up the bytes of one way, which its packets
 * are at anyway, and says them to `counts` when they are many and when that side is done: FIN, RST.
 * Bytes are those of packets from the IP header on.
 */
#pragma once

#define SAY_BYTES (256 << 10)   /* so many are said at once */
#define SAY_DATAGRAMS (4 << 10) /* the same for flows whose end nobody tells: the rest is lost */

static __always_inline void account_flow(const struct nat *nat)
{
	struct choice c = {.service = nat->service, .backend_id = nat->backend_id};

	account_begin(&c, TRANSLATE);
}

/* Adds what an entry has not said yet; `part` tells by which side's packets it is found. */
static __always_inline void say(struct nat *entry, u32 bytes, bool back)
{
	struct counts *to = counts_of(entry->service, entry->backend_id);

	entry->out.unsaid = 0;
	if (to)
		add(back ? &to->bytes_out : &to->bytes_in, bytes);
}

/* A packet went its way. Two CPUs that have packets of one flow at the same time may lose some. */
static __always_inline void account_bytes(struct nat *entry, u32 bytes, u32 flags, bool back)
{
	bool tcp = entry->client.protocol == PROTO_TCP;
	u32 sum;

	if (!is_accounting(CONFIG_ENDS))
		return;
	sum = entry->out.unsaid + bytes;
	if (sum < (tcp ? SAY_BYTES : SAY_DATAGRAMS) && !(flags & (TCP_FIN | TCP_RST)))
		entry->out.unsaid = sum;
	else
		say(entry, sum, back);
}

/* The connection is over. */
static __always_inline void say_rest(struct nat *entry)
{
	u32 rest = entry->out.unsaid;

	if (rest && is_accounting(CONFIG_ENDS))
		say(entry, rest, entry->part != PART_QUESTION);
}

/* The state of a TCP connection was `before`. */
static __always_inline void account_state(struct nat *nat, u8 before, bool in_order)
{
	struct counts *to;

	if (nat->state != STATE_CLOSED || (nat->fins & FIN_COUNTED) || !is_accounting(CONFIG_ENDS))
		return;
	nat->fins |= FIN_COUNTED;
	to = counts_of(nat->service, nat->backend_id);
	if (!to)
		return;
	add(&to->ended, 1);
	if (before == STATE_NEW)
		add(&to->unanswered, 1);
	else if (!in_order)
		add(&to->broken, 1);
}
