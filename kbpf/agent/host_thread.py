# SPDX-License-Identifier: Apache-2.0
"""What the agent asks the node, and repairs there, in the thread `host`.

Reading thousands of firewall rules or connections takes seconds, and a change of a Service must not
wait for that. So the agent's thread, which writes the data plane, asks the node only what a change
depends on, and this thread does the rest:

- firewall rules, other settings of the node, and the remains of another data plane
  (DataPlane.maintain_host());
- the ports on which processes of the node listen (listeners.py);
- the limits of conntrack (conntrack_sysctls.py).
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kbpf.agent.conntrack_sysctls import ConntrackSysctls
from kbpf.agent.listeners import Listeners
from kbpf.dataplane.base import DataPlane
from kbpf.errors import KbpfError, LastError
from kbpf.kernel.system import threads
from kbpf.model.config import Config

log = logging.getLogger("kbpf.agent")

HOST_INTERVAL_S: Final = 1.0
"""Between two rounds. Each task knows when it is due."""
STALL_TIMEOUT_S: Final = 600.0
"""The thread counts as stuck after this time without progress. iptables-legacy-save alone may wait
for half of it.
"""


class HostThread:
    """Call start() once the data plane is open, and stop() before it is closed."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        listeners: Listeners,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when other ports are listened on than before."""
        self._plane, self._listeners, self._on_change = plane, listeners, on_change
        self._conntrack_sysctls = ConntrackSysctls(config.conntrack)
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread: threads.SupervisedThread | None = None
        self.error = LastError()
        """Why a setting of the node could not be read or repaired; replaced by the next round."""

    def start(self) -> None:
        self._thread = threads.start("host", self._run, STALL_TIMEOUT_S)

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.stop()

    def wake(self) -> None:
        """Lets the next round begin at once. Any thread may call."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            threads.heartbeat()
            self.run_once(time.monotonic())
            self._wake.wait(HOST_INTERVAL_S)
            self._wake.clear()

    def run_once(self, now: float) -> None:
        """Does what is due at `now` (time.monotonic)."""
        self._conntrack_sysctls.apply(now)
        if self._listeners.refresh(now):
            self._on_change()
        try:
            self._plane.maintain_host(now)
        except KbpfError as error:
            if self.error.replace(error):
                log.error("cannot maintain the settings of the node; retrying: %s", error)
        else:
            self.error.replace(None)
