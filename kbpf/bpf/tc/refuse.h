/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Refuses a connection: the packet itself is turned into the reply.
 *
 * TCP: the SYN becomes RST|ACK. Options and data stay in place, which RFC 9293 allows, so each
 * checksum changes only by the words that changed. That also holds for packets whose checksum a
 * device has yet to complete.
 *
 * UDP and SCTP: an ICMP "port unreachable" that quotes the start of the packet. It comes from the
 * destination address, as from a host without that port. SCTP packets whose checksum a device has
 * yet to complete (those of this node's pods) are dropped, see can_refuse().
 *
 * Refusals are rate-limited with the kernel's own limits: may_refuse().
 *
 * A packet that is too long for its next hop becomes an ICMP "fragmentation needed" or "packet too
 * big" in the same way. Like the kernel's, these are not limited.
 */
#pragma once

#include "types.h"
#include "lib/compat.h"
#include "lib/icmp.h"
#include "lib/packet.h"
#include "lib/rewrite.h"
#include "lib/sctp.h"
#include "lib/token.h"
#include "tc/devices.h"
#include "tc/entries.h"
#include "tc/hop.h"
#include "tc/scratch.h"
#include "tc/tails.h"

/* Index: enum refusal_bucket. Written by the agent when it starts. */
BPF_TABLE("array", u32, struct refusal_limit, refusal_limits, REFUSAL_LIMITS);

/* key_of_owner(), with the index of a limit XORed into its first byte (may_refuse()) -> `spent` of
 * that sender's token bucket. Full: the oldest is evicted, so that sender may get a whole burst
 * again; the bucket of the node still applies. */
BPF_TABLE("lru_hash", struct address, u64, refused_peers, 64);

#define REPLY_TTL 64 /* of packets that originate here */
#define TCP_SEQUENCE 4
#define TCP_ACKNOWLEDGEMENT 8
#define TCP_OFFSET_FLAGS 12

static __always_inline int swap_link(struct __sk_buff *skb, u32 l2)
{
	u8 from[6], to[6];

	if (!l2)
		return 0;
	if (bpf_skb_load_bytes(skb, 0, to, 6) || bpf_skb_load_bytes(skb, 6, from, 6))
		return -1;
	return bpf_skb_store_bytes(skb, 0, from, 6, 0) || bpf_skb_store_bytes(skb, 6, to, 6, 0);
}

static __always_inline int replace_word(struct __sk_buff *skb, const struct packet *p, u32 offset,
					__be32 old, __be32 new)
{
	if (bpf_l4_csum_replace(skb, p->l4 + TCP_CHECK, old, new, 4))
		return -1;
	return bpf_skb_store_bytes(skb, p->l4 + offset, &new, sizeof(new), 0);
}

/* Turns a segment into a reset between these ends, with number 0. `flags`: with TCP_ACK it
 * acknowledges the segment. */
static __always_inline int make_reset(struct __sk_buff *skb, struct packet *p, struct tuple *ends,
				      u8 flags)
{
	__be32 acknowledgement, next = flags & TCP_ACK ? __builtin_bswap32(p->tcp.next) : 0;
	u8 before[2], after[2];

	if (bpf_skb_load_bytes(skb, p->l4 + TCP_ACKNOWLEDGEMENT, &acknowledgement, 4) ||
	    bpf_skb_load_bytes(skb, p->l4 + TCP_OFFSET_FLAGS, before, 2))
		return -1;
	after[0] = before[0];
	after[1] = TCP_RST | flags;
	if (replace_word(skb, p, TCP_ACKNOWLEDGEMENT, acknowledgement, next) ||
	    replace_word(skb, p, TCP_SEQUENCE, __builtin_bswap32(p->tcp.sequence), 0) ||
	    bpf_l4_csum_replace(skb, p->l4 + TCP_CHECK, *(__be16 *)before, *(__be16 *)after, 2) ||
	    bpf_skb_store_bytes(skb, p->l4 + TCP_OFFSET_FLAGS, after, 2, 0))
		return -1;
	return rewrite(skb, p, ends, REPLY_TTL);
}

static __always_inline int refuse_tcp(struct __sk_buff *skb, struct packet *p)
{
	struct tuple reply = reversed(&p->tuple);

	return make_reset(skb, p, &reply, TCP_ACK);
}

/* A backend has answered a new client's SYN for an older connection (judge_answer()). The client
 * does not hear of it, since that may be another's connection. But conntrack, on this node and on
 * the backend's, waits for the answer to the SYN. If the client now reaches the backend directly
 * from the same port, conntrack calls that connection invalid. So the answer becomes the client's
 * reset. Conntrack takes number 0 for right if nothing has answered the SYN (tcp_in_window()). The
 * backend expects another number, and ignores it. */
static __always_inline int reset_handshake(struct __sk_buff *skb, struct scratch *s,
					   const struct device *device)
{
	struct packet *p = &s->packet;
	struct tuple ends = reversed(&p->tuple);
	struct flow *flow = flow_between(&p->tuple), *original = NULL;
	bool leaves = s->resume_tail == TAIL_EGRESS; /* conntrack has seen it, not translated */
	struct device *port;
	u32 l3 = p->l3;

	if (flow && flow->path == PATH_STACK && !leaves)
		original = entry_at(flow, DIRECTION_ORIGINAL);
	if (original) {
		ends.from = flow->client;
		ends.from.port = flow->client_port;
	}
	if (drop_priority_tag(skb) || make_reset(skb, p, &ends, 0))
		return TC_ACT_SHOT;
	if (original) { /* not by a port of a bridge, which would learn the backend's MAC address */
		port = device_at(original->arrival);
		return deliver_to_host(skb, device, routing_ifindex(port, original->arrival), &l3);
	}
	if (swap_link(skb, device->l2))
		return TC_ACT_SHOT;
	return bpf_redirect(skb->ifindex, leaves ? BPF_F_INGRESS : 0);
}

/* The longest quote in an ICMP error: an IP header with options (60 bytes in IPv4) or extension
 * headers (as many as fit in IPv6), and the first bytes behind it. For SCTP those are its header
 * and the INIT chunk up to the tag, without which the receiver ignores the error (RFC 9260, section
 * 10). */
#define MAX_QUOTE4 80
#define MAX_QUOTE6 116
#define QUOTED_PORTS 8
#define QUOTED_TCP 20 /* a device may have to complete the checksum in the quote */
#define QUOTED_SCTP (SCTP_HEADER + 8)
#define MIN_QUOTE 28
#define MAX_IP4_HEADER 60

struct icmp_header {
	u8 type;
	u8 code;
	__sum16 check;
	__be32 rest; /* the MTU, if the packet is too long */
};

/* The sum of the pseudo header, which is in the checksum field as long as a device has to
 * complete it. The 0xffff of v4-mapped addresses adds nothing in ones' complement. */
static __always_inline __sum16 pseudo_sum(const struct packet *p, __be16 length, u8 protocol)
{
	struct address addresses[2] = {p->tuple.from.address, p->tuple.to.address};
	__sum16 sum = ~fold(bpf_csum_diff(NULL, 0, (__be32 *)addresses, sizeof(addresses), 0));

	return ~fold((u32)sum + length + __builtin_bswap16(protocol));
}

/* If the UDP or TCP checksum is still partial, the device will complete it inside the ICMP error
 * and change bytes that the ICMP checksum covers; only the sum shows that it is partial. Preset it
 * to the fixed point of that calculation over the quoted header (half of the complement of the
 * other words), so that it comes out unchanged. `words`: the header; `at`: the index of the
 * checksum; `length`: that of the whole segment. */
static __always_inline int fix_partial_words(struct __sk_buff *skb, const struct packet *p,
					     __be16 *words, u32 size, u32 at, __be16 length,
					     u8 protocol)
{
	u32 half;

	if (words[at] != pseudo_sum(p, length, protocol))
		return 0;
	words[at] = 0;
	half = fold(bpf_csum_diff(NULL, 0, (__be32 *)words, size, 0));
	half = half ? (half + (half & 1) * 0xffff) / 2 : 0xffff;
	words[at] = half;
	return bpf_skb_store_bytes(skb, p->l4 + 2 * at, &words[at], sizeof(words[at]), 0);
}

static __always_inline int fix_partial_check(struct __sk_buff *skb, const struct packet *p)
{
	__be16 udp[QUOTED_PORTS / 2], tcp[QUOTED_TCP / 2];

	if (p->protocol == IPPROTO_UDP)
		return bpf_skb_load_bytes(skb, p->l4, udp, sizeof(udp)) ||
		       fix_partial_words(skb, p, udp, sizeof(udp), UDP_CHECK / 2, udp[2],
					 IPPROTO_UDP);
	if (p->protocol == IPPROTO_TCP)
		return bpf_skb_load_bytes(skb, p->l4, tcp, sizeof(tcp)) ||
		       fix_partial_words(skb, p, tcp, sizeof(tcp), TCP_CHECK / 2,
					 __builtin_bswap16(ip_length(skb, p) - (p->l4 - p->l3)),
					 IPPROTO_TCP);
	return 0;
}

/* Whether the stack would accept this IP header. It discards packets with a wrong checksum or
 * length without an answer (RFC 1122, 3.2.1.2): their source may be wrong, too. With GSO the length
 * may be 0 (BIG TCP). */
static __always_inline bool is_valid_header(struct __sk_buff *skb, const struct packet *p)
{
	u64 size = p->l4 - p->l3;
	u32 length = ip_length(skb, p);
	u8 header[MAX_IP4_HEADER] = {};

	if (!skb->gso_size && (length < size || length > skb->len - p->l3))
		return false;
	if (p->v6)
		return true;
	/* Two separate comparisons, as in quote_packet(). */
	if (size > sizeof(header))
		return false;
	barrier_var(size);
	if (size < sizeof(struct ip4_header) || bpf_skb_load_bytes(skb, p->l3, header, size))
		return false;
	return !fold(bpf_csum_diff(NULL, 0, (__be32 *)header, sizeof(header), 0));
}

static __always_inline u32 quoted_bytes(u8 protocol)
{
	if (protocol == IPPROTO_TCP)
		return QUOTED_TCP;
	return protocol == IPPROTO_SCTP ? QUOTED_SCTP : QUOTED_PORTS;
}

/* Truncates the packet to what an ICMP error quotes, makes room for new headers in front of it, and
 * reads the quote into `quote`, whose rest stays 0. Returns its length, or 0 on failure. */
static __always_inline u32 quote_packet(struct __sk_buff *skb, const struct packet *p, u8 *quote,
					u32 most, u32 room)
{
	u64 length = p->l4 - p->l3 + quoted_bytes(p->protocol);

	/* Two separate comparisons: the compiler would merge them into one, of which the verifier
	 * does not see the lower bound. */
	if (length > most)
		return 0;
	barrier_var(length);
	if (length < MIN_QUOTE)
		return 0;
	if (fix_partial_check(skb, p) || bpf_skb_load_bytes(skb, p->l3, quote, length) ||
	    bpf_skb_change_tail(skb, p->l3 + length, 0) ||
	    bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_MAC, 0))
		return 0;
	return length;
}

