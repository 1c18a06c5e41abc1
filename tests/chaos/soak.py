# SPDX-License-Identifier: Apache-2.0
"""Hours of churn: resident memory, descriptors and map entries must end where they began."""

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.kernel.bpf import uapi
from tests.chaos.kills import caught_up, churned, churning
from tests.chaos.world import Churn, World, address, protocol
from tests.support.lab.lab import PATIENCE, until

WARM_UP_SECONDS = 1200.0
"""Before the first measurement. The agent remembers deleted backends for some minutes (LATER),
sweeps every 5 minutes, compares everything programmed every 15, and keeps the memory that this
takes.
"""
MEMORY_GROWTH_KB_PER_HOUR = 1024.0
MEMORY_NOISE_KB = 4096.0
"""What a process of this size allocates and frees without a leak."""
PLATEAU_KB = 1024.0
PLATEAU_ROUNDS = 6
"""The allocator keeps each new peak, so the memory of a young agent grows in steps of megabytes and
then stops. A leak grows in every round.
"""

WATCHED = tuple(
    name
    for name, spec in MAPS.items()
    if spec.map_type in (uapi.BPF_MAP_TYPE_HASH, uapi.BPF_MAP_TYPE_LRU_HASH, uapi.BPF_MAP_TYPE_LPM_TRIE)
)
"""Maps that grow and shrink: all except arrays, the queue and socket storage."""
LATER = ("udp_cuts", "counts")
"""Their entries are deleted some minutes after their objects: when they expire, and by a sweep."""
LATER_SECONDS = 700.0
WATCHED_AT_ONCE = tuple(name for name in WATCHED if name not in LATER)
SAMPLES, SAMPLE_SECONDS = 25, 0.02
"""Of numbers of descriptors and threads."""
FLAT_SECONDS = PATIENCE
"""For WATCHED_AT_ONCE: polls every few seconds remove their entries."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of the running agent after a churn was read completely."""

    resident_kb: int
    descriptors: int
    threads: int
    entries: dict[str, int]


def figures(world: World) -> Figures:
    """Measures the agent."""
    proc = Path(f"/proc/{world.agent.pid}")
    facts = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return Figures(
        int(facts["VmRSS"].split()[0]), *handles(world), {name: len(world.agent.entries(name)) for name in WATCHED}
    )


def handles(world: World) -> tuple[int, int]:
    """The numbers of the agent's descriptors and threads: the lowest of several samples, since a
    poll of the folder, for example, opens some for a moment.
    """
    proc = Path(f"/proc/{world.agent.pid}")
    samples = []
    for _ in range(SAMPLES):
        samples.append((len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))))
        time.sleep(SAMPLE_SECONDS)
    return min(descriptors for descriptors, _ in samples), min(threads for _, threads in samples)


def soak(world: World, seconds: float) -> tuple[Figures, Figures]:
    """Churns for `seconds`, after a warm-up of WARM_UP_SECONDS or a third of the time. Returns the
    figures before and after. Raises AssertionError if anything grew.
    """
    with churned(world) as churn:
        _churn(world, churn, min(WARM_UP_SECONDS, seconds / 3))
        before = figures(world)
        _churn(world, churn, seconds)
        _flat(world, before, WATCHED_AT_ONCE, FLAT_SECONDS)
        _flat(world, before, LATER, LATER_SECONDS)
        _same_handles(world, before)
        after = figures(world)
    allowed = MEMORY_NOISE_KB + MEMORY_GROWTH_KB_PER_HOUR * seconds / 3600
    assert after.resident_kb <= before.resident_kb + allowed, (before, after)
    return before, after


def plateau(world: World, seconds: float) -> None:
    """Churns in rounds of `seconds` until one does not need PLATEAU_KB more than the one before.
    Raises AssertionError after PLATEAU_ROUNDS, or if maps, descriptors or threads grew.
    """
    rounds: list[Figures] = []
    with churned(world) as churn:
        for _ in range(PLATEAU_ROUNDS):
            _churn(world, churn, seconds)
            rounds.append(figures(world))
            if len(rounds) > 1 and rounds[-1].resident_kb <= rounds[-2].resident_kb + PLATEAU_KB:
                break
        else:
            raise AssertionError(f"memory grows in every round: {rounds}")
        _flat(world, rounds[0], WATCHED_AT_ONCE, FLAT_SECONDS)
        _same_handles(world, rounds[0])


def _same_handles(world: World, before: Figures) -> None:
    def are_as_before() -> bool:
        descriptors, threads = handles(world)
        return descriptors <= before.descriptors and threads <= before.threads

    until("no more descriptors and threads than before", are_as_before, state=lambda: (handles(world), before))


def _sizes(world: World, names: Sequence[str]) -> dict[str, int]:
    """Numbers of entries of these maps, without empty ones."""
    return {name: size for name in names if (size := len(world.agent.entries(name)))}


def _flat(world: World, before: Figures, names: Sequence[str], seconds: float) -> None:
    wanted = {name: before.entries[name] for name in names}
    grown: dict[str, int] = {}

    def check() -> bool:
        now = _sizes(world, names)
        grown.clear()
        grown.update({name: size for name, size in now.items() if size > wanted[name]})
        return not grown

    try:
        until("no map has more entries than before", check, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: {grown}, before {wanted}") from None


def _churn(world: World, churn: Churn, seconds: float) -> None:
    """Meanwhile a pod sends to the UDP Services one after the other. Replies do not matter: the
    datagrams make the programs write affinity, counts and flows. At the end each Service is sent to
    once.
    """
    of_udp = [number for number in range(len(churn)) if protocol(number) == "UDP"]
    with churning(churn):
        end = time.monotonic() + seconds  # a given duration, so no condition to wait for
        for number in itertools.cycle(of_udp):
            if time.monotonic() > end:
                break
            world["a1"].udp(address(number), 80, timeout=0.01)
    caught_up(world, churn)
    for number in of_udp:
        world["a1"].udp(address(number), 80, timeout=0.01)
