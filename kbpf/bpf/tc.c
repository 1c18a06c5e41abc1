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

static __always_inline u32 socket_cgroup(void)
{
	return 0; /* affinity knows who sends packets by the address */
}

#include "lookup.h"
#include "packet.h"
#include "account.h"
#include "account_flows.h"
#include "hash.h"
#include "sctp.h"
#include "rewrite.h"
#include "icmp.h"
#include "refuse.h"
#include "track.h"

#define TC_NEXT (-1) /* pass, and let whoever is behind us on this device have its say */
#define TC_SHOT 2
#define CHANGES 8          /* tries to find a free port of client' */
#define ASKED 16           /* flows, whether anybody needs them, by each new one */
#define EVICTION_TRIES 8   /* flows that are asked when the queue is full */
#define FRESH_TRIES 8      /* of SNAT_TRIES, before a port that a backend may still keep will do */
#define SCAN_PORTS 640     /* ports that tc_scan looks at in one run */
#define SCANS 18           /* such runs: the kernel allows a packet 33 tail calls in all */
#define TICK (SECOND / 50) /* CPUs may read the coarse clock so far apart */
#define SCAN_PAUSE (SECOND / 10) /* no search of this length for a backend that had no port */

#define VLAN_ID 0x0fff
#define OTHER_HOST 3 /* PACKET_OTHERHOST */

#define SERVED 0x6b627066           /* in cb[0]: the packet's flow has just been written */
#define HEARD (SERVED | NO_SEGMENT) /* also in cb[0]: what the packet says has counted already */
#define JUST_MADE 0x200             /* not a TCP flag: the same, of a packet's flags */

#define NO_ADDRESS __builtin_bswap32(1) /* ::1, for a source that has to change and cannot */

enum tail {
	TAIL_NEW = 0,
	TAIL_ICMP_IN = 1,
	TAIL_ICMP_OUT = 2,
	TAIL_REFUSE = 3,
	TAIL_HOST = 4,
	TAIL_HOST_NEW = 5,
	TAIL_INGRESS = 6,
	TAIL_WAY = 7,
	TAIL_CLAIM = 8,
	TAIL_SCTP = 9,
	TAIL_PLACE = 10,
	TAIL_ROOM = 11,
	TAIL_FORGET = 12,
	TAIL_YIELD = 13,
	TAIL_LATE = 14,
	TAIL_SNAT = 15,
	TAIL_AGAIN = 16,
	TAIL_SCAN = 17,
	TAILS = 18,
};

/* Of a packet that begins a flow, in cb[0]. */
enum begins {
	BEGINS_AGAIN = 1 << 0, /* where a flow of ours has ended */
	BEGINS_OURS = 1 << 1,  /* no other data plane got it before */
};

BPF_F_TABLE("hash", u32, struct device, devices, 64, BPF_F_NO_PREALLOC);
BPF_TABLE("array", u32, struct cached_device, device_cache, CACHED_DEVICES);
BPF_TABLE("array", u32, struct node, node, 1);
BPF_F_TABLE("lpm_trie", struct network_key, u32, local_networks, 64, BPF_F_NO_PREALLOC);
BPF_TABLE("array", u32, struct port_slot, port_slots, PORT_SLOTS);
BPF_TABLE("prog", u32, u32, tails, TAILS);

/* place of a client -> the ports of a datagram, for its later fragments. Full: the oldest goes, and
 * what is left of its datagram passes untranslated. */
BPF_TABLE("lru_hash", struct place, struct first_fragment, fragments, 64);

/* place of a client -> by what a SYN is known: connections that another data plane got while we
 * yielded to it. Full: the oldest goes, and if its SYN comes once more it begins anew. */
BPF_TABLE("lru_hash", struct place, u32, yielded, 64);

/* 0 -> until when no flow begins, ns, CLOCK_MONOTONIC. The devices change over to other programs
 * one after the other; do these keep flows elsewhere, one that began meanwhile would be known on
 * one of its two devices only. A SYN that is dropped comes again after a second. It is a time, so
 * that an agent that dies leaves nobody waiting, and a map of its own, which every version of kbpf
 * shares: its layout must never change. */
BPF_TABLE("array", u32, u64, paused, 1);

/* 0 -> the flow that is being made, on its way from the program that chose its backend to the one
 * that writes its entries. On one CPU there is only one: TC runs with bottom halves disabled, so
 * nothing else runs at TC meanwhile. PREEMPT_RT has a lock for that; since 6.18 only with
 * CONFIG_PREEMPT_RT_NEEDS_BH_LOCK, which `kbpf check` and the agent look for. */
BPF_TABLE("percpu_array", u32, struct nat, pending, 1);

/* What the agent knows of a device. Each packet asks for up to two, and the kernel gives an array's
 * element in a tenth of the time that a hash takes. */
static __always_inline struct device *device_at(u32 ifindex)
{
	u32 index = ifindex % CACHED_DEVICES;
	struct cached_device *cached = device_cache.lookup(&index);

	if (cached && cached->ifindex == ifindex)
		return &cached->device;
	return devices.lookup(&ifindex);
}

#include "forward.h"

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

/* The end of a packet that was rewritten. SCTP's checksum takes thousands of instructions, which
 * are in a program of their own; what bpf_redirect*() was told before holds there too. */
static __always_inline int complete(struct __sk_buff *skb, const struct packet *p,
				    const struct tuple *new, int action, u32 l3)
{
	u32 change = sctp_change(p, new);

	if (!change)
		return action;
	skb->cb[0] = change;
	skb->cb[1] = action;
	skb->cb[2] = l3;
	tails.call(skb, TAIL_SCTP);
	return finish(TC_SHOT, NOT_REWRITTEN);
}

/* Which client's places a packet takes that came in by this device (NULL: it is the node's own): a
 * pod's own device, whatever address the pod writes; a pod's address, since the pods of a node may
 * have one network; anybody else's IPv4 address or network of 64 bits. */
static __always_inline struct address sharer_of_packet(const struct device *in, u32 ifindex,
						       const struct address *from)
{
	if (in && (in->flags & DEVICE_PEER))
		return (struct address){.word = {ifindex, 0, 0, ~0U}};
	if (in && in->role == ROLE_POD)
		return *from;
	return network_of(from);
}

/* Of what tells the datagrams of one id apart: the addresses, and IPv4's protocol. In IPv6 the
 * protocol may stand behind destination options, which only the first fragment has (RFC 8200, 4.5).
 * Multiplied, so that no two words can be exchanged. */
static __always_inline u32 hash_of_fragments(const struct packet *p)
{
	const struct address *from = &p->tuple.from.address, *to = &p->tuple.to.address;
	u32 hash = HASH_SEED ^ (p->v6 ? PROTO_FRAGMENT : p->protocol);

	hash = hash_word(hash, from->word[2]);
	hash = hash_word(hash, from->word[3]);
	hash = hash_word(hash, to->word[0] ^ to->word[1]);
	hash = hash_word(hash, to->word[2]);
	hash = hash_word(hash, to->word[3]);
	return hash_end(hash, 24);
}

/* Later fragments have no ports: they take protocol and ports of the first one. False: not known.
 * Ids that follow each other have places of their own. */
static __always_inline bool fragment_ports(struct packet *p, const struct device *in, u32 ifindex)
{
	u32 id = __builtin_bswap32(p->id); /* of IPv4: in the upper half */
	struct first_fragment fragment = {.id = p->id}, *known;
	struct place place;

	if (p->fragment == WHOLE)
		return true;
	fragment.others = hash_of_fragments(p);
	place.sharer = sharer_of_packet(in, ifindex, &p->tuple.from.address);
	place.number = (id + (id >> 16) + fragment.others) % FRAGMENT_PLACES;
	if (p->fragment == FIRST) {
		fragment.ports.source = p->tuple.from.port;
		fragment.ports.destination = p->tuple.to.port;
		fragment.protocol = p->protocol;
		fragments.update(&place, &fragment);
		return true;
	}
	known = fragments.lookup(&place);
	if (!known || known->id != fragment.id || known->others != fragment.others)
		return false;
	p->protocol = known->protocol;
	p->tuple.from.protocol = p->tuple.to.protocol = p->protocol;
	p->tuple.from.port = known->ports.source;
	p->tuple.to.port = known->ports.destination;
	return true;
}

static __always_inline bool backend_lives(u32 id)
{
	return backends.lookup(&id) != NULL;
}

static __always_inline bool same_flow(const struct nat *a, const struct nat *b)
{
	return same_target(&a->frontend, &b->frontend) && same_target(&a->client, &b->client) &&
	       same_target(&a->backend, &b->backend) && a->client_port == b->client_port &&
	       a->snat_port == b->snat_port;
}

