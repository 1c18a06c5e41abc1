# SPDX-License-Identifier: Apache-2.0
"""Applies weights: how much of a Service's connections each backend of a set gets.

Rules:
- The most specific rule for an endpoint applies: its address, Pod, node, zone, then the default.
- Weight 0 means no new connections: the backend is in no set, but keeps its existing connections.
- If all backends of a set have weight 0, weights are ignored: a mistake must not take a Service
  down.
"""

from collections.abc import Callable, Mapping
from math import gcd
from typing import NamedTuple

from kbpf.model.address import Addr
from kbpf.model.desired import Backend, BackendSet
from kbpf.model.objects import Weights


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
