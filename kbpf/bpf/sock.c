/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The socket hooks: eight cgroup programs that translate Service addresses for the sockets of the
 * node and its pods. A ninth, sock_ops(), is attached only with --accounting full. The programs of
 * trace.h are at tracepoints of the kernel, and run when a connection fails.
 *
 * connect() to a frontend is directed to a backend once; no packet is rewritten afterwards.
 * Unconnected UDP is directed for each datagram, to the same backend as long as the flow is in use
 * and the backend serves; replies get the frontend's address back. getpeername() shows the
 * frontend.
 *
 * Apart from is_connected_to(), only the hooks at the end of this file distinguish IPv4 and IPv6.
 */
#include "types.h"
#include "lib/compat.h"
#include "lib/addr.h"
#include "maps.h"

#include "lookup.h"
#include "account.h"
#include "failures.h"
#include "latency.h"
#include "cluster_netns.h"

/* A flow of an unconnected socket keeps its backend this long after its last datagram. This is the
 * timeout of nf_conntrack for UDP streams, so clients see what they see with kube-proxy. */
#define FLOW_IDLE_NS (120ULL * 1000000000)
/* The cgroup of a pod is looked up among this many top levels, and at the process's own cgroup.
 * kubelet's cgroups are at levels 2 to 4, or 6 if the node itself is a container. */
#define CGROUP_LEVELS 10
/* Ports above those that the kernel assigns by itself (ip_local_port_range), and the number of
 * tries to find a free one. */
#define RESERVED_PORT_LOW 61000
#define RESERVED_PORTS 4536
#define RESERVED_PORT_TRIES 8

/* An id for this socket that is never reused. Before Linux v5.10 (92acdc58ab11), cookies were
 * unique only within a network namespace, so the namespace's cookie is mixed in. Both count up from
 * 1; a node does not reach 2^44 sockets or 2^20 namespaces. */
static __always_inline u64 socket_id(void *ctx)
{
	return bpf_get_socket_cookie(ctx) ^ (get_netns_cookie(ctx) << 44);
}

/* The owner is the current process's cgroup; it may have got the socket from another process. */
static __always_inline struct client client_of(u64 netns)
{
	struct client client = {.netns = netns, .key.kind = CLIENT_NETNS};

	client.owner = get_current_cgroup_id();
	client.key.client.word[0] = (u32)netns;
	client.key.client.word[1] = netns >> 32;
	return client;
}

static __always_inline void count(u32 reason)
{
	u64 *n = reasons.lookup(&reason);

	if (n)
		(*n)++;
}

/* Whether the hook makes the system call fail. Without bpf_set_retval() (before v5.18) the error
 * would be EPERM, which no client of a Service expects. Then the address stays as dialled, and the
 * packet path replies. A connect() that fails here leaves the socket's old peer as it was
 * (record_peer()); one that continues replaces it. */
static __always_inline bool ends_syscall(enum verdict v)
{
	return (v == REFUSE || v == DROP) && (config_flags() & CONFIG_SET_RETVAL);
}

/* Counts the reason, and returns the result of the hook: 1 continues the system call, 0 fails it
 * with an errno. */
static __always_inline int finish(enum verdict v, enum reason reason)
{
	count(reason);
	if (!ends_syscall(v))
		return 1;
	set_retval(v == REFUSE ? -ECONNREFUSED : -ETIMEDOUT);
	return 0;
}

/* The peer that connect() chose for this socket. */
static __always_inline struct peer *peer_of(struct bpf_sock *sk)
{
	return sk ? sock_peers.sk_storage_get(sk, NULL, 0) : NULL;
}

/* Only UDP sockets can call connect() while connected, so other sockets skip the lookup at
 * connect(). At getpeername(), an established TCP socket without a matching peer looks as well. */
static __always_inline bool may_have_former_peer(struct bpf_sock *sk)
{
	return sk && sk->state == BPF_TCP_ESTABLISHED;
}

static __always_inline struct peer *former_peer_of(struct bpf_sock *sk)
{
	return may_have_former_peer(sk) ? former_peers.sk_storage_get(sk, NULL, 0) : NULL;
}

