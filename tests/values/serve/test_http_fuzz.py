"""A part of the campaigns `http-requests` and `http-load` (tests/campaigns.py) in each run."""

import pytest

from tests.fuzz.inputs import http_load, http_requests

SEED = 11
REQUESTS = 20_000
CONNECTIONS = 2_000
SECONDS = 5.0


def test_no_request_meets_a_fault_and_h11_agrees():
    found = http_requests.run(SEED, REQUESTS)
    assert found["requests"] == REQUESTS
    assert found["memory_mb"] < 20


def test_connections_that_misbehave_do_not_keep_probes_waiting():
    http_load.connections(SEED, CONNECTIONS).judge()


def test_slow_readers_of_a_large_page_do_not_keep_probes_waiting():
    http_load.slow_readers(SEED, SECONDS).judge()


def test_too_few_descriptors_are_one_line():
    with pytest.raises(RuntimeError, match="open files, the hard limit is"):
        http_load.allow(1 << 40)
