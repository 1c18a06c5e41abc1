# SPDX-License-Identifier: Apache-2.0
"""The agent's problem lines, by namespace and subject.

Tenants control how many there are, so nothing here walks all of them: the cost of a change depends
only on the lines of its subject. Lists and logs are short, and each namespace has a share of them.
"""

import logging
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, islice
from operator import itemgetter

from kbpf.model.fairness import take_turns
from kbpf.model.status import MAX_PROBLEMS

log = logging.getLogger("kbpf.agent")


class Problems:
    """Problem lines by namespace ("": of no tenant) and subject: an object, a Service port. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._lines: dict[str, dict[Hashable, tuple[str, ...]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def lines_of(self, namespace: str, subject: Hashable) -> tuple[str, ...]:
        return self._lines.get(namespace, {}).get(subject, ())

    def replace(self, namespace: str, subject: Hashable, lines: Sequence[str]) -> list[str]:
        """Replaces the lines of this subject; returns those that are new."""
        before = self.lines_of(namespace, subject)
        if not lines and not before:
            return []
        self._count += len(lines) - len(before)
        subjects = self._lines.setdefault(namespace, {})
        if lines:
            subjects[subject] = tuple(lines)
        else:
            del subjects[subject]
            if not subjects:
                del self._lines[namespace]
        old_lines = frozenset(before)
        return [line for line in lines if line not in old_lines]

    def first(self, limit: int) -> list[str]:
        """Returns at most `limit` lines: of each namespace the oldest, in turns."""
        lines = (
            (namespace, line)
            for namespace, subjects in islice(self._lines.items(), limit)
            for line in islice(chain.from_iterable(subjects.values()), limit)
        )
        return [line for _, line in take_turns(lines, itemgetter(0))[:limit]]


def log_lines(level: int, title: str, namespaced_lines: Iterable[tuple[str, str]]) -> None:
    """Logs a line for each (namespace, line), but at most MAX_PROBLEMS: all Services may hit a
    limit together.
    """
    lines = take_turns(sorted(namespaced_lines), itemgetter(0))
    for _, line in lines[:MAX_PROBLEMS]:
        log.log(level, "%s: %s", title, line)
    if len(lines) > MAX_PROBLEMS:
        more = len(lines) - MAX_PROBLEMS
        log.log(level, "%s: and %d more", title, more)
