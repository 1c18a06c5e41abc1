# SPDX-License-Identifier: Apache-2.0
"""Compares what belongs to the node with what it should be: settings and addresses in maps, the
programs at socket hooks and on devices, and other tools' programs there.
"""

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.exemptions import find_matching, find_pod_folders
from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.inspect.attached import read_hooks
from kbpf.dataplane.bpf.inspect.differences import DAMAGED, FOREIGN, MISSING, STALE, differ
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import (
    CACHED_DEVICE,
    CONFIG,
    DEVICE,
    MAPS,
    MONITOR_RINGS,
    NODE,
    OUTER_MAPS,
    U32,
    U64,
    ConfigFlag,
    NodeFlag,
    unpack_network,
    unpack_source_range,
)
from kbpf.dataplane.bpf.maps.pinning import OLD_PREFIX, Pins, packet_program_folders
from kbpf.dataplane.bpf.packet_path.device_roles import decide_roles, directions_of
from kbpf.dataplane.bpf.packet_path.node_maps import NO_ADDRESS, pack_devices, pack_node, pack_sources
from kbpf.dataplane.bpf.programs import foreign
from kbpf.dataplane.bpf.programs.hook_config import affinity_share, compute_exemptions, compute_settings
from kbpf.dataplane.bpf.programs.loader import missing_helpers
from kbpf.dataplane.bpf.programs.unpinned import open_attacher
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.net.devices import Device, list_devices
from kbpf.kernel.system import mounts, netns
from kbpf.model.address import Addr, format_addr
from kbpf.model.config import Config, SocketLb
from kbpf.model.desired import DesiredState
from kbpf.model.inspection import Difference, HookEntry

MAPS_COMPARED: Final = (
    "config",
    "node",
    "local_networks",
    "devices",
    "device_cache",
    "device_sources",
    "exempt_cgroups",
)
ZERO: Final = U32.pack(0)

HOOK_ADVICE: Final = (
    "the agent attaches it again within 30 s; if it does not, its log says why: see the problems "
    "of `kbpf inspect status`"
)
DEVICE_ADVICE: Final = "the agent attaches it again within 30 s; if it does not, see `kbpf inspect devices`"
CONFIG_ADVICE: Final = "if `kbpf verify` used the settings of the agent, restart the agent, which writes it again"


class NodeContents(NamedTuple):
    """The entries of MAPS_COMPARED, by map; and the hooks, the devices and their programs."""

    entries: Mapping[str, Mapping[bytes, bytes]]
    hooks: tuple[HookEntry, ...]
    pinned: frozenset[str]
    devices: tuple[Device, ...]
    attached: Mapping[tuple[int, str], frozenset[int]]
    packet_programs: Mapping[str, frozenset[int]]
    others: tuple[foreign.ForeignProgram, ...]


def read_contents(pins: Pins, maps: Mapping[str, Map]) -> NodeContents:
    entries = {name: dict(maps[name].items()) for name in MAPS_COMPARED}
    hook_entries = tuple(read_hooks(pins))
    cgroup = next((Path(hook.cgroup) for hook in hook_entries if hook.cgroup), None)
    attached: dict[tuple[int, str], set[int]] = {}
    with open_attacher(pins) as kernel:
        for attachment in kernel.list_all():
            place = attachment.ifindex, str(attachment.direction)
            attached.setdefault(place, set()).add(attachment.program_id)
    return NodeContents(
        entries,
        hook_entries,
        frozenset(pin.name for folder in pins.root.glob("programs-sock-*") for pin in folder.iterdir()),
        list_devices(),
        {place: frozenset(ids) for place, ids in attached.items()},
        _read_packet_programs(pins),
        foreign.find_all(pins.root, cgroup),
    )


def _read_packet_programs(pins: Pins) -> Mapping[str, frozenset[int]]:
    """Direction → ids of the pinned programs."""
    ids: dict[str, set[int]] = {"ingress": set(), "egress": set()}
    for folder in packet_program_folders(pins):
        for direction, known in ids.items():
            try:
                with Program.open(folder / f"tc_{direction}") as program:
                    known.add(program.read_info().id)
            except KernelError:
                continue  # removed meanwhile
    return {direction: frozenset(known) for direction, known in ids.items()}


