/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Packets that may begin a flow: tc_recheck and tc_coexist decide whether one does, tc_choose
 * chooses its backend, and tc_route how its packets leave.
 */
#pragma once

#include "types.h"
#include "lookup.h"
#include "account.h"
#include "lib/hash.h"
#include "lib/packet.h"
#include "tc/devices.h"
#include "tc/entries.h"
#include "tc/hop.h"
#include "tc/known.h"
#include "tc/receive.h"
#include "tc/scratch.h"
#include "tc/tails.h"

#define ADDRESS_NOT_CHOSEN __builtin_bswap32(1) /* ::1: a source is needed, but not known yet */

BPF_F_TABLE("lpm_trie", struct network_key, u32, local_networks, 64, BPF_F_NO_PREALLOC);

/* client slot -> the number that identifies a SYN that another data plane got while we were
 * passive. Full: the oldest is evicted, and a retransmission of its SYN begins a flow of ours. */
BPF_TABLE("lru_hash", struct client_slot, u32, foreign_flows, 64);

/* 0 -> until when no flow may begin (ns, CLOCK_MONOTONIC). Devices switch to new programs one after
 * the other. If the new programs use other flow maps, a flow that begins in between would be known
 * on only one of its two devices. So the packets that would begin one are dropped; a SYN is
 * retransmitted after a second. A point in time expires even if the agent dies. All versions of
 * kbpf share this map, so its layout must never change. */
BPF_TABLE("array", u32, u64, new_flows_paused_until, 1);

/* Whether the backend has to see the node's address instead of the client's, as with kube-proxy. A
 * pod that reaches itself through a Service needs SNAT, or it would reply to itself directly. */
static __always_inline bool masquerades(const struct choice *c, const struct node *n,
					const struct device *device, const struct address *client)
{
	struct network_key key = {.bits = 128, .address = *client};

	if (same_address(client, &c->backend.address))
		return true;
	if (!(c->flags & SERVICE_CLUSTER_IP))
		return !(c->flags & SERVICE_EXTERNAL_LOCAL);
	if ((n->flags & NODE_MASQUERADE_ALL) || !(n->flags & NODE_DETECTS_LOCAL))
		return n->flags & NODE_MASQUERADE_ALL;
	if (n->flags & NODE_LOCAL_NETWORKS)
		return !local_networks.lookup(&key);
	return !(device->flags & DEVICE_LOCAL);
}

/* Whether a packet without a flow goes to tc_choose. While coexisting with another data plane, all
 * packets that begin a connection do: the other one may know a Service that we do not know yet, see
 * tc_coexist(). */
static __always_inline bool may_begin(const struct target *to)
{
	u32 zero = 0;
	struct node *n;

	if (may_be_service(to))
		return true;
	n = node.lookup(&zero);
	return n && (n->flags & (NODE_PASSIVE | NODE_COEXISTING));
}

/* Starts a new flow for a packet, or lets tc_recheck decide whether its known flow has expired. */
static __always_inline int start_flow(struct __sk_buff *skb, struct scratch *s, u8 restart,
				      u32 tail)
{
	s->begin = restart ? BEGIN_RESTART : 0;
	s->resume_tail = tail;
	return restart == RESTART_CHECK ? go(skb, TAIL_RECHECK) : go(skb, tail);
}

static __always_inline bool is_paused(u64 now)
{
	u32 zero = 0;
	u64 *until = new_flows_paused_until.lookup(&zero);

	return until && *until > now;
}

/* Chooses a backend, and describes the new flow in the scratch buffer. False: there is no flow, and
 * `action` says what to do with the packet. */
static __always_inline bool describe_flow(struct __sk_buff *skb, struct scratch *s,
					  struct client *client, struct choice *c, int *action)
{
	struct packet *p = &s->packet;
	struct flow *flow = &s->flow;
	enum verdict v;

