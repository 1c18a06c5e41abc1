# SPDX-License-Identifier: Apache-2.0
"""Reads the pins of an agent once, into the values of model/inspection.py.

Only pinned maps, links and programs are read, so this works while the agent is down. Reading goes
in the reverse order of writing (state/plan.py): first the frontends, then their sets and
backends, which stay for a grace period after a flip. So each frontend is seen with a complete set.
"""

import contextlib
import errno
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kbpf.dataplane.bpf.inspect import attached, failures, services
from kbpf.dataplane.bpf.inspect import connections as tracked
from kbpf.dataplane.bpf.inspect.connections import FlowTable, measure_fill
from kbpf.dataplane.bpf.map_metrics import read_counter
from kbpf.dataplane.bpf.maps import pinning, status_entries
from kbpf.dataplane.bpf.maps.layout import (
    AFFINITY_CGROUP_MASK,
    CONFIG,
    DEVICE,
    MAPS,
    NODE,
    U32,
    ConfigFlag,
    DeviceFlag,
    NodeFlag,
    Role,
    unpack_network,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.programs.hook_config import counted_fields
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel.bpf import uapi
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts, pods
from kbpf.kernel.system.process import is_alive
from kbpf.model.address import Addr, family_of
from kbpf.model.config import SocketLb
from kbpf.model.inspection import AffinityEntry, DeviceEntry, Inspection, MapEntry, NodeEntry, Part, index_pods
from kbpf.model.reasons import Reason
from kbpf.model.status import decode

ZERO: Final = U32.pack(0)
# An array has all its entries from the start, so their number says nothing.
COUNTABLE_TYPES: Final = (uapi.BPF_MAP_TYPE_HASH, uapi.BPF_MAP_TYPE_LRU_HASH, uapi.BPF_MAP_TYPE_LPM_TRIE)
TYPE_NAMES: Final = {
    uapi.BPF_MAP_TYPE_HASH: "hash",
    uapi.BPF_MAP_TYPE_ARRAY: "array",
    uapi.BPF_MAP_TYPE_PERCPU_ARRAY: "percpu_array",
    uapi.BPF_MAP_TYPE_LRU_HASH: "lru_hash",
    uapi.BPF_MAP_TYPE_QUEUE: "queue",
    uapi.BPF_MAP_TYPE_LPM_TRIE: "lpm_trie",
    uapi.BPF_MAP_TYPE_SK_STORAGE: "sk_storage",
    uapi.BPF_MAP_TYPE_RINGBUF: "ringbuf",
}
MAPS_OF_PART: Final[Mapping[Part, Iterable[str]]] = {
    Part.NAMES: services.NAME_MAPS,
    Part.SERVICES: services.SERVICE_MAPS,
    Part.AFFINITY: (*services.SERVICE_MAPS, "affinity"),
    Part.RANGES: (*services.NAME_MAPS, "source_ranges"),
    Part.TRAFFIC: (*services.SERVICE_MAPS, *services.TRAFFIC_MAPS),
    Part.MAPS: MAPS,
    Part.HOOKS: ("config", "exempt_cgroups"),
    Part.STATUS: ("agent_status", "reasons"),
    Part.CONNECTIONS: (*services.NAME_MAPS, "flows"),
    Part.FILL: ("flows",),
    Part.PACKETS: ("node", "devices", "local_networks"),
    Part.DEVICES: ("config",),
    Part.KUBE_PROXY: (),
    Part.FAILURES: (*services.SERVICE_MAPS, "failures"),
    Part.ENDPOINTS: (*services.NAME_MAPS, "endpoint_names", "node"),
}
"""The maps that each part is read from. No others are opened."""


def read(pin_dir: Path, parts: Part) -> Inspection:
    """Reads these parts. Raises NotFoundError if nothing is pinned there, and KernelError if it
    cannot be read.
    """
    pins = find_pins(pin_dir)
    began = time.monotonic()
    with open_maps(pins, parts) as maps:
        values = services.read(maps, parts)
        ports = {port.id: port for port in values.get("services", ())}
        if Part.MAPS in parts:
            values["maps"] = tuple(read_map(name, map_) for name, map_ in maps.items())
        if Part.STATUS in parts:
            values |= _read_status(maps)
        if Part.FILL in parts:
            values["fill"] = measure_fill(maps["flows"], time.monotonic())
        if Part.PACKETS in parts:
            values |= read_packet_path(maps)
            # Published folders only: one that is still being filled is named `new-programs-...`.
            values["packet_programs"] = any(pins.root.glob("programs-tc-*"))
        if Part.FAILURES in parts:
            values["failures"] = failures.read(maps["failures"], ports)
        if "config" in maps:
            values |= _read_config(maps, parts)
        if Part.ENDPOINTS in parts:
            own4, own6, *_ = NODE.unpack(maps["node"].lookup(ZERO) or bytes(NODE.size))
            own = {own4, own6, *values.get("node_port_addresses", ())}
            values["pods"] = index_pods(values["services"], own)
            values["affinity"] = _name_clients(values["affinity"], values["pods"])
        connections = tracked.read(maps["flows"]) if Part.CONNECTIONS in parts else None
    if Part.HOOKS in parts:
        values["hooks"] = tuple(attached.read_hooks(pins))
    if Part.DEVICES in parts:
        values["host_devices"] = attached.read_devices(
            pins, values["host_netns"], values["status"] and values["status"].packets
        )
    # After reading, so that no time in a map is later than these, and no age is negative. The
    # maps have CLOCK_MONOTONIC, the agent's status has CLOCK_BOOTTIME.
    now = time.monotonic()
    flows = None
    if connections is not None:
        flows = FlowTable(connections, ports, str(pin_dir), began, now, values["pods"])
    return Inspection(
        str(pin_dir),
        monotonic=now,
        boottime=time.clock_gettime(time.CLOCK_BOOTTIME),
        connections=flows,
        translated=flows,
        **values,
    )


def _name_clients(entries: Iterable[AffinityEntry], endpoints: Mapping[Addr, str]) -> tuple[AffinityEntry, ...]:
    """Affinity entries with the Pods of their clients: of this node, or behind a Service."""
    entries = tuple(entries)
    ids = {entry.cgroup for entry in entries if entry.cgroup}
    local_pods = pods.name_pods(mounts.find_cgroups(ids, AFFINITY_CGROUP_MASK)) if ids else {}

    def find_pod(entry: AffinityEntry) -> str:
        if entry.client is not None:
            return endpoints.get(entry.client, "")
        return local_pods.get(entry.cgroup, "")

    return tuple(replace(entry, pod=find_pod(entry)) for entry in entries)


def find_pins(pin_dir: Path) -> Pins:
    """The pins of an agent. Raises NotFoundError, with a hint at the likely reason, if there are
    none.
    """
    pins = Pins(pin_dir)
    hint = "is `kbpf run` running on this node, and with this --pin-dir?"
    try:
        names = [path.name for path in pinning.list_pin_folder(pin_dir)]
    except FileNotFoundError:
        raise NotFoundError("nothing is pinned: there is no such folder", str(pin_dir), hint) from None
    if pins.maps.name in names:
        return pins
    # A folder of maps is named after its layout: another version may have another one.
    if any(name.startswith("maps-") for name in names):
        hint = "use the kbpf that runs as the agent, or restart the agent with this one"
        raise NotFoundError("another version of kbpf has pinned its maps", str(pin_dir), hint)
    raise NotFoundError("no maps are pinned", str(pin_dir), hint)


@contextlib.contextmanager
def open_maps(pins: Pins, parts: Part) -> Iterator[dict[str, Map]]:
    """Opens the maps of these parts for the duration of the block. Raises NotFoundError if one is
    missing.
    """
    needed = {name for part in parts for name in MAPS_OF_PART[part]}
    with contextlib.ExitStack() as stack:
        maps = {}
        for name in MAPS:
            if name not in needed:
                continue
            try:
                maps[name] = stack.enter_context(pins.open_map(name))
            except KernelError as error:
                if error.errno != errno.ENOENT:
                    raise
                hint = "its pin was removed: the agent restores it within seconds, or when it starts"
                raise NotFoundError(f"the map {name} is missing", str(pins.maps), hint) from error
        yield maps


def _read_config(maps: Mapping[str, Map], parts: Part) -> dict[str, Any]:
    """The map `config`, and what it says about other maps, as fields of Inspection."""
    cookie, raw_flags, _ = CONFIG.unpack(maps["config"].lookup(ZERO) or bytes(CONFIG.size))
    flags = ConfigFlag(raw_flags)
    values = {"host_netns": cookie, "counted": counted_fields(flags)}
    if Part.HOOKS in parts:
        values["socket_lb"] = _socket_lb(flags)
        values["hooks_fail"] = ConfigFlag.SET_RETVAL in flags
        values["exempt_ids"] = frozenset(int.from_bytes(key, "little") for key, _ in maps["exempt_cgroups"].items())
    if parts & services.FRONTEND_PARTS:
        addresses = frozenset(Addr(key) for key, _ in maps["node_addresses"].items())
        on_loopback = ConfigFlag.LOCALHOST_NODE_PORTS in flags
        values["node_port_addresses"], values["localhost_node_ports"] = addresses, on_loopback
        values["node_ports"] = frozenset((4, 6) if on_loopback else map(family_of, addresses))
    return values


def _socket_lb(flags: ConfigFlag) -> SocketLb:
    if ConfigFlag.SOCKET_LB_OFF in flags:
        return SocketLb.OFF
    return SocketLb.HOST_NAMESPACE_ONLY if ConfigFlag.HOST_ONLY in flags else SocketLb.ON


def _read_status(maps: Mapping[str, Map]) -> dict[str, Any]:
    status = decode(status_entries.read(maps["agent_status"]))
    return {
        "status": status,
        "agent_alive": status is not None and is_alive(status.pid, status.started),
        "reasons": {reason: read_counter(maps["reasons"], reason) for reason in Reason},
    }


def read_packet_path(maps: Mapping[str, Map]) -> dict[str, Any]:
    """The node, its devices and the networks of pods, as fields of Inspection."""
    raw = maps["node"].lookup(ZERO) or bytes(NODE.size)
    own4, own6, flags, first_port, last_port, *_ = NODE.unpack(raw)
    pods = "networks" if NodeFlag.LOCAL_NETWORKS in NodeFlag(flags) else "devices"
    return {
        "node": NodeEntry(
            # zeros: the node has no address of this family
            tuple(Addr(address) for address in (own4, own6) if any(address)),
            first_port,
            last_port,
            pods if NodeFlag.DETECTS_LOCAL in NodeFlag(flags) else "",
            format_forwarding(NodeFlag(flags)),
            NodeFlag.MASQUERADE_ALL in NodeFlag(flags),
        ),
        "devices": {
            ifindex: _decode_device(ifindex, raw)
            for key, raw in maps["devices"].items()
            for (ifindex,) in [U32.unpack(key)]
        },
        "local_networks": tuple(sorted(unpack_network(key) for key, _ in maps["local_networks"].items())),
    }


def format_forwarding(flags: NodeFlag) -> str:
    """The value of `--forwarding` that set these flags."""
    if NodeFlag.NETFILTER in flags:
        return "netfilter"
    return "direct" if NodeFlag.DIRECT in flags else "stack"


def _decode_device(ifindex: int, raw: bytes) -> DeviceEntry:
    role, header, flags, *_, bridge = DEVICE.unpack(raw)
    return DeviceEntry(
        "port" if bridge not in (0, ifindex) else Role(role).name.lower(),
        header,
        DeviceFlag.LOCAL in DeviceFlag(flags),
        DeviceFlag.PEER in DeviceFlag(flags),
        DeviceFlag.TUNNEL in DeviceFlag(flags),
    )


def read_map(name: str, map_: Map) -> MapEntry:
    """A map as the kernel sees it."""
    entries: int | None = None
    has_fill = map_.type in COUNTABLE_TYPES
    if has_fill:
        entries = sum(1 for _ in map_.items())
    # Listing it needs BTF; without BTF the number is unknown.
    elif map_.type == uapi.BPF_MAP_TYPE_SK_STORAGE:
        with contextlib.suppress(KernelError):
            entries = sum(1 for _ in map_.items())
    return MapEntry(
        name,
        TYPE_NAMES.get(map_.type, str(map_.type)),
        entries,
        map_.max_entries,
        has_fill,
        map_.read_memory(),
        MAPS[name].purpose,
    )
