/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Flows that conntrack keeps and translates (--forwarding netfilter).
 *
 * The packet path only chooses the backend. It writes the translation into a new entry of
 * conntrack, and the packet goes up the stack unchanged: rules in raw and mangle PREROUTING see the
 * frontend, and the kernel translates after them, where it does for kube-proxy. There is no entry
 * in `flows`, so limits, timeouts and ICMP errors of such a flow are the kernel's.
 *
 * This needs functions of the kernel that programs may call (kfuncs). A call names one by its type
 * in the kernel's BTF. These numbers are placeholders, which the loader replaces
 * (kernel/bpf/kfuncs.py); it loads this program only if the operator has chosen the option, since
 * kernels before 6.1 refuse it. They know TCP and UDP only.
 *
 * Only packets of other machines take this way: the kernel applies no SNAT rule to a flow whose
 * entry exists already, and a CNI's masquerading of its pods has to be applied.
 *
 * The entry exists before rules of the host have judged the packet. Those that refuse it would
 * leave the entry behind, which the kernel itself writes only when a packet leaves the stack. So a
 * flow is unconfirmed until its first packet leaves by a device, and counted then. Meanwhile
 * answers to it are dropped, since nobody can have received what they answer, and each packet of
 * its client is judged as the first one: if conntrack has seen an answer that these programs have
 * not, the entry is written anew. What the node itself receives leaves by no device; what others
 * send in its name is dropped (pretends_to_be_node()), so nobody else can answer. For a new
 * flow that does not fit into `unconfirmed_queue`, the oldest one is judged. A token bucket would
 * not do: whoever sends what the rules refuse would take all the tokens. */
#pragma once

#include "types.h"
#include "lookup.h"
#include "lib/compat.h"
#include "lib/packet.h"
#include "tc/flow.h"
#include "tc/ports.h"
#include "tc/scratch.h"
#include "tc/tails.h"

#define IP_CT_DIR_REPLY 1
#define IP_CT_ESTABLISHED 0
#define IP_CT_NEW 2
#define IP_CT_ESTABLISHED_REPLY 3
#define IPS_SEEN_REPLY (1 << 1)
#define IPS_DST_NAT (1 << 5)
#define IPS_DYING (1 << 9)
#define NFCT_INFO 7 /* of skb->_nfct: enum ip_conntrack_info; the rest is the entry's address */
#define TCP_CONNTRACK_TIME_WAIT 7
#define TCP_CONNTRACK_CLOSE 8
#define NF_NAT_MANIP_SRC 0
#define NF_NAT_MANIP_DST 1
/* Until conntrack has seen the packet and sets its own timeout: an entry of a packet that a rule in
 * raw drops must not stay. */
#define NEW_ENTRY_MS 1000
/* Nothing but the rule in nat_table.py looks at skb->priority between here and a socket. */
#define PRIORITY_OF_TRACKED 0x6b620001

/* The client as its backend sees it, and the backend -> the flow. The queue bounds their number:
 * each CPU may have added one that is not in it yet. `port_slots` counts them, as a filter. */
BPF_F_TABLE("hash", struct flow_key, struct event, unconfirmed, 64, BPF_F_NO_PREALLOC);

/* Their keys, the oldest first, and those of flows that have been confirmed since. Full:
 * settle_oldest() makes room. */
BPF_QUEUE(unconfirmed_queue, struct unconfirmed_key, 64);

/* struct bpf_ct_opts of Linux 6.1; later kernels accept its size. */
struct ct_opts {
	s32 netns;
	s32 error;
	u8 protocol;
	u8 direction; /* out: of the entry that a lookup has found */
	u8 pad[2];
};

/* The members of union bpf_sock_tuple. */
struct ct_tuple4 {
	__be32 from;
	__be32 to;
	__be16 from_port;
	__be16 to_port;
};

struct ct_tuple6 {
	struct address from;
	struct address to;
	__be16 from_port;
	__be16 to_port;
};

