/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Tracked flows of the packet path: which addresses the packets of a connection have at each
 * point, and when the state of a flow changes.
 *
 *   client → frontend ─[ingress]─► client' → backend ─[stack]─► client' → backend ─[egress]─►
 *   snat → backend
 *
 * Replies take the same way back. The destination changes at ingress, before the stack routes the
 * packet; the source changes at egress, after the stack and netfilter have seen it. So the stack
 * never sees a packet from outside with the node's own source address (a martian), and nftables
 * policies see client and pod. A flow that bypasses the stack (hop.h) changes both at ingress.
 *
 * client' is the client as the backend and the stack see it before SNAT: the client's address, and
 * the client's port, unless another flow of this client to the same backend already uses that port.
 *
 * A flow has two or three entries in one map, each with a whole `struct flow`:
 *
 *   original      client, frontend      original packets, as they arrive
 *   reply         client', backend      original packets as they leave, and replies
 *   SNAT reply    snat, backend         replies to the node
 *
 * The last one exists only with SNAT. The reply entry is then for packets in the stack: in a flow
 * that bypasses it (enum flow_path) only those that are too long. They update another entry as they
 * arrive, and this one as they leave.
 *
 * A key does not depend on the direction of the packet: one lookup finds its flow, or that it has
 * none. Lookups are most of what a packet costs here, because each reads two cold cache lines.
 *
 * The key of the original entry is also in a queue, which is the flow's place in the table. Flows
 * are queued in the order in which they began; a map migration queues them by their last use. Above
 * the operator's limit, each new flow checks the oldest ones (evict_over_limit() in evict.h). Those
 * that are needed move to the end of the queue. Up to two that are not are evicted: they have
 * ended, or the backend has not confirmed them (is_needed()). The queue has an eighth more room
 * than the limit. If it is full nevertheless, and none of the oldest flows can be evicted, the new
 * flow is dropped. So a flood of connections that are never completed evicts only such connections.
 *
 * An LRU map would not need the queue, but it costs more than the rest of the work for a new
 * connection, evicts the entries of a flow one by one, and evicts idle connections during a flood.
 */
#pragma once

#include "types.h"
#include "lib/addr.h"
#include "lib/packet.h"

#define SECOND 1000000000ULL
#define SNAT_TRIES 14 /* ports of the node that one run of a search tries (enum search) */
#define SHARES 4 /* a client address may use one in this many ports of the node for a backend */
#define SHARED_PORTS 1024 /* a smaller range is not divided */

#define UNPROVEN_SECONDS                                                                           \
	5 /* idle flows that the backend has not confirmed can be replaced after this time */
#define CLOSING_SECONDS 10   /* the same for flows that one side has closed */
#define DOUBT_SECONDS 120    /* how long a port of a connection that is given up is in doubt */
#define STREAM_SECONDS 2     /* UDP in use for longer than this, with replies, is a stream */
#define RESET_SECONDS 10     /* a port after its client's RST, which may be lost (nf_conntrack) */
#define MAX_ACK_WINDOW 66000 /* how far an ACK may lag behind (nf_conntrack, MAXACKWINCONST) */

/* both ends -> an entry of a flow. The programs write and delete entries. The agent deletes UDP
 * flows whose backend has stopped serving (udp.py), orphans and flows that are long over
 * (flow_gc.py) and, while another data plane replaces this one, ended flows (drain.py); and it adds
 * entries for ports that conntrack uses (snat_ports.py). There is room for three entries of each
 * key in the queue. Full nevertheless: the new flow does not begin, and its packet is dropped. */
BPF_TABLE("hash", struct flow_key, struct flow, flows, 64);

/* The keys of the original entries, the oldest first. The programs push and pop; the agent pushes
 * keys of entries that it adds or migrates. The key of a deleted flow stays until it is popped.
 * Full: enqueue() in evict.h evicts a flow, or drops the new one. */
BPF_QUEUE(flow_queue, struct flow_key, 64);

/* 0 -> number of keys in the queue. Counted by the programs, and set by the agent when it fills a
 * new map. */
BPF_TABLE("array", u32, u64, flow_count, 1);

