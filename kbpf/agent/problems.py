# SPDX-License-Identifier: Apache-2.0
"""The agent's problem lines, by subject.

Tenants control how many there are, so nothing here walks all of them: the cost of a change depends
only on the lines of its subject.
"""

import logging
from collections.abc import Hashable, Sequence
from itertools import chain, islice

from kbpf.model.status import MAX_PROBLEMS

log = logging.getLogger("kbpf.agent")


class Problems:
    """Problem lines by subject: an object, a Service port. Not thread-safe."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, tuple[str, ...]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def lines_of(self, subject: Hashable) -> tuple[str, ...]:
        return self._lines.get(subject, ())

    def replace(self, subject: Hashable, lines: Sequence[str]) -> list[str]:
        """Replaces the lines of this subject; returns those that are new."""
        before = self._lines.get(subject, ())
        if not lines and not before:
            return []
        self._count += len(lines) - len(before)
        if lines:
            self._lines[subject] = tuple(lines)
        else:
            del self._lines[subject]
        old_lines = frozenset(before)
        return [line for line in lines if line not in old_lines]

    def first(self, limit: int) -> list[str]:
        """Returns at most `limit` lines, the oldest first."""
        return list(islice(chain.from_iterable(self._lines.values()), limit))


def log_lines(level: int, title: str, lines: Sequence[str]) -> None:
    """Logs a line for each, but at most MAX_PROBLEMS: all Services may hit a limit together."""
    for line in lines[:MAX_PROBLEMS]:
        log.log(level, "%s: %s", title, line)
    if len(lines) > MAX_PROBLEMS:
        more = len(lines) - MAX_PROBLEMS
        log.log(level, "%s: and %d more; see `kbpf inspect status` for their number", title, more)
