# SPDX-License-Identifier: Apache-2.0
"""Removing what a kube-proxy in mode ipvs left in a network namespace, and nothing else; and the
table `kbpf-keepalive`, which stays as long as connections that a kube-proxy translated.

Its other modes are tested with a real kube-proxy: tests/lab/cluster/test_takeover_cleanup.py.
"""

import itertools
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
from pyroute2 import IPSet

from kbpf.cli import cleanup
from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.host import HostIntegration
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.node import KEEPALIVE_POLL_INTERVAL_S
from kbpf.kernel.net import ipvs
from kbpf.kernel.net.ipvs import (
    IpvsClient,
    IpvsCommand,
    IpvsRequest,
    VirtualServiceKey,
    VirtualServiceSettings,
)
from kbpf.kernel.net.netlink import Netlink
from kbpf.kernel.netfilter import conntrack, forward_rules, ipset
from kbpf.kernel.netfilter.conntrack import ConntrackFlow
from kbpf.kernel.netfilter.forward_rules import KEEPALIVE_COMMENT
from kbpf.kernel.system import modules, netns, sysctl
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.takeover import conntrack_keepalive
from kbpf.takeover import kube_proxy_cleanup as takeover_cleanup
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, inside, ip
from tests.support.lab.lab import run as command

T = TypeVar("T")


class Bench:
    """A network namespace."""

    def __init__(self, where: str) -> None:
        self.where = where

    def do(self, action: Callable[[], T]) -> T:
        return netns.run_in(Path("/run/netns") / self.where, action)

    def run(self, *words: str, stdin: str | None = None) -> str:
        return command(*inside(self.where, None, *words), stdin=stdin)

    def sets(self, **types: str) -> None:
        """Creates IP sets; "_" in a name means "-"."""

        def make() -> None:
            with IPSet() as face:
                for name, kind in types.items():
                    ranged = {"bitmap_ports_range": (0, 65535)} if kind == "bitmap:port" else {}
                    face.create(name.replace("_", "-"), kind, **ranged)

        self.do(make)


@pytest.fixture
def bench() -> Iterator[Bench]:
    modules.load(("ip_vs",))
    where = f"kble{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        yield Bench(where)
    finally:
        command("ip", "netns", "del", where)


def remove(bench: Bench) -> list[str]:
    """Removes what kube-proxy left. A dry run before it lists the same, and removes nothing."""
    listed = [bench.do(lambda: list(takeover_cleanup.remove(dry_run=True))) for _ in range(2)]
    removed = bench.do(lambda: list(takeover_cleanup.remove()))
    assert listed == [removed, removed]
    return removed


OURS = {"KUBE_CLUSTER_IP": "hash:ip,port", "KUBE_NODE_PORT_TCP": "bitmap:port"}


def test_ip_sets_and_device_are_removed_and_others_stay(bench: Bench) -> None:
    bench.sets(mine="hash:ip", KUBE_MINE="hash:ip", **OURS)
    ip(
        "link add kube-ipvs0 type bridge",
        "addr add 10.96.0.1/32 dev kube-ipvs0",
        "link add mine type bridge",
        netns=bench.where,
    )
    assert remove(bench) == ["device kube-ipvs0", "2 ip sets"]
    assert bench.do(ipset.list_names) == ("KUBE-MINE", "mine")
    assert [row["ifname"] for row in json.loads(bench.run("ip", "-j", "link"))] == ["lo", "mine"]
    assert remove(bench) == []


def test_ports_of_an_ip_set_are_listed(bench: Bench) -> None:
    bench.sets(**OURS)

    def fill() -> None:
        with IPSet() as face:
            for port in (30080, 32767):
                face.add("KUBE-NODE-PORT-TCP", port, etype="port")

    bench.do(fill)
    assert bench.do(lambda: ipset.list_ports("KUBE-NODE-PORT-TCP")) == {30080, 32767}
    assert bench.do(lambda: ipset.list_ports("KUBE-CLUSTER-IP")) == frozenset()
    assert bench.do(lambda: ipset.list_ports("no such set")) == frozenset()


