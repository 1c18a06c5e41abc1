/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Parses a packet into `struct packet`: the offsets of its headers, and its addresses and ports.
 *
 * Headers are read with bpf_skb_load_bytes(), which handles non-linear packets and gives the
 * verifier constant sizes. Wire formats are declared here as far as they are needed, since the
 * header tree in include/ has none.
 */
#pragma once

#include "types.h"
#include "lib/addr.h"

#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define ETH_HLEN 14

#define IPPROTO_ICMP 1
#define IPPROTO_HOPOPTS 0
#define IPPROTO_ROUTING 43
#define IPPROTO_FRAGMENT 44
#define IPPROTO_AH 51
#define IPPROTO_ICMPV6 58
#define IPPROTO_DSTOPTS 60
#define IPPROTO_SCTP 132

#define IP_DF 0x4000
#define IP_MF 0x2000
#define IP_OFFSET 0x1fff
#define IP6_OFFSET 0xfff8
#define MAX_EXTENSION_HEADERS 4 /* at most this many IPv6 extension headers are parsed */

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10
#define SCTP_HEADER 12
#define SCTP_CID_INIT 1
#define SCTP_CID_INIT_ACK 2
#define SCTP_CID_ABORT 6
#define SCTP_CID_ERROR 9
#define SCTP_CID_SHUTDOWN_COMPLETE 14
/* Not TCP flags. In both cases the flow is not updated. */
#define FROM_ICMP_ERROR 0x100 /* the flow was looked up for an ICMP error, not for a segment */
#define JUDGED 0x400          /* the packet has updated its flow as far as it may */

struct ip4_header {
	u8 version_length; /* version << 4 | header length in words */
	u8 tos;
	__be16 total;
	__be16 id;
	__be16 fragment;
	u8 ttl;
	u8 protocol;
	__sum16 check;
	__be32 source;
	__be32 destination;
};

/* The start of most packets, read with one call. */
struct ip4_tcp {
	struct ip4_header ip;
	struct ports ports;
	__be32 sequence;
	__be32 acknowledgement;
	u8 length;
	u8 flags;
	__be16 window;
};

struct ip6_header {
	__be32 version_class_label;
	__be16 payload;
	u8 next;
	u8 hops;
	struct address source;
	struct address destination;
};

struct ip6_extension {
	u8 next;
	u8 words;      /* length in units of 8 bytes, without the first 8 */
	__be16 offset; /* fragment header only: offset << 3 | more */
	__be32 id;     /* fragment header only */
};

enum fragment {
	WHOLE = 0,
	FIRST = 1,
	LATER = 2, /* has no ports: they are those of the first fragment */
};

/* Source and destination of a packet. `from.protocol` and `to.protocol` are always the same. */
struct tuple {
	struct target from;
	struct target to;
};

/* Sets port and protocol. A target is compared and copied in words, and the CPU delays a load that
 * spans several stores. */
static __always_inline void set_port(struct target *t, __be16 port, u8 protocol)
{
	*(u32 *)&t->port = port | (u32)protocol << 16;
}

/* The numbers of a TCP segment, in host byte order. */
struct segment {
	u32 sequence;
	u32 next;   /* the sequence number after it */
	u32 ack;    /* 0 without ACK */
	u32 window; /* as in the packet, without scale */
};

struct packet {
	struct tuple tuple;
	u32 l3; /* offset of the IP header */
	u32 l4; /* offset of the header behind it */
	u32 id; /* of fragments */
	u8 v6;
	u8 protocol; /* also set for protocols without ports */
	u8 fragment;
	u8 tcp_flags;
	u8 icmp_type; /* of ICMP and ICMPv6 */
	u8 ttl;       /* or hop limit */
	u8 tos;       /* of IPv4 */
	u8 pad;
	__sum16 check; /* of IPv4's header */
	u16 pad2;
	union {
		struct segment tcp;
		struct sctp_tags sctp; /* its own tag, and `next`: the tag that an INIT or INIT-ACK
					  announces */
	};
};

