# SPDX-License-Identifier: Apache-2.0
"""Recognition of kube-proxy's chains, ipsets and virtual services, and the commands that remove
them.
"""

import pytest

from kbpf.kernel.net.ipvs import VirtualServiceKey
from kbpf.model.address import parse_addr
from kbpf.takeover.conntrack_keepalive import NODE_PORT_SET_NAME
from kbpf.takeover.kube_proxy_cleanup import (
    IP_SET_NAME,
    Jump,
    ListedChain,
    find_jumps,
    is_kube_proxy_chain,
    is_kube_proxy_service,
    legacy_restore_input,
    nft_removal_commands,
)

CHAINS = [
    ("nat", "KUBE-SERVICES", True),
    ("nat", "KUBE-NODEPORTS", True),
    ("nat", "KUBE-POSTROUTING", True),
    ("nat", "KUBE-MARK-MASQ", True),
    ("nat", "KUBE-PROXY-CANARY", True),
    ("nat", "KUBE-SVC-ERIFXISQEP7F7OF4", True),
    ("nat", "KUBE-SVL-ERIFXISQEP7F7OF4", True),
    ("nat", "KUBE-EXT-ERIFXISQEP7F7OF4", True),
    ("nat", "KUBE-FW-ERIFXISQEP7F7OF4", True),
    ("nat", "KUBE-SEP-ERIFXISQEP7F7OF4", True),
    ("nat", "KUBE-XLB-ERIFXISQEP7F7OF4", True),
    ("nat", "KUBE-NODE-PORT", True),
    ("nat", "KUBE-LOAD-BALANCER", True),
    ("filter", "KUBE-SERVICES", True),
    ("filter", "KUBE-EXTERNAL-SERVICES", True),
    ("filter", "KUBE-FORWARD", True),
    ("filter", "KUBE-PROXY-FIREWALL", True),
    ("filter", "KUBE-IPVS-FILTER", True),
    ("mangle", "KUBE-PROXY-CANARY", True),
    ("filter", "KUBE-FIREWALL", False),  # shared with kubelet
    ("mangle", "KUBE-KUBELET-CANARY", False),
    ("mangle", "KUBE-IPTABLES-HINT", False),
    ("nat", "KUBE-MARK-DROP", False),  # kubelet's
    ("nat", "KUBE-HOSTPORTS", False),
    ("nat", "KUBE-HP-ERIFXISQEP7F7OF4", False),
    ("nat", "KUBE-SVC-MINE", False),
    ("nat", "KUBE-SVC-ERIFXISQEP7F7OF45", False),
    ("filter", "KUBE-SVC-ERIFXISQEP7F7OF4", False),  # kube-proxy has them in nat only
    ("nat", "KUBE-ROUTER-INPUT", False),
    ("filter", "KUBE-POD-FW-ERIFXISQEP7F7OF4", False),  # kube-router's
    ("filter", "KUBE-NWPLCY-ERIFXISQEP7F7OF4", False),
    ("raw", "KUBE-SERVICES", False),
    ("nat", "CNI-HOSTPORT-DNAT", False),
    ("nat", "PREROUTING", False),
]


@pytest.mark.parametrize(("table", "name", "is_theirs"), CHAINS)
def test_chain_is_recognized_by_table_and_name(table: str, name: str, is_theirs: bool) -> None:
    assert is_kube_proxy_chain(table, name) == is_theirs
    assert ListedChain("ip6", table, name).is_from_kube_proxy == is_theirs
    assert not ListedChain("inet", table, name).is_from_kube_proxy, "iptables knows no such table"


SETS_ROWS = [
    ("KUBE-CLUSTER-IP", True, False),
    ("KUBE-6-CLUSTER-IP", True, False),
    ("KUBE-LOAD-BALANCER-SOURCE-CIDR", True, False),
    ("KUBE-EXTERNAL-IP-LOCAL", True, False),
    ("KUBE-IPVS-IPS", True, False),
    ("KUBE-6-IPVS-IPS", True, False),
    ("KUBE-HEALTH-CHECK-NODE-PORT", True, False),
    ("KUBE-NODE-PORT-TCP", True, True),
    ("KUBE-6-NODE-PORT-LOCAL-SCTP-HASH", True, True),
    ("KUBE-6-NODE-PORT-LOCAL-SCTP-HAS", True, True),  # kube-proxy truncates names to 31 bytes
    ("KUBE-6-LOAD-BALANCER-SOURCE-CID", True, False),
    ("KUBE-NODE-PORT-ICMP", False, False),
    ("KUBE-SRC-ERIFXISQEP7F7OF4", False, False),  # kube-router's
    ("KUBE-MINE", False, False),
    ("cali40masq-ipam-pools", False, False),
]