/* Whether the kernel's peer of this socket is `to`. */
static __always_inline bool is_connected_to(struct bpf_sock *sk, const struct target *to)
{
	struct address peer = v4_mapped(sk->dst_ip4);

	if (sk->state != BPF_TCP_ESTABLISHED)
		return false;
	if (sk->family == AF_INET6) {
		peer.word[0] = sk->dst_ip6[0];
		peer.word[1] = sk->dst_ip6[1];
		peer.word[2] = sk->dst_ip6[2];
		peer.word[3] = sk->dst_ip6[3];
	}
	/* dst_port has 32 bits before Linux v5.18; the port is its lower half */
	return same_address(&peer, &to->address) && (__be16)sk->dst_port == to->port;
}

/* connect() on a connected socket may still fail (no route to the new peer), and then the kernel
 * keeps the old association. So the old peer is kept as well, until the socket connects to the same
 * backend in another way. `to`: the new peer. */
static __always_inline void save_former_peer(struct bpf_sock *sk, const struct target *to)
{
	struct peer *peer, *former;

	if (!may_have_former_peer(sk))
		return;
	peer = peer_of(sk);
	if (peer && is_connected_to(sk, &peer->backend)) {
		former = former_peers.sk_storage_get(sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
		if (former)
			*former = *peer;
	} else {
		former = former_peer_of(sk);
	}
	if (former && same_target(&former->backend, to))
		former_peers.sk_storage_delete(sk);
}

/* Stores the peer of a socket that connects. If the new address is not a frontend, deletes the old
 * peer, or getpeername() would show it. */
static __always_inline void record_peer(struct bpf_sock_addr *ctx, enum verdict v,
					const struct target *to, const struct choice *c)
{
	struct bpf_sock *sk = ctx->sk;
	struct peer *peer;

	if (!sk || ends_syscall(v))
		return;
	save_former_peer(sk, v == TRANSLATE ? &c->backend : to);
	if (v != TRANSLATE) {
		sock_peers.sk_storage_delete(sk);
		return;
	}
	peer = sock_peers.sk_storage_get(sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!peer) {
		count(NOT_RECORDED);
		return;
	}
	peer->socket = socket_id(ctx);
	peer->frontend = *to;
	peer->backend = c->backend;
	peer->service = c->service;
	peer->backend_id = c->backend_id;
}

static __always_inline bool is_exempt_cgroup(u64 id)
{
	return exempt_cgroups.lookup(&id) != NULL;
}

/* Whether this process is exempt, because its cgroup or an ancestor of it is. */
static __always_inline bool is_exempt(void)
{
	if (is_exempt_cgroup(get_current_cgroup_id()))
		return true;
#pragma unroll
	for (int level = 1; level <= CGROUP_LEVELS; level++) {
		u64 id = get_current_ancestor_cgroup_id(level);

		if (!id)
			return false;
		if (is_exempt_cgroup(id))
			return true;
	}
	return false;
}

/* Whether the kernel itself uses this socket (NFS, SMB, Ceph). Before Linux v6.6 (0bdf399342c5,
 * 86a7e0b69bd5, cedc019b9f26) an address that a hook replaces is replaced in the mount, too, which
 * would then reconnect to this backend for ever. struct bpf_sock does not show whose the socket is;
 * `sk` holds the address of struct sock, which does. */
static __always_inline bool is_kernel_socket(struct bpf_sock *sk)
{
	u32 bit = kernel_socket_bit();
	u64 address = 0;
	u8 bits = 0;

	if (!bit)
		return false;
	probe_read_kernel(&address, sizeof(address), &sk);
	probe_read_kernel(&bits, sizeof(bits), (void *)(address + bit / 8));
	return bits >> bit % 8 & 1;
}

/* Whether the route of this socket's packets is restricted to a device (SO_BINDTODEVICE,
 * IP_UNICAST_IF, IPV6_UNICAST_IF). struct bpf_sock shows the first only. */
static __always_inline bool is_bound_to_device(struct bpf_sock *sk)
{
	u64 socket = 0;

	if (!sk)
		return false;
	if (sk->bound_dev_if)
		return true;
	probe_read_kernel(&socket, sizeof(socket), &sk);
	if (place_of_unicast() && (u32)read_u64(socket + place_of_unicast()))
		return true;
	return sk->family == AF_INET6 && place_of_ipv6() &&
	       (u32)read_u64(read_u64(socket + place_of_ipv6()) + place_of_unicast6());
}

/* Whether the packet path has to serve this socket: one of the kernel's own, so that its mount
 * keeps the Service's address; or one of the node that is bound to a device, since its route to the
 * backend may use another one (systemd-resolved binds its sockets while they connect). By packets a
 * socket does not reach a backend in the node's own network: such a mount is translated, and stays
 * with the backend. */
static __always_inline bool needs_own_address(struct bpf_sock_addr *ctx, u64 netns,
					      struct target *backend)
{
	u32 flags = config_flags();

	return (((flags & CONFIG_KERNEL_SOCKETS) && is_kernel_socket(ctx->sk)) ||
		((flags & CONFIG_PACKET_PATH) && is_host(netns) && is_bound_to_device(ctx->sk))) &&
	       !find_node_address(&backend->address);
}

/* Whether the socket is bound to a loopback address, but the backend has another one: the kernel
 * would say that the address is invalid. Left alone, such a connection is refused. */
static __always_inline bool is_bound_to_loopback(struct bpf_sock *sk, const struct target *backend)
{
	struct address own;

	if (!sk)
		return false;
	own = v4_mapped(sk->src_ip4);
	if (sk->family == AF_INET6) {
		own.word[0] = sk->src_ip6[0];
		own.word[1] = sk->src_ip6[1];
		own.word[2] = sk->src_ip6[2];
		own.word[3] = sk->src_ip6[3];
	}
	return is_loopback(&own) && !is_loopback(&backend->address);
}

/* Whether the hooks leave this socket alone. Its packets keep the Service's address, and the packet
 * path serves them. Also true if there is no packet path: then nothing serves them. */
static __always_inline bool is_left_to_packet_path(u64 netns)
{
	u32 flags = config_flags();

	if ((flags & CONFIG_HOST_ONLY) && !is_host(netns))
		return true;
	return (flags & CONFIG_EXEMPTIONS) && is_exempt();
}

/* Counts and reports what choose() has decided for a socket of the current process. */
static __always_inline void account_choice(const struct target *to, const struct choice *c,
					   enum verdict v)
{
	bool fails = (v == REFUSE || v == DROP) && is_accounting(CONFIG_ACCOUNTING);
	bool monitored = v != PASS && is_monitored();
	struct failure failure;

	account_begin(c, v);
	if (!fails && !monitored)
		return;
	__builtin_memset(&failure, 0, sizeof(failure));
	failure.last.cgroup = get_current_cgroup_id();
	failure.last.frontend = *to;
	failure.last.backend = c->backend;
	failure.last.service = c->service;
	failure.last.backend_id = v == TRANSLATE ? c->backend_id : 0;
	failure.last.reason = c->reason;
	if (fails)
		record_failure(&failure, OWNER_NETWORK);
	if (monitored)
		report(&failure.last);
}

/* A UDP connect() sends nothing, so it succeeds even if no socket listens (as with kube-proxy).
 * ping, getaddrinfo() and others only want to know their own address. The packet path refuses the
 * first datagram. Without a packet path nothing would, so connect() fails. */
static __always_inline bool is_udp_probe(const struct target *to, const struct choice *c)
{
	return to->protocol == IPPROTO_UDP && c->reason == UNKNOWN_PORT &&
	       (config_flags() & CONFIG_PACKET_PATH);
}

/* choose() for a socket that has no backend yet. `connects`: for connect(). */
static __always_inline enum verdict choose_for_socket(struct bpf_sock_addr *ctx,
						      const struct target *to, bool connects,
						      struct choice *c)
{
	u64 netns = get_netns_cookie(ctx);
	struct client client = client_of(netns);
	enum verdict v;

	if (is_left_to_packet_path(netns)) {
		c->reason = LEFT_TO_PACKETS;
		return PASS;
	}
	v = choose(to, &client, c);
	if (v != PASS && !is_netns_of_cluster(ctx->sk, netns)) {
		c->reason = OTHER_NETWORK;
		return PASS;
	}
	if ((v == TRANSLATE && (needs_own_address(ctx, netns, &c->backend) ||
				is_bound_to_loopback(ctx->sk, &c->backend))) ||
	    (connects && is_udp_probe(to, c))) {
		c->reason = LEFT_TO_PACKETS;
		return PASS;
	}
	if (c->service && !(c->flags & SERVICE_CLUSTER_IP) &&
	    is_agent_socket(bpf_get_socket_cookie(ctx))) {
		c->reason = NOT_A_SERVICE;
		return PASS;
	}
	if (v == TRANSLATE ||
	    (config_flags() & CONFIG_SET_RETVAL)) /* otherwise its packets are counted */
		account_choice(to, c, v);
	return v;
}

/* During a take-over the old data plane still tracks connections of this pod, from ports that the
 * kernel assigned. Bind the socket to a port outside ip_local_port_range, or the old data plane
 * could take its replies for those of another connection. */
static __always_inline bool needs_reserved_port(void *ctx, enum verdict v)
{
	return v == TRANSLATE && (config_flags() & CONFIG_COEXISTING) &&
	       !is_host(get_netns_cookie(ctx));
}

static __always_inline __be16 random_reserved_port(void)
{
	return __builtin_bswap16(RESERVED_PORT_LOW + bpf_get_prandom_u32() % RESERVED_PORTS);
}

/* Whether this is still a frontend of this Service. */
static __always_inline bool is_frontend_of(const struct target *frontend, u32 id)
{
	struct target key = *frontend;
	struct service *service = service_at(&key), steady;
	enum read_result result;

	if (!service) {
		key = node_port_of(frontend);
		service = service_at(&key);
	}
	if (!service || service->id == id)
		return service != NULL;
	/* An element that was replaced during the read proves nothing: the next datagram checks
	 * again. */
	result = read_service(&key, &steady);
	return result == UNSTEADY || (result == STEADY && steady.id == id);
}

/* When the backend stopped serving the Service; 0: it has not in the last minutes. */
static __always_inline u64 last_cut(u32 service, const struct target *backend)
{
	struct cut_key key = {.service = service, .backend = *backend};
	u64 *when;

	key.backend.pad = 0; /* of a peer: enum peer_flags */
	when = udp_cuts.lookup(&key);
	return when ? *when : 0;
}

/* Whether the backend of this flow no longer serves it: the backend is gone, it has stopped serving
 * this Service, or the Service no longer has the frontend. A cut with the same timestamp as the
 * choice counts. */
static __always_inline bool is_cut(const struct udp_flow *flow)
{
	u32 id = flow->backend_id;

	if (!find_backend(&id) || !is_frontend_of(&flow->frontend, flow->service))
		return true;
	return flow->chosen_at <= last_cut(flow->service, &flow->backend);
}

static __always_inline u64 last_used(const struct udp_flow *flow)
{
	return flow->last_sent > flow->last_received ? flow->last_sent : flow->last_received;
}

static __always_inline struct udp_flow *flow_at(struct udp_flows *flows, u32 index)
{
	return index < FLOWS_PER_SOCKET ? &flows->flow[index] : NULL;
}

/* The index of the flow to this frontend; FLOWS_PER_SOCKET if there is none. */
static __always_inline u32 index_of_flow(const struct udp_flows *flows,
					 const struct target *frontend)
{
	u32 index = FLOWS_PER_SOCKET;

#pragma unroll
	for (u32 i = 0; i < FLOWS_PER_SOCKET; i++)
		if (same_target(&flows->flow[i].frontend, frontend))
			index = i;
	return index;
}

/* The element to overwrite: a free one, otherwise the one that has been idle longest. */
static __always_inline u32 oldest_index(const struct udp_flows *flows)
{
	u64 first = ~0ULL;
	u32 index = 0;

#pragma unroll
	for (u32 i = 0; i < FLOWS_PER_SOCKET; i++) {
		u64 used = last_used(&flows->flow[i]);

		if (used < first) {
			first = used;
			index = i;
		}
	}
	return index;
}

/* The index of the flow to this backend that sent last. If one socket has sent to two frontends
 * with the same backend, a reply does not show which one it is from. */
static __always_inline u32 index_by_backend(const struct udp_flows *flows,
					    const struct target *backend)
{
	u32 index = FLOWS_PER_SOCKET;
	u64 newest = 0;

#pragma unroll
	for (u32 i = 0; i < FLOWS_PER_SOCKET; i++) {
		const struct udp_flow *flow = &flows->flow[i];

		if (flow->last_sent >= newest && flow->frontend.protocol &&
		    same_target(&flow->backend, backend)) {
			newest = flow->last_sent;
			index = i;
		}
	}
	return index;
}

/* Stores the flow for the next datagrams and for replies. Another thread may use the same socket at
 * the same time, so the element belongs to no frontend while it is written. */
static __always_inline void create_flow(struct bpf_sock_addr *ctx, const struct target *to,
					const struct choice *c, u64 now)
{
	struct bpf_sock *sk = ctx->sk;
	struct udp_flows *flows;
	struct udp_flow *flow;
	u32 index;

	flows = sk ? udp_flows.sk_storage_get(sk, NULL, BPF_SK_STORAGE_GET_F_CREATE) : NULL;
	if (!flows) {
		count(NOT_RECORDED);
		return;
	}
	flows->socket = socket_id(ctx);
	index = index_of_flow(flows, to);
	if (index == FLOWS_PER_SOCKET)
		index = oldest_index(flows);
	flow = flow_at(flows, index);
	if (!flow)
		return;
	flow->frontend.protocol = 0;
	asm volatile("" ::: "memory"); /* the compiler would write the times first */
	flow->chosen_at = now;
	flow->last_sent = now;
	flow->last_received = 0;
	flow->backend = c->backend;
	flow->service = c->service;
	flow->backend_id = c->backend_id;
	flow->frontend.address = to->address;
	flow->frontend.port = to->port;
	asm volatile("" ::: "memory");
	flow->frontend.protocol = to->protocol;
}

/* Finds the backend of the flow, if it is in use and the backend serves. */
static __always_inline bool find_flow(struct bpf_sock *sk, const struct target *to, u64 now,
				      struct choice *c)
{
	struct udp_flows *flows = sk ? udp_flows.sk_storage_get(sk, NULL, 0) : NULL;
	struct udp_flow *flow;

	if (!flows)
		return false;
	flow = flow_at(flows, index_of_flow(flows, to));
	if (!flow || elapsed(last_used(flow), now) > FLOW_IDLE_NS || is_cut(flow))
		return false;
	c->backend = flow->backend;
	c->backend_id = flow->backend_id;
	c->service = flow->service;
	flow->last_sent = now;
	/* Compare again: another thread may have reused the element in between (create_flow()). */
	return same_target(&flow->frontend, to);
}

/* A socket that is connected to this frontend and also names it in sendmsg() keeps the backend of
 * connect(), since the kernel accepts replies from no other address. If it is no longer connected
 * (the agent has destroyed it, or the application has dissolved the association), it chooses
 * again. */
static __always_inline bool find_peer(struct bpf_sock *sk, const struct target *to,
				      struct choice *c)
{
	struct peer *peer = peer_of(sk);

	if (!peer || !is_connected_to(sk, &peer->backend))
		peer = former_peer_of(sk);
	if (!peer || !is_connected_to(sk, &peer->backend) || !same_target(&peer->frontend, to))
		return false;
	c->backend = peer->backend;
	c->backend_id = peer->backend_id;
	c->service = peer->service;
	return find_backend(&c->backend_id) != NULL;
}

/* connect(): replaces `to` by the backend. A UDP socket that has sent or connected to this frontend
 * keeps its backend. Since Linux v6.1 the hooks also run for ping sockets, which have no port. */
static __always_inline enum verdict translate_connect(struct bpf_sock_addr *ctx, struct target *to,
						      enum reason *reason)
{
	struct choice c = {};
	enum verdict v = PASS;

	if (to->protocol == IPPROTO_UDP &&
	    ((find_peer(ctx->sk, to, &c) && !last_cut(c.service, &c.backend)) ||
	     find_flow(ctx->sk, to, bpf_ktime_get_ns(), &c))) {
		c.reason = TRANSLATED_BY_FLOW;
		v = TRANSLATE;
	} else if (to->protocol == IPPROTO_TCP || to->protocol == IPPROTO_UDP) {
		v = choose_for_socket(ctx, to, true, &c);
	}
	record_peer(ctx, v, to, &c);
	if (v == TRANSLATE)
		*to = c.backend;
	*reason = c.reason;
	return v;
}

/* sendmsg() with an address, on a UDP socket: replaces `to` by the backend. A flow in use keeps its
 * backend even if its socket is left to the packet path by now. */
static __always_inline enum verdict translate_sendmsg(struct bpf_sock_addr *ctx, struct target *to,
						      enum reason *reason)
{
	struct bpf_sock *sk = ctx->sk;
	u64 now = bpf_ktime_get_ns();
	struct choice c = {};
	enum verdict v = TRANSLATE;

	if (find_peer(sk, to, &c) || find_flow(sk, to, now, &c)) {
		c.reason = TRANSLATED_BY_FLOW;
	} else {
		v = choose_for_socket(ctx, to, false, &c);
		if (v == TRANSLATE)
			create_flow(ctx, to, &c, now);
	}
	if (v == TRANSLATE)
		*to = c.backend;
	*reason = c.reason;
	return v;
}

/* recvmsg() and getpeername(): replaces `from` by the frontend, if it is the socket's backend. */
static __always_inline bool reverse_peer(struct bpf_sock *sk, struct target *from)
{
	struct peer *peer = peer_of(sk);

	if (!peer || !same_target(&peer->backend, from))
		peer = former_peer_of(sk);
	if (!peer || !same_target(&peer->backend, from))
		return false;
	*from = peer->frontend;
	count(REVERSED);
	return true;
}

static __always_inline bool translate_recvmsg(struct bpf_sock_addr *ctx, struct target *from)
{
	struct bpf_sock *sk = ctx->sk;
	struct udp_flows *flows = sk ? udp_flows.sk_storage_get(sk, NULL, 0) : NULL;
	struct udp_flow *flow = flows ? flow_at(flows, index_by_backend(flows, from)) : NULL;
	u64 now = bpf_ktime_get_ns();

	if (!flow || is_cut(flow))
		return reverse_peer(sk, from);
	*from = flow->frontend;
	/* Do not revive an expired flow: the agent may have deleted its entry in udp_cuts. */
	if (elapsed(last_used(flow), now) <= FLOW_IDLE_NS)
		flow->last_received = now;
	count(REVERSED);
	return true;
}

/* ---- the end of TCP connections -------------------------------------------------------------
 *
 * When a connection ends, the kernel knows how many bytes went each way, the retransmits, the
 * round-trip time, and whether it ended with FINs. If connect() directed a socket to a backend, the
 * socket requests a callback at its end, which may be long after close().
 */

static __always_inline void request_end_callback(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct peer *peer = peer_of(sk);

	if (!sk || !peer)
		return;
	if (bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG))
		return;
	peer->backend.pad |= PEER_END_COUNTED;
	start_connect_timer(sk);
}

