# SPDX-License-Identifier: Apache-2.0
"""Decides which devices get the packet programs: pure functions from a device listing to roles, and
Newcomers, which lets new devices wait.

Traffic from outside, and replies of backends on other nodes, arrive on a **host** device: an uplink
or an overlay. Packets of this node's own pods arrive on a **pod** device. The first rule that
applies decides:

1. Loopback: skipped. Connections within the node are translated by the socket hooks.
2. `kbpf-*`: skipped. These are our own devices.
3. Excluded by the operator (fnmatch patterns): skipped.
4. A link type in whose frames we cannot find IP packets (CAN, InfiniBand, monitors): skipped.
5. Named by the operator: host, whatever its kind.
6. Kinds that deliver no packets to the host's IP stack, or only packets that another device shows:
   skipped. These are dummy, ifb, nlmon, vrf (its ports show the packets), macvtap and ipvtap (a
   virtual machine receives them), and Open vSwitch devices without an address in a subnet (br-int,
   br-tun, ovs-system). An Open vSwitch device with one connects to the host: antrea-gw0, br-ex.
7. A port of a bridge, bond, team or switch: skipped. Its master shows the packets that reach the
   host, and packets that are only bridged do not concern us. There are two exceptions. A port of a
   VRF is treated as if it had no master. And if br_netfilter is in force
   (`net.bridge.bridge-nf-call-iptables`, which kubeadm requires), the ports of a bridge with
   programs have the role **port**: conntrack sees a packet as it enters the port, and would not
   know the connection of one that only the bridge's program translates. So it is translated at the
   port, where only the program for ingress is attached.
8. A bridge: pod if it has only ports of pods and overlays (cni0, cbr0, weave, docker0), or none,
   so that the first pod finds the program in place. The bridge device sees the routed packets of
   its ports once, with its own MAC address. With any other port (an uplink, a tap): host.
9. A veth or netkit whose peer is in another namespace: pod (cali*, lxc*, eni*, veth* of ptp and
   kindnet). With an address in a subnet: host, since then the node is itself a container (kind,
   k3d, LXD) and this is its uplink. CNIs give the host's end no address, or one with a full prefix
   (/32, /128). If the operator has named the host devices: always pod.
10. Everything else: host, or skipped if the operator has named the host devices.

A device that is down gets its programs as well, so that they are in place before its first packet.
Of more than MAX_DEVICES devices with programs the newest are skipped, those of pods first.

New devices of pods wait for the CNI plugin bandwidth, on kernels without TCX. To limit what a pod
sends, the plugin adds an "ingress" qdisc to the pod's device, which fails if a clsact is there; then
the pod cannot be created. It runs some milliseconds after the device was. So once one of its ifb
devices was seen on the node, new devices get our filters after GRACE_S. The first such pod may fail;
kubelet tries again, and by then the ifb device was seen. Our programs have no place on the device of
such a pod (describe_limited()).
"""

import time
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.layout import MAX_DEVICES
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.tc import AttachMethod
from kbpf.kernel.net.devices import Device
from kbpf.model.config import Config, LocalMode

OWN_PREFIX: Final = "kbpf-"
PEERED_KINDS: Final = frozenset(("veth", "netkit"))
OVERLAY_KINDS: Final = frozenset(("vxlan", "geneve", "gretap", "ip6gretap"))
INTERNAL_KINDS: Final = PEERED_KINDS | OVERLAY_KINDS | {"dummy"}
"""A bridge that has only ports of these kinds has no uplink."""
SKIPPED_KINDS: Final = frozenset(("dummy", "ifb", "nlmon", "vrf", "macvtap", "ipvtap"))


class DeviceRole(StrEnum):
    HOST = "host"
    POD = "pod"
    PORT = "port"
    SKIPPED = "skipped"


class RoleChoice(NamedTuple):
    """The role of a device, and the reason in a few words."""

    role: DeviceRole
    reason: str


