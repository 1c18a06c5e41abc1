/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Records failures: connections that got no backend, or whose backend refused, did not answer, or
 * reset them. Nothing here runs for a connection that succeeds.
 */
#pragma once

#include "account.h"
#include "lib/hash.h"

/* The words of struct failure from `frontend` on, which say what failed. */
#define FAILURE_WORDS 13

/* (client, hash of what failed) -> the failure, how often, and since when. Written by the programs;
 * read by `kbpf inspect failures`. A cgroup has 16 elements, and the clients of all packets
 * together have 1,024, so a container overwrites only its own failures, and a flood from outside no
 * container's. Full: the least recently used is evicted. */
BPF_TABLE("lru_hash", struct client_slot, struct failure, failures, 64);

static __always_inline bool is_same_failure(const struct failure *a, const struct failure *b)
{
	return a->reason == b->reason && a->service == b->service &&
	       a->backend_id == b->backend_id && same_target(&a->frontend, &b->frontend) &&
	       same_address(&a->client.address, &b->client.address);
}

/* Adds a failure to those of its client. `failure`: all fields but the times and the count. */
static __always_inline void record_failure(struct failure *failure)
{
	struct client_slot slot = {};
	struct failure *known;
	u32 hash = hash_words((const u32 *)&failure->frontend, FAILURE_WORDS);

	slot.owner.word[0] = (u32)failure->cgroup;
	slot.owner.word[1] = failure->cgroup >> 32;
	if (failure->cgroup) {
		slot.number = hash % FAILURES_PER_CLIENT;
	} else {
		hash = hash_word(hash, failure->client.address.word[1]);
		hash = hash_word(hash, failure->client.address.word[3]);
		slot.number = hash % PACKET_FAILURES;
	}
	failure->first = failure->last = bpf_ktime_get_ns();
	failure->count = 1;
	known = failures.lookup(&slot);
	if (known && is_same_failure(known, failure)) {
		__sync_fetch_and_add(&known->count, 1);
		known->last = failure->last;
		known->client = failure->client;
	} else {
		failures.update(&slot, failure);
	}
}
