# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the folder of objects."""

import pytest

from tests.values.source.folder.folder import Run


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)