/* Linux v6.1; nf_conntrack_bpf.c and nf_nat_bpf.c. */
#define bpf_skb_ct_alloc                                                                           \
	((void *(*)(struct __sk_buff *, void *, u32, struct ct_opts *, u32))0x6b620001)
#define bpf_skb_ct_lookup                                                                          \
	((void *(*)(struct __sk_buff *, void *, u32, struct ct_opts *, u32))0x6b620002)
#define bpf_ct_set_timeout ((void (*)(void *, u32))0x6b620003)
#define bpf_ct_change_timeout ((int (*)(void *, u32))0x6b620004)
#define bpf_ct_insert_entry ((void *(*)(void *))0x6b620005)
#define bpf_ct_release ((void (*)(void *))0x6b620006)
#define bpf_ct_set_nat_info ((int (*)(void *, struct address *, int, int))0x6b620007)
/* Offsets in this kernel's struct nf_conn and struct sk_buff, in bytes. All are 0 if the agent does
 * not use conntrack. */
#define offset_of_status() (((u64(*)(void))0x6b620008)())
#define offset_of_tcp_state() (((u64(*)(void))0x6b620009)())
#define offset_of_nfct() (((u64(*)(void))0x6b62000a)())
#define offset_of_timeout() (((u64(*)(void))0x6b62000b)())
#define offset_of_entry() (((u64(*)(void))0x6b62000c)()) /* of struct ct_entry */

/* Calls one of the first two functions for packets from `t->from` to `t->to`. */
#define CALL_FOR_TUPLE(function, skb, t, v6, opts)                                                 \
	CALL_WITH(function, skb, t, v6, opts, sizeof(*(opts)))
#define CALL_WITH(function, skb, t, v6, opts, ...)                                                 \
	({                                                                                         \
		struct ct_tuple4 _t4 = {(t)->from.address.word[3], (t)->to.address.word[3],        \
					(t)->from.port, (t)->to.port};                             \
		struct ct_tuple6 _t6 = {(t)->from.address, (t)->to.address, (t)->from.port,        \
					(t)->to.port};                                             \
		(v6) ? function(skb, &_t6, sizeof(_t6), opts, __VA_ARGS__)                         \
		     : function(skb, &_t4, sizeof(_t4), opts, __VA_ARGS__);                        \
	})

enum tracked {
	TRACKED_NO = 0,
	TRACKED_YES = 1,      /* the kernel knows what to do with the packet */
	TRACKED_STALE = 2,    /* an entry that does not translate it */
	TRACKED_ANSWERED = 3, /* as TRACKED_YES, and there was an answer to the client */
	TRACKED_ENDED = 4,    /* of an earlier connection; the next look-up deletes it */
};

/* union nf_inet_addr: IPv4 is in the first word. */
static __always_inline struct address nf_address(const struct address *a, bool v6)
{
	struct address v4 = {.word = {a->word[3]}};

	return v6 ? *a : v4;
}

/* Copies the ends of an entry's packets to the scratch buffer. */
static __always_inline void read_entry(struct scratch *s, u64 entry)
{
	probe_read_kernel(&s->entry, sizeof(s->entry), (void *)entry + offset_of_entry());
}

static __always_inline u64 status_in(void *ct)
{
	return *(volatile u64 *)(ct + offset_of_status());
}

/* Whether conntrack has an entry for this packet. A SYN from the port of a connection that has
 * ended would replace the entry by one without NAT (nf_conntrack_tcp_packet()), so that entry
 * expires. One that does not translate was made before the Service had this address. `expire`: so
 * does an entry that is stale or answered. An answered one is in the scratch buffer afterwards. */
