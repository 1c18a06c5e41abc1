# SPDX-License-Identifier: Apache-2.0
"""Firewall rules that kbpf warns of: rules that refuse NodePorts and VIPs before kube-proxy's DNAT,
which our traffic does not pass. Real rulesets of nft, iptables-nft and iptables-legacy.
"""

import functools
import os
import struct
from pathlib import Path

import pytest

from kbpf.checks import packet_path
from kbpf.dataplane import node
from kbpf.dataplane.bpf.maps.layout import NodeFlag
from kbpf.errors import escape_unprintable
from kbpf.kernel.net.netlink import Netlink, NetlinkRequest, pack_attribute
from kbpf.kernel.net.uapi import NETLINK_NETFILTER, NLA_F_NESTED, NLM_F_CREATE
from kbpf.kernel.netfilter import forward_rules, pre_dnat_rules, uapi
from kbpf.takeover import kube_proxy_cleanup as cleanup
from tests.programs.node.rows_pre_dnat_rules import CALICO, FORWARD, IPTABLES, LEGACY, RAW, ROWS, Row, in_table
from tests.support.lab.namespace import Namespace

LEGACY_TOOL = "iptables-legacy -w"
"""It waits for a lock that programs in other namespaces use, too."""
NFT_NEWTABLE, NFT_NEWCHAIN = uapi.NFNL_SUBSYS_NFTABLES << 8 | 0, uapi.NFNL_SUBSYS_NFTABLES << 8 | 3


def find(namespace: Namespace) -> pre_dnat_rules.EarlyChains:
    return namespace.do(pre_dnat_rules.find_chains)


def find_legacy(namespace: Namespace) -> pre_dnat_rules.EarlyChains:
    return namespace.do(pre_dnat_rules.find_legacy_chains)


def warnings(namespace: Namespace) -> tuple[str, ...]:
    return namespace.do(lambda: node.early_drop_warnings(node.find_early_chains()))


def check_warnings(namespace: Namespace, named: tuple[str, ...]) -> None:
    lines = warnings(namespace)
    assert len(lines) == bool(named)
    assert all(name in line for name in named for line in lines)


def load(namespace: Namespace, rules: str) -> None:
    namespace.run("nft -f -", stdin=rules.replace("; }", ";\n}\n"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_nft_chains_are_named(namespace: Namespace, row: Row):
    load(namespace, row.rules)
    assert find(namespace) == (row.named, ())
    check_warnings(namespace, row.named)


@pytest.mark.parametrize(("rule", "named"), IPTABLES, ids=[rule for rule, _ in IPTABLES])
def test_iptables_nft_chains_are_named(namespace: Namespace, rule: str, named: tuple[str, ...]):
    namespace.run(f"iptables-nft {rule}")
    assert find(namespace) == (named, ())


@pytest.mark.parametrize("backend", ["nft", "legacy"])
@pytest.mark.parametrize(("what", "rules", "tables"), CALICO, ids=[what for what, *_ in CALICO])
def test_chains_of_calico_are_named_if_it_has_policies_before_dnat(
    namespace: Namespace, what: str, rules: str, tables: tuple[str, ...], backend: str
):
    namespace.run(f"iptables-{backend}-restore -w --noflush", stdin=rules)
    suffix = " (iptables-legacy)" * (backend == "legacy")
    chains = tuple(f"ip {table}{suffix} PREROUTING" for table in tables)
    assert (find_legacy if suffix else find)(namespace) == (chains, ())


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (in_table("---ct bytes > 1000 drop"), ("inet t c",)),
        (in_table("---ct original packets > 9 drop"), ("inet t c",)),
        (in_table("---ct avgpkt > 9 drop"), ("inet t c",)),
        (in_table("---ct label 5 accept"), ("inet t c",)),
        (in_table("---ct state new drop"), ()),
        (in_table("---ct mark 5 drop"), ()),
        (in_table("---ct zone 5 drop"), ()),
        ("FORWARD -m connbytes --connbytes 1:9 --connbytes-dir both --connbytes-mode packets", ("ip filter FORWARD",)),
        ("INPUT -m connlabel --label 5 -j DROP", ("ip filter INPUT",)),
    ],
)
def test_rules_that_never_match_are_named(namespace: Namespace, rules: str, named: tuple[str, ...]):
    """With `--forwarding netfilter`."""
    load(namespace, rules) if "{" in rules else namespace.run(f"iptables-nft -A {rules}")
    row = namespace.do(lambda: packet_path._early_rules_row(Path("/nowhere"), NodeFlag.NETFILTER))
    assert (row.result, [name for name in named if name in row.detail]) == ("no" if named else "yes", [*named])


