# SPDX-License-Identifier: Apache-2.0
"""Joins a unit and its headers into one text, since BCC rewrites map accesses only in the main
file.

`#line` directives make compiler messages refer to the original file and line.
"""

import re
from pathlib import Path
from typing import Final

from kbpf.errors import CompileError

SOURCES: Final = Path(__file__).parents[3] / "bpf"
"""The C sources of the data plane, and the header tree (`include/`) for BCC."""

_INCLUDE = re.compile(r'#include "([^"]+)"')


def flatten(unit: str, folder: Path = SOURCES) -> str:
    """The text of `unit`.c with each of our headers included once."""
    return "\n".join(_lines(f"{unit}.c", folder, set())) + "\n"


def _lines(name: str, folder: Path, included: set[str]) -> list[str]:
    try:
        text = (folder / name).read_text()
    except OSError as error:
        raise CompileError(
            "cannot read a BPF source", str(folder / name), f"reinstall kbpf ({error.strerror})"
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
    """The header tree by relative path: one of the inputs of an artifact."""
    root = folder / "include"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.h"))}