static __always_inline int refuse_v4(struct __sk_buff *skb, const struct packet *p, u32 mtu)
{
	struct {
		struct ip4_header ip;
		struct icmp_header icmp;
	} head = {};
	u8 quote[MAX_QUOTE4] = {};
	u32 length = quote_packet(skb, p, quote, sizeof(quote), sizeof(head));

	if (!length)
		return -1;
	head.icmp.type = ICMP_DEST_UNREACH;
	head.icmp.code = mtu ? ICMP_FRAG_NEEDED : ICMP_PORT_UNREACH;
	head.icmp.rest = __builtin_bswap32(mtu);
	head.icmp.check = fold(
		bpf_csum_diff(NULL, 0, (__be32 *)quote, sizeof(quote),
			      bpf_csum_diff(NULL, 0, (__be32 *)&head.icmp, sizeof(head.icmp), 0)));
	head.ip.version_length = 0x45;
	head.ip.total = __builtin_bswap16(sizeof(head) + length);
	head.ip.ttl = REPLY_TTL;
	head.ip.protocol = IPPROTO_ICMP;
	head.ip.source = p->tuple.to.address.word[3];
	head.ip.destination = p->tuple.from.address.word[3];
	head.ip.check = fold(bpf_csum_diff(NULL, 0, (__be32 *)&head.ip, sizeof(head.ip), 0));
	return bpf_skb_store_bytes(skb, p->l3, &head, sizeof(head), 0);
}

