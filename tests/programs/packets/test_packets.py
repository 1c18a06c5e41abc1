# SPDX-License-Identifier: Apache-2.0
"""The packet path's programs on single packets, byte by byte.

VIPs of every relevant kind of Service. Packets arrive on loopback, which the maps describe as an
uplink or as a pod's device. Each step of a flow is compared with the packet that a builder makes;
its checksums are verified by a parser that shares no code with the builder.
"""

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest

from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.hooks import PACKET_PROGRAMS
from kbpf.dataplane.bpf.inspect import connections as tracked_connections
from kbpf.dataplane.bpf.maps.flow_entries import DIRECTION, STATE, flow_key, is_port_reservation
from kbpf.dataplane.bpf.maps.layout import (
    CACHED_DEVICE,
    CACHED_DEVICES,
    DEVICE,
    FLOW,
    FLOW_KEY,
    MAPS,
    NETWORK_KEY,
    NEXT_HOP,
    PORT_SLOT,
    REFUSAL_LIMIT,
    U32,
    U64,
    DeviceFlag,
    FinFlag,
    FlowDirection,
    NodeFlag,
    Reason,
    RefusalLimit,
    Role,
    Target,
    TcpState,
    pack_target,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import snat_ports
from kbpf.dataplane.bpf.packet_path.node_maps import write_refusal_limits
from kbpf.dataplane.bpf.programs import compile
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.netfilter import conntrack
from kbpf.kernel.netfilter.conntrack import ConntrackFlow
from kbpf.kernel.system import netns, sysctl
from kbpf.model.address import format_addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.objects import Protocol
from kbpf.source.api.transport import SO_COOKIE
from tests.support.features import lacking, needs
from tests.support.lab.lab import ip
from tests.support.lab.lab import run as command
from tests.support.packets import packets
from tests.support.packets.datagrams import MAC_A, MAC_B
from tests.support.packets.judge import checksums, difference, reassembled
from tests.support.packets.packets import (
    Talk,
    arp,
    destination,
    echo,
    fragments,
    frame,
    icmp_error,
    sctp,
    tcp,
    udp,
)
from tests.support.packets.parse import parse
from tests.support.packets.shares import ports_of
from tests.support.packets.test_run import (
    TC_ACT_REDIRECT,
    TC_ACT_SHOT,
    TC_ACT_UNSPEC,
    SkbContext,
    run,
)
from tests.support.plane import SIZES, Site, desired, service, sites

CLIENT = {4: "198.51.100.7", 6: "2001:db8:9::7"}
NODE = {4: "198.18.0.1", 6: "fd00:198:18::1"}
ROUTER = {4: "203.0.113.9", 6: "2001:db8:8::9"}
POD = {4: "10.244.1.2", 6: "fd00:10:244:1::2"}
NEAR = {4: "10.244.7.7", 6: "fd00:10:244:7::7"}
"""A client in a local network."""
NET = {4: "192.0.2.", 6: "2001:db8::"}
CLUSTER, LOCAL, NONE, RESTRICTED, SAME, MASKED, IP, OWN, OTHER_OWN, REMOTE = range(1, 11)
"""The last part of a VIP: policy Cluster, Local, no endpoints, no client allowed; port 80 → 80 with
policy Local and Cluster; a ClusterIP; backends that are the node itself, at its masquerade address
and at OTHER; policy Local without an endpoint on this node."""
OTHER = {4: "198.18.0.8", 6: "fd00:198:18::8"}
"""A second address of the node."""
PORTS = itertools.count(2000)
"""Client ports; each flow gets a new one."""
QUOTED = {f"{icmp} embedded {what}" for icmp in ("icmp", "icmp6") for what in ("tcp", "udp")}
"""Checksums that are not rewritten: as a rule most of the quoted packet they cover is missing."""
LOW, HIGH = 61_000, 65_535
"""SNAT ports. A masqueraded flow gets any of them and keeps it during the tests that follow."""
SPARE_PORTS = itertools.count(50_000)
"""Node ports outside of LOW to HIGH, so no other test's flow has them."""

T = TypeVar("T")

both = pytest.mark.parametrize("v", [4, 6], ids=["v4", "v6"])


def end(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def client(v: int, port: int = 0) -> str:
    return end(CLIENT[v], port or next(PORTS))


def vip(v: int, which: int) -> str:
    return end(f"{NET[v]}{which}", 80)


def pod(v: int, port: int = 8080) -> str:
    return end(POD[v], port)


class Path_:
    """The programs and their maps."""

    def __init__(self, site: Site, programs: dict[str, Program], where: str) -> None:
        self.site = site
        self.programs = programs
        self.where = where
        self.folder = next(site.pins.glob("programs-tc-*"))
        self.out, self.out_mac = 0, ""

    def inside(self, action: Callable[[], T]) -> T:
        """Runs it in the node's network namespace."""
        return netns.run_in(Path("/run/netns") / self.where, action)

    def forward(self, on: bool) -> None:
        """Whether the node forwards packets (net.ipv4.ip_forward and its IPv6 twin)."""
        for family in ("ipv4", "ipv6"):
            path = Path(f"/proc/sys/net/{family}/conf/all/forwarding")
            self.inside(lambda: path.write_text(f"{on:d}"))  # noqa: B023

    def set_device(
        self, ifindex: int, role: Role, flags: DeviceFlag, own: tuple[str, str] | None = None
    ) -> None:
        """Writes a device's entry. `own`: its IPv4 and IPv6 addresses."""
        four, six = (parse_addr(one) for one in own) if own else (bytes(16), bytes(16))
        value = DEVICE.pack(role, 14, flags, bytes(6), four, six)
        with self.site.pinned("devices") as devices:
            devices.update(U32.pack(ifindex), value)
        self.cache(ifindex, CACHED_DEVICE.pack(ifindex, value))

    def cache(self, ifindex: int, value: bytes) -> None:
        """Writes the slot of the device cache that this device maps to."""
        with self.site.pinned("device_cache") as cache:
            cache.update(U32.pack(ifindex % CACHED_DEVICES), value)

    def delete_flows(self) -> None:
        """Deletes the flows of earlier tests."""
        with self.site.pinned("flows") as entries:
            for key, _ in list(entries.items()):
                entries.delete(key)

    def set_loopback_role(self, role: Role, flags: DeviceFlag | None = None) -> None:
        """Makes loopback a device of this role."""
        if flags is None:
            flags = DeviceFlag.LOCAL if role is Role.POD else DeviceFlag(0)
        self.set_device(1, role, flags)

    def node(self, flags: NodeFlag, low: int = LOW, high: int = HIGH) -> None:
        """Writes the node's flags and its range of SNAT ports."""
        with self.site.pinned("node") as node:
            value = bytearray(node.lookup(U32.pack(0)) or b"")
            value[32:40] = struct.pack("=IHH", flags, low, high)
            node.update(U32.pack(0), bytes(value))

    def run(
        self, name: str, packet: bytes, complete: bool = False, context: SkbContext | None = None
    ) -> tuple[int, bytes]:
        """The verdict, and the packet without its link header. `complete`: as CHECKSUM_COMPLETE,
        where the kernel can run programs so.
        """
        complete = complete and not lacking("checksum_complete")
        program, given = self.programs[name], context.pack() if context else None
        to = self.out_mac if context and context.ifindex == self.out != 0 else MAC_B
        sent = frame(packet, to=to)
        done = self.inside(lambda: run(program, sent, context=given, checksum_complete=complete))
        return done.retval, done.packet_out[14:]

    def go(self, name: str, packet: bytes, want: bytes) -> bytes:
        """Runs the program and expects the packet to pass as `want`, with CHECKSUM_COMPLETE as
        well.
        """
        retval, got = self.run(name, packet, complete=True)
        assert retval == TC_ACT_UNSPEC
        assert difference(got, want, l2=False) == ""
        assert [one for one in checksums(got, l2=False) if one not in QUOTED] == []
        return got


@pytest.fixture(scope="module")
def path(artifact_cache: Path) -> Iterator[Path_]:
    where = f"kbpk{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        ip("link set lo up", netns=where)
        for name in (
            "net.ipv4.icmp_ratelimit",
            "net.ipv6.icmp.ratelimit",
        ):  # all tests are one client
            netns.run_in(Path("/run/netns") / where, lambda: sysctl.write(name, "0"))  # noqa: B023
        with sites(artifact_cache) as make:
            site = make(node=where)
            sizes = replace(SIZES, connections=8192)
            plane = site.open(sizes, packet_path=True, masquerade_ports=(LOW, HIGH))
            addresses = tuple(parse_addr(NODE[v]) for v in (4, 6))
            state = msgspec.structs.replace(desired(*services()), masquerade_addresses=addresses)
            netns.run_in(Path("/run/netns") / where, lambda: plane.apply(state, None))
            folder = next(site.pins.glob("programs-tc-*"))
            names = ("tc_ingress", "tc_egress")
            made = Path_(site, {name: Program.open(folder / name) for name in names}, where)
            with site.pinned("local_networks") as networks:
                networks.update(NETWORK_KEY.pack(96 + 16, parse_addr(NEAR[4])), U32.pack(1))
                networks.update(NETWORK_KEY.pack(64, parse_addr(NEAR[6])), U32.pack(1))
            yield made
            for program in made.programs.values():
                program.close()
    finally:
        command("ip", "netns", "del", where)


def services() -> Iterator[object]:
    protocols = (Protocol.TCP, Protocol.UDP, Protocol.SCTP)
    for v, protocol in itertools.product((4, 6), protocols):

        def one(which: int, to: str, kind: str = "LoadBalancer", **more: object) -> object:
            at = f"{kind}={vip(v, which)}" if kind else vip(v, which)  # noqa: B023
            name = f"s{which}-{protocol.name.lower()}"  # noqa: B023
            return service(name, at, to, protocol, **more)  # noqa: B023

        yield one(CLUSTER, pod(v))
        yield one(LOCAL, pod(v), local=pod(v), external_local=True)
        yield one(NONE, "")
        yield one(RESTRICTED, pod(v), restricted=True)
        yield one(MASKED, pod(v, 80))
        yield one(SAME, pod(v, 80), local=pod(v, 80), external_local=True)
        yield one(IP, pod(v), "")
        yield one(OWN, end(NODE[v], 8080))
        yield one(OTHER_OWN, end(OTHER[v], 8080))
        yield one(REMOTE, pod(v), external_local=True)


@pytest.fixture(autouse=True)
def _outside(path: Path_) -> Iterator[None]:
    path.set_loopback_role(Role.HOST)
    path.node(NodeFlag(0))
    with path.site.telling():
        yield


# ---- next to another data plane --------------------------------------------------------------

BEGINS = {
    "tcp": lambda a, b, number: tcp(a, b, flags="S", seq=number),
    "sctp": lambda a, b, number: sctp(a, b, init(number)),
}


def init(tag: int) -> bytes:
    return packets.chunk(1, struct.pack("!IIHHI", tag, 65536, 10, 10, 1))


@both
@pytest.mark.parametrize("kind", BEGINS)
def test_connection_begun_under_another_data_plane_stays_its_own(
    path: Path_, v: int, kind: str
) -> None:
    own, front, build = client(v), vip(v, LOCAL), BEGINS[kind]
    path.node(NodeFlag.PASSIVE)
    first = build(own, front, 7)
    path.go("tc_ingress", first, first)
    path.node(NodeFlag.COEXISTING)
    path.go("tc_ingress", first, first)
    assert translated(path, build(own, front, 8)), "a new connection from the same port"
    assert translated(path, build(client(v), front, 7)), "another client"
    path.node(NodeFlag(0))
    own = client(v)
    path.go("tc_ingress", build(own, front, 9), build(own, pod(v), 9))


def translated(path: Path_, packet: bytes) -> bool:
    _, got = path.run("tc_ingress", packet)
    return got[:1] == packet[:1] and got != packet


@both
def test_datagrams_pass_only_while_passive(path: Path_, v: int) -> None:
    own, front = client(v), vip(v, LOCAL)
    question = udp(own, front, b"?")
    path.node(NodeFlag.PASSIVE)
    path.go("tc_ingress", question, question)
    path.node(NodeFlag.COEXISTING)
    assert translated(path, question)


@both
def test_existing_flow_is_translated_while_passive(path: Path_, v: int) -> None:
    """A new connection from the same port is the other data plane's."""
    own, front, back = client(v), vip(v, LOCAL), pod(v)
    for word in ("S", "<SA"):
        segment(path, v, own, word, own, LOCAL)
    path.node(NodeFlag.PASSIVE)
    path.go("tc_ingress", tcp(own, front, b"data"), tcp(own, back, b"data"))
    for word in ("A", "FA", "<FA"):
        segment(path, v, own, word, own, LOCAL)
    for packet in (tcp(own, front, flags="S", seq=9), tcp(own, front, b"data", seq=10)):
        path.go("tc_ingress", packet, packet)


@both
def test_client_gets_an_snat_port_while_coexisting(path: Path_, v: int) -> None:
    own, front, back = client(v), vip(v, LOCAL), pod(v)
    path.node(NodeFlag.COEXISTING)
    _, got = path.run("tc_ingress", tcp(own, front, flags="S"))
    source = parse(got, l2=False).source
    host, _, port = source.rpartition(":")
    assert (host.strip("[]"), LOW <= int(port) <= HIGH) == (CLIENT[v], True)
    path.go("tc_ingress", tcp(own, front, b"data"), tcp(source, back, b"data"))
    path.go("tc_egress", tcp(back, source, b"data"), tcp(front, own, b"data"))


# ---- request and reply ---------------------------------------------------------------------------

KINDS = {
    "tcp": lambda a, b, **ip: tcp(a, b, b"data", flags="S", mss=1460, **ip),
    "tcp, odd length": lambda a, b, **ip: tcp(a, b, b"odd", flags="S", **ip),
    "udp": lambda a, b, **ip: udp(a, b, b"question", **ip),
    "udp, nothing in it": udp,
}
BACK = {
    "tcp": lambda a, b, **ip: tcp(a, b, flags="SA", ack=1001, mss=1460, **ip),
    "udp": lambda a, b, **ip: udp(a, b, b"the answer", **ip),
}


def masked(path: Path_, packet: bytes, build: object, to: str, v: int, **ip_: object) -> str:
    """Runs egress for a packet that gets a source of the node; checks the result and returns it."""
    _, got = path.run("tc_egress", packet)
    source = parse(got, l2=False).source
    host, _, port = source.rpartition(":")
    assert host.strip("[]") == NODE[v]
    assert LOW <= int(port) <= HIGH
    path.go("tc_egress", packet, build(source, to, **ip_))
    return source


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"options": b"\x94\x04\0\0"}, {"ttl": 3, "tos": 7}],
                         ids=["", "options", "ttl"])  # fmt: skip
