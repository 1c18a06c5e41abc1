/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Keys and values of the maps, and the words in which the programs answer.
 *
 * This file is the truth for layouts: dataplane/bpf/maps/layout.py writes the same bytes, and a
 * test compares the two. Addresses are 16 bytes in network order, IPv4 as ::ffff:a.b.c.d. __be16
 * and
 * __be32 are network order, u16, u32 and u64 host order. Every padding byte has a name and is 0,
 * because keys are compared as bytes.
 */
#pragma once

#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_MPTCP 262 /* not a u8: a socket's protocol, never one on the wire */

struct address {
	__be32 word[4];
};

/* Something to dial: a frontend, a backend, or a peer. A NodePort has 0.0.0.0 or :: as address. */
struct target {
	struct address address;
	__be16 port;
	u8 protocol;
	u8 pad;
};

enum service_flags {
	SERVICE_INTERNAL_LOCAL = 1 << 0, /* internalTrafficPolicy: Local */
	SERVICE_EXTERNAL_LOCAL = 1 << 1, /* externalTrafficPolicy: Local */
	SERVICE_ANY_ENDPOINTS = 1 << 2,  /* somewhere: an empty local set drops, not refuses */
	SERVICE_RESTRICTED = 1 << 3,     /* source ranges apply: only for who sees the client */
	SERVICE_MAGLEV = 1 << 4,         /* packets choose by hash: the same on every node */
	/* why this address is a frontend; exactly one is set */
	SERVICE_CLUSTER_IP = 1 << 8,
	SERVICE_NODE_PORT = 1 << 9,
	SERVICE_EXTERNAL_IP = 1 << 10,
	SERVICE_LOAD_BALANCER = 1 << 11,
};

/* services: what stands behind a frontend. Replacing it is the one flip that readers see. */
struct service {
	u32 id; /* of the Service port and family; the same for all its frontends */
	u32 flags;
	u32 affinity_timeout; /* seconds; 0: no affinity */
	u32 cluster_set;
	u32 cluster_size;
	u32 local_set;
	u32 local_size;
	u32 cluster_table; /* 0: a slot is a place in the set; else an index into this table */
	u32 local_table;
	u32 check; /* of the key and all of this: check.h */
};

/* backend_slots: place `index` of a set holds a backend's id, place `index` of a table holds a
 * place in a set. Sets with the same addresses share their table, whatever their ports. Neither is
 * ever changed in place. */
struct slot {
	u32 set;
	u32 index;
};

/* set_members: only for sets of Services with affinity. */
struct member {
	u32 set;
	u32 backend;
};

/* local_networks: clients that count as pods of this node (detectLocalMode by network). */
struct network_key {
	u32 bits; /* of the address that count */
	struct address address;
};

/* source_ranges: networks that may dial a Service's LoadBalancer VIPs; those of service 0: the
 * node's NodePorts. */
struct source_key {
	u32 bits; /* of what follows that count: 32 for the service, then the network's */
	u32 service;
	struct address client;
};

enum client_kind {
	CLIENT_ADDRESS = 0, /* key: its address */
	CLIENT_NETNS = 1,   /* key: its netns cookie, in word[0] and word[1] */
};

struct affinity_key {
	struct address client;
	u32 service;
	u32 kind;
};

struct affinity {
	u64 last_used; /* ns, CLOCK_MONOTONIC */
	u32 backend;
	u32 cgroup; /* of whose sockets it was made, the low half of its id; 0: by a packet */
};

/* sock_peers: what a connected socket believes to talk to, and what it talks to. */
struct peer {
	u64 socket; /* its cookie, by which the agent finds it (sock_diag) */
	struct target frontend;
	struct target backend; /* its `pad` is 1 once the end of the connection will be counted */
	u32 service;
	u32 backend_id;
};

/* udp_flows: what an unconnected socket asked of one frontend. Times: ns, CLOCK_MONOTONIC. */
struct udp_flow {
	u64 chosen_at;          /* the backend was */
	u64 last_sent;          /* last datagram to the frontend */
	u64 last_received;      /* last datagram from the backend */
	struct target frontend; /* protocol 0: this place is free */
	struct target backend;
	u32 service;
	u32 backend_id;
};