@needs("ipvs")
def test_virtual_services_of_kube_proxy_are_removed_and_others_stay(bench: Bench) -> None:
    bench.sets(**OURS)
    ip(
        "link set lo up",
        "addr add 198.18.0.1/32 dev lo",
        "link add kube-ipvs0 type dummy",
        "addr add 10.96.0.1/32 dev kube-ipvs0",
        netns=bench.where,
    )
    theirs = [
        VirtualServiceKey(socket.IPPROTO_TCP, parse_addr("10.96.0.1"), 443),
        VirtualServiceKey(socket.IPPROTO_TCP, parse_addr("198.18.0.1"), 30080),
    ]
    others = [
        VirtualServiceKey(socket.IPPROTO_TCP, parse_addr("198.18.0.1"), 80),
        VirtualServiceKey(socket.IPPROTO_UDP, parse_addr("198.18.0.1"), 30080),
    ]

    def fill() -> None:
        with IPSet() as face:
            face.add("KUBE-NODE-PORT-TCP", 30080, etype="port")
        new = [
            IpvsRequest(IpvsCommand.IPVS_CMD_NEW_SERVICE, one, VirtualServiceSettings("rr")) for one in theirs + others
        ]
        talk = IpvsClient()
        talk.apply(new)
        talk.close()

    def left() -> set[VirtualServiceKey]:
        talk = IpvsClient()
        found = {service for service, _ in talk.list_services()}
        talk.close()
        return found

    bench.do(fill)
    ip(
        "link add kbpf-ipvs0 type dummy",
        "addr add 10.96.0.1/32 dev kbpf-ipvs0",
        netns=bench.where,
    )
    bench.do(lambda: list(takeover_cleanup._remove_ipvs(())))
    assert bench.do(left) == {*theirs, *others}, "the addresses are on kbpf's device by now"
    ip("link add kube-ipvs0 type dummy", "addr add 10.96.0.1/32 dev kube-ipvs0", netns=bench.where)
    assert remove(bench) == [
        "2 virtual services of IPVS",
        "device kube-ipvs0",
        "2 ip sets",
    ]
    assert bench.do(left) == set(others)


# ---- established connections of IPVS -------------------------------------------------------------

FRONTEND, SERVER = ("10.96.0.1", 80), ("198.18.0.1", 8080)
BUSY = VirtualServiceKey(socket.IPPROTO_TCP, parse_addr("10.96.0.1"), 80)
IDLE = VirtualServiceKey(socket.IPPROTO_TCP, parse_addr("10.96.0.2"), 80)
AT = ipvs.RealServerKey(parse_addr("198.18.0.1"), 8080)


class Talk:
    """A connection through IPVS, from the namespace to itself."""

    def __init__(self) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(SERVER)
            listener.listen()
            self.client = socket.create_connection(FRONTEND, timeout=PATIENCE)
            self.server, _ = listener.accept()

    def exchange(self) -> None:
        """Sends data in both directions."""
        for one, other in ((self.client, self.server), (self.server, self.client)):
            one.sendall(b"more")
            assert other.recv(4) == b"more"

    def close(self) -> None:
        self.client.close()
        self.server.close()


def served(bench: Bench) -> dict[VirtualServiceKey, list[int]]:
    """Virtual services, and the weights of their real servers."""

    def read() -> dict[VirtualServiceKey, list[int]]:
        with closing(IpvsClient()) as face:
            return {s: [load.weight for load in face.list_servers(s)] for s, _ in face.list_services()}

    return bench.do(read)


@pytest.fixture
def talk(bench: Bench) -> Iterator[Talk]:
    """A kube-proxy in mode ipvs with two virtual services; yields a connection to one of them."""
    ip(
        "link set lo up",
        "addr add 198.18.0.1/32 dev lo",
        "link add kube-ipvs0 type dummy",
        *(f"addr add {at}/32 dev kube-ipvs0" for at in ("10.96.0.1", "10.96.0.2")),
        netns=bench.where,
    )

    def fill() -> None:
        new = [IpvsRequest(IpvsCommand.IPVS_CMD_NEW_SERVICE, one, VirtualServiceSettings("rr")) for one in (BUSY, IDLE)]
        new += [IpvsRequest(IpvsCommand.IPVS_CMD_NEW_DEST, one, server=AT, weight=1) for one in (BUSY, IDLE)]
        with closing(IpvsClient()) as face:
            face.apply(new)

    bench.do(fill)
    made = bench.do(Talk)
    made.exchange()
    yield made
    made.close()


