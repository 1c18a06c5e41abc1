"""How much of a Service's connections each backend of a set gets.

Rules kept here:
- Of the rules that fit an endpoint the most specific one counts: its address, its Pod, its node,
  its zone, then what is for all others.
- Weight 0 means no new connections: such a backend is in no set, but serves on who it has.
- A set in which all have weight 0 is used as if nobody had a weight: a slip of the pen must not
  take a Service down.
"""

from collections.abc import Callable, Mapping
from math import gcd
from typing import NamedTuple

from kbpf.model.address import Addr
from kbpf.model.desired import Backend, BackendSet
from kbpf.model.objects import Weights


class WeightedBackends(NamedTuple):
    """Who of a set gets connections, and how much each: as in Spread.weights."""

    backends: BackendSet
    weights: tuple[int, ...] = ()


def make_weight_lookup(weights: Weights) -> Callable[[Addr, str, str, str], int]:
    """A function of address, Pod, node and zone: the weight of that endpoint."""
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
    """The backends with more than nothing. Their weights have no common divisor, and are () where
    all are equal.
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