/* Twice the nameservers that a resolver asks. With the kernel's own 72 bytes a struct udp_flows
 * fills 512 bytes just so, and the kernel's allocator would give the next larger one 1,024. */
#define FLOWS_PER_SOCKET 6

/* udp_flows: all that an unconnected socket has asked; the next one takes the place that was quiet
 * longest. */
struct udp_flows {
	u64 socket;
	struct udp_flow flow[FLOWS_PER_SOCKET];
};

/* udp_cuts: a backend that stopped serving a Service. */
struct cut_key {
	u32 service;
	struct target backend;
};

/* service_names: for people who look into the maps; the programs never read it. */
struct service_name {
	char namespace[64];
	char name[64];
	char port[64];
	u8 protocol;
	u8 family; /* 4 or 6 */
	u8 pad[2];
};

enum config_flags {
	CONFIG_SET_RETVAL = 1 << 0,            /* the kernel has bpf_set_retval (5.18) */
	CONFIG_LOCALHOST_NODE_PORTS = 1 << 1,  /* NodePorts answer on loopback, for the host only */
	CONFIG_HOST_ONLY = 1 << 2,             /* sockets of pods are left to the packet path */
	CONFIG_EXEMPTIONS = 1 << 3,            /* exempt_cgroups has entries */
	CONFIG_SOCKET_LB_OFF = 1 << 4,         /* no hook is attached; for people only */
	CONFIG_COEXISTING = 1 << 5,            /* as NODE_FOLLOWS */
	CONFIG_ACCOUNTING = 1 << 6,            /* connections that begin are counted by backend */
	CONFIG_COUNT_CONNECTION_ENDS = 1 << 7, /* and what they come to */
	CONFIG_PACKET_PATH = 1 << 8,           /* the packet path refuses what is to be refused */
};

struct config {
	u64 host_netns; /* cookie of the network namespace that is the node */
	u32 flags;
	u32 affinity_share; /* entries of `affinity` that one client may have; 0: any number */
};

/* meta: ids to give out next, so that none is used twice, restarts included. */
struct meta {
	u32 next_service;
	u32 next_backend;
	u32 next_set;
	u32 pad;
};

/* ---- of the packet path ---- */

struct ports {
	__be16 source;
	__be16 destination;
};

/* flows: who talks with whom, in the order of ends_of(), which does not tell who sends. */
struct flow_key {
	struct target first;
	struct target second;
};

/* Connection states, of all protocols; track.h says which packet leads to which. */
enum tcp_state {
	STATE_NEW = 0,         /* the client has sent, the backend has not answered */
	STATE_ESTABLISHED = 1, /* proven by the backend; UDP: a stream in both directions */
	STATE_CLOSING = 2,     /* one side has sent FIN (the kernel's CLOSE_WAIT) */
	STATE_CLOSED = 3,      /* both FINs, or RST */
	STATE_ANSWERED = 4,    /* the backend has answered: SYN-ACK, INIT-ACK, a datagram */
	STATE_UNPROVEN = 5,    /* TCP: the client has completed the handshake, no proof yet */
};

enum fins {
	FIN_CLIENT = 1 << 0,
	FIN_BACKEND = 1 << 1,
	FIN_BACKEND_FIRST = 1 << 2, /* so the backend keeps the port in TIME_WAIT */
	FIN_COUNTED = 1 << 3,       /* its end is in `counts`; a reset may not be the last one */
};

/* How the packets of a flow leave this node, decided by its first one. */
enum flow_path {
	PATH_STACK = 0,  /* up the stack, which routes them; the source changes when they leave */
	PATH_DIRECT = 1, /* from ingress to the next device, whole, past the stack */
	PATH_DIRECT_SNAT = 2, /* the same, masqueraded, and nothing has gone up the stack so far */
};

/* Which entry of a flow this is (track.h). */
enum flow_direction {
	DIRECTION_ORIGINAL = 0,
	DIRECTION_REPLY = 1,
	DIRECTION_SNAT_REPLY = 2,
};

