# SPDX-License-Identifier: Apache-2.0
"""Connections to Services in a CniCluster, as rows: what each side must see."""

from typing import NamedTuple

from tests.support.cni.cluster import CniCluster
from tests.support.lab.dial import explain
from tests.support.lab.field import DROPPED, at, split

WAIT = 1.0


def create_services(cluster: CniCluster) -> None:
    """TCP Services 11 to 15, UDP 21 to 25: local, remote, both, Local, Local without a local
    backend.
    """
    cluster.create(
        *cluster.all_of("""
            11 21:UDP -> a1
            12 22:UDP -> b1
            13 23:UDP -> a1 b1
            14 24:UDP -> a1 b1 external=Local
            15 25:UDP -> b1 external=Local
        """)
    )
    cluster.settle()


class Row(NamedTuple):
    """A connection: its client, the kind of address that it dials, the Service (0 to 9, in the
    protocol's row of ten) and the node; which backends answer, and whose address they see. With
    check_policy(), `outcome` is admitted or rejected, and `sees` does not matter.

    `sees`: client; node (the client's, or the one dialled from outside); bridged: node if both pods are on the node's
    bridge, where replies would not pass the node, else client.
    """

    client: str
    kind: str
    number: int
    outcome: str
    sees: str = "client"
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
        bridged = row.sees == "bridged" and cluster.cni.is_bridged and cluster.home[name] is home
        assert seen in (node if row.sees == "node" or bridged else own), (name, seen, why())
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

    if row.outcome == "admitted":
        assert sum(answer["names"].values()) == 2, why()
    else:
        assert not answer["names"], why()
