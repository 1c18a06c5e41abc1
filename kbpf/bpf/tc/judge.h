/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Decides what a packet of a known flow may change, and whether it may reach the client.
 *
 * Most packets change no state, and tc_ingress and tc_egress see in their own entry that they are
 * ordinary (is_ordinary()). All others come here, where both sides' entries are compared. What is
 * checked before it is stored:
 *
 *   device     a packet counts only if it arrives where the route to its sender leads
 *              (arrives_by()), so no pod can speak for a client or a backend
 *   TCP        the window, as in nf_conntrack: a segment outside changes nothing, not even how long
 *              the flow lives. A FIN has to be in the window, and a RST to have exactly the number
 *              that its receiver expects.
 *   SCTP       the verification tag
 *
 * As long as the backend has not answered a new connection, only its SYN-ACK or its refusal reaches
 * the client. Anything else belongs to an earlier connection with the same ports, which the backend
 * still has. So nothing of it may reach the new client, which gets another port when it repeats its
 * SYN (FIN_RESERVED). Later the window tells the backend's segments from late ones of an earlier
 * connection, so those outside are dropped, as kube-proxy's rules drop what conntrack calls
 * invalid.
 */
#pragma once

#include "types.h"
#include "lib/packet.h"
#include "tc/account_flows.h"
#include "tc/entries.h"
#include "tc/flow.h"
#include "tc/hop.h"
#include "tc/known.h"
#include "tc/scratch.h"
#include "tc/tails.h"

enum judgment {
	IGNORED = 0, /* changes nothing; the receiver decides what it thinks of the packet */
	COUNTED = 1,
	OUTSIDE = 2, /* of the window: IGNORED if it is the client's, DENIED if the backend's */
	DENIED = 3,  /* must not reach its receiver */
	TAKEN = 4,   /* DENIED: the backend has an older connection with the client's port */
};

static __always_inline void copy_limits(struct tcp_side *to, const struct tcp_side *peer)
{
	to->limit = peer->edge;
	to->room = peer->window;
}

/* Whether a segment is in the window, compared with both sides. Two CPUs may store numbers of one
 * side at the same time, and the lower one may remain. This must not end the connection. So after
 * the handshake, a side may exceed what is stored of the other by a window. */
static __always_inline bool matches_both(struct tcp_side *own, const struct tcp_side *peer,
					 const struct segment *n, bool half_open)
{
	copy_limits(own, peer);
	return in_window(own, n, peer->edge + (half_open ? 0 : tolerance(peer)),
			 peer->next + (half_open ? 0 : tolerance(own))) &&
	       in_order(peer->next - tolerance(own), n->ack);
}

/* Whether this segment acknowledges the client's first SYN, and maybe data in it, or its last one:
 * either of the two may be forged. As for nf_conntrack, a refusal does not answer a SYN from before
 * the first one: whoever forges both needs no number of the client. */
static __always_inline bool answers_syn(const struct flow *original, const struct segment *n,
					u32 flags)
{
	const struct tcp_side *client = &original->seen.tcp;
	bool before = !in_order(client->edge, n->ack);

	if (original->state != STATE_NEW) /* the SYN-ACK is repeated, and `edge` has changed */
		return n->ack == original->syn || client->next - n->ack < MAX_ACK_WINDOW;
	if (n->ack == original->syn)
		return !before || !(flags & TCP_RST);
	return !before && in_order(n->ack, client->next);
}

/* A SYN of the client. In a live connection only the two ends know whether it is genuine. */
static __always_inline enum judgment judge_syn(struct __sk_buff *skb, const struct packet *p,
					       struct flow *original, struct tcp_side *backend,
					       u64 now)
{
	struct tcp_side *client = &original->seen.tcp;

	original->syn = p->tcp.next;
	client->syn_scale = window_scale(skb, p);
	client->syn_at = milliseconds_of(now);
	if (original->state != STATE_CLOSED || both_closed(original))
		return original->state == STATE_NEW && client->next == p->tcp.next ? COUNTED
										   : IGNORED;
	original->state = STATE_NEW; /* after a reset: see check_restart() */
	original->fins &= FIN_REPLACED;
	__builtin_memset(backend, 0, sizeof(*backend));
	open_side(client, p, client->syn_scale);
	return COUNTED;
}

/* The backend has no connection: as after two FINs that both sides have acknowledged. */
static __always_inline void end_backend(struct flow *original, struct tcp_side *backend,
					struct tcp_side *client)
{
	original->fins |= FIN_CLIENT | FIN_BACKEND;
	backend->ack = client->next;
	client->ack = backend->next;
}

