# SPDX-License-Identifier: Apache-2.0
"""Reports frontends that Services request but do not get, and Service ports that the data plane
cannot program as requested: in the log, the status and Events. Frontends that a Service gets at one
of the node's own addresses are logged, too.
"""

import logging
from collections.abc import Collection, Iterator, Mapping

from kbpf.agent.problems import Problems, log_lines
from kbpf.dataplane.base import Report
from kbpf.model.desired import FrontendKind, ServicePortKey, ServiceState
from kbpf.model.fairness import take_turns
from kbpf.model.objects import ServiceName
from kbpf.model.status import MAX_PROBLEMS
from kbpf.policy.admission import ReservedAddresses
from kbpf.serve.events import EventObject, EventRecorder

log = logging.getLogger("kbpf.agent")

DOCS_HINT = "see docs/operate.md, Addresses that Services may take"
AT_THIS_NODE = f"connections to this node now reach a Service ({DOCS_HINT})"
LEFT_TO_NODE = "left to this node, on which a device has the address and a process listens"


class RefusalReporter:
    """Used by the agent's thread only. The cost of a change depends only on the Services in it."""

    def __init__(self, events: EventRecorder, problems: Problems) -> None:
        self._events, self._problems = events, problems
        self.refused: set[ServicePortKey] = set()
        """Service ports of which an address is not served."""
        self._node_address_lines = Problems()  # not problems: an operator may want them
        self._left_to_node = Problems()  # not problems either

    def report_changes(
        self,
        keys: Collection[ServicePortKey],
        states: Mapping[ServicePortKey, ServiceState],
        reserved: ReservedAddresses,
    ) -> None:
        """Logs new lines for these keys, and sends an Event for each Service with a refused
        address.
        """
        self._log_node_addresses(keys, states, reserved)
        self._log_left_to_node(keys, states)
        lines_by_service: dict[ServiceName, list[str]] = {}
        for key in sorted(keys):
            state = states.get(key)
            lines = (
                [] if state is None else [f"{key}: {line}" for line in _describe_refusals(state)]
            )
            if lines:
                self.refused.add(key)
            else:
                self.refused.discard(key)
            if new_lines := self._problems.replace(key.namespace, ("refused", key), lines):
                texts = [line.removeprefix(f"{key}: ") for line in new_lines]
                lines_by_service.setdefault(key.service, []).extend(texts)
        names = take_turns(lines_by_service, lambda name: name.namespace)
        for name in names[:MAX_PROBLEMS]:
            note = "; ".join(lines_by_service[name])
            log.warning("Service %s: %s; %s", name, note, DOCS_HINT)
            regarding = EventObject("Service", name.name, name.namespace)
            self._events.emit(regarding, "AddressRefused", "Program", note)
        if len(names) > MAX_PROBLEMS:
            more = len(names) - MAX_PROBLEMS
            log.warning("%d more Services have addresses that are not served; %s", more, DOCS_HINT)

    @property
    def left_to_node(self) -> tuple[str, ...]:
        """A line for each Service port that is left to the node, at most MAX_PROBLEMS."""
        return tuple(self._left_to_node.first(MAX_PROBLEMS))

    def _log_left_to_node(
        self, keys: Collection[ServicePortKey], states: Mapping[ServicePortKey, ServiceState]
    ) -> None:
        new_lines: list[tuple[str, str]] = []
        for key in sorted(keys):
            addresses = () if (state := states.get(key)) is None else state.left_to_node
            lines = [f"{address} of Service {key.service}" for address in addresses]
            was_left = not lines and bool(self._left_to_node.lines_of(key.namespace, key))
            lines = self._left_to_node.replace(key.namespace, key, lines)
            new_lines += ((key.namespace, line) for line in lines)
            if was_left:
                log.info(
                    "Service %s is served at its ClusterIP again: no device here has the address, "
                    "or no process listens at it",
                    key,
                )
        log_lines(logging.INFO, LEFT_TO_NODE, new_lines)

    def _log_node_addresses(
        self,
        keys: Collection[ServicePortKey],
        states: Mapping[ServicePortKey, ServiceState],
        reserved: ReservedAddresses,
    ) -> None:
        new_lines: list[tuple[str, str]] = []
        for key in sorted(keys):
            state = states.get(key)
            lines = [] if state is None else list(_describe_node_addresses(state, reserved))
            lines = self._node_address_lines.replace(key.namespace, key, lines)
            new_lines += ((key.namespace, line) for line in lines)
        log_lines(logging.WARNING, AT_THIS_NODE, new_lines)


