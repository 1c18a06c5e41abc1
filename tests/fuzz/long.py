"""The campaigns of this folder, as tests/campaigns.py runs them."""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.fuzz import program_runs

PACKETS: Final = 1_000_000
AT_ONCE: Final = 50_000


@contextmanager
def cache() -> Iterator[Path]:
    """A folder for compiled programs."""
    with tempfile.TemporaryDirectory(prefix="kbpf-campaign-") as folder:
        yield Path(folder)


def deadline(minutes: float | None) -> float | None:
    """On the monotonic clock."""
    return None if minutes is None else time.monotonic() + 60 * minutes


def packets(seed: int, minutes: float | None) -> None:
    """PACKETS random packets through every program."""
    with cache() as folder:
        name = f"kbz{os.getpid()}"
        with program_runs.runs(folder, random.Random(seed), name) as made:
            until = deadline(minutes)
            while made.tally.verdicts.total() < PACKETS:
                print(made.run(AT_ONCE, until), flush=True)
                if until is not None and time.monotonic() > until:
                    break
