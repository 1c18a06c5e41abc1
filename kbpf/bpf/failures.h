/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Records failures: connections that got no backend, or whose backend refused, did not answer, or
 * reset them. Nothing here runs for a connection that succeeds.
 */
#pragma once

#include "account.h"
#include "monitor.h"
#include "lib/addr.h"
#include "lib/hash.h"

/* The words of struct event from `frontend` on, which say what failed. */
#define FAILURE_WORDS 13

/* (client, hash of what failed) -> the failure, how often, and since when. Written by the programs;
 * read by `kbpf inspect failures`. A cgroup has 16 elements, and so has a pod's own device for its
 * packets; the clients of all other packets together have 1,024. So a pod overwrites only its own
 * failures, and a flood from outside no pod's. Another client by packets has 64 of these 1,024,
 * which it shares with a sixteenth of the others. Full: the least recently used is evicted. */
BPF_TABLE("lru_hash", struct client_slot, struct failure, failures, 64);

static __always_inline bool is_same_failure(const struct event *a, const struct event *b)
{
	return a->reason == b->reason && a->service == b->service &&
	       a->backend_id == b->backend_id && same_target(&a->frontend, &b->frontend) &&
	       same_address(&a->client.address, &b->client.address);
}

/* The number of the element for a failure of a client that shares its elements with others. `key`:
 * of its owner. */
static __always_inline u32 number_of_packet(const struct address *key, const struct address *client,
					    u32 hash)
{
	u32 group = hash_words(key->word, CLIENT_WORDS);

	hash = hash_word(hash, client->word[1]);
	hash = hash_word(hash, client->word[3]);
	return group % PACKET_CLIENTS * PACKET_FAILURES_PER_CLIENT +
	       hash % PACKET_FAILURES_PER_CLIENT;
}

/* Adds a failure to those of its client. `failure`: all fields but the times and the count.
 * `owner`: if it has no cgroup. */
static __always_inline void record_failure(struct failure *failure, u32 owner)
{
	struct address key = key_of_owner(owner, &failure->last.client.address);
	struct event *last = &failure->last;
	struct client_slot slot = {};
	struct failure *known;
	u32 hash = hash_words((const u32 *)&last->frontend, FAILURE_WORDS);

	slot.owner.word[0] = (u32)last->cgroup;
	slot.owner.word[1] = last->cgroup >> 32;
	slot.number = hash % FAILURES_PER_CLIENT;
	if (!last->cgroup && is_device(owner))
		slot.owner = key;
	else if (!last->cgroup)
		slot.number = number_of_packet(&key, &last->client.address, hash);
	failure->first = last->time = bpf_ktime_get_ns();
	failure->count = 1;
	known = failures.lookup(&slot);
	if (known && is_same_failure(&known->last, last)) {
		__sync_fetch_and_add(&known->count, 1);
		known->last.time = last->time;
		known->last.client = last->client;
	} else {
		failures.update(&slot, failure);
	}
}
