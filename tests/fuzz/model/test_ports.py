# SPDX-License-Identifier: Apache-2.0
"""The rules about ports of the node, in all states of a small model; and that the model finds what
is wrong with weaker rules.
"""

from functools import partial

import pytest

from tests.fuzz.model.ports import State, explore, tcp_start, tcp_steps, udp_start, udp_steps, waits

ONE, FORGOTTEN = tcp_start(), tcp_start(2, forgotten=True)
UDP = udp_start(2)
NOT_GIVEN = "a client gets a port on which the backend has another connection"

WEAKER = [
    # a rule that kbpf does not have, the states that it begins with, and what goes wrong then
    ("passes challenge ack", ONE, "a client receives a segment of another connection"),
    ("forwards outside window", ONE, "a client receives a segment of another connection"),
    ("stores before check", ONE, "a forged connection holds a port"),
    ("ignores device", ONE, "a forged connection holds a port"),
    ("frees closing", ONE, NOT_GIVEN),
    ("frees unproven", ONE, NOT_GIVEN),
    ("frees unacknowledged fins", ONE, NOT_GIVEN),
    ("frees closed", ONE, NOT_GIVEN),
    ("evicts without reserving", ONE, "it is forgotten that the backend has a connection"),
    ("keeps taken port", FORGOTTEN, "a client waits although a port is free"),
    ("frees asked", UDP, "a client receives an answer to another"),
    ("evicts without reserving", UDP, "a client receives an answer to another"),
]


def search(start: State, weaker: str) -> tuple[int, list[str]]:
    """explore(), and prints what it has found."""
    if start is UDP:
        states, way = explore(start, partial(udp_steps, weaker=weaker), lambda _: False)
    else:
        states, way = explore(start, partial(tcp_steps, weaker=weaker), waits)
    print(f"{states} states", *way, sep="\n    ")
    return states, way


@pytest.mark.parametrize(("weaker", "start", "fault"), WEAKER)
def test_weaker_rule_has_the_fault(weaker: str, start: State, fault: str):
    _, way = search(start, weaker)
    assert way
    assert fault in way[-1]


@pytest.mark.parametrize(("start", "least"), [(ONE, 100_000), (FORGOTTEN, 10_000), (UDP, 100)])
def test_rules_hold_in_every_state(start: State, least: int):
    states, way = search(start, "")
    assert not way
    assert states > least
