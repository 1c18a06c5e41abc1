# SPDX-License-Identifier: Apache-2.0
"""The packet path with real sockets: clients outside the cluster, and pods without socket hooks.

Nodes, pods and the client are those of tests/support/lab/field.py; the rows are those of
tests/rows/outside.py.
"""

import contextlib
import random
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from kbpf.dataplane.bpf.inspect import devices
from kbpf.dataplane.bpf.maps.layout import Reason
from kbpf.dataplane.bpf.maps.pinning import Pins
from tests.rows.outside import ROWS, objects
from tests.support.cluster.kube_objects import slice_port
from tests.support.lab.dial import REFUSED, UNSERVED, Dial
from tests.support.lab.field import (
    NODES4,
    WAIT,
    WITH_CONNTRACK,
    Field,
    at,
    both_families,
    check,
    forward,
    may_see,
    split,
    there,
)
from tests.support.lab.lab import PATIENCE, Agent, Place, inside, ip, settled, until
from tests.support.lab.lab import run as command
from tests.support.lab.load import under_load
from tests.support.lab.offloads import offload
from tests.support.lab.prediction import check_prediction
from tests.support.packets.datagrams import BROADCAST
from tests.support.packets.judge import checksums
from tests.support.packets.packets import tcp, udp
from tests.support.packets.parse import Packet
from tests.support.packets.wire import Wire


@pytest.fixture(scope="module", params=WITH_CONNTRACK)
def field(request: pytest.FixtureRequest) -> Iterator[Field]:
    with Field(*forward(request.param)) as made:
        made.create(*objects(made))
        made.settle()
        yield made


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_dial(field: Field, row: Dial) -> None:
    check_prediction(field, row)
    check(field, row)


PORT_UNREACHABLE = {False: ("icmp", 3, 3), True: ("icmp6", 1, 4)}
NO_ROUTE = {False: ("icmp", 3, 1), True: ("icmp6", 1, 0)}


def refusal(field: Field, name: str, kind: str, protocol: str, v6: bool, repeat: bool = False) -> Packet:
    """The reply to a packet for port 81 of Service 11, which has no such port. `repeat`: the client
    dials until there is one.
    """
    client = field[name]
    device = field.lab.prefix if name == "outside" else "eth0"
    own, host = client.ip6 if v6 else client.ip, split(at(kind, 11, v6))[0]

    def is_reply(packet: Packet) -> bool:
        return packet.transport is not None and packet.ip.destination == own

    with Wire(client.netns, device, tap=True) as tap:

        def dial() -> Packet | None:
            client.many(1, host, 81, protocol=protocol, connected=True, timeout=WAIT)
            return tap.soon(is_reply, WAIT)

        if repeat:
            reply: Packet = until("there is a reply", dial)
            return reply
        return dial() or tap.expect(is_reply)


CLIENTS = pytest.mark.parametrize("name", ["outside", "a2!"])


@both_families
@CLIENTS
def test_an_unknown_port_is_refused_by_the_cluster_ip(field: Field, name: str, v6: bool) -> None:
    """The RST and the ICMP error come from the ClusterIP."""
    host = split(at("ClusterIP", 11, v6))[0]
    reset, error = (refusal(field, name, "ClusterIP", each, v6) for each in ("tcp", "udp"))
    assert reset.ip.source == error.ip.source == host
    assert set(reset.transport.flags) == set("RA")
    assert (error.protocol, error.transport.type, error.transport.code) == PORT_UNREACHABLE[v6]


@both_families
@CLIENTS
def test_an_unknown_port_is_refused_by_a_bpf_program(field: Field, name: str, v6: bool) -> None:
    """A BPF program refuses them and counts that. Its reply and the packet it quotes have correct
    checksums, whereas the kernel's stack quotes checksums that were left to a device.
    """
    before = field.agent.reasons()[Reason.UNKNOWN_PORT]
    for protocol in ("tcp", "udp"):
        assert checksums(refusal(field, name, "ClusterIP", protocol, v6)) == []
    assert field.agent.reasons()[Reason.UNKNOWN_PORT] - before == 2


