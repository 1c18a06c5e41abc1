# SPDX-License-Identifier: Apache-2.0
"""Removing what a kube-proxy in mode ipvs left in a network namespace, and nothing else; what rules
of others need; and the table `kbpf-keepalive`, which stays as long as connections that a kube-proxy
translated.

Its other modes are tested with a real kube-proxy: tests/lab/cluster/test_takeover_cleanup.py.
"""

import itertools
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from pyroute2 import IPSet

from kbpf.cli import removal
from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.host import HostIntegration
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.node import KEEPALIVE_POLL_INTERVAL_S
from kbpf.errors import KernelError
from kbpf.kernel.net.ipvs import IpvsClient, IpvsCommand, IpvsRequest, VirtualServiceSettings
from kbpf.kernel.net.netlink import Netlink
from kbpf.kernel.netfilter import conntrack, forward_rules, named_objects
from kbpf.kernel.netfilter.conntrack import ConntrackFlow
from kbpf.kernel.netfilter.forward_rules import KEEPALIVE_COMMENT
from kbpf.kernel.system import modules, sysctl
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import RealServer, VirtualService
from kbpf.takeover import conntrack_keepalive
from kbpf.takeover import kube_proxy_cleanup as takeover_cleanup
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE
from tests.support.lab.namespace import Namespace
from tests.support.table import pairs


@pytest.fixture
def bench(namespace: Namespace) -> Namespace:
    modules.load(("ip_vs",))
    return namespace


OURS = {"KUBE-CLUSTER-IP": "hash:ip,port", "KUBE-NODE-PORT-TCP": "bitmap:port"}


def make_sets(bench: Namespace, types: dict[str, str], *ports: int) -> None:
    """Creates IP sets. These NodePorts are in kube-proxy's."""

    def make() -> None:
        with IPSet() as face:
            for name, kind in types.items():
                ranged = {"bitmap_ports_range": (0, 65535)} if kind == "bitmap:port" else {}
                face.create(name, kind, **ranged)
            for port in ports:
                face.add("KUBE-NODE-PORT-TCP", port, etype="port")

    bench.do(make)


def names(bench: Namespace) -> set[str]:
    return {row["ifname"] for row in json.loads(bench.run("ip -j link"))}


def remove(bench: Namespace, notes: list[str] | None = None) -> list[str]:
    """Removes what kube-proxy left. A dry run before it lists the same, and removes nothing. `notes`:
    gets what stays.
    """

    def listed(dry_run: bool) -> tuple[list[str], list[str]]:
        kept: list[str] = []
        return bench.do(lambda: list(takeover_cleanup.remove(dry_run=dry_run, note=kept.append))), kept

    dry = [listed(True) for _ in range(2)]
    removed, kept = listed(False)
    assert dry == [(removed, kept)] * 2
    if notes is not None:
        notes += kept
    return removed


def test_ip_sets_and_device_are_removed_and_others_stay(bench: Namespace):
    make_sets(bench, {"mine": "hash:ip", "KUBE-MINE": "hash:ip", **OURS})
    bench.ip("link add kube-ipvs0 type bridge", "addr add 10.96.0.1/32 dev kube-ipvs0", "link add mine type bridge")
    assert remove(bench) == ["device kube-ipvs0", "2 ip sets"]
    assert bench.do(named_objects.list_sets) == ("KUBE-MINE", "mine")
    assert names(bench) == {"lo", "mine"}
    assert remove(bench) == []


# ---- what rules of others need -------------------------------------------------------------------

