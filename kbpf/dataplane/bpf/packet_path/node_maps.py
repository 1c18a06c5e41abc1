# SPDX-License-Identifier: Apache-2.0
"""Writes the maps that describe the node and its devices to the packet programs: `node`,
`local_networks`, `devices`, `device_cache` and `device_sources`.

Each class remembers what its maps hold, so only changes are written. Each is used by one thread.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice, product
from typing import Final, Protocol

from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.maps.layout import (
    CACHED_DEVICE,
    CACHED_DEVICES,
    DEVICE,
    MAX_DEVICES,
    NODE,
    REFUSAL_LIMIT,
    SOURCE_KEY,
    U32,
    DeviceFlag,
    NodeFlag,
    RefusalLimit,
    pack_network,
    unpack_network,
)
from kbpf.dataplane.bpf.packet_path.device_roles import (
    OVERLAY_KINDS,
    DeviceRole,
    RoleChoice,
    has_peer_in_pod,
    is_local,
)
from kbpf.errors import KernelError
from kbpf.kernel.net.devices import Device
from kbpf.kernel.system import sysctl
from kbpf.model.address import Addr, family_of
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import DesiredState

ETH_HEADER: Final = 14
NO_ADDRESS: Final = bytes(16)
CILIUM_HOST: Final = "cilium_host"
"""Cilium's routes to all Pods of the node lead here, unless it has one for each endpoint. Its
programs check the source addresses of each Pod.
"""
NO_COEXISTENCE: Final = NodeFlag(0)
ROLE_VALUES: Final = {DeviceRole.HOST: layout.Role.HOST, DeviceRole.POD: layout.Role.POD}
SOURCES_PER_DEVICE: Final = 64
"""How many of its first addresses of each family are chosen from."""
ZERO: Final = U32.pack(0)
ONE: Final = U32.pack(1)
NS_PER_SECOND: Final = 1_000_000_000
ICMP_RATE_SYSCTLS: Final = ("net.ipv4.icmp_msgs_per_sec", 1000), ("net.ipv4.icmp_msgs_burst", 50)
"""Rate (per second) and burst of the kernel's own ICMP errors, for both families: sysctl, and
Linux's default. Older kernels have these sysctls in the initial network namespace only."""
ICMP_PEER_SYSCTLS: Final = {
    RefusalLimit.PEER4: ("net.ipv4.icmp_ratelimit", 1000),
    RefusalLimit.PEER6: ("net.ipv6.icmp.ratelimit", 1000),
}
"""Milliseconds between two ICMP errors to one address, 0: no limit. Sysctl, and Linux's default."""
XRLIM_BURST_FACTOR: Final = 6
"""Burst of ICMP errors to one address (XRLIM_BURST_FACTOR in Linux)."""
MAX_SETTING: Final = 1_000_000_000
"""Larger values of these sysctls are no limit in practice, and would overflow in the programs."""


class WritableMap(Protocol):
    """The methods of a map that are used here."""

    def update(self, key: bytes, value: bytes) -> None:
        """Writes an entry."""

    def delete(self, key: bytes) -> bool:
        """Deletes an entry; returns whether it existed."""

    def items(self) -> Iterable[tuple[bytes, bytes]]:
        """All entries."""