/* A filter in front of `flows`: hash of an end -> the generation of its mark (struct
 * flow_generations). Most packets between pods are of no flow, and these array lookups, which the
 * kernel inlines, replace the hash lookup that would show it.
 *
 * Each entry has the frontend or the backend as one end of its key, and that end is marked. A
 * packet matches an entry only if it has the same two ends, so testing both of them finds the mark,
 * whatever the direction; likewise for replies to the node and for packets that ICMP errors quote.
 * The clients' ends are not marked, so no client can fill the filter.
 *
 * A mark too many costs a lookup, and a missing one breaks a flow. So the programs only set marks,
 * before they write an entry (mark_ends()), and never clear them: the evicted, replaced or deleted
 * entries of two flows cannot be counted wrong, nor can a crash in between. Marks of ends that no
 * entry has are aged by the agent (flow_entries.py). */
BPF_TABLE("array", u32, u64, flow_marks, FLOW_MARKS);
BPF_TABLE("array", u32, struct flow_generations, flow_generations, 1);

static __always_inline bool has_snat(const struct flow *flow)
{
	return (flow->snat.word[0] | flow->snat.word[1] | flow->snat.word[2] |
		flow->snat.word[3]) != 0;
}

static __always_inline struct tuple reversed(const struct tuple *t)
{
	struct tuple r = {.from = t->to, .to = t->from};

	return r;
}

/* A total order of targets: by the last word of the address (which differs in most cases), then by
 * port, then by the other words. */
static __always_inline bool precedes(const struct target *a, const struct target *b)
{
	if (a->address.word[3] != b->address.word[3])
		return a->address.word[3] < b->address.word[3];
	if (a->port != b->port)
		return a->port < b->port;
	if (a->address.word[2] != b->address.word[2])
		return a->address.word[2] < b->address.word[2];
	if (a->address.word[1] != b->address.word[1])
		return a->address.word[1] < b->address.word[1];
	return a->address.word[0] < b->address.word[0];
}

static __always_inline struct flow_key flow_key_of(const struct target *a, const struct target *b)
{
	struct flow_key e;

	if (precedes(a, b)) {
		e.first = *a;
		e.second = *b;
	} else {
		e.first = *b;
		e.second = *a;
	}
	return e;
}

static __always_inline u64 *mark_of(const struct target *end)
{
	const u32 *word = end->address.word;
	u32 sum = (word[0] ^ word[1] ^ word[2] ^ word[3] ^ end->port) * 0x9e3779b1;
	u32 index = sum >> (32 - FLOW_MARK_BITS);

	return flow_marks.lookup(&index);
}

/* Marks the ends of a flow; to be called before its first entry is written. Most flows find them
 * marked, and write nothing. A CPU that has read `current` just before it changed may replace a
 * later mark by its own. The agent allows for that: it marks all entries again after a pause. */
static __always_inline void mark_ends(const struct flow *flow)
{
	u64 *frontend = mark_of(&flow->frontend), *backend = mark_of(&flow->backend);
	u32 zero = 0;
	struct flow_generations *generations = flow_generations.lookup(&zero);

	if (!generations || !frontend || !backend)
		return;
	if (*frontend < generations->current)
		*frontend = generations->current;
	if (*backend < generations->current)
		*backend = generations->current;
}

static __always_inline bool is_marked(const struct target *end,
				      const struct flow_generations *generations)
{
	u64 *mark = mark_of(end);

	return mark && *mark >= generations->oldest;
}

/* Whether a packet may belong to a flow: if not, neither of its ends has a mark. The destination
 * comes first: it is marked in the client's packets. */
static __always_inline bool may_have_flow(const struct tuple *t)
{
	u32 zero = 0;
	struct flow_generations *generations = flow_generations.lookup(&zero);

	return generations && (is_marked(&t->to, generations) || is_marked(&t->from, generations));
}

static __always_inline struct flow *flow_between(const struct tuple *t)
{
	struct flow_key key;

	if (!may_have_flow(t))
		return NULL;
	key = flow_key_of(&t->from, &t->to);
	return flows.lookup(&key);
}