KUBE_PROXY = """\
:KUBE-SERVICES -
:KUBE-NODEPORTS -
:KUBE-SVC-ERIFXISQEP7F7OF4 -
:KUBE-SEP-ERIFXISQEP7F7OF4 -
:KUBE-MARK-MASQ -
:KUBE-POSTROUTING -
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-ERIFXISQEP7F7OF4
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-ERIFXISQEP7F7OF4 -j KUBE-SEP-ERIFXISQEP7F7OF4
-A KUBE-SEP-ERIFXISQEP7F7OF4 -s 10.244.1.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-ERIFXISQEP7F7OF4 -p tcp -m tcp -j DNAT --to-destination 10.244.1.2:80
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -j MASQUERADE
"""
MARKED = "KUBE-MARK-MASQ KUBE-POSTROUTING"
SERVICE = f"KUBE-SEP-ERIFXISQEP7F7OF4 KUBE-SVC-ERIFXISQEP7F7OF4 {MARKED}"
NEEDS = pairs(f"""\
-A MINE -s 10.244.1.0/24 -p tcp -m tcp --dport 81 -j KUBE-MARK-MASQ → {MARKED}
-A MINE -m comment --comment "kubernetes service portals" -j KUBE-MARK-MASQ → {MARKED}
-A MINE -j KUBE-MARK-MASQ → {MARKED}
-A PREROUTING -p tcp -m tcp --dport 81 -j KUBE-MARK-MASQ → {MARKED}
-A PREROUTING -j KUBE-MARK-MASQ → {MARKED}
-A MINE -g KUBE-POSTROUTING → KUBE-POSTROUTING
-A MINE -j KUBE-SVC-ERIFXISQEP7F7OF4 → {SERVICE}
-A MINE -j KUBE-SERVICES → KUBE-NODEPORTS KUBE-SERVICES {SERVICE}
-A OUTPUT -o eth7 -j KUBE-SERVICES → KUBE-NODEPORTS KUBE-SERVICES {SERVICE}
-A OUTPUT -m conntrack --ctstate NEW -j KUBE-NODEPORTS → KUBE-NODEPORTS
-A PREROUTING -m comment --comment mine -j KUBE-NODEPORTS → KUBE-NODEPORTS
-A MINE -m comment --comment "-j KUBE-MARK-MASQ" -j RETURN →
-A OUTPUT -j KUBE-SERVICES → (as kube-proxy writes it)
""")
"""A rule → the chains of kube-proxy that stay for it. `(...)`: none, and the rule is not foreign."""


@pytest.mark.parametrize(
    ("rule", "needed", "tool"), [*((*row, "nft") for row in NEEDS), *((*row, "legacy") for row in NEEDS[1::3])]
)
def test_chains_that_rules_of_others_need_stay(bench: Namespace, rule: str, needed: str, tool: str):
    """With all of their rules but those that match IP sets, which are removed."""
    make_sets(bench, {"KUBE-LOOP-BACK": "hash:ip,port,ip"})
    bench.run(f"iptables-{tool}-restore", stdin=f"*nat\n:MINE -\n{KUBE_PROXY}{rule}\nCOMMIT\n")
    is_foreign, stay = not needed.startswith("("), needed.split() if needed.startswith("KUBE") else []
    jumps = [line for line in KUBE_PROXY.splitlines() if line.startswith("-A POSTROUTING") and MARKED in needed]
    contents = [line for line in KUBE_PROXY.splitlines() if line.startswith("-A") and line.split()[1] in stay]
    contents = [line for line in contents if "--match-set" not in line]
    notes: list[str] = []
    removed = remove(bench, notes)
    saved = bench.run(f"iptables-{tool}-save -t nat").splitlines()
    assert sorted(line.split()[0][1:] for line in saved if line.startswith(":KUBE")) == sorted(stay)
    assert {line for line in saved if line.startswith("-A")} == {*[rule] * is_foreign, *contents, *jumps}
    counts = f"{6 - len(stay)} chains, {3 + (not is_foreign) - len(jumps)} jumps"
    assert removed == [f"ip nat{', legacy' * (tool == 'legacy')}: {counts} to them", "1 ip sets"]
    assert len(notes) == bool(stay)
    assert all(name in note for note in notes for name in (rule.split()[1], rule.rpartition(" ")[2]))
    again: list[str] = []
    assert remove(bench, again) == []
    assert again == notes


