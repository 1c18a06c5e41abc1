# SPDX-License-Identifier: Apache-2.0
"""The rules about ports of the node, in all states of a small model; and that the model finds what
is wrong with weaker rules.
"""

from functools import partial
from typing import NamedTuple

import pytest

from tests.fuzz.model.ports import explore, tcp_start, tcp_steps, udp_start, udp_steps, waits
from tests.support.table import table

STARTS = {"tcp": tcp_start(), "forgotten": tcp_start(2, forgotten=True), "udp": udp_start(2)}


class Weaker(NamedTuple):
    """A rule that kbpf does not have, the states that it begins with, and what goes wrong then."""

    rule: str
    start: str
    fault: str


WEAKER = table(
    Weaker,
    """
passes challenge ack | tcp | a client receives a segment of another connection
forwards outside window | tcp | a client receives a segment of another connection
stores before check | tcp | a forged connection holds a port
ignores device | tcp | a forged connection holds a port
frees closing | tcp | a client gets a port on which the backend has another connection
frees unproven | tcp | a client gets a port on which the backend has another connection
frees unacknowledged fins | tcp | a client gets a port on which the backend has another connection
frees closed | tcp | a client gets a port on which the backend has another connection
evicts without reserving | tcp | it is forgotten that the backend has a connection
keeps taken port | forgotten | a client waits although a port is free
frees asked | udp | a client receives an answer to another
evicts without reserving | udp | a client receives an answer to another
""",
)


def search(start: str, weaker: str) -> tuple[int, list[str]]:
    """explore(), and prints what it has found."""
    if start == "udp":
        states, way = explore(STARTS[start], partial(udp_steps, weaker=weaker), lambda _: False)
    else:
        states, way = explore(STARTS[start], partial(tcp_steps, weaker=weaker), waits)
    print(f"{states} states", *way, sep="\n    ")
    return states, way


@pytest.mark.parametrize("row", WEAKER, ids=lambda row: f"{row.start}: {row.rule}")
def test_weaker_rule_has_the_fault(row: Weaker):
    _, way = search(row.start, row.rule)
    assert way
    assert row.fault in way[-1]


@pytest.mark.parametrize(("start", "least"), [("tcp", 80_000), ("forgotten", 10_000), ("udp", 100)])
def test_rules_hold_in_every_state(start: str, least: int):
    states, way = search(start, "")
    assert not way
    assert states > least