static __always_inline int refuse_v6(struct __sk_buff *skb, const struct packet *p, u32 mtu)
{
	struct {
		struct ip6_header ip;
		struct icmp_header icmp;
	} head = {};
	__be32 pseudo[2];
	u8 quote[MAX_QUOTE6] = {};
	u32 length = quote_packet(skb, p, quote, sizeof(quote), sizeof(head));
	__wsum sum;

	if (!length)
		return -1;
	head.ip.version_class_label = __builtin_bswap32(0x60000000);
	head.ip.payload = __builtin_bswap16(sizeof(head.icmp) + length);
	head.ip.next = IPPROTO_ICMPV6;
	head.ip.hops = REPLY_TTL;
	head.ip.source = p->tuple.to.address;
	head.ip.destination = p->tuple.from.address;
	head.icmp.type = mtu ? ICMPV6_PKT_TOOBIG : ICMPV6_DEST_UNREACH;
	head.icmp.code = mtu ? 0 : ICMPV6_PORT_UNREACH;
	head.icmp.rest = __builtin_bswap32(mtu);
	pseudo[0] = __builtin_bswap32(sizeof(head.icmp) + length);
	pseudo[1] = __builtin_bswap32(IPPROTO_ICMPV6);
	sum = bpf_csum_diff(NULL, 0, pseudo, sizeof(pseudo), 0);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&head.ip.source, 32, sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&head.icmp, sizeof(head.icmp), sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)quote, sizeof(quote), sum);
	head.icmp.check = fold(sum);
	return bpf_skb_store_bytes(skb, p->l3, &head, sizeof(head), 0);
}

