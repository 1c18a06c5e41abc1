"""Which rules of a host's firewall kbpf warns of: those that judged NodePorts and VIPs before DNAT
and are passed by now. Real rulesets, by nft and iptables-nft, in a network namespace.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane import firewalls
from kbpf.kernel import early_rules, netns
from tests.support.lab import run


class Row(NamedTuple):
    """A ruleset of nft, and the base chains that are named."""

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
]  # fmt: skip


@pytest.fixture
def where() -> Iterator[str]:
    name = f"kber{os.getpid()}"
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")
    yield name
    run("ip", "netns", "del", name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_nft(where: str, row: Row) -> None:
    run("ip", "netns", "exec", where, "nft", "-f", "-", stdin=row.rules.replace("; }", ";\n}\n"))
    found = netns.inside(Path("/run/netns") / where, early_rules.chains)
    assert found == row.named
    lines = netns.inside(Path("/run/netns") / where, firewalls.early)
    assert len(lines) == bool(row.named)
    assert all(name in line for name in row.named for line in lines)


IPTABLES = [
    ("-t raw -A PREROUTING -p tcp --dport 30000:32767 -j DROP", ("ip raw PREROUTING",)),
    ("-t mangle -A PREROUTING -p tcp -m multiport --dports 30080 -j DROP",
     ("ip mangle PREROUTING",)),
    ("-t mangle -A PREROUTING -m conntrack --ctorigdst 192.0.2.5 -j DROP",
     ("ip mangle PREROUTING",)),
    ("-t raw -A PREROUTING -s 198.51.100.0/24 -j DROP", ("ip raw PREROUTING",)),
    ("-t raw -A PREROUTING -p tcp --dport 22 -j ACCEPT", ()),
    ("-t filter -A INPUT -p tcp --dport 30080 -j DROP", ()),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "named"), IPTABLES, ids=[rule for rule, _ in IPTABLES])
def test_iptables(where: str, rule: str, named: tuple[str, ...]) -> None:
    command = ["ip", "netns", "exec", where, "iptables-nft", *rule.split()]
    subprocess.run(command, check=True, capture_output=True)
    assert netns.inside(Path("/run/netns") / where, early_rules.chains) == named


def test_without_rules_nothing_is_said(where: str) -> None:
    assert netns.inside(Path("/run/netns") / where, firewalls.early) == ()
