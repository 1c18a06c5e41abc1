/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Tracked flows of the packet path: what a connection's packets look like at each place.
 *
 *   client → frontend ─[ingress]─► client' → backend ─[stack]─► client' → backend ─[egress]─►
 *   snat → backend
 *
 * and back. The destination changes at ingress, before the stack routes; the source at egress,
 * after the stack and the node's netfilter have seen who talks to whom. So nothing on the node
 * ever sees a foreign packet with the node's own source address (a martian), and policy that
 * somebody keeps in nftables sees client and pod. client' is the client, but for its port when
 * another of its flows to the same backend has taken it. A flow that goes past the stack
 * (forward.h) changes both at ingress.
 *
 * A flow has up to three entries in one map, each with the whole of a `struct nat`:
 *
 *   client, frontend      its questions, as they come in
 *   client', backend      its questions as they leave, and the answers
 *   snat, backend         answers to the node, when the source is translated
 *
 * The second one of a masqueraded flow is for its packets in the stack, so a flow that goes past
 * the stack has it only from the first packet on that has to go up (tc_late), and where all go up
 * it keeps its state by itself: it sees each packet after one of the others has.
 *
 * A key does not tell who of the two sends: whichever way a packet goes, one look-up finds its
 * flow, or that it has none. Look-ups are most of what a packet costs here: each goes to two places
 * in memory that are in no cache.
 *
 * The first of these keys also stands in a queue, in the order in which flows began. When it is
 * full a new flow takes the place of the oldest one that nobody needs any more: it has ended, or
 * nobody has answered it since. So a flood of connections that are never made drives out only its
 * own kind. An LRU map would do without the queue; but it costs more than all else that a new
 * connection costs, it takes entries one by one, and a flood drives out what is idle.
 */
#pragma once

#define SECOND 1000000000ULL
#define SNAT_TRIES 32

BPF_TABLE("hash", struct ends, struct nat, flows, 64);
BPF_QUEUE(order, struct ends, 64);
BPF_TABLE("array", u32, u64, tracked, 1); /* 0 -> how many keys are in the queue */

static __always_inline bool has_snat(const struct nat *nat)
{
	return (nat->snat.word[0] | nat->snat.word[1] | nat->snat.word[2] | nat->snat.word[3]) != 0;
}

static __always_inline struct tuple reversed(const struct tuple *t)
{
	struct tuple r = {.from = t->to, .to = t->from};

	return r;
}

/* Any order will do that is one: by address, its last word first, then by port. */
static __always_inline bool goes_first(const struct target *a, const struct target *b)
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

static __always_inline struct ends ends_of(const struct target *a, const struct target *b)
{
	struct ends e;

	if (goes_first(a, b)) {
		e.first = *a;
		e.second = *b;
	} else {
		e.first = *b;
		e.second = *a;
	}
	return e;
}

/* Whether a flow was ever tracked here. On many a node there is none, and nobody pays for it. */
static __always_inline bool tracks_flows(void)
{
	u32 zero = 0;
	u64 *there = tracked.lookup(&zero);

	return there && *there;
}

static __always_inline struct nat *flow_between(const struct tuple *t)
{
	struct ends key;

	if (!tracks_flows())
		return NULL;
	key = ends_of(&t->from, &t->to);
	return flows.lookup(&key);
}

/* What a packet is to the flow that was found for it. */
static __always_inline bool is_question(const struct tuple *t, const struct nat *nat)
{
	return same_target(&t->from, &nat->client) && same_target(&t->to, &nat->frontend);
}

/* To client' or snat; if it is no question. */
static __always_inline bool is_answer(const struct tuple *t, const struct nat *nat)
{
	return same_target(&t->from, &nat->backend);
}

/* From client' or snat. */
static __always_inline bool is_translated(const struct tuple *t, const struct nat *nat)
{
	return same_target(&t->to, &nat->backend);
}

/* How long an entry holds without a packet: as kube-proxy sets the kernel's conntrack. */
static __always_inline u64 timeout_of(const struct nat *nat)
{
	if (nat->client.protocol != PROTO_TCP)
		return (nat->state == STATE_NEW ? 30 : 120) * SECOND;
	if (nat->state == STATE_NEW)
		return 120 * SECOND;
	if (nat->state == STATE_ESTABLISHED)
		return 24 * 3600 * SECOND;
	if (nat->state == STATE_CLOSING)
		return 3600 * SECOND;
	if (nat->state == STATE_ANSWERED)
		return 60 * SECOND;
	return 120 * SECOND;
}

static __always_inline bool expired(const struct nat *nat, u64 now)
{
	return elapsed(nat->last_used, now) > timeout_of(nat);
}

static __always_inline bool both_closed(const struct nat *nat)
{
	return (nat->fins & FIN_CLIENT) && (nat->fins & FIN_BACKEND);
}

static __always_inline bool is_ending(const struct nat *nat)
{
	return nat->state == STATE_CLOSING || nat->state == STATE_CLOSED;
}

static __always_inline bool is_half_open(const struct nat *nat)
{
	return nat->state == STATE_NEW || nat->state == STATE_ANSWERED;
}

/* A packet went through: `back` when it came from the backend. Returns whether that changed the
 * state, which then is to be told to the flow's other entries. */
static __always_inline bool touch(struct nat *nat, u32 flags, bool back, u64 now)
{
	u8 state = nat->state, fins = nat->fins;

	if (flags & NO_SEGMENT)
		return false;
	nat->last_used = now;
	if (nat->client.protocol != PROTO_TCP) {
		if (back)
			nat->state = STATE_ESTABLISHED;
	} else if (flags & TCP_RST) {
		nat->state = STATE_CLOSED;
	} else if (flags & TCP_FIN) {
		if (back && !(fins & (FIN_CLIENT | FIN_BACKEND)))
			nat->fins = FIN_BACKEND_FIRST;
		nat->fins |= back ? FIN_BACKEND : FIN_CLIENT;
		nat->state =
			both_closed(nat) || state == STATE_CLOSED ? STATE_CLOSED : STATE_CLOSING;
	} else if (!back && is_ending(nat) && (flags & (TCP_SYN | TCP_ACK)) == TCP_SYN) {
		nat->state = STATE_NEW; /* the backend decides whether it is a new one */
		nat->fins = 0;
	} else if (state == STATE_CLOSED && !both_closed(nat) && (flags & TCP_ACK)) {
		nat->state = STATE_CLOSING; /* a reset that nobody has believed */
	} else if (state == STATE_NEW && back && (flags & TCP_SYN)) {
		nat->state = STATE_ANSWERED;
	} else if (is_half_open(nat) && !back && (flags & (TCP_SYN | TCP_ACK)) == TCP_ACK) {
		nat->state = STATE_ESTABLISHED;
	} else if (state == STATE_CLOSING && both_closed(nat)) {
		nat->state = STATE_CLOSED; /* the FINs met each other, on two CPUs */
	}
	return nat->state != state || nat->fins != fins;
}

/* The keys of a flow. */
static __always_inline struct ends question_of(const struct nat *nat)
{
	return ends_of(&nat->client, &nat->frontend);
}

static __always_inline struct ends answer_of(const struct nat *nat)
{
	struct target client = nat->client;

	client.port = nat->client_port;
	return ends_of(&client, &nat->backend);
}

static __always_inline struct ends snat_answer_of(const struct nat *nat)
{
	struct target source = nat->client;

	source.address = nat->snat;
	source.port = nat->snat_port;
	return ends_of(&source, &nat->backend);
}