@both_families
def test_a_frame_to_all_machines_is_neither_served_nor_refused(field: Field, v6: bool) -> None:
    """Each node would answer it. What the client sends to a node afterwards is refused."""
    outside = field["outside"]
    own = f"[{outside.ip6}]:4000" if v6 else f"{outside.ip}:4000"
    unknown = split(at("ClusterIP", 11, v6))[0]
    asked = [
        build(own, to)
        for build in (udp, lambda a, b: tcp(a, b, flags="S"))
        for to in (at("NodePort", 11, v6), f"[{unknown}]:81" if v6 else f"{unknown}:81")
    ]
    before = field.agent.reasons()
    with Wire(outside.netns, field.lab.prefix, tap=True) as wire:
        wire.send(*asked, to=BROADCAST)
        refusal(field, "outside", "ClusterIP", "udp", v6)
        wire.none(0, lambda packet: packet.destination == own)
    counted = field.agent.reasons() - before
    assert (counted[Reason.UNKNOWN_PORT], counted[Reason.NEW_FLOW]) == (1, 0)


@both_families
@CLIENTS
def test_an_unknown_external_port_is_refused_by_the_node(field: Field, name: str, v6: bool) -> None:
    """External addresses: the node's stack answers from its own address, as it has no route. It
    answers five packets of an IPv4 client at once, and then one a second (ip_error() of Linux).
    """
    for kind, protocol in product(("ExternalIP", "VIP"), ("tcp", "udp")):
        error = refusal(field, name, kind, protocol, v6, repeat=True)
        assert error.ip.source != split(at(kind, 11, v6))[0]
        assert (error.protocol, error.transport.type, error.transport.code) == NO_ROUTE[v6]


@both_families
def test_a_refusal_is_intact_with_checksum_offload(field: Field, v6: bool) -> None:
    """The pod leaves checksums to its device (CHECKSUM_PARTIAL), and the device back to the pod has
    no offload either: the kernel computes them in a packet that has become an ICMP error.
    """
    home = field.lab.nodes[0].netns
    offload(home, "p2", "tx", False)
    try:
        for kind, number in (("ClusterIP", 26), ("VIP", 26), ("NodePort", 26)):
            check(field, Dial(kind, "a2!", at(kind, number, v6), REFUSED, "udp"))
    finally:
        offload(home, "p2", "tx", True)


@both_families
def test_affinity_spans_all_addresses_of_a_service(field: Field, v6: bool) -> None:
    names = set()
    for kind in ("NodePort", "VIP", "ExternalIP"):
        answer = field["outside"].many(8, *split(at(kind, 31, v6)))
        assert not answer["errors"]
        names |= set(answer["names"])
    assert len(names) == 1


# ---- bulk transfers ------------------------------------------------------------------------------

BULK = 7000
"""A port of the pods on which only bulk() listens."""
MEGABYTES = 4 << 20


@pytest.fixture(scope="module")
def heavy(field: Field) -> Field:
    """Services 41 (local), 42 (remote) and 43 (local, policy Local), with bulk()'s port as
    target.
    """
    for number, who in ((41, "a1"), (42, "b1"), (43, "a1")):
        more = {"external_policy": "Local"} if number == 43 else {}
        service, *_ = field.all_ways(number, "", **more)
        port = slice_port(BULK)
        slices = (field.slice(f"web-{number}", who, port, v6=v6) for v6 in (False, True))
        field.create(service, *slices)
    field.settle()
    return field


def bulk(client: Place, to: str, backend: Place, size: int, seconds: float = PATIENCE) -> str:
    """Sends `size` bytes to the backend and back and compares them. Returns the client address that
    the backend sees.
    """
    data = random.Random(size).randbytes(size)
    host, number = split(to)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = there(backend, lambda: socket.create_server(("", BULK), family=family))
    talker = there(client, lambda: socket.socket(family, socket.SOCK_STREAM))
    with listener, talker:
        listener.settimeout(seconds)
        talker.settimeout(seconds)
        seen: list[bytes] = []
        peers: list[str] = []
        echo = threading.Thread(target=_echo, args=(listener, size, seconds, peers, seen))
        send = threading.Thread(target=_send, args=(talker, data))
        echo.start()
        try:
            talker.connect((host, number))
            send.start()
            back = _receive(talker, size)
        finally:
            echo.join()
        send.join()
    assert b"".join(seen) == data, "the backend received other bytes"
    assert back == data, "other bytes came back"
    return peers[0]


