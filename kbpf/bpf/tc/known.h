/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Packets of known flows: updates the state of their flow, and translates them. flow.h says what
 * each packet changes, and when. Also deletes flows.
 */
#pragma once

#include "types.h"
#include "maps.h"
#include "lib/hash.h"
#include "lib/packet.h"
#include "lib/rewrite.h"
#include "tc/account_flows.h"
#include "tc/devices.h"
#include "tc/flow.h"
#include "tc/hop.h"
#include "tc/scratch.h"
#include "tc/sctp.h"
#include "tc/tails.h"

#define JUST_WRITTEN 0x200 /* not a TCP flag: the flow has just been written or rechecked */

BPF_TABLE("array", u32, struct port_slot, port_slots, PORT_SLOTS);

static __always_inline bool backend_exists(u32 id)
{
	return find_backend(&id) != NULL;
}

static __always_inline bool same_flow(const struct flow *a, const struct flow *b)
{
	return same_target(&a->frontend, &b->frontend) && same_target(&a->client, &b->client) &&
	       same_target(&a->backend, &b->backend) && a->client_port == b->client_port &&
	       a->snat_port == b->snat_port;
}

/* The entry at this key, if it still belongs to this flow. */
static __always_inline struct flow *entry_of(const struct flow *flow, struct flow_key *key)
{
	struct flow *entry = flows.lookup(key);

	return entry && same_flow(entry, flow) ? entry : NULL;
}

/* Another entry of this flow; NULL if it has none, or no longer. */
static __always_inline struct flow *entry_at(const struct flow *flow, u32 direction)
{
	struct flow_key key;

	if (direction == DIRECTION_SNAT_REPLY && !has_snat(flow))
		return NULL;
	key = entry_key(flow, direction);
	return entry_of(flow, &key);
}

static __always_inline bool is_live(const struct flow *entry, u64 now)
{
	return entry && !expired(entry, now);
}

/* Whether all entries of a flow have expired. If only one side sends, as in one-way UDP, the entry
 * that matches the other side's packets expires first. */
static __always_inline bool is_over(const struct flow *flow, u64 now)
{
	return expired(flow, now) && !is_live(entry_at(flow, DIRECTION_REPLY), now) &&
	       !is_live(entry_at(flow, DIRECTION_SNAT_REPLY), now) &&
	       !is_live(entry_at(flow, DIRECTION_ORIGINAL), now);
}

enum restart {
	RESTART_NO = 0,
	RESTART_CHECK = 1, /* tc_recheck decides */
	RESTART_YES = 2,
};

/* Whether a packet of a known flow has to choose a backend again: a SYN after both sides have
 * closed (tc_recheck), or UDP whose backend is gone. Any other SYN may be a retransmission (the
 * reply was lost) or forged. It goes to the backend of the connection, if there is one, and the
 * backend decides. A SYN of which the backend knows nothing, because it still has an older
 * connection from this port, begins with another port. A UDP flow is rechecked after a pause of a
 * second without a reply, and when its client has sent to the backend's own address meanwhile. */
