# SPDX-License-Identifier: Apache-2.0
"""A short run of the campaign `servers`; its rules are in tests/fuzz/inputs/hostile_servers.py."""

import pytest

from tests.fuzz.inputs.hostile_servers import BOUNDED, survive


@pytest.mark.parametrize("name", BOUNDED)
def test_hostile_server_is_survived(name: str):
    print(survive(name))
