"""The IPVS data plane on any kernel with nf_tables: its table, its addresses and its notes are
real, IPVS is a fake (tests/support/faults/fake_ipvs.py). What packets meet behind a virtual service
is tried in kernels that have IPVS: test_ipvs.py.
"""

import fcntl
import os
import re
import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from errno import ENOENT, EPERM, EROFS
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyroute2 import IPSet

from kbpf.agent.agent import Agent
from kbpf.checks import ipvs
from kbpf.checks.row import CheckRow
from kbpf.cli import app, cleanup
from kbpf.config.flags import FLAGS, FLAGS_BY_NAME
from kbpf.dataplane.ipvs import cleanup as ipvs_cleanup
from kbpf.dataplane.ipvs import ignored_settings, ruleset
from kbpf.dataplane.ipvs.drain import PreviousIpvsPlane
from kbpf.dataplane.ipvs.plan import Element, SetName
from kbpf.errors import KernelError
from kbpf.kernel.net import addresses, dummy
from kbpf.kernel.net.ipvs import (
    ConnectionTimeouts,
    IpvsClient,
    RealServerKey,
    VirtualServiceKey,
    VirtualServiceSettings,
)
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import modules, sandbox, sysctl
from kbpf.model.address import parse_addr
from kbpf.model.config import Accounting, IpvsTimeoutSettings, MapSizes, Serving, SocketLb
from kbpf.model.desired import ServiceState
from kbpf.model.objects import Protocol
from kbpf.takeover import conntrack_keepalive, detect
from kbpf.takeover.detect import Detection, Responder
from tests.support.faults.fake_ipvs import DEVICE, Node, fake_node, tcp
from tests.support.plane import service

__all__ = ["fake_node"]

VIP, VIP6, KUBE = "10.96.0.1", "fd00:96::1", conntrack_keepalive.KUBE_PROXY_DEVICE


# ---- after a kube-proxy --------------------------------------------------------------------------


def after_kube_proxy(node: Node) -> None:
    """One in mode ipvs has served these addresses, and a NodePort, and another one since gone."""
    node.run("ip", "link", "add", KUBE, "type", "bridge")
    for address in (VIP, VIP6, "10.96.0.9"):
        node.run("ip", "addr", "add", address, "dev", KUBE)
    node.run("ip", "addr", "add", "198.18.0.1/32", "dev", "lo")
    for frontend in (tcp(VIP, 80), tcp(VIP6, 80), tcp("10.96.0.9", 80), tcp("198.18.0.1", 30080)):
        node.ipvs.held[frontend] = (VirtualServiceSettings("rr"), {})


def test_what_kube_proxy_keeps_is_no_address_of_the_node(fake_node: Node):
    after_kube_proxy(fake_node)
    fake_node.start()
    assert fake_node.do(addresses.local_addresses) == tuple(
        sorted(map(parse_addr, (VIP, VIP6, "10.96.0.9", "198.18.0.1")))
    )
    only_own = fake_node.do(lambda: addresses.local_addresses(KUBE))
    assert only_own == (parse_addr("198.18.0.1"),)
    held = fake_node.do(lambda: fake_node.plane._kernel.read_node_addresses(()))
    assert held == set(map(parse_addr, ("198.18.0.1", "127.0.0.1", "::1")))


def test_mode_ipvs_takes_over_a_kube_proxy_of_mode_ipvs(fake_node: Node):
    """What it serves is its own from then on, and stays when kube-proxy's leftovers go."""
    node = fake_node
    after_kube_proxy(node)
    node.start()
    node.run("ip", "addr", "add", "198.18.0.1", "dev", KUBE)  # an ExternalIP, too
    states = [
        service("s", f"{VIP}:80 NodePort=0.0.0.0:30080", "10.244.1.2:80"),
        service("e", "10.96.0.3:80 ExternalIP=198.18.0.1:81", "10.244.1.3:80"),
        service("s6", f"[{VIP6}]:80", "[fd00:244::2]:80"),
    ]
    node.apply(*states, nodes="198.18.0.1")
    assert node.addresses() == {VIP, VIP6, "10.96.0.3"}
    node.do(lambda: list(cleanup.remove_kube_proxy(node.config, force=True)))
    assert KUBE not in node.links()
    assert node.ipvs.shown() == {
        f"{VIP}:80/6": {"10.244.1.2:80": 1},
        f"[{VIP6}]:80/6": {"[fd00:244::2]:80": 1},
        "198.18.0.1:30080/6": {"10.244.1.2:80": 1},
        "10.96.0.3:80/6": {"10.244.1.3:80": 1},
        "198.18.0.1:81/6": {"10.244.1.3:80": 1},
    }
    assert node.addresses() == {VIP, VIP6, "10.96.0.3"}
    assert node.do(lambda: dial(VIP, 80)) == "answered"


ITS_SETS = {
    "no sets": ({}, False, set()),
    "a NodePort in its set": ({"KUBE-NODE-PORT-TCP": 30080}, False, {"198.18.0.1:30080/6"}),
    "one of another protocol": ({"KUBE-NODE-PORT-UDP": 30080}, False, set()),
    "it runs": ({}, True, {"198.18.0.1:30080/6", "198.18.0.1:30081/6", "198.18.0.1:81/6"}),
}


@pytest.mark.parametrize(("sets", "runs", "stay"), ITS_SETS.values(), ids=ITS_SETS)
def test_what_a_kube_proxy_has_not_is_not_left_to_it(
    fake_node: Node, monkeypatch: pytest.MonkeyPatch,
    sets: dict[str, int], runs: bool, stay: set[str],
):  # fmt: skip
    """Its device is there still, with its addresses. It alone would never remove our NodePorts, and
    nobody could tell whose they are.
    """
    node = fake_node
    after_kube_proxy(node)
    node.start()
    known = service("s", f"{VIP}:80 NodePort=0.0.0.0:30080", "10.244.1.2:80")
    frontends = "10.96.0.3:80 NodePort=0.0.0.0:30081 ExternalIP=198.18.0.1:81"
    node.apply(known, service("o", frontends, "10.244.1.3:80"), nodes="198.18.0.1")
    node.plane.close()

    def fill() -> None:
        with IPSet() as face:
            for name, port in sets.items():
                face.create(name, "bitmap:port", bitmap_ports_range=(0, 65535))
                face.add(name, port, etype="port")

    node.do(fill)
    who = Responder.KUBE_PROXY if runs else Responder.UNKNOWN
    monkeypatch.setattr(
        detect, "detect", lambda: Detection((), False, {"127.0.0.1 port 10256": who})
    )
    clean(node)
    at_its_device = {f"{VIP}:80/6", f"[{VIP6}]:80/6", "10.96.0.9:80/6"}
    assert node.ipvs.shown().keys() == at_its_device | stay