static __always_inline enum tracked find_tracked(struct __sk_buff *skb, struct scratch *s,
						 bool expire)
{
	const struct packet *p = &s->packet;
	struct ct_opts opts = {.netns = CURRENT_NETNS, .protocol = p->protocol};
	enum tracked result = TRACKED_YES;
	u64 status;
	u8 state;
	void *ct;

	ct = CALL_FOR_TUPLE(bpf_skb_ct_lookup, skb, &p->tuple, p->v6, &opts);
	if (!ct)
		return TRACKED_NO;
	if (opts.direction != IP_CT_DIR_REPLY) {
		state = *(volatile u8 *)(ct + offset_of_tcp_state());
		status = status_in(ct);
		if (!(status & IPS_DST_NAT))
			result = TRACKED_STALE;
		else if (p->protocol == IPPROTO_TCP &&
			 (state == TCP_CONNTRACK_TIME_WAIT || state == TCP_CONNTRACK_CLOSE))
			result = TRACKED_ENDED;
		else if (status & IPS_SEEN_REPLY)
			result = TRACKED_ANSWERED;
	}
	if (result == TRACKED_ANSWERED)
		read_entry(s, (u64)ct);
	if (result == TRACKED_ENDED || (expire && result != TRACKED_YES))
		bpf_ct_change_timeout(ct, 0); /* the next look-up deletes it */
	bpf_ct_release(ct);
	return result;
}

/* Whether conntrack (`ask`) or, for a masqueraded client, a socket of the node has these ends. */
static __always_inline bool is_taken(struct __sk_buff *skb, void *ends, u32 size,
				     struct ct_opts *opts, bool ask, bool masqueraded)
{
	void *ct = ask ? bpf_skb_ct_lookup(skb, ends, size, opts, sizeof(*opts)) : NULL;

	if (ct) {
		bpf_ct_release(ct);
		return true;
	}
	return masqueraded && has_socket_at(skb, ends, size, opts->protocol);
}

#define CLIENT_PORT_TRIES 16
#define QUEUE_TRIES 3 /* another CPU may fill the queue */

/* Whether a client may have this port, in host byte order. It may not if another flow to the
 * backend has it; whether conntrack has one is looked up only if `ask`, since write_entry() fails
 * then. Nor may a masqueraded client if
 *
 *  - it is in the packet path's range, of which the flows of the node's sockets have ports. The
 *    kernel does not know these flows: the client could receive or forge their packets;
 *  - a frontend has it: the backend's reply to it would look like a datagram to a NodePort;
 *  - a socket of the node has it: is_for_socket(). */
static __always_inline bool may_have_port(struct __sk_buff *skb, const struct packet *p,
					  const struct flow *flow, const struct node *n, u32 port,
					  bool ask)
{
	struct ct_opts opts = {.netns = CURRENT_NETNS, .protocol = p->protocol};
	struct tuple reply = {.from = flow->backend, .to = flow->client};
	bool masqueraded = has_snat(flow);

	reply.to.port = __builtin_bswap16(port);
	if (masqueraded) {
		if (port >= n->port_low && port <= n->port_high)
			return false;
		reply.to.address = flow->snat;
		if (is_frontend_port(reply.to.port) && is_frontend(&reply.to))
			return false;
	}
	if (ask ? has_flow(&reply) : flow_between(&reply) != NULL)
		return false;
	return !CALL_WITH(is_taken, skb, &reply, p->v6, &opts, ask, masqueraded);
}

/* The port of a client for its backend, in host byte order: its own, or else a random one above the
 * packet path's range. 0: none was found. Then the kernel must not choose one: it could be in that
 * range, and the key in `unconfirmed` would be wrong. If another CPU takes the port at the same
 * time, the client's next packet gets another one. */
static __always_inline u16 choose_client_port(struct __sk_buff *skb, const struct packet *p,
					      const struct flow *flow, bool other)
{
	u32 zero = 0, port = __builtin_bswap16(flow->client.port), room;
	struct node *n = node.lookup(&zero);

	if (!n)
		return 0;
	if (!other && port && may_have_port(skb, p, flow, n, port, false))
		return port;
	room = 65535 - n->port_high; /* not 0: MAX_MASQUERADE_PORT in host.py */
	for (int i = 0; i < CLIENT_PORT_TRIES; i++) {
		if (port && may_have_port(skb, p, flow, n, port, true))
			return port;
		port = n->port_high + 1 + (((u64)bpf_get_prandom_u32() * room) >> 32);
	}
	return 0;
}

