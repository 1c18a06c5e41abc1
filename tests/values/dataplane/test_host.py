# SPDX-License-Identifier: Apache-2.0
"""What rules of other programs refuse, the position of our rule among them, and the kernel's
notation of ports.
"""

import struct

import pytest

from kbpf.kernel.net.netlink import Message, Netlink, pack_attribute, pack_string
from kbpf.kernel.netfilter import nft, pre_dnat_rules, uapi
from kbpf.kernel.netfilter.forward_rules import KEEPALIVE_COMMENT, BaseChain, ChainRule, masquerade_comment, refuses_all
from kbpf.kernel.system import sysctl
from tests.support.table import each_line, each_pair

MARK = 0x4000


def attribute(kind: int, *inner: bytes) -> bytes:
    return pack_attribute(kind, b"".join(inner))


def expression(name: str, *data: bytes) -> bytes:
    """An expression of a rule, as the kernel sends it."""
    return attribute(
        uapi.NFTA_LIST_ELEM,
        attribute(uapi.NFTA_EXPR_NAME, name.encode() + b"\0"),
        attribute(uapi.NFTA_EXPR_DATA, *data),
    )


def verdict(code: int, chain: str = "") -> bytes:
    """`code`: NF_DROP, NF_ACCEPT, or NFT_JUMP (-3) with its chain."""
    target = [attribute(uapi.NFTA_VERDICT_CHAIN, chain.encode() + b"\0")] if chain else []
    number = attribute(uapi.NFTA_VERDICT_CODE, struct.pack(">i", code))
    return expression(
        "immediate",
        attribute(uapi.NFTA_IMMEDIATE_DREG, struct.pack(">I", uapi.NFT_REG_VERDICT)),
        attribute(uapi.NFTA_IMMEDIATE_DATA, attribute(uapi.NFTA_DATA_VERDICT, number, *target)),
    )


def xt(kind: str, name: str) -> bytes:
    """A match or target of iptables."""
    return expression(kind, attribute(uapi.NFTA_MATCH_NAME, name.encode() + b"\0"))


def named(kind: int) -> bytes:
    """A use of an object that is defined elsewhere in the table."""
    return expression("objref", attribute(uapi.NFTA_OBJREF_IMM_TYPE, struct.pack(">I", kind)))


PARTS = {
    "accept": verdict(uapi.NF_ACCEPT),
    "another-target": xt("target", "MARK"),
    "comment": xt("match", "comment"),
    "conntrack": xt("match", "conntrack"),
    "counter": expression("counter", bytes(24)),
    "drop": verdict(uapi.NF_DROP),
    "jump": verdict(-3, "cali-FORWARD"),
    "load": expression("immediate", attribute(uapi.NFTA_IMMEDIATE_DATA, attribute(1, bytes(4)))),
    "log": expression("log"),
    "named-counter": named(uapi.NFT_OBJECT_COUNTER),
    "named-quota": named(2),
    "reject": expression("reject", bytes(8)),
    "REJECT": xt("target", "REJECT"),
    "to-a-pod": expression("payload") + expression("cmp"),
    "verdict-map": expression("lookup", attribute(uapi.NFTA_LOOKUP_DREG, struct.pack(">I", uapi.NFT_REG_VERDICT))),
}
"""The expressions of rules; REJECT is that of iptables."""


def rule(expressions: bytes) -> nft.Rule:
    text = KEEPALIVE_COMMENT.encode() + b"\0"
    return nft._parse_rule(
        {
            uapi.NFTA_RULE_CHAIN: b"c\0",
            uapi.NFTA_RULE_HANDLE: struct.pack(">Q", 7),
            uapi.NFTA_RULE_EXPRESSIONS: expressions,
            uapi.NFTA_RULE_USERDATA: b"\5\1x" + bytes((0, len(text))) + text,
        }
    )


@each_pair(
    "parts, refuses",
    """\
counter REJECT → yes
comment counter REJECT → yes
drop → yes
counter drop → yes
log drop → yes
named-counter drop → yes
named-quota drop → no
reject → yes
to-a-pod counter REJECT → no
to-a-pod drop → no
conntrack counter drop → no
counter accept → no
counter jump → no
another-target → no
counter → no
 → no
verdict-map → no
load → no
""",
)
def test_which_rules_refuse_all_packets(parts, refuses):
    """The expressions of a rule → whether they refuse all packets."""
    parsed = rule(b"".join(PARTS[part] for part in parts.split()))
    assert (parsed.chain, parsed.handle, parsed.comment) == ("c", 7, KEEPALIVE_COMMENT)
    assert refuses_all(parsed.expressions) == (refuses == "yes")


