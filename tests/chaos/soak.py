"""Hours of churn: resident memory, descriptors and map entries must end where they began."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.kills import caught_up, churning, served_throughout
from tests.chaos.world import Churn, World

WARM_UP_SECONDS = 60.0
"""Before the first figures: allocators and caches fill with the first churn."""
MEMORY_GROWTH_KB_PER_HOUR = 1024.0
MEMORY_NOISE_KB = 4096.0
"""What a process of this size takes and gives back without a leak."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the running agent, after a churn has been read to its end."""

    resident_kb: int
    descriptors: int
    threads: int
    entries: dict[str, int]


def figures(world: World) -> Figures:
    """What the agent takes now."""
    proc = Path(f"/proc/{world.agent.pid}")
    facts = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    names = ("services", "service_names", "backend_slots", "backends", "set_members", "cluster_ips")
    return Figures(
        int(facts["VmRSS"].split()[0]),
        len(os.listdir(proc / "fd")),
        int(facts["Threads"]),
        {name: len(world.agent.entries(name)) for name in names},
    )


def soak(world: World, seconds: float) -> tuple[Figures, Figures]:
    """Churns for so long, after a warm-up of WARM_UP_SECONDS or a fifth of it. The figures before
    and after. AssertionError if anything grew.
    """
    if not world.agent.is_running:
        world.agent.start()
    churn = Churn(world)
    with churn.present(), served_throughout(world):
        _churn(world, churn, min(WARM_UP_SECONDS, seconds / 5))
        before = figures(world)
        _churn(world, churn, seconds)
        after = figures(world)
    allowed = MEMORY_NOISE_KB + MEMORY_GROWTH_KB_PER_HOUR * seconds / 3600
    assert after.resident_kb <= before.resident_kb + allowed, (before, after)
    assert after.descriptors == before.descriptors, (before, after)
    assert after.threads == before.threads, (before, after)
    assert after.entries == before.entries, (before, after)
    return before, after


def _churn(world: World, churn: Churn, seconds: float) -> None:
    with churning(churn):
        time.sleep(seconds)  # the duration is what is asked for
    caught_up(world, churn)
