/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* How the handling of a rewritten packet ends: for SCTP, tc_sctp updates the checksum; if a
 * connection ends with it, tc_end counts that. */
#pragma once

#include "lib/sctp.h"
#include "tc/scratch.h"
#include "tc/tails.h"

/* Ends the handling of a rewritten packet with this action. If SCTP ports have changed, tc_sctp
 * updates the checksum first, in a separate program, since that takes thousands of instructions.
 * A bpf_redirect*() before the tail call still takes effect. */
static __always_inline int finish_rewrite(struct __sk_buff *skb, struct scratch *s,
					  const struct tuple *new, int action, u32 l3)
{
	if (s->end) { /* of TCP */
		s->action = action;
		return go(skb, TAIL_END);
	}
	s->change = sctp_change(&s->packet, new);
	if (!s->change)
		return action;
	s->action = action;
	s->packet.l4 += l3 - s->packet.l3;
	s->packet.l3 = l3;
	return go(skb, TAIL_SCTP);
}

/* Updates the SCTP checksum, after a change of ports. */
int tc_sctp(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();

	if (!s || change_sctp_check(skb, &s->packet, s->change))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	return s->action;
}
