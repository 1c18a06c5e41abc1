# SPDX-License-Identifier: Apache-2.0
"""The agent's event loop: the only thread that writes to the data plane.

A round reads the inbox, programs what changed (reconciler.py), runs the data plane's deferred work
and reports (reporter.py).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from kbpf import __version__
from kbpf.agent.applier import RETRY_INTERVAL_S
from kbpf.agent.host_thread import HostThread
from kbpf.agent.inbox import Inbox, Item, Wake
from kbpf.agent.problem_book import FailingBackendReporter, ProblemBook
from kbpf.agent.reconciler import Reconciler
from kbpf.agent.recorder import Recorder
from kbpf.agent.reporter import Reporter
from kbpf.agent.self_check import SelfCheck
from kbpf.dataplane.base import DataPlane
from kbpf.dataplane.node import read_node_addresses
from kbpf.errors import KbpfError, KernelError, LastError
from kbpf.kernel.net import addresses
from kbpf.kernel.system.threads import SupervisedThread
from kbpf.model.address import Addr
from kbpf.model.config import Config, Serving
from kbpf.model.events import Event, Synced
from kbpf.model.status import AgentStatus
from kbpf.serve.server import AgentServer
from kbpf.source.base import Source

log = logging.getLogger("kbpf.agent")

HEARTBEAT_INTERVAL_S: Final = 2.0
READY_POLL_INTERVAL_S: Final = 0.1
"""How often the data plane is polled for the end of the first apply."""

MAX_API_SERVERS: Final = 32
"""The most recent addresses of API servers that the agent has connected to; Services cannot take
them."""
ADDRESS_WATCH_TIMEOUT_S: Final = 30.0
"""Without progress for this long the thread `addresses` counts as stuck."""

MIN_STATUS_INTERVAL_S: Final = 0.5
"""While changes come in, the status is written at most this often."""


class Agent:
    """Runs in the calling thread until stop(). Owns its sources and its data plane."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        make_sources: Callable[[Callable[[Item], None]], Sequence[Source]],
        server: AgentServer | None = None,
    ) -> None:
        self._config, self._plane = config, plane
        self._inbox = Inbox()
        self._server = server or AgentServer(replace(config, serving=Serving(healthz="", metrics="")))
        self._recorder = Recorder(config, self._server)
        self._sources = make_sources(self._enqueue)
        book = ProblemBook(self._server.events)
        self.reconciler = Reconciler(config, plane, self._sources, self._recorder, book)
        self._self_check = SelfCheck(
            config, lambda: plane.shared, FailingBackendReporter(self._server.events), self._compare_soon
        )
        self._host_thread = HostThread(
            config, plane, self.reconciler.listeners, lambda: self._inbox.put(Wake("listeners"))
        )
        self.reporter = Reporter(
            config,
            plane,
            self._server,
            self._sources,
            self.reconciler,
            self._recorder,
            book,
            self._self_check,
            self._host_thread,
        )
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards reconciler.api_servers
        self._status_due = 0.0
        self._addresses_changed = False  # since they were last read
        self._address_error = LastError()

    def stop(self) -> None:
        """Ends run() soon. May be called from a signal handler or another thread."""
        self._stop.set()
        self._inbox.put(Wake("stop"))

    def on_api_connect(self, cookie: int, address: Addr, port: int) -> None:
        """Called before a connection to an API server is opened, in any thread. From now on only
        ClusterIPs are translated for the socket with this cookie, and no Service can take the
        address and port.
        """
        self._plane.shared.claim_socket(cookie)
        with self._lock:
            api_servers = self.reconciler.api_servers
            if (address, port) in api_servers:
                return
            self.reconciler.api_servers = (*api_servers, (address, port))[-MAX_API_SERVERS:]
        self._inbox.put(Wake("server"))

    def _compare_soon(self) -> None:
        """Called by the thread `self-check` when connections are not translated."""
        self.reconciler.applier.compare_soon()
        self._inbox.put(Wake("self-check"))

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
        if not isinstance(item, Wake):
            self._recorder.received(item)
        self._inbox.put(item)

    def _run(self) -> None:
        address_watcher = SupervisedThread(
            "addresses",
            partial(addresses.watch_addresses, lambda: self._inbox.put(Wake("addresses")), self._stop),
            ADDRESS_WATCH_TIMEOUT_S,
        )
        try:
            self.reconciler.node_addresses = read_node_addresses()
            address_watcher.start()
            self._self_check.start()
            self._host_thread.start()
            for source in self._sources:
                source.start()
            choice = self._plane.status().choice
            self._log_netfilter_bypass(choice.mode)
            log.info("started node=%s mode=%s", self._config.node_name, choice.mode)
            self._server.report_started(__version__, choice)
            self._run_event_loop()
        finally:
            self._stop.set()
            for source in self._sources:
                source.stop()
            address_watcher.stop()
            self._self_check.stop()
            self._host_thread.stop()
            self._plane.close()
        log.info("stopped; the data plane continues to serve what is programmed")

    def _log_netfilter_bypass(self, mode: str) -> None:
        if mode == "ipvs":
            return  # which has no packet path
        if self._config.packet_path and self._config.forwarding == "direct":
            log.info(
                "forwarding=direct: balanced packets to pods of this node bypass the host's "
                "nftables and iptables, conntrack, and network policies built on them"
            )

    def _run_event_loop(self) -> None:
        wait = 0.0
        while not self._stop.is_set():
            self.step(self._inbox.get_batch(wait))
            wait = self._seconds_until_due()

    def step(self, items: Sequence[Item]) -> None:
        """Runs one round: applies the events, programs what changed, and runs what was deferred."""
        events = [item for item in items if not isinstance(item, Wake)]
        _log_events(events)
        reconciler, before = self.reconciler, self.reconciler.state
        reconciler.take(events)
        if any(isinstance(item, Wake) and item.reason == "addresses" for item in items):
            self._addresses_changed = True
        if self._addresses_changed:
            self._read_addresses()
        reconciler.reconcile()
        reconciler.report_settled()
        self.reporter.report_objects(events)
        state = reconciler.state
        if state.last_apply_succeeded and not before.last_apply_succeeded:
            self._status_due = 0.0  # the first apply, or recovery
            self._host_thread.wake()  # before the first apply it leaves the node alone
        if state.has_applied and not self.reporter.is_plane_ready and self._plane.status().ready:
            self.reporter.is_plane_ready, self._status_due = True, 0.0
        self._report_if_due(bool(items))

    def _read_addresses(self) -> None:
        """Reads the node's addresses. After an error the last ones stay in force until the next
        round.
        """
        try:
            self.reconciler.set_node_addresses(read_node_addresses())
        except KernelError as error:
            if self._address_error.replace(error):
                log.warning("cannot read the addresses of the node, retrying: %s", error)
            return
        self._addresses_changed = False
        self._address_error.replace(None)

    def _report_if_due(self, has_items: bool) -> None:
        now = time.monotonic()
        if has_items:
            self._status_due = min(self._status_due, now + MIN_STATUS_INTERVAL_S)
        if now >= self._status_due:
            is_starting = self.reconciler.state.has_applied and not self.reporter.is_plane_ready
            self._status_due = now + (READY_POLL_INTERVAL_S if is_starting else HEARTBEAT_INTERVAL_S)
            self.reporter.write_status()

    def status(self) -> AgentStatus:
        """The agent's status. Call from its thread."""
        return self.reporter.status()

    def _seconds_until_due(self) -> float:
        """Returns the seconds until the next task is due."""
        now = time.monotonic()
        # This also does the work that is due: only then is it known when the next piece is.
        tick_due = self._tick_plane(now) if self.reconciler.state.has_applied else None
        due = [self._status_due, *self.reconciler.due_times(now)]
        if tick_due is not None:
            due.append(tick_due)
        return max(0.0, min(due) - now)

    def _tick_plane(self, now: float) -> float | None:
        """Runs the data plane's work behind changes, such as deleting old sets (not
        Report.deferred); returns when to call again. A failure is reported but does not cause
        another apply: Services are served.
        """
        try:
            due, udp_cuts = self._plane.tick(now)
        except KbpfError as error:
            if self.reporter.tick_error.replace(error):
                log.error("deferred work failed; retrying: %s", error)
                self._status_due = now
            return now + RETRY_INTERVAL_S
        for cut in udp_cuts:
            self._server.proxy_metrics.record_udp_cut(cut)
        self.reporter.tick_error.replace(None)
        return due


def _log_events(events: Iterable[Event]) -> None:
    if log.isEnabledFor(logging.DEBUG):
        for event in events:
            about = event.kind if isinstance(event, Synced) else event.key
            log.debug("event %s %s", type(event).__name__.lower(), about)