@pytest.mark.parametrize(("name", "is_theirs", "has_ports"), SETS_ROWS)
def test_ipset_is_recognized_by_name(name: str, is_theirs: bool, has_ports: bool) -> None:
    assert bool(IP_SET_NAME.fullmatch(name)) == is_theirs
    assert bool(NODE_PORT_SET_NAME.fullmatch(name)) == has_ports


VIRTUAL = [
    ("an address of the device", VirtualServiceKey(6, parse_addr("10.96.0.1"), 443), True),
    (
        "a NodePort at the node's address",
        VirtualServiceKey(6, parse_addr("198.18.0.1"), 30080),
        True,
    ),
    ("another protocol's port", VirtualServiceKey(17, parse_addr("198.18.0.1"), 30080), False),
    ("another port of the node", VirtualServiceKey(6, parse_addr("198.18.0.1"), 80), False),
    ("another address", VirtualServiceKey(6, parse_addr("10.96.0.2"), 443), False),
    ("a mark", VirtualServiceKey(6, parse_addr("10.96.0.1"), 0, 7), False),
]


@pytest.mark.parametrize(("name", "service", "is_theirs"), VIRTUAL, ids=[r[0] for r in VIRTUAL])
def test_virtual_service_is_recognized_by_address_or_node_port(
    name: str, service: VirtualServiceKey, is_theirs: bool
) -> None:
    addresses, ports = frozenset((parse_addr("10.96.0.1"),)), frozenset(((6, 30080),))
    assert is_kube_proxy_service(service, addresses, ports) == is_theirs


def test_jumps_are_removed_before_their_targets() -> None:
    base = ListedChain("ip", "nat", "PREROUTING", base=True)
    chains = [
        base,
        ListedChain("ip", "nat", "KUBE-SERVICES"),
        ListedChain("ip", "nat", "mine"),
        ListedChain("inet", "nat", "KUBE-SERVICES"),
    ]
    where = {"family": "ip", "table": "nat"}
    assert list(nft_removal_commands(chains, [Jump(base, 7)])) == [
        {"delete": {"rule": {**where, "chain": "PREROUTING", "handle": 7}}},
        {"flush": {"chain": {**where, "name": "KUBE-SERVICES"}}},
        {"delete": {"chain": {**where, "name": "KUBE-SERVICES"}}},
    ]


def test_only_jumps_to_chains_of_kube_proxy_are_found() -> None:
    chain = ListedChain("ip", "filter", "FORWARD", base=True)
    listed = [
        {"chain": {"name": "FORWARD"}},
        {"rule": {"handle": 1, "expr": [{"counter": {}}, {"jump": {"target": "KUBE-FORWARD"}}]}},
        {"rule": {"handle": 2, "expr": [{"xt": None}, {"goto": {"target": "KUBE-SERVICES"}}]}},
        {"rule": {"handle": 3, "expr": [{"jump": {"target": "KUBE-FIREWALL"}}]}},
        {"rule": {"handle": 4, "expr": [{"drop": None}]}},
        {"rule": {"handle": 5}},
    ]
    assert list(find_jumps(chain, listed)) == [Jump(chain, 1), Jump(chain, 2)]


SAVED = """\
# Generated by iptables-save
*nat
:PREROUTING ACCEPT [12:720]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ERIFXISQEP7F7OF4 - [0:0]
:MINE - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m comment --comment "-j KUBE-SERVICES, but not this one" -j MINE
-A PREROUTING -p tcp -j REDIRECT --to-ports 80
-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-ERIFXISQEP7F7OF4
COMMIT
# Completed
"""
TOLD = """\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ERIFXISQEP7F7OF4 - [0:0]
-D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-X KUBE-SERVICES
-X KUBE-SVC-ERIFXISQEP7F7OF4
COMMIT
"""


def test_input_of_iptables_restore() -> None:
    assert legacy_restore_input("nat", SAVED) == (TOLD, 2, 1)


def test_no_input_for_iptables_restore_without_kube_proxy_chains() -> None:
    left = "\n".join(line for line in SAVED.splitlines() if "KUBE" not in line)
    assert legacy_restore_input("nat", left) == ("", 0, 0)
