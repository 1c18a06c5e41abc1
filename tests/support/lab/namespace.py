# SPDX-License-Identifier: Apache-2.0
"""A network namespace for a test that needs no pods and no agent."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kbpf.kernel.system import netns
from tests.support.lab.lab import inside, ip, run

T = TypeVar("T")
_numbers = itertools.count(1)


class Namespace:
    def __init__(self, name: str) -> None:
        self.name = name

    def do(self, action: Callable[[], T]) -> T:
        """Calls it in the namespace."""
        return netns.run_in(Path("/run/netns") / self.name, action)

    def run(self, line: str, *more: str, stdin: str | None = None) -> str:
        """The output of a command, which must succeed; `more`: words that contain blanks."""
        return run(*inside(self.name, None, *line.split(), *more), stdin=stdin)

    def ip(self, *lines: str) -> None:
        """Runs `ip` commands in one process."""
        ip(*lines, netns=self.name)


@contextmanager
def made() -> Iterator[Namespace]:
    name = f"kbn{os.getpid()}-{next(_numbers)}"
    run("ip", "netns", "add", name)
    try:
        yield Namespace(name)
    finally:
        run("ip", "netns", "del", name)