/* Whether the packet can be refused. A device would complete a partial SCTP checksum inside the
 * ICMP error, and for a CRC there is no fixed point as for UDP; an error to a socket of the node
 * (`local`) passes no device. Nor does a later fragment show to which socket it belongs. */
static __always_inline bool can_refuse(struct __sk_buff *skb, const struct packet *p, bool local)
{
	u32 check = 0;

	if (p->protocol == IPPROTO_SCTP)
		bpf_skb_load_bytes(skb, p->l4 + SCTP_CHECK, &check, sizeof(check));
	return p->fragment != LATER && (p->protocol != IPPROTO_SCTP || check || local);
}

static __always_inline int refuse_with_icmp(struct __sk_buff *skb, const struct packet *p, u32 mtu)
{
	return p->v6 ? refuse_v6(skb, p, mtu) : refuse_v4(skb, p, mtu);
}

/* Takes a token of a sender. One without a bucket has a whole burst. */
static __always_inline bool take_peer_token(const struct address *peer,
					    const struct refusal_limit *limit, u64 now)
{
	u64 *spent = refused_peers.lookup(peer), first = now + limit->interval;

	if (spent)
		return take_token(spent, limit->interval, limit->burst, now);
	refused_peers.update(peer, &first);
	return true;
}

/* Whether the limits allow one more refusal. A sender above its own limit takes no token of the
 * node. */
static __always_inline bool may_refuse(const struct packet *p, u32 owner, u64 now)
{
	struct address sender = key_of_owner(owner, &p->tuple.from.address);
	bool tcp = p->protocol == IPPROTO_TCP;
	u32 which = tcp ? LIMIT_RESET : LIMIT_ICMP;
	u32 peer = tcp ? LIMIT_PEER_RESET : p->v6 ? LIMIT_PEER6 : LIMIT_PEER4;
	struct refusal_limit *all = refusal_limits.lookup(&which);
	struct refusal_limit *each = refusal_limits.lookup(&peer);

	sender.word[0] ^= peer << 4; /* no sender has the address that this makes */
	if (each && each->interval && !take_peer_token(&sender, each, now))
		return false;
	return !all || !all->interval || take_token(&all->spent, all->interval, all->burst, now);
}

/* Ends the refusal of a packet, and reports how. */
static __always_inline int finish_refusal(const struct scratch *s, int action, enum reason reason)
{
	struct event event = {};

	if (!s->mtu && is_monitored()) {
		event.client = s->packet.tuple.from;
		event.frontend = s->packet.tuple.to;
		event.service = s->service;
		event.reason = reason;
		report(&event);
	}
	return finish(action, reason);
}

/* Refuses a packet: sends the refusal back by the device that the packet came from, or, for the
 * node's own sockets, delivers it at ingress of the device that they send by. */
int tc_refuse(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = device_at(ifindex);
	struct scratch *s = get_scratch();
	enum reason reason = NOT_REWRITTEN;
	int action = TC_ACT_SHOT;
	struct packet *p;

	if (!device || !s)
		return finish(TC_ACT_SHOT, NOT_REWRITTEN);
	p = &s->packet;
	if (s->reason == INVALID)
		return reset_handshake(skb, s, device);
	if (!is_valid_header(skb, p))
		return TC_ACT_UNSPEC; /* the stack discards it */
	if (!can_refuse(skb, p, s->mtu && !skb->ingress_ifindex)) {
		reason = s->reason;
	} else if (!s->mtu && !may_refuse(p, s->owner, now_ns())) {
		reason = RATE_LIMITED;
	} else if (!drop_priority_tag(skb) &&
		   !(p->protocol == IPPROTO_TCP && !s->mtu ? refuse_tcp(skb, p)
							   : refuse_with_icmp(skb, p, s->mtu)) &&
		   !swap_link(skb, device->l2)) {
		action = bpf_redirect(ifindex, skb->ingress_ifindex ? 0 : BPF_F_INGRESS);
		reason = s->reason;
	}
	return finish_refusal(s, action, reason);
}
