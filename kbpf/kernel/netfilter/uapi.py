# SPDX-License-Identifier: Apache-2.0
"""Numbers of netfilter's netlink interfaces, under the names that they have in its headers.

Each block names the header in include/uapi/linux of the kernel's source.
"""

from typing import Final

# netfilter.h
NF_DROP: Final = 0
NF_ACCEPT: Final = 1
NFPROTO_INET: Final = 1
NFPROTO_IPV4: Final = 2
NFPROTO_ARP: Final = 3
NFPROTO_NETDEV: Final = 5
NFPROTO_BRIDGE: Final = 7
NFPROTO_IPV6: Final = 10

# netfilter/nfnetlink.h: a message type is subsystem << 8 | message
NFNL_SUBSYS_CTNETLINK: Final = 1
NFNL_SUBSYS_IPSET: Final = 6
NFNL_SUBSYS_ACCT: Final = 7
NFNL_SUBSYS_NFTABLES: Final = 10
NFNL_MSG_BATCH_BEGIN: Final = 0x10
NFNL_MSG_BATCH_END: Final = 0x11
NFNL_BATCH_GENID: Final = 1

# netfilter/nfnetlink_conntrack.h, nf_conntrack_tcp.h
IPCTNL_MSG_CT_NEW: Final = 0
IPCTNL_MSG_CT_GET: Final = 1
IPCTNL_MSG_CT_DELETE: Final = 2
CTA_TUPLE_ORIG: Final = 1
CTA_TUPLE_REPLY: Final = 2
CTA_STATUS: Final = 3
CTA_PROTOINFO: Final = 4
CTA_TIMEOUT: Final = 7
CTA_ID: Final = 12
CTA_FILTER: Final = 25  # since Linux 5.8
CTA_FILTER_ORIG_FLAGS: Final = 1
CTA_FILTER_F_CTA_PROTO_NUM: Final = 1 << 3  # in net/netfilter/nf_internals.h
CTA_STATUS_MASK: Final = 26  # since Linux 5.17; older kernels ignore it and dump all entries
CTA_TUPLE_IP: Final = 1
CTA_TUPLE_PROTO: Final = 2
CTA_IP_V4_SRC: Final = 1
CTA_IP_V4_DST: Final = 2
CTA_IP_V6_SRC: Final = 3
CTA_IP_V6_DST: Final = 4
CTA_PROTO_NUM: Final = 1
CTA_PROTO_SRC_PORT: Final = 2
CTA_PROTO_DST_PORT: Final = 3
CTA_PROTOINFO_TCP: Final = 1
CTA_PROTOINFO_TCP_STATE: Final = 1
TCP_CONNTRACK_ESTABLISHED: Final = 3

# netfilter/ipset/ip_set.h
IPSET_PROTOCOL: Final = 6
IPSET_CMD_DESTROY: Final = 3
IPSET_CMD_LIST: Final = 7
IPSET_ATTR_PROTOCOL: Final = 1
IPSET_ATTR_SETNAME: Final = 2
IPSET_ATTR_ADT: Final = 8
IPSET_ATTR_PORT: Final = 4  # within IPSET_ATTR_DATA; __be16

# netfilter/nfnetlink_acct.h
NFNL_MSG_ACCT_GET: Final = 1
NFNL_MSG_ACCT_DEL: Final = 3
NFACCT_NAME: Final = 1

# netfilter/nf_tables.h
NFT_MSG_GETTABLE: Final = 1
NFT_MSG_GETCHAIN: Final = 4
NFT_MSG_NEWRULE: Final = 6
NFT_MSG_GETRULE: Final = 7
NFT_MSG_DELRULE: Final = 8
NFT_MSG_GETSET: Final = 10
NFT_MSG_GETGEN: Final = 16
NFTA_TABLE_NAME: Final = 1
NFTA_TABLE_USE: Final = 3
NFTA_TABLE_HANDLE: Final = 4
NFTA_CHAIN_TABLE: Final = 1
NFTA_CHAIN_NAME: Final = 3
NFTA_CHAIN_HOOK: Final = 4
NFTA_CHAIN_POLICY: Final = 5  # __be32, NF_DROP or NF_ACCEPT
NFTA_CHAIN_TYPE: Final = 7
NFTA_HOOK_HOOKNUM: Final = 1
NFTA_HOOK_PRIORITY: Final = 2
NFTA_RULE_TABLE: Final = 1
NFTA_RULE_CHAIN: Final = 2
NFTA_RULE_HANDLE: Final = 3
NFTA_RULE_EXPRESSIONS: Final = 4
NFTA_RULE_POSITION: Final = 6
NFTA_RULE_USERDATA: Final = 7
NFTA_SET_TABLE: Final = 1
NFTA_SET_NAME: Final = 2
NFTA_GEN_ID: Final = 1  # __be32
NFTA_LIST_ELEM: Final = 1
NFTA_EXPR_NAME: Final = 1
NFTA_EXPR_DATA: Final = 2
NFTA_MATCH_NAME: Final = 1
NFTA_MATCH_REV: Final = 2
NFTA_MATCH_INFO: Final = 3
NFTA_TARGET_NAME: Final = 1
NFTA_LOOKUP_DREG: Final = 3
NFTA_FIB_FLAGS: Final = 3  # __be32
NFTA_FIB_F_SADDR: Final = 1
NFTA_CT_KEY: Final = 2  # __be32
NFT_CT_LABELS, NFT_CT_PKTS, NFT_CT_BYTES, NFT_CT_AVGPKT = 13, 14, 15, 16
NFTA_OBJREF_IMM_TYPE: Final = 1  # __be32
NFT_OBJECT_COUNTER: Final = 1
NFTA_COUNTER_BYTES: Final = 1
NFTA_COUNTER_PACKETS: Final = 2
NFTA_IMMEDIATE_DREG: Final = 1
NFTA_IMMEDIATE_DATA: Final = 2
NFTA_DATA_VERDICT: Final = 2
NFTA_VERDICT_CODE: Final = 1  # __be32, NF_DROP, NF_ACCEPT or a negative NFT_*
NFTA_VERDICT_CHAIN: Final = 2  # of NFT_JUMP and NFT_GOTO
NFT_REG_VERDICT: Final = 0

# netfilter/xt_conntrack.h
XT_CONNTRACK_STATE: Final = 1
XT_CONNTRACK_STATE_BIT_ESTABLISHED: Final = 1 << 1  # XT_CONNTRACK_STATE_BIT(IP_CT_ESTABLISHED)
XT_CONNTRACK_STATE_BIT_RELATED: Final = 1 << 2  # XT_CONNTRACK_STATE_BIT(IP_CT_RELATED)

# libnftnl's udata.h: how nft stores a rule's comment in NFTA_RULE_USERDATA
NFTNL_UDATA_RULE_COMMENT: Final = 0
