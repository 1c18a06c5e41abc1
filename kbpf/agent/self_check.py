# SPDX-License-Identifier: Apache-2.0
"""What the agent verifies of itself on a slow clock, in the thread `self-check`:

- every FAILURES_INTERVAL_S, which backends keep failing, for an Event on their Service;
- every --verify-period, whether connections to Services are translated. After a failure it tries
  again every RETRY_INTERVAL_S; after the second one the agent's thread compares all maps at once.

Comparing the maps with the desired state is the work of the agent's own thread
(--config-sync-period), and the hooks are verified with the attachments.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Final

from kbpf.agent.problem_book import FailingBackendReporter
from kbpf.dataplane.base import SharedAccess
from kbpf.errors import LastError
from kbpf.kernel.system import threads
from kbpf.model.config import Config
from kbpf.model.status import VerifiedPart

log = logging.getLogger("kbpf.agent")

FAILURES_INTERVAL_S: Final = 30.0
RETRY_INTERVAL_S: Final = 10.0
STALL_TIMEOUT_S: Final = 300.0
"""The thread counts as stuck after this time without progress."""
MAX_LINES: Final = 4


class SelfCheck:
    """Call start() once the data plane is open, and stop() at the end. The properties may be read
    by any thread.
    """

    def __init__(
        self,
        config: Config,
        find_shared: Callable[[], SharedAccess],
        reporter: FailingBackendReporter,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_failure` is called when connections have just turned out not to be translated."""
        self._period, self._find_shared = config.verify_period, find_shared
        self._reporter, self._on_failure = reporter, on_failure
        self._stop = threading.Event()
        self._thread = threads.SupervisedThread("self-check", self._run, STALL_TIMEOUT_S)
        self._error = LastError()
        self._failed_before = self._all_failed_before = False
        self.connections: VerifiedPart | None = None
        """The last probe of connections; None before the first."""
        self.failures: tuple[str, ...] = ()
        """Why connections are not translated: what two probes in a row agree on."""
        self.is_broken = False
        """Whether in two probes in a row no connection was translated. What a Service of a tenant
        can cause must not make the node unready."""
        self.failing_backends: int | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.stop()

    def _run(self) -> None:
        probe_due = time.monotonic() + RETRY_INTERVAL_S  # the first apply is under way
        failures_due = time.monotonic() + FAILURES_INTERVAL_S
        while True:
            due = min(probe_due, failures_due) if self._period else failures_due
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
            threads.heartbeat()
            now = time.monotonic()
            if now >= failures_due:
                failures_due = now + FAILURES_INTERVAL_S
                self.find_failing()
            if self._period and now >= probe_due:
                probe_due = now + (RETRY_INTERVAL_S if self.probe() else self._period)

    def find_failing(self) -> None:
        """Reports the backends that keep failing."""
        failing = self._find_shared().find_failing_backends()
        self.failing_backends = None if failing is None else len(failing)
        self._reporter.report(failing or (), time.monotonic())

    def probe(self) -> bool:
        """Connects to Services; returns whether that failed."""
        result = self._find_shared().probe_connections()
        if result is None:
            return False
        lines: Collection[str] = result.failures[:MAX_LINES]
        self.connections = VerifiedPart("connections", len(result.failures), time.time())
        self.failures = tuple(lines) if lines and self._failed_before else ()
        self._failed_before = bool(lines)
        all_failed = len(result.failures) >= result.tried
        self.is_broken = all_failed and self._all_failed_before
        self._all_failed_before = all_failed
        had_failures = bool(self._error.text)
        if self._error.replace("; ".join(self.failures) or None):
            log.error("connections to Services are not translated: %s", self._error.text)
            if not had_failures:
                self._on_failure()
        return bool(lines)
