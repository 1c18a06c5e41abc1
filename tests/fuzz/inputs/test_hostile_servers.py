# SPDX-License-Identifier: Apache-2.0
"""A short run of the campaign `servers`; its rules are in tests/fuzz/inputs/hostile_servers.py."""

import pytest

from tests.fuzz.inputs.hostile_servers import BOUNDED, Row, survive


@pytest.mark.parametrize("row", BOUNDED, ids=lambda row: row.name)
def test_hostile_server_is_survived(row: Row):
    print(survive(row))
