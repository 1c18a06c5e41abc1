# SPDX-License-Identifier: Apache-2.0
"""kbpf's policy compared with kube-proxy's own functions: all small worlds, then random ones.

See worlds.py for what a world is.
"""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings

from kbpf.config import load
from kbpf.model.address import family_of, format_addr, parse_addr
from kbpf.model.objects import Node
from kbpf.policy.frontends import node_port_addresses
from tests.fuzz.worlds import POLICIES, World, compare, one_endpoint, questions, three_endpoints, two_endpoints
from tests.support.cluster.upstream import JUDGES, Judge

EXAMPLES = 600
"""Each example has up to 20 worlds; the campaign `policy` compares a million worlds."""
EACH = 13
"""One world of three endpoints in EACH is compared; the campaign compares all of them."""


@pytest.fixture(scope="module")
def judges() -> Iterator[Sequence[Judge]]:
    """One for each version of kube-proxy."""
    found = [Judge(program) for program in JUDGES]
    yield found
    for each in found:
        each.close()


@pytest.mark.parametrize("node", ["me", "", "ME"])
@pytest.mark.parametrize("zone", ["a", ""])
def test_every_world_of_one_endpoint_matches_kube_proxy(judges: Sequence[Judge], node: str, zone: str):
    assert compare(judges, one_endpoint(), node, zone) == 7 * 27 * 3 * 9


def test_every_world_of_two_endpoints_without_hints_matches_kube_proxy(judges: Sequence[Judge]):
    assert compare(judges, two_endpoints(POLICIES, [((), ())])) == 7 * 16 * 16 * 4


def test_some_worlds_of_three_endpoints_match_kube_proxy(judges: Sequence[Judge]):
    assert compare(judges, itertools.islice(three_endpoints(), 0, None, EACH)) == 9_816


@settings(max_examples=EXAMPLES, deadline=None)
@given(asked=questions())
def test_random_worlds_match_kube_proxy(judges: Sequence[Judge], asked: tuple[list[World], str, str]):
    worlds, node, zone = asked
    assert compare(judges, iter(worlds), node, zone) == len(worlds)


# ---- addresses of NodePorts --------------------------------------------------------------------

PRIMARY = {4: "192.0.2.5", 6: "2001:db8::5"}
INTERFACES = "127.0.0.1/8 192.0.2.5/24 192.0.2.6/24 10.0.0.7/8 ::1/128 2001:db8::5/64 fd00::7/64 fe80::1/64"
LOCAL = [parse_addr(each.partition("/")[0]) for each in INTERFACES.split()]
LOOPBACK = {"127.0.0.1", "::1"}
"""kbpf serves these only with --localhost-nodeports, and only for the host."""
WORDS = (
    "primary localhost all 192.0.2.0/24 192.0.2.6/32 203.0.113.0/24 127.0.0.0/8 0.0.0.0/0"
    " 2001:db8::/32 fd00::7/128 3fff::/20 ::/0"
)
LISTS = [words for size in range(4) for words in itertools.combinations(WORDS.split(), size)]


def expanded(words: Sequence[str], families: Sequence[int]) -> list[str]:
    """Replaces the words as kube-proxy's main function does on a node with addresses of
    `families`.
    """
    meanings = {
        "primary": [f"{PRIMARY[family]}/{32 if family == 4 else 128}" for family in families],
        "localhost": ["127.0.0.0/8", "::1/128"],
        "all": ["0.0.0.0/0", "::/0"],
    }
    return [network for word in words for network in meanings.get(word, [word])]


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
@pytest.mark.parametrize("families", [(4, 6), (4,), (6,), ()], ids=str)
def test_every_list_of_node_port_addresses_matches_kube_proxy(
    judges: Sequence[Judge], mode: str, families: Sequence[int]
):
    """One difference is intended (docs/limits.md): with `primary` and networks of one family only,
    the other family has no address; with kube-proxy it has all of them.
    """
    node = Node("me", addresses=tuple(parse_addr(PRIMARY[family]) for family in families))
    for words in LISTS:
        flags = {"--proxy-mode": mode, **({"--nodeport-addresses": ",".join(words)} if words else {})}
        ours = node_port_addresses(node, LOCAL, load.load(flags, {}).config)
        listed = words or (("primary",) if mode == "nftables" else ())
        networks = expanded(listed, families)
        for judge in judges:
            theirs = judge.node_port_ips(networks, INTERFACES.split())
            for family in (4, 6):
                wanted = theirs[family] - LOOPBACK
                named = [each for each in networks if (":" in each) == (family == 6)]
                if "primary" in listed and networks and not named:
                    wanted = set()
                found = {format_addr(each) for each in ours if family_of(each) == family}
                assert found == wanted, (judge.program, words, family)
