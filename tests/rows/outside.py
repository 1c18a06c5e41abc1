# SPDX-License-Identifier: Apache-2.0
"""Which backends answer clients outside the cluster, and pods whose sockets are not hooked.

The nodes, the pods and the client are those of tests/support/lab/field.py, with the packet path on.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from tests.support.cluster.kube_objects import Object
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import DROPPED, NODES4, NODES6, OUT4, OUT6, at
from tests.support.lab.placed import Placed
from tests.support.table import table

SERVICES = """
11 21:UDP -> a1
12 22:UDP -> b1
13 23:UDP -> a1 b1
14 24:UDP -> a1 b1 external=Local
15 25:UDP -> b1 external=Local
16 26:UDP ->
17 27:UDP -> a-net target=9080
18 28:UDP -> b-net target=9080
31        -> a1 a2 a3 b1 b2 affinity=3600
32        -> a1 b1 ranges=198.18.0.0/24,fd00:198:18::/64
33        -> a1 b1 ranges=198.51.100.0/24,2001:db8:9::/64
34:UDP    -> a1 ranges=198.51.100.0/24,2001:db8:9::/64
35        -> a1 ranges=10.244.1.0/24,fd00:10:244:1::/64
"""


def objects(placed: Placed) -> list[Object]:
    return placed.all_of(SERVICES)


class Row(NamedTuple):
    """Dials of a client by every protocol and family, at each of these kinds of address. `number`: of the TCP Service,
    that of UDP is 10 more. `sees`: the address that the backend sees: of this place, or of a node (host-1, host-2).
    """

    what: str
    client: str
    kinds: str
    number: int
    outcome: str
    sees: str = ""
    node_number: int = 1


TEMPLATES = table(
    Row,
    """
Cluster, a1: masqueraded                | outside | NodePort ExternalIP VIP           | 1 | a1           | host-1
Cluster, b1: masqueraded                | outside | NodePort ExternalIP VIP           | 2 | b1           | host-1
Cluster, a1 b1: masqueraded             | outside | NodePort ExternalIP VIP           | 3 | a1 b1        | host-1
Local: the client's own address         | outside | NodePort ExternalIP VIP           | 4 | a1           | outside
no endpoints                            | outside | NodePort ExternalIP VIP ClusterIP | 6 | ECONNREFUSED
a backend in the node's network         | outside | NodePort ExternalIP VIP           | 7 | a-net        | outside
a backend in the other node's network   | outside | NodePort ExternalIP VIP           | 8 | b-net        | host-1
at the other node                       | outside | NodePort                          | 1 | a1           | host-2  | 2
Local, at the other node                | outside | NodePort                          | 4 | b1           | outside | 2
Local, no local endpoint                | outside | NodePort VIP                      | 5 | timeout
a local backend: no masquerading        | outside | ClusterIP                         | 1 | a1           | outside
a pod                                   | a2!     | NodePort ExternalIP VIP           | 3 | a1 b1        | host-1
a pod                                   | a2!     | ClusterIP                         | 3 | a1 b1        | a2
hairpin                                 | a1!     | NodePort ExternalIP VIP ClusterIP | 1 | a1           | host-1
a pod, no endpoints                     | a2!     | NodePort ExternalIP VIP ClusterIP | 6 | ECONNREFUSED
Local, no local endpoint: short circuit | a2!     | NodePort                          | 5 | b1           | a2
the other node's NodePort               | a2!     | NodePort                          | 1 | a1           | host-2  | 2
a pod, a backend in the node's network  | a2!     | NodePort                          | 7 | a-net        | a2
""",
)
"""a2! is masqueraded by its node for all addresses but ClusterIPs, as kube-proxy does."""
RANGES = table(
    Row,
    """
admitted                   | outside | VIP        | 32 | a1 b1   | host-1
not admitted               | outside | VIP        | 33 | timeout
not for NodePorts          | outside | NodePort   | 33 | a1 b1   | host-1
not for external IPs       | outside | ExternalIP | 33 | a1 b1   | host-1
a pod, not admitted        | a2!     | VIP        | 33 | timeout
a pod, admitted            | a2!     | VIP        | 35 | a1      | host-1
a hooked pod, admitted     | a2      | VIP        | 35 | a1      | host-1
a hooked pod, not admitted | a2      | VIP        | 33 | timeout
""",
)
ADDRESSES = {
    "": ("", ""),
    "outside": (OUT4, OUT6),
    "a2": ("10.244.1.3", "fd00:10:244:1::3"),
    **{f"host-{number}": own for number, own in enumerate(zip(NODES4, NODES6, strict=True), 1)},
}


def dials(row: Row, protocol: str, v6: bool, number: int) -> Iterator[Dial]:
    for kind in row.kinds.split():
        name = f"{protocol} {'v6' if v6 else 'v4'} {kind}: {row.what}"
        to = at(kind, number, v6, row.node_number)
        yield Dial(name, row.client, to, row.outcome, protocol, ADDRESSES[row.sees][v6])


def rows() -> Iterator[Dial]:
    for protocol, v6 in product(("tcp", "udp"), (False, True)):
        base = 10 if protocol == "tcp" else 20
        for row in TEMPLATES:
            yield from dials(row, protocol, v6, base + row.number)
        unknown = at("ClusterIP", 11, v6).removesuffix(":80") + ":81"
        for who in ("outside", "a2!"):
            name = f"{protocol} {'v6' if v6 else 'v4'} ClusterIP: unknown port, {who}"
            yield Dial(name, who, unknown, REFUSED, protocol)
    for v6 in (False, True):
        for row in RANGES:
            ranged = row._replace(what=f"source ranges, {row.what}")
            yield from dials(ranged, "tcp", v6, row.number)
        yield from dials(Row("source ranges, not admitted", "outside", "VIP", 34, DROPPED), "udp", v6, 34)


ROWS = tuple(rows())
