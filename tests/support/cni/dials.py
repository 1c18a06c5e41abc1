# SPDX-License-Identifier: Apache-2.0
"""Connections to Services in a CniCluster, as rows: what each side must see."""

from dataclasses import dataclass

from tests.support.cni.cluster import CniCluster
from tests.support.lab.dial import explain
from tests.support.lab.field import DROPPED, at, split

CLIENT = "the client's address"
NODE = "an address of the client's node, or of the node dialled from outside"
BRIDGED = "NODE if both pods are on the node's bridge, where replies would not pass the node; else CLIENT"
ADMITTED, REJECTED = "admitted", "rejected"
"""Outcomes of a row about NetworkPolicies."""
WAIT = 1.0


def create_services(cluster: CniCluster) -> None:
    """TCP Services 11 to 15, UDP 21 to 25: local, remote, both, Local, Local without a local
    backend.
    """
    for base, protocol in ((10, "TCP"), (20, "UDP")):
        for number, who in ((1, "a1"), (2, "b1"), (3, "a1 b1")):
            cluster.create(*cluster.all_ways(base + number, who, protocol))
        local = {"external_policy": "Local"}
        cluster.create(*cluster.all_ways(base + 4, "a1 b1", protocol, **local))
        cluster.create(*cluster.all_ways(base + 5, "b1", protocol, **local))
    cluster.settle()


@dataclass(frozen=True, slots=True)
class Row:
    """A connection: its client, the kind of address that it dials, the Service (0 to 9, in the
    protocol's row of ten) and the node; which backends answer, and which address they see. With
    check_policy(), `outcome` is what the policies say, and `sees` does not matter.
    """

    client: str
    kind: str
    number: int
    outcome: str
    sees: str = CLIENT
    node_number: int = 1


def check(cluster: CniCluster, row: Row, protocol: str, v6: bool) -> None:
    base = 10 if protocol == "tcp" else 20
    to = at(row.kind, base + row.number, v6, row.node_number)
    client, names = cluster[row.client], row.outcome.split()
    fails = row.outcome == DROPPED
    answer = client.many(
        1 if fails else 24 if len(names) > 1 else 3,
        *split(to),
        protocol=protocol,
        connected=True,
        **({"timeout": WAIT} if fails else {}),
    )

    def why() -> str:
        return f"{row}\n{to}: got {answer}\n{explain(cluster, row.client, split(to)[0])}"

    if fails:
        assert (answer["names"], set(answer["errors"])) == ({}, {DROPPED}), why()
        return
    assert not answer["errors"], why()
    assert set(answer["names"]) == set(names), why()
    home = cluster.home[row.client]
    if row.client == "outside":
        home = cluster.lab.nodes[row.node_number - 1]
    node, own = cluster.addresses(home), {client.ip6 if v6 else client.ip}
    for name, _, seen, peer, peer_port in answer["seen"]:
        bridged = row.sees == BRIDGED and cluster.cni.is_bridged and cluster.home[name] is home
        assert seen in (node if row.sees == NODE or bridged else own), (name, seen, why())
        assert (peer, peer_port) == split(to), why()


def check_policy(cluster: CniCluster, row: Row, protocol: str, v6: bool) -> None:
    base = 10 if protocol == "tcp" else 20
    to = at(row.kind, base + row.number, v6, row.node_number)
    answer = cluster[row.client].many(2, *split(to), protocol=protocol, connected=True, timeout=WAIT)

    def why() -> str:
        programmed = ""
        if cluster.proxy_mode == "kbpf":
            programmed = explain(cluster, row.client, split(to)[0])
        return f"{row}\n{to}: got {answer}\n{programmed}"

    if row.outcome == ADMITTED:
        assert sum(answer["names"].values()) == 2, why()
    else:
        assert not answer["names"], why()
