"""The bounded part of the campaigns in this folder; `make campaigns` runs them whole."""

import random
from collections.abc import Iterator

import pytest

from tests.chaos import errnos, kills, soak
from tests.chaos.world import Churn, World

SEED = 20261122
KILLS = 5
PAUSES = 3
LIMITS_MB = (20, 30, 60)
SOAK_SECONDS = 10.0


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One node for all of them: each begins with whatever the one before has left."""
    with World("t") as made:
        yield made


@pytest.mark.parametrize("fault", errnos.faults(16, SEED), ids=str)
def test_the_kernel_refuses_a_call(world: World, fault: errnos.Fault) -> None:
    errnos.run(world, fault)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["x INFO begins", "x ERROR kbpf cannot open a socket (rtnetlink): ENOMEM"], True),
        (["kbpf: unexpected error: Cannot allocate memory: ENOMEM (kbpf/kernel/pins.py:12)"], True),
        (["mnl.c:60: Unable to initialize Netlink socket: Cannot allocate memory"], True),
        (["x ERROR kbpf.agent cannot write to the data plane; retrying: ENOMEM"], False),
        (["x ERROR kbpf cannot open a socket (rtnetlink)"], False),
        (["x ERROR kbpf ENOMEM", "x INFO ends"], False),
        (["x ERROR kbpf ENOMEM", "x ERROR kbpf ENOMEM"], False),
        ([], False),
    ],
    ids=str,
)
def test_what_counts_as_the_line_that_says_why(lines: list[str], says: bool) -> None:
    assert errnos.says_why(lines, errnos.Fault(1, "ENOMEM", True)) == says


def test_killed_under_changes(world: World) -> None:
    order = random.Random(SEED)
    with Churn(world).present() as churn, kills.served_throughout(world):
        world.agent.kill()
        for _ in range(KILLS):
            kills.kill(world, churn, order)
        world.agent.start()


def test_stopped_under_changes(world: World) -> None:
    order = random.Random(SEED)
    with Churn(world).present() as churn, kills.served_throughout(world):
        for _ in range(PAUSES):
            kills.pause(world, churn, order)


def test_too_little_memory(world: World) -> None:
    with Churn(world).present() as churn, kills.served_throughout(world):
        outcomes = [kills.starve(world, churn, limit) for limit in LIMITS_MB]
    assert outcomes[0] == "killed", "the limit is in force"
    assert outcomes[-1] == "serves"


def test_churn_leaves_nothing_behind(world: World) -> None:
    soak.soak(world, SOAK_SECONDS, later=False)