def end_its_server(bench: Bench) -> None:
    """Makes IPVS forget the connection, which it would otherwise remember for two minutes."""

    def drop() -> None:
        with closing(IpvsClient()) as face:
            face.apply([IpvsRequest(IpvsCommand.IPVS_CMD_DEL_DEST, BUSY, server=AT)])

    bench.do(drop)


def restore_weight() -> None:
    """The first sync of a kube-proxy gives the real server its weight back."""
    with closing(IpvsClient()) as face:
        face.apply([IpvsRequest(IpvsCommand.IPVS_CMD_SET_DEST, BUSY, server=AT, weight=1)])


def names(bench: Bench) -> set[str]:
    return {row["ifname"] for row in json.loads(bench.run("ip", "-j", "link"))}


@needs("ipvs")
def test_virtual_service_with_a_connection_stays_with_weight_0(bench: Bench, talk: Talk) -> None:
    """With weight 0, so it gets no new ones. It is removed with its last connection and
    its device.
    """
    assert remove(bench) == [
        "1 virtual services of IPVS",
        "device kube-ipvs0",
    ]
    assert served(bench) == {BUSY: [0]}
    assert names(bench) == {"lo", "kbpf-keepalive"}
    assert bench.do(lambda: conntrack_keepalive.list_kept_services(conntrack_keepalive.list_families())) == (BUSY,)
    assert bench.do(takeover_cleanup.count_connections) == 1
    talk.exchange()
    assert bench.do(conntrack_keepalive.remove_unneeded) == ()
    assert remove(bench) == []
    talk.exchange()
    end_its_server(bench)
    assert bench.do(conntrack_keepalive.remove_unneeded) == ("ip",)
    assert served(bench) == {}
    assert names(bench) == {"lo"}


@needs("ipvs")
def test_returning_kube_proxy_keeps_its_virtual_services(bench: Bench, talk: Talk) -> None:
    bench.do(lambda: list(takeover_cleanup.remove()))
    ip("link add kube-ipvs0 type dummy", "addr add 10.96.0.1/32 dev kube-ipvs0", netns=bench.where)
    assert bench.do(conntrack_keepalive.remove_unneeded) == (), (
        "the weights are still 0: the device alone is no sign of a running kube-proxy"
    )
    assert served(bench) == {BUSY: [0]}
    assert bench.do(lambda: conntrack_keepalive.list_kept_services(conntrack_keepalive.list_families())) == (BUSY,)
    bench.do(restore_weight)
    assert bench.do(conntrack_keepalive.remove_unneeded) == ("ip",)
    assert list(served(bench)) == [BUSY]
    assert names(bench) == {"lo", "kube-ipvs0"}
    talk.exchange()


@needs("ipvs")
def test_kbpf_cleanup_removes_virtual_services_with_connections(bench: Bench, talk: Talk, tmp_path: Path) -> None:
    bench.do(lambda: list(takeover_cleanup.remove()))
    assert bench.do(lambda: host.remove(Pins(tmp_path))) == (f"table ip {conntrack_keepalive.TABLE}",)
    assert served(bench) == {}
    assert names(bench) == {"lo"}


@needs("ipvs")
def test_masqueraded_ipvs_connection_is_listed_as_the_backend_sees_it(bench: Bench, talk: Talk) -> None:
    rules = (
        "add table ip theirs",
        "add chain ip theirs out { type nat hook postrouting priority 100 ; }",
        "add rule ip theirs out ip daddr 198.18.0.1 tcp dport 8080 snat to 127.0.0.9:1234",
    )
    bench.run("nft", "-f", "-", stdin="\n".join(rules))
    bench.do(lambda: sysctl.write("net.ipv4.vs.conntrack", "1"))
    bench.do(Talk).close()
    here = parse_addr("127.0.0.9")
    assert bench.do(conntrack.list_masqueraded) == [ConntrackFlow(6, here, 1234, *AT)]


# ---- the keepalive table -------------------------------------------------------------------------


