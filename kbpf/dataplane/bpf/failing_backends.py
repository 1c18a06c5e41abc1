# SPDX-License-Identifier: Apache-2.0
"""Finds backends that keep failing: in two consecutive intervals hardly a connection succeeded.

The map `failures` says which backends have failed lately; it is bounded (4,096 entries), and nearly
empty while nothing fails. Only for these the counters are looked up in `counts`. So a call takes
less than a millisecond while nothing fails, and 30 ms with a full map, however many backends there
are.

With the agent's interval of 30 s, a backend is found after one to one and a half minutes. A Pod
that has crashed has left its Service by then: kubelet's default readiness probe takes 30 s.
"""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import (
    COUNTS,
    EVENT,
    FAILURE,
    MAPS,
    SERVICE_NAME,
    U32,
    U32_PAIR,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.udp import unpack_backend
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.model.metrics import ConnectionStats, FailingBackend, PortName
from kbpf.model.objects import Protocol
from kbpf.model.reasons import Reason

MIN_FAILURES: Final = 5
"""Failures in each of the two intervals. Fewer may be a client that is misconfigured itself, or a
restart."""
MIN_FAILED_SHARE: Final = 0.9
"""Of the connections of each interval. Not all: some of those that began in it have not failed
yet."""
REASONS: Final = frozenset((Reason.BACKEND_REFUSED, Reason.BACKEND_UNANSWERED))
"""A reset is none of them: the backend has accepted the connection, and some servers end each
like that."""
IdPair = tuple[int, int]


class _Interval(NamedTuple):
    """The totals of a backend at the end of an interval; and of the intervals until then in which
    it has failed, their number, failures and connections, and when the first one began.
    """

    totals: ConnectionStats
    repeats: int
    failed: int
    opened: int
    since: float


class FailingBackends:
    """Used by one thread."""

    def __init__(self, pins: Pins, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: CLOCK_MONOTONIC, which the programs use too."""
        self._pins, self._clock = pins, clock
        self._last_call = clock()
        self._intervals: dict[IdPair, _Interval] = {}

    def find(self) -> tuple[FailingBackend, ...] | None:
        """See SharedAccess.find_failing_backends()."""
        try:
            with (
                self._open("failures") as failures,
                self._open("counts") as counts,
                self._open("backends") as backends,
                self._open("service_names") as names,
            ):
                now = self._clock()
                self._update(failures, counts, now)
                self._last_call = now
                return tuple(
                    FailingBackend(
                        name, str(unpack_backend(raw)), interval.failed, interval.opened,
                        now - interval.since,
                    )
                    for (service, backend), interval in self._intervals.items()
                    if interval.repeats >= 2
                    and (raw := backends.lookup(U32.pack(backend)))
                    and (name := _read_name(names, service))
                )  # fmt: skip
        except KernelError:
            return None

    def _open(self, name: str) -> Map:
        return pinning.open_map(self._pins.maps / name, MAPS[name])

    def _update(self, failures: Map, counts: Map, now: float) -> None:
        """Replaces the intervals by those of the backends that have failed since the last call."""
        since_ns = int(self._last_call * 1e9)
        events = (EVENT.unpack(FAILURE.unpack(raw)[2]) for _, raw in failures.items())
        pairs = {
            (service, backend)
            for last, _, _, _, _, service, backend, reason in events
            if last >= since_ns and backend and reason in REASONS
        }
        intervals: dict[IdPair, _Interval] = {}
        for pair in pairs:
            raw = counts.lookup(U32_PAIR.pack(*pair))
            if raw is not None:
                totals = ConnectionStats(*COUNTS.unpack(raw))
                intervals[pair] = self._advance(self._intervals.get(pair), totals, now)
        self._intervals = intervals

    def _advance(self, before: _Interval | None, totals: ConnectionStats, now: float) -> _Interval:
        if before is None:  # the interval so far has no beginning
            return _Interval(totals, 0, 0, 0, now)
        opened = totals.opened - before.totals.opened
        failed = _count_failed(totals) - _count_failed(before.totals)
        if failed < MIN_FAILURES or failed < MIN_FAILED_SHARE * opened:
            return _Interval(totals, 0, 0, 0, now)
        return _Interval(
            totals, before.repeats + 1, before.failed + failed, before.opened + opened, before.since
        )


def _count_failed(totals: ConnectionStats) -> int:
    return totals.refused + totals.unanswered


def _read_name(names: Map, service: int) -> PortName | None:
    raw = names.lookup(U32.pack(service))
    if raw is None:
        return None
    *texts, protocol, _ = SERVICE_NAME.unpack(raw)
    namespace, name, port = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    return namespace, name, port, Protocol(protocol).name
