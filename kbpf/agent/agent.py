"""The one writer.

Events come in; the world is brought up to date; for what was touched the policy says what should
be; the data plane makes it so. Nothing is written before every source has synced, so nothing is
ever deleted because it was not heard of yet. When the kernel refuses, what was serving goes on
serving and the same keys are tried again.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from kbpf import __version__
from kbpf.agent import conntrack_sysctls
from kbpf.agent.inbox import Inbox, Item, Wake
from kbpf.agent.listeners import Listeners
from kbpf.agent.problems import Problems
from kbpf.agent.recorder import Tally
from kbpf.agent.refusals import Refusals
from kbpf.agent.work_queue import Work
from kbpf.dataplane.base import DataPlane, Report
from kbpf.errors import KbpfError, PinsGone, printable
from kbpf.kernel.net import addresses, dummy
from kbpf.kernel.system import threads
from kbpf.kernel.system.threads import Supervised
from kbpf.model.address import Addr
from kbpf.model.config import Config, LocalMode, Serving, is_system
from kbpf.model.desired import FrontendAddress, ServicePortKey
from kbpf.model.events import NEEDED, Delete, Event, Kind, Synced, Upsert
from kbpf.model.objects import READ_AS, ServiceName
from kbpf.model.status import (
    MOST_NAMESPACES,
    MOST_PROBLEMS,
    AgentStatus,
    SourceView,
    ThreadView,
    encode,
)
from kbpf.policy.admission import Server
from kbpf.policy.compute import Desired
from kbpf.policy.frontends import node_ports_nowhere
from kbpf.policy.store import Touched, World
from kbpf.serve.events import About
from kbpf.serve.server import Desk
from kbpf.source.base import Source
from kbpf.takeover import conntrack_keepalive

log = logging.getLogger("kbpf.agent")

HEARTBEAT_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 1.0
READY_SECONDS: Final = 0.1
"""So often the data plane is asked whether it is done with the first apply."""

MOST_SERVERS: Final = 32
"""So many addresses of API servers that the agent has dialled are kept from Services."""
WATCH_SECONDS: Final = 30.0
"""Without progress for this long the thread `addresses` counts as stuck."""

LATENCIES: Final = 4096
"""So many of the last events tell how long it takes from an event's arrival to the map."""

SLICE_SECONDS: Final = 0.0015
"""Changes are computed for this long before they are programmed and the inbox is read again."""

STATUS_PAUSE_SECONDS: Final = 0.5
"""Status is written at most this often while changes come in."""


class Computing(NamedTuple):
    """A Service that is being computed, and when the events arrived that this brings into force."""

    name: ServiceName
    steps: Generator[set[ServicePortKey]]
    arrived: list[float]


