"""The bounded part of the campaign `floods`; see floods.py for what is flooded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.floods.floods import KINDS, STREAMS, Arena, Figures

CONNECTIONS = 16_384
"""Fewer than any of these floods begins."""
RATE, SECONDS = 10_000, 2.0
LONGER = {STREAMS: 5.0}
"""The second datagrams come after 2.5 s."""
SEED = 20261122


@pytest.fixture(scope="module")
def arena(artifact_cache: Path) -> Iterator[Arena]:
    with Arena(artifact_cache, "kbpf", CONNECTIONS, SEED) as made:
        yield made


def check(figures: Figures) -> None:
    print(figures, figures.reasons)
    assert figures.sent >= RATE * SECONDS / 2, "this was no flood"
    assert all(figures.honest[protocol] > 0 for protocol in ("tcp", "udp"))
    assert figures.faults() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_ends_nobody_and_keeps_nobody_out(arena: Arena, kind: str):
    check(arena.flood(kind, RATE, LONGER.get(kind, SECONDS)))


def test_many_honest_clients_of_udp_get_ports(arena: Arena):
    figures = arena.many_clients(5_000, 4 * SECONDS)
    print(figures, figures.reasons)
    assert figures.sent >= 2_500 * 4 * SECONDS
    assert figures.faults() == []
