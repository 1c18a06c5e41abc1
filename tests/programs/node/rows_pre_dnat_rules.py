# SPDX-License-Identifier: Apache-2.0
"""The rows of test_pre_dnat_rules.py."""

from pathlib import Path
from typing import NamedTuple

FIREWALLD = Path(__file__).parents[2] / "golden/firewalls/firewalld-1.3.3.nft"
"""What firewalld 1.3.3 (Debian 12, backend nftables) writes for a device in zone public and the
pods' network in zone trusted, as `nft list ruleset` shows it.
"""


class Row(NamedTuple):
    """A ruleset of nft, and the base chains that the warning names."""

    what: str
    rules: str
    named: tuple[str, ...] = ()


def at(rule: str, hook: str = "type filter hook prerouting priority raw") -> str:
    return f"table inet t {{ chain c {{ {hook}; {rule}; }} }}"


C = ("inet t c",)
ROWS = [
    Row("NodePorts", at("tcp dport 30000-32767 drop"), C),
    Row("one NodePort", at("udp dport 30080 reject"), C),
    Row("a set with a NodePort", at("tcp dport { 22, 30080 } drop"), C),
    Row("all but some", at("tcp dport != 80 drop"), C),
    Row("another port", at("tcp dport 22 drop")),
    Row("another range", at("tcp dport 1-1024 drop")),
    Row("a VIP", at("ip daddr 192.0.2.5 drop"), C),
    Row("a list of sources", at("ip saddr 198.51.100.0/24 drop"), C),
    Row("the original port", at("meta l4proto tcp ct original proto-dst 30080 drop"), C),
    Row("the original address", at("ct original ip daddr 192.0.2.5 drop"), C),
    Row("in mangle", at("tcp dport 30080 drop", "type filter hook prerouting priority mangle"), C),
    Row("behind DNAT", at("tcp dport 30080 drop", "type filter hook prerouting priority filter")),
    Row("at input", at("tcp dport 30080 drop", "type filter hook input priority raw")),
    Row("no refusal", at("tcp dport 30080 accept")),
    Row("no choice by address or port", at("ct state invalid drop")),
    Row("by a verdict map", at("tcp dport vmap { 30080 : drop }"), C),
    Row("in a chain that it jumps to",
        "table inet t { chain d { tcp dport 30080 drop; }\n"
        "chain c { type filter hook prerouting priority raw; jump d; } }", C),
    Row("in a chain that nothing leads to",
        "table inet t { chain d { tcp dport 30080 drop; }\n"
        "chain c { type filter hook prerouting priority raw; } }"),
    Row("in a chain for NodePorts that it jumps to",
        "table inet t { chain d { drop; }\n"
        "chain c { type filter hook prerouting priority raw; tcp dport 30080 jump d; } }", C),
    Row("in a chain for another port that it jumps to",
        "table inet t { chain d { drop; }\n"
        "chain c { type filter hook prerouting priority raw; tcp dport 22 jump d; } }"),
    Row("by policy", at("tcp dport 80 accept", "type filter hook prerouting priority raw; "
        "policy drop"), C),
    Row("at ingress of a device",
        "table netdev t { chain c { type filter hook ingress device lo priority 0; "
        "tcp dport 30080 drop; } }", ("netdev t c",)),
    Row("kube-proxy's own",
        "table ip kube-proxy { chain c { type filter hook prerouting priority -110; "
        "ip daddr 192.0.2.5 drop; } }"),
    Row("Calico's policies with preDNAT",
        "table ip mangle { chain cali-fh-eth0 { meta mark 1 accept; }\n"
        "chain PREROUTING { type filter hook prerouting priority mangle; "
        "meta mark 0 jump cali-fh-eth0; } }", ("ip mangle PREROUTING",)),
]


def in_table(text: str, family: str = "inet") -> str:
    """A table with a chain `c` before DNAT; `text`: objects, then its rules after "---"."""
    objects, _, rules = text.partition("---")
    hook = "type filter hook prerouting priority mangle;"
    return f"table {family} t {{\n{objects}\nchain c {{ {hook}\n{rules}\n}}\n}}\n"


