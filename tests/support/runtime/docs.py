# SPDX-License-Identifier: Apache-2.0
"""Extracts the shell blocks and commands of this project's documents."""

import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = (
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def blocks(page: str, kind: str = "sh") -> list[str]:
    """The fenced blocks of this kind, in order, without their indentation."""
    text = (ROOT / page).read_text()
    return [textwrap.dedent(body) for _, said, body in _BLOCK.findall(text) if said == kind]


def spans(page: str) -> list[str]:
    """The texts between backticks outside of blocks, each once, on one line."""
    text = _BLOCK.sub("", (ROOT / page).read_text())
    return list(dict.fromkeys(" ".join(each.split()) for each in _SPAN.findall(text)))


def section(page: str, heading: str) -> list[str]:
    """The shell blocks below a heading, up to the next heading of its level."""
    text = (ROOT / page).read_text()
    level = heading.split(" ", maxsplit=1)[0]
    (found,) = re.findall(rf"^{re.escape(heading)}\n(.*?)(?=^{level} |\Z)", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(body) for _, said, body in _BLOCK.findall(found) if said == "sh"]


def commands(block: str) -> Iterator[str]:
    """Each complete command of a block: one line, or as many as the shell needs to parse it."""
    lines: list[str] = []
    for line in block.splitlines():
        lines.append(line)
        text = "\n".join(lines)
        done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False)
        if not done.stderr and not text.rstrip().endswith(("|", "&&", "\\")):
            if text.strip():
                yield text
            lines = []
    assert not lines, f"incomplete command: {lines}"