def test_cluster_policy_request_and_reply(
    path: Path_, v: int, kind: str, more: dict[str, object]
) -> None:
    if v == 6:
        more = {"extensions": [packets.destination()]} if "options" in more else more
    build, answer = KINDS[kind], BACK[kind[:3]]
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    inside = path.go("tc_ingress", build(own, front, **more), build(own, back, **more))
    source = masked(path, inside, build, back, v, **more)
    inside = path.go("tc_ingress", answer(back, source, **more), answer(back, own, **more))
    path.go("tc_egress", inside, answer(front, own, **more))


@both
@pytest.mark.parametrize("kind", KINDS)
def test_local_policy_request_and_reply(path: Path_, v: int, kind: str) -> None:
    build, answer = KINDS[kind], BACK[kind[:3]]
    own, front, back = client(v), vip(v, LOCAL), pod(v)
    inside = path.go("tc_ingress", build(own, front), build(own, back))
    path.go("tc_egress", inside, build(own, back))
    inside = path.go("tc_ingress", answer(back, own), answer(back, own))
    path.go("tc_egress", inside, answer(front, own))


@both
def test_client_port_is_kept_if_free_else_replaced(path: Path_, v: int) -> None:
    free, last = next(SPARE_PORTS), next(SPARE_PORTS)
    path.node(NodeFlag(0), free, last)
    for own, port in ((CLIENT[v], free), (ROUTER[v], last)):
        _, inside = path.run("tc_ingress", udp(end(own, free), vip(v, CLUSTER), b"?"))
        _, out = path.run("tc_egress", inside)
        assert parse(out, l2=False).source == end(NODE[v], port), own


@both
@pytest.mark.parametrize("own", [40_000, 40_199], ids=["first port", "last port"])
def test_client_port_at_the_ends_of_the_range_is_kept(path: Path_, v: int, own: int) -> None:
    path.node(NodeFlag(0), 40_000, 40_199)
    _, inside = path.run("tc_ingress", udp(end(CLIENT[v], own), vip(v, CLUSTER), b"?"))
    _, out = path.run("tc_egress", inside)
    assert parse(out, l2=False).source == end(NODE[v], own)


@both
def test_two_frontends_of_one_backend_from_one_client_port(path: Path_, v: int) -> None:
    """The second flow gets another client port, so that the backend can tell them apart."""
    own, back = client(v), pod(v)
    first = path.go("tc_ingress", udp(own, vip(v, CLUSTER), b"?"), udp(own, back, b"?"))
    _, second = path.run("tc_ingress", udp(own, vip(v, LOCAL), b"?"))
    taken = parse(second, l2=False)
    assert taken.destination == back
    assert taken.source not in (own, "")
    path.go("tc_egress", udp(back, taken.source, b"!"), udp(vip(v, LOCAL), own, b"!"))
    path.go("tc_egress", udp(back, own, b"!"), udp(vip(v, CLUSTER), own, b"!"))
    assert checksums(first, l2=False) == checksums(second, l2=False) == []


@both
@pytest.mark.parametrize("kind", BACK)
def test_two_frontends_of_one_backend_with_masquerade(path: Path_, v: int, kind: str) -> None:
    own, back = client(v), pod(v)
    path.run("tc_ingress", KINDS[kind](own, vip(v, LOCAL)))
    _, inside = path.run("tc_ingress", KINDS[kind](own, vip(v, CLUSTER)))
    moved = parse(inside, l2=False).source
    assert moved != own
    source = masked(path, inside, KINDS[kind], back, v)
    inside = path.go("tc_ingress", BACK[kind](back, source), BACK[kind](back, moved))
    path.go("tc_egress", inside, BACK[kind](vip(v, CLUSTER), own))


def test_udp_without_checksum_stays_without(path: Path_) -> None:
    own = client(4)
    sent = udp(own, vip(4, CLUSTER), b"?", checksum="zero")
    inside = path.go("tc_ingress", sent, udp(own, pod(4), b"?", checksum="zero"))
    masked(path, inside, lambda a, b: udp(a, b, b"?", checksum="zero"), pod(4), 4)


@both
def test_zero_udp_checksum_is_written_as_ones(path: Path_, v: int) -> None:
    """0 means "no checksum", and IPv6 would drop the packet (RFC 768, RFC 8200)."""
    own, front = client(v), vip(v, LOCAL)
    payloads = (struct.pack("!H", n) for n in range(1 << 16))
    is_ones = lambda raw: parse(raw, l2=False).transport.checksum == 0xFFFF  # noqa: E731
    payload = next(one for one in payloads if is_ones(udp(own, pod(v), one)))
    path.go("tc_ingress", udp(own, front, payload), udp(own, pod(v), payload))


def test_ipv6_udp_without_checksum_stays_without(path: Path_) -> None:
    own = client(6)
    sent = udp(own, vip(6, LOCAL), b"?", checksum="zero")
    _, got = path.run("tc_ingress", sent, complete=True)
    assert difference(got, udp(own, pod(6), b"?", checksum="zero"), l2=False) == ""


MARTIANS = {
    4: ("127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"),
    6: ("::1", "::", "ff02::1"),
}


@both
def test_martian_sources_pass_untouched_to_the_stack(path: Path_, v: int) -> None:
    """Redirected past the stack, their replies would reach a socket of this node."""
    for bad in (*MARTIANS[v], NODE[v]):
        packet = udp(end(bad, next(PORTS)), vip(v, CLUSTER), b"?")
        assert path.run("tc_ingress", packet) == (TC_ACT_UNSPEC, packet), bad


def test_v4_mapped_addresses_on_the_wire_are_not_ipv4(path: Path_) -> None:
    own = client(4)
    host, port = own.split(":")
    packet = tcp(end(f"::ffff:{host}", int(port)), end("::ffff:192.0.2.1", 80), flags="S")
    assert path.run("tc_ingress", packet) == (TC_ACT_UNSPEC, packet)
    assert entries_of(path, own) == []


@both
def test_frames_for_another_mac_address_pass_untouched(path: Path_, v: int) -> None:
    """A device in promiscuous mode receives them, too."""
    packet = udp(client(v), vip(v, CLUSTER), b"?")
    done = run(path.programs["tc_ingress"], frame(packet, to="02:00:00:00:00:77"))
    assert (done.retval, done.packet_out[14:]) == (TC_ACT_UNSPEC, packet)


class Masquerade(NamedTuple):
    """Whether the backend sees an address of the node, as with kube-proxy."""

    name: str
    role: Role
    which: int
    is_masked: bool
    flags: NodeFlag = NodeFlag(0)
    client: str = ""  # "itself": the backend; "near": in a local network
    local: DeviceFlag | None = None


DETECTS, BY_NETWORK = NodeFlag.DETECTS_LOCAL, NodeFlag.DETECTS_LOCAL | NodeFlag.LOCAL_NETWORKS
NO_FLAG = DeviceFlag(0)
MASQUERADES = [
    Masquerade("ClusterIP, from a pod", Role.POD, IP, False),
    Masquerade("ClusterIP, from outside", Role.HOST, IP, False),
    Masquerade("ClusterIP, masqueradeAll", Role.POD, IP, True, NodeFlag.MASQUERADE_ALL),
    Masquerade("ClusterIP, outside, local detection", Role.HOST, IP, True, DETECTS),
    Masquerade("ClusterIP, a pod, local detection", Role.POD, IP, False, DETECTS),
    Masquerade("ClusterIP, a pod device of another name", Role.POD, IP, True, DETECTS, "", NO_FLAG),
    Masquerade("ClusterIP, outside, in a local network", Role.HOST, IP, False, BY_NETWORK, "near"),
    Masquerade("ClusterIP, a pod, in no local network", Role.POD, IP, True, BY_NETWORK),
    Masquerade("ClusterIP, hairpin", Role.POD, IP, True, client="itself"),
    Masquerade("Cluster policy, from outside", Role.HOST, CLUSTER, True),
    Masquerade("Cluster policy, from a pod", Role.POD, CLUSTER, True),
    Masquerade("Local policy, from outside", Role.HOST, LOCAL, False),
    Masquerade("Local policy, from a pod", Role.POD, LOCAL, False),
    Masquerade("Local policy, masqueradeAll", Role.HOST, LOCAL, False, NodeFlag.MASQUERADE_ALL),
    Masquerade("Local policy, hairpin", Role.POD, LOCAL, True, client="itself"),
]


@both
@pytest.mark.parametrize("row", MASQUERADES, ids=lambda row: row.name)
def test_client_is_masqueraded_as_with_kube_proxy(path: Path_, v: int, row: Masquerade) -> None:
    path.set_loopback_role(row.role, row.local)
    path.node(row.flags)
    own = {"itself": pod(v, next(PORTS)), "near": end(NEAR[v], next(PORTS))}.get(row.client)
    own, back, front = own or client(v), pod(v), vip(v, row.which)
    inside = path.go("tc_ingress", udp(own, front, b"?"), udp(own, back, b"?"))
    source = own
    if row.is_masked:
        source = masked(path, inside, lambda a, b: udp(a, b, b"?"), back, v)
    else:
        path.go("tc_egress", inside, inside)
    inside = path.go("tc_ingress", udp(back, source, b"!"), udp(back, own, b"!"))
    path.go("tc_egress", inside, udp(front, own, b"!"))


# ---- marks ---------------------------------------------------------------------------------------

OTHERS = 0x1001_8001
"""Bits of the mark that belong to other agents."""
MARK = 1 << 14


def marked(path: Path_, name: str, packet: bytes, mark: int) -> tuple[bytes, int]:
    """The packet and its mark after the program."""
    context = SkbContext(mark=mark, ifindex=1).pack()
    done = run(path.programs[name], frame(packet), context=context)
    assert done.retval == TC_ACT_UNSPEC
    return done.packet_out[14:], done.context.mark


@both
@pytest.mark.parametrize("which", [OWN, OTHER_OWN], ids=["masquerade address", "NodePort address"])
def test_backend_at_a_node_address_sees_the_client(path: Path_, v: int, which: int) -> None:
    """Its packets leave by no device that would translate the source, so an entry and a node port
    for it would only be in the way.
    """
    own, front = client(v), vip(v, which)
    back = end((NODE if which == OWN else OTHER)[v], 8080)
    with path.site.pinned("node_addresses") as addresses:
        addresses.update(parse_addr(OTHER[v]), U32.pack(1))
        try:
            path.go("tc_ingress", udp(own, front), udp(own, back))
        finally:
            addresses.delete(parse_addr(OTHER[v]))
    assert {raw[DIRECTION] for raw in entries_of(path, own)} == {
        FlowDirection.ORIGINAL,
        FlowDirection.REPLY,
    }
    path.go("tc_egress", udp(back, own), udp(front, own))


@both
@pytest.mark.parametrize("kind", BACK)
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])
def test_masqueraded_packets_are_marked_in_the_stack_both_ways(
    path: Path_, v: int, kind: str, remote: bool, which: int
) -> None:
    """The first packet, a later one, their replies and an error about each are marked; the mark is
    removed at egress. A local backend replies to the client, a remote one to the node.
    """
    build, own, back, front = KINDS[kind], client(v), pod(v), vip(v, which)
    want = OTHERS | (MARK if which == CLUSTER else 0)
    source = own

    def through(packet: bytes) -> bytes:
        inside, mark = marked(path, "tc_ingress", packet, OTHERS)
        assert mark == want
        out, mark = marked(path, "tc_egress", inside, mark)
        assert mark == OTHERS
        return out

    for packet in (build(own, front), SENT[kind](own, front)):
        out = through(packet)
        source = parse(out, l2=False).source
    assert (source != own) == (which == CLUSTER)
    told = icmp_error("time exceeded", ROUTER[v], out)
    seen = source if remote else own
    assert parse(through(BACK[kind](back, seen)), l2=False).source == front
    about = told if remote else icmp_error("time exceeded", ROUTER[v], SENT[kind](own, back))
    assert parse(through(about), l2=False).destination == CLIENT[v]


@both
def test_packets_without_masquerade_are_not_marked(path: Path_, v: int) -> None:
    path.set_loopback_role(Role.POD)
    _, mark = marked(path, "tc_ingress", udp(client(v), vip(v, IP)), OTHERS)
    assert mark == OTHERS, "a pod that connects to another one by ClusterIP"
    _, mark = marked(path, "tc_ingress", udp(client(v), end(ROUTER[v], 53)), OTHERS)
    assert mark == OTHERS, "no Service"
    _, mark = marked(path, "tc_egress", udp(client(v), end(ROUTER[v], 53)), OTHERS | MARK)
    assert mark == OTHERS | MARK, "a packet that another agent marked"