def test_cleanup_names_the_rules_of_others(bench: Namespace, capsys):
    make_sets(bench, {"KUBE-LOOP-BACK": "hash:ip,port,ip"})
    rule = "-A MINE -p tcp -m tcp --dport 81 -j KUBE-MARK-MASQ"
    for tool in ("nft", "legacy"):
        bench.run(f"iptables-{tool}-restore", stdin=f"*nat\n:MINE -\n{KUBE_PROXY}{rule}\nCOMMIT\n")
    said = set()
    for dry_run in (True, False, True):
        bench.do(lambda dry_run=dry_run: list(removal.remove_kube_proxy(True, dry_run)))
        said.add(re.sub(r"handle \d+", "handle", capsys.readouterr().err))
    assert said == {
        "kbpf: KUBE-MARK-MASQ stays: a rule in ip nat MINE jumps to it: "
        "tcp dport 81 counter jump KUBE-MARK-MASQ # handle\n"
        f"kbpf: KUBE-MARK-MASQ stays: a rule in ip nat, legacy, jumps to it: {rule}\n"
        "kbpf: if a CNI adds these rules, remove externalSetMarkChain from its configuration first; run this again "
        "when they are gone (docs/migration.md)\n"
    }


@pytest.mark.parametrize("dry_run", [True, False])
def test_dry_run_is_refused_as_the_removal_is(bench: Namespace, dry_run: bool):
    """By the kernel: this does not look for jumps in maps."""
    make_sets(bench, {"KUBE-LOOP-BACK": "hash:ip,port,ip"})
    bench.run("iptables-nft-restore", stdin=f"*nat\n:MINE -\n{KUBE_PROXY}COMMIT\n")
    bench.run("nft -f -", stdin="add rule ip nat MINE tcp dport vmap { 81 : jump KUBE-MARK-MASQ }")
    before = bench.run("nft list ruleset")
    with pytest.raises(KernelError, match="nftables refused the transaction"):
        bench.do(lambda: list(takeover_cleanup.remove(dry_run=dry_run)))
    assert bench.run("nft list ruleset") == before


def tcp_service(address: str, port: int, protocol: int = socket.IPPROTO_TCP) -> VirtualService:
    return VirtualService(protocol, parse_addr(address), port)


def tell_ipvs(bench: Namespace, *requests: IpvsRequest) -> None:
    def tell() -> None:
        with closing(IpvsClient()) as face:
            face.apply(list(requests))

    bench.do(tell)


def serve(bench: Namespace, *services: VirtualService) -> None:
    new = IpvsCommand.IPVS_CMD_NEW_SERVICE
    tell_ipvs(bench, *(IpvsRequest(new, one, settings=VirtualServiceSettings("rr")) for one in services))


def served(bench: Namespace) -> dict[VirtualService, list[int]]:
    """Virtual services, and the weights of their real servers."""

    def read() -> dict[VirtualService, list[int]]:
        with closing(IpvsClient()) as face:
            return {s: [load.weight for load in face.list_servers(s)] for s, _ in face.list_services()}

    return bench.do(read)


@needs("ipvs")
def test_virtual_services_of_kube_proxy_are_removed_and_others_stay(bench: Namespace):
    make_sets(bench, OURS, 30080)
    bench.ip("link set lo up", "addr add 198.18.0.1/32 dev lo")
    theirs = [tcp_service("10.96.0.1", 443), tcp_service("198.18.0.1", 30080)]
    others = [tcp_service("198.18.0.1", 80), tcp_service("198.18.0.1", 30080, socket.IPPROTO_UDP)]
    serve(bench, *theirs, *others)
    for device in ("kube-ipvs0", "kbpf-ipvs0"):
        bench.ip(f"link add {device} type dummy", f"addr add 10.96.0.1/32 dev {device}")
    bench.do(lambda: list(takeover_cleanup._remove_ipvs(())))
    assert served(bench).keys() == {*theirs, *others}, "the addresses are on kbpf's device by now"
    bench.ip("link add kube-ipvs0 type dummy", "addr add 10.96.0.1/32 dev kube-ipvs0")
    assert remove(bench) == ["2 virtual services of IPVS", "device kube-ipvs0", "2 ip sets"]
    assert served(bench).keys() == {*others}


# ---- established connections of IPVS -------------------------------------------------------------

FRONTEND, SERVER = ("10.96.0.1", 80), ("198.18.0.1", 8080)
BUSY, IDLE = tcp_service("10.96.0.1", 80), tcp_service("10.96.0.2", 80)
AT = RealServer(parse_addr("198.18.0.1"), 8080)


