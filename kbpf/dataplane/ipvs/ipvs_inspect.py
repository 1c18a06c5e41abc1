# SPDX-License-Identifier: Apache-2.0
"""Reads what an agent in mode ipvs has programmed, into the values of model/inspection.py.

Virtual services and real servers are read from the kernel. The kernel cannot store Service names,
so these come from the agent's state folder, which also has its status. All of it works while the
agent is down.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kbpf.dataplane.ipvs import statefile
from kbpf.dataplane.ipvs.plan import fwmark_service
from kbpf.dataplane.ipvs.statefile import ProgrammedPort
from kbpf.errors import NotFoundError
from kbpf.kernel.net.ipvs import IpvsClient, IpvsConnection, RealServerStatus, list_connections
from kbpf.kernel.system.process import is_alive
from kbpf.model.address import ANY, Addr, family_of, format_endpoint
from kbpf.model.desired import (
    Backend,
    Frontend,
    FrontendAddress,
    FrontendKind,
    ServicePortKey,
    ServiceState,
    VirtualService,
)
from kbpf.model.inspection import (
    EMPTY_SET,
    BackendEntry,
    BackendSet,
    BackendTraffic,
    Connection,
    ConnectionPage,
    ConnectionQuery,
    EndpointEntry,
    FrontendEntry,
    Inspection,
    ServicePort,
    find_ports,
    index_pods,
)
from kbpf.model.metrics import IPVS_COUNTERS, ConnectionStats
from kbpf.model.objects import Protocol
from kbpf.model.status import AgentStatus, decode

ServersByService = Mapping[VirtualService, Sequence[RealServerStatus]]
"""The real servers of each virtual service in the kernel."""


NO_ENDPOINTS: Final[Mapping[ServicePortKey, Iterable[EndpointEntry]]] = {}


def read_status(folder: Path) -> AgentStatus | None:
    """The status that the agent last wrote; None if no agent in mode ipvs has written one."""
    with contextlib.suppress(OSError):
        return decode((folder / statefile.STATUS_FILE).read_bytes())
    return None


def read(folder: Path) -> Inspection:
    """Reads the state of the agent with this state folder, in the caller's network namespace.
    Raises NotFoundError if the folder has no status.
    """
    status = read_status(folder)
    if status is None:
        raise NotFoundError(
            "no agent in mode ipvs has written a status",
            str(folder),
            "is `kbpf run` running on this node, with this --state-dir?",
        )
    ports = statefile.read_services(folder)
    inspection = build_inspection(folder, ports, _read_servers(), statefile.read_endpoints(folder))
    return replace(inspection, status=status, agent_alive=is_alive(status.pid, status.started))


def _read_servers() -> ServersByService:
    with contextlib.closing(IpvsClient()) as client:
        return {virtual: client.list_servers(virtual) for virtual, _ in client.list_services()}


# ---- Services ------------------------------------------------------------------------------------


def build_inspection(
    folder: Path,
    programmed: Iterable[ProgrammedPort],
    servers: ServersByService,
    endpoints: Mapping[ServicePortKey, Iterable[EndpointEntry]] = NO_ENDPOINTS,
) -> Inspection:
    """What these Service ports and the real servers that the kernel has for them look like."""
    programmed = sorted(programmed, key=lambda port: port.state.key)
    builder = _PortBuilder([port.state for port in programmed], servers)
    ports = tuple(builder.build(port, endpoints.get(port.state.key, ())) for port in programmed)
    pods = index_pods(ports, ())
    return Inspection(
        str(folder),
        mode="ipvs",
        monotonic=time.monotonic(),
        boottime=time.clock_gettime(time.CLOCK_BOOTTIME),
        services=ports,
        backends=tuple(builder.backends.values()),
        connections=IpvsConnections(ports, str(folder), pods),
        pods=pods,
        node_port_addresses=builder.node_port_addresses(),
        counted=IPVS_COUNTERS,
    )


class _PortBuilder:
    """Builds Service ports. Each backend, and each set of a port, is one object."""

    def __init__(self, states: Iterable[ServiceState], servers: ServersByService) -> None:
        self.backends: dict[Backend, BackendEntry] = {}
        self._states, self._servers = tuple(states), servers
        # Virtual services without such an address belong to NodePorts: the kernel has one for each
        # node address, while a frontend of kind NodePort has the wildcard address.
        exact_addresses = {frontend.at for state in self._states for frontend in state.frontends}
        self._by_port: dict[tuple[int, int], list[VirtualService]] = {}
        for virtual in servers:
            address = (virtual.address, virtual.port, virtual.protocol)
            if not virtual.fwmark and address not in exact_addresses:
                self._by_port.setdefault((virtual.protocol, virtual.port), []).append(virtual)

    def build(self, port: ProgrammedPort, endpoints: Iterable[EndpointEntry]) -> ServicePort:
        """One Service port."""
        state = port.state
        sets: dict[tuple[BackendEntry, ...], BackendSet] = {}
        return ServicePort(
            None,
            state.key,
            tuple(self._build_frontend(state, frontend, sets) for frontend in state.frontends),
            state.internal_local,
            state.external_local,
            state.algorithm,
            state.affinity_timeout,
            endpoints={entry.backend: entry for entry in endpoints},
            any_endpoints=state.any_endpoints,
            traffic=tuple(self._sum_traffic(port)),
        )

    def _sum_traffic(self, port: ProgrammedPort) -> Iterator[BackendTraffic]:
        """The connections to each backend, of all virtual services of the Service port."""
        key = port.state.key
        virtuals = {fwmark_service(key.family, port.fwmark)} if port.fwmark else set()
        for frontend in port.state.frontends:
            virtuals.update(self._find_virtual_services(frontend, key.family))
        sums: dict[Backend, tuple[int, ConnectionStats]] = {}
        for virtual in virtuals:
            for status in self._servers.get(virtual, ()):
                backend = Backend(*status.server, key.protocol)
                open_count, totals = sums.get(backend, (0, ConnectionStats()))
                open_count += count_open(status, key.protocol)
                sums[backend] = open_count, totals.plus(status.stats)
        for backend, (open_count, totals) in sums.items():
            yield BackendTraffic(None, backend, "", open_count, totals)

    def node_port_addresses(self) -> frozenset[Addr]:
        """The addresses of this node that have a virtual service of a NodePort."""
        return frozenset(
            virtual.address
            for port in {
                (frontend.at.protocol, frontend.at.port)
                for state in self._states
                for frontend in state.frontends
                if frontend.kind is FrontendKind.NODE_PORT
            }
            for virtual in self._by_port.get(port, ())
        )

    def _build_frontend(
        self, state: ServiceState, frontend: Frontend, sets: dict[tuple[BackendEntry, ...], BackendSet]
    ) -> FrontendEntry:
        # Of a NodePort any will do: all have the same real servers.
        virtual = next(iter(self._find_virtual_services(frontend, state.key.family)), None)
        # A real server has as many slots as its weight.
        slots = tuple(
            self._backend(Backend(status.server.address, status.server.port, frontend.at.protocol))
            for status in (self._servers.get(virtual, ()) if virtual is not None else ())
            for _ in range(status.weight)
        )
        own_set = EMPTY_SET
        if slots:
            own_set = sets.setdefault(slots, BackendSet(None, len(slots), dict(enumerate(slots))))
        is_cluster_ip = frontend.kind is FrontendKind.CLUSTER_IP
        local = state.internal_local if is_cluster_ip else state.external_local
        return FrontendEntry(
            frontend.at,
            frontend.kind,
            frontend.restricted,
            cluster=EMPTY_SET if local else own_set,
            local=own_set if local else EMPTY_SET,
        )

    def _backend(self, backend: Backend) -> BackendEntry:
        return self.backends.setdefault(backend, BackendEntry(None, backend))

    def _find_virtual_services(self, frontend: Frontend, family: int) -> list[VirtualService]:
        """The virtual services of a frontend: of a NodePort one for each node address."""
        at = frontend.at
        if frontend.kind is not FrontendKind.NODE_PORT:
            return [VirtualService(at.protocol, at.address, at.port)]
        candidates = self._by_port.get((at.protocol, at.port), ())
        return [virtual for virtual in candidates if virtual.family == family]


def count_open(status: RealServerStatus, protocol: Protocol) -> int:
    """The open connections of a real server. To IPVS those of UDP are all inactive."""
    inactive = status.inactive_conns if protocol is Protocol.UDP else 0
    return status.active_conns + inactive


# ---- connections ---------------------------------------------------------------------------------

STATE_NAMES: Final = {
    "SYN_RECV": "new",
    "SYN_SENT": "new",
    "SYNACK": "new",
    "ESTABLISHED": "established",
    "FIN_WAIT": "closing",
    "CLOSE_WAIT": "closing",
    "LAST_ACK": "closing",
    "TIME_WAIT": "closed",
    "CLOSE": "closed",
    "CLOSED": "closed",
    "UDP": "established",
    "INIT1": "new",
    "INIT": "new",
    "COOKIE_SENT": "new",
    "COOKIE_REPLIED": "new",
    "COOKIE_WAIT": "new",
    "COOKIE": "new",
    "COOKIE_ECHOED": "new",
    "SHUTDOWN_SENT": "closing",
    "SHUTDOWN_RECEIVED": "closing",
    "SHUTDOWN_ACK_SENT": "closing",
    "REJECTED": "closed",
}
"""The kernel's names for IPVS connection states → ConnectionState."""


