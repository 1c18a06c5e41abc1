# SPDX-License-Identifier: Apache-2.0
"""The packet path attached as filters on clsact, as on kernels without TCX: the core flows."""

from collections.abc import Iterator
from itertools import product

import pytest

from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import DROPPED, NODES4, NODES6, OUT4, OUT6, Field, at, check
from tests.support.lab.lab import Agent, run


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    """Services 81 (local backend), 82 (remote), 83 (policy Local), 84 (no endpoints), 85 (policy
    Local, remote backend); UDP: 91 to 95.
    """
    with Field(name="cl", pods=(2, 1), module="tests.support.runtime.clsact_agent") as made:
        for base, protocol in ((80, "TCP"), (90, "UDP")):
            for number, (who, policy) in enumerate(SETS, 1):
                options = {"external_policy": policy}
                made.create(*made.all_ways(base + number, who, protocol, **options))
        made.settle()
        yield made


SETS = (("a1", "Cluster"), ("b1", "Cluster"), ("a1 b1", "Local"), ("", "Cluster"), ("b1", "Local"))


def rows() -> Iterator[Dial]:
    for protocol, v6 in product(("tcp", "udp"), (False, True)):
        base = 80 if protocol == "tcp" else 90
        own, client = ((NODES6 if v6 else NODES4)[0]), (OUT6 if v6 else OUT4)
        say = f"{protocol} {'v6' if v6 else 'v4'}"
        for number, who, sees in (
            (1, "a1", own),
            (2, "b1", own),
            (3, "a1", client),
            (4, REFUSED, ""),
            (5, DROPPED, ""),
        ):
            to = at("NodePort", base + number, v6)
            yield Dial(f"{say} NodePort {who} as {sees}", "outside", to, who, protocol, sees)
        pod = "fd00:10:244:1::3" if v6 else "10.244.1.3"
        yield Dial(f"{say} a pod without hooks", "a2!", at("ClusterIP", base + 2, v6), "b1", protocol, pod)
        yield Dial(f"{say} hairpin", "a1!", at("VIP", base + 1, v6), "a1", protocol, own)


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: row.name)
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
    row = next(rows())
    check(field, row)
    field.agent.start()
    assert [filters(field.agent, direction) for direction in ("ingress", "egress")] == before
    check(field, row)
