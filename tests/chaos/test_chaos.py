# SPDX-License-Identifier: Apache-2.0
"""The bounded parts of the campaigns in this folder, which `make campaigns` runs in full."""

import random
from collections.abc import Iterator

import pytest

from tests.chaos import errnos, kills, soak
from tests.chaos.world import World

SEED = 20261122
KILLS = 3
PAUSES = 2
LIMITS_MB = (20, 30, 60)
ROUND_SECONDS = 5.0


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One node for all tests: each begins with what the last one left."""
    with World("t") as made:
        yield made


@pytest.mark.parametrize("fault", errnos.faults(8, SEED), ids=str)
def test_agent_survives_or_explains_a_failed_system_call(world: World, fault: errnos.Fault):
    errnos.run(world, fault)


def test_kills_under_changes_interrupt_no_service(world: World):
    order = random.Random(SEED)
    with kills.churned(world) as churn:
        world.agent.kill()
        for _ in range(KILLS):
            kills.kill(world, churn, order)
        world.agent.start()


def test_pauses_under_changes_interrupt_no_service(world: World):
    order = random.Random(SEED)
    with kills.churned(world) as churn:
        for _ in range(PAUSES):
            kills.pause(world, churn, order)


def test_memory_limits_interrupt_no_service(world: World):
    with kills.churned(world) as churn:
        outcomes = [kills.starve(world, churn, limit) for limit in LIMITS_MB]
    assert outcomes[0] == "killed", "the limit is in force"
    assert outcomes[-1] == "serves"


def test_churn_leaves_nothing_behind(world: World):
    soak.plateau(world, ROUND_SECONDS)
