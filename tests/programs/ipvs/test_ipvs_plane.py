# SPDX-License-Identifier: Apache-2.0
"""The IPVS data plane on any kernel with nf_tables: its table, addresses and state file are real,
IPVS is a fake (tests/support/faults/fake_ipvs.py). Packets through virtual services are tested on
kernels that have IPVS: test_ipvs.py.
"""

import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from pyroute2 import IPSet

from kbpf.cli import removal
from kbpf.dataplane.ipvs import ipvs_cleanup
from kbpf.dataplane.ipvs.plan import Element, SetName
from kbpf.kernel.net.ipvs import VirtualServiceSettings
from kbpf.kernel.netfilter import forward_rules, nft
from kbpf.model.address import parse_addr
from kbpf.model.desired import RealServer, VirtualService
from kbpf.model.objects import Protocol
from kbpf.takeover import conntrack_keepalive, detect
from kbpf.takeover.detect import Detection, Responder
from tests.support.faults.fake_ipvs import Node, tcp
from tests.support.plane import service, services
from tests.support.table import each_row, table

VIP, VIP6, KUBE = "10.96.0.1", "fd00:96::1", conntrack_keepalive.KUBE_PROXY_DEVICE


# ---- after a kube-proxy --------------------------------------------------------------------------


def after_kube_proxy(node: Node) -> None:
    """A kube-proxy in mode ipvs served these addresses, a NodePort, and a Service that is gone."""
    node.run(f"ip link add {KUBE} up type bridge")
    for address in (VIP, VIP6, "10.96.0.9"):
        node.run(f"ip addr add {address} dev {KUBE} {'nodad' * (':' in address)}")
    node.run("ip addr add 198.18.0.1/32 dev lo")
    for frontend in (tcp(VIP, 80), tcp(VIP6, 80), tcp("10.96.0.9", 80), tcp("198.18.0.1", 30080)):
        node.ipvs.held[frontend] = (VirtualServiceSettings("rr"), {})


def test_take_over_of_a_kube_proxy_in_mode_ipvs(fake_node: Node):
    """The agent takes over kube-proxy's virtual services; cleanup of kube-proxy leaves them."""
    node = fake_node
    after_kube_proxy(node)
    node.start()
    node.run(f"ip addr add 198.18.0.1 dev {KUBE}")  # an ExternalIP, too
    states = [
        service("s", f"{VIP}:80 NodePort=0.0.0.0:30080", "10.244.1.2:80"),
        service("e", "10.96.0.3:80 ExternalIP=198.18.0.1:81", "10.244.1.3:80"),
        service("s6", f"[{VIP6}]:80", "[fd00:244::2]:80"),
    ]
    node.apply(*states, nodes="198.18.0.1")
    assert node.addresses() == {VIP, VIP6, "10.96.0.3"}
    node.do(lambda: list(removal.remove_kube_proxy(force=True, dry_run=False)))
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


KUBE_PROXY_SETS = {
    "no sets": ({}, False, set()),
    "a NodePort in its set": ({"KUBE-NODE-PORT-TCP": 30080}, False, {"198.18.0.1:30080/6"}),
    "a NodePort of another protocol": ({"KUBE-NODE-PORT-UDP": 30080}, False, set()),
    "it runs": ({}, True, {"198.18.0.1:30080/6", "198.18.0.1:30081/6", "198.18.0.1:81/6"}),
}


