# SPDX-License-Identifier: Apache-2.0
"""A kube-proxy on the same node as operators see it: whether it runs, and whether it left rules.

kube_proxy_drain.py decides what the agent does about it, kube_proxy_cleanup.py what may be removed.
"""

import time
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.takeover import detect
from kbpf.takeover import kube_proxy_cleanup as cleanup
from kbpf.takeover.detect import Detection, Responder

CLEANUP_HINT: Final = "once this node serves, run `kbpf cleanup --kube-proxy`"
STOP_HINT: Final = "if it is not meant to run beside kbpf, stop it (docs/migration.md); where both serve, kbpf is first"
CHECK_INTERVAL_S: Final = 60.0
MAX_CPU_SHARE: Final = 0.005
"""Of the time of one CPU: reading the rules of a large cluster takes a second."""


class KubeProxyState(NamedTuple):
    """`running`: where it was seen, "" if it was not. `unreadable`: why the rules cannot be read,
    "" if they can.
    """

    running: str = ""
    has_rules: bool = False
    unreadable: str = ""


def find_kube_proxy() -> KubeProxyState:
    """Looks for its process, its ports and its rules. May take seconds if a port does not answer,
    and reads all rules.
    """
    running = _where_it_runs(detect.detect())
    try:
        return KubeProxyState(running, cleanup.has_rules())
    except KernelError as error:
        return KubeProxyState(running, unreadable=str(error))


def _where_it_runs(detection: Detection) -> str:
    if detection.pids:
        return f"pid {detection.pids[0]}"
    return next(
        (
            f"answers on {listener}"
            for listener, responder in detection.responders.items()
            if responder is Responder.KUBE_PROXY
        ),
        "",
    )


class KubeProxyWatch:
    """The state for metrics. refresh() may wait, so it has a thread that may; any thread may read
    `state`.
    """

    def __init__(self) -> None:
        self.state = KubeProxyState()
        self._due = float("-inf")

    def refresh(self) -> None:
        """Looks again if CHECK_INTERVAL_S have passed, and more if looking takes long."""
        if time.monotonic() < self._due:
            return
        start = time.thread_time()
        self.state = find_kube_proxy()
        cost = time.thread_time() - start
        self._due = time.monotonic() + max(CHECK_INTERVAL_S, cost / MAX_CPU_SHARE)


def describe(state: KubeProxyState) -> tuple[str, str]:
    """A line about it and what to do; both "" if there is none."""
    if state.running:
        return f"a kube-proxy runs on this node ({state.running})", STOP_HINT
    if state.has_rules:
        return "a kube-proxy has left rules on this node, which no process updates", CLEANUP_HINT
    return "", ""