def compare(contents: NodeContents, desired: DesiredState, config: Config) -> Iterator[Difference]:
    """All differences of the node. `config`: the settings of the agent."""
    yield from _compare_config(contents, config)
    yield from _compare_hooks(contents, config)
    if desired.exempt_pods_known:
        yield from _compare_exemptions(contents, desired, config)
    if config.packet_path:
        yield from _compare_node(contents, desired, config)
        yield from _compare_devices(contents, config)
    elif contents.attached:
        yield Difference(STALE, "devices", "", "no packet path", "its programs", DEVICE_ADVICE)
    # One that only runs before ours is no difference: a packet shows whether ours sees it.
    for line in foreign.format_lines([other for other in contents.others if not other.is_ahead]):
        yield Difference(FOREIGN, "programs", "", "", line, "see docs/troubleshoot.md")


# ---- maps ----------------------------------------------------------------------------------------


STATE_FLAGS: Final = ConfigFlag.COEXISTING | ConfigFlag.TRACING
"""Set while a kube-proxy has connections, and by what the kernel supports."""


def _compare_config(contents: NodeContents, config: Config) -> Iterator[Difference]:
    raw = contents.entries["config"].get(ZERO) or bytes(CONFIG.size)
    cookie, flags, share = CONFIG.unpack(raw)
    expected = compute_settings(config, missing_helpers())
    expected |= compute_exemptions(config, bool(contents.entries["exempt_cgroups"]))
    actual = ConfigFlag(flags) & ~STATE_FLAGS
    if actual != expected:
        yield differ("config", "", _format_flags(expected), _format_flags(actual), CONFIG_ADVICE)
    if cookie != (netns.read_cookie() or 0):
        yield differ("config", "", "the network namespace of this node", f"that with cookie {cookie}", CONFIG_ADVICE)
    if share != affinity_share(config):
        text = f"{affinity_share(config)} entries of affinity for one owner"
        yield differ("config", "", text, str(share), CONFIG_ADVICE)


def _format_flags(flags: ConfigFlag | NodeFlag) -> str:
    return ", ".join(flag.name.lower() for flag in flags if flag.name) or "no flags"


def _compare_exemptions(contents: NodeContents, desired: DesiredState, config: Config) -> Iterator[Difference]:
    hooked = config.cgroup or mounts.find_cgroup_root()
    try:
        root = mounts.find_cgroup_root()
    except KernelError:  # only a part of the tree is visible
        root = hooked
    folders = {folder.id: folder.path for _, folder in find_pod_folders(hooked, desired.exempt_pods)}
    folders |= {folder.id: folder.path for folder in find_matching(root, config.socket_lb_exempt)}
    actual = {U64.unpack(key)[0] for key in contents.entries["exempt_cgroups"]}
    for number in sorted(folders.keys() - actual):
        path = f"/{folders[number]}"
        yield differ("exempt_cgroups", path, f"cgroup {number}", "", HOOK_ADVICE)
    for number in sorted(actual - folders.keys()):
        yield differ("exempt_cgroups", "", "", f"cgroup {number}", HOOK_ADVICE)


def _compare_node(contents: NodeContents, desired: DesiredState, config: Config) -> Iterator[Difference]:
    expected = NODE.unpack(pack_node(config, desired))
    actual = NODE.unpack(contents.entries["node"].get(ZERO) or bytes(NODE.size))
    for name, one, other in zip(("IPv4 for SNAT", "IPv6 for SNAT"), expected, actual, strict=False):
        if one != other:
            yield differ("node", name, _format_source(one), _format_source(other), CONFIG_ADVICE)
    ignored = NodeFlag.PASSIVE | NodeFlag.COEXISTING
    if config.forwarding == "auto":  # the agent has found out what the kernel can do
        ignored |= NodeFlag.NETFILTER
    ours, theirs = NodeFlag(expected[2]) & ~ignored, NodeFlag(actual[2]) & ~ignored
    if ours != theirs:
        yield differ("node", "", _format_flags(ours), _format_flags(theirs), CONFIG_ADVICE)
    for name, start, end in (
        ("ports for SNAT", 3, 5),
        ("mark of masqueraded packets", 5, 6),
        ("--max-connections", 6, 7),
    ):
        if expected[start:end] != actual[start:end]:
            text, other = ("-".join(map(str, value[start:end])) for value in (expected, actual))
            yield differ("node", name, text, other, CONFIG_ADVICE)
    networks = {unpack_network(key) for key in contents.entries["local_networks"]}
    for cidr in sorted(set(desired.local_networks) - networks):
        yield differ("local_networks", "", str(cidr), "", CONFIG_ADVICE)
    for cidr in sorted(networks - set(desired.local_networks)):
        yield differ("local_networks", "", "", str(cidr), CONFIG_ADVICE)


