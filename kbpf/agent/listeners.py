# SPDX-License-Identifier: Apache-2.0
"""Ports on which the node's own processes listen: Services cannot take them at the node's
addresses, nor ClusterIPs that a device of the node has.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Set
from typing import Final

from kbpf.errors import KernelError, LastError
from kbpf.kernel.net import sock_diag
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Protocol
from kbpf.policy.admission import is_listening

log = logging.getLogger("kbpf.agent")

LISTENER_POLL_INTERVAL_S: Final = 30.0
DEVICE_POLL_INTERVAL_S: Final = 0.25
"""A node-local DNS cache that is killed leaves its address on its device; its Service is served
again after at most this long. One poll takes a fifth of a millisecond: it reads the sockets at the
Services' ports only, since some nodes have tens of thousands of UDP sockets."""
MAX_SELECTED_PORTS: Final = 16
"""For more ports, all sockets are read at once."""
RELEASE_GRACE_S: Final = 600.0
"""A port stays reserved for this long after its listener is gone, so that a restart of sshd does
not hand its port to a Service."""


class Listeners:
    """The agent's thread reads the listeners first; then refresh() is for the thread `host`, and
    all else for the agent's. `read`: see sock_diag.list_listeners(). `device_ports`: ClusterIPs
    with ports that a device of the node has, and where a process listens now.
    """

    def __init__(self, read: Callable[..., frozenset[FrontendAddress]] = sock_diag.list_listeners) -> None:
        self._read = read
        self._error, self._was_read = LastError(), False
        self._due = float("-inf")
        self._last_seen: dict[FrontendAddress, float] = {}
        self.ports: frozenset[FrontendAddress] = frozenset()
        self.device_due = float("-inf")
        self.device_ports: frozenset[FrontendAddress] = frozenset()

    def read_first(self, now: float) -> None:
        """Reads the listeners unless this was done. Raises KernelError."""
        if not self._was_read:
            self._refresh(now)

    def refresh(self, now: float) -> bool:
        """Reads the listeners again if that is due; returns whether `ports` has changed. Does
        nothing before read_first(). `now` is time.monotonic().
        """
        return self._was_read and now >= self._due and self._refresh(now)

    def _refresh(self, now: float) -> bool:
        self._due = now + LISTENER_POLL_INTERVAL_S
        if (listeners := self._try_read()) is None:
            return False
        self._last_seen |= dict.fromkeys(listeners, now)
        self._last_seen = {
            address: last_seen for address, last_seen in self._last_seen.items() if now - last_seen < RELEASE_GRACE_S
        }
        has_changed = self.ports != self._last_seen.keys()
        if has_changed:
            self.ports = frozenset(self._last_seen)
        return has_changed

    def refresh_device_ports(self, now: float, device_frontends: Collection[frozenset[FrontendAddress]]) -> None:
        """Reads which of the `device_frontends` have a listener, if that is due: at once after
        there was none.
        """
        if not device_frontends:
            self.device_due, self.device_ports = float("-inf"), frozenset()
        elif now >= self.device_due:
            self.device_due = now + DEVICE_POLL_INTERVAL_S
            ports = {(at.protocol, at.port) for frontends in device_frontends for at in frontends}
            selected = (ports,) if len(ports) <= MAX_SELECTED_PORTS else ()
            if (listeners := self._try_read(*selected)) is not None:
                self.device_ports = select_listening(device_frontends, listeners)

    def _try_read(self, *ports: Collection[tuple[Protocol, int]]) -> frozenset[FrontendAddress] | None:
        """Where processes listen; None after an error, for example without free descriptors: what
        was read last then stays in force. Raises KernelError if nothing was.
        """
        try:
            listeners = self._read(*ports)
        except KernelError as error:
            if not self._was_read:
                raise
            if self._error.replace(error):
                log.warning("cannot read where processes listen, retrying: %s", error)
            return None
        self._error.replace(None)
        self._was_read = True
        return listeners


def select_listening(
    device_frontends: Iterable[frozenset[FrontendAddress]], listeners: Set[FrontendAddress]
) -> frozenset[FrontendAddress]:
    """Those of the frontends that have one of the `listeners`."""
    return frozenset(at for frontends in device_frontends for at in frontends if is_listening(at, listeners))