ROWS += [
    Row("IPv6", in_table("---ip6 daddr 2001:db8::1 drop", "ip6"), ("ip6 t c",)),
    Row("IPv4", in_table("---ip saddr 192.0.2.1 udp dport 30080 reject", "ip"), ("ip t c",)),
    Row("at ingress of a device, family inet",
        "table inet t { chain c { type filter hook ingress device lo priority 0; "
        "udp dport 30080 drop; } }", C),
    Row("by a named set of ports",
        in_table("set s { type inet_service; elements = { 22 } }---tcp dport @s drop"), C),
    Row("by a named set of sources",
        in_table("set s { type ipv4_addr; flags interval; elements = { 192.0.2.0/24 } }"
                 "---ip saddr @s drop"), C),
    Row("all but a named set of sources",
        in_table("set s { type ipv4_addr; }---ip saddr != @s tcp dport 30080 drop"), C),
    Row("by a set of addresses and ports",
        in_table("set s { type ipv4_addr . inet_service; flags interval; "
                 "elements = { 192.0.2.0/24 . 30000-30100 } }---ip daddr . tcp dport @s drop"), C),
    Row("by addresses and ports",
        in_table("---ip daddr . tcp dport { 192.0.2.5 . 80 } drop"), C),
    Row("by a named verdict map of ports",
        in_table("map m { type inet_service : verdict; elements = { 30080 : drop } }"
                 "---tcp dport vmap @m"), C),
    Row("by a named verdict map of sources",
        in_table("map m { type ipv4_addr : verdict; }---ip saddr vmap @m"), C),
    Row("by a range that ends in the NodePorts", in_table("---tcp dport 1024-30000 drop"), C),
    Row("by a range that ends before them", in_table("---tcp dport 1024-29999 drop")),
    Row("limited by source", in_table("---ct state new meter m { ip saddr limit rate over 9/second "
        "} tcp dport 30080 drop"), C),
    Row("reverse path filter", in_table("---fib saddr . iif oif missing drop")),
    Row("by mark", in_table("---meta mark 1 drop")),
    Row("devices dispatched to chains that refuse NodePorts",
        in_table("chain d { tcp dport 30080 drop\n}\nmap m { type ifname : verdict; "
                 "elements = { lo : goto d } }---iifname vmap @m"), C),
    Row("devices dispatched to chains that refuse nothing",
        in_table("chain d { tcp dport 30080 accept\n}\nmap m { type ifname : verdict; "
                 "elements = { lo : goto d } }---iifname vmap @m")),
    Row("all that is left", in_table("---tcp dport 22 accept\ncounter log drop"), C),
    Row("all that is left, from one device",
        in_table("---tcp dport 22 accept\niifname eth0 meta nfproto ipv4 reject"), C),
    Row("all TCP", in_table("---meta l4proto { tcp, icmp } drop"), C),
    Row("all but TCP", in_table("---ip protocol != tcp drop"), C),
    Row("other protocols", in_table("---meta l4proto { icmp, icmpv6 } drop")),
    Row("new connections", in_table("---ct state invalid,new drop"), C),
    Row("all but known connections", in_table("---ct state != { established, related } drop"), C),
    Row("packets of no new connection", in_table("---ct state != { new, established } drop")),
    Row("to addresses of the node", in_table("---fib daddr type local drop"), C),
    Row("broadcasts", in_table("---fib daddr type { broadcast, multicast } drop")),
    Row("all devices but some, by a verdict map", in_table("---iifname vmap { lo : accept, "
        "eth0 : drop }"), C),
    Row("connections by a verdict map", in_table("---ct state vmap { new : accept, "
        "established : accept, related : accept, invalid : drop }")),
    Row("new connections by a verdict map",
        in_table("---ct state vmap { established : accept, new : drop }"), C),
    Row("new connections by a verdict map with comments",
        in_table('---ct state vmap { established comment "a" : accept, new comment "b" : drop }'),
        C),
    Row("TCP by a verdict map", in_table("chain d { tcp dport 22 accept\ndrop\n}\n"
        "---meta l4proto vmap { icmp : accept, tcp : jump d }"), C),
    Row("everything in a chain that it jumps to",
        in_table("chain d { drop\n}\n---iifname eth0 jump d"), C),
    Row("everything in a chain for connections that are not new",
        in_table("chain d { drop\n}\n---ct state invalid jump d")),
    Row("beyond a rate", in_table("---limit rate over 9/second drop")),
    Row("by the packet's bytes", in_table("---@th,16,16 30080 drop"), C),
    Row("firewalld", FIREWALLD.read_text()),
    Row("firewalld with a direct rule",
        FIREWALLD.read_text() + in_table("---tcp dport 30080 ip saddr 192.0.2.0/24 drop"), C),
]

