# SPDX-License-Identifier: Apache-2.0
"""The packet path's programs on single packets, byte by byte.

VIPs of every relevant kind of Service. Packets arrive on loopback, which the maps describe as an
uplink or as a pod's device. Each step of a flow is compared with the packet that a builder makes;
its checksums are verified by a parser that shares no code with the builder.
"""

import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum, IntFlag
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.layout import (
    CACHED_DEVICE,
    CACHED_DEVICES,
    DEVICE,
    FLOW,
    FLOW_KEY,
    SOURCE_KEY,
    U32,
    DeviceFlag,
    FinFlag,
    NodeFlag,
    Reason,
    Role,
    Target,
    TcpState,
)
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.system import sysctl
from kbpf.model.address import format_addr, parse_addr
from kbpf.model.config import MapSizes
from kbpf.model.desired import DesiredState, ServiceState
from kbpf.model.objects import Protocol
from tests.support.features import lacking
from tests.support.lab.lab import PATIENCE, ip
from tests.support.packets.packets import (
    MAC_B,
    SCTP_INIT_ACK,
    SCTP_TAG,
    Talk,
    end,
    frame,
    internet_checksum,
    sctp,
    tcp,
    udp,
)
from tests.support.packets.parse import Packet, checksums, parse
from tests.support.packets.test_run import (
    TC_ACT_REDIRECT,
    TC_ACT_SHOT,
    TC_ACT_UNSPEC,
    SkbContext,
    run,
)
from tests.support.plane import SIZES, Site, network, services, sites

CLIENT = {4: "198.51.100.7", 6: "2001:db8:9::7"}
NODE = {4: "198.18.0.1", 6: "fd00:198:18::1"}
ROUTER = {4: "203.0.113.9", 6: "2001:db8:8::9"}
POD = {4: "10.244.1.2", 6: "fd00:10:244:1::2"}
NEAR = {4: "10.244.7.7", 6: "fd00:10:244:7::7"}
"""A client in a local network."""
NET = {4: "192.0.2.", 6: "2001:db8::"}
Vip = IntEnum("Vip", "CLUSTER LOCAL NONE RESTRICTED SAME MASKED IP OWN OTHER_OWN REMOTE CHAINED")
CLUSTER, LOCAL, NONE, RESTRICTED, SAME, MASKED, IP, OWN, OTHER_OWN, REMOTE, CHAINED = Vip
"""The last part of a VIP: policy Cluster, Local, no endpoints, no client allowed; port 80 → 80 with
policy Local and Cluster; a ClusterIP; backends that are the node itself, at its masquerade address
and at OTHER; policy Local without an endpoint on this node; a backend that is the VIP LOCAL."""
OTHER = {4: "198.18.0.8", 6: "fd00:198:18::8"}
"""A second address of the node."""
GATE = {4: "198.18.0.2", 6: "fd00:198:18::2"}
MTU = 1400
"""Of the device `out` (fixture uplink)."""
PORTS = itertools.count(2000)
"""Client ports; each flow gets a new one."""
QUOTED = {f"{icmp} embedded {what}" for icmp in ("icmp", "icmp6") for what in ("tcp", "udp", "sctp")}
"""Checksums that are not rewritten: as a rule most of the quoted packet they cover is missing."""
LOW, HIGH = 61_000, 65_535
"""SNAT ports. A masqueraded flow gets any of them and keeps it during the tests that follow."""
TAKEN_PORT = 49_980
"""Of a frontend at the node's address."""
SPARE_PORTS = itertools.count(50_000)
"""Node ports outside of LOW to HIGH, so no other test's flow has them."""

NO_FLAG = DeviceFlag(0)
T = TypeVar("T")
F = TypeVar("F", bound=IntFlag)


both_policies = pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])


def flags_of(kind: type[F], words: str) -> F:
    """The flags with these names."""
    return kind(sum(kind[word] for word in words.split()))


