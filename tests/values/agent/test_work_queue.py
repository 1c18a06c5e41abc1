# SPDX-License-Identifier: Apache-2.0
"""The order in which Services are computed, and how often large ones are."""

from kbpf.agent.computer import LARGE_SERVICE_ENDPOINTS, SECONDS_PER_ENDPOINT, ServiceQueue
from kbpf.model.objects import ServiceName


def named(*names: str) -> list[ServiceName]:
    return [ServiceName("ns", name) for name in names]


def test_system_services_come_first_then_smaller_ones():
    dns, small, medium = named("dns", "small", "medium")
    work = ServiceQueue()
    work.add(medium, 500, False, 1.0)
    work.add(small, 5, False, 1.001)
    work.add(dns, 900, True, 1.002)
    assert [work.pop_small() for _ in range(4)] == [dns, small, medium, None]
    assert not work


def test_large_services_have_their_own_queue():
    """The agent computes large Services after all small ones, no matter how long they waited."""
    large, small, dns = named("large", "small", "dns")
    work = ServiceQueue()
    work.add(large, LARGE_SERVICE_ENDPOINTS, False, 0.0)
    work.add(dns, LARGE_SERVICE_ENDPOINTS, True, 1.0)
    work.add(small, LARGE_SERVICE_ENDPOINTS - 1, False, 2.0)
    assert (work.next_due(2.0), work.oldest_since) == (2.0, 0.0)
    assert [work.pop_small() for _ in range(2)] == [small, None]
    assert [work.pop_large(2.0) for _ in range(3)] == [dns, large, None]


def test_medium_service_is_not_starved_by_small_ones():
    (medium,) = named("medium")
    work = ServiceQueue()
    work.add(medium, 500, False, 0.0)
    for number in range(1000):
        work.add(ServiceName("ns", f"s{number}"), 5, False, number / 1000)
        if work.pop_small() == medium:
            assert number / 1000 <= 500 * SECONDS_PER_ENDPOINT + 0.01
            return
    raise AssertionError("it was never due")


def test_large_service_waits_after_a_computation_and_is_then_computed_once():
    large, small = named("large", "small")
    rest = LARGE_SERVICE_ENDPOINTS * SECONDS_PER_ENDPOINT
    work = ServiceQueue()
    work.add(large, LARGE_SERVICE_ENDPOINTS, False, 0.0)
    assert work.pop_large(0.0) == large, "at once, the first time"
    work.mark_computed(large, LARGE_SERVICE_ENDPOINTS, 1.0)
    for now in (1.0, 1.01, 1.02):
        work.add(large, LARGE_SERVICE_ENDPOINTS, False, now)
    work.add(small, 1, False, 1.02)
    assert (work.next_due(1.02), work.oldest_since) == (1.02, 1.0)
    assert (work.pop_small(), work.pop_large(1.02)) == (small, None)
    assert work.next_due(1.02) == 1.0 + rest
    assert work.pop_large(1.0 + rest) == large
    assert not work


def test_small_services_do_not_wait():
    (small,) = named("small")
    work = ServiceQueue()
    work.mark_computed(small, LARGE_SERVICE_ENDPOINTS - 1, 1.0)
    work.add(small, LARGE_SERVICE_ENDPOINTS - 1, False, 1.0)
    assert work.pop_small() == small