def translate_one(bench: Bench, family: str) -> None:
    """Makes a connection with DNAT; it has ended, but conntrack keeps it for two minutes."""
    host = {"ip": "127.0.0.1", "ip6": "::1"}[family]
    bench.run("ip", "link", "set", "lo", "up")
    to = f"[{host}]:82" if family == "ip6" else f"{host}:82"
    rules = (
        f"add table {family} theirs",
        f"add chain {family} theirs out {{ type nat hook output priority -100 ; }}",
        f"add rule {family} theirs out tcp dport 81 dnat to {to}",
    )
    bench.run("nft", "-f", "-", stdin="\n".join(rules))

    bench.do(lambda: dial(family))


def dial(family: str) -> None:
    """Connects to port 81 of loopback, which DNAT leads to port 82, and closes."""
    host, kind = {"ip": ("127.0.0.1", socket.AF_INET), "ip6": ("::1", socket.AF_INET6)}[family]
    with socket.socket(kind) as server, socket.socket(kind) as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, 82))
        server.listen()
        client.connect((host, 81))
        server.accept()[0].close()


def forget_connections() -> None:
    """Deletes all entries of conntrack."""
    with Netlink(conntrack.NETLINK_NETFILTER, "conntrack") as netlink:
        netlink.request(1 << 8 | 2, bytes(4))  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE


@pytest.mark.parametrize("family", ["ip", "ip6"])
def test_keepalive_table_stays_as_long_as_a_connection(bench: Bench, family: str, tmp_path: Path) -> None:
    """The agent checks when it starts and then every KEEPALIVE_POLL_INTERVAL_S seconds."""
    assert not bench.do(lambda: conntrack.has_dnat_connections(family))
    translate_one(bench, family)
    assert bench.do(lambda: conntrack.has_dnat_connections(family))
    for _ in range(2):
        bench.do(lambda: forward_rules.run_transaction(*conntrack_keepalive.table_commands(family)))
    assert bench.do(conntrack_keepalive.list_families) == (family,)
    assert bench.run("nft", "list", "table", family, conntrack_keepalive.TABLE).count("ct state") == 1
    agent = HostIntegration(Pins(tmp_path), Config())
    bench.do(lambda: agent.poll(0.0))
    assert bench.do(conntrack_keepalive.list_families) == (family,)
    bench.do(forget_connections)
    bench.do(lambda: agent.poll(KEEPALIVE_POLL_INTERVAL_S / 2))
    assert bench.do(conntrack_keepalive.list_families) == (family,)
    bench.do(lambda: agent.poll(KEEPALIVE_POLL_INTERVAL_S + 1))
    assert bench.do(conntrack_keepalive.list_families) == ()
    assert f"table {family} theirs" in bench.run("nft", "list", "tables")


def test_masqueraded_connection_is_listed_as_the_backend_sees_it(bench: Bench) -> None:
    """Both addresses are translated. A connection with DNAT or SNAT alone is not listed."""
    translate_one(bench, "ip")
    assert bench.do(conntrack.list_masqueraded) == []
    rules = (
        "add chain ip theirs in { type nat hook postrouting priority 100 ; }",
        "add rule ip theirs in tcp dport 82 snat to 127.0.0.9:1234",
    )
    bench.run("nft", "-f", "-", stdin="\n".join(rules))
    bench.do(forget_connections)
    bench.do(lambda: dial("ip"))
    here, there = parse_addr("127.0.0.9"), parse_addr("127.0.0.1")
    assert bench.do(conntrack.list_masqueraded) == [ConntrackFlow(6, here, 1234, there, 82)]


def test_kbpf_cleanup_removes_the_keepalive_table(bench: Bench, tmp_path: Path) -> None:
    translate_one(bench, "ip")
    bench.do(lambda: forward_rules.run_transaction(*conntrack_keepalive.table_commands("ip")))
    assert bench.do(lambda: host.remove(Pins(tmp_path))) == (f"table ip {conntrack_keepalive.TABLE}",)
    assert bench.do(conntrack_keepalive.list_families) == ()


# ---- a closed FORWARD ----------------------------------------------------------------------------

