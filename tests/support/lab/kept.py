# SPDX-License-Identifier: Apache-2.0
"""Established connections that have to survive what a test does."""

from tests.support.lab.lab import PATIENCE, Place


class Kept:
    """Connections that clients open and keep. `ways`: the clients, and what each dials."""

    def __init__(self, *ways: tuple[Place, tuple[str, int]]) -> None:
        self._ways = ways
        self._open: list[tuple[Place, str]] = []

    def open(self, each: int = 1) -> None:
        """Each client opens this many more."""
        for place, (host, port) in self._ways:
            for _ in range(each):
                keep = f"kept {len(self._open)}"
                answer = place.tcp(host, port, keep=keep)
                assert "name" in answer, (place.name, answer)
                self._open.append((place, keep))

    def all_talk(self) -> None:
        """Checks that every connection still works."""
        for place, keep in self._open:
            answer = place.ask("talk", keep=keep, timeout=PATIENCE)
            assert "name" in answer, (place.name, keep, answer)

    def close(self) -> None:
        for place, keep in self._open:
            place.ask("drop", keep=keep)
        self._open.clear()
