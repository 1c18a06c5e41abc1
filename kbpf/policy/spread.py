"""The slots of a backend set: every way to spread connections is an index into them."""

from collections.abc import Sequence
from math import gcd


def slots(backends: Sequence[object], weights: Sequence[int] | None = None) -> tuple[int, ...]:
    """Indexes into `backends`; a uniformly random slot is the choice that is meant.

    Without weights each backend has one slot. With weights (whole numbers, one per backend) each
    has as many slots as its weight, after division by what all weights have in common; weight 0
    gets none. Raises ValueError for negative weights or a wrong number of them.
    """
    if weights is None:
        return tuple(range(len(backends)))
    if len(weights) != len(backends) or min(weights, default=0) < 0:
        raise ValueError(f"{len(backends)} backends cannot have the weights {weights!r}")
    common = gcd(*weights) or 1
    return tuple(index for index, weight in enumerate(weights) for _ in range(weight // common))