def test_large_tables_are_not_read(namespace: Namespace, monkeypatch):
    """A table one rule above the limit is reported and not read, whatever follows it."""
    rules = "\n".join(["tcp dport 22 accept"] * 9)
    load(namespace, in_table(f"---{rules}\ntcp dport 30080 drop"))
    load(namespace, in_table("---drop").replace("inet t ", "inet u "))
    monkeypatch.setattr(pre_dnat_rules, "MAX_RULES", 10)
    assert find(namespace) == (("inet t c", "inet u c"), ())
    monkeypatch.setattr(pre_dnat_rules, "MAX_RULES", 9)
    assert find(namespace) == (("inet u c",), ("inet t c (more than 9 rules)",))
    lines = warnings(namespace)
    assert ["inet u c" in lines[0], "inet t c" in lines[1]] == [True, True]
    row = namespace.do(lambda: packet_path._early_rules_row(Path("/nowhere"), NodeFlag(0)))
    assert row.result == "no"
    detail = "inet u c; inet t c (more than 9 rules) cannot be read"
    assert row.detail.partition(": ")[2] == detail


def test_a_line_names_a_few_chains(namespace: Namespace):
    for number in range(12):
        load(namespace, in_table("---tcp dport 30080 drop").replace("inet t ", f"inet t{number:02} "))
    (line,) = warnings(namespace)
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


def test_tables_that_cannot_be_read_hide_no_others(namespace: Namespace):
    """libnftables would end the process (SIGABRT) at a name that is not UTF-8."""
    load(namespace, in_table("---tcp dport 30080 drop"))
    for table, name in ((b"b\xfcro", b"c"), (b"a\x1b[31m b", b"c\nd")):
        namespace.do(functools.partial(send_chain, table, name))
    chains = ("inet a\x1b[31m b c\nd", "inet b\\xfcro c", "inet t c")
    assert find(namespace) == (chains, ())
    (line,) = warnings(namespace)
    assert not namespace.do(cleanup.has_rules), "kube-proxy's"
    assert escape_unprintable(line).count("inet a\\x1b[31m b c\\nd, inet b\\xfcro c, inet t c")


@pytest.mark.parametrize(("rule", "named"), LEGACY, ids=[rule for rule, _ in LEGACY])
def test_iptables_legacy_chains_are_named(namespace: Namespace, rule: str, named: tuple[str, ...]):
    namespace.run(f"{LEGACY_TOOL} {rule}")
    assert find_legacy(namespace) == (named, ())
    check_warnings(namespace, named)


@pytest.mark.parametrize("comment", [b"B\xfcro", b'a\n-A x "', b"it's", b"\xe2\x80\xa8", b"\\", b"-m rpfilter"])
def test_comments_in_iptables_legacy_hide_no_rule(namespace: Namespace, comment: bytes):
    for port in ("22", "30080"):
        rule = f"-t raw -A PREROUTING -p tcp --dport {port} -m comment --comment"
        namespace.run(f"{LEGACY_TOOL} {rule}", os.fsdecode(comment), "-j", "DROP")
    assert find_legacy(namespace) == ((f"{RAW} PREROUTING",), ())


def test_unreadable_iptables_legacy_tables_are_reported(namespace: Namespace, monkeypatch, tmp_path):
    """As in our image, which has no iptables-legacy. A table that exists is reported, because its
    rules cannot be known.
    """
    namespace.run(f"{LEGACY_TOOL} -t raw -S")
    namespace.run("ip6tables-legacy -w -t mangle -S")
    monkeypatch.setenv("PATH", str(tmp_path))
    unread = ("ip raw (iptables-legacy)", "ip6 mangle (iptables-legacy)")
    assert find_legacy(namespace) == ((), unread)
    (line,) = warnings(namespace)
    assert line.startswith(f"{', '.join(unread)} cannot be read from here; ")


@pytest.mark.parametrize("row", FORWARD, ids=lambda row: row.what)
def test_other_tables_that_refuse_in_forward_are_named(namespace: Namespace, row: Row):
    load(namespace, row.rules)
    assert namespace.do(forward_rules.list_other_drop_chains) == row.named
    lines = namespace.do(lambda: node.forward_warnings(0x4000))
    assert [line.partition(" closed by ")[2].partition(",")[0] for line in lines] == list(row.named)
