/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Keys and values of the BPF maps, and the verdicts and reasons that the programs report.
 *
 * This file defines the layouts; dataplane/bpf/maps/layout.py packs the same bytes, and a test
 * compares the two. Addresses are 16 bytes in network byte order, with IPv4 as ::ffff:a.b.c.d.
 * __be16 and __be32 are in network byte order; u16, u32 and u64 are in host byte order. Every
 * padding byte is a named field and is 0, because map keys are compared byte by byte (for the one
 * exception, which is in no key, see struct peer).
 */
#pragma once

#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_MPTCP 262 /* does not fit a u8: only a socket's protocol, never on the wire */

struct address {
	__be32 word[4];
};

/* A frontend, a backend, or a peer. A NodePort is stored with address 0.0.0.0 or ::. */
struct target {
	struct address address;
	__be16 port;
	u8 protocol;
	u8 pad; /* 0, except in the backend of a struct peer */
};

enum service_flags {
	SERVICE_INTERNAL_LOCAL = 1 << 0, /* internalTrafficPolicy: Local */
	SERVICE_EXTERNAL_LOCAL = 1 << 1, /* externalTrafficPolicy: Local */
	SERVICE_ANY_ENDPOINTS = 1 << 2,  /* the cluster has some: an empty local set drops */
	SERVICE_RESTRICTED = 1 << 3,     /* source ranges apply */
	SERVICE_MAGLEV = 1 << 4,         /* packets choose by hash, so all nodes agree */
	/* the kind of frontend; exactly one is set */
	SERVICE_CLUSTER_IP = 1 << 8,
	SERVICE_NODE_PORT = 1 << 9,
	SERVICE_EXTERNAL_IP = 1 << 10,
	SERVICE_LOAD_BALANCER = 1 << 11,
};

/* services: the backend sets behind a frontend. Replacing this one value switches readers from the
 * old sets to the new ones. */
struct service {
	u32 id; /* of the Service port and family; the same for all its frontends */
	u32 flags;
	u32 affinity_timeout; /* seconds; 0: no affinity */
	u32 cluster_set;
	u32 cluster_size;
	u32 local_set;
	u32 local_size;
	u32 cluster_table; /* 0: slots hold backends; otherwise the id of a table whose slots hold
			      positions in the set */
	u32 local_table;
	u32 check; /* over the key and all fields above: lib/check.h */
};

/* backend_slots: slot `index` of a set holds a backend id; slot `index` of a table holds a position
 * in a set. Sets with the same addresses share a table, even if their ports differ. Neither is ever
 * changed in place. */
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
	u32 bits; /* prefix length of `address` */
	struct address address;
};

/* device_sources: which address of a device packets to a network get. ifindex 0: the addresses of
 * all devices. */
struct device_network {
	u32 bits; /* prefix length, from `ifindex` on: 32, plus that of the network */
	u32 ifindex;
	struct address address;
};

/* source_ranges: networks that may connect to the LoadBalancer VIPs of a Service. Service 0 holds
 * the networks that may connect to the node's NodePorts. */
struct source_key {
	u32 bits; /* prefix length, from `service` on: 32, plus that of the network */
	u32 service;
	struct address client;
};

enum client_kind {
	CLIENT_ADDRESS = 0, /* the key holds its address */
	CLIENT_NETNS = 1,   /* the key holds its netns cookie, in word[0] and word[1] */
};

struct affinity_key {
	struct address client;
	u32 service;
	u32 kind;
};

/* Who a packet or a socket counts for where clients share a map, ports or a limit. Packets:
 * owner_of_packet(). Sockets: the low half of the cgroup id of the process that called connect() or
 * sendmsg(); its highest bit is 0. key_of_owner() makes map keys of it. */
#define OWNER_NETWORK 0          /* its IPv4 address, or the /64 network of its IPv6 address */
#define OWNER_DEVICE 0x80000000  /* and the ifindex of a pod's own device; alone: the node */
#define OWNER_ADDRESS 0xffffffff /* its address */

struct affinity {
	u64 last_used; /* ns, CLOCK_MONOTONIC */
	u32 backend;
	u32 owner; /* of the packet or socket that it was written for */
};

