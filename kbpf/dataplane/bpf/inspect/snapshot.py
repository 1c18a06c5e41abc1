"""What an agent has pinned, read once: a frozen value that all views are made of.

Only maps, links and programs are read, so it works with the agent down. The order of reading is
the reverse of the order of writing (dataplane/bpf/changes/plan.py): frontends first, then what
stands behind them, which stays for a grace period after a flip. So a frontend is seen with its
whole set.
"""

import contextlib
import errno
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from pathlib import Path
from typing import Any, Final

from kbpf.dataplane.bpf.changes.adopt import address_of, is_sound
from kbpf.dataplane.bpf.inspect import hooks, tracked_connections
from kbpf.dataplane.bpf.inspect.hooks import HookFacts
from kbpf.dataplane.bpf.inspect.tracked_connections import Fill, Tracked
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import (
    AFFINITY,
    AFFINITY_KEY,
    CONFIG,
    DEVICE,
    MAPS,
    NODE,
    PAIR,
    U32,
    ClientKind,
    ConfigFlag,
    DeviceFlag,
    NodeFlag,
    Reason,
    Role,
    ServiceValue,
    unpack_name,
    unpack_network,
    unpack_range,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.metrics import SOCKETS, WALKED, Census, Ids, totals_in
from kbpf.dataplane.bpf.udp import backend_of
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr, family_of
from kbpf.model.config import SocketLb
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey
from kbpf.model.metrics import BEGUN, FULL, Totals
from kbpf.model.objects import Cidr
from kbpf.model.status import AgentStatus, decode

ZERO: Final = U32.pack(0)
NO_FLAGS: Final = NodeFlag(0)
COUNTED: Final = (objects.MAP_HASH, objects.MAP_LRU_HASH, objects.MAP_LPM_TRIE)


class Part(Flag):
    """What to read: walking every LRU map only pays for who shows it."""

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
class Remembered:
    """One entry of the map `affinity`. `last_used` is in seconds of CLOCK_MONOTONIC."""

    client: Addr
    kind: int
    service: int
    backend: int
    last_used: float

    @property
    def cookie(self) -> int:
        """The client's network namespace, where it is known by that."""
        return int.from_bytes(self.client[:8], "little")


@dataclass(frozen=True, slots=True)
class MapFacts:
    """A map from outside: type, entries (None where the kernel does not say how many are used),
    room for how many, bytes that the kernel counts.
    """

    name: str
    kind: int
    entries: int | None
    room: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class ToldNode:
    """What the packet path knows of the node. `own`: the addresses for translated sources; `low`
    and `high`: the ports for them, both included.
    """

    own: tuple[Addr, ...] = ()
    flags: NodeFlag = NO_FLAGS
    low: int = 0
    high: int = 0

    @property
    def ports(self) -> int:
        """How many ports there are for translated sources."""
        return self.high - self.low + 1 if self.high else 0


@dataclass(frozen=True, slots=True)
class ToldDevice:
    """What the packet path knows of a device. `header`: length of its link header."""

    role: Role
    header: int
    flags: DeviceFlag
    mac: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that was asked for. `monotonic` and `boottime`: when, on those clocks. `began`: when
    reading began, on the first of them.

    `frontends`: address → what stands behind; `names`: service id → Service port;
    `sets`: set id → {index: backend id}; `backends`: id → address. `node_ports`: the families in
    which NodePorts answer on an address of this node, None if that is not known.
    `agent_alive`: a process with the agent's id is there. `socket_lb`: whom the hooks serve;
    `exempt_cgroups`: but for so many.

    Of the packet path: `packet_programs`: its programs are pinned; `connections`: see tracked.py;
    `fill`: how many there are, and room; `devices`: what the programs are told, by ifindex.

    `totals`: what connections came to, of which the numbers in `counted` are counted now, and
    `open`, how many are open, by the ids of a Service port and a backend.
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
    affinity: tuple[Remembered, ...] = ()
    maps: tuple[MapFacts, ...] = ()
    hooks: tuple[HookFacts, ...] = ()
    socket_lb: SocketLb = SocketLb.ON
    exempt_cgroups: int = 0
    reasons: Mapping[Reason, int] = field(default_factory=dict)
    status: AgentStatus | None = None
    agent_alive: bool = False
    began: float = 0.0
    packet_programs: bool = False
    connections: Mapping[bytes, Tracked] = field(default_factory=dict)
    fill: Fill | None = None
    node: ToldNode = ToldNode()
    devices: Mapping[int, ToldDevice] = field(default_factory=dict)
    local_networks: tuple[Cidr, ...] = ()
    ranges: tuple[tuple[int, Cidr], ...] = ()
    totals: Mapping[Ids, Totals] = field(default_factory=dict)
    counted: frozenset[str] = frozenset()
    open: Mapping[Ids, int] = field(default_factory=dict)


class ThroughTable(Mapping[int, int]):
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
    """What is pinned there. NotFoundError when nothing is, KernelError when it cannot be read."""
    pins = find(pin_dir)
    values: dict[str, Any] = {"began": time.monotonic()}
    with opened(pins) as maps:
        if parts & (Part.SERVICES | Part.AFFINITY):
            values |= _services(maps)
        if Part.NAMES in parts:
            values |= _names(maps)
        if Part.AFFINITY in parts:
            values["affinity"] = tuple(_affinity(maps["affinity"]))
        if Part.MAPS in parts:
            values["maps"] = tuple(_facts(name, held) for name, held in maps.items())
        if Part.HOOKS in parts:
            values |= _whom(maps)
        if Part.STATUS in parts:
            status = decode(maps["agent_status"].lookup(ZERO) or b"")
            values["status"] = status
            values["agent_alive"] = status is not None and alive(status.pid)
            values["reasons"] = _reasons(maps["reasons"])
        if Part.CONNECTIONS in parts:
            values["connections"] = tracked_connections.read(maps["flows"])
        if Part.FILL in parts:
            values["fill"] = tracked_connections.fill(maps["flows"], time.monotonic())
        if Part.PACKETS in parts:
            values |= _packets(maps)
            values["packet_programs"] = any(pins.root.glob("programs-tc-*"))
        if Part.RANGES in parts:
            values["ranges"] = tuple(
                sorted(unpack_range(k) for k, _ in maps["source_ranges"].items())
            )
        if Part.TRAFFIC in parts:
            values |= _traffic(maps)
    if Part.HOOKS in parts:
        values["hooks"] = tuple(hooks.read(pins))
    return Snapshot(pin_dir, time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), **values)


