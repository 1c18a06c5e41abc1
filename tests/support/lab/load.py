# SPDX-License-Identifier: Apache-2.0
"""A load of new connections during a change; none of them may fail."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.cluster.cluster import Places
from tests.support.lab.lab import Place, until

STEP = 20
THREADS = 2
"""Connections that a place has at a time."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load that runs in these places. `may_fail`: how many connections of each may fail."""

    places: tuple[Place, ...]
    may_fail: int = 0

    def goes_on(self, connections: int = 20) -> None:
        """Waits until each place has made this many more connections. However slow the machine is,
        STEP of them come in time.
        """
        goals = [(place, self._made(place) + connections) for place in self.places]
        for place, goal in goals:
            while (missing := goal - self._made(place)) > 0:
                next_goal = goal - max(0, missing - STEP)
                until(
                    f"{place.name} connects {missing} times more",
                    lambda place=place, goal=next_goal: self._made(place) >= goal,
                )

    def _made(self, place: Place) -> int:
        result = place.ask("peek_load")
        assert len(result["errors"]) <= self.may_fail, (place.name, result)
        return sum(result["names"].values())


@contextlib.contextmanager
def under_load(
    places: Places,
    host: str,
    *clients: str,
    port: int = 80,
    protocol: str = "tcp",
    answers: str = "",
    pause: float = 0.01,
    may_fail: int = 0,
) -> Iterator[Load]:
    """Runs a load from these clients during the block. `answers`: the backends that may answer;
    `pause`: seconds between two connections of a thread. `may_fail`: how many connections of a
    client may fail, if the change ends those that are in progress.
    """
    load = Load(tuple(places[client] for client in clients), may_fail)
    family = "6" if ":" in host else "4"
    for place in load.places:
        # The pause keeps the machine from being saturated, which would cause time-outs.
        place.ask("start_load", host=host, port=port, family=family, threads=THREADS, pause=pause, protocol=protocol)
    results = []
    try:
        load.goes_on()
        yield load
        load.goes_on()
    finally:
        results = [place.ask("stop_load") for place in load.places]
    for place, result in zip(load.places, results, strict=True):
        assert len(result["errors"]) <= may_fail, (place.name, result["errors"][:5])
        assert not answers or set(result["names"]) <= set(answers.split()), result
