/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Kernel helpers that BCC's built-in linux/bpf.h lacks, called by number, under their kernel names
 * without `bpf_`. If the kernel lacks an optional one (hooks.py), the loader replaces calls to it
 * with `r0 = 0`. The programs have to cope with the 0; for set_retval() they check
 * CONFIG_SET_RETVAL.
 */
#pragma once

/* The compiler knows nothing about the value any more, so a check that follows is made on the
 * register that is used afterwards, as verifiers need it. */
#define barrier_var(v) asm volatile("" : "+r"(v))

#define AF_INET 2
#define AF_INET6 10
#define EEXIST 17
#define EADDRINUSE 98
#define ECONNREFUSED 111
#define ETIMEDOUT 110

/* Linux v5.7, f318903c0bf4: the cookie of the network namespace, which is never reused. */
static __always_inline u64 get_netns_cookie(void *ctx)
{
	return ((u64(*)(void *))122)(ctx);
}

/* Linux v5.7, 0f09abd105da: the cgroup v2 id (inode number) of the current process. */
static __always_inline u64 get_current_cgroup_id(void)
{
	return ((u64(*)(void))80)();
}

/* Linux v5.7, 0f09abd105da: its ancestor at this level (the root is 0), or the cgroup itself; 0 if
 * it is not that deep. */
static __always_inline u64 get_current_ancestor_cgroup_id(int level)
{
	return ((u64(*)(int))123)(level);
}

/* Linux v5.5, 6ae08ae3dea2. */
static __always_inline long probe_read_kernel(void *to, u32 size, const void *from)
{
	return ((long (*)(void *, u32, const void *))113)(to, size, from);
}

/* Not a helper: the loader replaces the call by the place of sk_kern_sock in this kernel's struct
 * sock, in bits, or by 0 if the kernel's own sockets may be translated (kernel_members.py). */
static __always_inline u32 kernel_socket_bit(void)
{
	return ((u64(*)(void))0x6b627066)();
}

/* Not helpers either: the loader replaces these calls by the places of members in the structs of
 * this kernel, in bytes (kernel_members.py). */
#define PLACE_OF(member, number)                                                                   \
	static __always_inline u32 place_of_##member(void)                                         \
	{                                                                                          \
		return ((u64(*)(void))number)();                                                   \
	}

PLACE_OF(state, 0x6b627101)       /* sock_common.skc_state */
PLACE_OF(address6, 0x6b627102)    /* sock_common.skc_v6_rcv_saddr */
PLACE_OF(error, 0x6b627103)       /* sock.sk_err */
PLACE_OF(cgroup, 0x6b627104)      /* sock.sk_cgrp_data */
PLACE_OF(cgroup_node, 0x6b627105) /* cgroup.kn */
PLACE_OF(node_id, 0x6b627106)     /* kernfs_node.id */
/* 0 if the hooks may not read the kernel's memory, or it has no BTF (cluster_netns.h): */
PLACE_OF(net, 0x6b627107)           /* sock_common.skc_net */
PLACE_OF(net_devices, 0x6b627108)   /* net.dev_base_head */
PLACE_OF(net_cookie, 0x6b627109)    /* net.net_cookie */
PLACE_OF(device_entry, 0x6b62710a)  /* net_device.dev_list */
PLACE_OF(device_net, 0x6b62710b)    /* net_device.nd_net */
PLACE_OF(device_ops, 0x6b62710c)    /* net_device.rtnl_link_ops */
PLACE_OF(device_lower, 0x6b62710d)  /* net_device.adj_list, whose second list is `lower` */
PLACE_OF(device_driver, 0x6b62710e) /* what the driver keeps: netdev_priv() */
PLACE_OF(ops_kind, 0x6b62710f)      /* rtnl_link_ops.kind */
PLACE_OF(lower_entry, 0x6b627110)   /* netdev_adjacent.list */
PLACE_OF(unicast, 0x6b627111)       /* inet_sock.uc_index */
PLACE_OF(ipv6, 0x6b627112)          /* inet_sock.pinet6 */
PLACE_OF(unicast6, 0x6b627113)      /* ipv6_pinfo.ucast_oif */

/* 0 if it cannot be read. */
static __always_inline u64 read_u64(u64 address)
{
	u64 value = 0;

	probe_read_kernel(&value, sizeof(value), (void *)address);
	return value;
}

/* Linux v5.6, 5576b991e9c1. */
static __always_inline u64 jiffies64(void)
{
	return ((u64(*)(void))118)();
}

/* Linux v5.8, 457f44363a88: copies a record into a ring buffer; an error if it is full. */
static __always_inline long ringbuf_output(void *ring, void *data, u64 size)
{
	return ((long (*)(void *, void *, u64, u64))130)(ring, data, size, 0);
}

#define BPF_HDR_START_NET 1

/* Linux v4.18: 4e1ec56cdc59. */
static __always_inline long load_bytes_relative(const void *skb, u32 offset, void *to, u32 length,
						u32 start)
{
	return ((long (*)(const void *, u32, void *, u32, u32))68)(skb, offset, to, length, start);
}

/* struct sockaddr_in, sockaddr_in6 */
struct socket_v4 {
	u16 family;
	__be16 port;
	__be32 address;
	u32 pad[2];
};

struct socket_v6 {
	u16 family;
	__be16 port;
	__be32 flow;
	__be32 address[4];
	u32 scope;
};

/* Linux v4.17, d74bad4e74ee; with a port v5.8, 8086fbaf4934. Only in connect() hooks. */
static __always_inline int bind(void *ctx, void *own, int size)
{
	return ((int (*)(void *, void *, int))64)(ctx, own, size);
}

/* Linux v5.11, d055126180564: CLOCK_MONOTONIC_COARSE, the time of the last tick. It does not read
 * the processor's counter, which costs as much as a map lookup. */
static __always_inline u64 ktime_get_coarse_ns(void)
{
	return ((u64(*)(void))160)();
}

static __always_inline u64 now_ns(void)
{
	u64 now = ktime_get_coarse_ns();

	return now ? now : bpf_ktime_get_ns();
}

/* Linux v5.18, b44123b4a3dc: sets the errno that the refused system call returns. */
static __always_inline long set_retval(int error)
{
	return ((long (*)(int))187)(error);
}