def dial(address: str, port: int) -> str:
    """Who listens on all addresses of this network stands in for the backend."""
    with socket.create_server(("0.0.0.0", port)) as server, socket.socket() as client:
        client.settimeout(5)
        client.connect((address, port))
        server.accept()[0].close()
        return "answered"


def test_an_address_that_the_node_has_too_is_its_own(fake_node: Node):
    after_kube_proxy(fake_node)
    fake_node.run("ip", "addr", "add", VIP, "dev", "lo")
    fake_node.start()
    fake_node.apply(service("s", f"{VIP}:80", "10.244.1.2:80"))
    assert fake_node.addresses() == set()


# ---- marks of short circuits ---------------------------------------------------------------------

NODE, A = "198.18.0.1", "10.244.1.2:80"
LOCAL = {"external_local": True}
MARKED = {
    "a NodePort alone": [service("p", f"{VIP}:80 NodePort=0.0.0.0:30080", A, **LOCAL)],
    "IPv6": [service("p", f"[{VIP6}]:80 NodePort=[::]:30080", "[fd00:244::2]:80", **LOCAL)],
    "both families, TCP and UDP": [
        service("p4", f"{VIP}:80 NodePort=0.0.0.0:30080", A, **LOCAL),
        service("p6", f"[{VIP6}]:80 NodePort=[::]:30080", "[fd00:244::2]:80", **LOCAL),
        service("u4", f"{VIP}:80 NodePort=0.0.0.0:30080", A, Protocol.UDP, **LOCAL),
    ],
    "an exact frontend meets a NodePort": [
        service("exact", f"10.96.0.2:30080 ExternalIP={NODE}:30080", "10.244.1.3:80", **LOCAL),
        service("a", f"{VIP}:80 NodePort=0.0.0.0:30080", A, **LOCAL),
    ],
    "it has a lower name": [
        service("exact", f"10.96.0.2:30080 ExternalIP={NODE}:30080", "10.244.1.3:80", **LOCAL),
        service("z", f"{VIP}:80 NodePort=0.0.0.0:30080", A, **LOCAL),
    ],
    "all kinds": [
        service("all", f"{VIP}:80 NodePort=0.0.0.0:30080 LoadBalancer=192.0.2.1:80"
                " ExternalIP=192.0.2.2:80", A, **LOCAL),
        service("other", "10.96.0.2:80 LoadBalancer=192.0.2.3:80", A, **LOCAL),
    ],
}  # fmt: skip
NODES = f"{NODE} 198.18.0.2 fd00:18::1"


@pytest.mark.parametrize("sound", [True, False], ids=["sound", "unsound"])
@pytest.mark.parametrize("states", MARKED.values(), ids=MARKED)
def test_a_restart_changes_no_mark(fake_node: Node, states: list[ServiceState], sound: bool):
    """Connections end with their virtual service."""
    node = fake_node
    node.run("ip", "addr", "add", f"{NODE}/32", "dev", "lo")
    node.start()
    node.apply(*states, nodes=NODES)
    before = listed(node), dict(node.ipvs.held)
    assert sum("mark" in str(one) for one in node.ipvs.held) == len(states)
    for _ in range(2):
        node.start()
        assert node.apply(*reversed(states), nodes=NODES, sound=sound).writes == {}
        assert (listed(node), node.ipvs.held) == before


def test_what_stands_elsewhere_in_the_end_takes_its_mark_along(fake_node: Node):
    """While no agent was there an address of the node has come, another one has gone, and two
    Services have got a frontend of others': an exact one, and a NodePort.
    """
    node = fake_node
    p, q, r, s = ("p", f"{VIP}:80"), ("q", f"{VIP}:81"), ("r", f"{VIP}:82"), ("s", f"{VIP}:83")
    lb, other, last = (f"LoadBalancer=192.0.2.1:{port}" for port in (80, 82, 83))
    before = {p: "NodePort=0.0.0.0:30080", q: f"NodePort=0.0.0.0:30081 {lb}",
              r: f"NodePort=0.0.0.0:30082 {other}", s: last}  # fmt: skip
    after = {p: f"NodePort=0.0.0.0:30080 {lb}", q: "NodePort=0.0.0.0:30081",
             r: other, s: f"NodePort=0.0.0.0:30082 {last}"}  # fmt: skip
    old, new = (
        [service(name, f"{at} {more}", A, **LOCAL) for (name, at), more in some.items()]
        for some in (before, after)
    )
    node.start()
    node.apply(*old, nodes=f"{NODE} 198.18.0.2")
    had = [marks(node, port) for port in (30080, 30081, 82, 83)]
    assert len(set[int]().union(*had)) == 4
    for sound in (False, True):
        node.start()
        node.apply(*new, nodes="198.18.0.2 198.18.0.3", sound=sound)
        assert [marks(node, port) for port in (30080, 30081, 82, 83)] == had
        assert marks(node, 80) == had[0]
        stays = set() if sound else had[2]  # at the address that has gone
        assert marks(node, 30082) == had[3] | stays
        assert {one.fwmark for one in node.ipvs.held} == {0}.union(*had)


class End(NamedTuple):
    """What becomes of a Service with a short circuit to A and B, one connection to A by which is
    left. Weights: of the servers of the virtual service by mark as long as it is there, and once it
    is idle; None: it has gone.
    """

    name: str
    after: ServiceState | None
    busy: dict[str, int] | None
    idle: dict[str, int] | None = None


