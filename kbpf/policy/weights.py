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


class Weighed(NamedTuple):
    """Who of a set gets connections, and how much each: as in Spread.weights."""

    backends: BackendSet
    weights: tuple[int, ...] = ()


def weigher(weights: Weights) -> Callable[[Addr, str, str, str], int]:
    """A function of address, Pod, node and zone: the weight of that endpoint."""
    by_address, by_pod = dict(weights.addresses), dict(weights.pods)
    by_node, by_zone = dict(weights.nodes), dict(weights.zones)
    others = weights.others

    def weight(address: Addr, pod: str, node: str, zone: str) -> int:
        found = by_address.get(address)
        for rules, name in ((by_pod, pod), (by_node, node), (by_zone, zone)):
            if found is None:
                found = rules.get(name)
        return others if found is None else found

    return weight


def weigh(backends: BackendSet, weights: Mapping[Backend, int]) -> Weighed:
    """The backends with more than nothing. Their weights have no common divisor, and are () where
    all are equal.
    """
    each = [weights[backend] for backend in backends]
    if not any(each):
        return Weighed(backends)
    if not all(each):
        backends = tuple(backend for backend in backends if weights[backend])
        each = [weight for weight in each if weight]
    if min(each) == max(each):
        return Weighed(backends)
    common = gcd(*each)
    return Weighed(backends, tuple(weight // common for weight in each))
