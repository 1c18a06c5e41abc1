# SPDX-License-Identifier: Apache-2.0
"""Firewall rules that kbpf warns of: rules that refuse NodePorts and VIPs before kube-proxy's DNAT,
which our traffic does not pass. Real rulesets of nft and iptables-nft, in a network namespace.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane import firewalls
from kbpf.kernel.netfilter import pre_dnat_rules
from kbpf.kernel.system import netns
from tests.support.lab.lab import run


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
]  # fmt: skip


@pytest.fixture
def where() -> Iterator[str]:
    name = f"kber{os.getpid()}"
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")
    yield name
    run("ip", "netns", "del", name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_nft_chains_are_named(where: str, row: Row) -> None:
    run("ip", "netns", "exec", where, "nft", "-f", "-", stdin=row.rules.replace("; }", ";\n}\n"))
    found = netns.run_in(Path("/run/netns") / where, pre_dnat_rules.find_chains)
    assert found == row.named
    lines = netns.run_in(Path("/run/netns") / where, firewalls.early_drop_warnings)
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
def test_iptables_nft_chains_are_named(where: str, rule: str, named: tuple[str, ...]) -> None:
    command = ["ip", "netns", "exec", where, "iptables-nft", *rule.split()]
    subprocess.run(command, check=True, capture_output=True)
    assert netns.run_in(Path("/run/netns") / where, pre_dnat_rules.find_chains) == named


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
]  # fmt: skip


@pytest.mark.parametrize(("rule", "named"), LEGACY, ids=[rule for rule, _ in LEGACY])
def test_iptables_legacy_chains_are_named(where: str, rule: str, named: tuple[str, ...]) -> None:
    run("ip", "netns", "exec", where, "iptables-legacy", *rule.split())
    place = Path("/run/netns") / where
    assert netns.run_in(place, pre_dnat_rules.find_legacy_chains) == (named, ())
    lines = netns.run_in(place, firewalls.early_drop_warnings)
    assert len(lines) == bool(named)
    assert all(name in line for name in named for line in lines)


JUMPS = [("--dport 30080", (f"{RAW} PREROUTING",)), ("--dport 22", ())]


@pytest.mark.parametrize(("ports", "named"), JUMPS)
def test_iptables_legacy_rules_in_a_user_chain_are_found(
    where: str, ports: str, named: tuple[str, ...]
) -> None:
    for words in ("-N d", "-A d -j DROP", f"-A PREROUTING -p tcp {ports} -j d"):
        run("ip", "netns", "exec", where, "iptables-legacy", "-t", "raw", *words.split())
    found = netns.run_in(Path("/run/netns") / where, pre_dnat_rules.find_legacy_chains)
    assert found.chains == named


def test_unreadable_iptables_legacy_tables_are_reported(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in our image, which has no iptables-legacy. A table that exists is reported, because its
    rules cannot be known.
    """
    run("ip", "netns", "exec", where, "iptables-legacy", "-t", "raw", "-S")
    run("ip", "netns", "exec", where, "ip6tables-legacy", "-t", "mangle", "-S")
    monkeypatch.setenv("PATH", str(tmp_path))
    place = Path("/run/netns") / where
    unread = ("ip raw (iptables-legacy)", "ip6 mangle (iptables-legacy)")
    assert netns.run_in(place, pre_dnat_rules.find_legacy_chains) == ((), unread)
    (line,) = netns.run_in(place, firewalls.early_drop_warnings)
    assert line.startswith(f"{', '.join(unread)} cannot be read from here; ")


def test_no_warning_without_rules(where: str) -> None:
    assert netns.run_in(Path("/run/netns") / where, firewalls.early_drop_warnings) == ()
