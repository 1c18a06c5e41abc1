# SPDX-License-Identifier: Apache-2.0
"""`kbpf compile`: compiles the BPF programs ahead of time."""

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, CacheDir, Output, OutputOption
from kbpf.errors import CompileError
from kbpf.views.page import Column, Kind, Page


class CompiledUnit(msgspec.Struct, frozen=True):
    """The artifact of one unit. `compiled` is false if the cache already had it."""

    unit: str
    path: str
    compiled: bool
    programs: int
    instructions: int
    bytes: int
    compiler: str


COLUMNS: Final = (
    Column("UNIT", "unit"),
    Column("COMPILED", "compiled"),
    Column("PROGRAMS", "programs", right=True),
    Column("INSTRUCTIONS", "instructions", right=True),
    Column("ARTIFACT", "path"),
    Column("COMPILER", "compiler", wide=True),
)

KIND: Final = Kind("CompiledUnitList", CompiledUnit, item_name=lambda c: c.unit)


def ensure_compiled(unit: str, cache: Path, force: bool) -> CompiledUnit:
    """Compiles a unit, unless the cache has its artifact and `force` is false. Raises CompileError
    if the artifact cannot be stored.
    """
    from kbpf.dataplane.bpf.programs import artifact, compile

    if force:
        unit_artifact, compiled = compile.compile_unit(unit, cache), True
    else:
        unit_artifact, compiled = compile.find_or_compile(unit, cache)
    path = cache / artifact.file_name(unit, unit_artifact.source, unit_artifact.compiler)
    if artifact.read(path) != unit_artifact:
        raise CompileError(
            "the programs are compiled, but cannot be stored", str(path), "give a writable folder with --cache-dir"
        )
    return CompiledUnit(
        unit=unit,
        path=str(path),
        compiled=compiled,
        programs=len(unit_artifact.programs),
        instructions=sum(len(p.insns) // 8 for p in unit_artifact.programs),
        bytes=path.stat().st_size,
        compiler=unit_artifact.compiler,
    )


def compile_programs(
    cache_dir: CacheDir = DEFAULT.cache_dir,
    force: Annotated[bool, typer.Option("--force", help="Compile even if the cache has the programs.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Compile the BPF programs ahead of time. Useful for an image, or on a slow machine."""
    from kbpf.dataplane.bpf.hooks import UNITS

    units = [ensure_compiled(unit, cache_dir, force) for unit in UNITS]
    render.show(Page(KIND, units, COLUMNS), output)
