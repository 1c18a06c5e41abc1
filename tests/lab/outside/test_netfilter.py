# SPDX-License-Identifier: Apache-2.0
"""The packet path together with foreign rules: a FORWARD policy of DROP, strict rp_filter, the
rules of CNIs and kube-proxy, and rules that drop what conntrack calls invalid.

Each set of rules is installed on the nodes, every path through the packet path is tried, and the
rules are removed again. They are the rules that those projects write, cut down to the ones that our
packets can match.
"""

import contextlib
import re
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest

from kbpf.dataplane.bpf.packet_path.nat_table import TABLE
from tests.fuzz.packets.node import mac_of
from tests.fuzz.packets.twins import dump_conntrack
from tests.lab.outside.netfilter import (
    FIREWALLD,
    OURS,
    POLICY,
    RULES,
    dropped,
    flush_conntrack,
    guarded,
    invalid,
    masqueraded,
    nft,
    nft_table,
    objects,
    ours,
    plain,
    strict,
    tables,
)
from tests.support.lab import sockets
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import (
    DROPPED,
    NODES4,
    NODES6,
    WITH_CONNTRACK,
    Field,
    at,
    both_families,
    check,
    crossed,
    forward,
    split,
    there,
)
from tests.support.lab.lab import PATIENCE, Node, Place, ip, on, set_rp_filter, until
from tests.support.lab.lab import run as command
from tests.support.packets import packets
from tests.support.packets.wire import Wire


@pytest.fixture(scope="module", params=[how for how in WITH_CONNTRACK if how != "direct"])
def field(request) -> Iterator[Field]:
    with Field(*forward(request.param), name="nf") as made:
        made.create(*objects(made))
        made.settle()
        yield made


@pytest.fixture(autouse=True)
def _clean(field: Field) -> Iterator[None]:
    """Removes all rules that a test has added, and the connections that they have judged: conntrack
    decides about NAT once for each connection, and a client may reuse its port.
    """
    yield
    for node in field.lab.nodes:
        on(node, "nft", "flush", "ruleset")
        there(node, flush_conntrack)
        set_rp_filter(node.netns, 0)
        ip("link set lo alias loose", netns=node.netns)  # the agent reads them again: strict()
    for agent in field.agents:
        if not agent.is_running:
            agent.start()
    if "netfilter" in field.arguments:
        for node in field.lab.nodes:
            until("the table is back", lambda node=node: TABLE in on(node, "nft", "list", "tables"))


# ---- FORWARD with the policy DROP ----------------------------------------------------------------


@pytest.fixture
def closed(field: Field) -> Node:
    """node-1 with FORWARD policy DROP in both families and our rule in place."""
    node = field.lab.nodes[0]
    for tool in POLICY:
        tables(node, tool, "-P FORWARD DROP")
    guarded(node)
    return node


@crossed
@pytest.mark.usefixtures("closed")
def test_masqueraded_packets_pass_a_closed_forward(field: Field, protocol: str, v6: bool):
    for row in masqueraded(protocol, v6):
        check(field, row)


@crossed
@pytest.mark.usefixtures("closed")
def test_other_packets_do_not_pass_a_closed_forward(field: Field, protocol: str, v6: bool):
    """As with kube-proxy: policy Local keeps the client's address and sets no mark. Only a rule of the CNI may accept
    them.
    """
    for row in plain(protocol, v6):
        check(field, replace(row, outcome=DROPPED))


@pytest.mark.parametrize(("how", "v6"), [("-I FORWARD", False), ("-A FORWARD", True)])
def test_a_cni_rule_that_rejects_takes_precedence(field: Field, closed: Node, how: str, v6: bool):
    """The CNI's rule rejects traffic to one pod, whether it is inserted before ours or appended."""
    tool = POLICY[v6]
    pod = field["a1"].ip6 if v6 else field["a1"].ip
    kind = "icmp6-port-unreachable" if v6 else "icmp-port-unreachable"
    tables(closed, tool, f"{how} -d {pod} -j REJECT --reject-with {kind}")
    guarded(closed)
    host = (NODES6 if v6 else NODES4)[0]
    for kind, number in product(("NodePort", "VIP"), (11, 21)):
        protocol = "tcp" if number == 11 else "udp"
        check(field, Dial("to the rejected pod", "outside", at(kind, number, v6), REFUSED, protocol))
        to = at(kind, number + 4, v6)
        check(field, Dial("to another pod", "outside", to, "a3", protocol, host))


