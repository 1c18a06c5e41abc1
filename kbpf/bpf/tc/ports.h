/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Claims the ports of a new flow, and writes its entries. */
#pragma once

#include "types.h"
#include "lib/compat.h"
#include "lib/hash.h"
#include "tc/devices.h"
#include "tc/entries.h"
#include "tc/flow.h"
#include "tc/known.h"
#include "tc/scratch.h"
#include "tc/tails.h"

#define REPLY_PORT_TRIES 8 /* tries to find a free port of client' */
#define FRESH_TRIES 8      /* of SNAT_TRIES, before ports in TIME_WAIT at a backend are used */

/* Writes the port of client' into the entry for replies to the node, if there is SNAT. In place: no
 * packet uses it before the original entry exists. False: it belongs to another flow by now. */
static __always_inline bool write_client_port(const struct flow *flow)
{
	struct flow_key key = snat_reply_key(flow);
	struct flow *entry;

	if (!has_snat(flow))
		return true;
	entry = flows.lookup(&key);
	if (!entry || !same_target(&entry->client, &flow->client) ||
	    !same_target(&entry->frontend, &flow->frontend))
		return false;
	entry->client_port = flow->client_port;
	return true;
}

/* Whether a flow gives up its port to another, judged by one of its entries. The port of a
 * connection that the backend may still have stays reserved, and so does that of a datagram that it
 * may still answer: the answer would reach the wrong client. When ports are short, a handshake
 * gives up its port, since it is no connection yet, and what the backend sends for an older one
 * will not reach the new client (judge_answer()). If it has sent such a thing already
 * (FIN_RESERVED), the port is taken a second later, and only if there is no other: forged SYNs can
 * set that mark. */
static __always_inline bool entry_frees_port(const struct flow *entry, u64 now, u32 search,
					     bool fresh)
{
	u64 quiet = elapsed(entry->last_used, now);

	if (expired(entry, now))
		return true;
	if (entry->client.protocol == IPPROTO_UDP || (entry->fins & FIN_REPLACED))
		return false;
	if (is_half_open(entry) && (entry->fins & FIN_RESERVED))
		return quiet > SECOND && search == SEARCH_LAST;
	if (is_half_open(entry))
		return (quiet > SECOND && search > SEARCH_RANDOM) || search == SEARCH_LAST;
	if (both_closed(entry))
		return !fresh || !(entry->fins & FIN_BACKEND_FIRST);
	return entry->state == STATE_CLOSED && /* by the client's RST */
	       quiet > RESET_SECONDS * SECOND;
}

/* The same as entry_frees_port() for the whole flow: its client may have sent after its backend. */
static __always_inline bool flow_frees_port(const struct flow *reply_entry, u64 now, u32 search,
					    bool fresh)
{
	struct flow *original;

	if (!entry_frees_port(reply_entry, now, search, fresh))
		return false;
	original = entry_at(reply_entry, DIRECTION_ORIGINAL);
	return !original || (entry_frees_port(original, now, search, fresh) &&
			     (!both_closed(original) || expired(original, now) ||
			      is_acknowledged(original, reply_entry)));
}

/* Inserts the entry that matches replies to client'. Any result other than NEW_FLOW: it has none,
 * and NO_SNAT_PORT that all ports that were tried belong to other flows. If another flow of this
 * client to the same backend (through another frontend) has the key, client' gets another port, and
 * so it does without SNAT if the backend has an older connection with this one (`other_port`). A
 * handshake or reset flow gives up its key as it gives up a port of the node, or whoever forges
 * SYNs of a client could take all of the client's ports. While coexisting with another data plane
 * the port always changes: its conntrack may hold the client's own port and would translate the
 * replies. The kernel refuses a write (-EBUSY, Linux 5.11 and later) if this CPU was interrupted
 * during another one to the same group of buckets; the next port is most likely in another group.
 */
static __always_inline enum reason claim_reply(struct flow *flow, const struct node *n, u64 now,
					       bool other_port)
{
	u32 size = n->port_high - n->port_low + 1;
	long error = -EEXIST;

	flow->direction = DIRECTION_REPLY;
	for (int i = 0; error && i < REPLY_PORT_TRIES; i++) {
		struct port_slot *slot;
		struct flow *other;
		struct flow_key key;

		if (i || (n->flags & NODE_COEXISTING) || (other_port && !has_snat(flow)))
			flow->client_port =
				__builtin_bswap16(n->port_low + bpf_get_prandom_u32() % size);
		key = reply_key(flow);
		error = flows.insert(&key, flow);
		slot = error ? try_lock_key(&key) : NULL;
		if (!slot)
			continue;
		other = flows.lookup(&key);
		if (!other || is_over(other, now) || both_closed(other) ||
		    (same_target(&other->frontend, &flow->frontend) &&
		     same_target(&other->client, &flow->client) &&
		     (other->state == STATE_NEW || other->client.protocol == IPPROTO_UDP)))
			error = flows.update(&key, flow);
		else if (!expired(other, now) &&
			 flow_frees_port(other, now,
					 i + 1 < REPLY_PORT_TRIES ? SEARCH_RANDOM + 1 : SEARCH_LAST,
					 false)) {
			delete_other_entries(other);
			error = flows.update(&key, flow);
		}
		unlock_key(slot);
	}
	if (!error)
		return flow->client_port == flow->client.port || write_client_port(flow)
			       ? NEW_FLOW
			       : NOT_TRACKED;
	flow->client_port = flow->client.port; /* as in the entry for replies to the node */
	return error == -EEXIST ? NO_SNAT_PORT : NOT_TRACKED;
}