B = "10.244.1.3:80"
FRONTENDS = f"{VIP}:80 NodePort=0.0.0.0:30080 LoadBalancer=192.0.2.1:80"
UDP = Protocol.UDP
BOTH_GO = service("m", FRONTENDS, f"{A} {B}", **LOCAL)
BOTH_GO_UDP = service("m", FRONTENDS, f"{A} {B}", UDP, **LOCAL)
ENDS = [
    End("all go on", BOTH_GO, {A: 1, B: 1}, {A: 1, B: 1}),
    End("one endpoint is left", service("m", FRONTENDS, B, **LOCAL), {A: 0, B: 1}, {B: 1}),
    End("no endpoint is left", service("m", FRONTENDS, **LOCAL), {A: 0}, {}),
    End("none that is ready", service("m", FRONTENDS, serving=A, **LOCAL), {A: 0}, {}),
    End("Cluster now", service("m", FRONTENDS, f"{A} {B}"), {A: 1, B: 1}),
    End("Cluster now, and others", service("m", FRONTENDS, B), {A: 0, B: 1}),
    End("Cluster now, and none", service("m", FRONTENDS), {A: 0}),
    End("Cluster now, at another port",
        service("m", f"{VIP}:80 NodePort=0.0.0.0:30089 LoadBalancer=192.0.2.1:80", A),
        {A: 1}),
    End("a ClusterIP alone", service("m", f"{VIP}:80", f"{A} {B}"), None),
    End("deleted", None, None),
    End("UDP, Cluster now", service("m", FRONTENDS, f"{A} {B}", UDP), {A: 1, B: 1}),
    End("UDP, one stops serving", service("m", FRONTENDS, B, UDP, **LOCAL), {B: 1}, {B: 1}),
    End("UDP, Cluster now, and it stops serving", service("m", FRONTENDS, B, UDP), None),
    End("UDP, one serves on", service("m", FRONTENDS, B, UDP, serving=f"{A} {B}", **LOCAL),
        {A: 0, B: 1}, {B: 1}),
    End("UDP, none serves", service("m", FRONTENDS, "", UDP, **LOCAL), {}, {}),
]  # fmt: skip


@pytest.mark.parametrize("restart", [False, True], ids=["", "and a restart"])
@pytest.mark.parametrize("row", ENDS, ids=lambda row: row.name)
def test_connections_by_a_mark_outlive_its_endpoints_and_its_policy(
    fake_node: Node, row: End, restart: bool
):
    """As those by other virtual services do, across a restart too: which ends none, and begins with
    the same or with other things wanted.
    """
    node = fake_node
    before = BOTH_GO_UDP if row.name.startswith("UDP") else BOTH_GO
    first = () if row.after is None else (row.after,)
    node.start()
    node.apply(*first, nodes=NODE)
    goal = without_marks(node)
    for anew in (False, True):
        node.apply(before, nodes=NODE)
        assert at_mark(node) == {A: 1, B: 1}
        (one,) = (one for one in node.ipvs.held if one.fwmark)
        (server,) = (end for end in node.ipvs.held[one][1] if str(end) == A)
        node.ipvs.connections[one, server] = (0, 1)
        if anew:
            node.start()
        node.apply(*first, nodes=NODE)
        if restart:
            node.start()
            node.apply(*first, nodes=NODE)
        for _ in range(2):
            node.tick()
            node.plane.invalidate()
            node.apply(*first, nodes=NODE)
            assert at_mark(node) == row.busy
            assert {other.fwmark for other in node.ipvs.held} <= {0, one.fwmark}
            assert without_marks(node) == goal
        node.ipvs.connections.clear()
        node.tick()
        node.apply(*first, nodes=NODE)
        assert at_mark(node) == row.idle
        names = {name for name, _ in read(node)}
        assert (row.idle is None) == names.isdisjoint((SetName.FWMARKS, SetName.OWN_FWMARKS))


def test_a_policy_that_is_local_again_finds_its_mark(fake_node: Node):
    """Also when it comes while an older connection goes on."""
    node = fake_node
    node.start()
    for _ in range(2):
        node.apply(BOTH_GO, nodes=NODE)
        (one,) = (one for one in node.ipvs.held if one.fwmark)
        (server, _) = node.ipvs.held[one][1]
        node.ipvs.connections[one, server] = (1, 0)
        node.apply(service("m", FRONTENDS, A), nodes=NODE)
        node.tick()
        node.apply(BOTH_GO, nodes=NODE, touched=[BOTH_GO.key])
        node.tick()
        assert marks(node, 30080) == {one.fwmark}
        node.ipvs.connections.clear()
        node.tick()
        assert at_mark(node) == {A: 1, B: 1}


def at_mark(node: Node) -> dict[str, int] | None:
    """The weights of the servers of the one virtual service that is by mark; None without one."""
    found = [servers for one, servers in node.ipvs.shown().items() if "mark" in one]
    assert len(found) < 2
    return found[0] if found else None


def without_marks(node: Node) -> frozenset[Element]:
    """Where new connections are led."""
    return frozenset(
        (name, parts[:-1] if name is SetName.SHORT_CIRCUITS else parts)
        for name, parts in read(node)
        if name not in (SetName.FWMARKS, SetName.OWN_FWMARKS)
    )


def marks(node: Node, port: int) -> set[int]:
    """Those that lead to short circuits at this port."""
    return {
        int(str(parts[3]))
        for name, parts in read(node)
        if name is SetName.SHORT_CIRCUITS and parts[2] == port
    }


def read(node: Node) -> frozenset[Element]:
    """All elements of the table."""
    return node.do(lambda: ipvs_cleanup.read_elements(node.config.nft_table)) or frozenset()


# ---- what others do to the table -----------------------------------------------------------------

WEB = service("web", f"{VIP}:80", "10.244.1.2:80")
EMPTY = service("empty", "10.96.0.2:80")