/* What stands at this key, if it is still of this flow. */
static __always_inline struct nat *entry_of(const struct nat *nat, struct ends *key)
{
	struct nat *entry = flows.lookup(key);

	return entry && same_flow(entry, nat) ? entry : NULL;
}

static __always_inline bool holds(const struct nat *entry, u64 now)
{
	return entry && !expired(entry, now);
}

/* Whether a flow has ended by time. An entry that only the quiet side's packets find grows old
 * while the other side still sends: UDP in one direction. */
static __always_inline bool gone(const struct nat *nat, u64 now)
{
	struct ends key;

	if (!expired(nat, now))
		return false;
	key = answer_of(nat);
	if (holds(entry_of(nat, &key), now))
		return false;
	if (has_snat(nat)) {
		key = snat_answer_of(nat);
		if (holds(entry_of(nat, &key), now))
			return false;
	}
	key = question_of(nat);
	return !holds(entry_of(nat, &key), now);
}

enum again {
	AGAIN_NO = 0,
	AGAIN_ASK = 1, /* tc_again finds out */
	AGAIN_YES = 2,
};

/* Whether a packet of a known flow has to choose a backend again: a SYN after both sides have
 * closed, UDP whose backend is gone. Any other SYN may be a repeated one, whose answer was lost, or
 * a forged one: it goes where the connection is, if there still is one, and the backend decides.
 * Datagrams without an answer ask once a second. */
