# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the reflector."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.faults.scripted import ScriptedServer, Step
from tests.support.lab.lab import until
from tests.values.source.reflector.scripted import WATCH_THREADS, Run, step


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """start(response, ...) runs a reflector against that script and returns its Run.

    With `hold` the test itself starts the reflector, so that the steps can use the Run.
    """
    ends: list[Callable[[], None]] = []

    def begin(*script: Step | str, hold: bool = False, **options: Any) -> Run:
        server = ScriptedServer(*(step(one) if isinstance(one, str) else one for one in script))
        server.__enter__()
        run = Run(server, **options)
        ends.extend((server.__exit__, run.reflector.stop))
        if not hold:
            run.reflector.start()
        return run

    yield begin
    for end in reversed(ends):
        end()
    until("no thread is left", lambda: not any(t.name in WATCH_THREADS for t in threading.enumerate()))
