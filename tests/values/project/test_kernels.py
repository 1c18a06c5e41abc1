# SPDX-License-Identifier: Apache-2.0
"""The table of `make test-kernels` names existing tests."""

from pathlib import Path

from tests.kernels import __main__ as guests


def test_each_test_of_a_guest_exists():
    """A guest that collects nothing would fail minutes later."""
    for test in {test for feature in (*guests.FEATURES, *guests.QUICK) for test in feature.tests}:
        path, _, name = test.partition("::")
        assert Path(path).exists(), test
        assert not name or f"\ndef {name.partition('[')[0]}(" in Path(path).read_text(), test
