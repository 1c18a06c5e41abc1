# SPDX-License-Identifier: Apache-2.0
"""What a data plane shows of itself: the values that the views of `kbpf inspect` are built from.

Both data planes fill them (dataplane/bpf/inspect, dataplane/ipvs/ipvs_inspect.py), from the kernel
and from what the agent has stored, so they exist while the agent is down. Ids are those of the BPF
maps; IPVS has none.
"""

import contextlib
import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from typing import NamedTuple, Protocol

import msgspec

from kbpf.errors import NotFoundError, ObjectError
from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import SocketLb
from kbpf.model.desired import Backend, FrontendAddress, FrontendKind, ServicePortKey
from kbpf.model.metrics import ConnectionStats, ServiceLatencies
from kbpf.model.objects import ELLIPSIS, Algorithm, Cidr
from kbpf.model.reasons import Reason
from kbpf.model.status import AgentStatus, PacketStatus


class Part(Flag):
    """Which parts to read. Each view names its own, since walking large maps is expensive."""

    SERVICES = auto()
    AFFINITY = auto()
    MAPS = auto()
    HOOKS = auto()
    STATUS = auto()
    NAMES = auto()
    CONNECTIONS = auto()
    FILL = auto()
    PACKETS = auto()
    DEVICES = auto()
    RANGES = auto()
    TRAFFIC = auto()
    KUBE_PROXY = auto()
    FAILURES = auto()
    ENDPOINTS = auto()


# ---- Services ------------------------------------------------------------------------------------


class BackendEntry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A backend; one object for each. `backend` is None if something has its id, but it does not
    exist.
    """

    id: int | None
    backend: Backend | None


class BackendSet(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A backend set with `size` slots. A slot that should exist may be missing in `slots`."""

    id: int | None
    size: int
    slots: Mapping[int, BackendEntry]

    def shares(self) -> dict[Backend, float]:
        """The part of the slots that each backend has (0 to 1), sorted by backend."""
        counts = Counter(entry.backend for entry in self.slots.values() if entry.backend)
        return {backend: counts[backend] / self.size for backend in sorted(counts)}


EMPTY_SET = BackendSet(0, 0, {})


def describe_conditions(ready: bool, serving: bool, terminating: bool) -> str:
    """The state of an endpoint: ``ready``, ``not ready``, ``terminating, serving``, ..."""
    if terminating:
        conditions = [(ready, "ready"), (True, "terminating"), (serving, "serving")]
        return ", ".join(text for is_true, text in conditions if is_true)
    if ready:
        return "ready"
    return "not ready, serving" if serving else "not ready"


class EndpointEntry(msgspec.Struct, frozen=True, gc=False):
    """What the EndpointSlices say of an endpoint of a Service port, whether it is a backend or not.
    `pod` is ``namespace/name``. The texts are "" if the slice does not have them; long ones are cut
    in the middle (ELLIPSIS). `at_node`: its address is that of another Node, so it is a Pod with
    hostNetwork, or none.
    """

    backend: Backend
    pod: str = ""
    node: str = ""
    zone: str = ""
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    at_node: bool = False

    @property
    def state(self) -> str:
        return describe_conditions(self.ready, self.serving, self.terminating)

    def is_pod(self, name: str, namespace: str = "") -> bool:
        """Whether it is the Pod of this name, in this namespace or, if that is "", in any."""
        pod_namespace, _, pod_name = self.pod.partition("/")
        if not pod_name or namespace not in ("", pod_namespace):
            return False
        head, ellipsis, tail = pod_name.partition(ELLIPSIS)
        if not ellipsis:
            return name == pod_name
        return len(name) > len(head + tail) and name.startswith(head) and name.endswith(tail)


class FrontendEntry(msgspec.Struct, frozen=True, gc=False):
    """A frontend. `kind` is None if its entry is inconsistent. In IPVS it has one set, that of the
    policy that applies to it; the other one is empty.
    """

    at: FrontendAddress
    kind: FrontendKind | None
    restricted: bool
    cluster: BackendSet
    local: BackendSet

    def __str__(self) -> str:
        """``10.96.0.1:80/TCP``, ``[fd00::1]:80/TCP``, or ``*:30080/TCP`` of a NodePort."""
        is_node_port = self.kind is FrontendKind.NODE_PORT
        return f"*:{self.at.port}/{self.at.protocol.name}" if is_node_port else str(self.at)

    def is_at(self, address: Addr | None, port: int) -> bool:
        """See ServicePort.is_at()."""
        if address is None:
            return self.kind is FrontendKind.NODE_PORT and self.at.port == port
        places = {self.at} | {
            entry.backend
            for backends in (self.cluster, self.local)
            for entry in backends.slots.values()
            if entry.backend is not None
        }
        return any(place.address == address and port in (0, place.port) for place in places)


