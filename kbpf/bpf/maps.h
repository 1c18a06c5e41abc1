/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The maps that both units or only the socket hooks use; those of the packet path alone are in
 * tc/. For each map: key -> value, which side (agent or programs) writes it and which deletes
 * entries, and what happens when it is full. To add one: docs/contributing.md, "A map".
 *
 * The sizes here only satisfy the compiler; the loader sets the real ones (layout.py). Plain hashes
 * are not preallocated, so unused capacity costs only its buckets.
 *
 * A map that the agent may have to enlarge is found through an array of one map, NAME_outer. The
 * agent fills a larger inner map and replaces the element: programs see the old map or the new one,
 * and both are complete. That costs one lookup in an array, which the kernel inlines.
 */
#pragma once

#include "types.h"

/* The value of this key in an inner map. The element of its array is never missing. */
static __always_inline void *lookup_inner(void *inner, const void *key)
{
	return inner ? bpf_map_lookup_elem(inner, (void *)key) : NULL;
}

/* frontend -> service. Written and deleted by the agent. Full: the agent makes a larger map, or
 * reports the Service. */
BPF_F_TABLE("hash", struct target, struct service, services, 64, BPF_F_NO_PREALLOC);
BPF_ARRAY_OF_MAPS(services_outer, "services", 1);

static __always_inline struct service *find_frontend(const struct target *key)
{
	u32 zero = 0;

	return lookup_inner(services_outer.lookup((int *)&zero), key);
}

/* (set, index) -> backend id. The agent writes new sets, and deletes old ones after the grace
 * period. */
BPF_F_TABLE("hash", struct slot, u32, backend_slots, 64, BPF_F_NO_PREALLOC);
BPF_ARRAY_OF_MAPS(backend_slots_outer, "backend_slots", 1);

static __always_inline u32 *find_slot(const struct slot *key)
{
	u32 zero = 0;

	return lookup_inner(backend_slots_outer.lookup((int *)&zero), key);
}

/* backend id -> address and port. The agent writes it, and deletes it after the grace period, when
 * neither a set nor the list of serving backends of a UDP Service contains the backend. */
BPF_F_TABLE("hash", u32, struct target, backends, 64, BPF_F_NO_PREALLOC);
BPF_ARRAY_OF_MAPS(backends_outer, "backends", 1);

static __always_inline struct target *find_backend(const u32 *key)
{
	u32 zero = 0;

	return lookup_inner(backends_outer.lookup((int *)&zero), key);
}

/* (set, backend id) -> 1. As backend_slots, but only for Services with affinity. */
BPF_F_TABLE("hash", struct member, u32, set_members, 64, BPF_F_NO_PREALLOC);
BPF_ARRAY_OF_MAPS(set_members_outer, "set_members", 1);

static __always_inline u32 *find_member(const struct member *key)
{
	u32 zero = 0;

	return lookup_inner(set_members_outer.lookup((int *)&zero), key);
}

/* (client, service) -> backend id and time of last use. The client is an address, or for a socket
 * its network namespace. Written by the programs. The agent deletes expired entries
 * (affinity_shares.py), and those of Services that are removed or lose their affinity. Full: the
 * oldest is evicted. */
BPF_TABLE("lru_hash", struct affinity_key, struct affinity, affinity, 64);

/* key_of_owner() -> number of its entries in `affinity`. The programs increment it; the agent
 * recounts the entries (affinity_shares.py). Full: the oldest is evicted, and that owner counts
 * from 1 again until the next recount. */
BPF_TABLE("lru_hash", struct address, u32, affinity_shares, 64);

/* socket -> its peer, in socket-local storage: freed with the socket, and other sockets cannot
 * evict it. Written by connect(); sock_ops marks it if it counts the end of the connection. If
 * memory (or the socket's optmem limit) runs out, getpeername() shows the backend, and a UDP socket
 * is not closed together with its backend. */
BPF_SK_STORAGE(sock_peers, struct peer);