enum peer_flags {
	PEER_END_COUNTED = 1 << 0, /* sock_ops() will count the end of this connection */
	PEER_UNANSWERED = 1 << 1,  /* the failure is recorded: trace_retransmit() */
	PEER_REFUSED = 1 << 2,     /* the failure is counted: trace_error() */
};

/* sock_peers: the peer that a connected socket sees (frontend), and its real peer (backend). */
struct peer {
	u64 socket; /* its cookie; the agent finds it with sock_diag */
	struct target frontend;
	struct target backend; /* its `pad` has enum peer_flags */
	u32 service;
	u32 backend_id;
};

/* udp_flows: one frontend that an unconnected socket has sent to. Times are ns, CLOCK_MONOTONIC. */
struct udp_flow {
	u64 chosen_at;          /* when the backend was chosen */
	u64 last_sent;          /* the last datagram to the frontend */
	u64 last_received;      /* the last datagram from the backend */
	struct target frontend; /* protocol 0: this element is free */
	struct target backend;
	u32 service;
	u32 backend_id;
};

/* Twice the number of nameservers that a resolver asks. With the 72 bytes that the kernel puts
 * before it, a struct udp_flows takes exactly 512 bytes; the next larger slab has 1,024. */
#define FLOWS_PER_SOCKET 6

/* udp_flows: the flows of one unconnected socket. A new flow replaces the one that has been idle
 * longest. */
struct udp_flows {
	u64 socket;
	struct udp_flow flow[FLOWS_PER_SOCKET];
};

/* udp_cuts: a backend that has stopped serving a Service. */
struct cut_key {
	u32 service;
	struct target backend;
};

/* service_names: for readers of map dumps; the programs never read it. */
struct service_name {
	char namespace[64];
	char name[64];
	char port[64];
	u8 protocol;
	u8 family; /* 4 or 6 */
	u8 pad[2];
};

enum endpoint_conditions {
	ENDPOINT_READY = 1 << 0,
	ENDPOINT_SERVING = 1 << 1,
	ENDPOINT_TERMINATING = 1 << 2,
	ENDPOINT_NODE_ADDRESS = 1 << 3, /* its address is another Node's: a Pod with hostNetwork */
};

/* endpoint_names: every endpoint of a Service port, whether it is in a backend set or not. For
 * readers of map dumps; the programs never read it. */
struct endpoint_key {
	u32 service;
	struct target endpoint;
};

struct endpoint_name {
	char text[119]; /* Pod, node and zone, separated by a 0; shortened if they are too long */
	u8 conditions;
};

enum config_flags {
	CONFIG_SET_RETVAL = 1 << 0,            /* the kernel has bpf_set_retval (5.18) */
	CONFIG_LOCALHOST_NODE_PORTS = 1 << 1,  /* NodePorts answer on loopback, for the host only */
	CONFIG_HOST_ONLY = 1 << 2,             /* sockets of pods are left to the packet path */
	CONFIG_EXEMPTIONS = 1 << 3,            /* exempt_cgroups has entries */
	CONFIG_SOCKET_LB_OFF = 1 << 4,         /* no hook is attached; for `kbpf inspect` only */
	CONFIG_COEXISTING = 1 << 5,            /* as NODE_COEXISTING */
	CONFIG_ACCOUNTING = 1 << 6,            /* new connections are counted by backend */
	CONFIG_COUNT_CONNECTION_ENDS = 1 << 7, /* and how they end */
	CONFIG_PACKET_PATH = 1 << 8, /* the packet path serves, and refuses what hooks let pass */
	CONFIG_KERNEL_SOCKETS = 1 << 9, /* the kernel's own sockets are left to the packet path */
	CONFIG_TRACING = 1 << 10,       /* the programs of trace.h notice the failures of sockets */
};

struct config {
	u64 host_netns; /* cookie of the node's own network namespace */
	u32 flags;
	u32 affinity_share; /* entries of `affinity` that one owner may have; 0: no limit */
};

/* meta: the next free ids, kept across restarts so that no id is used twice. */
struct meta {
	u32 next_service;
	u32 next_backend;
	u32 next_set;
	u32 pad;
};

/* ---- the packet path ---- */

struct ports {
	__be16 source;
	__be16 destination;
};

/* flows: both ends of a flow, ordered by flow_key_of(), so that both directions have the same
 * key. */
struct flow_key {
	struct target first;
	struct target second;
};

/* unconfirmed_queue. `time`: of the event; a later flow may have the same key, and must not be
 * taken for this one. */
