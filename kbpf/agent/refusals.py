"""Frontends that Services ask for and do not get: lines for the log, the status and Events."""

import logging
from collections.abc import Iterable, Iterator, Mapping

from kbpf.model.desired import ServicePortKey, ServiceState
from kbpf.model.objects import ServiceName
from kbpf.model.status import MOST_PROBLEMS
from kbpf.serve.events import About, Events

log = logging.getLogger("kbpf.agent")


class Refusals:
    """One thread only: the writer's. A change costs the Services that changed."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lines: dict[ServicePortKey, tuple[str, ...]] = {}

    def changed(
        self, keys: Iterable[ServicePortKey], states: Mapping[ServicePortKey, ServiceState]
    ) -> None:
        """Logs what is new at these keys, and sends an Event for each Service of them."""
        news: dict[ServiceName, list[str]] = {}
        for key in sorted(keys):
            state = states.get(key)
            before = self._lines.pop(key, ())
            lines = () if state is None else tuple(_lines(state))
            if lines:
                self._lines[key] = lines
            if new := [line for line in lines if line not in before]:
                news.setdefault(key.service, []).extend(new)
        for name, new in list(news.items())[:MOST_PROBLEMS]:
            note = "; ".join(new)
            log.warning("refused: %s: %s", name, note)
            about = About("Service", name.name, name.namespace)
            self._events.say(about, "AddressRefused", "Program", note)
        if len(news) > MOST_PROBLEMS:
            log.warning("refused: addresses of %d more Services", len(news) - MOST_PROBLEMS)

    def problems(self) -> Iterator[str]:
        """A line each."""
        for key, lines in self._lines.items():
            yield from (f"{key}: {line}" for line in lines)


def _lines(state: ServiceState) -> Iterator[str]:
    for at, winner in state.lost:
        yield f"{at} belongs to {winner}"
    for at, reason in state.refused:
        yield f"{at} is not served: {reason}"
