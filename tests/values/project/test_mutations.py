# SPDX-License-Identifier: Apache-2.0
"""The mutants of `make mutants` match the current code: a row for older code is an error here,
instead of a mutant that is silently not tested.
"""

import pytest

from tests.mutations.c_patches import PATCHES, Patch
from tests.mutations.groups import EQUIVALENT, ROOT, equivalent
from tests.mutations.python import mutants


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_matches_the_current_code(patch: Patch):
    text = (ROOT / patch.file).read_text()
    assert text.count(patch.old) == 1
    assert patch.old != patch.new
    assert patch.units
    assert all((ROOT / test).exists() for test in patch.tests)


def test_equivalent_mutants_match_the_current_code():
    of = {name: mutants(name, (ROOT / name).read_text()) for name in {e.file for e in EQUIVALENT}}
    for row in EQUIVALENT:
        assert any(equivalent(mutant) == row for mutant in of[row.file]), row
        assert row.reason
