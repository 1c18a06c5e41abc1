# SPDX-License-Identifier: Apache-2.0
"""The rows of test_pre_dnat_rules.py."""

from pathlib import Path
from typing import NamedTuple

from tests.support.table import table

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


def in_table(text: str, family: str = "inet") -> str:
    """A table with a chain `c` before DNAT; `text`: objects, then its rules after "---"."""
    objects, _, rules = text.partition("---")
    hook = "type filter hook prerouting priority mangle;"
    return f"table {family} t {{\n{objects}\nchain c {{ {hook}\n{rules}\n}}\n}}\n"


C = ("inet t c",)


class Rule(NamedTuple):
    """A rule in a base chain, and whether the warning names the chain."""

    what: str
    rule: str
    is_named: bool
    hook: str = "prerouting priority raw"

    def row(self) -> Row:
        return Row(self.what, at(self.rule, f"type filter hook {self.hook}"), C * self.is_named)


RULES = table(
    Rule,
    """
NodePorts            | tcp dport 30000-32767 drop                | yes
one NodePort         | udp dport 30080 reject                    | yes
TCP, by a reset      | tcp dport 30080 reject with tcp reset     | yes
another port         | tcp dport 22 drop                         | yes
a list of sources    | ip saddr 198.51.100.0/24 drop             | yes
in mangle            | tcp dport 30080 drop                      | yes | prerouting priority mangle
behind DNAT          | tcp dport 30080 drop                      | no  | prerouting priority filter
at input             | tcp dport 30080 drop                      | no  | input priority raw
no refusal           | tcp dport 30080 accept                    | no
a mark and a counter | counter meta mark set 1 ct state new log  | no
by a verdict map     | tcp dport vmap { 30080 : drop }           | yes
to an address of the node | fib daddr type local tcp dport 30080 drop | yes
from this device, to an address | fib daddr . iif type local tcp dport 30080 drop | yes
by policy            | tcp dport 80 accept                       | yes | prerouting priority raw; policy drop
""",
)
ROWS = [
    Row("nothing", ""),
    *(rule.row() for rule in RULES),
    Row(
        "in a chain that it jumps to",
        "table inet t { chain d { tcp dport 30080 drop; }\n"
        "chain c { type filter hook prerouting priority raw; jump d; } }",
        C,
    ),
    Row(
        "in a chain behind that",
        "table inet t { chain e { drop; }\nchain d { goto e; }\n"
        "chain c { type filter hook prerouting priority raw; tcp dport 30080 jump d; } }",
        C,
    ),
    Row(
        "in a chain for addresses of the node",
        "table inet t { chain d { tcp dport 30080 drop; }\n"
        "chain c { type filter hook prerouting priority raw; fib daddr type local jump d; } }",
        C,
    ),
    Row(
        "in a chain that nothing leads to",
        "table inet t { chain d { tcp dport 30080 drop; }\nchain c { type filter hook prerouting priority raw; } }",
    ),
    Row(
        "at ingress of a device",
        "table netdev t { chain c { type filter hook ingress device lo priority 0; tcp dport 30080 drop; } }",
        ("netdev t c",),
    ),
    Row(
        "at ingress of a device, family inet",
        "table inet t { chain c { type filter hook ingress device lo priority 0; udp dport 30080 drop; } }",
        C,
    ),
    Row(
        "kube-proxy's own",
        "table ip kube-proxy { chain c { type filter hook prerouting priority -110; ip daddr 192.0.2.5 drop; } }",
    ),
    Row("IPv6", in_table("---ip6 daddr 2001:db8::1 drop", "ip6"), ("ip6 t c",)),
    Row("IPv4", in_table("---ip saddr 192.0.2.1 udp dport 30080 reject", "ip"), ("ip t c",)),
    Row("by a named set of ports", in_table("set s { type inet_service; elements = { 22 } }---tcp dport @s drop"), C),
    Row(
        "a named set that is accepted", in_table("set s { type inet_service; elements = { 22 } }---tcp dport @s accept")
    ),
    Row("by a named verdict map of sources", in_table("map m { type ipv4_addr : verdict; }---ip saddr vmap @m"), C),
    Row(
        "limited by source",
        in_table("---ct state new meter m { ip saddr limit rate over 9/second } tcp dport 30080 drop"),
        C,
    ),
    Row("reverse path filter", in_table("---fib saddr . iif oif missing drop")),
    Row("firewalld", FIREWALLD.read_text()),
    Row(
        "firewalld with a direct rule",
        FIREWALLD.read_text() + in_table("---tcp dport 30080 ip saddr 192.0.2.0/24 drop"),
        C,
    ),
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
    ("a policy with doNotTrack", CALICO_MANGLE + CALICO_RAW + CALICO_PRE_DNAT.replace("*mangle", "*raw"), ("raw",)),
]


IPTABLES = [
    ("-t raw -A PREROUTING -p tcp --dport 30000:32767 -j DROP", ("ip raw PREROUTING",)),
    ("-t mangle -A PREROUTING -p tcp -m multiport --dports 30080 -j DROP", ("ip mangle PREROUTING",)),
    ("-t raw -A PREROUTING -i eth0 -m comment --comment closed -j DROP", ("ip raw PREROUTING",)),
    ("-t raw -A PREROUTING -m rpfilter --invert -j DROP", ()),
    ("-t raw -A PREROUTING -p tcp --dport 22 -j ACCEPT", ()),
    ("-t raw -A OUTPUT -p tcp --dport 30080 -j DROP", ()),
    ("-t filter -A INPUT -p tcp --dport 30080 -j DROP", ()),
]


RAW = "ip raw (iptables-legacy)"
LEGACY = [
    *(
        (rule, tuple(f"{name[: -len(' PREROUTING')]} (iptables-legacy) PREROUTING" for name in named))
        for rule, named in IPTABLES
    ),
    ("-t raw -P PREROUTING DROP", (f"{RAW} PREROUTING",)),
    ("-t raw -P OUTPUT DROP", ()),
]


FORWARD_RULES = table(
    Rule,
    """
a policy        | counter                                    | yes | forward priority 0; policy drop
a last rule     | ct state established accept; counter drop   | yes | forward priority 0
a rule for some | ip saddr 192.0.2.1 drop                    | no  | forward priority 0
at input        | counter                                    | no  | input priority 0; policy drop
""",
)
FORWARD = [
    Row("firewalld", FIREWALLD.read_text(), ("inet firewalld filter_FORWARD",)),
    *(rule.row() for rule in FORWARD_RULES),
]
