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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from kbpf import __version__
from kbpf.agent import conntrack
from kbpf.agent.inbox import Inbox, Item, Wake
from kbpf.agent.listeners import Listeners
from kbpf.agent.refusals import Refusals
from kbpf.agent.tally import Tally
from kbpf.dataplane.base import DataPlane
from kbpf.errors import KbpfError, PinsGone, printable
from kbpf.kernel import addresses, dummy, handover, threads
from kbpf.kernel.threads import Supervised
from kbpf.model.address import Addr
from kbpf.model.config import Config, LocalMode, Serving
from kbpf.model.desired import FrontendAddress, ServicePortKey
from kbpf.model.events import NEEDED, Delete, Kind, Upsert
from kbpf.model.status import MOST_PROBLEMS, AgentStatus, SourceView, ThreadView, encode
from kbpf.policy.admission import Server
from kbpf.policy.desired import Desired
from kbpf.policy.world import Touched, World
from kbpf.serve.desk import Desk
from kbpf.source.base import Source

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

STATUS_PAUSE_SECONDS: Final = 0.5
"""Status is written at most this often while changes come in."""


class Agent:
    """Runs in the calling thread until stop(). Owns its sources and its data plane."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        sources: Callable[[Callable[[Item], None]], Sequence[Source]],
        desk: Desk | None = None,
    ) -> None:
        self._config = config
        self._plane = plane
        self._inbox = Inbox()
        self._desk = desk or Desk(replace(config, serving=Serving(healthz="", metrics="")))
        self._tally = Tally(config, self._desk)
        self._refusals = Refusals(self._desk.events)
        self._servers: tuple[Server, ...] = ()  # that the agent has dialled, the newest last
        self._listeners = Listeners()
        self._told: tuple[tuple[Server, ...], frozenset[FrontendAddress]] = ((), frozenset())
        # the servers and listeners that policy knows of
        self._sources = sources(self._put)
        self._world = World(config.node_name, config.bind_address)
        self._conntrack = conntrack.Keeper(config.conntrack)
        self._desired = Desired()
        self._pending = Touched()
        self._retry: set[ServicePortKey] | None = set()
        self._stop = threading.Event()
        self._lock = threading.Lock()  # of _servers
        self._addresses: tuple[Addr, ...] = ()
        self._complete = False
        self._settled = False  # whether a complete apply knew of all objects
        self._refused: dict[str, str] = {}
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
        self._known_problems: frozenset[str] = frozenset()

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
        touched = self._world.apply(events)
        self._tally.heard(events, touched)
        self._pending.add(touched)
        if any(isinstance(item, Wake) and item.why == "addresses" for item in items):
            self._look_at_addresses()
        if self._synced:
            caught_up = self._complete
            self._bring_up_to_date()
            if caught_up and touched and not self._error:
                done = time.monotonic()
                self._latencies.extend(
                    done - event.received
                    for event in events
                    if isinstance(event, Upsert | Delete) and event.received
                )
        for look in self._plane.ended():
            self._desk.record.ended(look)
        if not self._pending and not self._error:
            self._tally.settled(self._world, self._desired.state)
        self._report_problems(bool(events))
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
        apart = (self._config.ipvs_device, *handover.DEVICES, *dummy.ours())
        return addresses.local_addresses(*apart)

    def _look_at_addresses(self) -> None:
        found = self._local_addresses()
        if found != self._addresses:
            self._addresses = found
            self._pending.everything = True
            self._retry = None  # the data plane looks at its surroundings, too

    def _bring_up_to_date(self) -> None:
        self._listeners.look(time.monotonic())
        due = self._pending or self._told != (self._servers, self._listeners.ports)
        if (due and self._pause() <= 0) or not self._complete:
            touched, self._pending = self._pending, Touched()
            node = self._desired.node
            self._told = self._servers, self._listeners.ports
            changed = self._desired.update(
                self._world, touched, self._addresses, self._config, *self._told
            )
            self._refusals.changed(changed, self._desired.state.services)
            if self._retry is not None:
                self._retry |= changed
            self._tally.changed(changed, self._desired.state)
            self._tell_what_is_missing()
            if self._desired.node != node or not self._complete:
                self._apply(None if not self._complete else self._retry)
                return
        self._resync()
        whole = not self._settled and self._sound()
        if self._retry is None or self._retry or self._refused or self._error or whole:
            self._apply(self._retry)

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
            self._desk.record.failed()
            return
        self._tick(time.monotonic())
        self._last_apply = time.monotonic()
        if keys is None:
            self._resync_due = self._last_apply + self._config.config_sync_period
        self._written = report.writes
        self._last_apply_ms = (time.perf_counter() - start) * 1000
        self._applied += 1
        self._tally.applied(keys, seconds)
        if not self._complete or self._error:
            self._status_due = 0.0  # good news is told at once
        self._retry, self._error, self._complete = set(), "", True
        refused = {str(key): line for key, line in report.refused.items()}
        news = sorted(refused.keys() - self._refused.keys())
        _tell(logging.ERROR, "not programmed", [f"{key}: {refused[key]}" for key in news])
        self._refused = refused

    def _sound(self) -> bool:
        """Whether everything that there is could be read. Pods serve nothing."""
        rejected = any(key.kind is not Kind.POD for key in self._world.rejected)
        return not rejected and all(s.status().sound for s in self._sources)

    def _wait(self) -> float:
        """Seconds until something is due."""
        now = time.monotonic()
        due = [self._status_due]
        if self._complete and (later := self._tick(now)) is not None:
            due.append(later)
        if self._pending and self._complete:
            due.append(now + max(0.0, self._pause()))
        if self._error or self._refused:
            due.append(now + RETRY_SECONDS)
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

    def _problems(self) -> list[str]:
        lines = list(self._known_problems)
        lines += [f"{key}: {line}" for key, line in self._refused.items()]
        lines += self._refusals.problems()
        for source in self._sources:
            lines += source.status().problems
        lines += self._plane.problems()
        lines += threads.problems()
        return sorted(set(map(printable, lines)))

    def status(self) -> AgentStatus:
        """How the agent is doing. Call from its thread."""
        problems = self._problems()
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
            problem_count=len(problems),
            refused=len(self._refused),
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

    def _report_problems(self, news: bool) -> None:
        """One warning for each object or endpoint that is newly left out."""
        if not news:
            return
        lines = frozenset(
            f"{k}: {line}" for k, found in self._world.problems.items() for line in found
        )
        _tell(logging.WARNING, "left out", sorted(lines - self._known_problems))
        self._known_problems = lines

    def _write_status(self) -> None:
        status = self.status()
        try:
            self._plane.write_status(encode(status))
        except PinsGone:
            raise
        except KbpfError as error:
            log.warning("the status was not written: %s", error)
        self._desk.show(status)  # last: who finds /readyz finds the rest, too


def _tell(level: int, what: str, lines: Sequence[str]) -> None:
    """A line for each, but not thousands at once: a limit may be met by all Services together."""
    for line in lines[:MOST_PROBLEMS]:
        log.log(level, "%s: %s", what, line)
    if len(lines) > MOST_PROBLEMS:
        more = len(lines) - MOST_PROBLEMS
        log.log(level, "%s: and %d more; `kbpf inspect status` has their number", what, more)
