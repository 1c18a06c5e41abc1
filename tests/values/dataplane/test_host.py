# SPDX-License-Identifier: Apache-2.0
"""The position of our rule among foreign rules of a chain, and the kernel's notation of ports."""

from typing import NamedTuple

import pytest

from kbpf.kernel.netfilter.forward_rules import (
    KEEPALIVE_COMMENT,
    BaseChain,
    ChainRule,
    masquerade_comment,
    refuses_all,
)
from kbpf.kernel.system import sysctl

MARK = 0x4000
COUNTER = {"counter": {"packets": 7, "bytes": 9}}
COMMENT = {"xt": {"type": "match", "name": "comment"}}
REJECT = {"xt": {"type": "target", "name": "REJECT"}}
TO_A_POD = {
    "match": {
        "op": "==",
        "left": {"payload": {"protocol": "ip", "field": "daddr"}},
        "right": "10.244.1.2",
    }
}


EXPRESSIONS = {
    "iptables -j REJECT": ([COUNTER, REJECT], True),
    "iptables -m comment -j REJECT": ([COMMENT, COUNTER, REJECT], True),
    "drop": ([{"drop": None}], True),
    "counter drop": ([COUNTER, {"drop": None}], True),
    "log, then drop": ([{"log": {"prefix": "no: "}}, {"drop": None}], True),
    "reject with a reason": ([{"reject": {"type": "icmp", "expr": "host-prohibited"}}], True),
    "reject to one pod": ([TO_A_POD, COUNTER, REJECT], False),
    "drop to one pod": ([TO_A_POD, {"drop": None}], False),
    "a match by an iptables module": (
        [{"xt": {"type": "match", "name": "conntrack"}}, COUNTER, {"drop": None}], False),
    "accept": ([COUNTER, {"accept": None}], False),
    "a jump": ([COUNTER, {"jump": {"target": "cali-FORWARD"}}], False),
    "another target": ([{"xt": {"type": "target", "name": "MARK"}}], False),
    "only a counter": ([COUNTER], False),
    "nothing": ([], False),
    "an extension that is not shown": ([{"xt": None}, {"drop": None}], False),
}  # fmt: skip
"""A rule as libnftables lists it, and whether it refuses all packets."""


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_which_rules_refuse_all_packets(name: str):
    expressions, refuses = EXPRESSIONS[name]
    assert refuses_all(expressions) == refuses


class Place(NamedTuple):
    """The rules of a chain: "." a foreign rule, "!" a foreign one that refuses all, "o" ours, "m"
    ours with another mark, "h" ours for connections of a replaced kube-proxy. `drops`: the policy
    is DROP. Expected: whether the chain is closed, the position where our rule belongs, whether it
    is exactly there, and the same for "h".
    """

    rules: str
    drops: bool
    closed: bool
    place: int
    holds: bool
    hands_over: bool = False


PLACES = [
    Place("", False, False, 0, False),
    Place("", True, True, 0, False),
    Place("o", True, True, 0, True),
    Place("...", True, True, 3, False),
    Place("...o", True, True, 3, True),
    Place("o...", True, True, 3, False),  # foreign rules were appended after ours
    Place("..o.", True, True, 3, False),
    Place("...m", True, True, 3, False),
    Place("...oo", True, True, 3, False),
    Place("...mo", True, True, 3, False),
    Place("..!", False, True, 2, False),
    Place("..o!", False, True, 2, True),
    Place("..!o", False, True, 2, False),
    Place("..o!..", True, True, 2, True),
    Place("o..", False, False, 2, False),
    Place("...h", True, True, 3, False, True),
    Place("...ho", True, True, 3, True, True),
    Place("...oh", True, True, 3, True, True),
    Place("..oh!", False, True, 2, True, True),
    Place("..h!o", False, True, 2, False, True),
    Place("..h.o", True, True, 3, True, False),
    Place("..hh", True, True, 2, False, False),
]


@pytest.mark.parametrize("row", PLACES, ids=lambda row: f"{row.rules!r} drops={row.drops}")
def test_the_position_of_our_rule(row: Place):
    comments = {"o": masquerade_comment(MARK), "m": masquerade_comment(1), "h": KEEPALIVE_COMMENT}
    rules = tuple(ChainRule(i, comments.get(kind, "kbpf's friend"), kind == "!")
                  for i, kind in enumerate(row.rules))  # fmt: skip
    chain = BaseChain("ip", "filter", "FORWARD", row.drops, rules)
    found = (
        chain.is_closed,
        chain.insert_position,
        chain.has_masquerade_rule(MARK),
        chain.has_keepalive_rule,
    )
    assert found == (row.closed, row.place, row.holds, row.hands_over)
    for kinds, ours in (("om", chain.masquerade_rules), ("h", chain.keepalive_rules)):
        assert [r.handle for r in ours] == [i for i, k in enumerate(row.rules) if k in kinds]


@pytest.mark.parametrize(
    ("text", "ports", "written"),
    [
        ("", set(), ""),
        ("80", {80}, "80"),
        ("80,81,82", {80, 81, 82}, "80-82"),
        ("8080,148,321-323", {148, 321, 322, 323, 8080}, "148,321-323,8080"),
        ("61000-61002,61003-61004", {61000, 61001, 61002, 61003, 61004}, "61000-61004"),
    ],
)
def test_ports_as_the_kernel_writes_them(text: str, ports: set[int], written: str):
    assert sysctl.parse_ports(text) == ports
    assert sysctl.format_ports(ports) == written
