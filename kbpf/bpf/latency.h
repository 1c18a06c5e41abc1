/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Histograms of latencies by Service, of TCP sockets that connect() has directed to a backend: how
 * long the handshake took, and the smoothed round-trip time at the end. Only sock_ops() calls these
 * functions, which is attached only with --accounting full.
 */
#pragma once

#include "types.h"
#include "lib/compat.h"

/* Service -> its histograms. Written by the programs; the agent deletes those of removed Services
 * (map_metrics.py). Full: further Services are not measured. */
BPF_F_TABLE("hash", u32, struct latencies, latencies, 64, BPF_F_NO_PREALLOC);

/* 0 -> all zeros, the initial value of an element of `latencies`. */
BPF_TABLE("array", u32, struct latencies, zero_latencies, 1);

/* socket -> when it sent its first SYN (ns, CLOCK_MONOTONIC), until the handshake ends. Stored with
 * the socket. */
BPF_SK_STORAGE(connect_times, u64);

static __always_inline struct latencies *latencies_of(u32 service)
{
	struct latencies *entry = latencies.lookup(&service), *zeros;
	u32 zero = 0;

	if (entry || !service)
		return entry;
	zeros = zero_latencies.lookup(&zero);
	if (!zeros)
		return NULL;
	latencies.insert(&service, zeros); /* fails if another CPU was first */
	return latencies.lookup(&service);
}

/* The index of the first bucket whose upper bound is not exceeded. The bound of bucket i is
 * 2^(i - LATENCY_EXPONENT) seconds. */
static __always_inline u64 latency_bucket(u64 ns)
{
	u64 scaled = ns << LATENCY_EXPONENT;
	/* in units of the first bound, rounded down, and one below if it is exactly a bound */
	u64 units = scaled ? (scaled - 1) / 1000000000 : 0;

	/* the number of bits; may be LATENCY_BUCKETS or more */
	return units ? bpf_log2l(units) : 0;
}

static __always_inline void observe(struct latency *latency, u64 ns)
{
	u64 bucket = latency_bucket(ns);

	barrier_var(bucket);
	if (bucket >= LATENCY_BUCKETS)
		bucket = LATENCY_BUCKETS - 1;
	__sync_fetch_and_add(&latency->count[bucket], 1);
	__sync_fetch_and_add(&latency->sum, ns);
}

static __always_inline void start_connect_timer(struct bpf_sock *sk)
{
	u64 *started = connect_times.sk_storage_get(sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);

	if (started)
		*started = bpf_ktime_get_ns();
}

static __always_inline void stop_connect_timer(struct bpf_sock *sk, u32 service)
{
	u64 *started = connect_times.sk_storage_get(sk, NULL, 0);
	struct latencies *histograms;

	if (!started)
		return;
	histograms = latencies_of(service);
	if (histograms)
		observe(&histograms->connect, bpf_ktime_get_ns() - *started);
	connect_times.sk_storage_delete(sk);
}