/* Length of the packet from the IP header on, according to that header. */
static __always_inline u32 ip_length(struct __sk_buff *skb, const struct packet *p)
{
	__be16 total = 0;

	bpf_skb_load_bytes(skb, p->l3 + (p->v6 ? 4 : 2), &total, sizeof(total));
	return __builtin_bswap16(total) + (p->v6 ? 40 : 0);
}

/* The length that a header gives for what begins at `from`; 0 in a packet of more than 64 KiB (BIG
 * TCP), which ends with the buffer. */
static __always_inline u32 length_of(struct __sk_buff *skb, u32 from, __be16 given)
{
	return given ? __builtin_bswap16(given) : skb->len - from;
}

/* Maps the first chunk of an SCTP packet to TCP flags: SYN begins an association. ACK means that
 * only a peer of the association can send it, since it has to know a cookie that cannot be
 * guessed. */
static __always_inline u8 sctp_flags(u8 chunk)
{
	if (chunk == SCTP_CID_INIT)
		return TCP_SYN;
	if (chunk == SCTP_CID_INIT_ACK || chunk == SCTP_CID_ABORT || chunk == SCTP_CID_ERROR ||
	    chunk == SCTP_CID_SHUTDOWN_COMPLETE)
		return 0;
	return TCP_ACK;
}

/* `bytes`: length of the packet behind its IP header and extension headers. SYN and FIN take one
 * sequence number each. Without ACK the acknowledgement number is 0. This is arithmetic, since the
 * verifier explores both sides of a branch. */
static __always_inline struct segment numbers_of(__be32 sequence, __be32 ack, u8 offset, u8 flags,
						 __be16 window, u32 bytes)
{
	struct segment n = {
		.sequence = __builtin_bswap32(sequence),
		.next = __builtin_bswap32(sequence) + bytes - (offset >> 4) * 4 +
			(flags & TCP_FIN) + ((flags & TCP_SYN) >> 1),
		.ack = __builtin_bswap32(ack) & -(u32)(flags / TCP_ACK % 2),
		.window = __builtin_bswap16(window),
	};

	return n;
}

/* The TCP header from the sequence number on. */
struct tcp_rest {
	__be32 sequence;
	__be32 ack;
	u8 offset;
	u8 flags;
	__be16 window;
};

/* `bytes`: as for numbers_of(). What a frame has behind them is no part of the packet. */
static __always_inline bool parse_ports(struct __sk_buff *skb, struct packet *p, u32 bytes)
{
	struct tcp_rest rest = {};
	struct ports ports;

	if ((p->protocol == IPPROTO_ICMP || p->protocol == IPPROTO_ICMPV6) && p->fragment != LATER)
		return !bpf_skb_load_bytes(skb, p->l4, &p->icmp_type, 1);
	if (p->protocol != IPPROTO_TCP && p->protocol != IPPROTO_UDP && p->protocol != IPPROTO_SCTP)
		return true;
	set_port(&p->tuple.from, 0, p->protocol);
	set_port(&p->tuple.to, 0, p->protocol);
	if (p->fragment == LATER)
		return true;
	if (bpf_skb_load_bytes(skb, p->l4, &ports, sizeof(ports)))
		return false;
	set_port(&p->tuple.from, ports.source, p->protocol);
	set_port(&p->tuple.to, ports.destination, p->protocol);
	if (p->protocol == IPPROTO_SCTP) { /* its first chunk is mapped to TCP flags */
		u8 chunk = 0;

		bpf_skb_load_bytes(skb, p->l4 + SCTP_HEADER, &chunk, 1);
		p->tcp_flags = sctp_flags(chunk);
		bpf_skb_load_bytes(skb, p->l4 + 4, &p->sctp.tag, sizeof(p->sctp.tag));
		if (p->sctp.tag) /* then it is no INIT (RFC 9260, 8.5.1) */
			p->tcp_flags &= ~TCP_SYN;
		if (chunk == SCTP_CID_INIT || chunk == SCTP_CID_INIT_ACK)
			bpf_skb_load_bytes(skb, p->l4 + SCTP_HEADER + 4, &p->sctp.next,
					   sizeof(p->sctp.next));
	}
	if (p->protocol == IPPROTO_TCP && bytes >= 4 + sizeof(rest) &&
	    /* the quote in an ICMP error may be too short */
	    !bpf_skb_load_bytes(skb, p->l4 + 4, &rest, sizeof(rest))) {
		p->tcp_flags = rest.flags;
		p->tcp = numbers_of(rest.sequence, rest.ack, rest.offset, rest.flags, rest.window,
				    bytes);
	}
	return true;
}

