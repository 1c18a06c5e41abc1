"""Where processes of the node listen: ports that Services may not take at the node's addresses."""

from collections.abc import Callable
from typing import Final

from kbpf.kernel.net import sock_diag
from kbpf.model.desired import FrontendAddress

LISTENER_POLL_INTERVAL_S: Final = 30.0
RELEASE_GRACE_S: Final = 600.0
"""A port stays reserved for so long after nobody listens there any more: a restart of sshd must not
hand it over.
"""


class Listeners:
    """One thread only: the writer's."""

    def __init__(
        self, read: Callable[[], frozenset[FrontendAddress]] = sock_diag.list_listeners
    ) -> None:
        self._read = read
        self._due = float("-inf")
        self._last_seen: dict[FrontendAddress, float] = {}
        self.ports: frozenset[FrontendAddress] = frozenset()

    def refresh(self, now: float) -> None:
        """Reads them again where that is due. `now` is time.monotonic()."""
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
