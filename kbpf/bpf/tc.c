/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The packet path: translates Service addresses in packets from outside the node, and from sockets
 * of the node and its pods that the socket hooks do not serve.
 *
 * `tc_ingress` and `tc_egress` run on every host and pod device (device_roles.py); track.h says
 * what each of them changes. Rare or long work is done by separate programs, reached by tail calls:
 * new flows, ICMP errors, refusals. README.md shows the path of a packet through them.
 */
#include "types.h"
#include "lib/compat.h"
#include "lib/addr.h"
#include "maps.h"

static __always_inline u32 socket_cgroup(void)
{
	return 0; /* affinity uses the address of a packet's sender */
}

#include "lookup.h"
#include "lib/packet.h"
#include "scratch.h"
#include "account.h"
#include "account_flows.h"
#include "lib/hash.h"
#include "lib/sctp.h"
#include "lib/rewrite.h"
#include "lib/icmp.h"
#include "refuse.h"
#include "track.h"

#define TC_ACT_UNSPEC (-1) /* pass, and let the next program on this device run */
#define TC_ACT_SHOT 2
#define REPLY_PORT_TRIES 8  /* tries to find a free port of client' */
#define EVICT_CANDIDATES 16 /* oldest flows that one run of tc_evict checks */
#define EVICTION_TRIES 8    /* flows that are checked when the queue is full */
#define FRESH_TRIES 8       /* of SNAT_TRIES, before ports in TIME_WAIT at a backend are used */
#define SCAN_PORTS 640      /* ports that one run of tc_scan_ports checks */
#define MAX_SCANS 18        /* such runs: the kernel limits a packet to 33 tail calls */
#define CLOCK_SKEW (SECOND / 50) /* the coarse clocks of two CPUs may differ this much */
#define SCAN_PAUSE (SECOND / 10) /* no such scan for a backend right after one has failed */

#define VLAN_VID_MASK 0x0fff
#define PACKET_OTHERHOST 3

#define JUST_WRITTEN 0x200 /* not a TCP flag: the flow has just been written or rechecked */

#define ADDRESS_NOT_CHOSEN __builtin_bswap32(1) /* ::1: a source is needed, but not known yet */

enum tail {
	TAIL_CHOOSE = 0,
	TAIL_ICMP_IN = 1,
	TAIL_ICMP_OUT = 2,
	TAIL_REFUSE = 3,
	TAIL_HOST = 4,
	TAIL_HOST_CHOOSE = 5,
	TAIL_INGRESS = 6,
	TAIL_ROUTE = 7,
	TAIL_CLAIM = 8,
	TAIL_SCTP = 9,
	TAIL_ENQUEUE = 10,
	TAIL_EVICT = 11,
	TAIL_DELETE_FLOW = 12,
	TAIL_COEXIST = 13,
	TAIL_RECHECK = 14,
	TAIL_SCAN_PORTS = 15,
	TAILS = 16,
};

BPF_F_TABLE("hash", u32, struct device, devices, 64, BPF_F_NO_PREALLOC);
BPF_TABLE("array", u32, struct cached_device, device_cache, CACHED_DEVICES);
BPF_TABLE("array", u32, struct node, node, 1);
BPF_F_TABLE("lpm_trie", struct network_key, u32, local_networks, 64, BPF_F_NO_PREALLOC);
BPF_TABLE("array", u32, struct port_slot, port_slots, PORT_SLOTS);
BPF_TABLE("prog", u32, u32, tails, TAILS);

/* client slot -> the ports of a datagram, for its later fragments. Full: the oldest is evicted, and
 * the remaining fragments of its datagram pass untranslated. */
BPF_TABLE("lru_hash", struct client_slot, struct first_fragment, fragments, 64);

/* client slot -> the number that identifies a SYN that another data plane got while we were
 * passive. Full: the oldest is evicted, and a retransmission of its SYN begins a flow of ours. */
BPF_TABLE("lru_hash", struct client_slot, u32, foreign_flows, 64);

/* 0 -> until when no flow may begin (ns, CLOCK_MONOTONIC). Devices switch to new programs one after
 * the other. If the new programs use other flow maps, a flow that begins in between would be known
 * on only one of its two devices. So the packets that would begin one are dropped; a SYN is
 * retransmitted after a second. A point in time expires even if the agent dies. All versions of
 * kbpf share this map, so its layout must never change. */
BPF_TABLE("array", u32, u64, new_flows_paused_until, 1);

/* What the agent knows about a device. Each packet needs up to two devices, and an array lookup
 * takes a tenth of the time of a hash lookup. The agent sets `ifindex` to 0 while it changes an
 * element in place (node_maps.py); the hash map then has the device. */
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

/* Counts the reason, and returns the action. */
static __always_inline int finish(int action, enum reason reason)
{
	count(reason);
	return action;
}

/* Continues in another program. Returns only if that is missing, or if the packet has made as many
 * tail calls as the kernel allows. */
static __always_inline int go(struct __sk_buff *skb, u32 tail)
{
	tails.call(skb, tail);
	return finish(TC_ACT_SHOT, NOT_TRACKED);
}

/* Ends the handling of a rewritten packet with this action. If SCTP ports have changed, tc_sctp
 * updates the checksum first, in a separate program, since that takes thousands of instructions.
 * A bpf_redirect*() before the tail call still takes effect. */
static __always_inline int finish_rewrite(struct __sk_buff *skb, struct scratch *s,
					  const struct tuple *new, int action, u32 l3)
{
	s->change = sctp_change(&s->packet, new);
	if (!s->change)
		return action;
	s->action = action;
	s->packet.l4 += l3 - s->packet.l3;
	s->packet.l3 = l3;
	return go(skb, TAIL_SCTP);
}

/* The client whose slots a packet may fill. `in`: the device it arrived on, or NULL for the node's
 * own packets. A pod with its own device: that device, whatever source address the pod uses. Other
 * pods: the address, since the pods of a node may share one network. Other machines: the IPv4
 * address or the IPv6 /64 network. */
static __always_inline struct address owner_of_packet(const struct device *in, u32 ifindex,
						      const struct address *from)
{
	if (in && (in->flags & DEVICE_PEER))
		return (struct address){.word = {ifindex, 0, 0, ~0U}};
	if (in && in->role == ROLE_POD)
		return *from;
	return network_of(from);
}

/* Hashes what distinguishes datagrams with the same id: the addresses, and the protocol in IPv4. In
 * IPv6 the protocol may follow destination options, which only the first fragment has (RFC 8200,
 * 4.5). hash_word() makes the order of the words count. */
static __always_inline u32 hash_of_fragments(const struct packet *p)
{
	const struct address *from = &p->tuple.from.address, *to = &p->tuple.to.address;
	u32 hash = HASH_SEED ^ (p->v6 ? IPPROTO_FRAGMENT : p->protocol);

	hash = hash_word(hash, from->word[2]);
	hash = hash_word(hash, from->word[3]);
	hash = hash_word(hash, to->word[0] ^ to->word[1]);
	hash = hash_word(hash, to->word[2]);
	hash = hash_word(hash, to->word[3]);
	return hash_end(hash, 24);
}

/* Stores protocol and ports of a first fragment, and gives them to later ones, which have none.
 * False: the first fragment is not known. Datagrams with consecutive ids use different slots. */
static __always_inline bool fragment_ports(struct packet *p, const struct device *in, u32 ifindex)
{
	u32 id = __builtin_bswap32(p->id); /* of IPv4: in the upper half */
	struct first_fragment fragment = {.id = p->id}, *stored;
	struct client_slot slot;

	if (p->fragment == WHOLE)
		return true;
	fragment.hash = hash_of_fragments(p);
	slot.owner = owner_of_packet(in, ifindex, &p->tuple.from.address);
	slot.number = (id + (id >> 16) + fragment.hash) % FRAGMENTS_PER_CLIENT;
	if (p->fragment == FIRST) {
		fragment.ports.source = p->tuple.from.port;
		fragment.ports.destination = p->tuple.to.port;
		fragment.protocol = p->protocol;
		fragments.update(&slot, &fragment);
		return true;
	}
	stored = fragments.lookup(&slot);
	if (!stored || stored->id != fragment.id || stored->hash != fragment.hash)
		return false;
	p->protocol = stored->protocol;
	p->tuple.from.protocol = p->tuple.to.protocol = p->protocol;
	p->tuple.from.port = stored->ports.source;
	p->tuple.to.port = stored->ports.destination;
	return true;
}

static __always_inline bool backend_exists(u32 id)
{
	return backends.lookup(&id) != NULL;
}

