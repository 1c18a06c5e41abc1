# SPDX-License-Identifier: Apache-2.0
"""The rows of test_pre_dnat_rules.py."""

from typing import NamedTuple


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


IPTABLES = [
    ("-t raw -A PREROUTING -p tcp --dport 30000:32767 -j DROP", ("ip raw PREROUTING",)),
    ("-t mangle -A PREROUTING -p tcp -m multiport --dports 30080 -j DROP",
     ("ip mangle PREROUTING",)),
    ("-t mangle -A PREROUTING -m conntrack --ctorigdst 192.0.2.5 -j DROP",
     ("ip mangle PREROUTING",)),
    ("-t raw -A PREROUTING -s 198.51.100.0/24 -j DROP", ("ip raw PREROUTING",)),
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
    ("-t raw -A OUTPUT -p tcp --dport 30080 -j DROP", ()),
    ("-t mangle -A PREROUTING -m conntrack --ctstate INVALID -j DROP", ()),
    ("-t mangle -A PREROUTING -p tcp -m conntrack --ctorigdstport 30080 -j DROP",
     (f"{MANGLE} PREROUTING",)),
]
