# SPDX-License-Identifier: Apache-2.0
"""The agent's event loop: the only code that writes to the data plane.

Events update the object store, the policy computes the desired state of the Service ports that the
events touched, and the data plane programs it. Nothing is written before every source has synced,
so that nothing is deleted merely because its object has not been read yet. If the kernel refuses a
write, what is programmed continues to serve, perhaps with a part of the change. After a second the
data plane reads the kernel's state again and writes what differs.
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
from kbpf.agent.recorder import Recorder
from kbpf.agent.refusals import RefusalReporter
from kbpf.agent.work_queue import ServiceQueue
from kbpf.dataplane.base import DataPlane, Report
from kbpf.errors import KbpfError, PinsRemovedError, escape_unprintable
from kbpf.kernel.net import addresses, dummy
from kbpf.kernel.system import threads
from kbpf.kernel.system.threads import SupervisedThread
from kbpf.model.address import Addr
from kbpf.model.config import Config, LocalMode, Serving, is_system_service
from kbpf.model.desired import FrontendAddress, ServicePortKey
from kbpf.model.events import REQUIRED_KINDS, Delete, Event, Kind, Synced, Upsert
from kbpf.model.objects import READ_AS_TEXT, ServiceName
from kbpf.model.status import (
    MAX_NAMESPACES,
    MAX_PROBLEMS,
    AgentStatus,
    SourceView,
    ThreadView,
    encode,
)
from kbpf.policy.admission import ApiServerAddress
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.frontends import node_port_problem
from kbpf.policy.store import ChangeSet, ObjectStore
from kbpf.serve.events import EventObject
from kbpf.serve.server import AgentServer
from kbpf.source.base import Source
from kbpf.takeover import conntrack_keepalive

log = logging.getLogger("kbpf.agent")

HEARTBEAT_INTERVAL_S: Final = 2.0
RETRY_INTERVAL_S: Final = 1.0
READY_POLL_INTERVAL_S: Final = 0.1
"""How often the data plane is polled for the end of the first apply."""

MAX_API_SERVERS: Final = 32
"""The most recent addresses of API servers that the agent has connected to; Services cannot take
them."""
ADDRESS_WATCH_TIMEOUT_S: Final = 30.0
"""Without progress for this long the thread `addresses` counts as stuck."""

MAX_LATENCY_SAMPLES: Final = 4096
"""The latency from an event's arrival to the map is computed over this many events."""

COMPUTE_BUDGET_S: Final = 0.0015
"""Changes are computed for this long before they are programmed and the inbox is read again."""

MIN_STATUS_INTERVAL_S: Final = 0.5
"""While changes come in, the status is written at most this often."""


class ServiceComputation(NamedTuple):
    """A Service that is being computed, and the arrival times of the events that led to it."""

    name: ServiceName
    steps: Generator[set[ServicePortKey]]
    arrival_times: list[float]


