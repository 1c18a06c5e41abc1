/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Service addresses in packets: what comes from outside of the node, and from pods whose sockets
 * the hooks do not see.
 *
 * `tc_ingress` and `tc_egress` run on every device that packets come in or go out by. track.h
 * tells what each of them changes. What is rare or long has a program of its own, reached by a
 * tail call: a new flow, an ICMP error, an answer of our own.
 */
#include "types.h"
#include "compat.h"
#include "addr.h"
#include "maps.h"
#include "lookup.h"
#include "packet.h"
#include "rewrite.h"
#include "icmp.h"
#include "refuse.h"
#include "track.h"

#define TC_NEXT (-1) /* pass, and let whoever is behind us on this device have its say */
#define TC_SHOT 2
#define CHANGES 8 /* tries to find a free port of client' */
#define FRESH_TRIES                                                                                \
	24 /* of SNAT_TRIES, before a port that closed lately will do: the backend may             \
	    * still have it in TIME_WAIT */

enum tail {
	TAIL_NEW = 0,
	TAIL_ICMP_IN = 1,
	TAIL_ICMP_OUT = 2,
	TAIL_REFUSE = 3,
	TAILS = 4,
};

BPF_F_TABLE("hash", u32, struct device, devices, 64, BPF_F_NO_PREALLOC);
BPF_TABLE("array", u32, struct node, node, 1);
BPF_F_TABLE("lpm_trie", struct network_key, u32, local_networks, 64, BPF_F_NO_PREALLOC);
BPF_TABLE("lru_hash", struct fragment_key, struct ports, fragments, 64);
BPF_TABLE("prog", u32, u32, tails, TAILS);

static __always_inline void count(u32 reason)
{
	u64 *n = reasons.lookup(&reason);

	if (n)
		(*n)++;
}

/* Every path ends here. */
static __always_inline int finish(int action, enum reason reason)
{
	count(reason);
	return action;
}

/* Later fragments have no ports: they take those of the first one. False: not known. */
static __always_inline bool fragment_ports(struct packet *p)
{
	struct fragment_key key = {.id = p->id, .protocol = p->protocol};
	struct ports *known, ports;

	if (p->fragment == WHOLE)
		return true;
	key.from = p->tuple.from.address;
	key.to = p->tuple.to.address;
	if (p->fragment == FIRST) {
		ports.source = p->tuple.from.port;
		ports.destination = p->tuple.to.port;
		fragments.update(&key, &ports);
		return true;
	}
	known = fragments.lookup(&key);
	if (!known)
		return false;
	p->tuple.from.port = known->source;
	p->tuple.to.port = known->destination;
	return true;
}

static __always_inline bool backend_lives(u32 id)
{
	return backends.lookup(&id) != NULL;
}

/* Whether a packet of a flow that is known has to choose anew: a SYN, unless it repeats one that
 * nobody has answered yet, and UDP whose backend is gone. */
static __always_inline bool begins_anew(const struct nat *nat, u8 flags)
{
	if (nat->client.protocol == PROTO_TCP)
		return (flags & (TCP_SYN | TCP_ACK)) == TCP_SYN &&
		       (nat->state != STATE_NEW || !backend_lives(nat->backend_id));
	return !backend_lives(nat->backend_id);
}

/* The half of a flow that the LRU took is made from the one that is there. */
static __always_inline void mend(struct tuple *key, const struct nat *nat, bool reply)
{
	if (reply) {
		if (!replies.lookup(key))
			replies.update(key, (struct nat *)nat);
	} else if (!flows.lookup(key)) {
		flows.update(key, (struct nat *)nat);
	}
}

static __always_inline bool same_flow(const struct nat *a, const struct nat *b)
{
	return same_target(&a->frontend, &b->frontend) && same_target(&a->client, &b->client);
}

static __always_inline void tell(struct nat *other, const struct nat *nat)
{
	if (!other || other == nat || !same_flow(other, nat))
		return;
	other->fins |= nat->fins;
	other->state = nat->state;
}

/* Whether a flow has ended by time. An entry that only the quiet side's packets find grows old
 * while the other side still sends: UDP in one direction. */
