/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* What the programs do with a packet first: they parse it, and find the ports of fragments. */
#pragma once

#include "types.h"
#include "lib/hash.h"
#include "lib/icmp.h"
#include "lib/packet.h"
#include "tc/conntrack.h"
#include "tc/devices.h"
#include "tc/flow.h"
#include "tc/tails.h"

#define ETH_P_8021Q 0x8100
#define ETH_P_8021AD 0x88a8
#define VLAN_VID_MASK 0x0fff
#define INNER_TAG 14       /* offset: the outer tag is in the skb's metadata */
#define LINK_LOCAL4 0xfea9 /* 169.254, as the lower half of an address in network byte order */
#define PACKET_HOST 0
#define PACKET_OTHERHOST 3
#define PACKET_LOOPBACK 5 /* the node's own multicast, without a link-layer header */

/* client slot -> the ports of a datagram, for its later fragments. Full: the oldest is evicted, and
 * the remaining fragments of its datagram pass untranslated. */
BPF_TABLE("lru_hash", struct client_slot, struct first_fragment, fragments, 64);

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
 * False: the first fragment is not known, or no flow has such a source. Datagrams with consecutive
 * ids use different slots. */
static __always_inline bool fragment_ports(struct packet *p, const struct device *in, u32 ifindex)
{
	u32 id = __builtin_bswap32(p->id); /* of IPv4: in the upper half */
	struct first_fragment fragment = {.id = p->id}, *stored;
	struct client_slot slot;

	if (p->fragment == WHOLE)
		return true;
	if (is_martian(&p->tuple.from.address))
		return false;
	fragment.hash = hash_of_fragments(p);
	slot.owner = key_of_owner(owner_of_packet(in, ifindex), &p->tuple.from.address);
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
	set_port(&p->tuple.from, stored->ports.source, p->protocol);
	set_port(&p->tuple.to, stored->ports.destination, p->protocol);
	return true;
}

/* Whether a frame is addressed to this device; on a port of a bridge, to the bridge. */
static __always_inline bool has_own_mac(struct __sk_buff *skb, const struct device *device)
{
	const u32 *own = (const u32 *)device->mac; /* and 2 bytes of padding, which are 0 */
	u32 to[2] = {};

	return !bpf_skb_load_bytes(skb, 0, to, sizeof(device->mac)) && to[0] == own[0] &&
	       to[1] == own[1];
}

#define HANDLED_AT_PORT 0x6b62 /* value of skb->tc_index */

/* At ingress of a bridge with br_netfilter, or of its port: whether the packet passes. Conntrack
 * sees it between the two, so it has to be translated at the port. It is marked there, and passes
 * the bridge's program, for which it may look like one to be translated again. A sender cannot
 * forge the mark, since a port overwrites it. */
static __always_inline bool passes_bridge(struct __sk_buff *skb, const struct device *device)
{
	if (device->bridge == skb->ifindex) {
		if (skb->tc_index != HANDLED_AT_PORT)
			return false;
		skb->tc_index = 0;
		return true;
	}
	if (skb->pkt_type == PACKET_OTHERHOST) {
		if (has_own_mac(skb, device))
			bpf_skb_change_type(skb, PACKET_HOST); /* as the bridge will do */
		else if (!uses_conntrack())
			return true;
	}
	skb->tc_index = HANDLED_AT_PORT;
	return false;
}

/* VLAN frames are seen again on the VLAN's own device. Of the others, only frames to this machine
 * are handled at ingress (`in`): the stack forwards and answers no others. A promiscuous device
 * receives frames to other machines, and each machine of a segment would answer a broadcast (RFC
 * 1122, 3.2.2). conntrack sees broadcasts nevertheless, and all frames at ports of a bridge. So
 * beside it they are parsed, too: answers_refused(). */
static __always_inline bool is_for_others(struct __sk_buff *skb, bool in)
{
	if (skb->vlan_present && (skb->vlan_tci & VLAN_VID_MASK))
		return true;
	if (in)
		return skb->pkt_type == PACKET_LOOPBACK ||
		       (skb->pkt_type != PACKET_HOST && !uses_conntrack());
	return skb->pkt_type == PACKET_OTHERHOST;
}

/* Whether conntrack will see a packet that this program cannot read: the kernel removes a first
 * priority tag (VLAN 0) before it, and a second one behind it (__netif_receive_skb_core()). */
