"""The slots of a backend set: every way to spread connections is an index into them.

A backend's share is its part of the slots, so a uniformly random slot is a weighted choice. A
Maglev table (Eisenbud et al., NSDI 2016, section 3.4) is the same, in an order that hardly changes
when a backend comes or goes: who chooses by a hash of the flow mostly chooses as before, and as
every other node that has the same backends.

Rules kept here:
- The same backends give the same slots on every node, in every version of Python, in whatever
  order they stand. Backends turn to numbers by BLAKE2b, never by hash().
- A table is no larger than it has to be: slots are the largest map, and each costs the kernel
  some 64 bytes.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from hashlib import blake2b
from itertools import cycle, islice
from math import gcd
from typing import Final, cast

from kbpf.model.desired import EVEN_SPREAD, Backend, Spread
from kbpf.model.objects import Algorithm

MAGLEV_TABLE_SIZES: Final = (251, 1021, 4093, 16381, 65521)
"""The sizes of Maglev tables: up to 10 backends, 40, 163, 655 and 2620. When a set grows
out of its size, the next table is another one altogether: all but 1/n of the flows choose anew. So
the sizes are few.
"""

MAX_TABLE_SLOTS: Final = 65_536
"""Slots of one table at most. A table of this size takes a tenth of a second to compute and 4 MB of
kernel memory; Services with more backends than fit are spread evenly at random, see fits()."""

MIN_SLOTS_PER_BACKEND: Final = 25
"""At least so many slots of a Maglev table for each backend, and four times as many where there
are weights and room. Shares differ by one slot, so by 4 % of a share at most, and by 1 % with the
largest set of a size. When one of n backends leaves, 1 to 6 % of all flows move beside its own (as
measured; 8 % at most)."""

MAX_EXACT_SLOTS: Final = 1024
"""Weights that need more slots than this, and than SCALED_SLOTS_EACH a backend, are rounded."""

SCALED_SLOTS_PER_BACKEND: Final = 32

PROBES_PER_STEP: Final = 1_024
"""Slots of a Maglev table that are probed at a time, about: one millisecond."""


def fits_table(backends: int, spread: Spread) -> bool:
    """Whether a table of MOST_SLOTS has at least SLOTS_EACH for each of so many backends. Beyond
    that neither Maglev nor weights can be had."""
    return spread == EVEN_SPREAD or MIN_SLOTS_PER_BACKEND * backends <= MAX_TABLE_SLOTS


def compute_slots(backends: Sequence[Backend], spread: Spread = EVEN_SPREAD) -> tuple[int, ...]:
    """Indexes into `backends`: the whole of what a set's slots hold.

    Random without weights: one slot each. Random with weights: as many as the weight, or in that
    proportion. Maglev: a table whose size is one of PRIMES, but one slot for a single backend.
    Raises ValueError unless there is one weight of 1 or more for each backend, or none at all.
    """
    weights = spread.weights
    if weights and (len(weights) != len(backends) or min(weights) < 1):
        raise ValueError(f"{len(backends)} backends cannot have the weights {weights!r}")
    size = maglev_table_size(len(backends), bool(weights))
    if spread.algorithm is Algorithm.MAGLEV and size > len(backends):
        return compute_maglev_table(backends, weights, size)
    return tuple(
        index
        for index, count in enumerate(_slot_counts(weights, len(backends)))
        for _ in range(count)
    )


def count_slots(backends: int, spread: Spread = EVEN_SPREAD) -> int:
    """How many slots() there are, without making them."""
    size = maglev_table_size(backends, bool(spread.weights))
    if spread.algorithm is Algorithm.MAGLEV and size > backends:
        return size
    return sum(_slot_counts(spread.weights, backends)) if spread.weights else backends


def maglev_table_size(backends: int, weighted: bool = False) -> int:
    """The slots of a Maglev table for so many backends: 0 or 1 for none or one, and no more than
    the last of PRIMES for ever so many.
    """
    if backends < 2:
        return backends
    min_size = MIN_SLOTS_PER_BACKEND * backends * (4 if weighted else 1)
    return MAGLEV_TABLE_SIZES[
        min(bisect_left(MAGLEV_TABLE_SIZES, min_size), len(MAGLEV_TABLE_SIZES) - 1)
    ]


def compute_maglev_table(
    backends: Sequence[Backend], weights: Sequence[int], size: int
) -> tuple[int, ...]:
    """The Maglev table: `size` (a prime) indexes into `backends`.

    Each backend has a preference list of all slots, a permutation that only depends on its address
    (and, of several backends with one address, on the order of their ports): so the ports of a
    Service with the same endpoints have the same table. They take turns, and each takes the first
    slot of its list that is free. With weights (one for each, or none at all) a backend's turn
    comes as often as its weight over the largest one says, as in Envoy's tables; every backend has
    a turn in the first round, so none is without a slot.
    """
    steps = compute_maglev_table_in_steps(backends, weights, size)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return cast("tuple[int, ...]", stop.value)


def compute_maglev_table_in_steps(
    backends: Sequence[Backend], weights: Sequence[int], size: int
) -> Generator[None, None, tuple[int, ...]]:
    """maglev(), interrupted after about STEP probes each time: the fuller the table, the more of
    them it takes to find a free slot.
    """
    order = sorted(range(len(backends)), key=backends.__getitem__)
    address_counts: Counter[bytes] = Counter()
    positions, strides = [], []
    for index in order:
        address = backends[index].address
        start, stride = _preferences(address, address_counts[address], size)
        address_counts[address] += 1
        positions.append(start)
        strides.append(stride)
    turns = _turns([weights[i] for i in order] if weights else (), len(order))
    table = [-1] * size
    remaining = size
    while remaining:
        count = max(1, min(remaining, PROBES_PER_STEP * remaining // size))
        for turn in islice(turns, count):
            position, stride = positions[turn], strides[turn]
            while table[position] >= 0:
                position += stride
                if position >= size:
                    position -= size
            table[position] = order[turn]
            positions[turn] = position
        remaining -= count
        yield
    return tuple(table)


def _preferences(address: bytes, number: int, size: int) -> tuple[int, int]:
    """The first slot of a backend's list, and the step from each to the next. `number`: how many
    backends of this address come before it."""
    key = address + number.to_bytes(2)
    digest = blake2b(key, digest_size=16, person=b"kbpf maglev").digest()
    return int.from_bytes(digest[:8]) % size, int.from_bytes(digest[8:]) % (size - 1) + 1


def _turns(weights: Sequence[int], backends: int) -> Iterator[int]:
    """Whose turn it is, for ever. Turn k (from 0) of a backend is in round k·largest/weight."""
    if not weights:
        yield from cycle(range(backends))
    largest = max(weights)
    rounds = [(0, index, 0) for index in range(backends)]
    while True:
        _, index, turn = rounds[0]
        yield index
        next_round = -(-(turn + 1) * largest // weights[index])
        heapq.heapreplace(rounds, (next_round, index, turn + 1))


def _slot_counts(weights: Sequence[int], backends: int) -> Sequence[int]:
    """How many slots of random choice each backend has; at least one.

    Small weights are kept exactly. Those that need more than a bounded number of slots share that
    number by largest remainder: no share is off by more than one slot, but for those that would
    have none.
    """
    if not weights:
        return (1,) * backends
    divisor = gcd(*weights)
    max_slots = min(MAX_TABLE_SLOTS, max(MAX_EXACT_SLOTS, SCALED_SLOTS_PER_BACKEND * backends))
    exact_slots = sum(weights) // divisor
    if exact_slots <= max_slots:
        return [weight // divisor for weight in weights]
    total_weight = sum(weights)
    counts = [max(1, weight * max_slots // total_weight) for weight in weights]
    rounded = [
        i for i in range(backends) if weights[i] * max_slots >= total_weight
    ]  # the rest has one
    by_remainder = sorted(rounded, key=lambda i: (-(weights[i] * max_slots % total_weight), i))
    for index in by_remainder[: max(0, max_slots - sum(counts))]:
        counts[index] += 1
    return counts
