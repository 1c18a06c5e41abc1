"""What the packet path's programs are told of the node and of its devices: the maps `node`,
`local_networks`, `devices` and `device_cache`.

Each class keeps what its maps hold, so that only news is written; one thread calls each.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.maps.layout import (
    CACHED_DEVICE,
    CACHED_DEVICES,
    DEVICE,
    NODE,
    REFUSAL_LIMIT,
    U32,
    DeviceFlag,
    NodeFlag,
    RefusalLimit,
    pack_network,
    unpack_network,
)
from kbpf.dataplane.bpf.packet_path.device_roles import Choice, Role, is_local, reaches_pod
from kbpf.errors import KernelError
from kbpf.kernel.net.devices import Device
from kbpf.kernel.system import sysctl
from kbpf.model.address import Addr, family_of
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import DesiredState

ETH_HEADER: Final = 14
NOWHERE: Final = bytes(16)
NEUTRAL: Final = NodeFlag(0)
ROLES: Final = {Role.HOST: layout.Role.HOST, Role.POD: layout.Role.POD}
ZERO: Final = U32.pack(0)
ONE: Final = U32.pack(1)
SECOND: Final = 1_000_000_000
MESSAGES: Final = ("net.ipv4.icmp_msgs_per_sec", 1000), ("net.ipv4.icmp_msgs_burst", 50)
"""How many ICMP errors the kernel sends in a second and at once, of both families, and Linux's
defaults: older kernels have these settings in the first network namespace only."""
PEERS: Final = {
    RefusalLimit.PEER4: ("net.ipv4.icmp_ratelimit", 1000),
    RefusalLimit.PEER6: ("net.ipv6.icmp.ratelimit", 1000),
}
"""Milliseconds between two of them to one address; 0: no limit."""
PEER_BURST: Final = 6
"""So many at once to one address (XRLIM_BURST_FACTOR in Linux)."""
MOST: Final = 1_000_000_000
"""Of a setting: what is beyond is no limit in practice, and would overflow in the programs."""


class Table(Protocol):
    """A map of the kernel, as far as it is needed here."""

    def update(self, key: bytes, value: bytes) -> None:
        """Writes an entry."""

    def delete(self, key: bytes) -> bool:
        """Deletes an entry; whether it was there."""

    def items(self) -> Iterable[tuple[bytes, bytes]]:
        """All entries."""


class NodeFacts:
    """The node's own addresses, its settings, and the networks of its pods.

    `stance` towards another data plane on this node: NodeFlag.YIELDS, FOLLOWS, or none of them.
    """

    def __init__(self, config: Config, maps: Mapping[str, Table], followed: bool = False) -> None:
        self._config = config
        self._node = maps["node"]
        self._networks = maps["local_networks"]
        self._told = b""
        self.stance = stance_of(dict(self._node.items()).get(ZERO, b"")) if followed else NEUTRAL
        self._known = {unpack_network(key) for key, _ in self._networks.items()}

    def tell(self, desired: DesiredState) -> None:
        """Writes what is news.

        The networks come before the flag that asks for them, and new ones before old ones go:
        there is no moment in which a pod is taken for somebody else.
        """
        wanted = set(desired.local_networks)
        for cidr in sorted(wanted - self._known):
            self._networks.update(pack_network(cidr), ONE)
            self._known.add(cidr)
        value = self._value(desired)
        if value != self._told:
            self._node.update(ZERO, value)
            self._told = value
        for cidr in sorted(self._known - wanted):
            self._networks.delete(pack_network(cidr))
            self._known.discard(cidr)

    def stand(self, stance: NodeFlag) -> None:
        """Changes what is told already, but for the rest of it."""
        self.stance = stance
        if self._told:
            own4, own6, flags, *more = NODE.unpack(self._told)
            flags = NodeFlag(flags) & ~(NodeFlag.YIELDS | NodeFlag.FOLLOWS) | stance
            self._told = NODE.pack(own4, own6, flags, *more)
            self._node.update(ZERO, self._told)

    def _value(self, desired: DesiredState) -> bytes:
        """struct node."""
        first = {family_of(a): bytes(a) for a in desired.masquerade_as}
        flags = node_flags(self._config, bool(desired.local_networks)) | self.stance
        own4, own6 = first.get(4, NOWHERE), first.get(6, NOWHERE)
        mark = 1 << self._config.masquerade_bit
        ports, sizes = self._config.masquerade_ports, self._config.sizes
        return NODE.pack(own4, own6, flags, *ports, mark, sizes.connections)


def limit_refusals(limits: Table) -> None:
    """Writes the map `refusal_limits`: full buckets, as the kernel limits its own ICMP errors
    in this network namespace. RSTs have as much again.
    """
    rate, burst = (_setting(*one) for one in MESSAGES)
    node = REFUSAL_LIMIT.pack(0, SECOND // max(rate, 1), burst if rate else 0)
    for which in (RefusalLimit.ICMP, RefusalLimit.RESET):
        limits.update(U32.pack(which), node)
    for which, setting in PEERS.items():
        interval = _setting(*setting) * SECOND // 1000
        limits.update(U32.pack(which), REFUSAL_LIMIT.pack(0, interval, PEER_BURST))


def _setting(name: str, otherwise: int) -> int:
    try:
        return min(max(0, int(sysctl.read(name))), MOST)
    except (KernelError, ValueError):
        return otherwise


def stance_of(told: bytes) -> NodeFlag:
    """Where another data plane has connections on this node: programs that have led, by the struct
    node that they were told, go on leading; else they yield at first.
    """
    flags = NodeFlag(NODE.unpack(told)[2]) if any(told) else NodeFlag.YIELDS
    return NodeFlag.YIELDS if NodeFlag.YIELDS in flags else NodeFlag.FOLLOWS


def node_flags(config: Config, networks: bool) -> NodeFlag:
    """The settings that the programs read with each packet; `networks`: whether some are known.
    Without any, a mode that goes by networks detects nothing.
    """
    by_name = config.detect_local_mode in (LocalMode.BRIDGE, LocalMode.PREFIX)
    said = {
        NodeFlag.MASQUERADE_ALL: config.masquerade_all,
        NodeFlag.DETECTS_LOCAL: networks or by_name,
        NodeFlag.LOCAL_NETWORKS: networks,
        NodeFlag.DIRECT: config.forwarding == "direct",
    }
    return NodeFlag(sum(flag for flag, holds in said.items() if holds))


class DeviceFacts:
    """What each device is to the programs. They leave packets of others alone."""

    def __init__(self, config: Config, maps: Mapping[str, Table]) -> None:
        self._config = config
        self._devices = maps["devices"]
        self._told = dict(self._devices.items())
        self._cache = maps["device_cache"]
        self._cached = {U32.unpack(key)[0]: value for key, value in self._cache.items()}
        self.preferred: tuple[Addr, ...] = ()
        """The node's own addresses for translated sources: first choice on a device that has one
        of them. Another thread may set it.
        """

    def tell(self, there: Iterable[Device], choices: Mapping[int, Choice]) -> None:
        """Writes what is news; before a program runs on a new device.

        An element of an array is not replaced, as one of a hash is, but written over, and programs
        may be at it: so it is nobody's while it changes, and what stands there stays a device. One
        that takes the place of another waits for the next time.
        """
        wanted = {
            U32.pack(device.ifindex): describe(
                device, choices[device.ifindex].role, self._config, self.preferred
            )
            for device in there
            if choices[device.ifindex].role in ROLES
        }
        changed = {key: value for key, value in wanted.items() if self._told.get(key) != value}
        cached = cached_devices(wanted)
        owners = {index: _owner(value) for index, value in self._cached.items()}
        for index, owner in owners.items():
            if owner and self._cached[index] != cached.get(index):
                self._keep(index, _nobodys(self._cached[index]))
        for key, value in changed.items():
            self._devices.update(key, value)
        for key in self._told.keys() - wanted.keys():
            self._devices.delete(key)
        self._told = wanted
        for index, value in cached.items():
            if value != self._cached.get(index) and owners.get(index, 0) in (0, _owner(value)):
                self._keep(index, _nobodys(value))
                self._keep(index, value)

    def _keep(self, index: int, value: bytes) -> None:
        self._cache.update(U32.pack(index), value)
        self._cached[index] = value


def _owner(cached: bytes) -> int:
    """The ifindex in a struct cached_device; 0: it is nobody's."""
    return int(CACHED_DEVICE.unpack(cached)[0])


