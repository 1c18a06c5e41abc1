/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The entries of a flow (flow.h) in the map: finds, locks and deletes them, and notes ports that a
 * backend may still send to.
 */
#pragma once

#include "types.h"
#include "maps.h"
#include "lib/hash.h"
#include "tc/flow.h"

/* slot of a flow's key -> the lock for taking that key over: try_lock_key(); and a filter of
 * another map: filter_of(). Only programs use it. */
BPF_TABLE("array", u32, struct port_slot, port_slots, PORT_SLOTS);

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

/* Deletes an entry of this flow, if it still belongs to it. */
static __always_inline void delete_entry(const struct flow *flow, u32 direction)
{
	struct flow_key key = entry_key(flow, direction);

	if (entry_of(flow, &key))
		flows.delete(&key);
}

/* Makes this CPU the only one that decides about the entry at this key; NULL: another CPU does. A
 * free key for client' belongs to the CPU that inserts its entry first. A port of the node, and a
 * key that is taken over from another flow, need this lock: otherwise two CPUs could both take it,
 * or one could delete what the other has just written. This never waits: there are other ports to
 * try, and the agent deletes entries that are left over (flow_gc.py).
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

/* The key is secret. Without one, a tenant could choose flows whose doubts share their places with
 * the ports of another tenant's backend. */
static __always_inline u32 hash_of_backend(const struct flow *flow)
{
	const u32 *words = (const u32 *)&flow->backend;
	u32 zero = 0, keyed[sizeof(struct target) / sizeof(u32)];
	struct doubts *secret = doubtful_ports.lookup(&zero);

	if (!secret)
		return 0;
#pragma unroll
	for (int i = 0; i < sizeof(keyed) / sizeof(u32); i++)
		keyed[i] = words[i] ^ secret->until[i];
	return hash_words(keyed, sizeof(keyed) / sizeof(u32));
}

static __always_inline u32 *doubt_of(u32 backend, __be16 port)
{
	u32 hash = hash_end(hash_word(backend, port), sizeof(struct target) + sizeof(u32));
	u32 index = 1 + hash / DOUBTS % (DOUBTFUL_PORTS - 1);
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

/* Whether both sides of a TCP connection have acknowledged the other's FIN. A side that has not
 * repeats its own, and maybe the data before it, so it needs the connection. */
static __always_inline bool is_acknowledged(const struct flow *original, const struct flow *reply)
{
	return original->seen.tcp.ack == reply->seen.tcp.next &&
	       reply->seen.tcp.ack == original->seen.tcp.next;
}

/* Whether the backend may still send to a flow that is given up. It has no connection of this flow
 * before the client has completed the handshake. A datagram may be answered at any time. */
static __always_inline bool may_be_answered(const struct flow *flow, const struct flow *reply,
					    u64 now)
{
	if (expired(flow, now))
		return false;
	return flow->client.protocol == IPPROTO_UDP || (flow->fins & FIN_REPLACED) ||
	       !(is_half_open(flow) ||
		 (both_closed(flow) && (!reply || is_acknowledged(flow, reply))));
}

/* Marks the port of the node of a flow that is given up, if the backend may still send to it: until
 * a datagram is too old to be answered, or for the time after which conntrack forgets the end of a
 * connection. What the backend sends meanwhile goes to no client. */
static __always_inline void leave_in_doubt(const struct flow *flow, u64 now)
{
	u64 end = now + DOUBT_SECONDS * SECOND;
	struct flow *reply;
	u32 backend;
	u32 *until;

	if (!has_snat(flow))
		return;
	reply = entry_at(flow, DIRECTION_SNAT_REPLY);
	if (reply && flow->client.protocol == IPPROTO_UDP &&
	    reply->last_used > flow->last_used) /* it sends for longer than its client */
		flow = reply;
	if (!may_be_answered(flow, reply, now))
		return;
	if (flow->client.protocol == IPPROTO_UDP)
		end = flow->last_used + timeout_of(flow);
	backend = hash_of_backend(flow);
	until = doubt_of(backend, flow->snat_port);
	if (until && !is_in_doubt(backend, flow->snat_port, end)) /* no later mark is set */
		*until = seconds_of(end) + 1;
}

/* Deletes an entry. False: another CPU may just be taking its key over for another flow. */
static __always_inline bool release_entry(const struct flow *flow, u32 direction)
{
	struct flow_key key = entry_key(flow, direction);
	struct port_slot *slot = try_lock_key(&key);

	if (!slot)
		return false;
	delete_entry(flow, direction);
	unlock_key(slot);
	return true;
}

/* Deletes the entries that match the replies of a flow. */
static __always_inline void release_replies(const struct flow *flow)
{
	if (has_snat(flow))
		release_entry(flow, DIRECTION_SNAT_REPLY);
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