static __always_inline bool has_hidden_packet(struct __sk_buff *skb)
{
	__be16 inner;

	return (skb->protocol == __builtin_bswap16(ETH_P_8021Q) ||
		skb->protocol == __builtin_bswap16(ETH_P_8021AD)) &&
	       skb->vlan_present && !(skb->vlan_tci & VLAN_VID_MASK) &&
	       !bpf_skb_load_bytes(skb, INNER_TAG, &inner, sizeof(inner)) &&
	       !(inner & __builtin_bswap16(VLAN_VID_MASK)) && uses_conntrack();
}

/* Whether a packet arrives in the name of the node, and conntrack could take it for an answer of
 * the node to a packet behind it in the same batch, which no program has seen yet. Others may have
 * the node's link-local addresses, its own multicast may come back, and what a bridge passes on may
 * be the node's. */
static __always_inline bool pretends_to_be_node(struct __sk_buff *skb, const struct device *device,
						const struct tuple *t)
{
	const struct address *from = &t->from.address;

	return uses_conntrack() && is_nodes_own(from) && !is_martian(&t->to.address) &&
	       !(is_v4(from) ? (from->word[3] & 0xffff) == LINK_LOCAL4 : is_link_local(from)) &&
	       (skb->pkt_type != PACKET_OTHERHOST || device->role == ROLE_POD);
}

/* Leaves a packet at a port to the bridge's program. */
static __always_inline int leave_to_bridge(struct __sk_buff *skb)
{
	skb->tc_index = 0;
	return TC_ACT_UNSPEC;
}

/* Offset of the IP header of a packet on a tunnel. Headers of the outer packet may precede it: at
 * ingress before v5.14 (needs_stack()), and on gre devices without a remote address at ingress and
 * at egress. Only the kernel knows their length; what follows them is as long as the IP header
 * says. That is 0 in a packet of more than 64 KiB (BIG TCP), which has no such headers. Without
 * them, bytes behind the end of the packet must not look like some: its first bytes are then those
 * of the IP header. In an outer header they differ, since it is for a longer packet. */
static __always_inline u32 offset_in_tunnel(struct __sk_buff *skb)
{
	bool v6 = skb->protocol == __builtin_bswap16(ETH_P_IPV6);
	u64 first = 0, own = 1;
	__be16 length = 0;

	bpf_skb_load_bytes(skb, 0, &first, sizeof(first));
	load_bytes_relative(skb, 0, &own, sizeof(own), BPF_HDR_START_NET);
	if (first == own)
		return 0;
	load_bytes_relative(skb, v6 ? 4 : 2, &length, sizeof(length), BPF_HDR_START_NET);
	return length ? skb->len - __builtin_bswap16(length) - (v6 ? 40 : 0) : 0;
}

/* Parses a packet into the scratch buffer. False: it passes. `in`: at ingress. `judged`: it may be
 * of a flow in `unconfirmed`. Of packets without ports (the protocol in their tuple is 0), it
 * returns true only for ICMP errors, those that hide their ports and, at ingress, fragments that
 * are no flow's. */
static __always_inline bool parse_for(struct __sk_buff *skb, const struct device *device,
				      struct packet *p, bool in, bool judged)
{
	const struct device *sender = device;
	u32 ifindex = skb->ifindex, l2 = device->l2;
	struct ip4_tcp plain;

	if (is_for_others(skb, in))
		return false;
	if (is_plain_tcp(skb, l2, &plain)) {
		struct tuple tuple = tuple_of_plain(&plain);

		if (!(plain.flags & (TCP_SYN | TCP_RST)) && !may_have_flow(&tuple) &&
		    !(judged && (in ? answers_refused(&tuple) || is_nodes_own(&tuple.from.address)
				    : find_unconfirmed(&tuple.from, &tuple.to) != NULL)))
			return false;
		set_plain(skb, p, l2, &plain, &tuple);
		return true;
	}
	if (device->flags & DEVICE_TUNNEL)
		l2 = offset_in_tunnel(skb);
	if (!parse(skb, l2, p))
		return false;
	if (is_icmp_error(p) || has_hidden_ports(p))
		return true;
	if (!p->tuple.to.protocol && p->fragment != LATER)
		return false;
	/* At egress, too, the owner of the slots is the sender: use the device that the packet
	 * arrived on. */
	if (!in && p->fragment != WHOLE) {
		ifindex = skb->ingress_ifindex;
		sender = device_at(ifindex);
	}
	if (fragment_ports(p, sender, ifindex) && !(in && is_forged_fragment(p)))
		return true;
	p->tuple.from.protocol = 0;
	return in;
}
