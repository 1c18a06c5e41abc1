"""Frontends that Services ask for and do not get: lines for the log, the status and Events."""

import logging
from collections.abc import Iterable, Iterator, Mapping

from kbpf.agent.problems import Problems
from kbpf.model.desired import ServicePortKey, ServiceState
from kbpf.model.objects import ServiceName
from kbpf.model.status import MOST_PROBLEMS
from kbpf.serve.events import About, Events

log = logging.getLogger("kbpf.agent")

SEE = "see docs/operate.md, Addresses that Services may take"


class Refusals:
    """One thread only: the writer's. A change costs the Services that changed."""

    def __init__(self, events: Events, problems: Problems) -> None:
        self._events, self._problems = events, problems

    def changed(
        self, keys: Iterable[ServicePortKey], states: Mapping[ServicePortKey, ServiceState]
    ) -> None:
        """Logs what is new at these keys, and sends an Event for each Service of them."""
        news: dict[ServiceName, list[str]] = {}
        for key in sorted(keys):
            state = states.get(key)
            lines = [] if state is None else [f"{key}: {line}" for line in _lines(state)]
            if new := self._problems.put(("refused", key), lines):
                said = [line.removeprefix(f"{key}: ") for line in new]
                news.setdefault(key.service, []).extend(said)
        for name, new in list(news.items())[:MOST_PROBLEMS]:
            note = "; ".join(new)
            log.warning("Service %s: %s; %s", name, note, SEE)
            about = About("Service", name.name, name.namespace)
            self._events.say(about, "AddressRefused", "Program", note)
        if len(news) > MOST_PROBLEMS:
            more = len(news) - MOST_PROBLEMS
            log.warning("%d more Services have addresses that are not served; %s", more, SEE)


def _lines(state: ServiceState) -> Iterator[str]:
    for at, winner in state.lost:
        yield f"{at} is not served: it is taken by Service {winner}"
    for at, reason in state.refused:
        yield f"{at} is not served: {reason}"