@both
def test_packets_of_an_expired_flow_are_not_marked(path: Path_, v: int) -> None:
    """A pod that later sends from its server port is no longer part of the flow."""
    own, back = client(v), pod(v)
    through, _ = marked(path, "tc_ingress", udp(own, vip(v, CLUSTER)), 0)
    assert parse(through, l2=False).destination == back
    assert marked(path, "tc_ingress", udp(back, own), 0)[1] == MARK
    with path.site.pinned("flows") as flows:
        for key, raw in list(flows.items()):
            aged = FLOW.unpack(raw)
            flows.update(key, FLOW.pack(0, *aged[1:]))
    assert marked(path, "tc_ingress", udp(back, own), 0)[1] == 0


# ---- fragments -----------------------------------------------------------------------------------


@both
def test_fragments_are_translated(path: Path_, v: int) -> None:
    payload = os.urandom(3001)
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    number = next(PORTS)
    pieces = fragments(udp(own, front, payload, **_id(v, number)), 1280, id=number)
    inside = [path.run("tc_ingress", piece, complete=True) for piece in pieces]
    assert {verdict for verdict, _ in inside} == {TC_ACT_UNSPEC}
    whole = reassembled(*(packet for _, packet in inside))
    assert difference(whole, udp(own, back, payload, **_id(v, number)), l2=False) == ""
    out = reassembled(*(path.run("tc_egress", packet)[1] for _, packet in inside))
    assert checksums(out, l2=False) == []
    found = parse(out, l2=False)
    assert (found.source.rpartition(":")[0].strip("[]"), found.destination) == (NODE[v], back)
    assert found.payload == payload


def test_fragments_with_options_after_the_fragment_header(path: Path_) -> None:
    """The fragment header names the destination options; only the first fragment has the
    protocol.
    """
    own, front = client(6), vip(6, CLUSTER)
    whole = udp(own, front, bytes(3001), extensions=(destination(),))
    pieces = fragments(whole, 1280, id=next(PORTS))
    assert {piece[40] for piece in pieces} == {60}
    inside = [path.run("tc_ingress", piece) for piece in pieces]
    assert {parse(packet, l2=False).ip.destination for _, packet in inside} == {POD[6]}
    out = [path.run("tc_egress", packet)[1] for _, packet in inside]
    assert {parse(packet, l2=False).ip.source for packet in out} == {NODE[6]}
    assert checksums(reassembled(*out), l2=False) == []


def _id(v: int, number: int) -> dict[str, int]:
    """IPv4 has the identification in every packet, IPv6 in fragments only."""
    return {"ip_id": number} if v == 4 else {}


@both
def test_later_fragment_without_the_first_passes_untouched(path: Path_, v: int) -> None:
    number = next(PORTS)
    whole = udp(client(v), vip(v, CLUSTER), bytes(3000), **_id(v, number))
    piece = fragments(whole, 1280, id=number)[1]
    assert path.run("tc_ingress", piece) == (TC_ACT_UNSPEC, piece)


# ---- ICMP errors ---------------------------------------------------------------------------------


def quoted(sent: bytes, build: object, source: str, to: str) -> bytes:
    """The packet as quoted in an error: with other addresses and ports, and its original
    checksum.
    """
    had = parse(sent, l2=False).transport.checksum  # type: ignore[union-attr]
    return build(source, to, checksum=had)


ERRORS = ("too big", "host unreachable", "time exceeded", "parameter problem")
SENT = {
    "tcp": lambda a, b, **more: tcp(a, b, bytes(1000), flags="A", **more),
    "udp": lambda a, b, **more: udp(a, b, bytes(1000), **more),
}


def established(path: Path_, v: int, kind: str, which: int = CLUSTER) -> tuple[str, str]:
    """A flow with packets in both directions: the client, and the source that the backend sees."""
    own = client(v)
    verdict, inside = path.run("tc_ingress", KINDS[kind](own, vip(v, which)))
    assert verdict != TC_ACT_SHOT
    _, out = path.run("tc_egress", inside)
    source = parse(out, l2=False).source
    _, inside = path.run("tc_ingress", BACK[kind](pod(v), source))
    path.run("tc_egress", inside)
    if kind == "tcp":
        TALKS[own] = Talk(1000, 1000).answered()  # as KINDS and BACK have them
        for word in ("A+", "<A"):
            segment(path, v, own, word, source, which)
        assert states(path, own) == {TcpState.ESTABLISHED}
    return own, source


@both
@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])
def test_icmp_error_about_a_packet_to_the_backend(
    path: Path_, v: int, kind: str, error: str, which: int
) -> None:
    """From a router behind the node, or the pod's host. The client sees the packet that it sent."""
    own, source = established(path, v, kind, which)
    build = SENT[kind]
    sent = build(source, pod(v))

    def about(packet: bytes) -> bytes:
        return icmp_error(error, ROUTER[v], packet, mtu=1280 if error == "too big" else 0)

    inside = about(quoted(sent, build, own, pod(v)))
    if which == CLUSTER:
        path.go("tc_ingress", about(sent), inside)
    path.go("tc_egress", inside, about(quoted(sent, build, own, vip(v, which))))


@both
@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])
def test_icmp_error_about_a_packet_to_the_client(
    path: Path_, v: int, kind: str, error: str, which: int
) -> None:
    own, source = established(path, v, kind, which)
    build = SENT[kind]
    sent = build(vip(v, which), own)

    def about(packet: bytes) -> bytes:
        return icmp_error(error, ROUTER[v], packet, mtu=1280 if error == "too big" else 0)

    inside = about(quoted(sent, build, pod(v), own))
    path.go("tc_ingress", about(sent), inside)
    path.go("tc_egress", inside, about(quoted(sent, build, pod(v), source)))


@both
def test_icmp_error_of_the_backend_comes_from_the_frontend(path: Path_, v: int) -> None:
    own, source = established(path, v, "udp")
    build = SENT["udp"]
    sent = build(source, pod(v))
    error = icmp_error("port unreachable", POD[v], sent)
    inside = icmp_error("port unreachable", POD[v], quoted(sent, build, own, pod(v)))
    path.go("tc_ingress", error, inside)
    front = vip(v, CLUSTER).rpartition(":")[0].strip("[]")
    want = icmp_error("port unreachable", front, quoted(sent, build, own, vip(v, CLUSTER)))
    path.go("tc_egress", inside, want)


@both
def test_icmp_error_with_eight_quoted_bytes_is_translated(path: Path_, v: int) -> None:
    own, source = established(path, v, "tcp")
    quote = (20 if v == 4 else 40) + 8
    for name, ends in (("tc_ingress", (source, pod(v))), ("tc_egress", (own, pod(v)))):
        error = icmp_error("too big", ROUTER[v], tcp(*ends), mtu=1280, quote=quote)
        retval, got = path.run(name, error, complete=True)
        found = parse(got, l2=False)
        assert retval == TC_ACT_UNSPEC
        assert checksums(found) == []
        assert found.embedded is not None
        assert found.embedded.source == own
        want = pod(v) if name == "tc_ingress" else vip(v, CLUSTER)
        assert found.embedded.destination == want


# ---- refusals ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("more", [{}, {"options": b"\x94\x04\0\0"}], ids=["", "options"])
@pytest.mark.parametrize("data", [b"", b"fast open"], ids=["", "data"])
def test_syn_is_refused_with_a_reset(
    path: Path_, v: int, more: dict[str, object], data: bytes
) -> None:
    more = more if v == 4 else {}
    own, front = client(v), vip(v, NONE)
    syn = tcp(own, front, data, flags="S", seq=0xFFFFFFF0, mss=1460, ttl=2, **more)
    done = run(path.programs["tc_ingress"], frame(syn))
    assert done.retval == TC_ACT_REDIRECT
    want = tcp(front, own, data, flags="RA", seq=0, ack=(0xFFFFFFF1 + len(data)) & 0xFFFFFFFF,
               mss=1460, **more)  # fmt: skip
    assert difference(done.packet_out, frame(want, to=MAC_A, source=MAC_B)) == ""


LONG = {
    "": {4: {}, 6: {}},
    "options": {
        4: {"options": b"\x94\x04\0\0"},
        6: {"extensions": [packets.hop_by_hop(), packets.destination()]},
    },
    "all options": {
        4: {"options": bytes([1]) * 40},
        6: {"extensions": [packets.destination()] * 4},
    },
}


@both
@pytest.mark.parametrize("build", [udp, sctp])
@pytest.mark.parametrize("size", [0, 1, 1000])
@pytest.mark.parametrize("long", LONG)
def test_datagram_is_refused_with_an_icmp_error(
    path: Path_, v: int, build: object, size: int, long: str
) -> None:
    own, front = client(v), vip(v, NONE)
    data = bytes(size) if build is udp else packets.SCTP_INIT + bytes(size)
    sent = build(own, front, data, **LONG[long][v])
    done = run(path.programs["tc_ingress"], frame(sent))
    assert done.retval == TC_ACT_REDIRECT
    found = parse(done.packet_out)
    assert checksums(found) == []
    host = front.rpartition(":")[0].strip("[]")
    assert (found.source, found.destination) == (host, CLIENT[v])
    assert found.ethernet is not None
    assert (found.ethernet.destination, found.ethernet.source) == (MAC_A, MAC_B)
    kind = found.transport
    assert (kind.type, kind.code) == ((3, 3) if v == 4 else (1, 4))  # type: ignore[union-attr]
    about = found.embedded
    assert about is not None
    assert sent.startswith(about.packet)
    assert (about.source, about.destination) == (own, front)
    headers = len(sent) - len(build(own, front, data)) + (20 if v == 4 else 40)
    carries = 8 if build is udp else 12 + 8  # up to an INIT's tag, without which Linux ignores
    assert len(about.packet) - headers == carries  # an error about SCTP (RFC 9260, section 10)


HOUR = 3600 * 10**9


@both
def test_only_the_first_fragment_is_refused(path: Path_, v: int) -> None:
    """As a kernel does: later fragments lack the header that the client needs to match
    the error.
    """
    number = next(PORTS)
    front = end(f"{NET[v]}{IP}", 81)  # a port of no Service
    whole = udp(client(v), front, os.urandom(3000), **_id(v, number))
    first, *later = fragments(whole, 1280, id=number)
    assert path.run("tc_ingress", first)[0] == TC_ACT_REDIRECT
    assert [path.run("tc_ingress", one)[0] for one in later] == [TC_ACT_SHOT] * 2


class Refusals:
    """Token buckets that do not refill during a test, unless the test says so."""

    def __init__(self, path: Path_) -> None:
        self.path = path

    def set(self, which: RefusalLimit, burst: int, interval: int = HOUR, spent: int = 0) -> None:
        """`spent`: in how many nanoseconds the bucket is full; if negative, since when it
        is full.
        """
        then = max(0, time.monotonic_ns() + spent) if spent else 0
        with self.path.site.pinned("refusal_limits") as limits:
            limits.update(U32.pack(which), REFUSAL_LIMIT.pack(then, interval, burst))

    def answers(self, v: int, kind: str, hosts: Iterable[str]) -> int:
        """How many of these clients' packets are answered; the others must be counted as
        dropped.
        """
        packets = [BUILD[kind](end(host, next(PORTS)), vip(v, NONE)) for host in hosts]
        before = self.path.site.reasons()
        verdicts = [self.path.run("tc_ingress", packet)[0] for packet in packets]
        counted = self.path.site.reasons() - before
        answered = verdicts.count(TC_ACT_REDIRECT)
        assert verdicts.count(TC_ACT_SHOT) == len(packets) - answered
        assert counted[Reason.RATE_LIMITED] == len(packets) - answered
        assert counted[Reason.NO_ENDPOINTS] == answered
        return answered


BUILD = {
    "udp": lambda a, b: udp(a, b, b"?"),
    "sctp": lambda a, b: sctp(a, b, packets.SCTP_INIT),
    "tcp": lambda a, b: tcp(a, b, flags="S"),
}
EACH = {4: RefusalLimit.PEER4, 6: RefusalLimit.PEER6}
BUCKET = {"udp": RefusalLimit.ICMP, "sctp": RefusalLimit.ICMP, "tcp": RefusalLimit.RESET}


@pytest.fixture
def refusals(path: Path_) -> Iterator[Refusals]:
    with path.site.pinned("refusal_limits") as limits:
        before = dict(limits.items())
        yield Refusals(path)
        for key, value in before.items():
            limits.update(key, value)


