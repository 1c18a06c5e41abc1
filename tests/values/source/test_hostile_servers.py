"""The bounded part of the campaign `servers`, whose rules are in
tests/fuzz/inputs/hostile_servers.py.
"""

import pytest

from tests.fuzz.inputs.hostile_servers import BOUNDED, ROWS, Row, survive


@pytest.mark.parametrize("row", BOUNDED, ids=lambda row: row.name)
def test_a_hostile_server_is_survived(row: Row) -> None:
    print(survive(row))


def test_there_are_as_many_as_were_promised() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 30