struct unconfirmed_key {
	struct flow_key key;
	u64 time;
};

/* Connection states of all protocols; docs/design/packets.md says which packet leads to which. */
enum tcp_state {
	STATE_NEW = 0,         /* the client has sent, the backend has not answered */
	STATE_ESTABLISHED = 1, /* confirmed by the backend; UDP: a stream in both directions */
	STATE_CLOSING = 2,     /* one side has sent FIN (CLOSE_WAIT in nf_conntrack) */
	STATE_CLOSED = 3,      /* FINs from both sides, or RST */
	STATE_ANSWERED = 4,    /* the backend has answered: SYN-ACK, INIT-ACK, a datagram */
	STATE_UNPROVEN = 5,    /* TCP: the client has completed the handshake; the backend has not
				  confirmed it */
};

enum fins {
	FIN_CLIENT = 1 << 0,
	FIN_BACKEND = 1 << 1,
	FIN_BACKEND_FIRST = 1 << 2, /* so it keeps the ports in TIME_WAIT */
	FIN_COUNTED = 1 << 3,       /* its end is in `counts` already; more resets may follow */
	FIN_UNANSWERED = 1 << 4,    /* so is that its SYN had to be repeated */
	FIN_DIRECT = 1 << 5, /* UDP: the client's last datagram went to the backend's own address */
	FIN_RESERVED = 1 << 6, /* TCP, SCTP: the backend seems to have an older connection from this
				  port. UDP: the agent has ended the flow, but keeps its port */
	FIN_REPLACED = 1 << 7, /* a SYN-ACK has replaced another connection. It may have been
				  forged, so no other flow gets the port before the entry expires */
};

/* How the packets of a flow leave this node; decided by its first packet. */
enum flow_path {
	PATH_STACK = 0,  /* through the stack, which routes them; SNAT happens at egress */
	PATH_DIRECT = 1, /* redirected to the next device, unless a packet has to take the stack */
};

/* Which entry of a flow this is (flow.h). */
enum flow_direction {
	DIRECTION_ORIGINAL = 0,
	DIRECTION_REPLY = 1,
	DIRECTION_SNAT_REPLY = 2,
};

/* The cached next hop of a flow that bypasses the stack. A FIB lookup for each packet would cost
 * more than all other work. */
struct next_hop {
	u32 found_at;           /* CLOCK_MONOTONIC, in units of 2^20 ns */
	u32 check;              /* over all other fields except `uncounted`: lib/check.h */
	struct address address; /* of the next hop, as in struct bpf_fib_lookup */
	u32 ifindex;
	u8 own_mac[6];
	u8 next_mac[6];
	/* A packet of this length, from the IP header on, has fitted. If `ifindex` is 0: the MTU
	 * that a packet exceeds, or 0 (exceeded_mtu()). */
	u16 max_length;
	u8 resolved;   /* the MAC addresses are known */
	u8 family;     /* of `address`; may be IPv6 even if the packet is IPv4 */
	u32 uncounted; /* bytes that have not been added to `counts` yet (account_flows.h) */
};

/* What one side of a TCP connection has sent, in host byte order; in parentheses the name in
 * nf_conntrack (struct ip_ct_tcp_state). The last two are copies of `edge` and `window` of the
 * other side, which may lag: judge.h refreshes them. */
struct tcp_side {
	u32 next; /* the sequence number after its last segment (td_end) */
	u32 ack;  /* the sequence number that it expects from the other side (td_maxack) */
	u32 edge; /* where its offered window ends, so the other side may send up to here. A client
		     whose SYN has no answer: the number after the SYN. */
	u32 window; /* the largest window that it has offered; 0: it has not sent yet (td_maxwin) */
	u32 limit;  /* it may send up to here (td_maxend) */
	u32 room;   /* the largest window of the other side */
	u8 scale;   /* window_scale(): the shift of its windows (td_scale) */
	u8 fin;     /* its own bits of `fins`; only packets of this side write them here */
	u8 syn_scale; /* original entry: that of the client's last SYN, */
	u8 pad;
	u32 syn_at; /* and when it came, as milliseconds_of() */
};

/* The verification tag that packets of one side of an SCTP association need, as in the packet.
 * `next` replaces it if the backend agrees to restart the association. */