@both
@pytest.mark.parametrize("kind", BUILD)
def test_refusals_stop_when_the_bucket_is_empty(refusals: Refusals, v: int, kind: str) -> None:
    """They resume as the bucket refills, up to its burst. The other bucket is independent."""
    other = {"tcp": "udp"}.get(kind, "tcp")
    refusals.set(BUCKET[kind], 50)
    refusals.set(BUCKET[other], 50)
    assert refusals.answers(v, kind, [CLIENT[v]] * 200) == 50
    assert refusals.answers(v, other, [CLIENT[v]] * 10) == 10
    refusals.set(BUCKET[kind], 50, spent=47 * HOUR - HOUR // 2)
    assert refusals.answers(v, kind, [CLIENT[v]] * 10) == 3, "three tokens have come back"
    refusals.set(BUCKET[kind], 50, spent=-(10**9))
    assert refusals.answers(v, kind, [CLIENT[v]] * 60) == 50, "never more than the burst"


@both
def test_bucket_refills_over_time(refusals: Refusals, v: int) -> None:
    """Beyond the burst, only as many packets are answered as tokens came back meanwhile."""
    interval = 10**9 // 20
    refusals.set(RefusalLimit.ICMP, 5, interval)
    start = time.monotonic_ns()
    answered = refusals.answers(v, "udp", [CLIENT[v]] * 200)
    passed = time.monotonic_ns() - start
    assert 5 <= answered <= 5 + passed // interval + 1


@both
@pytest.mark.parametrize("kind", ["udp", "sctp"])
def test_each_client_has_its_own_limit_of_icmp_errors(
    refusals: Refusals, v: int, kind: str
) -> None:
    refusals.set(EACH[v], 6)
    refusals.set(RefusalLimit.ICMP, 50)
    hosts = [f"{CLIENT[v][:-1]}{100 + n + (50 if kind == 'udp' else 0)}" for n in range(2)]
    assert refusals.answers(v, kind, [hosts[0]] * 200) == 6
    assert refusals.answers(v, kind, [hosts[1]] * 20) == 6
    with refusals.path.site.pinned("refused_peers") as peers:
        peers.update(parse_addr(hosts[0]), U64.pack(time.monotonic_ns() + 4 * HOUR - HOUR // 2))
    assert refusals.answers(v, kind, [hosts[0]] * 20) == 2
    assert refusals.answers(v, "tcp", [hosts[1]] * 20) == 20, "resets have no such limit"


@both
def test_evicted_client_is_limited_by_the_nodes_bucket(refusals: Refusals, v: int) -> None:
    """A client whose entry was evicted may get six errors again, within the node's limit."""
    refusals.set(EACH[v], 6)
    refusals.set(RefusalLimit.ICMP, 8)
    host = f"{CLIENT[v][:-1]}{190 + v}"
    assert refusals.answers(v, "udp", [host] * 20) == 6
    spent = U64.pack(time.monotonic_ns() + 6 * HOUR)
    with refusals.path.site.pinned("refused_peers") as peers:
        for number in range(4 * MAPS["refused_peers"].entries):
            peers.update(number.to_bytes(16, "little"), spent)
        peers.delete(parse_addr(host))  # as if the kernel had evicted it as the oldest
    assert refusals.answers(v, "udp", [host] * 20) == 2


SETTINGS = {
    "the kernel's defaults": ({}, (10**6, 50), (10**6, 50), (10**9, 6), (10**8, 6)),
    "other limits": (
        {"net.ipv4.icmp_ratelimit": "500", "net.ipv6.icmp.ratelimit": "40"},
        (10**6, 50), (10**6, 50), (500 * 10**6, 6), (40 * 10**6, 6),
    ),
    "no limits": (
        {"net.ipv4.icmp_ratelimit": "0", "net.ipv6.icmp.ratelimit": "0"},
        (10**6, 50), (10**6, 50), (0, 6), (0, 6),
    ),
}  # fmt: skip
"""The kernel's settings, then (interval in ns, burst) of ICMP errors, RSTs, each IPv4,
IPv6 peer.
"""


@pytest.mark.parametrize("name", SETTINGS)
def test_refusal_limits_are_the_kernels_settings(name: str) -> None:
    settings, *wanted = SETTINGS[name]
    told: dict[bytes, bytes] = {}

    class Limits:
        def update(self, key: bytes, value: bytes) -> None:
            told[key] = value

        def delete(self, _: bytes) -> bool:
            return False

        def items(self) -> Iterable[tuple[bytes, bytes]]:
            return told.items()

    where = f"kbpl{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        at = Path("/run/netns") / where
        defaults = {"net.ipv4.icmp_msgs_per_sec": "1000", "net.ipv4.icmp_msgs_burst": "50"}
        for key, value in {**defaults, **settings}.items():
            netns.run_in(at, lambda: sysctl.write(key, value))  # noqa: B023
        if not settings:
            ip6 = "net.ipv6.icmp.ratelimit"
            netns.run_in(at, lambda: sysctl.write(ip6, "100"))
        netns.run_in(at, lambda: write_refusal_limits(Limits()))
    finally:
        command("ip", "netns", "del", where)
    found = [REFUSAL_LIMIT.unpack(told[U32.pack(which)])[1:] for which in RefusalLimit]
    assert found == wanted


@both
@pytest.mark.parametrize("why", [Reason.NO_ENDPOINTS, Reason.UNKNOWN_PORT], ids=lambda r: r.name)
def test_sctp_without_checksum_is_dropped_not_refused(path: Path_, v: int, why: Reason) -> None:
    """The device would fill in a CRC in the quoted packet, too, and break the error's own
    checksum.
    """
    before = path.site.reasons()
    front = vip(v, NONE) if why is Reason.NO_ENDPOINTS else end(f"{NET[v]}{IP}", 81)
    assert path.run("tc_ingress", sctp(client(v), front, checksum="zero"))[0] == TC_ACT_SHOT
    assert path.site.reasons() - before == {why: 1}


@both
@pytest.mark.parametrize("build", [lambda a, b: tcp(a, b, flags="S"), udp, sctp],
                         ids=["tcp", "udp", "sctp"])  # fmt: skip
def test_unknown_port_of_a_cluster_ip_is_refused(path: Path_, v: int, build: object) -> None:
    """Refused at a ClusterIP. Addresses of other kinds may have other ports, so there it passes."""
    before = path.site.reasons()
    own = client(v)
    retval, got = path.run("tc_ingress", build(own, end(f"{NET[v]}{IP}", 81)))
    assert retval == TC_ACT_REDIRECT
    found = parse(got, l2=False)
    about = found.embedded or parse(build(own, end(f"{NET[v]}{IP}", 81)), l2=False)
    assert (about.source, about.destination) == (own, end(f"{NET[v]}{IP}", 81))
    assert found.protocol in ("tcp", "icmp", "icmp6")
    counted = path.site.reasons() - before
    assert (counted[Reason.UNKNOWN_PORT], counted[Reason.NO_ENDPOINTS]) == (1, 0)
    other = build(own, end(f"{NET[v]}{CLUSTER}", 81))
    assert path.run("tc_ingress", other) == (TC_ACT_UNSPEC, other)


@both
@pytest.mark.parametrize("build", [lambda a, b: tcp(a, b, flags="S"), udp], ids=["tcp", "udp"])
def test_client_outside_source_ranges_is_dropped(path: Path_, v: int, build: object) -> None:
    before = path.site.reasons()[Reason.NOT_ALLOWED]
    assert path.run("tc_ingress", build(client(v), vip(v, RESTRICTED)))[0] == TC_ACT_SHOT
    assert path.site.reasons()[Reason.NOT_ALLOWED] == before + 1


# ---- SCTP ----------------------------------------------------------------------------------------


@both
def test_sctp_with_equal_ports_keeps_its_checksum(path: Path_, v: int) -> None:
    own, front, back = client(v), vip(v, SAME), pod(v, 80)
    inside = path.go("tc_ingress", sctp(own, front), sctp(own, back))
    path.go("tc_egress", inside, inside)
    path.go("tc_egress", sctp(back, own, tag=5), sctp(front, own, tag=5))


@both
@pytest.mark.parametrize("length", [4, 60, 1400, 3001])
def test_sctp_checksum_follows_changed_ports(path: Path_, v: int, length: int) -> None:
    """CRC32c covers the whole packet, of which the program reads the ports only."""
    chunks = b"\1" + os.urandom(length - 1)  # INIT
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    inside = path.go("tc_ingress", sctp(own, front, chunks), sctp(own, back, chunks))
    source = masked(path, inside, lambda a, b: sctp(a, b, chunks), back, v)
    inside = path.go(
        "tc_ingress", sctp(back, source, chunks, tag=5), sctp(back, own, chunks, tag=5)
    )
    path.go("tc_egress", inside, sctp(front, own, chunks, tag=5))


@both
def test_wrong_sctp_checksum_stays_wrong(path: Path_, v: int) -> None:
    """A packet that was damaged on its way must not become valid here."""
    own = client(v)
    _, got = path.run("tc_ingress", sctp(own, vip(v, CLUSTER), checksum="wrong"))
    assert checksums(got, l2=False) == ["sctp"]


@both
def test_sctp_checksum_left_to_the_device_stays_zero(path: Path_, v: int) -> None:
    """A pod's SCTP packet has no checksum yet (CHECKSUM_PARTIAL); a value there would be added."""
    _, got = path.run("tc_ingress", sctp(client(v), vip(v, CLUSTER), checksum="zero"))
    assert parse(got, l2=False).transport.checksum == 0  # type: ignore[union-attr]


@both
def test_sctp_fragments_with_a_changed_port_are_dropped(path: Path_, v: int) -> None:
    """The first fragment's checksum covers the others, whose length is not known yet."""
    number = next(PORTS)
    whole = sctp(client(v), vip(v, CLUSTER), b"\1" + os.urandom(1999), **_id(v, number))
    before = path.site.reasons()[Reason.NOT_REWRITTEN]
    first, *_ = fragments(whole, 1280, id=number)
    assert path.run("tc_ingress", first)[0] == TC_ACT_SHOT
    assert path.site.reasons()[Reason.NOT_REWRITTEN] == before + 1


# ---- packets of no flow --------------------------------------------------------------------------

UNRELATED = {
    "arp": lambda v: arp(1, MAC_A, "198.51.100.7", "00:00:00:00:00:00", "192.0.2.1"),
    "a ping to a VIP": lambda v: echo(CLIENT[v], f"{NET[v]}1"),
    "an unknown address": lambda v: tcp(client(v), end(ROUTER[v], 80), flags="S"),
    "an unknown port": lambda v: tcp(client(v), end(f"{NET[v]}1", 81), flags="S"),
    "a segment of no flow": lambda v: tcp(client(v), vip(v, CLUSTER), b"data", flags="PA"),
    "a SYN|ACK of no flow": lambda v: tcp(client(v), vip(v, CLUSTER), flags="SA"),
    "another protocol": lambda v: packets.datagram(CLIENT[v], f"{NET[v]}1", 47, bytes(40)),
    "an error of no flow": lambda v: icmp_error(
        "too big", ROUTER[v], tcp(vip(v, CLUSTER), client(v)), mtu=1280
    ),
    "an error about a ping": lambda v: icmp_error(
        "host unreachable", ROUTER[v], echo(NODE[v], CLIENT[v])
    ),
    "an error about next to nothing": lambda v: icmp_error(
        "host unreachable", ROUTER[v], udp(vip(v, CLUSTER), client(v)), quote=12
    ),
    "a header cut short": lambda v: packets.datagram(CLIENT[v], f"{NET[v]}1", 17, b"\1\2"),
    # A port outside of the range, because another test's flow may have any port of the range.
    "a reply of no flow": lambda v: udp(pod(v), end(NODE[v], 60_999), b"!"),
}


@both
@pytest.mark.parametrize("name", ["tc_ingress", "tc_egress"])
@pytest.mark.parametrize("unrelated", UNRELATED)
def test_unrelated_packets_pass_untouched(path: Path_, name: str, unrelated: str, v: int) -> None:
    packet = UNRELATED[unrelated](v)
    assert path.run(name, packet) == (TC_ACT_UNSPEC, packet)


@both
@pytest.mark.parametrize("whose", ["empty", "another device's"])
def test_device_missing_in_the_cache_is_found(path: Path_, v: int, whose: str) -> None:
    """Its entry is read from the map `devices`."""
    other = DEVICE.pack(Role.POD, 0, DeviceFlag.LOCAL, bytes(6), bytes(16), bytes(16))
    number = 0 if whose == "empty" else 1 + CACHED_DEVICES
    path.cache(1, CACHED_DEVICE.pack(number, other))
    before = path.site.reasons()[Reason.NEW_FLOW]
    path.run("tc_ingress", tcp(client(v), vip(v, CLUSTER), flags="S"))
    path.set_loopback_role(Role.HOST)
    assert path.site.reasons()[Reason.NEW_FLOW] == before + 1


# ---- TCP's states --------------------------------------------------------------------------------


HANDSHAKE = "S <SA A"
LIVE = f"{HANDSHAKE} A+ <A"
ALIVE = {
    "the SYN-ACK was lost": "S <SA S",
    "forged SYN": f"{LIVE} S!",
    "forged FIN and SYN": f"{LIVE} FA! S!",
    "the client has closed, and its port is used again": f"{LIVE} FA S",
    "the backend has closed, and the client's port is used again": f"{LIVE} <FA S S",
    "forged RST and SYN": f"{LIVE} R! S!",
    "forged RST of the backend": f"{LIVE} <R!",
    "RST out of window": f"{LIVE} R",
}


@both
@pytest.mark.parametrize("story", ALIVE)
def test_connection_that_may_be_alive_keeps_its_entries(path: Path_, v: int, story: str) -> None:
    """Only the two ends know whether a SYN or a RST is genuine; until they react, nothing
    changes.
    """
    before = path.site.reasons()[Reason.NEW_FLOW]
    own, source = send_segments(path, v, ALIVE[story])
    assert source.startswith(end(NODE[v], 0)[:-1])
    for word in ("S", "A+") if "used again" in story else ("A+",):
        assert segment(path, v, own, word) == source, word
    segment(path, v, own, "<A", source)
    assert path.site.reasons()[Reason.NEW_FLOW] == before + 1
    assert states(path, own) <= {TcpState.ESTABLISHED, TcpState.CLOSING}


PROVEN, UNPROVEN = TcpState.ESTABLISHED, TcpState.UNPROVEN
STATES = {
    "S": TcpState.NEW,
    "S <A": TcpState.NEW,  # the backend has an older connection and sends a challenge ACK
    "S <SA": TcpState.ANSWERED,
    "S <RA": TcpState.CLOSED,
    "S <SA R": TcpState.CLOSED,
    # The client alone proves nothing, whether its segments are forged, damaged or genuine.
    "S <SA A! A+! FA! R!": TcpState.ANSWERED,
    "S <SA A!~": TcpState.ANSWERED,
    "S <SA A": UNPROVEN,
    "S <SA A~": UNPROVEN,
    "S <SA A A+ A+": UNPROVEN,
    # A backend that answered a SYN repeats its SYN-ACK or an ACK, whatever it receives.
    "S <SA S! <A": TcpState.ANSWERED,
    "S <SA A! <A <SA <A": TcpState.ANSWERED,
    "S <SA A <A <SA A <A": UNPROVEN,
    # Proof: the backend sends data, or acknowledges some.
    "S <SA A <A+": PROVEN,
    "S <SA A+ <A": PROVEN,
    "S <SA A+~ <A": UNPROVEN,
    # FIN and RST count if their sequence numbers are plausible.
    **{f"{LIVE} {forged}": PROVEN for forged in (
        "FA!", "<FA!", "R!", "<R!", "RA!", "<RA!", "S!", "SA!", "<SA!", "FA!~", "R!~", "A!", "A+!",
        "A+! R!", "R! <R! FA! <FA!",
    )},
    f"{LIVE} FA": TcpState.CLOSING,
    f"{LIVE} <FA": TcpState.CLOSING,
    f"{LIVE} FA <A <A+": TcpState.CLOSING,
    f"{LIVE} FA S! <A": TcpState.CLOSING,
    f"{LIVE} FA <FA": TcpState.CLOSED,
    f"{LIVE} FA <FA R! <R! A": TcpState.CLOSED,
    f"{LIVE} R": TcpState.CLOSED,
    f"{LIVE} <R": TcpState.CLOSED,
    f"{LIVE} <RA": TcpState.CLOSED,
    f"{LIVE} A+ RA": TcpState.CLOSED,  # data was still unacknowledged
    f"{HANDSHAKE} FA <FA": TcpState.CLOSED,
    # The client uses the port again; we do not know whether its old connection is gone.
    f"{LIVE} R S": TcpState.NEW,
}  # fmt: skip
"""Segments of a connection → the state of all its entries."""


@both
@pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])
@pytest.mark.parametrize("script", STATES)
def test_tcp_state_after_segments(path: Path_, v: int, which: int, script: str) -> None:
    own, _ = send_segments(path, v, script, which=which)
    assert states(path, own) == {STATES[script]}


@both
def test_syn_after_both_fins_begins_a_new_flow(path: Path_, v: int) -> None:
    """The client uses its port again. Late packets of the old connection do not end the new one."""
    own, source = established(path, v, "tcp")
    send_segments(path, v, "FA <FA", own, source)
    before = path.site.reasons()[Reason.NEW_FLOW]
    again = segment(path, v, own, "S")
    assert path.site.reasons()[Reason.NEW_FLOW] == before + 1, "a new backend is chosen"
    assert segment(path, v, own, "S") == again, "the SYN is repeated"
    assert path.site.reasons()[Reason.NEW_FLOW] == before + 1
    send_segments(path, v, "<SA A+ <A", own, again)
    if again != source:
        path.run("tc_ingress", tcp(pod(v), source, flags="RA"))
    question = {own, vip(v, CLUSTER)}
    entries = path.site.entries("flows").items()
    (raw,) = [raw for key, raw in entries if set(ends(key)) == question]
    assert FLOW.unpack(raw)[9] == TcpState.ESTABLISHED


@both
@pytest.mark.parametrize("closed", [True, False])
def test_closed_flow_of_a_deleted_service_is_forgotten(path: Path_, v: int, closed: bool) -> None:
    """The node itself now answers at the address, and the client uses the same port."""
    own, source = established(path, v, "tcp")
    if closed:
        send_segments(path, v, "FA <FA", own, source)
    key = pack_target(parse_addr(f"{NET[v]}{CLUSTER}"), 80, 6)
    with path.site.pinned("services") as frontends:
        value = frontends.lookup(key)
        assert value is not None
        frontends.delete(key)
        try:
            for flags in ("S", "A"):
                packet = tcp(own, vip(v, CLUSTER), flags=flags)
                assert (path.run("tc_ingress", packet)[1] == packet) == closed, flags
        finally:
            frontends.update(key, value)
    assert (entries_of(path, own) == []) == closed


@both
@pytest.mark.parametrize(
    ("script", "gives"), [("S", True), ("S <SA", True), ("S <SA A", False), ("S <SA A <A", False)]
)
def test_handshake_gives_up_its_port_when_none_is_free(
    path: Path_, v: int, script: str, gives: bool
) -> None:
    """The range has one port, as if a flood had taken all others. A handshake gives its port to a
    new client; one that has acknowledged the backend's number keeps it for 5 s.
    """
    only_port = next(SPARE_PORTS)
    path.node(NodeFlag(0), only_port, only_port)
    own, _ = send_segments(path, v, script)
    age(path, own, -60)  # so that it stays young, however long this test takes
    syn = tcp(client(v), vip(v, CLUSTER), flags="S")
    assert path.run("tc_ingress", syn)[0] == (TC_ACT_UNSPEC if gives else TC_ACT_SHOT)
    assert (entries_of(path, own) == []) == gives
    age(path, own, 66)
    assert path.run("tc_ingress", syn)[0] == TC_ACT_UNSPEC, "after 5 s any client gets it"


LOST = {
    "replies to the node": lambda path, v, own, source: (source, pod(v)),
    "packets in the stack": lambda path, v, own, source: (own, pod(v)),
}
"""Which entry of a masqueraded flow is missing."""


def delete_entry(path: Path_, own: str, these: tuple[str, str]) -> None:
    """Deletes the entry of this client's flow between these ends."""
    with path.site.pinned("flows") as flows:
        gone = [key for key, raw in flows.items()
                if owner(raw) == own and set(ends(key)) == set(these)]  # fmt: skip
        assert [flows.delete(key) for key in gone] == [True]


@both
@pytest.mark.parametrize("missing", LOST)
@pytest.mark.parametrize("script", ["S", "S <SA", f"{LIVE} R", f"{LIVE} FA"])
def test_syn_of_a_flow_with_a_missing_entry_begins_again(
    path: Path_, v: int, script: str, missing: str
) -> None:
    """Whatever deleted an entry (another CPU, an agent), the client must not wait for ever."""
    own, source = send_segments(path, v, script)
    delete_entry(path, own, LOST[missing](path, v, own, source))
    before = path.site.reasons()[Reason.NEW_FLOW]
    TALKS.pop(own)
    own, source = send_segments(path, v, LIVE, own)
    assert source.startswith(end(NODE[v], 0)[:-1])
    assert path.site.reasons()[Reason.NEW_FLOW] == before + 1
    assert states(path, own) == {TcpState.ESTABLISHED}


@both
@pytest.mark.parametrize("missing", LOST)
@pytest.mark.parametrize(("seconds", "again"), [(-60, False), (2, True)])
def test_datagram_of_a_flow_with_a_missing_entry_begins_again(
    path: Path_, v: int, seconds: int, again: bool, missing: str
) -> None:
    """Not every datagram checks for them, because some clients send forever without a reply."""
    own = client(v)
    question = udp(own, vip(v, CLUSTER), b"?")
    source = masked(path, path.run("tc_ingress", question)[1],
                    lambda a, b: udp(a, b, b"?"), pod(v), v)  # fmt: skip
    delete_entry(path, own, LOST[missing](path, v, own, source))
    age(path, own, seconds)
    before = path.site.reasons()[Reason.NEW_FLOW]
    _, inside = path.run("tc_ingress", question)
    assert parse(inside, l2=False).destination == pod(v)
    assert path.site.reasons()[Reason.NEW_FLOW] == before + again


@both
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_policy_local_drops_only_clients_from_outside(path: Path_, v: int, kind: str) -> None:
    """No endpoint is on this node: outside clients get no reply, pods of this node are served."""
    build, front = KINDS[kind], vip(v, REMOTE)
    verdict, _ = path.run("tc_ingress", build(client(v), front))
    assert verdict == TC_ACT_SHOT
    path.set_loopback_role(Role.POD)
    own = client(v)
    path.go("tc_ingress", build(own, front), build(own, pod(v)))


@both
@pytest.mark.parametrize("lives", [True, False])
def test_datagram_of_a_deleted_backend_begins_a_new_flow(path: Path_, v: int, lives: bool) -> None:
    """A client may send forever from one port, while another pod may have the address by now."""
    own, front, back = client(v), vip(v, LOCAL), pod(v)
    question = udp(own, front, b"?")
    path.go("tc_ingress", question, udp(own, back, b"?"))
    path.go("tc_egress", udp(back, own, b"!"), udp(front, own, b"!"))
    (backend,) = backends_of(path, own)
    with path.site.pinned("flows") as flows:
        for key, raw in list(flows.items()):
            if owner(raw) == own and not lives:
                had = FLOW.unpack(raw)
                flows.update(key, FLOW.pack(*had[:8], 0xFFFF_FFFF, *had[9:]))
    before = path.site.reasons()[Reason.NEW_FLOW]
    path.go("tc_ingress", question, udp(own, back, b"?"))
    assert path.site.reasons()[Reason.NEW_FLOW] == before + (not lives)
    assert backends_of(path, own) == {backend}


# ---- ports of the node ---------------------------------------------------------------------------


def fill_ports(path: Path_, v: int, ports: Iterable[int], **fields: object) -> None:
    """Adds established connections to the pod that hold these node ports."""
    now = time.monotonic_ns()
    backend, node = (pack_target(parse_addr(host), port, 6)
                     for host, port in ((POD[v], 8080), (NODE[v], 0)))  # fmt: skip
    other = pack_target(parse_addr(ROUTER[v]), 9, 6)
    with path.site.pinned("flows") as flows:
        for port in ports:
            number = port.to_bytes(2, "big")
            value = FLOW.pack(
                fields.get("used", now), other, backend, backend, node[:16], number, number, 0, 0,
                fields.get("state", TcpState.ESTABLISHED), 0, 0, 2, 0, 0, bytes(48),
            )  # fmt: skip
            flows.update(flow_key(backend, node[:16] + number + node[18:]), value)


def new_flow_port(path: Path_, v: int, own: str) -> int:
    """The node port that a SYN of this client gets; 0: none."""
    verdict, inside = path.run("tc_ingress", tcp(own, vip(v, CLUSTER), flags="S"))
    if verdict == TC_ACT_SHOT:
        return 0
    return port_of(parse(path.run("tc_egress", inside)[1], l2=False).source)


def established_port(path: Path_, v: int, host: str) -> int:
    """The same for a connection that keeps its port."""
    port = new_flow_port(path, v, end(host, next(PORTS)))
    fill_ports(path, v, [port])
    return port


@contextlib.contextmanager
def no_flows(path: Path_) -> Iterator[None]:
    """Deletes all flows before and after."""
    path.delete_flows()
    try:
        yield
    finally:
        path.delete_flows()
        with path.site.pinned("port_slots") as slots:
            for key, _ in list(slots.items()):
                slots.update(key, bytes(PORT_SLOT.size))


NEIGHBOURS = {4: [CLIENT[4]], 6: [f"2001:db8:9::{n:x}" for n in range(1, 100)]}
"""Clients that have one common share of the ports: IPv6 clients of one network."""


@both
def test_client_is_limited_to_its_share_of_ports(path: Path_, v: int) -> None:
    """All addresses of an IPv6 network have one common share. Another client still gets most of
    its share.
    """
    low, high = 40_000, 41_023
    path.node(NodeFlag(0), low, high)
    mine = set(ports_of(CLIENT[v], low, high))
    assert len(mine) == 256
    with no_flows(path):
        hosts = itertools.cycle(NEIGHBOURS[v])
        given = {established_port(path, v, next(hosts)) for _ in range(256)}
        assert given == mine, "the whole share"
        before = path.site.reasons()[Reason.NO_SNAT_PORT]
        assert {new_flow_port(path, v, end(next(hosts), next(PORTS))) for _ in range(9)} == {0}
        assert path.site.reasons()[Reason.NO_SNAT_PORT] == before + 9
        others = set(ports_of(ROUTER[v], low, high))
        assert 140 < len(others - mine) < 240, "about three quarters are no one else's"
        given = {established_port(path, v, ROUTER[v]) for _ in range(128)}
        assert len(given) == 128
        assert given <= others - mine


REUSABLE = {
    "free": None,
    "closed": {"state": TcpState.CLOSED},
    "a handshake of two seconds": {"state": TcpState.ANSWERED, "age": 2},
    "unproven": {"state": TcpState.UNPROVEN, "age": 6},
    "half closed and idle": {"state": TcpState.CLOSING, "age": 11},
}


@both
def test_port_search_ends_in_the_largest_range(path: Path_, v: int) -> None:
    """The kernel ends a chain of tail calls at 33; the search must end before."""
    low, high = 1024, 65_535
    path.node(NodeFlag(0), low, high)
    with no_flows(path):
        fill_ports(path, v, ports_of(CLIENT[v], low, high), state=TcpState.ANSWERED,
                   used=time.monotonic_ns() + 60 * 10**9)  # fmt: skip
        before = path.site.reasons()[Reason.NO_SNAT_PORT]
        assert new_flow_port(path, v, client(v)) != 0
        assert path.site.reasons()[Reason.NO_SNAT_PORT] == before


@both
def test_last_free_or_reusable_port_is_found(path: Path_, v: int) -> None:
    """Any of a client's 7,244 ports is found, and so are ports that connections give up."""
    low, high = Config().masquerade_ports
    path.node(NodeFlag(0), low, high)
    mine = ports_of(CLIENT[v], low, high)
    assert len(mine) == 7244
    with no_flows(path):
        fill_ports(path, v, mine)
        for number, (kind, fields) in enumerate(REUSABLE.items()):
            port = mine[number * 1400]
            if fields is None:
                delete_entry(path, end(ROUTER[v], 9), (end(NODE[v], port), pod(v)))
            else:
                used = time.monotonic_ns() - int(fields.get("age", 0)) * 10**9
                fill_ports(path, v, [port], **{"used": max(used, 0), **fields})
            assert new_flow_port(path, v, client(v)) == port, kind
            fill_ports(path, v, [port])
        for fields in ({"state": TcpState.UNPROVEN}, {"state": TcpState.CLOSING}):
            later = time.monotonic_ns() + 60 * 10**9  # stays young, however long this takes
            fill_ports(path, v, [mine[99]], used=later, **fields)
            assert new_flow_port(path, v, client(v)) == 0, "too young to be given up"
        delete_entry(path, end(ROUTER[v], 9), (end(NODE[v], mine[3000]), pod(v)))
        found = [new_flow_port(path, v, client(v)) for _ in range(3)]
        with path.site.pinned("port_slots") as slots:
            (key,) = [key for key, raw in slots.items() if PORT_SLOT.unpack(raw)[1]]
            slots.update(key, bytes(PORT_SLOT.size))
        if not any(found):  # a search without success is not repeated for 0.1 s
            assert new_flow_port(path, v, client(v)) == mine[3000]


@both
def test_first_fragments_alone_hold_no_port(path: Path_, v: int) -> None:
    """The kernel would wait for the other fragments before it stored anything. They get no reply,
    so any other client gets their port, however many come and however long they are.
    """
    only_port = next(SPARE_PORTS)
    path.node(NodeFlag(0), only_port, only_port)
    own = client(v)
    for _ in range(3):
        number = next(PORTS)
        whole = udp(own, vip(v, CLUSTER), os.urandom(2000), **_id(v, number))
        first = fragments(whole, 1280, id=number)[0]
        path.run("tc_egress", path.run("tc_ingress", first)[1])
        age(path, own, 3)
    assert states(path, own) == {TcpState.NEW}
    other = client(v)
    path.run("tc_ingress", udp(other, vip(v, CLUSTER), b"?"))
    assert entries_of(path, own) == []
    assert len(entries_of(path, other)) == 3


@both
def test_port_slot_held_by_another_cpu_is_left_alone(path: Path_, v: int) -> None:
    only_port = next(SPARE_PORTS)
    path.node(NodeFlag(0), only_port, only_port)
    own, source = established(path, v, "tcp")
    close(path, v, own, source)
    with path.site.pinned("port_slots") as slots:
        for holders, given in ((1, 0), (0, only_port)):
            for key, _ in list(slots.items()):
                slots.update(key, PORT_SLOT.pack(holders, 0))
            assert new_flow_port(path, v, client(v)) == given
        assert {PORT_SLOT.unpack(raw)[0] for _, raw in slots.items()} == {0}, "no CPU holds one"


@both
def test_recently_active_client_keeps_its_port(path: Path_, v: int) -> None:
    """The entry for its replies may show an older time."""
    only_port = next(SPARE_PORTS)
    path.node(NodeFlag(0), only_port, only_port)
    own, _ = send_segments(path, v, "S <SA A")
    age(path, own, -60)
    with path.site.pinned("flows") as flows:
        for key, raw in list(flows.items()):
            if owner(raw) == own and raw[DIRECTION] == FlowDirection.SNAT_REPLY:
                old = struct.pack("=Q", time.monotonic_ns() - 3 * 10**9)
                flows.update(key, old + raw[8:STATE] + bytes([TcpState.NEW]) + raw[STATE + 1 :])
    assert new_flow_port(path, v, client(v)) == 0
    assert len(entries_of(path, own)) == 3


@both
def test_replies_seen_at_egress_only_end_the_flow(path: Path_, v: int) -> None:
    """Another program left the source of the client's packets as it was, so the backend's packets
    go to the client and are seen at egress only.
    """
    own, talk = client(v), Talk()
    for word in f"{LIVE} FA <FA A".split():
        back = word.startswith("<")
        packet = talk.segment(word, *((pod(v), own) if back else (own, vip(v, CLUSTER))))
        path.run("tc_egress" if back else "tc_ingress", packet)
    question = {own, vip(v, CLUSTER)}
    found = {raw[STATE] for key, raw in path.site.entries("flows").items()
             if set(ends(key)) == question}  # fmt: skip
    assert found == {TcpState.CLOSED}


@both
def test_sctp_association_is_established_by_cookie_ack(path: Path_, v: int) -> None:
    own = client(v)
    for kind, want in ((2, TcpState.ANSWERED), (6, TcpState.ANSWERED), (11, PROVEN)):
        path.run("tc_ingress", sctp(own, vip(v, LOCAL)))
        path.run("tc_egress", sctp(pod(v), own, packets.chunk(kind), tag=5))
        assert states(path, own) == {want}, kind


@both
def test_sctp_association_outlives_its_backend(path: Path_, v: int) -> None:
    """As a TCP connection does. Only an INIT begins one."""
    own = client(v)
    data = sctp(own, vip(v, CLUSTER), b"\0" * 8)
    assert path.run("tc_ingress", data) == (TC_ACT_UNSPEC, data)
    path.run("tc_ingress", sctp(own, vip(v, CLUSTER)))
    with path.site.pinned("backends") as backends:
        kept = list(backends.items())
        try:
            for key, _ in kept:
                backends.delete(key)
            _, got = path.run("tc_ingress", data)
            assert parse(got, l2=False).destination == pod(v)
        finally:
            for key, value in kept:
                backends.update(key, value)


@both
def test_fin_after_a_reset_closes_the_flow(path: Path_, v: int) -> None:
    own, source = established(path, v, "tcp")
    send_segments(path, v, "R <FA", own, source)
    assert states(path, own) == {TcpState.CLOSED}


@both
def test_icmp_error_does_not_count_as_an_answer(path: Path_, v: int) -> None:
    """A router that cannot deliver the SYN sent the error; the backend has not answered."""
    own = client(v)
    _, inside = path.run("tc_ingress", tcp(own, vip(v, CLUSTER), flags="S"))
    _, sent = path.run("tc_egress", inside)
    _, got = path.run("tc_ingress", icmp_error("host unreachable", ROUTER[v], sent))
    assert parse(got, l2=False).destination == CLIENT[v], "it goes to the client"
    assert states(path, own) == {TcpState.NEW}


TALKS: dict[str, Talk] = {}
"""By client."""


def segment(
    path: Path_, v: int, own: str, word: str, source: str = "", which: int = CLUSTER
) -> str:
    """Sends one segment of the client, or of the backend to `source`; returns its translated
    source.
    """
    back = word.startswith("<")
    ends = (pod(v), source) if back else (own, vip(v, which))
    packet = TALKS.setdefault(own, Talk()).segment(word, *ends)
    verdict, inside = path.run("tc_ingress", packet)
    assert verdict != TC_ACT_SHOT
    _, out = path.run("tc_egress", inside)
    found = parse(out, l2=False)
    assert found.destination == (own if back else pod(v))
    return found.source


def send_segments(
    path: Path_, v: int, script: str, own: str = "", source: str = "", which: int = CLUSTER
) -> tuple[str, str]:
    """Sends these segments of one connection; returns the client and the source the
    backend sees.
    """
    own = own or client(v)
    for word in script.split():
        seen = segment(path, v, own, word, source, which)
        source = source or seen
    return own, source


CLOSES = {
    "both close, the client first": ("FA", "<FA", "A"),
    "both close, the backend first": ("<FA", "FA", "<A"),
    "the client resets": ("R",),
    "the backend resets": ("<RA",),
}


LIVES = {"nothing": ("A",), "one side closes": ("A", "FA")}


@both
@pytest.mark.parametrize("way", [*LIVES, *CLOSES])
def test_port_of_an_ended_connection_is_reused(path: Path_, v: int, way: str) -> None:
    """The range has one port. That of an ended connection is reused, and before other ports are
    tried unless the backend closed first: then it still has the port in TIME_WAIT.
    """
    only_port = next(SPARE_PORTS)
    path.node(NodeFlag(0), only_port, only_port)
    own, source = established(path, v, "tcp")
    assert source == end(NODE[v], only_port)
    send_segments(path, v, " ".join({**LIVES, **CLOSES}[way]), own, source)
    first = {FinFlag(FLOW.unpack(raw)[10]) & FinFlag.BACKEND_FIRST for raw in entries_of(path, own)}
    before, other = path.site.reasons()[Reason.NO_SNAT_PORT], client(v)
    retval, _ = path.run("tc_ingress", tcp(other, vip(v, CLUSTER), flags="S"))
    assert (retval == TC_ACT_SHOT) == (way not in CLOSES)
    assert path.site.reasons()[Reason.NO_SNAT_PORT] - before == (way not in CLOSES)
    assert first == {FinFlag.BACKEND_FIRST if "backend first" in way else FinFlag(0)}
    left = set() if way in CLOSES else {own}
    assert {owner(raw) for raw in entries_of(path, own)} == left, "all old entries are deleted"


@both
@pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])
def test_same_client_and_backend_reuse_their_entries(path: Path_, v: int, which: int) -> None:
    """From the same port, after both have closed: the backend sees the same ports as before, as it
    would without a load balancer. The entries are reused and count as a new flow.
    """
    own, source = established(path, v, "tcp", which)
    close(path, v, own, source, which)
    before, there = path.site.reasons()[Reason.NEW_FLOW], len(entries_of(path, own))
    assert open_again(path, v, own, which) == source
    assert path.site.reasons()[Reason.NEW_FLOW] == before + 1
    assert states(path, own) == {TcpState.NEW}
    assert len(entries_of(path, own)) == there
    assert {FLOW.unpack(raw)[10] for raw in entries_of(path, own)} == {0}, "no side has closed"


