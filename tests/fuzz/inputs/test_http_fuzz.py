# SPDX-License-Identifier: Apache-2.0
"""Short runs of the campaigns `http-requests` and `http-load` (see tests/campaigns.py)."""

from tests.fuzz.inputs import http_load, http_requests

SEED = 11
REQUESTS = 20_000
CONNECTIONS = 2_000


def test_random_requests_cause_no_internal_error():
    assert http_requests.run(SEED, REQUESTS) == REQUESTS


def test_misbehaving_connections_do_not_delay_probes():
    http_load.connections(SEED, CONNECTIONS).judge()