def find(pin_dir: Path) -> Pins:
    """The pins of an agent; NotFoundError with a hint at the likely reason when there are none."""
    pins = Pins(pin_dir)
    hint = "is `kbpf run` running on this node, and with this --pin-dir?"
    try:
        inside = sorted(p.name for p in pin_dir.iterdir())
    except FileNotFoundError:
        raise NotFoundError(
            "nothing is pinned: there is no such folder", str(pin_dir), hint
        ) from None
    except OSError as error:
        raise KernelError(
            "cannot look into the folder of pins", str(pin_dir), "run as root", error.errno or 0
        ) from error
    if pins.maps.name in inside:
        return pins
    if any(name.startswith("maps-") for name in inside):
        hint = "use the kbpf that runs as the agent, or restart the agent with this one"
        raise NotFoundError("another version of kbpf has pinned its maps", str(pin_dir), hint)
    raise NotFoundError("no maps are pinned", str(pin_dir), hint)


@contextlib.contextmanager
def opened(pins: Pins) -> Iterator[dict[str, Map]]:
    """All maps, for as long as the block lasts. NotFoundError when one is missing."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, spec in MAPS.items():
            try:
                found[name] = stack.enter_context(pinning.open_map(pins.maps / name, spec))
            except KernelError as error:
                if error.errno != errno.ENOENT:
                    raise
                hint = "somebody removed its pin: `kbpf cleanup`, then start the agent again"
                raise NotFoundError(f"the map {name} is missing", str(pins.maps), hint) from error
        yield found


def _u32(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _sound(maps: Mapping[str, Map], name: str) -> Iterator[tuple[bytes, bytes]]:
    """The agent tells of damaged entries, and removes them when it starts."""
    return ((key, raw) for key, raw in maps[name].items() if is_sound(name, key, raw))


def _services(maps: Mapping[str, Map]) -> dict[str, Any]:
    frontends = {address_of(key): ServiceValue.unpack(raw) for key, raw in _sound(maps, "services")}
    sets: dict[int, dict[int, int]] = {}
    for key, raw in maps["backend_slots"].items():
        set_id, index = PAIR.unpack(key)
        sets.setdefault(set_id, {})[index] = _u32(raw)
    through = {(value.cluster_set, value.cluster_table) for value in frontends.values()}
    through |= {(value.local_set, value.local_table) for value in frontends.values()}
    by_table = {set_id: sets.get(table, {}) for set_id, table in through if table}
    return {
        "frontends": frontends,
        "sets": {i: ThroughTable(by_table[i], s) if i in by_table else s for i, s in sets.items()},
        "backends": {_u32(key): backend_of(raw) for key, raw in _sound(maps, "backends")},
        "node_ports": _node_ports(maps),
        **_names(maps),
    }


def _node_ports(maps: Mapping[str, Map]) -> frozenset[int]:
    """The families in which NodePorts answer; loopback is of both."""
    _, flags, *_ = CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))
    if ConfigFlag.LOCALHOST_NODE_PORTS in ConfigFlag(flags):
        return frozenset((4, 6))
    return frozenset(family_of(Addr(key)) for key, _ in maps["node_addresses"].items())


def _names(maps: Mapping[str, Map]) -> dict[str, Any]:
    return {
        "names": {_u32(key): unpack_name(raw) for key, raw in _sound(maps, "service_names")},
        "host_netns": CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))[0],
    }


def _packets(maps: Mapping[str, Map]) -> dict[str, Any]:
    raw = maps["node"].lookup(ZERO) or bytes(NODE.size)
    own4, own6, flags, low, high, *_ = NODE.unpack(raw)
    return {
        "node": ToldNode(
            tuple(Addr(one) for one in (own4, own6) if any(one)), NodeFlag(flags), low, high
        ),
        "devices": {_u32(k): _told(raw) for k, raw in maps["devices"].items()},
        "local_networks": tuple(
            sorted(unpack_network(key) for key, _ in maps["local_networks"].items())
        ),
        "host_netns": CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))[0],
    }


def _traffic(maps: Mapping[str, Map]) -> dict[str, Any]:
    census, totals = Census(), dict[Ids, Totals]()
    for name in WALKED:
        with contextlib.suppress(KernelError) if name in SOCKETS else contextlib.nullcontext():
            for _ in census.take(maps[name], True):
                pass
    for _ in totals_in(maps["counts"], totals):
        pass
    return {"open": census.pairs, "totals": totals, "counted": _counted(maps)}


def _counted(maps: Mapping[str, Map]) -> frozenset[str]:
    """Which numbers of Totals the programs count as they are set now."""
    _, raw, _ = CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))
    if ConfigFlag.ENDS in ConfigFlag(raw):
        return FULL
    return BEGUN if ConfigFlag.ACCOUNTING in ConfigFlag(raw) else frozenset()


def _told(raw: bytes) -> ToldDevice:
    role, header, flags, mac, *_ = DEVICE.unpack(raw)
    return ToldDevice(Role(role), header, DeviceFlag(flags), mac)


def _whom(maps: Mapping[str, Map]) -> dict[str, Any]:
    _, raw, _ = CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))
    mode, flags = SocketLb.ON, ConfigFlag(raw)
    if ConfigFlag.SOCKETS_OFF in flags:
        mode = SocketLb.OFF
    elif ConfigFlag.HOST_ONLY in flags:
        mode = SocketLb.HOST_ONLY
    return {"socket_lb": mode, "exempt_cgroups": sum(1 for _ in maps["exempt_cgroups"].items())}


def _affinity(held: Map) -> Iterator[Remembered]:
    for key, raw in held.items():
        client, service, kind = AFFINITY_KEY.unpack(key)
        last_used, backend, _ = AFFINITY.unpack(raw)
        yield Remembered(Addr(client), ClientKind(kind), service, backend, last_used / 1e9)


def _facts(name: str, held: Map) -> MapFacts:
    entries: int | None = None
    if held.type in COUNTED:
        entries = sum(1 for _ in held.items())
    elif held.type == objects.MAP_SK_STORAGE:
        with contextlib.suppress(KernelError):
            entries = sum(1 for _ in held.items())
    return MapFacts(name, held.type, entries, held.max_entries, held.memory())


def alive(pid: int) -> bool:
    """Whether this process runs; one that only waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _reasons(held: Map) -> dict[Reason, int]:
    counted = {}
    for reason in Reason:
        raw = held.lookup(U32.pack(reason)) or b""
        counted[reason] = sum(
            int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)
        )
    return counted