@both
def test_port_outside_a_changed_range_is_not_reused(path: Path_, v: int) -> None:
    """After a change of the range, sockets of the node may use ports of the old one."""
    only_port, other = next(SPARE_PORTS), next(SPARE_PORTS)
    path.node(NodeFlag(0), only_port, only_port)
    own, source = established(path, v, "tcp")
    close(path, v, own, source)
    path.node(NodeFlag(0), other, other)
    assert open_again(path, v, own) == end(NODE[v], other)
    assert len(entries_of(path, own)) == 3, "all old entries are deleted"


def close(path: Path_, v: int, own: str, source: str, which: int = CLUSTER) -> None:
    """Both sides close, the client first."""
    for word in ("FA", "<FA"):
        segment(path, v, own, word, source, which)
    assert states(path, own) == {TcpState.CLOSED}


def open_again(path: Path_, v: int, own: str, which: int = CLUSTER) -> str:
    """The source that the backend sees in this client's SYN."""
    _, inside = path.run("tc_ingress", tcp(own, vip(v, which), flags="S"))
    _, out = path.run("tc_egress", inside)
    assert parse(out, l2=False).destination == pod(v)
    return parse(out, l2=False).source


@both
@pytest.mark.parametrize("way", CLOSES)
def test_end_of_a_connection_closes_all_its_entries(path: Path_, v: int, way: str) -> None:
    """Otherwise its SNAT port would be held for an hour, or for a day."""
    own, source = send_segments(path, v, LIVE)
    assert states(path, own) == {TcpState.ESTABLISHED}
    send_segments(path, v, " ".join(CLOSES[way]), own, source)
    assert states(path, own) == {TcpState.CLOSED}


