# SPDX-License-Identifier: Apache-2.0
"""The mutants of `make mutants` match the current code: a row for older code is an error here,
instead of a mutant that is silently not tested.
"""

import ast
from collections import Counter
from typing import NamedTuple

import pytest

from tests.fuzz.packets.mutants import PACKAGE
from tests.mutations.c_patches import PATCHES, Patch
from tests.mutations.groups import EQUIVALENT, GROUPS, ROOT, Group, equivalent
from tests.mutations.python import mutants


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.mutant.name)
def test_a_patch_matches_the_current_code(patch: Patch):
    text = (PACKAGE / "bpf" / patch.mutant.file).read_text()
    assert text.count(patch.mutant.old) == 1
    assert patch.mutant.old != patch.mutant.new
    assert patch.units
    assert all((ROOT / test).exists() for test in patch.tests)


def test_patches_have_unique_names():
    assert len(PATCHES) >= 60
    assert max(Counter(patch.mutant.name for patch in PATCHES).values()) == 1


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_a_group_has_files_and_tests(group: Group):
    assert group.sources()
    assert all(path.is_file() for path in group.sources())
    assert all((ROOT / test).exists() for test in group.tests)
    found = group.mutants()
    assert len(found) > 100
    for mutant in found[:: len(found) // 20]:
        ast.parse(mutant.applied((ROOT / mutant.file).read_text()))


def test_equivalent_mutants_match_the_current_code():
    of = {name: mutants(name, (ROOT / name).read_text()) for name in {e.file for e in EQUIVALENT}}
    for row in EQUIVALENT:
        assert any(equivalent(mutant) == row for mutant in of[row.file]), row
        assert row.reason


class Row(NamedTuple):
    """A source text with one place to mutate, and the mutated texts."""

    source: str
    mutated: list[str]


ROWS = [
    Row("a < b", ["(a <= b)", "(a >= b)"]),
    Row("a <= b < c", ["(a < b < c)", "(a > b < c)", "(a <= b <= c)", "(a <= b >= c)"]),
    Row("a is None", ["(a is not None)"]),
    Row("a in b", ["(a not in b)"]),
    Row("a and b", ["(a or b)"]),
    Row("not a", ["(a)"]),
    Row("a = 1", ["2"]),
    Row("a = True", ["False"]),
    Row("a - b", ["(a + b)"]),
    Row("a + 'text'", []),
    Row("a: int | None = b", []),
    Row("if a: b", ["(not a)"]),
    Row("x = [a for a in b if c(a)]", ["True"]),
    Row("f(a, b)", ["pass", "(f(b, a))"]),
    Row("f(a, a)", ["pass"]),
    Row("log.info('a', b)", []),
    Row("assert_never(a)", []),
    Row("self.a = b", ["pass"]),
    Row("a = b", []),
    Row("a += b", ["pass"]),
    Row("raise A", ["pass"]),
    Row("'é' ; a < 'é'", ["(a <= 'é')", "(a >= 'é')"]),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.source)
def test_the_mutants_of_a_text(row: Row):
    found = mutants("f.py", row.source)
    assert sorted(mutant.new for mutant in found) == sorted(row.mutated)
    for mutant in found:
        ast.parse(mutant.applied(row.source))
