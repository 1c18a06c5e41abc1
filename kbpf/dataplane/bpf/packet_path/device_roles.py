"""Which devices carry the packet programs: pure functions that map a listing to roles.

A **host** device is where traffic from outside comes in, and replies of backends on other nodes:
uplinks and overlays. A **pod** device is where packets of this node's own pods come in. The first
rule that holds decides:

1. Loopback: never. What a node says to itself passes the socket hooks.
2. `kbpf-*`: never. They are ours.
3. Excluded by the operator (fnmatch patterns).
4. A link type without IP packets that we can find (CAN, InfiniBand, monitors): never.
5. Named by the operator: host, whatever it is.
6. Kinds that hand packets to nobody above them, or only repeat what another device shows: dummy,
   ifb, nlmon, vrf (its ports show the packets), macvtap and ipvtap (a virtual machine takes them).
   An Open vSwitch device without addresses in a subnet: br-int, br-tun, ovs-system. One that has
   some is a way into the host: antrea-gw0, br-ex.
7. A port of a bridge, bond, team or switch: its master shows the packets that come up to the
   host, and one that is only bridged is none of ours. A port of a VRF is as one of none.
8. A bridge: pod if nothing but pods and overlays are on it (cni0, cbr0, weave, docker0), also
   while it is empty, so that its first pod finds the program there. The bridge device sees the
   routed packets of its ports once, with its own MAC address. With any other port (an uplink, a
   tap) it is the way outside: host.
9. A veth or netkit whose peer is in another namespace: pod (cali*, lxc*, eni*, veth* of ptp and
   kindnet), unless it has an address in a subnet: then this node is itself a container (kind, k3d,
   LXD) and it is its uplink. CNIs give the host's end no address or a whole one (/32, /128). If
   the operator has named the host devices, it is a pod's.
10. Everything else: host; but skipped if the operator has named the host devices.

Whether a device is up does not matter: the program then is there before the first packet is.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from kbpf.kernel.net.devices import Device
from kbpf.model.config import Config, LocalMode

OWN_PREFIX: Final = "kbpf-"
PEERED_KINDS: Final = frozenset(("veth", "netkit"))
INTERNAL_KINDS: Final = PEERED_KINDS | {"vxlan", "geneve", "gretap", "ip6gretap", "dummy"}
"""A bridge with ports of these kinds only has no way outside of its own."""
SKIPPED_KINDS: Final = frozenset(("dummy", "ifb", "nlmon", "vrf", "macvtap", "ipvtap"))


class DeviceRole(StrEnum):
    """What a device is to us."""

    HOST = "host"
    POD = "pod"
    SKIPPED = "skipped"


class RoleChoice(NamedTuple):
    """The role of a device, and why, in a few words."""

    role: DeviceRole
    reason: str


def assign_roles(
    devices: Iterable[Device], patterns: tuple[str, ...] = (), excluded: tuple[str, ...] = ()
) -> Mapping[int, DeviceRole]:
    """The role of every device, by ifindex. `patterns` name the only host devices, if given."""
    return {
        index: choice.role for index, choice in decide_roles(devices, patterns, excluded).items()
    }


def decide_roles(
    devices: Iterable[Device], patterns: tuple[str, ...] = (), excluded: tuple[str, ...] = ()
) -> Mapping[int, RoleChoice]:
    """As choose(), with the reasons. The rules are those above."""
    by_ifindex = {device.ifindex: device for device in devices}
    ports: dict[int, list[Device]] = {}
    for device in by_ifindex.values():
        ports.setdefault(device.master, []).append(device)

    def choose_role(device: Device) -> RoleChoice:
        skip_reason = _reason_to_skip(device, excluded)
        if skip_reason:
            return RoleChoice(DeviceRole.SKIPPED, skip_reason)
        if _matches(device.name, patterns):
            return RoleChoice(DeviceRole.HOST, "named by the operator")
        if device.kind in SKIPPED_KINDS or (device.kind == "openvswitch" and not device.has_subnet):
            return RoleChoice(DeviceRole.SKIPPED, f"{device.kind}: nothing comes up by it")
        master = by_ifindex.get(device.master)
        if device.master and (master is None or master.kind != "vrf"):
            return RoleChoice(
                DeviceRole.SKIPPED, f"a port of {master.name if master else device.master}"
            )
        choice = _choose_by_kind(device, ports.get(device.ifindex, ()), bool(patterns))
        if choice.role is DeviceRole.HOST and patterns:
            return RoleChoice(DeviceRole.SKIPPED, "not named by the operator")
        return choice

    return {index: choose_role(device) for index, device in sorted(by_ifindex.items())}


def find_unmatched(devices: Iterable[Device], patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns that name no device, in order."""
    names = [device.name for device in devices]
    return tuple(
        pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)
    )


def is_local(device: Device, role: DeviceRole, config: Config) -> bool:
    """Whether what comes in by this device comes from pods of this node, as
    far as devices say so: networks, where they decide, are asked first.

    With a mode that names devices only the name counts, as in kube-proxy's rules. Packets of a
    bridge's ports come in by the bridge.
    """
    match config.detect_local_mode:
        case LocalMode.BRIDGE_INTERFACE:
            return device.name == config.pod_bridge_interface
        case LocalMode.INTERFACE_NAME_PREFIX:
            return device.name.startswith(config.pod_interface_name_prefix)
        case _:
            return role is DeviceRole.POD


def has_peer_in_pod(device: Device, role: DeviceRole) -> bool:
    """Whether bpf_redirect_peer() from this device gets into a pod: drivers of cables only."""
    return role is DeviceRole.POD and device.kind in PEERED_KINDS and device.peer_netns is not None


def _reason_to_skip(device: Device, excluded: tuple[str, ...]) -> str:
    """Rules 1 to 4: why this device is skipped whatever the operator named; empty if it is not."""
    if device.loopback:
        return "loopback"
    if device.name.startswith(OWN_PREFIX):
        return "kbpf's own"
    if _matches(device.name, excluded):
        return "excluded by the operator"
    return "" if device.carries_ip else f"link type {device.link_type} carries no IP that we read"


def _choose_by_kind(device: Device, ports: Collection[Device], has_patterns: bool) -> RoleChoice:
    """Rules 8 to 10."""
    if device.kind == "bridge":
        outside_ports = [port.name for port in ports if port.kind not in INTERNAL_KINDS]
        if outside_ports:
            return RoleChoice(
                DeviceRole.HOST, f"a bridge with the way outside {min(outside_ports)}"
            )
        return RoleChoice(DeviceRole.POD, f"a bridge of pods, ports: {len(ports)}")
    if device.kind in PEERED_KINDS and device.peer_netns is not None:
        if device.has_subnet and not has_patterns:
            return RoleChoice(
                DeviceRole.HOST, "a cable with an address in a subnet: this node's uplink"
            )
        return RoleChoice(DeviceRole.POD, "a cable into another namespace")
    return RoleChoice(DeviceRole.HOST, device.kind or "hardware")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
