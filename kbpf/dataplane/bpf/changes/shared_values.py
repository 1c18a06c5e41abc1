"""Values that frontends share, each held in a map as long as one frontend has it: ClusterIPs in
`cluster_ips`, ports in `frontend_ports`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Set
from typing import Final, Generic, TypeVar

from kbpf.dataplane.bpf.changes.plan import Programmed
from kbpf.dataplane.bpf.maps.layout import U32, U64
from kbpf.model.address import Addr
from kbpf.model.desired import FrontendKind

WORD_BITS: Final = 8 * U64.size
T = TypeVar("T", bound=Hashable)


def cluster_ips_of(owner: Programmed) -> Iterator[Addr]:
    """The ClusterIP of each ClusterIP frontend."""
    return (f.at.address for f in owner.frontends if f.kind is FrontendKind.CLUSTER_IP)


def ports_of(owner: Programmed) -> Iterator[int]:
    """The port of each frontend."""
    return (f.at.port for f in owner.frontends)


def pack_ports(ports: Set[int], changed: Iterable[int]) -> list[tuple[bytes, bytes]]:
    """The words of `frontend_ports` that `changed` ports are in, when `ports` is what it holds."""
    return [
        (
            U32.pack(word),
            U64.pack(sum(1 << bit for bit in range(WORD_BITS) if word * WORD_BITS + bit in ports)),
        )
        for word in sorted({port // WORD_BITS for port in changed})
    ]


def unpack_ports(words: Iterable[tuple[bytes, bytes]]) -> Iterator[int]:
    """The ports whose bits are set in `frontend_ports`."""
    for key, value in words:
        bits = U64.unpack(value)[0]
        first = U32.unpack(key)[0] * WORD_BITS
        yield from (first + bit for bit in range(WORD_BITS) if bits >> bit & 1)


class Counted(Generic[T]):
    """How many frontends have each value, and which values the map holds."""

    def __init__(
        self,
        values: Callable[[Programmed], Iterable[T]],
        owners: Iterable[Programmed] = (),
        held: Iterable[T] = (),
    ) -> None:
        self._values = values
        self._counts = self._counted(owners)
        self.held = set(held)

    def change(
        self, before: Iterable[Programmed], after: Iterable[Programmed], everything: bool
    ) -> tuple[set[T], set[T]]:
        """The values that come and those that go when these Service ports become those.
        `everything`: what the map holds may be wrong, so all values are compared.
        """
        change = self._counted(after)
        change.subtract(self._counted(before))
        for value, count in change.items():
            self._counts[value] += count
            if not self._counts[value]:
                del self._counts[value]
        seen: Collection[T] = self._counts.keys() | self.held if everything else change
        new = {v for v in seen if v in self._counts and v not in self.held}
        gone = {v for v in seen if v in self.held and v not in self._counts}
        return new, gone

    def written(self, new: set[T], gone: set[T]) -> None:
        """The map has changed so."""
        self.held |= new
        self.held -= gone

    def _counted(self, owners: Iterable[Programmed]) -> Counter[T]:
        return Counter(value for owner in owners for value in self._values(owner))