@both
@pytest.mark.parametrize("last", ["FA", "<FA"], ids=["client", "backend"])
def test_first_fin_marks_all_entries_as_closing(path: Path_, v: int, last: str) -> None:
    own, _ = send_segments(path, v, f"S <SA {last}")
    assert states(path, own) == {TcpState.CLOSING}


@both
@pytest.mark.parametrize("last", ["client", "backend"])
def test_simultaneous_fins_close_the_flow(path: Path_, v: int, last: str) -> None:
    """Two CPUs each saw one FIN; the next ACK of either side closes the entries."""
    own, source = established(path, v, "tcp")
    with path.site.pinned("flows") as flows:
        for key, raw in list(flows.items()):
            if raw in entries_of(path, own):
                ends = bytes((TcpState.CLOSING, FinFlag.CLIENT | FinFlag.BACKEND))
                flows.update(key, raw[:STATE] + ends + raw[STATE + 2 :])
    segment(path, v, own, "<A" if last == "backend" else "A", source)
    assert states(path, own) == {TcpState.CLOSED}


@both
def test_connection_with_policy_local_is_closed(path: Path_, v: int) -> None:
    """It has no SNAT port, and its packets pass egress unchanged."""
    own = client(v)
    for word in f"{LIVE} <FA FA".split():
        segment(path, v, own, word, own, LOCAL)
    assert states(path, own) == {TcpState.CLOSED}


QUIET = {
    "question": lambda v, found: vip(v, CLUSTER) in found,
    "answer": lambda v, found: any(one.startswith(end(NODE[v], 0)[:-1]) for one in found),
}


@both
@pytest.mark.parametrize("quiet", QUIET)
def test_flow_lives_while_either_side_sends(path: Path_, v: int, quiet: str) -> None:
    """Datagrams in one direction for a long time do not refresh the entry of the other
    direction.
    """
    own = client(v)
    source = masked(path, path.run("tc_ingress", udp(own, vip(v, CLUSTER), b"?"))[1],
                    lambda a, b: udp(a, b, b"?"), pod(v), v)  # fmt: skip
    with path.site.pinned("flows") as found:
        for key, raw in list(found.items()):
            if owner(raw) == own and QUIET[quiet](v, ends(key)):
                found.update(key, bytes(8) + raw[8:])
    inside = path.go("tc_ingress", udp(pod(v), source, b"!"), udp(pod(v), own, b"!"))
    path.go("tc_egress", inside, udp(vip(v, CLUSTER), own, b"!"))
    _, inside = path.run("tc_ingress", udp(own, vip(v, CLUSTER), b"?"))
    assert parse(path.run("tc_egress", inside)[1], l2=False).source == source, "the same flow"