/* The ports of the node that a client may use for one backend: one of every SHARES consecutive
 * ports, selected by a hash of its owner. No client gets more than this share, and two clients have
 * only about one in SHARES of its ports in common. */
struct share {
	u32 low;
	u32 count; /* number of its ports */
	u32 step;  /* a power of two */
	u32 client;
};

static __always_inline struct share share_of(const struct flow *flow, const struct node *n)
{
	struct scratch *scratch = get_scratch();
	struct address owner =
		key_of_owner(scratch ? scratch->owner : OWNER_NETWORK, &flow->client.address);
	u32 size = n->port_high - n->port_low + 1, step = size < SHARED_PORTS ? 1 : SHARES;
	struct share s = {.low = n->port_low, .count = size / step, .step = step};

	/* Words 1 and 3: in the key of a network, device or cgroup one of them is 0. */
	s.client = hash_word(hash_word(HASH_SEED, owner.word[0]), owner.word[1] ^ owner.word[3]);
	return s;
}

static __always_inline __be16 port_at(const struct share *s, u32 index)
{
	u32 chosen = hash_end(hash_word(s->client, index), 3 * sizeof(index)) & (s->step - 1);

	return __builtin_bswap16(s->low + index * s->step + chosen);
}

static __always_inline u32 index_of_port(const struct share *s, __be16 port)
{
	return (u32)(__builtin_bswap16(port) - s->low) / s->step;
}

/* A reply to the port of the node of this flow. The backend may be a machine, and its port the one
 * from which that talks to the node's port: a Service or a socket of the node would lose what it is
 * sent to the client that has its port. */
static __always_inline struct tuple reply_to_node(const struct flow *flow)
{
	struct tuple reply = {.from = flow->backend, .to = flow->client};

	reply.to.address = flow->snat;
	reply.to.port = flow->snat_port;
	return reply;
}

static __always_inline bool is_for_socket(struct __sk_buff *skb, const struct flow *flow)
{
	struct tuple reply = reply_to_node(flow);

	return has_socket(skb, &reply);
}

/* Claims a port of the node for this flow, among those that its client may use; sockets of
 * the node connect from other ports. SEARCH_RANDOM tries flow->snat_port (the client's own port)
 * first, if it is in the share; the others begin there. False: none was found, and the search may
 * continue from flow->snat_port. */
static __always_inline bool claim_node_port(struct __sk_buff *skb, struct flow *flow,
					    const struct node *n, u32 search)
{
	struct share s = share_of(flow, n);
	struct port_slot *slot = NULL;
	struct flow *other = NULL;
	u64 now = flow->last_used;
	struct flow_key key;
	u32 index = index_of_port(&s, flow->snat_port), backend = hash_of_backend(flow);
	bool doubtful, written = false;

	if (search == SEARCH_RANDOM && (index >= s.count || port_at(&s, index) != flow->snat_port))
		index = bpf_get_prandom_u32() % s.count;
	for (int i = 0; i < SNAT_TRIES; i++) {
		flow->snat_port = port_at(&s, index);
		key = snat_reply_key(flow);
		doubtful = is_in_doubt(backend, flow->snat_port, now);
		slot = doubtful ? NULL : try_lock_key(&key);
		if (slot) {
			other = flows.lookup(&key);
			if (!other || flow_frees_port(other, now, search,
						      search == SEARCH_RANDOM && i < FRESH_TRIES))
				break;
			unlock_key(slot);
			slot = NULL;
		}
		index = (search == SEARCH_RANDOM ? bpf_get_prandom_u32() : index + 1) % s.count;
	}
	if (!slot) {
		flow->snat_port = port_at(&s, index);
		return false;
	}
	if (is_for_socket(skb, flow)) {
		if (search != SEARCH_LAST) /* there the reason needs it */
			flow->snat_port = port_at(&s, (index + 1) % s.count);
	} else {
		if (other) /* the rest of the flow that loses its port */
			delete_other_entries(other);
		/* The agent inserts reservations without the lock. */
		written = !(other ? flows.update(&key, flow) : flows.insert(&key, flow));
	}
	unlock_key(slot);
	return written;
}

/* Why the last port of a search failed: it is taken or in doubt, or the map took no entry. */
static __always_inline enum reason no_port_reason(struct __sk_buff *skb, const struct flow *flow)
{
	struct flow_key key = snat_reply_key(flow);

	if (flows.lookup(&key) ||
	    is_in_doubt(hash_of_backend(flow), flow->snat_port, flow->last_used) ||
	    is_for_socket(skb, flow))
		return NO_SNAT_PORT;
	return NOT_TRACKED;
}

