# SPDX-License-Identifier: Apache-2.0
"""The slots of a backend set: shares by weight, and the properties of a Maglev table."""

from collections import Counter
from hashlib import blake2b
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbpf.model.desired import EVEN_SPREAD, Backend, Spread
from kbpf.model.objects import Algorithm
from kbpf.policy.spread import (
    MAGLEV_TABLE_SIZES,
    MAX_EXACT_SLOTS,
    MAX_TABLE_SLOTS,
    compute_maglev_table,
    compute_slots,
    count_slots,
    fits_table,
    maglev_table_size,
)
from tests.support import oracle
from tests.support.plane import backends
from tests.support.table import each_pair

RANDOM, MAGLEV = Algorithm.RANDOM, Algorithm.MAGLEV
AB = backends("10.0.0.1:80 10.0.0.2:80")


PINNED = (1, 2, 1, 1, 2, 2, 0, 0, 2, 1, 1, 2, 0, 1, 0, 2)
DIGEST = "0f7dec5c2b94c8f0"


def many(count: int, start: int = 0) -> tuple[Backend, ...]:
    """`count` distinct backends; another `start` gives other ones."""
    numbers = range(start, start + count)
    return backends(" ".join(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}:8080" for n in numbers))


def weighted(*weights: int) -> Spread:
    return Spread(RANDOM, weights)


# ---- random ------------------------------------------------------------------------------------


def test_without_weights_each_backend_has_one_slot():
    assert compute_slots(()) == ()
    assert compute_slots(AB) == (0, 1)
    assert compute_slots(many(500)) == tuple(range(500))


@each_pair("weights, expected", "1 1 → 0 1\n1 2 → 0 1 1\n2 4 → 0 1 1\n5 5 → 0 1\n")
def test_slots_follow_the_weights_divided_by_their_common_divisor(weights, expected):
    found = compute_slots(AB, weighted(*map(int, weights.split())))
    assert " ".join(map(str, found)) == expected


@pytest.mark.parametrize("weights", [(1,), (1, 2, 3), (1, -1), (0, 1)])
@pytest.mark.parametrize("algorithm", Algorithm)
def test_weights_that_do_not_fit_are_refused(weights, algorithm):
    with pytest.raises(ValueError, match="2 backends"):
        compute_slots(AB, Spread(algorithm, weights))


@pytest.mark.parametrize("largest", [1, 7, 999, 1000])
def test_two_backends_have_exact_shares_for_any_weights(largest):
    assert Counter(compute_slots(AB, weighted(largest, 1))) == {0: largest, 1: 1}


def test_many_distinct_weights_have_a_bounded_table():
    weights = tuple(range(1, 1001))
    found = Counter(compute_slots(many(1000), weighted(*weights)))
    assert sum(found.values()) <= 33_000
    assert found[999] == pytest.approx(32_000 * 1000 / sum(weights), abs=1)
    assert found[0] == 1, "nobody with a weight goes without"


def test_slots_left_by_rounding_go_to_the_largest_remainder():
    """341.1, 341.45 and 341.45 of 1,024: 1,023 are whole, and equal remainders go in order."""
    found = Counter(compute_slots(many(3), weighted(997, 998, 998)))
    assert found == {0: 341, 1: 342, 2: 341}


WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=60).map(tuple)


@given(WEIGHTS)
def test_random_shares_are_within_a_slot_of_the_weights(weights):
    found = Counter(compute_slots(many(len(weights)), weighted(*weights)))
    size, total = sum(found.values()), sum(weights)
    most = max(MAX_EXACT_SLOTS, 32 * len(weights))
    assert size <= most + len(weights)
    for index, weight in enumerate(weights):
        exact = min(size, most) * weight / total
        assert found[index] >= 1
        assert abs(found[index] - exact) <= 1 or (found[index] == 1 and exact < 1)


# ---- Maglev ------------------------------------------------------------------------------------


def test_maglev_table_of_three_backends_is_pinned():
    """The table must be the same in every version, on every node, and with every hash seed of Python (each run of this
    test has another): a change moves every flow.
    """
    table = compute_maglev_table(many(3), (), 251)
    assert table[:16] == PINNED
    assert blake2b(bytes(table), digest_size=8).hexdigest() == DIGEST


SIZES = {0: 0, 1: 1, 2: 251, 10: 251, 11: 1021, 40: 1021, 41: 4093, 163: 4093, 164: 16381, 655: 16381, 656: 65521}
SIZES |= {2620: 65521, 2621: 65521, 9999: 65521}