static __always_inline enum restart check_restart(const struct flow *flow, u32 flags, u64 now)
{
	if (flags & (JUST_WRITTEN | FROM_ICMP_ERROR))
		return RESTART_NO;
	if (flow->client.protocol == IPPROTO_UDP) {
		if (!backend_exists(flow->backend_id))
			return RESTART_YES;
		/* true is RESTART_CHECK */
		return (flow->fins & FIN_DIRECT) ||
		       (flow->state == STATE_NEW && elapsed(flow->last_used, now) > SECOND);
	}
	if ((flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return RESTART_NO;
	/* If the backend has answered, the mark may be forged, but the client's ACK comes soon. */
	if ((flow->fins & FIN_RESERVED) &&
	    (flow->state == STATE_NEW ||
	     (flow->state == STATE_ANSWERED && elapsed(flow->last_used, now) > SECOND)))
		return RESTART_YES;
	return RESTART_CHECK;
}

/* The twin entry, which matches the other side's packets: for a packet of the backend the client's
 * own entry, for a packet of the client the one that matches replies. If the packets of a
 * masqueraded flow leave without SNAT, because another program lets them out, the backend replies
 * to client', and that entry is the twin. */
static __always_inline struct flow *twin_of(const struct flow *flow, bool reply)
{
	u32 direction = reply            ? DIRECTION_ORIGINAL
			: has_snat(flow) ? DIRECTION_SNAT_REPLY
					 : DIRECTION_REPLY;
	struct flow_key key = entry_key(flow, direction);
	struct flow *other = entry_of(flow, &key);

	/* seen.started are the same bytes as seen.tcp: 0 if this entry has matched no segment. */
	if (direction != DIRECTION_SNAT_REPLY || flow->state == STATE_NEW || !other ||
	    other->seen.started)
		return other;
	return entry_at(flow, DIRECTION_REPLY);
}

/* Whether both sides have acknowledged the other's FIN. A side that has not repeats its own, and
 * maybe the data before it, so it needs the connection. */
static __always_inline bool is_acknowledged(const struct flow *original, const struct flow *reply)
{
	return original->client.protocol != IPPROTO_TCP ||
	       (original->seen.tcp.ack == reply->seen.tcp.next &&
		reply->seen.tcp.ack == original->seen.tcp.next);
}

/* Updates the entry that matched a packet of a known flow, if it is an ordinary one. False:
 * tc_judge has to see the packet first. Each entry matches packets of one side only. The exception
 * is that of client' and backend: it also matches the client's packets when they leave the stack
 * (update_leaving()). `arrival`: see struct flow. */
static __always_inline bool update_flow(struct flow *flow, const struct packet *p, u32 flags,
					bool reply, u64 now, u32 arrival)
{
	if (flags & (FROM_ICMP_ERROR | JUDGED))
		return true;
	if (p->fragment == LATER) /* it has no numbers, and changes nothing */
		return arrival == flow->arrival && flow->state != STATE_NEW;
	if (!is_ordinary(flow, p, flags, reply, now, arrival))
		return false;
	flow->last_used = now;
	if (flow->client.protocol == IPPROTO_TCP)
		note_segment(&flow->seen.tcp, &p->tcp, flow->seen.tcp.scale);
	return true;
}

/* The client's side of a connection after its SYN, which has this window_scale(). */
static __always_inline void open_side(struct tcp_side *client, const struct packet *p, u8 scale)
{
	client->next = p->tcp.next;
	client->edge = p->tcp.sequence + 1;
	client->window = p->tcp.window | 1; /* 0 would mean that it has sent nothing */
	client->scale = client->syn_scale = scale;
	client->fin = 0;
}

/* Hands a packet of a known flow to tc_judge, which returns to `tail`. */
static __always_inline int ask_judge(struct __sk_buff *skb, struct scratch *s, u32 tail)
{
	s->resume_tail = tail;
	return go(skb, TAIL_JUDGE);
}

/* Updates the entry of client' and backend for a packet of the client that leaves the stack. The
 * state was updated when the packet arrived, but with SNAT this copy was not. Packets of TCP and
 * SCTP do not count here, since it is not known whether their numbers were right. */
static __always_inline void update_leaving(struct flow *flow, u32 flags, u64 now)
{
	bool tcp = flow->client.protocol == IPPROTO_TCP;
	struct flow *original;

	if (flags & FROM_ICMP_ERROR)
		return;
	if (flow->client.protocol == IPPROTO_UDP)
		flow->last_used = now;
	if (!has_snat(flow) ||
	    !(tcp ? may_change_tcp(flow, flags, false) : may_change_other(flow, flags, false, now)))
		return;
	original = entry_at(flow, DIRECTION_ORIGINAL);
	if (!original)
		return;
	flow->state = original->state;
	flow->fins = original->fins;
}

/* Deletes an entry of this flow, if it still belongs to it. */
static __always_inline void delete_entry(const struct flow *flow, u32 direction)
{
	struct flow_key key = entry_key(flow, direction);

	if (entry_of(flow, &key))
		flows.delete(&key);
}

/* Makes this CPU the only one that decides about the entry at this key; NULL: another CPU does. A
 * free key belongs to the CPU that inserts its entry first. A key that is taken over from another
 * flow needs this lock: otherwise two CPUs could both take it, or one could delete what the other
 * has just written. This never waits: there are other ports to try, and the agent deletes entries
 * that are left over (flow_gc.py).
 *
 * Linux before v5.12 has no atomic operation that returns a value (BPF_FETCH), so this adds first
 * and reads afterwards. If several CPUs add at once, each may read more than 1, and none gets the
 * lock; two never do. */
static __always_inline struct port_slot *try_lock_key(const struct flow_key *key)
{
	u32 index = (key->first.port ^ key->second.port) % PORT_SLOTS;
	struct port_slot *slot = port_slots.lookup(&index);

	if (!slot)
		return NULL;
	__sync_fetch_and_add(&slot->lockers, 1);
	if (*(volatile u32 *)&slot->lockers == 1)
		return slot;
	__sync_fetch_and_add(&slot->lockers, -1);
	return NULL;
}

static __always_inline void unlock_key(struct port_slot *slot)
{
	__sync_fetch_and_add(&slot->lockers, -1);
}

/* hash of a backend and a port of the node -> until when the port is in doubt. Two that have the
 * same hash share a place, so a port may seem to be in doubt that is not: there are others to try.
 */
BPF_TABLE("array", u32, struct doubts, doubtful_ports, 64);

static __always_inline u32 hash_of_backend(const struct flow *flow)
{
	return hash_words((const u32 *)&flow->backend, sizeof(struct target) / sizeof(u32));
}

static __always_inline u32 *doubt_of(u32 backend, __be16 port)
{
	u32 hash = hash_end(hash_word(backend, port), sizeof(struct target) + sizeof(u32));
	u32 index = hash / DOUBTS % DOUBTFUL_PORTS;
	struct doubts *doubts = doubtful_ports.lookup(&index);

	return doubts ? &doubts->until[hash % DOUBTS] : NULL;
}

static __always_inline u32 seconds_of(u64 time)
{
	return time / SECOND;
}

/* Whether a backend (hash_of_backend()) may still send to an earlier flow with this port of the
 * node. */
static __always_inline bool is_in_doubt(u32 backend, __be16 port, u64 now)
{
	u32 *until = doubt_of(backend, port);

	return until && *until > seconds_of(now);
}

/* Marks the port of the node of a flow that is given up, if the backend may still send to it: until
 * a datagram is too old to be answered, or for the time after which conntrack forgets the end of a
 * connection. What the backend sends meanwhile goes to no client. */
static __always_inline void leave_in_doubt(const struct flow *flow, u64 now)
{
	u64 end = now + DOUBT_SECONDS * SECOND;
	u32 backend;
	u32 *until;

	if (!has_snat(flow) || !may_be_answered(flow, now))
		return;
	if (flow->client.protocol == IPPROTO_UDP)
		end = flow->last_used + timeout_of(flow);
	backend = hash_of_backend(flow);
	until = doubt_of(backend, flow->snat_port);
	if (until && !is_in_doubt(backend, flow->snat_port, end)) /* no later mark is set */
		*until = seconds_of(end) + 1;
}

/* Deletes the entries that match the replies of a flow. */
static __always_inline void release_replies(const struct flow *flow)
{
	struct port_slot *slot;
	struct flow_key key;

	if (has_snat(flow)) {
		key = snat_reply_key(flow);
		slot = try_lock_key(&key);
		if (slot) {
			delete_entry(flow, DIRECTION_SNAT_REPLY);
			unlock_key(slot);
		}
	}
	delete_entry(flow, DIRECTION_REPLY);
}

/* Deletes the entries of a flow except this one, which is still read: a deleted element may be
 * reused for another flow at once. */
static __always_inline void delete_other_entries(const struct flow *flow)
{
	if (flow->direction != DIRECTION_SNAT_REPLY && has_snat(flow))
		delete_entry(flow, DIRECTION_SNAT_REPLY);
	if (flow->direction != DIRECTION_REPLY)
		delete_entry(flow, DIRECTION_REPLY);
	if (flow->direction != DIRECTION_ORIGINAL)
		delete_entry(flow, DIRECTION_ORIGINAL);
}

/* Deletes a flow, given its original entry. That entry is deleted last, since it leads to the
 * others. */
static __always_inline void delete_flow(const struct flow *flow, u64 now)
{
	leave_in_doubt(flow, now);
	release_replies(flow);
	delete_entry(flow, DIRECTION_ORIGINAL);
}

/* Returns to the program for known flows. `flags`: JUDGED if the packet has updated its flow
 * already. */
static __always_inline int resume(struct __sk_buff *skb, struct scratch *s, u32 tail, u32 flags)
{
	s->resumed = JUST_WRITTEN | flags;
	tails.call(skb, tail);
	s->resumed = 0;
	return finish(TC_ACT_SHOT, NOT_REWRITTEN);
}

/* The flags that resume() has set; 0 if the packet comes from a device. */
static __always_inline u32 take_resumed(struct scratch *s)
{
	u32 flags = s->resumed;

	s->resumed = 0;
	return flags;
}

/* The flow exists now: counts it, and returns to the program for known flows. */
static __always_inline int resume_new(struct __sk_buff *skb, struct scratch *s)
{
	count(NEW_FLOW);
	account_flow(&s->flow);
	return resume(skb, s, s->flow.host_device ? TAIL_HOST : TAIL_INGRESS, JUDGED);
}

/* What to do with a packet of a known flow at ingress. */
struct translation {
	struct tuple to_stack;  /* if it takes the stack */
	struct tuple to_device; /* if it is redirected to the next device */
	struct flow *flow;      /* the entry that matched */
	u64 now;
	u32 host_device;  /* not 0: for this node, as if it arrived on this device */
	u8 path;          /* enum flow_path */
	bool masqueraded; /* to be marked in the stack, even if nothing else changes */
	u8 restart;       /* enum restart: the flow may be over */
	bool reply;       /* sent by the backend */
	bool for_bridge;  /* the bridge's program handles it */
	bool unjudged;    /* tc_judge has to see the packet first */
	u32 port_of;      /* in: the bridge, if the packet is at a port of one; otherwise 0 */
	u32 pod_device;   /* in: the device, if it is that of a single pod; otherwise 0 */
	u32 arrival;      /* in: the device that the packet arrived on */
};

/* Translates a packet of the client. */
static __always_inline void translate_original(const struct flow *flow, struct translation *s)
{
	s->to_stack.to = flow->backend;
	s->to_stack.from.port = flow->client_port;
	s->to_device = s->to_stack;
	if (has_snat(flow)) {
		s->to_device.from.address = flow->snat;
		s->to_device.from.port = flow->snat_port;
	}
}

/* Translates a packet of the backend. False: it is for the client already, and changes at egress or
 * (begins_direct()) not at all, or it is for a client of conntrack, which has the port that the
 * node's socket has given up. */
static __always_inline bool translate_reply(const struct tuple *t, const struct flow *flow,
					    struct translation *s)
{
	if (has_snat(flow) && same_address(&t->to.address, &flow->snat) &&
	    t->to.port == flow->snat_port) {
		s->to_stack.to = flow->client;
		s->to_stack.to.port = flow->client_port;
	} else if ((flow->fins & FIN_DIRECT) ||
		   (flow->host_device ? has_snat(flow) : flow->path == PATH_STACK)) {
		return false;
	}
	s->to_device.from = flow->frontend;
	s->to_device.to = flow->client;
	if (flow->host_device)
		s->to_stack = s->to_device;
	s->host_device = flow->host_device;
	return true;
}

/* Whether a datagram, which is neither an original one nor a reply, is the first that a pod sends
 * to the backend's own address since its last one to the Service. Replies to both look alike, and
 * are taken for replies to the last datagram: the kernel may have given the port of a closed socket
 * to the next one (tc_recheck). Only on the pod's own device, which the reply entry holds (see
 * leaves_elsewhere()): others could forge it, and it is no translated datagram of the flow. Not
 * with SNAT, where such a datagram would need another entry than the flow's. */
static __always_inline bool begins_direct(const struct flow *flow, u32 flags,
					  const struct translation *s)
{
	return flow->direction == DIRECTION_REPLY && flow->client.protocol == IPPROTO_UDP &&
	       !has_snat(flow) && s->pod_device && flow->out.ifindex == s->pod_device &&
	       !(flow->fins & FIN_DIRECT) && !(flags & JUST_WRITTEN);
}

/* Whether packets of this flow that come in by this device leave it other than by the stack. */
static __always_inline bool is_redirected_from(const struct flow *flow, u32 ifindex)
{
	return flow->host_device ? flow->host_device != ifindex : flow->path != PATH_STACK;
}

/* Translates a packet at ingress, into `s`. False: it belongs to no flow of ours, or has to pass
 * unchanged, or (s->restart) its flow has to be rechecked or begun again, or (s->unjudged) it is
 * not an ordinary one, or (s->for_bridge) it bypasses the stack: a packet that is redirected at a
 * port would bypass the rules of the bridge, which does not learn its sender's MAC address then. */
static __always_inline bool translate_in(struct tuple *t, const struct packet *p, u32 flags,
					 struct translation *s)
{
	struct flow *flow = flow_between(t);
	u64 now = now_ns();
	bool reply, idle;

	if (!flow)
		return false;
	reply = !is_original(t, flow);
	idle = expired(flow, now);
	if (reply && !is_reply(t, flow)) {
		if (!idle && begins_direct(flow, flags, s))
			s->restart = RESTART_CHECK;
		return false;
	}
	if (idle && !(flags & JUST_WRITTEN)) {
		if (!(flags & FROM_ICMP_ERROR))
			s->restart = RESTART_CHECK;
		if (!(flags & FROM_ICMP_ERROR) || is_over(flow, now))
			return false;
	}
	/* The entry may still be expired here, if another one of the flow is not: for an ICMP
	 * error, or a packet whose flow tc_recheck has found to be live. */
	s->to_stack = *t;
	s->masqueraded = has_snat(flow) && !(reply && idle);
	if (!reply) {
		s->restart = check_restart(flow, flags, now);
		if (s->restart) {
			s->masqueraded = false;
			return false;
		}
	}
	if (s->port_of && is_redirected_from(flow, s->port_of)) {
		s->for_bridge = true;
		return false;
	}
	if (!reply) {
		translate_original(flow, s);
	} else if (!translate_reply(t, flow, s)) {
		return false;
	}
	s->path = flow->path;
	s->flow = flow;
	s->now = now;
	s->reply = reply;
	s->unjudged = !update_flow(flow, p, flags, reply, now, s->arrival);
	return !s->unjudged;
}

/* Whether a packet came in by another device than earlier ones. That may be gone by now: a pod's,
 * or a port of a bridge that needs no program any more. */
static __always_inline bool is_elsewhere(u32 arrival, u32 earlier)
{
	struct device *before = device_at(earlier);

	return before &&
	       routing_ifindex(device_at(arrival), arrival) != routing_ifindex(before, earlier);
}

/* Whether a packet to the backend that leaves the stack came in where the client's packets may.
 * Others may forge its address. */
static __always_inline bool is_from_client(const struct flow *reply_entry, u32 arrival)
{
	struct device *in = device_at(arrival);
	struct flow *original;

	/* Sent by this node, or (most packets) by the device that leaves_elsewhere() compares. */
	if (!arrival || routing_ifindex(in, arrival) == reply_entry->out.ifindex)
		return true;
	original = entry_at(reply_entry, DIRECTION_ORIGINAL);
	if (!original)
		return true;
	if (!original->arrival) /* the client is this node */
		return false;
	return !is_elsewhere(arrival, original->arrival) ||
	       (is_exchangeable(in) && is_exchangeable(device_at(original->arrival)));
}

/* Whether this SYN begins a connection that is not part of the flow: the client connects to the
 * backend directly, from a port that it used through a Service before. A SYN to the Service goes to
 * the connection's backend (check_restart()), and the client's own entry remembers its number. The
 * SYN may be forged: only the backend's answer ends the flow (answers_direct()). */
static __always_inline bool is_direct_connection(const struct flow *flow, const struct packet *p,
						 u32 flags)
{
	struct flow *original;

	if (flow->client.protocol != IPPROTO_TCP || (flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	original = entry_at(flow, DIRECTION_ORIGINAL);
	return !original || (is_ending(original) && original->syn != p->tcp.next);
}

/* Whether a reply is leaving by another device than the client's packets came in by. The reply
 * entry of a flow in the stack holds that device, and the next hop of its replies once tc_reroute
 * has looked it up. */
static __always_inline bool leaves_elsewhere(const struct flow *reply_entry, u32 ifindex)
{
	return reply_entry->out.ifindex && reply_entry->out.ifindex != ifindex;
}

enum egress_result {
	EGRESS_UNKNOWN = 0,    /* no flow of ours */
	EGRESS_UNCHANGED = 1,  /* of a flow of ours, but already correct */
	EGRESS_HOST_FLOW = 2,  /* sent by this node, and it has a flow */
	EGRESS_UNJUDGED = 3,   /* tc_judge has to see it first */
	EGRESS_REPLY = 4,      /* gets the frontend's address */
	EGRESS_MASQUERADE = 5, /* gets the node's address */
	EGRESS_REROUTE = 6,    /* EGRESS_REPLY, but it may have to leave by another device */
};

static __always_inline bool is_rewrite(enum egress_result result)
{
	return result >= EGRESS_REPLY;
}

/* Translates a packet at egress of this device, into `new`. `arrival`: the device that it arrived
 * on. */
static __always_inline enum egress_result translate_out(struct tuple *t, const struct packet *p,
							u32 flags, u32 bytes, u32 ifindex,
							u32 arrival, struct tuple *new,
							bool *masqueraded)
{
	struct flow *flow = flow_between(t);
	u64 now = now_ns();
	bool reply;

	*new = *t;
	if (!flow)
		return EGRESS_UNKNOWN;
	reply = is_reply(t, flow) && same_address(&t->to.address, &flow->client.address);
	if (!reply && !is_translated_original(t, flow))
		return flow->host_device && is_original(t, flow) ? EGRESS_HOST_FLOW
								 : EGRESS_UNKNOWN;
	if (is_over(flow, now) || (flow->fins & FIN_DIRECT)) /* begins_direct() */
		return EGRESS_UNKNOWN;
	if (!reply && !is_from_client(flow, arrival))
		return EGRESS_UNKNOWN;
	if (!reply && is_direct_connection(flow, p, flags)) {
		flow->syn = p->tcp.next;
		return EGRESS_UNKNOWN;
	}
	if (reply) {
		*masqueraded = has_snat(flow);
		if (!update_flow(flow, p, flags, true, now, arrival))
			return EGRESS_UNJUDGED;
		if (bytes && !has_snat(flow) &&
		    flow->path == PATH_STACK) /* not counted at ingress */
			account_bytes(flow, bytes, flags, true);
		new->from = flow->frontend;
		new->to.port = flow->client.port;
		return leaves_elsewhere(flow, ifindex) ? EGRESS_REROUTE : EGRESS_REPLY;
	}
	if (!same_address(&t->from.address, &flow->client.address))
		return EGRESS_UNCHANGED; /* redirected: it has the node's address */
	update_leaving(flow, flags, now);
	if (!has_snat(flow))
		return EGRESS_UNCHANGED;
	*masqueraded = true;
	new->from.address = flow->snat;
	new->from.port = flow->snat_port;
	return EGRESS_MASQUERADE;
}

#define LEAST_MTU 1280 /* of every link with IPv6 */

/* Whether the sender, rather than this node, has to fragment this packet if it is too long. */
static __always_inline bool dont_fragment(struct __sk_buff *skb, const struct packet *p)
{
	__be16 fragment = 0;

	if (p->v6)
		return true;
	bpf_skb_load_bytes(skb, p->l3 + IP4_FRAGMENT, &fragment, sizeof(fragment));
	return fragment & __builtin_bswap16(IP_DF);
}

/* Tells the sender of a packet that is too long the path MTU. */
static __always_inline int send_path_mtu(struct __sk_buff *skb, struct scratch *s, u32 mtu)
{
	s->reason = TOO_LONG;
	s->mtu = mtu;
	return go(skb, TAIL_REFUSE);
}

static __always_inline int forward_known(struct __sk_buff *skb, struct scratch *s,
					 const struct device *device, struct translation *result)
{
	struct tuple *new = &result->to_stack;
	struct packet *p = &s->packet;
	struct device *to = NULL;
	bool bypasses = result->path != PATH_STACK && !result->host_device;
	int action = TC_ACT_UNSPEC;
	u32 mtu = 0, l3 = p->l3;

	if (bypasses)
		to = next_hop_of_flow(skb, p, &result->to_device, &result->flow->out, &s->hop,
				      result->now);
	if (to && needs_stack(device, to)) /* the route has changed, or replies come another way */
		to = NULL;
	if (!to && bypasses)
		mtu = exceeded_mtu(&s->hop);
	/* The stack could tell the sender, but conntrack may call its error invalid. */
	if (mtu && p->fragment != LATER && mtu < wire_length(skb, p) && dont_fragment(skb, p))
		return send_path_mtu(skb, s, mtu);
	if (to)
		new = &result->to_device;
	account_bytes(result->flow, skb->len - p->l3, p->tcp_flags, result->reply);
	if (rewrite(skb, p, new, to ? p->ttl - 1 : p->ttl)) /* forwarding's only other duty */
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	if (to)
		action = redirect_packet(skb, device, to, &s->hop);
	else if (result->host_device)
		action = deliver_to_host(skb, device, result->host_device, &l3);
	else if (result->masqueraded)
		mark_masqueraded(skb, true);
	return finish_rewrite(skb, s, new, action, to ? ETH_HLEN : l3);
}

/* A reply has left the stack by another device than its client's packets came in by (or an ICMP
 * error about one). The stack routes by the source address, which is the backend's until tc_egress
 * has written the frontend's. Where rules apply to the addresses of pods (AWS VPC CNI: `from POD
 * lookup N`), that is a device on which no router accepts the frontend's. So the FIB is asked again
 * with the addresses of the packet as it is now.
 *
 * It happens here because netfilter has seen the reply by now. Conntrack would call the client's
 * next packet INVALID if the reply bypassed the stack. */
int tc_reroute(struct __sk_buff *skb)
{
	struct device *device = device_at(skb->ifindex), *to;
	struct scratch *s = get_scratch();
	int action = TC_ACT_UNSPEC;
	struct tuple tuple, out;
	struct flow *flow;

	if (!s || !device)
		return TC_ACT_UNSPEC;
	tuple = s->packet.tuple;
	if (!tuple.from.protocol) /* an ICMP error */
		tuple = reversed(&s->inner.tuple);
	flow = flow_between(&tuple);
	if (!flow)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	out.from = flow->frontend;
	out.to = flow->client;
	to = next_hop_of_flow(skb, &s->packet, &out, &flow->out, &s->hop, now_ns());
	if (to && (s->hop.ifindex == skb->ifindex || (to->flags & DEVICE_NBMA)))
		to = NULL;
	s->hop.resolved = false; /* bpf_redirect_peer() works at ingress only */
	if (to)
		action = redirect_packet(skb, device, to, &s->hop);
	return finish_rewrite(skb, s, &out, action, to ? ETH_HLEN : s->packet.l3);
}
