# SPDX-License-Identifier: Apache-2.0
"""Finds backends that keep failing: in two consecutive intervals hardly a connection succeeded.

The map `failures` says which backends have failed lately; it is bounded (4,096 entries), and nearly
empty while nothing fails. Only for these the counters are looked up in `counts`. So a call takes
less than a millisecond while nothing fails, and 30 ms with a full map, however many backends there
are; naming the clients of those that fail walks the cgroups.

With the agent's interval of 30 s, a backend is found after one to one and a half minutes. A Pod
that has crashed has left its Service by then: kubelet's default readiness probe takes 30 s.

A client can make its own connections fail, without any right: with a TTL of 1, its SYNs expire
before they reach the backend; and with CAP_NET_RAW it sends its socket resets and ICMP errors that
seem to be the backend's. The kernel's tracepoints (bpf/trace.h) do not tell where these came from.
So what one tenant may have caused does not count: see count_independent(). Clients by packets do
not count at all, since anybody can send them with any source address.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.layout import COUNTS, EVENT, FAILURE, U32, U32_PAIR, unpack_port_name
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.state.contents import unpack_backend
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts, pods
from kbpf.model.metrics import ConnectionStats, FailingBackend
from kbpf.model.reasons import Reason

MIN_FAILURES: Final = 5
"""Failures in each of the two intervals. Fewer may be a client that is misconfigured itself, or a
restart."""
MIN_FAILED_SHARE: Final = 0.9
"""Of the connections of each interval. Not all: some of those that began in it have not failed
yet."""
MIN_CLIENTS: Final = 2
MIN_CLIENT_FAILURES: Final = 3
"""Independent clients, and how often each of them has failed in the last two intervals. Otherwise
one tenant's many failures would do, together with a failure that any busy client has at times."""
REASONS: Final = frozenset(reason for reason in Reason if reason.seen.blames_backend)
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
        # When the last two calls were, and the counts in `failures` then.
        self._calls = deque([(clock(), dict[bytes, int]())] * 2, maxlen=2)
        self._intervals: dict[IdPair, _Interval] = {}
        # How often clients have failed since the first of these, by cgroup.
        self._clients: dict[IdPair, Counter[int]] = {}

    def find(self) -> tuple[FailingBackend, ...] | None:
        """See SharedAccess.find_failing_backends()."""
        try:
            with (
                self._pins.open_map("failures") as failures,
                self._pins.open_map("counts") as counts,
                self._pins.open_map("backends") as backends,
                self._pins.open_map("service_names") as names,
            ):
                now = self._clock()
                self._update(failures, counts, now)
                candidates = [pair for pair, interval in self._intervals.items() if interval.repeats >= 2]
                clients = self._name_clients(candidates)
                return tuple(
                    FailingBackend(
                        name, str(unpack_backend(raw)), interval.failed, interval.opened, now - interval.since
                    )
                    for pair in candidates
                    if (interval := self._intervals[pair])
                    and (raw := backends.lookup(U32.pack(pair[1])))
                    and (raw_name := names.lookup(U32.pack(pair[0])))
                    and (name := unpack_port_name(raw_name))
                    and count_independent(clients[pair], name[0]) >= MIN_CLIENTS
                )
        except KernelError:
            return None

    def _name_clients(self, pairs: Iterable[IdPair]) -> dict[IdPair, list[tuple[str, int]]]:
        """See count_independent(). Cgroups that are gone are left out: they may have been
        anybody's.
        """
        cgroups = mounts.find_cgroups({id_ for pair in pairs for id_ in self._clients[pair]})
        names = dict.fromkeys(cgroups, "") | pods.name_pods(cgroups)
        return {pair: [(names[id_], n) for id_, n in self._clients[pair].items() if id_ in names] for pair in pairs}

    def _update(self, failures: Map, counts: Map, now: float) -> None:
        """Replaces the intervals by those of the backends that have failed since the last call."""
        (earlier, earlier_counts), (previous, _) = self._calls
        counts_now, pairs = dict[bytes, int](), set[IdPair]()
        self._clients = defaultdict(Counter)
        for key, raw_failure in failures.items():
            _, count, raw_event = FAILURE.unpack(raw_failure)
            last, cgroup, _, _, _, service, backend, reason = EVENT.unpack(raw_event)
            if not backend or reason not in REASONS:
                continue
            counts_now[key] = count
            added = count - earlier_counts.get(key, 0)
            if cgroup and last >= int(earlier * 1e9):
                self._clients[service, backend][cgroup] += added if added > 0 else count
            if last >= int(previous * 1e9):
                pairs.add((service, backend))
        self._calls.append((now, counts_now))
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
        return _Interval(totals, before.repeats + 1, before.failed + failed, before.opened + opened, before.since)


def count_independent(failed: Iterable[tuple[str, int]], namespace: str) -> int:
    """How many independent clients of a Service in `namespace` have failed often enough: each Pod
    of the Service's own namespace is one, all Pods of another are one, and so are the node's
    processes. `failed`: how often which client has failed: ``namespace/name`` of a Pod, ``uid UID``
    of one without a known name, or "" for the node.
    """
    counts: Counter[str] = Counter()
    for client, count in failed:
        owner = client.rpartition("/")[0]
        counts[client if owner in ("", namespace) else owner] += count
    return sum(count >= MIN_CLIENT_FAILURES for count in counts.values())


def _count_failed(totals: ConnectionStats) -> int:
    return totals.refused + totals.unanswered