def test_foreign_rules_are_left_unchanged(field: Field, closed: Node):
    """Our rules are added and removed without touching others; cleanup removes only ours."""
    for tool in POLICY:
        tables(
            closed,
            tool,
            """
            -N OTHERS
            -A OTHERS -m mark --mark 0x4000/0x4000 -j ACCEPT
            -A FORWARD -m comment --comment "kbpf: is not mine" -j OTHERS
            -A FORWARD -p tcp --dport 1 -j DROP
            """,
        )
    guarded(closed)
    before = [re.sub(r"^#.*\n", "", on(closed, f"{tool}-nft-save"), flags=re.M) for tool in POLICY]
    field.agent.stop()
    guarded(closed)  # it stays, like all state of a stopped agent
    done = field.agent.kbpf("cleanup")
    assert done.returncode == 0, done.stderr
    assert "rule in ip filter FORWARD" in done.stdout
    assert "rule in ip6 filter FORWARD" in done.stdout
    for tool, text in zip(POLICY, before, strict=True):
        after = re.sub(r"^#.*\n", "", on(closed, f"{tool}-nft-save"), flags=re.M)
        gone = [line for line in text.splitlines() if OURS not in line]
        assert _uncounted(after.splitlines()) == _uncounted(gone)
        assert ours(closed, tool) == []


def _uncounted(lines: list[str]) -> list[str]:
    return [re.sub(r"\[\d+:\d+\]", "[]", line) for line in lines]


def test_without_the_packet_path_there_is_no_rule(field: Field, closed: Node):
    field.agent.stop()
    field.agent.start(extra=("--packet-path", "false"))
    try:
        for tool in POLICY:
            assert ours(closed, tool) == []
    finally:
        field.agent.stop()


@pytest.fixture(params=RULES)
def ruled(request, field: Field) -> Iterator[str]:
    """Installs these rules on both nodes; checks afterwards that no packet was dropped as
    invalid.
    """
    for node in field.lab.nodes:
        RULES[request.param](field, node)
    if request.param in ("flannel", "Calico"):
        for node in field.lab.nodes:
            guarded(node)
    yield request.param
    for node in field.lab.nodes:
        assert dropped(node) == 0, on(node, "nft", "list", "ruleset")


@crossed
def test_all_paths_work_with_foreign_rules(field: Field, ruled: str, protocol: str, v6: bool):
    """A CNI that masquerades pods even to other nodes' pods hides pod clients, as without kbpf. The
    kernel's MASQUERADE uses the node's address on the device towards the pod.
    """
    for row in (*masqueraded(protocol, v6), *plain(protocol, v6)):
        sees = row.backend_sees
        if ruled == "a CNI's masquerade" and row.client == "a2!" and row.outcome == "b1":
            sees = (NODES6 if v6 else NODES4)[0]
        # Flows that conntrack translates for us have their source already.
        is_done = row.client == "outside" and "netfilter" in field.arguments
        if ruled == "kube-proxy's leftovers" and row.outcome == "a1" and _is_own(sees) and not is_done:
            sees = "fd00:10:244:1::1" if v6 else "10.244.1.1"
        check(field, replace(row, backend_sees=sees))


def _is_own(address: str) -> bool:
    return address in (NODES4[0], NODES6[0])


@both_families
@pytest.mark.parametrize("field", ["stack"], indirect=True)
def test_firewalld_without_a_policy_rejects_packets_to_local_pods(field: Field, v6: bool):
    """kube-proxy's pass, by `ct status dnat accept`. Masqueraded packets to other nodes bypass the
    chain.
    """
    node = field.lab.nodes[0]
    rules = FIREWALLD.replace("jump filter_FWD_policy_to-pods\n", "return\n")
    assert rules != FIREWALLD
    nft(node, rules)
    own, admin_prohibited = (NODES6[0], "EACCES") if v6 else (NODES4[0], "EHOSTUNREACH")
    check(field, Dial("to another node", "outside", at("NodePort", 12, v6), "b1", "tcp", own))
    for number in (11, 14):  # policy Cluster and Local
        answer = field["outside"].many(3, *split(at("NodePort", number, v6)), protocol="tcp")
        assert (answer["names"], set(answer["errors"])) == ({}, {admin_prohibited})


