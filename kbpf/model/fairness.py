# SPDX-License-Identifier: Apache-2.0
"""Shares short lists among namespaces, so that no tenant can hide the rows of others."""

from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")


def take_turns(rows: Iterable[T], namespace_of: Callable[[T], str]) -> list[T]:
    """Orders rows so that namespaces take turns: first the first row of each, then the second of
    each, and so on; within a turn as before. Among the first N of the result, a namespace has its
    share of N; what it does not need goes to others. `rows`: the most important first.
    """
    counts: Counter[str] = Counter()
    turns: list[tuple[int, T]] = []
    for row in rows:
        namespace = namespace_of(row)
        turns.append((counts[namespace], row))
        counts[namespace] += 1
    turns.sort(key=itemgetter(0))
    return [row for _, row in turns]
