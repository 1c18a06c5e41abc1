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

BPF_TABLE("hash", struct flow_key, struct flow, flows, 64);
BPF_QUEUE(flow_queue, struct flow_key, 64);
BPF_TABLE("array", u32, u64, flow_count, 1); /* 0 -> how many keys are in the queue */

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

/* Any order will do that is one: by address, its last word first, then by port. */
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

/* Whether a flow was ever tracked here. On many a node there is none, and nobody pays for it. */
static __always_inline bool tracks_flows(void)
{
	u32 zero = 0;
	u64 *total = flow_count.lookup(&zero);

	return total && *total;
}

static __always_inline struct flow *flow_between(const struct tuple *t)
{
	struct flow_key key;

	if (!tracks_flows())
		return NULL;
	key = flow_key_of(&t->from, &t->to);
	return flows.lookup(&key);
}

/* What a packet is to the flow that was found for it. */
static __always_inline bool is_original(const struct tuple *t, const struct flow *flow)
{
	return same_target(&t->from, &flow->client) && same_target(&t->to, &flow->frontend);
}

/* To client' or snat; if it is no question. */
static __always_inline bool is_reply(const struct tuple *t, const struct flow *flow)
{
	return same_target(&t->from, &flow->backend);
}

/* From client' or snat. */
static __always_inline bool is_translated_original(const struct tuple *t, const struct flow *flow)
{
	return same_target(&t->to, &flow->backend);
}

/* How long an entry holds without a packet: as kube-proxy sets the kernel's conntrack. */
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

static __always_inline bool both_closed(const struct flow *flow)
{
	return (flow->fins & FIN_CLIENT) && (flow->fins & FIN_BACKEND);
}

/* Two CPUs have seen one FIN each, and neither has seen the other's. */
static __always_inline bool has_unmerged_fins(const struct flow *flow)
{
	return flow->state == STATE_CLOSING && both_closed(flow);
}

static __always_inline bool is_ending(const struct flow *flow)
{
	return flow->state == STATE_CLOSING || flow->state == STATE_CLOSED;
}

static __always_inline bool is_half_open(const struct flow *flow)
{
	return flow->state == STATE_NEW || flow->state == STATE_ANSWERED;
}

/* Whether others may have the place or the port of this flow when they are short: it was quiet for
 * some seconds, and nothing proves that both of its ends still have the connection. Established
 * flows are never in this set. */
static __always_inline bool is_disposable(const struct flow *flow, u64 now)
{
	u64 quiet = elapsed(flow->last_used, now);

	if (flow->state == STATE_CLOSING)
		return quiet > CLOSING_SECONDS * SECOND;
	return flow->state != STATE_ESTABLISHED && quiet > UNPROVEN_SECONDS * SECOND;
}

/* Whether two sequence numbers differ by less than `distance`. */
static __always_inline bool is_near(u32 a, u32 b, u32 distance)
{
	return a - b + distance < 2 * distance;
}

/* Whether the other side's `known` numbers allow this segment. Somebody who cannot see the
 * connection's packets has to guess both numbers. */
static __always_inline bool is_plausible(const struct tcp_numbers *peer,
					 const struct tcp_numbers *n, u32 ack_distance)
{
	return is_near(n->next, peer->ack, SEQUENCE_DISTANCE) &&
	       is_near(n->ack, peer->next, ack_distance);
}

/* Whether a reset is one that its receiver would believe: it has the very number that the receiver
 * expects (RFC 5961, as nf_conntrack). A side that gave up with data on the way has a higher one:
 * then its ACK has to be right as well, or it goes on where that side has ended, which only the
 * backend's own segments tell without doubt. */
static __always_inline bool is_reset(const struct tcp_numbers *own, const struct tcp_numbers *peer,
				     const struct packet *p, u32 flags, bool reply)
{
	if (!(peer->next | peer->ack))
		return false; /* adopted from an agent that kept no numbers, and silent since */
	return p->tcp.next == peer->ack || (reply && p->tcp.next == own->next) ||
	       ((flags & TCP_ACK) && is_plausible(peer, &p->tcp, RESET_DISTANCE));
}

/* What a segment makes of the state of a TCP connection; `state` and `fins` are those of before.
 * `own` are the numbers that the sender's side had until now, `known` those of the other side. */
static __always_inline u8 tcp_state_after(u8 state, u8 *fins, const struct packet *p, u32 flags,
					  bool reply, const struct tcp_numbers *own,
					  const struct tcp_numbers *peer)
{
	u8 closed = FIN_CLIENT | FIN_BACKEND;

	if (flags & TCP_RST)
		return is_reset(own, peer, p, flags, reply) ? STATE_CLOSED : state;
	if (flags & TCP_SYN) {
		if (!reply && !(flags & TCP_ACK) && state == STATE_CLOSED) {
			*fins = 0;
			return STATE_NEW;
		}
		if (reply && (flags & TCP_ACK) &&
		    (state == STATE_NEW ||
		     (p->tcp.ack == peer->next && !peer->ack && p->tcp.next != own->next))) {
			*fins = 0; /* it answers a SYN, the last that the client has sent */
			return STATE_ANSWERED;
		}
		return state;
	}
	if (!(flags & TCP_ACK) || state == STATE_NEW)
		return state;
	if ((flags & TCP_FIN) && is_plausible(peer, &p->tcp, SEQUENCE_DISTANCE)) {
		if (reply && !(*fins & closed))
			*fins |= FIN_BACKEND_FIRST;
		*fins |= reply ? FIN_BACKEND : FIN_CLIENT;
	}
	if ((*fins & closed) == closed)
		return STATE_CLOSED;
	if (state == STATE_CLOSED) /* by a reset, which its receiver may not have believed */
		return !(flags & TCP_FIN) && is_plausible(peer, &p->tcp, SEQUENCE_DISTANCE)
			       ? STATE_CLOSING
			       : STATE_CLOSED;
	if (*fins & closed)
		return STATE_CLOSING;
	if (state == STATE_ANSWERED && !reply && is_plausible(peer, &p->tcp, RESET_DISTANCE))
		return STATE_UNPROVEN;
	/* A backend that has only answered the SYN repeats itself, whatever is sent to it: so it is
	 * proof if it sends data, or acknowledges any. */
	if ((state == STATE_ANSWERED || state == STATE_UNPROVEN) && reply && own->next &&
	    (p->tcp.next != own->next || p->tcp.ack != own->ack))
		return STATE_ESTABLISHED;
	return state;
}

/* Whether a segment may change the state: few do, and those ask for the flow's other side. */
static __always_inline bool may_change_tcp(const struct flow *flow, u32 flags, bool reply)
{
	if (flags & (TCP_FIN | TCP_RST))
		return true;
	if (flags & TCP_SYN) /* the client's own may be forged: the backend's answer tells */
		return reply || flow->state == STATE_CLOSED;
	if (flow->state == STATE_ESTABLISHED)
		return false;
	if (is_ending(flow))
		return has_unmerged_fins(flow) ||
		       (flow->state == STATE_CLOSED && !both_closed(flow));
	return reply || flow->state == STATE_ANSWERED;
}

/* The same for other protocols. UDP as in nf_conntrack: a question and its answer are no stream
 * yet. SCTP: what only a peer that has the association sends. */
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

/* The keys of a flow. */
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