class IpvsConnections:
    """The connections that IPVS tracks: Connections of model/inspection.py."""

    def __init__(self, ports: Iterable[ServicePort], location: str, pods: Mapping[Addr, str]) -> None:
        """`pods`: see index_pods()."""
        self._ports, self._location, self._pods = tuple(ports), location, pods
        self._by_frontend = {f.at: port for port in self._ports for f in port.frontends}

    def find(self, query: ConnectionQuery) -> ConnectionPage:
        """See model.inspection.Connections."""
        allowed = find_ports(self._ports, query.service, self._location) if query.service else None
        selected = []
        for connection in list_connections():
            port = self._owner(connection)
            row = _build_row(connection, port, self._pods)
            if (
                (allowed is None or port in allowed)
                and query.client in (None, connection.client[0])
                and query.backend in (None, connection.server[0])
                and query.state in ("", row.state)
            ):
                selected.append(row)
        selected.sort(key=lambda row: (row.service, row.client, row.frontend))
        return ConnectionPage(selected, len(selected), 0)

    def _owner(self, connection: IpvsConnection) -> ServicePort | None:
        """The Service port of a connection; None if its virtual service is not ours."""
        address, port = connection.frontend
        for candidate in (address, ANY[family_of(address)]):
            at = FrontendAddress(candidate, port, connection.protocol)
            if at in self._by_frontend:
                return self._by_frontend[at]
        return None


def _build_row(connection: IpvsConnection, port: ServicePort | None, pods: Mapping[Addr, str]) -> Connection:
    endpoint = None
    if port is not None:
        endpoint = port.endpoints.get(Backend(*connection.server, connection.protocol))
    return Connection(
        service=port.text if port else "-",
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
        client_pod=pods.get(connection.client[0], ""),
        backend_pod=endpoint.pod if endpoint else "",
        backend_node=endpoint.node if endpoint else "",
    )