/* Claims a port of the node for a new flow, and writes the entry for replies to it: a random port,
 * or one in sequence. Any result other than NEW_FLOW: it has none. */
static __always_inline enum reason claim_port(struct __sk_buff *skb, struct scratch *s,
					      const struct node *n)
{
	struct flow *flow = &s->flow;

	flow->direction = DIRECTION_SNAT_REPLY;
	if (is_loopback(&flow->snat)) /* still ADDRESS_NOT_CHOSEN */
		return NO_SNAT_PORT;
	if (claim_node_port(skb, flow, n, s->search))
		return NEW_FLOW;
	if (s->search == SEARCH_LAST)
		return no_port_reason(skb, flow);
	s->search++;
	tails.call(skb, TAIL_CLAIM);
	return NO_SNAT_PORT;
}

/* A new flow that gets no entries has replaced one of the same client and frontend, whose reply
 * entries are gone (claim_original()). Its original entry must go, too, since another client may
 * get its port. What has a reply entry is of another CPU, which has just begun the same flow. */
static __always_inline void forget_former(const struct flow *flow)
{
	struct flow_key key = original_key(flow);
	struct flow *former = flows.lookup(&key);

	if (former && former->direction == DIRECTION_ORIGINAL && !entry_at(former, DIRECTION_REPLY))
		flows.delete(&key);
}

/* The port that a flow has claimed belongs to others: searches from a random one on. */
static __always_inline int claim_again(struct __sk_buff *skb, struct scratch *s)
{
	struct flow *flow = &s->flow;
	u32 zero = 0, size;
	struct node *n = node.lookup(&zero);

	release_entry(flow, DIRECTION_SNAT_REPLY);
	if (!n || s->search >= SEARCH_LAST) {
		forget_former(flow);
		return drop_flow(flow, NO_SNAT_PORT);
	}
	s->search++;
	size = n->port_high - n->port_low + 1;
	if (size >= SHARED_PORTS)
		size &= -SHARES; /* so that the share has its index */
	flow->snat_port = __builtin_bswap16(n->port_low + bpf_get_prandom_u32() % size);
	return go(skb, TAIL_CLAIM);
}

/* Writes the original entry, the last one of a flow. */
static __always_inline enum reason publish(struct scratch *s, u32 ifindex)
{
	struct flow_key key = original_key(&s->flow);

	s->flow.direction = DIRECTION_ORIGINAL;
	s->flow.syn = s->packet.tcp.next;
	s->flow.seen = s->opening;
	s->flow.arrival = s->flow.host_device ? 0 : ifindex;
	copy_next_hop(&s->flow.out, &s->hop);
	return flows.update(&key, &s->flow) ? NOT_TRACKED : NEW_FLOW;
}

/* Writes the first entry of a new flow with SNAT, which is for replies to the node. A search for a
 * port of the node continues here (`search`). */
int tc_claim(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct node *n = node.lookup(&zero);
	struct scratch *s = get_scratch();
	enum reason reason = NEW_FLOW;

	if (!n || !s)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	if (s->search == SEARCH_NONE) {
		/* Not a next hop: leaves_elsewhere(). */
		s->flow.out.ifindex =
			s->flow.path == PATH_STACK
				? routing_ifindex(device_at(skb->ifindex), skb->ifindex)
				: 0;
		mark_ends(&s->flow);
		s->search = SEARCH_RANDOM;
		if (has_snat(&s->flow) && !(s->begin & BEGIN_OTHER_PORT)) /* or a random one */
			s->flow.snat_port = s->flow.client_port;
	}
	if (has_snat(&s->flow))
		reason = claim_port(skb, s, n);
	if (reason != NEW_FLOW) { /* there is nothing to release */
		forget_former(&s->flow);
		return drop_flow(&s->flow, reason);
	}
	/* The call returns if an agent that does not use conntrack has loaded these. */
	if (has_snat(&s->flow) && (n->flags & NODE_NETFILTER) &&
	    s->flow.client.protocol != IPPROTO_SCTP) {
		s->begin |= BEGIN_CLAIMED;
		tails.call(skb, TAIL_UNCONFIRMED);
	}
	return go(skb, TAIL_PUBLISH);
}

/* Writes the entry for the packets of a new flow in the stack and its replies, and the original
 * one. */
int tc_publish(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct node *n = node.lookup(&zero);
	struct scratch *s = get_scratch();
	struct tuple reply;
	enum reason reason;

	if (!n || !s)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	if (has_snat(&s->flow)) { /* tc_claim is too large for this */
		reply = reply_to_node(&s->flow);
		if (is_frontend_port(reply.to.port) && is_frontend(&reply.to))
			return claim_again(skb, s);
	}
	reason = claim_reply(&s->flow, n, now_ns(), s->begin & BEGIN_OTHER_PORT);
	if (reason == NEW_FLOW)
		reason = publish(s, skb->ifindex);
	report_flow(&s->flow, reason);
	if (reason == NEW_FLOW)
		return resume_new(skb, s);
	release_replies(&s->flow);
	forget_former(&s->flow);
	return finish(TC_ACT_SHOT, reason);
}