struct sctp_tags {
	__be32 tag;
	__be32 next;
};

union side {
	struct tcp_side tcp;
	struct sctp_tags sctp;
	u64 started; /* UDP: ns, CLOCK_MONOTONIC; the same in every entry */
};

/* flows: a tracked connection. All entries of a flow (flow.h) hold the same values, except for
 * `last_used`, `direction`, `seen`, `arrival`, `syn` and `out`. `state` and `fins` of the original
 * entry count; those of the others are copies, which may lag. */
struct flow {
	u64 last_used; /* ns, CLOCK_MONOTONIC */
	struct target client;
	struct target frontend;
	struct target backend;
	struct address snat; /* all 0: no SNAT */
	__be16 snat_port;
	__be16 client_port; /* port of client' (flow.h) */
	u32 service;
	u32 backend_id;
	u8 state;        /* enum tcp_state */
	u8 fins;         /* enum fins */
	u8 path;         /* enum flow_path */
	u8 direction;    /* enum flow_direction */
	u32 host_device; /* if the client is this node: the device that it sends by; otherwise 0 */
	union side seen; /* of the packets that this entry matches */
	u32 arrival; /* the device that they arrive on; 0: not known yet, or sent by this node */
	u32 syn; /* the number after the client's last SYN: to the Service in the original entry,
		    to the backend itself in those of its replies (with SNAT, the node's SYN) */
	struct next_hop out; /* of the packets that this entry matches */
};

enum role {
	ROLE_HOST = 1, /* connects to other machines */
	ROLE_POD = 2,  /* connects to pods of this node */
};

enum device_flags {
	DEVICE_LOCAL = 1 << 0,  /* packets from here come from pods of this node */
	DEVICE_PEER = 1 << 1,   /* bpf_redirect_peer() reaches the pod through this device */
	DEVICE_TUNNEL = 1 << 2, /* encapsulates IP in IP (ipip, sit, gre, ip6tnl): needs_stack() */
	DEVICE_NBMA = 1 << 3,   /* a tunnel that takes its remote address from the route */
	DEVICE_IPIP = 1 << 4,   /* and of IPv4 in IPv4: redirect_to_remote() */
	DEVICE_PODS = 1 << 5,   /* the routes to all local pods lead here (cilium_host) */
	DEVICE_STRICT = 1 << 6, /* rp_filter of IPv4 is strict */
	DEVICE_SPANS =
		1 << 7, /* a bridge with an overlay: pods of other nodes are behind it, too */
	DEVICE_NO_EGRESS = 1 << 8, /* no program sees what leaves by it */
};

/* devices: what the packet path needs to know about a device. */
struct device {
	u32 role;
	u32 l2; /* length of the link-layer header: 14, or 0 */
	u32 flags;
	u8 mac[6];
	u8 pad[2];
	struct address snat4; /* its first address, for SNAT; all 0: use the node's */
	struct address snat6;
	u32 bridge; /* of a bridge whose ports have programs, and of these ports, which have its
		       values: its ifindex; otherwise 0 (device_roles.py) */
};

#define FRONTEND_PORT_WORDS 1024 /* words of 64 bits, one bit per port */
#define CACHED_DEVICES 1024

/* device_cache: indexed by ifindex % CACHED_DEVICES. ifindex 0: empty. */
struct cached_device {
	u32 ifindex;
	struct device device;
};

enum node_flags {
	NODE_MASQUERADE_ALL = 1 << 0,
	NODE_DETECTS_LOCAL = 1 << 1,  /* clients other than pods get SNAT for ClusterIPs */
	NODE_LOCAL_NETWORKS = 1 << 2, /* local_networks decides which clients are pods */
	NODE_DIRECT = 1 << 3,         /* packets to pods bypass the stack */
	NODE_PASSIVE = 1 << 4,        /* another data plane serves: new flows are left to it */
	NODE_COEXISTING = 1 << 5, /* another data plane has served, and its flows are still alive */
	NODE_NETFILTER = 1 << 6,  /* conntrack translates new flows: tc/conntrack.h */
};

/* node: what the packet path needs to know about the node. */
struct node {
	struct address snat4; /* for devices without an address of their own */
	struct address snat6;
	u32 flags;
	u16 port_low; /* port range for SNAT, host byte order, both inclusive */
	u16 port_high;
	u32 mark; /* set on packets of masqueraded flows while they are in the node's stack */
	u32 connections; /* above this number, each new flow evicts old ones */
};

