# SPDX-License-Identifier: Apache-2.0
"""Reads the pins of an agent once, into a frozen snapshot from which all views are built.

Only pinned maps, links and programs are read, so this works while the agent is down. Reading goes
in the reverse order of writing (changes/plan.py): first the frontends, then their sets and
backends, which stay for a grace period after a flip. So each frontend is seen with a complete set.
"""

import contextlib
import errno
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from pathlib import Path
from typing import Any, Final

from kbpf.dataplane.bpf.changes.adopt import address_of, is_valid_entry
from kbpf.dataplane.bpf.inspect import hooks, tracked_connections
from kbpf.dataplane.bpf.inspect.hooks import HookFacts
from kbpf.dataplane.bpf.inspect.tracked_connections import Fill, TrackedConnection
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import (
    AFFINITY,
    AFFINITY_KEY,
    CONFIG,
    DEVICE,
    MAPS,
    NODE,
    U32,
    U32_PAIR,
    ClientKind,
    ConfigFlag,
    DeviceFlag,
    NodeFlag,
    Role,
    ServiceValue,
    unpack_network,
    unpack_service_name,
    unpack_source_range,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.metrics import (
    COUNTED_MAPS,
    SOCKET_STORAGE_MAPS,
    ConnectionCount,
    IdPair,
    read_totals,
)
from kbpf.dataplane.bpf.udp import unpack_backend
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel.bpf import uapi
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr, family_of
from kbpf.model.config import SocketLb
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey
from kbpf.model.metrics import ALL_COUNTERS, CONNECTION_COUNTERS, ConnectionStats
from kbpf.model.objects import Cidr
from kbpf.model.reasons import Reason
from kbpf.model.status import AgentStatus, decode

ZERO: Final = U32.pack(0)
NO_FLAGS: Final = NodeFlag(0)
# An array has all its entries from the start, so their number says nothing.
COUNTABLE_TYPES: Final = (
    uapi.BPF_MAP_TYPE_HASH,
    uapi.BPF_MAP_TYPE_LRU_HASH,
    uapi.BPF_MAP_TYPE_LPM_TRIE,
)


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
    RANGES = auto()
    TRAFFIC = auto()


@dataclass(frozen=True, slots=True)
class AffinityEntry:
    """One entry of the map `affinity`. `last_used` is in seconds of CLOCK_MONOTONIC."""

    client: Addr
    kind: int
    service: int
    backend: int
    last_used: float

    @property
    def cookie(self) -> int:
        """The netns cookie of the client (ClientKind.NETNS): word[0] and word[1] of the key, in the
        byte order of the kernel (little-endian).
        """
        return int.from_bytes(self.client[:8], "little")


@dataclass(frozen=True, slots=True)
class MapFacts:
    """A map as seen by the kernel.

    - `kind`: BPF_MAP_TYPE_*.
    - `entries`: used entries; None if they cannot be counted.
    - `bytes`: memory that the kernel charges for it; None if unknown.
    """

    name: str
    kind: int
    entries: int | None
    max_entries: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """The map `node`. `addresses`: the node's addresses for SNAT; `first_port` and `last_port`: the
    range of ports for SNAT, both included, in host byte order.
    """

    addresses: tuple[Addr, ...] = ()
    flags: NodeFlag = NO_FLAGS
    first_port: int = 0
    last_port: int = 0

    @property
    def ports(self) -> int:
        """The number of ports for SNAT."""
        return self.last_port - self.first_port + 1 if self.last_port else 0


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """An entry of the map `devices`. `header`: length of the link-layer header, 14 or 0."""

    role: Role
    header: int
    flags: DeviceFlag
    mac: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The parts that were requested; the others have their defaults.

    - `began`, `monotonic`: when reading began and when it ended (CLOCK_MONOTONIC, seconds).
    - `boottime`: when reading ended (CLOCK_BOOTTIME, seconds).
    - `names`: service id → Service port.
    - `sets`: set id → {index: backend id}; `backends`: backend id → address.
    - `node_ports`: the families in which NodePorts answer on some address of this node; None if
      that was not read.
    - `host_netns`: the cookie of the node's own network namespace.
    - `socket_lb`: which sockets the hooks serve; `exempt_cgroups`: the number of cgroups whose
      sockets they do not.
    - `agent_alive`: whether a process with the agent's pid exists.
    - `packet_programs`: whether programs of the packet path are pinned.
    - `connections`: by IDENTITY (tracked_connections.py); `fill`: their number and limit.
    - `devices`: by ifindex.
    - `ranges`: source ranges as (service id, network).
    - `totals`: traffic, and `open`: the number of open connections, both by the ids of a Service
      port and a backend. `counted`: the fields of `totals` that the programs count as configured.
    """

    pin_dir: Path
    monotonic: float = 0.0
    boottime: float = 0.0
    frontends: Mapping[FrontendAddress, ServiceValue] = field(default_factory=dict)
    names: Mapping[int, ServicePortKey] = field(default_factory=dict)
    sets: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    backends: Mapping[int, Backend] = field(default_factory=dict)
    node_ports: frozenset[int] | None = None
    host_netns: int = 0
    affinity: tuple[AffinityEntry, ...] = ()
    maps: tuple[MapFacts, ...] = ()
    hooks: tuple[HookFacts, ...] = ()
    socket_lb: SocketLb = SocketLb.ON
    exempt_cgroups: int = 0
    reasons: Mapping[Reason, int] = field(default_factory=dict)
    status: AgentStatus | None = None
    agent_alive: bool = False
    began: float = 0.0
    packet_programs: bool = False
    connections: Mapping[bytes, TrackedConnection] = field(default_factory=dict)
    fill: Fill | None = None
    node: NodeEntry = NodeEntry()
    devices: Mapping[int, DeviceEntry] = field(default_factory=dict)
    local_networks: tuple[Cidr, ...] = ()
    ranges: tuple[tuple[int, Cidr], ...] = ()
    totals: Mapping[IdPair, ConnectionStats] = field(default_factory=dict)
    counted: frozenset[str] = frozenset()
    open: Mapping[IdPair, int] = field(default_factory=dict)


class TableSlots(Mapping[int, int]):
    """The slots of a set that has a table: index → backend id. Nothing is copied, since many sets
    may share one large table.
    """

    def __init__(self, table: Mapping[int, int], backends: Mapping[int, int]) -> None:
        self._table, self._backends = table, backends

    def __getitem__(self, index: int) -> int:
        return self._backends[self._table[index]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def read(pin_dir: Path, parts: Part) -> Snapshot:
    """Reads these parts. Raises NotFoundError if nothing is pinned there, and KernelError if it
    cannot be read.
    """
    pins = find_pins(pin_dir)
    values: dict[str, Any] = {"began": time.monotonic()}
    with open_maps(pins) as maps:
        if parts & (Part.SERVICES | Part.AFFINITY):
            values |= _read_services(maps)
        if Part.NAMES in parts:
            values |= _read_names(maps)
        if Part.AFFINITY in parts:
            values["affinity"] = tuple(_read_affinity(maps["affinity"]))
        if Part.MAPS in parts:
            values["maps"] = tuple(_read_map_facts(name, map_) for name, map_ in maps.items())
        if Part.HOOKS in parts:
            values |= _read_socket_lb(maps)
        if Part.STATUS in parts:
            status = decode(maps["agent_status"].lookup(ZERO) or b"")
            values["status"] = status
            values["agent_alive"] = status is not None and is_alive(status.pid)
            values["reasons"] = _read_reasons(maps["reasons"])
        if Part.CONNECTIONS in parts:
            values["connections"] = tracked_connections.read(maps["flows"])
        if Part.FILL in parts:
            values["fill"] = tracked_connections.measure_fill(maps["flows"], time.monotonic())
        if Part.PACKETS in parts:
            values |= _read_packet_path(maps)
            # Published folders only: one that is still being filled is named `new-programs-...`.
            values["packet_programs"] = any(pins.root.glob("programs-tc-*"))
        if Part.RANGES in parts:
            values["ranges"] = tuple(
                sorted(unpack_source_range(k) for k, _ in maps["source_ranges"].items())
            )
        if Part.TRAFFIC in parts:
            values |= _read_traffic(maps)
    if Part.HOOKS in parts:
        values["hooks"] = tuple(hooks.read(pins))
    # After reading, so that no time in a map is later than these, and no age is negative. The
    # maps have CLOCK_MONOTONIC, the agent's status has CLOCK_BOOTTIME.
    return Snapshot(pin_dir, time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), **values)


def find_pins(pin_dir: Path) -> Pins:
    """The pins of an agent. Raises NotFoundError, with a hint at the likely reason, if there are
    none.
    """
    pins = Pins(pin_dir)
    hint = "is `kbpf run` running on this node, and with this --pin-dir?"
    try:
        names = [path.name for path in pinning.list_pin_folder(pin_dir)]
    except FileNotFoundError:
        raise NotFoundError(
            "nothing is pinned: there is no such folder", str(pin_dir), hint
        ) from None
    if pins.maps.name in names:
        return pins
    # A folder of maps is named after its layout: another version may have another one.
    if any(name.startswith("maps-") for name in names):
        hint = "use the kbpf that runs as the agent, or restart the agent with this one"
        raise NotFoundError("another version of kbpf has pinned its maps", str(pin_dir), hint)
    raise NotFoundError("no maps are pinned", str(pin_dir), hint)


@contextlib.contextmanager
def open_maps(pins: Pins) -> Iterator[dict[str, Map]]:
    """Opens all maps for the duration of the block. Raises NotFoundError if one is missing."""
    with contextlib.ExitStack() as stack:
        maps = {}
        for name, spec in MAPS.items():
            try:
                maps[name] = stack.enter_context(pinning.open_map(pins.maps / name, spec))
            except KernelError as error:
                if error.errno != errno.ENOENT:
                    raise
                hint = "its pin was removed: run `kbpf cleanup`, then start the agent again"
                raise NotFoundError(f"the map {name} is missing", str(pins.maps), hint) from error
        yield maps


def _u32(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _valid_entries(maps: Mapping[str, Map], name: str) -> Iterator[tuple[bytes, bytes]]:
    """Entries that are not corrupt. The agent reports and removes corrupt ones when it starts."""
    return ((key, raw) for key, raw in maps[name].items() if is_valid_entry(name, key, raw))


def _read_services(maps: Mapping[str, Map]) -> dict[str, Any]:
    # Frontends, then slots, then backends: see the module on this order.
    frontends = {
        address_of(key): ServiceValue.unpack(raw) for key, raw in _valid_entries(maps, "services")
    }
    # Sets and tables share one map and one range of ids.
    sets: dict[int, dict[int, int]] = {}
    for key, raw in maps["backend_slots"].items():
        set_id, index = U32_PAIR.unpack(key)
        sets.setdefault(set_id, {})[index] = _u32(raw)
    # A set with a table has one slot for each slot of the table, which holds an index into the set.
    set_tables = {(value.cluster_set, value.cluster_table) for value in frontends.values()}
    set_tables |= {(value.local_set, value.local_table) for value in frontends.values()}
    by_table = {set_id: sets.get(table, {}) for set_id, table in set_tables if table}
    return {
        "frontends": frontends,
        "sets": {i: TableSlots(by_table[i], s) if i in by_table else s for i, s in sets.items()},
        "backends": {
            _u32(key): unpack_backend(raw) for key, raw in _valid_entries(maps, "backends")
        },
        "node_ports": _read_node_port_families(maps),
        **_read_names(maps),
    }


def _read_node_port_families(maps: Mapping[str, Map]) -> frozenset[int]:
    """The families in which NodePorts answer: both if they answer on loopback."""
    _, flags, *_ = CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))
    if ConfigFlag.LOCALHOST_NODE_PORTS in ConfigFlag(flags):
        return frozenset((4, 6))
    return frozenset(family_of(Addr(key)) for key, _ in maps["node_addresses"].items())


def _read_names(maps: Mapping[str, Map]) -> dict[str, Any]:
    return {
        "names": {
            _u32(key): unpack_service_name(raw)
            for key, raw in _valid_entries(maps, "service_names")
        },
        "host_netns": CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))[0],
    }


def _read_packet_path(maps: Mapping[str, Map]) -> dict[str, Any]:
    raw = maps["node"].lookup(ZERO) or bytes(NODE.size)
    own4, own6, flags, first_port, last_port, *_ = NODE.unpack(raw)
    return {
        "node": NodeEntry(
            # zeros: the node has no address of this family
            tuple(Addr(address) for address in (own4, own6) if any(address)),
            NodeFlag(flags),
            first_port,
            last_port,
        ),
        "devices": {_u32(k): _decode_device(raw) for k, raw in maps["devices"].items()},
        "local_networks": tuple(
            sorted(unpack_network(key) for key, _ in maps["local_networks"].items())
        ),
        "host_netns": CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))[0],
    }


def _read_traffic(maps: Mapping[str, Map]) -> dict[str, Any]:
    connection_count, totals = ConnectionCount(), dict[IdPair, ConnectionStats]()
    for name in COUNTED_MAPS:
        # Only a kernel with BTF can list socket storage. Without it, these connections are left
        # out, and the others are shown.
        with (
            contextlib.suppress(KernelError)
            if name in SOCKET_STORAGE_MAPS
            else contextlib.nullcontext()
        ):
            for _ in connection_count.add(maps[name], True):
                pass
    for _ in read_totals(maps["counts"], totals):
        pass
    return {"open": connection_count.pairs, "totals": totals, "counted": _read_counted(maps)}


def _read_counted(maps: Mapping[str, Map]) -> frozenset[str]:
    """The fields of ConnectionStats that the programs count as they are configured now."""
    _, raw, _ = CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))
    if ConfigFlag.COUNT_CONNECTION_ENDS in ConfigFlag(raw):
        return ALL_COUNTERS
    return CONNECTION_COUNTERS if ConfigFlag.ACCOUNTING in ConfigFlag(raw) else frozenset()


def _decode_device(raw: bytes) -> DeviceEntry:
    role, header, flags, mac, *_ = DEVICE.unpack(raw)
    return DeviceEntry(Role(role), header, DeviceFlag(flags), mac)


def _read_socket_lb(maps: Mapping[str, Map]) -> dict[str, Any]:
    _, raw, _ = CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))
    mode, flags = SocketLb.ON, ConfigFlag(raw)
    if ConfigFlag.SOCKET_LB_OFF in flags:
        mode = SocketLb.OFF
    elif ConfigFlag.HOST_ONLY in flags:
        mode = SocketLb.HOST_NAMESPACE_ONLY
    return {"socket_lb": mode, "exempt_cgroups": sum(1 for _ in maps["exempt_cgroups"].items())}


def _read_affinity(map_: Map) -> Iterator[AffinityEntry]:
    for key, raw in map_.items():
        client, service, kind = AFFINITY_KEY.unpack(key)
        # `last_used` is in ns here.
        last_used, backend, _ = AFFINITY.unpack(raw)
        yield AffinityEntry(Addr(client), ClientKind(kind), service, backend, last_used / 1e9)


def _read_map_facts(name: str, map_: Map) -> MapFacts:
    entries: int | None = None
    if map_.type in COUNTABLE_TYPES:
        entries = sum(1 for _ in map_.items())
    # Listing it needs BTF; without BTF the number is unknown.
    elif map_.type == uapi.BPF_MAP_TYPE_SK_STORAGE:
        with contextlib.suppress(KernelError):
            entries = sum(1 for _ in map_.items())
    return MapFacts(name, map_.type, entries, map_.max_entries, map_.read_memory())


def is_alive(pid: int) -> bool:
    """Whether this process runs. A zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # the command, in parentheses, may itself contain spaces and parentheses: proc(5)
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _read_reasons(map_: Map) -> dict[Reason, int]:
    counts = {}
    for reason in Reason:
        raw = map_.lookup(U32.pack(reason)) or b""  # one u64 for each possible CPU
        counts[reason] = sum(
            int.from_bytes(raw[offset : offset + 8], "little") for offset in range(0, len(raw), 8)
        )
    return counts
