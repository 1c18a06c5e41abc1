# SPDX-License-Identifier: Apache-2.0
"""Runs a packet through a copy of the packet programs, without any effect on the node.

The copy has the same bytecode as the pinned programs, and reads the same Services, backends and
devices. Everything that the programs write goes into new maps, which are gone afterwards: no
connection, affinity or counter is left behind. BPF_PROG_TEST_RUN sends nothing.

With `--forwarding netfilter` the copy translates by itself: conntrack has no copy.
"""

import contextlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import AFFINITY_KEY, ALL_MAPS, MAPS, TAIL_CALL_MAP, U32, ClientKind, MapSpec
from kbpf.dataplane.bpf.maps.pinning import Pins, make_map, open_map
from kbpf.dataplane.bpf.packet_path.node_maps import write_refusal_limits
from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.dataplane.bpf.programs import artifact, compile
from kbpf.errors import NotFoundError
from kbpf.kernel.bpf import test_run
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr, family_of
from kbpf.model.config import Config, MapSizes
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol
from kbpf.model.reasons import Reason

SHARED_MAPS: Final = frozenset(
    (
        "services",
        "cluster_ips",
        "backends",
        "backend_slots",
        "set_members",
        "node_addresses",
        "services_outer",
        "cluster_ips_outer",
        "backends_outer",
        "backend_slots_outer",
        "set_members_outer",
        "node_addresses_outer",
        "frontend_ports",
        "source_ranges",
        "config",
        "node",
        "devices",
        "device_cache",
        "device_sources",
        "local_networks",
        "agent_sockets",
        "zero_counts",
        "new_flows_paused_until",
    )
)
"""The maps that the programs only read, and that the copy reads as well."""
SIZES: Final = MapSizes(connections=64, affinity=64, counts=64)
CLIENT_PORT: Final = 61_234
_SYN: Final = 0x02
_TTL: Final = 64


class Outcome(NamedTuple):
    """What the programs did with a packet. `reasons`: all that they counted. `source`,
    `destination`: the packet's addresses afterwards; of a refusal, those of the reply.
    """

    reasons: frozenset[Reason]
    source: FrontendAddress
    destination: FrontendAddress


class Arrival(NamedTuple):
    """Where a packet meets a program: at a device, by its ifindex and address. `egress`: where it
    leaves. `sender`: the client.
    """

    ifindex: int
    mac: bytes
    egress: bool
    sender: Addr


class Rehearsal:
    """The copy of the programs. `close()` frees it."""

    def __init__(self, pins: Pins, cache_dir: Path) -> None:
        """Raises NotFoundError if this command does not have the bytecode of the pinned programs,
        and KernelError.
        """
        self._stack = contextlib.ExitStack()
        unit = artifact.find("tc", cache_dir, compile.find_toolchain())
        if unit is None:
            raise NotFoundError(
                "the packet programs are not compiled here", str(cache_dir), "name the agent's --cache-dir"
            )
        packet_path = PacketPath(pins, unit, Config(forwarding="stack"))
        folder = pins.programs(packet_path.key)
        if not (folder.is_dir() or Path(f"{folder}-conntrack").is_dir()):
            raise NotFoundError(
                "the pinned packet programs are those of another kbpf",
                str(pins.root),
                "use the kbpf that runs as the agent",
            )
        with self._stack:
            self._maps = dict(self._open_maps(pins, packet_path.map_names))
            loaded = packet_path.prepare(self._maps)
            self._stack.callback(loaded.close)
            self._programs = loaded.programs
            self._pins, self._stack = pins, self._stack.pop_all()

    def __enter__(self) -> "Rehearsal":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open_maps(self, pins: Pins, names: Iterable[str]) -> Iterator[tuple[str, Map]]:
        for name in names:
            if name == TAIL_CALL_MAP:
                continue
            spec = ALL_MAPS[name]
            if name in SHARED_MAPS:
                map_ = open_map(pins.maps / name, spec)
            else:
                map_ = _make_private_map(spec)
            yield name, self._stack.enter_context(map_)
            if name == "refusal_limits":
                write_refusal_limits(map_)

    def run(self, arrival: Arrival, to: FrontendAddress, service_id: int) -> Outcome:
        """Runs the first packet of a connection. `service_id`: of the Service port whose affinity
        the client may have. Raises KernelError.
        """
        self._copy_affinity(arrival.sender, service_id)
        before = self._count_reasons()
        program = self._programs["tc_egress" if arrival.egress else "tc_ingress"]
        source = FrontendAddress(arrival.sender, CLIENT_PORT, to.protocol)
        frame = _build_frame(arrival.mac, source, to)
        _, raw = test_run.run_on_packet(program, frame, arrival.ifindex)
        counted = self._count_reasons()
        reasons = frozenset(reason for reason in Reason if counted[reason] > before[reason])
        return Outcome(reasons, *(_parse_frame(raw, to.protocol) if raw else (source, to)))

    def leave(self, ifindex: int, mac: bytes, packet: Outcome) -> Outcome:
        """Runs the packet, as the stack forwards it, through the program of the outgoing device."""
        frame = _build_frame(mac, packet.source, packet.destination)
        _, raw = test_run.run_on_packet(self._programs["tc_egress"], frame, ifindex)
        return Outcome(packet.reasons, *_parse_frame(raw, packet.source.protocol))

    def _copy_affinity(self, client: Addr, service_id: int) -> None:
        key = AFFINITY_KEY.pack(client, service_id, ClientKind.ADDRESS)
        with pinning.open_map(self._pins.maps / "affinity", ALL_MAPS["affinity"]) as affinity:
            value = affinity.lookup(key)
        if value is not None:
            self._maps["affinity"].update(key, value)

    def _count_reasons(self) -> Mapping[Reason, int]:
        reasons = self._maps["reasons"]
        return {reason: sum(memoryview(reasons.lookup(U32.pack(reason)) or b"").cast("Q")) for reason in Reason}


