# SPDX-License-Identifier: Apache-2.0
"""Two nodes with the same Services: kbpf's programs translate on one, nf_conntrack on the other.

Packets are sent and received by packet sockets at the other ends of the nodes' devices, so no TCP
stack of this machine takes part.
"""

import contextlib
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.layout import DEVICE, FLOW, DeviceFlag, Target, TcpState
from kbpf.model.address import format_addr
from kbpf.model.config import MapSizes
from tests.fuzz.packets.node import (
    BACK_PORT,
    BACKEND,
    CLIENT,
    CLIENTS,
    DEVICES,
    FRONT_PORT,
    OWN,
    POD,
    PROTOCOLS,
    VARIANTS,
    VIP,
    build,
    end,
    four_services,
    inside_of,
    kbpf_node,
    mac_of,
    namespaces,
)
from tests.fuzz.packets.segments import IDLE_SECONDS, PAUSE, Speaker, parse_token
from tests.support.lab.lab import inside, ip, run, until
from tests.support.packets.packets import frame, udp

UNUSED_PORT = 9
"""A port of the node that no masqueraded client can get: for unsolicited packets of a backend."""
STREAM_SECONDS = 2
FIRST_PORT, LAST_PORT = 2000, 60_000
"""Client ports, one for each sequence of a batch; masqueraded clients keep these."""
MOST_AT_ONCE = 300
"""Packets sent before their arrival is awaited: a CPU's backlog has room for 1,000."""
PATIENCE = 60.0
LONGEST_PHASE = STREAM_SECONDS - 0.1
"""Seconds between two pauses: after 2 s a UDP flow is a stream."""
LONGEST_BATCH = 9.0
"""The shortest timeout is 30 s, and one of 40 s would be read as 30 s once 10 s have passed."""
SIZES = MapSizes(connections=65_536, affinity=1024)


class Played(NamedTuple):
    """A script, and the kind of connection that it is played on."""

    script: str
    protocol: str
    family: int
    variant: str
    client: str = "c0"
    """Its device."""

    def __str__(self) -> str:
        return f"{self.protocol} v{self.family} {self.client} {self.variant}: {self.script}"


class Outcome(NamedTuple):
    """A node's entry for a connection at the end: its state, "none" without an entry; whether it is
    kept when others need room; and after how many idle seconds it expires.
    """

    state: str
    needed: bool
    seconds: int
    quiet: bool = False
    """No packet has counted since the script's last pause."""


NOTHING = Outcome("none", False, 0)
REUSED = Outcome("CLOSED", False, 120)
"""Of a connection whose entry is gone because another one has its port: a port is free once its
connection is closed.
"""


class Stalled(Exception):
    """The machine was too slow for a batch: a node may have seen a pause where there was none, or
    may have expired an entry.
    """


@dataclass
class _Side:
    """One node, as the packet sockets see it."""

    name: str
    sockets: dict[str, socket.socket] = field(default_factory=dict)
    macs: dict[str, str] = field(default_factory=dict)
    seen_as: dict[tuple[int, int, int], tuple[str, int]] = field(default_factory=dict)
    """Protocol, family and tag of a sequence → the client's address and port that the
    backend sees.
    """
    chosen: Callable[[int, str], tuple[str, int] | None] = lambda *_: None
    """Protocol and client → the node address and port it was given, for clients not seen in
    packets.
    """
    marks: int = 0

    def send(self, device: str, packet: bytes) -> None:
        self.sockets[device].send(frame(packet, self.macs[device]))

    def settle(self) -> None:
        """Waits until everything that was sent has passed the node: packets stay in order, so a
        marked one is sent after them.
        """
        self.marks += 1
        mark = b"mark" + struct.pack("!Q", self.marks)
        self.send("c0", udp(f"{CLIENT[4]}:9", f"{POD['b0'][4]}:9", mark))
        deadline = time.monotonic() + PATIENCE
        while not self._read("b0", mark):
            left = deadline - time.monotonic()
            assert left > 0, f"{self.name} does not forward"
            select.select([self.sockets["b0"]], [], [], left)
        for device in {*DEVICES} - {"b0"}:
            self._read(device)

    def _read(self, device: str, mark: bytes = b"none") -> bool:
        """Reads all packets that arrived and records clients' translated addresses; whether the
        mark came.
        """
        found = False
        while True:
            try:
                raw = self.sockets[device].recv(2048)
            except BlockingIOError:
                return found
            if device in BACKEND.values():
                found |= raw.endswith(mark)
                self._learn(raw)

    def _learn(self, raw: bytes) -> None:
        v6 = raw[12:14] == b"\x86\xdd"
        at, protocol = (54, raw[20]) if v6 else (34, raw[23])
        if len(raw) < at + 10 or protocol not in (6, 17):
            return
        source = raw[22:38] if v6 else raw[26:30]
        port, to_port = struct.unpack_from("!HH", raw, at)
        if to_port != BACK_PORT:
            return
        (tag,) = struct.unpack_from("!H", raw, at + (18 if protocol == 6 else 8))
        name = socket.inet_ntop(socket.AF_INET6 if v6 else socket.AF_INET, source)
        self.seen_as[protocol, 6 if v6 else 4, tag] = (name, port)