@pytest.mark.parametrize(("sets", "runs", "stay"), KUBE_PROXY_SETS.values(), ids=KUBE_PROXY_SETS)
def test_cleanup_removes_node_ports_that_kube_proxy_does_not_have(
    fake_node: Node, monkeypatch, sets: dict[str, int], runs: bool, stay: set[str]
):
    """kube-proxy's device still exists with its addresses. kube-proxy would never remove our
    NodePorts by itself, and later nothing would show that they are ours.
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
    monkeypatch.setattr(detect, "detect", lambda: Detection((), False, {"127.0.0.1 port 10256": who}))
    run_cleanup(node)
    at_its_device = {f"{VIP}:80/6", f"[{VIP6}]:80/6", "10.96.0.9:80/6"}
    assert node.ipvs.shown().keys() == at_its_device | stay


def dial(address: str, port: int) -> str:
    """Connects to this address; a listener on all addresses of the network is the backend."""
    with socket.create_server(("0.0.0.0", port)) as server, socket.socket() as client:
        client.settimeout(5)
        client.connect((address, port))
        server.accept()[0].close()
        return "answered"


def run_cleanup(node: Node) -> list[str]:
    """The paths that `kbpf cleanup` reports."""
    return [one.path for one in node.do(lambda: list(removal.remove_ipvs(node.config, dry_run=False)))]


# ---- firewall marks of short circuits ------------------------------------------------------------

NODE, A, B = "198.18.0.1", "10.244.1.2:80", "10.244.1.3:80"
NAMES = {"VIP": f"{VIP}:80", "PORT": "NodePort=0.0.0.0:30080", "A": A, "A6": "[fd00:244::2]:80", "B": B}
NAMES["ALL"] = f"{VIP}:80 NodePort=0.0.0.0:30080 LoadBalancer=192.0.2.1:80"
NAMES["MOVED"] = NAMES["ALL"].replace("30080", "30089")
MARKED = {
    "a NodePort alone": "p VIP PORT -> A external=Local",
    "IPv6": "p [fd00:96::1]:80 NodePort=[::]:30080 -> A6 external=Local",
    "both families, TCP and UDP": """p4 VIP PORT -> A external=Local
        p6 [fd00:96::1]:80 NodePort=[::]:30080 -> A6 external=Local
        u4:UDP VIP PORT -> A external=Local""",
    "an exact frontend meets a NodePort": """a VIP PORT -> A external=Local
        exact 10.96.0.2:30080 ExternalIP=198.18.0.1:30080 -> B external=Local""",
    "the exact frontend has a lower name": """exact 10.96.0.2:30080 ExternalIP=198.18.0.1:30080 -> B external=Local
        z VIP PORT -> A external=Local""",
    "all kinds": """all VIP PORT LoadBalancer=192.0.2.1:80 ExternalIP=192.0.2.2:80 -> A external=Local
        other 10.96.0.2:80 LoadBalancer=192.0.2.3:80 -> A external=Local""",
}
NODES = f"{NODE} 198.18.0.2 fd00:18::1"


@pytest.mark.parametrize("sound", [True, False], ids=["authoritative", "not authoritative"])
@pytest.mark.parametrize("text", MARKED.values(), ids=MARKED)
def test_restart_keeps_all_marks(fake_node: Node, text: str, sound: bool):
    """A changed mark would mean a new virtual service, and connections end with the old one."""
    node, states = fake_node, services(text, NAMES)
    node.run(f"ip addr add {NODE}/32 dev lo")
    node.start()
    node.apply(*states, nodes=NODES)
    before = listed(node), dict(node.ipvs.held)
    assert sum("mark" in str(one) for one in node.ipvs.held) == len(states)
    for _ in range(2):
        node.start()
        assert node.apply(*reversed(states), nodes=NODES, sound=sound).writes == {}
        assert (listed(node), node.ipvs.held) == before


class End(NamedTuple):
    """What a Service with a short circuit to A and B and one connection to A through it becomes. Weights of the real
    servers of the virtual service by mark, while the connection exists (`busy`) and once it has ended (`idle`);
    deleted: it does not exist.
    """

    name: str
    then: str
    busy: str
    idle: str


ENDS = table(
    End,
    """