class LimitReporter:
    """Service ports that are not programmed (`refused`), or served without what their annotations
    ask for (`degraded`). Used by the agent's thread only.
    """

    def __init__(self, events: EventRecorder, problems: Problems) -> None:
        self._events, self._problems = events, problems
        self.refused: set[ServicePortKey] = set()
        self.degraded: set[ServicePortKey] = set()

    def report(self, report: Report) -> None:
        """Reports what an apply() could not do: a log line, a problem line and an Event."""
        keys = report.examined
        if keys is None:
            keys = {*self.refused, *self.degraded, *report.refused, *report.degraded}
        new_lines = self._replace("not programmed", report.refused, self.refused, keys)
        self._announce(logging.ERROR, "not programmed", "NotProgrammed", new_lines)
        new_lines = self._replace("annotations", report.degraded, self.degraded, keys)
        self._announce(logging.WARNING, "annotations", "AnnotationsNotApplied", new_lines)

    def _replace(
        self,
        title: str,
        lines: Mapping[ServicePortKey, str],
        reported: set[ServicePortKey],
        examined: Collection[ServicePortKey],
    ) -> dict[ServicePortKey, str]:
        """Updates the problem lines; returns those of Service ports that had none."""
        new_lines = {}
        # The smaller set of keys: those with a line, old or new, or those examined.
        keys = reported.union(lines) if len(examined) > len(lines) + len(reported) else examined
        for key in sorted(keys):
            line = lines.get(key)
            lines_now = () if line is None else (f"{key}: {line}",)
            self._problems.replace(key.namespace, (title, key), lines_now)
            if line is None:
                reported.discard(key)
            elif key not in reported:
                new_lines[key] = f"{key}: {line}"
                reported.add(key)
        return new_lines

    def _announce(
        self, level: int, title: str, reason: str, lines: Mapping[ServicePortKey, str]
    ) -> None:
        log_lines(level, title, ((key.namespace, line) for key, line in lines.items()))
        for key in take_turns(lines, lambda key: key.namespace)[:MAX_PROBLEMS]:
            regarding = EventObject("Service", key.name, key.namespace)
            self._events.emit(regarding, reason, "Program", lines[key])


def _describe_node_addresses(state: ServiceState, reserved: ReservedAddresses) -> Iterator[str]:
    """Yields a line for each address of this node of which the Service takes a port. A
    LoadBalancer address that is only on a device is not mentioned: kube-vip and others put VIPs
    there.
    """
    addresses = {
        FrontendKind.EXTERNAL_IP: reserved.local_addresses,
        FrontendKind.LOAD_BALANCER: reserved.node_addresses,
    }
    node_ports = {f.at.port for f in state.frontends if f.kind is FrontendKind.NODE_PORT}
    for frontend in state.frontends:
        frontend_address = frontend.at
        if (
            frontend_address.address in addresses.get(frontend.kind, ())
            and frontend_address.port not in node_ports
        ):
            yield f"{frontend_address} of Service {state.key.service}"


def _describe_refusals(state: ServiceState) -> Iterator[str]:
    for frontend_address, winner in state.lost:
        yield f"{frontend_address} is not served: it is taken by Service {winner}"
    for frontend_address, reason in state.refused:
        yield f"{frontend_address} is not served: {reason}"