@pytest.mark.parametrize("count", SIZES)
def test_the_size_follows_the_number_of_backends(count):
    assert maglev_table_size(count) == SIZES[count]


@pytest.mark.parametrize(("count", "size"), [(2, 251), (3, 1021), (10, 1021), (11, 4093)])
def test_weighted_backends_have_a_table_for_four_times_as_many(count, size):
    assert maglev_table_size(count, weighted=True) == size


def test_a_table_does_not_depend_on_ports():
    other = backends(" ".join(f"10.0.0.{n}:9090" for n in range(3)))
    assert compute_maglev_table(other, (), 251) == compute_maglev_table(many(3), (), 251)


@given(st.integers(2, 9), st.integers(2, 9))
def test_backends_with_one_address_have_equal_shares(addresses, ports):
    ends = [f"10.0.0.{n}:{80 + port}" for n in range(addresses) for port in range(ports)]
    found = Counter(compute_slots(backends(" ".join(ends)), Spread(MAGLEV)))
    assert len(found) == addresses * ports
    assert max(found.values()) - min(found.values()) <= 1


@pytest.mark.parametrize(
    ("count", "spread", "fitting"),
    [
        (100_000, EVEN_SPREAD, True),
        (2621, Spread(MAGLEV), True),
        (2622, Spread(MAGLEV), False),
        (2622, weighted(*range(1, 2623)), False),
    ],
)
def test_weighted_and_maglev_tables_fit_up_to_2621_backends(count, spread, fitting):
    assert fits_table(count, spread) is fitting


def test_no_table_has_more_slots_than_the_limit():
    weights = tuple(range(1, 2622))
    assert count_slots(2621, weighted(*weights)) <= MAX_TABLE_SLOTS + 2621
    assert count_slots(2621, Spread(MAGLEV, weights)) <= MAX_TABLE_SLOTS


def test_the_sizes_are_primes():
    assert all(size % d for size in MAGLEV_TABLE_SIZES for d in range(2, int(size**0.5) + 1))


def test_one_backend_needs_no_table():
    assert compute_slots(many(1), Spread(MAGLEV)) == (0,)
    assert compute_slots((), Spread(MAGLEV)) == ()


COUNTS: Final = st.integers(2, 45)
PLACES: Final = st.integers(0, 60_000)


@given(WEIGHTS.filter(lambda w: len(w) > 1), PLACES)
def test_maglev_shares_follow_the_weights(weights, start):
    count = len(weights)
    found = Counter(compute_slots(many(count, start), Spread(MAGLEV, weights)))
    size = maglev_table_size(count, weighted=True)
    assert sum(found.values()) == size
    for index, weight in enumerate(weights):
        exact = size * weight / sum(weights)
        assert found[index] >= 1
        assert abs(found[index] - exact) <= 1 + 0.01 * exact


@given(COUNTS, PLACES, st.randoms(use_true_random=False), st.booleans())
def test_maglev_table_of_backends_in_any_order_is_that_of_the_paper(count, start, random, with_weights):
    """Compared with a model that lists every permutation in full. So few slots move when a backend is removed, as the
    paper measured.
    """
    plain = many(count, start)
    weights = {one: 1 + i % 7 for i, one in enumerate(plain)} if with_weights else {}
    named = [(one.address, one.port, int(one.protocol)) for one in plain]
    expected = [plain[i] for i in oracle.maglev(named, list(weights.values()), 251)]
    for order in (plain, tuple(random.sample(plain, count))):
        table = compute_maglev_table(order, [weights[one] for one in order if weights], 251)
        assert [order[i] for i in table] == expected


@given(st.integers(0, 300), WEIGHTS, st.sampled_from(Algorithm))
def test_count_slots_equals_the_length_of_the_table(count, weights, algorithm):
    for number, spread in ((count, Spread(algorithm)), (len(weights), Spread(algorithm, weights))):
        assert count_slots(number, spread) == len(compute_slots(many(number), spread))


def test_more_backends_than_the_largest_maglev_table_are_spread_randomly(monkeypatch):
    monkeypatch.setattr("kbpf.policy.spread.MAGLEV_TABLE_SIZES", (5,))
    assert compute_slots(many(9), Spread(MAGLEV)) == tuple(range(9))
    assert count_slots(9, Spread(MAGLEV)) == 9
