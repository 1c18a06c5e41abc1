"""What an agent of mode bpf has left, once another data plane serves.

At first its maps forget every frontend: the programs lead nobody new any more, and what they do not
know passes. Packets of TCP and SCTP connections that they have begun are translated as before, so
the programs stay until the last of these has ended; then everything goes at once.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.flow_entries import (
    BOTH_ENDS,
    PROTOCOL,
    STATE,
    is_held,
    is_question,
    over,
)
from kbpf.dataplane.bpf.maps.layout import MAPS, NODE, U32, NodeFlag, TcpState
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import packet_path
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts
from kbpf.model.config import Config
from kbpf.model.objects import Protocol

LOOK_SECONDS: Final = 5.0
"""So often the connections are counted."""


class BpfRemains:
    """base.Remains of the agent with this pin folder."""

    name = "mode bpf"

    def __init__(self, config: Config) -> None:
        self._pins = Pins(config.pin_dir)
        self._lock = -1
        self._due = 0.0
        self._leads = True  # new connections, as far as we know
        self._live = 0

    def take(self) -> bool:
        """See base.Remains."""
        try:
            if not (self._pins.links.is_dir() or self._pins.others("maps", self._pins.root)):
                return False
        except PermissionError as error:
            raise KernelError(
                "cannot look into the folder of pins", str(self._pins.root), "run as root",
                error.errno or 0,
            ) from error  # fmt: skip
        self._lock = pinning.lock(self._pins)
        return True

    def retire(self, now: float) -> float | None:
        """See base.Remains."""
        if self._leads:
            self._lead_nobody()
            self._leads = False
        if now < self._due:
            return self._due
        self._due = now + LOOK_SECONDS
        self._live = self._count()
        if self._live:
            return self._due
        self._remove()
        return None

    def _lead_nobody(self) -> None:
        self._yield()
        pinning.forget_frontends(self._pins)
        with self._map("backends") as found:  # a UDP flow whose backend is gone chooses anew
            if found is not None and (keys := b"".join(key for key, _ in found.items())):
                found.delete_batch(keys)

    def _yield(self) -> None:
        """Programs that are there when mode bpf comes back do not lead before all is in place."""
        with self._map("node") as found:
            told = found.lookup(bytes(U32.size)) if found is not None else None
            if found is not None and told and any(told):
                own4, own6, flags, *more = NODE.unpack(told)
                flags = (NodeFlag(flags) | NodeFlag.YIELDS) & ~NodeFlag.FOLLOWS
                found.update(bytes(U32.size), NODE.pack(own4, own6, flags, *more))

    def _count(self) -> int:
        """Connections of the packet path that go on. Sockets that were connected by a hook talk to
        their backends without us. What has ended is forgotten: a client may use the port again.
        """
        at = time.monotonic_ns()
        with self._map("flows") as flows:
            found = dict(flows.items()) if flows is not None else {}
            alive = {raw[BOTH_ENDS] for raw in found.values() if is_question(raw)
                     and not is_held(raw) and _lives(raw, at)}  # fmt: skip
            ended = [key for key, raw in found.items() if raw[BOTH_ENDS] not in alive]
            if flows is not None and ended:
                flows.delete_batch(b"".join(ended))
        return len(alive)

    @contextmanager
    def _map(self, name: str) -> Iterator[Map | None]:
        """None where another version has left another layout: that goes at once."""
        path = self._pins.maps / name
        if not path.exists():
            yield None
            return
        found = pinning.open_map(path, MAPS[name])
        try:
            yield found
        finally:
            found.close()

    def _remove(self) -> None:
        """All of it, but for the rule in FORWARD, which is ours in every mode."""
        packet_path.remove(self._pins)
        host.remove(self._pins, rules=False)
        try:
            pinning.remove(self._pins)
        except OSError as error:
            if not self._pins.root.is_mount():
                raise KernelError(
                    "cannot remove all pins", str(self._pins.root), "run as root", error.errno or 0
                ) from error
        if mounts.is_own_bpffs(self._pins.root):
            mounts.unmount(self._pins.root)

    def problems(self) -> tuple[str, ...]:
        """See base.Remains."""
        if not self._live:
            return ()
        return (f"{self._live} connections that mode bpf began go on by its packet path",)

    def close(self) -> None:
        """See base.Remains."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lives(nat: bytes, at: int) -> bool:
    """Whether this struct nat is of a connection that goes on, at this time (ns, monotonic)."""
    if nat[PROTOCOL] == Protocol.UDP or nat[STATE] == TcpState.CLOSED:
        return False
    return at <= over(nat)