/* Whether this segment of the backend, which is outside of the window, answers a SYN in a
 * connection that is not new: the backend has forgotten it, or it would have sent an ACK. As in
 * nf_conntrack, neither side may have sent anything in the window since the SYN. A refusal passes,
 * but ends nothing: to forge a SYN and its refusal takes no number of the connection, and the port
 * would be free while both ends still have it. */
static __always_inline bool answers_later_syn(const struct flow *original, const struct flow *reply,
					      const struct segment *n, u32 flags)
{
	u32 syn_at = original->seen.tcp.syn_at;

	return (flags & (TCP_SYN | TCP_ACK | TCP_RST)) == (TCP_SYN | TCP_ACK) &&
	       n->ack == original->syn && in_order(milliseconds_of(original->last_used), syn_at) &&
	       in_order(milliseconds_of(reply->last_used), syn_at);
}

/* The backend's answer to a SYN. */
static __always_inline enum judgment judge_answer(struct __sk_buff *skb, const struct packet *p,
						  u32 flags, struct flow *original,
						  struct tcp_side *backend, u64 now)
{
	struct tcp_side *client = &original->seen.tcp;
	const struct segment *n = &p->tcp;

	if (!(flags & TCP_ACK) || !(flags & (TCP_SYN | TCP_RST)) ||
	    !answers_syn(original, n, flags)) {
		if (!(flags & TCP_ACK))
			return DENIED;
		original->fins |= FIN_RESERVED;
		return TAKEN;
	}
	if (flags & TCP_RST) {
		original->state = STATE_CLOSED;
		backend->next = n->next;
		end_backend(original, backend, client);
		return COUNTED;
	}
	original->fins = is_half_open(original) ? original->fins & FIN_REPLACED : FIN_REPLACED;
	original->state = STATE_ANSWERED;
	original->last_used = now; /* check_restart() */
	client->fin = backend->fin = 0;
	if (n->ack == original->syn) {
		client->next = n->ack;
		client->scale = client->syn_scale;
	}
	backend->scale = window_scale(skb, p);
	if (!backend->scale) /* then the client must not use it either (RFC 7323, 1.3) */
		client->scale = 0;
	backend->next = client->ack = n->next;
	backend->ack = n->ack;
	backend->window = n->window | 1;
	backend->edge = n->ack + n->window;
	client->edge = n->next + client->window; /* data before its ACK: TCP Fast Open */
	copy_limits(client, backend);
	copy_limits(backend, client);
	return COUNTED;
}

/* The number of the RST that its receiver accepts (RFC 5961): what it expects next, or the number
 * after what the sender has in flight. Any other in the window may pass, but the connection lives.
 */
static __always_inline enum judgment judge_reset(struct flow *original, struct tcp_side *own,
						 struct tcp_side *peer, const struct segment *n,
						 bool reply)
{
	/* What the backend has sent before the client's ACK may be forged. If it has only refused
	 * the SYN, that is the number of all refusals. */
	bool sent = n->sequence == own->next && !(reply && is_half_open(original));

	if (reply && !own->window && n->ack != original->syn)
		return OUTSIDE;
	if (n->sequence != peer->ack && !sent) {
		if (reply && n->ack == original->syn) /* a refusal, see answers_later_syn() */
			return IGNORED;
		return in_order(own->next - own->room, n->sequence) &&
				       in_order(n->sequence, peer->edge)
			       ? IGNORED
			       : OUTSIDE;
	}
	original->state = STATE_CLOSED;
	if (reply) /* the client's RST may be lost on its way */
		end_backend(original, own, peer);
	return COUNTED;
}

/* The state after a segment in the window that is neither SYN nor RST. */
static __always_inline void advance_state(struct flow *original, struct tcp_side *own,
					  const struct tcp_side *peer, const struct segment *n,
					  u32 flags, bool reply)
{
	u8 before = original->state;

	/* Before the client's ACK, the backend's FIN has to follow its SYN-ACK: the window of the
	 * client's SYN is wide enough to guess another number. */
	if ((flags & TCP_FIN) && !own->fin &&
	    (!reply || before != STATE_ANSWERED || n->sequence == peer->ack))
		own->fin = !reply      ? FIN_CLIENT
			   : peer->fin ? FIN_BACKEND
				       : FIN_BACKEND | FIN_BACKEND_FIRST;
	if (before == STATE_ANSWERED) {
		if (reply || !in_order(own->ack, n->ack))
			return; /* it does not acknowledge the SYN-ACK */
		original->state = STATE_UNPROVEN;
		original->fins &= ~FIN_RESERVED;
	}
	original->fins |= own->fin | peer->fin;
	if (both_closed(original))
		original->state = STATE_CLOSED;
	else if (before == STATE_CLOSED) /* by a reset, which its receiver has not accepted */
		original->state = flags & TCP_FIN ? STATE_CLOSED : STATE_CLOSING;
	else if (original->fins & (FIN_CLIENT | FIN_BACKEND))
		original->state = STATE_CLOSING;
	/* A backend that has only answered the SYN repeats its SYN-ACK or ACK whatever it receives.
	 * Only sending data, or acknowledging data, proves that it has the connection. */
	else if (before == STATE_UNPROVEN && reply && (n->next != own->next || n->ack != own->ack))
		original->state = STATE_ESTABLISHED;
}

