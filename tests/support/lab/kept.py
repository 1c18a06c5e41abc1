# SPDX-License-Identifier: Apache-2.0
"""Established connections that have to survive what a test does."""

from collections.abc import Mapping

from tests.support.lab.lab import Place


class Kept:
    """Connections that clients open and keep. `ways`: what each client dials."""

    def __init__(self, ways: Mapping[Place, tuple[str, int]]) -> None:
        self._ways = ways
        self._open: list[tuple[Place, str]] = []

    def open(self, each: int = 1) -> None:
        """Each client opens this many more."""
        for place, (host, port) in self._ways.items():
            for _ in range(each):
                keep = f"kept {len(self._open)}"
                answer = place.tcp(host, port, keep=keep)
                assert "name" in answer, (place.name, answer)
                self._open.append((place, keep))

    def all_talk(self) -> None:
        """Checks that every connection still works."""
        for place, keep in self._open:
            answer = place.ask("talk", keep=keep)
            assert "name" in answer, (place.name, keep, answer)

    def close(self) -> None:
        for place, keep in self._open:
            place.ask("drop", keep=keep)
        self._open.clear()
