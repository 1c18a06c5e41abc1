/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Whether the Service network means this cluster in a socket's network namespace. It does in the
 * node's own, and in those of its pods, which have a device that leads to the node. It does not in
 * a cluster that runs inside a pod (kind, k3d), in containers that a pod or a user starts, or after
 * `unshare -n`: their 10.96.0.10 may be another server. The hooks leave their sockets alone. If
 * their packets do leave the pod for a Service, the packet path serves them, after the rules of
 * the networks in between.
 *
 * The kernel is asked at each connection, since a namespace may get its devices at any time and
 * nothing else knows them before its first connect(). It needs BTF, SO_NETNS_COOKIE (Linux v5.14),
 * and the right to read the kernel's memory; without these all namespaces count as the cluster's.
 */
#pragma once

#include "types.h"
#include "lib/compat.h"
#include "lookup.h"

/* A namespace with more devices before the one that leads to the node counts as the cluster's. The
 * modules of tunnels may add nine to each namespace. */
#define MAX_NETNS_DEVICES 12

/* struct list_head `lower` follows `upper` in net_device.adj_list. */
#define SIZE_OF_LIST_HEAD 16

/* The first eight bytes of rtnl_link_ops.kind, of which those in the mask count. */
#define KIND_VETH 0x0068746576ULL
#define VETH_MASK 0xffffffffffULL
#define KIND_NETKIT 0x0074696b74656eULL
#define NETKIT_MASK 0xffffffffffffffULL
#define KIND_OPENVSWITCH 0x697773766e65706fULL

/* Whether this struct net_device is one of the node. */
static __always_inline bool is_device_of_node(u64 device)
{
	u64 net = device ? read_u64(device + place_of_device_net()) : 0;

	return net && is_host(read_u64(net + place_of_net_cookie()));
}

/* Whether packets that are sent by this struct net_device reach the node: the other end of a pair,
 * or the device below it (macvlan, ipvlan, vlan), is in the node's namespace. Hardware that was
 * moved into a pod has no link ops; the port of an Open vSwitch has no other end to look at. */
static __always_inline bool leads_to_node(u64 device)
{
	u64 ops = read_u64(device + place_of_device_ops());
	u64 kind = read_u64(read_u64(ops + place_of_ops_kind()));
	u64 lowers = device + place_of_device_lower() + SIZE_OF_LIST_HEAD, lower;

	if (!ops || kind == KIND_OPENVSWITCH)
		return true;
	/* both drivers keep the other end first */
	if ((kind & VETH_MASK) == KIND_VETH || (kind & NETKIT_MASK) == KIND_NETKIT)
		return is_device_of_node(read_u64(device + place_of_device_driver()));
	lower = read_u64(lowers);
	/* the first member of struct netdev_adjacent is the device */
	return lower != lowers && is_device_of_node(read_u64(lower - place_of_lower_entry()));
}

static __always_inline bool is_netns_of_cluster(struct bpf_sock *sk, u64 netns)
{
	u64 socket = 0, net, head, entry;

	/* is_host(0): the agent could not read the cookie of the node's namespace */
	if (!sk || !place_of_net() || is_host(netns) || is_host(0))
		return true;
	probe_read_kernel(&socket, sizeof(socket), &sk); /* the address, as a number */
	net = read_u64(socket + place_of_net());
	head = net + place_of_net_devices();
	entry = read_u64(read_u64(head)); /* the first device is loopback */
	for (int i = 0; i < MAX_NETNS_DEVICES; i++) {
		if (entry == head)
			return false;
		if (!entry || leads_to_node(entry - place_of_device_entry()))
			return true;
		entry = read_u64(entry);
	}
	return true;
}