/* Where the packets of a flow went last that go past the stack: whoever asks for their way with
 * each one pays more for that than for all else. */
struct next_hop {
	u32 found_at;           /* CLOCK_MONOTONIC, in units of 2^20 ns */
	u32 check;              /* of all of this but `unsaid`: check.h */
	struct address address; /* hop, as struct bpf_fib_lookup has it */
	u32 ifindex;
	u8 own_mac[6];
	u8 next_mac[6];
	u16 max_length; /* a packet of so many bytes from the IP header on has fitted */
	u8 resolved;    /* the MAC addresses are known */
	u8 family;      /* of `next`, which may be IPv6 for a packet of IPv4 */
	u32 uncounted;  /* bytes of packets that are in no count yet (account.h) */
};

/* What one side of a TCP connection said last, in host order; all 0: nothing so far. */
struct tcp_numbers {
	u32 next; /* the sequence number after its last segment */
	u32 ack;  /* the sequence number that it expects of the other side */
};

/* flows: a tracked connection, whole in each of its entries (track.h) but for `part` and `out`. */
struct flow {
	u64 last_used; /* ns, CLOCK_MONOTONIC */
	struct target client;
	struct target frontend;
	struct target backend;
	struct address snat; /* all 0: the source is not translated */
	__be16 snat_port;
	__be16 client_port; /* of client' */
	u32 service;
	u32 backend_id;
	u8 state;        /* enum tcp_state */
	u8 fins;         /* enum fins */
	u8 path;         /* enum way */
	u8 direction;    /* enum part */
	u32 host_device; /* the client is this node: the device that it sends by; else 0 */
	union {
		struct tcp_numbers tcp; /* of packets that are found by this entry */
		u64 started;            /* UDP: ns, CLOCK_MONOTONIC, the same in each entry */
	} seen;
	struct next_hop out; /* of packets that are found by this entry */
};

enum role {
	ROLE_HOST = 1, /* to other machines */
	ROLE_POD = 2,  /* to pods of this node */
};

enum device_flags {
	DEVICE_LOCAL = 1 << 0, /* what comes in here comes from pods of this node */
	DEVICE_PEER = 1 << 1,  /* bpf_redirect_peer() gets from here into the pod */
};

/* devices: what the agent knows of a device. */
struct device {
	u32 role;
	u32 l2; /* length of the link header: 14, or 0 */
	u32 flags;
	u8 mac[6];
	u8 pad[2];
	struct address snat4; /* its own, for translated sources; all 0: the node's */
	struct address snat6;
};

#define FRONTEND_PORT_WORDS 1024 /* of 64 bits: one for each port */
#define CACHED_DEVICES 1024

/* device_cache: one device of those whose ifindex leaves the same remainder; 0: none. */
struct cached_device {
	u32 ifindex;
	struct device device;
};

enum node_flags {
	NODE_MASQUERADE_ALL = 1 << 0,
	NODE_DETECTS_LOCAL = 1 << 1,  /* who is no pod and asks a ClusterIP gets our address */
	NODE_LOCAL_NETWORKS = 1 << 2, /* local_networks says who is a pod, not the device */
	NODE_DIRECT = 1 << 3,         /* pods are reached past the stack */
	NODE_PASSIVE = 1 << 4,        /* another data plane serves: what begins is its own */
	NODE_COEXISTING = 1 << 5,     /* one has served, and what it began goes on */
};

/* node: what the packet path needs to know of the node. */
struct node {
	struct address snat4; /* for devices that have no address */
	struct address snat6;
	u32 flags;
	u16 port_low; /* ports for translated sources, host order, both included */
	u16 port_high;
	u32 mark;        /* on packets of masqueraded flows while they are in the node's stack */
	u32 connections; /* beyond so many each new flow asks the oldest to go */
};

enum refusal_bucket {
	LIMIT_ICMP = 0,  /* ICMP errors of the node */
	LIMIT_RESET = 1, /* its RSTs */
	LIMIT_PEER4 = 2, /* ICMP errors to one address, whose bucket is in refused_peers */
	LIMIT_PEER6 = 3,
	REFUSAL_LIMITS = 4,
};

