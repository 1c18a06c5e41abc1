# SPDX-License-Identifier: Apache-2.0
"""Reads metrics from the maps.

Any thread may call: the pinned maps are opened for each call, so nothing is shared with the writer,
which replaces maps as they grow. read() is cheap. count() walks the maps with connections (`flows`
of the packet path, `sock_peers` and `udp_flows` of the socket hooks) and `counts`, where the
programs add up traffic. This takes 120 ms for 100,000 connections, most of it in the kernel.

The traffic of removed backends stays with their Service, so that no sum ever decreases: count()
moves it to REMOVED_BACKENDS at intervals.
"""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from heapq import heapify, heappop, heappush
from itertools import chain
from operator import itemgetter
from typing import Final

from kbpf.dataplane.bpf.maps.flow_entries import IDLE_TIMEOUT_NS, is_needed, is_open, unpack_columns
from kbpf.dataplane.bpf.maps.layout import (
    CONFIG,
    COUNTS,
    MAPS,
    PEER,
    SELF_EVICTING_MAPS,
    U32,
    U32_PAIR,
    UDP_FLOW,
    UDP_FLOWS,
    ConfigFlag,
    FlowDirection,
    Target,
    unpack_latencies,
    unpack_port_name,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.programs.hook_config import counted_fields
from kbpf.dataplane.bpf.state.commit import ZERO
from kbpf.dataplane.bpf.state.quotas import CONTESTED_FILL, NAMESPACE_SHARE, SYSTEM_RESERVE
from kbpf.errors import KernelError
from kbpf.kernel.bpf import uapi
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import format_endpoint
from kbpf.model.config import Accounting, Config, is_system_service
from kbpf.model.fairness import take_turns
from kbpf.model.metrics import (
    BackendStats,
    ConnectionStats,
    DataPlaneMetrics,
    FlowCount,
    Pause,
    PortName,
    ReasonCount,
    ServiceLatencies,
    TableUsage,
    TrafficStats,
)
from kbpf.model.objects import ServiceName
from kbpf.model.reasons import Reason

SOCKET_STORAGE_MAPS: Final = ("sock_peers", "udp_flows")
"""State of connected and unconnected sockets. The kernel needs BTF to show it."""

COUNTED_MAPS: Final = ("flows", *SOCKET_STORAGE_MAPS, "affinity")
"""Maps written by the programs whose entries count() counts, in addition to those of `counts`."""

LATENCY_SERIES: Final = 100
"""Service ports with histograms of their latencies: 50 lines of /metrics each."""

SWEEP_INTERVAL_S: Final = 300.0
"""Interval at which the traffic of removed backends is moved to REMOVED_BACKENDS."""

NO_BACKEND: Final = 0
REMOVED_BACKENDS: Final = 0xFFFF_FFFF
ALL_BACKENDS: Final = 0xFFFF_FFFE
"""Backend ids of these entries of `counts`: connections that got no backend; all removed backends;
and all backends of a Service port whose namespace exceeds its share (account.h).
"""
BULK_READ_THRESHOLD: Final = 256
"""From this number on, names are read all at once."""

_NO_TOTALS: Final = ConnectionStats()
IdPair = tuple[int, int]
"""Ids of a Service port and a backend."""


class MapCollector:
    """Reads the maps below one pin folder. One thread may call read(), another count()."""

    def __init__(self, pins: Pins, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._pins, self._config, self._clock = pins, config, clock
        self._names: dict[int, PortName] = {}  # by id; ids are not reused soon
        self._shared_names: dict[PortName, PortName] = {}  # one object for both families
        self._entries: Mapping[str, int] = {}
        self._sweep_due = clock() + SWEEP_INTERVAL_S
        # Without ALL_BACKENDS: the first sweep also removes the merged entries of an earlier agent,
        # so that backends are counted one by one again.
        self._kept_backends = {NO_BACKEND, REMOVED_BACKENDS}

    # ---- cheap metrics ---------------------------------------------------------------------

    def read(self, fill: Mapping[str, int]) -> DataPlaneMetrics:
        """Table sizes and decisions. `fill`: entries of the maps that the agent writes. A map that
        cannot be read, because it is being replaced or was removed, is left out.
        """
        tables: list[TableUsage] = []
        decisions: tuple[ReasonCount, ...] = ()
        entries = {**fill, **self._entries}
        for name, spec in MAPS.items():
            if spec.map_type not in (uapi.BPF_MAP_TYPE_HASH, uapi.BPF_MAP_TYPE_LRU_HASH) and name != "reasons":
                continue
            try:
                with self._pins.open_map(name) as map_:
                    if name == "reasons":
                        decisions = tuple(
                            ReasonCount(reason.name.lower(), reason.verdict, read_counter(map_, reason))
                            for reason in Reason
                        )
                        continue
                    max_entries = map_.max_entries
                    final_entries = max(max_entries, spec.max_entries(self._config.sizes))
                    limit = None if name in SELF_EVICTING_MAPS else final_entries
                    tables.append(TableUsage(name, entries.get(name), max_entries, limit, map_.read_memory()))
            except KernelError:
                continue
        return DataPlaneMetrics(tuple(tables), decisions)

    # ---- expensive metrics -----------------------------------------------------------------

    def count(self, pause: Pause) -> TrafficStats:
        """Connections and their traffic, by Service port."""
        max_series, current = self._config.serving.backend_series, ConnectionCount()
        is_read = {
            name: self._walk_map(name, lambda map_: current.add(map_, bool(max_series)), pause) for name in COUNTED_MAPS
        }
        lists_sockets = all(is_read[name] for name in SOCKET_STORAGE_MAPS)
        sums = _TrafficSums()
        self._walk_map("counts", sums.add, pause)
        self._entries = {**current.entries, "counts": sums.entries}
        names_known = self._read_names(current.services.keys() | sums.services.keys())
        pause()
        selected = self._select_backends(max_series, pause) if max_series else []
        if names_known and self._clock() >= self._sweep_due:
            self._sweep(sums.services)
            self._sweep_due = self._clock() + SWEEP_INTERVAL_S
        if names_known:
            self._merge_over_share(sums.sizes)
        return TrafficStats(
            self._by_name(current.services) if lists_sockets else None,
            tuple(self._totals_by_name(sums.services).items()),
            self._counted_fields(),
            self._with_addresses(selected, current.pairs if lists_sockets else None),
            self._read_latencies(sums.services),
            current.tracked if self._config.packet_path else None,
        )

    def _counted_fields(self) -> frozenset[str]:
        try:
            with self._pins.open_map("config") as config:
                _, flags, _ = CONFIG.unpack(config.lookup(ZERO) or bytes(CONFIG.size))
        except KernelError:
            return frozenset()
        return counted_fields(ConfigFlag(flags))

    def _walk_map(self, name: str, add_map: Callable[[Map], Iterable[None]], pause: Pause) -> bool:
        """Calls `add_map` with a map. False if it cannot be read: it is being replaced, or the
        kernel does not list sockets.
        """
        try:
            with self._pins.open_map(name) as map_:
                for _ in add_map(map_):
                    pause()
        except KernelError:
            return False
        return True

    def _by_name(self, by_id: Mapping[int, int]) -> tuple[tuple[PortName, int], ...]:
        totals: Counter[PortName] = Counter()
        for service_id, count in by_id.items():
            if service_id in self._names:
                totals[self._names[service_id]] += count
        return tuple(totals.items())

    def _totals_by_name(self, totals: Mapping[int, ConnectionStats]) -> dict[PortName, ConnectionStats]:
        sums: dict[PortName, ConnectionStats] = {}
        for service_id, added in totals.items():
            if (name := self._names.get(service_id)) is not None:
                sums[name] = sums[name].plus(added) if name in sums else added
        return sums

    def _select_backends(self, limit: int, pause: Pause) -> list[tuple[IdPair, ConnectionStats]]:
        """The pairs of Service and backend that get series. There may be 131,072 pairs, so the
        others are not kept.
        """
        selected: list[tuple[IdPair, ConnectionStats]] = []

        def namespace_of(pair: tuple[IdPair, ConnectionStats]) -> str:
            return self._names[pair[0][0]][0]

        def add(map_: Map) -> Iterator[None]:
            for keys, values in map_.batches():
                pairs = (
                    (ids, total)
                    for ids, total in unpack_counts(keys, values)
                    if ids[1] not in (NO_BACKEND, REMOVED_BACKENDS, ALL_BACKENDS) and ids[0] in self._names
                )
                rows = sorted(chain(selected, pairs), key=lambda pair: (pair[1].rank(), pair[0]))
                selected[:] = take_turns(rows, namespace_of)[:limit]
                yield

        self._walk_map("counts", add, pause)
        return selected

    def _with_addresses(
        self, selected: Iterable[tuple[IdPair, ConnectionStats]], open_counts: Mapping[IdPair, int] | None
    ) -> tuple[BackendStats, ...]:
        """Stats by address, of those pairs whose backend still exists."""
        pairs: dict[tuple[PortName, str], BackendStats] = {}
        try:
            with self._pins.open_map("backends") as backends:
                for ids, total in selected:
                    raw = backends.lookup(U32.pack(ids[1]))
                    if raw is None:
                        continue
                    target = Target.unpack(raw)
                    name = self._names[ids[0]]
                    endpoint = format_endpoint(target.address, target.port)
                    open_count = None if open_counts is None else open_counts.get(ids, 0)
                    pairs[name, endpoint] = BackendStats(name, endpoint, open_count, total)
        except KernelError:
            return ()
        return tuple(pairs.values())

    def _read_latencies(self, totals: Mapping[int, ConnectionStats]) -> tuple[tuple[PortName, ServiceLatencies], ...]:
        """The latencies of the Service ports that get series, both families together."""
        if self._config.accounting is not Accounting.FULL:
            return ()
        stats = self._totals_by_name(totals)
        ranked = sorted(stats, key=lambda name: stats[name].rank())
        names = set(take_turns(ranked, itemgetter(0))[:LATENCY_SERIES])
        found: dict[PortName, ServiceLatencies] = {}
        try:
            with self._pins.open_map("latencies") as latencies:
                for key, raw in latencies.items():
                    name = self._names.get(U32.unpack(key)[0])
                    if name is not None and name in names:
                        own = unpack_latencies(raw)
                        found[name] = found[name].plus(own) if name in found else own
        except KernelError:
            return ()
        return tuple(found.items())

    def _sweep(self, counted_services: Container[int]) -> None:
        """Moves the traffic of removed backends, and deletes that of removed Services. What a
        program adds to an entry between its reading and its deletion is lost.
        """
        try:
            with (
                self._pins.open_map("counts") as counts,
                self._pins.open_map("backends") as backends,
            ):
                live_backends = {U32.unpack(key)[0] for key, _ in backends.items()}
                live_backends |= self._kept_backends
                self._kept_backends = {NO_BACKEND, REMOVED_BACKENDS, ALL_BACKENDS}
                stale_keys: list[bytes] = []
                removed_totals: dict[int, ConnectionStats] = {}
                for key, raw in counts.items():
                    service, backend = U32_PAIR.unpack(key)
                    if service not in self._names and service in counted_services:
                        stale_keys.append(key)
                    elif backend not in live_backends and backends.lookup(U32.pack(backend)) is None:
                        stale_keys.append(key)
                        before = removed_totals.get(service, _NO_TOTALS)
                        removed_totals[service] = before.plus(ConnectionStats(*COUNTS.unpack(raw)))
                for service, total in removed_totals.items():
                    key = U32_PAIR.pack(service, REMOVED_BACKENDS)
                    previous = ConnectionStats(*COUNTS.unpack(counts.lookup(key) or bytes(COUNTS.size)))
                    counts.update(key, COUNTS.pack(*previous.plus(total)))
                for key in stale_keys:
                    counts.delete(key)
            self._sweep_latencies()
        except KernelError:
            return

    def _sweep_latencies(self) -> None:
        with (
            self._pins.open_map("latencies") as latencies,
            self._pins.open_map("service_names") as names,
        ):
            for key in [key for key, _ in latencies.items() if names.lookup(key) is None]:
                latencies.delete(key)

    def _merge_over_share(self, sizes: Mapping[int, int]) -> None:
        """Merges the entries of the largest Service ports of namespaces that exceed their share.
        What a program adds between the steps is lost, as in _sweep().
        """
        ports = {
            service: (name[0], size)
            for service, size in sizes.items()
            if (name := self._names.get(service)) and not is_system_service(ServiceName(*name[:2]), self._config)
        }
        limit = MAPS["counts"].max_entries(self._config.sizes)
        merged_services = select_over_share(ports, sum(sizes.values()), limit)
        if not merged_services:
            return
        try:
            with self._pins.open_map("counts") as counts:
                entries: dict[int, list[tuple[bytes, bytes]]] = {service: [] for service in merged_services}
                for key, raw in counts.items():
                    service, _ = U32_PAIR.unpack(key)
                    if service in entries:
                        entries[service].append((key, raw))
                for service, service_entries in entries.items():
                    total = _NO_TOTALS
                    for _, raw in service_entries:
                        total = total.plus(ConnectionStats(*COUNTS.unpack(raw)))
                    merged_key = U32_PAIR.pack(service, ALL_BACKENDS)
                    keys = [key for key, _ in service_entries if key != merged_key]
                    for key in keys[:1]:  # otherwise there may be no room for the new entry
                        counts.delete(key)
                    counts.update(merged_key, COUNTS.pack(*total))
                    for key in keys[1:]:
                        counts.delete(key)
        except KernelError:
            return

    def _read_names(self, service_ids: Set[int]) -> bool:
        """Reads the names of these ids; if many others are cached, drops those. Returns whether the
        names could be read: an id without a name then belongs to a removed Service.
        """
        if len(self._names) > 2 * len(service_ids):
            self._names, self._shared_names = {}, {}
        unknown = {U32.pack(service_id): service_id for service_id in service_ids if service_id not in self._names}
        if not unknown:
            return True
        try:
            with self._pins.open_map("service_names") as names:
                entries: Iterable[tuple[bytes, bytes | None]]
                if len(unknown) > BULK_READ_THRESHOLD:
                    entries = ((key, raw) for key, raw in names.items() if key in unknown)
                else:
                    entries = ((key, names.lookup(key)) for key in unknown)
                for key, raw in entries:
                    if raw is not None:
                        name = unpack_port_name(raw)
                        self._names[unknown[key]] = self._shared_names.setdefault(name, name)
        except KernelError:
            return False
        return True


class ConnectionCount:
    """Open connections by Service, optionally by Service and backend; tracked connections; and
    entries by map.
    """

    def __init__(self) -> None:
        self.services: Counter[int] = Counter()
        self.pairs: Counter[IdPair] = Counter()
        self.entries: dict[str, int] = {}
        self.tracked: FlowCount | None = None

    def add(self, map_: Map, with_backends: bool) -> Iterator[None]:
        """Adds the contents of this map, one batch at a time."""
        name, now = map_.name, time.monotonic_ns()
        entries = needed = 0
        for _, values in map_.batches():
            entries += len(values) // map_.value_size
            if name != "affinity":
                if name == "flows":
                    services, backends, needed_here = _count_open_flows(values, now)
                    needed += needed_here
                else:
                    services, backends = _unpack_peers(name, values)
                self.services.update(services)
                if with_backends:
                    self.pairs.update(zip(services, backends, strict=True))
            yield
        self.entries[name] = entries
        if name == "flows":
            self.tracked = FlowCount(needed, int(map_.max_entries / MAPS[name].entries_per_object))


class _TrafficSums:
    """Traffic by Service."""

    def __init__(self) -> None:
        self.entries = 0
        self.services: dict[int, ConnectionStats] = {}
        self.sizes: Counter[int] = Counter()

    def add(self, map_: Map) -> Iterator[None]:
        """Adds the contents of `counts`, one batch at a time."""
        services = self.services
        for keys, values in map_.batches():
            for (service, _), total in unpack_counts(keys, values):
                services[service] = services.get(service, _NO_TOTALS).plus(total)
                self.sizes[service] += 1
                self.entries += 1
            yield


def select_over_share(ports: Mapping[int, tuple[str, int]], entries: int, limit: int) -> list[int]:
    """The Service ports whose entries in `counts` are merged into one, so that no namespace has
    more than NAMESPACE_SHARE times the free room (state/quotas.py): the largest ones of the
    largest namespace first. `ports`: namespace and number of entries by id.
    """
    if entries <= CONTESTED_FILL * limit:
        return []
    by_namespace: dict[str, list[tuple[int, int]]] = {}
    for service, (namespace, size) in ports.items():
        by_namespace.setdefault(namespace, []).append((size, service))
    heap = []
    for namespace, sized_services in by_namespace.items():
        sized_services.sort()
        heap.append((-sum(size for size, _ in sized_services), namespace))
    heapify(heap)
    over_share: list[int] = []
    while heap:
        used, namespace = heappop(heap)
        if -used <= NAMESPACE_SHARE * (limit * (1 - SYSTEM_RESERVE) - entries):
            break
        size, service = by_namespace[namespace].pop()
        if size > 1:
            over_share.append(service)
            entries -= size - 1
            heappush(heap, (used + size - 1, namespace))
    return over_share


def unpack_counts(keys: bytes, values: bytes) -> Iterator[tuple[IdPair, ConnectionStats]]:
    """Entries of `counts`, back to back."""
    return zip(U32_PAIR.iter_unpack(keys), map(ConnectionStats._make, COUNTS.iter_unpack(values)), strict=True)


def _unpack_peers(name: str, values: bytes) -> tuple[list[int], list[int]]:
    """Ids of Service and backend in these values (back to back)."""
    # Whole columns: both ids are the last two words of struct peer and struct udp_flow.
    if name == "sock_peers":
        u32_view = memoryview(values).cast("I")
        return u32_view[12 :: PEER.size // 4].tolist(), u32_view[13 :: PEER.size // 4].tolist()
    flows = b"".join(values[offset + 8 : offset + UDP_FLOWS.size] for offset in range(0, len(values), UDP_FLOWS.size))
    u32_view = memoryview(flows).cast("I")
    step = UDP_FLOW.size // 4
    ids = [pair for pair in zip(u32_view[16::step], u32_view[17::step], strict=True) if pair[0]]
    return [service for service, _ in ids], [backend for _, backend in ids]


def _count_open_flows(values: bytes, now: int) -> tuple[list[int], list[int], int]:
    """Ids of Service and backend of the open connections among these struct flow (back to back),
    counting original-direction entries only, and the number that would not be evicted.
    """
    open_flows = [
        (service, backend, is_needed(state, last_use, now))
        for service, backend, last_use, protocol, state, direction in unpack_columns(values)
        if direction == FlowDirection.ORIGINAL and is_open(state) and last_use + IDLE_TIMEOUT_NS[protocol, state] > now
    ]
    needed = sum(is_flow_needed for _, _, is_flow_needed in open_flows)
    return ([service for service, _, _ in open_flows], [backend for _, backend, _ in open_flows], needed)


def read_counter(map_: Map, reason: Reason) -> int:
    """How often programs gave this reason: `reasons` has a u64 for each possible CPU."""
    return sum(memoryview(map_.lookup(U32.pack(reason)) or b"").cast("Q"))