/* Whether the peer had acknowledged our FIN when the connection ended in this state. The kernel
 * counts a FIN as one byte. */
static __always_inline bool fin_was_acked(u32 state)
{
	return state == BPF_TCP_FIN_WAIT2 || state == BPF_TCP_CLOSING || state == BPF_TCP_LAST_ACK;
}

/* The same for the peer's FIN. In FIN_WAIT2 the connection may end before the FIN arrives; then
 * bytes_out is one byte too small. */
static __always_inline bool fin_was_received(u32 state)
{
	return state == BPF_TCP_CLOSE_WAIT || fin_was_acked(state);
}

/* Bytes of data; `control`: sequence numbers that SYN and FIN took. */
static __always_inline u64 payload(u64 bytes, u64 control)
{
	return bytes > control ? bytes - control : 0;
}

/* The failures that trace.h would have noticed, as far as the end of a connection shows them: a
 * reset may be the client's own. */
static __always_inline void account_untraced(struct bpf_sock_ops *ctx, struct counts *totals)
{
	u32 before = ctx->args[0];

	if (before == BPF_TCP_SYN_SENT && ctx->segs_in)
		add(&totals->refused, 1);
	else if (before == BPF_TCP_SYN_SENT && ctx->total_retrans)
		add(&totals->unanswered, 1);
	else if (before == BPF_TCP_ESTABLISHED || before == BPF_TCP_FIN_WAIT1 ||
		 before == BPF_TCP_CLOSE_WAIT)
		add(&totals->reset, 1);
}

