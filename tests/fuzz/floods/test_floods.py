# SPDX-License-Identifier: Apache-2.0
"""The bounded part of the campaign `floods`; floods.py describes what is flooded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.floods.floods import KINDS, STREAMS, Arena, Figures

CONNECTIONS = 16_384
"""Fewer connections than any of these floods begins."""
RATE, SECONDS = 10_000, 2.0
LONGER = {STREAMS: 5.0, "syns with three numbers": 7.0}
"""The second datagram of a stream follows after 2.5 s. Three SYNs are one connection."""
BOUNDED = [kind for kind in KINDS if kind not in ("syn", "udp unanswered")]
"""Of these two, other floods send the same packets, and more."""
SEED = 20261122
ANSWER_SECONDS = 25.0
"""The server may be stalled for a while. A client without room would wait for longer: until entries
of the flood expire, which takes 30 s and more.
"""


@pytest.fixture(scope="module")
def arena(artifact_cache: Path) -> Iterator[Arena]:
    with Arena(artifact_cache, CONNECTIONS, SEED, ANSWER_SECONDS) as made:
        yield made


def check(figures: Figures) -> None:
    print(figures, figures.reasons)
    assert figures.sent >= RATE * SECONDS / 2, "the rate was too low for a flood"
    assert all(figures.honest[protocol] > 0 for protocol in ("tcp", "udp"))
    assert figures.faults() == []


@pytest.mark.parametrize("kind", BOUNDED)
def test_flood_ends_no_connection_and_blocks_no_client(arena: Arena, kind: str):
    check(arena.flood(kind, RATE, LONGER.get(kind, SECONDS)))


def test_many_honest_udp_clients_get_ports(arena: Arena):
    figures = arena.many_clients(5_000, 4 * SECONDS, CONNECTIONS // 2)
    print(figures, figures.reasons)
    assert figures.sent >= 2_500 * 4 * SECONDS
    assert figures.faults() == []
