/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Every map: key -> value, who writes, who deletes, what full means.
 *
 * The sizes here are only for the compiler; the loader sets the real ones (layout.py). Plain
 * hashes are not preallocated, so room that is not used costs nothing but its buckets.
 */
#pragma once

/* frontend -> service. Agent writes and deletes. Full: grown, or the Service is reported. */
BPF_F_TABLE("hash", struct target, struct service, services, 64, BPF_F_NO_PREALLOC);

/* (set, index) -> backend id. Agent writes new sets, deletes old ones after the grace period. */
BPF_F_TABLE("hash", struct slot, u32, backend_slots, 64, BPF_F_NO_PREALLOC);

/* backend id -> address and port. Agent writes, deletes when no set has it any more. */
BPF_F_TABLE("hash", u32, struct target, backends, 64, BPF_F_NO_PREALLOC);

/* (set, backend id) -> 1. As backend_slots, for Services with affinity only. */
BPF_F_TABLE("hash", struct member, u32, set_members, 64, BPF_F_NO_PREALLOC);

/* (client, service) -> backend id, last use. Programs write; agent deletes with the Service. */
BPF_TABLE("lru_hash", struct affinity_key, struct affinity, affinity, 64);

/* client -> how many entries of `affinity` it has: an IPv4 address, an IPv6 network of 64 bits, or
 * a cgroup (sharer_of()). Programs count up, the agent counts again what is there (shares.py).
 * Full: the oldest goes, and is counted from 1 until then. */
BPF_TABLE("lru_hash", struct address, u32, affinity_shares, 64);

/* socket -> its peer, in the socket's own storage: freed with it, and nobody else's sockets can
 * take its place. connect() writes. No memory (the socket's own optmem limit included):
 * getpeername() shows the backend, and a UDP socket is not ended with its backend. */
BPF_SK_STORAGE(sock_peers, struct peer);

/* connected UDP socket that connects again -> the peer that it had, likewise: the kernel keeps that
 * one if connect() fails. */
BPF_SK_STORAGE(former_peers, struct peer);

/* socket -> what it asked without being connected, likewise. sendmsg() writes, recvmsg() gives
 * answers their address by it. No memory: each datagram chooses anew. */
BPF_SK_STORAGE(udp_flows, struct udp_flows);

/* (service, backend) -> when (ns, CLOCK_MONOTONIC) the backend stopped serving: a UDP flow that
 * chose it before chooses anew. Agent writes, and deletes when no flow is older. */
BPF_F_TABLE("hash", struct cut_key, u64, udp_cuts, 64, BPF_F_NO_PREALLOC);

/* address -> 1: the node's addresses that serve NodePorts. Agent only. */
BPF_F_TABLE("hash", struct address, u32, node_addresses, 64, BPF_F_NO_PREALLOC);

/* address -> 1: ClusterIPs, of which a port that no Service has refuses. Agent only. */
BPF_F_TABLE("hash", struct address, u32, cluster_ips, 64, BPF_F_NO_PREALLOC);

/* port / 64 -> a bit for each port that a frontend has, whatever its address and protocol. Agent
 * only: a bit is set before the first frontend of the port is written, and cleared after the last
 * one is gone. */
BPF_TABLE("array", u32, u64, frontend_ports, FRONTEND_PORT_WORDS);

/* cgroup id -> 1: whose processes the socket hooks leave alone. Agent only. */
BPF_F_TABLE("hash", u64, u32, exempt_cgroups, 64, BPF_F_NO_PREALLOC);

/* socket cookie -> 1: the agent's connections to the API server, see is_agents(). The agent writes
 * an entry before it connects and deletes the oldest; it never fills the map. */
BPF_F_TABLE("hash", u64, u32, agent_sockets, 64, BPF_F_NO_PREALLOC);

/* (service, network) -> 1: loadBalancerSourceRanges. Agent only. */
BPF_F_TABLE("lpm_trie", struct source_key, u32, source_ranges, 64, BPF_F_NO_PREALLOC);

/* 0 -> settings. Agent only. */
BPF_TABLE("array", u32, struct config, config, 1);

/* reason -> how often. Programs count, per CPU. */
BPF_TABLE("percpu_array", u32, u64, reasons, REASONS);

/* (service, backend) -> what its connections came to. Programs write; the agent deletes, some time
 * after the backend is gone, and adds up Services of a namespace that has more than its share
 * (measure.py). Full: what is new there is not counted. Shared by all CPUs, since it
 * is written at the beginning and the end of a connection only: per CPU, a node with 64 of them
 * would need, and read at each scrape, 64 times as much. */
BPF_F_TABLE("hash", struct count_key, struct counts, counts, 64, BPF_F_NO_PREALLOC);

/* 0 -> what a new entry of `counts` is a copy of: nothing. A program's stack has no room for it. */
BPF_TABLE("array", u32, struct counts, zero_counts, 1);