class Twins:
    """Both nodes, and their packets. `forwarding`: stack or direct, with which kbpf itself tracks all
    connections.
    """

    def __init__(self, cache: Path, forwarding: str) -> None:
        self.prefix = f"kbw{os.getpid()}{forwarding[0]}"
        self.forwarding = forwarding
        self.kbpf, self.linux = _Side(f"{self.prefix}k"), _Side(f"{self.prefix}l")
        self._wire = f"{self.prefix}w"
        self._stack = contextlib.ExitStack()
        self._cache = cache
        self.strict = False  # rp_filter

    def __enter__(self) -> "Twins":
        with contextlib.ExitStack() as stack:
            stack.enter_context(namespaces(self._wire, self.kbpf.name, self.linux.name))
            for side in (self.kbpf, self.linux):
                letter = side.name[-1]
                build(side.name, self._wire, letter)
                for device in DEVICES:
                    side.macs[device] = mac_of(side.name, device)
                    side.sockets[device] = inside_of(self._wire, lambda name=letter + device: _packet_socket(name))
                    stack.callback(side.sockets[device].close)
            run(*inside(self.linux.name, None, "nft", "-f", "-"), stdin=_ruleset())
            inside_of(self.linux.name, set_timeouts)
            inside_of(self.linux.name, _set_for_comparison)
            ports = FIRST_PORT, LAST_PORT
            settings = {"masquerade_ports": ports, "forwarding": self.forwarding}
            made = kbpf_node(self._cache, self.kbpf.name, four_services(), SIZES, **settings)
            self.node = stack.enter_context(made)
            self.kbpf.chosen = self._chosen
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _chosen(self, protocol: int, client: str) -> tuple[str, int] | None:
        """The SNAT port that kbpf gave: a client has only a share of the ports, so it may not keep
        its own.
        """
        for raw in self.node.site.entries("flows").values():
            own = Target.unpack(raw[flow_entries.CLIENT])
            is_this = raw[flow_entries.PROTOCOL] == protocol and flow_entries.is_original(raw)
            if is_this and end(format_addr(own.address), own.port) == client:
                host, port = _snat_of(raw)
                return (host, port) if port else None
        return None

    # ---- a batch -------------------------------------------------------------------------------

    def play(self, sequences: Sequence[Played]) -> list[tuple[Outcome, Outcome]]:
        """Plays all sequences at once; returns kbpf's and Linux's outcome of each. Raises
        Stalled.
        """
        assert len(sequences) <= LAST_PORT - FIRST_PORT
        self.forget()
        sides = (self.kbpf, self.linux)
        speakers = [[Speaker(each.protocol, FIRST_PORT + n) for n, each in enumerate(sequences)] for _ in sides]
        phases = [[part.split() for part in each.script.split(PAUSE)] for each in sequences]
        began = time.monotonic()
        starts = []
        for phase in range(max(map(len, phases), default=0)):
            if phase:
                time.sleep(IDLE_SECONDS)
            phase_began = time.monotonic()
            starts.append(phase_began)
            now = [each[phase] if phase < len(each) else [] for each in phases]
            for step in range(max(map(len, now))):
                acting = [n for n, tokens in enumerate(now) if step < len(tokens)]
                for at in range(0, len(acting), MOST_AT_ONCE):
                    for side, own in zip(sides, speakers, strict=True):
                        for n in acting[at : at + MOST_AT_ONCE]:
                            _say(side, own[n], sequences[n], now[n][step])
                        side.settle()
            _check_clock(f"phase {phase}", phase_began, LONGEST_PHASE)
        outcomes = self.read(sequences, [starts[len(each) - 1] for each in phases])
        _check_clock("the batch", began, LONGEST_BATCH)
        return outcomes

    def check_reverse_path(self, strict: bool) -> None:
        """Sets rp_filter on both nodes. kbpf reads it when something else about a device changes,
        and now and then.
        """
        for side in (self.kbpf, self.linux):
            script = f"for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo {strict:d} > $f; done"
            run(*inside(side.name, None, "sh", "-c", script))
        self.strict = strict
        ip(f"link set c0 alias strict-{strict:d}", netns=self.kbpf.name)

        def is_known() -> bool:
            flags = [DeviceFlag(DEVICE.unpack(raw)[2]) for raw in self.node.site.entries("devices").values()]
            return all((DeviceFlag.STRICT in each) == strict for each in flags)

        until("kbpf knows rp_filter", is_known)

    # ---- outcomes ------------------------------------------------------------------------------

    def forget(self) -> None:
        self.node.forget()
        inside_of(self.linux.name, flush_conntrack)
        self.kbpf.seen_as.clear()
        self.linux.seen_as.clear()

    def read(self, sequences: Sequence[Played], paused: Sequence[float]) -> list[tuple[Outcome, Outcome]]:
        """Both nodes' outcomes of these sequences, in order. `paused`: when the last pause of each
        was over (monotonic clock).
        """
        entries = list(self.node.site.entries("flows").values())
        ours = _read_flows(entries)
        taken = {(raw[flow_entries.PROTOCOL], *_snat_of(raw)) for raw in entries if flow_entries.is_original(raw)}
        theirs = inside_of(self.linux.name, _read_conntrack)
        found = []
        for number, (each, since) in enumerate(zip(sequences, paused, strict=True), FIRST_PORT):
            protocol, family = PROTOCOLS[each.protocol], each.family
            key = protocol, end(CLIENTS[each.client][family], number), end(VIP[each.variant][family], FRONT_PORT)
            known, linux = _quiet(ours.get(key), since), _quiet(theirs.get(key), since)
            port = self.kbpf.seen_as.get((protocol, family, number))
            if known == NOTHING and port and (protocol, *port) in taken:
                known = REUSED._replace(quiet=linux.quiet)
            found.append((known, linux))
        return found


