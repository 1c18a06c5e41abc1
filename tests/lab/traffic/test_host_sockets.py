# SPDX-License-Identifier: Apache-2.0
"""Sockets of the node that the socket hooks do not translate: TC egress of the uplink serves them.

With `--socket-lb off` these are all sockets; with `on` those that dial a VIP with source ranges.
Every device has a strict reverse path filter. The node needs its default route: packets for a
Service leave by it, and are translated there.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from tests.support.cluster.cluster import UNROUTED
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import DROPPED, NODES4, NODES6, Field, at, check, crossed
from tests.support.lab.lab import ip, set_rp_filter, until
from tests.support.table import table

OFF, ON = "off", "on"
SERVICES = """
11 31:UDP -> a1
12 32:UDP -> b1
13 33:UDP -> a1 b1
14 34:UDP -> b1 external=Local
16 36:UDP ->
17 37:UDP -> a-net target=9080
18 38:UDP -> a1 b1 ranges=198.51.100.0/24,2001:db8:9::/64
19 39:UDP -> a1 b1 ranges=198.18.0.1/32,fd00:198:18::1/128
20 40:UDP -> a1 b1 ranges=10.244.1.3/32,fd00:10:244:1::3/128
"""
"""A backend in the node's network (17); source ranges that admit no client of this test (18), the node (19), and the
pod a2 (20).
"""


@pytest.fixture(scope="module", params=[OFF, ON])
def field(request) -> Iterator[Field]:
    with Field("--socket-lb", request.param, name="hs", pods=(2, 1)) as made:
        made.create(*made.all_of(SERVICES))
        made.settle()
        for node in made.lab.nodes:
            ip(*(f"route del unreachable {net}" for net in UNROUTED), netns=node.netns)
            set_rp_filter(node.netns, 1)
        yield made


class Row(NamedTuple):
    """What a process on node-1 dials: a kind of address of a Service."""

    name: str
    kind: str
    number: int
    outcome: str


ROWS = table(
    Row,
    """
a pod of this node                                        | ClusterIP  | 1 | a1
a pod of another node                                     | ExternalIP | 2 | b1
pods of both nodes                                        | VIP        | 3 | a1 b1
no endpoints                                              | ExternalIP | 6 | ECONNREFUSED
Local, no local endpoint: the node uses the short circuit | VIP        | 4 | b1
source ranges that admit the node                         | VIP        | 9 | a1 b1
source ranges that do not admit the node                  | VIP        | 8 | timeout
source ranges do not restrict ClusterIPs                  | ClusterIP  | 8 | a1 b1
source ranges do not restrict external IPs                | ExternalIP | 8 | a1 b1
""",
)


def base(protocol: str) -> int:
    return 10 if protocol == "tcp" else 30


@crossed
@pytest.mark.parametrize("field", [OFF], indirect=True)
def test_processes_of_the_node_are_served(field: Field, protocol: str, v6: bool):
    """Backends see the node's address, which is the process's own. NodePorts of another node come
    from an outside client there.
    """
    own, other = NODES6 if v6 else NODES4
    for row in ROWS:
        to = at(row.kind, base(protocol) + row.number, v6)
        check(field, Dial(row.name, "host-1", to, row.outcome, protocol, own))
    unknown = at("ClusterIP", base(protocol) + 1, v6).removesuffix(":80") + ":81"
    check(field, Dial("unknown port", "host-1", unknown, REFUSED, protocol))
    check(field, Dial("another node", "host-1", at("NodePort", base(protocol) + 1, v6, 2), "a1", protocol, other))


@crossed
@pytest.mark.parametrize("field", [OFF], indirect=True)
def test_packets_that_leave_by_no_device_are_not_served(field: Field, protocol: str, v6: bool):
    """As in docs/limits.md: the node's own NodePort, and backends in the node's network."""
    to = at("NodePort", base(protocol) + 1, v6)
    check(field, Dial("the node's own NodePort", "host-1", to, REFUSED, protocol))
    before = field.agent.reasons()[Reason.NO_ROUTE]
    to = at("VIP", base(protocol) + 7, v6)
    check(field, Dial("a backend in the node's network", "host-1", to, DROPPED, protocol))
    until("it is counted", lambda: field.agent.reasons()[Reason.NO_ROUTE] > before)


LETS_IN = {9: ("host-1",), 10: ("a2", "a2!")}


@crossed
def test_a_vip_with_source_ranges_is_served_by_the_packet_path(field: Field, protocol: str, v6: bool):
    """The hooks pass it, since the source is not known at connect(). A hooked pod, an unhooked pod
    and the node are therefore checked by their packets. Backends see the node's address for a VIP.
    """
    own = NODES6[0] if v6 else NODES4[0]
    for who, number in product(("host-1", "a2", "a2!"), LETS_IN):
        lets_in = who in LETS_IN[number]
        outcome = "a1 b1" if lets_in else DROPPED
        before = field.agent.reasons()
        check(field, Dial(f"{who}, {number}", who, at("VIP", base(protocol) + number, v6), outcome, protocol, own))
        reason = Reason.NEW_FLOW if lets_in else Reason.NOT_ALLOWED
        # A packet without an answer may be counted later.
        until("it is counted", lambda: field.agent.reasons()[reason] > before[reason])  # noqa: B023