#define TCP_HEADER 20
#define TCP_WORDS 12   /* offset of the header's length, in words (upper 4 bits) */
#define TCP_OPTIONS 12 /* at most this many are read */
#define TCP_OPTION_SCALE 3
#define MAX_SCALE 14
#define HAS_SCALE 0x80

/* HAS_SCALE and the shift of the window scale option of a SYN; 0 if it has none. */
static __always_inline u8 window_scale(struct __sk_buff *skb, const struct packet *p)
{
	u32 at = p->l4 + TCP_HEADER;
	u8 words = 0; /* the header's length, in the upper half */

	bpf_skb_load_bytes(skb, p->l4 + TCP_WORDS, &words, 1);
	for (int i = 0; i < TCP_OPTIONS && at < p->l4 + (words >> 4) * 4; i++) {
		u8 option[3]; /* kind, length, and the first byte of the value */

		if (bpf_skb_load_bytes(skb, at, option, sizeof(option)) || !option[0])
			break;
		if (option[0] == TCP_OPTION_SCALE)
			return HAS_SCALE | (option[2] > MAX_SCALE ? MAX_SCALE : option[2]);
		at += option[0] == 1 ? 1 : option[1];
	}
	return 0;
}

/* Whether this is like most packets: TCP over IPv4, without options, not a fragment. Then its
 * headers are in `start`, read with one call. */
static __always_inline bool is_plain_tcp(struct __sk_buff *skb, u32 l3, struct ip4_tcp *start)
{
	return skb->protocol == __builtin_bswap16(ETH_P_IP) &&
	       !bpf_skb_load_bytes(skb, l3, start, sizeof(*start)) &&
	       start->ip.version_length == 0x45 && start->ip.protocol == IPPROTO_TCP &&
	       !(start->ip.fragment & __builtin_bswap16(IP_OFFSET | IP_MF));
}

static __always_inline struct tuple tuple_of_plain(const struct ip4_tcp *start)
{
	struct tuple t;

	t.from.address = v4_mapped(start->ip.source);
	t.to.address = v4_mapped(start->ip.destination);
	set_port(&t.from, start->ports.source, IPPROTO_TCP);
	set_port(&t.to, start->ports.destination, IPPROTO_TCP);
	return t;
}

/* Does what parse() does for such a packet. */
static __always_inline void set_plain(struct __sk_buff *skb, struct packet *p, u32 l3,
				      const struct ip4_tcp *start, const struct tuple *tuple)
{
	u32 length = length_of(skb, l3, start->ip.total);

	__builtin_memset(p, 0, sizeof(*p));
	p->tuple = *tuple;
	p->l3 = l3;
	p->l4 = l3 + sizeof(start->ip);
	p->protocol = IPPROTO_TCP;
	p->tcp_flags = start->flags;
	p->ttl = start->ip.ttl;
	p->tos = start->ip.tos;
	p->check = start->ip.check;
	p->tcp = numbers_of(start->sequence, start->acknowledgement, start->length, start->flags,
			    start->window, length - sizeof(start->ip));
}

#define IP_OPTIONS 40 /* bytes, and so the number of options at most */
#define IP_OPTION_LSRR 131
#define IP_OPTION_SSRR 137

/* Whether the sender wants to choose the route of an IPv4 packet. The stack drops such packets
 * unless accept_source_route is set; a redirect would not. */
static __always_inline bool has_source_route(struct __sk_buff *skb, const struct packet *p)
{
	u32 at = p->l3 + sizeof(struct ip4_header);

	if (p->v6)
		return false;
	for (int i = 0; i < IP_OPTIONS; i++) {
		u8 option[2]; /* kind, length */

		if (at >= p->l4 || bpf_skb_load_bytes(skb, at, option, sizeof(option)) ||
		    !option[0])
			return false;
		if (option[0] == IP_OPTION_LSRR || option[0] == IP_OPTION_SSRR)
			return true;
		at += option[0] == 1 || !option[1] ? 1 : option[1];
	}
	return false;
}

