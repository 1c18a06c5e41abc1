# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks: interleaved runs, medians, ratios and JSON output."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.lab.lab import inside, run


def say(text: str) -> None:
    """Prints progress to stderr; stdout is for the JSON."""
    print(text, file=sys.stderr, flush=True)


def chosen(names: Iterable[str]) -> list[str]:
    """The names that contain one of the words in $KBPF_BENCH_ONLY; all if it is not set."""
    words = os.environ.get("KBPF_BENCH_ONLY", "").split()
    return [name for name in names if not words or any(word in name for word in words)]


def first(processor: int) -> tuple[str, ...]:
    """The command prefix that runs a program on this CPU, with the highest nice priority."""
    return ("taskset", "-c", str(processor), "nice", "-n", "-20")


def sysctl(netns: str | None, **settings: int) -> None:
    """Sets sysctls below `net` in a network namespace; "__" in a name means a dot."""
    lines = (f"echo {v} > /proc/sys/net/{k.replace('__', '/')}" for k, v in settings.items())
    run(*inside(netns, None, "sh", "-ec", ";".join(lines)))


def rounds(usual: int = 15) -> int:
    """The number of rounds: $KBPF_BENCH_ROUNDS, or `usual`."""
    return int(os.environ.get("KBPF_BENCH_ROUNDS", usual))


def interleave(count: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measures each side once per round, in rotating order, so that slow changes of the machine's
    speed affect all sides alike. Returns the values by side.
    """
    results: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(count):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            results[name].append(sides[name]())
    return results


def ratio(results: Mapping[str, Sequence[float]], one: str, other: str) -> dict[str, float]:
    """The ratio `one` / `other` of each round: median, lower and upper quartile."""
    pairs = [a / b for a, b in zip(results[one], results[other], strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def median(values: Sequence[float]) -> float:
    """The median, rounded to three digits."""
    return round(statistics.median(values), 3)


def build_c(name: str) -> Path:
    """Compiles benchmarks/tools/NAME.c into a temporary folder; returns the program's path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("no C compiler found; install one: apt-get install gcc libc6-dev")
    out = Path(tempfile.mkdtemp(prefix="kbpf-bench-")) / name
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-O2", "-o", str(out), str(source)], check=True)
    return out


def memory(pid: int) -> dict[str, float]:
    """Resident memory of a process in MB: now, and at its peak."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        name: round(int(facts[field].split()[0]) / 1024, 1)
        for name, field in (("rss_mb", "VmRSS"), ("peak_mb", "VmHWM"))
    }


def goal(value: float, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """A value with its goal, and whether it is reached."""
    reached = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    bound = {"at_least": at_least} if at_least is not None else {"at_most": at_most}
    return {"value": value, **bound, "reached": reached}


def emit(result: Mapping[str, Any]) -> None:
    """Prints the results to stdout, as JSON."""
    print(json.dumps(result, indent=2), flush=True)