enum refusal_bucket {
	LIMIT_ICMP = 0,  /* ICMP errors of the whole node */
	LIMIT_RESET = 1, /* RSTs of the whole node */
	LIMIT_PEER4 = 2, /* ICMP errors to one sender; its bucket is in refused_peers */
	LIMIT_PEER6 = 3,
	LIMIT_PEER_RESET = 4, /* RSTs to one sender */
	REFUSAL_LIMITS = 5,
};

/* refusal_limits: a token bucket. Each refusal moves `spent` forward by `interval`; it may be ahead
 * of the clock by up to `burst` intervals. */
struct refusal_limit {
	u64 spent;    /* ns, CLOCK_MONOTONIC */
	u64 interval; /* ns; 0: no limit */
	u64 burst;    /* refusals that may be sent at once */
};

#define FLOW_MARK_BITS 12
#define FLOW_MARKS (1 << FLOW_MARK_BITS)

/* The marks of `flow_marks` that count. Both are 0 in a new map, so that all ends count as marked:
 * then `flows` may hold entries whose writer knew no marks. */
struct flow_generations {
	u64 current; /* of new marks */
	u64 oldest;  /* of marks that still count */
};

#define PORT_SLOT_BITS 10
#define PORT_SLOTS (1 << PORT_SLOT_BITS)

/* port_slots: by the XOR of the two ports of a flow key. */
struct port_slot {
	u32 lockers;     /* CPUs that want the lock of this slot */
	u32 unconfirmed; /* keys in `unconfirmed`: filter_of() */
};

/* One element of a map that clients fill. Every client has a fixed number of them, so it can only
 * overwrite its own. */
struct client_slot {
	struct address owner; /* key_of_owner(); in `failures` also a cgroup, or 0 */
	u32 number;
};

#define FRAGMENTS_PER_CLIENT 128
#define FOREIGN_FLOWS_PER_CLIENT 2048

/* fragments: protocol and ports of a datagram whose first fragment has been seen. */
struct first_fragment {
	u32 id;
	u32 hash; /* of the addresses and of IPv4's protocol */
	struct ports ports;
	u32 protocol;
};

#define DOUBTFUL_PORTS 65536 /* entries */
#define DOUBTS 16            /* places in each */

/* doubtful_ports: until when the backend may send to a flow that is gone (seconds,
 * CLOCK_MONOTONIC). 32 bits: fewer would wrap around while the node is up. The first element has a
 * secret instead (agent_maps.py): a word for each of a struct target. */
struct doubts {
	u32 until[DOUBTS];
};

/* What a program decided. */
enum verdict {
	PASS = 0,      /* leave it alone: no Service, or left to the packet path */
	TRANSLATE = 1, /* to a backend, or back to the frontend */
	REFUSE = 2,    /* the client sees "connection refused" */
	DROP = 3,      /* the client sees a timeout */
};

/* Why it decided so; index into the map `reasons`. Append only: docs/contributing.md, "A reason".
 */