unchanged                              | m ALL -> A B external=Local               | A=1 B=1 | A=1 B=1
one endpoint is left                   | m ALL -> B external=Local                 | A=0 B=1 | B=1
no endpoint is left                    | m ALL -> external=Local                   | A=0     | none
no ready endpoint                      | m ALL -> external=Local serving=A         | A=0     | none
Cluster now                            | m ALL -> A B                              | A=1 B=1 | deleted
Cluster now, one endpoint              | m ALL -> B                                | A=0 B=1 | deleted
Cluster now, no endpoint               | m ALL                                     | A=0     | deleted
Cluster now, at another port           | m MOVED -> A                              | A=1     | deleted
a ClusterIP alone                      | m VIP -> A B                              | deleted | deleted
deleted                                |                                           | deleted | deleted
UDP, Cluster now                       | m:UDP ALL -> A B                          | A=1 B=1 | deleted
UDP, one stops serving                 | m:UDP ALL -> B external=Local             | B=1     | B=1
UDP, Cluster now, and it stops serving | m:UDP ALL -> B                            | deleted | deleted
UDP, one is terminating                | m:UDP ALL -> B external=Local serving=A,B | A=0 B=1 | B=1
UDP, none serves                       | m:UDP ALL -> external=Local               | none    | none
""",
)


def weights(text: str) -> dict[str, int] | None:
    pairs = (word.partition("=") for word in text.split() if word != "none")
    return None if text == "deleted" else {NAMES[name]: int(weight) for name, _, weight in pairs}


(BOTH_GO,) = services("m ALL -> A B external=Local", NAMES)


@each_row(ENDS)
def test_connections_by_mark_outlive_endpoints_and_policy(fake_node: Node, row: End):
    """As connections of other virtual services do, also across a restart, which ends none and
    begins with the same or with another desired state.
    """
    node, first = fake_node, services(row.then, NAMES)
    before = services("m:UDP ALL -> A B external=Local", NAMES) if row.name.startswith("UDP") else [BOTH_GO]
    node.start()
    node.apply(*first, nodes=NODE)
    goal = without_marks(node)
    for restarts in (False, True):
        node.apply(*before, nodes=NODE)
        assert at_mark(node) == {A: 1, B: 1}
        (one,) = (one for one in node.ipvs.held if one.fwmark)
        (server,) = (end for end in node.ipvs.held[one][1] if str(end) == A)
        node.ipvs.connections[one, server] = (0, 1)
        if restarts:
            node.start()
        node.apply(*first, nodes=NODE)
        if restarts:
            node.start()
            node.apply(*first, nodes=NODE)
        for _ in range(2):
            node.tick()
            node.plane.invalidate()
            node.apply(*first, nodes=NODE)
            assert at_mark(node) == weights(row.busy)
            assert {other.fwmark for other in node.ipvs.held} <= {0, one.fwmark}
            assert without_marks(node) == goal
        node.ipvs.connections.clear()
        node.tick()
        node.apply(*first, nodes=NODE)
        assert at_mark(node) == weights(row.idle)
        names = {name for name, _ in read(node)}
        assert (row.idle == "deleted") == names.isdisjoint((SetName.FWMARKS, SetName.OWN_FWMARKS))


def test_policy_local_again_reuses_its_mark(node: Node):
    """Also when the policy changes back while an older connection exists."""
    for _ in range(2):
        node.apply(BOTH_GO, nodes=NODE)
        (one,) = (one for one in node.ipvs.held if one.fwmark)
        (server, _) = node.ipvs.held[one][1]
        node.ipvs.connections[one, server] = (1, 0)
        node.apply(*services("m ALL -> A", NAMES), nodes=NODE)
        node.tick()
        node.apply(BOTH_GO, nodes=NODE, touched=[BOTH_GO.key])
        node.tick()
        assert marks(node, 30080) == {one.fwmark}
        node.ipvs.connections.clear()
        node.tick()
        assert at_mark(node) == {A: 1, B: 1}


def test_removed_service_keeps_no_mark(node: Node):
    """A fwmark is never given to another Service port, and nothing is remembered of the old one."""
    seen = set[int]()
    for count in range(1, 4):
        node.apply(BOTH_GO, nodes=NODE, touched=[BOTH_GO.key])
        seen |= marks(node, 30080)
        assert len(seen) == count
        node.apply(nodes=NODE, touched=[BOTH_GO.key])
        assert marks(node, 30080) == set()


def at_mark(node: Node) -> dict[str, int] | None:
    """Weights of the real servers of the only virtual service by mark; None if there is none."""
    found = [servers for one, servers in node.ipvs.shown().items() if "mark" in one]
    assert len(found) < 2
    return found[0] if found else None


def without_marks(node: Node) -> frozenset[Element]:
    """The elements that decide where new connections go, without marks."""
    return frozenset(
        (name, parts[:-1] if name is SetName.SHORT_CIRCUITS else parts)
        for name, parts in read(node)
        if name not in (SetName.FWMARKS, SetName.OWN_FWMARKS)
    )


def marks(node: Node, port: int) -> set[int]:
    """The marks of short circuits at this port."""
    return {int(str(parts[3])) for name, parts in read(node) if name is SetName.SHORT_CIRCUITS and parts[2] == port}


def read(node: Node) -> frozenset[Element]:
    """All elements of the table."""
    return node.do(ipvs_cleanup.read_elements) or frozenset()


# ---- changes that others make to the table -------------------------------------------------------

WEB = service("web", f"{VIP}:80", "10.244.1.2:80")
EMPTY = service("empty", "10.96.0.2:80")

FLUSHES = {
    "all rules": "flush ruleset",
    "the table": "delete table inet kbpf",
    "the table is replaced": "delete table inet kbpf; add table inet kbpf",
    "its rules": "flush table inet kbpf",
    "a chain's rules": "flush chain inet kbpf postrouting",
    "a chain and a set": "flush chain inet kbpf postrouting; delete chain inet kbpf postrouting; "
    "flush set inet kbpf hairpin_ips4; delete set inet kbpf hairpin_ips4",
}


def listed(node: Node) -> list[str]:
    """All lines, sorted, because sets and chains may be listed in any order."""
    return sorted(node.run("nft list table inet kbpf").splitlines())


@pytest.mark.parametrize("flush", FLUSHES.values(), ids=FLUSHES)
def test_flushed_rules_are_restored(node: Node, flush: str):
    """Before the first poll, too."""
    node.apply(WEB, EMPTY)
    before = listed(node)
    for _ in range(2):
        node.run(f"nft {flush}")
        node.tick()
        assert listed(node) == before


class RecordedCommands:
    """Records the commands sent to nf_tables, as verb and object."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.words: Counter[str] = Counter()
        real = forward_rules.run_transaction

        def transaction(*commands: Any, **more: Any) -> Any:
            for command in commands:
                for verb, what in command.items():
                    self.words[f"{verb} {next(iter(what))}"] += 1
            return real(*commands, **more)

        def list_chains() -> list[dict[str, Any]]:
            self.words["list chains"] += 1
            return real_list()

        real_list = nft.list_chains
        patch.setattr(forward_rules, "run_transaction", transaction)
        patch.setattr(nft, "list_chains", list_chains)

    def take(self) -> dict[str, int]:
        """The commands since the last call."""
        words, self.words = self.words, Counter()
        return dict(words)


