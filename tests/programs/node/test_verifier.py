# SPDX-License-Identifier: Apache-2.0
"""The kernel's verifier accepts every program of both units with three quarters of its budget to
spare.

`make test-kernels` runs this in old and new kernels. Each kernel prunes states by its own rules, so
a change that costs nothing in one may cost ten times as much in another; and those up to 6.1 refuse
back-edges that later ones accept.
"""

from pathlib import Path

import pytest

from kbpf.dataplane.bpf.hooks import CONNTRACK_PROGRAMS, UNITS, program_names
from kbpf.dataplane.bpf.programs import compile
from tests.support.features import needs
from tests.support.packets.verifier import LIMIT, Verified, verify

ROOM = LIMIT * 3 // 4
"""Instructions kept free, because a later kernel may walk through many more."""

LENGTH = 5250
"""Limit of a program's length, in instructions. Other compilers produce longer programs."""


@pytest.fixture(scope="module")
def verified(artifact_cache: Path) -> dict[str, Verified]:
    artifacts = [compile.find_or_compile(unit, artifact_cache)[0] for unit in UNITS]
    return {one.program: one for artifact in artifacts for one in verify(artifact)}


NEEDED = {
    **dict.fromkeys(CONNTRACK_PROGRAMS, "conntrack_nat"),
    "trace_reset": "tracing",
    "trace_retransmit": "retransmissions",
    "trace_error": "socket_errors",
}
"""Programs that the agent loads only on kernels with a feature."""
PROGRAMS = [
    pytest.param(name, marks=needs(NEEDED[name]) if name in NEEDED else ())
    for unit in UNITS
    for name in program_names(unit)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_loads_within_the_budget(verified: dict[str, Verified], program: str, record_property):
    found = verified[program]
    record_property("size", found.size)
    record_property("processed", found.processed)
    assert not found.refusal, found.refusal
    assert found.size < found.processed <= LIMIT - ROOM
    assert found.size <= LENGTH