# ---- what conntrack sees of connections ----------------------------------------------------------

PORT = 7000
"""A port of the pods on which only served() listens."""
BYTES = 1 << 20


@pytest.fixture(scope="module")
def ends(field: Field) -> Field:
    """Services 41 (local), 42 (remote) and 43 (local, policy Local), with target port PORT."""
    services = ("41 -> a1", "42 -> b1", "43 -> a1 external=Local")
    field.create(*field.all_of("\n".join(f"{line} target={PORT}" for line in services)))
    field.settle()
    return field


def listening(place: Place, v6: bool) -> socket.socket:
    """A server of this place."""
    family = socket.AF_INET6 if v6 else socket.AF_INET
    listener: socket.socket = there(place, lambda: socket.create_server(("", PORT), family=family))
    listener.settimeout(PATIENCE)
    return listener


def dialled(
    client: Place, to: tuple[str, int], port: int, listener: socket.socket
) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection from this port; 0: from any."""
    made = sockets.connect(client.netns, *to, PATIENCE, port)
    server, _ = listener.accept()
    server.settimeout(PATIENCE)
    return made, server


@contextlib.contextmanager
def connected(field: Field, to: str, backend: str) -> Iterator[tuple[socket.socket, ...]]:
    """The client's socket and the backend's, connected through a Service."""
    with listening(field[backend], ":" in split(to)[0]) as listener:
        client, server = dialled(field["outside"], split(to), 0, listener)
        with client, server:
            yield client, server


def moved(sender: socket.socket, receiver: socket.socket, size: int = BYTES) -> None:
    """Sends this many bytes and checks that all arrive."""
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.sendall, bytes(size))
        got = 0
        while got < size and (piece := receiver.recv(1 << 16)):
            got += len(piece)
        sent.result()
    assert got == size


def abort(end: socket.socket) -> None:
    """Closes with RST instead of FIN (SO_LINGER with zero seconds)."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def hears_reset(end: socket.socket) -> None:
    with pytest.raises(ConnectionResetError):
        _drain(end)


def _drain(end: socket.socket) -> None:
    while end.recv(1 << 16):
        pass


def client_closes(client: socket.socket, server: socket.socket) -> None:
    client.close()
    assert server.recv(1) == b""


def server_closes(client: socket.socket, server: socket.socket) -> None:
    server.close()
    assert client.recv(1) == b""