def assign_roles(
    devices: Iterable[Device], patterns: tuple[str, ...] = (), excluded: tuple[str, ...] = ()
) -> Mapping[int, DeviceRole]:
    """The role of every device, by ifindex. If `patterns` are given, only devices that match one
    of them are host devices.
    """
    return {index: choice.role for index, choice in decide_roles(devices, patterns, excluded).items()}


def decide_roles(
    devices: Iterable[Device], patterns: tuple[str, ...] = (), excluded: tuple[str, ...] = ()
) -> Mapping[int, RoleChoice]:
    """Like assign_roles(), with the reasons."""
    by_ifindex = {device.ifindex: device for device in devices}
    ports: dict[int, list[Device]] = {}
    for device in by_ifindex.values():
        ports.setdefault(device.master, []).append(device)

    @cache  # each port asks for its bridge
    def choose_role(device: Device) -> RoleChoice:
        skip_reason = _reason_to_skip(device, excluded)
        if skip_reason:
            return RoleChoice(DeviceRole.SKIPPED, skip_reason)
        if _matches(device.name, patterns):
            return RoleChoice(DeviceRole.HOST, "named by the operator")
        if device.kind in SKIPPED_KINDS or (device.kind == "openvswitch" and not device.has_subnet):
            return RoleChoice(DeviceRole.SKIPPED, f"{device.kind}: delivers no packets to the host")
        master = by_ifindex.get(device.master)
        if device.master and (master is None or master.kind != "vrf"):
            role, reason = DeviceRole.SKIPPED, f"port of {master.name if master else device.master}"
            if master and master.bridge_netfilter and choose_role(master).role is not DeviceRole.SKIPPED:
                role, reason = DeviceRole.PORT, f"{reason}, with br_netfilter"
            return RoleChoice(role, reason)
        choice = _choose_by_kind(device, ports.get(device.ifindex, ()), bool(patterns))
        if choice.role is DeviceRole.HOST and patterns:
            return RoleChoice(DeviceRole.SKIPPED, "not named by the operator")
        return choice

    choices = {index: choose_role(device) for index, device in sorted(by_ifindex.items())}
    return choices | _leave_out(choices)


LEFT_OUT_REASON: Final = f"{MAX_DEVICES:,} others have programs, which is the limit"


def _leave_out(choices: Mapping[int, RoleChoice]) -> dict[int, RoleChoice]:
    """The devices that the map `devices` has no room for: the newest, those of pods first."""
    served = [index for index, choice in choices.items() if choice.role is not DeviceRole.SKIPPED]
    served.sort(key=lambda index: (choices[index].role is not DeviceRole.HOST, index))
    left_out = RoleChoice(DeviceRole.SKIPPED, LEFT_OUT_REASON)
    return dict.fromkeys(served[MAX_DEVICES:], left_out)


def count_left_out(choices: Mapping[int, RoleChoice]) -> int:
    """How many devices get no programs because too many others have them."""
    return sum(choice.reason == LEFT_OUT_REASON for choice in choices.values())


def describe_left_out(count: int) -> str:
    return (
        f"{count} devices have no packet programs: {LEFT_OUT_REASON}; name those that need none in "
        "--exclude-device (`kbpf inspect devices` lists them)"
    )


def directions_of(role: DeviceRole) -> tuple[Direction, ...]:
    """The directions in which a device of this role has programs."""
    match role:
        case DeviceRole.SKIPPED:
            return ()
        case DeviceRole.PORT:
            return (Direction.INGRESS,)
        case _:
            return tuple(Direction)