	client->tuple = (const u32 *)&p->tuple;
	client->key.client = p->tuple.from.address;
	client->owner = s->owner;
	v = choose(&p->tuple.to, client, c);
	if (v == REFUSE || v == DROP) {
		account_begin(c, v);
		fail_packet(&p->tuple, c, v, s->owner);
	}
	if (v == REFUSE) {
		s->reason = c->reason;
		s->service = c->service;
		s->mtu = 0;
		*action = go(skb, TAIL_REFUSE);
		return false;
	}
	if (v != TRANSLATE) {
		*action = finish(v == PASS ? TC_ACT_UNSPEC : TC_ACT_SHOT, c->reason);
		return false;
	}
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->last_used = now_ns();
	flow->client = p->tuple.from;
	flow->frontend = p->tuple.to;
	flow->backend = c->backend;
	flow->client_port = p->tuple.from.port;
	__builtin_memset(&s->opening, 0, sizeof(s->opening));
	if (flow->client.protocol == IPPROTO_UDP)
		flow->seen.started = s->opening.started = flow->last_used;
	else if (flow->client.protocol == IPPROTO_SCTP)
		flow->seen.sctp.tag = p->sctp.next;
	else
		open_side(&s->opening.tcp, p, window_scale(skb, p));
	flow->service = c->service;
	flow->backend_id = c->backend_id;
	if (is_paused(flow->last_used)) {
		*action = drop_flow(flow, PAUSED);
		return false;
	}
	__builtin_memset(&s->hop, 0, sizeof(s->hop));
	return true;
}

/* Whether a flow bypasses the stack: with SNAT to backends on other nodes, since the stack does not
 * forward packets with its own source address; and all flows if the operator wants it. */
static __always_inline bool bypasses_stack(const struct node *n, const struct device *from,
					   const struct device *to, bool masquerade)
{
	if (needs_stack(from, to))
		return false;
	return (n->flags & NODE_DIRECT) ||
	       (masquerade && from->role == ROLE_HOST && to->role == ROLE_HOST);
}

/* Whether conntrack may have to translate this packet; see tc/conntrack.h. Not with br_netfilter at
 * a bridge that has an uplink: its packets pass PREROUTING in the bridge, where a translated one
 * would be bridged instead of routed. */
static __always_inline bool may_use_conntrack(const struct node *n, const struct device *device,
					      const struct scratch *s)
{
	return (n->flags & NODE_NETFILTER) && device->role == ROLE_HOST && !device->bridge &&
	       s->packet.protocol != IPPROTO_SCTP;
}

/* The backend of a new flow is chosen, and so is its path: writes its state. */
static __always_inline int begin_flow(struct __sk_buff *skb, const struct scratch *s)
{
	return go(skb, s->begin & BEGIN_UNTRACKED ? TAIL_CONNTRACK : TAIL_ENQUEUE);
}

/* Decides how the packets of a new flow leave, and which address of the node they get. */
int tc_route(struct __sk_buff *skb)
{
	u32 zero = 0, ifindex = skb->ifindex;
	struct device *device = device_at(ifindex), *to;
	struct node *n = node.lookup(&zero);
	struct scratch *s = get_scratch();
	struct target source, backend;
	struct address own;
	struct flow *flow;

	if (!device || !n || !s)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	flow = &s->flow;
	source = flow->client;
	backend = flow->backend;
	/* Conntrack translates the source after routing. */
	if (has_snat(flow) && !(s->begin & BEGIN_UNTRACKED))
		source.address = flow->snat;
	to = find_next_hop(skb, &s->packet, &source, &backend, &s->hop, true,
			   routing_ifindex(device, ifindex));
	if (to ? to->flags & DEVICE_NO_EGRESS : s->hop.ifindex)
		s->begin |= BEGIN_UNSEEN;
	/* The backend is the node itself: no device would translate the source of what it receives,
	 * nor of what it sends. */
	if (!to && !same_address(&flow->client.address, &flow->backend.address) &&
	    is_nodes_own(&flow->backend.address))
		__builtin_memset(&flow->snat, 0, sizeof(flow->snat));
	/* A bridge forwards replies between its own pods past us, unless they are addressed to the
	 * node. */
	if (to && !has_snat(flow) && s->hop.ifindex == routing_ifindex(device, ifindex) &&
	    to->role == ROLE_POD)
		flow->snat = s->packet.v6 ? n->snat6 : n->snat4;
	if (to && has_snat(flow)) {
		own = s->packet.v6 ? to->snat6 : to->snat4;
		improve_source(&s->hop, &backend.address, &own);
		if (!is_any(&own))
			flow->snat = own;
	}
	/* With br_netfilter, conntrack would translate replies inside such a bridge, which sends
	 * nothing back to the port that it came in by. */
	if (to && (to->flags & DEVICE_SPANS) && s->client_device == s->hop.ifindex)
		s->begin &= ~(BEGIN_UNTRACKED | BEGIN_STALE);
	if (to && bypasses_stack(n, device, to, has_snat(flow)))
		flow->path = PATH_DIRECT;
	if (flow->path != PATH_STACK && s->hop.max_length)
		stamp_next_hop(&s->hop, flow->last_used);
	else
		s->hop.ifindex = 0; /* nothing to cache */
	return begin_flow(skb, s);
}

