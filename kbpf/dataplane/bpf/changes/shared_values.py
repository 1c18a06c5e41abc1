# SPDX-License-Identifier: Apache-2.0
"""Values shared by frontends, each stored in a map while at least one frontend has it: ClusterIPs
in `cluster_ips`, ports in `frontend_ports`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Set
from typing import Final, Generic, TypeVar

from kbpf.dataplane.bpf.changes.plan import ProgrammedPort
from kbpf.dataplane.bpf.maps.layout import U32, U64
from kbpf.model.address import Addr
from kbpf.model.desired import FrontendKind

WORD_BITS: Final = 8 * U64.size
T = TypeVar("T", bound=Hashable)


def cluster_ips_of(programmed: ProgrammedPort) -> Iterator[Addr]:
    """The ClusterIP of each ClusterIP frontend, unless a device of the node has it: then its other
    ports are the node's, so they are not refused.
    """
    return (
        frontend.at.address
        for frontend in programmed.frontends
        if frontend.kind is FrontendKind.CLUSTER_IP and not frontend.on_device
    )


def ports_of(programmed: ProgrammedPort) -> Iterator[int]:
    """The port of each frontend."""
    return (f.at.port for f in programmed.frontends)


def pack_ports(ports: Set[int], changed: Iterable[int]) -> list[tuple[bytes, bytes]]:
    """The entries of `frontend_ports` that contain the `changed` ports. `ports`: all ports to be
    set.
    """
    return [
        (
            U32.pack(word_index),
            U64.pack(
                sum(1 << bit for bit in range(WORD_BITS) if word_index * WORD_BITS + bit in ports)
            ),
        )
        for word_index in sorted({port // WORD_BITS for port in changed})
    ]


def unpack_ports(entries: Iterable[tuple[bytes, bytes]]) -> Iterator[int]:
    """The ports whose bits are set in `frontend_ports`."""
    for key, value in entries:
        word = U64.unpack(value)[0]
        first = U32.unpack(key)[0] * WORD_BITS
        yield from (first + bit for bit in range(WORD_BITS) if word >> bit & 1)


class SharedValues(Generic[T]):
    """Counts the frontends of each value, and remembers which values the map holds."""

    def __init__(
        self,
        values: Callable[[ProgrammedPort], Iterable[T]],
        programmed_ports: Iterable[ProgrammedPort] = (),
        written: Iterable[T] = (),
    ) -> None:
        self._values = values
        self._counts = self._count(programmed_ports)
        self.written_values = set(written)

    def update(
        self, before: Iterable[ProgrammedPort], after: Iterable[ProgrammedPort], compare_all: bool
    ) -> tuple[set[T], set[T]]:
        """Returns the added and removed values when the Service ports `before` become those
        `after`. `compare_all`: the map may differ from `written_values`, so compare all values.
        """
        change = self._count(after)
        change.subtract(self._count(before))
        for value, count in change.items():
            self._counts[value] += count
            if not self._counts[value]:
                del self._counts[value]
        candidates: Collection[T] = (
            self._counts.keys() | self.written_values if compare_all else change
        )
        new = {
            candidate
            for candidate in candidates
            if candidate in self._counts and candidate not in self.written_values
        }
        removed = {
            candidate
            for candidate in candidates
            if candidate in self.written_values and candidate not in self._counts
        }
        return new, removed

    def record_written(self, new: set[T], removed: set[T]) -> None:
        """Records that these values were written to the map and removed from it."""
        self.written_values |= new
        self.written_values -= removed

    def _count(self, programmed_ports: Iterable[ProgrammedPort]) -> Counter[T]:
        return Counter(
            value for programmed in programmed_ports for value in self._values(programmed)
        )
