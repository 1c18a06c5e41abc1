# SPDX-License-Identifier: Apache-2.0
"""Reports backends that keep failing: a line in the log, and an Event on their Service.

Tenants control how many backends fail. So a Service has one Event in INTERVAL_S, a namespace
NAMESPACE_EVENTS, and all together TOTAL_EVENTS: the recorder sends one in ten seconds
(serve/events.py), so most of its Events stay free for what concerns the node and other Services.
Namespaces take turns, and after TOTAL_EVENTS one follows every INTERVAL_S / TOTAL_EVENTS, so that
nobody waits until the interval is over.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final

from kbpf.errors import escape_unprintable
from kbpf.model.fairness import take_turns
from kbpf.model.metrics import FailingBackend
from kbpf.model.objects import ServiceName
from kbpf.serve.events import EventObject, EventRecorder

log = logging.getLogger("kbpf.agent")

REASON: Final = "BackendFailing"
INTERVAL_S: Final = 900.0
NAMESPACE_EVENTS: Final = 3
TOTAL_EVENTS: Final = 10
MAX_NAMED: Final = 3
"""Backends that a note names."""


class FailingBackendReporter:
    """Used by one thread. Times are those of time.monotonic()."""

    def __init__(self, events: EventRecorder) -> None:
        self._events = events
        self._reported: dict[ServiceName, float] = {}  # at most 2 * TOTAL_EVENTS
        self._spent_until = (
            0.0  # until when Events are paid for, INTERVAL_S / TOTAL_EVENTS for each
        )

    def report(self, failing: Iterable[FailingBackend], now: float) -> None:
        """Reports those of Services for which that is due."""
        self._reported = {
            name: time for name, time in self._reported.items() if now - time < INTERVAL_S
        }
        by_service: dict[ServiceName, list[FailingBackend]] = {}
        for backend in failing:
            by_service.setdefault(ServiceName(*backend.name[:2]), []).append(backend)
        namespaces = Counter(name.namespace for name in self._reported)
        due = by_service.keys() - self._reported.keys()
        # Those of the namespaces with the fewest Events first.
        ordered = sorted(due, key=lambda name: (namespaces[name.namespace], name))
        for name in take_turns(ordered, lambda name: name.namespace):
            if namespaces[name.namespace] >= NAMESPACE_EVENTS:
                continue
            spent_until = max(now, self._spent_until) + INTERVAL_S / TOTAL_EVENTS
            if spent_until > now + INTERVAL_S:
                break
            self._spent_until = spent_until
            self._reported[name] = now
            namespaces[name.namespace] += 1
            note = format_note(name, by_service[name])
            log.warning("Service %s: %s", name, note)
            self._events.emit(
                EventObject("Service", name.name, name.namespace), REASON, "Connect", note
            )


def format_note(name: ServiceName, failing: Iterable[FailingBackend]) -> str:
    """One line; its length is limited, since it names MAX_NAMED backends."""
    backends = sorted(failing, key=lambda backend: -backend.failed)
    texts = [
        f"{backend.backend} ({backend.name[2] or backend.name[3]}) did not accept "
        f"{min(backend.failed, backend.opened)} of {backend.opened} connections from this node in "
        f"{backend.seconds:.0f} s"
        for backend in backends[:MAX_NAMED]
    ]
    if len(backends) > MAX_NAMED:
        texts.append(f"and {len(backends) - MAX_NAMED} more backends")
    hint = f"`kbpf inspect failures --service {name}` on the node shows the clients and the reasons"
    return escape_unprintable(f"{'; '.join(texts)}; {hint}")