/* Whether this flow has lost an entry that its replies or its packets in the stack need: another
 * flow has taken it, or another CPU deleted it just after it had expired. */
static __always_inline bool lacks_entry(const struct flow *flow)
{
	return !entry_at(flow, DIRECTION_REPLY) ||
	       (has_snat(flow) && !entry_at(flow, DIRECTION_SNAT_REPLY));
}

/* Whether both ends of a TCP connection have acknowledged the other's FIN. */
static __always_inline bool has_ended(const struct flow *original)
{
	struct flow *reply = both_closed(original) ? twin_of(original, false) : NULL;

	return reply && is_acknowledged(original, reply);
}

/* Notes whether the client has sent its last datagram to the backend's own address. */
static __always_inline void note_destination(const struct flow *flow, bool direct)
{
	for (u32 direction = DIRECTION_ORIGINAL; direction <= DIRECTION_REPLY; direction++) {
		struct flow *entry = entry_at(flow, direction);

		if (entry)
			entry->fins = direct ? entry->fins | FIN_DIRECT : entry->fins & ~FIN_DIRECT;
	}
}

/* Decides about a packet of a known flow, for tc_ingress and tc_host: whether the flow is live, or
 * has expired, or has to begin again because its backend or its reply entry is gone. For UDP, also
 * which of its client's datagrams the backend answers from now on: begins_direct(). */
int tc_recheck(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();
	u64 now = now_ns();
	struct packet *p;
	struct flow *flow;
	bool came_in, original, genuine;
	u32 arrival;

	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	came_in = s->resume_tail == TAIL_CHOOSE;
	arrival = came_in ? skb->ifindex : 0;
	flow = flow_between(&p->tuple);
	original = flow && is_original(&p->tuple, flow);
	genuine = flow && (arrival == flow->arrival || arrives_by(skb, p, arrival, &s->hop));
	if (original && genuine && starts_flow(p))
		account_repetition(flow, now, owner_of_packet(device_at(skb->ifindex), arrival));
	if (flow && !is_over(flow, now) &&
	    (!starts_flow(p) || !original ||
	     (backend_exists(flow->backend_id) && !lacks_entry(flow) && !has_ended(flow)))) {
		if (genuine && p->protocol == IPPROTO_UDP &&
		    (original || !is_reply(&p->tuple, flow)))
			note_destination(flow, !original);
		return came_in ? resume(skb, s, TAIL_INGRESS, 0) : resume(skb, s, TAIL_HOST, 0);
	}
	if (starts_flow(p))
		return came_in ? go(skb, TAIL_CHOOSE) : go(skb, TAIL_HOST_CHOOSE);
	return TC_ACT_UNSPEC;
}

/* The client reused its port but the Service is gone: delete the flow, or later packets would still
 * reach the old backend. */
int tc_delete_flow(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();
	struct flow *old;

	if (!s)
		return TC_ACT_UNSPEC;
	old = flow_between(&s->packet.tuple);
	if (!old || old->direction != DIRECTION_ORIGINAL || !is_original(&s->packet.tuple, old))
		return TC_ACT_UNSPEC;
	delete_flow(old, now_ns());
	return TC_ACT_UNSPEC;
}

/* While another data plane serves, new flows are left to it, until our programs are on all devices.
 * A retransmitted SYN follows the first one, even if we are active by then: replies from two
 * backends would break the connection. A SYN is identified by its sequence number, an SCTP INIT by
 * its tag. */
