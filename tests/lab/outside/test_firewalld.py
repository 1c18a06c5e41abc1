# SPDX-License-Identifier: Apache-2.0
"""The packet path behind firewalld, with the rules that firewalld 1.3.3 has written for node-1: its
FORWARD chain accepts what conntrack has translated, and rejects what no policy allows.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.outside.netfilter import flush_conntrack, masqueraded, objects, on, plain
from tests.support.lab.dial import Dial
from tests.support.lab.field import NODES4, NODES6, Field, at, both_families, check, forward, there

RULES = (Path(__file__).parents[2] / "golden/firewalls/firewalld-1.3.3.nft").read_text()
POLICY = "filter_FWD_policy_to-pods"
"""The chain of the policy that lets packets from zone public pass to zone trusted, the pods'."""
REFUSED_BY_HOST = {False: "EHOSTUNREACH", True: "EACCES"}
"""What a client gets for icmpx admin-prohibited, by IPv6."""


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field(*forward("stack"), name="fd") as made:
        made.create(*objects(made))
        made.settle()
        yield made


@pytest.fixture(autouse=True)
def _clean(field: Field) -> Iterator[None]:
    yield
    on(field.lab.nodes[0], "nft", "flush", "ruleset")
    there(field.lab.nodes[0], flush_conntrack)


def load(field: Field, rules: str) -> None:
    on(field.lab.nodes[0], "nft", "-f", "-", stdin=rules)


@both_families
def test_a_policy_lets_packets_pass_to_pods(field: Field, v6: bool):
    load(field, RULES)
    for row in (*masqueraded(v6), *plain(v6)):
        check(field, row)


@both_families
def test_without_a_policy_packets_to_local_pods_are_rejected(field: Field, v6: bool):
    """kube-proxy's pass, by `ct status dnat accept`. Masqueraded packets to other nodes bypass the
    chain.
    """
    rules = RULES.replace(f"jump {POLICY}\n", "return\n")
    assert rules != RULES
    load(field, rules)
    node = (NODES6 if v6 else NODES4)[0]
    check(field, Dial("to another node", "outside", at("NodePort", 12, v6), "b1", "tcp", node))
    for number in (11, 14):  # policy Cluster and Local
        host, _, port = at("NodePort", number, v6).rpartition(":")
        answer = field["outside"].many(3, host.strip("[]"), int(port), protocol="tcp")
        assert not answer["names"]
        assert set(answer["errors"]) == {REFUSED_BY_HOST[v6]}
