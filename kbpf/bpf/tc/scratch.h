/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* What the programs of the packet path hand to each other by tail calls, and what does not fit on
 * their stack.
 *
 * There is one packet at a time on each CPU: TC runs with bottom halves disabled, so no other
 * packet is handled there until this one's last program has returned; bpf_redirect*() takes effect
 * after that. PREEMPT_RT has a lock for that; since 6.18 only with CONFIG_PREEMPT_RT_NEEDS_BH_LOCK,
 * which `kbpf check` and the agent look for.
 *
 * The content is that of this CPU's last packet. tc_ingress and tc_egress parse into `packet`
 * before they call any other program, and each other field is written by a program of the same
 * packet before another reads it. `end` is 0 before a packet is translated. `resumed` is the
 * exception: tc_ingress reads it first, to know whether it was tail-called. It is set only together
 * with that tail call, and is 0 at all other times.
 *
 * The verifier knows nothing about values that are read from a map. So the paths through parse(),
 * which versions, protocols, fragments and extension headers multiply, become one state.
 */
#pragma once

#include "types.h"
#include "lib/packet.h"

enum begin_flags {
	BEGIN_RESTART = 1 << 0,     /* it replaces a flow of ours that has ended */
	BEGIN_NOT_FOREIGN = 1 << 1, /* another data plane did not see it first */
	BEGIN_UNTRACKED = 1 << 2,   /* conntrack will translate it, and has no entry yet */
	BEGIN_STALE = 1 << 3,       /* or has one that has to go (tc/conntrack.h) */
	BEGIN_OTHER_PORT = 1 << 4,  /* the backend has another connection with the last port */
	BEGIN_ANSWER = 1 << 5,      /* it begins nothing: answers_refused() */
	BEGIN_LEAVING = 1 << 7, /* nor does it: it may be the first packet of a flow that leaves */
	BEGIN_CLAIMED = 1 << 6, /* it has a port of the node that conntrack has to confirm */
	BEGIN_UNSEEN = 1 << 8,  /* no program sees its packets leave: tc_route() */
};

/* The runs of the search for a port of the node (tc_claim), and which ports each may take. Between
 * these two, ports in sequence: also those of handshakes idle for a second. They are about as many
 * as nf_nat tries (128). */
enum search {
	SEARCH_NONE = 0,   /* it has not begun */
	SEARCH_RANDOM = 1, /* random ports that are free, or whose flow has ended; after FRESH_TRIES
			      also those in TIME_WAIT at the backend */
	SEARCH_LAST = 10,  /* also those of any handshake: during a flood it is most likely forged,
			      and without its port the new connection would certainly fail */
};

/* struct nf_conntrack_tuple. IPv4 is in the first word of an address. */
struct ct_ends {
	struct address from;
	__be16 from_port;
	u16 family;
	struct address to;
	__be16 to_port;
	u8 protocol;
	u8 direction;
};

/* Of struct nf_conn: the ends of the client's packets, as they arrive, and of their answers. */
struct ct_entry {
	struct ct_ends original;
	u64 list_node[2];
	struct ct_ends reply;
};

#define ENDED 0xff /* in order, or by the client */

struct scratch {
	struct packet packet; /* as it arrived; tc_sctp needs the offsets as it leaves */
	struct packet inner;  /* the packet that an ICMP error quotes */
	struct flow flow;     /* the flow that is being created; `seen` is the backend's side */
	union side opening;   /* the client's side of it */
	struct next_hop hop;  /* of this packet */
	u32 resumed;          /* JUST_WRITTEN, JUDGED: a program has sent the packet back */
	u32 begin;            /* enum begin_flags, of a packet that begins a flow */
	u32 resume_tail;      /* tc_recheck and tc_judge: the program to continue with */
	u32 runs;             /* tc_evict: how many are left */
	u32 search;           /* tc_claim: enum search */
	u32 reason;           /* tc_refuse: why */
	u32 mtu;           /* tc_refuse: the path MTU that the packet exceeds; 0: it is refused */
	u32 change;        /* tc_sctp: XOR of old and new ports */
	u32 action;        /* tc_sctp, tc_end: to be returned */
	u32 end;           /* tc_end: ENDED, or enum reason; 0: nothing ends */
	u32 service;       /* tc_refuse: of the refused packet, or 0 */
	u32 owner;         /* of a packet that begins a flow: owner_of_packet() */
	u32 client_device; /* to which the route to its sender leads */
	struct unconfirmed_key queued; /* tc_conntrack: of any flow */
	struct ct_entry entry;         /* as long as a program uses it */
	struct event event;            /* of a flow that is remembered or confirmed */
};

/* 0 -> see above. */
BPF_TABLE("percpu_array", u32, struct scratch, flow_scratch, 1);

static __always_inline struct scratch *get_scratch(void)
{
	u32 zero = 0;

	return flow_scratch.lookup(&zero);
}
