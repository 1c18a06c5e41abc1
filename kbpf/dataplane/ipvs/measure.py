"""What IPVS counts, for metrics: connections begun and bytes, of each virtual service.

The kernel counts from the making of a virtual service on, in whatever agent's time. Any thread may
ask: it has a conversation of its own, in the network namespace of the thread.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final

from kbpf.dataplane.ipvs.plan import NODE, Programmed, Virtual
from kbpf.errors import KernelError
from kbpf.kernel.ipvs import Ipvs
from kbpf.model.desired import ServicePortKey
from kbpf.model.measures import Measures, PortName, Totals
from kbpf.model.objects import Protocol

SHARE: Final = 0.005
"""Of a processor's time: nothing is counted again before it has cost no more."""


class Meter:
    """Reads the counters. One thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = 0.0
        self._totals: tuple[tuple[PortName, Totals], ...] = ()

    def read(self, programmed: Mapping[ServicePortKey, Programmed]) -> Measures:
        """By Service port; what it was the last time, if it is too early to count again."""
        if self._clock() >= self._due:
            start = time.thread_time()
            with contextlib.suppress(KernelError):
                self._totals = _totals(programmed)
            self._due = self._clock() + (time.thread_time() - start) / SHARE
        return Measures(connections=None, totals=self._totals)


def _totals(programmed: Mapping[ServicePortKey, Programmed]) -> tuple[tuple[PortName, Totals], ...]:
    owners = {
        tuple(virtual): (key.namespace, key.name, key.port, key.protocol.name)
        for key, made in programmed.items()
        if key != NODE
        for virtual in made.pools
    }
    found: dict[PortName, Totals] = {}
    with contextlib.closing(Ipvs()) as face:
        for service, counts in face.counts():
            if service.protocol not in Protocol.__members__.values():
                continue
            name = owners.get(tuple(Virtual(Protocol(service.protocol), *service[1:])))
            if name is not None and counts.connections:
                before = found.get(name, Totals(0, 0, 0))
                found[name] = Totals(*map(sum, zip(before, counts, strict=True)))
    return tuple(found.items())
