"""kbpf's policy beside kube-proxy's own functions: every small world, then any. See worlds.py."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from tests.fuzz.worlds import POLICIES, World, compare, one_endpoint, questions, two_endpoints
from tests.support.upstream import JUDGES, Judge

EXAMPLES = 200
"""Of up to 20 worlds; the campaign `policy` has a million worlds."""


@pytest.fixture(scope="module", params=JUDGES)
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    found = Judge(request.param)
    yield found
    found.close()


@pytest.mark.parametrize("node", ["me", "", "ME"])
@pytest.mark.parametrize("zone", ["a", ""])
def test_every_world_of_one_endpoint(judge: Judge, node: str, zone: str):
    assert compare(judge, one_endpoint(), node, zone) == 7 * 27 * 3 * 9


def test_every_world_of_two_endpoints_without_hints(judge: Judge):
    assert compare(judge, two_endpoints(POLICIES, [((), ())])) == 7 * 16 * 16 * 4


@settings(max_examples=EXAMPLES, deadline=None)
@given(asked=questions())
def test_any_world(judge: Judge, asked: tuple[list[World], str, str]):
    worlds, node, zone = asked
    assert compare(judge, iter(worlds), node, zone) == len(worlds)
