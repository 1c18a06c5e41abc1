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
#define SNAT_TRIES 14     /* ports of the node that are asked at random, and as many in a row */
#define SHARES 4          /* one client address has one of so many ports of the node to a backend */
#define SHARED_PORTS 1024 /* a smaller range is not shared */

#define UNPROVEN_SECONDS 5          /* so long a flow without proof keeps a port that others want */
#define CLOSING_SECONDS 10          /* the same when one side has closed */
#define STREAM_SECONDS 2            /* UDP in use for longer than this, and answered, is a stream */
#define SEQUENCE_DISTANCE (4 << 20) /* bytes that may be on the way */
#define RESET_DISTANCE (32 << 10)   /* the same for what has to be guessed to reset a connection */

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
	if (nat->client.protocol != PROTO_TCP) {
		if (nat->state != STATE_ESTABLISHED)
			return 30 * SECOND;
		return (nat->client.protocol == PROTO_SCTP ? 210 : 120) * SECOND;
	}
	if (nat->state == STATE_NEW)
		return 120 * SECOND;
	if (nat->state == STATE_ESTABLISHED || nat->state == STATE_UNPROVEN)
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

/* Two CPUs have seen one FIN each, and neither has seen the other's. */
static __always_inline bool fins_met(const struct nat *nat)
{
	return nat->state == STATE_CLOSING && both_closed(nat);
}

static __always_inline bool is_ending(const struct nat *nat)
{
	return nat->state == STATE_CLOSING || nat->state == STATE_CLOSED;
}

static __always_inline bool is_half_open(const struct nat *nat)
{
	return nat->state == STATE_NEW || nat->state == STATE_ANSWERED;
}

/* Whether others may have the place or the port of this flow when they are short: it was quiet for
 * some seconds, and nothing proves that both of its ends still have the connection. Established
 * flows are never in this set. */
static __always_inline bool is_disposable(const struct nat *nat, u64 now)
{
	u64 quiet = elapsed(nat->last_used, now);

	if (nat->state == STATE_CLOSING)
		return quiet > CLOSING_SECONDS * SECOND;
	return nat->state != STATE_ESTABLISHED && quiet > UNPROVEN_SECONDS * SECOND;
}

/* Whether two sequence numbers differ by less than `distance`. */
static __always_inline bool is_near(u32 a, u32 b, u32 distance)
{
	return a - b + distance < 2 * distance;
}

/* Whether the other side's `known` numbers allow this segment. Somebody who cannot see the
 * connection's packets has to guess both numbers. */
static __always_inline bool is_plausible(const struct numbers *known, const struct numbers *n,
					 u32 ack_distance)
{
	return is_near(n->next, known->ack, SEQUENCE_DISTANCE) &&
	       is_near(n->ack, known->next, ack_distance);
}

/* Whether a reset is one that its receiver would believe: it has the very number that the receiver
 * expects (RFC 5961, as nf_conntrack). A side that gave up with data on the way has a higher one:
 * then its ACK has to be right as well, or it goes on where that side has ended, which only the
 * backend's own segments tell without doubt. */
static __always_inline bool is_reset(const struct numbers *own, const struct numbers *known,
				     const struct packet *p, u32 flags, bool back)
{
	if (!(known->next | known->ack))
		return false; /* adopted from an agent that kept no numbers, and silent since */
	return p->tcp.next == known->ack || (back && p->tcp.next == own->next) ||
	       ((flags & TCP_ACK) && is_plausible(known, &p->tcp, RESET_DISTANCE));
}

/* What a segment makes of the state of a TCP connection; `state` and `fins` are those of before.
 * `own` are the numbers that the sender's side had until now, `known` those of the other side. */
static __always_inline u8 tcp_state_after(u8 state, u8 *fins, const struct packet *p, u32 flags,
					  bool back, const struct numbers *own,
					  const struct numbers *known)
{
	u8 closed = FIN_CLIENT | FIN_BACKEND;

	if (flags & TCP_RST)
		return is_reset(own, known, p, flags, back) ? STATE_CLOSED : state;
	if (flags & TCP_SYN) {
		if (!back && !(flags & TCP_ACK) && state == STATE_CLOSED) {
			*fins = 0;
			return STATE_NEW;
		}
		if (back && (flags & TCP_ACK) &&
		    (state == STATE_NEW ||
		     (p->tcp.ack == known->next && !known->ack && p->tcp.next != own->next))) {
			*fins = 0; /* it answers a SYN, the last that the client has sent */
			return STATE_ANSWERED;
		}
		return state;
	}
	if (!(flags & TCP_ACK) || state == STATE_NEW)
		return state;
	if ((flags & TCP_FIN) && is_plausible(known, &p->tcp, SEQUENCE_DISTANCE)) {
		if (back && !(*fins & closed))
			*fins |= FIN_BACKEND_FIRST;
		*fins |= back ? FIN_BACKEND : FIN_CLIENT;
	}
	if ((*fins & closed) == closed)
		return STATE_CLOSED;
	if (state == STATE_CLOSED) /* by a reset, which its receiver may not have believed */
		return !(flags & TCP_FIN) && is_plausible(known, &p->tcp, SEQUENCE_DISTANCE)
			       ? STATE_CLOSING
			       : STATE_CLOSED;
	if (*fins & closed)
		return STATE_CLOSING;
	if (state == STATE_ANSWERED && !back && is_plausible(known, &p->tcp, RESET_DISTANCE))
		return STATE_UNPROVEN;
	/* A backend that has only answered the SYN repeats itself, whatever is sent to it: so it is
	 * proof if it sends data, or acknowledges any. */
	if ((state == STATE_ANSWERED || state == STATE_UNPROVEN) && back && own->next &&
	    (p->tcp.next != own->next || p->tcp.ack != own->ack))
		return STATE_ESTABLISHED;
	return state;
}

/* Whether a segment may change the state: few do, and those ask for the flow's other side. */
static __always_inline bool may_change_tcp(const struct nat *nat, u32 flags, bool back)
{
	if (flags & (TCP_FIN | TCP_RST))
		return true;
	if (flags & TCP_SYN) /* the client's own may be forged: the backend's answer tells */
		return back || nat->state == STATE_CLOSED;
	if (nat->state == STATE_ESTABLISHED)
		return false;
	if (is_ending(nat))
		return fins_met(nat) || (nat->state == STATE_CLOSED && !both_closed(nat));
	return back || nat->state == STATE_ANSWERED;
}

/* The same for other protocols. UDP as in nf_conntrack: a question and its answer are no stream
 * yet. SCTP: what only a peer that has the association sends. */
static __always_inline bool may_change_other(const struct nat *nat, u32 flags, bool back, u64 now)
{
	if (nat->state == STATE_NEW)
		return back;
	if (nat->state != STATE_ANSWERED)
		return false;
	if (nat->client.protocol == PROTO_SCTP)
		return back && (flags & TCP_ACK);
	return elapsed(nat->seen.begun, now) > STREAM_SECONDS * SECOND;
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