POLICY = {"ip": "iptables", "ip6": "ip6tables"}
FORWARD = """\
*filter
:FORWARD %s [0:0]
:KUBE-FORWARD - [0:0]
-A FORWARD -j KUBE-FORWARD
-A FORWARD -p tcp -m tcp --dport 1 -j DROP
%s
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
"""
REFUSES, THEIRS = "-A FORWARD -j REJECT", "-A FORWARD -p tcp -m tcp --dport 1 -j DROP"
PASSES = f'-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -m comment --comment "{KEEPALIVE_COMMENT}" -j ACCEPT'
CLOSED = {"a policy": ("DROP", ""), "a last rule": ("ACCEPT", REFUSES)}


def forward(bench: Bench, family: str) -> list[str]:
    """The rules in FORWARD, as iptables reads them."""
    saved = bench.run(f"{POLICY[family]}-nft-save", "-t", "filter")
    assert "KUBE-FORWARD" not in saved
    refused = f"{REFUSES} --reject-with icmp6?-port-unreachable"
    lines = (re.sub(refused, REFUSES, line) for line in saved.splitlines())
    return [line for line in lines if line.startswith("-A FORWARD")]


@pytest.fixture(params=POLICY)
def left(request: pytest.FixtureRequest, bench: Bench) -> str:
    """A family with a translated connection, as a kube-proxy leaves it."""
    translate_one(bench, request.param)
    return str(request.param)


def stop_kube_proxy(bench: Bench, family: str, how: str = "a policy") -> list[str]:
    """Restores kube-proxy's FORWARD chain and cleans up after it; returns the foreign rules."""
    policy, last = CLOSED[how]
    bench.run(f"{POLICY[family]}-nft-restore", stdin=FORWARD % (policy, last))
    bench.do(lambda: list(takeover_cleanup.remove()))
    return [THEIRS, *filter(None, [last])]


@pytest.mark.parametrize("how", CLOSED)
def test_established_connections_pass_a_closed_forward_until_they_end(bench: Bench, left: str, how: str) -> None:
    """One rule accepts it, before any rule that refuses all; iptables-nft-save can still
    list them.
    """
    others = stop_kube_proxy(bench, left, how)
    bench.do(lambda: list(takeover_cleanup.remove()))
    assert forward(bench, left) == [others[0], PASSES, *others[1:]]
    bench.do(forget_connections)
    assert bench.do(conntrack_keepalive.remove_unneeded) == (left,)
    assert forward(bench, left) == others


def test_ipvs_connections_pass_a_closed_forward(bench: Bench) -> None:
    """conntrack records no DNAT for IPVS connections; the keepalive table exists all the same."""
    bench.run("iptables-nft-restore", stdin=FORWARD % ("DROP", ""))
    bench.do(lambda: forward_rules.run_transaction(*conntrack_keepalive.table_commands("ip")))
    assert not bench.do(lambda: conntrack.has_dnat_connections("ip"))
    bench.do(lambda: list(takeover_cleanup._remove_nft()))
    assert forward(bench, "ip") == [THEIRS, PASSES]


