# SPDX-License-Identifier: Apache-2.0
"""Reads the Service ports from the maps: names, frontends, backend sets, source ranges, affinity
and traffic.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kbpf.dataplane.bpf.map_metrics import (
    ALL_BACKENDS,
    COUNTED_MAPS,
    NO_BACKEND,
    REMOVED_BACKENDS,
    SOCKET_STORAGE_MAPS,
    ConnectionCount,
    unpack_counts,
)
from kbpf.dataplane.bpf.maps.layout import (
    AFFINITY,
    AFFINITY_KEY,
    ClientKind,
    EndpointCondition,
    ServiceFlag,
    ServiceValue,
    unpack_endpoint_key,
    unpack_endpoint_name,
    unpack_latencies,
)
from kbpf.dataplane.bpf.state import contents as state
from kbpf.dataplane.bpf.state.contents import NODE_PORTS_ID, Contents, frontend_of, is_valid_entry
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey
from kbpf.model.inspection import (
    AffinityEntry,
    BackendEntry,
    BackendSet,
    BackendTraffic,
    EndpointEntry,
    FrontendEntry,
    Part,
    ServicePort,
)
from kbpf.model.metrics import ConnectionStats, ServiceLatencies
from kbpf.model.objects import Algorithm, Protocol

FRONTEND_PARTS: Final = Part.SERVICES | Part.AFFINITY | Part.TRAFFIC
NAME_PARTS: Final = FRONTEND_PARTS | Part.NAMES | Part.RANGES | Part.CONNECTIONS | Part.FAILURES | Part.ENDPOINTS
"""The parts that need Service ports with their frontends, and those that need at least names. With
Part.MAPS alone all maps are open, but no entry is decoded.
"""
NAME_MAPS: Final = ("service_names", "config")
SERVICE_MAPS: Final = (*NAME_MAPS, "services", "backend_slots", "backends", "node_addresses")
TRAFFIC_MAPS: Final = (*COUNTED_MAPS, "counts", "latencies")
SCOPES: Final = {NO_BACKEND: "none", REMOVED_BACKENDS: "gone", ALL_BACKENDS: "all"}

Maps = Mapping[str, Map]


class Backends(dict[int, BackendEntry]):
    """The backends by id; one without a backend for any other id."""

    def __missing__(self, backend_id: int) -> BackendEntry:
        self[backend_id] = BackendEntry(backend_id, None)
        return self[backend_id]


class TableSlots(Mapping[int, BackendEntry]):
    """The slots of a set that has a table: each slot of the table holds an index into the set.
    Nothing is copied, since many sets may share one large table.
    """

    def __init__(self, table: Mapping[int, int], members: Mapping[int, BackendEntry]) -> None:
        self._table, self._members = table, members

    def __getitem__(self, index: int) -> BackendEntry:
        return self._members[self._table[index]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


class _Sets:
    """The backend sets as frontends lead to them. Sets may share a table."""

    def __init__(self, contents: Contents, backends: Backends) -> None:
        self._contents, self._backends = contents, backends
        self._tables: dict[int, dict[int, int]] = {}
        self._sets: dict[tuple[int, int, int], BackendSet] = {}

    def get(self, set_id: int, size: int, table: int) -> BackendSet:
        key = (set_id, size, table)
        if key not in self._sets:
            ids = self._contents.slots_of(set_id)
            members: Mapping[int, BackendEntry] = {i: self._backends[id_] for i, id_ in ids.items()}
            if table:
                if table not in self._tables:
                    self._tables[table] = self._contents.slots_of(table)
                members = TableSlots(self._tables[table], members)
            self._sets[key] = BackendSet(set_id, size, members)
        return self._sets[key]


def read(maps: Maps, parts: Part) -> dict[str, Any]:
    """The Service ports and what belongs to them, as fields of Inspection."""
    if not parts & NAME_PARTS:
        return {}
    wanted = {"service_names"}
    if parts & FRONTEND_PARTS:
        wanted |= {"services", "backend_slots", "backends"}
    if Part.RANGES in parts:
        wanted.add("source_ranges")
    contents = state.read({name: map_ for name, map_ in maps.items() if name in wanted})
    names, ranges = contents.names, contents.ranges
    frontends: dict[int, list[tuple[FrontendAddress, ServiceValue]]] = {}
    for at, value in contents.frontends.items():
        frontends.setdefault(value.id, []).append((at, value))
    backends = Backends({id_: BackendEntry(id_, each) for id_, each in contents.backends.items()})
    existing_backends = tuple(backends.values())
    traffic: dict[int, list[BackendTraffic]] = {}
    latencies: dict[int, ServiceLatencies] = {}
    lists_sockets = True
    if Part.TRAFFIC in parts:
        traffic, lists_sockets = _read_traffic(maps, backends)
        entries = maps["latencies"].items()
        latencies = {int.from_bytes(key, "little"): unpack_latencies(raw) for key, raw in entries}
    endpoints = _read_endpoints(maps, names) if Part.ENDPOINTS in parts else {}
    sets = _Sets(contents, backends)
    ports = {
        port_id: _build_port(
            frontends.get(port_id, ()),
            sets,
            id=port_id,
            key=names.get(port_id),
            source_ranges=ranges.get(port_id, ()),
            traffic=tuple(traffic.get(port_id, ())),
            latencies=latencies.get(port_id),
            endpoints=endpoints.get(port_id, {}),
        )
        for port_id in names.keys() | frontends.keys() | ranges.keys()
    }
    affinity = _read_affinity(maps["affinity"], ports, backends) if Part.AFFINITY in parts else ()
    return {
        "services": tuple(ports.values()),
        "backends": existing_backends,
        "affinity": tuple(affinity),
        "lists_sockets": lists_sockets,
        "node_port_ranges": ranges.get(NODE_PORTS_ID, ()),
    }


def _build_port(entries: Iterable[tuple[FrontendAddress, ServiceValue]], sets: _Sets, **fields: Any) -> ServicePort:
    values = [value for _, value in entries]
    flags = ServiceFlag(values[0].flags if values else 0)
    return ServicePort(
        **fields,
        frontends=tuple(_build_frontend(at, value, sets) for at, value in entries),
        internal_local=ServiceFlag.INTERNAL_LOCAL in flags,
        external_local=ServiceFlag.EXTERNAL_LOCAL in flags,
        any_endpoints=ServiceFlag.ANY_ENDPOINTS in flags,
        algorithm=Algorithm.MAGLEV if ServiceFlag.MAGLEV in flags else Algorithm.RANDOM,
        affinity_timeout=max((value.affinity_timeout for value in values), default=0),
    )


def _build_frontend(at: FrontendAddress, value: ServiceValue, sets: _Sets) -> FrontendEntry:
    frontend = frontend_of(at, value)
    return FrontendEntry(
        at,
        frontend.kind if frontend else None,
        bool(value.flags & ServiceFlag.RESTRICTED),
        *(sets.get(*numbers) for numbers in value.sets),
    )


def _read_endpoints(maps: Maps, names: Mapping[int, ServicePortKey]) -> Mapping[int, dict[Backend, EndpointEntry]]:
    """The endpoints by Service port. A Pod is in the namespace of its Service."""
    endpoints: dict[int, dict[Backend, EndpointEntry]] = {}
    for key, raw in maps["endpoint_names"].items():
        if not is_valid_entry("endpoint_names", key, raw):
            continue
        port_id, target = unpack_endpoint_key(key)
        if port_id not in names:
            continue
        pod, node, zone, conditions = unpack_endpoint_name(raw)
        backend = Backend(target.address, target.port, Protocol(target.protocol))
        endpoints.setdefault(port_id, {})[backend] = EndpointEntry(
            backend,
            f"{names[port_id].namespace}/{pod}" if pod else "",
            node,
            zone,
            EndpointCondition.READY in conditions,
            EndpointCondition.SERVING in conditions,
            EndpointCondition.TERMINATING in conditions,
            EndpointCondition.NODE_ADDRESS in conditions,
        )
    return endpoints


def _read_traffic(maps: Maps, backends: Backends) -> tuple[dict[int, list[BackendTraffic]], bool]:
    """Traffic by Service port, sorted by backend id; and whether the kernel lists sockets: only one
    with BTF does, and some vendors' kernels never do. Without it, their connections are left out.
    """
    lists_sockets = True
    connection_count = ConnectionCount()
    for name in COUNTED_MAPS:
        try:
            for _ in connection_count.add(maps[name], True):
                pass
        except KernelError:
            if name not in SOCKET_STORAGE_MAPS:
                raise
            lists_sockets = False
    totals = {ids: total for batch in maps["counts"].batches() for ids, total in unpack_counts(*batch)}
    open_counts, traffic = connection_count.pairs, dict[int, list[BackendTraffic]]()
    for port_id, backend_id in sorted(totals.keys() | open_counts.keys()):
        pair = (port_id, backend_id)
        traffic.setdefault(port_id, []).append(
            BackendTraffic(
                backend_id,
                backends[backend_id].backend,
                SCOPES.get(backend_id, ""),
                open_counts[pair],
                totals.get(pair, ConnectionStats()),
            )
        )
    return traffic, lists_sockets


def _read_affinity(map_: Map, ports: Mapping[int, ServicePort], backends: Backends) -> Iterator[AffinityEntry]:
    for key, raw in map_.items():
        client, port_id, kind = AFFINITY_KEY.unpack(key)
        last_used_ns, backend_id, owner = AFFINITY.unpack(raw)
        has_address = kind == ClientKind.ADDRESS
        yield AffinityEntry(
            Addr(client) if has_address else None,
            # word[0] and word[1] of the key, in the byte order of the kernel (little-endian)
            0 if has_address else int.from_bytes(client[:8], "little"),
            ports.get(port_id) or ServicePort(port_id, None),
            backends[backend_id],
            last_used_ns / 1e9,
            0 if has_address else owner,
        )