class Talk:
    """A connection through IPVS, from the namespace to itself."""

    def __init__(self) -> None:
        with socket.create_server(SERVER) as listener:
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


@pytest.fixture
def talk(bench: Namespace) -> Iterator[Talk]:
    """A kube-proxy in mode ipvs with two virtual services; yields a connection to one of them."""
    bench.ip("link set lo up", "addr add 198.18.0.1/32 dev lo", "link add kube-ipvs0 type dummy")
    bench.ip(*(f"addr add {at}/32 dev kube-ipvs0" for at in ("10.96.0.1", "10.96.0.2")))
    serve(bench, BUSY, IDLE)
    new = IpvsCommand.IPVS_CMD_NEW_DEST
    tell_ipvs(bench, *(IpvsRequest(new, one, server=AT, weight=1) for one in (BUSY, IDLE)))
    made = bench.do(Talk)
    made.exchange()
    yield made
    made.close()


def kept(bench: Namespace) -> tuple[VirtualService, ...]:
    return bench.do(lambda: conntrack_keepalive.list_kept_services(conntrack_keepalive.list_families()))


@needs("ipvs")
def test_returning_kube_proxy_keeps_its_virtual_services(bench: Namespace, talk: Talk):
    remove(bench)
    bench.ip("link add kube-ipvs0 type dummy", "addr add 10.96.0.1/32 dev kube-ipvs0")
    assert bench.do(conntrack_keepalive.remove_unneeded) == (), (
        "the weights are still 0: the device alone is no sign of a running kube-proxy"
    )
    assert served(bench) == {BUSY: [0]}
    assert kept(bench) == (BUSY,)
    # the first sync of a kube-proxy gives the real server its weight back
    tell_ipvs(bench, IpvsRequest(IpvsCommand.IPVS_CMD_SET_DEST, BUSY, server=AT, weight=1))
    assert bench.do(conntrack_keepalive.remove_unneeded) == ("ip",)
    assert list(served(bench)) == [BUSY]
    assert names(bench) == {"lo", "kube-ipvs0"}
    talk.exchange()


@needs("ipvs")
def test_kbpf_cleanup_removes_virtual_services_with_connections(bench: Namespace, talk: Talk, tmp_path):
    remove(bench)
    assert bench.do(lambda: host.remove(Pins(tmp_path))) == (f"table ip {conntrack_keepalive.TABLE}",)
    assert served(bench) == {}
    assert names(bench) == {"lo"}


SNAT = """
table ip other {
    chain c { type nat hook postrouting priority 100; %s snat to 127.0.0.9:1234; }
}
"""


@needs("ipvs")
def test_masqueraded_ipvs_connection_is_listed_as_the_backend_sees_it(bench: Namespace, talk: Talk):
    bench.run("nft -f -", stdin=SNAT % "ip daddr 198.18.0.1 tcp dport 8080")
    bench.do(lambda: sysctl.write("net.ipv4.vs.conntrack", "1"))
    bench.do(Talk).close()
    here = parse_addr("127.0.0.9")
    assert bench.do(conntrack.list_masqueraded) == [ConntrackFlow(6, here, 1234, *AT)]


# ---- the keepalive table -------------------------------------------------------------------------


HOSTS = {"ip": "127.0.0.1", "ip6": "::1"}


def translate_one(bench: Namespace, family: str) -> None:
    """Makes a connection with DNAT; it has ended, but conntrack keeps it for two minutes."""
    chain = "chain c { type nat hook output priority -100 ; tcp dport 81 dnat to :82 ; }"
    bench.run(f"nft add table {family} theirs {{ {chain} ; }}")
    bench.run("ip link set lo up")
    bench.do(lambda: dial(family))


def dial(family: str) -> None:
    """Connects to port 81 of loopback, which DNAT leads to port 82, and closes."""
    kind = socket.AF_INET6 if family == "ip6" else socket.AF_INET
    at = HOSTS[family]
    with socket.create_server((at, 82), family=kind) as server, socket.create_connection((at, 81)):
        server.accept()[0].close()


def forget_connections() -> None:
    """Deletes all entries of conntrack."""
    with Netlink(conntrack.NETLINK_NETFILTER, "conntrack") as netlink:
        netlink.request(1 << 8 | 2, bytes(4))  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE


