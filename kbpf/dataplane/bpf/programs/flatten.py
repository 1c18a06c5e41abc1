"""One text out of a unit and its headers, because BCC rewrites map accesses in the main file only.

`#line` marks keep the compiler's messages at the real file and line.
"""

import re
from pathlib import Path
from typing import Final

from kbpf.errors import CompileError

SOURCES: Final = Path(__file__).parents[3] / "bpf"
"""The C of the data plane; also the header tree (`include/`) that BCC is pointed at."""

_INCLUDE = re.compile(r'#include "([^"]+)"')


def flatten(unit: str, folder: Path = SOURCES) -> str:
    """The text of `unit`.c with every header of ours in its place, each once."""
    return "\n".join(_lines(f"{unit}.c", folder, set())) + "\n"


def _lines(name: str, folder: Path, included: set[str]) -> list[str]:
    try:
        text = (folder / name).read_text()
    except OSError as error:
        raise CompileError(
            "cannot read a BPF source", str(folder / name), f"install kbpf anew ({error.strerror})"
        ) from error
    lines = [f'#line 1 "kbpf/bpf/{name}"']
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if line == "#pragma once" else line)
            continue
        if include[1] not in included:
            included.add(include[1])
            lines += _lines(include[1], folder, included)
        lines.append(f'#line {number + 1} "kbpf/bpf/{name}"')
    return lines


def headers(folder: Path = SOURCES) -> dict[str, bytes]:
    """The header tree by relative path: part of what an artifact depends on."""
    root = folder / "include"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.h"))}