def test_change_writes_only_what_changed_and_lists_nothing(node: Node, monkeypatch):
    """Whatever else is programmed: nothing is listed, neither for our own change, nor after it, nor
    when another table changes.
    """
    many = [service(f"m{i}", f"10.96.1.{i}:80", f"10.244.2.{i}:80") for i in range(1, 101)]
    node.apply(*many)
    node.tick()
    said = RecordedCommands(monkeypatch)
    node.ipvs.calls.clear()
    new = service("m1", "10.96.1.1:80", "10.244.2.1:80 10.244.3.1:80")
    report = node.apply(new, *many[1:], touched=[new.key])
    assert dict(report.writes) == {"nft": 1, "ipvs": 1}
    assert said.take() == {"add element": 1}
    assert node.ipvs.calls == {"changes": 1}
    node.tick()
    assert said.take() == {}
    node.run("nft add table inet theirs")
    node.tick()
    assert said.take() == {"list chains": 1}
    node.tick()
    assert said.take() == {}
    assert node.ipvs.calls == {"changes": 1}


def test_flushed_elements_come_back_after_invalidate(node: Node):
    node.apply(WEB, EMPTY)
    before = listed(node)
    node.run("nft flush set inet kbpf served4")
    node.plane.invalidate()
    node.apply(WEB, EMPTY)
    assert listed(node) == before


def test_flushed_virtual_services_are_restored(node: Node):
    """And a new IPVS socket is opened: after a reload of the module its netlink family has a new
    id.
    """
    node.apply(WEB, EMPTY)
    node.tick()
    before, opened = node.ipvs.shown(), node.ipvs.calls["opened"]
    node.ipvs.held.clear()
    node.tick()
    assert node.ipvs.shown() == before
    assert node.ipvs.calls["opened"] == opened + 1


# ---- UDP flows of deleted backends ---------------------------------------------------------------


def test_ended_udp_flows_are_counted_and_tcp_flows_are_kept(node: Node):
    """tests/values/dataplane/test_ipvs_plan.py: which backends' flows end."""

    def apply(to: str) -> list[Mapping[int, int]]:
        node.apply(service("dns", f"{VIP}:53", to, Protocol.UDP), service("web", f"{VIP}:80", to))
        return [look.flows for look in node.tick().udp_cuts]

    assert apply("10.244.1.2:53 10.244.1.3:53") == []
    for virtual, flows in ((udp(VIP, 53), (1, 4)), (tcp(VIP, 80), (50, 50))):
        node.ipvs.connections[virtual, RealServer(parse_addr("10.244.1.2"), 53)] = flows
    assert apply("10.244.1.3:53") == [{4: 5}]
    assert node.tick().udp_cuts == ()


def udp(address: str, port: int) -> VirtualService:
    return VirtualService(socket.IPPROTO_UDP, parse_addr(address), port)
