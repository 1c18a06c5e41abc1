# SPDX-License-Identifier: Apache-2.0
"""The bounded parts of the campaigns in this folder, which `make campaigns` runs in full."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import errnos, kills, soak
from tests.chaos.registers import DISTURBANCES, Registers, judge
from tests.chaos.world import World

SEED = 20261122
KILLS = 3
PAUSES = 2
LIMITS_MB = (20, 30, 60)
ROUND_SECONDS = 5.0
VERSIONS = 50
W, R = True, False
HISTORIES = {  # kind, version, call, return
    "in order": [(W, 1, 0, 9), (R, 0, 1, 2), (R, 1, 3, 4)],
    "at once": [(W, 1, 0, 9), (R, 1, 1, 5), (R, 0, 2, 6)],
    "two versions on the way": [(W, 1, 0, 9), (W, 2, 1, 9), (R, 0, 2, 3), (R, 2, 4, 5)],
    "back": [(W, 1, 0, 9), (R, 1, 1, 2), (R, 0, 3, 4)],
    "too late": [(W, 1, 0, 2), (R, 0, 3, 4)],
    "too early": [(R, 1, 0, 1), (W, 1, 2, 3)],
    "another order": [(W, 1, 0, 9), (W, 2, 1, 9), (R, 2, 2, 3), (R, 1, 4, 5)],
}


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


@pytest.mark.parametrize("name", HISTORIES)
def test_the_judge_of_histories_tells_right_from_wrong(registers: Path, name: str):
    rows = [dict(zip(("Write", "Version", "Call", "Return"), row, strict=True)) for row in HISTORIES[name]]
    wrong = list(HISTORIES).index(name) > list(HISTORIES).index("two versions on the way")
    assert judge({"Name": name, "First": 0, "Backends": 64, "Operations": rows}) == [name] * wrong


def test_no_dial_goes_back(programs: None, registers: Path):
    order = random.Random(SEED)
    with Registers("cg") as cluster:
        for disturbance in DISTURBANCES:
            cluster.round(disturbance, VERSIONS, order)
