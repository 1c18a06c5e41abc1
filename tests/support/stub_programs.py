# SPDX-License-Identifier: Apache-2.0
"""Fakes of the programs: other bytecode than what the sources give, for starts whose packets do not matter."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kbpf.dataplane.bpf.programs import artifact, compile
from kbpf.errors import CompileError
from kbpf.kernel.bpf import probe

LOAD_MAP = b"\x18\x01" + bytes(14)  # r1 = a map, which the loader inserts
EXIT = b"\x95" + bytes(7)


def change_programs(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[artifact.Bytecode], artifact.Bytecode], **more: str
) -> None:
    """From now on all programs are changed like this."""
    real = compile.find_or_compile

    def obtain(unit: str, cache: Path) -> tuple[artifact.Artifact, bool]:
        found, compiled = real(unit, cache)
        return msgspec.structs.replace(found, programs=tuple(map(change, found.programs)), **more), compiled

    monkeypatch.setattr(compile, "find_or_compile", obtain)


def only_name_their_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on programs load the addresses of their maps and return 1. What a program does is
    irrelevant to when it is loaded, pinned and attached, and verifying the real ones takes most of
    the time of a start.
    """

    def stub(program: artifact.Bytecode) -> artifact.Bytecode:
        names = sorted({reference.map for reference in program.references})
        loads = tuple(artifact.Reference(2 * i, name) for i, name in enumerate(names))
        code = LOAD_MAP * len(names) + probe.encode_r0(1) + EXIT
        return artifact.Bytecode(program.name, code, loads)

    change_programs(monkeypatch, stub)


def refuse_to_compile(monkeypatch: pytest.MonkeyPatch, unit: str) -> Callable[[], None]:
    """From now on this unit cannot be compiled, until the returned function is called."""
    real, refused = compile.find_or_compile, [unit]

    def obtain(unit: str, cache: Path) -> tuple[artifact.Artifact, bool]:
        if unit in refused:
            raise CompileError("no such header", f"{unit}.c", "install it")
        return real(unit, cache)

    monkeypatch.setattr(compile, "find_or_compile", obtain)
    return refused.clear