/* struct bpf_xfrm_state. */
struct xfrm_state {
	u32 request;
	__be32 spi;
	u16 family;
	u16 pad;
	u32 remote[4];
};

/* Linux v4.18: 12bed760a78d. */
static __always_inline bool is_decrypted(struct __sk_buff *skb)
{
	struct xfrm_state state;

	return !((long (*)(void *, u32, void *, u32, u64))66)(skb, 0, &state, sizeof(state), 0);
}

static __always_inline void count_flow(struct event *event)
{
	struct choice c = {.service = event->service, .backend_id = event->backend_id};

	count(NEW_FLOW);
	account_begin(&c, TRANSLATE);
	if (is_monitored())
		report(event);
}

/* Where a key with these ends is counted. Ports are in network byte order: on little-endian
 * machines the lower bits of a port, in which the ports of one client differ, are the upper ones
 * here. */
static __always_inline struct port_slot *filter_of(const struct target *a, const struct target *b)
{
	u32 index = (a->port ^ b->port) >> (16 - PORT_SLOT_BITS);

	return port_slots.lookup(&index);
}

/* The flow between client and backend of which no packet has left yet. */
static __always_inline struct event *find_unconfirmed(const struct target *client,
						      const struct target *backend)
{
	struct port_slot *slot = filter_of(client, backend);
	struct flow_key key;

	if (!slot || !slot->unconfirmed)
		return NULL;
	key.first = *client;
	key.second = *backend;
	return unconfirmed.lookup(&key);
}

/* Whether a packet answers one that has not left this node. Its sender cannot have received that
 * packet, so the answer is forged. conntrack would call the connection established, and rules that
 * accept established connections would then let pass what they have refused. A plain ACK is enough:
 * conntrack ignores it before a SYN-ACK, but remembers a reply. */
static __always_inline bool answers_refused(const struct tuple *answer)
{
	return uses_conntrack() && find_unconfirmed(&answer->to, &answer->from);
}

static __always_inline struct tuple tuple_of(const struct ct_ends *ends)
{
	bool v4 = ends->family == AF_INET;
	struct tuple t;

	t.from.address = v4 ? v4_mapped(ends->from.word[0]) : ends->from;
	t.to.address = v4 ? v4_mapped(ends->to.word[0]) : ends->to;
	set_port(&t.from, ends->from_port, ends->protocol);
	set_port(&t.to, ends->to_port, ends->protocol);
	return t;
}

/* The flow of the entry in the scratch buffer, if no packet of it has left yet. Its key may also be
 * left of a flow that has ended, and another connection may have these ends. */
static __always_inline struct event *find_flow_of_entry(struct scratch *s)
{
	struct tuple first = tuple_of(&s->entry.original), answer = tuple_of(&s->entry.reply);
	struct event *event = find_unconfirmed(&answer.to, &answer.from);
	bool same = event && same_target(&first.from, &event->client) &&
		    same_target(&first.to, &event->frontend);

	return same ? event : NULL;
}

/* Drops such an answer, unless IPsec has decrypted it: then its flow has left encrypted. Only
 * tc_unconfirmed can ask. */
static __always_inline int judge_answer_to_refused(struct __sk_buff *skb, struct scratch *s)
{
	s->begin = BEGIN_ANSWER;
	return go(skb, TAIL_UNCONFIRMED);
}

/* The status of the entry of packets with these ends, which is in the scratch buffer afterwards; 0:
 * there is none. */