static __always_inline bool gone(const struct nat *nat, u64 now)
{
	struct tuple key;
	struct nat *other;

	if (!expired(nat, now))
		return false;
	key = reply_of(nat);
	other = replies.lookup(&key);
	if (other && same_flow(other, nat) && !expired(other, now))
		return false;
	key = flow_of(nat);
	other = flows.lookup(&key);
	return !other || !same_flow(other, nat) || expired(other, now);
}

/* Each entry sees a part of the packets only; what opens or ends the connection holds for all. */
static __always_inline void tell_all(const struct nat *nat)
{
	struct tuple key = flow_of(nat);
	struct nat *other = flows.lookup(&key);

	tell(other, nat);
	key = reply_of(nat);
	other = replies.lookup(&key);
	tell(other, nat);
	if (!has_snat(nat))
		return;
	key = snat_reply_of(nat);
	other = replies.lookup(&key);
	tell(other, nat);
}

/* The mark of masqueraded flows' packets, both ways, while they are in the node's stack: whoever
 * lets kube-proxy's pass a FORWARD policy of DROP lets ours pass. It is bits of a mark that others
 * use too. */
static __always_inline void mark_masqueraded(struct __sk_buff *skb, bool in)
{
	u32 zero = 0;
	struct node *n = node.lookup(&zero);

	if (n)
		skb->mark = in ? skb->mark | n->mark : skb->mark & ~n->mark;
}

/* What a packet of a known flow becomes when it comes in; false: no flow of ours, or an answer that
 * is translated on its way out. */
static __always_inline bool translate_in(struct tuple *t, u8 flags, struct tuple *new,
					 bool *masqueraded)
{
	struct nat *nat = flows.lookup(t);
	u64 now = bpf_ktime_get_ns();
	struct tuple half;

	*new = *t;
	if (nat) {
		if (gone(nat, now) || begins_anew(nat, flags))
			return false;
		*masqueraded = has_snat(nat);
		if (touch(nat, flags, false, now))
			tell_all(nat);
		new->to = nat->backend;
		new->from.port = nat->client_port;
		half = reply_of(nat);
		mend(&half, nat, true);
		return true;
	}
	nat = replies.lookup(t);
	if (!nat || !has_snat(nat))
		return false;
	*masqueraded = !expired(nat, now);
	if (!same_address(&t->to.address, &nat->snat) || t->to.port != nat->snat_port ||
	    gone(nat, now))
		return false;
	if (touch(nat, flags, true, now))
		tell_all(nat);
	new->to = nat->client;
	new->to.port = nat->client_port;
	half = reply_of(nat);
	mend(&half, nat, true);
	half = flow_of(nat);
	mend(&half, nat, false);
	return true;
}

/* What it becomes when it goes out. */
static __always_inline bool translate_out(struct tuple *t, u8 flags, struct tuple *new,
					  bool *masqueraded)
{
	struct nat *nat = replies.lookup(t);
	u64 now = bpf_ktime_get_ns();
	struct tuple back;

	*new = *t;
	if (nat) {
		if (!same_address(&t->to.address, &nat->client.address) || gone(nat, now))
			return false;
		*masqueraded = has_snat(nat);
		if (touch(nat, flags, true, now))
			tell_all(nat);
		new->from = nat->frontend;
		new->to.port = nat->client.port;
		return true;
	}
	back = reversed(t);
	nat = replies.lookup(&back);
	if (!nat || gone(nat, now) || !same_address(&t->from.address, &nat->client.address))
		return false;
	if (touch(nat, flags, false, now))
		tell_all(nat);
	if (!has_snat(nat))
		return false;
	*masqueraded = true;
	new->from.address = nat->snat;
	new->from.port = nat->snat_port;
	return true;
}

/* ---- a new flow ---------------------------------------------------------------------------- */

/* Whether the backend has to see the node's address instead of the client's (kube-proxy reference
 * 2.2). A client that is its own backend would answer itself past us. */
static __always_inline bool masquerades(const struct choice *c, const struct node *n,
					const struct address *client, bool outside)
{
	if (same_address(client, &c->backend.address))
		return true;
	if (c->flags & SERVICE_CLUSTER_IP)
		return (n->flags & NODE_MASQUERADE_ALL) ||
		       (outside && (n->flags & NODE_DETECTS_LOCAL));
	return outside && !(c->flags & SERVICE_EXTERNAL_LOCAL);
}