static __always_inline enum again begins_anew(const struct nat *nat, u32 flags, u64 now)
{
	if (flags & (JUST_MADE | NO_SEGMENT))
		return AGAIN_NO;
	if (nat->client.protocol == PROTO_UDP) {
		if (!backend_lives(nat->backend_id))
			return AGAIN_YES;
		return nat->state == STATE_NEW && elapsed(nat->last_used, now) > SECOND;
	}
	if ((flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return AGAIN_NO;
	return both_closed(nat) ? AGAIN_YES : AGAIN_ASK;
}

/* The entry of the other side. For a packet of the backend that is the client's own; for one of the
 * client that by which the backend's packets are found. If another program leaves the source of a
 * masqueraded flow untranslated, the backend answers to client'. */
static __always_inline struct nat *other_side(const struct nat *nat, bool back)
{
	struct nat *other;
	struct ends key;

	if (back)
		key = question_of(nat);
	else if (has_snat(nat))
		key = snat_answer_of(nat);
	else
		key = answer_of(nat);
	other = entry_of(nat, &key);
	if (back || !has_snat(nat) || nat->way == WAY_PAST || nat->state == STATE_NEW || !other ||
	    other->seen.begun)
		return other;
	key = answer_of(nat);
	return entry_of(nat, &key);
}

/* The client's own entry has the state of the flow, the backend's has a copy. */
static __always_inline void change_state(struct nat *nat, const struct packet *p, u32 flags,
					 bool back)
{
	struct nat *other = other_side(nat, back), *question = back ? other : nat;
	u8 before, state, fins;

	if (!other)
		return;
	before = question->state;
	fins = question->fins;
	if (nat->client.protocol == PROTO_TCP)
		state = tcp_state_after(before, &fins, p, flags, back, &nat->seen.tcp,
					&other->seen.tcp);
	else if (before == STATE_NEW)
		state = STATE_ANSWERED;
	else /* if this entry has not just been behind */
		state = nat->state == before ? STATE_ESTABLISHED : before;
	question->state = state;
	question->fins = fins;
	if (state != before)
		account_state(question, before, both_closed(question));
	nat->state = other->state = state;
	nat->fins = other->fins = question->fins;
	if (state == STATE_CLOSED && state != before)
		say_rest(other);
}

static __always_inline bool may_change(const struct nat *nat, u32 flags, bool back, u64 now)
{
	return nat->client.protocol == PROTO_TCP ? may_change_tcp(nat, flags, back)
						 : may_change_other(nat, flags, back, now);
}

/* A packet of a known flow, found by this entry. Each entry sees the packets of one side only, but
 * for that of client' and backend, which also sees those of the client when they leave (see_off()).
 */
static __always_inline void keep(struct nat *nat, const struct packet *p, u32 flags, bool back,
				 u64 now)
{
	if (flags & NO_SEGMENT)
		return;
	nat->last_used = now;
	if (may_change(nat, flags, back, now))
		change_state(nat, p, flags, back);
	if (nat->client.protocol == PROTO_TCP && (flags & (TCP_SYN | TCP_ACK)) &&
	    !(flags & TCP_RST))
		nat->seen.tcp = p->tcp;
}

/* A packet of the client that leaves the stack, found by the entry of client' and backend. What it
 * says was heard when it came in, and in a masqueraded flow this entry was not told. */
static __always_inline void see_off(struct nat *nat, u32 flags, u64 now)
{
	struct nat *question;
	struct ends key;

	if (flags & NO_SEGMENT)
		return;
	nat->last_used = now;
	if (!has_snat(nat) || !may_change(nat, flags, false, now))
		return;
	key = question_of(nat);
	question = entry_of(nat, &key);
	if (!question)
		return;
	nat->state = question->state;
	nat->fins = question->fins;
}

/* Deletes an entry if it is still this flow's. */
static __always_inline void leave(struct ends *key, const struct nat *nat)
{
	if (entry_of(nat, key))
		flows.delete(key);
}

/* The only CPU that decides about what stands at this key; NULL: another one is at it. A key that
 * is free goes to whoever writes its entry first. One whose flow gives it up does not: two CPUs
 * that find it so would both believe to have it, or one would delete what the other has written.
 * Nobody waits: there are other ports, and an entry that stays is found by the agent (orphans.py).
 */
static __always_inline struct port_slot *hold(const struct ends *key)
{
	u32 index = (key->first.port ^ key->second.port) % PORT_SLOTS;
	struct port_slot *slot = port_slots.lookup(&index);

	if (!slot)
		return NULL;
	__sync_fetch_and_add(&slot->holders, 1);
	if (*(volatile u32 *)&slot->holders == 1)
		return slot;
	__sync_fetch_and_add(&slot->holders, -1);
	return NULL;
}

static __always_inline void let_go(struct port_slot *slot)
{
	__sync_fetch_and_add(&slot->holders, -1);
}

/* Deletes what a flow's answers find. */
static __always_inline void forget_answers(const struct nat *nat)
{
	struct port_slot *slot;
	struct ends key;

	if (has_snat(nat)) {
		key = snat_answer_of(nat);
		slot = hold(&key);
		if (slot) {
			leave(&key, nat);
			let_go(slot);
		}
	}
	if (nat->way == WAY_PAST)
		return;
	key = answer_of(nat);
	leave(&key, nat);
}

/* Deletes a flow's entries but for this one, which is still to be read: an element that is deleted
 * may be another flow's at once. */
static __always_inline void forget_others(const struct nat *nat)
{
	struct ends key;

	if (nat->part != PART_SNAT_ANSWER && has_snat(nat)) {
		key = snat_answer_of(nat);
		leave(&key, nat);
	}
	if (nat->part != PART_ANSWER && nat->way != WAY_PAST) {
		key = answer_of(nat);
		leave(&key, nat);
	}
	if (nat->part != PART_QUESTION) {
		key = question_of(nat);
		leave(&key, nat);
	}
}

/* Deletes the flow of a question. Its entry is the last one: by that it is found. */
static __always_inline void forget(const struct nat *nat)
{
	struct ends key = question_of(nat);

	forget_answers(nat);
	leave(&key, nat);
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

/* What a packet of a known flow becomes when it comes in. */
struct step {
	struct tuple up;  /* for the stack */
	struct tuple out; /* for the next device */
	struct nat *nat;  /* where it was found */
	u64 now;
	u32 device;       /* not 0: for this node, as if it came in there */
	u8 way;           /* enum way */
	bool masqueraded; /* to be marked in the stack; also where nothing else is to be done */
	u8 anew;          /* enum again: what was found may be no flow any more */
	bool back;        /* from the backend */
};

/* JUST_MADE, once, if serve() has sent the packet here; NO_SEGMENT too if tc_late has. */
static __always_inline u32 just_made(struct __sk_buff *skb)
{
	u32 from = skb->cb[0];

	if ((from & ~NO_SEGMENT) != SERVED)
		return 0;
	skb->cb[0] = 0;
	return JUST_MADE | (from & NO_SEGMENT);
}

/* A packet of the client. */
static __always_inline void step_forth(const struct nat *nat, struct step *s)
{
	s->up.to = nat->backend;
	s->up.from.port = nat->client_port;
	s->out = s->up;
	if (has_snat(nat)) {
		s->out.from.address = nat->snat;
		s->out.from.port = nat->snat_port;
	}
}

/* A packet of the backend. False: it is for the client as it is, and changes when it leaves. */
static __always_inline bool step_back(const struct tuple *t, const struct nat *nat, struct step *s)
{
	if (has_snat(nat) && same_address(&t->to.address, &nat->snat) &&
	    t->to.port == nat->snat_port) {
		s->up.to = nat->client;
		s->up.to.port = nat->client_port;
	} else if (nat->way == WAY_STACK && !nat->device) {
		return false;
	}
	s->out.from = nat->frontend;
	s->out.to = nat->client;
	if (nat->device)
		s->up = s->out;
	s->device = nat->device;
	return true;
}

/* Fills `s`; false: no flow of ours, or nothing to do here. */
static __always_inline bool translate_in(struct tuple *t, const struct packet *p, u32 flags,
					 struct step *s)
{
	struct nat *nat = flow_between(t);
	u64 now = now_ns();
	bool back;

	if (!nat)
		return false;
	back = !is_question(t, nat);
	if (back && !is_answer(t, nat))
		return false;
	if (expired(nat, now) && !(flags & JUST_MADE)) {
		if (!(flags & NO_SEGMENT))
			s->anew = AGAIN_ASK;
		if (!(flags & NO_SEGMENT) || gone(nat, now))
			return false;
	}
	s->up = *t;
	s->masqueraded = has_snat(nat) && !(back && expired(nat, now));
	if (!back) {
		s->anew = begins_anew(nat, flags, now);
		if (s->anew) {
			s->masqueraded = false;
			return false;
		}
		step_forth(nat, s);
	} else if (!step_back(t, nat, s)) {
		return false;
	}
	s->way = nat->way;
	s->nat = nat;
	s->now = now;
	s->back = back;
	keep(nat, p, flags, back, now);
	return true;
}

/* Whether this SYN begins a connection that the flow is not about: the client dials the backend
 * itself, from a port that it used through a Service until that connection ended. A SYN to the
 * Service goes where the connection is (begins_anew()): its numbers are those that the client's own
 * entry has remembered as it came in. */
static __always_inline bool has_other_owner(const struct nat *nat, const struct packet *p,
					    u32 flags)
{
	struct ends key;
	struct nat *question;

	if (nat->client.protocol != PROTO_TCP || (flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	key = question_of(nat);
	question = entry_of(nat, &key);
	return !question || (is_ending(question) && (question->seen.tcp.next != p->tcp.next ||
						     question->seen.tcp.ack != p->tcp.ack));
}

enum leaving {
	LEAVES_AS_IT_IS = 0, /* no flow of ours */
	LEAVES_DONE = 1,     /* one of ours, and it says already what it has to */
	LEAVES_CHANGED = 2,
	LEAVES_FOR_SERVICE = 3, /* this node's own, and there is a flow for it */
};

/* What it becomes when it goes out. */
static __always_inline enum leaving translate_out(struct tuple *t, const struct packet *p,
						  u32 flags, u32 bytes, struct tuple *new,
						  bool *masqueraded)
{
	struct nat *nat = flow_between(t);
	u64 now = now_ns();
	bool back;

	*new = *t;
	if (!nat)
		return LEAVES_AS_IT_IS;
	back = is_answer(t, nat) && same_address(&t->to.address, &nat->client.address);
	if (!back && !is_translated(t, nat))
		return nat->device && is_question(t, nat) ? LEAVES_FOR_SERVICE : LEAVES_AS_IT_IS;
	if (gone(nat, now))
		return LEAVES_AS_IT_IS;
	if (!back && has_other_owner(nat, p, flags)) {
		struct ends key = ends_of(&t->from, &t->to);

		flows.delete(&key);
		return LEAVES_AS_IT_IS;
	}
	if (back) {
		*masqueraded = has_snat(nat);
		keep(nat, p, flags, true, now);
		if (bytes && !has_snat(nat) && nat->way == WAY_STACK) /* not seen when it came in */
			account_bytes(nat, bytes, flags, true);
		new->from = nat->frontend;
		new->to.port = nat->client.port;
		return LEAVES_CHANGED;
	}
	if (!same_address(&t->from.address, &nat->client.address))
		return LEAVES_DONE; /* redirected: it has the node's address */
	see_off(nat, flags, now);
	if (!has_snat(nat))
		return LEAVES_DONE;
	*masqueraded = true;
	new->from.address = nat->snat;
	new->from.port = nat->snat_port;
	return LEAVES_CHANGED;
}

/* ---- a new flow ---------------------------------------------------------------------------- */

/* Whether the backend has to see the node's address instead of the client's, as in
 * kube-proxy. A client that is its own backend would answer itself past us. */
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

/* Writes the entry that the backend's answers to client' find; 0, or the error of the last try,
 * -EEXIST if all ports that were tried are another flow's. The kernel refuses a write (-EBUSY,
 * Linux 5.11 and later) while the same CPU has been interrupted at a write to a bucket of the same
 * group: the next port is most likely in another one. Another flow of this client to the same
 * backend, through another frontend, may have it: then the port of client' is another one. So it is
 * where another data plane knows connections of this client by its ports: in the node's stack it
 * would take the answers for theirs. */
static __always_inline long claim_answer(struct nat *nat, const struct node *n, u64 now)
{
	u32 size = n->port_high - n->port_low + 1;
	long error = -EEXIST;

	for (int i = 0; i < CHANGES; i++) {
		struct port_slot *slot;
		struct nat *other;
		struct ends key;

		if (i || (n->flags & NODE_FOLLOWS))
			nat->client_port =
				__builtin_bswap16(n->port_low + bpf_get_prandom_u32() % size);
		key = answer_of(nat);
		error = flows.insert(&key, nat);
		if (!error)
			return 0;
		slot = hold(&key);
		if (!slot)
			continue;
		other = flows.lookup(&key);
		if (!other || gone(other, now) || other->state == STATE_CLOSED ||
		    (same_target(&other->frontend, &nat->frontend) &&
		     same_target(&other->client, &nat->client)))
			error = flows.update(&key, nat);
		let_go(slot);
		if (!error)
			return 0;
	}
	return error;
}

/* The ports of the node that a client may have to one backend: one of each SHARES in a row, by a
 * hash of its address (IPv6: its network of 64 bits, of which a host has all addresses). So no
 * client has more than this part of them, and of another client's at most about as large a part.
 */
struct share {
	u32 low;
	u32 count; /* of its ports */
	u32 step;  /* a power of two */
	u32 client;
};

static __always_inline struct share share_of(const struct nat *nat, const struct node *n)
{
	const struct address *a = &nat->client.address;
	u32 size = n->port_high - n->port_low + 1, step = size < SHARED_PORTS ? 1 : SHARES;
	struct share s = {.low = n->port_low, .count = size / step, .step = step};

	s.client = hash_word(hash_word(HASH_SEED, a->word[0]), is_v4(a) ? a->word[3] : a->word[1]);
	return s;
}

static __always_inline __be16 port_at(const struct share *s, u32 at)
{
	u32 chosen = hash_end(hash_word(s->client, at), 3 * sizeof(at)) & (s->step - 1);

	return __builtin_bswap16(s->low + at * s->step + chosen);
}

static __always_inline u32 place_of(const struct share *s, __be16 port)
{
	return (u32)(__builtin_bswap16(port) - s->low) / s->step;
}

/* How a port is searched for (cb[0] of tc_snat), and whose port will do then. */
enum search {
	SEARCH_ANY = 0,   /* at random: what has ended, but for ports that a backend keeps; then all
			   * of   that, and what is disposable */
	SEARCH_ROW = 1,   /* in a row: that, and handshakes that have had a second */
	SEARCH_FOUND = 2, /* the same, where tc_scan has found one */
	SEARCH_LAST = 3,  /* any handshake: under a flood it is most likely that of a forged client,
			   * and  the new one would be lost for certain */
};

/* Whether a flow gives its port to another, as far as one of its entries tells. Established ones
 * never do. */
static __always_inline bool gives_port(const struct nat *entry, u64 now, u32 search, bool fresh)
{
	if (expired(entry, now))
		return true;
	if (entry->state == STATE_CLOSED)
		return !fresh || !(entry->fins & FIN_BACKEND_FIRST);
	if (search && is_half_open(entry) &&
	    (search == SEARCH_LAST || elapsed(entry->last_used, now) > SECOND))
		return true;
	return !fresh && is_disposable(entry, now);
}

/* The same of the whole flow: its client may have sent since its backend did. */
static __always_inline bool gives_up_port(const struct nat *answer, u64 now, u32 search, bool fresh)
{
	struct ends key = question_of(answer);
	struct nat *question;

	if (!gives_port(answer, now, search, fresh))
		return false;
	question = entry_of(answer, &key);
	return !question || gives_port(question, now, search, fresh);
}

/* Finds a port of the node for this flow among those that its client may have, out of the range
 * that the node's own sockets keep away from: the client's own if it is one of those and free.
 * False: nat->snat_port is the one to go on with. */
static __always_inline bool claim_snat(struct nat *nat, const struct node *n, u32 search)
{
	struct share s = share_of(nat, n);
	struct port_slot *slot = NULL;
	struct nat *other = NULL;
	u64 now = nat->last_used;
	struct ends key;
	u32 at = place_of(&s, nat->snat_port);
	bool written;

	if (!search && (at >= s.count || port_at(&s, at) != nat->snat_port))
		at = bpf_get_prandom_u32() % s.count;
	for (int i = 0; i < SNAT_TRIES; i++) {
		nat->snat_port = port_at(&s, at);
		key = snat_answer_of(nat);
		if (!flows.insert(&key, nat))
			return true;
		slot = hold(&key);
		if (slot) {
			other = flows.lookup(&key);
			if (!other || gives_up_port(other, now, search, !search && i < FRESH_TRIES))
				break;
			let_go(slot);
			slot = NULL;
		}
		at = (search ? at + 1 : bpf_get_prandom_u32()) % s.count;
	}
	if (!slot) {
		nat->snat_port = port_at(&s, at);
		return false;
	}
	if (other) /* its client may not go on with it */
		forget_others(other);
	written = !flows.update(&key, nat);
	let_go(slot);
	return written;
}

/* Whether somebody may still talk by a flow that began before all others that are tracked. */
static __always_inline bool is_needed(const struct nat *nat, u64 now)
{
	return !is_half_open(nat) && nat->state != STATE_CLOSED && !is_disposable(nat, now) &&
	       !gone(nat, now);
}

/* Asks the oldest flows whether anybody needs them; one goes that nobody does, the others get
 * places behind all. A handshake of this moment has the place of a connection before it, from the
 * same port: it goes only if there is nobody else, and its key is counted until it comes again. */
static __always_inline void make_room(u64 *there, u64 now)
{
	struct nat *nat = NULL, *young = NULL;

	for (int i = 0; i < ASKED; i++) {
		struct ends oldest;

		if (order.pop(&oldest))
			return;
		nat = flows.lookup(&oldest);
		if (!nat || nat->part != PART_QUESTION) {
			__sync_fetch_and_add(there, -1);
			return; /* it is gone already */
		}
		if (is_half_open(nat) && elapsed(nat->last_used, now) < SECOND)
			young = nat;
		else if (!is_needed(nat, now))
			break;
		if (order.push(&oldest, 0)) {
			count(EVICTED);
			break;
		}
		nat = NULL;
	}
	if (nat)
		__sync_fetch_and_add(there, -1);
	else
		nat = young;
	if (nat)
		forget(nat);
}

/* One of the oldest flows goes. Those that are needed keep their places, but for streams of UDP,
 * which make room for other protocols. False: there is none among those asked. */
static __always_inline bool evict(bool for_udp, u64 now)
{
	for (int i = 0; i < EVICTION_TRIES; i++) {
		struct ends oldest;
		struct nat *nat;

		if (order.pop(&oldest))
			return false;
		nat = flows.lookup(&oldest);
		if (!nat || nat->part != PART_QUESTION)
			return true;
		if (!is_needed(nat, now)) {
			forget(nat);
			return true;
		}
		if (!for_udp && nat->client.protocol == PROTO_UDP) {
			count(EVICTED);
			forget(nat);
			return true;
		}
		order.push(&oldest, 0);
	}
	return false;
}

/* Finds a place for a new flow. The queue has room for an eighth more than the operator allows: so
 * a long row of flows that are needed is passed (tc_room) before none can begin any more. */
static __always_inline bool find_place(struct ends *key, const struct node *n, u64 now)
{
	u32 zero = 0;
	u64 *there = tracked.lookup(&zero);

	if (!there)
		return false;
	if (!order.push(key, 0)) {
		__sync_fetch_and_add(there, 1);
		return true;
	}
	*there = n->connections + n->connections / 8; /* whatever was counted */
	return evict(key->first.protocol == PROTO_UDP, now) && !order.push(key, 0);
}

/* What was there before of the same client and frontend goes, or its place in the queue is found.
 * Any reason but NEW_FLOW: it cannot begin. NOT_RECORDED: another flow that lives has this key for
 * its answers. */
static __always_inline enum reason claim_question(struct ends *key, const struct nat *old,
						  const struct nat *nat, const struct node *n)
{
	if (old && old->part == PART_QUESTION) {
		forget_answers(old);
		return NEW_FLOW;
	}
	if (old) {
		if (!gone(old, nat->last_used) && old->state != STATE_CLOSED)
			return NOT_RECORDED;
		flows.delete(key);
	}
	return find_place(key, n, nat->last_used) ? NEW_FLOW : TABLE_FULL;
}

static __always_inline bool starts_flow(const struct packet *p)
{
	return p->protocol == PROTO_UDP || (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

/* Has a flow written for a packet of none, or asks whether its flow still is one. */
static __always_inline void begin_or_ask(struct __sk_buff *skb, u8 again, u32 tail)
{
	skb->cb[0] = again == AGAIN_ASK ? tail : again == AGAIN_YES ? BEGINS_AGAIN : 0;
	tails.call(skb, again == AGAIN_ASK ? TAIL_AGAIN : tail);
}

static __always_inline bool is_paused(u64 now)
{
	u32 zero = 0;
	u64 *until = paused.lookup(&zero);

	return until && *until > now;
}

/* Chooses a backend for who is not known yet, and describes the flow. False: it comes to nothing,
 * and `action` says what becomes of the packet. */
static __always_inline bool begin(struct __sk_buff *skb, struct packet *p, struct asker *who,
				  struct choice *c, struct nat *nat, int *action)
{
	enum verdict v;

	who->by_packet = true;
	who->key.client = p->tuple.from.address;
	set_hashes(who, &p->tuple);
	v = choose(&p->tuple.to, who, c);
	if (v != TRANSLATE)
		account_begin(c, v);
	if (v == REFUSE) {
		skb->cb[0] = c->reason;
		tails.call(skb, TAIL_REFUSE);
	}
	if (v != TRANSLATE) {
		*action = finish(v == PASS ? TC_NEXT : TC_SHOT, c->reason);
		return false;
	}
	nat->last_used = now_ns();
	if (is_paused(nat->last_used)) {
		*action = finish(TC_SHOT, PAUSED);
		return false;
	}
	nat->client = p->tuple.from;
	nat->frontend = p->tuple.to;
	nat->backend = c->backend;
	nat->client_port = p->tuple.from.port;
	if (nat->client.protocol == PROTO_UDP)
		nat->seen.begun = nat->last_used;
	nat->service = c->service;
	nat->backend_id = c->backend_id;
	return true;
}

/* Whether a flow goes past the stack: those for backends on other nodes, since the stack does not
 * forward what has its own address; those for pods of this node when the operator wants it. */
static __always_inline bool passes_stack(const struct node *n, const struct device *from,
					 const struct device *to, bool masquerade)
{
	return (n->flags & NODE_DIRECT) ||
	       (masquerade && from->role == ROLE_HOST && to->role == ROLE_HOST);
}

/* Where a new flow is described, nothing of it yet: the stack has no room, and other programs go on
 * with it. */
static __always_inline struct nat *blank(void)
{
	u32 zero = 0;
	struct nat *nat = pending.lookup(&zero);

	if (nat)
		__builtin_memset(nat, 0, sizeof(*nat));
	return nat;
}

/* Goes on with what `pending` describes in another program: there is not room for all in one. */
static __always_inline int hand_over(struct __sk_buff *skb, u32 tail)
{
	tails.call(skb, tail);
	return finish(TC_SHOT, NOT_RECORDED);
}

/* Whether it is an address of this node that we know: one that serves NodePorts, or masquerades. */
static __always_inline bool is_nodes_own(struct address *a, const struct node *n)
{
	return node_addresses.lookup(a) || same_address(a, &n->snat4) || same_address(a, &n->snat6);
}

/* Decides by which way the packets of a new flow leave, and which address of the node they get. */
int tc_way(struct __sk_buff *skb)
{
	u32 zero = 0, ifindex = skb->ifindex;
	struct device *device = device_at(ifindex), *to;
	struct node *n = node.lookup(&zero);
	struct nat *nat = pending.lookup(&zero);
	struct target source, backend;
	struct packet p = {};
	struct route route;
	struct address own;

	if (!device || !n || !nat || !parse(skb, device->l2, &p))
		return finish(TC_SHOT, NOT_RECORDED);
	source = nat->client;
	backend = nat->backend;
	if (has_snat(nat))
		source.address = nat->snat;
	to = find_route(skb, &p, &source, &backend, &route, true);
	/* The backend is the node itself: no device translates what it gets, nor what it answers.
	 */
	if (!to && !same_address(&nat->client.address, &nat->backend.address) &&
	    is_nodes_own(&nat->backend.address, n))
		__builtin_memset(&nat->snat, 0, sizeof(nat->snat));
	/* A bridge brings the answers of its pods to each other past us, unless they are for us. */
	if (to && !has_snat(nat) && route.ifindex == ifindex && to->role == ROLE_POD)
		nat->snat = p.v6 ? n->snat6 : n->snat4;
	if (to && has_snat(nat)) {
		own = p.v6 ? to->snat6 : to->snat4;
		if (!is_any(&own))
			nat->snat = own;
	}
	if (to && passes_stack(n, device, to, has_snat(nat))) {
		nat->way = has_snat(nat) ? WAY_PAST : WAY_REDIRECT;
		if (route.length)
			remember_way(&nat->out, &route, nat->last_used);
	}
	tails.call(skb, TAIL_PLACE);
	return finish(TC_SHOT, NOT_RECORDED);
}

/* Whether an entry is missing by which this flow's answers, or its packets in the stack, are found:
 * another flow has it, or it was deleted a moment after another CPU had found it to be over. */
static __always_inline bool lacks_entry(const struct nat *nat)
{
	struct ends key;

	if (has_snat(nat)) {
		key = snat_answer_of(nat);
		if (!entry_of(nat, &key))
			return true;
	}
	if (nat->way == WAY_PAST)
		return false;
	key = answer_of(nat);
	return !entry_of(nat, &key);
}

/* What tc_ingress and tc_host leave open about a packet of a known flow: whether the flow has ended
 * by time, or has to begin again, since its backend is gone or no answer would be found. */
int tc_again(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex, begins = skb->cb[0];
	struct device *device = device_at(ifindex);
	bool came_in = begins == TAIL_NEW;
	struct packet p = {};
	struct nat *nat;

	if (!device || !parse(skb, device->l2, &p) ||
	    !fragment_ports(&p, came_in ? device : NULL, came_in ? ifindex : 0))
		return TC_NEXT;
	nat = flow_between(&p.tuple);
	if (nat && !gone(nat, now_ns()) &&
	    (!starts_flow(&p) || !is_question(&p.tuple, nat) ||
	     (backend_lives(nat->backend_id) && !lacks_entry(nat)))) {
		skb->cb[0] = SERVED;
		tails.call(skb, came_in ? TAIL_INGRESS : TAIL_HOST);
	} else if (starts_flow(&p)) {
		skb->cb[0] = BEGINS_AGAIN;
		tails.call(skb, begins);
	} else {
		return TC_NEXT;
	}
	return finish(TC_SHOT, NOT_RECORDED);
}

/* What begins anew and is for no Service any more: what follows is not for the backend of before.
 */
int tc_forget(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = device_at(ifindex);
	struct packet p = {};
	struct nat *old;

	if (!device || !parse(skb, device->l2, &p))
		return TC_NEXT;
	old = flow_between(&p.tuple);
	if (old && old->part == PART_QUESTION && is_question(&p.tuple, old))
		forget(old);
	return TC_NEXT;
}

/* What begins while another data plane serves is its own, until we are on all devices. A SYN that
 * comes again goes where the first one went, also when we lead by then: two backends that answer
 * one client break its connection. SYNs are known by their numbers, SCTP's INIT by its tag. */
int tc_yield(struct __sk_buff *skb)
{
	u32 zero = 0, ifindex = skb->ifindex, number = 0, *known, how = skb->cb[0];
	struct device *device = device_at(ifindex);
	struct node *n = node.lookup(&zero);
	struct packet p = {};
	struct asker who = {};
	struct place place;
	bool theirs;

	if (!device || !n || !parse(skb, device->l2, &p))
		return TC_NEXT;
	theirs = n->flags & NODE_YIELDS;
	if (p.protocol != PROTO_UDP) {
		bpf_skb_load_bytes(skb, p.l4 + (p.protocol == PROTO_SCTP ? SCTP_CHUNK + 4 : 4),
				   &number, sizeof(number));
		set_hashes(&who, &p.tuple);
		place.sharer = sharer_of_packet(device, ifindex, &p.tuple.from.address);
		place.number = who.flow_hash % YIELDED_PLACES;
		known = yielded.lookup(&place);
		if (theirs)
			yielded.update(&place, &number);
		else
			theirs = known && *known == number;
	}
	if (theirs && (how & BEGINS_AGAIN))
		tails.call(skb, TAIL_FORGET);
	if (theirs)
		return TC_NEXT;
	skb->cb[0] = how | BEGINS_OURS;
	tails.call(skb, TAIL_NEW);
	return finish(TC_SHOT, NOT_RECORDED);
}

/* Chooses a backend for who is not known yet. */
int tc_new(struct __sk_buff *skb)
{
	u32 zero = 0, ifindex = skb->ifindex;
	struct device *device = device_at(ifindex);
	struct node *n = node.lookup(&zero);
	struct asker who = {};
	struct packet p = {};
	struct choice c = {};
	struct nat *nat = blank();
	int action;
	u32 how;

	if (!device || !n || !nat || !parse(skb, device->l2, &p))
		return TC_NEXT;
	if (is_martian(&p.tuple.from.address) || is_nodes_own(&p.tuple.from.address, n))
		return TC_NEXT; /* the stack drops it; past the stack it must not go, either */
	how = skb->cb[0];
	if ((n->flags & (NODE_YIELDS | NODE_FOLLOWS)) && !(how & BEGINS_OURS))
		tails.call(skb, TAIL_YIELD);
	who.outside = !(device->flags & DEVICE_LOCAL);
	if (!begin(skb, &p, &who, &c, nat, &action)) {
		if ((how & BEGINS_AGAIN) && action == TC_NEXT)
			tails.call(skb, TAIL_FORGET);
		return action;
	}
	if (masquerades(&c, n, device, &nat->client.address)) {
		nat->snat = p.v6 ? n->snat6 : n->snat4;
		if (is_any(&nat->snat)) /* the device may have one; tc_claim takes no other */
			nat->snat.word[3] = NO_ADDRESS;
	}
	return hand_over(
		skb, has_snat(nat) || (n->flags & NODE_DIRECT) ||
				     (device->role == ROLE_POD && !(device->flags & DEVICE_PEER))
			     ? TAIL_WAY
			     : TAIL_PLACE);
}

/* The same for this node's own, by a socket that the hooks have left alone. What it sends leaves by
 * the device to the backend; the answers come in by the device that it sends by, where they are
 * expected. It needs no other source: it has the node's. */
int tc_host_new(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = device_at(ifindex);
	struct asker who = {};
	struct packet p = {};
	struct choice c = {};
	struct nat *nat = blank();
	int action;

	if (!device || !nat || !parse(skb, device->l2, &p))
		return TC_NEXT;
	if (!begin(skb, &p, &who, &c, nat, &action))
		return action;
	nat->way = WAY_REDIRECT;
	nat->device = ifindex;
	return hand_over(skb, TAIL_PLACE);
}

/* The flow is there: goes back to where known flows are served. */
static __always_inline int serve(struct __sk_buff *skb, const struct nat *nat)
{
	count(NEW_FLOW);
	account_flow(nat);
	skb->cb[0] = SERVED;
	tails.call(skb, nat->device ? TAIL_HOST : TAIL_INGRESS);
	return finish(TC_SHOT, NOT_REWRITTEN);
}

/* Has the entries of a new flow written. */
static __always_inline int write(struct __sk_buff *skb, const struct nat *nat)
{
	skb->cb[0] = 0;
	tails.call(skb, nat->way == WAY_PAST ? TAIL_SNAT : TAIL_CLAIM);
	return finish(TC_SHOT, NOT_RECORDED);
}

/* Whether a client that uses its port again has got the same backend again. */
static __always_inline bool is_like(const struct nat *old, const struct nat *nat)
{
	return old->part == PART_QUESTION && old->way == nat->way && old->device == nat->device &&
	       same_target(&old->client, &nat->client) &&
	       same_target(&old->frontend, &nat->frontend) &&
	       same_target(&old->backend, &nat->backend) && same_address(&old->snat, &nat->snat);
}

static __always_inline void begin_again(struct nat *old, const struct nat *nat)
{
	old->last_used = nat->last_used;
	old->service = nat->service;
	old->backend_id = nat->backend_id;
	old->seen.begun = nat->seen.begun;
	old->fins = 0;
	old->state = STATE_NEW;
}

/* A connection like one that both sides have closed: its entries begin again as they are, and the
 * backend sees the ports that it would see without us. Not if it has closed first, and so keeps
 * them in TIME_WAIT: behind one client's address may be many, each with a clock of its own. */
static __always_inline bool revive(struct nat *old, const struct nat *nat, const struct node *n)
{
	struct nat *answer = NULL, *snat_answer = NULL;
	u16 port = __builtin_bswap16(old->snat_port);
	struct ends key;

	if (!is_like(old, nat) || !both_closed(old) || (old->fins & FIN_BACKEND_FIRST))
		return false;
	if (has_snat(old) && (port < n->port_low || port > n->port_high))
		return false; /* the range was another one */
	if (n->flags & NODE_FOLLOWS)
		return false; /* the port of client' has to be another one: claim_answer() */
	if (old->way != WAY_PAST) {
		key = answer_of(old);
		answer = entry_of(old, &key);
		if (!answer)
			return false;
	}
	if (has_snat(old)) {
		key = snat_answer_of(old);
		snat_answer = entry_of(old, &key);
		if (!snat_answer)
			return false;
		begin_again(snat_answer, nat);
	}
	if (answer)
		begin_again(answer, nat);
	hand_on_way(&old->out, &nat->out);
	begin_again(old, nat);
	return true;
}

/* Finds a place among the tracked flows for a new one. */
int tc_place(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct nat *nat = pending.lookup(&zero);
	struct node *n = node.lookup(&zero);
	u64 *there = tracked.lookup(&zero);
	enum reason reason;
	struct ends key;
	struct nat *old;

	if (!nat || !n || !there)
		return finish(TC_SHOT, NOT_RECORDED);
	key = question_of(nat);
	old = flows.lookup(&key);
	if (old && revive(old, nat, n))
		return serve(skb, nat);
	reason = claim_question(&key, old, nat, n);
	if (reason != NEW_FLOW)
		return finish(TC_SHOT, reason);
	skb->cb[0] = 2;
	if (*there > n->connections)
		tails.call(skb, TAIL_ROOM);
	return write(skb, nat);
}

/* Makes room by up to two flows for each that begins beyond what the operator allows. */
int tc_room(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct nat *nat = pending.lookup(&zero);
	struct node *n = node.lookup(&zero);
	u64 *there = tracked.lookup(&zero);

	if (!nat || !n || !there)
		return finish(TC_SHOT, NOT_RECORDED);
	make_room(there, nat->last_used);
	if (--skb->cb[0] && *there > n->connections)
		tails.call(skb, TAIL_ROOM);
	return write(skb, nat);
}

/* Writes the entry of the client's own packets, the last one. */
static __always_inline int publish(struct __sk_buff *skb, struct nat *nat)
{
	struct ends key = question_of(nat);

	nat->part = PART_QUESTION;
	if (flows.update(&key, nat)) {
		forget_answers(nat);
		return finish(TC_SHOT, NOT_RECORDED);
	}
	return serve(skb, nat);
}

/* Writes a new flow's entry for its packets in the stack, and its answers. The port of client'
 * comes before that of snat, whose entry tells it. */
int tc_claim(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct node *n = node.lookup(&zero);
	struct nat *found = pending.lookup(&zero), nat;
	long error;

	if (!n || !found)
		return finish(TC_SHOT, NOT_RECORDED);
	nat = *found;
	nat.part = PART_ANSWER;
	nat.out.ifindex = 0; /* that of the client's packets */
	error = claim_answer(&nat, n, nat.last_used);
	if (error)
		return finish(TC_SHOT, error == -EEXIST ? NO_SNAT_PORT : NOT_RECORDED);
	if (has_snat(&nat)) {
		found->client_port = nat.client_port;
		tails.call(skb, TAIL_SNAT);
		return finish(TC_SHOT, NOT_RECORDED);
	}
	nat.out.ifindex = found->out.ifindex;
	return publish(skb, &nat);
}

/* Tells the entry of client' the port of snat where it lies: nobody sees it before the client's own
 * entry is there. False: it is another flow's by now. */
static __always_inline bool tell_port(const struct nat *nat)
{
	struct ends key = answer_of(nat);
	struct nat *answer = flows.lookup(&key);

	if (!answer || !same_target(&answer->client, &nat->client) ||
	    !same_target(&answer->frontend, &nat->frontend))
		return false;
	answer->snat_port = nat->snat_port;
	return true;
}

/* A new flow that gets no port of the node, or cannot keep it. */
static __always_inline int give_up(const struct nat *nat, enum reason reason)
{
	struct ends key = answer_of(nat);

	forget_answers(nat);
	if (nat->way != WAY_PAST && tell_port(nat)) /* it had no port yet */
		flows.delete(&key);
	return finish(TC_SHOT, reason);
}

/* Why the last port of a search could not be had: another flow has it, or the map took no entry. */
static __always_inline enum reason no_port_reason(const struct nat *nat)
{
	struct ends key = snat_answer_of(nat);

	return flows.lookup(&key) ? NO_SNAT_PORT : NOT_RECORDED;
}

/* Writes a new flow's entry for answers to the node: its port is searched for (cb[0]) at random, in
 * a row, and by tc_scan among all that its client may have. */
int tc_snat(struct __sk_buff *skb)
{
	u32 zero = 0, search = skb->cb[0];
	struct node *n = node.lookup(&zero);
	struct nat *found = pending.lookup(&zero), nat;

	if (!n || !found)
		return finish(TC_SHOT, NOT_RECORDED);
	nat = *found;
	nat.part = PART_SNAT_ANSWER;
	nat.out.ifindex = 0;
	if (!search)
		nat.snat_port = nat.client_port;
	if (is_loopback(&nat.snat)) /* NO_ADDRESS still */
		return give_up(&nat, NO_SNAT_PORT);
	if (!claim_snat(&nat, n, search)) {
		if (search == SEARCH_LAST)
			return give_up(&nat, no_port_reason(&nat));
		found->snat_port = nat.snat_port;
		skb->cb[0] = search == SEARCH_ANY ? SEARCH_ROW : search;
		tails.call(skb, search == SEARCH_ANY ? TAIL_SNAT : TAIL_SCAN);
		return give_up(&nat, NO_SNAT_PORT);
	}
	if (nat.way != WAY_PAST && !tell_port(&nat))
		return give_up(&nat, NOT_RECORDED);
	nat.out.ifindex = found->out.ifindex;
	return publish(skb, &nat);
}

/* When a search for this backend found no port last. */
static __always_inline u64 *searched_at(const struct target *backend)
{
	u32 index = (backend->address.word[3] ^ backend->address.word[3] >> 16 ^ backend->port) %
		    PORT_SLOTS;
	struct port_slot *slot = port_slots.lookup(&index);

	return slot ? &slot->searched : NULL;
}

/* Goes on with the search for a port, from the one in `pending`. */
static __always_inline int search_on(struct __sk_buff *skb, enum search search, u32 tail)
{
	skb->cb[0] = search;
	tails.call(skb, tail);
	return finish(TC_SHOT, NO_SNAT_PORT);
}

/* Seconds without a packet after which gives_port() says yes in SEARCH_FOUND, a byte for each
 * state: the verifier walks on from each branch, and there are SCAN_PORTS times as many. */
#define GIVES_AFTER                                                                                \
	(1ULL << 8 * STATE_NEW | (u64)CLOSING_SECONDS << 8 * STATE_CLOSING |                       \
	 0ULL << 8 * STATE_CLOSED | 1ULL << 8 * STATE_ANSWERED |                                   \
	 (u64)UNPROVEN_SECONDS << 8 * STATE_UNPROVEN)

/* What is the same for all ports that are looked at. Masks are 0 or all ones: instead of branches,
 * from each of which the verifier walks on by itself. */
struct scan {
	struct target node;
	struct target backend;
	u32 first;       /* the node is the first end of the key */
	u32 first_same;  /* the same where both ports are the same */
	u32 by_port;     /* ports tell which of them is first, before the rest of the addresses */
	u64 established; /* ns without a packet after which such a flow is over */
	u64 now;
};

static __always_inline u32 mask_of(u32 bit)
{
	return 0U - (bit & 1);
}

/* What was written to the packet's context is any number to the verifier: see forget_the_way(). */
static __always_inline void begin_scan(struct __sk_buff *skb, struct scan *scan,
				       const struct nat *nat)
{
	struct nat likewise = {.state = STATE_ESTABLISHED};

	scan->node = nat->client;
	scan->node.address = nat->snat;
	scan->backend = nat->backend;
	skb->cb[2] = goes_first(&scan->node, &scan->backend);
	scan->node.port = scan->backend.port;
	skb->cb[3] = goes_first(&scan->node, &scan->backend);
	likewise.client.protocol = nat->client.protocol;
	skb->cb[4] = timeout_of(&likewise) / SECOND;
	asm volatile("" ::: "memory");
	scan->first = mask_of(skb->cb[2]);
	scan->first_same = mask_of(skb->cb[3]);
	scan->established = skb->cb[4] * SECOND;
	skb->cb[2] = scan->node.address.word[3] == scan->backend.address.word[3];
	asm volatile("" ::: "memory");
	scan->by_port = mask_of(skb->cb[2]);
	scan->now = nat->last_used + TICK; /* what has just been closed counts */
}

static __always_inline u32 pick(u32 mask, u32 one, u32 other)
{
	return other ^ ((one ^ other) & mask);
}

/* The entry at this port; ends_of() without branches. */
static __always_inline struct nat *entry_at(const struct scan *scan, __be16 port)
{
	u32 to = scan->backend.port, less = mask_of(((u32)port - to) >> 31);
	u32 same = mask_of((((u32)port ^ to) - 1) >> 31), first;
	const u32 *node = (const u32 *)&scan->node.address, *backend = scan->backend.address.word;
	struct ends key = {.first = scan->backend, .second = scan->backend};

	first = pick(scan->by_port, pick(same, scan->first_same, less), scan->first);
	for (int i = 0; i < 4; i++) {
		key.first.address.word[i] = pick(first, node[i], backend[i]);
		key.second.address.word[i] = pick(first, backend[i], node[i]);
	}
	key.first.port = pick(first, port, to);
	key.second.port = pick(first, to, port);
	return flows.lookup(&key);
}

static __always_inline bool seems_given(const struct nat *entry, const struct scan *scan)
{
	u64 after = (GIVES_AFTER >> (entry->state & 7) * 8 & 0xff) * SECOND;
	u64 lives = (u32)(entry->state ^ STATE_ESTABLISHED) - 1ULL; /* all ones, or small */

	after |= scan->established & 0 - (lives >> 63);
	return entry->last_used + after <= scan->now;
}

/* Looks for a port that is free, or whose flow gives it up, among the next SCAN_PORTS of those that
 * the client may have; and so on until all were looked at (cb[1]: in so many runs, SCANS at most).
 * Where all are in use that takes half a millisecond: then it is not done again for this backend
 * for SCAN_PAUSE. */
int tc_scan(struct __sk_buff *skb)
{
	u32 zero = 0, at, left = skb->cb[1];
	struct nat *found = pending.lookup(&zero), *entry = NULL;
	struct node *n = node.lookup(&zero);
	struct scan scan;
	struct share s;
	u64 *searched;
	int i;

	if (!n || !found)
		return finish(TC_SHOT, NOT_RECORDED);
	searched = searched_at(&found->backend);
	if (!searched)
		return finish(TC_SHOT, NOT_RECORDED);
	s = share_of(found, n);
	if (skb->cb[0] == SEARCH_ROW) /* it begins */
		left = elapsed(*searched, found->last_used) < SCAN_PAUSE
			       ? 0
			       : (s.count + SCAN_PORTS - 1) / SCAN_PORTS;
	if (left > SCANS)
		left = SCANS;
	if (!left)
		return search_on(skb, SEARCH_LAST, TAIL_SNAT);
	at = place_of(&s, found->snat_port);
	begin_scan(skb, &scan, found);
	for (i = 0; i < SCAN_PORTS; i++) {
		entry = entry_at(&scan, port_at(&s, at));
		if (!entry || seems_given(entry, &scan))
			break;
		at = (at + 1) % s.count;
	}
	found->snat_port = port_at(&s, at);
	skb->cb[1] = left - 1;
	if (i < SCAN_PORTS)
		return search_on(skb, SEARCH_FOUND, TAIL_SNAT);
	if (left == 1)
		*searched = found->last_used;
	return search_on(skb, SEARCH_FOUND, TAIL_SCAN);
}

/* A packet of a flow that goes past the stack has to go up: too long for its way, or an ICMP error.
 * Writes the entry that such packets find when they leave, and goes back to where they are served.
 */
int tc_late(struct __sk_buff *skb)
{
	u32 zero = 0, back = skb->cb[0];
	struct node *n = node.lookup(&zero);
	struct nat *found = pending.lookup(&zero), *entry, nat;
	struct ends key;
	long error;

	if (!n || !found)
		return finish(TC_SHOT, NOT_RECORDED);
	skb->cb[0] = HEARD;
	nat = *found;
	nat.part = PART_ANSWER;
	nat.way = WAY_REDIRECT;
	nat.out.ifindex = 0;
	if (nat.client.protocol == PROTO_TCP)
		nat.seen.begun = 0; /* another entry's numbers */
	error = claim_answer(&nat, n, now_ns());
	if (error)
		return finish(TC_SHOT, error == -EEXIST ? NO_SNAT_PORT : NOT_RECORDED);
	key = question_of(&nat);
	entry = entry_of(found, &key);
	if (!entry) { /* another CPU has done it, with another port of client' */
		key = answer_of(&nat);
		leave(&key, &nat);
		tails.call(skb, back);
		return finish(TC_SHOT, NOT_REWRITTEN);
	}
	entry->client_port = nat.client_port;
	entry->way = WAY_REDIRECT;
	key = snat_answer_of(&nat);
	entry = entry_of(found, &key);
	if (entry) {
		entry->client_port = nat.client_port;
		entry->way = WAY_REDIRECT;
	}
	tails.call(skb, back);
	return finish(TC_SHOT, NOT_REWRITTEN);
}

/* Known flows of this node's own. */
int tc_host(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = device_at(ifindex), *to;
	struct packet p = {};
	struct route route;
	struct tuple out;
	struct nat *nat;
	u64 now = now_ns();
	u8 again = AGAIN_YES;

	if (!device || !parse(skb, device->l2, &p) || !fragment_ports(&p, NULL, 0))
		return TC_NEXT;
	nat = flow_between(&p.tuple);
	if (nat && nat->device && is_question(&p.tuple, nat) && !gone(nat, now))
		again = begins_anew(nat, p.tcp_flags | just_made(skb), now);
	if (again) {
		if (starts_flow(&p))
			begin_or_ask(skb, again, TAIL_HOST_NEW);
		return TC_NEXT;
	}
	keep(nat, &p, p.tcp_flags, false, now);
	account_bytes(nat, skb->len - p.l3, p.tcp_flags, false);
	out.from = nat->client;
	out.from.port = nat->client_port;
	out.to = nat->backend;
	to = flow_route(skb, &p, &out, &nat->out, &route, now);
	if (!to)
		return finish(TC_SHOT, NO_ROUTE);
	if (rewrite(skb, &p, &out, p.ttl))
		return finish(TC_SHOT, NOT_REWRITTEN);
	return complete(skb, &p, &out, send_off(skb, device, to, &route), ETH_HEADER);
}

/* Sends the answer back by the device that the question came in by; to this node's own, in. */
int tc_refuse(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex, why = skb->cb[0];
	struct device *device = device_at(ifindex);
	struct packet p = {};

	if (!device || !parse(skb, device->l2, &p) || !can_refuse(skb, &p))
		return finish(TC_SHOT, why);
	if (!may_refuse(&p, now_ns()))
		return finish(TC_SHOT, RATE_LIMITED);
	if (drop_priority_tag(skb) ||
	    (p.protocol == PROTO_TCP ? refuse_tcp(skb, &p) : refuse_with_icmp(skb, &p)) ||
	    swap_link(skb, device->l2))
		return finish(TC_SHOT, NOT_REWRITTEN);
	return finish(bpf_redirect(ifindex, skb->ingress_ifindex ? 0 : BPF_F_INGRESS), why);
}

/* ---- every packet -------------------------------------------------------------------------- */

/* An answer to this node's own: it comes in by the device that the question left by. */
static __always_inline int deliver(struct __sk_buff *skb, const struct device *from, u32 ifindex)
{
	struct device *to = device_at(ifindex);

	if (ifindex == skb->ifindex || !to || to->l2 != from->l2)
		return TC_NEXT;
	if (drop_priority_tag(skb) ||
	    (to->l2 && bpf_skb_store_bytes(skb, 0, to->mac, sizeof(to->mac), 0)))
		return finish(TC_SHOT, NOT_REWRITTEN);
	return finish(bpf_redirect(ifindex, BPF_F_INGRESS), REDIRECTED);
}

/* Has the entry written that a packet needs in the stack, and comes again. */
static __always_inline int prepare_stack(struct __sk_buff *skb, const struct nat *nat, u32 again)
{
	u32 zero = 0;

	skb->cb[0] = again;
	pending.update(&zero, (struct nat *)nat);
	return hand_over(skb, TAIL_LATE);
}

static __always_inline int go_on(struct __sk_buff *skb, struct packet *p,
				 const struct device *device, struct step *s)
{
	struct tuple *new = &s->up;
	struct device *to = NULL;
	struct route route;
	int action = TC_NEXT;

	if (s->way != WAY_STACK && !s->device)
		to = flow_route(skb, p, &s->out, &s->nat->out, &route, s->now);
	if (!to && s->way == WAY_PAST)
		return prepare_stack(skb, s->nat, TAIL_INGRESS);
	if (to)
		new = &s->out;
	account_bytes(s->nat, skb->len - p->l3, p->tcp_flags, s->back);
	if (rewrite(skb, p, new, to ? p->ttl - 1 : p->ttl)) /* forwarding's only other duty */
		return finish(TC_SHOT, NOT_REWRITTEN);
	if (to)
		action = send_off(skb, device, to, &route);
	else if (s->device)
		action = deliver(skb, device, s->device);
	else if (s->masqueraded)
		mark_masqueraded(skb, true);
	return complete(skb, p, new, action, to ? ETH_HEADER : device->l2);
}

/* Frames of a VLAN come again by its own device; frames for another machine, which a promiscuous
 * device shows, the stack would drop. */
static __always_inline bool is_for_others(struct __sk_buff *skb)
{
	return (skb->vlan_present && (skb->vlan_tci & VLAN_ID)) || skb->pkt_type == OTHER_HOST;
}

/* What both directions begin with. False: not for us. */
static __always_inline bool take(struct __sk_buff *skb, const struct device *device,
				 struct packet *p, u32 icmp)
{
	const struct device *in = device;
	u32 ifindex = skb->ifindex;

	if (!device || is_for_others(skb))
		return false;
	if (!tracks_flows() && goes_on_v4(skb, device->l2))
		return false; /* most packets, where nobody from outside is served */
	if (!parse(skb, device->l2, p))
		return false;
	if (is_icmp_error(p)) {
		tails.call(skb, icmp);
		return false;
	}
	if (!p->tuple.to.protocol && p->fragment != LATER)
		return false;
	if (icmp == TAIL_ICMP_OUT && p->fragment != WHOLE) {
		ifindex = skb->ingress_ifindex;
		in = device_at(ifindex);
	}
	return fragment_ports(p, in, ifindex);
}

/* Whether a packet of no flow goes to tc_new. Beside another data plane all do that begin
 * something: the other one may know a Service that we do not know yet, see tc_yield(). */
static __always_inline bool may_begin(const struct target *to)
{
	u32 zero = 0;
	struct node *n;

	if (may_be_service(to))
		return true;
	n = node.lookup(&zero);
	return n && (n->flags & (NODE_YIELDS | NODE_FOLLOWS));
}

int tc_ingress(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = device_at(ifindex);
	struct packet p = {};
	struct step s = {};

	if (!take(skb, device, &p, TAIL_ICMP_IN))
		return TC_NEXT;
	if (translate_in(&p.tuple, &p, p.tcp_flags | just_made(skb), &s))
		return go_on(skb, &p, device, &s);
	if (s.masqueraded)
		mark_masqueraded(skb, true);
	if (s.anew == AGAIN_ASK || (starts_flow(&p) && (s.anew || may_begin(&p.tuple.to))))
		begin_or_ask(skb, s.anew, TAIL_NEW);
	else if (starts_flow(&p))
		count(NOT_A_SERVICE);
	return TC_NEXT;
}

/* Whether a packet of the node's own is for a Service. NodePorts are its own addresses: what goes
 * there leaves by no device. */
static __always_inline bool dials_service(struct __sk_buff *skb, struct packet *p)
{
	struct service *service;

	if (!may_be_service(&p->tuple.to))
		return false;
	service = service_at(&p->tuple.to);
	if (service)
		return (service->flags & SERVICE_CLUSTER_IP) ||
		       !is_agents(bpf_get_socket_cookie(skb));
	return cluster_ips.lookup(&p->tuple.to.address);
}

/* Whether the agent begins a connection here that no Service is to have (is_agents()), from a port
 * that another socket of the node has used through one. */
static __always_inline bool keeps_agent_out(struct __sk_buff *skb, struct packet *p)
{
	struct service *service;

	if (p->protocol != PROTO_TCP || !starts_flow(p) || !is_agents(bpf_get_socket_cookie(skb)))
		return false;
	service = service_at(&p->tuple.to);
	return !service || !(service->flags & SERVICE_CLUSTER_IP);
}

int tc_egress(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = device_at(ifindex);
	struct packet p = {};
	bool masqueraded = false;
	enum leaving leaving;
	struct tuple to;

	if (!take(skb, device, &p, TAIL_ICMP_OUT))
		return TC_NEXT;
	leaving = translate_out(&p.tuple, &p, p.tcp_flags, skb->len - p.l3, &to, &masqueraded);
	if (leaving == LEAVES_CHANGED && rewrite(skb, &p, &to, p.ttl))
		return finish(TC_SHOT, NOT_REWRITTEN);
	if (masqueraded)
		mark_masqueraded(skb, false);
	if (leaving == LEAVES_CHANGED)
		return complete(skb, &p, &to, TC_NEXT, device->l2);
	if (skb->ingress_ifindex || device->role != ROLE_HOST)
		return TC_NEXT;
	if (leaving == LEAVES_FOR_SERVICE && keeps_agent_out(skb, &p)) {
		tails.call(skb, TAIL_FORGET); /* what follows is not for that flow, either */
		return TC_NEXT;
	}
	if (leaving == LEAVES_FOR_SERVICE ||
	    (leaving == LEAVES_AS_IT_IS && starts_flow(&p) && dials_service(skb, &p)))
		tails.call(skb, TAIL_HOST);
	return TC_NEXT;
}

/* SCTP's checksum, after its ports were changed. */
int tc_sctp(struct __sk_buff *skb)
{
	u32 change = skb->cb[0], action = skb->cb[1], l3 = skb->cb[2];
	struct packet p = {};

	if (!parse(skb, l3, &p) || change_sctp_check(skb, &p, change))
		return finish(TC_SHOT, NOT_REWRITTEN);
	return action;
}

/* ---- ICMP errors --------------------------------------------------------------------------- */

/* Outer addresses that are an end of the flow follow it; a router's own address stays. */
static __always_inline int translate_error(struct __sk_buff *skb, bool in)
{
	u32 ifindex = skb->ifindex;
	struct device *device = device_at(ifindex);
	struct packet p = {}, carried = {};
	struct tuple with, becomes, outer;
	struct step s = {};
	bool known;

	if (!device || !parse(skb, device->l2, &p) || !parse_carried(skb, &p, &carried) ||
	    !carried.tuple.to.protocol)
		return TC_NEXT;
	with = reversed(&carried.tuple);
	known = in ? translate_in(&with, &carried, NO_SEGMENT, &s)
		   : translate_out(&with, &carried, NO_SEGMENT, 0, &becomes, &s.masqueraded) ==
				LEAVES_CHANGED;
	if (s.masqueraded)
		mark_masqueraded(skb, in);
	if (!known)
		return TC_NEXT;
	if (in && s.way == WAY_PAST)
		return prepare_stack(skb, s.nat, TAIL_ICMP_IN);
	if (in)
		becomes = s.up;
	outer = p.tuple;
	if (same_address(&outer.from.address, &with.from.address))
		outer.from.address = becomes.from.address;
	if (same_address(&outer.to.address, &with.to.address))
		outer.to.address = becomes.to.address;
	becomes = reversed(&becomes);
	if (rewrite_carried(skb, &p, &carried, &becomes) || rewrite(skb, &p, &outer, p.ttl))
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
