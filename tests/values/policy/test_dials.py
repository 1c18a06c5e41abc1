# SPDX-License-Identifier: Apache-2.0
"""The lab's rows, answered from the desired state of the same objects: no kernel, no cluster.

tests/programs/packets/test_dials.py sends them as packets; the lab's files dial them.
"""

import pytest

from tests.support.lab.dial import Dial
from tests.support.lab.paper import TABLES, Table, answer, expected, explain

ROWS = [pytest.param(table, row, id=f"{table.name}: {row.name}") for table in TABLES for row in table.rows]


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_dial(table: Table, row: Dial):
    verdict, names = expected(row)
    found = answer(table, row)
    assert (found.verdict, found.names(names)) == (verdict, names), explain(table, row)