/* Writes the half that the backend's answers find. Another flow of this client to the same
 * backend, through another frontend, may have it: then the port of client' is another one. */
static __always_inline bool claim_reply(struct nat *nat, const struct node *n, u64 now)
{
	for (int i = 0; i < CHANGES; i++) {
		struct tuple key = reply_of(nat);
		struct nat *other;

		if (!replies.insert(&key, nat))
			return true;
		other = replies.lookup(&key);
		if (!other || gone(other, now) || other->state == STATE_CLOSED ||
		    same_target(&other->frontend, &nat->frontend)) {
			replies.update(&key, nat);
			return true;
		}
		nat->client_port = __builtin_bswap16(n->port_low +
						     bpf_get_prandom_u32() %
							     (u16)(n->port_high - n->port_low + 1));
	}
	return false;
}

/* Finds a port of the node for this flow: the client's own if nobody has it, else one of the
 * range that the node's own sockets keep away from. */
static __always_inline bool claim_snat(struct nat *nat, const struct node *n, u64 now)
{
	u16 size = n->port_high - n->port_low + 1, own = __builtin_bswap16(nat->client_port);
	bool fixed = nat->client.protocol == PROTO_SCTP; /* its ports cannot be rewritten */

	nat->snat_port = nat->client_port;
	if (!fixed && (own < n->port_low || own > n->port_high))
		nat->snat_port = __builtin_bswap16(n->port_low + bpf_get_prandom_u32() % size);
	for (int i = 0; i < SNAT_TRIES; i++) {
		struct tuple key = snat_reply_of(nat);
		struct nat *other;

		if (!replies.insert(&key, nat))
			return true;
		other = replies.lookup(&key);
		if (!other || gone(other, now) ||
		    (i >= FRESH_TRIES && other->state == STATE_CLOSED)) {
			replies.update(&key, nat);
			return true;
		}
		if (fixed)
			return false;
		nat->snat_port = __builtin_bswap16(n->port_low + bpf_get_prandom_u32() % size);
	}
	return false;
}

/* Writes all of a new flow's entries. The port of client' comes first, since the snat half tells
 * it; then the reply half is told the snat port. */
static __always_inline enum reason create(struct nat *nat, const struct node *n, bool masquerade)
{
	struct tuple key;

	if (masquerade)
		nat->snat = is_v4(&nat->client.address) ? n->snat4 : n->snat6;
	if (!claim_reply(nat, n, nat->last_used))
		return NO_SNAT_PORT;
	key = reply_of(nat);
	if (masquerade) {
		if (!claim_snat(nat, n, nat->last_used)) {
			replies.delete(&key);
			return NO_SNAT_PORT;
		}
		replies.update(&key, nat);
	}
	key = flow_of(nat);
	return flows.update(&key, nat) ? NOT_RECORDED : TRANSLATED;
}

