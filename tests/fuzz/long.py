# SPDX-License-Identifier: Apache-2.0
"""The campaigns of this folder, which tests/campaigns.py runs."""

import itertools
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import hypothesis
from hypothesis import given, settings

from tests.campaigns import deadline
from tests.fuzz.floods.floods import KINDS, Arena, Figures, room
from tests.fuzz.packets import program_runs
from tests.fuzz.packets.comparison import (
    ATTACKS,
    BATCH,
    SEEDS,
    SHOWN,
    Finding,
    compare,
    compare_attacks,
    random_attacks,
    random_sequences,
    shrunk,
)
from tests.fuzz.packets.twins import Twins
from tests.fuzz.worlds import HINTS, POLICIES, World, questions, three_endpoints, two_endpoints
from tests.fuzz.worlds import compare as compare_policy
from tests.support.cluster.upstream import JUDGES, Judge

FLOOD_SECONDS = 60.0
FLOOD_RATES = (10_000, 0)
"""Frames per second; 0: as many as this machine can send."""
UDP_CLIENTS = 5_000
"""New honest clients per second of a NodePort with two backends."""
UDP_SECONDS = 120.0
SEQUENCES = 100_000
PACKETS = 1_000_000
WORLDS = 1_000_000
EXAMPLES_AT_ONCE = 1_000
AT_ONCE = 50_000


@contextmanager
def cache() -> Iterator[Path]:
    """A folder for compiled programs."""
    with tempfile.TemporaryDirectory(prefix="kbpf-campaign-") as folder:
        yield Path(folder)


def packets(seed: int, minutes: float | None) -> None:
    """Sends PACKETS random packets through every program."""
    with cache() as folder:
        name = f"kbz{os.getpid()}"
        with program_runs.runs(folder, random.Random(seed), name) as made:
            until = deadline(minutes)
            while made.tally.verdicts.total() < PACKETS:
                print(made.run(AT_ONCE, until), flush=True)
                if time.monotonic() > until:
                    break


def policy(seed: int, minutes: float | None) -> None:
    """Compares kbpf's policy with kube-proxy's functions: on every world of two endpoints with
    hints and of three endpoints, then on WORLDS random Services with their slices.
    """
    until, done = deadline(minutes), 0
    judges = [Judge(program) for program in JUDGES]

    def check(asked: tuple[list[World], str, str]) -> None:
        nonlocal done
        worlds, node, zone = asked
        done += compare_policy(judges, iter(worlds), node, zone)

    hinted = compare_policy(judges, two_endpoints(POLICIES, HINTS))
    print(f"{hinted} worlds of two endpoints with hints", flush=True)
    print(f"{compare_policy(judges, three_endpoints())} worlds of three endpoints", flush=True)
    some = settings(max_examples=EXAMPLES_AT_ONCE, deadline=None, database=None)
    for number in itertools.count(seed):
        hypothesis.seed(number)(some(given(questions())(check)))()
        print(f"{done} worlds", flush=True)
        if done >= WORLDS or time.monotonic() > until:
            break
    for judge in judges:
        judge.close()


def floods(seed: int, minutes: float | None) -> None:
    """Each flood at each rate, and honest UDP, in one table. `minutes` are for all of them together.
    The seed chooses the forged clients.
    """
    runs = len(KINDS) * len(FLOOD_RATES) + UDP_SECONDS / FLOOD_SECONDS
    scale = 1.0 if minutes is None else min(1.0, 60 * minutes / runs / FLOOD_SECONDS)
    faults: list[str] = []

    def show(figures: Figures) -> None:
        print(figures, figures.reasons, flush=True)
        faults.extend(figures.faults())

    print(Figures.HEAD, flush=True)
    with cache() as folder, Arena(folder, room(), seed) as arena:
        for rate, kind in product(FLOOD_RATES, KINDS):
            show(arena.flood(kind, rate, FLOOD_SECONDS * scale))
        show(arena.many_clients(UDP_CLIENTS, UDP_SECONDS * scale))
    assert not faults, "; ".join(faults)


def _show(findings: list[Finding]) -> list[Finding]:
    for each in findings:
        print(each, flush=True)
    return findings


def conntrack(seed: int, minutes: float | None) -> None:
    """Compares SEQUENCES random sequences with nf_conntrack, in which nobody forges packets, and
    as many in which a third party does; half of these with strict rp_filter. Batches are played with
    each forwarding in turn.
    """
    rng, tally, findings, played = random.Random(seed), Counter[str](), [], 0
    wrong = attacks = 0
    with cache() as folder, ExitStack() as stack:
        nodes = itertools.cycle([stack.enter_context(Twins(folder, forwarding)) for forwarding in SEEDS])
        until = deadline(minutes)
        while played < SEQUENCES and time.monotonic() < until:
            twins = next(nodes)
            differing, rows = compare(twins, random_sequences(rng, BATCH))
            wrong += len(differing)
            findings += _show(shrunk(twins, differing))
            tally += rows
            played += BATCH
            for part in range(BATCH // ATTACKS):
                twins.check_reverse_path(part % 2 == 1)
                differing, rows = compare_attacks(twins, random_attacks(rng, ATTACKS))
                wrong += len(differing)
                findings += _show(shrunk(twins, differing, compare_attacks))
                tally += rows
                attacks += ATTACKS
            twins.check_reverse_path(False)
            if played % (10 * BATCH) == 0:
                print(f"{played} + {attacks} sequences, {wrong} of them wrong", flush=True)
            if len(findings) >= SHOWN:
                break
    print(f"{played} sequences, {attacks} with forged packets, {wrong} of them wrong")
    for name, count in tally.most_common():
        print(f"  {count:7} {name}")
    assert not findings, "\n".join(map(str, findings))
