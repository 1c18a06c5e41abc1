# SPDX-License-Identifier: Apache-2.0
"""The delays between attempts."""

import itertools

import pytest

from kbpf.kernel.system.polling import Backoff


def test_random_factor():
    chances = itertools.cycle([0.0, 0.5, 1.0])
    backoff = Backoff(0.2, 30.0, lambda: next(chances))
    assert [backoff.next_delay() for _ in range(3)] == [pytest.approx(it) for it in (0.1, 0.3, 0.8)]


def test_many_tries_do_not_overflow():
    assert Backoff(0.2, 30.0, tries=100_000).next_delay() == 30
