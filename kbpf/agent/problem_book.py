# SPDX-License-Identifier: Apache-2.0
"""What operators are told about Services and other objects.

A subject (an object, a Service port) has lines: what is left out of it, which of its addresses are
not served, why it is not programmed. Each line is logged once, and is sent once as an Event of its
Service; problems are counted and listed until they are solved.

Tenants control how many there are, so nothing here walks all of them: the cost of a change depends
only on the lines of its subject. Lists and logs are short, and each namespace has a share of them.
"""

import logging
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Final

from kbpf.dataplane.base import Report
from kbpf.errors import escape_unprintable
from kbpf.model.desired import FrontendKind, ServicePortKey, ServiceState
from kbpf.model.events import ObjectKey
from kbpf.model.fairness import take_turns
from kbpf.model.metrics import FailingBackend
from kbpf.model.objects import READ_AS_TEXT, ServiceName
from kbpf.model.status import MAX_PROBLEMS
from kbpf.policy.admission import ReservedAddresses
from kbpf.policy.store import ObjectStore
from kbpf.serve.events import EventObject, EventRecorder

log = logging.getLogger("kbpf.agent")

DOCS_HINT = "see docs/operate.md, Addresses that Services may take"
AT_THIS_NODE = f"connections to this node now reach a Service ({DOCS_HINT})"
LEFT_TO_NODE = "left to this node, on which a device has the address and a process listens"

# Of FailingBackendReporter:
INTERVAL_S: Final = 900.0
NAMESPACE_EVENTS: Final = 3
TOTAL_EVENTS: Final = 10
MAX_NAMED: Final = 3
"""Backends that a note names."""


class Lines:
    """Lines by namespace ("": of no tenant) and subject."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[Hashable, tuple[str, ...]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def lines_of(self, namespace: str, subject: Hashable) -> tuple[str, ...]:
        return self._lines.get(namespace, {}).get(subject, ())

    def replace(self, namespace: str, subject: Hashable, lines: Sequence[str]) -> list[tuple[str, str]]:
        """Replaces the lines of this subject; returns (namespace, line) of those that are new."""
        before = self.lines_of(namespace, subject)
        if not lines and not before:
            return []
        self._count += len(lines) - len(before)
        subjects = self._lines.setdefault(namespace, {})
        if lines:
            subjects[subject] = tuple(lines)
        else:
            del subjects[subject]
            if not subjects:
                del self._lines[namespace]
        old_lines = frozenset(before)
        return [(namespace, line) for line in lines if line not in old_lines]

    def first(self, limit: int) -> list[str]:
        """Returns at most `limit` lines: of each namespace the oldest, in turns."""
        lines = (
            (namespace, line)
            for namespace, subjects in islice(self._lines.items(), limit)
            for line in islice(chain.from_iterable(subjects.values()), limit)
        )
        return [line for _, line in take_turns(lines, itemgetter(0))[:limit]]


class ProblemBook:
    """Used by the agent's thread only."""

    def __init__(self, events: EventRecorder) -> None:
        self._events = events
        self.problems = Lines()
        self.not_served: set[ServicePortKey] = set()
        """Service ports of which an address is not served."""
        self.not_programmed: set[ServicePortKey] = set()
        self.degraded: set[ServicePortKey] = set()
        """Service ports that are served without what their annotations ask for."""
        # No problems: an operator may want these.
        self._at_this_node = Lines()
        self.left_to_node = Lines()

    def report_objects(self, keys: Iterable[ObjectKey], store: ObjectStore) -> None:
        """Reports parts of these objects that are not used, or that other programs read differently."""
        new_lines: list[tuple[str, str]] = []
        for key in keys:
            lines = [f"{key}: {line}" for line in store.problems_of(key)]
            new_lines += self.problems.replace(key.namespace, key, lines)
        for title, is_used in (("left out", False), ("unusual", True)):
            lines_of_title = (pair for pair in new_lines if (READ_AS_TEXT in pair[1]) is is_used)
            _log_lines(logging.WARNING, title, lines_of_title)

    def report_addresses(
        self,
        keys: Collection[ServicePortKey],
        states: Mapping[ServicePortKey, ServiceState],
        reserved: ReservedAddresses,
    ) -> None:
        """Reports addresses that these Service ports request but do not get, that are left to the
        node, and those of the node that they do get.
        """
        at_this_node: list[tuple[str, str]] = []
        left_to_node: list[tuple[str, str]] = []
        served_again: list[ServicePortKey] = []
        refusals: dict[ServiceName, list[str]] = {}
        for key in sorted(keys):
            state, namespace = states.get(key), key.namespace
            lines = [] if state is None else list(_describe_node_addresses(state, reserved))
            at_this_node += self._at_this_node.replace(namespace, key, lines)
            addresses = () if state is None else state.left_to_node
            lines = [f"{address} of Service {key.service}" for address in addresses]
            if not lines and self.left_to_node.lines_of(namespace, key):
                served_again.append(key)
            left_to_node += self.left_to_node.replace(namespace, key, lines)
            lines = [] if state is None else [f"{key}: {each}" for each in _describe_refusals(state)]
            (self.not_served.add if lines else self.not_served.discard)(key)
            for _, line in self.problems.replace(namespace, ("refused", key), lines):
                refusals.setdefault(key.service, []).append(line.removeprefix(f"{key}: "))
        _log_lines(logging.WARNING, AT_THIS_NODE, at_this_node)
        for key in served_again:
            log.info(
                "Service %s is served at its ClusterIP again: no device here has the address, or "
                "no process listens at it",
                key,
            )
        _log_lines(logging.INFO, LEFT_TO_NODE, left_to_node)
        names = take_turns(refusals, attrgetter("namespace"))
        for name in names[:MAX_PROBLEMS]:
            note = "; ".join(refusals[name])
            log.warning("Service %s: %s; %s", name, note, DOCS_HINT)
            self._send(name, "AddressRefused", note)
        if len(names) > MAX_PROBLEMS:
            more = len(names) - MAX_PROBLEMS
            log.warning("%d more Services have addresses that are not served; %s", more, DOCS_HINT)

    def report_limits(self, report: Report) -> None:
        """Reports what an apply() could not do."""
        for title, level, reason, lines, reported in (
            ("not programmed", logging.ERROR, "NotProgrammed", report.refused, self.not_programmed),
            ("annotations", logging.WARNING, "AnnotationsNotApplied", report.degraded, self.degraded),
        ):
            keys = report.examined
            # The smaller set: the Service ports that were examined, or those with a line.
            if keys is None or len(keys) > len(lines) + len(reported):
                keys = reported.union(lines)
            new_lines: dict[ServicePortKey, str] = {}
            for key in sorted(keys):
                line = f"{key}: {lines[key]}" if key in lines else ""
                self.problems.replace(key.namespace, (title, key), (line,) if line else ())
                if not line:
                    reported.discard(key)
                elif key not in reported:  # a line that only changes is not new
                    new_lines[key] = line
                    reported.add(key)
            _log_lines(level, title, ((key.namespace, line) for key, line in new_lines.items()))
            for key in take_turns(new_lines, attrgetter("namespace"))[:MAX_PROBLEMS]:
                self._send(key.service, reason, new_lines[key])

    def _send(self, name: ServiceName, reason: str, note: str) -> None:
        regarding = EventObject("Service", name.name, name.namespace)
        self._events.emit(regarding, reason, "Program", note)


