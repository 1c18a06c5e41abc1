# SPDX-License-Identifier: Apache-2.0
"""Results of runs: as the table that a run prints and stores, and side by side in a document."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

PASS, FAIL, SKIP = "pass", "FAIL", "SKIP"
PREFIX = "[sig-network] "
ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
"""Has the result of a run for each version and proxy in docs/conformance.md."""
DOCUMENT = ROOT / "docs" / "conformance.md"
BEGIN = "<!-- begin: python -m tests.conformance report -->\n"
END = "<!-- end -->\n"
PROXIES = ("kbpf", "kube-proxy-nftables", "kube-proxy-iptables")
FUTURE = {"Services should support named targetPorts that resolve to different ports on different endpoints": "1.41"}
"""Tests with `[FutureConformance]` in Kubernetes 1.38, and the version that makes them conformance tests."""
MAX_MESSAGE = 80
"""Characters of a message in the document; the recorded result has more."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one test. The message says why it failed or skipped itself."""

    result: str
    name: str
    seconds: float
    message: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """All results of a proxy with one version of Kubernetes."""

    version: str
    proxy: str
    nodes: str
    rows: tuple[Row, ...]

    def count(self, result: str) -> int:
        return sum(row.result == result for row in self.rows)

    @property
    def passes(self) -> bool:
        return self.count(PASS) > 0 and self.count(FAIL) == 0

    @property
    def summary(self) -> str:
        counts = f"{self.count(PASS)} passed, {self.count(FAIL)} failed"
        return f"{counts}, {self.count(SKIP)} skipped themselves"

    def table(self) -> str:
        """A line for each test, and its message below it."""
        lines = [f"Kubernetes {self.version}; proxy {self.proxy}; {self.nodes} nodes"]
        for row in self.rows:
            lines.append(f"{row.result} {row.seconds:6.1f} s  {row.name}")
            if row.message:
                lines.append(f"    {row.message}")
        return "\n".join([*lines, self.summary, ""])

    @classmethod
    def parse(cls, table: str) -> Self:
        """Reads a table back."""
        head, *lines, _ = table.splitlines()
        match = re.fullmatch(r"Kubernetes (\S+); proxy (.*); ([^;]+) nodes", head)
        assert match is not None, head
        rows: list[Row] = []
        for line in lines:
            if line.startswith("    "):
                last = rows.pop()
                rows.append(Row(last.result, last.name, last.seconds, line.strip()))
                continue
            result, seconds, _, name = line.split(maxsplit=3)
            rows.append(Row(result, name, float(seconds)))
        return cls(match[1], match[2], match[3], tuple(rows))


def recorded() -> list[Run]:
    """The stored results, in the order of the document's rows: the newest version first."""
    runs = [Run.parse(path.read_text()) for path in RESULTS.glob("*.txt")]
    return sorted(runs, key=lambda run: ([-int(part) for part in run.version.split(".")], PROXIES.index(run.proxy)))


def record(run: Run) -> Path:
    """Stores a result for the document. A run of some tests replaces only their results, also if it
    had another number of nodes.
    """
    path = RESULTS / f"{run.version}-{run.proxy}.txt"
    before = Run.parse(path.read_text()) if path.exists() else run
    rows = {row.name: row for row in (*before.rows, *run.rows)}
    nodes = sorted({*before.nodes.split(" and "), run.nodes}, key=int)
    merged = replace(run, nodes=" and ".join(nodes), rows=tuple(sorted(rows.values(), key=lambda row: row.name)))
    path.write_text(merged.table())
    return path


def page(document: str, runs: Sequence[Run]) -> str:
    """The document with a new generated part."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "".join((before, BEGIN, "\n", *_generated(runs), "\n", END, after))


def _generated(runs: Sequence[Run]) -> Iterable[str]:
    yield "| Kubernetes | proxy | nodes | passed | failed | skipped themselves |\n"
    yield "|---|---|---|---|---|---|\n"
    for run in runs:
        counts = " | ".join(str(run.count(each)) for each in (PASS, FAIL, SKIP))
        result = f"[{run.proxy}](../tests/conformance/results/{run.version}-{run.proxy}.txt)"
        yield f"| {run.version} | {result} | {run.nodes} | {counts} |\n"
    yield "\n### Future conformance\n\n| test | from | passed |\n|---|---|---|\n"
    for name, version in FUTURE.items():
        passed = (run for run in runs for row in run.rows if (short_name(row.name), row.result) == (name, PASS))
        yield f"| {name} | {version} | {', '.join(f'{run.proxy} {run.version}' for run in passed)} |\n"
    for result, title in ((FAIL, "Failures"), (SKIP, "Tests that skip themselves")):
        outcomes: dict[str, dict[str, list[str]]] = {}
        for run in runs:
            for row in run.rows:
                if row.result == result:
                    message = textwrap.shorten(row.message, MAX_MESSAGE, placeholder=" ...")
                    where = outcomes.setdefault(short_name(row.name), {}).setdefault(message, [])
                    where.append(f"{run.proxy} {run.version}")
        if outcomes:
            yield f"\n### {title}\n\n"
            for name, messages in sorted(outcomes.items()):
                texts = (f"{', '.join(where)}: {_escape(text)}" for text, where in messages.items())
                yield f"- **{_escape(name)}**: {'; '.join(texts)}\n"


def short_name(name: str) -> str:
    """The name without its labels, which other versions write in another order; those with a colon
    distinguish tests.
    """
    name = re.sub(r" \[(?!\w+:)[^\]]*\]|\[FeatureGate:[^\]]*\]", "", name.removeprefix(PREFIX))
    return re.sub(r" +", " ", name).strip()


def _escape(text: str) -> str:
    return re.sub(r"([|\[\]<>*_`])", r"\\\1", text)
