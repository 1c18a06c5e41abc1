# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the reflector."""

import threading
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest

from tests.support.faults.scripted import Exchange, ScriptedServer, Step, quiet
from tests.support.lab.lab import until
from tests.values.source.reflector.scripted import WATCH_THREADS, Run, step


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """start(response, ...) runs a reflector against that script and returns its Run. A step may take the Run, too.

    With `hold` the test itself starts the reflector.
    """
    ends: list[Callable[[], None]] = []

    def begin(*script: Callable[..., None] | str, hold: bool = False, **options: Any) -> Run:
        def bound(one: Callable[..., None] | str) -> Step:
            respond = step(one) if isinstance(one, str) else one
            takes_run = len(signature(respond).parameters) == 2

            def answer(exchange: Exchange) -> None:
                run.errors.append(run.status.error)
                respond(*(exchange, run)[: 1 + takes_run])

            return answer

        server = ScriptedServer(*map(bound, script), then=bound(quiet))
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
