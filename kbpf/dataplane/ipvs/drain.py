"""What an agent of mode ipvs has left, once another data plane serves.

New connections do not get here any more; those that IPVS knows go on by it. So a virtual address
goes with all its virtual services as soon as none of them has connections, and what is left of the
table with the last of them.
"""

import contextlib
import errno
import os
from collections.abc import Container, Iterable
from typing import Final

from kbpf.dataplane.ipvs import cleanup, ruleset
from kbpf.dataplane.ipvs.plan import Element, SetName, Virtual, noted
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import Command, Ipvs, Service
from kbpf.kernel.netfilter import forward_rules
from kbpf.model.address import Addr
from kbpf.model.config import Config

LOOK_SECONDS: Final = 2.0
"""So often IPVS is asked for its connections."""


class IpvsRemains:
    """base.Remains of the agent with this device, table and state folder."""

    name = "mode ipvs"

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder = config.state_dir / config.ipvs_device
        self._style = cleanup.style_of(config)
        self._lock = -1
        self._due: float | None = None
        self._live = 0

    def take(self) -> bool:
        """See base.Remains."""
        if not cleanup.there(self._config):
            return False
        self._lock = cleanup.lock(self._folder)
        return True

    def retire(self, now: float) -> float | None:
        """See base.Remains. At first nothing: a packet may be on its way to IPVS still."""
        waits = self._due is None or now < self._due
        if self._due is None or not waits:
            self._due = now + LOOK_SECONDS
        if waits:
            return self._due
        elements = cleanup.elements(self._style.table) or frozenset()
        ours = [v for element in elements if (v := noted(element)) is not None]
        if ours:
            with contextlib.closing(Ipvs()) as face:
                self._live = self._end_idle(face, ours, elements)
        if ours and self._live:
            return self._due
        cleanup.remove(self._config, forward=False)
        return None

    def _end_idle(self, face: Ipvs, ours: Iterable[Virtual], elements: frozenset[Element]) -> int:
        """How many connections go on."""
        loads = {virtual: face.connections(Service(*virtual)) for virtual in ours}
        busy = {virtual.address for virtual, count in loads.items() if count}
        idle = [v for v in loads if v.address not in busy and not v.mark]
        face.change([ipvs.Change(Command.DEL_SERVICE, Service(*v)) for v in sorted(idle)],
                    (errno.ESRCH,))  # fmt: skip
        gone = {virtual.address for virtual in idle}
        self._drop_addresses(gone)
        if rest := [e for e in elements if _is_about(e, gone)]:
            forward_rules.transaction(*ruleset.removal(self._style, rest))
        return sum(loads.values())

    def _drop_addresses(self, gone: Iterable[Addr]) -> None:
        with contextlib.suppress(OSError):  # the device is not there any more
            dummy.drop(dummy.index(self._config.ipvs_device), gone)

    def problems(self) -> tuple[str, ...]:
        """See base.Remains."""
        return (f"{self._live} connections go on by IPVS",) if self._live else ()

    def close(self) -> None:
        """See base.Remains."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _is_about(element: Element, addresses: Container[object]) -> bool:
    """Whether this speaks of frontends at one of these addresses."""
    name, parts = element
    if name in (SetName.HAIRPINS, SetName.LOCAL_NETWORKS, SetName.NODE_IPS, SetName.OWN_MARKS):
        return False
    return (parts[1] if name is SetName.SOURCES else parts[0]) in addresses
