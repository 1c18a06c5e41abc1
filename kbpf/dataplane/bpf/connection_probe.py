# SPDX-License-Identifier: Apache-2.0
"""Proves from within the agent that connections to Services are translated: the agent connects to a
ClusterIP of each protocol and family, without a packet, and looks where its socket leads.

- No packet is sent (dial.connect_without_packets()), so no backend and no peer notices anything.
- A call looks at PROBED_ENTRIES frontends and makes at most four connections; the next call
  continues with the following frontends. It takes some milliseconds, and with 100,000 sockets on
  the node about a tenth of a second, since the kernel lists all of them to show one.
- Each counts as an opened connection of its Service.
- Only what contradicts the maps is a failure. If there is no route to the backend, or the frontend
  changes meanwhile, nothing has been tried.
- The agent's own socket may be out of the hooks' reach: exempt, or in a cgroup that is not below
  the hooked one. So a failure counts only once a connection of this process has been translated.
"""

import socket
from collections.abc import Iterator
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.layout import U32, U32_PAIR, ServiceFlag, ServiceValue
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.state.contents import is_valid_entry, unpack_address, unpack_backend
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.net import dial
from kbpf.model.address import family_of, format_addr
from kbpf.model.config import Config, SocketLb
from kbpf.model.desired import Backend, FrontendAddress
from kbpf.model.metrics import ConnectionProbe
from kbpf.model.objects import Protocol

PROBED_ENTRIES: Final = 256
MAX_BACKENDS: Final = 64
"""Larger sets are not probed: each backend is a look-up."""
SOCKET_TYPES: Final = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}
UNSUITABLE: Final = ServiceFlag.RESTRICTED | ServiceFlag.INTERNAL_LOCAL


class _Target(NamedTuple):
    frontend: FrontendAddress
    key: bytes
    value: bytes
    backends: frozenset[Backend]


class ConnectionProber:
    """Used by one thread."""

    def __init__(self, pins: Pins, config: Config) -> None:
        self._pins, self._is_on = pins, config.socket_lb is not SocketLb.OFF
        self._cursor: bytes | None = None
        self._was_translated = False

    def probe(self) -> ConnectionProbe | None:
        """See SharedAccess.probe_connections()."""
        if not self._is_on:
            return None
        try:
            with (
                self._pins.open_map("services") as services,
                self._pins.open_map("backend_slots") as slots,
                self._pins.open_map("backends") as backends,
            ):
                lines = [self._connect(services, target) for target in self._select(services, slots, backends)]
        except KernelError:
            return None
        tried = [line for line in lines if line is not None]
        self._was_translated = self._was_translated or "" in tried
        if not tried or not self._was_translated:
            return None
        return ConnectionProbe(len(tried), tuple(filter(None, tried)))

    def _select(self, services: Map, slots: Map, backends: Map) -> Iterator[_Target]:
        """The first suitable frontend of each family and protocol among the next entries."""
        keys, values, self._cursor = services.lookup_batch(self._cursor, PROBED_ENTRIES)
        chosen: set[tuple[int, Protocol]] = set()
        for key, raw in services.split(keys, values):
            value = ServiceValue.unpack(raw)
            if not is_valid_entry("services", key, raw) or not _is_suitable(value):
                continue
            frontend = unpack_address(key)
            kind = family_of(frontend.address), frontend.protocol
            if kind in chosen or frontend.protocol not in SOCKET_TYPES:
                continue
            if members := _read_backends(value, slots, backends):
                chosen.add(kind)
                yield _Target(frontend, key, raw, members)

    def _connect(self, services: Map, target: _Target) -> str | None:
        """Returns "" if it was translated, None if nothing was tried, otherwise what happened."""
        frontend = target.frontend
        place = format_addr(frontend.address), frontend.port
        try:
            destination, _ = dial.connect_without_packets(place, SOCKET_TYPES[frontend.protocol])
        except KernelError as error:
            if error.errno not in dial.REFUSALS:
                return None  # there is no route, or no right to connect
            line = f"{frontend} from the agent: {error}"
        else:
            if destination in {(format_addr(b.address), b.port) for b in target.backends}:
                return ""
            line = f"{frontend} from the agent leads to {destination[0]} port {destination[1]}, which is not a backend"
        return line if services.lookup(target.key) == target.value else None


def _is_suitable(value: ServiceValue) -> bool:
    """Whether connections from this node may reach any backend of its cluster set, and leave no
    affinity behind.
    """
    return bool(
        value.flags & ServiceFlag.CLUSTER_IP
        and not value.flags & UNSUITABLE
        and not value.affinity_timeout
        and not value.cluster_table
        and 0 < value.cluster_size <= MAX_BACKENDS
    )


def _read_backends(value: ServiceValue, slots: Map, backends: Map) -> frozenset[Backend]:
    """The backends of the set; none if it is being replaced."""
    raw_ids = [slots.lookup(U32_PAIR.pack(value.cluster_set, index)) for index in range(value.cluster_size)]
    raw_backends = [backends.lookup(raw or U32.pack(0)) for raw in raw_ids]
    if not all(raw_backends):
        return frozenset()
    return frozenset(unpack_backend(raw) for raw in raw_backends if raw)