static __always_inline bool same_flow(const struct flow *a, const struct flow *b)
{
	return same_target(&a->frontend, &b->frontend) && same_target(&a->client, &b->client) &&
	       same_target(&a->backend, &b->backend) && a->client_port == b->client_port &&
	       a->snat_port == b->snat_port;
}

/* The entry at this key, if it still belongs to this flow. */
static __always_inline struct flow *entry_of(const struct flow *flow, struct flow_key *key)
{
	struct flow *entry = flows.lookup(key);

	return entry && same_flow(entry, flow) ? entry : NULL;
}

static __always_inline bool is_live(const struct flow *entry, u64 now)
{
	return entry && !expired(entry, now);
}

/* Whether all entries of a flow have expired. If only one side sends, as in one-way UDP, the entry
 * that matches the other side's packets expires first. */
static __always_inline bool is_over(const struct flow *flow, u64 now)
{
	struct flow_key key;

	if (!expired(flow, now))
		return false;
	key = reply_key(flow);
	if (is_live(entry_of(flow, &key), now))
		return false;
	if (has_snat(flow)) {
		key = snat_reply_key(flow);
		if (is_live(entry_of(flow, &key), now))
			return false;
	}
	key = original_key(flow);
	return !is_live(entry_of(flow, &key), now);
}

enum restart {
	RESTART_NO = 0,
	RESTART_CHECK = 1, /* tc_recheck decides */
	RESTART_YES = 2,
};

/* Whether a packet of a known flow has to choose a backend again: a SYN after both sides have
 * closed, or UDP whose backend is gone. Any other SYN may be a retransmission (the reply was lost)
 * or forged. It goes to the backend of the connection, if there is one, and the backend decides. A
 * UDP flow without a reply is rechecked after a pause of a second. */