static __always_inline enum judgment judge_tcp(struct __sk_buff *skb, const struct packet *p,
					       u32 flags, bool reply, struct flow *flow,
					       struct flow *other, u64 now)
{
	struct flow *original = reply ? other : flow;
	struct tcp_side *own = &flow->seen.tcp, *peer = &other->seen.tcp;
	const struct segment *n = &p->tcp;
	u8 state = original->state;
	bool fits;

	if (!reply && is_syn(flags))
		return judge_syn(skb, p, original, peer, now);
	fits = matches_both(own, peer, n, is_half_open(original));
	if (reply && (state == STATE_NEW || (state == STATE_ANSWERED && (flags & TCP_SYN)) ||
		      (!fits && answers_later_syn(original, flow, n, flags))))
		return judge_answer(skb, p, flags, original, own, now);
	if (state == STATE_NEW)
		return IGNORED;
	if (flags & TCP_SYN) /* a repetition, which proves nothing */
		return fits ? IGNORED : OUTSIDE;
	if (flags & TCP_RST)
		return judge_reset(original, own, peer, n, reply);
	if (!(flags & TCP_ACK) || !fits) {
		if (state == STATE_ANSWERED && reply && (flags & TCP_ACK)) /* it knows another */
			original->fins |= FIN_RESERVED;
		return OUTSIDE;
	}
	advance_state(original, own, peer, n, flags, reply);
	note_segment(own, n, own->scale);
	copy_limits(peer, own);
	return COUNTED;
}

/* An association may be restarted (RFC 9260, 5.2.2): the tags of both sides change once the backend
 * has accepted the client's cookie. */
static __always_inline enum judgment judge_sctp(const struct packet *p, u32 flags, bool reply,
						struct flow *flow, struct flow *other)
{
	struct flow *original = reply ? other : flow;
	struct sctp_tags *own = &flow->seen.sctp, *peer = &other->seen.sctp;
	__be32 announced = p->sctp.next;
	u8 state = original->state;

	if (!reply && (flags & TCP_SYN)) {
		if (peer->tag == announced)
			return state == STATE_NEW ? COUNTED : IGNORED;
		if (state == STATE_NEW)
			original->fins |= FIN_RESERVED; /* a new flow, with its next INIT */
		else
			peer->next = announced;
		return IGNORED;
	}
	if (reply && own->next && p->sctp.tag == own->next) {
		if (announced)
			peer->next = announced;
		if (!peer->next || !(flags & TCP_ACK))
			return IGNORED;
		own->tag = own->next;
		peer->tag = peer->next;
	}
	if (own->tag && p->sctp.tag != own->tag)
		/* An ABORT may have the tag of the packet that it answers (RFC 9260, 8.5.1). */
		return reply && (state == STATE_NEW || p->sctp.tag != peer->tag) ? DENIED : IGNORED;
	if (reply && announced && is_half_open(original)) {
		peer->tag = announced;
		original->state = STATE_ANSWERED;
	} else if (reply && state == STATE_ANSWERED && (flags & TCP_ACK)) {
		original->state = STATE_ESTABLISHED;
	}
	return COUNTED;
}

/* ANSWERED becomes ESTABLISHED, unless only this entry's copy was outdated. */
static __always_inline enum judgment judge_udp(struct flow *flow, struct flow *original, bool reply,
					       u64 now)
{
	u8 before = original->state;

	if (may_change_other(flow, 0, reply, now) && flow->state == before)
		original->state = before == STATE_NEW ? STATE_ANSWERED : STATE_ESTABLISHED;
	return COUNTED;
}