def _send(talker: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the comparison below reports what is missing
        talker.sendall(data)


def _receive(talker: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size and (piece := talker.recv(1 << 16)):
        got += piece
    return bytes(got)


def _echo(listener: socket.socket, size: int, seconds: float, peers: list[str], seen: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        peer, address = listener.accept()
        peers.append(address[0])
        with peer:
            peer.settimeout(seconds)
            while sum(map(len, seen)) < size and (piece := peer.recv(1 << 16)):
                seen.append(piece)
                peer.sendall(piece)


@pytest.fixture(params=[True, False], ids=["GSO", "checksums"])
def sends(request: pytest.FixtureRequest, heavy: Field) -> Iterator[None]:
    """With segmentation and checksum offload on the sending devices, and without."""
    ends = [(heavy.lab.outside, heavy.lab.prefix)]
    ends += [(heavy[name].netns, "eth0") for name in ("a1", "b1")]
    for where, device in ends:
        offload(where, device, "tx", request.param)
    yield
    for where, device in ends:
        offload(where, device, "tx", True)


@both_families
@pytest.mark.parametrize(("number", "backend"), [(41, "a1"), (42, "b1"), (43, "a1")])
@pytest.mark.usefixtures("sends")
def test_megabytes_arrive_intact(heavy: Field, number: int, backend: str, v6: bool) -> None:
    bulk(heavy["outside"], at("NodePort", number, v6), heavy[backend], MEGABYTES)


@pytest.mark.parametrize(("number", "backend"), [(41, "a1"), (42, "b1")])
@pytest.mark.usefixtures("sends")
def test_megabytes_of_an_unhooked_pod_arrive_intact(heavy: Field, number: int, backend: str) -> None:
    """a1 to itself, and to a pod of another node."""
    bulk(heavy["a1!"], at("ClusterIP", number), heavy[backend], MEGABYTES)


# ---- smaller packets -----------------------------------------------------------------------------

NARROW = 1300
FAR4, FAR6 = "198.51.100.7", "fd00:198:51::7"


@pytest.fixture(scope="module")
def far(heavy: Field) -> Iterator[Place]:
    """A client behind a router; the router is the outside machine."""
    lab = heavy.lab
    where = f"{lab.prefix}far"
    lab.add_netns(where)
    ip(f"link add far type veth peer name eth0 netns {where}", netns=lab.outside)
    ip(
        *("addr add 198.51.100.1/24 dev far", "addr add fd00:198:51::1/64 dev far nodad"),
        "link set far up",
        netns=lab.outside,
    )
    ip(
        *(f"addr add {FAR4}/24 dev eth0", f"addr add {FAR6}/64 dev eth0 nodad"),
        *("link set lo up", "link set eth0 up"),
        *("route add default via 198.51.100.1", "route add default via fd00:198:51::1"),
        netns=where,
    )
    settled(lab.outside, "fd00:198:51::1")
    settled(where, FAR6)
    sysctl = "echo 1 > /proc/sys/net/ipv4/ip_forward;echo 1 > /proc/sys/net/ipv6/conf/all/forwarding"
    command(*inside(lab.outside, None, "sh", "-c"), sysctl)
    return heavy.unhook("far", where, FAR4, FAR6, lab.nodes[0])


@contextlib.contextmanager
def narrow(where: str | None, route: str, after: str) -> Iterator[None]:
    """Lowers this route's MTU. Forwarding respects a route's MTU only if it is locked."""
    ip(f"route replace {route} mtu lock {NARROW}", netns=where)
    try:
        yield
    finally:
        ip(after, netns=where)


def learned(place: Place, to: str) -> int:
    """The path MTU that this place has cached."""
    said = command("ip", "-n", str(place.netns), "route", "get", to)
    found = re.search(r"mtu (\d+)", said)
    return int(found[1]) if found else 0


NARROWS = {
    "before the pod": (41, "a1", "outside"),
    "between the nodes": (42, "b1", "outside"),
    "behind the other node": (42, "b1", "outside"),
    "before the pod, Local": (43, "a1", "outside"),
    "before the client": (41, "a1", "far"),
    "before the client, remote": (42, "b1", "far"),
    "before the client, Local": (43, "a1", "far"),
}


@both_families
@pytest.mark.parametrize("case", NARROWS)
def test_the_path_mtu_is_found(heavy: Field, far: Place, case: str, v6: bool) -> None:
    number, backend, name = NARROWS[case]
    client, pod = heavy[name], heavy[backend]
    first, second = heavy.lab.nodes
    address = pod.ip6 if v6 else pod.ip
    bits = 128 if v6 else 32
    to = at("NodePort", number, v6)
    if name == "far":
        route = f"{FAR6 if v6 else FAR4}/{bits} dev far"
        where, after = heavy.lab.outside, f"route del {route}"
    elif case == "between the nodes":
        route = f"{address}/{bits} via {second.ip6 if v6 else second.ip}"
        where, after = first.netns, f"route del {route}"
    else:
        home = heavy.home[backend]
        route = f"{address}/{bits} dev p1" + ("" if v6 else f" src 10.244.{home.number}.1")
        where, after = home.netns, f"route replace {route}"
    own, far_ip = (first.ip6, FAR6) if v6 else (first.ip, FAR4)
    sender = pod if name == "far" else client  # of the packets that are too big
    _forget(sender)
    with narrow(where, route, after):
        seen = bulk(client, to, pod, 1 << 20)
        if sender is pod:
            assert seen in may_see(heavy, far_ip if number == 43 else own)
        assert learned(sender, seen if sender is pod else split(to)[0]) == NARROW
    _forget(sender)


def _forget(place: Place) -> None:
    for family in ("-4", "-6"):
        command("ip", "-n", str(place.netns), family, "route", "flush", "cache")


# ---- changes -------------------------------------------------------------------------------------

ENDS = [Agent.stop, Agent.kill]
POD_UDP = slice_port(8080, protocol="UDP")


@pytest.fixture(autouse=True)
def _runs(field: Field) -> Iterator[None]:
    """Makes sure that the agents run after each test."""
    yield
    for agent in field.agents:
        if not agent.is_running:
            agent.start()


@pytest.mark.parametrize("end", ENDS, ids=["SIGTERM", "SIGKILL"])
def test_no_connection_fails_when_the_agent_restarts(field: Field, end: Callable[[Agent], int | None]) -> None:
    client = field["outside"]
    ways = product(("NodePort", "VIP"), (11, 12, 14), (False, True))
    kept = {f"{kind}{number}{v6}": at(kind, number, v6) for kind, number, v6 in ways}
    for name, to in kept.items():
        assert "name" in client.tcp(*split(to), keep=name)
    host, number = split(at("NodePort", 13))
    with (
        under_load(field, host, "outside", port=number, answers="a1 b1") as tcp,
        under_load(field, "10.96.0.23", "a2!", protocol="udp", answers="a1 b1") as udp,
    ):
        assert end(field.agent) in (0, None)
        for load in (tcp, udp):
            load.goes_on()
        field.agent.start()
    for name in kept:
        assert "name" in client.ask("talk", keep=name), f"{name} must survive"
        client.ask("drop", keep=name)


def test_a_restart_attaches_no_hook_again(field: Field) -> None:
    assert field.agent.stop() == 0
    field.agent.start()
    assert "hooks attached changed=0" in "\n".join(field.agent.lines())


def test_no_connection_fails_while_endpoints_change(field: Field) -> None:
    turns = ("a1 a2", "a2", "b1 a2/draining", "a1 b1 b2", "b2/draining a1/draining", "a1 a2 b1")
    with field.given(*field.all_ways(51, "a1")):
        host, number = split(at("NodePort", 51))
        with (
            under_load(field, host, "outside", port=number, answers="a1 a2 b1 b2") as load,
            under_load(field, "10.96.0.51", "a2!", answers="a1 a2 b1 b2") as inner,
        ):
            for who in turns:
                field.change(field.slice("web-51", who))
                for each in (load, inner):
                    each.goes_on(5)


@both_families
@pytest.mark.parametrize("name", ["outside", "a2!"])
def test_a_udp_flow_changes_backend_when_its_backend_stops(field: Field, name: str, v6: bool) -> None:
    """Flows are deleted after the write that settle() waits for, so the test has to retry."""
    client = field[name]
    kind = "NodePort" if name == "outside" else "ClusterIP"
    with field.given(*field.all_ways(52, "a1", "UDP")):
        first = client.udp(*split(at(kind, 52, v6)), keep="flow", connected=True)
        assert first.get("name") == "a1", first
        for who in ("b1", "a1", "b1"):
            field.change(*(field.slice("web-52", who, POD_UDP, v6=six) for six in (False, True)))
            until(f"{who} answers", lambda who=who: flow(client).get("name") == who)
        field.change(*(field.slice("web-52", "", POD_UDP, v6=six) for six in (False, True)))
        until("datagrams are refused", lambda: flow(client) == {"error": REFUSED})
        client.ask("drop", keep="flow")


def flow(client: Place) -> dict[str, Any]:
    """Sends another datagram of the flow. The agent deletes old flows after it has written the
    frontends: a datagram in between goes to the old backend, and its reply may find no flow.
    """
    return client.ask("talk", keep="flow", timeout=1.0)


def test_a_connection_outlives_its_endpoint(field: Field) -> None:
    client = field["outside"]
    with field.given(*field.all_ways(53, "a1 b1")):
        for number in range(6):
            client.tcp(*split(at("NodePort", 53)), keep=f"c{number}")
        field.change(field.slice("web-53", "a2"))
        for number in range(6):
            assert client.ask("talk", keep=f"c{number}").get("name") in ("a1", "b1")
            client.ask("drop", keep=f"c{number}")
        check(field, Dial("new connections", "outside", at("NodePort", 53), "a2", "tcp", NODES4[0]))


def has_programs(agent: Agent, name: str) -> bool:
    """Whether the device has the programs for both directions."""
    listing = there(agent.node.host, lambda: devices.read(Pins(agent.pin_dir), 0, None))
    return any(each.name == name and each.ingress and each.egress for each in listing)


def test_a_device_added_later_is_served_and_forgotten_when_deleted(field: Field) -> None:
    home = field.lab.nodes[0]
    pod = home.pod("late").serve(8080)
    field.places["late"], field.home["late"] = pod, home
    client = field.unhook("late!", pod.netns, pod.ip, pod.ip6, home)
    name = f"p{len(home.pods)}"
    ifindex = command("ip", "-n", home.netns, "-o", "link", "show", name)
    key = struct.pack("=I", int(ifindex.partition(":")[0]))
    until("the agent knows the device", lambda: key in field.agent.entries("devices"))
    until("both programs are attached", lambda: has_programs(field.agent, name))
    until("the pod is served", lambda: "name" in client.tcp("10.96.0.13", 80, timeout=1.0))
    with field.given(*field.all_ways(54, "late")):
        check(field, Dial("from the new pod", "late!", at("ClusterIP", 13), "a1 b1", "tcp", pod.ip))
        check(field, Dial("to the new pod", "outside", at("VIP", 54), "late", "tcp", NODES4[0]))
        check(field, Dial("hairpin", "late!", at("VIP", 54), "late", "tcp", NODES4[0]))
    ip(f"link del {name}", netns=home.netns)
    until("the agent has deleted the device", lambda: key not in field.agent.entries("devices"))


def unserved(field: Field) -> None:
    """Checks that node-1's own stack answers and that none of our programs is on its devices."""
    check(field, Dial("NodePort refused", "outside", at("NodePort", 11), REFUSED))
    check(field, Dial("VIP unserved", "outside", at("VIP", 11), UNSERVED))
    assert "clsact" not in command("tc", "-n", field.agent.node.netns, "qdisc", "show")


def served(field: Field) -> None:
    check(field, Dial("NodePort served", "outside", at("NodePort", 11), "a1", "tcp", NODES4[0]))
    check(field, Dial("VIP served", "outside", at("VIP", 11), "a1", "tcp", NODES4[0]))


def test_switching_the_packet_path_off_detaches_all_programs(field: Field) -> None:
    served(field)
    field.agent.stop()
    field.agent.start(extra=("--packet-path", "false"))
    try:
        unserved(field)
        check(
            field,
            Dial("socket hooks still serve", "a2", "10.96.0.11:80", "a1", "tcp", field["a2"].ip),
        )
    finally:
        field.agent.stop()
    field.agent.start()
    served(field)


def test_cleanup_detaches_all_programs(field: Field) -> None:
    served(field)
    field.agent.stop()
    clean = (sys.executable, "-m", "kbpf", "cleanup", "--pin-dir", str(field.agent.pin_dir))
    done = subprocess.run(inside(field.agent.node.netns, None, *clean), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    unserved(field)
    assert not field.agent.pin_dir.exists()
    field.agent.start()
    served(field)