class Agent:
    """Runs in the calling thread until stop(). Owns its sources and its data plane."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        sources: Callable[[Callable[[Item], None]], Sequence[Source]],
        desk: Desk | None = None,
    ) -> None:
        self.config_error: Callable[[], str] | None = None
        """What is wrong with the configuration file; None without one."""
        self._config = config
        self._plane = plane
        self._inbox = Inbox()
        self._desk = desk or Desk(replace(config, serving=Serving(healthz="", metrics="")))
        self._tally = Tally(config, self._desk)
        self._problem_lines = Problems()
        self._refusals = Refusals(self._desk.events, self._problem_lines)
        self._servers: tuple[Server, ...] = ()  # that the agent has dialled, the newest last
        self._listeners = Listeners()
        self._told: tuple[tuple[Server, ...], frozenset[FrontendAddress]] = ((), frozenset())
        # the servers and listeners that policy knows of
        self._sources = sources(self._put)
        self._world = World(config.node_name, config.bind_address)
        self._conntrack = conntrack_sysctls.Keeper(config.conntrack)
        self._desired = Desired()
        self._pending = Touched()
        self._work = Work()
        self._current: Computing | None = None
        self._arrived: dict[ServiceName, list[float]] = {}  # events that are not computed yet
        self._computed: dict[ServiceName, list[float]] = {}  # and those not programmed yet
        self._deferred = False  # whether the data plane has more to do for large Service ports
        self._deferred_due = 0.0  # and when
        self._passed_over = False  # whether large ones were left out in the last round
        self._retry: set[ServicePortKey] | None = set()
        self._retry_due = 0.0
        self._stop = threading.Event()
        self._lock = threading.Lock()  # of _servers
        self._addresses: tuple[Addr, ...] = ()
        self._nowhere = ""
        self._complete = False
        self._settled = False  # whether a complete apply knew of all objects
        self._refused: set[ServicePortKey] = set()
        self._plain: set[ServicePortKey] = set()  # spread evenly instead of as they ask
        self._error = ""  # of the last apply
        self._tick_error = ""  # of what was put off
        self._missing = False
        self._ready = False  # whether the data plane is done with the first apply
        self._started = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._status_due = 0.0
        self._applied = 0
        self._last_apply = float("-inf")  # time.monotonic(), as the next
        self._resync_due = 0.0  # none before the first apply
        self._written: Mapping[str, int] = {}  # by the last apply, entries by map
        self._node_missed = False
        self._last_apply_ms = 0.0
        self._latencies: deque[float] = deque(maxlen=LATENCIES)

    def stop(self) -> None:
        """Ends run() soon. May be called from a signal handler or another thread."""
        self._stop.set()
        self._inbox.put(Wake("stop"))

    def connecting(self, cookie: int, address: Addr, port: int) -> None:
        """See source.cluster.Connecting. Called by any thread, from open() on."""
        self._plane.claim_socket(cookie)
        with self._lock:
            if (address, port) in self._servers:
                return
            self._servers = (*self._servers, (address, port))[-MOST_SERVERS:]
        self._inbox.put(Wake("server"))

    def run(self) -> None:
        """Opens the data plane, starts the sources and serves until stop().

        Raises what open() or a source's start() raises. Traffic is as it was after the end.
        """
        try:
            self._desk.start()  # before open(): compiling takes a while, and kubelet asks
            self._plane.open()
            self._run()
        finally:
            self._desk.stop()

    def _put(self, item: Item) -> None:
        """Where sources leave what they say."""
        if isinstance(item, Upsert | Delete):
            self._desk.health.queued()
            if item.key.kind in (Kind.SERVICE, Kind.SLICE):
                self._desk.record.queued()
        self._inbox.put(item)

    def _run(self) -> None:
        watch = Supervised(
            "addresses",
            partial(
                addresses.watch_addresses, lambda: self._inbox.put(Wake("addresses")), self._stop
            ),
            WATCH_SECONDS,
        )
        try:
            self._addresses = self._local_addresses()
            watch.start()
            for source in self._sources:
                source.start()
            self._tell_what_is_passed_by()
            log.info("started node=%s mode=%s", self._config.node_name, self._plane.name)
            self._desk.begun(__version__, self._plane.choice())
            self._serve()
        finally:
            self._stop.set()
            for source in self._sources:
                source.stop()
            watch.stop()
            self._plane.close()
        log.info("stopped; what is programmed goes on serving")

    def _tell_what_is_passed_by(self) -> None:
        if self._plane.name == "ipvs":
            return  # which has no packet path
        if self._config.packet_path and self._config.forwarding == "direct":
            log.info(
                "forwarding=direct: balanced packets to pods of this node pass by the host's "
                "nftables and iptables, conntrack, and network policies built on them"
            )

    def _serve(self) -> None:
        wait = 0.0
        while not self._stop.is_set():
            self._desk.health.taken()
            self._conntrack.look(time.monotonic())
            self.step(self._inbox.take(wait))
            wait = self._wait()

    def step(self, items: Sequence[Item]) -> None:
        """One round: what came in, what follows from it, what was put off."""
        events = [item for item in items if not isinstance(item, Wake)]
        _log_events(events)
        touched = self._world.apply(events)
        self._tally.heard(events, touched)
        self._pending.add(touched)
        if any(isinstance(item, Wake) and item.why == "addresses" for item in items):
            self._look_at_addresses()
        if self._synced:
            self._note_arrivals(events, touched)
            self._bring_up_to_date()
        for look in self._plane.ended():
            self._desk.record.ended(look)
        if not self._pending and not self._busy and not self._error:
            self._tally.settled(self._world, self._desired.state)
        elif self._work.oldest is not None and not self._error:
            self._desk.health.waiting(self._work.oldest)
        self._report_problems(events)
        now = time.monotonic()
        if self._complete and not self._ready and self._plane.ready():
            self._ready, self._status_due = True, 0.0
        if items:
            self._status_due = min(self._status_due, now + STATUS_PAUSE_SECONDS)
        if now >= self._status_due:
            pause = HEARTBEAT_SECONDS if self._ready or not self._complete else READY_SECONDS
            self._status_due = now + pause
            self._write_status()

    @property
    def _synced(self) -> bool:
        return self._world.synced >= NEEDED

    def _local_addresses(self) -> tuple[Addr, ...]:
        """Those of the node itself: IPVS data planes have devices for the others, and ours may have
        had another name.
        """
        apart = (self._config.ipvs_device, *conntrack_keepalive.DEVICES, *dummy.ours())
        return addresses.local_addresses(*apart)

    def _look_at_addresses(self) -> None:
        found = self._local_addresses()
        if found != self._addresses:
            self._addresses = found
            self._pending.everything = True
            self._retry = None  # the data plane looks at its surroundings, too

    def _note_arrivals(self, events: Iterable[Event], touched: Touched) -> None:
        """When what is to be programmed now arrived, for event_to_map."""
        if not self._complete:
            return
        for event in events:
            if not isinstance(event, Upsert | Delete) or not event.received:
                continue
            name = self._world.service_of(event)
            if name in touched.services:
                self._arrived.setdefault(name, []).append(event.received)

    @property
    def _busy(self) -> bool:
        """Whether there is more to compute or to program than one step does."""
        return bool(self._work or self._current or self._retry or self._deferred)

    def _bring_up_to_date(self) -> None:
        self._listeners.look(time.monotonic())
        due = self._pending or self._told != (self._servers, self._listeners.ports)
        if not self._complete:
            touched, self._pending = self._pending, Touched()
            self._told = self._servers, self._listeners.ports
            self._changed(
                self._desired.update(
                    self._world, touched, self._addresses, self._config, *self._told
                )
            )
            self._tell_what_is_missing()
            self._apply(None)
            return
        if due and self._pause() <= 0:
            touched, self._pending = self._pending, Touched()
            now, node = time.monotonic(), self._desired.node
            self._told = self._servers, self._listeners.ports
            for name in self._desired.touch(
                self._world, touched, self._addresses, self._config, *self._told
            ):
                system = is_system(name, self._config)
                self._work.add(name, self._world.size_of(name), system, now)
            self._tell_what_is_missing()
            if self._desired.node != node and self._retry is not None:
                self._apply(self._retry)
        urgent = self._compute_small(SLICE_SECONDS)
        self._resync()
        whole = not self._settled and self._sound()
        again = (self._refused or self._error) and time.monotonic() >= self._retry_due
        if self._retry is None or self._retry or again or whole:
            self._apply(self._retry)
        self._passed_over = urgent and not self._passed_over
        if not self._passed_over and not self._error:
            self._go_on(SLICE_SECONDS)

    def _compute_small(self, seconds: float) -> bool:
        """Computes small Services that wait, for so long; whether there were any."""
        until, computed = time.monotonic() + seconds, False
        while (name := self._work.pop_small()) is not None:
            if self._current is not None and self._current.name == name:
                self._finish(self._current)  # or its older half would overwrite the newer one
            self._finish(self._begin(name))
            computed = True
            if time.monotonic() >= until:
                break
        return computed

    def _go_on(self, seconds: float) -> None:
        """One slice of what is large: computes it, and programs that. No large Service is begun
        while the data plane has yet to program another.
        """
        until = time.monotonic() + seconds
        if self._current is None and not self._deferred:
            name = self._work.pop_large(time.monotonic())
            self._current = None if name is None else self._begin(name)
        while self._current is not None:
            self._step(self._current)
            if time.monotonic() >= until:
                break
        if self._retry or (self._deferred and time.monotonic() >= self._deferred_due):
            self._apply(self._retry)

    def _begin(self, name: ServiceName) -> Computing:
        steps = self._desired.steps(name, self._world, self._config)
        return Computing(name, steps, self._arrived.pop(name, []))

    def _finish(self, computing: Computing) -> None:
        """Computes all of it."""
        while self._step(computing):
            pass

    def _step(self, computing: Computing) -> bool:
        """One step; False once it is over."""
        changed = next(computing.steps, None)
        if changed is not None:
            self._changed(changed)
            return True
        name = computing.name
        if self._current is computing:
            self._current = None
        self._computed.setdefault(name, []).extend(computing.arrived)
        if not is_system(name, self._config):
            self._work.computed(name, self._world.size_of(name), time.monotonic())
        return False

    def _changed(self, keys: set[ServicePortKey]) -> None:
        """The states of these Service ports are others now."""
        if self._retry is not None:
            self._retry |= keys
        self._tally.changed(keys, self._desired.state)
        self._refusals.changed(keys, self._desired.state.services, self._desired.reserved)

    def _resync(self) -> None:
        """Now and then all that is programmed is compared with what it should be, if everything
        could be read that says so.
        """
        late = time.monotonic() >= self._resync_due
        if not late or self._error or self._retry or not self._sound():
            return
        self._plane.doubt()
        self._apply(None)
        if self._error:
            return
        repaired = {name: n for name, n in sorted(self._written.items()) if n}
        self._desk.record.compared(sum(repaired.values()))
        if repaired:
            words = " ".join(f"{name}={n}" for name, n in repaired.items())
            log.warning("others had changed what was programmed; repaired: %s", words)

    def _pause(self) -> float:
        """Seconds until changes may be programmed again."""
        return self._last_apply + self._config.min_sync_period - time.monotonic()

    def _tell_what_is_missing(self) -> None:
        """Once: what is not known of this node. kube-proxy goes on without it, too."""
        known = self._world.node_known or self._config.source is not None
        if not known and not self._node_missed:
            self._node_missed = True
            log.warning(
                "there is no Node %s yet (--hostname-override): until it is told, NodePorts answer "
                "on all addresses of this node, and it is in no zone",
                self._config.node_name,
            )
        mode = self._config.detect_local_mode
        by_network = mode in (LocalMode.CLUSTER_CIDR, LocalMode.NODE_CIDR)
        missing = by_network and not self._desired.state.local_networks
        if missing and not self._missing:
            where = "--cluster-cidr" if mode is LocalMode.CLUSTER_CIDR else "the Node's podCIDRs"
            log.warning(
                "detect-local-mode=%s has no network yet (%s): no ClusterIP is masqueraded, and "
                "clients count as local by their devices",
                mode,
                where,
            )
        self._missing = missing

    def _apply(self, keys: set[ServicePortKey] | None) -> None:
        start = time.perf_counter()
        try:
            sound = self._sound()
            report = self._plane.apply(self._desired.state, keys, sound)
            seconds = time.perf_counter() - start
            self._settled = self._settled or sound
        except KbpfError as error:
            if str(error) != self._error:
                log.error("not programmed, trying again: %s", error)
            self._error = str(error)
            self._retry_due = time.monotonic() + RETRY_SECONDS
            self._desk.record.failed()
            return
        self._last_apply = time.monotonic()
        if keys is None:
            self._resync_due = self._last_apply + self._config.config_sync_period
        self._written = report.writes
        self._last_apply_ms = (time.perf_counter() - start) * 1000
        self._applied += 1
        log.debug(
            "programmed service_ports=%s entries=%d ms=%.1f",
            "all" if keys is None else len(keys), sum(report.writes.values()), self._last_apply_ms,
        )  # fmt: skip
        self._tally.applied(keys, seconds)
        if not self._complete or self._error:
            self._status_due = 0.0  # good news is told at once
        self._retry, self._error, self._complete = set(), "", True
        self._deferred, self._deferred_due = bool(report.deferred), report.due
        more_room = len(report.refused) < len(self._refused)
        self._retry_due = self._last_apply + (0.0 if more_room else RETRY_SECONDS)
        self._note_latencies(report.deferred)
        self._report_limits(report)

    def _note_latencies(self, deferred: Set[ServiceName]) -> None:
        """What was computed is in force, but for Services that are put off."""
        done = time.monotonic()
        for name in self._computed.keys() - deferred:
            self._latencies.extend(done - at for at in self._computed.pop(name))

    def _report_limits(self, report: Report) -> None:
        """What could not be programmed as it is wanted: a log line, a problem line, an Event."""
        keys = report.looked_at
        if keys is None:
            keys = {*self._refused, *self._plain, *report.refused, *report.plain}
        for lines, known, level, what, reason in (
            (report.refused, self._refused, logging.ERROR, "not programmed", "NotProgrammed"),
            (report.plain, self._plain, logging.WARNING, "annotations", "AnnotationsNotApplied"),
        ):
            news = []
            for key in sorted(known.union(lines) if len(keys) > len(lines) + len(known) else keys):
                line = lines.get(key)
                self._problem_lines.put((what, key), () if line is None else (f"{key}: {line}",))
                if line is not None and key not in known:
                    news.append((key, line))
                if line is None:
                    known.discard(key)
                else:
                    known.add(key)
            _tell(level, what, [f"{key}: {line}" for key, line in news])
            for key, line in news[:MOST_PROBLEMS]:
                about = About("Service", key.name, key.namespace)
                self._desk.events.say(about, reason, "Program", f"{key}: {line}")

    def _sound(self) -> bool:
        """Whether everything that there is could be read. Pods serve nothing."""
        return self._world.all_usable and all(s.status().sound for s in self._sources)

    def _wait(self) -> float:
        """Seconds until something is due."""
        now = time.monotonic()
        due = [self._status_due]
        if self._complete and (later := self._tick(now)) is not None:
            due.append(later)
        if self._pending and self._complete:
            due.append(now + max(0.0, self._pause()))
        if self._complete and not self._error:
            if self._current is not None or self._retry:
                due.append(now)
            if self._deferred:
                due.append(self._deferred_due)
        if self._complete and (next_due := self._work.due(now)) is not None:
            due.append(next_due)
        if self._error or self._refused:
            due.append(self._retry_due)
        return max(0.0, min(due) - now)

    def _tick(self, now: float) -> float | None:
        """What the data plane has put off; when to come next. A failure is told, and is no reason
        to program anything again: Services are served.
        """
        try:
            later = self._plane.tick(now)
        except KbpfError as error:
            if str(error) != self._tick_error:
                log.error("what was put off is not done, trying again: %s", error)
                self._status_due = now
            self._tick_error = str(error)
            return now + RETRY_SECONDS
        self._tick_error = ""
        return later

    # ---- status ----------------------------------------------------------------------------

    def _problems(self) -> tuple[list[str], int]:
        """The first problem lines, sorted, and how many there are."""
        others = [line for source in self._sources for line in source.status().problems]
        others += [*self._plane.problems(), *threads.problems(), *self._own_problems()]
        lines = [*others[:MOST_PROBLEMS], *self._problem_lines.first(MOST_PROBLEMS)]
        return sorted(set(map(printable, lines))), len(self._problem_lines) + len(others)

    def _own_problems(self) -> Iterator[str]:
        yield from self._desk.problems()
        if self._nowhere:
            yield self._nowhere
        if self.config_error is not None and (error := self.config_error()):
            yield f"the configuration file is refused, and the next start would be: {error}"

    def status(self) -> AgentStatus:
        """How the agent is doing. Call from its thread."""
        problems, problem_count = self._problems()
        now = time.monotonic()
        return AgentStatus(
            version=__version__,
            pid=os.getpid(),
            mode=self._plane.name,
            node=self._config.node_name,
            started=self._started,
            heartbeat=time.clock_gettime(time.CLOCK_BOOTTIME),
            synced=self._complete and self._ready,
            services=len(self._world.names()),
            service_ports=len(self._desired.state.services),
            applied=self._applied,
            last_apply_ms=round(self._last_apply_ms, 3),
            event_to_map_p50_ms=self._latency(0.5),
            event_to_map_p99_ms=self._latency(0.99),
            sources=tuple(
                SourceView(
                    s.name,
                    str(s.state),
                    s.synced,
                    s.resource_version,
                    s.error,
                    s.failures,
                    round(now - s.last_contact, 1) if s.last_contact else 0.0,
                    s.drift,
                )
                for s in (source.status() for source in self._sources)
            ),
            problems=tuple(problems[:MOST_PROBLEMS]),
            problem_count=problem_count,
            refused=len(self._refused),
            refused_namespaces=self._refused_namespaces(),
            refused_system=self._refused_system(),
            error=self._error or self._tick_error,
            packets=self._plane.packet_status(),
            without_endpoints=self._tally.without_endpoints,
            choice=self._plane.choice(),
            faults=self._plane.faults(),
            threads=tuple(
                ThreadView(one.name, one.alive, round(one.idle, 1), one.restarts, one.problem)
                for one in threads.table()
            ),
            off=self._features_off(),
            config_error=self.config_error() if self.config_error is not None else None,
        )

    def _features_off(self) -> tuple[str, ...]:
        if self._config.source is not None or self._config.socket_lb_label:
            return ()
        return ("Pods are not watched: their label kbpf.io/socket-lb does nothing",)

    def _latency(self, quantile: float) -> float:
        """Milliseconds; 0.0 before the first event."""
        ordered = sorted(self._latencies)
        if not ordered:
            return 0.0
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] * 1000, 3)

    def _report_problems(self, events: Iterable[Event]) -> None:
        """One warning for each object or endpoint that is newly left out, or read otherwise than
        some programs would.
        """
        news: list[str] = []
        for key in {event.key for event in events if not isinstance(event, Synced)}:
            lines = [f"{key}: {line}" for line in self._world.problems_of(key)]
            news += self._problem_lines.put(key, lines)
        _tell(logging.WARNING, "left out", sorted(line for line in news if READ_AS not in line))
        _tell(logging.WARNING, "odd", sorted(line for line in news if READ_AS in line))

    def _refused_namespaces(self) -> dict[str, int]:
        """How many Service ports could not be programmed, by namespace: those with the most."""
        counts = Counter(key.namespace for key in self._refused)
        return dict(counts.most_common(MOST_NAMESPACES))

    def _refused_system(self) -> tuple[str, ...]:
        names = {key.service for key in self._refused}
        leading = sorted(str(name) for name in names if is_system(name, self._config))
        return tuple(leading[:MOST_PROBLEMS])

    def _look_at_node_ports(self) -> None:
        """A warning when NodePorts begin to answer nowhere."""
        before = self._nowhere
        self._nowhere = node_ports_nowhere(self._addresses, self._config)
        if self._nowhere and self._nowhere != before:
            log.warning("%s", self._nowhere)

    def _write_status(self) -> None:
        self._look_at_node_ports()
        status = self.status()
        try:
            self._plane.write_status(encode(status))
        except PinsGone:
            raise
        except KbpfError as error:
            log.warning("the status was not written: %s", error)
        self._desk.show(status)  # last: who finds /readyz finds the rest, too


def _log_events(events: Iterable[Event]) -> None:
    """A line for each, at debug."""
    if log.isEnabledFor(logging.DEBUG):
        for event in events:
            about = event.kind if isinstance(event, Synced) else event.key
            log.debug("event %s %s", type(event).__name__.lower(), about)


def _tell(level: int, what: str, lines: Sequence[str]) -> None:
    """A line for each, but not thousands at once: a limit may be met by all Services together."""
    for line in lines[:MOST_PROBLEMS]:
        log.log(level, "%s: %s", what, line)
    if len(lines) > MOST_PROBLEMS:
        more = len(lines) - MOST_PROBLEMS
        log.log(level, "%s: and %d more; `kbpf inspect status` has their number", what, more)