def test_masqueraded_connection_is_listed_as_the_backend_sees_it(bench: Namespace):
    """Both addresses are translated. A connection with DNAT or SNAT alone is not listed."""
    translate_one(bench, "ip")
    assert bench.do(conntrack.list_masqueraded) == []
    bench.run("nft -f -", stdin=SNAT % "tcp dport 82")
    bench.do(forget_connections)
    bench.do(lambda: dial("ip"))
    here, there = parse_addr("127.0.0.9"), parse_addr("127.0.0.1")
    assert bench.do(conntrack.list_masqueraded) == [ConntrackFlow(6, here, 1234, there, 82)]


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
NFTABLES = """\
table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }
table ip kube-proxy {}
"""
CLOSED = {"a policy": ("DROP", ""), "a last rule": ("ACCEPT", REFUSES)}


def forward(bench: Namespace, family: str) -> list[str]:
    """The rules in FORWARD, as iptables reads them."""
    saved = bench.run(f"{POLICY[family]}-nft-save -t filter")
    assert "KUBE-FORWARD" not in saved
    refused = f"{REFUSES} --reject-with icmp6?-port-unreachable"
    lines = (re.sub(refused, REFUSES, line) for line in saved.splitlines())
    return [line for line in lines if line.startswith("-A FORWARD")]


@pytest.fixture
def left(request, bench: Namespace) -> str:
    """A family with a translated connection, as a kube-proxy leaves it: IPv4 unless `both_families`."""
    family = getattr(request, "param", "ip")
    translate_one(bench, family)
    return str(family)


both_families = pytest.mark.parametrize("left", POLICY, indirect=True)


def stop_kube_proxy(bench: Namespace, family: str, how: str = "a policy") -> list[str]:
    """Restores kube-proxy's FORWARD chain and cleans up after it; returns the foreign rules."""
    policy, last = CLOSED[how]
    bench.run(f"{POLICY[family]}-nft-restore", stdin=FORWARD % (policy, last))
    remove(bench)
    return [THEIRS, *filter(None, [last])]


@both_families
def test_keepalive_table_stays_as_long_as_a_connection(bench: Namespace, left: str, tmp_path):
    """The agent checks when it starts and then every KEEPALIVE_POLL_INTERVAL_S seconds."""
    agent = HostIntegration(Pins(tmp_path), Config())

    def families_after(seconds: float) -> tuple[str, ...]:
        bench.do(lambda: agent.poll(seconds))
        return bench.do(conntrack_keepalive.list_families)

    for _ in range(2):
        bench.do(lambda: forward_rules.run_transaction(*conntrack_keepalive.table_commands(left)))
    assert bench.run(f"nft list table {left} {conntrack_keepalive.TABLE}").count("ct state") == 1
    assert bench.do(lambda: conntrack.has_dnat_connections(left))
    assert families_after(0.0) == (left,)
    bench.do(forget_connections)
    assert not bench.do(lambda: conntrack.has_dnat_connections(left))
    assert families_after(KEEPALIVE_POLL_INTERVAL_S / 2) == (left,)
    assert families_after(KEEPALIVE_POLL_INTERVAL_S + 1) == ()
    assert f"table {left} theirs" in bench.run("nft list tables")


@both_families
@pytest.mark.parametrize("how", CLOSED)
def test_established_connections_pass_a_closed_forward_until_they_end(bench: Namespace, left: str, how: str):
    """One rule accepts it, before any rule that refuses all; iptables-nft-save can still
    list them.
    """
    others = stop_kube_proxy(bench, left, how)
    remove(bench)
    assert forward(bench, left) == [others[0], PASSES, *others[1:]]
    bench.do(forget_connections)
    assert bench.do(conntrack_keepalive.remove_unneeded) == (left,)
    assert forward(bench, left) == others


