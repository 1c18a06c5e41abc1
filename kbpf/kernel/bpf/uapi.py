# SPDX-License-Identifier: Apache-2.0
"""Numbers of linux/bpf.h and of cls_bpf, under the names that they have there."""

from typing import Final

# enum bpf_map_type
BPF_MAP_TYPE_HASH: Final = 1
BPF_MAP_TYPE_ARRAY: Final = 2
BPF_MAP_TYPE_PROG_ARRAY: Final = 3
BPF_MAP_TYPE_PERCPU_ARRAY: Final = 6
BPF_MAP_TYPE_LRU_HASH: Final = 9
BPF_MAP_TYPE_LPM_TRIE: Final = 11
BPF_MAP_TYPE_ARRAY_OF_MAPS: Final = 12
BPF_MAP_TYPE_QUEUE: Final = 22
BPF_MAP_TYPE_SK_STORAGE: Final = 24
BPF_MAP_TYPE_RINGBUF: Final = 27

# flags of BPF_MAP_CREATE, BPF_PROG_ATTACH and BPF_MAP_UPDATE_ELEM
BPF_F_NO_PREALLOC: Final = 1
BPF_ANY: Final = 0
BPF_NOEXIST: Final = 1
BPF_EXIST: Final = 2
BPF_F_BEFORE: Final = 8  # without another program: before all of them

# enum bpf_prog_type
BPF_PROG_TYPE_SCHED_CLS: Final = 3
BPF_PROG_TYPE_SOCK_OPS: Final = 13
BPF_PROG_TYPE_CGROUP_SOCK_ADDR: Final = 18
BPF_PROG_TYPE_TRACING: Final = 26

# enum bpf_attach_type
BPF_CGROUP_SOCK_OPS: Final = 3
BPF_CGROUP_INET4_CONNECT: Final = 10
BPF_CGROUP_INET6_CONNECT: Final = 11
BPF_CGROUP_UDP4_SENDMSG: Final = 14
BPF_CGROUP_UDP6_SENDMSG: Final = 15
BPF_CGROUP_UDP4_RECVMSG: Final = 19
BPF_CGROUP_UDP6_RECVMSG: Final = 20
BPF_TRACE_RAW_TP: Final = 23
BPF_TRACE_ITER: Final = 28
BPF_CGROUP_INET4_GETPEERNAME: Final = 29
BPF_CGROUP_INET6_GETPEERNAME: Final = 30
BPF_TCX_INGRESS: Final = 46
BPF_TCX_EGRESS: Final = 47

BPF_LINK_TYPE_RAW_TRACEPOINT: Final = 1

BPF_PSEUDO_MAP_FD: Final = 1  # src_reg of a 64-bit load whose value is the descriptor of a map
BPF_F_INGRESS: Final = 1  # of bpf_clone_redirect()

# helper functions, enum bpf_func_id
BPF_FUNC_tail_call: Final = 12
BPF_FUNC_clone_redirect: Final = 13
BPF_FUNC_get_current_cgroup_id: Final = 80
BPF_FUNC_probe_read_kernel: Final = 113
BPF_FUNC_sk_storage_get: Final = 107
BPF_FUNC_get_netns_cookie: Final = 122
BPF_FUNC_get_current_ancestor_cgroup_id: Final = 123
BPF_FUNC_seq_write: Final = 127
BPF_FUNC_redirect_neigh: Final = 152
BPF_FUNC_redirect_peer: Final = 155
BPF_FUNC_ktime_get_coarse_ns: Final = 160
BPF_FUNC_set_retval: Final = 187

# linux/pkt_cls.h
TCA_BPF_FD: Final = 6
TCA_BPF_NAME: Final = 7
TCA_BPF_FLAGS: Final = 8
TCA_BPF_ID: Final = 11
TCA_BPF_FLAG_ACT_DIRECT: Final = 1
