#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that a refactoring changes nothing: `tools/same.py OLD NEW`, folders or git revisions.

Each tree makes the same inputs and digests its results (tests/same.py, which moves with the code
that it imports): bytecode, desired states, map writes, netlink messages, pages and settings. Needs
root and BCC, like `make test`. Exit code: 0 all is equal, 1 something differs, 2 an error.
"""

import argparse
import contextlib
import difflib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMPARISONS = ("bytecode", "states", "writes", "messages", "shown", "configs")
SHOWN = 5
"""Cases whose differences are printed, of each comparison."""
LINES = 40
"""Lines that are printed of each of them."""


class Tree(NamedTuple):
    name: str
    folder: Path


class ToolError(Exception):
    """The comparison was not possible."""


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError((done.stderr.strip().splitlines() or ["git failed"])[-1])
    return done.stdout.strip()


def open_tree(name: str, stack: contextlib.ExitStack) -> Tree:
    """The folder of this name, or else a temporary worktree of this revision."""
    if Path(name).is_dir():
        return Tree(name, Path(name).resolve())
    try:
        commit = git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
    except ToolError as error:
        raise ToolError(f"{name} is neither a folder nor a revision") from error
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kbpf-same-"))) / "tree"
    remove = ["git", "-C", ROOT, "worktree", "remove", "--force", folder]
    stack.callback(subprocess.run, remove, capture_output=True, check=False)
    git("worktree", "add", "--detach", str(folder), commit)
    return Tree(name, folder)


def run(tree: Tree, comparison: str, scale: float, *options: str) -> list[list[str]]:
    """The rows that tests/same.py of this tree writes. One child at a time: two compilers would
    be slow.
    """
    with tempfile.NamedTemporaryFile("r", prefix="kbpf-same-") as out:
        command = [sys.executable, "-m", "tests.same", comparison, out.name, "--scale", str(scale)]
        child = subprocess.Popen(
            [*command, *options],
            cwd=tree.folder,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = child.communicate()
        except BaseException:  # an interrupt: its processes have to remove their maps
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
        if child.returncode:
            reason = (said.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            raise ToolError(f"{tree.name}: {comparison}: {reason}")
        return [json.loads(line) for line in out]


def digests(tree: Tree, comparison: str, scale: float) -> dict[str, tuple[str, str]]:
    """Case → the digests of its input and its result."""
    return {name: (given, result) for name, given, result in run(tree, comparison, scale)}


def compare(old: Tree, new: Tree, comparison: str, scale: float) -> bool:
    """Prints how the trees differ; returns whether they are equal."""
    start = time.monotonic()
    before, after = (digests(tree, comparison, scale) for tree in (old, new))
    both = [name for name in before if name in after]
    other_inputs = [name for name in both if before[name][0] != after[name][0]]
    changed = [name for name in both if before[name] != after[name] and name not in other_inputs]
    findings = {
        "different": changed,
        "other inputs": other_inputs,
        f"only in {old.name}": [name for name in before if name not in after],
        f"only in {new.name}": [name for name in after if name not in before],
    }
    equal = len(both) - len(changed) - len(other_inputs)
    print(f"{comparison}: equal: {equal} cases ({time.monotonic() - start:.0f} s)", flush=True)
    for what, names in findings.items():
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            print(f"{comparison}: {what}: {len(names)} cases: {'; '.join(names[:SHOWN])}{more}")
    if shown := changed[:SHOWN]:
        results = [dict(run(tree, comparison, scale, "--show", *shown)) for tree in (old, new)]
        for name in shown:
            texts = [result.get(name, "").splitlines() for result in results]
            titles = [f"{tree.name}: {name}" for tree in (old, new)]
            lines = difflib.unified_diff(*texts, *titles, lineterm="")
            print(*itertools.islice(lines, LINES), sep="\n")
    return not any(findings.values()) and bool(both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", help="a folder or a git revision")
    parser.add_argument("new", help="the same")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=COMPARISONS)
    parser.add_argument("--scale", type=float, default=1.0, help="the share of the cases to run")
    said = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # worktrees have to be removed
    try:
        with contextlib.ExitStack() as stack:
            old, new = (open_tree(name, stack) for name in (said.old, said.new))
            equal = [compare(old, new, each, said.scale) for each in said.only]
            return 0 if all(equal) else 1
    except ToolError as error:
        print(f"same: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 2


if __name__ == "__main__":
    sys.exit(main())