FLUSHES = {
    "all rules": "flush ruleset",
    "the table": "delete table inet kbpf",
    "the table, and another one has its name": "delete table inet kbpf; add table inet kbpf",
    "its rules": "flush table inet kbpf",
    "a chain's rules": "flush chain inet kbpf postrouting",
    "a chain and a set": "flush chain inet kbpf postrouting; delete chain inet kbpf postrouting; "
    "flush set inet kbpf hairpin_ips4; delete set inet kbpf hairpin_ips4",
}


def listed(node: Node) -> list[str]:
    """All lines; sets and chains may be in any order."""
    return sorted(node.run("nft", "list", "table", "inet", "kbpf").splitlines())


@pytest.mark.parametrize("flush", FLUSHES.values(), ids=FLUSHES)
def test_what_others_take_away_is_made_anew(fake_node: Node, flush: str):
    fake_node.start()
    fake_node.apply(WEB, EMPTY)
    fake_node.tick()
    before = listed(fake_node)
    fake_node.run("nft", flush)
    fake_node.tick()
    assert listed(fake_node) == before


def test_a_flush_before_the_first_look_is_made_anew_too(fake_node: Node):
    fake_node.start()
    fake_node.apply(WEB, EMPTY)
    before = listed(fake_node)
    fake_node.run("nft", "flush", "table", "inet", "kbpf")
    fake_node.tick()
    assert listed(fake_node) == before


class Said:
    """What libnftables is asked from here on: verbs with what they are about."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.words: Counter[str] = Counter()
        real = forward_rules.run_transaction

        def transaction(*commands: Any, **more: Any) -> Any:
            for command in commands:
                for verb, what in command.items():
                    self.words[f"{verb} {next(iter(what))}"] += 1
            return real(*commands, **more)

        patch.setattr(forward_rules, "run_transaction", transaction)

    def take(self) -> dict[str, int]:
        """And begins anew."""
        words, self.words = self.words, Counter()
        return dict(words)


def test_a_change_costs_what_has_changed(fake_node: Node, monkeypatch: pytest.MonkeyPatch):
    """Whatever else there is: nothing is listed, neither for a change of ours, nor after it, nor
    when somebody has changed another table.
    """
    node = fake_node
    node.start()
    many = [service(f"m{i}", f"10.96.1.{i}:80", f"10.244.2.{i}:80") for i in range(1, 101)]
    node.apply(*many)
    node.tick()
    said = Said(monkeypatch)
    node.ipvs.calls.clear()
    new = service("m1", "10.96.1.1:80", "10.244.2.1:80 10.244.3.1:80")
    report = node.apply(new, *many[1:], touched=[new.key])
    assert (dict(report.writes), report.syscalls) == ({"nft": 1, "ipvs": 1}, 2)
    assert said.take() == {"add element": 1}
    assert node.ipvs.calls == {"changes": 1}
    node.tick()
    assert said.take() == {}
    node.run("nft", "add", "table", "inet", "theirs")
    node.tick()
    assert said.take() == {"list chains": 1}
    node.tick()
    assert said.take() == {}
    assert node.ipvs.calls == {"changes": 1}


def test_elements_that_others_take_away_come_back_when_all_is_read_again(fake_node: Node):
    fake_node.start()
    fake_node.apply(WEB, EMPTY)
    before = listed(fake_node)
    fake_node.run("nft", "flush", "set", "inet", "kbpf", "served4")
    fake_node.plane.invalidate()
    fake_node.apply(WEB, EMPTY)
    assert listed(fake_node) == before


def test_the_whole_table_is_as_many_rules_as_are_written(fake_node: Node):
    style = fake_node.start()._options
    assert sum("rule" in command.get("add", {}) for command in ruleset.create_table(style)) > 50
    assert fake_node.do(fake_node.plane._kernel.is_table_intact)


def test_flushed_virtual_services_come_back(fake_node: Node):
    """And IPVS is spoken to anew: with its module loaded again it has another number."""
    fake_node.start()
    fake_node.apply(WEB, EMPTY)
    fake_node.tick()
    before, opened = fake_node.ipvs.shown(), fake_node.ipvs.calls["opened"]
    fake_node.ipvs.held.clear()
    fake_node.tick()
    assert fake_node.ipvs.shown() == before
    assert fake_node.ipvs.calls["opened"] == opened + 1


# ---- settings ------------------------------------------------------------------------------------

TIMES = [
    (IpvsTimeoutSettings(), ConnectionTimeouts(900, 120, 300)),
    (IpvsTimeoutSettings(tcp=86_400), ConnectionTimeouts(86_400, 120, 300)),
    (IpvsTimeoutSettings(7200, 60, 10), ConnectionTimeouts(7200, 60, 10)),
]


@pytest.mark.parametrize(("asked", "there"), TIMES)
def test_idle_connections_are_kept_as_long_as_is_asked(
    fake_node: Node, asked: IpvsTimeoutSettings, there: ConnectionTimeouts
):
    fake_node.start(replace(fake_node.config, ipvs_times=asked))
    assert fake_node.ipvs.times == there


VS = {
    "net.ipv4.vs.conntrack": "1",
    "net.ipv4.vs.expire_nodest_conn": "1",
    "net.ipv4.vs.expire_quiescent_template": "1",
}
ARP = {"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}


@pytest.mark.parametrize(("strict", "wanted"), [(False, VS), (True, VS | ARP)])
def test_what_is_set_below_proc(
    fake_node: Node, monkeypatch: pytest.MonkeyPatch, strict: bool, wanted: dict[str, str]
):
    """This kernel has no net.ipv4.vs. What is as it should be is not written."""
    there = dict.fromkeys(VS | ARP, "0") | {"net.ipv4.vs.conntrack": "1"}
    written: dict[str, str] = {}
    monkeypatch.setattr(sysctl, "read", lambda name: there.get(name, "1"))
    monkeypatch.setattr(sysctl, "write", written.__setitem__)
    fake_node.start(replace(fake_node.config, strict_arp=strict))
    assert there | written == there | wanted
    assert "net.ipv4.vs.conntrack" not in written
    assert fake_node.plane.problems() == ()


def test_what_cannot_be_set_is_said_once_and_keeps_nothing_from_serving(
    fake_node: Node, monkeypatch: pytest.MonkeyPatch
):
    """A container's /proc/sys cannot be written."""

    def write(name: str, value: str) -> None:
        raise KernelError(f"cannot set {name} to {value}", "/proc/sys", errno=EROFS)

    monkeypatch.setattr(sysctl, "read", lambda _: "0")
    monkeypatch.setattr(sysctl, "write", write)
    fake_node.start()
    fake_node.apply(WEB)
    said = fake_node.plane.problems()
    assert sum("net.ipv4.vs." in line for line in said) == len(VS)
    assert len(said) == len(set(said))
    assert VIP in fake_node.addresses()


