# SPDX-License-Identifier: Apache-2.0
"""Kernel x feature x result: the outcome of a pytest run in a guest for each feature.

A feature is one or more test files, folders of them, or tests in files (FILE::NAME, also with the
[PARAMETERS] of one); its result is read from pytest's JUnit file. What has no result at all is a
failure: the guest hung, or the tests were not collected.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from xml.etree import ElementTree

import msgspec

WORKS, LACKS, FAILS = "works", "lacks", "FAILS"
NO_RESULT = "no result"


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table, the tests that prove it, and the mode of the lab's agents. `boot`: more
    words for the kernel's command line; such a feature has a separate guest. `programs`: Go
    programs that the tests run.
    """

    name: str
    tests: tuple[str, ...]
    mode: str = "bpf"
    boot: str = ""
    programs: tuple[str, ...] = ()

    def has(self, test: str, case: "Case") -> bool:
        """Whether this case belongs to that one of its tests."""
        path, _, name = test.partition("::")
        same = not name or name in (case.name, case.name.partition("[")[0])
        inside = case.file == path or case.file.startswith(f"{path}/")
        return case.mode == self.mode and inside and same


class Result(msgspec.Struct, frozen=True):
    """One cell. `lacking`: why tests were skipped, in the words of the feature table
    (support/features.py); `failed`: names of failed tests; `why`: pytest's report of each;
    `processed`: instructions that the verifier processed, by program.
    """

    kernel: str
    release: str
    feature: str
    result: str
    passed: int
    skipped: int
    seconds: float
    lacking: tuple[str, ...]
    failed: tuple[str, ...]
    processed: dict[str, int] = {}
    why: dict[str, str] = {}

    @property
    def cell(self) -> str:
        """The text in the table."""
        if self.result == FAILS:
            return f"FAILS ({len(self.failed)} of {len(self.failed) + self.passed})"
        if self.processed:
            return f"{self.passed} (at most {max(self.processed.values()):,} insns)"
        left_out = f", {self.skipped} lacking" if self.skipped else ""
        return f"{self.passed}{left_out}" if self.passed else LACKS


class Case(msgspec.Struct, frozen=True):
    """One test of a JUnit file."""

    file: str
    name: str
    seconds: float
    failed: bool
    skipped: str
    properties: dict[str, str]
    mode: str = "bpf"
    why: str = ""

    @classmethod
    def of(cls, element: ElementTree.Element, mode: str = "bpf") -> Self:
        """The test case of this element."""
        skipped = element.find("skipped")
        wrong = [one for kind in ("failure", "error") for one in element.iter(kind)]
        return cls(
            element.get("classname", "").replace(".", "/") + ".py",
            element.get("name", ""),
            float(element.get("time", "0")),
            bool(wrong),
            skipped.get("message", "") if skipped is not None else "",
            {p.get("name", ""): p.get("value", "") for p in element.iter("property")},
            mode,
            "\n".join(one.text or one.get("message", "") for one in wrong),
        )


def read(path: Path, mode: str = "bpf") -> list[Case]:
    """All cases of a JUnit file; none if the file is missing or incomplete."""
    try:
        tree = ElementTree.parse(path)
    except (OSError, ElementTree.ParseError):
        return []
    return [Case.of(element, mode) for element in tree.iter("testcase")]


def results(kernel: str, release: str, features: Sequence[Feature], cases: Iterable[Case]) -> list[Result]:
    """One result for each feature."""
    known = list(cases)
    return [_result(kernel, release, f, [c for c in known if any(f.has(t, c) for t in f.tests)]) for f in features]


def _result(kernel: str, release: str, feature: Feature, cases: list[Case]) -> Result:
    failed = tuple(c.name for c in cases if c.failed)
    missing = [t for t in feature.tests if not any(feature.has(t, case) for case in cases)]
    skipped = [c for c in cases if c.skipped]
    passed = len(cases) - len(failed) - len(skipped)
    wrong = (*failed, *(f"{path}: {NO_RESULT}" for path in missing))
    return Result(
        kernel=kernel,
        release=release,
        feature=feature.name,
        result=FAILS if wrong else WORKS if passed else LACKS,
        passed=passed,
        skipped=len(skipped),
        seconds=round(sum(c.seconds for c in cases), 1),
        lacking=tuple(sorted({c.skipped for c in skipped})),
        failed=wrong,
        why={c.name: c.why for c in cases if c.failed},
        processed={c.name: int(c.properties["processed"]) for c in cases if "processed" in c.properties},
    )


def without_result(rows: Iterable[Result]) -> bool:
    """Whether a test that should have run has no result."""
    return any(name.endswith(NO_RESULT) for row in rows for name in row.failed)


def page(rows: Sequence[Result], features: Sequence[Feature]) -> str:
    """The table, and below it what is lacking in which kernel, and what failed."""
    kernels = list(dict.fromkeys((r.kernel, r.release) for r in rows))
    cells = {(r.kernel, r.feature): r.cell for r in rows}
    lines = [["feature", *(f"{kernel} ({release})" for kernel, release in kernels)]]
    lines += [[f.name, *(cells.get((k, f.name), "-") for k, _ in kernels)] for f in features]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    out = ["  ".join(w.ljust(n) for w, n in zip(line, widths, strict=True)) for line in lines]
    for row in rows:
        out += [f"{row.kernel} lacks: {why} ({row.feature})" for why in row.lacking]
        out += [f"{row.kernel} FAILS: {row.feature}: {name}" for name in row.failed]
    return "\n".join(line.rstrip() for line in out)


def failures(rows: Iterable[Result], lines: int = 40) -> str:
    """pytest's report of each failure, limited to its last lines."""
    out = []
    for row in rows:
        for name, why in row.why.items():
            out += [f"---- {row.kernel} ({row.release}): {name}", *why.splitlines()[-lines:]]
    return "\n".join(out)
