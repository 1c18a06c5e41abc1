/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The programs that are reached by tail calls, and how a program ends. */
#pragma once

#include "types.h"
#include "maps.h"

#define TC_ACT_UNSPEC (-1) /* pass, and let the next program on this device run */
#define TC_ACT_SHOT 2

/* Index in `tails`: hooks.py has the same numbers. */
enum tail {
	TAIL_CHOOSE = 0,
	TAIL_ICMP_IN = 1,
	TAIL_ICMP_OUT = 2,
	TAIL_REFUSE = 3,
	TAIL_HOST = 4,
	TAIL_HOST_CHOOSE = 5,
	TAIL_INGRESS = 6,
	TAIL_ROUTE = 7,
	TAIL_CLAIM = 8,
	TAIL_SCTP = 9,
	TAIL_ENQUEUE = 10,
	TAIL_EVICT = 11,
	TAIL_DELETE_FLOW = 12,
	TAIL_COEXIST = 13,
	TAIL_RECHECK = 14,
	TAIL_JUDGE = 15,
	TAIL_REROUTE = 16,
	TAIL_CONNTRACK = 17, /* only with --forwarding netfilter */
	TAIL_END = 18,
	TAIL_EGRESS = 19,
	TAIL_PUBLISH = 20,
	TAIL_UNCONFIRMED = 21, /* as TAIL_CONNTRACK */
	TAILS = 22,
};

BPF_TABLE("prog", u32, u32, tails, TAILS);

static __always_inline void count(u32 reason)
{
	u64 *n = reasons.lookup(&reason);

	if (n)
		(*n)++;
}

/* Counts the reason, and returns the action. */
static __always_inline int finish(int action, enum reason reason)
{
	count(reason);
	return action;
}

/* Continues in another program. Returns only if that is missing, or if the packet has made as many
 * tail calls as the kernel allows. */
static __always_inline int go(struct __sk_buff *skb, u32 tail)
{
	tails.call(skb, tail);
	return finish(TC_ACT_SHOT, NOT_TRACKED);
}