# ---- what is said at the start ---------------------------------------------------------------

WALLS = {
    "none": ("table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; "
             "}; }", ()),
    "INPUT": ("table inet fw { chain in { type filter hook input priority 0; policy drop; }; }",
              ("INPUT is closed by inet fw in",)),
    "FORWARD": ("table inet fw { chain on { type filter hook forward priority 0; policy drop; }; }",
                ("FORWARD is closed by inet fw on, which is not touched; let packets with mark "
                 "0x4000 pass there",)),
    "both": ("table inet fw { chain in { type filter hook input priority 0; drop; }; "
             "chain on { type filter hook forward priority 0; policy drop; }; }",
             ("FORWARD is closed by inet fw on", "INPUT is closed by inet fw in")),
}  # fmt: skip


@pytest.mark.parametrize(("table", "lines"), WALLS.values(), ids=WALLS)
def test_firewalls_that_cut_it_off_are_told_at_the_start_and_when_they_change(
    fake_node: Node, caplog: pytest.LogCaptureFixture, table: str, lines: tuple[str, ...]
):
    """Once each, until they go and come again; what stands in the status is what is so now."""
    node, logged = fake_node, lambda: told(caplog.messages)
    node.run("nft", table)
    node.start()
    assert beginnings(logged(), lines)
    node.apply(WEB)
    for _ in range(2):
        node.run("nft", "add table inet somebody; delete table inet somebody")
        node.tick()
    assert beginnings(logged(), lines)
    assert beginnings(told(node.plane.problems()), lines)
    name = table.split("{", maxsplit=1)[0].strip()
    node.run("nft", "delete", *name.split())
    node.tick()
    assert told(node.plane.problems()) == []
    node.run("nft", table)
    node.tick()
    assert beginnings(logged(), lines * 2)


def told(lines: Iterable[str]) -> list[str]:
    """Those about firewalls."""
    return [line for line in lines if re.match("INPUT is|FORWARD is closed by|iptables-", line)]


def beginnings(lines: list[str], wanted: tuple[str, ...]) -> bool:
    """Whether they begin so, one by one."""
    return len(lines) == len(wanted) and all(map(str.startswith, lines, wanted))


def test_a_filter_table_of_the_old_iptables_is_told(
    fake_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "names").write_text("filter\n")
    monkeypatch.setitem(forward_rules.LEGACY_TABLE_NAMES, "ip", tmp_path / "names")
    fake_node.start()
    forward, inputs = told(fake_node.plane.problems())
    assert "for ip, which is not looked at; if its FORWARD drops" in forward
    assert "if its INPUT drops" in inputs


IDLE: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"socket_lb": SocketLb.OFF}, "--socket-lb"),
    ({"forwarding": "direct", "accounting": Accounting.FULL}, "--forwarding, --accounting"),
    ({"sizes": MapSizes(frontends=1000, counts=1)}, "--max-frontends, --max-counts"),
    ({"serving": Serving(backend_series=5)}, "--metrics-backends"),
    ({"packet_path": False, "devices": ("eth0",)}, "--packet-path, --device"),
    ({"masquerade_all": True, "ipvs_scheduler": "lc", "strict_arp": True}, ""),
]


@pytest.mark.parametrize(("given", "names"), IDLE, ids=[row[1] or str(row[0]) for row in IDLE])
def test_settings_that_do_nothing_here_are_named_once(
    fake_node: Node, caplog: pytest.LogCaptureFixture, given: dict[str, Any], names: str
):
    caplog.set_level("INFO")
    fake_node.start(replace(fake_node.config, **given))
    fake_node.apply(WEB)
    fake_node.tick()
    line = f"settings without effect in mode ipvs: {names} (docs/ipvs.md)"
    assert [one for one in caplog.messages if "without effect" in one] == ([line] if names else [])


def test_the_settings_that_do_nothing_have_the_names_of_their_flags():
    for field, name in ignored_settings.IGNORED_SETTINGS.items():
        assert FLAGS_BY_NAME[name].field == field
    sizes = {flag.name for flag in FLAGS if flag.field.startswith("sizes.")}
    assert sizes <= set(ignored_settings.IGNORED_SETTINGS.values())


# ---- what kbpf check says ------------------------------------------------------------------------

HOOK = "type filter hook input priority 0"
FIREWALLS = {
    "nobody's": ("table inet fw { chain in { type filter hook forward priority 0; }; }", ""),
    "open": (f"table inet fw {{ chain in {{ {HOOK}; }}; }}", ""),
    "closed": (f"table inet fw {{ chain in {{ {HOOK}; policy drop; }}; }}", "inet fw in"),
    "its last rule": (f"table ip fw {{ chain in {{ {HOOK}; tcp dport 22 accept; reject; }}; }}",
                      "ip fw in"),
}  # fmt: skip


def said(node: Node, name: str) -> CheckRow:
    (row,) = node.do(lambda: [one for one in ipvs.rows() if one.name == name])
    return row


@pytest.mark.parametrize(("table", "closed"), FIREWALLS.values(), ids=FIREWALLS)
def test_a_closed_input_is_said(fake_node: Node, table: str, closed: str):
    """Packets to Services would not get to IPVS. Our own chains are no such thing."""
    fake_node.start()
    fake_node.run("nft", table)
    row = said(fake_node, "INPUT")
    assert (row.result, row.needed, row.ipvs) == ("no" if closed else "yes", False, False)
    assert row.detail == (f"closed: {closed}" if closed else "")
    assert bool(row.advice) is bool(closed)


