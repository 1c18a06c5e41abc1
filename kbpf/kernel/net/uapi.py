# SPDX-License-Identifier: Apache-2.0
"""Numbers of the kernel's netlink interfaces, under the names that they have in its headers.

Each block names the header in include/uapi of the kernel's source.
"""

from typing import Final

# linux/netlink.h
NETLINK_SOCK_DIAG: Final = 4
NETLINK_NETFILTER: Final = 12
NETLINK_GENERIC: Final = 16
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
NLM_F_REQUEST: Final = 0x1
NLM_F_ACK: Final = 0x4
NLM_F_DUMP_INTR: Final = 0x10
NLM_F_DUMP: Final = 0x300
NLM_F_REPLACE: Final = 0x100
NLM_F_EXCL: Final = 0x200
NLM_F_CREATE: Final = 0x400
NLM_F_APPEND: Final = 0x800
NLMSGERR_ATTR_MSG: Final = 1
NLA_F_NESTED: Final = 0x8000
NLA_TYPE_MASK: Final = 0x3FFF
NETLINK_CAP_ACK: Final = 10
NETLINK_EXT_ACK: Final = 11
NETLINK_GET_STRICT_CHK: Final = 12

# linux/socket.h, asm-generic/socket.h
SOL_NETLINK: Final = 270
SO_RCVBUFFORCE: Final = 33
SO_COOKIE: Final = 57

# linux/rtnetlink.h
RTMGRP_LINK: Final = 0x1
RTMGRP_TC: Final = 0x8
RTMGRP_IPV4_IFADDR: Final = 0x10
RTMGRP_IPV4_ROUTE: Final = 0x40
RTMGRP_IPV6_IFADDR: Final = 0x100
RTMGRP_IPV6_ROUTE: Final = 0x400
RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_GETLINK: Final = 18
RTM_NEWADDR: Final = 20
RTM_DELADDR: Final = 21
RTM_GETADDR: Final = 22
RTM_NEWROUTE: Final = 24
RTM_DELROUTE: Final = 25
RTM_GETROUTE: Final = 26
RTM_NEWQDISC: Final = 36
RTM_DELQDISC: Final = 37
RTM_GETQDISC: Final = 38
RTM_NEWTFILTER: Final = 44
RTM_DELTFILTER: Final = 45
RTM_GETTFILTER: Final = 46
RTM_GETNSID: Final = 90
RTN_UNICAST: Final = 1
RTN_LOCAL: Final = 2
RT_TABLE_LOCAL: Final = 255
RTA_DST: Final = 1
RTA_SRC: Final = 2
RTA_IIF: Final = 3
RTA_OIF: Final = 4
RTA_GATEWAY: Final = 5
RTA_PREFSRC: Final = 7
RTA_VIA: Final = 18
RT_SCOPE_UNIVERSE: Final = 0
RT_SCOPE_LINK: Final = 253
RT_SCOPE_HOST: Final = 254
RTEXT_FILTER_SKIP_STATS: Final = 8
TCA_KIND: Final = 1
TCA_OPTIONS: Final = 2
TCA_CHAIN: Final = 11

# linux/if_link.h
IFLA_ADDRESS: Final = 1
IFLA_IFNAME: Final = 3
IFLA_MTU: Final = 4
IFLA_INET_CONF: Final = 1
IPV4_DEVCONF_RP_FILTER: Final = 8
IFLA_LINK: Final = 5
IFLA_MASTER: Final = 10
IFLA_LINKINFO: Final = 18
IFLA_IFALIAS: Final = 20
IFLA_AF_SPEC: Final = 26
IFLA_EXT_MASK: Final = 29
IFLA_LINK_NETNSID: Final = 37
IFLA_INFO_KIND: Final = 1
IFLA_INFO_DATA: Final = 2
IFLA_BR_NF_CALL_IPTABLES: Final = 36
IFLA_BR_NF_CALL_IP6TABLES: Final = 37
IFLA_INET6_ADDR_GEN_MODE: Final = 8
IN6_ADDR_GEN_MODE_NONE: Final = 1

# linux/net_namespace.h
NETNSA_NSID: Final = 1
NETNSA_FD: Final = 3

