# SPDX-License-Identifier: Apache-2.0
"""Which backends answer clients outside the cluster, and pods whose sockets are not hooked.

The nodes, the pods and the client are those of tests/support/lab/field.py, with the packet path on.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from tests.support.cluster.kube_objects import Object, slice_port
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import KINDS, NODES4, NODES6, OUT4, OUT6, at
from tests.support.lab.placed import HOST_PORT, Placed
from tests.support.table import table


def objects(placed: Placed) -> list[Object]:
    """TCP Services at 10 + number, UDP Services at 20 + number."""
    every, made = placed.all_ways, []
    local = {"external_policy": "Local"}
    for base, protocol in ((10, "TCP"), (20, "UDP")):
        for number, who in ((1, "a1"), (2, "b1"), (3, "a1 b1")):
            made += every(base + number, who, protocol)
        made += every(base + 4, "a1 b1", protocol, **local)
        made += every(base + 5, "b1", protocol, **local)
        made += every(base + 6, "", protocol)
        for number, who in ((7, "a-net"), (8, "b-net")):
            service = every(base + number, "", protocol)[0]
            port = slice_port(HOST_PORT, protocol=protocol)
            name = service["metadata"]["name"]
            made += [service, *(placed.slice(name, who, port, v6=v6) for v6 in (False, True))]
    made += every(31, "a1 a2 a3 b1 b2", affinity_seconds=3600)
    made += every(32, "a1 b1", source_ranges=["198.18.0.0/24", "fd00:198:18::/64"])
    made += every(33, "a1 b1", source_ranges=["198.51.100.0/24", "2001:db8:9::/64"])
    made += every(34, "a1", "UDP", source_ranges=["198.51.100.0/24", "2001:db8:9::/64"])
    made += every(35, "a1", source_ranges=["10.244.1.0/24", "fd00:10:244:1::/64"])
    return made


class Row(NamedTuple):
    """What a client dials at each kind of address (`each`: all but the ClusterIP), over TCP and UDP in both families.
    `sees`: the backend sees the client's address, or an address of a node: `own` is the dialled one's. a1! and a2! are
    pods whose sockets are not hooked; their node masquerades them for all addresses but ClusterIPs, as kube-proxy does.
    """

    what: str
    client: str
    kinds: str
    number: int
    outcome: str
    sees: str = ""
    node: int = 1


EVERYWHERE = table(
    Row,
    """
Cluster, local: masqueraded               | outside | each              | 1 | a1           | own
Cluster, remote: masqueraded              | outside | each              | 2 | b1           | own
Cluster, both: masqueraded                | outside | each              | 3 | a1 b1        | own
Local: the client's own address           | outside | each              | 4 | a1           | client
no endpoints                              | outside | each              | 6 | ECONNREFUSED
a backend in the node's network           | outside | each              | 7 | a-net        | client
a backend in the other node's network     | outside | each              | 8 | b-net        | own
at the other node                         | outside | NodePort          | 1 | a1           | other  | 2
Local, at the other node                  | outside | NodePort          | 4 | b1           | client | 2
Local, no local endpoint                  | outside | NodePort VIP      | 5 | timeout
a local backend: the client's own address | outside | ClusterIP         | 1 | a1           | client
no endpoints                              | outside | ClusterIP         | 6 | ECONNREFUSED
both: masqueraded                         | a2!     | each              | 3 | a1 b1        | own
both: the pod's own address               | a2!     | ClusterIP         | 3 | a1 b1        | client
hairpin                                   | a1!     | each ClusterIP    | 1 | a1           | own
no endpoints                              | a2!     | each ClusterIP    | 6 | ECONNREFUSED
Local, no local endpoint: short circuit   | a2!     | NodePort          | 5 | b1           | client
the other node's NodePort                 | a2!     | NodePort          | 1 | a1           | other  | 2
a backend in the node's network           | a2!     | NodePort          | 7 | a-net        | client
""",
)
CLIENTS = {"outside": (OUT4, OUT6), "a2!": ("10.244.1.3", "fd00:10:244:1::3")}


def rows() -> Iterator[Dial]:
    for (protocol, base), v6, row in product((("tcp", 10), ("udp", 20)), (False, True), EVERYWHERE):
        own, other = NODES6 if v6 else NODES4
        client = CLIENTS[row.client][v6] if row.sees == "client" else ""
        sees = {"own": own, "other": other, "client": client, "": ""}[row.sees]
        for kind in row.kinds.replace("each", " ".join(KINDS[:3])).split():
            to = at(kind, base + row.number, v6, row.node)
            name = f"{protocol} {'v6' if v6 else 'v4'} {kind}, {row.client}: {row.what}"
            yield Dial(name, row.client, to, row.outcome, protocol, sees)


class Range(NamedTuple):
    """A client, what it dials, the answer, and whether the backend sees its node's address."""

    what: str
    client: str
    kind: str
    number: int
    outcome: str
    is_masqueraded: bool


RANGES = table(
    Range,
    """
admitted                   | outside | VIP        | 32 | a1 b1     | yes
not admitted               | outside | VIP        | 33 | timeout   | no
not admitted, UDP          | outside | VIP        | 34 | timeout   | no
not for NodePorts          | outside | NodePort   | 33 | a1 b1     | yes
not for external IPs       | outside | ExternalIP | 33 | a1 b1     | yes
a pod, not admitted        | a2!     | VIP        | 33 | timeout   | no
a pod, admitted            | a2!     | VIP        | 35 | a1        | yes
a hooked pod, admitted     | a2      | VIP        | 35 | a1        | yes
a hooked pod, not admitted | a2      | VIP        | 33 | timeout   | no
""",
)


def ranges() -> Iterator[Dial]:
    for v6, row in product((False, True), RANGES):
        own = (NODES6 if v6 else NODES4)[0] if row.is_masqueraded else ""
        protocol = "udp" if row.number == 34 else "tcp"
        name = f"{'v6' if v6 else 'v4'} source ranges, {row.what}"
        yield Dial(name, row.client, at(row.kind, row.number, v6), row.outcome, protocol, own)


def unknown_ports() -> Iterator[Dial]:
    """ClusterIPs at a port that no Service has."""
    for protocol, v6, who in product(("tcp", "udp"), (False, True), ("outside", "a2!")):
        to = at("ClusterIP", 11, v6).removesuffix(":80") + ":81"
        say = f"{protocol} {'v6' if v6 else 'v4'}"
        yield Dial(f"{say} ClusterIP: unknown port, {who}", who, to, REFUSED, protocol)


ROWS = (*rows(), *ranges(), *unknown_ports())