def _quiet(found: "tuple[Outcome, float] | None", since: float) -> Outcome:
    """`found`: an outcome, and when the last packet counted: up to a second too early, because
    Linux tells whole seconds.
    """
    if found is None:
        return NOTHING
    return found[0]._replace(quiet=found[1] < since - (1 + IDLE_SECONDS) / 2)


def _check_clock(what: str, began: float, longest: float) -> None:
    took = time.monotonic() - began
    if took > longest:
        raise Stalled(f"{what} took {took:.1f} s, and may take {longest} s")


def _set_for_comparison() -> None:
    """Makes Linux track connections only from their SYN on, as kbpf does, and prevents entries from
    expiring before their batch ends.
    """
    folder = Path("/proc/sys/net/netfilter")
    (folder / "nf_conntrack_tcp_loose").write_text("0")
    for name in _SHORT.split():
        (folder / f"nf_conntrack_{name}").write_text(str(SHORT_SECONDS))


def set_timeouts() -> None:
    """Sets the nf_conntrack timeouts that kube-proxy sets, in this network namespace."""
    folder = Path("/proc/sys/net/netfilter")
    (folder / "nf_conntrack_tcp_timeout_established").write_text("86400")
    (folder / "nf_conntrack_tcp_timeout_close_wait").write_text("3600")


def _say(side: _Side, speaker: Speaker, each: Played, token: str) -> None:
    family, back, client = each.family, BACKEND[each.variant], CLIENTS[each.client]
    is_reply, device = parse_token(token).back, parse_token(token).device
    if is_reply:
        known = side.seen_as.get((PROTOCOLS[each.protocol], family, speaker.tag))
        if known is None and each.variant != "kept":
            known = side.chosen(PROTOCOLS[each.protocol], end(client[family], speaker.tag))
        nobody = (client, speaker.tag) if each.variant == "kept" else (OWN[back], UNUSED_PORT)
        host, port = known or (nobody[0][family], nobody[1])
        source, to = end(POD[back][family], BACK_PORT), end(host, port)
    else:
        source = end(client[family], speaker.tag)
        to = end(VIP[each.variant][family], FRONT_PORT)
    packet = speaker.packet(token, source, to)
    if packet is not None:
        side.send(device or (back if is_reply else each.client), packet)


