"""Where processes of the node listen: ports that Services may not take at the node's addresses."""

from collections.abc import Callable
from typing import Final

from kbpf.kernel.net import sock_diag
from kbpf.model.desired import FrontendAddress

LOOK_SECONDS: Final = 30.0
GRACE_SECONDS: Final = 600.0
"""A port stays reserved for so long after nobody listens there any more: a restart of sshd must not
hand it over.
"""


class Listeners:
    """One thread only: the writer's."""

    def __init__(
        self, read: Callable[[], frozenset[FrontendAddress]] = sock_diag.listening
    ) -> None:
        self._read = read
        self._due = float("-inf")
        self._seen: dict[FrontendAddress, float] = {}
        self.ports: frozenset[FrontendAddress] = frozenset()

    def look(self, now: float) -> None:
        """Reads them again where that is due. `now` is time.monotonic()."""
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        self._seen |= dict.fromkeys(self._read(), now)
        self._seen = {at: seen for at, seen in self._seen.items() if now - seen < GRACE_SECONDS}
        if self.ports != self._seen.keys():
            self.ports = frozenset(self._seen)
