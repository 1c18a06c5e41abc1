# SPDX-License-Identifier: Apache-2.0
"""Proves with a packet that our program at a device's hook is reached, whatever else is attached
there. Ids prove less: a program before ours that returns TC_ACT_OK ends the list.

The packet is the first fragment of a TCP segment between a client with a documentation address (RFC
5737, RFC 3849) and a frontend. Our programs store the ports of every first fragment in the map
`fragments`, before anything else is decided, so an entry with the id of the packet shows that it
was seen. The packet does no harm:

- it has an ACK and no SYN, so it starts no flow;
- it claims to be longer than it is, and in IPv4 the checksum of its header is wrong, so every IP
  stack that receives it drops it first of all;
- source and destination of its Ethernet header are the device itself, so no switch forwards it.
"""

import errno
import os
import struct
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.layout import FRAGMENT
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects, test_run
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.bpf.tc import Runner, TcAttacher
from kbpf.kernel.net.devices import Device
from kbpf.model.address import V4_PREFIX, Addr, parse_addr

CLIENT4: Final = parse_addr("192.0.2.171")
CLIENT6: Final = parse_addr("2001:db8::6b62:7066")
TC_ACT_UNSPEC: Final = -1
"""Also TCX_NEXT: the next program decides."""
_ACTION_NAMES: Final = {
    -1: "TC_ACT_UNSPEC",
    0: "TC_ACT_OK",
    1: "TC_ACT_RECLASSIFY",
    2: "TC_ACT_SHOT",
    3: "TC_ACT_PIPE",
    4: "TC_ACT_STOLEN",
    7: "TC_ACT_REDIRECT",
    8: "TC_ACT_TRAP",
}
FILTER_ENDS: Final = frozenset((0, 2, 4, 7, 8))
"""The results with which a filter ends the list (cls_bpf_exec_opcode() in net/sched/cls_bpf.c). In
TCX every result except TC_ACT_UNSPEC does (tcx_run() in net/core/dev.c)."""

ORDER_HINT: Final = (
    "let that program return TC_ACT_UNSPEC, attach it behind kbpf's program, or exclude the device (--exclude-device)"
)

ARRIVAL_WAIT_S: Final = 0.5
"""A packet is handled by the softirq that its sending raises, so this is far too long."""
UNREACHED_RETRY_S: Final = 300.0
"""The agent probes a hook again after this time, if a packet was lost and no program took it."""
MAX_PROBED: Final = 32
"""Devices that `kbpf check` probes."""
MAX_PROBED_IN_PASS: Final = 8
"""Hooks that the agent probes in one pass over the devices. The others follow in the next ones."""
FRONTEND4: Final = parse_addr("192.0.2.1")
FRONTEND_PORT: Final = 30000

TCP: Final = 6
FRAGMENT_HEADER: Final = 44
_CLAIMED_LENGTH: Final = 1400
_ACK: Final = 0x10


class Point(NamedTuple):
    """A hook of a device, and all programs at it in the order in which they run."""

    device: Device
    direction: Direction
    programs: tuple[Runner, ...]

    @property
    def before_ours(self) -> tuple[Runner, ...]:
        ours = next((i for i, runner in enumerate(self.programs) if runner.is_ours), None)
        return self.programs[:ours]


class ProbeOutcome(NamedTuple):
    """Whether the packet reached our program. If not: `taker` is the program that ended the list,
    None if none does when it runs alone, and `result` what it returned.
    """

    point: Point
    reached: bool
    taker: Runner | None = None
    result: int = TC_ACT_UNSPEC


def format_action(result: int) -> str:
    """What a program returned, as a number and by its name in linux/pkt_cls.h."""
    return f"{result} ({_ACTION_NAMES.get(result, '')})"


def list_points(kernel: TcAttacher, devices: Iterable[Device]) -> tuple[Point, ...]:
    """Both hooks of those devices that have programs of ours."""
    points = (
        Point(device, direction, kernel.list_programs(device.ifindex, direction))
        for device in devices
        for direction in Direction
    )
    return tuple(point for point in points if any(runner.is_ours for runner in point.programs))


def select_representative(
    points: Iterable[Point], names: Mapping[int, str], host: Collection[int]
) -> tuple[Point, ...]:
    """Of the devices to pods, keeps the first with each list of programs. `host`: ifindexes of
    devices to other machines, which are all kept, up to MAX_PROBED devices. `names`: of programs,
    by id.
    """
    selected: list[Point] = []
    shapes = set()
    for point in points:
        if not point.device.up:
            continue
        shape = (
            point.direction,
            *((names.get(runner.program_id, ""), runner.place, runner.is_ours) for runner in point.programs),
        )
        if point.device.ifindex in host or shape not in shapes:
            selected.append(point)
        shapes.add(shape)
    return tuple(selected[: 2 * MAX_PROBED])