def test_cleanup_reports_the_forward_rule(bench: Bench, left: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run(f"{POLICY[left]}-nft-restore", stdin=FORWARD % ("DROP", ""))
    bench.do(lambda: list(cleanup.remove_kube_proxy(force=True)))
    assert capsys.readouterr().err == (
        f"kbpf: table {left} kbpf-keepalive stays, and with it a rule in {left} filter FORWARD, "
        "for connections that kube-proxy translated; the agent removes it when they have ended\n"
    )


def test_open_forward_gets_no_rule(bench: Bench) -> None:
    translate_one(bench, "ip")
    bench.run("iptables-nft-restore", stdin=FORWARD % ("ACCEPT", ""))
    bench.do(lambda: list(takeover_cleanup.remove()))
    assert bench.do(conntrack_keepalive.list_families) == ("ip",)
    assert forward(bench, "ip") == [THEIRS]


def test_closed_forward_gets_no_rule_without_connections(bench: Bench) -> None:
    stop_kube_proxy(bench, "ip")
    assert forward(bench, "ip") == [THEIRS]


def test_kube_proxy_in_mode_nftables_gets_no_forward_rule(bench: Bench) -> None:
    """In mode nftables kube-proxy has its own table and overrules no other chain's policy."""
    translate_one(bench, "ip")
    bench.run("iptables-nft", "-P", "FORWARD", "DROP")
    bench.run("nft", "add", "table", "ip", "kube-proxy")
    bench.do(lambda: list(takeover_cleanup.remove()))
    assert bench.do(conntrack_keepalive.list_families) == ("ip",)
    assert forward(bench, "ip") == []


def test_agent_restores_the_forward_rule(bench: Bench, left: str, tmp_path: Path) -> None:
    """The agent did not add the rule. It restores it next to its own rule, in either order."""
    stop_kube_proxy(bench, left)
    tool = f"{POLICY[left]}-nft"
    times = itertools.count(0.0, host.HOST_POLL_INTERVAL_S)
    agent = HostIntegration(Pins(tmp_path), Config())

    def poll_and_list() -> list[str]:
        bench.do(lambda: agent.poll(next(times)))
        bench.do(lambda: agent.poll(next(times)))
        rules = forward(bench, left)
        ours = [rule for rule in rules if "kbpf: masqueraded" in rule]
        assert len(ours) == ("DROP" in bench.run(tool, "-S", "FORWARD").splitlines()[0])
        return [rule for rule in rules if rule not in ours]

    assert poll_and_list() == [THEIRS, PASSES]
    bench.run(tool, "-A", "FORWARD", "-p", "tcp", "--dport", "2", "-j", "DROP")
    other = THEIRS.replace("dport 1", "dport 2")
    assert poll_and_list() == [THEIRS, other, PASSES]
    bench.run(tool, "-F", "FORWARD")
    assert poll_and_list() == [PASSES]
    before = bench.do(forward_rules.read_generation)
    assert poll_and_list() == [PASSES]
    assert bench.do(forward_rules.read_generation) == before
    bench.run(tool, "-P", "FORWARD", "ACCEPT")
    assert poll_and_list() == []
    bench.run(tool, "-P", "FORWARD", "DROP")
    assert poll_and_list() == [PASSES]
    bench.run("nft", "delete", "table", left, conntrack_keepalive.TABLE)
    assert poll_and_list() == []


def test_kbpf_cleanup_removes_the_forward_rule(bench: Bench, left: str, tmp_path: Path) -> None:
    others = stop_kube_proxy(bench, left)
    assert PASSES in forward(bench, left)
    assert bench.do(lambda: host.remove(Pins(tmp_path))) == (f"table {left} {conntrack_keepalive.TABLE}",)
    assert forward(bench, left) == others


def test_two_processes_adding_the_rule_at_once_add_one(
    bench: Bench, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one adds the rule between our listing of the chains and our transaction."""
    bench.run(f"{POLICY[left]}-nft-restore", stdin=FORWARD % ("DROP", ""))
    real, once = forward_rules.list_forward_chains, iter([True])

    def look() -> tuple[forward_rules.BaseChain, ...]:
        seen = real()
        if next(once, False):
            conntrack_keepalive.reconcile_forward_rules(seen)
        return seen

    bench.do(lambda: forward_rules.run_transaction(*conntrack_keepalive.table_commands(left, with_forward_rule=True)))
    chains = bench.do(real)
    monkeypatch.setattr(forward_rules, "list_forward_chains", look)
    assert bench.do(lambda: conntrack_keepalive.reconcile_forward_rules(chains)) == ()
    monkeypatch.undo()
    assert bench.run(f"{POLICY[left]}-nft-save").count(KEEPALIVE_COMMENT) == 1


@pytest.mark.parametrize("step", ["list_kept_services", "_rule_deletions"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_two_processes_removing_the_table_at_once(
    bench: Bench, left: str, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    """The agent removes table and rule before or after this step of `kbpf cleanup`."""
    others = stop_kube_proxy(bench, left)
    bench.do(forget_connections)
    real = getattr(conntrack_keepalive, step)
    agent = iter([conntrack_keepalive.remove_unneeded])

    def interrupted(families: tuple[str, ...]) -> object:
        seen = real(families)
        if remove := next(agent, None):
            assert remove() == (left,)
            return seen if when == "after" else real(families)
        return seen

    monkeypatch.setattr(conntrack_keepalive, step, interrupted)
    assert bench.do(conntrack_keepalive.remove_unneeded) == ()
    assert next(agent, None) is None, "the agent removed nothing"
    assert bench.do(conntrack_keepalive.list_families) == ()
    assert forward(bench, left) == others
