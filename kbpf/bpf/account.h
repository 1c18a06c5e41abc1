/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* What connections come to, counted by Service and backend at their beginning and at their end:
 * nothing is paid for what is in between. */
#pragma once

static __always_inline bool is_accounting(u32 what)
{
	return config_flags() & what;
}

/* Instead of a backend: all that a Service has, where the agent has written such an entry since its
 * namespace has more than its share of `counts`. Then no more pairs of the Service are added. */
#define ALL_BACKENDS 0xfffffffe

static __always_inline struct counts *counts_of(u32 service, u32 backend)
{
	struct count_key key = {.service = service, .backend = backend};
	struct counts *entry = counts.lookup(&key), *zeros;
	u32 zero = 0;

	if (entry || !service)
		return entry;
	key.backend = ALL_BACKENDS;
	entry = counts.lookup(&key);
	if (entry)
		return entry;
	key.backend = backend;
	zeros = zero_counts.lookup(&zero);
	if (!zeros)
		return NULL;
	counts.insert(&key, zeros);
	return counts.lookup(&key);
}

static __always_inline void add(u64 *sum, u64 more)
{
	__sync_fetch_and_add(sum, more);
}

/* A connection, or a flow of datagrams, was given a backend, or none. */
static __always_inline void account_begin(const struct choice *c, enum verdict v)
{
	struct counts *totals;

	if (v == PASS || !is_accounting(CONFIG_ACCOUNTING))
		return;
	totals = counts_of(c->service, v == TRANSLATE ? c->backend_id : 0);
	if (totals)
		add(v == TRANSLATE ? &totals->begun : &totals->refused, 1);
}
