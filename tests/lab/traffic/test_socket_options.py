# SPDX-License-Identifier: Apache-2.0
"""Options of sockets that name a device, a source, a route, an error queue or an order of calls have the same outcome
by the socket hooks (node-1), by the packet path (node-2, `--socket-lb off`) and behind a real kube-proxy (node-3).

Each node has a pod that serves and one of clients. A row runs on the host and in the pod of clients, with a backend
near (on the same node) and far. The path MTU to far pods is 1,400 bytes.
"""

import contextlib
import errno
import json
import socket
import struct
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.lab.outside.netfilter import nft
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.cluster.kube_proxy import KubeProxy, lab_for_proxies
from tests.support.lab.field import WAIT
from tests.support.lab.lab import PATIENCE, Agent, Node, Place, ip, on, until
from tests.support.lab.podnet import gate
from tests.support.plane import start_within
from tests.support.table import table

SIDES = ("hooks", "packets", "kube-proxy")
CLOSED, ANY = 4, 5
"""Services: 1 to 3 have the pod of one node, 4 has a port on which it does not listen, 5 has all three pods."""
SERVICES4, SERVICES6 = "10.96.0.0/16", "fd00:10:96::/112"
PODS = "10.244.0.0/16,fd00:10:244::/48"
NO_ROUTE, NO_RIGHT = 7, 8
"""Marks of sockets that have a route to Services only, or whose packets a firewall lets through to Services only."""
LOOPBACK, FOREIGN = ("127.0.0.1", "::1"), ("192.0.2.77", "2001:db8::77")
OPTIONS = {
    "mark": (socket.SOL_SOCKET, socket.SO_MARK),
    "zerocopy": (socket.SOL_SOCKET, 60),
    "fastopen_connect": (socket.IPPROTO_TCP, 30),
    "segment": (socket.IPPROTO_UDP, 103),
}
OPTIONS4 = {"unicast_if": 50, "ttl": 2, "mtu_discover": 10, "mtu": 14, "recverr": 11, "transparent": 19, "freebind": 15}
OPTIONS6 = {
    "unicast_if": 76,
    "ttl": 16,
    "mtu_discover": 23,
    "mtu": 24,
    "recverr": 25,
    "transparent": 75,
    "freebind": 78,
}
PKTINFO4, PKTINFO6 = 8, 50
MSG_ZEROCOPY = 0x4000000


def cluster_ip(number: int, v6: bool) -> str:
    return f"fd00:10:96::2{number}" if v6 else f"10.96.0.2{number}"


Site = dict[tuple[str, str], Place]
"""Side and kind of client → the place."""