static __always_inline enum judgment judge(struct __sk_buff *skb, const struct packet *p, u32 flags,
					   bool reply, struct flow *flow, struct flow *other,
					   u64 now)
{
	bool tcp = flow->client.protocol == IPPROTO_TCP;

	if (p->fragment == LATER)
		return tcp && reply && flow->state == STATE_NEW ? DENIED : IGNORED;
	if (!other) /* its other entries are gone: it only keeps its port, and expires in time */
		return !tcp || is_in_own_window(&flow->seen.tcp, &p->tcp) ? IGNORED : OUTSIDE;
	if (tcp)
		return judge_tcp(skb, p, flags, reply, flow, other, now);
	if (flow->client.protocol == IPPROTO_SCTP)
		return judge_sctp(p, flags, reply, flow, other);
	return judge_udp(flow, reply ? other : flow, reply, now);
}

/* Whether a packet answers a SYN that the client, or with SNAT this node, has sent past the
 * Service, from the port of this flow, which has ended: is_direct_connection(). As long as only one
 * side has closed, both packets may be forged. The backend accepts or refuses it, or it is in
 * TIME_WAIT. In TIME_WAIT it sends an ACK of the earlier connection (RFC 9293, 3.10.7.4), and only
 * a reset from the new one ends that state. The earlier connection does not need the ACK once all
 * of it is acknowledged. */
static __always_inline bool answers_direct(const struct flow *flow, const struct flow *original,
					   const struct packet *p)
{
	if (flow->direction == DIRECTION_ORIGINAL || flow->client.protocol != IPPROTO_TCP ||
	    !flow->syn || !(p->tcp_flags & TCP_ACK) ||
	    (original && original->state != STATE_CLOSED))
		return false;
	if (p->tcp_flags & (TCP_SYN | TCP_RST))
		return p->tcp.ack == flow->syn;
	return !original || (both_closed(original) && is_acknowledged(original, flow));
}

/* A reply to the node matches another entry when it leaves the stack, where it is judged again:
 * that one has to know the same numbers or tags. */
static __always_inline void copy_to_reply_entry(const struct flow *flow)
{
	struct flow *entry = entry_at(flow, DIRECTION_REPLY);

	if (!entry)
		return;
	entry->seen = flow->seen;
	entry->arrival = flow->arrival;
	entry->state = flow->state;
	entry->fins = flow->fins;
}

/* Judges a packet of a known flow; the program that has asked continues with it. */
int tc_judge(struct __sk_buff *skb)
{
	struct flow *flow, *other, *original, *copy;
	struct scratch *s = get_scratch();
	enum judgment result = DENIED;
	u64 now = now_ns();
	struct packet *p;
	u32 arrival;
	int action;
	bool reply;
	u8 before;

	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	flow = flow_between(&p->tuple);
	if (!flow)
		return resume(skb, s, s->resume_tail, JUDGED);
	reply = !is_original(&p->tuple, flow);
	arrival = skb->ingress_ifindex;
	barrier_var(
		arrival); /* or the compiler chooses between two members of skb by its address */
	if (s->resume_tail == TAIL_INGRESS)
		arrival = skb->ifindex;
	other = twin_of(flow, reply);
	original = reply ? other : flow;
	before = original ? original->state : flow->state;
	if (arrival == flow->arrival || arrives_by(skb, p, arrival, &s->hop)) {
		if (reply && answers_direct(flow, original, p)) {
			return release_entry(flow, flow->direction)
				       ? resume(skb, s, s->resume_tail, JUDGED)
				       : drop_flow(flow, NOT_TRACKED); /* it is repeated */
		}
		result = judge(skb, p, p->tcp_flags, reply, flow, other, now);
	}
	if (result == COUNTED) {
		flow->last_used = now;
		flow->arrival = arrival;
	}
	if (other && original) {
		if (original->state != before)
			account_state(original, before, reply, p->tcp_flags);
		copy = reply ? flow : other;
		copy->state = original->state;
		copy->fins = original->fins;
		if (original->state == STATE_CLOSED && before != STATE_CLOSED)
			flush_rest(other);
	}
	if (flow->direction == DIRECTION_SNAT_REPLY &&
	    (flow->client.protocol == IPPROTO_SCTP ||
	     (flow->client.protocol == IPPROTO_TCP && result == COUNTED)))
		copy_to_reply_entry(flow);
	if (result >= DENIED || (result == OUTSIDE && reply)) {
		action = drop_flow(flow, INVALID);
		/* The backend must not expect number 0, nor must segmentation count on from it. */
		if (result == TAKEN && before == STATE_NEW && p->tcp.ack && !skb->gso_size) {
			s->reason = INVALID;
			tails.call(skb, TAIL_REFUSE);
		}
		return action;
	}
	return resume(skb, s, s->resume_tail, JUDGED);
}