# Calico, felix/rules/static.go and endpoints.go at v3.31: the chains that it always has in raw and
# mangle (StaticRawPreroutingChain, StaticManglePreroutingChain), and those of a host endpoint eth0.
CALICO_RAW = """*raw
:cali-PREROUTING - [0:0]
:cali-rpf-skip - [0:0]
:cali-from-host-endpoint - [0:0]
-A PREROUTING -j cali-PREROUTING
-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i cali+ -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -j cali-rpf-skip
-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
-A cali-PREROUTING -m mark --mark 0x0/0x40000 -j cali-from-host-endpoint
-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT
COMMIT
"""
CALICO_MANGLE = """*mangle
:cali-PREROUTING - [0:0]
:cali-from-host-endpoint - [0:0]
-A PREROUTING -j cali-PREROUTING
-A cali-PREROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-PREROUTING -j cali-from-host-endpoint
-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT
COMMIT
"""
CALICO_PRE_DNAT = """*mangle
:cali-fh-eth0 - [0:0]
:cali-pi-_policy - [0:0]
-A cali-from-host-endpoint -i eth0 -g cali-fh-eth0
-A cali-fh-eth0 -j MARK --set-xmark 0x0/0x10000
-A cali-fh-eth0 -m mark --mark 0x0/0x20000 -j cali-pi-_policy
-A cali-fh-eth0 -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-pi-_policy -p tcp -m multiport --dports 30000:32767 -j DROP
COMMIT
"""
CALICO = [
    ("the chains that Calico always has", CALICO_RAW + CALICO_MANGLE, ()),
    ("a policy with preDNAT", CALICO_RAW + CALICO_MANGLE + CALICO_PRE_DNAT, ("mangle",)),
    ("a policy with doNotTrack", CALICO_MANGLE + CALICO_RAW
     + CALICO_PRE_DNAT.replace("*mangle", "*raw"), ("raw",)),
]  # fmt: skip


IPTABLES = [
    ("-t raw -A PREROUTING -p tcp --dport 30000:32767 -j DROP", ("ip raw PREROUTING",)),
    ("-t mangle -A PREROUTING -p tcp -m multiport --dports 30080 -j DROP",
     ("ip mangle PREROUTING",)),
    ("-t mangle -A PREROUTING -m conntrack --ctorigdst 192.0.2.5 -j DROP",
     ("ip mangle PREROUTING",)),
    ("-t raw -A PREROUTING -s 198.51.100.0/24 -j DROP", ("ip raw PREROUTING",)),
    ("-t raw -A PREROUTING -m addrtype --dst-type LOCAL -j DROP", ("ip raw PREROUTING",)),
    ("-t raw -A PREROUTING -m u32 --u32 0>>22&0x3C@0=30080 -j DROP", ("ip raw PREROUTING",)),
    ("-t raw -A PREROUTING -i eth0 -m comment --comment closed -j DROP", ("ip raw PREROUTING",)),
    ("-t raw -A PREROUTING -p icmp -j DROP", ()),
    ("-t raw -A PREROUTING -p tcp --dport 22 -j ACCEPT", ()),
    ("-t filter -A INPUT -p tcp --dport 30080 -j DROP", ()),
]


RAW, MANGLE = "ip raw (iptables-legacy)", "ip mangle (iptables-legacy)"
LEGACY = [
    *((rule, tuple(f"{name[:-len(' PREROUTING')]} (iptables-legacy) PREROUTING" for name in named))
      for rule, named in IPTABLES),
    ("-t raw -A PREROUTING -p udp --dport 30080 -j DROP", (f"{RAW} PREROUTING",)),
    ("-t raw -A PREROUTING -p tcp ! --dport 22 -j DROP", (f"{RAW} PREROUTING",)),
    ("-t raw -A PREROUTING -p tcp --dport 22 -j DROP", ()),
    ("-t raw -A PREROUTING -p tcp -m multiport --dports 22,80,8000:9000 -j DROP", ()),
    ("-t raw -A PREROUTING -m iprange --src-range 192.0.2.1-192.0.2.9 -j DROP",
     (f"{RAW} PREROUTING",)),
    ("-t raw -P PREROUTING DROP", (f"{RAW} PREROUTING",)),
    ("-t raw -A PREROUTING ! -p icmp -j DROP", (f"{RAW} PREROUTING",)),
    ("-t mangle -A PREROUTING -m conntrack --ctstate NEW -j DROP", (f"{MANGLE} PREROUTING",)),
    ("-t mangle -A PREROUTING -m conntrack ! --ctstate RELATED,ESTABLISHED -j DROP",
     (f"{MANGLE} PREROUTING",)),
    ("-t raw -A PREROUTING -m addrtype --dst-type BROADCAST -j DROP", ()),
    ("-t raw -A PREROUTING -m addrtype --src-type MULTICAST -j DROP", ()),
    ("-t raw -A PREROUTING -m rpfilter --invert -j DROP", ()),
    ("-t raw -A OUTPUT -p tcp --dport 30080 -j DROP", ()),
    ("-t mangle -A PREROUTING -m conntrack --ctstate INVALID -j DROP", ()),
    ("-t mangle -A PREROUTING -p tcp -m conntrack --ctorigdstport 30080 -j DROP",
     (f"{MANGLE} PREROUTING",)),
]
