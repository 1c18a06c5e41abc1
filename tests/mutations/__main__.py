# SPDX-License-Identifier: Apache-2.0
"""`make mutants`: mutants that the tests do not notice.

    python -m tests.mutations                                  # 25 of each group of Python, 20 of C
    python -m tests.mutations --only policy c --count 100 --seed 7
    python -m tests.mutations --only c --count 0               # 0: all

Each mutant is judged in a copy of the tree by the tests of its group, until the first failure. At
most two processes run, with the lowest priority. Exits with 1 if a group is below its goal.
"""

import argparse
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.mutations import c_patches
from tests.mutations.groups import GROUPS, ROOT, Group
from tests.mutations.python import PythonMutant
from tests.support.build.artifacts import ARTIFACTS

PROCESSES = 2
SAMPLE = {"c": 20}
USUAL_SAMPLE = 25
PATIENCE_SECONDS = 60.0
"""Added to ten times what the tests take without a mutant; then it hangs, which counts as
noticed.
"""


class Outcome(NamedTuple):
    """The outcome of one mutant."""

    name: str
    noticed: bool
    seconds: float
    by: str


class Tree:
    """A copy of the files under version control."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = subprocess.run(
            ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in filter(None, names.split("\0")):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                target.write_bytes((ROOT / name).read_bytes())
        # By hash: a mutant may have the same size and age as the file that it replaces, and then
        # the bytecode of that file would be used.
        self._python("-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "kbpf")
        there = self._python("-c", "import kbpf; print(kbpf.__file__)").stdout
        assert there.startswith(str(folder)), f"{there} would be judged"

    def _python(self, *arguments: str, seconds: float | None = None, **more: str):
        return subprocess.run(
            ("nice", "-n", "19", sys.executable, *arguments),
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder)} | more,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def judge(self, tests: Sequence[str], seconds: float | None = None, **more: str) -> str:
        """The first failure; "" if there is none."""
        words = ("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests)
        try:
            ended = self._python(*words, seconds=seconds, **more)
        except subprocess.TimeoutExpired:
            return "no end"
        if ended.returncode == 0:
            return ""
        if ended.returncode < 0:  # killed by another process, not by the mutant
            raise SystemExit(f"pytest was ended by signal {-ended.returncode}: {' '.join(tests)}")
        failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
        return failed[0] if failed else f"pytest ended with {ended.returncode}"

    def compile(self, units: Sequence[str], folder: Path) -> None:
        """Compiles these units of the tree in its current state."""
        code = "import sys, pathlib; from kbpf.dataplane.bpf.programs import compile\n"
        code += "for unit in sys.argv[2:]: compile.find_or_compile(unit, pathlib.Path(sys.argv[1]))"
        ended = self._python("-c", code, str(folder), *units)
        assert ended.returncode == 0, ended.stderr

    @contextmanager
    def having(self, mutant: PythonMutant | c_patches.Patch) -> Iterator[None]:
        """The tree with this mutant in place of the file."""
        path = self.folder / mutant.file
        source = path.read_text()
        path.write_text(mutant.applied(source))
        try:
            yield
        finally:
            path.write_text(source)


Judge = Callable[[Tree], Outcome]


def of_python(group: Group, mutant: PythonMutant, seconds: float) -> Judge:
    """Judges a mutant of this group."""

    def judge(tree: Tree) -> Outcome:
        began = time.monotonic()
        with tree.having(mutant):
            by = tree.judge(group.judges(mutant), seconds)
        return Outcome(mutant.name, bool(by), time.monotonic() - began, by)

    return judge


def of_c(patch: c_patches.Patch, base: Path) -> Judge:
    """Judges a C patch; `base` has the artifacts of the units that it leaves alone."""

    def judge(tree: Tree) -> Outcome:
        began = time.monotonic()
        # In the tree, too: some tests compile a header for themselves.
        with tempfile.TemporaryDirectory(prefix="kbpf-mutant-") as name, tree.having(patch):
            shutil.copytree(base, name, dirs_exist_ok=True)
            tree.compile(patch.units, Path(name))
            by = tree.judge(patch.tests, **{ARTIFACTS: name})
        return Outcome(patch.name, bool(by), time.monotonic() - began, by)

    return judge


def run(name: str, judges: Sequence[Judge], trees: "queue.Queue[Tree]", goal: int) -> bool:
    """Judges all mutants of a group; returns whether enough of them are noticed."""

    def one(judge: Judge) -> Outcome:
        tree = trees.get()
        try:
            outcome = judge(tree)
        finally:
            trees.put(tree)
        word = "noticed" if outcome.noticed else "SURVIVED"
        print(f"{word:8} {outcome.seconds:5.1f} s  {outcome.name}  {outcome.by[:100]}", flush=True)
        return outcome

    with ThreadPoolExecutor(PROCESSES) as pool:
        outcomes = list(pool.map(one, judges))
    noticed = sum(outcome.noticed for outcome in outcomes)
    rate = 100 * noticed / len(outcomes) if outcomes else 100.0
    print(f"== {name}: {noticed} of {len(outcomes)} noticed, {rate:.0f} %; the goal is {goal} %")
    for outcome in outcomes:
        if not outcome.noticed:
            print(f"   survived: {outcome.name}")
    return rate >= goal


def main() -> int:
    """Exit status 1 if a group is below its goal."""
    names = [*(group.name for group in GROUPS), *c_patches.GOALS]
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", choices=names, metavar="NAME", default=names, help=f"of {', '.join(names)}"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the samples; else a new one")
    parser.add_argument("--count", type=int, default=None, help="of each group; 0: all")
    given = parser.parse_args()
    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    good = True
    with ExitStack() as stack:
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kbpf-mutants-"))) for _ in range(PROCESSES + 1)
        ]
        made = [Tree(folder) for folder in folders[1:]]
        trees: queue.Queue[Tree] = queue.Queue()
        for tree in made:
            trees.put(tree)

        def sample(name: str, everything: Sequence) -> list:
            count = SAMPLE.get(name, USUAL_SAMPLE) if given.count is None else given.count
            chosen = random.Random(f"{seed} {name}")
            return chosen.sample(everything, min(count or len(everything), len(everything)))

        for group in GROUPS:
            if group.name not in given.only:
                continue
            began = time.monotonic()
            failed = made[0].judge(group.tests)
            assert not failed, f"{group.name}, without a mutant: {failed}"
            seconds = 10 * (time.monotonic() - began) + PATIENCE_SECONDS
            chosen = sample(group.name, group.mutants())
            judges = [of_python(group, mutant, seconds) for mutant in chosen]
            good = run(group.name, judges, trees, group.goal) and good
        if c_patches.GOALS.keys() & {*given.only}:
            c_patches.build_base(folders[0])
        for name, goal in c_patches.GOALS.items():
            if name in given.only:
                judges = [of_c(patch, folders[0]) for patch in sample(name, c_patches.patches(name))]
                good = run(name, judges, trees, goal) and good
    print(f"seed {seed}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
