# SPDX-License-Identifier: Apache-2.0
"""Marks, ports and rules of mode ipvs that other programs must be able to tell from theirs."""

import pytest

from kbpf.dataplane.ipvs import ruleset
from kbpf.dataplane.ipvs.ipvs_cleanup import ruleset_options
from kbpf.dataplane.ipvs.plan import SetName
from kbpf.dataplane.ipvs.port_planner import FwmarkAllocator
from kbpf.model.address import ANY4
from kbpf.model.config import Config
from kbpf.model.objects import Protocol
from tests.values.dataplane.states import state

FIRST = 0x6B620001
EXTERNAL = "A B at=NodePort external-local"


LEFT = {(1024, 29999): (30000, 65535), (61000, 65535): (1024, 60999)}
LEFT |= {(20000, 30000): (30001, 65535), (40000, 50000): (1024, 39999)}


@pytest.mark.parametrize("taken", LEFT)
def test_masqueraded_ports_differ_from_those_of_mode_bpf(taken: tuple[int, int]):
    assert ruleset_options(Config(masquerade_ports=taken)).masquerade_ports == LEFT[taken]


def test_rules_match_before_they_change_a_packet():
    """nftables evaluates a rule in order: a mark set before a failing match stays set."""
    added = [one["add"] for one in ruleset.create_table(ruleset.RulesetOptions()) if "add" in one]
    rules = [one["rule"]["expr"] for one in added if "rule" in one]
    assert len(rules) > 50
    for words in rules:
        is_match = ["match" in word for word in words]
        assert is_match == sorted(is_match, reverse=True), words


def test_a_fwmark_with_the_masquerade_bit_is_not_adopted():
    """--masquerade-bit was changed since."""
    port = state(EXTERNAL)
    noted = [(SetName.FWMARKS, (ANY4, Protocol.TCP, 30080, FIRST))]
    same, other = FwmarkAllocator(reserved_bits=1 << 1), FwmarkAllocator(reserved_bits=1 << 0)
    same.adopt(noted)
    other.adopt(noted)
    assert same.allocate(port) == FIRST
    assert other.allocate(port) > FIRST


@pytest.mark.parametrize("bit", range(32))
def test_fwmarks_never_contain_the_masquerade_bit(bit):
    """For every bit, and without iterating over excluded marks; each mark is used once."""
    marks = FwmarkAllocator(reserved_bits=1 << bit)
    ports = [state(f"name=s{i} {EXTERNAL}") for i in range(5)]
    found = [marks.allocate(port) for port in ports[:2]]
    if bit < 16:  # the next one would have it
        marks.adopt([(SetName.OWN_FWMARKS, (ANY4, 0x6B620000 + (1 << bit) - 1))])
    found += [marks.allocate(port) for port in ports[2:]]
    assert len(set(found)) == 5
    assert all(0 < mark < 1 << 32 and not mark & 1 << bit for mark in found)