@both
def test_replies_to_the_node_keep_a_flow_alive(path: Path_, v: int) -> None:
    """With redirected packets they are all that is seen of a backend that keeps sending."""
    own = client(v)
    source = masked(path, path.run("tc_ingress", udp(own, vip(v, CLUSTER), b"?"))[1],
                    lambda a, b: udp(a, b, b"?"), pod(v), v)  # fmt: skip
    with path.site.pinned("flows") as found:
        for key, raw in list(found.items()):
            if owner(raw) == own and source not in ends(key):
                found.update(key, bytes(8) + raw[8:])
    before = path.site.reasons()[Reason.NEW_FLOW]
    path.run("tc_ingress", udp(own, vip(v, CLUSTER), b"?"))
    assert path.site.reasons()[Reason.NEW_FLOW] == before


@both
def test_repeated_syn_ack_does_not_end_the_flow(path: Path_, v: int) -> None:
    """The backend had not yet received the client's ACK and FIN."""
    own, source = established(path, v, "tcp")
    segment(path, v, own, "FA")
    for word in ("<SA", "<A"):
        assert segment(path, v, own, word, source) == vip(v, CLUSTER), word
    assert states(path, own) == {TcpState.CLOSING}
    assert len(entries_of(path, own)) == 3


@both
def test_packet_of_an_expired_flow_passes_untouched(path: Path_, v: int) -> None:
    own = client(v)
    source = masked(path, path.run("tc_ingress", udp(own, vip(v, CLUSTER), b"?"))[1],
                    lambda a, b: udp(a, b, b"?"), pod(v), v)  # fmt: skip
    with path.site.pinned("flows") as found:
        for key, raw in list(found.items()):
            if owner(raw) == own:
                found.update(key, bytes(8) + raw[8:])
    answer = udp(pod(v), source, b"!")
    assert path.run("tc_ingress", answer) == (TC_ACT_UNSPEC, answer)


def owner(raw: bytes) -> str:
    """The client of an entry's flow."""
    found = Target.unpack(FLOW.unpack(raw)[1])
    return end(format_addr(found.address), found.port)


def ends(key: bytes) -> tuple[str, str]:
    """Both addresses and ports of an entry's key."""
    one, other = (Target.unpack(half) for half in FLOW_KEY.unpack(key))
    return end(format_addr(one.address), one.port), end(format_addr(other.address), other.port)


def age(path: Path_, own: str, seconds: int) -> None:
    """Makes this client's flow look idle for `seconds`."""
    with path.site.pinned("flows") as flows:
        for key, raw in list(flows.items()):
            if owner(raw) == own:
                (used,) = struct.unpack_from("=Q", raw)
                flows.update(key, struct.pack("=Q", used - seconds * 10**9) + raw[8:])


def entries_of(path: Path_, own: str) -> list[bytes]:
    """The entries of this client's flow."""
    return [raw for raw in path.site.entries("flows").values() if owner(raw) == own]


def backends_of(path: Path_, own: str) -> set[int]:
    """The backends' ids in the entries of this client's flow."""
    return {FLOW.unpack(raw)[8] for raw in entries_of(path, own)}


def states(path: Path_, own: str) -> set[int]:
    """The states in the entries of this client's flow."""
    return {FLOW.unpack(raw)[9] for raw in entries_of(path, own)}


# ---- redirected past the stack -------------------------------------------------------------------

GATE = {4: "198.18.0.2", 6: "fd00:198:18::2"}
MTU = 1400


@pytest.fixture(scope="module")
def uplink(path: Path_) -> Iterator[Path_]:
    """Adds a device with addresses of the node and the default routes."""
    ip(
        "link add out address 02:00:00:00:00:01 type veth peer name gate",
        f"link set out mtu {MTU} up",
        "link set gate up",
        netns=path.where,
    )
    for v, bits in ((4, 24), (6, 64)):
        there = f"neigh add {GATE[v]} lladdr 02:00:00:00:00:02 dev out nud permanent"
        address = f"addr add {NODE[v]}/{bits} dev out" + (" nodad" if v == 6 else "")
        ip(address, there, f"route add default via {GATE[v]} dev out", netns=path.where)
    path.forward(True)
    index = path.inside(lambda: socket.if_nametoindex("out"))
    path.set_device(index, Role.HOST, DeviceFlag(0))
    path.out, path.out_mac = index, "02:00:00:00:00:01"
    yield path
    path.forward(False)
    with path.site.pinned("devices") as devices:
        devices.delete(U32.pack(index))
    path.cache(index, bytes(CACHED_DEVICE.size))
    ip("link del out", netns=path.where)


def expect_redirect(path: Path_, packet: bytes, want: bytes, name: str = "tc_ingress") -> None:
    """Expects the packet to be redirected to another device as `want`."""
    redirected = path.site.reasons()[Reason.REDIRECTED]
    retval, got = path.run(name, packet, complete=True)
    assert retval == TC_ACT_REDIRECT
    assert path.site.reasons()[Reason.REDIRECTED] == redirected + 1
    assert difference(got, want, l2=False) == ""
    assert [one for one in checksums(got, l2=False) if one not in QUOTED] == []


def expect_snat_redirect(
    path: Path_, packet: bytes, build: object, to: str, v: int, **ip_: object
) -> str:
    """masked() for a redirected packet, in one step."""
    _, got = path.run("tc_ingress", packet)
    source = parse(got, l2=False).source
    host, _, port = source.rpartition(":")
    assert host.strip("[]") == NODE[v]
    assert LOW <= int(port) <= HIGH
    expect_redirect(path, packet, build(source, to, **ip_))
    return source


@both
@pytest.mark.parametrize("kind", [*KINDS, "sctp"])
def test_packet_to_another_node_is_redirected(uplink: Path_, v: int, kind: str) -> None:
    build = {**KINDS, "sctp": sctp}[kind]
    answer = {**BACK, "sctp": sctp}[kind[:3] if kind != "sctp" else kind]
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    source = expect_snat_redirect(
        uplink, build(own, front, ttl=9, tos=4), build, back, v, ttl=8, tos=4
    )
    expect_redirect(uplink, answer(back, source, ttl=9), answer(front, own, ttl=8))
    # What we redirected must not start a new flow when it leaves by the device.
    sent = build(source, back)
    assert uplink.run("tc_egress", sent) == (TC_ACT_UNSPEC, sent)
    came = answer(front, own)
    assert uplink.run("tc_egress", came) == (TC_ACT_UNSPEC, came)


VLAN_VALID = 1 << 4
"""From struct tpacket_auxdata: the frame came with a VLAN tag, which the kernel removed."""


@pytest.fixture
def tagged(uplink: Path_) -> Iterator[Path_]:
    """Adds a device that receives tagged frames, with tc_ingress attached."""
    ip(
        "link add in address 02:00:00:00:00:05 type veth peer name switch",
        "link set in up",
        "link set switch up",
        netns=uplink.where,
    )
    index = uplink.inside(lambda: socket.if_nametoindex("in"))
    inside = ("nsenter", f"--net=/run/netns/{uplink.where}")  # `ip netns exec` hides the pins
    pin = str(uplink.folder / "tc_ingress")
    command(*inside, "tc", "qdisc", "add", "dev", "in", "clsact")
    command(*inside, *["tc", "filter", "add", "dev", "in", "ingress", "bpf", "da", "pinned"], pin)
    uplink.set_device(index, Role.HOST, DeviceFlag(0))
    yield uplink
    with uplink.site.pinned("devices") as devices:
        devices.delete(U32.pack(index))
    uplink.cache(index, bytes(CACHED_DEVICE.size))
    ip("link del in", netns=uplink.where)