@pytest.mark.parametrize("family", ["ip", "ip6", "inet", "netdev", "bridge", "arp"])
def test_rules_of_each_family_are_read(family, monkeypatch):
    """A firewall may be a bridge's. A kernel that ignores the filter lists other rules, too."""
    asked = []

    def rule_in(table: str, chain: str) -> Message:
        body = pack_string(uapi.NFTA_RULE_TABLE, table) + pack_string(uapi.NFTA_RULE_CHAIN, chain)
        handle = attribute(uapi.NFTA_RULE_HANDLE, struct.pack(">Q", 7))
        return Message(0, 0, bytes(4) + body + handle + attribute(uapi.NFTA_RULE_EXPRESSIONS, PARTS["drop"]))

    def dump(_: Netlink, __: int, body: bytes) -> list[Message]:
        asked.append(body)
        return [rule_in("t", "c"), rule_in("t", "d"), rule_in("u", "c")] * 40

    monkeypatch.setattr(Netlink, "dump", dump)
    (found,) = set(nft.list_rules(family, "t", "c"))
    assert (found.chain, found.handle, found.expressions[0].refuses) == ("c", 7, True)
    assert len(list(nft.list_rules(family, "t"))) == 80
    assert len({body[0] for body in asked}) == 1


def test_a_chain_whose_name_begins_like_a_verdict_is_none(monkeypatch):
    """tests/programs/node/test_pre_dnat_rules.py has what real rules refuse."""
    legacy = pre_dnat_rules.iptables_legacy
    monkeypatch.setattr(legacy, "list_tables", lambda family: ("raw",) * (family == "ip"))
    monkeypatch.setattr(legacy, "save", lambda *_: "*raw\n-A PREROUTING -j DROP-LISTED\n")
    assert pre_dnat_rules.find_legacy_chains() == ((), ())


@each_line(
    "rules_text, drops, closed, place, holds, hands_over",
    """\
 | no | no | 0 | no
 | yes | yes | 0 | no
o | yes | yes | 0 | yes
... | yes | yes | 3 | no
...o | yes | yes | 3 | yes
o... | yes | yes | 3 | no
..o. | yes | yes | 3 | no
...m | yes | yes | 3 | no
...oo | yes | yes | 3 | no
...mo | yes | yes | 3 | no
..! | no | yes | 2 | no
..o! | no | yes | 2 | yes
..!o | no | yes | 2 | no
..o!.. | yes | yes | 2 | yes
o.. | no | no | 2 | no
...h | yes | yes | 3 | no | yes
...ho | yes | yes | 3 | yes | yes
...oh | yes | yes | 3 | yes | yes
..oh! | no | yes | 2 | yes | yes
..h!o | no | yes | 2 | no | yes
..h.o | yes | yes | 3 | yes
..hh | yes | yes | 2 | no
""",
    drops=bool,
    closed=bool,
    place=int,
    holds=bool,
    hands_over=lambda cell: cell == "yes",
)
def test_the_position_of_our_rule(rules_text, drops, closed, place, holds, hands_over):
    """The rules of a chain: "." a foreign rule, "!" a foreign one that refuses all, "o" ours, "m" ours with another
    mark, "h" ours for connections of a replaced kube-proxy. `drops`: the policy is DROP. Expected: whether the chain is
    closed, the position where our rule belongs, whether it is exactly there, and the same for "h".
    """
    comments = {"o": masquerade_comment(MARK), "m": masquerade_comment(1), "h": KEEPALIVE_COMMENT}
    rules = tuple(ChainRule(i, comments.get(kind, "kbpf's friend"), kind == "!") for i, kind in enumerate(rules_text))
    chain = BaseChain("ip", "filter", "FORWARD", drops, rules)
    found = (chain.is_closed, chain.insert_position, chain.has_masquerade_rule(MARK), chain.has_keepalive_rule)
    assert found == (closed, place, holds, hands_over)
    for kinds, ours in (("om", chain.masquerade_rules), ("h", chain.keepalive_rules)):
        assert [r.handle for r in ours] == [i for i, k in enumerate(rules_text) if k in kinds]


@each_pair(
    "ports, written",
    """\
 →
80 → 80
80 81 82 → 80-82
148 321 322 323 8080 → 148,321-323,8080
61000 61001 61002 61003 61004 → 61000-61004
""",
)
def test_ports_as_the_kernel_writes_them(ports, written):
    numbers = set(map(int, ports.split()))
    assert sysctl.parse_ports(written) == numbers
    assert sysctl.parse_ports("8080,148,321-323") == {148, 321, 322, 323, 8080}, "in any order"
    assert sysctl.format_ports(numbers) == written