def _make_private_map(spec: MapSpec) -> Map:
    with contextlib.ExitStack() as stack:
        inner = stack.enter_context(_make_private_map(MAPS[spec.inner])) if spec.inner else None
        return make_map(replace(spec, grows=False), spec.max_entries(SIZES) or 1, inner)


def _build_frame(mac: bytes, source: FrontendAddress, to: FrontendAddress) -> bytes:
    """An Ethernet frame to this device: a SYN, or a datagram without content."""
    ports = struct.pack("!HH", source.port, to.port)
    is_tcp = to.protocol is Protocol.TCP
    body = ports + struct.pack("!HH", 8, 0)
    if is_tcp:
        body = ports + struct.pack("!IIBBHHH", 1, 0, 5 << 4, _SYN, 65_535, 0, 0)
    if family_of(to.address) == 4:
        header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, _TTL, to.protocol, 0)
        header += source.address[12:] + to.address[12:]
        header = header[:10] + _checksum(header) + header[12:]
        ethertype = 0x0800
    else:
        header = struct.pack("!IHBB", 6 << 28, len(body), to.protocol, _TTL)
        header += source.address + to.address
        ethertype = 0x86DD
    pseudo = source.address + to.address + struct.pack("!II", len(body), to.protocol)
    at = 16 if is_tcp else 6
    body = body[:at] + _checksum(pseudo + body) + body[at + 2 :]
    return mac + mac + struct.pack("!H", ethertype) + header + body


def _checksum(data: bytes) -> bytes:
    """RFC 1071. The prefix of IPv4-mapped addresses, 0xffff, does not change a sum."""
    total = sum(word for (word,) in struct.iter_unpack("!H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF or 0xFFFF)


def _parse_frame(raw: bytes, protocol: Protocol) -> tuple[FrontendAddress, FrontendAddress]:
    """Source and destination of a frame; their ports are 0 in an ICMP error."""
    packet = raw[14:]
    is_v4 = packet[0] >> 4 == 4
    start, width, offset, number = (12, 4, 20, packet[9]) if is_v4 else (8, 16, 40, packet[6])
    prefix = b"" if not is_v4 else bytes(10) + b"\xff\xff"
    addresses = (packet[at : at + width] for at in (start, start + width))
    has_ports = number == protocol
    ports = struct.unpack_from("!HH", packet, offset) if has_ports else (0, 0)
    first, second = (
        FrontendAddress(Addr(prefix + address), port, protocol) for address, port in zip(addresses, ports, strict=True)
    )
    return first, second