static __always_inline bool starts_flow(const struct packet *p)
{
	return p->protocol != PROTO_TCP || (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

int tc_new(struct __sk_buff *skb)
{
	u32 zero = 0, ifindex = skb->ifindex;
	struct device *device = devices.lookup(&ifindex);
	struct node *n = node.lookup(&zero);
	struct packet p = {};
	struct choice c = {};
	struct nat nat = {};
	struct asker who = {};
	struct tuple to;
	enum verdict v;

	if (!device || !n || !parse(skb, device->l2, &p))
		return TC_NEXT;
	who.outside = device->role == ROLE_HOST;
	who.by_packet = true;
	who.key.client = p.tuple.from.address;
	v = choose(&p.tuple.to, &who, &c);
	if (v == PASS)
		return finish(TC_NEXT, c.reason);
	if (v == REFUSE)
		tails.call(skb, TAIL_REFUSE);
	if (v != TRANSLATE)
		return finish(TC_SHOT, c.reason);
	nat.last_used = bpf_ktime_get_ns();
	nat.client = p.tuple.from;
	nat.frontend = p.tuple.to;
	nat.backend = c.backend;
	nat.client_port = p.tuple.from.port;
	nat.service = c.service;
	nat.backend_id = c.backend_id;
	c.reason = create(&nat, n, masquerades(&c, n, &p.tuple.from.address, who.outside));
	if (c.reason != TRANSLATED)
		return finish(TC_SHOT, c.reason);
	to = p.tuple;
	to.to = nat.backend;
	to.from.port = nat.client_port;
	if (rewrite(skb, &p, &to))
		return finish(TC_SHOT, NOT_REWRITTEN);
	if (has_snat(&nat))
		mark_masqueraded(skb, true);
	return finish(TC_NEXT, TRANSLATED);
}

/* Sends the answer out of the device that the question came in by. */
int tc_refuse(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = devices.lookup(&ifindex);
	struct packet p = {};

	if (!device || !parse(skb, device->l2, &p))
		return finish(TC_SHOT, NO_ENDPOINTS);
	if ((p.protocol == PROTO_TCP ? refuse_tcp(skb, &p) : refuse_with_icmp(skb, &p)) ||
	    swap_link(skb, device->l2))
		return finish(TC_SHOT, NOT_REWRITTEN);
	return finish(bpf_redirect(ifindex, 0), NO_ENDPOINTS);
}

/* ---- every packet -------------------------------------------------------------------------- */

int tc_ingress(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = devices.lookup(&ifindex);
	struct packet p = {};
	struct tuple to;
	bool masqueraded = false;

	if (!device || !parse(skb, device->l2, &p))
		return TC_NEXT;
	if (is_icmp_error(&p)) {
		tails.call(skb, TAIL_ICMP_IN);
		return TC_NEXT;
	}
	if (!p.tuple.to.protocol || !fragment_ports(&p))
		return TC_NEXT;
	if (translate_in(&p.tuple, p.tcp_flags, &to, &masqueraded)) {
		if (rewrite(skb, &p, &to))
			return finish(TC_SHOT, NOT_REWRITTEN);
		if (masqueraded)
			mark_masqueraded(skb, true);
		return TC_NEXT;
	}
	if (masqueraded)
		mark_masqueraded(skb, true);
	if (starts_flow(&p))
		tails.call(skb, TAIL_NEW);
	return TC_NEXT;
}

int tc_egress(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = devices.lookup(&ifindex);
	struct packet p = {};
	struct tuple to;
	bool masqueraded = false;

	if (!device || !parse(skb, device->l2, &p))
		return TC_NEXT;
	if (is_icmp_error(&p)) {
		tails.call(skb, TAIL_ICMP_OUT);
		return TC_NEXT;
	}
	if (!p.tuple.to.protocol || !fragment_ports(&p))
		return TC_NEXT;
	if (translate_out(&p.tuple, p.tcp_flags, &to, &masqueraded) && rewrite(skb, &p, &to))
		return finish(TC_SHOT, NOT_REWRITTEN);
	if (masqueraded)
		mark_masqueraded(skb, false);
	return TC_NEXT;
}

/* ---- ICMP errors --------------------------------------------------------------------------- */

/* Outer addresses that are an end of the flow follow it; a router's own address stays. */
static __always_inline int translate_error(struct __sk_buff *skb, bool in)
{
	u32 ifindex = skb->ifindex;
	struct device *device = devices.lookup(&ifindex);
	struct packet p = {}, carried = {};
	struct tuple with, becomes, outer;
	bool masqueraded = false, known;

	if (!device || !parse(skb, device->l2, &p) || !parse_carried(skb, &p, &carried) ||
	    !carried.tuple.to.protocol)
		return TC_NEXT;
	with = reversed(&carried.tuple);
	known = in ? translate_in(&with, TCP_ACK, &becomes, &masqueraded)
		   : translate_out(&with, TCP_ACK, &becomes, &masqueraded);
	if (masqueraded)
		mark_masqueraded(skb, in);
	if (!known)
		return TC_NEXT;
	outer = p.tuple;
	if (same_address(&outer.from.address, &with.from.address))
		outer.from.address = becomes.from.address;
	if (same_address(&outer.to.address, &with.to.address))
		outer.to.address = becomes.to.address;
	becomes = reversed(&becomes);
	if (rewrite_carried(skb, &p, &carried, &becomes) || rewrite(skb, &p, &outer))
		return finish(TC_SHOT, NOT_REWRITTEN);
	return TC_NEXT;
}

int tc_icmp_in(struct __sk_buff *skb)
{
	return translate_error(skb, true);
}

int tc_icmp_out(struct __sk_buff *skb)
{
	return translate_error(skb, false);
}
