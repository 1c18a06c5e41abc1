# SPDX-License-Identifier: Apache-2.0
"""The delays between attempts."""

import itertools

import pytest

from kbpf.kernel.system.polling import Backoff


def test_delays_are_doubled_up_to_the_maximum():
    backoff = Backoff(0.1, 1.0)
    assert [backoff.next_delay() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_random_factor():
    chances = itertools.cycle([0.0, 0.5, 1.0])
    backoff = Backoff(0.2, 30.0, lambda: next(chances))
    assert [backoff.next_delay() for _ in range(3)] == [pytest.approx(it) for it in (0.1, 0.3, 0.8)]


def test_only_the_first_clean_end_has_no_delay():
    backoff = Backoff(0.2, 30.0)
    delays = [backoff.next_delay(failed=False, healthy_for=1) for _ in range(4)]
    assert delays == [0, 0.4, 0.8, 1.6]


def test_clean_end_after_a_failure_has_a_delay():
    backoff = Backoff(0.2, 30.0)
    assert backoff.next_delay() == 0.2
    assert backoff.next_delay(failed=False, healthy_for=1) == 0.4


def test_steady_time_resets_it():
    backoff = Backoff(0.2, 30.0, steady_after=5.0, tries=7)
    assert backoff.next_delay(healthy_for=5.0) == 0.2


def test_many_tries_do_not_overflow():
    assert Backoff(0.2, 30.0, tries=100_000).next_delay() == 30