class NodeMap:
    """The maps `node` (SNAT addresses and settings) and `local_networks` (networks of local pods).

    `coexisting`: whether another data plane has connections on this node. `mode` is
    NodeFlag.PASSIVE or COEXISTING as long as it has, then NO_COEXISTENCE.
    """

    def __init__(self, config: Config, maps: Mapping[str, WritableMap], coexisting: bool = False) -> None:
        self._config = config
        self._node = maps["node"]
        self._networks = maps["local_networks"]
        self._written = b""
        self.mode = initial_mode(dict(self._node.items()).get(ZERO, b"")) if coexisting else NO_COEXISTENCE
        self._written_networks = {unpack_network(key) for key, _ in self._networks.items()}

    def write(self, desired: DesiredState) -> None:
        """Writes changes.

        New networks are written before the flag that makes the programs read them, and old ones
        are deleted last, so that no packet of a pod is taken for one from elsewhere in between.
        """
        networks = set(desired.local_networks)
        for cidr in sorted(networks - self._written_networks):
            self._networks.update(pack_network(cidr), ONE)
            self._written_networks.add(cidr)
        value = pack_node(self._config, desired, self.mode)
        if value != self._written:
            self._node.update(ZERO, value)
            self._written = value
        for cidr in sorted(self._written_networks - networks):
            self._networks.delete(pack_network(cidr))
            self._written_networks.discard(cidr)

    def set_mode(self, mode: NodeFlag) -> None:
        """Replaces the mode flags in the map and leaves the rest of struct node as it is. Before
        the first write() only remembers the mode.
        """
        self.mode = mode
        if self._written:
            own4, own6, flags, *rest = NODE.unpack(self._written)
            flags = NodeFlag(flags) & ~(NodeFlag.PASSIVE | NodeFlag.COEXISTING) | mode
            self._written = NODE.pack(own4, own6, flags, *rest)
            self._node.update(ZERO, self._written)


def pack_node(config: Config, desired: DesiredState, mode: NodeFlag = NO_COEXISTENCE) -> bytes:
    """Packs a struct node. `mode`: NodeFlag.PASSIVE, COEXISTING or NO_COEXISTENCE."""
    by_family = {family_of(address): bytes(address) for address in desired.masquerade_addresses}
    flags = compute_node_flags(config, bool(desired.local_networks)) | mode
    own4, own6 = by_family.get(4, NO_ADDRESS), by_family.get(6, NO_ADDRESS)
    mark = 1 << config.masquerade_bit
    ports, sizes = config.masquerade_ports, config.sizes
    return NODE.pack(own4, own6, flags, *ports, mark, sizes.connections)