NEEDS_SCHEDULER = "IPVS scheduler rr"
TRIED = [
    ("IPVS", {}, "yes", ""),
    (NEEDS_SCHEDULER, {}, "yes", "loaded"),
    ("dummy devices", {}, "yes", "loaded"),
    ("IPVS scheduler mh", {"without": "mh"}, "no", "no module ip_vs_mh"),
    ("IPVS", {"ipvs": False}, "no", "no modprobe is installed here"),
    (NEEDS_SCHEDULER, {"ipvs": False}, "unknown", "no modprobe to ask"),
    (NEEDS_SCHEDULER, {"sandbox": False}, "unknown", "no modprobe to ask"),
    ("dummy devices", {"sandbox": False}, "unknown", "no modprobe to ask"),
    (NEEDS_SCHEDULER, {"sandbox": False, "loaded": "ip_vs_rr"}, "yes", ""),
]


@pytest.mark.parametrize(("name", "case", "result", "detail"), TRIED)
def test_where_modprobe_is_missing_modules_are_tried(
    fake_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, case: dict[str, Any], result: str, detail: str,
):  # fmt: skip
    """As in our own image: the kernel loads by itself what is asked for."""

    def broken(*_: Any) -> Any:
        raise KernelError("cannot make a network namespace", errno=ENOENT)

    monkeypatch.setattr(modules, "find_modprobe", lambda: None)
    monkeypatch.setattr(modules, "SYS_MODULE", tmp_path)
    (tmp_path / case.get("loaded", "another")).mkdir()
    missing = case.get("without")
    fake_node.ipvs.refuse = lambda c: ENOENT if c.settings and c.settings[0] == missing else 0
    if not case.get("ipvs", True):
        monkeypatch.setattr(IpvsClient, "__init__", broken)
    if not case.get("sandbox", True):
        monkeypatch.setattr(sandbox, "run", broken)
    row = said(fake_node, name)
    assert (row.result, detail in row.detail) == (result, True)
    assert bool(row.advice) is (result == "no")
    assert (fake_node.ipvs.held, fake_node.links()) == ({}, set()), "tried elsewhere"


NFCT = [
    ("it is not there", {"net.ipv4.vs.expire_nodest_conn": "0"}, "no"),
    ("all are there", VS, "yes"),
    ("IPVS is not loaded, or hidden", {}, "unknown"),
]


@pytest.mark.parametrize(("name", "settings", "result"), NFCT, ids=[row[0] for row in NFCT])
def test_ipvs_without_conntrack_masquerades_nobody(
    fake_node: Node, monkeypatch: pytest.MonkeyPatch,
    name: str, settings: dict[str, str], result: str,
):  # fmt: skip
    """Which an agent must not only mention."""

    def read(setting: str) -> str:
        if setting.startswith("net.ipv4.vs.") and setting not in settings:
            raise KernelError(f"cannot read the setting {setting}", "/proc/sys", errno=ENOENT)
        return "1"

    monkeypatch.setattr(sysctl, "read", read)
    row = said(fake_node, "IPVS with conntrack")
    assert (row.result, row.ipvs, "CONFIG_IP_VS_NFCT" in row.advice) == (
        result, True, result == "no",
    )  # fmt: skip
    if result == "no":
        with pytest.raises(KernelError, match=r"cannot masquerade.*CONFIG_IP_VS_NFCT.*mode bpf"):
            fake_node.start()
        assert (fake_node.links(), fake_node.tables()) == (set(), set())
    else:
        fake_node.start()


def test_nf_tables_that_cannot_be_spoken_to_are_missing(
    fake_node: Node, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        forward_rules, "probe_nf_tables", lambda: Probe(None, "python3-nftables is missing")
    )
    row = said(fake_node, "nf_tables")
    assert (row.result, row.advice.split(";")[0]) == ("no", "install python3-nftables")


BRIDGES = [
    ("", None, "yes", "no bridge on this node"),
    ("br0/bridge", None, "no", "br_netfilter is not loaded"),
    ("br0/bridge", "0", "no", "bridge-nf-call-iptables is 0"),
    ("br0/bridge", "1", "yes", "bridge-nf-call-iptables is 1"),
]


@pytest.mark.parametrize(("bridge", "calls", "result", "detail"), BRIDGES)
def test_answers_that_go_by_a_bridge_are_said(
    fake_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    bridge: str, calls: str | None, result: str, detail: str,
):  # fmt: skip
    setting = tmp_path / ipvs.BRIDGE_NF_CALL_IPTABLES.name
    (tmp_path / "net" / bridge).mkdir(parents=True)
    if calls is not None:
        setting.write_text(f"{calls}\n")
    monkeypatch.setattr(ipvs, "SYS_CLASS_NET", tmp_path / "net")
    monkeypatch.setattr(ipvs, "BRIDGE_NF_CALL_IPTABLES", setting)
    row = said(fake_node, "bridged replies")
    assert (row.result, row.detail) == (result, detail)


# ---- what others have by our names ---------------------------------------------------------------

TABLE = "inet kbpf"
DEVICES = {
    "of another kind": f"link add {DEVICE} type veth peer name other",
    "with addresses": f"link add {DEVICE} type bridge\naddr add 192.0.2.7/32 dev {DEVICE}",
    "somebody's": f"link add {DEVICE} type bridge\nlink set {DEVICE} alias somebody",
}
CHAINS = "{ chain input { type filter hook input priority 0; tcp dport 23 drop; }; }"
TABLES = {
    "a chain of ours": f"table {TABLE} {CHAINS}",
    "a set of ours": f"table {TABLE} {{ set served4 {{ type ipv4_addr; }}; }}",
}


def remains(node: Node) -> bool:
    """Whether the next agent of mode bpf finds something of mode ipvs."""
    found = PreviousIpvsPlane(node.config)
    try:
        return node.do(found.claim)
    finally:
        found.close()


def clean(node: Node) -> list[str]:
    """What `kbpf cleanup` says of it."""
    return [one.path for one in node.do(lambda: list(cleanup.remove_ipvs(node.config)))]