static __always_inline void account_established(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct peer *peer = peer_of(sk);

	/* A socket with TCP_REPAIR, as the agent tries Services with, connects without a packet. */
	if (sk && peer && (peer->backend.pad & PEER_END_COUNTED) && ctx->segs_in)
		stop_connect_timer(sk, peer->service);
}

static __always_inline void account_end(struct bpf_sock_ops *ctx, const struct peer *peer)
{
	struct counts *totals = counts_of(peer->service, peer->backend_id);
	struct latencies *histograms;
	u32 before = ctx->args[0];
	u64 bytes;

	if (!totals)
		return;
	add(&totals->ended, 1);
	if (ctx->total_retrans)
		add(&totals->retransmits, ctx->total_retrans);
	if (!is_accounting(CONFIG_TRACING))
		account_untraced(ctx, totals);
	if (before == BPF_TCP_SYN_SENT)
		return;
	bytes = payload(ctx->bytes_acked, 1 + fin_was_acked(before)); /* 1 for the SYN */
	add(&totals->bytes_in, bytes);
	bytes = payload(ctx->bytes_received, fin_was_received(before));
	add(&totals->bytes_out, bytes);
	if (!ctx->srtt_us)
		return;
	add(&totals->rtt_us,
	    ctx->srtt_us >> 3); /* the kernel keeps eight times the smoothed time */
	add(&totals->rtts, 1);
	histograms = latencies_of(peer->service);
	if (histograms)
		observe(&histograms->round_trip, (u64)(ctx->srtt_us >> 3) * 1000);
}

