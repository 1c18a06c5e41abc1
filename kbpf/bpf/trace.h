/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Notices that the backend of a socket fails: three programs at tracepoints of the kernel that only
 * failures reach, so a connection that succeeds costs nothing. Linux v5.11 (8e4597c627fb): before
 * that, such programs cannot find a socket's peer.
 *
 * None of these tracepoints has the packet that arrived, so a reset or an ICMP error that a client
 * sends to its own socket looks like the backend's. Whoever draws a conclusion needs several
 * clients that do not belong together (dataplane/bpf/failing_backends.py).
 *
 * A tracepoint fires for every socket of the machine. Only those that a hook of ours has directed
 * to a backend have a peer.
 */
#pragma once

#include "failures.h"
#include "lib/compat.h"

/* Places of sock_common.skc_rcv_saddr and skc_num, which are in unions without a name. They have
 * been the same since Linux v3.13. */
#define PLACE_OF_ADDRESS4 4
#define PLACE_OF_PORT 14

/* The address of the socket: the first argument of each of these tracepoints. The verifier knows
 * its type. */
static __always_inline void *traced_socket(const u64 *arguments)
{
	return (void *)arguments[0];
}

static __always_inline u8 read_state(u64 sk)
{
	u8 state = 0;

	probe_read_kernel(&state, sizeof(state), (void *)(sk + place_of_state()));
	return state;
}

static __always_inline int read_error(u64 sk)
{
	int error = 0;

	probe_read_kernel(&error, sizeof(error), (void *)(sk + place_of_error()));
	return error;
}

/* The id of the socket's cgroup v2. The lowest bit is set if there is none: before Linux v5.15 the
 * word holds a class id of cgroup v1 then. */
static __always_inline u64 read_cgroup_id(u64 sk)
{
	u64 cgroup = read_u64(sk + place_of_cgroup());

	if (!cgroup || (cgroup & 1))
		return 0;
	return read_u64(read_u64(cgroup + place_of_cgroup_node()) + place_of_node_id());
}

static __always_inline void read_client(u64 sk, const struct peer *peer, struct target *client)
{
	u16 port = 0;

	if (is_v4(&peer->backend.address)) {
		__be32 address = 0;

		probe_read_kernel(&address, sizeof(address), (void *)(sk + PLACE_OF_ADDRESS4));
		client->address = v4_mapped(address);
	} else {
		probe_read_kernel(&client->address, sizeof(client->address),
				  (void *)(sk + place_of_address6()));
	}
	probe_read_kernel(&port, sizeof(port), (void *)(sk + PLACE_OF_PORT));
	client->port = bpf_htons(port);
	client->protocol = peer->frontend.protocol;
}

/* `counts`: this connection has not been counted as failed yet. */
static __always_inline void fail(u64 sk, const struct peer *peer, enum reason reason, bool counts)
{
	struct counts *totals = counts ? counts_of(peer->service, peer->backend_id) : NULL;
	struct failure failure = {};
	struct event *event = &failure.last;

	count(reason);
	if (totals)
		account_failure(totals, reason);
	event->cgroup = read_cgroup_id(sk);
	read_client(sk, peer, &event->client);
	event->frontend = peer->frontend;
	event->backend = peer->backend;
	event->backend.pad = 0;
	event->service = peer->service;
	event->backend_id = peer->backend_id;
	event->reason = reason;
	record_failure(&failure, OWNER_NETWORK);
	if (is_monitored())
		report(event);
}

/* tcp_receive_reset(sk): the other side has reset the connection. */
int trace_reset(u64 *arguments)
{
	void *sk = traced_socket(arguments);
	struct peer *peer = sock_peers.sk_storage_get(sk, NULL, 0);

	if (peer)
		fail((u64)sk, peer,
		     read_state((u64)sk) == BPF_TCP_SYN_SENT ? BACKEND_REFUSED : BACKEND_RESET,
		     true);
	return 0;
}

/* tcp_retransmit_skb(sk, skb): here only SYNs are of interest, and of these the first repetition,
 * after a second. */
int trace_retransmit(u64 *arguments)
{
	void *sk = traced_socket(arguments);
	struct peer *peer;

	if (read_state((u64)sk) != BPF_TCP_SYN_SENT)
		return 0;
	peer = sock_peers.sk_storage_get(sk, NULL, 0);
	if (!peer || (peer->backend.pad & PEER_UNANSWERED))
		return 0;
	peer->backend.pad |= PEER_UNANSWERED;
	fail((u64)sk, peer, BACKEND_UNANSWERED, true);
	return 0;
}

/* inet_sk_error_report(sk): the socket has an error. A reset, or a SYN without an answer, is
 * recorded by then. A UDP socket may have one for each datagram: it counts once. */
int trace_error(u64 *arguments)
{
	void *sk = traced_socket(arguments);
	struct peer *peer = sock_peers.sk_storage_get(sk, NULL, 0);
	int error;

	if (!peer)
		return 0;
	error = read_error((u64)sk);
	if (peer->frontend.protocol == IPPROTO_UDP && error == ECONNREFUSED) {
		fail((u64)sk, peer, BACKEND_REFUSED, !(peer->backend.pad & PEER_REFUSED));
		peer->backend.pad |= PEER_REFUSED;
	} else if (peer->frontend.protocol == IPPROTO_TCP && error == ETIMEDOUT &&
		   !(peer->backend.pad & PEER_UNANSWERED)) {
		fail((u64)sk, peer, BACKEND_RESET, true);
	}
	return 0;
}
