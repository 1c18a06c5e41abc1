# SPDX-License-Identifier: Apache-2.0
"""The bounded part of the campaign `api-histories`."""

from tests.fuzz.inputs.api_histories import histories
from tests.support.cluster.apiserver import ApiServer

SEED = 20261122
COUNT, OPERATIONS = 4, 60


def test_histories_of_a_real_api_server_end_in_its_state():
    with ApiServer() as server:
        done = histories(server, SEED, COUNT, OPERATIONS)
    assert done["histories"] == COUNT
    assert done["created"] + done["changed"] + done["deleted"] == COUNT * OPERATIONS
    assert done["restored"] == 1
