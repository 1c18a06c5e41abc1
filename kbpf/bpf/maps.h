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

/* socket -> its peer. connect() writes, release deletes. Full: the oldest goes, and
 * getpeername() of that socket shows the backend. */
BPF_TABLE("lru_hash", u64, struct peer, sock_peers, 64);

/* remainder of a socket -> how many with it are in sock_peers, or were driven out. accept() asks
 * for the peer of sockets that never dialled: here it sees that at once. */
BPF_TABLE("array", u32, u32, dialled, DIALLED);

/* The same for connected UDP sockets: apart, so that many TCP connections do not drive out those
 * few whose backend's end has to be noticed. Full: a socket that is forgotten is not ended. */
BPF_TABLE("lru_hash", u64, struct peer, udp_peers, 64);

/* (socket, frontend) -> the backend of that flow. sendmsg() writes, release deletes, the agent
 * deletes when the backend stops serving. Full: the oldest goes, and its next datagram chooses
 * anew. */
BPF_TABLE("lru_hash", struct flow_key, struct flow, udp_flows, 64);

/* (socket, backend) -> frontend, to give replies their address. As udp_flows. */
BPF_TABLE("lru_hash", struct flow_key, struct reverse, udp_reverse, 64);

/* socket -> frontend of its newest flow: the head of a list for release. As udp_flows. */
BPF_TABLE("lru_hash", u64, struct target, udp_heads, 64);

/* address -> 1: the node's addresses that serve NodePorts. Agent only. */
BPF_F_TABLE("hash", struct address, u32, node_addresses, 64, BPF_F_NO_PREALLOC);

/* address -> 1: ClusterIPs, of which a port that no Service has refuses. Agent only. */
BPF_F_TABLE("hash", struct address, u32, cluster_ips, 64, BPF_F_NO_PREALLOC);

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
 * after the backend is gone. Full: what is new there is not counted. Shared by all CPUs, since it
 * is written at the beginning and the end of a connection only: per CPU, a node with 64 of them
 * would need, and read at each scrape, 64 times as much. */
BPF_F_TABLE("hash", struct count_key, struct counts, counts, 64, BPF_F_NO_PREALLOC);

/* 0 -> what a new entry of `counts` is a copy of: nothing. A program's stack has no room for it. */
BPF_TABLE("array", u32, struct counts, no_counts, 1);