/* connected UDP socket that connects again -> its previous peer, also in socket-local storage. The
 * kernel keeps the previous association if connect() fails. */
BPF_SK_STORAGE(former_peers, struct peer);

/* socket -> its flows while unconnected, also in socket-local storage. Written by sendmsg();
 * recvmsg() gives replies the frontend's address with it. If memory runs out, every datagram
 * chooses a backend again. */
BPF_SK_STORAGE(udp_flows, struct udp_flows);

/* (service, backend) -> when the backend stopped serving (ns, CLOCK_MONOTONIC). A UDP flow that
 * chose it earlier chooses again. Written by the agent. Each time it writes cuts, it deletes those
 * that are so old that no flow can be older (CUT_LIFETIME_NS in udp.py). Full: it deletes the
 * oldest. */
BPF_F_TABLE("hash", struct cut_key, u64, udp_cuts, 64, BPF_F_NO_PREALLOC);

/* address -> 1: addresses of the node that serve NodePorts. Agent only. */
BPF_F_TABLE("hash", struct address, u32, node_addresses, 64, BPF_F_NO_PREALLOC);
BPF_ARRAY_OF_MAPS(node_addresses_outer, "node_addresses", 1);

static __always_inline u32 *find_node_address(const struct address *key)
{
	u32 zero = 0;

	return lookup_inner(node_addresses_outer.lookup((int *)&zero), key);
}

/* address -> 1: ClusterIPs. A port that no Service defines is refused there. Agent only. */
BPF_F_TABLE("hash", struct address, u32, cluster_ips, 64, BPF_F_NO_PREALLOC);
BPF_ARRAY_OF_MAPS(cluster_ips_outer, "cluster_ips", 1);

static __always_inline u32 *find_cluster_ip(const struct address *key)
{
	u32 zero = 0;

	return lookup_inner(cluster_ips_outer.lookup((int *)&zero), key);
}

/* port / 64 -> one bit for each port that any frontend has, whatever its address and protocol.
 * Agent only: it sets the bit before it writes the first frontend of a port, and clears it after it
 * has deleted the last one. */
BPF_TABLE("array", u32, u64, frontend_ports, FRONTEND_PORT_WORDS);

/* cgroup id -> 1: the socket hooks leave processes in these cgroups alone. Agent only. */
BPF_F_TABLE("hash", u64, u32, exempt_cgroups, 64, BPF_F_NO_PREALLOC);

/* socket cookie -> 1: the agent's connections to the API server, see is_agent_socket(). The agent
 * adds an entry before it connects and deletes the oldest, so the map never fills up. */
BPF_F_TABLE("hash", u64, u32, agent_sockets, 64, BPF_F_NO_PREALLOC);

/* (service, network) -> 1: loadBalancerSourceRanges. Agent only. */
BPF_F_TABLE("lpm_trie", struct source_key, u32, source_ranges, 64, BPF_F_NO_PREALLOC);

/* 0 -> settings. Agent only. */
BPF_TABLE("array", u32, struct config, config, 1);

/* reason -> how often it occurred, per CPU. Incremented by the programs. */
BPF_TABLE("percpu_array", u32, u64, reasons, REASONS);

/* (service, backend) -> totals of its connections. Written by the programs. Some time after a
 * backend is removed, the agent moves its totals to one entry for all removed backends of the
 * Service. It also merges the entries of a Service whose namespace exceeds its share
 * (map_metrics.py). Full: new pairs are not counted. The values are shared by all CPUs, since they
 * change only when a connection begins or ends; per-CPU values on a node with 64 CPUs would take 64
 * times the memory, and 64 times the reads for each scrape. */
BPF_F_TABLE("hash", struct count_key, struct counts, counts, 64, BPF_F_NO_PREALLOC);

/* 0 -> all zeros, the initial value of an entry of `counts`, which is too large for the stack. */
BPF_TABLE("array", u32, struct counts, zero_counts, 1);
