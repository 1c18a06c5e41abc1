# SPDX-License-Identifier: Apache-2.0
"""`--forwarding netfilter` with a full conntrack table. Not collected by default, since the size of
the table is a setting of the whole machine: it runs in guests (tests/kernels).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from tests.lab.outside.netfilter import objects
from tests.support.features import needs
from tests.support.lab.dial import Dial
from tests.support.lab.field import DROPPED, NODES4, Field, at, check, split

pytestmark = needs("conntrack_nat")

MAX = Path("/proc/sys/net/netfilter/nf_conntrack_max")
HELD = 8


@pytest.fixture
def field() -> Iterator[Field]:
    with Field("--forwarding", "netfilter", name="fc", agents=1) as made:
        made.create(*objects(made))
        made.settle()
        yield made


def test_new_connections_are_dropped_and_counted(field: Field):
    """None is let through untranslated, and those that exist continue."""
    client, to = field["outside"], at("NodePort", 12)
    for number in range(HELD):
        assert "name" in client.tcp(*split(to), keep=str(number))
    before, limit = field.agent.reasons()[Reason.TABLE_FULL], MAX.read_text()
    MAX.write_text("2")
    try:
        check(field, Dial("a new connection", "outside", to, DROPPED))
        assert field.agent.reasons()[Reason.TABLE_FULL] > before
        for number in range(HELD):
            assert "name" in client.ask("talk", keep=str(number))
    finally:
        MAX.write_text(limit)
    check(field, Dial("there is room", "outside", to, "b1", "tcp", NODES4[0]))