def _format_source(address: bytes) -> str:
    return format_addr(Addr(address)) if any(address) else "none"


# ---- hooks and devices ---------------------------------------------------------------------------


def _compare_hooks(contents: NodeContents, config: Config) -> Iterator[Difference]:
    cgroup = config.cgroup or mounts.find_cgroup_root()
    wanted = {
        hook.name
        for hook in HOOKS
        if hook.is_wanted(config.accounting) and (hook.required or hook.name in contents.pinned)
    }
    if config.socket_lb is SocketLb.OFF:
        wanted = set()
    for entry in contents.hooks:
        where = f"hook {entry.name}"
        if entry.name not in wanted:
            if entry.attached:
                yield differ(where, entry.purpose, "", "attached", HOOK_ADVICE)
            continue
        place = entry.tracepoint or str(cgroup)
        if not entry.attached:
            actual = "" if entry.link is None else "its cgroup was removed, or it was detached"
            yield Difference(MISSING, where, entry.purpose, f"at {place}", actual, HOOK_ADVICE)
        elif not entry.pinned:
            name = foreign.program_name(entry.program or 0) or "without a name"
            text = f"program {entry.program} ({name}), which this agent has not pinned"
            yield Difference(FOREIGN, where, entry.purpose, "kbpf's program", text, HOOK_ADVICE)
        elif not entry.tracepoint and entry.cgroup_id != mounts.read_inode(cgroup):
            actual = f"at {entry.cgroup or f'cgroup {entry.cgroup_id}'}"
            yield differ(where, entry.purpose, f"at {cgroup}", actual, HOOK_ADVICE)


def _compare_devices(contents: NodeContents, config: Config) -> Iterator[Difference]:
    devices = {device.ifindex: device for device in contents.devices}
    choices = decide_roles(contents.devices, config.devices, config.excluded_devices)
    for ifindex, choice in choices.items():
        name, directions = devices[ifindex].name, [*map(str, directions_of(choice.role))]
        for direction in ("ingress", "egress"):
            ids = contents.attached.get((ifindex, direction), frozenset())
            is_ours = bool(ids & contents.packet_programs[direction])
            where = f"{direction} of {name}"
            if direction in directions and not ids:
                text = f"tc_{direction}, as the device of a {choice.role}"
                yield differ("devices", where, text, "", DEVICE_ADVICE)
            elif direction in directions and not is_ours:
                text = f"program {min(ids)}, which this agent has not pinned"
                yield Difference(FOREIGN, "devices", where, f"tc_{direction}", text, DEVICE_ADVICE)
            elif direction not in directions and ids:
                yield differ("devices", where, "", f"program {min(ids)}", DEVICE_ADVICE)
    no_egress = [index for index in choices if not contents.attached.get((index, "egress"))]
    expected = pack_devices(contents.devices, choices, config, no_egress)
    yield from _compare_device_maps(contents, expected, devices)
    expected, actual = pack_sources(contents.devices, choices), contents.entries["device_sources"]
    for key in sorted(expected.keys() | actual.keys()):
        one, other = expected.get(key, NO_ADDRESS), actual.get(key, NO_ADDRESS)
        if one != other:
            ifindex, network = unpack_source_range(key)
            where = f"ifindex {ifindex}, {network}"
            yield differ("device_sources", where, _format_source(one), _format_source(other), DEVICE_ADVICE)