# linux/if_addr.h
IFA_ADDRESS: Final = 1
IFA_LOCAL: Final = 2
IFA_CACHEINFO: Final = 6
IFA_FLAGS: Final = 8
IFA_F_SECONDARY: Final = 0x01  # for IPv6: temporary
IFA_F_NODAD: Final = 0x02
IFA_F_DEPRECATED: Final = 0x20
IFA_F_TENTATIVE: Final = 0x40
IFA_F_PERMANENT: Final = 0x80
IFA_F_NOPREFIXROUTE: Final = 0x200
INFINITY_LIFE_TIME: Final = 0xFFFFFFFF  # include/net/addrconf.h

# linux/if.h, linux/if_arp.h
IFF_UP: Final = 0x1
IFF_LOOPBACK: Final = 0x8
IFF_POINTOPOINT: Final = 0x10
ARPHRD_ETHER: Final = 1
ARPHRD_PPP: Final = 512
ARPHRD_RAWIP: Final = 519
ARPHRD_TUNNEL: Final = 768
ARPHRD_TUNNEL6: Final = 769
ARPHRD_SIT: Final = 776
ARPHRD_IPGRE: Final = 778
ARPHRD_IP6GRE: Final = 823
ARPHRD_NONE: Final = 0xFFFE

# linux/inet_diag.h
INET_DIAG_SKV6ONLY: Final = 11

# linux/sock_diag.h; socket states of include/net/tcp_states.h
SOCK_DIAG_BY_FAMILY: Final = 20
SOCK_DESTROY: Final = 21
TCPF_ESTABLISHED: Final = 1 << 1
TCPF_CLOSE: Final = 1 << 7
TCPF_LISTEN: Final = 1 << 10

# linux/genetlink.h
GENL_ID_CTRL: Final = 0x10
CTRL_CMD_GETFAMILY: Final = 3
CTRL_ATTR_FAMILY_ID: Final = 1
CTRL_ATTR_FAMILY_NAME: Final = 2

# linux/ip_vs.h
IPVS_GENL_NAME: Final = "IPVS"
IPVS_GENL_VERSION: Final = 1
IPVS_CMD_ATTR_SERVICE: Final = 1
IPVS_CMD_ATTR_DEST: Final = 2
IPVS_CMD_ATTR_TIMEOUT_TCP: Final = 4
IPVS_CMD_ATTR_TIMEOUT_TCP_FIN: Final = 5
IPVS_CMD_ATTR_TIMEOUT_UDP: Final = 6
IPVS_SVC_ATTR_AF: Final = 1
IPVS_SVC_ATTR_PROTOCOL: Final = 2
IPVS_SVC_ATTR_ADDR: Final = 3
IPVS_SVC_ATTR_PORT: Final = 4
IPVS_SVC_ATTR_FWMARK: Final = 5
IPVS_SVC_ATTR_SCHED_NAME: Final = 6
IPVS_SVC_ATTR_FLAGS: Final = 7
IPVS_SVC_ATTR_TIMEOUT: Final = 8
IPVS_SVC_ATTR_NETMASK: Final = 9
IPVS_SVC_ATTR_STATS64: Final = 12
IPVS_DEST_ATTR_ADDR: Final = 1
IPVS_DEST_ATTR_PORT: Final = 2
IPVS_DEST_ATTR_FWD_METHOD: Final = 3
IPVS_DEST_ATTR_WEIGHT: Final = 4
IPVS_DEST_ATTR_U_THRESH: Final = 5
IPVS_DEST_ATTR_L_THRESH: Final = 6
IPVS_DEST_ATTR_ACTIVE_CONNS: Final = 7
IPVS_DEST_ATTR_INACT_CONNS: Final = 8
IPVS_DEST_ATTR_ADDR_FAMILY: Final = 11
IPVS_DEST_ATTR_STATS64: Final = 12
IPVS_STATS_ATTR_CONNS: Final = 1
IPVS_STATS_ATTR_INBYTES: Final = 4
IPVS_STATS_ATTR_OUTBYTES: Final = 5
IP_VS_CONN_F_MASQ: Final = 0
