"""kbpf's policy beside kube-proxy's own functions: every small world, then any. See worlds.py."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings

from tests.fuzz.worlds import (
    POLICIES,
    World,
    compare,
    one_endpoint,
    questions,
    three_endpoints,
    two_endpoints,
)
from tests.support.upstream import JUDGES, Judge

EXAMPLES = 2_000
"""Of up to 20 worlds each; the campaign `policy` has a million worlds."""
EACH = 13
"""Of the worlds of three endpoints; the campaign has them all."""


@pytest.fixture(scope="module")
def judges() -> Iterator[Sequence[Judge]]:
    """Of both versions."""
    found = [Judge(program) for program in JUDGES]
    yield found
    for each in found:
        each.close()


@pytest.mark.parametrize("node", ["me", "", "ME"])
@pytest.mark.parametrize("zone", ["a", ""])
def test_every_world_of_one_endpoint(judges: Sequence[Judge], node: str, zone: str):
    assert compare(judges, one_endpoint(), node, zone) == 7 * 27 * 3 * 9


def test_every_world_of_two_endpoints_without_hints(judges: Sequence[Judge]):
    assert compare(judges, two_endpoints(POLICIES, [((), ())])) == 7 * 16 * 16 * 4


def test_some_worlds_of_three_endpoints(judges: Sequence[Judge]):
    assert compare(judges, itertools.islice(three_endpoints(), 0, None, EACH)) == 9_816


@settings(max_examples=EXAMPLES, deadline=None)
@given(asked=questions())
def test_any_world(judges: Sequence[Judge], asked: tuple[list[World], str, str]):
    worlds, node, zone = asked
    assert compare(judges, iter(worlds), node, zone) == len(worlds)