def _nobodys(cached: bytes) -> bytes:
    return CACHED_DEVICE.pack(0, CACHED_DEVICE.unpack(cached)[1])


def cached_devices(told: Mapping[bytes, bytes]) -> dict[int, bytes]:
    """What stands at each place of `device_cache`, from what stands in `devices`. Of two devices
    that have one place the older one has it, so that a new pod moves nobody.
    """
    by_age = sorted((U32.unpack(key)[0], value) for key, value in told.items())
    return {
        index % CACHED_DEVICES: CACHED_DEVICE.pack(index, value)
        for index, value in reversed(by_age)
    }


def describe(device: Device, role: Role, config: Config, preferred: tuple[Addr, ...] = ()) -> bytes:
    """struct device. A translated source is an address of the device that the packet leaves by,
    as kube-proxy's MASQUERADE makes it: so answers come back the way that the question went, and
    no overlay or reverse path filter stops them.
    """
    flags = DeviceFlag(0)
    if is_local(device, role, config):
        flags |= DeviceFlag.LOCAL
    if reaches_pod(device, role):
        flags |= DeviceFlag.PEER
    first = {family_of(address): address for address in reversed(device.sources)}
    first |= {family_of(a): a for a in reversed(preferred) if a in device.sources}
    return DEVICE.pack(
        ROLES[role],
        ETH_HEADER if device.has_header else 0,
        flags,
        device.mac,
        first.get(4, NOWHERE),
        first.get(6, NOWHERE),
    )
