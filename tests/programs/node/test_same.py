# SPDX-License-Identifier: Apache-2.0
"""tools/same.py: equal trees are equal, and planted changes are found and named."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.table import table

ROOT = Path(__file__).parents[3]


class Planted(NamedTuple):
    """A one-line change, the only comparison that finds it, and a word of what that one prints."""

    comparison: str
    file: str
    old: str
    new: str
    word: str


PLANTED = table(
    Planted,
    """
bytecode | kbpf/bpf/sock.c | #define CGROUP_LEVELS 10 | #define CGROUP_LEVELS 11 | sock: program connect4
states | kbpf/policy/compute.py | =service.affinity_timeout, | =service.affinity_timeout + 1, | affinity_timeout=1,
writes | kbpf/dataplane/bpf/state/commit.py | ONE = U32.pack(1) | ONE = U32.pack(2) | 02000000
messages | kbpf/kernel/net/ipvs.py | _L_THRESH, _U32.pack(0) | _L_THRESH, _U32.pack(7) | 0800060007000000
shown | kbpf/serve/kbpf_metrics.py | "gauge", text, read, labels) | "gauge", text.upper(), read, labels) | # HELP kbpf_
configs | kbpf/model/config.py | mode: str = "auto" | mode: str = "ipvs" | mode='ipvs'
""",
)


def same(*words: object) -> tuple[int, str]:
    """The exit code and the output, of a few cases."""
    command = [sys.executable, str(ROOT / "tools/same.py"), *map(str, words), "--scale", "0.002"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path) -> Path:
    for name in ("kbpf", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_an_unchanged_tree_is_equal(copy: Path):
    """That the same sources give the same bytecode: test_compile.py."""
    others = [row.comparison for row in PLANTED if row.comparison != "bytecode"]
    code, text = same(ROOT, copy, "--only", *others)
    assert (code, "different" in text) == (0, False), text
    assert all(f"{name}: equal: " in text for name in others)


def test_planted_changes_are_found(copy: Path):
    for row in PLANTED:
        file = copy / row.file
        before = file.read_text()
        assert before.count(row.old) == 1
        file.write_text(before.replace(row.old, row.new))
    code, text = same(ROOT, copy)
    assert code == 1, text
    for row in PLANTED:
        assert f"{row.comparison}: different: " in text
        assert row.word in text