static __always_inline u64 find_entry(struct __sk_buff *skb, struct scratch *s,
				      const struct tuple *t)
{
	struct ct_opts opts = {.netns = CURRENT_NETNS, .protocol = t->to.protocol};
	bool v6 = !is_v4(&t->to.address);
	void *ct = CALL_FOR_TUPLE(bpf_skb_ct_lookup, skb, t, v6, &opts);
	u64 status;

	if (!ct)
		return 0;
	status = status_in(ct);
	read_entry(s, (u64)ct);
	bpf_ct_release(ct);
	return status;
}

/* The next look-up deletes the entry. */
static __always_inline void expire_entry(struct __sk_buff *skb, const struct tuple *t)
{
	struct ct_opts opts = {.netns = CURRENT_NETNS, .protocol = t->to.protocol};
	bool v6 = !is_v4(&t->to.address);
	void *ct = CALL_FOR_TUPLE(bpf_skb_ct_lookup, skb, t, v6, &opts);

	if (!ct)
		return;
	bpf_ct_change_timeout(ct, 0);
	bpf_ct_release(ct);
}

/* Removes a key. False: there is none, or another CPU has removed it. */
static __always_inline bool forget_flow(struct flow_key *key)
{
	struct port_slot *slot = filter_of(&key->first, &key->second);

	if (!slot || unconfirmed.delete(key))
		return false;
	__sync_fetch_and_add(&slot->unconfirmed, -1);
	return true;
}

/* Adds a key. An earlier flow with these ends has ended. */
static __always_inline bool remember_flow(struct flow_key *key, struct event *event)
{
	struct port_slot *slot = filter_of(&key->first, &key->second);

	if (!slot)
		return false;
	if (slot->unconfirmed)
		forget_flow(key);
	__sync_fetch_and_add(&slot->unconfirmed, 1); /* before the key: at 0 nobody looks for it */
	if (!unconfirmed.insert(key, event))
		return true;
	__sync_fetch_and_add(&slot->unconfirmed, -1);
	return false;
}

/* The rules of the host have let a packet of this flow pass. Its entry is in the scratch buffer. */
static __always_inline void confirm(struct scratch *s, const struct event *event)
{
	struct tuple answer = tuple_of(&s->entry.reply);

	s->event = *event; /* once its key has gone, another flow may get the memory */
	s->queued.key.first = answer.to;
	s->queued.key.second = answer.from;
	if (forget_flow(&s->queued.key))
		count_flow(&s->event);
}

/* The entry that conntrack found for a packet before the rules judged it, and NFCT_INFO, which says
 * what it was for them. 0: none. At run time, the context is the kernel's struct sk_buff. */
static __always_inline u64 read_nfct(struct __sk_buff *skb)
{
	u64 nfct = 0, offset = offset_of_nfct();

	if (offset)
		probe_read_kernel(&nfct, sizeof(nfct), (void *)skb + offset);
	return nfct;
}

/* Whether the node itself answers a flow of which nothing has been seen to leave, since a socket of
 * the node is its backend. Its entry is in the scratch buffer afterwards. Its ends say nothing:
 * they are those of the frontend again. */
static __always_inline bool is_first_answer(struct __sk_buff *skb, struct scratch *s, u64 nfct)
{
	if (skb->ingress_ifindex || (nfct & NFCT_INFO) != IP_CT_ESTABLISHED_REPLY)
		return false;
	read_entry(s, nfct & ~NFCT_INFO);
	return find_flow_of_entry(s);
}

static __always_inline bool has_expired(u64 entry) /* nf_ct_expires() */
{
	return (s32)((u32)read_u64(entry + offset_of_timeout()) - (u32)jiffies64()) <= 0;
}

/* Drops a client's packet that leaves if it was part of an established connection for the rules,
 * and these programs have ended that connection since: perhaps a forged answer was just ahead of
 * the packet, and it has waited for its next hop's MAC address until its flow was settled. To be
 * asked after its key has not been found: an entry expires before its keys go. */
static __always_inline int judge_entry(u64 nfct)
{
	bool is_established = nfct && (nfct & NFCT_INFO) == IP_CT_ESTABLISHED;

	return is_established && has_expired(nfct) ? finish(TC_ACT_SHOT, INVALID) : TC_ACT_UNSPEC;
}

