# SPDX-License-Identifier: Apache-2.0
"""How connections are spread over the backends of a set: applies weights, and computes the slots, the
list of backends that every algorithm indexes into.

A backend's share of the connections is its share of the slots, so a uniformly random slot is a
weighted choice. A Maglev table (Eisenbud et al., NSDI 2016, section 3.4) is such a list too, in an
order that hardly changes when a backend is added or removed: choosing by a hash of the flow mostly
gives the same backend as before, and the same one on every node with the same backends.

Rules:
- The most specific rule for an endpoint gives its weight: its address, Pod, node, zone, then the
  default.
- Weight 0 means no new connections: the backend is in no set, but keeps its existing connections.
- If all backends of a set have weight 0, weights are ignored: a mistake must not take a Service
  down.
- The same backends give the same slots on every node, in every version of Python and in any order
  of input. Backends are hashed with BLAKE2b, never with hash().
- A table is no larger than necessary: slots are the largest map, and each costs about 64 bytes of
  kernel memory.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import cycle, islice
from math import gcd
from typing import Final, NamedTuple, cast

from kbpf.model.address import Addr
from kbpf.model.desired import EVEN_SPREAD, Backend, BackendSet, Spread
from kbpf.model.objects import Algorithm, Weights


class WeightedBackends(NamedTuple):
    """The backends of a set that get connections, and their weights as in Spread.weights."""

    backends: BackendSet
    weights: tuple[int, ...] = ()


def make_weight_lookup(weights: Weights) -> Callable[[Addr, str, str, str], int]:
    """Returns a function (address, Pod, node, zone) → weight of that endpoint."""
    by_address, by_pod = dict(weights.addresses), dict(weights.pods)
    by_node, by_zone = dict(weights.nodes), dict(weights.zones)
    default = weights.default

    def weight_of(address: Addr, pod: str, node: str, zone: str) -> int:
        result = by_address.get(address)
        for rules, name in ((by_pod, pod), (by_node, node), (by_zone, zone)):
            if result is None:
                result = rules.get(name)
        return default if result is None else result

    return weight_of


def apply_weights(backends: BackendSet, weights: Mapping[Backend, int]) -> WeightedBackends:
    """Returns the backends with a weight above 0. Their weights have no common divisor; () if all
    are equal.
    """
    values = [weights[backend] for backend in backends]
    if not any(values):
        return WeightedBackends(backends)
    if not all(values):
        backends = tuple(backend for backend in backends if weights[backend])
        values = [weight for weight in values if weight]
    if min(values) == max(values):
        return WeightedBackends(backends)
    divisor = gcd(*values)
    return WeightedBackends(backends, tuple(weight // divisor for weight in values))


# ---- slots ---------------------------------------------------------------------------------------

MAGLEV_TABLE_SIZES: Final = (251, 1021, 4093, 16381, 65521)
"""Sizes of Maglev tables: for up to 10, 40, 163, 655 and 2621 backends. Tables of different sizes
have nothing in common: when a set outgrows its size, all but 1/n of the flows get another backend.
So there are only a few sizes.
"""

MAX_TABLE_SLOTS: Final = 65_536
"""The limit for every algorithm; the largest Maglev table has 65,521 slots, since its size is a
prime. Such a table takes a tenth of a second to compute and 4 MB of kernel memory. Services with
more backends than fit are spread evenly at random, see fits_table().
"""

MIN_SLOTS_PER_BACKEND: Final = 25
"""Minimum number of slots for each backend in a Maglev table; with weights four times as many, if
the largest table allows. Shares differ by at most one slot: 4 % of a share, or 1 % of the average
share with weights. When one of n backends is removed, 1 to 6 % of the other backends' flows move
too (measured; 8 % at most).
"""

MAX_EXACT_SLOTS: Final = 1024
"""Weights are rounded if they need more slots than this and more than SCALED_SLOTS_PER_BACKEND for
each backend.
"""

SCALED_SLOTS_PER_BACKEND: Final = 32

PROBES_PER_STEP: Final = 1_024
"""Slots of a Maglev table that are probed in one step: about one millisecond of work."""


def fits_table(backends: int, spread: Spread) -> bool:
    """Whether MAX_TABLE_SLOTS has MIN_SLOTS_PER_BACKEND for each backend. If not (more than 2621),
    neither Maglev nor weights are possible. One limit serves both: in the largest Maglev table four
    of 2621 backends have one slot less.
    """
    return spread == EVEN_SPREAD or MIN_SLOTS_PER_BACKEND * backends <= MAX_TABLE_SLOTS


def compute_slots(backends: Sequence[Backend], spread: Spread = EVEN_SPREAD) -> tuple[int, ...]:
    """Returns indexes into `backends`: the contents of a set's slots.

    Random without weights: one slot for each backend. Random with weights: as many as the weight,
    or in proportion to it. Maglev: a table of one of MAGLEV_TABLE_SIZES, or one slot for a single
    backend. Raises ValueError unless `weights` is empty or has one weight of at least 1 for each
    backend.
    """
    weights = spread.weights
    if weights and (len(weights) != len(backends) or min(weights) < 1):
        raise ValueError(f"{len(backends)} backends cannot have the weights {weights!r}")
    size = maglev_table_size(len(backends), bool(weights))
    if spread.algorithm is Algorithm.MAGLEV and size > len(backends):
        return compute_maglev_table(backends, weights, size)
    return tuple(index for index, count in enumerate(_slot_counts(weights, len(backends))) for _ in range(count))


def count_slots(backends: int, spread: Spread) -> int:
    """Returns the length of compute_slots() without computing it."""
    size = maglev_table_size(backends, bool(spread.weights))
    if spread.algorithm is Algorithm.MAGLEV and size > backends:
        return size
    return sum(_slot_counts(spread.weights, backends)) if spread.weights else backends


def maglev_table_size(backends: int, weighted: bool = False) -> int:
    """The size of the Maglev table for this many backends; 0 and 1 backends need no table."""
    if backends < 2:
        return backends
    min_size = MIN_SLOTS_PER_BACKEND * backends * (4 if weighted else 1)
    return MAGLEV_TABLE_SIZES[min(bisect_left(MAGLEV_TABLE_SIZES, min_size), len(MAGLEV_TABLE_SIZES) - 1)]


def compute_maglev_table(backends: Sequence[Backend], weights: Sequence[int], size: int) -> tuple[int, ...]:
    """Computes the Maglev table: `size` (a prime) indexes into `backends`.

    Each backend has a preference list, a permutation of all slots that depends only on its address
    (and for several backends with one address, on the order of their ports). So the ports of a
    Service with the same endpoints have the same table. Backends take turns, and each takes the
    first free slot of its list. With weights (one for each backend, or none), a backend with
    weight w has w/max(weights) as many turns as the heaviest one, as in Envoy; every backend has a
    turn in the first round, so every backend gets a slot.
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
    """compute_maglev_table(), interrupted about every PROBES_PER_STEP probes. Finding a free slot
    takes more probes the fuller the table is.
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
        # Finding a free slot takes size / remaining probes on average.
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
    """Returns the first slot of a backend's preference list and its stride. `number`: how many
    backends with this address come before it.
    """
    key = address + number.to_bytes(2)
    # The size is prime, so every stride from 1 to size - 1 visits all slots.
    digest = blake2b(key, digest_size=16, person=b"kbpf maglev").digest()
    return int.from_bytes(digest[:8]) % size, int.from_bytes(digest[8:]) % (size - 1) + 1


def _turns(weights: Sequence[int], backends: int) -> Iterator[int]:
    """Yields the index of the backend whose turn is next, without end. A backend's turn k (from 0)
    is in round k·largest/weight.
    """
    if not weights:
        yield from cycle(range(backends))
    largest = max(weights)
    rounds = [(0, index, 0) for index in range(backends)]
    while True:
        _, index, turn = rounds[0]
        yield index
        next_round = -(-(turn + 1) * largest // weights[index])  # rounded up
        heapq.heapreplace(rounds, (next_round, index, turn + 1))


def _slot_counts(weights: Sequence[int], backends: int) -> Sequence[int]:
    """Returns the number of slots for each backend for random choice; at least one.

    Small weights are represented exactly. Weights that need more than `max_slots` slots share
    these by largest remainder: no share is off by more than one slot, except those that would have
    none.
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
    # Backends with a smaller share have one slot and take no part in the rounding.
    rounded = [i for i in range(backends) if weights[i] * max_slots >= total_weight]
    by_remainder = sorted(rounded, key=lambda i: (-(weights[i] * max_slots % total_weight), i))
    for index in by_remainder[: max(0, max_slots - sum(counts))]:
        counts[index] += 1
    return counts