int tc_coexist(struct __sk_buff *skb)
{
	u32 zero = 0, ifindex = skb->ifindex, number, *stored;
	struct device *device = device_at(ifindex);
	struct node *n = node.lookup(&zero);
	struct scratch *s = get_scratch();
	struct client_slot slot;
	struct packet *p;
	bool foreign;

	if (!device || !n || !s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	foreign = n->flags & NODE_PASSIVE;
	if (p->protocol != IPPROTO_UDP) {
		number = p->protocol == IPPROTO_SCTP ? p->sctp.next : p->tcp.sequence;
		slot.owner = key_of_owner(owner_of_packet(device, ifindex), &p->tuple.from.address);
		slot.number =
			hash_words((const u32 *)&p->tuple, TUPLE_WORDS) % FOREIGN_FLOWS_PER_CLIENT;
		stored = foreign_flows.lookup(&slot);
		if (foreign)
			foreign_flows.update(&slot, &number);
		else
			foreign = stored && *stored == number;
	}
	if (foreign)
		return s->begin & BEGIN_RESTART ? go(skb, TAIL_DELETE_FLOW) : TC_ACT_UNSPEC;
	s->begin |= BEGIN_NOT_FOREIGN;
	return go(skb, TAIL_CHOOSE);
}

/* Chooses a backend for a packet from outside the node, or from a pod. */
int tc_choose(struct __sk_buff *skb)
{
	u32 zero = 0, ifindex = skb->ifindex;
	struct device *device = device_at(ifindex);
	struct node *n = node.lookup(&zero);
	struct scratch *s = get_scratch();
	struct client client = {};
	struct choice c = {};
	struct flow *flow;
	int action;

	if (!device || !n || !s)
		return TC_ACT_UNSPEC;
	if (!(s->begin & BEGIN_UNTRACKED) && is_impossible_source(&s->packet.tuple.from.address))
		return TC_ACT_UNSPEC;
	if ((n->flags & (NODE_PASSIVE | NODE_COEXISTING)) && !(s->begin & BEGIN_NOT_FOREIGN))
		return go(skb, TAIL_COEXIST);
	/* Each datagram comes here that is not for a Service, but goes to the port of one. */
	if (s->packet.protocol == IPPROTO_UDP && !is_frontend(&s->packet.tuple.to))
		return s->begin & BEGIN_RESTART ? go(skb, TAIL_DELETE_FLOW)
						: finish(TC_ACT_UNSPEC, NOT_A_SERVICE);
	if (!(s->begin & BEGIN_UNTRACKED)) { /* not back from tc_conntrack */
		if (!arrives_by(skb, &s->packet, ifindex, &s->hop))
			return TC_ACT_UNSPEC;
		s->client_device = s->hop.ifindex;
		/* The call returns if an agent that does not use conntrack has loaded these. */
		if (may_use_conntrack(n, device, s))
			tails.call(skb, TAIL_CONNTRACK);
	}
	s->owner = owner_of_packet(device, ifindex);
	client.outside = !(device->flags & DEVICE_LOCAL);
	if (!describe_flow(skb, s, &client, &c, &action)) {
		if ((s->begin & BEGIN_RESTART) && action == TC_ACT_UNSPEC)
			return go(skb, TAIL_DELETE_FLOW);
		return action;
	}
	flow = &s->flow;
	if (masquerades(&c, n, device, &flow->client.address)) {
		flow->snat = s->packet.v6 ? n->snat6 : n->snat4;
		if (is_any(&flow->snat)) /* the device may have one */
			flow->snat.word[3] = ADDRESS_NOT_CHOSEN;
	}
	/* A CNI may have to masquerade this flow, which it cannot do once it has an entry. And an
	 * entry that changes no destination would look like one that is in the way. */
	if ((!has_snat(flow) && (c.flags & SERVICE_CLUSTER_IP)) ||
	    same_target(&flow->backend, &flow->frontend))
		s->begin &= ~BEGIN_UNTRACKED;
	if (has_snat(flow) || (n->flags & NODE_DIRECT) || (s->begin & BEGIN_UNTRACKED) ||
	    (device->role == ROLE_POD && !(device->flags & DEVICE_PEER)))
		return go(skb, TAIL_ROUTE);
	return begin_flow(skb, s);
}
