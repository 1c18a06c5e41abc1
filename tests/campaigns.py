# SPDX-License-Identifier: Apache-2.0
"""Long randomised runs that find what the test suite's bounded runs do not: `make campaigns`.

    python -m tests.campaigns                         # all of them
    python -m tests.campaigns --only packets --seed 7 --minutes 5

A campaign is a function of a seed and a time limit in minutes (None: its full volume). It prints
its measurements, and raises if it finds a failure, with what is needed to reproduce it. Seeds and
outcomes are appended to build/campaigns/runs.jsonl.
"""

import argparse
import importlib
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

Campaign = Callable[[int, float | None], None]

CAMPAIGNS = {
    "servers": "tests.fuzz.inputs.hostile_servers:campaign",
    "histories": "tests.fuzz.inputs.histories:campaign",
    "api-histories": "tests.fuzz.inputs.api_histories:campaign",
    "texts": "tests.fuzz.inputs.texts:campaign",
    "policy": "tests.fuzz.long:policy",
    "conntrack": "tests.fuzz.long:conntrack",
    "floods": "tests.fuzz.long:floods",
    "packets": "tests.fuzz.long:packets",
    "http-requests": "tests.fuzz.inputs.http_requests:requests",
    "http-load": "tests.fuzz.inputs.http_load:campaign",
    "errnos": "tests.chaos.campaigns:errnos",
    "kills": "tests.chaos.campaigns:kills",
    "pauses": "tests.chaos.campaigns:pauses",
    "memory": "tests.chaos.campaigns:memory",
    "registers": "tests.chaos.campaigns:registers",
    "soak": "tests.chaos.campaigns:soak",
}
"""Name → module:function, imported only when it runs: campaigns have different dependencies."""

KEPT = Path("build/campaigns/runs.jsonl")


def deadline(minutes: float | None) -> float:
    """The time on the monotonic clock `minutes` from now; infinite for None."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def find(name: str) -> Campaign:
    """The function of a campaign."""
    module, _, function = CAMPAIGNS[name].partition(":")
    found: Campaign = getattr(importlib.import_module(module), function)
    return found


def run(name: str, seed: int, minutes: float | None) -> bool:
    """Runs a campaign, prints and records its outcome; returns whether it passed."""
    print(f"== {name}: seed {seed}", flush=True)
    began, outcome = time.monotonic(), "passed"
    try:
        find(name)(seed, minutes)
    except Exception as error:
        traceback.print_exc()
        outcome = f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - began)
    print(f"== {name}: {outcome.splitlines()[0]} after {seconds} s, seed {seed}", flush=True)
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    row = {"name": name, "seed": seed, "minutes": minutes, "seconds": seconds, "outcome": outcome}
    with KEPT.open("a") as kept:
        kept.write(json.dumps(row) + "\n")
    return outcome == "passed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen campaigns; exit status 1 if any found a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=sorted(CAMPAIGNS),
        metavar="NAME",
        help=f"campaigns to run, of {', '.join(sorted(CAMPAIGNS))}",
    )
    parser.add_argument("--seed", type=int, default=None, help="seed of all campaigns; default: a random one for each")
    parser.add_argument("--minutes", type=float, default=None, help="time limit of each; default: its full volume")
    given = parser.parse_args(arguments)
    failed = []
    for name in given.only or CAMPAIGNS:
        seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
        if not run(name, seed, given.minutes):
            failed.append(name)
    print(f"failed: {' '.join(failed)}" if failed else "no campaign found a failure", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
