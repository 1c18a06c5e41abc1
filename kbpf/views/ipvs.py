"""What an agent of mode ipvs has programmed, as the Snapshot that all views are made of.

Virtual services and their real servers are the kernel's; which Service each is of stands beside
the agent's status in its state folder, for the kernel has no room for names. Ids are made up: there
are none. Works with the agent down.
"""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.inspect.snapshot import Snapshot, alive
from kbpf.dataplane.bpf.maps.layout import KIND_FLAGS, ServiceFlag, ServiceValue
from kbpf.dataplane.ipvs import statefile
from kbpf.dataplane.ipvs.plan import Virtual
from kbpf.errors import NotFoundError
from kbpf.kernel.net.ipvs import Connection, Ipvs, Load, connections
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
from kbpf.views.backends import service_text
from kbpf.views.packet_path.connections import ConnectionRow, Wanted, of_service

Held = Mapping[Virtual, Sequence[Load]]
"""What the kernel has."""


def status(folder: Path) -> AgentStatus | None:
    """The agent's last words; None where none of mode ipvs has spoken."""
    with contextlib.suppress(OSError):
        return decode((folder / statefile.STATUS).read_bytes())
    return None


def read(folder: Path) -> Snapshot:
    """What is there of the agent with this state folder, in the caller's network namespace.
    NotFoundError when there was none.
    """
    said = status(folder)
    if said is None:
        raise NotFoundError(
            "no agent of mode ipvs has been here", str(folder),
            "is `kbpf run` running on this node, and with this --state-dir and --ipvs-device?",
        )  # fmt: skip
    made = snapshot(folder, statefile.read(folder), _held())
    return replace(made, status=said, agent_alive=alive(said.pid))


def _held() -> Held:
    with contextlib.closing(Ipvs()) as face:
        return {
            Virtual(Protocol(service.protocol), service.address, service.port, service.mark):
                face.servers(service)
            for service, _ in face.services()
            if service.protocol in Protocol.__members__.values()
        }  # fmt: skip


# ---- one value -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ids:
    """Made up, from 1 on, in the order of asking."""

    backends: dict[Backend, int] = field(default_factory=dict)
    sets: dict[tuple[int, ...], int] = field(default_factory=dict)

    def of_set(self, owner: int, loads: Iterable[Load], protocol: Protocol) -> tuple[int, int]:
        """The id and the size of a set; 0 for an empty one. A weight is a number of slots."""
        slots = [
            self._of(Backend(load.server.address, load.server.port, protocol))
            for load in loads
            for _ in range(load.weight)
        ]
        if not slots:
            return 0, 0
        return self.sets.setdefault((owner, *slots), len(self.sets) + 1), len(slots)

    def _of(self, backend: Backend) -> int:
        return self.backends.setdefault(backend, len(self.backends) + 1)


def snapshot(folder: Path, states: Iterable[ServiceState], held: Held) -> Snapshot:
    """What serves these Service ports, by what the kernel holds."""
    states = sorted(states, key=lambda state: state.key)
    exact = {f.at for s in states for f in s.frontends}
    by_port: dict[tuple[Protocol, int], list[Virtual]] = {}
    for virtual in held:
        at = FrontendAddress(virtual.address, virtual.port, virtual.protocol)
        if not virtual.mark and at not in exact:
            by_port.setdefault((virtual.protocol, virtual.port), []).append(virtual)
    ids, names = _Ids(), dict[int, ServicePortKey]()
    frontends: dict[FrontendAddress, ServiceValue] = {}
    for number, state in zip(count(1), states):
        names[number] = state.key
        for frontend in state.frontends:
            found = _virtual(frontend, by_port, state.key.family)
            loads = held.get(found, ()) if found is not None else ()
            frontends[frontend.at] = _value(number, state, frontend, loads, ids)
    return Snapshot(
        folder,
        time.monotonic(),
        time.clock_gettime(time.CLOCK_BOOTTIME),
        frontends=frontends,
        names=names,
        sets={i: dict(enumerate(slots[1:])) for slots, i in ids.sets.items()},
        backends={i: backend for backend, i in ids.backends.items()},
    )


