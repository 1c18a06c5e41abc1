"""Frontends that Services ask for and do not get: lines for the log, the status and Events. Those
that they get at an address of this node itself are named in the log.
"""

import logging
from collections.abc import Collection, Iterator, Mapping

from kbpf.agent.problems import Problems
from kbpf.model.desired import FrontendKind, ServicePortKey, ServiceState
from kbpf.model.objects import ServiceName
from kbpf.model.status import MOST_PROBLEMS
from kbpf.policy.admission import Reserved
from kbpf.serve.events import About, Events

log = logging.getLogger("kbpf.agent")

SEE = "see docs/operate.md, Addresses that Services may take"


class Refusals:
    """One thread only: the writer's. A change costs the Services that changed."""

    def __init__(self, events: Events, problems: Problems) -> None:
        self._events, self._problems = events, problems
        self._at_node = Problems()  # which are none: an operator may want them so

    def changed(
        self,
        keys: Collection[ServicePortKey],
        states: Mapping[ServicePortKey, ServiceState],
        kept: Reserved,
    ) -> None:
        """Logs what is new at these keys, and sends an Event for each Service that is refused."""
        self._name_node_addresses(keys, states, kept)
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

    def _name_node_addresses(
        self,
        keys: Collection[ServicePortKey],
        states: Mapping[ServicePortKey, ServiceState],
        kept: Reserved,
    ) -> None:
        news: list[str] = []
        for key in sorted(keys):
            state = states.get(key)
            lines = () if state is None else _at_node(state, kept)
            news += self._at_node.put(key, [f"Service {key.service}: {line}" for line in lines])
        for line in news[:MOST_PROBLEMS]:
            log.warning("%s; %s", line, SEE)
        if len(news) > MOST_PROBLEMS:
            log.warning("%d more of them; %s", len(news) - MOST_PROBLEMS, SEE)


def _at_node(state: ServiceState, kept: Reserved) -> Iterator[str]:
    """A line for each address of this node that the Service takes a port of. One that only a device
    has is nothing to mention as a LoadBalancer address: kube-vip and others put VIPs there.
    """
    addresses = {FrontendKind.EXTERNAL_IP: kept.local, FrontendKind.LOAD_BALANCER: kept.node}
    own = {f.at.port for f in state.frontends if f.kind is FrontendKind.NODE_PORT}
    for frontend in state.frontends:
        at = frontend.at
        if at.address in addresses.get(frontend.kind, ()) and at.port not in own:
            yield f"{at} is at an address of this node: what connects to it gets the Service"


def _lines(state: ServiceState) -> Iterator[str]:
    for at, winner in state.lost:
        yield f"{at} is not served: it is taken by Service {winner}"
    for at, reason in state.refused:
        yield f"{at} is not served: {reason}"
