/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* What the packet path knows about the node and its devices (node_maps.py). */
#pragma once

#include "types.h"
#include "maps.h"
#include "lib/addr.h"
#include "lib/packet.h"

#define CURRENT_NETNS (-1)

BPF_F_TABLE("hash", u32, struct device, devices, 64, BPF_F_NO_PREALLOC);
BPF_TABLE("array", u32, struct cached_device, device_cache, CACHED_DEVICES);
BPF_TABLE("array", u32, struct node, node, 1);
BPF_F_TABLE("lpm_trie", struct device_network, struct address, device_sources, 64,
	    BPF_F_NO_PREALLOC);

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

/* The bridge of which the device is a port; 0: none. */
static __always_inline u32 bridge_of_port(const struct device *device, u32 ifindex)
{
	return device->bridge == ifindex ? 0 : device->bridge;
}

/* The device that has the addresses and routes for packets of this device: for a port of a bridge,
 * the bridge. */
static __always_inline u32 routing_ifindex(const struct device *device, u32 ifindex)
{
	return device && device->bridge ? device->bridge : ifindex;
}

/* The owner (types.h) of packets that arrive on this device; `ifindex` 0: that sockets of the node
 * send. A pod with its own device is known by that device, whatever source address it uses; a later
 * pod whose device gets the same ifindex inherits at most what it has used up. Other pods are known
 * by the address, since the pods of a node may share one network, and other machines by the IPv4
 * address or the IPv6 /64 network, since one host may have all of its addresses. */
static __always_inline u32 owner_of_packet(const struct device *in, u32 ifindex)
{
	if (!ifindex || (in && (in->flags & DEVICE_PEER)))
		return OWNER_DEVICE | ifindex;
	return in && in->role == ROLE_POD ? OWNER_ADDRESS : OWNER_NETWORK;
}

/* Whether this is an address of the node. */
static __always_inline bool is_nodes_own(const struct address *a)
{
	struct device_network key = {.bits = 160, .address = *a};

	return device_sources.lookup(&key);
}

/* Whether the stack drops what arrives from this address; of the node's own, IPv4 only. */
static __always_inline bool is_impossible_source(struct address *a)
{
	return is_martian(a) || is_nodes_own(a);
}

static __always_inline bool uses_conntrack(void)
{
	u32 zero = 0;
	struct node *n = node.lookup(&zero);

	return n && (n->flags & NODE_NETFILTER);
}

/* Whether an arriving fragment must be forged. Conntrack reassembles fragments, perhaps with
 * another first one than these programs have seen, and could take the result for an answer. But no
 * sender divides a SYN, a SYN-ACK or the flags from their TCP header. */
static __always_inline bool is_forged_fragment(const struct packet *p)
{
	return p->fragment == FIRST && p->protocol == IPPROTO_TCP &&
	       (!p->tcp_flags || (p->tcp_flags & TCP_SYN)) && uses_conntrack();
}

/* Whether a socket of the node receives packets with these ends (struct bpf_sock_tuple), if they
 * are to an address of the node: one of a server, a connection (also in TIME_WAIT) or the kernel,
 * such as VXLAN's. Not found are sockets that are bound to another device, and SCTP's. */
static __always_inline bool has_socket_at(struct __sk_buff *skb, void *ends, u32 size, u8 protocol)
{
	struct bpf_sock *socket = NULL;

	if (protocol == IPPROTO_TCP)
		socket = bpf_skc_lookup_tcp(skb, ends, size, CURRENT_NETNS, 0);
	else if (protocol == IPPROTO_UDP)
		socket = bpf_sk_lookup_udp(skb, ends, size, CURRENT_NETNS, 0);
	if (!socket)
		return false;
	bpf_sk_release(socket);
	return true;
}

/* The same for the ends of a packet. */
static __always_inline bool has_socket(struct __sk_buff *skb, const struct tuple *t)
{
	struct bpf_sock_tuple ends = {};

	if (is_v4(&t->to.address)) {
		ends.ipv4.saddr = t->from.address.word[3];
		ends.ipv4.daddr = t->to.address.word[3];
		ends.ipv4.sport = t->from.port;
		ends.ipv4.dport = t->to.port;
		return has_socket_at(skb, &ends, sizeof(ends.ipv4), t->to.protocol);
	}
	*(struct address *)ends.ipv6.saddr = t->from.address;
	*(struct address *)ends.ipv6.daddr = t->to.address;
	ends.ipv6.sport = t->from.port;
	ends.ipv6.dport = t->to.port;
	return has_socket_at(skb, &ends, sizeof(ends.ipv6), t->to.protocol);
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