def _packet_socket(device: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(263, 23, 1)  # SOL_PACKET, PACKET_IGNORE_OUTGOING
    made.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
    made.bind((device, 0x0003))
    made.setblocking(False)
    return made


def _ruleset() -> str:
    """DNAT and masquerading as kube-proxy's rules do it."""
    lines = ["table inet nat {", "chain pre { type nat hook prerouting priority dstnat;"]
    for variant in VARIANTS:
        for family, word in ((4, "ip"), (6, "ip6")):
            to = end(POD[BACKEND[variant]][family], BACK_PORT)
            for protocol in PROTOCOLS:
                lines.append(f"{word} daddr {VIP[variant][family]} {protocol} dport {FRONT_PORT} dnat {word} to {to}")
    lines += ["}", "chain post { type nat hook postrouting priority srcnat;"]
    for variant in ("masked", "past"):
        lines += [
            f"ct original ip daddr {VIP[variant][4]} masquerade",
            f"ct original ip6 daddr {VIP[variant][6]} masquerade",
        ]
    return "\n".join((*lines, "}", "}"))


# ---- tables of connections -----------------------------------------------------------------------

_EARLY_DROP = {
    6: ("FIN_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE", "CLOSE_WAIT"),
    132: ("SHUTDOWN_SENT", "SHUTDOWN_RECD", "SHUTDOWN_ACK_SENT"),
    17: (),
}
"""States in which Linux evicts an assured connection for others: can_early_drop()."""
_SHORT = (
    "tcp_timeout_close tcp_timeout_last_ack sctp_timeout_closed sctp_timeout_cookie_wait sctp_timeout_cookie_echoed"
    " sctp_timeout_shutdown_sent sctp_timeout_shutdown_recd sctp_timeout_shutdown_ack_sent"
)
QUIET_SECONDS = 11
"""kbpf's need of a connection is computed as if it had been idle for this time: entries that it
keeps only for a while are evictable after 5 or 10 s."""
SHORT_SECONDS = 40
"""For Linux's timeouts between 3 and 30 s."""

CLASSES = (30, SHORT_SECONDS, 60, 120, 210, 300, 3_600, 86_400)
"""Seconds: the timeouts of both nodes. A remaining time counts as the next larger one."""

Key = tuple[int, str, str]


class Row(NamedTuple):
    """A connection of nf_conntrack: the original direction, its state and its remaining time."""

    protocol: int
    source: str
    source_port: int
    to: str
    to_port: int
    state: str
    assured: bool
    left: int
    """Seconds."""


_LISTED = re.compile(
    r"\w+ +(?P<protocol>\d+) (?P<left>\d+) (?:(?P<state>[A-Z]\w+) )?"
    r"src=(?P<source>\S+) dst=(?P<to>\S+) sport=(?P<source_port>\d+) dport=(?P<to_port>\d+) "
)


def flush_conntrack() -> None:
    """Deletes all entries in the calling thread's network namespace."""
    for family in ("ipv4", "ipv6"):
        run("conntrack", "-F", "-f", family)


def dump_conntrack() -> list[Row]:
    """TCP, UDP and SCTP entries in the calling thread's network namespace."""
    found = []
    for line in "".join(run("conntrack", "-L", "-f", family) for family in ("ipv4", "ipv6")).splitlines():
        if (told := _LISTED.match(line)) is None:
            continue  # of ICMP
        assured = "[ASSURED]" in line
        state = told["state"] or ("STREAM" if assured else "DATAGRAMS")
        numbers = {name: int(told[name]) for name in ("protocol", "source_port", "to_port", "left")}
        found.append(Row(source=told["source"], to=told["to"], state=state, assured=assured, **numbers))
    return found


def _read_conntrack() -> dict[Key, tuple[Outcome, float]]:
    found, now = {}, time.monotonic()
    for row in dump_conntrack():
        needed = row.assured and row.state not in _EARLY_DROP[row.protocol]
        seconds = next(limit for limit in CLASSES if row.left <= limit)
        key = (row.protocol, end(row.source, row.source_port), end(row.to, row.to_port))
        found[key] = Outcome(row.state, needed, seconds), now - (seconds - row.left)
    return found


def _snat_of(raw: bytes) -> tuple[str, int]:
    """The node's address and port that a flow's client was given; port 0: none."""
    port = int.from_bytes(raw[flow_entries.SNAT_PORT], "big")
    return format_addr(raw[flow_entries.SNAT]), port


def _read_flows(entries: Iterable[bytes]) -> dict[Key, tuple[Outcome, float]]:
    now = time.monotonic_ns()
    found: dict[Key, tuple[Outcome, float]] = {}
    over: dict[bytes, int] = {}
    used: dict[bytes, int] = {}
    held = list(entries)
    for raw in held:
        both = raw[flow_entries.ENDPOINTS]
        over[both] = max(over.get(both, 0), flow_entries.expires_at(raw))
        used[both] = max(used.get(both, 0), flow_entries.last_used(raw))
    for raw in held:
        if not flow_entries.is_original(raw) or over[raw[flow_entries.ENDPOINTS]] < now:
            continue
        ends = [Target.unpack(value) for value in FLOW.unpack(raw)[1:3]]
        names = [end(format_addr(each.address), each.port) for each in ends]
        protocol, state = raw[flow_entries.PROTOCOL], TcpState(raw[flow_entries.STATE])
        seconds = flow_entries.IDLE_TIMEOUT_NS[protocol, state] // flow_entries.NS_PER_SECOND
        needed = flow_entries.is_needed(state, now - QUIET_SECONDS * flow_entries.NS_PER_SECOND, now)
        last = used[raw[flow_entries.ENDPOINTS]] / flow_entries.NS_PER_SECOND
        found[protocol, names[0], names[1]] = Outcome(state.name, needed, seconds), last
    return found