def probe(fragments: Map, point: Point, frontend: Addr, port: int) -> ProbeOutcome:
    """Sends a packet through this hook. `frontend` and `port`: what its client talks to. Raises
    KernelError if it cannot be sent.
    """
    device = point.device
    number = int.from_bytes(os.urandom(4), sys.byteorder)
    frame, entry = build_frame(device.mac, point.direction, frontend, port, number)
    try:
        test_run.send(frame, device.ifindex, point.direction)
    except KernelError as error:
        if error.errno == errno.ENODEV:  # the device is gone
            return ProbeOutcome(point, True)
        raise
    if _wait_for(fragments, entry):
        return ProbeOutcome(point, True)
    for runner in point.before_ours:
        result = _run_alone(runner, frame, device.ifindex)
        if result in FILTER_ENDS or (runner.place == "tcx" and result != TC_ACT_UNSPEC):
            return ProbeOutcome(point, False, runner, result)
    return ProbeOutcome(point, False)


class HookProber:
    """Probes the hooks at which other tools' programs run before ours, once for each list of
    programs. For the device thread, which waits meanwhile: so a hook is not probed where a filter
    that is no program runs before ours. What such a filter takes would not say why.
    """

    def __init__(self, fragments: Map) -> None:
        self._fragments = fragments
        # with the ids of the programs, and until when it holds (time.monotonic)
        self._outcomes: dict[tuple[int, Direction], tuple[tuple[int, ...], float, ProbeOutcome]] = {}
        self._remaining = MAX_PROBED_IN_PASS

    def begin_pass(self, present: Collection[int]) -> None:
        """`present`: the ifindexes of all devices."""
        self._remaining = MAX_PROBED_IN_PASS
        self._outcomes = {key: outcome for key, outcome in self._outcomes.items() if key[0] in present}

    def read(self, point: Point) -> ProbeOutcome | None:
        """The outcome; None if nothing is before ours, or it is not probed or has not been yet."""
        if not point.before_ours or not point.device.up:
            return None
        if not all(runner.program_id for runner in point.before_ours):
            return None
        key = point.device.ifindex, point.direction
        ids = tuple(runner.program_id for runner in point.programs)
        now = time.monotonic()
        known_ids, valid_until, outcome = self._outcomes.get(key, ((), 0.0, None))
        if known_ids == ids and now < valid_until:
            return outcome
        if not self._remaining:
            return None
        self._remaining -= 1
        frontend = next(iter(point.device.sources), FRONTEND4)
        try:
            outcome = probe(self._fragments, point, frontend, FRONTEND_PORT)
        except KernelError:  # `kbpf check --attached` says why
            return None
        is_explained = outcome.reached or outcome.taker is not None
        valid_until = float("inf") if is_explained else now + UNREACHED_RETRY_S
        self._outcomes[key] = ids, valid_until, outcome
        return outcome


def _run_alone(runner: Runner, frame: bytes, ifindex: int) -> int:
    """What this program returns for the packet; TC_ACT_UNSPEC if it is no program, or is gone."""
    if not runner.program_id:
        return TC_ACT_UNSPEC
    try:
        with objects.open_program_by_id(runner.program_id) as program:
            return test_run.run_program(program, frame, ifindex)
    except KernelError:
        return TC_ACT_UNSPEC


def _wait_for(fragments: Map, entry: bytes) -> bool:
    """Whether an entry with this id and these ports appears. (Its hash is the program's own.)"""
    deadline = time.monotonic() + ARRIVAL_WAIT_S
    while True:
        for _, value in fragments.items():
            number, _, ports, protocol = FRAGMENT.unpack(value)
            if FRAGMENT.pack(number, 0, ports, protocol) == entry:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)


def build_frame(mac: bytes, direction: Direction, frontend: Addr, port: int, number: int) -> tuple[bytes, bytes]:
    """The packet, and its entry in `fragments` without the hash. At ingress a client sends it, at
    egress the frontend. `number`: random, for its id and the client's port.
    """
    is_v4 = frontend.startswith(V4_PREFIX)
    client, client_port = CLIENT4 if is_v4 else CLIENT6, 0x8000 | number & 0x7FFF
    source, target, ports = client, frontend, (client_port, port)
    if direction is Direction.EGRESS:
        source, target, ports = frontend, client, (port, client_port)
    raw_ports = struct.pack("!HH", *ports)
    tcp = raw_ports + struct.pack("!IIBBHHH", number, number, 5 << 4, _ACK, 0, 0, 0)
    if is_v4:
        raw_id = struct.pack("=I", number)[:2]
        # 0x2000: more fragments follow. The checksum 0 is wrong, except for one id of 65,536.
        header = struct.pack("!BBH2sHBBH", 0x45, 0, _CLAIMED_LENGTH, raw_id, 0x2000, 64, TCP, 0)
        ip, ethertype = header + source[12:] + target[12:], 0x0800
        stored_id = int.from_bytes(raw_id, sys.byteorder)
    else:
        raw_id = struct.pack("=I", number)
        fragment = struct.pack("!BBH4s", TCP, 0, 1, raw_id)
        header = struct.pack("!IHBB", 6 << 28, _CLAIMED_LENGTH, FRAGMENT_HEADER, 64)
        ip, ethertype = header + source + target + fragment, 0x86DD
        stored_id = number
    frame = mac + mac + struct.pack("!H", ethertype) + ip + tcp
    return frame, FRAGMENT.pack(stored_id, 0, raw_ports, TCP)
