"""`kbpf compile`: the BPF programs, made ahead of time."""

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, CacheDir, Output, OutputOption
from kbpf.errors import CompileError
from kbpf.views.columns import Column, number, yes


class Compiled(msgspec.Struct, frozen=True):
    """A unit's artifact. `compiled` is false when it was there already."""

    unit: str
    path: str
    compiled: bool
    programs: int
    instructions: int
    bytes: int
    compiler: str


COLUMNS: Final = (
    Column("UNIT", lambda c: c.unit),
    Column("COMPILED", lambda c: yes(c.compiled)),
    Column("PROGRAMS", lambda c: number(c.programs), right=True),
    Column("INSTRUCTIONS", lambda c: number(c.instructions), right=True),
    Column("ARTIFACT", lambda c: c.path),
    Column("COMPILER", lambda c: c.compiler, wide=True),
)


def obtain(unit: str, cache: Path, force: bool) -> Compiled:
    """Makes the artifact of a unit, unless it is there; CompileError when it cannot be kept."""
    from kbpf.dataplane.bpf.programs import artifact, compile

    if force:
        made, compiled = compile.compile_unit(unit, cache), True
    else:
        made, compiled = compile.obtain(unit, cache)
    path = cache / artifact.file_name(unit, made.source, made.compiler)
    if artifact.read(path) != made:
        raise CompileError(
            "the programs are compiled but cannot be kept", str(path),
            "give a folder that can be written with --cache-dir",
        )  # fmt: skip
    return Compiled(
        unit=unit,
        path=str(path),
        compiled=compiled,
        programs=len(made.programs),
        instructions=sum(len(p.insns) // 8 for p in made.programs),
        bytes=path.stat().st_size,
        compiler=made.compiler,
    )


def compile_programs(
    cache_dir: CacheDir = DEFAULT.cache_dir,
    force: Annotated[
        bool, typer.Option("--force", help="Compile even what is there already.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Compile the BPF programs ahead of time: for an image, or a slow machine."""
    from kbpf.dataplane.bpf.hooks import UNITS

    found = [obtain(unit, cache_dir, force) for unit in UNITS]
    print(render.rows(found, COLUMNS, output))