/* Called several times for each TCP connection of the node, at either end of it. */
int sock_ops(struct bpf_sock_ops *ctx)
{
	u32 op = ctx->op;
	struct peer *peer;

	if (op == BPF_SOCK_OPS_TCP_CONNECT_CB) {
		if (is_accounting(CONFIG_COUNT_CONNECTION_ENDS))
			request_end_callback(ctx);
		return 1;
	}
	if (op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB) {
		account_established(ctx);
		return 1;
	}
	/* args: the old and the new state */
	if (op != BPF_SOCK_OPS_STATE_CB || ctx->args[1] != BPF_TCP_CLOSE)
		return 1;
	peer = peer_of(ctx->sk);
	if (!peer || !(peer->backend.pad & PEER_END_COUNTED))
		return 1;
	peer->backend.pad = 0;
	account_end(ctx, peer);
	return 1;
}

#include "trace.h"

/* ---- the hooks, one for each address family ----------------------------------------------- */

/* MPTCP sockets use TCP frontends: that is what they are on the wire. */
static __always_inline u8 protocol_of(u32 protocol)
{
	return protocol == IPPROTO_MPTCP ? IPPROTO_TCP : protocol;
}

static __always_inline struct target target_v4(struct bpf_sock_addr *ctx)
{
	struct target t = {};

	t.address = v4_mapped(ctx->user_ip4);
	t.port = ctx->user_port;
	t.protocol = protocol_of(ctx->protocol);
	return t;
}