/* Takes the oldest flow from the queue. The rules of the host have refused its packet, and its
 * entry has to go, also if a forged answer has reached it. Only the node itself can have answered
 * for the node: by a device without programs. `oldest`: room for its key, since the stack is short.
 */
static __always_inline void settle_oldest(struct __sk_buff *skb, struct scratch *s,
					  struct unconfirmed_key *oldest)
{
	struct tuple *answer = &s->inner.tuple;
	struct event *event;
	u64 status;

	if (unconfirmed_queue.pop(oldest))
		return;
	event = find_unconfirmed(&oldest->key.first, &oldest->key.second);
	if (!event || event->time != oldest->time)
		return;
	answer->from = oldest->key.second;
	answer->to = oldest->key.first;
	status = find_entry(skb, s, answer);
	if (status && find_flow_of_entry(s)) { /* not a later flow's */
		if (is_nodes_own(&event->backend.address) && (status & IPS_SEEN_REPLY)) {
			confirm(s, event);
		} else {
			expire_entry(skb, answer);
			find_entry(skb, s, answer);
		}
	}
	event = find_unconfirmed(&oldest->key.first, &oldest->key.second);
	if (event && event->time == oldest->time) /* no other CPU has begun it again */
		forget_flow(&oldest->key);
}

/* Remembers the flow in the scratch buffer until a packet of it leaves. `port`: the client's, as
 * the backend sees it, in host byte order. `unseen`: its packets leave unseen, so it counts now,
 * and its answers are not checked. False: there is no room to remember it. */
static __always_inline bool await_packet(struct __sk_buff *skb, struct scratch *s, u16 port,
					 bool unseen)
{
	struct unconfirmed_key *queued = &s->queued;
	const struct flow *flow = &s->flow;
	struct target seen = flow->client;
	struct event *event = &s->event;

	__builtin_memset(event, 0, sizeof(*event));
	describe_event(event, flow, NEW_FLOW);
	event->time = flow->last_used;
	seen.port = __builtin_bswap16(port);
	if (has_snat(flow))
		seen.address = flow->snat;
	queued->key.first = seen;
	queued->key.second = flow->backend;
	if (unseen) {
		forget_flow(&queued->key); /* of an earlier flow with these ends */
		count_flow(event);
		return true;
	}
	if (!remember_flow(&queued->key, event))
		return false;
	for (int i = 0; i < QUEUE_TRIES; i++) {
		queued->time = flow->last_used;
		if (!unconfirmed_queue.push(queued, 0))
			return true;
		settle_oldest(skb, s, queued);
		queued->key.first = seen;
		queued->key.second = flow->backend;
	}
	forget_flow(&queued->key); /* which would stay for ever without its place in the queue */
	return false;
}

/* Writes the flow of a client's packet as it was begun, if no packet of it has left. What the node
 * itself has answered is no such flow. Its entry is in the scratch buffer. */
static __always_inline bool begins_again(struct scratch *s)
{
	struct target seen = tuple_of(&s->entry.reply).to;
	struct event *event = find_flow_of_entry(s);
	struct flow *flow = &s->flow;

	if (!event)
		return false;
	if (is_nodes_own(&event->backend.address)) {
		confirm(s, event);
		return false;
	}
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->last_used = now_ns();
	flow->client = event->client;
	flow->frontend = event->frontend;
	flow->backend = event->backend;
	flow->service = event->service;
	flow->backend_id = event->backend_id;
	flow->client_port = seen.port;
	if (!same_address(&seen.address, &flow->client.address))
		flow->snat = seen.address;
	return true;
}

/* An answer to a flow that has not left, or an error about either of its directions. IPsec has
 * decrypted it if the flow has left encrypted. An error may be about a flow that leaves unseen,
 * which has been answered. Without an entry there is nothing that a forged answer could change. */
