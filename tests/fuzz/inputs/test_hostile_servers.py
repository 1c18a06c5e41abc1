# SPDX-License-Identifier: Apache-2.0
"""A short run of the campaign `servers`; its rules are in tests/fuzz/inputs/hostile_servers.py."""

import pytest

from tests.fuzz.inputs.hostile_servers import BOUNDED, ROWS, Row, survive


@pytest.mark.parametrize("row", BOUNDED, ids=lambda row: row.name)
def test_hostile_server_is_survived(row: Row) -> None:
    print(survive(row))


def test_the_campaign_has_at_least_30_distinct_servers() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 30