enum reason {
	NOT_A_SERVICE = 0,
	TRANSLATED = 1, /* this and the next two: only at sockets, packets count NEW_FLOW */
	TRANSLATED_BY_AFFINITY = 2,
	TRANSLATED_BY_FLOW = 3, /* UDP: the socket keeps the backend of its flow or connect() */
	REVERSED = 4,           /* a reply or getpeername() gets the frontend's address */
	NO_ENDPOINTS = 5,       /* no endpoint in the cluster: refused */
	NO_LOCAL_ENDPOINTS = 6, /* policy Local, and no endpoint on this node: dropped */
	NEEDS_SOURCE = 7,       /* the Service has source ranges: left to the packet path */
	SET_VANISHED = 8,       /* the backend set was gone in all tries: refused */
	NOT_RECORDED = 9,       /* state not stored, but served */
	NO_SNAT_PORT = 10,      /* no free port of the node for SNAT: dropped */
	NOT_REWRITTEN = 11,     /* the packet could not be rewritten: dropped */
	NOT_ALLOWED = 12,       /* not in the Service's source ranges: dropped */
	UNKNOWN_PORT = 13,      /* a ClusterIP without this port: refused */
	NEW_FLOW = 14,          /* a packet started a flow, which is tracked now */
	EVICTED = 15,           /* a flow in use, normally UDP, was evicted for a new one */
	NO_ROUTE = 16,          /* no route from a socket of this node to the backend: dropped */
	LEFT_TO_PACKETS = 17,   /* the hooks do not serve this socket, or is_udp_probe() */
	PAUSED = 18,        /* programs are switching to new maps: dropped, the client will retry */
	TABLE_FULL = 19,    /* no flow that was checked could be evicted: the new one is dropped */
	RATE_LIMITED = 20,  /* too many refusals: dropped without a reply */
	REDIRECTED = 21,    /* sent to another device, past the stack */
	NOT_TRACKED = 22,   /* the state of a connection could not be stored: dropped */
	UNSTEADY_READ = 23, /* the service was being replaced in all tries: refused */
	TOO_LONG = 24,      /* answered with the path MTU: send_path_mtu() */
	BACKEND_REFUSED = 25, /* a backend reset the SYN, or answered a datagram by an ICMP error */
	BACKEND_UNANSWERED = 26, /* a backend did not answer the first SYN */
	BACKEND_RESET =
		27,   /* a connection that the backend had accepted ended otherwise than by FINs */
	INVALID = 28, /* not of the connection that has its ports (judge.h): dropped */
	OTHER_NETWORK = 29, /* a socket of a network that is not this cluster's (cluster_netns.h) */
	REASONS = 30,       /* at most 64: struct monitor */
};

/* ---- accounting (account.h) ---- */

/* counts: a Service port and one of its backends. Backend 0: connections that got no backend. */
struct count_key {
	u32 service;
	u32 backend;
};

/* Totals of connections; every field only grows. `in` is from the client to the backend, `out`
 * back. */
struct counts {
	u64 opened;
	u64 no_endpoint; /* refused or dropped: there was no backend for this client */
	u64 not_allowed; /* dropped: the client is not in the source ranges */
	u64 refused;     /* BACKEND_REFUSED */
	u64 unanswered;  /* TCP: BACKEND_UNANSWERED */
	u64 reset;       /* TCP: BACKEND_RESET */
	u64 ended;       /* TCP: all that have ended, in whatever way */
	u64 bytes_in;
	u64 bytes_out;
	u64 retransmits; /* TCP: segments that the client's side retransmitted */
	u64 rtt_us;      /* TCP: sum of the smoothed round-trip times to the backend at the end */
	u64 rtts;        /* number of values in that sum */
};

#define LATENCY_BUCKETS 24
#define LATENCY_EXPONENT 16

/* A histogram. `count[i]`: values of at most 2^(i - LATENCY_EXPONENT) s (15 us, 31 us, ... 64 s)
 * and above the bound before; the last element has those above all bounds. */
struct latency {
	u64 count[LATENCY_BUCKETS];
	u64 sum; /* ns */
};

/* latencies: of the TCP sockets of this node that were directed to backends of one Service port. */
struct latencies {
	struct latency connect;    /* from the first SYN until the handshake ended */
	struct latency round_trip; /* the smoothed time, when the connection ended */
};

/* What a program has decided about a new connection or datagram flow, or how one has failed. */
struct event {
	u64 time;             /* ns, CLOCK_MONOTONIC */
	u64 cgroup;           /* id of that of the socket; 0: a packet */
	struct target client; /* all 0: a socket without an address yet */
	struct target frontend;
	struct target backend; /* all 0: none was chosen */
	u32 service;
	u32 backend_id;
	u32 reason; /* enum reason */
};

#define FAILURES_PER_CLIENT 16
#define PACKET_FAILURES_PER_CLIENT 64
#define PACKET_CLIENTS 16

/* failures: how often a client failed at the same frontend and backend for the same reason. */
struct failure {
	u64 first; /* ns, CLOCK_MONOTONIC */
	u64 count;
	struct event last;
};

/* ---- watching events as they happen (monitor.h) ---- */

#define MONITORS 4 /* commands that may watch at the same time */

/* monitors: what a command wants to see, and how many events a second. `spent` and the two below:
 * as in struct refusal_limit. */
struct monitor {
	u64 spent;
	u64 interval;
	u64 burst;
	u64 left_out; /* events above this rate, and those that found the ring buffer full */
	u64 reasons;  /* bit n: those with reason n */
};
