/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Counts connections by Service and backend when they begin. The socket hooks add what the kernel
 * knows at the end of a TCP connection (sock.c); the packet path counts bytes as it forwards
 * packets (account_flows.h).
 */
#pragma once

#include "lookup.h"

static __always_inline bool is_accounting(u32 what)
{
	return config_flags() & what;
}

/* A backend id that means all backends of a Service. The agent writes such an entry when a
 * namespace exceeds its share of `counts`. From then on, connections to backends that have no entry
 * are counted there. */
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
	counts.insert(&key, zeros); /* fails if another CPU was first; its entry serves as well */
	return counts.lookup(&key);
}

static __always_inline void add(u64 *sum, u64 more)
{
	__sync_fetch_and_add(sum, more);
}

/* Counts a new connection or datagram flow: one that got a backend, or that was refused or
 * dropped. */
static __always_inline void account_begin(const struct choice *c, enum verdict v)
{
	struct counts *totals;

	if (v == PASS || !is_accounting(CONFIG_ACCOUNTING))
		return;
	totals = counts_of(c->service, v == TRANSLATE ? c->backend_id : 0);
	if (!totals)
		return;
	if (v == TRANSLATE)
		add(&totals->opened, 1);
	else
		add(c->reason == NOT_ALLOWED ? &totals->not_allowed : &totals->no_endpoint, 1);
}

/* Counts a failure of a backend. */
static __always_inline void account_failure(struct counts *totals, enum reason reason)
{
	if (reason == BACKEND_REFUSED)
		add(&totals->refused, 1);
	else if (reason == BACKEND_UNANSWERED)
		add(&totals->unanswered, 1);
	else
		add(&totals->reset, 1);
}