@pytest.mark.parametrize("made", DEVICES.values(), ids=DEVICES)
def test_a_device_of_others_is_left_alone(fake_node: Node, made: str):
    fake_node.run("ip", "-batch", "-", stdin=made)
    before = fake_node.run("ip", "-d", "addr", "show", "dev", DEVICE)
    with pytest.raises(KernelError, match=rf"kbpf did not create.*{DEVICE}.*--ipvs-device"):
        fake_node.start()
    shutil.rmtree(fake_node.folder)
    assert not remains(fake_node)
    assert clean(fake_node) == []
    assert fake_node.run("ip", "-d", "addr", "show", "dev", DEVICE) == before


@pytest.mark.parametrize("name", conntrack_keepalive.SERVICE_DEVICES)
def test_a_name_that_stands_for_another_is_refused(fake_node: Node, name: str):
    """What is on such a device is taken for another's, and removed with it."""
    with pytest.raises(KernelError, match=f"another data plane.*{name}.*--ipvs-device"):
        fake_node.start(replace(fake_node.config, ipvs_device=name))
    assert fake_node.links() == set()


@pytest.mark.parametrize("made", TABLES.values(), ids=TABLES)
def test_a_table_of_others_is_left_alone(fake_node: Node, made: str):
    fake_node.run("nft", made)
    before = listed(fake_node)
    with pytest.raises(KernelError, match=f"kbpf did not create.*{TABLE}.*--nft-table"):
        fake_node.start()
    assert clean(fake_node) == [f"device {DEVICE}"]
    assert listed(fake_node) == before


def test_a_table_of_others_that_comes_later_is_an_error(fake_node: Node):
    fake_node.start()
    fake_node.apply(WEB)
    fake_node.run("nft", f"delete table {TABLE}; add {TABLES['a chain of ours']}")
    before = listed(fake_node)
    with pytest.raises(KernelError, match="kbpf did not create"):
        fake_node.tick()
    for _ in range(2):
        with pytest.raises(KernelError, match="kbpf did not create"):
            fake_node.apply(WEB)
    assert listed(fake_node) == before


def test_what_is_empty_is_nobodys(fake_node: Node):
    """We may have been killed before we wrote on it."""
    fake_node.run("ip", "link", "add", DEVICE, "type", "bridge")
    fake_node.run("nft", "add", "table", *TABLE.split())
    fake_node.start()
    assert f"alias {dummy.ALIAS}" in fake_node.run("ip", "link", "show", DEVICE)
    fake_node.start()


LEFT = {
    "all": "",
    "the table": f"ip link del {DEVICE}",
    "the device": f"nft delete table {TABLE}",
}


@pytest.mark.parametrize("gone", LEFT.values(), ids=LEFT)
def test_what_is_left_is_found_without_a_folder(fake_node: Node, gone: str):
    """That may have been a container's, or of the time before a boot."""
    fake_node.start()
    fake_node.apply(WEB)
    fake_node.plane.close()
    shutil.rmtree(fake_node.folder)
    if gone:
        fake_node.run(*gone.split())
    assert remains(fake_node)
    shutil.rmtree(fake_node.folder)
    assert clean(fake_node)
    assert (fake_node.links(), fake_node.tables()) == (set(), set())
    assert not fake_node.ipvs.held
    assert not fake_node.folder.exists()
    assert not remains(fake_node)


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "forced"])
def test_nothing_is_removed_beside_an_agent_that_runs(
    fake_node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str], force: tuple[str, ...]
):
    """It would make all anew within seconds, with its lock on a folder that is gone."""
    node = fake_node
    node.run("nft", "add table ip filter; add chain ip filter FORWARD "
             "{ type filter hook forward priority 0; policy drop; }")  # fmt: skip
    node.start()
    node.apply(WEB)
    node.tick()

    def there() -> tuple[Any, ...]:
        rules_ = sorted(node.run("nft", "list", "ruleset").splitlines())
        return rules_, node.addresses(), node.ipvs.shown(), folders(node)

    before = there()
    assert "kbpf: masqueraded" in "".join(before[0])
    where = {"--pin-dir": tmp_path / "pins", "--ipvs-device": DEVICE, "--state-dir": node.folder}
    words = ["cleanup", *force, *(str(one) for pair in where.items() for one in pair)]
    assert node.do(lambda: app.call(words)) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "nothing was removed: an agent in mode ipvs is running" in err
    assert "--force does not help" in err
    assert there() == before
    node.plane.close()
    assert node.do(lambda: app.call(words)) == 0
    assert (node.links(), node.tables()) == (set(), {"ip filter"})
    assert not node.ipvs.held


def test_a_state_folder_of_another_user_is_refused(fake_node: Node):
    """/run/kbpf may be anywhere (--state-dir): who makes the folder first could hold its lock."""
    folder = fake_node.folder / DEVICE
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    with pytest.raises(KernelError, match="cannot trust the folder: uid 65534 owns it") as error:
        fake_node.start()
    assert str(folder) in str(error.value)
    assert (fake_node.links(), fake_node.tables()) == (set(), set()), "nothing is made"
    folder.rmdir()
    fake_node.start()
    assert folder.stat().st_mode & 0o7777 == 0o700


# ---- other names after a restart -----------------------------------------------------------------

OTHER_DEVICE, OTHER_TABLE = "kbpf-test1", "other"
RENAMED = {
    "the table": {"nft_table": OTHER_TABLE},
    "the device": {"ipvs_device": OTHER_DEVICE},
    "both": {"nft_table": OTHER_TABLE, "ipvs_device": OTHER_DEVICE},
}
GONE = service("gone", "10.96.0.7:80", "10.244.1.7:80")


def folders(node: Node) -> set[str]:
    return {path.name for path in node.folder.iterdir()}