def find_unmatched(devices: Iterable[Device], patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns that match no device, in order."""
    names = [device.name for device in devices]
    return tuple(pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names))


def is_local(device: Device, role: DeviceRole, config: Config) -> bool:
    """Whether packets that arrive on this device count as sent by pods of this node. If networks
    decide that (NodeFlag.LOCAL_NETWORKS), the programs ignore this.

    If detectLocalMode goes by device, only the name counts, as in kube-proxy's rules. Packets from
    the ports of a bridge arrive on the bridge.
    """
    match config.detect_local_mode:
        case LocalMode.BRIDGE_INTERFACE:
            return device.name == config.pod_bridge_interface
        case LocalMode.INTERFACE_NAME_PREFIX:
            return device.name.startswith(config.pod_interface_name_prefix)
        case _:
            return role is DeviceRole.POD


def has_peer_in_pod(device: Device, role: DeviceRole) -> bool:
    """Whether bpf_redirect_peer() through this device reaches a pod. Only the drivers of veth and
    netkit support it.
    """
    return role is DeviceRole.POD and device.kind in PEERED_KINDS and device.peer_netns is not None


def _reason_to_skip(device: Device, excluded: tuple[str, ...]) -> str:
    """Rules 1 to 4: why this device is skipped even if the operator named it; "" if it is not."""
    if device.loopback:
        return "loopback"
    if device.name.startswith(OWN_PREFIX):
        return "kbpf's own"
    if _matches(device.name, excluded):
        return "excluded by the operator"
    return "" if device.carries_ip else f"link type {device.link_type} is not supported"


def _choose_by_kind(device: Device, ports: Collection[Device], has_patterns: bool) -> RoleChoice:
    """Rules 8 to 10."""
    if device.kind == "bridge":
        outside_ports = [port.name for port in ports if port.kind not in INTERNAL_KINDS]
        if outside_ports:
            return RoleChoice(DeviceRole.HOST, f"bridge with the uplink {min(outside_ports)}")
        return RoleChoice(DeviceRole.POD, f"bridge of pods, ports: {len(ports)}")
    if device.kind in PEERED_KINDS and device.peer_netns is not None:
        if device.has_subnet and not has_patterns:
            return RoleChoice(DeviceRole.HOST, f"{device.kind} with an address in a subnet: this node's uplink")
        return RoleChoice(DeviceRole.POD, f"{device.kind} into another namespace")
    return RoleChoice(DeviceRole.HOST, device.kind or "hardware")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ---- newcomers -----------------------------------------------------------------------------------

LIMITER_PREFIX: Final = "bwp"
"""How the plugin names its ifb devices (containernetworking/plugins v1.9.1, bandwidth/main.go)."""
GRACE_S: Final = 2.0


def describe_limited(names: Collection[str]) -> str:
    """The problem of pod devices with an "ingress" qdisc. `names`: not empty, in order."""
    suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"pod device {next(iter(names))}{suffix}: an 'ingress' qdisc, as of the CNI plugin "
        "bandwidth (kubernetes.io/egress-bandwidth), has the place of kbpf's programs, so the "
        "Pod's own packets to Services are translated by socket hooks only, and with --forwarding "
        "stack it sees its clients' own addresses; Linux 6.6 has no such limit"
    )


class Newcomers:
    """Remembers since when each device exists."""

    def __init__(self) -> None:
        self._seen_at: dict[int, float] | None = None
        self._pods_are_limited = False

    def find_waiting(
        self, listing: Collection[Device], choices: Mapping[int, RoleChoice], method: AttachMethod
    ) -> frozenset[int]:
        """The ifindexes of devices that get no filters yet. Those of the first listing are not
        new: their plugins have run, or have failed by now.
        """
        now, seen_at = time.monotonic(), self._seen_at
        self._seen_at = {
            index: -GRACE_S if seen_at is None else seen_at.get(index, now)
            for index in (device.ifindex for device in listing)
        }
        self._pods_are_limited |= any(
            device.kind == "ifb" and device.name.startswith(LIMITER_PREFIX) for device in listing
        )
        if method is AttachMethod.TCX or not self._pods_are_limited:
            return frozenset()
        return frozenset(
            index
            for index, at in self._seen_at.items()
            if now < at + GRACE_S and choices[index].role in (DeviceRole.POD, DeviceRole.PORT)
        )
