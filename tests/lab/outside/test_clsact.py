# SPDX-License-Identifier: Apache-2.0
"""The packet path attached as filters on clsact, as on kernels without TCX: the core flows."""

from collections.abc import Iterator

import pytest

from tests.support.lab.dial import Dial
from tests.support.lab.field import Field, check
from tests.support.lab.lab import Agent, on, run
from tests.support.table import table


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field(name="cl", pods=(2, 1), agents=1, module="tests.support.runtime.clsact_agent") as made:
        made.create(*made.all_of(SERVICES))
        made.settle()
        yield made


SERVICES = """
81 91:UDP -> a1
82 92:UDP -> b1
83 93:UDP -> a1 b1 external=Local
84 94:UDP ->
85 95:UDP -> b1 external=Local
"""
ROWS = table(
    Dial,
    """
a local backend              | outside | 198.18.0.1:30081       | a1           | tcp | 198.18.0.1
a remote one                 | outside | 198.18.0.1:30082       | b1           | tcp | 198.18.0.1
policy Local                 | outside | 198.18.0.1:30083       | a1           | tcp | 198.18.0.254
no endpoints                 | outside | 198.18.0.1:30084       | ECONNREFUSED | tcp
Local, no local endpoint     | outside | 198.18.0.1:30085       | timeout      | tcp
a pod without hooks          | a2!     | 10.96.0.82:80          | b1           | tcp | 10.244.1.3
hairpin                      | a1!     | 192.0.2.81:80          | a1           | tcp | 198.18.0.1
a local backend, UDP         | outside | [fd00:198:18::1]:30091 | a1           | udp | fd00:198:18::1
a remote one, UDP            | outside | [fd00:198:18::1]:30092 | b1           | udp | fd00:198:18::1
policy Local, UDP            | outside | [fd00:198:18::1]:30093 | a1           | udp | fd00:198:18::fe
no endpoints, UDP            | outside | [fd00:198:18::1]:30094 | ECONNREFUSED | udp
Local, no local one, UDP     | outside | [fd00:198:18::1]:30095 | timeout      | udp
a pod without hooks, UDP     | a2!     | [fd00:10:96::92]:80    | b1           | udp | fd00:10:244:1::3
hairpin, UDP                 | a1!     | [2001:db8::91]:80      | a1           | udp | fd00:198:18::1
""",
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_dial(field: Field, row: Dial):
    check(field, row)


def filters(agent: Agent, direction: str) -> str:
    return run("tc", "-n", agent.node.netns, "filter", "show", "dev", "eth0", direction)


def test_a_restart_keeps_the_clsact_filters(field: Field):
    for direction in ("ingress", "egress"):
        assert "direct-action" in filters(field.agent, direction)
        assert "kbpf" in filters(field.agent, direction)
    before = [filters(field.agent, direction) for direction in ("ingress", "egress")]
    field.agent.stop()
    check(field, ROWS[0])
    field.agent.start()
    assert [filters(field.agent, direction) for direction in ("ingress", "egress")] == before
    check(field, ROWS[0])


@pytest.mark.parametrize(
    ("device", "rows"), [("p1", (0, 2, 7, 9)), ("eth0", (1, 8))], ids=["of a pod", "to other nodes"]
)
def test_a_device_with_an_ingress_qdisc_of_another_tool(field: Field, device: str, rows: tuple[int, ...]):
    """There is no place at egress, so no program sees the first packet of a flow leave by it."""
    node = field.lab.nodes[0]
    field.agent.stop()
    on(node, "tc", "qdisc", "del", "dev", device, "clsact")
    on(node, "tc", "qdisc", "add", "dev", device, "ingress")
    try:
        field.agent.start()
        for row in rows:
            check(field, ROWS[row])
    finally:
        on(node, "tc", "qdisc", "del", "dev", device, "ingress")
