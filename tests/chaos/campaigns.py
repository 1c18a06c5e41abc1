# SPDX-License-Identifier: Apache-2.0
"""The campaigns of this folder, for `python -m tests.campaigns`.

Each takes a seed and a limit of minutes; None: its full volume.
"""

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Iterator

from tests.chaos import errnos as faults
from tests.chaos import kills as ends
from tests.chaos import soak as endurance
from tests.chaos.registers import DISTURBANCES, Registers
from tests.chaos.world import World

KILLS = 200
PAUSES = 100
STARVED = 50
SOAK_MINUTES = 120.0
DIALS = 1_000_000
UPDATES = 100_000
VERSIONS = 200
"""In a round."""
GROWTH_EVERY = 50
"""Rounds."""


def errnos(seed: int, minutes: float | None) -> None:
    """Each errno at each of the first calls: 4,000 starts."""
    outcomes: Counter[str] = Counter()
    starts = [fault for start in range(len(faults.ERRNOS)) for fault in faults.faults(faults.FIRST_CALLS, seed + start)]
    with World("e") as world:
        for number in _rounds(len(starts), minutes):
            outcome = faults.run(world, starts[number])
            print(f"{starts[number]}: {outcome}", flush=True)
            outcomes["serves" if outcome == "serves" else "ended"] += 1
    print(dict(outcomes))


def kills(seed: int, minutes: float | None) -> None:
    """SIGKILL at random moments under 1,000 changes a second."""
    order, done = random.Random(seed), 0
    with World("k") as world, ends.churned(world) as churn:
        world.agent.kill()
        for _ in _rounds(KILLS, minutes):
            ends.kill(world, churn, order)
            done += 1
        world.agent.start()
    print(f"{done} kills, no connection failed")


def pauses(seed: int, minutes: float | None) -> None:
    """SIGSTOP for up to ten seconds under 1,000 changes a second."""
    order, done = random.Random(seed), 0
    with World("p") as world, ends.churned(world) as churn:
        for _ in _rounds(PAUSES, minutes):
            ends.pause(world, churn, order, longest=10.0)
            done += 1
    print(f"{done} pauses, no connection failed")


def memory(seed: int, minutes: float | None) -> None:
    """Random memory limits that are too low."""
    order = random.Random(seed)
    outcomes: Counter[str] = Counter()
    with World("m") as world, ends.churned(world) as churn:
        for _ in _rounds(STARVED, minutes):
            limit = order.choice(ends.MEMORY_LIMITS)
            outcome = ends.starve(world, churn, limit)
            print(f"{limit} MB: {outcome}", flush=True)
            outcomes[outcome] += 1
    print(dict(outcomes))


def registers(seed: int, minutes: float | None) -> None:
    """Dials that must never go back. The Services of a growth stay, so most rounds have none."""
    order = random.Random(seed)
    with Registers("cr") as cluster:
        for _ in _rounds(DIALS, minutes):
            growth = cluster.version // VERSIONS % GROWTH_EVERY == 0
            cluster.round("growth" if growth else order.choice(DISTURBANCES[:-1]), VERSIONS, order)
            if cluster.dials >= DIALS and cluster.version >= UPDATES:
                break
    print(f"{cluster.dials} dials, {cluster.version} versions, none went back")


def soak(seed: int, minutes: float | None) -> None:
    """Two hours of churn."""
    with World("s") as world:
        before, after = endurance.soak(world, 60 * (minutes or SOAK_MINUTES))
    print(f"before: {before}\nafter:  {after}")


def _rounds(count: int, minutes: float | None) -> Iterator[int]:
    """Numbers up to `count`, until the time has passed."""
    end = time.monotonic() + 60 * (math.inf if minutes is None else minutes)
    return itertools.takewhile(lambda _: time.monotonic() < end, range(count))
