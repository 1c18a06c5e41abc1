# SPDX-License-Identifier: Apache-2.0
"""Ports on which the node's own processes listen; Services cannot take them at the node's
addresses.
"""

from collections.abc import Callable
from typing import Final

from kbpf.kernel.net import sock_diag
from kbpf.model.desired import FrontendAddress

LISTENER_POLL_INTERVAL_S: Final = 30.0
RELEASE_GRACE_S: Final = 600.0
"""A port stays reserved for this long after its listener is gone, so that a restart of sshd does
not hand its port to a Service."""


class Listeners:
    """Used by the agent's thread only."""

    def __init__(
        self, read: Callable[[], frozenset[FrontendAddress]] = sock_diag.list_listeners
    ) -> None:
        self._read = read
        self._due = float("-inf")
        self._last_seen: dict[FrontendAddress, float] = {}
        self.ports: frozenset[FrontendAddress] = frozenset()

    def refresh(self, now: float) -> None:
        """Reads the listeners again if that is due. `now` is time.monotonic()."""
        if now < self._due:
            return
        self._due = now + LISTENER_POLL_INTERVAL_S
        self._last_seen |= dict.fromkeys(self._read(), now)
        self._last_seen = {
            address: last_seen
            for address, last_seen in self._last_seen.items()
            if now - last_seen < RELEASE_GRACE_S
        }
        if self.ports != self._last_seen.keys():
            self.ports = frozenset(self._last_seen)