def write_refusal_limits(limits: WritableMap) -> None:
    """Writes the map `refusal_limits`: full token buckets with the limits that the kernel has for
    its own ICMP errors in this network namespace. RSTs have a bucket of the same size, and one
    sender can take half of it.
    """
    rate, burst = (_read_setting(*name_and_default) for name_and_default in ICMP_RATE_SYSCTLS)
    # Last spent at 0, which is when the node booted: the bucket is full.
    interval, burst = NS_PER_SECOND // max(rate, 1), burst if rate else 0
    for limit in (RefusalLimit.ICMP, RefusalLimit.RESET):
        limits.update(U32.pack(limit), REFUSAL_LIMIT.pack(0, interval, burst))
    half = REFUSAL_LIMIT.pack(0, 2 * interval, (burst + 1) // 2)
    limits.update(U32.pack(RefusalLimit.PEER_RESET), half)
    for limit, setting in ICMP_PEER_SYSCTLS.items():
        each = _read_setting(*setting) * NS_PER_SECOND // 1000
        limits.update(U32.pack(limit), REFUSAL_LIMIT.pack(0, each, XRLIM_BURST_FACTOR))


def _read_setting(name: str, default: int) -> int:
    try:
        return min(max(0, int(sysctl.read(name))), MAX_SETTING)
    except (KernelError, ValueError):
        return default


def initial_mode(node: bytes) -> NodeFlag:
    """The mode at start if another data plane has connections on this node. `node` is the struct
    node of an earlier agent, or empty or zeros. If its programs were active, ours stay active
    (COEXISTING); otherwise they start PASSIVE.
    """
    flags = NodeFlag(NODE.unpack(node)[2]) if any(node) else NodeFlag.PASSIVE
    return NodeFlag.PASSIVE if NodeFlag.PASSIVE in flags else NodeFlag.COEXISTING


def compute_node_flags(config: Config, has_networks: bool) -> NodeFlag:
    """The settings in struct node. `has_networks`: whether networks of pods are known. Without any,
    detectLocalMode by network detects no local traffic.
    """
    by_name = config.detect_local_mode in (
        LocalMode.BRIDGE_INTERFACE,
        LocalMode.INTERFACE_NAME_PREFIX,
    )
    settings = {
        NodeFlag.MASQUERADE_ALL: config.masquerade_all,
        NodeFlag.DETECTS_LOCAL: has_networks or by_name,
        NodeFlag.LOCAL_NETWORKS: has_networks,
        NodeFlag.DIRECT: config.forwarding == "direct",
        NodeFlag.NETFILTER: config.uses_conntrack,
    }
    return NodeFlag(sum(flag for flag, enabled in settings.items() if enabled))


class DeviceMap:
    """The maps `devices`, `device_cache` and `device_sources`: role, flags and addresses of each
    device that has programs. The programs ignore packets of devices that are not in `devices`.
    """

    def __init__(self, config: Config, maps: Mapping[str, WritableMap]) -> None:
        self._config = config
        self._devices = maps["devices"]
        # Entries of an earlier agent: the first write() corrects or deletes them.
        self._written = dict(self._devices.items())
        self._sources = maps["device_sources"]
        self._written_sources = dict(self._sources.items())
        self._cache = maps["device_cache"]
        self._written_cache = {U32.unpack(key)[0]: value for key, value in self._cache.items()}

    def write(
        self, devices: Iterable[Device], choices: Mapping[int, RoleChoice], no_egress: Collection[int] = ()
    ) -> None:
        """Writes changes. Has to be called before a program runs on a new device.
        `no_egress`: see pack_devices().

        The kernel replaces an element of a hash, but overwrites an element of an array in place,
        while programs may be reading it. So an element of `device_cache` has ifindex 0, which no
        program matches, while its other fields change; programs then use `devices`. A program may
        have matched the element just before, so these fields are never cleared. If the element is
        to hold another device, that one is written only by the next call, when no such program can
        be running any more.
        """
        devices = tuple(devices)
        entries, sources = pack_devices(devices, choices, self._config, no_egress), pack_sources(devices, choices)
        cached = compute_cached_devices(entries)
        owners = {index: _owner(value) for index, value in self._written_cache.items()}
        # Elements that will change match no device from here on.
        for index, owner in owners.items():
            if owner and self._written_cache[index] != cached.get(index):
                self._write_cached(index, _without_owner(self._written_cache[index]))
        # Programs that do not find their device in the cache use this map meanwhile.
        _replace(self._devices, self._written, entries)
        _replace(self._sources, self._written_sources, sources)
        self._written, self._written_sources = entries, sources
        # An element that had another owner until now stays empty until the next call.
        for index, value in cached.items():
            if value != self._written_cache.get(index) and owners.get(index, 0) in (
                0,
                _owner(value),
            ):
                # The fields first; then the ifindex, which makes them valid.
                self._write_cached(index, _without_owner(value))
                self._write_cached(index, value)

    def _write_cached(self, index: int, value: bytes) -> None:
        self._cache.update(U32.pack(index), value)
        self._written_cache[index] = value


def _replace(table: WritableMap, written: Mapping[bytes, bytes], entries: Mapping[bytes, bytes]) -> None:
    for key in written.keys() - entries.keys():  # first, since the others need their room
        table.delete(key)
    for key, value in entries.items():
        if written.get(key) != value:
            table.update(key, value)


def _owner(cached: bytes) -> int:
    """The ifindex in a struct cached_device; 0: no device."""
    return int(CACHED_DEVICE.unpack(cached)[0])


def _without_owner(cached: bytes) -> bytes:
    return CACHED_DEVICE.pack(0, CACHED_DEVICE.unpack(cached)[1])


def compute_cached_devices(entries: Mapping[bytes, bytes]) -> dict[int, bytes]:
    """The elements of `device_cache` by index, for these entries of `devices`. Of two devices with
    the same index the one with the lower ifindex is cached: it is the older one, so a new pod
    displaces no device.
    """
    by_age = sorted((U32.unpack(key)[0], value) for key, value in entries.items())
    # A dict keeps the last value of a key: with reversed(), that of the oldest device.
    return {index % CACHED_DEVICES: CACHED_DEVICE.pack(index, value) for index, value in reversed(by_age)}


def pack_devices(
    devices: Iterable[Device],
    choices: Mapping[int, RoleChoice],
    config: Config,
    no_egress: Collection[int] = (),
) -> dict[bytes, bytes]:
    """The entries of `devices`. A port of a bridge has the values of its bridge. `no_egress`: the
    devices without our program at egress.
    """
    packed: dict[int, bytes] = {}
    ports = []
    devices = tuple(devices)
    spanning = {device.master for device in devices if device.kind in OVERLAY_KINDS}
    for device in devices:
        role = choices[device.ifindex].role
        if role is DeviceRole.PORT:
            ports.append(device)
        elif role in ROLE_VALUES:
            flags = DeviceFlag.SPANS if device.ifindex in spanning else 0
            flags |= DeviceFlag.NO_EGRESS if device.ifindex in no_egress else 0
            packed[device.ifindex] = pack_device(device, role, config, flags)
    packed |= {port.ifindex: packed[port.master] for port in ports if port.master in packed}
    return {U32.pack(ifindex): value for ifindex, value in packed.items()}


def pack_sources(devices: Collection[Device], choices: Mapping[int, RoleChoice]) -> dict[bytes, bytes]:
    """The entries of `device_sources`: what MASQUERADE chooses where it is not a device's first
    address, and under ifindex 0 all addresses.

    IPv4: the first whose network has the next hop (inet_select_addr()). IPv6: that whose prefix has
    most bits in common with the destination, of equal ones the first (RFC 6724, rule 8; rule 6 says
    the same of global and unique local ones).
    """
    packed: dict[bytes, bytes] = {}
    served = [device for device in devices if choices[device.ifindex].role in ROLE_VALUES]
    for device, family in product(served, (4, 6)):
        pairs = zip(device.sources, device.subnets, strict=False)
        own = [pair for pair in pairs if family_of(pair[0]) == family][:SOURCES_PER_DEVICE]
        best: dict[tuple[int, int], Addr] = {}
        for source, (network, bits) in own if len(own) > 1 else ():
            prefixes = [
                (size, int.from_bytes(network) >> 128 - size) for size in range(97 - 96 * (family == 6), bits + 1)
            ]
            if family == 4:  # unless one of the earlier networks has all of this one
                prefixes = prefixes[-1:] if best.keys().isdisjoint(prefixes) else []
            for prefix in prefixes:
                best.setdefault(prefix, source)
        for (size, number), source in best.items():
            # The programs find the longest prefix: one that says the same as the next shorter is not needed.
            if family == 4 or source != best.get((size - 1, number >> 1), own[0][0]):
                address = (number << 128 - size).to_bytes(16)
                packed[SOURCE_KEY.pack(32 + size, device.ifindex, address)] = source
    packed |= {SOURCE_KEY.pack(160, 0, address): address for device in devices for address in device.addresses}
    return dict(islice(packed.items(), MAX_DEVICES - 1))  # a full LPM trie refuses to replace an entry


def pack_device(
    device: Device,
    role: DeviceRole,
    config: Config,
    flags: int = 0,
) -> bytes:
    """Packs a struct device. `flags`: those that do not follow from the device alone. Its SNAT
    addresses are those of the device that the packet leaves by, as with kube-proxy's MASQUERADE:
    replies then return through the same device, and neither an overlay nor a reverse path filter
    drops them.
    """
    if is_local(device, role, config):
        flags |= DeviceFlag.LOCAL
    if has_peer_in_pod(device, role):
        flags |= DeviceFlag.PEER
    if device.name == CILIUM_HOST:
        flags |= DeviceFlag.PODS
    if device.strict_filter:
        flags |= DeviceFlag.STRICT
    if device.is_ip_tunnel:
        flags |= DeviceFlag.TUNNEL
        if not device.point_to_point:
            flags |= DeviceFlag.NBMA
            if device.kind == "ipip":
                flags |= DeviceFlag.IPIP
    # reversed(): the first address of each family wins
    by_family = {family_of(address): address for address in reversed(device.sources)}
    return DEVICE.pack(
        ROLE_VALUES[role],
        ETH_HEADER if device.has_header else 0,
        flags,
        device.mac,
        by_family.get(4, NO_ADDRESS),
        by_family.get(6, NO_ADDRESS),
        device.ifindex if device.bridge_netfilter else 0,
    )