def test_established_connections_pass_although_kube_forward_stays(bench: Namespace, left: str):
    """A rule of others needs it, but kube-proxy's jump to it from FORWARD goes."""
    rule = "-A FORWARD -i eth7 -j KUBE-FORWARD"
    bench.run(f"{POLICY[left]}-nft-restore", stdin=FORWARD % ("DROP", rule))
    remove(bench)
    saved = bench.run(f"{POLICY[left]}-nft-save -t filter").splitlines()
    assert [line for line in saved if line.startswith("-A FORWARD")] == [THEIRS, rule, PASSES]
    assert sum(line.startswith("-A KUBE-FORWARD") for line in saved) == 3


def test_ipvs_connections_pass_a_closed_forward(bench: Namespace):
    """conntrack records no DNAT for IPVS connections; the keepalive table exists all the same."""
    bench.run("iptables-nft-restore", stdin=FORWARD % ("DROP", ""))
    bench.do(lambda: forward_rules.run_transaction(*conntrack_keepalive.table_commands("ip")))
    assert not bench.do(lambda: conntrack.has_dnat_connections("ip"))
    bench.do(lambda: list(takeover_cleanup._remove_nft()))
    assert forward(bench, "ip") == [THEIRS, PASSES]


def test_cleanup_reports_the_forward_rule(bench: Namespace, left: str, capsys):
    bench.run(f"{POLICY[left]}-nft-restore", stdin=FORWARD % ("DROP", ""))
    bench.do(lambda: list(removal.remove_kube_proxy(True, False)))
    assert capsys.readouterr().err == (
        f"kbpf: table {left} kbpf-keepalive stays, and with it a rule in {left} filter FORWARD, "
        "for connections that kube-proxy translated; the agent removes it when they have ended\n"
    )


NO_RULE = {
    "FORWARD is open": ("iptables-nft-restore", FORWARD % ("ACCEPT", ""), True, [THEIRS]),
    "there are no connections": ("iptables-nft-restore", FORWARD % ("DROP", ""), False, [THEIRS]),
    "kube-proxy in mode nftables overrules no other chain": ("nft -f -", NFTABLES, True, []),
}
"""The rules of a kube-proxy, whether there is a connection, and what is in FORWARD afterwards."""


@pytest.mark.parametrize("why", NO_RULE)
def test_forward_gets_no_rule(bench: Namespace, why: str):
    tool, rules, is_connected, others = NO_RULE[why]
    if is_connected:
        translate_one(bench, "ip")
    bench.run(tool, stdin=rules)
    remove(bench)
    assert bench.do(conntrack_keepalive.list_families) == ("ip",) * is_connected
    assert forward(bench, "ip") == others


@both_families
def test_agent_restores_the_forward_rule(bench: Namespace, left: str, tmp_path):
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
        assert len(ours) == ("DROP" in bench.run(f"{tool} -S FORWARD").splitlines()[0])
        return [rule for rule in rules if rule not in ours]

    assert poll_and_list() == [THEIRS, PASSES]
    bench.run(f"{tool} -A FORWARD -p tcp --dport 2 -j DROP")
    other = THEIRS.replace("dport 1", "dport 2")
    assert poll_and_list() == [THEIRS, other, PASSES]
    bench.run(f"{tool} -F FORWARD")
    assert poll_and_list() == [PASSES]
    before = bench.do(forward_rules.read_generation)
    assert poll_and_list() == [PASSES]
    assert bench.do(forward_rules.read_generation) == before
    bench.run(f"{tool} -P FORWARD ACCEPT")
    assert poll_and_list() == []
    bench.run(f"{tool} -P FORWARD DROP")
    assert poll_and_list() == [PASSES]
    bench.run(f"nft delete table {left} {conntrack_keepalive.TABLE}")
    assert poll_and_list() == []


def test_kbpf_cleanup_removes_the_forward_rule(bench: Namespace, left: str, tmp_path):
    others = stop_kube_proxy(bench, left)
    assert PASSES in forward(bench, left)
    assert bench.do(lambda: host.remove(Pins(tmp_path))) == (f"table {left} {conntrack_keepalive.TABLE}",)
    assert bench.do(conntrack_keepalive.list_families) == ()
    assert forward(bench, left) == others


def test_two_processes_adding_the_rule_at_once_add_one(bench: Namespace, left: str, monkeypatch):
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
def test_two_processes_removing_the_table_at_once(bench: Namespace, left: str, monkeypatch, step: str, when: str):
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