static __always_inline enum restart check_restart(const struct flow *flow, u32 flags, u64 now)
{
	if (flags & (JUST_WRITTEN | FROM_ICMP_ERROR))
		return RESTART_NO;
	if (flow->client.protocol == IPPROTO_UDP) {
		if (!backend_exists(flow->backend_id))
			return RESTART_YES;
		/* true is RESTART_CHECK */
		return flow->state == STATE_NEW && elapsed(flow->last_used, now) > SECOND;
	}
	if ((flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return RESTART_NO;
	return both_closed(flow) ? RESTART_YES : RESTART_CHECK;
}

/* The twin entry, which matches the other side's packets: for a packet of the backend the client's
 * own entry, for a packet of the client the one that matches replies. If the packets of a
 * masqueraded flow leave without SNAT, because another program lets them out, the backend replies
 * to client', and that entry is the twin. */
static __always_inline struct flow *twin_of(const struct flow *flow, bool reply)
{
	struct flow *other;
	struct flow_key key;

	if (reply)
		key = original_key(flow);
	else if (has_snat(flow))
		key = snat_reply_key(flow);
	else
		key = reply_key(flow);
	other = entry_of(flow, &key);
	/* seen.started are the same bytes as seen.tcp: 0 if this entry has matched no segment. */
	if (reply || !has_snat(flow) || flow->path == PATH_DIRECT_SNAT ||
	    flow->state == STATE_NEW || !other || other->seen.started)
		return other;
	key = reply_key(flow);
	return entry_of(flow, &key);
}

/* The client's own entry holds the state of the flow; the backend's holds a copy. */
static __always_inline void update_state(struct flow *flow, const struct packet *p, u32 flags,
					 bool reply)
{
	struct flow *other = twin_of(flow, reply), *original = reply ? other : flow;
	u8 before, state, fins;

	if (!other)
		return;
	/* Not locked: another CPU may update the same entries, see has_unmerged_fins(). */
	before = original->state;
	fins = original->fins;
	if (flow->client.protocol == IPPROTO_TCP)
		state = tcp_state_after(before, &fins, p, flags, reply, &flow->seen.tcp,
					&other->seen.tcp);
	else if (before == STATE_NEW)
		state = STATE_ANSWERED;
	else /* ANSWERED becomes ESTABLISHED, unless only this entry's copy was outdated */
		state = flow->state == before ? STATE_ESTABLISHED : before;
	original->state = state;
	original->fins = fins;
	if (state != before)
		account_state(original, before, both_closed(original));
	flow->state = other->state = state;
	flow->fins = other->fins = original->fins;
	if (state == STATE_CLOSED && state != before)
		flush_rest(other);
}

static __always_inline bool may_change(const struct flow *flow, u32 flags, bool reply, u64 now)
{
	return flow->client.protocol == IPPROTO_TCP ? may_change_tcp(flow, flags, reply)
						    : may_change_other(flow, flags, reply, now);
}

/* Updates the entry that matched a packet of a known flow. Each entry matches packets of one side
 * only. The exception is that of client' and backend: it also matches the client's packets when
 * they leave the stack (update_leaving()). */
static __always_inline void update_flow(struct flow *flow, const struct packet *p, u32 flags,
					bool reply, u64 now)
{
	if (flags & FROM_ICMP_ERROR)
		return;
	flow->last_used = now;
	if (may_change(flow, flags, reply, now))
		update_state(flow, p, flags, reply);
	if (flow->client.protocol == IPPROTO_TCP && (flags & (TCP_SYN | TCP_ACK)) &&
	    !(flags & TCP_RST))
		flow->seen.tcp = p->tcp;
}

/* Updates the entry of client' and backend for a packet of the client that leaves the stack. The
 * state was updated when the packet arrived, but with SNAT this copy was not. */
static __always_inline void update_leaving(struct flow *flow, u32 flags, u64 now)
{
	struct flow *original;
	struct flow_key key;

	if (flags & FROM_ICMP_ERROR)
		return;
	flow->last_used = now;
	if (!has_snat(flow) || !may_change(flow, flags, false, now))
		return;
	key = original_key(flow);
	original = entry_of(flow, &key);
	if (!original)
		return;
	flow->state = original->state;
	flow->fins = original->fins;
}

/* Deletes an entry if it still belongs to this flow. */
static __always_inline void delete_entry(struct flow_key *key, const struct flow *flow)
{
	if (entry_of(flow, key))
		flows.delete(key);
}

/* Makes this CPU the only one that decides about the entry at this key; NULL: another CPU does. A
 * free key belongs to the CPU that inserts its entry first. A key that is taken over from another
 * flow needs this lock: otherwise two CPUs could both take it, or one could delete what the other
 * has just written. This never waits: there are other ports to try, and the agent deletes entries
 * that are left over (flow_gc.py).
 *
 * Linux before v5.12 has no atomic operation that returns a value (BPF_FETCH), so this adds first
 * and reads afterwards. If several CPUs add at once, each may read more than 1, and none gets the
 * lock; two never do. */
static __always_inline struct port_slot *try_lock_key(const struct flow_key *key)
{
	u32 index = (key->first.port ^ key->second.port) % PORT_SLOTS;
	struct port_slot *slot = port_slots.lookup(&index);

	if (!slot)
		return NULL;
	__sync_fetch_and_add(&slot->lockers, 1);
	if (*(volatile u32 *)&slot->lockers == 1)
		return slot;
	__sync_fetch_and_add(&slot->lockers, -1);
	return NULL;
}

static __always_inline void unlock_key(struct port_slot *slot)
{
	__sync_fetch_and_add(&slot->lockers, -1);
}

/* Deletes the entries that match the replies of a flow. */
static __always_inline void delete_replies(const struct flow *flow)
{
	struct port_slot *slot;
	struct flow_key key;

	if (has_snat(flow)) {
		key = snat_reply_key(flow);
		slot = try_lock_key(&key);
		if (slot) {
			delete_entry(&key, flow);
			unlock_key(slot);
		}
	}
	if (flow->path == PATH_DIRECT_SNAT)
		return;
	key = reply_key(flow);
	delete_entry(&key, flow);
}

/* Deletes the entries of a flow except this one, which is still read: a deleted element may be
 * reused for another flow at once. */
static __always_inline void delete_other_entries(const struct flow *flow)
{
	struct flow_key key;

	if (flow->direction != DIRECTION_SNAT_REPLY && has_snat(flow)) {
		key = snat_reply_key(flow);
		delete_entry(&key, flow);
	}
	if (flow->direction != DIRECTION_REPLY && flow->path != PATH_DIRECT_SNAT) {
		key = reply_key(flow);
		delete_entry(&key, flow);
	}
	if (flow->direction != DIRECTION_ORIGINAL) {
		key = original_key(flow);
		delete_entry(&key, flow);
	}
}

/* Deletes a flow, given its original entry. That entry is deleted last, since it leads to the
 * others. */
static __always_inline void delete_flow(const struct flow *flow)
{
	struct flow_key key = original_key(flow);

	delete_replies(flow);
	delete_entry(&key, flow);
}

/* Sets (`in`) or clears the mark of masqueraded flows on a packet in the node's stack, in both
 * directions. By default it is kube-proxy's mark, so rules that accept that under a FORWARD policy
 * of DROP accept our packets too. Other bits of the mark are left alone. */
static __always_inline void mark_masqueraded(struct __sk_buff *skb, bool in)
{
	u32 zero = 0;
	struct node *n = node.lookup(&zero);

	if (n)
		skb->mark = in ? skb->mark | n->mark : skb->mark & ~n->mark;
}

/* What to do with a packet of a known flow at ingress. */
struct translation {
	struct tuple to_stack;  /* if it takes the stack */
	struct tuple to_device; /* if it is redirected to the next device */
	struct flow *flow;      /* the entry that matched */
	u64 now;
	u32 host_device;  /* not 0: for this node, as if it arrived on this device */
	u8 path;          /* enum flow_path */
	bool masqueraded; /* to be marked in the stack, even if nothing else changes */
	u8 restart;       /* enum restart: the flow may be over */
	bool reply;       /* sent by the backend */
};

/* Returns to the program for known flows. `flags`: FROM_ICMP_ERROR if the packet has updated its
 * flow already. */
static __always_inline int resume(struct __sk_buff *skb, struct scratch *s, u32 tail, u32 flags)
{
	s->resumed = JUST_WRITTEN | flags;
	tails.call(skb, tail);
	s->resumed = 0;
	return finish(TC_ACT_SHOT, NOT_REWRITTEN);
}

/* The flags that resume() has set; 0 if the packet comes from a device. */
static __always_inline u32 take_resumed(struct scratch *s)
{
	u32 flags = s->resumed;

	s->resumed = 0;
	return flags;
}

/* Translates a packet of the client. */
static __always_inline void translate_original(const struct flow *flow, struct translation *s)
{
	s->to_stack.to = flow->backend;
	s->to_stack.from.port = flow->client_port;
	s->to_device = s->to_stack;
	if (has_snat(flow)) {
		s->to_device.from.address = flow->snat;
		s->to_device.from.port = flow->snat_port;
	}
}

/* Translates a packet of the backend. False: it is for the client already, and changes at
 * egress. */
static __always_inline bool translate_reply(const struct tuple *t, const struct flow *flow,
					    struct translation *s)
{
	if (has_snat(flow) && same_address(&t->to.address, &flow->snat) &&
	    t->to.port == flow->snat_port) {
		s->to_stack.to = flow->client;
		s->to_stack.to.port = flow->client_port;
	} else if (flow->path == PATH_STACK && !flow->host_device) {
		return false;
	}
	s->to_device.from = flow->frontend;
	s->to_device.to = flow->client;
	if (flow->host_device)
		s->to_stack = s->to_device;
	s->host_device = flow->host_device;
	return true;
}

/* Translates a packet at ingress, into `s`. False: it belongs to no flow of ours, or has to pass
 * unchanged, or (s->restart) its flow has to be rechecked or begun again. */
static __always_inline bool translate_in(struct tuple *t, const struct packet *p, u32 flags,
					 struct translation *s)
{
	struct flow *flow = flow_between(t);
	u64 now = now_ns();
	bool reply;

	if (!flow)
		return false;
	reply = !is_original(t, flow);
	if (reply && !is_reply(t, flow))
		return false;
	if (expired(flow, now) && !(flags & JUST_WRITTEN)) {
		if (!(flags & FROM_ICMP_ERROR))
			s->restart = RESTART_CHECK;
		if (!(flags & FROM_ICMP_ERROR) || is_over(flow, now))
			return false;
	}
	/* The entry may still be expired here, if another one of the flow is not: for an ICMP
	 * error, or a packet whose flow tc_recheck has found to be live. */
	s->to_stack = *t;
	s->masqueraded = has_snat(flow) && !(reply && expired(flow, now));
	if (!reply) {
		s->restart = check_restart(flow, flags, now);
		if (s->restart) {
			s->masqueraded = false;
			return false;
		}
		translate_original(flow, s);
	} else if (!translate_reply(t, flow, s)) {
		return false;
	}
	s->path = flow->path;
	s->flow = flow;
	s->now = now;
	s->reply = reply;
	update_flow(flow, p, flags, reply, now);
	return true;
}

/* Whether this SYN begins a connection that is not part of the flow: the client connects to the
 * backend directly, from a port that it used through a Service before. A SYN to the Service goes to
 * the connection's backend (check_restart()), and the client's own entry remembers its numbers. */
static __always_inline bool is_direct_connection(const struct flow *flow, const struct packet *p,
						 u32 flags)
{
	struct flow_key key;
	struct flow *original;

	if (flow->client.protocol != IPPROTO_TCP || (flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	key = original_key(flow);
	original = entry_of(flow, &key);
	return !original || (is_ending(original) && (original->seen.tcp.next != p->tcp.next ||
						     original->seen.tcp.ack != p->tcp.ack));
}

enum egress_result {
	EGRESS_UNKNOWN = 0,   /* no flow of ours */
	EGRESS_UNCHANGED = 1, /* of a flow of ours, but already correct */
	EGRESS_REWRITE = 2,
	EGRESS_HOST_FLOW = 3, /* sent by this node, and it has a flow */
};

/* Translates a packet at egress, into `new`. */
static __always_inline enum egress_result translate_out(struct tuple *t, const struct packet *p,
							u32 flags, u32 bytes, struct tuple *new,
							bool *masqueraded)
{
	struct flow *flow = flow_between(t);
	u64 now = now_ns();
	bool reply;

	*new = *t;
	if (!flow)
		return EGRESS_UNKNOWN;
	reply = is_reply(t, flow) && same_address(&t->to.address, &flow->client.address);
	if (!reply && !is_translated_original(t, flow))
		return flow->host_device && is_original(t, flow) ? EGRESS_HOST_FLOW
								 : EGRESS_UNKNOWN;
	if (is_over(flow, now))
		return EGRESS_UNKNOWN;
	if (!reply && is_direct_connection(flow, p, flags)) {
		struct flow_key key = flow_key_of(&t->from, &t->to);

		flows.delete(&key);
		return EGRESS_UNKNOWN;
	}
	if (reply) {
		*masqueraded = has_snat(flow);
		update_flow(flow, p, flags, true, now);
		if (bytes && !has_snat(flow) &&
		    flow->path == PATH_STACK) /* not counted at ingress */
			account_bytes(flow, bytes, flags, true);
		new->from = flow->frontend;
		new->to.port = flow->client.port;
		return EGRESS_REWRITE;
	}
	if (!same_address(&t->from.address, &flow->client.address))
		return EGRESS_UNCHANGED; /* redirected: it has the node's address */
	update_leaving(flow, flags, now);
	if (!has_snat(flow))
		return EGRESS_UNCHANGED;
	*masqueraded = true;
	new->from.address = flow->snat;
	new->from.port = flow->snat_port;
	return EGRESS_REWRITE;
}

/* ---- new flows ---------------------------------------------------------------------------- */

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

/* Inserts the entry that matches replies to client'. Returns 0, or the error of the last try:
 * -EEXIST if all ports that were tried belong to other flows. If another flow of this client to the
 * same backend (through another frontend) has the key, client' gets another port. While coexisting
 * with another data plane the port always changes: its conntrack may hold the client's own port and
 * would translate the replies. The kernel refuses a write (-EBUSY, Linux 5.11 and later) if this
 * CPU was interrupted during another one to the same group of buckets; the next port is most likely
 * in another group. */
static __always_inline long claim_reply(struct flow *flow, const struct node *n, u64 now)
{
	u32 size = n->port_high - n->port_low + 1;
	long error = -EEXIST;

	for (int i = 0; i < REPLY_PORT_TRIES; i++) {
		struct port_slot *slot;
		struct flow *other;
		struct flow_key key;

		if (i || (n->flags & NODE_COEXISTING))
			flow->client_port =
				__builtin_bswap16(n->port_low + bpf_get_prandom_u32() % size);
		key = reply_key(flow);
		error = flows.insert(&key, flow);
		if (!error)
			return 0;
		slot = try_lock_key(&key);
		if (!slot)
			continue;
		other = flows.lookup(&key);
		if (!other || is_over(other, now) || other->state == STATE_CLOSED ||
		    (same_target(&other->frontend, &flow->frontend) &&
		     same_target(&other->client, &flow->client)))
			error = flows.update(&key, flow);
		unlock_key(slot);
		if (!error)
			return 0;
	}
	return error;
}

/* The ports of the node that a client may use for one backend: one of every SHARES consecutive
 * ports, selected by a hash of its address (IPv6: of its /64 network, since one host may have all
 * of its addresses). No client gets more than this share, and two clients have only about one in
 * SHARES of its ports in common. */
struct share {
	u32 low;
	u32 count; /* number of its ports */
	u32 step;  /* a power of two */
	u32 client;
};

static __always_inline struct share share_of(const struct flow *flow, const struct node *n)
{
	const struct address *a = &flow->client.address;
	u32 size = n->port_high - n->port_low + 1, step = size < SHARED_PORTS ? 1 : SHARES;
	struct share s = {.low = n->port_low, .count = size / step, .step = step};

	s.client = hash_word(hash_word(HASH_SEED, a->word[0]), is_v4(a) ? a->word[3] : a->word[1]);
	return s;
}

static __always_inline __be16 port_at(const struct share *s, u32 index)
{
	u32 chosen = hash_end(hash_word(s->client, index), 3 * sizeof(index)) & (s->step - 1);

	return __builtin_bswap16(s->low + index * s->step + chosen);
}

static __always_inline u32 index_of_port(const struct share *s, __be16 port)
{
	return (u32)(__builtin_bswap16(port) - s->low) / s->step;
}

/* The stages of the search for a port of the node (tc_claim), and which ports each
 * may take. */
enum search {
	SEARCH_NONE = 0,   /* it has not begun */
	SEARCH_RANDOM = 1, /* random ports that are free, or whose flow has ended; after FRESH_TRIES
			      also those in TIME_WAIT at the backend and of disposable flows */
	SEARCH_SEQUENTIAL = 2, /* ports in sequence: also those of handshakes idle for a second */
	SEARCH_SCANNED = 3,    /* the same, from a port that tc_scan_ports found */
	SEARCH_LAST = 4, /* also those of any handshake: during a flood it is most likely forged,
			    and without its port the new connection would certainly fail */
};

/* Whether a flow gives up its port to another, judged by one of its entries. Established flows
 * never do. */
static __always_inline bool entry_frees_port(const struct flow *entry, u64 now, u32 search,
					     bool fresh)
{
	if (expired(entry, now))
		return true;
	if (entry->state == STATE_CLOSED)
		return !fresh || !(entry->fins & FIN_BACKEND_FIRST);
	if (search > SEARCH_RANDOM && is_half_open(entry) &&
	    (search == SEARCH_LAST || elapsed(entry->last_used, now) > SECOND))
		return true;
	return !fresh && is_disposable(entry, now);
}

/* The same for the whole flow: its client may have sent after its backend. */
static __always_inline bool flow_frees_port(const struct flow *reply_entry, u64 now, u32 search,
					    bool fresh)
{
	struct flow_key key = original_key(reply_entry);
	struct flow *original;

	if (!entry_frees_port(reply_entry, now, search, fresh))
		return false;
	original = entry_of(reply_entry, &key);
	return !original || entry_frees_port(original, now, search, fresh);
}

/* Claims a port of the node for this flow, among those that its client may use; the node's own
 * sockets do not use this range. SEARCH_RANDOM tries flow->snat_port (the client's own port) first,
 * if it is in the share; the others begin there. False: none was found, and the search may continue
 * from flow->snat_port. */
static __always_inline bool claim_node_port(struct flow *flow, const struct node *n, u32 search)
{
	struct share s = share_of(flow, n);
	struct port_slot *slot = NULL;
	struct flow *other = NULL;
	u64 now = flow->last_used;
	struct flow_key key;
	u32 index = index_of_port(&s, flow->snat_port);
	bool written;

	if (search == SEARCH_RANDOM && (index >= s.count || port_at(&s, index) != flow->snat_port))
		index = bpf_get_prandom_u32() % s.count;
	for (int i = 0; i < SNAT_TRIES; i++) {
		flow->snat_port = port_at(&s, index);
		key = snat_reply_key(flow);
		if (!flows.insert(&key, flow))
			return true;
		slot = try_lock_key(&key);
		if (slot) {
			other = flows.lookup(&key);
			if (!other || flow_frees_port(other, now, search,
						      search == SEARCH_RANDOM && i < FRESH_TRIES))
				break;
			unlock_key(slot);
			slot = NULL;
		}
		index = (search == SEARCH_RANDOM ? bpf_get_prandom_u32() : index + 1) % s.count;
	}
	if (!slot) {
		flow->snat_port = port_at(&s, index);
		return false;
	}
	if (other) /* the rest of the flow that loses its port */
		delete_other_entries(other);
	written = !flows.update(&key, flow);
	unlock_key(slot);
	return written;
}

/* Whether this flow may still be in use, although it is among the oldest: it is established, or was
 * closing or unproven a few seconds ago. */
static __always_inline bool is_needed(const struct flow *flow, u64 now)
{
	return !is_half_open(flow) && flow->state != STATE_CLOSED && !is_disposable(flow, now) &&
	       !is_over(flow, now);
}

/* Checks the oldest flows until one is not needed, evicts that one, and puts the others at the end
 * of the queue. A reused entry keeps its old place in the queue, so a handshake (`young`) may be
 * among the oldest: evict it only if nothing else can go. Its key is at the end of the queue by
 * then, and so stays counted until it is popped again, without a flow. */
static __always_inline void evict_over_limit(u64 *total, u64 now)
{
	struct flow *flow = NULL, *young = NULL;

	for (int i = 0; i < EVICT_CANDIDATES; i++) {
		struct flow_key oldest;

		if (flow_queue.pop(&oldest)) /* the queue is empty */
			return;
		flow = flows.lookup(&oldest);
		if (!flow || flow->direction != DIRECTION_ORIGINAL) {
			__sync_fetch_and_add(total, -1);
			return; /* it is gone already */
		}
		if (is_half_open(flow) && elapsed(flow->last_used, now) < SECOND)
			young = flow;
		else if (!is_needed(flow, now))
			break;
		if (flow_queue.push(&oldest, 0)) { /* another CPU has filled the queue */
			count(EVICTED);
			break;
		}
		flow = NULL;
	}
	if (flow)
		__sync_fetch_and_add(total, -1);
	else
		flow = young;
	if (flow)
		delete_flow(flow);
}

/* Evicts one of the oldest flows. Flows that are needed move to the end of the queue, except UDP
 * streams, which are evicted for other protocols. False: none of those checked can go. */
static __always_inline bool evict_one(bool for_udp, u64 now)
{
	for (int i = 0; i < EVICTION_TRIES; i++) {
		struct flow_key oldest;
		struct flow *flow;

		if (flow_queue.pop(&oldest))
			return false;
		flow = flows.lookup(&oldest);
		if (!flow || flow->direction != DIRECTION_ORIGINAL)
			return true;
		if (!is_needed(flow, now)) {
			delete_flow(flow);
			return true;
		}
		/* push() fails if another CPU has filled the queue. Without its key this flow
		 * would stay in the map for ever. */
		if ((!for_udp && flow->client.protocol == IPPROTO_UDP) ||
		    flow_queue.push(&oldest, 0)) {
			count(EVICTED);
			delete_flow(flow);
			return true;
		}
	}
	return false;
}

/* Adds a new flow to the queue. The queue has an eighth more room than the operator's limit, so
 * that tc_evict passes a long run of needed flows before new flows fail. */
static __always_inline bool enqueue(struct flow_key *key, const struct node *n, u64 now)
{
	u32 zero = 0;
	u64 *total = flow_count.lookup(&zero);

	if (!total)
		return false;
	if (!flow_queue.push(key, 0)) {
		__sync_fetch_and_add(total, 1);
		return true;
	}
	*total = n->connections + n->connections / 8; /* corrects the count */
	return evict_one(key->first.protocol == IPPROTO_UDP, now) && !flow_queue.push(key, 0);
}

/* Makes room for the original entry at `key`: takes the place in the queue of an older flow of the
 * same client and frontend, whose reply entries it deletes, or finds a new place. Any result other
 * than NEW_FLOW: the new flow cannot begin. NOT_TRACKED: a live flow has this key for its
 * replies. */
static __always_inline enum reason claim_original(struct flow_key *key, const struct flow *old,
						  const struct flow *flow, const struct node *n)
{
	if (old && old->direction == DIRECTION_ORIGINAL) {
		delete_replies(old);
		return NEW_FLOW;
	}
	if (old) {
		if (!is_over(old, flow->last_used) && old->state != STATE_CLOSED)
			return NOT_TRACKED;
		flows.delete(key);
	}
	return enqueue(key, n, flow->last_used) ? NEW_FLOW : TABLE_FULL;
}

static __always_inline bool starts_flow(const struct packet *p)
{
	return p->protocol == IPPROTO_UDP || (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
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

	client->by_packet = true;
	client->key.client = p->tuple.from.address;
	set_hashes(client, &p->tuple);
	v = choose(&p->tuple.to, client, c);
	if (v != TRANSLATE)
		account_begin(c, v);
	if (v == REFUSE) {
		s->reason = c->reason;
		*action = go(skb, TAIL_REFUSE);
		return false;
	}
	if (v != TRANSLATE) {
		*action = finish(v == PASS ? TC_ACT_UNSPEC : TC_ACT_SHOT, c->reason);
		return false;
	}
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->last_used = now_ns();
	if (is_paused(flow->last_used)) {
		*action = finish(TC_ACT_SHOT, PAUSED);
		return false;
	}
	flow->client = p->tuple.from;
	flow->frontend = p->tuple.to;
	flow->backend = c->backend;
	flow->client_port = p->tuple.from.port;
	if (flow->client.protocol == IPPROTO_UDP)
		flow->seen.started = flow->last_used;
	flow->service = c->service;
	flow->backend_id = c->backend_id;
	__builtin_memset(&s->hop, 0, sizeof(s->hop));
	return true;
}

/* Whether a flow bypasses the stack: with SNAT to backends on other nodes, since the stack does not
 * forward packets with its own source address; and all flows if the operator wants it. */
static __always_inline bool bypasses_stack(const struct node *n, const struct device *from,
					   const struct device *to, bool masquerade)
{
	return (n->flags & NODE_DIRECT) ||
	       (masquerade && from->role == ROLE_HOST && to->role == ROLE_HOST);
}

/* Whether this is a known address of the node: one that serves NodePorts, or one for SNAT. */
static __always_inline bool is_nodes_own(struct address *a, const struct node *n)
{
	return node_addresses.lookup(a) || same_address(a, &n->snat4) || same_address(a, &n->snat6);
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
	if (has_snat(flow))
		source.address = flow->snat;
	to = find_next_hop(skb, &s->packet, &source, &backend, &s->hop, true);
	/* The backend is the node itself: no device would translate the source of what it receives,
	 * nor of what it sends. */
	if (!to && !same_address(&flow->client.address, &flow->backend.address) &&
	    is_nodes_own(&flow->backend.address, n))
		__builtin_memset(&flow->snat, 0, sizeof(flow->snat));
	/* A bridge forwards replies between its own pods past us, unless they are addressed to the
	 * node. */
	if (to && !has_snat(flow) && s->hop.ifindex == ifindex && to->role == ROLE_POD)
		flow->snat = s->packet.v6 ? n->snat6 : n->snat4;
	if (to && has_snat(flow)) {
		own = s->packet.v6 ? to->snat6 : to->snat4;
		if (!is_any(&own))
			flow->snat = own;
	}
	if (to && bypasses_stack(n, device, to, has_snat(flow)))
		flow->path = has_snat(flow) ? PATH_DIRECT_SNAT : PATH_DIRECT;
	if (flow->path != PATH_STACK && s->hop.max_length)
		stamp_next_hop(&s->hop, flow->last_used);
	else
		s->hop.ifindex = 0; /* nothing to cache */
	return go(skb, TAIL_ENQUEUE);
}

/* Whether this flow has lost an entry that its replies or its packets in the stack need: another
 * flow has taken it, or another CPU deleted it just after it had expired. */
static __always_inline bool lacks_entry(const struct flow *flow)
{
	struct flow_key key;

	if (has_snat(flow)) {
		key = snat_reply_key(flow);
		if (!entry_of(flow, &key))
			return true;
	}
	if (flow->path == PATH_DIRECT_SNAT)
		return false;
	key = reply_key(flow);
	return !entry_of(flow, &key);
}

/* Decides about a packet of a known flow, for tc_ingress and tc_host: whether the flow is live, or
 * has expired, or has to begin again because its backend or its reply entry is gone. */
int tc_recheck(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();
	struct packet *p;
	struct flow *flow;
	bool came_in;

	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	came_in = s->resume_tail == TAIL_CHOOSE;
	flow = flow_between(&p->tuple);
	if (flow && !is_over(flow, now_ns()) &&
	    (!starts_flow(p) || !is_original(&p->tuple, flow) ||
	     (backend_exists(flow->backend_id) && !lacks_entry(flow))))
		return came_in ? resume(skb, s, TAIL_INGRESS, 0) : resume(skb, s, TAIL_HOST, 0);
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
	if (old && old->direction == DIRECTION_ORIGINAL && is_original(&s->packet.tuple, old))
		delete_flow(old);
	return TC_ACT_UNSPEC;
}

/* While another data plane serves, new flows are left to it, until our programs are on all devices.
 * A retransmitted SYN follows the first one, even if we are active by then: replies from two
 * backends would break the connection. A SYN is identified by its sequence number, an SCTP INIT by
 * its tag. */
int tc_coexist(struct __sk_buff *skb)
{
	u32 zero = 0, ifindex = skb->ifindex, number = 0, *stored;
	struct device *device = device_at(ifindex);
	struct node *n = node.lookup(&zero);
	struct scratch *s = get_scratch();
	struct client client = {};
	struct client_slot slot;
	struct packet *p;
	bool foreign;

	if (!device || !n || !s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	foreign = n->flags & NODE_PASSIVE;
	if (p->protocol != IPPROTO_UDP) {
		bpf_skb_load_bytes(skb, p->l4 + (p->protocol == IPPROTO_SCTP ? SCTP_HEADER + 4 : 4),
				   &number, sizeof(number));
		set_hashes(&client, &p->tuple);
		slot.owner = owner_of_packet(device, ifindex, &p->tuple.from.address);
		slot.number = client.flow_hash % FOREIGN_FLOWS_PER_CLIENT;
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
	if (is_martian(&s->packet.tuple.from.address) ||
	    is_nodes_own(&s->packet.tuple.from.address, n))
		return TC_ACT_UNSPEC; /* the stack drops it */
	if ((n->flags & (NODE_PASSIVE | NODE_COEXISTING)) && !(s->begin & BEGIN_NOT_FOREIGN))
		return go(skb, TAIL_COEXIST);
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
	if (has_snat(flow) || (n->flags & NODE_DIRECT) ||
	    (device->role == ROLE_POD && !(device->flags & DEVICE_PEER)))
		return go(skb, TAIL_ROUTE);
	return go(skb, TAIL_ENQUEUE);
}

/* The same for a packet of this node, sent by a socket that the hooks left alone. It leaves by the
 * device towards the backend; replies are delivered on the device that the socket sends by, where
 * they are expected. It needs no SNAT, since it has the node's address. */
int tc_host_choose(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();
	struct client client = {};
	struct choice c = {};
	int action;

	if (!s)
		return TC_ACT_UNSPEC;
	if (!describe_flow(skb, s, &client, &c, &action))
		return action;
	s->flow.path = PATH_DIRECT;
	s->flow.host_device = skb->ifindex;
	return go(skb, TAIL_ENQUEUE);
}

/* The flow exists now: counts it, and returns to the program for known flows. */
static __always_inline int resume_new(struct __sk_buff *skb, struct scratch *s)
{
	count(NEW_FLOW);
	account_flow(&s->flow);
	return s->flow.host_device ? resume(skb, s, TAIL_HOST, 0) : resume(skb, s, TAIL_INGRESS, 0);
}

/* Whether a client that reuses its port got the same backend again. */
static __always_inline bool is_same_connection(const struct flow *old, const struct flow *flow)
{
	return old->direction == DIRECTION_ORIGINAL && old->path == flow->path &&
	       old->host_device == flow->host_device && same_target(&old->client, &flow->client) &&
	       same_target(&old->frontend, &flow->frontend) &&
	       same_target(&old->backend, &flow->backend) && same_address(&old->snat, &flow->snat);
}

static __always_inline void restart_entry(struct flow *old, const struct flow *flow)
{
	old->last_used = flow->last_used;
	old->service = flow->service;
	old->backend_id = flow->backend_id;
	old->seen.started = flow->seen.started;
	old->fins = 0;
	old->state = STATE_NEW;
}

/* A connection like one that both sides have closed: its entries are reused, so the backend sees
 * the same ports as without a proxy. Not if the backend closed first, and so keeps the ports in
 * TIME_WAIT: many clients may share one address, each with its own timestamps. */
static __always_inline bool revive(struct flow *old, const struct flow *flow,
				   const struct next_hop *hop, const struct node *n)
{
	struct flow *reply_entry = NULL, *snat_reply_entry = NULL;
	u16 port = __builtin_bswap16(old->snat_port);
	struct flow_key key;

	if (!is_same_connection(old, flow) || !both_closed(old) || (old->fins & FIN_BACKEND_FIRST))
		return false;
	if (has_snat(old) && (port < n->port_low || port > n->port_high))
		return false; /* the range has changed */
	if (n->flags & NODE_COEXISTING)
		return false; /* client' needs another port: claim_reply() */
	if (old->path != PATH_DIRECT_SNAT) {
		key = reply_key(old);
		reply_entry = entry_of(old, &key);
		if (!reply_entry)
			return false;
	}
	if (has_snat(old)) {
		key = snat_reply_key(old);
		snat_reply_entry = entry_of(old, &key);
		if (!snat_reply_entry)
			return false;
		restart_entry(snat_reply_entry, flow);
	}
	if (reply_entry)
		restart_entry(reply_entry, flow);
	copy_next_hop(&old->out, hop);
	restart_entry(old, flow);
	return true;
}

/* Adds a new flow to the queue, or reuses the entries of an old one. */
int tc_enqueue(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct scratch *s = get_scratch();
	struct node *n = node.lookup(&zero);
	u64 *total = flow_count.lookup(&zero);
	enum reason reason;
	struct flow_key key;
	struct flow *old;

	if (!s || !n || !total)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	key = original_key(&s->flow);
	old = flows.lookup(&key);
	if (old && revive(old, &s->flow, &s->hop, n))
		return resume_new(skb, s);
	reason = claim_original(&key, old, &s->flow, n);
	if (reason != NEW_FLOW)
		return finish(TC_ACT_SHOT, reason);
	s->search = SEARCH_NONE;
	s->late = false;
	s->runs = 2; /* tc_evict may run this many times */
	return *total > n->connections ? go(skb, TAIL_EVICT) : go(skb, TAIL_CLAIM);
}

/* Makes room: evicts up to two flows for each new one above the operator's limit. */
int tc_evict(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct scratch *s = get_scratch();
	struct node *n = node.lookup(&zero);
	u64 *total = flow_count.lookup(&zero);

	if (!s || !n || !total)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	evict_over_limit(total, s->flow.last_used);
	return --s->runs && *total > n->connections ? go(skb, TAIL_EVICT) : go(skb, TAIL_CLAIM);
}

/* Writes the SNAT port into the entry of client' in place: no packet uses that before the original
 * entry exists. False: the entry belongs to another flow by now. */
static __always_inline bool write_port_to_reply(const struct flow *flow)
{
	struct flow_key key = reply_key(flow);
	struct flow *reply_entry = flows.lookup(&key);

	if (!reply_entry || !same_target(&reply_entry->client, &flow->client) ||
	    !same_target(&reply_entry->frontend, &flow->frontend))
		return false;
	reply_entry->snat_port = flow->snat_port;
	return true;
}

/* Deletes the entries of a new flow that could not be completed. */
static __always_inline int abort_flow(const struct flow *flow, enum reason reason)
{
	struct flow_key key = reply_key(flow);

	delete_replies(flow);
	/* A reply entry without an SNAT port yet is not recognized by delete_replies(). */
	if (flow->path != PATH_DIRECT_SNAT && write_port_to_reply(flow))
		flows.delete(&key);
	return finish(TC_ACT_SHOT, reason);
}

/* Why the last port of a search failed: another flow has it, or the map took no entry. */
static __always_inline enum reason no_port_reason(const struct flow *flow)
{
	struct flow_key key = snat_reply_key(flow);

	return flows.lookup(&key) ? NO_SNAT_PORT : NOT_TRACKED;
}

/* Claims a port of the node for a new flow, and writes the entry for replies to it: a random port,
 * then one in sequence, then one that tc_scan_ports has found among all that the client may use.
 * Any result other than NEW_FLOW: it has none. */
static __always_inline enum reason claim_port(struct __sk_buff *skb, struct scratch *s,
					      const struct node *n)
{
	struct flow *flow = &s->flow;

	flow->direction = DIRECTION_SNAT_REPLY;
	if (is_loopback(&flow->snat)) /* still ADDRESS_NOT_CHOSEN */
		return NO_SNAT_PORT;
	if (claim_node_port(flow, n, s->search))
		return flow->path == PATH_DIRECT_SNAT || write_port_to_reply(flow) ? NEW_FLOW
										   : NOT_TRACKED;
	if (s->search == SEARCH_LAST)
		return no_port_reason(flow);
	if (s->search == SEARCH_RANDOM) {
		s->search = SEARCH_SEQUENTIAL;
		tails.call(skb, TAIL_CLAIM);
	} else {
		tails.call(skb, TAIL_SCAN_PORTS);
	}
	return NO_SNAT_PORT;
}

/* Writes the original entry, the last one of a flow. */
static __always_inline enum reason publish(struct scratch *s)
{
	struct flow_key key = original_key(&s->flow);

	s->flow.direction = DIRECTION_ORIGINAL;
	copy_next_hop(&s->flow.out, &s->hop);
	return flows.update(&key, &s->flow) ? NOT_TRACKED : NEW_FLOW;
}

/* A flow that has bypassed the stack has a reply entry now: its other entries name the port of
 * client'. `former`: the port that they have. */
static __always_inline void leave_direct_path(struct flow *flow, __be16 former)
{
	struct flow_key key = original_key(flow);
	__be16 port = flow->client_port;
	struct flow *entry;

	flow->client_port = former;
	entry = entry_of(flow, &key);
	if (!entry) { /* another CPU was first, with another port of client' */
		flow->client_port = port;
		key = reply_key(flow);
		delete_entry(&key, flow);
		return;
	}
	entry->client_port = port;
	entry->path = PATH_DIRECT;
	key = snat_reply_key(flow);
	entry = entry_of(flow, &key);
	if (entry) {
		entry->client_port = port;
		entry->path = PATH_DIRECT;
	}
}

/* A packet that waited for the reply entry continues. */
static __always_inline int resume_late(struct __sk_buff *skb, struct scratch *s, __be16 former)
{
	leave_direct_path(&s->flow, former);
	if (s->resume_tail == TAIL_ICMP_IN)
		return go(skb, TAIL_ICMP_IN);
	return resume(skb, s, TAIL_INGRESS, FROM_ICMP_ERROR);
}

/* Writes the entries of a new flow: that for its packets in the stack and its replies, that for
 * replies to the node, and the original one. The port of client' is claimed before that of the
 * node, whose entry contains it. A search for a port of the node continues here (`search`).
 *
 * `late`: writes the first of these for a known flow that has bypassed the stack, of which a packet
 * has to take the stack; then that packet continues. */
int tc_claim(struct __sk_buff *skb)
{
	u32 zero = 0;
	struct node *n = node.lookup(&zero);
	struct scratch *s = get_scratch();
	enum reason reason = NEW_FLOW;
	__be16 former;
	long error = 0;

	if (!n || !s)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	if (s->search == SEARCH_NONE) {
		former = s->flow.client_port;
		s->flow.direction = DIRECTION_REPLY;
		if (s->flow.path != PATH_DIRECT_SNAT)
			error = claim_reply(&s->flow, n, now_ns());
		if (error)
			return finish(TC_ACT_SHOT, error == -EEXIST ? NO_SNAT_PORT : NOT_TRACKED);
		if (s->late)
			return resume_late(skb, s, former);
		s->search = SEARCH_RANDOM;
		if (has_snat(&s->flow))
			s->flow.snat_port = s->flow.client_port;
	}
	if (has_snat(&s->flow))
		reason = claim_port(skb, s, n);
	if (reason == NEW_FLOW)
		reason = publish(s);
	return reason == NEW_FLOW ? resume_new(skb, s) : abort_flow(&s->flow, reason);
}

/* When the last search for a port for this backend failed. */
static __always_inline u64 *last_exhausted_of(const struct target *backend)
{
	u32 index = (backend->address.word[3] ^ backend->address.word[3] >> 16 ^ backend->port) %
		    PORT_SLOTS;
	struct port_slot *slot = port_slots.lookup(&index);

	return slot ? &slot->last_exhausted : NULL;
}

/* Seconds without a packet after which entry_frees_port() returns true in SEARCH_SCANNED, one byte
 * for each state. A table instead of branches: the verifier explores both sides of each, and there
 * are SCAN_PORTS times as many. */
#define FREE_AFTER_SECONDS                                                                         \
	(1ULL << 8 * STATE_NEW | (u64)CLOSING_SECONDS << 8 * STATE_CLOSING |                       \
	 0ULL << 8 * STATE_CLOSED | 1ULL << 8 * STATE_ANSWERED |                                   \
	 (u64)UNPROVEN_SECONDS << 8 * STATE_UNPROVEN)

/* What is the same for all ports of a scan. Masks are 0 or all ones, to avoid branches, which the
 * verifier would explore one by one. */
struct scan {
	struct target node;
	struct target backend;
	u32 first;       /* the node is the first end of the key */
	u32 first_same;  /* the same if both ports are equal */
	u32 by_port;     /* ports decide which end is first, before the other words */
	u64 established; /* idle timeout of an established flow, in ns */
	u64 now;
};

/* All ones if the lowest bit is set, otherwise 0. */
static __always_inline u32 mask_of(u32 bit)
{
	return 0U - (bit & 1);
}

/* The masks are written to a map and read back, so that the verifier does not know them. */
static __always_inline void begin_scan(struct scratch *s, struct scan *scan)
{
	struct flow sample = {.state = STATE_ESTABLISHED};

	scan->node = s->flow.client;
	scan->node.address = s->flow.snat;
	scan->backend = s->flow.backend;
	s->masks[0] = precedes(&scan->node, &scan->backend);
	scan->node.port = scan->backend.port;
	s->masks[1] = precedes(&scan->node, &scan->backend);
	s->masks[2] = scan->node.address.word[3] == scan->backend.address.word[3];
	sample.client.protocol = s->flow.client.protocol;
	s->masks[3] = timeout_of(&sample) / SECOND;
	asm volatile("" ::: "memory");
	scan->first = mask_of(s->masks[0]);
	scan->first_same = mask_of(s->masks[1]);
	scan->by_port = mask_of(s->masks[2]);
	scan->established = s->masks[3] * SECOND;
	scan->now = s->flow.last_used + CLOCK_SKEW; /* so that a flow that has just closed counts */
}

/* `one` if the mask is all ones, `other` if it is 0. */
static __always_inline u32 pick(u32 mask, u32 one, u32 other)
{
	return other ^ ((one ^ other) & mask);
}

/* The entry at this port. Orders the key like flow_key_of(), without branches. Both ports have 16
 * bits, so bit 31 of their difference is its sign; and x - 1 has bit 31 only if x is 0. */
static __always_inline struct flow *entry_at(const struct scan *scan, __be16 port)
{
	u32 to = scan->backend.port, less = mask_of(((u32)port - to) >> 31);
	u32 same = mask_of((((u32)port ^ to) - 1) >> 31), first;
	const u32 *node = (const u32 *)&scan->node.address, *backend = scan->backend.address.word;
	struct flow_key key = {.first = scan->backend, .second = scan->backend};

	first = pick(scan->by_port, pick(same, scan->first_same, less), scan->first);
	for (int i = 0; i < 4; i++) {
		key.first.address.word[i] = pick(first, node[i], backend[i]);
		key.second.address.word[i] = pick(first, backend[i], node[i]);
	}
	key.first.port = pick(first, port, to);
	key.second.port = pick(first, to, port);
	return flows.lookup(&key);
}

static __always_inline bool may_be_free(const struct flow *entry, const struct scan *scan)
{
	/* & 7 keeps the shift below 64 bits, whatever the byte is */
	u64 after = (FREE_AFTER_SECONDS >> (entry->state & 7) * 8 & 0xff) * SECOND;
	u64 lives = (u32)(entry->state ^ STATE_ESTABLISHED) -
		    1ULL; /* all ones if established, otherwise small */

	after |= scan->established & 0 - (lives >> 63);
	return entry->last_used + after <= scan->now;
}

/* Scans the next SCAN_PORTS of the ports that the client may use, for one that is free or whose
 * flow gives it up, and runs again until all were scanned, at most MAX_SCANS times. If all ports
 * are in use, this takes half a millisecond; then there is no scan for this backend for SCAN_PAUSE.
 */
int tc_scan_ports(struct __sk_buff *skb)
{
	u32 zero = 0, index, left;
	struct scratch *s = get_scratch();
	struct node *n = node.lookup(&zero);
	struct flow *entry = NULL;
	struct scan scan;
	struct share share;
	u64 *last_exhausted;
	int i;

	if (!n || !s)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	last_exhausted = last_exhausted_of(&s->flow.backend);
	if (!last_exhausted)
		return finish(TC_ACT_SHOT, NOT_TRACKED);
	share = share_of(&s->flow, n);
	left = s->runs;
	if (s->search == SEARCH_SEQUENTIAL) /* the first run */
		left = elapsed(*last_exhausted, s->flow.last_used) < SCAN_PAUSE
			       ? 0
			       : (share.count + SCAN_PORTS - 1) / SCAN_PORTS;
	if (left > MAX_SCANS)
		left = MAX_SCANS;
	s->search = left ? SEARCH_SCANNED : SEARCH_LAST;
	if (!left)
		return go(skb, TAIL_CLAIM);
	s->runs = left - 1;
	index = index_of_port(&share, s->flow.snat_port);
	begin_scan(s, &scan);
	for (i = 0; i < SCAN_PORTS; i++) {
		entry = entry_at(&scan, port_at(&share, index));
		if (!entry || may_be_free(entry, &scan))
			break;
		index = (index + 1) % share.count;
	}
	s->flow.snat_port = port_at(&share, index);
	if (i < SCAN_PORTS)
		return go(skb, TAIL_CLAIM);
	if (!s->runs) /* all ports were scanned, and none is free */
		*last_exhausted = s->flow.last_used;
	return go(skb, TAIL_SCAN_PORTS);
}

/* Handles packets of known flows of this node's own sockets. */
int tc_host(struct __sk_buff *skb)
{
	struct device *device = device_at(skb->ifindex), *to;
	struct scratch *s = get_scratch();
	u8 restart = RESTART_YES;
	u64 now = now_ns();
	struct packet *p;
	struct flow *flow;
	struct tuple out;
	u32 flags;

	if (!device || !s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	flags = p->tcp_flags | take_resumed(s);
	flow = flow_between(&p->tuple);
	if (flow && flow->host_device && is_original(&p->tuple, flow) && !is_over(flow, now))
		restart = check_restart(flow, flags, now);
	if (restart)
		return starts_flow(p) ? start_flow(skb, s, restart, TAIL_HOST_CHOOSE)
				      : TC_ACT_UNSPEC;
	update_flow(flow, p, p->tcp_flags, false, now);
	account_bytes(flow, skb->len - p->l3, p->tcp_flags, false);
	out.from = flow->client;
	out.from.port = flow->client_port;
	out.to = flow->backend;
	to = next_hop_of_flow(skb, p, &out, &flow->out, &s->hop, now);
	if (!to)
		return finish(TC_ACT_SHOT, NO_ROUTE);
	if (rewrite(skb, p, &out, p->ttl))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	return finish_rewrite(skb, s, &out, redirect_packet(skb, device, to, &s->hop), ETH_HLEN);
}

/* Refuses a packet: sends the refusal back by the device that the packet came from, or, for the
 * node's own sockets, delivers it at ingress of the device that they send by. */
int tc_refuse(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = device_at(ifindex);
	struct scratch *s = get_scratch();
	struct packet *p;

	if (!device || !s)
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	p = &s->packet;
	if (!can_refuse(skb, p))
		return finish(TC_ACT_SHOT, s->reason);
	if (!may_refuse(p, now_ns()))
		return finish(TC_ACT_SHOT, RATE_LIMITED);
	if (drop_priority_tag(skb) ||
	    (p->protocol == IPPROTO_TCP ? refuse_tcp(skb, p) : refuse_with_icmp(skb, p)) ||
	    swap_link(skb, device->l2))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	return finish(bpf_redirect(ifindex, skb->ingress_ifindex ? 0 : BPF_F_INGRESS), s->reason);
}

/* ---- every packet ------------------------------------------------------------------------- */

/* A reply to this node's own socket: delivers it on the device that the request left by. */
static __always_inline int deliver_to_host(struct __sk_buff *skb, const struct device *from,
					   u32 ifindex)
{
	struct device *to = device_at(ifindex);

	/* It is on that device already, or that device has another link-layer header. */
	if (ifindex == skb->ifindex || !to || to->l2 != from->l2)
		return TC_ACT_UNSPEC;
	if (drop_priority_tag(skb) ||
	    (to->l2 && bpf_skb_store_bytes(skb, 0, to->mac, sizeof(to->mac), 0)))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	return finish(bpf_redirect(ifindex, BPF_F_INGRESS), REDIRECTED);
}

/* Writes the entry that a packet of a flow that bypasses the stack needs in the stack, and then
 * handles the packet again. */
static __always_inline int claim_late(struct __sk_buff *skb, struct scratch *s,
				      const struct flow *flow, u32 resume_tail)
{
	s->flow = *flow;
	s->flow.path = PATH_DIRECT;
	s->flow.out.ifindex = 0; /* it is the next hop of another entry */
	if (s->flow.client.protocol == IPPROTO_TCP)
		s->flow.seen.started = 0; /* so are these numbers */
	s->resume_tail = resume_tail;
	s->search = SEARCH_NONE;
	s->late = true;
	return go(skb, TAIL_CLAIM);
}

static __always_inline int forward_known(struct __sk_buff *skb, struct scratch *s,
					 const struct device *device, struct translation *result)
{
	struct tuple *new = &result->to_stack;
	struct packet *p = &s->packet;
	struct device *to = NULL;
	int action = TC_ACT_UNSPEC;

	if (result->path != PATH_STACK && !result->host_device)
		to = next_hop_of_flow(skb, p, &result->to_device, &result->flow->out, &s->hop,
				      result->now);
	if (!to && result->path == PATH_DIRECT_SNAT)
		return claim_late(skb, s, result->flow, TAIL_INGRESS);
	if (to)
		new = &result->to_device;
	account_bytes(result->flow, skb->len - p->l3, p->tcp_flags, result->reply);
	if (rewrite(skb, p, new, to ? p->ttl - 1 : p->ttl)) /* forwarding's only other duty */
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	if (to)
		action = redirect_packet(skb, device, to, &s->hop);
	else if (result->host_device)
		action = deliver_to_host(skb, device, result->host_device);
	else if (result->masqueraded)
		mark_masqueraded(skb, true);
	return finish_rewrite(skb, s, new, action, to ? ETH_HLEN : device->l2);
}

/* VLAN frames are seen again on the VLAN's own device; the stack drops frames for other machines,
 * which a promiscuous device receives. */
static __always_inline bool is_for_others(struct __sk_buff *skb)
{
	return (skb->vlan_present && (skb->vlan_tci & VLAN_VID_MASK)) ||
	       skb->pkt_type == PACKET_OTHERHOST;
}

/* Whether this is one of most packets, on nodes that track no flows. */
static __always_inline bool passes_unseen(struct __sk_buff *skb, const struct device *device)
{
	return !tracks_flows() && is_midstream_v4(skb, device->l2);
}

/* Parses a packet into the scratch buffer. False: it passes. `in`: at ingress. */
static __always_inline bool parse_for(struct __sk_buff *skb, const struct device *device,
				      struct packet *p, bool in)
{
	const struct device *sender = device;
	u32 ifindex = skb->ifindex;

	if (is_for_others(skb) || !parse(skb, device->l2, p))
		return false;
	if (is_icmp_error(p))
		return true;
	if (!p->tuple.to.protocol && p->fragment != LATER)
		return false;
	/* At egress, too, the owner of the slots is the sender: use the device that the packet
	 * arrived on. */
	if (!in && p->fragment != WHOLE) {
		ifindex = skb->ingress_ifindex;
		sender = device_at(ifindex);
	}
	return fragment_ports(p, sender, ifindex);
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

int tc_ingress(struct __sk_buff *skb)
{
	struct device *device = device_at(skb->ifindex);
	struct translation result = {};
	struct scratch *s;
	struct packet *p;
	u32 flags;

	if (!device || passes_unseen(skb, device))
		return TC_ACT_UNSPEC;
	s = get_scratch();
	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	flags = take_resumed(s);
	if (!flags && !parse_for(skb, device, p, true))
		return TC_ACT_UNSPEC;
	if (is_icmp_error(p))
		return go(skb, TAIL_ICMP_IN);
	if (translate_in(&p->tuple, p, p->tcp_flags | flags, &result))
		return forward_known(skb, s, device, &result);
	if (result.masqueraded)
		mark_masqueraded(skb, true);
	if (result.restart == RESTART_CHECK ||
	    (starts_flow(p) && (result.restart || may_begin(&p->tuple.to))))
		return start_flow(skb, s, result.restart, TAIL_CHOOSE);
	if (starts_flow(p))
		count(NOT_A_SERVICE);
	return TC_ACT_UNSPEC;
}

/* Whether a packet that the node's own socket sends is for a Service. NodePorts need no check: they
 * are on addresses of the node, and packets to these leave by no device. */
static __always_inline bool dials_service(struct __sk_buff *skb, struct packet *p)
{
	struct service *service;

	if (!may_be_service(&p->tuple.to))
		return false;
	service = service_at(&p->tuple.to);
	if (service)
		return (service->flags & SERVICE_CLUSTER_IP) ||
		       !is_agent_socket(bpf_get_socket_cookie(skb));
	return cluster_ips.lookup(&p->tuple.to.address);
}

/* Whether this packet begins a connection of the agent to which no Service applies
 * (is_agent_socket()). It may match a flow of another socket of the node that has used the same
 * port through a Service. */
static __always_inline bool is_agent_bypass(struct __sk_buff *skb, struct packet *p)
{
	struct service *service;

	if (p->protocol != IPPROTO_TCP || !starts_flow(p) ||
	    !is_agent_socket(bpf_get_socket_cookie(skb)))
		return false;
	service = service_at(&p->tuple.to);
	return !service || !(service->flags & SERVICE_CLUSTER_IP);
}

int tc_egress(struct __sk_buff *skb)
{
	struct device *device = device_at(skb->ifindex);
	bool masqueraded = false;
	enum egress_result result;
	struct scratch *s;
	struct packet *p;
	struct tuple to;

	if (!device || passes_unseen(skb, device))
		return TC_ACT_UNSPEC;
	s = get_scratch();
	if (!s || !parse_for(skb, device, &s->packet, false))
		return TC_ACT_UNSPEC;
	p = &s->packet;
	if (is_icmp_error(p))
		return go(skb, TAIL_ICMP_OUT);
	result = translate_out(&p->tuple, p, p->tcp_flags, skb->len - p->l3, &to, &masqueraded);
	if (result == EGRESS_REWRITE && rewrite(skb, p, &to, p->ttl))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	if (masqueraded)
		mark_masqueraded(skb, false);
	if (result == EGRESS_REWRITE)
		return finish_rewrite(skb, s, &to, TC_ACT_UNSPEC, device->l2);
	/* What follows is for packets of the node's own sockets, which arrived on no device. */
	if (skb->ingress_ifindex || device->role != ROLE_HOST)
		return TC_ACT_UNSPEC;
	if (result == EGRESS_HOST_FLOW && is_agent_bypass(skb, p))
		return go(skb, TAIL_DELETE_FLOW); /* its later packets must not match that flow */
	if (result == EGRESS_HOST_FLOW ||
	    (result == EGRESS_UNKNOWN && starts_flow(p) && dials_service(skb, p)))
		return go(skb, TAIL_HOST);
	return TC_ACT_UNSPEC;
}

/* Updates the SCTP checksum, after a change of ports. */
int tc_sctp(struct __sk_buff *skb)
{
	struct scratch *s = get_scratch();

	if (!s || change_sctp_check(skb, &s->packet, s->change))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	return s->action;
}

/* ---- ICMP errors -------------------------------------------------------------------------- */

/* Translates an ICMP error and the packet that it quotes. Outer addresses that are an end of the
 * flow are translated too; a router's own address stays. */
static __always_inline int translate_error(struct __sk_buff *skb, bool in)
{
	struct tuple tuple, translated, outer;
	struct translation result = {};
	struct scratch *s = get_scratch();
	struct packet *p, *inner;
	bool stored;

	if (!s)
		return TC_ACT_UNSPEC;
	p = &s->packet;
	inner = &s->inner;
	if (!parse_inner(skb, p, inner) || !inner->tuple.to.protocol)
		return TC_ACT_UNSPEC;
	tuple = reversed(&inner->tuple);
	stored = in ? translate_in(&tuple, inner, FROM_ICMP_ERROR, &result)
		    : translate_out(&tuple, inner, FROM_ICMP_ERROR, 0, &translated,
				    &result.masqueraded) == EGRESS_REWRITE;
	if (result.masqueraded)
		mark_masqueraded(skb, in);
	if (!stored)
		return TC_ACT_UNSPEC;
	if (in && result.path == PATH_DIRECT_SNAT)
		return claim_late(skb, s, result.flow, TAIL_ICMP_IN);
	if (in)
		translated = result.to_stack;
	outer = p->tuple;
	if (same_address(&outer.from.address, &tuple.from.address))
		outer.from.address = translated.from.address;
	if (same_address(&outer.to.address, &tuple.to.address))
		outer.to.address = translated.to.address;
	translated = reversed(&translated);
	if (rewrite_inner(skb, p, inner, &translated) || rewrite(skb, p, &outer, p->ttl))
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	return TC_ACT_UNSPEC;
}

int tc_icmp_in(struct __sk_buff *skb)
{
	return translate_error(skb, true);
}

int tc_icmp_out(struct __sk_buff *skb)
{
	return translate_error(skb, false);
}
