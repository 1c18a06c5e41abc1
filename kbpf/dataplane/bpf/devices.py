"""Which devices carry the packet programs, and keeping their attachments in step.

Choosing is pure: decide() and choose() map a listing to roles. `Devices` makes it so.

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

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.devices import Device
from kbpf.kernel.libbpf import Program
from kbpf.kernel.tc import OURS, Attachment, Direction, How, Mark, Tc
from kbpf.model.config import Config, LocalMode

log = logging.getLogger("kbpf.dataplane")

OWN_PREFIX: Final = "kbpf-"
CABLES: Final = frozenset(("veth", "netkit"))
NOT_OUTSIDE: Final = CABLES | {"vxlan", "geneve", "gretap", "ip6gretap", "dummy"}
"""A bridge with ports of these kinds only has no way outside of its own."""
MUTE: Final = frozenset(("dummy", "ifb", "nlmon", "vrf", "macvtap", "ipvtap"))


class Role(StrEnum):
    """What a device is to us."""

    HOST = "host"
    POD = "pod"
    SKIPPED = "skipped"


class Choice(NamedTuple):
    """The role of a device, and why, in a few words."""

    role: Role
    why: str


def choose(
    devices: Iterable[Device], patterns: tuple[str, ...] = (), excluded: tuple[str, ...] = ()
) -> Mapping[int, Role]:
    """The role of every device, by ifindex. `patterns` name the only host devices, if given."""
    return {index: made.role for index, made in decide(devices, patterns, excluded).items()}


def decide(
    devices: Iterable[Device], patterns: tuple[str, ...] = (), excluded: tuple[str, ...] = ()
) -> Mapping[int, Choice]:
    """As choose(), with the reasons. The rules are those above."""
    known = {device.ifindex: device for device in devices}
    ports: dict[int, list[Device]] = {}
    for device in known.values():
        ports.setdefault(device.master, []).append(device)

    def one(device: Device) -> Choice:
        never = _never(device, excluded)
        if never:
            return Choice(Role.SKIPPED, never)
        if _matches(device.name, patterns):
            return Choice(Role.HOST, "named by the operator")
        if device.kind in MUTE or (device.kind == "openvswitch" and not device.has_subnet):
            return Choice(Role.SKIPPED, f"{device.kind}: nothing comes up by it")
        master = known.get(device.master)
        if device.master and (master is None or master.kind != "vrf"):
            return Choice(Role.SKIPPED, f"a port of {master.name if master else device.master}")
        found = _by_kind(device, ports.get(device.ifindex, ()), bool(patterns))
        if found.role is Role.HOST and patterns:
            return Choice(Role.SKIPPED, "not named by the operator")
        return found

    return {index: one(device) for index, device in sorted(known.items())}


def is_local(device: Device, role: Role, config: Config) -> bool:
    """Whether what comes in by this device comes from pods of this node (reference 2.1, 2.2), as
    far as devices say so: networks, where they decide, are asked first.

    With a mode that names devices only the name counts, as in kube-proxy's rules. Packets of a
    bridge's ports come in by the bridge.
    """
    match config.detect_local_mode:
        case LocalMode.BRIDGE:
            return device.name == config.pod_bridge_interface
        case LocalMode.PREFIX:
            return device.name.startswith(config.pod_interface_name_prefix)
        case _:
            return role is Role.POD


def reaches_pod(device: Device, role: Role) -> bool:
    """Whether bpf_redirect_peer() from this device gets into a pod: drivers of cables only."""
    return role is Role.POD and device.kind in CABLES and device.peer_netns is not None


def _never(device: Device, excluded: tuple[str, ...]) -> str:
    """Rules 1 to 4: why this device is skipped whatever the operator named; empty if it is not."""
    if device.loopback:
        return "loopback"
    if device.name.startswith(OWN_PREFIX):
        return "kbpf's own"
    if _matches(device.name, excluded):
        return "excluded by the operator"
    return "" if device.carries_ip else f"link type {device.link_type} carries no IP that we read"


def _by_kind(device: Device, ports: Collection[Device], named: bool) -> Choice:
    """Rules 8 to 10."""
    if device.kind == "bridge":
        outside = [port.name for port in ports if port.kind not in NOT_OUTSIDE]
        if outside:
            return Choice(Role.HOST, f"a bridge with the way outside {min(outside)}")
        return Choice(Role.POD, f"a bridge of pods, ports: {len(ports)}")
    if device.kind in CABLES and device.peer_netns is not None:
        if device.has_subnet and not named:
            return Choice(Role.HOST, "a cable with an address in a subnet: this node's uplink")
        return Choice(Role.POD, "a cable into another namespace")
    return Choice(Role.HOST, device.kind or "hardware")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ---- making it so --------------------------------------------------------------------------


Pick = Callable[[Device, Role, Direction], Program | None]
"""Which program belongs there; None: none."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one sync() did, and what holds now.

    `choices`: by ifindex. `attached`: everything of ours. `failed`: device name → why; a device
    with an error keeps what it had and is tried again by the next sync().
    """

    choices: Mapping[int, Choice] = field(default_factory=dict)
    attached: tuple[Attachment, ...] = ()
    added: int = 0
    replaced: int = 0
    removed: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)


class Devices:
    """The attachments of one agent on the devices of the network namespace of the caller.

    Pins are in `<pin_dir>/devices/`: `<ifindex>-<direction>` for a TCX link, an empty folder
    `<ifindex>-clsact` for a qdisc that we made. What an earlier agent attached is read back each
    time, so there is nothing to adopt, and a sync() after somebody removed a program repairs it.
    One thread calls.
    """

    def __init__(
        self,
        pin_dir: Path,
        patterns: tuple[str, ...] = (),
        excluded: tuple[str, ...] = (),
        how: How | None = None,
        mark: Mark = OURS,
    ) -> None:
        self._folder = pin_dir / "devices"
        self._patterns = patterns
        self._excluded = excluded
        self._how = how
        self._mark = mark
        self._report = DeviceReport()

    def status(self) -> DeviceReport:
        """What the last sync() said."""
        return self._report

    def decide(self, devices: Iterable[Device]) -> Mapping[int, Choice]:
        """As the function of this name, with what the operator said."""
        return decide(devices, self._patterns, self._excluded)

    def sync(self, devices: Iterable[Device], pick: Pick) -> DeviceReport:
        """Attaches, replaces and detaches until every device in this listing has the programs
        that `pick` gives for its role, and no others of ours.

        An error of one device is reported and stops none of the others. KernelError if nothing
        can be read at all. Making links takes some 25 ms per device, so the first sync() of a node
        with many pods belongs into a thread that nobody waits for.
        """
        listed = tuple(devices)
        choices = self.decide(listed)
        failed: dict[str, str] = {}
        with self._tc() as tc:
            tc.sweep()
            step = _Step(tc, tc.everything())
            # Host devices first: making many links takes its time (tc.py).
            for device in sorted(listed, key=lambda d: choices[d.ifindex].role is not Role.HOST):
                role = choices[device.ifindex].role
                try:
                    for direction in Direction:
                        program = None if role is Role.SKIPPED else pick(device, role, direction)
                        step.put(device.ifindex, direction, program)
                except KernelError as error:
                    failed[device.name] = str(error)
        for name in sorted(failed.keys() - self._report.failed.keys()):
            log.warning("device=%s %s", name, failed[name])
        if step.did:
            log.info("devices %s", " ".join(f"{k}={n}" for k, n in sorted(step.did.items())))
        self._report = DeviceReport(choices, step.attached, **step.did, failed=failed)
        return self._report

    def remove(self) -> int:
        """Takes everything of ours away, from all devices; how many attachments there were.

        KernelError, after all the others are gone, if one cannot be removed.
        """
        errors = []
        with self._tc() as tc:
            found = tc.everything()
            for one in found:
                try:
                    tc.detach(one)
                except KernelError as error:
                    errors.append(error)
            tc.sweep()
        if errors:
            raise errors[0]
        # What may be left are marks of qdiscs that others use by now.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._report = DeviceReport()
        return len(found)

    def _tc(self) -> Tc:
        return Tc(self._folder, self._how, self._mark)


class _Step:
    """One sync() under way: what we hold by place, and what was done."""

    def __init__(self, tc: Tc, found: Iterable[Attachment]) -> None:
        self._tc = tc
        self._held: dict[tuple[int, Direction], tuple[Attachment, ...]] = {}
        self.did: Counter[str] = Counter()
        for one in found:
            place = one.ifindex, one.direction
            self._held[place] = (*self._held.get(place, ()), one)

    @property
    def attached(self) -> tuple[Attachment, ...]:
        """What we hold now."""
        return tuple(one for place in sorted(self._held) for one in self._held[place])

    def put(self, ifindex: int, direction: Direction, program: Program | None) -> None:
        """Makes this program, or none, what we have there; in one way only."""
        place = ifindex, direction
        have = self._held.get(place, ())
        same = [one for one in have if one.how is self._tc.how]
        if program is not None and [one.program for one in same] != [program.info().id]:
            made = self._tc.attach(ifindex, direction, program)
            if made is None:  # the device is gone, and with it all that was there
                self._held.pop(place, None)
                return
            self.did["replaced" if have else "added"] += 1
            self._held[place] = have = (*(one for one in have if one not in same), made)
        for one in have:  # only now, so that no packet meets neither
            if program is None or one.how is not self._tc.how:
                self._tc.detach(one)
                self._held[place] = tuple(kept for kept in self._held[place] if kept != one)
        if program is None and have:
            self.did["removed"] += len(have)