@pytest.fixture(scope="module")
def site(programs: None, kube_proxy: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        lab, kube, config = stack.enter_context(lab_for_proxies(len(SIDES), "op"))
        clients = {}
        for home, side in zip(lab.nodes, SIDES, strict=True):
            home.pod(f"s{home.number}").serve(8080, udp=(8080,))
            clients |= {(side, "host"): home.host, (side, "pod"): home.pod(f"c{home.number}")}
            for place in clients[side, "host"], clients[side, "pod"]:
                restrict(place)
            for other in (each for each in lab.nodes if each is not home):
                routes = (
                    f"10.244.{other.number}.0/24 via {other.ip}",
                    f"fd00:10:244:{other.number}::/64 via {other.ip6}",
                )
                ip(*(f"route replace {route} mtu 1400" for route in routes), netns=home.netns)
        for number in (1, 2, 3, CLOSED, ANY):
            homes = lab.nodes if number > len(lab.nodes) else [lab.nodes[number - 1]]
            for each in objects(number, homes):
                kube.create(each)
        for home, side in zip(lab.nodes, SIDES, strict=True):
            if side == "kube-proxy":
                stack.enter_context(KubeProxy(home, "nftables", config, "--cluster-cidr", PODS))
            else:
                hooks = "on" if side == "hooks" else "off"
                flags = ("--packet-path", "true", "--cluster-cidr", PODS, "--socket-lb", hooks)
                Agent(home, "--kubeconfig", str(config), *flags).start()
        for place, v6 in product(clients.values(), (False, True)):
            for dial in (partial(each, cluster_ip(ANY, v6), 80, timeout=1) for each in (place.tcp, place.udp)):
                until("it is served", lambda dial=dial: "name" in dial())
        yield clients


def restrict(place: Place) -> None:
    """Gives this place what the rows need: fast open, and the route and the firewall of marked sockets."""
    on(place, "sh", "-c", "echo 1031 > /proc/sys/net/ipv4/tcp_fastopen")
    for family, services in (("-4", SERVICES4), ("-6", SERVICES6)):
        _, _, route = on(place, "ip", family, "route", "show", "default").strip().partition("default ")
        for words in (
            f"rule add fwmark {NO_ROUTE}/0xff lookup 77",
            f"route add {services} {route} table 77",
            "route add unreachable default table 77",
        ):
            on(place, "ip", family, *words.split())
    match = f"meta mark & 0xff == {NO_RIGHT} ip{{0}} daddr != {{1}} drop"
    rules = "; ".join(match.format(*each) for each in (("", SERVICES4), ("6", SERVICES6)))
    nft(place, f"table inet guard {{ chain out {{ type filter hook output priority 0; {rules}; }}; }}")


def objects(number: int, homes: list[Node]) -> Iterator[dict]:
    name, target = f"s{number}", 8081 if number == CLOSED else 8080
    ports = [port(80, p.lower(), p, target=target, node_port=30080 + number) for p in ("TCP", "UDP")]
    addresses = [cluster_ip(number, v6) for v6 in (False, True)]
    yield service(name, *ports, type="NodePort", cluster_ips=addresses, families=("IPv4", "IPv6"))
    for family in ("IPv4", "IPv6"):
        ends = [endpoint(home.pods[0].ip if family == "IPv4" else home.pods[0].ip6, node=home.name) for home in homes]
        slice_ports = [slice_port(target, p.lower(), p) for p in ("TCP", "UDP")]
        yield endpoint_slice(name, *ends, family=family, ports=slice_ports)


class Row(NamedTuple):
    """`calls`: methods of Client and names in OPTIONS. `outcome`: what all have; then, after semicolons, what those
    have to which all words before a colon apply: the last one counts. `limit`: the row of docs/limits.md about it.
    """

    name: str
    protocols: str
    calls: str
    outcome: str
    limit: str = ""


BOUND = "A socket of the node that is bound to a device"
ERRORS = "The error queue"
SHARED = "UDP sockets that share a source port"
BYPASSED = "Packets that bypass the stack"
ONLY = "Routes and firewalls that know Services only"
KUBE_PROXY_BOUND = "kube-proxy host near: timeout; kube-proxy host near tcp v6: ENETUNREACH"
ANOTHER = "served; hooks: served or served another backend"
MTU = "served 1500; far: {0}; packets host far: served 1500"
NO_WAY = "served; hooks: {0}; kube-proxy host: {1}"
ROWS = table(
    Row,
    f"""
none, connected         | tcp udp | connect ask | served
none, unconnected       | udp     | sendto hear | served
bound to a device       | tcp udp | device=eth0 connect ask | served; {KUBE_PROXY_BOUND} | {BOUND}
bound, unconnected      | udp     | device=eth0 sendto hear | served; {KUBE_PROXY_BOUND} | {BOUND}
bound as it connects    | tcp     | device=eth0 connect device= ask | served; {KUBE_PROXY_BOUND} | {BOUND}
bound as it connects    | udp     | device=eth0 connect device= ask | served
as systemd-resolved     | udp     | unicast_if=eth0 device=eth0 connect device= ask | served
unicast_if              | tcp udp | unicast_if=eth0 connect ask | served
unicast_if, unconnected | udp     | unicast_if=eth0 sendto hear | served
pktinfo, a device       | udp     | pktinfo=eth0 hear | served; hooks host near: timeout | {BOUND}
pktinfo, a source       | udp     | pktinfo=own hear | served
bound to an address     | tcp udp | bind=own connect ask | served
bound to loopback       | tcp udp | bind=loopback connect ask | EINVAL; v6: timeout
loopback, unconnected   | udp     | bind=loopback sendto hear | EINVAL; v6: timeout
loopback to a NodePort  | tcp udp | dials_loopback bind=loopback connect ask | ECONNREFUSED
transparent             | tcp udp | transparent=1 bind=foreign connect ask | timeout
freebind                | tcp udp | freebind=1 bind=foreign connect ask | ENETUNREACH; v6: timeout
a closed port           | tcp udp | dials={CLOSED} connect ask | ECONNREFUSED
error queue             | udp     | dials={CLOSED} recverr=1 connect send errors | Service; hooks: backend | {ERRORS}
queue, unconnected      | udp     | dials={CLOSED} recverr=1 sendto errors | Service; hooks: backend | {ERRORS}
sendto, then connect    | udp     | dials={ANY} sendto hear connect ask | served
connect, then sendto    | udp     | dials={ANY} connect ask sendto hear | served
connect again and again | udp     | dials={ANY} {"connect ask " * 5} | served
a port of its own       | tcp udp | bind=5060 connect ask | served
a shared port           | udp     | dials={ANY} {"bind=5061 connect ask close " * 3} | {ANOTHER} | {SHARED}
shared, unconnected     | udp     | dials={ANY} {"bind=5062 sendto hear close " * 3} | {ANOTHER} | {SHARED}
ttl 1                   | tcp udp | ttl=1 recverr=1 connect ask | EHOSTUNREACH; host near: served
mtu_discover            | udp     | mtu_discover=2 connect send=1450 hear mtu | {MTU.format("EMSGSIZE")} | {BYPASSED}
mtu of a connection     | tcp     | connect ask mtu | {MTU.format("served 1400")} | {BYPASSED}
mark                    | tcp udp | mark=9 connect ask | served
kube-proxy's mark       | tcp udp | mark=16384 connect ask | served
route by mark           | tcp     | mark={NO_ROUTE} connect ask | {NO_WAY.format("EHOSTUNREACH", "timeout")} | {ONLY}
a route by mark         | udp     | mark={NO_ROUTE} connect ask | {NO_WAY.format(*["EHOSTUNREACH"] * 2)} | {ONLY}
a firewall of marks     | tcp     | mark={NO_RIGHT} connect ask | {NO_WAY.format(*["timeout"] * 2)} | {ONLY}
a firewall of marks     | udp     | mark={NO_RIGHT} connect ask | {NO_WAY.format(*["EPERM"] * 2)} | {ONLY}
zero copy               | tcp udp | zerocopy=1 connect send=zerocopy hear completed | served
fast open               | tcp     | fastopen hear close fastopen hear | served
fast open by connect    | tcp     | fastopen_connect=1 connect ask | served
segments                | udp     | segment=100 connect send=500 {"hear " * 5} | served
segments, unconnected   | udp     | segment=100 sendto=500 {"hear " * 5} | served
""",
)


class Client:
    """A process that makes a row's calls, each a method. `own`: the addresses that backends may see."""

    def __init__(self, number: int, own: tuple[str, ...], tcp: bool, patience: float) -> None:
        self.v6, self.tcp, self.own, self.number, self.patience = ":" in own[0], tcp, own, number, patience
        self.dials(number)
        self.open()

    def open(self) -> None:
        family = socket.AF_INET6 if self.v6 else socket.AF_INET
        self.s = socket.socket(family, socket.SOCK_STREAM if self.tcp else socket.SOCK_DGRAM)
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.s.settimeout(self.patience)

    def play(self, calls: str) -> str:
        """The outcome: an error, or what the calls have returned, each thing once."""
        said = []
        try:
            for call in calls.split():
                name, _, value = call.partition("=")
                act = getattr(self, name, None)
                said.append(act(value) if act else self.option(name, value))
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return errno.errorcode[error.errno]
        return " ".join(dict.fromkeys(filter(None, said)))

    def option(self, name: str, value: str) -> str:
        own = (socket.IPPROTO_IPV6, OPTIONS6) if self.v6 else (socket.IPPROTO_IP, OPTIONS4)
        at = OPTIONS.get(name) or (own[0], own[1][name])
        if not value:
            return str(self.s.getsockopt(*at))
        number = socket.if_nametoindex(value) if value == "eth0" else int(value)
        self.s.setsockopt(*at, struct.pack("!I" if name == "unicast_if" else "=I", number))
        return ""

    def dials(self, number: int | str) -> None:
        """Its Service; of that with all pods, the first that answers."""
        self.to, self.backend = (cluster_ip(int(number), self.v6), 80), "" if int(number) == ANY else f"s{number}"

    def dials_loopback(self, _: str) -> None:
        self.to = (LOOPBACK[self.v6], 30080 + self.number)

    def device(self, name: str) -> None:
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())

    def bind(self, to: str) -> None:
        address = {"own": self.own[0], "loopback": LOOPBACK[self.v6], "foreign": FOREIGN[self.v6]}.get(to)
        self.s.bind((address, 0) if address else ("", int(to)))

    def connect(self, _: str) -> None:
        self.s.connect(self.to)

    def send(self, size: str) -> None:
        self.s.send(line(size), 0 if size != "zerocopy" else MSG_ZEROCOPY)

    def sendto(self, size: str) -> None:
        self.s.sendto(line(size), self.to)

    def fastopen(self, _: str) -> None:
        self.s.sendto(line(), socket.MSG_FASTOPEN, self.to)

    def pktinfo(self, what: str) -> None:
        index = socket.if_nametoindex(what) if what == "eth0" else 0
        source = bytes(16) if index else socket.inet_pton(self.s.family, self.own[0])
        if self.v6:
            data = (socket.IPPROTO_IPV6, PKTINFO6, struct.pack("16sI", source, index))
        else:
            data = (socket.IPPROTO_IP, PKTINFO4, struct.pack("I4s4x", index, source))
        self.s.sendmsg([line()], [data], 0, self.to)

    def hear(self, _: str = "") -> str:
        """Who has answered, and what the backend and this socket see of each other that is wrong."""
        data, source = self.s.recvfrom(4096)
        answer = json.loads(data)
        self.backend = self.backend or answer["name"]
        who = "served" if answer["name"] == self.backend else "another backend"
        seen = "" if answer["client"] in self.own else f" as {answer['client']}"
        shown = (self.s.getpeername() if self.tcp else source)[:2]
        return who + seen + ("" if shown == self.to else f" by {shown}")

    def ask(self, _: str) -> str:
        self.send("")
        return self.hear()

    def errors(self, _: str) -> str:
        """What the error queue names as destination and as sender of the error."""
        _, [(_, _, data)], _, to = self.queued()
        sender = socket.inet_ntop(self.s.family, data[24:40] if self.v6 else data[20:24])
        return "Service" if (to[:2], sender) == (self.to, self.to[0]) else "backend"

    def completed(self, _: str) -> None:
        """Waits until the kernel has sent without copying."""
        self.queued()

    def queued(self) -> tuple:
        def read() -> tuple | None:
            try:
                return self.s.recvmsg(100, 200, socket.MSG_ERRQUEUE)
            except BlockingIOError:
                return None

        self.s.settimeout(0)
        return until("the error queue has an entry", read)

    def close(self, _: str) -> None:
        self.s.close()
        self.open()


