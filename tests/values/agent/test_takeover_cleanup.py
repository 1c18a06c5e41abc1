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
from tests.support.table import pairs

CHAINS = pairs("""\
nat KUBE-SERVICES → yes
nat KUBE-NODEPORTS → yes
nat KUBE-POSTROUTING → yes
nat KUBE-MARK-MASQ → yes
nat KUBE-PROXY-CANARY → yes
nat KUBE-SVC-ERIFXISQEP7F7OF4 → yes
nat KUBE-SVL-ERIFXISQEP7F7OF4 → yes
nat KUBE-EXT-ERIFXISQEP7F7OF4 → yes
nat KUBE-FW-ERIFXISQEP7F7OF4 → yes
nat KUBE-SEP-ERIFXISQEP7F7OF4 → yes
nat KUBE-XLB-ERIFXISQEP7F7OF4 → yes
nat KUBE-NODE-PORT → yes
nat KUBE-LOAD-BALANCER → yes
filter KUBE-SERVICES → yes
filter KUBE-EXTERNAL-SERVICES → yes
filter KUBE-FORWARD → yes
filter KUBE-PROXY-FIREWALL → yes
filter KUBE-IPVS-FILTER → yes
mangle KUBE-PROXY-CANARY → yes
filter KUBE-FIREWALL → no, shared with kubelet
mangle KUBE-KUBELET-CANARY → no
mangle KUBE-IPTABLES-HINT → no
nat KUBE-MARK-DROP → no, kubelet's
nat KUBE-HOSTPORTS → no
nat KUBE-HP-ERIFXISQEP7F7OF4 → no
nat KUBE-SVC-MINE → no
nat KUBE-SVC-ERIFXISQEP7F7OF45 → no
filter KUBE-SVC-ERIFXISQEP7F7OF4 → no, kube-proxy has them in nat only
nat KUBE-ROUTER-INPUT → no
filter KUBE-POD-FW-ERIFXISQEP7F7OF4 → no, kube-router's
filter KUBE-NWPLCY-ERIFXISQEP7F7OF4 → no
raw KUBE-SERVICES → no
nat CNI-HOSTPORT-DNAT → no
nat PREROUTING → no
""")
"""A table and a chain → whether kube-proxy made it, and why not."""


@pytest.mark.parametrize(("chain", "whose"), CHAINS)
def test_chain_is_recognized_by_table_and_name(chain: str, whose: str):
    (table, name), is_theirs = chain.split(), whose == "yes"
    assert is_kube_proxy_chain(table, name) == is_theirs
    assert ListedChain("ip6", table, name).is_from_kube_proxy == is_theirs
    assert not ListedChain("inet", table, name).is_from_kube_proxy, "iptables knows no such table"


SETS = pairs("""\
KUBE-CLUSTER-IP → yes
KUBE-6-CLUSTER-IP → yes
KUBE-LOAD-BALANCER-SOURCE-CIDR → yes
KUBE-EXTERNAL-IP-LOCAL → yes
KUBE-IPVS-IPS → yes
KUBE-6-IPVS-IPS → yes
KUBE-HEALTH-CHECK-NODE-PORT → yes
KUBE-NODE-PORT-TCP → yes with ports
KUBE-6-NODE-PORT-LOCAL-SCTP-HASH → yes with ports
KUBE-6-NODE-PORT-LOCAL-SCTP-HAS → yes with ports, kube-proxy truncates names to 31 bytes
KUBE-6-LOAD-BALANCER-SOURCE-CID → yes
KUBE-NODE-PORT-ICMP → no
KUBE-SRC-ERIFXISQEP7F7OF4 → no, kube-router's
KUBE-MINE → no
cali40masq-ipam-pools → no
""")


@pytest.mark.parametrize(("name", "whose"), SETS)
def test_ipset_is_recognized_by_name(name: str, whose: str):
    assert bool(IP_SET_NAME.fullmatch(name)) == whose.startswith("yes")
    assert bool(NODE_PORT_SET_NAME.fullmatch(name)) == whose.startswith("yes with ports")


VIRTUAL = pairs("""\
an address of the device: 6 10.96.0.1 443 → yes
a NodePort at the node's address: 6 198.18.0.1 30080 → yes
another protocol's port: 17 198.18.0.1 30080 → no
another port of the node: 6 198.18.0.1 80 → no
another address: 6 10.96.0.2 443 → no
a mark: 6 10.96.0.1 0 7 → no
""")
"""Protocol, address, port and mark."""


@pytest.mark.parametrize(("row", "whose"), VIRTUAL)
def test_virtual_service_is_recognized_by_address_or_node_port(row: str, whose: str):
    protocol, address, *numbers = row.partition(": ")[2].split()
    service = VirtualServiceKey(int(protocol), parse_addr(address), *map(int, numbers))
    addresses, ports = frozenset((parse_addr("10.96.0.1"),)), frozenset(((6, 30080),))
    assert is_kube_proxy_service(service, addresses, ports) == (whose == "yes")


def test_jumps_are_removed_before_their_targets():
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


def test_only_jumps_to_chains_of_kube_proxy_are_found():
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


def test_input_of_iptables_restore():
    assert legacy_restore_input("nat", SAVED) == (TOLD, 2, 1)


def test_no_input_for_iptables_restore_without_kube_proxy_chains():
    left = "\n".join(line for line in SAVED.splitlines() if "KUBE" not in line)
    assert legacy_restore_input("nat", left) == ("", 0, 0)
