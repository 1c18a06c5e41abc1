# SPDX-License-Identifier: Apache-2.0
"""Reads what an agent in mode ipvs has programmed, into the values of model/inspection.py.

Virtual services and real servers are read from the kernel. The kernel cannot store Service names,
so these come from the agent's state folder, which also has its status. All of it works while the
agent is down.
"""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kbpf.dataplane.ipvs import statefile
from kbpf.dataplane.ipvs.plan import VirtualService, virtual_service_of
from kbpf.errors import NotFoundError
from kbpf.kernel.net.ipvs import IpvsClient, IpvsConnection, RealServerStatus, list_connections
from kbpf.kernel.system.process import is_alive
from kbpf.model.address import ANY4, ANY6, Addr, format_addr, format_endpoint
from kbpf.model.desired import Backend, Frontend, FrontendAddress, FrontendKind, ServiceState
from kbpf.model.inspection import (
    EMPTY_SET,
    BackendEntry,
    BackendSet,
    Connection,
    ConnectionPage,
    ConnectionQuery,
    FrontendEntry,
    Inspection,
    ServicePort,
    find_ports,
)
from kbpf.model.objects import Protocol
from kbpf.model.status import AgentStatus, decode

ServersByService = Mapping[VirtualService, Sequence[RealServerStatus]]
"""The real servers of each virtual service in the kernel."""


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
            "no agent in mode ipvs has written a status", str(folder),
            "is `kbpf run` running on this node, with this --state-dir and --ipvs-device?",
        )  # fmt: skip
    inspection = build_inspection(folder, statefile.read_services(folder), _read_servers())
    return replace(inspection, status=status, agent_alive=is_alive(status.pid))


def _read_servers() -> ServersByService:
    with contextlib.closing(IpvsClient()) as client:
        return {
            virtual: client.list_servers(service)
            for service, _ in client.list_services()
            if (virtual := virtual_service_of(*service)) is not None
        }


# ---- Services ------------------------------------------------------------------------------------


def build_inspection(
    folder: Path,
    states: Iterable[ServiceState],
    servers: ServersByService,
) -> Inspection:
    """What these Service ports and the real servers that the kernel has for them look like."""
    states = sorted(states, key=lambda state: state.key)
    builder = _PortBuilder(states, servers)
    ports = tuple(map(builder.build, states))
    return Inspection(
        str(folder),
        mode="ipvs",
        monotonic=time.monotonic(),
        boottime=time.clock_gettime(time.CLOCK_BOOTTIME),
        services=ports,
        backends=tuple(builder.backends.values()),
        connections=IpvsConnections(ports, str(folder)),
    )


class _PortBuilder:
    """Builds Service ports. Each backend, and each set of a port, is one object."""

    def __init__(self, states: Iterable[ServiceState], servers: ServersByService) -> None:
        self.backends: dict[Backend, BackendEntry] = {}
        self._servers = servers
        # Virtual services without such an address belong to NodePorts: the kernel has one for each
        # node address, while a frontend of kind NodePort has the wildcard address.
        exact_addresses = {frontend.at for state in states for frontend in state.frontends}
        self._by_port: dict[tuple[Protocol, int], list[VirtualService]] = {}
        for virtual in servers:
            address = FrontendAddress(virtual.address, virtual.port, virtual.protocol)
            if not virtual.fwmark and address not in exact_addresses:
                self._by_port.setdefault((virtual.protocol, virtual.port), []).append(virtual)

    def build(self, state: ServiceState) -> ServicePort:
        """One Service port."""
        sets: dict[tuple[BackendEntry, ...], BackendSet] = {}
        return ServicePort(
            None,
            state.key,
            tuple(self._build_frontend(state, frontend, sets) for frontend in state.frontends),
            state.internal_local,
            state.external_local,
            state.algorithm,
            state.affinity_timeout,
        )

    def _build_frontend(
        self,
        state: ServiceState,
        frontend: Frontend,
        sets: dict[tuple[BackendEntry, ...], BackendSet],
    ) -> FrontendEntry:
        virtual = self._find_virtual_service(frontend, state.key.family)
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

    def _find_virtual_service(self, frontend: Frontend, family: int) -> VirtualService | None:
        """The virtual service of a frontend. For a NodePort any node address will do: the virtual
        services of all node addresses have the same real servers.
        """
        address = frontend.at
        if frontend.kind is not FrontendKind.NODE_PORT:
            return VirtualService(address.protocol, address.address, address.port)
        candidates = self._by_port.get((address.protocol, address.port), ())
        return next((virtual for virtual in candidates if virtual.family == family), None)


# ---- connections ---------------------------------------------------------------------------------

STATE_NAMES: Final = {
    "SYN_RECV": "new", "SYN_SENT": "new", "SYNACK": "new", "ESTABLISHED": "established",
    "FIN_WAIT": "closing", "CLOSE_WAIT": "closing", "LAST_ACK": "closing", "TIME_WAIT": "closed",
    "CLOSE": "closed", "CLOSED": "closed", "UDP": "established", "INIT1": "new", "INIT": "new",
    "COOKIE_SENT": "new", "COOKIE_REPLIED": "new", "COOKIE_WAIT": "new", "COOKIE": "new",
    "COOKIE_ECHOED": "new", "SHUTDOWN_SENT": "closing", "SHUTDOWN_RECEIVED": "closing",
    "SHUTDOWN_ACK_SENT": "closing", "REJECTED": "closed",
}  # fmt: skip
"""The kernel's names for IPVS connection states → CONNECTION_STATES."""


class IpvsConnections:
    """The connections that IPVS tracks: Connections of model/inspection.py."""

    def __init__(self, ports: Iterable[ServicePort], location: str) -> None:
        self._ports, self._location = tuple(ports), location
        self._by_frontend = {f.at: port for port in self._ports for f in port.frontends}

    def find(self, query: ConnectionQuery, limit: int = 0) -> ConnectionPage:
        """See model.inspection.Connections."""
        allowed = find_ports(self._ports, query.service, self._location) if query.service else None
        selected = []
        for connection in list_connections():
            port = self._owner(connection)
            row = _build_row(connection, port.text if port else "-")
            if (
                (allowed is None or port in allowed)
                and query.client in (None, connection.client[0])
                and query.backend in (None, connection.server[0])
                and query.state in ("", row.state)
            ):
                selected.append(row)
        selected.sort(key=lambda row: (row.service, row.client, row.frontend))
        return ConnectionPage(selected[: limit or None], len(selected), 0)

    def _owner(self, connection: IpvsConnection) -> ServicePort | None:
        """The Service port of a connection; None if its virtual service is not ours."""
        address, port = connection.frontend
        wildcard = ANY4 if "." in format_addr(address) else ANY6
        for candidate in (Addr(address), wildcard):
            at = FrontendAddress(candidate, port, connection.protocol)
            if at in self._by_frontend:
                return self._by_frontend[at]
        return None


def _build_row(connection: IpvsConnection, service: str) -> Connection:
    return Connection(
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