class FailingBackendReporter:
    """Reports backends that keep failing: a line in the log, and an Event on their Service. Used by
    one thread. Times are those of time.monotonic().

    Tenants control how many backends fail. So a Service has one Event in INTERVAL_S, a namespace
    NAMESPACE_EVENTS, and all together TOTAL_EVENTS: the recorder sends one in ten seconds
    (serve/events.py), so most of its Events stay free for what concerns the node and other
    Services. Namespaces take turns, and after TOTAL_EVENTS one follows every INTERVAL_S /
    TOTAL_EVENTS, so that nobody waits until the interval is over.
    """

    def __init__(self, events: EventRecorder) -> None:
        self._events = events
        self._reported: dict[ServiceName, float] = {}  # at most 2 * TOTAL_EVENTS
        # Until when Events are paid for, INTERVAL_S / TOTAL_EVENTS for each.
        self._spent_until = 0.0

    def report(self, failing: Iterable[FailingBackend], now: float) -> None:
        """Reports those of Services for which that is due."""
        self._reported = {name: time for name, time in self._reported.items() if now - time < INTERVAL_S}
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
            regarding = EventObject("Service", name.name, name.namespace)
            self._events.emit(regarding, "BackendFailing", "Connect", note)


def _log_lines(level: int, title: str, namespaced_lines: Iterable[tuple[str, str]]) -> None:
    """Logs a line for each (namespace, line), but at most MAX_PROBLEMS: all Services may hit a
    limit together.
    """
    lines = take_turns(sorted(namespaced_lines), itemgetter(0))
    for _, line in lines[:MAX_PROBLEMS]:
        log.log(level, "%s: %s", title, line)
    if len(lines) > MAX_PROBLEMS:
        log.log(level, "%s: and %d more", title, len(lines) - MAX_PROBLEMS)


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
        at = frontend.at
        if at.address in addresses.get(frontend.kind, ()) and at.port not in node_ports:
            yield f"{at} of Service {state.key.service}"


def _describe_refusals(state: ServiceState) -> Iterator[str]:
    for frontend_address, winner in state.lost:
        yield f"{frontend_address} is not served: it is taken by Service {winner}"
    for frontend_address, reason in state.refused:
        yield f"{frontend_address} is not served: {reason}"


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