def raw_socket(device: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    made.bind((device, 0))
    made.setsockopt(263, 8, 1)  # SOL_PACKET, PACKET_AUXDATA
    made.settimeout(10)
    return made


@both
def test_priority_tag_is_not_forwarded(tagged: Path_, v: int) -> None:
    """802.1Q with VLAN 0, as some switches and clouds send it."""
    own, back = client(v), pod(v)
    data = os.urandom(32)
    sent = frame(udp(own, vip(v, CLUSTER), data), to="02:00:00:00:00:05")
    sent = sent[:12] + struct.pack("!HH", 0x8100, 5 << 13) + sent[12:]
    switch, gate = (tagged.inside(lambda: raw_socket(name)) for name in ("switch", "gate"))  # noqa: B023
    with switch, gate:
        switch.send(sent)
        while True:
            got, control, _, _ = gate.recvmsg(2048, 256)
            if data in got:
                break
    assert parse(got[14:], l2=False).destination == back
    ((_, _, told),) = control
    assert not struct.unpack_from("=I", told)[0] & VLAN_VALID


TORN = {
    "another device": ("ifindex", 30_000),
    "another gateway": ("next", bytes(12) + b"\xcb\0\x71\x09"),
    "another MAC address": ("next_mac", b"\2\0\0\0\0\x77"),
    "a larger MTU": ("length", 9_000),
}
"""Fields of a next hop that a program may read half-written, while another CPU replaces it."""
HOP = ("found", "check", "next", "ifindex", "own_mac", "next_mac", "length", "resolved", "family",
       "unsaid")  # fmt: skip


@both
@pytest.mark.parametrize(("name", "value"), TORN.values(), ids=TORN)
def test_torn_next_hop_is_not_used(uplink: Path_, v: int, name: str, value: object) -> None:
    """The program asks the kernel again and stores the answer."""
    own, front = client(v), vip(v, CLUSTER)
    uplink.run("tc_ingress", udp(own, front))
    with uplink.site.pinned("flows") as flows:
        key, raw = next(
            (key, raw)
            for key, raw in flows.items()
            if owner(raw) == own and hop_of(raw)["ifindex"] == uplink.out
        )
        torn = {**hop_of(raw), name: value}
        flows.update(key, raw[: -NEXT_HOP.size] + NEXT_HOP.pack(*torn.values()))
    assert uplink.run("tc_ingress", udp(own, front))[0] == TC_ACT_REDIRECT
    after = hop_of(uplink.site.entries("flows")[key])
    assert after[name] == hop_of(raw)[name] != value


def check_of(hop: dict[str, Any]) -> int:
    """As check_of_next_hop() in hop.h computes it."""
    check = hop["found"]
    raw = hop["next"] + U32.pack(hop["ifindex"]) + hop["own_mac"] + hop["next_mac"]
    flags = hop["length"] | hop["resolved"] << 16 | hop["family"] << 24
    for word in (*struct.unpack("=8I", raw), flags):
        check = (check + word) * 0x9E3779B1 & 0xFFFFFFFF
    return check


def hop_of(raw: bytes) -> dict[str, Any]:
    return dict(zip(HOP, NEXT_HOP.unpack(raw[-NEXT_HOP.size :]), strict=True))


class NotRedirected(NamedTuple):
    """A packet that goes up the stack although others are redirected."""

    name: str
    which: int = CLUSTER
    role: Role = Role.HOST
    ttl: int = 64
    size: int = 10
    forwards: bool = True


NOT_REDIRECTED = [
    NotRedirected("Local policy", which=LOCAL),
    NotRedirected("a ClusterIP that is not masqueraded", which=IP),
    NotRedirected("from a pod", role=Role.POD),
    NotRedirected("TTL 1", ttl=1),
    NotRedirected("longer than the MTU", size=MTU),
    NotRedirected("a node that does not forward", forwards=False),
]


@both
@pytest.mark.parametrize("row", NOT_REDIRECTED, ids=lambda row: row.name)
def test_packet_that_the_stack_must_see_is_not_redirected(
    uplink: Path_, v: int, row: NotRedirected
) -> None:
    uplink.set_loopback_role(row.role)
    own, front, back = client(v), vip(v, row.which), pod(v)
    data = os.urandom(row.size)
    uplink.forward(row.forwards)
    try:
        uplink.go("tc_ingress", udp(own, front, data, ttl=row.ttl),
                   udp(own, back, data, ttl=row.ttl))  # fmt: skip
    finally:
        uplink.forward(True)


@both
def test_packet_of_exactly_the_mtu_is_redirected(uplink: Path_, v: int) -> None:
    data = os.urandom(MTU - (28 if v == 4 else 48))
    expect_snat_redirect(uplink, udp(client(v), vip(v, CLUSTER), data),
                 lambda a, b: udp(a, b, data, ttl=63), pod(v), v)  # fmt: skip


@both
def test_snat_source_is_an_address_of_the_outgoing_device(uplink: Path_, v: int) -> None:
    """As with MASQUERADE. With an overlay, replies then come back through the overlay."""
    overlay = {4: "10.244.9.0", 6: "fd00:10:244:9::"}
    uplink.set_device(uplink.out, Role.HOST, DeviceFlag(0), (overlay[4], overlay[6]))
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    try:
        _, got = uplink.run("tc_ingress", udp(own, front, b"?"))
        source = parse(got, l2=False).source
        expect_redirect(uplink, udp(own, front, b"?"), udp(source, back, b"?", ttl=63))
        expect_redirect(uplink, udp(back, source, b"!"), udp(front, own, b"!", ttl=63))
    finally:
        uplink.set_device(uplink.out, Role.HOST, DeviceFlag(0))
    assert source.rpartition(":")[0].strip("[]") == overlay[v]


@both
def test_oversized_packet_of_a_redirected_flow_goes_up_the_stack(uplink: Path_, v: int) -> None:
    """A packet longer than the MTU goes up the stack, which informs the sender; others do not."""
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    source = expect_snat_redirect(uplink, udp(own, front, b"?"),
                          lambda a, b: udp(a, b, b"?", ttl=63), back, v)  # fmt: skip
    data = os.urandom(MTU)
    inside = uplink.go("tc_ingress", udp(own, front, data), udp(own, back, data))
    uplink.go("tc_egress", inside, udp(source, back, data))
    inside = uplink.go("tc_ingress", udp(back, source, data), udp(back, own, data))
    uplink.go("tc_egress", inside, udp(front, own, data))
    expect_redirect(uplink, udp(own, front, b"?"), udp(source, back, b"?", ttl=63))


def age_next_hops(path: Path_, own: str, seconds: float) -> None:
    """Sets the age of the cached next hops of this client's flow."""
    found = (time.monotonic_ns() - round(seconds * 10**9)) >> 20
    with path.site.pinned("flows") as flows:
        for key, raw in list(flows.items()):
            if owner(raw) == own:
                hop = {**hop_of(raw), "found": found}
                hop["check"] = check_of(hop)
                flows.update(key, raw[: -NEXT_HOP.size] + NEXT_HOP.pack(*hop.values()))


CLOCK_GRANULARITY_S = 0.011
"""The programs' clock is that of the last tick (10 ms at 100 Hz), in units of 2^20 ns."""


@both
@pytest.mark.parametrize(
    ("found", "still"),
    [(-60, True), (1 + CLOCK_GRANULARITY_S, False)],
    ids=["now", "a second ago"],
)
def test_next_hop_is_cached_for_a_second(uplink: Path_, v: int, found: float, still: bool) -> None:
    """Not every packet asks the kernel's tables; a change takes effect within a second."""
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    source = expect_snat_redirect(uplink, udp(own, front, b"?"),
                          lambda a, b: udp(a, b, b"?", ttl=63), back, v)  # fmt: skip
    age_next_hops(uplink, own, found)
    uplink.forward(False)
    try:
        if still:
            expect_redirect(uplink, udp(own, front, b"?"), udp(source, back, b"?", ttl=63))
        else:
            uplink.go("tc_ingress", udp(own, front, b"?"), udp(own, back, b"?"))
    finally:
        uplink.forward(True)


@both
@pytest.mark.parametrize("first", [{"ttl": 1}, {"size": MTU}], ids=["ttl", "size"])
def test_later_packets_are_redirected_if_the_first_could_not_be(
    uplink: Path_, v: int, first: dict[str, int]
) -> None:
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    data, ttl = os.urandom(first.get("size", 1)), first.get("ttl", 64)
    inside = uplink.go("tc_ingress", udp(own, front, data, ttl=ttl), udp(own, back, data, ttl=ttl))
    source = masked(uplink, inside, lambda a, b: udp(a, b, data, ttl=ttl), back, v)
    expect_redirect(uplink, udp(own, front, b"?"), udp(source, back, b"?", ttl=63))


@both
@pytest.mark.parametrize("role", Role)
def test_mode_direct_redirects_packets_of_all_clients(uplink: Path_, v: int, role: Role) -> None:
    uplink.node(NodeFlag.DIRECT)
    uplink.set_loopback_role(role)
    own, front, back = client(v), vip(v, LOCAL), pod(v)
    expect_redirect(uplink, udp(own, front, b"?"), udp(own, back, b"?", ttl=63))
    expect_redirect(uplink, udp(back, own, b"!"), udp(front, own, b"!", ttl=63))
    expect_redirect(uplink, udp(own, front, b"??"), udp(own, back, b"??", ttl=63))


@both
def test_icmp_error_about_a_redirected_packet(uplink: Path_, v: int) -> None:
    """From a router behind the node: the client gets an error about the packet that it sent."""
    own, front, back = client(v), vip(v, CLUSTER), pod(v)
    source = expect_snat_redirect(uplink, udp(own, front, b"?"),
                          lambda a, b: udp(a, b, b"?", ttl=63), back, v)  # fmt: skip
    error = icmp_error("too big", ROUTER[v], udp(source, back, b"?"), mtu=1300)
    inside = uplink.run("tc_ingress", error)[1]
    assert parse(inside, l2=False).destination == CLIENT[v]
    _, out = uplink.run("tc_egress", inside)
    told = parse(out, l2=False)
    assert str(told.embedded) == str(parse(udp(own, front, b"?"), l2=False))
    assert [one for one in checksums(out, l2=False) if one not in QUOTED] == []


# ---- sockets of the node -------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", [*KINDS, "sctp"])
@pytest.mark.parametrize("which", [CLUSTER, LOCAL, IP], ids=["Cluster", "Local", "ClusterIP"])
def test_socket_of_the_node_is_translated_at_egress(
    uplink: Path_, v: int, kind: str, which: int
) -> None:
    """A packet that the hooks left alone is translated at egress; the reply goes to the socket."""
    build = {**KINDS, "sctp": sctp}[kind]
    answer = {**BACK, "sctp": sctp}[kind[:3] if kind != "sctp" else kind]
    own, front, back = end(NODE[v], next(PORTS)), vip(v, which), pod(v)
    for _ in range(2):
        expect_redirect(uplink, build(own, front), build(own, back), "tc_egress")
    sent = build(own, back)
    assert uplink.run("tc_egress", sent) == (TC_ACT_UNSPEC, sent), "on the other device"
    uplink.go("tc_ingress", answer(back, own), answer(front, own))


@both
def test_reply_to_a_node_socket_is_redirected_to_its_device(uplink: Path_, v: int) -> None:
    """The request left by loopback, so the reply must arrive there: rp_filter."""
    own, front, back = end(NODE[v], next(PORTS)), vip(v, CLUSTER), pod(v)
    expect_redirect(uplink, udp(own, front, b"?"), udp(own, back, b"?"), "tc_egress")
    answer, before = udp(back, own, b"!"), uplink.site.reasons()[Reason.REDIRECTED]
    retval, got = uplink.run("tc_ingress", answer, context=SkbContext(ifindex=uplink.out))
    assert retval == TC_ACT_REDIRECT
    assert uplink.site.reasons()[Reason.REDIRECTED] == before + 1
    assert difference(got, udp(front, own, b"!"), l2=False) == ""


@both
def test_socket_of_the_node_is_refused_at_egress(uplink: Path_, v: int) -> None:
    own, front = end(NODE[v], next(PORTS)), vip(v, NONE)
    retval, got = uplink.run("tc_egress", tcp(own, front, flags="S", seq=7))
    assert retval == TC_ACT_REDIRECT
    assert parse(got, l2=False).source == front
    assert "R" in parse(got, l2=False).flags


def syn_destination(path: Path_, v: int, to: str, port: int, is_agents: bool) -> str:
    """The destination of a node socket's SYN on the wire; the agent's programs are on the
    device.
    """
    family = socket.AF_INET if v == 4 else socket.AF_INET6
    host, number = to.rsplit(":", 1)
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    with wire, socket.socket(family) as sock, path.site.pinned("agent_sockets") as agents:
        wire.bind(("gate", 0))
        wire.settimeout(10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((NODE[v], port))
        sock.setblocking(False)
        cookie = sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8)
        if is_agents:
            agents.update(cookie, U32.pack(1))
        sock.connect_ex((host.strip("[]"), int(number)))
        try:
            while True:
                seen = parse(wire.recv(2000))
                if seen.source == end(NODE[v], port):
                    return str(seen.destination)
        finally:
            agents.delete(cookie)


@both
@pytest.mark.parametrize(
    ("which", "led"), [(IP, True), (CLUSTER, False)], ids=["ClusterIP", "LoadBalancer"]
)
def test_agent_socket_does_not_match_a_flow_of_another_socket(
    uplink: Path_, v: int, which: int, led: bool
) -> None:
    """A process of the node used the port through a Service that has the API server's address; then
    the agent's socket has the port. The agent's sockets are translated at ClusterIPs only.
    """
    own, front = next(PORTS), vip(v, which)

    def all_of_it() -> None:
        assert syn_destination(uplink, v, front, own, is_agents=False) == pod(v)
        want = pod(v) if led else front
        assert syn_destination(uplink, v, front, own, is_agents=True) == want

    uplink.inside(all_of_it)
    left = entries_of(uplink, end(NODE[v], own))
    assert bool(left) == led, "later packets do not match that flow, either"


@both
@needs("came_in_by")
def test_forwarded_packet_is_not_translated_at_egress(uplink: Path_, v: int) -> None:
    """It came in by another device and was handled there."""
    packet = udp(client(v), vip(v, CLUSTER), b"?")
    context = SkbContext(ingress_ifindex=uplink.out)
    assert uplink.run("tc_egress", packet, context=context) == (TC_ACT_UNSPEC, packet)


# ---- sizes of the programs -----------------------------------------------------------------------

INSTRUCTIONS, WALKED = 5000, 250_000
"""Limits for the length of a program, and for the instructions that the verifier walks through.
Linux allows 1,000,000 since 5.2; other kernels' verifiers walk through more, and other compilers
produce longer programs.
"""


def test_programs_are_within_the_length_limit(artifact_cache: Path) -> None:
    artifact, _ = compile.find_or_compile("tc", artifact_cache)
    found = {code.name: len(code.insns) // 8 for code in artifact.programs}
    assert found.keys() == {program.name for program in PACKET_PROGRAMS}
    assert {name: n for name, n in found.items() if n > INSTRUCTIONS} == {}


@needs("verified_insns")
def test_programs_are_within_the_verifier_limit(path: Path_) -> None:
    walked = {}
    for one in PACKET_PROGRAMS:
        with contextlib.closing(Program.open(path.folder / one.name)) as program:
            facts = Path(f"/proc/self/fdinfo/{program.fd}").read_text()
            walked[one.name] = int(facts.partition("verified_insns:")[2].split()[0])
    assert {name: n for name, n in walked.items() if n > WALKED} == {}


# ---- SNAT ports of conntrack ---------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", BACK)
def test_port_used_by_conntrack_is_not_given(
    path: Path_, v: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that a kube-proxy masquerades: we translate nothing of it, and its port is
    taken.
    """
    only_port = next(SPARE_PORTS)
    path.node(NodeFlag(0), only_port, only_port)
    node, back = end(NODE[v], only_port), pod(v)
    protocol = {"tcp": Protocol.TCP, "udp": Protocol.UDP}[kind]
    theirs = ConntrackFlow(protocol, parse_addr(NODE[v]), only_port, parse_addr(POD[v]), 8080)
    other = theirs._replace(source_port=only_port + 1)
    monkeypatch.setattr(conntrack, "list_masqueraded", lambda: [theirs, other])
    with path.site.pinned("flows") as flows, path.site.pinned("flow_queue") as order:
        assert snat_ports.reserve_conntrack_ports(flows, order, (only_port, only_port)) == 1
        assert snat_ports.reserve_conntrack_ports(flows, order, (only_port, only_port)) == 0
    before = path.site.reasons()[Reason.NO_SNAT_PORT]
    assert path.run("tc_ingress", KINDS[kind](client(v), vip(v, CLUSTER)))[0] == TC_ACT_SHOT
    assert path.site.reasons()[Reason.NO_SNAT_PORT] == before + 1
    for packet in (SENT[kind](node, back), BACK[kind](back, node), SENT[kind](back, node)):
        name = "tc_egress" if parse(packet, l2=False).source == node else "tc_ingress"
        assert path.run(name, packet) == (TC_ACT_UNSPEC, packet), name
    kept = [raw for raw in path.site.entries("flows").values() if is_port_reservation(raw)]
    assert [owner(raw) for raw in kept if owner(raw) == node] == [node]
    with path.site.pinned("flows") as flows:
        shown = tracked_connections.read(flows).values()
    assert node not in {owner(one.raw) for one in shown}


def test_starting_agent_reserves_conntracks_ports(
    path: Path_, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also ports that were given while its programs were being attached; later ones are
    not read.
    """
    ports = [next(SPARE_PORTS) for _ in range(host.PORT_RESERVATION_POLLS + 1)]
    backend = parse_addr(POD[4])
    given = [ConntrackFlow(Protocol.TCP, parse_addr(NODE[4]), one, backend, 8080) for one in ports]
    agent = host.HostIntegration(Pins(path.site.pins), Config(masquerade_ports=(50_000, 60_000)))
    for number in range(len(given)):
        told = given[: number + 1]
        monkeypatch.setattr(conntrack, "list_masqueraded", lambda told=told: told)
        path.inside(lambda: agent.poll(number * host.HOST_POLL_INTERVAL_S))  # noqa: B023
    held = {owner(raw) for raw in path.site.entries("flows").values() if is_port_reservation(raw)}
    assert [end(NODE[4], one) in held for one in ports] == [True] * host.PORT_RESERVATION_POLLS + [
        False
    ]


@both
def test_masqueraded_flows_are_published_to_conntrack(path: Path_, v: int) -> None:
    """Each masqueraded flow once, with the source the backend sees; no ended and no local flows."""
    path.delete_flows()
    own, source = established(path, v, "tcp")
    ended, gone = established(path, v, "tcp")
    send_segments(path, v, "FA <FA", ended, gone)
    established(path, v, "udp", LOCAL)
    with path.site.pinned("flows") as flows:
        path.inside(lambda: snat_ports.publish_our_ports(flows))
        told = list(snat_ports.masqueraded_connections(raw for _, raw in flows.items()))
        ours = ConntrackFlow(6, parse_addr(NODE[v]), port_of(source), parse_addr(POD[v]), 8080)
        assert told.count(ours) == 1
        assert path.inside(lambda: conntrack.reserve([ours], 60)) == 0, "it exists already"
        over = ours._replace(source_port=port_of(gone))
        assert path.inside(lambda: conntrack.release([over])) == 0, "it never existed"
        assert path.inside(lambda: conntrack.release([ours])) == 1
        snat_ports.delete_ended(flows)
    assert entries_of(path, ended) == []
    assert len(entries_of(path, own)) == 2, "none for packets in the stack, where none come"


def port_of(text: str) -> int:
    return int(text.rpartition(":")[2])