static __always_inline int judge_unseen(struct __sk_buff *skb, struct scratch *s)
{
	bool is_error = !s->packet.tuple.from.protocol;
	struct tuple t = is_error ? reversed(&s->inner.tuple) : s->packet.tuple;
	u64 status = find_entry(skb, s, &t);
	struct event *event;

	if (!status)
		return TC_ACT_UNSPEC;
	event = find_flow_of_entry(s);
	if (!event)
		return TC_ACT_UNSPEC;
	if (is_decrypted(skb)) {
		if (!is_error)
			confirm(s, event);
		return TC_ACT_UNSPEC;
	}
	return is_error && (status & IPS_SEEN_REPLY) ? TC_ACT_UNSPEC : finish(TC_ACT_SHOT, INVALID);
}

/* A packet leaves without an entry, since a flowtable has brought it past the rules of the host. It
 * may not be a client's of a flow of which none has left. */
static __always_inline int judge_without_entry(struct __sk_buff *skb, struct scratch *s)
{
	struct tuple answer = reversed(&s->packet.tuple);

	return find_entry(skb, s, &answer) && find_flow_of_entry(s) ? finish(TC_ACT_SHOT, INVALID)
								    : TC_ACT_UNSPEC;
}

/* A packet leaves that may be the first one of its flow. The client's has to be the first one of
 * its connection for the rules of the host: not one of an established connection, since an answer
 * was just ahead of it. One of the node itself counts if it answers; others may have forged theirs.
 * With another entry, or one that has ended, it is of another connection: a socket of the node may
 * have these ends now. */
static __always_inline int judge_leaving(struct __sk_buff *skb, struct scratch *s)
{
	u64 nfct = read_nfct(skb), entry = nfct & ~NFCT_INFO, status;
	struct event *event;

	if (!entry)
		return judge_without_entry(skb, s);
	read_entry(s, entry);
	event = find_flow_of_entry(s);
	status = read_u64(entry + offset_of_status());
	if (!event || (status & IPS_DYING) || has_expired(entry))
		return judge_entry(nfct);
	if ((nfct & NFCT_INFO) == IP_CT_ESTABLISHED_REPLY) {
		if (!is_nodes_own(&event->backend.address))
			return TC_ACT_UNSPEC;
	} else if ((status & IPS_SEEN_REPLY) || (nfct & NFCT_INFO) != IP_CT_NEW) {
		return finish(TC_ACT_SHOT, INVALID);
	}
	confirm(s, event);
	return TC_ACT_UNSPEC;
}

/* A flow of our own table has claimed a port of the node. Another one is searched if conntrack
 * knows this port: the backend may be a machine that talks to a hostPort. */
static __always_inline int judge_claimed_port(struct __sk_buff *skb, struct scratch *s, bool v6)
{
	struct tuple reply = reply_to_node(&s->flow);
	struct ct_opts opts = {.netns = CURRENT_NETNS, .protocol = s->flow.client.protocol};

	s->begin &= ~BEGIN_CLAIMED;
	return CALL_WITH(is_taken, skb, &reply, v6, &opts, true, false) ? claim_again(skb, s)
									: go(skb, TAIL_PUBLISH);
}

/* Asks conntrack about a packet that begins no flow of conntrack's. */
int tc_unconfirmed(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();

	if (!s)
		return TC_ACT_UNSPEC;
	if (s->begin & BEGIN_ANSWER)
		return judge_unseen(skb, s);
	if (s->begin & BEGIN_LEAVING)
		return judge_leaving(skb, s);
	return judge_claimed_port(skb, s, s->packet.v6);
}

/* Writes an entry that translates the packet's flow, from `port` of its client (host byte order).
 * Returns a reference to it. `reason`: why there is none. */
