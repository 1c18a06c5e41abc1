# SPDX-License-Identifier: Apache-2.0
"""Drains the BPF data plane of an earlier agent, after another data plane has taken over.

First all frontends are deleted from its maps: its programs then let new connections pass. They
continue to translate packets of established TCP and SCTP connections, so they stay attached until
the last of these has ended. Then everything is removed at once.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.flow_entries import (
    ENDPOINTS,
    PROTOCOL,
    STATE,
    expires_at,
    is_original,
    is_port_reservation,
)
from kbpf.dataplane.bpf.maps.layout import NODE, U32, NodeFlag, TcpState
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import packet_path
from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts
from kbpf.model.config import Config
from kbpf.model.objects import Protocol
from kbpf.takeover.previous import PreviousDataPlane


class PreviousBpfPlane(PreviousDataPlane):
    """The data plane that an earlier agent has left in this pin folder."""

    name = "mode bpf"
    connections = "connections of mode bpf still use its packet path"
    poll_interval = 5.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._pins = Pins(config.pin_dir)

    def claim(self) -> bool:
        with kernel_errors("cannot read the pin folder", str(self._pins.root), "run as root"):
            has_pins = self._pins.links.is_dir() or self._pins.other_folders("maps", self._pins.root)
            # Without pins: an agent that could not load its programs.
            if not (has_pins or host.may_need_cleanup(self._pins)):
                return False
        self._lock = pinning.lock_pins(self._pins)
        return True

    def _stop_new_connections(self, now: float) -> float:
        self._make_passive()
        pinning.delete_frontends(self._pins)
        # A UDP flow whose backend is missing is left to the other data plane.
        with self._open_map("backends") as backends:
            if backends is not None and (keys := b"".join(key for key, _ in backends.items())):
                backends.delete_batch(keys)
        return now

    def _make_passive(self) -> None:
        """Makes the programs passive. If mode bpf returns before the drain has ended, they accept
        new connections only once everything is in place.
        """
        with self._open_map("node") as node_map:
            node = node_map.lookup(bytes(U32.size)) if node_map is not None else None
            if node_map is not None and node and any(node):
                own4, own6, flags, *rest = NODE.unpack(node)
                flags = (NodeFlag(flags) | NodeFlag.PASSIVE) & ~NodeFlag.COEXISTING
                node_map.update(bytes(U32.size), NODE.pack(own4, own6, flags, *rest))

    def _remove_idle(self) -> int:
        """Counts the open connections of the packet path and deletes ended flows, since their
        clients may reuse the ports. Sockets connected by a hook need no program any more.
        """
        now = time.monotonic_ns()
        with self._open_map("flows") as flows:
            entries = dict(flows.items()) if flows is not None else {}
            open_flows = {
                raw[ENDPOINTS]
                for raw in entries.values()
                if is_original(raw) and not is_port_reservation(raw) and _is_open(raw, now)
            }
            ended = [key for key, raw in entries.items() if raw[ENDPOINTS] not in open_flows]
            if flows is not None and ended:
                flows.delete_batch(b"".join(ended))
        return len(open_flows)

    @contextmanager
    def _open_map(self, name: str) -> Iterator[Map | None]:
        """None if the map does not exist, or if another version laid it out differently."""
        if (self._pins.maps / name).exists():
            with self._pins.open_map(name) as map_:
                yield map_
        else:
            yield None

    def _remove(self) -> None:
        """Removes everything except the rule in FORWARD, which all modes use."""
        packet_path.remove_programs(self._pins)
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


def _is_open(flow: bytes, now: int) -> bool:
    """Whether this struct flow belongs to a connection that is open at `now` (ns,
    CLOCK_MONOTONIC).
    """
    if flow[PROTOCOL] == Protocol.UDP or flow[STATE] == TcpState.CLOSED:
        return False
    return now <= expires_at(flow)