/* Like flow_between(), but without the filter, which costs too many instructions in a loop. */
static __always_inline bool has_flow(const struct tuple *t)
{
	struct flow_key key = flow_key_of(&t->from, &t->to);

	return flows.lookup(&key);
}

/* Whether the packet is in the original direction, before translation. This function and the next
 * two tell how a packet relates to the flow that was found for it. */
static __always_inline bool is_original(const struct tuple *t, const struct flow *flow)
{
	return same_target(&t->from, &flow->client) && same_target(&t->to, &flow->frontend);
}

/* A reply to client' or snat. Only valid if is_original() is false. */
static __always_inline bool is_reply(const struct tuple *t, const struct flow *flow)
{
	return same_target(&t->from, &flow->backend);
}

/* The original direction, after DNAT: from client' or snat. */
static __always_inline bool is_translated_original(const struct tuple *t, const struct flow *flow)
{
	return same_target(&t->to, &flow->backend);
}

/* How long an entry lives without a packet: the timeouts that kube-proxy sets for nf_conntrack. */
static __always_inline u64 timeout_of(const struct flow *flow)
{
	if (flow->client.protocol != IPPROTO_TCP) {
		if (flow->state != STATE_ESTABLISHED)
			return 30 * SECOND;
		return (flow->client.protocol == IPPROTO_SCTP ? 210 : 120) * SECOND;
	}
	if (flow->state == STATE_NEW)
		return 120 * SECOND;
	if (flow->state == STATE_ESTABLISHED || flow->state == STATE_UNPROVEN)
		return 24 * 3600 * SECOND;
	if (flow->state == STATE_CLOSING)
		return 3600 * SECOND;
	if (flow->state == STATE_ANSWERED)
		return 60 * SECOND;
	return 120 * SECOND;
}

static __always_inline bool expired(const struct flow *flow, u64 now)
{
	return elapsed(flow->last_used, now) > timeout_of(flow);
}

/* A time (ns) in units of about a millisecond, which wrap around. */
static __always_inline u32 milliseconds_of(u64 time)
{
	return time >> 20;
}

static __always_inline bool both_closed(const struct flow *flow)
{
	return (flow->fins & FIN_CLIENT) && (flow->fins & FIN_BACKEND);
}

static __always_inline bool is_ending(const struct flow *flow)
{
	return flow->state == STATE_CLOSING || flow->state == STATE_CLOSED;
}

static __always_inline bool is_half_open(const struct flow *flow)
{
	return flow->state == STATE_NEW || flow->state == STATE_ANSWERED;
}

/* Whether another flow may take this one's place in the queue when it is full: it has been idle for
 * some seconds, and nothing proves that both ends still have the connection. Established flows
 * never qualify. */
static __always_inline bool is_disposable(const struct flow *flow, u64 now)
{
	u64 quiet = elapsed(flow->last_used, now);

	if (flow->state == STATE_CLOSING)
		return quiet > CLOSING_SECONDS * SECOND;
	return flow->state != STATE_ESTABLISHED && quiet > UNPROVEN_SECONDS * SECOND;
}

/* Whether `b` is not before `a`, modulo 2^32. */
static __always_inline bool in_order(u32 a, u32 b)
{
	return (s32)(b - a) >= 0;
}

/* How far an ACK may lag behind, and how far a side may exceed stored numbers (matches_both()). */
static __always_inline u32 tolerance(const struct tcp_side *own)
{
	return own->window > MAX_ACK_WINDOW ? own->window : MAX_ACK_WINDOW;
}

/* Whether a segment is in the window of its connection: the rules of nf_conntrack
 * (tcp_in_window()). `limit`: up to which number the sender may send; `last`: up to which it may
 * acknowledge. */
static __always_inline bool in_window(const struct tcp_side *own, const struct segment *n,
				      u32 limit, u32 last)
{
	return own->window && in_order(n->sequence, limit) &&
	       in_order(own->next - own->room, n->next) && in_order(n->ack, last) &&
	       in_order(own->ack - tolerance(own), n->ack);
}

/* The same as far as the entry of the sender shows. It does not have the last number of the other
 * side, but that is within the window that this side has offered. */
