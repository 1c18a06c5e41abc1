/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Service addresses for the sockets of a node and its pods: the nine cgroup programs.
 *
 * connect() on a frontend is pointed at a backend, once; no packet is touched afterwards.
 * Unconnected UDP is pointed at a backend per datagram, to the same one as long as the flow is
 * in use and the backend serves, and replies get the frontend's address back. Who asks for the
 * peer's address sees the frontend.
 *
 * The family is known only in the hooks at the end of this file.
 */
#include "types.h"
#include "lib/compat.h"
#include "lib/addr.h"
#include "maps.h"

static __always_inline u32 socket_cgroup(void)
{
	return (u32)get_current_cgroup_id();
}

#include "lookup.h"
#include "account.h"

/* An unconnected socket's flow keeps its backend this long after its last datagram: what the
 * kernel's conntrack gives to UDP streams, and so what kube-proxy's clients are used to. */
#define FLOW_IDLE_NS (120ULL * 1000000000)
/* A pod's cgroup is looked for among the uppermost so many, and the process' own. kubelet's are at
 * level 2 to 4, or 6 where a node is itself a container. */
#define CGROUP_LEVELS 10
/* Ports beyond those that the kernel gives sockets by itself (ip_local_port_range), and tries to
 * find a free one of them. */
#define RESERVED_PORT_LOW 61000
#define RESERVED_PORTS 4536
#define RESERVED_PORT_TRIES 8

/* A number for this socket that no other socket ever has. Before Linux v5.10 (92acdc58ab11) socket
 * cookies were unique within their network namespace only, so its cookie is mixed in; both count
 * up from 1, and 2^44 sockets or 2^20 namespaces are more than a node sees. */
static __always_inline u64 socket_id(void *ctx)
{
	return bpf_get_socket_cookie(ctx) ^ (get_netns_cookie(ctx) << 44);
}

static __always_inline struct client client_of(u64 netns)
{
	struct client client = {.netns = netns, .key.kind = CLIENT_NETNS};

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

/* Whether the hook ends the system call. Where the kernel has no bpf_set_retval (before v5.18) it
 * would fail with EPERM, which no client of a Service expects: there the address stays as dialled
 * and the packet path answers. */
static __always_inline bool ends_syscall(enum verdict v)
{
	return (v == REFUSE || v == DROP) && (config_flags() & CONFIG_SET_RETVAL);
}

/* Counts, and returns what the hook returns: 1 continues the system call, 0 ends it with an errno.
 */
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

/* Only UDP sockets may connect() while they are connected, so no other socket pays for it. */
static __always_inline bool may_have_former_peer(struct bpf_sock *sk)
{
	return sk && sk->state == BPF_TCP_ESTABLISHED;
}

static __always_inline struct peer *former_peer_of(struct bpf_sock *sk)
{
	return may_have_former_peer(sk) ? former_peers.sk_storage_get(sk, NULL, 0) : NULL;
}

/* Whether this is where the kernel sends what the socket's owner sends without an address. */
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
	return same_address(&peer, &to->address) && (__be16)sk->dst_port == to->port;
}

/* connect() of a connected socket may still fail (no route to the new peer), and then the kernel
 * keeps the old association: so its peer is kept as well, until the socket is connected to the
 * same backend by another way. `to`: the new peer. */
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

/* Records the peer of a socket that connects. If it connects to an address that is no frontend, its
 * old peer is deleted: getpeername() must not show it. */
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

/* Whether this process, or a cgroup that it is in, asked to be left alone. */
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

/* Whether the packet path is to serve this socket: its packets keep the Service's address. */
static __always_inline bool is_left_to_packet_path(u64 netns)
{
	u32 flags = config_flags();

	if ((flags & CONFIG_HOST_ONLY) && !is_host(netns))
		return true;
	return (flags & CONFIG_EXEMPTIONS) && is_exempt();
}