def _virtual(
    frontend: Frontend, by_port: Mapping[tuple[Protocol, int], list[Virtual]], family: int
) -> Virtual | None:
    """A NodePort's is that of any of the node's addresses: they are all the same."""
    at = frontend.at
    if frontend.kind is not FrontendKind.NODE_PORT:
        return Virtual(at.protocol, at.address, at.port)
    return next((v for v in by_port.get((at.protocol, at.port), ()) if v.family == family), None)


def _value(
    number: int, state: ServiceState, frontend: Frontend, loads: Iterable[Load], ids: _Ids
) -> ServiceValue:
    flags = KIND_FLAGS[frontend.kind]
    for wanted, flag in (
        (state.internal_local, ServiceFlag.INTERNAL_LOCAL),
        (state.external_local, ServiceFlag.EXTERNAL_LOCAL),
        (state.any_endpoints, ServiceFlag.ANY_ENDPOINTS),
        (frontend.restricted, ServiceFlag.RESTRICTED),
        (state.algorithm is Algorithm.MAGLEV, ServiceFlag.MAGLEV),
    ):
        flags |= flag if wanted else ServiceFlag(0)
    is_cluster_ip = frontend.kind is FrontendKind.CLUSTER_IP
    local = state.internal_local if is_cluster_ip else state.external_local
    one, nothing = ids.of_set(number, loads, frontend.at.protocol), (0, 0)
    sets = (*nothing, *one) if local else (*one, *nothing)
    return ServiceValue(number, int(flags), state.affinity_timeout, *sets)


# ---- connections ---------------------------------------------------------------------------------

ALL: Final = Wanted()
STATES: Final = {
    "SYN_RECV": "new", "SYN_SENT": "new", "SYNACK": "new", "ESTABLISHED": "established",
    "FIN_WAIT": "closing", "CLOSE_WAIT": "closing", "LAST_ACK": "closing", "TIME_WAIT": "closed",
    "CLOSE": "closed", "CLOSED": "closed", "UDP": "established", "INIT1": "new", "INIT": "new",
    "COOKIE_SENT": "new", "COOKIE_REPLIED": "new", "COOKIE_WAIT": "new", "COOKIE": "new",
    "COOKIE_ECHOED": "new", "SHUTDOWN_SENT": "closing", "SHUTDOWN_RECEIVED": "closing",
    "SHUTDOWN_ACK_SENT": "closing", "REJECTED": "closed",
}  # fmt: skip
"""IPVS' words in ours (views.connections.STATES)."""


def connection_rows(folder: Path, wanted: Wanted = ALL) -> tuple[ConnectionRow, ...]:
    """The connections of IPVS that are wanted, by Service, then client."""
    return rows(read(folder), connections(), wanted)


def rows(
    held: Snapshot, found: Iterable[Connection], wanted: Wanted = ALL
) -> tuple[ConnectionRow, ...]:
    """Those that are wanted. NotFoundError for a Service that is not programmed."""
    services = of_service(held, wanted.service) if wanted.service else None
    made = []
    for one in found:
        number = _owner(held, one)
        name = service_text(held.names.get(number), number) if number else "-"
        row = _row(one, name)
        if (
            (services is None or number in services)
            and wanted.client in (None, one.client[0])
            and wanted.backend in (None, one.server[0])
            and wanted.state in ("", row.state)
        ):
            made.append(row)
    return tuple(sorted(made, key=lambda row: (row.service, row.client, row.frontend)))


def _owner(held: Snapshot, one: Connection) -> int:
    """The id of its Service; 0 for one of others."""
    address, port = one.frontend
    any_ = ANY4 if "." in format_addr(address) else ANY6
    for at in (address, any_):
        value = held.frontends.get(FrontendAddress(Addr(at), port, one.protocol))
        if value is not None:
            return value.id
    return 0


def _row(one: Connection, service: str) -> ConnectionRow:
    return ConnectionRow(
        service=service,
        protocol=one.protocol.name,
        client=format_endpoint(*one.client),
        frontend=format_endpoint(*one.frontend),
        backend=format_endpoint(*one.server),
        seen_as="",
        masqueraded=False,
        state=STATES.get(one.state, one.state.lower()),
        idle_seconds=None,
        expires_seconds=one.expires,
        expired=False,
        lost=(),
        replaced=False,
        way="ipvs",
        device="",
    )
