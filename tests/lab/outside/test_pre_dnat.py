# SPDX-License-Identifier: Apache-2.0
"""Host rules that refuse packets before DNAT. With `--forwarding netfilter` and in mode ipvs they
guard NodePorts and VIPs, as with kube-proxy. Otherwise they do not in mode bpf, as `kbpf check` and
docs/limits.md say.
"""

import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest

from tests.lab.outside.netfilter import flush_conntrack, objects, on
from tests.support.lab.dial import Dial
from tests.support.lab.field import (
    DROPPED,
    NODES4,
    NODES6,
    OUT4,
    OUT6,
    WITH_CONNTRACK,
    Field,
    at,
    both_families,
    check,
    forward,
    split,
    there,
)
from tests.support.lab.modes import PACKETS


class Rule(NamedTuple):
    """A rule about the Service at this kind of address. `match`: of nft, with the client `c` and the port `p` that it
    dials. More rules, compared with a real kube-proxy: tests/lab/neighbours/test_beside_kube_proxy.py.
    """

    kind: str
    priority: str
    match: str


RULES = (
    Rule("NodePort", "raw", "{protocol} dport {p}"),
    Rule("VIP", "mangle", "{ip} saddr {c} {protocol} dport {p}"),
)


class Guarded(Field):
    """`guarded`: rules before DNAT are in force."""

    guarded: bool


@pytest.fixture(scope="module", params=[how for how in WITH_CONNTRACK if how != "direct"])
def field(request: pytest.FixtureRequest) -> Iterator[Guarded]:
    with Guarded(*forward(request.param), name="pd") as made:
        made.guarded = PACKETS or request.param == "netfilter"
        made.create(*objects(made))
        made.settle()
        yield made


@pytest.fixture(autouse=True)
def _clean(field: Guarded) -> Iterator[None]:
    yield
    on(field.lab.nodes[0], "nft", "-f", "-", stdin="table inet guard {}\ndelete table inet guard\n")
    there(field.lab.nodes[0], flush_conntrack)


@both_families
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_rules_before_dnat(field: Guarded, rule: Rule, v6: bool):
    """TCP and UDP to a local backend, a remote one, and a local one with policy Local."""
    node = field.lab.nodes[0]
    host, client = (NODES6 if v6 else NODES4)[0], OUT6 if v6 else OUT4
    backends = ((1, "a1", host), (2, "b1", host), (4, "a1", client))
    for (protocol, base), (number, pod, seen) in product((("tcp", 10), ("udp", 20)), backends):
        to = at(rule.kind, base + number, v6)
        match = rule.match.format(protocol=protocol, ip="ip6" if v6 else "ip", c=client, p=split(to)[1])
        hook = f"type filter hook prerouting priority {rule.priority};"
        text = f"table inet guard {{\nchain c {{ {hook}\n{match} counter drop\n}}\n}}\n"
        on(node, "nft", "-f", "-", stdin=text)
        outcome = DROPPED if field.guarded else pod
        check(field, Dial(match, "outside", to, outcome, protocol, "" if field.guarded else seen))
        (count,) = re.findall(r"counter packets (\d+)", on(node, "nft", "list", "table", "inet", "guard"))
        assert (int(count) > 0) == field.guarded
        on(node, "nft", "delete", "table", "inet", "guard")