/* choose(), for a socket that asks for the first time. */
static __always_inline enum verdict choose_for_socket(void *ctx, const struct target *to,
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
	if (c->service && !(c->flags & SERVICE_CLUSTER_IP) &&
	    is_agent_socket(bpf_get_socket_cookie(ctx))) {
		c->reason = NOT_A_SERVICE;
		return PASS;
	}
	if (v == TRANSLATE || (config_flags() & CONFIG_SET_RETVAL)) /* else its packets are asked */
		account_begin(c, v);
	return v;
}

/* Where another data plane still knows connections of a pod by their ports: whether this socket,
 * which is about to talk to a backend of theirs directly, needs one that none of them has. Else the
 * answers are taken for theirs. */
static __always_inline bool needs_reserved_port(void *ctx, enum verdict v)
{
	return v == TRANSLATE && (config_flags() & CONFIG_COEXISTING) &&
	       !is_host(get_netns_cookie(ctx));
}

static __always_inline __be16 random_reserved_port(void)
{
	return __builtin_bswap16(RESERVED_PORT_LOW + bpf_get_prandom_u32() % RESERVED_PORTS);
}

/* Whether connect() succeeds though nobody listens there: that of UDP says nothing to anybody yet,
 * and it fails with no other proxy. ping, getaddrinfo() and others only ask so for the address that
 * they would have. Who sends something is refused then, by the packet path: without one nobody
 * would tell, and connect() does. */
static __always_inline bool is_udp_probe(const struct target *to, const struct choice *c)
{
	return to->protocol == IPPROTO_UDP && c->reason == UNKNOWN_PORT &&
	       (config_flags() & CONFIG_PACKET_PATH);
}

/* connect(): `to` becomes the backend. Since Linux v6.1 it has a hook for ping's sockets, too,
 * which have no port. */
static __always_inline enum verdict translate_connect(struct bpf_sock_addr *ctx, struct target *to,
						      enum reason *reason)
{
	struct choice c = {};
	enum verdict v = PASS;

	if (to->protocol == IPPROTO_TCP || to->protocol == IPPROTO_UDP)
		v = choose_for_socket(ctx, to, &c);
	if (is_udp_probe(to, &c)) {
		c.reason = LEFT_TO_PACKETS;
		v = PASS;
	}
	record_peer(ctx, v, to, &c);
	if (v == TRANSLATE)
		*to = c.backend;
	*reason = c.reason;
	return v;
}

/* Whether this frontend still is one of this Service's. */
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
	/* An element that was replaced while it was read says nothing: the next datagram asks. */
	result = read_service(&key, &steady);
	return result == UNSTEADY || (result == STEADY && steady.id == id);
}

/* Whether what this flow chose serves no more: its backend, there or for this Service, or its
 * frontend. A time of the same tick may be from before. */
static __always_inline bool is_cut(const struct udp_flow *flow)
{
	struct cut_key key = {.service = flow->service, .backend = flow->backend};
	u32 id = flow->backend_id;
	u64 *when;

	if (!backends.lookup(&id) || !is_frontend_of(&flow->frontend, flow->service))
		return true;
	when = udp_cuts.lookup(&key);
	return when && flow->chosen_at <= *when;
}

static __always_inline u64 last_used(const struct udp_flow *flow)
{
	return flow->last_sent > flow->last_received ? flow->last_sent : flow->last_received;
}

static __always_inline struct udp_flow *flow_at(struct udp_flows *flows, u32 index)
{
	return index < FLOWS_PER_SOCKET ? &flows->flow[index] : NULL;
}

/* The place of the flow to this frontend; FLOWS_PER_SOCKET if there is none. */
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

/* The place for one more: of those that are free or quiet the one that was used first. */
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

/* The flow of the newest question to this backend: two frontends with one backend, asked from one
 * socket, cannot be told apart by the answer. */
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

/* Answers and the next datagrams of this socket know the flow from now on. Another thread may send
 * by the same socket meanwhile: while the place is written it belongs to no frontend. */
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
	flow->chosen_at = now;
	flow->last_sent = now;
	flow->last_received = 0;
	flow->backend = c->backend;
	flow->service = c->service;
	flow->backend_id = c->backend_id;
	flow->frontend.address = to->address;
	flow->frontend.port = to->port;
	flow->frontend.protocol = to->protocol;
}