class BackendTraffic(msgspec.Struct, frozen=True, gc=False):
    """Connections of a Service port to one backend: `open` ones, and totals. If they are not of one
    backend, `scope` is ``none`` (they got no backend), ``gone`` (all removed ones) or ``all``.
    `id`: the backend's; None in mode ipvs.
    """

    id: int | None
    backend: Backend | None
    scope: str
    open: int
    totals: ConnectionStats


class ServicePort(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A Service port in one IP family. `key` is None if its id has no name. It has no `frontends`
    if they were not read, or are gone. `latencies`: None if none were measured. `any_endpoints`:
    some node has one that serves. `endpoints`: all that are known; none if they were not read.
    """

    id: int | None
    key: ServicePortKey | None
    frontends: tuple[FrontendEntry, ...] = ()
    internal_local: bool = False
    external_local: bool = False
    algorithm: Algorithm = Algorithm.RANDOM
    affinity_timeout: int = 0
    source_ranges: tuple[Cidr, ...] = ()
    traffic: tuple[BackendTraffic, ...] = ()
    latencies: ServiceLatencies | None = None
    any_endpoints: bool = False
    endpoints: Mapping[Backend, EndpointEntry] = {}

    @property
    def text(self) -> str:
        """``namespace/name:port``, or the bare id without a name."""
        if self.key is None:
            return f"id {self.id}, not named"
        return f"{self.key.service}:{self.key.port}" if self.key.port else str(self.key.service)

    def belongs_to(self, name: str, namespace: str) -> bool:
        """Whether it is a port of the Service with this name, in this namespace or, if that is "",
        in any.
        """
        key = self.key
        return key is not None and key.name == name and namespace in ("", key.namespace)

    def is_at(self, address: Addr | None, port: int) -> bool:
        """Whether a frontend or a backend has this address and port (0: any). Without an address:
        whether a NodePort has this port.
        """
        return any(frontend.is_at(address, port) for frontend in self.frontends) or any(
            endpoint.address == address and port in (0, endpoint.port) for endpoint in self.endpoints
        )

    def has_pod(self, name: str, namespace: str) -> bool:
        """Whether an endpoint is this Pod; see EndpointEntry.is_pod()."""
        return any(entry.is_pod(name, namespace) for entry in self.endpoints.values())


@dataclass(frozen=True, slots=True)
class AffinityEntry:
    """A client's affinity. The client has an address, or else it is a process in the network
    namespace with this cookie. `last_used` is in seconds of CLOCK_MONOTONIC.
    `cgroup`: the low half of the id of the cgroup of the process that connected last; 0: a packet.
    `pod`: ``namespace/name``, or ``uid UID``, of the client, "" if it is not known.
    """

    client: Addr | None
    netns: int
    service: ServicePort
    backend: BackendEntry
    last_used: float
    cgroup: int = 0
    pod: str = ""


# ---- failures ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FailureEntry:
    """Connections of one client that failed in the same way. `first` and `last` are in seconds of
    CLOCK_MONOTONIC.

    - `client`: the address of the last one; None if its socket had none yet.
    - `cgroup`: id of the cgroup of the socket; 0: a packet failed. `cgroup_path`: its path below
      the root of cgroup v2; "" if it is gone or not visible. `pod`: ``namespace/name``, or
      ``uid UID``, of its Pod; "" if it is none.
    - `backend`: None if none was chosen.
    """

    first: float
    last: float
    count: int
    reason: Reason
    service: ServicePort
    frontend: FrontendAddress
    backend: Backend | None
    client: Addr | None
    cgroup: int
    cgroup_path: str = ""
    pod: str = ""


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """What a program has just decided about a connection or datagram flow, or how one has failed.
    `time` is in seconds since 1970; `client`: None if its socket had no address yet. `backend_pod`:
    ``namespace/name``; "" if it is not known. The other fields are those of FailureEntry.
    """

    time: float
    reason: Reason
    service: ServicePort
    frontend: FrontendAddress
    backend: Backend | None
    client: FrontendAddress | None
    cgroup: int
    cgroup_path: str = ""
    pod: str = ""
    backend_pod: str = ""


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events to show. None: all.

    - `services`: ids of Service ports; `frontends`: addresses of these Services, at which an event
      may have no Service (a port that does not exist).
    - `address`: of the client, the frontend or the backend, and `port` of the same (0: any).
    - `cgroups`: ids of the client's cgroup.
    """

    reasons: frozenset[Reason] = frozenset(Reason)
    services: frozenset[int] | None = None
    frontends: frozenset[Addr] = frozenset()
    address: Addr | None = None
    port: int = 0
    cgroups: frozenset[int] | None = None

    def admits(self, event: ConnectionEvent) -> bool:
        """Whether the event passes all of them."""
        return (
            event.reason in self.reasons
            and self._admits_service(event)
            and (self.cgroups is None or event.cgroup in self.cgroups)
            and (self.address is None or any(map(self._is_at, _ends(event))))
        )

    def _admits_service(self, event: ConnectionEvent) -> bool:
        if self.services is None:
            return True
        if not event.service.id:
            return event.frontend.address in self.frontends
        return event.service.id in self.services

    def _is_at(self, end: FrontendAddress | Backend) -> bool:
        return end.address == self.address and self.port in (0, end.port)


def _ends(event: ConnectionEvent) -> Iterable[FrontendAddress | Backend]:
    return (end for end in (event.client, event.frontend, event.backend) if end is not None)


# ---- connections ---------------------------------------------------------------------------------


class Connection(msgspec.Struct, frozen=True, gc=False):
    """One connection. Addresses are ``address:port``.

    `seen_as`: the source that the backend sees: the node's (`masqueraded`) or the client's. The
    client's port may be changed if two connections would look the same to the backend.

    `state`, a ConnectionState: new (no reply yet), answered (the backend replied with a
    SYN-ACK, an INIT-ACK or a datagram), unproven (TCP: the client completed the handshake, the
    backend has not confirmed it), established, closing (FIN from one side), closed (FINs from both,
    or RST).

    `expires_seconds` is negative once the connection has expired (`expired`): its packets are no
    longer translated, and its entries stay until their space is needed. `lost`: entries that are
    missing because other connections use their keys: ``flow``, ``reply`` or ``source``.
    `replaced`: these are the remaining entries of a connection whose client began a new one from
    the same port.

    `path`: ``stack``: through the node's network stack; ``direct``: from device to device;
    ``ipvs``: by IPVS, which knows neither the idle time (`idle_seconds` is None) nor the source
    that the backend sees (`seen_as` is ""). `device`: the client is this node itself and sends
    through that device; otherwise "".

    `client_pod`, `backend_pod`: ``namespace/name``, and `backend_node` its node; "" if they are not
    known.
    """

    service: str
    protocol: str
    client: str
    frontend: str
    backend: str
    seen_as: str
    masqueraded: bool
    state: str
    idle_seconds: float | None
    expires_seconds: float
    expired: bool
    lost: tuple[str, ...]
    replaced: bool
    path: str
    device: str
    client_pod: str = ""
    backend_pod: str = ""
    backend_node: str = ""


class ConnectionState(StrEnum):
    """See Connection."""

    NEW = "new"
    ESTABLISHED = "established"
    CLOSING = "closing"
    CLOSED = "closed"
    ANSWERED = "answered"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class ConnectionQuery:
    """The connections to show, by Service (NAME or NAMESPACE/NAME), client address, backend address
    and state. None and "" match all. `expired`: include expired ones.
    """

    service: str = ""
    client: Addr | None = None
    backend: Addr | None = None
    state: str = ""
    expired: bool = False


class ConnectionPage(NamedTuple):
    """The `total` matching connections, sorted by Service, then by client.
    `expired_count`: how many expired ones were left out.
    """

    rows: Iterable[Connection]
    total: int
    expired_count: int


class Connections(Protocol):
    """The connections that a data plane tracks. There may be a hundred thousand, so they become
    values only when they are shown.
    """

    def find(self, query: ConnectionQuery) -> ConnectionPage:
        """Those that match. Raises NotFoundError if the Service of the query is not programmed."""


class TranslatedSource(msgspec.Struct, frozen=True, gc=False):
    """One translated source: the backend sees `source` (``address:port``) instead of `client`."""

    source: str
    backend: str
    protocol: str
    client: str
    service: str
    state: str
    idle_seconds: float
    client_pod: str = ""


class SnatUsage(NamedTuple):
    """The `used` ports of one node address towards one backend and protocol. Connections to
    different backends may use the same port. `closed` of them belong to closed connections and are
    reused if no other is free.
    """

    backend: str
    protocol: str
    node_address: str
    used: int
    closed: int


class TranslatedConnections(Protocol):
    """The unexpired connections with SNAT."""

    def __len__(self) -> int: ...

    def sources(self) -> Iterable[TranslatedSource]:
        """All of them, sorted by backend, then by translated source."""

    def usage(self) -> Iterable[SnatUsage]:
        """The ports in use, by backend, protocol and node address."""


class Fill(NamedTuple):
    """How full the table of connections is: all (`entries`), the open ones, those of the open ones
    that must not be evicted, and the limit (`max_connections`).
    """

    entries: int
    open: int
    needed: int
    max_connections: int


# ---- the kernel ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MapEntry:
    """A map as seen by the kernel.

    - `entries`: used entries; None if they cannot be counted. `has_fill`: their share of
      `max_entries` says how full the map is.
    - `bytes`: memory that the kernel charges for it; None if unknown.
    """

    name: str
    type: str
    entries: int | None
    max_entries: int
    has_fill: bool
    bytes: int | None
    purpose: str


@dataclass(frozen=True, slots=True)
class HookEntry:
    """A socket hook and what is attached there.

    - `link`: None if no link is pinned. `cgroup_id` is 0 if its cgroup was deleted.
    - `program`: the link's; `tag` and `instructions` are "" and None if it was unloaded.
    - `cgroup`: the path of the cgroup; "" if it is not visible in this mount namespace.
    - `tracepoint`: where it is attached instead of a cgroup; "" for all other hooks.
    """

    name: str
    purpose: str
    required: bool
    only_counts: bool
    tracepoint: str = ""
    link: int | None = None
    program: int | None = None
    tag: str = ""
    instructions: int | None = None
    pinned: bool = False
    cgroup_id: int | None = None
    cgroup: str = ""

    @property
    def attached(self) -> bool:
        """Whether the hook runs for sockets."""
        return bool(self.cgroup_id) or (bool(self.tracepoint) and self.link is not None)


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """The node's addresses for SNAT and the range of ports for it, both included; `last_port` is 0
    if there is none. `pods`: how clients are recognized as pods of this node: by ``devices``, by
    ``networks``, or "". `forwarding`: ``stack``, ``direct`` or ``netfilter``. `masquerades_all`:
    also connections of pods to ClusterIPs.
    """

    addresses: tuple[Addr, ...] = ()
    first_port: int = 0
    last_port: int = 0
    pods: str = ""
    forwarding: str = "stack"
    masquerades_all: bool = False

    @property
    def ports(self) -> int:
        """The number of ports for SNAT."""
        return self.last_port - self.first_port + 1 if self.last_port else 0


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A device that the packet path knows. `role` is ``host``, ``pod`` or ``port``, `header` the
    length of its link-layer header. `pods`: its packets come from pods of this node. `peer`:
    bpf_redirect_peer() reaches the pod through it. `tunnel`: it encapsulates IP packets in IP, and
    its packets take the stack.
    """

    role: str
    header: int
    pods: bool
    peer: bool
    tunnel: bool = False


@dataclass(frozen=True, slots=True)
class HostDevice:
    """A device of this network namespace. `role`: ``host``, ``pod``, ``port`` or ``skipped``, and
    `reason` why. `ingress` and `egress`: our programs and how they are attached, "" if there are
    none.
    """

    name: str
    ifindex: int
    kind: str
    role: str
    reason: str
    ingress: str
    egress: str


class Route(NamedTuple):
    """Where a packet goes next on this node. `error`: why the kernel does not forward it; ""
    otherwise. `gateway`: None if the destination is a neighbour. `source`: the address that a
    packet of this node would get. `is_local`: the packet is for this node.
    """

    ifindex: int = 0
    device: str = ""
    gateway: Addr | None = None
    source: Addr | None = None
    is_local: bool = False
    error: str = ""


# ---- differences ---------------------------------------------------------------------------------


class DifferenceKind(StrEnum):
    """How the kernel differs from what it should be.

    MISSING: not there. CHANGED: there, with another value. STALE: kbpf's, and no longer needed.
    FOREIGN: of another program, or of no Service port. DAMAGED: such as no agent writes.
    UNREACHED: all is there, and a connection or packet did not get through.
    """

    MISSING = "missing"
    CHANGED = "changed"
    STALE = "stale"
    FOREIGN = "foreign"
    DAMAGED = "damaged"
    UNREACHED = "unreached"


class Difference(msgspec.Struct, frozen=True):
    """One difference between what the kernel should have and what it has.

    `where`: a map, a hook, or ``devices``. `subject`: what it is about, a Service port if it is
    one. `desired`, `actual`: "" if there is nothing. `advice`: what to do.
    """

    kind: DifferenceKind
    where: str
    subject: str
    desired: str = ""
    actual: str = ""
    advice: str = ""


class Verification(msgspec.Struct, frozen=True):
    """What `kbpf verify` compared. The differences are the items.

    - `total`: the number of differences, also of those that `--limit` leaves out; `equal`: there is
      none.
    - `service_ports`: desired Service ports; `entries`: entries of maps.
    - `proven`: connections and packets that got through.
    - `readings`: how often everything was read.
    - `changing`: what changed in each of the readings, so that nothing is said about it.
    - `notes`: a line for each part that could not be compared, and why.
    """

    equal: bool
    total: int
    service_ports: int
    entries: int
    proven: int
    readings: int
    changing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Finding(NamedTuple):
    """A difference, and the Service port whose objects decide about it; None: no single one."""

    owner: ServicePortKey | None
    difference: Difference


# ---- all of it -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inspection:
    """The parts that were requested; the others have their defaults.

    - `location`: where it was read: the pin folder, or in mode ipvs the state folder.
    - `monotonic`, `boottime`: when reading ended (CLOCK_MONOTONIC, CLOCK_BOOTTIME, seconds).
    - `node_port_addresses`: addresses of this node that serve NodePorts; `localhost_node_ports`:
      whether its loopback does. `node_port_ranges`: the source ranges of all NodePorts.
    - `node_ports`: the families in which NodePorts answer on some address of this node; None if
      that was not read.
    - `host_netns`: the cookie of the node's own network namespace.
    - `kube_proxy`: a line about a kube-proxy on this node, or about its rules; "" if none is.
    - `hooks_fail`: whether the hooks can make connect() fail with an errno (Linux v5.18);
      otherwise packets decide what they would refuse or drop.
    - `socket_lb`: which sockets the hooks serve; `exempt_ids`: the cgroups whose sockets they
      do not.
    - `agent_alive`: whether a process with the agent's pid exists.
    - `packet_programs`: whether programs of the packet path are pinned.
    - `devices`: by ifindex.
    - `counted`: the fields of ConnectionStats that are counted as configured.
    - `lists_sockets`: whether the kernel lists the sockets of the hooks. If not, the numbers of
      open connections are those of the packet path only.
    - `pods`: see index_pods().
    """

    location: str
    mode: str = "bpf"
    monotonic: float = 0.0
    boottime: float = 0.0
    services: tuple[ServicePort, ...] = ()
    backends: tuple[BackendEntry, ...] = ()
    node_ports: frozenset[int] | None = None
    node_port_addresses: frozenset[Addr] = frozenset()
    localhost_node_ports: bool = False
    node_port_ranges: tuple[Cidr, ...] = ()
    host_netns: int = 0
    affinity: tuple[AffinityEntry, ...] = ()
    failures: tuple[FailureEntry, ...] = ()
    maps: tuple[MapEntry, ...] = ()
    hooks: tuple[HookEntry, ...] = ()
    hooks_fail: bool = True
    socket_lb: SocketLb = SocketLb.ON
    exempt_ids: frozenset[int] = frozenset()
    kube_proxy: str = ""
    reasons: Mapping[Reason, int] = field(default_factory=dict)
    status: AgentStatus | None = None
    agent_alive: bool = False
    packet_programs: bool = False
    connections: Connections | None = None
    translated: TranslatedConnections | None = None
    fill: Fill | None = None
    node: NodeEntry = NodeEntry()
    devices: Mapping[int, DeviceEntry] = field(default_factory=dict)
    host_devices: tuple[HostDevice, ...] = ()
    local_networks: tuple[Cidr, ...] = ()
    counted: frozenset[str] = frozenset()
    lists_sockets: bool = True
    pods: Mapping[Addr, str] = field(default_factory=dict)

    @property
    def silence(self) -> float:
        """For how long, in seconds, the agent has written no status; without one since the boot."""
        return self.boottime - (self.status.heartbeat if self.status is not None else 0.0)

    @property
    def packet_status(self) -> PacketStatus | None:
        """What the agent reported last of the packet path."""
        return self.status.packets if self.status is not None else None


def index_pods(ports: Iterable[ServicePort], node_addresses: Collection[Addr]) -> dict[Addr, str]:
    """Address → ``namespace/name`` of the Pod behind a Service that has it. Left out are addresses
    of Nodes, which Pods with hostNetwork share, and those of several Pods.
    """
    pods: dict[Addr, str] = {}
    for port in ports:
        for backend, entry in port.endpoints.items():
            if entry.at_node:
                continue
            if entry.pod and pods.setdefault(backend.address, entry.pod) != entry.pod:
                pods[backend.address] = ""
    return {address: pod for address, pod in pods.items() if pod and address not in node_addresses}


def find_ports(ports: Iterable[ServicePort], query: str, location: str, namespace: str = "") -> tuple[ServicePort, ...]:
    """The ports of a Service: by NAME or NAMESPACE/NAME, by an address (``IP`` or ``IP:PORT``) of a
    frontend or an endpoint, by a NodePort (``:PORT``), or by NAME or NAMESPACE/NAME of a Pod behind
    it, if no Service has that name. Raises NotFoundError, which suggests similar names, if there is
    none.
    """
    ports = tuple(ports)
    if place := parse_place(query):
        found = tuple(port for port in ports if port.is_at(*place))
        what, hint = f"no Service or backend has {query}", "`kbpf inspect services` lists all"
    else:
        query_namespace, _, name = query.rpartition("/")
        namespace = query_namespace or namespace
        found = tuple(port for port in ports if port.belongs_to(name, namespace))
        found = found or tuple(port for port in ports if port.has_pod(name, namespace))
        full_name = f"{namespace}/{name}" if namespace else name
        what, hint = f"no Service {full_name} is programmed", _suggest(name, ports)
        if any(port.endpoints for port in ports):
            what += ", and no Pod of this name is behind one"
    if not found:
        raise NotFoundError(what, location, hint)
    return found


def select_ports(ports: Iterable[ServicePort], query: str, namespace: str, location: str) -> tuple[ServicePort, ...]:
    """The ports that find_ports() finds; without a query all of the namespace, and without either
    all.
    """
    if query:
        return find_ports(ports, query, location, namespace)
    return tuple(port for port in ports if not namespace or (port.key is not None and port.key.namespace == namespace))


def parse_place(text: str) -> tuple[Addr | None, int] | None:
    """Address and port (0: any) of ``IP``, ``IP:PORT`` or ``:PORT``, which has no address; None if
    the text is none of these.
    """
    host, colon, number = text.rpartition(":")
    if colon and number.isascii() and number.isdigit() and len(number) <= 5:
        if not host:
            return None, int(number)
        if host.startswith("[") == (":" in host):
            with contextlib.suppress(ObjectError):
                return parse_addr(host.strip("[]")), int(number)
    with contextlib.suppress(ObjectError):
        return parse_addr(text), 0
    return None


def _suggest(name: str, ports: Iterable[ServicePort]) -> str:
    by_name: dict[str, set[str]] = {}
    for port in ports:
        if port.key is not None:
            by_name.setdefault(port.key.name, set()).add(str(port.key.service))
        for entry in port.endpoints.values():
            if entry.pod:
                by_name.setdefault(entry.pod.partition("/")[2], set()).add(entry.pod)
    close_names = difflib.get_close_matches(name, by_name, n=3, cutoff=0.5)
    close_names += sorted(candidate for candidate in by_name if name in candidate and candidate not in close_names)[:3]
    suggestions = [full_name for candidate in close_names for full_name in sorted(by_name[candidate])]
    if suggestions:
        return f"did you mean {' or '.join(suggestions[:5])}?"
    return "`kbpf inspect services` lists all" if by_name else "no Service is programmed at all"