def _compare_device_maps(
    contents: NodeContents, expected: Mapping[bytes, bytes], devices: Mapping[int, Device]
) -> Iterator[Difference]:
    actual = contents.entries["devices"]

    def name(key: bytes) -> str:
        ifindex = int(U32.unpack(key)[0])
        return devices[ifindex].name if ifindex in devices else f"ifindex {ifindex}"

    for key in sorted(expected.keys() - actual.keys()):
        yield differ("devices", name(key), "an entry", "", DEVICE_ADVICE)
    for key in sorted(actual.keys() - expected.keys()):
        yield differ("devices", name(key), "", "an entry", DEVICE_ADVICE)
    for key in sorted(actual.keys() & expected.keys()):
        if actual[key] != expected[key]:
            text, other = _format_device(expected[key]), _format_device(actual[key])
            yield differ("devices", name(key), text, other, DEVICE_ADVICE)
    for raw in contents.entries["device_cache"].values():
        ifindex, value = CACHED_DEVICE.unpack(raw)
        # An element may be empty or lag behind (DeviceMap.write()), but must not contradict.
        key = U32.pack(ifindex)
        if ifindex and expected.get(key, value) != value:
            text, other = _format_device(expected[key]), _format_device(value)
            yield differ("device_cache", name(key), text, other, DEVICE_ADVICE)


def _format_device(raw: bytes) -> str:
    role, header, flags, mac, source4, source6, bridge = DEVICE.unpack(raw)
    sources = " ".join(map(_format_source, filter(any, (source4, source6)))) or "none"
    return f"role {role}, header {header}, flags {flags}, mac {mac.hex(':')}, sources {sources}, bridge {bridge}"


# ---- the maps themselves -------------------------------------------------------------------------


REPLACED_ADVICE: Final = "run `kbpf cleanup`, then start the agent again"


def open_maps(pins: Pins, stack: contextlib.ExitStack) -> tuple[dict[str, Map], list[Difference]]:
    """Opens all pinned maps that can be used, and what is wrong with the others. `stack` closes
    them.
    """
    maps, differences = dict[str, Map](), list[Difference]()
    for name, spec in MAPS.items():
        text = f"a map with keys of {spec.key_size} and values of {spec.value_size} bytes"
        try:
            map_ = stack.enter_context(pins.open_map(name))
        except KernelError as error:
            kind = MISSING if error.errno == errno.ENOENT else DAMAGED
            actual = "" if kind is MISSING else error.what
            differences.append(Difference(kind, name, "map", text, actual, REPLACED_ADVICE))
            continue
        maps[name] = map_
        if map_.is_frozen():
            actual = "frozen: no process can change it"
            differences.append(Difference(DAMAGED, name, "map", text, actual, REPLACED_ADVICE))
    return maps, differences


def compare_maps_in_use(pins: Pins, maps: Mapping[str, Map]) -> Iterator[Difference]:
    """Whether the pinned programs read the pinned maps, and no others."""
    pinned_ids = {map_.id: name for name, map_ in maps.items()}
    with Map.open(pins.maps / MONITOR_RINGS.name) as rings:
        pinned_ids[rings.id] = MONITOR_RINGS.name
    for name in OUTER_MAPS:
        inner = name.removesuffix("_outer")
        with Map.open(pins.maps / name) as outer:
            pinned_ids[outer.id] = name
            number = U32.unpack(outer.lookup(ZERO) or bytes(U32.size))[0]
        if inner in maps and number != maps[inner].id:
            text = f"map {maps[inner].id}, which is pinned"
            yield differ(name, "map", text, f"map {number}", REPLACED_ADVICE)
    for folder in (*pins.root.glob("programs-sock-*"), *packet_program_folders(pins)):
        try:
            others = pinning.map_ids_read_by(folder) - pinned_ids.keys()
        except (KernelError, FileNotFoundError):
            continue  # removed meanwhile
        if others:
            unit = folder.name.removeprefix(OLD_PREFIX).split("-")[1]
            text = f"map {min(others)}, which is not pinned"
            yield Difference(FOREIGN, "programs", f"unit {unit}", "the pinned maps", text, REPLACED_ADVICE)