static __always_inline struct target target_v6(struct bpf_sock_addr *ctx)
{
	struct target t = {};

	t.address.word[0] = ctx->user_ip6[0];
	t.address.word[1] = ctx->user_ip6[1];
	t.address.word[2] = ctx->user_ip6[2];
	t.address.word[3] = ctx->user_ip6[3];
	t.port = ctx->user_port;
	t.protocol = protocol_of(ctx->protocol);
	return t;
}

static __always_inline void write_v4(struct bpf_sock_addr *ctx, const struct target *t)
{
	ctx->user_ip4 = t->address.word[3];
	ctx->user_port = t->port;
}

static __always_inline void write_v6(struct bpf_sock_addr *ctx, const struct target *t)
{
	ctx->user_ip6[0] = t->address.word[0];
	ctx->user_ip6[1] = t->address.word[1];
	ctx->user_ip6[2] = t->address.word[2];
	ctx->user_ip6[3] = t->address.word[3];
	ctx->user_port = t->port;
}

/* A socket that already has a port keeps it: the kernel gives no second one. */
static __always_inline void bind_v4(struct bpf_sock_addr *ctx)
{
	struct socket_v4 own = {.family = AF_INET};

	for (int i = 0; i < RESERVED_PORT_TRIES; i++) {
		own.port = random_reserved_port();
		if (bind(ctx, &own, sizeof(own)) != -EADDRINUSE)
			return;
	}
}