@pytest.mark.parametrize("names", RENAMED.values(), ids=RENAMED)
def test_what_has_another_name_goes_when_the_new_one_serves(fake_node: Node, names: dict[str, str]):
    """Not before: not at a start that knows of half of the Services only. What is wanted still is
    never removed.
    """
    node = fake_node
    node.run("ip", "addr", "add", "198.18.0.1/32", "dev", "lo")
    node.start()
    node.apply(WEB, GONE)
    before = (node.links(), node.tables(), folders(node))
    node.start(replace(node.config, **names))
    node.ipvs.refuse = lambda change: EPERM if change.service == tcp(VIP, 80) else 0
    device, table = node.config.ipvs_device, f"inet {node.config.nft_table}"
    node.apply(WEB, sound=False)
    node.tick()
    both = (node.links(), node.tables(), folders(node))
    for old, new, mine in zip(before, both, ({device}, {table}, {device}), strict=True):
        assert new == old | mine
    assert node.addresses(device) >= {VIP}
    node.apply(WEB)
    node.tick()
    assert (node.links(), node.tables(), folders(node)) == ({device}, {table}, {device})
    assert node.addresses(device) == {VIP}
    assert node.ipvs.shown() == {f"{VIP}:80/6": {"10.244.1.2:80": 1}}
    assert node.do(lambda: dial(VIP, 80)) == "answered"


def test_addresses_of_a_former_device_are_none_of_the_node(fake_node: Node):
    """IPv6 ones look like the node's own. Those of somebody's dummy device are."""
    node = fake_node
    node.run("ip", "link", "add", "theirs", "type", "bridge")
    node.run("ip", "addr", "add", "fd00:99::1/128", "dev", "theirs")
    node.start()
    node.apply(service("s6", f"[{VIP6}]:80", "[fd00:244::2]:80"))
    assert node.addresses() == {VIP6}
    for device in (DEVICE, OTHER_DEVICE):
        agent = Agent(replace(node.config, ipvs_device=device), node.plane, lambda _: ())
        assert node.do(agent._read_node_addresses) == (parse_addr("fd00:99::1"),)


@pytest.mark.parametrize("names", RENAMED.values(), ids=RENAMED)
def test_marks_go_on_under_another_name(fake_node: Node, names: dict[str, str]):
    """Packets that the former table has marked meet the same Service as before, and no other,
    also as long as not all is known; connections by a mark go on.
    """
    node = fake_node
    node.start()
    x, y, z = (
        service(name, f"10.96.0.{i}:80 NodePort=0.0.0.0:3008{i}", f"10.244.1.{i}:80", **LOCAL)
        for i, name in enumerate("xyz")
    )
    node.apply(y, z, nodes=NODE)
    of_y, of_z = marks(node, 30081), marks(node, 30082)
    before = {one: held for one, held in node.ipvs.held.items() if one.fwmark}
    node.start(replace(node.config, **names))
    for sound, states in ((False, (x, z)), (False, (x, y, z)), (True, (x, y, z))):
        node.plane.invalidate()
        node.apply(*states, nodes=NODE, sound=sound)
        assert marks(node, 30082) == of_z
        assert not marks(node, 30080) & (of_y | of_z)
        assert before.items() <= node.ipvs.held.items()
    node.tick()
    assert marks(node, 30081) == of_y
    assert before.items() <= node.ipvs.held.items()
    assert len(node.tables()) == 1


def test_names_of_several_restarts_are_remembered(fake_node: Node):
    node = fake_node
    node.start()
    node.apply(WEB)
    for names in RENAMED.values():
        node.start(replace(node.config, **names))
        node.apply(WEB, sound=False)
    assert len(node.tables()) == 2
    node.start(replace(node.config, nft_table="last"))
    node.apply(WEB)
    node.tick()
    assert (node.links(), node.tables()) == ({OTHER_DEVICE}, {"inet last"})


@pytest.mark.parametrize("case", ["another agent is at work", "another network", "no names"])
def test_names_of_others_are_left_alone(fake_node: Node, case: str):
    node = fake_node
    node.start()
    node.apply(GONE)
    file = node.folder / DEVICE / "names"
    fd = -1
    if case == "another network":
        file.write_text(file.read_text().replace('"network":', '"network":1'))
    elif case == "no names":
        file.unlink()
    node.start(replace(node.config, nft_table=OTHER_TABLE, ipvs_device=OTHER_DEVICE))
    if case == "another agent is at work":
        node.plane.close()
        fd = os.open(node.folder / DEVICE, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        node.start()
    node.apply(WEB)
    node.tick()
    assert node.links() == {DEVICE, OTHER_DEVICE}
    assert node.tables() == {"inet kbpf", f"inet {OTHER_TABLE}"}
    assert tcp("10.96.0.7", 80) in node.ipvs.held
    if fd >= 0:
        os.close(fd)


# ---- UDP whose backend serves no more ------------------------------------------------------------


def test_flows_of_udp_that_are_ended_are_counted_and_those_of_tcp_live_on(fake_node: Node):
    node = fake_node
    node.start()

    def apply(to: str, to6: str, **more: str) -> list[Mapping[int, int]]:
        node.apply(
            service("dns", f"{VIP}:53", to, Protocol.UDP, **more),
            service("dns6", f"[{VIP6}]:53", to6, Protocol.UDP),
            service("web", f"{VIP}:80", to),
        )
        return [look.flows for look in node.plane.take_udp_cuts()]

    one, two, three = "10.244.1.2:53", "10.244.1.3:53", "[fd00:244::2]:53"
    assert apply(f"{one} {two}", three) == []
    for virtual, to, flows in (
        (udp(VIP, 53), ("10.244.1.2", 53), (1, 4)),
        (udp(VIP, 53), ("10.244.1.3", 53), (0, 9)),
        (udp(VIP6, 53), ("fd00:244::2", 53), (2, 0)),
        (tcp(VIP, 80), ("10.244.1.2", 53), (50, 50)),
    ):
        node.ipvs.connections[virtual, RealServerKey(parse_addr(to[0]), to[1])] = flows
    assert apply(two, three, serving=f"{one} {two}") == [], "it goes on serving what it has"
    assert apply(two, three) == [{4: 5}], "it has stopped"
    assert apply(two, three) == []
    assert apply("", "") == [{4: 9, 6: 2}]
    assert node.plane.take_udp_cuts() == ()


def udp(address: str, port: int) -> VirtualServiceKey:
    return VirtualServiceKey(socket.IPPROTO_UDP, parse_addr(address), port)
