# SPDX-License-Identifier: Apache-2.0
"""Fixtures of these tests."""

import pytest

from tests.values.source.folder.folder import Run


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)