/* The backend of the flow, while it is in use and the backend serves. */
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
	return same_target(&flow->frontend, to);
}

/* A socket that is connected to this very frontend and names it again goes on with the backend
 * that connect() chose: the kernel would not take answers from another one. One that was connected
 * to it (the agent ends such sockets, or its owner has dissolved the connection) chooses anew. */
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
	return backends.lookup(&c->backend_id) != NULL;
}

/* sendmsg() with an address on a UDP socket: `to` becomes the backend. A flow that is in use goes
 * on with its backend also when its socket is left to the packet path by now. */
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
		v = choose_for_socket(ctx, to, &c);
		if (v == TRANSLATE)
			create_flow(ctx, to, &c, now);
	}
	if (v == TRANSLATE)
		*to = c.backend;
	*reason = c.reason;
	return v;
}

/* recvmsg() and getpeername(): `from` becomes the frontend, if it is our backend. */
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
	if (elapsed(last_used(flow), now) <= FLOW_IDLE_NS) /* else it is over: see udp_cuts */
		flow->last_received = now;
	count(REVERSED);
	return true;
}

/* ---- the end of TCP connections -------------------------------------------------------------
 *
 * At the end of a connection the kernel knows how much went each way, what was sent again, how long
 * the way was, and whether it ended in good order. A socket that connect() has pointed at a backend
 * asks to be told of its end, which may be long after close().
 */

static __always_inline void request_end_callback(struct bpf_sock_ops *ctx)
{
	struct peer *peer = peer_of(ctx->sk);

	if (!peer)
		return;
	if (!bpf_sock_ops_cb_flags_set(ctx,
				       ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG))
		peer->backend.pad = 1;
}

/* Whether the other side has taken our FIN, and we its: each counts as a byte. An end from
 * FIN_WAIT2 may be one before its FIN has come; then a byte is missing. */
static __always_inline bool fin_was_acked(u32 state)
{
	return state == BPF_TCP_FIN_WAIT2 || state == BPF_TCP_CLOSING || state == BPF_TCP_LAST_ACK;
}

static __always_inline bool fin_was_received(u32 state)
{
	return state == BPF_TCP_CLOSE_WAIT || fin_was_acked(state);
}

/* `but`: what of `bytes` is none. */
static __always_inline u64 payload(u64 bytes, u64 control)
{
	return bytes > control ? bytes - control : 0;
}

static __always_inline void account_end(struct bpf_sock_ops *ctx, const struct peer *peer)
{
	struct counts *totals = counts_of(peer->service, peer->backend_id);
	u32 before = ctx->args[0];
	u64 bytes;

	if (!totals)
		return;
	add(&totals->ended, 1);
	if (ctx->total_retrans)
		add(&totals->retransmits, ctx->total_retrans);
	if (before == BPF_TCP_SYN_SENT) {
		add(&totals->unanswered, 1);
		return;
	}
	if (before == BPF_TCP_ESTABLISHED || before == BPF_TCP_FIN_WAIT1 ||
	    before == BPF_TCP_CLOSE_WAIT)
		add(&totals->broken, 1);
	bytes = payload(ctx->bytes_acked, 1 + fin_was_acked(before)); /* the SYN is one */
	add(&totals->bytes_in, bytes);
	bytes = payload(ctx->bytes_received, fin_was_received(before));
	add(&totals->bytes_out, bytes);
	if (ctx->srtt_us) {
		add(&totals->rtt_us, ctx->srtt_us >> 3);
		add(&totals->rtts, 1);
	}
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
	if (op != BPF_SOCK_OPS_STATE_CB || ctx->args[1] != BPF_TCP_CLOSE)
		return 1;
	peer = peer_of(ctx->sk);
	if (!peer || !peer->backend.pad)
		return 1;
	peer->backend.pad = 0;
	account_end(ctx, peer);
	return 1;
}

/* ---- the hooks: the only lines that know a family ------------------------------------------ */

/* MPTCP sockets dial as what they are on the wire. */
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

/* A socket that has a port already keeps it: the kernel gives no second one. */
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
