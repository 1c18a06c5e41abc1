# SPDX-License-Identifier: Apache-2.0
"""Firewall rules that kbpf warns of: rules that refuse NodePorts and VIPs before kube-proxy's DNAT,
which our traffic does not pass. Real rulesets of nft, iptables-nft and iptables-legacy.
"""

import functools
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.checks import packet_path
from kbpf.dataplane import firewalls
from kbpf.dataplane.bpf.maps.layout import NodeFlag
from kbpf.errors import escape_unprintable
from kbpf.kernel.net.netlink import Netlink, NetlinkRequest, pack_attribute
from kbpf.kernel.net.uapi import NETLINK_NETFILTER, NLA_F_NESTED, NLM_F_CREATE
from kbpf.kernel.netfilter import forward_rules, pre_dnat_rules, uapi
from kbpf.kernel.system import netns
from kbpf.takeover import kube_proxy_cleanup as cleanup
from tests.programs.node.rows_pre_dnat_rules import CALICO, FIREWALLD, IPTABLES, LEGACY, RAW, ROWS, Row, in_table
from tests.support.lab.lab import run

LEGACY_TOOL = ("iptables-legacy", "-w")
"""It waits for a lock that programs in other namespaces use, too."""


@pytest.fixture
def where() -> Iterator[str]:
    name = f"kber{os.getpid()}"
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")
    yield name
    run("ip", "netns", "del", name)


NFT_NEWTABLE, NFT_NEWCHAIN = uapi.NFNL_SUBSYS_NFTABLES << 8 | 0, uapi.NFNL_SUBSYS_NFTABLES << 8 | 3


def find(where: str) -> pre_dnat_rules.EarlyChains:
    return netns.run_in(Path("/run/netns") / where, pre_dnat_rules.find_chains)


def find_legacy(where: str) -> pre_dnat_rules.EarlyChains:
    return netns.run_in(Path("/run/netns") / where, pre_dnat_rules.find_legacy_chains)


def warnings() -> tuple[str, ...]:
    return firewalls.early_drop_warnings(firewalls.find_early_chains())