static __always_inline bool is_in_own_window(const struct tcp_side *own, const struct segment *n)
{
	return in_window(own, n, own->limit, own->edge);
}

/* Stores the numbers of a segment that is in the window. */
static __always_inline void note_segment(struct tcp_side *own, const struct segment *n, u8 scale)
{
	u32 window = n->window << (scale & 15), edge = n->ack + window;

	if (in_order(own->next, n->next))
		own->next = n->next;
	if (in_order(own->ack, n->ack))
		own->ack = n->ack;
	if (in_order(own->edge, edge))
		own->edge = edge;
	if (window > own->window)
		own->window = window;
}

/* Whether a segment may change the state. Few do, and those look up the twin entry. */
static __always_inline bool may_change_tcp(const struct flow *flow, u32 flags, bool reply)
{
	if (flags & (TCP_FIN | TCP_RST))
		return true;
	if (flow->state == STATE_ESTABLISHED)
		return false;
	if (flow->state == STATE_CLOSING) /* two CPUs may have seen one FIN each */
		return flow->seen.tcp.fin;
	if (flow->state == STATE_CLOSED)
		return !both_closed(flow) || (reply && flow->syn); /* answers_direct() */
	return reply || is_half_open(flow);
}

/* The same for other protocols. UDP as in nf_conntrack: one datagram and its reply are no stream
 * yet. SCTP: only a peer that has the association sends chunks that set TCP_ACK here. */
static __always_inline bool may_change_other(const struct flow *flow, u32 flags, bool reply,
					     u64 now)
{
	if (flow->state == STATE_NEW)
		return reply;
	if (flow->state != STATE_ANSWERED)
		return false;
	if (flow->client.protocol == IPPROTO_SCTP)
		return reply && (flags & TCP_ACK);
	return elapsed(flow->seen.started, now) > STREAM_SECONDS * SECOND;
}

/* The keys of the entries of a flow. */
static __always_inline struct flow_key original_key(const struct flow *flow)
{
	return flow_key_of(&flow->client, &flow->frontend);
}

static __always_inline struct flow_key reply_key(const struct flow *flow)
{
	struct target client = flow->client;

	client.port = flow->client_port;
	return flow_key_of(&client, &flow->backend);
}

static __always_inline struct flow_key snat_reply_key(const struct flow *flow)
{
	struct target source = flow->client;

	source.address = flow->snat;
	source.port = flow->snat_port;
	return flow_key_of(&source, &flow->backend);
}

static __always_inline struct flow_key entry_key(const struct flow *flow, u32 direction)
{
	if (direction == DIRECTION_ORIGINAL)
		return original_key(flow);
	return direction == DIRECTION_REPLY ? reply_key(flow) : snat_reply_key(flow);
}

/* Whether this packet of a known flow neither changes its state nor needs a closer look, as most:
 * it arrives where its sender's packets do, and TCP's is in the window, SCTP's has the tag. */
static __always_inline bool is_ordinary(const struct flow *flow, const struct packet *p, u32 flags,
					bool reply, u64 now, u32 arrival)
{
	if (flow->arrival != arrival)
		return false;
	if (flow->client.protocol == IPPROTO_TCP)
		return (flags & (TCP_SYN | TCP_ACK)) == TCP_ACK &&
		       !may_change_tcp(flow, flags, reply) &&
		       is_in_own_window(&flow->seen.tcp, &p->tcp);
	return !may_change_other(flow, flags, reply, now) &&
	       (flow->client.protocol == IPPROTO_UDP ? !(flow->fins & FIN_RESERVED)
						     : p->sctp.tag == flow->seen.sctp.tag);
}

/* Whether a segment may begin a connection. With FIN or RST it is invalid, as for nf_conntrack. */
static __always_inline bool is_syn(u32 flags)
{
	return (flags & (TCP_SYN | TCP_ACK | TCP_FIN | TCP_RST)) == TCP_SYN;
}

static __always_inline bool starts_flow(const struct packet *p)
{
	return p->protocol == IPPROTO_UDP || is_syn(p->tcp_flags);
}
