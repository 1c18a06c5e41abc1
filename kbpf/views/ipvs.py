# SPDX-License-Identifier: Apache-2.0
"""What an agent in mode ipvs has programmed, as a Snapshot, from which all views are built.

Virtual services and real servers are read from the kernel. The kernel cannot store Service names,
so these come from the agent's state folder, which also has its status. IPVS has no ids for
Services, sets and backends; they are numbered here. All of it works while the agent is down.
"""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.inspect.snapshot import Snapshot, is_alive
from kbpf.dataplane.bpf.maps.layout import KIND_FLAGS, ServiceFlag, ServiceValue
from kbpf.dataplane.ipvs import statefile
from kbpf.dataplane.ipvs.plan import VirtualService
from kbpf.errors import NotFoundError
from kbpf.kernel.net.ipvs import IpvsClient, IpvsConnection, RealServerStatus, list_connections
from kbpf.model.address import ANY4, ANY6, Addr, format_addr, format_endpoint
from kbpf.model.desired import (
    Backend,
    Frontend,
    FrontendAddress,
    FrontendKind,
    ServicePortKey,
    ServiceState,
)
from kbpf.model.objects import Algorithm, Protocol
from kbpf.model.status import AgentStatus, decode
from kbpf.views.backends import format_service
from kbpf.views.packet_path.connections import ConnectionQuery, ConnectionRow, service_ids

ServersByService = Mapping[VirtualService, Sequence[RealServerStatus]]
"""The real servers of each virtual service in the kernel."""


def read_status(folder: Path) -> AgentStatus | None:
    """The status that the agent last wrote; None if no agent in mode ipvs has written one."""
    with contextlib.suppress(OSError):
        return decode((folder / statefile.STATUS_FILE).read_bytes())
    return None


def read(folder: Path) -> Snapshot:
    """Reads the state of the agent with this state folder, in the caller's network namespace.
    Raises NotFoundError if the folder has no status.
    """
    agent_status = read_status(folder)
    if agent_status is None:
        raise NotFoundError(
            "no agent in mode ipvs has written a status", str(folder),
            "is `kbpf run` running on this node, with this --state-dir and --ipvs-device?",
        )  # fmt: skip
    ipvs_snapshot = build_snapshot(folder, statefile.read_services(folder), _read_servers())
    return replace(ipvs_snapshot, status=agent_status, agent_alive=is_alive(agent_status.pid))


def _read_servers() -> ServersByService:
    with contextlib.closing(IpvsClient()) as client:
        return {
            VirtualService(
                Protocol(service.protocol), service.address, service.port, service.fwmark
            ): client.list_servers(service)
            for service, _ in client.list_services()
            if service.protocol in Protocol.__members__.values()
        }


# ---- the snapshot --------------------------------------------------------------------------------


@dataclass(slots=True)
class _IdAllocator:
    """Numbers sets and backends from 1, in the order in which they are first seen."""

    backends: dict[Backend, int] = field(default_factory=dict)
    sets: dict[tuple[int, ...], int] = field(default_factory=dict)

    def allocate_set(
        self, owner: int, loads: Iterable[RealServerStatus], protocol: Protocol
    ) -> tuple[int, int]:
        """The id of a set and its number of slots; (0, 0) for an empty set. A real server has as
        many slots as its weight.
        """
        slots = [
            self._allocate_backend(Backend(load.server.address, load.server.port, protocol))
            for load in loads
            for _ in range(load.weight)
        ]
        if not slots:
            return 0, 0
        return self.sets.setdefault((owner, *slots), len(self.sets) + 1), len(slots)

    def _allocate_backend(self, backend: Backend) -> int:
        return self.backends.setdefault(backend, len(self.backends) + 1)


def build_snapshot(
    folder: Path, states: Iterable[ServiceState], servers: ServersByService
) -> Snapshot:
    """The snapshot for these Service ports, with the real servers that the kernel has for them."""
    states = sorted(states, key=lambda state: state.key)
    # Virtual services without such an address belong to NodePorts: the kernel has one for each
    # node address, while a frontend of kind NodePort has the wildcard address.
    exact_addresses = {f.at for s in states for f in s.frontends}
    by_port: dict[tuple[Protocol, int], list[VirtualService]] = {}
    for virtual in servers:
        address = FrontendAddress(virtual.address, virtual.port, virtual.protocol)
        if not virtual.fwmark and address not in exact_addresses:
            by_port.setdefault((virtual.protocol, virtual.port), []).append(virtual)
    ids, names = _IdAllocator(), dict[int, ServicePortKey]()
    frontends: dict[FrontendAddress, ServiceValue] = {}
    for service_id, state in zip(count(1), states):
        names[service_id] = state.key
        for frontend in state.frontends:
            virtual_service = _find_virtual_service(frontend, by_port, state.key.family)
            loads = servers.get(virtual_service, ()) if virtual_service is not None else ()
            frontends[frontend.at] = _service_value(service_id, state, frontend, loads, ids)
    return Snapshot(
        folder,
        time.monotonic(),
        time.clock_gettime(time.CLOCK_BOOTTIME),
        frontends=frontends,
        names=names,
        # the first element of the key is the owner, which keeps the sets of Services apart
        sets={i: dict(enumerate(slots[1:])) for slots, i in ids.sets.items()},
        backends={i: backend for backend, i in ids.backends.items()},
    )