def half_closed(client: socket.socket, server: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    moved(server, client)
    server.close()
    assert client.recv(1) == b""


def client_aborts(client: socket.socket, server: socket.socket) -> None:
    abort(client)
    hears_reset(server)


def server_aborts(client: socket.socket, server: socket.socket) -> None:
    abort(server)
    hears_reset(client)


def server_leaves_unread(client: socket.socket, server: socket.socket) -> None:
    """The server's RST crosses data from the client."""
    client.sendall(bytes(50_000))
    server.recv(1, socket.MSG_PEEK)  # if nothing has arrived yet, it closes with a FIN
    server.close()
    hears_reset(client)


ENDINGS = [client_closes, server_closes, half_closed, client_aborts, server_aborts, server_leaves_unread]


@pytest.fixture
def judged(field: Field) -> Iterator[None]:
    """Drops invalid packets on both nodes, and checks afterwards that there were none."""
    for node in field.lab.nodes:
        invalid(field, node)
    yield
    for node in field.lab.nodes:
        assert dropped(node) == 0, on(node, "nft", "list", "ruleset")


@pytest.mark.parametrize(("number", "backend", "v6"), [(41, "a1", False), (42, "b1", True), (43, "a1", False)])
@pytest.mark.usefixtures("judged")
def test_no_packet_is_invalid_for_each_way_a_connection_ends(ends: Field, number: int, backend: str, v6: bool):
    for kind in ("NodePort", "VIP"):
        for ending in ENDINGS:
            with connected(ends, at(kind, number, v6), backend) as (client, server):
                moved(client, server)
                moved(server, client)
                ending(client, server)


@pytest.mark.parametrize(("number", "backend", "v6"), [(41, "a1", True), (42, "b1", False), (43, "a1", True)])
@pytest.mark.parametrize("ending", [client_closes, client_aborts], ids=["FIN", "RST"])
@pytest.mark.usefixtures("judged")
def test_late_packets_are_not_invalid(
    ends: Field, number: int, backend: str, ending: Callable[[socket.socket, socket.socket], None], v6: bool
):
    """Everything that the client sent after its SYN is repeated once the connection is closed."""
    for node in ends.lab.nodes:  # or conntrack forgets a reset connection after 10 s
        on(node, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_timeout_close=120")
    to = at("NodePort", number, v6)
    with Wire(ends.lab.outside, ends.lab.prefix, tap=True) as tap:
        with connected(ends, to, backend) as (client, server):
            moved(client, server, 100)
            ending(client, server)
        sent = [packet.raw for packet in tap.heard if packet.destination == to and packet.flags != "S"]
        assert len(sent) >= 3
        before = {node.number: seen(node) for node in ends.lab.nodes}
        for frame in sent:
            tap.send_frame(frame)
        on_the_way = ends.lab.nodes[backend == "b1"]
        until("the late packets have arrived", lambda: seen(on_the_way) >= before[on_the_way.number] + len(sent))


def seen(node: Node) -> int:
    """How many packets this node's FORWARD hook has counted."""
    listed = on(node, "nft", "list", "chain", "inet", "strict", "forward")
    return sum(map(int, re.findall(r"counter packets (\d+)", listed)))


TCP_REPAIR = 19


def vanish(end: socket.socket) -> None:
    """Closes a connection without data in flight; the other end does not hear of it."""
    end.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    end.close()


@pytest.mark.parametrize(
    ("who", "kind", "number", "backend", "v6"),
    [
        ("a2!", "ClusterIP", 41, "a1", False),
        ("a2!", "ClusterIP", 42, "b1", True),
        ("outside", "NodePort", 43, "a1", False),
    ],
)
@pytest.mark.usefixtures("judged")
def test_conntrack_does_not_wait_for_an_answer_that_is_denied(
    ends: Field, who: str, kind: str, number: int, backend: str, v6: bool
):
    """The backend still has an older connection from the client's port, so the client gets another
    one. Conntrack has seen the SYN, but must not take a later connection from the first port for
    the one that was never answered.
    """
    pod, client = ends[backend], ends[who]
    own = (pod.ip6 if v6 else pod.ip, PORT)
    home = ends.home[backend]
    route = f"{own[0]} via {home.ip6 if v6 else home.ip}"
    with contextlib.ExitStack() as stack:
        if who == "outside":
            ip(f"route add {route}", netns=ends.lab.outside)
            stack.callback(ip, f"route del {route}", netns=ends.lab.outside)
        listener = stack.enter_context(listening(pod, v6))
        older, held = dialled(client, own, 0, listener)
        port = older.getsockname()[1]
        vanish(older)
        for node in ends.lab.nodes:
            there(node, flush_conntrack)
        through = dialled(client, split(at(kind, number, v6)), port, listener)
        waiting = [
            (node.name, row)
            for node in ends.lab.nodes
            for row in there(node, dump_conntrack)
            if (row.source_port, row.to_port, row.state) == (port, PORT, "SYN_SENT")
        ]
        assert waiting == []
        vanish(held)
        direct = dialled(client, own, port, listener)
        for one, other in (through, direct):
            moved(one, other)
            client_closes(one, other)
            other.close()


@pytest.mark.parametrize(("number", "backend", "v6"), [(41, "a1", False), (42, "b1", True)])
@pytest.mark.usefixtures("judged")
def test_direct_connections_from_ports_of_ended_ones(ends: Field, number: int, backend: str, v6: bool):
    """The backend is in TIME_WAIT. Without timestamps it takes the next SYN from that port only if
    its number is later, else the client has to end that state with a reset. Which of the two
    happens is chance: one of these connections needs the reset. The client's old end does not help,
    as if both had closed at the same time.
    """
    pod, client = ends[backend], ends["a2!"]
    own, through = (pod.ip6 if v6 else pod.ip, PORT), split(at("ClusterIP", number, v6))
    family = "ip6" if v6 else "ip"
    silent = f"""chain output {{ type filter hook output priority 0
        {family} daddr {through[0]} tcp flags & rst == rst drop; }}"""
    with contextlib.ExitStack() as stack:
        stack.enter_context(nft_table(client, "inet silent", silent))
        on(client, "sysctl", "-qw", "net.ipv4.tcp_timestamps=0")
        stack.callback(on, client, "sysctl", "-qw", "net.ipv4.tcp_timestamps=1")
        listener = stack.enter_context(listening(pod, v6))
        for _ in range(16):
            port = 0
            for to in (through, own):
                end, server = dialled(client, to, port, listener)
                port = end.getsockname()[1]
                moved(end, server)
                server_closes(end, server)
                end.close()


def test_an_invalid_packet_is_counted_by_the_rules(field: Field):
    """The rules do count and drop invalid packets, so a count of 0 above means something."""
    node = field.lab.nodes[0]
    invalid(field, node)
    ip(f"route add {field['a1'].ip}/32 via {node.ip}", netns=field.lab.outside)
    with Wire(field.lab.outside, field.lab.prefix) as wire:
        answer = packets.tcp("198.18.0.200:4999", f"{field['a1'].ip}:8080", flags="SA", ack=1)
        wire.send(answer, to=mac_of(node.netns, "eth0"))
        until("the packet is dropped", lambda: dropped(node) == 1)
    ip(f"route del {field['a1'].ip}/32", netns=field.lab.outside)


# ---- replies that arrive on another device -------------------------------------------------------


@pytest.fixture
def second(field: Field) -> Iterator[None]:
    """A second link between the nodes: node-2 replies by it, while node-1 sends by the first."""
    first, other = field.lab.nodes
    ip(f"link add x1 type veth peer name x2 netns {other.netns}", netns=first.netns)
    for node in (first, other):
        set_rp_filter(node.netns, 0)
    for number, node in enumerate((first, other), 1):
        ip(
            f"""
            addr add 198.19.0.{number}/30 dev x{number}
            link set x{number} up
            addr add fd00:198:19::{number}/64 dev x{number} nodad
            """,
            netns=node.netns,
        )
    ip(
        """
        route add 198.18.0.1/32 via 198.19.0.1
        route replace 10.244.1.0/24 via 198.19.0.1
        route add fd00:198:18::1/128 via fd00:198:19::1
        route replace fd00:10:244:1::/64 via fd00:198:19::1
        """,
        netns=other.netns,
    )
    listed = command("ip", "-n", first.netns, "-o", "link", "show", "x1")
    key = struct.pack("=I", int(listed.partition(":")[0]))
    until("the agent knows the device", lambda: key in field.agent.entries("devices"))
    yield
    ip("link del x1", netns=first.netns)
    ip("route add 10.244.1.0/24 via 198.18.0.1", "route add fd00:10:244:1::/64 via fd00:198:18::1", netns=other.netns)


def remote(protocol: str, v6: bool) -> Iterator[Dial]:
    """The paths to node-2's pod."""
    return (row for row in (*masqueraded(protocol, v6), *plain(protocol, v6)) if row.outcome == "b1")


def came_by_x1(field: Field) -> int:
    """How many packets node-1 has received on x1."""
    text = on(field.lab.nodes[0], "cat", "/proc/net/dev")
    found = re.search(r"x1:\s*\d+\s+(\d+)", text)
    assert found
    return int(found[1])


@crossed
@pytest.mark.usefixtures("second", "judged")
def test_replies_on_another_device_are_translated(field: Field, protocol: str, v6: bool):
    for row in remote(protocol, v6):
        before = came_by_x1(field)
        check(field, row)
        assert came_by_x1(field) > before, f"{row.name}: replies must arrive on x1"


@pytest.mark.usefixtures("second", "judged")
def test_replies_on_another_device_do_not_pass_strict_rp_filter(field: Field):
    """Nor do those of masqueraded flows, which the kernel's own filter never sees: as with
    kube-proxy.
    """
    strict(field, field.lab.nodes[0])
    for row in remote("tcp", False):
        check(field, replace(row, outcome=DROPPED))