class Agent:
    """Runs in the calling thread until stop(). Owns its sources and its data plane."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        make_sources: Callable[[Callable[[Item], None]], Sequence[Source]],
        server: AgentServer | None = None,
    ) -> None:
        self.config_error: Callable[[], str] | None = None
        """Returns what is wrong with the configuration file, "" if nothing; None if there is no
        file."""
        self._config = config
        self._plane = plane
        self._inbox = Inbox()
        self._server = server or AgentServer(
            replace(config, serving=Serving(healthz="", metrics=""))
        )
        self._recorder = Recorder(config, self._server)
        self._problem_lines = Problems()
        self._refusals = RefusalReporter(self._server.events, self._problem_lines)
        # those that the agent has connected to, newest last
        self._api_servers: tuple[ApiServerAddress, ...] = ()
        self._listeners = Listeners()
        # API servers and listeners as last given to the policy
        self._policy_inputs: tuple[tuple[ApiServerAddress, ...], frozenset[FrontendAddress]] = (
            (),
            frozenset(),
        )
        self._sources = make_sources(self._enqueue)
        self._store = ObjectStore(config.node_name, config.bind_address)
        self._conntrack_sysctls = conntrack_sysctls.ConntrackSysctls(config.conntrack)
        self._builder = DesiredStateBuilder()
        self._pending = ChangeSet()
        self._queue = ServiceQueue()
        self._computation: ServiceComputation | None = None
        self._uncomputed_arrivals: dict[ServiceName, list[float]] = {}  # of events not computed yet
        # of events computed but not programmed yet
        self._unprogrammed_arrivals: dict[ServiceName, list[float]] = {}
        # whether the data plane has large Service ports left to program (Report.deferred)
        self._deferred = False
        self._deferred_due = 0.0  # when that work is due
        self._skipped_large = False  # whether the last round left large Services out
        self._dirty_keys: set[ServicePortKey] | None = set()
        self._retry_due = 0.0
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards _api_servers
        self._node_addresses: tuple[Addr, ...] = ()
        self._node_port_problem = ""
        self._first_apply_done = False
        self._fully_synced = False  # whether an authoritative apply has succeeded
        self._refused: set[ServicePortKey] = set()
        self._degraded: set[ServicePortKey] = set()  # served without their annotations
        self._apply_error = ""  # of the last apply
        self._status_error = ""  # of the last write of the status
        self._tick_error = ""  # of the last tick of the data plane
        self._local_networks_missing = False
        self._plane_ready = False  # whether the data plane has completed the first apply
        self._start_time = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._status_due = 0.0
        self._apply_count = 0
        self._last_apply = float("-inf")  # time.monotonic(), like the next
        self._resync_due = 0.0  # not before the first apply
        self._last_writes: Mapping[str, int] = {}  # entries written by the last apply, by map
        self._missing_node_logged = False
        self._last_apply_ms = 0.0
        self._latencies: deque[float] = deque(maxlen=MAX_LATENCY_SAMPLES)

    def stop(self) -> None:
        """Ends run() soon. May be called from a signal handler or another thread."""
        self._stop.set()
        self._inbox.put(Wake("stop"))

    def on_api_connect(self, cookie: int, address: Addr, port: int) -> None:
        """Called before a connection to an API server is opened, in any thread. From now on only
        ClusterIPs are translated for the socket with this cookie, and no Service can take the
        address and port.
        """
        self._plane.claim_socket(cookie)
        with self._lock:
            if (address, port) in self._api_servers:
                return
            self._api_servers = (*self._api_servers, (address, port))[-MAX_API_SERVERS:]
        self._inbox.put(Wake("server"))

    def run(self) -> None:
        """Opens the data plane, starts the sources and serves until stop().

        Raises whatever open() or a source's start() raises. What is programmed continues to serve
        afterwards.
        """
        try:
            # Before open(): compiling takes a while, and kubelet probes the agent meanwhile.
            self._server.start()
            self._plane.open()
            self._run()
        finally:
            self._server.stop()

    def _enqueue(self, item: Item) -> None:
        """Called by the sources for each event, in their own threads."""
        if isinstance(item, Upsert | Delete):
            self._server.health.record_queued()
            if item.key.kind in (Kind.SERVICE, Kind.SLICE):
                self._server.proxy_metrics.record_queued()
        self._inbox.put(item)

    def _run(self) -> None:
        address_watcher = SupervisedThread(
            "addresses",
            partial(
                addresses.watch_addresses, lambda: self._inbox.put(Wake("addresses")), self._stop
            ),
            ADDRESS_WATCH_TIMEOUT_S,
        )
        try:
            self._node_addresses = self._read_node_addresses()
            address_watcher.start()
            for source in self._sources:
                source.start()
            self._log_netfilter_bypass()
            log.info("started node=%s mode=%s", self._config.node_name, self._plane.name)
            self._server.report_started(__version__, self._plane.mode_choice())
            self._run_event_loop()
        finally:
            self._stop.set()
            for source in self._sources:
                source.stop()
            address_watcher.stop()
            self._plane.close()
        log.info("stopped; the data plane continues to serve what is programmed")

    def _log_netfilter_bypass(self) -> None:
        if self._plane.name == "ipvs":
            return  # which has no packet path
        if self._config.packet_path and self._config.forwarding == "direct":
            log.info(
                "forwarding=direct: balanced packets to pods of this node bypass the host's "
                "nftables and iptables, conntrack, and network policies built on them"
            )

    def _run_event_loop(self) -> None:
        wait = 0.0
        while not self._stop.is_set():
            self._server.health.record_dequeued()
            self._conntrack_sysctls.apply(time.monotonic())
            self.step(self._inbox.get_batch(wait))
            wait = self._seconds_until_due()

    def step(self, items: Sequence[Item]) -> None:
        """Runs one round: applies the events, programs what changed, and runs what was deferred."""
        events = [item for item in items if not isinstance(item, Wake)]
        _log_events(events)
        touched = self._store.apply(events)
        self._recorder.record_events(events, touched)
        self._pending.update(touched)
        if any(isinstance(item, Wake) and item.reason == "addresses" for item in items):
            self._refresh_node_addresses()
        if self._synced:
            self._record_arrivals(events, touched)
            self._reconcile()
        for cut in self._plane.take_udp_cuts():
            self._server.proxy_metrics.record_udp_cut(cut)
        if not self._pending and not self._busy and not self._apply_error:
            self._recorder.record_settled(self._store, self._builder.state)
        elif self._queue.oldest_since is not None and not self._apply_error:
            self._server.health.set_oldest(self._queue.oldest_since)
        self._report_problems(events)
        now = time.monotonic()
        if self._first_apply_done and not self._plane_ready and self._plane.is_ready():
            self._plane_ready, self._status_due = True, 0.0
        if items:
            self._status_due = min(self._status_due, now + MIN_STATUS_INTERVAL_S)
        if now >= self._status_due:
            pause = (
                HEARTBEAT_INTERVAL_S
                if self._plane_ready or not self._first_apply_done
                else READY_POLL_INTERVAL_S
            )
            self._status_due = now + pause
            self._write_status()

    @property
    def _synced(self) -> bool:
        return self._store.synced >= REQUIRED_KINDS

    def _read_node_addresses(self) -> tuple[Addr, ...]:
        """Reads the node's own addresses. Dummy devices of IPVS data planes are excluded: they
        hold Service addresses, and the name of ours may have been changed since.
        """
        excluded_devices = (
            self._config.ipvs_device,
            *conntrack_keepalive.SERVICE_DEVICES,
            *dummy.list_ours(),
        )
        return addresses.local_addresses(*excluded_devices)

    def _refresh_node_addresses(self) -> None:
        node_addresses = self._read_node_addresses()
        if node_addresses != self._node_addresses:
            self._node_addresses = node_addresses
            self._pending.all_services = True
            self._dirty_keys = None  # all: the data plane also compares what depends on addresses

    def _record_arrivals(self, events: Iterable[Event], touched: ChangeSet) -> None:
        """Records when the changes to be programmed arrived, for event_to_map."""
        # What was listed at the start did not just change, and would distort the figures.
        if not self._first_apply_done:
            return
        for event in events:
            if not isinstance(event, Upsert | Delete) or not event.received_at:
                continue
            name = self._store.service_of(event)
            if name in touched.services:
                self._uncomputed_arrivals.setdefault(name, []).append(event.received_at)

    @property
    def _busy(self) -> bool:
        """Whether anything is left to compute or to program."""
        return bool(self._queue or self._computation or self._dirty_keys or self._deferred)

    def _reconcile(self) -> None:
        self._listeners.refresh(time.monotonic())
        outdated = self._pending or self._policy_inputs != (
            self._api_servers,
            self._listeners.ports,
        )
        if not self._first_apply_done:
            # At once: the first apply removes what an earlier agent left, so it needs everything.
            touched, self._pending = self._pending, ChangeSet()
            self._policy_inputs = self._api_servers, self._listeners.ports
            self._mark_changed(
                self._builder.update(
                    self._store, touched, self._node_addresses, self._config, *self._policy_inputs
                )
            )
            self._warn_about_missing_data()
            self._apply(None)
            return
        if outdated and self._seconds_until_apply() <= 0:
            touched, self._pending = self._pending, ChangeSet()
            now, node = time.monotonic(), self._builder.node_state
            self._policy_inputs = self._api_servers, self._listeners.ports
            for name in self._builder.begin_update(
                self._store, touched, self._node_addresses, self._config, *self._policy_inputs
            ):
                system = is_system_service(name, self._config)
                self._queue.add(name, self._store.estimate_cost(name), system, now)
            self._warn_about_missing_data()
            # What belongs to the node does not wait for the Services in the queue.
            if self._builder.node_state != node and self._dirty_keys is not None:
                self._apply(self._dirty_keys)
        computed_small = self._compute_small_services(COMPUTE_BUDGET_S)
        self._resync()
        newly_authoritative = not self._fully_synced and self._is_authoritative()
        retry_due = (self._refused or self._apply_error) and time.monotonic() >= self._retry_due
        if self._dirty_keys is None or self._dirty_keys or retry_due or newly_authoritative:
            self._apply(self._dirty_keys)
        # Large Services get every second round at least, however many small ones wait.
        self._skipped_large = computed_small and not self._skipped_large
        if not self._skipped_large and not self._apply_error:
            self._advance_large_service(COMPUTE_BUDGET_S)

    def _compute_small_services(self, seconds: float) -> bool:
        """Computes waiting small Services for at most `seconds`; returns whether there were any."""
        deadline, computed_any = time.monotonic() + seconds, False
        while (name := self._queue.pop_small()) is not None:
            if self._computation is not None and self._computation.name == name:
                # Otherwise the older computation would overwrite the result of the newer one.
                self._finish_computation(self._computation)
            self._finish_computation(self._start_computation(name))
            computed_any = True
            if time.monotonic() >= deadline:
                break
        return computed_any

    def _advance_large_service(self, seconds: float) -> None:
        """Computes large Services for at most `seconds`, and programs the result. No large Service
        is begun while the data plane still has another one to program.
        """
        deadline = time.monotonic() + seconds
        if self._computation is None and not self._deferred:
            name = self._queue.pop_large(time.monotonic())
            self._computation = None if name is None else self._start_computation(name)
        while self._computation is not None:
            self._step_computation(self._computation)
            if time.monotonic() >= deadline:
                break
        if self._dirty_keys or (self._deferred and time.monotonic() >= self._deferred_due):
            self._apply(self._dirty_keys)

    def _start_computation(self, name: ServiceName) -> ServiceComputation:
        steps = self._builder.update_service_in_steps(name, self._store, self._config)
        return ServiceComputation(name, steps, self._uncomputed_arrivals.pop(name, []))

    def _finish_computation(self, computation: ServiceComputation) -> None:
        while self._step_computation(computation):
            pass

    def _step_computation(self, computation: ServiceComputation) -> bool:
        """Runs one step; returns False when the computation is complete."""
        changed_keys = next(computation.steps, None)
        if changed_keys is not None:
            self._mark_changed(changed_keys)
            return True
        name = computation.name
        if self._computation is computation:
            self._computation = None
        self._unprogrammed_arrivals.setdefault(name, []).extend(computation.arrival_times)
        if not is_system_service(name, self._config):
            self._queue.mark_computed(name, self._store.estimate_cost(name), time.monotonic())
        return False

    def _mark_changed(self, keys: set[ServicePortKey]) -> None:
        """Marks Service ports whose desired state has changed."""
        if self._dirty_keys is not None:
            self._dirty_keys |= keys
        self._recorder.record_changes(keys, self._builder.state)
        self._refusals.report_changes(keys, self._builder.state.services, self._builder.reserved)

    def _resync(self) -> None:
        """Compares everything programmed with the desired state every `config_sync_period`,
        provided that all objects could be read.
        """
        is_due = time.monotonic() >= self._resync_due
        if not is_due or self._apply_error or self._dirty_keys or not self._is_authoritative():
            return
        self._plane.invalidate()
        self._apply(None)
        if self._apply_error:
            return
        repaired = {name: n for name, n in sorted(self._last_writes.items()) if n}
        self._server.proxy_metrics.record_comparison(sum(repaired.values()))
        if repaired:
            counts = " ".join(f"{name}={n}" for name, n in repaired.items())
            log.warning("another process had changed the programmed state; repaired: %s", counts)

    def _seconds_until_apply(self) -> float:
        """Returns the seconds until --min-sync-period allows the next apply."""
        return self._last_apply + self._config.min_sync_period - time.monotonic()

    def _warn_about_missing_data(self) -> None:
        """Warns once about missing data on this node. kube-proxy, too, serves without it."""
        node_known = self._store.node_known or self._config.source is not None
        if not node_known and not self._missing_node_logged:
            self._missing_node_logged = True
            log.warning(
                "there is no Node %s yet (--hostname-override); until it exists, NodePorts answer "
                "on all addresses of this node, and it has no zone",
                self._config.node_name,
            )
        mode = self._config.detect_local_mode
        by_network = mode in (LocalMode.CLUSTER_CIDR, LocalMode.NODE_CIDR)
        networks_missing = by_network and not self._builder.state.local_networks
        if networks_missing and not self._local_networks_missing:
            setting = "--cluster-cidr" if mode is LocalMode.CLUSTER_CIDR else "the Node's podCIDRs"
            log.warning(
                "detect-local-mode=%s has no network yet (%s): no ClusterIP is masqueraded, and "
                "clients count as local by their devices",
                mode,
                setting,
            )
        self._local_networks_missing = networks_missing

    def _apply(self, keys: set[ServicePortKey] | None) -> None:
        # After a failure the data plane reads all maps again, so changes wait for the retry.
        if self._apply_error and time.monotonic() < self._retry_due:
            return
        start = time.perf_counter()
        try:
            # Read once: the threads of the sources may change it during apply().
            authoritative = self._is_authoritative()
            report = self._plane.apply(self._builder.state, keys, authoritative)
            seconds = time.perf_counter() - start
            self._fully_synced = self._fully_synced or authoritative
        except KbpfError as error:
            if str(error) != self._apply_error:
                log.error("cannot write to the data plane; retrying: %s", error)
            self._apply_error = str(error)
            self._retry_due = time.monotonic() + RETRY_INTERVAL_S
            self._server.proxy_metrics.record_failure()
            return
        self._last_apply = time.monotonic()
        if keys is None:
            self._resync_due = self._last_apply + self._config.config_sync_period
        self._last_writes = report.writes
        self._last_apply_ms = (time.perf_counter() - start) * 1000
        self._apply_count += 1
        log.debug(
            "programmed service_ports=%s entries=%d ms=%.1f",
            "all" if keys is None else len(keys), sum(report.writes.values()), self._last_apply_ms,
        )  # fmt: skip
        self._recorder.record_apply(keys, seconds, any(report.writes.values()))
        if not self._first_apply_done or self._apply_error:
            self._status_due = 0.0  # report recovery at once
        self._dirty_keys, self._apply_error, self._first_apply_done = set(), "", True
        self._deferred, self._deferred_due = bool(report.deferred), report.next_apply_at
        # Fewer are refused than before, so there is room again: the others are retried at once.
        more_room = len(report.refused) < len(self._refused)
        self._retry_due = self._last_apply + (0.0 if more_room else RETRY_INTERVAL_S)
        self._record_latencies(report.deferred)
        self._report_limits(report)

    def _record_latencies(self, deferred: Set[ServiceName]) -> None:
        """Records the latency of everything programmed, except Services that the data plane
        deferred.
        """
        now = time.monotonic()
        for name in self._unprogrammed_arrivals.keys() - deferred:
            self._latencies.extend(
                now - arrival_time for arrival_time in self._unprogrammed_arrivals.pop(name)
            )

    def _report_limits(self, report: Report) -> None:
        """Reports what could not be programmed as requested: a log line, a problem line and an
        Event.
        """
        keys = report.examined
        if keys is None:
            keys = {*self._refused, *self._degraded, *report.refused, *report.degraded}
        for lines, reported, level, title, reason in (
            (report.refused, self._refused, logging.ERROR, "not programmed", "NotProgrammed"),
            (
                report.degraded,
                self._degraded,
                logging.WARNING,
                "annotations",
                "AnnotationsNotApplied",
            ),
        ):
            new_lines = []
            # The smaller set of keys: those with a line, old or new, or those examined.
            for key in sorted(
                reported.union(lines) if len(keys) > len(lines) + len(reported) else keys
            ):
                line = lines.get(key)
                self._problem_lines.replace(
                    (title, key), () if line is None else (f"{key}: {line}",)
                )
                if line is not None and key not in reported:
                    new_lines.append((key, line))
                if line is None:
                    reported.discard(key)
                else:
                    reported.add(key)
            _log_lines(level, title, [f"{key}: {line}" for key, line in new_lines])
            for key, line in new_lines[:MAX_PROBLEMS]:
                about = EventObject("Service", key.name, key.namespace)
                self._server.events.emit(about, reason, "Program", f"{key}: {line}")

    def _is_authoritative(self) -> bool:
        """Whether all objects could be read. Pods do not count: Services do not depend on them."""
        return self._store.all_usable and all(s.status().authoritative for s in self._sources)

    def _seconds_until_due(self) -> float:
        """Returns the seconds until the next task is due."""
        now = time.monotonic()
        due = [self._status_due]
        # This also does the work that is due: only then is it known when the next piece is.
        if self._first_apply_done and (tick_due := self._tick_plane(now)) is not None:
            due.append(tick_due)
        if self._pending and self._first_apply_done:
            due.append(now + max(0.0, self._seconds_until_apply()))
        if self._first_apply_done and not self._apply_error:
            if self._computation is not None or self._dirty_keys:
                due.append(now)
            if self._deferred:
                due.append(self._deferred_due)
            if (queue_due := self._queue.next_due(now)) is not None:
                due.append(queue_due)
        if self._apply_error or self._refused:
            due.append(self._retry_due)
        return max(0.0, min(due) - now)

    def _tick_plane(self, now: float) -> float | None:
        """Runs the data plane's work behind changes, such as deleting old sets (not
        Report.deferred); returns when to call again. A failure is reported but does not cause
        another apply: Services are served.
        """
        try:
            due = self._plane.tick(now)
        except KbpfError as error:
            if str(error) != self._tick_error:
                log.error("deferred work failed; retrying: %s", error)
                self._status_due = now
            self._tick_error = str(error)
            return now + RETRY_INTERVAL_S
        self._tick_error = ""
        return due

    # ---- status ----------------------------------------------------------------------------

    def _problems(self) -> tuple[list[str], int]:
        """The first problem lines, sorted, and the total number of them."""
        general_lines = [line for source in self._sources for line in source.status().problems]
        general_lines += [*self._plane.problems(), *threads.list_problems(), *self._own_problems()]
        lines = [*general_lines[:MAX_PROBLEMS], *self._problem_lines.first(MAX_PROBLEMS)]
        return sorted(set(map(escape_unprintable, lines))), len(self._problem_lines) + len(
            general_lines
        )

    def _own_problems(self) -> Iterator[str]:
        yield from self._server.problems()
        if self._node_port_problem:
            yield self._node_port_problem
        if self.config_error is not None and (error := self.config_error()):
            yield f"the configuration file was rejected, and the next start would fail: {error}"

    def status(self) -> AgentStatus:
        """The agent's status. Call from its thread."""
        problems, problem_count = self._problems()
        now = time.monotonic()
        return AgentStatus(
            version=__version__,
            pid=os.getpid(),
            mode=self._plane.name,
            node=self._config.node_name,
            started=self._start_time,
            heartbeat=time.clock_gettime(time.CLOCK_BOOTTIME),
            synced=self._first_apply_done and self._plane_ready,
            services=len(self._store.service_names()),
            service_ports=len(self._builder.state.services),
            applied=self._apply_count,
            last_apply_ms=round(self._last_apply_ms, 3),
            event_to_map_p50_ms=self._latency(0.5),
            event_to_map_p99_ms=self._latency(0.99),
            sources=tuple(
                SourceView(
                    source_status.name,
                    str(source_status.state),
                    source_status.synced,
                    source_status.resource_version,
                    source_status.error,
                    source_status.failures,
                    round(now - source_status.last_contact, 1)
                    if source_status.last_contact
                    else 0.0,
                    source_status.drift,
                )
                for source_status in (source.status() for source in self._sources)
            ),
            problems=tuple(problems[:MAX_PROBLEMS]),
            problem_count=problem_count,
            refused=len(self._refused),
            refused_namespaces=self._refused_namespaces(),
            refused_system=self._refused_system(),
            error=self._apply_error or self._tick_error,
            packets=self._plane.packet_status(),
            without_endpoints=self._recorder.without_endpoints,
            choice=self._plane.mode_choice(),
            faults=self._plane.faults(),
            threads=tuple(
                ThreadView(
                    thread.name,
                    thread.alive,
                    round(thread.idle, 1),
                    thread.restarts,
                    thread.problem,
                )
                for thread in threads.list_threads()
            ),
            disabled_features=self._disabled_features(),
            config_error=self.config_error() if self.config_error is not None else None,
        )

    def _disabled_features(self) -> tuple[str, ...]:
        if self._config.source is not None or self._config.socket_lb_label:
            return ()
        return ("Pods are not watched: their label kbpf.io/socket-lb is ignored",)

    def _latency(self, quantile: float) -> float:
        """In milliseconds; 0.0 before the first event."""
        ordered = sorted(self._latencies)
        if not ordered:
            return 0.0
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] * 1000, 3)

    def _report_problems(self, events: Iterable[Event]) -> None:
        """Logs a warning for each object or endpoint that is newly left out, or that other
        programs would read differently.
        """
        new_lines: list[str] = []
        for key in {event.key for event in events if not isinstance(event, Synced)}:
            lines = [f"{key}: {line}" for line in self._store.problems_of(key)]
            new_lines += self._problem_lines.replace(key, lines)
        _log_lines(
            logging.WARNING,
            "left out",
            sorted(line for line in new_lines if READ_AS_TEXT not in line),
        )
        _log_lines(
            logging.WARNING, "unusual", sorted(line for line in new_lines if READ_AS_TEXT in line)
        )

    def _refused_namespaces(self) -> dict[str, int]:
        """The number of Service ports that could not be programmed, for the namespaces with the
        most.
        """
        counts = Counter(key.namespace for key in self._refused)
        return dict(counts.most_common(MAX_NAMESPACES))

    def _refused_system(self) -> tuple[str, ...]:
        names = {key.service for key in self._refused}
        system_names = sorted(str(name) for name in names if is_system_service(name, self._config))
        return tuple(system_names[:MAX_PROBLEMS])

    def _check_node_ports(self) -> None:
        """Warns when this node stops answering on NodePorts."""
        before = self._node_port_problem
        self._node_port_problem = node_port_problem(self._node_addresses, self._config)
        if self._node_port_problem and self._node_port_problem != before:
            log.warning("%s", self._node_port_problem)

    def _write_status(self) -> None:
        self._check_node_ports()
        status = self.status()
        try:
            self._plane.write_status(encode(status))
            self._status_error = ""
        except PinsRemovedError:
            raise
        except KbpfError as error:
            if str(error) != self._status_error:
                log.warning("cannot write the status: %s", error)
            self._status_error = str(error)
        # last, so that a client that sees /readyz succeed can read everything else
        self._server.set_status(status)


def _log_events(events: Iterable[Event]) -> None:
    if log.isEnabledFor(logging.DEBUG):
        for event in events:
            about = event.kind if isinstance(event, Synced) else event.key
            log.debug("event %s %s", type(event).__name__.lower(), about)


def _log_lines(level: int, title: str, lines: Sequence[str]) -> None:
    """Logs a line for each, but at most MAX_PROBLEMS: all Services may hit a limit together."""
    for line in lines[:MAX_PROBLEMS]:
        log.log(level, "%s: %s", title, line)
    if len(lines) > MAX_PROBLEMS:
        more = len(lines) - MAX_PROBLEMS
        log.log(level, "%s: and %d more; see `kbpf inspect status` for their number", title, more)