static __always_inline void bind_v6(struct bpf_sock_addr *ctx)
{
	struct socket_v6 own = {.family = AF_INET6};

	for (int i = 0; i < RESERVED_PORT_TRIES; i++) {
		own.port = random_reserved_port();
		if (bind(ctx, &own, sizeof(own)) != -EADDRINUSE)
			return;
	}
}

int connect4(struct bpf_sock_addr *ctx)
{
	struct target to = target_v4(ctx);
	enum reason reason;
	enum verdict v = translate_connect(ctx, &to, &reason);

	if (needs_reserved_port(ctx, v))
		bind_v4(ctx);
	if (v == TRANSLATE)
		write_v4(ctx, &to);
	return finish(v, reason);
}

int connect6(struct bpf_sock_addr *ctx)
{
	struct target to = target_v6(ctx);
	enum reason reason;
	enum verdict v = translate_connect(ctx, &to, &reason);

	if (needs_reserved_port(ctx, v))
		bind_v6(ctx);
	if (v == TRANSLATE)
		write_v6(ctx, &to);
	return finish(v, reason);
}

int sendmsg4(struct bpf_sock_addr *ctx)
{
	struct target to = target_v4(ctx);
	enum reason reason;
	enum verdict v = translate_sendmsg(ctx, &to, &reason);

	if (v == TRANSLATE)
		write_v4(ctx, &to);
	return finish(v, reason);
}

int sendmsg6(struct bpf_sock_addr *ctx)
{
	struct target to = target_v6(ctx);
	enum reason reason;
	enum verdict v = translate_sendmsg(ctx, &to, &reason);

	if (v == TRANSLATE)
		write_v6(ctx, &to);
	return finish(v, reason);
}

int recvmsg4(struct bpf_sock_addr *ctx)
{
	struct target from = target_v4(ctx);

	if (translate_recvmsg(ctx, &from))
		write_v4(ctx, &from);
	return 1;
}

int recvmsg6(struct bpf_sock_addr *ctx)
{
	struct target from = target_v6(ctx);

	if (translate_recvmsg(ctx, &from))
		write_v6(ctx, &from);
	return 1;
}

int getpeername4(struct bpf_sock_addr *ctx)
{
	struct target from = target_v4(ctx);

	if (reverse_peer(ctx->sk, &from))
		write_v4(ctx, &from);
	return 1;
}

int getpeername6(struct bpf_sock_addr *ctx)
{
	struct target from = target_v6(ctx);

	if (reverse_peer(ctx->sk, &from))
		write_v6(ctx, &from);
	return 1;
}
