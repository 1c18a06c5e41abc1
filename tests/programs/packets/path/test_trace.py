# SPDX-License-Identifier: Apache-2.0
"""`kbpf trace --confirm` tries a packet from outside on a copy of the programs, which leaves nothing
behind. Its predictions are compared with the programs in test_dials.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import MAPS, Reason
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path.rehearsal import Arrival, Rehearsal
from kbpf.errors import NotFoundError
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_QUEUE, BPF_MAP_TYPE_SK_STORAGE
from kbpf.model.address import parse_addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol
from tests.programs.packets.path.single_packets import CLIENT, NET, NODE, POD, Path_, Vip
from tests.support.plane import Site
from tests.support.table import table


class Row(NamedTuple):
    """A SYN to a VIP and port: why the programs decide, and whether the backend sees the node."""

    name: str
    which: Vip
    why: Reason
    masqueraded: bool = False
    port: int = 80


ROWS = table(
    Row,
    """
policy Cluster | CLUSTER | NEW_FLOW | yes
policy Local, an endpoint here | LOCAL | NEW_FLOW
policy Local, the same port | SAME | NEW_FLOW
policy Local, only elsewhere | REMOTE | NO_LOCAL_ENDPOINTS
no endpoints | NONE | NO_ENDPOINTS
not in the source ranges | RESTRICTED | NOT_ALLOWED
a ClusterIP, no pods are detected | IP | NEW_FLOW
another port of a ClusterIP | IP | UNKNOWN_PORT | no | 81
another port of a VIP | CLUSTER | NOT_A_SERVICE | no | 81
""",
)


@pytest.fixture(scope="module")
def rehearsal(path: Path_, artifact_cache: Path) -> Iterator[Rehearsal]:
    with path.inside(lambda: Rehearsal(Pins(path.site.pins), artifact_cache)) as rehearsal:
        yield rehearsal


def contents(site: Site) -> dict[str, object]:
    """All that is in the pinned maps, apart from the agent's status."""
    maps = {
        name: site.entries(name)
        for name, spec in MAPS.items()
        if spec.map_type not in (BPF_MAP_TYPE_QUEUE, BPF_MAP_TYPE_SK_STORAGE)
    }
    del maps["agent_status"]
    return {**maps, "reasons": site.reasons()}


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["tcp", "udp"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_rehearsal_does_the_same(path: Path_, rehearsal: Rehearsal, v: int, protocol: Protocol, row: Row):
    to = FrontendAddress(parse_addr(f"{NET[v]}{row.which}"), row.port, protocol)
    arrival = Arrival(1, bytes(6), False, parse_addr(CLIENT[v]))
    seen = path.inside(lambda: rehearsal.run(arrival, to, 0))
    assert row.why in seen.reasons
    if row.why is Reason.NEW_FLOW:
        assert seen.source.address == arrival.sender
        assert seen.destination.address == parse_addr(POD[v])
        out = path.inside(lambda: rehearsal.leave(1, bytes(6), seen))
        assert (out.source.address == parse_addr(NODE[v])) is row.masqueraded


def test_a_rehearsal_leaves_nothing(path: Path_, rehearsal: Rehearsal):
    before = contents(path.site)
    arrival = Arrival(1, bytes(6), False, parse_addr(CLIENT[4]))
    targets = [FrontendAddress(parse_addr(f"{NET[4]}{row.which}"), row.port, Protocol.TCP) for row in ROWS]
    path.inside(lambda: [rehearsal.run(arrival, to, 0) for to in targets])
    assert contents(path.site) == before


def test_a_rehearsal_needs_the_pinned_programs(path: Path_, artifact_cache: Path, tmp_path):
    with pytest.raises(NotFoundError, match="another kbpf"):
        Rehearsal(Pins(tmp_path), artifact_cache)
    with pytest.raises(NotFoundError, match="not compiled here"):
        Rehearsal(Pins(path.site.pins), tmp_path)
