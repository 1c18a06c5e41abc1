# SPDX-License-Identifier: Apache-2.0
"""Fixtures of programs on devices."""

import os
from collections.abc import Iterator

import pytest

from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_ARRAY
from tests.programs.packets.tc.net import Net, _numbers, counting


@pytest.fixture
def net() -> Iterator[Net]:
    """A new namespace with a veth pair."""
    made = Net(f"kbtc{os.getpid()}-{next(_numbers)}")
    yield made
    made.close()


@pytest.fixture
def seen() -> Iterator[Map]:
    """The map that the counting programs write."""
    with Map.create(BPF_MAP_TYPE_ARRAY, "seen", 4, 8, 4) as made:
        yield made


@pytest.fixture
def programs(seen: Map) -> Iterator[list[Program]]:
    """Four counting programs."""
    made = [counting(seen, place) for place in range(4)]
    yield made
    for one in made:
        one.close()
