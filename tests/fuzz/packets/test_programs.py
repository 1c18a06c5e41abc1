# SPDX-License-Identifier: Apache-2.0
"""The bounded part of the campaign `packets`; program_runs.py lists the invariants."""

import os
import random
from pathlib import Path

import pytest

from tests.fuzz.packets import program_runs

SEEDS = (1, 2)
RUNS = 12_000


@pytest.mark.parametrize("seed", SEEDS)
def test_random_packets_keep_the_invariants_of_every_program(artifact_cache: Path, seed: int):
    with program_runs.runs(artifact_cache, random.Random(seed), f"kbz{os.getpid()}") as made:
        tally = made.run(RUNS)
    print(tally)
    for verdict in program_runs.VERDICTS.values():
        assert tally.verdicts[verdict] > 0, "no packet got this verdict"
    assert tally.rewritten > RUNS // 20
    assert tally.most_entries > program_runs.CONNECTIONS, "the table was never full"