static __always_inline bool parse_v4(struct __sk_buff *skb, struct packet *p)
{
	struct ip4_header ip;
	u16 fragment;

	if (bpf_skb_load_bytes(skb, p->l3, &ip, sizeof(ip)))
		return false;
	p->tuple.from.address = v4_mapped(ip.source);
	p->tuple.to.address = v4_mapped(ip.destination);
	p->protocol = ip.protocol;
	p->ttl = ip.ttl;
	p->tos = ip.tos;
	p->check = ip.check;
	if ((ip.version_length & 0x0f) < 5)
		return false;
	p->l4 = p->l3 + (ip.version_length & 0x0f) * 4;
	fragment = __builtin_bswap16(ip.fragment);
	if (fragment & IP_OFFSET)
		p->fragment = LATER;
	else if (fragment & IP_MF)
		p->fragment = FIRST;
	p->id = ip.id;
	return parse_ports(skb, p, length_of(skb, p->l3, ip.total) - (p->l4 - p->l3));
}

static __always_inline bool is_extension(u8 kind)
{
	return kind == IPPROTO_HOPOPTS || kind == IPPROTO_ROUTING || kind == IPPROTO_FRAGMENT ||
	       kind == IPPROTO_AH || kind == IPPROTO_DSTOPTS;
}

/* Whether the ports are behind more extension headers than are parsed or, in a quoted IPv4 packet,
 * behind a length that is too small, which nf_conntrack does not check. */
static __always_inline bool has_hidden_ports(const struct packet *p)
{
	return p->v6 ? p->fragment != LATER && is_extension(p->protocol) : !p->l4;
}

static __always_inline bool parse_v6(struct __sk_buff *skb, struct packet *p)
{
	struct ip6_extension extension;
	struct ip6_header ip;

	if (bpf_skb_load_bytes(skb, p->l3, &ip, sizeof(ip)))
		return false;
	/* v4-mapped addresses on the wire would be taken for IPv4 (RFC 6890 forbids them there) */
	if (is_v4(&ip.source) || is_v4(&ip.destination))
		return false;
	p->tuple.from.address = ip.source;
	p->tuple.to.address = ip.destination;
	p->protocol = ip.next;
	p->ttl = ip.hops;
	p->l4 = p->l3 + sizeof(ip);
	p->v6 = 1;
#pragma unroll
	for (int i = 0; i < MAX_EXTENSION_HEADERS; i++) {
		u8 kind = p->protocol;

		/* after a later fragment's header there is data */
		if (p->fragment == LATER || !is_extension(kind))
			break;
		if (bpf_skb_load_bytes(skb, p->l4, &extension, sizeof(extension)))
			return false;
		p->protocol = extension.next;
		if (kind == IPPROTO_FRAGMENT) {
			u16 offset = __builtin_bswap16(extension.offset);

			p->fragment = offset & IP6_OFFSET ? LATER : offset & 1 ? FIRST : WHOLE;
			p->id = extension.id;
			p->l4 += sizeof(extension);
		} else {
			p->l4 += kind == IPPROTO_AH ? (extension.words + 2) * 4
						    : (extension.words + 1) * 8;
		}
	}
	return parse_ports(skb, p,
			   length_of(skb, p->l3 + sizeof(ip), ip.payload) + sizeof(ip) -
				   (p->l4 - p->l3));
}

/* Parses the packet into `p`, which is in the scratch buffer (scratch.h). False: it is not IP, or
 * truncated; such packets pass. `l2`: length of the link-layer header, 0 on devices without one. */
static __always_inline bool parse(struct __sk_buff *skb, u32 l2, struct packet *p)
{
	__builtin_memset(p, 0, sizeof(*p));
	p->l3 = l2;
	if (skb->protocol == __builtin_bswap16(ETH_P_IP))
		return parse_v4(skb, p);
	return skb->protocol == __builtin_bswap16(ETH_P_IPV6) && parse_v6(skb, p);
}