static __always_inline void *write_entry(struct __sk_buff *skb, const struct packet *p,
					 const struct flow *flow, u16 port, enum reason *reason)
{
	struct ct_opts opts = {.netns = CURRENT_NETNS, .protocol = p->protocol};
	struct address backend = nf_address(&flow->backend.address, p->v6);
	struct address source =
		nf_address(has_snat(flow) ? &flow->snat : &flow->client.address, p->v6);
	void *ct = CALL_FOR_TUPLE(bpf_skb_ct_alloc, skb, &p->tuple, p->v6, &opts);

	*reason = TABLE_FULL;
	if (!ct)
		return NULL;
	bpf_ct_set_timeout(ct, NEW_ENTRY_MS);
	bpf_ct_set_nat_info(ct, &backend, __builtin_bswap16(flow->backend.port), NF_NAT_MANIP_DST);
	bpf_ct_set_nat_info(ct, &source, port, NF_NAT_MANIP_SRC);
	*reason = NOT_TRACKED; /* another CPU may have begun the same flow */
	return bpf_ct_insert_entry(ct);
}

/* First, tc_choose asks whether conntrack knows the packet. Later, when the backend and the path of
 * a new flow are known, this writes its entry. */
int tc_conntrack(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();
	enum tracked tracked;
	enum reason reason;
	struct packet *p;
	bool awaited;
	u16 port = 0;
	void *ct;

	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	if (!(s->begin & BEGIN_UNTRACKED)) {
		tracked = find_tracked(skb, s, false);
		if (tracked == TRACKED_ENDED)
			tracked = find_tracked(skb, s, false);
		if (tracked == TRACKED_NO || tracked == TRACKED_STALE) {
			s->begin |= BEGIN_UNTRACKED | (tracked == TRACKED_STALE ? BEGIN_STALE : 0);
			return go(skb, TAIL_CHOOSE);
		}
		if (tracked != TRACKED_ANSWERED || !begins_again(s)) {
			/* A SYN just behind the packet that closes the connection: conntrack gives
			 * it a new entry, which does not translate. A rule drops it then; the
			 * client repeats it. */
			if (p->tcp_flags & TCP_SYN)
				skb->priority = PRIORITY_OF_TRACKED;
			return TC_ACT_UNSPEC;
		}
		s->begin |= BEGIN_STALE;
		port = __builtin_bswap16(s->flow.client_port);
	}
	if (is_loopback(&s->flow.snat)) /* still ADDRESS_NOT_CHOSEN */
		return drop_flow(&s->flow, NO_SNAT_PORT);
	if ((s->begin & BEGIN_STALE) && find_tracked(skb, s, true) != TRACKED_NO)
		find_tracked(skb, s, false);
	if (!port)
		port = choose_client_port(skb, p, &s->flow, s->begin & BEGIN_OTHER_PORT);
	if (!port)
		return drop_flow(&s->flow, NO_SNAT_PORT);
	ct = write_entry(skb, p, &s->flow, port, &reason);
	if (!ct && reason == NOT_TRACKED &&
	    (s->begin & (BEGIN_UNTRACKED | BEGIN_OTHER_PORT)) == BEGIN_UNTRACKED) {
		s->begin = (s->begin & ~BEGIN_STALE) | BEGIN_OTHER_PORT;
		return go(skb, TAIL_CONNTRACK);
	}
	if (!ct)
		return reason == NOT_TRACKED && find_tracked(skb, s, false) == TRACKED_YES
			       ? TC_ACT_UNSPEC
			       : drop_flow(&s->flow, reason);
	awaited = await_packet(skb, s, port, s->begin & BEGIN_UNSEEN);
	if (!awaited)
		bpf_ct_change_timeout(ct, 0);
	bpf_ct_release(ct);
	if (!awaited) {
		find_tracked(skb, s, true); /* deletes it */
		return drop_flow(&s->flow, TABLE_FULL);
	}
	/* A flow in `flows` would hide the entry: one that an agent without this option began. */
	if (s->begin & BEGIN_RESTART)
		return go(skb, TAIL_DELETE_FLOW);
	return TC_ACT_UNSPEC;
}