def _find_virtual_service(
    frontend: Frontend, by_port: Mapping[tuple[Protocol, int], list[VirtualService]], family: int
) -> VirtualService | None:
    """The virtual service of a frontend. For a NodePort any node address will do: the virtual
    services of all node addresses have the same real servers.
    """
    address = frontend.at
    if frontend.kind is not FrontendKind.NODE_PORT:
        return VirtualService(address.protocol, address.address, address.port)
    return next(
        (v for v in by_port.get((address.protocol, address.port), ()) if v.family == family), None
    )


def _service_value(
    service_id: int,
    state: ServiceState,
    frontend: Frontend,
    loads: Iterable[RealServerStatus],
    ids: _IdAllocator,
) -> ServiceValue:
    flags = KIND_FLAGS[frontend.kind]
    for enabled, flag in (
        (state.internal_local, ServiceFlag.INTERNAL_LOCAL),
        (state.external_local, ServiceFlag.EXTERNAL_LOCAL),
        (state.any_endpoints, ServiceFlag.ANY_ENDPOINTS),
        (frontend.restricted, ServiceFlag.RESTRICTED),
        (state.algorithm is Algorithm.MAGLEV, ServiceFlag.MAGLEV),
    ):
        flags |= flag if enabled else ServiceFlag(0)
    # In IPVS a frontend has one set, for the policy that applies to it; the other one is empty.
    is_cluster_ip = frontend.kind is FrontendKind.CLUSTER_IP
    local = state.internal_local if is_cluster_ip else state.external_local
    own_set, empty_set = ids.allocate_set(service_id, loads, frontend.at.protocol), (0, 0)
    sets = (*empty_set, *own_set) if local else (*own_set, *empty_set)
    return ServiceValue(service_id, int(flags), state.affinity_timeout, *sets)


# ---- connections ---------------------------------------------------------------------------------

ALL_CONNECTIONS: Final = ConnectionQuery()
STATE_NAMES: Final = {
    "SYN_RECV": "new", "SYN_SENT": "new", "SYNACK": "new", "ESTABLISHED": "established",
    "FIN_WAIT": "closing", "CLOSE_WAIT": "closing", "LAST_ACK": "closing", "TIME_WAIT": "closed",
    "CLOSE": "closed", "CLOSED": "closed", "UDP": "established", "INIT1": "new", "INIT": "new",
    "COOKIE_SENT": "new", "COOKIE_REPLIED": "new", "COOKIE_WAIT": "new", "COOKIE": "new",
    "COOKIE_ECHOED": "new", "SHUTDOWN_SENT": "closing", "SHUTDOWN_RECEIVED": "closing",
    "SHUTDOWN_ACK_SENT": "closing", "REJECTED": "closed",
}  # fmt: skip
"""The kernel's names for IPVS connection states → names in connections.STATES."""


def connection_rows(
    folder: Path, query: ConnectionQuery = ALL_CONNECTIONS
) -> tuple[ConnectionRow, ...]:
    """The IPVS connections that match the query, sorted by Service, then by client."""
    return build_rows(read(folder), list_connections(), query)


def build_rows(
    snapshot: Snapshot,
    ipvs_connections: Iterable[IpvsConnection],
    query: ConnectionQuery = ALL_CONNECTIONS,
) -> tuple[ConnectionRow, ...]:
    """The rows that match the query. Raises NotFoundError if its Service is not programmed."""
    allowed_ids = service_ids(snapshot, query.service) if query.service else None
    selected = []
    for connection in ipvs_connections:
        service_id = _owning_service_id(snapshot, connection)
        name = format_service(snapshot.names.get(service_id), service_id) if service_id else "-"
        row = _build_row(connection, name)
        if (
            (allowed_ids is None or service_id in allowed_ids)
            and query.client in (None, connection.client[0])
            and query.backend in (None, connection.server[0])
            and query.state in ("", row.state)
        ):
            selected.append(row)
    return tuple(sorted(selected, key=lambda row: (row.service, row.client, row.frontend)))


def _owning_service_id(snapshot: Snapshot, connection: IpvsConnection) -> int:
    """The id of the connection's Service; 0 if its virtual service is not ours."""
    address, port = connection.frontend
    wildcard = ANY4 if "." in format_addr(address) else ANY6
    for candidate in (address, wildcard):
        value = snapshot.frontends.get(FrontendAddress(Addr(candidate), port, connection.protocol))
        if value is not None:
            return value.id
    return 0


def _build_row(connection: IpvsConnection, service: str) -> ConnectionRow:
    return ConnectionRow(
        service=service,
        protocol=connection.protocol.name,
        client=format_endpoint(*connection.client),
        frontend=format_endpoint(*connection.frontend),
        backend=format_endpoint(*connection.server),
        seen_as="",
        masqueraded=False,
        state=STATE_NAMES.get(connection.state, connection.state.lower()),
        idle_seconds=None,
        expires_seconds=connection.expires_in,
        expired=False,
        lost=(),
        replaced=False,
        path="ipvs",
        device="",
    )