def load(where: str, rules: str) -> None:
    run("ip", "netns", "exec", where, "nft", "-f", "-", stdin=rules.replace("; }", ";\n}\n"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_nft_chains_are_named(where: str, row: Row) -> None:
    load(where, row.rules)
    assert find(where) == (row.named, ())
    lines = netns.run_in(Path("/run/netns") / where, warnings)
    assert len(lines) == bool(row.named)
    assert all(name in line for name in row.named for line in lines)


@pytest.mark.parametrize(("rule", "named"), IPTABLES, ids=[rule for rule, _ in IPTABLES])
def test_iptables_nft_chains_are_named(where: str, rule: str, named: tuple[str, ...]) -> None:
    command = ["ip", "netns", "exec", where, "iptables-nft", *rule.split()]
    subprocess.run(command, check=True, capture_output=True)
    assert find(where) == (named, ())


@pytest.mark.parametrize("backend", ["nft", "legacy"])
@pytest.mark.parametrize(("what", "rules", "tables"), CALICO, ids=[what for what, *_ in CALICO])
def test_chains_of_calico_are_named_if_it_has_policies_before_dnat(
    where: str, what: str, rules: str, tables: tuple[str, ...], backend: str
) -> None:
    run("ip", "netns", "exec", where, f"iptables-{backend}-restore", "-w", "--noflush", stdin=rules)
    suffix = " (iptables-legacy)" * (backend == "legacy")
    chains = tuple(f"ip {table}{suffix} PREROUTING" for table in tables)
    assert (find_legacy if suffix else find)(where) == (chains, ())


def test_large_tables_are_not_read(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table one rule above the limit is reported and not read, whatever follows it."""
    rules = "\n".join(["tcp dport 22 accept"] * 9)
    load(where, in_table(f"---{rules}\ntcp dport 30080 drop"))
    load(where, in_table("---drop").replace("inet t ", "inet u "))
    monkeypatch.setattr(pre_dnat_rules, "MAX_RULES", 10)
    assert find(where) == (("inet t c", "inet u c"), ())
    monkeypatch.setattr(pre_dnat_rules, "MAX_RULES", 9)
    assert find(where) == (("inet u c",), ("inet t c (more than 9 rules)",))
    place = Path("/run/netns") / where
    lines = netns.run_in(place, warnings)
    assert ["inet u c" in lines[0], "inet t c" in lines[1]] == [True, True]
    row = netns.run_in(place, lambda: packet_path._early_rules_row(Path("/nowhere"), NodeFlag(0)))
    assert row.result == "no"
    detail = "inet u c; inet t c (more than 9 rules) cannot be read"
    assert row.detail.partition(": ")[2] == detail


def test_a_line_names_a_few_chains(where: str) -> None:
    for number in range(12):
        load(where, in_table("---tcp dport 30080 drop").replace("inet t ", f"inet t{number:02} "))
    (line,) = netns.run_in(Path("/run/netns") / where, warnings)
    assert "inet t00 c, inet t01 c, " in line
    assert ", inet t07 c and 4 more sees them" in line


def send_chain(table: bytes, name: bytes) -> None:
    """Creates an empty base chain before DNAT that drops, under names that nft would refuse."""
    table_name = pack_attribute(uapi.NFTA_TABLE_NAME, table + b"\0")
    hook = pack_attribute(uapi.NFTA_HOOK_HOOKNUM, bytes(4))
    hook += pack_attribute(uapi.NFTA_HOOK_PRIORITY, struct.pack(">i", -300))
    chain = (
        table_name
        + pack_attribute(uapi.NFTA_CHAIN_NAME, name + b"\0")
        + pack_attribute(uapi.NFTA_CHAIN_HOOK | NLA_F_NESTED, hook)
        + pack_attribute(uapi.NFTA_CHAIN_POLICY, bytes(4))
        + pack_attribute(uapi.NFTA_CHAIN_TYPE, b"filter\0")
    )
    header = struct.pack("=BBH", uapi.NFPROTO_INET, 0, 0)
    batch = struct.pack(">BBH", 0, 0, uapi.NFNL_SUBSYS_NFTABLES)
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        netlink.send_batch(
            NetlinkRequest(uapi.NFNL_MSG_BATCH_BEGIN, batch),
            [
                NetlinkRequest(NFT_NEWTABLE, header + table_name, NLM_F_CREATE),
                NetlinkRequest(NFT_NEWCHAIN, header + chain, NLM_F_CREATE),
            ],
            NetlinkRequest(uapi.NFNL_MSG_BATCH_END, batch),
        )


def test_tables_that_cannot_be_read_hide_no_others(where: str) -> None:
    """libnftables would end the process (SIGABRT) at a name that is not UTF-8."""
    load(where, in_table("---tcp dport 30080 drop"))
    place = Path("/run/netns") / where
    for table, name in ((b"b\xfcro", b"c"), (b"a\x1b[31m b", b"c\nd")):
        netns.run_in(place, functools.partial(send_chain, table, name))
    chains = ("inet a\x1b[31m b c\nd", "inet b\\xfcro c", "inet t c")
    assert find(where) == (chains, ())
    (line,) = netns.run_in(place, warnings)
    assert not netns.run_in(place, cleanup.has_rules), "kube-proxy's"
    assert escape_unprintable(line).count("inet a\\x1b[31m b c\\nd, inet b\\xfcro c, inet t c")


@pytest.mark.parametrize(("rule", "named"), LEGACY, ids=[rule for rule, _ in LEGACY])
def test_iptables_legacy_chains_are_named(where: str, rule: str, named: tuple[str, ...]) -> None:
    run("ip", "netns", "exec", where, *LEGACY_TOOL, *rule.split())
    assert find_legacy(where) == (named, ())
    lines = netns.run_in(Path("/run/netns") / where, warnings)
    assert len(lines) == bool(named)
    assert all(name in line for name in named for line in lines)


@pytest.mark.parametrize("comment", [b"B\xfcro", b'a\n-A x "', b"it's", b"\xe2\x80\xa8", b"\\", b"-m rpfilter"])
def test_comments_in_iptables_legacy_hide_no_rule(where: str, comment: bytes) -> None:
    for port in ("22", "30080"):
        args = f"-t raw -A PREROUTING -p tcp --dport {port} -m comment --comment".split()
        run("ip", "netns", "exec", where, *LEGACY_TOOL, *args, os.fsdecode(comment), "-j", "DROP")
    assert find_legacy(where) == ((f"{RAW} PREROUTING",), ())


def test_unreadable_iptables_legacy_tables_are_reported(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in our image, which has no iptables-legacy. A table that exists is reported, because its
    rules cannot be known.
    """
    run("ip", "netns", "exec", where, *LEGACY_TOOL, "-t", "raw", "-S")
    run("ip", "netns", "exec", where, "ip6tables-legacy", "-w", "-t", "mangle", "-S")
    monkeypatch.setenv("PATH", str(tmp_path))
    unread = ("ip raw (iptables-legacy)", "ip6 mangle (iptables-legacy)")
    assert find_legacy(where) == ((), unread)
    (line,) = netns.run_in(Path("/run/netns") / where, warnings)
    assert line.startswith(f"{', '.join(unread)} cannot be read from here; ")


FORWARD = [
    ("firewalld", FIREWALLD.read_text(), ("inet firewalld filter_FORWARD",)),
    ("a policy", "table inet t { chain c { type filter hook forward priority 0; policy drop; } }", ("inet t c",)),
    (
        "a last rule",
        "table inet t { chain c { type filter hook forward priority 0; ct state established accept\ncounter drop; } }",
        ("inet t c",),
    ),
    (
        "a rule for some",
        "table inet t { chain c { type filter hook forward priority 0; ip saddr 192.0.2.1 drop; } }",
        (),
    ),
    ("at input", "table inet t { chain c { type filter hook input priority 0; policy drop; } }", ()),
]


@pytest.mark.parametrize(("what", "rules", "named"), FORWARD, ids=[what for what, *_ in FORWARD])
def test_other_tables_that_refuse_in_forward_are_named(
    where: str, what: str, rules: str, named: tuple[str, ...]
) -> None:
    load(where, rules)
    place = Path("/run/netns") / where
    assert netns.run_in(place, forward_rules.list_other_drop_chains) == named
    lines = netns.run_in(place, functools.partial(firewalls.forward_warnings, 0x4000))
    assert [line.partition(" closed by ")[2].partition(",")[0] for line in lines] == list(named)


def test_no_warning_without_rules(where: str) -> None:
    assert netns.run_in(Path("/run/netns") / where, warnings) == ()