def line(size: str = "") -> bytes:
    return b"x" * (int(size) - 1 if size.isdecimal() else 100) + b"\n"


CASES = [
    pytest.param(row, protocol, v6, id=f"{row.name}, {protocol} {'v6' if v6 else 'v4'}")
    for row in ROWS
    for protocol, v6 in product(row.protocols.split(), (False, True))
]


@pytest.mark.parametrize(("row", "protocol", "v6"), CASES)
def test_an_option_has_the_same_outcome(site: Site, row: Row, protocol: str, v6: bool):
    waits = {}
    for (index, side), who, where in product(enumerate(SIDES), ("host", "pod"), ("near", "far")):
        if where == "far" and "dials=" in row.calls:
            continue
        place, number = site[side, who], (index + (where == "far")) % len(SIDES) + 1
        own = (place.ip6 if v6 else place.ip, *((gate(index + 1, v6),) if who == "host" else ()))
        cell = (side, who, where, protocol, "v6" if v6 else "v4")
        outcomes = expected(row, cell)
        client = partial(Client, number, own, protocol == "tcp", WAIT if "timeout" in outcomes else PATIENCE)
        waits[cell, outcomes] = start_within(place, lambda client=client: client().play(row.calls))
    found = {" ".join(cell): (wait(), outcomes) for (cell, outcomes), wait in waits.items()}
    wrong = {cell: (was, wanted) for cell, (was, wanted) in found.items() if was not in wanted}
    assert not wrong


def expected(row: Row, cell: tuple[str, ...]) -> tuple[str, ...]:
    """The outcomes of which a cell of this row may have any."""
    outcome, *others = row.outcome.split("; ")
    for who, _, what in (other.partition(": ") for other in others):
        if {*who.split()} <= {*cell}:
            outcome = what
    return tuple(outcome.split(" or "))


def test_what_differs_is_documented():
    limits = Path("docs/limits.md").read_text()
    for row in ROWS:
        assert any(f"; {side}" in row.outcome for side in SIDES) == bool(row.limit), row
        assert f"\n- **{row.limit}" in limits, row
