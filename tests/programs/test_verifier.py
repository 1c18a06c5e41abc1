"""The kernel's verifier takes every program of both units, with room to spare.

`make test-kernels` runs this in old and new kernels: each prunes by rules of its own, so a change
that costs one of them nothing may cost another ten times as much.
"""

from pathlib import Path

import pytest

from kbpf.dataplane.bpf import compile
from kbpf.dataplane.bpf.hooks import UNITS, programs_of
from tests.support.verifier import LIMIT, Verified, verify

ROOM = LIMIT // 2
"""Kept free: the next kernel may walk through much more."""


@pytest.fixture(scope="module")
def verified(artifact_cache: Path) -> dict[str, Verified]:
    artifacts = [compile.obtain(unit, artifact_cache)[0] for unit in UNITS]
    return {one.program: one for artifact in artifacts for one in verify(artifact)}


@pytest.mark.parametrize("program", [name for unit in UNITS for name in programs_of(unit)])
def test_loads(verified: dict[str, Verified], program: str, record_property) -> None:
    found = verified[program]
    record_property("size", found.size)
    record_property("processed", found.processed)
    assert not found.refusal, found.refusal
    assert found.size < found.processed <= LIMIT - ROOM