/* refusal_limits: a token bucket. Each refusal moves `spent` on by `interval`; it may be ahead of
 * now by `burst` times that. */
struct refusal_limit {
	u64 spent;    /* ns, CLOCK_MONOTONIC */
	u64 interval; /* ns; 0: no limit */
	u64 burst;    /* refusals at once */
};

#define PORT_SLOTS 1024

/* port_slots: ports of the node whose number and backend leave the same remainder. */
struct port_slot {
	u32 lockers; /* CPUs that want to decide about one of them */
	u32 pad;
	u64 last_exhausted; /* ns, CLOCK_MONOTONIC: none was found for a backend of this remainder
			     */
};

/* A place in a map that clients fill: each has so many and no more, and what it writes there only
 * replaces its own. */
struct client_slot {
	struct address owner; /* tc.c, sharer_of_packet() */
	u32 number;
};

#define FRAGMENTS_PER_CLIENT 128
#define FOREIGN_FLOWS_PER_CLIENT 2048

/* fragments: protocol and ports of a datagram whose first fragment was seen. */
struct first_fragment {
	u32 id;
	u32 hash; /* hash of the addresses, and of IPv4's protocol */
	struct ports ports;
	u32 protocol;
};

/* What a program decided. */
enum verdict {
	PASS = 0,      /* not ours: leave it alone */
	TRANSLATE = 1, /* to a backend, or back to the frontend */
	REFUSE = 2,    /* the client sees "connection refused" */
	DROP = 3,      /* the client sees a time-out */
};

/* Why; index into the map `reasons`. */
enum reason {
	NOT_A_SERVICE = 0,
	TRANSLATED = 1,
	TRANSLATED_BY_AFFINITY = 2,
	TRANSLATED_BY_FLOW = 3,
	REVERSED = 4,
	NO_ENDPOINTS = 5,       /* none in the cluster: refused */
	NO_LOCAL_ENDPOINTS = 6, /* policy Local and none here: dropped */
	NEEDS_SOURCE = 7,       /* source ranges: left to the packet path */
	SET_VANISHED = 8,       /* no steady reading after all tries: refused */
	NOT_RECORDED = 9,       /* translated, but the peer could not be written down */
	NO_SNAT_PORT = 10,      /* no free port for the node's address: dropped */
	NOT_REWRITTEN = 11,     /* the packet could not be written: dropped */
	NOT_ALLOWED = 12,       /* not in the Service's source ranges: dropped */
	UNKNOWN_PORT = 13,      /* of a ClusterIP: refused */
	NEW_FLOW = 14,          /* a packet began a connection, which is tracked now */
	EVICTED = 15,           /* a stream of UDP in use had to make room for a new connection */
	NO_ROUTE = 16,          /* from this node's own socket to the backend: dropped */
	LEFT_TO_PACKETS = 17,   /* a socket that is not for the hooks to serve */
	PAUSED = 18,            /* programs change over to other maps: dropped, to come again */
	TABLE_FULL = 19,        /* all tracked connections are needed: what begins is dropped */
	RATE_LIMITED = 20,      /* to be refused, but too many were: dropped without an answer */
	REDIRECTED = 21,        /* a packet went to another device, past the stack */
	REASONS = 22,
};

/* ---- accounting (account.h) ---- */

/* counts: a Service port and one of its backends; 0: connections that got none. */
struct count_key {
	u32 service;
	u32 backend;
};

/* What connections came to. Every field only grows. `in` is from clients, `out` to them. */
struct counts {
	u64 begun;
	u64 refused;    /* by us, or dropped: no backend would do */
	u64 unanswered; /* TCP: ended before the backend took it */
	u64 broken;     /* TCP: ended by a reset or a time-out */
	u64 ended;      /* TCP: those two included */
	u64 bytes_in;
	u64 bytes_out;
	u64 retransmits; /* TCP: segments that the client's side sent again */
	u64 rtt_us;      /* TCP: round trips to the backend, smoothed, at the end: their sum */
	u64 rtts;        /* how many that is the sum of */
};