def host_of(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")


def parsed(packet: bytes) -> Packet:
    """A packet without its link header."""
    return parse(packet, l2=False)


def wrong_sums(packet: bytes) -> list[str]:
    return checksums(packet, l2=False)


def expect_packet(got: bytes, want: bytes) -> None:
    """Expects this packet, with the right checksums."""
    assert parsed(got) == parsed(want)
    assert got == want
    expect_sums(got)


def expect_sums(got: bytes) -> None:
    assert set(wrong_sums(got)) <= QUOTED


def client(v: int, port: int = 0) -> str:
    return end(CLIENT[v], port or next(PORTS))


def vip(v: int, which: int) -> str:
    return end(f"{NET[v]}{which}", 80)


def pod(v: int, port: int = 8080) -> str:
    return end(POD[v], port)


def ends_of(v: int, which: int = CLUSTER, host: dict[int, str] = CLIENT) -> tuple[str, str, str]:
    """A new client, outside or at this host, the frontend that it dials, and the backend."""
    return end(host[v], next(PORTS)), vip(v, which), pod(v)


class Path_:
    """The programs and their maps."""

    def __init__(self, site: Site, plane: BpfPlane, where: str) -> None:
        self.site = site
        self.plane = plane
        self.where = where
        self.folder = next(site.pins.glob("programs-tc-*"))
        self.programs = {name: Program.open(self.folder / name) for name in ("tc_ingress", "tc_egress")}
        self.out = 0
        self.macs: dict[int, str] = {}  # by ifindex; loopback has none

    def inside(self, action: Callable[[], T]) -> T:
        """Runs it in the node's network namespace."""
        return self.site.do(action)

    def forward(self, on: bool) -> None:
        """Whether the node forwards packets (net.ipv4.ip_forward and its IPv6 twin)."""
        for family in ("ipv4", "ipv6"):
            path = Path(f"/proc/sys/net/{family}/conf/all/forwarding")
            self.inside(lambda: path.write_text(f"{on:d}"))  # noqa: B023

    @contextmanager
    def forwarding(self, on: bool) -> Iterator[None]:
        """Whether a node that forwards does so in the block."""
        self.forward(on)
        try:
            yield
        finally:
            self.forward(True)

    def set_device(
        self, ifindex: int, role: Role, flags: DeviceFlag = NO_FLAG, own: tuple[str, str] = ("::", "::")
    ) -> None:
        """Writes a device's entry. `own`: its IPv4 and IPv6 addresses."""
        value = DEVICE.pack(role, 14, flags, bytes(6), *map(parse_addr, own), 0)
        with self.site.pinned("devices") as devices:
            devices.update(U32.pack(ifindex), value)
        self.cache(ifindex, CACHED_DEVICE.pack(ifindex, value))

    def cache(self, ifindex: int, value: bytes) -> None:
        """Writes the slot of the device cache that this device maps to."""
        with self.site.pinned("device_cache") as cache:
            cache.update(U32.pack(ifindex % CACHED_DEVICES), value)

    def delete_device(self, name: str, ifindex: int) -> None:
        """Deletes the device and what is known about it."""
        with self.site.pinned("devices") as devices:
            devices.delete(U32.pack(ifindex))
        self.cache(ifindex, bytes(CACHED_DEVICE.size))
        ip(f"link del {name}", netns=self.where)

    def set_loopback_role(self, role: Role, flags: DeviceFlag | None = None) -> None:
        """Makes loopback a device of this role."""
        if flags is None:
            flags = DeviceFlag.LOCAL if role is Role.POD else NO_FLAG
        self.set_device(1, role, flags)

    def node(self, flags: NodeFlag, low: int = LOW, high: int = HIGH) -> None:
        """Writes the node's flags, its range of SNAT ports and its addresses."""
        with self.site.pinned("node") as node:
            value = bytearray(node.lookup(U32.pack(0)) or b"")
            value[32:40] = struct.pack("=IHH", flags, low, high)
            node.update(U32.pack(0), bytes(value))

        for address in map(parse_addr, (*NODE.values(), *OTHER.values())):
            self.site.put("device_sources", SOURCE_KEY.pack(160, 0, address), address)

    def run(
        self, name: str, packet: bytes, complete: bool = False, device: int = 0, came_by: int = 0
    ) -> tuple[int, bytes]:
        """The verdict, and the packet without its link header. `complete`: as CHECKSUM_COMPLETE,
        where the kernel can run programs so. `device`: if not loopback; `came_by`: the device by
        which a packet that leaves has come in.
        """
        complete = complete and not lacking("checksum_complete")
        context = SkbContext(ifindex=device, ingress_ifindex=came_by).pack() if device or came_by else None
        sent = frame(packet, to=self.macs.get(device, MAC_B))
        done = self.inside(lambda: run(self.programs[name], sent, context=context, checksum_complete=complete))
        return done.retval, done.packet_out[14:]

    def ingress(self, packet: bytes, **how: Any) -> tuple[int, bytes]:
        return self.run("tc_ingress", packet, **how)

    def egress(self, packet: bytes, **how: Any) -> tuple[int, bytes]:
        return self.run("tc_egress", packet, **how)

    def expect_untouched(self, packet: bytes, name: str = "tc_ingress") -> None:
        """Expects the program to leave the packet to the stack as it is."""
        assert self.run(name, packet) == (TC_ACT_UNSPEC, packet)

    def through(self, packet: bytes) -> tuple[int, bytes]:
        """Up the stack and out again: the last verdict, and the packet."""
        verdict, inside = self.ingress(packet)
        return self.egress(inside) if verdict == TC_ACT_UNSPEC else (verdict, inside)

    @contextmanager
    def counted(self, reason: Reason, number: int = 1) -> Iterator[None]:
        """Expects the programs to count this reason as often in the block."""
        before = self.site.reasons()[reason]
        yield
        assert self.site.reasons()[reason] == before + number, reason

    def go(self, name: str, packet: bytes, want: bytes) -> bytes:
        """Runs the program and expects the packet to pass as `want`, with CHECKSUM_COMPLETE as
        well.
        """
        retval, got = self.run(name, packet, complete=True)
        assert retval == TC_ACT_UNSPEC
        expect_packet(got, want)
        return got

    def go_in(self, packet: bytes, want: bytes) -> bytes:
        return self.go("tc_ingress", packet, want)

    def go_out(self, packet: bytes, want: bytes) -> bytes:
        return self.go("tc_egress", packet, want)


@contextmanager
def serving_node(
    cache: Path, name: str, state: DesiredState, sizes: MapSizes = SIZES, **settings: Any
) -> Iterator[Path_]:
    """A network namespace in which a data plane serves the state."""
    with network(f"kbp{name}") as where, sites(cache) as make:
        site = make(node=where)
        for setting in ("net.ipv4.icmp_ratelimit", "net.ipv6.icmp.ratelimit"):  # all tests are one client
            site.do(lambda: sysctl.write(setting, "0"))  # noqa: B023
        plane = site.open(sizes, packet_path=True, **settings)
        site.do(lambda: plane.apply(state, None))
        path = Path_(site, plane, where)
        yield path
        for program in path.programs.values():
            program.close()


def masquerading(state: DesiredState) -> DesiredState:
    """The state of a node that masquerades to the addresses NODE."""
    return replace(state, masquerade_addresses=tuple(map(parse_addr, NODE.values())))


SERVICES = """
s1: CLUSTER -> pod
s2: LOCAL -> pod local=pod external=Local
s3: NONE ->
s4: RESTRICTED -> pod restricted=yes
s5: SAME -> port80 local=port80 external=Local
s6: MASKED -> port80
s7: ip -> pod
s8: OWN -> own
s9: OTHER_OWN -> other
s10: REMOTE -> pod external=Local
s11: CHAINED -> vip local=vip external=Local
s12: taken -> pod
"""
"""Named by the number of the Vip; of each protocol and family."""


def all_services() -> Iterator[ServiceState]:
    for v, protocol in itertools.product((4, 6), ("TCP", "UDP", "SCTP")):
        names = {which.name: f"LoadBalancer={vip(v, which)}" for which in Vip}
        names |= {"ip": vip(v, IP), "vip": vip(v, LOCAL), "pod": pod(v), "port80": pod(v, 80)}
        names |= {"own": end(NODE[v], 8080), "other": end(OTHER[v], 8080)}
        names["taken"] = f"LoadBalancer={end(NODE[v], TAKEN_PORT)}"
        yield from services(SERVICES.replace(":", f"-{protocol.lower()}:{protocol}"), names)


# ---- request and reply ---------------------------------------------------------------------------


ask, reply = partial(udp, payload=b"?"), partial(udp, payload=b"!")
KINDS = {
    "tcp": partial(tcp, payload=b"data", flags="S", mss=1460),
    "tcp, odd length": partial(tcp, payload=b"odd", flags="S"),
    "udp": partial(udp, payload=b"question"),
    "udp, nothing in it": udp,
}
FIRST = {"udp": ask, "sctp": sctp, "tcp": partial(tcp, flags="S")}
"""What begins a flow."""
ALL_KINDS = KINDS | {"sctp": sctp}
BACK = {
    "tcp": partial(tcp, flags="SA", ack=1001, mss=1460),
    "udp": partial(udp, payload=b"the answer"),
}
ANSWERS = BACK | {
    "sctp": partial(sctp, chunks=SCTP_INIT_ACK, tag=SCTP_TAG),
    "tcp, odd length": BACK["tcp"],
    "udp, nothing in it": BACK["udp"],
}


def raw_socket(device: str) -> socket.socket:
    """A packet socket on this device."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    made.bind((device, 0))
    made.settimeout(PATIENCE)
    return made


def set_only_port(path: Path_) -> int:
    """Leaves the node one SNAT port, which no other flow has."""
    port = next(SPARE_PORTS)
    path.node(NodeFlag(0), port, port)
    return port


def snat_source(packet: bytes, host: str) -> str:
    """The packet's source, which must be this host and one of the SNAT ports."""
    source = parsed(packet).source
    assert host_of(source) == host
    assert LOW <= port_of(source) <= HIGH
    return source


def masked(path: Path_, packet: bytes, build: object, to: str, v: int, **ip_: object) -> str:
    """Runs egress for a packet that gets a source of the node; checks the result and returns it."""
    source = snat_source(path.egress(packet)[1], NODE[v])
    path.go_out(packet, build(source, to, **ip_))
    return source


def quoted(sent: bytes, build: Callable[..., bytes], source: str, to: str) -> bytes:
    """The packet as quoted in an error: with other addresses and ports, and its original
    checksum.
    """
    return build(source, to, checksum=parsed(sent).transport.checksum)


def mtu_of(error: str) -> int:
    return 1280 if error == "too big" else 0


def expect_redirect(path: Path_, packet: bytes, want: bytes, name: str = "tc_ingress") -> None:
    """Expects the packet to be redirected to another device as `want`."""
    with path.counted(Reason.REDIRECTED):
        retval, got = path.run(name, packet, complete=True)
    assert retval == TC_ACT_REDIRECT
    expect_packet(got, want)


def expect_snat_redirect(path: Path_, packet: bytes, build: object, to: str, v: int, **ip_: object) -> str:
    """masked() for a redirected packet, in one step."""
    source = snat_source(path.ingress(packet)[1], NODE[v])
    expect_redirect(path, packet, build(source, to, **ip_))
    return source


def _id(v: int, number: int) -> dict[str, int]:
    """IPv4 has the identification in every packet, IPv6 in fragments only."""
    return {"ip_id": number} if v == 4 else {}


ERRORS = ("too big", "host unreachable", "time exceeded", "parameter problem")
SENT = {"tcp": partial(tcp, payload=bytes(1000), flags="A"), "udp": partial(udp, payload=bytes(1000))}


class Flow:
    """What one client sends through a VIP, with the answers: segments of a connection with right
    numbers, or datagrams, and their entries. `source`: what the backend sees.
    """

    def __init__(self, path: Path_, v: int, which: int = CLUSTER, own: str = "") -> None:
        self.path, self.talk, self.source = path, Talk(), ""
        self.sources: set[str] = set()
        self.own, self.front, self.back = own or client(v), vip(v, which), pod(v)

    def packet(self, word: str, **ip: Any) -> bytes:
        """The next segment of this connection in the notation of Talk, or a datagram: "?", "<!"."""
        ends = (self.back, self.source or self.own) if word.startswith("<") else (self.own, self.front)
        if word in ("?", "<!"):
            return udp(*ends, word[-1:].encode(), **ip)
        return self.talk.segment(word, *ends, **ip)

    def send(self, script: str) -> "Flow":
        """Sends these packets up the stack and out again. Only a SYN may get another source than the
        packet before. "|" behind a word: it does not reach the other end. It is dropped, or has
        become a reset of the client, for conntrack.
        """
        for word in script.split():
            back = word.startswith("<")
            verdict, out = self.path.through(self.packet(word))
            found = parsed(out)
            reset = back and (found.flags, found.destination) == ("R", self.back)
            assert (reset or verdict == TC_ACT_SHOT) == word.endswith("|"), word
            if word.endswith("|"):
                continue
            if not back and ("S" in word or not self.source):
                self.source = found.source
                self.sources.add(found.source)
            expected = (self.front, self.own) if back else (self.source, self.back)
            assert (found.source, found.destination) == expected, word
        return self

    def entries(self) -> list[bytes]:
        return [raw for raw in self.path.site.entries("flows").values() if owner(raw) == self.own]

    def states(self) -> set[int]:
        """The states in the entries, without those that only reserve a port."""
        fields = [FLOW.unpack(raw) for raw in self.entries()]
        return {raw[9] for raw in fields if raw[9] != TcpState.CLOSED or not raw[10] & FinFlag.RESERVED}

    def change(self, change: Callable[[bytes], bytes], chosen: Callable[[tuple[str, str]], bool] = bool) -> None:
        """Changes the entries between chosen ends; deletes them if that leaves nothing."""
        with self.path.site.pinned("flows") as flows:
            for key, raw in list(flows.items()):
                if owner(raw) == self.own and chosen(ends(key)):
                    if new := change(raw):
                        flows.update(key, new)
                    else:
                        flows.delete(key)

    def expire(self, chosen: Callable[[tuple[str, str]], bool] = bool) -> None:
        """Makes the entries between chosen ends look idle for ever."""
        self.change(lambda raw: bytes(8) + raw[8:], chosen)

    def age(self, seconds: int) -> None:
        """Makes all entries look idle for `seconds`; if negative, recently used."""

        def aged(raw: bytes) -> bytes:
            made = bytearray(raw)
            times = (slice(8), flow_entries.BEGAN_AT) if raw[flow_entries.PROTOCOL] == Protocol.UDP else (slice(8),)
            for at in times:
                then = int.from_bytes(raw[at], "little") - seconds * 10**9
                made[at] = max(0, then).to_bytes(8, "little")
            return bytes(made)

        self.change(aged)


def established(path: Path_, v: int, which: int = CLUSTER, kind: str = "tcp") -> Flow:
    """A flow with packets in both directions."""
    flow = Flow(path, v, which).send("S <SA A A+ <A" if kind == "tcp" else "? <!")
    assert kind != "tcp" or flow.states() == {TcpState.ESTABLISHED}
    return flow


def owner(raw: bytes) -> str:
    """The client of an entry's flow."""
    found = Target.unpack(raw[flow_entries.CLIENT])
    return end(format_addr(found.address), found.port)


def ends(key: bytes) -> tuple[str, str]:
    """Both addresses and ports of an entry's key."""
    one, other = (Target.unpack(half) for half in FLOW_KEY.unpack(key))
    return end(format_addr(one.address), one.port), end(format_addr(other.address), other.port)


def with_length(packet: bytes, length: int) -> bytes:
    """The IPv4 packet with this length in its header, and the right checksum of that."""
    size = (packet[0] & 15) * 4
    head = packet[:2] + struct.pack("!H", length) + packet[4:10] + b"\0\0" + packet[12:size]
    return head[:10] + struct.pack("!H", internet_checksum(head)) + head[12:] + packet[size:]


DAMAGED = {
    "checksum": lambda p: p[:10] + bytes([p[10] ^ 1]) + p[11:],
    "too long": lambda p: with_length(p, len(p) + 1),
    "too short": lambda p: with_length(p, 19),
    "header of 16 bytes": lambda p: with_length(bytes([0x44]) + p[1:], len(p)),
    "only the header": lambda p: with_length(p, (p[0] & 15) * 4 - 1),
}
"""IPv4 headers that a stack discards without an answer (RFC 1122, 3.2.1.2)."""
DAMAGED6 = {"too long": lambda p: p[:4] + struct.pack("!H", len(p) - 39) + p[6:]}


def port_of(text: str) -> int:
    return int(text.rpartition(":")[2])
