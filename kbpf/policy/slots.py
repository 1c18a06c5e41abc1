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

from kbpf.model.desired import EVENLY, Backend, Spread
from kbpf.model.objects import Algorithm

PRIMES: Final = (251, 1021, 4093, 16381, 65521)
"""The sizes of Maglev tables: up to 10 backends, 40, 163, 655 and 2620. When a set grows
out of its size, the next table is another one altogether: all but 1/n of the flows choose anew. So
the sizes are few.
"""

MOST_SLOTS: Final = 65_536
"""Slots of one table at most. A table of this size takes a tenth of a second to compute and 4 MB of
kernel memory; Services with more backends than fit are spread evenly at random, see fits()."""

SLOTS_EACH: Final = 25
"""At least so many slots of a Maglev table for each backend, and four times as many where there
are weights and room. Shares differ by one slot, so by 4 % of a share at most, and by 1 % with the
largest set of a size. When one of n backends leaves, 1 to 6 % of all flows move beside its own (as
measured; 8 % at most)."""

EXACT_SLOTS: Final = 1024
"""Weights that need more slots than this, and than SCALED_SLOTS_EACH a backend, are rounded."""

SCALED_SLOTS_EACH: Final = 32

STEP: Final = 1_024
"""Slots of a Maglev table that are probed at a time, about: one millisecond."""


def fits(backends: int, spread: Spread) -> bool:
    """Whether a table of MOST_SLOTS has at least SLOTS_EACH for each of so many backends. Beyond
    that neither Maglev nor weights can be had."""
    return spread == EVENLY or SLOTS_EACH * backends <= MOST_SLOTS


def slots(backends: Sequence[Backend], spread: Spread = EVENLY) -> tuple[int, ...]:
    """Indexes into `backends`: the whole of what a set's slots hold.

    Random without weights: one slot each. Random with weights: as many as the weight, or in that
    proportion. Maglev: a table whose size is one of PRIMES, but one slot for a single backend.
    Raises ValueError unless there is one weight of 1 or more for each backend, or none at all.
    """
    weights = spread.weights
    if weights and (len(weights) != len(backends) or min(weights) < 1):
        raise ValueError(f"{len(backends)} backends cannot have the weights {weights!r}")
    size = table_size(len(backends), bool(weights))
    if spread.algorithm is Algorithm.MAGLEV and size > len(backends):
        return maglev(backends, weights, size)
    return tuple(
        index for index, count in enumerate(_counts(weights, len(backends))) for _ in range(count)
    )


def slot_count(backends: int, spread: Spread = EVENLY) -> int:
    """How many slots() there are, without making them."""
    size = table_size(backends, bool(spread.weights))
    if spread.algorithm is Algorithm.MAGLEV and size > backends:
        return size
    return sum(_counts(spread.weights, backends)) if spread.weights else backends


def table_size(backends: int, weighted: bool = False) -> int:
    """The slots of a Maglev table for so many backends: 0 or 1 for none or one, and no more than
    the last of PRIMES for ever so many.
    """
    if backends < 2:
        return backends
    wanted = SLOTS_EACH * backends * (4 if weighted else 1)
    return PRIMES[min(bisect_left(PRIMES, wanted), len(PRIMES) - 1)]


def maglev(backends: Sequence[Backend], weights: Sequence[int], size: int) -> tuple[int, ...]:
    """The Maglev table: `size` (a prime) indexes into `backends`.

    Each backend has a preference list of all slots, a permutation that only depends on its address
    (and, of several backends with one address, on the order of their ports): so the ports of a
    Service with the same endpoints have the same table. They take turns, and each takes the first
    slot of its list that is free. With weights (one for each, or none at all) a backend's turn
    comes as often as its weight over the largest one says, as in Envoy's tables; every backend has
    a turn in the first round, so none is without a slot.
    """
    building = maglev_in_steps(backends, weights, size)
    while True:
        try:
            next(building)
        except StopIteration as done:
            return cast("tuple[int, ...]", done.value)


def maglev_in_steps(
    backends: Sequence[Backend], weights: Sequence[int], size: int
) -> Generator[None, None, tuple[int, ...]]:
    """maglev(), interrupted after about STEP probes each time: the fuller the table, the more of
    them it takes to find a free slot.
    """
    order = sorted(range(len(backends)), key=backends.__getitem__)
    seen: Counter[bytes] = Counter()
    place, step = [], []
    for index in order:
        address = backends[index].address
        first, skip = _preferences(address, seen[address], size)
        seen[address] += 1
        place.append(first)
        step.append(skip)
    turns = _turns([weights[i] for i in order] if weights else (), len(order))
    table = [-1] * size
    left = size
    while left:
        count = max(1, min(left, STEP * left // size))
        for turn in islice(turns, count):
            at, skip = place[turn], step[turn]
            while table[at] >= 0:
                at += skip
                if at >= size:
                    at -= size
            table[at] = order[turn]
            place[turn] = at
        left -= count
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
        _, index, taken = rounds[0]
        yield index
        due = -(-(taken + 1) * largest // weights[index])
        heapq.heapreplace(rounds, (due, index, taken + 1))


def _counts(weights: Sequence[int], backends: int) -> Sequence[int]:
    """How many slots of random choice each backend has; at least one.

    Small weights are kept exactly. Those that need more than a bounded number of slots share that
    number by largest remainder: no share is off by more than one slot, but for those that would
    have none.
    """
    if not weights:
        return (1,) * backends
    common = gcd(*weights)
    most = min(MOST_SLOTS, max(EXACT_SLOTS, SCALED_SLOTS_EACH * backends))
    total = sum(weights) // common
    if total <= most:
        return [weight // common for weight in weights]
    whole = sum(weights)
    counts = [max(1, weight * most // whole) for weight in weights]
    rounded = [i for i in range(backends) if weights[i] * most >= whole]  # the rest has one
    by_remainder = sorted(rounded, key=lambda i: (-(weights[i] * most % whole), i))
    for index in by_remainder[: max(0, most - sum(counts))]:
        counts[index] += 1
    return counts
