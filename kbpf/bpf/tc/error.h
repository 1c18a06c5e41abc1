/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* ICMP errors about translated packets: see lib/icmp.h. */
#pragma once

#include "lib/icmp.h"
#include "lib/rewrite.h"
#include "tc/devices.h"
#include "tc/known.h"
#include "tc/scratch.h"
#include "tc/tails.h"

/* Translates an ICMP error and the packet that it quotes. Outer addresses that are an end of the
 * flow are translated too; a router's own address stays. */
static __always_inline int translate_error(struct __sk_buff *skb, bool in)
{
	struct tuple tuple, translated, outer;
	struct translation result = {};
	struct scratch *s = get_scratch();
	struct packet *p, *inner;
	bool stored;

	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	inner = &s->inner;
	if (!parse_inner(skb, p, inner) || !inner->tuple.to.protocol)
		return TC_ACT_UNSPEC;
	tuple = reversed(&inner->tuple);
	stored = in ? translate_in(&tuple, inner, FROM_ICMP_ERROR, &result)
		    : translate_out(&tuple, inner, FROM_ICMP_ERROR, 0, &translated,
				    &result.masqueraded) == EGRESS_REWRITE;
	if (result.masqueraded)
		mark_masqueraded(skb, in);
	if (!stored)
		return TC_ACT_UNSPEC;
	if (in && result.path == PATH_DIRECT_SNAT)
		return claim_late(skb, s, result.flow, TAIL_ICMP_IN);
	if (in)
		translated = result.to_stack;
	outer = p->tuple;
	if (same_address(&outer.from.address, &tuple.from.address))
		outer.from.address = translated.from.address;
	if (same_address(&outer.to.address, &tuple.to.address))
		outer.to.address = translated.to.address;
	translated = reversed(&translated);
	if (rewrite_inner(skb, p, inner, &translated) || rewrite(skb, p, &outer, p->ttl))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	return TC_ACT_UNSPEC;
}

int tc_icmp_in(struct __sk_buff *skb)
{
	return translate_error(skb, true);
}

int tc_icmp_out(struct __sk_buff *skb)
{
	return translate_error(skb, false);
}
